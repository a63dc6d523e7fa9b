"""GRU, RNN and the options of all cells: the oracle's numbers, and calls that must give the same bits."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd.lab import cases, reference, verify
from retrograd.lab.cases import GruCase, LstmCase, RecurrentCase, RnnCase
from retrograd.ops import _threads
from support.arrays import Array, assert_same_bits
from support.recurrent import (
    LEVELS,
    VARIANTS,
    arguments,
    backward,
    by_sample,
    check,
    errors,
    flat,
    forward,
    function,
    make,
    named,
    needs,
    options_of,
    outputs,
    part_of,
    run,
    state_names,
    variants,
)

CELLS = {"gru": GruCase, "gru_before": GruCase, "rnn": RnnCase, "lstm": LstmCase}
cells = pytest.mark.parametrize("cell", CELLS)


def sized(cell: str, *sizes: int, **options: Any) -> Any:
    """A case of a cell."""
    own = {"kind": "before"} if cell == "gru_before" else {}
    return CELLS[cell](*sizes, **own, **options)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@variants
def test_every_level_and_number_of_threads(name: str) -> None:
    check(VARIANTS[name], threads=(1, 2, 7))


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "published"),
    [("gru", cases.GRU_VERIFY_CASES), ("rnn", cases.RNN_VERIFY_CASES)],
)
def test_published_cases(cell: str, published: Any) -> None:
    rows = getattr(verify, f"verify_{cell}")(published, thread_counts=(1, 2))
    assert len(rows) == len(published) * len(LEVELS) * 2
    assert [(row.case.name, row.isa, row.threads, row.errors) for row in rows if not row.ok] == []
    # A tolerance that nothing comes near would not be one.
    for dtype in ("float32", "float64"):
        for result, name in enumerate(rows[0].errors._fields):
            assert max(row.errors[result] for row in rows if row.case.dtype == dtype) > 0.03, name


@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_verify_sees_a_wrong_result(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(rg, f"{cell}_forward")

    def wrong(*given: Any, **options: Any) -> Any:
        result = right(*given, **options)
        return result._replace(y=result.y * np.float32(1 + 2.0**-16))

    monkeypatch.setattr(f"retrograd.ops.recurrent.{cell}_forward", wrong)
    (row,) = getattr(verify, f"verify_{cell}")([CELLS[cell](12, 5, 7, 11)], ["scalar"], [1])
    assert not row.ok
    assert row.what == "y"
    assert row.error == row.errors.y > 1


@pytest.mark.parametrize("cell", ["gru", "gru_before", "rnn"])
@pytest.mark.parametrize("scale", [1e2, 1e4])
def test_huge_pre_activations(cell: str, scale: float, isa: str) -> None:
    for dtype in ("float32", "float64"):
        case = sized(cell, 7, 4, 6, 13, dtype=dtype, states=True)
        data = make(case)
        data = data._replace(x=data.x * data.x.dtype.type(scale))
        got = run(case, data, 2)
        assert all(np.isfinite(array).all() for array in got.arrays())
        assert max(errors(case, data, got).values()) <= 1


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@variants
def test_nan_and_inf_stay_in_their_sample(name: str, poison: float) -> None:
    case = VARIANTS[name]
    data = make(case)
    clean = run(case, data)
    x = data.x.copy()
    x[1, 3, 1] = poison  # a sample that is active in this step
    got = run(case, data._replace(x=x), 2)
    others = [n for n in range(case.samples) if n != 3]
    for field in by_sample(case):
        assert_same_bits([getattr(got, field)[:, others]], [getattr(clean, field)[:, others]])
    if math.isnan(poison):
        assert np.isnan(got.y).any()
        assert np.isnan(got.cells[0].wx).any()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name, case in VARIANTS.items() if case.active is not None])
def test_what_takes_no_part_is_not_looked_at(name: str, poison: float, isa: str) -> None:
    case = VARIANTS[name]
    data = make(case)
    expected = run(case, data).arrays()
    active = case.active
    x, dy = data.x.copy(), data.dy.copy()
    x[~active] = dy[~active] = poison
    changed = {"x": x, "dy": dy}
    if data.mask is not None and data.mask.shape[2] > 1:
        mask = data.mask.copy()
        mask[:, :, ~active] = poison
        changed["mask"] = mask
    if data.zoneout_h is not None:
        zoneout = data.zoneout_h.copy()
        zoneout[:, ~active] = poison
        changed["zoneout_h"] = zoneout
    assert_same_bits(run(case, data._replace(**changed), 2).arrays(), expected)


@cells
@pytest.mark.parametrize("sizes", [(0, 3, 5), (4, 0, 5), (0, 0, 0), (4, 3, 0)])
def test_nothing_there(cell: str, sizes: tuple[int, int, int], isa: str) -> None:
    inside: dict[str, Any] = {"mask": "full", "zoneout": 0.3}
    for layers, directions, states, options in itertools.product((1, 2), (1, 2), (False, True), ({}, inside)):
        case = sized(cell, *sizes, 6, layers, directions, states=states, **options)
        data = make(case)
        result = forward(case, data)
        if sizes[0] and sizes[1]:
            assert max(errors(case, data, run(case, data)).values()) <= 1
            continue
        got = backward(case, data, result.cache, need=needs(case, data))
        assert result.y.shape == (*sizes[:2], 6 * directions)
        assert got.dx.shape == data.x.shape
        for state in state_names(case):
            before = getattr(data, f"{state}0")
            zero = np.zeros((case.cells, case.samples, 6), np.float32)
            assert_same_bits([getattr(result, f"{state}n")], [zero if before is None else before])
            assert_same_bits([getattr(got, f"d{state}0")], [getattr(data, f"d{state}n")])
        assert not any(a.any() for a in flat(got.dweights) if a is not None)


# ---- the same bits ---------------------------------------------------------------------------------------------------


@variants
def test_without_a_cache_the_same_bits(name: str, isa: str) -> None:
    case = VARIANTS[name]
    data = make(case)
    kept, again, without = forward(case, data), forward(case, data, recompute=True), forward(case, data, training=False)
    assert without.cache is None
    assert again.cache.buffer is None
    for other in (again, without):
        assert_same_bits(outputs(other), outputs(kept))
    expected = flat(backward(case, data, kept.cache))
    made = function(case, "cache")(*arguments(case, data), **options_of(case, data))
    assert made.size == kept.cache.buffer.nbytes
    for cache in (kept.cache, again.cache, made):
        for _ in range(2):  # and backward may run again
            assert_same_bits(flat(backward(case, data, cache)), expected)
    for number in range(case.cells):
        assert_same_bits(made.gates(number), kept.cache.gates(number))


@variants
def test_lengths_and_batch_sizes(name: str) -> None:
    """Full lengths are none; falling lengths are batch sizes."""
    case = replace(VARIANTS[name], lengths=None, batch_sizes=None)
    data = make(case)
    expected = run(case, data).arrays()
    full = replace(case, lengths=(case.steps,) * case.samples), replace(case, batch_sizes=(case.samples,) * case.steps)
    for other in full:
        assert_same_bits(run(other, data).arrays(), expected)
    lengths = tuple(sorted((1 + n * 5 % case.steps for n in range(case.samples)), reverse=True))
    sizes = tuple(sum(length > t for length in lengths) for t in range(case.steps))
    given = [run(replace(case, lengths=lengths), data).arrays(), run(replace(case, batch_sizes=sizes), data).arrays()]
    assert_same_bits(*given)


@variants
def test_samples_first(name: str) -> None:
    case = VARIANTS[name]
    data = make(case)
    expected = run(case, data).arrays()
    turned = data._replace(x=data.x.swapaxes(0, 1).copy(), dy=data.dy.swapaxes(0, 1).copy())
    assert_same_bits(run(replace(case, batch_first=True), turned, 2).arrays(), expected)


@variants
def test_a_sample_is_the_same_in_any_company(name: str, isa: str) -> None:
    case = VARIANTS[name]
    if case.batch_sizes is not None:
        case = replace(case, batch_sizes=None, lengths=(3, 1, 6, 6, 0, 2, 5))
    data = make(case)
    whole = run(case, data)
    everyone = list(range(case.samples))
    for order in ([0], [3], everyone[::-1], [1, 0], [4, 2, 3, 0]):
        lengths = None if case.lengths is None else tuple(case.lengths[n] for n in order)
        some = run(replace(case, samples=len(order), lengths=lengths), part_of(case, data, order), 2)
        for field in by_sample(case):
            assert_same_bits([getattr(some, field)], [getattr(whole, field)[:, order]])


@pytest.mark.parametrize("first", [0, 1, 3, 6])
@pytest.mark.parametrize("name", [name for name, case in VARIANTS.items() if case.steps == 6])
def test_time_split_in_two(name: str, first: int, isa: str) -> None:
    """Forward in two parts that pass the states on, backward in two that pass their gradients back."""
    case = replace(VARIANTS[name], directions=1, batch_sizes=None)
    data = make(case)
    results, pieces, parts = [], [], []
    for number, span in enumerate((slice(first), slice(first, None))):
        steps = [first, case.steps - first][number]
        done = 0 if number == 0 else first
        lengths = None if case.lengths is None else tuple(min(max(n - done, 0), steps) for n in case.lengths)
        piece = part_of(case, data, steps=span)
        if results:
            piece = piece._replace(**{f"{s}0": getattr(results[0], f"{s}n") for s in state_names(case)})
        parts.append(replace(case, steps=steps, lengths=lengths))
        results.append(forward(parts[-1], piece))
        pieces.append(piece)
    second = backward(parts[1], pieces[1], results[1].cache)
    passed = {f"d{s}n": getattr(second, f"d{s}0") for s in state_names(case)}
    front = backward(parts[0], pieces[0], results[0].cache, **passed)
    whole = run(case, data)
    assert_same_bits([np.concatenate([r.y for r in results])], [whole.y])
    assert_same_bits([getattr(results[1], f"{s}n") for s in state_names(case)], whole[1 : 1 + len(passed)])
    joined = {"dx": np.concatenate([front.dx, second.dx])}
    joined |= {f"d{s}0": getattr(front, f"d{s}0") for s in state_names(case)}
    assert_same_bits(joined.values(), [getattr(whole, name) for name in joined])
    added = [
        type(of)(*(None if a is None else a + b for a, b in zip(*pair, strict=True))).stacked()
        for of, *pair in zip(data.weights, front.dweights, second.dweights, strict=True)
    ]
    assert max(errors(case, data, whole._replace(cells=added)).values()) <= 1


@variants
def test_no_state_is_a_state_of_zeros(name: str) -> None:
    case = replace(VARIANTS[name], states=False)
    data = make(case)
    widths = {"h": case.outputs, "c": case.units}
    zeros = {f"{s}0": np.zeros((case.cells, case.samples, widths[s]), case.dtype) for s in state_names(case)}
    for options in ({}, {"training": False}):
        expected = outputs(forward(case, data, **options))
        assert_same_bits(outputs(forward(case, data._replace(**zeros), **options)), expected)
    wanted = needs(case, data)
    none, zero = (
        backward(case, given, forward(case, given).cache, need=wanted) for given in (data, data._replace(**zeros))
    )
    assert_same_bits(flat(none), flat(zero))


@cells
def test_same_bits_run_to_run(cell: str, isa: str) -> None:
    case = sized(cell, 9, 6, 33, 70, 2, 2, states=True)
    data = make(case)
    expected = run(case, data).arrays()
    for threads in (2, 3, _threads._MOST, 7, 1):
        assert_same_bits(run(case, data, threads).arrays(), expected)


@pytest.mark.parametrize("cell", ["gru", "gru_before", "rnn"])
@pytest.mark.parametrize(
    "sizes", [(7, 40, 64, 64), (9, 1, 5, 130), pytest.param((5, 6, 100, 320), marks=pytest.mark.long), (3, 3, 5, 600)]
)
def test_larger_problems(cell: str, sizes: tuple[int, ...]) -> None:
    """Threads that share the samples, and those that share the units of a step."""
    case = sized(cell, *sizes)
    data = make(case)
    expected = run(case, data).arrays()
    for threads in (2, 3, 7):
        assert_same_bits(run(case, data, threads).arrays(), expected)
    if sizes[3] < 500:
        assert max(errors(case, data, run(case, data)).values()) <= 1


# ---- the options inside the recurrence -------------------------------------------------------------------------------


@cells
def test_options_that_change_nothing(cell: str, isa: str) -> None:
    case = sized(cell, 6, 7, 5, 35, 2, states=True)
    data = make(case)
    expected = run(case, data)
    shape = (case.cells, case.steps, case.samples, case.units)
    ones = np.ones(shape, np.float32)
    for change in (
        {"reset": np.zeros((case.steps, case.samples), bool)},
        {"mask": np.ones((case.cells, 1, 1, case.samples, case.units), np.float32)},
        {"mask": np.ones((case.cells, case.gates, case.steps, case.samples, case.units), np.float32)},
        {"zoneout_h": ones},
    ):
        got = run(case, data._replace(**change))
        assert_same_bits([got.y, got.hn], [expected.y, expected.hn])
        assert max(errors(case, data, got).values()) <= 1
    clipped = run(replace(case, clip=1e6), data)
    assert_same_bits(clipped.arrays(), expected.arrays())


@cells
def test_a_reset_begins_a_new_sequence(cell: str, isa: str) -> None:
    """The parts before and after it are sequences of their own."""
    case = sized(cell, 6, 3, 5, 19, states=True)
    data = make(case)
    reset = np.zeros((6, 3), bool)
    reset[4] = True
    whole = run(case, data._replace(reset=reset))
    front, rear = (part_of(case, data, steps=span) for span in (slice(4), slice(4, None)))
    rear = rear._replace(**{f"{s}0": None for s in state_names(case)})
    front = front._replace(**{f"d{s}n": np.zeros_like(getattr(front, f"d{s}n")) for s in state_names(case)})
    first, second = run(replace(case, steps=4), front), run(replace(case, steps=2, states=False), rear)
    assert_same_bits(
        [whole.y, whole.dx], [np.concatenate([getattr(p, n) for p in (first, second)]) for n in ("y", "dx")]
    )
    assert_same_bits([whole.hn, whole.dh0], [second.hn, first.dh0])
    numbers = forward(case, data, reset=reset.astype(np.float64))
    assert_same_bits([numbers.y], [whole.y])


@cells
def test_zoneout_rates(cell: str) -> None:
    """In training the elements that a seed chooses keep their value, in inference all keep a share of it."""
    case = sized(cell, 30, 20, 5, 40)
    data = make(case)
    result = forward(case, data, zoneout=0.3, seed=3)
    kept = np.mean(result.y[1:] == result.y[:-1])
    assert 0.28 < kept < 0.32
    assert_same_bits([forward(case, data, zoneout=0.3, seed=3, num_threads=2).y], [result.y])
    assert not np.array_equal(forward(case, data, zoneout=0.3, seed=4).y, result.y)
    share = np.full(case.units, 0.75, np.float32)
    inference = forward(case, data, zoneout=0.25, training=False)
    assert_same_bits(outputs(inference), outputs(forward(case, data, zoneout=share, training=False)))
    if cell == "lstm":
        one = replace(case, steps=1, samples=100, states=True)
        data = make(one)
        assert 0.88 < np.mean(forward(one, data, zoneout=(None, 0.9), seed=3).cn == data.c0) < 0.92


@cells
def test_a_mask_is_of_the_product_alone(cell: str) -> None:
    """A mask of 0 leaves no product with the state, but a GRU still carries it."""
    case = sized(cell, 5, 3, 4, 9, states=True)
    data = make(case)
    none = data._replace(weights=tuple(c._replace(wh=np.zeros_like(c.wh)) for c in data.weights))
    masked = forward(case, data, mask=np.zeros(9, np.float32))
    assert_same_bits(outputs(masked), outputs(forward(case, none)))


# ---- dropout, tables, steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_dropout_is_the_oracles_mask(cell: str) -> None:
    """Seen through layers that pass on what they read."""
    units, p, seed = 150, 0.4, 0x123456789ABCDEF
    x = np.random.default_rng(0).normal(size=(3, 5, units))
    eye, nothing = np.eye(units), np.zeros((units, units))
    if cell == "gru":
        wx = np.stack([nothing, nothing, eye])
        given: Any = rg.GruWeights(wx, np.zeros_like(wx))
        options: dict[str, Any] = {"activations": rg.GruActivations(*["identity"] * 3)}
        y = rg.gru_forward(x, [given] * 3, dropout=p, seed=seed, **options).y
    else:
        y = rg.rnn_forward(x, [rg.RnnWeights(eye, nothing)] * 3, activation="identity", dropout=p, seed=seed).y
    masks = [reference.philox_mask(seed, layer, x.shape, p) for layer in range(2)]
    np.testing.assert_allclose(y, x * masks[0] * masks[1], rtol=1e-15)


@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_dropout_is_off_in_inference_and_without_layers_in_between(cell: str) -> None:
    case = sized(cell, 4, 3, 5, 9, layers=2, dropout=0.5)
    data = make(case)
    plain = replace(case, dropout=0.0)
    assert_same_bits(outputs(forward(case, data, training=False)), outputs(forward(plain, data)))
    assert not np.array_equal(forward(case, data).y, forward(plain, data).y)
    one = replace(case, layers=1)
    data = make(one)
    assert_same_bits(run(one, data).arrays(), run(replace(one, dropout=0.0), data).arrays())


@pytest.mark.parametrize("name", [name for name, case in VARIANTS.items() if case.norm is None])
def test_a_table_is_an_embedding_before_it(name: str) -> None:
    """Outputs to the bit; the gradients of weights and table are other sums of the same terms."""
    case: RecurrentCase = VARIANTS[name]
    data = make(case)
    rng = np.random.default_rng(2)
    table: Array = rng.normal(size=(11, case.inputs)).astype(case.dtype)
    numbers = rng.integers(0, 11, data.x.shape[:2])
    data = data._replace(x=table[numbers])
    plain = forward(case, data)
    expected = backward(case, data, plain.cache)
    expected = expected._replace(dx=rg.embedding_backward(expected.dx, numbers, len(table)))
    found = []
    for threads in (1, 3):
        result = forward(case, data._replace(x=numbers), table=table, num_threads=threads)
        assert_same_bits(outputs(result), outputs(plain))
        found.append(flat(backward(case, data, result.cache, num_threads=threads)))
    again = forward(case, data._replace(x=numbers.astype(np.uint8)), table=table, recompute=True)
    assert_same_bits(found[1], found[0])
    assert_same_bits(flat(backward(case, data, again.cache)), found[0])
    close = 1e-12 if case.dtype == "float64" else 5e-5
    for got, want in zip(found[0], flat(expected), strict=True):
        if got is None or want is None:
            assert got is want
        else:
            np.testing.assert_allclose(got, want, rtol=close, atol=close * max(1.0, float(np.abs(want).max())))


@cells
def test_steps_are_a_sequence(cell: str, isa: str) -> None:
    """A loop of single steps, and of their gradients: the bits of the whole but for sums over time."""
    case = sized(cell, 4, 3, 5, 17, 2, states=True)
    data = make(case)
    whole = forward(case, data)
    gradients = backward(case, data, whole.cache)
    options = {name: value for name, value in options_of(case, data).items() if name in ("kind", "flip", "clip")}
    states = [getattr(data, f"{s}0") for s in state_names(case)]
    caches = []
    for t in range(case.steps):
        *states, cache = function(case, "step")(data.x[t], arguments(case, data)[1], *states, **options)
        caches.append(cache)
        assert_same_bits([states[0][-1]], [whole.y[t]])
    assert_same_bits(states, outputs(whole)[1:])
    incoming = [getattr(data, f"d{s}n") for s in state_names(case)]
    total: list[Any] = []
    for t in reversed(range(case.steps)):
        incoming[0] = incoming[0].copy()
        incoming[0][-1] += data.dy[t]
        step = function(case, "step_backward")(*incoming, caches[t])
        assert_same_bits([step.dx], [gradients.dx[t]])
        incoming = [getattr(step, f"d{s}0") for s in state_names(case)]
        mine = [a for a in flat(step.dweights) if a is not None]
        total = [a + b for a, b in zip(total, mine, strict=True)] if total else mine
    assert_same_bits(incoming, [getattr(gradients, f"d{s}0") for s in state_names(case)])
    for got, want in zip(total, [a for a in flat(gradients.dweights) if a is not None], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert function(case, "step")(data.x[0], arguments(case, data)[1], training=False).cache is None


@cells
def test_a_step_has_no_sequence(cell: str) -> None:
    case = sized(cell, 1, 3, 5, 6)
    data = make(case)
    name = f"{case.kind_name}_step"
    cell_weights = arguments(case, data)[1]
    step = function(case, "step")
    with pytest.raises(ValueError, match=rf"^{name}: x has shape \(1, 3, 5\), must have the 2 axes \(N, I\)"):
        step(data.x, cell_weights)
    for option, value in (("lengths", [1, 1, 1]), ("reset", np.zeros((1, 3))), ("bidirectional", True)):
        with pytest.raises(ValueError, match=rf"^{name}: {option} is given, but it concerns sequences"):
            step(data.x[0], cell_weights, **{option: value})


@pytest.mark.parametrize("activation", ["relu", "sigmoid", "identity", "softsign"])
def test_activations_of_an_rnn(activation: str, isa: str) -> None:
    case = RnnCase(5, 4, 3, 19, states=True, activations=named(RnnCase, h=activation))
    data = make(case)
    assert max(errors(case, data, run(case, data, 2)).values()) <= 1
