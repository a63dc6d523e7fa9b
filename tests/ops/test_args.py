"""Every input that is refused: with which exception, in which words, and before anything is written.

A message names the function, the argument, and what was found beside what was expected.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import retrograd as rg
from retrograd import _core
from retrograd.lab import cases
from support.errors import KINDS

Array = np.ndarray[Any, Any]
SHAPE = (4, 6, 5)
FORWARDS: dict[str, Callable[..., Any]] = {
    "batch_norm_forward": rg.batch_norm_forward,
    "instance_norm_forward": rg.instance_norm_forward,
    "layer_norm_forward": rg.layer_norm_forward,
    "group_norm_forward": rg.group_norm_forward,
}
BACKWARDS: dict[str, Callable[..., Any]] = {
    "batch_norm_backward": rg.batch_norm_backward,
    "instance_norm_backward": rg.instance_norm_backward,
    "layer_norm_backward": rg.layer_norm_backward,
    "group_norm_backward": rg.group_norm_backward,
}


def data(shape: tuple[int, ...] = SHAPE, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def f32(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def swapped(a: Array) -> Array:
    return a.astype(a.dtype.newbyteorder())


def read_only(a: Array) -> Array:
    a.flags.writeable = False
    return a


def stride_0(shape: tuple[int, ...]) -> Array:
    """Writeable, and all of its rows the same memory."""
    return np.lib.stride_tricks.as_strided(f32(*shape[1:]), shape, (0, *f32(*shape[1:]).strides), writeable=True)


def unaligned(shape: tuple[int, ...]) -> Array:
    size = int(np.prod(shape)) * 4
    return np.frombuffer(bytearray(size + 1), np.uint8)[1:].view(np.float32).reshape(shape)


class Refusal(NamedTuple):
    """A call that must fail, and what its message must say besides the function's name."""

    options: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]
    x: Any = None
    function: str = "batch_norm_forward"


