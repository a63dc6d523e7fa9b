"""The oracle: normalization, LSTM, linear layers, losses, their gradients and optimizer steps, slow NumPy on purpose.

Nothing here is shared with the engine, so the two cannot share a mistake. Arithmetic is float64 for float32, float16
and bfloat16 data and `numpy.longdouble` for float64 data, so that the oracle is the more precise of the two. (Where the
platform's long double is a float64, as on Windows and Apple silicon, float64 data gets no extra digits.)
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
