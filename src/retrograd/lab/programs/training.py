"""Training steps: of a model with its optimizer, and of Lightning modules that a program's own `fit` has trained."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from typing import Any, Final

from .declared import Step

__all__ = ["FIT_STEPS", "lightning_step", "optimized", "stub", "trainer_options"]

FIT_STEPS: Final = 2  # of a program's `fit`, before its steps are compared


def stub(name: str) -> None:
    """Put an empty module, and its parents, in the place of one that a program imports and the job does not use.

    PyPI's torchvision and torchaudio are for CUDA, and cannot be imported beside PyTorch for CPUs.
    """

    class Empty(types.ModuleType):
        def __init__(self, path: str) -> None:
            super().__init__(path)
            self.__path__ = []  # a package

        def __getattr__(self, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return type(attribute, (), {})

    parent: types.ModuleType | None = None
    path = ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        module = sys.modules.setdefault(path, Empty(path))
        if parent is not None:
            setattr(parent, part, module)
        parent = module


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

    found: dict[str, Any] = {}  # not an attribute of the callback: some libraries copy it

    class Seen(callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if not found:
                found.update(module=module, trainer=trainer, optimizer=trainer.optimizers[0], batch=batch)

    fit(Seen())
    module, batch = found["module"].train(), found["batch"]
    module.trainer = found["trainer"]  # some libraries take it away
    module.trainer.training = True
    # After `fit` there is nothing that could collect what a step logs.
    module.log = module.log_dict = lambda *arguments, **options: None

    def loss() -> Any:
        result = module.training_step(batch, 0)
        return result["loss"] if isinstance(result, dict) else result

    return optimized(found["optimizer"], loss)
