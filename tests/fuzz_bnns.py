"""Random and mutated descriptors against every function of retrograd.bnns.

Whatever the structures say, a call answers with a status, raises nothing, and neither reads nor writes outside a
buffer; where it fails, no destination has changed, and the reason speaks Apple's names. Buffers lie between guards that
are compared after every call; under ``make sanitize`` reads beyond them are found too. Arrays of a type other than that
of their descriptor are refused, and what lies between the elements of a strided array stays as it is. A failure prints
the seed that repeats it:

    python tests/fuzz_bnns.py --count 500000
    python tests/fuzz_bnns.py --seed 1234 --count 1
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.bnns_inside import UNEXPECTED, Extents, Structure
from support.fuzz_bnns_arrays import ARRAYS
from support.fuzz_bnns_attention import PARTS, attention
from support.fuzz_bnns_convolution import convolution
from support.fuzz_bnns_filters import FILTERS, Buffers, Case, applied, array, filter_parameters, sample, status
from support.fuzz_bnns_gather import GATHERS, TAKES
from support.fuzz_bnns_graph import graph_functions
from support.fuzz_bnns_resize import RESIZES, changed
from support.fuzz_driver import FLOATS, INTEGERS, STRANGE, Broken, Memory, main, timed

TYPES = [v for n, v in vars(bnns).items() if n.startswith("BNNSDataType")]
LAYOUTS = [v for n, v in vars(bnns).items() if n.startswith("BNNSDataLayout") and isinstance(v, int)]
FUNCTIONS = list(range(37))
BUFFERS = {"data", "in", "out", "cache", "source", "target", "labels", "weights", "anchors_data", "indices", *PARTS}
BUFFERS |= {"data_ptr", "workspace"}
NUMPY_TYPES = {
    getattr(bnns, f"BNNSDataType{name}"): np.dtype(name.lower())
    for name in ["Float32", "Float16", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64"]
}
NUMPY_TYPES[bnns.BNNSDataTypeBoolean] = np.dtype(np.bool_)
# Arguments and functions of the array API, which no message may mention.
ENGINE_WORDS = re.compile(r"\b(\w+_(forward|backward|step)|running_mean|running_var|dgamma|dbeta|dwx|first_moments): ")


def slots(root: Any) -> Iterator[tuple[Any, Any]]:
    """Everything that can be set: (owner, name or index)."""
    if isinstance(root, dict):
        for key in root:
            yield root, key
        return
    for name, _, kind, *_ in root._layout:
        value = getattr(root, name)
        if isinstance(kind, Extents):
            for k in range(5):
                yield value, k
        elif isinstance(value, Structure):
            yield from slots(value)
        elif isinstance(value, list):
            for one in value:
                yield from slots(one)
        else:
            yield root, name


def mutate(random: np.random.Generator, memory: Buffers, roots: list[Any]) -> None:
    places = [place for root in roots if root is not None for place in slots(root)]
    for _ in range(int(random.choice([0, 1, 1, 1, 2, 3, 8]))):
        owner, key = places[random.integers(len(places))]
        value = new_value(random, memory, key)
        with contextlib.suppress(TypeError, ValueError):  # not even Python lets that be assigned
            if isinstance(owner, Structure):
                setattr(owner, key, value)
            else:
                owner[key] = value


def new_value(random: np.random.Generator, memory: Buffers, key: Any) -> Any:
    def one_of(values: list[Any]) -> Any:
        return values[random.integers(len(values))]

    kind = random.random()
    if kind < 0.06:
        return one_of(STRANGE)
    if key in BUFFERS:
        if kind < 0.2:
            return one_of([None, bytes(64), bytearray(12), 4096, memoryview(bytearray(64))[::2], memory.any().ctypes])
        if kind < 0.4:
            return memory.any()
        if kind < 0.5:
            return memoryview(memory.any()).cast("B") if kind < 0.45 else np.ma.masked_array(memory.any())
        if kind < 0.65:
            return memory.strided(int(random.integers(1, 40)))
        if kind < 0.85:
            return memory.wrong()
        return memory.take(int(random.integers(0, 40)))
    if key in ("data_type", "indices_type"):
        return one_of(TYPES)
    if key == "layout":
        return one_of(LAYOUTS)
    if key == "function" and kind < 0.8:
        return one_of(FUNCTIONS)
    if key in FLOAT_FIELDS:
        return one_of(FLOATS)
    if key == "operation":
        return changed(random)
    return one_of(INTEGERS) if kind < 0.7 else int(random.integers(0, 9))


FLOAT_FIELDS = {
    name
    for structure in vars(bnns).values()
    if isinstance(structure, type) and issubclass(structure, Structure)
    for name, _, kind, *_ in structure._layout
    if getattr(kind, "code", "") == "f"
}


def through_images(random: np.random.Generator, memory: Buffers, root: Structure) -> Structure:
    """The structure with some bytes of its C image changed; pointers that survive lead to the same buffers."""
    image = bytearray(root.to_bytes())
    for _ in range(int(random.integers(1, 5))):
        image[random.integers(len(image))] = random.integers(256)
    known = {int(buffer.ctypes.data): buffer for buffer in memory.shared()}
    return type(root).from_bytes(image, known)


def run(seed: int, tally: Counter[str]) -> None:
    random = np.random.default_rng(seed)
    memory = Buffers(random)
    case = CASES[seed % len(CASES)](random, memory)
    mutate(random, memory, case.roots)
    if random.random() < 0.2:
        for index, root in enumerate(case.roots):
            if isinstance(root, Structure) and random.random() < 0.5:
                with contextlib.suppress(ValueError):  # it holds what C cannot
                    case.roots[index] = through_images(random, memory, root)
    for name, call, failed in case.calls():
        before = memory.state()
        with np.errstate(all="ignore"), timed(name):
            answer = call()
        memory.check_guards()
        if failed(answer):
            check_reason(name, bnns.last_error() or "")
            tally[f"{name} refused"] += 1
            if memory.state() != before:
                raise Broken(f"{name} failed and has changed a buffer: {bnns.last_error()}")
        else:
            tally[f"{name} done"] += 1
            check_accepted(name, case.roots)


def check_reason(name: str, reason: str) -> None:
    if UNEXPECTED in reason:
        raise Broken(f"{name} did not expect this: {reason}")
    if not reason.startswith(f"{name}: ") or ENGINE_WORDS.search(reason):
        raise Broken(f"{name} failed, and says: {reason!r}")


def sample_descriptors(layer: Any) -> tuple[Any, Any]:
    """The descriptors of a layer's input (the first one) and output."""
    if isinstance(layer, bnns.BNNSLayerParametersArithmetic):
        fields = layer.arithmetic_function_fields
        return getattr(fields, "in_", None) or fields.in1, fields.out
    if isinstance(layer, bnns.BNNSLayerParametersTensorContraction):
        weights_first = bytes(layer.operation).lstrip().startswith(b"w_")
        return layer.iB_desc if weights_first else layer.iA_desc, layer.o_desc
    return layer.i_desc, layer.o_desc


