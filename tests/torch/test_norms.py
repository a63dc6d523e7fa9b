"""The normalization layers against PyTorch's."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

import retrograd as rg
from support.torch_layers import assert_close, compare, exact, gradients_of, rt, same_bits, torch

# Name, arguments and the shape of an input.
LAYERS: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ("BatchNorm1d", (6,), {}, (8, 6)),
    ("BatchNorm1d", (6,), {"momentum": 0.3, "eps": 1e-3}, (4, 6, 5)),
    ("BatchNorm1d", (6,), {"affine": False}, (4, 6, 5)),
    ("BatchNorm2d", (6,), {"bias": False}, (3, 6, 5, 4)),
    ("BatchNorm2d", (6,), {"momentum": None}, (3, 6, 5, 4)),
    ("BatchNorm2d", (6,), {"track_running_stats": False}, (3, 6, 5, 4)),
    ("BatchNorm3d", (6,), {}, (2, 6, 3, 4, 5)),
    ("InstanceNorm1d", (6,), {}, (4, 6, 5)),
    ("InstanceNorm1d", (6,), {"affine": True}, (6, 5)),
    ("InstanceNorm2d", (6,), {"affine": True, "track_running_stats": True}, (3, 6, 5, 4)),
    ("InstanceNorm3d", (6,), {"affine": True, "momentum": 0.3}, (2, 6, 3, 4, 5)),
    ("LayerNorm", (7,), {}, (5, 7)),
    ("LayerNorm", (7,), {}, (7,)),
    ("LayerNorm", ((4, 7),), {"eps": 1e-3}, (5, 4, 7)),
    ("LayerNorm", (7,), {"bias": False}, (5, 4, 7)),
    ("LayerNorm", (7,), {"elementwise_affine": False}, (5, 4, 7)),
    ("GroupNorm", (3, 6), {}, (4, 6, 5)),
    ("GroupNorm", (2, 6), {"affine": False}, (4, 6, 5, 3)),
    ("GroupNorm", (2, 6), {}, (4, 6)),
    ("GroupNorm", (6, 6), {}, (4, 6)),  # one value per group: the bias
    ("GroupNorm", (6, 6), {}, (2, 6, 1, 1)),
]
CASES = [pytest.param(*case, id="-".join(map(str, (case[0], *case[1], *case[2]))) + f"-{case[3]}") for case in LAYERS]


def pair(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """retrograd's layer and PyTorch's, with the same parameters, which are not the initial ones."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(*arguments, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    ours = getattr(rt, name)(*arguments, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize(("name", "arguments", "options", "shape"), CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values_gradients_and_buffers(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], shape: tuple[int, ...], dtype: str
) -> None:
    """In training, twice, because running statistics change; then in evaluation."""
    ours, theirs = pair(name, arguments, options)
    theirs = exact(theirs)
    if dtype == "float64":
        ours = ours.double()
    for _ in range(2):
        compare(ours, theirs, [(torch.randn(shape) + 0.5).to(getattr(torch, dtype))])
    compare(ours.eval(), theirs.eval(), [torch.randn(shape).to(getattr(torch, dtype))])


@pytest.mark.parametrize(("name", "arguments", "options", "shape"), CASES)
def test_attributes_and_state_dicts(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    ours, theirs = pair(name, arguments, options)
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for attribute in theirs.__constants__:
        assert getattr(ours, attribute) == getattr(theirs, attribute)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_parameters_in_half_precision(kind: str) -> None:
    """A model in half precision: parameters and running statistics too. They are computed in float32."""
    dtype = getattr(torch, kind)
    ours, theirs = pair("BatchNorm2d", (6,), {})
    ours, theirs = ours.to(dtype), exact(theirs.to(dtype))
    compare(ours, theirs, [torch.randn(3, 6, 5, 4).to(dtype)])
    assert ours.running_mean.dtype is ours.weight.dtype is dtype


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (rg.Activation("relu"), torch.relu),
        (rg.Activation("leaky_relu", alpha=0.2), lambda z: torch.nn.functional.leaky_relu(z, 0.2)),
        (rg.Activation("silu"), torch.nn.functional.silu),
        (rg.Activation("tanh"), torch.tanh),
    ],
)
@pytest.mark.parametrize(
    ("name", "arguments"), [("BatchNorm1d", (6,)), ("InstanceNorm1d", (6,)), ("GroupNorm", (3, 6)), ("LayerNorm", (5,))]
)
def test_activation(name: str, arguments: tuple[int, ...], activation: rg.Activation, function: Any) -> None:
    ours = getattr(rt, name)(*arguments, activation=activation).double()
    theirs = getattr(torch.nn, name)(*arguments).double()
    x = torch.randn(4, 6, 5, dtype=torch.float64)
    compare(ours, theirs, [x], lambda layer, x: layer(x) if layer is ours else function(layer(x)))
    assert f"activation={activation!r}" in repr(ours)


