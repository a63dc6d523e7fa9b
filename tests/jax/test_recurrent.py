"""GRU, RNN and the LSTM's options against the formulas, written with ``jax.lax.scan`` in float64; traced arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd
from support.jax_calls import CELLS, assert_same_bits, cell_of

STEPS, SAMPLES, INPUTS, UNITS = 7, 3, 4, 5
RTOL = 1e-11  # float64 sums of some ten products, in another order


def new_states(jax: Any, name: str, x: Any, states: Any, w: Any, options: dict[str, Any]) -> Any:
    """One step of a cell, from the formulas."""
    numpy, sigmoid = jax.numpy, jax.nn.sigmoid
    h = states[0]
    if name == "rnn":
        return (getattr(jax.nn, options.get("activation", "tanh"))(x @ w.wx.T + h @ w.wh.T + w.b),)
    if name == "gru":
        before = options.get("kind") == "before"
        ax, ah = (numpy.split(a, 3, -1) for a in (x @ w.wx.T + w.b, h @ w.wh.T + w.bh))
        r, z = sigmoid(ax[0] + ah[0]), sigmoid(ax[1] + ah[1])
        wn, bn = w.wh[2 * UNITS :], w.bh[2 * UNITS :]
        n = numpy.tanh(ax[2] + ((r * h) @ wn.T + bn if before else r * ah[2]))
        return ((z * n + (1 - z) * h if options.get("flip") else (1 - z) * n + z * h),)
    c = states[1]
    i, f, g, o = numpy.split(x @ w.wx.T + h @ w.wh.T + w.b, 4, -1)
    if bound := options.get("clip"):
        i, f, g, o = (numpy.clip(a, -bound, bound) for a in (i, f, g, o))
    i, f, g, o = sigmoid(i), sigmoid(f), numpy.tanh(g), sigmoid(o)
    c = (1 - i if options.get("coupled") else f) * c + i * g
    if bound := options.get("cell_clip"):
        c = numpy.clip(c, -bound, bound)
    h = o * numpy.tanh(c)
    return (h if w.projection is None else h @ w.projection.T), c


def scanned(jax: Any, name: str, x: Any, cells: Any, states: Any, lengths: Any, reset: Any, **options: Any) -> Any:
    """y and the final states of a stack in one direction. States: [layers, N, H] each."""
    numpy = jax.numpy
    steps = numpy.arange(len(x))
    finals = []
    for layer, w in enumerate(cells):

        def step(carried: Any, given: Any, w: Any = w) -> Any:
            x, t, done = given
            start = [numpy.where(done[:, None], 0.0, s) for s in carried]
            active = (t < lengths)[:, None]
            # An inactive sample keeps its state, also where it would be reset.
            new = new_states(jax, name, x, start, w, options)
            after = tuple(numpy.where(active, n, s) for n, s in zip(new, carried, strict=True))
            return after, numpy.where(active, new[0], 0.0)

        final, x = jax.lax.scan(step, tuple(s[layer] for s in states), (x, steps, reset))
        finals.append(final)
    return (x, *(numpy.stack(parts) for parts in zip(*finals, strict=True)))


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "gru": ("gru", {}),
    "gru-before": ("gru", {"kind": "before"}),
    "gru-flip": ("gru", {"flip": True}),
    "gru-before-flip": ("gru", {"kind": "before", "flip": True}),
    "rnn": ("rnn", {}),
    "rnn-sigmoid": ("rnn", {"activation": "sigmoid"}),
    "lstm-coupled": ("lstm", {"coupled": True}),
    "lstm-clips": ("lstm", {"clip": 0.8, "cell_clip": 0.3}),
    "lstm-projection": ("lstm", {}),
}


@pytest.mark.parametrize("how", ["whole", "lengths", "reset"])
@pytest.mark.parametrize("case", OPTIONS)
def test_values_and_gradients(jax: Any, rj: Any, x64: None, case: str, how: str) -> None:
    """Two layers, with states, against the formulas under JAX's own derivatives."""
    name, options = OPTIONS[case]
    rng = np.random.default_rng(5)
    outputs = 2 if case == "lstm-projection" else UNITS
    projection = 0 if outputs == UNITS else outputs
    cells = [cell_of(name, rng, inputs, UNITS, np.float64, projection) for inputs in (INPUTS, outputs)]
    x = rng.normal(size=(STEPS, SAMPLES, INPUTS))
    widths = (outputs, UNITS)[: 2 if name == "lstm" else 1]
    states = tuple(rng.normal(size=(2, SAMPLES, width)) for width in widths)
    lengths = np.array([4, 7, 0]) if how == "lengths" else None
    reset = rng.random((STEPS, SAMPLES)) < 0.3 if how == "reset" else None
    whole = np.full(SAMPLES, STEPS) if lengths is None else lengths
    dones = np.zeros((STEPS, SAMPLES), bool) if reset is None else reset

    def ours(x: Any, cells: Any, states: Any) -> Any:
        return tuple(getattr(rj, name)(x, cells, *states, lengths=lengths, reset=reset, **options))

    def theirs(x: Any, cells: Any, states: Any) -> Any:
        return scanned(jax, name, x, cells, states, whole, dones, **options)

    found, pull = jax.vjp(jax.jit(ours), x, cells, states)
    expected, pull_expected = jax.vjp(jax.jit(theirs), x, cells, states)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)
    cotangents = tuple(rng.normal(size=a.shape) for a in expected)
    gradients, others = jax.tree.leaves(pull(cotangents)), jax.tree.leaves(pull_expected(cotangents))
    assert len(gradients) == len(others)
    for a, b in zip(gradients, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("name", CELLS)
def test_traced_lengths_and_seeds_are_mapped(jax: Any, rj: Any, name: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4, 3, 2)).astype(np.float32)
    cells = [cell_of(name, rng, inputs, 3, np.float32) for inputs in (2, 3)]
    lengths, seeds = np.array([[4, 0, 2], [4, 4, 4]]), np.array([3, 4])

    def run(lengths: Any, seed: Any) -> Any:
        return getattr(rj, name)(x, cells, lengths=lengths, dropout=0.5, seed=seed).y

    found = jax.jit(jax.vmap(run))(lengths, seeds)
    forward = getattr(retrograd, f"{name}_forward")
    for i in range(2):
        expected = forward(x, cells, lengths=lengths[i], dropout=0.5, seed=int(seeds[i])).y
        assert_same_bits(jax, found[i], expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_traced_resets_are_mapped(jax: Any, rj: Any, name: str, batch_first: bool) -> None:
    """Of any dtype, with gradients."""
    rng = np.random.default_rng(3)
    shape = (3, 5) if batch_first else (5, 3)
    x, dy = rng.normal(size=(*shape, 2)).astype(np.float32), rng.normal(size=(*shape, 4)).astype(np.float32)
    cell = cell_of(name, rng, 2, 4, np.float32)
    resets = rng.random((2, *shape)) < 0.4

    def run(x: Any, reset: Any) -> Any:
        return getattr(rj, name)(x, cell, reset=reset, batch_first=batch_first).y

    def both(reset: Any) -> Any:
        y, pull_back = jax.vjp(lambda x: run(x, reset), x)
        return y, pull_back(dy)[0]

    forward, backward = getattr(retrograd, f"{name}_forward"), getattr(retrograd, f"{name}_backward")
    for dtype in (bool, np.int32, np.float32):
        y, dx = jax.jit(jax.vmap(both))(resets.astype(dtype))
        for i in range(2):
            result = forward(x, cell, reset=resets[i], batch_first=batch_first)
            assert_same_bits(jax, (y[i], dx[i]), (result.y, backward(dy, result.cache).dx))


@pytest.mark.parametrize("name", ["gru", "rnn"])
def test_chunks_of_time(jax: Any, rj: Any, x64: None, name: str) -> None:
    """A scan over chunks, with the state carried, gives the gradients of the whole sequence."""
    rng = np.random.default_rng(4)
    x, cell = rng.normal(size=(12, 2, 3)), cell_of(name, rng, 3, 4, np.float64)
    run = getattr(rj, name)

    def chunks(x: Any, cell: Any) -> Any:
        def step(h: Any, chunk: Any) -> Any:
            output = run(chunk, cell, h)
            return output.hn, output.y

        return (jax.lax.scan(step, jax.numpy.zeros((2, 4)), x.reshape(3, 4, 2, 3))[1] ** 2).sum()

    expected = jax.grad(lambda x, cell: (run(x, cell).y ** 2).sum(), argnums=(0, 1))(x, cell)
    found = jax.jit(jax.grad(chunks, argnums=(0, 1)))(x, cell)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=RTOL, atol=RTOL)


