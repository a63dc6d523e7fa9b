#include "norm.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <new>

#include "dispatch.h"
#include "parallel.h"

namespace rg {
namespace {

// ---- sizes, all of them functions of the shape ---------------------------------------------------------------------

constexpr int64_t kTile = 4096;          // elements of a staged block: 16 KiB of float, a third of a first-level cache
constexpr int64_t kColumns = 2048;       // columns of a block of columns; their sums and statistics fill 50 KiB
constexpr int64_t kChunkRows = 64;       // rows that share one partial sum per column, at the least
constexpr int64_t kMaxParts = 64;        // partial sums per column, and groups of samples, at the most
constexpr int64_t kCenterRows = 32;      // rows of columns whose mean is what moments are taken about
constexpr int64_t kCenterElements = 64;  // likewise elements of planes and long rows
constexpr int64_t kRowGroup = 8;         // short rows handled together

constexpr int64_t kMinParallel = 8192;   // elements below which the team is not even told: it would take as long
constexpr int64_t kMinWake = 131072;     // elements below which sleeping members are left asleep
constexpr int64_t kMinStream = 2 << 20;  // bytes of a result above which it cannot be expected to stay in cache

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Indices are taken apart for every block, mostly by 1, and a division costs as much as a short row.
int64_t quotient(int64_t a, int64_t b) { return b == 1 ? a : a / b; }
int64_t remainder(int64_t a, int64_t b) { return b == 1 ? 0 : a % b; }

// Bytes of a core's second-level cache that can be counted on. Only the order of work depends on it.
int64_t cache_bytes() {
    static const int64_t bytes = [] {
        long found = -1;
#if defined(_SC_LEVEL2_CACHE_SIZE)
        found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        return (found > 0 ? int64_t(found) : int64_t(1) << 20) * 7 / 8;
    }();
    return bytes;
}

// ---- scratch -------------------------------------------------------------------------------------------------------

// A buffer that its thread keeps from call to call. Its contents last until a larger one is taken.
class Buffer {
public:
    ~Buffer() { free(data_); }
    template <class T>
    T* take(int64_t count) {
        const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > capacity_) {
            release();
            if (posix_memalign(&data_, 64, std::max(bytes, kLeast)) != 0) throw std::bad_alloc();
            capacity_ = std::max(bytes, kLeast);
        }
        return static_cast<T*>(data_);
    }
    void trim() {
        if (capacity_ > kKeep) release();
    }

private:
    void release() {
        free(data_);
        data_ = nullptr;
        capacity_ = 0;
    }

    static constexpr size_t kLeast = 4096, kKeep = 16u << 20;
    void* data_ = nullptr;
    size_t capacity_ = 0;
};

// What a thread needs while it works on one block.
template <class A>
struct Tile {
    alignas(64) A x[kTile], y[kTile], dz[kTile], out[kTile];
};
template <class A>
Tile<A>& my_tile() {
    static thread_local Tile<A> tile;
    return tile;
}

struct CallScratch {
    Buffer partial, totals, coefficients, centers;
};
CallScratch& my_call_scratch() {
    static thread_local CallScratch scratch;
    return scratch;
}
struct SetScratch {
    Buffer partial, coefficients;
};
SetScratch& my_set_scratch() {
    static thread_local SetScratch scratch;
    return scratch;
}

// ---- geometry ------------------------------------------------------------------------------------------------------

int64_t magnitude(int64_t v) { return v < 0 ? -v : v; }

// Drops axes of extent 1 and joins neighbours that are one axis in every view.
void simplify(AxisList& list) {
    int size = 0;
    for (int i = 0; i < list.size; ++i) {
        const Axis axis = list.axis[i];
        if (axis.extent == 1) continue;
        Axis* last = size ? &list.axis[size - 1] : nullptr;
        bool joins = last;
        for (int v = 0; v < kViews && joins; ++v) joins = last->stride[v] == axis.stride[v] * axis.extent;
        if (joins) {
            const int64_t extent = last->extent * axis.extent;
            *last = axis;
            last->extent = extent;
        } else {
            list.axis[size++] = axis;
        }
    }
    list.size = size;
}

struct Offsets {
    int64_t at[kViews] = {};
    void add(const Axis& axis, int64_t index) {
        for (int v = 0; v < kViews; ++v) at[v] += axis.stride[v] * index;
    }
    // index counts through axes [0, axes) of the list, the last fastest
    void add(const AxisList& list, int axes, int64_t index) {
        for (int i = axes - 1; i > 0; --i) {
            add(list.axis[i], index % list.axis[i].extent);
            index /= list.axis[i].extent;
        }
        if (axes > 0) add(list.axis[0], index);
    }
};

// Planes run along R, rows along C with R = 1 and one set a row, columns along C otherwise.
enum class Family { plane, row, column };

struct Geometry {
    AxisList n, c, r;
    int64_t N, C, R, K, sets_per_n;
    Family family;

    explicit Geometry(const NormShape& shape) : n(shape.n), c(shape.c), r(shape.r), K(shape.channels_per_set) {
        N = n.extent();
        C = c.extent();
        R = r.extent();
        sets_per_n = C / std::max<int64_t>(1, K);
        // The order inside a set is free: the smallest stride goes last.
        for (int i = 1; i < r.size; ++i) {
            for (int j = i; j > 0 && magnitude(r.axis[j - 1].stride[kX]) < magnitude(r.axis[j].stride[kX]); --j) {
                std::swap(r.axis[j - 1], r.axis[j]);
            }
        }
        simplify(n);
        simplify(c);
        simplify(r);
        const int64_t r_step = r.size ? magnitude(r.axis[r.size - 1].stride[kX]) : 0;
        const int64_t c_step = c.size ? magnitude(c.axis[c.size - 1].stride[kX]) : 0;
        if (R == 1 && K == C) {
            family = Family::row;
        } else if (R > 1 && (C == 1 || r_step <= c_step)) {
            family = Family::plane;
        } else {
            family = Family::column;
        }
    }
    int64_t elements() const { return N * C * R; }
    double set_size() const { return double(K) * double(R); }
};

// A block of elements: `rows` runs of `cols`, found at `offset` in each view.
struct Block {
    Offsets offset;
    int64_t rows = 1, cols = 1;
    const Axis* row_axis = nullptr;      // null: one row
    const AxisList* col_axes = nullptr;  // columns run along the last of these, or along all of them if all_axes
    bool all_axes = false;
    int64_t first_col = 0;  // with all_axes: where in the row the block starts
    int64_t ahead = 0;      // elements from here to the block that will be read next

    int64_t row_stride(int view) const { return row_axis ? row_axis->stride[view] : 0; }
    int64_t col_stride(int view) const { return col_axes->size ? col_axes->axis[col_axes->size - 1].stride[view] : 1; }
};

// The R-space of one channel as blocks of at most kTile elements.
struct PlaneGrid {
    const AxisList& r;
    int64_t cols, rows, cols_per_block, rows_per_block, pieces, row_blocks, blocks;

    explicit PlaneGrid(const AxisList& r_axes) : r(r_axes) {
        cols = r.size ? r.axis[r.size - 1].extent : 1;
        rows = r.size > 1 ? r.axis[r.size - 2].extent : 1;
        pieces = ceil_div(cols, kTile);
        cols_per_block = ceil_div(ceil_div(cols, pieces), 64) * 64;
        row_blocks = pieces > 1 ? rows : ceil_div(rows, std::max<int64_t>(1, kTile / cols));
        rows_per_block = ceil_div(rows, row_blocks);
        row_blocks = ceil_div(rows, rows_per_block);
        blocks = r.extent() / (rows * cols) * row_blocks * pieces;
    }
    void place(int64_t index, Block& block) const {
        const int64_t piece = remainder(index, pieces), row = quotient(index, pieces);
        const int64_t row_block = remainder(row, row_blocks);
        block.cols = std::min(cols_per_block, cols - piece * cols_per_block);
        block.rows = std::min(rows_per_block, rows - row_block * rows_per_block);
        block.col_axes = &r;
        if (r.size) block.offset.add(r.axis[r.size - 1], piece * cols_per_block);
        if (r.size > 1) {
            block.row_axis = &r.axis[r.size - 2];
            block.offset.add(*block.row_axis, row_block * rows_per_block);
            block.offset.add(r, r.size - 2, quotient(row, row_blocks));
        }
    }
};

// ---- blocks in and out ---------------------------------------------------------------------------------------------

template <class A>
constexpr DType kOwnType = sizeof(A) == sizeof(float) ? DType::f32 : DType::f64;

int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

template <class A>
struct Run {
    A* data;
    int64_t stride;  // from row to row
    int64_t ahead;   // to where the next block will be read; 0 for one that was staged
};

// Reads and writes blocks as arithmetic, in place where the storage allows and through the thread's tile where not.
template <class A>
class Storage {
public:
    Storage(const KernelTable& table, DType dtype, const Activation& activation)
        : kernels(norm_kernels<A>(table)), dtype_(dtype), size_(element_size(dtype)), activation_(activation) {}

    const NormKernels<A>& kernels;

    bool has_activation() const { return activation_.kind != ActivationKind::identity; }
    bool in_place(const Block& b, int view) const {
        return dtype_ == kOwnType<A> && !b.all_axes && (b.cols == 1 || b.col_stride(view) == 1);
    }

    Run<const A> read(const void* base, int view, const Block& b, A* scratch) const {
        const char* start = static_cast<const char*>(base) + b.offset.at[view] * size_;
        if (in_place(b, view)) return {reinterpret_cast<const A*>(start), b.row_stride(view), b.ahead};
        load(start, view, b, scratch);
        return {scratch, b.cols, 0};
    }

    // dy times the activation's slope: by the kernel that reads it if that can, else staged.
    Gradient<A> read_dz(const void* dy, const void* y, const Block& b, Tile<A>& tile) const {
        const Run<const A> g = read(dy, kDy, b, tile.dz);
        if (!has_activation()) return {g.data, g.data, g.stride, 0, g.ahead, ActivationKind::identity};
        const Run<const A> out = read(y, kY, b, tile.y);
        if (is_fused(activation_.kind)) return {g.data, out.data, g.stride, out.stride, g.ahead, activation_.kind};
        for (int64_t row = 0; row < b.rows; ++row) {
            kernels.apply_slope(activation_, out.data + row * out.stride, g.data + row * g.stride, b.cols,
                                tile.dz + row * b.cols);
        }
        return {tile.dz, tile.dz, b.cols, 0, 0, ActivationKind::identity};
    }

    // What a kernel is to apply to a result, and whether that leaves something to be done on the staged block.
    ActivationKind fused() const { return is_fused(activation_.kind) ? activation_.kind : ActivationKind::identity; }
    bool activates_staged() const { return !is_fused(activation_.kind); }

    // Where a kernel may put a block's result; finish() brings it home.
    Run<A> target(void* base, int view, const Block& b, Tile<A>& tile, bool direct, bool stream) const {
        A* start = reinterpret_cast<A*>(static_cast<char*>(base) + b.offset.at[view] * size_);
        if (direct && in_place(b, view) && (!stream || streams_well(b, view, start))) {
            return {start, b.row_stride(view), 0};
        }
        return {tile.out, b.cols, 0};
    }
    // Streamed rows that begin and end inside a cache line write those lines twice: where rows are short and follow
    // each other in memory, it is better to stream the block as one run.
    bool streams_well(const Block& b, int view, const A* start) const {
        const bool aligned = uintptr_t(start) % 64 == 0 && b.row_stride(view) * size_ % 64 == 0;
        return aligned || b.cols >= 1024 || b.row_stride(view) != b.cols;
    }
    void finish(void* base, int view, const Block& b, Run<A> result, Tile<A>& tile, bool accumulate,
                bool stream) const {
        if (result.data != tile.out) return;
        char* start = static_cast<char*>(base) + b.offset.at[view] * size_;
        const int64_t step = b.row_stride(view) * size_;
        if (b.all_axes) {
            scatter(start, view, b, accumulate);
        } else if (b.rows == 1 || (b.row_stride(view) == b.cols && b.col_stride(view) == 1)) {
            kernels.store(dtype_, tile.out, b.rows * b.cols, start, b.cols == 1 ? 1 : b.col_stride(view), accumulate,
                          stream);
        } else {
            for (int64_t row = 0; row < b.rows; ++row) {
                kernels.store(dtype_, tile.out + row * b.cols, b.cols, start + row * step, b.col_stride(view),
                              accumulate, stream);
            }
        }
    }
    void activate(const Block& b, Tile<A>& tile) const {
        kernels.activate(activation_, tile.out, b.rows * b.cols, tile.out);
    }

private:
    void load(const char* start, int view, const Block& b, A* dst) const {
        const int64_t step = b.row_stride(view) * size_;
        if (b.all_axes) {
            for (int64_t row = 0; row < b.rows; ++row) {
                for_runs(b, view, [&](int64_t offset, int64_t stride, int64_t done, int64_t count) {
                    kernels.load(dtype_, start + row * step + offset * size_, stride, count, dst + row * b.cols + done);
                });
            }
        } else if (b.rows == 1 || (b.row_stride(view) == b.cols && b.col_stride(view) == 1)) {
            kernels.load(dtype_, start, b.col_stride(view), b.rows * b.cols, dst);
        } else {
            for (int64_t row = 0; row < b.rows; ++row) {
                kernels.load(dtype_, start + row * step, b.col_stride(view), b.cols, dst + row * b.cols);
            }
        }
    }
    void scatter(char* start, int view, const Block& b, bool accumulate) const {
        const int64_t step = b.row_stride(view) * size_;
        const A* src = my_tile<A>().out;
        for (int64_t row = 0; row < b.rows; ++row) {
            for_runs(b, view, [&](int64_t offset, int64_t stride, int64_t done, int64_t count) {
                kernels.store(dtype_, src + row * b.cols + done, count, start + row * step + offset * size_, stride,
                              accumulate, false);
            });
        }
    }
    // A row that spreads over several axes, run by run along the last.
    template <class Each>
    void for_runs(const Block& b, int view, Each each) const {
        const AxisList& axes = *b.col_axes;
        const Axis& last = axes.axis[axes.size - 1];
        for (int64_t done = 0; done < b.cols;) {
            const int64_t col = b.first_col + done, inside = col % last.extent;
            const int64_t count = std::min(last.extent - inside, b.cols - done);
            Offsets at;
            at.add(axes, axes.size, col);
            each(at.at[view], last.stride[view], done, count);
            done += count;
        }
    }

    DType dtype_;
    int64_t size_;
    Activation activation_;
};

// ---- scheduling ----------------------------------------------------------------------------------------------------

struct Crew {
    int threads;
    bool wake;
    Crew(int64_t elements, int asked) : threads(elements < kMinParallel ? 1 : asked), wake(elements >= kMinWake) {}
    template <class Body>
    void each(int64_t items, const Body& body) const {
        parallel_for(items, threads, wake, body);
    }
    template <class Body>
    void ranges(int64_t items, const Body& body) const {
        parallel_ranges(items, threads, wake, body);
    }
};

// A pass over statistics sets: begin(set), collect(set, item) for every item, finish(set), apply(set, item) for every
// item. Sets are (n, s); samples come in groups so that sums over n need one partial result per group only.
struct Plan {
    int64_t N, sets_per_n, items, group_size, groups;
    bool phased;    // too few sets for the team: all sets go through each step together
    bool resident;  // a set stays in cache from collect to apply
    int64_t set_bytes;

    // bytes_per_set: what collect and apply read of a set
    Plan(const Geometry& g, int64_t items_per_set, int64_t bytes_per_set, const Crew& crew)
        : N(g.N),
          sets_per_n(g.family == Family::column ? 1 : g.sets_per_n),
          items(items_per_set),
          set_bytes(bytes_per_set) {
        group_size = ceil_div(N, kMaxParts);
        groups = ceil_div(N, group_size);
        resident = set_bytes <= cache_bytes();
        phased = crew.threads > 1 && items > 1 && group_size == 1 && N * sets_per_n < 2 * crew.threads;
    }
    int64_t sets() const { return N * sets_per_n; }
    // The sets of one group of samples at one place, i = group * sets_per_n + place.
    template <class Body>
    void for_sets(int64_t i, const Body& body) const {
        const int64_t first = quotient(i, sets_per_n) * group_size, place = remainder(i, sets_per_n);
        for (int64_t n = first; n < std::min(first + group_size, N); ++n) body(n * sets_per_n + place);
    }
    // Results that leave the cache, enough sets for everybody, and room for two of them and what is on its way.
    bool pipelines(bool stream) const { return stream && !phased && 3 * set_bytes <= cache_bytes(); }
};

// Blocks of planes, by set and item; a set's items are (channel, block of the channel).
struct PlaneBlocks {
    const Geometry& g;
    PlaneGrid grid;

