#include "geometry.h"

namespace rg {
namespace {

template <class A>
struct ForwardContext {
    const NormForward& call;
    const Geometry& g;
    const NormKernels<A>& kernels = kernel_table().norm.of<A>();
    Storage<A> storage;
    const A *gamma, *beta;
    bool stream;

    ForwardContext(const NormForward& c, const Geometry& geometry)
        : call(c),
          g(geometry),
          storage(kernel_table(), c.dtype, c.activation),
          gamma(static_cast<const A*>(c.gamma)),
          beta(static_cast<const A*>(c.beta)),
          stream(c.x != c.y && exceeds_caches(g.elements() * element_size(c.dtype) * (c.keep ? 3 : 2))) {}

    int64_t set_bytes() const { return g.K * g.R * element_size(call.dtype); }
    double gamma_at(int64_t channel) const { return gamma ? double(gamma[channel]) : 1.0; }
    double beta_at(int64_t channel) const { return beta ? double(beta[channel]) : 0.0; }
    RowParameters<A> parameters_from(int64_t col) const {
        return {gamma ? gamma + col : nullptr, beta ? beta + col : nullptr};
    }
    void put(int64_t set, const Moments& m, double count) const {
        call.mean[set] = m.mean;
        call.var[set] = m.m2 / count;
    }
    // Copies x before y is written, because y may be x itself.
    void keep(const Block& b, Run<const A> x) const {
        if (call.keep) storage.write(call.keep, kKeep, b, x, false, stream);
    }
    template <class Kernel>
    void write(const Block& b, Run<const A> x, Tile<A>& tile, Kernel kernel) const {
        keep(b, x);
        const Run<A> out = storage.target(call.y, kY, b, tile, !storage.activates_staged(), stream);
        kernel(Target<A>{out.data, out.stride, stream && out.data != tile.out});
        if (storage.activates_staged()) storage.activate(b, tile);
        storage.finish(call.y, kY, b, out, tile, false, stream);
    }
};

// Items are (channel of the set, block).
template <class A>
struct PlaneForward : ForwardContext<A> {
    using Base = ForwardContext<A>;
    using Base::call, Base::g, Base::kernels, Base::storage;
    PlaneBlocks blocks;
    Plan plan;
    double *partial, *centers;

