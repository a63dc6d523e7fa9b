// Products of matrices by blocks, in pieces that threads can share.
#pragma once

#include <algorithm>

#include "../base/machine.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {

// Where a thread packs rows of an operand.
struct RowScratch {
    Buffer buffer;
};
inline Buffer& row_scratch() { return kept_by_thread<RowScratch>().buffer; }

// The rows of an operand, `depth` elements each, that stay in the second-level cache while panels are multiplied by
// them: half of it, in whole tiles.
constexpr int64_t kTileRows = 84;  // tiles have up to 6 or 14 rows
template <class A>
int64_t rows_in_cache(int64_t depth) {
    const int64_t rows = near_cache_bytes() / 2 / (depth * int64_t(sizeof(A)));
    return std::max<int64_t>(1, rows / kTileRows) * kTileRows;
}

// Rounds up to a multiple of the panels that a product of `rows` rows takes at a time.
template <class A>
int64_t whole_tiles(const ProductKernels<A>& kernels, int64_t panels, int64_t rows) {
    const int64_t wide = kernels.panels_at_once(rows);
    return ceil_div(std::max<int64_t>(1, panels), wide) * wide;
}

// How a BlockedProduct is cut. Results do not depend on it, except on `segment`.
struct Blocking {
    int64_t segment = 0;                     // the depth is segments of this length, each with its own runs; 0: one
    int64_t near_depth = 4 * kDepthRun;      // of a block of a: whole runs
    int64_t near_rows = 0;                   // of a block of a; 0: as many as stay in the second-level cache
    int64_t least_rows = kTileRows;          // of a piece
    int64_t pieces = 0;                      // that several threads share; 0: 8 for each thread
    int64_t pack_depth = 128;                // of one call of pack()
    int64_t room = caches().last_level / 4;  // bytes of the panels that are packed at a time
};

// c[rows][cols] = base + a * b. Panels of b are packed once for all threads, a block of them at a time; rows of a are
// taken in blocks that stay in the second-level cache, so each is loaded once for every block of panels.
//
// Right has pack(kernels, panel, k, depth, to): rows k to k + depth of a panel of b, where k is a multiple of kPanel in
// its segment; and by_rows(): whether rows of b are contiguous, not columns; depth is then at most kPanel. Left has
// near(kernels, row, rows, k, depth, cols): a block of a as the tiles of a product with `cols` columns read it, which
// may be packed in the thread's scratch memory. Neither is asked for parts of two segments at a time.
template <class A, class Left, class Right>
class BlockedProduct {
public:
    BlockedProduct(const ProductKernels<A>& kernels, const Product<A>& whole, Left left, Right right, Buffer& buffer,
                   const Blocking& blocking = {})
        : kernels_(kernels), whole_(whole), left_(left), right_(right), buffer_(buffer), blocking_(blocking) {
        if (whole.rows == 0 || whole.cols == 0) return;
        const int64_t depth = std::max<int64_t>(1, whole.depth), cols = ceil_div(whole.cols, kPanel<A>) * kPanel<A>;
        segment_ = blocking.segment ? blocking.segment : depth;
        step_ = std::min(segment_, blocking.near_depth);
        segment_steps_ = ceil_div(segment_, step_);
        steps_ = blocking.segment ? depth / segment_ * segment_steps_ : segment_steps_;
        // The panels of a block leave room in the cache for the other operand and the result. A block that is not as
        // deep as the product costs reading the result again; one that is not as wide costs loading a again.
        const int64_t most = blocking.room / int64_t(sizeof(A));
        block_steps_ = std::min(steps_, std::max<int64_t>(1, most / cols / step_));
        panel_step_ = whole_tiles(
            kernels, std::min(cols, most / std::max<int64_t>(1, position(block_steps_))) / kPanel<A>, whole.rows);
        depth_blocks_ = ceil_div(steps_, block_steps_);
        blocks_ = depth_blocks_ * ceil_div(cols, panel_step_ * kPanel<A>);
    }

    double flops() const {
        return 2.0 * double(whole_.rows) * double(whole_.cols) * double(std::max<int64_t>(1, whole_.depth));
    }
    int64_t blocks() const { return blocks_; }

