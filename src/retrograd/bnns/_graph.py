"""C's functions of graphs, over the context that Swift's class is. They return Apple's codes.

A graph, a context and compile options are structures of two words, as in C; the first one is the key to an object.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import numpy as np

from . import _constants as c
from ._array_size import BNNSTensor
from ._failure import Invalid, Unsupported, status
from ._memory import address_of, as_integer, as_size, bytes_of
from ._structures import Pointer, Size, Structure

if TYPE_CHECKING:
    from ._graph_context import Context, Entry
    from ._graph_model import Model

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F")
_T = TypeVar("_T")
_DEFAULT_MASK: Final = (
    c.BNNSGraphMessageLevelUnsupported | c.BNNSGraphMessageLevelWarning | c.BNNSGraphMessageLevelError
)


class Handle(int):
    """The key to an object behind a handle."""

    object: Any

    @classmethod
    def of(cls, target: Any) -> Handle:
        made = cls(id(target))
        made.object = target
        return made


class _Handle(Structure):
    data: Pointer
    size: Size


class bnns_graph_t(_Handle):
    """A compiled graph. `data` is NULL if compilation failed."""


class bnns_graph_context_t(_Handle):
    """What executes a graph. `data` is NULL if it could not be made."""


class bnns_graph_compile_options_t(_Handle):
    """How a graph is compiled."""


class bnns_graph_shape_t(Structure):
    """The sizes of an argument. `shape` is a list or an array, which is written to."""

    rank: Size
    shape: Pointer


class bnns_graph_argument_t(Structure):
    """An argument: memory, or a tensor. In C the first field is a union, ``tensor`` is another name of it here."""

    data_ptr: Pointer
    data_ptr_size: Size

    def __init__(self, *values: Any, tensor: BNNSTensor | None = None, **named: Any) -> None:
        super().__init__(*values, **(named if tensor is None else {**named, "data_ptr": tensor}))

    @property
    def tensor(self) -> Any:
        return self.data_ptr

    @tensor.setter
    def tensor(self, tensor: BNNSTensor) -> None:
        self.data_ptr = tensor


class bnns_user_message_data_t(Structure):
    """What a message callback gets as it is."""

    size: Size
    data: Pointer


# ---- failures -------------------------------------------------------------------------------------------------------


class Messages:
    """Where messages go: to a callback ``(level, text, where, extra)``, those of levels in the mask."""

    def __init__(self) -> None:
        self.callback: Callable[[int, str, str, Any], None] | None = None
        self.extra: Any = None
        self.mask = _DEFAULT_MASK

    def set(self, callback: Any, extra: Any) -> None:
        _check_callable("log_callback", callback)
        self.callback, self.extra = callback, extra

    def send(self, level: int, text: str, where: str) -> None:
        if self.callback is not None and level & self.mask:
            self.callback(level, text, where, self.extra)


class _Options:
    def __init__(self) -> None:
        self.useSingleThread = False
        self.generateDebugInfo = False
        self.optimizationPreference = c.BNNSGraphOptimizationPreferencePerformance
        self.path: str | None = None
        self.descriptor = -1
        self.messages = Messages()


class _Graph:
    def __init__(self, model: Model, options: _Options) -> None:
        from ._graph_context import Context

        self.model, self.options = model, options
        self.context = Context.of(model)  # answers queries of the graph


class _Executed:
    """A context with what C's functions set."""

    def __init__(self, graph: _Graph) -> None:
        from ._graph_context import Context
        from ._graph_values import CompileOptions

        options = CompileOptions(useSingleThread=graph.options.useSingleThread)
        self.context: Context = Context.of(graph.model, options)
        self.messages = Messages()
        self.argument_type = c.BNNSGraphArgumentTypePointer
        self.allocators: dict[str, tuple[Any, Any, int, Any]] = {}


