"""retrograd.bnns: constants, structures, memory images, and buffers as arrays."""

from __future__ import annotations

import array
import copy
import ctypes
import mmap
import re
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd import bnns
from support.bnns_inside import Address, Invalid, Structure

STRUCTURES: dict[str, type[Structure]] = {
    name: value
    for name, value in vars(bnns).items()
    if isinstance(value, type) and issubclass(value, Structure) and value is not Structure
}
# Each structure with its sizeof, then its fields with their offsets, as the specifications print them.
TABLE = """
BNNSNDArrayDescriptor 176
    flags 0 layout 4 size 8 stride 72 data 136 data_type 144 table_data 152 table_data_type 160 data_scale 164
    data_bias 168
BNNSActivation 48
    function 0 alpha 4 beta 8 iscale 12 ioffset 16 ishift 20 iscale_per_channel 24 ioffset_per_channel 32
    ishift_per_channel 40
BNNSTensor 160
    data_type 0 rank 4 shape 8 stride 72 data 136 data_size_in_bytes 144 name 152
BNNSFilterParameters 32
    flags 0 n_threads 8 alloc_memory 16 free_memory 24
BNNSLayerParametersNormalization 1128
    i_desc 0 o_desc 176 beta_desc 352 gamma_desc 528 moving_mean_desc 704 moving_variance_desc 880 momentum 1056
    epsilon 1060 activation 1064 num_groups 1112 normalization_axis 1120
BNNSLayerParametersActivation 408
    i_desc 0 o_desc 176 activation 352 axis_flags 400
BNNSLayerParametersFullyConnected 752
    i_desc 0 w_desc 176 o_desc 352 bias 528 activation 704
BNNSLayerParametersArithmetic 64
    arithmetic_function 0 arithmetic_function_fields 8 activation 16
BNNSArithmeticUnary 368
    in_ 0 in_type 176 out 184 out_type 360
BNNSArithmeticBinary 552
    in1 0 in1_type 176 in2 184 in2_type 360 out 368 out_type 544
BNNSArithmeticTernary 736
    in1 0 in1_type 176 in2 184 in2_type 360 in3 368 in3_type 544 out 552 out_type 728
BNNSLayerParametersDropout 368
    i_desc 0 o_desc 176 rate 352 seed 356 control 360
BNNSLayerParametersEmbedding 552
    flags 0 i_desc 8 o_desc 184 dictionary 360 padding_idx 536 max_norm 544 norm_type 548
BNNSLayerParametersPermute 416
    i_desc 0 o_desc 176 permutation 352
BNNSLayerParametersPadding 488
    i_desc 0 o_desc 176 padding_size 352 padding_mode 480 padding_value 484
BNNSLayerParametersReduction 536
    i_desc 0 o_desc 176 w_desc 352 reduce_func 528 epsilon 532
BNNSLayerParametersBroadcastMatMul 544
    alpha 0 beta 4 transA 8 transB 9 quadratic 10 a_is_weights 11 b_is_weights 12 iA_desc 16 iB_desc 192
    o_desc 368
BNNSMHAProjectionParameters 528
    target_desc 0 weights 176 bias 352
BNNSLayerParametersMultiheadAttention 2480
    query 0 key 528 value 1056 add_zero_attn 1584 key_attn_bias 1592 value_attn_bias 1768 output 1944 dropout 2472
    seed 2476
BNNSLayerParametersResize 368
    method 0 i_desc 8 o_desc 184 align_corners 360
BNNSLayerParametersCropResize 24
    normalized_coordinates 0 spatial_scale 4 extrapolation_value 8 sampling_mode 12 box_coordinate_mode 16
    method 20
BNNSLayerParametersTensorContraction 544
    operation 0 alpha 8 beta 12 iA_desc 16 iB_desc 192 o_desc 368
BNNSLayerParametersGram 360
    alpha 0 i_desc 8 o_desc 184
BNNSLSTMGateDescriptor 928
    iw_desc 0 hw_desc 352 cw_desc 528 b_desc 704 activation 880
BNNSLSTMDataDescriptor 528
    data_desc 0 hidden_desc 176 cell_state_desc 352
BNNSLayerParametersLSTM 5040
    input_size 0 hidden_size 8 batch_size 16 num_layers 24 seq_len 32 dropout 40 lstm_flags 44
    sequence_descriptor 48 input_descriptor 224 output_descriptor 752 input_gate 1280 forget_gate 2208
    candidate_gate 3136 output_gate 4064 hidden_activation 4992
BNNSOptimizerSGDMomentumFields 40
    learning_rate 0 momentum 4 gradient_scale 8 regularization_scale 12 clip_gradients 16 clip_gradients_min 20
    clip_gradients_max 24 nesterov 28 regularization_func 32 sgd_momentum_variant 36
BNNSOptimizerSGDMomentumWithClippingFields 48
    learning_rate 0 momentum 4 gradient_scale 8 regularization_scale 12 nesterov 16 regularization_func 20
    sgd_momentum_variant 24 clipping_func 28 clip_gradients_min 32 clip_gradients_max 36
    clip_gradients_max_norm 40 clip_gradients_use_norm 44
BNNSOptimizerAdamFields 44
    learning_rate 0 beta1 4 beta2 8 time_step 12 epsilon 16 gradient_scale 20 regularization_scale 24
    clip_gradients 28 clip_gradients_min 32 clip_gradients_max 36 regularization_func 40
BNNSOptimizerAdamWithClippingFields 52
    learning_rate 0 beta1 4 beta2 8 time_step 12 epsilon 16 gradient_scale 20 regularization_scale 24
    regularization_func 28 clipping_func 32 clip_gradients_min 36 clip_gradients_max 40 clip_gradients_max_norm 44
    clip_gradients_use_norm 48
BNNSOptimizerRMSPropFields 44
    learning_rate 0 alpha 4 epsilon 8 centered 12 momentum 16 gradient_scale 20 regularization_scale 24
    clip_gradients 28 clip_gradients_min 32 clip_gradients_max 36 regularization_func 40
BNNSOptimizerRMSPropWithClippingFields 52
    learning_rate 0 alpha 4 epsilon 8 centered 12 momentum 16 gradient_scale 20 regularization_scale 24
    regularization_func 28 clipping_func 32 clip_gradients_min 36 clip_gradients_max 40 clip_gradients_max_norm 44
    clip_gradients_use_norm 48
BNNSLayerParametersConvolution 840
    i_desc 0 w_desc 176 o_desc 352 bias 528 activation 704 x_stride 752 y_stride 760 x_dilation_stride 768
    y_dilation_stride 776 x_padding 784 y_padding 792 groups 800 pad 808
BNNSLayerParametersPooling 680
    i_desc 0 o_desc 176 bias 352 activation 528 pooling_function 576 k_width 584 k_height 592 x_stride 600
    y_stride 608 x_dilation_stride 616 y_dilation_stride 624 x_padding 632 y_padding 640 pad 648
BNNSLayerParametersQuantization 720
    axis_mask 0 function 8 i_desc 16 o_desc 192 scale 368 bias 544
BNNSLayerParametersLossBase 368
    function 0 i_desc 8 o_desc 184 reduction 360
BNNSLayerParametersLossSoftmaxCrossEntropy 368
    function 0 i_desc 8 o_desc 184 reduction 360 label_smooth 364
BNNSLayerParametersLossSigmoidCrossEntropy 368
    function 0 i_desc 8 o_desc 184 reduction 360 label_smooth 364
BNNSLayerParametersLossHuber 368
    function 0 i_desc 8 o_desc 184 reduction 360 huber_delta 364
BNNSLayerParametersLossYolo 440
    function 0 i_desc 8 o_desc 184 reduction 360 huber_delta 364 number_of_grid_columns 368
    number_of_grid_rows 376 number_of_anchor_boxes 384 anchor_box_size 392 rescore 400 scale_xy 404 scale_wh 408
    scale_object 412 scale_no_object 416 scale_classification 420 object_minimum_iou 424 no_object_maximum_iou 428
    anchors_data 432
bnns_graph_t 16
    data 0 size 8
bnns_graph_context_t 16
    data 0 size 8
bnns_graph_compile_options_t 16
    data 0 size 8
bnns_graph_shape_t 16
    rank 0 shape 8
bnns_graph_argument_t 16
    data_ptr 0 data_ptr_size 8
bnns_user_message_data_t 16
    size 0 data 8
"""
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {}
for heading, *fields in (row.split() for row in re.split(r"\n(?=\S)", TABLE.strip())):
    LAYOUTS[heading] = int(fields[0]), dict(zip(fields[1::2], map(int, fields[2::2]), strict=True))


