"""Models before and after `replace` train to the same losses: those of ``retrograd bench torch``, and public ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from retrograd.lab.bench import drop_in
from support.torch_layers import rt, torch

# Differences of losses, relative to the first loss. Sums in another order differ in the last bits, and training lets
# such differences grow: at most to some hundred units in these models.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}

SMALL: dict[str, Callable[[], drop_in.DropIn]] = {
    "tagger": lambda: drop_in.tagger(torch, words=50, samples=6, longest=12, hidden=8),
    "characters": lambda: drop_in.characters(torch, samples=4, steps=10, hidden=12),
    "small CNN": lambda: drop_in.small_cnn(torch, samples=8, size=10, channels=4),
    "layer norms": lambda: drop_in.layer_norms(torch, tokens=24, features=16, blocks=2),
}


@pytest.fixture
def _dtype(dtype: str) -> Iterator[None]:
    torch.set_default_dtype(getattr(torch, dtype))
    yield
    torch.set_default_dtype(torch.float32)


def losses_of(case: drop_in.DropIn, model: Any, steps: int) -> list[float]:
    torch.manual_seed(1)
    step = drop_in.train_drop_in(torch, case, model)
    return [float(step()) for _ in range(steps)]


def assert_same_training(case: drop_in.DropIn, steps: int, tolerance: float, fuse: bool = False) -> Any:
    """Compare every loss. Returns what `replace` did."""
    model = copy.deepcopy(case.model)
    result = rt.replace(model, fuse=fuse, verbose=False)
    expected, found = losses_of(case, case.model, steps), losses_of(case, model, steps)
    assert expected[-1] < 0.8 * expected[0]
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert abs(a - b) <= tolerance * expected[0], f"step {number}: {a}, but {b} with plain PyTorch"
    return result


@pytest.mark.usefixtures("_dtype")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.long if dtype == "float32" and name != "characters" else ())
        for name in SMALL
        for dtype in TOLERANCE
    ],
)
def test_200_steps_have_the_losses_of_plain_pytorch(name: str, dtype: str) -> None:
    torch.manual_seed(0)
    result = assert_same_training(SMALL[name](), 200, TOLERANCE[dtype], fuse=name == "small CNN")
    assert len(result.replaced) == {"tagger": 1, "characters": 2, "small CNN": 6, "layer norms": 4}[name]
    assert result.left == {}


# ---- models of packages on PyPI --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("_dtype")
@pytest.mark.parametrize("dtype", ["float64"])
def test_a_public_model_with_an_lstm(dtype: str) -> None:
    """Demucs, which removes noise from speech: convolutions with an LSTM of two layers between them."""
    demucs = pytest.importorskip("denoiser.demucs", reason="needs the package denoiser")
    torch.manual_seed(0)
    clean = torch.randn(2, 1, 256).cumsum(-1) / 20
    noisy = clean + 0.1 * torch.randn(clean.shape)
    model = demucs.Demucs(hidden=4, depth=2, causal=False)
    case = drop_in.DropIn(model, lambda model: (model(noisy) - clean).abs().mean())
    result = assert_same_training(case, 100, TOLERANCE[dtype])
    assert result.replaced == {"lstm.lstm": "LSTM"}


@pytest.mark.long
@pytest.mark.usefixtures("_dtype")
@pytest.mark.parametrize("dtype", ["float64"])
def test_a_public_model_with_batch_norms(dtype: str) -> None:
    """EfficientNet, narrower and less deep, with its dropout of units and of whole blocks."""
    efficientnet = pytest.importorskip("efficientnet_pytorch", reason="needs the package efficientnet-pytorch")
    torch.manual_seed(0)
    x, target = torch.randn(4, 3, 32, 32), torch.arange(4)
    model = efficientnet.EfficientNet.from_name(
        "efficientnet-b0", num_classes=4, image_size=32, width_coefficient=0.25, depth_coefficient=0.25
    )
    case = drop_in.DropIn(model, lambda model: torch.nn.functional.cross_entropy(model(x), target))
    result = assert_same_training(case, 100, TOLERANCE[dtype])
    blocks = [name for name in result.replaced if name.startswith("_blocks.")]
    assert set(result.replaced.values()) == {"BatchNorm2d"}
    assert len(blocks) >= 10
    assert result.left == {}
