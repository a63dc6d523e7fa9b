"""Arithmetic filters: elementwise functions of one to three operands, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ..ops._arrays import same_elements
from ..ops.elementwise import activation_forward
from . import _constants as c
from . import _filter, _layer
from ._arithmetic import FUNCTIONS, gradient_of, value_of
from ._declare import applies, creates
from ._failure import Invalid
from ._filter import FLOAT32, FLOATS, BNNSFilter
from ._layer import Delta, Result
from ._memory import Array, Geometry, as_size, listed, size_of
from ._names import constant_name
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, Pointer, Structure, UInt32


class BNNSLayerParametersArithmetic(Structure):
    """An arithmetic layer. ``arithmetic_function_fields`` points to a BNNSArithmeticUnary, Binary or Ternary."""

    arithmetic_function: UInt32
    arithmetic_function_fields: Pointer
    activation: BNNSActivation


class BNNSArithmeticUnary(Structure):
    """The operand and the result of a function of one operand. Apple's field ``in`` is called ``in_``."""

    in_: BNNSNDArrayDescriptor
    in_type: UInt32
    out: BNNSNDArrayDescriptor
    out_type: UInt32


class BNNSArithmeticBinary(Structure):
    """The operands and the result of a function of two operands."""

    in1: BNNSNDArrayDescriptor
    in1_type: UInt32
    in2: BNNSNDArrayDescriptor
    in2_type: UInt32
    out: BNNSNDArrayDescriptor
    out_type: UInt32


class BNNSArithmeticTernary(Structure):
    """The operands and the result of a function of three operands."""

    in1: BNNSNDArrayDescriptor
    in1_type: UInt32
    in2: BNNSNDArrayDescriptor
    in2_type: UInt32
    in3: BNNSNDArrayDescriptor
    in3_type: UInt32
    out: BNNSNDArrayDescriptor
    out_type: UInt32


_FIELDS: Final = {1: BNNSArithmeticUnary, 2: BNNSArithmeticBinary, 3: BNNSArithmeticTernary}
_DESCRIPTOR_TYPES: Final = {getattr(c, name): name for name in ("BNNSConstant", "BNNSSample", "BNNSParameter")}


class _Operand(NamedTuple):
    name: str  # of its field
    geometry: Geometry
    kind: int  # Constant, Sample or Parameter

    @property
    def is_sample(self) -> bool:
        return self.kind == c.BNNSSample


