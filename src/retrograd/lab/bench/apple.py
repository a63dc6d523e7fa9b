"""The rows of ``retrograd bench apple``: calls of the front ends, and the array functions doing the same work.

Both sides read the same inputs and write to separate buffers, which must then be bitwise identical. Everything else
that a front end does (check descriptors, keep a copy of x for backward, submit work to a queue) is its overhead.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from ... import bnns, mps
from ...ops._types import Array
from ...ops.elementwise import activation_backward, activation_forward
from ...ops.normalization import (
    NormCache,
    NormGradients,
    RunningUpdate,
    batch_norm_backward,
    batch_norm_cache,
    batch_norm_forward,
)
from ...ops.optimizer import adam_step
from ...ops.recurrent import LstmCache, LstmGradients, LstmWeights, lstm_backward, lstm_cache_size, lstm_forward
from ..cases import LstmCase, LstmData, NormCase, NormData, make_lstm_data, make_norm_data
from .timing import Contest, Machine, library_threads, seconds_per_call, wake_workers

__all__ = ["APPLE_CASES", "AppleCase", "Pair", "Side", "apple_contest", "apple_failures"]

# Apple's structures hold C floats. These values are exact in float32, so both sides compute with the same ones.
_EPS: Final = 2.0**-17
_MOMENTUM: Final = 0.875
_ADAM: Final[dict[str, Any]] = {"learning_rate": 2.0**-10, "beta1": 0.875, "beta2": 1 - 2.0**-10}
_ADAM_SHAPES: Final = ((64, 2), (64,), (64,), (3, 64))
_GATES: Final = ("input_gate", "forget_gate", "candidate_gate", "output_gate")  # i f g o


class Side(NamedTuple):
    passes: Mapping[str, Callable[[], object]]  # in the order of a training step
    results: Mapping[str, Array]  # what they write


class Pair(NamedTuple):
    """The same passes and results through both APIs."""

    apple: Side
    arrays: Side


class AppleCase(NamedTuple):
    name: str
    make: Callable[[], Pair]


# ---- BNNS: batch norm ------------------------------------------------------------------------------------------------


def _bnns_batch_norm_pair(case: NormCase) -> Pair:
    data = make_norm_data(case)
    return Pair(_bnns_batch_norm(data), _batch_norm(data))


def _norm_results(data: NormData) -> dict[str, Array]:
    results = {"y": data.x, "dx": data.x, "dgamma": data.gamma, "dbeta": data.beta, "mean": data.beta, "var": data.beta}
    return {name: np.zeros_like(like) for name, like in results.items()}


def _bnns_batch_norm(data: NormData) -> Side:
    x, gamma, beta, dy = data
    batch, channels = x.shape
    results = _norm_results(data)
    y = results["y"]
    describe = bnns.BNNSNDArrayDescriptor.from_array
    in_delta, out_delta = _vector(channels, results["dx"]), _vector(channels, dy)
    beta_delta, gamma_delta = describe(results["dbeta"]), describe(results["dgamma"])
    layer = bnns.BNNSLayerParametersNormalization(
        i_desc=_vector(channels),
        o_desc=_vector(channels),
        beta_desc=describe(beta),
        gamma_desc=describe(gamma),
        moving_mean_desc=describe(results["mean"]),
        moving_variance_desc=describe(results["var"]),
        momentum=_MOMENTUM,
        epsilon=_EPS,
        activation=bnns.BNNSActivation(function=bnns.BNNSActivationFunctionSigmoid),
    )
    # Gamma and beta stay in the client's memory, as in training, where an optimizer updates them.
    settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
    norm = bnns.BNNSFilterCreateLayerNormalization(bnns.BNNSBatchNorm, layer, settings)

    def forward() -> None:
        bnns.BNNSNormalizationFilterApplyBatch(norm, batch, x, channels, y, channels, True)

    def backward() -> None:
        bnns.BNNSNormalizationFilterApplyBackwardBatch(
            norm, batch, in_delta, channels, y, channels, out_delta, channels, beta_delta, gamma_delta
        )

    return Side({"forward": forward, "backward": backward}, results)


def _batch_norm(data: NormData) -> Side:
    x, gamma, beta, dy = data
    results = _norm_results(data)
    gradients = NormGradients(results["dx"], results["dgamma"], results["dbeta"])
    options: dict[str, Any] = {
        "running_mean": results["mean"],
        "running_var": results["var"],
        "update": RunningUpdate.bnns(_MOMENTUM),
        "eps": _EPS,
        "activation": "sigmoid",
        "out": results["y"],
    }
    cache: NormCache

    def forward() -> None:
        nonlocal cache
        _, cache = batch_norm_forward(x, gamma, beta, **options)

    def backward() -> None:
        batch_norm_backward(dy, cache, out=gradients)

    return Side({"forward": forward, "backward": backward}, results)


def _vector(channels: int, data: Array | None = None) -> bnns.BNNSNDArrayDescriptor:
    """The descriptor of one sample; the samples of a batch are contiguous."""
    return bnns.BNNSNDArrayDescriptor(
        layout=bnns.BNNSDataLayoutVector, size=(channels,), data_type=bnns.BNNSDataTypeFloat32, data=data
    )


# ---- BNNS: activation ------------------------------------------------------------------------------------------------


def _bnns_activation_pair(case: NormCase) -> Pair:
    data = make_norm_data(case)
    return Pair(_bnns_activation(data), _activation(data))


def _bnns_activation(data: NormData) -> Side:
    x, dy = data.x, data.dy
    y, dx = np.zeros_like(x), np.zeros_like(x)
    batch, channels = x.shape
    in_delta, out_delta = _vector(channels, dx), _vector(channels, dy)
    tanh = bnns.BNNSFilterCreateLayerActivation(
        bnns.BNNSLayerParametersActivation(
            i_desc=_vector(channels),
            o_desc=_vector(channels),
            activation=bnns.BNNSActivation(function=bnns.BNNSActivationFunctionTanh),
        )
    )

    def forward() -> None:
        bnns.BNNSFilterApplyBatch(tanh, batch, x, channels, y, channels)

    def backward() -> None:
        bnns.BNNSFilterApplyBackwardBatch(
            tanh, batch, None, 0, in_delta, channels, y, channels, out_delta, channels, None, None
        )

    return Side({"forward": forward, "backward": backward}, {"y": y, "dx": dx})


def _activation(data: NormData) -> Side:
    x, dy = data.x, data.dy
    y, dx = np.zeros_like(x), np.zeros_like(x)

    def forward() -> None:
        activation_forward(x, "tanh", out=y)

    def backward() -> None:
        activation_backward(dy, "tanh", y=y, out=dx)

    return Side({"forward": forward, "backward": backward}, {"y": y, "dx": dx})


# ---- BNNS: LSTM ------------------------------------------------------------------------------------------------------


def _bnns_lstm_pair(case: LstmCase) -> Pair:
    data = make_lstm_data(dataclasses.replace(case, weights="gates"))  # one array per gate, as in BNNS
    return Pair(_bnns_lstm(case, data), _lstm(case, data))


def _lstm_results(case: LstmCase, data: LstmData) -> dict[str, Array]:
    results = {"y": np.zeros_like(data.dy), "dx": np.zeros_like(data.x)}
    results |= {name: np.zeros((1, case.samples, case.units), np.float32) for name in ("hn", "cn")}
    (cell,) = data.weights
    for name, gates in (("dwx", cell.wx), ("dwh", cell.wh), ("db", cell.b)):
        assert gates is not None
        results |= {f"{name}[{gate}]": np.zeros_like(array) for gate, array in enumerate(gates)}
    return results


def _bnns_lstm(case: LstmCase, data: LstmData) -> Side:
    results = _lstm_results(case, data)
    (cell,) = data.weights
    gates: dict[str, Any] = {"wx": cell.wx, "wh": cell.wh, "b": cell.b}
    dgates = {name: [results[f"d{name}[{gate}]"] for gate in range(4)] for name in gates}
    layer = _lstm_layer(case, data.x, results["y"], gates)
    describe = bnns.BNNSNDArrayDescriptor.from_array
    layer.output_descriptor.hidden_desc = describe(results["hn"])
    layer.output_descriptor.cell_state_desc = describe(results["cn"])
    deltas = _lstm_layer(case, results["dx"], data.dy, dgates)
    capacity = bnns.BNNSComputeLSTMTrainingCacheCapacity(layer)
    cache = np.zeros(capacity, np.uint8)

    def forward() -> None:
        bnns.BNNSDirectApplyLSTMBatchTrainingCaching(layer, None, cache, capacity)

    def backward() -> None:
        bnns.BNNSDirectApplyLSTMBatchBackward(layer, deltas, None, cache, capacity)

    return Side({"forward": forward, "backward": backward}, results)


def _lstm_layer(case: LstmCase, x: Array, y: Array, gates: Mapping[str, Any]) -> bnns.BNNSLayerParametersLSTM:
    """The structure of a layer, or of its gradients, which has dx, dy and the weight gradients in the same fields."""
    describe = bnns.BNNSNDArrayDescriptor.from_array
    layer = bnns.BNNSLayerParametersLSTM(
        input_size=case.inputs,
        hidden_size=case.units,
        batch_size=case.samples,
        num_layers=1,
        seq_len=case.steps,
        lstm_flags=bnns.BNNSLayerFlagsLSTMDefaultActivations,
    )
    layer.input_descriptor.data_desc = describe(x, bnns.BNNSDataLayoutSNE)
    layer.output_descriptor.data_desc = describe(y, bnns.BNNSDataLayoutSNE)
    for number, name in enumerate(_GATES):
        gate = getattr(layer, name)
        gate.iw_desc[0] = describe(gates["wx"][number])
        gate.hw_desc = describe(gates["wh"][number])
        gate.b_desc = describe(gates["b"][number])
    return layer


def _lstm(case: LstmCase, data: LstmData) -> Side:
    results = _lstm_results(case, data)
    (cell,) = data.weights
    x, dy, weights = data.x, data.dy, [LstmWeights(cell.wx, cell.wh, cell.b)]
    dwx, dwh, db = (tuple(results[f"{name}[{gate}]"] for gate in range(4)) for name in ("dwx", "dwh", "db"))
    dweights = LstmWeights(dwx, dwh, db)
    gradients = LstmGradients(results["dx"], [dweights])
    out = {name: results[name] for name in ("y", "hn", "cn")}
    buffer = np.zeros(lstm_cache_size(case.steps, case.samples, case.inputs, case.units), np.uint8)
    cache: LstmCache | None

    def forward() -> None:
        nonlocal cache
        cache = lstm_forward(x, weights, cache=buffer, out=out).cache

    def backward() -> None:
        assert cache is not None
        lstm_backward(dy, cache, out=gradients)

    return Side({"forward": forward, "backward": backward}, results)


# ---- BNNS: Adam ------------------------------------------------------------------------------------------------------


def _bnns_adam_pair() -> Pair:
    rng = np.random.default_rng(0)
    parameters, gradients = ([rng.standard_normal(shape, np.float32) for shape in _ADAM_SHAPES] for _ in range(2))
    return Pair(*(side([array.copy() for array in parameters], gradients) for side in (_bnns_adam, _adam)))


def _adam_results(parameters: list[Array], moments: list[Array]) -> dict[str, Array]:
    return {f"array {number}": array for number, array in enumerate(parameters + moments)}


def _bnns_adam(parameters: list[Array], gradients: list[Array]) -> Side:
    moments = [np.zeros_like(array) for array in parameters * 2]
    fields = bnns.BNNSOptimizerAdamFields(**_ADAM, time_step=0, epsilon=_EPS, gradient_scale=1)
    parameter_list, gradient_list, accumulators = (
        [bnns.BNNSNDArrayDescriptor.from_array(array) for array in arrays]
        for arrays in (parameters, gradients, moments)
    )
    count = len(parameters)

    def step() -> None:
        fields.time_step += 1
        bnns.BNNSOptimizerStep(
            bnns.BNNSOptimizerFunctionAdam, fields, count, parameter_list, gradient_list, accumulators
        )

    return Side({"step": step}, _adam_results(parameters, moments))


def _adam(parameters: list[Array], gradients: list[Array]) -> Side:
    moments = [np.zeros_like(array) for array in parameters * 2]
    first, second = moments[: len(parameters)], moments[len(parameters) :]
    number = 0

    def step() -> None:
        nonlocal number
        number += 1
        adam_step(parameters, gradients, first, second, step=number, eps=_EPS, epsilon_hat=True, **_ADAM)

    return Side({"step": step}, _adam_results(parameters, moments))


# ---- MPS -------------------------------------------------------------------------------------------------------------


def _mps_batch_norm_pair(case: NormCase) -> Pair:
    data = make_norm_data(case)
    return Pair(_mps_batch_norm(data), _batch_norm_by_statistics(data))


def _mps_batch_norm(data: NormData) -> Side:
    results = _norm_results(data)
    device = mps.MTLCreateSystemDefaultDevice()
    queue = device.makeCommandQueue()

    def matrix(array: Array) -> mps.MPSMatrix:
        rows, columns = array.shape
        descriptor = mps.MPSMatrixDescriptor(
            rows=rows, columns=columns, rowBytes=array.strides[0], dataType=mps.MPSDataType.float32
        )
        return mps.MPSMatrix(buffer=device.makeBuffer(bytesNoCopy=array), descriptor=descriptor)

    def vector(array: Array) -> mps.MPSVector:
        descriptor = mps.MPSVectorDescriptor(length=len(array), dataType=mps.MPSDataType.float32)
        return mps.MPSVector(buffer=device.makeBuffer(bytesNoCopy=array), descriptor=descriptor)

    x, y, dy, dx = (matrix(array) for array in (data.x, results["y"], data.dy, results["dx"]))
    gamma, beta = vector(data.gamma), vector(data.beta)
    mean, variance, dgamma, dbeta = (vector(results[name]) for name in ("mean", "var", "dgamma", "dbeta"))
    normalization = mps.MPSMatrixBatchNormalization(device=device)
    normalization.computeStatistics = True
    gradient = mps.MPSMatrixBatchNormalizationGradient(device=device)
    normalization.epsilon = gradient.epsilon = _EPS

    def forward() -> None:
        commands = queue.makeCommandBuffer()
        normalization.encode(
            commandBuffer=commands,
            inputMatrix=x,
            meanVector=mean,
            varianceVector=variance,
            gammaVector=gamma,
            betaVector=beta,
            resultMatrix=y,
        )
        commands.commit()
        commands.waitUntilCompleted()

    def backward() -> None:
        commands = queue.makeCommandBuffer()
        gradient.encode(
            to=commands,
            gradientMatrix=dy,
            inputMatrix=x,
            mean=mean,
            varianceVector=variance,
            gammaVector=gamma,
            betaVector=beta,
            resultGradientForDataMatrix=dx,
            resultGradientForGammaVector=dgamma,
            resultGradientForBetaVector=dbeta,
        )
        commands.commit()
        commands.waitUntilCompleted()

    return Side({"forward": forward, "backward": backward}, results)


def _batch_norm_by_statistics(data: NormData) -> Side:
    """As in MPS: forward stores the statistics in float32 arrays, and backward starts from those."""
    x, gamma, beta, dy = data
    results = _norm_results(data)
    y, mean, var = (results[name] for name in ("y", "mean", "var"))
    gradients = NormGradients(results["dx"], results["dgamma"], results["dbeta"])

    def forward() -> None:
        _, cache = batch_norm_forward(x, gamma, beta, eps=_EPS, out=y)
        mean[...], var[...] = cache.mean, cache.var

    def backward() -> None:
        batch_norm_backward(dy, batch_norm_cache(x, gamma, beta, mean=mean, var=var, eps=_EPS), out=gradients)

    return Side({"forward": forward, "backward": backward}, results)


# ---- cases -----------------------------------------------------------------------------------------------------------


def _cases() -> tuple[AppleCase, ...]:
    sigmoid, small = (NormCase("batch", shape, activation="sigmoid") for shape in ((128, 256), (8, 16)))
    rows, lstm = NormCase("batch", (128, 256)), LstmCase(20, 1, 4, 16)
    return (
        AppleCase(f"bnns_{sigmoid.name}", lambda: _bnns_batch_norm_pair(sigmoid)),
        AppleCase(f"bnns_{small.name}", lambda: _bnns_batch_norm_pair(small)),
        AppleCase(f"bnns_{lstm.name}", lambda: _bnns_lstm_pair(lstm)),
        AppleCase("bnns_activation_n128c256_tanh", lambda: _bnns_activation_pair(rows)),
        AppleCase(f"bnns_adam_{len(_ADAM_SHAPES)}_parameters", _bnns_adam_pair),
        AppleCase(f"mps_{rows.name}", lambda: _mps_batch_norm_pair(rows)),
    )


APPLE_CASES: Final = _cases()


# ---- against the array functions -------------------------------------------------------------------------------------


class _Calls:
    """Times each pass over many calls: a single small call is too short for the clock."""

    def __init__(self, name: str, passes: Mapping[str, Callable[[], object]], threads: int) -> None:
        self.name = name
        self._passes = tuple(passes.values())
        self._threads = threads

    def wake(self) -> None:
        wake_workers(self._threads)

    def step(self) -> tuple[float, ...]:
        return tuple(map(seconds_per_call, self._passes))


def apple_failures(case: AppleCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for results that are not bitwise equal to the array functions'."""
    for number in threads:
        with library_threads(number):
            pair = case.make()
            for side in pair:
                for call in side.passes.values():
                    call()
        for name, array in pair.arrays.results.items():
            if pair.apple.results[name].tobytes() != array.tobytes():
                yield f"{name} is not what the array functions compute, threads {number}"


def apple_contest(case: AppleCase, pair: Pair, threads: int, machine: Machine, stack: contextlib.ExitStack) -> Contest:
    stack.enter_context(library_threads(threads))
    apple = _Calls("retrograd", pair.apple.passes, threads)
    arrays = _Calls("arrays", pair.arrays.passes, threads)
    return Contest([[apple], [arrays]], None, [], tuple(pair.apple.passes))
