"""Random calls of convolution filters and fused ones, for fuzz_bnns.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from retrograd import bnns
from support.fuzz_bnns_filters import Buffers, Case, filter_parameters, sample, status


def convolution(random: np.random.Generator, memory: Buffers) -> Case:
    """A convolution or a transposed one, and the same fused with a batch norm."""
    inputs, outputs, batch, groups = (int(n) for n in random.integers(1, 4, 4))
    groups, transposed = groups if random.random() < 0.3 else 1, random.random() < 0.4
    inputs, outputs = inputs * groups, outputs * groups
    small, kernel, stride, dilation = ([int(n) for n in random.integers(1, 4, 2)] for _ in range(4))
    padding = [int(n) for n in random.integers(0, 2, 2)]
    spans = zip(small, kernel, stride, dilation, padding, strict=True)
    large = [max(1, s * (n - 1) + (k - 1) * d + 1 - 2 * p + int(random.integers(2))) for n, k, s, d, p in spans]
    source, target = ([inputs, *large], [outputs, *small])
    if transposed:
        source, target = [inputs, *small], [outputs, *large]
    layouts = [bnns.BNNSDataLayoutConvolutionWeightsOIHW, bnns.BNNSDataLayoutConvolutionWeightsOIHrWr]
    if groups == 1:
        layouts += [bnns.BNNSDataLayoutConvolutionWeightsIOHrWr, bnns.BNNSDataLayoutConvolutionWeightsOIHW_Pack32]
    layout = int(random.choice(layouts))
    channels = [inputs // groups, outputs]
    if layout == bnns.BNNSDataLayoutConvolutionWeightsIOHrWr:
        channels.reverse()
    count = int(np.prod(kernel)) * inputs // groups * (outputs if layout != layouts[-1] or groups > 1 else 32)

    def weights() -> Any:
        return bnns.BNNSNDArrayDescriptor(
            layout=layout,
            size=(*kernel[::-1], *channels),
            data=memory.take(count),
            data_type=bnns.BNNSDataTypeFloat32,
        )

    layer = bnns.BNNSLayerParametersConvolution(
        i_desc=sample(source),
        w_desc=weights(),
        o_desc=sample(target),
        activation=bnns.BNNSActivation(int(random.choice([0, 0, 1, 4])), 0.5, 1.0),
        y_stride=stride[0],
        x_stride=stride[1],
        y_dilation_stride=dilation[0],
        x_dilation_stride=dilation[1],
        y_padding=padding[0],
        x_padding=padding[1],
        groups=groups,
    )
    if random.random() < 0.5:
        layer.bias = sample([outputs], memory.take(outputs))
    norm = bnns.BNNSLayerParametersNormalization(i_desc=sample(target), o_desc=sample(target), epsilon=1e-3)
    size, out_size = (int(np.prod(shape)) for shape in (source, target))
    x, dx, y, dy = (memory.take(batch * n) for n in (size, size, out_size, out_size))
    a: dict[str, Any] = {"batch": batch, "in": x, "in_stride": size, "out": y, "out_stride": out_size}
    a |= {"in_delta_stride": size, "out_delta_stride": 0, "training": True}
    a["types"] = [bnns.BNNSTransposedConvolution if transposed else bnns.BNNSConvolution, bnns.BNNSBatchNorm]
    deltas = [weights(), *(sample([outputs], memory.take(outputs)) for _ in range(3))]
    roots = [layer, norm, filter_parameters(random), a, sample(source, dx), sample(target, dy), *deltas]

    def calls() -> Iterator[Any]:
        layer, norm, parameters, a, in_delta, out_delta, *deltas = roots
        made: list[Any] = []
        name = f"BNNSFilterCreateLayer{'Transposed' if transposed else ''}Convolution"

        def create(function: Callable[..., Any], *arguments: Any) -> Any:
            made.append(function(*arguments))
            return made[-1]

        forward = lambda: (made[-1], a["batch"], a["in"], a["in_stride"], a["out"], a["out_stride"])  # noqa: E731
        backward = lambda: (  # noqa: E731
            made[-1], a["batch"], a["in"], a["in_stride"], in_delta, a["in_delta_stride"], a["out"], a["out_stride"],
            out_delta, a["out_delta_stride"],
        )  # fmt: skip
        yield name, lambda: create(getattr(bnns, name), layer, parameters), lambda answer: answer is None
        yield "BNNSFilterApplyBatch", lambda: bnns.BNNSFilterApplyBatch(*forward()), status
        yield (
            "BNNSFilterApplyBackwardBatch",
            lambda: bnns.BNNSFilterApplyBackwardBatch(*backward(), *deltas[:2]),
            status,
        )
        yield (
            "BNNSFilterCreateFusedLayer",
            lambda: create(bnns.BNNSFilterCreateFusedLayer, 2, a["types"], [layer, norm], parameters),
            lambda answer: answer is None,
        )
        yield (
            "BNNSFusedFilterApplyBatch",
            lambda: bnns.BNNSFusedFilterApplyBatch(*forward(), a["training"]),
            status,
        )
        yield (
            "BNNSFusedFilterApplyBackwardBatch",
            lambda: bnns.BNNSFusedFilterApplyBackwardBatch(*backward(), deltas),
            status,
        )

    return Case(roots, calls)
