"""Cases for the layers of MPSGraph: products, losses, optimizers, normalization, convolution and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as TF

from retrograd.mpsgraph import (
    MPSDataType,
    MPSGraphConvolution2DOpDescriptor,
    MPSGraphDepthwiseConvolution2DOpDescriptor,
    MPSGraphLossReductionType,
    MPSGraphPaddingStyle,
    MPSGraphPooling2DOpDescriptor,
    MPSGraphPooling4DOpDescriptor,
    MPSGraphPoolingReturnIndicesMode,
    MPSGraphTensorNamedDataLayout,
)
from support.mpsgraph import constant
from support.mpsgraph_cases import POSITIVE, X3, Case, X, Y, _random, _vjp, made

NHWC, HWIO = MPSGraphTensorNamedDataLayout.NHWC, MPSGraphTensorNamedDataLayout.HWIO
CASES: list[Case] = []
case = made(CASES)

# ---- products and activations ----------------------------------------------------------------------------------------

case(
    "matrixMultiplication", lambda g, a, b: g.matrixMultiplication(primary=a, secondary=b, name=None),
    [_random(2, 1, 3, 4), _random(3, 4, 2)], torch.matmul,
)  # fmt: skip
case("softMax", lambda g, x: g.softMax(with_=x, axis=1, name=None), [X3], lambda x: x.softmax(1))
case("leakyReLU", lambda g, x: g.leakyReLU(with_=x, alpha=0.3, name=None), [X], lambda x: TF.leaky_relu(x, 0.3))
case(
    "leakyReLU", lambda g, x, a: g.leakyReLU(with_=x, alphaTensor=a, name=None), [X, _random(1, 5)],
    lambda x, a: torch.where(x > 0, x, a * x),
)  # fmt: skip
case(
    "reLUGradient", lambda g, d, x: g.reLUGradient(withIncomingGradient=d, sourceTensor=x, name=None), [Y, X],
    lambda d, x: torch.where(x > 0, d, 0.0), (0,),
)  # fmt: skip
case(
    "sigmoidGradient", lambda g, d, x: g.sigmoidGradient(withIncomingGradient=d, sourceTensor=x, name=None), [Y, X],
    lambda d, x: d * torch.sigmoid(x) * (1 - torch.sigmoid(x)), (0,),
)  # fmt: skip
case(
    "leakyReLUGradient",
    lambda g, d, x, a: g.leakyReLUGradient(withIncomingGradient=d, sourceTensor=x, alphaTensor=a, name=None),
    [Y, X, np.array([0.2])], lambda d, x, a: torch.where(x > 0, d, a * d), (0,),
)  # fmt: skip
case(
    "softMaxGradient", lambda g, d, y: g.softMaxGradient(withIncomingGradient=d, sourceTensor=y, axis=-1, name=None),
    [Y, POSITIVE], lambda d, y: y * (d - (d * y).sum(-1, keepdim=True)),
)  # fmt: skip

# ---- losses and optimizers -------------------------------------------------------------------------------------------

_LABELS = _random(2, 3, 4, seed=9, low=0.0, high=1.0)


def _entropy(x: Any, t: Any, reduction: str) -> Any:
    rows = -(t * x.log_softmax(1)).sum(1, keepdim=True)
    return rows if reduction == "none" else rows.sum() if reduction == "sum" else rows.mean()


for _reduction in ("none", "sum", "mean"):
    _kind = MPSGraphLossReductionType[_reduction]
    case(
        f"softMaxCrossEntropy {_reduction}",
        lambda g, x, t, k=_kind: g.softMaxCrossEntropy(x, labels=t, axis=1, reuctionType=k, name=None), [X3, _LABELS],
        lambda x, t, r=_reduction: _entropy(x, t, r), (0,),
    )  # fmt: skip
    case(
        f"softMaxCrossEntropyGradient {_reduction}",
        lambda g, d, x, t, k=_kind: g.softMaxCrossEntropyGradient(
            d, source=x, labels=t, axis=1, reuctionType=k, name=None
        ), [_random(2, 1, 4) if _reduction == "none" else np.array(0.7), X3, _LABELS],
        lambda d, x, t, r=_reduction: _vjp(lambda v: _entropy(v, t, r), d, x), (0,),
    )  # fmt: skip
case(
    "stochasticGradientDescent",
    lambda g, r, w, d: g.stochasticGradientDescent(learningRate=r, values=w, gradient=d, name=None),
    [np.array([0.1]), X, Y], lambda r, w, d: w - r * d,
)  # fmt: skip


def _adam(rate: Any, w: Any, m: Any, v: Any, d: Any, largest: Any = None) -> list[Any]:
    m1, v1 = 0.9 * m + 0.1 * d, 0.99 * v + 0.01 * d * d
    found = [w - rate * m1 / (torch.sqrt(v1 if largest is None else torch.maximum(largest, v1)) + 1e-3), m1, v1]
    return found if largest is None else [*found, torch.maximum(largest, v1)]


def _betas(g: Any) -> dict[str, Any]:
    return {n: constant(g, [v], np.float64) for n, v in (("beta1", 0.9), ("beta2", 0.99), ("epsilon", 1e-3))}


_STATE = [X, Y, _random(3, 5, seed=4, low=0.1, high=1.0), _random(3, 5, seed=5)]
case(
    "adam",
    lambda g, w, m, v, d: g.adam(
        currentLearningRate=constant(g, [0.1], np.float64), **_betas(g), values=w, momentum=m, velocity=v,
        maximumVelocity=None, gradient=d, name=None,
    ), _STATE, lambda w, m, v, d: _adam(0.1, w, m, v, d),
)  # fmt: skip
case(
    "adam",
    lambda g, w, m, v, d, big: g.adam(
        learningRate=constant(g, [0.1], np.float64),
        **_betas(g),
        beta1Power=constant(g, [0.9**3], np.float64),
        beta2Power=constant(g, [0.99**3], np.float64),
        values=w,
        momentum=m,
        velocity=v,
        maximumVelocity=big,
        gradient=d,
        name=None,
    ),
    [*_STATE, POSITIVE],
    lambda w, m, v, d, big: _adam(0.1 * np.sqrt(1 - 0.99**3) / (1 - 0.9**3), w, m, v, d, big),
)

# ---- normalization ---------------------------------------------------------------------------------------------------

_M, _V, _GAMMA = _random(1, 3, 1), _random(1, 3, 1, low=0.5, high=2.0), _random(1, 3, 1, seed=3)
_D3 = _random(2, 3, 4, seed=11)


def _normal(x: Any, m: Any, v: Any) -> Any:
    return (x - m) / torch.sqrt(v + 0.1)


case(
    "normalize",
    lambda g, x, m, v, a, b: g.normalize(x, mean=m, variance=v, gamma=a, beta=b, epsilon=0.1, name=None),
    [X3, _M, _V, _GAMMA, _M], lambda x, m, v, a, b: _normal(x, m, v) * a + b,
)  # fmt: skip
case(
    "normalize without parameters",
    lambda g, x, m, v: g.normalize(x, mean=m, variance=v, gamma=None, beta=None, epsilon=0.1, name=None), [X3, _M, _V],
    _normal,
)  # fmt: skip
case(
    "normalizationBetaGradient",
    lambda g, d, x: g.normalizationBetaGradient(
        withIncomingGradientTensor=d, sourceTensor=x, reductionAxes=[0, 2], name=None
    ), [_D3, X3], lambda d, x: d.sum((0, 2), keepdim=True), (0,),
)  # fmt: skip
case(
    "normalizationGammaGradient",
    lambda g, d, x, m, v: g.normalizationGammaGradient(
        withIncomingGradientTensor=d, sourceTensor=x, mean=m, varianceTensor=v, reductionAxes=[0, 2], epsilon=0.1,
        name=None,
    ), [_D3, X3, _M, _V], lambda d, x, m, v: (d * _normal(x, m, v)).sum((0, 2), keepdim=True), (0, 1),
)  # fmt: skip


def _batch_norm_gradient(d: Any, x: Any, gamma: Any) -> Any:
    def layer(v: Any) -> Any:
        return gamma * _normal(v, v.mean((0, 2), keepdim=True), v.var((0, 2), correction=0, keepdim=True))

    return _vjp(layer, d, x)


case(
    "normalizationGradient",
    lambda g, d, x, a: g.normalizationGradient(
        withIncomingGradientTensor=d, sourceTensor=x, mean=g.mean(of=x, axes=[0, 2], name=None),
        varianceTensor=g.variance(of=x, axes=[0, 2], name=None), gammaTensor=a, gammaGradientTensor=None,
        betaGradientTensor=None, reductionAxes=[0, 2], epsilon=0.1, name=None,
    ), [_D3, X3, _GAMMA], _batch_norm_gradient, (0,),
)  # fmt: skip

# ---- convolution -----------------------------------------------------------------------------------------------------


def _same(x: Any, kernel: int, stride: int, dilation: int = 1, lower: bool = False, value: float = 0.0) -> Any:
    """Images [N, C, H, W] padded as TensorFlow's SAME."""
    pads: list[int] = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
        less, more = total // 2, total - total // 2
        pads += [more, less] if lower else [less, more]
    return TF.pad(x, pads, value=value)


