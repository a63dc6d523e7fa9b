"""LSTM: every call that is refused."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest

import retrograd as rg
from retrograd import LstmActivations, LstmWeights, _core
from support.arrays import Array, assert_same_bits
from support.errors import KINDS
from support.lstm import H, cell, f32, flat, random

X = (4, 3, 5)


def gates(*shape: int, **lacking: Any) -> tuple[Any, ...]:
    return tuple(lacking.get(gate, f32(*shape)) for gate in "ifgo")


def stride_0(*shape: int) -> Array:
    return np.lib.stride_tricks.as_strided(f32(*shape[1:]), shape, (0, *f32(*shape[1:]).strides), writeable=True)


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def unaligned(*shape: int) -> Array:
    return np.frombuffer(bytearray(math.prod(shape) * 4 + 1), np.uint8)[1:].view(np.float32).reshape(shape)


class Refusal(NamedTuple):
    """A call that must fail, and what its message must say besides the function's name."""

    options: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]


def shape_error(words: str, **options: Any) -> Refusal:
    return Refusal(options, ValueError, tuple(words.split("|")))


def type_error(words: str, **options: Any) -> Refusal:
    return Refusal(options, TypeError, tuple(words.split("|")))


BIG = np.dtype(np.float32).newbyteorder()
FORWARD_REFUSALS: dict[str, Refusal] = {
    # x
    "x has 2 axes": shape_error("x|(4, 3)|3 axes (T, N, I)", x=f32(4, 3)),
    "x has 4 axes, batch first": shape_error("x|(1, 4, 3, 5)|3 axes (N, T, I)", x=f32(1, 4, 3, 5), batch_first=True),
    "x double": type_error("wx|float32|float64", x=np.zeros(X), out=None),
    "x half": type_error("x|float16|float32 or float64", x=np.zeros(X, np.float16)),
    "x integer": type_error("x|int64|float32", x=np.zeros(X, np.int64)),
    "x of the other byte order": type_error("x|byte order|astype", x=np.zeros(X, BIG)),
    "x unaligned": shape_error("x|align", x=unaligned(*X)),
    "x ragged": type_error("x|array", x=[[1.0], [1.0, 2.0]]),
    # weights
    "weights None": type_error("weights|LstmWeights|NoneType", weights=None),
    "weights an array": type_error("weights|LstmWeights|ndarray", weights=f32(24, 5)),
    "weights empty": shape_error("weights|empty|1", weights=[]),
    "weights of one array": shape_error("weights|1 arrays|2 to 9", weights=(f32(24, 5),)),
    "cell of ten": shape_error("weights[0]|10 arrays|2 to 9", weights=[[None] * 10]),
    "cell a number": type_error("weights[1]|LstmWeights|float", weights=[cell(), 1.0]),
    "wx None": shape_error("wx is None", weights=cell(wx=None)),
    "wh None": shape_error("wh is None", weights=cell(wh=None)),
    "wx too wide": shape_error("wx|(24, 6)|(24, 5)|(4, 6, 5)", weights=cell(wx=f32(24, 6))),
    "wx too short": shape_error("wx|(23, 5)|(24, 5)", weights=cell(wx=f32(23, 5))),
    "wx transposed": shape_error("wx|(5, 24)|(24, 5)", weights=cell(wx=f32(5, 24))),
    "wx of one axis": shape_error("wx|(120,)|(24, 5)", weights=cell(wx=f32(120))),
    "wh not square": shape_error("wh|(20, 6)|(24, 6)", weights=cell(wh=f32(20, 6))),
    "wh of one axis": shape_error("wh|(4H, H)|(144,)", weights=cell(wh=f32(144))),
    "wh empty": shape_error("wh|(0, 0)|hidden size is 0|1", weights=cell(wh=f32(0, 0))),
    "b too long": shape_error("b has|(25,)|(24,)|(4, 6)", weights=cell(b=f32(25))),
    "b a matrix": shape_error("b has|(24, 1)|(24,)", weights=cell(b=f32(24, 1))),
    "peephole too short": shape_error("peephole|(23,)|(24,)", weights=cell(peephole=f32(23))),
    "peephole not square": shape_error("peephole|(24, 5)|(24, 6)", weights=cell(peephole=f32(24, 5))),
    "three gates": shape_error("weights.wx|3 arrays|4", weights=cell(wx=gates(6, 5)[:3])),
    "a gate of wx None": shape_error("wx of gate g is None", weights=cell(wx=gates(6, 5, g=None))),
    "a gate of wh None": shape_error("wh is None", weights=cell(wh=gates(6, 6, i=None))),
    "a gate of wx too wide": shape_error("wx of gate f|(6, 4)|(6, 5)", weights=cell(wx=gates(6, 5, f=f32(6, 4)))),
    "a gate of b too short": shape_error("b of gate o|(5,)|(6,)", weights=cell(b=gates(6, o=f32(5)))),
    "a gate of b double": type_error("b of gate i|float64|float32", weights=cell(b=gates(6, i=np.zeros(6)))),
    "peepholes of both kinds": shape_error("diagonal|full", weights=[cell(), cell(wx=f32(24, 6), peephole=f32(24, 6))]),
    "second layer reads x": shape_error("weights[1].wx|(24, 5)|(24, 6)", weights=[cell(), cell()]),
    "second layer reads one direction": shape_error(
        "weights[2].wx|(24, 6)|(24, 12)",
        weights=[cell(), cell(), cell(wx=f32(24, 6))] * 2,
        bidirectional=True,
        out=None,
    ),
    "odd number of directions": shape_error("weights has 3 cells|2 each", weights=[cell()] * 3, bidirectional=True),
    "one cell for two directions": shape_error("weights has 1 cells|2 each", bidirectional=True),
    "wh double": type_error("wh|float64|float32", weights=cell(wh=np.zeros((24, 6)))),
    "b integer": type_error("b has|int64|float32", weights=cell(b=np.zeros(24, np.int64))),
    "b of the other byte order": type_error("b is|byte order", weights=cell(b=np.zeros(24, BIG))),
    "peephole half": type_error("peephole|float16|float32", weights=cell(peephole=np.zeros(24, np.float16))),
    "wx unaligned": shape_error("wx|align", weights=cell(wx=unaligned(24, 5))),
    # states
    "h0 for many cells": shape_error("h0|(1, 3, 6)|(N, H) = (3, 6)", h0=f32(1, 3, 6)),
    "h0 for one cell": shape_error("h0|(3, 6)|(cells, N, H) = (1, 3, 6)", h0=f32(3, 6), weights=[cell()]),
    "c0 of other samples": shape_error("c0|(4, 6)|(3, 6)", c0=f32(4, 6)),
    "c0 double": type_error("c0|float64|float32", c0=np.zeros((3, 6))),
    "h0 integer": type_error("h0|int32|float32", h0=np.zeros((3, 6), np.int32)),
    "h0 unaligned": shape_error("h0|align", h0=unaligned(3, 6)),
    # ragged batches
    "lengths too many": shape_error("lengths|(4,)|(3,)|3 samples", lengths=[1, 2, 3, 4]),
    "lengths scalar": shape_error("lengths|()|(3,)", lengths=4),
    "lengths too long": shape_error("lengths has 5|0 to 4|steps", lengths=[4, 5, 1]),
    "lengths negative": shape_error("lengths has -1|0 to 4", lengths=[4, -1, 1]),
    "lengths float": type_error("lengths|float64|integers", lengths=[4.0, 1.0, 2.0]),
    "lengths bool": type_error("lengths|bool|integers", lengths=[True, True, False]),
    "lengths huge": shape_error(f"lengths has {2**64 - 1}|0 to 4", lengths=np.array([2**64 - 1, 1, 1], np.uint64)),
    "batch_sizes too few": shape_error("batch_sizes|(3,)|(4,)|4 steps", batch_sizes=[3, 3, 3]),
    "batch_sizes too large": shape_error("batch_sizes has 4|0 to 3|samples", batch_sizes=[3, 4, 3, 3]),
    "batch_sizes negative": shape_error("batch_sizes has -2|0 to 3", batch_sizes=[3, -2, 3, 3]),
    "batch_sizes strings": type_error("batch_sizes|integers", batch_sizes=["3"] * 4),
    "lengths and batch_sizes": shape_error("lengths|batch_sizes|both", lengths=[1, 1, 1], batch_sizes=[3] * 4),
    # options
    "dropout 1": shape_error("dropout is 1.0|below 1", dropout=1),
    "dropout negative": shape_error("dropout is -0.1|at least 0", dropout=-0.1),
    "dropout NaN": shape_error("dropout is nan|at least 0", dropout=math.nan),
    "dropout wrong in inference too": shape_error("dropout is 7.0|below 1", dropout=7, training=False),
    "dropout a string": type_error("dropout|number|str", dropout="0.5"),
    "dropout unhashable": type_error("dropout|number|list", dropout=[0.5]),
    "seed negative": shape_error("seed is -1|0", seed=-1),
    "seed too large": shape_error(f"seed is {2**64}|2**64", seed=2**64),
    "seed float": type_error("seed|int|float", seed=1.0),
    "reads nothing": shape_error("output_gate_reads|'next'|'new' or 'old'", output_gate_reads="next"),
    "reads a number": shape_error("output_gate_reads|1|'new' or 'old'", output_gate_reads=1),
    "activations a name": type_error("activations|LstmActivations|str", activations="tanh"),
    "activations None": type_error("activations|LstmActivations|NoneType", activations=None),
    "four activations": shape_error("activations|4|5", activations=("sigmoid",) * 4),
    "unknown activation": shape_error("activations.g|'tahn'|tanh", activations=LstmActivations(g="tahn")),
    "activation that needs alpha": shape_error("activations.h|'linear'|alpha", activations=LstmActivations(h="linear")),
    "activation a number": type_error("activations.i|int", activations=LstmActivations(i=3)),  # type: ignore[arg-type]
    "activation unhashable": type_error("activations.o|list", activations=LstmActivations(o=["tanh"])),  # type: ignore[arg-type]
    "no threads": shape_error("threads|0|1", num_threads=0),
    "threads float": type_error("threads|float", num_threads=2.0),
    # out
    "out a list": type_error("out.y|ndarray|list", out=[1.0]),
    "out of another name": shape_error("out has 'h'|y, hn and cn", out={"h": f32(3, 6)}),
    "y of another shape": shape_error("out.y|(4, 3, 5)|(4, 3, 6)", out=f32(4, 3, 5)),
    "y for batch first": shape_error("out.y|(3, 4, 6)|(4, 3, 6)", out={"y": f32(3, 4, 6)}),
    "y double": type_error("out.y|float64|float32", out=np.zeros((4, 3, 6))),
    "y read-only": shape_error("out.y|read-only", out=read_only(f32(4, 3, 6))),
    "y stride 0": shape_error("out.y|overlaps itself", out=stride_0(4, 3, 6)),
    "y unaligned": shape_error("out.y|align", out=unaligned(4, 3, 6)),
    "hn of another shape": shape_error("out.hn|(1, 3, 6)|(3, 6)", out={"hn": f32(1, 3, 6)}),
    "hn a list": type_error("out.hn|ndarray|list", out={"hn": [1.0]}),
    "hn read-only": shape_error("out.hn|read-only", out={"hn": read_only(f32(3, 6))}),
    "cn integer": type_error("out.cn|int32|float32", out={"cn": np.zeros((3, 6), np.int32)}),
    "cn stride 0": shape_error("out.cn|overlaps itself", out={"cn": stride_0(3, 6)}),
    "cn of the other byte order": type_error("out.cn|byte order", out={"cn": np.zeros((3, 6), BIG)}),
}


