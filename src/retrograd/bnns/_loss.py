"""Loss filters: a loss over a batch, and the gradient of its input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from ..ops import loss as ops
from ..ops._arrays import same_elements
from . import _constants as c
from . import _filter
from ._declare import applies
from ._failure import Invalid, Unsupported, renaming, status
from ._filter import DELTAS, FLOAT32, BNNSFilter
from ._layer import Delta, Result
from ._memory import Array, Geometry, as_float, as_size, check_disjoint, check_writable, geometry, size_of, view_of
from ._names import constant_name
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Bool, Float, Pointer, Size, Structure, UInt32

# ---- structures -----------------------------------------------------------------------------------------------------


class BNNSLayerParametersLossBase(Structure):
    """A loss without parameters. The other loss structures begin with the same fields."""

    function: UInt32
    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor
    reduction: UInt32

    _prefixes: ClassVar[Mapping[str, str]] = {"function": "BNNSLossFunction", "reduction": "BNNSLossReduction"}


class BNNSLayerParametersLossSoftmaxCrossEntropy(BNNSLayerParametersLossBase):
    """The cross entropy of labels and the softmax of the input."""

    label_smooth: Float


class BNNSLayerParametersLossSigmoidCrossEntropy(BNNSLayerParametersLossBase):
    """The cross entropy of labels and the sigmoid of the input."""

    label_smooth: Float


class BNNSLayerParametersLossHuber(BNNSLayerParametersLossBase):
    """The Huber loss."""

    huber_delta: Float


class BNNSLayerParametersLossYolo(BNNSLayerParametersLossBase):
    """The loss of YOLO, which is not supported: see :func:`BNNSFilterCreateLayerLoss`."""

    huber_delta: Float
    number_of_grid_columns: Size
    number_of_grid_rows: Size
    number_of_anchor_boxes: Size
    anchor_box_size: Size
    rescore: Bool
    scale_xy: Float
    scale_wh: Float
    scale_object: Float
    scale_no_object: Float
    scale_classification: Float
    object_minimum_iou: Float
    no_object_maximum_iou: Float
    anchors_data: Pointer


_Weights: TypeAlias = float | Array | None  # one for all, or an array; None: they are 1

# ---- the filter -----------------------------------------------------------------------------------------------------


class _Loss(NamedTuple):
    """The array function of a loss, and its options that no structure has."""

    function: Callable[..., tuple[float | Array, Array | None]]
    of_samples: bool = False  # one loss for each sample, not for each of its elements
    options: Mapping[str, float] = {}


_LOSSES: Final = {
    c.BNNSLossFunctionSoftmaxCrossEntropy: _Loss(ops.softmax_cross_entropy, of_samples=True),
    c.BNNSLossFunctionSigmoidCrossEntropy: _Loss(ops.sigmoid_cross_entropy),
    c.BNNSLossFunctionMeanSquareError: _Loss(ops.mean_squared_error),
    c.BNNSLossFunctionHuber: _Loss(ops.huber),
    c.BNNSLossFunctionLog: _Loss(ops.log_loss, options={"eps": 1e-7}),  # Apple's header has no field for it
    c.BNNSLossFunctionCosineDistance: _Loss(ops.cosine_distance, of_samples=True),
    c.BNNSLossFunctionHinge: _Loss(ops.hinge),
    c.BNNSLossFunctionMeanAbsoluteError: _Loss(ops.mean_absolute_error, options={"slope_at_zero": 1.0}),
    c.BNNSLossFunctionCategoricalCrossEntropy: _Loss(ops.categorical_cross_entropy, of_samples=True),
}
_REDUCTIONS: Final[dict[int, ops.Reduction]] = {
    c.BNNSLossReductionNone: "none",
    c.BNNSLossReductionSum: "sum",
    c.BNNSLossReductionWeightedMean: "weighted_mean",
    c.BNNSLossReductionMean: "mean",
    c.BNNSLossReductionNonZeroWeightMean: "nonzero_mean",
}
# The structures with parameters, and their functions.
_PARAMETERS: Final[dict[type[Structure], int]] = {
    BNNSLayerParametersLossSoftmaxCrossEntropy: c.BNNSLossFunctionSoftmaxCrossEntropy,
    BNNSLayerParametersLossSigmoidCrossEntropy: c.BNNSLossFunctionSigmoidCrossEntropy,
    BNNSLayerParametersLossHuber: c.BNNSLossFunctionHuber,
    BNNSLayerParametersLossYolo: c.BNNSLossFunctionYolo,
}


class LossFilter(BNNSFilter):
    """See :func:`BNNSFilterCreateLayerLoss`."""

    def __init__(self, layer: Any, parameters: Any, divide_by_classes: bool) -> None:
        self.function = _checked_function(layer)
        super().__init__(parameters)
        self.options: Mapping[str, object] = {**_options(layer), "num_threads": self.threads}
        if layer.reduction not in _REDUCTIONS:
            shown = constant_name("BNNSLossReduction", layer.reduction)
            raise Invalid(f"reduction is {shown}, which is not a BNNSLossReductionFunction")
        self.reduction = _REDUCTIONS[layer.reduction]
        self.input, self.output = (_float_geometry(f"{name}_desc", getattr(layer, f"{name}_desc")) for name in "io")
        self.of_samples = _LOSSES[self.function].of_samples
        if self.of_samples and len(self.input.proper_extents) > 1:
            raise Unsupported(f"i_desc has {size_of(self.input)}, but the loss of a sample needs a vector")
        if self.reduction != "none" and self.output.elements != 1:
            raise Invalid(f"o_desc has {self.output.elements} elements, expected 1 for a reduced loss")
        self.values = 1 if self.of_samples else self.input.elements  # for each sample
        by_classes = self.function == c.BNNSLossFunctionSoftmaxCrossEntropy and divide_by_classes
        self.scale = 1 / self.input.elements if by_classes else 1.0
        self.in_delta = Delta("in_delta", "i_desc", self.input, fits=Delta.reshaped, types=DELTAS)

    # ---- arguments --------------------------------------------------------------------------------------------------

    def _source(self, name: str, data: object, batch: int, stride: object) -> Array:
        """The samples as [batch, elements], which the engine can read; a copy if need be."""
        array = _filter.source_samples(name, self.input, data, batch, stride)
        array = array if array.flags.aligned else array.copy()
        return array.reshape(batch, self.input.elements)

    def _weights(self, data: object, weights_size: object, batch: int) -> _Weights:
        size = as_size("weights_size", weights_size)
        if size == 0:
            return None
        each = batch * self.input.elements
        by_class = self.function == c.BNNSLossFunctionCategoricalCrossEntropy
        allowed = {1, batch * self.values, *((each,) if by_class else ())}
        if size not in allowed:
            wanted = ", ".join(map(str, [0, *sorted(allowed)]))
            raise Invalid(f"weights_size is {size}, expected {wanted} for a batch of {batch}")
        view = _vector("weights", data, size)
        if size == 1:
            return float(view[0])
        view = view if view.flags.aligned else view.copy()
        if size == each and not (self.of_samples and size == batch):
            if self.of_samples and self.reduction in ("weighted_mean", "nonzero_mean"):
                mean = f"a mean over the weights of {batch} samples is not defined for them"
                raise Unsupported(f"weights_size is {size}, a weight for each class, and {mean}")
            return view.reshape(batch, self.input.elements)
        return view

    def _incoming(self, descriptor: object, batch: int, stride: object) -> float | Array:
        """The gradient of the loss: a number for a reduced one, else [batch] or [batch, elements]."""
        name = "out_delta"
        if descriptor is None:
            raise Invalid(f"{name} is NULL")
        descriptor = _filter.checked_descriptor(name, descriptor)
        given = _filter.delta_geometry(name, descriptor)
        samples, each = (batch, self.values) if self.reduction == "none" else (1, 1)
        if self.reduction == "none" and given.elements == batch * self.values:  # of all losses
            samples, stride = 1, 0
        elif given.elements != each:
            count = samples * each
            raise Invalid(f"{name} has {given.elements} elements, but the losses of a batch of {batch} are {count}")
        array = _filter.source_samples(name, given, descriptor.data, samples, stride, ".data").astype(np.float32)
        return array.item() if self.reduction != "none" else array.reshape((batch, self.values)[: 2 - self.of_samples])

    # ---- calls ------------------------------------------------------------------------------------------------------

    def apply(self, *arguments: object) -> None:
        """Compute the loss of a batch, and the gradient of its input if that is wanted."""
        batch_size, source, in_stride, labels, labels_stride, weights, weights_size, out, in_delta, stride = arguments
        batch = _filter.checked_batch(batch_size)
        x, t = self._source("in", source, batch, in_stride), self._source("labels", labels, batch, labels_stride)
        w = self._weights(weights, weights_size, batch)
        values = _vector("out", out, batch * self.values if self.reduction == "none" else 1)
        check_writable("out", values)
        dx = None if in_delta is None else self.in_delta.result(in_delta, batch, stride)
        if dx is not None:
            check_disjoint({"out": values, "in_delta": dx.array}, {})
        cosine = self.function == c.BNNSLossFunctionCosineDistance and w is not None
        rest = self._unweighted_one(w, batch) if cosine else 0.0  # before dx is written, which may overlap the weights
        loss = self._compute(x, t, w, self.reduction, self.scale, dx) + rest
        _filter.put(values, np.asarray(loss, np.float32).reshape(values.shape), False)

    def apply_backward(self, *arguments: object) -> None:
        """Compute the gradient of a batch."""
        batch_size, source, in_stride, in_delta, in_delta_stride, labels, labels_stride = arguments[:7]
        weights, weights_size, out_delta, out_delta_stride = arguments[7:]
        batch = _filter.checked_batch(batch_size)
        if in_delta is None:
            raise Invalid("in_delta is NULL")
        x, t = self._source("in", source, batch, in_stride), self._source("labels", labels, batch, labels_stride)
        w = self._weights(weights, weights_size, batch)
        dx = self.in_delta.result(in_delta, batch, in_delta_stride)
        dloss = self._incoming(out_delta, batch, out_delta_stride)
        if not isinstance(dloss, np.ndarray):
            self._compute(x, t, w, self.reduction, self.scale * dloss, dx)
            return
        # The gradient of a loss is proportional to its weight.
        if w is not None:
            by_class = isinstance(w, np.ndarray) and w.ndim > dloss.ndim
            with np.errstate(all="ignore"):
                dloss = (dloss[:, None] if by_class else dloss) * np.asarray(w, np.float32)
        self._compute(x, t, dloss, "sum", self.scale, dx)

    def _compute(
        self, x: Array, labels: Array, weights: _Weights, reduction: ops.Reduction, scale: float, dx: Result | None
    ) -> float | Array:
        """Write or add the gradient, and return the loss."""
        out = None if dx is None or dx.accumulates else dx.rows(x.shape)
        if out is not None:
            inputs = [one for one in (labels, weights) if isinstance(one, np.ndarray)]
            if not same_elements(out, x):
                inputs.append(x)
            if any(np.may_share_memory(out, one) for one in inputs):
                out = None
        options = {"weights": weights, "reduction": reduction, "scale": scale, **self.options}
        loss, gradient = _LOSSES[self.function].function(x, labels, want_gradient=dx is not None, out=out, **options)
        if dx is not None and out is None and gradient is not None:
            dx.put(gradient)
        return loss

    def _unweighted_one(self, weights: _Weights, batch: int) -> float | Array:
        """What the documented cosine distance, 1 - w (x t), has more than w (1 - x t)."""
        each = np.broadcast_to(np.asarray(weights, np.float64), (batch,))
        rest = 1 - each
        if self.reduction == "none":
            return rest
        divisors = {"sum": 1, "mean": batch, "weighted_mean": each.sum(), "nonzero_mean": np.count_nonzero(each)}
        divisor = divisors[self.reduction]
        return rest.sum() / divisor if divisor else 0.0


def _checked_function(layer: Any) -> int:
    """The loss function of a structure that has its parameters."""
    if type(layer) is not BNNSLayerParametersLossBase and type(layer) not in _PARAMETERS:
        shown = "NULL" if layer is None else f"of type {type(layer).__name__}"
        raise Invalid(f"layer_params is {shown}, must be BNNSLayerParametersLossBase or another loss structure")
    function = layer.function
    shown = constant_name("BNNSLossFunction", function)
    if function == c.BNNSLossFunctionYolo:
        raise Unsupported(f"function is {shown}: Apple has not published how it weighs its terms and matches boxes")
    if not isinstance(function, int) or function not in _LOSSES:
        raise Invalid(f"function is {shown}, which is not a BNNSLossFunction")
    if _PARAMETERS.get(type(layer), function) != function:
        raise Invalid(f"function is {shown}, but layer_params is of type {type(layer).__name__}")
    return function


def _options(layer: Any) -> dict[str, float]:
    """The options of the array function."""
    options = dict(_LOSSES[layer.function].options)
    if hasattr(layer, "label_smooth"):
        smoothing = as_float("label_smooth", layer.label_smooth)
        if not 0 <= smoothing <= 1:
            raise Invalid(f"label_smooth is {smoothing}, must be from 0 to 1")
        options["label_smoothing"] = smoothing
    elif layer.function == c.BNNSLossFunctionHuber:
        delta = as_float("huber_delta", getattr(layer, "huber_delta", 0.0))
        if not 0 < delta < np.inf:
            raise Invalid(f"huber_delta is {delta}, must be a finite number above 0")
        options["delta"] = delta
    return options


def _float_geometry(name: str, descriptor: BNNSNDArrayDescriptor) -> Geometry:
    if descriptor.data_type != c.BNNSDataTypeFloat32:
        shown = constant_name("BNNSDataType", descriptor.data_type)
        raise Unsupported(f"{name}.data_type is {shown}; a loss needs BNNSDataTypeFloat32")
    return _filter.geometry_of(name, descriptor)


def _vector(name: str, data: object, count: int) -> Array:
    """Consecutive values."""
    return view_of(geometry(c.BNNSDataLayoutVector, FLOAT32, (count,), ()), data, name)


# ---- Apple's functions ----------------------------------------------------------------------------------------------

_OTHERWISE: Final = "filter is not a loss filter"
# From the array functions' argument names to Apple's.
_NAMES: Final = renaming({"y": "in", "logits": "in", "target": "labels", "out": "in_delta.data"})


@status(None)
def BNNSFilterCreateLayerLoss(
    layer_params: BNNSLayerParametersLossBase,
    filter_params: BNNSFilterParameters | None = None,
    *,
    divide_by_classes: bool = True,
) -> LossFilter | None:
    """Create a loss filter, or return None.

    Apple's header divides the softmax cross entropy by the number of classes. `divide_by_classes`, a retrograd
    extension, can be set to False for the usual definition. YOLO's loss is not supported, because Apple has not
    published how it is weighted.
    """
    return LossFilter(layer_params, filter_params, bool(divide_by_classes))


@applies(
    LossFilter, _OTHERWISE, "apply", "filter batch_size in_+ labels+ weights weights_size out in_delta+", rename=_NAMES
)
def BNNSLossFilterApplyBatch() -> None:
    """Compute the loss of a batch, and if `in_delta` is given the gradient of its input. 0, or -1 on failure.

    `weights_size` is 0 (no weights), 1 (one for all), or the number of losses.
    """


@applies(
    LossFilter,
    _OTHERWISE,
    "apply_backward",
    "filter batch_size in_+ in_delta+ labels+ weights weights_size out_delta+",
    rename=_NAMES,
)
def BNNSLossFilterApplyBackwardBatch() -> None:
    """Compute the gradient of the input from `out_delta`, the gradient of the loss. 0, or -1 on failure."""
