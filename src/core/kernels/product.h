// Matrix products with one operand in panels, and the packing of panels.
//
// A panel is kPanel<A> columns of a matrix (one cache line of a row), [depth][kPanel]. Each element of a result is a
// chain of fused multiply-adds along a run of the depth and one last addition, run after run, in any tile: its bits
// depend neither on how many rows are computed together nor on the thread.
#pragma once

#include "../kernels.h"
#include "vec.h"

namespace rg {
namespace {

// Prefetches into the first-level cache, while prefetch() stops at the second: tiles reuse these lines within
// microseconds. kAhead steps are a few hundred cycles; a longer distance did not help.
constexpr int64_t kAhead = 32;
RG_INLINE void prefetch_near(const void* p) { __builtin_prefetch(p, 0, 3); }

template <class A>
constexpr int kPanelVectors = int(kPanel<A>) / kLanes<A>;

// The maximum number of rows of a tile with this many panels: as many accumulators as fit in registers beside the
// panels' vectors and one broadcast. A step of the depth loads every panel and every row, so square tiles load least:
// some cores load only one 64-byte vector a cycle, while they multiply two.
#if defined(RG_ISA_AVX512)
constexpr int tile_rows(int panels) { return panels > 4 ? 1 : panels == 4 ? 6 : panels == 3 ? 9 : 14; }
constexpr int kMostPanels = 8;
#elif defined(RG_ISA_AVX2) || defined(RG_ISA_NEON)
constexpr int tile_rows(int panels) { return panels == 2 ? 2 : 6; }
constexpr int kMostPanels = 2;
#else
constexpr int tile_rows(int) { return 1; }
constexpr int kMostPanels = 1;
#endif
// If fewer panels than this are left: the next smaller number that has tiles.
constexpr int fewer_panels(int panels) { return panels > 4 ? panels / 2 : panels - 1; }

// The maximum of rows times panels over all tiles.
constexpr int kTilePanels = [] {
    int most = 0;
    for (int panels = kMostPanels; panels > 0; panels = fewer_panels(panels)) {
        most = tile_rows(panels) * panels > most ? tile_rows(panels) * panels : most;
    }
    return most;
}();

// The layout of the operand that is not in panels: rows or columns of panels, or any strides.
enum class Operand { rows, columns, any };

// for r < R, j < P * kPanel: c[r][j] = base[r][j] + sum over k of a[r][k] * panels[k][j], for one run of the depth
template <class A, int R, int P, Operand form>
void product_tile(const Product<A>& p, const A* a, const A* panels, const A* base, int64_t base_row, A* c,
                  int64_t c_row) {
    constexpr int V = kPanelVectors<A>;
    Vec<A> sum[R][P * V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < P * V; ++v) sum[r][v] = splat(A(0));
    }
    if (base == c) {  // prefetch, or the end of the tile would wait for it
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
            for (int v = 0; v < P; ++v) prefetch_near(base + r * base_row + v * kPanel<A>);
        }
    }
    // With constant strides, row addresses need no registers.
    const int64_t a_row = form == Operand::rows ? kPanel<A> : form == Operand::columns ? 1 : p.a_row;
    const int64_t a_step = form == Operand::rows ? 1 : form == Operand::columns ? kPanel<A> : p.a_step;
    const int64_t panel_stride = p.panel_stride;
    for (int64_t group = 0; group < p.depth; group += kPanel<A>) {
        const int64_t end = p.depth - group < kPanel<A> ? p.depth - group : kPanel<A>;
        const A* from = a;
        a += p.a_group;
        if constexpr (form != Operand::columns) {
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) prefetch_near(a + r * a_row);
        }
        for (int64_t k = 0; k < end; ++k) {
            if constexpr (form == Operand::columns) prefetch_near(from + kAhead * kPanel<A>);
#pragma GCC unroll 16
            for (int v = 0; v < (R > 4 ? P : 0); ++v) prefetch_near(panels + v * panel_stride + kAhead * kPanel<A>);
            Vec<A> b[P * V];
#pragma GCC unroll 16
            for (int v = 0; v < P * V; ++v) b[v] = load(panels + (v / V) * panel_stride + (v % V) * kLanes<A>);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Vec<A> broadcast = splat(from[r * a_row]);
#pragma GCC unroll 16
                for (int v = 0; v < P * V; ++v) sum[r][v] = fma(broadcast, b[v], sum[r][v]);
            }
            from += a_step;
            panels += kPanel<A>;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < P * V; ++v) {
            const int64_t column = v * kLanes<A>;
            store(c + r * c_row + column, base ? load(base + r * base_row + column) + sum[r][v] : sum[r][v]);
        }
    }
}

