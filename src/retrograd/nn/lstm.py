"""The LSTM layer."""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

import retrograd as rg

from .init import Rng, generator, glorot_bound, orthogonal, uniform
from .layers import Embedding, new_stream, next_seed
from .module import Array, Module

__all__ = ["LSTM", "LstmState"]


class LstmState(NamedTuple):
    """Hidden and cell states of all cells, or their gradients: ``[cells, N, H]`` each; None means zeros."""

    h: Array | None
    c: Array | None


_NO_STATE: Final = LstmState(None, None)


class LstmCell(Module):
    """The parameters of one direction of one layer, gates in the order i f g o."""

    wx: Array
    dwx: Array
    wh: Array
    dwh: Array

    def weights(self) -> rg.LstmWeights:
        return self._as_weights("")

    def dweights(self) -> rg.LstmWeights:
        return self._as_weights("d")

    def _as_weights(self, prefix: str) -> rg.LstmWeights:
        return rg.LstmWeights(*(getattr(self, prefix + name, None) for name in rg.LstmWeights._fields))

    def describe(self) -> str:
        return ", ".join(f"{name}: {getattr(self, name).shape}" for name in self._parameters)


class LSTM(Module):
    """An LSTM over ``x [T, N, inputs]`` (``[N, T, inputs]`` if `batch_first`); y has ``hidden`` columns per direction.

    The cells are children: ``layer0``, ``layer1`` and so on, with ``layer0_reverse`` next to ``layer0`` if
    `bidirectional`. Each has ``wx [4H, I]``, ``wh [4H, H]``, and optionally ``b [4H]`` and ``peephole``. After a
    forward pass `state` has the final states. After backward, `dstate` has the gradients of the initial states, if
    forward was given any.

    With an `embedding`, which becomes a child, x holds integer indices ``[T, N]`` into its table. The result is that of
    the embedding followed by the LSTM, but each row of the table is multiplied once, however often it occurs.

    `init`: "pytorch" draws all parameters uniformly from ±1/sqrt(hidden); "keras" draws wx from Glorot's uniform
    distribution and wh with orthonormal columns, and sets b = 0 and peephole = 0. Both add `forget_bias` to the bias of
    the forget gate.
    """

    stream: Array  # if there is dropout

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        embedding: Embedding | None = None,
        layers: int = 1,
        bidirectional: bool = False,
        batch_first: bool = False,
        bias: bool = True,
        peephole: Literal["diagonal", "full"] | None = None,
        output_gate_reads: Literal["new", "old"] = "new",
        activations: rg.LstmActivations | None = None,
        dropout: float = 0.0,
        recompute: bool = False,
        forget_bias: float = 1.0,
        init: Literal["pytorch", "keras"] = "pytorch",
        dtype: npt.DTypeLike = np.float32,
        rng: Rng = None,
    ) -> None:
        if layers < 1 or inputs < 0 or hidden < 1:
            raise ValueError(
                f"LSTM: layers is {layers}, inputs is {inputs}, hidden is {hidden}; the minima are 1, 0 and 1"
            )
        if init not in ("pytorch", "keras"):
            raise ValueError(f"LSTM: init is {init!r}; there are 'pytorch' and 'keras'")
        if peephole not in (None, "diagonal", "full"):
            raise ValueError(f"LSTM: peephole is {peephole!r}; there are 'diagonal' and 'full'")
        if not 0 <= dropout < 1:
            raise ValueError(f"LSTM: dropout is {dropout}, must be at least 0 and below 1")
        if embedding is not None and embedding.table.shape[1] != inputs:
            raise ValueError(f"LSTM: inputs is {inputs}, but the embedding has {embedding.table.shape[1]} features")
        self.embedding = embedding
        self.inputs, self.hidden, self.layers, self.bidirectional = inputs, hidden, layers, bidirectional
        self.dropout, self.recompute = dropout, recompute
        self.batch_first, self.output_gate_reads = batch_first, output_gate_reads
        self.activations = activations or rg.LstmActivations()
        self._weights: list[rg.LstmWeights] = []
        self._dweights: list[rg.LstmWeights] = []
        draw = generator(rng)
        directions = ("", "_reverse") if bidirectional else ("",)
        for layer in range(layers):
            for direction in directions:
                columns = inputs if layer == 0 else len(directions) * hidden
                cell = _new_cell(draw, columns, hidden, bias, peephole, forget_bias, init, dtype)
                setattr(self, f"layer{layer}{direction}", cell)
                self._weights.append(cell.weights())
                self._dweights.append(cell.dweights())
        if dropout:
            self.add_buffer("stream", new_stream(draw))
        self._need_weights = ["dwx", "dwh"] + ["db"] * bias + ["dpeephole"] * (peephole is not None)

    @property
    def state(self) -> LstmState:
        """The final states of the last forward pass."""
        return self._kept.get("state", _NO_STATE)  # type: ignore[no-any-return]

    @property
    def dstate(self) -> LstmState:
        """The gradients of the initial states, after backward, if forward was given any."""
        return self._kept.get("dstate", _NO_STATE)  # type: ignore[no-any-return]

    def forward(
        self,
        x: Array,
        state: LstmState | tuple[Array | None, Array | None] | None = None,
        *,
        lengths: npt.ArrayLike | None = None,
        batch_sizes: npt.ArrayLike | None = None,
    ) -> Array:
        """Run the sequences from the initial `state`, zeros if None; pass ``lstm.state`` to continue the last ones.

        `lengths` and `batch_sizes` are those of :func:`retrograd.lstm_forward`.
        """
        table = None
        if self.embedding is not None:
            x, table = self._look_up(x, self.embedding)
        elif x.ndim != 3 or x.shape[2] != self.inputs:
            axes = "(N, T, I)" if self.batch_first else "(T, N, I)"
            raise ValueError(f"LSTM.forward: x has shape {x.shape}, must be {axes} with I = {self.inputs}")
        steps, samples = (x.shape[1], x.shape[0]) if self.batch_first else x.shape[:2]
        h0, c0 = state if state is not None else (None, None)
        dtype = x.dtype if table is None else table.dtype
        # Two pairs of state buffers alternate, because the last final states may be this pass's initial ones.
        turn = 1 - self._kept.get("turn", 0)
        shape = (len(self._weights), samples, self.hidden)
        out = {
            "y": self.reuse("y", (*x.shape[:2], self.hidden * (1 + self.bidirectional)), dtype),
            "hn": self.reuse(f"h{turn}", shape, dtype),
            "cn": self.reuse(f"c{turn}", shape, dtype),
        }
        # Evaluation keeps no cache; a backward in evaluation mode recomputes forward.
        keeps = self.training and not self.recompute
        cache = self._cache_buffer(steps, samples, dtype, lengths, batch_sizes) if keeps else None
        drops = self.training and self.dropout > 0
        result = rg.lstm_forward(
            x,
            self._weights,
            h0,
            c0,
            table=table,
            bidirectional=self.bidirectional,
            batch_first=self.batch_first,
            lengths=lengths,
            batch_sizes=batch_sizes,
            activations=self.activations,
            output_gate_reads=self.output_gate_reads,
            dropout=self.dropout if drops else 0.0,
            seed=next_seed(self.stream) if drops else 0,
            recompute=not keeps,
            cache=cache,
            out=out,
            num_threads=self.num_threads,
        )
        if drops:
            self.stream[1] += 1
        self.keep(cache=result.cache, state=LstmState(result.hn, result.cn), turn=turn)
        return result.y

    def _look_up(self, x: Array, embedding: Embedding) -> tuple[Array, Array | None]:
        """Return indices and the table, or, if the indices are few, the looked-up rows and None."""
        x = np.asanyarray(x)
        if x.ndim != 2:
            axes = "(N, T)" if self.batch_first else "(T, N)"
            raise ValueError(f"LSTM.forward: x has shape {x.shape}, must be {axes}: there is an embedding")
        if x.size <= len(embedding.table):
            return embedding.forward(x), None
        return x, embedding.table

    def _cache_buffer(
        self,
        steps: int,
        samples: int,
        dtype: npt.DTypeLike,
        lengths: npt.ArrayLike | None,
        batch_sizes: npt.ArrayLike | None,
    ) -> Array:
        problem = (steps, samples, dtype) if lengths is None and batch_sizes is None else None
        known, size = self._kept.get("cache_size", (None, 0))
        if problem is None or known != problem:
            size = rg.lstm_cache_size(
                steps,
                samples,
                self.inputs,
                self.hidden,
                num_layers=self.layers,
                bidirectional=self.bidirectional,
                dtype=dtype,
                lengths=lengths,
                batch_sizes=batch_sizes,
            )
            self.keep(cache_size=(problem, size))
        return self.reuse("cache", (size,), np.uint8)

    def backward(
        self,
        dy: Array | None,
        dstate: LstmState | tuple[Array | None, Array | None] | None = None,
        *,
        accumulate: bool = False,
        need_dx: bool = True,
    ) -> Array | None:
        """Compute all gradients and return dx. `dstate` has the gradients of the final states, zeros if None."""
        cache: rg.LstmCache = self.kept("cache")
        dhn, dcn = dstate if dstate is not None else (None, None)
        embedding = self.embedding
        need_dx = need_dx or embedding is not None
        if embedding is not None and cache.has_table:
            dx: Array | None = embedding.dtable
        else:
            dx = self._gradient_buffer(cache, "dx") if need_dx else None
        dh0, dc0 = self._gradient_buffer(cache, "dh0"), self._gradient_buffer(cache, "dc0")
        need = None
        if not need_dx:
            need = self._need_weights + ["dh0"] * (dh0 is not None) + ["dc0"] * (dc0 is not None)
        if accumulate:
            for array in (dx, dh0, dc0):
                if array is not None and not (embedding is not None and array is embedding.dtable):
                    array.fill(0)
        rg.lstm_backward(
            dy,
            cache,
            dhn=dhn,
            dcn=dcn,
            need=need,
            out=rg.LstmGradients(dx, self._dweights, dh0, dc0),
            accumulate=accumulate,
            num_threads=self.num_threads,
        )
        self.keep(dstate=LstmState(dh0, dc0))
        if embedding is None:
            return dx
        if cache.has_table:
            embedding.keep_padding()
        else:
            assert dx is not None
            embedding.backward(dx, accumulate=accumulate)
        return None

    def _gradient_buffer(self, cache: rg.LstmCache, name: str) -> Array | None:
        shape = cache.gradient_shape(name)
        return None if shape is None else self.reuse(name, shape, cache.dtype)

    def describe(self) -> str:
        extra = f", dropout={self.dropout}" if self.dropout else ""
        return f"{self.inputs}, {self.hidden}, layers={self.layers}, bidirectional={self.bidirectional}{extra}"


def _new_cell(
    rng: np.random.Generator,
    inputs: int,
    hidden: int,
    bias: bool,
    peephole: str | None,
    forget_bias: float,
    init: str,
    dtype: npt.DTypeLike,
) -> LstmCell:
    cell, bound = LstmCell(), 1.0 / math.sqrt(hidden)
    wx_shape, wh_shape, b_shape = (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,)
    p_shape = wh_shape if peephole == "full" else b_shape
    if init == "pytorch":
        wx, wh, b, p = (uniform(rng, shape, bound, np.float64) for shape in (wx_shape, wh_shape, b_shape, p_shape))
    else:
        wx = uniform(rng, wx_shape, glorot_bound(inputs, 4 * hidden), np.float64)
        wh = orthogonal(rng, wh_shape, np.float64)
        b, p = np.zeros(b_shape), np.zeros(p_shape)
    b[hidden : 2 * hidden] += forget_bias
    cell.add_parameter("wx", wx.astype(dtype))
    cell.add_parameter("wh", wh.astype(dtype))
    if bias:
        cell.add_parameter("b", b.astype(dtype))
    if peephole is not None:
        cell.add_parameter("peephole", p.astype(dtype))
    return cell
