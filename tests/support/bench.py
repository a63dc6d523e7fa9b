"""Rows of the benchmarks that are quick to time, and a stepper whose times are known."""

from __future__ import annotations

SMALL_ROW, SMALL_LSTM_ROW, SMALL_APPLE_ROW = "layer_norm_n64c256", "lstm_t20n1i4h16", "bnns_batch_norm_n8c16_sigmoid"
SMALL_TRAIN_ROW = "train_h64n1"
SMALL_PRODUCT_ROW = "linear_products_n700h256"


class FixedTimes:
    """A stepper whose passes always take the given times."""

    def __init__(self, name: str, *times: float) -> None:
        self.name, self.times = name, times

    def wake(self) -> None:
        pass

    def step(self) -> tuple[float, ...]:
        return self.times
