"""A small library for training on the CPU: layers, losses, optimizers and checkpoints over retrograd's functions.

There is no autograd: a layer's ``forward`` keeps what its ``backward`` needs, and the model calls both. See
``docs/nn.md``.
"""

from .checkpoint import load, read_metadata, save
from .convolution import Conv, ConvTranspose
from .layers import Activation, Dropout, Embedding, Linear
from .losses import Hinge, Huber, Loss, MeanAbsoluteError, MeanSquaredError, SigmoidCrossEntropy, SoftmaxCrossEntropy
from .lstm import LSTM, LstmState
from .module import KeyDifferences, Module, Sequential
from .norms import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from .optim import SGD, Adam, AdamW, Optimizer, RMSProp
from .pooling import AveragePool, Flatten, MaxPool
from .pytorch import from_torch, to_torch
from .schedules import Constant, Cosine, StepDecay

__all__ = [
    "LSTM",
    "SGD",
    "Activation",
    "Adam",
    "AdamW",
    "AveragePool",
    "BatchNorm",
    "Constant",
    "Conv",
    "ConvTranspose",
    "Cosine",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "Hinge",
    "Huber",
    "InstanceNorm",
    "KeyDifferences",
    "LayerNorm",
    "Linear",
    "Loss",
    "LstmState",
    "MaxPool",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Module",
    "Optimizer",
    "RMSProp",
    "Sequential",
    "SigmoidCrossEntropy",
    "SoftmaxCrossEntropy",
    "StepDecay",
    "from_torch",
    "load",
    "read_metadata",
    "save",
    "to_torch",
]
