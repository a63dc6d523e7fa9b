"""Fused filters: a layer, and a normalization or a quantization of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from ..ops._buffers import elements_of
from . import _constants as c
from ._arithmetic_filter import ArithmeticFilter, BNNSLayerParametersArithmetic
from ._convolution import BNNSLayerParametersConvolution, ConvolutionFilter
from ._declare import applies
from ._failure import Invalid, Unsupported, prefixing, status
from ._filter import FLOAT32, BNNSFilter, checked_batch, source_samples, target_samples
from ._fully_connected import BNNSLayerParametersFullyConnected, FullyConnectedFilter
from ._layer import WeightedLayer, checked_layer
from ._memory import Array, as_size, check_disjoint, contiguous, size_of
from ._normalization import NormalizationFilter
from ._quantization import QuantizationFilter
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Structure

# The layers that may come first. All but arithmetic have one input, and weights and a bias as parameters.
_FIRST: Final[dict[int, tuple[Callable[..., WeightedLayer | ArithmeticFilter], type[Structure]]]] = {
    c.BNNSConvolution: (partial(ConvolutionFilter, transposed=False), BNNSLayerParametersConvolution),
    c.BNNSTransposedConvolution: (partial(ConvolutionFilter, transposed=True), BNNSLayerParametersConvolution),
    c.BNNSFullyConnected: (FullyConnectedFilter, BNNSLayerParametersFullyConnected),
    c.BNNSArithmetic: (ArithmeticFilter, BNNSLayerParametersArithmetic),
}
_NORMS: Final = (c.BNNSBatchNorm, c.BNNSInstanceNorm, c.BNNSLayerNorm, c.BNNSGroupNorm)
_LAYER_NAMES: Final = ("Convolution", "TransposedConvolution", "FullyConnected", "Arithmetic", "Quantization")
_NORM_NAMES: Final = ("BatchNorm", "InstanceNorm", "LayerNorm", "GroupNorm")
_NORM_DELTAS: Final = ("beta_delta", "gamma_delta")
_DELTAS: Final = ("weights_delta", "bias_delta", *_NORM_DELTAS)  # the order of delta_parameters
_USE_MANY: Final = "an arithmetic filter comes first: use BNNSFusedFilterApplyMultiInputBatch and ...Backward..."


class _Work:
    """Gradients inside the filter, kept for the next backward call of the same shapes, whose plans they are part of."""

    def __init__(self, batch: int, between: BNNSNDArrayDescriptor) -> None:
        self.batch, self.between = batch, between
        self.computed: dict[str, BNNSNDArrayDescriptor] = {}

    def like(self, name: str, delta: BNNSNDArrayDescriptor) -> BNNSNDArrayDescriptor:
        """Where a gradient is computed before the client's memory is written."""
        wanted = contiguous(delta.geometry(), FLOAT32)
        computed = self.computed.get(name)
        if computed is None or computed.geometry() != wanted:
            computed = delta.copy()
            computed.flags, computed.data_type = c.BNNSNDArrayFlagBackpropSet, c.BNNSDataTypeFloat32
            computed.stride, computed.data = (), np.empty(wanted.elements, FLOAT32)
            self.computed[name] = computed
        return computed