@pytest.mark.parametrize("name", ["gru", "rnn"])
@pytest.mark.parametrize("shape", [(0, 2, 3), (4, 0, 3), (4, 2, 0)])
def test_without_elements(jax: Any, rj: Any, name: str, shape: tuple[int, ...]) -> None:
    x, cell = np.ones(shape, np.float32), cell_of(name, np.random.default_rng(0), shape[2], 2, np.float32)
    found, pull_back = jax.vjp(lambda x, cell: tuple(getattr(rj, name)(x, cell)), x, cell)
    result = getattr(retrograd, f"{name}_forward")(x, cell)
    assert_same_bits(jax, found, result[:2])
    expected = getattr(retrograd, f"{name}_backward")(result.y, result.cache, dhn=result.hn)
    assert_same_bits(jax, pull_back(found), (expected.dx, expected.dweights))


def test_only_gradients_that_are_needed_are_computed(jax: Any, rj: Any) -> None:
    rng = np.random.default_rng(0)
    x, h0, cell = np.ones((3, 2, 4), np.float32), np.ones((2, 5), np.float32), cell_of("gru", rng, 4, 5, np.float32)

    def last(x: Any, cell: Any, h0: Any) -> Any:
        return rj.gru(x, cell, h0).hn.sum()

    for argnums, results in ((0, "dx"), (1, "dwx0 dwh0 db0 dbh0"), (2, "dh0")):
        text = jax.jit(jax.grad(last, argnums)).lower(x, cell, h0).as_text()
        lines = [line for line in text.splitlines() if "@retrograd_" in line]
        assert [line.split('results = "')[1].split('"')[0] for line in lines] == ["y hn cache", results]