def test_every_structure_is_listed() -> None:
    assert set(STRUCTURES) == set(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_structure_sizes_and_offsets(name: str) -> None:
    size, offsets = LAYOUTS[name]
    assert STRUCTURES[name].sizeof == size
    assert {field.name: field.offset for field in STRUCTURES[name]._layout} == offsets


CONSTANTS = """
DataTypeFloat32 65568 DataTypeFloat16 65552 DataTypeBFloat16 98320 DataTypeInt8 0x20008 DataTypeUInt32 0x40020
DataTypeUInt6 0x40006 DataTypeIndexed4 0x80004 DataTypeBoolean 0x100008 DataLayoutVector 0x10000
DataLayoutImageCHW 0x30000 DataLayoutSNE 0x30001 DataLayoutNSE 0x30002 DataLayoutConvolutionWeightsOIHW_Pack32 0x40010
DataLayout8DFirstMajor 0x88001 NDArrayFlagBackpropAccumulate 1 ActivationFunctionIdentity 0
ActivationFunctionThreshold 28 ActivationFunctionHardSwish 30 ActivationFunctionGELUApproximation2 30
ActivationFunctionGELUApproximationSigmoid 35 BatchNorm 2 GroupNorm 5 Arithmetic 8 FlagsUseClientPtr 1
LayerFlagsLSTMBidirectional 1 LayerFlagsLSTMDefaultActivations 2 L2Norm 1 QuantizerFunctionQuantize 0
QuantizerFunctionDequantize 1 LossFunctionSoftmaxCrossEntropy 1 LossFunctionSigmoidCrossEntropy 2
LossFunctionMeanSquareError 3 LossFunctionHuber 4 LossFunctionYolo 5 LossFunctionLog 6 LossFunctionCosineDistance 7
LossFunctionHinge 8 LossFunctionMeanAbsoluteError 9 LossFunctionCategoricalCrossEntropy 10
InterpolationMethodNearest 0 InterpolationMethodLinear 1 LinearSamplingDefault 0 LinearSamplingAlignCorners 1
LinearSamplingUnalignCorners 2 LinearSamplingStrictAlignCorners 3 LinearSamplingOffsetCorners 4 CornersHeightFirst 0
CornersWidthFirst 1 CenterSizeHeightFirst 2 CenterSizeWidthFirst 3 LossReductionNone 0 LossReductionSum 1
LossReductionWeightedMean 2 LossReductionMean 3 LossReductionNonZeroWeightMean 4
"""


def test_constants_have_apples_numbers() -> None:
    table = CONSTANTS.split()
    expected = {f"BNNS{name}": int(number, 0) for name, number in zip(table[::2], table[1::2], strict=True)}
    expected["SIZE_MAX"] = 2**64 - 1
    assert {name: getattr(bnns, name) for name in expected} == expected


def test_data_types_carry_their_width_and_layouts_their_rank() -> None:
    for name, value in vars(bnns).items():
        if name.startswith("BNNSDataType") and not name.endswith("Bit") and name != "BNNSDataTypeBoolean":
            assert value & 0xFFF == int("".join(filter(str.isdigit, name.removeprefix("BNNSDataTypeB"))) or 0), name
        digits = name.removeprefix("BNNSDataLayout")
        if digits != name and digits[0].isdigit():
            assert value >> 16 == int(digits[0])
            assert bool(value & 1) is digits.endswith("FirstMajor")


def test_activation_numbers_are_consecutive() -> None:
    numbers = {v for n, v in vars(bnns).items() if n.startswith("BNNSActivationFunction")}
    assert numbers == set(range(36))


def test_star_import_shadows_nothing() -> None:
    import builtins

    names: dict[str, Any] = {}
    exec("from retrograd.bnns import *", names)
    assert not set(names) & set(dir(builtins)) - {"__builtins__"}
    assert {"BNNSFilterDestroy", "BNNSDataTypeFloat32", "BNNSActivation", "BNNS", "SIZE_MAX", "last_error"} <= set(
        names
    )


# ---- C's value semantics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_new_structure_is_all_zeros(name: str) -> None:
    assert STRUCTURES[name]().to_bytes() == bytes(LAYOUTS[name][0])


def test_assigning_a_structure_copies_it() -> None:
    descriptor = bnns.BNNSNDArrayDescriptor(size=(3,))
    layer = bnns.BNNSLayerParametersNormalization(i_desc=descriptor)
    layer.o_desc = descriptor
    descriptor.size[0] = 7
    layer.i_desc.size[0] = 5
    assert (layer.i_desc.size[0], layer.o_desc.size[0], descriptor.size[0]) == (5, 3, 7)


def test_an_array_of_structures_copies_too() -> None:
    descriptor = bnns.BNNSNDArrayDescriptor(size=(3,))
    gate = bnns.BNNSLSTMGateDescriptor()
    gate.iw_desc[0] = gate.iw_desc[1] = descriptor
    gate.iw_desc[0].size[0] = 9
    assert (gate.iw_desc[0].size[0], gate.iw_desc[1].size[0], descriptor.size[0]) == (9, 3, 3)
    with pytest.raises(TypeError, match="fixed length"):
        gate.iw_desc.append(descriptor)
    with pytest.raises(TypeError, match="BNNSNDArrayDescriptor"):
        gate.iw_desc[0] = 3  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="stay where they are"):
        gate.iw_desc[0:2] = [descriptor, descriptor]
    with pytest.raises(ValueError, match="2 entries, not 1"):
        gate.iw_desc = [descriptor]


