#include "map.h"

#include "../base/blocks.h"
#include "../base/dispatch.h"
#include "../base/machine.h"
#include "../base/parallel.h"

namespace rg {
namespace {

MapView& view_of(MapCall& call, int v) { return v < call.operands ? call.operand[v] : call.result[v - call.operands]; }

int64_t bytes_of(MapElement element) {
    switch (element) {
        case MapElement::f64:
        case MapElement::i64:
            return 8;
        case MapElement::f32:
        case MapElement::i32:
            return 4;
        case MapElement::boolean:
            return 1;
    }
    return 1;
}

template <class A>
constexpr MapElement kOwnElement = MapElement::i64;
template <>
constexpr MapElement kOwnElement<float> = MapElement::f32;
template <>
constexpr MapElement kOwnElement<double> = MapElement::f64;

template <class A>
const MapKernels<A>& map_kernels() {
    if constexpr (std::is_same_v<A, int64_t>) {
        return kernel_table().map_integers;
    } else {
        return kernel_table().map.of<A>();
    }
}

template <class A>
A value_of(MapConstant constant) {
    if constexpr (std::is_same_v<A, int64_t>) {
        return constant.integer;
    } else {
        return A(constant.real);
    }
}

// How the iteration space is cut: a block has part[i] of the elements of axis i. Either it is a run of elements in
// iteration order, or, where operands are transposed, a tile of two axes.
struct MapGrid {
    int64_t part[kMapAxes], count[kMapAxes], blocks = 1, largest = 1;
    int first = 0;  // the outermost axis of which a block has more than one element
    bool tiles = false;

    MapGrid(const MapCall& call, int64_t most) {
        for (int i = 0; i < call.axes; ++i) part[i] = 1;
        const int last = call.axes - 1;
        first = call.axes;
        // Axes that could be merged for every view have been: over several of them, some view is not contiguous.
        if (last >= 0 && call.extent[last] >= kLongRun) most = std::min(most, call.extent[last]);
        const int other = transposed_axis(call);
        if (other >= 0) {
            tiles = true;
            first = other;
            part[other] = even_part(call.extent[other], kTileRows);
            part[last] = even_part(call.extent[last], std::max<int64_t>(kTileRows, most / kTileRows));
        } else {
            int64_t inner = 1;
            for (int i = last; i >= 0 && most / inner > 1; --i) {
                part[i] = call.extent[i] <= most / inner ? call.extent[i] : even_part(call.extent[i], most / inner);
                first = i;
                if (part[i] < call.extent[i]) break;
                inner *= part[i];
            }
        }
        for (int i = 0; i < call.axes; ++i) {
            count[i] = ceil_div(call.extent[i], part[i]);
            blocks *= count[i];
            largest *= part[i];
        }
    }

    static constexpr int64_t kTileRows = 32;
    static constexpr int64_t kLongRun = 512;  // elements of a block that is worth its overhead

    // Parts of at most `most` elements, of almost equal size.
    static int64_t even_part(int64_t extent, int64_t most) {
        const int64_t part = ceil_div(extent, ceil_div(extent, most));
        return std::min(most, most >= 64 ? ceil_div(part, 16) * 16 : part);
    }
    // An axis along which an operand is contiguous while it has a stride along the last axis; -1: none.
    static int transposed_axis(const MapCall& call) {
        const int last = call.axes - 1;
        for (int v = 0; v < call.operands; ++v) {
            const int64_t* stride = call.operand[v].stride;
            if (last < 1 || magnitude(stride[last]) < 16 || call.extent[last] < 8) continue;
            for (int i = 0; i < last; ++i) {
                if (magnitude(stride[i]) == 1 && call.extent[i] >= 8) return i;
            }
        }
        return -1;
    }
};

// Where a block is, and its size along each axis.
struct MapBlock {
    int64_t start[kMapAxes], size[kMapAxes], elements = 1;

