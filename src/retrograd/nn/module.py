"""The base class of all layers: named parameters and gradients, submodules, training and evaluation mode, state."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "KeyDifferences", "Module", "Sequential"]

Array: TypeAlias = npt.NDArray[Any]
_M = TypeVar("_M", bound="Module")


class KeyDifferences(NamedTuple):
    """Names that only the module has, and names that only the given state has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Memory:
    """Named buffers, each kept at the largest size it has had."""

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}
        self._views: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return the buffer of this name as an uninitialised array of this shape and dtype."""
        view = self._views.get(name)
        if view is None or view.shape != shape or view.dtype != dtype:
            size, flat = math.prod(shape), self._flat.get(name)
            if flat is None or flat.size < size or flat.dtype != dtype:
                flat = self._flat[name] = np.empty(size, dtype)
            view = self._views[name] = flat[:size].reshape(shape)
        return view


# ---- which backward belongs to which forward -------------------------------------------------------------------------
#
# A module keeps only what the backward of its last forward pass needs, so every backward must belong to that pass. One
# counter gives each pass a begin and an end time. The interval of a model's pass contains those of its layers, which
# shows whether a layer ran once, twice or not at all in the pass that the model's backward belongs to.

_CLOCK: Final = itertools.count(1)


class _Pass:
    """The last forward pass of a module. The object is reused for every pass, so that a step allocates nothing."""

    __slots__ = ("abandoned", "before", "began", "done", "ended", "inside", "shape", "training")

    def __init__(self) -> None:
        self.before = 0  # when the previous pass began
        self.began = 0  # 0: no forward pass yet
        self.ended = 0  # 0: it failed, or has not ended yet
        self.training = False
        self.shape: tuple[int, ...] | None = None  # of the result
        self.done = False  # backward has used it
        # An earlier training pass had no backward: the next backward may have been meant for that one.
        self.abandoned = False
        self.inside = False  # forward or backward is running


class _Backward(NamedTuple):
    """The outermost backward of this thread."""

    module: Module
    forward: _Pass | None  # the pass it belongs to, if the module itself ran forward
    began: int


class _Current(threading.local):
    backward: _Backward | None = None


_current: Final = _Current()


def _tracked_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def tracked(self: Module, *args: Any, **options: Any) -> Any:
        now = self._pass
        if now.inside:  # super().forward(x)
            return forward(self, *args, **options)
        now.abandoned = now.ended > 0 and not now.done and (now.training or now.abandoned)
        now.before, now.began, now.ended = now.began, next(_CLOCK), 0
        now.training, now.done, now.inside = self.training, False, True
        try:
            y = forward(self, *args, **options)
        finally:
            now.inside = False
        now.shape = y.shape if isinstance(y, np.ndarray) else None
        now.ended = next(_CLOCK)
        return y

    return tracked


def _tracked_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def tracked(self: Module, *args: Any, **options: Any) -> Any:
        last = self._pass
        if last.inside:  # super().backward(dy)
            return backward(self, *args, **options)
        current = _current.backward
        outermost = current is None
        if current is None:
            whole = last.began > 0 and not last.done and last.training == self.training
            current = _current.backward = _Backward(self, last if whole else None, next(_CLOCK))
        last.inside = True
        try:
            if last.began:
                _check_pass(self, last, args[0] if args else options.get("dy"), current)
            dx = backward(self, *args, **options)
        finally:
            last.inside = False
            if outermost:
                _current.backward = None
        warn = last.abandoned and not last.done and (outermost or current.forward is None)
        last.done = True
        if warn:
            warnings.warn(
                f"{_title(self)}: forward ran more than once since the last backward; this backward belongs to the "
                "last of these passes. Run passes that need no backward in evaluation mode: eval()",
                RuntimeWarning,
                stacklevel=2,
            )
        return dx

    return tracked


def _check_pass(module: Module, last: _Pass, dy: object, current: _Backward) -> None:
    """Refuse a backward that does not belong to the module's last forward pass."""
    if not last.ended:
        raise RuntimeError(f"{_title(module)}: its last forward pass failed; run forward again")
    if module._children and not module._kept:
        return  # it keeps nothing itself, and its children do their own check
    if last.done:
        raise RuntimeError(
            f"{_title(module)}: backward has run already for its last forward pass, and each forward has one backward. "
            "To run it again, run forward again. A layer used in two places must be two layers, because it "
            "remembers only its last forward pass"
        )
    whole = current.forward
    if whole is not None and whole is not last and last.began < current.began:
        if not whole.began < last.began < whole.ended:
            when = "before" if last.began < whole.began else "after"
            raise RuntimeError(
                f"{_title(module)}: its last forward pass was {when} that of {type(current.module).__name__}, whose "
                "backward this is. Call backward right after the forward pass that it belongs to"
            )
        if whole.began < last.before:
            raise RuntimeError(
                f"{_title(module)}: it ran forward twice in one pass of {type(current.module).__name__}, but remembers "
                "only the last one. Make it two layers, or pass both inputs through it as one batch"
            )
    if last.training != module.training:
        modes = {True: "training", False: "evaluation"}
        raise RuntimeError(
            f"{_title(module)}: its last forward pass was in {modes[last.training]}, but it is in "
            f"{modes[module.training]} now. Call backward right after the forward pass that it belongs to"
        )
    if last.shape is not None and isinstance(dy, np.ndarray) and dy.shape != last.shape:
        raise ValueError(
            f"{_title(module)}: dy has shape {dy.shape}, but the last forward pass gave y of shape {last.shape}"
        )