    explicit PlaneBlocks(const Geometry& geometry) : g(geometry), grid(geometry.r) {}
    int64_t items() const { return g.K * grid.blocks; }
    int64_t sample(int64_t set) const { return g.N == 1 ? 0 : quotient(set, g.sets_per_n); }
    int64_t channel(int64_t set, int64_t item) const {
        const int64_t s = g.N == 1 ? set : remainder(set, g.sets_per_n);
        return s * g.K + quotient(item, grid.blocks);
    }
    Block block(int64_t set, int64_t item) const {
        Block b;
        b.offset.add(g.n, g.n.size, sample(set));
        b.offset.add(g.c, g.c.size, channel(set, item));
        grid.place(remainder(item, grid.blocks), b);
        return b;
    }
    // From a block to the set's next one: a channel's runs lie far apart, where the hardware does not look ahead.
    int64_t ahead(int64_t set, int64_t item, const Block& b) const {
        return item + 1 < items() ? block(set, item + 1).offset.at[kX] - b.offset.at[kX] : 0;
    }
};

template <class Pass>
void run(const Plan& plan, const Crew& crew, Pass& pass) {
    if (plan.phased) {
        const auto all = [&](auto step) {
            crew.each(plan.sets() * plan.items, [&](int64_t i) { step(i / plan.items, i % plan.items); });
        };
        crew.each(plan.sets(), [&](int64_t set) { pass.begin(set); });
        if (pass.collects()) all([&](int64_t set, int64_t item) { pass.collect(set, item); });
        crew.each(plan.sets(), [&](int64_t set) { pass.finish(set); });
        // In the same order, so that members meet again what they have read.
        if (pass.applies()) all([&](int64_t set, int64_t item) { pass.apply(set, item); });
        return;
    }
    crew.ranges(plan.groups * plan.sets_per_n, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            plan.for_sets(i, [&](int64_t set) {
                pass.begin(set);
                if (pass.collects()) {
                    for (int64_t item = 0; item < plan.items; ++item) pass.collect(set, item);
                }
                pass.finish(set);
                if (!pass.applies()) return;
                for (int64_t k = 0; k < plan.items; ++k) pass.apply(set, plan.resident ? k : plan.items - 1 - k);
            });
        }
    });
}

// The same for large results: one set is written while the next one's sums are collected, in one sweep.
template <class Pass>
void run_pipelined(const Plan& plan, const Crew& crew, Pass& pass) {
    crew.ranges(plan.groups * plan.sets_per_n, [&](int64_t first, int64_t last) {
        int64_t previous = -1;
        for (int64_t i = first; i < last; ++i) {
            plan.for_sets(i, [&](int64_t set) {
                pass.begin(set);
                for (int64_t item = 0; item < plan.items; ++item) {
                    previous < 0 ? pass.collect(set, item) : pass.apply_and_collect(previous, set, item);
                }
                pass.finish(set);
                previous = set;
            });
        }
        for (int64_t item = 0; item < plan.items; ++item) pass.apply(previous, item);
    });
}

// ---- statistics ----------------------------------------------------------------------------------------------------

struct Moments {
    double mean, m2;
};

// From sums about a center. Accepted unless the center was so far off that squares cancel (the error of m2 grows with
// 1 + distance^2 / var, here at most 5), or float's range was left: then the caller sums again in doubles.
template <class A>
bool accept(double center, const double* sums, double count, double eps, Moments& out) {
    const double share = 1 / count, shift = sums[0] * share, m2 = sums[1] - sums[0] * shift;
    out = {center + shift, m2 < 0 ? 0 : m2};
    if (!(sums[0] * shift <= 4 * m2)) return false;
    if (sizeof(A) == sizeof(double)) return true;
    // A lost square is below 1e-38: nothing beside any usual eps.
    return m2 < 1e36 && (eps > 1e-25 || m2 > count * 1e-30);
}

// The second of two wide passes, about the first one's mean.
Moments wide_moments(double center, const double* sums, double count) {
    // Infinite or missing data: the mean says which, and the variance is undefined (inf - inf).
    if (center - center != 0) return {center, std::numeric_limits<double>::quiet_NaN()};
    const double m2 = sums[1] - sums[0] * sums[0] / count;
    return {center + sums[0] / count, m2 < 0 ? 0 : m2};
}

template <class A>
struct SetStatistics {
    A center, rstd, offset;
    SetStatistics(double mean, double var, double eps) {
        const double r = 1 / sqrt(var + eps);
        center = A(mean);
        rstd = A(r);
        offset = A((double(center) - mean) * r);
    }
};

// ---- forward -------------------------------------------------------------------------------------------------------

template <class A>
struct ForwardContext {
    const NormForward& call;
    const Geometry& g;
    Storage<A> storage;
    const A *gamma, *beta;
    bool stream;

    ForwardContext(const NormForward& c, const Geometry& geometry)
        : call(c),
          g(geometry),
          storage(kernel_table(), c.dtype, c.activation),
          gamma(static_cast<const A*>(c.gamma)),
          beta(static_cast<const A*>(c.beta)),
          stream(g.elements() * element_size(c.dtype) >= kMinStream && c.x != c.y) {}

    int64_t set_bytes() const { return g.K * g.R * element_size(call.dtype); }
    double gamma_at(int64_t channel) const { return gamma ? double(gamma[channel]) : 1.0; }
    double beta_at(int64_t channel) const { return beta ? double(beta[channel]) : 0.0; }
    void put(int64_t set, const Moments& m, double count) const {
        call.mean[set] = m.mean;
        call.var[set] = m.m2 / count;
    }
    template <class Kernel>
    void write(const Block& b, Tile<A>& tile, Kernel kernel) const {
        const Run<A> out = storage.target(call.y, kY, b, tile, !storage.activates_staged(), stream);
        kernel(out, stream && out.data != tile.out);
        if (storage.activates_staged()) storage.activate(b, tile);
        storage.finish(call.y, kY, b, out, tile, false, stream);
    }
};

// Items are (channel of the set, block).
template <class A>
struct PlaneForward : ForwardContext<A> {
    using Base = ForwardContext<A>;
    using Base::call, Base::g, Base::storage;
    PlaneBlocks blocks;
    Plan plan;
    double *partial, *centers;

    PlaneForward(const NormForward& c, const Geometry& geometry, const Crew& crew)
        : Base(c, geometry), blocks(geometry), plan(geometry, blocks.items(), this->set_bytes(), crew) {
        CallScratch& scratch = my_call_scratch();
        partial = scratch.partial.take<double>(g.N * g.sets_per_n * items() * 2);
        centers = scratch.centers.take<double>(g.N * g.sets_per_n);
    }
    int64_t items() const { return blocks.items(); }
    bool collects() const { return !call.statistics_given; }
    bool applies() const { return call.y; }

    Run<const A> read_x(const Block& b) const { return storage.read(call.x, kX, b, my_tile<A>().x); }

    void begin(int64_t set) {
        if (!collects()) return;
        Block b = blocks.block(set, 0);
        b.rows = std::min(b.rows, ceil_div(kCenterElements, b.cols));
        b.cols = std::min(b.cols, kCenterElements);
        const Run<const A> x = read_x(b);
        double sums[2] = {};
        storage.kernels.plane_moments(x.data, b.rows, b.cols, x.stride, 0, A(0), sums);
        centers[set] = double(A(sums[0] / double(b.rows * b.cols)));
    }
    void collect(int64_t set, int64_t item) {
        Block b = blocks.block(set, item);
        b.ahead = blocks.ahead(set, item, b);
        const Run<const A> x = read_x(b);
        double* sums = partial + (set * items() + item) * 2;
        sums[0] = sums[1] = 0;
        storage.kernels.plane_moments(x.data, b.rows, b.cols, x.stride, x.ahead, A(centers[set]), sums);
    }
    void finish(int64_t set) {
        if (!collects()) return;
        double sums[2] = {};
        for (int64_t item = 0; item < items(); ++item) {
            const double* part = partial + (set * items() + item) * 2;
            sums[0] += part[0];
            sums[1] += part[1];
        }
        Moments m;
        if (!accept<A>(centers[set], sums, g.set_size(), call.eps, m)) m = wide(set);
        this->put(set, m, g.set_size());
    }
    Moments wide(int64_t set) {
        double center = 0, sums[2];
        for (int pass = 0; pass < 2; ++pass) {
            sums[0] = sums[1] = 0;
            for (int64_t item = 0; item < items(); ++item) {
                const Block b = blocks.block(set, item);
                const Run<const A> x = read_x(b);
                storage.kernels.plane_moments_wide(x.data, b.rows, b.cols, x.stride, center, sums);
            }
            if (pass == 0) center = sums[0] / g.set_size();
        }
        return wide_moments(center, sums, g.set_size());
    }
    struct Coefficients {
        A center, scale, shift;
    };
    Coefficients coefficients(int64_t set, int64_t item) const {
        const SetStatistics<A> s(call.mean[set], call.var[set], call.eps);
        const int64_t c = blocks.channel(set, item);
        const double gamma = this->gamma_at(c);
        return {s.center, A(gamma * double(s.rstd)), A(this->beta_at(c) + gamma * double(s.offset))};
    }
    bool pipelines() const {
        const Block b = blocks.block(0, 0);
        return plan.pipelines(this->stream) && collects() && storage.in_place(b, kX) && storage.in_place(b, kY) &&
               !storage.activates_staged();
    }
    void apply_and_collect(int64_t set, int64_t next, int64_t item) {
        const Coefficients k = coefficients(set, item);
        const Block b = blocks.block(set, item), next_b = blocks.block(next, item);
        const Run<const A> x = read_x(b), next_x = read_x(next_b);
        const Run<A> y = storage.target(call.y, kY, b, my_tile<A>(), true, false);
        double* sums = partial + (next * items() + item) * 2;
        sums[0] = sums[1] = 0;
        storage.kernels.plane_apply_moments(x.data, next_x.data, b.rows, b.cols, x.stride, k.center, k.scale, k.shift,
                                            storage.fused(), A(centers[next]), y.data, y.stride, sums);
    }
    void apply(int64_t set, int64_t item) {
        const Coefficients k = coefficients(set, item);
        const Block b = blocks.block(set, item);
        Tile<A>& tile = my_tile<A>();
        const Run<const A> x = read_x(b);
        this->write(b, tile, [&](Run<A> out, bool stream) {
            storage.kernels.plane_apply(x.data, b.rows, b.cols, x.stride, k.center, k.scale, k.shift, storage.fused(),
                                        out.data, out.stride, stream);
        });
    }
};

