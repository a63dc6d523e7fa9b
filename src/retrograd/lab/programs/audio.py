"""Jobs of audio programs."""

from __future__ import annotations

from typing import Any

from .declared import Step
from .training import lightning_step, optimized, stub, trainer_options

__all__ = ["nam_lstm", "openunmix"]


def nam_lstm() -> Step:
    """A guitar amplifier: an LSTM of 24 units, a subclass of PyTorch's, with truncated backpropagation."""
    import torch
    from nam.train.lightning_module import LightningModule
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import Callback

    dry = torch.randn(32, 2048)
    data = torch.utils.data.TensorDataset(dry, torch.tanh(3 * dry))
    config = {
        "net": {
            "name": "LSTM",
            "config": {"num_layers": 1, "hidden_size": 24, "train_burn_in": 512, "train_truncate": 512},
        },
        "optimizer": {"lr": 0.01},
        "lr_scheduler": {"class": "ExponentialLR", "kwargs": {"gamma": 0.995}},
    }

    def fit(seen: Any) -> None:
        module = LightningModule.init_from_config(config)
        Trainer(**trainer_options(seen)).fit(module, torch.utils.data.DataLoader(data, batch_size=16))

    return lightning_step(Callback, fit)


def openunmix() -> Step:
    """Separation of a song's spectrogram: three bidirectional LSTM layers of 128 units, without dropout."""
    import torch

    stub("torchaudio")
    from openunmix.model import OpenUnmix

    model = OpenUnmix(nb_bins=513, nb_channels=2, hidden_size=256, max_bin=256).train()
    model.lstm.dropout = 0.0
    mix = torch.rand(8, 2, 513, 80)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return optimized(optimizer, lambda: torch.nn.functional.mse_loss(model(mix), 0.3 * mix))