def _reports(failure: _F, name: str | None = None) -> Callable[[Callable[_P, _R]], Callable[_P, _R | _F]]:
    """A function that returns a code, and tells the callback of its options or context why it failed.

    `name` is Apple's, if it is not the function's own.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R | _F]:
        apples = name or function.__name__

        @functools.wraps(function)
        def told(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                return function(*args, **kwargs)
            except Unsupported as error:
                _tell(args, c.BNNSGraphMessageLevelUnsupported, str(error), apples)
                raise
            except (IndexError, OSError) as error:
                _tell(args, c.BNNSGraphMessageLevelError, str(error), apples)
                raise Invalid(str(error)) from None
            except (ValueError, TypeError, OverflowError, MemoryError) as error:
                _tell(args, c.BNNSGraphMessageLevelError, str(error), apples)
                raise

        return status(failure, name=apples)(told)

    return decorate


def _tell(args: Sequence[Any], level: int, text: str, where: str) -> None:
    for one in args:
        target = one.data.object if isinstance(one, _Handle) and isinstance(one.data, Handle) else None
        messages = getattr(target, "messages", None) or getattr(getattr(target, "options", None), "messages", None)
        if messages is not None:
            messages.send(level, text, where)


def _of(name: str, value: Any, kind: type[Structure], target: type[_T]) -> _T:
    """The object behind a handle."""
    if not isinstance(value, kind):
        raise Invalid(f"{name} is of type {type(value).__name__}, not {kind.__name__}")
    handle: Any = value.data  # type: ignore[attr-defined]
    if not isinstance(handle, Handle) or not isinstance(handle.object, target):
        raise Invalid(f"{name} is NULL, or was destroyed")
    return handle.object


def _options(value: Any) -> _Options:
    return _of("options", value, bnns_graph_compile_options_t, _Options)


def _context(value: Any) -> _Executed:
    return _of("context", value, bnns_graph_context_t, _Executed)


def _entry(graph: Any, function: str | bytes | None) -> Entry:
    return _of("graph", graph, bnns_graph_t, _Graph).context.entry(_text(function))


def _text(name: str | bytes | None) -> str | None:
    if not isinstance(name, (str, bytes, type(None))):
        raise Invalid(f"a name is of type {type(name).__name__}, not str or bytes")
    return name.decode() if isinstance(name, bytes) else name


def _check_callable(name: str, function: Any) -> None:
    if function is not None and not callable(function):
        raise Invalid(f"{name} is of type {type(function).__name__}, which cannot be called")


def _destroyed(value: _Handle) -> None:
    if isinstance(value.data, Handle):
        value.data.object = None


# ---- options --------------------------------------------------------------------------------------------------------


def BNNSGraphCompileOptionsMakeDefault() -> bnns_graph_compile_options_t:
    """Return new options, with several threads and no debug information."""
    return bnns_graph_compile_options_t(Handle.of(_Options()), 1)


@status(None)
def BNNSGraphCompileOptionsDestroy(options: bnns_graph_compile_options_t) -> None:
    """Release options."""
    _options(options)
    _destroyed(options)


@_reports(None)
def BNNSGraphCompileOptionsSetTargetSingleThread(options: bnns_graph_compile_options_t, value: bool) -> None:
    """Whether the graph runs in the caller's thread alone."""
    _options(options).useSingleThread = bool(value)


@status(False)
def BNNSGraphCompileOptionsGetTargetSingleThread(options: bnns_graph_compile_options_t) -> bool:
    """Return whether the graph runs in the caller's thread alone."""
    return _options(options).useSingleThread


@_reports(None)
def BNNSGraphCompileOptionsSetGenerateDebugInfo(options: bnns_graph_compile_options_t, value: bool) -> None:
    """Whether to keep debug information. Kept as it is; graphs always have names."""
    _options(options).generateDebugInfo = bool(value)


@status(False)
def BNNSGraphCompileOptionsGetGenerateDebugInfo(options: bnns_graph_compile_options_t) -> bool:
    """Return whether to keep debug information."""
    return _options(options).generateDebugInfo


