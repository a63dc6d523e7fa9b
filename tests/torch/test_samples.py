"""PyTorch's own samples of these functions and layers (`torch.testing._internal`), forward and gradients.

Every sample is compared with PyTorch in float64, or its exclusion has a reason here. Run with -rP to see the counts.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import Counter
from typing import Any

import pytest

from support.torch_layers import assert_close, gradients_of, outgoing_of, outputs_of, rt, same_bits, torch

pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")

FUNCTIONS = ["batch_norm", "instance_norm", "layer_norm", "group_norm"]
LAYERS = [name for name in rt.__all__ if hasattr(torch.nn, name) and name not in ("SyncBatchNorm", "functional")]
RECURRENT = rt.recurrent.__all__
# PyTorch's other forms of the same functions, which return statistics too. The array functions have those.
NOT_OFFERED = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "native_layer_norm",
    "native_group_norm",
}
# Samples that are not compared, with the reason: each must be refused with this message.
AXES, EPS = "needs at least 2 axes", "eps is -0.5, must be"
EXCLUDED = {
    AXES: "an input with one axis has none for the channels",
    EPS: "with a negative eps a variance may have no square root",
}
EXCLUDED_COUNTS = {"batch_norm": {AXES: 2}, "group_norm": {EPS: 4}, "layer_norm": {EPS: 1}}
DTYPES = ["float32", "float64", "float16", "bfloat16"]


@functools.cache
def samples() -> tuple[list[Any], list[Any]]:
    """PyTorch's functions and layers with samples. Their import takes seconds: not for a process that only collects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    return op_db, module_db


def in_float64(value: Any) -> Any:
    """The same values in float64, for tensors in any structure."""
    if isinstance(value, torch.Tensor):
        return (
            value.detach().to(torch.float64).requires_grad_(value.requires_grad) if value.is_floating_point() else value
        )
    if isinstance(value, (tuple, list)):
        return type(value)(in_float64(part) for part in value)
    return {key: in_float64(part) for key, part in value.items()} if isinstance(value, dict) else value


def tensors_of(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def compare_calls(ours: Any, theirs: Any, arguments: Any, extra: tuple[list[Any], list[Any]] = ([], [])) -> None:
    """Call both with the same values; compare outputs, gradients, and inputs, which a call may update in place."""
    reference = in_float64(arguments)
    found, expected = (
        outputs_of(call(*args, **kwargs)) for call, (args, kwargs) in ((ours, arguments), (theirs, reference))
    )
    for y, z in zip(found, expected, strict=True):
        assert_close(y, z, "output")
    inputs, leaves = ([t for t in tensors_of(a) if t.requires_grad] for a in (arguments, reference))
    outgoing = outgoing_of(found)
    gradients = gradients_of(found, inputs + extra[0], outgoing)
    exact = gradients_of(expected, leaves + extra[1], [dy.to(torch.float64) for dy in outgoing])
    for a, b in zip(gradients, exact, strict=True):
        assert_close(a, b, "gradient")
    for a, b in zip(tensors_of(arguments), tensors_of(reference), strict=True):
        if a.is_floating_point():
            assert_close(a, b, "an input that is updated")


# ---- functions -------------------------------------------------------------------------------------------------------


def why_excluded(sample: Any, normalizes_channels: bool) -> str:
    if sample.input.dim() < 2 and normalizes_channels:
        return AXES
    numbers = [value for value in (*sample.args, sample.kwargs.get("eps")) if isinstance(value, float)]
    return EPS if any(value < 0 for value in numbers) else ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, dtype: str) -> None:
    function = getattr(rt.functional, name)
    excluded: Counter[str] = Counter()
    compared = 0
    (info,) = (info for info in samples()[0] if info.name == f"nn.functional.{name}" and not info.variant_test_name)
    for sample in info.sample_inputs("cpu", getattr(torch, dtype), requires_grad=True):
        reason = why_excluded(sample, name != "layer_norm")
        if reason:
            excluded[reason] += 1
            with pytest.raises(ValueError, match=f"^{name}: .*{reason}"):
                function(sample.input, *sample.args, **sample.kwargs)
        else:
            arguments = ((sample.input, *sample.args), sample.kwargs)
            compare_calls(function, getattr(torch.nn.functional, name), arguments)
            compared += 1
    reasons = "; ".join(f"{count}: {EXCLUDED[reason]}" for reason, count in excluded.items())
    print(f"{name} {dtype}: {compared} samples compared, {excluded.total()} excluded {reasons}")
    assert compared >= 5
    assert excluded == EXCLUDED_COUNTS.get(name, {})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_invalid_samples_are_refused(name: str) -> None:
    """Where PyTorch refuses a sample, so does retrograd, though with its own words."""
    count = 0
    for info in samples()[0]:
        if info.name in (f"nn.functional.{name}", f"native_{name}") and info.error_inputs_func is not None:
            for error in info.error_inputs("cpu"):
                sample = error.sample_input
                with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                    getattr(rt.functional, name)(sample.input, *sample.args, **sample.kwargs)
                count += 1
    print(f"{name}: {count} invalid samples refused")
    assert count == {"group_norm": 2, "layer_norm": 4}.get(name, 0)


def test_every_function_with_samples_is_known() -> None:
    kinds = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "lstm")
    names = {info.name for info in samples()[0] if info.name.endswith(kinds) or "batch_norm" in info.name}
    assert {name.removeprefix("nn.functional.") for name in names} == {*FUNCTIONS, *NOT_OFFERED}


# ---- layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, dtype: str, training: bool) -> None:
    if name in RECURRENT and dtype in ("float16", "bfloat16"):
        layers = [getattr(package, name)(2, 3, dtype=getattr(torch, dtype)) for package in (rt, torch.nn)]
        layers[0].load_state_dict(layers[1].state_dict())
        x = torch.randn(2, 2, dtype=getattr(torch, dtype))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*its weights are", RuntimeWarning)
            found, expected = (outputs_of(layer.train(training)(x)) for layer in layers)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        return
    (info,) = (info for info in samples()[1] if info.module_cls is getattr(torch.nn, name))
    compared = 0
    for sample in info.module_inputs_func(info, "cpu", getattr(torch, dtype), True, training):
        made, given = sample.constructor_input, sample.forward_input
        torch.manual_seed(0)
        theirs = info.module_cls(*made.args, **made.kwargs, dtype=getattr(torch, dtype)).train(training)
        # Where gates saturate, their slopes lose digits in float32, in PyTorch too, and an RNN or a projection has no
        # other path for the gradient.
        largest = 0.25 if name in RECURRENT and (name != "LSTM" or made.kwargs.get("proj_size")) else 1.0
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.uniform_(-largest, largest)
        ours = getattr(rt, name)(*made.args, **made.kwargs, dtype=getattr(torch, dtype)).train(training)
        ours.load_state_dict(theirs.state_dict())
        theirs = copy.deepcopy(theirs).double()
        parameters = list(ours.parameters()), list(theirs.parameters())
        compare_calls(ours, theirs, (tuple(given.args), given.kwargs), parameters)
        for (key, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            if a.is_floating_point():
                assert_close(a, b, key)
            else:
                assert torch.equal(a, b)
        compared += 1
    mode = "training" if training else "evaluation"
    print(f"{name} {dtype}, {mode}: {compared} samples compared")
    assert compared >= (2 if name.endswith("Cell") else 6)
