"""The arguments of valid calls of convolutions, for fuzz_arrays.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.fuzz_calls import Arguments, Maker


def convolution(make: Maker, transposed: bool) -> tuple[Arguments, dict[str, tuple[int, ...]], Any]:
    """x, w and the options; the shapes of the result and the gradients; the dtype."""
    axes, groups, last, dtype = make.one_of(1, 2, 2), make.one_of(1, 1, 2, 3), make.chance(0.4), make.dtype()
    samples, inputs, outputs = make.one_of(0, 1, 2, 3), groups * make.extent() // 3, groups * make.extent() // 3
    inputs, outputs = inputs // groups * groups, outputs // groups * groups

    def each(*values: int) -> list[int]:
        return [make.one_of(*values) for _ in range(axes)]

    large, kernel = each(*(0, 1, 2, 5, 8, 9, 16, 17, 33)), each(1, 1, 2, 3, 5)
    stride, dilation = each(1, 1, 2, 3, 9), each(1, 1, 2, 3)
    padding = [each(0, 0, 1, 2, 7)[:1] * 2 if make.chance() else [make.one_of(0, 1, 2), make.one_of(0, 1, 3)]
               for _ in range(axes)]  # fmt: skip
    small = []
    for axis in range(axes):
        span = (kernel[axis] - 1) * dilation[axis] + 1
        if transposed:  # a padding of all but a pixel at most
            padding[axis] = [min(padding[axis][0], span // 2), min(padding[axis][1], (span - 1) // 2)]
        large[axis] = max(large[axis], span - sum(padding[axis]), int(transposed))
        small.append((large[axis] + sum(padding[axis]) - span) // stride[axis] + 1)

    def images(channels: int, pixels: list[int]) -> tuple[int, ...]:
        return (samples, *pixels, channels) if last else (samples, channels, *pixels)

    options: Arguments = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    options["channels_last"] = last
    w_shape = (outputs, inputs // groups, *kernel)
    x_shape, y_shape = images(inputs, large), images(outputs, small)
    if transposed:
        spans = zip(large, padding, kernel, stride, dilation, strict=True)
        options["output_padding"] = [(size + sum(pad) - (k - 1) * d - 1) % s for size, pad, k, s, d in spans]
        x_shape, y_shape = y_shape, x_shape
    results = {"y": y_shape, "dx": x_shape, "dw": w_shape, "db": (inputs if transposed else outputs,)}
    return {"x": make.real(x_shape, dtype), "w": make.real(w_shape, dtype), **options}, results, dtype


def conv_forward(transposed: bool) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        arguments, shapes, dtype = convolution(make, transposed)
        return {
            **arguments,
            "b": make.maybe(make.real(shapes["db"], dtype)),
            "activation": make.one_of(None, None, make.activation()),
            "out": make.result(shapes["y"], dtype),
            "num_threads": make.threads(),
        }

    return generate


def conv_backward(transposed: bool) -> Callable[[Maker], Arguments]:
    def generate(make: Maker) -> Arguments:
        arguments, shapes, dtype = convolution(make, transposed)
        buffers = {name: make.result(shapes[name], dtype) for name in ("dx", "dw", "db")}
        need = [name for name in buffers if buffers[name] is not None or make.chance()]
        arguments |= {
            "dy": make.real(shapes["y"], dtype),
            "need": need,
            "out": buffers if make.chance(0.8) else None,
            "accumulate": all(buffers[name] is not None for name in need) and make.chance(),
            "num_threads": make.threads(),
        }
        if make.chance(0.3):
            arguments |= {"activation": make.activation(), "y": make.real(shapes["y"], dtype)}
        return arguments

    return generate


CONV_GENERATORS: dict[str, Callable[[Maker], Arguments]] = {
    "conv_forward": conv_forward(transposed=False),
    "conv_backward": conv_backward(transposed=False),
    "conv_transpose_forward": conv_forward(transposed=True),
    "conv_transpose_backward": conv_backward(transposed=True),
}