    PlaneForward(const NormForward& c, const Geometry& geometry, const Workers& workers)
        : Base(c, geometry), blocks(geometry), plan(geometry, blocks.items(), this->set_bytes(), workers) {
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
        kernels.plane_moments(b.size(), x, A(0), sums);
        centers[set] = double(A(sums[0] / double(b.rows * b.cols)));
    }
    void collect(int64_t set, int64_t item) {
        Block b = blocks.block(set, item);
        b.ahead = blocks.ahead(set, item, b);
        const Run<const A> x = read_x(b);
        double* sums = partial + (set * items() + item) * 2;
        sums[0] = sums[1] = 0;
        kernels.plane_moments(b.size(), x, A(centers[set]), sums);
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
        return sum_wide(g.set_size(), [&](double center, double* sums) {
            for (int64_t item = 0; item < items(); ++item) {
                const Block b = blocks.block(set, item);
                const Run<const A> x = read_x(b);
                kernels.plane_moments_wide(b.size(), x, center, sums);
            }
        });
    }
    Affine<A> coefficients(int64_t set, int64_t item) const {
        const SetStatistics<A> s(call.mean[set], call.var[set], call.eps);
        const int64_t c = blocks.channel(set, item);
        return affine(s, this->gamma_at(c), this->beta_at(c));
    }
    bool pipelines() const {
        const Block b = blocks.block(0, 0);
        return plan.pipelines(this->stream) && collects() && storage.in_place(b, kX) && storage.in_place(b, kY) &&
               !storage.activates_staged();
    }
    bool has_lines() const {
        if (this->stream || plan.phased || !plan.resident || !collects() || !applies() || call.keep || !Lines::fit(g)) {
            return false;
        }
        const Block b = Lines::block(g, 0, 0, 1);
        return storage.in_place(b, kX) && storage.in_place(b, kY) && !storage.activates_staged();
    }
    void lines(int64_t sample, int64_t first_set, int64_t sets) {
        const int64_t count = sets * g.K, first = first_set * g.K, set = sample * g.sets_per_n + first_set;
        const Block b = Lines::block(g, sample, first, count);
        const Run<const A> x = storage.read(call.x, kX, b, nullptr);
        SetScratch& scratch = my_set_scratch();
        double *center = scratch.partial.take<double>(6 * count), *sum = center + count, *sum_sq = sum + count;
        double *set_center = sum_sq + count, *set_sum = set_center + count, *set_sum_sq = set_sum + count;
        kernels.row_centers({sets, g.R}, {x.data, x.stride * g.K, 0}, set_center);
        for (int64_t i = 0; i < count; ++i) center[i] = set_center[quotient(i, g.K)];
        kernels.row_moments(b.size(), x, center, sum, sum_sq);
        for (int64_t s = 0; s < sets; ++s) {
            set_sum[s] = set_sum_sq[s] = 0;
            for (int64_t i = s * g.K; i < (s + 1) * g.K; ++i) {
                set_sum[s] += sum[i];
                set_sum_sq[s] += sum_sq[i];
            }
        }
        if (!kernels.settle(sets, set_center, set_sum, set_sum_sq, g.set_size(), call.eps, call.mean + set,
                            call.var + set)) {
            for (int64_t s = set; s < set + sets; ++s) {
                if (!(call.var[s] >= 0)) this->put(s, wide(s), g.set_size());
            }
        }
        A *c = scratch.coefficients.take<A>(3 * count), *scale = c + count, *shift = scale + count;
        const double* rstds = reciprocal_stds(kernels, call.var + set, sets, call.eps);
        for (int64_t s = 0; s < sets; ++s) {
            const SetStatistics<A> stat(call.mean[set + s], rstds[s]);
            for (int64_t i = s * g.K; i < (s + 1) * g.K; ++i) {
                const Affine<A> z = affine(stat, this->gamma_at(first + i), this->beta_at(first + i));
                c[i] = z.center;
                scale[i] = z.scale;
                shift[i] = z.shift;
            }
        }
        const Run<A> y = storage.target(call.y, kY, b, my_tile<A>(), true, false);
        kernels.plane_apply(b.size(), x, {c, scale, shift}, 1, storage.fused(), {y.data, y.stride, false});
    }
    void apply_and_collect(int64_t set, int64_t next, int64_t item) {
        const Affine<A> z = coefficients(set, item);
        const Block b = blocks.block(set, item), next_b = blocks.block(next, item);
        const Run<const A> x = read_x(b), next_x = read_x(next_b);
        const Run<A> y = storage.target(call.y, kY, b, my_tile<A>(), true, false);
        double* sums = partial + (next * items() + item) * 2;
        sums[0] = sums[1] = 0;
        this->keep(b, x);
        kernels.plane_apply_moments(b.size(), x, z, storage.fused(), {y.data, y.stride, true},
                                    {next_x.data, A(centers[next]), sums});
    }
    void apply(int64_t set, int64_t item) {
        const Affine<A> z = coefficients(set, item);
        const Block b = blocks.block(set, item);
        Tile<A>& tile = my_tile<A>();
        const Run<const A> x = read_x(b);
        this->write(b, x, tile,
                    [&](Target<A> y) { kernels.plane_apply(b.size(), x, addresses(z), 0, storage.fused(), y); });
    }
};

template <class A>
struct ColumnForward : ForwardContext<A> {
    using Base = ForwardContext<A>;
    using Base::call, Base::g, Base::kernels, Base::storage;
    ColumnGrid grid;
    ColumnPlan plan;
    double* partial = nullptr;  // phased: [set][chunk][2][C]
    A* coefficients = nullptr;  // phased: [set][3][C]: center, scale, shift

    ColumnForward(const NormForward& c, const Geometry& geometry, const Workers& workers)
        : Base(c, geometry),
          grid(geometry),
          plan(geometry, grid, 1, element_size(c.dtype), grid.row_stride(kX) * element_size(c.dtype), workers) {
        if (plan.phased) {
            partial = my_call_scratch().partial.take<double>(g.N * grid.chunks * 2 * g.C);
            coefficients = my_call_scratch().coefficients.take<A>(g.N * 3 * g.C);
        }
    }
    bool collects() const { return !call.statistics_given; }
    bool applies() const { return call.y; }

    // Sums of a chunk: [2][cols]
    double* part(const ColumnRange& range, int64_t chunk) {
        const int64_t size = 2 * range.cols;
        if (plan.phased) return partial + (range.n * grid.chunks + chunk) * size;
        return my_set_scratch().partial.take<double>(grid.chunks * size) + chunk * size;
    }
    A* coefficient(const ColumnRange& range) {
        if (plan.phased) return coefficients + range.n * 3 * range.cols;
        return my_set_scratch().coefficients.take<A>(3 * range.cols);
    }
    template <class Body>
    void for_parts(const Block& whole, const Body& body) {
        grid.for_parts(whole, storage.in_place(whole, kX), kColumnRows,
                       [&](const Block& b, int64_t col) { body(b, col, storage.read(call.x, kX, b, my_tile<A>().x)); });
    }
    void add_moments(const Block& whole, const A* center, double* sums) {
        for_parts(whole, [&](const Block& b, int64_t col, Run<const A> x) {
            kernels.col_moments(b.size(), x, center + col, sums + col, sums + whole.cols + col);
        });
    }