@_reports(None)
def BNNSGraphCompileOptionsSetOptimizationPreference(options: bnns_graph_compile_options_t, preference: int) -> None:
    """Set a BNNSGraphOptimizationPreference. Kept as it is; programs are the same for both."""
    if preference not in (c.BNNSGraphOptimizationPreferencePerformance, c.BNNSGraphOptimizationPreferenceIRSize):
        raise Invalid(f"preference is {preference!r}, which is not a BNNSGraphOptimizationPreference")
    _options(options).optimizationPreference = preference


@status(c.BNNSGraphOptimizationPreferencePerformance)
def BNNSGraphCompileOptionsGetOptimizationPreference(options: bnns_graph_compile_options_t) -> int:
    """Return the BNNSGraphOptimizationPreference."""
    return _options(options).optimizationPreference


@_reports(None)
def BNNSGraphCompileOptionsSetOutputPath(options: bnns_graph_compile_options_t, path: Any) -> None:
    """Set the file that a compiled graph is written to, in retrograd's form; None for none."""
    _options(options).path = None if path is None else os.fsdecode(path)


@status(None)
def BNNSGraphCompileOptionsGetOutputPath(options: bnns_graph_compile_options_t) -> str | None:
    """Return the file that a compiled graph is written to."""
    return _options(options).path


@_reports(None)
def BNNSGraphCompileOptionsSetOutputFD(options: bnns_graph_compile_options_t, fd: int) -> None:
    """Set the file descriptor that a compiled graph is written to, which takes precedence over a path; -1 for none."""
    _options(options).descriptor = as_integer("fd", fd)


@status(-1)
def BNNSGraphCompileOptionsGetOutputFD(options: bnns_graph_compile_options_t) -> int:
    """Return the file descriptor that a compiled graph is written to."""
    return _options(options).descriptor


@_reports(None)
def BNNSGraphCompileOptionsSetMessageLogCallback(
    options: bnns_graph_compile_options_t, log_callback: Any, additional_logging_arguments: Any = None
) -> None:
    """Set a function ``(level, text, where, extra)`` for messages of the compilation; None for none."""
    _options(options).messages.set(log_callback, additional_logging_arguments)


@_reports(None)
def BNNSGraphCompileOptionsSetMessageLogMask(options: bnns_graph_compile_options_t, log_level_mask: int) -> None:
    """Set the levels of messages that the callback gets, as BNNSGraphMessageLevel bits."""
    _options(options).messages.mask = as_integer("log_level_mask", log_level_mask)


# ---- graphs ---------------------------------------------------------------------------------------------------------


@_reports(None, "BNNSGraphCompileFromFile")
def _compiled(filename: Any, function: Any, options: Any) -> bnns_graph_t | None:
    from ._graph_file import read_model, write_model

    chosen = _options(options) if options is not None else _Options()
    if filename is None:
        raise Invalid("filename is NULL")
    model = read_model(os.fsdecode(filename), _text(function) or None)
    if chosen.descriptor >= 0:
        write_model(model, chosen.descriptor)
    elif chosen.path is not None:
        write_model(model, chosen.path)
    return bnns_graph_t(Handle.of(_Graph(model, chosen)), 1)


def BNNSGraphCompileFromFile(
    filename: Any, function: str | bytes | None = None, options: bnns_graph_compile_options_t | None = None
) -> bnns_graph_t:
    """Read a graph from retrograd's own file or a Core ML package; `data` is None on failure.

    `function` is the one to read; None or an empty one: all. A compiled ``.mlmodelc`` is refused.
    """
    return _compiled(filename, function, options) or bnns_graph_t()


@status(c.SIZE_MAX)
def BNNSGraphGetInputCount(graph: bnns_graph_t, function: str | bytes | None = None) -> int:
    """Return the number of inputs, in-out arguments included; SIZE_MAX on failure."""
    return len(_entry(graph, function).inputs)


