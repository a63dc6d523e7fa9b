"""PyTorch's tools over replaced models: export, quantization, scripts, ONNX; and models that are unusual."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest

from support.torch_layers import assert_close, gradients_of, rt, same_bits, torch

nn: Any = torch.nn


class Model(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, 2, batch_first=True)
        self.gru, self.rnn = nn.GRU(8, 8, batch_first=True), nn.RNN(8, 8, batch_first=True)
        self.norm, self.batch_norm, self.head = nn.LayerNorm(8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):  # torch.jit.script reads annotations
        y, _ = self.lstm(x)
        y, _ = self.gru(y)
        y, _ = self.rnn(y)
        return self.head(self.batch_norm(self.norm(y).transpose(1, 2)).transpose(1, 2))


def made() -> tuple[Any, Any, Any]:
    """A replaced model in evaluation mode, the plain one, and an input."""
    torch.manual_seed(0)
    plain = Model().eval()
    replaced = copy.deepcopy(plain)
    rt.replace(replaced, verbose=False)
    assert isinstance(replaced.lstm, nn.LSTM)
    assert type(replaced.lstm) is rt.LSTM
    return replaced, plain, torch.randn(2, 5, 6)


def restored() -> tuple[Any, Any, Any]:
    model, plain, x = made()
    assert rt.restore(model, verbose=False).left == {}
    return model, plain, x


@pytest.mark.parametrize("strict", [False, True])
def test_export_and_compile(strict: bool) -> None:
    model, plain, x = made()
    program = torch.export.export(model, (x,), strict=strict)
    names = [str(node.target) for node in program.graph.nodes if "retrograd" in str(node.target)]
    assert names == ["retrograd.recurrent.default"] * 3 + ["retrograd.norm.default"] * 2
    assert_close(program.module()(x), plain(x))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x), plain(x))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization() -> None:
    """It finds layers by class: with a warning it leaves retrograd's, and after `restore` none."""
    kinds = {nn.LSTM, nn.GRU, nn.Linear}
    dynamic = torch.ao.nn.quantized.dynamic
    model, plain, x = made()
    with pytest.warns(RuntimeWarning, match=r"(LSTM|GRU|RNN): torch\.ao\.quantization finds layers by class.*restore"):
        quantized = torch.ao.quantization.quantize_dynamic(model, kinds)
    assert type(quantized.lstm) is rt.LSTM
    assert type(quantized.head) is dynamic.Linear
    assert torch.allclose(quantized(x), plain(x), atol=0.1)
    assert not hasattr(model.lstm, "qconfig")
    model, plain, x = restored()
    quantized = torch.ao.quantization.quantize_dynamic(model, kinds)
    assert (type(quantized.lstm), type(quantized.gru)) == (dynamic.LSTM, dynamic.GRU)
    assert torch.allclose(quantized(x), plain(x), atol=0.1)
    result = rt.replace(quantized, verbose=False)
    assert result.replaced == {"rnn": "RNN", "norm": "LayerNorm", "batch_norm": "BatchNorm1d"}
    where = "it is of torch.ao.nn.quantized.dynamic.modules.rnn, not of torch.nn"
    assert result.left == {"lstm": f"LSTM: {where}", "gru": f"GRU: {where}"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_of_restored_models() -> None:
    model, plain, x = restored()
    scripted = torch.jit.script(model)
    assert same_bits(scripted(x), plain(x))
    result = rt.replace(scripted, verbose=False)
    assert result.replaced == {}
    assert result.left["lstm"] == "LSTM: it is compiled by torch.jit, not of torch.nn"
    assert list(result.left) == ["lstm", "gru", "rnn", "norm", "batch_norm"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning")
def test_the_older_onnx_exporter_takes_restored_models() -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model, plain, x = restored()
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=False, input_names=["x"])
    session = runtime.InferenceSession(file.getvalue())
    (y,) = session.run(None, {"x": x.numpy()})
    assert_close(torch.from_numpy(y), plain(x).detach())


class LayerNorm(nn.Module):  # type: ignore[misc]
    """Of another package, with the same name."""


def test_layers_of_other_packages_are_listed() -> None:
    result = rt.replace(nn.Sequential(LayerNorm(), nn.ReLU(), nn.LayerNorm(4)), verbose=False)
    assert result.replaced == {"2": "LayerNorm"}
    assert result.left == {"0": f"LayerNorm: it is of {__name__}, not of torch.nn"}


class GRU(nn.Module):  # type: ignore[misc]
    """A model with the name of the layer that is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(4, 4)


def test_models_named_like_the_layer_in_them_are_not() -> None:
    with rt.patch() as patched:
        nn.Sequential(GRU())
    assert (patched.replaced, patched.left) == ({"GRU.layers": "GRU"}, {})
    result = rt.replace(nn.Sequential(GRU()), verbose=False)
    assert (result.replaced, result.left) == ({"0.layers": "GRU"}, {})


WRAPPED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "weight norm": (lambda: nn.utils.weight_norm(nn.LSTM(6, 6), "weight_hh_l0"), ["(the model)"]),
    "parametrized": (
        lambda: nn.utils.parametrizations.weight_norm(nn.LSTM(6, 6), "weight_hh_l0"),
        ["(the model)"],
    ),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.GRU(6, 6), "weight_hh_l0").eval(), ["(the model)"]),
    "frozen": (lambda: nn.GRU(6, 6).requires_grad_(False), ["(the model)"]),
    "data parallel": (lambda: nn.DataParallel(nn.LSTM(6, 6)), ["module"]),
    "averaged": (lambda: torch.optim.swa_utils.AveragedModel(nn.LSTM(6, 6)), ["module"]),
    "traced by fx": (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.LayerNorm(6), nn.LSTM(6, 6))), ["0", "1"]),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*weight_norm.*:UserWarning")
@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_layers_train_as_pytorchs(name: str) -> None:
    maker, expected = WRAPPED[name]
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(maker().double())
    result = rt.replace(models[0], verbose=False)
    assert (list(result.replaced), result.left) == (expected, {})
    x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        steps = []
        for model in models:
            y = model(x)[0]
            parameters = [p for p in model.parameters() if p.requires_grad]
            gradients = gradients_of([y], [x, *parameters])
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients[1:], strict=True):
                    parameter.sub_(0.1 * gradient)
            steps.append([y, *gradients])
        for a, b in zip(*steps, strict=True):
            assert_close(a, b)


def test_layers_on_the_meta_device_are_replaced_and_filled_later() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(6), nn.LSTM(6, 6))
    assert list(rt.replace(model, verbose=False).replaced) == ["0", "1"]
    assert model(torch.randn(3, 2, 6, device="meta"))[0].shape == (3, 2, 6)
    model = model.to_empty(device="cpu")
    plain = nn.Sequential(nn.LayerNorm(6), nn.LSTM(6, 6))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 2, 6)
    assert_close(model(x)[0], plain(x)[0])