    // Takes up a block, for packings() calls of pack() and then pieces() calls of multiply(), each in any order.
    void begin(int64_t block, int threads) {
        packings_ = pieces_ = 0;
        if (block >= blocks_) return;
        first_step_ = block % depth_blocks_ * block_steps_;
        last_step_ = std::min(steps_, first_step_ + block_steps_);
        panel_ = block / depth_blocks_ * panel_step_;
        cols_ = std::min(panel_step_ * kPanel<A>, whole_.cols - panel_ * kPanel<A>);
        const int64_t panels = ceil_div(cols_, kPanel<A>), steps = last_step_ - first_step_;
        panel_stride_ = (step_ + 1) * kPanel<A>;  // one row of padding, to avoid cache-set conflicts
        step_stride_ = panels * panel_stride_;
        packed_ = buffer_.take<A>(steps, step_stride_);
        packings_across_ = ceil_div(panels, kPackPanels);
        packings_down_ = ceil_div(step_, blocking_.pack_depth);
        packings_ = packings_across_ * packings_down_ * steps;

        // Rows are split first, because every piece takes up its rows of a for itself.
        const int64_t wanted = threads == 1 ? 1 : blocking_.pieces ? blocking_.pieces : 8 * threads;
        const int64_t row_pieces = std::min(wanted, ceil_div(whole_.rows, blocking_.least_rows));
        row_piece_ = ceil_div(whole_.rows, row_pieces);
        panel_piece_ = whole_tiles(kernels_, ceil_div(panels * row_pieces, wanted), row_piece_);
        const bool enough = row_pieces * ceil_div(panels, panel_piece_) >= threads;
        if (!enough) panel_piece_ = ceil_div(panels * row_pieces, threads);
        pieces_across_ = ceil_div(panels, panel_piece_);
        pieces_ = ceil_div(whole_.rows, row_piece_) * pieces_across_;
    }

    int64_t packings() const { return packings_; }
    void pack(int64_t packing) const {
        const int64_t first = packing % packings_across_ * kPackPanels, down = packing / packings_across_;
        const int64_t last = std::min(ceil_div(cols_, kPanel<A>), first + kPackPanels);
        const int64_t step = first_step_ + down / packings_down_, begin = position(step);
        const int64_t k0 = begin + down % packings_down_ * blocking_.pack_depth;
        const int64_t end = std::min(position(step + 1), k0 + blocking_.pack_depth);
        // Along what is contiguous, so that a page is read line after line: a few rows of b, or a panel's columns.
        const int64_t depth = right_.by_rows() ? kPanel<A> : blocking_.pack_depth;
        for (int64_t k = k0; k < end; k += depth) {
            for (int64_t panel = first; panel < last; ++panel) {
                right_.pack(kernels_, panel_ + panel, k, std::min(depth, end - k),
                            packed_at(step, panel) + (k - begin) * kPanel<A>);
            }
        }
    }

    int64_t pieces() const { return pieces_; }
    void multiply(int64_t piece) const {
        const int64_t first_row = piece / pieces_across_ * row_piece_;
        const int64_t last_row = std::min(whole_.rows, first_row + row_piece_);
        const int64_t first_panel = piece % pieces_across_ * panel_piece_, column = first_panel * kPanel<A>;
        const int64_t row_step = blocking_.near_rows ? blocking_.near_rows : rows_in_cache<A>(step_);
        for (int64_t row = first_row; row < last_row; row += row_step) {
            int64_t next = position(first_step_);
            for (int64_t step = first_step_; step < last_step_; ++step) {  // one even without depth: c is written
                const int64_t k = next;
                next = position(step + 1);
                Product<A> p = whole_;
                p.rows = std::min(row_step, last_row - row);
                p.depth = next - k;
                p.cols = std::min(panel_piece_ * kPanel<A>, cols_ - column);
                const StateArray<const A> near = left_.near(kernels_, row, p.rows, k, p.depth, p.cols);
                p.a = near.data;
                p.a_row = near.row;
                p.a_step = 1;
                p.a_group = near.panel;
                p.panels = packed_at(step, first_panel);
                p.panel_stride = panel_stride_;
                p.c += row * p.c_row + panel_ * kPanel<A> + column;
                if (k > 0) {
                    p.base = p.c;
                    p.base_row = p.c_row;
                } else if (p.base) {
                    p.base += row * p.base_row + panel_ * kPanel<A> + column;
                }
                kernels_.product(p);
            }
        }
    }

private:
    static constexpr int64_t kPackPanels = 16;  // of one call of pack()

