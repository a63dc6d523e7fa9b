"""Weights of layers between PyTorch, Keras, ONNX, Core ML, BNNS and ``retrograd.nn``. See ``docs/convert.md``."""

from .files import FORMATS, Converted, convert, read, write
from .layers import Cell, Conv, ConvertError, Embedding, Gru, Layer, Layers, Linear, Lstm, Norm, Recurrent, Rnn

__all__ = [
    "FORMATS",
    "Cell",
    "Conv",
    "ConvertError",
    "Converted",
    "Embedding",
    "Gru",
    "Layer",
    "Layers",
    "Linear",
    "Lstm",
    "Norm",
    "Recurrent",
    "Rnn",
    "convert",
    "read",
    "write",
]
