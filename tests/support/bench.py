"""Rows of the benchmarks that are quick to time."""

from __future__ import annotations

SMALL_ROW, SMALL_LSTM_ROW, SMALL_APPLE_ROW = "layer_norm_n64c256", "lstm_t20n1i4h16", "bnns_batch_norm_n8c16_sigmoid"
SMALL_TRAIN_ROW = "train_h64n1"
SMALL_PRODUCT_ROW = "linear_products_n700h256"