IMAGES, FILTERS = _random(2, 4, 7, 6, seed=1), _random(6, 2, 3, 3, seed=2)
_EXPLICIT = MPSGraphConvolution2DOpDescriptor(
    strideInX=2, strideInY=1, dilationRateInX=1, dilationRateInY=2, groups=2, paddingLeft=1, paddingRight=0,
    paddingTop=2, paddingBottom=1,
)  # fmt: skip


def _explicit(x: Any, w: Any) -> Any:
    return TF.conv2d(TF.pad(x, (1, 0, 2, 1)), w, stride=(1, 2), dilation=(2, 1), groups=2)


case(
    "convolution2D", lambda g, x, w: g.convolution2D(x, weights=w, descriptor=_EXPLICIT, name=None), [IMAGES, FILTERS],
    _explicit,
)  # fmt: skip
for _style in (MPSGraphPaddingStyle.TF_SAME, MPSGraphPaddingStyle.TF_VALID, MPSGraphPaddingStyle.ONNX_SAME_LOWER):
    _layout = MPSGraphConvolution2DOpDescriptor(
        strideInX=2, strideInY=2, paddingStyle=_style, dataLayout=NHWC, weightsLayout=HWIO
    )

    def _channels_last(x: Any, w: Any, style: MPSGraphPaddingStyle = _style) -> Any:
        images = x.permute(0, 3, 1, 2)
        if style != MPSGraphPaddingStyle.TF_VALID:
            images = _same(images, 4, 2, lower=style == MPSGraphPaddingStyle.ONNX_SAME_LOWER)
        return TF.conv2d(images, w.permute(3, 2, 0, 1), stride=2).permute(0, 2, 3, 1)

    case(
        f"convolution2D {_style.name}",
        lambda g, x, w, d=_layout: g.convolution2D(x, weights=w, descriptor=d, name=None),
        [_random(2, 7, 6, 3), _random(4, 4, 3, 5)], _channels_last,
    )  # fmt: skip
