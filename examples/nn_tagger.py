"""Tag the words of sentences of different lengths: an LSTM with `lengths`, and labels that the loss ignores."""

import numpy as np

from retrograd import nn

rng = np.random.default_rng(0)
lengths = rng.integers(3, 16, 1000)
words = rng.integers(0, 20, (1000, 15))
tags = (words + np.roll(words, 1, axis=1)) % 5  # depends on the word before
tags[:, 0] = words[:, 0] % 5
outside = np.arange(15) >= lengths[:, None]
tags[outside] = -1  # ignored

model = nn.Sequential(
    nn.Embedding(20, 16, rng=rng),
    nn.LSTM(16, 32, bidirectional=True, batch_first=True, rng=rng),
    nn.Linear(64, 5, rng=rng),
)
step = nn.compile(model, nn.SoftmaxCrossEntropy(ignore_index=-1), nn.Adam(model, 1e-2))
for epoch in range(12):
    for part in np.split(rng.permutation(800), 16):
        loss = step(words[part], tags[part], lengths=lengths[part])
    print(f"epoch {epoch:2d}  loss {loss:.3f}")
found = model.predict(words[800:], lengths=lengths[800:]).argmax(-1)
right = (found == tags[800:])[~outside[800:]]
print(f"200 new sentences: {right.mean():.1%} of {right.size} tags correct")