FORWARD_REFUSALS: dict[str, Refusal] = {
    # the data
    "integers": Refusal({}, TypeError, ("x", "int64", "float32"), np.zeros(SHAPE, np.int64)),
    "booleans": Refusal({}, TypeError, ("x", "bool", "float32"), np.zeros(SHAPE, np.bool_)),
    "complex": Refusal({}, TypeError, ("x", "complex64", "float32"), np.zeros(SHAPE, np.complex64)),
    "long double": Refusal({}, TypeError, ("x", "float32"), np.zeros(SHAPE, np.longdouble)),
    "objects": Refusal({}, TypeError, ("x", "object", "float32"), np.zeros(SHAPE, object)),
    "strings": Refusal({}, TypeError, ("x", "float32"), np.full(SHAPE, "1.0")),
    "byte order": Refusal({}, TypeError, ("x", "byte order", ">f4", "astype"), swapped(data())),
    "ragged": Refusal({}, TypeError, ("x", "array"), [[1.0, 2.0], [3.0]]),
    "scalar": Refusal({}, ValueError, ("x", "0", "2"), np.float32(1)),
    "one axis": Refusal({}, ValueError, ("x", "1", "2"), f32(5)),
    "no axes": Refusal({}, ValueError, ("x", "0", "1"), np.float32(1), "layer_norm_forward"),
    "unaligned x": Refusal({}, ValueError, ("x", "align"), unaligned(SHAPE)),
    # axes and groups
    "channel_axis too large": Refusal({"channel_axis": 3}, ValueError, ("channel_axis", "3", "3 axes")),
    "channel_axis too small": Refusal({"channel_axis": -4}, ValueError, ("channel_axis", "-4", "3 axes")),
    "channel_axis float": Refusal({"channel_axis": 1.0}, TypeError, ("channel_axis", "float")),
    "channel_axis list": Refusal({"channel_axis": [1]}, TypeError, ("channel_axis", "list")),
    "channel_axis of samples": Refusal(
        {"channel_axis": 0}, ValueError, ("channel_axis", "0", "samples"), None, "instance_norm_forward"
    ),
    "channel_axis of samples, negative": Refusal(
        {"channel_axis": -3, "num_groups": 2}, ValueError, ("channel_axis", "0"), None, "group_norm_forward"
    ),
    "axis too large": Refusal({"axis": 3}, ValueError, ("axis", "3", "3 axes"), None, "layer_norm_forward"),
    "axis tuple": Refusal({"axis": (1, 2)}, TypeError, ("axis", "tuple"), None, "layer_norm_forward"),
    "groups do not divide": Refusal(
        {"num_groups": 4}, ValueError, ("num_groups", "4", "6"), None, "group_norm_forward"
    ),
    "no groups": Refusal({"num_groups": 0}, ValueError, ("num_groups", "0", "1"), None, "group_norm_forward"),
    "negative groups": Refusal({"num_groups": -2}, ValueError, ("num_groups", "-2"), None, "group_norm_forward"),
    "groups float": Refusal({"num_groups": 2.0}, TypeError, ("num_groups", "float"), None, "group_norm_forward"),
    # parameters
    "gamma too short": Refusal({"gamma": f32(5)}, ValueError, ("gamma", "(5,)", "(6,)", "(4, 6, 5)")),
    "beta of the wrong rank": Refusal({"beta": f32(6, 1)}, ValueError, ("beta", "(6, 1)", "(6,)")),
    "gamma of layer norm": Refusal(
        {"gamma": f32(5), "axis": 1}, ValueError, ("gamma", "(5,)", "(6, 5)"), None, "layer_norm_forward"
    ),
    "gamma double": Refusal({"gamma": np.ones(6)}, TypeError, ("gamma", "float64", "float32")),
    "gamma half": Refusal({"gamma": np.ones(6, np.float16)}, TypeError, ("gamma", "float16", "float32")),
    "beta integer": Refusal({"beta": np.ones(6, int)}, TypeError, ("beta", "int64", "float32")),
    "beta byte order": Refusal({"beta": swapped(f32(6))}, TypeError, ("beta", "byte order")),
    "gamma single for double": Refusal(
        {"gamma": f32(6)}, TypeError, ("gamma", "float32", "float64"), data(dtype=np.float64)
    ),
    # statistics
    "mean alone": Refusal({"mean": np.zeros(6)}, ValueError, ("var", "mean")),
    "var alone": Refusal({"var": np.zeros(6)}, ValueError, ("mean", "var")),
    "mean too short": Refusal({"mean": np.zeros(5), "var": np.ones(6)}, ValueError, ("mean", "(5,)", "(6,)")),
    "var too long": Refusal({"mean": np.zeros(6), "var": np.ones(7)}, ValueError, ("var", "(7,)", "(6,)")),
    "mean per sample": Refusal(
        {"mean": np.zeros(6), "var": np.ones(6)},
        ValueError,
        ("mean", "(6,)", "(4, 6)"),
        None,
        "instance_norm_forward",
    ),
    "mean complex": Refusal({"mean": np.zeros(6, complex), "var": np.ones(6)}, TypeError, ("mean", "complex128")),
    "var strings": Refusal({"mean": np.zeros(6), "var": np.full(6, "1")}, TypeError, ("var", "real")),
    "count zero": Refusal({"mean": np.zeros(6), "var": np.ones(6), "count": 0}, ValueError, ("count", "0", "1")),
    "count negative": Refusal({"count": -3}, ValueError, ("count", "-3", "1")),
    "count float": Refusal({"count": 2.5}, TypeError, ("count", "float")),
    # evaluation and running statistics
    "evaluation without statistics": Refusal(
        {"training": False}, ValueError, ("training=False", "mean", "running_mean")
    ),
    "evaluation of instances without": Refusal(
        {"training": False}, ValueError, ("training=False",), None, "instance_norm_forward"
    ),
    "running_mean alone": Refusal({"running_mean": f32(6)}, ValueError, ("running_var", "running_mean")),
    "running_var alone": Refusal({"running_var": f32(6)}, ValueError, ("running_mean", "running_var")),
    "running_mean too short": Refusal(
        {"running_mean": f32(5), "running_var": f32(6)}, ValueError, ("running_mean", "(5,)", "(6,)")
    ),
    "running_var per sample": Refusal(
        {"running_mean": f32(6), "running_var": f32(4, 6)},
        ValueError,
        ("running_var", "(4, 6)", "(6,)"),
        None,
        "instance_norm_forward",
    ),
    "running_mean integer": Refusal(
        {"running_mean": np.zeros(6, int), "running_var": f32(6)}, TypeError, ("running_mean", "int64", "float32")
    ),
    "running_mean list": Refusal(
        {"running_mean": [0.0] * 6, "running_var": f32(6)}, TypeError, ("running_mean", "list", "ndarray")
    ),
    "running_var byte order": Refusal(
        {"running_mean": f32(6), "running_var": swapped(f32(6))}, TypeError, ("running_var", "float32")
    ),
    "running_var read-only": Refusal(
        {"running_mean": f32(6), "running_var": read_only(f32(6))}, ValueError, ("running_var", "read-only")
    ),
    "update of another type": Refusal(
        {"running_mean": f32(6), "running_var": f32(6), "update": 0.1}, TypeError, ("update", "RunningUpdate", "float")
    ),
    "update out of range": Refusal(
        {"running_mean": f32(6), "running_var": f32(6), "update": rg.RunningUpdate.pytorch(1.5)},
        ValueError,
        ("update.keep", "-0.5", "1"),
    ),
    # options
    "eps negative": Refusal({"eps": -1e-5}, ValueError, ("eps", "-1e-05", "0")),
    "eps NaN": Refusal({"eps": float("nan")}, ValueError, ("eps", "nan")),
    "eps infinite": Refusal({"eps": float("inf")}, ValueError, ("eps", "inf")),
    "eps None": Refusal({"eps": None}, TypeError, ("eps", "NoneType")),
    "eps string": Refusal({"eps": "1e-5"}, TypeError, ("eps", "str")),
    "unknown activation": Refusal({"activation": "rellu"}, ValueError, ("activation", "rellu", "relu")),
    "activation needs its input": Refusal({"activation": "silu"}, ValueError, ("activation", "silu", "monotone")),
    "activation needs alpha": Refusal({"activation": "clamp"}, ValueError, ("activation", "clamp", "alpha")),
    "activation of another type": Refusal({"activation": 3}, TypeError, ("activation", "int")),
    "slope from nowhere": Refusal({"slope_from": "y"}, ValueError, ("slope_from", "'y'", "'output' or 'input'")),
    "slope_from unhashable": Refusal({"slope_from": ["input"]}, ValueError, ("slope_from", "'output' or 'input'")),
    "activation unhashable": Refusal({"activation": ["relu"]}, TypeError, ("activation", "list")),
    "no threads": Refusal({"num_threads": 0}, ValueError, ("threads", "0", "1")),
    "threads float": Refusal({"num_threads": 2.0}, TypeError, ("threads", "float")),
    # out
    "out list": Refusal({"out": [1.0]}, TypeError, ("out", "list", "ndarray")),
    "out of another shape": Refusal({"out": f32(4, 6, 6)}, ValueError, ("out", "(4, 6, 6)", "(4, 6, 5)")),
    "out of another rank": Refusal({"out": f32(4, 30)}, ValueError, ("out", "(4, 30)", "(4, 6, 5)")),
    "out of another type": Refusal({"out": np.zeros(SHAPE)}, TypeError, ("out", "float64", "float32")),
    "out byte order": Refusal({"out": swapped(f32(*SHAPE))}, TypeError, ("out", "byte order")),
    "out read-only": Refusal({"out": read_only(f32(*SHAPE))}, ValueError, ("out", "read-only")),
    "out stride 0": Refusal({"out": stride_0(SHAPE)}, ValueError, ("out", "overlaps itself")),
    "out unaligned": Refusal({"out": unaligned(SHAPE)}, ValueError, ("out", "align")),
}


