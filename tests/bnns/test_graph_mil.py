"""Every operation of MIL that is read from a package: compared with coremltools' own values, or with PyTorch's."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from retrograd.bnns._graph_coreml import read_model
from retrograd.bnns._graph_mil_shape import OPERATIONS
from support.arrays import Array
from support.coreml import inferred, package, run


class Case(NamedTuple):
    kind: str
    inputs: dict[str, Any]  # placeholders
    options: dict[str, Any]  # constants
    expected: Callable[..., Any] | None = None  # of torch, the inputs and the options; None: coremltools knows
    target: str = "iOS16"


def draw(*shape: int, low: float = -2.0, high: float = 2.0) -> Array:
    seed = zlib.crc32(repr((shape, low, high)).encode())
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def integers(*shape: int, low: int = 0, high: int = 4) -> Array:
    return np.random.default_rng(sum(shape) + high).integers(low, high, shape).astype(np.int32)


def bools(*shape: int) -> Array:
    return draw(*shape) > 0


CASES: list[Case] = []


def add(kind: str, inputs: dict[str, Any], expected: Any = None, target: str = "iOS16", **options: Any) -> None:
    CASES.append(Case(kind, inputs, options, expected, target))


X = draw(3, 5)
UNARY = (
    *("abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "relu", "relu6", "round", "sigmoid"),
    *("sign", "sin", "sinh", "softplus", "softsign", "square", "tan", "tanh"),
)
for name in UNARY:
    add(name, {"x": X})
for name in ("acos", "asin", "atanh"):
    add(name, {"x": draw(3, 5, low=-0.9, high=0.9)})
add("sqrt", {"x": draw(7, low=0, high=4)})
for name in ("inverse", "log", "rsqrt"):
    add(name, {"x": draw(7, low=0.1, high=4)})
    add(name, {"x": draw(7, low=0.1, high=4)}, epsilon=np.float32(0.5))
add("log", {"x": np.zeros(3, np.float32)})
add("silu", {"x": X}, lambda torch, x: torch.nn.functional.silu(x))
add("identity", {"x": X}, lambda torch, x: x)
add("logical_not", {"x": bools(3, 5)})
for name in ("abs", "sign", "square"):
    add(name, {"x": integers(4, low=-3)})
add("exp2", {"x": integers(4)})
BINARY = ("add", "sub", "mul", "maximum", "minimum", "mod", "floor_div", "real_div")
COMPARED = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
for name in (*BINARY, *COMPARED):
    add(name, {"x": X, "y": draw(3, 1, low=0.5, high=2)})
    add(name, {"x": X}, y=np.float32(1.5))
for name in (*(name for name in BINARY if name != "real_div"), *COMPARED):
    add(name, {"x": integers(2, 5, low=-4), "y": integers(5, low=1)})
add("real_div", {"x": integers(2, 5, low=-8, high=9) * 2, "y": np.full(5, 2, np.int32)},
    lambda torch, x, y: x // y)  # fmt: skip
add("pow", {"x": draw(4, low=0.2, high=2), "y": draw(4)})
for exponent in (2.0, 0.5, -1.0, 3.0):
    add("pow", {"x": draw(4, low=0.2, high=2)}, y=np.float32(exponent))
for name in ("logical_and", "logical_or", "logical_xor"):
    add(name, {"x": bools(3, 5), "y": bools(5)})
add("select", {"cond": bools(3, 5), "a": X, "b": draw(3, 5, low=5, high=6)})
add("select", {"cond": bools(3, 5), "a": integers(3, 5), "b": integers(3, 5, high=9)})
for dtype in ("int32", "fp32", "bool"):
    add("cast", {"x": draw(7, low=-3, high=3)}, dtype=dtype)
add("cast", {"x": integers(5)}, dtype="fp32")
add("cast", {"x": integers(5)}, dtype="uint16", target="iOS17")

for name in ("elu", "leaky_relu", "thresholded_relu", "threshold"):
    add(name, {"x": X}, alpha=np.float32(0.3))
for name in ("clamped_relu", "linear_activation", "scaled_tanh", "sigmoid_hard", "clip"):
    add(name, {"x": X}, alpha=np.float32(0.3), beta=np.float32(0.9))
for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
    add("gelu", {"x": X}, mode=mode)
add("prelu", {"x": draw(2, 3, 4, 4)}, alpha=draw(3))
add("softplus_parametric", {"x": draw(2, 3, 4)}, alpha=draw(3), beta=draw(3, low=0.5))
for axis in (-1, 0):
    add("softmax", {"x": X}, axis=axis)

for name in ("sum", "mean", "max", "min", "prod", "sum_square", "log_sum_exp", "l1_norm", "l2_norm", "log_sum"):
    positive = draw(2, 3, 4, low=0.5, high=2)
    add(f"reduce_{name}", {"x": positive})
    add(f"reduce_{name}", {"x": positive}, axes=[1, -1], keep_dims=True)
    add(f"reduce_{name}", {"x": positive}, axes=[0], keep_dims=False)
for name in ("sum", "max", "min", "prod", "mean"):
    add(f"reduce_{name}", {"x": integers(3, 4, low=1)}, axes=[1])
for name in ("argmax", "argmin"):
    add(f"reduce_{name}", {"x": X}, axis=0, keep_dims=True)
    add(f"reduce_{name}", {"x": X}, axis=-1, keep_dims=False)
    add(f"reduce_{name}", {"x": np.asarray([[3, 1, 2]], np.int32)})
for reverse in (False, True):
    add("cumsum", {"x": X}, axis=1, reverse=reverse)
    add("cumsum", {"x": X}, axis=0, reverse=reverse, exclusive=True, expected=lambda torch, x, reverse, **_: (
        x.flip(0).cumsum(0).flip(0) - x if reverse else x.cumsum(0) - x
    ))  # fmt: skip
add("cumsum", {"x": integers(6)}, axis=0)
for ascending in (False, True):
    add("topk", {"x": X}, k=2, axis=1, ascending=ascending)
    add("topk", {"x": X}, k=3, axis=0, ascending=ascending, sort=True, return_indices=False)
    add("argsort", {"x": X}, axis=0, ascending=ascending)
add("topk", {"x": np.asarray([5, 1, 7, 3], np.int32)}, k=4, axis=0)

add("linear", {"x": draw(2, 3, 5)}, weight=draw(4, 5), bias=draw(4))
add("linear", {"x": draw(2, 5)}, weight=draw(4, 5))
add("matmul", {"x": draw(2, 3, 4), "y": draw(2, 4, 5)})
add("matmul", {"x": draw(4, 3), "y": draw(6, 5, 4)}, transpose_x=True, transpose_y=True)
add("matmul", {"x": draw(3, 4)}, y=draw(4, 2))
add("einsum", {"values": [draw(2, 3, 4, 5), draw(2, 5, 4, 6)]}, equation="nchw,nwhu->nchu",
    expected=lambda torch, a, b, equation: torch.einsum(equation, a, b))  # fmt: skip
add("einsum", {"values": [draw(3, 1, 5), draw(5, 4, 6)]}, equation="abc,cbd->abd",
    expected=lambda torch, a, b, equation: torch.einsum(equation, a.expand(3, 4, 5), b))  # fmt: skip
ATTENTION = {"query": draw(2, 3, 4, 8), "key": draw(2, 3, 6, 8), "value": draw(2, 3, 6, 5)}
add("scaled_dot_product_attention", ATTENTION, target="iOS18")
add("scaled_dot_product_attention", {**ATTENTION, "attn_mask": draw(4, 6)}, target="iOS18")
MASK = bools(1, 1, 4, 6)
MASK[..., 0] = True  # a row of which nothing is left has no softmax
add("scaled_dot_product_attention", {**ATTENTION, "attn_mask": MASK}, target="iOS18")


def padded(torch: Any, x: Any, pairs: list[tuple[int, int]], value: float = 0.0) -> Any:
    return torch.nn.functional.pad(x, [n for pair in reversed(pairs) for n in pair], value=value)


def conv(torch: Any, x: Any, weight: Any, pairs: list[tuple[int, int]], bias: Any = None, **options: Any) -> Any:
    function = torch.nn.functional.conv1d if x.ndim == 3 else torch.nn.functional.conv2d
    return function(padded(torch, x, pairs), weight, bias, **options)


IMAGES, KERNEL = draw(2, 4, 9, 8), draw(6, 2, 3, 2)
add("conv", {"x": IMAGES}, lambda t, x, weight, bias, **_: conv(t, x, weight, [(0, 0)] * 2, bias, groups=2),
    weight=KERNEL, bias=draw(6), groups=2, pad_type="valid")  # fmt: skip
add("conv", {"x": IMAGES}, lambda t, x, weight, **_: conv(
        t, x, weight, [(1, 2), (0, 1)], groups=2, stride=(2, 1), dilation=(1, 2)
    ), weight=KERNEL, groups=2, pad_type="custom", pad=[1, 2, 0, 1], strides=[2, 1], dilations=[1, 2])  # fmt: skip
for pad_type, pairs in (("same", [(1, 1), (0, 1)]), ("same_lower", [(1, 1), (1, 0)])):
    add("conv", {"x": IMAGES}, lambda t, x, weight, pairs=pairs, **_: conv(t, x, weight, pairs, groups=2),
        weight=KERNEL, groups=2, pad_type=pad_type)  # fmt: skip
add("conv", {"x": draw(2, 3, 11)}, lambda t, x, weight, **_: conv(t, x, weight, [(1, 2)], stride=2),
    weight=draw(5, 3, 4), strides=[2], pad_type="same")  # fmt: skip


def deconv(torch: Any, x: Any, weight: Any, cuts: list[tuple[int, int]], bias: Any = None, **options: Any) -> Any:
    """All of a transposed convolution, without elements at the borders."""
    function = torch.nn.functional.conv_transpose1d if x.ndim == 3 else torch.nn.functional.conv_transpose2d
    y = function(x, weight, bias, **options)
    return y[(..., *(slice(a, n - b) for (a, b), n in zip(cuts, y.shape[2:], strict=True)))]


DEKERNEL = draw(4, 3, 3, 4)
add("conv_transpose", {"x": IMAGES}, lambda t, x, weight, bias, **_: deconv(t, x, weight, [(0, 0)] * 2, bias, groups=2),
    weight=DEKERNEL, bias=draw(6), groups=2, pad_type="valid")  # fmt: skip
add("conv_transpose", {"x": IMAGES}, lambda t, x, weight, **_: deconv(
        t, x, weight, [(1, 0), (1, 2)], stride=(2, 3), dilation=(2, 1)
    ), weight=DEKERNEL, pad_type="custom", pad=[1, 0, 1, 2], strides=[2, 3], dilations=[2, 1])  # fmt: skip
add("conv_transpose", {"x": IMAGES}, lambda t, x, weight, **_: deconv(t, x, weight, [(0, 1), (1, 1)], stride=2),
    weight=DEKERNEL, pad_type="same", strides=[2, 2])  # fmt: skip
add("conv_transpose", {"x": draw(1, 2, 5)}, lambda t, x, weight, **_: padded(
        t, deconv(t, x, weight, [(0, 0)], stride=4), [(0, 1)]
    ), weight=draw(2, 3, 3), pad_type="same", strides=[4])  # fmt: skip
add("conv_transpose", {"x": IMAGES}, lambda t, x, weight, **_: t.nn.functional.conv_transpose2d(
        x, weight, stride=2, padding=1, output_padding=1
    ), weight=DEKERNEL, pad_type="custom", pad=[1, 1, 1, 1], strides=[2, 2], output_shape=[2, 3, 18, 17])  # fmt: skip

SPACE = draw(2, 3, 9, 7)


def pool(kind: str, **given: Any) -> Callable[..., Any]:
    def expected(torch: Any, x: Any, **_: Any) -> Any:
        function = {"max": torch.nn.functional.max_pool2d, "avg": torch.nn.functional.avg_pool2d}[kind]
        return function(x, **given)

    return expected


for ceil in (False, True):
    torch_options = {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 1), "ceil_mode": ceil}
    mil_options = {"kernel_sizes": [3, 2], "strides": [2, 3], "pad_type": "custom", "pad": [1, 1, 1, 1],
                   "ceil_mode": ceil}  # fmt: skip
    add("max_pool", {"x": SPACE}, pool("max", **torch_options), **mil_options)
    for exclude in (False, True):
        add("avg_pool", {"x": SPACE}, pool("avg", **torch_options, count_include_pad=not exclude),
            exclude_padding_from_average=exclude, **mil_options)  # fmt: skip
add("avg_pool", {"x": SPACE}, pool("avg", kernel_size=2, stride=2, ceil_mode=True), kernel_sizes=[2, 2],
    strides=[2, 2], pad_type="valid", ceil_mode=True)  # fmt: skip
add("max_pool", {"x": SPACE}, lambda t, x, **_: t.nn.functional.max_pool2d(
        padded(t, x, [(0, 1), (1, 1)], -9.0), (2, 3), 2
    ), kernel_sizes=[2, 3], strides=[2, 2], pad_type="same")  # fmt: skip
add("max_pool", {"x": draw(2, 3, 10)}, lambda t, x, **_: t.nn.functional.max_pool1d(x, 3, 1), kernel_sizes=[3],
    pad_type="valid")  # fmt: skip
add("l2_pool", {"x": SPACE}, lambda t, x, **_: t.nn.functional.lp_pool2d(x, 2, 2, 2), kernel_sizes=[2, 2],
    strides=[2, 2], pad_type="valid")  # fmt: skip

NORM = {"gamma": draw(3), "beta": draw(3), "epsilon": np.float32(1e-3)}
add("batch_norm", {"x": SPACE}, lambda t, x, mean, variance, gamma, beta, epsilon: t.nn.functional.batch_norm(
        x, mean, variance, gamma, beta, eps=float(epsilon)
    ), mean=draw(3), variance=draw(3, low=0.5), **NORM)  # fmt: skip
add("batch_norm", {"x": draw(2, 3, 5)}, lambda t, x, mean, variance: t.nn.functional.batch_norm(x, mean, variance),
    mean=draw(3), variance=draw(3, low=0.5))  # fmt: skip
add("instance_norm", {"x": SPACE}, lambda t, x, gamma, beta, epsilon: t.nn.functional.instance_norm(
        x, weight=gamma, bias=beta, eps=float(epsilon)
    ), **NORM)  # fmt: skip
add("layer_norm", {"x": draw(2, 3, 4)}, axes=[-1], gamma=draw(4), beta=draw(4), epsilon=np.float32(1e-2))
add("layer_norm", {"x": draw(2, 3, 4)}, axes=[1, 2], gamma=draw(3, 4), beta=draw(3, 4))
add("layer_norm", {"x": draw(2, 3, 4)}, axes=[0, 2])
add("layer_norm", {"x": draw(2, 3, 4)}, axes=[1], gamma=draw(3), beta=draw(3))
add("l2_norm", {"x": draw(3, 4, 5)})
add("l2_norm", {"x": draw(2, 3, 4, 5)}, epsilon=np.float32(0.1))
for size in (2, 3):
    add("local_response_norm", {"x": SPACE}, lambda t, x, size, alpha, beta, k: t.nn.functional.local_response_norm(
            x, size, float(alpha), float(beta), float(k)
        ), size=size, alpha=np.float32(0.5), beta=np.float32(0.6), k=np.float32(1.5))  # fmt: skip


# ---- recurrent layers ------------------------------------------------------------------------------------------------

STEPS, SAMPLES, INPUT, HIDDEN = 4, 3, 5, 2
SEQUENCE, STATE = draw(STEPS, SAMPLES, INPUT), draw(SAMPLES, HIDDEN)
ORDERS = {"lstm": (0, 1, 3, 2), "gru": (0, 2, 1), "rnn": (0,)}  # of MIL's gates in PyTorch's


def gates(kind: str, array: Array) -> Array:
    """Gates of PyTorch in MIL's order. The permutations are their own inverses."""
    parts = np.split(array, len(ORDERS[kind]))
    return np.concatenate([parts[i] for i in ORDERS[kind]])


