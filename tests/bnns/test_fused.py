"""BNNS fused filters, a convolution and a normalization, and Swift's layers over them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import Array, Descriptor, created, fails, image, normal, not_created, succeeds, vector

F32, F16 = bnns.BNNSDataTypeFloat32, bnns.BNNSDataTypeFloat16
CONVOLUTION, TRANSPOSED = bnns.BNNSConvolution, bnns.BNNSTransposedConvolution
BATCH, INSTANCE, LAYER, GROUP = bnns.BNNSBatchNorm, bnns.BNNSInstanceNorm, bnns.BNNSLayerNorm, bnns.BNNSGroupNorm
RELU = bnns.BNNSActivationFunctionRectifiedLinear
CLIENT = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
X, W, Y = (2, 5, 6), (4, 2, 3, 3), (4, 5, 6)


def kernels(data: Array, **fields: Any) -> Any:
    return Descriptor(
        layout=bnns.BNNSDataLayoutConvolutionWeightsOIHW, size=data.shape[::-1], data=data, data_type=F32, **fields
    )


class Problem:
    """Arrays of a fused layer, and what the two filters give one after the other."""

    def __init__(self, norm_type: int = BATCH, transposed: bool = False, **norm_fields: Any) -> None:
        self.norm_type, self.transposed = norm_type, transposed
        self.x, self.w, self.b = normal(3, *X), normal(*W, seed=1), normal(4, seed=2)
        self.beta, self.gamma, self.dy = normal(4, seed=3), normal(4, seed=4), normal(3, *Y, seed=5)
        self.mean, self.variance = np.ones(4, np.float32), np.ones(4, np.float32)
        convolution: dict[str, Any] = {"i_desc": image(X), "w_desc": kernels(self.w), "o_desc": image(Y)}
        convolution |= {"bias": vector(self.b), "x_padding": 1, "y_padding": 1}
        self.convolution = bnns.BNNSLayerParametersConvolution(**convolution)
        norm: dict[str, Any] = {"i_desc": image(Y), "o_desc": image(Y), "epsilon": 1e-5, "momentum": 0.9}
        norm["activation"] = bnns.BNNSActivation(RELU, 0.0, 0.0)
        if norm_type != LAYER:
            norm |= {"beta_desc": vector(self.beta), "gamma_desc": vector(self.gamma)}
        if norm_type in (BATCH, INSTANCE):
            norm |= {"moving_mean_desc": vector(self.mean), "moving_variance_desc": vector(self.variance)}
        if norm_type == GROUP:
            norm["num_groups"] = 2
        self.norm = bnns.BNNSLayerParametersNormalization(**{**norm, **norm_fields})
        self.type = TRANSPOSED if transposed else CONVOLUTION

    def fused(self, **options: Any) -> Any:
        return bnns.BNNSFilterCreateFusedLayer(
            2, [self.type, self.norm_type], [self.convolution, self.norm], CLIENT, **options
        )

    def gradients(self) -> list[Array]:
        return [np.full(shape, np.nan, np.float32) for shape in (self.x.shape, W, (4,), (4,), (4,))]

    def descriptors(self, arrays: list[Array], flags: int = 0) -> list[Any]:
        dx, dw, *vectors = arrays
        return [image(X, dx, flags=flags), kernels(dw, flags=flags), *(vector(v, flags=flags) for v in vectors)]

    def backward(self, filter: Any, y: Array, arrays: list[Array], flags: int = 0) -> int:
        in_delta, *parameters = self.descriptors(arrays, flags)
        return bnns.BNNSFusedFilterApplyBackwardBatch(
            filter, 3, self.x, 60, in_delta, 60, y, 120, image(Y, self.dy), 120, parameters
        )

    def one_by_one(self, training: bool = True) -> tuple[Array, list[Array]]:
        """The same by two filters."""
        make = (
            bnns.BNNSFilterCreateLayerTransposedConvolution
            if self.transposed
            else bnns.BNNSFilterCreateLayerConvolution
        )
        convolution = make(self.convolution)
        norm = bnns.BNNSFilterCreateLayerNormalization(self.norm_type, self.norm, CLIENT)
        z, y = np.empty((3, *Y), np.float32), np.empty((3, *Y), np.float32)
        assert bnns.BNNSFilterApplyBatch(convolution, 3, self.x, 0, z, 0) == 0, bnns.last_error()
        assert bnns.BNNSNormalizationFilterApplyBatch(norm, 3, z, 120, y, 120, training) == 0
        gradients = self.gradients()
        if training:
            dz = np.empty_like(z)
            in_delta, dw, db, dbeta, dgamma = self.descriptors(gradients)
            assert (
                bnns.BNNSNormalizationFilterApplyBackwardBatch(
                    norm, 3, image(Y, dz), 120, y, 120, image(Y, self.dy), 120, dbeta, dgamma
                )
                == 0
            )
            assert (
                bnns.BNNSFilterApplyBackwardBatch(
                    convolution, 3, self.x, 0, in_delta, 0, None, 0, image(Y, dz), 0, dw, db
                )
                == 0
            )
        return y, gradients


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("norm_type", [BATCH, INSTANCE, GROUP])
def test_fused_is_one_filter_after_the_other(norm_type: int, transposed: bool) -> None:
    problem, twin = Problem(norm_type, transposed), Problem(norm_type, transposed)
    filter = created(problem.fused())
    y = np.empty((3, *Y), np.float32)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 60, y, 120, True) == 0, bnns.last_error()
    expected, right = twin.one_by_one()
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(problem.mean, twin.mean)
    np.testing.assert_array_equal(problem.variance, twin.variance)
    gradients = problem.gradients()
    assert problem.backward(filter, y, gradients) == 0, bnns.last_error()
    for got, exact in zip(gradients, right, strict=True):
        np.testing.assert_array_equal(got, exact)
    added = [np.ones_like(a) for a in gradients]
    assert problem.backward(filter, y, added, flags=1) == 0
    for total, exact in zip(added, right, strict=True):
        np.testing.assert_allclose(total, 1 + exact, rtol=1e-5, atol=1e-5)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, False) == 0
    np.testing.assert_array_equal(y, twin.one_by_one(training=False)[0])
    bnns.BNNSFilterDestroy(filter)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, False) == -1


def test_the_gradients_are_those_of_the_array_functions() -> None:
    problem = Problem()
    filter, y = problem.fused(), np.empty((3, *Y), np.float32)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, True) == 0
    z = rg.conv_forward(problem.x, problem.w, problem.b, padding=1)
    right, cache = rg.batch_norm_forward(z, problem.gamma, problem.beta, activation="relu")
    np.testing.assert_array_equal(y, right)
    norm = rg.batch_norm_backward(problem.dy, cache)
    assert norm.dx is not None
    dx, dw, db = rg.conv_backward(norm.dx, problem.x, problem.w, padding=1)
    gradients = problem.gradients()
    assert problem.backward(filter, y, gradients) == 0
    for got, exact in zip(gradients, (dx, dw, db, norm.dbeta, norm.dgamma), strict=True):
        np.testing.assert_allclose(got, np.asarray(exact), rtol=1e-6, atol=1e-6)


def test_layer_norm_without_parameters_and_only_some_gradients() -> None:
    problem = Problem(LAYER, normalization_axis=0)
    filter, y = problem.fused(), np.empty((3, *Y), np.float32)
    assert filter is not None, bnns.last_error()
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, True) == 0
    expected, right = Problem(LAYER, normalization_axis=0), problem.gradients()
    np.testing.assert_array_equal(y, expected_forward(expected))
    delta = image(Y, problem.dy)
    dw = right[1]
    arguments = (filter, 3, problem.x, 0, None, 0, y, 0, delta, 0)
    assert bnns.BNNSFusedFilterApplyBackwardBatch(*arguments, [kernels(dw), None, None, None]) == 0
    assert np.isfinite(dw).all()
    assert bnns.BNNSFusedFilterApplyBackwardBatch(*arguments, None) == 0
    in_delta = image(X, right[0])
    succeeds(bnns.BNNSFusedFilterApplyBackwardBatch(filter, 3, None, 0, in_delta, 0, y, 0, delta, 0, None))
    assert np.isfinite(right[0]).all()


def expected_forward(problem: Problem) -> Array:
    z = rg.conv_forward(problem.x, problem.w, problem.b, padding=1)
    return rg.layer_norm_forward(z, axis=1, activation="relu")[0]


def test_measured_numbers_of_a_fused_filter() -> None:
    """A batch of two samples and a kernel of one pixel: y is +-1, dbeta the sum of dy, dgamma that of dy y, dx 0."""
    one = np.ones((1, 1, 1, 1), np.float32)
    parameters = [
        bnns.BNNSLayerParametersConvolution(i_desc=image((1, 1, 1)), w_desc=kernels(one), o_desc=image((1, 1, 1))),
        bnns.BNNSLayerParametersNormalization(i_desc=image((1, 1, 1)), o_desc=image((1, 1, 1)), epsilon=1e-12),
    ]
    filter = bnns.BNNSFilterCreateFusedLayer(2, (CONVOLUTION, BATCH), parameters)
    x, y, dy = np.float32([3, 7]), np.zeros(2, np.float32), np.float32([0.5, 2])
    assert bnns.BNNSFusedFilterApplyBatch(filter, 2, x, 1, y, 1, True) == 0
    np.testing.assert_allclose(y, [-1, 1], rtol=1e-6)
    dx, dbeta, dgamma = np.full(2, 9, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    succeeds(bnns.BNNSFusedFilterApplyBackwardBatch(
        filter, 2, x, 1, image((1, 1, 1), dx), 1, y, 1, image((1, 1, 1), dy), 1,
        [None, None, vector(dbeta), vector(dgamma)],
    ))  # fmt: skip
    assert (dbeta[0], dgamma[0]) == (2.5, pytest.approx(1.5, rel=1e-6))
    np.testing.assert_allclose(dx, 0, atol=1e-6)


def test_a_fully_connected_layer_first() -> None:
    """Measured: with two samples y is +-1, dbeta the sum of dy, dgamma that of dy y, dx 0."""
    w, b = np.float32([[1, 2], [3, -1], [0.5, 0.25]]), normal(3)
    matrix = Descriptor(layout=bnns.BNNSDataLayoutRowMajorMatrix, size=(2, 3), data=w, data_type=F32)
    empty = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(3,), data_type=F32)
    inputs = Descriptor(layout=bnns.BNNSDataLayoutVector, size=(2,), data_type=F32)
    parameters = [
        bnns.BNNSLayerParametersFullyConnected(i_desc=inputs, w_desc=matrix, o_desc=empty, bias=vector(b)),
        bnns.BNNSLayerParametersNormalization(i_desc=empty, o_desc=empty, epsilon=1e-12),
    ]
    filter = bnns.BNNSFilterCreateFusedLayer(2, (bnns.BNNSFullyConnected, BATCH), parameters)
    x, y, dy = np.float32([[3, 7], [-1, 2]]), np.zeros((2, 3), np.float32), normal(2, 3, seed=1)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 2, x, 2, y, 3, True) == 0, bnns.last_error()
    np.testing.assert_allclose(np.abs(y), 1, rtol=1e-5)
    dx, dw, db, dbeta, dgamma = (np.full(shape, 9, np.float32) for shape in ((2, 2), (3, 2), 3, 3, 3))
    weights_delta = matrix.copy()
    weights_delta.data = dw
    in_delta, delta = inputs.copy(), empty.copy()
    in_delta.data, delta.data = dx, dy
    status = bnns.BNNSFusedFilterApplyBackwardBatch(
        filter, 2, x, 2, in_delta, 2, y, 3, delta, 3, [weights_delta, *(vector(v) for v in (db, dbeta, dgamma))]
    )
    assert status == 0, bnns.last_error()
    np.testing.assert_allclose(dbeta, dy.sum(0), rtol=1e-6)
    np.testing.assert_allclose(dgamma, (dy * y).sum(0), rtol=1e-5)
    for zero in (dx, dw, db):
        np.testing.assert_allclose(zero, 0, atol=1e-5)


def arithmetic(out_type: int = bnns.BNNSSample) -> Any:
    fields = bnns.BNNSArithmeticBinary(
        in1=image(Y), in1_type=bnns.BNNSSample, in2=image(Y), in2_type=bnns.BNNSParameter, out=image(Y),
        out_type=out_type,
    )  # fmt: skip
    return bnns.BNNSLayerParametersArithmetic(
        arithmetic_function=bnns.BNNSArithmeticMultiply, arithmetic_function_fields=fields
    )


def test_an_arithmetic_function_first() -> None:
    """A product of samples and a parameter, normalized: the gradients of both and of beta and gamma."""
    problem = Problem()
    a, b, dy = normal(3, *Y), normal(*Y, seed=1), problem.dy
    types = (bnns.BNNSArithmetic, BATCH)
    filter = created(bnns.BNNSFilterCreateFusedLayer(2, types, (arithmetic(), problem.norm), CLIENT))
    y = np.empty((3, *Y), np.float32)
    apply, backward = bnns.BNNSFusedFilterApplyMultiInputBatch, bnns.BNNSFusedFilterApplyBackwardMultiInputBatch
    assert apply(filter, 3, 2, [a, b], [120, 0], y, 120, True) == 0, bnns.last_error()
    right, cache = rg.batch_norm_forward(a * b, problem.gamma, problem.beta, activation="relu")
    np.testing.assert_array_equal(y, right)
    norm = rg.batch_norm_backward(dy, cache)
    assert norm.dx is not None
    da, db = np.empty_like(a), np.empty_like(b)
    dbeta, dgamma = np.empty(4, np.float32), np.empty(4, np.float32)
    deltas = [image(Y, da), image(Y, db)]
    delta = image(Y, dy)
    status = backward(
        filter, 3, 2, [a, b], [120, 0], deltas, [120, 0], y, 120, delta, 120, [vector(dbeta), vector(dgamma)]
    )
    assert status == 0, bnns.last_error()
    expected = (norm.dx * b, (norm.dx * a).sum(0), norm.dbeta, norm.dgamma)
    for got, exact in zip((da, db, dbeta, dgamma), expected, strict=True):
        np.testing.assert_allclose(got, np.asarray(exact), rtol=1e-5, atol=1e-5)
    assert backward(filter, 3, 2, None, None, None, None, y, 120, delta, 120, [vector(dbeta), None]) == 0
    before = dbeta.copy()

    def refused(message: str, status: int) -> None:
        fails(status, message)
        np.testing.assert_array_equal(dbeta, before)

    given = [vector(dbeta, flags=1), None]
    refused("use BNNSFusedFilterApplyMultiInputBatch", bnns.BNNSFusedFilterApplyBatch(filter, 3, a, 0, y, 0, True))
    refused("delta_parameters has 4 entries, must have 2: beta_delta, gamma_delta",
            backward(filter, 3, 2, None, None, None, None, y, 0, delta, 0, [None] * 4))  # fmt: skip
    refused("in[1] is NULL", backward(filter, 3, 2, [a, None], [0, 0], deltas, None, y, 0, delta, 0, given))
    refused("beta_delta overlaps in_delta[1]",
            backward(filter, 3, 2, [a, b], [0, 0], [None, image(Y, before)], None, y, 0, delta, 0,
                     [vector(before), None]))  # fmt: skip
    one = problem.fused()
    refused("filter has one input: use BNNSFusedFilterApplyBatch", apply(one, 3, 1, [a], [0], y, 0, True))
    constant = (arithmetic(bnns.BNNSConstant), problem.norm)
    not_created(bnns.BNNSFilterCreateFusedLayer(2, types, constant), "layer_params[0]: out_type must be BNNSSample")


def test_swift_fused_fully_connected_layer() -> None:
    shape = BNNS.Shape
    x, w, y = normal(4, 5), normal(3, 5, seed=1), np.zeros((4, 3), np.float32)
    layer = BNNS.FusedFullyConnectedNormalizationLayer(
        input=shape.vector(5).descriptor(x),
        output=shape.vector(3).descriptor(y),
        fullyConnectedWeights=shape.matrixRowMajor(5, 3).descriptor(w),
        fullyConnectedBias=None,
        normalization=BNNS.NormalizationType.batch(),
        normalizationBeta=None,
        normalizationGamma=None,
        normalizationMomentum=0.0,
        normalizationEpsilon=1e-5,
        normalizationActivation=BNNS.ActivationFunction.tanh,
        filterParameters=CLIENT,
    )
    layer.apply(
        batchSize=4,
        input=shape.vector(5).descriptor(x),
        output=shape.vector(3).descriptor(y),
        for_=BNNS.LearningPhase.training,
    )
    expected, cache = rg.batch_norm_forward(rg.linear_forward(x, w), activation="tanh")
    np.testing.assert_array_equal(y, expected)
    dy, dw = normal(4, 3, seed=2), np.zeros_like(w)
    layer.applyBackward(
        batchSize=4,
        input=shape.vector(5).descriptor(x),
        output=shape.vector(3).descriptor(y),
        outputGradient=shape.vector(3).descriptor(dy),
        generatingParameterGradients=[shape.matrixRowMajor(5, 3).descriptor(dw), None, None, None],
    )
    dz = rg.batch_norm_backward(dy, cache, need=["dx"]).dx
    assert dz is not None
    np.testing.assert_allclose(dw, np.asarray(rg.linear_backward(dz, x, w).dw), rtol=1e-6, atol=1e-7)


def test_fused_layers_that_cannot_be_made() -> None:
    problem = Problem()
    make = bnns.BNNSFilterCreateFusedLayer
    both = [problem.convolution, problem.norm]

    def refused(message: str, *arguments: Any) -> None:
        not_created(make(*arguments), message)

    refused("number_of_fused_filters is 3; two filters can be fused", 3, [0, 2, 2], [*both, problem.norm])
    refused("filter_type[0] is BNNSBatchNorm, which cannot come first", 2, [BATCH, BATCH], both)
    after = "filter_type[1] is BNNSConvolution; after BNNSConvolution it must be a normalization or BNNSQuantization"
    refused(after, 2, [0, 0], both)
    refused(
        "filter_type[1] is BNNSQuantization; after BNNSArithmetic it must be a normalization",
        2,
        [bnns.BNNSArithmetic, bnns.BNNSQuantization],
        [arithmetic(), problem.norm],
    )
    refused("layer_params[1]: layer_params is of type BNNSLayerParametersNormalization, must be",
            2, [0, bnns.BNNSQuantization], both)  # fmt: skip
    refused("filter_type has 1 entries, but number_of_fused_filters is 2", 2, [0], both)
    refused("filter_type is NULL", 2, None, both)
    refused("layer_params is NULL", 2, [0, BATCH], None)
    refused("layer_params[0]: layer_params is of type BNNSLayerParametersNormalization", 2, [0, BATCH], both[::-1])
    refused("layer_params[1]: layer_params is NULL", 2, [0, BATCH], [problem.convolution, None])
    for o_desc, shown in (
        (image((4, 5, 6), stride=(1, 7, 35)), "stride=(1, 7, 35)"),
        (image((4, 5, 6), data_type=F16), "float16"),
        (image((4, 4, 6)), "size=(W, H, C)=(6, 4, 4)"),
    ):
        other = problem.convolution.copy()
        other.o_desc = o_desc
        refused("o_desc of layer_params[0] has size=(W, H, C)=", 2, [0, BATCH], [other, problem.norm])
        assert shown in str(bnns.last_error())
    problem.convolution.w_desc.layout = 7
    refused("layer_params[0]: w_desc.layout is 0x7", 2, [0, BATCH], both)


def test_fused_calls_that_fail_write_nothing() -> None:
    problem = Problem()
    filter, y = problem.fused(), np.full((3, *Y), 7, np.float32)
    gradients = problem.gradients()

    def untouched(message: str) -> None:
        assert message in str(bnns.last_error()), bnns.last_error()
        assert (y == 7).all()
        assert (problem.mean == 1).all()
        assert all(np.isnan(a).all() for a in gradients)

    assert problem.backward(filter, y, gradients) == -1
    untouched("there has been no training pass")
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x[:2], 0, y, 0, True) == -1
    untouched("in has 480 bytes")
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y[:2], 0, True) == -1
    untouched("out has 960 bytes")
    memory = np.full(400, 7, np.float32)
    memory[: problem.w.size] = problem.w.reshape(-1)
    problem.convolution.w_desc.data = memory[: problem.w.size]
    on_weights = problem.fused()
    assert bnns.BNNSFusedFilterApplyBatch(on_weights, 3, problem.x, 0, memory[10:370], 0, True) == -1
    untouched("out overlaps w_desc.data")
    trained = np.empty_like(y)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, trained, 0, True) == 0
    problem.mean[...] = 1
    in_delta, dw, db, dbeta, dgamma = problem.descriptors(gradients)
    delta = image(Y, problem.dy)

    def refused(message: str, parameters: Any, source: Any = problem.x, out: Any = trained) -> None:
        status = bnns.BNNSFusedFilterApplyBackwardBatch(filter, 3, source, 0, in_delta, 0, out, 0, delta, 0, parameters)
        assert status == -1
        untouched(message)

    refused("delta_parameters has 2 entries, must have 4: weights_delta, bias_delta, beta", [dbeta, dgamma])
    refused("beta_delta.size is (2,)", [dw, db, vector(gradients[3][:2]), dgamma])
    refused("weights_delta.size is", [kernels(np.empty((4, 2, 3, 2), np.float32)), db, dbeta, dgamma])
    refused("bias_delta.size is (3,)", [dw, vector(gradients[2][:3]), dbeta, dgamma])
    refused("in is NULL, and weights_delta is computed from it", [dw, db, dbeta, dgamma], None)
    refused("beta_delta overlaps bias_delta", [dw, db, vector(gradients[2]), dgamma])
    refused("beta_delta overlaps gamma_delta", [dw, db, dbeta, vector(gradients[3])])
    refused("gamma_delta overlaps weights_delta", [dw, db, dbeta, vector(gradients[1].reshape(-1)[:4])])
    assert bnns.BNNSFilterApplyBatch(filter, 3, problem.x, 0, y, 0) == -1
    assert bnns.BNNSFusedFilterApplyBatch(None, 3, problem.x, 0, y, 0, True) == -1


def test_the_first_activation_is_the_identity_in_training() -> None:
    problem = Problem()
    problem.convolution.activation = bnns.BNNSActivation(RELU, 0.0, 0.0)
    filter, y = problem.fused(), np.empty((3, *Y), np.float32)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, False) == 0
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, True) == -1
    assert "the activation of layer_params[0] must be Identity in training" in str(bnns.last_error())


def test_momentum_and_batches_of_other_sizes() -> None:
    problem = Problem()
    filter, y = problem.fused(momentum_weighs="new"), np.empty((3, *Y), np.float32)
    z = rg.conv_forward(problem.x, problem.w, problem.b, padding=1)
    assert bnns.BNNSFusedFilterApplyBatch(filter, 3, problem.x, 0, y, 0, True) == 0
    np.testing.assert_allclose(problem.mean, 0.1 + 0.9 * z.mean((0, 2, 3)), rtol=1e-5)
    for batch in (1, 2, 3):
        assert bnns.BNNSFusedFilterApplyBatch(filter, batch, problem.x, 0, y, 0, True) == 0
        part = rg.batch_norm_forward(z[:batch], problem.gamma, problem.beta, activation="relu")[0]
        np.testing.assert_array_equal(y[:batch], part)


def test_swift_fused_layer_learns_apples_digits() -> None:
    """A small form of Apple's sample: where in a 6x6 image a bright pixel is, by a fused layer and its gradients."""
    shape, rng = BNNS.Shape, np.random.default_rng(0)
    w = rng.uniform(-0.5, 0.5, (8, 1, 3, 3)).astype(np.float32)
    b, beta, gamma = np.zeros(8, np.float32), np.zeros(8, np.float32), np.ones(8, np.float32)
    mean, variance = np.ones(8, np.float32), np.ones(8, np.float32)
    head = rng.uniform(-0.2, 0.2, (4, 8 * 36)).astype(np.float32)
    x, y = np.zeros((16, 1, 6, 6), np.float32), np.zeros((16, 8, 6, 6), np.float32)
    input, output = shape.imageCHW(6, 6, 1).descriptor(x), shape.imageCHW(6, 6, 8).descriptor(y)
    layer = BNNS.FusedConvolutionNormalizationLayer(
        input=input,
        output=output,
        convolutionWeights=shape.convolutionWeightsOIHW(3, 3, 1, 8).descriptor(w),
        convolutionBias=shape.vector(8).descriptor(b),
        convolutionStride=(1, 1),
        convolutionDilationStride=(1, 1),
        convolutionPadding=BNNS.ConvolutionPadding.symmetric(x=1, y=1),
        normalization=BNNS.NormalizationType.batch(
            shape.vector(8).descriptor(mean), shape.vector(8).descriptor(variance)
        ),
        normalizationBeta=shape.vector(8).descriptor(beta),
        normalizationGamma=shape.vector(8).descriptor(gamma),
        normalizationMomentum=0.9,
        normalizationEpsilon=1e-7,
        normalizationActivation=BNNS.ActivationFunction.rectifiedLinear,
        filterParameters=CLIENT,
    )
    parameters = [w, b, beta, gamma, head]
    gradients = [np.zeros_like(p) for p in parameters]
    shapes = [shape.convolutionWeightsOIHW(3, 3, 1, 8), *(shape.vector(8) for _ in range(3))]
    first, second = ([np.zeros_like(p) for p in parameters] for _ in range(2))
    losses = []
    for step in range(60):
        at = rng.integers(0, 6, (16, 2))
        x[...] = 0.1 * rng.standard_normal(x.shape)
        x[np.arange(16), 0, at[:, 0], at[:, 1]] += 2
        labels = at[:, 0] // 3 * 2 + at[:, 1] // 3
        layer.apply(batchSize=16, input=input, output=output, for_=BNNS.LearningPhase.training)
        loss, dlogits = rg.softmax_cross_entropy(rg.linear_forward(y.reshape(16, -1), head), labels)
        losses.append(float(loss))
        flat = rg.linear_backward(dlogits, y.reshape(16, -1), head, need=["dx", "dw"], out={"dw": gradients[4]})
        assert flat.dx is not None
        layer.applyBackward(
            batchSize=16,
            input=input,
            output=output,
            outputGradient=shape.vector(8 * 36).descriptor(flat.dx),  # a vector for an image, as in Apple's sample
            generatingParameterGradients=[s.descriptor(g) for s, g in zip(shapes, gradients, strict=False)],
        )
        rg.adam_step(parameters, gradients, first, second, step=step + 1, learning_rate=0.01)
    assert np.mean(losses[-5:]) < 0.3 * losses[0]
    layer.apply(batchSize=16, input=input, output=output, for_=BNNS.LearningPhase.inference)
    with pytest.raises(TypeError, match="for_ must be a LearningPhase"):
        layer.apply(batchSize=16, input=input, output=output, for_=True)  # type: ignore[arg-type]
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*delta_parameters has 1 entries"):
        layer.applyBackward(
            batchSize=16, input=input, output=output, outputGradient=output, generatingParameterGradients=[None]
        )
    with pytest.raises(BNNS.Error, match=r"layerApplyFail: .*input has 18 elements"):
        layer.apply(
            batchSize=1, input=shape.imageCHW(6, 3, 1).descriptor(x), output=output, for_=BNNS.LearningPhase.inference
        )