_OUT = tuple(_explicit(torch.tensor(IMAGES), torch.tensor(FILTERS)).shape)
_GRADIENT = _random(*_OUT, seed=3)
for _tensor in (False, True):

    def _shape(g: Any, value: Any, tensor: bool = _tensor) -> dict[str, Any]:
        return {"outputShapeTensor": constant(g, value)} if tensor else {"outputShape": value}

    case(
        "convolution2DDataGradient",
        lambda g, d, w, s=_shape: g.convolution2DDataGradient(
            d, weights=w, **s(g, [2, 4, 7, 6]), forwardConvolutionDescriptor=_EXPLICIT, name=None
        ),
        [_GRADIENT, FILTERS],
        lambda d, w: torch.func.vjp(lambda x: _explicit(x, w), torch.zeros(2, 4, 7, 6, dtype=d.dtype))[1](d)[0],
    )
    case(
        "convolution2DWeightsGradient",
        lambda g, d, x, s=_shape: g.convolution2DWeightsGradient(
            d, source=x, **s(g, [6, 2, 3, 3]), forwardConvolutionDescriptor=_EXPLICIT, name=None
        ),
        [_GRADIENT, IMAGES],
        lambda d, x: torch.func.vjp(lambda w: _explicit(x, w), torch.zeros(6, 2, 3, 3, dtype=d.dtype))[1](d)[0],
    )
    case(
        "convolutionTranspose2D",
        lambda g, d, w, s=_shape: g.convolutionTranspose2D(
            d, weights=w, **s(g, [2, 4, 7, 6]), descriptor=_EXPLICIT, name=None
        ),
        [_GRADIENT, FILTERS],
        lambda d, w: torch.func.vjp(lambda x: _explicit(x, w), torch.zeros(2, 4, 7, 6, dtype=d.dtype))[1](d)[0],
    )
    case(
        "convolutionTranspose2DDataGradient",
        lambda g, d, w, s=_shape: g.convolutionTranspose2DDataGradient(
            d, weights=w, **s(g, list(_OUT)), forwardConvolutionDescriptor=_EXPLICIT, name=None
        ), [IMAGES, FILTERS], _explicit,
    )  # fmt: skip
    case(
        "convolutionTranspose2DWeightsGradient",
        lambda g, d, x, s=_shape: g.convolutionTranspose2DWeightsGradient(
            d, weights=x, **s(g, [6, 2, 3, 3]), forwardConvolutionDescriptor=_EXPLICIT, name=None
        ),
        [IMAGES, _GRADIENT],
        lambda d, x: torch.func.vjp(lambda w: _explicit(d, w), torch.zeros(6, 2, 3, 3, dtype=d.dtype))[1](x)[0],
    )
