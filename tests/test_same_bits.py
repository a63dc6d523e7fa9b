"""Every public function still gives the bits that were saved before the package was rearranged.

Run this file as a program to save them anew, after a change that is meant to change bits:
``python tests/test_same_bits.py``. Each instruction-set level has bits of its own; levels that this machine cannot run
keep what is saved for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core

Array = np.ndarray[Any, Any]
SAVED = Path(__file__).parent / "data" / "bits.json"
ACTIVATIONS = ("relu", "sigmoid", "tanh", "softplus", "elu", "gelu", "gelu_tanh", "silu", "erf", "hard_swish")
NO_RESULTS = {"get_num_threads", "set_num_threads", "release_memory", "lstm_cache_size"}


def data(shape: int | tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Numbers from -2 to 2 that no library's generator has a say in."""
    count = int(np.prod(shape))
    offset = seed * 0x9E3779B97F4A7C15 % 2**64
    bits = (np.arange(1, count + 1, dtype=np.uint64) + np.full(1, offset, np.uint64)) * np.uint64(0xD1342543DE82EF95)
    bits ^= bits >> np.uint64(29)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(32)
    return ((bits >> np.uint64(11)).astype(np.float64) * 2.0**-51 - 2).reshape(shape).astype(dtype)


def norms(dtype: Any) -> Iterator[tuple[str, list[Any]]]:
    arithmetic = np.float64 if dtype == np.float64 else np.float32
    for shape in ((3, 5, 7), (2, 8, 33, 3), (65, 12), (4, 16, 257)):
        x, dy = data(shape, dtype, 1), data(shape, dtype, 2)
        gamma, beta = data(shape[1], arithmetic, 3), data(shape[1], arithmetic, 4)
        for activation, slope_from in ((None, "output"), ("tanh", "output"), ("gelu", "input")):
            options: dict[str, Any] = {"activation": activation, "slope_from": slope_from}
            name = f"{np.dtype(dtype)} {shape} {activation}"
            mean, var = data(shape[1], np.float64, 5), np.abs(data(shape[1], np.float64, 6))
            y, cache = rg.batch_norm_forward(x, gamma, beta, running_mean=mean, running_var=var, **options)
            yield f"batch_norm {name}", [y, cache.mean, cache.var, mean, var, *rg.batch_norm_backward(dy, cache)]
            sums = rg.batch_norm_gradient_sums(dy, cache)
            yield f"batch_norm with sums {name}", [*sums[1:], rg.batch_norm_backward(dy, cache, sums=sums).dx]
            y, cache = rg.batch_norm_forward(x, gamma, beta, training=False, mean=mean, var=var, **options)
            yield f"batch_norm evaluated {name}", [y, *rg.batch_norm_backward(dy, cache)]
            if len(shape) > 2:
                y, cache = rg.instance_norm_forward(x, gamma, beta, **options)
                yield f"instance_norm {name}", [y, cache.mean, cache.var, *rg.instance_norm_backward(dy, cache)]
                y, cache = rg.group_norm_forward(x, gamma, beta, num_groups=1, **options)
                yield f"group_norm {name}", [y, cache.mean, cache.var, *rg.group_norm_backward(dy, cache)]
                last = np.moveaxis(x, 1, -1).copy()
                y, cache = rg.batch_norm_forward(last, gamma, beta, channel_axis=-1, **options)
                grad = rg.batch_norm_backward(np.moveaxis(dy, 1, -1), cache)
                yield f"batch_norm channels last {name}", [y, *grad]
            wide = (data(shape[-1], arithmetic, 7), data(shape[-1], arithmetic, 8))
            y, cache = rg.layer_norm_forward(x, *wide, **options)
            yield f"layer_norm {name}", [y, cache.mean, cache.var, *rg.layer_norm_backward(dy, cache)]
        count, mean, var = rg.batch_norm_statistics(x)
        other = rg.NormStatistics(5, data(shape[1], np.float64, 9), np.abs(data(shape[1], np.float64, 10)))
        together = rg.combine_statistics([rg.NormStatistics(count, mean, var), other])
        made = rg.batch_norm_cache(x, gamma, beta, mean=mean, var=var)
        yield f"statistics {np.dtype(dtype)} {shape}", [*together[1:], *rg.batch_norm_backward(dy, made)]


def lstms(dtype: Any) -> Iterator[tuple[str, list[Any]]]:
    def cell(inputs: int, units: int, seed: int, peephole: tuple[int, ...] | None) -> rg.LstmWeights:
        parts = [(4 * units, inputs), (4 * units, units), (4 * units,), peephole]
        return rg.LstmWeights(*(None if p is None else data(p, dtype, seed + i) * 0.3 for i, p in enumerate(parts)))

    def run(name: str, x: Array, weights: Any, **options: Any) -> Iterator[tuple[str, list[Any]]]:
        result = rg.lstm_forward(x, weights, **options)
        grads = rg.lstm_backward(data(result.y.shape, dtype, 60), result.cache, dhn=data(result.hn.shape, dtype, 61))
        gates = result.cache.gates() if result.cache and result.cache.buffer is not None else []
        yield f"lstm {np.dtype(dtype)} {name}", [*result[:3], *flat(grads), *gates]

    for steps, samples, inputs, units in ((1, 1, 1, 1), (5, 3, 7, 9), (4, 17, 33, 16), (3, 8, 40, 65)):
        x = data((steps, samples, inputs), dtype, 20)
        size = f"T{steps} N{samples} I{inputs} H{units}"
        weights = cell(inputs, units, 30, None)
        yield from run(size, x, weights)
        yield from run(f"{size} recomputed", x, weights, recompute=True)
        yield from run(f"{size} ragged", x, weights, lengths=np.arange(samples) % (steps + 1))
        yield from run(f"{size} diagonals", x, cell(inputs, units, 40, (4 * units,)))
        yield from run(f"{size} full peepholes", x, cell(inputs, units, 44, (4 * units, units)))
        stack = [cell(inputs, units, 50, None), cell(inputs, units, 54, None)]
        stack += [cell(2 * units, units, 58, None), cell(2 * units, units, 62, None)]
        states = {"h0": data((4, samples, units), dtype, 70), "c0": data((4, samples, units), dtype, 71)}
        yield from run(f"{size} 2 layers, 2 directions", x, stack, bidirectional=True, dropout=0.3, seed=7, **states)
        hard = rg.LstmActivations("hard_sigmoid", "sigmoid", "softsign", "hard_sigmoid", "gelu")
        yield from run(f"{size} activations", x, weights, activations=hard, output_gate_reads="old")
        rows = (np.arange(steps * samples) * 7 % 11).reshape(steps, samples)
        yield from run(f"{size} table", rows, weights, table=data((11, inputs), dtype, 72))
        made = rg.lstm_cache(x, weights)
        yield (
            f"lstm_cache {np.dtype(dtype)} {size}",
            flat(rg.lstm_backward(data((steps, samples, units), dtype, 73), made)),
        )


