"""Fused filters: a layer, and a normalization or a quantization of its output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ..ops._buffers import elements_of
from . import _constants as c
from ._apply import OneInputFilter
from ._arithmetic_filter import ArithmeticFilter
from ._convolution import ConvolutionFilter
from ._declare import applies
from ._failure import Invalid, Unsupported, status
from ._filter import (
    FLOAT32,
    BNNSFilter,
    accumulates,
    checked_batch,
    put,
    source_samples,
    target_samples,
)
from ._fully_connected import FullyConnectedFilter
from ._memory import Array, Geometry, as_size, check_disjoint, size_of
from ._normalization import NormalizationFilter
from ._quantization import QuantizationFilter
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor

# The layers that may come first. All but arithmetic have one input, and weights and a bias as parameters.
_FIRST: Final[dict[int, Callable[[Any, Any], OneInputFilter | ArithmeticFilter]]] = {
    c.BNNSConvolution: lambda layer, parameters: ConvolutionFilter(layer, parameters, False),
    c.BNNSTransposedConvolution: lambda layer, parameters: ConvolutionFilter(layer, parameters, True),
    c.BNNSFullyConnected: FullyConnectedFilter,
    c.BNNSArithmetic: ArithmeticFilter,
}
_NORMS: Final = (c.BNNSBatchNorm, c.BNNSInstanceNorm, c.BNNSLayerNorm, c.BNNSGroupNorm)
_NORM_DELTAS: Final = ("beta_delta", "gamma_delta")
_DELTAS: Final = ("weights_delta", "bias_delta", *_NORM_DELTAS)  # the order of delta_parameters
_USE_MANY: Final = "an arithmetic filter comes first: use BNNSFusedFilterApplyMultiInputBatch and ...Backward..."


class _ParameterResult(NamedTuple):
    """A gradient of the normalization: the client's memory, and what the filter computes before it writes there."""

    view: Array
    accumulate: bool
    computed: BNNSNDArrayDescriptor


