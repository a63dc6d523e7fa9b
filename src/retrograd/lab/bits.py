"""The bits of the results: digests of problems over every public function and dtype.

They are the same on every machine, at every instruction-set level and with any number of threads, and are kept in
``bits.json`` next to this file. ``retrograd verify --bits`` compares; after a change that is meant to change bits,
``retrograd verify --bits --write`` saves the new ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

import retrograd as rg

from .. import _core
from ..graph.operation import OPERATIONS
from ..ops._types import Array
from ..ops.activation import ACTIVATIONS
from .cases import ACTIVATION_PARAMETERS, graph_cases, storage_dtype
from .graphs import case_program, computed, outcome, seeds_of
from .verify import fused_activation

__all__ = ["SAVED", "BitsRow", "compare_bits", "digests", "saved_digests", "write_digests"]

Results = Iterator[tuple[str, list[Any]]]
SAVED: Final = Path(__file__).parent / "bits.json"
# Each dtype with the exponents of its smallest and largest magnitudes.
_EXPONENTS: Final = {"float32": (-149, 128), "float64": (-1074, 1024), "float16": (-24, 16), "bfloat16": (-133, 128)}
_COMPUTED: Final = ("float32", "float64")
# Of operations of graphs: the inputs of floats that have no gradient.
_WITHOUT: Final = {
    "norm": (3,),
    "sync_norm": (3, 4),
    "softmax_cross_entropy": (1, 2),
    "cosine_distance": (1, 2),
    "element_losses": (1, 2),
    **dict.fromkeys(("lstm", "gru", "rnn"), (8, 9, 10)),
}


class BitsRow(NamedTuple):
    name: str
    isa: str
    threads: int
    ok: bool


def digests() -> dict[str, str]:
    """Run every problem at the selected instruction-set level and return a digest of each one's results."""
    makers: list[Callable[[Any], Results]] = [_norms, _activations]
    found: dict[str, str] = {}
    for dtype in _EXPONENTS:
        for make in (
            (*makers, _lstms, _recurrent, _scans, _dense, _pools, _convolutions, _graphs)
            if dtype in _COMPUTED
            else makers
        ):
            for name, results in make(storage_dtype(dtype)):
                found[f"{name} {dtype}"] = _digest(results)
    return found


def saved_digests() -> dict[str, str]:
    saved: dict[str, str] = json.loads(SAVED.read_text())
    return saved


def write_digests(found: dict[str, str]) -> None:
    SAVED.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def compare_bits(levels: list[str], thread_counts: list[int]) -> Iterator[BitsRow]:
    """Compare the digests at each level and thread count with the saved ones. Both settings are restored afterwards."""
    saved = saved_digests()
    isa, threads = _core.isa(), rg.get_num_threads()
    try:
        for level in levels:
            _core.select_isa(level)
            for count in thread_counts:
                rg.set_num_threads(count)
                found = digests()
                for name in sorted(saved.keys() | found.keys()):
                    yield BitsRow(name, level, count, found.get(name) == saved.get(name))
    finally:
        _core.select_isa(isa)
        rg.set_num_threads(threads)


def _digest(results: list[Any]) -> str:
    found = hashlib.sha256()
    for value in results:
        if value is None:
            found.update(b"none")
            continue
        array = np.ascontiguousarray(value)
        if array.dtype.kind not in "iub":
            # The sign and payload of a NaN that arithmetic makes depend on the architecture.
            array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
        little = array if array.dtype.byteorder != ">" else array.byteswap()
        found.update(little.tobytes() + f"{array.dtype.itemsize}{array.shape}".encode())
    return found.hexdigest()[:16]


def _flat(value: Any) -> list[Any]:
    if isinstance(value, rg.LstmWeights) and all(part is None for part in value[4:]):
        value = value[:4]  # all that it has without options
    if isinstance(value, (list, tuple)):
        return [leaf for inner in value for leaf in _flat(inner)]
    return [value]


# ---- data: from integers, because a library's generator may change ---------------------------------------------------


