"""Layers, losses and optimizers for training on the CPU: write ``forward``, the rest follows.

::

    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.Adam(model, 1e-3))
    for x, labels in batches:
        loss = step(x, labels)

See ``docs/nn.md``.
"""

from typing import TYPE_CHECKING, Any

from ..graph import Constant, Cosine, StepDecay, Tensor
from . import hints, images, layers, losses, norms, optim, recurrent
from .checkpoint import load, read_metadata, save
from .fit import Epoch, fit
from .images import *
from .layers import *
from .losses import *
from .module import Buffer, KeyDifferences, Module, Parameter, Residual, Sequential
from .norms import *
from .optim import *
from .pytorch import from_torch, to_torch
from .recurrent import *
from .step import Step, compile

__all__ = ["Buffer", "Constant", "Cosine", "Epoch", "KeyDifferences", "Module", "Parameter", "Residual", "Sequential"]
__all__ += ["Step", "StepDecay", "Tensor", "compile", "fit", "from_torch", "load", "read_metadata", "save", "to_torch"]
__all__ += images.__all__ + layers.__all__ + losses.__all__ + norms.__all__ + optim.__all__ + recurrent.__all__

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(hints.message(__name__, text, name))