template <class A>
using TileFunction = void (*)(const Product<A>&, const A*, const A*, const A*, int64_t, A*, int64_t);

// The tile of `rows` rows, 1 <= rows <= R.
template <class A, int P, Operand form, int R = tile_rows(P)>
TileFunction<A> tile_of(int64_t rows) {
    if constexpr (R > 1) {
        if (rows < R) return tile_of<A, P, form, R - 1>(rows);
    }
    return product_tile<A, R, P, form>;
}

// Also dispatches on the number of panels: a full tile width, or what is left.
template <class A, Operand form, int P = kMostPanels>
TileFunction<A> tile_for(int64_t rows, int panels) {
    if constexpr (P > 1) {
        if (panels < P) return tile_for<A, form, fewer_panels(P)>(rows, panels);
    }
    return tile_of<A, P, form>(rows);
}

template <class A>
TileFunction<A> tile_function(const Product<A>& p, int64_t rows, int panels) {
    if (p.a_row == kPanel<A> && p.a_step == 1) return tile_for<A, Operand::rows>(rows, panels);
    if (p.a_row == 1 && p.a_step == kPanel<A>) return tile_for<A, Operand::columns>(rows, panels);
    return tile_for<A, Operand::any>(rows, panels);
}

template <class A>
RG_INLINE void copy_row(const A* from, int64_t cols, A* to) {
    int64_t j = 0;
    for (; j + kLanes<A> <= cols; j += kLanes<A>) store(to + j, load(from + j));
    if (j < cols) store_part(to + j, cols - j, load_part(from + j, cols - j, splat(A(0))));
}

// The last panels of a result, if its columns do not fill them: computed in a temporary tile.
template <class A>
void product_tail(const Product<A>& p, TileFunction<A> tile, const A* a, const A* panels, const A* base, A* c,
                  int64_t rows, int64_t cols) {
    const int64_t row = (cols + kPanel<A> - 1) / kPanel<A> * kPanel<A>;
    A from[kTilePanels * kPanel<A>] = {}, to[kTilePanels * kPanel<A>];
    for (int64_t r = 0; base && r < rows; ++r) copy_row(base + r * p.base_row, cols, from + r * row);
    tile(p, a, panels, base ? from : nullptr, row, to, row);
    for (int64_t r = 0; r < rows; ++r) copy_row(to + r * row, cols, c + r * p.c_row);
}

// Rows are split evenly: `larger` tiles have `most` rows, the others one less.
struct RowTiles {
    int64_t tiles, most, larger;
    RowTiles(int64_t rows, int panels)
        : tiles((rows + tile_rows(panels) - 1) / tile_rows(panels)),
          most((rows + tiles - 1) / tiles),
          larger(rows - (most - 1) * tiles) {}
};

// The number of panels of the tiles for this many rows: the most that all rows fit in, and at least eight accumulators
// where they are cheap, to hide the latency of the multiply-add. If they need several tiles, those that load least.
int tile_panels(int64_t rows) {
#if defined(RG_ISA_AVX512)
    return rows == 1 ? 8 : rows <= 6 || rows > 9 ? 4 : 3;
#elif defined(RG_ISA_AVX2) || defined(RG_ISA_NEON)
    return rows <= 2 ? 2 : 1;
#else
    (void)rows;
    return 1;
#endif
}

int64_t panels_at_once(int64_t rows) { return tile_panels(rows); }

// The panels of one tile width times all rows, for one run of the depth. After the first tile they come from the
// first-level cache.
template <class A>
void product_run(const Product<A>& p, int wide) {
    const RowTiles split(p.rows, wide);
    const TileFunction<A> tile = tile_function(p, split.most, wide);
    const TileFunction<A> smaller = split.larger < split.tiles ? tile_function(p, split.most - 1, wide) : nullptr;
    for (int64_t t = 0, row = 0; t < split.tiles; ++t) {
        const TileFunction<A> multiply = t < split.larger ? tile : smaller;
        const int64_t rows = t < split.larger ? split.most : split.most - 1;
        const A *a = p.a + row * p.a_row, *base = p.base ? p.base + row * p.base_row : nullptr;
        A* c = p.c + row * p.c_row;
        if (p.cols == wide * kPanel<A>) {
            multiply(p, a, p.panels, base, p.base_row, c, p.c_row);
        } else {
            product_tail(p, multiply, a, p.panels, base, c, rows, p.cols);
        }
        row += rows;
    }
}

