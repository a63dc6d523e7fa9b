"""Optimizer steps: the engine against the oracle and PyTorch, its bits at any number of threads, what it refuses."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrograd as rg
from retrograd import _core
from retrograd.lab import reference

Array = npt.NDArray[Any]

# Roundings in units of half the arithmetic's precision. Of a new parameter there is one, of the sum itself; what it is
# moved by, and a state, has about 12 (scale, regularization, averages, root, division, velocity), and a few more at the
# scalar level, which does not fuse. They count by the size of the terms: sums may cancel.
PARAMETER_ROUNDINGS = 1.0
TERM_ROUNDINGS = 20.0

STEPS: dict[str, tuple[Callable[..., None], Callable[..., tuple[Array, ...]]]] = {
    "sgd": (rg.sgd_step, reference.sgd_step),
    "sgd_momentum": (rg.sgd_step, reference.sgd_step),
    "adam": (rg.adam_step, reference.adam_step),
    "amsgrad": (rg.adam_step, reference.adam_step),
    "rmsprop": (rg.rmsprop_step, reference.rmsprop_step),
    "rmsprop_centered": (rg.rmsprop_step, reference.rmsprop_step),
    "rmsprop_momentum": (rg.rmsprop_step, reference.rmsprop_step),
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"learning_rate": 0.1}),
    ("sgd", {"learning_rate": 0.1, "weight_decay": 0.01, "l1": 0.02}),
    *(
        ("sgd_momentum", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": nesterov, "velocity_of": form})
        for nesterov in (False, True)
        for form in ("gradient", "step", "descent")
    ),
    ("sgd_momentum", {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("sgd_momentum", {"learning_rate": 0.1, "momentum": 0.0}),
    ("adam", {"learning_rate": 1e-3, "step": 1}),
    ("adam", {"learning_rate": 1e-3, "step": 7, "epsilon_hat": True, "eps": 1e-3}),
    ("adam", {"learning_rate": 1e-3, "step": 100000, "weight_decay": 0.1}),
    ("adam", {"learning_rate": 1e-3, "step": 3, "weight_decay": 0.1, "decoupled": True, "l1": 0.1}),
    ("adam", {"learning_rate": 1e-3, "step": 2, "beta1": 0.0, "beta2": 0.0}),
    ("amsgrad", {"learning_rate": 1e-3, "step": 5}),
    ("amsgrad", {"learning_rate": 1e-3, "step": 5, "weight_decay": 0.1, "decoupled": True, "beta2": 0.5}),
    ("rmsprop", {"learning_rate": 1e-2}),
    ("rmsprop", {"learning_rate": 1e-2, "eps_inside_root": True, "weight_decay": 0.1}),
    ("rmsprop", {"learning_rate": 1e-2, "alpha": 0.0}),
    ("rmsprop_centered", {"learning_rate": 1e-2, "l1": 0.1, "eps": 0.01}),
    *(
        ("rmsprop_momentum", {"learning_rate": 1e-2, "momentum": 0.9, "velocity_of": form, "eps": 0.01})
        for form in ("gradient", "step", "descent")
    ),
]
CLIPPING: list[dict[str, Any]] = [
    {},
    {"gradient_scale": 0.25},
    {"clip": (-0.5, 0.3), "gradient_scale": 2.0},
    {"clip": (-0.5, 0.3), "gradient_scale": -2.0, "clip_before_scale": True},
    {"maximum_norm": 0.5, "gradient_scale": -3.0},
    {"maximum_norm": 0.5, "gradient_scale": 3.0, "clip_before_scale": True},
    {"maximum_norm": 1e6},
    {"maximum_norm_each": 0.5, "gradient_scale": 3.0},
    {"maximum_norm": 0.5, "known_norm": 7.0, "gradient_scale": 3.0},
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(OPTIONS)]


def draw(name: str, shape: tuple[int, ...], dtype: Any, seed: int) -> list[Array]:
    """Parameter, gradient and states as they might be after some steps: squares are not below squared means."""
    rng = np.random.default_rng(seed)
    p, g = rng.standard_normal(shape), rng.standard_normal(shape)
    p = np.where(rng.random(shape) < 0.1, 0.0, p)  # where the sign is 0
    mean = 0.3 * rng.standard_normal(shape)
    square = mean**2 + rng.random(shape) + 0.1
    states = {
        "sgd": [],
        "sgd_momentum": [mean],
        "adam": [mean, square],
        "amsgrad": [mean, square, square * rng.uniform(0.9, 1.5, shape)],
        "rmsprop": [square],
        "rmsprop_centered": [square, mean],
        "rmsprop_momentum": [square, mean, 0.1 * rng.standard_normal(shape)],
    }[name]
    return [np.array(a, dtype) for a in (p, g, *states)]


def strided(arrays: list[Array], form: str) -> list[Array]:
    """The same numbers in other memory."""
    if form == "every_other":
        views = []
        for a in arrays:
            wide = np.zeros((*a.shape, 2), a.dtype)
            wide[..., 0] = a
            views.append(wide[..., 0])
        return views
    if form == "transposed":
        return [np.array(a.T, order="C").T for a in arrays]
    if form == "gradient_transposed":
        return [np.array(a.T, order="C").T if k == 1 else a.copy() for k, a in enumerate(arrays)]
    if form == "reversed":
        return [np.array(a[::-1], order="C")[::-1] if a.ndim else a.copy() for a in arrays]
    return [a.copy() for a in arrays]


def run(name: str, arrays: list[list[Array]], options: dict[str, Any], **more: Any) -> None:
    step, _ = STEPS[name]
    step(*(list(group) for group in zip(*arrays, strict=True)), **options, **more)


def check(
    name: str, before: list[list[Array]], after: list[list[Array]], options: dict[str, Any], **clipping: Any
) -> None:
    """The oracle's numbers, within roundings of the size of their terms, which the oracle gives if nothing cancels."""
    _, oracle = STEPS[name]
    clipping = {("scale" if key == "gradient_scale" else key): value for key, value in clipping.items()}
    gradients = reference.clipped_gradients([a[1] for a in before], **clipping)
    for old, new, g in zip(before, after, gradients, strict=True):
        assert new[1].tobytes() == old[1].tobytes()  # gradients are only read
        wanted = oracle(old[0], g, *old[2:], **options)
        sizes = [np.abs(a) for a in (old[0], g, *old[2:])]
        if options.get("velocity_of") == "step":
            sizes[-1] = -sizes[-1]
        moved, *states = oracle(*sizes, **options)
        terms = [np.abs(moved - sizes[0]), *map(np.abs, states)]
        if len(old) > 3 and name.startswith("rmsprop"):  # the variance is a difference
            square, mean = wanted[1], wanted[2]
            terms[0] = terms[0] * (square + mean**2) / (square - mean**2)
            if len(terms) > 3:
                terms[3] = terms[3] * (square + mean**2) / (square - mean**2)
        unit = np.finfo(old[0].dtype).eps / 2
        for k, (got, exact, size) in enumerate(zip((new[0], *new[2:]), wanted, terms, strict=True)):
            tolerance = unit * (TERM_ROUNDINGS * size + (0 if k else PARAMETER_ROUNDINGS * np.abs(exact)))
            worst = np.max(np.abs(got - exact) / np.maximum(tolerance, np.finfo(old[0].dtype).tiny), initial=0)
            assert worst <= 1, f"{name}: result {k} is {worst} of its tolerance away"


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_against_the_oracle(isa: str, name: str, options: dict[str, Any], dtype: Any) -> None:
    shapes = [(3, 5), (0,), (), (17,), (2, 0, 3), (4099,)]
    before = [draw(name, shape, dtype, seed) for seed, shape in enumerate(shapes)]
    for clipping in CLIPPING:
        after = [[a.copy() for a in group] for group in before]
        run(name, after, options, **clipping)
        check(name, before, after, options, **clipping)


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
def test_same_bits_at_any_number_of_threads(isa: str, name: str, options: dict[str, Any]) -> None:
    before = [draw(name, (n,), np.float32, n) for n in (70001, 1, 40000, 33)]
    results = []
    for threads in (1, 2, 3, 7):
        after = [[a.copy() for a in group] for group in before]
        run(name, after, options, maximum_norm=10.0, num_threads=threads)
        results.append([a.tobytes() for group in after for a in group])
    assert all(result == results[0] for result in results)


