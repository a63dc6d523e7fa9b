"""BNNS multihead attention: values and gradients."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from support.arrays import assert_same_bits
from support.bnns import fails
from support.bnns_attention import (
    BACKWARD_STAGES,
    DHK,
    FORWARD_STAGES,
    INPUTS,
    ROW,
    Descriptor,
    Layer,
    Projection,
    Sizes,
    assert_close,
    assert_gradients,
    masks,
)
from support.torch_attention import torch_attention, torch_names


def checked(layer: Layer, masked: bool = False, added: str | None = None) -> None:
    """Forward and backward against the oracle, with a cache and without."""
    given, oracle = masks(layer.sizes, masked, added)
    cache = layer.run(**given)
    assert_close(layer.output.view, layer.expected(cache, **oracle), FORWARD_STAGES)
    expected = layer.expected_gradients(cache, **oracle)
    deltas = layer.deltas()
    assert layer.backward(deltas, cache, **given) == 0, bnns.last_error()
    assert_gradients(deltas, expected)
    again = layer.deltas()
    status = layer.backward(again, None, **given)
    if layer.dropout:
        fails(status, "there is no backprop_cache, which holds the mask of dropout")
    else:
        assert status == 0, bnns.last_error()
        assert_same_bits([one.view for one in again.values()], [one.view for one in deltas.values()])


@pytest.mark.parametrize("added", [None, "2", "3", "4", "2 boolean", "3 boolean", "4 boolean"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_every_combination_of_options(added: str | None, dropout: float) -> None:
    for bias, rows, zero, masked in itertools.product([False, True], repeat=4):
        layer = Layer(bias=bias, rows=rows, zero=zero, dropout=dropout, seed=5)
        checked(layer, masked, added)


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 1, 1, 1, 1, 1, 1, 1, 1),
        Sizes(1, 7, 2, 3, 3, 3, 1, 3, 3),
        Sizes(5, 1, 3, 2, 5, 1, 3, 1, 2),
        Sizes(3, 2, 1, 5, 2, 3, 5, 2, 1),
        Sizes(2, 13, 11, 3, 2, 5, 1, 7, 3),
    ],
)
def test_attentions_of_other_sizes(sizes: Sizes) -> None:
    checked(Layer(sizes, rows=True, zero=True), masked=True, added="4")
    checked(Layer(sizes, bias=False))


def test_one_token_as_measured() -> None:
    """Of one key there is no choice: the output is v Wv Wo, and no gradient reaches query and key."""
    values = {"query": 0.7, "key": -1.2, "value": 3.5, "wq": 5.0, "wk": 4.0, "wv": 2.0, "wo": 3.0}
    layer = Layer(Sizes(1, 1, 1, 1, 1, 1, 1, 1, 1), bias=False)
    for name, value in values.items():
        (layer.inputs | layer.parameters)[name].view[...] = value
    layer.dy.view[...] = 1
    cache = layer.run()
    assert layer.output.view.item() == 21
    deltas = layer.deltas()
    assert layer.backward(deltas, cache) == 0, bnns.last_error()
    found = {name: delta.view.item() for name, delta in deltas.items()}
    assert found == {"query": 0, "key": 0, "value": 6, "wq": 0, "wk": 0, "wv": 10.5, "wo": 7}


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("added", [None, "2", "4", "2 boolean"])
def test_attention_against_torch(rows: bool, zero: bool, added: str | None, torch: Any) -> None:
    """PyTorch in float64 on the same float32 values. Its heads all have the width d_model / heads."""
    sizes = Sizes(d_model=6, d_key=3, d_value=3)
    layer = Layer(sizes, rows=rows, zero=zero)
    given, oracle = masks(sizes, added != "4", added)
    inputs = tuple(layer.inputs[name].view for name in INPUTS)
    weights = {name: one.view for name, one in layer.parameters.items()}
    y, of_inputs, of_weights = torch_attention(torch, layer.dy.view, inputs, weights, sizes.heads, zero, **oracle)
    cache, deltas = layer.run(**given), layer.deltas()
    assert_close(layer.output.view, y, FORWARD_STAGES)
    assert layer.backward(deltas, cache, **given) == 0, bnns.last_error()
    for name, gradient in zip(INPUTS, of_inputs, strict=True):
        assert_close(deltas[name].view, gradient, BACKWARD_STAGES)
    ours = torch_names({name: deltas[name].view for name in weights})
    assert set(ours) == set(of_weights)
    for name, gradient in ours.items():
        assert_close(gradient, of_weights[name], BACKWARD_STAGES)


def test_products_of_many_keys_against_torch(torch: Any) -> None:
    """Sums of hundreds of terms, in blocks. Errors grow with their root, since roundings are independent."""
    sizes = Sizes(2, 67, 331, 96, 80, 72, 4, 24, 40)
    layer = Layer(sizes, bias=False)
    cache, deltas = layer.run(), layer.deltas()
    assert layer.backward(deltas, cache) == 0, bnns.last_error()
    tensors = {
        name: torch.tensor(one.view.astype(np.float64), requires_grad=True)
        for name, one in (layer.inputs | layer.parameters).items()
    }
    projected = [
        torch.einsum("nld,dkh->nhlk", tensors[name], tensors[f"w{letter}"])
        for name, letter in zip(INPUTS, "qkv", strict=True)
    ]
    heads = torch.nn.functional.scaled_dot_product_attention(*projected)
    y = heads.transpose(1, 2).reshape(2, 67, -1) @ tensors["wo"]
    y.backward(torch.tensor(layer.dy.view.astype(np.float64)))
    assert_close(layer.output.view, y.detach().numpy(), FORWARD_STAGES)
    for name, tensor in tensors.items():
        assert_close(deltas[name].view, tensor.grad.numpy(), BACKWARD_STAGES)


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_large_scores_do_not_overflow() -> None:
    """Scores of thousands, whose exponentials no float holds: one key takes it all."""
    layer = Layer(bias=False)
    for letter in "qk":
        layer.parameters[f"w{letter}"].view[...] *= 100
    layer.forward()
    expected = layer.expected()
    assert np.isfinite(layer.output.view).all()
    # Scores err by some 1e-7 of themselves, so by 1e-3 in an exponent.
    np.testing.assert_allclose(layer.output.view, expected, atol=5e-3 * np.abs(expected).max())


def test_a_row_without_keys_attends_to_nothing() -> None:
    """As in PyTorch's product attention: its heads are 0, its output is the bias, and it has no gradient."""
    layer = Layer()
    t, s = layer.sizes.targets, layer.sizes.sources
    allowed = np.zeros((t, s), np.bool_)
    allowed[1] = True  # the middle row attends to nothing
    boolean = {"added": Descriptor.from_array(allowed, bnns.BNNSDataLayout2DFirstMajor)}
    infinite = np.where(allowed, -np.inf, 0).astype(np.float32)
    added = {"added": Descriptor.from_array(infinite, bnns.BNNSDataLayout2DFirstMajor)}
    for given in (boolean, added):
        cache, deltas = layer.run(**given), layer.deltas()
        np.testing.assert_array_equal(layer.output.view[:, 1], np.broadcast_to(layer.parameters["bo"].view, (2, 7)))
        assert_close(layer.output.view, layer.expected(added=allowed), FORWARD_STAGES)
        for kept in (cache, None):
            assert layer.backward(deltas, kept, **given) == 0, bnns.last_error()
            assert not deltas["query"].view[:, 1].any()
            assert_gradients(deltas, layer.expected_gradients(added=allowed))
    # A sample whose keys are all ignored.
    ignored = np.zeros((2, s), np.bool_)
    ignored[0] = True
    given = {"key_mask": Descriptor(layout=bnns.BNNSDataLayoutVector, size=s, data=ignored, data_type=0x100008)}
    cache = layer.run(**given)
    np.testing.assert_array_equal(layer.output.view[0], np.broadcast_to(layer.parameters["bo"].view, (t, 7)))
    assert layer.backward(deltas, cache, **given) == 0, bnns.last_error()
    for name in INPUTS:
        assert not deltas[name].view[0].any()
        assert deltas[name].view[1].any()
    # With a key of zeros there is always one to attend to.
    layer = Layer(zero=True, bias=False)
    layer.run(**given)
    assert not layer.output.view[0].any()
    assert_close(layer.output.view, layer.expected(ignored=ignored), FORWARD_STAGES)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_ignored_keys_may_hold_anything(strange: float) -> None:
    given, oracle = masks(Sizes(), True, "2")
    layer = Layer(rows=True)
    ignored = oracle["ignored"]
    for name in ("key", "value"):
        layer.inputs[name].view[ignored] = 0
    cache, expected = layer.run(**given), layer.deltas()
    y = layer.output.view.copy()
    assert layer.backward(expected, cache, **given) == 0
    for name in ("key", "value"):
        layer.inputs[name].view[ignored] = strange
    cache = layer.run(**given)
    np.testing.assert_array_equal(layer.output.view, y)
    for kept in (cache, None):
        deltas = layer.deltas()
        assert layer.backward(deltas, kept, **given) == 0, bnns.last_error()
        for name, delta in deltas.items():
            np.testing.assert_array_equal(delta.view, expected[name].view)
    assert not deltas["key"].view[ignored].any()


