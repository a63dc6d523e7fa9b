"""Train a small convolutional network to read digits, with Apple's BNNS in Swift's spelling.

The network is that of Apple's sample "Training a neural network to recognize digits": a fused convolution, batch norm
and ReLU, max pooling, a fully connected layer, softmax cross entropy, and Adam with an L2 term and clipped gradients.
A sample is an image of 20 x 20 pixels with one digit of 6 x 6 pixels at a random place. Training stops when the mean of
the last 20 losses is below 0.125; then the network reads digits that it has not seen.
"""

from __future__ import annotations

import sys

import numpy as np

from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor

BATCH, STEPS, SIZE, CHANNELS = 32, 1000, 20, 32
GLYPHS = """
.####. ..#... .####. #####. ....#. ###### ..###. ###### .####. .####.
#....# .##... #....# .....# ...##. #..... .#.... .....# #....# #....#
#....# ..#... ....#. ..###. ..#.#. #####. #..... ....#. .####. #....#
#....# ..#... ..##.. .....# .#..#. .....# #####. ...#.. #....# .#####
#....# ..#... .#.... .....# ###### .....# #....# ..#... #....# ....#.
.####. .###.. ###### #####. ....#. #####. .####. .#.... .####. ..##..
"""


def glyphs() -> np.ndarray:
    """The digits 0 to 9, [10, 6, 6]."""
    rows = [line.split() for line in GLYPHS.split("\n") if line]
    return np.array([[[pixel == "#" for pixel in row[digit]] for row in rows] for digit in range(10)], np.float32)


def draw(rng: np.random.Generator, digits: np.ndarray, input: Descriptor, labels: Descriptor) -> np.ndarray:
    """Fill a batch with random digits at random places, and return which ones."""
    images, one_hot = input.data.reshape(BATCH, SIZE, SIZE), labels.data.reshape(BATCH, 10)
    images[...], one_hot[...] = 0, 0
    chosen = rng.integers(10, size=BATCH)
    for n, digit in enumerate(chosen):
        y, x = rng.integers(SIZE - 6, size=2)
        images[n, y : y + 6, x : x + 6] = digits[digit]
        one_hot[n, digit] = 1
    return chosen