LANES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 511, 512, 513, 4099)


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(OPTIONS),
    shape=st.one_of(
        st.tuples(st.sampled_from(LANES)), st.lists(st.integers(0, 9), min_size=0, max_size=4).map(lambda s: tuple(s))
    ),
    dtype=st.sampled_from([np.float32, np.float64]),
    form=st.sampled_from(["contiguous", "every_other", "transposed", "gradient_transposed", "reversed"]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_any_shape_and_strides_give_the_same_bits(
    case: tuple[str, dict[str, Any]], shape: tuple[int, ...], dtype: Any, form: str, seed: int, data: st.DataObject
) -> None:
    name, options = case
    _core.select_isa(data.draw(st.sampled_from(_core.isa_levels())))
    plain = draw(name, shape, dtype, seed)
    before = [a.copy() for a in plain]
    views = strided(plain, form)
    run(name, [plain], options)
    run(name, [views], options)
    check(name, [before], [plain], options)
    for a, b in zip(plain, views, strict=True):
        np.testing.assert_array_equal(a, b)


def test_strided_views_leave_their_neighbours_alone() -> None:
    wide = np.full((300, 3, 2), 7.0, np.float32)
    p = wide[:, 1, :]
    before = p.copy()
    rg.sgd_step(p, np.ones((300, 2), np.float32), learning_rate=0.5)
    np.testing.assert_array_equal(p, before - 0.5)
    assert np.all(wide[:, (0, 2)] == 7)


def test_large_strided_parameters_use_the_team(isa: str) -> None:
    rng = np.random.default_rng(0)
    p, g = rng.standard_normal((400, 300)).T, rng.standard_normal((300, 400))
    wanted = p - 0.1 * g
    rg.sgd_step(p, g, learning_rate=0.1, num_threads=3)
    np.testing.assert_allclose(p, wanted, rtol=1e-14)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

TORCH: dict[str, tuple[str, dict[str, Any], Callable[..., None], dict[str, Any], list[str]]] = {
    "sgd": ("SGD", {"lr": 0.1}, rg.sgd_step, {"learning_rate": 0.1}, []),
    "momentum": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        rg.sgd_step,
        {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        ["velocities"],
    ),
    "nesterov": (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        rg.sgd_step,
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        ["velocities"],
    ),
    "adam": (
        "Adam",
        {"lr": 0.01, "weight_decay": 0.1},
        rg.adam_step,
        {"learning_rate": 0.01, "weight_decay": 0.1},
        ["first_moments", "second_moments"],
    ),
    "adamw": (
        "AdamW",
        {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-3},
        rg.adam_step,
        {"learning_rate": 0.01, "weight_decay": 0.1, "decoupled": True, "beta1": 0.8, "beta2": 0.99, "eps": 1e-3},
        ["first_moments", "second_moments"],
    ),
    "amsgrad": (
        "Adam",
        {"lr": 0.01, "amsgrad": True},
        rg.adam_step,
        {"learning_rate": 0.01},
        ["first_moments", "second_moments", "largest_second_moments"],
    ),
    "rmsprop": ("RMSprop", {"lr": 0.01}, rg.rmsprop_step, {"learning_rate": 0.01}, ["squares"]),
    "rmsprop_momentum": (
        "RMSprop",
        {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1},
        rg.rmsprop_step,
        {"learning_rate": 0.01, "momentum": 0.9, "weight_decay": 0.1},
        ["squares", "velocities"],
    ),
    "rmsprop_centered": (
        "RMSprop",
        {"lr": 0.01, "momentum": 0.9, "centered": True, "eps": 0.1},
        rg.rmsprop_step,
        {"learning_rate": 0.01, "momentum": 0.9, "eps": 0.1},
        ["squares", "means", "velocities"],
    ),
}


@pytest.mark.parametrize("case", TORCH)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-4)])
def test_fifty_steps_against_torch(torch: Any, case: str, dtype: Any, tolerance: float) -> None:
    """A quadratic with noise, so that gradients depend on where the steps have led."""
    name, torch_options, step, options, states = TORCH[case]
    rng = np.random.default_rng(3)
    shapes = [(4, 7), (33,), ()]
    ours = [np.array(rng.standard_normal(shape), dtype) for shape in shapes]
    theirs = [torch.nn.Parameter(torch.tensor(p)) for p in ours]
    optimizer = getattr(torch.optim, name)(theirs, **torch_options)
    held = {state: [np.zeros_like(p) for p in ours] for state in states}
    for number in range(1, 51):
        noise = [np.array(rng.standard_normal(shape), dtype) for shape in shapes]
        for q, z in zip(theirs, noise, strict=True):
            q.grad = (q.detach() + torch.tensor(z)).clone()
        optimizer.step()
        gradients = [np.array(p + z, dtype) for p, z in zip(ours, noise, strict=True)]
        more = {"step": number} if step is rg.adam_step else {}
        step(ours, gradients, **held, **options, **more)
    for p, q in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(p, q.detach().numpy(), rtol=tolerance, atol=tolerance)