def test_nan_travels_through_an_attention() -> None:
    layer = Layer()
    layer.inputs["query"].view[0, 1, 2] = np.nan
    layer.forward()
    nan = np.isnan(layer.output.view)
    assert nan[0, 1].all()
    assert nan.sum() == layer.sizes.d_model
    layer.inputs["query"].view[0, 1, 2] = 0
    layer.inputs["value"].view[1, 3, 0] = np.nan
    layer.forward()
    assert np.isnan(layer.output.view[1]).all()
    assert np.isfinite(layer.output.view[0]).all()


def test_any_byte_that_is_not_zero_is_true() -> None:
    layer = Layer()
    given, oracle = masks(layer.sizes, True, "3 boolean")
    layer.run(**given)
    y = layer.output.view.copy()
    for descriptor in given.values():
        memory = np.ascontiguousarray(descriptor.data).view(np.uint8)
        descriptor.data = bytearray((memory * 200).tobytes())
    layer.run(**given)
    np.testing.assert_array_equal(layer.output.view, y)
    assert oracle["ignored"].any()


def test_batches_of_masks() -> None:
    """A mask for each sample, with gaps between them."""
    layer = Layer()
    _, oracle = masks(layer.sizes, True, None)
    memory = np.ones((layer.sizes.batch, 9), np.bool_)
    memory[:, : layer.sizes.sources] = oracle["ignored"]
    mask = Descriptor(layout=bnns.BNNSDataLayoutVector, size=layer.sizes.sources, data=memory, data_type=0x100008)
    assert layer.forward(key_mask=mask, key_mask_stride=9) == 0, bnns.last_error()
    assert_close(layer.output.view, layer.expected(**oracle), FORWARD_STAGES)
    deltas = layer.deltas()
    assert layer.backward(deltas, key_mask=mask, key_mask_stride=9) == 0, bnns.last_error()
    assert_close(deltas["key"].view, layer.expected_gradients(**oracle)["key"], BACKWARD_STAGES)


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_repeats_by_its_seed() -> None:
    def outputs(seed: int) -> list[Any]:
        layer = Layer(dropout=0.5, seed=seed)
        found = []
        for _ in range(3):
            assert layer.forward() == 0, bnns.last_error()
            found.append(layer.output.view.copy())
        return found

    first, again, other = outputs(3), outputs(3), outputs(4)
    np.testing.assert_array_equal(first, again)
    for a, b in itertools.combinations([*first, *other], 2):
        assert not np.array_equal(a, b)  # each call draws a new mask
    unseeded = [*outputs(0), *outputs(0)]
    for a, b in itertools.combinations(unseeded, 2):
        assert not np.array_equal(a, b)


def test_backward_uses_the_mask_in_its_cache() -> None:
    """Whatever passes come between."""
    layer = Layer(dropout=0.3, seed=7, rows=True, zero=True)
    caches = [layer.run() for _ in range(3)]
    for cache in (caches[1], caches[0], caches[2], caches[1]):
        deltas = layer.deltas()
        assert layer.backward(deltas, cache) == 0, bnns.last_error()
        assert_gradients(deltas, layer.expected_gradients(cache))


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, -0.5, np.nan, np.inf])
def test_there_is_no_dropout_outside_of_0_and_1(rate: float) -> None:
    plain, layer = Layer(), Layer(dropout=rate, seed=3)
    plain.forward()
    layer.forward()
    np.testing.assert_array_equal(layer.output.view, plain.output.view)
    assert layer.backward(layer.deltas()) == 0


def test_dropout_has_its_share() -> None:
    """Of equal values, each head's result is their share that is kept, scaled back: 1 on average."""
    sizes = Sizes(8, 32, 64, 1, 1, 1, 1, 1, 1)
    layer = Layer(sizes, bias=False, dropout=0.25, seed=11)
    for name in ("query", "key", "value"):
        layer.inputs[name].view[...] = 1
    for name in ("wq", "wk", "wv", "wo"):
        layer.parameters[name].view[...] = 1
    layer.forward()
    y = layer.output.view
    kept = y * 64 * 0.75
    np.testing.assert_allclose(kept, np.rint(kept), atol=1e-3)  # a whole number of keys
    # The mean of 8 * 32 * 64 decisions, within four of its standard deviations.
    assert abs(y.mean() - 1) < 4 * np.sqrt(0.25 / 0.75 / y.size / 64)


# ---- training --------------------------------------------------------------------------------------------------------


def test_an_attention_learns() -> None:
    """Which key has the largest first feature decides the output: Adam on all parameters, in their own layouts."""
    rng = np.random.default_rng(0)
    sizes = Sizes(8, 1, 5, 2, 2, 2, 1, 3, 3)
    layer = Layer(sizes, draw=3)
    parameters = {name: one.descriptor for name, one in layer.parameters.items()}
    deltas = {name: one for name, one in layer.deltas().items() if name in parameters}
    states = []
    for like in (*parameters.values(), *parameters.values()):
        states.append(like.copy())
        states[-1].data = np.zeros_like(like.data)
    fields = bnns.BNNSOptimizerAdamFields(
        learning_rate=0.05, beta1=0.9, beta2=0.999, time_step=1, epsilon=1e-8, gradient_scale=1
    )
    layer.inputs["query"].view[...] = 1
    losses = []
    for _ in range(100):
        x = rng.normal(size=(8, 5, 2)).astype(np.float32)
        layer.inputs["key"].view[...] = layer.inputs["value"].view[...] = x
        target = x[np.arange(8), x[:, :, 0].argmax(axis=1)][:, None]
        cache = layer.run()
        error = layer.output.view - target
        losses.append(float((error**2).mean()))
        layer.dy.view[...] = 2 * error / error.size
        assert layer.backward(deltas, cache) == 0, bnns.last_error()
        gradients = [deltas[name].descriptor for name in parameters]
        status = bnns.BNNSOptimizerStep(
            bnns.BNNSOptimizerFunctionAdam,
            fields,
            len(parameters),
            list(parameters.values()),
            gradients,
            states,
            None,
        )
        assert status == 0, bnns.last_error()
        fields.time_step += 1
    assert np.mean(losses[-20:]) < 0.25 * np.mean(losses[:5])


def test_the_general_functions_fail_on_an_attention_filter() -> None:
    layer = Layer()
    x, y = layer.inputs["query"].memory, layer.output.memory
    before = y.copy()
    delta = Descriptor.from_array(layer.dy.memory)
    for status in (
        bnns.BNNSFilterApply(layer.filter, x, y),
        bnns.BNNSFilterApplyBatch(layer.filter, 1, x, 0, y, 0),
        bnns.BNNSFilterApplyTwoInput(layer.filter, x, x, y),
        bnns.BNNSFilterApplyTwoInputBatch(layer.filter, 1, x, 0, x, 0, y, 0),
        bnns.BNNSFilterApplyBackwardBatch(layer.filter, 1, x, 0, delta, 0, y, 0, delta, 0, None, None),
    ):
        assert status == -1
    assert "BNNSApplyMultiheadAttentionBackward" in (bnns.last_error() or "")
    np.testing.assert_array_equal(y, before)
    other = bnns.BNNSFilterCreateLayerActivation(
        bnns.BNNSLayerParametersActivation(Descriptor.from_array(x), Descriptor.from_array(x))
    )
    layer.filter = other
    fails(layer.forward(), "not a multihead attention filter")
    assert layer.backward(layer.deltas()) == -1
    assert bnns.BNNSGetPointer(other, 0).data is not None
    assert bnns.BNNSGetPointer(Layer().filter, 0).data is None


def test_memory_of_attention_weights() -> None:
    """MHA_DHK has d fastest, then the heads, then k, and lists d, k and heads."""
    layer = Layer(Sizes(1, 1, 1, 2, 2, 2, 3, 5, 5))
    weights = layer.structure.query.weights
    assert (weights.layout, weights.size) == (DHK, (2, 5, 3))
    memory = weights.data
    for d, k, head in itertools.product(range(2), range(5), range(3)):
        assert memory[d + 2 * head + 6 * k] == layer.parameters["wq"].view[d, k, head]
    assert layer.structure.query.target_desc.layout == ROW
    assert isinstance(layer.structure.query, Projection)
