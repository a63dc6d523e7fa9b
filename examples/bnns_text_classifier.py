"""Train a classifier of sentences with BNNS in Swift's spelling, save it, restore it and use it.

A sentence is a bag of words: each word is hashed to one of FEATURES counts, which are the pixels of an image one pixel
high. A convolution whose kernels are as wide as that image turns it into UNITS images of one pixel, and a fully
connected layer turns those into a score for each topic. Softmax cross entropy and Adam train both layers. The
parameters are saved with `makeArray` and restored with `allocate(initializingFrom:)`; the restored model ends in a
softmax layer and classifies sentences that were not trained on, one by one.
"""

from __future__ import annotations

import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

from retrograd import bnns
from retrograd.bnns import BNNS
from retrograd.bnns import BNNSNDArrayDescriptor as Descriptor

FEATURES, UNITS, BATCH, STEPS = 512, 256, 32, 300
TRAINING, HELD_OUT = 1500, 500  # sentences

# Nouns, verbs and adjectives. Some words belong to several topics: a pitch is a field or a tone.
TOPICS = {
    "weather": (
        "storm wind snow fog thunder frost sunshine front cloud shower",
        "rose fell cleared froze passed moved settled struck",
        "cold heavy humid bright calm wet sudden light",
    ),
    "cooking": (
        "soup oven sauce bread knife onion stove dough roll batter",
        "boiled burned rose cooled browned settled rested thickened",
        "hot salty spicy sweet crisp heavy light raw",
    ),
    "football": (
        "goal keeper striker referee penalty pitch score corner batter fans",
        "kicked scored passed missed won struck tackled moved",
        "offside fast strong late defensive bright calm tired",
    ),
    "music": (
        "violin drum chord melody pitch score key choir record roll",
        "played sang rested rose faded tuned struck repeated",
        "loud soft sharp flat slow bright sweet live",
    ),
    "computers": (
        "server keyboard key record network program cloud screen bug disk",
        "crashed froze booted compiled passed loaded repeated failed",
        "fast slow remote digital secure live broken hot",
    ),
}
TEMPLATES = (
    "the {adjective} {noun} {verb} {time}",
    "{person} said that the {noun} {verb} {time}",
    "why has the {noun} {verb} after the {adjective} {other}",
    "{time} {person} saw how the {noun} {verb}",
    "a {noun} and a {adjective} {other} {verb} before {person} arrived",
)
PEOPLE = ["my neighbour", "our teacher", "a friend of mine", "the reporter", "everyone", "his sister"]
TIMES = ["yesterday", "this morning", "last night", "again", "on sunday", "for an hour", "too early"]


def sentences(rng: np.random.Generator, count: int) -> list[tuple[str, int]]:
    """Different sentences, with the number of the topic of each."""
    found: dict[str, int] = {}
    while len(found) < count:
        topic = int(rng.integers(len(TOPICS)))
        nouns, verbs, adjectives = (words.split() for words in list(TOPICS.values())[topic])
        noun, other = rng.choice(nouns, 2, replace=False)
        sentence = str(rng.choice(TEMPLATES)).format(
            noun=noun,
            other=other,
            verb=rng.choice(verbs),
            adjective=rng.choice(adjectives),
            person=rng.choice(PEOPLE),
            time=rng.choice(TIMES),
        )
        found.setdefault(sentence, topic)
    return list(found.items())


def bag_of_words(sentence: str) -> np.ndarray:
    """How often each word occurs. Words with the same hash share a place."""
    counts = np.zeros(FEATURES, np.float32)
    for word in sentence.split():
        counts[zlib.crc32(word.encode()) % FEATURES] += 1  # Python's hash() is another one in every process
    return counts


IMAGE, VECTOR = BNNS.Shape.imageCHW, BNNS.Shape.vector
SHAPES = {
    "convolution_weights": BNNS.Shape.convolutionWeightsOIHW(FEATURES, 1, 1, UNITS),
    "convolution_bias": VECTOR(UNITS),
    "dense_weights": BNNS.Shape.matrixRowMajor(UNITS, len(TOPICS)),
    "dense_bias": VECTOR(len(TOPICS)),
}


def zeros(shape: BNNS.Shape, batch: int = 1) -> Descriptor:
    return Descriptor.allocate(repeating=0, shape=shape, batchSize=batch)