@status(c.SIZE_MAX)
def BNNSGraphGetOutputCount(graph: bnns_graph_t, function: str | bytes | None = None) -> int:
    """Return the number of outputs, without in-out arguments; SIZE_MAX on failure."""
    return len(_entry(graph, function).outputs)


@status(c.SIZE_MAX)
def BNNSGraphGetArgumentCount(graph: bnns_graph_t, function: str | bytes | None = None) -> int:
    """Return the number of arguments: of outputs and inputs. SIZE_MAX on failure."""
    return len(_entry(graph, function).names)


@status(c.SIZE_MAX)
def BNNSGraphGetFunctionCount(graph: bnns_graph_t) -> int:
    """Return the number of functions; SIZE_MAX on failure."""
    return _of("graph", graph, bnns_graph_t, _Graph).context.functionCount


def _filled(name: str, target: MutableSequence[Any], count: int, found: Sequence[Any]) -> int:
    """Write the first of these to a list or an array."""
    least = min(as_size(f"{name}_count", count), len(found))
    if len(target) < least:
        raise Invalid(f"{name} has {len(target)} elements, but {name}_count is {count}")
    for place in range(least):
        target[place] = found[place]
    return 0


@status(-1)
def BNNSGraphGetInputNames(
    graph: bnns_graph_t, function: str | bytes | None, input_names_count: int, input_names: MutableSequence[Any]
) -> int:
    """Write the names of the inputs to a list."""
    entry = _entry(graph, function)
    return _filled("input_names", input_names, input_names_count, entry.names[len(entry.outputs) :])


@status(-1)
def BNNSGraphGetOutputNames(
    graph: bnns_graph_t, function: str | bytes | None, output_names_count: int, output_names: MutableSequence[Any]
) -> int:
    """Write the names of the outputs to a list."""
    entry = _entry(graph, function)
    return _filled("output_names", output_names, output_names_count, entry.names[: len(entry.outputs)])


@status(-1)
def BNNSGraphGetArgumentNames(
    graph: bnns_graph_t, function: str | bytes | None, argument_names_count: int, argument_names: MutableSequence[Any]
) -> int:
    """Write the names of the arguments to a list, the outputs first."""
    return _filled("argument_names", argument_names, argument_names_count, _entry(graph, function).names)


@status(-1)
def BNNSGraphGetArgumentIntents(
    graph: bnns_graph_t,
    function: str | bytes | None,
    argument_intents_count: int,
    argument_intents: MutableSequence[Any],
) -> int:
    """Write the BNNSGraphArgumentIntent of each argument to a list, the outputs first."""
    found = [int(intent) for intent in _entry(graph, function).intents]
    return _filled("argument_intents", argument_intents, argument_intents_count, found)


@status(-1)
def BNNSGraphGetFunctionNames(
    graph: bnns_graph_t, function_name_count: int, function_name: MutableSequence[Any]
) -> int:
    """Write the names of the functions to a list."""
    names = _of("graph", graph, bnns_graph_t, _Graph).context.functionNames
    return _filled("function_name", function_name, function_name_count, names)


@status(c.SIZE_MAX)
def BNNSGraphGetArgumentPosition(graph: bnns_graph_t, function: str | bytes | None, argument: str | bytes) -> int:
    """Return the index of an argument for BNNSGraphContextExecute; SIZE_MAX on failure."""
    return _entry(graph, function).position(_text(argument) or "")


@status(-1)
def BNNSGraphGetArgumentInterleaveFactors(
    graph: bnns_graph_t,
    function: str | bytes | None,
    argument_count: int,
    interleave: MutableSequence[Any],
    interleave_counts: MutableSequence[Any],
) -> int:
    """Write None and 0 for each argument: none is interleaved."""
    count = len(_entry(graph, function).names)
    _filled("argument", interleave, argument_count, [None] * count)
    return _filled("argument", interleave_counts, argument_count, [0] * count)


