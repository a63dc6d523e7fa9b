"""A character model with retrograd.nn: it learns to spell its own source, and then writes the first line again.

Truncated backpropagation: the text is cut into columns that are read side by side, 32 characters at a time, and each
piece starts from the final states of the previous one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from retrograd import nn


class CharacterModel(nn.Module):
    def __init__(self, characters: int, rng: np.random.Generator) -> None:
        self.embedding = nn.Embedding(characters, 32, rng=rng)
        self.lstm = nn.LSTM(32, 96, layers=2, dropout=0.05, rng=rng)
        self.norm = nn.LayerNorm(96)
        self.head = nn.Linear(96, characters, rng=rng)

    def forward(self, characters, state=None):
        y = self.lstm.forward(self.embedding.forward(characters), state)
        return self.head.forward(self.norm.forward(y))

    def backward(self, dlogits):
        self.embedding.backward(self.lstm.backward(self.norm.backward(self.head.backward(dlogits))))


def main() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    alphabet, codes = np.unique(list(text), return_inverse=True)
    columns = 8
    length = (len(codes) - 1) // columns
    inputs, labels = (codes[i : i + columns * length].reshape(columns, length).T for i in (0, 1))

    rng = np.random.default_rng(0)
    model = CharacterModel(len(alphabet), rng)
    loss = nn.SoftmaxCrossEntropy()
    epochs, pieces = 40, range(0, length, 32)
    optimizer = nn.AdamW(model, nn.Cosine(1e-2, epochs * len(pieces), warm_up=20), maximum_norm=1.0)
    for epoch in range(epochs):
        state, losses = None, []
        for start in pieces:
            logits = model.forward(inputs[start : start + 32], state)
            losses.append(loss.forward(logits, labels[start : start + 32]))
            model.backward(loss.backward())
            optimizer.step()
            state = model.lstm.state
        if epoch % 8 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d}  loss {np.mean(losses):.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "characters.safetensors"
        nn.save(path, model, optimizer, metadata={"alphabet": "".join(alphabet)})
        again = CharacterModel(len(alphabet), rng)
        alphabet = list(nn.load(path, again)["alphabet"])

    again.eval()
    written, state = text[:12], None
    unread = written
    while len(written) < 100 and not written.endswith("\n"):
        logits = again.forward(np.array([[alphabet.index(c)] for c in unread]), state)
        state = again.lstm.state
        unread = alphabet[logits[-1, 0].argmax()]
        written += unread
    print(written.rstrip())


if __name__ == "__main__":
    main()
