"""What all layers share: named parameters with their gradients, children, training and evaluation, state."""

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
    """Arrays by name, each in memory that is as large as was ever needed."""

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}
        self._views: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """The array of this name, in this shape, its contents unknown."""
        view = self._views.get(name)
        if view is None or view.shape != shape or view.dtype != dtype:
            size, flat = math.prod(shape), self._flat.get(name)
            if flat is None or flat.size < size or flat.dtype != dtype:
                flat = self._flat[name] = np.empty(size, dtype)
            view = self._views[name] = flat[:size].reshape(shape)
        return view


# ---- which backward belongs to which forward -------------------------------------------------------------------------
#
# A module keeps what its last forward pass needs, so every backward must belong to that pass. Forward passes and
# backward passes are numbered by one clock. A pass of a model spans the numbers of all passes inside it, which tells
# whether a layer ran once, twice or not at all in the pass that the model's backward belongs to.

_CLOCK: Final = itertools.count(1)


class _Pass:
    """The last forward pass of a module. Each module has one for life, so that a step allocates nothing."""

    __slots__ = ("abandoned", "before", "began", "done", "ended", "inside", "shape", "training")

    def __init__(self) -> None:
        self.before = 0  # when the pass before it began
        self.began = 0  # 0: there was none
        self.ended = 0  # 0: it failed, or has not ended yet
        self.training = False
        self.shape: tuple[int, ...] | None = None  # of the result
        self.done = False  # backward has used it
        # A training pass before it was never used: the next backward may have been meant for that one.
        self.abandoned = False
        self.inside = False  # forward or backward is running


