"""The command ``retrograd convert``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._printing import in_a_line
from .files import FORMATS, convert, read
from .kinds import KINDS
from .layers import ConvertError, Layers, describe

__all__ = ["add_command"]


def add_command(commands: Any) -> None:
    """Add the command to the subparsers of ``retrograd``."""
    formats = "".join(f"\n  {name:<8} {meaning}" for name, meaning in FORMATS.items())
    parser = commands.add_parser(
        "convert",
        help="convert weights between frameworks",
        description="Convert the weights of LSTMs, GRUs, RNNs, norms, linear layers, convolutions and embeddings from "
        f"one file format to another. The name of a file determines its format:{formats}",
        epilog="A .safetensors file has the names of PyTorch or those of retrograd.nn. Which it has is detected when "
        "it is read. A new one gets those of retrograd.nn, or those of PyTorch if the source has retrograd.nn's.",
    )
    parser.add_argument("source", metavar="SOURCE", help="the file to read")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="the file to write; without it, list the layers")
    parser.add_argument("--from", dest="source_format", choices=FORMATS, metavar="FORMAT", help="the format of SOURCE")
    parser.add_argument("--to", dest="target_format", choices=FORMATS, metavar="FORMAT", help="the format of TARGET")
    parser.add_argument(
        "--kind",
        action="append",
        default=[],
        metavar="LAYER=KIND",
        help="the kind of a layer that SOURCE does not determine, such as encoder=embedding or 'norm*=group_norm:8'; "
        f"there are {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="LAYER", help="a layer, or a pattern, to leave out"
    )
    parser.add_argument(
        "--rename", action="append", default=[], metavar="OLD=NEW", help="the name of a layer in TARGET"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET if it exists")
    parser.set_defaults(run=_convert)


def _convert(options: argparse.Namespace) -> int:
    kinds = _pairs("--kind", options.kind, "LAYER=KIND")
    rename = _pairs("--rename", options.rename, "OLD=NEW")
    if options.target is None:
        if rename:
            raise ConvertError("--rename needs a TARGET")
        _show(read(options.source, options.source_format, kinds=kinds, skip=options.skip), {})
        return 0
    target = Path(options.target)
    if target.exists() and not options.overwrite:
        raise ConvertError(f"{target} exists already; --overwrite replaces it")
    if not target.parent.is_dir():
        raise ConvertError(f"{target}: the folder {target.parent} does not exist")
    written = convert(
        options.source,
        target,
        source_format=options.source_format,
        target_format=options.target_format,
        kinds=kinds,
        skip=options.skip,
        rename=rename,
    )
    _show(written.layers, written.names)
    print(in_a_line(f"written to {target}"))
    return 0


def _pairs(option: str, texts: list[str], form: str) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for text, (_, equals, value) in zip(texts, pairs, strict=True):
        if not equals or not value:
            raise ConvertError(f"{option} {text}: it must be {form}")
    return {name: value for name, _, value in pairs}


def _show(layers: Layers, names: dict[str, str]) -> None:
    shown = {name: in_a_line(name) or "(the model)" for name in layers}
    width = max(map(len, shown.values()))
    for name, layer in layers.items():
        place = f" -> {in_a_line(names[name])}" if names.get(name, name) != name else ""
        print(f"{shown[name]:<{width}}  {describe(layer)}{place}")