def check_accepted(name: str, roots: list[Any]) -> None:
    """That a call has not taken an array of another type for what its descriptor says."""
    if name == "BNNSLossFilterApplyBatch":
        arguments = next(root for root in roots if isinstance(root, dict))
        pairs = [(arguments[key], bnns.BNNSDataTypeFloat32) for key in ("in", "labels", "out")]
    elif name.endswith(("FilterApply", "FilterApplyBatch", "FilterApplyBatchEx")):
        sides = sample_descriptors(roots[0])
        sample = sides[0].data_type, sides[1].data_type
        arguments = next(root for root in roots if isinstance(root, dict) and "in" in root)
        pairs = [(arguments["in"], sample[0]), (arguments["out"], sample[1])]
    elif name == "BNNSApplyMultiheadAttention":
        arguments = next(root for root in roots if isinstance(root, dict))
        pairs = [(arguments[part], getattr(roots[0], part).target_desc.data_type) for part in PARTS]
    elif name == "BNNSOptimizerStep":
        count = operator.index(next(root["count"] for root in roots if isinstance(root, dict)))
        pairs = [(root.data, root.data_type) for root in roots[3 : 3 + 2 * count]]
    elif name == "BNNSDirectApplyLSTMBatchTrainingCaching":
        sides = (roots[0].input_descriptor.data_desc, roots[0].output_descriptor.data_desc)
        pairs = [(side.data, side.data_type) for side in sides]
    elif name in TAKES:
        pairs = [(roots[k].data, roots[k].data_type) for k in TAKES[name]]
    elif name in ("BNNSDirectApplyTopK", "BNNSDirectApplyInTopK"):
        used = (0, 1) if name == "BNNSDirectApplyTopK" else (0, 3, 4)  # indices are not always given
        pairs = [(roots[k].data, roots[k].data_type) for k in used]
    elif name == "BNNSGraphContextExecute":
        pairs = [(getattr(root.data_ptr, "data", root.data_ptr), bnns.BNNSDataTypeFloat32) for root in roots[4:8]]
    elif name == "BNNSDirectApplyQuantizer":
        pairs = [(side.data, side.data_type) for side in sample_descriptors(roots[0])]
    else:
        return
    for data, data_type in pairs:
        expected = NUMPY_TYPES.get(data_type)
        if isinstance(data, np.ma.MaskedArray):
            raise Broken(f"{name} took a masked array")
        if isinstance(data, np.ndarray) and expected is not None and data.dtype != expected:
            raise Broken(f"{name} took an array of {data.dtype} for {expected}")