    void begin(const ColumnRange& range) {
        if (!collects()) return;
        A* center = coefficient(range);
        memset(center, 0, size_t(range.cols) * sizeof(A));
        double* sums = part(range, 0);
        memset(sums, 0, size_t(2 * range.cols) * sizeof(double));
        Block b = grid.place(range, 0);
        b.rows = std::min(b.rows, kCenterRows);
        add_moments(b, center, sums);
        for (int64_t c = 0; c < range.cols; ++c) center[c] = A(sums[c] / double(b.rows));
    }
    void collect(const ColumnRange& range, int64_t chunk) {
        double* sums = part(range, chunk);
        memset(sums, 0, size_t(2 * range.cols) * sizeof(double));
        add_moments(grid.place(range, chunk), coefficient(range), sums);
    }
    void finish(const ColumnRange& range) {
        A* center = coefficient(range);
        if (collects()) combine(range, center);
        if (!applies()) return;
        A *scale = center + range.cols, *shift = scale + range.cols;
        int64_t set = range.n * g.sets_per_n + range.first / g.K;
        const double* rstd = reciprocal_stds(kernels, call.var + set, range.cols / g.K, call.eps);
        for (int64_t first = 0; first < range.cols; first += g.K, ++set) {
            const SetStatistics<A> stat(call.mean[set], *rstd++);
            for (int64_t c = first; c < first + g.K; ++c) {
                const Affine<A> z = affine(stat, this->gamma_at(range.first + c), this->beta_at(range.first + c));
                center[c] = z.center;
                scale[c] = z.scale;
                shift[c] = z.shift;
            }
        }
    }
    void combine(const ColumnRange& range, const A* center) {
        const int64_t cols = range.cols;
        double* sums = part(range, 0);
        for (int64_t chunk = 1; chunk < grid.chunks; ++chunk) {
            const double* more = sums + chunk * 2 * cols;
            for (int64_t i = 0; i < 2 * cols; ++i) sums[i] += more[i];
        }
        const double rows = double(g.R);
        if (g.K == 1) return combine_alone(range, center, sums);
        bool all_accepted = true;
        for (int64_t c = 0; c < cols; ++c) {
            const double column[2] = {sums[c], sums[cols + c]};
            Moments m;
            const bool accepted = accept<A>(double(center[c]), column, rows, call.eps, m);
            all_accepted = all_accepted && accepted;
            sums[c] /= rows;                        // the mean's distance from the center
            sums[cols + c] = accepted ? m.m2 : -1;  // never negative otherwise
        }
        Buffer wide_buffer;
        const double* wide_sums = all_accepted ? nullptr : wide(range, wide_buffer);  // means, not distances
        // Combines columns into sets: the variance within the columns plus the variance between their means. A set's
        // sums are replaced only if one of its own columns was not accepted: other columns may be in other ranges.
        for (int64_t first = 0; first < cols; first += g.K) {
            const int64_t last = first + g.K;
            bool accepted = true;
            for (int64_t c = first; c < last; ++c) accepted = accepted && sums[cols + c] >= 0;
            const double *means = accepted ? sums : wide_sums, *squares = means + cols;
            const auto mean = [&](int64_t c) { return accepted ? double(center[c]) + means[c] : means[c]; };
            // The difference of two means, without the rounding error of adding the centers first.
            const auto between = [&](int64_t from, int64_t to) {
                return (accepted ? double(center[to]) - double(center[from]) : 0.0) + (means[to] - means[from]);
            };
            double distance = 0, plain = 0;
            for (int64_t c = first; c < last; ++c) {
                distance += between(first, c);
                plain += mean(c);
            }
            distance /= double(g.K);
            Moments m{mean(first) + distance, 0};
            if (m.mean - m.mean != 0) m.mean = plain / double(g.K);  // infinite: a difference would give NaN
            for (int64_t c = first; c < last; ++c) {
                const double d = between(first, c) - distance;
                m.m2 += squares[c] + rows * d * d;
            }
            this->put(range.n * g.sets_per_n + (range.first + first) / g.K, m, g.set_size());
        }
    }
    // The same where each column is a set.
    void combine_alone(const ColumnRange& range, const A* center, const double* sums) {
        const int64_t cols = range.cols, set = range.n * g.sets_per_n + range.first;
        double* centers = my_set_scratch().rstds.take<double>(cols);
        std::copy_n(center, cols, centers);
        const double rows = double(g.R);
        double *mean = call.mean + set, *var = call.var + set;
        const bool all_accepted = kernels.settle(cols, centers, sums, sums + cols, rows, call.eps, mean, var);
        for (int64_t c = 0; c < cols; ++c) mean[c] = centers[c] + sums[c] / rows;
        if (all_accepted) return;
        Buffer wide_buffer;
        const double* wide_sums = wide(range, wide_buffer);
        for (int64_t c = 0; c < cols; ++c) {
            if (!(var[c] >= 0)) this->put(set + c, {wide_sums[c], wide_sums[cols + c]}, rows);
        }
    }
    const double* wide(const ColumnRange& range, Buffer& buffer) {
        const int64_t cols = range.cols;
        double *sums = buffer.take<double>(3 * cols), *center = sums + 2 * cols;
        memset(center, 0, size_t(cols) * sizeof(double));
        for (int pass = 0; pass < 2; ++pass) {
            memset(sums, 0, size_t(2 * cols) * sizeof(double));
            for (int64_t chunk = 0; chunk < grid.chunks; ++chunk) {
                for_parts(grid.place(range, chunk), [&](const Block& b, int64_t col, Run<const A> x) {
                    kernels.col_moments_wide(b.size(), x, center + col, sums + col, sums + cols + col);
                });
            }
            if (pass == 0) {
                for (int64_t c = 0; c < cols; ++c) center[c] = sums[c] / double(g.R);
            }
        }
        for (int64_t c = 0; c < cols; ++c) {
            const double column[2] = {sums[c], sums[cols + c]};
            const Moments m = wide_moments(center[c], column, double(g.R));
            sums[c] = m.mean;
            sums[cols + c] = m.m2;
        }
        return sums;
    }
    void apply(const ColumnRange& range, int64_t chunk) {
        const A* center = coefficient(range);
        Tile<A>& tile = my_tile<A>();
        const Block whole = grid.place(range, chunk);
        const bool direct = storage.in_place(whole, kX) && !storage.activates_staged() &&
                            storage.writes_in_place(call.y, kY, whole, this->stream);
        grid.for_parts(whole, direct, 1, [&](const Block& b, int64_t col) {
            const Run<const A> x = storage.read(call.x, kX, b, tile.x);
            this->write(b, x, tile, [&](Target<A> y) {
                const A* const z = center + col;
                kernels.col_apply(b.size(), x, {z, z + range.cols, z + 2 * range.cols}, storage.fused(), y);
            });
        });
    }
};

// For shorter rows, summing beside the writes costs more than the memory latency that it hides.
constexpr int64_t kLongEnough = 256;

template <class A>
struct RowForward : ForwardContext<A> {
    using Base = ForwardContext<A>;
    using Base::call, Base::g, Base::kernels, Base::storage;
    RowGrid grid;
    double *partial = nullptr, *centers = nullptr;

