"""Named problems, shared by the tests, ``verify`` and ``bench``.

Imports only NumPy. (bfloat16 data also imports ml_dtypes, which adds that dtype to NumPy.)
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
