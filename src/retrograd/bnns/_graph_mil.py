"""The operations of Core ML's programs (MIL) as functions of ``retrograd.graph``: one table by MIL's names.

In a function of the table, positional parameters are tensors, and keyword-only ones are options, which must be known
when the graph is traced; all have MIL's names, and MIL's defaults. A parameter ``*values`` is a list of tensors.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from .. import graph as G
from ..graph import Tensor
from ..ops._types import Array
from ..ops.activation import Activation
from ..ops.recurrent.types import GruActivations, GruWeights, LstmActivations, LstmWeights, RnnWeights

__all__ = ["DTYPES", "OPERATIONS", "Mil", "as_dtype", "axis_of", "bools", "by_floats", "ints", "mil"]

_F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
I32, BOOL = np.dtype(np.int32), np.dtype(np.bool_)
# MIL's types as they are computed. Shorter integers are indices and sizes, whose values int32 holds.
DTYPES: Final = {
    "fp32": _F32, "fp16": _F32, "int32": I32, "int16": I32, "uint16": I32, "bool": BOOL,
}  # fmt: skip
_MOST: Final = 1 << 26  # elements of a range


class Mil(NamedTuple):
    """An operation: its function, the names of its tensors, that of a list of tensors, and its options."""

    function: Callable[..., Any]
    tensors: tuple[str, ...]
    optional: frozenset[str]  # tensors and options that may be absent
    values: str | None
    options: frozenset[str]


OPERATIONS: Final[dict[str, Mil]] = {}


def mil(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to the table under its name, without the underscore that keeps it from hiding another one."""
    kinds = inspect.Parameter
    parameters = inspect.signature(function).parameters.values()
    OPERATIONS[function.__name__.strip("_")] = Mil(
        function,
        tuple(p.name for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD),
        frozenset(p.name for p in parameters if p.default is not kinds.empty),
        next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), None),
        frozenset(p.name for p in parameters if p.kind is kinds.KEYWORD_ONLY),
    )
    return function


