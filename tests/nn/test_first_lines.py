"""The first lines of someone who knows PyTorch or Keras: they work, or the error says what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 4))  # float64, as NumPy's functions return
LABELS = np.array([0, 2, 1, 1, 0, 2])
COMPILE = "step = nn.compile(model, loss, optimizer)"


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5, rng=1), nn.ReLU(), nn.Linear(5, 3, rng=2))


def expected_logits(model: nn.Sequential, x: np.ndarray = X) -> np.ndarray:
    hidden = np.maximum(x @ model[0].w.value.T.astype(np.float64) + model[0].b.value, 0)
    return hidden @ model[2].w.value.T + model[2].b.value


def expected_loss(logits: np.ndarray) -> float:
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-log_softmax[np.arange(len(LABELS)), LABELS].mean())


def compiled(model: nn.Module | None = None, loss: Any = None) -> nn.Step:
    model = small() if model is None else model
    return nn.compile(model, nn.SoftmaxCrossEntropy() if loss is None else loss, nn.Adam(model))


# ---- what works ------------------------------------------------------------------------------------------------------


def test_model_of_x_and_loss_of_y() -> None:
    model = small()
    y = model(X)
    np.testing.assert_allclose(y, expected_logits(model), rtol=1e-5, atol=1e-6)
    loss = nn.SoftmaxCrossEntropy()(y, LABELS)
    assert type(loss) is float
    assert loss == pytest.approx(expected_loss(y), rel=1e-6)


@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist, np.float32], ids=["float64", "list", "float32"])
def test_data_are_converted_to_the_model(convert: Callable[[np.ndarray], Any]) -> None:
    model = small()
    for found in (model(convert(X)), model.predict(convert(X))):
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, model(X.astype(np.float32)))
    wanted = expected_loss(expected_logits(model))
    assert compiled(model)(convert(X), LABELS.tolist()) == pytest.approx(wanted, rel=1e-5)


def test_tensors_of_pytorch_are_data() -> None:
    torch = pytest.importorskip("torch")
    model = small()
    np.testing.assert_array_equal(model(torch.tensor(X)), model(X))
    np.testing.assert_array_equal(model.predict(torch.tensor(X)), model(X))
    wanted = expected_loss(expected_logits(model))
    assert compiled(model)(torch.tensor(X), torch.tensor(LABELS)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: nn.Adam(model, lr=0.1),
        lambda model: nn.Adam(model, 0.1),
        lambda model: nn.Adam(model.parameters(), lr=0.1),
        lambda model: nn.Adam(list(model.parameters().values()), learning_rate=0.1),
        lambda model: nn.Adam([{"params": model, "lr": 0.1}]),
    ],
)
def test_optimizers_of_a_model_or_its_parameters(make: Callable[[nn.Module], nn.Optimizer]) -> None:
    model = small()
    optimizer, before = make(model), model[2].b.value.copy()
    assert optimizer.current_rate() == 0.1
    nn.compile(model, nn.SoftmaxCrossEntropy(), optimizer)(X, LABELS)
    # The first step of Adam is the learning rate, by the sign of the gradient.
    np.testing.assert_allclose(np.abs(model[2].b.value - before), 0.1, rtol=1e-4)


def test_lr_of_an_optimizer_is_its_learning_rate() -> None:
    optimizer = nn.SGD(small(), lr=0.5)
    assert optimizer.learning_rate == optimizer.current_rate() == 0.5
    with pytest.raises(AttributeError, match=r"write optimizer\.learning_rate"):
        _ = optimizer.lr  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="only learning_rate can be set"):
        optimizer.lr = 0.25  # type: ignore[attr-defined]


def test_a_module_that_calls_its_base_class_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3, rng=0)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.linear(x)

    model = Model()
    assert list(model.parameters()) == ["linear.w", "linear.b"]
    np.testing.assert_allclose(model.predict(X), X @ model.linear.w.value.T + model.linear.b.value, rtol=1e-5)


def test_summary_of_x(capsys: pytest.CaptureFixture[str]) -> None:
    small().summary(X)
    printed = capsys.readouterr().out
    for text in ("Linear(4, 5)", "float32[6, 5]", "25", "float32[6, 3]", "18", "43 parameters"):
        assert text in printed


def test_convolutions_that_keep_the_size() -> None:
    x = RNG.standard_normal((2, 3, 8, 7)).astype(np.float32)
    for kernel, sizes in ((3, 1), ((3, 5), (1, 2)), ((2, 4), ((0, 1), (1, 2)))):
        same = nn.Conv(3, 4, kernel, padding="same", rng=0)
        assert same(x).shape == (2, 4, 8, 7)
        np.testing.assert_array_equal(same(x), nn.Conv(3, 4, kernel, padding=sizes, rng=0)(x))
    assert nn.Conv(3, 4, 3, padding="valid")(x).shape == (2, 4, 6, 5)
    with pytest.raises(
        ValueError, match="padding is 'same', which needs a Conv with stride 1; stride is 2; give sizes"
    ):
        nn.Conv(3, 4, 3, padding="same", stride=2)
    with pytest.raises(ValueError, match="padding is 'full'; there are 'same', 'valid', and sizes"):
        nn.Conv(3, 4, 3, padding="full")  # type: ignore[arg-type]


@pytest.mark.parametrize("pool", [nn.AveragePool, nn.MaxPool])
@pytest.mark.parametrize("channels_last", [False, True])
def test_pooling_of_whole_images_trains(pool: Any, channels_last: bool) -> None:
    """The gradient has one pixel, whose strides fit channels first and last."""
    x = RNG.standard_normal((2, 5, 5, 3) if channels_last else (2, 3, 5, 5)).astype(np.float32)
    options = {"channels_last": channels_last}
    model = nn.Sequential(nn.Conv(3, 4, 1, rng=0, **options), pool(5, **options), nn.Flatten())
    step = nn.compile(model, nn.MeanSquaredError(reduction="sum"), nn.SGD(model, 0.1))
    _, gradients = step.gradients(x, np.zeros((2, 4)))
    y = model(x)
    chosen = graph.conv(x, model[0].w.value, model[0].b.value, **options)
    chosen = np.moveaxis(chosen, -1, 1) if channels_last else chosen
    images = np.moveaxis(x, -1, 1) if channels_last else x
    share = np.full(chosen.shape, 1 / 25) if pool is nn.AveragePool else chosen == chosen.max((2, 3), keepdims=True)
    wanted = np.einsum("no,nohw,nchw->oc", 2 * y, share, images)
    np.testing.assert_allclose(gradients["0.w"][:, :, 0, 0], wanted, rtol=1e-4, atol=1e-6)


# ---- loops of PyTorch and Keras --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (lambda m: nn.Adam(m).zero_grad(), f"'Adam' object has no attribute 'zero_grad'; write {COMPILE} once"),
        (lambda m: nn.Adam(m).step(), f"'Adam' object has no attribute 'step'; write {COMPILE} once"),
        (lambda m: m.zero_grad(), f"'Sequential' object has no attribute 'zero_grad'; write {COMPILE} once"),
        (lambda m: m.backward(), f"'Sequential' object has no attribute 'backward'; write {COMPILE} once"),
        (lambda m: nn.MeanSquaredError().backward(), f"no attribute 'backward'; write {COMPILE} once"),
        (lambda m: m.compile("adam", "mse"), f"no attribute 'compile'; write {COMPILE}"),
        (lambda m: m.fit(X, LABELS), f"write nn.fit(step, (x, target), epochs=10), with {COMPILE}"),
        (lambda m: m.evaluate(X, LABELS), f"write step.evaluate(x, target), with {COMPILE}"),
        (lambda m: m.train_on_batch(X, LABELS), f"write step(x, target), with {COMPILE}"),
        (lambda m: m.to("cpu"), "there is no need for it: for the CPU"),
        (lambda m: m.cuda(), "there is no need for it: everything runs on the CPU"),
        (lambda m: m.requires_grad_(False), "write model.freeze() or model.unfreeze()"),
        (lambda m: m[0].weight, "'Linear' object has no attribute 'weight'; write layer.w"),
        (lambda m: m[0].w.grad, f"write step.gradients(x, target), with {COMPILE}"),
        (lambda m: m[0].w.data, "write parameter.value"),
        (lambda m: setattr(m[0], "trainable", False), "Linear.trainable would have no effect; write .freeze() or"),
        (lambda m: setattr(m[0], "requires_grad", False), "Linear.requires_grad would have no effect; write .freeze()"),
        (lambda m: nn.CrossEntropyLoss(), "write nn.SoftmaxCrossEntropy(), with the classes on the last axis"),
        (lambda m: nn.MSELoss(), "has no attribute 'MSELoss'; write nn.MeanSquaredError()"),
        (lambda m: nn.Conv2d(1, 2, 3), "has no attribute 'Conv2d'; write nn.Conv"),
        (lambda m: nn.Conv1d(1, 2, 3), "has no attribute 'Conv1d'; write nn.Conv(inputs, outputs, (3,))"),
        (lambda m: nn.Dense(3), "write nn.Linear(inputs, outputs), and an activation as a layer"),
        (lambda m: nn.ModuleList([]), "write nn.Sequential, which can be indexed and iterated"),
        (lambda m: nn.functional, "write the functions of retrograd.graph"),
        (lambda m: nn.Unknown, "module 'retrograd.nn' has no attribute 'Unknown'"),
    ],
)
def test_names_of_other_libraries(line: Callable[[nn.Sequential], object], message: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(message)):
        line(small())


def test_an_unknown_name_gets_no_advice() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = small().unknown  # type: ignore[attr-defined]
    assert str(caught.value) == "'Sequential' object has no attribute 'unknown'"


# ---- compile and fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            lambda m: nn.compile(m, nn.SoftmaxCrossEntropy, nn.Adam(m)),
            "loss is the class SoftmaxCrossEntropy; write nn.Soft",
        ),
        (lambda m: nn.compile(m, "mse", nn.Adam(m)), "compile: loss is 'mse'; write nn.MeanSquaredError()"),
        (lambda m: nn.compile(m, 3, nn.Adam(m)), "compile: loss is a int, must be a loss, a function, or None"),
        (lambda m: nn.compile(m, nn.Hinge(), nn.Adam), "optimizer is the class Adam; write nn.Adam(model, 1e-3)"),
        (lambda m: nn.compile(m, nn.Hinge(), "sgd"), "compile: optimizer is 'sgd'; write nn.SGD(model, 1e-2)"),
        (lambda m: nn.compile(m, nn.Hinge(), m), "optimizer is a Sequential, must be an optimizer such as nn.Adam("),
        (lambda m: nn.compile(m, nn.Hinge(), []), "optimizer is empty, must be an optimizer such as nn.Adam("),
        (lambda m: nn.compile(nn.Adam(m), nn.Hinge(), m), "compile: model is a Adam, must be an nn.Module"),
        (lambda m: nn.compile(m, nn.Hinge(), nn.Adam(m), metrics=["accuracy"]), 'such as {"accuracy": nn.accuracy}'),
        (lambda m: nn.compile(m, nn.Hinge(), nn.Adam(m), metrics=nn.accuracy), 'such as {"accuracy": nn.accuracy}'),
        (lambda m: nn.Adam(1e-3), "Adam: parameters is a float, must be a module, or its parameters; write nn.Adam("),
        (lambda m: nn.Adam(learning_rate=1e-3), "missing 1 required positional argument: 'parameters'"),
        (lambda m: nn.Adam(m, 1e-3, betas=(0.9, 0.99)), "argument 'betas'; write beta1=0.9, beta2=0.999"),
        (lambda m: nn.SGD(m), "SGD: learning_rate is missing; write nn.SGD(model, 0.01)"),
        (lambda m: nn.Adam(m, 0.1, lr=0.2), "learning_rate is 0.1, and lr, which is the same, is 0.2; give one"),
        (lambda m: nn.fit(m, (X, LABELS)), f"fit: step is a Sequential; write {COMPILE}"),
        (lambda m: nn.fit(compiled(m), X), "fit: data is a ndarray, must be a tuple: (x, target)"),
        (
            lambda m: compiled(m)(X),
            "missing a required argument: 'x', of the model's forward; the last argument of a step",
        ),
        (
            lambda m: compiled(m)(X, X, LABELS),
            "too many positional arguments, of the model's forward; the last argument",
        ),
        (
            lambda m: compiled(m)(X, LABELS, sizes=LABELS),
            "neither the model's forward nor the loss has an argument 'sizes'",
        ),
        (lambda m: nn.Sequential([nn.ReLU()]), "Sequential: layer 0 is a list; write Sequential(*layers)"),
        (lambda m: nn.Sequential(nn.ReLU), "Sequential: layer 0 is the class ReLU; write ReLU()"),
        (
            lambda m: nn.Sequential(graph.relu),
            "must be a Module; for a function, write a module whose forward calls it",
        ),
        (
            lambda m: setattr(m, "layers", [nn.ReLU()]),
            "modules and parameters inside a list would not be found; use Seq",
        ),
    ],
)
def test_arguments_of_other_libraries(line: Callable[[nn.Sequential], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        line(small())


def test_a_module_with_call_instead_of_forward() -> None:
    class Model(nn.Module):
        def call(self, x: Any) -> Any:
            return x

    with pytest.raises(NotImplementedError, match="Model has no forward; rename its method call to forward"):
        Model()(X)


def test_a_step_in_evaluation_mode_changes_nothing() -> None:
    model = small()
    step = compiled(model)
    model.predict(X)  # leaves the mode as it is
    first = step(X, LABELS)
    model.eval()
    before = model.state_dict()
    with pytest.raises(RuntimeError, match=re.escape("the model is in evaluation mode; call model.train() first")):
        step(X, LABELS)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    model.train()
    assert step(X, LABELS) < first


# ---- shapes and dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss", [nn.MeanSquaredError, nn.MeanAbsoluteError, nn.Huber, nn.SigmoidCrossEntropy, nn.Hinge]
)
def test_targets_without_the_axis_of_y_are_refused(loss: Any) -> None:
    """Broadcasting would compare each y with each target."""
    model = nn.Linear(4, 1, rng=0)
    name, column = loss.__name__, (X[:, :1] > 0).astype(np.float64)
    message = f"{name}: target has shape (6,), but y has shape (6, 1); write target[..., None]"
    for line in (lambda: compiled(model, loss())(X, column[:, 0]), lambda: loss()(model(X), column[:, 0])):
        with pytest.raises(ValueError, match=re.escape(message)):
            line()
    message = f"{name}: target has shape (6, 1), but y has shape (6,); write target[..., 0]"
    with pytest.raises(ValueError, match=re.escape(message)):
        loss()(model(X)[:, 0], column)
    with pytest.raises(ValueError, match=re.escape(f"{name}: target has shape (6, 2), but y has shape (6, 1)")):
        loss()(model(X), X[:, :2])


WRONG = [
    (
        lambda: nn.Sequential(body=nn.Linear(4, 5), head=nn.Linear(6, 3)),
        X,
        "layer 'head', Linear(6, 3): linear: x has shape (6, 5), expected (..., 6) to match w of shape (3, 6)",
    ),
    (lambda: nn.Sequential(nn.LayerNorm(5)), X, "layer '0', LayerNorm(5, eps=1e-05): LayerNorm: x has shape (6, 4)"),
    (lambda: nn.Sequential(nn.LSTM(4, 3)), X, "LSTM: x has shape (6, 4), must have the axes (T, N) and inputs = 4"),
]


@pytest.mark.parametrize(("make", "x", "message"), WRONG)
def test_wrong_shapes_name_the_layer_and_both_shapes(
    make: Callable[[], nn.Module], x: np.ndarray, message: str
) -> None:
    model = make()
    for line in (lambda: model(x), lambda: model.predict(x)):
        with pytest.raises(ValueError, match=re.escape(message)):
            line()


def test_wrong_shapes_name_the_line_of_the_user() -> None:
    with pytest.raises(ValueError, match=r"\(test_first_lines.py:\d+\)"):
        compiled()(X[:, :3], LABELS)


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        (LABELS[:4], ValueError, "labels is int64[4], but logits of shape (6, 3) need int64[6], or float32[6, 3]"),
        (LABELS[:, None], ValueError, "labels is int64[6, 1], but logits of shape (6, 3) need int64[6]"),
        (LABELS.astype(np.float32), ValueError, "labels is float32[6], but logits of shape (6, 3) need int64[6]"),
        (LABELS + 1, IndexError, "an index is 3, must be from 0 to below 3"),
    ],
)
def test_wrong_labels(labels: np.ndarray, kind: type[Exception], message: str) -> None:
    model = small()
    before = model.state_dict()
    with pytest.raises(kind, match=re.escape(message)):
        compiled(model)(X, labels)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(array, before[name])


def test_one_hot_labels_are_labels() -> None:
    model = small()
    one_hot = np.eye(3)[LABELS]
    assert compiled(model).evaluate(X, one_hot) == pytest.approx(compiled(model).evaluate(X, LABELS), rel=1e-6)


def test_a_float64_parameter_in_a_float32_model_is_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(4, 3, rng=0)
            self.scale = nn.Parameter(np.ones(3))

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.scale * self.linear(x)

    with pytest.raises(TypeError, match="parameter scale is float64, others are float32: give them one dtype"):
        Model().predict(X)


# ---- what forward cannot do ------------------------------------------------------------------------------------------


class Applied(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.linear, self.function = nn.Linear(4, 3, rng=0), function

    def forward(self, x: nn.Tensor) -> Any:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda y: y if y.sum() > 0 else -y, TypeError, "used as a truth value, .* use graph.where"),
        (lambda y: y * float(y.mean()), TypeError, "a tensor has no value while a function is traced; return it"),
        (np.tanh, TypeError, "numpy.tanh is called with a tensor .*; use graph.tanh"),
        (lambda y: np.mean(y, 1), TypeError, "numpy.mean is called with a tensor .*; use graph.mean"),
        (lambda y: np.concatenate([y, y]), TypeError, "use graph.concatenate"),
        (np.asarray, TypeError, "a tensor is used in NumPy code, which needs its elements"),
        (lambda y: y[y > 0], TypeError, "use graph.take for indices in arrays and graph.where for conditions"),
        (lambda y: y.relu(), AttributeError, r"no attribute 'relu'; write graph.relu\(x\)"),
        (lambda y: y.view(-1), AttributeError, r"no attribute 'view'; write .reshape\(shape\)"),
        (lambda y: y.permute(1, 0), AttributeError, r"no attribute 'permute'; write .transpose\(axes\)"),
        (lambda y: y.detach(), AttributeError, r"no attribute 'detach'; write graph.stop_gradient\(x\)"),
        (lambda y: y.item(), AttributeError, "no attribute 'item'; the elements are only known when the program runs"),
        (lambda y: y.unknown, AttributeError, "^'Tensor' object has no attribute 'unknown'$"),
    ],
)
def test_what_forward_cannot_do(function: Callable[[Any], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        compiled(Applied(function))(X, LABELS)


def test_what_the_advice_for_tensors_says_exists() -> None:
    from retrograd.graph.operators import _ELSEWHERE

    named = [name for text in _ELSEWHERE.values() for name in re.findall(r"graph\.(\w+)", text)]
    assert len(named) >= 4
    assert set(named) <= set(graph.__all__)
    for text in _ELSEWHERE.values():
        for name in re.findall(r"write \.(\w+)", text):
            assert hasattr(graph.Tensor, name), name
    assert not [name for name in _ELSEWHERE if name in dir(graph.Tensor)]


def test_functions_of_pytorch_say_that_the_tensor_is_not_theirs() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(
        TypeError, match="PyTorch's relu is called with a tensor of a graph; use a function of retrograd"
    ):
        compiled(Applied(torch.relu))(X, LABELS)


def test_print_in_forward_shows_shapes_when_compiled_and_values_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(y: Any) -> Any:
        print(y)
        return y

    model = Applied(shown)
    model.predict(X[:1])
    assert capsys.readouterr().out == "Tensor(float32[1, 3], from linear)\n"
    y = model(X[:1])
    assert capsys.readouterr().out == f"{y}\n"