class ArithmeticFilter(BNNSFilter):
    """See :func:`BNNSFilterCreateLayerArithmetic`."""

    def __init__(self, layer: object, parameters: object) -> None:
        layer = _layer.checked_layer(BNNSLayerParametersArithmetic, layer)
        super().__init__(parameters)
        code = layer.arithmetic_function
        if not isinstance(code, int) or code not in FUNCTIONS:
            raise Invalid(f"arithmetic_function is {code!r}, which is not a BNNSArithmeticFunction")
        self.function = FUNCTIONS[code]
        arity = self.function.arity
        fields = _layer.checked_layer(_FIELDS[arity], layer.arithmetic_function_fields, "arithmetic_function_fields")
        names = ("in_",) if arity == 1 else ("in1", "in2", "in3")[:arity]
        boolean = "in1" if code == c.BNNSArithmeticSelect else ""
        self.operands = [_operand(fields, name, name == boolean, False) for name in names]
        self.output = _operand(fields, "out", False, True)
        self._check_shapes()
        self.activation = _layer.layer_activation(layer.activation, self.output.geometry)

    def _check_shapes(self) -> None:
        output = self.output.geometry
        for name, geometry, _ in self.operands:
            if geometry.layout != output.layout:
                layouts = (constant_name("BNNSDataLayout", one) for one in (geometry.layout, output.layout))
                raise Invalid("{}.layout is {}, but out.layout is {}".format(name, *layouts))
            if any(extent not in (1, whole) for extent, whole in zip(geometry.extents, output.extents, strict=True)):
                size = listed(geometry.layout, geometry.extents)
                raise Invalid(f"{name}.size is {size}, expected 1 or that of out, which is {size_of(output)}")
        reached = tuple(map(max, *([operand.geometry.extents for operand in self.operands] * 2)))
        if reached != output.extents:
            size = listed(output.layout, output.extents)
            raise Invalid(f"out.size is {size}, but the operands broadcast to {listed(output.layout, reached)}")

    def _batch(self, batch_size: object) -> int:
        """The number of results: one per sample, or one if the output has no batch."""
        batch = _filter.checked_batch(batch_size)
        if self.output.is_sample:
            return batch
        for name, _, kind in self.operands:
            if kind == c.BNNSSample and batch > 1:
                result = f"out_type is {_DESCRIPTOR_TYPES[self.output.kind]}: there is one result for all samples"
                raise Invalid(f"batch_size is {batch} and {name}_type is BNNSSample, but {result}")
        return 1

    def _check_number(self, number: object) -> None:
        arity = self.function.arity
        if as_size("number_of_inputs", number) != arity:
            raise Invalid(f"number_of_inputs is {number}, but the function has {arity}")

    def _sources(self, batch: int, inputs: object, strides: object) -> list[Array | None]:
        """The operands, ``[batch or 1, ...]``; None for those that are NULL."""
        count = len(self.operands)
        if inputs is None:
            return [None] * count
        pointers, steps = _entries("in", inputs, count), _entries("in_stride", strides, count)
        found: list[Array | None] = []
        for k, (operand, data, step) in enumerate(zip(self.operands, pointers, steps, strict=True)):
            samples = batch if operand.is_sample else 1
            view = None if data is None else _filter.source_samples(f"in[{k}]", operand.geometry, data, samples, step)
            found.append(view)
        return found

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, *arguments: object) -> None:
        """Compute the output of a batch."""
        batch_size, number, inputs, strides, target, out_stride = arguments
        self._check_number(number)
        batch = self._batch(batch_size)
        y = _filter.target_samples("out", self.output.geometry, target, batch, out_stride)
        if inputs is None:
            raise Invalid("in is NULL")
        given = self._sources(batch, inputs, strides)
        sources = [source for source in given if source is not None]
        if len(sources) < len(given):
            raise Invalid(f"in[{[source is None for source in given].index(True)}] is NULL")
        z = value_of(self.function, sources)
        if self.activation.function.name != "identity":
            z = activation_forward(_whole(z, y.shape), self.activation.function, num_threads=self.threads)
        _filter.put(y, z, False)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(self, *arguments: object) -> None:
        """Compute the gradients of a batch; what is None is not wanted."""
        (batch_size, number, inputs, strides, in_delta, in_delta_stride) = arguments[:6]
        (out, out_stride, out_delta, out_delta_stride) = arguments[6:]
        self._check_number(number)
        batch = self._batch(batch_size)
        for name, geometry, _ in (*self.operands, self.output):
            if geometry.dtype not in (FLOAT32, np.bool_):
                raise Invalid(f"{name} of this filter has type {geometry.dtype}; backward needs Float32")
        if out_delta is None:
            raise Invalid("out_delta is NULL")
        _layer.check_trainable(self.activation, out)
        output = self.output.geometry
        dy = Delta("out_delta", "out", output).view(out_delta, batch, out_delta_stride, _filter.source_samples)
        y = None if out is None else _filter.source_samples("out", output, out, batch, out_stride)
        sources = self._sources(batch, inputs, strides)
        results = self._results(batch, in_delta, in_delta_stride, sources)
        shape = (batch, *output.shape)

        def before() -> Array:
            """The output before the activation; what it needs was checked."""
            return value_of(self.function, [source for source in sources if source is not None])

        # The output, if it determines a slope: in a training step in place, the operand has been overwritten by it.
        known = y if self.activation.function.name == "identity" else None
        self._check_known(results, sources, known)
        if any(self.function.gradients[k].output for k in results) and known is None:
            known = before()
        dz = _layer.before_activation(
            self.activation, _filter.in_shape(dy, shape), y, lambda: _whole(before(), shape), self.threads
        )
        g = dz.astype(np.float64)
        computed = [
            (result, _summed(gradient_of(self.function.gradients[k], g, sources, known), shape, self.operands[k]))
            for k, result in results.items()
        ]
        _layer.put_sums(computed)

    def _results(self, batch: int, deltas: object, strides: object, sources: list[Array | None]) -> dict[int, Result]:
        count = len(self.operands)
        entries = _entries("in_delta", deltas, count)
        steps = [0] * count if strides is None else _entries("in_delta_stride", strides, count)
        results: dict[int, Result] = {}
        for k, (operand, descriptor) in enumerate(zip(self.operands, entries, strict=True)):
            if descriptor is None:
                continue
            name, like = f"in_delta[{k}]", operand.name
            if operand.kind == c.BNNSConstant:
                raise Invalid(f"{name} is given, but {like}_type is BNNSConstant: it has no gradient")
            delta = (Delta if operand.is_sample else _layer.parameter_of)(name, like, operand.geometry)
            results[k] = delta.result(descriptor, batch, steps[k])
        for k, result in results.items():
            for j in range(k):
                other = results.get(j)
                if other is None or not _layer.are_one(result, other):
                    continue
                a, b = sources[j], sources[k]
                if a is not None and b is not None and not same_elements(a, b):
                    raise Invalid(f"{result.name} is {other.name}, but in[{k}] is not in[{j}]")
        return results

    def _check_known(self, results: dict[int, Result], sources: list[Array | None], known: Array | None) -> None:
        """Raise if an operand that a gradient needs is NULL."""
        needed = {}
        for k, result in results.items():
            gradient = self.function.gradients[k]
            operands: Sequence[int] = gradient.operands
            if gradient.output and known is None:
                operands = range(len(sources))
            needed.update(dict.fromkeys(operands, result.name))
        if self.activation.slope_from == "input":
            needed.update(dict.fromkeys(range(len(sources)), "the activation's slope"))
        for index, wanted in sorted(needed.items()):
            if sources[index] is None:
                raise Invalid(f"in[{index}] is NULL, and {wanted} is computed from it")


