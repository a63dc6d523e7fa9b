"""MPSKernel and its unary and binary matrix kernels: everything but the arithmetic."""

from __future__ import annotations

from typing import Any, ClassVar, Final, NoReturn, TypeVar, cast

from ..ops._planned import Planned, Version, Versioned
from ._archive import NSKeyedArchiver, NSKeyedUnarchiver
from ._metal import MTLCommandBuffer, MTLCreateSystemDefaultDevice, MTLDevice, Work
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

ABSENT: Final[Any] = object()  # distinguishes coder=None, which is an error, from no coder

T = TypeVar("T")
Kernel = TypeVar("Kernel", bound="MPSKernel")


class KernelSetting(Setting[T]):
    """A member that affects the kernel's work: setting it invalidates plans."""

    def __set__(self, instance: object, value: Any) -> None:
        super().__set__(instance, value)
        cast(MPSKernel, instance)._changed()


class MPSKernel(Members, Versioned):
    """A kernel: `Kernel(device=)`, or `Kernel(coder=, device=)` to restore one from an archive.

    `encode` reads the members when it is called; they can be changed right after.
    """

    options = Setting[MPSKernelOptions](
        as_options, MPSKernelOptions.none, "Flags. Arguments are always checked, even with skipAPIValidation."
    )
    label = Setting[str | None](as_label, None, "Debug label.")

    _default_device = staticmethod(MTLCreateSystemDefaultDevice)
    supportsSecureCoding: ClassVar[bool] = True
    _settings: ClassVar[tuple[Setting[Any], ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        settings = {}
        for base in reversed(cls.__mro__):
            settings.update({n: member for n, member in vars(base).items() if isinstance(member, Setting)})
        # PyObjC subclasses redefine the members as methods; they keep the settings of the base.
        cls._settings = tuple(settings.values())

    def __init__(self, device: MTLDevice | None = None, *, coder: NSKeyedUnarchiver = ABSENT) -> None:
        """`device` is required unless there is a coder."""
        function = type(self).__name__
        if coder is not ABSENT:
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
        if coder is not ABSENT:
            self._restore(coder)

    @property
    def device(self) -> MTLDevice:
        return self._device

    def copy(self: Kernel, with_: None = None, device: MTLDevice | None = None) -> Kernel:
        """Copy the kernel, for `device` if given. `with_`, a zone, is ignored."""
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
        """Check the operands and return the work on them."""
        raise NotImplementedError(f"{type(self).__name__} is abstract")

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
    """The checked work, kept as a plan: checking takes longer than a small kernel runs, and most encodes repeat."""
    return kernel._prepare(operands)


def open_buffer(function: str, name: str, commandBuffer: object) -> MTLCommandBuffer:
    """A command buffer that has not been committed."""
    if not isinstance(commandBuffer, MTLCommandBuffer):
        raise wrong_type(function, name, commandBuffer, MTLCommandBuffer)
    commandBuffer._check_open(function)
    return commandBuffer


def wrong_type(function: str, name: str, value: object, expected: type) -> TypeError:
    if value is None:
        return TypeError(f"{function}: {name} is missing; it is required")
    return TypeError(f"{function}: {name} must be an {expected.__name__}, not {type(value).__name__}")


class MPSMatrixUnaryKernel(MPSKernel):
    """A kernel with one source."""

    sourceMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the source is read from.")
    resultMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the result is written.")
    batchStart = KernelSetting[int](as_unsigned, 0, "Index of the first matrix to process.")
    batchSize = KernelSetting[int](as_unsigned, NSUIntegerMax, "Maximum number of matrices to process; by default all.")
    _sourceMatrixOrigin: MTLOrigin
    _resultMatrixOrigin: MTLOrigin


class MPSMatrixBinaryKernel(MPSKernel):
    """A kernel with two sources."""

    primarySourceMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the first source is read from.")
    secondarySourceMatrixOrigin = KernelSetting[MTLOrigin](
        as_origin, MTLOrigin(), "Where the second source is read from."
    )
    resultMatrixOrigin = KernelSetting[MTLOrigin](as_origin, MTLOrigin(), "Where the result is written.")
    batchStart = KernelSetting[int](as_unsigned, 0, "Index of the first matrix to process.")
    batchSize = KernelSetting[int](as_unsigned, NSUIntegerMax, "Maximum number of matrices to process; by default all.")
    _primarySourceMatrixOrigin: MTLOrigin
    _secondarySourceMatrixOrigin: MTLOrigin
    _resultMatrixOrigin: MTLOrigin