def test_traced_lengths_are_checked_at_run_time(jax: Any, rj: Any) -> None:
    cell = cell_of("gru", np.random.default_rng(0), 3, 2, np.float32)
    run = jax.jit(lambda lengths: rj.gru(np.ones((3, 2, 3), np.float32), cell, lengths=lengths).y)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"lengths\[1\] is 4, must be from 0 to 3"):
        run(np.array([3, 4])).block_until_ready()


def factors_of(name: str, batch_first: bool, rng: Any) -> dict[str, dict[str, Any]]:
    """Masks and zoneout, as arrays and as rates, of two cells."""
    gates = {"lstm": 4, "gru": 3, "rnn": 1}[name]
    order = (SAMPLES, STEPS) if batch_first else (STEPS, SAMPLES)
    kept = rng.integers(0, 2, (2, *order, UNITS)).astype(float)
    steady = (2, 1, SAMPLES, 1, UNITS) if batch_first else (2, 1, 1, SAMPLES, UNITS)
    found = {
        "mask": {"mask": rng.random(steady)},
        "mask for each gate": {"mask": rng.random((2, gates, *order, UNITS))},
        "mask of one row": {"mask": rng.random((SAMPLES, 1, 1) if batch_first else (SAMPLES, 1))},
        "weights": {"zoneout": kept},
        "one weight": {"zoneout": np.array([0.75])},
        "rate": {"zoneout": 0.5, "seed": 3},
        "all": {"mask": rng.random((1, UNITS)), "zoneout": 0.25, "dropout": 0.5, "seed": 2**31 + 5},
    }
    if name == "lstm":
        found["both rates"] = {"zoneout": (0.3, 0.6), "seed": 8}
        found["of the cells"] = {"zoneout": (None, kept)}
    return found


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", CELLS)
def test_masks_and_zoneout_are_those_of_the_functions(
    jax: Any, rj: Any, x64: None, name: str, batch_first: bool
) -> None:
    """Values and gradients under jit, the same bits."""
    rng = np.random.default_rng(4)
    cells = [cell_of(name, rng, inputs, UNITS, np.float64) for inputs in (INPUTS, UNITS)]
    x = rng.standard_normal((SAMPLES, STEPS, INPUTS) if batch_first else (STEPS, SAMPLES, INPUTS))
    layer, forward, backward = (
        getattr(rj, name),
        getattr(retrograd, f"{name}_forward"),
        getattr(retrograd, f"{name}_backward"),
    )
    for options in factors_of(name, batch_first, rng).values():
        result = forward(x, cells, batch_first=batch_first, **options)
        found = jax.jit(lambda x, cells, o=options: tuple(layer(x, cells, batch_first=batch_first, **o)))(x, cells)
        assert_same_bits(jax, found, tuple(result[:-1]))
        dy = rng.standard_normal(result.y.shape)

        def loss(x: Any, cells: Any, o: Any = options, dy: Any = dy) -> Any:
            return (layer(x, cells, batch_first=batch_first, **o).y * dy).sum()

        dx, dcells = jax.grad(loss, (0, 1))(x, cells)
        expected = backward(dy, result.cache)
        assert_same_bits(jax, (dx, dcells), (expected.dx, list(expected.dweights)))


