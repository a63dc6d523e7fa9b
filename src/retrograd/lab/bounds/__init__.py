"""Tolerances, with their derivations.

Imports only NumPy: a tolerance that shared code with the engine or the oracle would share its bugs.

Tolerances are absolute, one per element, computed from the oracle's intermediate results. They count roundings: u is
the largest relative error of one operation, so the error of a chain of k operations is at most k u of the largest
intermediate result, and over many elements the maximum is a little more than half of that.
"""

from .lstm import LstmBound, lstm_bound
from .norm import NORM_ROUNDINGS, BackwardBound, ForwardBound, backward_bound, forward_bound, input_slope_error
from .precision import error_in_tolerances

__all__ = [
    "NORM_ROUNDINGS",
    "BackwardBound",
    "ForwardBound",
    "LstmBound",
    "backward_bound",
    "error_in_tolerances",
    "forward_bound",
    "input_slope_error",
    "lstm_bound",
]
