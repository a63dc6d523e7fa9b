"""MPSMatrixBatchNormalization and its gradient: rows are feature vectors, columns are feature channels.

`encode` checks everything and records views of the caller's memory. Nothing is read or written until the command
buffer runs. The arithmetic is that of `batch_norm_forward` and `batch_norm_backward`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from ..ops._arrays import overlaps, same_elements
from ..ops._norm_problem import NormProblem, norm_problem
from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.normalization import (
    BareNormCache,
    NormGradients,
    batch_norm_backward,
    batch_norm_forward,
    run_forward,
)
from ._archive import NSKeyedArchiver, NSKeyedUnarchiver
from ._kernel import (
    KernelSetting,
    MPSKernel,
    MPSMatrixBinaryKernel,
    MPSMatrixUnaryKernel,
    open_buffer,
    planned_work,
    wrong_type,
)
from ._matrix import MPSMatrix, MPSVector, TemporaryStorage
from ._metal import MTLCommandBuffer, Work
from ._neuron import Curve, as_neuron_type, neuron
from ._types import FLT_MIN, MPSCNNNeuronType, MTLOrigin, NSUIntegerMax, as_bool, as_float, as_unsigned

_FLOAT32: Final = np.dtype(np.float32)
_FLOAT16: Final = np.dtype(np.float16)
_NO_NEURON: Final = (MPSCNNNeuronType.none, 0.0, 0.0, 0.0)

Neuron: TypeAlias = Activation | Curve | None
Job: TypeAlias = tuple[Any, ...]  # the operands for one matrix of a batch; None for absent vectors


class _NormalizationKernel(MPSKernel):
    """Members that both kernels share."""

    sourceNumberOfFeatureVectors = KernelSetting[int](as_unsigned, NSUIntegerMax, "Maximum number of rows to use.")
    sourceInputFeatureChannels = KernelSetting[int](as_unsigned, NSUIntegerMax, "Maximum number of columns to use.")
    epsilon = KernelSetting[float](as_float, FLT_MIN, "Added to the variance.")
    _sourceNumberOfFeatureVectors: int
    _sourceInputFeatureChannels: int
    _batchStart: int
    _batchSize: int
    _epsilon: float
    _neuron: tuple[MPSCNNNeuronType, float, float, float] = _NO_NEURON
    _function: ClassVar[str]  # for messages

    def setNeuronType(
        self, neuronType: int, parameterA: float = 0.0, parameterB: float = 0.0, parameterC: float = 0.0
    ) -> None:
        """Set the function applied to the normalized values. PReLU is not supported."""
        function = f"{type(self).__name__}.setNeuronType"
        self._neuron = (
            as_neuron_type(f"{function}: neuronType", neuronType),
            as_float(f"{function}: parameterA", parameterA),
            as_float(f"{function}: parameterB", parameterB),
            as_float(f"{function}: parameterC", parameterC),
        )
        self._changed()

    def neuronType(self) -> MPSCNNNeuronType:
        return self._neuron[0]

    def neuronParameterA(self) -> float:
        return self._neuron[1]

    def neuronParameterB(self) -> float:
        return self._neuron[2]

    def neuronParameterC(self) -> float:
        return self._neuron[3]

    def _archive(self, archiver: NSKeyedArchiver) -> None:
        super()._archive(archiver)
        archiver.encode(int(self._neuron[0]), "neuronType")
        for name, value in zip("ABC", self._neuron[1:], strict=True):
            archiver.encode(value, f"neuronParameter{name}")

    def _restore(self, unarchiver: NSKeyedUnarchiver) -> None:
        super()._restore(unarchiver)
        kind = unarchiver.decodeInteger("neuronType")
        parameters = (unarchiver.decodeDouble(f"neuronParameter{name}") for name in "ABC")
        _NormalizationKernel.setNeuronType(self, kind, *parameters)

    def _arithmetic(self, function: str) -> tuple[float, Neuron]:
        epsilon = self._epsilon
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"{function}: epsilon is {epsilon}, must be finite and at least 0")
        try:
            return epsilon, neuron(*self._neuron)
        except ValueError as error:
            raise ValueError(f"{function}: {error}") from None


class MPSMatrixBatchNormalization(_NormalizationKernel, MPSMatrixUnaryKernel):
    """f(gamma * (x - mean) / sqrt(variance + epsilon) + beta) for each column."""

    computeStatistics = KernelSetting[bool](
        as_bool, False, "Compute the mean and the variance and write them to the vectors, instead of reading these."
    )
    _computeStatistics: bool
    _function = "MPSMatrixBatchNormalization.encode"

    def encode(
        self,
        commandBuffer: MTLCommandBuffer | None = None,
        inputMatrix: MPSMatrix | None = None,
        meanVector: MPSVector | None = None,
        varianceVector: MPSVector | None = None,
        gammaVector: MPSVector | None = None,
        betaVector: MPSVector | None = None,
        resultMatrix: MPSMatrix | None = None,
        *,
        with_: NSKeyedArchiver | None = None,
    ) -> None:
        """Record the normalization of `inputMatrix` into `resultMatrix`. `with_` archives the kernel instead.

        gamma is 1 without `gammaVector`, beta is 0 without `betaVector`; the other operands are required. The result
        can be computed in place.
        """
        if with_ is not None:
            self._encode_with(with_)
            return
        recorded = open_buffer(self._function, "commandBuffer", commandBuffer)._work
        operands = (inputMatrix, resultMatrix, meanVector, varianceVector, gammaVector, betaVector)
        recorded.append(planned_work(self, *operands))

    def _prepare(self, operands: tuple[Any, ...]) -> Work:
        function = self._function
        inputMatrix, resultMatrix, meanVector, varianceVector, gammaVector, betaVector = operands
        call = _Call(function, self)
        compute = self._computeStatistics
        x = call.matrix("inputMatrix", inputMatrix, "sourceMatrixOrigin", self._sourceMatrixOrigin)
        y = call.matrix("resultMatrix", resultMatrix, "resultMatrixOrigin", self._resultMatrixOrigin, result=True)
        batch = call.batch()
        mean = call.vector("meanVector", meanVector, result=compute)
        var = call.vector("varianceVector", varianceVector, result=compute)
        gamma = call.optional_vector("gammaVector", gammaVector)
        beta = call.optional_vector("betaVector", betaVector)
        if compute and len(batch) > 1:
            for name, vectors in (("meanVector", len(mean)), ("varianceVector", len(var))):
                if vectors == 1:
                    raise ValueError(f"{function}: {name} has 1 vector for the statistics of {len(batch)} matrices")
        call.check_overlap("resultMatrix", ("inputMatrix",))
        epsilon, neuron = self._arithmetic(function)
        jobs = [(x[k], y[k], *(_of_matrix(vector, k) for vector in (mean, var, gamma, beta))) for k in batch]
        call.count_reads()
        return partial(_normalize, jobs, epsilon, neuron, _problem(x[0], epsilon, neuron), compute, operands)


class MPSMatrixBatchNormalizationGradient(_NormalizationKernel, MPSMatrixBinaryKernel):
    """Gradients of :class:`MPSMatrixBatchNormalization`. Set the same members as there.

    Gradients flow through the mean and the variance, even if these were not computed from the data: see
    `gradientThroughStatistics`.
    """

    gradientThroughStatistics = KernelSetting[bool](
        as_bool, True, "False: treat the mean and the variance as constants. A retrograd extension."
    )
    _gradientThroughStatistics: bool
    _function = "MPSMatrixBatchNormalizationGradient.encode"

    def encode(
        self,
        to: MTLCommandBuffer | None = None,
        gradientMatrix: MPSMatrix | None = None,
        inputMatrix: MPSMatrix | None = None,
        mean: MPSVector | None = None,
        varianceVector: MPSVector | None = None,
        gammaVector: MPSVector | None = None,
        betaVector: MPSVector | None = None,
        resultGradientForDataMatrix: MPSMatrix | None = None,
        resultGradientForGammaVector: MPSVector | None = None,
        resultGradientForBetaVector: MPSVector | None = None,
        *,
        with_: NSKeyedArchiver | None = None,
    ) -> None:
        """Record the gradients of the input, and of gamma and beta if there are vectors for them.

        `with_` archives the kernel instead. Results are overwritten, not accumulated. The gradient of the data can be
        computed in place of the gradient matrix or the input matrix.
        """
        if with_ is not None:
            self._encode_with(with_)
            return
        recorded = open_buffer(self._function, "to", to)._work
        operands = (
            gradientMatrix,
            inputMatrix,
            mean,
            varianceVector,
            gammaVector,
            betaVector,
            resultGradientForDataMatrix,
            resultGradientForGammaVector,
            resultGradientForBetaVector,
        )
        recorded.append(planned_work(self, *operands))

    def _prepare(self, operands: tuple[Any, ...]) -> Work:
        function = self._function
        gradientMatrix, inputMatrix, mean, varianceVector, gammaVector, betaVector, *results = operands
        call = _Call(function, self)
        names = ("resultGradientForDataMatrix", "resultGradientForGammaVector", "resultGradientForBetaVector")
        x = call.matrix("inputMatrix", inputMatrix, "secondarySourceMatrixOrigin", self._secondarySourceMatrixOrigin)
        dy = call.matrix("gradientMatrix", gradientMatrix, "primarySourceMatrixOrigin", self._primarySourceMatrixOrigin)
        dx = call.matrix(names[0], results[0], "resultMatrixOrigin", self._resultMatrixOrigin, result=True)
        batch = call.batch()
        inputs = (
            call.vector("mean", mean),
            call.vector("varianceVector", varianceVector),
            call.optional_vector("gammaVector", gammaVector),
            call.optional_vector("betaVector", betaVector),
        )
        outputs = tuple(call.optional_vector(name, results[i], result=True) for i, name in enumerate(names) if i)
        over_input = "inputMatrix" in call.check_overlap(names[0], ("inputMatrix", "gradientMatrix"))
        epsilon, neuron = self._arithmetic(function)
        need: tuple[str, ...] | None
        need = ("dx", *(("dgamma", "dbeta")[i] for i, vector in enumerate(outputs) if vector is not None))
        summed = (False, *(vector is not None and len(vector) == 1 < len(batch) for vector in outputs))
        # Results that the engine writes directly; the others it returns as new arrays.
        direct = (not over_input, *(vector is not None and vector.dtype == _FLOAT32 for vector in outputs))
        if all(direct) and not any(summed) and not isinstance(neuron, Curve):
            need = None
        plan = _GradientPlan(
            epsilon,
            neuron,
            frozen=not self._gradientThroughStatistics,
            need=need,
            summed=summed,
            problem=_problem(x[0], epsilon, neuron),
        )
        jobs = []
        for k in batch:
            targets = (dx[k], *(_of_matrix(vector, k) for vector in outputs))
            out = NormGradients(*(targets[i] if direct[i] and not summed[i] else None for i in range(3)))
            jobs.append((x[k], dy[k], *(_of_matrix(vector, k) for vector in inputs), targets, out))
        call.count_reads()
        return partial(_differentiate, jobs, plan, operands)


# ---- encoding --------------------------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    name: str
    storage: MPSMatrix | MPSVector
    view: Array
    result: bool  # it is written


class _Call:
    """Checks the operands of one `encode`: the input first, then the other matrices, then the vectors."""

    def __init__(self, function: str, kernel: _NormalizationKernel) -> None:
        self.function = function
        self.kernel = kernel
        self.operands: list[_Operand] = []
        self.rows = self.columns = 0  # of the window
        self.start = self.stop = 0  # the matrices of the batch

    def matrix(self, name: str, matrix: object, origin_name: str, origin: MTLOrigin, result: bool = False) -> Array:
        """The window of the matrix that the kernel uses, [matrices, rows, columns]."""
        if not isinstance(matrix, MPSMatrix):
            raise wrong_type(self.function, name, matrix, MPSMatrix)
        row, column, plane = origin
        _, rows, columns = matrix._shape
        if plane:
            raise ValueError(f"{self.function}: {origin_name}.z is {plane}, must be 0")
        if not self.operands:
            if matrix._dtype is not _FLOAT32 and matrix._dtype is not _FLOAT16:
                raise TypeError(f"{self.function}: {name} is of {matrix._dataType.name}, must be of float32 or float16")
            self.rows = max(0, min(self.kernel._sourceNumberOfFeatureVectors, rows - row))
            self.columns = max(0, min(self.kernel._sourceInputFeatureChannels, columns - column))
            if not (self.rows and self.columns):
                raise ValueError(
                    f"{self.function}: the window of {name}, {rows} x {columns}, is empty: {self.rows} x "
                    f"{self.columns} from {origin_name} {(row, column)}"
                )
        elif matrix._dtype is not self.operands[0].storage._dtype:
            source = self.operands[0]
            raise TypeError(
                f"{self.function}: {name} is of {matrix._dataType.name}, must be of {source.storage._dataType.name} "
                f"as {source.name} is"
            )
        if row + self.rows > rows or column + self.columns > columns:
            raise ValueError(
                f"{self.function}: {self.rows} x {self.columns} from {origin_name} {(row, column)} reach beyond "
                f"{name}, {rows} x {columns}"
            )
        view = matrix._elements()[:, row : row + self.rows, column : column + self.columns]
        self._add(_Operand(name, matrix, view, result))
        return view

    def batch(self) -> range:
        """Indices of the matrices to process, among those that all matrix operands have."""
        available = min(len(operand.view) for operand in self.operands)
        self.start = self.kernel._batchStart
        if self.start >= available:
            raise ValueError(f"{self.function}: batchStart is {self.start}, but there are {available} matrices")
        self.stop = self.start + min(self.kernel._batchSize, available - self.start)
        return range(self.start, self.stop)

    def vector(self, name: str, vector: object, result: bool = False) -> Array:
        """The vector operand, [vectors, columns]: one vector per matrix, or one for all."""
        if not isinstance(vector, MPSVector):
            raise wrong_type(self.function, name, vector, MPSVector)
        before = self.operands[-1]  # a matrix, or a vector of a type already checked
        if vector._dtype is not before.storage._dtype and not (
            isinstance(before.storage, MPSMatrix) and before.storage._dtype is _FLOAT16 and vector._dtype is _FLOAT32
        ):
            raise TypeError(
                f"{self.function}: {name} is of {vector._dataType.name}, and {before.name} of "
                f"{before.storage._dataType.name}; only matrices of float16 go with vectors of another type, float32"
            )
        vectors, length = vector._shape
        if length < self.columns:
            raise ValueError(f"{self.function}: {name} has length {length}, but {self.columns} columns are normalized")
        if vectors != 1 and vectors < self.stop:
            raise ValueError(
                f"{self.function}: {name} has {vectors} vectors, must have 1, or one for each of {self.stop} matrices"
            )
        view = vector._elements()[:, : self.columns]
        self._add(_Operand(name, vector, view, result))
        return view

    def optional_vector(self, name: str, vector: object, result: bool = False) -> Array | None:
        return None if vector is None else self.vector(name, vector, result)

    def _add(self, operand: _Operand) -> None:
        if operand.result and not operand.view.flags.writeable:
            raise ValueError(f"{self.function}: {operand.name} lies in read-only memory")
        self.operands.append(operand)

    def check_overlap(self, in_place: str, sources: tuple[str, ...]) -> list[str]:
        """Raise if a result overlaps another operand, except that `in_place` may be exactly one of `sources`.

        Return the names of those sources.
        """
        matching = []
        for i, (name, storage, view, result) in enumerate(self.operands):
            if not result:
                continue
            low, high = storage._low, storage._high
            for j, (other_name, other, other_view, other_result) in enumerate(self.operands):
                if other._low >= high or other._high <= low or i == j or (other_result and j < i):
                    continue
                mine, its = (v if len(v) == 1 else v[self.start : self.stop] for v in (view, other_view))
                if name == in_place and other_name in sources and same_elements(mine, its):
                    matching.append(other_name)
                elif overlaps(mine, its):
                    raise ValueError(
                        f"{self.function}: {name} overlaps {other_name} without being exactly in its place"
                    )
        return matching

    def count_reads(self) -> None:
        """Count this encode once for each temporary object that it reads."""
        for storage in {operand.storage for operand in self.operands if not operand.result}:
            if isinstance(storage, TemporaryStorage):
                storage._count_read()


def _of_matrix(vector: Array | None, k: int) -> Array | None:
    """The vector for matrix k of a batch."""
    return None if vector is None else vector[k if len(vector) > 1 else 0]


# ---- work ------------------------------------------------------------------------------------------------------------


def _problem(x: Array, epsilon: float, neuron: Neuron) -> NormProblem | None:
    """The problem that the engine solves for each matrix; none if NumPy applies the neuron."""
    if isinstance(neuron, Curve):
        return None
    return norm_problem("batch_norm", x, 1, 1, epsilon, neuron, "input")


def _normalize(
    jobs: list[Job], epsilon: float, neuron: Neuron, problem: NormProblem | None, compute: bool, retained: object
) -> None:
    """Forward, one matrix after another."""
    for x, y, mean, var, gamma, beta in jobs:
        if isinstance(neuron, Curve):
            given: dict[str, Any] = {} if compute else {"mean": mean, "var": var, "training": False}
            z, cache = batch_norm_forward(_as_float64(x), _as_float64(gamma), _as_float64(beta), eps=epsilon, **given)
            with np.errstate(all="ignore"):
                y[...] = neuron.value(z)
        else:
            assert problem is not None
            used_mean, used_var = (None, None) if compute else (mean, var)
            gamma, beta = _as_float32(gamma), _as_float32(beta)
            _, cache = run_forward(problem, x, gamma, beta, used_mean, used_var, not compute, y, None, None)
        if compute:
            with np.errstate(all="ignore"):
                mean[...] = cache.mean
                var[...] = cache.var


class _GradientPlan(NamedTuple):
    epsilon: float
    neuron: Neuron
    frozen: bool
    need: tuple[str, ...] | None  # None: all three, each with an output array
    summed: tuple[bool, ...]  # for dx, dgamma and dbeta: whether it is summed over all matrices
    problem: NormProblem | None  # None: the neuron is a Curve


def _differentiate(jobs: list[Job], plan: _GradientPlan, retained: object) -> None:
    """Backward, one matrix after another."""
    epsilon, neuron, frozen, need, summed, problem = plan
    sums: list[Any] = [0.0, 0.0, 0.0]
    for x, dy, mean, var, gamma, beta, targets, out in jobs:
        if isinstance(neuron, Curve):
            z, cache = batch_norm_forward(
                _as_float64(x),
                _as_float64(gamma),
                _as_float64(beta),
                mean=mean,
                var=var,
                eps=epsilon,
                training=not frozen,
            )
            with np.errstate(all="ignore"):
                dz = _as_float64(dy) * neuron.slope(z)
            gradients = batch_norm_backward(dz, cache, need=need)
        else:
            assert problem is not None
            bare = BareNormCache(problem, np.array((mean, var), np.float64), True, frozen)
            cache = bare.with_arrays(x, None, _as_float32(gamma), _as_float32(beta))
            gradients = batch_norm_backward(dy, cache, need=need, out=out)
        for k, target in enumerate(targets):
            gradient: Any = gradients[k]
            if target is not gradient:
                with np.errstate(all="ignore"):
                    if summed[k]:
                        gradient = sums[k] = sums[k] + gradient.astype(np.float64)
                    target[...] = gradient


def _as_float32(vector: Array | None) -> Array | None:
    """Convert parameters to float32, which the engine requires for float16 data."""
    return vector if vector is None or vector.dtype == _FLOAT32 else vector.astype(np.float32)


def _as_float64(array: Array | None) -> Any:
    return None if array is None else array.astype(np.float64)
