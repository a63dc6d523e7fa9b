"""retrograd.mps: what the kernels refuse."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from retrograd.mps import MPSMatrix, MPSVector, MTLOrigin, NSUIntegerMax
from support.arrays import Array, assert_same_bits
from support.mps import (
    BETA,
    GAMMA,
    MEAN,
    QUEUE,
    VAR,
    X,
    f32,
    forward,
    forward_kernel,
    forward_operands,
    gradient_kernel,
    matrix,
    vector,
)


def gradient_operands(**changed: Any) -> dict[str, Any]:
    operands: dict[str, Any] = {
        "to": QUEUE.makeCommandBuffer(),
        "gradientMatrix": matrix(X.copy()),
        "inputMatrix": matrix(X.copy()),
        "mean": vector(MEAN),
        "varianceVector": vector(VAR),
        "gammaVector": vector(GAMMA),
        "betaVector": vector(BETA),
        "resultGradientForDataMatrix": matrix(np.full_like(X, 7)),
        "resultGradientForGammaVector": vector(np.full(3, 7, np.float32)),
        "resultGradientForBetaVector": vector(np.full(3, 7, np.float32)),
    }
    return operands | changed


def short() -> Any:
    return vector(f32(1, 2))


FORWARD_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    # members, operands, error, message
    *(
        ({}, {name: None}, TypeError, f"{name} is missing")
        for name in forward_operands()
        if name[:4] not in ("gamm", "beta")
    ),
    ({}, {"inputMatrix": X}, TypeError, "inputMatrix must be an MPSMatrix, not ndarray"),
    ({}, {"gammaVector": GAMMA}, TypeError, "gammaVector must be an MPSVector, not ndarray"),
    ({"sourceMatrixOrigin": (0, 0, 1)}, {}, ValueError, "sourceMatrixOrigin.z is 1, must be 0"),
    ({"resultMatrixOrigin": (0, 0, 2)}, {}, ValueError, "resultMatrixOrigin.z is 2, must be 0"),
    ({"sourceMatrixOrigin": (5, 0, 0)}, {}, ValueError, "the window of inputMatrix, 4 x 3, is empty"),
    ({"sourceMatrixOrigin": (4, 0, 0)}, {}, ValueError, "0 x 3 from sourceMatrixOrigin"),
    ({"sourceMatrixOrigin": (0, 3, 0)}, {}, ValueError, "4 x 0 from sourceMatrixOrigin"),
    ({"sourceMatrixOrigin": (0, NSUIntegerMax, 0)}, {}, ValueError, "the window of inputMatrix"),
    ({"sourceNumberOfFeatureVectors": 0}, {}, ValueError, "0 x 3"),
    ({"sourceInputFeatureChannels": 0}, {}, ValueError, "4 x 0"),
    ({"resultMatrixOrigin": (1, 0, 0)}, {}, ValueError, "reach beyond resultMatrix, 4 x 3"),
    ({"resultMatrixOrigin": (0, 1, 0)}, {}, ValueError, "reach beyond resultMatrix, 4 x 3"),
    ({"resultMatrixOrigin": (NSUIntegerMax, 0, 0)}, {}, ValueError, "reach beyond resultMatrix"),
    *(
        ({}, {name: short()}, ValueError, f"{name} has length 2, but 3 columns")
        for name in ("meanVector", "varianceVector", "gammaVector", "betaVector")
    ),
    ({"epsilon": math.nan}, {}, ValueError, "epsilon is nan"),
    ({"epsilon": -1}, {}, ValueError, "epsilon is -1"),
    ({"epsilon": math.inf}, {}, ValueError, "epsilon is inf"),
    ({"batchStart": 1}, {}, ValueError, "batchStart is 1, but there are 1 matrices"),
]


@pytest.mark.parametrize(("members", "changed", "error", "message"), FORWARD_REFUSALS)
@pytest.mark.parametrize("compute", [False, True])
def test_forward_refusals(
    members: dict[str, Any], changed: dict[str, Any], error: type[Exception], message: str, compute: bool
) -> None:
    """At encode time, and nothing is written, nor recorded."""
    mean, var = MEAN.copy(), VAR.copy()
    operands = forward_operands(meanVector=vector(mean), varianceVector=vector(var)) | changed
    with pytest.raises(error, match=r"^MPSMatrixBatchNormalization\.encode: .*" + message):
        forward_kernel(computeStatistics=compute, **members).encode(**operands)
    if operands["commandBuffer"] is not None:
        operands["commandBuffer"].commit()
        operands["commandBuffer"].waitUntilCompleted()
    if operands["resultMatrix"] is not None:
        assert (np.frombuffer(operands["resultMatrix"].data.contents(), np.float32) == 7).all()
    assert_same_bits([mean, var], [MEAN, VAR])


GRADIENT_OPTIONAL = ("gammaVector", "betaVector", "resultGradientForGammaVector", "resultGradientForBetaVector")
GRADIENT_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *(
        ({}, {name: None}, TypeError, f"{name} is missing")
        for name in gradient_operands()
        if name not in GRADIENT_OPTIONAL
    ),
    ({}, {"gradientMatrix": X}, TypeError, "gradientMatrix must be an MPSMatrix, not ndarray"),
    ({}, {"resultGradientForBetaVector": BETA}, TypeError, "must be an MPSVector, not ndarray"),
    ({"primarySourceMatrixOrigin": (0, 0, 1)}, {}, ValueError, "primarySourceMatrixOrigin.z is 1"),
    ({"secondarySourceMatrixOrigin": (0, 0, 1)}, {}, ValueError, "secondarySourceMatrixOrigin.z is 1"),
    ({"resultMatrixOrigin": (0, 0, 1)}, {}, ValueError, "resultMatrixOrigin.z is 1"),
    ({"secondarySourceMatrixOrigin": (4, 0, 0)}, {}, ValueError, "the window of inputMatrix"),
    ({"primarySourceMatrixOrigin": (1, 0, 0)}, {}, ValueError, "reach beyond gradientMatrix, 4 x 3"),
    ({"primarySourceMatrixOrigin": (0, 1, 0)}, {}, ValueError, "reach beyond gradientMatrix, 4 x 3"),
    ({"resultMatrixOrigin": (0, 3, 0)}, {}, ValueError, "reach beyond resultGradientForDataMatrix, 4 x 3"),
    ({"sourceNumberOfFeatureVectors": 0}, {}, ValueError, "0 x 3"),
    *(
        ({}, {name: short()}, ValueError, f"{name} has length 2, but 3 columns")
        for name in ("mean", "varianceVector", *GRADIENT_OPTIONAL)
    ),
    ({"epsilon": math.nan}, {}, ValueError, "epsilon is nan"),
    ({"batchStart": 9}, {}, ValueError, "batchStart is 9"),
]


@pytest.mark.parametrize(("members", "changed", "error", "message"), GRADIENT_REFUSALS)
def test_gradient_refusals(
    members: dict[str, Any], changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    operands = gradient_operands(**changed)
    with pytest.raises(error, match=r"^MPSMatrixBatchNormalizationGradient\.encode: .*" + message):
        gradient_kernel(**members).encode(**operands)
    if operands["to"] is not None:
        operands["to"].commit()
        operands["to"].waitUntilCompleted()
    for name, storage in operands.items():
        if name.startswith("result") and isinstance(storage, (MPSMatrix, MPSVector)) and storage.data.length > 8:
            assert (np.frombuffer(storage.data.contents(), np.float32) == 7).all()


def test_vectors_for_some_of_the_matrices_are_refused() -> None:
    x, mean = np.ones((3, 4, 3), np.float32), np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="meanVector has 2 vectors, must have 1, or one for each of 3 matrices"):
        forward(forward_kernel(), x, mean, np.ones(3, np.float32), None, None)


def test_results_that_overlap_are_refused() -> None:
    memory = np.arange(60, dtype=np.float32).reshape(5, 12)
    saved = memory.copy()
    shifted = matrix(memory)
    kernel = forward_kernel(sourceNumberOfFeatureVectors=4, sourceInputFeatureChannels=3, resultMatrixOrigin=(1, 0, 0))
    with pytest.raises(ValueError, match="resultMatrix overlaps inputMatrix without being exactly in its place"):
        kernel.encode(**forward_operands(inputMatrix=shifted, resultMatrix=shifted))
    row = memory.ravel()[:3]
    kernel = forward_kernel(sourceInputFeatureChannels=3, sourceNumberOfFeatureVectors=4)
    with pytest.raises(ValueError, match="resultMatrix overlaps gammaVector"):
        kernel.encode(**forward_operands(resultMatrix=shifted, gammaVector=vector(row)))
    kernel = forward_kernel(computeStatistics=True)
    with pytest.raises(ValueError, match="meanVector overlaps varianceVector"):
        kernel.encode(**forward_operands(meanVector=vector(row), varianceVector=vector(row)))
    with pytest.raises(ValueError, match="resultGradientForGammaVector overlaps mean"):
        gradient_kernel().encode(**gradient_operands(mean=vector(row), resultGradientForGammaVector=vector(row)))
    same = vector(row)
    with pytest.raises(ValueError, match="GammaVector overlaps resultGradientForBetaVector"):
        gradient_kernel().encode(
            **gradient_operands(resultGradientForGammaVector=same, resultGradientForBetaVector=same)
        )
    assert_same_bits([memory], [saved])


def test_an_overlap_too_hard_to_find_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find one is NP-hard; the search has a bound, and what it does not find within counts as one."""

    def give_up(a: Array, b: Array, max_work: int = -1) -> bool:
        assert 0 < max_work < 10**7
        raise np.exceptions.TooHardError

    both = matrix(np.zeros((8, 12), np.float32))
    operands = forward_operands(inputMatrix=both, resultMatrix=both)
    kernel = forward_kernel(
        sourceNumberOfFeatureVectors=4, sourceInputFeatureChannels=3, resultMatrixOrigin=MTLOrigin(1, 6, 0)
    )
    kernel.encode(**operands)
    kernel.epsilon = 1  # so that the operands are looked at again
    monkeypatch.setattr(np, "shares_memory", give_up)
    with pytest.raises(ValueError, match="resultMatrix overlaps inputMatrix"):
        kernel.encode(**operands)


def test_results_in_read_only_memory_are_refused() -> None:
    frozen = X.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="resultMatrix lies in read-only memory"):
        forward_kernel().encode(**forward_operands(resultMatrix=matrix(frozen)))
    forward_kernel().encode(**forward_operands(inputMatrix=matrix(frozen)))  # reading it is fine
