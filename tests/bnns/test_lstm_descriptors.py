"""Apple's BNNS LSTM: layouts, extents, strides and missing data of its descriptors."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd import bnns
from retrograd.bnns import BNNSLayerParametersLSTM, BNNSNDArrayDescriptor
from support.arrays import Array, fenced
from support.bnns_lstm import (
    GATES,
    NSE,
    SIZES,
    SNE,
    Layer,
    all_arrays,
    capacity_of,
    describe,
    every_descriptor,
    read_back,
    replace_descriptors,
    spread,
    untouched,
)

# ---- data layouts (4.1) ---------------------------------------------------------------------------------------------

THREE = {
    "SNE": SNE,
    "NSE": NSE,
    "none": 0,
    "3DLastMajor": bnns.BNNSDataLayout3DLastMajor,
    "3DFirstMajor": bnns.BNNSDataLayout3DFirstMajor,
    "ImageCHW": bnns.BNNSDataLayoutImageCHW,
}
FOUR = {"4DLastMajor": bnns.BNNSDataLayout4DLastMajor, "4DFirstMajor": bnns.BNNSDataLayout4DFirstMajor}


def sequence(array: Array, layout: str, directions: int = 1) -> tuple[BNNSNDArrayDescriptor, Callable[[], Array]]:
    """The contents of an array [T][B][E] described with a layout, and a function that reads it back."""
    if layout == "NSE":
        memory = np.ascontiguousarray(array.transpose(1, 0, 2))
        return describe(memory, NSE), lambda: memory.transpose(1, 0, 2)
    memory = array.copy()
    if layout in FOUR:
        split = memory.reshape(*array.shape[:2], directions, -1)
        return describe(split, FOUR[layout]), lambda: memory
    desc = describe(memory, THREE[layout] or SNE)
    desc.layout = THREE[layout]
    return desc, lambda: memory


@pytest.mark.parametrize("y_layout", [*THREE, *FOUR])
@pytest.mark.parametrize("x_layout", THREE)
def test_layouts_of_data(x_layout: str, y_layout: str) -> None:
    layer = Layer(directions=2, batch_sizes=[2, 1, 2])
    v = layer.values
    assert v.x is not None
    assert v.y is not None
    params, deltas = layer.params, layer.deltas
    params.input_descriptor.data_desc, _ = sequence(v.x, x_layout)
    params.output_descriptor.data_desc, y = sequence(v.y, y_layout, 2)
    deltas.input_descriptor.data_desc, dx = sequence(v.x, x_layout)
    deltas.output_descriptor.data_desc, _ = sequence(layer.dy, y_layout, 2)
    layer.run()
    v.y, layer.gradients.x = y(), dx()
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_sizes_of_data_are_those_of_the_layout() -> None:
    layer = Layer(steps=3, samples=2, inputs=5, units=4, directions=2)
    source, target = layer.params.input_descriptor.data_desc, layer.params.output_descriptor.data_desc
    for layout, x_size, y_size in ((SNE, (5, 2, 3), (8, 2, 3)), (NSE, (5, 3, 2), (8, 3, 2))):
        source.layout = target.layout = layout
        source.size, target.size = x_size, y_size
        assert layer.forward() == 0
        source.size = x_size[:1] + x_size[:0:-1]
        assert "input_descriptor.data_desc" in untouched(layer, layer.forward)
        source.size, target.size = x_size, y_size[:1] + y_size[:0:-1]
        assert "output_descriptor.data_desc" in untouched(layer, layer.forward)
        target.size = y_size


# ---- extents (4.2) --------------------------------------------------------------------------------------------------


def full_layer() -> Layer:
    """One that uses every descriptor."""
    return Layer(layers=2, directions=2, peephole="ifgo", batch_sizes=[2, 2, 1])


def test_zero_extents_are_filled_in() -> None:
    layer = full_layer()
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            desc.size = [0] * 8
    layer.check()


def test_single_zero_extents_are_filled_in() -> None:
    layer = full_layer()
    expected = layer.expected_forward()
    for desc in every_descriptor(layer.params).values():
        size = tuple(desc.size)
        for k in range(desc.layout >> 16):
            desc.size[k] = 0
            assert layer.forward() == 0
            layer.check_outputs(expected)
            desc.size = size


def test_every_contradicting_extent_is_refused() -> None:
    layer = full_layer()
    cache = layer.run()
    results = {name for name in every_descriptor(layer.params) if name.startswith("output_descriptor")}
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None:
                continue
            size = tuple(desc.size)
            for k in range(desc.layout >> 16):
                for wrong in {size[k] + 1, size[k] - 1} - {0}:
                    desc.size[k] = wrong
                    call = layer.forward if params is layer.params and name in results else layer.backward
                    assert name in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
                    desc.size = size
    assert layer.backward(cache) == 0


def test_a_single_weight_as_a_plain_matrix_and_other_products() -> None:
    layer = Layer()
    for params, values in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        for name, arrays in zip(GATES, values.gates, strict=True):
            gate = getattr(params, name)
            gate.iw_desc[0] = describe(arrays["iw"][0, 0])  # type: ignore[index]
            gate.hw_desc = describe(arrays["hw"].reshape(-1))  # type: ignore[union-attr]
            gate.b_desc = describe(arrays["b"].reshape(-1))  # type: ignore[union-attr]
            assert (gate.iw_desc[0].layout, gate.iw_desc[0].size) == (bnns.BNNSDataLayoutRowMajorMatrix, (3, 4))
    layer.check()


@pytest.mark.parametrize("axes", [1, 2, 3, 4])
@pytest.mark.parametrize("given", ["product", "missing", "zeros"])
def test_slow_axes(axes: int, given: str) -> None:
    """The slowest extent given as a product; slow axes left out; slow axes after a product given as 0."""
    layer = Layer(layers=3, directions=2, peephole="ifgo")
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            if desc.data is None:
                continue
            extents = desc.data.shape[::-1]
            if desc.layout == SNE:
                continue
            first = extents[: axes - 1]
            if given == "missing":
                extents = extents[:axes]
            else:
                extents = (*first, int(np.prod(extents[axes - 1 :]))) if axes < len(extents) else extents
            rank = max(axes, len(extents)) if given != "zeros" else 4
            desc.layout, desc.size = rank << 16 | 0x8000, extents
    layer.check()


def test_more_axes_than_needed() -> None:
    layer = Layer()
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            if desc.data is not None and desc.layout != SNE:
                desc.layout, desc.size = bnns.BNNSDataLayout7DLastMajor, (*desc.data.shape[::-1], 1, 0, 1)
    layer.check()
    layer.params.input_descriptor.hidden_desc.size[6] = 2
    untouched(layer, layer.forward)


# ---- strides (1, S.1) -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "paddings",
    [(0, 0, 0, 0), (0, 3, 0, 0), (0, 0, 5, 0), (0, 0, 0, 7), (1, 0, 0, 0), (1, 2, 3, 4)],
    ids=str,
)
@pytest.mark.parametrize("directions", [1, 2])
def test_strides(paddings: tuple[int, ...], directions: int) -> None:
    """Gaps between rows, samples, directions, layers, and between values; nothing but the array is written."""
    layer = Layer(layers=2, directions=directions, peephole="ifgo")
    made = replace_descriptors(layer, lambda array, _: spread(array, paddings))
    layer.run()
    assert all(gaps() for _, _, gaps in made)
    read_back(layer, made)
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_directions_of_the_output_that_lie_apart() -> None:
    layer = Layer(directions=2)
    made = []
    for params, array in ((layer.params, layer.values.y), (layer.deltas, layer.dy)):
        assert array is not None
        made.append(spread(array.reshape(3, 2, 2, 4), (0, 3, 0, 2)))
        params.output_descriptor.data_desc = made[-1][0]
    layer.run()
    layer.values.y = made[0][1]().reshape(3, 2, 8)
    assert made[0][2]()
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_read_only_inputs_beside_outputs_that_lie_apart() -> None:
    """Only what is written has to be writable, also where results go by way of temporaries."""
    layer = Layer(directions=2, batch_sizes=[2, 1, 1])
    assert layer.values.y is not None
    assert layer.batch_sizes is not None
    layer.params.output_descriptor.data_desc = spread(layer.values.y.reshape(3, 2, 2, 4), (0, 3, 0, 2))[0]
    layer.batch_sizes.flags.writeable = False
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == 0, bnns.last_error()


def test_tensors_that_move_their_memory_are_looked_at_anew(torch: Any) -> None:
    """What speaks only DLPack may put its numbers elsewhere between two calls."""
    layer = Layer()
    assert layer.values.x is not None
    tensor = torch.from_numpy(layer.values.x.copy())
    layer.params.input_descriptor.data_desc.data = tensor
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == 0, bnns.last_error()
    assert layer.values.y is not None
    first = layer.values.y.copy()
    tensor.data = 2 * tensor
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == 0
    assert not np.array_equal(layer.values.y, first)
    tensor.resize_(1)
    assert bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer.params, None, None, 0) == -1


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_layouts_strides_and_zero_extents(data: st.DataObject) -> None:
    sizes = [data.draw(st.integers(1, 3), name) for name in ("T", "B", "I", "H", "L")]
    layer = Layer(
        *sizes,
        directions=data.draw(st.integers(1, 2)),
        bias=data.draw(st.sampled_from(("ifgo", "", "g"))),
        peephole=data.draw(st.sampled_from(("", "ifgo", "fo"))),
        states=data.draw(st.sampled_from(("hc", "", "c"))),
    )

    def change(array: Array, _: int) -> tuple[Any, ...]:
        paddings = tuple(data.draw(st.lists(st.sampled_from((0, 0, 1, 2)), min_size=4, max_size=4)))
        desc, read, gaps = spread(array, paddings)
        if data.draw(st.booleans()):  # extents listed slowest first, strides still fastest first
            desc.layout, desc.size = desc.layout | 1, array.shape
        for k in range(array.ndim):
            if data.draw(st.integers(0, 3)) == 0:
                desc.size[k] = 0
        if not any(paddings) and data.draw(st.booleans()):
            desc.stride = [0] * 8
        return desc, read, gaps

    made = replace_descriptors(layer, change)
    layer.run()
    assert all(gaps() for _, _, gaps in made)
    read_back(layer, made)
    layer.check_outputs(layer.expected_forward())
    layer.check_gradients(layer.expected_backward())


def test_one_element_less_than_needed_is_refused() -> None:
    """For every array of both structures; with the whole buffer it works."""
    layer = Layer(layers=2, directions=2, peephole="ifgo")
    arrays = [*all_arrays(layer.values), *all_arrays(layer.gradients)]
    made = replace_descriptors(layer, lambda array, _: spread(array, (0, 1, 0, 0)))
    cache = layer.run()
    whole = [desc.data for desc, _, _ in made]
    refused = 0
    for params in (layer.params, layer.deltas):
        for name, desc in every_descriptor(params).items():
            if desc.data is None:
                continue
            buffer = desc.data
            desc.data = buffer[:-1]
            call = layer.forward if name.startswith("output") and params is layer.params else layer.backward
            reason = untouched(layer, lambda call=call: call(cache), cache, *whole)  # type: ignore[misc]
            assert name in reason
            assert "spans" in reason
            desc.data = buffer
            refused += 1
    assert refused == len(arrays)
    assert layer.backward(cache) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs mprotect")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("paddings", [(0, 0, 0, 0), (0, 1, 2, 3), (1, 0, 0, 0)], ids=str)
def test_memory_beside_the_arrays_and_the_cache_is_not_even_read(at_end: bool, paddings: tuple[int, ...]) -> None:
    layer = Layer(steps=5, samples=3, inputs=5, units=7, layers=2, directions=2, peephole="ifgo")
    replace_descriptors(layer, lambda array, _: spread(array, paddings))
    for params in (layer.params, layer.deltas):
        for desc in every_descriptor(params).values():
            if desc.data is not None:
                desc.data = fenced(desc.data, at_end)
    cache = fenced(np.zeros(len(layer.cache()), np.uint8), at_end)
    for buffer in (cache, None):
        assert layer.forward(buffer) == 0
        assert layer.backward(buffer) == 0
    assert np.isfinite(layer.params.output_descriptor.data_desc.data).all()


@pytest.mark.parametrize("stride", [(2, 1), (1, 2**63), (2**64 - 1,), (1, 4, 3), ("a",), (1.5,)], ids=str)
def test_strides_that_make_no_sense(stride: tuple[Any, ...]) -> None:
    layer = Layer(layers=2, directions=2)
    for name, desc in every_descriptor(layer.params).items():
        if desc.data is not None and not name.endswith("b_desc"):
            old = tuple(desc.stride)
            desc.stride = stride
            assert name in untouched(layer, layer.forward)
            desc.stride = old
    assert layer.forward() == 0


def test_a_result_whose_elements_share_memory_is_refused() -> None:
    layer = Layer()
    cache = layer.run()
    for params, call in ((layer.params, layer.forward), (layer.deltas, layer.backward)):
        for name, desc in every_descriptor(params).items():
            if desc.data is None or name.startswith("input_d") == (params is layer.params) or name.endswith("b_desc"):
                continue
            if name.startswith("output_d") != (params is layer.params):
                continue
            desc.stride = (1, 1, 1, 1)
            assert "share memory" in untouched(layer, lambda call=call: call(cache), cache)  # type: ignore[misc]
            desc.stride = [0] * 8
    layer.params.input_descriptor.data_desc.stride = (1, 1, 1)  # reading the same twice is no harm
    assert layer.forward() == 0


# ---- input weights of the layers (4.3) ------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "units", "directions"), [(4, 4, 1), (8, 4, 2)])
def test_one_descriptor_holds_all_layers_if_the_widths_agree(inputs: int, units: int, directions: int) -> None:
    layer = Layer(layers=3, inputs=inputs, units=units, directions=directions)
    for params in (layer.params, layer.deltas):
        for name in GATES:
            gate = getattr(params, name)
            assert gate.iw_desc[0].size[0] == 3  # FirstMajor: layers first
            gate.iw_desc[1] = gate.iw_desc[0]  # as Apple's article does: it is ignored
    layer.check()
    for params in (layer.params, layer.deltas):
        for name in GATES:
            getattr(params, name).iw_desc[1] = BNNSNDArrayDescriptor(size=(9, 9), data=bytearray(1), data_type=3)
    layer.check()


@pytest.mark.parametrize(("inputs", "units", "directions"), [(3, 4, 1), (4, 4, 2), (3, 4, 2)])
def test_the_second_descriptor_holds_the_upper_layers_otherwise(inputs: int, units: int, directions: int) -> None:
    """With two directions even where the input size is the hidden size."""
    layer = Layer(layers=3, inputs=inputs, units=units, directions=directions)
    layer.check()
    for params in (layer.params, layer.deltas):
        gate = params.forget_gate
        kept = gate.iw_desc[1].data
        gate.iw_desc[1].data = None
        if params is layer.params:
            assert "forget_gate.iw_desc[1]" in untouched(layer, layer.forward)
        else:
            assert layer.backward() == 0  # a gradient that is not wanted
        gate.iw_desc[1].data = kept


def split(layer: Layer) -> None:
    """Give the upper layers to iw_desc[1], as the header says for any input_size that is not hidden_size."""
    for params, values in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        for name, arrays in zip(GATES, values.gates, strict=True):
            whole = arrays["iw"]
            assert whole is not None
            getattr(params, name).iw_desc = [describe(whole[:1]), describe(whole[1:])]


def test_input_weights_in_the_headers_form() -> None:
    """Two directions, and an input as wide as that of the upper layers: iw_desc[1] may hold these."""
    layer = Layer(layers=3, inputs=8, directions=2)
    layer.check()
    split(layer)
    layer.check()
    # Zero extents say nothing of the layers; that iw_desc[1] has data of its own does.
    for params in (layer.params, layer.deltas):
        for name in GATES:
            for desc in getattr(params, name).iw_desc:
                desc.size = (0, 2, 4, 8)
    layer.check()
    kept = layer.params.forget_gate.iw_desc[1].data
    layer.params.forget_gate.iw_desc[1].data = None
    assert "forget_gate.iw_desc[1].data is NULL" in untouched(layer, layer.forward)
    layer.params.forget_gate.iw_desc[1].data = kept
    layer.params.output_gate.iw_desc[0].size = (3, 2, 4, 8)  # one gate in the other form
    assert "input_gate.iw_desc[0].data has 256 bytes" in untouched(layer, layer.forward)


def test_input_weights_in_one_array_with_open_extents() -> None:
    layer = Layer(layers=3, inputs=8, directions=2)
    for params in (layer.params, layer.deltas):
        for name in GATES:
            gate = getattr(params, name)
            gate.iw_desc[0].size = (0, 0, 0, 0)
            gate.iw_desc[1] = gate.iw_desc[0]  # the same memory
    layer.check()
    for params in (layer.params, layer.deltas):
        for name in GATES:
            getattr(params, name).iw_desc[1] = BNNSNDArrayDescriptor()
    layer.check()


# ---- sizes of 0 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [SNE, NSE])
@pytest.mark.parametrize(("layers", "directions", "inputs"), [(1, 1, 3), (2, 1, 4), (3, 2, 5), (2, 2, 8)])
def test_sizes_that_are_zero_are_inferred(layers: int, directions: int, inputs: int, layout: int) -> None:
    layer = Layer(layers=layers, directions=directions, inputs=inputs)
    if layout == NSE:
        for params, values in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
            for side, array in ((params.input_descriptor, values.x), (params.output_descriptor, values.y)):
                assert array is not None
                side.data_desc = describe(np.ascontiguousarray(array.swapaxes(0, 1)), NSE)
    capacity = capacity_of(layer.params)
    for names in (*((name,) for name in SIZES), SIZES):
        for name in names:
            setattr(layer.params, name, 0)
        assert capacity_of(layer.params) == capacity
        cache = layer.cache()
        assert layer.forward(cache) == 0, bnns.last_error()
        assert layer.backward(cache) == 0, bnns.last_error()
        if layout == SNE:
            layer.check()
        for name, value in zip(SIZES, (layer.I, layer.H, layer.B, layer.L, layer.T), strict=True):
            setattr(layer.params, name, value)


def test_sizes_are_inferred_from_plain_matrices_and_vectors() -> None:
    """One layer, one direction: (I, H) and (H, H) matrices say it all."""
    layer = Layer(states="")
    for params, values in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        for side in (params.input_descriptor, params.output_descriptor):
            side.hidden_desc, side.cell_state_desc = BNNSNDArrayDescriptor(), BNNSNDArrayDescriptor()
        for name, arrays in zip(GATES, values.gates, strict=True):
            gate = getattr(params, name)
            iw, hw, b = arrays["iw"], arrays["hw"], arrays["b"]
            assert iw is not None
            assert hw is not None
            assert b is not None
            gate.iw_desc[0], gate.hw_desc, gate.b_desc = describe(iw[0, 0]), describe(hw[0, 0]), describe(b[0, 0])
    for name in SIZES:
        setattr(layer.params, name, 0)
    capacity = capacity_of(layer.params)
    for name, value in zip(SIZES, (layer.I, layer.H, layer.B, layer.L, layer.T), strict=True):
        setattr(layer.params, name, value)
    assert capacity_of(layer.params) == capacity != bnns.SIZE_MAX


def test_sizes_are_inferred_from_weights_alone() -> None:
    """The data says nothing of input_size and hidden_size; products of extents are not taken for them."""
    layer = Layer(inputs=8, layers=2)
    capacity = capacity_of(layer.params)
    layer.params.input_descriptor.data_desc.size = (0, 2, 3)
    layer.params.output_descriptor.data_desc.size = (0, 2, 3)
    for desc in (
        d for n, d in every_descriptor(layer.params).items() if n.endswith(("hidden_desc", "cell_state_desc"))
    ):
        desc.size = [0] * 8
    layer.params.input_size = layer.params.hidden_size = layer.params.num_layers = 0
    assert capacity_of(layer.params) == capacity
    layer.check()
    for name in GATES:  # 1 x 1 x 4 x 8 weights as a vector: not of size 32
        iw = getattr(layer.params, name).iw_desc[0]
        iw.layout, iw.size = bnns.BNNSDataLayoutVector, (32,)
    assert "input_size is 0, and no descriptor with data determines it" in untouched(layer, layer.forward)
    layer.params.input_size = 8
    layer.check()


def test_sizes_that_nothing_determines() -> None:
    assert capacity_of(BNNSLayerParametersLSTM()) == bnns.SIZE_MAX
    assert "input_size is 0, and no descriptor with data determines it" in (bnns.last_error() or "")
    layer = Layer()
    for desc in every_descriptor(layer.params).values():
        desc.size = [0] * 8
    layer.params.num_layers = 0
    assert "num_layers is 0, and no descriptor with data determines it" in untouched(layer, layer.forward)


def test_descriptors_that_contradict_an_inferred_size() -> None:
    layer = Layer()
    layer.params.batch_size = 0
    layer.params.output_descriptor.data_desc.size = (4, 3, 3)
    assert "output_descriptor.data_desc.size is (4, 3, 3), expected" in untouched(layer, layer.forward)
    layer.params.input_descriptor.data_desc.layout = 99  # is not what sizes are inferred from
    assert "input_descriptor.data_desc.layout is 0x63" in untouched(layer, layer.forward)


def test_with_one_layer_the_second_descriptor_is_ignored() -> None:
    layer = Layer()
    layer.params.input_gate.iw_desc[1] = BNNSNDArrayDescriptor(size=(9, 9), data=bytearray(1))
    layer.check()


# ---- NULL data (4.5) ------------------------------------------------------------------------------------------------


def test_mandatory_data() -> None:
    layer = Layer(layers=2)
    for name, desc in every_descriptor(layer.params).items():
        if name == "input_descriptor.data_desc" or name.endswith(("iw_desc[0]", "iw_desc[1]", "hw_desc")):
            data = desc.data
            desc.data = None
            assert f"{name}.data is NULL" in untouched(layer, layer.forward)
            untouched(layer, layer.backward)
            desc.data = data


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=3)), ids=str)
def test_outputs_without_data_are_not_stored(present: tuple[bool, bool, bool]) -> None:
    layer = Layer(layers=2)
    expected = layer.expected_forward()
    target = layer.params.output_descriptor
    for there, name in zip(present, ("data_desc", "hidden_desc", "cell_state_desc"), strict=True):
        if not there:
            setattr(target, name, BNNSNDArrayDescriptor())
    cache = layer.cache()
    assert layer.forward(cache) == 0
    v = layer.values
    for there, array, wanted in zip(present, (v.y, v.hn, v.cn), (expected.y, expected.hn, expected.cn), strict=True):
        assert array is not None
        assert np.array_equal(array, wanted.reshape(array.shape)) if there else np.isnan(array).all()
    assert layer.backward(cache) == 0
    layer.check_gradients(layer.expected_backward())


@pytest.mark.parametrize("present", list(itertools.product((False, True), repeat=3)), ids=str)
def test_incoming_gradients_without_data_are_zero(present: tuple[bool, bool, bool]) -> None:
    layer = Layer(layers=2)
    cache = layer.cache()
    assert layer.forward(cache) == 0
    names = ("data_desc", "hidden_desc", "cell_state_desc")
    for there, name, array in zip(present, names, (layer.dy, layer.dhn, layer.dcn), strict=True):
        if not there:
            array[...] = 0
            getattr(layer.deltas.output_descriptor, name).data = None
    assert layer.backward(cache) == 0
    layer.check_gradients(layer.expected_backward())
    if not any(present):
        assert not layer.gradients.x.any()  # type: ignore[union-attr]
        assert not any(a.any() for gate in layer.gradients.gates for a in gate.values() if a is not None)


def test_gradients_of_states_that_were_not_given() -> None:
    layer = Layer(layers=2, states="")
    layer.check()
    assert layer.gradients.h0 is not None
    assert np.isfinite(layer.gradients.h0).all()
