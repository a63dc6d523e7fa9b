"""A BNNS normalization filter with its descriptors and arrays, and short ways to call it."""

from __future__ import annotations

from typing import Any

import numpy as np

from retrograd import bnns
from support.bnns import F32, TYPES, describe, image

KINDS = {
    "batch": bnns.BNNSBatchNorm,
    "instance": bnns.BNNSInstanceNorm,
    "layer": bnns.BNNSLayerNorm,
    "group": bnns.BNNSGroupNorm,
}


class Layer:
    """A filter and the arrays around it."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        *,
        gamma: np.ndarray | None = None,
        beta: np.ndarray | None = None,
        mean: np.ndarray | None = None,
        variance: np.ndarray | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-3,
        activation: Any = None,
        groups: int = 0,
        axis: int = 0,
        parameters: Any = None,
        types: tuple[int, int] = (F32, F32),
        **options: Any,
    ) -> None:
        self.kind, self.shape, self.types = kind, shape, types
        self.size = int(np.prod(shape))
        self.parameters = bnns.BNNSLayerParametersNormalization(
            i_desc=image(shape, data_type=types[0]),
            o_desc=image(shape, data_type=types[1]),
            beta_desc=describe(beta),
            gamma_desc=describe(gamma),
            moving_mean_desc=describe(mean),
            moving_variance_desc=describe(variance),
            momentum=momentum,
            epsilon=epsilon,
            activation=activation or bnns.BNNSActivation(),
            num_groups=groups,
            normalization_axis=axis,
        )
        self.filter = bnns.BNNSFilterCreateLayerNormalization(KINDS[kind], self.parameters, parameters, **options)
        self.made = self.filter is not None

    def forward(self, x: np.ndarray, training: bool = True, y: np.ndarray | None = None) -> np.ndarray:
        y = np.empty(x.shape, TYPES[self.types[1]]) if y is None else y
        status = bnns.BNNSNormalizationFilterApplyBatch(self.filter, len(x), x, self.size, y, self.size, training)
        assert status == 0, bnns.last_error()
        return y

    def backward(self, dy: np.ndarray, y: np.ndarray | None, **deltas: Any) -> int:
        """deltas: descriptors in_delta, beta_delta, gamma_delta."""
        out_delta = image(self.shape, dy, data_type=next(t for t, d in TYPES.items() if d == dy.dtype))
        return bnns.BNNSNormalizationFilterApplyBackwardBatch(
            self.filter,
            len(dy),
            deltas.get("in_delta"),
            self.size,
            y,
            self.size,
            out_delta,
            self.size,
            deltas.get("beta_delta"),
            deltas.get("gamma_delta"),
        )

    def gradients(self, dy: np.ndarray, y: np.ndarray, parameter: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        dx = np.full(dy.shape, np.nan, np.float32)
        dbeta, dgamma = np.full(parameter, np.nan, np.float32), np.full(parameter, np.nan, np.float32)
        status = self.backward(
            dy, y, in_delta=image(self.shape, dx), beta_delta=describe(dbeta), gamma_delta=describe(dgamma)
        )
        assert status == 0, bnns.last_error()
        return dx, dgamma, dbeta


def tanh() -> Any:
    return bnns.BNNSActivation(bnns.BNNSActivationFunctionTanh)


def activation(code: int, alpha: float = 0.75, beta: float = 1.25) -> Any:
    return bnns.BNNSActivation(code, alpha, beta)
