"""Swift's optimizers: the same steps as BNNSOptimizerStep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.bnns import BNNS
from support.bnns import normal

Descriptor = bnns.BNNSNDArrayDescriptor
NONE, L1, L2 = (getattr(bnns, f"BNNSOptimizerRegularization{name}") for name in ("None", "L1", "L2"))
Clipping = BNNS.GradientClipping
CLIPPINGS = {
    "none": (Clipping.none, {}),
    "value": (
        Clipping.byValue(bounds=(-0.5, 0.5)),
        {"clipping_func": 1, "clip_gradients_min": -0.5, "clip_gradients_max": 0.5},
    ),
    "norm": (Clipping.byNorm(threshold=0.5), {"clipping_func": 2, "clip_gradients_max_norm": 0.5}),
    "global": (
        Clipping.byGlobalNorm(threshold=0.5, globalNorm=3),
        {"clipping_func": 3, "clip_gradients_max_norm": 0.5, "clip_gradients_use_norm": 3},
    ),
}


def check(optimizer: Any, function: int, fields: Any, accumulators: int) -> None:
    """Two steps, bit for bit those of the C function."""
    assert optimizer.bnnsOptimizerFunction == function
    assert optimizer.accumulatorCountMultiplier == accumulators
    results = []
    for swift in (True, False):
        parameters, gradients = [normal(3, 4), normal(5, seed=1)], [normal(3, 4, seed=2), normal(5, seed=3)]
        states = [np.zeros_like(p) for _ in range(accumulators) for p in parameters]
        lists = [[Descriptor.from_array(a) for a in arrays] for arrays in (parameters, gradients, states)]
        for step in (1, 2):
            if swift:
                if hasattr(optimizer, "timeStep"):
                    optimizer.timeStep = step
                optimizer.step(parameters=lists[0], gradients=lists[1], accumulators=lists[2])
            else:
                if hasattr(fields, "time_step"):
                    fields.time_step = step
                assert bnns.BNNSOptimizerStep(function, fields, 2, *lists) == 0, bnns.last_error()
        results.append([*parameters, *states])
    assert all(map(np.array_equal, *results))
    assert not np.array_equal(results[0][0], normal(3, 4))


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam(clipping: str, amsgrad: bool) -> None:
    given, expected = CLIPPINGS[clipping]
    optimizer = BNNS.AdamOptimizer(
        timeStep=1, gradientScale=1, regularizationScale=0.01, regularizationFunction=L2, gradientClipping=given,
        usesAMSGrad=amsgrad,
    )  # fmt: skip
    fields = bnns.BNNSOptimizerAdamWithClippingFields(
        0.001, 0.9, 0.999, 1, 1e-8, 1, 0.01, regularization_func=L2, **expected
    )
    check(optimizer, 11 if amsgrad else 8, fields, 3 if amsgrad else 2)


def test_parameters_allocated_for_a_batch() -> None:
    """An older copy of Apple's digits sample allocates weights with `batchSize` too; one sample of them is used."""
    values, shape = normal(4, 6), BNNS.Shape.matrixRowMajor(3, 2)
    lists = [[Descriptor.allocate(initializingFrom=values, shape=shape, batchSize=4)] for _ in range(2)]
    optimizer = BNNS.SGDMomentumOptimizer(
        learningRate=0.5, gradientScale=1, regularizationScale=0, gradientClipping=Clipping.none,
        regularizationFunction=NONE, sgdMomentumVariant=0,
    )  # fmt: skip
    optimizer.step(parameters=lists[0], gradients=lists[1], accumulators=[])
    stepped = lists[0][0].makeArray(of=float, batchSize=4).reshape(4, 6)
    np.testing.assert_allclose(stepped[0], 0.5 * values[0], rtol=1e-6)
    np.testing.assert_array_equal(stepped[1:], values[1:])


@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_in_the_older_form(bounds: Any, amsgrad: bool) -> None:
    optimizer = BNNS.AdamOptimizer(
        learningRate=0.01, beta1=0.8, beta2=0.9, timeStep=1, epsilon=1e-7, gradientScale=2, regularizationScale=0.1,
        clipsGradientsTo=bounds, regularizationFunction=L1, usesAMSGrad=amsgrad,
    )  # fmt: skip
    clip = {} if bounds is None else {"clip_gradients": True, "clip_gradients_min": -0.5, "clip_gradients_max": 0.5}
    fields = bnns.BNNSOptimizerAdamFields(0.01, 0.8, 0.9, 1, 1e-7, 2, 0.1, regularization_func=L1, **clip)
    check(optimizer, 5 if amsgrad else 2, fields, 3 if amsgrad else 2)


