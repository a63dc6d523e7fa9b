"""A case for every row of MPSGraph's table but the recurrent layers: the call, its inputs, and the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as TF

from retrograd.mpsgraph import MPSDataType, MPSGraphPaddingMode, MPSGraphScatterMode
from support.mpsgraph import constant

Array = np.ndarray[Any, Any]


class Case(NamedTuple):
    name: str
    build: Callable[..., Any]  # of the graph and its tensors
    arrays: list[Array]
    oracle: Callable[..., Any]  # of torch's tensors
    wrt: tuple[int, ...]


def made(cases: list[Case]) -> Callable[..., None]:
    """A function that adds cases to a list. Gradients are of all inputs of floating point, unless `wrt` says which."""

    def case(
        name: str, build: Callable[..., Any], arrays: Sequence[Array], oracle: Callable[..., Any], wrt: Any = None
    ) -> None:
        floats = tuple(i for i, a in enumerate(arrays) if a.dtype.kind == "f")
        cases.append(Case(name, build, list(arrays), oracle, floats if wrt is None else tuple(wrt)))

    return case


CASES: list[Case] = []
case = made(CASES)


def _random(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> Array:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def _integers(high: int, *shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, high, *shape]).integers(0, high, shape).astype(np.int32)


X = _random(3, 5)
POSITIVE = _random(3, 5, low=0.2, high=3.0)
INSIDE = _random(3, 5, low=-0.9, high=0.9)
ABOVE = _random(3, 5, low=1.1, high=3.0)
SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.5, 2.5, -0.5, -1.5])
Y = _random(3, 5, seed=1)
ROW = _random(1, 5, seed=2)
BOOLS = _integers(2, 3, 5).astype(np.bool_), _integers(2, 3, 5, seed=1).astype(np.bool_)
INTEGERS = _integers(50, 3, 5), _integers(7, 3, 5, seed=1)


def _round_away(x: Any) -> Any:
    return torch.sign(x) * torch.floor(torch.abs(x) + 0.5)


def _vjp(function: Callable[[Any], Any], gradient: Any, x: Any) -> Any:
    """The gradient of x, with a derivative in the incoming gradient."""
    return torch.func.vjp(function, x.detach())[1](gradient)[0]


# ---- arithmetic ------------------------------------------------------------------------------------------------------

for _name, _oracle, _x in (
    ("identity", lambda x: x, X),
    ("exponent", torch.exp, X),
    ("exponentBase2", torch.exp2, X),
    ("exponentBase10", lambda x: 10**x, X),
    ("logarithm", torch.log, POSITIVE),
    ("logarithmBase2", torch.log2, POSITIVE),
    ("logarithmBase10", torch.log10, POSITIVE),
    ("square", torch.square, X),
    ("squareRoot", torch.sqrt, POSITIVE),
    ("reverseSquareRoot", torch.rsqrt, POSITIVE),
    ("reciprocal", torch.reciprocal, POSITIVE),
    ("absolute", torch.abs, X),
    ("negative", torch.neg, X),
    ("sin", torch.sin, X),
    ("cos", torch.cos, X),
    ("tan", torch.tan, INSIDE),
    ("sinh", torch.sinh, X),
    ("cosh", torch.cosh, X),
    ("tanh", torch.tanh, X),
    ("asin", torch.asin, INSIDE),
    ("acos", torch.acos, INSIDE),
    ("atan", torch.atan, X),
    ("asinh", torch.asinh, X),
    ("acosh", torch.acosh, ABOVE),
    ("atanh", torch.atanh, INSIDE),
    ("erf", torch.erf, X),
    ("reLU", torch.relu, X),
    ("sigmoid", torch.sigmoid, X),
):
    case(_name, lambda g, x, n=_name: getattr(g, n)(with_=x, name=None), [_x], _oracle)
for _name, _oracle in (
    ("sign", torch.sign),
    ("ceil", torch.ceil),
    ("floor", torch.floor),
    ("rint", torch.round),
    ("round", _round_away),
    ("isInfinite", torch.isinf),
    ("isFinite", torch.isfinite),
    ("isNaN", torch.isnan),
    ("signbit", lambda x: torch.signbit(x).to(x.dtype)),
    ("not_", lambda x: torch.logical_not(x).to(x.dtype)),
):
    _data = SPECIAL[SPECIAL == SPECIAL] if _name == "sign" else SPECIAL
    case(_name, lambda g, x, n=_name: getattr(g, n)(with_=x, name=None), [_data], _oracle, ())
case("truncate", lambda g, x: g.truncate(x, name=None), [SPECIAL], torch.trunc, ())
case("reciprocalSquareRoot", lambda g, x: g.reciprocalSquareRoot(x, name=None), [POSITIVE], torch.rsqrt)
case("absoluteSquare", lambda g, x: g.absoluteSquare(tensor=x, name=None), [X], torch.square)
case("bitwiseNOT", lambda g, x: g.bitwiseNOT(x, name=None), INTEGERS[:1], torch.bitwise_not)
case(
    "bitwisePopulationCount", lambda g, x: g.bitwisePopulationCount(x, name=None), INTEGERS[:1],
    lambda x: torch.tensor([[bin(v).count("1") for v in r] for r in x.tolist()], dtype=torch.int32),
)  # fmt: skip

_MISSING = X.copy()
_MISSING[0, 0] = _MISSING[1, 1] = np.nan
for _name, _oracle, _pair in (
    ("addition", torch.add, (X, ROW)), ("subtraction", torch.sub, (X, ROW)), ("multiplication", torch.mul, (X, ROW)),
    ("division", torch.div, (X, POSITIVE)), ("modulo", torch.fmod, (X, POSITIVE)),
    ("floorModulo", torch.remainder, (X, POSITIVE)), ("power", torch.pow, (POSITIVE, X)),
    ("minimum", torch.fmin, (X, Y)), ("maximum", torch.fmax, (X, Y)),
    ("minimumWithNaNPropagation", torch.minimum, (X, Y)), ("maximumWithNaNPropagation", torch.maximum, (X, Y)),
    ("divisionNoNaN", lambda a, b: torch.where(b == 0, torch.zeros_like(a), a / torch.where(b == 0, 1.0, b)),
     (X, np.where(np.abs(Y) < 0.7, 0.0, Y))),
):  # fmt: skip
    case(_name, lambda g, a, b, n=_name: getattr(g, n)(a, b, name=None), _pair, _oracle)
for _name, _oracle in (
    ("equal", torch.eq), ("notEqual", torch.ne), ("lessThan", torch.lt), ("lessThanOrEqualTo", torch.le),
    ("greaterThan", torch.gt), ("greaterThanOrEqualTo", torch.ge),
):  # fmt: skip
    _equal = np.where(X > 0, X, Y)
    case(_name, lambda g, a, b, n=_name: getattr(g, n)(a, b, name=None), [_equal, X], _oracle, ())
for _name, _oracle in (
    ("logicalAND", torch.logical_and), ("logicalOR", torch.logical_or), ("logicalXOR", torch.logical_xor),
    ("logicalNAND", lambda a, b: ~torch.logical_and(a, b)), ("logicalNOR", lambda a, b: ~torch.logical_or(a, b)),
    ("logicalXNOR", lambda a, b: ~torch.logical_xor(a, b)),
):  # fmt: skip
    for _pair in (BOOLS, (BOOLS[0].astype(np.float64), BOOLS[1].astype(np.float64) * 2)):
        case(
            _name, lambda g, a, b, n=_name: getattr(g, n)(a, b, name=None), _pair,
            lambda a, b, f=_oracle: f(a, b).to(a.dtype), (),
        )  # fmt: skip
for _name, _oracle in (
    ("bitwiseAND", torch.bitwise_and), ("bitwiseOR", torch.bitwise_or), ("bitwiseXOR", torch.bitwise_xor),
    ("bitwiseLeftShift", torch.bitwise_left_shift), ("bitwiseRightShift", torch.bitwise_right_shift),
):  # fmt: skip
    case(_name, lambda g, a, b, n=_name: getattr(g, n)(a, b, name=None), INTEGERS, _oracle)
case("minimum ignores NaN", lambda g, a, b: g.minimum(a, b, name=None), [_MISSING, Y], torch.fmin, ())
case("atan2", lambda g, a, b: g.atan2(withPrimaryTensor=a, secondaryTensor=b, name=None), [X, Y], torch.atan2)
case(
    "select", lambda g, p, a, b: g.select(predicate=p, trueTensor=a, falseTensor=b, name=None), [BOOLS[0], X, ROW],
    torch.where,
)  # fmt: skip
case(
    "clamp", lambda g, x, a, b: g.clamp(x, min=a, max=b, name=None), [X, np.full((1, 5), -0.7), np.full((3, 1), 0.9)],
    lambda x, a, b: torch.minimum(torch.maximum(x, a), b),
)  # fmt: skip

# ---- reductions ------------------------------------------------------------------------------------------------------

X3 = _random(2, 3, 4, seed=3)
for _name, _oracle in (
    ("Sum", lambda x, d: x.sum(d, keepdim=True)), ("Maximum", lambda x, d: x.amax(d, keepdim=True)),
    ("Minimum", lambda x, d: x.amin(d, keepdim=True)), ("MaximumPropagateNaN", lambda x, d: x.amax(d, keepdim=True)),
    ("MinimumPropagateNaN", lambda x, d: x.amin(d, keepdim=True)),
):  # fmt: skip
    _method = f"reduction{_name}"
    case(
        _method,
        lambda g, x, n=_method: getattr(g, n)(with_=x, axis=-2, name=None),
        [X3],
        lambda x, f=_oracle: f(x, (1,)),
    )
    case(
        _method, lambda g, x, n=_method: getattr(g, n)(with_=x, axes=[0, -1, 0], name=None), [X3],
        lambda x, f=_oracle: f(x, (0, 2)),
    )  # fmt: skip
    case(
        _method,
        lambda g, x, n=_method: getattr(g, n)(with_=x, axes=None, name=None),
        [X3],
        lambda x, f=_oracle: f(x, (0, 1, 2)),
    )
    case(_method, lambda g, x, n=_method: getattr(g, n)(with_=x, axes=[], name=None), [X3], lambda x: x)
case(
    "reductionProduct",
    lambda g, x: g.reductionProduct(with_=x, axis=1, name=None),
    [X3],
    lambda x: x.prod(1, keepdim=True),
)
case(
    "reductionProduct", lambda g, x: g.reductionProduct(with_=x, axes=[1, 2], name=None), [X3],
    lambda x: x.prod(2, keepdim=True).prod(1, keepdim=True),
)  # fmt: skip
for _name, _oracle in (("And", torch.all), ("Or", torch.any)):
    _method = f"reduction{_name}"
    case(
        _method, lambda g, x, n=_method: getattr(g, n)(with_=x, axis=1, name=None), BOOLS[:1],
        lambda x, f=_oracle: f(x, 1, keepdim=True),
    )  # fmt: skip
    case(
        _method, lambda g, x, n=_method: getattr(g, n)(with_=x, axes=[0], name=None), INTEGERS[1:],
        lambda x, f=_oracle: f(x != 0, 0, keepdim=True).to(x.dtype),
    )  # fmt: skip
case(
    "reductionMaximum ignores NaN", lambda g, x: g.reductionMaximum(with_=x, axis=1, name=None), [_MISSING],
    lambda x: torch.nan_to_num(x, nan=-9e9).amax(1, keepdim=True), (),
)  # fmt: skip
for _name, _oracle in (("ArgMaximum", torch.argmax), ("ArgMinimum", torch.argmin)):
    case(
        f"reduction{_name}", lambda g, x, n=f"reduction{_name}": getattr(g, n)(with_=x, axis=1, name=None), [X3],
        lambda x, f=_oracle: f(x, 1, keepdim=True).int(), (),
    )  # fmt: skip
case("mean", lambda g, x: g.mean(of=x, axes=[0, 2], name=None), [X3], lambda x: x.mean((0, 2), keepdim=True))
case(
    "variance", lambda g, x: g.variance(of=x, axes=[0, 2], name=None), [X3],
    lambda x: x.var((0, 2), correction=0, keepdim=True),
)  # fmt: skip
case(
    "variance", lambda g, x, m: g.variance(of=x, mean=m, axes=[1], name=None), [X3, _random(2, 1, 4)],
    lambda x, m: ((x - m) ** 2).mean(1, keepdim=True),
)  # fmt: skip


def _exclusive(x: Any, scan: Callable[[Any], Any], start: float, axis: int) -> Any:
    """The scan of the elements before each, from the end."""
    turned = torch.flip(x, (axis,))
    first = torch.full_like(turned.narrow(axis, 0, 1), start)
    return torch.flip(torch.cat([first, scan(turned).narrow(axis, 0, x.shape[axis] - 1)], axis), (axis,))


for _name, _scan, _start in (
    ("Sum", lambda x: torch.cumsum(x, 1), 0.0), ("Product", lambda x: torch.cumprod(x, 1), 1.0),
    ("Maximum", lambda x: torch.cummax(x, 1)[0], -np.inf), ("Minimum", lambda x: torch.cummin(x, 1)[0], np.inf),
):  # fmt: skip
    _method = f"cumulative{_name}"
    case(_method, lambda g, x, n=_method: getattr(g, n)(x, axis=1, name=None), [X3], _scan)
    case(_method, lambda g, x, n=_method: getattr(g, n)(x, axisTensor=constant(g, 1), name=None), [X3], _scan)
    for _tensor in (False, True):
        case(
            _method,
            lambda g, x, n=_method, t=_tensor: getattr(g, n)(
                x, **({"axisTensor": constant(g, -2)} if t else {"axis": -2}), exclusive=True, reverse=True, name=None
            ), [X3],
            lambda x, f=_scan, s=_start: _exclusive(x, f, s, 1), () if np.isinf(_start) else None,
        )  # fmt: skip
for _axis in ("axis", "axisTensor"):

    def _at(g: Any, value: int, key: str = _axis) -> dict[str, Any]:
        return {key: value if key == "axis" else constant(g, value)}

    case("sort", lambda g, x, at=_at: g.sort(x, **at(g, 1), name=None), [X3], lambda x: x.sort(1)[0])
    case(
        "sort",
        lambda g, x, at=_at: g.sort(x, **at(g, -1), descending=True, name=None),
        [X3],
        lambda x: x.sort(-1, descending=True)[0],
    )
    case("argSort", lambda g, x, at=_at: g.argSort(x, **at(g, 1), name=None), [X3], lambda x: x.argsort(1).int(), ())
    case(
        "argSort", lambda g, x, at=_at: g.argSort(x, **at(g, 1), descending=True, name=None), [X3],
        lambda x: x.argsort(1, descending=True).int(), (),
    )  # fmt: skip


def _top(x: Any, k: int, axis: int, largest: bool) -> tuple[Any, Any]:
    values, places = torch.topk(x, k, axis, largest=largest)
    return values, places.int()


def _top_gradient(g: Any, x: Any, k: int, axis: int, largest: bool) -> Any:
    return torch.zeros_like(x).scatter(axis, torch.topk(x, k, axis, largest=largest)[1], g)


for _name, _largest in (("topK", True), ("bottomK", False)):
    for _tensors in (False, True):

        def _ks(g: Any, tensors: bool = _tensors) -> dict[str, Any]:
            return {"axisTensor": constant(g, 1), "kTensor": constant(g, 2)} if tensors else {"axis": 1, "k": 2}

        case(
            _name, lambda g, x, n=_name, ks=_ks: getattr(g, n)(x, **ks(g), name=None), [X3],
            lambda x, b=_largest: _top(x, 2, 1, b),
        )  # fmt: skip
        case(
            f"{_name}Gradient",
            lambda g, d, x, n=f"{_name}Gradient", ks=_ks: getattr(g, n)(d, source=x, **ks(g), name=None),
            [_random(2, 2, 4), X3],
            lambda d, x, b=_largest: _top_gradient(d, x, 2, 1, b),
            (0,),
        )
for _tensor in (False, True):

    def _k(g: Any, tensor: bool = _tensor) -> dict[str, Any]:
        return {"kTensor": constant(g, 3)} if tensor else {"k": 3}

    case("topK", lambda g, x, k=_k: g.topK(x, **k(g), name=None), [X3], lambda x: _top(x, 3, -1, True))
    case(
        "topKGradient", lambda g, d, x, k=_k: g.topKGradient(d, input=x, **k(g), name=None), [_random(2, 3, 3), X3],
        lambda d, x: _top_gradient(d, x, 3, -1, True), (0,),
    )  # fmt: skip

# ---- shapes ----------------------------------------------------------------------------------------------------------

case("reshape", lambda g, x: g.reshape(x, shape=[4, -1], name=None), [X3], lambda x: x.reshape(4, -1))
case("reshape", lambda g, x: g.reshape(x, shapeTensor=constant(g, [4, 6]), name=None), [X3], lambda x: x.reshape(4, 6))
case(
    "reshape like another", lambda g, x, y: g.reshape(x, shapeTensor=g.shapeOf(y, name=None), name=None),
    [X3, _random(6, 4)], lambda x, y: x.reshape(y.shape), (0,),
)  # fmt: skip
case("transpose", lambda g, x: g.transpose(x, permutation=[2, 0, 1], name=None), [X3], lambda x: x.permute(2, 0, 1))
case(
    "transposeTensor", lambda g, x: g.transposeTensor(x, dimension=0, withDimension=-1, name=None), [X3],
    lambda x: x.transpose(0, -1),
)  # fmt: skip
_ONES = _random(1, 3, 1, 2)
case("squeeze", lambda g, x: g.squeeze(x, name=None), [_ONES], lambda x: x.reshape(3, 2))
case("squeeze", lambda g, x: g.squeeze(x, axis=2, name=None), [_ONES], lambda x: x.reshape(1, 3, 2))
case("squeeze", lambda g, x: g.squeeze(x, axes=[0, -2], name=None), [_ONES], lambda x: x.reshape(3, 2))
case(
    "squeeze", lambda g, x: g.squeeze(x, axesTensor=constant(g, [0]), name=None), [_ONES], lambda x: x.reshape(3, 1, 2)
)
case("expandDims", lambda g, x: g.expandDims(x, axis=1, name=None), [X], lambda x: x[:, None])
case("expandDims", lambda g, x: g.expandDims(x, axes=[0, -1], name=None), [X], lambda x: x[None, :, :, None])
case("expandDims", lambda g, x: g.expandDims(x, axesTensor=constant(g, [0]), name=None), [X], lambda x: x[None])
case("broadcast", lambda g, x: g.broadcast(x, shape=[2, 3, 5], name=None), [ROW], lambda x: x.expand(2, 3, 5))
case(
    "broadcast",
    lambda g, x: g.broadcast(x, shapeTensor=constant(g, [3, 5]), name=None),
    [ROW],
    lambda x: x.expand(3, 5),
)
case("flatten2D", lambda g, x: g.flatten2D(x, axis=-1, name=None), [X3], lambda x: x.reshape(6, 4))
case("flatten2D", lambda g, x: g.flatten2D(x, axisTensor=constant(g, 1), name=None), [X3], lambda x: x.reshape(2, 12))
case("flatten2D", lambda g, x: g.flatten2D(x, axis=3, name=None), [X3], lambda x: x.reshape(24, 1))
case("reverse", lambda g, x: g.reverse(x, name=None), [X3], lambda x: x.flip(0, 1, 2))
case("reverse", lambda g, x: g.reverse(x, axes=[1], name=None), [X3], lambda x: x.flip(1))
case("reverse", lambda g, x: g.reverse(x, axesTensor=constant(g, [0, 2]), name=None), [X3], lambda x: x.flip(0, 2))
case("cast", lambda g, x: g.cast(x, to=MPSDataType.int32, name=None), [X], lambda x: x.int(), ())
case("cast", lambda g, x: g.cast(x, to=MPSDataType.float32, name=None), INTEGERS[:1], lambda x: x.float())
case("shapeOf", lambda g, x: g.shapeOf(x, name=None), [X3], lambda x: torch.tensor(x.shape, dtype=torch.int32), ())
for _along, _shaped in ((a, s) for a in ("alongAxis", "alongAxisTensor") for s in ("withShape", "withShapeTensor")):
    case(
        "coordinate",
        lambda g, x, a=_along, s=_shaped: g.coordinate(
            **{a: 1 if a == "alongAxis" else constant(g, 1), s: [2, 3] if s == "withShape" else constant(g, [2, 3])}
        ), [X], lambda x: torch.arange(3, dtype=torch.int32).expand(2, 3), (),
    )  # fmt: skip
for _numbers in ((1, 0), (-1, 1)):

    def _band(x: Any, lower: int = _numbers[0], upper: int = _numbers[1]) -> Any:
        kept = x if upper < 0 else torch.tril(x, upper)
        return kept if lower < 0 else torch.triu(kept, -lower)

    case("bandPart", lambda g, x, n=_numbers: g.bandPart(x, numLower=n[0], numUpper=n[1], name=None), [X3], _band)
    case(
        "bandPart",
        lambda g, x, n=_numbers: g.bandPart(
            x, numLowerTensor=constant(g, n[0]), numUpperTensor=constant(g, n[1]), name=None
        ), [X3], _band,
    )  # fmt: skip

# ---- joining and slicing ---------------------------------------------------------------------------------------------

case(
    "concatTensor",
    lambda g, a, b: g.concatTensor(a, with_=b, dimension=0, name=None),
    [X, ROW],
    lambda a, b: torch.cat([a, b]),
)
case(
    "concatTensors",
    lambda g, a, b: g.concatTensors([a, b, a], dimension=-1, name=None),
    [X, Y],
    lambda a, b: torch.cat([a, b, a], -1),
)
for _interleave in (False, True):
    case(
        "concatTensors",
        lambda g, a, b, i=_interleave: g.concatTensors([a, b], dimension=1, interleave=i, name=None),
        [X, Y],
        lambda a, b, i=_interleave: torch.stack([a, b], 2).reshape(3, 10) if i else torch.cat([a, b], 1),
    )
case("stack", lambda g, a, b: g.stack([a, b], axis=1, name=None), [X, Y], lambda a, b: torch.stack([a, b], 1))
case("split", lambda g, x: g.split(x, splitSizes=[1, 0, 4], axis=1, name=None), [X], lambda x: x.split([1, 0, 4], 1))
case(
    "split",
    lambda g, x: g.split(x, splitSizesTensor=constant(g, [1, 4]), axis=1, name=None),
    [X],
    lambda x: x.split([1, 4], 1),
)
case("split", lambda g, x: g.split(x, numSplits=3, axis=0, name=None), [X], lambda x: x.split(1, 0))
case("tileTensor", lambda g, x: g.tileTensor(x, withMultiplier=[2, 3], name=None), [X], lambda x: x.repeat(2, 3))
case(
    "tileGradient",
    lambda g, d, x: g.tileGradient(withIncomingGradientTensor=d, sourceTensor=x, withMultiplier=[2, 1], name=None),
    [_random(6, 5), X], lambda d, x: d.reshape(2, 3, 5).sum(0), (0,),
)  # fmt: skip
for _mode, _torch in (
    ("constant", "constant"),
    ("zero", "constant"),
    ("reflect", "reflect"),
    ("clampToEdge", "replicate"),
    ("periodic", "circular"),
):

    def _padded(x: Any, mode: str = _torch, value: float = 1.5 if _mode == "constant" else 0.0) -> Any:
        return TF.pad(x[None, None], (2, 1, 1, 1), mode, *([value] if mode == "constant" else []))[0, 0]

    case(
        f"padTensor {_mode}",
        lambda g, x, m=_mode: g.padTensor(
            x, with_=MPSGraphPaddingMode[m], leftPadding=[1, 2], rightPadding=[1, 1], constantValue=1.5, name=None
        ), [X], _padded,
    )  # fmt: skip

    def _pad_gradient(d: Any, x: Any, pad: Callable[..., Any] = _padded) -> Any:
        return _vjp(pad, d, x)

    case(
        f"padGradient {_mode}",
        lambda g, d, x, m=_mode: g.padGradient(
            withIncomingGradientTensor=d, sourceTensor=x, paddingMode=MPSGraphPaddingMode[m], leftPadding=[1, 2],
            rightPadding=[1, 1], name=None,
        ), [_random(5, 8), X], _pad_gradient, (0,),
    )  # fmt: skip
case(
    "padTensor symmetric",
    lambda g, x: g.padTensor(
        x, with_=MPSGraphPaddingMode.symmetric, leftPadding=[1], rightPadding=[1], constantValue=0.0, name=None
    ), [np.array([1.0, 2, 3, 4])], lambda x: x[[0, 0, 1, 2, 3, 3]],
)  # fmt: skip


case("sliceTensor", lambda g, x: g.sliceTensor(x, dimension=1, start=-3, length=2, name=None), [X], lambda x: x[:, 2:4])
case(
    "sliceTensor", lambda g, x: g.sliceTensor(x, starts=[0, -4], ends=[3, 5], strides=[2, 1], name=None), [X],
    lambda x: x[0:3:2, -4:5],
)  # fmt: skip
_LISTS = {"starts": [2, 1], "ends": [3, 2], "strides": [1, 2]}
_MASKS = {"startMask": 0, "endMask": 2, "squeezeMask": 1}


def _as_tensors(g: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: constant(g, value) for name, value in zip(names, _LISTS.values(), strict=True)}


for _extra in (lambda g: _LISTS, lambda g: _as_tensors(g, ("start", "end", "strideTensor"))):
    case("sliceTensor", lambda g, x, e=_extra: g.sliceTensor(x, **e(g), **_MASKS, name=None), [X], lambda x: x[2, 1::2])
    case(
        "sliceGradientTensor",
        lambda g, d, e=_extra: g.sliceGradientTensor(
            d, fwdInShapeTensor=constant(g, [3, 5]), **e(g), **_MASKS, name=None
        ),
        [_random(2)],
        lambda d: _vjp(lambda x: x[2, 1::2], d, torch.zeros(3, 5, dtype=d.dtype)),
    )
case(
    "sliceTensor",
    lambda g, x: g.sliceTensor(x, start=constant(g, [1, 0]), sizeTensor=constant(g, [1, -1]), squeezeMask=1, name=None),
    [X],
    lambda x: x[1],
)
case(
    "sliceGradientTensor",
    lambda g, d: g.sliceGradientTensor(
        d,
        fwdInShapeTensor=constant(g, [3, 5]),
        start=constant(g, [1, 2]),
        sizeTensor=constant(g, [2, 3]),
        squeezeMask=0,
        name=None,
    ),
    [_random(2, 3)],
    lambda d: TF.pad(d, (2, 0, 1, 0)),
)
case(
    "sliceGradientTensor",
    lambda g, d: g.sliceGradientTensor(
        d, fwdInShapeTensor=constant(g, [3, 5]), starts=[1, 2], ends=[3, 5], strides=[1, 1], name=None
    ), [_random(2, 3)], lambda d: TF.pad(d, (2, 0, 1, 0)),
)  # fmt: skip


def _updated(x: Any, u: Any, index: Any) -> Any:
    mask = torch.zeros(x.shape, dtype=torch.bool)
    mask[index] = True
    return torch.zeros_like(x).masked_scatter(mask, u) + torch.where(mask, 0.0, x)


for _names in (tuple(_LISTS), ("startsTensor", "endsTensor", "stridesTensor")):

    def _ranges(g: Any, names: Sequence[str] = _names) -> dict[str, Any]:
        return dict(_LISTS) if names[0] == "starts" else _as_tensors(g, names)

    case(
        "sliceUpdateDataTensor", lambda g, x, u, r=_ranges: g.sliceUpdateDataTensor(x, update=u, **r(g), name=None),
        [X, _random(1, 1)], lambda x, u: _updated(x, u, (slice(2, 3), slice(1, 2, 2))),
    )  # fmt: skip
    case(
        "sliceUpdateDataTensor",
        lambda g, x, u, r=_ranges: g.sliceUpdateDataTensor(x, update=u, **r(g), **_MASKS, name=None),
        [X, _random(2)],
        lambda x, u: _updated(x, u, (2, slice(1, None, 2))),
    )

# ---- gathering and scattering ----------------------------------------------------------------------------------------

_PLACES = np.array([[1, 0, 1], [2, 2, 0]], np.int32)
case(
    "gather", lambda g, x, i: g.gather(withUpdatesTensor=x, indicesTensor=i, axis=1, batchDimensions=0, name=None),
    [X3, _PLACES], lambda x, i: x[:, i.long()],
)  # fmt: skip
case(
    "gather", lambda g, x, i: g.gather(withUpdatesTensor=x, indicesTensor=i, axis=1, batchDimensions=1, name=None),
    [X3, _PLACES], lambda x, i: torch.stack([x[n, i[n].long()] for n in range(2)]),
)  # fmt: skip
case(
    "gatherND", lambda g, x, i: g.gatherND(withUpdatesTensor=x, indicesTensor=i, batchDimensions=0, name=None),
    [X3, np.array([[0, 2], [1, 0], [0, 2]], np.int32)], lambda x, i: x[i[:, 0].long(), i[:, 1].long()],
)  # fmt: skip
_ALONG = np.array([[[1, 0, 2, 1]], [[0, 0, 1, 2]]], np.int32)
_UPDATES = _random(2, 1, 4, seed=5)
for _kind in ("Axis", "AxisTensor"):

    def _along_axis(g: Any, name: str, kind: str = _kind, **labels: Any) -> Any:
        return getattr(g, f"{name}Along{kind}")(1 if kind == "Axis" else constant(g, 1), **labels, name=None)

    case(
        f"gatherAlong{_kind}", lambda g, x, i, f=_along_axis: f(g, "gather", updates=x, indices=i), [X3, _ALONG],
        lambda x, i: torch.gather(x, 1, i.long()),
    )  # fmt: skip
    for _mode, _torch in (("add", "sum"), ("mul", "prod"), ("max", "amax"), ("min", "amin")):
        case(
            f"scatterAlong{_kind} {_mode}",
            lambda g, x, u, i, f=_along_axis, m=_mode: f(
                g, "scatter", data=x, updates=u, indices=i, mode=MPSGraphScatterMode[m]
            ),
            [X3, _UPDATES, _ALONG],
            lambda x, u, i, r=_torch: x.scatter_reduce(1, i.long(), u, r),
        )
    case(
        f"scatterAlong{_kind} set",
        lambda g, u, i, f=_along_axis: f(
            g, "scatter", updates=u, indices=i, shape=[2, 3, 4], mode=MPSGraphScatterMode.set
        ),
        [_UPDATES, _ALONG],
        lambda u, i: torch.zeros(2, 3, 4, dtype=u.dtype).scatter(1, i.long(), u),
    )
_ROWS = np.array([2, 0, 2], np.int32)
_SLICES = _random(2, 3, 4, seed=6)
case(
    "scatter",
    lambda g, u, i: g.scatter(u, indices=i, shape=[2, 5, 4], axis=1, mode=MPSGraphScatterMode.add, name=None),
    [_SLICES, _ROWS], lambda u, i: torch.zeros(2, 5, 4, dtype=u.dtype).index_add(1, i.long(), u),
)  # fmt: skip
case(
    "scatterWithData",
    lambda g, x, u, i: g.scatterWithData(x, updates=u, indices=i, axis=1, mode=MPSGraphScatterMode.sub, name=None),
    [X3, _SLICES, _ROWS], lambda x, u, i: x.index_add(1, i.long(), -u),
)  # fmt: skip
case(
    "scatterWithData div",
    lambda g, x, u, i: g.scatterWithData(x, updates=u, indices=i, axis=0, mode=MPSGraphScatterMode.div, name=None),
    [X, POSITIVE[:1], np.array([1], np.int32)],
    lambda x, u, i: torch.cat([x[:1], x[1:2] / u, x[2:]]),
)  # fmt: skip
_ND = np.array([[0, 1], [2, 4], [0, 1]], np.int32)
_ND_VALUES = _random(3, seed=8)
case(
    "scatterND",
    lambda g, u, i: g.scatterND(withUpdatesTensor=u, indicesTensor=i, shape=[3, 5], batchDimensions=0, name=None),
    [_ND_VALUES, _ND], lambda u, i: torch.zeros(3, 5, dtype=u.dtype).index_put(tuple(i.long().T), u, accumulate=True),
)  # fmt: skip
case(
    "scatterND",
    lambda g, u, i: g.scatterND(
        withUpdatesTensor=u, indicesTensor=i, shape=[3, 5], batchDimensions=0, mode=MPSGraphScatterMode.max, name=None
    ), [_ND_VALUES[:2], _ND[:2]],
    lambda u, i: torch.full((3, 5), -np.inf, dtype=u.dtype).index_put(tuple(i.long().T), u), (),
)  # fmt: skip
case(
    "scatterNDWithData",
    lambda g, x, u, i: g.scatterNDWithData(
        x, updates=u, indices=i, batchDimensions=0, mode=MPSGraphScatterMode.add, name=None
    ),
    [X, _ND_VALUES, _ND],
    lambda x, u, i: x.index_put(tuple(i.long().T), u, accumulate=True),
)
_CLASSES = np.array([[0, 3], [5, -1]], np.int32)


def _one_hot(i: Any, on: float = 1.0, off: float = 0.0, dtype: Any = torch.float32, axis: int = 2) -> Any:
    hot = i[..., None] == torch.arange(4)
    return torch.where(hot, on, off).to(dtype).movedim(2, axis)


for _labels, _options in (
    ({}, {}),
    ({"axis": 0}, {"axis": 0}),
    ({"dataType": MPSDataType.int64}, {"dtype": torch.int64}),
    ({"axis": 1, "dataType": MPSDataType.float64}, {"axis": 1, "dtype": torch.float64}),
    (
        {"dataType": MPSDataType.float64, "onValue": 2.5, "offValue": -1.0},
        {"on": 2.5, "off": -1.0, "dtype": torch.float64},
    ),
    (
        {"axis": -2, "dataType": MPSDataType.int32, "onValue": 7, "offValue": 3},
        {"on": 7, "off": 3, "dtype": torch.int32, "axis": 1},
    ),
):
    case(
        "oneHot",
        lambda g, i, ls=_labels: g.oneHot(withIndicesTensor=i, depth=4, **ls, name=None),
        [_CLASSES],
        lambda i, o=_options: _one_hot(i, **o),
        (),
    )
