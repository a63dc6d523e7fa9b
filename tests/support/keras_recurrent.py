"""A program for a process of its own, because Keras changes the one it is in.

``python keras_recurrent.py FOLDER`` runs recurrent layers of Keras and saves, for each, a file of the data,
the weights, the recurrent dropout masks, the outputs, and the gradients of the sum of outputs times `dy` and `dhn`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

STEPS, SAMPLES, INPUTS, UNITS = 5, 3, 2, 4
# name: the layer, the number of gates, whether there are recurrent dropout masks.
LAYERS: dict[str, tuple[str, int, bool]] = {
    "gru_after": ("GRU(4, reset_after=True)", 3, False),
    "gru_before": ("GRU(4, reset_after=False)", 3, False),
    "gru_after_masks": ("GRU(4, reset_after=True, recurrent_dropout=0.5)", 3, True),
    "gru_before_masks": ("GRU(4, reset_after=False, recurrent_dropout=0.5)", 3, True),
    "gru_no_bias": ("GRU(4, use_bias=False)", 3, False),
    "gru_hard": ("GRU(4, recurrent_activation='hard_sigmoid', activation='softsign')", 3, False),
    "lstm_masks": ("LSTM(4, recurrent_dropout=0.5)", 4, True),
    "rnn": ("SimpleRNN(4)", 1, False),
    "rnn_relu_mask": ("SimpleRNN(4, activation='relu', recurrent_dropout=0.5)", 1, True),
}


def main(folder: Path) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import torch

    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    rng = np.random.default_rng(0)
    for name, (text, gates, masked) in LAYERS.items():
        layer: Any = eval(f"keras.layers.{text}", {"keras": keras})
        layer.return_sequences = layer.return_state = True
        layer.build((SAMPLES, STEPS, INPUTS))
        weights = [rng.normal(0, 0.6, w.shape) for w in layer.get_weights()]
        layer.set_weights(weights)
        x, *states = (
            torch.tensor(rng.normal(size=shape), requires_grad=True)
            for shape in [(SAMPLES, STEPS, INPUTS)] + [(SAMPLES, UNITS)] * (2 if gates == 4 else 1)
        )
        mask = rng.integers(0, 2, (gates, SAMPLES, UNITS)) * 2.0
        given: Any = torch.tensor(mask[0] if gates == 1 else mask)
        layer.cell.get_recurrent_dropout_mask = lambda _, given=given: given
        y, *ends = layer(x, initial_state=states, training=masked)
        d = [rng.normal(size=tuple(a.shape)) for a in (y, *ends)]
        leaves = [x, *states, *(w.value for w in layer.weights if w.trainable)]
        gradients = torch.autograd.grad([y, *ends], leaves, [torch.tensor(a) for a in d])
        parts = {"x": [x], "state": states, "y": [y], "end": ends}
        arrays: dict[str, Any] = {
            f"{key}{n}": a.detach().numpy() for key, tensors in parts.items() for n, a in enumerate(tensors)
        }
        arrays |= {f"weight{n}": w for n, w in enumerate(weights)} | {f"d{n}": a for n, a in enumerate(d)}
        arrays |= {f"gradient{n}": a.numpy() for n, a in enumerate(gradients)}
        np.savez(folder / f"{name}.npz", **arrays, mask=mask if masked else np.ones_like(mask))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
