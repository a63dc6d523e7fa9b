"""Core ML packages for tests, written by coremltools."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrograd import graph
from retrograd.bnns._graph_model import Model

from .arrays import Array


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """coremltools, without its messages about parts that only a Mac has."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import coremltools

            yield coremltools
    finally:
        logging.disable(level)


def save(model: Any, path: Path) -> None:
    """Save what coremltools has made, and remove its own copy, which it would keep until the interpreter ends."""
    model.save(str(path))
    shutil.rmtree(model.package_path)


def package(
    path: Path,
    build: Callable[..., Any],
    examples: Sequence[Any],
    *,
    target: str = "iOS16",
    half: bool = False,
    optimized: bool = False,
    **options: Any,
) -> Path:
    """Write the program that `build` makes with MIL's builder, for inputs like `examples`: arrays or specs."""
    with quiet() as ct:
        from coremltools.converters.mil import Builder
        from coremltools.converters.mil.mil import Function, Program, types

        kinds = {"f": types.fp32, "i": types.int32, "b": types.bool}
        specs = [
            Builder.TensorSpec(i.shape, dtype=kinds[i.dtype.kind]) if isinstance(i, np.ndarray) else i for i in examples
        ]
        version = getattr(ct.target, target)
        program = Program()
        with Function({f"x{i}": spec for i, spec in enumerate(specs)}, opset_version=version) as function:
            made = build(*function.inputs.values())
            function.set_outputs(list(made) if isinstance(made, (tuple, list)) else [made])
            program.add_function("main", function)
        model = ct.convert(
            program,
            convert_to="mlprogram",
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            minimum_deployment_target=version,
            pass_pipeline=ct.PassPipeline.DEFAULT if optimized else ct.PassPipeline.EMPTY,
            skip_model_load=True,
            **options,
        )
        save(model, path)
    return path


def run(model: Model, *inputs: Array, function: str = "main") -> list[Array]:
    """The outputs of a function for these inputs."""
    chosen = model.functions[function]
    feeds = {s: graph.spec(a.shape, a.dtype) for s, a in zip(chosen.inputs, inputs, strict=True)}
    found = model.recording.program(feeds, list(chosen.outputs))(*inputs)
    return [np.asarray(a, symbol.dtype) for a, symbol in zip(found, chosen.outputs, strict=True)]


def inferred(kind: str, arguments: Mapping[str, Any], target: str) -> list[Array] | None:
    """What coremltools computes for an operation on constants, if it does."""
    with quiet() as ct:
        from coremltools.converters.mil import Builder

        found: list[Any] = []

        def build(unused: Any) -> Any:
            made = getattr(Builder, kind)(**copy.deepcopy(dict(arguments)))  # some operations write to their operands
            found.extend(made if isinstance(made, (tuple, list)) else [made])
            return unused

        with np.errstate(all="ignore"):
            Builder.program(input_specs=[Builder.TensorSpec((1,))], opset_version=getattr(ct.target, target))(build)
    return None if any(v.val is None for v in found) else [np.asarray(v.val) for v in found]
