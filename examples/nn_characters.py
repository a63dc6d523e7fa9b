"""A character model with retrograd.nn: it learns to spell its own source, and then writes the first line again.

Truncated backpropagation: the text is cut into columns that are read side by side, 32 characters at a time, and each
piece starts from the final states of the previous one. The states are arguments and results of a step.
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

    def forward(self, characters: nn.Tensor, state: nn.LstmState | None = None) -> tuple[nn.Tensor, nn.LstmState]:
        y, state = self.lstm.run(self.embedding(characters), state)
        return self.head(self.norm(y)), state


class Training(nn.Module):
    """Returns the loss, and the state for the next piece."""

    def __init__(self, model: CharacterModel) -> None:
        self.model, self.loss = model, nn.SoftmaxCrossEntropy()

    def forward(
        self, characters: nn.Tensor, labels: nn.Tensor, state: nn.LstmState | None
    ) -> tuple[nn.Tensor, nn.LstmState]:
        logits, state = self.model(characters, state)
        return self.loss(logits, labels), state


def main() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    alphabet, codes = np.unique(list(text), return_inverse=True)
    columns, pieces = 8, 10
    length = (len(codes) - 1) // columns // pieces  # of a piece: all have the same shape
    whole = columns * pieces * length
    inputs, labels = (codes[i : i + whole].reshape(columns, pieces * length).T for i in (0, 1))

    rng = np.random.default_rng(0)
    model = CharacterModel(len(alphabet), rng)
    epochs = 40
    optimizer = nn.AdamW(model, nn.Cosine(1e-2, epochs * pieces, warm_up=20), maximum_norm=1.0)
    step = nn.compile(Training(model), None, optimizer)
    for epoch in range(epochs):
        state, losses = None, []
        for first in range(0, pieces * length, length):
            loss, state = step(inputs[first : first + length], labels[first : first + length], state)
            losses.append(loss)
        if epoch % 8 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d}  loss {np.mean(losses):.3f}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "characters.safetensors"
        nn.save(path, model, optimizer, metadata={"alphabet": "".join(alphabet)})
        again = CharacterModel(len(alphabet), rng)
        known = list(nn.load(path, again)["alphabet"])

    written, state = text[:12], None
    unread = written
    while len(written) < 100 and not written.endswith("\n"):
        logits, state = again.predict(np.array([[known.index(c)] for c in unread]), state)
        unread = known[logits[-1, 0].argmax()]
        written += unread
    print(written.rstrip())


if __name__ == "__main__":
    main()
