"""Train the network of Apple's digits sample on handwritten digits, with BNNS in Swift's spelling.

    python bnns_handwritten_digits.py         # 1,797 images of 8 x 8 pixels that come with scikit-learn
    python bnns_handwritten_digits.py FOLDER  # MNIST: FOLDER has its four files, packed (.gz) or not

The network is a fused convolution, batch norm and ReLU, max pooling and a fully connected layer, trained with softmax
cross entropy and Adam. It learns from one part of the images and reads the other, which it has never seen.
"""

from __future__ import annotations

import argparse
import gzip
import math
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor

BATCH, CHANNELS, KERNEL, GOAL = 32, 32, 3, 0.97


class Digits(NamedTuple):
    """Images [N, height, width] with values from 0 to 1, and the digit that each shows."""

    images: np.ndarray
    labels: np.ndarray


# ---- data ------------------------------------------------------------------------------------------------------------


def scikit_learn_digits() -> tuple[Digits, Digits]:
    """The digits of scikit-learn: a random fifth is held out.

    Both parts have digits of the same people. Those of people whose digits are not in the data are harder: of the last
    fifth in the order of the data, this network and scikit-learn's SVC both read about 95 %.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("scikit-learn is not installed: run `pip install scikit-learn`, or give a folder with MNIST's files")
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    held_out, train = np.split(np.random.default_rng(0).permutation(len(images)), [len(images) // 5])
    return Digits(images[train], labels[train]), Digits(images[held_out], labels[held_out])


def read_idx(path: Path, axes: int) -> np.ndarray:
    """An array of bytes in the IDX format: two zeros, 8 for unsigned bytes, the number of axes; the extents as
    big-endian 32-bit integers; the elements. The file may be packed by gzip."""
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}") from error
    start = 4 + 4 * axes
    if content[:4] != bytes([0, 0, 8, axes]):
        raise ValueError(
            f"{path} begins with {content[:4].hex(' ') or 'nothing'}, expected 00 00 08 {axes:02x}: "
            f"an IDX file of bytes with {axes} axes"
        )
    if len(content) < start:
        raise ValueError(f"{path} has {len(content)} bytes, but its header alone has {start}")
    shape = struct.unpack(f">{axes}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path} has {len(content) - start} elements, but its header says {shape}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def find(folder: Path, name: str) -> Path:
    """The file in any of the names that MNIST is distributed under."""
    names = [form + end for form in (name, name.replace("-idx", ".idx")) for end in ("", ".gz")]
    for candidate in names:
        if (folder / candidate).is_file():
            return folder / candidate
    raise FileNotFoundError(f"{folder} has no file {' or '.join(names)}")


def mnist_digits(folder: Path) -> tuple[Digits, Digits]:
    """The digits of MNIST, or of any data in the same four files; those named t10k are held out."""
    parts = []
    for part in ("train", "t10k"):
        images_path, labels_path = find(folder, f"{part}-images-idx3-ubyte"), find(folder, f"{part}-labels-idx1-ubyte")
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if not len(images):
            raise ValueError(f"{images_path} has no images")
        if len(images) != len(labels):
            raise ValueError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
        if min(images.shape[1:]) < 2:
            raise ValueError(f"{images_path} has images of {images.shape[1]} x {images.shape[2]} pixels: too small")
        if labels.max() > 9:
            raise ValueError(f"{labels_path} has the label {labels.max()}, expected 0 to 9")
        parts.append(Digits((images / np.float32(255)).astype(np.float32), labels))
    train, held_out = parts
    if train.images.shape[1:] != held_out.images.shape[1:]:
        raise ValueError(
            f"images for training have {train.images.shape[1:]} pixels, those held out {held_out.images.shape[1:]}"
        )
    return train, held_out


# ---- network ---------------------------------------------------------------------------------------------------------


def zeros(shape: BNNS.Shape, batch: int = 1) -> Descriptor:
    return Descriptor.allocate(repeating=np.float32(0), shape=shape, batchSize=batch)


def ones(shape: BNNS.Shape) -> Descriptor:
    return Descriptor.allocate(repeating=np.float32(1), shape=shape)


def uniform(rng: np.random.Generator, inputs: int, shape: BNNS.Shape) -> Descriptor:
    """Weights whose outputs have about the size of their inputs, `inputs` of which are added up."""
    bound = np.float32(math.sqrt(3 / inputs))
    return Descriptor.allocate(randomIn=(-bound, bound), using=rng, shape=shape)


class Network:
    """Layers, their parameters, and the arrays between them, for batches of at most BATCH images."""

    def __init__(self, rng: np.random.Generator, height: int, width: int) -> None:
        image, vector = BNNS.Shape.imageCHW, BNNS.Shape.vector
        pooled, flat = (width // 2, height // 2), width // 2 * (height // 2) * CHANNELS
        self.input, self.labels = zeros(image(width, height, 1), BATCH), zeros(vector(10), BATCH)
        self.features = zeros(image(width, height, CHANNELS), BATCH)
        self.pooled, self.logits = zeros(image(*pooled, CHANNELS), BATCH), zeros(vector(10), BATCH)
        self.loss = zeros(vector(1))

        weights = uniform(rng, KERNEL * KERNEL, BNNS.Shape.convolutionWeightsOIHW(KERNEL, KERNEL, 1, CHANNELS))
        bias, beta, gamma = zeros(vector(CHANNELS)), zeros(vector(CHANNELS)), ones(vector(CHANNELS))
        dense, dense_bias = uniform(rng, flat, BNNS.Shape.matrixRowMajor(flat, 10)), zeros(vector(10))

        settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
        self.fused = BNNS.FusedConvolutionNormalizationLayer(
            input=self.input,
            output=self.features,
            convolutionWeights=weights,
            convolutionBias=bias,
            convolutionStride=(1, 1),
            convolutionDilationStride=(1, 1),
            convolutionPadding=BNNS.ConvolutionPadding.symmetric(x=KERNEL // 2, y=KERNEL // 2),
            normalization=BNNS.NormalizationType.batch(
                movingMean=zeros(vector(CHANNELS)), movingVariance=ones(vector(CHANNELS))
            ),
            normalizationBeta=beta,
            normalizationGamma=gamma,
            normalizationMomentum=0.9,
            normalizationEpsilon=1e-5,
            normalizationActivation=BNNS.ActivationFunction.rectifiedLinear,
            filterParameters=settings,
        )
        self.pooling = BNNS.PoolingLayer(
            type=BNNS.PoolingType.max(),
            input=self.features,
            output=self.pooled,
            bias=None,
            activation=BNNS.ActivationFunction.identity,
            kernelSize=(2, 2),
            stride=(2, 2),
            padding=BNNS.ConvolutionPadding.zero,
            filterParameters=settings,
        )
        self.connected = BNNS.FullyConnectedLayer(
            input=vector(flat).descriptor(None, bnns.BNNSDataTypeFloat32),
            output=self.logits,
            weights=dense,
            bias=dense_bias,
            activation=BNNS.ActivationFunction.identity,
            filterParameters=settings,
        )
        self.cost = BNNS.LossLayer(
            input=self.logits,
            output=self.loss,
            lossFunction=BNNS.LossFunction.softmaxCrossEntropy(labelSmoothing=0),
            lossReduction=BNNS.LossReduction.reductionMean,
            dividesByClasses=False,  # the usual cross entropy; Apple's header divides it by the number of classes
            filterParameters=settings,
        )

        self.dlogits, self.dflat = zeros(vector(10), BATCH), zeros(vector(flat), BATCH)
        self.dfeatures, self.dinput = zeros(self.features.shape, BATCH), zeros(self.input.shape, BATCH)
        self.parameters = [dense, dense_bias, weights, bias, beta, gamma]
        self.gradients = [zeros(parameter.shape) for parameter in self.parameters]
        self.accumulators = [zeros(parameter.shape) for parameter in self.parameters * 2]
        self.adam = BNNS.AdamOptimizer(
            learningRate=0.005,
            timeStep=1,
            gradientScale=1,
            regularizationScale=1e-4,
            gradientClipping=BNNS.GradientClipping.byValue(bounds=(-0.5, 0.5)),
            regularizationFunction=bnns.BNNSOptimizerRegularizationL2,
        )

    def forward(self, images: np.ndarray, phase: BNNS.LearningPhase) -> np.ndarray:
        """The scores of the ten digits for each image."""
        batch = len(images)
        self.input.data.reshape(BATCH, *images.shape[1:])[:batch] = images
        self.fused.apply(batchSize=batch, input=self.input, output=self.features, for_=phase)
        self.pooling.apply(batchSize=batch, input=self.features, output=self.pooled)
        self.connected.apply(batchSize=batch, input=self.pooled, output=self.logits)
        return self.logits.data.reshape(BATCH, 10)[:batch]

    def train(self, images: np.ndarray, labels: np.ndarray) -> float:
        """One step of the optimizer. Returns the mean loss of the batch."""
        batch = len(images)
        self.forward(images, BNNS.LearningPhase.training)
        self.labels.data.reshape(BATCH, 10)[:batch] = np.eye(10, dtype=np.float32)[labels]
        self.cost.apply(
            batchSize=batch,
            input=self.logits,
            labels=self.labels,
            output=self.loss,
            generatingInputGradient=self.dlogits,
        )
        self.connected.applyBackward(
            batchSize=batch,
            input=self.pooled,
            output=self.logits,
            outputGradient=self.dlogits,
            generatingInputGradient=self.dflat,
            generatingWeightsGradient=self.gradients[0],
            generatingBiasGradient=self.gradients[1],
        )
        self.pooling.applyBackward(
            batchSize=batch,
            input=self.features,
            output=self.pooled,
            outputGradient=self.dflat,
            generatingInputGradient=self.dfeatures,
        )
        self.fused.applyBackward(
            batchSize=batch,
            input=self.input,
            output=self.features,
            outputGradient=self.dfeatures,
            generatingInputGradient=self.dinput,
            generatingParameterGradients=self.gradients[2:],
        )
        self.adam.step(parameters=self.parameters, gradients=self.gradients, accumulators=self.accumulators)
        self.adam.timeStep += 1
        return float(self.loss.data[0])

    def read(self, images: np.ndarray) -> np.ndarray:
        """Which digit each image shows."""
        batches = [images[n : n + BATCH] for n in range(0, len(images), BATCH)]
        return np.concatenate([self.forward(batch, BNNS.LearningPhase.inference).argmax(1) for batch in batches])


# ---- report ----------------------------------------------------------------------------------------------------------


def show_mistakes(digits: Digits, answers: np.ndarray) -> None:
    """Which digits are taken for which, and the first few of those images."""
    wrong = np.flatnonzero(answers != digits.labels)
    pairs = Counter((int(digits.labels[n]), int(answers[n])) for n in wrong)
    for (digit, answer), count in pairs.most_common(5):
        print(f"{digit} is read as {answer}: {count} of {(digits.labels == digit).sum()}")
    if not len(wrong):
        return
    # Characters are about twice as high as wide: a pixel is two of them, or every other row is left out.
    across, down = (2, 1) if digits.images.shape[2] <= 16 else (1, 2)
    width = across * digits.images.shape[2]
    shown = wrong[: max(1, 100 // (width + 3))]
    print("   ".join(f"{digits.labels[n]} read as {answers[n]}".ljust(width) for n in shown).rstrip())
    for y in range(0, digits.images.shape[1], down):
        rows = digits.images[shown, y]
        print("   ".join("".join(" .:+#@"[round(5 * float(pixel))] * across for pixel in row) for row in rows).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small network to read handwritten digits with BNNS.")
    parser.add_argument("folder", nargs="?", type=Path, help="has MNIST's four files; scikit-learn's digits without")
    parser.add_argument("--epochs", type=int, help="passes over the data (12 for scikit-learn's digits, 1 for MNIST)")
    options = parser.parse_args()
    if options.epochs is not None and options.epochs < 1:
        parser.error(f"--epochs is {options.epochs}, must be at least 1")
    try:
        train, held_out = mnist_digits(options.folder) if options.folder else scikit_learn_digits()
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    epochs = options.epochs or (1 if options.folder else 12)

    rng = np.random.default_rng(0)
    network = Network(rng, *train.images.shape[1:])
    steps = epochs * math.ceil(len(train.images) / BATCH)
    interval = max(1, steps // 10)
    losses: list[float] = []
    for _ in range(epochs):
        order = rng.permutation(len(train.images))
        for n in range(0, len(order), BATCH):
            if len(losses) == steps * 2 // 3:
                network.adam.learningRate /= 10
            batch = order[n : n + BATCH]
            losses.append(network.train(train.images[batch], train.labels[batch]))
            if len(losses) % interval == 0:
                print(f"step {len(losses):5}: loss {np.mean(losses[-interval:]):.4f}", flush=True)

    answers = network.read(held_out.images)
    right = int((answers == held_out.labels).sum())
    print(f"{right} of {len(answers)} new digits are right: {100 * right / len(answers):.1f} %")
    show_mistakes(held_out, answers)
    return 0 if right >= GOAL * len(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
