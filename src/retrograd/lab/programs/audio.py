"""Jobs of audio programs."""

from __future__ import annotations

from typing import Any

from .declared import Step
from .training import lightning_step, trainer_options

__all__ = ["nam_lstm"]


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
