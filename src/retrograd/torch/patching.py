"""Replace the layers of models that are built later, inside other libraries."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from .recurrent import DropoutMasks, check_dropout_masks
from .replacing import REPLACEMENTS, Only, Replacements, as_choice, replace, replace_one

__all__ = ["Patch", "lightning_callback", "patch"]


class Patch:
    """The layers that were replaced since :func:`patch` was called, and those that were left, with the reason.

    Both are by name: the class of the module that has the layer and its attribute, or the layer's class alone.
    """

    def __init__(self, only: Only, dropout_masks: DropoutMasks | None = None) -> None:
        self.replaced: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._selected, self._masks = as_choice(only, "patch"), dropout_masks
        if dropout_masks is not None:
            check_dropout_masks("patch", dropout_masks)
        self._labels: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def see(self, name: str, layer: torch.nn.Module) -> None:
        """Replace a layer if it can be. A layer that has got a name since it was built is listed by that name."""
        before = self._labels.pop(layer, "")
        done = self.replaced.pop(before, "")
        self.left.pop(before, None)
        result = Replacements({}, {})
        replace_one(name, layer, self._selected, self._masks, result)
        if done:
            result.replaced[name] = done
        for found, all_found in ((result.replaced, self.replaced), (result.left, self.left)):
            for what in found.values():
                label, count = name, 1
                while label in self.replaced or label in self.left:
                    count += 1
                    label = f"{name} ({count})"
                all_found[label] = what
                self._labels[layer] = label

    def stop(self) -> None:
        """Leave the layers of later models as they are. Those that were replaced stay replaced."""
        if self in _active:
            _active.remove(self)
            if not _active:
                _uninstall()

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __str__(self) -> str:
        return str(Replacements(self.replaced, self.left))


_active: Final[list[Patch]] = []
_undo: Final[list[Callable[[], Any]]] = []


def patch(*, only: Only = None, dropout_masks: DropoutMasks | None = None) -> Patch:
    """Replace the recurrent layers and normalizations of models that are built from now on.

    ``with rt.patch() as patched:`` stops at the end of the block, ``patched = rt.patch()`` with ``patched.stop()``.
    `patched.replaced` and `patched.left` list the layers, as :func:`replace` does; `only` and `dropout_masks` are its
    arguments. It acts on the whole process: layers are replaced when they are built, or become part of a module.
    """
    made = Patch(only, dropout_masks)
    if not _active:
        _install()
    _active.append(made)
    return made


def _install() -> None:
    def seen(module: torch.nn.Module, name: str, layer: torch.nn.Module | None) -> None:
        if layer is not None:
            for one in list(_active):
                one.see(f"{type(module).__name__}.{name}", layer)

    _undo.append(register_module_module_registration_hook(seen).remove)
    # A layer that is a whole model is registered nowhere.
    for kind in REPLACEMENTS:
        _undo.append(_after_construction(kind))


def _after_construction(kind: type[torch.nn.Module]) -> Callable[[], None]:
    """See the layers of this class when their constructor is done. Returns what undoes it."""
    own, construct = kind.__dict__.get("__init__"), kind.__init__

    @functools.wraps(construct)
    def constructor(self: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        construct(self, *arguments, **options)
        for one in list(_active):
            one.see(type(self).__name__, self)

    def undo() -> None:
        if own is None:
            del kind.__init__
        else:
            kind.__init__ = own  # type: ignore[method-assign]

    kind.__init__ = constructor  # type: ignore[method-assign]
    return undo


def _uninstall() -> None:
    while _undo:
        _undo.pop()()


def lightning_callback(
    *, only: Only = None, fuse: bool = False, dropout_masks: DropoutMasks | None = None, verbose: bool = True
) -> Any:
    """A callback for a `Trainer` of Lightning, which replaces the model's layers before it is trained or used.

    The arguments are those of :func:`replace`. The callback can be pickled if they can.
    """
    as_choice(only, "lightning_callback")
    package: Any
    try:
        if "pytorch_lightning" in sys.modules:  # the older package has classes of its own
            import pytorch_lightning

            package = pytorch_lightning
        else:
            import lightning.pytorch

            package = lightning.pytorch
    except ImportError:
        raise ImportError("lightning_callback: needs Lightning: pip install lightning") from None
    return _callback_class(package.Callback)(only, fuse, dropout_masks, verbose)


@functools.lru_cache
def _callback_class(base: Any) -> Any:
    class Replace(base):  # type: ignore[misc]
        """Replaces a model's layers by retrograd's."""

        def __init__(self, only: Only, fuse: bool, dropout_masks: DropoutMasks | None, verbose: bool) -> None:
            super().__init__()
            self.options: dict[str, Any] = {
                "only": only, "fuse": fuse, "dropout_masks": dropout_masks, "verbose": verbose
            }  # fmt: skip

        def setup(self, trainer: Any, pl_module: torch.nn.Module, stage: str) -> None:
            replace(pl_module, **self.options)

        def __reduce__(self) -> Any:  # no module has this class
            return functools.partial(lightning_callback, **self.options), ()

    return Replace
