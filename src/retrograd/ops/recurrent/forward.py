"""Forward passes of recurrent layers, and the cache of a forward pass that ran elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ... import _core
from .. import _args, _memory
from .._arrays import same_elements
from .._call import public
from .._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from .._types import BYTE, Array
from ..activation import Activation
from .cache import STAMPS, GruCache, LstmCache, RnnCache, as_buffer, check_filled, new_cache
from .factors import Factors, Zoneout
from .problem import Inputs, Sequences, as_counts, bind, check_fits, checked_inputs, dtype_code, run_forward
from .types import (
    GRU,
    LSTM,
    RNN,
    Buffer,
    CellOptions,
    CellType,
    GruActivations,
    GruWeights,
    LstmActivations,
    LstmWeights,
    RnnActivations,
    RnnWeights,
)


class LstmResult(NamedTuple):
    """Outputs of forward: ``y`` of the last layer, final states of every cell, and the cache (None in inference)."""

    y: Array
    hn: Array
    cn: Array
    cache: LstmCache | Any


class GruResult(NamedTuple):
    """Outputs of forward: ``y`` of the last layer, final states of every cell, and the cache (None in inference)."""

    y: Array
    hn: Array
    cache: GruCache | Any


class RnnResult(NamedTuple):
    """Outputs of forward: ``y`` of the last layer, final states of every cell, and the cache (None in inference)."""

    y: Array
    hn: Array
    cache: RnnCache | Any


_LSTM: Final = CellOptions("lstm", LstmActivations())
_GRU: Final = CellOptions("gru", GruActivations())
_RNN: Final = CellOptions("rnn", RnnActivations())
# tuple.__new__ takes half the time of a NamedTuple's constructor.
_new_lstm_result: Final[Callable[[tuple[Any, ...]], LstmResult]] = partial(tuple.__new__, LstmResult)
_new_options: Final[Callable[[tuple[Any, ...]], CellOptions]] = partial(tuple.__new__, CellOptions)
_new_sequences: Final[Callable[[tuple[Any, ...]], Sequences]] = partial(tuple.__new__, Sequences)


@public
def lstm_forward(
    x: Array,
    weights: LstmWeights | Sequence[Any],
    h0: Array | None = None,
    c0: Array | None = None,
    *,
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    activations: LstmActivations = LstmActivations(),  # noqa: B008 (immutable)
    output_gate_reads: str = "new",
    coupled: bool = False,
    clip: float | None = None,
    cell_clip: float | None = None,
    norm: Literal["haste", "cell"] | None = None,
    norm_eps: float = 1e-5,
    reset: npt.ArrayLike | None = None,
    mask: Array | None = None,
    zoneout: Zoneout | tuple[Zoneout | None, Zoneout | None] | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    training: bool = True,
    recompute: bool = False,
    cache: Buffer | None = None,
    out: Array | Mapping[str, Array | None] | None = None,
    num_threads: int | None = None,
) -> LstmResult:
    """Run an LSTM over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `weights` is the :class:`LstmWeights` of a single cell, with states ``[N, H]``; or a sequence of them, one per layer
    and direction (layer-major), with states ``[cells, N, H]``. States default to 0.

    With a `table` ``[rows, I]``, x holds integers ``[T, N]`` (``[N, T]``), and the input is ``table[x]``: an embedding.
    If x is larger than the table, this is faster than a separate lookup, because each row of the table is multiplied by
    the weights only once. ``dx`` is then the gradient of the table.

    `lengths` (``[N]``, any order, 0 allowed) gives the length of each sample's sequence; `batch_sizes` (``[T]``) gives
    the number of samples, counted from the first, that are active in each step. Inactive samples have output 0 and keep
    their states.

    Inside the recurrence: `reset` (``[T, N]``) sets the states to 0 before the steps where it is true. `mask`
    multiplies the hidden state in the recurrent products; it broadcasts to ``[cells, gates, T, N, H]``. `zoneout` keeps
    a fraction of the hidden state, or with a pair of rates also of the cell state; an array instead of a rate, which
    broadcasts to ``[cells, T, N, H]``, holds the weights of the new state. `clip` bounds the inputs of the gates'
    activations, `cell_clip` the cell state. With `coupled`, ``f = 1 - i``. `norm` is layer normalization of the gates
    and of the cell state, where the output reads it ("haste") or of the cell state itself ("cell").

    `dropout` is the fraction of outputs dropped between layers in training; the same `seed` drops the same elements.
    With ``output_gate_reads="old"`` the output gate's peephole reads the previous cell state.

    In training the result has a cache for :func:`lstm_backward`, stored in the buffer `cache` if given
    (:func:`lstm_cache_size` bytes). With `recompute` nothing is stored, and backward runs forward again. `out` is a
    buffer for ``y``, or a mapping with buffers for any of ``y``, ``hn`` and ``cn``; ``hn`` may be ``h0``, and ``cn``
    may be ``c0``.
    """
    options = _new_options(
        ("lstm", activations, "after", False, output_gate_reads, bool(coupled), clip, cell_clip, norm, norm_eps)
    )
    sequences = _new_sequences((table, bidirectional, batch_first, lengths, batch_sizes, dropout, seed))
    inputs = bind(x, weights, h0, c0, options, sequences, training, _factors(reset, mask, zoneout))
    return forward_bound(inputs, training, recompute, cache, out, num_threads, next(STAMPS))


@public
def gru_forward(
    x: Array,
    weights: GruWeights | Sequence[Any],
    h0: Array | None = None,
    *,
    kind: Literal["after", "before"] = "after",
    flip: bool = False,
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    activations: GruActivations = GruActivations(),  # noqa: B008 (immutable)
    clip: float | None = None,
    norm: Literal["haste"] | None = None,
    norm_eps: float = 1e-5,
    reset: npt.ArrayLike | None = None,
    mask: Array | None = None,
    zoneout: Zoneout | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    training: bool = True,
    recompute: bool = False,
    cache: Buffer | None = None,
    out: Array | Mapping[str, Array | None] | None = None,
    num_threads: int | None = None,
) -> GruResult:
    """Run a GRU over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `kind` says where the reset gate acts: "after" the product with the state, as in PyTorch and cuDNN, or "before" it,
    on the state itself. With `flip` the gate z weighs the new state, ``h = z n + (1 - z) h``, not the old one.

    `weights` is the :class:`GruWeights` of a single cell or a sequence of them. All other arguments, and `out` for
    ``y`` and ``hn``, are those of :func:`lstm_forward`; `norm` has one place. The cache is for :func:`gru_backward`.
    """
    options = _new_options(("gru", activations, kind, bool(flip), "new", False, clip, None, norm, norm_eps))
    sequences = _new_sequences((table, bidirectional, batch_first, lengths, batch_sizes, dropout, seed))
    inputs = bind(x, weights, h0, None, options, sequences, training, _factors(reset, mask, zoneout))
    y, hn, _, kept = forward_bound(inputs, training, recompute, cache, out, num_threads, next(STAMPS))
    return tuple.__new__(GruResult, (y, hn, kept))


@public
def rnn_forward(
    x: Array,
    weights: RnnWeights | Sequence[Any],
    h0: Array | None = None,
    *,
    activation: str | Activation = "tanh",
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    clip: float | None = None,
    norm: Literal["haste"] | None = None,
    norm_eps: float = 1e-5,
    reset: npt.ArrayLike | None = None,
    mask: Array | None = None,
    zoneout: Zoneout | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    training: bool = True,
    recompute: bool = False,
    cache: Buffer | None = None,
    out: Array | Mapping[str, Array | None] | None = None,
    num_threads: int | None = None,
) -> RnnResult:
    """Run an RNN, ``h = f(x wx' + h wh' + b)``, over ``x [T, N, I]`` (``[N, T, I]`` if `batch_first`).

    `activation` is f: tanh, relu or any other. `weights` is the :class:`RnnWeights` of a single cell or a sequence of
    them. All other arguments, and `out` for ``y`` and ``hn``, are those of :func:`lstm_forward`; `norm` has one place.
    The cache is for :func:`rnn_backward`.
    """
    functions = RnnActivations(activation)
    options = _new_options(("rnn", functions, "after", False, "new", False, clip, None, norm, norm_eps))
    sequences = _new_sequences((table, bidirectional, batch_first, lengths, batch_sizes, dropout, seed))
    inputs = bind(x, weights, h0, None, options, sequences, training, _factors(reset, mask, zoneout))
    y, hn, _, kept = forward_bound(inputs, training, recompute, cache, out, num_threads, next(STAMPS))
    return tuple.__new__(RnnResult, (y, hn, kept))


def _factors(reset: Any, mask: Any, zoneout: Any) -> Factors | None:
    if reset is None and mask is None and zoneout is None:
        return None
    return Factors(reset, mask, zoneout)


def forward_bound(
    inputs: Inputs,
    training: bool,
    recompute: bool,
    cache: Buffer | None,
    out: Array | Mapping[str, Array | None] | None,
    num_threads: int | None,
    stamp: int,
) -> LstmResult:
    """A forward pass with inputs from `bind`, which may be kept for many passes. `stamp` marks the cache.

    ``cn`` is None for a cell without cell states.
    """
    problem = inputs.problem
    threads = 0 if num_threads is None else _args.thread_count(num_threads)
    buffer = None
    if cache is not None:
        if recompute or not training:
            why = "recompute=True" if recompute else "training=False"
            raise ArgumentValueError("cache", "{cache} is given, but {} keeps none", why)
        buffer = as_buffer("cache", inputs, cache)
        if not buffer.flags.writeable:
            raise ArgumentValueError("cache", "{cache} is read-only")
    elif training and not recompute:
        buffer = _memory.empty((problem.cache_bytes(inputs.active),), BYTE)
    cn: Array | None = None
    if out is None:
        y = _memory.empty(problem.y_shape, problem.dtype)
        hn = np.empty(problem.h_shape, problem.dtype)
        if problem.cell.has_cells:
            cn = np.empty(problem.c_shape, problem.dtype)
    else:
        y, hn, cn = _outputs(inputs, out, recompute and training)
    to_cn = None if cn is None else problem.states(cn)
    inputs = run_forward(inputs, buffer, stamp, problem.sequence(y), problem.states(hn), to_cn, threads)
    return _new_lstm_result((y, hn, cn, new_cache((inputs, buffer, stamp)) if training else None))


def _outputs(
    inputs: Inputs, out: Array | Mapping[str, Array | None], recomputes: bool
) -> tuple[Array, Array, Array | None]:
    """The arrays that y, hn and cn are written to."""
    problem = inputs.problem
    found = {"y": problem.y_shape, "hn": problem.h_shape}
    if problem.cell.has_cells:
        found["cn"] = problem.c_shape
    given = out if isinstance(out, Mapping) else {"y": out}
    for name in given.keys() - found.keys():
        outputs = "{y}, {hn} and {cn}" if problem.cell.has_cells else "{y} and {hn}"
        raise ArgumentValueError("out", f"{{out}} has {{!r}}; the outputs are {outputs}", name)
    results = []
    for name, shape in found.items():
        buffer = given.get(name)
        if buffer is None:
            buffer = _memory.empty(shape, problem.dtype)
        else:
            _args.check_result(f"out.{name}", buffer, shape, problem.dtype)
        results.append(buffer)
    if recomputes:
        for name, before, after in zip(("h", "c"), (inputs.h0, inputs.c0), results[1:], strict=False):
            if before is not None and same_elements(before, problem.states(after)):
                raise ArgumentValueError(
                    f"out.{name}n",
                    "{argument} is in the place of {}, which backward needs with {recompute}=True",
                    ArgumentName(f"{name}0"),
                )
    return results[0], results[1], results[2] if problem.cell.has_cells else None


# ---- caches of passes that ran elsewhere ----------------------------------------------------------------------------


@public
def lstm_cache(
    x: Array,
    weights: LstmWeights | Sequence[Any],
    h0: Array | None = None,
    c0: Array | None = None,
    *,
    buffer: Buffer | bytes | None = None,
    **options: Any,
) -> LstmCache:
    """The cache of a forward pass with these arguments, without running it.

    `options` are those of :func:`lstm_forward` that concern the values. `buffer` is the buffer that such a pass filled,
    here or elsewhere. Without it, backward runs forward again.
    """
    return cast(LstmCache, _cache(_LSTM, x, weights, h0, c0, buffer, options))


@public
def gru_cache(
    x: Array,
    weights: GruWeights | Sequence[Any],
    h0: Array | None = None,
    *,
    buffer: Buffer | bytes | None = None,
    **options: Any,
) -> GruCache:
    """As :func:`lstm_cache`, for :func:`gru_forward`."""
    return cast(GruCache, _cache(_GRU, x, weights, h0, None, buffer, options))


@public
def rnn_cache(
    x: Array,
    weights: RnnWeights | Sequence[Any],
    h0: Array | None = None,
    *,
    buffer: Buffer | bytes | None = None,
    **options: Any,
) -> RnnCache:
    """As :func:`lstm_cache`, for :func:`rnn_forward`."""
    if "activation" in options:
        options["activations"] = RnnActivations(options.pop("activation"))
    return cast(RnnCache, _cache(_RNN, x, weights, h0, None, buffer, options))


def _cache(standard: CellOptions, x: Any, weights: Any, h0: Any, c0: Any, buffer: Any, options: dict[str, Any]) -> Any:
    own = {name: options.pop(name) for name in CellOptions._fields if name in options}
    sequences = {name: options.pop(name) for name in Sequences._fields if name in options}
    factors = _factors(*(options.pop(name, None) for name in Factors._fields))
    for name in options:
        raise ArgumentTypeError(name, "{argument} is not an option of {}", standard.cell + "_forward")
    inputs = bind(x, weights, h0, c0, standard._replace(**own), Sequences(**sequences), True, factors)
    inputs = checked_inputs(inputs)
    if buffer is None:
        return new_cache((inputs, None, None))
    kept = as_buffer("buffer", inputs, buffer)
    check_filled(inputs.problem.engine.check_cache(inputs, kept, None))
    return new_cache((inputs, kept, None))


@public
def lstm_cache_size(
    seq_len: int,
    batch_size: int,
    input_size: int,
    hidden_size: int,
    *,
    projection: int = 0,
    num_layers: int = 1,
    bidirectional: bool = False,
    dtype: npt.DTypeLike = np.float32,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
) -> int:
    """The size of a forward pass's cache in bytes. A ragged batch needs less: pass its `lengths` or `batch_sizes`.

    With a mask or layer normalization it is larger: ``lstm_cache(...).size``.
    """
    sizes = (seq_len, batch_size, input_size, hidden_size, num_layers)
    return _cache_size(LSTM, sizes, projection, bidirectional, dtype, lengths, batch_sizes)


@public
def gru_cache_size(
    seq_len: int,
    batch_size: int,
    input_size: int,
    hidden_size: int,
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    dtype: npt.DTypeLike = np.float32,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
) -> int:
    """As :func:`lstm_cache_size`, for :func:`gru_forward`."""
    sizes = (seq_len, batch_size, input_size, hidden_size, num_layers)
    return _cache_size(GRU, sizes, 0, bidirectional, dtype, lengths, batch_sizes)


@public
def rnn_cache_size(
    seq_len: int,
    batch_size: int,
    input_size: int,
    hidden_size: int,
    *,
    num_layers: int = 1,
    bidirectional: bool = False,
    dtype: npt.DTypeLike = np.float32,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
) -> int:
    """As :func:`lstm_cache_size`, for :func:`rnn_forward`."""
    sizes = (seq_len, batch_size, input_size, hidden_size, num_layers)
    return _cache_size(RNN, sizes, 0, bidirectional, dtype, lengths, batch_sizes)


def _cache_size(
    cell: CellType,
    sizes: tuple[int, ...],
    projection: int,
    bidirectional: bool,
    dtype: Any,
    lengths: Any,
    batch_sizes: Any,
) -> int:
    names = ("seq_len", "batch_size", "input_size", "hidden_size", "num_layers")
    least = (0, 0, 0, 1, 1)
    steps, samples, inputs, units, layers = (
        _args.as_count(name, value, least=smallest) for name, value, smallest in zip(names, sizes, least, strict=True)
    )
    projection = _args.as_count("projection", projection, least=0)
    if projection > units:
        raise ArgumentValueError(
            "projection", "{projection} is {}, must be at most {hidden_size} = {}", projection, units
        )
    directions = 2 if bidirectional else 1
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError("dtype", "{dtype} is {!r}: {}", dtype, str(error)) from None
    code = dtype_code("the array", kind, cell)
    check_fits(steps, samples, inputs, units, layers * directions)
    rows = steps * samples
    if lengths is not None and batch_sizes is not None:
        raise ArgumentValueError("lengths", "{lengths} and {batch_sizes} are both given; one of them is enough")
    if lengths is not None:
        rows = int(as_counts("lengths", lengths, samples, "samples", steps, "steps").sum())
    if batch_sizes is not None:
        rows = int(as_counts("batch_sizes", batch_sizes, steps, "steps", samples, "samples").sum())
    nothing = [(0, 0.0, 0.0)] * len(cell.activations._fields)
    engine_code = {"lstm": 0, "gru": 1, "rnn": 3}[cell.name]
    engine = _core.RecurrentProblem(
        engine_code, steps, samples, inputs, units, projection, layers, directions, code, nothing,
        0, False, False, False, 0.0, 0.0, 0, 0.0, 0, False, 0.0,
    )  # fmt: skip
    return engine.cache_bytes(rows)
