"""Single steps of recurrent cells: for generation, and for a caller's own loop over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import _args
from .._call import public
from .._errors import ArgumentTypeError, ArgumentValueError
from .._types import Array
from .backward import LstmGradients, RecurrentGradients, gru_backward, lstm_backward, rnn_backward
from .cache import GruCache, LstmCache, RnnCache
from .forward import gru_forward, lstm_forward, rnn_forward
from .types import GruWeights, LstmWeights, RnnWeights


class LstmStep(NamedTuple):
    """The states after a step, and the cache (None in inference)."""

    h: Array
    c: Array
    cache: LstmCache | Any


class GruStep(NamedTuple):
    """The state after a step, and the cache (None in inference)."""

    h: Array
    cache: GruCache | Any


class RnnStep(NamedTuple):
    """The state after a step, and the cache (None in inference)."""

    h: Array
    cache: RnnCache | Any


@public
def lstm_step(
    x: Array, weights: LstmWeights | Sequence[Any], h: Array | None = None, c: Array | None = None, **options: Any
) -> LstmStep:
    """One step of an LSTM: the states after x ``[N, I]``, from the states h and c, 0 by default.

    `weights` and `options` are those of :func:`lstm_forward` for a sequence of one step. Of several layers, the output
    is the last of the states, ``h[-1]``.
    """
    _, hn, cn, cache = _plain(lstm_forward)(_sequence(x), weights, h, c, **_checked(options))
    return LstmStep(hn, cn, cache)


@public
def gru_step(x: Array, weights: GruWeights | Sequence[Any], h: Array | None = None, **options: Any) -> GruStep:
    """One step of a GRU; see :func:`lstm_step`."""
    _, hn, cache = _plain(gru_forward)(_sequence(x), weights, h, **_checked(options))
    return GruStep(hn, cache)


@public
def rnn_step(x: Array, weights: RnnWeights | Sequence[Any], h: Array | None = None, **options: Any) -> RnnStep:
    """One step of an RNN; see :func:`lstm_step`."""
    _, hn, cache = _plain(rnn_forward)(_sequence(x), weights, h, **_checked(options))
    return RnnStep(hn, cache)


@public
def lstm_step_backward(dh: Array | None, dc: Array | None, cache: LstmCache, **options: Any) -> LstmGradients:
    """Gradients of :func:`lstm_step` from those of its states, each of which may be None for zeros.

    ``dh0`` and ``dc0`` are the gradients of the states before the step. `options` are those of :func:`lstm_backward`.
    """
    found: LstmGradients = _plain(lstm_backward)(None, cache, dhn=dh, dcn=dc, **_with_time(options))
    return found._replace(dx=_row(found.dx))


@public
def gru_step_backward(dh: Array | None, cache: GruCache, **options: Any) -> RecurrentGradients:
    """Gradients of :func:`gru_step` from that of its state; see :func:`lstm_step_backward`."""
    found: RecurrentGradients = _plain(gru_backward)(None, cache, dhn=dh, **_with_time(options))
    return found._replace(dx=_row(found.dx))


@public
def rnn_step_backward(dh: Array | None, cache: RnnCache, **options: Any) -> RecurrentGradients:
    """Gradients of :func:`rnn_step` from that of its state; see :func:`lstm_step_backward`."""
    found: RecurrentGradients = _plain(rnn_backward)(None, cache, dhn=dh, **_with_time(options))
    return found._replace(dx=_row(found.dx))


def _plain(function: Any) -> Any:
    """A public function without its wrapper: errors name the step, and arrays of other libraries are views already."""
    return function.__wrapped__


def _sequence(x: object) -> Array:
    array = _args.as_array("x", x)
    if array.ndim != 2:
        raise ArgumentValueError("x", "{x} has shape {}, must have the 2 axes (N, I)", array.shape)
    return array[None]


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name in ("table", "bidirectional", "batch_first", "lengths", "batch_sizes", "reset"):
        if name in options:
            raise ArgumentValueError(name, "{argument} is given, but it concerns sequences, and this is one step")
    return options


def _with_time(options: dict[str, Any]) -> dict[str, Any]:
    """The options of backward, with a buffer for dx of one step."""
    out = options.get("out")
    found = out._asdict() if isinstance(out, (LstmGradients, RecurrentGradients)) else out
    if not isinstance(found, Mapping) or found.get("dx") is None:
        return options
    dx = found["dx"]
    if not isinstance(dx, np.ndarray):
        raise ArgumentTypeError("out.dx", "{argument} must be an ndarray, not {}", type(dx))
    return {**options, "out": {**found, "dx": dx[None]}}


def _row(dx: Array | None) -> Array | None:
    return None if dx is None else dx[0]