# ---- cases -----------------------------------------------------------------------------------------------------------


def normalization(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3 if random.random() < 0.7 else 1)]
    size, batch = int(np.prod(shape)), int(random.integers(1, 4))
    kind = int(random.integers(2, 6))
    parameter = size if kind == bnns.BNNSLayerNorm else shape[0]

    def vector(present: bool, count: int = parameter) -> bnns.BNNSNDArrayDescriptor:
        if present and random.random() < 0.2:
            return sample([count], memory.strided(count), stride=(2,))
        return sample([count], memory.take(count)) if present else bnns.BNNSNDArrayDescriptor()

    chosen = random.random(5) < 0.5
    layer = bnns.BNNSLayerParametersNormalization(
        i_desc=sample(shape),
        o_desc=sample(shape),
        beta_desc=vector(chosen[0]),
        gamma_desc=vector(chosen[1]),
        moving_mean_desc=vector(chosen[2], shape[0]),
        moving_variance_desc=vector(chosen[3], shape[0]),
        momentum=0.9,
        epsilon=1e-3,
        activation=bnns.BNNSActivation(int(random.integers(0, 36)), 0.5, 1.0),
        num_groups=1,
    )
    x, y, dy, dx = (memory.take(batch * size) for _ in range(4))
    arguments = {"kind": kind, "batch": batch, "in": x, "in_stride": size, "out": y, "out_stride": size, "training": 1}
    deltas = {"batch": batch, "in_delta_stride": size, "out": y, "out_stride": size, "out_delta_stride": size}
    roots = [
        layer, filter_parameters(random), arguments, deltas,
        sample(shape, dx, flags=int(random.integers(0, 2))), sample(shape, dy), vector(chosen[4]), vector(True),
    ]  # fmt: skip

    def calls() -> Iterator[Any]:
        layer, parameters, a, d, in_delta, out_delta, beta_delta, gamma_delta = roots
        made = []

        def create() -> Any:
            made.append(bnns.BNNSFilterCreateLayerNormalization(a["kind"], layer, parameters))
            return made[0]

        yield "BNNSFilterCreateLayerNormalization", create, lambda answer: answer is None
        if random.random() < 0.1:
            bnns.BNNSFilterDestroy(made[0])
        yield applied("BNNSNormalizationFilterApplyBatch", made, a)
        yield applied(
            "BNNSNormalizationFilterApplyBackwardBatch",
            made,
            d,
            in_delta=in_delta,
            out_delta=out_delta,
            beta_delta=beta_delta if beta_delta.data is not None else None,
            gamma_delta=gamma_delta,
        )
        bnns.BNNSFilterDestroy(made[0])

    return Case(roots, calls)