@status(-1)
def BNNSGraphTensorFillStrides(
    graph: bnns_graph_t, function: str | bytes | None, argument: str | bytes, tensor: BNNSTensor
) -> int:
    """Set the strides of a tensor whose shape is known, to those of a contiguous one."""
    from ._graph_builder import contiguous_strides

    _entry(graph, function).position(_text(argument) or "")
    if not isinstance(tensor, BNNSTensor):
        raise Invalid(f"tensor is of type {type(tensor).__name__}, not BNNSTensor")
    shape = [as_integer("shape", size) for size in tensor.shape[: as_integer("rank", tensor.rank)]]
    if min(shape, default=0) < 0:
        raise Invalid(f"tensor has shape {shape}: a size is not known")
    tensor.stride = contiguous_strides(shape)
    return 0


# ---- contexts -------------------------------------------------------------------------------------------------------


@_reports(None, "BNNSGraphContextMake")
def _made_context(graph: Any) -> bnns_graph_context_t | None:
    return bnns_graph_context_t(Handle.of(_Executed(_of("graph", graph, bnns_graph_t, _Graph))), 1)


def BNNSGraphContextMake(graph: bnns_graph_t) -> bnns_graph_context_t:
    """Return a context that executes a graph; `data` is None on failure."""
    return _made_context(graph) or bnns_graph_context_t()


@_reports(None, "BNNSGraphContextMakeStreaming")
def _made_streaming(graph: Any, function: Any, count: int, tensors: Any) -> bnns_graph_context_t | None:
    _entry(graph, function)
    raise Unsupported("streaming is not supported: keep the state in an in-out argument")


def BNNSGraphContextMakeStreaming(
    graph: bnns_graph_t, function: str | bytes | None, initial_states_count: int, initial_states: Any
) -> bnns_graph_context_t:
    """Fail: streaming is not supported. Keep the state in an in-out argument."""
    return _made_streaming(graph, function, initial_states_count, initial_states) or bnns_graph_context_t()


@_reports(-1)
def BNNSGraphContextSetStreamingAdvanceCount(context: bnns_graph_context_t, advance_count: int) -> int:
    """Fail: streaming is not supported."""
    _context(context)
    raise Unsupported("streaming is not supported: keep the state in an in-out argument")


@status(None)
def BNNSGraphContextDestroy(context: bnns_graph_context_t) -> None:
    """Release a context, and call the functions that free what its callbacks have allocated, once for each data."""
    found = _context(context)
    freed: set[int] = set()
    for _, free_all, size, user in found.allocators.values():
        key = id(user)
        if free_all is not None and key not in freed:
            freed.add(key)
            free_all(user, size)
    _destroyed(context)


@_reports(-1)
def BNNSGraphContextSetDynamicShapes(
    context: bnns_graph_context_t,
    function: str | bytes | None,
    shapes_count: int,
    shapes: Sequence[bnns_graph_shape_t],
) -> int:
    """Set the shapes of all arguments; those of outputs that have a rank are filled in.

    Return 0 if all are exact now, 2 if some are not known, or -1. Nothing has bounds (1) here.
    """
    from ._graph_values import Shape

    found = _context(context).context
    count = as_size("shapes_count", shapes_count)
    if len(shapes) < count or any(not isinstance(one, bnns_graph_shape_t) for one in shapes[:count]):
        raise Invalid(f"shapes must have {count} elements of type bnns_graph_shape_t")
    values = [Shape(_sizes(f"shapes[{place}]", one)) for place, one in enumerate(shapes[:count])]
    code = found.set_shapes(_text(function), values)
    for one, value in zip(shapes, values, strict=False):
        for axis, size in enumerate(value):
            one.shape[axis] = size
    return code


