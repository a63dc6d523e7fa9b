"""What MPSGraph has and this package does not: names that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn

_COMPLEX: Final = "there are no complex tensors"
_FFT: Final = "Fourier transforms are not part of the training subset"
_QUANTIZED: Final = "quantized tensors are not part of the training subset"
_RESIZE: Final = "resizing and sampling of images are not part of the training subset"
_REARRANGED: Final = "reshape, transpose and reshape do the same"
_3D: Final = "convolutions of volumes are not part of the training subset"
_SHAPE_OF_VALUES: Final = "the shape of its result depends on values"

# Methods by their Swift names, with the reason.
LEFT_OUT: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("complexConstant", "complexTensor", "conjugate", "imaginaryPartOfTensor", "realPartOfTensor"), _COMPLEX
    ),
    **dict.fromkeys(("HermiteanToRealFFT", "fastFourierTransform", "realToHermiteanFFT"), _FFT),
    **dict.fromkeys(("dequantize", "quantize"), _QUANTIZED),
    **dict.fromkeys(("resize", "resizeBilinear", "resizeNearest", "sampleGrid"), _RESIZE),
    **dict.fromkeys(("batchToSpace", "depth", "space", "spaceToBatch"), _REARRANGED),
    **dict.fromkeys(
        (
            "convolution3D", "convolution3DDataGradient", "convolution3DWeightsGradient", "depthwiseConvolution3D",
            "depthwiseConvolution3DDataGradient", "depthwiseConvolution3DWeightsGradient",
        ),
        _3D,
    ),
    **dict.fromkeys(("nonMaximumSuppression", "nonZeroIndices"), _SHAPE_OF_VALUES),
    "HammingDistance": "it has no use in training",
    "call": "there are no callables of other executables",
    "colToIm": "use a convolution",
    "imToCol": "use a convolution",
    "inverse": "linear algebra is not part of the training subset",
    "reinterpretCast": "the bits of tensors are not accessible",
    "scaledDotProductAttention": "Apple's has no gradient; matrixMultiplication and softMax have",
    "sparseTensor": "there are no sparse tensors",
    "stencil": "use a convolution",
}  # fmt: skip


def left_out() -> dict[str, Callable[..., NoReturn]]:
    """Methods that raise."""
    return {name: _refusing(name, reason) for name, reason in LEFT_OUT.items()}


def _refusing(name: str, reason: str) -> Callable[..., NoReturn]:
    def method(self: Any, /, *arguments: Any, **labels: Any) -> NoReturn:
        raise NotImplementedError(f"MPSGraph.{name} is not supported: {reason}")

    method.__name__ = name
    method.__qualname__ = f"MPSGraph.{name}"
    method.__doc__ = f"Not supported: {reason}."
    return method