def loss(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(random.integers(1, 6))]
    if random.random() < 0.3:
        shape = [int(n) for n in random.integers(1, 4, 3)]
    size, batch, function = int(np.prod(shape)), int(random.integers(1, 4)), int(random.integers(1, 11))
    structures = {
        bnns.BNNSLossFunctionSoftmaxCrossEntropy: bnns.BNNSLayerParametersLossSoftmaxCrossEntropy,
        bnns.BNNSLossFunctionSigmoidCrossEntropy: bnns.BNNSLayerParametersLossSigmoidCrossEntropy,
        bnns.BNNSLossFunctionHuber: bnns.BNNSLayerParametersLossHuber,
        bnns.BNNSLossFunctionYolo: bnns.BNNSLayerParametersLossYolo,
    }
    structure: Any = structures.get(function, bnns.BNNSLayerParametersLossBase)
    layer = structure(function=function, i_desc=sample(shape), o_desc=sample([1]), reduction=int(random.integers(5)))
    if function in structures:
        setattr(layer, structure._layout[4].name, 0.5)
    x, labels, weights, values, dx, dout = (memory.take(batch * size) for _ in range(6))
    a = {"batch": batch, "in": x, "in_stride": size, "labels": labels, "labels_stride": size, "out": values}
    a |= {"weights": weights, "weights_size": int(random.choice([0, 1, batch, batch * size])), "in_delta_stride": size}
    a["out_delta_stride"] = 0
    in_delta = sample(shape, dx, flags=int(random.integers(2)))
    roots = [layer, filter_parameters(random), a, in_delta, sample([1], dout)]

    def calls() -> Iterator[Any]:
        layer, parameters, a, in_delta, out_delta = roots
        made = []

        def create() -> Any:
            made.append(bnns.BNNSFilterCreateLayerLoss(layer, parameters))
            return made[0]

        yield "BNNSFilterCreateLayerLoss", create, lambda answer: answer is None
        yield applied("BNNSLossFilterApplyBatch", made, a, in_delta=in_delta if in_delta.data is not None else None)
        yield applied("BNNSLossFilterApplyBackwardBatch", made, a, in_delta=in_delta, out_delta=out_delta)
        bnns.BNNSFilterDestroy(made[0])

    return Case(roots, calls)


def activation(random: np.random.Generator, memory: Buffers) -> Case:
    shape = [int(n) for n in random.integers(1, 5, 3)]
    size, batch = int(np.prod(shape)), int(random.integers(1, 4))
    layer = bnns.BNNSLayerParametersActivation(
        i_desc=sample(shape),
        o_desc=sample(shape),
        activation=bnns.BNNSActivation(int(random.integers(0, 36)), 0.5, 1.0),
        axis_flags=int(random.integers(0, 16)),
    )
    x, y, dy, dx = (memory.take(batch * size) for _ in range(4))
    a = {"batch": batch, "in": x, "in_stride": size, "out": y, "out_stride": size, "in_delta_stride": size}
    a |= {"out_delta_stride": size, "target": 0}
    weights = sample([1], memory.take(1)) if random.random() < 0.3 else None
    roots = [layer, filter_parameters(random), a, sample(shape, dx), sample(shape, dy), weights]

    def calls() -> Iterator[Any]:
        layer, parameters, a, in_delta, out_delta, weights_delta = roots
        made = []

        def create() -> Any:
            made.append(bnns.BNNSFilterCreateLayerActivation(layer, parameters))
            return made[0]

        yield "BNNSFilterCreateLayerActivation", create, lambda answer: answer is None
        yield "BNNSFilterApply", lambda: bnns.BNNSFilterApply(made[0], a["in"], a["out"]), status
        yield applied("BNNSFilterApplyBatch", made, a)
        yield applied(
            "BNNSFilterApplyBackwardBatch",
            made,
            a,
            in_delta=in_delta,
            out_delta=out_delta,
            weights_delta=weights_delta,
            bias_delta=None,
        )
        direct = layer.copy()
        direct.i_desc.data, direct.o_desc.data = a["in"], a["out"]
        yield (
            "BNNSDirectApplyActivationBatch",
            lambda: bnns.BNNSDirectApplyActivationBatch(
                direct, parameters, a["batch"], a["in_stride"], a["out_stride"]
            ),
            status,
        )
        yield "BNNSGetPointer", lambda: bnns.BNNSGetPointer(made[0], a["target"]), lambda answer: answer.data is None

    return Case(roots, calls)