    RowForward(const NormForward& c, const Geometry& geometry)
        : Base(c, geometry),
          grid(geometry, kRowGroup, kTile, 2 * g.elements() * element_size(c.dtype) > far_cache_bytes()) {
        if (grid.is_long()) {
            partial = my_call_scratch().partial.take<double>(g.N * grid.segments * 2);
            centers = my_call_scratch().centers.take<double>(g.N);
        }
    }
    bool collects() const { return !call.statistics_given; }
    bool applies() const { return call.y; }

    void write_block(int64_t row, const Block& b, Run<const A> x, int64_t col) {
        const RowStatistics<A> s(kernels, call.mean + row, call.var + row, b.rows, call.eps);
        this->write(b, x, my_tile<A>(), [&](Target<A> y) {
            kernels.row_apply(b.size(), x, s, this->parameters_from(col), storage.fused(), y);
        });
    }

    // Sums of a block's rows about their centers.
    struct RowSums {
        double centers[kRowGroup], sum[kRowGroup], sum_sq[kRowGroup];
    };
    // The rows' statistics from their sums.
    void settle(int64_t row, const Block& b, Run<const A> x, const RowSums& sums) {
        const double count = g.set_size();
        if (kernels.settle(b.rows, sums.centers, sums.sum, sums.sum_sq, count, call.eps, call.mean + row,
                           call.var + row)) {
            return;
        }
        for (int64_t i = 0; i < b.rows; ++i) {
            if (call.var[row + i] >= 0) continue;
            this->put(row + i,
                      sum_wide(count,
                               [&](double center, double* wide) {
                                   kernels.plane_moments_wide({1, b.cols}, {x.data + i * x.stride, 0, 0}, center, wide);
                               }),
                      count);
        }
    }
    void short_rows(int64_t chunk) {
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, 0);
            const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
            if (collects()) {
                RowSums sums;
                kernels.row_centers(b.size(), x, sums.centers);
                kernels.row_moments(b.size(), x, sums.centers, sums.sum, sums.sum_sq);
                settle(row, b, x, sums);
            }
            if (applies()) write_block(row, b, x, 0);
        });
    }
    bool pipelines() const {
        const Block b = grid.place(0, 1, 0);
        return this->stream && g.C >= kLongEnough && applies() && collects() && storage.in_place(b, kX) &&
               storage.in_place(b, kY) && !storage.activates_staged();
    }
    // The same for large results: one block is written while the sums of the next are accumulated.
    void pipelined_rows(int64_t chunk) {
        Block previous;
        int64_t previous_row = -1;
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, 0);
            const Run<const A> x = storage.read(call.x, kX, b, nullptr);
            RowSums sums;
            kernels.row_centers(b.size(), x, sums.centers);
            if (previous_row < 0 || previous.rows != rows) {
                if (previous_row >= 0) finish_rows(previous_row, previous);
                kernels.row_moments(b.size(), x, sums.centers, sums.sum, sums.sum_sq);
            } else {
                const RowStatistics<A> s(kernels, call.mean + previous_row, call.var + previous_row, rows, call.eps);
                const Run<const A> from = storage.read(call.x, kX, previous, nullptr);
                const Run<A> to = storage.target(call.y, kY, previous, my_tile<A>(), true, false);
                this->keep(previous, from);
                kernels.row_apply_moments(b.size(), from, s, this->parameters_from(0), storage.fused(),
                                          {to.data, to.stride, true}, {x.data, sums.centers, sums.sum, sums.sum_sq});
            }
            settle(row, b, x, sums);
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
        kernels.plane_moments(b.size(), x, A(0), sums);
        centers[row] = double(A(sums[0] / double(b.cols)));
    }
    void collect(int64_t row, int64_t segment) {
        const Block b = grid.place(row, 1, segment);
        const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
        double* sums = partial + (row * grid.segments + segment) * 2;
        sums[0] = sums[1] = 0;
        kernels.plane_moments(b.size(), x, A(centers[row]), sums);
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
            m = sum_wide(g.set_size(), [&](double center, double* wide) {
                for (int64_t segment = 0; segment < grid.segments; ++segment) {
                    const Block b = grid.place(row, 1, segment);
                    const Run<const A> x = storage.read(call.x, kX, b, my_tile<A>().x);
                    kernels.plane_moments_wide(b.size(), x, center, wide);
                }
            });
        }
        this->put(row, m, g.set_size());
    }
    void apply(int64_t row, int64_t segment) {
        const Block b = grid.place(row, 1, segment);
        write_block(row, b, storage.read(call.x, kX, b, my_tile<A>().x), segment * grid.cols_per_segment);
    }
};