template <class A>
void product(const Product<A>& whole) {
    if (whole.rows == 0) return;
    const int64_t panels = (whole.cols + kPanel<A> - 1) / kPanel<A>;
    const int most = tile_panels(whole.rows);
    int wide = most;
    for (int64_t panel = 0; panel < panels; panel += wide) {
        // Evenly: 5 panels as 3 and 2, not as 4 and 1.
        const int64_t left = panels - panel, tiles = (left + most - 1) / most;
        while ((wide - 1) * tiles >= left) wide = fewer_panels(wide);
        const int64_t column = panel * kPanel<A>, rest = whole.cols - column;
        Product<A> p = whole;
        p.cols = rest < wide * kPanel<A> ? rest : wide * kPanel<A>;
        p.panels += panel * p.panel_stride;
        p.c += column;
        if (p.base) p.base += column;
        for (int64_t left = whole.depth; left == whole.depth || left > 0; left -= kDepthRun) {
            p.depth = left < kDepthRun ? left : kDepthRun;
            product_run(p, wide);
            p.a += kDepthRun / kPanel<A> * p.a_group;
            p.panels += kDepthRun * kPanel<A>;
            p.base = p.c;
            p.base_row = p.c_row;
        }
    }
}

// ---- packing -------------------------------------------------------------------------------------------------------

// Squares of kLanes by kLanes in registers. On x86 shuffles within 128 bits are the cheap ones: rows are read in pieces
// of 128 bits, so that only these are left, and written after one transpose of whole pieces. Elsewhere log2(kLanes)
// perfect shuffles of the rows are the transpose.
#if defined(RG_ISA_AVX512) || defined(RG_ISA_AVX2)

#if defined(RG_ISA_AVX512)
template <int kPiece>
RG_INLINE Vec<float> put_piece(Vec<float> v, const float* p) {
    return _mm512_mask_broadcast_f32x4(v, __mmask16(0xf << 4 * kPiece), _mm_loadu_ps(p));
}
template <int kPiece>
RG_INLINE Vec<double> put_piece(Vec<double> v, const double* p) {
    return _mm512_mask_broadcast_f64x2(v, __mmask8(3 << 2 * kPiece), _mm_loadu_pd(p));
}
RG_INLINE Vec<float> first_piece(const float* p) { return _mm512_castps128_ps512(_mm_loadu_ps(p)); }
RG_INLINE Vec<double> first_piece(const double* p) { return _mm512_castpd128_pd512(_mm_loadu_pd(p)); }
RG_INLINE Vec<float> zip_low(Vec<float> a, Vec<float> b) { return _mm512_unpacklo_ps(a, b); }
RG_INLINE Vec<float> zip_high(Vec<float> a, Vec<float> b) { return _mm512_unpackhi_ps(a, b); }
RG_INLINE Vec<double> zip_low(Vec<double> a, Vec<double> b) { return _mm512_unpacklo_pd(a, b); }
RG_INLINE Vec<double> zip_high(Vec<double> a, Vec<double> b) { return _mm512_unpackhi_pd(a, b); }
// Pieces of 128 bits: 0 and 2 of a and of b, or 1 and 3.
RG_INLINE Vec<double> even_pieces(Vec<double> a, Vec<double> b) { return _mm512_shuffle_f64x2(a, b, 0x88); }
RG_INLINE Vec<double> odd_pieces(Vec<double> a, Vec<double> b) { return _mm512_shuffle_f64x2(a, b, 0xdd); }
#else
template <int kPiece>
RG_INLINE Vec<float> put_piece(Vec<float> v, const float* p) {
    return _mm256_insertf128_ps(v, _mm_loadu_ps(p), kPiece);
}
template <int kPiece>
RG_INLINE Vec<double> put_piece(Vec<double> v, const double* p) {
    return _mm256_insertf128_pd(v, _mm_loadu_pd(p), kPiece);
}
RG_INLINE Vec<float> first_piece(const float* p) { return _mm256_castps128_ps256(_mm_loadu_ps(p)); }
RG_INLINE Vec<double> first_piece(const double* p) { return _mm256_castpd128_pd256(_mm_loadu_pd(p)); }
RG_INLINE Vec<float> zip_low(Vec<float> a, Vec<float> b) { return _mm256_unpacklo_ps(a, b); }
RG_INLINE Vec<float> zip_high(Vec<float> a, Vec<float> b) { return _mm256_unpackhi_ps(a, b); }
RG_INLINE Vec<double> zip_low(Vec<double> a, Vec<double> b) { return _mm256_unpacklo_pd(a, b); }
RG_INLINE Vec<double> zip_high(Vec<double> a, Vec<double> b) { return _mm256_unpackhi_pd(a, b); }
RG_INLINE Vec<double> even_pieces(Vec<double> a, Vec<double> b) { return _mm256_permute2f128_pd(a, b, 0x20); }
RG_INLINE Vec<double> odd_pieces(Vec<double> a, Vec<double> b) { return _mm256_permute2f128_pd(a, b, 0x31); }
#endif

