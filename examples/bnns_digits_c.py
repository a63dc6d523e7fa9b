"""Train a small convolutional network to read digits, with Apple's BNNS in the spelling of C.

This is the program of bnns_digits.py: the same network, data and optimizer, and so the same losses, to the last bit.
Here arrays are NumPy arrays, descriptors say how they are laid out, and each call returns a status, which is 0 if it
succeeded. A batch stride is the number of values from one sample to the next.
"""

from __future__ import annotations

import sys
from typing import TypeVar

import numpy as np

from retrograd import bnns
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor

BATCH, STEPS, SIZE, CHANNELS = 32, 1000, 20, 32
HALF = SIZE // 2
PIXELS, FEATURES, POOLED = SIZE * SIZE, SIZE * SIZE * CHANNELS, HALF * HALF * CHANNELS  # values of a sample
GLYPHS = """
.####. ..#... .####. #####. ....#. ###### ..###. ###### .####. .####.
#....# .##... #....# .....# ...##. #..... .#.... .....# #....# #....#
#....# ..#... ....#. ..###. ..#.#. #####. #..... ....#. .####. #....#
#....# ..#... ..##.. .....# .#..#. .....# #####. ...#.. #....# .#####
#....# ..#... .#.... .....# ###### .....# #....# ..#... #....# ....#.
.####. .###.. ###### #####. ....#. #####. .####. .#.... .####. ..##..
"""

Filter = TypeVar("Filter")


def glyphs() -> np.ndarray:
    """The digits 0 to 9, [10, 6, 6]."""
    rows = [line.split() for line in GLYPHS.split("\n") if line]
    return np.array([[[pixel == "#" for pixel in row[digit]] for row in rows] for digit in range(10)], np.float32)