def weights(kind: str, back: str = "") -> dict[str, Array]:
    rows = len(ORDERS[kind]) * HIDDEN
    shift = 0.25 if back else 0.0
    return {
        f"weight_ih{back}": draw(rows, INPUT, high=1.5) + np.float32(shift),
        f"weight_hh{back}": draw(rows, HIDDEN, high=1.5) + np.float32(shift),
        f"bias{back}": draw(rows, high=1.5),
    }


def recurrent(kind: str, **fixed: Any) -> Callable[..., Any]:
    """PyTorch's module with MIL's arrays."""

    def expected(torch: Any, x: Any, initial_h: Any, initial_c: Any = None, *, output_sequence: bool,
                 direction: str = "forward", input_bias: Any = None, **given: Any) -> Any:  # fmt: skip
        both, backwards = direction == "bidirectional", direction == "reverse"
        made = getattr(torch.nn, kind.upper())(INPUT, HIDDEN, bidirectional=both, **fixed)
        for back, suffix in (("", ""), ("_back", "_reverse"))[: 1 + both]:
            values = {name: gates(kind, given[f"{name}{back}"].numpy()) for name in ("weight_ih", "weight_hh", "bias")}
            halves = values["bias"], np.zeros_like(values["bias"])
            if input_bias is not None:
                halves = gates(kind, input_bias.numpy()), values["bias"]
            named = {"weight_ih": values["weight_ih"], "weight_hh": values["weight_hh"],
                     "bias_ih": halves[0], "bias_hh": halves[1]}  # fmt: skip
            with torch.no_grad():
                for name, array in named.items():
                    getattr(made, f"{name}_l0{suffix}").copy_(torch.from_numpy(array))
        states = [torch.stack(s.split(HIDDEN, -1)) for s in (initial_h, initial_c) if s is not None]
        y, last = made(x.flip(0) if backwards else x, tuple(states) if initial_c is not None else states[0])
        finals = [torch.cat(list(s), -1) for s in (last if isinstance(last, tuple) else (last,))]
        return (y.flip(0) if backwards else y) if output_sequence else finals[0][None], *finals

    return expected


for direction in ("forward", "reverse"):
    for whole in (True, False):
        add("lstm", {"x": SEQUENCE, "initial_h": STATE, "initial_c": draw(SAMPLES, HIDDEN, high=1)},
            recurrent("lstm"), output_sequence=whole, direction=direction, **weights("lstm"))  # fmt: skip
        add("rnn", {"x": SEQUENCE, "initial_h": STATE}, recurrent("rnn"), output_sequence=whole, direction=direction,
            **weights("rnn"))  # fmt: skip
        add("gru", {"x": SEQUENCE, "initial_h": STATE}, recurrent("gru"), "iOS18", output_sequence=whole,
            direction=direction, reset_after=True, input_bias=draw(3 * HIDDEN), **weights("gru"))  # fmt: skip
for whole in (True, False):
    add("lstm", {"x": SEQUENCE, "initial_h": draw(SAMPLES, 2 * HIDDEN), "initial_c": draw(SAMPLES, 2 * HIDDEN, high=1)},
        recurrent("lstm"), output_sequence=whole, direction="bidirectional", **weights("lstm"),
        **weights("lstm", "_back"))  # fmt: skip
add("rnn", {"x": SEQUENCE, "initial_h": STATE}, recurrent("rnn", nonlinearity="relu"), output_sequence=True,
    activation="relu", **weights("rnn"))  # fmt: skip


def gru_before(torch: Any, x: Any, initial_h: Any, weight_ih: Any, weight_hh: Any, bias: Any, **_: Any) -> Any:
    """MIL's formula: the state is reset before the product."""
    h, found = initial_h, []
    (wr, wo, wz), (ur, uo, uz), (br, bo, bz) = (a.chunk(3) for a in (weight_ih, weight_hh, bias))
    for step in x:
        r, z = torch.sigmoid(step @ wr.T + h @ ur.T + br), torch.sigmoid(step @ wz.T + h @ uz.T + bz)
        h = (1 - z) * torch.tanh(step @ wo.T + (r * h) @ uo.T + bo) + z * h
        found.append(h)
    return torch.stack(found), h


add("gru", {"x": SEQUENCE, "initial_h": STATE}, gru_before, output_sequence=True, **weights("gru"))


def lstm_gates(torch: Any, x: Any, initial_h: Any, initial_c: Any, weight_ih: Any, weight_hh: Any, bias: Any,
               peephole: Any, **_: Any) -> Any:  # fmt: skip
    """Peepholes, and another activation of each place."""
    h, c, found = initial_h, initial_c, []
    pi, pf, po = peephole.chunk(3)
    hard = torch.nn.functional.hardtanh
    for step in x:
        i, f, o, z = (step @ weight_ih.T + h @ weight_hh.T + bias).chunk(4, -1)
        i, f = (hard(0.2 * g + 0.5, 0, 1) for g in (i + pi * c, f + pf * c))
        c = f * c + i * torch.relu(z)
        h = hard(0.2 * (o + po * c) + 0.5, 0, 1) * c
        found.append(h)
    return torch.stack(found), h, c