def pooling(random: np.random.Generator, memory: Buffers) -> Case:
    channels, batch, function = int(random.integers(1, 4)), int(random.integers(1, 4)), int(random.integers(0, 5))
    outputs, kernel, stride, padding = ([int(n) for n in random.integers(1, 4, 2)] for _ in range(4))
    padding = [min(p, k) - 1 for p, k in zip(padding, kernel, strict=True)]
    inputs = [s * (o - 1) + k for s, o, k in zip(stride, outputs, kernel, strict=True)]
    larger, smaller = [channels, *inputs], [channels, *outputs]
    source, target = (smaller, larger) if function == bnns.BNNSPoolingFunctionUnMax else (larger, smaller)
    layer = bnns.BNNSLayerParametersPooling(
        i_desc=sample(source),
        o_desc=sample(target),
        activation=bnns.BNNSActivation(int(random.choice([0, 0, 1, 4])), 0.5, 1.0),
        pooling_function=function,
        k_height=kernel[0],
        k_width=kernel[1],
        y_stride=stride[0],
        x_stride=stride[1],
        y_padding=padding[0],
        x_padding=padding[1],
    )
    if random.random() < 0.3:
        layer.bias = sample([channels], memory.take(channels))
    size, out_size, count = (int(np.prod(shape)) for shape in (source, target, smaller))
    x, dx, y, dy = (memory.take(batch * n) for n in (size, size, out_size, out_size))
    # Zeros, so that UnMax can use them.
    wide = random.random() < 0.5
    at = memory.take(batch * count * (2 if wide else 1))
    at[...] = 0
    a: dict[str, Any] = {"batch": batch, "in": x, "in_stride": size, "out": y, "out_stride": out_size}
    a |= {"in_delta_stride": size, "out_delta_stride": out_size, "idx_stride": 0}
    a |= {"indices": at.view(np.uint64 if wide else np.uint32)}
    a |= {"indices_type": bnns.BNNSDataTypeUInt64 if wide else bnns.BNNSDataTypeUInt32}
    bias = sample([channels], memory.take(channels)) if random.random() < 0.3 else None
    roots = [layer, filter_parameters(random), a, sample(source, dx), sample(target, dy), bias]

    def calls() -> Iterator[Any]:
        layer, parameters, a, in_delta, out_delta, bias_delta = roots
        made = []

        def create() -> Any:
            made.append(bnns.BNNSFilterCreateLayerPooling(layer, parameters))
            return made[0]

        forward = lambda: (made[0], a["batch"], a["in"], a["in_stride"], a["out"], a["out_stride"])  # noqa: E731
        backward = lambda: (  # noqa: E731
            made[0], a["batch"], a["in"], a["in_stride"], in_delta, a["in_delta_stride"], a["out"], a["out_stride"],
            out_delta, a["out_delta_stride"], bias_delta,
        )  # fmt: skip
        indices = lambda: (a["indices_type"], a["indices"], a["idx_stride"])  # noqa: E731
        yield "BNNSFilterCreateLayerPooling", create, lambda answer: answer is None
        yield "BNNSFilterApplyBatch", lambda: bnns.BNNSFilterApplyBatch(*forward()), status
        yield (
            "BNNSPoolingFilterApplyBatchEx",
            lambda: bnns.BNNSPoolingFilterApplyBatchEx(*forward(), *indices()),
            status,
        )
        yield (
            "BNNSPoolingFilterApplyBatch",
            lambda: bnns.BNNSPoolingFilterApplyBatch(*forward(), a["indices"], a["idx_stride"]),
            status,
        )
        yield (
            "BNNSPoolingFilterApplyBackwardBatchEx",
            lambda: bnns.BNNSPoolingFilterApplyBackwardBatchEx(*backward(), *indices()),
            status,
        )
        yield (
            "BNNSPoolingFilterApplyBackwardBatch",
            lambda: bnns.BNNSPoolingFilterApplyBackwardBatch(*backward(), None, 0),
            status,
        )

    return Case(roots, calls)