template <class A>
void forward(const NormForward& call, const Geometry& g, const Workers& workers) {
    if (g.family == Family::plane) {
        PlaneForward<A> pass(call, g, workers);
        if (pass.has_lines()) return Lines(g).run(pass.plan, workers, pass);
        pass.pipelines() ? run_pipelined(pass.plan, workers, pass) : run(pass.plan, workers, pass);
    } else if (g.family == Family::column) {
        ColumnForward<A> pass(call, g, workers);
        run(pass.plan, workers, pass);
    } else {
        RowForward<A> pass(call, g);
        if (pass.grid.is_long()) {
            run(Plan(g, pass.grid.segments, pass.set_bytes(), workers), workers, pass);
        } else {
            const bool pipelined = pass.pipelines();
            workers.each(pass.grid.chunks,
                         [&](int64_t chunk) { pipelined ? pass.pipelined_rows(chunk) : pass.short_rows(chunk); });
        }
    }
}

}  // namespace

void norm_forward(const NormForward& call) {
    const Geometry g(call.shape);
    if (g.elements() == 0) return;
    trim_scratch();
    const Workers workers(cost::kElement * double(g.elements()), call.threads);
    call.dtype == DType::f64 ? forward<double>(call, g, workers) : forward<float>(call, g, workers);
}

}  // namespace rg
