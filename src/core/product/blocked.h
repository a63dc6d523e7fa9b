// Products of matrices by blocks, in pieces that threads can share.
#pragma once

#include <algorithm>

#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {

// c[rows][cols] = base + a * b. Panels of b are packed once for all threads, a block of them at a time; rows of a are
// taken in blocks that stay in the second-level cache, so each is loaded once for every block of panels.
//
// Right has pack(kernels, panel, k, depth, to): rows k to k + depth of a panel of b, where k is a multiple of kPanel;
// and by_rows(): whether rows of b are contiguous, not columns; depth is then at most kPanel. Left has near(kernels,
// row, rows, k, depth, cols): a block of a as the tiles of a product with so many columns read it, which may be packed
// in row_scratch().
template <class A, class Left, class Right>
class BlockedProduct {
public:
    BlockedProduct(const ProductKernels<A>& kernels, const Product<A>& whole, Left left, Right right, Buffer& buffer)
        : kernels_(kernels), whole_(whole), left_(left), right_(right), buffer_(buffer) {
        if (whole.rows == 0 || whole.cols == 0) return;
        const int64_t depth = std::max<int64_t>(1, whole.depth), cols = ceil_div(whole.cols, kPanel<A>) * kPanel<A>;
        // The panels of a block take a quarter of the last level and leave the rest to the other operand and the
        // result. A block that is not as deep as the product costs reading the result again; one that is not as wide
        // costs loading a again.
        const int64_t most = caches().last_level / 4 / int64_t(sizeof(A));
        depth_step_ = std::min(depth, std::max<int64_t>(1, most / cols / kNearDepth) * kNearDepth);
        panel_step_ = whole_tiles(std::min(cols, most / depth_step_) / kPanel<A>, whole.rows);
        depth_blocks_ = ceil_div(depth, depth_step_);
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
        k_ = block % depth_blocks_ * depth_step_;
        panel_ = block / depth_blocks_ * panel_step_;
        depth_ = std::min(depth_step_, whole_.depth - k_);
        cols_ = std::min(panel_step_ * kPanel<A>, whole_.cols - panel_ * kPanel<A>);
        const int64_t panels = ceil_div(cols_, kPanel<A>);
        panel_stride_ = (depth_ + 1) * kPanel<A>;  // one row of padding, to avoid cache-set conflicts
        packed_ = buffer_.take<A>(panels * panel_stride_);
        packings_across_ = ceil_div(panels, kPackPanels);
        packings_ = packings_across_ * ceil_div(depth_, kPackDepth);

        // Rows are split first, because every piece takes up its rows of a for itself.
        const int64_t wanted = threads == 1 ? 1 : 8 * threads;
        const int64_t row_pieces = std::min(wanted, ceil_div(whole_.rows, kTileRows));
        row_piece_ = ceil_div(whole_.rows, row_pieces);
        panel_piece_ = whole_tiles(ceil_div(panels * row_pieces, wanted), row_piece_);
        pieces_across_ = ceil_div(panels, panel_piece_);
        pieces_ = ceil_div(whole_.rows, row_piece_) * pieces_across_;
    }

    int64_t packings() const { return packings_; }
    void pack(int64_t packing) const {
        const int64_t first = packing % packings_across_ * kPackPanels, k0 = packing / packings_across_ * kPackDepth;
        const int64_t last = std::min(ceil_div(cols_, kPanel<A>), first + kPackPanels);
        // Along what is contiguous, so that a page is read line after line: a few rows of b, or a panel's columns.
        const int64_t step = right_.by_rows() ? kPanel<A> : kPackDepth;
        for (int64_t k = k0; k < std::min(depth_, k0 + kPackDepth); k += step) {
            for (int64_t panel = first; panel < last; ++panel) {
                right_.pack(kernels_, panel_ + panel, k_ + k, std::min(step, depth_ - k),
                            packed_ + panel * panel_stride_ + k * kPanel<A>);
            }
        }
    }

    int64_t pieces() const { return pieces_; }
    void multiply(int64_t piece) const {
        const int64_t first_row = piece / pieces_across_ * row_piece_;
        const int64_t rows = std::min(row_piece_, whole_.rows - first_row);
        const int64_t first_panel = piece % pieces_across_ * panel_piece_, column = first_panel * kPanel<A>;
        const int64_t depth_step = std::max<int64_t>(1, std::min(depth_, kNearDepth));
        const int64_t row_step = rows_in_cache<A>(depth_step);
        for (int64_t row = first_row; row < first_row + rows; row += row_step) {
            for (int64_t k = 0; k == 0 || k < depth_; k += depth_step) {  // once even without depth: c is written
                Product<A> p = whole_;
                p.rows = std::min(row_step, first_row + rows - row);
                p.depth = std::min(depth_step, depth_ - k);
                p.cols = std::min(panel_piece_ * kPanel<A>, cols_ - column);
                const StateArray<const A> near = left_.near(kernels_, row, p.rows, k_ + k, p.depth, p.cols);
                p.a = near.data;
                p.a_row = near.row;
                p.a_step = 1;
                p.a_group = near.panel;
                p.panels = packed_ + first_panel * panel_stride_ + k * kPanel<A>;
                p.panel_stride = panel_stride_;
                p.c += row * p.c_row + panel_ * kPanel<A> + column;
                if (k_ + k > 0) {
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
    static constexpr int64_t kNearDepth = 4 * kDepthRun;          // of a block of a
    static constexpr int64_t kPackPanels = 16, kPackDepth = 128;  // of one call of pack()

    // Rounds up to a multiple of the panels that a product of so many rows takes at a time.
    int64_t whole_tiles(int64_t panels, int64_t rows) const {
        const int64_t wide = kernels_.panels_at_once(rows);
        return ceil_div(std::max<int64_t>(1, panels), wide) * wide;
    }

    const ProductKernels<A>& kernels_;
    Product<A> whole_;  // without a and panels
    Left left_;
    Right right_;
    Buffer& buffer_;
    int64_t depth_step_ = 0, panel_step_ = 0, depth_blocks_ = 0, blocks_ = 0;
    // of the current block
    int64_t k_ = 0, panel_ = 0, depth_ = 0, cols_ = 0, panel_stride_ = 0;
    A* packed_ = nullptr;
    int64_t packings_ = 0, packings_across_ = 1;
    int64_t pieces_ = 0, pieces_across_ = 1, row_piece_ = 0, panel_piece_ = 0;
};

// Computes products side by side, so that threads meet as rarely as for one of them.
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

}  // namespace rg