class FusedFilter(BNNSFilter):
    """See :func:`BNNSFilterCreateFusedLayer`."""

    def __init__(
        self,
        number: object,
        types: object,
        layers: object,
        parameters: object,
        slopes_from_input: bool,
        momentum_weighs: str,
    ) -> None:
        super().__init__(parameters)
        if as_size("number_of_fused_filters", number) != 2:
            raise Unsupported(f"number_of_fused_filters is {number}; two filters can be fused")
        first, second = _pair("filter_type", types)
        given = _pair("layer_params", layers)
        if first not in _FIRST or isinstance(first, bool):
            raise Unsupported(f"filter_type[0] is {_shown(first)}, which cannot come first")
        self.quantizes = second == c.BNNSQuantization and first != c.BNNSArithmetic
        if not (self.quantizes or second in _NORMS) or isinstance(second, bool):
            allowed = "" if first == c.BNNSArithmetic else " or BNNSQuantization"
            raise Unsupported(
                f"filter_type[1] is {_shown(second)}; after {_shown(first)} it must be a normalization{allowed}"
            )
        with prefixing("layer_params[0]: "):
            kind, structure = _FIRST[first]
            self.first = kind(checked_layer(structure, given[0]), parameters)
        self.second: NormalizationFilter | QuantizationFilter
        with prefixing("layer_params[1]: "):
            if self.quantizes:
                self.second = QuantizationFilter(given[1], parameters)
            else:
                options = slopes_from_input, momentum_weighs
                self.second = NormalizationFilter(second, given[1], parameters, *options)
        self.many = isinstance(self.first, ArithmeticFilter)  # inputs
        if isinstance(self.first, ArithmeticFilter):
            if not self.first.output.is_sample:
                raise Invalid("layer_params[0]: out_type must be BNNSSample, for the normalization of a batch")
            self.input, made = None, self.first.output.geometry
        else:
            self.input, made = self.first.input, self.first.output
        self.output, taken = self.second.output, self.second.input
        if (made.extents, made.strides, made.dtype) != (taken.extents, taken.strides, taken.dtype):
            raise Invalid(
                f"o_desc of layer_params[0] has {size_of(made)}, stride={made.strides} and {made.dtype}, but "
                f"i_desc of layer_params[1] has {size_of(taken)}, stride={taken.strides} and {taken.dtype}"
            )
        self._made = made
        # The output of the first filter, as a descriptor of its gradient.
        self._between: BNNSNDArrayDescriptor = given[1].i_desc.copy()
        self._between.data_type = c.BNNSDataTypeFloat32
        self._buffer: Array | None = None
        self._spare: list[_Work] = []  # of calls that have ended

    def destroy(self) -> None:
        if not self.destroyed:
            for stage in (self.first, self.second):
                stage.destroy()
        super().destroy()

    def _check_trains(self) -> None:
        if self.first.activation.function.name != "identity":
            raise Unsupported("the activation of layer_params[0] must be Identity in training")

    def _check_inputs(self, many: bool, function: str) -> None:
        if self.many and not many:
            raise Invalid(_USE_MANY)
        if many and not self.many:
            raise Invalid(f"filter has one input: use {function}")

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, *arguments: object) -> None:
        self._check_inputs(False, "")
        self._forward(*arguments)

    def apply_many(self, *arguments: object) -> None:
        self._check_inputs(True, "BNNSFusedFilterApplyBatch")
        self._forward(*arguments)

    def _forward(self, batch_size: object, *arguments: object) -> None:
        *given, target, out_stride, training = arguments  # the first filter's, then the output
        batch = checked_batch(batch_size)
        if training and not self.quantizes:
            self._check_trains()
        # The second filter compares it with its own parameters.
        y = target_samples("out", self.output, target, batch, out_stride)
        if isinstance(self.first, WeightedLayer):
            check_disjoint({"out": y}, {f"{one.name}.data": one.memory() for one in self.first.parameters()})
        between = self._intermediate(batch * self._made.packed_stride)
        first: Callable[..., None] = self.first.apply
        first(batch, *given, between, 0)
        if isinstance(self.second, QuantizationFilter):
            self.second.write(source_samples("in", self._made, between, batch, 0), y, "out")
        else:  # it also keeps a copy of its input for backward
            self.second.apply(batch, between, 0, target, out_stride, bool(training))

    def _intermediate(self, elements: int) -> Array:
        """Where the output of the first filter is put."""
        buffer = self._buffer
        if buffer is None or buffer.size < elements:
            buffer = self.arena.allocate((elements,), self._made.dtype)
            self.arena.free(self._buffer)
            self._buffer = buffer
        return buffer[:elements]

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(self, *arguments: object) -> None:
        self._check_inputs(False, "")
        if self.quantizes:
            raise Unsupported("the second filter is a quantization: rounding to integers has no gradient")
        *given, deltas = arguments
        weights_delta, bias_delta, *rest = _listed(deltas, _DELTAS)
        wanted = {"in_delta": given[3], "weights_delta": weights_delta, "bias_delta": bias_delta}
        self._backward(given, wanted, (weights_delta, bias_delta), rest)

    def apply_backward_many(self, *arguments: object) -> None:
        self._check_inputs(True, "BNNSFusedFilterApplyBackwardBatch")
        *given, deltas = arguments
        rest = _listed(deltas, _NORM_DELTAS)
        entries = () if given[4] is None else _entries("in_delta", given[4])
        self._backward(given, {f"in_delta[{k}]": delta for k, delta in enumerate(entries)}, (), rest)

    def _backward(
        self, given: Sequence[object], wanted: Mapping[str, object], own: Sequence[object], deltas: Sequence[object]
    ) -> None:
        """`wanted` has the gradients of the first filter, of which `own` are its last arguments."""
        second = self.second
        assert isinstance(second, NormalizationFilter)
        batch_size, *inputs, out, out_stride, out_delta, out_delta_stride = given
        batch = checked_batch(batch_size)
        self._check_trains()
        results = {
            name: second.deltas[f"d{name.removesuffix('_delta')}"].result(delta)
            for name, delta in zip(_NORM_DELTAS, deltas, strict=True)
            if delta is not None
        }
        memory = {name: _memory_of(delta) for name, delta in wanted.items()}
        check_disjoint(
            {name: result.array for name, result in results.items()},
            {name: array for name, array in memory.items() if array is not None},
        )
        work = self._work(batch)
        between = work.between if any(delta is not None for delta in wanted.values()) else None
        # What the second filter computes is written to the client's memory when the first has accepted its arguments.
        computed = [
            work.like(name, delta) if isinstance(delta, BNNSNDArrayDescriptor) else None
            for name, delta in zip(_NORM_DELTAS, deltas, strict=True)
        ]
        second.apply_backward(batch, between, 0, out, out_stride, out_delta, out_delta_stride, *computed)
        if between is not None:
            first: Callable[..., None] = self.first.apply_backward
            first(batch, *inputs, None, 0, between, 0, *own)
        for name, result in results.items():
            result.put(work.computed[name].view())
        self._spare.append(work)

    def _work(self, batch: int) -> _Work:
        """Memory that no other thread's call uses."""
        try:
            work = self._spare.pop()
            if work.batch == batch:
                return work
        except IndexError:
            pass
        between = self._between.copy()
        between.data = np.empty(batch * self._made.packed_stride, np.float32)
        return _Work(batch, between)


