"""The oracle: optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .precision import Array, widened

__all__ = ["adam_step", "clipped_gradients", "rmsprop_step", "sgd_step"]


def clipped_gradients(
    gradients: Sequence[Array],
    *,
    scale: float = 1.0,
    clip: tuple[float, float] | None = None,
    maximum_norm: float | None = None,
    maximum_norm_each: float | None = None,
    known_norm: float | None = None,
    clip_before_scale: bool = False,
) -> list[Array]:
    """Return the gradients scaled and clipped, in either order, in the oracle's precision."""
    wide = [widened(g) for g in gradients]
    if not clip_before_scale:
        wide = [scale * g for g in wide]
    norms = [np.sqrt(np.sum(g * g)) for g in wide]
    if clip is not None:
        wide = [np.clip(g, *clip) for g in wide]
    if maximum_norm is not None:
        whole = np.sqrt(sum(norm * norm for norm in norms))
        if known_norm is not None:
            whole = known_norm if clip_before_scale else abs(scale) * known_norm
        wide = [g * min(1.0, maximum_norm / whole) if whole > 0 else g for g in wide]
    if maximum_norm_each is not None:
        wide = [g * min(1.0, maximum_norm_each / norm) if norm > 0 else g for g, norm in zip(wide, norms, strict=True)]
    return [scale * g for g in wide] if clip_before_scale else wide


def sgd_step(
    p: Array,
    g: Array,
    velocity: Array | None = None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
    velocity_of: str = "gradient",
    weight_decay: float = 0.0,
    l1: float = 0.0,
) -> tuple[Array, ...]:
    """Return the new parameter and, if there is one, the new velocity. `g` is already scaled and clipped."""
    p, g = widened(p), widened(g)
    g = g + weight_decay * p + l1 * np.sign(p)
    if velocity is None:
        return (p - learning_rate * g,)
    return _with_velocity(p, g, widened(velocity), learning_rate, momentum, nesterov, velocity_of)


def adam_step(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    largest: Array | None = None,
    *,
    step: float,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    epsilon_hat: bool = False,
    weight_decay: float = 0.0,
    decoupled: bool = False,
    l1: float = 0.0,
) -> tuple[Array, ...]:
    """Return the new parameter and the new states."""
    p, g, m, v = widened(p), widened(g), widened(m), widened(v)
    g = g + l1 * np.sign(p) + (0.0 if decoupled else weight_decay) * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w = v if largest is None else np.maximum(v, widened(largest))
    first, second = 1 - np.longdouble(beta1) ** step, 1 - np.longdouble(beta2) ** step
    root = (np.sqrt(w) + eps) / np.sqrt(second) if epsilon_hat else np.sqrt(w / second) + eps
    moved = (m / first) / root
    p = p - learning_rate * moved - (learning_rate * weight_decay * p if decoupled else 0.0)
    return (p, m, v) if largest is None else (p, m, v, w)


def rmsprop_step(
    p: Array,
    g: Array,
    square: Array,
    mean: Array | None = None,
    velocity: Array | None = None,
    *,
    learning_rate: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    eps_inside_root: bool = False,
    momentum: float = 0.0,
    velocity_of: str = "gradient",
    weight_decay: float = 0.0,
    l1: float = 0.0,
) -> tuple[Array, ...]:
    """Return the new parameter and the new states, without those that are None."""
    p, g, square = widened(p), widened(g), widened(square)
    g = g + weight_decay * p + l1 * np.sign(p)
    square = alpha * square + (1 - alpha) * g * g
    spread = square
    states = [square]
    if mean is not None:
        mean = alpha * widened(mean) + (1 - alpha) * g
        spread = np.maximum(square - mean * mean, 0)
        states.append(mean)
    d = g / (np.sqrt(spread + eps) if eps_inside_root else np.sqrt(spread) + eps)
    if velocity is None:
        return (p - learning_rate * d, *states)
    p, velocity = _with_velocity(p, d, widened(velocity), learning_rate, momentum, False, velocity_of)
    return (p, *states, velocity)


def _with_velocity(
    p: Array, d: Array, u: Array, learning_rate: float, momentum: float, nesterov: bool, velocity_of: str
) -> tuple[Array, Array]:
    if velocity_of == "gradient":
        u = momentum * u + d
        return p - learning_rate * (momentum * u + d if nesterov else u), u
    if velocity_of == "step":
        old, u = u, momentum * u - learning_rate * d
        return p + (u + momentum * (u - old) if nesterov else u), u
    u = momentum * u + learning_rate * d
    return p - (momentum * u + learning_rate * d if nesterov else u), u