@pytest.mark.parametrize("name", FORWARD_REFUSALS)
def test_forward_refuses(name: str) -> None:
    refusal = FORWARD_REFUSALS[name]
    options = dict(refusal.options)
    if refusal.function == "group_norm_forward":
        options.setdefault("num_groups", 3)
    x = data() if refusal.x is None else refusal.x
    # What a call that gets as far as its results would change: out and the running statistics.
    updates = refusal.function in ("batch_norm_forward", "instance_norm_forward") and options.get("training", True)
    if updates and not {"running_mean", "running_var"} & set(options):
        options |= {"running_mean": np.full(6, 3.0), "running_var": np.full(6, 4.0)}
    written = {key: options[key] for key in ("out", "running_mean", "running_var") if key in options}
    if "out" not in options and isinstance(x, np.ndarray) and x.dtype in (np.float32, np.float64):
        written["out"] = options["out"] = np.full(x.shape, 7, x.dtype)
    saved = {key: np.array(value, copy=True) for key, value in written.items()}
    before = np.array(x, copy=True) if isinstance(x, np.ndarray) else None
    with pytest.raises(refusal.error) as caught:
        FORWARDS[refusal.function](x, **options)
    message = str(caught.value)
    assert type(caught.value) is KINDS[refusal.error]
    assert message.startswith(f"{refusal.function}: ")
    for word in refusal.words:
        assert word in message, message
    for key, value in saved.items():
        np.testing.assert_array_equal(np.asarray(written[key]), value)
    if before is not None:
        np.testing.assert_array_equal(x, before)


def test_no_refusal_is_forgotten_because_the_same_call_was_made_before() -> None:
    """Checks are remembered by their arguments, and 1 == 1.0 == True."""
    x = data()
    rg.batch_norm_forward(x, channel_axis=1)
    with pytest.raises(TypeError, match=r"channel_axis must be an int, not float"):
        rg.batch_norm_forward(x, channel_axis=1.0)
    rg.group_norm_forward(x, num_groups=2)
    with pytest.raises(TypeError, match=r"num_groups must be an int, not float"):
        rg.group_norm_forward(x, num_groups=2.0)


# ---- overlap ---------------------------------------------------------------------------------------------------------