def _sizes(name: str, given: bnns_graph_shape_t) -> list[int]:
    rank = as_size("rank", given.rank)
    if not rank:
        return []
    if not isinstance(given.shape, (list, np.ndarray)):  # it is written to
        raise Invalid(f"{name}.shape is of type {type(given.shape).__name__}, not a list or an array")
    if rank > len(given.shape):
        raise Invalid(f"{name} has rank {rank}, but {len(given.shape)} sizes")
    return [as_integer(f"{name}.shape", size) for size in given.shape[:rank]]


@_reports(-1)
def BNNSGraphContextSetBatchSize(context: bnns_graph_context_t, function: str | bytes | None, batch_size: int) -> int:
    """Set the first size of all arguments that have a flexible one."""
    _context(context).context.set_batch(_text(function), batch_size)
    return 0


@_reports(-1)
def BNNSGraphContextSetArgumentType(context: bnns_graph_context_t, argument_type: int) -> int:
    """Set whether arguments are pointers (the default) or tensors."""
    if argument_type not in (c.BNNSGraphArgumentTypePointer, c.BNNSGraphArgumentTypeTensor):
        raise Invalid(f"argument_type is {argument_type!r}, which is not a BNNSGraphArgumentType")
    _context(context).argument_type = argument_type
    return 0


@_reports(None)
def BNNSGraphContextEnableNanAndInfChecks(context: bnns_graph_context_t, enable_check_for_nans_inf: bool) -> None:
    """Set whether inputs and outputs that have NaNs or infinities make an execution fail."""
    _context(context).context.checkForNaNsAndInfinities = bool(enable_check_for_nans_inf)


@_reports(c.SIZE_MAX)
def BNNSGraphContextGetWorkspaceSize(context: bnns_graph_context_t, function: str | bytes | None = None) -> int:
    """Return the bytes of a workspace, a whole number of pages; SIZE_MAX on failure, or if shapes are not set.

    Afterwards the context has this memory itself. A workspace that is passed is checked, not used.
    """
    return _context(context).context.workspace(_text(function))


@_reports(-1)
def BNNSGraphContextGetTensor(
    context: bnns_graph_context_t,
    function: str | bytes | None,
    argument: str | bytes,
    fill_known_dynamic_shapes: bool,
    tensor: BNNSTensor,
) -> int:
    """Describe an argument: all but the data. Sizes that are not known are -1."""
    found = _context(context).context.described(_text(function), _text(argument) or "", bool(fill_known_dynamic_shapes))
    if not isinstance(tensor, BNNSTensor):
        raise Invalid(f"tensor is of type {type(tensor).__name__}, not BNNSTensor")
    for field in ("data_type", "rank", "shape", "stride", "name"):
        setattr(tensor, field, getattr(found, field))
    return 0


def _set_allocator(
    context: bnns_graph_context_t, what: str, realloc: Any, free_all: Any, size: int, user: Any
) -> int:  # fmt: skip
    found = _context(context)
    if (realloc is None) != (free_all is None):
        raise Invalid("realloc and free_all belong together; one of them is NULL")
    _check_callable("realloc", realloc)
    _check_callable("free_all", free_all)
    length = as_size("user_memory_context_size", size)
    found.allocators.pop(what, None)
    if realloc is not None:
        found.allocators[what] = realloc, free_all, length, user
    return 0


@_reports(-1)
def BNNSGraphContextSetWorkspaceAllocationCallback(
    context: bnns_graph_context_t,
    realloc: Any,
    free_all: Any,
    user_memory_context_size: int = 0,
    user_memory_context: Any = None,
) -> int:
    """Set functions that allocate the workspace. They are kept, but the engine has its own memory."""
    return _set_allocator(context, "workspace", realloc, free_all, user_memory_context_size, user_memory_context)


@_reports(-1)
def BNNSGraphContextSetOutputAllocationCallback(
    context: bnns_graph_context_t,
    realloc: Any,
    free_all: Any,
    user_memory_context_size: int = 0,
    user_memory_context: Any = None,
) -> int:
    """Set functions that allocate outputs without memory: ``realloc(context, size, memory, alignment, bytes)``.

    It stores a writable buffer in ``memory[0]`` and returns 0.
    """
    return _set_allocator(context, "output", realloc, free_all, user_memory_context_size, user_memory_context)


