"""Tolerances with reasons.

Imports NumPy only: a tolerance that shares code with the engine or the oracle shares its bugs.

Tolerances are absolute, one per element, made of what the oracle computed on the way. They count roundings: u is the
most that one operation can be off by, relative to its result, so a chain of k operations is off by k units of the
largest intermediate result at the most, and by a good half of that in the worst of many elements.
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
