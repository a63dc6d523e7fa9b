"""The training steps of `steps.py` through MPSGraph, as a program for Apple's library would build them."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ... import mps, mpsgraph
from ...ops._types import Array

_FLOAT: Final = mps.MPSDataType.float32


class MpsGraphStep:
    """A step as a program for MPSGraph would build it: its operations, labels as one-hot rows, Adam as tensors."""

    def __init__(self, kind: str, x: Array, labels: Array, weights: dict[str, Array], rate: float) -> None:
        self.graph, self.variables, self.updates = mpsgraph.MPSGraph(), dict[str, Any](), list[Any]()
        classes = list(weights.values())[-1].size  # the last bias
        hot = np.eye(classes, dtype=np.float32)[labels.reshape(-1)]
        source = self.graph.placeholder(shape=list(x.shape), dataType=_FLOAT, name="x")
        targets = self.graph.placeholder(shape=list(hot.shape), dataType=_FLOAT, name="labels")
        for name, array in weights.items():
            dense = array.ndim == 2 and name not in ("wx", "wh")  # MPSGraph's are [inputs, outputs]
            self.variables[name] = self.variable(array.T if dense else array, name)
        logits = self.logits(kind, source)
        self.loss = self.graph.softMaxCrossEntropy(
            logits, labels=targets, axis=-1, reuctionType=mpsgraph.MPSGraphLossReductionType.mean, name="loss"
        )
        self.adam(rate)
        self.feeds = {source: self.fed(x), targets: self.fed(hot)}
        self.queue = mps.MTLCreateSystemDefaultDevice().makeCommandQueue()

    def variable(self, array: Array, name: str | None = None) -> Any:
        content = array.astype(np.float32).tobytes()
        return self.graph.variable(with_=content, shape=list(array.shape), dataType=_FLOAT, name=name)

    def fed(self, array: Array) -> Any:
        device = mpsgraph.MPSGraphDevice(mtlDevice=mps.MTLCreateSystemDefaultDevice())
        return mpsgraph.MPSGraphTensorData(
            device=device, data=array.tobytes(), shape=list(array.shape), dataType=_FLOAT
        )

    def linear(self, x: Any, w: str, b: str) -> Any:
        g = self.graph
        product = g.matrixMultiplication(primary=x, secondary=self.variables[w], name=None)
        return g.addition(product, self.variables[b], name=None)

    def norm(self, x: Any, name: str, axes: list[int]) -> Any:
        g, shape = self.graph, [1, -1] + [1] * (len(axes) - 1)
        gamma, beta = (g.reshape(self.variables[f"{name}.{p}"], shape=shape, name=None) for p in ("gamma", "beta"))
        mean = g.mean(of=x, axes=axes, name=None)
        variance = g.variance(of=x, axes=axes, name=None)
        y = g.normalize(x, mean=mean, variance=variance, gamma=gamma, beta=beta, epsilon=1e-5, name=None)
        return g.reLU(with_=y, name=None)

    def logits(self, kind: str, x: Any) -> Any:
        g, w = self.graph, self.variables
        if kind == "mlp":
            for i in range(2):
                x = self.norm(self.linear(x, f"{i}.w", f"{i}.b"), f"{i}.norm", [0])
            return self.linear(x, "2.w", "2.b")
        if kind == "lstm":
            descriptor = mpsgraph.MPSGraphLSTMDescriptor()
            (y,) = g.LSTM(
                x, recurrentWeight=w["wh"], inputWeight=w["wx"], bias=w["b"], initState=None, initCell=None,
                descriptor=descriptor, name=None,
            )  # fmt: skip
            return self.linear(g.reshape(y, shape=[-1, w["wh"].shape[1]], name=None), "w", "bias")
        layouts = mpsgraph.MPSGraphTensorNamedDataLayout
        convolution = mpsgraph.MPSGraphConvolution2DOpDescriptor(
            strideInX=1, strideInY=1, dilationRateInX=1, dilationRateInY=1, groups=1,
            paddingStyle=mpsgraph.MPSGraphPaddingStyle.TF_SAME, dataLayout=layouts.NCHW, weightsLayout=layouts.OIHW,
        )  # fmt: skip
        pooling = mpsgraph.MPSGraphPooling2DOpDescriptor(
            kernelWidth=2, kernelHeight=2, strideInX=2, strideInY=2,
            paddingStyle=mpsgraph.MPSGraphPaddingStyle.TF_VALID, dataLayout=layouts.NCHW,
        )  # fmt: skip
        for i in range(2):
            x = g.convolution2D(x, weights=w[f"{i}.w"], descriptor=convolution, name=None)
            x = g.addition(x, g.reshape(w[f"{i}.b"], shape=[1, -1, 1, 1], name=None), name=None)
            x = g.maxPooling2D(
                withSourceTensor=self.norm(x, f"{i}.norm", [0, 2, 3]), descriptor=pooling, name=None
            )  # fmt: skip
        return self.linear(g.flatten2D(x, axis=1, name=None), "w", "bias")

    def adam(self, learning_rate: float) -> None:
        g = self.graph
        rate, beta1, beta2, eps = (g.constant(value, dataType=_FLOAT) for value in (learning_rate, 0.9, 0.999, 1e-8))
        powers = [self.variable(np.ones(1)) for _ in range(2)]
        now = [g.multiplication(p, beta, name=None) for p, beta in zip(powers, (beta1, beta2), strict=True)]
        gradients = g.gradients(of=self.loss, with_=list(self.variables.values()), name=None)
        pairs = list(zip(powers, now, strict=True))
        for name, variable in self.variables.items():
            zeros = np.zeros(variable.shape)
            momentum, velocity = self.variable(zeros, f"{name} m"), self.variable(zeros, f"{name} v")
            found = g.adam(
                learningRate=rate, beta1=beta1, beta2=beta2, epsilon=eps, beta1Power=now[0], beta2Power=now[1],
                values=variable, momentum=momentum, velocity=velocity, maximumVelocity=None,
                gradient=gradients[variable], name=None,
            )  # fmt: skip
            pairs += zip((variable, momentum, velocity), found, strict=True)
        self.updates = [g.assign(target, tensor=value, name=None) for target, value in pairs]

    def __call__(self) -> float:
        results = self.graph.run(
            with_=self.queue, feeds=self.feeds, targetTensors=[self.loss], targetOperations=self.updates
        )
        return float(results[self.loss].numpy())