def assert_refused(refusal: Refusal, function: str, call: Any) -> None:
    with pytest.raises(refusal.error) as caught:
        call()
    assert type(caught.value) is KINDS[refusal.error]
    message = str(caught.value)
    assert message.startswith(f"{function}: "), message
    for word in refusal.words:
        assert word in message, (word, message)


@pytest.mark.parametrize("name", FORWARD_REFUSALS)
def test_forward_refuses(name: str) -> None:
    refusal = FORWARD_REFUSALS[name]
    words = {"x": f32(*X), "weights": cell()} | refusal.options
    nans = {"y": np.full((4, 3, 6), math.nan, np.float32)}
    if isinstance(words["weights"], LstmWeights):
        nans |= {name: np.full((3, 6), math.nan, np.float32) for name in ("hn", "cn")}
    given = words.pop("out", {})
    if isinstance(given, dict):
        given = {**nans, **given}
    x, weights, h0, c0 = (words.pop(key, None) for key in ("x", "weights", "h0", "c0"))
    for _ in range(2):  # no refusal is forgotten because the same call was made before
        assert_refused(refusal, "lstm_forward", lambda: rg.lstm_forward(x, weights, h0, c0, out=given, **words))
    if not {"training", "num_threads", "out"} & refusal.options.keys():
        assert_refused(refusal, "lstm_cache", lambda: rg.lstm_cache(x, weights, h0, c0, **words))
    for buffer in nans.values():
        assert np.isnan(buffer).all()