def lstm_data(random: np.random.Generator, memory: Buffers, sizes: list[int], width: int) -> Any:
    layers, directions, batch, hidden, steps = sizes
    layout = bnns.BNNSDataLayoutSNE if random.random() < 0.7 else bnns.BNNSDataLayoutNSE
    axes = (batch, steps) if layout == bnns.BNNSDataLayoutSNE else (steps, batch)
    sequence = bnns.BNNSLSTMDataDescriptor(data_desc=array(memory, layout, width, *axes))
    for name in ("hidden_desc", "cell_state_desc"):
        if random.random() < 0.6:
            state = array(memory, bnns.BNNSDataLayout4DLastMajor, hidden, batch, directions, layers)
            setattr(sequence, name, state)
    return sequence


def lstm_structure(random: np.random.Generator, memory: Buffers, sizes: list[int], inputs: int, parts: Any) -> Any:
    layers, directions, batch, hidden, steps = sizes
    last = bnns.BNNSDataLayout4DLastMajor
    split = layers > 1 and inputs != directions * hidden
    flags = int(random.integers(0, 2)) * bnns.BNNSLayerFlagsLSTMDefaultActivations
    flags |= bnns.BNNSLayerFlagsLSTMBidirectional if directions == 2 else 0
    structure = bnns.BNNSLayerParametersLSTM(
        inputs, hidden, batch, layers, steps, float(random.choice([0.0, 0.3])), flags,
        input_descriptor=lstm_data(random, memory, sizes, inputs),
        output_descriptor=lstm_data(random, memory, sizes, directions * hidden),
        hidden_activation=bnns.BNNSActivation(int(random.integers(0, 36)), 0.5, 1.0),
    )  # fmt: skip
    for name in ("input_gate", "forget_gate", "candidate_gate", "output_gate"):
        gate = getattr(structure, name)
        gate.activation = bnns.BNNSActivation(int(random.integers(0, 36)), 0.5, 1.0)
        gate.iw_desc[0] = array(memory, last, inputs, hidden, directions, 1 if split else layers)
        if split:
            gate.iw_desc[1] = array(memory, last, directions * hidden, hidden, directions, layers - 1)
        gate.hw_desc = array(memory, last, hidden, hidden, directions, layers)
        if parts[0]:
            gate.cw_desc = array(memory, last, hidden, hidden, directions, layers)
        if parts[1]:
            gate.b_desc = array(memory, bnns.BNNSDataLayout3DLastMajor, hidden, directions, layers)
    if parts[2]:
        counts = memory.take(steps, np.uint32)
        counts[:] = random.integers(0, batch + 1, steps)
        structure.sequence_descriptor = bnns.BNNSNDArrayDescriptor(
            layout=bnns.BNNSDataLayoutVector, size=(steps,), data=counts, data_type=bnns.BNNSDataTypeUInt32
        )
    return structure