    // Where a step of the depth begins.
    int64_t position(int64_t step) const {
        if (segment_steps_ == steps_) return std::min(whole_.depth, step * step_);
        if (segment_steps_ == 1) return step * segment_;
        return step / segment_steps_ * segment_ + step % segment_steps_ * step_;
    }

    A* packed_at(int64_t step, int64_t panel) const {
        return packed_ + (step - first_step_) * step_stride_ + panel * panel_stride_;
    }

    const ProductKernels<A>& kernels_;
    Product<A> whole_;  // without a and panels
    Left left_;
    Right right_;
    Buffer& buffer_;
    Blocking blocking_;
    int64_t segment_ = 1, step_ = 1, segment_steps_ = 1, steps_ = 0;  // steps of the depth, step_ or less each
    int64_t block_steps_ = 0, panel_step_ = 0, depth_blocks_ = 0, blocks_ = 0;
    // of the current block
    int64_t first_step_ = 0, last_step_ = 0;
    int64_t panel_ = 0, cols_ = 0;
    A* packed_ = nullptr;  // [step][panel][row][kPanel]
    int64_t panel_stride_ = 0, step_stride_ = 0;
    int64_t packings_ = 0, packings_across_ = 1, packings_down_ = 1;
    int64_t pieces_ = 0, pieces_across_ = 1, row_piece_ = 0, panel_piece_ = 0;
};

// Computes products side by side, with as few barriers as for one of them.
template <class... Products>
void multiply_blocks(const Workers& workers, Products&&... products) {
    const int64_t blocks = std::max({products.blocks()...});
    for (int64_t block = 0; block < blocks; ++block) {
        (products.begin(block, workers.threads()), ...);
        workers.each((products.packings() + ...), [&](int64_t i) {
            const auto pack = [&](auto& product) {
                if (i >= 0 && i < product.packings()) product.pack(i);
                i -= product.packings();
            };
            (pack(products), ...);
        });
        workers.each((products.pieces() + ...), [&](int64_t i) {
            const auto multiply = [&](auto& product) {
                if (i >= 0 && i < product.pieces()) product.multiply(i);
                i -= product.pieces();
            };
            (multiply(products), ...);
        });
    }
}

// Computes product(i) for i < count, products that take `each` nanoseconds. Threads share the products, unless a
// product is large or there are too few of them.
template <class MakeProduct>
void multiply_all(int64_t count, double each, int threads, const MakeProduct& product) {
    if (count > 1 && (each < cost::kWorthSharing || count >= 2 * int64_t(threads))) {
        return Workers(each * double(count), threads).each(count, [&](int64_t i) {
            multiply_blocks(Workers(0, 1), product(i));
        });
    }
    for (int64_t i = 0; i < count; ++i) multiply_blocks(Workers(each, threads), product(i));
}

// The columns `first` to `last` of c = base + a * b, for b that the calling thread takes for itself: kDepthRun rows of
// `step` columns at a time, which stay in its cache while they are multiplied by all rows of a.
//
// near(col, cols, k, depth) returns these as panels. multiply(p, col, k) gets a product without a and c, for as many
// calls of the kernel as the rows need: a[k] and on, and base = c if k > 0.
template <class A, class Near, class Multiply>
void multiply_columns(int64_t depth, int64_t first, int64_t last, int64_t step, const Near& near,
                      const Multiply& multiply) {
    for (int64_t k = 0; k == 0 || k < depth; k += kDepthRun) {  // once even without depth: c is written
        for (int64_t col = first; col < last; col += step) {
            Product<A> p = {};
            p.depth = std::min(kDepthRun, depth - k);
            p.cols = std::min(step, last - col);
            const StateArray<const A> panels = near(col, p.cols, k, p.depth);
            p.panels = panels.data;
            p.panel_stride = panels.panel;
            multiply(p, col, k);
        }
    }
}

}  // namespace rg