def test_norm_clipping_against_torch(torch: Any) -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.standard_normal((3, 4)), rng.standard_normal(5)]
    parameters = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in gradients]
    for q, g in zip(parameters, gradients, strict=True):
        q.grad = torch.tensor(g)
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, 0.7))
    assert rg.global_norm(gradients) == pytest.approx(norm, rel=1e-15)
    moved = [np.zeros_like(g) for g in gradients]
    rg.sgd_step(moved, gradients, learning_rate=1.0, maximum_norm=0.7)
    for p, q in zip(moved, parameters, strict=True):
        np.testing.assert_allclose(p, -q.grad.numpy(), rtol=1e-5)  # theirs divides by the norm plus 1e-6


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_centered_variance_cannot_become_negative(isa: str) -> None:
    rng = np.random.default_rng(0)
    g = np.array(rng.uniform(1, 2, 1000), np.float32)
    p, squares, means = np.zeros_like(g), g * g, g.copy()
    for _ in range(20):
        rg.rmsprop_step(p, g, squares, means, alpha=0.5)
    assert np.all(np.isfinite(p))


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=IDS)
@pytest.mark.parametrize("clipping", [{}, {"clip": (-1.0, 1.0)}, {"maximum_norm": 1.0}])
def test_what_is_not_finite_stays_so_and_where_it_is(
    isa: str, name: str, options: dict[str, Any], clipping: dict[str, Any]
) -> None:
    before = draw(name, (50,), np.float32, 1)
    before[1][7] = np.nan
    after = [a.copy() for a in before]
    run(name, [after], options, **clipping)
    assert np.isnan(after[0][7])
    assert ("maximum_norm" in clipping) == bool(np.isnan(after[0]).sum() > 1)  # a norm that is NaN is everyone's
    before[1][7] = np.inf
    after = [a.copy() for a in before]
    run(name, [after], options, **clipping)
    assert np.isfinite(after[0][7]) == ("clip" in clipping)
    assert np.isfinite(np.delete(after[0], 7)).all()