class Classifier:
    """The layers, over `parameters`: one descriptor for each of SHAPES."""

    def __init__(self, parameters: dict[str, Descriptor]) -> None:
        self.parameters = parameters
        self.input, self.labels = zeros(IMAGE(FEATURES, 1, 1), BATCH), zeros(VECTOR(len(TOPICS)), BATCH)
        self.hidden, self.scores = zeros(IMAGE(1, 1, UNITS), BATCH), zeros(VECTOR(len(TOPICS)), BATCH)
        self.settings = bnns.BNNSFilterParameters(flags=bnns.BNNSFlagsUseClientPtr)
        self.convolution = BNNS.ConvolutionLayer(
            type=BNNS.ConvolutionType.standard,
            input=self.input,
            weights=parameters["convolution_weights"],
            output=self.hidden,
            bias=parameters["convolution_bias"],
            padding=BNNS.ConvolutionPadding.zero,
            activation=BNNS.ActivationFunction.identity,
            groupCount=1,
            stride=(1, 1),
            dilationStride=(1, 1),
            filterParameters=self.settings,
        )
        self.dense = BNNS.FullyConnectedLayer(
            input=VECTOR(UNITS).descriptor(None, bnns.BNNSDataTypeFloat32),
            output=self.scores,
            weights=parameters["dense_weights"],
            bias=parameters["dense_bias"],
            activation=BNNS.ActivationFunction.identity,
            filterParameters=self.settings,
        )
        self.likely = zeros(VECTOR(len(TOPICS)))
        self.softmax = BNNS.ActivationLayer(
            function=BNNS.ActivationFunction.softmax,
            input=self.scores,
            output=self.likely,
            filterParameters=self.settings,
        )

    def forward(self, batch: list[str]) -> None:
        self.input.data.reshape(BATCH, FEATURES)[: len(batch)] = [bag_of_words(sentence) for sentence in batch]
        self.convolution.apply(batchSize=len(batch), input=self.input, output=self.hidden)
        self.dense.apply(batchSize=len(batch), input=self.hidden, output=self.scores)

    def probabilities(self, sentence: str) -> np.ndarray:
        """How likely each topic is."""
        self.forward([sentence])
        self.softmax.apply(batchSize=1, input=self.scores, output=self.likely)
        return self.likely.makeArray(of=float)

    def accuracy(self, labelled: list[tuple[str, int]]) -> float:
        return float(np.mean([self.probabilities(sentence).argmax() == topic for sentence, topic in labelled]))

    def save(self, path: Path) -> None:
        np.savez(path, **{name: parameter.makeArray(of=float) for name, parameter in self.parameters.items()})

    @classmethod
    def restored(cls, path: Path) -> Classifier:
        with np.load(path) as saved:
            return cls(
                {name: Descriptor.allocate(initializingFrom=saved[name], shape=shape) for name, shape in SHAPES.items()}
            )


def train(model: Classifier, rng: np.random.Generator, labelled: list[tuple[str, int]]) -> None:
    parameters = list(model.parameters.values())
    gradients = [zeros(parameter.shape) for parameter in parameters]
    accumulators = [zeros(parameter.shape) for parameter in parameters * 2]
    loss, dscores, dhidden = zeros(VECTOR(1)), zeros(VECTOR(len(TOPICS)), BATCH), zeros(VECTOR(UNITS), BATCH)
    cost = BNNS.LossLayer(
        input=model.scores,
        output=loss,
        lossFunction=BNNS.LossFunction.softmaxCrossEntropy(labelSmoothing=0),
        lossReduction=BNNS.LossReduction.reductionMean,
        filterParameters=model.settings,
    )
    adam = BNNS.AdamOptimizer(
        learningRate=0.01,
        timeStep=1,
        gradientScale=1,
        regularizationScale=0.001,
        gradientClipping=BNNS.GradientClipping.byValue(bounds=(-0.5, 0.5)),
        regularizationFunction=bnns.BNNSOptimizerRegularizationL2,
    )
    losses: list[float] = []
    for step in range(STEPS + 1):
        batch = [labelled[n] for n in rng.integers(len(labelled), size=BATCH)]
        model.forward([sentence for sentence, _ in batch])
        model.labels.data.reshape(BATCH, -1)[:] = np.eye(len(TOPICS))[[topic for _, topic in batch]]
        cost.apply(
            batchSize=BATCH,
            input=model.scores,
            labels=model.labels,
            output=loss,
            generatingInputGradient=dscores,
        )
        losses.append(float(loss.data[0]))
        if step % 20 == 0:
            print(f"step {step:3}: loss {np.mean(losses[-20:]):.4f}")
        model.dense.applyBackward(
            batchSize=BATCH,
            input=model.hidden,
            output=model.scores,
            outputGradient=dscores,
            generatingInputGradient=dhidden,
            generatingWeightsGradient=gradients[2],
            generatingBiasGradient=gradients[3],
        )
        model.convolution.applyBackward(
            batchSize=BATCH,
            input=model.input,
            output=model.hidden,
            outputGradient=dhidden,  # a vector, for an image of one pixel and as many channels
            generatingInputGradient=None,  # nothing before this layer is trained
            generatingWeightsGradient=gradients[0],
            generatingBiasGradient=gradients[1],
        )
        if step == 200:
            adam.learningRate /= 10
        adam.step(parameters=parameters, gradients=gradients, accumulators=accumulators)
        adam.timeStep += 1


def main() -> int:
    rng = np.random.default_rng(0)
    corpus = sentences(rng, TRAINING + HELD_OUT)
    training, held_out = corpus[:TRAINING], corpus[TRAINING:]
    model = Classifier(
        {
            name: Descriptor.allocate(randomIn=(np.float32(-0.1), np.float32(0.1)), using=rng, shape=shape)
            for name, shape in SHAPES.items()
        }
    )
    before = model.accuracy(held_out)
    train(model, rng, training)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "classifier.npz")
        model.save(path)
        restored = Classifier.restored(path)
    accuracy = restored.accuracy(held_out)
    print(f"new sentences: {100 * before:.1f} % right before training, {100 * accuracy:.1f} % after")
    for sentence, topic in held_out[:4]:
        likely = restored.probabilities(sentence)
        names = list(TOPICS)
        print(f"  {likely.max():.2f} {names[likely.argmax()]:9} ({names[topic]}): {sentence}")
    same = all(np.array_equal(restored.probabilities(s), model.probabilities(s)) for s, _ in held_out)
    if not same:
        print("the restored model differs from the trained one")
    return 0 if accuracy >= 0.95 and same else 1


if __name__ == "__main__":
    sys.exit(main())