def test_fields_by_position_and_name() -> None:
    activation = bnns.BNNSActivation(bnns.BNNSActivationFunctionClamp, -1.0, beta=2.0)
    assert (activation.function, activation.alpha, activation.beta) == (8, -1.0, 2.0)
    with pytest.raises(TypeError, match="no field 'gamma'"):
        bnns.BNNSActivation(gamma=1)
    with pytest.raises(TypeError, match="given twice"):
        bnns.BNNSActivation(8, function=8)
    with pytest.raises(TypeError, match="9 fields, not 10"):
        bnns.BNNSActivation(*range(10))


def test_sizes_and_strides_are_read_and_set_one_by_one() -> None:
    descriptor = bnns.BNNSNDArrayDescriptor(size=(4, 3), stride=[1, 5])
    descriptor.size[1] = 2
    assert descriptor.size == (4, 2)
    assert list(descriptor.stride) == [1, 5, 0, 0, 0, 0, 0, 0]
    descriptor.size = (1, 2, 3, 4, 5, 6, 7, 8)
    assert descriptor.size[-1] == 8
    with pytest.raises(ValueError, match="8 entries, not 9"):
        descriptor.size = tuple(range(9))


def test_equality_copy_and_repr() -> None:
    data = np.zeros(3, np.float32)
    descriptor = bnns.BNNSNDArrayDescriptor.from_array(data)
    assert descriptor == copy.copy(descriptor)
    assert copy.copy(descriptor).data is data
    assert descriptor != bnns.BNNSNDArrayDescriptor.from_array(data.copy())
    assert repr(descriptor) == (
        "BNNSNDArrayDescriptor(layout=BNNSDataLayoutVector, size=(3,), data=<float32 array (3,)>, "
        "data_type=BNNSDataTypeFloat32)"
    )
    assert repr(bnns.BNNSActivation()) == "BNNSActivation()"


