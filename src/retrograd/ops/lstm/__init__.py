"""LSTM: forward with a training cache, and backward.

``lstm_forward`` returns :class:`LstmResult`, whose ``cache`` is passed to ``lstm_backward`` together with ``dy``. The
cache refers to ``x``, the states and the weights rather than copying them: do not modify them until backward has run.
Nothing is written if an argument is invalid. ``docs/lstm.md`` has the formulas.
"""

from .backward import LstmGradients, lstm_backward
from .cache import LstmCache, LstmGates
from .forward import LstmResult, lstm_cache, lstm_cache_size, lstm_forward
from .types import LstmActivations, LstmWeights

__all__ = [
    "LstmActivations",
    "LstmCache",
    "LstmGates",
    "LstmGradients",
    "LstmResult",
    "LstmWeights",
    "lstm_backward",
    "lstm_cache",
    "lstm_cache_size",
    "lstm_forward",
]