_DEPTHWISE = MPSGraphDepthwiseConvolution2DOpDescriptor(strideInX=2, paddingTop=1, paddingBottom=1)


def _depthwise(x: Any, w: Any) -> Any:
    return TF.conv2d(TF.pad(x, (0, 0, 1, 1)), w.transpose(0, 1).reshape(8, 1, 3, 3), stride=(1, 2), groups=4)


_EACH = _random(2, 4, 3, 3, seed=4)
case(
    "depthwiseConvolution2D",
    lambda g, x, w: g.depthwiseConvolution2D(x, weights=w, descriptor=_DEPTHWISE, name=None),
    [IMAGES, _EACH],
    _depthwise,
)
_DEPTH_GRADIENT = _random(*_depthwise(torch.tensor(IMAGES), torch.tensor(_EACH)).shape, seed=5)
case(
    "depthwiseConvolution2DDataGradient",
    lambda g, d, w: g.depthwiseConvolution2DDataGradient(
        d, weights=w, outputShape=[2, 4, 7, 6], descriptor=_DEPTHWISE, name=None
    ),
    [_DEPTH_GRADIENT, _EACH],
    lambda d, w: _vjp(lambda x: _depthwise(x, w), d, torch.zeros(2, 4, 7, 6, dtype=d.dtype)),
    (0,),
)
case(
    "depthwiseConvolution2DWeightsGradient",
    lambda g, d, x: g.depthwiseConvolution2DWeightsGradient(
        d, source=x, outputShape=[2, 4, 3, 3], descriptor=_DEPTHWISE, name=None
    ),
    [_DEPTH_GRADIENT, IMAGES],
    lambda d, x: _vjp(lambda w: _depthwise(x, w), d, torch.zeros(2, 4, 3, 3, dtype=d.dtype)),
    (0,),
)

