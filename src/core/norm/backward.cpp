#include "geometry.h"

namespace rg {
namespace {

template <class A>
struct BackwardContext {
    const NormBackward& call;
    const Geometry& g;
    const NormKernels<A>& kernels = kernel_table().norm.of<A>();
    Storage<A> storage;
    const A *gamma, *beta;
    bool by_input;  // the slope comes from z
    bool stream;
    bool wants_sums;  // sums over dz are needed and were not given

    BackwardContext(const NormBackward& c, const Geometry& geometry)
        : call(c),
          g(geometry),
          storage(kernel_table(), c.dtype, c.activation),
          gamma(static_cast<const A*>(c.gamma)),
          beta(static_cast<const A*>(c.beta)),
          by_input(c.slope_from_input && storage.has_activation()),
          stream(!c.accumulate && c.dx != c.dy && c.dx != c.x &&
                 exceeds_caches(g.elements() * element_size(c.dtype) * (needs_y() ? 4 : 3))) {
        const bool for_dx = c.dx && !c.frozen && !c.given_sum_dz;
        wants_sums = for_dx || wants_parameters();
    }
    bool wants_parameters() const { return call.dgamma || call.dbeta || call.sum_dz; }
    double gamma_at(int64_t channel) const { return gamma ? double(gamma[channel]) : 1.0; }
    double beta_at(int64_t channel) const { return beta ? double(beta[channel]) : 0.0; }
    bool needs_y() const { return storage.has_activation() && !by_input; }
    // Whether kernels can read a block of x, dy and y in place.
    bool inputs_in_place(const Block& b) const {
        return storage.in_place(b, kX) && storage.in_place(b, kDy) && !storage.activates_staged() && !by_input &&
               (!needs_y() || storage.in_place(b, kY));
    }
    int64_t set_bytes() const { return g.K * g.R * element_size(call.dtype) * (needs_y() ? 3 : 2); }
    // dz of a block, and x if it is wanted or needed for z. put_z(x, to) writes the block's z.
    struct Inputs {
        Run<const A> x;
        Gradient<A> dz;
    };
    template <class PutZ>
    Inputs read(const Block& b, Tile<A>& tile, bool want_x, const PutZ& put_z) const {
        const bool has_x = want_x || by_input;
        const Run<const A> x = has_x ? storage.read(call.x, kX, b, tile.x) : Run<const A>{nullptr, 0, 0};
        if (!by_input) return {x, storage.read_dz(call.dy, call.y, b, tile)};
        return {x, storage.read_dz_by_input(call.dy, b, tile, [&](A* to) { put_z(x, to); })};
    }
    // dx does not depend on x if the statistics are constants.
    Run<const A> x_for_dx(const Inputs& in) const { return call.frozen ? Run<const A>{nullptr, 0, 0} : in.x; }
    // A set of one element, normalized by its own statistics, gives beta for any x.
    bool constant_sets() const { return g.set_size() == 1 && !call.statistics_given && !call.frozen; }
    // The statistics that dx is computed with: 1 / std is 0 where dx is exactly 0.
    SetStatistics<A> dx_statistics(int64_t set, double rstd) const {
        SetStatistics<A> s(call.mean[set], rstd);
        if (constant_sets()) s.rstd = A(s.exact_rstd = 0);
        return s;
    }
    SetStatistics<A> dx_statistics(int64_t set) const { return dx_statistics(set, 1 / sqrt(call.var[set] + call.eps)); }

