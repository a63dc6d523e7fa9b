"""Swift's ``RandomGenerator``."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from . import _constants as c
from ._failure import last_error, raising
from ._random import (
    BNNSCreateRandomGenerator,
    BNNSCreateRandomGeneratorWithSeed,
    BNNSRandomGeneratorGetState,
    BNNSRandomGeneratorSetState,
    BNNSRandomGeneratorStateSize,
)
from ._structures import BNNSFilterParameters
from ._swift import BNNSError, checked_call


class RandomGeneratorMethod(enum.Enum):
    """How numbers are drawn."""

    aesCtr = c.BNNSRandomGeneratorMethodAES_CTR


class RandomGenerator:
    """A random generator, with a random seed if none is given."""

    def __init__(
        self,
        *,
        method: RandomGeneratorMethod,
        seed: int | None = None,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        with raising():
            if seed is None:
                made = BNNSCreateRandomGenerator(method.value, filterParameters)
            else:
                made = BNNSCreateRandomGeneratorWithSeed(method.value, seed, filterParameters)
        if made is None:
            raise BNNSError("unableToCreateLayer", last_error())
        self.bnnsRandomGenerator = made

    @property
    def state(self) -> bytes:
        """What the generator continues from. Setting it makes this one continue as another did."""
        state = bytearray(BNNSRandomGeneratorStateSize(self.bnnsRandomGenerator))
        checked_call(BNNSRandomGeneratorGetState, self.bnnsRandomGenerator, len(state), state)
        return bytes(state)

    @state.setter
    def state(self, state: bytes) -> None:
        checked_call(BNNSRandomGeneratorSetState, self.bnnsRandomGenerator, len(state), state)

    def fill(self, function: Callable[..., int], *arguments: Any) -> None:
        """Call a C function that fills an array; raise if it fails."""
        checked_call(function, self.bnnsRandomGenerator, *arguments)
