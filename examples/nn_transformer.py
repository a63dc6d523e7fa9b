"""A small causal transformer learns to repeat the token of two steps before."""

import numpy as np

from retrograd import nn

rng = np.random.default_rng(0)
tokens = rng.integers(0, 12, (1000, 16))
labels = np.roll(tokens, 2, axis=1)
labels[:, :2] = -100  # unknown, and ignored


class Embed(nn.Module):
    def __init__(self) -> None:
        self.tokens, self.positions = nn.Embedding(12, 32, rng=rng), nn.Embedding(16, 32, rng=rng)

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        positions: nn.Tensor = self.positions(np.arange(tokens.shape[1]))
        return self.tokens(tokens) + positions


def block() -> nn.Module:
    return nn.Sequential(
        nn.Residual(nn.LayerNorm(32), nn.MultiHeadAttention(32, 4, causal=True, rng=rng)),
        nn.Residual(nn.LayerNorm(32), nn.Linear(32, 64, rng=rng), nn.GELU(), nn.Linear(64, 32, rng=rng)),
    )


model = nn.Sequential(Embed(), block(), block(), nn.LayerNorm(32), nn.Linear(32, 12, rng=rng))
step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.Adam(model, 3e-3))
nn.fit(step, (tokens[:800], labels[:800]), epochs=8, batch=50)
found = model.predict(tokens[800:]).argmax(-1)
print(f"200 new sequences: {np.mean(found[:, 2:] == labels[800:, 2:]):.1%} of their tokens correct")
