"""What a graph is to a context, whether a builder made it or a file: a recording, its functions and its parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..graph import Recording, Symbol, Variable


class Function(NamedTuple):
    """A function of a model: placeholders in, tensors out, in the order in which they were declared."""

    name: str
    inputs: tuple[Symbol, ...]  # placeholders; in-out arguments are among them, as placeholders or variables
    outputs: tuple[Symbol, ...]
    states: tuple[tuple[Symbol, Symbol], ...] = ()  # in-out arguments: the input, and what is left in its memory
    names: tuple[str, ...] = ()  # of the outputs; without them the symbols' names, or generated ones
    updates: tuple[tuple[Symbol, Symbol], ...] = ()  # parameters, and the values that a run gives them


class Model:
    """Functions over one recording. Its parameters are constants of a file, which can be trained and written back.

    A parameter is a variable of the recording (``recording.variable(variable, name)``), so that a gradient with respect
    to it can be taken, and a run sees the values that it has then.
    """

    def __init__(
        self, recording: Recording, functions: Mapping[str, Function], parameters: Mapping[str, Variable] | None = None
    ) -> None:
        self.recording = recording
        self.functions = dict(functions)
        self.parameters = dict(parameters or {})
        self.lock = threading.RLock()  # of its variables, which contexts share

    def function(self, name: str | None) -> Function:
        """The function of this name; None or an empty one is that of the only one."""
        if not name:
            if len(self.functions) != 1:
                raise ValueError(f"there are functions {', '.join(self.functions)}; name one of them")
            return next(iter(self.functions.values()))
        if name not in self.functions:
            raise ValueError(f"there is no function {name!r}; there are {', '.join(self.functions)}")
        return self.functions[name]


def spliced(
    recording: Recording, function: Function, inputs: Sequence[Symbol], variable: Callable[[Variable], Symbol]
) -> list[Symbol]:
    """The outputs of a function inside another recording, for symbols of that in place of its inputs."""
    if function.states or function.updates:
        raise ValueError(
            f"{function.name!r} changes its arguments or parameters; only inference can be a part of a graph"
        )
    found: dict[Symbol, Symbol] = {}
    for own, given in zip(function.inputs, inputs, strict=True):
        fits = own.shape is None or given.shape is None or (
            len(own.shape) == len(given.shape)
            and all(a == b or min(a, b) < 0 for a, b in zip(own.shape, given.shape, strict=True))
        )  # fmt: skip
        if own.dtype != given.dtype or not fits:
            raise ValueError(f"{given!r} is given for the input {own!r} of {function.name!r}")
        found[own] = given
    source = function.outputs[0].recording
    for call in source.calls_for(function.outputs):
        if call.kind == "placeholder":
            if call.results[0] not in found:
                raise ValueError(f"{call.results[0]!r} is not among the inputs of {function.name!r}")
            continue
        operands = [None if s is None else found[s] for s in call.operands]
        if call.kind == "constant":
            news: Sequence[Symbol] = [recording.constant(call.value, call.name)]
        elif call.kind == "variable":
            news = [variable(call.value)]
        elif call.kind == "gradients":
            news = recording.gradients(operands[0], operands[1:], name=call.name)  # type: ignore[arg-type]
        else:
            assert call.function is not None
            news = recording.call(
                call.function, operands, call.options, kind=call.kind, count=len(call.results), name=call.name
            )
        found.update(zip(call.results, news, strict=True))
    return [found[symbol] for symbol in function.outputs]