add("lstm", {"x": SEQUENCE, "initial_h": STATE, "initial_c": draw(SAMPLES, HIDDEN, high=1)}, lstm_gates,
    output_sequence=True, peephole=draw(3 * HIDDEN), recurrent_activation="hard_sigmoid", cell_activation="relu",
    activation="linear", **weights("lstm"))  # fmt: skip

# ---- shapes ----------------------------------------------------------------------------------------------------------

add("shape", {"x": X}, lambda torch, x: torch.tensor(x.shape, dtype=torch.int32))
add("reshape", {"x": draw(2, 3, 4)}, shape=[4, -1])
add("reshape", {"x": draw(2, 3, 4)}, shape=[0, -1, 2])
add("reshape_like", {"x": draw(6, 4), "ref_tensors": (draw(2, 5), draw(7, 3, 4))},
    lambda t, x, *_, **__: x.reshape(2, 3, 4), begins=[0, 1], ends=[1, 2], end_masks=[False, True])  # fmt: skip
for axis in (1, -1):
    add("flatten2d", {"x": draw(2, 3, 4)}, axis=axis)
add("flatten2d", {"x": draw(2, 3, 4)}, lambda torch, x, axis: x.reshape(1, 24), axis=0)
add("expand_dims", {"x": X}, axes=[0, -1])
add("squeeze", {"x": draw(1, 3, 1, 2)})
add("squeeze", {"x": draw(1, 3, 1, 2)}, axes=[2])
add("squeeze", {"x": draw(1, 3, 1, 2)}, lambda torch, x, axes: x.squeeze(0), axes=[0, 1])
add("transpose", {"x": draw(2, 3, 4)}, perm=[2, 0, -2])
add("reverse", {"x": draw(2, 3, 4)}, axes=[0, -1])
add("reverse", {"x": integers(2, 3)})