def lstm(random: np.random.Generator, memory: Buffers) -> Case:
    sizes = [int(random.integers(1, high)) for high in (3, 3, 4, 5, 4)]
    inputs, parts = int(random.integers(1, 5)), random.random(3) < 0.4
    layer = lstm_structure(random, memory, sizes, inputs, parts)
    deltas = lstm_structure(random, memory, sizes, inputs, parts)
    arguments: dict[str, Any] = {"cache": None, "capacity": 0}
    capacity = bnns.BNNSComputeLSTMTrainingCacheCapacity(layer)
    if random.random() < 0.7 and capacity != bnns.SIZE_MAX:
        arguments = {"cache": memory.take(capacity + int(random.integers(0, 3)), np.uint8), "capacity": capacity}
    if random.random() < 0.05:  # mutation seldom finds the sizes among hundreds of fields
        name = ("input_size", "hidden_size", "batch_size", "num_layers", "seq_len")[random.integers(5)]
        setattr(layer, name, INTEGERS[random.integers(len(INTEGERS))])
    roots = [layer, deltas, filter_parameters(random), arguments]

    def calls() -> Iterator[Any]:
        layer, deltas, parameters, a = roots
        yield (
            "BNNSComputeLSTMTrainingCacheCapacity",
            lambda: bnns.BNNSComputeLSTMTrainingCacheCapacity(layer),
            lambda answer: answer == bnns.SIZE_MAX,
        )
        yield (
            "BNNSDirectApplyLSTMBatchTrainingCaching",
            lambda: bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, parameters, a["cache"], a["capacity"]),
            status,
        )
        if random.random() < 0.2 and a["cache"] is not None:
            with contextlib.suppress(TypeError, ValueError, IndexError):
                a["cache"][random.integers(len(a["cache"]))] ^= 1
        yield (
            "BNNSDirectApplyLSTMBatchBackward",
            lambda: bnns.BNNSDirectApplyLSTMBatchBackward(layer, deltas, parameters, a["cache"], a["capacity"]),
            status,
        )

    return Case(roots, calls)


def optimizer(random: np.random.Generator, memory: Buffers) -> Case:
    function, count = int(random.integers(1, 13)), int(random.integers(0, 4))
    kind = {1: bnns.BNNSOptimizerSGDMomentumFields, 3: bnns.BNNSOptimizerRMSPropFields}.get(
        function, bnns.BNNSOptimizerAdamFields
    )
    if function >= 7:
        kind = {
            7: bnns.BNNSOptimizerSGDMomentumWithClippingFields,
            9: bnns.BNNSOptimizerRMSPropWithClippingFields,
        }.get(function, bnns.BNNSOptimizerAdamWithClippingFields)
    fields = kind()
    for name in fields._fields:
        if name in FLOAT_FIELDS:
            setattr(fields, name, 0.5)
    if hasattr(fields, "time_step"):
        fields.time_step = 1
    sizes = [int(n) for n in random.integers(1, 20, count)]
    lists = [
        [array(memory, bnns.BNNSDataLayoutVector, size) for _ in range(kinds) for size in sizes] for kinds in (1, 1, 3)
    ]
    arguments = {"function": function, "count": count}
    roots = [fields, arguments, filter_parameters(random), *(one for group in lists for one in group)]

    def calls() -> Iterator[Any]:
        fields, a, parameters, *descriptors = roots
        groups = [descriptors[:count], descriptors[count : 2 * count], descriptors[2 * count :]]
        yield (
            "BNNSOptimizerStep",
            lambda: bnns.BNNSOptimizerStep(a["function"], fields, a["count"], *groups, parameters),
            status,
        )

    return Case(roots, calls)


