"""Normalization: the engine against ONNX's node tests, PyTorch and JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd.lab import reference
from support.arrays import Array
from support.norm import BACKWARD, FORWARD, KINDS, Kind, Problem, make_problem
from support.onnx_cases import OnnxCase, collect_onnx_cases

ONNX_KINDS: dict[str, Kind] = {
    "BatchNormalization": "batch",
    "InstanceNormalization": "instance",
    "LayerNormalization": "layer",
    "GroupNormalization": "group",
}


@pytest.mark.parametrize("case", collect_onnx_cases(), ids=lambda case: case.name)
def test_onnx_node_cases(case: OnnxCase) -> None:
    x, gamma, beta, *running = case.inputs
    assert x is not None
    kind = ONNX_KINDS[case.op_type]
    options: dict[str, Any] = {"eps": case.attributes["epsilon"]}
    options |= {key: case.attributes[key] for key in ("axis", "num_groups") if key in case.attributes}
    if running:
        training = bool(case.attributes["training_mode"])
        running_mean, running_var = (np.array(r) for r in running)
        options |= {"running_mean": running_mean, "running_var": running_var, "training": training}
        options["update"] = rg.RunningUpdate(case.attributes["momentum"], unbiased=False)
    y, cache = FORWARD[kind](x, gamma, beta, **options)
    got = [y]
    if kind == "layer":
        ones = (1,) * (x.ndim - cache.mean.ndim)
        got += [cache.mean.reshape(cache.mean.shape + ones), cache.rstd.reshape(cache.rstd.shape + ones)]
    elif running and case.attributes["training_mode"]:
        got += [running_mean, running_var]
    assert len(got) == len(case.outputs)
    for mine, published in zip(got, case.outputs, strict=True):
        # The published numbers were computed in float32: a few of its units, 1.2e-7.
        np.testing.assert_allclose(mine, published, atol=5e-7, rtol=5e-7)


def torch_norm(torch: Any, problem: Problem, x: Any, gamma: Any, beta: Any) -> Any:
    f = torch.nn.functional
    if problem.kind == "batch":
        return f.batch_norm(x, None, None, gamma, beta, training=True, eps=problem.eps)
    if problem.kind == "instance":
        return f.instance_norm(x, None, None, gamma, beta, eps=problem.eps)
    if problem.kind == "group":
        return f.group_norm(x, problem.num_groups, gamma, beta, eps=problem.eps)
    return f.layer_norm(x, gamma.shape, gamma, beta, eps=problem.eps)


def torch_results(torch: Any, problem: Problem) -> dict[str, Array]:
    def tensor(a: Array | None) -> Any:
        t = torch.from_numpy(a)
        if problem.kind != "layer" and problem.channel_axis > 1 and a is not None and a.ndim > 1:
            t = t.movedim(-1, 1)  # channels last, as PyTorch knows it
        return t

    x, gamma, beta = (tensor(a).requires_grad_() for a in (problem.x, problem.gamma, problem.beta))
    y = torch_norm(torch, problem, x, gamma, beta)
    if problem.activation != "identity":
        owner = torch.nn.functional if problem.activation in ("gelu", "silu", "elu") else torch
        y = getattr(owner, problem.activation)(y)
    y.backward(tensor(problem.dy))

    def array(t: Any) -> Array:
        if problem.kind != "layer" and problem.channel_axis > 1 and t.ndim > 1:
            t = t.movedim(1, -1)
        result: Array = t.detach().numpy()
        return result

    return {"y": array(y), "dx": array(x.grad), "dgamma": array(gamma.grad), "dbeta": array(beta.grad)}


REALISTIC: dict[str, Problem] = {
    "batch": make_problem("batch", (16, 32, 28, 28)),
    "batch relu": make_problem("batch", (16, 32, 14, 14), activation="relu"),
    "batch tanh": make_problem("batch", (16, 32, 14, 14), activation="tanh"),
    "batch last": make_problem("batch", (16, 32, 28, 28), "last"),
    "batch matrix": make_problem("batch", (512, 256)),
    "batch matrix sigmoid": make_problem("batch", (512, 256), activation="sigmoid"),
    "instance": make_problem("instance", (8, 32, 28, 28)),
    "instance last": make_problem("instance", (8, 32, 28, 28), "last"),
    "layer": make_problem("layer", (512, 768), axis=1),
    "layer short": make_problem("layer", (2048, 64), axis=1),
    "group": make_problem("group", (8, 32, 28, 28), num_groups=8),
    "group last": make_problem("group", (8, 32, 28, 28), "last", num_groups=8),
}
BY_INPUT: dict[str, Problem] = {
    "batch gelu": make_problem("batch", (16, 32, 14, 14), activation="gelu", slope_from="input"),
    "batch last gelu": make_problem("batch", (16, 32, 14, 14), "last", "gelu", slope_from="input"),
    "group silu": make_problem("group", (8, 32, 14, 14), "first", "silu", num_groups=8, slope_from="input"),
    "layer silu": make_problem("layer", (512, 96), "first", "silu", axis=1, slope_from="input"),
    "instance tanh": make_problem("instance", (8, 32, 14, 14), activation="tanh", slope_from="input"),
}
HUGE_MEANS: dict[str, Problem] = {
    f"{name} mean/std {ratio:g}": make_problem(kind, shape, layout, mean_over_std=ratio, **options)
    for ratio in (1e2, 1e4, 1e6)
    for name, kind, shape, layout, options in [
        ("batch", "batch", (8, 16, 14, 14), "first", {}),
        ("batch last", "batch", (8, 16, 14, 14), "last", {}),
        ("instance", "instance", (8, 16, 14, 14), "first", {}),
        ("layer", "layer", (64, 768), "first", {"axis": 1}),
        ("group", "group", (8, 16, 14, 14), "first", {"num_groups": 4}),
        ("group last", "group", (8, 16, 14, 14), "last", {"num_groups": 4}),
    ]
}


@pytest.mark.parametrize("name", [*REALISTIC, *HUGE_MEANS])
def test_never_worse_than_pytorch(torch: Any, name: str, isa: str) -> None:
    """The largest error of each float32 result, against float64, is at most PyTorch's."""
    problem = (REALISTIC | HUGE_MEANS)[name]
    theirs = torch_results(torch, problem)
    ours = problem.run(1)._asdict()
    forward = reference.norm_forward(problem.x, problem.gamma, problem.beta, **problem.options)
    for result in ("y", "dx", "dgamma", "dbeta"):
        errors = []
        for got in (ours, theirs):
            if result == "y":
                exact = forward.y
            else:
                # The exact gradient of the function whose output is the float32 y that each of the two has.
                back = reference.norm_backward(problem.dy, problem.x, got["y"], problem.gamma, **problem.options)
                exact = getattr(back, result)
            errors.append(float(np.max(np.abs(got[result] - exact))))
        # Of two that are within a few roundings of the exact numbers it is chance which is nearer where they are
        # largest: 1 unit in the last place of the largest number.
        noise = float(np.spacing(np.float32(np.max(np.abs(exact)))))
        if isa == "scalar":  # has no fused multiply-add: one more rounding of the largest number
            noise *= 2
        assert errors[0] <= errors[1] + noise, (result, errors[0] / noise, errors[1] / noise)


