"""The functions that apply a filter of any kind with one or two inputs."""

from __future__ import annotations

import functools
from typing import Final

from ._declare import applies
from ._failure import renaming
from ._layer import OneInputFilter, TwoInputFilter

# From the array functions' argument names to Apple's.
FORWARD_NAMES: Final = renaming({"x": "in", "out": "out"})
BACKWARD_NAMES: Final = renaming({"x": "in", "y": "out", "dy": "out_delta.data", "out": "in_delta.data"})
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


@applies(OneInputFilter, _USE, "apply", "filter (1) in_ (0) out (0)", rename=FORWARD_NAMES)
def BNNSFilterApply() -> None:
    """Apply a filter to one sample. 0, or -1 on failure."""


@applies(OneInputFilter, _USE, "apply", "filter batch_size in_+ out+", rename=FORWARD_NAMES)
def BNNSFilterApplyBatch() -> None:
    """Apply a filter to samples that start `in_stride` and `out_stride` elements apart. 0, or -1 on failure."""


@applies(
    OneInputFilter,
    _USE_BACKWARD,
    "apply_backward",
    "filter batch_size in_+ in_delta+ out+ out_delta+ weights_delta bias_delta",
    rename=BACKWARD_NAMES,
)
def BNNSFilterApplyBackwardBatch() -> None:
    """Compute the gradients of a filter: of its input, its weights (or a trainable alpha) and its bias.

    The slope of an activation is computed from `out` if that determines it, else from `in_`. Arguments that are not
    needed may be None. Returns 0, or -1 on failure.
    """


_applies_two = functools.partial(applies, TwoInputFilter, _USE_TWO)


@_applies_two("apply", "filter (1) inA (0) inB (0) out (0)")
def BNNSFilterApplyTwoInput() -> None:
    """Apply a filter with two inputs to one sample of each. 0, or -1 on failure."""


@_applies_two("apply", "filter batch_size inA+ inB+ out+")
def BNNSFilterApplyTwoInputBatch() -> None:
    """Apply a filter with two inputs to samples whose starts are the given strides apart. 0, or -1 on failure."""


@_applies_two(
    "apply_backward", "filter batch_size inA+ inA_delta+ inB+ inB_delta+ out+ out_delta+ weights_delta bias_delta"
)
def BNNSFilterApplyBackwardTwoInputBatch() -> None:
    """Compute the gradients of both inputs. Arguments that are not needed may be None. 0, or -1 on failure."""
