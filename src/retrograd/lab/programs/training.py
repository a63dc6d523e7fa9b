"""Training steps: of a model with its optimizer, and of Lightning modules that a program's own `fit` has trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from .declared import Step

__all__ = ["FIT_STEPS", "lightning_step", "optimized", "trainer_options"]

FIT_STEPS: Final = 2  # of a program's `fit`, before its steps are compared


def optimized(optimizer: Any, loss: Callable[[], Any]) -> Step:
    """Forward, backward and update."""

    def step() -> Any:
        found = loss()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        return found.detach()

    return step


def trainer_options(seen: Any) -> dict[str, Any]:
    """Arguments of Lightning's trainer for a short `fit` on one CPU, which prints nothing."""
    return {
        "accelerator": "cpu",
        "max_steps": FIT_STEPS,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [seen],
    }


def lightning_step(callback: Any, fit: Callable[[Any], object]) -> Step:
    """The training step of the module that `fit` trains, with its optimizer and a batch of its data.

    `callback` is the class of that name of the Lightning that the program uses. `fit` gets an object of it, and must
    pass it to the trainer.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Seen(callback):  # type: ignore[misc]
        batch: Any = None

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if self.batch is None:
                self.module, self.optimizer, self.batch = module, trainer.optimizers[0], batch

    seen = Seen()
    fit(seen)
    module = seen.module.train()
    # After `fit` there is nothing that could collect what a step logs.
    module.log = module.log_dict = lambda *arguments, **options: None

    def loss() -> Any:
        found = module.training_step(seen.batch, 0)
        return found["loss"] if isinstance(found, dict) else found

    return optimized(seen.optimizer, loss)
