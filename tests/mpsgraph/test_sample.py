"""Apple's sample "Training a neural network using MPSGraph": the example's losses against the same program in PyTorch.

In float32 a rounding error now and then moves an element across the kink of ReLU or changes the maximum of a window;
from then on two correct programs differ by up to a percent. So float64 is compared over whole runs, float32 in each
step.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from retrograd.mpsgraph import MPSDataType, MPSGraphExecutionDescriptor, MPSGraphTensorData  # noqa: E402
from support.waiting import PATIENCE  # noqa: E402

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
STEPS, SIZE = 60, 8
Batch = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("mpsgraph_digits")


def batches(count: int) -> list[Batch]:
    """Images of ten patterns with noise, as pixels from 0 to 1."""
    rng = np.random.default_rng(2)
    patterns = rng.uniform(0, 0.8, (10, SIZE, SIZE))
    labels = rng.integers(0, 10, (STEPS, count))
    return [((patterns[row] + rng.uniform(0, 0.2, (count, SIZE, SIZE))).astype(np.float32), row) for row in labels]


def values(net: Any) -> list[Any]:
    found = net.graph.run(with_=net.queue, feeds={}, targetTensors=net.variables, targetOperations=None)
    return [found[v].numpy().astype(np.float64) for v in net.variables]


def trained(net: Any, images: Any, labels: Any) -> float:
    """The loss of one step, which the handler gets."""
    losses: Queue[float] = Queue()
    descriptor = MPSGraphExecutionDescriptor(
        completionHandler=lambda results, error: losses.put(results[net.loss].numpy().item())
    )
    net.train(images, labels, descriptor)
    return losses.get(timeout=PATIENCE)


def torch_loss(parameters: list[Any], images: Any, labels: Any) -> Any:
    """The same network with PyTorch's layouts."""
    f = torch.nn.functional
    w1, b1, w2, b2, w3, b3, w4, b4 = parameters
    x = torch.tensor(images.astype(np.float64))[:, None]
    for w, b in ((w1, b1), (w2, b2)):
        x = f.max_pool2d(f.relu(f.conv2d(x, w.permute(3, 2, 0, 1), b, padding="same")), 2)
    x = x.permute(0, 2, 3, 1).flatten(1)
    return f.cross_entropy(f.relu(x @ w3 + b3) @ w4 + b4, torch.tensor(labels))


@pytest.mark.parametrize("count", [16, 40])  # the code of the sample, and its README
def test_every_loss(count: int, sample: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BATCH", count)
    net = sample.Network(np.random.default_rng(1), SIZE, SIZE)
    losses = []
    for images, labels in batches(count):
        expected = torch_loss([torch.tensor(w) for w in values(net)], images, labels).item()
        losses.append(trained(net, images, labels))
        np.testing.assert_allclose(losses[-1], expected, rtol=1e-5)
    assert np.mean(losses[-10:]) < 0.1 * np.mean(losses[:10])


@pytest.mark.long
@pytest.mark.parametrize("count", [16, 40])
def test_a_run_in_float64(count: int, sample: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BATCH", count)
    monkeypatch.setattr(sample, "MPSDataType", SimpleNamespace(float32=MPSDataType.float64))

    class Network(sample.Network):  # type: ignore[misc, name-defined]
        def variable(self, value: Any) -> Any:
            made = self.graph.variable(
                with_=value.tobytes(), shape=list(value.shape), dataType=MPSDataType.float64, name=None
            )
            self.variables.append(made)
            return made

        def data(self, values: Any) -> MPSGraphTensorData:
            return MPSGraphTensorData(values.astype(np.float64))

    net = Network(np.random.default_rng(1), SIZE, SIZE)
    parameters = [torch.tensor(w, requires_grad=True) for w in values(net)]
    for images, labels in batches(count):
        loss = torch_loss(parameters, images, labels)
        np.testing.assert_allclose(trained(net, images, labels), loss.item(), rtol=1e-10)
        with torch.no_grad():
            for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p -= sample.RATE * g
    for found, p in zip(values(net), parameters, strict=True):
        np.testing.assert_allclose(found, p.detach().numpy(), rtol=1e-9, atol=1e-11)
