"""What tests of the oracle share: activations with parameters, finite differences, and an LSTM in JAX.

Nothing here may import the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from retrograd.lab.reference import LstmCell
from support.arrays import Array

LONG_EPS = float(np.finfo(np.longdouble).eps)
EPS = 2.0**-52
# name: (alpha, beta, kinks of f). Parameters put every piece of f within reach of normalized data; a kink is any point
# where some derivative jumps, since finite differences see them all (elu and softsign bend at 0 in the second).
CASES: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "identity": (0.0, 0.0, ()),
    "relu": (0.0, 0.0, (0.0,)),
    "leaky_relu": (0.2, 0.0, (0.0,)),
    "sigmoid": (0.0, 0.0, ()),
    "tanh": (0.0, 0.0, ()),
    "scaled_tanh": (1.7, 0.6, ()),
    "linear": (-1.3, 0.0, ()),
    "clamp": (-0.7, 0.9, (-0.7, 0.9)),
    "hard_sigmoid": (0.4, 0.45, (-1.125, 1.375)),
    "softplus": (0.8, 1.4, ()),
    "softsign": (0.0, 0.0, (0.0,)),
    "elu": (0.7, 0.0, (0.0,)),
    "clamped_leaky_relu": (0.3, 0.8, (0.0, 0.8)),
    "linear_with_bias": (0.6, -0.4, ()),
    "log_sigmoid": (0.0, 0.0, ()),
    "selu": (0.0, 0.0, (0.0,)),
    "celu": (1.5, 0.0, (0.0,)),  # exact in float32: PyTorch's celu gradient rounds alpha to it
    "hard_shrink": (0.5, 0.0, (-0.5, 0.5)),
    "soft_shrink": (0.5, 0.0, (-0.5, 0.5)),
    "tanh_shrink": (0.0, 0.0, ()),
    "threshold": (0.3, -0.2, (0.3,)),
    "relu6": (0.0, 0.0, (0.0, 6.0)),
}
# Likewise, of those whose slope needs the input.
INPUT_CASES: dict[str, tuple[float, float, tuple[float, ...]]] = {
    "abs": (0.0, 0.0, (0.0,)),
    "gelu_tanh": (0.7978845608028654, 0.044715, ()),
    "hard_swish": (0.0, 0.0, (-3.0, 3.0)),
    "silu": (0.0, 0.0, ()),
    "erf": (0.0, 0.0, ()),
    "gelu": (0.0, 0.0, ()),
    "gelu_sigmoid": (0.0, 0.0, ()),
    "closed_hard_sigmoid": (0.4, 0.45, (-1.125, 1.375)),
}
EVERY_CASE = CASES | INPUT_CASES


def slope_along(f: Callable[[Array], Any], x: Array, direction: Array, step: float = 1e-4) -> float:
    """The directional derivative by differences of the fourth order."""
    near, far = (float(f(x + h * direction) - f(x - h * direction)) for h in (step, 2 * step))
    return (8 * near - far) / (12 * step)


def assert_close(got: Any, expected: Any, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got.astype(np.longdouble), expected.astype(np.longdouble), atol=atol, rtol=rtol)


# Fourth-order central differences: truncation goes as h^4, rounding as eps/h, so h = eps^(1/5) balances both at
# eps^(4/5), which is 6e-16 for an 80-bit long double.
STEP = np.longdouble(LONG_EPS) ** np.longdouble(0.2)
STENCIL = ((-2, 1), (-1, -8), (1, 8), (2, -1))
ORDER = LONG_EPS**0.8


def derivative(f: Callable[[Any], Any]) -> Any:
    """f'(0), where f maps a step to values."""
    return sum(weight * f(k * STEP) for k, weight in STENCIL) / (12 * STEP)


def jax_lstm(jax: Any, net: Any, active: Array, directions: int, output_reads: str) -> tuple[Any, Any, Any]:
    """The textbook LSTM as scans over time, for JAX to differentiate."""
    jnp = jax.numpy
    x, cells, h0, c0 = net

    def see(p: Any, c: Any) -> Any:
        return 0.0 if p is None else c * p if p.ndim == 1 else jnp.einsum("hj,nj->nh", p, c)

    def run(u: Any, cell: LstmCell, h: Any, c: Any, reverse: bool) -> Any:
        def step(state: Any, inputs: Any) -> Any:
            h, c = state
            ut, on = inputs
            zi, zf, zg, zo = jnp.einsum("khi,ni->knh", cell.wx, ut) + jnp.einsum("khj,nj->knh", cell.wh, h)
            bi, bf, bg, bo = cell.b if cell.b is not None else (0.0,) * 4
            pi, pf, pg, po = cell.peephole if cell.peephole is not None else (None,) * 4
            i = jax.nn.sigmoid(zi + bi + see(pi, c))
            f = jax.nn.sigmoid(zf + bf + see(pf, c))
            g = jnp.tanh(zg + bg + see(pg, c))
            new = f * c + i * g
            o = jax.nn.sigmoid(zo + bo + see(po, new if output_reads == "new" else c))
            out = o * jnp.tanh(new)
            on = on[:, None]
            return (jnp.where(on, out, h), jnp.where(on, new, c)), jnp.where(on, out, 0.0)

        return jax.lax.scan(step, (h, c), (u, active), reverse=reverse)

    last = []
    for first in range(0, len(cells), directions):
        numbered = range(first, first + directions)
        runs = [run(x, cells[n], h0[n], c0[n], reverse=n > first) for n in numbered]
        last += [state for state, _ in runs]
        x = jnp.concatenate([y for _, y in runs], axis=-1)
    return x, jnp.stack([h for h, _ in last]), jnp.stack([c for _, c in last])
