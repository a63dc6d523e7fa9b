"""Normalization, recurrent and linear layers, and linear recurrences for JAX, under ``jit``, ``grad`` and ``vmap``.

XLA calls the engine directly, through its foreign function interface. Shapes and dtypes are checked while tracing. The
results have the same bits as those of retrograd's array functions. ``docs/jax.md`` describes them.
"""

from . import _ffi as _ffi  # first: it says what is missing
from .linear import linear
from .normalization import BatchNormOutput, batch_norm, group_norm, instance_norm, layer_norm
from .recurrent import GruOutput, LstmOutput, RnnOutput, gru, lstm, rnn
from .scan import ScanOutput, scan

__all__ = [
    "BatchNormOutput",
    "GruOutput",
    "LstmOutput",
    "RnnOutput",
    "ScanOutput",
    "batch_norm",
    "group_norm",
    "gru",
    "instance_norm",
    "layer_norm",
    "linear",
    "lstm",
    "rnn",
    "scan",
]