// Blocks of whole columns: items are (chunk of rows, block of columns).
struct ColumnGrid {
    const Geometry& g;
    int64_t inner_rows, row_lists;  // rows along the last R axis, and how often they come
    int64_t chunk_rows, chunks_per_list, chunks, col_blocks, cols_per_block;

    explicit ColumnGrid(const Geometry& geometry) : g(geometry) {
        inner_rows = g.r.size ? g.r.axis[g.r.size - 1].extent : 1;
        row_lists = g.R / inner_rows;
        chunk_rows = std::max(std::min(inner_rows, kChunkRows), ceil_div(inner_rows, kMaxParts));
        chunk_rows = ceil_div(chunk_rows, kRowGroup) * kRowGroup;
        chunks_per_list = ceil_div(inner_rows, chunk_rows);
        chunks = row_lists * chunks_per_list;
        col_blocks = ceil_div(g.C, kColumns);
        cols_per_block = ceil_div(ceil_div(g.C, col_blocks), 64) * 64;
        col_blocks = ceil_div(g.C, cols_per_block);
    }
    int64_t items() const { return chunks * col_blocks; }
    int64_t chunk_of(int64_t item) const { return item / col_blocks; }
    int64_t first_col(int64_t item) const { return item % col_blocks * cols_per_block; }

    Block place(int64_t n, int64_t item) const {
        const int64_t chunk = chunk_of(item), col = first_col(item);
        const int64_t first = chunk % chunks_per_list * chunk_rows;
        Block b;
        b.offset.add(g.n, g.n.size, n);
        b.col_axes = &g.c;
        b.cols = std::min(cols_per_block, g.C - col);
        if (g.c.size) b.offset.add(g.c.axis[0], col);
        b.rows = std::min(chunk_rows, inner_rows - first);
        if (g.r.size) {
            b.row_axis = &g.r.axis[g.r.size - 1];
            b.offset.add(*b.row_axis, first);
            b.offset.add(g.r, g.r.size - 1, chunk / chunks_per_list);
        }
        return b;
    }
    // Calls body(part, first_col) on parts of a block small enough for a tile, or on all of it at once.
    template <class Body>
    void for_parts(const Block& whole, int64_t col0, bool fits, const Body& body) const {
        if (fits) return body(whole, col0);
        const int64_t cols = std::min(whole.cols, kTile / kRowGroup);
        const int64_t rows = kTile / cols / kRowGroup * kRowGroup;
        for (int64_t row = 0; row < whole.rows; row += rows) {
            for (int64_t col = 0; col < whole.cols; col += cols) {
                Block b = whole;
                b.rows = std::min(rows, whole.rows - row);
                b.cols = std::min(cols, whole.cols - col);
                if (b.row_axis) b.offset.add(*b.row_axis, row);
                if (col) b.offset.add(whole.col_axes->axis[0], col);
                body(b, col0 + col);
            }
        }
    }
};

template <class A>
struct ColumnForward : ForwardContext<A> {
    using Base = ForwardContext<A>;
    using Base::call, Base::g, Base::storage;
    ColumnGrid grid;
    Plan plan;
    double* partial = nullptr;  // [set][chunk][2][C]
    A* coefficients = nullptr;  // [set][3][C]: center, scale, shift

    ColumnForward(const NormForward& c, const Geometry& geometry, const Crew& crew)
        : Base(c, geometry), grid(geometry), plan(geometry, grid.items(), this->set_bytes() * g.sets_per_n, crew) {
        if (plan.phased) {
            partial = my_call_scratch().partial.take<double>(g.N * grid.chunks * 2 * g.C);
            coefficients = my_call_scratch().coefficients.take<A>(g.N * 3 * g.C);
        }
    }
    bool collects() const { return !call.statistics_given; }
    bool applies() const { return call.y; }

    double* part(int64_t n, int64_t chunk) {
        if (plan.phased) return partial + (n * grid.chunks + chunk) * 2 * g.C;
        return my_set_scratch().partial.take<double>(grid.chunks * 2 * g.C) + chunk * 2 * g.C;
    }
    A* coefficient(int64_t n) {
        if (plan.phased) return coefficients + n * 3 * g.C;
        return my_set_scratch().coefficients.take<A>(3 * g.C);
    }
    template <class Body>
    void for_parts(int64_t n, int64_t item, const Body& body) {
        const Block whole = grid.place(n, item);
        grid.for_parts(whole, grid.first_col(item), storage.in_place(whole, kX),
                       [&](const Block& b, int64_t col) { body(b, col, storage.read(call.x, kX, b, my_tile<A>().x)); });
    }