def _title(module: Module) -> str:
    """Return the prefix of a backward error: the class, and the module's name in the model."""
    model = _current.backward.module if _current.backward is not None else module
    names = [repr(name) for name, inside in _walk(model) if inside is module and name]
    kind = type(module).__name__
    return f"{kind}.backward" + (f" (layer {' and '.join(names)} of {type(model).__name__})" if names else "")


def _walk(module: Module, name: str = "", above: tuple[Module, ...] = ()) -> Iterator[tuple[str, Module]]:
    """Yield a module and its submodules with their dotted names; a module in several places appears under each name."""
    yield name, module
    for child, inside in module._children.items():
        if inside is not module and inside not in above:
            yield from _walk(inside, _dotted(name, child), (*above, module))


# ---- modules ---------------------------------------------------------------------------------------------------------


def _missing(name: str) -> Callable[..., Any]:
    def method(self: Module, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    return method


class Module:
    """A layer, or a model made of layers.

    A subclass defines ``forward(x)``, which keeps what backward will need, and ``backward(dy)``, which writes the
    gradients of the parameters and returns ``dx``. `add_parameter("w", array)` creates ``self.w`` and its gradient
    ``self.dw``. A module assigned to an attribute is a child, and its parameters are named after the attribute:
    ``"lstm.layer0.wx"``.

    The built-in layers have ``backward(dy, *, accumulate=False, need_dx=True)``. Parameter gradients are overwritten,
    or accumulated with `accumulate`; ``dx`` is never accumulated. With ``need_dx=False``, ``dx`` is not computed, and
    backward returns None.

    Each backward belongs to the module's last forward pass, and each forward pass has one backward. Anything else is
    refused, such as a layer that is used twice in one pass.

    In training mode a module returns its results in buffers that it reuses: they are valid until its next forward or
    backward. In evaluation mode results are new arrays.
    """

    training: bool = True
    num_threads: int | None = None
    _parameters: list[str]
    _buffers: list[str]
    _children: dict[str, Module]
    _memory: Memory
    _kept: dict[str, Any]
    _pass: _Pass

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, track in (("forward", _tracked_forward), ("backward", _tracked_backward)):
            if inspect.isfunction(method := cls.__dict__.get(name)):
                setattr(cls, name, track(method))

    def __new__(cls: type[_M], *args: Any, **kwargs: Any) -> _M:
        self = super().__new__(cls)
        fields = self.__dict__
        fields["_parameters"], fields["_buffers"], fields["_children"] = [], [], {}
        fields["_memory"], fields["_kept"], fields["_pass"] = Memory(), {}, _Pass()
        return self

    # ---- for subclasses ----------------------------------------------------------------------------------------------

    # Callables of any arguments, so that a subclass can choose its signature.
    forward: Callable[..., Any] = _missing("forward")
    backward: Callable[..., Any] = _missing("backward")

    def add_parameter(self, name: str, values: Array) -> None:
        """Make `values` (not a copy) the parameter ``self.<name>``, and create its gradient ``self.d<name>``, zeros."""
        if values.dtype not in (np.float32, np.float64):
            raise TypeError(
                f"{type(self).__name__}: parameter {name} has dtype {values.dtype}, must be float32 or float64"
            )
        for attribute in (name, f"d{name}"):
            self._check_new(attribute)
        self._parameters.append(name)
        self.__dict__[name] = values
        self.__dict__[f"d{name}"] = np.zeros_like(values)

    def add_buffer(self, name: str, values: Array) -> None:
        """Make ``self.<name>`` an array that is saved with the state but not trained, such as a running mean."""
        self._check_new(name)
        self._buffers.append(name)
        self.__dict__[name] = values

    def set_gradient(self, name: str, gradient: Array, accumulate: bool = False) -> None:
        """Overwrite a parameter's gradient, or add to it."""
        current: Array = self.__dict__[f"d{name}"]
        if gradient.shape != current.shape:
            raise ValueError(
                f"{type(self).__name__}.set_gradient: the gradient has shape {gradient.shape}, "
                f"but {name} has shape {current.shape}"
            )
        if accumulate:
            current += gradient
        else:
            current[...] = gradient

    def reuse(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array: a reused buffer in training mode, a new array in evaluation mode."""
        return self._memory.take(name, shape, dtype) if self.training else np.empty(shape, dtype)

    def keep(self, **values: Any) -> None:
        """Keep values for backward. They are not part of the state, nor of a copy of the module."""
        self._kept.update(values)

    def kept(self, name: str) -> Any:
        """Return the value that forward kept under this name."""
        try:
            return self._kept[name]
        except KeyError:
            raise RuntimeError(f"{_title(self)}: there was no forward pass") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": Memory(), "_kept": {}, "_pass": _Pass()}

    def _check_new(self, name: str) -> None:
        if not name.isidentifier() or hasattr(self, name):
            why = "is taken" if name.isidentifier() else "is not an identifier"
            raise ValueError(f"{type(self).__name__}: the name {name!r} of a parameter or buffer {why}")

    def __setattr__(self, name: str, value: object) -> None:
        fixed = name in self._parameters or name in self._buffers or (name[:1] == "d" and name[1:] in self._parameters)
        if fixed and value is not self.__dict__[name]:
            # Optimizers and caches hold the array itself.
            raise AttributeError(f"{type(self).__name__}.{name} stays the same array; write into it: {name}[...] = ...")
        if isinstance(value, Module):
            self._children[name] = value
        elif isinstance(value, (list, tuple, dict)) and _holds_module(value):
            raise TypeError(
                f"{type(self).__name__}.{name}: modules inside a {type(value).__name__} would not be found; "
                "use Sequential, or an attribute for each"
            )
        else:
            self._children.pop(name, None)
        super().__setattr__(name, value)

    # ---- the tree ----------------------------------------------------------------------------------------------------

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Yield this module, with the name "", and all its submodules, with their dotted names."""
        seen: dict[int, str] = {}

        def walk(name: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) in seen:
                raise ValueError(
                    f"{type(self).__name__}: {seen[id(module)]} and {name} are the same {type(module).__name__}; a "
                    "module remembers only its last forward pass, so make one for each place"
                )
            seen[id(module)] = name
            yield name, module
            for child, inside in module._children.items():
                yield from walk(_dotted(name, child), inside)

        return walk("", self)

    def parameters(self) -> dict[str, Array]:
        """Return all parameters by dotted name: the arrays themselves, not copies."""
        return {_dotted(path, name): getattr(m, name) for path, m in self.modules() for name in m._parameters}

    def gradients(self) -> dict[str, Array]:
        """Return all gradients by the dotted name of their parameter: the arrays themselves, not copies."""
        return {_dotted(path, name): getattr(m, f"d{name}") for path, m in self.modules() for name in m._parameters}

    def buffers(self) -> dict[str, Array]:
        """Return all arrays that are part of the state but not trained, by dotted name."""
        return {_dotted(path, name): getattr(m, name) for path, m in self.modules() for name in m._buffers}

    @property
    def num_parameters(self) -> int:
        """The number of trainable elements."""
        return sum(array.size for array in self.parameters().values())

    def train(self: _M) -> _M:
        """Switch to training mode: dropout, batch statistics in batch norm, reused buffers. Returns self."""
        return self._for_all("training", True)

    def eval(self: _M) -> _M:
        """Switch to evaluation mode: no dropout, running statistics in batch norm, new result arrays. Returns self."""
        return self._for_all("training", False)

    def set_num_threads(self: _M, threads: int | None) -> _M:
        """Set the thread count of all layers; None is that of :func:`retrograd.set_num_threads`. Returns self."""
        return self._for_all("num_threads", threads)

    def _for_all(self: _M, name: str, value: object) -> _M:
        for _, module in self.modules():
            setattr(module, name, value)
        return self

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Return copies of all parameters and buffers by dotted name."""
        return {name: array.copy() for name, array in {**self.parameters(), **self.buffers()}.items()}

    def load_state_dict(self, state: Mapping[str, Array], *, strict: bool = True) -> KeyDifferences:
        """Copy a state into the parameters and buffers. If anything does not match, nothing is written.

        With ``strict=False`` names may differ: the common ones are loaded, and the differences are returned.
        """
        target = {**self.parameters(), **self.buffers()}
        return load_arrays(f"{type(self).__name__}.load_state_dict", target, state, strict)

    def describe(self) -> str:
        """Return the text between the parentheses of the module's repr."""
        return ""

    def __repr__(self) -> str:
        head = f"{type(self).__name__}({self.describe()}"
        if not self._children:
            return head + ")"
        lines = (f"  {name}: {child!r}".replace("\n", "\n  ") for name, child in self._children.items())
        return "\n".join([head, *lines, ")"])


class Sequential(Module):
    """Modules one after the other: ``Sequential(a, b)``, named "0" and "1", or ``Sequential(first=a, second=b)``."""

    def __init__(self, *layers: Module, **named: Module) -> None:
        if layers and named:
            raise TypeError("Sequential: name all layers or none")
        for name, layer in (named or {str(i): layer for i, layer in enumerate(layers)}).items():
            if not isinstance(layer, Module):
                raise TypeError(f"Sequential: layer {name} is a {type(layer).__name__}, must be a Module")
            if hasattr(self, name):
                raise ValueError(f"Sequential: the name {name!r} is taken")
            setattr(self, name, layer)
        for _ in self.modules():  # refuses a layer that is in two places
            pass

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._children.values())

    def __getitem__(self, which: int | str) -> Module:
        """Return a layer by index or by name."""
        return self._children[which] if isinstance(which, str) else list(self)[which]

    def forward(self, x: Array) -> Array:
        for layer in self:
            x = layer.forward(x)
        return x

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        layers = list(self)
        # Options are passed on only if they are set, so that a custom layer may define just backward(dy).
        options: dict[str, bool] = {"accumulate": True} if accumulate else {}
        for layer in reversed(layers[1:]):
            dx = layer.backward(dy, **options)
            if dx is None:
                raise TypeError(f"Sequential.backward: {type(layer).__name__} gives no dx, so it must come first")
            dy = dx
        if not need_dx:
            options["need_dx"] = False
        return layers[0].backward(dy, **options) if layers else dy


def load_arrays(function: str, target: Mapping[str, Array], state: Mapping[str, Array], strict: bool) -> KeyDifferences:
    """Copy `state` into the arrays of `target`, if names, shapes and dtypes match."""
    differences = check_arrays(function, target, state, strict)
    copy_arrays(target, state)
    return differences


def check_arrays(
    function: str, target: Mapping[str, Array], state: Mapping[str, Array], strict: bool
) -> KeyDifferences:
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


def copy_arrays(target: Mapping[str, Array], state: Mapping[str, Array]) -> None:
    for name, array in target.items():
        if name in state:
            array[...] = state[name]


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _holds_module(value: list[object] | tuple[object, ...] | dict[object, object]) -> bool:
    return any(isinstance(item, Module) for item in (value.values() if isinstance(value, dict) else value))
