"""from_torch and to_torch: the same options, values, outputs and gradients."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import graph, nn
from support.arrays import Array
from support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("torch")

# Modules of torch.nn, the shape of x, and the spatial axes that to_torch must be told.
MODULES: list[tuple[str, tuple[int, ...], int | None]] = [
    ("LSTM(3, 4)", (5, 2, 3), None),
    ("LSTM(3, 4, 2, bidirectional=True, batch_first=True)", (2, 5, 3), None),
    ("LSTM(3, 4, 3, bias=False)", (5, 2, 3), None),
    ("LSTM(3, 4, 2, proj_size=2, bidirectional=True)", (5, 2, 3), None),
    ("GRU(3, 4)", (5, 2, 3), None),
    ("GRU(3, 4, 2, bidirectional=True, batch_first=True)", (2, 5, 3), None),
    ("GRU(3, 4, bias=False)", (5, 2, 3), None),
    ("RNN(3, 4)", (5, 2, 3), None),
    ("RNN(3, 4, 2, nonlinearity='relu', bidirectional=True)", (5, 2, 3), None),
    ("RNN(3, 4, bias=False)", (5, 2, 3), None),
    ("BatchNorm1d(3, eps=1e-3, momentum=0.3)", (6, 3), 0),
    ("BatchNorm2d(3, affine=False)", (2, 3, 4, 5), 2),
    ("BatchNorm3d(3, track_running_stats=False)", (2, 3, 2, 2, 3), 3),
    ("LayerNorm((3, 4), eps=1e-4)", (5, 3, 4), None),
    ("LayerNorm(4, elementwise_affine=False)", (5, 3, 4), None),
    ("GroupNorm(2, 6, eps=1e-3)", (2, 6, 4), None),
    ("GroupNorm(3, 6, affine=False)", (2, 6, 4), None),
    ("InstanceNorm1d(3)", (2, 3, 4), 1),
    ("InstanceNorm2d(3, affine=True, track_running_stats=True)", (2, 3, 4, 5), 2),
    ("InstanceNorm3d(3, affine=True)", (2, 3, 4, 5, 2), 3),
    ("Linear(4, 3)", (5, 4), None),
    ("Linear(4, 3, bias=False)", (2, 5, 4), None),
    ("Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2)", (2, 4, 9), None),
    ("Conv2d(3, 4, (3, 2), stride=(1, 2), padding=(2, 1), bias=False)", (2, 3, 6, 5), None),
    ("Conv2d(3, 4, 3, padding='valid')", (2, 3, 6, 5), None),
    ("Conv2d(3, 4, 3, padding='same', dilation=2)", (2, 3, 6, 5), None),
    ("ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)", (2, 4, 5), None),
    ("ConvTranspose2d(3, 4, (3, 2), stride=2, dilation=(1, 2), bias=False)", (2, 3, 4, 5), None),
    ("Dropout(0.0)", (5, 4), None),
    ("MaxPool1d(2)", (2, 3, 8), 1),
    ("MaxPool2d((3, 2), stride=1, padding=1, dilation=(1, 2))", (2, 3, 6, 7), None),
    ("AvgPool1d(3, stride=2, padding=1)", (2, 3, 8), 1),
    ("AvgPool2d(2, padding=1, count_include_pad=False)", (2, 3, 6, 7), 2),
    ("Flatten()", (2, 3, 4), None),
    ("ReLU()", (5, 4), None),
    ("ReLU6()", (5, 4), None),
    ("LeakyReLU(0.2)", (5, 4), None),
    ("Sigmoid()", (5, 4), None),
    ("Tanh()", (5, 4), None),
    ("ELU(0.7)", (5, 4), None),
    ("SELU()", (5, 4), None),
    ("CELU(0.7)", (5, 4), None),
    ("GELU()", (5, 4), None),
    ("GELU(approximate='tanh')", (5, 4), None),
    ("SiLU()", (5, 4), None),
    ("Softplus(2.0)", (5, 4), None),
    ("Softsign()", (5, 4), None),
    ("Hardsigmoid()", (5, 4), None),
    ("Hardswish()", (5, 4), None),
    ("Hardtanh(-0.5, 0.7)", (5, 4), None),
    ("LogSigmoid()", (5, 4), None),
    ("Tanhshrink()", (5, 4), None),
    ("Threshold(0.1, -2.0)", (5, 4), None),
    ("Identity()", (5, 4), None),
    ("Softmax(1)", (5, 4, 3), None),
]


def made(torch: Any, text: str, double: bool) -> Any:
    module = eval(text, vars(torch.nn))
    for index, tensor in enumerate(module.state_dict().values()):
        if tensor.dtype.is_floating_point:
            tensor.copy_(torch.from_numpy(np.random.default_rng(index).uniform(0.2, 1.0, tensor.shape)))
    return module.double() if double else module


def theirs(module: Any, x: Any) -> Any:
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def passes(layer: nn.Module, x: Array, dy: Array) -> tuple[Any, Any, list[Any]]:
    """y, and the gradients of x and of every parameter, in one program."""

    def call(x: Any, dy: Any) -> Any:
        y = layer(x)
        return y, graph.gradients(y, [x, *layer.parameters().values()], seed=dy)

    y, (dx, *gradients) = graph.compile(call, x, dy)(x, dy)
    return y, dx, gradients


def assert_same_passes(torch: Any, module: Any, layer: nn.Module, shape: tuple[int, ...], double: bool) -> None:
    """Outputs, and gradients of x and of every parameter, in training; then outputs in evaluation."""
    # PyTorch's constants of these two are float32 even in float64.
    exact = not isinstance(module, (torch.nn.CELU, torch.nn.Hardsigmoid))
    tolerance = (1e-10 if exact else 1e-7) if double else 2e-5
    dtype = torch.float64 if double else torch.float32
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module.train(), layer.train()
    y = theirs(module, x)
    dy = torch.randn(y.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    module.zero_grad()
    y.backward(dy)
    close = {"rtol": tolerance, "atol": tolerance}
    our_y, our_dx, ours = passes(layer, x.detach().numpy(), dy.numpy())
    np.testing.assert_allclose(our_y, y.detach().numpy(), **close)
    np.testing.assert_allclose(our_dx, x.grad.numpy(), **close)
    gradients = {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}
    if not isinstance(module, torch.nn.GRU):  # the two biases of an LSTM or RNN are one here
        gradients = {name: gradient for name, gradient in gradients.items() if "bias_hh" not in name}
    assert len(ours) == len(gradients)
    for gradient, (name, other) in zip(ours, gradients.items(), strict=True):
        np.testing.assert_allclose(gradient, other, rtol=tolerance, atol=tolerance * 10, err_msg=name)
    module.eval(), layer.eval()
    np.testing.assert_allclose(layer.forward(x.detach().numpy()), theirs(module, x).detach().numpy(), **close)


@pytest.mark.parametrize(("text", "shape", "spatial"), MODULES, ids=[text for text, *_ in MODULES])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_modules(torch: Any, text: str, shape: tuple[int, ...], spatial: int | None, double: bool) -> None:
    module = made(torch, text, double)
    layer = nn.from_torch(module)
    assert_same_passes(torch, module, layer, shape, double)
    if "'same'" in text:  # its padding could be on one side
        return
    # Back again: the same class, options and values.
    back = nn.to_torch(nn.from_torch(module), spatial=spatial)
    assert type(back) is type(module)
    for name, value in vars(module).items():
        plain = isinstance(value, (bool, int, float, str, type(None))) and name not in ("training", "bias")
        if plain and not name.startswith("_") and name not in ("stride", "padding", "kernel_size", "dilation"):
            assert getattr(back, name) == value, name
    state, others = module.state_dict(), back.state_dict()
    assert state.keys() == others.keys()
    for name, tensor in state.items():
        if "bias_" in name:  # the two biases of an LSTM or RNN are one here
            pair = name.replace("_hh", "_ih"), name.replace("_ih", "_hh")
            np.testing.assert_array_equal(sum(others[n] for n in pair).numpy(), sum(state[n] for n in pair).numpy())
        elif "num_batches" not in name:
            np.testing.assert_array_equal(others[name].numpy(), tensor.numpy(), name)
    assert_same_passes(torch, back, nn.from_torch(back), shape, double)


def test_embedding(torch: Any) -> None:
    module = torch.nn.Embedding(7, 3, padding_idx=2)
    layer = nn.from_torch(module)
    indices = np.array([[0, 2], [6, 0]])
    y = module(torch.from_numpy(indices))
    np.testing.assert_array_equal(layer(indices), y.detach().numpy())
    y.sum().backward()
    step = nn.compile(layer, lambda y, target: graph.sum(y * target), nn.SGD(layer, 1.0))
    gradients = step.gradients(indices, np.ones((2, 2, 3), np.float32))[1]
    np.testing.assert_array_equal(gradients["table"], module.weight.grad.numpy())
    back = nn.to_torch(layer)
    assert back.padding_idx == 2
    np.testing.assert_array_equal(back.weight.detach().numpy(), module.weight.detach().numpy())


@pytest.mark.parametrize("double", [False, True])
def test_nested_sequentials(torch: Any, double: bool) -> None:
    from collections import OrderedDict

    layers = torch.nn
    module = layers.Sequential(
        OrderedDict(
            features=layers.Sequential(
                layers.Conv2d(2, 4, 3, bias=False), layers.BatchNorm2d(4), layers.ReLU(), layers.MaxPool2d(2)
            ),
            flat=layers.Flatten(),
            head=layers.Sequential(layers.Linear(4 * 3 * 3, 5), layers.BatchNorm1d(5), layers.Linear(5, 3)),
        )
    )
    module = module.double() if double else module
    layer = nn.from_torch(module)
    assert isinstance(layer, nn.Sequential)
    assert list(layer.parameters())[:2] == ["features.0.w", "features.1.gamma"]
    assert_same_passes(torch, module, layer, (4, 2, 8, 8), double)
    back = nn.to_torch(layer)
    assert str(back) == str(module)
    assert_same_passes(torch, back, nn.from_torch(back), (4, 2, 8, 8), double)


def test_values_are_copied_and_modes_kept(torch: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module[1].eval()
    layer = nn.from_torch(module)
    assert [inside.training for _, inside in layer.modules()] == [True, True, False]
    before = layer.state_dict()["0.w"]
    with torch.no_grad():
        module[0].weight += 1
    np.testing.assert_array_equal(layer.parameters()["0.w"], before)
    back = nn.to_torch(layer)
    assert [inside.training for inside in back.modules()] == [True, True, False]
    layer.parameters()["0.w"][...] = 0
    np.testing.assert_array_equal(back[0].weight.detach().numpy(), before)


def test_running_statistics_go_on_as_in_pytorch(torch: Any) -> None:
    module = torch.nn.BatchNorm1d(3, momentum=0.25)
    layer = nn.from_torch(module)
    for seed in range(3):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
        module(x)
        layer(x)
    for name in ("running_mean", "running_var"):
        np.testing.assert_allclose(layer.buffers()[name], getattr(module, name).numpy(), rtol=1e-5)


def test_a_module_in_several_places(torch: Any) -> None:
    relu, linear = torch.nn.ReLU(), torch.nn.Linear(3, 3)
    module = torch.nn.Sequential(linear, relu, torch.nn.Sequential(linear, relu), torch.nn.Linear(3, 2))
    layer = nn.from_torch(module)
    assert list(layer.parameters()) == ["0.w", "0.b", "3.w", "3.b"]
    x = torch.randn((5, 3), generator=torch.Generator().manual_seed(0))
    y = module(x)
    y.sum().backward()
    ours, _, gradients = passes(layer, x.numpy(), np.ones((5, 2), np.float32))
    np.testing.assert_allclose(ours, y.detach().numpy(), rtol=1e-5, atol=1e-6)
    for gradient, parameter in zip(gradients, module.parameters(), strict=True):
        np.testing.assert_allclose(gradient, parameter.grad.numpy(), rtol=1e-5, atol=1e-6)
    back = nn.to_torch(layer)
    assert back[2][0] is back[0]
    np.testing.assert_array_equal(back(x).detach().numpy(), y.detach().numpy())


def test_frozen_parameters(torch: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
    module[0].requires_grad_(False)
    layer = nn.from_torch(module)
    assert [p.trainable for p in layer.parameters().values()] == [False, False, True, True]
    assert [p.requires_grad for p in nn.to_torch(layer).parameters()] == [False, False, True, True]


def test_one_parameter_of_two_layers_is_refused(torch: Any) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are one parameter"):
        nn.from_torch(module)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.w = first.w
    with pytest.raises(ValueError, match=r"1\.weight is the parameter of another layer as well"):
        nn.to_torch(nn.Sequential(first, second))


def test_dropout_between_layers_is_kept(torch: Any) -> None:
    layer = nn.from_torch(torch.nn.LSTM(3, 4, 2, dropout=0.25))
    assert isinstance(layer, nn.LSTM)
    assert layer.dropout == 0.25
    assert nn.to_torch(layer).dropout == 0.25


def test_every_softplus_returns(torch: Any) -> None:
    """alpha is 1 / beta, rounded: their product is not always 1."""
    x = torch.randn(50, dtype=torch.float64)
    for beta in [*np.random.default_rng(0).uniform(0.05, 20.0, size=200).tolist(), 49.0, 1 / 49.0, -3.0]:
        module = torch.nn.Softplus(beta)
        layer = nn.from_torch(module)
        np.testing.assert_allclose(layer.forward(x.numpy()), module(x).numpy(), rtol=1e-8)
        assert nn.to_torch(layer).beta == beta
        inverse = nn.Activation(rg.Activation("softplus", alpha=beta, beta=1 / beta))
        assert nn.to_torch(inverse).beta == 1 / beta
    for alpha, beta in ((1.0, 2.0), (1.0, 1.0 + 1e-12), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="PyTorch has no module for"):
            nn.to_torch(nn.Activation(rg.Activation("softplus", alpha=alpha, beta=beta)))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("GRUCell(3, 4)", TypeError, "(GRUCell): retrograd.nn has no counterpart of this module"),
        ("Conv3d(3, 4, 2)", TypeError, "(Conv3d): retrograd.nn has no counterpart"),
        ("Dropout2d()", TypeError, "(Dropout2d): retrograd.nn has no counterpart"),
        ("PReLU()", TypeError, "(PReLU): retrograd.nn has no counterpart"),
        ("BatchNorm1d(3, momentum=None)", ValueError, "momentum is None"),
        ("LayerNorm(3, bias=False)", ValueError, "a weight and no bias"),
        ("Embedding(3, 4, max_norm=1.0)", ValueError, "max_norm is 1.0, here it can only be None"),
        ("Embedding(3, 4, sparse=True)", ValueError, "sparse is True"),
        ("Conv2d(3, 4, 2, padding=1, padding_mode='reflect')", ValueError, "padding_mode is 'reflect'"),
        ("MaxPool2d(2, ceil_mode=True)", ValueError, "ceil_mode is True"),
        ("MaxPool2d(2, return_indices=True)", ValueError, "return_indices is True"),
        ("AvgPool2d(2, divisor_override=3)", ValueError, "divisor_override is 3"),
        ("Flatten(0)", ValueError, "start_dim is 0"),
        ("Dropout(1.0)", ValueError, "rate is 1.0"),
        ("Softplus(threshold=3)", ValueError, "threshold is 3"),
        ("Softplus(beta=0)", ValueError, "beta is 0, must not be 0"),
        ("Linear(3, 4).half()", ValueError, "its parameters are float16, must be float32 or float64"),
    ],
)
def test_modules_without_a_counterpart(torch: Any, text: str, error: type[Exception], words: str) -> None:
    module = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU(), eval(text, vars(torch.nn))))
    with pytest.raises(error) as raised:
        nn.from_torch(module)
    assert str(raised.value).startswith("from_torch: 0.1 (")
    assert words in str(raised.value)


def test_a_subclass_is_refused(torch: Any) -> None:
    class Linear(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match=r"the module \(Linear\): retrograd.nn has no counterpart"):
        nn.from_torch(Linear(2, 2))

    class Mine(nn.Linear):
        pass

    with pytest.raises(TypeError, match=r"the layer \(Mine\): PyTorch has no counterpart"):
        nn.to_torch(Mine(2, 2))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.LSTM(3, 4, peephole="diagonal"), "it has peepholes"),
        (nn.LSTM(3, 4, activations=rg.LstmActivations(i="hard_sigmoid")), "hard_sigmoid"),
        (nn.LSTM(3, 4, embedding=nn.Embedding(5, 3)), "it has an embedding"),
        (nn.LSTM(3, 4, last=True), "last is True, PyTorch's LSTM returns all outputs"),
        (nn.LSTM(3, 4, coupled=True), "its gates are coupled, those of PyTorch's LSTM are not"),
        (nn.LSTM(3, 4, cell_clip=2.0), "cell_clip is 2.0, which PyTorch's LSTM does not have"),
        (nn.LSTM(3, 4, zoneout=(0.0, 0.5)), "zoneout is (0.0, 0.5), which PyTorch's LSTM does not have"),
        (nn.GRU(3, 4, kind="before"), "kind is 'before', PyTorch's GRU resets after the product"),
        (nn.GRU(3, 4, flip=True), "flip is True, z of PyTorch's GRU is the weight of the old state"),
        (nn.GRU(3, 4, activations=rg.GruActivations(n="relu")), "relu"),
        (nn.GRU(3, 4, norm="haste"), "norm is 'haste', which PyTorch's GRU does not have"),
        (nn.RNN(3, 4, recurrent_dropout=0.5), "recurrent_dropout is 0.5, which PyTorch's RNN does not have"),
        (nn.RNN(3, 4, clip=1.0), "clip is 1.0, which PyTorch's RNN does not have"),
        (nn.RNN(3, 4, activation="sigmoid"), "its activation is 'sigmoid', PyTorch's RNN has tanh and relu"),
        (nn.BatchNorm(3), "give it as spatial=2"),
        (nn.LayerNorm(3, activation="relu"), "a fused activation"),
        (nn.GroupNorm(1, 3, channel_axis=-1), "channel_axis is -1, PyTorch's is always 1"),
        (nn.Conv(3, 4, 2, channels_last=True), "channels_last is True"),
        (nn.Conv(3, 4, 2, activation="relu"), "a fused activation"),
        (nn.Conv(3, 4, 2, padding=((1, 0), (0, 0))), "the same on both sides"),
        (nn.MaxPool(2), "give it as spatial=2"),
        (nn.Activation("erf"), "PyTorch has no module for"),
    ],
)
def test_layers_without_a_counterpart(torch: Any, layer: nn.Module, words: str) -> None:
    with pytest.raises(ValueError, match="to_torch: a ") as raised:
        nn.to_torch(nn.Sequential(a=layer))
    assert words in str(raised.value)


def test_other_refusals_of_to_torch(torch: Any) -> None:
    update = rg.RunningUpdate.keras()
    with pytest.raises(ValueError, match="PyTorch's running variance is unbiased"):
        nn.to_torch(nn.BatchNorm(3, update=update), spatial=1)
    with pytest.raises(ValueError, match="spatial is 4, must be from 0 to 3"):
        nn.to_torch(nn.BatchNorm(3), spatial=4)
    with pytest.raises(ValueError, match="3 spatial axes, PyTorch's has at most 2"):
        nn.to_torch(nn.MaxPool(2), spatial=3)


def test_importing_nn_imports_no_torch() -> None:
    code = "import sys, retrograd.nn; print('torch' in sys.modules, 'retrograd.convert' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert run.stdout.split() == ["False", "False"]