def test_activations_by_name() -> None:
    assert rt.LayerNorm(5, activation="relu").activation == rg.Activation("relu")
    with pytest.raises(ValueError, match="activation 'rule' is unknown"):
        rt.LayerNorm(5, activation="rule")


LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3),
    "every other column": lambda x: torch.cat((x, x), -1)[..., ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "reversed axes": lambda x: x.permute(3, 1, 2, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["BatchNorm2d", "GroupNorm", "InstanceNorm2d", "LayerNorm"])
def test_memory_layouts(layout: str, name: str) -> None:
    """Results do not depend on the memory layout, and have that of PyTorch's, so that `view` works after them."""
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(4, 6, 5, 5))
    arguments = {"GroupNorm": (3, 6), "LayerNorm": (x.shape[-1],)}.get(name, (6,))
    ours = getattr(rt, name)(*arguments)
    plain, strided = x.contiguous().requires_grad_(), x.detach().requires_grad_()
    again = copy.deepcopy(ours)
    y, z = ours(plain), again(strided)
    assert_close(z, y)
    expanded = torch.randn(1, *y.shape[1:]).expand(y.shape)
    for dy in (torch.randn(y.shape), LAYOUTS["channels last"](torch.randn(y.shape)), expanded):
        expected = torch.autograd.grad(y, (plain, *ours.parameters()), dy, retain_graph=True)
        found = torch.autograd.grad(z, (strided, *again.parameters()), dy, retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)
    theirs = getattr(torch.nn, name)(*arguments)(strided)
    assert z.stride() == theirs.stride()
    assert found[0].stride() == torch.autograd.grad(theirs, strided, expanded)[0].stride()


def test_strided_parameters() -> None:
    """Also in backward, which reads them again."""
    torch.manual_seed(0)
    strided, plain = rt.LayerNorm(6, activation="silu"), rt.LayerNorm(6, activation="silu")
    for name in ("weight", "bias"):
        values = torch.randn(12)[::2]
        setattr(strided, name, torch.nn.Parameter(values))
        setattr(plain, name, torch.nn.Parameter(values.clone()))
    assert not strided.weight.is_contiguous()
    x, dy = torch.randn(2, 5, 6)
    x.requires_grad_()
    mine, expected = (gradients_of([layer(x)], [x, *layer.parameters()], [dy]) for layer in (strided, plain))
    assert all(same_bits(a, b) for a, b in zip(mine, expected, strict=True))


def test_large_results_keep_the_memory_format() -> None:
    """Large results reuse memory, in any layout; a kept one is never overwritten."""
    for layout in ("channels last", "transposed"):
        x = LAYOUTS[layout](torch.randn(8, 64, 32, 32)).requires_grad_()
        norm = rt.BatchNorm2d(64)
        expected = torch.nn.functional.batch_norm(x, None, None, training=True)
        kept = [norm(x) for _ in range(3)]
        assert all(y.stride() == expected.stride() for y in kept)
        first = [same_bits(y, kept[0]) for y in kept]
        assert first == [True] * 3
        assert len({y.data_ptr() for y in kept}) == 3
        assert_close(kept[2], expected)
        assert torch.autograd.grad(kept[0].sum(), x)[0].stride() == expected.stride()


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("BatchNorm1d", (6,), (0, 6, 5)),
        ("BatchNorm2d", (6,), (4, 6, 0, 3)),
        ("InstanceNorm2d", (6,), (0, 6, 4, 5)),
        ("GroupNorm", (3, 6), (0, 6, 5)),
        ("LayerNorm", (6,), (0, 6)),
    ],
)
def test_no_elements(name: str, arguments: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    layer = getattr(rt, name)(*arguments)
    x = torch.randn(shape, requires_grad=True)
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    y = layer(x)
    assert y.shape == shape
    for gradient, like in zip(gradients_of([y], [x, *layer.parameters()]), [x, *layer.parameters()], strict=True):
        assert gradient.shape == like.shape
        assert not gradient.any()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key] + (key == "num_batches_tracked"))


