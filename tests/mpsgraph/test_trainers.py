"""Graphs in the styles of public training programs for MPSGraph, trained step by step beside PyTorch in float64.

An MLP with SGD by hand through a compiled executable; a CNN whose weights are placeholders, whose gradients are
targets, and whose optimizers are graphs of their own; recurrent layers with variables, Adam and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from retrograd.mps import MTLCreateSystemDefaultDevice  # noqa: E402
from retrograd.mpsgraph import (  # noqa: E402
    MPSDataType,
    MPSGraph,
    MPSGraphConvolution2DOpDescriptor,
    MPSGraphDevice,
    MPSGraphGRUDescriptor,
    MPSGraphLossReductionType,
    MPSGraphLSTMDescriptor,
    MPSGraphPaddingMode,
    MPSGraphPaddingStyle,
    MPSGraphPooling2DOpDescriptor,
    MPSGraphShapedType,
    MPSGraphSingleGateRNNDescriptor,
    MPSGraphTensorData,
    MPSGraphTensorNamedDataLayout,
)
from support.arrays import assert_same_bits  # noqa: E402
from support.mpsgraph import TYPES, placeholder  # noqa: E402

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
# The epsilon is well above rounding errors, which are all there is in the gradient of a bias before a batch norm.
STEPS, RATE, MOMENTUM, BETAS, EPSILON = 8, 0.05, 0.9, (0.9, 0.999), 1e-3
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
f = torch.nn.functional


def draw(rng: np.random.Generator, dtype: Any, **shapes: tuple[int, ...]) -> Arrays:
    return {name: (rng.normal(size=shape) / 2).astype(dtype) for name, shape in shapes.items()}


def variable(graph: Any, array: Array, name: str | None = None) -> Any:
    return graph.variable(with_=array.tobytes(), shape=list(array.shape), dataType=TYPES[array.dtype], name=name)


def data(feeds: dict[Any, Array]) -> dict[Any, MPSGraphTensorData]:
    return {tensor: MPSGraphTensorData(array) for tensor, array in feeds.items()}


def values(graph: Any, tensors: Sequence[Any]) -> list[Array]:
    found = graph.run(feeds={}, targetTensors=list(tensors), targetOperations=None)
    return [found[t].numpy() for t in tensors]


def cross_entropy(graph: Any, logits: Any, labels: Any) -> Any:
    return graph.softMaxCrossEntropy(
        logits, labels=labels, axis=-1, reuctionType=MPSGraphLossReductionType.mean, name="loss"
    )


def leaves(weights: Arrays) -> dict[str, Any]:
    return {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}


# ---- an MLP, through an executable -----------------------------------------------------------------------------------


class Mlp:
    """Every use of a weight is a read, and the update is a subtraction."""

    def __init__(self, weights: Arrays, x: Array, labels: Array) -> None:
        self.graph = g = MPSGraph()
        self.labels = g.placeholder(shape=[-1, 3], dataType=TYPES[x.dtype], name="labels")
        self.x = g.placeholder(shape=[-1, 6], dataType=TYPES[x.dtype], name="x")
        self.variables = {name: variable(g, w, name) for name, w in weights.items()}
        reads = {name: g.read(v, name=None) for name, v in self.variables.items()}
        hidden = g.reLU(with_=self.dense(self.x, reads["w1"], reads["b1"]), name=None)
        self.loss = cross_entropy(g, self.dense(hidden, reads["w2"], reads["b2"]), self.labels)
        gradients = g.gradients(of=self.loss, with_=list(reads.values()), name=None)
        rate = g.constant(RATE, dataType=TYPES[x.dtype])
        self.updates = []
        for name, read in reads.items():
            step = g.multiplication(rate, gradients[read], name=None)
            new = g.subtraction(read, step, name=None)
            self.updates.append(g.assign(self.variables[name], tensor=new, name=None))

    def dense(self, x: Any, w: Any, b: Any) -> Any:
        product = self.graph.matrixMultiplication(primary=x, secondary=w, name=None)
        return self.graph.addition(product, b, name=None)


def mlp_problem(dtype: Any) -> tuple[Arrays, list[tuple[Array, Array]]]:
    rng = np.random.default_rng(0)
    weights = draw(rng, dtype, w1=(6, 8), b1=(8,), w2=(8, 3), b2=(3,))
    batches = []
    for step in range(STEPS):
        x = rng.normal(size=(5 + step % 3, 6)).astype(dtype)
        batches.append((x, np.eye(3, dtype=dtype)[x[:, :3].argmax(1)]))
    return weights, batches


def run_executable(net: Mlp, batches: list[tuple[Array, Array]]) -> list[Array]:
    kind = net.x.dataType
    queue = MTLCreateSystemDefaultDevice().makeCommandQueue()
    executable = net.graph.compile(
        with_=MPSGraphDevice(mtlDevice=queue.device),
        feeds={
            net.x: MPSGraphShapedType(shape=[-1, 6], dataType=kind),
            net.labels: MPSGraphShapedType(shape=[-1, 3], dataType=kind),
        },
        targetTensors=[net.loss],
        targetOperations=net.updates,
        compilationDescriptor=None,
    )
    assert executable.feedTensors == [net.labels, net.x]  # as they were made
    losses = []
    for x, labels in batches:
        inputs = [MPSGraphTensorData(labels), MPSGraphTensorData(x)]
        (loss,) = executable.run(with_=queue, inputs=inputs, results=None, executionDescriptor=None)
        losses.append(loss.numpy())
    return losses


def test_an_executable_trains_as_pytorch_does() -> None:
    weights, batches = mlp_problem(np.float64)
    net, w = Mlp(weights, *batches[0]), leaves(weights)
    for found, (x, labels) in zip(run_executable(net, batches), batches, strict=True):
        hidden = torch.relu(torch.tensor(x) @ w["w1"] + w["b1"])
        loss = f.cross_entropy(hidden @ w["w2"] + w["b2"], torch.tensor(labels))
        np.testing.assert_allclose(found, loss.item(), **CLOSE)
        with torch.no_grad():
            for p, g in zip(w.values(), torch.autograd.grad(loss, list(w.values())), strict=True):
                p -= RATE * g
    for found, p in zip(values(net.graph, list(net.variables.values())), w.values(), strict=True):
        np.testing.assert_allclose(found, p.detach().numpy(), **CLOSE)


def test_an_executable_has_the_bits_of_runs() -> None:
    weights, batches = mlp_problem(np.float32)
    one, two = Mlp(weights, *batches[0]), Mlp(weights, *batches[0])
    for found, (x, labels) in zip(run_executable(one, batches), batches, strict=True):
        feeds = data({two.x: x, two.labels: labels})
        results = two.graph.run(feeds=feeds, targetTensors=[two.loss], targetOperations=two.updates)
        assert_same_bits([found], [results[two.loss].numpy()])
    assert_same_bits(*(values(net.graph, list(net.variables.values())) for net in (one, two)))


# ---- a CNN without variables -----------------------------------------------------------------------------------------


def cnn(g: Any, x: Any, w: dict[str, Any]) -> Any:
    """Convolution, batch norm over samples and pixels, leaky ReLU, max pooling, dense: the logits."""
    layouts, style = MPSGraphTensorNamedDataLayout, MPSGraphPaddingStyle
    convolution = MPSGraphConvolution2DOpDescriptor(
        strideInX=1, strideInY=1, dilationRateInX=1, dilationRateInY=1, groups=1, paddingStyle=style.TF_SAME,
        dataLayout=layouts.NCHW, weightsLayout=layouts.OIHW,
    )  # fmt: skip
    pooling = MPSGraphPooling2DOpDescriptor(
        kernelWidth=2, kernelHeight=2, strideInX=2, strideInY=2, paddingStyle=style.TF_VALID, dataLayout=layouts.NCHW
    )
    y = g.convolution2D(x, weights=w["w"], descriptor=convolution, name=None)
    channels = {n: g.reshape(w[n], shape=[1, -1, 1, 1], name=None) for n in ("b", "gamma", "beta")}
    y = g.addition(y, channels["b"], name=None)
    mean = g.mean(of=y, axes=[0, 2, 3], name=None)
    variance = g.variance(of=y, axes=[0, 2, 3], name=None)
    y = g.normalize(
        y, mean=mean, variance=variance, gamma=channels["gamma"], beta=channels["beta"], epsilon=1e-3, name=None
    )
    y = g.maxPooling2D(withSourceTensor=g.leakyReLU(with_=y, alpha=0.1, name=None), descriptor=pooling, name=None)
    y = g.matrixMultiplication(primary=g.flatten2D(y, axis=1, name=None), secondary=w["v"], name=None)
    return g.addition(y, w["c"], name=None)


def torch_cnn(x: Any, w: dict[str, Any]) -> Any:
    y = f.conv2d(x, w["w"], w["b"], padding="same")
    y = f.batch_norm(y, None, None, w["gamma"], w["beta"], training=True, eps=1e-3)
    return f.max_pool2d(f.leaky_relu(y, 0.1), 2).flatten(1) @ w["v"] + w["c"]


def momentum_update(g: Any, w: Any, gradient: Any, velocity: Any, unused: Any, step: Any) -> list[Any]:
    """w and the velocity of SGD with momentum; the second state is not used."""
    number = lambda value: g.constant(value, dataType=w.dataType)  # noqa: E731
    velocity = g.addition(g.multiplication(number(MOMENTUM), velocity, name=None), gradient, name=None)
    return [g.subtraction(w, g.multiplication(number(RATE), velocity, name=None), name=None), velocity, unused]


def adam_update(g: Any, w: Any, gradient: Any, m: Any, v: Any, step: Any) -> list[Any]:
    """w and the moments of Adam; `step` counts from 1."""
    number = lambda value: g.constant(value, dataType=w.dataType)  # noqa: E731
    moments, corrected = [], []
    for beta, state, term in zip(BETAS, (m, v), (gradient, g.square(with_=gradient, name=None)), strict=True):
        old = g.multiplication(number(beta), state, name=None)
        moments.append(g.addition(old, g.multiplication(number(1 - beta), term, name=None), name=None))
        power = g.power(number(beta), step, name=None)
        corrected.append(g.division(moments[-1], g.subtraction(number(1), power, name=None), name=None))
    root = g.addition(g.squareRoot(with_=corrected[1], name=None), number(EPSILON), name=None)
    moved = g.multiplication(number(RATE), g.division(corrected[0], root, name=None), name=None)
    return [g.subtraction(w, moved, name=None), *moments]


OPTIMIZERS: dict[str, tuple[Callable[..., list[Any]], Callable[[list[Any]], Any]]] = {
    "momentum": (momentum_update, lambda p: torch.optim.SGD(p, RATE, momentum=MOMENTUM)),
    "adam": (adam_update, lambda p: torch.optim.Adam(p, RATE, BETAS, EPSILON)),
}


def cnn_problem(dtype: Any) -> tuple[Arrays, list[tuple[Array, Array]]]:
    rng = np.random.default_rng(3)
    weights = draw(rng, dtype, w=(4, 2, 3, 3), b=(4,), gamma=(4,), beta=(4,), v=(4 * 3 * 3, 3), c=(3,))
    x = rng.normal(size=(STEPS, 5, 2, 6, 6)).astype(dtype)
    return weights, [(one, np.eye(3, dtype=dtype)[rng.integers(0, 3, 5)]) for one in x]


def train_with_placeholders(
    update: Callable[..., list[Any]], weights: Arrays, batches: list[tuple[Array, Array]]
) -> tuple[list[Array], Arrays]:
    """A graph of the gradients, and a graph of the optimizer for each weight. All state is the caller's."""
    g = MPSGraph()
    x, labels = placeholder(g, batches[0][0], "x"), placeholder(g, batches[0][1], "labels")
    fed = {name: placeholder(g, w, name) for name, w in weights.items()}
    loss = cross_entropy(g, cnn(g, x, fed), labels)
    gradients = g.gradients(of=loss, with_=list(fed.values()), name=None)
    optimizers = {}
    for name, w in weights.items():
        graph = MPSGraph()
        inputs = [placeholder(graph, w, part) for part in ("w", "gradient", "first", "second")]
        inputs.append(graph.placeholder(shape=[1], dataType=TYPES[w.dtype], name="step"))
        optimizers[name] = graph, inputs, update(graph, *inputs)
    states = {name: [w, np.zeros_like(w), np.zeros_like(w)] for name, w in weights.items()}
    losses = []
    for count, (images, classes) in enumerate(batches, 1):
        feeds = data({x: images, labels: classes, **{fed[name]: state[0] for name, state in states.items()}})
        targets = [loss, *(gradients[t] for t in fed.values())]
        found = g.run(feeds=feeds, targetTensors=targets, targetOperations=None)
        losses.append(found[loss].numpy())
        for name, (graph, inputs, results) in optimizers.items():
            w, first, second = states[name]
            gradient, step = found[gradients[fed[name]]].numpy(), np.full(1, count, w.dtype)
            fed_now = data(dict(zip(inputs, (w, gradient, first, second, step), strict=True)))
            new = graph.run(feeds=fed_now, targetTensors=results, targetOperations=None)
            states[name] = [new[t].numpy() for t in results]
    return losses, {name: state[0] for name, state in states.items()}


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_weights_as_placeholders_train_as_pytorch_does(optimizer: str) -> None:
    weights, batches = cnn_problem(np.float64)
    update, make = OPTIMIZERS[optimizer]
    losses, trained = train_with_placeholders(update, weights, batches)
    w = leaves(weights)
    theirs = make(list(w.values()))
    for found, (x, labels) in zip(losses, batches, strict=True):
        loss = f.cross_entropy(torch_cnn(torch.tensor(x), w), torch.tensor(labels))
        np.testing.assert_allclose(found, loss.item(), rtol=1e-8)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
    for name, p in w.items():
        np.testing.assert_allclose(trained[name], p.detach().numpy(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_weights_as_placeholders_have_the_bits_of_variables(optimizer: str) -> None:
    weights, batches = cnn_problem(np.float32)
    update, _ = OPTIMIZERS[optimizer]
    losses, trained = train_with_placeholders(update, weights, batches)
    g = MPSGraph()
    x, labels = placeholder(g, batches[0][0], "x"), placeholder(g, batches[0][1], "labels")
    step = variable(g, np.ones(1, np.float32), "step")
    variables = {name: variable(g, w, name) for name, w in weights.items()}
    loss = cross_entropy(g, cnn(g, x, variables), labels)
    gradients = g.gradients(of=loss, with_=list(variables.values()), name=None)
    updates = [g.assign(step, tensor=g.addition(step, g.constant(1, dataType=MPSDataType.float32)), name=None)]
    for name, w in variables.items():
        states = [w, *(variable(g, np.zeros_like(weights[name])) for _ in range(2))]
        new = update(g, w, gradients[w], *states[1:], step)
        updates += [g.assign(s, tensor=t, name=None) for s, t in zip(states, new, strict=True)]
    for found, (images, classes) in zip(losses, batches, strict=True):
        feeds = data({x: images, labels: classes})
        results = g.run(feeds=feeds, targetTensors=[loss], targetOperations=updates)
        assert_same_bits([found], [results[loss].numpy()])
    assert_same_bits(values(g, list(variables.values())), list(trained.values()))


# ---- recurrent layers, as a library of layers would put them together ------------------------------------------------

T, N, WORDS, WIDTH, H, KEEP = 5, 3, 7, 4, 6, 0.75


class Tagger:
    """Embedding and one-hot rows, dropout, an LSTM and a GRU over halves of the features, an RNN over both."""

    def __init__(self, weights: Arrays) -> None:
        self.graph = g = MPSGraph()
        kind = MPSDataType.float64
        self.tokens = g.placeholder(shape=[N, T], dataType=MPSDataType.int32, name="tokens")
        self.labels = g.placeholder(shape=[N, T], dataType=MPSDataType.int32, name="labels")
        self.variables = w = {name: variable(g, array, name) for name, array in weights.items()}
        self.state = g.variableFromTensor(g.randomPhiloxStateTensor(withSeed=5, name=None), name="state")
        numbers, state = g.randomUniformTensor(withShape=[T, N, 2 * WIDTH], stateTensor=self.state, name=None)

        steps = g.transpose(self.tokens, permutation=[1, 0], name=None)
        rows = g.gather(withUpdatesTensor=w["table"], indicesTensor=steps, axis=0, batchDimensions=0, name=None)
        hot = g.oneHot(withIndicesTensor=steps, depth=WORDS, axis=-1, dataType=kind, name=None)
        hot = g.matrixMultiplication(primary=hot, secondary=w["second"], name=None)
        x = g.concatTensors([rows, hot], dimension=-1, name=None)
        kept = g.lessThan(numbers, g.constant(KEEP, dataType=MPSDataType.float32), name=None)
        self.mask = g.division(g.cast(kept, to=kind, name=None), g.constant(KEEP, dataType=kind), name="mask")
        x = g.multiplication(x, self.mask, name=None)
        left, right = g.split(x, numSplits=2, axis=2, name=None)
        (left,) = g.LSTM(
            left, recurrentWeight=w["lstm.r"], inputWeight=w["lstm.w"], bias=w["lstm.b"], initState=None,
            initCell=None, descriptor=MPSGraphLSTMDescriptor(), name=None,
        )  # fmt: skip
        (right,) = g.GRU(
            right, recurrentWeight=w["gru.r"], inputWeight=w["gru.w"], bias=w["gru.b"], initState=None, mask=None,
            secondaryBias=w["gru.b2"], descriptor=MPSGraphGRUDescriptor(resetGateFirst=True, resetAfter=True),
            name=None,
        )  # fmt: skip
        x = g.concatTensor(left, with_=right, dimension=2, name=None)
        x = g.padTensor(  # a step of zeros before the first one
            x, with_=MPSGraphPaddingMode.constant, leftPadding=[1, 0, 0], rightPadding=[0, 0, 0], constantValue=0,
            name=None,
        )  # fmt: skip
        descriptor = MPSGraphSingleGateRNNDescriptor()
        descriptor.activation = 2  # tanh
        (x,) = g.singleGateRNN(
            x, recurrentWeight=w["rnn.r"], inputWeight=w["rnn.w"], bias=w["rnn.b"], initState=None,
            descriptor=descriptor, name=None,
        )  # fmt: skip
        x = g.sliceTensor(x, dimension=0, start=1, length=T, name=None)
        logits = g.matrixMultiplication(primary=x, secondary=w["out"], name=None)
        classes = g.oneHot(
            withIndicesTensor=g.transpose(self.labels, permutation=[1, 0], name=None), depth=WORDS, axis=-1,
            dataType=kind, name=None,
        )  # fmt: skip
        self.loss = cross_entropy(g, logits, classes)
        pairs = [(self.state, state), *self.adam()]
        self.updates = [g.assign(target, tensor=value, name=None) for target, value in pairs]
        counted = variable(g, np.zeros(1), "count")
        one = g.constant(1, dataType=kind)
        count = g.assign(counted, tensor=g.addition(counted, one, name=None), name=None)
        (self.steps,) = g.controlDependency(
            with_=[count, *self.updates], dependentBlock=lambda: [g.read(counted, name=None)], name=None
        )

    def adam(self) -> list[tuple[Any, Any]]:
        g, kind = self.graph, MPSDataType.float64
        rate, beta1, beta2, epsilon = (g.constant(v, dataType=kind) for v in (RATE, *BETAS, EPSILON))
        powers = [variable(g, np.ones(1)) for _ in range(2)]
        now = [g.multiplication(p, b, name=None) for p, b in zip(powers, (beta1, beta2), strict=True)]
        pairs = list(zip(powers, now, strict=True))
        gradients = g.gradients(of=self.loss, with_=list(self.variables.values()), name=None)
        for w in self.variables.values():
            moments = [variable(g, np.zeros(w.shape)) for _ in range(2)]
            new = g.adam(
                learningRate=rate, beta1=beta1, beta2=beta2, epsilon=epsilon, beta1Power=now[0], beta2Power=now[1],
                values=w, momentum=moments[0], velocity=moments[1], maximumVelocity=None, gradient=gradients[w],
                name=None,
            )  # fmt: skip
            pairs += zip((w, *moments), new, strict=True)
        return pairs


class AppleAdam:
    """Adam with Apple's epsilon, which is added to the root before its correction; PyTorch's is added after it."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters, self.step = parameters, 0
        self.moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]

    def update(self, gradients: Sequence[Any]) -> None:
        self.step += 1
        rate = RATE * (1 - BETAS[1] ** self.step) ** 0.5 / (1 - BETAS[0] ** self.step)
        with torch.no_grad():
            for p, g, m, v in zip(self.parameters, gradients, *self.moments, strict=True):
                m.lerp_(g, 1 - BETAS[0])
                v.lerp_(g * g, 1 - BETAS[1])
                p -= rate * m / (v.sqrt() + EPSILON)


def torch_tagger(w: dict[str, Any], tokens: Any, labels: Any, mask: Any) -> Any:
    steps = tokens.T.long()
    x = torch.cat([w["table"][steps], f.one_hot(steps, WORDS).double() @ w["second"]], -1) * mask
    h, c, r = (torch.zeros(N, H, dtype=torch.float64) for _ in range(3))
    outputs = [torch.tanh(w["rnn.b"]).expand(N, H)]  # of the step of zeros
    for x_t in x:
        left, right = x_t.split(WIDTH, -1)
        i, fg, z, o = (left @ w["lstm.w"].T + h @ w["lstm.r"].T + w["lstm.b"]).chunk(4, -1)
        c = torch.sigmoid(fg) * c + torch.sigmoid(i) * torch.tanh(z)
        h = torch.sigmoid(o) * torch.tanh(c)
        inner, outer = right @ w["gru.w"].T + w["gru.b"], r @ w["gru.r"].T
        reset, update = torch.sigmoid(inner[:, : 2 * H] + outer[:, : 2 * H]).chunk(2, -1)
        new = torch.tanh(inner[:, 2 * H :] + reset * (outer[:, 2 * H :] + w["gru.b2"]))
        r = update * r + (1 - update) * new
        both = torch.cat([h, r], -1)
        outputs.append(torch.tanh(both @ w["rnn.w"].T + outputs[-1] @ w["rnn.r"].T + w["rnn.b"]))
    logits = torch.stack(outputs[1:]) @ w["out"]
    return f.cross_entropy(logits.flatten(0, 1), labels.T.long().flatten())


def test_recurrent_layers_train_as_pytorch_does() -> None:
    rng = np.random.default_rng(4)
    shapes = {
        "table": (WORDS, WIDTH), "second": (WORDS, WIDTH), "out": (H, WORDS),
        "lstm.r": (4 * H, H), "lstm.w": (4 * H, WIDTH), "lstm.b": (4 * H,),
        "gru.r": (3 * H, H), "gru.w": (3 * H, WIDTH), "gru.b": (3 * H,), "gru.b2": (H,),
        "rnn.r": (H, H), "rnn.w": (H, 2 * H), "rnn.b": (H,),
    }  # fmt: skip
    weights = draw(rng, np.float64, **shapes)
    net, w = Tagger(weights), leaves(weights)
    theirs = AppleAdam(list(w.values()))
    masks: list[Array] = []
    tokens = rng.integers(0, WORDS, (N, T)).astype(np.int32)
    labels = (tokens + 1) % WORDS
    losses = []
    for step in range(STEPS):
        found = net.graph.run(
            feeds=data({net.tokens: tokens, net.labels: labels}),
            targetTensors=[net.loss, net.mask, net.steps],
            targetOperations=net.updates,
        )
        masks.append(found[net.mask].numpy())
        assert found[net.steps].numpy().tolist() == [step + 1]
        loss = torch_tagger(w, torch.tensor(tokens), torch.tensor(labels), torch.tensor(masks[-1]))
        losses.append(loss.item())
        np.testing.assert_allclose(found[net.loss].numpy(), losses[-1], **CLOSE)
        theirs.update(torch.autograd.grad(loss, list(w.values())))
    assert losses[-1] < losses[0]
    assert all(set(np.unique(mask)) == {0.0, 1 / KEEP} for mask in masks)
    assert not (masks[0] == masks[1]).all()  # the state has moved on
    for found, p in zip(values(net.graph, list(net.variables.values())), w.values(), strict=True):
        np.testing.assert_allclose(found, p.detach().numpy(), rtol=1e-7, atol=1e-9)