    void begin(int64_t n) {
        if (!collects()) return;
        A* center = coefficient(n);
        memset(center, 0, size_t(g.C) * sizeof(A));
        double* sums = part(n, 0);
        memset(sums, 0, size_t(2 * g.C) * sizeof(double));
        const int64_t rows = std::min(kCenterRows, std::min(grid.inner_rows, grid.chunk_rows));
        for (int64_t item = 0; item < grid.col_blocks; ++item) {
            Block whole = grid.place(n, item);
            whole.rows = rows;
            grid.for_parts(whole, grid.first_col(item), storage.in_place(whole, kX), [&](const Block& b, int64_t col) {
                const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
                storage.kernels.col_moments(x.data, b.rows, b.cols, x.stride, center + col, sums + col,
                                            sums + g.C + col);
            });
        }
        for (int64_t c = 0; c < g.C; ++c) center[c] = A(sums[c] / double(rows));
    }
    void collect(int64_t n, int64_t item) {
        const A* center = coefficient(n);
        double* sums = part(n, grid.chunk_of(item));
        const int64_t col0 = grid.first_col(item), cols = std::min(grid.cols_per_block, g.C - col0);
        memset(sums + col0, 0, size_t(cols) * sizeof(double));
        memset(sums + g.C + col0, 0, size_t(cols) * sizeof(double));
        for_parts(n, item, [&](const Block& b, int64_t col, Run<const A> x) {
            storage.kernels.col_moments(x.data, b.rows, b.cols, x.stride, center + col, sums + col, sums + g.C + col);
        });
    }
    void finish(int64_t n) {
        A* center = coefficient(n);
        if (collects()) combine(n, center);
        if (!applies()) return;
        for (int64_t s = 0; s < g.sets_per_n; ++s) {
            const int64_t set = n * g.sets_per_n + s;
            const SetStatistics<A> stat(call.mean[set], call.var[set], call.eps);
            for (int64_t c = s * g.K; c < (s + 1) * g.K; ++c) {
                const double gamma = this->gamma_at(c);
                center[c] = stat.center;
                center[g.C + c] = A(gamma * double(stat.rstd));
                center[2 * g.C + c] = A(this->beta_at(c) + gamma * double(stat.offset));
            }
        }
    }
    void combine(int64_t n, const A* center) {
        double* sums = part(n, 0);
        for (int64_t chunk = 1; chunk < grid.chunks; ++chunk) {
            const double* more = part(n, chunk);
            for (int64_t i = 0; i < 2 * g.C; ++i) sums[i] += more[i];
        }
        const double rows = double(g.R);
        bool accepted = true;
        for (int64_t c = 0; c < g.C; ++c) {
            const double column[2] = {sums[c], sums[g.C + c]};
            Moments m;
            accepted = accept<A>(double(center[c]), column, rows, call.eps, m) && accepted;
            sums[c] = m.mean;
            sums[g.C + c] = m.m2;
        }
        if (!accepted) wide(n, sums);
        // Columns into sets: the squares about the common mean are those about their own plus those of the means.
        for (int64_t s = 0; s < g.sets_per_n; ++s) {
            const double *mean = sums + s * g.K, *m2 = sums + g.C + s * g.K;
            Moments m{mean[0], m2[0]};
            if (g.K > 1) {
                double differences = 0, plain = 0;
                for (int64_t k = 0; k < g.K; ++k) {
                    differences += mean[k] - mean[0];
                    plain += mean[k];
                }
                m = {mean[0] + differences / double(g.K), 0};
                if (m.mean - m.mean != 0) m.mean = plain / double(g.K);  // infinite: a difference would say NaN
                for (int64_t k = 0; k < g.K; ++k) m.m2 += m2[k] + rows * (mean[k] - m.mean) * (mean[k] - m.mean);
            }
            this->put(n * g.sets_per_n + s, m, g.set_size());
        }
    }
    void wide(int64_t n, double* sums) {
        Buffer center_buffer;
        double* center = center_buffer.take<double>(g.C);
        memset(center, 0, size_t(g.C) * sizeof(double));
        for (int pass = 0; pass < 2; ++pass) {
            memset(sums, 0, size_t(2 * g.C) * sizeof(double));
            for (int64_t item = 0; item < grid.items(); ++item) {
                for_parts(n, item, [&](const Block& b, int64_t col, Run<const A> x) {
                    storage.kernels.col_moments_wide(x.data, b.rows, b.cols, x.stride, center + col, sums + col,
                                                     sums + g.C + col);
                });
            }
            if (pass == 0) {
                for (int64_t c = 0; c < g.C; ++c) center[c] = sums[c] / double(g.R);
            }
        }
        for (int64_t c = 0; c < g.C; ++c) {
            const double column[2] = {sums[c], sums[g.C + c]};
            const Moments m = wide_moments(center[c], column, double(g.R));
            sums[c] = m.mean;
            sums[g.C + c] = m.m2;
        }
    }
    void apply(int64_t n, int64_t item) {
        const A* center = coefficient(n);
        Tile<A>& tile = my_tile<A>();
        const Block whole = grid.place(n, item);
        const bool direct =
            storage.in_place(whole, kX) && storage.in_place(whole, kY) && !storage.activates_staged() && !this->stream;
        grid.for_parts(whole, grid.first_col(item), direct, [&](const Block& b, int64_t col) {
            const Run<const A> x = storage.read(call.x, kX, b, tile.x);
            this->write(b, tile, [&](Run<A> out, bool stream) {
                storage.kernels.col_apply(x.data, b.rows, b.cols, x.stride, center + col, center + g.C + col,
                                          center + 2 * g.C + col, storage.fused(), out.data, out.stride, stream);
            });
        });
    }
};

// ---- rows ----------------------------------------------------------------------------------------------------------

// Short rows go kRowGroup at a time through one block; a row longer than a tile is cut into segments.
struct RowGrid {
    const Geometry& g;
    int64_t rows_per_block, rows_per_chunk, chunks, segments, cols_per_segment;

    explicit RowGrid(const Geometry& geometry) : g(geometry) {
        const int64_t cols = std::max<int64_t>(1, g.C);
        segments = ceil_div(cols, kTile);
        cols_per_segment = ceil_div(ceil_div(cols, segments), 64) * 64;
        segments = ceil_div(cols, cols_per_segment);
        // Powers of two up to kRowGroup that fit a tile; blocks stay inside the last axis of N.
        rows_per_block = 1;
        while (rows_per_block < kRowGroup && 2 * rows_per_block * cols <= kTile) rows_per_block *= 2;
        const int64_t least = g.N <= 128 ? 16 : 32;
        rows_per_chunk = ceil_div(std::max(least, ceil_div(g.N, kMaxParts)), kRowGroup) * kRowGroup;
        chunks = ceil_div(g.N, rows_per_chunk);
    }
    bool is_long() const { return segments > 1; }
    Block place(int64_t row, int64_t rows, int64_t segment) const {
        Block b;
        const int64_t col = segment * cols_per_segment;
        b.offset.add(g.n, g.n.size, row);
        b.rows = rows;
        if (g.n.size) b.row_axis = &g.n.axis[g.n.size - 1];
        b.col_axes = &g.c;
        b.all_axes = g.c.size > 1;
        b.cols = is_long() ? std::min(cols_per_segment, g.C - col) : g.C;
        b.ahead = is_long() ? 0 : rows * b.row_stride(kX);
        if (b.all_axes) {
            b.first_col = col;
        } else if (g.c.size) {
            b.offset.add(g.c.axis[0], col);
        }
        return b;
    }
    // Calls body(first_row, rows) for the blocks of a chunk.
    template <class Body>
    void for_blocks(int64_t chunk, const Body& body) const {
        const int64_t last = std::min(g.N, (chunk + 1) * rows_per_chunk);
        const int64_t list = g.n.size ? g.n.axis[g.n.size - 1].extent : 1;
        for (int64_t row = chunk * rows_per_chunk; row < last;) {
            const int64_t rows = std::min({rows_per_block, last - row, list - row % list});
            body(row, rows);
            row += rows;
        }
    }
};

template <class A>
struct RowStatistics {
    A center[kRowGroup], rstd[kRowGroup], offset[kRowGroup];
    RowStatistics(const double* mean, const double* var, int64_t rows, double eps) {
        for (int64_t row = 0; row < rows; ++row) {
            const SetStatistics<A> s(mean[row], var[row], eps);
            center[row] = s.center;
            rstd[row] = s.rstd;
            offset[row] = s.offset;
        }
    }
};

template <class A>
struct RowForward : ForwardContext<A> {
    using Base = ForwardContext<A>;
    using Base::call, Base::g, Base::storage;
    RowGrid grid;
    double *partial = nullptr, *centers = nullptr;

    RowForward(const NormForward& c, const Geometry& geometry) : Base(c, geometry), grid(geometry) {
        if (grid.is_long()) {
            partial = my_call_scratch().partial.take<double>(g.N * grid.segments * 2);
            centers = my_call_scratch().centers.take<double>(g.N);
        }
    }
    bool collects() const { return !call.statistics_given; }
    bool applies() const { return call.y; }

    void write_block(int64_t row, const Block& b, Run<const A> x, int64_t col) {
        const RowStatistics<A> s(call.mean + row, call.var + row, b.rows, call.eps);
        this->write(b, my_tile<A>(), [&](Run<A> out, bool stream) {
            storage.kernels.row_apply(x.data, b.rows, b.cols, x.stride, x.ahead, s.center, s.rstd, s.offset,
                                      this->gamma ? this->gamma + col : nullptr,
                                      this->beta ? this->beta + col : nullptr, storage.fused(), out.data, out.stride,
                                      stream);
        });
    }

