"""Swift's optimizers: structures whose fields may be changed between steps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Final

from .. import bnns as c
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
        norms = {"clip_gradients_max_norm": threshold, "clip_gradients_use_norm": globalNorm}
        return cls(c.BNNSOptimizerClippingByGlobalNorm, **norms)


GradientClipping.none = GradientClipping(c.BNNSOptimizerClippingNone)


# The fields of C structures that parameters become, if they are not spelled alike; "" if they are no fields.
_FIELDS: Final = {
    **dict.fromkeys(("gradientClipping", "clipsGradientsTo", "usesAMSGrad"), ""),
    "usesNesterovMomentum": "nesterov",
    "regularizationFunction": "regularization_func",
    "weightDecay": "regularization_scale",
}


@dataclasses.dataclass(kw_only=True)
class Optimizer:
    """Base class of the optimizers. Gradients are limited by `gradientClipping`, or by the older `clipsGradientsTo`."""

    _algorithm: ClassVar[str]  # in the names of C functions
    _structure: ClassVar[str]  # and of structures

    gradientScale: float
    gradientClipping: GradientClipping | None = None
    clipsGradientsTo: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.gradientClipping is not None and self.clipsGradientsTo is not None:
            raise TypeError("gradientClipping and clipsGradientsTo are both given")

    @property
    def bnnsOptimizerFunction(self) -> int:
        """The number of the C function."""
        variant = "AMSGrad" if getattr(self, "usesAMSGrad", False) else ""
        return int(getattr(c, f"BNNSOptimizerFunction{self._algorithm}{variant}{self._ending}"))

    @property
    def accumulatorCountMultiplier(self) -> int:
        """How many accumulators each parameter needs."""
        raise NotImplementedError

    @property
    def _ending(self) -> str:
        """Of the names of C functions and structures."""
        return "" if self.gradientClipping is None else "WithClipping"

    @cached_property
    def _field_names(self) -> dict[str, str]:
        """Parameters and their fields: ``learning_rate`` for ``learningRate``."""
        names = [one.name for one in dataclasses.fields(self)]
        spelled = {name: re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name) for name in names}
        found = {name: _FIELDS.get(name, field) for name, field in spelled.items()}
        return {name: field for name, field in found.items() if field}

    def _fields(self) -> Structure:
        """The structure of the C function."""
        kind = getattr(c, f"BNNSOptimizer{self._structure}{self._ending}Fields")
        values = {field: getattr(self, name) for name, field in self._field_names.items()}
        made: Structure = kind(**values, **self._clipping())
        return made

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
            c.BNNSOptimizerStep,
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

    _algorithm = _structure = "SGDMomentum"

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
    def accumulatorCountMultiplier(self) -> int:
        return int(self.momentum != 0)


@dataclasses.dataclass(kw_only=True)
class _AdamFamily(Optimizer):
    """What Adam and AdamW share."""

    _structure = "Adam"

    learningRate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    timeStep: float
    epsilon: float = 1e-8
    usesAMSGrad: bool = False

    @property
    def accumulatorCountMultiplier(self) -> int:
        return 3 if self.usesAMSGrad else 2


@public
@dataclasses.dataclass(kw_only=True)
class AdamOptimizer(_AdamFamily):
    """Adam. Increment `timeStep`, which starts at 1, after every iteration."""

    _algorithm = "Adam"

    regularizationScale: float
    regularizationFunction: int


@public
@dataclasses.dataclass(kw_only=True)
class AdamWOptimizer(_AdamFamily):
    """Adam with decoupled weight decay."""

    _algorithm = "AdamW"

    timeStep: float = 1.0
    weightDecay: float = 1e-2


@public
@dataclasses.dataclass(kw_only=True)
class RMSPropOptimizer(Optimizer):
    """RMSProp."""

    _algorithm = _structure = "RMSProp"

    learningRate: float = 1e-2
    alpha: float = 0.99
    epsilon: float = 1e-8
    centered: bool
    momentum: float = 0.0
    regularizationScale: float
    regularizationFunction: int

    @property
    def accumulatorCountMultiplier(self) -> int:
        return 1 + bool(self.centered) + int(self.momentum != 0)
