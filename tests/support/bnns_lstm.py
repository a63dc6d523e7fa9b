"""A BNNS LSTM layer with its descriptors and arrays, and short ways to call it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNSLayerParametersLSTM, BNNSNDArrayDescriptor

Array = np.ndarray[Any, np.dtype[Any]]
GATES = ("input_gate", "forget_gate", "candidate_gate", "output_gate")
SIZES = ("input_size", "hidden_size", "batch_size", "num_layers", "seq_len")
DEFAULT_ACTIVATIONS = bnns.BNNSLayerFlagsLSTMDefaultActivations
BIDIRECTIONAL = bnns.BNNSLayerFlagsLSTMBidirectional
SNE, NSE = bnns.BNNSDataLayoutSNE, bnns.BNNSDataLayoutNSE
capacity_of = bnns.BNNSComputeLSTMTrainingCacheCapacity
forward = bnns.BNNSDirectApplyLSTMBatchTrainingCaching
backward = bnns.BNNSDirectApplyLSTMBatchBackward


def describe(array: Array | None, layout: int | None = None, flags: int = 0) -> BNNSNDArrayDescriptor:
    return BNNSNDArrayDescriptor() if array is None else BNNSNDArrayDescriptor.from_array(array, layout, flags=flags)


def nan(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


class Values:
    """All arrays of a layer, or of its gradients."""

    def __init__(self) -> None:
        self.x: Array | None = None
        self.h0: Array | None = None
        self.c0: Array | None = None
        self.y: Array | None = None
        self.hn: Array | None = None
        self.cn: Array | None = None
        self.gates: list[dict[str, Array | None]] = [dict.fromkeys(("iw", "upper", "hw", "b", "cw")) for _ in GATES]

    def every(self) -> Iterator[Array]:
        for array in (self.x, self.h0, self.c0, self.y, self.hn, self.cn, *(a for g in self.gates for a in g.values())):
            if array is not None:
                yield array

    def descriptors(self, params: BNNSLayerParametersLSTM, flags: int = 0) -> None:
        """Put all into a structure: data as SNE, everything else in as many axes as it has."""
        for side, arrays in (
            (params.input_descriptor, (self.x, self.h0, self.c0)),
            (params.output_descriptor, (self.y, self.hn, self.cn)),
        ):
            side.data_desc = describe(arrays[0], SNE, flags)
            side.hidden_desc = describe(arrays[1], None, flags)
            side.cell_state_desc = describe(arrays[2], None, flags)
        for name, arrays in zip(GATES, self.gates, strict=True):
            gate = getattr(params, name)
            gate.iw_desc = [describe(arrays["iw"], None, flags), describe(arrays["upper"], None, flags)]
            gate.hw_desc = describe(arrays["hw"], None, flags)
            gate.b_desc = describe(arrays["b"], None, flags)
            gate.cw_desc = describe(arrays["cw"], None, flags)


class Layer:
    """A layer with random arrays, its structures, and what the array functions say of it."""

    def __init__(
        self,
        steps: int = 3,
        samples: int = 2,
        inputs: int = 3,
        units: int = 4,
        layers: int = 1,
        directions: int = 1,
        bias: str = "ifgo",
        peephole: str = "",
        states: str = "hc",
        batch_sizes: list[int] | None = None,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.T, self.B, self.I, self.H, self.L, self.D = steps, samples, inputs, units, layers, directions
        self.first = layers if inputs == directions * units else 1
        self.batch_sizes = None if batch_sizes is None else np.array(batch_sizes, np.uint32)
        self.activations = rg.LstmActivations()

        def normal(*shape: int) -> Array:
            return rng.normal(0.0, 0.5, shape).astype(np.float32)

        values = self.values = Values()
        values.x = normal(steps, samples, inputs)
        values.h0 = normal(layers, directions, samples, units) if "h" in states else None
        values.c0 = normal(layers, directions, samples, units) if "c" in states else None
        values.y = nan(steps, samples, directions * units)
        values.hn, values.cn = nan(layers, directions, samples, units), nan(layers, directions, samples, units)
        for letter, gate in zip("ifgo", values.gates, strict=True):
            gate["iw"] = normal(self.first, directions, units, inputs)
            if layers > self.first:
                gate["upper"] = normal(layers - self.first, directions, units, directions * units)
            gate["hw"] = normal(layers, directions, units, units)
            gate["b"] = normal(layers, directions, units) if letter in bias else None
            gate["cw"] = normal(layers, directions, units, units) if letter in peephole else None
        self.dy, self.dhn, self.dcn = (normal(*a.shape) for a in (values.y, values.hn, values.cn))
        self.params = self.structure()
        values.descriptors(self.params)
        self.params.lstm_flags = DEFAULT_ACTIVATIONS | (BIDIRECTIONAL if directions == 2 else 0)
        if self.batch_sizes is not None:
            self.params.sequence_descriptor = describe(self.batch_sizes)
        self.gradients = Values()
        self.fresh_gradients()

    def structure(self) -> BNNSLayerParametersLSTM:
        return BNNSLayerParametersLSTM(self.I, self.H, self.B, self.L, self.T)

    def fresh_gradients(self, flags: int = 0, fill: float = np.nan) -> BNNSLayerParametersLSTM:
        """Every gradient that there is, asked for."""
        values, gradients = self.values, self.gradients = self.values, Values()
        assert values.x is not None
        gradients.x = np.full_like(values.x, fill)
        gradients.h0, gradients.c0 = (np.full((self.L, self.D, self.B, self.H), fill, np.float32) for _ in "hc")
        gradients.y, gradients.hn, gradients.cn = self.dy, self.dhn, self.dcn
        for gate, target in zip(values.gates, gradients.gates, strict=True):
            target.update((name, None if a is None else np.full_like(a, fill)) for name, a in gate.items())
        self.deltas = self.structure()
        gradients.descriptors(self.deltas, flags)
        return self.deltas

    # -- calls

    def cache(self) -> bytearray:
        capacity = capacity_of(self.params)
        assert capacity != bnns.SIZE_MAX, bnns.last_error()
        return bytearray(capacity)

    def forward(self, cache: Any = None) -> int:
        return int(forward(self.params, None, cache, 0 if cache is None else len(cache)))

    def backward(self, cache: Any = None) -> int:
        return int(backward(self.params, self.deltas, None, cache, 0 if cache is None else len(cache)))

    def run(self) -> bytearray:
        """Forward and backward, both with success."""
        cache = self.cache()
        assert self.forward(cache) == 0, bnns.last_error()
        assert self.backward(cache) == 0, bnns.last_error()
        return cache

    # -- what the array functions say

    def cells(self, values: Values | None = None) -> list[rg.LstmWeights]:
        gates = (values or self.values).gates
        cells = []
        for layer, direction in itertools.product(range(self.L), range(self.D)):

            def four(name: str, at: int, direction: int = direction) -> Any:
                parts = [None if gate[name] is None else gate[name][at, direction] for gate in gates]  # type: ignore[index]
                return None if all(part is None for part in parts) else tuple(parts)

            wx = four("iw", layer) if layer < self.first else four("upper", layer - self.first)
            cells.append(rg.LstmWeights(wx, four("hw", layer), four("b", layer), four("cw", layer)))
        return cells

    def states(self, array: Array | None) -> Array | None:
        return None if array is None else array.reshape(self.L * self.D, self.B, self.H)

    def expected_forward(self, **options: Any) -> rg.LstmResult:
        values = self.values
        assert values.x is not None
        return rg.lstm_forward(
            values.x,
            self.cells(),
            self.states(values.h0),
            self.states(values.c0),
            bidirectional=self.D == 2,
            batch_sizes=self.batch_sizes,
            activations=self.activations,
            **options,
        )

    def expected_backward(self, **options: Any) -> rg.LstmGradients:
        cache = self.expected_forward(**options).cache
        assert cache is not None
        need = ["dx", "dwx", "dwh", "dh0", "dc0"]
        need += ["db"] if any(g["b"] is not None for g in self.values.gates) else []
        need += ["dpeephole"] if any(g["cw"] is not None for g in self.values.gates) else []
        dhn, dcn = self.states(self.dhn), self.states(self.dcn)
        return rg.lstm_backward(self.dy, cache, dhn=dhn, dcn=dcn, need=need)

    def check_outputs(self, expected: rg.LstmResult) -> None:
        values = self.values
        assert values.y is not None
        assert np.array_equal(values.y, expected.y)
        for found, wanted in ((values.hn, expected.hn), (values.cn, expected.cn)):
            if found is not None:
                assert np.array_equal(found, wanted.reshape(found.shape))

    def check_gradients(self, expected: rg.LstmGradients) -> None:
        gradients = self.gradients
        for found, wanted in ((gradients.x, expected.dx), (gradients.h0, expected.dh0), (gradients.c0, expected.dc0)):
            if found is not None:
                assert wanted is not None
                assert np.array_equal(found, wanted.reshape(found.shape))
        for cell, wanted_cell in zip(self.cells(gradients), expected.dweights, strict=True):
            for part, wanted_part in zip(cell, wanted_cell, strict=True):
                if part is not None:
                    for array, wanted in zip(part, wanted_part, strict=True):
                        assert array is None or np.array_equal(array, wanted)

    def check(self) -> None:
        """One run, bit for bit that of the array functions."""
        self.run()
        self.check_outputs(self.expected_forward())
        self.check_gradients(self.expected_backward())


def untouched(layer: Layer, call: Callable[[], int], *others: Any) -> str:
    """The call fails, says why, and writes nothing. Returns the reason."""
    arrays = [*layer.values.every(), *layer.gradients.every(), *(o for o in others if isinstance(o, np.ndarray))]
    before = [a.copy() for a in arrays]
    buffers = [o for o in others if isinstance(o, bytearray)]
    contents = [bytes(b) for b in buffers]
    assert call() == -1
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)
    assert [bytes(b) for b in buffers] == contents
    reason = bnns.last_error()
    assert reason
    return reason


class Tripwire:
    """Data that must not be looked at."""

    @property
    def __array_interface__(self) -> Any:
        raise AssertionError("data was read")

    def __buffer__(self, flags: int) -> memoryview:
        raise AssertionError("data was read")


def every_descriptor(params: BNNSLayerParametersLSTM) -> dict[str, BNNSNDArrayDescriptor]:
    found = {"sequence_descriptor": params.sequence_descriptor}
    for side in ("input_descriptor", "output_descriptor"):
        for field in ("data_desc", "hidden_desc", "cell_state_desc"):
            found[f"{side}.{field}"] = getattr(getattr(params, side), field)
    for gate in GATES:
        for field in ("hw_desc", "cw_desc", "b_desc"):
            found[f"{gate}.{field}"] = getattr(getattr(params, gate), field)
        found[f"{gate}.iw_desc[0]"], found[f"{gate}.iw_desc[1]"] = getattr(params, gate).iw_desc
    return found


def spread(
    array: Array, paddings: tuple[int, ...], short: int = 0
) -> tuple[BNNSNDArrayDescriptor, Callable[[], Array], Callable[[], bool]]:
    """The same contents with gaps after every axis (fastest first), in a buffer exactly as long as needed less `short`
    elements; a function that reads it back, and one that says whether the gaps are as they were."""
    extents = array.shape[::-1]
    strides, step = [], 1 + paddings[0]
    for extent, padding in zip(extents, (*paddings[1:], 0), strict=False):
        strides.append(step)
        step = step * extent + padding
    span = 1 + sum((n - 1) * s for n, s in zip(extents, strides, strict=True))
    buffer = np.full(span, 77, np.float32)
    view = np.lib.stride_tricks.as_strided(buffer, array.shape, [4 * s for s in reversed(strides)])
    view[...] = array
    gaps = np.full(span, True)
    np.lib.stride_tricks.as_strided(gaps, array.shape, list(reversed(strides)))[...] = False
    desc = BNNSNDArrayDescriptor(
        layout=array.ndim << 16 | 0x8000,
        size=extents,
        stride=strides,
        data=buffer[: span - short].copy() if short else buffer,
        data_type=bnns.BNNSDataTypeFloat32,
    )
    return desc, lambda: view, lambda: bool((buffer[gaps] == 77).all())


def replace_descriptors(layer: Layer, change: Callable[[Array, int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Give every array to `change`, with its number; put the descriptor that it returns in its place."""
    counter, made = itertools.count(), []

    def new(array: Array | None) -> BNNSNDArrayDescriptor:
        if array is None:
            return BNNSNDArrayDescriptor()
        made.append(change(array, next(counter)))
        return made[-1][0]  # type: ignore[no-any-return]

    for params, v in ((layer.params, layer.values), (layer.deltas, layer.gradients)):
        source, target = params.input_descriptor, params.output_descriptor
        source.data_desc, source.hidden_desc, source.cell_state_desc = new(v.x), new(v.h0), new(v.c0)
        target.data_desc, target.hidden_desc, target.cell_state_desc = new(v.y), new(v.hn), new(v.cn)
        for name, arrays in zip(GATES, v.gates, strict=True):
            gate = getattr(params, name)
            gate.iw_desc = [new(arrays["iw"]), new(arrays["upper"])]
            gate.hw_desc, gate.b_desc, gate.cw_desc = new(arrays["hw"]), new(arrays["b"]), new(arrays["cw"])
    return made


def read_back(layer: Layer, made: list[tuple[Any, ...]]) -> None:
    """What the descriptors hold, into the layer's own arrays."""
    targets = [*all_arrays(layer.values), *all_arrays(layer.gradients)]
    for target, (_, read, *_) in zip(targets, made, strict=True):
        target[...] = read()


def all_arrays(v: Values) -> Iterator[Array]:
    """In the order of replace_descriptors."""
    for array in (v.x, v.h0, v.c0, v.y, v.hn, v.cn):
        if array is not None:
            yield array
    for gate in v.gates:
        for name in ("iw", "upper", "hw", "b", "cw"):
            if gate[name] is not None:
                yield gate[name]  # type: ignore[misc]


ROLES = (*(f"{gate}.activation" for gate in GATES), "hidden_activation")


def activation_of(params: BNNSLayerParametersLSTM, role: str) -> Any:
    gate, _, rest = role.partition(".")
    return getattr(params, gate).activation if rest else params.hidden_activation


def result_names(layer: Layer) -> dict[str, BNNSNDArrayDescriptor]:
    return {
        name: desc
        for name, desc in every_descriptor(layer.deltas).items()
        if desc.data is not None and not name.startswith(("output_descriptor", "sequence"))
    }
