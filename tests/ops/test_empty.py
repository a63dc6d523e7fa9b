"""Arrays without elements whose other axes are huge: nothing is computed, so calls return at once.

A loop over the other axes would take from minutes to years; then `ends` fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import retrograd as rg
from retrograd import ConvGradients
from support.waiting import ends

Array = npt.NDArray[Any]
HUGE, LARGE = 2**31, 2**20
DTYPES = [np.float32, np.float64]
LAYOUTS = [False, True]


def returns(call: Callable[[], Any]) -> Any:
    """The result of a call that must end."""
    results: list[Any] = []
    ends(lambda: results.append(call()))
    return results[0]


def images(n: int, c: int, h: int, w: int, channels_last: bool, dtype: Any = np.float32) -> Array:
    return np.zeros((n, h, w, c) if channels_last else (n, c, h, w), dtype)


# ---- convolutions ----------------------------------------------------------------------------------------------------

# x as (N, C, H, W), w, options
CONVOLUTIONS: dict[str, tuple[tuple[int, int, int, int], tuple[int, ...], dict[str, Any]]] = {
    "no_samples": ((0, 3, HUGE, LARGE), (5, 3, 3, 3), {}),
    "no_samples_strides": ((0, 3, LARGE, LARGE), (5, 3, 3, 3), {"stride": 50_000}),
    "no_samples_few_outputs": ((0, 3, LARGE, LARGE), (2, 3, 3, 3), {"stride": 50_000}),
    "no_samples_groups": ((0, 4, LARGE, LARGE), (6, 2, 3, 3), {"stride": 50_000, "groups": 2}),
    "no_channels": ((2, 0, LARGE, LARGE), (6, 0, LARGE, LARGE), {}),
    "no_channels_few_outputs": ((2, 0, LARGE, LARGE), (2, 0, LARGE - 1, LARGE - 2), {}),
    "no_channels_padding": ((2, 0, 1, 1), (6, 0, 2 * LARGE - 1, 2 * LARGE - 1), {"padding": LARGE - 1}),
    "no_channels_no_outputs": ((HUGE, 0, LARGE, 4), (0, 0, LARGE, 3), {}),
    "no_outputs": ((2, 3, 4, 4), (0, 3, LARGE + 4, LARGE + 4), {"padding": LARGE, "stride": LARGE}),
    "no_outputs_many_channels": ((2, 7, 4, 5), (0, 7, LARGE, LARGE), {"padding": LARGE}),
    "no_rows": ((HUGE, 3, 0, 4), (0, 3, LARGE, 3), {"padding": ((LARGE, 0), (0, 0))}),
}
TRANSPOSED: dict[str, tuple[tuple[int, int, int, int], tuple[int, ...], dict[str, Any]]] = {
    "no_samples": ((0, 3, 2**13, 2**14), (3, 5, 3, 3), {"stride": 30_000}),
    "no_channels": ((2, 0, 1, 1), (0, 6, LARGE, LARGE), {"padding": LARGE // 2 - 2}),
    "no_channels_few_outputs": ((2, 0, 1, 1), (0, 2, LARGE, LARGE), {"padding": LARGE // 2 - 2}),
    "no_outputs": ((2, 6, 3, 4), (6, 0, LARGE, LARGE), {}),
    "no_outputs_few_channels": ((2, 3, 1, 1), (3, 0, LARGE, LARGE), {}),
}


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, dtype: Any, channels_last: bool) -> None:
    shape, w_shape, options = CONVOLUTIONS[name]
    _check_convolution(rg.conv_forward, rg.conv_backward, shape, w_shape, w_shape[0], options, dtype, channels_last)


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: str, dtype: Any, channels_last: bool) -> None:
    shape, w_shape, options = TRANSPOSED[name]
    _check_convolution(
        rg.conv_transpose_forward, rg.conv_transpose_backward, shape, w_shape, w_shape[1], options, dtype, channels_last
    )


def _check_convolution(
    forward: Any,
    backward: Any,
    shape: tuple[int, int, int, int],
    w_shape: tuple[int, ...],
    outputs: int,
    options: dict[str, Any],
    dtype: Any,
    channels_last: bool,
) -> None:
    options = {**options, "channels_last": channels_last}
    x, w = images(*shape, channels_last, dtype), np.zeros(w_shape, dtype)
    b = np.arange(1, outputs + 1, dtype=dtype)
    y = returns(lambda: forward(x, w, b, **options))
    of_channels = b if channels_last else b[:, None, None]
    assert (y == of_channels).all()  # empty, or sums without terms
    dy = np.ones(y.shape, dtype)
    gradients = returns(lambda: backward(dy, x, w, **options))
    assert (gradients.dx == 0).all()
    assert (gradients.dw == 0).all()
    pixels = y.size // outputs if outputs else 0
    assert (gradients.db == pixels).all()
    assert [one.shape for one in gradients] == [x.shape, w.shape, b.shape]
    kept = ConvGradients(*(np.full(one.shape, 7, dtype) for one in gradients))
    returns(lambda: backward(dy, x, w, out=kept, accumulate=True, **options))
    assert (kept.dx == 7).all()
    assert (kept.dw == 7).all()
    assert (kept.db == 7 + pixels).all()


# ---- pooling ---------------------------------------------------------------------------------------------------------

IMAGES = [(0, 3, 2**14, 2**16), (0, HUGE, 4, 4), (HUGE, 0, 4, 4), (2, 0, 2**14, 2**16)]


@pytest.mark.parametrize("channels_last", LAYOUTS)
@pytest.mark.parametrize("shape", IMAGES)
def test_pooling(shape: tuple[int, int, int, int], channels_last: bool) -> None:
    x, option = images(*shape, channels_last), {"channels_last": channels_last}
    largest = returns(lambda: rg.max_pool_forward(x, 2, **option))
    y, indices = largest
    assert indices is not None
    calls: list[Callable[[], Array]] = [
        lambda: rg.max_pool_backward(y, indices, x.shape, **option),
        lambda: rg.max_unpool_forward(y, indices, x.shape, **option),
        lambda: rg.max_unpool_backward(x, indices, **option),
        lambda: rg.average_pool_forward(x, 2, **option),
        lambda: rg.average_pool_backward(y, x.shape, 2, **option),
        lambda: rg.l2_pool_forward(x, 2, **option),
        lambda: rg.l2_pool_backward(y, x, y, 2, **option),
    ]
    results = [returns(call) for call in calls]
    assert [one.shape for one in results] == [one.shape for one in (x, x, y, y, x, y, x)]


@pytest.mark.parametrize("channels_last", LAYOUTS)
def test_planes_without_pixels(channels_last: bool) -> None:
    shape = (HUGE, 0, 1) if channels_last else (HUGE, 1, 0)
    x, indices = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    option = {"channels_last": channels_last}
    assert returns(lambda: rg.max_pool_backward(x, indices, shape, **option)).shape == shape
    assert returns(lambda: rg.max_unpool_forward(x, indices, shape, **option)).shape == shape
    assert returns(lambda: rg.max_unpool_backward(x, indices, **option)).shape == shape


# ---- LSTM ------------------------------------------------------------------------------------------------------------


def lstm_weights(inputs: int, layers: int, directions: int) -> list[rg.LstmWeights]:
    widths = [inputs, *[4 * directions] * (layers - 1)]
    shapes = [width for width in widths for _ in range(directions)]
    return [rg.LstmWeights(np.ones((16, width), np.float32), np.ones((16, 4), np.float32)) for width in shapes]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("steps", [HUGE, 2**40])
def test_an_lstm_without_samples(steps: int, layers: int, directions: int, training: bool) -> None:
    x, weights = np.zeros((steps, 0, 3), np.float32), lstm_weights(3, layers, directions)
    result = returns(lambda: rg.lstm_forward(x, weights, bidirectional=directions == 2, training=training))
    assert result.y.shape == (steps, 0, 4 * directions)
    assert result.hn.shape == result.cn.shape == (layers * directions, 0, 4)
    if not training:
        return
    gradients = returns(lambda: rg.lstm_backward(result.y, result.cache))
    assert gradients.dx.shape == x.shape
    for given, one in zip(weights, gradients.dweights, strict=True):
        assert one.wx.shape == given.wx.shape
        assert (one.wx == 0).all()
        assert (one.wh == 0).all()


def test_an_lstm_with_a_table_and_no_samples() -> None:
    indices, table = np.zeros((2**40, 0), np.int64), np.ones((5, 3), np.float32)
    result = returns(lambda: rg.lstm_forward(indices, lstm_weights(3, 1, 1), table=table))
    gradients = returns(lambda: rg.lstm_backward(result.y, result.cache))
    assert gradients.dx.shape == table.shape
    assert (gradients.dx == 0).all()
    assert (gradients.dweights[0].wx == 0).all()


# ---- other layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x_shape", "outputs"), [((HUGE, 0), 0), ((HUGE, LARGE, 0), 0), ((0, LARGE), 0), ((0, 0), HUGE), ((0, HUGE), 0)]
)
def test_linear(x_shape: tuple[int, ...], outputs: int) -> None:
    x, w = np.zeros(x_shape, np.float32), np.zeros((outputs, x_shape[-1]), np.float32)
    y = returns(lambda: rg.linear_forward(x, w))
    assert y.shape == (*x_shape[:-1], outputs)
    gradients = returns(lambda: rg.linear_backward(y, x, w, need=("dx", "dw")))
    assert gradients.dx.shape == x.shape
    assert gradients.dw.shape == w.shape


@pytest.mark.parametrize("shape", [(0, 3, 2**24, 2**24), (2**24, 0, 2**24), (HUGE, 3, 0)])
def test_batch_norm(shape: tuple[int, ...]) -> None:
    gamma = np.ones(shape[1], np.float32)
    y, cache = returns(lambda: rg.batch_norm_forward(np.zeros(shape, np.float32), gamma, gamma))
    gradients = returns(lambda: rg.batch_norm_backward(y, cache))
    assert gradients.dx.shape == shape
    assert gradients.dgamma.tolist() == gradients.dbeta.tolist() == [0] * shape[1]


@pytest.mark.parametrize("shape", [(0, 2**24, 2**24), (HUGE, 0), (HUGE, 0, 2**24)])
def test_elements(shape: tuple[int, ...]) -> None:
    x = np.zeros(shape, np.float32)
    assert returns(lambda: rg.activation_forward(x, "relu")).shape == shape
    assert returns(lambda: rg.activation_backward(x, "relu", y=x)).shape == shape
    assert returns(lambda: rg.dropout(x, 0.5, seed=1)).shape == shape
    for loss in (rg.mean_squared_error, rg.huber, rg.sigmoid_cross_entropy):
        value, dx = returns(lambda loss=loss: loss(x, x, reduction="sum"))  # type: ignore[misc]
        assert value == 0
        assert dx.shape == shape
    returns(lambda: rg.sgd_step([x], [x.copy()], learning_rate=0.1))
    assert returns(lambda: rg.global_norm([x])) == 0


def test_embeddings() -> None:
    indices, none = np.zeros((4, 3), np.int64), np.zeros((0, HUGE), np.int64)
    assert returns(lambda: rg.embedding_forward(indices, np.zeros((HUGE, 0), np.float32))).shape == (4, 3, 0)
    assert returns(lambda: rg.embedding_backward(np.zeros((4, 3, 0), np.float32), indices, HUGE)).shape == (HUGE, 0)
    table = np.ones((5, 64), np.float32)
    assert returns(lambda: rg.embedding_forward(none, table)).shape == (0, HUGE, 64)
    gradient = returns(lambda: rg.embedding_backward(np.zeros((0, HUGE, 64), np.float32), none, 5))
    assert gradient.shape == table.shape
    assert (gradient == 0).all()