# ---- pooling ---------------------------------------------------------------------------------------------------------


def _pool(**settings: Any) -> MPSGraphPooling2DOpDescriptor:
    return MPSGraphPooling2DOpDescriptor(kernelWidth=3, kernelHeight=2, strideInX=2, strideInY=2, **settings)


def _max(x: Any) -> Any:
    return TF.max_pool2d(TF.pad(x, (1, 1, 1, 0), value=-np.inf), (2, 3), 2)


_PADDED = _pool(paddingLeft=1, paddingRight=1, paddingTop=1)
_CEIL = _pool(ceilMode=True)
_POOLED = tuple(_max(torch.tensor(IMAGES)).shape)
case("maxPooling2D", lambda g, x: g.maxPooling2D(withSourceTensor=x, descriptor=_PADDED, name=None), [IMAGES], _max)
case(
    "maxPooling2D ceil", lambda g, x: g.maxPooling2D(withSourceTensor=x, descriptor=_CEIL, name=None), [IMAGES],
    lambda x: TF.max_pool2d(x, (2, 3), 2, ceil_mode=True),
)  # fmt: skip
case(
    "maxPooling2D same",
    lambda g, x: g.maxPooling2D(
        withSourceTensor=x,
        descriptor=MPSGraphPooling2DOpDescriptor(
            kernelWidth=2,
            kernelHeight=2,
            strideInX=2,
            strideInY=2,
            paddingStyle=MPSGraphPaddingStyle.TF_SAME,
            dataLayout=NHWC,
        ),
        name=None,
    ),
    [_random(2, 7, 5, 3)],
    lambda x: TF.max_pool2d(_same(x.permute(0, 3, 1, 2), 2, 2, value=-np.inf), 2).permute(0, 2, 3, 1),
)
case(
    "maxPooling2DGradient",
    lambda g, d, x: g.maxPooling2DGradient(withGradientTensor=d, sourceTensor=x, descriptor=_PADDED, name=None),
    [_random(*_POOLED), IMAGES], lambda d, x: _vjp(_max, d, x), (0,),
)  # fmt: skip
for _count in (False, True):
    _average = _pool(paddingLeft=1, paddingRight=1, includeZeroPadToAverage=_count)

    def _mean(x: Any, count: bool = _count) -> Any:
        sums = TF.avg_pool2d(TF.pad(x, (1, 1)), (2, 3), 2) * 6
        ones = TF.avg_pool2d(TF.pad(torch.ones_like(x), (1, 1), value=float(count)), (2, 3), 2) * 6
        return sums / ones

    case(
        "avgPooling2D",
        lambda g, x, d=_average: g.avgPooling2D(withSourceTensor=x, descriptor=d, name=None),
        [IMAGES],
        _mean,
    )
    case(
        "avgPooling2DGradient",
        lambda g, d, x, a=_average: g.avgPooling2DGradient(
            withGradientTensor=d, sourceTensor=x, descriptor=a, name=None
        ),
        [_random(2, 4, 3, 3), IMAGES],
        lambda d, x, f=_mean: _vjp(f, d, x),
        (0,),
    )
_POOL4 = MPSGraphPooling4DOpDescriptor(kernelSizes=[1, 2, 1, 3], strides=[1, 2, 1, 2])  # channels and columns


