"""Small texts, and tasks that train on them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from retrograd.train.text import TextSettings, TextTask

SMALL = TextSettings(hidden=16, embedding=8, batch=4, unroll=16, steps=40, warm_up=5, learning_rate=0.01)


def some_text(length: int, seed: int = 0) -> str:
    """Words of a small language, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(60)]
    text = ""
    while len(text) < length:
        text += " ".join(rng.choice(words, 12)) + ".\n"
    return text[:length]


@contextmanager
def task_of(path: Path, config: TextSettings = SMALL) -> Iterator[TextTask]:
    with tempfile.TemporaryDirectory() as folder, closing(TextTask(config, [path], scratch=folder)) as task:
        yield task