def draw(rng: np.random.Generator, digits: np.ndarray, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Fill a batch with random digits at random places, and return which ones."""
    images[...], labels[...] = 0, 0
    chosen = rng.integers(10, size=BATCH)
    for n, digit in enumerate(chosen):
        y, x = rng.integers(SIZE - 6, size=2)
        images[n, y : y + 6, x : x + 6] = digits[digit]
        labels[n, digit] = 1
    return chosen


def described(layout: int, size: tuple[int, ...], data: np.ndarray | None = None) -> Descriptor:
    return Descriptor(layout=layout, size=size, data=data, data_type=bnns.BNNSDataTypeFloat32)


def image(width: int, height: int, channels: int, data: np.ndarray | None = None) -> Descriptor:
    return described(bnns.BNNSDataLayoutImageCHW, (width, height, channels), data)


def vector(length: int, data: np.ndarray | None = None) -> Descriptor:
    return described(bnns.BNNSDataLayoutVector, (length,), data)


def kernels(data: np.ndarray) -> Descriptor:
    return described(bnns.BNNSDataLayoutConvolutionWeightsOIHW, (3, 3, 1, CHANNELS), data)


def matrix(data: np.ndarray) -> Descriptor:
    return described(bnns.BNNSDataLayoutRowMajorMatrix, (POOLED, 10), data)


def made(filter: Filter | None) -> Filter:
    if filter is None:
        sys.exit(bnns.last_error())
    return filter


def check(status: int) -> None:
    if status != 0:
        sys.exit(bnns.last_error())


def main() -> int:
    rng, digits = np.random.default_rng(0), glyphs()

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    def uniform(*shape: int) -> np.ndarray:
        return rng.uniform(-0.5, 0.5, shape).astype(np.float32)

    # Parameters. The filters read them in place, so they see every update by the optimizer.
    weights, bias = uniform(CHANNELS, 1, 3, 3), zeros(CHANNELS)
    beta, gamma, moving_mean, moving_variance = zeros(CHANNELS), *(np.ones(CHANNELS, np.float32) for _ in range(3))
    dense = uniform(10, POOLED)
    settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr, n_threads=1)

    identity = bnns.BNNSActivation(bnns.BNNSActivationFunctionIdentity)
    convolution = bnns.BNNSLayerParametersConvolution(
        i_desc=image(SIZE, SIZE, 1),
        w_desc=kernels(weights),
        o_desc=image(SIZE, SIZE, CHANNELS),
        bias=vector(CHANNELS, bias),
        activation=identity,
        x_stride=1,
        y_stride=1,
        x_dilation_stride=1,
        y_dilation_stride=1,
        x_padding=1,
        y_padding=1,
    )
    normalization = bnns.BNNSLayerParametersNormalization(
        i_desc=image(SIZE, SIZE, CHANNELS),
        o_desc=image(SIZE, SIZE, CHANNELS),
        beta_desc=vector(CHANNELS, beta),
        gamma_desc=vector(CHANNELS, gamma),
        moving_mean_desc=vector(CHANNELS, moving_mean),
        moving_variance_desc=vector(CHANNELS, moving_variance),
        momentum=0.9,
        epsilon=1e-7,
        activation=bnns.BNNSActivation(bnns.BNNSActivationFunctionRectifiedLinear),
    )
    types = [bnns.BNNSConvolution, bnns.BNNSBatchNorm]
    fused = made(bnns.BNNSFilterCreateFusedLayer(2, types, [convolution, normalization], settings))
    pooling = made(
        bnns.BNNSFilterCreateLayerPooling(
            bnns.BNNSLayerParametersPooling(
                i_desc=image(SIZE, SIZE, CHANNELS),
                o_desc=image(HALF, HALF, CHANNELS),
                activation=identity,
                pooling_function=bnns.BNNSPoolingFunctionMax,
                k_width=2,
                k_height=2,
                x_stride=2,
                y_stride=2,
                x_dilation_stride=1,
                y_dilation_stride=1,
            ),
            settings,
        )
    )
    connected = made(
        bnns.BNNSFilterCreateLayerFullyConnected(
            bnns.BNNSLayerParametersFullyConnected(
                i_desc=vector(POOLED), w_desc=matrix(dense), o_desc=vector(10), activation=identity
            ),
            settings,
        )
    )
    cost = made(
        bnns.BNNSFilterCreateLayerLoss(
            bnns.BNNSLayerParametersLossSoftmaxCrossEntropy(
                function=bnns.BNNSLossFunctionSoftmaxCrossEntropy,
                i_desc=vector(10),
                o_desc=vector(1),
                reduction=bnns.BNNSLossReductionMean,
                label_smooth=0,
            ),
            settings,
            # With the header's division by the number of classes, the L2 term outweighs the loss: its mean falls below
            # 0.125 while a quarter of the digits is still wrong.
            divide_by_classes=False,
        )
    )

    images, labels, loss = zeros(BATCH, SIZE, SIZE), zeros(BATCH, 10), zeros(1)
    features, pooled, logits = zeros(BATCH, FEATURES), zeros(BATCH, POOLED), zeros(BATCH, 10)
    dfeatures, dpooled, dlogits = zeros(BATCH, FEATURES), zeros(BATCH, POOLED), zeros(BATCH, 10)
    indices = np.zeros((BATCH, POOLED), np.uint64)  # where each maximum was: size_t in C

    def trained(dense: np.ndarray, weights: np.ndarray, *vectors: np.ndarray) -> list[Descriptor]:
        """The parameters, or arrays of their shapes, in the order in which the optimizer gets them."""
        return [matrix(dense), kernels(weights), *(vector(CHANNELS, array) for array in vectors)]

    arrays = [dense, weights, bias, beta, gamma]
    parameters = trained(*arrays)
    gradients, first, second = (trained(*(zeros(*array.shape) for array in arrays)) for _ in range(3))
    adam = bnns.BNNSOptimizerAdamFields(
        learning_rate=0.01,
        beta1=0.9,
        beta2=0.999,
        time_step=1,
        epsilon=1e-8,
        gradient_scale=1,
        regularization_scale=0.01,
        clip_gradients=True,
        clip_gradients_min=-0.5,
        clip_gradients_max=0.5,
        regularization_func=bnns.BNNSOptimizerRegularizationL2,
    )

    def forward(training: bool) -> None:
        check(bnns.BNNSFusedFilterApplyBatch(fused, BATCH, images, PIXELS, features, FEATURES, training))
        check(bnns.BNNSPoolingFilterApplyBatch(pooling, BATCH, features, FEATURES, pooled, POOLED, indices, POOLED))
        check(bnns.BNNSFilterApplyBatch(connected, BATCH, pooled, POOLED, logits, 10))

    def backward() -> None:
        check(
            bnns.BNNSFilterApplyBackwardBatch(
                connected,
                BATCH,
                pooled,
                POOLED,
                vector(POOLED, dpooled),
                POOLED,
                logits,
                10,
                vector(10, dlogits),
                10,
                gradients[0],
                None,
            )
        )
        check(
            bnns.BNNSPoolingFilterApplyBackwardBatch(
                pooling,
                BATCH,
                features,
                FEATURES,
                image(SIZE, SIZE, CHANNELS, dfeatures),
                FEATURES,
                pooled,
                POOLED,
                vector(POOLED, dpooled),  # a vector where the layer has an image: only the number of elements matters
                POOLED,
                None,
                indices,
                POOLED,
            )
        )
        check(
            bnns.BNNSFusedFilterApplyBackwardBatch(
                fused,
                BATCH,
                images,
                PIXELS,
                None,  # the gradient of the images is not needed
                0,
                features,
                FEATURES,
                image(SIZE, SIZE, CHANNELS, dfeatures),
                FEATURES,
                gradients[1:],  # weights, bias, beta, gamma
            )
        )

    losses: list[float] = []
    for step in range(STEPS):
        if step == 500:
            adam.learning_rate /= 10
        draw(rng, digits, images, labels)
        forward(training=True)
        in_delta = vector(10, dlogits)
        check(bnns.BNNSLossFilterApplyBatch(cost, BATCH, logits, 10, labels, 10, None, 0, loss, in_delta, 10))
        losses.append(float(loss[0]))
        mean = float(np.mean(losses[-20:]))
        if step % 20 == 0:
            print(f"step {step:4}: loss {mean:.4f}")
        if len(losses) >= 20 and mean < 0.125:
            print(f"step {step:4}: loss {mean:.4f}, below 0.125")
            break
        backward()
        check(
            bnns.BNNSOptimizerStep(
                bnns.BNNSOptimizerFunctionAdam,
                adam,
                len(parameters),
                parameters,
                gradients,
                first + second,  # grouped by role
                None,
            )
        )
        adam.time_step += 1

    chosen = draw(rng, digits, images, labels)
    forward(training=False)
    right = int((logits.argmax(1) == chosen).sum())
    print(f"{right} of {BATCH} new digits are right")
    for filter in (fused, pooling, connected, cost):
        bnns.BNNSFilterDestroy(filter)
    return 0 if mean < 0.125 and right == BATCH else 1


if __name__ == "__main__":
    sys.exit(main())
