"""Jobs of forecasting libraries. All build their models inside `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .declared import Step
from .training import FIT_STEPS, lightning_step, trainer_options

__all__ = [
    "darts_block_gru",
    "darts_lstm",
    "darts_tft",
    "gluonts_deepar",
    "neuralforecast_deepar",
    "neuralforecast_gru",
    "neuralforecast_lstm",
    "pytorch_forecasting_deepar",
    "pytorch_forecasting_gru",
    "pytorch_forecasting_tft",
]


def _series(length: int = 400, count: int = 8) -> Any:
    """Sums of a trend, a season and noise, as [count, length]."""
    time = np.arange(length)
    phases = np.random.uniform(0, 6, (count, 1))  # noqa: NPY002  seeded with the programs' own
    noise = np.random.normal(0, 0.1, (count, length))  # noqa: NPY002
    return (2 + 0.002 * time + np.sin(time * 2 * np.pi / 12 + phases) + noise).astype(np.float32)


def gluonts_deepar() -> Step:
    """Two LSTM layers of 40 units and a Student-t head: the defaults, without dropout."""
    from gluonts.dataset.common import ListDataset
    from gluonts.torch.model.deepar import DeepAREstimator
    from lightning.pytorch.callbacks import Callback

    data = ListDataset([{"start": "2020-01-01", "target": one} for one in _series()], freq="D")

    def fit(seen: Any) -> None:
        estimator = DeepAREstimator(
            freq="D",
            prediction_length=24,
            context_length=48,
            dropout_rate=0.0,
            num_batches_per_epoch=FIT_STEPS,
            trainer_kwargs=trainer_options(seen),
        )
        estimator.train(data)

    return lightning_step(Callback, fit)


def _darts(name: str, **options: Any) -> Step:
    import darts.models
    from darts import TimeSeries
    from pytorch_lightning.callbacks import Callback

    series = [TimeSeries.from_values(one[:200]) for one in _series(count=4)]

    def fit(seen: Any) -> None:
        kind = getattr(darts.models, name)
        kind(input_chunk_length=48, dropout=0.0, pl_trainer_kwargs=trainer_options(seen), **options).fit(series)

    return lightning_step(Callback, fit)


def darts_lstm() -> Step:
    """One layer of 25 units: the defaults."""
    return _darts("RNNModel", model="LSTM", training_length=60)


def darts_block_gru() -> Step:
    """Two layers of 64 units."""
    return _darts("BlockRNNModel", model="GRU", hidden_dim=64, n_rnn_layers=2, output_chunk_length=12)


def darts_tft() -> Step:
    """Two LSTM layers, attention and many layer norms, with 16 units: the defaults."""
    return _darts("TFTModel", output_chunk_length=12, add_relative_index=True)


def _neuralforecast(name: str, **options: Any) -> Step:
    import neuralforecast.models
    import pandas
    from neuralforecast import NeuralForecast
    from pytorch_lightning.callbacks import Callback

    values = _series(length=200)
    days = pandas.date_range("2020-01-01", periods=values.shape[1])
    frames = [pandas.DataFrame({"unique_id": f"s{i}", "ds": days, "y": one}) for i, one in enumerate(values)]

    def fit(seen: Any) -> None:
        model = getattr(neuralforecast.models, name)(h=12, input_size=48, **trainer_options(seen), **options)
        NeuralForecast([model], freq="D").fit(pandas.concat(frames))

    return lightning_step(Callback, fit)


def neuralforecast_lstm() -> Step:
    """Two layers of 64 units."""
    return _neuralforecast("LSTM", encoder_hidden_size=64)


def neuralforecast_gru() -> Step:
    """Two layers of 64 units."""
    return _neuralforecast("GRU", encoder_hidden_size=64)


def neuralforecast_deepar() -> Step:
    """Two LSTM layers of 128 units: the defaults, without dropout."""
    return _neuralforecast("DeepAR", lstm_dropout=0.0)


def _pytorch_forecasting(make: Callable[[Any], Any]) -> Step:
    """`make` takes the data set and gives the model."""
    import lightning.pytorch
    import pandas
    from lightning.pytorch.callbacks import Callback
    from pytorch_forecasting import TimeSeriesDataSet

    values = _series(length=120)
    rows = [
        pandas.DataFrame({"series": str(i), "time": np.arange(one.size), "value": one}) for i, one in enumerate(values)
    ]
    data = TimeSeriesDataSet(
        pandas.concat(rows, ignore_index=True),
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=48,
        max_prediction_length=12,
        time_varying_unknown_reals=["value"],
    )

    def fit(seen: Any) -> None:
        trainer = lightning.pytorch.Trainer(**trainer_options(seen))
        trainer.fit(make(data), data.to_dataloader(train=True, batch_size=64))

    return lightning_step(Callback, fit)


def pytorch_forecasting_deepar() -> Step:
    """Two LSTM layers of 32 units, without dropout. The class is a subclass of PyTorch's."""
    from pytorch_forecasting import DeepAR

    return _pytorch_forecasting(lambda data: DeepAR.from_dataset(data, hidden_size=32, rnn_layers=2, dropout=0.0))


def pytorch_forecasting_gru() -> Step:
    """The same with GRU layers."""
    from pytorch_forecasting import DeepAR

    return _pytorch_forecasting(
        lambda data: DeepAR.from_dataset(data, cell_type="GRU", hidden_size=32, rnn_layers=2, dropout=0.0)
    )


def pytorch_forecasting_tft() -> Step:
    """Two LSTMs of 32 units, attention and many layer norms, without dropout."""
    from pytorch_forecasting import TemporalFusionTransformer

    return _pytorch_forecasting(lambda data: TemporalFusionTransformer.from_dataset(data, hidden_size=32, dropout=0.0))
