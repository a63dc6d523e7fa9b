"""The base class of layers: parameters, buffers and submodules by name, modes, state."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeVar, overload

import numpy as np
import numpy.typing as npt

from ..graph.operators import Operators
from ..graph.tensor import Tensor, Variable, current_graph, leaves
from ..ops._args import check_not_masked
from ..ops._buffers import foreign_array, is_foreign
from ..ops._errors import ArgumentTypeError, ArgumentValueError
from ..ops._types import Array
from . import hints

__all__ = ["Array", "Buffer", "KeyDifferences", "Layer", "Module", "Parameter", "Residual", "Sequential"]

_M = TypeVar("_M", bound="Module")


class Changes:
    """Counts what may need new programs: modes, and attributes of any module. A cheap first look for all of them."""

    count = 0


class Parameter(Variable):
    """A trainable array, float32 or float64; lists become float32. As an attribute it belongs to its module.

    With ``trainable=False`` optimizers leave it alone; `mask`, of booleans, says which elements they change.
    """

    __slots__ = ("_mask", "_trainable")

    def __init__(
        self, values: npt.ArrayLike, *, trainable: bool = True, mask: Any = None, dtype: npt.DTypeLike | None = None
    ) -> None:
        super().__init__(values, dtype=dtype or (None if hasattr(values, "dtype") else np.float32))
        if self.dtype.kind != "f":
            raise TypeError(f"Parameter: values has dtype {self.dtype}, must be float32 or float64")
        self._trainable = trainable
        self._mask = None if mask is None else np.broadcast_to(np.asarray(mask, np.bool_), self.shape)

    @property
    def trainable(self) -> bool:
        """Whether optimizers change it."""
        return self._trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._trainable = bool(value)
        Changes.count += 1

    @property
    def mask(self) -> Array | None:
        """Which elements optimizers change; None: all."""
        return self._mask

    @property
    def saved(self) -> Array:
        """The array of the state: its memory, not a copy."""
        return self.value

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), self._trainable, self._mask)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state)
        self._trainable, self._mask = state[2:]

    if not TYPE_CHECKING:
        __getattr__ = hints.missing("Parameter")


class Buffer(Variable):
    """An array that belongs to a module's state but is not trained, such as a running mean.

    A program sees the bits of uint64 as int64; the state has uint64.
    """

    __slots__ = ("_unsigned",)

    def __init__(self, values: npt.ArrayLike) -> None:
        given = np.asarray(values)
        self._unsigned = given.dtype == np.uint64
        super().__init__(given.view(np.int64) if self._unsigned else given)

    @property
    def saved(self) -> Array:
        """The array of the state: its memory, not a copy."""
        return self.value.view(np.uint64) if self._unsigned else self.value

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), self._unsigned)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        super().__setstate__(state)
        self._unsigned = state[2]


class KeyDifferences(NamedTuple):
    """Names that only the module has, and names that only the given state has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class _Calls(threading.local):
    """The calls of modules on this thread."""

    outermost: Module | None = None
    failed: Module | None = None  # the innermost module of the last error
    results: list[tuple[Module, Any]] | None = None  # of all calls, if someone looks at them


_CALLS: Final = _Calls()


def _no_forward(self: Module, *arguments: Any, **keywords: Any) -> Any:
    hint = "; rename its method call to forward" if hasattr(type(self), "call") else ""
    raise NotImplementedError(f"{type(self).__name__} has no forward{hint}")