BACKWARD_REFUSALS: dict[str, Refusal] = {
    "cache None": type_error("cache|lstm_forward|NoneType", cache=None),
    "cache a buffer": type_error("cache|lstm_forward|bytearray", cache=bytearray(3)),
    "dy of another shape": shape_error("dy|(3, 4, 6)|(4, 3, 6)", dy=f32(3, 4, 6)),
    "dy double": type_error("dy|float64|float32", dy=np.zeros((4, 3, 6))),
    "dy of the other byte order": type_error("dy|byte order", dy=np.zeros((4, 3, 6), BIG)),
    "dy unaligned": shape_error("dy|align", dy=unaligned(4, 3, 6)),
    "dhn of another shape": shape_error("dhn|(1, 3, 6)|(3, 6)", dhn=f32(1, 3, 6)),
    "dcn double": type_error("dcn|float64|float32", dcn=np.zeros((3, 6))),
    "dcn ragged": type_error("dcn|array", dcn=[[1.0], [1.0, 2.0]]),
    "need of another name": shape_error("need has 'dw'|dx, dwx", need=["dx", "dw"]),
    "need of what is not there": shape_error("need has 'dpeephole'|forward was given no peephole", need=["dpeephole"]),
    "no threads": shape_error("threads|0|1", num_threads=0),
    "out a list": type_error("out|LstmGradients|list", out=[]),
    "out of another name": shape_error("out has 'dw'|dweights", out={"dw": f32(3)}),
    "dx not needed": shape_error("out|dx|need", out={"dx": f32(4, 3, 5)}, need=["dh0"]),
    "dh0 not needed": shape_error("out|dh0|need", out={"dh0": f32(3, 6)}, need=["dx"]),
    "dweights not needed": shape_error(
        "out|dweights|need", out={"dweights": LstmWeights(f32(24, 5), None)}, need=["dx"]
    ),
    "dwh not needed": shape_error(
        "out.dweights.wh|need", out={"dweights": LstmWeights(None, f32(24, 6))}, need=["dwx"]
    ),
    "dpeephole not there": shape_error(
        "out.dweights.peephole|not given", out={"dweights": LstmWeights(None, None, None, f32(24))}
    ),
    "dx of another shape": shape_error("out.dx|(4, 3, 6)|(4, 3, 5)", out={"dx": f32(4, 3, 6)}),
    "dx double": type_error("out.dx|float64|float32", out={"dx": np.zeros(X)}),
    "dx read-only": shape_error("out.dx|read-only", out={"dx": read_only(f32(*X))}),
    "dx stride 0": shape_error("out.dx|overlaps itself", out={"dx": stride_0(*X)}),
    "dh0 for many cells": shape_error("out.dh0|(1, 3, 6)|(3, 6)", out={"dh0": f32(1, 3, 6)}),
    "dc0 a list": type_error("out.dc0|ndarray|list", out={"dc0": [1.0]}),
    "dwx of another shape": shape_error(
        "out.dweights.wx|(4, 6, 5)|(24, 5)", out={"dweights": LstmWeights(f32(4, 6, 5), None)}
    ),
    "dwx of four gates": shape_error(
        "out.dweights.wx|(24, 5)|(6, 5)", out={"dweights": LstmWeights(gates(6, 5), None)}
    ),
    "dwh a list": type_error("out.dweights.wh|ndarray|float", out={"dweights": LstmWeights(None, 1.0)}),  # type: ignore[arg-type]
    "db read-only": shape_error(
        "out.dweights.b|read-only", out={"dweights": LstmWeights(None, None, read_only(f32(24)))}
    ),
    "dweights of a list": shape_error("out.dweights|2 cells|1", out={"dweights": [cell(peephole=None)] * 2}),
    "dweights a number": type_error("out.dweights|LstmWeights|int", out={"dweights": 3}),
    "accumulate without dx": shape_error("accumulate|dx", accumulate=True, need=["dx"]),
    "accumulate without dwh": shape_error(
        "accumulate|dweights.wh",
        accumulate=True,
        need=["dwx", "dwh"],
        out={"dweights": LstmWeights(f32(24, 5), None)},
    ),
    "dx over dy": shape_error("out.dx|overlaps dy", dy=(shared := f32(4, 3, 6)), out={"dx": shared[:, :, :5]}),
    "dx over itself": shape_error(
        "overlaps", out={"dx": (room := f32(200))[:60].reshape(X), "dh0": room[50:68].reshape(3, 6)}
    ),
}
# Of those, the buffers must be as they were.
WITH_BUFFERS = ("dx over dy", "dx over itself", "accumulate without dwh", "dwh not needed", "dx not needed")