@_reports(-1)
def BNNSGraphContextSetMessageLogCallback(
    context: bnns_graph_context_t, log_callback: Any, additional_logging_arguments: Any = None
) -> int:
    """Set a function ``(level, text, where, extra)`` for messages of this context; None for none."""
    _context(context).messages.set(log_callback, additional_logging_arguments)
    return 0


@_reports(-1)
def BNNSGraphContextSetMessageLogMask(context: bnns_graph_context_t, log_level_mask: int) -> int:
    """Set the levels of messages that the callback gets, as BNNSGraphMessageLevel bits."""
    _context(context).messages.mask = as_integer("log_level_mask", log_level_mask)
    return 0


@_reports(-1)
def BNNSGraphContextExecute(
    context: bnns_graph_context_t,
    function: str | bytes | None,
    argument_count: int,
    arguments: Sequence[bnns_graph_argument_t],
    workspace_size: int = 0,
    workspace: Any = None,
) -> int:
    """Execute a function. Arguments are the outputs, which are written to, then the inputs.

    A workspace, if there is one, must have the size that BNNSGraphContextGetWorkspaceSize returns.
    """
    found, name = _context(context), _text(function)
    count = as_size("argument_count", argument_count)
    if len(arguments) < count or any(not isinstance(one, bnns_graph_argument_t) for one in arguments[:count]):
        raise Invalid(f"arguments must have {count} elements of type bnns_graph_argument_t")
    if workspace is not None:
        _check_workspace(found.context, name, workspace_size, workspace)
    given = [one.data_ptr for one in arguments[:count]]
    if found.argument_type == c.BNNSGraphArgumentTypeTensor:
        for place, one in enumerate(given):
            if not isinstance(one, BNNSTensor):
                raise Invalid(f"arguments[{place}].tensor is of type {type(one).__name__}, not BNNSTensor")
        _allocate_outputs(found, name, given)
        found.context.execute(name, given)
        return 0
    for place, one in enumerate(given):
        if isinstance(one, Structure):
            raise Invalid(f"arguments[{place}] is a {type(one).__name__}, but the context takes pointers")
    sizes = [as_size("data_ptr_size", one.data_ptr_size) for one in arguments[:count]]
    found.context.execute(name, given, sizes)
    return 0


def _check_workspace(context: Context, function: str | None, size: int, workspace: Any) -> None:
    import mmap

    given, needed = as_size("workspace_size", size), context.workspace(function)
    memory = bytes_of("workspace", workspace)
    if given < needed or memory.size < given:
        raise Invalid(f"workspace_size is {given} and the buffer has {memory.size} bytes, but {needed} are needed")
    if address_of(workspace) % mmap.PAGESIZE:
        raise Invalid(f"workspace is at {address_of(workspace):#x}, must be aligned to a page of {mmap.PAGESIZE} bytes")


def _allocate_outputs(found: _Executed, function: str | None, tensors: Sequence[BNNSTensor]) -> None:
    """Have the callback allocate outputs that have no memory and whose size is known."""
    if "output" not in found.allocators:
        return
    realloc, _, size, user = found.allocators["output"]
    entry = found.context.entry(function)
    plan = entry.known()
    for place, (tensor, _) in enumerate(zip(tensors, entry.outputs, strict=False)):
        if tensor.data is not None or plan is None:
            continue
        memory: list[Any] = [None]
        if realloc(user, size, memory, 64, plan.outputs[place].nbytes) != 0 or memory[0] is None:
            raise Invalid(f"realloc returned no memory for the output {entry.names[place]!r}")
        tensor.data = memory[0]
        tensor.data_size_in_bytes = plan.outputs[place].nbytes