def test_global_norm(isa: str) -> None:
    rng = np.random.default_rng(0)
    arrays = [np.array(rng.standard_normal(n), t) for n, t in itertools.product((0, 1, 9, 20000), ("f4", "f8"))]
    exact = np.sqrt(sum(np.sum(a.astype(np.longdouble) ** 2) for a in arrays))
    norms = [rg.global_norm(arrays, num_threads=n) for n in (1, 2, 3, 7)]
    assert abs(norms[0] - exact) < 1e-13 * exact
    assert norms == norms[:1] * 4
    matrix = np.array(rng.standard_normal((30, 40)), np.float32)
    assert rg.global_norm(matrix[::2, ::3]) == pytest.approx(np.linalg.norm(matrix[::2, ::3].astype(float)), rel=1e-14)
    assert rg.global_norm([]) == 0
    assert rg.global_norm(np.full(4, 3e30, np.float32)) == pytest.approx(6e30, rel=1e-6)  # squares leave float32
    with pytest.raises(TypeError, match=r"global_norm: arrays\[1\] has dtype int64"):
        rg.global_norm([matrix, np.arange(3)])


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_one_array_or_many_or_none() -> None:
    p = np.ones(3)
    rg.sgd_step(p, np.ones(3), learning_rate=0.5)
    rg.sgd_step((p,), (np.ones(3),), learning_rate=0.25)
    rg.sgd_step(iter([p]), iter([np.ones(3)]), learning_rate=0.25)  # type: ignore[arg-type]
    np.testing.assert_array_equal(p, 0)
    rg.sgd_step([], [], learning_rate=1.0)
    rg.adam_step([], [], [], [], step=1, maximum_norm=1.0)


