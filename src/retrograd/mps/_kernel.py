"""MPSKernel and the two shapes of matrix kernels: what every kernel has besides its arithmetic."""

from __future__ import annotations

from typing import Any, ClassVar, Final, NoReturn, TypeVar, cast

from ..ops._planned import Planned, Version, Versioned
from ._archive import NSKeyedArchiver, NSKeyedUnarchiver
from ._metal import MTLCreateSystemDefaultDevice, MTLDevice, Work
from ._types import (
    Members,
    MPSKernelOptions,
    MTLOrigin,
    NSUIntegerMax,
    Setting,
    as_label,
    as_options,
    as_origin,
    as_unsigned,
)

_ABSENT: Final[Any] = object()  # None is a mistake where a coder is asked for

T = TypeVar("T")
Kernel = TypeVar("Kernel", bound="MPSKernel")


class KernelSetting(Setting[T]):
    """A member that the kernel's work depends on."""

    def __set__(self, instance: object, value: Any) -> None:
        super().__set__(instance, value)
        cast(MPSKernel, instance)._changed()


class MPSKernel(Members, Versioned):
    """A kernel: `Kernel(device=)`, or `Kernel(coder=, device=)` to restore one from an archive.

    Encoding takes the members as they are then; afterwards they can be changed at once.
    """

    options = Setting[MPSKernelOptions](
        as_options, MPSKernelOptions.none, "Flags. Arguments are always checked, whatever they say."
    )
    label = Setting[str | None](as_label, None, "A name for people.")

    _default_device = staticmethod(MTLCreateSystemDefaultDevice)
    supportsSecureCoding: ClassVar[bool] = True
    _settings: ClassVar[tuple[Setting[Any], ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        settings = {}
        for base in reversed(cls.__mro__):
            settings.update({n: member for n, member in vars(base).items() if isinstance(member, Setting)})
        # A face of another spelling has no settings of its own, and those of its base.
        cls._settings = tuple(settings.values())

    def __init__(self, device: MTLDevice | None = None, *, coder: NSKeyedUnarchiver = _ABSENT) -> None:
        """`device` is needed, unless there is a coder, which does without one."""
        function = type(self).__name__
        if coder is not _ABSENT:
            if not isinstance(coder, NSKeyedUnarchiver):
                raise TypeError(f"{function}: coder must be an NSKeyedUnarchiver, not {type(coder).__name__}")
            if device is None:
                device = self._default_device()
        if not isinstance(device, MTLDevice):
            raise TypeError(f"{function}: device must be an MTLDevice, not {type(device).__name__}")
        self._device = device
        self._changed()
        for setting in self._settings:
            setattr(self, setting.attribute, setting.default)
        if coder is not _ABSENT:
            self._restore(coder)

    @property
    def device(self) -> MTLDevice:
        return self._device

    def copy(self: Kernel, with_: None = None, device: MTLDevice | None = None) -> Kernel:
        """The same kernel for `device`, or for its own. `with_` is a zone, of which there are none."""
        if device is not None and not isinstance(device, MTLDevice):
            raise TypeError(f"{type(self).__name__}.copy: device must be an MTLDevice, not {type(device).__name__}")
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._changed()
        if device is not None:
            made._device = device
        return made

    def __copy__(self: Kernel) -> Kernel:
        return MPSKernel.copy(self)

    def __deepcopy__(self: Kernel, memo: object) -> Kernel:
        return MPSKernel.copy(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled; archive it with NSKeyedArchiver.archivedData")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{'' if self._label is None else ' ' + self._label}>"  # type: ignore[attr-defined]

    def _changed(self) -> None:
        self._version = Version()

    def _prepare(self, operands: tuple[Any, ...]) -> Work:
        """The work on these operands, all of it checked."""
        raise NotImplementedError(f"{type(self).__name__} does nothing by itself")

    # ---- archives

    def _encode_with(self, coder: NSKeyedArchiver) -> None:
        if not isinstance(coder, NSKeyedArchiver):
            raise TypeError(
                f"{type(self).__name__}.encode: with_ must be an NSKeyedArchiver, not {type(coder).__name__}"
            )
        self._archive(coder)

    def _archive(self, archiver: NSKeyedArchiver) -> None:
        for setting in self._settings:
            value = getattr(self, setting.attribute)
            if isinstance(value, MTLOrigin):
                for axis, part in zip("xyz", value, strict=True):
                    archiver.encode(part, f"{setting.name}.{axis}")
            else:
                archiver.encode(value, setting.name)

    def _restore(self, unarchiver: NSKeyedUnarchiver) -> None:
        for setting in self._settings:
            name, default = setting.name, setting.default
            value: Any
            if default is None:
                value = unarchiver.decodeString(name)
            elif isinstance(default, bool):
                value = unarchiver.decodeBool(name)
            elif isinstance(default, float):
                value = unarchiver.decodeDouble(name)
            elif isinstance(default, MTLOrigin):
                value = tuple(_unsigned(unarchiver, f"{name}.{axis}") for axis in "xyz")
            else:
                value = _unsigned(unarchiver, name)
            setting.__set__(self, value)

    @classmethod
    def _unarchived(cls: type[Kernel], unarchiver: NSKeyedUnarchiver) -> Kernel:
        return cls(coder=unarchiver)


def _unsigned(unarchiver: NSKeyedUnarchiver, key: str) -> int:
    return unarchiver.decodeInteger(key) % 2**64


@Planned
def planned_work(kernel: MPSKernel, *operands: Any) -> Work:
    """Checked work, which takes longer to prepare than a small kernel runs; most are encoded again and again."""
    return kernel._prepare(operands)


class MPSMatrixUnaryKernel(MPSKernel):
    """A kernel of one source."""

    sourceMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the source is read from.")
    resultMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the result is written.")
    batchStart = KernelSetting[int](as_unsigned, 0, "The first matrix of several.")
    batchSize = KernelSetting[int](as_unsigned, NSUIntegerMax, "How many matrices at most; by default all there are.")
    _sourceMatrixOrigin: MTLOrigin
    _resultMatrixOrigin: MTLOrigin


class MPSMatrixBinaryKernel(MPSKernel):
    """A kernel of two sources."""

    primarySourceMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the first source is read from.")
    secondarySourceMatrixOrigin = KernelSetting[MTLOrigin](
        as_origin, MTLOrigin(), "Where the second source is read from."
    )
    resultMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the result is written.")
    batchStart = KernelSetting[int](as_unsigned, 0, "The first matrix of several.")
    batchSize = KernelSetting[int](as_unsigned, NSUIntegerMax, "How many matrices at most; by default all there are.")
    _primarySourceMatrixOrigin: MTLOrigin
    _secondarySourceMatrixOrigin: MTLOrigin
    _resultMatrixOrigin: MTLOrigin