# ---- memory images ---------------------------------------------------------------------------------------------------


def test_image_of_a_descriptor() -> None:
    data = np.arange(6, dtype=np.float32)
    descriptor = bnns.BNNSNDArrayDescriptor(
        flags=1, layout=bnns.BNNSDataLayoutImageCHW, size=(3, 2, 1), stride=(1, 3), data=data, data_type=0x10020,
        data_scale=0.5, data_bias=-2.0,
    )  # fmt: skip
    expected = struct.pack(
        "<II8Q8QQI4xQIff4x",
        1, 0x30000, 3, 2, 1, 0, 0, 0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 0, data.ctypes.data, 0x10020, 0, 0, 0.5, -2.0,
    )  # fmt: skip
    assert descriptor.to_bytes() == expected


def test_pointers_of_an_image_become_the_buffers_that_memory_names() -> None:
    data = np.arange(6, dtype=np.float32)
    image = bnns.BNNSNDArrayDescriptor.from_array(data).to_bytes()
    there = bnns.BNNSNDArrayDescriptor.from_bytes(image, {data.ctypes.data: data})
    assert there.data is data
    assert np.shares_memory(there.view(), data)
    assert bnns.BNNSNDArrayDescriptor.from_bytes(image, lambda address: data).data is data


def test_unknown_pointers_become_addresses_that_no_call_follows() -> None:
    image = bytearray(bnns.BNNSNDArrayDescriptor(layout=0x10000, size=(3,), data_type=0x10020).to_bytes())
    struct.pack_into("<Q", image, 136, 0xDEADBEEF)
    descriptor = bnns.BNNSNDArrayDescriptor.from_bytes(image)
    assert descriptor.data == 0xDEADBEEF
    assert isinstance(descriptor.data, Address)
    assert descriptor.to_bytes() == bytes(image)
    with pytest.raises(Invalid, match="0xdeadbeef"):
        descriptor.view()


