"""The plan of a program: which steps run in which order, and where in memory their tensors are.

Nodes that no output depends on are left out. Elementwise nodes are joined into maps, so that a chain of them is one
pass over memory. Views are views of the arrays that they are made of. Every other tensor gets a place in one arena,
which it shares with tensors whose lifetimes do not overlap, or the place of an input that nothing reads afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ..ops._types import Array
from .callback import CALL
from .elementwise import COPY, run_map
from .fold import folded
from .operation import Operation
from .tensor import BOOL, CONSTANT, FLOATS, INPUT, VARIABLE, Graph, Node, Tensor, Variable, needs_contiguous
from .updates import merged, stored

_ALIGNMENT: Final = 64
_MOST_OPERANDS, _MOST_STEPS, _MOST_RESULTS = 24, 32, 8  # of a map, in the engine


class Step:
    """A node, or a map of several, as it will be recorded."""

    __slots__ = ("attributes", "inputs", "lines", "name", "operation", "results")

    def __init__(
        self,
        operation: Operation,
        inputs: Sequence[Tensor | None],
        results: Sequence[Tensor | None],
        attributes: dict[str, Any],
        lines: Sequence[tuple[str, int]],
        name: str = "",
    ) -> None:
        self.operation = operation
        self.inputs = list(inputs)
        self.results = list(results)  # None: not wanted
        self.attributes = attributes
        self.lines = lines
        self.name = name or operation.name

    def flops(self) -> float:
        if self.operation.flops is None:
            return 0.0
        specs = [None if t is None else t.spec for t in (*self.inputs, *self.results)]
        found: float = self.operation.flops(specs[: len(self.inputs)], specs[len(self.inputs) :], **self.attributes)
        return found


class Place:
    """Memory of the arena, or of a variable, that tensors are kept in."""

    __slots__ = ("first", "last", "nbytes", "offset", "variable")

    def __init__(self, nbytes: int, variable: Variable | None = None) -> None:
        self.nbytes = nbytes
        self.variable = variable
        self.offset = 0
        self.first = 1 << 62  # the steps between which it is in use
        self.last = -1


class Plan:
    """Steps in order, and the place of every tensor."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.steps: list[Step] = []
        self.commits = 0  # the steps from here on write to variables
        self.writes: list[tuple[Variable, Tensor]] = []  # copied to variables at the end
        self.places: dict[int, Place] = {}  # of a tensor that is not a view, by id
        self.viewed: dict[int, tuple[Tensor, Node]] = {}  # of a view: what it views, and its node
        self._layouts: dict[int, Array] = {}
        nodes = stored(_live(graph), graph)
        self._variables(nodes)
        early, late = _split(nodes)
        _refuse_calls(late)
        kept = {id(t) for t in (*graph.outputs, *graph.assigned.values())}  # read by something else than a node
        kept |= {id(t) for node in late for t in node.inputs}
        self._add(_joined(folded(early, kept), kept))
        self._copy_assigned()
        late_numbers = {node.number for node in late}
        self.outputs = [self._output(t, t.node.number in late_numbers) for t in graph.outputs]
        updates = merged(_joined(late, kept))
        written = self._written_last(updates)
        self._keep_old_values(updates)
        self.commits = len(self.steps)
        self.steps += written
        self._add(updates)
        self._copy_overwritten()
        self.outputs = [self._contiguous(t) for t in self.outputs]
        self.arena = self._arrange()

    # ---- steps ----

    def _variables(self, nodes: Sequence[Node]) -> None:
        """Values that updates leave in the memory of their variables need no copy."""
        self.updated: dict[int, Variable] = {}
        places = {id(tensor): variable for variable, tensor in self.graph.read.items()}
        for node in nodes:
            if node.operation.updates:
                for result, position in _pairs(node):
                    tensor = node.inputs[position]
                    assert tensor is not None
                    variable = places.get(id(tensor))
                    if variable is None:
                        file, line = node.line
                        raise ValueError(
                            f"{node.operation.name}: input {position} must be a variable that this run has not changed "
                            f"before ({file}:{line})"
                        )
                    self.updated[id(node.results[result])] = variable
        self.writes = [
            (variable, tensor)
            for variable, tensor in self.graph.assigned.items()
            if self.updated.get(id(tensor)) is not variable and tensor is not self.graph.read.get(variable)
        ]

    def _copy_assigned(self) -> None:
        """Values that are (views of) variables are copied before any variable is written."""
        for i, (variable, tensor) in enumerate(self.writes):
            root = self._root(tensor)
            if root.node.operation is VARIABLE:
                self.writes[i] = (variable, self._copied(tensor))

    def _written_last(self, updates: Sequence[Step]) -> list[Step]:
        """Take out the maps whose results are nothing but new values of variables, to write them there directly.

        A map may overwrite the variable that it reads element by element, but none that another of them still reads.
        """
        variables = {id(tensor): variable for variable, tensor in self.graph.read.items()}
        once = Counter(id(tensor) for _, tensor in self.writes)
        updated = set(self.updated.values())
        targets = {id(t): v for v, t in self.writes if once[id(t)] == 1 and v not in updated}
        used = (t for step in (*self.steps, *updates) for t in step.inputs if t is not None)
        for tensor in (*self.outputs, *used):
            targets.pop(id(self._root(tensor)), None)
        taken: list[Step] = []
        read: set[Variable] = set()  # by the maps taken
        overwritten: set[Variable] = set()
        for step in self.steps:
            results = [t for t in step.results if t is not None]
            if step.operation is not _MAP or not all(id(t) in targets for t in results):
                continue
            written = {targets[id(t)] for t in results}
            roots = [(t, variables.get(id(self._root(t)))) for t in step.inputs if t is not None]
            views = {variable for t, variable in roots if variable is not None and id(t) not in variables}
            reads = {variable for _, variable in roots if variable is not None}
            if views & written or reads & overwritten or read & written:
                continue
            taken.append(step)
            read |= reads
            overwritten |= written
            self.updated.update((id(t), targets[id(t)]) for t in results)
        moved = set(map(id, taken))
        self.steps = [step for step in self.steps if id(step) not in moved]
        self.writes = [(variable, t) for variable, t in self.writes if self.updated.get(id(t)) is not variable]
        return taken

    def _keep_old_values(self, updates: Sequence[Step]) -> None:
        """Values of variables from before their update, read by or after an update, are copied before that."""
        changed = {id(self.graph.read[variable]) for variable in self.updated.values()}
        copies: dict[int, Tensor] = {}
        for step in updates:
            paired = {position for _, position in _pairs(step)} if step.operation.updates else set[int]()
            for i, tensor in enumerate(step.inputs):
                if tensor is not None and i not in paired and id(self._root(tensor)) in changed:
                    if id(tensor) not in copies:
                        copies[id(tensor)] = self._copied(tensor)
                    step.inputs[i] = copies[id(tensor)]

    def _copy_overwritten(self) -> None:
        """Updated values of variables that then get others, which are written at the end."""
        written = {variable for variable, _ in self.writes}

        def kept(tensor: Tensor) -> Tensor:
            return self._copied(tensor) if self.updated.get(id(self._root(tensor))) in written else tensor

        self.outputs = [kept(t) for t in self.outputs]
        self.writes = [(variable, kept(t)) for variable, t in self.writes]

    def _output(self, tensor: Tensor, late: bool) -> Tensor:
        """An output that is the value of a variable from before its update is copied before that."""
        if late:
            return tensor
        return self._copied(tensor) if self._root(tensor).node.operation is VARIABLE else self._contiguous(tensor)

    def _add(self, steps: Iterable[Step]) -> None:
        for step in steps:
            if step.operation.view is not None:
                (tensor,) = step.inputs
                assert tensor is not None
                assert step.results[0] is not None
                if needs_contiguous(step.operation, 0):
                    tensor = self._contiguous(tensor)
                node = step.results[0].node
                self.viewed[id(step.results[0])] = (tensor, node)
                continue
            for i, tensor in enumerate(step.inputs):
                if tensor is not None and needs_contiguous(step.operation, i):
                    step.inputs[i] = self._contiguous(tensor)
            self.steps.append(step)

    def _contiguous(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.viewed or self.layout(tensor).flags.c_contiguous:
            return tensor
        return self._copied(tensor)

    def _copied(self, tensor: Tensor) -> Tensor:
        copy = Tensor(tensor.node, tensor.index, tensor.spec)
        self.steps.append(Step(COPY, [tensor], [copy], {}, [tensor.node.line]))
        return copy

    # ---- layouts ----

    def _root(self, tensor: Tensor) -> Tensor:
        """The tensor whose memory a view is in."""
        while id(tensor) in self.viewed:
            tensor = self.viewed[id(tensor)][0]
        return tensor

    def layout(self, tensor: Tensor) -> Array:
        """An array with the strides that the tensor will have; its elements mean nothing."""
        found = self._layouts.get(id(tensor))
        if found is None:
            if id(tensor) in self.viewed:
                source, node = self.viewed[id(tensor)]
                assert node.operation.view is not None
                found = node.operation.view(self.layout(source), **node.attributes)
            else:
                found = np.empty(tensor.shape, tensor.dtype)
            self._layouts[id(tensor)] = found
        return found

    # ---- memory ----

    def _arrange(self) -> int:
        """Give every tensor a place; returns the bytes of the arena."""
        places = self.places
        for variable, tensor in self.graph.read.items():
            places[id(tensor)] = Place(tensor.spec.nbytes, variable)
        for tensor in self.graph.inputs:
            place = places[id(tensor)] = Place(tensor.spec.nbytes)
            place.first, place.last = -1, len(self.steps)
        end = len(self.steps)
        roots = [[None if t is None else self._root(t) for t in step.inputs] for step in self.steps]
        last_roots = [self._root(t) for t in (*self.outputs, *(t for _, t in self.writes))]
        last_use = {id(root): i for i, found in enumerate(roots) for root in found}
        last_use.update((id(root), end) for root in last_roots)
        last_use.update((id(tensor), end) for tensor in self.graph.inputs)  # they stay, for runs that do not copy them
        for i, (step, found) in enumerate(zip(self.steps, roots, strict=True)):
            for root in found:
                if root is not None:
                    place = places.get(id(root)) or self._place_constant(root, end)
                    place.last = max(place.last, i)
            taken: list[Place] = []  # by this step's results
            for r, result in enumerate(step.results):
                if result is not None:
                    place = places[id(result)] = self._place_result(i, step, r, result, found, last_use, taken)
                    place.first, place.last = min(place.first, i), max(place.last, i)
                    taken.append(place)
        for root in last_roots:
            place = places.get(id(root)) or self._place_constant(root, end)
            place.last = end
        return _offsets([place for place in {id(p): p for p in places.values()}.values() if place.variable is None])

    def _place_constant(self, root: Tensor, end: int) -> Place:
        assert root.node.operation is CONSTANT
        place = self.places[id(root)] = Place(root.spec.nbytes)
        place.first, place.last = -1, end
        return place

    def _place_result(
        self,
        i: int,
        step: Step,
        r: int,
        tensor: Tensor,
        roots: Sequence[Tensor | None],
        last_use: dict[int, int],
        taken: Sequence[Place],
    ) -> Place:
        variable = self.updated.get(id(tensor))
        if variable is not None:
            return self.places[id(self.graph.read[variable])]
        if step.operation is _MAP:
            positions: Iterable[int] = range(len(step.inputs))
        else:
            positions = [position for result, position in step.operation.in_place if result == r]
        for position in positions:
            source = step.inputs[position] if position < len(step.inputs) else None
            if source is None or source is not roots[position] or source.spec != tensor.spec:
                continue
            if source.node.operation in (CONSTANT, VARIABLE) or last_use[id(source)] != i:
                continue
            place = self.places[id(source)]
            alone = sum(root is source for root in roots) == 1
            if place.variable is None and place not in taken and alone:
                return place
        return Place(tensor.spec.nbytes)

    @property
    def memory(self) -> int:
        """The bytes that all tensors would need if none shared memory."""
        return sum(t.spec.nbytes for s in self.steps for t in s.results if t is not None)


def _pairs(update: Node | Step) -> Sequence[tuple[int, int]]:
    """The pairs of a result of an update and the variable that it replaces."""
    pairs: Sequence[tuple[int, int]] = update.operation.in_place or update.attributes["in_place"]
    return pairs


def _live(graph: Graph) -> list[Node]:
    """The nodes that outputs and variables depend on, in order."""
    wanted = {t.node.number for t in graph.outputs}
    wanted.update(t.node.number for t in graph.assigned.values())
    for node in reversed(graph.nodes):
        if node.number in wanted:
            wanted.update(t.node.number for t in node.inputs if t is not None)
    return [node for node in graph.nodes if node.number in wanted]


def _split(nodes: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The nodes that compute, and then those that update variables with what depends on them."""
    late_numbers: set[int] = set()
    early, late = [], []
    for node in nodes:
        after = any(t is not None and t.node.number in late_numbers for t in node.inputs)
        if after or node.operation.updates:
            late_numbers.add(node.number)
            late.append(node)
        else:
            early.append(node)
    return early, late


def _refuse_calls(late: Sequence[Node]) -> None:
    """Functions that may raise exceptions run before any variable is written."""
    for node in late:
        if node.operation is CALL:
            file, line = node.line
            raise ValueError(
                f"call: an input depends on a variable after its update, but functions are called before variables are "
                f"written; call this one with the values of the next run ({file}:{line})"
            )


# ---- maps ------------------------------------------------------------------------------------------------------------


class _Group:
    """Elementwise nodes of one shape that become one map."""

    __slots__ = ("dtype", "members", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.members: list[int] = []  # positions


def _arithmetic(node: Node) -> np.dtype[Any] | None:
    """The dtype in which a node of a map is computed; None: it cannot be part of one."""
    operation, result = node.operation, node.results[0]
    if operation.name == "cast":
        (x,) = node.inputs
        assert x is not None
        return result.dtype if x.dtype == BOOL and result.dtype in FLOATS else None
    if operation.map_code is None:
        return None
    dtypes = {t.dtype for t in node.inputs if t is not None} | {result.dtype}
    found = [dtype for dtype in FLOATS if dtype in dtypes]
    return found[0] if len(found) == 1 else None


def _joined(nodes: Sequence[Node | Step], kept: set[int]) -> list[Step]:
    """Steps in order, with elementwise nodes joined into maps. `kept`: ids of tensors that something else reads."""
    uses: dict[int, list[int]] = {}
    for position, node in enumerate(nodes):
        for tensor in node.inputs:
            if tensor is not None:
                uses.setdefault(id(tensor), []).append(position)
    group_of: dict[int, _Group] = {}
    made_by: dict[int, int] = {}  # the position of the map node that makes a tensor
    for position, node in enumerate(nodes):
        dtype = _arithmetic(node) if isinstance(node, Node) else None
        if dtype is None or not isinstance(node, Node):
            continue
        group = _Group(node.results[0].shape, dtype)
        group.members.append(position)
        for tensor in node.inputs:
            earlier = group_of.get(made_by.get(id(tensor), -1))
            fits = earlier is not None and earlier is not group and earlier.shape == group.shape
            if earlier is None or not fits or earlier.dtype != dtype:
                continue
            members = set(earlier.members) | set(group.members)
            # Nothing outside may need a member's result before the map runs, which is at its last member.
            used = (use for m in earlier.members for use in uses.get(id(nodes[m].results[0]), ()))
            if any(use < position and use not in members for use in used) or not _fits(nodes, members, uses, kept):
                continue
            earlier.members = sorted(members)
            for member in earlier.members:
                group_of[member] = earlier
            group = earlier
        if not group_of.get(position):
            group_of[position] = group
        made_by[id(node.results[0])] = position
    steps: list[Step] = []
    for position, node in enumerate(nodes):
        if isinstance(node, Step):
            steps.append(node)
            continue
        found = group_of.get(position)
        if found is None or len(found.members) == 1:
            if node.operation not in (INPUT, CONSTANT, VARIABLE):
                optional = node.operation.optional
                wanted = [
                    r if i not in optional or id(r) in uses or id(r) in kept else None
                    for i, r in enumerate(node.results)
                ]
                steps.append(Step(node.operation, node.inputs, wanted, node.attributes, [node.line]))
        elif position == found.members[-1]:
            steps.append(_map_step([nodes[m] for m in found.members], uses, kept, found.members))  # type: ignore[misc]
    return steps


def _fits(nodes: Sequence[Any], members: set[int], uses: dict[int, list[int]], kept: set[int]) -> bool:
    inside = {id(nodes[m].results[0]) for m in members}
    outside = {id(t) for m in members for t in nodes[m].inputs} - inside
    results = sum(
        id(nodes[m].results[0]) in kept or any(u not in members for u in uses.get(id(nodes[m].results[0]), ()))
        for m in members
    )
    return len(outside) <= _MOST_OPERANDS and len(members) <= _MOST_STEPS and results <= _MOST_RESULTS


def scalar_constant(tensor: Tensor) -> float | None:
    """The value of a constant without axes, also broadcast; None: it is another tensor."""
    node = tensor.node
    while node.operation.name == "broadcast_to":
        (source,) = node.inputs
        assert source is not None
        node = source.node
    if node.operation is CONSTANT and node.results[0].shape == () and node.results[0].dtype.kind in "fb":
        return float(node.attributes["value"])
    return None


def _map_step(nodes: Sequence[Node], uses: dict[int, list[int]], kept: set[int], members: Sequence[int]) -> Step:
    inside, operands, constants = set(members), list[Tensor](), list[float]()
    made = {id(node.results[0]) for node in nodes}
    values: dict[int, float] = {}
    for node in nodes:
        for tensor in node.inputs:
            if tensor is None or id(tensor) in made or id(tensor) in values or any(tensor is t for t in operands):
                continue
            value = scalar_constant(tensor)
            if value is None:
                operands.append(tensor)
            else:
                values[id(tensor)] = value
                if not any(_same(value, c) for c in constants):
                    constants.append(value)
    registers = {id(t): i for i, t in enumerate(operands)}
    for key, value in values.items():
        at = next(i for i, c in enumerate(constants) if _same(value, c))
        registers[key] = len(operands) + at
    steps: list[tuple[int, int, int, int]] = []
    first = len(operands) + len(constants)
    for node in nodes:
        numbers = [registers[id(t)] for t in node.inputs]
        if node.operation.map_code is None:  # a bool as a float: the same register
            registers[id(node.results[0])] = numbers[0]
            continue
        registers[id(node.results[0])] = first + len(steps)
        padded = (*numbers, 0, 0)
        steps.append((node.operation.map_code, padded[0], padded[1], padded[2]))
    results = [
        node.results[0]
        for node in nodes
        if id(node.results[0]) in kept or any(u not in inside for u in uses.get(id(node.results[0]), ()))
    ]
    attributes = {"steps": steps, "constants": constants, "registers": [registers[id(t)] for t in results]}
    name = "map " + " ".join(node.operation.name for node in nodes)
    return Step(_MAP, operands, results, attributes, [node.line for node in nodes], name)


def _same(a: float, b: float) -> bool:
    return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)


def _run_joined(
    inputs: Sequence[Array], results: Sequence[Array], *, steps: Any, constants: list[float], registers: list[int]
) -> None:
    run_map(steps, inputs, constants, results, registers)


_MAP: Final = Operation(
    "map",
    lambda *specs, **_: specs[:1],
    compute=_run_joined,
    contiguous=(),
    flops=lambda inputs, results, *, steps, **_: float(results[0].elements * len(steps)),
)


# ---- the arena -------------------------------------------------------------------------------------------------------


def _offsets(places: Sequence[Place]) -> int:
    """Put places into the arena, so that those in use at the same time do not overlap; returns its bytes."""
    busy: list[tuple[int, int, int]] = []  # start, end and last step, by start
    total = 0
    for place in sorted(places, key=lambda place: (place.first, -place.nbytes)):
        busy = [other for other in busy if other[2] >= place.first]
        size = -(-max(place.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        best, best_gap, index, free = -1, 1 << 62, len(busy), 0
        for i, (start, end, _) in enumerate(busy):
            if size <= start - free < best_gap:
                best, best_gap, index = free, start - free, i
            free = end
        place.offset = free if best < 0 else best
        busy.insert(index, (place.offset, place.offset + size, place.last))
        total = max(total, place.offset + size)
    return total