    MapBlock(const MapCall& call, const MapGrid& grid, int64_t index) {
        for (int i = call.axes - 1; i >= 0; --i) {
            int64_t at = index;
            if (i > 0) {
                at = remainder(index, grid.count[i]);
                index = quotient(index, grid.count[i]);
            }
            start[i] = at * grid.part[i];
            size[i] = std::min(grid.part[i], call.extent[i] - start[i]);
            elements *= size[i];
        }
    }
    int64_t offset(const MapCall& call, const MapView& view) const {
        int64_t sum = 0;
        for (int i = 0; i < call.axes; ++i) sum += start[i] * view.stride[i];
        return sum;
    }
};

// How a block of an operand reaches the steps.
enum class Reach { in_place, uniform, staged };

bool same_array(const MapCall& call, const MapView& a, const MapView& b) {
    if (a.data != b.data) return false;
    for (int i = 0; i < call.axes; ++i) {
        if (a.stride[i] != b.stride[i]) return false;
    }
    return true;
}

template <class A>
struct MapScratch {
    Buffer buffer;
};

template <class A>
class MapRun {
public:
    explicit MapRun(const MapCall& map) : call(map), kernels(map_kernels<A>()), stream(streams()), grid(make_grid()) {
        plan(grid.tiles);
    }

    void run() const {
        double cost = 0;
        for (int s = 0; s < call.steps; ++s) cost += kMapOperations[int(call.step[s].operation)].cost;
        for (int v = 0; v < call.operands; ++v) cost += reach[v] == Reach::staged ? 4 * cost::kCopy : cost::kCopy;
        for (int r = 0; r < call.results; ++r) cost += target[r] < 0 ? 2 * cost::kCopy : cost::kCopy;
        double elements = 1;
        for (int i = 0; i < call.axes; ++i) elements *= double(call.extent[i]);
        Workers(cost * elements, call.threads).ranges(grid.blocks, [&](int64_t first, int64_t last) {
            run_range(first, last);
        });
    }

private:
    static constexpr int64_t kUniform = 64 / int64_t(sizeof(A));  // elements of a cache line
    static constexpr int64_t kBudget = 24576;                     // bytes of all blocks: of a small first-level cache

    // A first plan, for any grid of runs, counts the blocks of scratch; their number decides how large a block is.
    MapGrid make_grid() {
        first_inner = 0;
        plan(false);
        int64_t most = 8192;
        if (slots || call.steps > 1) {
            most = kBudget / ((slots + call.operands + call.results) * int64_t(sizeof(A))) / 64 * 64;
            most = std::max<int64_t>(most, 256);
        }
        MapGrid cut(call, most);
        first_inner = cut.first;
        return cut;
    }

    bool streams() const {
        int64_t bytes = 0, elements = 1;
        for (int i = 0; i < call.axes; ++i) elements *= call.extent[i];
        for (int r = 0; r < call.results; ++r) bytes += elements * bytes_of(call.result[r].element);
        for (int v = 0; v < call.operands; ++v) {
            int64_t distinct = 1;
            for (int i = 0; i < call.axes; ++i) distinct *= call.operand[v].stride[i] ? call.extent[i] : 1;
            bytes += distinct * bytes_of(call.operand[v].element);
        }
        return exceeds_caches(bytes);
    }