def others(dtype: Any) -> Iterator[tuple[str, list[Any]]]:
    name = str(np.dtype(dtype))
    for rows, inputs, outputs in ((1, 1, 1), (7, 5, 3), (33, 65, 17), (129, 300, 70)):
        size = f"{name} {rows} {inputs} {outputs}"
        x, w, b = data((rows, inputs), dtype, 1), data((outputs, inputs), dtype, 2), data(outputs, dtype, 3)
        y = rg.linear_forward(x, w, b)
        yield f"linear {size}", [y, *rg.linear_backward(y, x, w, need=("dx", "dw", "db"))]
        labels = np.arange(rows) * 5 % outputs
        loss, dlogits = rg.softmax_cross_entropy(y, labels, label_smoothing=0.1)
        yield f"softmax_cross_entropy {size}", [np.float64(loss), dlogits]
        for loss_name in ("huber", "mean_squared_error"):
            loss, dx = getattr(rg, loss_name)(x, x[::-1].copy())
            yield f"{loss_name} {size}", [np.float64(loss), dx]
        at = np.arange(3 * rows) * 3 % outputs
        yield (
            f"embedding {size}",
            [rg.embedding_forward(at, w), rg.embedding_backward(data((3 * rows, inputs), dtype, 4), at, outputs)],
        )
        yield f"dropout {size}", [rg.dropout(x, 0.4, seed=11)]
        states = [np.abs(data(x.shape, dtype, 5 + i)) for i in range(3)]
        p, m, v, _ = x.copy(), *(s.copy() for s in states)
        rg.adam_step([p], [x], [m], [v], step=3, maximum_norm=1.0, weight_decay=0.01)
        yield f"adam_step {size}", [p, m, v]
        p, velocity = x.copy(), states[0].copy()
        rg.sgd_step([p], [x], [velocity], learning_rate=0.1, momentum=0.9)
        yield f"sgd_step {size}", [p, velocity]
        p, square = x.copy(), states[1].copy()
        rg.rmsprop_step([p], [x], [square], learning_rate=0.01)
        yield f"rmsprop_step {size}", [p, square]
        yield f"global_norm {size}", [np.float64(rg.global_norm([x, w]))]
        for activation in ACTIVATIONS:
            yield (
                f"{activation} {size}",
                [rg.activation_forward(x, activation), rg.activation_backward(x, activation, x=x)],
            )


def flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for inner in value for leaf in flat(inner)]
    return [value]


def digest(values: list[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(b"none" if value is None else np.ascontiguousarray(value).tobytes() + str(value.shape).encode())
    return found.hexdigest()[:16]


@contextmanager
def isa(level: str) -> Iterator[None]:
    before = _core.isa()
    _core.select_isa(level)
    try:
        yield
    finally:
        _core.select_isa(before)


def bits(level: str) -> dict[str, str]:
    with isa(level):
        kinds: list[tuple[Callable[[Any], Iterator[tuple[str, list[Any]]]], tuple[Any, ...]]]
        kinds = [(norms, (np.float32, np.float64, np.float16)), (lstms, (np.float32, np.float64))]
        kinds += [(others, (np.float32, np.float64))]
        return {name: digest(values) for make, types in kinds for dtype in types for name, values in make(dtype)}


SAVED_BITS: Mapping[str, Mapping[str, str]] = json.loads(SAVED.read_text()) if SAVED.exists() else {}


@pytest.mark.parametrize("level", [level for level in _core.isa_levels() if level in SAVED_BITS])
def test_bits_are_those_that_were_saved(level: str) -> None:
    found = bits(level)
    assert found.keys() == SAVED_BITS[level].keys()
    assert [name for name in found if found[name] != SAVED_BITS[level][name]] == []


def test_every_function_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return function(*arguments, **options)

        return call

    functions = {name for name in rg.__all__ if name.islower()} - NO_RESULTS
    for name in functions:
        monkeypatch.setattr(rg, name, watched(name, getattr(rg, name)))
    bits(_core.isa())
    assert called == functions


if __name__ == "__main__":
    saved = {**SAVED_BITS, **{level: bits(level) for level in _core.isa_levels()}}
    SAVED.parent.mkdir(exist_ok=True)
    SAVED.write_text(json.dumps(saved, indent=0, sort_keys=True) + "\n")
