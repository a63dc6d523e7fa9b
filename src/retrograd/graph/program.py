"""Programs: functions of tensors, compiled to a list of engine calls that runs without Python, but for `graph.call`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _core
from ..ops import _args
from ..ops._buffers import foreign_array, is_foreign
from ..ops._errors import ArgumentTypeError
from ..ops._types import Array
from .elementwise import COPY
from .operation import SLOTS, Spec
from .plan import Plan
from .tensor import CONSTANT, DTYPES, Graph, Tensor, Variable, rebuilt, trace

MISFIT: Final = object()
_CONVERTIBLE: Final = ("type", "dtype", "layout", "shape")  # what the engine says of arguments that it does not take
# An argument of a function to be compiled: an array like the ones in later calls, or its shape and dtype.
Example: TypeAlias = npt.ArrayLike | Spec | Variable


def spec(shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32) -> Spec:
    """The shape and dtype of an argument, for :func:`compile`."""
    return Spec((shape,) if isinstance(shape, int) else tuple(shape), np.dtype(dtype))


def compile(function: Callable[..., Any], *examples: Example) -> Program:
    """Trace a function of tensors and compile what it computes.

    Each example is an array like those that the program will be called with, or a `spec`. The function is called once,
    with tensors. What it returns, nested tuples, lists or dicts of tensors, is what the program returns, as arrays; a
    tensor without axes becomes a number. Variables that the function assigns keep their values from run to run.
    """
    if not callable(function):
        raise TypeError(f"compile: function is a {type(function).__name__}, must be a function of tensors")
    specs = [_as_spec(i, example) for i, example in enumerate(examples)]
    names = _argument_names(function, len(specs))
    graph, answer = trace(function, specs, names)
    return Program(graph, answer, names)


def _as_spec(position: int, example: Example) -> Spec:
    if example is None:
        raise TypeError(f"compile: example {position} is None, must be an array or a spec")
    if isinstance(example, Spec):
        found = Spec(tuple(example.shape), np.dtype(example.dtype))
    else:
        array = np.asarray(example.value if isinstance(example, Variable) else example)
        dtype = np.dtype(np.int64) if array.dtype.kind in "iu" else array.dtype
        found = Spec(array.shape, dtype)
    if found.dtype not in DTYPES:
        known = ", ".join(dtype.name for dtype in DTYPES)
        raise TypeError(f"compile: example {position} has dtype {found.dtype}, must be one of {known}")
    return found


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"argument {i}" for i in range(len(names), count)]


class ResultView:
    """A result in the memory of its program, without a copy. The next run of the program overwrites it."""

    __slots__ = ("_array", "_program", "_run")

    def __init__(self, program: Program, array: Array) -> None:
        self._program, self._array, self._run = program, array, program._runs

    @property
    def array(self) -> Array:
        """The elements, as a read-only array. Raises after the next run."""
        if self._run != self._program._runs:
            raise RuntimeError(
                "this result was in the memory of its program, which has run again since; copy it before the next run, "
                "or call the program without copy=False"
            )
        view: Array = self._array.view()
        view.flags.writeable = False
        return view

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        array: Array = np.array(self.array, dtype, copy=copy)
        return array

    def __repr__(self) -> str:
        return f"ResultView({Spec(self._array.shape, self._array.dtype)!r})"


class Program:
    """A compiled function. Call it with arrays; `print` shows its records, :meth:`profile` what each takes.

    Its memory is allocated once. Arguments are copied into it and results out of it. One thread runs it at a time, and
    others wait. A failure before the variables are written leaves them as they were.
    """

    def __init__(self, graph: Graph, answer: Any, names: Sequence[str]) -> None:
        self.graph = graph
        self.plan = plan = Plan(graph)
        self.names = tuple(names)
        self._answer = answer
        self._arrays: dict[int, Array] = {}
        self._core = core = _core.Program(plan.arena)
        self._memory: Any = core.arena
        self.variables = tuple(graph.read)
        for variable in self.variables:
            core.add_memory(variable.value)
        self._prepare()
        core.start_recording()
        self.records: list[int] = []  # the step that each record belongs to; -1: a copy to a variable
        try:
            for number, step in enumerate(plan.steps):
                if number == plan.commits:
                    core.commit()
                inputs = [None if t is None else self._array(t) for t in step.inputs]
                results = [None if t is None else self._array(t) for t in step.results]
                assert step.operation.compute is not None
                step.operation.compute(inputs, results, **step.attributes)
                self._mark(number)
            if plan.commits == len(plan.steps):
                core.commit()
            for variable, tensor in plan.writes:
                assert COPY.compute is not None
                COPY.compute([self._array(tensor)], [variable.value])
                self._mark(-1)
        finally:
            core.stop_recording()
        for tensor in graph.inputs:
            core.add_input(self._array(tensor))
        self._outputs = [self._array(tensor) for tensor in plan.outputs]
        for array in self._outputs:
            core.add_output(array)
        self._specs = [Spec(array.shape, array.dtype) for array in self._outputs]
        self._runs = 0
        self._is_scalar = isinstance(answer, Tensor) and answer.shape == ()

    def _prepare(self) -> None:
        for tensor_id, place in self.plan.places.items():
            if place.variable is not None:
                self._arrays[tensor_id] = place.variable.value
        for node in self.graph.nodes:
            if node.operation is CONSTANT and id(node.results[0]) in self.plan.places:
                self._array(node.results[0])[...] = node.attributes["value"]

    def _array(self, tensor: Tensor) -> Array:
        found = self._arrays.get(id(tensor))
        if found is None:
            if id(tensor) in self.plan.viewed:
                source, node = self.plan.viewed[id(tensor)]
                assert node.operation.view is not None
                found = node.operation.view(self._array(source), **node.attributes)
            else:
                place = self.plan.places[id(tensor)]
                found = np.ndarray(tensor.shape, tensor.dtype, self._memory, place.offset)
            self._arrays[id(tensor)] = found
        return found

    def _mark(self, number: int) -> None:
        self.records.extend([number] * (self._core.size - len(self.records)))

    # ---- running ----

    def __call__(self, *arguments: npt.ArrayLike | None, num_threads: int | None = None, copy: bool = True) -> Any:
        """One run. An argument of None is used as it is in the program's memory, see :meth:`argument`.

        Results are copies, or with ``copy=False`` of type :class:`ResultView`, which are valid until the next run.
        """
        if not copy:
            return self._views(arguments, num_threads)
        results = tuple([np.empty(s.shape, s.dtype) for s in self._specs])
        self._runs += 1
        threads = 0 if num_threads is None else _args.thread_count(num_threads)
        try:
            problem = self._core.run(arguments, results, 1, False, threads, None)
        except ValueError:
            if len(arguments) == len(self.graph.inputs):
                raise  # by a function that the program calls
            raise self._wrong_count(arguments) from None
        if problem is not None:
            self._solve(problem, arguments, results, 1, False, threads, None)
        return self._result(results)

    def attempt(self, arguments: tuple[Any, ...], threads: int = 0) -> Any:
        """One run, or `MISFIT` if an argument is not an array of the program's shape and dtype. 0 threads: the default.

        For callers that have a program for other shapes as well.
        """
        for argument in arguments:
            if argument is None:  # which the engine takes for the argument of the run before
                return MISFIT
        results = tuple([np.empty(s.shape, s.dtype) for s in self._specs])
        self._runs += 1
        try:
            problem = self._core.run(arguments, results, 1, False, threads, None)
        except ValueError:
            if len(arguments) == len(self.graph.inputs):
                raise  # by a function that the program calls
            return MISFIT
        if problem is not None:
            if problem[0] in _CONVERTIBLE:
                return MISFIT
            self._raise(problem, False)
        return self._result(results)

    def arrays(self, arguments: tuple[Any, ...]) -> tuple[Array, ...] | None:
        """The outputs of one run in order, each as an array; None if an argument does not fit, as in `attempt`."""
        results = tuple([np.empty(s.shape, s.dtype) for s in self._specs])
        self._runs += 1
        problem = self._core.run(arguments, results, 1, False, 0, None)
        if problem is not None:
            if problem[0] in _CONVERTIBLE:
                return None
            self._raise(problem, False)
        return results

    def run_into(self, arguments: Sequence[Array], results: Sequence[Array], *, num_threads: int | None = None) -> None:
        """One run that writes to the arrays `results`, which have the `specs` and are contiguous. It allocates none."""
        threads = 0 if num_threads is None else _args.thread_count(num_threads)
        self._runs += 1
        problem = self._core.run(tuple(arguments), tuple(results), 1, False, threads, None)
        if problem is not None:
            self._solve(problem, arguments, tuple(results), 1, False, threads, None)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The shapes and dtypes of the results."""
        return tuple(self._specs)

    def _result(self, results: tuple[Array, ...]) -> Any:
        if self._is_scalar:
            return results[0].item()
        return rebuilt(self._answer, [r.item() if r.ndim == 0 else r for r in results])

    def _views(self, arguments: tuple[npt.ArrayLike | None, ...], num_threads: int | None) -> Any:
        if len(arguments) != len(self.graph.inputs):
            raise self._wrong_count(arguments)
        threads = 0 if num_threads is None else _args.thread_count(num_threads)
        self._runs += 1
        nothing = (None,) * len(self._outputs)
        problem = self._core.run(arguments, nothing, 1, False, threads, None)
        if problem is not None:
            self._solve(problem, arguments, nothing, 1, False, threads, None)
        return rebuilt(self._answer, [ResultView(self, array) for array in self._outputs])

    def argument(self, name: str) -> Array:
        """The memory of an argument: fill it in place, and pass None for it, to save the copy."""
        if name not in self.names:
            raise ValueError(f"there is no argument {name!r}; there are {', '.join(self.names) or 'none'}")
        return self._array(self.graph.inputs[self.names.index(name)])

    def run(self, *batches: npt.ArrayLike, num_threads: int | None = None) -> Any:
        """Many runs in one call: every argument has one more axis in front, over the runs, and so have the results."""
        arrays = [np.asarray(batch) for batch in batches]
        if not arrays or any(a.ndim == 0 or len(a) != len(arrays[0]) for a in arrays):
            shapes = ", ".join(str(a.shape) for a in arrays)
            raise ValueError(
                f"run: arguments have shapes {shapes or 'none'}; each needs a first axis of the same extent"
            )
        steps = len(arrays[0])
        self._runs += 1
        results = tuple([np.empty((steps, *s.shape), s.dtype) for s in self._specs])
        threads = 0 if num_threads is None else _args.thread_count(num_threads)
        if len(arrays) != len(self.graph.inputs):
            raise self._wrong_count(arrays)
        problem = self._core.run(tuple(arrays), results, steps, True, threads, None)
        if problem is not None:
            self._solve(problem, arrays, results, steps, True, threads, None)
        return rebuilt(self._answer, list(results))

    def _wrong_count(self, arguments: Sequence[Any]) -> Exception:
        names = ", ".join(self.names) or "none"
        return TypeError(
            f"the program takes {len(self.graph.inputs)} arguments ({names}), but {len(arguments)} were given"
        )

    def _solve(
        self,
        problem: Sequence[Any],
        arguments: Sequence[npt.ArrayLike | None],
        results: tuple[Array | None, ...],
        steps: int,
        stacked: bool,
        threads: int,
        times: Array | None,
    ) -> None:
        """Convert arguments that the engine does not take as they are, and run; or raise."""
        if problem[0] in _CONVERTIBLE:
            lead = (steps,) if stacked else ()
            arrays = [None if a is None else self._converted(i, a, lead) for i, a in enumerate(arguments)]
            again = self._core.run(tuple(arrays), results, steps, stacked, threads, times)
            if again is None:
                return
            problem = again
        self._raise(problem, stacked)

    def _converted(self, position: int, argument: npt.ArrayLike, lead: tuple[int, ...]) -> Array:
        tensor, name = self.graph.inputs[position], self.names[position]
        shape, dtype = (*lead, *tensor.shape), tensor.dtype
        if is_foreign(argument):
            try:
                array = foreign_array(argument)
            except TypeError as error:
                raise ArgumentTypeError(name, "{argument} {}", str(error)) from None
        else:
            array = _args.as_array(name, argument)
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but the program was compiled for {shape}")
        same_kind = array.dtype.kind == dtype.kind or (array.dtype.kind in "iub" and dtype.kind in "fi")
        if not same_kind:
            raise TypeError(f"{name} has dtype {array.dtype}, but the program was compiled for {dtype}")
        return np.asarray(array, dtype, order="C")

    def _raise(self, problem: Sequence[Any], stacked: bool) -> None:
        kind = problem[0]
        if kind == "broken":
            raise RuntimeError(
                "an earlier run of this program failed while it wrote its variables, so some have new values and some "
                "old ones; set all of them, and compile the function again"
            )
        run, record = int(problem[1]), int(problem[2])
        where = f" in run {run}" if stacked else ""
        number = self.records[record]
        step = self.plan.steps[number] if number >= 0 else None
        what = step.name if step is not None else "assign"
        place = f" ({step.lines[0][0]}:{step.lines[0][1]})" if step is not None else ""
        state = f"variables are as run {run - 1} left them" if run else "no variable was changed"
        if self._core.broken:
            state = "some variables were changed"
        if kind == "out_of_range":
            index, limit = int(problem[3]), int(problem[4])
            found, most = f"an index is {index}", f"below {limit}"
            if what == SLOTS:
                what, found, most = "lengths", f"a length is {index}", f"{limit - 1}, the steps of x"
            raise IndexError(f"{what}: {found}, must be from 0 to {most}{where}{place}; {state}")
        assert kind == "no_memory"
        raise MemoryError(f"{what}: out of memory{where}{place}; {state}")

    # ---- looking at it ----

    @property
    def memory(self) -> int:
        """The bytes of the arena."""
        return self.plan.arena

    def profile(self, *arguments: npt.ArrayLike, runs: int = 100, num_threads: int | None = None) -> Any:
        """Run it on these arguments and return a table of what each record takes. Variables change as in any run."""
        from .show import Profile

        threads = 0 if num_threads is None else _args.thread_count(num_threads)
        times = np.zeros(self._core.size)
        self._runs += 1 + max(1, int(runs))
        results = tuple([np.empty(s.shape, s.dtype) for s in self._specs])
        if len(arguments) != len(self.graph.inputs):
            raise self._wrong_count(arguments)
        arrays = [self._converted(i, a, ()) for i, a in enumerate(arguments)]
        self._core.run(tuple(arrays), results, 1, False, threads, None)
        for _ in range(max(1, int(runs))):
            problem = self._core.run(tuple(arrays), results, 1, False, threads, times)
            if problem is not None:
                self._raise(problem, False)
        return Profile(self, times / max(1, int(runs)))

    def __repr__(self) -> str:
        from .show import program_table

        return program_table(self)