class FusedFilter(BNNSFilter):
    """See :func:`BNNSFilterCreateFusedLayer`."""

    def __init__(
        self, number: Any, types: Any, layers: Any, parameters: Any, slopes_from_input: bool, momentum_weighs: str
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
        self.first = _stage(0, lambda: _FIRST[first](given[0], parameters))
        self.second = _stage(
            1,
            lambda: (
                QuantizationFilter(given[1], parameters)
                if self.quantizes
                else NormalizationFilter(second, given[1], parameters, slopes_from_input, momentum_weighs)
            ),
        )
        self.many = isinstance(self.first, ArithmeticFilter)  # inputs
        if self.many and not self.first.output.is_sample:
            raise Invalid("layer_params[0]: out_type must be BNNSSample, for the normalization of a batch")
        self.input: Geometry | None = None if self.many else self.first.input
        self.output: Geometry = self.second.output
        made, taken = self.first.output.geometry if self.many else self.first.output, self.second.input
        for name in ("extents", "strides", "dtype"):
            if getattr(made, name) != getattr(taken, name):
                raise Invalid(
                    f"o_desc of layer_params[0] has {size_of(made)}, stride={made.strides} and {made.dtype}, but "
                    f"i_desc of layer_params[1] has {size_of(taken)}, stride={taken.strides} and {taken.dtype}"
                )
        self._made: Geometry = made
        # The output of the first filter, as a descriptor of its gradient.
        self._between: BNNSNDArrayDescriptor = given[1].i_desc.copy()
        self._between.data_type = c.BNNSDataTypeFloat32
        self._buffer: Array | None = None

    def destroy(self) -> None:
        if not self.destroyed:
            for stage in (self.first, self.second):
                stage.destroy()
        super().destroy()

    def _check_trains(self) -> None:
        if self.first.activation.function.name != "identity":
            raise Unsupported("the activation of layer_params[0] must be Identity in training")

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, batch_size: Any, source: Any, in_stride: Any, target: Any, out_stride: Any, training: bool) -> None:
        if self.many:
            raise Invalid(_USE_MANY)

        def first(batch: int, between: Array) -> None:
            self.first.apply(batch, source, in_stride, between, 0)

        self._forward(batch_size, first, self.first._parameters(), target, out_stride, training)

    def apply_many(
        self, batch_size: Any, number: Any, inputs: Any, strides: Any, target: Any, out_stride: Any, training: bool
    ) -> None:
        if not self.many:
            raise Invalid("filter has one input: use BNNSFusedFilterApplyBatch")

        def first(batch: int, between: Array) -> None:
            self.first.apply(batch, number, inputs, strides, between, 0)

        self._forward(batch_size, first, {}, target, out_stride, training)

    def _forward(
        self,
        batch_size: Any,
        first: Callable[[int, Array], None],
        parameters: dict[str, Array],
        target: Any,
        out_stride: Any,
        training: bool,
    ) -> None:
        batch = checked_batch(batch_size)
        if training and not self.quantizes:
            self._check_trains()
        # The second filter compares it with its own parameters.
        y = target_samples("out", self.output, target, batch, out_stride)
        check_disjoint({"out": y}, parameters)
        between = self._intermediate(batch * self._made.packed_stride)
        first(batch, between)
        if self.quantizes:
            self.second.write(source_samples("in", self._made, between, batch, 0), y, "out")
        else:  # it also keeps a copy of its input for backward
            self.second.apply(batch, between, 0, target, out_stride, training)

    def _intermediate(self, elements: int) -> Array:
        """Where the output of the first filter is put."""
        buffer = self._buffer
        if buffer is None or buffer.size < elements:
            buffer = self.arena.allocate((elements,), self._made.dtype)
            self.arena.free(self._buffer)
            self._buffer = buffer
        return buffer[:elements]

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(
        self,
        batch_size: Any,
        source: Any,
        in_stride: Any,
        in_delta: Any,
        in_delta_stride: Any,
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        deltas: Any,
    ) -> None:
        if self.many:
            raise Invalid(_USE_MANY)
        if self.quantizes:
            raise Unsupported("the second filter is a quantization: rounding to integers has no gradient")
        weights_delta, bias_delta, *norm_deltas = _listed(deltas, _DELTAS)
        wanted = {"in_delta": in_delta, "weights_delta": weights_delta, "bias_delta": bias_delta}

        def first(batch: int, between: Any) -> None:
            self.first.apply_backward(
                batch, source, in_stride, in_delta, in_delta_stride, None, 0, between, 0, weights_delta, bias_delta
            )

        self._backward(batch_size, wanted, first, out, out_stride, out_delta, out_delta_stride, norm_deltas)

    def apply_backward_many(
        self,
        batch_size: Any,
        number: Any,
        inputs: Any,
        strides: Any,
        in_delta: Any,
        in_delta_strides: Any,
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        deltas: Any,
    ) -> None:
        if not self.many:
            raise Invalid("filter has one input: use BNNSFusedFilterApplyBackwardBatch")
        norm_deltas = _listed(deltas, _NORM_DELTAS)
        entries = () if in_delta is None else _entries("in_delta", in_delta)
        wanted = {f"in_delta[{k}]": delta for k, delta in enumerate(entries)}

        def first(batch: int, between: Any) -> None:
            self.first.apply_backward(batch, number, inputs, strides, in_delta, in_delta_strides, None, 0, between, 0)

        self._backward(batch_size, wanted, first, out, out_stride, out_delta, out_delta_stride, norm_deltas)

    def _backward(
        self,
        batch_size: Any,
        wanted: dict[str, Any],
        first: Callable[[int, BNNSNDArrayDescriptor], None],
        out: Any,
        out_stride: Any,
        out_delta: Any,
        out_delta_stride: Any,
        norm_deltas: Sequence[Any],
    ) -> None:
        """`wanted` has the gradients of the first filter, which `first` computes from that of its output."""
        batch = checked_batch(batch_size)
        self._check_trains()
        parameters = (self.second.beta, self.second.gamma)
        results = {
            name: self._parameter_result(name, delta, parameter)
            for name, delta, parameter in zip(_NORM_DELTAS, norm_deltas, parameters, strict=True)
            if delta is not None
        }
        views = {name: result.view for name, result in results.items()}
        for name, delta in wanted.items():
            memory = _memory_of(delta)
            if memory is not None:
                check_disjoint(views, {name: memory})
        check_disjoint(views, {})
        between = None
        if any(delta is not None for delta in wanted.values()):
            between = self._between.copy()
            between.data = np.empty(batch * self._made.packed_stride, np.float32)
        # What the second filter computes is written to the client's memory when the first has accepted its arguments.
        computed = {name: result.computed for name, result in results.items()}
        self.second.apply_backward(
            batch,
            between,
            0,
            out,
            out_stride,
            out_delta,
            out_delta_stride,
            computed.get("beta_delta"),
            computed.get("gamma_delta"),
        )
        if between is not None:
            first(batch, between)
        for result in results.values():
            put(result.view, result.computed.view(), result.accumulate)

    def _parameter_result(self, name: str, delta: Any, parameter: Any) -> _ParameterResult:
        view: Array = self.second._parameter_delta(name, delta, parameter)
        computed = delta.copy()
        computed.flags = c.BNNSNDArrayFlagBackpropSet
        computed.data_type = c.BNNSDataTypeFloat32
        computed.data = np.empty(delta.geometry().span, FLOAT32)
        return _ParameterResult(view, accumulates(name, delta), computed)


def _shown(filter_type: Any) -> str:
    names = {
        getattr(c, f"BNNS{name}"): f"BNNS{name}"
        for name in (
            "Convolution",
            "FullyConnected",
            "BatchNorm",
            "InstanceNorm",
            "LayerNorm",
            "GroupNorm",
            "TransposedConvolution",
            "Quantization",
            "Arithmetic",
        )
    }
    known = isinstance(filter_type, int) and not isinstance(filter_type, bool)
    return names.get(filter_type, repr(filter_type)) if known else repr(filter_type)


def _pair(name: str, values: Any) -> tuple[Any, Any]:
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


def _listed(deltas: Any, names: tuple[str, ...]) -> Sequence[Any]:
    """The entries of delta_parameters; None for those that are not wanted."""
    if deltas is None:
        return (None,) * len(names)
    entries = _entries("delta_parameters", deltas)
    if len(entries) != len(names):
        raise Invalid(f"delta_parameters has {len(entries)} entries, must have {len(names)}: {', '.join(names)}")
    return entries


def _stage(index: int, make: Callable[[], Any]) -> Any:
    """The filter of a stage; its number is in messages."""
    try:
        return make()
    except (Invalid, Unsupported) as error:
        raise type(error)(f"layer_params[{index}]: {error}") from None


def _memory_of(delta: Any) -> Array | None:
    """All memory of a gradient, for a comparison; None if there is none, or none that can be used."""
    if not isinstance(delta, BNNSNDArrayDescriptor) or delta.data is None:
        return None
    try:
        return elements_of(delta.data)[0]
    except TypeError:
        return None


# ---- Apple's functions ----------------------------------------------------------------------------------------------

_OTHERWISE: Final = "filter is not a fused filter"


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
    return FusedFilter(
        number_of_fused_filters, filter_type, layer_params, filter_params, slopes_from_input, momentum_weighs
    )


_applies = functools.partial(applies, FusedFilter, _OTHERWISE)


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
