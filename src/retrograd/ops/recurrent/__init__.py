"""Recurrent layers, LSTM, GRU and RNN: forward with a training cache, and backward.

The result of a forward pass has a ``cache``, which is passed to backward together with ``dy``. The cache refers to
``x``, the states and the weights rather than copying them: do not modify them until backward has run. Nothing is
written if an argument is invalid. ``docs/recurrent.md`` has the formulas.
"""

from .backward import LstmGradients, RecurrentGradients, gru_backward, lstm_backward, rnn_backward
from .cache import GruCache, GruGates, LstmCache, LstmGates, RnnCache, RnnGates
from .forward import (
    GruResult,
    LstmResult,
    RnnResult,
    gru_cache,
    gru_cache_size,
    gru_forward,
    lstm_cache,
    lstm_cache_size,
    lstm_forward,
    rnn_cache,
    rnn_cache_size,
    rnn_forward,
)
from .step import (
    GruStep,
    LstmStep,
    RnnStep,
    gru_step,
    gru_step_backward,
    lstm_step,
    lstm_step_backward,
    rnn_step,
    rnn_step_backward,
)
from .types import GruActivations, GruWeights, LstmActivations, LstmWeights, RnnWeights

__all__ = [
    "GruActivations",
    "GruCache",
    "GruGates",
    "GruResult",
    "GruStep",
    "GruWeights",
    "LstmActivations",
    "LstmCache",
    "LstmGates",
    "LstmGradients",
    "LstmResult",
    "LstmStep",
    "LstmWeights",
    "RecurrentGradients",
    "RnnCache",
    "RnnGates",
    "RnnResult",
    "RnnStep",
    "RnnWeights",
    "gru_backward",
    "gru_cache",
    "gru_cache_size",
    "gru_forward",
    "gru_step",
    "gru_step_backward",
    "lstm_backward",
    "lstm_cache",
    "lstm_cache_size",
    "lstm_forward",
    "lstm_step",
    "lstm_step_backward",
    "rnn_backward",
    "rnn_cache",
    "rnn_cache_size",
    "rnn_forward",
    "rnn_step",
    "rnn_step_backward",
]
