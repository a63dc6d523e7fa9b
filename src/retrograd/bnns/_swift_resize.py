"""Swift's ResizeLayer and CropResizeLayer."""

from __future__ import annotations

import enum

from . import _constants as c
from ._crop_resize import BNNSCropResize, BNNSCropResizeBackward, BNNSLayerParametersCropResize
from ._resize import BNNSFilterCreateLayerResize, BNNSLayerParametersResize
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor
from ._swift import check_data, checked_call
from ._swift_layers import UnaryLayer


class InterpolationMethod(enum.Enum):
    """How values between elements are found."""

    nearestNeighbor = c.BNNSInterpolationMethodNearest
    linear = c.BNNSInterpolationMethodLinear


class ResizeLayer(UnaryLayer):
    """A layer that resizes the axes whose extents differ between input and output."""

    def __init__(
        self,
        *,
        interpolationMethod: InterpolationMethod,
        input: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        alignsCorners: bool,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        parameters = BNNSLayerParametersResize(interpolationMethod.value, input, output, alignsCorners)
        super().__init__(lambda: BNNSFilterCreateLayerResize(parameters, filterParameters))


class CropResizeLayer:
    """Samples regions of images by linear interpolation. It has no filter: arrays say the sizes."""

    class LinearSamplingMode(enum.Enum):
        """Which points of a region are sampled."""

        default = c.BNNSLinearSamplingDefault
        alignCorners = c.BNNSLinearSamplingAlignCorners
        unalignCorners = c.BNNSLinearSamplingUnalignCorners
        strictAlignCorners = c.BNNSLinearSamplingStrictAlignCorners
        offsetCorners = c.BNNSLinearSamplingOffsetCorners

    class BoxCoordinateMode(enum.Enum):
        """What the four coordinates of a region are."""

        cornersHeightFirst = c.BNNSCornersHeightFirst
        cornersWidthFirst = c.BNNSCornersWidthFirst
        centerSizeHeightFirst = c.BNNSCenterSizeHeightFirst
        centerSizeWidthFirst = c.BNNSCenterSizeWidthFirst

    def __init__(
        self,
        *,
        coordinatesAreNormalized: bool,
        spatialScale: float,
        extrapolationValue: float = 0.0,
        samplingMode: LinearSamplingMode = LinearSamplingMode.default,
        boxCoordinateMode: BoxCoordinateMode,
    ) -> None:
        self._parameters = BNNSLayerParametersCropResize(
            coordinatesAreNormalized,
            spatialScale,
            extrapolationValue,
            samplingMode.value,
            boxCoordinateMode.value,
            c.BNNSInterpolationMethodLinear,
        )

    def apply(
        self,
        *,
        input: BNNSNDArrayDescriptor,
        regionOfInterest: BNNSNDArrayDescriptor,
        output: BNNSNDArrayDescriptor,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        """Sample every region of every image."""
        check_data(input=input, regionOfInterest=regionOfInterest, output=output)
        checked_call(BNNSCropResize, self._parameters, input, regionOfInterest, output, filterParameters)

    def applyBackward(
        self,
        *,
        regionOfInterest: BNNSNDArrayDescriptor,
        outputGradient: BNNSNDArrayDescriptor,
        generatingInputGradient: BNNSNDArrayDescriptor,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        """Compute the gradient of the images."""
        check_data(regionOfInterest=regionOfInterest, outputGradient=outputGradient)
        check_data(generatingInputGradient=generatingInputGradient)
        arrays = generatingInputGradient, regionOfInterest, outputGradient
        checked_call(BNNSCropResizeBackward, self._parameters, *arrays, filterParameters)