    // Whether the elements of a block are contiguous, or all the same one.
    bool linear(const MapView& view, bool tiles) const {
        if (tiles) return false;
        int64_t step = 1;
        for (int i = call.axes - 1; i >= first_inner; --i) {
            if (view.stride[i] != step) return false;
            step *= call.extent[i];
        }
        return true;
    }
    bool uniform(const MapView& view) const {
        for (int i = first_inner; i < call.axes; ++i) {
            if (view.stride[i] != 0) return false;
        }
        return true;
    }
    int first_step_register() const { return call.operands + call.constants; }
    bool is_result(int reg) const {
        for (int r = 0; r < call.results; ++r) {
            if (call.source[r] == reg) return true;
        }
        return false;
    }
    bool aliases_result(int operand) const {
        for (int r = 0; r < call.results; ++r) {
            if (same_array(call, call.operand[operand], call.result[r])) return true;
        }
        return false;
    }
    // The last step that reads a register; -1: none.
    int last_use(int reg) const {
        for (int s = call.steps - 1; s >= 0; --s) {
            const MapStep& step = call.step[s];
            for (int k = 0; k < kMapOperations[int(step.operation)].arity; ++k) {
                if (step.argument[k] == reg) return s;
            }
        }
        return -1;
    }
    // Whether the step that makes result r may write it directly: contiguous, and no later step reads what is
    // overwritten.
    bool direct(int r, bool tiles) const {
        const MapView& view = call.result[r];
        if (view.element != kOwnElement<A> || !linear(view, tiles)) return false;
        if (streamed[r] && last_use(call.source[r]) >= 0) return false;
        for (int v = 0; v < call.operands; ++v) {
            if (same_array(call, call.operand[v], view) && last_use(v) > call.source[r] - first_step_register()) {
                return false;
            }
        }
        return true;
    }

    void plan(bool tiles) {
        const int base = first_step_register(), registers = base + call.steps;
        bool taken[kMapRegisters] = {};
        slots = 0;
        for (int reg = 0; reg < registers; ++reg) slot[reg] = -1;
        for (int v = 0; v < call.operands; ++v) {
            const MapView& view = call.operand[v];
            // What is written to a result is a whole block, and must not be overwritten before that.
            const bool shown = is_result(v), alias = shown && aliases_result(v);
            reach[v] = view.element == kOwnElement<A> && linear(view, tiles) && !alias ? Reach::in_place
                       : uniform(view) && !shown                                       ? Reach::uniform
                                                                                       : Reach::staged;
        }
        for (int k = 0; k < call.constants; ++k) {
            if (is_result(call.operands + k)) slot[call.operands + k] = take(taken);
        }
        for (int v = 0; v < call.operands; ++v) loaded_into[v] = -1;
        for (int r = 0; r < call.results; ++r) {
            target[r] = -1;
            streamed[r] = stream && call.result[r].element == kOwnElement<A>;
            for (int v = 0; v < call.operands && streamed[r]; ++v) {
                streamed[r] = !same_array(call, call.operand[v], call.result[r]);
            }
        }
        // An operand that has to be converted or gathered, and is a result itself, is loaded into the result.
        for (int r = 0; r < call.results; ++r) {
            const int v = call.source[r];
            if (v >= call.operands || reach[v] != Reach::staged || streamed[r] || loaded_into[v] >= 0) continue;
            bool alone = call.result[r].element == kOwnElement<A> && linear(call.result[r], tiles);
            for (int w = 0; w < call.operands; ++w) alone = alone && !same_array(call, call.operand[w], call.result[r]);
            if (alone) loaded_into[v] = r, target[r] = v;
        }
        for (int v = 0; v < call.operands; ++v) {
            if (reach[v] == Reach::staged && loaded_into[v] < 0) slot[v] = take(taken);
        }
        for (int s = 0; s < call.steps; ++s) {
            const int reg = base + s;
            written[s] = -1;
            for (int r = 0; r < call.results && written[s] < 0; ++r) {
                if (call.source[r] == reg && direct(r, tiles)) written[s] = r, target[r] = reg;
            }
            const MapStep& step = call.step[s];
            for (int k = 0; k < kMapOperations[int(step.operation)].arity; ++k) {
                const int from = step.argument[k];
                if (from >= base && slot[from] >= 0 && last_use(from) == s && !is_result(from)) {
                    taken[slot[from]] = false;
                }
            }
            if (written[s] < 0) slot[reg] = take(taken);
        }
    }
    int take(bool* taken) {
        int i = 0;
        while (taken[i]) ++i;
        taken[i] = true;
        slots = std::max(slots, i + 1);
        return i;
    }