    // Statistics of a block's rows from sums about their centers.
    void settle(int64_t row, const Block& b, Run<const A> x, const double* centers, const double* sums) {
        for (int64_t i = 0; i < b.rows; ++i) {
            Moments m;
            if (!accept<A>(centers[i], sums + 2 * i, g.set_size(), call.eps, m)) {
                double center = 0, wide[2] = {};
                storage.kernels.plane_moments_wide(x.data + i * x.stride, 1, b.cols, 0, center, wide);
                center = wide[0] / g.set_size();
                wide[0] = wide[1] = 0;
                storage.kernels.plane_moments_wide(x.data + i * x.stride, 1, b.cols, 0, center, wide);
                m = wide_moments(center, wide, g.set_size());
            }
            this->put(row + i, m, g.set_size());
        }
    }
    void short_rows(int64_t chunk) {
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, 0);
            const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
            if (collects()) {
                double centers[kRowGroup], sums[2 * kRowGroup] = {};
                storage.kernels.row_centers(x.data, rows, b.cols, x.stride, centers);
                storage.kernels.row_moments(x.data, rows, b.cols, x.stride, centers, sums);
                settle(row, b, x, centers, sums);
            }
            if (applies()) write_block(row, b, x, 0);
        });
    }
    bool pipelines() const {
        const Block b = grid.place(0, 1, 0);
        return this->stream && applies() && collects() && storage.in_place(b, kX) && storage.in_place(b, kY) &&
               !storage.activates_staged();
    }
    // The same for large results: a block is written while the next one's sums are collected.
    void pipelined_rows(int64_t chunk) {
        Block previous;
        int64_t previous_row = -1;
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, 0);
            const Run<const A> x = storage.read(call.x, kX, b, nullptr);
            double centers[kRowGroup], sums[2 * kRowGroup] = {};
            storage.kernels.row_centers(x.data, rows, b.cols, x.stride, centers);
            if (previous_row < 0 || previous.rows != rows) {
                if (previous_row >= 0) finish_rows(previous_row, previous);
                storage.kernels.row_moments(x.data, rows, b.cols, x.stride, centers, sums);
            } else {
                const RowStatistics<A> s(call.mean + previous_row, call.var + previous_row, rows, call.eps);
                const Run<const A> from = storage.read(call.x, kX, previous, nullptr);
                const Run<A> to = storage.target(call.y, kY, previous, my_tile<A>(), true, false);
                storage.kernels.row_apply_moments(from.data, x.data, rows, b.cols, x.stride, s.center, s.rstd, s.offset,
                                                  this->gamma, this->beta, storage.fused(), centers, to.data, to.stride,
                                                  sums);
            }
            settle(row, b, x, centers, sums);
            previous = b;
            previous_row = row;
        });
        finish_rows(previous_row, previous);
    }
    void finish_rows(int64_t row, const Block& b) { write_block(row, b, storage.read(call.x, kX, b, nullptr), 0); }

    void begin(int64_t row) {
        if (!collects()) return;
        Block b = grid.place(row, 1, 0);
        b.cols = std::min(b.cols, kCenterElements);
        const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
        double sums[2] = {};
        storage.kernels.plane_moments(x.data, 1, b.cols, x.stride, 0, A(0), sums);
        centers[row] = double(A(sums[0] / double(b.cols)));
    }
    void collect(int64_t row, int64_t segment) {
        const Block b = grid.place(row, 1, segment);
        const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
        double* sums = partial + (row * grid.segments + segment) * 2;
        sums[0] = sums[1] = 0;
        storage.kernels.plane_moments(x.data, 1, b.cols, x.stride, 0, A(centers[row]), sums);
    }
    void finish(int64_t row) {
        if (!collects()) return;
        double sums[2] = {};
        for (int64_t segment = 0; segment < grid.segments; ++segment) {
            sums[0] += partial[(row * grid.segments + segment) * 2];
            sums[1] += partial[(row * grid.segments + segment) * 2 + 1];
        }
        Moments m;
        if (!accept<A>(centers[row], sums, g.set_size(), call.eps, m)) {
            double center = 0;
            for (int pass = 0; pass < 2; ++pass) {
                sums[0] = sums[1] = 0;
                for (int64_t segment = 0; segment < grid.segments; ++segment) {
                    const Block b = grid.place(row, 1, segment);
                    const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
                    storage.kernels.plane_moments_wide(x.data, 1, b.cols, x.stride, center, sums);
                }
                if (pass == 0) center = sums[0] / g.set_size();
            }
            m = wide_moments(center, sums, g.set_size());
        }
        this->put(row, m, g.set_size());
    }
    void apply(int64_t row, int64_t segment) {
        const Block b = grid.place(row, 1, segment);
        write_block(row, b, storage.read(call.x, kX, b, my_tile<A>().x), segment * grid.cols_per_segment);
    }
};

template <class A>
void forward(const NormForward& call, const Geometry& g, const Crew& crew) {
    if (g.family == Family::plane) {
        PlaneForward<A> pass(call, g, crew);
        pass.pipelines() ? run_pipelined(pass.plan, crew, pass) : run(pass.plan, crew, pass);
    } else if (g.family == Family::column) {
        ColumnForward<A> pass(call, g, crew);
        run(pass.plan, crew, pass);
    } else {
        RowForward<A> pass(call, g);
        if (pass.grid.is_long()) {
            run(Plan(g, pass.grid.segments, pass.set_bytes(), crew), crew, pass);
        } else {
            const bool pipelined = pass.pipelines();
            crew.each(pass.grid.chunks,
                      [&](int64_t chunk) { pipelined ? pass.pipelined_rows(chunk) : pass.short_rows(chunk); });
        }
    }
}

// ---- backward ------------------------------------------------------------------------------------------------------

template <class A>
struct BackwardContext {
    const NormBackward& call;
    const Geometry& g;
    Storage<A> storage;
    const A* gamma;
    bool stream;
    bool wants_sums;  // sums over dz are needed, and not given

    BackwardContext(const NormBackward& c, const Geometry& geometry)
        : call(c),
          g(geometry),
          storage(kernel_table(), c.dtype, c.activation),
          gamma(static_cast<const A*>(c.gamma)),
          stream(g.elements() * element_size(c.dtype) >= kMinStream && !c.accumulate && c.dx != c.dy && c.dx != c.x) {
        const bool for_dx = c.dx && !c.frozen && !c.given_sum_dz;
        wants_sums = for_dx || wants_parameters();
    }
    bool wants_parameters() const { return call.dgamma || call.dbeta || call.sum_dz; }
    double gamma_at(int64_t channel) const { return gamma ? double(gamma[channel]) : 1.0; }
    bool needs_x() const { return !call.frozen; }
    int64_t set_bytes() const { return g.K * g.R * element_size(call.dtype) * (storage.has_activation() ? 3 : 2); }
    // Sets of one element, normalized by their own statistics, come out as beta whatever they are.
    bool constant_sets() const { return g.set_size() == 1 && !call.statistics_given && !call.frozen; }
    // The statistics that dx is computed with: 1 / std is 0 where dx is, exactly.
    SetStatistics<A> dx_statistics(int64_t set) const {
        SetStatistics<A> s(call.mean[set], call.var[set], call.eps);
        if (constant_sets()) s.rstd = 0;
        return s;
    }

    template <class Kernel>
    void write(const Block& b, Tile<A>& tile, Kernel kernel) const {
        const Run<A> out = storage.target(call.dx, kDx, b, tile, !call.accumulate, stream);
        kernel(out, stream && out.data != tile.out);
        storage.finish(call.dx, kDx, b, out, tile, call.accumulate, stream);
    }
    void put_parameters(int64_t channel, double sum_dz, double sum_dz_xhat) const {
        const auto put = [&](void* base, double value) {
            if (!base) return;
            A& out = static_cast<A*>(base)[channel];
            out = A(call.accumulate ? double(out) + value : value);
        };
        put(call.dbeta, sum_dz);
        put(call.dgamma, sum_dz_xhat);
        if (call.sum_dz) {
            call.sum_dz[channel] = sum_dz;
            call.sum_dz_xhat[channel] = sum_dz_xhat;
        }
    }
};

// dx = rstd * (gamma * dz - mean(g) - xhat * mean(g * xhat)) as rstd * gamma * dz + (b * xhat + k).
template <class A>
struct Slope {
    A b, k;
    Slope(double rstd, double mean_g, double mean_g_xhat) : b(A(-rstd * mean_g_xhat)), k(A(-rstd * mean_g)) {}
};

template <class A>
struct PlaneBackward : BackwardContext<A> {
    using Base = BackwardContext<A>;
    using Base::call, Base::g, Base::storage;
    PlaneBlocks blocks;
    Plan plan;
    double* partial;  // [set][item][2]
    double* means;    // [set][2]: mean(g), mean(g * xhat)
    double* totals;   // [group][C][2]

    PlaneBackward(const NormBackward& c, const Geometry& geometry, const Crew& crew)
        : Base(c, geometry), blocks(geometry), plan(geometry, blocks.items(), this->set_bytes(), crew) {
        CallScratch& scratch = my_call_scratch();
        partial = scratch.partial.take<double>(plan.sets() * plan.items * 2);
        means = scratch.centers.take<double>(plan.sets() * 2);
        totals = scratch.totals.take<double>(plan.groups * g.C * 2);
        memset(totals, 0, size_t(plan.groups * g.C * 2) * sizeof(double));
    }
    bool collects() const { return this->wants_sums; }
    bool applies() const { return call.dx; }

    SetStatistics<A> statistics(int64_t set) const { return {call.mean[set], call.var[set], call.eps}; }

