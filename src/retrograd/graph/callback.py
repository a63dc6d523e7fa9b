"""Calls of Python functions from inside a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from .. import _core
from ..ops._types import Array
from .operation import Operation, Spec
from .tensor import DTYPES, Node, Operand, Tensor, as_array, as_tensor, compute, current_graph, fail


class _Call:
    """A function with its arrays."""

    __slots__ = ("function", "inputs", "results", "several")

    def __init__(
        self, function: Callable[..., Any], inputs: Sequence[Array], results: Sequence[Array], several: bool
    ) -> None:
        self.function, self.results, self.several = function, results, several
        self.inputs = [array.view() for array in inputs]
        for view in self.inputs:
            view.flags.writeable = False

    def __call__(self) -> None:
        """Call the function, check what it returns, and copy that to the results."""
        returned = self.function(*[array.view() for array in self.inputs])
        results = self.results
        name = getattr(self.function, "__qualname__", None) or type(self.function).__name__
        if not self.several:
            returned = (returned,)
        elif not isinstance(returned, (tuple, list)):
            kind = type(returned).__name__
            raise TypeError(f"call: {name} returned {kind}, expected a tuple of {len(results)} arrays")
        if len(returned) != len(results):
            raise ValueError(f"call: {name} returned {len(returned)} arrays, expected {len(results)}")
        arrays = [np.asarray(value) for value in returned]
        for i, (array, result) in enumerate(zip(arrays, results, strict=True)):
            if array.shape != result.shape:
                raise ValueError(f"call: result {i} of {name} has shape {array.shape}, expected {result.shape}")
            if array.dtype != result.dtype:
                raise TypeError(f"call: result {i} of {name} has dtype {array.dtype}, expected {result.dtype}")
        for array, result in zip(arrays, results, strict=True):
            result[...] = array


def _compute(
    inputs: Sequence[Array],
    results: Sequence[Array],
    *,
    function: Callable[..., Any],
    specs: tuple[Spec, ...],
    several: bool,
) -> None:
    run = _Call(function, inputs, results, several)
    if not _core.record_call(run):
        run()


CALL: Final = Operation(
    "call", lambda *inputs, function, specs, several: [Spec(*spec) for spec in specs], compute=_compute,
    why_not="Python computes it; graph.custom_gradient gives it a gradient",
)  # fmt: skip


def call(function: Callable[..., Any], results: Spec | Sequence[Spec], *inputs: Operand) -> Any:
    """What a Python function returns, called each time the program runs.

    ``function(*arrays)`` gets the inputs as NumPy arrays: read-only views of the program's memory, valid during the
    call, so copy what is kept or given to other threads. It returns an array like `results`, a :func:`spec`, or for
    a sequence of specs a tuple of arrays; another shape or dtype is an error.

    The function runs once in every run of the program, also if its inputs are constants or another call is the same,
    in the order in which the calls were traced; in a block of :func:`recompute` once more for the backward pass. It
    does not run at all if no result, variable or gradient of the program depends on what it returns. With arrays,
    outside a trace, it runs at once.

    Other threads can run Python and other programs meanwhile, and the function may wait for them; it may not run its
    own program. Its exceptions end the run before any variable is written, and are raised by the call of the program.
    There is no gradient: see :func:`custom_gradient`.
    """
    several = not isinstance(results, Spec)
    given: Sequence[Any] = tuple(results) if several else (results,)
    if not callable(function):
        raise fail("call", f"function is {type(function).__name__}, which cannot be called", TypeError)
    if not given:
        raise fail("call", "results is empty; a call that nothing depends on would never run")
    for i, spec in enumerate(given):
        if not isinstance(spec, Spec):
            raise fail("call", f"results[{i}] is {type(spec).__name__}, must be a Spec, made by graph.spec", TypeError)
        if spec.dtype not in DTYPES:
            known = ", ".join(dtype.name for dtype in DTYPES)
            raise fail("call", f"results[{i}] has dtype {spec.dtype}, must be one of {known}", TypeError)
    specs = tuple(Spec(tuple(s.shape), np.dtype(s.dtype)) for s in given)
    attributes = {"function": function, "specs": specs, "several": several}
    graph = current_graph()
    try:
        alone = graph is None
        operands: list[Any] = [as_array(o) if alone and not isinstance(o, Tensor) else as_tensor(o) for o in inputs]
    except TypeError as error:
        raise fail("call", str(error), TypeError) from None
    found: tuple[Any, ...]
    if graph is None:
        found = compute(CALL, operands, attributes)
    else:
        # Not Graph.node, which would find an earlier call that is the same.
        found = Node(graph, CALL, tuple(operands), attributes, specs).results
    return found if several else found[0]
