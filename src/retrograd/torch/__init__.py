"""PyTorch's recurrent and normalization layers, and linear recurrences, on retrograd's engine, for CPU tensors."""

from importlib.util import find_spec as _find_spec

if _find_spec("torch") is None:
    raise ImportError("retrograd.torch needs PyTorch: pip install 'retrograd[torch]'")

from . import functional
from ._choice import use_torch_below
from ._threads import get_thread_pool, set_thread_pool, share_threads
from .norms import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
)
from .patching import Patch, lightning_callback, patch
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .replacing import Replacements, replace, restore
from .scan import scan
from .sync import SyncBatchNorm

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LSTMCell",
    "LayerNorm",
    "Patch",
    "RNNCell",
    "Replacements",
    "SyncBatchNorm",
    "functional",
    "get_thread_pool",
    "lightning_callback",
    "patch",
    "replace",
    "restore",
    "scan",
    "set_thread_pool",
    "use_torch_below",
]

share_threads()