    template <class Kernel>
    void write(const Block& b, Tile<A>& tile, Kernel kernel) const {
        const Run<A> out = storage.target(call.dx, kDx, b, tile, !call.accumulate, stream);
        kernel(Target<A>{out.data, out.stride, stream && out.data != tile.out});
        storage.finish(call.dx, kDx, b, out, tile, call.accumulate, stream);
    }
    // Of `count` channels from `first` on.
    void put_parameters(int64_t first, int64_t count, const double* sum_dz, const double* sum_dz_xhat) const {
        const auto put = [first, count, accumulate = call.accumulate](void* base, const double* values) {
            if (!base) return;
            A* out = static_cast<A*>(base) + first;
            if (accumulate) {
                for (int64_t i = 0; i < count; ++i) out[i] = A(double(out[i]) + values[i]);
            } else {
                for (int64_t i = 0; i < count; ++i) out[i] = A(values[i]);
            }
        };
        put(call.dbeta, sum_dz);
        put(call.dgamma, sum_dz_xhat);
        if (call.sum_dz) {
            memcpy(call.sum_dz + first, sum_dz, size_t(count) * sizeof(double));
            memcpy(call.sum_dz_xhat + first, sum_dz_xhat, size_t(count) * sizeof(double));
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
    using Base::call, Base::g, Base::kernels, Base::storage;
    PlaneBlocks blocks;
    Plan plan;
    double* partial;  // [set][item][2]
    double* means;    // [set][2]: mean(g), mean(g * xhat)
    double* totals;   // [group][C][2]

    PlaneBackward(const NormBackward& c, const Geometry& geometry, const Workers& workers)
        : Base(c, geometry), blocks(geometry), plan(geometry, blocks.items(), this->set_bytes(), workers) {
        CallScratch& scratch = my_call_scratch();
        partial = scratch.partial.take<double>(plan.sets() * plan.items * 2);
        means = scratch.centers.take<double>(plan.sets() * 2);
        totals = scratch.totals.take<double>(plan.groups * g.C * 2);
        memset(totals, 0, size_t(plan.groups * g.C * 2) * sizeof(double));
    }
    bool collects() const { return this->wants_sums; }
    bool applies() const { return call.dx; }

    SetStatistics<A> statistics(int64_t set) const { return {call.mean[set], call.var[set], call.eps}; }

    typename Base::Inputs read(int64_t set, int64_t item, const Block& b, bool want_x) const {
        return Base::read(b, my_tile<A>(), want_x, [&](Run<const A> x, A* to) {
            const int64_t c = blocks.channel(set, item);
            const Affine<A> z = affine(statistics(set), this->gamma_at(c), this->beta_at(c));
            kernels.plane_apply(b.size(), x, addresses(z), 0, ActivationKind::identity, {to, b.cols, false});
        });
    }

    void begin(int64_t) {}
    void collect(int64_t set, int64_t item) {
        Block b = blocks.block(set, item);
        b.ahead = blocks.ahead(set, item, b);
        const auto [x, dz] = read(set, item, b, true);
        double* sums = partial + (set * plan.items + item) * 2;
        sums[0] = sums[1] = 0;
        kernels.plane_sums(b.size(), x, dz, statistics(set), sums);
    }
    void finish(int64_t set) {
        double mean_g = 0, mean_g_xhat = 0, count = g.set_size();
        if (call.given_sum_dz) {
            const int64_t c = blocks.channel(set, 0);
            mean_g = this->gamma_at(c) * call.given_sum_dz[c];
            mean_g_xhat = this->gamma_at(c) * call.given_sum_dz_xhat[c];
            count = *call.given_count;
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
    DxCoefficients<A> coefficients(const SetStatistics<A>& s, int64_t set, int64_t item) const {
        const Slope<A> slope(s.exact_rstd, means[2 * set], means[2 * set + 1]);
        return {A(this->gamma_at(blocks.channel(set, item)) * s.exact_rstd), slope.b, slope.k};
    }
    bool pipelines() const {
        const Block b = blocks.block(0, 0);
        return plan.pipelines(this->stream) && collects() && !call.frozen && applies() && this->inputs_in_place(b) &&
               storage.in_place(b, kDx);
    }
    void apply_and_collect(int64_t set, int64_t next, int64_t item) {
        Tile<A>& tile = my_tile<A>();
        const SetStatistics<A> s = this->dx_statistics(set);
        const Block b = blocks.block(set, item), next_b = blocks.block(next, item);
        const Run<const A> x = storage.read(call.x, kX, b, tile.x), next_x = storage.read(call.x, kX, next_b, tile.x);
        const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
        const Gradient<A> next_dz = storage.read_dz(call.dy, call.y, next_b, tile);
        const Run<A> dx = storage.target(call.dx, kDx, b, tile, true, false);
        double* sums = partial + (next * plan.items + item) * 2;
        sums[0] = sums[1] = 0;
        kernels.plane_dx_sums(b.size(), x, dz, s, coefficients(s, set, item), {dx.data, dx.stride, true},
                              {next_x.data, next_dz, statistics(next), sums});
    }
    void apply(int64_t set, int64_t item) {
        const Block b = blocks.block(set, item);
        Tile<A>& tile = my_tile<A>();
        const SetStatistics<A> s = this->dx_statistics(set);
        const auto in = read(set, item, b, !call.frozen);
        const DxCoefficients<A> slope = coefficients(s, set, item);
        this->write(b, tile, [&](Target<A> dx) {
            kernels.plane_dx(b.size(), this->x_for_dx(in), in.dz, {&s.center, &s.rstd, &s.offset},
                             {&slope.a, &slope.b, &slope.k}, 0, dx);
        });
    }
    bool has_lines() const {
        if (this->stream || plan.phased || !plan.resident || !applies() || !collects() || call.frozen ||
            call.given_sum_dz || call.accumulate || !Lines::fit(g)) {
            return false;
        }
        const Block b = Lines::block(g, 0, 0, 1);
        return this->inputs_in_place(b) && storage.in_place(b, kDx);
    }
    void lines(int64_t sample, int64_t first_set, int64_t sets) {
        const int64_t count = sets * g.K, first = first_set * g.K, set = sample * g.sets_per_n + first_set;
        const Block b = Lines::block(g, sample, first, count);
        Tile<A>& tile = my_tile<A>();
        const Run<const A> x = storage.read(call.x, kX, b, nullptr);
        const Gradient<A> dz = storage.read_dz(call.dy, call.y, b, tile);
        SetScratch& scratch = my_set_scratch();
        double *sum = scratch.partial.take<double>(2 * count), *sum_xhat = sum + count;
        A *center = scratch.coefficients.take<A>(6 * count), *rstd = center + count, *offset = rstd + count;
        A *to_dz = offset + count, *to_xhat = to_dz + count, *constant = to_xhat + count;
        const double* const rstds = reciprocal_stds(kernels, call.var + set, sets, call.eps);
        for (int64_t i = 0; i < count; i += g.K) {
            const int64_t at = quotient(i, g.K);
            const SetStatistics<A> s(call.mean[set + at], rstds[at]);
            for (int64_t line = i; line < i + g.K; ++line) {
                center[line] = s.center;
                rstd[line] = s.rstd;
                offset[line] = s.offset;
                to_dz[line] = A(this->gamma_at(first + line) * s.exact_rstd);
            }
        }
        const Standardization<const A*> statistics_of_lines{center, rstd, offset};
        kernels.row_sums(b.size(), x, dz, statistics_of_lines, nullptr, sum, sum_xhat, nullptr);
        double* group = totals + quotient(sample, plan.group_size) * g.C * 2;
        for (int64_t i = 0; i < count; i += g.K) {
            double mean_g = 0, mean_g_xhat = 0;
            for (int64_t line = i; line < i + g.K; ++line) {
                const int64_t c = first + line;
                group[2 * c] += sum[line];
                group[2 * c + 1] += sum_xhat[line];
                mean_g += this->gamma_at(c) * sum[line];
                mean_g_xhat += this->gamma_at(c) * sum_xhat[line];
            }
            const Slope<A> slope(rstds[quotient(i, g.K)], mean_g / g.set_size(), mean_g_xhat / g.set_size());
            std::fill_n(to_xhat + i, g.K, slope.b);
            std::fill_n(constant + i, g.K, slope.k);
        }
        const Run<A> dx = storage.target(call.dx, kDx, b, tile, true, false);
        kernels.plane_dx(b.size(), x, dz, statistics_of_lines, {to_dz, to_xhat, constant}, 1,
                         {dx.data, dx.stride, false});
    }
    void reduce() {
        if (!this->wants_parameters()) return;
        for (int64_t c = 0; c < g.C; ++c) {
            double sums[2] = {};
            for (int64_t group = 0; group < plan.groups; ++group) {
                sums[0] += totals[(group * g.C + c) * 2];
                sums[1] += totals[(group * g.C + c) * 2 + 1];
            }
            this->put_parameters(c, 1, sums, sums + 1);
        }
    }
};

template <class A>
struct ColumnBackward : BackwardContext<A> {
    using Base = BackwardContext<A>;
    using Base::call, Base::g, Base::kernels, Base::storage;
    const int64_t vectors = this->by_input ? 8 : 6;  // center, rstd, offset, a, b, k, and the scale and shift of z
    ColumnGrid grid;
    ColumnPlan plan;
    double* partial = nullptr;  // phased: [set][chunk][2][C]
    A* coefficients = nullptr;  // phased: [set][vectors][C]
    double* totals;             // [group][2][C]

    ColumnBackward(const NormBackward& c, const Geometry& geometry, const Workers& workers)
        : Base(c, geometry),
          grid(geometry),
          plan(geometry, grid, this->needs_y() ? 3 : 2, element_size(c.dtype),
               grid.row_stride(kX) * element_size(c.dtype), workers) {
        CallScratch& scratch = my_call_scratch();
        if (plan.phased) {
            partial = scratch.partial.take<double>(g.N * grid.chunks * 2 * g.C);
            coefficients = scratch.coefficients.take<A>(g.N * vectors * g.C);
        }
        totals = scratch.totals.take<double>(plan.groups * 2 * g.C);
        memset(totals, 0, size_t(plan.groups * 2 * g.C) * sizeof(double));
    }
    bool collects() const { return this->wants_sums; }
    bool applies() const { return call.dx; }

    // Sums of a chunk: [2][cols]
    double* part(const ColumnRange& range, int64_t chunk) {
        const int64_t size = 2 * range.cols;
        if (plan.phased) return partial + (range.n * grid.chunks + chunk) * size;
        return my_set_scratch().partial.take<double>(grid.chunks * size) + chunk * size;
    }
    A* coefficient(const ColumnRange& range) {
        if (plan.phased) return coefficients + range.n * vectors * range.cols;
        return my_set_scratch().coefficients.take<A>(vectors * range.cols);
    }
    void begin(const ColumnRange& range) {
        const int64_t cols = range.cols;
        A* v = coefficient(range);
        int64_t set = range.n * g.sets_per_n + range.first / g.K;
        const double* rstd = reciprocal_stds(kernels, call.var + set, cols / g.K, call.eps);
        for (int64_t first = 0; first < cols; first += g.K, ++set) {
            const SetStatistics<A> stat(call.mean[set], *rstd++);
            for (int64_t c = first; c < first + g.K; ++c) {
                v[c] = stat.center;
                v[cols + c] = stat.rstd;
                v[2 * cols + c] = stat.offset;
                if (!this->by_input) continue;
                const Affine<A> z = affine(stat, this->gamma_at(range.first + c), this->beta_at(range.first + c));
                v[6 * cols + c] = z.scale;
                v[7 * cols + c] = z.shift;
            }
        }
    }
    // v: the vectors of the range, from the block's first column on
    Standardization<const A*> statistics(const ColumnRange& range, const A* v) const {
        return {v, v + range.cols, v + 2 * range.cols};
    }
    typename Base::Inputs read(const ColumnRange& range, const A* v, const Block& b, bool want_x) const {
        return Base::read(b, my_tile<A>(), want_x, [&](Run<const A> x, A* to) {
            kernels.col_apply(b.size(), x, {v, v + 6 * range.cols, v + 7 * range.cols}, ActivationKind::identity,
                              {to, b.cols, false});
        });
    }
    void collect(const ColumnRange& range, int64_t chunk) {
        const A* v = coefficient(range);
        double* sums = part(range, chunk);
        memset(sums, 0, size_t(2 * range.cols) * sizeof(double));
        const Block whole = grid.place(range, chunk);
        grid.for_parts(whole, this->inputs_in_place(whole), kColumnRows, [&](const Block& b, int64_t col) {
            const auto [x, dz] = read(range, v + col, b, true);
            kernels.col_sums(b.size(), x, dz, statistics(range, v + col), sums + col, sums + range.cols + col);
        });
    }
    void finish(const ColumnRange& range) {
        const int64_t cols = range.cols;
        const double *sum_dz = call.given_sum_dz, *sum_dz_xhat = call.given_sum_dz_xhat;
        const double count = sum_dz ? *call.given_count : g.set_size();
        if (sum_dz) {
            sum_dz += range.first;
            sum_dz_xhat += range.first;
        }
        if (collects()) {
            double* sums = part(range, 0);
            for (int64_t chunk = 1; chunk < grid.chunks; ++chunk) {
                const double* more = sums + chunk * 2 * cols;
                for (int64_t i = 0; i < 2 * cols; ++i) sums[i] += more[i];
            }
            double* group = totals + range.n / plan.group_size * 2 * g.C + range.first;
            for (int64_t c = 0; c < cols; ++c) {
                group[c] += sums[c];
                group[g.C + c] += sums[cols + c];
            }
            if (!sum_dz) {
                sum_dz = sums;
                sum_dz_xhat = sums + cols;
            }
        }
        if (!applies()) return;
        A *a = coefficient(range) + 3 * cols, *b = a + cols, *k = b + cols;
        int64_t set = range.n * g.sets_per_n + range.first / g.K;
        const double* rstd = reciprocal_stds(kernels, call.var + set, cols / g.K, call.eps);
        for (int64_t first = 0; first < cols; first += g.K, ++set) {
            const SetStatistics<A> stat = this->dx_statistics(set, *rstd++);
            double mean_g = 0, mean_g_xhat = 0;
            for (int64_t c = first; c < first + g.K && !call.frozen; ++c) {
                mean_g += this->gamma_at(range.first + c) * sum_dz[c];
                mean_g_xhat += this->gamma_at(range.first + c) * sum_dz_xhat[c];
            }
            const Slope<A> slope(stat.exact_rstd, mean_g / count, mean_g_xhat / count);
            for (int64_t c = first; c < first + g.K; ++c) {
                a[c] = A(this->gamma_at(range.first + c) * stat.exact_rstd);
                b[c] = slope.b;
                k[c] = slope.k;
            }
        }
    }
    void apply(const ColumnRange& range, int64_t chunk) {
        const int64_t cols = range.cols;
        const A* v = coefficient(range);
        Tile<A>& tile = my_tile<A>();
        const Block whole = grid.place(range, chunk);
        const bool direct = this->inputs_in_place(whole) && !call.accumulate &&
                            storage.writes_in_place(call.dx, kDx, whole, this->stream);
        grid.for_parts(whole, direct, 1, [&](const Block& b, int64_t col) {
            const auto in = read(range, v + col, b, !call.frozen);
            const A* const a = v + col + 3 * cols;
            this->write(b, tile, [&](Target<A> dx) {
                kernels.col_dx(b.size(), this->x_for_dx(in), in.dz, statistics(range, v + col),
                               {a, a + cols, a + 2 * cols}, dx);
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
            this->put_parameters(c, 1, sums, sums + 1);
        }
    }
};

// Elements of a block of short rows. They are read twice, the second time from the first-level cache: of a small one, x
// and dy take half, dx, gamma and the sums of the columns the rest.
constexpr int64_t kRowElements = 2048;

template <class A>
struct RowBackward : BackwardContext<A> {
    using Base = BackwardContext<A>;
    using Base::call, Base::g, Base::kernels, Base::storage;
    RowGrid grid;
    double* totals = nullptr;  // [chunk][2][C], the sums of dz, then of dz * xhat; null: not wanted
    double* sums = nullptr;    // long rows: [row][segment][2]

    RowBackward(const NormBackward& c, const Geometry& geometry)
        : Base(c, geometry),
          // What comes from memory is prefetched, into the same cache.
          grid(geometry, kColumnRows, this->stream ? kRowElements / 2 : kRowElements,
               3 * g.elements() * element_size(c.dtype) > far_cache_bytes()) {
        CallScratch& scratch = my_call_scratch();
        if (this->wants_parameters()) { totals = scratch.totals.take<double>(grid.chunks * 2 * g.C); }
        if (grid.is_long()) sums = scratch.partial.take<double>(g.N * grid.segments * 2);
    }

    bool collects() const { return totals || !call.frozen; }

    using Inputs = typename Base::Inputs;
    RowStatistics<A> statistics(int64_t row, int64_t rows) const {
        return {kernels, call.mean + row, call.var + row, rows, call.eps};
    }
    // With rstd = 0, xhat and dx are exactly 0.
    void settle_constant(RowStatistics<A>& s, int64_t rows) const {
        for (int64_t i = 0; i < rows && this->constant_sets(); ++i) s.rstd[i] = s.offset[i] = 0;
    }
    // s: the statistics of forward
    Inputs read(const Block& b, const RowStatistics<A>& s, int64_t col) const {
        return Base::read(b, my_tile<A>(), true, [&](Run<const A> x, A* to) {
            kernels.row_apply(b.size(), {x.data, x.stride, 0}, s,
                              {gamma_from(col), this->beta ? this->beta + col : nullptr}, ActivationKind::identity,
                              {to, b.cols, false});
        });
    }
    const A* gamma_from(int64_t col) const { return this->gamma ? this->gamma + col : nullptr; }

    // Sums over the rows of a chunk, of `cols` columns from `col` on: in the arithmetic type for kColumnRows rows, then
    // in totals.
    struct ColumnSums {
        const RowBackward& pass;
        double *sum_dz, *sum_dz_xhat;
        int64_t cols;
        A* chains = nullptr;  // null: not wanted

        ColumnSums(const RowBackward& backward, int64_t chunk, int64_t col, int64_t columns)
            : pass(backward), cols(columns) {
            if (!pass.totals) return;
            sum_dz = pass.totals + chunk * 2 * pass.g.C + col;
            sum_dz_xhat = sum_dz + pass.g.C;
            chains = my_set_scratch().coefficients.take<A>(chain_elements<A>(cols));
            memset(chains, 0, size_t(chain_elements<A>(cols)) * sizeof(A));
            for (double* sums : {sum_dz, sum_dz_xhat}) memset(sums, 0, size_t(cols) * sizeof(double));
        }
        // After a block that ends before `row`.
        void flush(int64_t row) const {
            if (chains && pass.grid.ends_chain(row)) { pass.kernels.add_chains(cols, chains, sum_dz, sum_dz_xhat); }
        }
    };
    // The sums of g and g * xhat of a block's rows.
    struct RowSums {
        double g[kRowGroup], g_xhat[kRowGroup];
    };
    void write_block(const Block& b, const Inputs& in, const RowStatistics<A>& s, const RowSums& sums, int64_t col,
                     A* chains) const {
        A slope_b[kRowGroup], slope_k[kRowGroup];
        if (call.frozen) {
            std::fill_n(slope_b, b.rows, A(0));
            std::fill_n(slope_k, b.rows, A(0));
        } else {
            kernels.row_slopes(b.rows, s.rstd, sums.g, sums.g_xhat, 1 / g.set_size(), {slope_b, slope_k});
        }
        this->write(b, my_tile<A>(), [&](Target<A> dx) {
            kernels.row_dx(b.size(), in.x, in.dz, s, gamma_from(col), {slope_b, slope_k}, dx, chains);
        });
    }
    void short_rows(int64_t chunk) const {
        const ColumnSums columns(*this, chunk, 0, g.C);
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, 0);
            RowStatistics<A> s = statistics(row, rows);
            const Inputs in = read(b, s, 0);
            settle_constant(s, rows);
            RowSums sums;
            A* const late = call.dx && !this->stream && g.C <= kernels.late_chains ? columns.chains : nullptr;
            if (!call.frozen || (columns.chains && !late)) {
                kernels.row_sums(b.size(), in.x, in.dz, s, gamma_from(0), sums.g, sums.g_xhat,
                                 late ? nullptr : columns.chains);
            }
            if (call.dx) write_block(b, in, s, sums, 0, late);
            columns.flush(row + rows);
        });
    }
    void collect_long(int64_t chunk, int64_t segment) const {
        const int64_t col = segment * grid.cols_per_segment, cols = grid.place(0, 1, segment).cols;
        const ColumnSums columns(*this, chunk, col, cols);
        grid.for_blocks(chunk, [&](int64_t row, int64_t rows) {
            const Block b = grid.place(row, rows, segment);
            const RowStatistics<A> s = statistics(row, rows);
            const Inputs in = read(b, s, col);
            double* out = sums + (row * grid.segments + segment) * 2;
            kernels.row_sums(b.size(), in.x, in.dz, s, gamma_from(col), out, out + 1, columns.chains);
            columns.flush(row + rows);
        });
    }
    void apply_long(int64_t row, int64_t segment) const {
        RowSums total;
        total.g[0] = total.g_xhat[0] = 0;
        for (int64_t i = 0; i < grid.segments && collects(); ++i) {
            total.g[0] += sums[(row * grid.segments + i) * 2];
            total.g_xhat[0] += sums[(row * grid.segments + i) * 2 + 1];
        }
        const Block b = grid.place(row, 1, segment);
        const int64_t col = segment * grid.cols_per_segment;
        const RowStatistics<A> s = statistics(row, 1);
        write_block(b, read(b, s, col), s, total, col, nullptr);
    }
    void run(const Workers& workers) const {
        if (!call.dx && !totals) return;
        if (!grid.is_long()) {
            workers.each(grid.chunks, [&](int64_t chunk) { short_rows(chunk); });
        } else {
            const int64_t segments = grid.segments;
            if (collects()) {
                workers.each(grid.chunks * segments, [&](int64_t i) { collect_long(i / segments, i % segments); });
            }
            if (call.dx) workers.each(g.N * segments, [&](int64_t i) { apply_long(i / segments, i % segments); });
        }
        if (!totals) return;
        kernels.add_parts(grid.chunks, 2 * g.C, totals);
        this->put_parameters(0, g.C, totals, totals + g.C);
    }
};

template <class A>
void backward(const NormBackward& call, const Geometry& g, const Workers& workers) {
    if (g.family == Family::row) {
        RowBackward<A>(call, g).run(workers);
        return;
    }
    if (g.family == Family::plane) {
        PlaneBackward<A> pass(call, g, workers);
        if (pass.has_lines()) {
            Lines(g).run(pass.plan, workers, pass);
        } else {
            pass.pipelines() ? run_pipelined(pass.plan, workers, pass) : run(pass.plan, workers, pass);
        }
        pass.reduce();
    } else {
        ColumnBackward<A> pass(call, g, workers);
        run(pass.plan, workers, pass);
        pass.reduce();
    }
}

}  // namespace

void norm_backward(const NormBackward& call) {
    const Geometry g(call.shape);
    if (g.elements() == 0) return;
    trim_scratch();
    const Workers workers(cost::kElement * double(g.elements()), call.threads);
    call.dtype == DType::f64 ? backward<double>(call, g, workers) : backward<float>(call, g, workers);
}

}  // namespace rg