def _shown(filter_type: object) -> str:
    names = {getattr(c, f"BNNS{name}"): f"BNNS{name}" for name in (*_LAYER_NAMES, *_NORM_NAMES)}
    known = isinstance(filter_type, int) and not isinstance(filter_type, bool)
    return names.get(filter_type, repr(filter_type)) if known else repr(filter_type)


def _pair(name: str, values: object) -> tuple[Any, Any]:
    """The two entries of an array."""
    entries = _entries(name, values)
    if len(entries) != 2:
        raise Invalid(f"{name} has {len(entries)} entries, but number_of_fused_filters is 2")
    return entries[0], entries[1]


def _entries(name: str, values: Any) -> Sequence[Any]:
    if values is None:
        raise Invalid(f"{name} is NULL")
    try:
        return list(values)
    except TypeError:
        raise Invalid(f"{name} is of type {type(values).__name__}, must be a list") from None


def _listed(deltas: object, names: tuple[str, ...]) -> Sequence[object]:
    """The entries of delta_parameters; None for those that are not wanted."""
    if deltas is None:
        return (None,) * len(names)
    entries = _entries("delta_parameters", deltas)
    if len(entries) != len(names):
        raise Invalid(f"delta_parameters has {len(entries)} entries, must have {len(names)}: {', '.join(names)}")
    return entries


def _memory_of(delta: object) -> Array | None:
    """All memory of a gradient, for a comparison; None if there is none, or none that can be used."""
    if not isinstance(delta, BNNSNDArrayDescriptor) or delta.data is None:
        return None
    try:
        return elements_of(delta.data)[0]
    except TypeError:
        return None


# ---- Apple's functions ----------------------------------------------------------------------------------------------


@status(None)
def BNNSFilterCreateFusedLayer(
    number_of_fused_filters: int,
    filter_type: Sequence[int],
    layer_params: Sequence[Any],
    filter_params: BNNSFilterParameters | None = None,
    *,
    slopes_from_input: bool = False,
    momentum_weighs: str = "old",
) -> FusedFilter | None:
    """Create a filter that applies a layer, and a normalization or a quantization of its output, or None.

    The layer is a convolution, a transposed one, a fully connected layer or an arithmetic function. After the latter
    only a normalization is possible. A quantization cannot be trained.

    `slopes_from_input` and `momentum_weighs` are those of :func:`BNNSFilterCreateLayerNormalization`.
    """
    options = slopes_from_input, momentum_weighs
    return FusedFilter(number_of_fused_filters, filter_type, layer_params, filter_params, *options)


_applies = partial(applies, FusedFilter, "filter is not a fused filter")


@_applies("apply", "filter batch_size in_+ out+ training")
def BNNSFusedFilterApplyBatch() -> None:
    """Apply a fused filter to samples that start `in_stride` and `out_stride` elements apart. 0, or -1 on failure."""


@_applies("apply_backward", "filter batch_size in_+ in_delta+ out+ out_delta+ delta_parameters[]?")
def BNNSFusedFilterApplyBackwardBatch() -> None:
    """Compute the gradients of the last training pass. 0, or -1 on failure.

    `delta_parameters` has the gradients of the weights, the bias, beta and gamma, in this order; None for those that
    are not wanted.
    """


@_applies("apply_many", "filter batch_size number_of_inputs in_[]+ out+ training")
def BNNSFusedFilterApplyMultiInputBatch() -> None:
    """Apply a fused filter whose first layer is arithmetic. 0, or -1 on failure."""


@_applies(
    "apply_backward_many", "filter batch_size number_of_inputs in_[]?+ in_delta[]?+ out+ out_delta+ delta_parameters[]?"
)
def BNNSFusedFilterApplyBackwardMultiInputBatch() -> None:
    """The gradients of the last training pass, if the first layer is arithmetic. 0, or -1 on failure.

    `delta_parameters` has those of beta and gamma.
    """