def _plain(tensors: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Add functions that have nothing but these tensors."""
    for name, function in functions.items():
        OPERATIONS[name] = Mil(function, tuple(tensors.split()), frozenset(), None, frozenset())


def ints(value: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in np.asarray(value).reshape(-1))


def bools(value: Any, count: int) -> tuple[bool, ...]:
    return (False,) * count if value is None else tuple(bool(v) for v in np.asarray(value).reshape(-1))


def axis_of(axis: Any, ndim: int) -> int:
    number = int(axis)
    if not -ndim <= number < ndim:
        raise ValueError(f"axis is {number}, but there are {ndim} axes")
    return number % ndim


def as_dtype(x: Tensor, dtype: np.dtype[Any]) -> Tensor:
    return x if x.dtype == dtype else G.cast(x, dtype)


def by_floats(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """A function of floats, of integers too: 64-bit floats hold them all. The result has the operands' type."""
    dtype = tensors[0].dtype
    if dtype.kind == "f":
        return function(*tensors)
    return as_dtype(function(*(as_dtype(t, F64) for t in tensors)), dtype)


# ---- elementwise -----------------------------------------------------------------------------------------------------

_plain(
    "x",
    {
        "abs": G.absolute, "acos": G.arccos, "asin": G.arcsin, "atan": G.arctan, "atanh": G.arctanh, "ceil": G.ceil,
        "cos": G.cos, "cosh": G.cosh, "erf": G.erf, "exp": G.exp, "floor": G.floor, "identity": G.identity,
        "logical_not": G.logical_not, "relu": G.relu, "round": G.round, "sigmoid": G.sigmoid, "sign": G.sign,
        "silu": G.silu, "sin": G.sin, "sinh": G.sinh, "softplus": G.softplus, "sqrt": G.sqrt, "tan": G.tan,
        "tanh": G.tanh,
        "exp2": lambda x: by_floats(G.exp2, x),
        "relu6": lambda x: G.activation(x, "relu6"),
        "softsign": lambda x: G.activation(x, "softsign"),
        "square": lambda x: G.square(x) if x.dtype.kind == "f" else x * x,
    },
)  # fmt: skip
_plain(
    "x y",
    {
        "add": G.add, "sub": G.subtract, "mul": G.multiply, "maximum": G.maximum, "minimum": G.minimum, "mod": G.mod,
        "equal": G.equal, "not_equal": G.not_equal, "less": G.less, "less_equal": G.less_equal, "greater": G.greater,
        "greater_equal": G.greater_equal, "logical_and": G.logical_and, "logical_or": G.logical_or,
        "logical_xor": G.logical_xor,
        "floor_div": lambda x, y: by_floats(lambda a, b: G.floor(a / b), x, y),
        "real_div": lambda x, y: by_floats(G.divide, x, y),
    },
)  # fmt: skip
_plain("cond a b", {"select": lambda cond, a, b: G.where(as_dtype(cond, BOOL), a, b)})


@mil
def _pow(x: Tensor, y: Tensor) -> Tensor:
    exponent = y.node.attributes.get("value") if isinstance(y, Tensor) else None
    if exponent is not None and exponent.ndim == 0 and x.dtype.kind == "f":
        return G.power(x, float(exponent))  # squares and roots are operations of their own
    return by_floats(G.power, x, y)


@mil
def _cast(x: Tensor, *, dtype: str) -> Tensor:
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
    return as_dtype(x, DTYPES[dtype])


def _with_numbers(defaults: Mapping[str, float | None], functions: Mapping[str, Callable[..., Tensor]]) -> None:
    """Add functions of x and of numbers, which are options; None: there is no default."""
    names = tuple(defaults)
    for name, function in functions.items():

        def call(x: Tensor, *, function: Callable[..., Tensor] = function, **given: Any) -> Tensor:
            return function(x, *(float(given.get(n, defaults[n])) for n in names))  # type: ignore[arg-type]

        optional = frozenset(n for n, default in defaults.items() if default is not None)
        OPERATIONS[name] = Mil(call, ("x",), optional, None, frozenset(names))


_with_numbers({"epsilon": 1e-4}, {"inverse": lambda x, epsilon: G.reciprocal(x + epsilon)})
_with_numbers({"epsilon": 1e-45}, {"log": lambda x, epsilon: G.log(x + epsilon)})
_with_numbers({"epsilon": 1e-12}, {"rsqrt": lambda x, epsilon: G.rsqrt(x + epsilon)})

# ---- activations -----------------------------------------------------------------------------------------------------

_with_numbers(
    {"alpha": None},
    {
        "elu": G.elu,
        "leaky_relu": G.leaky_relu,
        "threshold": lambda x, alpha: by_floats(lambda t: G.maximum(t, alpha), x),
        "thresholded_relu": lambda x, alpha: G.where(x >= alpha, x, 0.0),
    },
)
_with_numbers(
    {"alpha": None, "beta": None},
    {
        "clamped_relu": lambda x, alpha, beta: G.activation(x, Activation("clamped_leaky_relu", alpha, beta)),
        "clip": G.clip,
        "linear_activation": lambda x, alpha, beta: x * alpha + beta,
        "scaled_tanh": lambda x, alpha, beta: G.activation(x, Activation("scaled_tanh", alpha, beta)),
        "sigmoid_hard": lambda x, alpha, beta: G.activation(x, Activation("hard_sigmoid", alpha, beta)),
    },
)
_GELUS: Final = {"EXACT": "gelu", "TANH_APPROXIMATION": "gelu_tanh", "SIGMOID_APPROXIMATION": "gelu_sigmoid"}


@mil
def _gelu(x: Tensor, *, mode: str = "EXACT") -> Tensor:
    if mode not in _GELUS:
        raise ValueError(f"mode is {mode!r}, must be one of {', '.join(_GELUS)}")
    return G.activation(x, _GELUS[mode])


_plain("x alpha", {"prelu": G.prelu})


def _per_channel(x: Tensor, parameter: Tensor) -> Tensor:
    return G.reshape(parameter, (-1, *(1,) * (x.ndim - 2)))


@mil
def _softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    return _per_channel(x, alpha) * G.softplus(x * _per_channel(x, beta))


@mil
def _softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    return G.softmax(x, int(axis))


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(x: Tensor, *, axes: Any = None, keep_dims: bool = False) -> Tensor:
        numbers = None if axes is None else ints(axes)
        return by_floats(lambda t: function(t, numbers, keepdims=bool(keep_dims)), x)

    return reduced


def _index_reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(x: Tensor, *, axis: int = -1, keep_dims: bool = False, output_dtype: str = "int32") -> Tensor:
        del output_dtype  # int32 holds the others' values
        number = axis_of(axis, x.ndim)
        found = as_dtype(function(x if x.dtype.kind == "f" else as_dtype(x, F64), number), I32)
        return G.expand_dims(found, number) if keep_dims else found

    return reduced


_REDUCTIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "sum": G.sum, "mean": G.mean, "max": G.max, "min": G.min, "prod": G.prod, "sum_square": G.sum_of_squares,
    "log_sum_exp": G.logsumexp, "l1_norm": G.l1_norm, "l2_norm": G.l2_norm, "log_sum": G.log_sum,
}  # fmt: skip
for _name, _function in _REDUCTIONS.items():
    OPERATIONS[f"reduce_{_name}"] = Mil(
        _reduction(_function), ("x",), frozenset(("axes", "keep_dims")), None, frozenset(("axes", "keep_dims"))
    )