def overlapping(kind: str) -> tuple[dict[str, Any], tuple[str, ...], list[Array]]:
    """Options of a batch norm, the words of its refusal, and all memory involved."""
    block = data((300,))
    x = block[:120].reshape(SHAPE)
    match kind:
        case "shifted":
            return {"x": x, "out": block[1:121].reshape(SHAPE)}, ("out", "overlaps x", str(x.strides)), [block]
        case "reversed":
            return {"x": x, "out": x[::-1]}, ("out", "overlaps x", str(x[::-1].strides)), [block]
        case "transposed":
            square = data((6, 6))
            return {"x": square, "out": square.T}, ("out", "overlaps x"), [square]
        case "tail":
            return {"x": x, "out": block[100:220].reshape(SHAPE)}, ("out", "overlaps x"), [block]
        case "gamma":
            return {"x": data(), "gamma": block[10:16], "out": x}, ("out", "overlaps gamma", "(6,)"), [block]
        case "beta":
            return {"x": data(), "beta": block[:6], "out": x}, ("out", "overlaps beta", "(6,)"), [block]
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["shifted", "reversed", "transposed", "tail", "gamma", "beta"])
def test_out_that_is_not_exactly_in_place(kind: str) -> None:
    options, words, memory = overlapping(kind)
    saved = [m.copy() for m in memory]
    with pytest.raises(ValueError, match=r"^batch_norm_forward: ") as caught:
        rg.batch_norm_forward(**options)
    for word in words:
        assert word in str(caught.value)
    for now, before in zip(memory, saved, strict=True):
        np.testing.assert_array_equal(now, before)


def test_running_statistics_in_one_place() -> None:
    state = np.ones(6)
    with pytest.raises(ValueError, match=r"batch_norm_forward: running_mean .*overlaps running_var"):
        rg.batch_norm_forward(data(), running_mean=state, running_var=state)
    assert (state == 1).all()


# ---- backward --------------------------------------------------------------------------------------------------------


def cached(function: str, x: Array | None = None, **options: Any) -> rg.NormCache:
    if function == "group_norm_backward":
        options.setdefault("num_groups", 3)
    x = data() if x is None else x
    parameters = x.shape[-1] if function == "layer_norm_backward" else x.shape[1]
    gamma = np.ones(parameters, np.float64 if x.dtype == np.float64 else np.float32)
    result: rg.NormCache = FORWARDS[function.replace("backward", "forward")](x, gamma, gamma, **options)[1]
    return result


BACKWARD_REFUSALS: dict[str, Refusal] = {
    "dy of another shape": Refusal({}, ValueError, ("dy", "(4, 6, 6)", "(4, 6, 5)"), f32(4, 6, 6)),
    "dy of another rank": Refusal({}, ValueError, ("dy", "(120,)", "(4, 6, 5)"), f32(120)),
    "dy of another type": Refusal({}, TypeError, ("dy", "float64", "float32"), np.zeros(SHAPE)),
    "dy integers": Refusal({}, TypeError, ("dy", "int64", "float32"), np.zeros(SHAPE, int)),
    "dy byte order": Refusal({}, TypeError, ("dy", "byte order"), swapped(f32(*SHAPE))),
    "dy ragged": Refusal({}, TypeError, ("dy", "array"), [[1.0], [1.0, 2.0]]),
    "dy unaligned": Refusal({}, ValueError, ("dy", "align"), unaligned(SHAPE)),
    "need unknown": Refusal({"need": ("dx", "dw")}, ValueError, ("need", "dw", "dx, dgamma, dbeta")),
    "need a word": Refusal({"need": "gamma"}, ValueError, ("need", "gamma", "dgamma")),
    "out unknown": Refusal({"out": {"dw": f32(6)}}, ValueError, ("out", "dw", "dx, dgamma, dbeta")),
    "out an array": Refusal({"out": f32(*SHAPE)}, TypeError, ("out", "ndarray", "NormGradients")),
    "out a tuple": Refusal({"out": (f32(*SHAPE), None, None)}, TypeError, ("out", "tuple", "NormGradients")),
    "dx of another shape": Refusal({"out": {"dx": f32(4, 6)}}, ValueError, ("out.dx", "(4, 6)", "(4, 6, 5)")),
    "dx of another type": Refusal({"out": {"dx": np.zeros(SHAPE)}}, TypeError, ("out.dx", "float64", "float32")),
    "dx read-only": Refusal({"out": {"dx": read_only(f32(*SHAPE))}}, ValueError, ("out.dx", "read-only")),
    "dx stride 0": Refusal({"out": {"dx": stride_0(SHAPE)}}, ValueError, ("out.dx", "overlaps itself")),
    "dx a list": Refusal({"out": {"dx": [1.0]}}, TypeError, ("out.dx", "list", "ndarray")),
    "dgamma too long": Refusal({"out": {"dgamma": f32(7)}}, ValueError, ("out.dgamma", "(7,)", "(6,)")),
    "dbeta double": Refusal({"out": {"dbeta": np.zeros(6)}}, TypeError, ("out.dbeta", "float64", "float32")),
    "dgamma read-only": Refusal({"out": {"dgamma": read_only(f32(6))}}, ValueError, ("out.dgamma", "read-only")),
    "dgamma stride 0": Refusal(
        {"out": {"dgamma": np.lib.stride_tricks.as_strided(f32(1), (6,), (0,), writeable=True)}},
        ValueError,
        ("out.dgamma", "overlaps itself"),
    ),
    "a buffer that is not needed": Refusal(
        {"need": ["dx"], "out": {"dbeta": f32(6)}}, ValueError, ("out", "dbeta", "need")
    ),
    "nothing to add to": Refusal({"accumulate": True}, ValueError, ("accumulate", "out", "dx")),
    "nothing to add dbeta to": Refusal(
        {"accumulate": True, "out": {"dx": f32(*SHAPE), "dgamma": f32(6)}}, ValueError, ("accumulate", "dbeta")
    ),
    "no threads": Refusal({"num_threads": 0}, ValueError, ("threads", "0", "1")),
    "sums of another type": Refusal({"sums": (1, 2, 3)}, TypeError, ("sums", "tuple", "GradientSums")),
    "sums without a count": Refusal(
        {"sums": rg.GradientSums(0, np.zeros(6), np.zeros(6))}, ValueError, ("sums.count", "0", "1")
    ),
    "sum_dz too short": Refusal(
        {"sums": rg.GradientSums(20, np.zeros(5), np.zeros(6))}, ValueError, ("sums.sum_dz", "(5,)", "(6,)")
    ),
    "sum_dz_xhat too long": Refusal(
        {"sums": rg.GradientSums(20, np.zeros(6), np.zeros(7))}, ValueError, ("sums.sum_dz_xhat", "(7,)", "(6,)")
    ),
    "dgamma beside sums": Refusal(
        {"sums": rg.GradientSums(20, np.zeros(6), np.zeros(6)), "need": ("dx", "dgamma")},
        ValueError,
        ("dgamma", "sums"),
    ),
    "dbeta's buffer beside sums": Refusal(
        {"sums": rg.GradientSums(20, np.zeros(6), np.zeros(6)), "out": {"dbeta": f32(6)}},
        ValueError,
        ("dbeta", "sums"),
    ),
}