def test_mixed_dtypes_of_a_list() -> None:
    ps = [np.ones(3, np.float32), np.ones(2)]
    rg.sgd_step(ps, [np.ones_like(p) for p in ps], learning_rate=0.5)
    assert [p.tolist() for p in ps] == [[0.5] * 3, [0.5] * 2]


def test_gradients_need_not_be_arrays(torch: Any) -> None:
    p = np.ones(3, np.float32)
    rg.sgd_step(p, torch.ones(3), learning_rate=0.5)
    rg.sgd_step([p], [torch.ones(3)], learning_rate=0.5)
    np.testing.assert_array_equal(p, 0)
    rg.sgd_step(p, np.broadcast_to(np.float32(1), (3,)), learning_rate=1.0)
    np.testing.assert_array_equal(p, -1)


def test_interleaved_parameters_are_not_overlapping() -> None:
    wide = np.ones((4, 2))
    rg.sgd_step([wide[:, 0], wide[:, 1]], [np.ones(4), np.full(4, 2.0)], learning_rate=0.5)
    np.testing.assert_array_equal(wide, [[0.5, 0.0]] * 4)


def read_only(a: Array) -> Array:
    a.flags.writeable = False
    return a


SGD = {"learning_rate": 0.1}
REFUSED: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("sgd_step", ([1], [1, 1]), SGD, ValueError, "there are 2 gradients, but 1 parameters"),
    ("sgd_step", ([1, 1], [1, 1], [1]), SGD, ValueError, "there are 1 velocities, but 2 parameters"),
    ("sgd_step", ([1], [(4,)]), SGD, ValueError, r"gradients\[0\] has shape \(4,\), but parameters\[0\] has .* \(3,\)"),
    ("sgd_step", ([1], ["f4"]), SGD, TypeError, r"gradients\[0\] has dtype float32, but parameters\[0\] .* float64"),
    ("sgd_step", (["f2"], ["f2"]), SGD, TypeError, r"parameters\[0\] has dtype float16; it must be native"),
    ("sgd_step", ([">f4"], [">f4"]), SGD, TypeError, r"parameters\[0\] has dtype >f4; it must be native"),
    ("sgd_step", (["read-only"], [1]), SGD, ValueError, r"parameters\[0\] is read-only"),
    ("sgd_step", (["stride 0"], [1]), SGD, ValueError, r"parameters\[0\] overlaps itself"),
    ("sgd_step", ([1], [1], ["read-only"]), SGD, ValueError, r"velocities\[0\] is read-only"),
    ("sgd_step", (["list"], [1]), SGD, TypeError, r"parameters\[0\] must be an ndarray, not list"),
    ("sgd_step", (["same"], ["same"]), SGD, ValueError, r"parameters\[0\] .* overlaps gradients\[0\]"),
    ("sgd_step", (["same", "same"], [1, 1]), SGD, ValueError, r"parameters\[0\] .* overlaps parameters\[1\]"),
    ("sgd_step", ([1], [1]), {"learning_rate": -1.0}, ValueError, "learning_rate is -1.0, must be a finite"),
    ("sgd_step", ([1], [1]), {"learning_rate": np.nan}, ValueError, "learning_rate is nan"),
    ("sgd_step", ([1], [1]), {"learning_rate": "1"}, TypeError, "learning_rate must be a number, not str"),
    ("sgd_step", ([1], [1]), SGD | {"momentum": 0.9}, ValueError, "momentum is 0.9, but there are no velocities"),
    ("sgd_step", ([1], [1], [1]), SGD | {"nesterov": True}, ValueError, "nesterov is set, but momentum is 0"),
    ("sgd_step", ([1], [1], [1]), SGD | {"velocity_of": "x"}, ValueError, "velocity_of is 'x'; there are 'gradient'"),
    ("sgd_step", ([1], [1]), SGD | {"weight_decay": -1}, ValueError, "weight_decay is -1.0"),
    ("sgd_step", ([1], [1]), SGD | {"gradient_scale": np.inf}, ValueError, "gradient_scale is inf"),
    ("sgd_step", ([1], [1]), SGD | {"clip": (1, -1)}, ValueError, r"clip is \(1.0, -1.0\)"),
    ("sgd_step", ([1], [1]), SGD | {"clip": (np.nan, 1)}, ValueError, r"clip is \(nan, 1.0\)"),
    ("sgd_step", ([1], [1]), SGD | {"clip": 3}, TypeError, r"clip must be \(low, high\), not 3"),
    ("sgd_step", ([1], [1]), SGD | {"clip": (0, 1), "maximum_norm": 1}, ValueError, "clip and maximum_norm are both"),
    ("sgd_step", ([1], [1]), SGD | {"maximum_norm": 0}, ValueError, "maximum_norm is 0.0, must be .* above 0"),
    ("sgd_step", ([1], [1]), SGD | {"known_norm": 1}, ValueError, "known_norm is given, but maximum_norm is not"),
    ("sgd_step", ([1], [1]), SGD | {"num_threads": 0}, ValueError, "the number of threads is 0"),
    ("adam_step", ([1], [1], [1], [1]), {"step": 0}, ValueError, "step is 0, must be at least 1"),
    ("adam_step", ([1], [1], [1], [1]), {"step": 1, "beta1": 1.0}, ValueError, "beta1 is 1.0, must be .* below 1"),
    ("adam_step", ([1], [1], [1], []), {"step": 1}, ValueError, "there are 0 second_moments, but 1 parameters"),
    ("adam_step", ([1], [1], [1], [1], []), {"step": 1}, ValueError, "there are 0 largest_second_moments"),
    ("rmsprop_step", ([1], [1], [1]), {"momentum": 0.5}, ValueError, "momentum is 0.5, but there are no velocities"),
    ("rmsprop_step", ([1], [1], [1]), {"eps": -1e-8}, ValueError, "eps is -1e-08"),
]