def _operand(fields: Structure, name: str, boolean: bool, written: bool) -> _Operand:
    shown = name.rstrip("_")
    kind = getattr(fields, f"{shown}_type")
    if not isinstance(kind, int) or kind not in _DESCRIPTOR_TYPES:
        raise Invalid(f"{shown}_type is {kind!r}, must be BNNSConstant, BNNSSample or BNNSParameter")
    types = (*FLOATS, c.BNNSDataTypeBoolean) if boolean else FLOATS
    check = _layer.output_geometry if written else _layer.typed_geometry
    return _Operand(shown, check(shown, getattr(fields, name), types), kind)


def _entries(name: str, values: object, count: int) -> list[object]:
    """The first entries of a C array."""
    if values is None:
        raise Invalid(f"{name} is NULL")
    if not isinstance(values, (list, tuple)):
        raise Invalid(f"{name} is of type {type(values).__name__}, must be a list of {count}")
    if len(values) < count:
        raise Invalid(f"{name} has {len(values)} entries, expected {count}")
    return list(values[:count])


def _whole(z: Array, shape: tuple[int, ...]) -> Array:
    """The values in float32, for every element of the output."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(np.broadcast_to(z, shape), np.float32)


def _summed(values: Array, shape: tuple[int, ...], operand: _Operand) -> Array:
    """The gradient of an operand, summed over the axes of the output's `shape` along which it was broadcast."""
    own = (shape[0] if operand.is_sample else 1, *operand.geometry.shape)
    axes = tuple(axis for axis, extent in enumerate(own) if extent == 1 and shape[axis] > 1)
    whole = np.broadcast_to(values, shape)
    with np.errstate(all="ignore"):
        return np.asarray(whole.sum(axis=axes, keepdims=True)) if axes else whole


# ---- Apple's functions ----------------------------------------------------------------------------------------------

_OTHERWISE: Final = "filter is not an arithmetic filter"


@creates(ArithmeticFilter, BNNSLayerParametersArithmetic)
def BNNSFilterCreateLayerArithmetic() -> None:
    """Create a filter that applies one of the functions BNNSArithmetic... and then an activation. None on failure.

    Operands have the layout of the output; extents of 1 are broadcast.
    """


@applies(ArithmeticFilter, _OTHERWISE, "apply", "filter batch_size number_of_inputs in_[]+ out+")
def BNNSArithmeticFilterApplyBatch() -> None:
    """Apply an arithmetic filter to a batch. Constants and parameters are the same for all samples.

    `in_` and `in_stride` have an entry for each operand. `out` may be one of them. 0, or -1 on failure.
    """


@applies(
    ArithmeticFilter,
    _OTHERWISE,
    "apply_backward",
    "filter batch_size number_of_inputs in_[]?+ in_delta[]+ out+ out_delta+",
)
def BNNSArithmeticFilterApplyBackwardBatch() -> None:
    """Compute the gradients of the operands; those of parameters are summed over the batch.

    Operands that are one tensor may share one gradient, which receives the sum. What a gradient does not need may be
    None. Returns 0, or -1 on failure.
    """