def reversed_parts(torch: Any, x: Any, lengths: Any, **_: Any) -> Any:
    y = x.clone()
    for i, n in enumerate(lengths.tolist()):
        y[:n, i] = x[:n, i].flip(0)
    return y


add("reverse_sequence", {"x": draw(5, 3, 2), "lengths": np.asarray([0, 3, 5], np.int32)}, reversed_parts,
    seq_axis=0, batch_axis=1)  # fmt: skip
DEEP = draw(2, 12, 3, 4)


def tf_blocks(torch: Any, x: Any, block_size: int) -> Any:
    """TensorFlow's order: the block is the outer part of the channels."""
    n, c, h, w = x.shape
    inner = c // block_size**2
    swapped = x.reshape(n, block_size**2, inner, h, w).swapaxes(1, 2).reshape(n, c, h, w)
    return torch.nn.functional.pixel_shuffle(swapped, block_size)


add("depth_to_space", {"x": DEEP}, tf_blocks, block_size=2)
add("space_to_depth", {"x": draw(2, 3, 4, 6)}, lambda t, x, block_size: (
        t.nn.functional.pixel_unshuffle(x, 2).reshape(2, 3, 4, 2, 3).swapaxes(1, 2).reshape(2, 12, 2, 3)
    ), block_size=2)  # fmt: skip
add("pixel_shuffle", {"x": DEEP}, lambda t, x, **_: t.nn.functional.pixel_shuffle(x, 2), upscale_factor=2)
add("pixel_unshuffle", {"x": draw(2, 3, 4, 6)}, lambda t, x, **_: t.nn.functional.pixel_unshuffle(x, 2),
    downscale_factor=np.uint32(2))  # fmt: skip


def to_batch(torch: Any, x: Any, **_: Any) -> Any:
    y = padded(torch, x, [(1, 0), (0, 2)])
    return torch.cat([y[:, :, i::2, j::3] for i in range(2) for j in range(3)])


def to_space(torch: Any, x: Any, **_: Any) -> Any:
    n, c, h, w = x.shape[0] // 6, *x.shape[1:]
    y = torch.zeros(n, c, 2 * h, 3 * w)
    for number, part in enumerate(x.split(n)):
        y[:, :, number // 3 :: 2, number % 3 :: 3] = part
    return y[:, :, 1:, : 3 * w - 2]


add("space_to_batch", {"x": draw(2, 3, 5, 4)}, to_batch, block_shape=[2, 3], paddings=[[1, 0], [0, 2]])
add("batch_to_space", {"x": draw(12, 3, 2, 2)}, to_space, block_shape=[2, 3], crops=[[1, 0], [0, 2]])

CUBE = draw(5, 6, 7)
SLICES: list[dict[str, Any]] = [
    {"begin": [1, 0, 2], "end": [4, 6, 7]},
    {"begin": [0, -3, 1], "end": [-1, 6, -1], "stride": [2, 1, 3]},
    {"begin": [4, 5, 0], "end": [1, 0, 7], "stride": [-1, -2, 1]},
    {"begin": [1, 0, 2], "end": [0, 0, 0], "begin_mask": [False, True, False], "end_mask": [True, True, True]},
    {"begin": [1, -1, 2], "end": [0, 0, 5], "squeeze_mask": [True, True, False]},
    {"begin": [0, 0, 0], "end": [0, 0, 0], "stride": [-1, 1, -2], "begin_mask": [True] * 3, "end_mask": [True] * 3},
]
for options in SLICES:
    add("slice_by_index", {"x": CUBE}, **options)
add("slice_by_size", {"x": CUBE}, begin=[1, -4, 0], size=[2, 3, -1])
add("slice_update", {"x": CUBE, "update": draw(3, 6, 5)}, target="iOS18", **SLICES[0])
add("slice_update", {"x": CUBE, "update": draw(3, 3, 7)}, target="iOS18", **SLICES[2])
add("slice_update", {"x": CUBE, "update": draw(3)}, target="iOS18", **SLICES[4])
add("sliding_windows", {"x": draw(3, 8)}, lambda t, x, **_: x.unfold(1, 3, 2), axis=1, size=3, stride=2)
add("split", {"x": draw(6, 4)}, num_splits=3, axis=0)
add("split", {"x": draw(6, 4)}, split_sizes=[1, 3], axis=-1)
for lower, upper in ((-1, 0), (1, 2), (0, -1)):
    add("band_part", {"x": draw(2, 4, 5)}, lower=lower, upper=upper)
add("concat", {"values": [draw(2, 3), draw(2, 5)]}, axis=-1)
add("concat", {"values": [draw(2, 3), draw(2, 3, high=1)]}, lambda t, a, b, **_: t.stack([a, b], 1).reshape(4, 3),
    axis=0, interleave=True)  # fmt: skip
add("stack", {"values": [draw(2, 3), draw(2, 3, high=1)]}, lambda t, *v, axis: t.stack(v, axis), axis=1)
add("tile", {"x": X}, reps=[2, 3])
for mode in ("constant", "reflect", "replicate"):
    add("pad", {"x": draw(2, 4, 5)}, pad=[1, 2, 3, 0], mode=mode)
add("pad", {"x": draw(2, 3)}, pad=[1, 0], mode="constant", constant_val=np.float32(2.5))
add("fill", {"unused": X}, lambda torch, unused, **_: torch.full((2, 3), 2.5), shape=[2, 3], value=np.float32(2.5))
add("fill_like", {"ref_tensor": X}, lambda torch, ref_tensor, **_: torch.full((3, 5), 7, dtype=torch.int32), value=7)
add("range_1d", {"unused": X}, lambda t, unused, **_: t.arange(1, 8, 2, dtype=t.int32), end=8, start=1, step=2)
PLACES = integers(2, 3)
add("one_hot", {"indices": PLACES}, lambda t, indices, **_: t.nn.functional.one_hot(indices.long(), 4).int(),
    one_hot_vector_size=4)  # fmt: skip
add("one_hot", {"indices": PLACES}, lambda t, indices, **_: t.where(
        t.nn.functional.one_hot(indices.long(), 5).movedim(-1, 1) == 1, 2.5, -1.0
    ), one_hot_vector_size=5, axis=1, on_value=np.float32(2.5), off_value=np.float32(-1))  # fmt: skip

# ---- gather and scatter ----------------------------------------------------------------------------------------------

for axis in (0, -1):
    add("gather", {"x": CUBE, "indices": integers(2, 3, low=-2)}, lambda t, x, indices, axis: t.from_numpy(
            np.take(x.numpy(), indices.numpy(), axis)
        ), axis=axis)  # fmt: skip
add("gather", {"x": draw(2, 3, 5, 4), "indices": integers(2, 6)}, lambda t, x, indices, **_: t.stack(
        [part[:, places.long()] for part, places in zip(x, indices, strict=True)]
    ), axis=2, batch_dims=1)  # fmt: skip
add("gather_along_axis", {"x": draw(5, 4), "indices": integers(3, 4, low=-2)}, lambda t, x, indices, **_: t.from_numpy(
        np.take_along_axis(x.numpy(), indices.numpy(), 0)
    ), axis=0)  # fmt: skip
add("gather_nd", {"x": CUBE, "indices": integers(4, 2, low=-3)},
    lambda t, x, indices: x[indices[:, 0].long(), indices[:, 1].long()])  # fmt: skip
add("gather_nd", {"x": draw(2, 5, 4), "indices": integers(2, 3, 1)}, lambda t, x, indices, **_: t.stack(
        [part[places[:, 0].long()] for part, places in zip(x, indices, strict=True)]
    ), batch_dims=1)  # fmt: skip
MODES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "max": max, "min": min, "update": lambda a, b: b,
}  # fmt: skip


def scattered(torch: Any, data: Any, indices: Any, updates: Any, *, mode: str, axis: int | None = None,
              along: bool = False, **_: Any) -> Any:  # fmt: skip
    """One element after the other."""
    y = data.numpy().copy()
    for place in np.ndindex(*updates.shape):
        value = updates.numpy()[place]
        if along:
            target = (*place[:axis], int(indices[place]), *place[axis + 1 :])
        elif axis is not None:
            target = (*place[:axis], int(indices[place[axis]]), *place[axis + 1 :])
        else:
            lead = indices.ndim - 1
            target = (*map(int, indices[place[:lead]]), *place[lead:])
        y[target] = MODES[mode](y[target], value)
    return torch.from_numpy(y)


for mode in MODES:
    add("scatter", {"data": draw(4, 3), "indices": np.asarray([2, 0, 2], np.int32), "updates": draw(3, 3, low=0.5)},
        scattered, axis=0, mode=mode)  # fmt: skip
    add("scatter_along_axis", {"data": draw(3, 5), "indices": integers(3, 4), "updates": draw(3, 4, low=0.5)},
        lambda *a, **k: scattered(*a, along=True, **k), axis=1, mode=mode)  # fmt: skip
    add("scatter_nd", {"data": draw(4, 5, 2), "indices": integers(3, 2), "updates": draw(3, 2, low=0.5)},
        scattered, mode=mode)  # fmt: skip


def test_every_operation_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(OPERATIONS)


def named(case: Case) -> str:
    shapes = "_".join(
        "x".join(map(str, np.shape(v))) or "scalar" for v in case.inputs.values() if not isinstance(v, (list, tuple))
    )
    return f"{case.kind}-{shapes}"


@pytest.mark.parametrize("case", CASES, ids=named)
def test_values(tmp_path: Path, torch: Any, case: Case) -> None:
    lists = {name: tuple(v) for name, v in case.inputs.items() if isinstance(v, (list, tuple))}
    single = {name: v for name, v in case.inputs.items() if name not in lists}
    flat = [*single.values(), *(part for parts in lists.values() for part in parts)]

    def build(*placeholders: Any) -> Any:
        from coremltools.converters.mil import Builder

        waiting = list(placeholders)
        arguments: dict[str, Any] = {name: waiting.pop(0) for name in single}
        arguments.update((name, tuple(waiting.pop(0) for _ in parts)) for name, parts in lists.items())
        arguments.pop("unused", None)
        return getattr(Builder, case.kind)(**arguments, **case.options)

    made = package(tmp_path / "a.mlpackage", build, flat, target=case.target)
    # Core ML has no bools as inputs and outputs of a model: coremltools casts them from and to floats.
    found = run(read_model(made), *(a.astype(np.float32) if a.dtype == bool else a for a in flat))
    if case.expected is None:
        arguments = {**single, **lists, **case.options}
        expected = inferred(case.kind, arguments, case.target)
        assert expected is not None, "coremltools does not know the value"
    else:
        tensors = [torch.from_numpy(array) for array in flat]
        options = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in case.options.items()}
        with torch.no_grad():
            answer = case.expected(torch, *tensors, **options)
        expected = [np.asarray(a) for a in (answer if isinstance(answer, tuple) else (answer,))]
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == (np.int32 if theirs.dtype.kind in "iu" else np.float32)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