@pytest.mark.parametrize("clipping", [*CLIPPINGS, None])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw(clipping: str | None, amsgrad: bool) -> None:
    given, expected = CLIPPINGS[clipping] if clipping else (None, {})
    optimizer = BNNS.AdamWOptimizer(gradientScale=1, gradientClipping=given, usesAMSGrad=amsgrad)
    assert optimizer.timeStep == 1
    if clipping:
        fields: Any = bnns.BNNSOptimizerAdamWithClippingFields(0.001, 0.9, 0.999, 1, 1e-8, 1, 0.01, **expected)
        function = 12 if amsgrad else 10
    else:
        fields = bnns.BNNSOptimizerAdamFields(0.001, 0.9, 0.999, 1, 1e-8, 1, 0.01)
        function = 6 if amsgrad else 4
    check(optimizer, function, fields, 3 if amsgrad else 2)


@pytest.mark.parametrize("clipping", [*CLIPPINGS, None])
@pytest.mark.parametrize(("centered", "momentum"), [(False, 0.0), (True, 0.0), (False, 0.5), (True, 0.5)])
def test_rmsprop_optimizer(clipping: str | None, centered: bool, momentum: float) -> None:
    given, expected = CLIPPINGS[clipping] if clipping else (None, {})
    optimizer = BNNS.RMSPropOptimizer(
        centered=centered, momentum=momentum, gradientScale=1, regularizationScale=0.1, gradientClipping=given,
        regularizationFunction=L2,
    )  # fmt: skip
    kind = bnns.BNNSOptimizerRMSPropWithClippingFields if clipping else bnns.BNNSOptimizerRMSPropFields
    fields = kind(0.01, 0.99, 1e-8, centered, momentum, 1, 0.1, regularization_func=L2, **expected)
    check(optimizer, 9 if clipping else 3, fields, 1 + centered + bool(momentum))


@pytest.mark.parametrize("clipping", [*CLIPPINGS, None])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("variant", [0, 1, 2])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_optimizer(clipping: str | None, momentum: float, variant: int, nesterov: bool) -> None:
    given, expected = CLIPPINGS[clipping] if clipping else (None, {})
    optimizer = BNNS.SGDMomentumOptimizer(
        learningRate=0.1, momentum=momentum, gradientScale=1, regularizationScale=0, gradientClipping=given,
        usesNesterovMomentum=nesterov, regularizationFunction=NONE, sgdMomentumVariant=variant,
    )  # fmt: skip
    kind = bnns.BNNSOptimizerSGDMomentumWithClippingFields if clipping else bnns.BNNSOptimizerSGDMomentumFields
    fields = kind(0.1, momentum, 1, 0, nesterov=nesterov, sgd_momentum_variant=variant, **expected)
    check(optimizer, 7 if clipping else 1, fields, int(momentum != 0))


def test_the_older_spelling_of_nesterov() -> None:
    optimizer = BNNS.SGDMomentumOptimizer(
        learningRate=0.1, momentum=0.5, gradientScale=1, regularizationScale=0, usesNestrovMomentum=True,
        regularizationFunction=NONE, sgdMomentumVariant=0,
    )  # fmt: skip
    assert optimizer.usesNesterovMomentum is True


def test_what_optimizers_throw() -> None:
    given = {"timeStep": 1, "gradientScale": 1, "regularizationScale": 0, "regularizationFunction": NONE}
    with pytest.raises(TypeError, match="gradientClipping and clipsGradientsTo are both given"):
        BNNS.AdamOptimizer(**given, gradientClipping=Clipping.none, clipsGradientsTo=(0, 1))
    with pytest.raises(TypeError, match="timeStep"):
        BNNS.AdamOptimizer(gradientScale=1, regularizationScale=0, regularizationFunction=NONE)
    optimizer = BNNS.AdamOptimizer(**given)
    one = Descriptor.from_array(normal(3))
    with pytest.raises(BNNS.Error, match=r"optimizerStepFail: .*accumulators is NULL") as failure:
        optimizer.step(parameters=[one], gradients=[one])
    assert failure.value.case == "optimizerStepFail"
    with pytest.raises(BNNS.Error, match="gradients has 1 descriptors, must have 2"):
        optimizer.step(parameters=[one, one], gradients=[one], accumulators=[one] * 4)
    optimizer.timeStep = 0
    with pytest.raises(BNNS.Error, match="time_step"):
        optimizer.step(parameters=[one], gradients=[one.copy()], accumulators=[one, one])