def test_image_of_the_wrong_size() -> None:
    with pytest.raises(ValueError, match="175 bytes, the structure 176"):
        bnns.BNNSNDArrayDescriptor.from_bytes(bytes(175))


def test_what_c_cannot_hold_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"BNNSNDArrayDescriptor\.flags is -1"):
        bnns.BNNSNDArrayDescriptor(flags=-1).to_bytes()
    with pytest.raises(ValueError, match=r"BNNSActivation\.alpha is 'x'"):
        bnns.BNNSActivation(alpha="x").to_bytes()


def test_function_pointers_of_ctypes_have_an_address() -> None:
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda pointer: None)
    image = bnns.BNNSFilterParameters(free_memory=free).to_bytes()
    assert struct.unpack_from("<Q", image, 24)[0] == ctypes.cast(free, ctypes.c_void_p).value
    assert bnns.BNNSFilterParameters(free_memory=print).to_bytes() == bytes(32)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25)  # each of them has every field of the structure
@given(seed=st.integers(0, 2**32 - 1))
def test_any_image_survives_a_round_trip(name: str, seed: int) -> None:
    """Whatever a device has dumped: every field comes back; padding is zero."""
    kind = STRUCTURES[name]
    random = np.random.default_rng(seed).integers(0, 256, kind.sizeof, np.uint8)
    once = kind.from_bytes(random).to_bytes()
    assert kind.from_bytes(once).to_bytes() == once
    bools = {field.offset for field in kind._layout if getattr(field.kind, "code", "") == "?"}
    for field in kind._layout:
        code = getattr(field.kind, "code", None)
        if code is None or field.offset in bools:
            continue
        size = struct.calcsize(f"<{code}")
        before, after = random.tobytes()[field.offset :][:size], once[field.offset :][:size]
        # A signalling NaN may come back quiet.
        assert before == after or (code == "f" and np.isnan(np.frombuffer(before, np.float32)[0]))


# ---- buffers ---------------------------------------------------------------------------------------------------------


def flat(data: Any, count: int = 4) -> np.ndarray:
    return bnns.BNNSNDArrayDescriptor(layout=0x10000, size=(count,), data=data, data_type=0x10020).view()


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.float32),
        bytearray(16),
        memoryview(bytearray(16)),
        array.array("f", [0.0] * 4),
        (ctypes.c_float * 4)(),
        mmap.mmap(-1, 16),
    ],
    ids=["array", "matrix", "bytearray", "memoryview", "array.array", "ctypes", "mmap"],
)
def test_any_buffer_holds_data(data: Any) -> None:
    view = flat(data)
    view[:] = [1, 2, 3, 4]
    assert np.array_equal(flat(data), [1, 2, 3, 4])
    with pytest.raises(Invalid, match=r"data has 16 bytes, but size=\(5,\) spans 20"):
        flat(data, 5)