    void begin(int64_t) {}
    void collect(int64_t set, int64_t item) {
        Block b = blocks.block(set, item);
        b.ahead = blocks.ahead(set, item, b);
        Tile<A>& tile = my_tile<A>();
        const Run<const A> x = storage.read(call.x, kX, b, tile.x);
        const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
        const SetStatistics<A> s = statistics(set);
        double* sums = partial + (set * plan.items + item) * 2;
        sums[0] = sums[1] = 0;
        storage.kernels.plane_sums(x.data, dz, b.rows, b.cols, x.stride, x.ahead, s.center, s.rstd, s.offset, sums);
    }
    void finish(int64_t set) {
        double mean_g = 0, mean_g_xhat = 0, count = g.set_size();
        if (call.given_sum_dz) {
            const int64_t c = blocks.channel(set, 0);
            mean_g = this->gamma_at(c) * call.given_sum_dz[c];
            mean_g_xhat = this->gamma_at(c) * call.given_sum_dz_xhat[c];
            count = call.given_count;
        } else if (collects()) {
            double* group = totals + quotient(blocks.sample(set), plan.group_size) * g.C * 2;
            const int64_t per_channel = blocks.grid.blocks;
            for (int64_t k = 0; k < g.K; ++k) {
                double sums[2] = {};
                for (int64_t block = 0; block < per_channel; ++block) {
                    const double* part = partial + (set * plan.items + k * per_channel + block) * 2;
                    sums[0] += part[0];
                    sums[1] += part[1];
                }
                const int64_t c = blocks.channel(set, k * per_channel);
                group[2 * c] += sums[0];
                group[2 * c + 1] += sums[1];
                mean_g += this->gamma_at(c) * sums[0];
                mean_g_xhat += this->gamma_at(c) * sums[1];
            }
        }
        means[2 * set] = mean_g / count;
        means[2 * set + 1] = mean_g_xhat / count;
    }
    struct Coefficients {
        SetStatistics<A> s;
        A a, b, k;
    };
    Coefficients coefficients(int64_t set, int64_t item) const {
        const SetStatistics<A> s = this->dx_statistics(set);
        const Slope<A> slope(double(s.rstd), means[2 * set], means[2 * set + 1]);
        return {s, A(this->gamma_at(blocks.channel(set, item)) * double(s.rstd)), slope.b, slope.k};
    }
    bool pipelines() const {
        const Block b = blocks.block(0, 0);
        return plan.pipelines(this->stream) && collects() && this->needs_x() && applies() && storage.in_place(b, kX) &&
               storage.in_place(b, kDy) && storage.in_place(b, kDx) && !storage.activates_staged() &&
               (!storage.has_activation() || storage.in_place(b, kY));
    }
    void apply_and_collect(int64_t set, int64_t next, int64_t item) {
        Tile<A>& tile = my_tile<A>();
        const Coefficients k = coefficients(set, item);
        const Block b = blocks.block(set, item), next_b = blocks.block(next, item);
        const Run<const A> x = storage.read(call.x, kX, b, tile.x), next_x = storage.read(call.x, kX, next_b, tile.x);
        const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
        const Gradient<A> next_dz = storage.read_dz(call.dy, call.y, next_b, tile);
        const SetStatistics<A> s = statistics(next);
        const A next_statistics[3] = {s.center, s.rstd, s.offset};
        const Run<A> dx = storage.target(call.dx, kDx, b, tile, true, false);
        double* sums = partial + (next * plan.items + item) * 2;
        sums[0] = sums[1] = 0;
        storage.kernels.plane_dx_sums(x.data, dz, next_x.data, next_dz, b.rows, b.cols, x.stride, k.s.center, k.s.rstd,
                                      k.s.offset, k.a, k.b, k.k, next_statistics, dx.data, dx.stride, sums);
    }
    void apply(int64_t set, int64_t item) {
        const Block b = blocks.block(set, item);
        Tile<A>& tile = my_tile<A>();
        const Coefficients k = coefficients(set, item);
        const Run<const A> x = this->needs_x() ? storage.read(call.x, kX, b, tile.x) : Run<const A>{nullptr, 0, 0};
        const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
        this->write(b, tile, [&](Run<A> out, bool stream) {
            storage.kernels.plane_dx(x.data, dz, b.rows, b.cols, x.stride, k.s.center, k.s.rstd, k.s.offset, k.a, k.b,
                                     k.k, out.data, out.stride, stream);
        });
    }
    void reduce() {
        if (!this->wants_parameters()) return;
        for (int64_t c = 0; c < g.C; ++c) {
            double sums[2] = {};
            for (int64_t group = 0; group < plan.groups; ++group) {
                sums[0] += totals[(group * g.C + c) * 2];
                sums[1] += totals[(group * g.C + c) * 2 + 1];
            }
            this->put_parameters(c, sums[0], sums[1]);
        }
    }
};

template <class A>
struct ColumnBackward : BackwardContext<A> {
    using Base = BackwardContext<A>;
    using Base::call, Base::g, Base::storage;
    static constexpr int64_t kVectors = 6;  // center, rstd, offset, a, b, k
    ColumnGrid grid;
    Plan plan;
    double* partial = nullptr;  // [set][chunk][2][C]
    A* coefficients = nullptr;  // [set][kVectors][C]
    double* totals;             // [group][2][C]

    ColumnBackward(const NormBackward& c, const Geometry& geometry, const Crew& crew)
        : Base(c, geometry), grid(geometry), plan(geometry, grid.items(), this->set_bytes() * g.sets_per_n, crew) {
        CallScratch& scratch = my_call_scratch();
        if (plan.phased) {
            partial = scratch.partial.take<double>(g.N * grid.chunks * 2 * g.C);
            coefficients = scratch.coefficients.take<A>(g.N * kVectors * g.C);
        }
        totals = scratch.totals.take<double>(plan.groups * 2 * g.C);
        memset(totals, 0, size_t(plan.groups * 2 * g.C) * sizeof(double));
    }
    bool collects() const { return this->wants_sums; }
    bool applies() const { return call.dx; }

    double* part(int64_t n, int64_t chunk) {
        if (plan.phased) return partial + (n * grid.chunks + chunk) * 2 * g.C;
        return my_set_scratch().partial.take<double>(grid.chunks * 2 * g.C) + chunk * 2 * g.C;
    }
    A* coefficient(int64_t n) {
        if (plan.phased) return coefficients + n * kVectors * g.C;
        return my_set_scratch().coefficients.take<A>(kVectors * g.C);
    }
    bool inputs_in_place(const Block& b) const {
        return storage.in_place(b, kX) && storage.in_place(b, kDy) && !storage.activates_staged() &&
               (!storage.has_activation() || storage.in_place(b, kY));
    }

    void begin(int64_t n) {
        A* v = coefficient(n);
        for (int64_t s = 0; s < g.sets_per_n; ++s) {
            const int64_t set = n * g.sets_per_n + s;
            const SetStatistics<A> stat(call.mean[set], call.var[set], call.eps);
            for (int64_t c = s * g.K; c < (s + 1) * g.K; ++c) {
                v[c] = stat.center;
                v[g.C + c] = stat.rstd;
                v[2 * g.C + c] = stat.offset;
            }
        }
    }
    void collect(int64_t n, int64_t item) {
        const A* v = coefficient(n);
        double* sums = part(n, grid.chunk_of(item));
        const Block whole = grid.place(n, item);
        const int64_t col0 = grid.first_col(item);
        memset(sums + col0, 0, size_t(whole.cols) * sizeof(double));
        memset(sums + g.C + col0, 0, size_t(whole.cols) * sizeof(double));
        Tile<A>& tile = my_tile<A>();
        grid.for_parts(whole, col0, inputs_in_place(whole), [&](const Block& b, int64_t col) {
            const Run<const A> x = storage.read(call.x, kX, b, tile.x);
            const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
            storage.kernels.col_sums(x.data, dz, b.rows, b.cols, x.stride, v + col, v + g.C + col, v + 2 * g.C + col,
                                     sums + col, sums + g.C + col);
        });
    }
    void finish(int64_t n) {
        const double *sum_dz = call.given_sum_dz, *sum_dz_xhat = call.given_sum_dz_xhat;
        const double count = sum_dz ? call.given_count : g.set_size();
        if (collects()) {
            double* sums = part(n, 0);
            for (int64_t chunk = 1; chunk < grid.chunks; ++chunk) {
                const double* more = part(n, chunk);
                for (int64_t i = 0; i < 2 * g.C; ++i) sums[i] += more[i];
            }
            double* group = totals + n / plan.group_size * 2 * g.C;
            for (int64_t i = 0; i < 2 * g.C; ++i) group[i] += sums[i];
            if (!sum_dz) {
                sum_dz = sums;
                sum_dz_xhat = sums + g.C;
            }
        }
        if (!applies()) return;
        A* v = coefficient(n);
        for (int64_t s = 0; s < g.sets_per_n; ++s) {
            const SetStatistics<A> stat = this->dx_statistics(n * g.sets_per_n + s);
            double mean_g = 0, mean_g_xhat = 0;
            for (int64_t c = s * g.K; c < (s + 1) * g.K && !call.frozen; ++c) {
                mean_g += this->gamma_at(c) * sum_dz[c];
                mean_g_xhat += this->gamma_at(c) * sum_dz_xhat[c];
            }
            const Slope<A> slope(double(stat.rstd), mean_g / count, mean_g_xhat / count);
            for (int64_t c = s * g.K; c < (s + 1) * g.K; ++c) {
                v[3 * g.C + c] = A(this->gamma_at(c) * double(stat.rstd));
                v[4 * g.C + c] = slope.b;
                v[5 * g.C + c] = slope.k;
            }
        }
    }
    void apply(int64_t n, int64_t item) {
        const A* v = coefficient(n);
        Tile<A>& tile = my_tile<A>();
        const Block whole = grid.place(n, item);
        const bool direct = inputs_in_place(whole) && storage.in_place(whole, kDx) && !call.accumulate && !this->stream;
        grid.for_parts(whole, grid.first_col(item), direct, [&](const Block& b, int64_t col) {
            const Run<const A> x = this->needs_x() ? storage.read(call.x, kX, b, tile.x) : Run<const A>{nullptr, 0, 0};
            const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
            this->write(b, tile, [&](Run<A> out, bool stream) {
                storage.kernels.col_dx(x.data, dz, b.rows, b.cols, x.stride, v + col, v + g.C + col, v + 2 * g.C + col,
                                       v + 3 * g.C + col, v + 4 * g.C + col, v + 5 * g.C + col, out.data, out.stride,
                                       stream);
            });
        });
    }
    void reduce() {
        if (!this->wants_parameters()) return;
        for (int64_t c = 0; c < g.C; ++c) {
            double sums[2] = {};
            for (int64_t group = 0; group < plan.groups; ++group) {
                sums[0] += totals[group * 2 * g.C + c];
                sums[1] += totals[group * 2 * g.C + g.C + c];
            }
            this->put_parameters(c, sums[0], sums[1]);
        }
    }
};