@pytest.mark.parametrize(("function", "lists", "options", "error", "message"), REFUSED)
def test_refusals(
    function: str, lists: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    shared = np.ones(3)

    def make(what: object) -> Any:
        if what == 1:
            return np.ones(3)
        if isinstance(what, tuple):
            return np.ones(what)
        special = {
            "read-only": lambda: read_only(np.ones(3)),
            "stride 0": lambda: np.lib.stride_tricks.as_strided(np.ones(1), (3,), (0,)),
            "list": lambda: [1.0, 1.0, 1.0],
            "same": lambda: shared,
        }
        return special[str(what)]() if what in special else np.ones(3, str(what))

    arrays = [list(map(make, kinds)) for kinds in lists]
    with pytest.raises(error, match=f"^{function}: .*{message}|^{message}"):
        getattr(rg, function)(*arrays, **options)
    for array in (array for group in arrays for array in group):
        np.testing.assert_array_equal(np.asarray(array, np.float64), 1)


def test_nothing_is_written_before_all_is_checked() -> None:
    good, bad = np.ones(3), read_only(np.ones(3))
    velocities = [np.zeros(3), np.zeros(3)]
    with pytest.raises(ValueError, match=r"sgd_step: parameters\[1\] is read-only"):
        rg.sgd_step([good, bad], [np.ones(3), np.ones(3)], velocities, learning_rate=0.1, momentum=0.9)
    assert good.tolist() == [1.0] * 3
    assert not np.any(velocities)


def test_no_growth() -> None:
    ps = [np.ones(50, np.float32) for _ in range(10)]
    gs = [np.ones_like(p) for p in ps]
    states = [[np.zeros_like(p) for p in ps] for _ in range(2)]

    def steps(first: int) -> None:
        for number in range(first, first + 200):
            rg.adam_step(ps, gs, *states, step=number, maximum_norm=1.0)

    steps(1)
    tracemalloc.start()
    try:
        steps(201)
        start = tracemalloc.get_traced_memory()[0]
        steps(401)
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    assert grown < 4096
