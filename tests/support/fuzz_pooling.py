"""The calls of pooling functions that fuzz_arrays.py makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from support.fuzz_calls import Arguments, Maker


def pool_problem(make: Maker) -> tuple[Arguments, dict[str, Any]]:
    """Windows, and the shapes of x and y that go with them."""
    axes, last = make.one_of(1, 2, 2), make.chance(0.4)
    kernel, stride = ([make.one_of(1, 2, 2, 3, 3, 5) for _ in range(axes)] for _ in range(2))
    spatial = [max(make.extent(), k) for k in kernel]
    padding = [[make.one_of(0, 0, k // 2), make.one_of(0, 0, k - 1)] for k in kernel]
    sizes = make.enlarged([make.one_of(0, 1, 1, 2), make.one_of(0, 1, 3, 16, 17), *spatial])
    spatial = sizes[2:]
    outputs = [(n + sum(p) - k) // s + 1 for n, p, k, s in zip(spatial, padding, kernel, stride, strict=True)]

    def shaped(extents: list[int]) -> tuple[int, ...]:
        return (sizes[0], *extents, sizes[1]) if last else (*sizes[:2], *extents)

    arguments = {"kernel": kernel, "stride": stride, "padding": padding, "channels_last": last}
    if make.chance(0.3):
        arguments |= {"kernel": kernel[0], "stride": make.one_of(None, 1, 2), "padding": 0}
        spatial = [max(n, kernel[0]) for n in spatial]
        step = arguments["stride"] or kernel[0]
        outputs = [(n - kernel[0]) // step + 1 for n in spatial]
    return arguments, {"x": shaped(spatial), "y": shaped(outputs), "pixels": math.prod(spatial), "dtype": make.dtype()}


def pool_forward(kind: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        arguments, sizes = pool_problem(make)
        arguments = {"x": make.real(sizes["x"], sizes["dtype"]), **arguments, "num_threads": make.threads()}
        if kind == "max":
            arguments |= {"dilation": make.one_of(1, 1, 1, 2), "return_indices": make.chance(0.8)}
            at = make.result(sizes["y"], np.int32) if arguments["return_indices"] and not make.enormous else None
            buffers = {"y": make.result(sizes["y"], sizes["dtype"]), "indices": at}
            return {**arguments, "out": buffers if make.chance() else None}
        if kind == "average":
            arguments["count_includes_padding"] = make.chance()
        return {**arguments, "out": make.result(sizes["y"], sizes["dtype"])}

    return generate


def pool_backward(kind: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        arguments, sizes = pool_problem(make)
        dtype, out = sizes["dtype"], make.result(sizes["x"], sizes["dtype"])
        given: Arguments = {"dy": make.real(sizes["y"], dtype)}
        if kind == "l2":
            given |= {"x": make.real(sizes["x"], dtype), "y": make.real(sizes["y"], dtype)}
        else:
            given |= {"x_shape": list(sizes["x"]), "count_includes_padding": make.chance()}
        results = {"out": out, "accumulate": out is not None and make.chance(), "num_threads": make.threads()}
        return {**given, **arguments, **results}

    return generate


def pool_indexed(kind: str) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        arguments, sizes = pool_problem(make)
        dtype, unpools = sizes["dtype"], kind == "max_unpool_backward"
        out = make.result(sizes["y" if unpools else "x"], dtype)
        given: Arguments = {
            "x" if kind == "max_unpool_forward" else "dy": make.real(sizes["x" if unpools else "y"], dtype),
            "indices": make.indices(sizes["y"], min(sizes["pixels"], 200)),
            "channels_last": arguments["channels_last"],
            "out": out,
            "num_threads": make.threads(),
        }
        if not unpools:
            given["y_shape" if kind == "max_unpool_forward" else "x_shape"] = list(sizes["x"])
        if kind != "max_unpool_forward":
            given["accumulate"] = out is not None and make.chance()
        return given

    return generate


POOL_GENERATORS: dict[str, Callable[[Maker], Arguments]] = {
    **{f"{kind}_pool_forward": pool_forward(kind) for kind in ("max", "average", "l2")},
    **{f"{kind}_pool_backward": pool_backward(kind) for kind in ("average", "l2")},
    **{kind: pool_indexed(kind) for kind in ("max_pool_backward", "max_unpool_forward", "max_unpool_backward")},
}