// Transposes the squares of 128 bits in v[0], v[1]...: one for each place of 128 bits.
RG_INLINE void transpose_pieces(Vec<float>* v) {
    const Vec<double> t0 = bit_cast<Vec<double>>(zip_low(v[0], v[1])), t1 = bit_cast<Vec<double>>(zip_high(v[0], v[1]));
    const Vec<double> t2 = bit_cast<Vec<double>>(zip_low(v[2], v[3])), t3 = bit_cast<Vec<double>>(zip_high(v[2], v[3]));
    v[0] = bit_cast<Vec<float>>(zip_low(t0, t2));
    v[1] = bit_cast<Vec<float>>(zip_high(t0, t2));
    v[2] = bit_cast<Vec<float>>(zip_low(t1, t3));
    v[3] = bit_cast<Vec<float>>(zip_high(t1, t3));
}
RG_INLINE void transpose_pieces(Vec<double>* v) {
    const Vec<double> low = zip_low(v[0], v[1]);
    v[1] = zip_high(v[0], v[1]);
    v[0] = low;
}

// to[k] = element k of each of the rows that begin at from[0], from[1]...
template <class A>
RG_INLINE void load_transposed(const A* const (&from)[kLanes<A>], int64_t offset, Vec<A> (&to)[kLanes<A>]) {
    constexpr int piece = 16 / int(sizeof(A)), pieces = kLanes<A> / piece;
#pragma GCC unroll 4
    for (int j = 0; j < pieces; ++j) {
#pragma GCC unroll 4
        for (int i = 0; i < piece; ++i) {
            const int64_t at = offset + j * piece;
            Vec<A> v = put_piece<1>(first_piece(from[i] + at), from[i + piece] + at);
#if defined(RG_ISA_AVX512)
            v = put_piece<3>(put_piece<2>(v, from[i + 2 * piece] + at), from[i + 3 * piece] + at);
#endif
            to[j * piece + i] = v;
        }
        transpose_pieces(to + j * piece);
    }
}

template <class A>
RG_INLINE void transpose_rows(Vec<A> (&row)[kLanes<A>]) {
    constexpr int piece = 16 / int(sizeof(A)), pieces = kLanes<A> / piece;
    Vec<double> v[kLanes<A>];  // [j][i]: pieces j of the rows i, piece + i, 2 * piece + i...
#pragma GCC unroll 4
    for (int j = 0; j < pieces; ++j) transpose_pieces(row + j * piece);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<A>; ++i) v[i] = bit_cast<Vec<double>>(row[i]);
#pragma GCC unroll 4
    for (int i = 0; i < piece; ++i) {
        if constexpr (pieces == 2) {
            row[i] = bit_cast<Vec<A>>(even_pieces(v[i], v[piece + i]));
            row[piece + i] = bit_cast<Vec<A>>(odd_pieces(v[i], v[piece + i]));
        } else {
            const Vec<double> e0 = even_pieces(v[i], v[piece + i]), o0 = odd_pieces(v[i], v[piece + i]);
            const Vec<double> e1 = even_pieces(v[2 * piece + i], v[3 * piece + i]),
                              o1 = odd_pieces(v[2 * piece + i], v[3 * piece + i]);
            row[i] = bit_cast<Vec<A>>(even_pieces(e0, e1));
            row[piece + i] = bit_cast<Vec<A>>(even_pieces(o0, o1));
            row[2 * piece + i] = bit_cast<Vec<A>>(odd_pieces(e0, e1));
            row[3 * piece + i] = bit_cast<Vec<A>>(odd_pieces(o0, o1));
        }
    }
}

#elif !defined(RG_ISA_SCALAR)

