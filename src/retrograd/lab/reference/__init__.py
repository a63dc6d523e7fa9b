"""The oracle: a plain, slow NumPy reference of normalization, LSTM, linear layers, losses and optimizer steps.

It shares no code with the engine, so the two cannot share a bug. It computes in float64 for float32, float16 and
bfloat16 data, and in `numpy.longdouble` for float64 data, so that it is more precise than the engine. (Where long
double is the same as float64, as on Windows and Apple silicon, it is no more precise for float64 data.)
"""

from .activation import (
    ACTIVATIONS,
    activation_input_slope,
    activation_slope,
    activation_value,
    apply_input_slope,
    apply_slope,
)
from .dense import (
    dropout_mask,
    embedding_backward,
    huber,
    linear_backward,
    linear_forward,
    mean_squared_error,
    philox4x32,
    philox_mask,
    softmax_cross_entropy,
)
from .lstm import (
    LSTM_ACTIVATIONS,
    LstmBackward,
    LstmCell,
    LstmForward,
    active_from_batch_sizes,
    active_from_lengths,
    lstm_backward,
    lstm_forward,
)
from .norm import Kind, NormBackward, NormForward, norm_backward, norm_forward, running_update
from .optimizer import adam_step, clipped_gradients, rmsprop_step, sgd_step

__all__ = [
    "ACTIVATIONS",
    "LSTM_ACTIVATIONS",
    "Kind",
    "LstmBackward",
    "LstmCell",
    "LstmForward",
    "NormBackward",
    "NormForward",
    "activation_input_slope",
    "activation_slope",
    "activation_value",
    "active_from_batch_sizes",
    "active_from_lengths",
    "adam_step",
    "apply_input_slope",
    "apply_slope",
    "clipped_gradients",
    "dropout_mask",
    "embedding_backward",
    "huber",
    "linear_backward",
    "linear_forward",
    "lstm_backward",
    "lstm_forward",
    "mean_squared_error",
    "norm_backward",
    "norm_forward",
    "philox4x32",
    "philox_mask",
    "rmsprop_step",
    "running_update",
    "sgd_step",
    "softmax_cross_entropy",
]
