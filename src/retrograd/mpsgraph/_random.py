"""Random tensors and dropout. A graph draws other numbers in every run, and the same ones in every process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import graph as G
from ._types import MPSGraphRandomDistribution, MPSGraphRandomOpDescriptor, as_dtype

Tensor = G.Tensor


def dropout(x: Tensor, *, rate: float, counter: G.Variable) -> Tensor:
    """Elements set to 0 with probability `rate`, and the others divided by ``1 - rate``."""
    return G.dropout(x, rate, seed=G.next_count(counter))


dropout.stateful = True  # type: ignore[attr-defined]


def _draw(shape: Sequence[int], descriptor: MPSGraphRandomOpDescriptor | None, seed: Any) -> Tensor:
    d: Any = descriptor or MPSGraphRandomOpDescriptor()
    dtype = as_dtype("the descriptor's dataType", d._dataType)
    if d._distribution == MPSGraphRandomDistribution.normal:
        return G.random_normal(shape, d._mean, d._standardDeviation, seed, dtype)
    if d._distribution == MPSGraphRandomDistribution.truncatedNormal:
        return G.truncated_normal(shape, d._mean, d._standardDeviation, d._min, d._max, seed, dtype)
    if dtype.kind == "i":
        return G.random_integers(shape, d._minInteger, d._maxInteger, seed, dtype)
    return G.random_uniform(shape, d._min, d._max, seed, dtype)


def random(
    *, shape: Sequence[int], counter: G.Variable, descriptor: MPSGraphRandomOpDescriptor | None = None
) -> Tensor:
    """Random elements, by default uniform in [0, 1): other ones in every run."""
    return _draw(shape, descriptor, G.next_count(counter))


random.stateful = True  # type: ignore[attr-defined]


def random_seed(*, shape: Sequence[int], seed: int, descriptor: MPSGraphRandomOpDescriptor | None = None) -> Tensor:
    """Random elements that the seed determines: the same in every run."""
    return _draw(shape, descriptor, G.constant(np.asarray(_signed(seed, 64), np.int64)))


def random_state(
    state: Tensor, *, shape: Sequence[int], descriptor: MPSGraphRandomOpDescriptor | None = None
) -> tuple[Tensor, Tensor]:
    """Random elements that a Philox state determines, and the state after them."""
    d: Any = descriptor or MPSGraphRandomOpDescriptor()
    values, after = G.philox(shape, state)
    if d._distribution == MPSGraphRandomDistribution.uniform and as_dtype("dataType", d._dataType) == np.float32:
        return G.add(G.multiply(values, d._max - d._min), d._min), after
    return _draw(shape, descriptor, _seed_of(state)), after


def _seed_of(state: Tensor) -> Tensor:
    """A seed for each state: the key, mixed with the counter."""
    words = G.cast(state, np.int64)
    key = G.bitwise_xor(G.left_shift(words[6], 32), words[5])
    return G.bitwise_xor(key, G.bitwise_xor(G.left_shift(words[4], 32), G.bitwise_xor(words[3], words[2])))


def _signed(number: int, bits: int) -> int:
    """The number modulo 2**bits, as a signed integer."""
    low = number & ((1 << bits) - 1)
    return low - (1 << bits) if low >> (bits - 1) else low


def philox_state(*, seed: int) -> Tensor:
    """The state, int32 [7], of a Philox generator with a seed."""
    return philox_state_of(counterLow=0, counterHigh=0, key=seed)


def philox_state_of(*, counterLow: int, counterHigh: int, key: int) -> Tensor:
    """The state of a Philox generator: 1, the counter from its high word to its low one, the key from low to high."""
    words = [counterHigh >> 32, counterHigh, counterLow >> 32, counterLow, key, key >> 32]
    return G.constant(np.asarray([1, *(_signed(word, 32) for word in words)], np.int32))
