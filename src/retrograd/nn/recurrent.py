"""The recurrent layers: LSTM, GRU and RNN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from .. import graph
from ..ops._errors import ArgumentError, of_function
from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.recurrent import types
from ..ops.recurrent.factors import ZONEOUT_STREAMS
from ..ops.recurrent.problem import problem_of
from ..ops.recurrent.types import CellOptions, CellType, GruActivations, LstmActivations, RnnActivations
from . import hints
from .init import Rng, generator, glorot_bound, orthogonal, uniform
from .layers import Embedding, new_stream, next_seed
from .module import Buffer, Layer, Module, Parameter
from .sizes import float_dtype, operand, size

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["GRU", "LSTM", "RNN", "LstmState"]

# What is added to the seed of a call for its mask, so that it is independent of the dropout, and of zoneout.
_MASK: Final = 0x1B873593CC9E2D51
_PEEPHOLES: Final = (None, "diagonal", "full")  # in the order of the engine's codes


class LstmState(NamedTuple):
    """Hidden and cell states of all cells, ``[cells, N, H]`` each."""

    h: Any
    c: Any


class RecurrentOptions(TypedDict, total=False):
    """The options that LSTM, GRU and RNN have in common; :class:`Recurrent` has their defaults."""

    embedding: Embedding | None
    layers: int
    bidirectional: bool
    batch_first: bool
    last: bool
    bias: bool
    clip: float | None
    norm_eps: float
    dropout: float
    recurrent_dropout: float
    recompute: bool
    init: Literal["pytorch", "keras"]
    dtype: npt.DTypeLike
    rng: Rng


class RecurrentCell(Module):
    """The parameters of one direction of one layer, by the names of their fields in the weights of the function."""

    kind: ClassVar[CellType]

    def __init__(self, parameters: dict[str, Array]) -> None:
        for name, values in parameters.items():
            setattr(self, name, Parameter(values))

    def weights(self) -> Any:
        found: Any = [self._variables.get(name) for name in self.kind.fields]
        return self.kind.weights(*found)

    def describe(self) -> str:
        return ", ".join(f"{name}: {parameter.shape}" for name, parameter in self._variables.items())


class LstmCell(RecurrentCell):
    kind = types.LSTM


class GruCell(RecurrentCell):
    kind = types.GRU


class RnnCell(RecurrentCell):
    kind = types.RNN


class Recurrent(Layer):
    """What the recurrent layers have in common. A subclass declares its cell, its function and its own options.

    All take ``x [T, N, inputs]``, or ``[N, T, inputs]`` if `batch_first`; y has ``hidden`` columns per direction. The
    cells are children: ``layer0``, ``layer1`` and so on, with ``layer0_reverse`` next to ``layer0`` if
    `bidirectional`. With ``last=True`` y is only the last output of each sequence, ``[N, hidden]``, of the backward
    direction the first.

    With an `embedding`, which becomes a child, x holds integer indices ``[T, N]`` into its table. The result is the
    same as with an embedding before the layer, but each row of the table is multiplied once, however often it occurs.

    In training, `dropout` applies between layers, and `recurrent_dropout` to the states that the gates read, with one
    mask for all steps (variational dropout). With the probability `zoneout` an element of the state keeps its old
    value; in evaluation the states are averaged. `clip` bounds the inputs of the gates' activations. `norm` "haste"
    normalizes the two products of each cell, with weights ``gamma_x`` and ``gamma_h`` and `norm_eps`.

    `init`: "pytorch" draws all parameters uniformly from ±1/sqrt(hidden); "keras" draws wx from Glorot's uniform
    distribution and wh with orthonormal columns, and sets biases = 0. With `recompute` training keeps nothing for the
    gradient, but recomputes the sequence.
    """

    stream: Buffer  # if anything is random
    _option_hints = hints.RECURRENT
    _cell: ClassVar[type[RecurrentCell]]
    _function: ClassVar[Callable[..., Any]]

    def __init__(
        self,
        inputs: int,
        hidden: int,
        own: dict[str, Any],
        *,
        norm: str | None,
        zoneout: float | tuple[float, float],
        peephole: str | None = None,
        projection: int | None = None,
        forget_bias: float = 0.0,
        embedding: Embedding | None = None,
        layers: int = 1,
        bidirectional: bool = False,
        batch_first: bool = False,
        last: bool = False,
        bias: bool = True,
        clip: float | None = None,
        norm_eps: float = 1e-5,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        recompute: bool = False,
        init: str = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        name = type(self).__name__
        counts = {"inputs": inputs, "hidden": hidden, "layers": layers}
        inputs, hidden, layers = (size(name, what, value, None) for what, value in counts.items())
        dtype = float_dtype(name, dtype)
        if layers < 1 or inputs < 0 or hidden < 1:
            raise ValueError(
                f"{name}: layers is {layers}, inputs is {inputs}, hidden is {hidden}; the minima are 1, 0 and 1"
            )
        if projection is not None and projection < 1:
            raise ValueError(f"{name}: projection is {projection}, must be at least 1, or None")
        if init not in ("pytorch", "keras"):
            raise ValueError(f"{name}: init is {init!r}; there are 'pytorch' and 'keras'")
        if peephole not in _PEEPHOLES:
            raise ValueError(f"{name}: peephole is {peephole!r}; there are 'diagonal' and 'full'")
        if embedding is not None and not isinstance(embedding, Embedding):
            raise TypeError(f"{name}: embedding is a {type(embedding).__name__}, must be an nn.Embedding")
        if embedding is not None and embedding.table.shape[1] != inputs:
            raise ValueError(f"{name}: inputs is {inputs}, but the embedding has {embedding.table.shape[1]} features")
        self.embedding = embedding
        self.inputs, self.hidden, self.layers, self.bidirectional = inputs, hidden, layers, bidirectional
        self.batch_first, self.last, self.recompute = batch_first, last, recompute
        self.dropout, self.recurrent_dropout, self.projection = dropout, recurrent_dropout, projection
        self.zoneout = _rates(name, zoneout, recurrent_dropout, self._kind)
        self.norm = norm
        self.options = {**own, "clip": clip, "norm": norm, "norm_eps": norm_eps}
        draw = generator(rng)
        directions = ("", "_reverse") if bidirectional else ("",)
        self._check(len(directions) * layers, peephole, np.dtype(dtype))
        shapes = self._shapes(bias, peephole)
        for layer in range(layers):
            for direction in directions:
                columns = inputs if layer == 0 else len(directions) * (projection or hidden)
                parameters = self._new_parameters(draw, columns, shapes, forget_bias, init)
                cell = self._cell({name: a.astype(dtype) for name, a in parameters.items()})
                setattr(self, f"layer{layer}{direction}", cell)
        if dropout or recurrent_dropout or any(self.zoneout):
            self.stream = new_stream(draw)

    def _check(self, cells: int, peephole: str | None, dtype: np.dtype[Any]) -> None:
        """Raise for options that are invalid or exclude each other."""
        given = {name: value for name, value in self.options.items() if name != "activation"}
        if "activation" in self.options:
            given["activations"] = RnnActivations(self.options["activation"])
        code = _PEEPHOLES.index(peephole)
        try:
            problem_of(
                (1, 1, self.inputs), dtype, cells, False, self.hidden, self.projection or 0, self.bidirectional, False,
                code, int(self.recurrent_dropout > 0), self.zoneout[0] > 0, self.dropout, True,
                CellOptions(self._kind.name, **given),
            )  # fmt: skip
        except ArgumentError as error:
            raise of_function(type(self).__name__, error) from None
        if self.zoneout[1] and peephole == "full":
            raise ValueError(
                f"{type(self).__name__}: zoneout of the cell state is {self.zoneout[1]} and peephole is 'full'; they "
                "cannot be combined"
            )

    def _shapes(self, bias: bool, peephole: str | None) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters that cells have, besides wx."""
        rows, outputs = len(self._kind.gates) * self.hidden, self.projection or self.hidden
        shapes: dict[str, tuple[int, ...]] = {"wh": (rows, outputs)}
        if bias:
            shapes["b"] = (rows,)
        # A bias of the product with the state is a second one of the same sum, unless the reset gate is between them.
        if bias and self.options.get("kind") == "after":
            shapes["bh"] = (rows,)
        if peephole:
            shapes["peephole"] = (rows, self.hidden) if peephole == "full" else (rows,)
        if self.projection:
            shapes["projection"] = (self.projection, self.hidden)
        if self.norm is not None:
            shapes.update(gamma_x=(rows,), gamma_h=(rows,))
            if self._kind.has_cells:
                shapes.update(gamma_c=(self.hidden,), beta_c=(self.hidden,))
        return shapes

    def _new_parameters(
        self,
        draw: np.random.Generator,
        columns: int,
        given: dict[str, tuple[int, ...]],
        forget_bias: float,
        init: str,
    ) -> dict[str, Array]:
        """Initial values, in float64. Biases and peepholes that a cell does not have are drawn as well: the values of a
        seed do not depend on these options."""
        hidden, rows = self.hidden, len(self._kind.gates) * self.hidden
        vector: tuple[int, ...] = (rows,)
        absent = {"b": vector, "bh": vector, "peephole": vector, "projection": (0, 0)}
        shapes: dict[str, tuple[int, ...]] = {**absent, **given, "wx": (rows, columns)}
        values: dict[str, Array] = {}
        for name in self._kind.fields:
            if name in ("gamma_x", "gamma_h", "gamma_c", "beta_c"):
                if name in given:
                    values[name] = (np.zeros if name == "beta_c" else np.ones)(given[name])
            elif init == "pytorch":
                values[name] = uniform(draw, shapes[name], 1.0 / math.sqrt(hidden), np.float64)
            elif name in ("wx", "projection"):
                outputs, inputs = shapes[name]
                values[name] = uniform(draw, shapes[name], glorot_bound(inputs, outputs), np.float64)
            elif name == "wh":
                values[name] = orthogonal(draw, (rows, shapes[name][1]), np.float64)
            else:
                values[name] = np.zeros(shapes[name])
        values["b"][hidden : 2 * hidden] += forget_bias
        return {name: array for name, array in values.items() if name == "wx" or name in given}

    @property
    def _kind(self) -> CellType:
        return self._cell.kind

    def cells(self) -> list[RecurrentCell]:
        """The cells in the order of their states."""
        return [child for child in self._children.values() if isinstance(child, RecurrentCell)]

    def forward(self, x: Any, state: Any = None, *, lengths: Any = None, reset: Any = None) -> Any:
        """Return y of the sequences from the initial `state`, zeros if None.

        `lengths` [N] are their steps. Where `reset` [T, N] ([N, T] if batch first) is not 0, the state is set to 0
        before the step.
        """
        y, final = self.run(x, state, lengths=lengths, reset=reset)
        if not self.last:
            return y
        h = final.h if self._kind.has_cells else final
        return graph.concatenate([h[-2], h[-1]], -1) if self.bidirectional else h[-1]

    def run(self, x: Any, state: Any = None, *, lengths: Any = None, reset: Any = None) -> tuple[Any, Any]:
        """Return y, and the final state, from which the next part of the sequences can go on.

        The state of an LSTM is an :class:`LstmState`; that of the others is h ``[cells, N, H]``.
        """
        name, embedding, x = type(self).__name__, self.embedding, operand(type(self).__name__, "x", x)
        axes = ("(N, T)" if self.batch_first else "(T, N)") + ("" if embedding is not None else " and inputs")
        if x.ndim != (3 if embedding is None else 2) or (embedding is None and x.shape[2] != self.inputs):
            wanted = "" if embedding is not None else f" = {self.inputs}"
            raise ValueError(f"{name}: x has shape {x.shape}, must have the axes {axes}{wanted}")
        if embedding is not None and x.dtype.kind != "i":
            raise TypeError(f"{name}: x has dtype {x.dtype}, must be integers, the indices of the embedding")
        _check_state(name, state, self._kind)
        sequence, table = x, None
        # Few indices are looked up, many are multiplied with the whole table. A norm needs each product.
        if embedding is not None and (x.size <= len(embedding.table) or self.norm is not None):
            sequence = embedding(x)
        elif embedding is not None:
            table = embedding.table
        states = (state if state is not None else (None, None)) if self._kind.has_cells else (state,)
        random = self.training and (self.dropout > 0 or self.recurrent_dropout > 0 or any(self.zoneout))
        seed = next_seed(self.stream) if random else 0
        steps, samples = (x.shape[1], x.shape[0]) if self.batch_first else x.shape[:2]

        def call(sequence: Any) -> Any:
            return type(self)._function(
                sequence,
                [cell.weights() for cell in self.cells()],
                *states,
                table=table,
                bidirectional=self.bidirectional,
                batch_first=self.batch_first,
                lengths=lengths,
                reset=reset,
                mask=self._mask(samples, seed),
                zoneout=self._zoneout(steps, samples, seed),
                dropout=self.dropout if self.training else 0.0,
                seed=seed,
                **self.options,
            )

        y, *final = graph.recompute(call)(sequence) if self.recompute else call(sequence)
        return y, LstmState(*final) if self._kind.has_cells else final[0]

    def _mask(self, samples: int, seed: Any) -> Any:
        """The mask of the states that the gates read, the same for all gates and steps."""
        rate, cells = self.recurrent_dropout, len(self.cells())
        if not (self.training and rate):
            return None
        width = self.projection or self.hidden
        mask = graph.dropout(graph.ones((cells, samples, width), self.dtype), rate, seed=graph.add(seed, _MASK))
        return graph.reshape(mask, (cells, 1, samples, 1, width) if self.batch_first else (cells, 1, 1, samples, width))

    def _zoneout(self, steps: int, samples: int, seed: Any) -> Any:
        """The weights of the new states: 0 or 1 in training, their mean in evaluation."""
        widths = self.projection or self.hidden, self.hidden
        weights: list[Any] = []
        for rate, width, stream in zip(self.zoneout, widths, ZONEOUT_STREAMS, strict=True):
            if not rate:
                weights.append(None)
            elif not self.training:
                weights.append(graph.full((width,), 1 - rate, self.dtype))
            else:
                ones = graph.ones((len(self.cells()), steps, samples, width), self.dtype)
                kept = graph.minimum(graph.dropout(ones, rate, seed=graph.add(seed, stream)), 1)
                weights.append(graph.swapaxes(kept, 1, 2) if self.batch_first else kept)
        return tuple(weights) if self._kind.has_cells else weights[0]

    def step(self, x: Any, state: Any = None) -> tuple[Any, Any]:
        """One step: y ``[N, hidden]`` and the state after x ``[N, inputs]``, or indices ``[N]`` with an embedding.

        It is for loops whose next x depends on y, such as generation. In training every call has a mask of its own.
        """
        if self.bidirectional:
            raise ValueError(f"{type(self).__name__}: a single step needs one direction, but bidirectional is True")
        time = 1 if self.batch_first else 0
        y, final = self.run(graph.expand_dims(x, time), state)
        return y[:, 0] if self.batch_first else y[0], final

    def describe(self) -> str:
        rates = {"dropout": self.dropout, "recurrent_dropout": self.recurrent_dropout, "projection": self.projection}
        extra = "".join(f", {name}={value}" for name, value in rates.items() if value)
        return f"{self.inputs}, {self.hidden}, layers={self.layers}, bidirectional={self.bidirectional}{extra}"


def _check_state(name: str, state: Any, kind: CellType) -> None:
    """Raise unless a state is a pair, or the one array of cells without a cell state."""
    if state is None or isinstance(state, (tuple, list)) == kind.has_cells:
        return
    given = f"a {type(state).__name__}" if isinstance(state, (tuple, list)) else f"of shape {np.shape(state)}"
    raise TypeError(f"{name}: state is {given}, must be {'a pair (h, c)' if kind.has_cells else 'one array, h'}")


def _rates(name: str, zoneout: Any, recurrent_dropout: float, kind: CellType) -> tuple[float, float]:
    """The zoneout of the hidden and of the cell state."""
    pair = zoneout if isinstance(zoneout, tuple) else (zoneout, 0.0)
    if len(pair) != 2 or (isinstance(zoneout, tuple) and not kind.has_cells):
        wanted = "a rate, or a pair of rates, (h, c)" if kind.has_cells else "one rate, as there is no cell state"
        raise ValueError(f"{name}: zoneout is {zoneout!r}, must be {wanted}")
    for option, rate in (("recurrent_dropout", recurrent_dropout), *(("zoneout", rate) for rate in pair)):
        if not 0 <= rate < 1:
            raise ValueError(f"{name}: {option} is {rate}, must be at least 0 and below 1")
    return pair