template <class A>
RG_INLINE void transpose_rows(Vec<A> (&row)[kLanes<A>]) {
    constexpr int n = kLanes<A>;
    Vec<A> shuffled[n];
#pragma GCC unroll 4
    for (int s = 1; s < n; s *= 2) {
#pragma GCC unroll 16
        for (int i = 0; i < n / 2; ++i) {
            shuffled[2 * i] = interleave_low(row[i], row[i + n / 2]);
            shuffled[2 * i + 1] = interleave_high(row[i], row[i + n / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) row[i] = shuffled[i];
    }
}
template <class A>
RG_INLINE void load_transposed(const A* const (&from)[kLanes<A>], int64_t offset, Vec<A> (&to)[kLanes<A>]) {
#pragma GCC unroll 16
    for (int c = 0; c < kLanes<A>; ++c) to[c] = load(from[c] + offset);
    transpose_rows<A>(to);
}

#endif

// to[k][u] = from[u][k] for a square of kLanes by kLanes.
template <class A>
RG_INLINE void transpose_square(const A* from, int64_t from_row, A* to, int64_t to_row) {
#if defined(RG_ISA_SCALAR)
    (void)from_row, (void)to_row;
    *to = *from;
#else
    constexpr int n = kLanes<A>;
    Vec<A> row[n];
    const A* rows[n];
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) rows[i] = from + i * from_row;
    load_transposed<A>(rows, 0, row);
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) store(to + i * to_row, row[i]);
#endif
}

// panel[k][u] = from[u * u_stride + k * k_stride] for u < units, 0 for the others: rows of a matrix become columns.
template <class A>
void pack_columns(const A* from, int64_t u_stride, int64_t k_stride, int64_t units, int64_t depth, A* panel) {
    constexpr int n = kLanes<A>;
    int64_t done = 0;
    if (k_stride == 1 && units == kPanel<A>) {
        for (; done + n <= depth; done += n) {
            for (int u = 0; u < kPanel<A>; u += n) {
                transpose_square(from + u * u_stride + done, u_stride, panel + done * kPanel<A> + u, kPanel<A>);
            }
        }
    }
    for (int64_t k = done; k < depth; ++k) {
        for (int64_t u = 0; u < kPanel<A>; ++u) {
            panel[k * kPanel<A> + u] = u < units ? from[u * u_stride + k * k_stride] : A(0);
        }
    }
}

// panel[k][u] = from[k * k_stride + u * u_stride] for u < units, 0 for the others. u_stride is mostly 1.
template <class A>
void pack_rows(const A* from, int64_t k_stride, int64_t u_stride, int64_t units, int64_t depth, A* panel) {
    if (u_stride != 1) {
        pack_columns(from, u_stride, k_stride, units, depth, panel);
        return;
    }
    for (int64_t k = 0; k < depth; ++k) {
        const A* row = from + k * k_stride;
        A* to = panel + k * kPanel<A>;
        for (int64_t u = 0; u < kPanel<A>; u += kLanes<A>) {
            const int64_t rest = units - u;
            store(to + u, rest >= kLanes<A> ? load(row + u)
                          : rest > 0        ? load_part(row + u, rest, splat(A(0)))
                                            : splat(A(0)));
        }
    }
}

// ---- sums over rows
// --------------------------------------------------------------------------------------------------

// sums[u] += sum over rows of a[row][u] * b[row][u]; without b, of a alone.
template <class A>
void panel_sums(const A* a, const A* b, int64_t b_row, int64_t rows, double* sums) {
    constexpr int kChains = 4;  // independent sums, to hide the latency of addition
    double part[kChains][kPanel<A>] = {};
    LaneSums<A> sum[kChains][kPanelVectors<A>];
    const auto add = [&](int64_t r, int chain) RG_INLINE_LAMBDA {
#pragma GCC unroll 16
        for (int v = 0; v < kPanelVectors<A>; ++v) {
            const Vec<A> value = load(a + r * kPanel<A> + v * kLanes<A>);
            sum[chain][v].add(b ? value * load(b + r * b_row + v * kLanes<A>) : value);
        }
    };
    int64_t r = 0;
    for (; r + kChains <= rows; r += kChains) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) add(r + chain, chain);
    }
    for (; r < rows; ++r) add(r, 0);
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) {
#pragma GCC unroll 16
        for (int v = 0; v < kPanelVectors<A>; ++v) sum[chain][v].store(part[chain] + v * kLanes<A>);
    }
    for (int64_t u = 0; u < kPanel<A>; ++u) sums[u] += (part[0][u] + part[1][u]) + (part[2][u] + part[3][u]);
}

}  // namespace
}  // namespace rg
