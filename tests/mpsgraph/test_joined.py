"""Training steps written in MPSGraph's operations are the engine calls of the same steps in retrograd.graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from retrograd.lab.bench.steps import STEP_CASES, StepCase, graph_program, make_step
from retrograd.lab.bench.steps_mpsgraph import MpsGraphStep
from retrograd.mpsgraph import MPSDataType, MPSGraph, MPSGraphTensorData

SMALL = [
    case for case in STEP_CASES if case.name in ("step_mlp_n32i64h64", "step_lstm_t20n1i4h16", "step_cnn_n32c1s8k16")
]
LAYERS = ("linear", "conv", "norm", "pool", "lstm", "softmax_cross_entropy")
F32 = MPSDataType.float32


def calls(program: Any) -> Counter[str]:
    return Counter(step.operation.name for step in program.plan.steps)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_steps_have_the_same_calls(case: StepCase) -> None:
    data = make_step(case)
    step = MpsGraphStep(case.kind, data.x, data.labels, data.weights, 1e-3)
    losses = [step() for _ in range(3)]
    (plan,) = step.graph._plans.values()
    program = graph_program(case, data)
    ours, theirs = calls(program), calls(plan.program)
    for name in LAYERS:
        for kind in (name, f"{name}_backward"):
            assert theirs[kind] == ours[kind], kind
    assert theirs["optimizer_steps"] == ours["update"] == 1
    for name in ("mean", "sum", "matmul", "optimizer_step", "copy"):
        assert theirs[name] == 0, name
    np.testing.assert_allclose(losses, [program(data.x, data.labels) for _ in range(3)], rtol=1e-5)


def test_a_bias_on_either_side_and_a_norm_in_inference() -> None:
    graph = MPSGraph()
    x = graph.placeholder(shape=[-1, 4], dataType=F32, name="x")
    w, b = (graph.constant(1.5, shape=shape, dataType=F32) for shape in ([4, 3], [3]))
    y = graph.addition(b, graph.matrixMultiplication(primary=x, secondary=w, name=None), name=None)
    mean = graph.mean(of=y, axes=[-1], name=None)
    variance = graph.variance(of=y, mean=mean, axes=[-1], name=None)
    z = graph.normalize(y, mean=mean, variance=variance, gamma=None, beta=None, epsilon=0.5, name=None)
    array = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = graph.run(feeds={x: MPSGraphTensorData(array)}, targetTensors=[y, z, mean])
    product = array.sum(1, keepdims=True) * 1.5 + np.full(3, 1.5)
    np.testing.assert_allclose(found[y].numpy(), product)
    np.testing.assert_allclose(found[mean].numpy(), product.mean(1, keepdims=True))
    np.testing.assert_allclose(found[z].numpy(), np.zeros((2, 3)), atol=1e-6)
    (plan,) = graph._plans.values()
    assert {"linear", "norm"} <= set(calls(plan.program))


def test_steps_of_other_shapes_than_their_values_are_refused() -> None:
    graph = MPSGraph()
    w = graph.variable(with_=np.ones(3, np.float32).tobytes(), shape=[3], dataType=F32, name="w")
    rate, wide = graph.constant(0.1, dataType=F32), graph.constant(0.1, shape=[3], dataType=F32)
    with pytest.raises(ValueError, match=r"the learning rate has shape \(3,\), must have one element"):
        graph.stochasticGradientDescent(learningRate=wide, values=w, gradient=w, name=None)
    with pytest.raises(ValueError, match=r"gradient is float32\[1\], but the values are float32\[3\]"):
        graph.stochasticGradientDescent(learningRate=rate, values=w, gradient=rate, name=None)
