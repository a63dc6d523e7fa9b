"""Rows named module_*: forward and backward of one layer of `torch.nn`, plain and after `retrograd.torch.replace`.

Rows that end in ``_eval`` are forward alone, in evaluation mode and without gradients.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, NamedTuple

from .timing import WholeSteps, agree, import_torch

__all__ = ["MODULE_CASES", "Layer", "ModuleCase", "layer_failures", "layer_slots", "make_layer"]

# Of the norm of a result, between the two libraries. PyTorch adds up the gradients of weights in bfloat16.
_TOLERANCE: Final = {"float32": 1e-3, "bfloat16": 0.1}


class ModuleCase(NamedTuple):
    name: str
    kind: str  # a class of torch.nn
    arguments: tuple[Any, ...]
    shape: tuple[int, ...]  # of the input
    options: dict[str, Any]
    layout: str = ""  # of the input: contiguous, channels "last", or "permuted" from N, C, H, W to N, H, W, C
    dtype: str = "float32"
    evaluation: bool = False


class Layer(NamedTuple):
    """A layer, its input, and the gradient of its first result."""

    case: ModuleCase
    module: Any
    x: Any
    dy: Any


def _case(prefix: str, kind: str, *arguments: Any, shape: str, suffix: str = "", **options: Any) -> ModuleCase:
    """`suffix` has the words of the row's name that say how it differs."""
    words = suffix.split("_") if suffix else []
    return ModuleCase(
        "_".join(("module", prefix, shape, *words)),
        kind,
        arguments,
        tuple(map(int, shape.split("x"))),
        options,
        next((word for word in words if word in ("last", "permuted")), ""),
        "bfloat16" if "bf16" in words else "float32",
        "eval" in words,
    )


def _norms() -> Iterator[ModuleCase]:
    layer_norms = ("8x16", "512x16", "512x64", "512x256", "512x768", "2048x256", "4096x768", "8192x1024")
    plain_and = [(shape, "") for shape in layer_norms]
    for shape, suffix in (
        *plain_and,
        ("512x16", "eval"),
        ("512x256", "eval"),
        ("4096x768", "eval"),
        ("512x768", "bf16"),
        ("4096x768", "bf16"),
    ):
        yield _case("layer_norm", "LayerNorm", int(shape.split("x")[-1]), shape=shape, suffix=suffix)
    for shape, suffix in itertools.product(("4x96x56x56", "8x192x28x28", "4x384x14x14"), ("permuted", "permuted_eval")):
        yield _case("layer_norm", "LayerNorm", int(shape.split("x")[1]), shape=shape, suffix=suffix)
    for shape, groups, suffix in (
        ("4x16x10", 4, ""),
        ("4x128x600", 1, ""),
        ("4x128x600", 8, ""),
        ("4x128x20x30", 4, ""),
        ("8x64x32x32", 8, ""),
        ("8x64x32x32", 8, "eval"),
        ("8x64x32x32", 8, "last"),
        ("8x64x32x32", 8, "bf16"),
        ("32x64x56x56", 32, ""),
        ("32x64x56x56", 32, "eval"),
        ("2x32x8x32x32", 8, ""),
    ):
        channels = int(shape.split("x")[1])
        yield _case(f"group_norm_{groups}", "GroupNorm", groups, channels, shape=shape, suffix=suffix)
    for kind, shape, suffix in (
        ("BatchNorm1d", "32x16", ""),
        ("BatchNorm1d", "64x512", ""),
        ("BatchNorm1d", "4096x512", ""),
        ("BatchNorm1d", "32x64x100", ""),
        ("BatchNorm2d", "16x512x1x1", ""),
        ("BatchNorm2d", "8x64x16x16", ""),
        ("BatchNorm2d", "8x64x16x16", "last"),
        ("BatchNorm2d", "32x64x28x28", ""),
        ("BatchNorm2d", "32x64x28x28", "eval"),
        ("BatchNorm2d", "32x64x28x28", "last"),
        ("BatchNorm2d", "32x64x28x28", "last_eval"),
        ("BatchNorm2d", "32x64x28x28", "bf16"),
        ("BatchNorm2d", "32x64x56x56", ""),
        ("BatchNorm3d", "2x32x8x32x32", ""),
        ("InstanceNorm1d", "4x8x10", ""),
        ("InstanceNorm1d", "8x64x256", ""),
        ("InstanceNorm2d", "1x4x8x8", ""),
        ("InstanceNorm2d", "8x64x32x32", ""),
        ("InstanceNorm2d", "8x64x32x32", "eval"),
        ("InstanceNorm2d", "8x64x32x32", "last"),
        ("InstanceNorm2d", "8x64x32x32", "bf16"),
        ("InstanceNorm3d", "2x32x8x32x32", ""),
    ):
        row = f"{'batch' if kind.startswith('Batch') else 'instance'}_norm"
        yield _case(row, kind, int(shape.split("x")[1]), shape=shape, suffix=suffix)