class LSTM(Recurrent):
    """An LSTM over ``x [T, N, inputs]``; its options are those of :class:`Recurrent`, and these.

    Each cell has ``wx [4H, I]``, ``wh [4H, H]``, and optionally ``b [4H]`` and ``peephole``; the gates are i f g o.
    `forget_bias` is added to the bias of the forget gate. With a `projection` to P elements the hidden state and y have
    P columns, and a cell has ``projection [P, H]``. With `coupled` the forget gate is 1 - i. `cell_clip` bounds the
    cell state. `norm` "haste" also normalizes the cell state where the output reads it, "cell" the cell state itself;
    the parameters are ``gamma_c`` and ``beta_c``. `zoneout` may be a pair of rates, of the hidden and the cell state.
    """

    _cell = LstmCell
    _function = staticmethod(graph.lstm)

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        peephole: Literal["diagonal", "full"] | None = None,
        output_gate_reads: Literal["new", "old"] = "new",
        activations: LstmActivations | None = None,
        projection: int | None = None,
        coupled: bool = False,
        cell_clip: float | None = None,
        norm: Literal["haste", "cell"] | None = None,
        zoneout: float | tuple[float, float] = 0.0,
        forget_bias: float = 1.0,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        own = {
            "activations": LstmActivations() if activations is None else activations,
            "output_gate_reads": output_gate_reads,
            "coupled": coupled,
            "cell_clip": cell_clip,
        }
        super().__init__(
            inputs, hidden, own, norm=norm, zoneout=zoneout, peephole=peephole, projection=projection,
            forget_bias=forget_bias, **options,
        )  # fmt: skip