    // A block of an operand into scratch, two axes at a time.
    void load(const MapView& view, const MapBlock& block, const char* from, A* to) const {
        const int64_t size = bytes_of(view.element);
        for_planes(view, block, [&](int64_t offset, BlockSize plane, int64_t row, int64_t col, int64_t done) {
            kernels.load(view.element, from + offset * size, plane, row, col, to + done);
        });
    }
    void store(const MapView& view, const MapBlock& block, const A* from, char* to, bool streaming) const {
        const int64_t size = bytes_of(view.element);
        for_planes(view, block, [&](int64_t offset, BlockSize plane, int64_t row, int64_t col, int64_t done) {
            kernels.store(view.element, from + done, plane, to + offset * size, row, col, streaming);
        });
    }
    template <class Each>
    void for_planes(const MapView& view, const MapBlock& block, const Each& each) const {
        // The block's axes that have more than one element, merged where the view is contiguous over both.
        int64_t size[kMapAxes + 2], stride[kMapAxes + 2];
        int axes = 0;
        for (int i = first_inner; i < call.axes; ++i) {
            if (block.size[i] == 1) continue;
            if (axes && stride[axes - 1] == view.stride[i] * block.size[i]) {
                size[axes - 1] *= block.size[i];
                stride[axes - 1] = view.stride[i];
            } else {
                size[axes] = block.size[i];
                stride[axes++] = view.stride[i];
            }
        }
        for (; axes < 2; ++axes) {  // the missing axes have one element
            size[axes] = axes ? size[axes - 1] : 1;
            stride[axes] = axes ? stride[axes - 1] : 0;
            if (axes) size[axes - 1] = 1, stride[axes - 1] = 0;
        }
        const BlockSize plane = {size[axes - 2], size[axes - 1]};
        int64_t index[kMapAxes] = {}, offset = 0;
        for (int64_t done = 0;; done += plane.rows * plane.cols) {
            each(offset, plane, stride[axes - 2], stride[axes - 1], done);
            int i = axes - 3;
            for (; i >= 0; --i) {
                offset += stride[i];
                if (++index[i] < size[i]) break;
                offset -= index[i] * stride[i];
                index[i] = 0;
            }
            if (i < 0) return;
        }
    }

    // A block of a result that is written in place.
    A* own_block(const MapView& view, const MapBlock& block) const {
        return reinterpret_cast<A*>(view.data) + block.offset(call, view);
    }

    void run_range(int64_t first, int64_t last) const {
        const int base = first_step_register();
        const int64_t room = ceil_div(grid.largest, kUniform) * kUniform;
        A* const scratch =
            kept_by_thread<MapScratch<A>>().buffer.template take<A>(room * slots + kMapInputs * kUniform);
        A* const lines = scratch + room * slots;
        MapArgument<A> reg[kMapRegisters];
        const char* loaded[kMapInputs] = {};  // what a block of scratch holds
        int64_t loaded_elements = -1;
        for (int k = 0; k < call.constants; ++k) {
            const int r = call.operands + k;
            A* const to = slot[r] >= 0 ? scratch + slot[r] * room : lines + r * kUniform;
            std::fill_n(to, slot[r] >= 0 ? room : kUniform, value_of<A>(call.constant[k]));
            reg[r] = {to, slot[r] >= 0 ? 1 : 0};
        }
        for (int64_t index = first; index < last; ++index) {
            const MapBlock block(call, grid, index);
            for (int v = 0; v < call.operands; ++v) {
                const MapView& view = call.operand[v];
                const char* from = view.data + block.offset(call, view) * bytes_of(view.element);
                if (reach[v] == Reach::in_place) {
                    reg[v] = {reinterpret_cast<const A*>(from), 1};
                    continue;
                }
                A* const to = reach[v] == Reach::uniform ? lines + v * kUniform
                              : loaded_into[v] >= 0      ? own_block(call.result[loaded_into[v]], block)
                                                         : scratch + slot[v] * room;
                reg[v] = {to, reach[v] == Reach::uniform ? 0 : 1};
                // The size of a block along each axis follows from how many elements it has and where it starts.
                if (loaded[v] == from && (loaded_elements == block.elements || reach[v] == Reach::uniform) &&
                    loaded_into[v] < 0 && !grid.tiles) {
                    continue;
                }
                loaded[v] = from;
                if (reach[v] == Reach::uniform) {
                    kernels.load(view.element, from, {1, kUniform}, 0, 0, to);
                } else {
                    load(view, block, from, to);
                }
            }
            loaded_elements = block.elements;
            for (int s = 0; s < call.steps; ++s) {
                const MapStep& step = call.step[s];
                const int r = written[s];
                A* const out = r < 0 ? scratch + slot[base + s] * room : own_block(call.result[r], block);
                const MapArgument<A> arguments[3] = {reg[step.argument[0]], reg[step.argument[1]],
                                                     reg[step.argument[2]]};
                kernels.run(step.operation, arguments, block.elements, out, r >= 0 && streamed[r]);
                reg[base + s] = {out, 1};
            }
            for (int r = 0; r < call.results; ++r) {
                if (target[r] >= 0) continue;
                const MapView& view = call.result[r];
                store(view, block, reg[call.source[r]].data,
                      view.data + block.offset(call, view) * bytes_of(view.element), streamed[r]);
            }
        }
    }

