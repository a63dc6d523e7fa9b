"""MPSRNNMatrixTrainingLayer: recurrent layers over sequences of matrices, one matrix per step, one row per sequence.

An encode checks everything and records views of the caller's memory. Nothing is read or written until the command
buffer runs. The arithmetic is that of `rnn_forward`, `gru_forward`, `lstm_forward` and their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from ..ops._arrays import find_overlap
from ..ops._types import Array
from ._archive import NSKeyedArchiver, NSKeyedUnarchiver
from ._kernel import ABSENT, KernelSetting, MPSKernel, open_buffer, wrong_type
from ._matrix import MPSMatrix, MPSMatrixDescriptor, MPSTemporaryMatrix, TemporaryStorage
from ._metal import MTLCommandBuffer, MTLDevice
from ._neuron import as_neuron_type
from ._rnn_descriptor import FLOAT_TYPES, KINDS, Cell, MPSRNNDescriptor, described_cell
from ._rnn_state import (
    Gradient,
    MPSRNNMatrixTrainingState,
    MPSRNNRecurrentMatrixState,
    Pass,
    run_copy,
    run_forward,
    run_gradient,
)
from ._types import (
    MPSDataType,
    MPSRNNMatrixId,
    MTLOrigin,
    as_bool,
    as_data_type,
    as_float,
    as_origin,
    as_unsigned,
)

Offsets: TypeAlias = Sequence[int] | None
Matrices: TypeAlias = Sequence[MPSMatrix]


# ---- the layer -------------------------------------------------------------------------------------------------------


class MPSRNNMatrixTrainingLayer(MPSKernel):
    """A recurrent layer: its forward pass over a sequence, and the gradients.

    The layer has no weights: every encode is given a list of matrices, as the initializer appends them to
    `trainableWeights`. They are in the order of :class:`MPSRNNMatrixId`; a bias has one row.
    """

    recurrentOutputIsTemporary = KernelSetting[bool](as_bool, False, "Whether the recurrent states are temporary.")
    storeAllIntermediateStates = KernelSetting[bool](
        as_bool, False, "Whether encodes return the recurrent states of all steps."
    )
    trainingStateIsTemporary = KernelSetting[bool](as_bool, False, "Whether the training states are temporary.")
    accumulateWeightGradients = KernelSetting[bool](
        as_bool, False, "Add to the gradients of the weights instead of overwriting them."
    )
    _recurrentOutputIsTemporary: bool
    _storeAllIntermediateStates: bool
    _trainingStateIsTemporary: bool
    _accumulateWeightGradients: bool
    _matrix_type: ClassVar[type[MPSMatrix]] = MPSMatrix
    _temporary_matrix_type: ClassVar[type[MPSTemporaryMatrix]] = MPSTemporaryMatrix
    _recurrent_state_type: ClassVar[type[MPSRNNRecurrentMatrixState]] = MPSRNNRecurrentMatrixState
    _training_state_type: ClassVar[type[MPSRNNMatrixTrainingState]] = MPSRNNMatrixTrainingState

    def __init__(
        self,
        device: MTLDevice | None = None,
        rnnDescriptor: MPSRNNDescriptor | None = None,
        trainableWeights: list[MPSMatrix] | None = None,
        *,
        coder: NSKeyedUnarchiver = ABSENT,
    ) -> None:
        """Make a layer, and append its weights, with the values of the data sources, to `trainableWeights`."""
        super().__init__(device, coder=coder)
        if coder is not ABSENT:
            return
        function = type(self).__name__
        if not isinstance(rnnDescriptor, MPSRNNDescriptor):
            raise wrong_type(function, "rnnDescriptor", rnnDescriptor, MPSRNNDescriptor)
        weights = _as_list(function, "trainableWeights", trainableWeights)
        self._cell, values = described_cell(function, rnnDescriptor)
        made = self._new_matrices(self._weight_type())
        with np.errstate(all="ignore"):
            for matrix, value in zip(made, values, strict=True):
                matrix._elements()[0] = value
        weights.extend(made)

    @property
    def inputFeatureChannels(self) -> int:
        return self._cell.inputs

    @property
    def outputFeatureChannels(self) -> int:
        return self._cell.units

    # ---- weights

    def createWeightMatrices(self, matricesOut: list[MPSMatrix]) -> None:
        """Append zeroed matrices of the layout and the type of the weights."""
        function = "MPSRNNMatrixTrainingLayer.createWeightMatrices"
        _as_list(function, "matricesOut", matricesOut).extend(self._new_matrices(self._weight_type()))

    def createWeightGradientMatrices(self, matricesOut: list[MPSMatrix], dataType: int) -> None:
        """Append zeroed matrices of the layout of the weights, and of the type float32 or float16."""
        function = "MPSRNNMatrixTrainingLayer.createWeightGradientMatrices"
        out = _as_list(function, "matricesOut", matricesOut)
        out.extend(self._new_matrices(_as_float_type(function, dataType)))

    def createTemporaryWeightGradientMatrices(
        self, matricesOut: list[MPSMatrix], dataType: int, commandBuffer: MTLCommandBuffer
    ) -> None:
        """Append temporary matrices, as `createWeightGradientMatrices` does."""
        function = "MPSRNNMatrixTrainingLayer.createTemporaryWeightGradientMatrices"
        out = _as_list(function, "matricesOut", matricesOut)
        out.extend(
            self._new_matrices(
                _as_float_type(function, dataType), open_buffer(function, "commandBuffer", commandBuffer)
            )
        )

    def encodeCopyWeights(
        self,
        commandBuffer: MTLCommandBuffer | None = None,
        weights: Matrices | None = None,
        matrixId: int | None = None,
        matrix: MPSMatrix | None = None,
        copyFromWeightsToMatrix: bool | None = None,
        matrixOffset: MTLOrigin | tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """Record a copy between one of the weights and a block of `matrix` that begins at `matrixOffset`.

        The block has a row for each output and a column for each input; biases and diagonals are a single row.
        """
        function = "MPSRNNMatrixTrainingLayer.encodeCopyWeights"
        buffer = open_buffer(function, "commandBuffer", commandBuffer)
        wanted = _as_matrix_id(function, matrixId)
        exports = as_bool(f"{function}: copyFromWeightsToMatrix", copyFromWeightsToMatrix)
        call = _Call(function)
        slots = self._cell.slots()
        index = next((k for k, slot in enumerate(slots) if slot.id is wanted), None)
        if index is None:
            listed = ", ".join(str(slot.id.value) for slot in slots)
            raise ValueError(
                f"{function}: matrixId is {wanted.value} ({wanted.name}), but this layer has the ids {listed}"
            )
        listed_weights = call.listed("weights", weights, len(slots))
        part = call.matrix(f"weights[{index}]", listed_weights[index], slots[index].shape, result=not exports)
        row, column, plane = as_origin(f"{function}: matrixOffset", matrixOffset)
        if plane:
            raise ValueError(f"{function}: matrixOffset.z is {plane}, must be 0")
        block = call.block("matrix", matrix, (row, column), slots[index].shape, result=exports)
        call.finish()
        source, target = (part, block) if exports else (block, part)
        buffer._work.append(partial(run_copy, source, target, call.retained))

    # ---- sequences

    def encodeForwardSequence(
        self,
        commandBuffer: MTLCommandBuffer | None = None,
        sourceMatrices: Matrices | None = None,
        sourceOffsets: Offsets = None,
        destinationMatrices: Matrices | None = None,
        destinationOffsets: Offsets = None,
        trainingStates: list[MPSRNNMatrixTrainingState] | None = None,
        recurrentInputState: MPSRNNRecurrentMatrixState | None = None,
        recurrentOutputStates: list[MPSRNNRecurrentMatrixState] | None = None,
        weights: Matrices | None = None,
    ) -> None:
        """Record the forward pass over a sequence.

        The number of rows may fall from step to step: the sequences of the last rows have ended, and keep their states.
        Offsets are in bytes. A training state for each step is appended to `trainingStates`, and the last recurrent
        state, or all of them, to `recurrentOutputStates`. Without `recurrentInputState` the states are 0 at first.
        """
        function = "MPSRNNMatrixTrainingLayer.encodeForwardSequence"
        buffer = open_buffer(function, "commandBuffer", commandBuffer)
        cell = self._cell
        call = _Call(function)
        x = call.sequence("sourceMatrices", sourceMatrices, sourceOffsets, "sourceOffsets", cell.inputs)
        rows = [len(view) for view in x]
        y = call.sequence(
            "destinationMatrices", destinationMatrices, destinationOffsets, "destinationOffsets", cell.units, rows, True
        )
        training_states = _as_list(function, "trainingStates", trainingStates)
        out = recurrentOutputStates
        if out is not None:
            _as_list(function, "recurrentOutputStates", out)
        used = call.weights("weights", weights, cell, self._weight_type())
        before = call.state("recurrentInputState", recurrentInputState, cell)
        if before and len(before[0]) < rows[0]:
            raise ValueError(
                f"{function}: recurrentInputState has {len(before[0])} rows, but the first of sourceMatrices has "
                f"{rows[0]}"
            )
        made = self._new_states(buffer, out, len(rows), rows[0])
        views = [state._views() for state in made]
        call.finish()
        pass_ = Pass(cell, rows)
        initial = [view[: rows[0]] for view in before]
        buffer._work.append(partial(run_forward, pass_, x, used, initial, y, views, call.retained))
        temporary = self._trainingStateIsTemporary
        training_states.extend(self._training_state_type(pass_, step, temporary) for step in range(len(rows)))
        if out is not None:
            out.extend(made)

    def encodeGradientSequence(
        self,
        commandBuffer: MTLCommandBuffer | None = None,
        forwardSources: Matrices | None = None,
        forwardSourceOffsets: Offsets = None,
        sourceGradients: Matrices | None = None,
        sourceOffsets: Offsets = None,
        destinationGradients: Matrices | None = None,
        destinationOffsets: Offsets = None,
        weightGradients: Matrices | None = None,
        trainingStates: Sequence[MPSRNNMatrixTrainingState] | None = None,
        recurrentInputState: MPSRNNRecurrentMatrixState | None = None,
        recurrentOutputStates: list[MPSRNNRecurrentMatrixState] | None = None,
        weights: Matrices | None = None,
    ) -> None:
        """Record the gradients of a sequence, or of consecutive steps of one.

        All lists are in the order of the forward pass. `sourceGradients` are those of the outputs, and
        `recurrentInputState` those of the states after the last step; the gradients of the inputs, the weights and the
        states before the first step are computed if there is a place for them.
        """
        function = "MPSRNNMatrixTrainingLayer.encodeGradientSequence"
        buffer = open_buffer(function, "commandBuffer", commandBuffer)
        cell = self._cell
        call = _Call(function)
        x = call.sequence("forwardSources", forwardSources, forwardSourceOffsets, "forwardSourceOffsets", cell.inputs)
        rows = [len(view) for view in x]
        dy = call.sequence("sourceGradients", sourceGradients, sourceOffsets, "sourceOffsets", cell.units, rows)
        dx = None
        if destinationGradients is not None:
            dx = call.sequence(
                "destinationGradients",
                destinationGradients,
                destinationOffsets,
                "destinationOffsets",
                cell.inputs,
                rows,
                True,
            )
        elif destinationOffsets is not None:
            raise ValueError(f"{function}: destinationOffsets is given without destinationGradients")
        pass_, first = call.steps("trainingStates", trainingStates, cell, rows)
        out = recurrentOutputStates
        if out is not None:
            _as_list(function, "recurrentOutputStates", out)
        used = call.weights("weights", weights, cell, self._weight_type())
        gradients = None
        if weightGradients is not None:
            gradients = call.weights("weightGradients", weightGradients, cell, None, result=True)
        after = call.state("recurrentInputState", recurrentInputState, cell)
        if after and len(after[0]) > rows[0]:
            raise ValueError(
                f"{function}: recurrentInputState has {len(after[0])} rows, but the first of forwardSources has only "
                f"{rows[0]}"
            )
        if dx is None and gradients is None and out is None:
            raise ValueError(
                f"{function}: needs destinationGradients, weightGradients or recurrentOutputStates for its results"
            )
        made = self._new_states(buffer, out, len(rows), rows[0])
        views = [state._views() for state in made]
        call.finish()
        plan = Gradient(pass_, first, rows, x, dy, used, after, dx, gradients, self._accumulateWeightGradients, views)
        buffer._work.append(partial(run_gradient, plan, call.retained))
        if out is not None:
            out.extend(made)

    # ---- what is made

    def _weight_type(self) -> MPSDataType:
        return MPSDataType.float32 if self._cell.float32 else MPSDataType.float16

    def _new_matrix(self, shape: tuple[int, int], data_type: int, buffer: MTLCommandBuffer | None) -> MPSMatrix:
        """A zeroed matrix; temporary, if there is a command buffer."""
        rows, columns = shape
        row_bytes = MPSMatrixDescriptor.rowBytes(columns, data_type)
        descriptor = MPSMatrixDescriptor(rows=rows, columns=columns, rowBytes=row_bytes, dataType=data_type)
        if buffer is not None:
            return self._temporary_matrix_type(commandBuffer=buffer, matrixDescriptor=descriptor)
        return self._matrix_type(device=self._device, descriptor=descriptor)

    def _new_matrices(self, data_type: int, buffer: MTLCommandBuffer | None = None) -> list[MPSMatrix]:
        return [self._new_matrix(slot.shape, data_type, buffer) for slot in self._cell.slots()]

    def _new_states(
        self, buffer: MTLCommandBuffer, out: list[Any] | None, steps: int, rows: int
    ) -> list[MPSRNNRecurrentMatrixState]:
        """States of float32, so that a sequence in pieces gives what it gives as a whole."""
        if out is None:
            return []
        temporary = self._recurrentOutputIsTemporary
        shape, count = (rows, self._cell.units), len(KINDS[self._cell.kind].states)
        return [
            self._recurrent_state_type(
                [self._new_matrix(shape, MPSDataType.float32, buffer if temporary else None) for _ in range(count)],
                temporary,
            )
            for _ in range(steps if self._storeAllIntermediateStates else 1)
        ]

    # ---- archives

    def encode(self, with_: NSKeyedArchiver) -> None:
        """Archive the layer; its weights are not part of it."""
        self._encode_with(with_)

    def _archive(self, archiver: NSKeyedArchiver) -> None:
        super()._archive(archiver)
        cell = self._cell
        for name, value in cell._asdict().items():
            if name != "neurons":
                archiver.encode(value, f"cell.{name}")
        for index, (kind, *parameters) in enumerate(cell.neurons):
            archiver.encode(int(kind), f"cell.neuron{index}.type")
            for name, parameter in zip("abc", parameters, strict=True):
                archiver.encode(parameter, f"cell.neuron{index}.{name}")

    def _restore(self, unarchiver: NSKeyedUnarchiver) -> None:
        super()._restore(unarchiver)
        name = unarchiver.decodeString("cell.kind")
        if name not in KINDS:
            raise ValueError(f"archive: cell.kind is {name!r:.40}, must be {' or '.join(map(repr, KINDS))}")
        kind = KINDS[name]
        sizes = [unarchiver.decodeInteger(f"cell.{size}") for size in ("inputs", "units")]
        flags = [unarchiver.decodeBool(f"cell.{flag}") for flag in ("unit_transform", "float32", "flip", "diagonal")]
        memory = unarchiver.decodeString("cell.memory") or ""
        allowed = kind.letters if name == "lstm" else ""
        if min(sizes) < 1 or (flags[0] and sizes[0] != sizes[1]):
            raise ValueError(f"archive: cell.inputs is {sizes[0]} and cell.units is {sizes[1]}, which no layer has")
        if memory != "".join(letter for letter in allowed if letter in memory):
            raise ValueError(f"archive: cell.memory is {memory!r:.40}, must be letters of {allowed!r} in order")
        neurons = []
        for index in range(len(kind.letters) + (name == "lstm")):
            key = f"cell.neuron{index}"
            values = [as_float(f"archive: {key}.{p}", unarchiver.decodeDouble(f"{key}.{p}")) for p in "abc"]
            neuron_type = as_neuron_type(f"archive: {key}.type", unarchiver.decodeInteger(f"{key}.type"))
            neurons.append((neuron_type, values[0], values[1], values[2]))
        self._cell = Cell(name, sizes[0], sizes[1], flags[0], flags[1], flags[2], flags[3], memory, tuple(neurons))
        self._cell.options()  # raises for a neuron that the engine does not have


# ---- encoding --------------------------------------------------------------------------------------------------------


class _Call:
    """Checks the operands of one encode."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.retained: list[object] = []  # kept until the work has run
        self.reads: dict[str, Array] = {}
        self.results: dict[str, Array] = {}
        self.temporaries: dict[int, Any] = {}  # what is read, by id

    def listed(self, name: str, matrices: object, count: int | None = None) -> Sequence[Any]:
        if matrices is None:
            raise TypeError(f"{self.function}: {name} is missing; it is required")
        if not isinstance(matrices, (list, tuple)):
            raise TypeError(f"{self.function}: {name} must be a list, not {type(matrices).__name__}")
        if count is not None and len(matrices) != count:
            raise ValueError(f"{self.function}: {name} has {len(matrices)} elements, must have {count}")
        return matrices

    def matrix(
        self, name: str, matrix: object, shape: tuple[int | None, int], offset: int = 0, result: bool = False
    ) -> Array:
        """The elements, of this shape. `offset` is in bytes, beyond the matrix's own."""
        view = self._view(name, matrix, offset)
        rows, columns = shape
        if view.shape[1] != columns or (rows is not None and view.shape[0] != rows):
            needed = f"{columns} columns" if rows is None else f"{rows} x {columns}"
            raise ValueError(f"{self.function}: {name} is {view.shape[0]} x {view.shape[1]}, must have {needed}")
        return self._add(name, matrix, view, result)

    def block(self, name: str, matrix: object, origin: tuple[int, int], shape: tuple[int, int], result: bool) -> Array:
        """A part of a matrix."""
        view = self._view(name, matrix, 0)
        (row, column), (rows, columns) = origin, shape
        if row + rows > view.shape[0] or column + columns > view.shape[1]:
            raise ValueError(
                f"{self.function}: {rows} x {columns} from matrixOffset {origin} reach beyond {name}, "
                f"{view.shape[0]} x {view.shape[1]}"
            )
        return self._add(name, matrix, view[row : row + rows, column : column + columns], result)

    def sequence(
        self,
        name: str,
        matrices: object,
        offsets: object,
        offsets_name: str,
        columns: int,
        rows: list[int] | None = None,
        result: bool = False,
    ) -> list[Array]:
        """The matrices of all steps. Without `rows`, their number may fall but not rise."""
        given = self.listed(name, matrices, None if rows is None else len(rows))
        if not given:
            raise ValueError(f"{self.function}: {name} is empty, must have a matrix for each step")
        starts: Sequence[Any] = [0] * len(given)
        if offsets is not None:
            try:
                starts = list(offsets)  # type: ignore[call-overload]
            except TypeError:
                raise TypeError(
                    f"{self.function}: {offsets_name} must be a list or None, not {type(offsets).__name__}"
                ) from None
            if len(starts) != len(given):
                raise ValueError(
                    f"{self.function}: {offsets_name} has {len(starts)} elements, but {name} has {len(given)}"
                )
        views: list[Array] = []
        for step, (matrix, start) in enumerate(zip(given, starts, strict=True)):
            offset = as_unsigned(f"{self.function}: {offsets_name}[{step}]", start)
            step_rows = None if rows is None else rows[step]
            view = self.matrix(f"{name}[{step}]", matrix, (step_rows, columns), offset, result)
            if not len(view):
                raise ValueError(f"{self.function}: {name}[{step}] has no rows")
            if views and len(view) > len(views[-1]):
                raise ValueError(
                    f"{self.function}: {name}[{step}] has {len(view)} rows, but {name}[{step - 1}] has only "
                    f"{len(views[-1])}: the longest sequences come first"
                )
            views.append(view)
        return views

    def weights(
        self, name: str, matrices: object, cell: Cell, data_type: MPSDataType | None, result: bool = False
    ) -> list[Array]:
        """Weights in the order of the ids, or their gradients, which may be of any type."""
        slots = cell.slots()
        views = []
        for index, (slot, matrix) in enumerate(zip(slots, self.listed(name, matrices, len(slots)), strict=True)):
            label = f"{name}[{index}]"
            views.append(self.matrix(label, matrix, slot.shape, result=result))
            if data_type is not None and matrix._dataType is not data_type:
                raise TypeError(
                    f"{self.function}: {label} is of {matrix._dataType.name}, must be of {data_type.name} as the "
                    "weights of this layer are"
                )
        return views

    def state(self, name: str, state: object, cell: Cell) -> list[Array]:
        """The views of a recurrent state, [rows, units] each; none without a state."""
        if state is None:
            return []
        if not isinstance(state, MPSRNNRecurrentMatrixState):
            raise wrong_type(self.function, name, state, MPSRNNRecurrentMatrixState)
        state._check_readable(f"{self.function}: {name}")
        states = KINDS[cell.kind].states
        if len(state._matrices) != len(states):
            raise ValueError(
                f"{self.function}: {name} has {len(state._matrices)} matrices, but this layer has the states "
                f"{' and '.join(states)}"
            )
        views = []
        for part, matrix in zip(states, state._matrices, strict=True):
            views.append(self.matrix(f"{name}.{part}", matrix, (None, cell.units)))
            self.temporaries.pop(id(matrix), None)  # the state counts its reads
        self.temporaries[id(state)] = state
        return views

    def steps(self, name: str, states: object, cell: Cell, rows: list[int]) -> tuple[Pass, int]:
        """The forward pass of the training states, and the first of its steps."""
        given = self.listed(name, states, len(rows))
        for step, state in enumerate(given):
            if not isinstance(state, MPSRNNMatrixTrainingState):
                raise wrong_type(self.function, f"{name}[{step}]", state, MPSRNNMatrixTrainingState)
            state._check_readable(f"{self.function}: {name}[{step}]")
            self.temporaries[id(state)] = state
        pass_, first = given[0]._pass, given[0]._step
        if pass_.cell != cell:
            raise ValueError(f"{self.function}: {name} are of a layer with another descriptor")
        if any(state._pass is not pass_ or state._step != first + step for step, state in enumerate(given)):
            raise ValueError(f"{self.function}: {name} must be consecutive steps of one forward pass")
        if rows != pass_.rows[first : first + len(rows)]:
            raise ValueError(
                f"{self.function}: forwardSources have {rows} rows, but the forward pass had "
                f"{pass_.rows[first : first + len(rows)]} in these steps"
            )
        return pass_, first

    def _view(self, name: str, matrix: object, offset: int) -> Array:
        if not isinstance(matrix, MPSMatrix):
            raise wrong_type(self.function, name, matrix, MPSMatrix)
        if matrix._dataType not in FLOAT_TYPES:
            raise TypeError(f"{self.function}: {name} is of {matrix._dataType.name}, must be of float32 or float16")
        elements = matrix._elements()
        if len(elements) != 1:
            raise ValueError(f"{self.function}: {name} has {len(elements)} matrices, must have 1")
        if not offset:
            first: Array = elements[0]
            return first
        buffer, start = matrix._buffer, matrix._offset + offset
        assert buffer is not None
        if start + matrix._extent > buffer._bytes.size:
            raise ValueError(
                f"{self.function}: {name} with an offset of {offset} needs {start + matrix._extent} bytes, but its "
                f"buffer has {buffer._bytes.size}"
            )
        if offset % matrix._dtype.itemsize:
            raise ValueError(
                f"{self.function}: {name} has an offset of {offset}, not a multiple of the element's "
                f"{matrix._dtype.itemsize} bytes"
            )
        view: Array = np.ndarray(matrix._shape[1:], matrix._dtype, buffer._bytes, start, matrix._strides[1:])
        return view

    def _add(self, name: str, matrix: Any, view: Array, result: bool) -> Array:
        if result and not view.flags.writeable:
            raise ValueError(f"{self.function}: {name} lies in read-only memory")
        (self.results if result else self.reads)[name] = view
        self.retained.append(matrix)
        if not result and isinstance(matrix, TemporaryStorage):
            self.temporaries[id(matrix)] = matrix
        return view

    def finish(self) -> None:
        """Check overlap and count the reads: nothing may fail after this."""
        found = find_overlap(self.results, self.reads)
        if found is not None:
            raise ValueError(f"{self.function}: {found[0]} overlaps {found[1]}")
        for read in self.temporaries.values():
            read._count_read()


def _as_list(function: str, name: str, value: Any) -> list[Any]:
    """A list to append to."""
    if not isinstance(value, list):
        given = "missing; it is required" if value is None else f"not a list but {type(value).__name__}"
        raise TypeError(f"{function}: {name} is {given}")
    return value


def _as_float_type(function: str, value: object) -> MPSDataType:
    data_type = as_data_type(f"{function}: dataType", value)
    if data_type not in FLOAT_TYPES:
        raise ValueError(f"{function}: dataType is {data_type.name}, must be float32 or float16")
    return data_type


def _as_matrix_id(function: str, value: object) -> MPSRNNMatrixId:
    number = as_unsigned(f"{function}: matrixId", value)
    if number >= MPSRNNMatrixId.MPSRNNMatrixId_count:
        raise ValueError(f"{function}: matrixId is {number}, which is not an MPSRNNMatrixId (0 to 28)")
    return MPSRNNMatrixId(number)