@pytest.mark.parametrize("name", REALISTIC | BY_INPUT)
def test_gradients_agree_with_pytorch(torch: Any, name: str) -> None:
    problem = (REALISTIC | BY_INPUT)[name]
    theirs = torch_results(torch, problem)
    ours = problem.run(2)._asdict()
    for result, other in theirs.items():
        scale = float(np.max(np.abs(other)))
        np.testing.assert_allclose(ours[result], other, rtol=1e-4, atol=4e-6 * scale)


@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize("momentum", [0.1, 0.01])
def test_running_statistics_follow_pytorchs_module(torch: Any, kind: Kind, momentum: float) -> None:
    """Ten batches of training, then evaluation, forward and backward."""
    options: dict[str, Any] = {"momentum": momentum, "affine": True, "track_running_stats": True}
    make = torch.nn.BatchNorm2d if kind == "batch" else torch.nn.InstanceNorm2d
    module = make(5, **options)
    rng = np.random.default_rng(16)
    gamma, beta = rng.normal(size=(2, 5)).astype(np.float32)
    module.weight.data, module.bias.data = torch.from_numpy(gamma), torch.from_numpy(beta)
    running_mean, running_var = np.zeros(5, np.float32), np.ones(5, np.float32)
    words: dict[str, Any] = {"running_mean": running_mean, "running_var": running_var}
    for _ in range(10):
        x = rng.normal(3, 2, size=(4, 5, 6, 7)).astype(np.float32)
        module(torch.from_numpy(x))
        FORWARD[kind](x, gamma, beta, update=rg.RunningUpdate.pytorch(momentum), **words)
    np.testing.assert_allclose(running_mean, module.running_mean.numpy(), rtol=1e-6)
    np.testing.assert_allclose(running_var, module.running_var.numpy(), rtol=1e-6)
    module.eval()
    t = torch.from_numpy(x).requires_grad_()
    ty = module(t)
    dy = rng.normal(size=x.shape).astype(np.float32)
    ty.backward(torch.from_numpy(dy))
    y, cache = FORWARD[kind](x, gamma, beta, training=False, **words)
    gradients = BACKWARD[kind](dy, cache)
    np.testing.assert_allclose(y, ty.detach().numpy(), rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients, (t.grad, module.weight.grad, module.bias.grad), strict=True):
        np.testing.assert_allclose(mine, other.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["identity", "relu", "tanh", "sigmoid", "elu", "softplus"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_jax(jax: Any, kind: Kind, activation: str) -> None:
    jnp = jax.numpy
    problem = make_problem(kind, (4, 6, 5, 7), num_groups=3 if kind == "group" else 1, seed=17)
    if kind == "layer":
        problem = problem._replace(axis=3)
    functions = {
        "identity": lambda z: z,
        "relu": jax.nn.relu,
        "tanh": jnp.tanh,
        "sigmoid": jax.nn.sigmoid,
        "elu": jax.nn.elu,
        "softplus": jax.nn.softplus,
    }
    axes: Any = {"batch": (0, 2, 3), "instance": (2, 3), "layer": (3,), "group": (2, 3, 4)}[kind]
    spread = (7,) if kind == "layer" else (6, 1, 1)

    def forward(x: Any, gamma: Any, beta: Any) -> Any:
        blocks = x.reshape(4, 3, 2, 5, 7) if kind == "group" else x
        mean = blocks.mean(axis=axes, keepdims=True)
        var = ((blocks - mean) ** 2).mean(axis=axes, keepdims=True)
        xhat = ((blocks - mean) / jnp.sqrt(var + 1e-5)).reshape(x.shape)
        return functions[activation](gamma.reshape(spread) * xhat + beta.reshape(spread))

    y, pull = jax.vjp(forward, *(jnp.asarray(a) for a in (problem.x, problem.gamma, problem.beta)))
    assert y.dtype == np.float32
    theirs = pull(jnp.asarray(problem.dy))
    default = {"elu": (1.0, 0.0), "softplus": (1.0, 1.0)}.get(activation, (0.0, 0.0))
    ours = problem._replace(activation=activation, alpha=default[0], act_beta=default[1]).run()
    np.testing.assert_allclose(ours.y, y, rtol=1e-5, atol=1e-5)
    for mine, other in zip((ours.dx, ours.dgamma, ours.dbeta), theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=3e-5)