def test_one_value_per_set_is_refused_where_pytorch_refuses_it() -> None:
    needs = "training needs more than 1"
    for layer, shape, message in (
        (rt.BatchNorm1d(6), (1, 6), rf"^batch_norm: {needs} value per channel, input has shape \(1, 6\)"),
        (rt.InstanceNorm1d(6), (2, 6, 1), rf"^instance_norm: {needs} position per channel, .*\(2, 6, 1\)"),
        (rt.BatchNorm2d(6, track_running_stats=False).eval(), (1, 6, 1, 1), rf"^batch_norm: {needs} value per channel"),
        (rt.InstanceNorm2d(6).eval(), (2, 6, 1, 1), rf"^instance_norm: {needs} position per channel"),
        (rt.GroupNorm(6, 6), (1, 6), r"^group_norm: 1 sample needs more than 1 value per group, .*\(1, 6\) and num_gr"),
        (rt.GroupNorm(6, 6).eval(), (1, 6, 1), "^group_norm: 1 sample needs more than 1 value per group"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(shape))
        theirs = getattr(torch.nn, type(layer).__name__)
        options = {"track_running_stats": False} if "BatchNorm2d" in str(theirs) else {}
        arguments = (6, 6) if theirs is torch.nn.GroupNorm else (6,)
        with pytest.raises(ValueError, match="Expected more than 1"):  # as here
            theirs(*arguments, **options).train(layer.training)(torch.randn(shape))
    assert rt.BatchNorm1d(6).eval()(torch.randn(1, 6)).shape == (1, 6)


F = rt.functional
X, ONES, ZEROS = torch.randn(3, 4), torch.ones(4), torch.zeros(4)
REFUSALS = {
    "batch_norm: running_mean has shape (4,), expected (5,) for an input of shape (3, 5)": lambda: rt.BatchNorm1d(4)(
        torch.randn(3, 5)
    ),
    "expected 4D input": lambda: rt.BatchNorm2d(4)(X),
    "layer_norm: normalized_shape is (5,), but input has shape (3, 4)": lambda: rt.LayerNorm(5)(X),
    "layer_norm: normalized_shape is (4,), but input has shape ()": lambda: rt.LayerNorm(4)(X[0, 0]),
    "layer_norm: normalized_shape is (), but input has shape (3, 4)": lambda: F.layer_norm(X, ()),
    "group_norm: input has shape (), needs at least 2 axes": lambda: F.group_norm(X[0, 0], 1),
    "group_norm: num_groups is 3, which does not divide the 4 channels of input": lambda: F.group_norm(X, 3),
    "batch_norm: running_mean is None; give both": lambda: F.batch_norm(X, None, None),
    "batch_norm: running_var is None; give both": lambda: F.batch_norm(X, ZEROS, None, training=True),
    "batch_norm: weight has shape (3,), expected (4,)": lambda: F.batch_norm(X, None, None, ONES[:3], None, True),
    "batch_norm: weight has dtype torch.float64, but input has torch.float32": lambda: F.batch_norm(
        X, None, None, ONES.double(), None, True
    ),
    "batch_norm: running_mean has dtype torch.int64": lambda: F.batch_norm(X, ZEROS.long(), ONES),
    "layer_norm: input has dtype torch.int32, must be float32": lambda: F.layer_norm(X.int(), (4,)),
    "layer_norm: input has dtype torch.complex64, must be float32": lambda: F.layer_norm(X.cfloat(), (4,)),
    "InstanceNorm1d: input has 3 channels, but num_features is 5": lambda: rt.InstanceNorm1d(5, affine=True)(X),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals(message: str) -> None:
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        REFUSALS[message]()


def test_instance_norm_of_another_number_of_channels_warns() -> None:
    with pytest.warns(UserWarning, match="InstanceNorm1d: input has 3 channels, but num_features is 5"):
        y = rt.InstanceNorm1d(5)(X)
    assert_close(y, torch.nn.functional.instance_norm(X[None])[0])


def test_nothing_changes_when_a_call_is_refused() -> None:
    norm = rt.BatchNorm1d(4)
    norm.weight = torch.nn.Parameter(torch.ones(4).double())
    before = copy.deepcopy(norm.state_dict())
    with pytest.raises(TypeError, match="weight has dtype"):
        norm(torch.randn(3, 4))
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_view_with_the_opposite_sign() -> None:
    """Such as the imaginary part of a conjugate, whose memory holds the negated values."""
    x = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    assert same_bits(rt.LayerNorm(4)(x), rt.LayerNorm(4)(x.clone()))


def test_other_devices_are_refused() -> None:
    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    x = torch.randn(3, 4).as_subclass(Elsewhere)
    with pytest.raises(ValueError, match="layer_norm: input is on cuda:0, but retrograd computes on the CPU"):
        rt.LayerNorm(4)(x)
    meta = rt.LSTM(4, 5, device="meta")
    assert meta(torch.empty(3, 2, 4, device="meta"))[0].device.type == "meta"
    assert rt.BatchNorm1d(4, device="meta")(torch.empty(3, 4, device="meta")).shape == (3, 4)