def arrays(random: np.random.Generator, memory: Buffers) -> Case:
    """Functions of whole arrays: clipping, norms, sizes, random numbers."""
    layout = int(random.choice([bnns.BNNSDataLayoutImageCHW, bnns.BNNSDataLayout3DFirstMajor]))
    size = [int(n) for n in random.integers(1, 5, 3)]
    src, dest, other = (array(memory, layout, *size, flags=int(random.integers(0, 2))) for _ in range(3))
    norms, deltas = (array(memory, bnns.BNNSDataLayoutVector, 1) for _ in range(2))
    tensor = bnns.BNNSTensor(bnns.BNNSDataTypeFloat32, 3, size, (size[1] * size[2], size[2], 1))
    a: dict[str, Any] = {"axis_flags": 0, "limit": 1.0, "low": -0.5, "in": src.data, "out": norms.data}
    a |= {"norm_type": bnns.BNNSL2Norm, "count": 2, "known": 0.0, "seed": 3, "state_size": 24, "cache": bytearray(24)}
    whole = array(memory, bnns.BNNSDataLayoutVector, 5)
    whole.data, whole.data_type = memory.take(5, np.int32), bnns.BNNSDataTypeInt32
    roots = [src, dest, other, norms, deltas, tensor, whole, a]

    def calls() -> Iterator[Any]:
        src, dest, other, norms, deltas, tensor, whole, a = roots
        axes, norm_type = a["axis_flags"], a["norm_type"]
        given: dict[str, tuple[Any, ...]] = {
            "BNNSClipByValue": (dest, src, a["low"], a["limit"]),
            "BNNSClipByNorm": (dest, src, a["limit"], axes),
            "BNNSClipByGlobalNorm": ([dest, other], [src, src], a["count"], a["limit"], a["known"]),
            "BNNSComputeNorm": (norms, src, norm_type, axes),
            "BNNSComputeNormBackward": (a["in"], dest, a["out"], deltas, norm_type, axes),
        }
        generators: list[Any] = []

        def create() -> Any:
            generators.append(bnns.BNNSCreateRandomGeneratorWithSeed(0, a["seed"]))
            return generators[0]

        yield "BNNSCreateRandomGeneratorWithSeed", create, lambda answer: answer is None
        made = generators[0]
        given |= {
            "BNNSRandomFillUniformFloat": (made, dest, a["low"], a["limit"]),
            "BNNSRandomFillNormalFloat": (made, dest, a["low"], a["limit"]),
            "BNNSRandomFillUniformInt": (made, whole, -a["seed"] if isinstance(a["seed"], int) else None, a["count"]),
            "BNNSRandomFillCategoricalFloat": (made, dest, norms, False),
            "BNNSRandomGeneratorGetState": (made, a["state_size"], a["cache"]),
            "BNNSRandomGeneratorSetState": (made, a["state_size"], a["cache"]),
        }
        for name, arguments in given.items():
            yield name, lambda name=name, arguments=arguments: getattr(bnns, name)(*arguments), status
        yield "BNNSNDArrayGetDataSize", lambda: bnns.BNNSNDArrayGetDataSize(src), lambda answer: answer == 0
        yield (
            "BNNSRandomGeneratorStateSize",
            lambda: bnns.BNNSRandomGeneratorStateSize(made),
            lambda answer: answer == 0,
        )
        yield (
            "BNNSCreateRandomGenerator",
            lambda: bnns.BNNSCreateRandomGenerator(a["count"] if random.random() < 0.5 else 0),
            lambda answer: answer is None,
        )
        for name, argument in (("BNNSDataLayoutGetRank", src.layout), ("BNNSTensorGetAllocationSize", tensor)):
            query = getattr(bnns, name)
            yield name, lambda query=query, argument=argument: query(argument), lambda answer: answer == bnns.SIZE_MAX

    return Case(roots, calls)


# An LSTM takes as long as all the others together.
CASES: list[Callable[[np.random.Generator, Memory], Case]] = [
    normalization, activation, optimizer, pooling, arrays, normalization, activation, optimizer, pooling, normalization,
    loss, loss, convolution, convolution, lstm, attention, attention,
    *FILTERS, *GATHERS, *RESIZES, *ARRAYS, graph_functions, graph_functions,
]  # fmt: skip


if __name__ == "__main__":
    logging.getLogger("retrograd.bnns").propagate = False
    sys.exit(main("retrograd.bnns", run))