def main() -> int:
    rng, digits = np.random.default_rng(0), glyphs()
    image, vector = BNNS.Shape.imageCHW, BNNS.Shape.vector

    def zeros(shape: BNNS.Shape, batch: int = 1) -> Descriptor:
        return Descriptor.allocate(repeating=np.float32(0), shape=shape, batchSize=batch)

    def uniform(shape: BNNS.Shape) -> Descriptor:
        return Descriptor.allocate(randomIn=(np.float32(-0.5), np.float32(0.5)), using=rng, shape=shape)

    def ones(shape: BNNS.Shape) -> Descriptor:
        return Descriptor.allocate(repeating=np.float32(1), shape=shape)

    input, labels = zeros(image(SIZE, SIZE, 1), BATCH), zeros(vector(10), BATCH)
    weights, bias = uniform(BNNS.Shape.convolutionWeightsOIHW(3, 3, 1, CHANNELS)), zeros(vector(CHANNELS))
    beta, gamma = zeros(vector(CHANNELS)), ones(vector(CHANNELS))
    features, pooled = zeros(image(SIZE, SIZE, CHANNELS), BATCH), zeros(image(SIZE // 2, SIZE // 2, CHANNELS), BATCH)
    flat = SIZE // 2 * (SIZE // 2) * CHANNELS
    dense, logits, loss = uniform(BNNS.Shape.matrixRowMajor(flat, 10)), zeros(vector(10), BATCH), zeros(vector(1))

    settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
    fused = BNNS.FusedConvolutionNormalizationLayer(
        input=input,
        output=features,
        convolutionWeights=weights,
        convolutionBias=bias,
        convolutionStride=(1, 1),
        convolutionDilationStride=(1, 1),
        convolutionPadding=BNNS.ConvolutionPadding.symmetric(x=1, y=1),
        normalization=BNNS.NormalizationType.batch(
            movingMean=ones(vector(CHANNELS)), movingVariance=ones(vector(CHANNELS))
        ),
        normalizationBeta=beta,
        normalizationGamma=gamma,
        normalizationMomentum=0.9,
        normalizationEpsilon=1e-7,
        normalizationActivation=BNNS.ActivationFunction.rectifiedLinear,
        filterParameters=settings,
    )
    pooling = BNNS.PoolingLayer(
        type=BNNS.PoolingType.max(xDilationStride=1, yDilationStride=1),
        input=features,
        output=pooled,
        bias=None,
        activation=BNNS.ActivationFunction.identity,
        kernelSize=(2, 2),
        stride=(2, 2),
        padding=BNNS.ConvolutionPadding.zero,
        filterParameters=settings,
    )
    connected = BNNS.FullyConnectedLayer(
        input=vector(flat).descriptor(None, bnns.BNNSDataTypeFloat32),
        output=logits,
        weights=dense,
        bias=None,
        activation=BNNS.ActivationFunction.identity,
        filterParameters=settings,
    )
    cost = BNNS.LossLayer(
        input=logits,
        output=loss,
        lossFunction=BNNS.LossFunction.softmaxCrossEntropy(labelSmoothing=0),
        lossReduction=BNNS.LossReduction.reductionMean,
        # With the header's division by the number of classes, the L2 term outweighs the loss: its mean falls below
        # 0.125 while a quarter of the digits is still wrong.
        dividesByClasses=False,
        filterParameters=settings,
    )

    parameters = [dense, weights, bias, beta, gamma]
    gradients = [zeros(parameter.shape) for parameter in parameters]
    accumulators = [zeros(parameter.shape) for parameter in parameters * 2]
    dlogits, dflat = zeros(vector(10), BATCH), zeros(vector(flat), BATCH)
    dfeatures, dinput = zeros(image(SIZE, SIZE, CHANNELS), BATCH), zeros(image(SIZE, SIZE, 1), BATCH)
    adam = BNNS.AdamOptimizer(
        learningRate=0.01,
        timeStep=1,
        gradientScale=1,
        regularizationScale=0.01,
        gradientClipping=BNNS.GradientClipping.byValue(bounds=(-0.5, 0.5)),
        regularizationFunction=bnns.BNNSOptimizerRegularizationL2,
    )

    def forward(phase: BNNS.LearningPhase) -> None:
        fused.apply(batchSize=BATCH, input=input, output=features, for_=phase)
        pooling.apply(batchSize=BATCH, input=features, output=pooled)
        connected.apply(batchSize=BATCH, input=pooled, output=logits)

    losses: list[float] = []
    for step in range(STEPS):
        if step == 500:
            adam.learningRate /= 10
        draw(rng, digits, input, labels)
        forward(BNNS.LearningPhase.training)
        cost.apply(batchSize=BATCH, input=logits, labels=labels, output=loss, generatingInputGradient=dlogits)
        losses.append(float(loss.data[0]))
        mean = float(np.mean(losses[-20:]))
        if step % 20 == 0:
            print(f"step {step:4}: loss {mean:.4f}")
        if len(losses) >= 20 and mean < 0.125:
            print(f"step {step:4}: loss {mean:.4f}, below 0.125")
            break
        connected.applyBackward(
            batchSize=BATCH,
            input=pooled,
            output=logits,
            outputGradient=dlogits,
            generatingInputGradient=dflat,
            generatingWeightsGradient=gradients[0],
        )
        pooling.applyBackward(
            batchSize=BATCH, input=features, output=pooled, outputGradient=dflat, generatingInputGradient=dfeatures
        )
        fused.applyBackward(
            batchSize=BATCH,
            input=input,
            output=features,
            outputGradient=dfeatures,
            generatingInputGradient=dinput,
            generatingParameterGradients=gradients[1:],
        )
        adam.step(parameters=parameters, gradients=gradients, accumulators=accumulators)
        adam.timeStep += 1

    chosen = draw(rng, digits, input, labels)
    forward(BNNS.LearningPhase.inference)
    right = int((logits.data.reshape(BATCH, 10).argmax(1) == chosen).sum())
    print(f"{right} of {BATCH} new digits are right")
    return 0 if mean < 0.125 and right == BATCH else 1


if __name__ == "__main__":
    sys.exit(main())
