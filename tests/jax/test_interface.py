"""Errors while tracing and at run time, the interface to XLA, and imports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd
from retrograd import GruWeights, LstmActivations, LstmWeights, RnnWeights
from support.tools import tool
from support.waiting import PATIENCE

BIND = Path(__file__).parents[2] / "src" / "bind"


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


def cell(inputs: int = 3, units: int = 2, **parts: Any) -> LstmWeights:
    return LstmWeights(ones(4 * units, inputs), ones(4 * units, units))._replace(**parts)


def gru_cell(inputs: int = 3, units: int = 2, **parts: Any) -> GruWeights:
    return GruWeights(ones(3 * units, inputs), ones(3 * units, units))._replace(**parts)


def rnn_cell(inputs: int = 3, units: int = 2, **parts: Any) -> RnnWeights:
    return RnnWeights(ones(units, inputs), ones(units, units))._replace(**parts)


# ---- errors while tracing -------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "gamma": (
        lambda rj: rj.layer_norm(ones(2, 3), ones(4)),
        ValueError,
        r"layer_norm: gamma has shape \(4,\), but x of shape \(2, 3\) needs \(3,\)",
    ),
    "beta": (
        lambda rj: rj.batch_norm(ones(2, 3), None, ones(1, 3)),
        ValueError,
        r"batch_norm: beta has shape \(1, 3\), but x of shape \(2, 3\) needs \(3,\)",
    ),
    "dtype of gamma": (
        lambda rj: rj.group_norm(ones(2, 4, dtype=np.float16), ones(4, dtype=np.float16), num_groups=2),
        TypeError,
        "group_norm: gamma has dtype float16, must be float32 for such data",
    ),
    "dtype of x": (
        lambda rj: rj.instance_norm(ones(2, 3, dtype=np.int32)),
        TypeError,
        "instance_norm: x has dtype int32; it must be float32, float64, float16 or bfloat16",
    ),
    "groups": (
        lambda rj: rj.group_norm(ones(2, 4), num_groups=3),
        ValueError,
        "group_norm: num_groups is 3, which does not divide the 4 channels of x",
    ),
    "axis": (lambda rj: rj.layer_norm(ones(2, 3), axis=2), ValueError, "layer_norm: axis is 2, but x has 2 axes"),
    "mean": (
        lambda rj: rj.batch_norm(ones(2, 3), mean=ones(2), var=ones(3)),
        ValueError,
        r"batch_norm: mean has shape \(2,\), but x of shape \(2, 3\) has statistics of shape \(3,\)",
    ),
    "one statistic": (
        lambda rj: rj.batch_norm(ones(2, 3), mean=ones(3)),
        ValueError,
        "batch_norm: var is missing: give both mean and var, or neither",
    ),
    "activation": (
        lambda rj: rj.layer_norm(ones(2, 3), activation="silu"),
        ValueError,
        "layer_norm: activation 'silu': the output does not tell the slope",
    ),
    "w": (
        lambda rj: rj.linear(ones(2, 3), ones(5, 4)),
        ValueError,
        r"linear: w has shape \(5, 4\), whose inputs are 4, but the last axis of x is 3",
    ),
    "b": (
        lambda rj: rj.linear(ones(2, 3), ones(5, 3), ones(4)),
        ValueError,
        r"linear: b has shape \(4,\), but w of shape \(5, 3\) needs \(5,\)",
    ),
    "half precision": (
        lambda rj: rj.linear(ones(2, 3, dtype=np.float16), ones(5, 3)),
        TypeError,
        "linear: x has dtype float16; it must be float32 or float64",
    ),
    "axes of x": (
        lambda rj: rj.lstm(ones(2, 3), cell()),
        ValueError,
        r"lstm: x has shape \(2, 3\), must have the 3 axes",
    ),
    "wx": (
        lambda rj: rj.lstm(ones(2, 1, 4), cell()),
        ValueError,
        r"lstm: wx has shape \(8, 3\), must be \(8, 4\) or \(4, 2, 4\)",
    ),
    "a cell of several": (
        lambda rj: rj.lstm(ones(2, 1, 3), [cell(), cell()]),
        ValueError,
        r"lstm: weights\[1\].wx has shape \(8, 3\), must be \(8, 2\) or \(4, 2, 2\)",
    ),
    "gates apart": (
        lambda rj: rj.lstm(ones(2, 1, 3), cell(b=(ones(2),) * 4)),
        TypeError,
        "lstm: weights.b is a sequence of 4 arrays, must be one array with all gates",
    ),
    "state": (
        lambda rj: rj.lstm(ones(2, 1, 3), cell(), ones(1, 3)),
        ValueError,
        r"lstm: h0 has shape \(1, 3\), must be \(N, H\) = \(1, 2\)",
    ),
    "lengths": (
        lambda rj: rj.lstm(ones(2, 1, 3), cell(), lengths=[3]),
        ValueError,
        "lstm: lengths has 3, must be from 0 to 2, the steps of x",
    ),
    "seed": (
        lambda rj: rj.lstm(ones(2, 1, 3), [cell(), cell(2)], dropout=0.5, seed=1 << 40),
        ValueError,
        "lstm: seed is 1099511627776, must be below 2\\*\\*32: jax_enable_x64 is not set",
    ),
    "another cell's weights": (
        lambda rj: rj.gru(ones(2, 1, 3), cell()),
        TypeError,
        "gru: weights must be GruWeights or a sequence of them, not LstmWeights",
    ),
    "another cell's weights among several": (
        lambda rj: rj.rnn(ones(2, 1, 3), [rnn_cell(), gru_cell()]),
        TypeError,
        r"rnn: weights\[1\] must be RnnWeights, not GruWeights",
    ),
    "wx of a GRU": (
        lambda rj: rj.gru(ones(2, 1, 4), gru_cell()),
        ValueError,
        r"gru: wx has shape \(6, 3\), must be \(6, 4\) or \(3, 2, 4\)",
    ),
    "b of an RNN": (
        lambda rj: rj.rnn(ones(2, 1, 3), rnn_cell(b=ones(3))),
        ValueError,
        r"rnn: b has shape \(3,\), must be \(2,\) or \(1, 2\)",
    ),
    "kind": (
        lambda rj: rj.gru(ones(2, 1, 3), gru_cell(), kind="last"),
        ValueError,
        "gru: kind is 'last', must be 'after' or 'before'",
    ),
    "activation of an RNN": (
        lambda rj: rj.rnn(ones(2, 1, 3), rnn_cell(), activation="step"),
        ValueError,
        "rnn: activation: ",
    ),
    "projection": (
        lambda rj: rj.lstm(ones(2, 1, 3), cell(projection=ones(1, 2))),
        ValueError,
        r"lstm: projection has 1 rows, but wh has 2 columns; both are P",
    ),
    "projection of one cell": (
        lambda rj: rj.lstm(ones(2, 1, 3), [cell(wh=ones(8, 1), projection=ones(1, 2)), cell(1, wh=ones(8, 1))]),
        ValueError,
        r"lstm: weights\[1\].projection is None, but the first cell has one",
    ),
    "projection of another cell": (
        lambda rj: rj.lstm(ones(2, 1, 3), [cell(), cell(2, projection=ones(1, 2))]),
        ValueError,
        r"lstm: weights\[1\].projection is given, but the first cell has none",
    ),
    "projected state": (
        lambda rj: rj.lstm(ones(2, 1, 3), cell(wh=ones(8, 1), projection=ones(1, 2)), ones(1, 2)),
        ValueError,
        r"lstm: h0 has shape \(1, 2\), must be \(N, P\) = \(1, 1\)",
    ),
    "norm": (
        lambda rj: rj.gru(ones(2, 1, 3), gru_cell(), norm="cell"),
        ValueError,
        "gru: norm is 'cell', must be 'haste' or None",
    ),
    "gamma of a norm": (
        lambda rj: rj.rnn(ones(2, 1, 3), rnn_cell(gamma_x=ones(2)), norm="haste"),
        ValueError,
        "rnn: gamma_h is None; norm needs it",
    ),
    "gamma without a norm": (
        lambda rj: rj.rnn(ones(2, 1, 3), rnn_cell(gamma_x=ones(2))),
        ValueError,
        "rnn: gamma_x is given, but norm is None",
    ),
    "options that exclude each other": (
        lambda rj: rj.rnn(ones(2, 1, 3), rnn_cell(gamma_x=ones(2), gamma_h=ones(2)), norm="haste", clip=1.0),
        ValueError,
        "rnn: norm is given, and so is clip; they cannot be combined",
    ),
    "clip": (lambda rj: rj.rnn(ones(2, 1, 3), rnn_cell(), clip=0.0), ValueError, "rnn: clip is 0.0, must be above 0"),
    "reset": (
        lambda rj: rj.gru(ones(2, 1, 3), gru_cell(), reset=ones(1, 2)),
        ValueError,
        r"gru: reset has shape \(1, 2\), must be \(T, N\) = \(2, 1\)",
    ),
    "dtype of reset": (
        lambda rj: rj.gru(ones(2, 1, 3), gru_cell(), reset=ones(2, 1, dtype=np.complex64)),
        TypeError,
        "gru: reset has dtype complex64; it must be of booleans or numbers",
    ),
    "reset of two directions": (
        lambda rj: rj.gru(ones(2, 1, 3), [gru_cell()] * 2, bidirectional=True, reset=ones(2, 1)),
        ValueError,
        "gru: reset is given, but layers are bidirectional",
    ),
    "not an array": (lambda rj: rj.layer_norm("text"), TypeError, "layer_norm: x is not an array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_argument_and_both_values(jax: Any, rj: Any, name: str) -> None:
    run, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        run(rj)
    with pytest.raises(kind, match=message):
        jax.jit(lambda: run(rj))()


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_arguments_of_the_array_functions_exist_or_are_refused_with_a_reason(rj: Any, name: str) -> None:
    function, weights = getattr(rj, name), {"lstm": cell, "gru": gru_cell, "rnn": rnn_cell}[name]()
    parameters = inspect.signature(getattr(retrograd, f"{name}_forward")).parameters
    absent = parameters.keys() - inspect.signature(function).parameters.keys()
    assert absent == {"table", "batch_sizes", "training", "recompute", "cache", "out"}
    for argument in absent:
        with pytest.raises(TypeError, match=f"^{name}: {argument} is not an argument under JAX: .+"):
            function(ones(5, 4, 3), weights, **{argument: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        function(ones(5, 4, 3), weights, unknown=None)


def test_traced_shapes_are_checked(jax: Any, rj: Any) -> None:
    with pytest.raises(ValueError, match=r"gamma has shape \(4,\), but x of shape \(2, 3\) needs \(3,\)"):
        jax.eval_shape(rj.layer_norm, jax.ShapeDtypeStruct((2, 3), np.float32), jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(ValueError, match=r"x has shape \(5,\), must have the 3 axes"):
        jax.eval_shape(lambda x: jax.vmap(lambda x: rj.lstm(x, cell()))(x), jax.ShapeDtypeStruct((2, 5), np.float32))


def test_second_and_forward_derivatives_are_refused(jax: Any, rj: Any) -> None:
    def loss(x: Any) -> Any:
        return (rj.layer_norm(x) ** 2).sum()

    with pytest.raises(NotImplementedError, match="first derivatives only"):
        jax.grad(lambda x: jax.grad(loss)(x).sum())(ones(4))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (ones(4),), (ones(4),))


# ---- errors at run time ---------------------------------------------------------------------------------------------


def test_traced_lengths_are_checked_at_run_time(jax: Any, rj: Any) -> None:
    x = ones(3, 2, 3)
    run = jax.jit(lambda lengths: rj.lstm(x, cell(), lengths=lengths).y)
    expected = retrograd.lstm_forward(x, cell(), lengths=[3, 1]).y
    assert np.array_equal(run(np.array([3, 1])), expected)
    for lengths, message in (([3, 4], r"lengths\[1\] is 4, must be from 0 to 3"), ([-1, 3], r"lengths\[0\] is -1")):
        with refused(jax, message):
            run(np.array(lengths)).block_until_ready()


# What XLA turns the handlers' errors into depends on how the call is dispatched.
def refused(jax: Any, message: str) -> Any:
    return pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message)


FORWARD = {
    "arguments": "x gamma",
    "results": "y saved_mean saved_var",
    "axes": np.int64(2),
    "threads": np.int64(0),
    "roles": "nc",
    "channels_per_set": np.int64(3),
    "eps": np.float64(1e-5),
    "activation": np.int64(0),
    "alpha": np.float64(0),
    "beta": np.float64(0),
    "slope_from_input": False,
}
LSTM = {
    "arguments": "x wx0 wh0",
    "results": "y hn cn cache",
    "axes": np.int64(3),
    "threads": np.int64(0),
    "kind": np.int64(0),
    "units": np.int64(2),
    "projection": np.int64(0),
    "layers": np.int64(1),
    "directions": np.int64(1),
    "activations": np.array([3, 0, 0, 3, 0, 0, 4, 0, 0, 3, 0, 0, 4, 0, 0], np.float64),
    "peephole": np.int64(0),
    "output_reads_old": False,
    "coupled": False,
    "flip": False,
    "clip": np.float64(0),
    "cell_clip": np.float64(0),
    "norm": np.int64(0),
    "eps": np.float64(1e-5),
    "mask_kind": np.int64(0),
    "has_zoneout": False,
    "zoneout_rate": np.float64(-1),
    "cell_zoneout_rate": np.float64(-1),
    "dropout": np.float64(0),
    "batch_first": False,
}


def call(jax: Any, target: str, results: Any, arrays: Any, attributes: Any) -> Any:
    forms = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax.block_until_ready(jax.ffi.ffi_call(target, forms)(*arrays, **attributes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": np.float32(0)}, "eps has the wrong dtype"),
        ({"activation": np.int64(999)}, "no such activation"),
        ({"roles": "n"}, "roles and shape differ"),
        ({"roles": "cc"}, "gamma was refused: shape"),
        ({"channels_per_set": np.int64(2)}, "channels_per_set does not divide"),
        ({"channels_per_set": np.int64(0)}, "channels_per_set does not divide"),
        ({"arguments": "x"}, "a buffer has no name"),
        ({"arguments": "x gamma beta"}, "belongs to no buffer"),
        ({"arguments": "gamma x"}, "roles and shape differ"),
        ({"axes": np.int64(3)}, "axes is out of range"),
        ({"axes": np.int64(-5)}, "axes"),
        ({"axes": np.int64(1)}, "does not have the axes of the batch"),
        ({"slope_from_input": np.int64(3)}, "slope_from_input has the wrong dtype"),
        ({"roles": np.int64(3)}, "roles is missing or of another type"),
    ],
)
def test_a_wrong_call_of_a_norm_is_an_error(jax: Any, rj: Any, change: Any, message: str) -> None:
    """Calls that retrograd.jax does not make."""
    results = [((2, 3), np.float32), ((2, 8), np.uint8), ((2, 8), np.uint8)]
    arrays = [ones(2, 3), ones(3)]
    y = call(jax, "retrograd_norm_forward", results, arrays, FORWARD)[0]
    assert np.array_equal(y, np.zeros((2, 3)))
    with refused(jax, message):
        call(jax, "retrograd_norm_forward", results, arrays, {**FORWARD, **change})


@pytest.mark.parametrize(
    ("results", "arrays"),
    [
        ([((2, 4), np.float32), ((2, 8), np.uint8), ((2, 8), np.uint8)], [ones(2, 3), ones(3)]),
        ([((2, 3), np.int32), ((2, 8), np.uint8), ((2, 8), np.uint8)], [ones(2, 3), ones(3)]),
        ([((2, 3), np.float32), ((2, 7), np.uint8), ((2, 8), np.uint8)], [ones(2, 3), ones(3)]),
        ([((2, 3), np.float32), ((2, 8), np.int32), ((2, 8), np.uint8)], [ones(2, 3), ones(3)]),
        ([((2, 3), np.float32), ((2, 8), np.uint8), ((2, 8), np.uint8)], [ones(2, 3), ones(2)]),
        ([((2, 3), np.float32), ((2, 8), np.uint8), ((2, 8), np.uint8)], [ones(2, 3), ones(3, dtype=np.float16)]),
        ([((2, 3), np.bool_), ((2, 8), np.uint8), ((2, 8), np.uint8)], [ones(2, 3), ones(3)]),
    ],
)
def test_a_wrong_array_of_a_norm_is_an_error(jax: Any, rj: Any, results: Any, arrays: Any) -> None:
    with refused(jax, "retrograd: "):
        call(jax, "retrograd_norm_forward", results, arrays, FORWARD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": np.int64(0)}, "size is out of range"),
        ({"units": np.int64(3)}, "refused: shape"),
        ({"layers": np.int64(2)}, "wx was refused: missing"),
        ({"layers": np.int64(1 << 40)}, "size is out of range"),
        ({"directions": np.int64(3)}, "size is out of range"),
        ({"activations": np.zeros(3)}, "activations has the wrong form"),
        ({"activations": np.full(15, -1.0)}, "no such activation"),
        ({"peephole": np.int64(9)}, "kind of peephole"),
        ({"kind": np.int64(4)}, "no such cell"),
        ({"kind": np.int64(-1)}, "no such cell"),
        ({"kind": np.int64(1)}, "activations has the wrong form"),
        ({"projection": np.int64(3)}, "size is out of range"),
        ({"projection": np.int64(1)}, "refused: "),
        ({"norm": np.int64(3)}, "unknown kind of norm"),
        ({"norm": np.int64(1)}, "gamma_x was refused: missing"),
        ({"clip": np.float64(-1)}, "number is out of range"),
        ({"cell_clip": np.float64(np.nan)}, "number is out of range"),
        ({"eps": np.float64(-1), "norm": np.int64(1)}, "number is out of range"),
        ({"arguments": "x wx0 reset"}, "reset was refused: dtype"),
        ({"dropout": np.float64(2)}, "dropout is out of range"),
        ({"zoneout_rate": np.float64(1)}, "a rate of zoneout must be below 1"),
        ({"cell_zoneout_rate": np.float64(np.nan)}, "a rate of zoneout must be below 1"),
        ({"zoneout_rate": np.float64(0.5), "units": np.int64(1 << 60)}, "size is out of range"),
        ({"batch_first": True}, "refused: shape"),
    ],
)
def test_a_wrong_call_of_an_lstm_is_an_error(jax: Any, rj: Any, change: Any, message: str) -> None:
    size = retrograd.lstm_cache_size(4, 1, 3, 2)
    states = ((1, 1, 2), np.float32)
    results = [((4, 1, 2), np.float32), states, states, ((size,), np.uint8)]
    arrays = [ones(4, 1, 3), ones(8, 3), ones(8, 2)]
    y = call(jax, "retrograd_recurrent_forward", results, arrays, LSTM)[0]
    assert np.array_equal(y, retrograd.lstm_forward(arrays[0], LstmWeights(*arrays[1:])).y)
    with refused(jax, message):
        call(jax, "retrograd_recurrent_forward", results, arrays, {**LSTM, **change})
    small = [*results[:3], ((size - 1,), np.uint8)]
    with refused(jax, "cache was refused: shape"):
        call(jax, "retrograd_recurrent_forward", small, arrays, LSTM)


def test_a_cache_that_forward_did_not_write_is_an_error(jax: Any, rj: Any) -> None:
    size = retrograd.lstm_cache_size(4, 1, 3, 2)
    arrays = [ones(4, 1, 3), ones(8, 3), ones(8, 2), np.zeros(size, np.uint8), ones(4, 1, 2)]
    attributes = {**LSTM, "arguments": "x wx0 wh0 cache dy", "results": "dx"}
    with refused(jax, "cache was refused: foreign_cache"):
        call(jax, "retrograd_recurrent_backward", [((4, 1, 3), np.float32)], arrays, attributes)


# ---- the interface --------------------------------------------------------------------------------------------------

LAYOUT = """
#include "xla/ffi/api/c_api.h"
#include "xla_ffi.h"
using namespace rg;
#define SAME_FIELD(ours, field, theirs, its)                                     \\
    static_assert(offsetof(xla::ours, field) == offsetof(theirs, its), #ours "::" #field); \\
    static_assert(sizeof(xla::ours::field) == sizeof(theirs::its), #ours "::" #field)
#define SAME_SIZE(ours, theirs) static_assert(sizeof(xla::ours) == sizeof(theirs), #ours)
SAME_SIZE(Extension, XLA_FFI_Extension_Base);
SAME_FIELD(Extension, type, XLA_FFI_Extension_Base, type);
SAME_FIELD(Extension, next, XLA_FFI_Extension_Base, next);
SAME_SIZE(Version, XLA_FFI_Api_Version);
SAME_FIELD(Version, major_version, XLA_FFI_Api_Version, major_version);
SAME_FIELD(Version, minor_version, XLA_FFI_Api_Version, minor_version);
SAME_SIZE(ErrorArguments, XLA_FFI_Error_Create_Args);
SAME_FIELD(ErrorArguments, message, XLA_FFI_Error_Create_Args, message);
SAME_FIELD(ErrorArguments, code, XLA_FFI_Error_Create_Args, errc);
SAME_FIELD(Api, version, XLA_FFI_Api, api_version);
SAME_FIELD(Api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME_SIZE(Buffer, XLA_FFI_Buffer);
SAME_FIELD(Buffer, dtype, XLA_FFI_Buffer, dtype);
SAME_FIELD(Buffer, data, XLA_FFI_Buffer, data);
SAME_FIELD(Buffer, rank, XLA_FFI_Buffer, rank);
SAME_FIELD(Buffer, extents, XLA_FFI_Buffer, dims);
SAME_SIZE(Text, XLA_FFI_ByteSpan);
SAME_FIELD(Text, length, XLA_FFI_ByteSpan, len);
SAME_SIZE(Scalar, XLA_FFI_Scalar);
SAME_FIELD(Scalar, value, XLA_FFI_Scalar, value);
SAME_SIZE(Array, XLA_FFI_Array);
SAME_FIELD(Array, elements, XLA_FFI_Array, size);
SAME_FIELD(Array, data, XLA_FFI_Array, data);
SAME_SIZE(Values, XLA_FFI_Args);
SAME_SIZE(Values, XLA_FFI_Rets);
SAME_FIELD(Values, count, XLA_FFI_Args, size);
SAME_FIELD(Values, types, XLA_FFI_Args, types);
SAME_FIELD(Values, values, XLA_FFI_Args, args);
SAME_FIELD(Values, values, XLA_FFI_Rets, rets);
SAME_SIZE(Attributes, XLA_FFI_Attrs);
SAME_FIELD(Attributes, names, XLA_FFI_Attrs, names);
SAME_FIELD(Attributes, values, XLA_FFI_Attrs, attrs);
SAME_FIELD(CallFrame, api, XLA_FFI_CallFrame, api);
SAME_FIELD(CallFrame, stage, XLA_FFI_CallFrame, stage);
SAME_FIELD(CallFrame, arguments, XLA_FFI_CallFrame, args);
SAME_FIELD(CallFrame, results, XLA_FFI_CallFrame, rets);
SAME_FIELD(CallFrame, attributes, XLA_FFI_CallFrame, attrs);
static_assert(sizeof(xla::CallFrame) == XLA_FFI_CallFrame_STRUCT_SIZE);
SAME_FIELD(Metadata, version, XLA_FFI_Metadata, api_version);
SAME_FIELD(Metadata, traits, XLA_FFI_Metadata, traits);
SAME_FIELD(MetadataExtension, metadata, XLA_FFI_Metadata_Extension, metadata);
#define SAME(ours, theirs) static_assert(int(xla::ours) == int(theirs), #ours)
SAME(kPred, XLA_FFI_DataType_PRED);
SAME(kU8, XLA_FFI_DataType_U8);
SAME(kS32, XLA_FFI_DataType_S32);
SAME(kS64, XLA_FFI_DataType_S64);
SAME(kU32, XLA_FFI_DataType_U32);
SAME(kU64, XLA_FFI_DataType_U64);
SAME(kF16, XLA_FFI_DataType_F16);
SAME(kF32, XLA_FFI_DataType_F32);
SAME(kF64, XLA_FFI_DataType_F64);
SAME(kBF16, XLA_FFI_DataType_BF16);
SAME(kBuffer, XLA_FFI_ArgType_BUFFER);
SAME(kBuffer, XLA_FFI_RetType_BUFFER);
SAME(kArray, XLA_FFI_AttrType_ARRAY);
SAME(kScalar, XLA_FFI_AttrType_SCALAR);
SAME(kString, XLA_FFI_AttrType_STRING);
SAME(kMetadataExtension, XLA_FFI_Extension_Metadata);
SAME(kExecute, XLA_FFI_ExecutionStage_EXECUTE);
SAME(kInvalidArgument, XLA_FFI_Error_Code_INVALID_ARGUMENT);
SAME(kResourceExhausted, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
SAME(kInternal, XLA_FFI_Error_Code_INTERNAL);
SAME(kMajorVersion, XLA_FFI_API_MAJOR);
static_assert(xla::kOldestMinorVersion <= XLA_FFI_API_MINOR);
"""


def test_structures_are_those_of_jaxlib(jax: Any, rj: Any, tmp_path: Path) -> None:
    """xla_ffi.h declares what the installed jaxlib's c_api.h does, field by field."""
    source = tmp_path / "layout.cpp"
    source.write_text(LAYOUT)
    compiler = tool("c++", "g++", "clang++")
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{jax.ffi.include_dir()}", f"-I{BIND}", str(source)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr


# ---- imports --------------------------------------------------------------------------------------------------------


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    lines = [f"import sys; sys.path[:0] = {[str(folder) for folder in path]}", code]
    command = [sys.executable, "-W", "error", "-c", "\n".join(lines)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.parametrize("order", ["import jax, retrograd", "import retrograd, jax"])
def test_import_orders(jax: Any, order: str) -> None:
    code = f"""
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    {order}
    import retrograd.jax, numpy
y = jax.jit(retrograd.jax.layer_norm)(numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
assert numpy.array_equal(y, retrograd.layer_norm_forward(numpy.arange(6, dtype=numpy.float32).reshape(2, 3))[0])
"""
    run = python(code)
    assert run.returncode == 0, run.stderr


def test_retrograd_alone_does_not_import_jax() -> None:
    run = python("import retrograd; assert 'jax' not in sys.modules")
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("version", "message"), [("0.4.30", "jax.ffi"), (None, "No module named 'jax'")])
def test_without_jax_or_with_an_old_one(tmp_path: Path, version: str | None, message: str) -> None:
    code = "sys.modules['jax'] = None\nimport retrograd.jax"
    if version is not None:
        (tmp_path / "jax").mkdir()
        (tmp_path / "jax" / "__init__.py").write_text(f"__version__ = {version!r}")
        code = "import retrograd.jax"
    run = python(code, tmp_path)
    assert run.returncode == 1
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: retrograd.jax needs jax 0.5 or later, which has jax.ffi (")
    assert message in last or version is None
    assert last.endswith("pip install 'retrograd[jax]'")


def test_activations_are_the_array_functions_own(jax: Any, rj: Any) -> None:
    """Every activation, by name: the codes that the handlers get are the engine's."""
    from retrograd.ops.activation import ACTIVATIONS

    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    for name, kind in ACTIVATIONS.items():
        parameters = [0.5 if default is None else default for default in (kind.alpha, kind.beta)]
        given = [value for value, default in zip(parameters, (kind.alpha, kind.beta), strict=True) if default != 0]
        activation = retrograd.Activation(name, *given)
        y = rj.layer_norm(x, activation=activation, slope_from="input")
        expected = retrograd.layer_norm_forward(x, activation=activation, slope_from="input")[0]
        assert np.array_equal(y, expected), name
    named = LstmActivations(h="softsign")
    y = rj.lstm(x[None, :, :3], cell(), activations=named).y
    assert np.array_equal(y, retrograd.lstm_forward(x[None, :, :3], cell(), activations=named).y)


# ---- small numbers --------------------------------------------------------------------------------------------------

SMALL = """
import numpy as np, jax, retrograd as rg, retrograd.jax as rj
rg.set_num_threads(3)
w = np.eye(256, dtype=np.float32)
x = np.full((512, 256), 1e-40, np.float32)
through_xla = np.asarray(jax.jit(rj.linear)(x, w))  # XLA's thread creates the threads of the engine
assert (through_xla == x).all(), through_xla
assert (rg.linear_forward(x, w) == x).all()
"""


def test_xla_does_not_flush_small_numbers_to_zero(jax: Any) -> None:
    """Neither in its own thread nor in the engine's threads that its call creates."""
    subprocess.run([sys.executable, "-c", SMALL], timeout=PATIENCE, check=True)
