"""A function of modules and arrays, traced and compiled once for each shape of its arguments."""

from __future__ import annotations

import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import numpy as np

from ..graph.operation import Spec
from ..graph.program import MISFIT, Program
from ..graph.program import compile as compile_graph
from ..graph.tensor import current_graph
from ..ops._args import thread_count
from ..ops._types import Array
from .module import Changes, Module, as_input, input_dtype
from .sizes import size

__all__ = ["TRACING", "Programs", "forget_assignments"]

TRACING: Final = threading.RLock()  # modes are switched during a trace, so one thread traces at a time
_MANY: Final = 16  # programs, from which on it is worth a look what compiling takes


class _Tree(NamedTuple):
    """A tuple, list or dict of arguments, with a Spec for each array, and what is fixed as it is."""

    kind: type
    keys: tuple[str, ...]
    parts: tuple[Any, ...]


class _Key(NamedTuple):
    """What a program is compiled for."""

    modules: tuple[tuple[int, int, bool], ...]  # which they are, how often they were changed, their modes
    trainable: tuple[bool, ...]
    arguments: _Tree


class Programs:
    """A function, compiled for each shape and dtype of its arguments, and for each mode of its modules.

    Arguments are arrays, or nested tuples, lists and dicts of them; None, bool and str are fixed when it is compiled.
    Floating-point numbers are converted to the dtype of the modules, integers to int64. The last `keep` programs are
    kept. ``training=False``: compiled in evaluation mode, whatever the modes are, and it changes nothing.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        modules: Sequence[Module],
        *,
        training: bool = True,
        keep: int = 8,
        num_threads: int | None = None,
    ) -> None:
        self._function, self._modules, self._training = function, list(modules), training
        self._keep = size("compile", "keep", keep, 1)
        self._threads = 0 if num_threads is None else thread_count(num_threads)
        self._known: OrderedDict[_Key, Program] = OrderedDict()
        # The last program, the changes before it, its arguments, and whether these are arrays alone.
        self._last: tuple[Program, int, _Tree, bool] | None = None
        self._seen = -1
        self._state: tuple[Any, Any] = ((), ())
        self._dtype: np.dtype[Any] | None = None  # the parameters' dtype, if there are any
        self._count, self._compiling, self._began = 0, 0.0, 0.0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the program for these arguments; compile it first if it is not known."""
        last = self._last
        if last is not None and last[1] == Changes.count and last[2].keys == tuple(keywords):
            program, _, tree, plain = last
            given = (*arguments, *keywords.values()) if keywords else arguments
            flat: list[Any] = []
            if plain or _matched(tree, given, flat):
                found = program.attempt(given if plain else tuple(flat), self._threads)
                if found is not MISFIT:
                    return found
        program, arrays = self.program_for(arguments, keywords)
        return program(*arrays, num_threads=self._threads or None)

    def program_for(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Program, list[Array]]:
        """The program for these arguments, and the arrays that it takes."""
        with TRACING:
            return self._found(arguments, keywords)

    def _found(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Program, list[Array]]:
        if self._seen != Changes.count:
            self._look_again()
        changes = self._seen
        everything = (*arguments, *keywords.values())
        dtype = self._dtype or input_dtype(self._modules, everything)
        given = [as_input(value, dtype) for value in everything]
        arrays: list[Array] = []
        key = _Key(*self._state, _Tree(tuple, tuple(keywords), tuple(_described(value, arrays) for value in given)))
        program = self._known.get(key)
        if program is None:
            program = self._known[key] = self._compile(key, [Spec(a.shape, a.dtype) for a in arrays])
        self._known.move_to_end(key)
        while len(self._known) > self._keep:
            self._known.popitem(last=False)
        plain = all(isinstance(part, Spec) for part in key.arguments.parts)
        self._last = program, changes, key.arguments, plain
        return program, arrays

    def _look_again(self) -> None:
        changes = Changes.count
        modules = [module for root in self._modules for _, module in root.modules()]
        parameters = [p for root in self._modules for p in root.parameters().values()]
        modes = tuple((id(m), m._changed, self._training and m.training) for m in modules)
        self._state = modes, tuple(p.trainable for p in parameters)
        self._dtype = input_dtype(self._modules, ()) if parameters else None
        self._seen = changes

    def _compile(self, key: _Key, specs: Sequence[Spec]) -> Program:
        began = time.perf_counter()
        self._began = self._began or began

        def call(*tensors: Any) -> Any:
            left = iter(tensors)
            given = [_filled(part, left) for part in key.arguments.parts]
            names = key.arguments.keys
            count = len(given) - len(names)
            answer = self._function(*given[:count], **dict(zip(names, given[count:], strict=True)))
            if not self._training:
                forget_assignments()
            return answer

        with nullcontext() if self._training else _evaluating(self._modules):
            program = compile_graph(call, *specs)
        now = time.perf_counter()
        self._count += 1
        self._compiling += now - began
        if self._count == _MANY or (self._count > _MANY and self._count % 64 == 0):
            self._warn(now - self._began)
        return program

    def _warn(self, elapsed: float) -> None:
        if self._compiling > elapsed / 2:
            warnings.warn(
                f"{self._count} programs were compiled, in {self._compiling:.1f} s of {elapsed:.1f} s: a program is "
                "for one shape, and the shapes or the layers change often. Pad batches to one shape, or to a few "
                "(buckets); for sequences pass lengths=",
                RuntimeWarning,
                stacklevel=2,
            )


def _described(value: Any, arrays: list[Array]) -> Any:
    """An argument as part of a key; its arrays are added to the list."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return Spec(value.shape, value.dtype)
    if isinstance(value, dict):
        return _Tree(dict, tuple(value), tuple(_described(item, arrays) for item in value.values()))
    if isinstance(value, (tuple, list)):
        return _Tree(type(value), (), tuple(_described(item, arrays) for item in value))
    return value


def _matched(part: Any, value: Any, flat: list[Any]) -> bool:
    """Whether an argument has the structure that a part of a key describes; its arrays are added to the list."""
    if isinstance(part, Spec):
        flat.append(value)
        return True
    if not isinstance(part, _Tree):
        return value is part
    kind: Any = part.kind
    if type(value) is not kind or len(value) != len(part.parts) or (kind is dict and tuple(value) != part.keys):
        return False
    items = value.values() if kind is dict else value
    return all(_matched(inside, item, flat) for inside, item in zip(part.parts, items, strict=True))


def _filled(part: Any, tensors: Iterator[Any]) -> Any:
    """The argument that a part of a key describes, with tensors for its arrays."""
    if isinstance(part, Spec):
        return next(tensors)
    if not isinstance(part, _Tree):
        return part
    items = [_filled(item, tensors) for item in part.parts]
    if part.kind is dict:
        return dict(zip(part.keys, items, strict=True))
    return part.kind(*items) if hasattr(part.kind, "_fields") else part.kind(items)


def forget_assignments() -> None:
    """Let the function that is traced leave all variables as they are."""
    traced = current_graph()
    assert traced is not None
    traced.assigned.clear()


@contextmanager
def _evaluating(modules: Iterable[Module]) -> Iterator[None]:
    """All modules in evaluation mode, inside a with statement."""
    changed = [module for root in modules for _, module in root.modules() if module.training]
    for module in changed:
        module.__dict__["training"] = False
    try:
        yield
    finally:
        for module in changed:
            module.__dict__["training"] = True