def _recurrent() -> Iterator[ModuleCase]:
    for kind, sizes in itertools.product(
        ("LSTM", "GRU", "RNN"), ("1x1x16x16", "20x1x4x16", "20x32x32x64", "50x32x64x128", "20x64x512x512")
    ):
        shape, _, units = sizes.rpartition("x")
        for suffix in ("", "eval"):
            features = int(shape.split("x")[-1])
            yield _case(f"{kind.lower()}_h{units}", kind, features, int(units), shape=shape, suffix=suffix)
    yield _case("lstm_h128", "LSTM", 128, 128, shape="100x32x128")
    yield _case("lstm_2_layers_h64", "LSTM", 64, 64, 2, shape="40x32x64", bidirectional=True, batch_first=True)
    yield _case("lstm_h256_p64", "LSTM", 64, 256, shape="50x32x64", proj_size=64)
    for kind, (shape, suffix) in itertools.product(
        ("LSTM", "GRU", "RNN"), (("1x16", ""), ("1x16", "eval"), ("32x128", ""), ("256x512", ""))
    ):
        size = int(shape.split("x")[1])
        yield _case(f"{kind.lower()}_cell_h{size}", f"{kind}Cell", size, size, shape=shape, suffix=suffix)


MODULE_CASES: Final = (*_norms(), *_recurrent())


def make_layer(torch: Any, case: ModuleCase) -> Layer:
    dtype = getattr(torch, case.dtype)
    module = getattr(torch.nn, case.kind)(*case.arguments, **case.options).to(dtype)
    x = torch.randn(case.shape).to(dtype)
    if case.layout == "last":
        x = x.to(memory_format=torch.channels_last)
    x.requires_grad_(not case.evaluation)
    module.train(not case.evaluation)
    y = _first(module(_seen(case, x)))
    return Layer(case, module, x, torch.randn_like(y))


def _seen(case: ModuleCase, x: Any) -> Any:
    """The input of the layer."""
    return x.permute(0, 2, 3, 1) if case.layout == "permuted" else x


def _first(result: Any) -> Any:
    return result[0] if type(result) is tuple else result


def _run(torch: Any, layer: Layer, module: Any) -> list[Any]:
    """The result, and the gradients of the input and the parameters."""
    case, _, x, dy = layer
    if case.evaluation:
        with torch.no_grad():
            return [_first(module(_seen(case, x)))]
    y = _first(module(_seen(case, x)))
    y.backward(dy)
    found = [y.detach()]
    for tensor in (x, *module.parameters()):
        found.append(tensor.grad)
        tensor.grad = None
    return found


def _modules(layer: Layer) -> dict[str, Any]:
    ours, theirs = copy.deepcopy(layer.module), copy.deepcopy(layer.module)
    importlib.import_module("retrograd.torch").replace(ours, verbose=False)
    return {"retrograd": ours, "torch": theirs}


def layer_failures(layer: Layer) -> Iterator[str]:
    """Yield a message if the results differ from PyTorch's."""
    torch = import_torch()
    ours, theirs = (
        [tensor.double().numpy() for tensor in _run(torch, layer, module)] for module in _modules(layer).values()
    )
    if not agree(ours, theirs, _TOLERANCE[layer.case.dtype]):
        yield "the results differ from PyTorch's"


def layer_slots(torch: Any, layer: Layer, threads: int) -> list[list[Any]]:
    return [
        [WholeSteps(name, partial(_run, torch, layer, module), threads)] for name, module in _modules(layer).items()
    ]
