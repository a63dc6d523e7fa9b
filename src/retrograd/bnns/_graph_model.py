"""What a graph is to a context, whether a builder made it or a file: a recording, its functions and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..graph import Recording, Symbol, Variable


class Function(NamedTuple):
    """A function of a model: placeholders in, tensors out, in the order in which they were declared."""

    name: str
    inputs: tuple[Symbol, ...]  # placeholders; those of in-out arguments are among them
    outputs: tuple[Symbol, ...]
    states: tuple[tuple[Symbol, Symbol], ...] = ()  # in-out arguments: the placeholder, and what is left in its memory
    names: tuple[str, ...] = ()  # of the outputs; without them the symbols' names, or generated ones


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