@pytest.mark.parametrize("name", BACKWARD_REFUSALS)
def test_backward_refuses(name: str) -> None:
    refusal = BACKWARD_REFUSALS[name]
    dy = data() if refusal.x is None else refusal.x
    out = refusal.options.get("out")
    buffers = [b for b in (out.values() if isinstance(out, dict) else [out]) if isinstance(b, np.ndarray)]
    saved = [b.copy() for b in buffers]
    cache = cached("batch_norm_backward")
    with pytest.raises(refusal.error) as caught:
        rg.batch_norm_backward(dy, cache, **refusal.options)
    message = str(caught.value)
    assert type(caught.value) is KINDS[refusal.error]
    assert message.startswith("batch_norm_backward: ")
    for word in refusal.words:
        assert word in message, message
    for buffer, before in zip(buffers, saved, strict=True):
        np.testing.assert_array_equal(buffer, before)


@pytest.mark.parametrize("function", BACKWARDS)
def test_backward_names_its_function_and_refuses_another_ones_cache(function: str) -> None:
    dy = data()
    with pytest.raises(ValueError, match=rf"^{function}: dy has shape \(3,\), but x has shape \(4, 6, 5\)"):
        BACKWARDS[function](f32(3), cached(function))
    kind = function.removesuffix("_backward")
    for other in BACKWARDS:
        if other != function:
            theirs = other.removesuffix("_backward")
            message = rf"^{function}: cache is of {theirs}_forward, must be of {kind}_forward$"
            with pytest.raises(ValueError, match=message):
                BACKWARDS[function](dy, cached(other))
    for wrong in (None, (dy,), tuple(cached(function))):
        message = rf"^{function}: cache must be what {kind}_forward returned, not \w+$"
        with pytest.raises(TypeError, match=message):
            BACKWARDS[function](dy, wrong)


def test_a_cache_of_another_call() -> None:
    """Of the same function and another shape or type."""
    with pytest.raises(ValueError, match=re.escape("dy has shape (4, 6, 5), but x has shape (2, 6, 5)")):
        rg.batch_norm_backward(data(), cached("batch_norm_backward", data((2, 6, 5))))
    with pytest.raises(TypeError, match="dy has dtype float32, must be float64 as x is"):
        rg.batch_norm_backward(data(), cached("batch_norm_backward", data(dtype=np.float64)))


