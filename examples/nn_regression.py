"""Predict one number from a sequence, and stop when the validation loss no longer falls."""

import numpy as np

from retrograd import nn

rng = np.random.default_rng(0)
x = rng.standard_normal((1200, 24, 2))
target = x[:, :, :1].sum(axis=1) / 5 + x[:, -1, 1:]

model = nn.Sequential(nn.LSTM(2, 32, batch_first=True, last=True, rng=rng), nn.Linear(32, 1, rng=rng))
step = nn.compile(model, nn.MeanSquaredError(), nn.Adam(model, 1e-2))
history = nn.fit(step, (x[:1000], target[:1000]), validation=(x[1000:], target[1000:]), epochs=60, patience=5)
print(f"{len(history)} epochs; mean squared error {step.evaluate(x[1000:], target[1000:]):.4f} in the best of them")