class Module:
    """A layer, or a model made of layers: a class that defines ``forward``.

    ``forward`` gets tensors when it is compiled, and computes with the functions of :mod:`retrograd.graph`, operators,
    and other modules. Called with arrays, a module computes at once. A :class:`Parameter`, a :class:`Buffer` or a
    module assigned to an attribute belongs to the module and is named after the attribute: ``"lstm.layer0.wx"``.
    """

    training: bool = True
    _option_hints: ClassVar[str] = hints.LAYERS
    _variables: dict[str, Parameter | Buffer]
    _children: dict[str, Module]
    _changed: int
    _programs: Any

    def __new__(cls: type[_M], *args: Any, **kwargs: Any) -> _M:
        if args or kwargs:
            hints.check_arguments(cls, args, kwargs, cls._option_hints)
        self = super().__new__(cls)
        self.__dict__.update(_variables={}, _children={}, _changed=0, _programs=None)
        return self

    # A callable of any arguments, so that a subclass can choose its signature.
    forward: Callable[..., Any] = _no_forward

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute ``forward``. Lists, float64 data and tensors of PyTorch become arrays of the module's dtype."""
        calls = _CALLS
        if calls.outermost is not None:
            try:
                found = self.forward(*arguments, **keywords)
            except (TypeError, ValueError, IndexError):
                if calls.failed is None:
                    calls.failed = self
                raise
            if calls.results is not None:
                calls.results.append((self, found))
            return found
        calls.outermost, calls.failed = self, None
        at_once = current_graph() is None
        try:
            if at_once:
                dtype = input_dtype([self], (*arguments, *keywords.values()))
                arguments = tuple([as_input(a, dtype) for a in arguments])
                keywords = {name: as_input(a, dtype) for name, a in keywords.items()}
            found = self.forward(*arguments, **keywords)
            if calls.results is not None:
                calls.results.append((self, found))
        except (TypeError, ValueError, IndexError) as error:
            raise self._at(error, calls.failed) from error
        finally:
            calls.outermost = None
        return found.item() if at_once and isinstance(found, np.ndarray) and found.ndim == 0 else found

    def _at(self, error: Exception, failed: Module | None) -> Exception:
        """The same error, with the name of the layer that it comes from."""
        wide = [name for name, p in self.parameters().items() if p.dtype == np.float64]
        if isinstance(error, TypeError) and 0 < len(wide) < len(self.parameters()):
            error = TypeError(f"{error}; parameter {wide[0]} is float64, others are float32: give them one dtype")
        plain: dict[type[Exception], type[Exception]] = {ArgumentTypeError: TypeError, ArgumentValueError: ValueError}
        kind = plain.get(type(error), type(error))
        for name, module in self.modules():
            if module is failed and name and kind in (TypeError, ValueError, IndexError):
                return kind(f"layer {name!r}, {type(module).__name__}({module.describe()}): {error}")
        return error

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its parameters, or the largest of them; float32 if it has none."""
        found = {p.dtype for p in self.parameters().values()}
        return np.dtype(np.float64 if np.dtype(np.float64) in found else np.float32)

    # ---- attributes --------------------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        known = self._variables.get(name)
        if known is not None and not isinstance(value, Variable):
            raise AttributeError(f"{type(self).__name__}.{name} is a variable; write into it: {name}[...] = ...")
        if name in ("trainable", "requires_grad") and not hasattr(type(self), name):
            raise AttributeError(f"{type(self).__name__}.{name} would have no effect; write .freeze() or .unfreeze()")
        if isinstance(value, (list, tuple, dict)) and _holds_module(value):
            raise TypeError(
                f"{type(self).__name__}.{name}: modules and parameters inside a {type(value).__name__} would not be "
                "found; use Sequential, or an attribute for each"
            )
        if isinstance(value, (Parameter, Buffer)) and hasattr(type(self), name):
            raise ValueError(f"{type(self).__name__}: the name {name!r} of a parameter or buffer is taken")
        if isinstance(value, Variable) and not isinstance(value, (Parameter, Buffer)):
            raise TypeError(f"{type(self).__name__}.{name} is a Variable; use nn.Parameter or nn.Buffer")
        if not isinstance(value, Module):  # one that takes the place of another keeps it: the order of layers
            self._children.pop(name, None)
        if not isinstance(value, Variable):
            self._variables.pop(name, None)
        if isinstance(value, Module):
            self._children[name] = value
        elif isinstance(value, (Parameter, Buffer)):
            self._variables[name] = value
            value.name = value.name or name
        if _CALLS.outermost is None:  # what forward sets is its own business
            Changes.count += 1
            if name != "training":
                self.__dict__["_changed"] += 1
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._children.pop(name, None)
        self._variables.pop(name, None)
        Changes.count += 1
        self.__dict__["_changed"] += 1

    if not TYPE_CHECKING:
        __getattr__ = hints.missing("Module")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_programs": None}

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Yield this module, with the name "", and all its submodules, with their dotted names, each once."""
        seen: set[int] = set()

        def walk(name: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module
                for child, inside in module._children.items():
                    yield from walk(_dotted(name, child), inside)

        return walk("", self)

    def _named(self, kind: type[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        for path, module in self.modules():
            for name, variable in module._variables.items():
                if isinstance(variable, kind) and id(variable) not in seen:
                    seen.add(id(variable))
                    found[_dotted(path, name)] = variable
        return found

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters by dotted name; one that is in two places has the first name."""
        return self._named(Parameter)

    def buffers(self) -> dict[str, Buffer]:
        """Return all arrays that are part of the state but not trained, by dotted name."""
        return self._named(Buffer)

    @property
    def num_parameters(self) -> int:
        """The number of trainable elements."""
        return sum(p.size for p in self.parameters().values() if p.trainable)

    def train(self: _M) -> _M:
        """Switch to training mode: dropout, and batch statistics in batch norm. Returns self."""
        return self._for_all([module for _, module in self.modules()], "training", True)

    def eval(self: _M) -> _M:
        """Switch to evaluation mode: no dropout, and running statistics in batch norm. Returns self."""
        return self._for_all([module for _, module in self.modules()], "training", False)

    def freeze(self: _M) -> _M:
        """Keep optimizers from changing its parameters. Returns self."""
        return self._for_all(self.parameters().values(), "trainable", False)

    def unfreeze(self: _M) -> _M:
        """Let optimizers change its parameters. Returns self."""
        return self._for_all(self.parameters().values(), "trainable", True)

    def _for_all(self: _M, parts: Iterable[object], name: str, value: bool) -> _M:
        for part in parts:
            setattr(part, name, value)
        return self

    # ---- use ---------------------------------------------------------------------------------------------------------

    def predict(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute ``forward`` in evaluation mode, whatever the mode is. Compiled for each shape of the arguments."""
        if self._programs is None:
            from .program import Programs

            self.__dict__["_programs"] = Programs(self, [self], training=False)
        return self._programs(*arguments, **keywords)

    def summary(self, *arguments: Any, **keywords: Any) -> None:
        """Print the layers, the shapes of their results for these arguments, and the numbers of their parameters."""
        from .summary import summary_of

        print(summary_of(self, arguments, keywords))

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_arrays(self) -> dict[str, Array]:
        """Return parameters and buffers by dotted name, parameters first: the arrays themselves, not copies."""
        variables: dict[str, Any] = {**self.parameters(), **self.buffers()}
        return {name: variable.saved for name, variable in variables.items()}

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all parameters and buffers by dotted name."""
        return {name: array.copy() for name, array in self.state_arrays().items()}

    def load_state_dict(self, state: Mapping[str, npt.ArrayLike], *, strict: bool = True) -> KeyDifferences:
        """Copy a state into the parameters and buffers. If anything does not match, nothing is written.

        With ``strict=False`` names may differ: the common ones are loaded, and the differences are returned.
        """
        target, name = self.state_arrays(), f"{type(self).__name__}.load_state_dict"
        if not isinstance(state, Mapping):
            hint = "; nn.load(path, model) reads a file" if isinstance(state, (str, os.PathLike)) else ""
            raise TypeError(f"{name}: state is a {type(state).__name__}, must be arrays by name{hint}")
        differences = check_arrays(name, target, state, strict)
        copy_arrays(target, state)
        return differences

    def describe(self) -> str:
        """Return the text between the parentheses of the module's repr."""
        return ""

    def __repr__(self) -> str:
        head = f"{type(self).__name__}({self.describe()}"
        if not self._children:
            return head + ")"
        lines = (f"  {name}: {child!r}".replace("\n", "\n  ") for name, child in self._children.items())
        return "\n".join([head, *lines, ")"])


class Layer(Module):
    """A module whose result is a tensor. It differs from Module only for type checkers."""

    if TYPE_CHECKING:

        @overload
        def __call__(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor: ...
        @overload
        def __call__(self, *arguments: Any, **keywords: Any) -> Any: ...
        def __call__(self, *arguments: Any, **keywords: Any) -> Any: ...


class Sequential(Layer):
    """Modules one after the other: ``Sequential(a, b)``, named "0" and "1", or ``Sequential(first=a, second=b)``.

    A keyword such as ``lengths`` goes to the layers whose ``forward`` has an argument of that name.
    """

    def __init__(self, *layers: Module, **named: Module) -> None:
        if layers and named:
            raise TypeError("Sequential: name all layers or none")
        for name, layer in (named or {str(i): layer for i, layer in enumerate(layers)}).items():
            if not isinstance(layer, Module):
                raise TypeError(f"Sequential: layer {name} is {hints.instead_of_layer(layer)}")
            if hasattr(type(self), name) or name in self.__dict__:
                raise ValueError(f"Sequential: the name {name!r} is taken")
            setattr(self, name, layer)

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._children.values())

    def __getitem__(self, which: int | str) -> Any:  # any kind of layer: model["head"].w
        """Return a layer by index or by name."""
        return self._children[which] if isinstance(which, str) else list(self)[which]

    def forward(self, x: Any, **keywords: Any) -> Any:
        used: set[str] = set()
        for layer in self:
            own = {name: value for name, value in keywords.items() if takes(layer, name)}
            used.update(own)
            x = layer(x, **own)
            if x is None:
                raise TypeError(f"the forward of {type(layer).__name__} returned None; end it with a return")
        if unused := [name for name in keywords if name not in used]:
            raise TypeError(f"no layer has an argument {unused[0]!r}")
        return x


class Residual(Sequential):
    """``x + layers(x)``, for layers whose result has the shape of x."""

    def forward(self, x: Any, **keywords: Any) -> Any:
        y = super().forward(x, **keywords)
        if y.shape != x.shape:  # a sum would broadcast
            raise ValueError(f"Residual: the result of the layers has shape {y.shape}, but x has shape {x.shape}")
        return x + y


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function, or the forward of a module, has an argument of this name, or takes any."""
    if isinstance(function, Sequential) and type(function).forward in (Sequential.forward, Residual.forward):
        return any(takes(layer, name) for layer in function)
    parameters = inspect.signature(function.forward if isinstance(function, Module) else function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def input_dtype(modules: Sequence[Module], arguments: Sequence[Any]) -> np.dtype[Any]:
    """The dtype of modules; if they have no parameters, the dtype of the first floating-point array."""
    if not any(module.parameters() for module in modules):
        for value in leaves(tuple(arguments)):
            if isinstance(value, np.ndarray) and value.dtype in (np.float32, np.float64):
                return np.dtype(value.dtype)
    return np.dtype(np.result_type(*(module.dtype for module in modules)))


def as_input(value: Any, dtype: np.dtype[Any]) -> Any:
    """An argument of a module as an array: floating-point numbers of this dtype, integers as int64."""
    if value is None or isinstance(value, (bool, str, Operators)):
        return value
    if _is_tree(value):
        if isinstance(value, dict):
            return {key: as_input(item, dtype) for key, item in value.items()}
        parts = [as_input(item, dtype) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    check_not_masked("x", value)
    try:
        array = foreign_array(value) if is_foreign(value) else np.asarray(value)
    except ValueError as error:
        if isinstance(value, list):
            raise ValueError("an argument has rows of several lengths; pad them, and pass lengths=") from error
        raise
    wanted = {"f": dtype, "i": np.dtype(np.int64), "u": np.dtype(np.int64)}.get(array.dtype.kind, array.dtype)
    return array.astype(wanted, copy=False)


def check_arrays(
    function: str, target: Mapping[str, Array], state: Mapping[str, npt.ArrayLike], strict: bool
) -> KeyDifferences:
    """Raise an error if a state does not fit; `function` is the name that the error starts with."""
    missing = tuple(name for name in target if name not in state)
    unexpected = tuple(name for name in state if name not in target)
    if strict and (missing or unexpected):
        parts = (("does not have", missing), ("has unexpected", unexpected))
        said = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        raise ValueError(f"{function}: the state {said}")
    for name in target:
        if name not in state:
            continue
        given, current = np.asarray(state[name]), target[name]
        if given.shape != current.shape:
            raise ValueError(f"{function}: {name} has shape {given.shape}, but here it has shape {current.shape}")
        if given.dtype != current.dtype:
            raise TypeError(f"{function}: {name} has dtype {given.dtype}, but here it has dtype {current.dtype}")
    return KeyDifferences(missing, unexpected)


def copy_arrays(target: Mapping[str, Array], state: Mapping[str, npt.ArrayLike]) -> None:
    for name, array in target.items():
        if name in state:
            array[...] = state[name]


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _is_tree(value: Any) -> bool:
    """Whether a value is a nest of arrays, and not a list of numbers, which is an array."""
    if isinstance(value, dict):
        return True
    if not isinstance(value, (tuple, list)):
        return False
    return any(
        item is None or _is_tree(item) or (hasattr(item, "shape") and not isinstance(item, np.generic))
        for item in value
    )


def _holds_module(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_holds_module, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (Module, Parameter, Buffer))