template <class A>
struct RowBackward : BackwardContext<A> {
    using Base = BackwardContext<A>;
    using Base::call, Base::g, Base::storage;
    RowGrid grid;
    double* totals;  // short rows: [chunk][2][C], dgamma before dbeta; long rows: [2][C]
    double* sums;    // long rows: [row][segment][2]

    RowBackward(const NormBackward& c, const Geometry& geometry) : Base(c, geometry), grid(geometry) {
        CallScratch& scratch = my_call_scratch();
        const int64_t parts = grid.is_long() ? 1 : grid.chunks;
        if (this->wants_parameters()) {
            totals = scratch.totals.take<double>(parts * 2 * g.C);
            memset(totals, 0, size_t(parts * 2 * g.C) * sizeof(double));
        }
        if (grid.is_long()) sums = scratch.partial.take<double>(g.N * grid.segments * 2);
    }
    bool wants_row_sums() const { return call.dx && !call.frozen; }

    struct Inputs {
        Run<const A> x;
        Gradient<A> dz;
    };
    // With rstd = 0, xhat and dx are exactly 0.
    RowStatistics<A> statistics(int64_t row, int64_t rows) const {
        RowStatistics<A> s(call.mean + row, call.var + row, rows, call.eps);
        for (int64_t i = 0; i < rows && this->constant_sets(); ++i) s.rstd[i] = s.offset[i] = 0;
        return s;
    }
    Inputs read(const Block& b) const {
        Tile<A>& tile = my_tile<A>();
        return {storage.read(call.x, kX, b, tile.x), storage.read_dz(call.dy, call.y, b, tile)};
    }
    const A* gamma_from(int64_t col) const { return this->gamma ? this->gamma + col : nullptr; }

    // row_sums: [rows][2], the sums of g and g * xhat; zeros where the statistics are frozen
    void write_block(const Block& b, const Inputs& in, const RowStatistics<A>& s, const double* row_sums, int64_t col,
                     double* total) const {
        double* dgamma = total && (call.dgamma || call.sum_dz) ? total + col : nullptr;
        double* dbeta = total && (call.dbeta || call.sum_dz) ? total + g.C + col : nullptr;
        A slope_b[kRowGroup], slope_k[kRowGroup];
        for (int64_t row = 0; row < b.rows; ++row) {
            const double count = g.set_size();
            const Slope<A> slope(double(s.rstd[row]), row_sums[2 * row] / count, row_sums[2 * row + 1] / count);
            slope_b[row] = slope.b;
            slope_k[row] = slope.k;
        }
        const auto kernel = [&](A* out, int64_t stride, bool stream) {
            storage.kernels.row_dx(in.x.data, in.dz, b.rows, b.cols, in.x.stride, in.x.ahead, s.center, s.rstd,
                                   s.offset, gamma_from(col), slope_b, slope_k, out, stride, stream, dgamma, dbeta);
        };
        if (call.dx) {
            this->write(b, my_tile<A>(), [&](Run<A> out, bool stream) { kernel(out.data, out.stride, stream); });
        } else {
            kernel(nullptr, 0, false);
        }
    }
    void short_rows(int64_t chunk) {
        double* total = this->wants_parameters() ? totals + chunk * 2 * g.C : nullptr;
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, 0);
            const Inputs in = read(b);
            const RowStatistics<A> s = statistics(row, rows);
            double row_sums[2 * kRowGroup] = {};
            if (wants_row_sums()) {
                storage.kernels.row_sums(in.x.data, in.dz, rows, b.cols, in.x.stride, s.center, s.rstd, s.offset,
                                         gamma_from(0), row_sums);
            }
            write_block(b, in, s, row_sums, 0, total);
        });
    }
    void collect_long(int64_t row, int64_t segment) {
        const Block b = grid.place(row, 1, segment);
        const Inputs in = read(b);
        const RowStatistics<A> s(call.mean + row, call.var + row, 1, call.eps);
        double* out = sums + (row * grid.segments + segment) * 2;
        out[0] = out[1] = 0;
        storage.kernels.row_sums(in.x.data, in.dz, 1, b.cols, in.x.stride, s.center, s.rstd, s.offset,
                                 gamma_from(segment * grid.cols_per_segment), out);
    }
    void apply_long(int64_t segment) {
        double* total = this->wants_parameters() ? totals : nullptr;
        for (int64_t row = 0; row < g.N; ++row) {
            double row_sums[2] = {};
            for (int64_t i = 0; i < grid.segments && wants_row_sums(); ++i) {
                row_sums[0] += sums[(row * grid.segments + i) * 2];
                row_sums[1] += sums[(row * grid.segments + i) * 2 + 1];
            }
            const Block b = grid.place(row, 1, segment);
            const RowStatistics<A> s = statistics(row, 1);
            write_block(b, read(b), s, row_sums, segment * grid.cols_per_segment, total);
        }
    }
    void run(const Crew& crew) {
        if (!call.dx && !this->wants_parameters()) return;
        if (!grid.is_long()) {
            crew.each(grid.chunks, [&](int64_t chunk) { short_rows(chunk); });
        } else {
            if (wants_row_sums()) {
                crew.each(g.N * grid.segments, [&](int64_t i) { collect_long(i / grid.segments, i % grid.segments); });
            }
            crew.each(grid.segments, [&](int64_t segment) { apply_long(segment); });
        }
        if (!this->wants_parameters()) return;
        const int64_t parts = grid.is_long() ? 1 : grid.chunks;
        for (int64_t part = 1; part < parts; ++part) {
            for (int64_t i = 0; i < 2 * g.C; ++i) totals[i] += totals[part * 2 * g.C + i];
        }
        for (int64_t c = 0; c < g.C; ++c) this->put_parameters(c, totals[g.C + c], totals[c]);
    }
};

template <class A>
void backward(const NormBackward& call, const Geometry& g, const Crew& crew) {
    if (g.family == Family::row) {
        RowBackward<A>(call, g).run(crew);
        return;
    }
    if (g.family == Family::plane) {
        PlaneBackward<A> pass(call, g, crew);
        pass.pipelines() ? run_pipelined(pass.plan, crew, pass) : run(pass.plan, crew, pass);
        pass.reduce();
    } else {
        ColumnBackward<A> pass(call, g, crew);
        run(pass.plan, crew, pass);
        pass.reduce();
    }
}

void trim_scratch() {
    CallScratch& call = my_call_scratch();
    SetScratch& set = my_set_scratch();
    for (Buffer* b :
         {&call.partial, &call.totals, &call.coefficients, &call.centers, &set.partial, &set.coefficients}) {
        b->trim();
    }
}

}  // namespace

void norm_forward(const NormForward& call) {
    const Geometry g(call.shape);
    if (g.elements() == 0) return;
    trim_scratch();
    const Crew crew(g.elements(), call.threads);
    call.dtype == DType::f64 ? forward<double>(call, g, crew) : forward<float>(call, g, crew);
}

void norm_backward(const NormBackward& call) {
    const Geometry g(call.shape);
    if (g.elements() == 0) return;
    trim_scratch();
    const Crew crew(g.elements(), call.threads);
    call.dtype == DType::f64 ? backward<double>(call, g, crew) : backward<float>(call, g, crew);
}

}  // namespace rg
