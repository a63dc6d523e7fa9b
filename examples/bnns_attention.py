"""Train a multihead attention with Apple's BNNS functions: each query learns to fetch the value of the nearest key.

Forward fills a cache for backward, which writes the gradients of the four projections; an Adam step of BNNS updates
them. The last keys of every sample are padding, which a mask hides.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from retrograd import bnns

SAMPLES, TARGETS, SOURCES, PADDED = 32, 6, 9, 2
FEATURES, HEADS, WIDTH = 8, 2, 8  # d_model; d_key and d_value
NAMES = ("query", "key", "value", "output")

Array = np.ndarray[Any, np.dtype[np.float32]]
describe = bnns.BNNSNDArrayDescriptor.from_array


def projections(targets: dict[str, Array], weights: dict[str, Array]) -> dict[str, bnns.BNNSMHAProjectionParameters]:
    """One structure for each of the four, with matrices of a batch, whose stride is stride[2]."""
    made = {}
    for name in NAMES:
        target = describe(targets[name][0], bnns.BNNSDataLayout2DFirstMajor)
        target.data, target.stride[2] = targets[name], targets[name][0].size
        layout = bnns.BNNSDataLayout2DFirstMajor if name == "output" else bnns.BNNSDataLayoutMHA_DHK
        made[name] = bnns.BNNSMHAProjectionParameters(target, describe(weights[name], layout))
    return made


def fill(arrays: dict[str, Array], rng: np.random.Generator) -> Array:
    """Write random keys and values, and queries near some of the keys. Returns the values to be found."""
    arrays["key"][...] = rng.standard_normal(arrays["key"].shape)
    arrays["value"][...] = rng.standard_normal(arrays["value"].shape)
    which = rng.integers(0, SOURCES - PADDED, (SAMPLES, TARGETS, 1))
    arrays["query"][...] = np.take_along_axis(arrays["key"], which, axis=1)
    arrays["query"] += rng.normal(0, 0.1, arrays["query"].shape)
    return np.take_along_axis(arrays["value"], which, axis=1)


def check(status: int) -> None:
    if status != 0:
        raise RuntimeError(bnns.last_error())


def main() -> int:
    rng = np.random.default_rng(0)
    rows = {"query": TARGETS, "key": SOURCES, "value": SOURCES, "output": TARGETS}
    arrays = {name: np.zeros((SAMPLES, rows[name], FEATURES), np.float32) for name in NAMES}
    shapes = dict.fromkeys(NAMES[:3], (WIDTH, HEADS, FEATURES)) | {"output": (HEADS * WIDTH, FEATURES)}
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = {name: np.zeros_like(array) for name, array in arrays.items()}
    dweights = {name: np.zeros_like(array) for name, array in weights.items()}

    attention = bnns.BNNSFilterCreateLayerMultiheadAttention(
        bnns.BNNSLayerParametersMultiheadAttention(**projections(arrays, weights)),
        bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr),  # so that it sees the optimizer's updates
    )
    if attention is None:
        raise RuntimeError(bnns.last_error())
    padding = np.zeros((SAMPLES, SOURCES), np.bool_)
    padding[:, SOURCES - PADDED :] = True
    mask = describe(padding[0])
    mask.data = padding
    query, key, value, output = (arrays[name] for name in NAMES)
    q, k = TARGETS * FEATURES, SOURCES * FEATURES  # strides
    arguments = (query, q, key, k, mask, SOURCES, value, k, output, q, None)
    size = [0]  # a pointer to a size is a list with one entry; without its buffer it is a query
    check(bnns.BNNSApplyMultiheadAttention(attention, SAMPLES, *arguments, size, None))
    cache = bytearray(size[0])
    deltas = projections(gradients, dweights)

    adam = bnns.BNNSOptimizerAdamFields(
        learning_rate=0.01, beta1=0.9, beta2=0.999, epsilon=1e-8, time_step=1, gradient_scale=1
    )
    parameters, slopes = ([describe(array) for array in found.values()] for found in (weights, dweights))
    moments = [describe(np.zeros_like(array)) for _ in range(2) for array in weights.values()]
    for step in range(401):
        wanted = fill(arrays, rng)
        check(bnns.BNNSApplyMultiheadAttention(attention, SAMPLES, *arguments, size, cache))
        error = output - wanted
        if step % 100 == 0:
            print(f"step {step:3d}: loss {np.square(error).mean():.4f}")
        gradients["output"][...] = error * (2 / error.size)
        check(
            bnns.BNNSApplyMultiheadAttentionBackward(
                attention, SAMPLES, query, q, deltas["query"], key, k, mask, SOURCES, deltas["key"],
                value, k, deltas["value"], None, None, None, output, q, deltas["output"], len(cache), cache,
            )
        )  # fmt: skip
        count = len(parameters)
        check(bnns.BNNSOptimizerStep(bnns.BNNSOptimizerFunctionAdam, adam, count, parameters, slopes, moments, None))
        adam.time_step += 1

    wanted = fill(arrays, rng)
    check(bnns.BNNSApplyMultiheadAttention(attention, SAMPLES, *arguments, None, None))
    left = np.square(output - wanted).mean() / np.square(wanted).mean()
    print(f"{100 * (1 - left):.1f} % of the variance of new values is explained")
    bnns.BNNSFilterDestroy(attention)
    return 0


if __name__ == "__main__":
    sys.exit(main())
