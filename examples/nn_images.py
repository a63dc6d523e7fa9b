"""Classify images of stripes in four directions, in noise, with a small convolutional network."""

import numpy as np

from retrograd import nn

rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 1200)
angle, phase = np.pi / 4 * labels[:, None, None], rng.uniform(0, 2 * np.pi, (1200, 1, 1))
rows, columns = np.mgrid[:12, :12]
images = np.sin(1.5 * (rows * np.sin(angle) + columns * np.cos(angle)) + phase) + rng.normal(0, 0.5, (1200, 12, 12))
images = images[:, None]  # samples, channels, height, width

model = nn.Sequential(
    nn.Conv(1, 8, 3, padding="same", rng=rng),
    nn.BatchNorm(8),
    nn.ReLU(),
    nn.MaxPool(2),
    nn.Conv(8, 16, 3, padding="same", activation="relu", rng=rng),
    nn.AveragePool(6),
    nn.Flatten(),
    nn.Dropout(0.1, rng=rng),
    nn.Linear(16, 4, rng=rng),
)
model.summary(images)
step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.Adam(model, 3e-3), metrics={"accuracy": nn.accuracy})
nn.fit(step, (images[:1000], labels[:1000]), epochs=8, batch=50)
loss, scores = step.evaluate(images[1000:], labels[1000:])
print(f"200 new images: loss {loss:.3f}, {scores['accuracy']:.1%} correct")
