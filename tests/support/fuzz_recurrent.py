"""The calls of recurrent layers that fuzz_arrays.py makes: LSTM, GRU and RNN, single steps, caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import retrograd as rg
from support.fuzz_calls import LAYOUTS, WRITABLE, Arguments, Array, Impossible, Maker, Parts, as_called


class LstmParts(Parts):
    record = rg.LstmWeights


class GruParts(Parts):
    record = rg.GruWeights


class RnnParts(Parts):
    record = rg.RnnWeights


PARTS: dict[str, type[Parts]] = {"lstm": LstmParts, "gru": GruParts, "rnn": RnnParts}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
# Options of sequences, which a single step has not.
SEQUENCES = ("table", "bidirectional", "batch_first", "lengths", "batch_sizes", "reset")


@dataclass
class Recurrent:
    """The sizes of a recurrent layer and the arguments of its forward pass."""

    cell: str
    steps: int
    samples: int
    units: int
    outputs: int  # of the hidden state
    cells: int
    directions: int
    dtype: np.dtype[Any]
    single: bool
    arguments: Arguments

    @property
    def batch_first(self) -> bool:
        return bool(self.arguments.get("batch_first"))

    @property
    def y_shape(self) -> tuple[int, ...]:
        axes = (self.samples, self.steps) if self.batch_first else (self.steps, self.samples)
        return (*axes, self.directions * self.outputs)

    def state_shape(self, name: str) -> tuple[int, ...]:
        width = self.units if "c" in name else self.outputs
        return (self.samples, width) if self.single else (self.cells, self.samples, width)

    @property
    def states(self) -> tuple[str, ...]:
        return ("h", "c") if self.cell == "lstm" else ("h",)

    def function(self, which: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(rg, f"{self.cell}_{which}")
        return found


@dataclass
class Choices:
    """Which parameters and options a layer has; those that exclude each other are not drawn together."""

    peephole: str | None = None
    projection: int = 0
    norm: str | None = None
    kind: str = "after"


def choices(make: Maker, cell: str, units: int) -> Choices:
    found = Choices()
    if make.chance(0.2):
        found.norm = make.one_of("haste", "cell") if cell == "lstm" else "haste"
    elif cell == "gru":
        found.kind = make.one_of("after", "before")
    elif cell == "lstm":
        found.peephole = make.one_of(None, None, "diagonal", "full")
        if found.peephole != "full" and make.chance(0.25):
            found.projection = int(make.random.integers(1, units + 1))
    return found


def problem(make: Maker, cell: str, layouts: str = LAYOUTS, one_step: bool = False) -> Recurrent:
    steps, samples, inputs = (make.one_of(0, 1, 1, 2, 3, 5) for _ in range(3))
    units, dtype = make.one_of(1, 2, 3, 5, 8, 9, 16, 17), make.dtype()
    if make.enormous:
        steps, samples, inputs = make.enlarged([steps, samples, inputs])
    elif make.large:
        steps, samples, inputs, units = 9, 24, 17, 33
    steps = 1 if one_step else steps
    single = make.chance()
    directions = 1 if single or one_step else make.one_of(1, 2)
    layers = 1 if single else make.one_of(1, 2, 3)
    chosen = choices(make, cell, units)
    outputs = chosen.projection or units
    bias = make.chance(0.7)
    drawn = Parameters(make, cell, units, dtype, layouts)
    weights = [
        drawn.of_cell(inputs if number < directions else directions * outputs, chosen, bias)
        for number in range(layers * directions)
    ]
    batch_first = not one_step and make.chance(0.3)
    axes = (samples, steps) if batch_first else (steps, samples)
    arguments: Arguments = {"weights": weights[0] if single else weights}
    found = Recurrent(cell, steps, samples, units, outputs, len(weights), directions, dtype, single, arguments)
    if not one_step:
        arguments |= {"batch_first": batch_first, "bidirectional": directions == 2}
    if not one_step and chosen.norm is None and make.chance(0.25):
        rows = make.extent(1)
        arguments |= {"table": make.real((rows, inputs), dtype, layouts), "x": make.indices(axes, rows, layouts)}
    else:
        arguments["x"] = make.real((samples, inputs) if one_step else (*axes, inputs), dtype, layouts)
    for name in found.states:
        state = name if one_step else name + "0"
        arguments[state] = make.maybe(make.real(found.state_shape(name), dtype, layouts))
    if not make.enormous:
        add_ragged(make, found, one_step)
        add_factors(make, found, chosen, layouts, one_step)
    arguments |= own_options(make, cell, chosen)
    arguments |= {"dropout": make.one_of(0.0, 0.0, 0.4), "seed": make.one_of(0, 11)}
    return found


class Parameters:
    """Draws the parameters of cells, in each of the forms that they can have."""

    def __init__(self, make: Maker, cell: str, units: int, dtype: Any, layouts: str) -> None:
        self.make, self.cell, self.units, self.dtype, self.layouts = make, cell, units, dtype, layouts

    def gates(self, *tail: int) -> Any:
        make, gates = self.make, GATES[self.cell]
        match make.one_of(0, 0, 1, 2):
            case 0:
                return make.real((gates * self.units, *tail), self.dtype, self.layouts)
            case 1:
                return make.real((gates, self.units, *tail), self.dtype, self.layouts)
            case _:
                return [make.real((self.units, *tail), self.dtype, self.layouts) for _ in range(gates)]

    def plain(self, *shape: int) -> Array:
        return self.make.real(shape, self.dtype, self.layouts)

    def of_cell(self, width: int, chosen: Choices, bias: bool) -> Parts:
        found: dict[str, Any] = {"wx": self.gates(width), "wh": self.gates(chosen.projection or self.units)}
        if bias:
            found["b"] = self.gates()
        if self.cell == "gru" and self.make.chance(0.7):
            found["bh"] = self.gates()
        if chosen.peephole == "full" and self.units > 1:  # of one unit, [4H, H] may be either
            found["peephole"] = self.gates(self.units)
        elif chosen.peephole:
            found["peephole"] = self.gates()
        if chosen.projection:
            found["projection"] = self.plain(chosen.projection, self.units)
        if chosen.norm:
            found |= {"gamma_x": self.gates(), "gamma_h": self.gates()}
            if self.cell == "lstm":
                found |= {"gamma_c": self.plain(self.units), "beta_c": self.plain(self.units)}
        parts = [found.get(field) for field in PARTS[self.cell].record._fields]
        while len(parts) > 2 and parts[-1] is None:
            parts.pop()
        return PARTS[self.cell](parts)


def add_ragged(make: Maker, found: Recurrent, one_step: bool) -> None:
    ragged = make.random.random()
    if ragged < 0.2 and not one_step:
        found.arguments["lengths"] = make.memory.place(make.random.integers(0, found.steps + 1, found.samples))
    elif ragged < 0.35 and not one_step:
        found.arguments["batch_sizes"] = make.memory.place(make.random.integers(0, found.samples + 1, found.steps))


def add_factors(make: Maker, found: Recurrent, chosen: Choices, layouts: str, one_step: bool) -> None:
    """What acts inside the recurrence."""
    arguments, dtype = found.arguments, found.dtype
    axes = (found.samples, found.steps) if found.batch_first else (found.steps, found.samples)
    if found.directions == 1 and not one_step and make.chance(0.2):
        cuts = make.random.random(axes) < 0.3
        arguments["reset"] = make.memory.place(cuts.astype(make.one_of(bool, np.int64, np.float32)), layouts)

    def lead() -> tuple[int, ...]:
        return tuple(make.one_of(1, extent) for extent in axes)

    if make.chance(0.25):
        gates = 1 if chosen.norm else make.one_of(1, GATES[found.cell])
        shape = make.one_of((), lead(), (gates, *lead()), (make.one_of(1, found.cells), gates, *lead()))
        arguments["mask"] = make.real((*shape, found.outputs), dtype, layouts)

    def zoneout(width: int) -> Any:
        if make.chance(0.3):
            return make.one_of(0.0, 0.3)
        shape = make.one_of((), lead(), (make.one_of(1, found.cells), *lead()))
        return make.memory.place(make.random.random((*shape, width)).astype(dtype), layouts)

    if make.chance(0.25):
        arguments["zoneout"] = zoneout(found.outputs)
        if found.cell == "lstm" and chosen.peephole != "full" and make.chance():
            arguments["zoneout"] = (make.maybe(arguments["zoneout"]), zoneout(found.units))


def own_options(make: Maker, cell: str, chosen: Choices) -> Arguments:
    options: Arguments = {"norm": chosen.norm, "norm_eps": make.one_of(1e-5, 1e-5, 1e-2)}
    if chosen.norm is None:
        options["clip"] = make.one_of(None, None, None, 0.5)
    if cell == "gru":
        options |= {"kind": chosen.kind, "flip": make.chance(0.3)}
        if make.chance(0.2):
            options["activations"] = rg.GruActivations(*(make.activation() for _ in range(3)))
    elif cell == "rnn":
        options["activation"] = make.one_of("tanh", "tanh", "relu", "sigmoid", "identity", make.activation())
    else:
        options |= {"output_gate_reads": make.one_of("new", "new", "old"), "coupled": make.chance(0.2)}
        if chosen.norm is None and chosen.peephole != "full":
            options["cell_clip"] = make.one_of(None, None, 0.5)
        if make.chance(0.2):
            options["activations"] = rg.LstmActivations(*(make.activation() for _ in range(5)))
    return options


def run_options(make: Maker, found: Recurrent, states: tuple[str, ...]) -> Arguments:
    """Whether a cache is kept, and where; and where the results are written to."""
    arguments = found.arguments
    arguments["training"] = make.chance(0.7)
    arguments["recompute"] = arguments["training"] and make.chance(0.2)
    if arguments["training"] and not arguments["recompute"] and not make.enormous and make.chance(0.4):
        size = cache_size(found)
        arguments["cache"] = make.memory.place(np.zeros(size + make.one_of(0, 0, 1, 64, -1), np.uint8), "CCCS")
    buffers = {name: make.result(found.state_shape(name), found.dtype) for name in states}
    buffers["y"] = make.result(found.y_shape, found.dtype)
    arguments["out"] = make.one_of(None, buffers, buffers["y"])
    arguments["num_threads"] = make.threads()
    return arguments


def cache_size(found: Recurrent) -> int:
    """Of a pass with these arguments; where it is refused, of one without options."""
    known = {*as_sequence(found.arguments)} - {"training", "recompute", "out", "num_threads"}
    given = {name: value for name, value in as_sequence(found.arguments).items() if name in known}
    try:
        return int(found.function("cache")(**as_called(given)).size)
    except ValueError:  # an array that is misaligned
        return 1024


def as_sequence(arguments: Arguments) -> Arguments:
    """The arguments of forward, from those of a single step or of forward."""
    names = {"h": "h0", "c": "c0"}
    found = {names.get(name, name): value for name, value in arguments.items()}
    if found is not arguments and "h" in arguments:
        found["x"] = found["x"][None]
    return found


def forward(cell: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        found = problem(make, cell)
        return run_options(make, found, tuple(state + "n" for state in found.states))

    return generate


def step(cell: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        found = problem(make, cell, one_step=True)
        return run_options(make, found, tuple(state + "n" for state in found.states))

    return generate


def cache(cell: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        found = problem(make, cell, WRITABLE)
        if not make.enormous and make.chance(0.6):
            buffer = found.function("forward")(**as_called(found.arguments)).cache.buffer
            found.arguments["buffer"] = make.memory.place(np.array(buffer), "CCCS")
            if make.chance(0.2) and buffer.size:  # bits that no forward pass has written
                found.arguments["buffer"][int(make.random.integers(buffer.size))] ^= 1 << int(make.random.integers(8))
        return found.arguments

    return generate


def sizes(cell: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        drawn = make.enlarged([make.extent() for _ in range(4)])
        arguments = dict(zip(("seq_len", "batch_size", "input_size", "hidden_size"), drawn, strict=True))
        if max(drawn) < 100 and make.chance(0.3):
            arguments["lengths"] = make.memory.place(make.random.integers(0, drawn[0] + 1, drawn[1]))
        if cell == "lstm" and make.chance(0.3):
            arguments["projection"] = int(make.random.integers(0, min(drawn[3], 33) + 1))
        return {
            **arguments, "num_layers": make.one_of(1, 2), "bidirectional": make.chance(), "dtype": make.dtype().name,
        }  # fmt: skip

    return generate


def backward(cell: str, one_step: bool = False) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        if make.enormous:
            raise Impossible  # there is no cache of such a pass
        found = problem(make, cell, WRITABLE, one_step)
        given = {**found.arguments, "recompute": make.chance(0.3)}
        kept = found.function("step" if one_step else "forward")(**as_called(given)).cache
        if kept.buffer is not None:
            kept = kept.with_buffer(make.memory.place(np.array(kept.buffer), "C"))
        make.memory.notes[id(kept)] = found
        weights = found.arguments["weights"]

        def like(part: Any) -> Any:
            if part is None:
                return None
            return type(part)(map(like, part)) if isinstance(part, list) else make.result(part.shape, part.dtype, 1.0)

        source = found.arguments.get("table")
        shape = (found.arguments["x"] if source is None else source).shape
        buffers = {
            "dx": make.result((1, *shape) if one_step else shape, found.dtype),
            "dweights": like(weights) if make.chance() else None,
        }
        buffers |= {f"d{name}0": make.result(found.state_shape(name), found.dtype) for name in found.states}
        arguments: Arguments = {"cache": kept}
        if not one_step:
            arguments["dy"] = make.maybe(make.real(found.y_shape, found.dtype), 0.8)
        for name in found.states:
            gradient = f"d{name}" if one_step else f"d{name}n"
            arguments[gradient] = make.maybe(make.real(found.state_shape(name), found.dtype))
        arguments |= {
            "out": buffers if make.chance(0.7) else None,
            "accumulate": all(buffer is not None for buffer in buffers.values()) and make.chance(),
            "num_threads": make.threads(),
        }
        if make.chance(0.2):
            first = weights if found.single else weights[0]
            fields = [f for f, part in zip(PARTS[cell].record._fields, first, strict=False) if part is not None]
            names = ("dx", *("d" + field for field in fields), *(f"d{name}0" for name in found.states))
            arguments["need"] = [name for name in names if make.chance()]
        return arguments

    return generate


RECURRENT_GENERATORS: dict[str, Callable[[Maker], Arguments]] = {
    f"{cell}_{name}": generator
    for cell in PARTS
    for name, generator in {
        "forward": forward(cell),
        "backward": backward(cell),
        "cache": cache(cell),
        "cache_size": sizes(cell),
        "step": step(cell),
        "step_backward": backward(cell, one_step=True),
    }.items()
}
