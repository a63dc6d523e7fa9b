"""Named problems: what tests, ``verify`` and ``bench`` have in common.

Imports NumPy only. (Asking for bfloat16 data imports ml_dtypes, which gives NumPy that type.)
"""

from .lstm import LSTM_BENCH_CASES, LSTM_STANDARD, LSTM_VERIFY_CASES, LstmCase, LstmData, LstmParameters, make_lstm_data
from .norm import (
    ACTIVATION_PARAMETERS,
    FUSED_ACTIVATIONS,
    NORM_BENCH_CASES,
    NORM_VERIFY_CASES,
    NormCase,
    NormData,
    make_norm_data,
    storage_dtype,
)

__all__ = [
    "ACTIVATION_PARAMETERS",
    "FUSED_ACTIVATIONS",
    "LSTM_BENCH_CASES",
    "LSTM_STANDARD",
    "LSTM_VERIFY_CASES",
    "NORM_BENCH_CASES",
    "NORM_VERIFY_CASES",
    "LstmCase",
    "LstmData",
    "LstmParameters",
    "NormCase",
    "NormData",
    "make_lstm_data",
    "make_norm_data",
    "storage_dtype",
]