@pytest.mark.parametrize("name", BACKWARD_REFUSALS)
def test_backward_refuses(name: str) -> None:
    refusal = BACKWARD_REFUSALS[name]
    words = dict(refusal.options)
    result = rg.lstm_forward(random(*X), cell(peephole=None))
    cache, dy = words.pop("cache", result.cache), words.pop("dy", f32(4, 3, 6))
    out = words.get("out")
    buffers = [a for a in flat(out.values()) if isinstance(a, np.ndarray)] if name in WITH_BUFFERS else []
    before = [a.copy() for a in buffers]
    assert_refused(refusal, "lstm_backward", lambda: rg.lstm_backward(dy, cache, **words))
    assert_same_bits(buffers, before)


def test_backward_refuses_gates_in_another_form() -> None:
    weights = cell(b=gates(H, g=None), peephole=None)
    cache = rg.lstm_forward(random(*X), weights).cache
    for b, words in (
        (f32(24), r"out.dweights.b has the form \(24,\), the weights have \(\(6,\), \(6,\), None, \(6,\)\)"),
        (gates(H), "out.dweights.b of gate g is a buffer, but that gate was given none"),
        (gates(H, g=None, o=f32(5)), r"out.dweights.b of gate o has shape \(5,\), the result has \(6,\)"),
    ):
        with pytest.raises(ValueError, match=f"^lstm_backward: {words}"):
            rg.lstm_backward(f32(4, 3, 6), cache, out={"dweights": LstmWeights(None, None, b)})  # type: ignore[arg-type]


