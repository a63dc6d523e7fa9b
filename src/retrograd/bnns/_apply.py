"""The functions that apply a filter of any kind with one or two inputs."""

from __future__ import annotations

from typing import Any, Final

from ._failure import renaming, status
from ._filter import BNNSFilter, checked_filter
from ._layer import OneInputFilter, TwoInputFilter
from ._structures import BNNSNDArrayDescriptor

__all__ = [
    "BNNSFilterApply",
    "BNNSFilterApplyBackwardBatch",
    "BNNSFilterApplyBackwardTwoInputBatch",
    "BNNSFilterApplyBatch",
    "BNNSFilterApplyTwoInput",
    "BNNSFilterApplyTwoInputBatch",
]

# From the array functions' argument names to Apple's.
_FORWARD_NAMES: Final = renaming({"x": "in", "out": "out"})
_BACKWARD_NAMES: Final = renaming({"x": "in", "y": "out", "dy": "out_delta.data", "out": "in_delta.data"})
_USE_TWO: Final = "filter does not have two inputs"
_OWN: Final = "normalization, arithmetic, loss and attention filters have functions of their own"
_USE: Final = (
    f"{_OWN}: BNNSNormalizationFilterApplyBatch, BNNSArithmeticFilterApplyBatch, BNNSLossFilterApplyBatch, "
    "BNNSApplyMultiheadAttention"
)
_USE_BACKWARD: Final = (
    f"{_OWN}: BNNSNormalizationFilterApplyBackwardBatch, BNNSArithmeticFilterApplyBackwardBatch, "
    "BNNSLossFilterApplyBackwardBatch, BNNSApplyMultiheadAttentionBackward"
)


@status(-1, rename=_FORWARD_NAMES)
def BNNSFilterApply(filter: BNNSFilter | None, in_: Any, out: Any) -> int:
    """Apply a filter to one sample. 0, or -1 on failure."""
    checked_filter(OneInputFilter, filter, _USE).apply(1, in_, 0, out, 0)
    return 0


@status(-1, rename=_FORWARD_NAMES)
def BNNSFilterApplyBatch(
    filter: BNNSFilter | None, batch_size: int, in_: Any, in_stride: int, out: Any, out_stride: int
) -> int:
    """Apply a filter to samples that start `in_stride` and `out_stride` elements apart. 0, or -1 on failure."""
    checked_filter(OneInputFilter, filter, _USE).apply(batch_size, in_, in_stride, out, out_stride)
    return 0


@status(-1, rename=_BACKWARD_NAMES)
def BNNSFilterApplyBackwardBatch(
    filter: BNNSFilter | None,
    batch_size: int,
    in_: Any,
    in_stride: int,
    in_delta: BNNSNDArrayDescriptor | None,
    in_delta_stride: int,
    out: Any,
    out_stride: int,
    out_delta: BNNSNDArrayDescriptor | None,
    out_delta_stride: int,
    weights_delta: BNNSNDArrayDescriptor | None,
    bias_delta: BNNSNDArrayDescriptor | None,
) -> int:
    """Compute the gradients of a filter: of its input, its weights (or a trainable alpha) and its bias.

    The slope of an activation is computed from `out` if that determines it, else from `in_`. Arguments that are not
    needed may be None. Returns 0, or -1 on failure.
    """
    checked_filter(OneInputFilter, filter, _USE_BACKWARD).apply_backward(
        batch_size,
        in_,
        in_stride,
        in_delta,
        in_delta_stride,
        out,
        out_stride,
        out_delta,
        out_delta_stride,
        weights_delta,
        bias_delta,
    )
    return 0


@status(-1)
def BNNSFilterApplyTwoInput(filter: BNNSFilter | None, inA: Any, inB: Any, out: Any) -> int:
    """Apply a filter with two inputs to one sample of each. 0, or -1 on failure."""
    checked_filter(TwoInputFilter, filter, _USE_TWO).apply_two(1, inA, 0, inB, 0, out, 0)
    return 0


@status(-1)
def BNNSFilterApplyTwoInputBatch(
    filter: BNNSFilter | None,
    batch_size: int,
    inA: Any,
    inA_stride: int,
    inB: Any,
    inB_stride: int,
    out: Any,
    out_stride: int,
) -> int:
    """Apply a filter with two inputs to samples that start so many elements apart. 0, or -1 on failure."""
    checked_filter(TwoInputFilter, filter, _USE_TWO).apply_two(
        batch_size, inA, inA_stride, inB, inB_stride, out, out_stride
    )
    return 0


@status(-1)
def BNNSFilterApplyBackwardTwoInputBatch(
    filter: BNNSFilter | None,
    batch_size: int,
    inA: Any,
    inA_stride: int,
    inA_delta: BNNSNDArrayDescriptor | None,
    inA_delta_stride: int,
    inB: Any,
    inB_stride: int,
    inB_delta: BNNSNDArrayDescriptor | None,
    inB_delta_stride: int,
    out: Any,
    out_stride: int,
    out_delta: BNNSNDArrayDescriptor | None,
    out_delta_stride: int,
    weights_delta: BNNSNDArrayDescriptor | None,
    bias_delta: BNNSNDArrayDescriptor | None,
) -> int:
    """Compute the gradients of both inputs. Arguments that are not needed may be None. 0, or -1 on failure."""
    checked_filter(TwoInputFilter, filter, _USE_TWO).apply_two_backward(
        batch_size,
        inA,
        inA_stride,
        inA_delta,
        inA_delta_stride,
        inB,
        inB_stride,
        inB_delta,
        inB_delta_stride,
        out,
        out_stride,
        out_delta,
        out_delta_stride,
        weights_delta,
        bias_delta,
    )
    return 0