def test_a_torch_tensor_holds_data(torch: Any) -> None:
    tensor = torch.zeros(4)
    flat(tensor)[:] = 3
    assert tensor.tolist() == [3, 3, 3, 3]
    with pytest.raises(Invalid, match="data requires grad"):
        flat(torch.zeros(4, requires_grad=True))


def test_a_jax_array_is_read_only(jax: Any) -> None:
    view = flat(jax.numpy.arange(4, dtype="float32"))
    assert np.array_equal(view, [0, 1, 2, 3])
    assert not view.flags.writeable


def test_read_only_buffers_give_read_only_views() -> None:
    assert not flat(bytes(16)).flags.writeable


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "NULL"),
        (4711, "the address 0x1267"),
        ("text", "type str"),
        (np.array([None] * 8), "not of numbers"),
        (memoryview(bytearray(32))[::2], "must be contiguous"),
        (object(), "type object"),
        (np.float32(1), "data has 4 bytes, but size=.* spans 16"),
        (np.empty(0, np.float32), "data has 0"),
    ],
)
def test_what_is_no_buffer(data: Any, reason: str) -> None:
    with pytest.raises(Invalid, match=reason):
        flat(data)


def test_strides_of_first_major_are_fastest_first() -> None:
    """S.1: sizes are listed slowest first there, strides never."""
    data = np.arange(40, dtype=np.float32)
    first = bnns.BNNSNDArrayDescriptor(
        layout=bnns.BNNSDataLayout3DFirstMajor, size=(2, 3, 4), stride=(1, 5), data=data, data_type=0x10020
    )
    last = bnns.BNNSNDArrayDescriptor(
        layout=bnns.BNNSDataLayout3DLastMajor, size=(4, 3, 2), stride=(1, 5), data=data, data_type=0x10020
    )
    expected = [[[i * 15 + j * 5 + k for k in range(4)] for j in range(3)] for i in range(2)]
    assert first.view().tolist() == last.view().tolist() == expected


def test_zero_strides_are_contiguous_after_given_ones() -> None:
    data = np.arange(100, dtype=np.float32)
    d = bnns.BNNSNDArrayDescriptor(layout=0x30000, size=(2, 3, 2), stride=(2, 0, 0), data=data, data_type=0x10020)
    assert d.geometry().strides == (2, 4, 12)
    assert d.view()[1, 2, 1] == 12 + 8 + 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"layout": 0x30000, "size": (2, 3, 2), "stride": (3, 2, 12)},
            r"stride\[1\] is 2, below that of a faster axis",
        ),
        ({"layout": 0x30000, "size": (2, 0, 2)}, "an extent must be at least 1"),
        ({"layout": 0x12345, "size": (2,)}, "layout is 0x12345"),
        ({"layout": "SNE", "size": (2,)}, "layout is 'SNE'"),
        ({"layout": 0x10000, "size": ("x",)}, r"size\[0\] is 'x'"),
        ({"layout": 0x10000, "size": (-1,)}, "size_t cannot hold"),
        ({"layout": 0x10000, "size": (2**64,)}, "size_t cannot hold"),
        ({"layout": 0x10000, "size": (2**63,)}, "spans 36893488147419103232"),
        ({"layout": 0x30000, "size": (2, 2, 2), "stride": (1, 2**62, 2**63)}, "spans"),
        ({"layout": 0x10000, "size": (2,), "data_type": 0x10000}, "BNNSDataTypeFloatBit"),
        ({"layout": 0x10000, "size": (2,), "data_type": 0x40003}, "BNNSDataTypeUInt3"),
    ],
)
def test_descriptors_that_make_no_sense(fields: dict[str, Any], reason: str) -> None:
    fields = {"data_type": 0x10020, "data": np.zeros(64, np.float32), **fields}
    with pytest.raises(Invalid, match=reason):
        bnns.BNNSNDArrayDescriptor(**fields).view()


def test_a_changed_field_is_noticed() -> None:
    a, b = np.zeros(8, np.float32), np.ones(8, np.float16)
    descriptor = bnns.BNNSNDArrayDescriptor.from_array(a)
    assert descriptor.view().shape == (8,)
    descriptor.size[0] = 4
    assert descriptor.view().shape == (4,)
    descriptor.stride = (2,)
    assert descriptor.view().strides == (8,)
    descriptor.data = b
    with pytest.raises(Invalid, match="data has elements of type float16"):
        descriptor.view()
    descriptor.data_type = bnns.BNNSDataTypeFloat16
    assert descriptor.view().tolist() == [1.0] * 4


