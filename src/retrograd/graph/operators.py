"""The operators and methods of tensors and variables: NumPy's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

import retrograd.graph as G

if TYPE_CHECKING:
    from .operation import Spec
    from .shaping import Index
    from .tensor import Operand, Tensor

Axes = int | tuple[int, ...] | None
# NumPy's operators between an array and a tensor, by the names of NumPy's functions.
_OF_ARRAYS: Final = {
    **{name: name for name in ("add", "subtract", "multiply", "divide", "power", "matmul", "equal", "not_equal")},
    **{name: name for name in ("less", "less_equal", "greater", "greater_equal")},
    "remainder": "mod", "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
}  # fmt: skip


# Where PyTorch's and NumPy's arrays have a method, and tensors another name or none.
_ELSEWHERE: Final = {
    **dict.fromkeys(("cpu", "item", "numpy", "tolist"), "the elements are only known when the program runs: return it"),
    **dict.fromkeys(("double", "float", "int", "long", "to", "type"), "write .astype(dtype)"),
    "clamp": "write graph.clip(x, low, high)",
    "clone": "there is no need for it: tensors do not change",
    "contiguous": "there is no need for it",
    "copy": "there is no need for it: tensors do not change",
    "detach": "write graph.stop_gradient(x)",
    "dim": "write .ndim",
    "masked_fill": "write graph.where(mask, value, x)",
    "numel": "write .size",
    "permute": "write .transpose(axes)",
    "unsqueeze": "write graph.expand_dims(x, axis)",
    "view": "write .reshape(shape)",
}


def _in_numpy(name: str, method: str, has_out: bool) -> TypeError:
    """The error for a tensor or a variable in NumPy code."""
    if has_out:
        return TypeError(f"numpy.{name} cannot write a tensor to an array: write `a = a + tensor`, not `a += tensor`")
    same = f"graph.{name}" if hasattr(G, name) and method == "__call__" else "a function of retrograd.graph"
    return TypeError(
        f"numpy.{name} is called with a tensor or a variable, whose elements it cannot have while a function is "
        f"traced; use {same}, or call NumPy on what the program returns, or on variable.value"
    )


class Operators:
    """What tensors and variables share."""

    __slots__ = ()
    spec: Spec
    __array_priority__ = 1000.0
    __hash__ = object.__hash__  # == compares elements, but tensors are distinguished by identity

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Operand, **options: object) -> Tensor:
        """``array + tensor``, which Python asks the array for first."""
        name = ufunc.__name__
        if method == "__call__" and not options and name in _OF_ARRAYS:
            found: Tensor = getattr(G, _OF_ARRAYS[name])(*operands)
            return found
        raise _in_numpy(name, method, "out" in options)

    def __array_function__(self, function: Any, types: object, arguments: object, options: object) -> NoReturn:
        raise _in_numpy(function.__name__, "__call__", False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.spec.dtype

    @property
    def ndim(self) -> int:
        return len(self.spec.shape)

    @property
    def size(self) -> int:
        return self.spec.elements

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Operand) -> Tensor:
        return G.add(self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return G.add(other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return G.subtract(self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return G.subtract(other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return G.multiply(self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return G.multiply(other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return G.divide(self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return G.divide(other, self)

    def __mod__(self, other: Operand) -> Tensor:
        return G.mod(self, other)

    def __rmod__(self, other: Operand) -> Tensor:
        return G.mod(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return G.power(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return G.power(other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return G.matmul(self, other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return G.matmul(other, self)

    def __neg__(self) -> Tensor:
        return G.negative(self)

    def __pos__(self) -> Tensor:
        return G.identity(self)

    def __abs__(self) -> Tensor:
        return G.absolute(self)

    def __eq__(self, other: Operand) -> Tensor:  # type: ignore[override]  # elementwise, as in NumPy
        return G.equal(self, other)

    def __ne__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return G.not_equal(self, other)

    def __lt__(self, other: Operand) -> Tensor:
        return G.less(self, other)

    def __le__(self, other: Operand) -> Tensor:
        return G.less_equal(self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return G.greater(self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return G.greater_equal(self, other)

    def __and__(self, other: Operand) -> Tensor:
        return G.logical_and(self, other)

    def __or__(self, other: Operand) -> Tensor:
        return G.logical_or(self, other)

    def __xor__(self, other: Operand) -> Tensor:
        return G.logical_xor(self, other)

    def __invert__(self) -> Tensor:
        return G.logical_not(self)

    def __getitem__(self, index: Index) -> Tensor:
        return G.take_slice(self, index)

    @property
    def T(self) -> Tensor:
        return G.transpose(self)

    def sum(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.sum(self, axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.mean(self, axis, keepdims=keepdims)

    def var(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.var(self, axis, keepdims=keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.max(self, axis, keepdims=keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.min(self, axis, keepdims=keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.prod(self, axis, keepdims=keepdims)

    def all(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.all(self, axis, keepdims=keepdims)

    def any(self, axis: Axes = None, keepdims: bool = False) -> Tensor:
        return G.any(self, axis, keepdims=keepdims)

    def argmax(self, axis: int | None = None) -> Tensor:
        return G.argmax(self, axis)

    def argmin(self, axis: int | None = None) -> Tensor:
        return G.argmin(self, axis)

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        return G.reshape(self, [e for part in shape for e in (part if isinstance(part, tuple) else (part,))])

    def transpose(self, *axes: int) -> Tensor:
        return G.transpose(self, axes or None)

    def astype(self, dtype: npt.DTypeLike) -> Tensor:
        return G.cast(self, dtype)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            hint = _ELSEWHERE.get(name) or (f"write graph.{name}(x)" if name in G.__all__ else "")
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{said}; {hint}" if hint else said)