for _name, _function in (("argmax", G.argmax), ("argmin", G.argmin)):
    _options = frozenset(("axis", "keep_dims", "output_dtype"))
    OPERATIONS[f"reduce_{_name}"] = Mil(_index_reduction(_function), ("x",), _options, None, _options)


@mil
def _cumsum(x: Tensor, *, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Tensor:
    options = {"exclusive": bool(exclusive), "reverse": bool(reverse)}
    return by_floats(lambda t: G.cumsum(t, axis_of(axis, x.ndim), **options), x)


# ---- sorting ---------------------------------------------------------------------------------------------------------


@mil
def _topk(
    x: Tensor,
    *,
    k: int = 1,
    axis: int = -1,
    ascending: bool = False,
    sort: bool = True,
    return_indices: bool = True,
    output_indices_dtype: str = "int32",
) -> tuple[Tensor, ...]:
    del sort, output_indices_dtype  # sorted in any case; int32 holds the others' values
    number = axis_of(axis, x.ndim)
    count = x.shape[number] if int(k) == -1 else int(k)
    values, indices = G.top_k(x, count, largest=not ascending, axis=number)
    return (values, as_dtype(indices, I32)) if return_indices else (values,)


@mil
def _argsort(x: Tensor, *, axis: int = -1, ascending: bool = False) -> Tensor:
    return as_dtype(G.argsort(x, axis_of(axis, x.ndim), descending=not ascending), I32)


# ---- products --------------------------------------------------------------------------------------------------------


@mil
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return G.linear(x, weight, bias)


@mil
def _matmul(x: Tensor, y: Tensor, *, transpose_x: bool = False, transpose_y: bool = False) -> Tensor:
    left = G.swapaxes(x, -1, -2) if transpose_x else x
    return G.matmul(left, G.swapaxes(y, -1, -2) if transpose_y else y)


@mil
def _einsum(*values: Tensor, equation: str) -> Tensor:
    """``chw,whr->chr``, with or without a batch axis: MIL has no other equations."""
    parts = str(equation).replace(" ", "").replace("->", ",").split(",")
    ranks = {len(part) for part in parts}
    if len(values) != 2 or len(parts) != 3 or ranks - {3, 4} or len(ranks) != 1:
        raise ValueError(f"equation is {equation!r}, must be like 'nchw,nwhu->nchu' or 'chw,whr->chr'")
    (*n, c, h, w), second, result = list(parts[0]), parts[1], parts[2]
    last = second[-1]
    if len({*n, c, h, w, last}) != len(n) + 4 or (second, result) != (
        "".join((*n, w, h, last)),
        "".join((*n, c, h, last)),
    ):
        raise ValueError(f"equation is {equation!r}, must be like 'nchw,nwhu->nchu' or 'chw,whr->chr'")
    a, b = (G.swapaxes(value, -3, -2) for value in values)
    return G.swapaxes(G.matmul(a, b), -3, -2)


@mil
def _scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    scores = G.matmul(query, G.swapaxes(key, -1, -2)) * (1.0 / math.sqrt(query.shape[-1]))
    if attn_mask is not None:
        scores = G.where(attn_mask, scores, -math.inf) if attn_mask.dtype == BOOL else scores + attn_mask
    return G.matmul(G.softmax(scores, -1), value)


# ---- convolution and pooling -----------------------------------------------------------------------------------------


def _paddings(
    pad_type: str, pad: Any, sizes: Sequence[int], kernels: Sequence[int], strides: Sequence[int]
) -> list[tuple[int, int]]:
    """Before and after each spatial axis. `kernels` include the dilation."""
    kind = str(pad_type).lower()
    if kind == "valid":
        return [(0, 0)] * len(sizes)
    if kind == "custom":
        given = ints([0] * (2 * len(sizes)) if pad is None else pad)
        if len(given) != 2 * len(sizes):
            raise ValueError(f"pad has {len(given)} elements, expected {2 * len(sizes)}")
        return list(zip(given[::2], given[1::2], strict=True))
    if kind not in ("same", "same_lower"):
        raise ValueError(f"pad_type is {pad_type!r}, must be valid, same, same_lower or custom")
    totals = [max(0, (-(-n // s) - 1) * s + k - n) for n, k, s in zip(sizes, kernels, strides, strict=True)]
    before = [t // 2 if kind == "same" else t - t // 2 for t in totals]
    return [(b, t - b) for b, t in zip(before, totals, strict=True)]


def _window(x: Tensor, kernels: Sequence[int], strides: Any, dilations: Any) -> tuple[tuple[int, ...], ...]:
    """The spatial sizes, the strides, the dilations, and the kernels with their dilation."""
    sizes = x.shape[2:]
    steps = (1,) * len(sizes) if strides is None else ints(strides)
    gaps = (1,) * len(sizes) if dilations is None else ints(dilations)
    for name, given in (("kernel", kernels), ("strides", steps), ("dilations", gaps)):
        if len(given) != len(sizes) or min(given, default=1) < 1:
            raise ValueError(f"{name} is {list(given)}, but x has shape {x.shape}, with {len(sizes)} spatial axes")
    return sizes, steps, gaps, tuple((k - 1) * d + 1 for k, d in zip(kernels, gaps, strict=True))


@mil
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Tensor:
    sizes, steps, gaps, kernels = _window(x, weight.shape[2:], strides, dilations)
    padding = _paddings(pad_type, pad, sizes, kernels, steps)
    return G.conv(x, weight, bias, stride=steps, padding=padding, dilation=gaps, groups=int(groups))


@mil
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    pad: Any = None,
    output_shape: Any = None,
    pad_type: str = "valid",
    strides: Any = None,
    dilations: Any = None,
    groups: int = 1,
) -> Tensor:
    sizes, steps, gaps, kernels = _window(x, weight.shape[2:], strides, dilations)
    whole = [(n - 1) * s + k for n, s, k in zip(sizes, steps, kernels, strict=True)]
    kind = str(pad_type).lower()
    if kind in ("valid", "custom"):
        padding = _paddings(kind, pad, sizes, kernels, steps)
        wanted = [n - sum(p) for n, p in zip(whole, padding, strict=True)]
    elif kind == "same":
        padding = []
        wanted = [n * s for n, s in zip(sizes, steps, strict=True)]
    else:
        raise ValueError(f"pad_type is {pad_type!r}, must be valid, same or custom")
    if output_shape is not None:
        wanted = list(ints(output_shape)[2:])
    lost = [n - w for n, w in zip(whole, wanted, strict=True)]
    before = [max(0, t) // 2 if kind == "same" else padding[i][0] for i, t in enumerate(lost)]
    after = [t - b for t, b in zip(lost, before, strict=True)]
    return G.conv_transpose(
        x, weight, bias, stride=steps, padding=[(b, max(0, a)) for b, a in zip(before, after, strict=True)],
        output_padding=[max(0, -a) for a in after], dilation=gaps, groups=int(groups),
    )  # fmt: skip


class _Pool(NamedTuple):
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: list[tuple[int, int]]  # what the windows need
    stated: list[tuple[int, int]]  # what the file says: less, where windows pass the end because sizes are rounded up
    outputs: tuple[int, ...]


def _pool(x: Tensor, kernel_sizes: Any, strides: Any, pad_type: str, pad: Any, ceil_mode: bool) -> _Pool:
    kernel = ints(kernel_sizes)
    sizes, steps, _, _ = _window(x, kernel, strides, None)
    stated = _paddings(pad_type, pad, sizes, kernel, steps)
    padding, outputs = [], []
    for n, k, s, (b, a) in zip(sizes, kernel, steps, stated, strict=True):
        room = n + b + a - k
        count = (-(-room // s) if ceil_mode else room // s) + 1
        if ceil_mode and b + a > 0 and (count - 1) * s >= n + b:
            count -= 1
        padding.append((b, max(a, (count - 1) * s + k - n - b)))
        outputs.append(count)
    return _Pool(kernel, steps, padding, stated, tuple(outputs))


@mil
def _max_pool(
    x: Tensor, *, kernel_sizes: Any, strides: Any = None, pad_type: str, pad: Any = None, ceil_mode: bool = False
) -> Tensor:
    pool = _pool(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    return G.max_pool(x, pool.kernel, stride=pool.stride, padding=pool.padding)


@mil
def _l2_pool(
    x: Tensor, *, kernel_sizes: Any, strides: Any = None, pad_type: str, pad: Any = None, ceil_mode: bool = False
) -> Tensor:
    pool = _pool(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    return G.l2_pool(x, pool.kernel, stride=pool.stride, padding=pool.padding)


@mil
def _avg_pool(
    x: Tensor,
    *,
    kernel_sizes: Any,
    strides: Any = None,
    pad_type: str,
    pad: Any = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    pool = _pool(x, kernel_sizes, strides, pad_type, pad, bool(ceil_mode))
    counted = not exclude_padding_from_average
    y = G.average_pool(
        x, pool.kernel, stride=pool.stride, padding=pool.padding, count_includes_padding=counted
    )  # fmt: skip
    if not counted or pool.padding == pool.stated:
        return y
    # Elements past the stated padding do not count, as in PyTorch.
    scale: Array = np.ones((), np.float32)
    for i, (n, k, s, (b, a)) in enumerate(zip(x.shape[2:], pool.kernel, pool.stride, pool.stated, strict=True)):
        starts = np.arange(pool.outputs[i]) * s
        counts = np.minimum(starts + k, n + b + a) - starts
        scale = scale[..., None] * (k / counts).astype(np.float32)
    return y * scale


# ---- normalization ---------------------------------------------------------------------------------------------------


@mil
def _batch_norm(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    mean: Any,
    variance: Any,
    epsilon: float = 1e-5,
) -> Tensor:
    """With the file's statistics, which are not parameters."""
    return G.batch_norm(
        x, gamma, beta, training=False, running_mean=mean, running_var=variance, eps=float(epsilon)
    )  # fmt: skip


@mil
def _instance_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, *, epsilon: float = 1e-5
) -> Tensor:
    return G.instance_norm(x, gamma, beta, eps=float(epsilon))


@mil
def _layer_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, *, axes: Any = None, epsilon: float = 1e-5
) -> Tensor:
    numbers = sorted(axis_of(a, x.ndim) for a in (range(x.ndim) if axes is None else ints(axes)))
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"axes is {numbers}, must name one axis or more, each once")
    order = [i for i in range(x.ndim) if i not in numbers] + numbers
    y = G.layer_norm(G.transpose(x, order), gamma, beta, axis=-len(numbers), eps=float(epsilon))
    return G.transpose(y, [order.index(i) for i in range(x.ndim)])


@mil
def _l2_norm(x: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}, must have 3 axes or more")
    return x * G.rsqrt(G.sum_of_squares(x, (-3, -2, -1), keepdims=True) + float(epsilon))


@mil
def _local_response_norm(x: Tensor, *, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Tensor:
    width, (n, c) = int(size), x.shape[:2]
    squares = G.reshape(G.square(x), (n, 1, c, math.prod(x.shape[2:])))
    around = [(width // 2, (width - 1) // 2), (0, 0)]
    mean = G.reshape(G.average_pool(squares, (width, 1), stride=1, padding=around), x.shape)
    return x / G.power(mean * float(alpha) + float(k), float(beta))


# ---- recurrent layers ------------------------------------------------------------------------------------------------

# MIL has no parameters of these activations; docs/apple.md says how that is read.
_GATES: Final[dict[str, str | Activation]] = {
    "tanh": "tanh", "sigmoid": "sigmoid", "relu": "relu", "linear": "identity",
    "hard_sigmoid": Activation("hard_sigmoid", 0.2, 0.5), "scaled_tanh": Activation("scaled_tanh", 1.0, 1.0),
}  # fmt: skip


def _gate(name: str) -> str | Activation:
    found = _GATES.get(str(name).lower())
    if found is None:
        raise ValueError(f"an activation is {name!r}, must be one of {', '.join(_GATES)}")
    return found


def _ordered(parameter: Tensor | None, order: Sequence[int]) -> Tensor | None:
    """The gates in another order."""
    if parameter is None:
        return None
    parts = G.split(parameter, len(order))
    return G.concatenate([parts[i] for i in order])


def _is_reversed(direction: str, allowed: Sequence[str]) -> bool:
    if direction not in allowed:
        raise ValueError(f"direction is {direction!r}, must be one of {', '.join(allowed)}")
    return direction == "reverse"


def _sequence(y: Tensor, hn: Tensor, output_sequence: bool, backwards: bool) -> Tensor:
    if not output_sequence:
        return G.expand_dims(hn, 0)
    return G.flip(y, 0) if backwards else y


@mil
def _lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> tuple[Tensor, ...]:
    """Gates in the order i f o z, where ours are i f g o and z is g; the output gate's peephole reads the new state."""
    if clip is not None:
        raise ValueError("clip is given, which is not supported")
    backwards = _is_reversed(direction, ("forward", "reverse", "bidirectional"))

    def cell(wx: Tensor, wh: Tensor, b: Tensor | None, eyes: Tensor | None) -> LstmWeights:
        if eyes is not None:
            i, f, o = G.split(eyes, 3)
            eyes = G.concatenate([i, f, G.zeros(i.shape, i.dtype), o])
        parts: list[Any] = [*(_ordered(part, (0, 1, 3, 2)) for part in (wx, wh, b)), eyes]
        return LstmWeights(*parts)

    r = _gate(recurrent_activation)
    activations = LstmActivations(r, r, _gate(cell_activation), r, _gate(activation))
    forward = cell(weight_ih, weight_hh, bias, peephole)
    if direction != "bidirectional":
        found = G.lstm(G.flip(x, 0) if backwards else x, forward, initial_h, initial_c, activations=activations)
        return _sequence(found.y, found.hn, output_sequence, backwards), found.hn, found.cn
    if weight_ih_back is None or weight_hh_back is None:
        raise ValueError("direction is bidirectional, but weight_ih_back or weight_hh_back is missing")
    cells = [forward, cell(weight_ih_back, weight_hh_back, bias_back, peephole_back)]
    h0, c0 = (G.stack(G.split(state, 2, -1)) for state in (initial_h, initial_c))
    both = G.lstm(x, cells, h0, c0, bidirectional=True, activations=activations)
    hn, cn = (G.concatenate([state[0], state[1]], -1) for state in (both.hn, both.cn))
    return _sequence(both.y, hn, output_sequence, False), hn, cn


@mil
def _gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    input_bias: Tensor | None = None,
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
) -> tuple[Tensor, ...]:
    """Gates in the order r o z, where ours are r z n and o is n. `bias` belongs to the recurrent product."""
    backwards = _is_reversed(direction, ("forward", "reverse"))
    parts: list[Any] = [_ordered(part, (0, 2, 1)) for part in (weight_ih, weight_hh, input_bias, bias)]
    r = _gate(recurrent_activation)
    found = G.gru(
        G.flip(x, 0) if backwards else x, GruWeights(*parts), initial_h, kind="after" if reset_after else "before",
        activations=GruActivations(r, r, _gate(activation)),
    )  # fmt: skip
    return _sequence(found.y, found.hn, output_sequence, backwards), found.hn


@mil
def _rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> tuple[Tensor, ...]:
    backwards = _is_reversed(direction, ("forward", "reverse"))
    weights: Any = RnnWeights(weight_ih, weight_hh, bias)
    found = G.rnn(G.flip(x, 0) if backwards else x, weights, initial_h, activation=_gate(activation))
    return _sequence(found.y, found.hn, output_sequence, backwards), found.hn