def test_cache_size_refuses() -> None:
    good: dict[str, Any] = {"seq_len": 4, "batch_size": 3, "input_size": 5, "hidden_size": 6}
    for change, error, words in (
        ({"seq_len": -1}, ValueError, "seq_len is -1, must be at least 0"),
        ({"hidden_size": 0}, ValueError, "hidden_size is 0, must be at least 1"),
        ({"num_layers": 0}, ValueError, "num_layers is 0, must be at least 1"),
        ({"input_size": 2.5}, TypeError, "input_size must be an int, not float"),
        ({"dtype": np.float16}, TypeError, "dtype float16; an LSTM is computed in float32 or float64"),
        ({"lengths": [1, 2]}, ValueError, r"lengths has shape \(2,\), must be \(3,\)"),
        ({"batch_sizes": [1, 2, 3, 4]}, ValueError, "batch_sizes has 4, must be from 0 to 3"),
    ):
        with pytest.raises(error, match=f"^lstm_cache_size: .*{words}"):
            rg.lstm_cache_size(**good | change)
    assert rg.lstm_cache_size(4, 3, 5, 32) < rg.lstm_cache_size(4, 3, 5, 32, dtype="float64")


def test_engine_checks_every_view_itself() -> None:
    """Whatever Python believes, the engine compares sizes with what the buffers say."""
    sizes, activations = (4, 3, 5, 6, 0, 1, 1), [(3, 0.0, 0.0)] * 5
    problem = _core.RecurrentProblem(0, *sizes, 0, activations, 0, False, False, False, 0.0, 0.0, 0, 0.0, 0, False, 0.0)
    parts = (f32(24, 5), f32(24, 6), None, None)
    size = problem.cache_bytes(12)
    cache, outputs = np.zeros(size, np.uint8), (f32(4, 3, 6), f32(1, 3, 6), f32(1, 3, 6))

    def run(
        x: Any = None,
        indices: Any = None,
        cells: Any = None,
        buffer: Any = cache,
        active: Any = None,
        order: Any = None,
    ) -> Any:
        x, cells = f32(*X) if x is None else x, [parts] if cells is None else cells
        inputs = (None, x, indices, cells, None, None, active, order, 0, None, None, None, None)
        return problem.forward(inputs, buffer, 1, *outputs, False, 1)

    assert run() is None
    indices = np.array([[0, 6, 2]] * 4)
    assert run(x=f32(7, 5), indices=indices) is None
    for array in outputs:
        array.fill(7)
    for wrong, why in (
        ({"x": f32(7, 5), "indices": np.full((4, 3), 7)}, ("x", "out_of_range")),
        ({"x": f32(7, 5), "indices": np.full((4, 3), -1)}, ("x", "out_of_range")),
        ({"x": f32(4, 3, 6)}, ("x", "shape")),
        ({"indices": indices}, ("x", "shape")),
        ({"x": f32(7, 5)}, ("x", "shape")),
        ({"x": f32(7, 4), "indices": indices}, ("x", "shape")),
        ({"x": f32(7, 10)[:, ::2], "indices": indices}, ("x", "layout")),
        ({"x": f32(7, 5), "indices": indices.T}, ("x", "shape")),
        ({"x": f32(7, 5), "indices": indices.astype(np.int32)}, ("x", "dtype")),
        ({"x": np.zeros(X)}, ("x", "dtype")),
        ({"x": f32(4, 3, 10)[:, :, ::2]}, ("x", "layout")),
        ({"cells": [(None, *parts[1:])]}, ("wx", "missing")),
        ({"cells": [parts[:1]]}, ("wh", "missing")),
        ({"cells": [(f32(24, 4), *parts[1:])]}, ("wx", "shape")),
        ({"cells": [((f32(6, 5), *[f32(12, 5)[::2]] * 3), *parts[1:])]}, ("wx", "layout")),
        ({"buffer": cache[:-1]}, ("cache", "shape")),
        ({"buffer": cache.view(np.int8)}, ("cache", "dtype")),
    ):
        refusal = run(**wrong)
        assert type(refusal) is _core.Refusal
        assert (refusal.argument, refusal.reason.name) == why, wrong
    assert all((array == 7).all() for array in outputs)
    for impossible in (
        {"cells": []},
        {"cells": [((f32(6, 5),) * 3, *parts[1:])]},
        {"active": np.full(4, 4, np.int64)},
        {"active": np.full(3, 1, np.int64)},
        {"order": np.zeros(3, np.int64)},
        {"order": np.array([0, 1, 3])},
    ):
        with pytest.raises(ValueError, match=r"\w"):
            run(**impossible)
    for sizes in (
        (-1, 3, 5, 6, 0, 1, 1),
        (4, 3, 5, 0, 0, 1, 1),
        (4, 3, 5, 6, 7, 1, 1),
        (4, 3, 5, 6, 0, 0, 1),
        (4, 3, 5, 6, 0, 1, 3),
    ):
        with pytest.raises(ValueError, match="a size is out of range"):
            _core.RecurrentProblem(0, *sizes, 0, activations, 0, False, False, False, 0.0, 0.0, 0, 0.0, 0, False, 0.0)