def _data(shape: int | tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Values from -2 to 2."""
    count = int(np.prod(shape))
    offset = seed * 0x9E3779B97F4A7C15 % 2**64
    bits = (np.arange(1, count + 1, dtype=np.uint64) + np.full(1, offset, np.uint64)) * np.uint64(0xD1342543DE82EF95)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    values: Array = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-51 - 2
    return values.reshape(shape).astype(dtype)


def _extremes(dtype: Any) -> Array:
    """Both signs of zero, NaN, infinity, and magnitudes from the smallest to the largest."""
    low, high = _EXPONENTS[str(dtype)]
    exponents = np.arange(4 * low, 4 * high) // 4
    powers = np.ldexp(1 + np.abs(_data(exponents.size, np.float64, 90)) / 2, exponents)
    values = np.concatenate([powers, np.arange(4097) / 32, np.arange(1601) / 2, [np.inf]])
    with np.errstate(over="ignore"):
        return np.concatenate([values, -values, [np.nan]]).astype(dtype)


# ---- problems: (name, results) ---------------------------------------------------------------------------------------


def _arithmetic(dtype: Any) -> Any:
    return np.float64 if dtype == np.float64 else np.float32


def _norms(dtype: Any) -> Results:
    arithmetic = _arithmetic(dtype)
    for shape in ((3, 5, 7), (2, 8, 33, 3), (65, 12), (4, 16, 257)):
        x, dy = _data(shape, dtype, 1), _data(shape, dtype, 2)
        gamma, beta = _data(shape[1], arithmetic, 3), _data(shape[1], arithmetic, 4)
        for activation, slope_from in ((None, "output"), ("relu", "output"), ("tanh", "output"), ("gelu", "input")):
            yield from _norms_of(x, dy, gamma, beta, {"activation": activation, "slope_from": slope_from})
        count, mean, var = rg.batch_norm_statistics(x)
        other = rg.NormStatistics(5, _data(shape[1], np.float64, 9), np.abs(_data(shape[1], np.float64, 10)))
        together = rg.combine_statistics([rg.NormStatistics(count, mean, var), other])
        made = rg.batch_norm_cache(x, gamma, beta, mean=mean, var=var)
        yield f"statistics {shape}", [*together[1:], *rg.batch_norm_backward(dy, made)]
    # More than one block, long rows, and results that need not stay in a cache.
    for shape in ((1, 3, 20011), (200, 1000), (9, 40, 23, 31)):
        x, dy = _data(shape, dtype, 11), _data(shape, dtype, 12)
        gamma, beta = _data(shape[1], arithmetic, 13), _data(shape[1], arithmetic, 14)
        yield from _norms_of(x, dy, gamma, beta, {"activation": "sigmoid"})
    # A mean far from 0, squares outside the range of float, a constant, infinity and NaN.
    x, dy = _data((6, 7, 45), np.float64, 15), _data((6, 7, 45), dtype, 16)
    x[:, 1] += 1000
    x[:, 2] *= 1e-4 if dtype == np.float16 else 1e-30
    x[:, 3] *= 1e4 if dtype == np.float16 else 1e30
    x[:, 4] = -0.0
    x[2, 5, 7], x[3, 6, 8] = np.inf, np.nan
    gamma, beta = _data(7, arithmetic, 17), _data(7, arithmetic, 18)
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    yield from (("extreme " + name, results) for name, results in _norms_of(x, dy, gamma, beta, {}))


def _norms_of(x: Array, dy: Array, gamma: Array, beta: Array, options: dict[str, Any]) -> Results:
    shape, arithmetic = x.shape, gamma.dtype
    name = f"{shape} {options.get('activation')}"
    mean, var = _data(shape[1], np.float64, 5), np.abs(_data(shape[1], np.float64, 6))
    y, cache = rg.batch_norm_forward(x, gamma, beta, running_mean=mean, running_var=var, **options)
    yield f"batch_norm {name}", [y, cache.mean, cache.var, mean, var, *rg.batch_norm_backward(dy, cache)]
    sums = rg.batch_norm_gradient_sums(dy, cache)
    yield f"batch_norm with sums {name}", [*sums[1:], rg.batch_norm_backward(dy, cache, sums=sums).dx]
    mean, var = _data(shape[1], np.float64, 5), np.abs(_data(shape[1], np.float64, 6))
    y, cache = rg.batch_norm_forward(x, gamma, beta, training=False, mean=mean, var=var, **options)
    yield f"batch_norm evaluated {name}", [y, *rg.batch_norm_backward(dy, cache)]
    if len(shape) > 2:
        y, cache = rg.instance_norm_forward(x, gamma, beta, **options)
        yield f"instance_norm {name}", [y, cache.mean, cache.var, *rg.instance_norm_backward(dy, cache)]
        y, cache = rg.group_norm_forward(x, gamma, beta, num_groups=1, **options)
        yield f"group_norm {name}", [y, cache.mean, cache.var, *rg.group_norm_backward(dy, cache)]
        last = np.moveaxis(x, 1, -1).copy()
        y, cache = rg.batch_norm_forward(last, gamma, beta, channel_axis=-1, **options)
        yield f"batch_norm channels last {name}", [y, *rg.batch_norm_backward(np.moveaxis(dy, 1, -1), cache)]
    scale, shift = _data(shape[-1], arithmetic, 7), _data(shape[-1], arithmetic, 8)
    y, cache = rg.layer_norm_forward(x, scale, shift, **options)
    yield f"layer_norm {name}", [y, cache.mean, cache.var, *rg.layer_norm_backward(dy, cache)]


def _lstms(dtype: Any) -> Results:
    def cell(inputs: int, units: int, seed: int, peephole: tuple[int, ...] | None) -> rg.LstmWeights:
        parts = [(4 * units, inputs), (4 * units, units), (4 * units,), peephole]
        return rg.LstmWeights(*(None if p is None else _data(p, dtype, seed + i) * 0.3 for i, p in enumerate(parts)))

    def run(name: str, x: Array, weights: Any, **options: Any) -> Results:
        result = rg.lstm_forward(x, weights, **options)
        assert result.cache is not None
        grads = rg.lstm_backward(_data(result.y.shape, dtype, 60), result.cache, dhn=_data(result.hn.shape, dtype, 61))
        gates = [] if result.cache.buffer is None else result.cache.gates()
        yield f"lstm {name}", [*result[:3], *_flat(grads), *gates]

    for steps, samples, inputs, units in (
        (1, 1, 1, 1),
        (5, 3, 7, 9),
        (4, 17, 33, 16),
        (3, 8, 40, 65),
        (3, 40, 100, 96),
    ):
        x = _data((steps, samples, inputs), dtype, 20)
        size = f"T{steps} N{samples} I{inputs} H{units}"
        weights = cell(inputs, units, 30, None)
        yield from run(size, x, weights)
        yield from run(f"{size} recomputed", x, weights, recompute=True)
        yield from run(f"{size} ragged", x, weights, lengths=np.arange(samples) % (steps + 1))
        yield from run(f"{size} diagonals", x, cell(inputs, units, 40, (4 * units,)))
        yield from run(f"{size} full peepholes", x, cell(inputs, units, 44, (4 * units, units)))
        stack = [cell(inputs, units, 50, None), cell(inputs, units, 54, None)]
        stack += [cell(2 * units, units, 58, None), cell(2 * units, units, 62, None)]
        states = {"h0": _data((4, samples, units), dtype, 70), "c0": _data((4, samples, units), dtype, 71)}
        yield from run(f"{size} 2 layers, 2 directions", x, stack, bidirectional=True, dropout=0.3, seed=7, **states)
        hard = rg.LstmActivations("hard_sigmoid", "sigmoid", "softsign", "hard_sigmoid", "gelu")
        yield from run(f"{size} activations", x, weights, activations=hard, output_gate_reads="old")
        rows = (np.arange(steps * samples) * 7 % 11).reshape(steps, samples)
        yield from run(f"{size} table", rows, weights, table=_data((11, inputs), dtype, 72))
        made = rg.lstm_cache(x, weights)
        yield f"lstm_cache {size}", _flat(rg.lstm_backward(_data((steps, samples, units), dtype, 73), made))


def _scans(dtype: Any) -> Results:
    for shape, axis, a_shape in (
        ((5, 3, 7), 0, (5, 3, 7)),
        ((9, 4, 33), 1, (9, 4, 33)),
        ((70, 131), 1, (70, 131)),
        ((40, 1100), 0, (40, 1100)),
        ((300,), 0, ()),
        ((50, 6, 5), 0, (5,)),
        ((50, 6, 5), 0, (50, 1, 5)),
        ((6, 50, 5), 1, (6, 1, 1)),
    ):
        a, b, dy = _data(a_shape, dtype, 1) / 2, _data(shape, dtype, 2), _data(shape, dtype, 3)
        state = (*shape[:axis], *shape[axis + 1 :])
        h0, dhn = _data(state, dtype, 4), _data(state, dtype, 5)
        reset = _data((*shape[: axis + 1], *(1 for _ in shape[axis + 1 :])), np.float64, 6) > 1
        for stops in (None, reset):
            y, hn, cache = rg.scan_forward(a, b, h0, axis=axis, reset=stops)
            gradients = rg.scan_backward(dy, cache, dhn=dhn)
            yield f"scan {shape} {axis} {a_shape}{' reset' if stops is not None else ''}", [y, hn, *gradients]


def _recurrent(dtype: Any) -> Results:
    """GRU and RNN as the LSTM above; of all three cells the options inside the recurrence, and single steps."""
    for steps, samples, inputs, units in (
        (1, 1, 1, 1),
        (5, 3, 7, 9),
        (4, 17, 33, 16),
        (3, 8, 40, 65),
        (3, 40, 100, 96),
    ):
        size = (steps, samples, inputs, units)
        for name in ("gru", "rnn"):
            yield from _plain(_Cell(name, dtype), size)
        for name in ("lstm", "gru", "rnn"):
            yield from _inside(_Cell(name, dtype), size)
            yield from _single_steps(_Cell(name, dtype), size)


class _Cell:
    """The functions of a cell, and its parameters from `_data`."""

    def __init__(self, name: str, dtype: Any) -> None:
        self.name, self.dtype = name, dtype
        self.gates = {"lstm": 4, "gru": 3, "rnn": 1}[name]
        self.weights_type: Any = {"lstm": rg.LstmWeights, "gru": rg.GruWeights, "rnn": rg.RnnWeights}[name]

    def function(self, which: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(rg, f"{self.name}_{which}")
        return found

    def weights(self, inputs: int, units: int, seed: int, outputs: int | None = None, norm: bool = False) -> Any:
        """With a projection to `outputs`, and with the parameters of layer normalization."""
        rows, wide = self.gates * units, units if outputs is None else outputs
        shapes: dict[str, tuple[int, ...]] = {"wx": (rows, inputs), "wh": (rows, wide), "b": (rows,)}
        if self.name == "gru":
            shapes["bh"] = (rows,)
        if outputs is not None:
            shapes["projection"] = (outputs, units)
        if norm:
            shapes |= {"gamma_x": (rows,), "gamma_h": (rows,)}
            shapes |= {"gamma_c": (units,), "beta_c": (units,)} if self.name == "lstm" else {}
        drawn = (_data(shape, self.dtype, seed + i) * 0.3 for i, shape in enumerate(shapes.values()))
        return self.weights_type(**dict(zip(shapes, drawn, strict=True)))

    def run(self, name: str, x: Array, weights: Any, **options: Any) -> Results:
        result = self.function("forward")(x, weights, **options)
        dy, dhn = _data(result.y.shape, self.dtype, 60), _data(result.hn.shape, self.dtype, 61)
        gradients = self.function("backward")(dy, result.cache, dhn=dhn)
        gates = [] if result.cache.buffer is None else result.cache.gates()
        yield f"{self.name} {name}", [*result[:-1], *_flat(gradients), *gates]


def _plain(cell: _Cell, sizes: tuple[int, int, int, int]) -> Results:
    steps, samples, inputs, units = sizes
    size, dtype = f"T{steps} N{samples} I{inputs} H{units}", cell.dtype
    x, weights = _data((steps, samples, inputs), dtype, 20), cell.weights(inputs, units, 30)
    yield from cell.run(size, x, weights)
    yield from cell.run(f"{size} recomputed", x, weights, recompute=True)
    yield from cell.run(f"{size} ragged", x, weights, lengths=np.arange(samples) % (steps + 1))
    stack = [cell.weights(inputs, units, 50), cell.weights(inputs, units, 54)]
    stack += [cell.weights(2 * units, units, 58), cell.weights(2 * units, units, 62)]
    options = {"bidirectional": True, "dropout": 0.3, "seed": 7, "h0": _data((4, samples, units), dtype, 70)}
    yield from cell.run(f"{size} 2 layers, 2 directions", x, stack, **options)
    rows = (np.arange(steps * samples) * 7 % 11).reshape(steps, samples)
    yield from cell.run(f"{size} table", rows, weights, table=_data((11, inputs), dtype, 72))
    made = cell.function("cache")(x, weights)
    gradients = cell.function("backward")(_data((steps, samples, units), dtype, 73), made)
    yield f"{cell.name}_cache {size}", _flat(gradients)
    if cell.name == "gru":
        hard = rg.GruActivations("hard_sigmoid", "softsign", "gelu")
        yield from cell.run(f"{size} before", x, weights, kind="before")
        yield from cell.run(f"{size} flip", x, weights, flip=True)
        yield from cell.run(f"{size} before, flip, activations", x, weights, kind="before", flip=True, activations=hard)
        yield from cell.run(f"{size} activations", x, weights, activations=hard)
    else:
        for activation in ("relu", "sigmoid", "identity", "gelu"):
            yield from cell.run(f"{size} {activation}", x, weights, activation=activation)


def _inside(cell: _Cell, sizes: tuple[int, int, int, int]) -> Results:
    """The options inside the recurrence."""
    steps, samples, inputs, units = sizes
    size, dtype = f"T{steps} N{samples} I{inputs} H{units}", cell.dtype
    x, weights = _data((steps, samples, inputs), dtype, 20), cell.weights(inputs, units, 30)
    kept = _data((steps, samples, units), dtype, 74) * 0.25 + 0.5
    reset = _data((steps, samples), np.float64, 75) > 1
    options: dict[str, dict[str, Any]] = {
        "reset": {"reset": reset},
        "mask": {"mask": _data((samples, units), dtype, 76)},
        "mask of gates": {"mask": _data((cell.gates, steps, samples, units), dtype, 77)},
        "zoneout": {"zoneout": 0.3, "seed": 5},
        "zoneout weights": {"zoneout": kept},
        "clip": {"clip": 0.5},
    }
    if cell.name == "lstm":
        options["zoneout of both"] = {"zoneout": (0.3, kept), "seed": 5}
        options["cell_clip"] = {"cell_clip": 0.5}
        options["coupled"] = {"coupled": True}
    if cell.name == "gru":
        options["before, reset, mask of gates"] = {"kind": "before", **options["reset"], **options["mask of gates"]}
    for name, given in options.items():
        yield from cell.run(f"{size} {name}", x, weights, h0=_data((samples, units), dtype, 78), **given)
    normed = cell.weights(inputs, units, 80, norm=True)
    for norm in ("haste", "cell") if cell.name == "lstm" else ("haste",):
        yield from cell.run(f"{size} norm {norm}", x, normed, norm=norm, reset=reset, zoneout=kept)
    if cell.name == "lstm":
        for outputs in sorted({1, (units + 1) // 2}):
            projected = cell.weights(inputs, units, 90, outputs)
            yield from cell.run(f"{size} P{outputs}", x, projected)
        stack = [cell.weights(inputs, units, 90, outputs), cell.weights(outputs, units, 95, outputs)]
        given = {"mask": _data((outputs,), dtype, 79), "dropout": 0.3, "seed": 7}
        yield from cell.run(f"{size} P{outputs} 2 layers", x, stack, reset=reset, **given)


def _single_steps(cell: _Cell, sizes: tuple[int, int, int, int]) -> Results:
    """Two steps and their gradients; of the LSTM of both states."""
    _, samples, inputs, units = sizes
    dtype = cell.dtype
    weights = cell.weights(inputs, units, 30)
    states = [_data((samples, units), dtype, 78 + i) for i in range(2 if cell.name == "lstm" else 1)]
    results: list[Any] = []
    for seed in (20, 21):
        *states, cache = cell.function("step")(_data((samples, inputs), dtype, seed), weights, *states)
        incoming = [_data((samples, units), dtype, 61 + i) for i in range(len(states))]
        results += [*states, *_flat(cell.function("step_backward")(*incoming, cache))]
    yield f"{cell.name}_step N{samples} I{inputs} H{units}", results


def _dense(dtype: Any) -> Results:
    for rows, inputs, outputs in ((1, 1, 1), (7, 5, 3), (33, 65, 17), (129, 300, 70), (21, 1500, 9)):
        size = f"{rows} {inputs} {outputs}"
        x, w, b = _data((rows, inputs), dtype, 1), _data((outputs, inputs), dtype, 2), _data(outputs, dtype, 3)
        y = rg.linear_forward(x, w, b)
        yield f"linear {size}", [y, *rg.linear_backward(y, x, w, need=("dx", "dw", "db"))]
        labels = np.arange(rows) * 5 % outputs
        for smoothing in (0.0, 0.1):
            loss, dlogits = rg.softmax_cross_entropy(y, labels, label_smoothing=smoothing)
            yield f"softmax_cross_entropy {smoothing} {size}", [np.float64(loss), dlogits]
        for loss_name in ("huber", "mean_squared_error"):
            loss, dx = getattr(rg, loss_name)(x, x[::-1].copy())
            each, _ = getattr(rg, loss_name)(x, x[::-1].copy(), reduction="none")
            yield f"{loss_name} {size}", [np.float64(loss), dx, each]
        yield from _losses(size, x, y)
        at = np.arange(3 * rows) * 3 % outputs
        scattered = rg.embedding_backward(_data((3 * rows, inputs), dtype, 4), at, outputs)
        yield f"embedding {size}", [rg.embedding_forward(at, w), scattered]
        yield f"dropout {size}", [rg.dropout(x, 0.4, seed=11)]
        yield f"global_norm {size}", [np.float64(rg.global_norm([x, w]))]
        yield from _steps(size, x)
    x = _extremes(np.dtype(dtype))
    targets = np.abs(_data(x.shape, dtype, 25)) / 2
    for name in ("sigmoid_cross_entropy", "mean_absolute_error", "hinge", "log_loss"):
        yield f"{name} extremes", list(getattr(rg, name)(x, targets, reduction="none"))


def _losses(size: str, x: Array, logits: Array) -> Results:
    """Losses with weights, by element and by row."""
    probabilities, targets = np.abs(x) / 2, np.abs(_data(x.shape, x.dtype, 21)) / 2
    each, of_rows = _data(x.shape, x.dtype, 22), _data(x.shape[0], x.dtype, 23)
    for name, options in (
        ("sigmoid_cross_entropy", {"label_smoothing": 0.1}),
        ("mean_absolute_error", {}),
        ("hinge", {}),
        ("log_loss", {}),
        ("huber", {"delta": 0.5}),
    ):
        y = probabilities if name == "log_loss" else x
        loss, dy = getattr(rg, name)(y, targets, weights=each, reduction="weighted_mean", **options)
        values, _ = getattr(rg, name)(y, targets, weights=of_rows, reduction="none", **options)
        yield f"weighted {name} {size}", [np.float64(loss), dy, values]
    soft = np.abs(_data(logits.shape, logits.dtype, 24))
    soft[:, ::3] = 0
    for name, first, second, row_options in (
        ("softmax_cross_entropy", logits, soft, {"label_smoothing": 0.1}),
        ("categorical_cross_entropy", logits, soft, {}),
        ("cosine_distance", x, targets, {}),
    ):
        loss, dy = getattr(rg, name)(first, second, weights=of_rows, reduction="nonzero_mean", **row_options)
        losses, _ = getattr(rg, name)(first, second, reduction="none", scale=0.5, **row_options)
        yield f"weighted {name} {size}", [np.float64(loss), dy, losses]


def _pools(dtype: Any) -> Results:
    for shape, kernel, stride, padding, dilation in (
        ((2, 3, 9, 37), (2, 2), (2, 2), 0, 1),
        ((1, 17, 14, 35), (3, 3), (2, 2), 1, 1),
        ((2, 5, 6, 40), (3, 2), (1, 1), ((0, 2), (1, 0)), 2),
        ((1, 2, 7, 50), (2, 5), (3, 3), ((1, 0), (2, 2)), 1),
        ((3, 9, 67), (4,), (2,), ((1, 2),), 1),
    ):
        x = _data(shape, dtype, 1)
        name = f"{shape} {kernel} {stride}"
        for last in (False, True):
            x = np.moveaxis(x, 1, -1).copy() if last else x
            windows: dict[str, Any] = {"stride": stride, "padding": padding, "channels_last": last}
            y, indices = rg.max_pool_forward(x, kernel, dilation=dilation, **windows)
            assert y is not None
            assert indices is not None
            layout: dict[str, Any] = {"channels_last": last}
            gradients = [rg.max_pool_backward(_data(y.shape, dtype, 2), indices, x.shape, **layout)]
            yield f"max_pool {name} {last}", [y, indices, *gradients]
            whole = rg.max_unpool_forward(y, indices, x.shape, **layout)
            yield f"max_unpool {name} {last}", [whole, rg.max_unpool_backward(x, indices, **layout)]
            for counts in (True, False):
                options = {**windows, "count_includes_padding": counts}
                y = rg.average_pool_forward(x, kernel, **options)
                dx = rg.average_pool_backward(_data(y.shape, dtype, 3), x.shape, kernel, **options)
                yield f"average_pool {name} {last} {counts}", [y, dx]
            y = rg.l2_pool_forward(x, kernel, **windows)
            yield f"l2_pool {name} {last}", [y, rg.l2_pool_backward(_data(y.shape, dtype, 4), x, y, kernel, **windows)]


def _convolutions(dtype: Any) -> Results:
    def run(name: str, x: Array, w: Array, transposed: bool = False, **options: Any) -> Results:
        kind = "conv_transpose" if transposed else "conv"
        forward, backward = getattr(rg, f"{kind}_forward"), getattr(rg, f"{kind}_backward")
        groups = options.get("groups", 1)
        b = _data(w.shape[1] * groups if transposed else len(w), dtype, 3)
        y = forward(x, w, b, activation="sigmoid", **options)
        dy = _data(y.shape, dtype, 4)
        yield f"{kind} {name}", [y, *backward(dy, x, w, activation="sigmoid", y=y, **options)]

    x, w = _data((2, 5, 19, 37), dtype, 1), _data((9, 5, 3, 3), dtype, 2)
    yield from run("products", x, w, padding=1)
    yield from run("channels last", np.moveaxis(x, 1, -1).copy(), w, padding=1, channels_last=True)
    yield from run("strides", x, w, stride=(2, 3), padding=((0, 2), (1, 1)), dilation=(1, 2))
    yield from run("few outputs", x, w[:3], padding=1)
    yield from run("groups", _data((2, 6, 19, 37), dtype, 5), _data((14, 3, 2, 5), dtype, 6), groups=2)
    yield from run("depthwise", _data((3, 9, 14, 14), dtype, 7), _data((9, 1, 3, 3), dtype, 8), padding=1, groups=9)
    yield from run("pointwise", _data((3, 70, 7, 9), dtype, 9), _data((40, 70, 1, 1), dtype, 10))
    yield from run("long", _data((1, 3, 5003), dtype, 11), _data((6, 3, 7), dtype, 12), stride=2, padding=3)
    yield from run("small images", _data((37, 5, 3, 2), dtype, 14), w, padding=1)
    yield from run("kernel of the image", _data((19, 3, 7, 5), dtype, 15), _data((40, 3, 7, 5), dtype, 16))
    small = _data((2, 9, 8, 9), dtype, 13)
    yield from run("", small, w, transposed=True, stride=(2, 3), padding=1, output_padding=1)
    yield from run("few outputs", small, w[:, :2], transposed=True, dilation=2)


def _steps(size: str, x: Array) -> Results:
    """Optimizer steps, from states that are not 0."""

    def states() -> list[Array]:
        return [x.copy(), *(np.abs(_data(x.shape, x.dtype, 5 + i)) for i in range(3))]

    p, m, v, largest = states()
    rg.adam_step([p], [x], [m], [v], step=3, maximum_norm=1.0, weight_decay=0.01)
    yield f"adam_step {size}", [p, m, v]
    p, m, v, largest = states()
    rg.adam_step([p], [x], [m], [v], [largest], step=70, weight_decay=0.01, decoupled=True, clip=(-0.5, 0.75))
    yield f"adam_step amsgrad {size}", [p, m, v, largest]
    p, velocity, _, _ = states()
    rg.sgd_step([p], [x], [velocity], learning_rate=0.1, momentum=0.9, nesterov=True, l1=0.01)
    yield f"sgd_step {size}", [p, velocity]
    p, square, mean, velocity = states()
    rg.rmsprop_step([p], [x], [square], [mean], [velocity], learning_rate=0.01, momentum=0.9)
    yield f"rmsprop_step {size}", [p, square, mean, velocity]


@functools.cache
def _graph_programs(dtype: str) -> dict[str, list[Any]]:
    """By operation and group: each case with its program and arguments. Programs run at the level that is selected."""
    found: dict[str, list[Any]] = {}
    for case in graph_cases():
        stored = case.arrays(np.dtype(dtype))
        seeds = seeds_of(case, computed(case, stored))
        differentiable = OPERATIONS[case.operation].gradient is not None and any(s is not None for s in seeds)
        wanted = [
            case.gradients
            and differentiable
            and a is not None
            and a.dtype.kind == "f"
            and i not in _WITHOUT.get(case.operation, ())
            for i, a in enumerate(stored)
        ]
        name = f"{case.operation} {case.group}".strip()
        found.setdefault(name, []).append((case, stored, *case_program(case, stored, seeds, wanted)))
    return found


def _graphs(dtype: Any) -> Results:
    """All cases of each operation of graphs: the function's results, then the program's with gradients."""
    for operation, problems in _graph_programs(str(np.dtype(dtype))).items():
        results: list[Any] = []
        for case, stored, program, arguments in problems:
            results += computed(case, stored)
            results += outcome(program, arguments)
        yield f"graph {operation}", results


def _activations(dtype: Any) -> Results:
    values = {"": _data((33, 65), dtype, 1), " extremes": _extremes(dtype)}
    for (which, x), name in ((item, name) for item in values.items() for name in ACTIVATIONS):
        activation = fused_activation(name, *ACTIVATION_PARAMETERS[name])
        dy = _data(x.shape, dtype, 2)
        y = rg.activation_forward(x, activation)
        slopes = [rg.activation_backward(dy, activation, x=x)]
        if not ACTIVATIONS[name].needs_input:
            slopes.append(rg.activation_backward(dy, activation, y=y))
        yield f"{name}{which}", [y, *slopes]