class GRU(Recurrent):
    """A GRU over ``x [T, N, inputs]``; its options are those of :class:`Recurrent`, and these.

    Each cell has ``wx [3H, I]``, ``wh [3H, H]``, and optionally ``b [3H]`` and ``bh [3H]``, gates in the order r z n.
    With `kind` "after" (PyTorch, Keras) the reset gate multiplies the product of the state and its bias ``bh``, with
    "before" the state itself, and there is no ``bh``. With `flip` z is the weight of the new state, not of the old one.
    """

    _cell = GruCell
    _function = staticmethod(graph.gru)

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        kind: Literal["after", "before"] = "after",
        flip: bool = False,
        activations: GruActivations | None = None,
        norm: Literal["haste"] | None = None,
        zoneout: float = 0.0,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        own = {"kind": kind, "flip": flip, "activations": GruActivations() if activations is None else activations}
        super().__init__(inputs, hidden, own, norm=norm, zoneout=zoneout, **options)


class RNN(Recurrent):
    """A simple RNN over ``x [T, N, inputs]``; its options are those of :class:`Recurrent`, and an `activation`.

    Each cell has ``wx [H, I]``, ``wh [H, H]`` and optionally ``b [H]``.
    """

    _cell = RnnCell
    _function = staticmethod(graph.rnn)

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        activation: str | Activation = "tanh",
        norm: Literal["haste"] | None = None,
        zoneout: float = 0.0,
        **options: Unpack[RecurrentOptions],
    ) -> None:
        super().__init__(inputs, hidden, {"activation": activation}, norm=norm, zoneout=zoneout, **options)
