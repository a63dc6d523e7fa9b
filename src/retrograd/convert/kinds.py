"""Kinds of layers, for files that do not say them: ``--kind norm=group_norm:8``."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from .layers import Conv, ConvertError, Embedding, Gru, GruKind, Layer, Layers, Linear, Lstm, Norm, NormKind, Rnn

__all__ = ["KINDS", "Kind", "Kinds", "chosen", "decided", "listed", "parsed"]

_NORMS: Final[tuple[NormKind, ...]] = ("batch_norm", "layer_norm", "group_norm", "instance_norm")
_GROUPED: Final = ("group_norm", "conv", "conv_transpose")
_GRUS: Final[dict[str, GruKind]] = {"gru_after": "after", "gru_before": "before"}
_RNNS: Final = {"rnn_tanh": "tanh", "rnn_relu": "relu"}
KINDS: Final = ("linear", "embedding", "lstm", "gru", *_GRUS, "rnn", *_RNNS, "conv", "conv_transpose", *_NORMS)


_Option = TypeVar("_Option", bound=str)


class Kind(NamedTuple):
    name: str
    groups: int | None = None

    def __str__(self) -> str:
        return self.name if self.groups is None else f"{self.name}:{self.groups}"


Kinds = Mapping[str, Kind]  # by a layer's name, or a pattern of names


def parsed(kinds: Mapping[str, str]) -> dict[str, Kind]:
    """Kinds from words such as ``conv`` and ``group_norm:8``."""
    found = {}
    for pattern, text in kinds.items():
        name, colon, groups = text.partition(":")
        if name not in KINDS:
            raise ConvertError(f"the kind of {pattern} is {text!r}; there are {', '.join(KINDS)}")
        if colon and (name not in _GROUPED or not groups.isdecimal() or int(groups) < 1):
            raise ConvertError(
                f"the kind of {pattern} is {text!r}; a number of groups, at least 1, may follow {', '.join(_GROUPED)}"
            )
        found[pattern] = Kind(name, int(groups) if colon else None)
    return found


def chosen(kinds: Kinds, name: str) -> Kind | None:
    return next((kind for pattern, kind in kinds.items() if fnmatch.fnmatchcase(name, pattern)), None)


def decided(layers: Layers, kinds: Kinds) -> Layers:
    """The layers with the kinds that were given, or that follow from their arrays."""
    for pattern in kinds:
        if not fnmatch.filter(layers, pattern):
            given = f"--kind {pattern}={kinds[pattern]}"
            raise ConvertError(f"{given}: no layer has this name; there are {listed(layers)}")
    return {name: _decided(name, layer, chosen(kinds, name)) for name, layer in layers.items()}


def listed(layers: Layers) -> str:
    names = [repr(name) if name == "" else name for name in layers]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _decided(name: str, layer: Layer, kind: Kind | None) -> Layer:
    if isinstance(layer, Norm):
        found = next((norm for norm in _NORMS if kind is not None and norm == kind.name), layer.kind)
        _check(name, layer.kind or "norm", kind, found if layer.kind is None else layer.kind)
        several = any(array is not None and array.ndim > 1 for array in layer.arrays().values())
        if found is None and (layer.mean is not None or several):
            found = "layer_norm" if several else "batch_norm"
        if found is None and layer.beta is None:
            raise ConvertError(
                f"{name} has one vector and no bias: the scale of a norm, of an RMS norm or a PReLU's slope; "
                f"say --kind {name}=layer_norm, for example, if it is a norm's, or --skip {name}"
            )
        return dataclasses.replace(layer, kind=found, groups=(kind and kind.groups) or layer.groups)
    if isinstance(layer, Conv):
        known = layer.transposed
        if known is None and layer.b is not None and kind is None:
            # One bias for each output: outputs of a transposed one are counted by the second axis, and by the groups.
            plain, turned = (layer.b.shape[0] == layer.w.shape[axis] for axis in (0, 1))
            known = None if plain and turned else not plain
        elif known is None and kind is not None:
            known = kind.name == "conv_transpose"
        _check(name, "convolution", kind, "conv_transpose" if known else "conv")
        return dataclasses.replace(layer, transposed=known, groups=(kind and kind.groups) or layer.groups)
    if isinstance(layer, Gru):
        return dataclasses.replace(layer, kind=_option(name, "gru", kind, _GRUS, layer.kind))
    if isinstance(layer, Rnn):
        return dataclasses.replace(layer, activation=_option(name, "rnn", kind, _RNNS, layer.activation))
    names = {Lstm: "lstm", Linear: "linear", Embedding: "embedding"}
    _check(name, names[type(layer)], kind, names[type(layer)])
    return layer


def _option(name: str, plain: str, kind: Kind | None, options: Mapping[str, _Option], known: _Option | None) -> Any:
    """The option of a recurrent layer that a kind such as gru_after names, if its file does not say it."""
    if kind is None or kind.name == plain:
        return known
    given = options.get(kind.name)
    found = next((word for word, option in options.items() if option == known), plain)
    _check(name, found, kind, found if given is None or known not in (None, given) else kind.name)
    return given


def _check(name: str, found: str, kind: Kind | None, allowed: str | None) -> None:
    if kind is not None and kind.name != allowed:
        raise ConvertError(f"--kind {name}={kind}: its arrays are those of another kind of layer, {found}")