    const MapCall& call;
    const MapKernels<A>& kernels;
    bool stream;
    int first_inner = 0;
    int slots = 0;
    Reach reach[kMapInputs];
    int slot[kMapRegisters];      // a register's block of scratch; -1: none
    int written[kMapSteps];       // the result that a step writes directly; -1: none
    int loaded_into[kMapInputs];  // the result that an operand is loaded into; -1: none
    int target[kMapResults];      // the register that is written to a result directly; -1: it is stored after all steps
    bool streamed[kMapResults];
    MapGrid grid;
};

}  // namespace

bool add_axis(MapCall& call, int64_t extent, const int64_t* strides) {
    if (extent == 1) return true;
    const int views = call.operands + call.results, last = call.axes - 1;
    bool joins = last >= 0;
    for (int v = 0; v < views && joins; ++v) joins = view_of(call, v).stride[last] == strides[v] * extent;
    if (!joins && call.axes == kMapAxes) return false;
    const int at = joins ? last : call.axes++;
    call.extent[at] = joins ? call.extent[at] * extent : extent;
    for (int v = 0; v < views; ++v) view_of(call, v).stride[at] = strides[v];
    return true;
}

void sort_axes(MapCall& call) {
    if (call.axes < 2 || call.results == 0) return;
    const int views = call.operands + call.results, axes = call.axes;
    int order[kMapAxes];
    bool sorted = true;
    for (int i = 0; i < axes; ++i) {
        int j = i;
        const int64_t stride = magnitude(call.result[0].stride[i]);
        for (; j > 0 && magnitude(call.result[0].stride[order[j - 1]]) < stride; --j) order[j] = order[j - 1];
        sorted = sorted && j == i;
        order[j] = i;
    }
    if (sorted) return;
    int64_t extent[kMapAxes], strides[kMapAxes][kMapViews];
    for (int i = 0; i < axes; ++i) {
        extent[i] = call.extent[order[i]];
        for (int v = 0; v < views; ++v) strides[i][v] = view_of(call, v).stride[order[i]];
    }
    call.axes = 0;
    for (int i = 0; i < axes; ++i) add_axis(call, extent[i], strides[i]);
}

void run_map(const MapCall& call) {
    for (int i = 0; i < call.axes; ++i) {
        if (call.extent[i] == 0) return;
    }
    switch (call.arithmetic) {
        case MapArithmetic::f32:
            return MapRun<float>(call).run();
        case MapArithmetic::f64:
            return MapRun<double>(call).run();
        case MapArithmetic::i64:
            return MapRun<int64_t>(call).run();
    }
}

}  // namespace rg
