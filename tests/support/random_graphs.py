"""Random graphs: compositions of operations, built by one function for several libraries.

A graph is a list of nodes, each a function ``f(library, *values)`` of earlier values. A library has NumPy's names: it
is `OfGraph`, for `retrograd.graph`, or `Plain`, for NumPy and `jax.numpy`. NumPy's values guide the choice of nodes:
none is put near a kink of its function, where derivatives of libraries may differ, and values stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from support.arrays import Array

Function = Callable[..., Any]
MOST_ELEMENTS = 400
LARGEST = 50.0
NEAR = 1e-4  # of a kink


class Plain:
    """NumPy or jax.numpy, with the functions that they do not have under the names of `retrograd.graph`."""

    def __init__(self, module: Any, erf: Function, stop: Function) -> None:
        self.np = module
        self.erf = erf
        self.stop_gradient = stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self.np, name)

    def sigmoid(self, x: Any) -> Any:
        return 0.5 * (1 + self.np.tanh(x / 2))

    def relu(self, x: Any) -> Any:
        return self.np.where(x > 0, x, 0.0)

    def softplus(self, x: Any) -> Any:
        return self.np.logaddexp(x, 0.0)

    def silu(self, x: Any) -> Any:
        return x * self.sigmoid(x)

    def gelu(self, x: Any) -> Any:
        return x * 0.5 * (1 + self.erf(x / math.sqrt(2)))

    def rsqrt(self, x: Any) -> Any:
        return 1 / self.np.sqrt(x)

    def sum_of_squares(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return self.np.sum(x * x, axis=axis, keepdims=keepdims)

    def logsumexp(self, x: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return self.np.log(self.np.sum(self.np.exp(x), axis=axis, keepdims=keepdims))

    def softmax(self, x: Any, axis: int = -1) -> Any:
        e = self.np.exp(x - self.stop_gradient(self.np.max(x, axis=axis, keepdims=True)))
        return e / self.np.sum(e, axis=axis, keepdims=True)

    def log_softmax(self, x: Any, axis: int = -1) -> Any:
        return x - self.logsumexp(x, axis, keepdims=True)

    def pad(self, x: Any, widths: Any, mode: str = "constant", value: float = 0.0) -> Any:
        return self.np.pad(x, widths, mode, **({"constant_values": value} if mode == "constant" else {}))

    def cumsum(self, x: Any, axis: int, exclusive: bool = False, reverse: bool = False) -> Any:
        v = self.np.flip(x, axis) if reverse else x
        sums = self.np.cumsum(v, axis)
        sums = sums - v if exclusive else sums
        return self.np.flip(sums, axis) if reverse else sums

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return x * y + z

    def exp10(self, x: Any) -> Any:
        return self.np.power(10.0, x)

    def prelu(self, x: Any, alpha: Any) -> Any:
        return self.np.where(x > 0, x, alpha * x)

    def l1_norm(self, x: Any, axis: Any, keepdims: bool) -> Any:
        return self.np.sum(self.np.abs(x), axis=axis, keepdims=keepdims)

    def l2_norm(self, x: Any, axis: Any, keepdims: bool) -> Any:
        return self.np.sqrt(self.np.sum(x * x, axis=axis, keepdims=keepdims))

    def rms_norm(self, x: Any) -> Any:
        return x / self.np.sqrt(self.np.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def band_part(self, x: Any, lower: int, upper: int) -> Any:
        return self.np.triu(self.np.tril(x, upper), -lower)

    def divide_no_nan(self, a: Any, b: Any) -> Any:
        return self.np.where(b == 0, 0.0, a / self.np.where(b == 0, 1.0, b))

    def round_away(self, x: Any) -> Any:
        return self.np.sign(x) * self.np.floor(self.np.abs(x) + 0.5)

    def log_sum(self, x: Any, axis: Any, keepdims: bool) -> Any:
        return self.np.log(self.np.sum(x, axis=axis, keepdims=keepdims))

    def fmax_reduce(self, x: Any, axis: Any, keepdims: bool) -> Any:
        return self.np.max(x, axis=axis, keepdims=keepdims)

    def fmin_reduce(self, x: Any, axis: Any, keepdims: bool) -> Any:
        return self.np.min(x, axis=axis, keepdims=keepdims)

    def accumulated(self, f: Function, x: Any, axis: int) -> Any:
        rows = self.np.moveaxis(x, axis, 0)
        found = [rows[0]]
        for j in range(1, rows.shape[0]):
            found.append(f(found[-1], rows[j]))
        return self.np.moveaxis(self.np.stack(found), 0, axis)

    def cumprod(self, x: Any, axis: int) -> Any:
        return self.accumulated(self.np.multiply, x, axis)

    def cummax(self, x: Any, axis: int) -> Any:
        return self.accumulated(self.np.maximum, x, axis)

    def cummin(self, x: Any, axis: int) -> Any:
        return self.accumulated(self.np.minimum, x, axis)

    def softmax_gradient(self, dy: Any, y: Any, axis: int) -> Any:
        return y * (dy - self.np.sum(dy * y, axis=axis, keepdims=True))

    def normalize(self, x: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
        return (x - mean) / self.np.sqrt(var + 1e-5) * gamma + beta

    def l2_normalize(self, x: Any, axes: Any) -> Any:
        return x / self.np.sqrt(self.np.sum(x * x, axis=axes, keepdims=True) + 1e-12)

    def gather_nd(self, x: Any, indices: Array) -> Any:
        flat = indices[..., 0] * x.shape[1] + indices[..., 1]
        return self.np.take(self.np.reshape(x, (-1, *x.shape[2:])), flat, axis=0)

    def scatter_nd(self, x: Any, indices: Array, updates: Any) -> Any:
        flat = self.np.reshape(x, (-1, *x.shape[2:]))
        return self.np.reshape(self.scatter_add(flat, indices[:, 0] * x.shape[1] + indices[:, 1], updates), x.shape)

    def scatter_along_axis(self, x: Any, indices: Array, updates: Any, axis: int) -> Any:
        assert axis == 0
        numbers = np.arange(x.shape[0]).reshape(-1, *(1,) * (x.ndim - 1))
        for j in range(indices.shape[0]):
            x = x + self.np.where(numbers == indices[j], updates[j], 0.0)
        return x

    def in_order(self, x: Any, axis: int) -> Any:
        return self.np.sort(x, axis=axis)

    def numbered(self, x: Any) -> Any:
        return x * np.arange(x.shape[-1])

    def bits(self, x: Any) -> Any:
        n = self.np.floor(x * 8.0).astype(np.int64)
        mixed = self.np.bitwise_xor(self.np.left_shift(n, 2), self.np.right_shift(n, 1))
        either = self.np.bitwise_or(self.np.bitwise_and(mixed, 31), self.np.bitwise_not(n))
        return x * self.np.bitwise_count(self.np.bitwise_and(either, 0xFFFF)).astype(np.float64)

    def first_row_set(self, x: Any, row: Any) -> Any:
        return self.np.concatenate([row[None], x[1:]])

    def scattered(self, x: Any, indices: Array, updates: Any) -> Any:
        for k, i in enumerate(indices):
            x = self.np.where((np.arange(x.shape[0]) == i).reshape(-1, *(1,) * (x.ndim - 1)), x * updates[k], x)
        return x

    def largest(self, x: Any, k: int) -> Any:
        return self.np.flip(self.np.sort(x, axis=-1), -1)[..., :k]

    def layer_norm(self, x: Any, gamma: Any, beta: Any) -> Any:
        mean = self.np.mean(x, axis=-1, keepdims=True)
        var = self.np.mean((x - mean) ** 2, axis=-1, keepdims=True)
        return (x - mean) / self.np.sqrt(var + 1e-5) * gamma + beta

    def linear(self, x: Any, w: Any, b: Any) -> Any:
        return self.np.matmul(x, w.T) + b

    def scatter_add(self, x: Any, indices: Array, updates: Any) -> Any:
        one_hot = self.np.asarray((indices[None, :] == np.arange(x.shape[0])[:, None]).astype(np.float64))
        return x + self.np.tensordot(one_hot, updates, 1)

    def embedding(self, indices: Array, table: Any) -> Any:
        return self.np.take(table, indices, axis=0)

    def squared_error(self, x: Any, target: Any) -> Any:
        return self.np.mean((x - target) ** 2)

    def cross_entropy(self, x: Any, labels: Array) -> Any:
        picked = self.np.take_along_axis(self.log_softmax(x), labels[..., None], -1)
        return -self.np.mean(picked)

    def recomputed(self, f: Function) -> Function:
        return f


class OfGraph:
    """retrograd.graph, with the functions that are spelled differently."""

    def __init__(self, module: Any) -> None:
        self.graph = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)

    def first_row_set(self, x: Any, row: Any) -> Any:
        return self.slice_update(x, self.expand_dims(row, 0), [0], [1])

    def scattered(self, x: Any, indices: Array, updates: Any) -> Any:
        return self.scatter(x, indices, updates, 0, "multiply")

    def largest(self, x: Any, k: int) -> Any:
        return self.top_k(x, k).values

    def in_order(self, x: Any, axis: int) -> Any:
        return self.take_along_axis(x, self.argsort(x, axis), axis)

    def numbered(self, x: Any) -> Any:
        return x * self.coordinates(x.shape, -1, np.float64)

    def bits(self, x: Any) -> Any:
        n = self.cast(self.floor(x * 8.0), np.int64)
        mixed = self.bitwise_xor(self.left_shift(n, 2), self.right_shift(n, 1))
        either = self.bitwise_or(self.bitwise_and(mixed, 31), self.bitwise_not(n))
        return x * self.cast(self.bitwise_count(self.bitwise_and(either, 0xFFFF)), np.float64)

    def squared_error(self, x: Any, target: Any) -> Any:
        return self.mean_squared_error(x, target)

    def cross_entropy(self, x: Any, labels: Array) -> Any:
        return self.softmax_cross_entropy(x, labels)

    def recomputed(self, f: Function) -> Function:
        found: Function = self.recompute(f)
        return found


NUMPY = Plain(np, np.vectorize(math.erf, otypes=[np.float64]), lambda x: x)


class Built(NamedTuple):
    label: str
    function: Function
    operands: tuple[int, ...]


class RandomGraph:
    """Inputs and nodes; `run` computes the loss and the values of some nodes with a library."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.inputs: list[Array] = []
        self.nodes: list[Built | None] = []  # None: an input
        self.values: list[Array] = []
        self.depends: list[frozenset[int]] = []  # the inputs that a derivative reaches
        for _ in range(int(self.random.integers(1, 4))):
            self.new_input(self.shape())
        wanted, tries = int(self.random.integers(3, 16)), 0
        while len(self.nodes) - len(self.inputs) < wanted and tries < 200:
            tries += 1
            self.extend()
        used = {i for node in self.nodes if node is not None for i in node.operands}
        self.leaves = [i for i in range(len(self.nodes)) if i not in used]
        self.weights = [self.normal(self.values[i].shape) for i in self.leaves]
        reached = frozenset().union(*(self.depends[i] for i in self.leaves))
        self.wrt = sorted(reached)
        count = min(2, len(self.nodes))
        self.shown = sorted({int(i) for i in self.random.integers(len(self.nodes), size=count)})

    # ---- choosing ----

    def one_of(self, *options: Any) -> Any:
        return options[int(self.random.integers(len(options)))]

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.random.random() < share)

    def normal(self, shape: Sequence[int]) -> Array:
        return self.random.standard_normal(tuple(shape))

    def shape(self) -> tuple[int, ...]:
        return tuple(self.one_of(1, 2, 3, 4, 5) for _ in range(self.one_of(1, 2, 2, 2, 3, 3)))

    def new_input(self, shape: Sequence[int]) -> int:
        number = len(self.inputs)
        self.inputs.append(self.normal(shape))
        self.nodes.append(None)
        self.values.append(self.inputs[-1])
        self.depends.append(frozenset([number]))
        return len(self.nodes) - 1

    def pick(self, least_axes: int = 0) -> int:
        """A node, more often a late one."""
        fitting = [i for i, v in enumerate(self.values) if v.ndim >= least_axes]
        if not fitting:
            return self.new_input((3, 4, 2)[: max(1, least_axes)])
        return int(self.one_of(*fitting, *fitting[-3:]))

    def axis(self, value: Array) -> int:
        return int(self.random.integers(-value.ndim, value.ndim))

    def axes(self, value: Array) -> Any:
        if self.chance(0.2) or value.ndim == 0:
            return None
        if self.chance(0.6):
            return self.axis(value)
        count = int(self.random.integers(1, value.ndim + 1))
        return tuple(int(a) for a in self.random.permutation(value.ndim)[:count])

    # ---- adding ----

    def add(self, label: str, function: Function, *operands: int, stops: bool = False) -> bool:
        """A node, unless its values are too many, too large or not finite."""
        with np.errstate(all="ignore"):
            value = np.asarray(function(NUMPY, *(self.values[i] for i in operands)), np.float64)
        if (
            not value.size
            or value.size > MOST_ELEMENTS
            or not np.isfinite(value).all()
            or np.abs(value).max() > LARGEST
        ):
            return False
        self.nodes.append(Built(label, function, operands))
        self.values.append(value)
        reached = frozenset().union(*(self.depends[i] for i in operands)) if operands else frozenset()
        self.depends.append(frozenset() if stops else reached)
        return True

    def extend(self) -> None:
        kinds = (
            self.unary, self.unary, self.positive, self.binary, self.binary, self.binary, self.binary, self.choice,
            self.reduction, self.reduction, self.view, self.view, self.slices, self.join, self.product, self.softmax,
            self.indexing, self.ordered, self.layer, self.loss, self.recomputed, self.apples,
            self.apples, self.steps,
        )  # fmt: skip
        self.one_of(*kinds)()

    def unary(self) -> None:
        i = self.pick()
        name = self.one_of(
            "tanh", "sin", "cos", "exp", "square", "sigmoid", "absolute", "relu", "erf", "expm1", "arctan", "softplus",
            "gelu", "silu", "negative", "sinh", "arcsinh", "exp2", "stop_gradient", "identity",
        )  # fmt: skip
        x = self.values[i]
        if name in ("absolute", "relu") and np.abs(x).min() < NEAR:
            return
        if name in ("exp", "exp2", "expm1", "sinh") and np.abs(x).max() > 3:
            return
        if name == "identity":
            number = round(float(self.random.standard_normal()), 3)
            if self.chance():
                self.add("number", lambda L, x: x * number + 1.5 if number > 0 else 2.0 - x / (3.0 - number), i)
            else:
                self.add("power", lambda L, x: x**3 if number > 0 else (x * x + 1.0) ** -1.5, i)
            return
        self.add(name, lambda L, x: getattr(L, name)(x), i, stops=name == "stop_gradient")

    def apples(self) -> None:
        """What Apple's graphs have beyond NumPy: label, whether x is far from a kink, function."""
        i = self.pick(2)
        x = self.values[i]
        axis, keep = self.axis(x), self.chance()
        norm, extreme, both = self.one_of("l1_norm", "l2_norm"), self.one_of("max", "min"), self.one_of("fmax", "fmin")
        mode, widths = self.one_of("edge", "wrap", "symmetric"), [(1, 0)] * x.ndim
        places = self.random.integers(0, x.shape[:2], (3, 2))
        along = self.random.integers(0, x.shape[0], (2, *x.shape[1:]))
        small, not_zero, apart = np.abs(x).max() < 1.5, np.abs(x).min() > NEAR, not _near_ties(x, axis)
        table: tuple[tuple[str, Any, Function], ...] = (
            ("fma", True, lambda L, x: L.fma(x, L.tanh(x), x)),
            ("exp10", small, lambda L, x: L.exp10(x)),
            ("prelu", not_zero, lambda L, x: L.prelu(x, 0.3)),
            (norm, not_zero, lambda L, x: getattr(L, norm)(x, axis, keep)),
            ("log_sum", True, lambda L, x: L.log_sum(L.square(x) + 0.5, axis, keep)),
            (f"f{extreme}_reduce", apart, lambda L, x: getattr(L, f"f{extreme}_reduce")(x, axis, keep)),
            (both, np.abs(x - 0.3).min() > NEAR, lambda L, x: getattr(L, both)(x, 0.3)),
            ("cumprod", True, lambda L, x: L.cumprod(x, axis)),
            (f"cum{extreme}", apart, lambda L, x: getattr(L, f"cum{extreme}")(x, axis)),
            ("rms_norm", True, lambda L, x: L.rms_norm(x)),
            ("l2_normalize", not_zero, lambda L, x: L.l2_normalize(x, axis)),
            ("normalize", True, lambda L, x: L.normalize(x, x[:1], L.square(x[-1]) + 0.5, 1.5, x[0])),
            ("softmax_gradient", True, lambda L, x: L.softmax_gradient(x, L.softmax(L.sin(x), axis), axis)),
            ("band_part", True, lambda L, x: L.band_part(x, 1, 0)),
            ("slice_update", True, lambda L, x: L.first_row_set(x, L.tanh(x[-1]))),
            ("scatter", True, lambda L, x: L.scattered(x, np.zeros(2, np.int64), L.stack([x[0], x[-1]]))),
            ("scatter_along_axis", True, lambda L, x: L.scatter_along_axis(x, along, L.stack([x[0], x[-1]]), 0)),
            ("scatter_nd", True, lambda L, x: L.scatter_nd(x, places, L.sin(L.gather_nd(x, places)))),
            ("gather_nd", True, lambda L, x: L.gather_nd(x, places)),
            ("argsort", apart, lambda L, x: L.in_order(x, axis)),
            ("coordinates", True, lambda L, x: L.numbered(x)),
            (f"pad {mode}", True, lambda L, x: L.pad(x, widths, mode)),
        )
        label, smooth, function = self.one_of(*table)
        if smooth:
            self.add(label, function, i)

    def steps(self) -> None:
        """Functions of steps, whose derivative is 0, and of bits."""
        i = self.pick()
        x = self.values[i]
        if np.abs(x * 8 - np.rint(x * 8)).min() < NEAR:
            return
        name = self.one_of("floor", "ceil", "round", "round_away", "trunc", "sign", "signbit", "bits", "divide_no_nan")
        if name == "signbit":
            self.add(name, lambda L, x: L.where(L.signbit(x), L.sin(x), x * 0.5), i)
        elif name == "bits":
            self.add(name, lambda L, x: L.bits(x), i)
        elif name == "divide_no_nan":
            self.add(name, lambda L, x: L.divide_no_nan(x, L.floor(x)), i)
        else:
            self.add(name, lambda L, x: getattr(L, name)(x) * L.tanh(x), i)

    def positive(self) -> None:
        i = self.pick()
        name = self.one_of("sqrt", "rsqrt", "log", "log1p", "reciprocal", "log2", "log10", "arccosh")
        offset = 1.5 if name == "arccosh" else 0.5
        self.add(name, lambda L, x: getattr(L, name)(L.square(x) + offset), i)

    def pair(self) -> tuple[int, int]:
        """Two nodes that broadcast."""
        i = self.pick()
        shape = self.values[i].shape
        fitting = []
        for j, value in enumerate(self.values):
            try:
                np.broadcast_shapes(shape, value.shape)
                fitting.append(j)
            except ValueError:
                continue
        if self.chance(0.25) and len(self.inputs) < 6:
            own = tuple(1 if self.chance(0.4) else e for e in shape)
            return i, self.new_input(own[int(self.random.integers(len(own) + 1)) :])
        j = int(self.one_of(*fitting))
        return (i, j) if self.chance() else (j, i)

    def binary(self) -> None:
        i, j = self.pair()
        name = self.one_of("add", "subtract", "multiply", "divide", "maximum", "minimum", "arctan2", "power", "+", "*")
        a, b = self.values[i], self.values[j]
        if name in ("maximum", "minimum") and np.abs(a - b).min() < NEAR:
            return
        if name == "arctan2" and np.abs(a).min() < 0.05:  # it jumps from pi to -pi where a is 0 and b negative
            return
        if name == "divide":
            self.add(name, lambda L, a, b: a / (L.square(b) + 0.5), i, j)
        elif name == "power":
            self.add(name, lambda L, a, b: L.power(L.square(a) + 0.5, L.tanh(b)), i, j)
        elif name == "+":
            self.add(name, lambda L, a, b: a + b - a * 0.5, i, j)
        elif name == "*":
            self.add(name, lambda L, a, b: a * b * a, i, j)
        else:
            self.add(name, lambda L, a, b: getattr(L, name)(a, b), i, j)

    def choice(self) -> None:
        i, j = self.pair()
        a, b = self.values[i], self.values[j]
        if np.abs(a - b).min() < NEAR or np.abs(a).min() < NEAR:
            return
        if self.chance():
            self.add("where", lambda L, a, b: L.where(a > b, a * 2.0, b - 1.0), i, j)
        elif self.chance():
            self.add("where", lambda L, a, b: L.where(a > 0.0, L.tanh(a), 0.25) * b, i, j)
        elif np.abs(np.abs(a) - 0.7).min() > NEAR:
            self.add("clip", lambda L, a: L.clip(a, -0.7, 0.7), i)

    def reduction(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        name = self.one_of("sum", "mean", "max", "min", "prod", "var", "logsumexp", "sum_of_squares", "sum", "mean")
        axis, keep = self.axes(x), self.chance()
        if name in ("max", "min") and _near_ties(x, axis):
            return
        self.add(f"{name} {axis} {keep}", lambda L, x: getattr(L, name)(x, axis=axis, keepdims=keep), i)

    def view(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        match int(self.random.integers(8)):
            case 0:
                shape = self.reshaped(x.size)
                self.add(f"reshape {shape}", lambda L, x: L.reshape(x, shape), i)
            case 1:
                order = tuple(int(a) for a in self.random.permutation(x.ndim))
                self.add(f"transpose {order}", lambda L, x: L.transpose(x, order), i)
            case 2:
                at = int(self.random.integers(x.ndim + 1))
                self.add("expand_dims", lambda L, x: L.expand_dims(x, at), i)
            case 3:
                self.add("squeeze", lambda L, x: L.squeeze(x), i)
            case 4:
                wide = (self.one_of(1, 2, 3), *(self.one_of(2, 3, 5) if e == 1 else e for e in x.shape))
                self.add(f"broadcast_to {wide}", lambda L, x: L.broadcast_to(x, wide), i)
            case 5:
                axis = self.one_of(None, self.axis(x))
                self.add("flip", lambda L, x: L.flip(x, axis), i)
            case 6:
                a, b = self.axis(x), self.axis(x)
                self.add(f"swapaxes {a} {b}", lambda L, x: L.swapaxes(x, a, b), i)
            case _:
                a, b = self.axis(x), self.axis(x)
                self.add(f"moveaxis {a} {b}", lambda L, x: L.moveaxis(x, a, b), i)

    def reshaped(self, size: int) -> tuple[int, ...]:
        shape, rest = [], size
        for factor in (2, 3, 5, 2, 3):
            if rest % factor == 0 and self.chance():
                shape.append(factor)
                rest //= factor
        found = (*shape, rest)
        return tuple(int(e) for e in self.random.permutation(found)) if self.chance() else found

    def slices(self) -> None:
        i = self.pick(1)
        parts: list[Any] = []
        for extent in self.values[i].shape:
            kind = int(self.random.integers(6))
            start = int(self.random.integers(-extent, extent))
            if kind == 0:
                parts.append(start)
            elif kind == 1:
                parts.append(slice(None, None, -1))
            elif kind == 2:
                parts.append(slice(start % extent, None, self.one_of(1, 2)))
            elif kind == 3:
                parts.append(slice(None, None, self.one_of(-2, 2)))
            else:
                parts.append(slice(None))
        if self.chance(0.2):
            parts = [*parts[:1], ...]
        if self.chance(0.2):
            parts.insert(0, None)
        index = tuple(parts)
        self.add(f"slice {index}", lambda L, x: x[index], i)

    def join(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        axis = self.axis(x)
        number = axis % x.ndim
        rest = x.shape[:number], x.shape[number + 1 :]
        same = [
            j
            for j, v in enumerate(self.values)
            if v.ndim == x.ndim and (v.shape[:number], v.shape[number + 1 :]) == rest
        ]
        match int(self.random.integers(5)):
            case 0 | 1:
                others = [int(self.one_of(*same)) for _ in range(self.one_of(1, 2))]
                self.add(f"concatenate {axis}", lambda L, *t: L.concatenate(list(t), axis), i, *others)
            case 2:
                equal = [j for j in same if self.values[j].shape == x.shape]
                other = int(self.one_of(*equal))
                at = int(self.random.integers(x.ndim + 1))
                self.add(f"stack {at}", lambda L, a, b: L.stack([a, b], at), i, other)
            case 3:
                widths = [(self.one_of(0, 1, 2), self.one_of(0, 1)) for _ in x.shape]
                value = self.one_of(0.0, 0.5)
                self.add(f"pad {widths}", lambda L, x: L.pad(x, widths, value=value), i)
            case _:
                repeats = tuple(self.one_of(1, 2) for _ in x.shape)
                sections = [s for s in (1, 2, 3) if x.shape[number] % s == 0]
                if self.chance():
                    self.add(f"tile {repeats}", lambda L, x: L.tile(x, repeats), i)
                else:
                    s = self.one_of(*sections)
                    self.add(f"split {s} {axis}", lambda L, x: L.split(x, s, axis)[s - 1], i)

    def product(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        fitting = [j for j, v in enumerate(self.values) if v.ndim and v.shape[-2 if v.ndim > 1 else -1] == x.shape[-1]]
        kind = int(self.random.integers(5))
        if kind == 0 and x.ndim > 1:
            self.add("matmul with itself", lambda L, x: L.matmul(x, L.swapaxes(x, -1, -2)), i)
        elif kind == 1 and len(self.inputs) < 6:
            j = self.new_input((x.shape[-1], self.one_of(1, 3, 4)))
            self.add("matmul", lambda L, x, w: L.matmul(x, w), i, j)
        elif kind == 2 and x.ndim == 1:
            self.add("outer", lambda L, x: L.outer(x, L.tanh(x)), i)
        elif kind == 3 and len(self.inputs) < 5 and x.ndim > 1:
            outputs = self.one_of(1, 2, 5)
            w, b = self.new_input((outputs, x.shape[-1])), self.new_input((outputs,))
            self.add("linear", lambda L, x, w, b: L.linear(x, w, b), i, w, b)
        elif fitting:
            j = int(self.one_of(*fitting))
            try:
                np.broadcast_shapes(x.shape[:-2], self.values[j].shape[:-2])
            except ValueError:
                return
            self.add("matmul", lambda L, a, b: L.matmul(a, b), i, j)

    def softmax(self) -> None:
        i = self.pick(1)
        axis, name = self.axis(self.values[i]), self.one_of("softmax", "log_softmax")
        self.add(f"{name} {axis}", lambda L, x: getattr(L, name)(x, axis), i)

    def indexing(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        axis = self.axis(x)
        extent = x.shape[axis]
        match int(self.random.integers(4)):
            case 0:
                shape = self.one_of((2,), (3,), (2, 2), ())
                indices = self.random.integers(0, extent, shape)
                self.add(f"take {axis}", lambda L, x: L.take(x, np.asarray(indices), axis), i)
            case 1:
                places = list(x.shape)
                places[axis] = self.one_of(1, 2, 6)
                along = self.random.integers(0, extent, places)
                self.add(f"take_along_axis {axis}", lambda L, x: L.take_along_axis(x, along, axis), i)
            case 2:
                rows = self.random.integers(0, x.shape[0], x.shape[0])
                self.add("scatter_add", lambda L, x: L.scatter_add(x, rows, L.sin(x)), i)
            case _:
                if x.ndim == 2:
                    table = self.random.integers(0, x.shape[0], self.one_of((3,), (2, 2)))
                    self.add("embedding", lambda L, x: L.embedding(table, x), i)

    def ordered(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        axis = self.axis(x)
        if self.chance():
            exclusive, reverse = self.chance(), self.chance()
            self.add("cumsum", lambda L, x: L.cumsum(x, axis, exclusive=exclusive, reverse=reverse), i)
        elif not _near_ties(x, axis):
            if self.chance():
                self.add(f"sort {axis}", lambda L, x: L.sort(x, axis), i)
            elif not _near_ties(x, -1):
                k = int(self.random.integers(1, x.shape[-1] + 1))
                self.add(f"top_k {k}", lambda L, x: L.largest(x, k), i)

    def layer(self) -> None:
        i = self.pick(1)
        width = self.values[i].shape[-1]
        if width < 2 or len(self.inputs) > 4:
            return
        gamma, beta = self.new_input((width,)), self.new_input((width,))
        # A row whose elements are almost equal is divided by almost 0.
        if np.std(self.values[i], -1).min() < 0.05:
            return
        self.add("layer_norm", lambda L, x, g, b: L.layer_norm(x, g, b), i, gamma, beta)

    def loss(self) -> None:
        i = self.pick(1)
        x = self.values[i]
        if self.chance():
            target = self.normal(x.shape)
            self.add("squared_error", lambda L, x: L.squared_error(x, target), i)
        else:
            labels = self.random.integers(0, x.shape[-1], x.shape[:-1])
            self.add("cross_entropy", lambda L, x: L.cross_entropy(x, labels), i)

    def recomputed(self) -> None:
        i = self.pick()

        def block(L: Any, x: Any) -> Any:
            return L.recomputed(lambda v: L.tanh(L.sin(v) * v + 0.5) * v)(x)

        self.add("recomputed", block, i)

    # ---- running ----

    def run(self, library: Any, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The loss, and the values that are shown."""
        given = iter(inputs)
        values: list[Any] = []
        for node in self.nodes:
            values.append(next(given) if node is None else node.function(library, *(values[i] for i in node.operands)))
        total: Any = None
        for i, weight in zip(self.leaves, self.weights, strict=True):
            part = library.sum(values[i] * weight)
            total = part if total is None else total + part
        return total, [values[i] for i in self.shown]

    def __repr__(self) -> str:
        lines = [
            f"{n}: {'input' if node is None else node.label} {() if node is None else node.operands} {v.shape}"
            for n, (node, v) in enumerate(zip(self.nodes, self.values, strict=True))
        ]
        return "\n".join(lines)


def _near_ties(x: Array, axis: Any) -> bool:
    """Whether two elements that are compared are almost equal."""
    axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else axis
    kept = [a for a in range(x.ndim) if a not in {b % x.ndim for b in axes}]
    rows = x.transpose(*kept, *(b % x.ndim for b in axes)).reshape(math.prod(x.shape[a] for a in kept), -1)
    gaps = np.diff(np.sort(rows, -1), axis=-1)
    return bool(gaps.size and gaps.min() < NEAR)