# ---- describing arrays -----------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=8).map(tuple),
    steps=st.lists(st.integers(1, 2), min_size=8, max_size=8),
)
def test_from_array_describes_any_array(shape: tuple[int, ...], steps: list[int]) -> None:
    big = np.arange(np.prod([n * s for n, s in zip(shape, steps, strict=False)]), dtype=np.float32)
    big = big.reshape([n * s for n, s in zip(shape, steps, strict=False)])
    part = big[tuple(slice(0, None, s) for s, _ in zip(steps, shape, strict=False))]
    descriptor = bnns.BNNSNDArrayDescriptor.from_array(part)
    assert np.array_equal(descriptor.view(), part)
    assert np.shares_memory(descriptor.view(), part)


def test_from_array_chooses_the_layout_by_rank() -> None:
    layouts = {n: bnns.BNNSNDArrayDescriptor.from_array(np.zeros((2,) * n, np.float32)).layout for n in range(1, 9)}
    assert layouts == {1: 0x10000, 2: 0x20000, 3: 0x30000, **{n: n << 16 | 0x8001 for n in range(4, 9)}}
    sne = bnns.BNNSNDArrayDescriptor.from_array(np.zeros((5, 3, 2), np.float32), bnns.BNNSDataLayoutSNE)
    assert sne.size == (2, 3, 5)


def test_from_array_does_not_mind_the_strides_of_single_axes() -> None:
    for part in (
        np.zeros((1, 4, 3), np.float32).swapaxes(0, 1),
        np.arange(12, dtype=np.float32).reshape(4, 3)[:, None, ::2],
    ):
        descriptor = bnns.BNNSNDArrayDescriptor.from_array(part)
        assert np.array_equal(descriptor.view(), part)
        assert np.shares_memory(descriptor.view(), part)


def test_a_single_axis_does_not_hide_that_strides_decrease() -> None:
    descriptor = bnns.BNNSNDArrayDescriptor(
        layout=0x30000, size=(3, 1, 3), stride=(4, 1, 2), data=np.zeros(64, np.float32), data_type=0x10020
    )
    with pytest.raises(Invalid, match=r"stride\[2\] is 2, below that of a faster axis, which is 4"):
        descriptor.view()


def test_buffers_of_odd_kinds() -> None:
    assert flat(np.array(3, np.float32), 1).tolist() == [3]

    class Sub(np.ndarray):
        pass

    whole = np.zeros((), np.float32).view(Sub)
    flat(whole, 1)[0] = 5
    assert float(whole) == 5


def test_a_batch_of_one_may_have_any_stride() -> None:
    x = np.ones(4, np.float32)
    layer = bnns.BNNSLayerParametersActivation(
        bnns.BNNSNDArrayDescriptor.from_array(x), bnns.BNNSNDArrayDescriptor.from_array(x), bnns.BNNSActivation(4)
    )
    filter = bnns.BNNSFilterCreateLayerActivation(layer)
    assert bnns.BNNSFilterApplyBatch(filter, 1, x, bnns.SIZE_MAX, x, bnns.SIZE_MAX) == 0


def test_from_array_refuses_with_a_reason() -> None:
    with pytest.raises(ValueError, match="2 axes, BNNSDataLayoutVector has 1"):
        bnns.BNNSNDArrayDescriptor.from_array(np.zeros((2, 2), np.float32), bnns.BNNSDataLayoutVector)
    with pytest.raises(ValueError, match="must not decrease"):
        bnns.BNNSNDArrayDescriptor.from_array(np.zeros((2, 3), np.float32).T)
    with pytest.raises(ValueError, match="no BNNSDataType for elements of type float64"):
        bnns.BNNSNDArrayDescriptor.from_array(np.zeros(2))
    with pytest.raises(ValueError, match="9 axes, a descriptor at most 8"):
        bnns.BNNSNDArrayDescriptor.from_array(np.zeros((1,) * 9, np.float32))
