"""Core ML packages as models: read, run with sizes that the file leaves open, trained as PyTorch does, written back."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import graph
from retrograd.bnns._failure import Invalid, Unsupported
from retrograd.bnns._graph_coreml import CoreMLModel, read_model, write_parameters
from retrograd.bnns._graph_model import Model
from support.arrays import Array
from support.coreml import package, quiet, run, save

random = np.random.default_rng(7)


def draw(*shape: int) -> Array:
    return random.normal(size=shape).astype(np.float32)


def mil() -> Any:
    from coremltools.converters.mil import Builder

    return Builder


W1, B1, W2, B2 = draw(6, 4), draw(6), draw(3, 6), draw(3)


def two_layers(x: Any) -> Any:
    mb = mil()
    hidden = mb.relu(x=mb.linear(x=x, weight=W1, bias=B1, name="first"))
    return mb.linear(x=hidden, weight=W2, bias=B2, name="second")


def numpy_layers(x: Array) -> Array:
    return np.maximum(x @ W1.T + B1, 0) @ W2.T + B2


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("layers") / "a.mlpackage", two_layers, [draw(5, 4)])


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_model_has_its_constants_as_parameters(layers: Path) -> None:
    model = read_model(layers)
    function = model.functions["main"]
    assert [(s.name, s.shape, s.dtype) for s in function.inputs] == [("x0", (5, 4), np.float32)]
    assert function.names == ("second",)
    assert [s.shape for s in function.outputs] == [(5, 3)]
    assert {n: v.shape for n, v in model.parameters.items()} == {
        "first_weight_0": (6, 4), "first_bias_0": (6,), "second_weight_0": (3, 6), "second_bias_0": (3,),
    }  # fmt: skip
    x = draw(5, 4)
    np.testing.assert_allclose(run(model, x)[0], numpy_layers(x), rtol=1e-5, atol=1e-5)
    model.parameters["second_bias_0"].value = B2 + 1
    np.testing.assert_allclose(run(model, x)[0], numpy_layers(x) + 1, rtol=1e-5, atol=1e-5)


def test_a_function_is_chosen_by_name(layers: Path) -> None:
    assert list(read_model(layers, "main").functions) == ["main"]
    with pytest.raises(Invalid, match="no function 'other'; there are main"):
        read_model(layers, "other")


def test_scalars_and_statistics_are_not_parameters(tmp_path: Path) -> None:
    mean, variance, gamma = draw(3), np.abs(draw(3)) + 1, draw(3)

    def build(x: Any) -> Any:
        mb = mil()
        y = mb.batch_norm(x=x, mean=mean, variance=variance, gamma=gamma, beta=gamma, name="norm")
        return mb.mul(x=y, y=np.float32(3.0))

    model = read_model(package(tmp_path / "a.mlpackage", build, [draw(2, 3, 4)]))
    assert sorted(model.parameters) == ["norm_beta_0", "norm_gamma_0"]


def flexible(path: Path, shape: Any, build: Any = two_layers) -> Path:
    with quiet() as ct:
        from coremltools.converters.mil.mil import get_new_symbol

        size = get_new_symbol()
        spec = mil().TensorSpec((size, 4))
        return package(path, build, [spec], inputs=[ct.TensorType("x0", shape(ct))])


def test_sizes_of_a_range(tmp_path: Path) -> None:
    made = flexible(tmp_path / "a.mlpackage", lambda ct: (ct.RangeDim(2, 6), 4))
    model = read_model(made)
    assert model.functions["main"].inputs[0].shape == (-1, 4)
    assert model.functions["main"].outputs[0].shape == (-1, 3)
    for size in (2, 6):
        x = draw(size, 4)
        np.testing.assert_allclose(run(model, x)[0], numpy_layers(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="'x0': axis 0 has size 7, must be from 2 to 6"):
        run(model, draw(7, 4))


def test_enumerated_sizes(tmp_path: Path) -> None:
    made = flexible(tmp_path / "a.mlpackage", lambda ct: ct.EnumeratedShapes([(1, 4), (5, 4)]))
    model = read_model(made)
    x = draw(5, 4)
    np.testing.assert_allclose(run(model, x)[0], numpy_layers(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"'x0': the shape is \[2, 4\], must be one of"):
        run(model, draw(2, 4))


def test_sizes_that_are_computed(tmp_path: Path) -> None:
    """A reshape to sizes that follow from others, and an output that is a size."""

    def build(x: Any) -> Any:
        mb = mil()
        size = mb.gather(x=mb.shape(x=x), indices=0, axis=0)
        rows = mb.mul(x=size, y=2)
        shape = mb.concat(values=[mb.expand_dims(x=rows, axes=[0]), np.int32([2])], axis=0)
        y = mb.reshape(x=x, shape=shape)
        scale = mb.rsqrt(x=mb.cast(x=size, dtype="fp32"), epsilon=np.float32(0))
        filled = mb.fill(shape=shape, value=np.float32(1.0))
        return mb.add(x=mb.mul(x=y, y=scale), y=filled), mb.identity(x=shape)

    model = read_model(flexible(tmp_path / "a.mlpackage", lambda ct: (ct.RangeDim(1, 50), 4), build))
    assert model.functions["main"].outputs[0].shape == (-1, 2)
    for size in (1, 3, 9):
        x = draw(size, 4)
        y, shape = run(model, x)
        np.testing.assert_allclose(y, x.reshape(-1, 2) / np.sqrt(size) + 1, rtol=1e-5, atol=1e-6)
        assert shape.tolist() == [2 * size, 2]


def test_a_state_is_an_in_out_argument(tmp_path: Path) -> None:
    def build(x: Any, state: Any) -> Any:
        mb = mil()
        old = mb.read_state(input=state)
        return mb.coreml_update_state(state=state, value=mb.add(x=old, y=x))

    with quiet():
        from coremltools.converters.mil.mil import types

        spec, state = (make((3,), dtype=types.fp16) for make in (mil().TensorSpec, mil().StateTensorSpec))
    x = np.float32([1, 2, 3])
    model = read_model(package(tmp_path / "a.mlpackage", build, [spec, state], target="iOS18"))
    function = model.functions["main"]
    ((placeholder, last),) = function.states
    assert placeholder in function.inputs
    feeds = {s: graph.spec((3,)) for s in function.inputs}
    arrays = [x * 10 if s is placeholder else x for s in function.inputs]
    (found,) = model.recording.program(feeds, [last])(*arrays)
    assert found.tolist() == [11, 22, 33]


def test_float16_is_computed_in_float32_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = package(tmp_path / "a.mlpackage", two_layers, [draw(5, 4)], half=True, optimized=True)
    with caplog.at_level(logging.WARNING, "retrograd.bnns"):
        model = read_model(made)
    assert "float16 tensors, which are computed in float32 here" in caplog.text
    x = draw(5, 4)
    np.testing.assert_allclose(run(model, x)[0], numpy_layers(x), rtol=1e-2, atol=1e-2)
    name = next(n for n, v in model.parameters.items() if v.shape == (6, 4))
    new = draw(6, 4)
    model.parameters[name].value = new
    write_parameters(model, tmp_path / "b.mlpackage")
    again = read_model(tmp_path / "b.mlpackage")
    assert np.array_equal(again.parameters[name].value, new.astype(np.float16).astype(np.float32))
    model.parameters[name].value = new * 1e6
    with pytest.raises(Invalid, match=f"{name}.*float16 in the file, but has .*above 65504"):
        write_parameters(model, tmp_path / "b.mlpackage")
    assert np.array_equal(read_model(tmp_path / "b.mlpackage").parameters[name].value, again.parameters[name].value)


@pytest.mark.parametrize("kind", ["affine", "lut", "sparse"])
def test_compressed_constants(tmp_path: Path, kind: str) -> None:
    """As coremltools decompresses them; they are no parameters."""
    weight = random.choice(np.float32([-1.5, 0.25, 0, 2]), (48, 64))
    made = package(tmp_path / "a.mlpackage", lambda x: mil().linear(x=x, weight=weight, bias=draw(48)), [draw(3, 64)])
    with quiet() as ct:
        optimize = ct.optimize.coreml
        model = ct.models.MLModel(str(made), skip_model_load=True)
        if kind == "affine":
            config = optimize.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
            small = optimize.linear_quantize_weights(model, optimize.OptimizationConfig(config))
        elif kind == "lut":
            config = optimize.OpPalettizerConfig(mode="unique", weight_threshold=0)
            small = optimize.palettize_weights(model, optimize.OptimizationConfig(config))
        else:
            config = optimize.OpThresholdPrunerConfig(threshold=1e-3, minimum_sparsity_percentile=0.1,
                                                      weight_threshold=0)  # fmt: skip
            small = optimize.prune_weights(model, optimize.OptimizationConfig(config))
        kinds = {
            op.type for op in small.get_spec().mlProgram.functions["main"].block_specializations["CoreML6"].operations
        }
        assert any(k.startswith("constexpr_") for k in kinds), kinds
        save(small, tmp_path / "small.mlpackage")
    x = draw(3, 64)
    before, after = (read_model(tmp_path / name) for name in ("a.mlpackage", "small.mlpackage"))
    assert not any(v.shape == (48, 64) for v in after.parameters.values())
    np.testing.assert_allclose(run(after, x)[0], run(before, x)[0], rtol=1e-5, atol=0.2 if kind == "affine" else 1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_everything_that_is_not_supported_is_in_one_message(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        mb = mil()
        a = mb.random_normal(shape=[5, 4])
        b = mb.add(x=mb.non_zero(x=x), y=1)
        c = mb.non_zero(x=a)
        d = mb.conv(x=mb.reshape(x=x, shape=[1, 1, 1, 5, 4]), weight=draw(2, 1, 1, 1, 1), pad_type="valid")
        return a, b, c, d

    made = package(tmp_path / "a.mlpackage", build, [draw(5, 4)])
    with pytest.raises(Unsupported) as caught:
        read_model(made)
    message = str(caught.value)
    assert "a.mlpackage" in message
    assert "operations that are not supported: non_zero (2 times), random_normal" in message
    assert "conv 'conv_0': " in message


def test_options_that_depend_on_data_are_refused(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        mb = mil()
        return mb.reshape(x=x, shape=mb.cast(x=mb.reduce_max(x=x, axes=[0]), dtype="int32"))

    made = package(tmp_path / "a.mlpackage", build, [draw(5, 2)])
    with pytest.raises(Unsupported, match="shape depends on data"):
        read_model(made)


def test_without_coremltools_the_error_says_what_to_install(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(Unsupported, match=r"pip install 'retrograd\[coreml\]'"):
        read_model(layers)


def test_what_is_not_a_package(tmp_path: Path, layers: Path) -> None:
    with pytest.raises(Invalid, match="no such file"):
        read_model(tmp_path / "none.mlpackage")
    (tmp_path / "file.mlpackage").write_bytes(b"text")
    with pytest.raises(Invalid, match="it is a file"):
        read_model(tmp_path / "file.mlpackage")
    (tmp_path / "a.mlmodelc").mkdir()
    with pytest.raises(Unsupported, match=r"give the \.mlpackage"):
        read_model(tmp_path / "a.mlmodelc")
    (tmp_path / "empty.mlpackage").mkdir()
    with pytest.raises(Invalid, match="cannot be read as a Core ML package"):
        read_model(tmp_path / "empty.mlpackage")
    linked = tmp_path / "linked.mlpackage"
    shutil.copytree(layers, linked)
    (weights,) = linked.rglob("weight.bin")
    weights.unlink()
    weights.symlink_to("/etc/hostname")
    with pytest.raises(Invalid, match="symbolic link"):
        read_model(linked)


def test_damaged_packages_are_refused(tmp_path: Path, layers: Path) -> None:
    """Bytes of the specification and of the weights changed or cut off: a refusal or a model, nothing else."""
    generator, refused = np.random.default_rng(3), 0
    for number in range(150):
        copy = tmp_path / f"{number}.mlpackage"
        shutil.copytree(layers, copy)
        files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
        file = files[int(generator.integers(len(files)))]
        content = bytearray(file.read_bytes())
        if number % 3 == 0:
            content = content[: int(generator.integers(len(content)))]
        else:
            for _ in range(int(generator.integers(1, 8))):
                content[int(generator.integers(len(content)))] = int(generator.integers(256))
        file.write_bytes(content)
        try:
            read_model(copy)
        except (Invalid, Unsupported):
            refused += 1
        shutil.rmtree(copy)
    assert refused > 30


def test_a_result_of_another_shape_than_the_file_says(tmp_path: Path, layers: Path) -> None:
    with quiet() as ct:
        spec = ct.utils.load_spec(str(layers))
        (block,) = spec.mlProgram.functions["main"].block_specializations.values()
        (relu,) = (op for op in block.operations if op.type == "relu")
        relu.outputs[0].type.tensorType.dimensions[1].constant.size = 7
        copy = tmp_path / "a.mlpackage"
        shutil.copytree(layers, copy)
        (file,) = copy.rglob("*.mlmodel")
        file.write_bytes(spec.SerializeToString())
    with pytest.raises(
        Unsupported, match=r"relu .*: the result is float32 \[5, 6\], but the file says float32 \[5, 7\]"
    ):
        read_model(copy)


# ---- training and writing --------------------------------------------------------------------------------------------


def trained(model: CoreMLModel, names: list[str], rate: float, *inputs: Array) -> tuple[Any, list[Array]]:
    """A program that takes a step of gradient descent on the mean of squares, for feeds x and targets."""
    recording, function = model.recording, model.functions["main"]
    (y,) = function.outputs
    assert y.shape is not None
    target = recording.placeholder(y.shape, np.dtype(np.float32), "target")
    (difference,) = recording.call(graph.subtract, (y, target))
    (squares,) = recording.call(graph.square, (difference,))
    (loss,) = recording.call(graph.mean, (squares,))
    symbols = {c.name: c.results[0] for c in recording.calls if c.kind == "variable"}
    wanted = [symbols[name] for name in names]
    gradients = recording.gradients(loss, wanted)
    assigns = []
    for symbol, gradient in zip(wanted, gradients, strict=True):
        (new,) = recording.call(lambda w, g: w - g * rate, (symbol, gradient))
        assigns.append(recording.assign(symbol, new))
    feeds = {s: graph.spec(a.shape, a.dtype) for s, a in zip(function.inputs, inputs, strict=True)}
    feeds[target] = graph.spec(y.shape)
    return recording.program(feeds, [loss], assigns), [v.value.copy() for v in model.parameters.values()]


def by_shape(model: CoreMLModel, arrays: dict[str, Array]) -> dict[str, str]:
    """The parameter with the values of each array."""
    found = {}
    for name, array in arrays.items():
        found[name] = next(
            n for n, v in model.parameters.items() if v.shape == array.shape and np.array_equal(v.value, array)
        )
    return found


class Net:
    """A network with convolution, normalization, pooling and linear layers; in PyTorch."""

    def __new__(cls, torch: Any) -> Any:
        nn = torch.nn
        return nn.Sequential(
            nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 4, 2), nn.GELU(),
            nn.Flatten(), nn.Linear(16, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3),
        )  # fmt: skip


def converted(torch: Any, module: Any, x: Array, path: Path) -> Path:
    """What coremltools makes of a PyTorch module, without merging batch norms into convolutions."""
    with quiet() as ct, torch.no_grad():
        traced = torch.jit.trace(module.eval(), torch.from_numpy(x))
        pipeline = ct.PassPipeline.DEFAULT
        pipeline.remove_passes(
            {"common::fuse_conv_batchnorm", "common::const_deduplication", "common::fuse_conv_scale"}
        )
        model = ct.convert(
            traced, inputs=[ct.TensorType("x", x.shape)], convert_to="mlprogram", pass_pipeline=pipeline,
            compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS16, skip_model_load=True,
        )  # fmt: skip
        save(model, path)
    return path


def compared(torch: Any, module: Any, path: Path, x: Array, target: Array, tmp_path: Path) -> None:
    """Train both some steps, compare losses and parameters, write, read again."""
    model = read_model(path)
    with torch.no_grad():
        expected = module.eval()(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(run(model, x)[0], expected, rtol=1e-4, atol=1e-5)
    parameters = dict(module.named_parameters())
    names = by_shape(model, {n: p.detach().numpy() for n, p in parameters.items()})
    assert len(set(names.values())) == len(names)
    program, before = trained(model, list(names.values()), 0.1, x)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(8):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        (ours,) = program(x, target)
        np.testing.assert_allclose(ours, loss.item(), rtol=1e-4)
        for name, parameter in parameters.items():
            found = model.parameters[names[name]].value
            np.testing.assert_allclose(found, parameter.detach().numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    assert any(not np.array_equal(a, v.value) for a, v in zip(before, model.parameters.values(), strict=True))
    write_parameters(model, tmp_path / "trained.mlpackage")
    again = read_model(tmp_path / "trained.mlpackage")
    assert list(again.parameters) == list(model.parameters)
    for name, variable in model.parameters.items():
        assert np.array_equal(again.parameters[name].value, variable.value), name
    assert np.array_equal(run(again, x)[0], run(model, x)[0])


def test_a_pytorch_model_is_trained_as_in_pytorch(tmp_path: Path, torch: Any) -> None:
    torch.manual_seed(0)
    module, x = Net(torch), draw(4, 2, 6, 6)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:  # not all 0 or 1, so that they are told apart
                parameter.add_(torch.randn_like(parameter) * 0.1)
        module[1].running_mean.copy_(torch.randn(5) * 0.1)
    path = converted(torch, module, x, tmp_path / "a.mlpackage")
    compared(torch, module, path, x, draw(4, 3), tmp_path)


def test_lstm_and_attention_are_trained_as_in_pytorch(tmp_path: Path, torch: Any) -> None:
    """The package is made with the builder, with PyTorch's arrays: gates in MIL's order, one bias."""
    torch.manual_seed(1)
    rnn, head = torch.nn.LSTM(3, 4), torch.nn.Linear(4, 2)
    state = {n: p.detach().numpy() for n, p in rnn.named_parameters()}

    def gates(array: Array) -> Array:
        i, f, g, o = np.split(array, 4)
        return np.concatenate([i, f, o, g])

    def build(x: Any) -> Any:
        mb = mil()
        zeros = np.zeros((5, 4), np.float32)
        y, *_ = mb.lstm(
            x=x, initial_h=zeros, initial_c=zeros, weight_ih=gates(state["weight_ih_l0"]), output_sequence=True,
            weight_hh=gates(state["weight_hh_l0"]), bias=gates(state["bias_ih_l0"] + state["bias_hh_l0"]), name="rnn",
        )  # fmt: skip
        scores = mb.softmax(x=mb.matmul(x=y, y=y, transpose_y=True), axis=-1)
        return mb.linear(
            x=mb.matmul(x=scores, y=y),
            weight=head.weight.detach().numpy(),
            bias=head.bias.detach().numpy(),
            name="head",
        )

    x, target = draw(6, 5, 3), draw(6, 5, 2)
    model = read_model(package(tmp_path / "a.mlpackage", build, [x]))
    names = ["rnn_weight_ih_0", "rnn_weight_hh_0", "rnn_bias_0", "head_weight_0", "head_bias_0"]
    assert set(names) <= set(model.parameters)
    program, _ = trained(model, names, 0.05, x)
    # One bias in the package: the other one of PyTorch stays as it is.
    rnn.bias_hh_l0.requires_grad_(False)
    optimizer = torch.optim.SGD([p for m in (rnn, head) for p in m.parameters() if p.requires_grad], 0.05)
    for _ in range(6):
        optimizer.zero_grad()
        y, _ = rnn(torch.from_numpy(x))
        out = head(torch.softmax(y @ y.transpose(1, 2), -1) @ y)
        loss = torch.nn.functional.mse_loss(out, torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        (ours,) = program(x, target)
        np.testing.assert_allclose(ours, loss.item(), rtol=1e-4)
    expected = {
        "rnn_weight_ih_0": gates(rnn.weight_ih_l0.detach().numpy()),
        "rnn_weight_hh_0": gates(rnn.weight_hh_l0.detach().numpy()),
        "rnn_bias_0": gates((rnn.bias_ih_l0 + rnn.bias_hh_l0).detach().numpy()),
        "head_weight_0": head.weight.detach().numpy(),
        "head_bias_0": head.bias.detach().numpy(),
    }
    for name, array in expected.items():
        np.testing.assert_allclose(model.parameters[name].value, array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_writing_in_place_and_again(tmp_path: Path, layers: Path) -> None:
    copy = tmp_path / "a.mlpackage"
    shutil.copytree(layers, copy)
    model = read_model(copy)
    for _ in range(3):
        for variable in model.parameters.values():
            variable.value = variable.value + 1
        write_parameters(model, copy)
        again = read_model(copy)
        for name, variable in model.parameters.items():
            assert np.array_equal(again.parameters[name].value, variable.value)
    assert [p.name for p in tmp_path.iterdir()] == ["a.mlpackage"]
    assert sum(p.stat().st_size for p in copy.rglob("weight.bin")) == sum(
        p.stat().st_size for p in layers.rglob("weight.bin")
    )


def test_what_is_written_is_read_by_coremltools(tmp_path: Path, layers: Path) -> None:
    model = read_model(layers)
    model.parameters["first_weight_0"].value = new = draw(6, 4)
    write_parameters(model, tmp_path / "b.mlpackage")
    with quiet() as ct:
        from coremltools.converters.mil.frontend.milproto.load import load

        made = ct.models.MLModel(str(tmp_path / "b.mlpackage"), skip_model_load=True)
        spec = made.get_spec()
        program = load(spec, spec.specificationVersion, made.weights_dir)
        (first,) = (op for op in program.functions["main"].operations if op.name == "first")
        assert np.array_equal(first.weight.val, new)


def test_constants_that_share_a_record(tmp_path: Path) -> None:
    """Two constants of one record in the file may get different values."""
    weight = draw(32, 32)

    def build(x: Any) -> Any:
        mb = mil()
        return mb.matmul(x=mb.matmul(x=x, y=weight, name="a"), y=weight + 0, name="b")

    made = package(tmp_path / "a.mlpackage", build, [draw(2, 32)])
    with quiet() as ct:
        spec = ct.utils.load_spec(str(made))
        (block,) = spec.mlProgram.functions["main"].block_specializations.values()
        blobs = [op.attributes["val"].blobFileValue for op in block.operations if op.type == "const"
                 if op.attributes["val"].WhichOneof("value") == "blobFileValue"]  # fmt: skip
        assert len(blobs) == 2
        blobs[1].offset = blobs[0].offset
        (file,) = made.rglob("*.mlmodel")
        file.write_bytes(spec.SerializeToString())
    model = read_model(made)
    first, second = model.parameters.values()
    first.value, second.value = draw(32, 32), draw(32, 32)
    write_parameters(model, tmp_path / "b.mlpackage")
    again = read_model(tmp_path / "b.mlpackage")
    for name, variable in model.parameters.items():
        assert np.array_equal(again.parameters[name].value, variable.value)


def test_nothing_is_written_on_failure(tmp_path: Path, layers: Path) -> None:
    source, target = tmp_path / "a.mlpackage", tmp_path / "b.mlpackage"
    shutil.copytree(layers, source)
    shutil.copytree(layers, target)
    before = {p: p.read_bytes() for p in target.rglob("*") if p.is_file()}
    model = read_model(source)
    model.parameters["first_weight_0"].value = draw(6, 4)
    (weights,) = source.rglob("weight.bin")
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(Invalid, match="has changed since the package was read"):
        write_parameters(model, target)
    assert {p: p.read_bytes() for p in target.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.mlpackage", "b.mlpackage"]
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(Invalid, match="is a file"):
        write_parameters(model, tmp_path / "file")
    with pytest.raises(Invalid, match="was not read from a Core ML package"):
        write_parameters(Model(graph.Recording(), {}), target)


def test_through_bnns_graph(tmp_path: Path, layers: Path) -> None:
    """The page's example: a builder trains the constants of a package, which a context of the copy then has."""
    from retrograd.bnns import BNNSGraph

    models: list[Any] = []

    def train(builder: Any) -> Any:
        x = builder.argument(name="x", dataType=float, shape=[5, 4])
        target = builder.argument(name="target", dataType=float, shape=[5, 3])
        model = builder.model(layers)
        models.append(model)
        (y,) = model(x)
        error = y - target
        loss = (error * error).mean(axes=[0, 1], keepDimensions=False)
        builder.minimize(loss, parameters=model.parameters.values(), using=BNNSGraph.SGD(learningRate=0.01))
        return [loss]

    context = BNNSGraph.makeContext(train)
    x, target, loss, losses = draw(5, 4), draw(5, 3), np.zeros((), np.float32), []
    for _ in range(20):
        context.executeFunction(arguments=[loss, x, target])
        losses.append(float(loss))
    np.testing.assert_allclose(losses[0], np.mean((numpy_layers(x) - target) ** 2), rtol=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    models[0].write(to=tmp_path / "trained.mlpackage")
    again = BNNSGraph.Context(compileFromPath=str(tmp_path / "trained.mlpackage"))
    assert np.array_equal(again.parameters["first_weight_0"], context.parameters["first_weight_0"])
    y = np.zeros((5, 3), np.float32)
    again.executeFunction(arguments=[y, x])
    context.executeFunction(arguments=[loss, x, target])
    np.testing.assert_allclose(np.mean((y - target) ** 2), loss, rtol=1e-5)
    again.write(to=tmp_path / "copy.mlpackage")
    assert np.array_equal(
        read_model(tmp_path / "copy.mlpackage").parameters["first_weight_0"].value, again.parameters["first_weight_0"]
    )