def _over(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(x.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)


for _name, _function in (
    ("max", lambda x: TF.max_pool2d(x, (2, 3), 2)), ("avg", lambda x: TF.avg_pool2d(x, (2, 3), 2)),
    ("L2Norm", lambda x: torch.sqrt(TF.avg_pool2d(x * x, (2, 3), 2) * 6)),
):  # fmt: skip
    _method = f"{_name}Pooling4D"
    case(_method, lambda g, x, n=_method: getattr(g, n)(x, descriptor=_POOL4, name=None), [IMAGES], _over(_function))
    case(
        f"{_method}Gradient",
        lambda g, d, x, n=f"{_method}Gradient": getattr(g, n)(d, source=x, descriptor=_POOL4, name=None),
        [_random(2, 2, 7, 2), IMAGES], lambda d, x, f=_function: _vjp(_over(f), d, x),
        () if _name == "L2Norm" else (0,),  # the engine has no derivative of that gradient
    )  # fmt: skip
_PLANES = _pool(returnIndicesMode=MPSGraphPoolingReturnIndicesMode.globalFlatten2D)
_WHOLE = _pool(
    returnIndicesMode=MPSGraphPoolingReturnIndicesMode.globalFlatten4D, returnIndicesDataType=MPSDataType.int64,
    dataLayout=NHWC,
)  # fmt: skip
_LAST = _random(2, 7, 6, 4, seed=8)


def _whole_indices(x: Any) -> tuple[Any, Any]:
    n, h, w, c = x.shape
    y, places = TF.max_pool2d(x.permute(0, 3, 1, 2), (2, 3), 2, return_indices=True)
    batch, channel = torch.arange(n)[:, None, None, None], torch.arange(c)[None, :, None, None]
    return y.permute(0, 2, 3, 1), (batch * h * w * c + places * c + channel).permute(0, 2, 3, 1)


def _plane_indices(x: Any) -> tuple[Any, Any]:
    y, places = TF.max_pool2d(x, (2, 3), 2, return_indices=True)
    return y, places.int()


_D_PLANES, _D_LAST = _random(2, 4, 3, 2), _random(2, 3, 2, 4)
for _rank, _descriptor in (
    ("2D", _PLANES),
    (
        "4D",
        MPSGraphPooling4DOpDescriptor(
            kernelSizes=[1, 1, 2, 3],
            strides=[1, 1, 2, 2],
            returnIndicesMode=MPSGraphPoolingReturnIndicesMode.globalFlatten2D,
        ),
    ),
):
    case(
        f"maxPooling{_rank}ReturnIndices",
        lambda g, x, r=_rank, d=_descriptor: getattr(g, f"maxPooling{r}ReturnIndices")(x, descriptor=d, name=None),
        [IMAGES],
        _plane_indices,
    )
    for _label in ("outputShape", "outputShapeTensor"):
        case(
            f"maxPooling{_rank}Gradient",
            lambda g, d, i, r=_rank, p=_descriptor, n=_label: getattr(g, f"maxPooling{r}Gradient")(
                withGradientTensor=d, indicesTensor=i, descriptor=p, name=None,
                **{n: [2, 4, 7, 6] if n == "outputShape" else constant(g, [2, 4, 7, 6])},
            ), [_D_PLANES, _plane_indices(torch.tensor(IMAGES))[1].numpy()],
            lambda d, i: _vjp(lambda x: TF.max_pool2d(x, (2, 3), 2), d, torch.tensor(IMAGES)), (0,),
        )  # fmt: skip
case(
    "maxPooling2DReturnIndices whole",
    lambda g, x: g.maxPooling2DReturnIndices(x, descriptor=_WHOLE, name=None),
    [_LAST],
    _whole_indices,
)
case(
    "maxPooling2DGradient whole",
    lambda g, d, i: g.maxPooling2DGradient(
        withGradientTensor=d, indicesTensor=i, outputShape=[2, 7, 6, 4], descriptor=_WHOLE, name=None
    ), [_D_LAST, _whole_indices(torch.tensor(_LAST))[1].numpy()],
    lambda d, i: _vjp(lambda x: _whole_indices(x)[0], d, torch.tensor(_LAST)), (0,),
)  # fmt: skip
