"""A program for a process of its own, because Keras changes the one it is in.

``save FOLDER`` saves a model of each kind, with its input and output; ``load FOLDER NAME`` loads other weights into the
model of that name, and saves its output.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

MODELS: dict[str, tuple[tuple[int, ...], str]] = {
    "lstm": ((6, 3), "LSTM(4, return_sequences=True)"),
    "no_bias": ((6, 3), "LSTM(4, return_sequences=True, use_bias=False)"),
    "both": ((6, 3), "Bidirectional(LSTM(4, return_sequences=True))"),
    "stack": ((6, 3), "LSTM(4, return_sequences=True), LSTM(4, return_sequences=True)"),
    "pytorch_stack": ((6, 3), "LSTM(4, return_sequences=True), LSTM(4, return_sequences=True)"),
    "dense": ((5,), "Dense(3), Dense(4, use_bias=False)"),
    "embedding": ((5,), "Embedding(7, 3)"),
    "batch_norm": ((5, 3), "BatchNormalization()"),
    "layer_norm": ((5, 3), "LayerNormalization()"),
    "group_norm": ((5, 6), "GroupNormalization(2)"),
    "instance_norm": ((5, 3), "GroupNormalization(-1)"),
    "no_beta": ((5, 3), "LayerNormalization(center=False)"),
    "conv1d": ((6, 3), "Conv1D(4, 2, strides=2)"),
    "conv2d": ((6, 5, 4), "Conv2D(6, (3, 2), groups=2)"),
    "up1d": ((6, 3), "Conv1DTranspose(4, 3, strides=2)"),
    "up2d": ((4, 5, 3), "Conv2DTranspose(2, (3, 2))"),
    "nested": ((5,), "Dense(3), keras.Sequential([Dense(4), Dropout(0.5), Dense(2)]), Dense(3)"),
    "many": ((3,), ", ".join(["Dense(3)"] * 12)),
    "gru": ((6, 3), "GRU(4, return_sequences=True)"),
    "gru_before": ((6, 3), "GRU(4, return_sequences=True, reset_after=False)"),
    "gru_no_bias": ((6, 3), "GRU(4, return_sequences=True, use_bias=False)"),
    "gru_both": ((6, 3), "Bidirectional(GRU(4, return_sequences=True))"),
    "gru_stack": ((6, 3), "GRU(4, return_sequences=True), GRU(4, return_sequences=True)"),
    "rnn": ((6, 3), "SimpleRNN(4, return_sequences=True)"),
    "rnn_relu": ((6, 3), "SimpleRNN(4, return_sequences=True, activation='relu')"),
    "rnn_both": ((6, 3), "Bidirectional(SimpleRNN(4, return_sequences=True, use_bias=False))"),
    "elu_rnn": ((6, 3), "SimpleRNN(4, activation='elu')"),
    "relu_gru": ((6, 3), "GRU(4, activation='relu')"),
    "backwards_gru": ((6, 3), "GRU(4, go_backwards=True)"),
    "depthwise": ((6, 5, 3), "DepthwiseConv2D(2)"),
    "relu_lstm": ((6, 3), "LSTM(4, activation='relu')"),
    "backwards": ((6, 3), "LSTM(4, go_backwards=True)"),
}


def model_of(keras: Any, name: str) -> tuple[Any, Any]:
    shape, text = MODELS[name]
    layers = eval(f"[{text}]", {"keras": keras, **vars(keras.layers)})
    model = keras.Sequential([keras.Input(shape), *layers])
    rng = np.random.default_rng(0)
    x = rng.integers(0, 7, (2, *shape)) if name == "embedding" else rng.standard_normal((2, *shape)).astype(np.float32)
    model.set_weights([rng.uniform(0.3, 1.0, w.shape).astype(np.float32) for w in model.get_weights()])
    return model, x


def main(command: str, folder: Path, *names: str) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    for name in names or MODELS:
        model, x = model_of(keras, name)
        if command == "load":
            model.load_weights(folder / f"{name}.weights.h5")
        else:
            model.save_weights(folder / f"{name}.weights.h5")
            model.save(folder / f"{name}.keras")
        y = keras.ops.convert_to_numpy(model(x))
        np.savez(folder / f"{name}.{command}.npz", x=x, y=y)
    if command == "save":
        subclassed(keras, folder)


def subclassed(keras: Any, folder: Path) -> None:
    """A model whose layers are its attributes, and one of which has a name of its own."""

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(3, name="head")
            self.second = keras.layers.Dense(2)
            self.norm = keras.layers.BatchNormalization()

        def call(self, x: Any) -> Any:
            return self.norm(self.second(self.first(x)))

    model = Model()
    model.compile("adam", "mse")
    model.fit(np.zeros((4, 3), np.float32), np.zeros((4, 2), np.float32), verbose=0)
    model.save_weights(folder / "subclassed.weights.h5")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