@pytest.mark.parametrize(
    ("result", "other"),
    [
        ("dx", "x"),
        ("dx", "y"),
        ("dx", "dy"),
        ("dx", "gamma"),
        ("dgamma", "gamma"),
        ("dbeta", "gamma"),
        ("dgamma", "x"),
        ("dbeta", "dy"),
        ("dgamma", "dbeta"),
        ("dgamma", "dx"),
        ("dbeta", "dx"),
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_gradients_over_each_other_or_over_inputs(result: str, other: str, strided: bool) -> None:
    """Exactly in place is allowed to dx over dy alone; half over it is not."""
    room = np.zeros(400, np.float32)
    x, dy = data(seed=1), data(seed=2)
    gamma = np.ones(6, np.float32)
    out: dict[str, Array] = {"dx": f32(*SHAPE), "dgamma": f32(6), "dbeta": f32(6)}
    inputs = {"x": x, "dy": dy, "gamma": gamma}
    # The other one at the start of the room, the result over part of it.
    if other in inputs:
        part = room[: inputs[other].size].reshape(inputs[other].shape)
        part[...] = inputs[other]
        inputs[other] = part
    elif other in out:
        out[other] = room[: out[other].size].reshape(out[other].shape)
    size = out[result].size
    step = 2 if strided else 1
    out[result] = room[1 : 1 + step * size : step].reshape(out[result].shape)
    y_room = room[:120].reshape(SHAPE) if other == "y" else None
    y, cache = rg.batch_norm_forward(inputs["x"], inputs["gamma"], gamma.copy(), activation="relu", out=y_room)
    del y
    saved = room.copy()
    with pytest.raises(ValueError, match=r"^batch_norm_backward: out\.\w+ .*overlaps ") as caught:
        rg.batch_norm_backward(inputs["dy"], cache, out=out)
    assert f"out.{result}" in str(caught.value)
    np.testing.assert_array_equal(room, saved)


def test_beta_is_an_input_where_the_slope_is_found_from_it() -> None:
    x, dy, gamma, room = data(seed=1), data(seed=2), np.ones(6, np.float32), np.zeros(8, np.float32)
    beta, dbeta = room[:6], room[2:]
    for slope_from in ("input", "output"):
        _, cache = rg.batch_norm_forward(x, gamma, beta, activation="relu", slope_from=slope_from)
        if slope_from == "input":
            with pytest.raises(ValueError, match=r"^batch_norm_backward: out\.dbeta .*overlaps beta"):
                rg.batch_norm_backward(dy, cache, out={"dbeta": dbeta})
            assert not room.any()
        else:
            rg.batch_norm_backward(dy, cache, out={"dbeta": dbeta})


def test_batch_norm_cache_refuses() -> None:
    x, mean, var = data(), np.zeros(6), np.ones(6)
    make = functools.partial(rg.batch_norm_cache, x, mean=mean, var=var)
    for words, error, message in (
        ({"activation": "relu"}, ValueError, "y is missing: the slope of 'relu' is found from it"),
        ({"activation": "relu", "y": f32(4, 6)}, ValueError, r"y has shape \(4, 6\), but x has shape \(4, 6, 5\)"),
        ({"activation": "relu", "y": np.zeros(SHAPE)}, TypeError, "y has dtype float64, must be float32"),
        ({"activation": "relu", "y": unaligned(SHAPE)}, ValueError, "y is not aligned"),
        ({"activation": "gelu", "y": x}, ValueError, "activation 'gelu': .*slope_from='input'"),
        ({"gamma": f32(5)}, ValueError, r"gamma has shape \(5,\), but"),
        ({"beta": np.ones(6)}, TypeError, "beta has dtype float64, must be float32"),
        ({"mean": None}, ValueError, "mean is missing"),
        ({"var": np.ones(3)}, ValueError, r"var has shape \(3,\), but"),
        ({"slope_from": "z"}, ValueError, "slope_from is 'z', must be 'output' or 'input'"),
        ({"eps": -1.0}, ValueError, "eps is -1"),
    ):
        with pytest.raises(error, match=f"^batch_norm_cache: {message}"):
            make(**words)
    with pytest.raises(ValueError, match=r"^batch_norm_cache: x is not aligned"):
        rg.batch_norm_cache(unaligned(SHAPE), mean=mean, var=var)


# ---- statistics calls ------------------------------------------------------------------------------------------------


def test_statistics_calls_refuse() -> None:
    with pytest.raises(TypeError, match=r"^batch_norm_statistics: x has dtype int64"):
        rg.batch_norm_statistics(np.zeros(SHAPE, np.int64))
    with pytest.raises(ValueError, match=r"^batch_norm_statistics: channel_axis is 5, but x has 3 axes"):
        rg.batch_norm_statistics(data(), channel_axis=5)
    with pytest.raises(ValueError, match=r"^batch_norm_statistics: the number of threads is 0"):
        rg.batch_norm_statistics(data(), num_threads=0)
    with pytest.raises(ValueError, match=r"^batch_norm_statistics: x .*align"):
        rg.batch_norm_statistics(unaligned(SHAPE))
    cache = cached("batch_norm_backward")
    with pytest.raises(ValueError, match=r"^batch_norm_gradient_sums: dy .*align"):
        rg.batch_norm_gradient_sums(unaligned(SHAPE), cache)
    with pytest.raises(ValueError, match=r"^batch_norm_gradient_sums: dy has shape \(3,\)"):
        rg.batch_norm_gradient_sums(f32(3), cache)
    with pytest.raises(TypeError, match=r"^batch_norm_gradient_sums: cache must be what batch_norm_forward returned"):
        rg.batch_norm_gradient_sums(data(), None)
    with pytest.raises(ValueError, match=r"^batch_norm_gradient_sums: cache is of layer_norm_forward"):
        rg.batch_norm_gradient_sums(data(), cached("layer_norm_backward"))
    with pytest.raises(ValueError, match=r"^combine_statistics: parts is empty, needs at least 1"):
        rg.combine_statistics([])
    with pytest.raises(ValueError, match=r"^combine_statistics: parts disagree in shape: \(3,\) and \(4,\)"):
        rg.combine_statistics(rg.NormStatistics(2, np.zeros(n), np.zeros(n)) for n in (3, 4))


# ---- the engine's own checks -----------------------------------------------------------------------------------------


def engine() -> _core.NormProblem:
    return _core.NormProblem([4, 6, 5], "rcr", 1, 0, 1e-5, 0, 0.0, 0.0, False)


def refused(answer: Any) -> tuple[str, str]:
    """The argument that the engine refused, and why; nothing is raised, nothing written."""
    assert type(answer) is _core.Refusal
    return answer.argument, answer.reason.name


def test_engine_checks_every_view_itself() -> None:
    """Whatever stands above it: no view leaves its buffer."""
    x, statistics = data(), np.zeros((2, 6))

    def forward(**change: Any) -> Any:
        arguments: dict[str, Any] = {
            "x": x,
            "gamma": None,
            "beta": None,
            "y": f32(*SHAPE),
            "keep": None,
            "statistics": statistics,
            "statistics_given": False,
            "overlap_checked": False,
            "threads": 1,
        }
        return engine().forward(**arguments | change)

    assert forward() is None
    written = f32(*SHAPE)
    for change, why in (
        ({"x": x[:3]}, ("x", "shape")),
        ({"x": x.reshape(4, 30)}, ("x", "shape")),
        ({"x": x.astype(np.float64)}, ("x", "dtype")),
        ({"x": x.view(np.int32)}, ("x", "dtype")),
        ({"x": x.astype(">f4")}, ("x", "dtype")),
        ({"x": unaligned(SHAPE)}, ("x", "layout")),
        ({"x": x.tolist()}, ("x", "type")),
        ({"x": memoryview(x)}, ("x", "type")),
        ({"x": np.ma.masked_array(x)}, ("x", "type")),
        ({"y": f32(4, 6, 4)}, ("out", "shape")),
        ({"y": np.zeros(SHAPE, np.float16)}, ("out", "dtype")),
        ({"y": np.broadcast_to(f32(1), SHAPE)}, ("out", "type")),
        ({"y": x}, ("out", "in_place")),
        ({"y": x[::-1]}, ("out", "overlap")),
        ({"y": as_strided(f32(200), SHAPE, (4, 4, 4))}, ("out", "self_overlap")),
        ({"keep": f32(4, 6, 4)}, ("keep_x", "shape")),
        ({"keep": np.zeros(SHAPE)}, ("keep_x", "dtype")),
        ({"keep": unaligned(SHAPE)}, ("keep_x", "layout")),
        ({"gamma": f32(5)}, ("gamma", "shape")),
        ({"gamma": f32(12)[::2]}, ("gamma", "layout")),
        ({"beta": np.ones(6)}, ("beta", "dtype")),
        ({"statistics": np.zeros((2, 5))}, ("statistics", "shape")),
        ({"statistics": np.zeros((2, 6), np.float32)}, ("statistics", "dtype")),
        ({"statistics": np.zeros((2, 12))[:, ::2]}, ("statistics", "layout")),
    ):
        assert refused(forward(**{"y": written} | change)) == why, change
    assert not written.any()
    read_only_views = ("y", f32(*SHAPE)), ("keep", f32(*SHAPE)), ("statistics", np.zeros((2, 6)))
    for name, array in read_only_views:
        assert refused(forward(**{name: read_only(array)}))[1] == "type"
    for missing in ("x", "statistics"):
        with pytest.raises(TypeError, match="forward"):
            forward(**{missing: None})


def test_engine_checks_backward_too() -> None:
    x, dy, statistics = data(), data(seed=1), np.ones((2, 6))
    cache = rg.NormCache(None, x, None, None, None, statistics, False, False)  # type: ignore[arg-type]

    def backward(**change: Any) -> Any:
        arguments: dict[str, Any] = {
            "dy": dy,
            "sum_dz": None,
            "sum_dz_xhat": None,
            "count": None,
            "dx": f32(*SHAPE),
            "dgamma": f32(6),
            "dbeta": f32(6),
            "accumulate": False,
            "overlap_checked": False,
            "threads": 1,
        }
        saved = {name: change.pop(name) for name in list(change) if name in cache._fields}
        return engine().backward(**arguments | change, cache=cache._replace(**saved))

    assert backward() is None
    one = f32(6)
    for change, why in (
        ({"dy": dy[:2]}, ("dy", "shape")),
        ({"dx": f32(4, 6)}, ("dx", "shape")),
        ({"dx": x}, ("dx", "overlap")),
        ({"dgamma": f32(5)}, ("dgamma", "shape")),
        ({"dbeta": f32(12)[::2]}, ("dbeta", "layout")),
        ({"dgamma": one, "dbeta": one}, ("dgamma", "overlap")),
        ({"gamma": f32(7)}, ("gamma", "shape")),
        ({"statistics": np.ones((2, 7))}, ("statistics", "shape")),
        ({"sum_dz": np.ones(6)}, ("sum_dz_xhat", "missing")),
        ({"sum_dz": np.ones(5), "sum_dz_xhat": np.ones(6)}, ("sum_dz", "shape")),
        ({"sum_dz": np.ones(6), "sum_dz_xhat": np.ones(6)}, ("count", "missing")),
        ({"sum_dz": np.ones(6), "sum_dz_xhat": np.ones(6), "count": np.ones(2)}, ("count", "shape")),
        ({"x": None}, ("x", "missing")),
        ({"statistics": None}, ("statistics", "missing")),
    ):
        assert refused(backward(**change)) == why, change
    assert backward(dx=dy) is None
    with pytest.raises(TypeError, match="backward"):
        backward(dy=None)
    with pytest.raises(TypeError, match="the cache is not a NormCache"):
        engine().backward(dy, (x,), None, None, 1.0, None, None, None, False, False, 1)


def test_engine_looks_at_what_the_slope_is_found_from() -> None:
    cache = rg.NormCache(None, data(), None, None, None, np.ones((2, 6)), False, False)  # type: ignore[arg-type]

    def sums(problem: Any, **change: Any) -> Any:
        return problem.gradient_sums(data(), cache._replace(**change), np.empty(6), np.empty(6), False, 1)

    by_input = _core.NormProblem([4, 6, 5], "rcr", 1, 0, 1e-5, 34, 0.0, 0.0, True)
    assert sums(by_input) is None
    assert refused(sums(by_input, gamma=f32(7))) == ("gamma", "shape")
    assert refused(sums(by_input, beta=f32(5))) == ("beta", "shape")
    assert refused(sums(by_input, beta=f32(12)[::2])) == ("beta", "layout")
    by_output = _core.NormProblem([4, 6, 5], "rcr", 1, 0, 1e-5, 1, 0.0, 0.0, False)
    assert refused(sums(by_output)) == ("y", "missing")
    with pytest.raises(ValueError, match="the output does not determine the slope"):
        _core.NormProblem([4, 6, 5], "rcr", 1, 0, 1e-5, 34, 0.0, 0.0, False)


def test_public_names_are_added_once_and_to_argument_errors_alone() -> None:
    with pytest.raises(TypeError, match=r"^batch_norm_forward\(\) missing 1 required positional argument: 'x'$"):
        rg.batch_norm_forward()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^huber: delta is 0\.0, must be"):
        rg.huber(data(), data(), delta=0)
    with pytest.raises(ValueError, match=r"^LstmCache\.gates: cell is 1, must be below 1"):
        rg.lstm_cache(f32(2, 1, 3), (f32(8, 3), f32(8, 2))).gates(1)


def test_engine_refuses_impossible_problems() -> None:
    for arguments in (
        ([4, 6], "rcr", 1),
        ([4, -6, 5], "rcr", 1),
        ([4, 0, 5], "rcr", 1),
        ([4, 6, 5], "ncr", 4),
        ([4, 6, 5], "ncr", 0),
        ([1] * 65, "n" * 65, 1),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            _core.NormProblem(*arguments, 0, 1e-5, 0, 0.0, 0.0, False)


def test_bfloat16_is_known_by_its_type() -> None:
    x = data(dtype=cases.storage_dtype("bfloat16"))
    y, _ = rg.batch_norm_forward(x)
    assert y.dtype == x.dtype
    with pytest.raises(TypeError, match=r"x has dtype float8_e4m3fn; it must be float32"):
        rg.batch_norm_forward(np.zeros(SHAPE, "float8_e4m3fn"))
