// Compiled once per instruction-set level. Everything above is in unnamed namespaces, so that a function compiled for a
// wide level can never be linked in place of the same function for a narrow one. The table is the only exported symbol
// (checked by tests/test_rooms.py).
#include "../kernels.h"
#include "activation.h"
#include "cell_norm.h"
#include "conv_range.h"
#include "dropout.h"
#include "gru_cell.h"
#include "loss_range.h"
#include "map_range.h"
#include "norm_columns.h"
#include "norm_planes.h"
#include "norm_rows.h"
#include "optimizer_range.h"
#include "pool_range.h"
#include "product.h"
#include "reduce_range.h"
#include "scan_range.h"
#include "softmax_range.h"
#include "stage.h"

namespace rg {

namespace {

template <class A>
constexpr StorageKernels<A> make_storage_kernels() {
    return {load_block, store_block};
}

template <class A>
constexpr NormKernels<A> make_norm_kernels() {
    return {plane_moments<A>, plane_moments_wide<A>,
            plane_apply<A>,   plane_sums<A>,
            plane_dx<A>,      plane_apply_moments<A>,
            plane_dx_sums<A>, row_centers<A>,
            row_moments<A>,   settle<A>,
            reciprocal_std,   row_standardize<A>,
            row_apply<A>,     row_apply_moments<A>,
            row_sums<A>,      row_slopes<A>,
            row_dx<A>,        kLateChains,
            add_chains<A>,    add_parts,
            col_moments<A>,   col_moments_wide<A>,
            col_apply<A>,     col_sums<A>,
            col_dx<A>};
}

template <class A>
constexpr ProductKernels<A> make_product_kernels() {
    return {product<A>, panels_at_once, pack_columns<A>, pack_rows<A>, panel_sums<A>};
}

template <class A>
constexpr CellKernels<A> make_cell_kernels() {
    return {forward_cells<A>,      backward_cells<A>, emit_states<A>, collect_gradients<A>, norm_rows<A>,
            norm_rows_gradient<A>, norm_sums<A>,      show_cells<A>,  dropout_row<A>};
}

template <class A>
constexpr LossKernels<A> make_loss_kernels() {
    return {softmax_row<A>, scale_row<A>, soft_gradient_row<A>, element_losses<A>, dot<A>, blend_row<A>};
}

}  // namespace

extern const KernelTable RG_TABLE;
const KernelTable RG_TABLE = {
    RG_ISA_NAME,
    {make_storage_kernels<float>(), make_storage_kernels<double>()},
    {make_norm_kernels<float>(), make_norm_kernels<double>()},
    {make_product_kernels<float>(), make_product_kernels<double>()},
    {{pack_taps<float>, copy_rows<float>, tap_rows<float>, tap_sums<float>},
     {pack_taps<double>, copy_rows<double>, tap_rows<double>, tap_sums<double>}},
    {make_cell_kernels<float>(), make_cell_kernels<double>()},
    {{activate<float>, apply_input_slope<float>, apply_output_slope<float>},
     {activate<double>, apply_input_slope<double>, apply_output_slope<double>}},
    {{optimizer_step<float>, sum_squares<float>}, {optimizer_step<double>, sum_squares<double>}},
    {make_loss_kernels<float>(), make_loss_kernels<double>()},
    {{max_pool<float>, average_pool<float>, l2_pool<float>, average_pool_gradient<float>, l2_pool_gradient<float>},
     {max_pool<double>, average_pool<double>, l2_pool<double>, average_pool_gradient<double>,
      l2_pool_gradient<double>}},
    {{map_run<float>, map_load<float>, map_store<float>}, {map_run<double>, map_load<double>, map_store<double>}},
    {map_run<int64_t>, map_load<int64_t>, map_store<int64_t>},
    {{reduce_rows<float>, reduce_columns<float>, find_value<float>, arg_columns<float>},
     {reduce_rows<double>, reduce_columns<double>, find_value<double>, arg_columns<double>}},
    {{shift_row<float>, softmax_gradient_row<float>, log_softmax_gradient_row<float>, accumulate_row<float>},
     {shift_row<double>, softmax_gradient_row<double>, log_softmax_gradient_row<double>, accumulate_row<double>}},
    {{scan_steps<float>, scan_sequences<float>, clear_where<float>, transpose_block<float>},
     {scan_steps<double>, scan_sequences<double>, clear_where<double>, transpose_block<double>}},
    largest_index,
    add_streams,
    multiply_adds};

}  // namespace rg
