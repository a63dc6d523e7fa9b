"""Apple's BNNS and MPS training kernels on any CPU, and fast LSTM and normalization training, from Python."""

from __future__ import annotations

import os as _os
from importlib import metadata as _metadata

from . import _starting as _starting  # before what takes time

# isort: split
from . import _core
from .ops._memory import release_memory
from .ops._threads import get_num_threads, set_num_threads
from .ops._threads import start_num_threads as _start_num_threads
from .ops.activation import Activation
from .ops.convolution import (
    ConvGradients,
    conv_backward,
    conv_forward,
    conv_transpose_backward,
    conv_transpose_forward,
)
from .ops.elementwise import activation_backward, activation_forward, dropout
from .ops.linear import LinearGradients, embedding_backward, embedding_forward, linear_backward, linear_forward
from .ops.loss import (
    categorical_cross_entropy,
    cosine_distance,
    hinge,
    huber,
    log_loss,
    mean_absolute_error,
    mean_squared_error,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
)
from .ops.normalization import (
    GradientSums,
    NormCache,
    NormGradients,
    NormStatistics,
    RunningUpdate,
    batch_norm_backward,
    batch_norm_cache,
    batch_norm_forward,
    batch_norm_gradient_sums,
    batch_norm_statistics,
    combine_statistics,
    group_norm_backward,
    group_norm_forward,
    instance_norm_backward,
    instance_norm_forward,
    layer_norm_backward,
    layer_norm_forward,
)
from .ops.optimizer import adam_step, global_norm, rmsprop_step, sgd_step
from .ops.pooling import (
    MaxPoolResult,
    average_pool_backward,
    average_pool_forward,
    l2_pool_backward,
    l2_pool_forward,
    max_pool_backward,
    max_pool_forward,
    max_unpool_backward,
    max_unpool_forward,
)
from .ops.recurrent import (
    GruActivations,
    GruCache,
    GruGates,
    GruResult,
    GruStep,
    GruWeights,
    LstmActivations,
    LstmCache,
    LstmGates,
    LstmGradients,
    LstmResult,
    LstmStep,
    LstmWeights,
    RecurrentGradients,
    RnnCache,
    RnnGates,
    RnnResult,
    RnnStep,
    RnnWeights,
    gru_backward,
    gru_cache,
    gru_cache_size,
    gru_forward,
    gru_step,
    gru_step_backward,
    lstm_backward,
    lstm_cache,
    lstm_cache_size,
    lstm_forward,
    lstm_step,
    lstm_step_backward,
    rnn_backward,
    rnn_cache,
    rnn_cache_size,
    rnn_forward,
    rnn_step,
    rnn_step_backward,
)
from .ops.scan import ScanCache, ScanGradients, ScanResult, scan_backward, scan_forward

__all__ = [
    "Activation",
    "ConvGradients",
    "GradientSums",
    "GruActivations",
    "GruCache",
    "GruGates",
    "GruResult",
    "GruStep",
    "GruWeights",
    "LinearGradients",
    "LstmActivations",
    "LstmCache",
    "LstmGates",
    "LstmGradients",
    "LstmResult",
    "LstmStep",
    "LstmWeights",
    "MaxPoolResult",
    "NormCache",
    "NormGradients",
    "NormStatistics",
    "RecurrentGradients",
    "RnnCache",
    "RnnGates",
    "RnnResult",
    "RnnStep",
    "RnnWeights",
    "RunningUpdate",
    "ScanCache",
    "ScanGradients",
    "ScanResult",
    "activation_backward",
    "activation_forward",
    "adam_step",
    "average_pool_backward",
    "average_pool_forward",
    "batch_norm_backward",
    "batch_norm_cache",
    "batch_norm_forward",
    "batch_norm_gradient_sums",
    "batch_norm_statistics",
    "categorical_cross_entropy",
    "combine_statistics",
    "conv_backward",
    "conv_forward",
    "conv_transpose_backward",
    "conv_transpose_forward",
    "cosine_distance",
    "dropout",
    "embedding_backward",
    "embedding_forward",
    "get_num_threads",
    "global_norm",
    "group_norm_backward",
    "group_norm_forward",
    "gru_backward",
    "gru_cache",
    "gru_cache_size",
    "gru_forward",
    "gru_step",
    "gru_step_backward",
    "hinge",
    "huber",
    "instance_norm_backward",
    "instance_norm_forward",
    "l2_pool_backward",
    "l2_pool_forward",
    "layer_norm_backward",
    "layer_norm_forward",
    "linear_backward",
    "linear_forward",
    "log_loss",
    "lstm_backward",
    "lstm_cache",
    "lstm_cache_size",
    "lstm_forward",
    "lstm_step",
    "lstm_step_backward",
    "max_pool_backward",
    "max_pool_forward",
    "max_unpool_backward",
    "max_unpool_forward",
    "mean_absolute_error",
    "mean_squared_error",
    "release_memory",
    "rmsprop_step",
    "rnn_backward",
    "rnn_cache",
    "rnn_cache_size",
    "rnn_forward",
    "rnn_step",
    "rnn_step_backward",
    "scan_backward",
    "scan_forward",
    "set_num_threads",
    "sgd_step",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
]

__version__ = _metadata.version("retrograd")


def _choose_isa() -> None:
    """Select the instruction-set level of RETROGRAD_ISA. An unsupported value is an error."""
    name = _os.environ.get("RETROGRAD_ISA", "").strip()
    if name and not _core.select_isa(name):
        levels = ", ".join(_core.isa_levels())
        raise ImportError(f"RETROGRAD_ISA={name!r}: this machine can run {levels}")


_choose_isa()
_start_num_threads()