class _Backward(NamedTuple):
    """The outermost backward of this thread."""

    module: Module
    forward: _Pass | None  # what it belongs to, if the module ran forward as a whole
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
                "last of these passes. Run passes that need no backward in evaluation: eval()",
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
        return  # it has nothing to mix up, and its children check for themselves
    if last.done:
        raise RuntimeError(
            f"{_title(module)}: backward has run already for its last forward pass, and there is one backward for each "
            "forward. To run it again, run forward again. A layer used in two places must be two layers, because it "
            "remembers its last forward pass only"
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
                "the last time only. Make it two layers, or pass both inputs through it as one batch"
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
    """What an error of backward begins with: the class, and where the module is in the model."""
    model = _current.backward.module if _current.backward is not None else module
    names = [repr(name) for name, inside in _walk(model) if inside is module and name]
    kind = type(module).__name__
    return f"{kind}.backward" + (f" (layer {' and '.join(names)} of {type(model).__name__})" if names else "")


def _walk(module: Module, name: str = "", above: tuple[Module, ...] = ()) -> Iterator[tuple[str, Module]]:
    """A module and all below it by their dotted names; one that is in several places has several."""
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

    A subclass writes ``forward(x)``, which keeps what backward will need, and ``backward(dy)``, which puts the
    gradients of the parameters into their arrays and returns ``dx``. `add_parameter("w", array)` makes ``self.w`` and
    its gradient ``self.dw``; a module assigned to an attribute is a child, whose parameters are named after the
    attribute: ``"lstm.layer0.wx"``.

    All layers here have ``backward(dy, *, accumulate=False, need_dx=True)``. Gradients are overwritten; with
    `accumulate` they are added to what is there, all but ``dx``. With ``need_dx=False`` it is not computed, and None.

    Each backward belongs to the module's last forward pass, and each forward pass has one backward. Anything else is
    refused, such as a layer that is used twice in one pass.

    In training a module gives its results in memory that it will use again: they hold until its next forward or
    backward. In evaluation results are fresh arrays.
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

    # Callables of any arguments, so that a subclass can choose its own.
    forward: Callable[..., Any] = _missing("forward")
    backward: Callable[..., Any] = _missing("backward")

    def add_parameter(self, name: str, values: Array) -> None:
        """Make ``self.<name>`` a parameter of these values (the array itself), and ``self.d<name>`` its gradient."""
        if values.dtype not in (np.float32, np.float64):
            raise TypeError(
                f"{type(self).__name__}: parameter {name} has dtype {values.dtype}; float32 or float64 learn"
            )
        for attribute in (name, f"d{name}"):
            self._check_new(attribute)
        self._parameters.append(name)
        self.__dict__[name] = values
        self.__dict__[f"d{name}"] = np.zeros_like(values)

    def add_buffer(self, name: str, values: Array) -> None:
        """Make ``self.<name>`` an array that is not learned but belongs to the state, such as a running mean."""
        self._check_new(name)
        self._buffers.append(name)
        self.__dict__[name] = values

    def set_gradient(self, name: str, gradient: Array, accumulate: bool = False) -> None:
        """Put a parameter's gradient in its place, or add it to what is there."""
        place: Array = self.__dict__[f"d{name}"]
        if gradient.shape != place.shape:
            raise ValueError(
                f"{type(self).__name__}.set_gradient: the gradient has shape {gradient.shape}, "
                f"but {name} has shape {place.shape}"
            )
        if accumulate:
            place += gradient
        else:
            place[...] = gradient

    def reuse(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """An array of this shape, its contents unknown: in training the same memory each time, else a fresh one."""
        return self._memory.take(name, shape, dtype) if self.training else np.empty(shape, dtype)

    def keep(self, **values: Any) -> None:
        """Keep for backward what forward has seen. It is no part of the state, nor of a copy of the module."""
        self._kept.update(values)

    def kept(self, name: str) -> Any:
        """What forward has kept by this name."""
        try:
            return self._kept[name]
        except KeyError:
            raise RuntimeError(f"{_title(self)}: there was no forward pass") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": Memory(), "_kept": {}, "_pass": _Pass()}

    def _check_new(self, name: str) -> None:
        if not name.isidentifier() or hasattr(self, name):
            why = "is taken" if name.isidentifier() else "is no identifier"
            raise ValueError(f"{type(self).__name__}: the name {name!r} of a parameter or buffer {why}")

    def __setattr__(self, name: str, value: object) -> None:
        kept = name in self._parameters or name in self._buffers or (name[:1] == "d" and name[1:] in self._parameters)
        if kept and value is not self.__dict__[name]:
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
        """This module, by the name "", and all below it, by their dotted names."""
        seen: dict[int, str] = {}

        def walk(name: str, module: Module) -> Iterator[tuple[str, Module]]:
            if id(module) in seen:
                raise ValueError(
                    f"{type(self).__name__}: {seen[id(module)]} and {name} are the same {type(module).__name__}; a "
                    "module remembers its last forward pass only, so make one for each place"
                )
            seen[id(module)] = name
            yield name, module
            for child, inside in module._children.items():
                yield from walk(_dotted(name, child), inside)

        return walk("", self)

    def parameters(self) -> dict[str, Array]:
        """All parameters by their dotted names: the arrays themselves, not copies."""
        return {_dotted(path, name): getattr(m, name) for path, m in self.modules() for name in m._parameters}

    def gradients(self) -> dict[str, Array]:
        """The gradients of all parameters, by the parameters' names: the arrays themselves, not copies."""
        return {_dotted(path, name): getattr(m, f"d{name}") for path, m in self.modules() for name in m._parameters}

    def buffers(self) -> dict[str, Array]:
        """What belongs to the state but is not learned, by dotted names."""
        return {_dotted(path, name): getattr(m, name) for path, m in self.modules() for name in m._buffers}

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned."""
        return sum(array.size for array in self.parameters().values())

    def train(self: _M) -> _M:
        """Dropout drops, batch norm uses the batch's statistics, memory is used again. Returns the module."""
        return self._for_all("training", True)

    def eval(self: _M) -> _M:
        """Nothing is dropped, batch norm uses running statistics, results are fresh arrays. Returns the module."""
        return self._for_all("training", False)

    def set_num_threads(self: _M, threads: int | None) -> _M:
        """How many threads the layers use; None: what :func:`retrograd.set_num_threads` said. Returns the module."""
        return self._for_all("num_threads", threads)

    def _for_all(self: _M, name: str, value: object) -> _M:
        for _, module in self.modules():
            setattr(module, name, value)
        return self

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Array]:
        """Copies of all parameters and buffers, by dotted names."""
        return {name: array.copy() for name, array in {**self.parameters(), **self.buffers()}.items()}

    def load_state_dict(self, state: Mapping[str, Array], *, strict: bool = True) -> KeyDifferences:
        """Copy a state into the parameters and buffers. Nothing is written if something does not fit.

        Names must agree, unless `strict` is False: then what both have is loaded, and the difference returned.
        """
        own = {**self.parameters(), **self.buffers()}
        return load_arrays(f"{type(self).__name__}.load_state_dict", own, state, strict)

    def describe(self) -> str:
        """What stands between the brackets of the module's repr."""
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
        """A layer by its place or by its name."""
        return self._children[which] if isinstance(which, str) else list(self)[which]

    def forward(self, x: Array) -> Array:
        for layer in self:
            x = layer.forward(x)
        return x

    def backward(self, dy: Array, *, accumulate: bool = False, need_dx: bool = True) -> Array | None:
        layers = list(self)
        # Only what is asked for is passed on, so that a layer of one's own can do with backward(dy).
        options: dict[str, bool] = {"accumulate": True} if accumulate else {}
        for layer in reversed(layers[1:]):
            dx = layer.backward(dy, **options)
            if dx is None:
                raise TypeError(f"Sequential.backward: {type(layer).__name__} gives no dx, so it must come first")
            dy = dx
        if not need_dx:
            options["need_dx"] = False
        return layers[0].backward(dy, **options) if layers else dy


def load_arrays(function: str, own: Mapping[str, Array], state: Mapping[str, Array], strict: bool) -> KeyDifferences:
    """Copy `state` into the arrays of `own`, if all of it fits."""
    differences = check_arrays(function, own, state, strict)
    copy_arrays(own, state)
    return differences


def check_arrays(function: str, own: Mapping[str, Array], state: Mapping[str, Array], strict: bool) -> KeyDifferences:
    missing = tuple(name for name in own if name not in state)
    unexpected = tuple(name for name in state if name not in own)
    if strict and (missing or unexpected):
        parts = (("does not have", missing), ("has, and this has not,", unexpected))
        said = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
        raise ValueError(f"{function}: the state {said}")
    for name in own:
        if name not in state:
            continue
        given, place = np.asarray(state[name]), own[name]
        if given.shape != place.shape:
            raise ValueError(f"{function}: {name} has shape {given.shape}, but here it has shape {place.shape}")
        if given.dtype != place.dtype:
            raise TypeError(f"{function}: {name} has dtype {given.dtype}, but here it has dtype {place.dtype}")
    return KeyDifferences(missing, unexpected)


def copy_arrays(own: Mapping[str, Array], state: Mapping[str, Array]) -> None:
    for name, place in own.items():
        if name in state:
            place[...] = state[name]


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _holds_module(value: list[object] | tuple[object, ...] | dict[object, object]) -> bool:
    return any(isinstance(item, Module) for item in (value.values() if isinstance(value, dict) else value))
