"""Build a network with BNNSGraph's builder, train it, save it, and fine-tune what is read back.

The network tells which of four patterns a noisy image shows. Once it is trained it is saved for inference: a graph
without a loss, as Apple's is. Then the camera is turned upside down. Read from the file, the same graph becomes part of
another one, with a loss, gradients and an optimizer; only its last layer is trained, and it is saved again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.bnns import BNNSGraph

BATCH, SIZE, CLASSES, CHANNELS = 32, 8, 4, 8
Array = np.ndarray[Any, Any]
Builder = BNNSGraph.Builder


def batch(rng: np.random.Generator, *, upside_down: bool = False) -> tuple[Array, Array]:
    """Images (N, 1, 8, 8) of a bar at one of the four borders, and which border it is."""
    labels = rng.integers(CLASSES, size=BATCH)
    images = rng.normal(0, 0.3, (BATCH, 1, SIZE, SIZE)).astype(np.float32)
    for image, label in zip(images[:, 0], labels, strict=True):
        np.rot90(image, label)[rng.integers(2), 1:-1] += 1  # a view of the image
    return (images[:, :, ::-1].copy() if upside_down else images), labels


def network(images: Any, w: dict[str, Any]) -> Any:
    """The logits (N, 4)."""
    same = Builder.ConvolutionPadding.same
    hidden = images.conv(weight=w["conv.weight"], strides=[1, 1], bias=w["conv.bias"], padding=same).relu()
    pooled = hidden.pooling(
        Builder.PoolingFunction.max, kernelSize=[2, 2], strides=[2, 2], padding=Builder.ConvolutionPadding.valid
    )
    features = pooled.reshape(to=[-1, CHANNELS * (SIZE // 2) ** 2])
    return features.linear(weight=w["last.weight"], bias=w["last.bias"])


def train(context: BNNSGraph.Context, rng: np.random.Generator, *, steps: int, upside_down: bool = False) -> None:
    loss = np.empty((), np.float32)
    for step in range(steps + 1):
        context.executeFunction(arguments=[loss, *batch(rng, upside_down=upside_down)])
        if step % 50 == 0:
            print(f"step {step:3d}: loss {loss:.4f}")


def correct(context: BNNSGraph.Context, rng: np.random.Generator, *, upside_down: bool) -> float:
    """The percentage of 10 new batches that is recognized."""
    found, probabilities = 0, np.empty((BATCH, CLASSES), np.float32)
    for _ in range(10):
        images, labels = batch(rng, upside_down=upside_down)
        context.executeFunction(arguments=[probabilities, images])
        found += int((probabilities.argmax(1) == labels).sum())
    return 100 * found / (10 * BATCH)


def main() -> int:
    rng = np.random.default_rng(0)
    sizes = {
        "conv.weight": (CHANNELS, 1, 3, 3), "conv.bias": (CHANNELS,),
        "last.weight": (CLASSES, CHANNELS * (SIZE // 2) ** 2), "last.bias": (CLASSES,),
    }  # fmt: skip
    initial = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in sizes.items()}

    def training(builder: Builder) -> Any:
        images = builder.argument(name="images", dataType=np.float32, shape=[-1, 1, SIZE, SIZE])
        labels = builder.argument(name="labels", dataType=np.int64, shape=[-1])
        w = {name: builder.parameter(name=name, values=values) for name, values in initial.items()}
        loss = network(images, w).softmaxCrossEntropy(target=labels)
        builder.minimize(loss, parameters=w.values(), using=BNNSGraph.Adam(learningRate=0.01))
        return [loss]

    context = BNNSGraph.makeContext(training)
    train(context, rng, steps=100)

    def inference(builder: Builder) -> Any:
        images = builder.argument(name="images", dataType=np.float32, shape=[-1, 1, SIZE, SIZE])
        w = {name: builder.parameter(name=name, values=context.parameters[name]) for name in sizes}
        return [network(images, w).softmax(axis=-1)]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bars.safetensors"
        BNNSGraph.makeContext(inference).write(to=path)
        saved = BNNSGraph.Context(compileFromPath=path)
        print(f"new images: {correct(saved, rng, upside_down=False):.1f} % correct; ", end="")
        print(f"upside down: {correct(saved, rng, upside_down=True):.1f} % correct")

        def fine_tuning(builder: Builder) -> Any:
            images = builder.argument(name="images", dataType=np.float32, shape=[-1, 1, SIZE, SIZE])
            labels = builder.argument(name="labels", dataType=np.int64, shape=[-1])
            model = builder.model(path)
            (probabilities,) = model(images)
            # The file has a softmax at its end; the cross entropy of its logarithm is that of the logits.
            loss = probabilities.log(epsilon=0).softmaxCrossEntropy(target=labels)
            last = [model.parameters[name] for name in ("last.weight", "last.bias")]
            builder.minimize(loss, parameters=last, using=BNNSGraph.Adam(learningRate=0.01))
            tuned.append(model)
            return [loss]

        tuned: list[Any] = []
        train(BNNSGraph.makeContext(fine_tuning), rng, steps=200, upside_down=True)
        tuned[0].write(to=path)
        again = BNNSGraph.Context(compileFromPath=path)
        print(f"upside down, after fine-tuning: {correct(again, rng, upside_down=True):.1f} % correct")
    return 0


if __name__ == "__main__":
    sys.exit(main())
