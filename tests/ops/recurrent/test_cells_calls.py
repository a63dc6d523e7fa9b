"""GRU, RNN and the options of all cells: buffers, caches, strides, and calls that are refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from retrograd.lab.cases import GruCase, LstmCase, RnnCase
from support.arrays import MEMORY, Array, assert_same_bits, assert_untouched_around, fenced
from support.lstm import moved
from support.recurrent import (
    GATES,
    LEVELS,
    VARIANTS,
    WEIGHTS,
    arguments,
    backward,
    flat,
    forward,
    function,
    make,
    needs,
    options_of,
    outputs,
    state_names,
    variants,
)

SMALL: dict[str, Any] = {
    "gru": GruCase(4, 3, 5, 9, layers=2, states=True),
    "gru_before": GruCase(4, 3, 5, 9, layers=2, states=True, kind="before", lengths=(4, 0, 2)),
    "rnn": RnnCase(4, 3, 5, 9, layers=2, states=True),
    "lstm_projection": LstmCase(4, 3, 5, 9, layers=2, states=True, projection=4, mask="gates"),
    "lstm_norm": LstmCase(4, 3, 5, 9, layers=2, states=True, norm="haste", zoneout=0.2),
}
small = pytest.mark.parametrize("name", SMALL)


# ---- need, out, accumulate -------------------------------------------------------------------------------------------


@small
def test_need_computes_what_is_asked_for(name: str) -> None:
    case = SMALL[name]
    data = make(case)
    cache = forward(case, data).cache
    everything = backward(case, data, cache)
    names = needs(case, data)
    for need in (*((one,) for one in names), *itertools.combinations(names, 2), ("dx", "dwh", "dh0"), ()):
        got = backward(case, data, cache, need=need)
        for result in ("dx", *(f"d{s}0" for s in state_names(case))):
            assert_same_bits([getattr(got, result)], [getattr(everything, result) if result in need else None])
        if got.dweights is None:
            assert not set(need) - {"dx", "dh0", "dc0"}
            continue
        for mine, whole in zip(got.dweights, everything.dweights, strict=True):
            for field, part in mine._asdict().items():
                assert_same_bits(flat(part), flat(getattr(whole, field)) if f"d{field}" in need else [None])


@pytest.mark.parametrize("form", ["concatenated", "stacked", "gates"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("name", ["gru", "gru_before", "rnn"])
def test_out_and_accumulate(name: str, memory: str, form: Any) -> None:
    case = replace(SMALL[name], weights=form)
    data = make(case)
    result = forward(case, data)
    expected = backward(case, data, result.cache)
    given = dict(zip(("y", "hn"), moved(list(result[:-1]), itertools.repeat(memory), blank=True), strict=True))
    again = forward(case, moved(data, itertools.repeat(memory)), out=given)
    assert again.y is given["y"]
    assert again.hn is given["hn"]
    assert_same_bits(outputs(again), outputs(result))
    out = moved(expected, itertools.repeat(memory), blank=True)
    got = backward(case, data, result.cache, out=out)
    assert_same_bits(flat(got), flat(expected))
    assert got.dx is out.dx
    added = backward(case, data, result.cache, out=out._asdict(), accumulate=True)
    for a, b in zip(flat(added), flat(expected), strict=True):
        if a is not None and b is not None:
            np.testing.assert_allclose(a, 2 * b, rtol=4e-7, atol=4e-7)
            assert_untouched_around(a)


@variants
def test_inputs_are_never_modified(name: str) -> None:
    case = VARIANTS[name]
    data = make(case)
    arrays = [a for a in flat(data) if a is not None]
    before = [a.copy() for a in arrays]
    for array in arrays:
        array.flags.writeable = False
    result = forward(case, data)
    kept = result.cache.buffer.copy()
    backward(case, data, result.cache)
    assert_same_bits([*arrays, result.cache.buffer], [*before, kept])


@small
def test_missing_gradients_are_zero(name: str) -> None:
    case = SMALL[name]
    data = make(case)
    cache = forward(case, data).cache
    states = [f"d{s}n" for s in state_names(case)]
    zeros = {state: np.zeros_like(getattr(data, state)) for state in states}
    none = function(case, "backward")(None, cache)
    zero = backward(case, data._replace(dy=np.zeros_like(data.dy)), cache, **zeros)
    for a, b in zip(flat(none), flat(zero), strict=True):
        np.testing.assert_array_equal(a, b)  # -0 and 0 are equal here


@pytest.mark.parametrize("name", ["gru", "gru_before", "rnn"])
def test_final_state_in_the_place_of_the_initial_one(name: str) -> None:
    case = SMALL[name]
    data = make(case)
    expected = forward(case, data)
    h = data.h0.copy()
    result = forward(case, data._replace(h0=h), out={"hn": h})
    assert result.hn is h
    assert_same_bits(outputs(result), outputs(expected))
    assert_same_bits(flat(backward(case, data, result.cache)), flat(backward(case, data, expected.cache)))
    room = np.zeros((3, 3, 9), np.float32)
    room[:-1] = data.h0
    kept = room.copy()
    function_name = f"{case.kind_name}_forward"
    with pytest.raises(ValueError, match=rf"^{function_name}: out.hn .* overlaps h0"):
        forward(case, data._replace(h0=room[:-1]), out={"hn": room[1:]})
    with pytest.raises(ValueError, match=r"is in the place of h0, which backward needs with recompute=True"):
        forward(case, data._replace(h0=h), out={"hn": h}, recompute=True)
    assert_same_bits([room], [kept])


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("name", ["gru_before_inside", "gru_norm", "rnn_inside", "lstm_projection", "lstm_inside"])
def test_memory_beside_the_arrays_is_not_even_read(name: str, at_end: bool) -> None:
    """Every array stands against a page without access: a kernel that reads a lane too far ends the test run."""
    for sizes in ((3, 2, 1, 3), (2, 3, 10, 16), (4, 5, 16, 17)):
        steps, samples, inputs, units = sizes
        own: dict[str, Any] = {"steps": steps, "samples": samples, "inputs": inputs, "units": units}
        case = replace(VARIANTS[name], **own, lengths=None)
        case = replace(case, projection=(units + 1) // 2) if getattr(case, "projection", 0) else case
        data = make(case)

        def beside(value: Any) -> Any:
            if value is None or isinstance(value, np.ndarray):
                return None if value is None else fenced(value, at_end)
            parts = map(beside, value)
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)

        data = beside(data)
        for level in LEVELS:
            _core.select_isa(level)
            result = forward(case, data, num_threads=2)
            out = beside(backward(case, data, result.cache))
            gradients = backward(case, data, result.cache, out=out, num_threads=2)
            assert all(np.isfinite(a).all() for a in (*outputs(result), *flat(gradients)) if a is not None)


# ---- caches ----------------------------------------------------------------------------------------------------------


@small
def test_cache_in_the_callers_memory(name: str) -> None:
    case = SMALL[name]
    data = make(case)
    own = forward(case, data)
    size, expected = own.cache.buffer.nbytes, flat(backward(case, data, own.cache))
    call = f"{case.kind_name}_forward"
    room = bytearray(size + 200)
    for buffer in (bytearray(size), memoryview(room)[1 : size + 1], np.zeros(size, np.uint8)):
        result = forward(case, data, cache=buffer)
        assert_same_bits(flat(backward(case, data, result.cache)), expected)
        elsewhere = bytes(memoryview(buffer).cast("B"))
        cache = function(case, "cache")(*arguments(case, data), **options_of(case, data), buffer=elsewhere)
        assert_same_bits(flat(backward(case, data, cache)), expected)
        assert_same_bits(cache.gates(1), result.cache.gates(1))
    with pytest.raises(ValueError, match=rf"^{call}: cache has {size - 1} bytes, this problem needs {size} "):
        forward(case, data, cache=bytearray(size - 1))
    for wrong, error, words in (
        (bytes(size), ValueError, "cache is read-only"),
        (3, TypeError, "cache must be a buffer of bytes"),
        (bytearray(), ValueError, f"cache has 0 bytes, this problem needs {size}"),
    ):
        with pytest.raises(error, match=f"^{call}: {words}"):
            forward(case, data, cache=wrong)


@small
def test_stale_and_foreign_caches(name: str) -> None:
    case = SMALL[name]
    data = make(case)
    buffer = bytearray(forward(case, data).cache.buffer.nbytes)
    kind = case.kind_name
    call, options = arguments(case, data), options_of(case, data)
    with pytest.raises(ValueError, match=rf"^{kind}_cache: cache holds nothing that a finished forward pass"):
        function(case, "cache")(*call, **options, buffer=buffer)
    first = forward(case, data, cache=buffer)
    for change in ({"seed": 12}, {"dropout": 0.25}, {"lengths": (3, 1, 2)}):
        with pytest.raises(ValueError, match=rf"^{kind}_cache: (cache is of another problem|buffer has)"):
            function(case, "cache")(*call, **options | change, buffer=buffer)
    later = forward(case, data, cache=buffer)
    for attempt in (lambda: backward(case, data, first.cache), lambda: first.cache.gates()):
        with pytest.raises(ValueError, match="cache is stale: a later forward pass has used the same buffer"):
            attempt()
    backward(case, data, later.cache)
    buffer[:] = bytes(len(buffer))
    with pytest.raises(ValueError, match=rf"^{kind}_backward: cache holds nothing"):
        backward(case, data, later.cache)


def test_a_cache_of_another_cell() -> None:
    caches = {name: forward(SMALL[name], make(SMALL[name])).cache for name in ("gru", "rnn", "lstm_norm")}
    for name, other in itertools.permutations(caches, 2):
        case = SMALL[name]
        with pytest.raises(
            TypeError, match=rf"^{case.kind_name}_backward: cache must be what {case.kind_name}_forward"
        ):
            backward(case, make(case), caches[other])
    gru = SMALL["gru"]
    data = make(gru)
    buffer = forward(gru, data).cache.buffer
    with pytest.raises(ValueError, match=r"^gru_cache: cache is of another problem"):
        rg.gru_cache(*arguments(gru, data), **options_of(gru, data) | {"kind": "before"}, buffer=buffer)


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_cache_sizes(cell: str) -> None:
    size = getattr(rg, f"{cell}_cache_size")
    case = {"lstm": LstmCase, "gru": GruCase, "rnn": RnnCase}[cell](6, 7, 5, 35, 2, 2, lengths=(6, 2, 0, 5, 6, 1, 4))
    options: dict[str, Any] = {"num_layers": 2, "bidirectional": True}
    assert size(6, 7, 5, 35, lengths=case.lengths, **options) == forward(case, make(case)).cache.buffer.nbytes
    assert size(6, 7, 5, 35, lengths=case.lengths, **options) < size(6, 7, 5, 35, **options)
    assert size(4, 3, 5, 32) < size(4, 3, 5, 32, dtype="float64")
    good: dict[str, Any] = {"seq_len": 4, "batch_size": 3, "input_size": 5, "hidden_size": 6}
    for change, error, words in (
        ({"seq_len": -1}, ValueError, "seq_len is -1, must be at least 0"),
        ({"hidden_size": 0}, ValueError, "hidden_size is 0, must be at least 1"),
        ({"num_layers": 0}, ValueError, "num_layers is 0, must be at least 1"),
        ({"input_size": 2.5}, TypeError, "input_size must be an int, not float"),
        ({"dtype": np.float16}, TypeError, "dtype float16; "),
        ({"lengths": [1, 2]}, ValueError, r"lengths has shape \(2,\), must be \(3,\)"),
    ):
        with pytest.raises(error, match=f"^{cell}_cache_size: .*{words}"):
            size(**good | change)


# ---- refusals --------------------------------------------------------------------------------------------------------


def f32(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def call(cell: str, **options: Any) -> Any:
    rows = GATES[cell] * 6
    words = {"x": f32(4, 3, 5), "weights": WEIGHTS[cell](f32(rows, 5), f32(rows, 6), f32(rows))} | options
    return getattr(rg, f"{cell}_forward")(words.pop("x"), words.pop("weights"), words.pop("h0", None), **words)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "x has 2 axes": ({"x": f32(4, 3)}, ValueError, r"x has shape \(4, 3\).* 3 axes \(T, N, I\)"),
    "x half": ({"x": np.zeros((4, 3, 5), np.float16)}, TypeError, "x has dtype float16.*float32 or float64"),
    "weights None": ({"weights": None}, TypeError, "weights .*NoneType"),
    "weights empty": ({"weights": []}, ValueError, "weights is empty"),
    "h0 of another shape": ({"h0": f32(3, 7)}, ValueError, r"h0 has shape \(3, 7\), must be \(N, H\) = \(3, 6\)"),
    "h0 double": ({"h0": np.zeros((3, 6))}, TypeError, "h0 has dtype float64, must be float32"),
    "lengths too long": ({"lengths": [4, 5, 1]}, ValueError, "lengths has 5, must be from 0 to 4"),
    "both": ({"lengths": [1, 1, 1], "batch_sizes": [3] * 4}, ValueError, "lengths and batch_sizes are both given"),
    "dropout 1": ({"dropout": 1}, ValueError, "dropout is 1.0, .*below 1"),
    "seed negative": ({"seed": -1}, ValueError, "seed is -1"),
    "clip 0": ({"clip": 0.0}, ValueError, "clip is 0.0"),
    "clip NaN": ({"clip": math.nan}, ValueError, "clip is nan"),
    "clip a string": ({"clip": "1"}, TypeError, "clip must be a number, not str"),
    "norm of another name": ({"norm": "layer"}, ValueError, "norm is 'layer', must be 'haste'"),
    "norm without gamma": ({"norm": "haste"}, ValueError, "gamma_x is None; norm needs it"),
    "norm_eps 0": ({"norm_eps": 0.0}, ValueError, "norm_eps is 0.0, must be above 0"),
    "reset of another shape": (
        {"reset": f32(3, 4)},
        ValueError,
        r"reset has shape \(3, 4\), must be \(T, N\) = \(4, 3\)",
    ),
    "reset of strings": ({"reset": np.full((4, 3), "a")}, TypeError, "reset has dtype <U1"),
    "mask of another shape": ({"mask": f32(7)}, ValueError, r"mask has shape \(7,\), which does not broadcast to"),
    "mask double": ({"mask": np.zeros(6)}, TypeError, "mask has dtype float64, must be float32"),
    "zoneout 1": ({"zoneout": 1.0}, ValueError, "zoneout is 1.0, must be at least 0 and below 1"),
    "zoneout of another shape": ({"zoneout": f32(2, 6)}, ValueError, r"zoneout has shape \(2, 6\), which does not"),
    "no threads": ({"num_threads": 0}, ValueError, "threads .*0"),
    "y of another shape": ({"out": f32(4, 3, 5)}, ValueError, r"out.y has shape \(4, 3, 5\), .*\(4, 3, 6\)"),
    "hn double": ({"out": {"hn": np.zeros((3, 6))}}, TypeError, "out.hn has dtype float64, .*float32"),
    "out of another name": ({"out": {"dx": f32(3, 6)}}, ValueError, "out has 'dx'; the outputs are y"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_forward_refuses(cell: str, name: str) -> None:
    options, error, words = REFUSED[name]
    for _ in range(2):  # no refusal is forgotten because the same call was made before
        with pytest.raises(error, match=f"^{cell}_forward: .*{words}"):
            call(cell, **options)


OWN_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "kind": ("gru", {"kind": "middle"}, "kind is 'middle', must be 'after' or 'before'"),
    "cn": ("gru", {"out": {"cn": f32(3, 6)}}, "out has 'cn'; the outputs are y and hn"),
    "zoneout of c": ("gru", {"zoneout": (0.1, 0.1)}, "zoneout has a part for the cell state, which a GRU has not"),
    "norm of a cell state": ("rnn", {"norm": "cell"}, "norm is 'cell', must be 'haste'"),
    "activation": ("rnn", {"activation": "tahn"}, "'tahn'.*tanh"),
    "cell_clip": ("lstm", {"cell_clip": -1.0}, "cell_clip is -1.0"),
    "three zoneouts": ("lstm", {"zoneout": (0.1, 0.1, 0.1)}, "zoneout has 3 parts, must have 2"),
    "weights of another width": (
        "gru",
        {"weights": rg.GruWeights(f32(18, 4), f32(18, 6))},
        r"wx has shape \(18, 4\), must be \(18, 5\)",
    ),
    "bias of another size": (
        "gru",
        {"weights": rg.GruWeights(f32(18, 5), f32(18, 6), None, f32(17))},
        r"bh has shape \(17,\), must be \(18,\)",
    ),
    "projection of another size": (
        "lstm",
        {"weights": rg.LstmWeights(f32(24, 5), f32(24, 4), None, None, f32(3, 6))},
        "projection has 3 rows, but wh has 4 columns",
    ),
}


@pytest.mark.parametrize("name", OWN_REFUSED)
def test_forward_refuses_what_a_cell_has_not(name: str) -> None:
    cell, options, words = OWN_REFUSED[name]
    with pytest.raises(ValueError, match=f"^{cell}_forward: .*{words}"):
        call(cell, **options)


@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_bidirectional_layers_have_no_reset(cell: str) -> None:
    rows = GATES[cell] * 6
    weights = [WEIGHTS[cell](f32(rows, 5), f32(rows, 6))] * 2
    with pytest.raises(ValueError, match=rf"^{cell}_forward: reset is given, but layers are bidirectional"):
        getattr(rg, f"{cell}_forward")(f32(4, 3, 5), weights, bidirectional=True, reset=f32(4, 3))


@pytest.mark.parametrize("cell", ["gru", "rnn"])
def test_backward_refuses(cell: str) -> None:
    cache = call(cell).cache
    rows = GATES[cell] * 6
    run_backward = getattr(rg, f"{cell}_backward")
    shared = f32(4, 3, 6)
    for options, error, words in (
        ({"dy": f32(3, 4, 6)}, ValueError, r"dy has shape \(3, 4, 6\), but y has shape \(4, 3, 6\)"),
        ({"dhn": np.zeros((3, 6))}, TypeError, "dhn has dtype float64, must be float32"),
        ({"need": ["dx", "dw"]}, ValueError, "need has 'dw'"),
        ({"need": ["dgamma_x"]}, ValueError, "need has 'dgamma_x', but forward was given no gamma_x"),
        ({"out": []}, TypeError, "out must be .*RecurrentGradients.* or a mapping"),
        ({"out": {"dc0": f32(3, 6)}}, ValueError, "out has 'dc0'"),
        ({"out": {"dx": f32(4, 3, 6)}}, ValueError, r"out.dx has shape \(4, 3, 6\), .*\(4, 3, 5\)"),
        ({"out": {"dx": shared[:, :, :5]}, "dy": shared}, ValueError, "out.dx .*overlaps dy"),
        ({"out": {"dweights": WEIGHTS[cell](f32(rows, 4), None)}}, ValueError, r"out.dweights.wx has shape"),
        ({"accumulate": True, "need": ["dx"]}, ValueError, "accumulate=True adds to buffers, and out has none for dx"),
    ):
        given: dict[str, Any] = {"dy": f32(4, 3, 6), **options}
        with pytest.raises(error, match=f"^{cell}_backward: {words}"):
            run_backward(given.pop("dy"), cache, **given)
