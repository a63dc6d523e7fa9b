"""Tolerances, with their derivations.

Imports only NumPy: a tolerance that shared code with the engine or the oracle would share its bugs.

Tolerances are absolute, one per element, computed from the oracle's intermediate results. They count roundings: u is
the largest relative error of one operation, so the error of a chain of k operations is at most k u of the largest
intermediate result, and over many elements the maximum is a little more than half of that.
"""

from .graph import *
from .norm import *
from .precision import *
from .recurrent import *
from .scan import *
