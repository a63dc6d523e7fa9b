"""Swift's optimizers: structures whose fields may be changed between steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from . import _constants as c
from ._optimizer import (
    BNNSOptimizerAdamFields,
    BNNSOptimizerAdamWithClippingFields,
    BNNSOptimizerRMSPropFields,
    BNNSOptimizerRMSPropWithClippingFields,
    BNNSOptimizerSGDMomentumFields,
    BNNSOptimizerSGDMomentumWithClippingFields,
    BNNSOptimizerStep,
)
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Structure
from ._swift import checked_call, public


@public
class GradientClipping:
    """How gradients are limited: ``none``, or made by :meth:`byValue`, :meth:`byNorm` or :meth:`byGlobalNorm`."""

    none: ClassVar[GradientClipping]

    def __init__(self, function: int, **fields: float) -> None:
        self.fields: dict[str, Any] = {"clipping_func": function, **fields}

    @classmethod
    def byValue(cls, bounds: Sequence[float]) -> GradientClipping:
        """Limit every value to a range."""
        low, high = bounds
        return cls(c.BNNSOptimizerClippingByValue, clip_gradients_min=low, clip_gradients_max=high)

    @classmethod
    def byNorm(cls, threshold: float) -> GradientClipping:
        """Limit the norm of each gradient."""
        return cls(c.BNNSOptimizerClippingByNorm, clip_gradients_max_norm=threshold)

    @classmethod
    def byGlobalNorm(cls, threshold: float, globalNorm: float = 0.0) -> GradientClipping:
        """Limit the norm of all gradients together, which is `globalNorm` unless that is 0."""
        return cls(
            c.BNNSOptimizerClippingByGlobalNorm,
            clip_gradients_max_norm=threshold,
            clip_gradients_use_norm=globalNorm,
        )


GradientClipping.none = GradientClipping(c.BNNSOptimizerClippingNone)


@dataclasses.dataclass(kw_only=True)
class Optimizer:
    """Base class of the optimizers. Gradients are limited by `gradientClipping`, or by the older `clipsGradientsTo`."""

    gradientScale: float
    gradientClipping: GradientClipping | None = None
    clipsGradientsTo: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.gradientClipping is not None and self.clipsGradientsTo is not None:
            raise TypeError("gradientClipping and clipsGradientsTo are both given")

    @property
    def bnnsOptimizerFunction(self) -> int:
        """The number of the C function."""
        raise NotImplementedError

    @property
    def accumulatorCountMultiplier(self) -> int:
        """How many accumulators each parameter needs."""
        raise NotImplementedError

    def _fields(self) -> Structure:
        """The structure of the C function."""
        raise NotImplementedError

    def _clipping(self) -> dict[str, Any]:
        """The fields that limit gradients."""
        if self.gradientClipping is not None:
            return self.gradientClipping.fields
        if self.clipsGradientsTo is None:
            return {}
        low, high = self.clipsGradientsTo
        return {"clip_gradients": True, "clip_gradients_min": low, "clip_gradients_max": high}

    def step(
        self,
        *,
        parameters: Sequence[BNNSNDArrayDescriptor],
        gradients: Sequence[BNNSNDArrayDescriptor],
        accumulators: Sequence[BNNSNDArrayDescriptor] | None = None,
        filterParameters: BNNSFilterParameters | None = None,
    ) -> None:
        """Update the parameters. Accumulators are grouped by kind, and zero before the first step."""
        checked_call(
            BNNSOptimizerStep,
            self.bnnsOptimizerFunction,
            self._fields(),
            max(len(parameters), len(gradients)),  # if they differ, the call says which has too few
            parameters,
            gradients,
            accumulators,
            filterParameters,
            case="optimizerStepFail",
        )


@public
@dataclasses.dataclass(kw_only=True)
class SGDMomentumOptimizer(Optimizer):
    """SGD with momentum. `usesNestrovMomentum` is an older spelling of `usesNesterovMomentum`."""

    learningRate: float
    momentum: float = 0.0
    regularizationScale: float
    usesNesterovMomentum: bool = False
    usesNestrovMomentum: dataclasses.InitVar[bool | None] = None
    regularizationFunction: int
    sgdMomentumVariant: int

    def __post_init__(self, usesNestrovMomentum: bool | None) -> None:
        super().__post_init__()
        if usesNestrovMomentum is not None:
            self.usesNesterovMomentum = usesNestrovMomentum

    @property
    def bnnsOptimizerFunction(self) -> int:
        if self.gradientClipping is None:
            return c.BNNSOptimizerFunctionSGDMomentum
        return c.BNNSOptimizerFunctionSGDMomentumWithClipping

    @property
    def accumulatorCountMultiplier(self) -> int:
        return int(self.momentum != 0)

    def _fields(self) -> Structure:
        kind = BNNSOptimizerSGDMomentumFields
        if self.gradientClipping is not None:
            kind = BNNSOptimizerSGDMomentumWithClippingFields  # type: ignore[assignment]
        return kind(
            learning_rate=self.learningRate,
            momentum=self.momentum,
            gradient_scale=self.gradientScale,
            regularization_scale=self.regularizationScale,
            nesterov=self.usesNesterovMomentum,
            regularization_func=self.regularizationFunction,
            sgd_momentum_variant=self.sgdMomentumVariant,
            **self._clipping(),
        )


@dataclasses.dataclass(kw_only=True)
class _AdamFamily(Optimizer):
    """What Adam and AdamW share."""

    learningRate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    timeStep: float
    epsilon: float = 1e-8
    usesAMSGrad: bool = False

    @property
    def accumulatorCountMultiplier(self) -> int:
        return 3 if self.usesAMSGrad else 2

    def _adam_fields(self, decay: float, regularization: int = c.BNNSOptimizerRegularizationNone) -> Structure:
        kind = BNNSOptimizerAdamFields
        if self.gradientClipping is not None:
            kind = BNNSOptimizerAdamWithClippingFields  # type: ignore[assignment]
        return kind(
            learning_rate=self.learningRate,
            beta1=self.beta1,
            beta2=self.beta2,
            time_step=self.timeStep,
            epsilon=self.epsilon,
            gradient_scale=self.gradientScale,
            regularization_scale=decay,
            regularization_func=regularization,
            **self._clipping(),
        )


@public
@dataclasses.dataclass(kw_only=True)
class AdamOptimizer(_AdamFamily):
    """Adam. Increment `timeStep`, which starts at 1, after every iteration."""

    regularizationScale: float
    regularizationFunction: int

    @property
    def bnnsOptimizerFunction(self) -> int:
        if self.gradientClipping is None:
            return c.BNNSOptimizerFunctionAdamAMSGrad if self.usesAMSGrad else c.BNNSOptimizerFunctionAdam
        if self.usesAMSGrad:
            return c.BNNSOptimizerFunctionAdamAMSGradWithClipping
        return c.BNNSOptimizerFunctionAdamWithClipping

    def _fields(self) -> Structure:
        return self._adam_fields(self.regularizationScale, self.regularizationFunction)


@public
@dataclasses.dataclass(kw_only=True)
class AdamWOptimizer(_AdamFamily):
    """Adam with decoupled weight decay."""

    timeStep: float = 1.0
    weightDecay: float = 1e-2

    @property
    def bnnsOptimizerFunction(self) -> int:
        if self.gradientClipping is None:
            return c.BNNSOptimizerFunctionAdamWAMSGrad if self.usesAMSGrad else c.BNNSOptimizerFunctionAdamW
        if self.usesAMSGrad:
            return c.BNNSOptimizerFunctionAdamWAMSGradWithClipping
        return c.BNNSOptimizerFunctionAdamWWithClipping

    def _fields(self) -> Structure:
        return self._adam_fields(self.weightDecay)


@public
@dataclasses.dataclass(kw_only=True)
class RMSPropOptimizer(Optimizer):
    """RMSProp."""

    learningRate: float = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    centered: bool
    momentum: float = 0.0
    regularizationScale: float
    regularizationFunction: int

    @property
    def bnnsOptimizerFunction(self) -> int:
        if self.gradientClipping is None:
            return c.BNNSOptimizerFunctionRMSProp
        return c.BNNSOptimizerFunctionRMSPropWithClipping

    @property
    def accumulatorCountMultiplier(self) -> int:
        return 1 + bool(self.centered) + int(self.momentum != 0)

    def _fields(self) -> Structure:
        kind = BNNSOptimizerRMSPropFields
        if self.gradientClipping is not None:
            kind = BNNSOptimizerRMSPropWithClippingFields  # type: ignore[assignment]
        return kind(
            learning_rate=self.learningRate,
            alpha=self.alpha,
            epsilon=self.epsilon,
            centered=self.centered,
            momentum=self.momentum,
            gradient_scale=self.gradientScale,
            regularization_scale=self.regularizationScale,
            regularization_func=self.regularizationFunction,
            **self._clipping(),
        )