@pytest.mark.parametrize("name", CELLS)
def test_masks_and_seeds_of_zoneout_are_mapped(jax: Any, rj: Any, name: str) -> None:
    rng = np.random.default_rng(5)
    cell = cell_of(name, rng, INPUTS, UNITS, np.float32)
    x = rng.standard_normal((STEPS, SAMPLES, INPUTS), np.float32)
    masks = rng.random((4, SAMPLES, UNITS), np.float32)
    layer, forward = getattr(rj, name), getattr(retrograd, f"{name}_forward")
    seeds = jax.numpy.arange(4, dtype="int32")
    found = jax.vmap(lambda mask, seed: layer(x, cell, mask=mask, zoneout=0.4, seed=seed).y)(masks, seeds)
    for seed, (mask, y) in enumerate(zip(masks, found, strict=True)):
        assert_same_bits(jax, y, forward(x, cell, mask=mask, zoneout=0.4, seed=seed).y)
    assert not np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((2, UNITS), np.float32)}, r"mask has shape \(2, 5\), which does not broadcast to .* = \(1"),
        ({"mask": np.ones(UNITS, np.float16)}, "mask has dtype float16"),
        ({"zoneout": 1.0}, "zoneout is 1.0, must be at least 0 and below 1"),
        ({"zoneout": (0.1, 0.2)}, "zoneout has a part for the cell state, which a GRU has not"),
        ({"zoneout": (0.1,)}, "zoneout has 1 parts, must have 2"),
        ({"zoneout": np.ones((3, 1, UNITS, 1), np.float32)}, "zoneout has shape .* does not broadcast"),
    ],
)
def test_masks_and_zoneout_that_do_not_fit(rj: Any, options: dict[str, Any], message: str) -> None:
    cell = cell_of("gru", np.random.default_rng(0), INPUTS, UNITS, np.float32)
    x = np.zeros((STEPS, SAMPLES, INPUTS), np.float32)
    with pytest.raises((ValueError, TypeError), match=f"gru: {message}"):
        rj.gru(x, cell, **options)


def test_masks_have_no_gradient(jax: Any, rj: Any) -> None:
    cell = cell_of("rnn", np.random.default_rng(0), INPUTS, UNITS, np.float32)
    x, mask = np.zeros((STEPS, SAMPLES, INPUTS), np.float32), np.ones(UNITS, np.float32)
    with pytest.raises(ValueError, match="rnn: a gradient of mask or zoneout is wanted"):
        jax.grad(lambda mask: rj.rnn(x, cell, mask=mask).y.sum())(mask)
    with pytest.raises(TypeError, match="rnn: zoneout is a traced rate"):
        jax.jit(lambda rate: rj.rnn(x, cell, zoneout=rate).y)(0.5)
