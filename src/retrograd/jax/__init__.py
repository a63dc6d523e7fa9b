"""Normalization, LSTM, linear layers and recurrences for JAX: functions that work under ``jit``, ``grad`` and ``vmap``.

XLA calls the engine directly, through its foreign function interface. Shapes and dtypes are checked while tracing. The
results have the same bits as those of retrograd's array functions. ``docs/jax.md`` describes them.
"""

from . import _ffi as _ffi  # first: it says what is missing
from .linear import linear
from .lstm import LstmOutput, lstm
from .normalization import BatchNormOutput, batch_norm, group_norm, instance_norm, layer_norm
from .scan import ScanOutput, scan

__all__ = [
    "BatchNormOutput",
    "LstmOutput",
    "ScanOutput",
    "batch_norm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "lstm",
    "scan",
]
