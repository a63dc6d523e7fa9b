"""Weights of layers between PyTorch, Keras, ONNX, Core ML, BNNS and ``retrograd.nn``. See ``docs/convert.md``."""

from .files import FORMATS, Converted, convert, read, write
from .layers import Cell, Conv, ConvertError, Embedding, Layer, Layers, Linear, Lstm, Norm

__all__ = [
    "FORMATS",
    "Cell",
    "Conv",
    "ConvertError",
    "Converted",
    "Embedding",
    "Layer",
    "Layers",
    "Linear",
    "Lstm",
    "Norm",
    "convert",
    "read",
    "write",
]
