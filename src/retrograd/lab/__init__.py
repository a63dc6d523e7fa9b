"""Verification and benchmarks: the float64 reference, test problems, tolerances, ``retrograd verify`` and ``bench``.

No other part of the package imports it, except the command line.
"""
