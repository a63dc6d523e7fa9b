"""Calls to the engine's handlers, which XLA runs, and what the gradients of all functions share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeVar

import numpy as np

from .. import _core
from ..ops import _args
from ..ops._errors import ArgumentTypeError

try:
    import jax
    import jax.ffi
    import jax.numpy as jnp
    from jax.custom_derivatives import SymbolicZero
except ImportError as error:
    raise ImportError(
        f"retrograd.jax needs jax 0.5 or later, which has jax.ffi ({error}): pip install 'retrograd[jax]'"
    ) from error

for _name, _handler in _core.xla_handlers().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")

BYTE: Final = np.dtype(np.uint8)
_Value = TypeVar("_Value")


class Static:
    """A value that is known while tracing, as a part of what forward saves for backward: a pytree without leaves."""

    def __init__(self, value: Any) -> None:
        self.value = value


jax.tree_util.register_pytree_node(Static, lambda node: ((), node.value), lambda value, _: Static(value))


def as_operand(name: str, value: object) -> jax.Array:
    """Convert to a JAX array. Like all of JAX, this turns float64 into float32 unless ``jax_enable_x64`` is set."""
    if isinstance(value, jax.Array):
        return value
    _args.check_not_masked(name, value)
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(name, "{argument} is not an array: {}", str(error)) from None


def call(
    target: str,
    arguments: Mapping[str, jax.Array | None],
    results: Mapping[str, tuple[tuple[int, ...], Any]],
    threads: int,
    **attributes: Any,
) -> dict[str, jax.Array]:
    """Run a handler. `arguments` of None are absent; the first must not be. `results`: shapes and dtypes by name."""
    present = {name: array for name, array in arguments.items() if array is not None}
    first = next(iter(present.values()))
    run = jax.ffi.ffi_call(
        target, [jax.ShapeDtypeStruct(*form) for form in results.values()], vmap_method="expand_dims"
    )
    once = jax.custom_jvp(
        lambda *arrays: run(
            *arrays,
            arguments=" ".join(present),
            results=" ".join(results),
            axes=np.int64(first.ndim),
            threads=np.int64(threads),
            **{name: _attribute(value) for name, value in attributes.items()},
        )
    )
    once.defjvp(_refuse_second_derivative)
    return dict(zip(results, once(*present.values()), strict=True))


def _refuse_second_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise NotImplementedError("the functions of retrograd.jax have first derivatives only")


def _attribute(value: Any) -> Any:
    """With the width that the handlers expect: JAX takes the type of a NumPy scalar as it is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return np.int64(value)
    return np.float64(value) if isinstance(value, float) else value


def is_perturbed(primal: Any) -> bool:
    """Whether a gradient of an argument of forward is wanted. `primal` is a CustomVJPPrimal, or None: no argument."""
    return primal is not None and bool(primal.perturbed)


def values(primals: _Value) -> _Value:
    """The arrays in a pytree of CustomVJPPrimals."""
    return jax.tree.map(lambda primal: primal.value, primals)  # type: ignore[no-any-return]


def nonzero(cotangent: Any) -> jax.Array | None:
    """A gradient that comes in, or None if it is known to be 0."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent
