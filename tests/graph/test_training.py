"""Models that train in a program, without a hand-written backward pass, beside the same models in PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core, graph
from support.graph_models import CHANNELS, HEADS, MODELS, STEPS, UNITS, WIDTH, Model, mlp, residual_cnn, transformer
from support.processes import python

# Both compute in float64, with sums in another order: 1e-16 for each of some thousand operations of a step, and a few
# steps that pass it on. Parameters of Adam move by the learning rate times a quotient of small numbers.
CLOSE = 1e-10


def torch_of() -> Any:
    return pytest.importorskip("torch")


# ---- the models in PyTorch -------------------------------------------------------------------------------------------


def torch_transformer(p: Sequence[Any], words: Any, labels: Any, masks: Any = None) -> Any:
    torch = torch_of()
    F = torch.nn.functional
    samples = len(words)
    table, position, *norms = p[:8]
    qkv, qkv_b, out, out_b, up, up_b, down, down_b, head = p[8:]
    x = table[words] + position
    if masks is not None:
        x = x * masks
    parts = F.linear(F.layer_norm(x, (WIDTH,), norms[0], norms[1]), qkv, qkv_b).split(WIDTH, -1)
    q, k, v = (t.reshape(samples, STEPS, HEADS, -1).transpose(1, 2) for t in parts)
    chosen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(chosen.transpose(1, 2).reshape(samples, STEPS, WIDTH), out, out_b)
    h = F.gelu(F.linear(F.layer_norm(x, (WIDTH,), norms[2], norms[3]), up, up_b))
    x = x + F.linear(h, down, down_b)
    logits = F.linear(F.layer_norm(x, (WIDTH,), norms[4], norms[5]), head)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-1)


def torch_cnn(running: Sequence[Any]) -> Callable[..., Any]:
    def loss(p: Sequence[Any], x: Any, labels: Any) -> Any:
        F = torch_of().nn.functional
        first, second, third, *norms, head, head_b = p

        def norm(h: Any, i: int) -> Any:
            return F.batch_norm(h, running[2 * i], running[2 * i + 1], norms[2 * i], norms[2 * i + 1], training=True)

        h = F.max_pool2d(F.relu(norm(F.conv2d(x, first, padding=1), 0)), 2)
        branch = F.relu(norm(F.conv2d(h, second, padding=1), 1))
        h = F.relu(h + norm(F.conv2d(branch, third, padding=1), 2))
        return F.cross_entropy(F.linear(h.mean((2, 3)), head, head_b), labels)

    return loss


def torch_two_inputs(p: Sequence[Any], a: Any, b: Any, extra: Any, target: Any) -> Any:
    torch = torch_of()
    F = torch.nn.functional
    w1, b1, w2, b2, bilinear, side = p
    left, right = (torch.tanh(F.linear(F.silu(F.linear(x, w1, b1)), w2, b2)) for x in (a, b))
    score = ((left @ bilinear) * right).sum(1) + F.linear(extra, side)[:, 0]
    distance = torch.sqrt(((left - right) ** 2).sum(1) + 1e-3)
    return F.binary_cross_entropy_with_logits(score, target) + 0.1 * (distance * target).mean()


def torch_tagger(p: Sequence[Any], words: Any, lengths: Any, tags: Any) -> Any:
    torch = torch_of()
    F = torch.nn.functional
    table, *cells, head, head_b = p
    x = table[words]
    steps, samples = words.shape
    halves = []
    for direction in range(2):
        wx, wh, b = cells[3 * direction : 3 * direction + 3]
        h = c = torch.zeros(samples, UNITS, dtype=x.dtype)
        found: list[Any] = [None] * steps
        for t in range(steps) if direction == 0 else reversed(range(steps)):
            i, f, g, o = (x[t] @ wx.T + h @ wh.T + b).chunk(4, 1)
            new_c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            new_h = torch.sigmoid(o) * torch.tanh(new_c)
            inside = (t < lengths)[:, None]
            h, c = torch.where(inside, new_h, h), torch.where(inside, new_c, c)
            found[t] = torch.where(inside, new_h, torch.zeros_like(new_h))
        halves.append(torch.stack(found))
    logits = F.linear(torch.cat(halves, -1), head, head_b)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tags.reshape(-1), ignore_index=-1)


def torch_mlp(p: Sequence[Any], x: Any, labels: Any) -> Any:
    F = torch_of().nn.functional
    for i in range(0, len(p), 2):
        x = F.linear(x if i == 0 else F.relu(x), p[i], p[i + 1])
    return F.cross_entropy(x, labels)


TORCH: dict[str, Callable[..., Any]] = {
    "mlp": torch_mlp,
    "transformer": torch_transformer,
    "two_inputs": torch_two_inputs,
    "tagger": torch_tagger,
}

# Ours, PyTorch's, and the rate at each step if it changes.
OPTIMIZERS: dict[str, tuple[Callable[[], graph.Optimizer], Callable[..., Any], Callable[[int], float] | None]] = {
    "sgd": (
        lambda: graph.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda t, p: t.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        None,
    ),
    "adam": (
        lambda: graph.Adam(1e-2, weight_decay=1e-3, amsgrad=True),
        lambda t, p: t.optim.Adam(p, 1e-2, weight_decay=1e-3, amsgrad=True),
        None,
    ),
    "adamw": (
        lambda: graph.AdamW(graph.Cosine(2e-2, 12, warm_up=3, final=1e-3), weight_decay=0.1),
        lambda t, p: t.optim.AdamW(p, 1.0, weight_decay=0.1),
        graph.Cosine(2e-2, 12, warm_up=3, final=1e-3),
    ),
    "rmsprop": (
        lambda: graph.RMSProp(graph.StepDecay(1e-2, 4, 0.5), alpha=0.9, centered=True, momentum=0.5),
        lambda t, p: t.optim.RMSprop(p, 1e-2, alpha=0.9, centered=True, momentum=0.5),
        graph.StepDecay(1e-2, 4, 0.5),
    ),
}


def train_in_torch(
    loss: Callable[..., Any],
    model: Model,
    optimizer: str,
    steps: int,
    maximum_norm: float | None = None,
) -> tuple[list[float], list[Any]]:
    torch = torch_of()
    parameters = [torch.nn.Parameter(torch.tensor(v.value.copy())) for v in model.parameters]
    _, make, rate = OPTIMIZERS[optimizer]
    chosen = make(torch, parameters)
    losses = []
    for k in range(steps):
        value = loss(parameters, *map(torch.tensor, model.batch(k)))
        chosen.zero_grad()
        value.backward()
        if maximum_norm is not None:
            norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
            for p in parameters:
                p.grad *= torch.clamp(maximum_norm / norm, max=1.0)
        if rate is not None:
            for group in chosen.param_groups:
                group["lr"] = rate(k)
        chosen.step()
        losses.append(value.item())
    return losses, [p.detach().numpy() for p in parameters]


def compare(
    model: Model, ours: graph.Optimizer, loss: Callable[..., Any], optimizer: str, steps: int = 10, **options: Any
) -> None:
    expected, parameters = train_in_torch(loss, model, optimizer, steps, **options)
    program = model.compiled(ours)
    found = [program(*model.batch(k)) for k in range(steps)]
    np.testing.assert_allclose(found, expected, rtol=CLOSE, atol=CLOSE)
    for variable, other in zip(model.parameters, parameters, strict=True):
        np.testing.assert_allclose(variable.value, other, rtol=100 * CLOSE, atol=100 * CLOSE)
    assert len(set(found)) == steps
    assert all(map(math.isfinite, found))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TORCH)
def test_models_train_as_in_torch(name: str, optimizer: str) -> None:
    compare(MODELS[name](np.float64), OPTIMIZERS[optimizer][0](), TORCH[name], optimizer)


def test_a_residual_network_trains_as_in_torch() -> None:
    torch = torch_of()
    model = residual_cnn(np.float64)
    running = [torch.tensor(v.value.copy()) for v in model.others]
    compare(model, graph.Adam(1e-2, weight_decay=1e-3, amsgrad=True), torch_cnn(running), "adam")
    for variable, other in zip(model.others, running, strict=True):
        np.testing.assert_allclose(variable.value, other.numpy(), rtol=CLOSE, atol=CLOSE)
        assert variable.shape == (CHANNELS,)
        assert not np.all(variable.value == variable.value[0])


def test_running_statistics_are_used_in_evaluation() -> None:
    torch = torch_of()
    model = residual_cnn(np.float64)
    train = model.compiled(graph.SGD(0.01))
    for k in range(5):
        train(*model.batch(k))
    evaluated = residual_cnn(np.float64, training=False)
    for mine, other in zip((*evaluated.parameters, *evaluated.others), (*model.parameters, *model.others), strict=True):
        mine.value = other.value
    found = graph.compile(evaluated.loss, *model.batch(9))(*model.batch(9))
    F = torch.nn.functional
    p = [torch.tensor(v.value) for v in model.parameters]
    running = [torch.tensor(v.value) for v in model.others]
    original = F.batch_norm
    try:
        F.batch_norm = lambda *args, training: original(*args, training=False)
        expected = torch_cnn(running)(p, *map(torch.tensor, model.batch(9))).item()
    finally:
        F.batch_norm = original
    np.testing.assert_allclose(found, expected, rtol=CLOSE)


@pytest.mark.parametrize("limit", [1e-3, 0.1, 100.0])
def test_clipping_by_norm_as_in_torch(limit: float) -> None:
    model = MODELS["two_inputs"](np.float64)
    sgd = graph.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-2, maximum_norm=limit)
    compare(model, sgd, torch_two_inputs, "sgd", maximum_norm=limit)


def test_dropout_has_the_masks_of_the_function() -> None:
    torch = torch_of()
    model = transformer(np.float64, dropout=0.3)
    seeds = iter(range(1, 100))

    def loss(p: Sequence[Any], words: Any, labels: Any) -> Any:
        mask = rg.dropout(np.ones((*words.shape, WIDTH)), 0.3, seed=next(seeds))
        return torch_transformer(p, words, labels, torch.tensor(mask))

    compare(model, graph.AdamW(graph.Cosine(2e-2, 12, warm_up=3, final=1e-3), weight_decay=0.1), loss, "adamw")
    assert model.others[0].value == 10


@pytest.mark.parametrize("name", MODELS)
def test_models_learn(name: str) -> None:
    """In float32, on one batch: the loss falls far below where it was."""
    model = MODELS[name](np.float32)
    program = model.compiled(graph.Adam(2e-2))
    stacked = [np.stack([a] * 150) for a in model.batch(0)]
    losses = program.run(*stacked)
    assert losses[-1] < 0.3 * losses[0], (losses[0], losses[-1])


# ---- the same bits everywhere ----------------------------------------------------------------------------------------

DIGEST = """
    import hashlib, os, sys
    import numpy as np
    sys.path.insert(0, os.environ["TESTS"])
    from retrograd import graph
    from support.graph_models import MODELS

    for name, make in MODELS.items():
        for threads in (1, 2, 7):
            model = make(np.float32)
            program = model.compiled(graph.Adam(graph.Cosine(1e-2, 10, warm_up=2), maximum_norm=1.0))
            digest = hashlib.sha256()
            for k in range(4):
                digest.update(np.float64(program(*model.batch(k), num_threads=threads)).tobytes())
            for value in model.values():
                digest.update(value.tobytes())
            print(name, digest.hexdigest())
"""


def test_training_gives_the_same_bits_at_every_level_and_number_of_threads() -> None:
    tests = str(Path(__file__).parent.parent)
    found = {level: python(DIGEST, RETROGRAD_ISA=level, TESTS=tests) for level in _core.isa_levels()}
    lines = set("\n".join(found.values()).splitlines())
    assert len(lines) == len(MODELS), found
    assert len({line.split()[0] for line in lines}) == len(MODELS)


# ---- optimizers ------------------------------------------------------------------------------------------------------

SHAPES = [(5, 7), (3,), (), (40, 30)]
STEP_FUNCTIONS: dict[str, tuple[Callable[..., graph.Optimizer], Callable[..., None], int, dict[str, Any]]] = {
    "sgd": (graph.SGD, lambda p, g, s, step, **o: rg.sgd_step(p, g, **o), 0, {}),
    "momentum": (
        graph.SGD,
        lambda p, g, s, step, **o: rg.sgd_step(p, g, s[0], **o),
        1,
        {"momentum": 0.9, "nesterov": True, "velocity_of": "step", "clip": (-0.5, 0.4)},
    ),
    "adam": (graph.Adam, lambda p, g, s, step, **o: rg.adam_step(p, g, *s, step=step, **o), 2, {"l1": 0.01}),
    "amsgrad": (
        graph.Adam,
        lambda p, g, s, step, amsgrad, **o: rg.adam_step(p, g, *s, step=step, **o),
        3,
        {"amsgrad": True, "epsilon_hat": True, "beta1": 0.8, "beta2": 0.95, "maximum_norm_each": 0.5},
    ),
    "adamw": (
        graph.AdamW,
        lambda p, g, s, step, **o: rg.adam_step(p, g, *s, step=step, decoupled=True, **o),
        2,
        {"weight_decay": 0.05, "maximum_norm": 0.7},
    ),
    "rmsprop": (graph.RMSProp, lambda p, g, s, step, **o: rg.rmsprop_step(p, g, s[0], **o), 1, {"alpha": 0.9}),
    "centered": (
        graph.RMSProp,
        lambda p, g, s, step, centered, **o: rg.rmsprop_step(p, g, *s, **o),
        3,
        {"centered": True, "momentum": 0.7, "eps_inside_root": True, "weight_decay": 0.01, "gradient_scale": 0.25},
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", STEP_FUNCTIONS)
def test_optimizers_give_the_bits_of_the_functions(name: str, dtype: type) -> None:
    make, function, states, options = STEP_FUNCTIONS[name]
    rng = np.random.default_rng(1)
    arrays = [np.asarray(rng.standard_normal(s), dtype) for s in SHAPES]
    variables = [graph.Variable(a) for a in arrays]
    rate = graph.Cosine(0.05, 8, warm_up=2)
    optimizer = make(rate, **options)
    program = graph.compile(lambda *g: optimizer.update(variables, g), *arrays)
    kept = [[np.zeros_like(a) for a in arrays] for _ in range(states)]
    for step in range(6):
        gradients = [np.asarray(rng.standard_normal(s), dtype) for s in SHAPES]
        program(*gradients)
        function(arrays, gradients, kept, step + 1, learning_rate=rate(step), **options)
        for variable, array in zip(variables, arrays, strict=True):
            assert variable.value.tobytes() == array.tobytes()
        for i, variable in enumerate(variables):
            for state, expected in zip(optimizer.states[variable], kept, strict=True):
                assert state.value.tobytes() == expected[i].tobytes()
    assert optimizer.count.value == 6


@pytest.mark.parametrize(
    ("make", "options", "names"),
    [
        (graph.SGD, {}, ()),
        (graph.SGD, {"momentum": 0.9}, ("velocities",)),
        (graph.Adam, {}, ("first_moments", "second_moments")),
        (graph.Adam, {"amsgrad": True}, ("first_moments", "second_moments", "largest_second_moments")),
        (graph.RMSProp, {}, ("squares",)),
        (graph.RMSProp, {"centered": True, "momentum": 0.5}, ("squares", "means", "velocities")),
    ],
)
def test_states_are_made_before_the_first_step(make: Callable[..., graph.Optimizer], options: Any, names: Any) -> None:
    """What :meth:`prepare` makes is what the program updates: a state that was set is used."""
    arrays = [np.full((2, 3), 0.5, np.float32), np.ones((), np.float64)]
    variables = [graph.Variable(a, name=n) for a, n in zip(arrays, ("w", "b"), strict=True)]
    optimizer = make(0.1, **options)
    assert optimizer.state_names == names
    optimizer.prepare(variables[:1])
    optimizer.prepare(variables)
    made = {v: list(optimizer.states[v]) for v in variables}
    for variable in variables:
        assert [state.name for state in made[variable]] == [f"{variable.name}.{name}" for name in names]
        for state in made[variable]:
            assert (state.shape, state.dtype) == (variable.shape, variable.dtype)
            assert not state.value.any()
            state.value[...] = 0.25
    gradients = [np.full_like(a, 2.0) for a in arrays]
    graph.compile(lambda *g: optimizer.update(variables, g), *gradients)(*gradients)
    assert {v: list(optimizer.states[v]) for v in variables} == made
    for variable in variables:
        for name, state in zip(names, made[variable], strict=True):
            decay = {"first_moments": 0.9, "second_moments": 0.999, "squares": 0.99, "means": 0.99}.get(name)
            if decay is not None:
                moment = 4.0 if name in ("second_moments", "squares") else 2.0
                np.testing.assert_allclose(state.value, decay * 0.25 + (1 - decay) * moment, rtol=1e-6)
            elif name == "largest_second_moments":
                np.testing.assert_allclose(state.value, 0.999 * 0.25 + 0.001 * 4.0, rtol=1e-6)
            elif make is graph.SGD:
                np.testing.assert_allclose(state.value, 0.9 * 0.25 + 2.0, rtol=1e-6)
            else:
                assert not np.any(state.value == 0.25)
    with pytest.raises(TypeError, match="a parameter is a ndarray, must be a Variable"):
        optimizer.prepare([np.ones(3)])  # type: ignore[list-item]


SCHEDULES: list[tuple[Any, Callable[[int], float]]] = [
    (graph.Constant(0.3), lambda k: 0.3),
    (graph.Constant(0.3, warm_up=7), lambda k: 0.3 * min(1.0, (k + 1) / 7)),
    (
        graph.Cosine(0.3, 40, warm_up=7, final=0.01),
        lambda k: 0.3 * (k + 1) / 7 if k < 7 else 0.01 + 0.29 * (1 + math.cos(math.pi * min(1.0, (k - 7) / 33))) / 2,
    ),
    (graph.Cosine(0.3, 40), lambda k: 0.15 * (1 + math.cos(math.pi * min(1.0, k / 40)))),
    (graph.StepDecay(0.3, 4, 0.5), lambda k: 0.3 * 0.5 ** (k // 4)),
    (graph.StepDecay(0.3, 4, 0.7), lambda k: 0.3 * 0.7 ** (k // 4)),
]


@pytest.mark.parametrize(("schedule", "formula"), SCHEDULES, ids=[repr(schedule) for schedule, _ in SCHEDULES])
def test_schedules(schedule: Any, formula: Callable[[int], float]) -> None:
    """Of numbers they return numbers, and in a program they give the same bits."""
    numbers = [schedule(k) for k in range(50)]
    assert all(type(number) is float for number in numbers)
    np.testing.assert_allclose(numbers, [formula(k) for k in range(50)], rtol=4e-15, atol=1e-17)
    found = graph.compile(schedule, graph.spec((), np.float64)).run(np.arange(50.0))
    if schedule == graph.StepDecay(0.3, 4, 0.7):  # its powers are rounded
        np.testing.assert_allclose(found, numbers, rtol=12 * 2e-16)  # twelve products
    else:
        assert found.tolist() == numbers


def test_a_rate_that_the_caller_sets() -> None:
    rate, w = graph.Variable(0.5), graph.Variable(np.ones(3, np.float32))
    sgd = graph.SGD(rate)
    program = graph.compile(lambda g: sgd.update([w], [g]), np.ones(3, np.float32))
    program(np.ones(3))
    rate.value = 0.25
    program(np.ones(3))
    assert w.value.tolist() == [0.25] * 3
    single = graph.SGD(graph.Variable(0.5, dtype=np.float32))
    graph.compile(lambda g: single.update([w], [g]), np.ones(3, np.float32))(np.ones(3))
    assert w.value.tolist() == [-0.25] * 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: graph.SGD(-1.0), "learning_rate is -1"),
        (lambda: graph.SGD(float("nan")), "learning_rate is nan"),
        (lambda: graph.SGD(0.1, nesterov=True), "momentum is 0"),
        (lambda: graph.SGD(0.1, maximum_norm=-1.0), "maximum_norm is -1"),
        (lambda: graph.SGD(0.1, clip=(1.0, -1.0)), "clip"),
        (lambda: graph.SGD(0.1, momentum=-0.5), "momentum is -0.5"),
        (lambda: graph.Adam(beta1=1.0), "beta1 is 1"),
        (lambda: graph.Adam(beta2=-0.1), "beta2 is -0.1"),
        (lambda: graph.Adam(eps=-1.0), "eps is -1"),
        (lambda: graph.AdamW(weight_decay=-1.0), "weight_decay is -1"),
        (lambda: graph.RMSProp(alpha=1.0), "alpha is 1"),
        (lambda: graph.SGD(0.1, momentum=0.9, velocity_of="speed"), "velocity_of is 'speed'"),
        (lambda: graph.StepDecay(0.1, 0), "every is 0"),
        (lambda: graph.Cosine(0.1, 5, warm_up=5), "warm_up is 5"),
    ],
)
def test_settings_that_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        make()


# ---- gradient accumulation -------------------------------------------------------------------------------------------


def test_accumulated_parts_are_a_whole_batch() -> None:
    """Four parts of two samples, then one update: as one batch of eight, up to the order of its sums."""
    whole, parts = mlp(np.float64, samples=8), mlp(np.float64, samples=2)
    adam, other = graph.Adam(1e-2, maximum_norm=0.5), graph.Adam(1e-2, maximum_norm=0.5)
    train = whole.compiled(adam)

    def part(x: graph.Tensor, labels: graph.Tensor) -> graph.Tensor:
        loss = parts.loss(x, labels)
        other.accumulate(loss, parts.parameters)
        return loss

    accumulate = graph.compile(part, *parts.batch(0))
    apply = graph.compile(other.apply)
    for k in range(5):
        x, labels = whole.batch(k)
        before = [v.copy() for v in parts.values()]
        losses = [accumulate(x[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2)]
        assert all(np.array_equal(a, b) for a, b in zip(before, parts.values(), strict=True))
        apply()
        np.testing.assert_allclose(np.mean(losses), train(x, labels), rtol=CLOSE)
        for a, b in zip(whole.values(), parts.values(), strict=True):
            np.testing.assert_allclose(a, b, rtol=CLOSE, atol=CLOSE)
    assert other.count.value == 5
    assert other.parts.value == 0
    assert all(not total.value.any() for total in other.sums.values())


def test_accumulated_sums_in_float32_have_fixed_bits() -> None:
    model = transformer()
    sgd = graph.SGD(0.1, momentum=0.9)
    accumulate = graph.compile(lambda *a: sgd.accumulate(model.loss(*a), model.parameters), *model.batch(0))
    apply = graph.compile(lambda: sgd.apply(average=False))
    found = [accumulate(*model.batch(k)) for k in range(3)]
    sums = [sum(parts[1:], start=parts[0].copy()) for parts in zip(*found, strict=True)]
    for variable, total in zip(model.parameters, sums, strict=True):
        assert sgd.sums[variable].value.tobytes() == total.tobytes()
    expected = [v.value.copy() for v in model.parameters]
    rg.sgd_step(expected, sums, [np.zeros_like(v) for v in expected], learning_rate=0.1, momentum=0.9)
    apply()
    for variable, array in zip(model.parameters, expected, strict=True):
        assert variable.value.tobytes() == array.tobytes()


def test_accumulation_in_many_runs_at_once() -> None:
    model, reference = mlp(), mlp()
    programs = []
    for one in (model, reference):
        sgd = graph.SGD(0.1)
        programs.append(
            (
                graph.compile(lambda *a, m=one, s=sgd: s.accumulate(m.loss(*a), m.parameters) and None, *one.batch(0)),
                graph.compile(sgd.apply),
            )
        )
    batches = [model.batch(k) for k in range(4)]
    programs[0][0].run(*(np.stack(parts) for parts in zip(*batches, strict=True)))
    for batch in batches:
        programs[1][0](*batch)
    for _, apply in programs:
        apply()
    assert [v.tobytes() for v in model.values()] == [v.tobytes() for v in reference.values()]


def test_collected_gradients_are_those_of_accumulate() -> None:
    """Gradients that are changed first: here, of one element, to 0."""
    model, other = mlp(), mlp()
    sgd, reference = graph.SGD(0.1, momentum=0.9), graph.SGD(0.1, momentum=0.9)
    mask = np.ones(model.parameters[0].shape, np.bool_)
    mask[0, 0] = False

    def part(*arguments: graph.Tensor) -> None:
        first, *others = graph.gradients(model.loss(*arguments), model.parameters)
        sgd.collect(model.parameters, [graph.where(mask, first, 0.0), *others])

    collect = graph.compile(part, *model.batch(0))
    accumulate = graph.compile(
        lambda *a: reference.accumulate(other.loss(*a), other.parameters) and None, *other.batch(0)
    )
    before = model.parameters[0].value[0, 0]
    for k in range(3):
        collect(*model.batch(k))
        accumulate(*other.batch(k))
    assert sgd.parts.value == 3
    sums = [
        (sgd.sums[v].value, reference.sums[o].value) for v, o in zip(model.parameters, other.parameters, strict=True)
    ]
    assert sums[0][0][0, 0] == 0
    assert sums[0][1][0, 0] != 0
    np.testing.assert_array_equal(sums[0][0][mask], sums[0][1][mask])
    assert [a.tobytes() for a, _ in sums[1:]] == [b.tobytes() for _, b in sums[1:]]
    for optimizer in (sgd, reference):
        graph.compile(optimizer.apply)()
    assert model.parameters[0].value[0, 0] == before
    assert other.parameters[0].value[0, 0] != before
    np.testing.assert_array_equal(model.parameters[0].value[mask], other.parameters[0].value[mask])
    with pytest.raises(RuntimeError, match="collect: there is no trace"):
        sgd.collect(model.parameters, model.values())


def test_accumulation_that_is_refused() -> None:
    model = mlp()
    sgd = graph.SGD(0.1)
    with pytest.raises(RuntimeError, match="accumulate"):
        graph.compile(sgd.apply)

    def twice(*arguments: graph.Tensor) -> None:
        for _ in range(2):
            sgd.accumulate(model.loss(*arguments), model.parameters)

    with pytest.raises(ValueError, match="accumulated twice"):
        graph.compile(twice, *model.batch(0))
    with pytest.raises(TypeError, match="must be a Variable"):
        graph.compile(lambda x: sgd.accumulate((x * x).sum(), [x]), np.ones(3))
