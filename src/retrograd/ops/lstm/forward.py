"""LSTM forward, and the cache of a forward pass that ran elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import _core
from .. import _args, _memory
from .._arrays import same_elements
from .._call import public
from .._errors import ArgumentName, ArgumentTypeError, ArgumentValueError
from .._types import BYTE, Array
from .cache import STAMPS, LstmCache, as_buffer, check_filled, new_cache
from .problem import Inputs, as_counts, bind, check_fits, checked_inputs, dtype_code, run_forward
from .types import Buffer, LstmActivations, Weights


class LstmResult(NamedTuple):
    """Outputs of forward: ``y`` of the last layer, final states of every cell, and the cache (None in inference)."""

    y: Array
    hn: Array
    cn: Array
    cache: LstmCache | None


_STANDARD: Final = LstmActivations()
_new_result: Final[Callable[[tuple[Any, ...]], LstmResult]] = partial(tuple.__new__, LstmResult)


@public
def lstm_forward(
    x: Array,
    weights: Weights,
    h0: Array | None = None,
    c0: Array | None = None,
    *,
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    activations: LstmActivations = _STANDARD,
    output_gate_reads: str = "new",
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

    `dropout` is the fraction of outputs dropped between layers in training; the same `seed` drops the same elements.
    With ``output_gate_reads="old"`` the output gate's peephole reads the previous cell state.

    In training the result has a cache for :func:`lstm_backward`, stored in the buffer `cache` if given
    (:func:`lstm_cache_size` bytes). With `recompute` nothing is stored, and backward runs forward again. `out` is a
    buffer for ``y``, or a mapping with buffers for any of ``y``, ``hn`` and ``cn``; ``hn`` may be ``h0``, and ``cn``
    may be ``c0``.
    """
    inputs = bind(
        x,
        weights,
        h0,
        c0,
        table,
        bidirectional,
        batch_first,
        lengths,
        batch_sizes,
        activations,
        output_gate_reads,
        dropout,
        seed,
        training,
    )
    return forward_bound(inputs, training, recompute, cache, out, num_threads, next(STAMPS))


def forward_bound(
    inputs: Inputs,
    training: bool,
    recompute: bool,
    cache: Buffer | None,
    out: Array | Mapping[str, Array | None] | None,
    num_threads: int | None,
    stamp: int,
) -> LstmResult:
    """:func:`lstm_forward` with inputs from `bind`, which may be kept for many passes. `stamp` marks the cache."""
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
    if out is None:
        y = _memory.empty(problem.y_shape, problem.dtype)
        hn, cn = np.empty(problem.state_shape, problem.dtype), np.empty(problem.state_shape, problem.dtype)
    else:
        y, hn, cn = _outputs(inputs, out, recompute and training)
    inputs = run_forward(inputs, buffer, stamp, problem.sequence(y), problem.states(hn), problem.states(cn), threads)
    return _new_result((y, hn, cn, new_cache((inputs, buffer, stamp)) if training else None))


@public
def lstm_cache(
    x: Array,
    weights: Weights,
    h0: Array | None = None,
    c0: Array | None = None,
    *,
    table: Array | None = None,
    bidirectional: bool = False,
    batch_first: bool = False,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
    activations: LstmActivations = _STANDARD,
    output_gate_reads: str = "new",
    dropout: float = 0.0,
    seed: int = 0,
    buffer: Buffer | bytes | None = None,
) -> LstmCache:
    """The cache of a forward pass with these arguments, without running it.

    `buffer` is the buffer that such a pass filled, here or elsewhere. Without it, backward runs forward again.
    """
    inputs = bind(
        x,
        weights,
        h0,
        c0,
        table,
        bidirectional,
        batch_first,
        lengths,
        batch_sizes,
        activations,
        output_gate_reads,
        dropout,
        seed,
        True,
    )
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
    num_layers: int = 1,
    bidirectional: bool = False,
    dtype: npt.DTypeLike = np.float32,
    lengths: npt.ArrayLike | None = None,
    batch_sizes: npt.ArrayLike | None = None,
) -> int:
    """The size of a forward pass's cache in bytes. A ragged batch needs less: pass its `lengths` or `batch_sizes`."""
    sizes = {"seq_len": seq_len, "batch_size": batch_size, "input_size": input_size}
    steps, samples, inputs = (_args.as_count(name, value, least=0) for name, value in sizes.items())
    units = _args.as_count("hidden_size", hidden_size)
    layers = _args.as_count("num_layers", num_layers)
    directions = 2 if bidirectional else 1
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ArgumentTypeError("dtype", "{dtype} is {!r}: {}", dtype, str(error)) from None
    code = dtype_code("the array", kind)
    check_fits(steps, samples, inputs, units, layers * directions)
    rows = steps * samples
    if lengths is not None and batch_sizes is not None:
        raise ArgumentValueError("lengths", "{lengths} and {batch_sizes} are both given; one of them is enough")
    if lengths is not None:
        rows = int(as_counts("lengths", lengths, samples, "samples", steps, "steps").sum())
    if batch_sizes is not None:
        rows = int(as_counts("batch_sizes", batch_sizes, steps, "steps", samples, "samples").sum())
    nothing = [(0, 0.0, 0.0)] * 5
    engine = _core.LstmProblem(steps, samples, inputs, units, layers, directions, code, nothing, 0, False, 0.0)
    return engine.cache_bytes(rows)


def _outputs(inputs: Inputs, out: Array | Mapping[str, Array | None], recomputes: bool) -> tuple[Array, Array, Array]:
    """The arrays that y, hn and cn are written to."""
    problem = inputs.problem
    found = {"y": problem.y_shape, "hn": problem.state_shape, "cn": problem.state_shape}
    given = out if isinstance(out, Mapping) else {"y": out}
    for name in given.keys() - found.keys():
        raise ArgumentValueError("out", "{out} has {!r}; the outputs are {y}, {hn} and {cn}", name)
    results = []
    for name, shape in found.items():
        buffer = given.get(name)
        if buffer is None:
            buffer = _memory.empty(shape, problem.dtype)
        else:
            _args.check_result(f"out.{name}", buffer, shape, problem.dtype)
        results.append(buffer)
    if recomputes:
        for name, before, after in (("h", inputs.h0, results[1]), ("c", inputs.c0, results[2])):
            if before is not None and same_elements(before, problem.states(after)):
                raise ArgumentValueError(
                    f"out.{name}n",
                    "{argument} is in the place of {}, which backward needs with {recompute}=True",
                    ArgumentName(f"{name}0"),
                )
    return results[0], results[1], results[2]
