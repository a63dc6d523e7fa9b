"""Arrays of other libraries: taken without a copy, and tensors given back to callers with tensors."""

from __future__ import annotations

import array
import ctypes
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fuzz_arrays import GENERATORS, WRITTEN, same_numbers

import retrograd as rg
from support.fuzz_calls import Impossible, Maker, Memory, Parts, as_called
from support.waiting import PATIENCE

X = np.random.default_rng(0).normal(1, 2, size=(4, 6)).astype(np.float32)
GAMMA = np.random.default_rng(1).normal(size=6).astype(np.float32)
Y, CACHE = rg.layer_norm_forward(X, GAMMA)
GRADIENTS = rg.layer_norm_backward(X, CACHE)


class Exporter:
    """An array of a library that nobody knows, which only shares its memory through DLPack."""

    def __init__(self, values: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.values, self.device = values, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class OldExporter(Exporter):
    """With the first version of DLPack, which cannot say whether memory may be written to."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.values.__dlpack__()


def as_ctypes(values: Any) -> Any:
    return ctypes.cast(values.ctypes.data, ctypes.POINTER(ctypes.c_float * 6 * 4)).contents


# ---- tensors --------------------------------------------------------------------------------------------------------


RECURRENT = [f"{cell}_{function}" for cell in ("lstm", "gru", "rnn") for function in ("forward", "step")]
CACHES = (rg.NormCache, rg.LstmCache, rg.GruCache, rg.RnnCache, rg.ScanCache)


def as_tensors(torch: Any, value: Any) -> Any:
    """A tree with tensors in the place of arrays, where PyTorch has such tensors."""
    if isinstance(value, np.ndarray):
        if any(step < 0 or step % value.itemsize for step in value.strides) or not value.flags.writeable:
            return value
        if value.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(value)
    if type(value) in (list, Parts):
        return type(value)(as_tensors(torch, part) for part in value)
    if type(value) is dict:
        return {key: as_tensors(torch, part) for key, part in value.items()}
    if isinstance(value, tuple) and not isinstance(value, CACHES):
        return tuple.__new__(type(value), [as_tensors(torch, part) for part in value])
    return value


def leaves(value: Any) -> Iterator[Any]:
    """The arrays and tensors of a tree, caches left out."""
    if isinstance(value, (*CACHES, np.generic)):
        return
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    elif hasattr(value, "dtype"):
        yield value


def as_numpy(value: Any) -> Any:
    return value if isinstance(value, np.ndarray) else rg.ops._buffers.foreign_array(value)


def arguments_of(name: str, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    arguments: dict[str, Any] = GENERATORS[name](Maker(random, Memory(random)))
    return arguments


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_function_takes_tensors(torch: Any, name: str) -> None:
    """Valid calls, with arrays and with tensors in their place: the same bits, in arrays and in tensors."""
    function, taken = getattr(rg, name), 0
    for seed in range(12):
        try:
            arrays, copy = arguments_of(name, seed), arguments_of(name, seed)
        except Impossible:
            continue
        tensors = as_tensors(torch, copy)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves(tensors)):
            continue
        with np.errstate(all="ignore"):
            try:
                expected = function(**as_called(arrays))
            except (TypeError, ValueError) as refusal:
                with pytest.raises(type(refusal)):
                    function(**as_called(tensors))
                continue
            found = function(**as_called(tensors))
        taken += 1
        assert type(found) is type(expected) or isinstance(found, torch.Tensor)
        pairs = list(zip(leaves(found), leaves(expected), strict=True))
        given = [id(leaf) for leaf in leaves(tensors)]
        assert all(isinstance(ours, torch.Tensor) or id(ours) in given for ours, _ in pairs)
        written = (WRITTEN | {"cache"}) & set(arrays)
        if name in RECURRENT:
            written.discard("cache")  # the stamp of its pass is in it
        pairs += [pair for key in written for pair in zip(leaves(tensors[key]), leaves(arrays[key]), strict=True)]
        for ours, theirs in pairs:
            assert same_numbers(as_numpy(ours), theirs)
        before = arguments_of(name, seed)
        for key in WRITTEN & set(before):
            for ours, values in zip(leaves(tensors[key]), leaves(before[key]), strict=True):
                if isinstance(ours, torch.Tensor) and not same_numbers(as_numpy(ours), values):
                    assert ours._version > 0, f"{key} has changed, and autograd does not know"
    assert taken >= 2 or not any(True for _ in leaves(list(arguments_of(name, 0).values())))


def test_results_are_tensors_of_the_same_memory(torch: Any) -> None:
    x = torch.from_numpy(X.copy())
    y, cache = rg.layer_norm_forward(x, GAMMA, activation="relu")
    assert type(y) is torch.Tensor
    assert type(cache) is rg.NormCache
    assert cache.x.ctypes.data == x.data_ptr()
    assert cache.y is not None
    assert cache.y.ctypes.data == y.data_ptr()
    gradients = rg.layer_norm_backward(X, cache)  # no tensor among the arguments
    assert type(gradients.dx) is np.ndarray
    gradients = rg.layer_norm_backward(torch.from_numpy(X), cache, need=["dx"])
    assert type(gradients) is rg.NormGradients
    assert type(gradients.dx) is torch.Tensor
    assert gradients.dgamma is None
    assert not gradients.dx.requires_grad


def test_one_tensor_is_enough(torch: Any) -> None:
    for arguments in ((X, torch.from_numpy(GAMMA)), (torch.from_numpy(X), GAMMA)):
        y, _ = rg.layer_norm_forward(*arguments)
        assert type(y) is torch.Tensor
        assert same_numbers(y.numpy(), Y)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes_of_tensors(torch: Any, dtype: str) -> None:
    x = torch.from_numpy(X).to(getattr(torch, dtype))
    y, cache = rg.layer_norm_forward(x)
    assert y.dtype is x.dtype
    values = np.asarray(x.double().numpy(), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert same_numbers(as_numpy(y), rg.layer_norm_forward(values)[0])
    dx = rg.layer_norm_backward(x, cache).dx
    assert dx is not None
    assert dx.dtype is x.dtype


def test_memory_formats_are_kept(torch: Any) -> None:
    x = torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last)
    y, _ = rg.batch_norm_forward(x)
    assert y.stride() == x.stride()
    assert same_numbers(y.numpy(), rg.batch_norm_forward(x.numpy())[0])


def test_buffers_are_tensors(torch: Any) -> None:
    """What is written to is given back itself."""
    out, dx = torch.empty(4, 6), torch.empty(4, 6)
    y, cache = rg.layer_norm_forward(X, GAMMA, out=out)
    assert y is out
    assert same_numbers(out.numpy(), Y)
    gradients = rg.layer_norm_backward(X, cache, out={"dx": dx})
    assert gradients.dx is dx
    assert same_numbers(dx.numpy(), GRADIENTS.dx)  # type: ignore[arg-type]
    assert type(gradients.dgamma) is torch.Tensor
    x = torch.from_numpy(X.copy())
    assert rg.layer_norm_forward(x, GAMMA, out=x)[0] is x
    assert same_numbers(x.numpy(), Y)
    mean, var = torch.zeros(6), torch.ones(6)
    rg.batch_norm_forward(X, running_mean=mean, running_var=var)
    expected_mean, expected_var = np.zeros(6, np.float32), np.ones(6, np.float32)
    rg.batch_norm_forward(X, running_mean=expected_mean, running_var=expected_var)
    assert same_numbers(mean.numpy(), expected_mean)
    assert same_numbers(var.numpy(), expected_var)


def test_parameters_of_an_optimizer_are_tensors(torch: Any) -> None:
    parameters = [torch.ones(3), torch.ones(2)]
    rg.sgd_step(parameters, [torch.ones(3), torch.ones(2)], learning_rate=0.25)
    assert [parameter.tolist() for parameter in parameters] == [[0.75] * 3, [0.75] * 2]
    rg.sgd_step(parameters[0], torch.ones(3), learning_rate=0.25)
    assert parameters[0].tolist() == [0.5] * 3
    for lists in ((iter(parameters), [torch.ones(3), torch.ones(2)]), (parameters, iter([torch.ones(3)]))):
        with pytest.raises(TypeError, match=r"sgd_step: (parameters|gradients) is an iterator: pass a list"):
            rg.sgd_step(*lists, learning_rate=0.25)
    with pytest.raises(TypeError, match=r"sgd_step: parameters\[0\] must be an ndarray, not Tensor"):
        rg.sgd_step(iter(parameters), iter(parameters), learning_rate=0.25)
    assert parameters[0].tolist() == [0.5] * 3


def test_an_lstm_of_tensors(torch: Any) -> None:
    rng = np.random.default_rng(2)
    x, wx, wh, b = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 3, 4), (8, 4), (8, 2), (8,)))
    expected = rg.lstm_forward(x, rg.LstmWeights(wx, wh, b), lengths=[5, 1, 0])
    tensors = [torch.from_numpy(part) for part in (wx, wh, b)]
    for weights in (rg.LstmWeights(*tensors), tensors, [rg.LstmWeights(*tensors)]):
        result = rg.lstm_forward(torch.from_numpy(x), weights, lengths=torch.tensor([5, 1, 0]))
        assert type(result) is rg.LstmResult
        assert same_numbers(result.y.numpy(), expected.y)  # type: ignore[attr-defined]
        assert type(result.cache) is rg.LstmCache
        assert type(result.cache.gates().i) is np.ndarray
        gradients = rg.lstm_backward(result.y, result.cache)
        leaf = gradients.dweights if isinstance(gradients.dweights, rg.LstmWeights) else gradients.dweights[0]
        assert [type(part) for part in leaf[:4]] == [torch.Tensor] * 3 + [type(None)]


def refused_tensors(torch: Any) -> Iterator[tuple[Any, str]]:
    yield torch.ones(4, 6, requires_grad=True), r"requires grad, .* pass its detach\(\), or use retrograd.torch"
    yield torch.ones(4, 6, device="meta"), r"is on meta, must be on the CPU: pass its cpu\(\)"
    yield torch.eye(6).to_sparse(), "is of type Tensor, which gives no buffer: .*Sparse"
    yield torch.ones(4, 6, dtype=torch.complex64), "dtype complex64; it must be float32"


def test_refused_tensors(torch: Any) -> None:
    for tensor, message in refused_tensors(torch):
        with pytest.raises(TypeError, match="layer_norm_forward: x " + message.replace("dtype c", "has dtype c")):
            rg.layer_norm_forward(tensor)
    out = torch.ones(4, 6, requires_grad=True)
    with pytest.raises(TypeError, match="layer_norm_forward: out requires grad"):
        rg.layer_norm_forward(X, out=out)
    with pytest.raises(TypeError, match=r"lstm_forward: weights\.wh requires grad"):
        rg.lstm_forward(X[None], rg.LstmWeights(X, torch.ones(4, 1, requires_grad=True)))
    with pytest.raises(ValueError, match=r"layer_norm_forward: gamma has shape \(5,\), but x of shape \(4, 6\)"):
        rg.layer_norm_forward(torch.from_numpy(X), torch.ones(5))


def too_small(torch: Any, size: int = 0) -> Iterator[tuple[Any, int]]:
    """Tensors whose storage was resized to `size` bytes, and the bytes that they need."""

    def shrunk(tensor: Any) -> Any:
        tensor.untyped_storage().resize_(size)
        return tensor

    yield shrunk(torch.ones(4, 6)), 96
    yield shrunk(torch.ones(6, 6)[2:]), 144
    yield shrunk(torch.ones(4, 8)[:, :6]), 120
    yield shrunk(torch.ones(6, 4).t()), 96
    yield shrunk(torch.ones(6).expand(4, 6)), 24
    yield shrunk(torch.ones(4, 6, dtype=torch.bfloat16)), 48


@pytest.mark.parametrize("size", [0, 20])
def test_tensors_without_their_storage_are_refused(torch: Any, size: int) -> None:
    for tensor, needed in too_small(torch, size):
        message = f"layer_norm_forward: x has a storage of {size} bytes, expected at least {needed}"
        with pytest.raises(TypeError, match=message):
            rg.layer_norm_forward(tensor)
        tensor.untyped_storage().resize_(needed)  # is still possible
        tensor.fill_(1.0)
        assert not rg.layer_norm_forward(tensor)[0].any()
    tensors = (tensor for tensor, _ in too_small(torch, size))
    with pytest.raises(TypeError, match=f"layer_norm_forward: out has a storage of {size} bytes, expected at least 96"):
        rg.layer_norm_forward(X, out=next(tensors))
    with pytest.raises(TypeError, match=rf"sgd_step: parameters\[1\] has a storage of {size} bytes"):
        rg.sgd_step([torch.ones(3), next(tensors)], [torch.ones(3), torch.ones(4, 6)], learning_rate=0.1)
    with pytest.raises(
        TypeError, match=rf"lstm_forward: weights\.wx has a storage of {size} bytes, expected at least 120"
    ):
        rg.lstm_forward(torch.ones(1, 2, 6), rg.LstmWeights(next(tensors), torch.ones(4, 1)))
    for empty in (torch.ones(0, 6), torch.ones(4, 6)[:, :0], torch.ones(4, 6)[4:]):
        empty.untyped_storage().resize_(0)  # which needs no storage
        assert rg.activation_forward(empty, "relu").shape == empty.shape


def test_autograd_sees_what_a_function_writes(torch: Any) -> None:
    weight, out = torch.ones(4, 6, requires_grad=True), torch.ones(4, 6)
    product = weight * out  # saves out
    with pytest.raises(TypeError, match="gamma has"):
        rg.layer_norm_forward(torch.from_numpy(X), torch.ones(6, dtype=torch.int64), out=out)
    assert out._version == 0
    rg.layer_norm_forward(torch.from_numpy(X), torch.from_numpy(GAMMA), out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# ---- others ---------------------------------------------------------------------------------------------------------

OTHERS = {
    "memoryview": memoryview,
    "ctypes": as_ctypes,
    "DLPack": Exporter,
    "the first DLPack": OldExporter,
}


@pytest.mark.parametrize("kind", OTHERS)
def test_arrays_without_a_library_are_taken_without_a_copy(kind: str) -> None:
    x = X.copy()
    y, cache = rg.layer_norm_forward(OTHERS[kind](x), GAMMA)
    assert type(y) is np.ndarray
    assert same_numbers(y, Y)
    assert cache.x.ctypes.data == x.ctypes.data


def test_array_array() -> None:
    x = array.array("f", X[0])
    y, _ = rg.layer_norm_forward(x, array.array("f", GAMMA))
    assert same_numbers(y, Y[0])
    out = array.array("f", bytes(24))
    given, _ = rg.layer_norm_forward(x, GAMMA, out=out)
    assert given is out
    assert same_numbers(np.array(out, np.float32), Y[0])


@pytest.mark.parametrize("kind", ["memoryview", "ctypes", "DLPack"])
def test_buffers_without_a_library(kind: str) -> None:
    values = np.zeros((4, 6), np.float32)
    out = OTHERS[kind](values)
    y, _ = rg.layer_norm_forward(X, GAMMA, out=out)
    assert y is out
    assert same_numbers(values, Y)


def test_read_only_buffers_are_refused(jax: Any) -> None:
    values = np.zeros((4, 6), np.float32)
    for out in (memoryview(values).toreadonly(), OldExporter(values), jax.numpy.zeros((4, 6))):
        with pytest.raises(ValueError, match="layer_norm_forward: out is read-only"):
            rg.layer_norm_forward(X, out=out)
    assert not values.any()


def test_other_devices_are_refused() -> None:
    for arguments, name in (((Exporter(X, (2, 0)),), "x"), ((X, Exporter(GAMMA, (8, 0))), "gamma")):
        with pytest.raises(
            TypeError, match=f"layer_norm_forward: {name} is on a device of DLPack's type [28], must be"
        ):
            rg.layer_norm_forward(*arguments)

    class Broken(Exporter):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise RuntimeError("lost")

    with pytest.raises(TypeError, match="x is of type Broken, whose device is unknown: lost"):
        rg.layer_norm_forward(Broken(X))


def test_arrays_of_jax(jax: Any) -> None:
    """They are immutable, and need an alignment that results do not have: results are NumPy's."""
    x = jax.numpy.asarray(X)
    y, cache = rg.layer_norm_forward(x, jax.numpy.asarray(GAMMA))
    assert type(y) is np.ndarray
    assert same_numbers(y, Y)
    assert cache.x.ctypes.data == x.unsafe_buffer_pointer()
    dx = rg.layer_norm_backward(jax.numpy.asarray(X), cache).dx
    assert same_numbers(dx, GRADIENTS.dx)  # type: ignore[arg-type]
    half = rg.layer_norm_forward(x.astype(jax.numpy.bfloat16))[0]
    assert half.dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="layer_norm_forward: x is traced by JAX: inside jit, grad and vmap use"):
        jax.jit(lambda x: rg.layer_norm_forward(x)[0])(X)


def test_no_library_is_imported() -> None:
    code = """
import sys, array, numpy, retrograd
values = numpy.ones((2, 3), numpy.float32)
retrograd.layer_norm_forward(memoryview(values), array.array("f", [1, 2, 3]), out=memoryview(values.copy()))
assert not {"torch", "jax", "ml_dtypes"} & set(sys.modules), set(sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr
