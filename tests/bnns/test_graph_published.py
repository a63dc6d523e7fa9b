"""Programs that are published for BNNSGraph's builder: Apple's examples, and an encoder of sentences as BERT is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrograd.bnns import BNNSGraph, BNNSTensor
from support.bnns_graph import Array, executed

torch = pytest.importorskip("torch")
F = torch.nn.functional
Builder = BNNSGraph.Builder
FLOAT = np.float32


# ---- Apple's examples, with the results that their pages print ------------------------------------------------------


def test_a_product_and_its_mean() -> None:
    def build(builder: Any) -> Any:
        x = builder.argument(name="x", dataType=float, shape=[8])
        y = builder.argument(name="y", dataType=float, shape=[8])
        product = x * y
        return [product, product.mean(axes=[0], keepDimensions=True)]

    context = BNNSGraph.makeContext(build)
    assert context.argumentNames()[2:] == ["x", "y"]
    product = context.allocateTensor(argument=0)
    mean = context.allocateTensor(argument=1)
    x = BNNSTensor.allocate(initializingFrom=np.arange(1, 9, dtype=FLOAT))
    y = BNNSTensor.allocate(initializingFrom=np.arange(8, 0, -1, dtype=FLOAT))
    context.executeFunction(arguments=[product, mean, x, y])
    assert list(product.makeArray(of=FLOAT)) == [8, 14, 18, 20, 20, 18, 14, 8]
    assert list(mean.makeArray(of=FLOAT)) == [15]


def test_select_with_a_tensor_and_a_tensor_times_ten() -> None:
    z = np.array([True, True, False, False] * 2)
    (found,) = executed(lambda builder, z, x: z.select(x, x * 10), [z, np.arange(1, 9, dtype=FLOAT)])
    assert found.tolist() == [1, 2, 30, 40, 5, 6, 70, 80]


# ---- the snippets of Apple's session, against PyTorch ---------------------------------------------------------------


def test_preprocessing_of_an_image() -> None:
    """Thresholding by the mean: a comparison is cast to a number."""
    image = np.random.default_rng(0).random((6, 5), dtype=FLOAT)

    def block(builder: Any, x: Any) -> Any:
        mean = x.mean(axes=[0, 1], keepDimensions=True)
        return (x > mean).cast(to=np.float32)

    (found,) = executed(block, [image])
    t = torch.tensor(image)
    np.testing.assert_array_equal(found, (t > t.mean()).float().numpy())


def test_postprocessing_of_probabilities() -> None:
    scores = np.random.default_rng(1).standard_normal((3, 9)).astype(FLOAT)
    values, indices = executed(
        lambda builder, x: list(x.softmax(axis=1).topK(3, axis=1, findLargest=True)), [scores]
    )  # fmt: skip
    wanted = torch.tensor(scores).softmax(1).topk(3, 1)
    np.testing.assert_allclose(values, wanted.values.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(indices, wanted.indices.numpy())
    assert indices.dtype == np.int32


def test_a_bit_crusher_with_a_mix() -> None:
    """An audio effect: tanh saturates, pow gives the number of levels, round quantizes, constants mix dry and wet."""
    samples = np.sin(np.arange(64) / 3, dtype=FLOAT) * 1.5

    def block(builder: Any, source: Any, bits: Any, wet: Any) -> Any:
        levels = builder.constant(value=2.0).pow(y=bits - 1.0)
        crushed = (source.tanh() * levels).round() / levels
        return crushed * wet + source * (1.0 - wet)

    bits, wet = np.array([3], FLOAT), np.array([0.75], FLOAT)
    (found,) = executed(block, [samples, bits, wet])
    t = torch.tensor(samples)
    np.testing.assert_allclose(found, (torch.tanh(t) * 4).round() / 4 * 0.75 + t * 0.25, rtol=1e-6, atol=1e-6)


def test_slices_of_an_image() -> None:
    image = np.arange(2 * 6 * 8 * 3, dtype=FLOAT).reshape(2, 6, 8, 3)
    whole = Builder.SliceRange.fillAll

    def block(builder: Any, x: Any) -> Any:
        inner = x[whole, Builder.SliceRange(startIndex=1, endIndex=-1), 2:6, 0]
        copy = x.copy()
        copy[0, whole, whole, 1] = 0
        return [inner, copy]

    inner, copy = executed(block, [image])
    np.testing.assert_array_equal(inner, image[:, 1:-1, 2:6, 0])
    wanted = image.copy()
    wanted[0, :, :, 1] = 0
    np.testing.assert_array_equal(copy, wanted)


# ---- an encoder of sentences ----------------------------------------------------------------------------------------

VOCABULARY, LONGEST, WIDTH, HEADS, INNER, LAYERS, EPS = 30, 12, 8, 2, 16, 2, 1e-12


def encoder_weights() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    shapes = {"words": (VOCABULARY, WIDTH), "positions": (LONGEST, WIDTH), "norm.w": (WIDTH,), "norm.b": (WIDTH,)}
    for layer in range(LAYERS):
        for name in ("q", "k", "v", "out"):
            shapes |= {f"{layer}.{name}.w": (WIDTH, WIDTH), f"{layer}.{name}.b": (WIDTH,)}
        shapes |= {f"{layer}.up.w": (INNER, WIDTH), f"{layer}.up.b": (INNER,)}
        shapes |= {f"{layer}.down.w": (WIDTH, INNER), f"{layer}.down.b": (WIDTH,)}
        shapes |= {f"{layer}.{name}": (WIDTH,) for name in ("norm1.w", "norm1.b", "norm2.w", "norm2.b")}
    return {name: (rng.standard_normal(shape) * 0.4).astype(FLOAT) for name, shape in shapes.items()}


def encoder(builder: Any, w: dict[str, Array]) -> Any:
    """Tokens (S) and their mask (S) to a unit vector: one flexible axis, as in the public program."""
    ids = builder.argument(name="ids", dataType=np.int32, shape=[-1])
    mask = builder.argument(name="mask", dataType=np.float32, shape=[-1, 1])
    places = builder.argument(name="places", dataType=np.int32, shape=[-1])
    c = {name: builder.constant(name=name, values=value) for name, value in w.items()}

    def normalized(x: Any, name: str) -> Any:
        return x.layerNorm(weight=c[f"{name}.w"], bias=c[f"{name}.b"], axes=[-1], epsilon=EPS)

    def projected(x: Any, name: str) -> Any:
        return x.linear(weight=c[f"{name}.w"], bias=c[f"{name}.b"])

    x = c["words"].gather(indices=ids, axis=0) + c["positions"].gather(indices=places, axis=0)
    x = normalized(x, "norm")
    hidden = (1.0 - mask).transpose(axes=[1, 0]) * -1e9
    size = WIDTH // HEADS
    for layer in range(LAYERS):
        q, k, v = (projected(x, f"{layer}.{name}") for name in "qkv")
        heads = []
        for head in range(HEADS):
            part = Builder.SliceRange(startIndex=head * size, endIndex=(head + 1) * size)
            qh, kh, vh = (t[Builder.SliceRange.fillAll, part] for t in (q, k, v))
            scores = qh.matmul(other=kh, transposeOther=True) * size**-0.5 + hidden
            heads.append(scores.softmax(axis=-1).matmul(other=vh))
        attended = projected(builder.concatenate(heads, axis=1), f"{layer}.out")
        x = normalized(x + attended, f"{layer}.norm1")
        inner = projected(x, f"{layer}.up").gelu()
        x = normalized(x + projected(inner, f"{layer}.down"), f"{layer}.norm2")
    pooled = (x * mask).sum(axes=[0], keepDimensions=True) / mask.sum(axes=[0], keepDimensions=True)
    return pooled * pooled.sumOfSquares(axes=[1], keepDimensions=True).rsqrt(epsilon=EPS)


def torch_encoder(ids: Array, mask: Array, w: dict[str, Array]) -> Any:
    t = {name: torch.tensor(value) for name, value in w.items()}
    keep = torch.tensor(mask)

    def normalized(x: Any, name: str) -> Any:
        return F.layer_norm(x, (WIDTH,), t[f"{name}.w"], t[f"{name}.b"], EPS)

    def projected(x: Any, name: str) -> Any:
        return F.linear(x, t[f"{name}.w"], t[f"{name}.b"])

    x = normalized(t["words"][torch.tensor(ids).long()] + t["positions"][: len(ids)], "norm")
    for layer in range(LAYERS):
        q, k, v = (projected(x, f"{layer}.{n}").view(len(ids), HEADS, -1).transpose(0, 1) for n in "qkv")
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=keep.T.bool().expand(len(ids), -1))
        x = normalized(
            x + projected(attended.transpose(0, 1).reshape(len(ids), WIDTH), f"{layer}.out"), f"{layer}.norm1"
        )
        x = normalized(x + projected(F.gelu(projected(x, f"{layer}.up")), f"{layer}.down"), f"{layer}.norm2")
    return F.normalize((x * keep).sum(0, keepdim=True) / keep.sum(), dim=1)


def test_an_encoder_of_sentences_with_one_flexible_axis() -> None:
    weights, rng = encoder_weights(), np.random.default_rng(6)
    context = BNNSGraph.makeContext(lambda builder: encoder(builder, weights))
    for length in (5, 1, 12, 7, 5):
        ids = rng.integers(0, VOCABULARY, length, dtype=np.int32)
        mask = np.ones((length, 1), FLOAT)
        mask[length - length // 3 :] = 0
        shapes = [BNNSGraph.Shape([1, WIDTH]), [length], [length, 1], [length]]
        assert context.setDynamicShapes(shapes) == 0
        found = context.allocateTensor(argument=0)
        context.executeFunction(arguments=[found, ids, mask, np.arange(length, dtype=np.int32)])
        np.testing.assert_allclose(found.data, torch_encoder(ids, mask, weights), rtol=2e-5, atol=2e-6)
