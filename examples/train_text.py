"""Train a text model in your own program: the training loop, the best weights, and sampling.

The task streams text of any size, splits it into the sequences of a batch, and holds out its end for validation.
``retrograd train text FILE`` is this loop with checkpoints, progress and a report.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import closing
from pathlib import Path

from retrograd import nn
from retrograd.train.text import TextSettings, TextTask, load_text_model, sample

SUBJECTS = ["the cat", "a small dog", "my sister", "the old teacher", "nobody"]
VERBS = ["sees", "follows", "remembers", "paints"]
OBJECTS = ["the river", "a red balloon", "the moon", "some bread", "the last train"]


def stories(sentences: int) -> str:
    rng = random.Random(0)
    return "".join(
        f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}.\n".capitalize() for _ in range(sentences)
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        text, model = Path(folder) / "stories.txt", Path(folder) / "model.safetensors"
        text.write_text(stories(2000), encoding="utf-8")
        settings = TextSettings(hidden=64, embedding=16, batch=16, unroll=32, steps=300, warm_up=20, learning_rate=0.01)
        with closing(TextTask(settings, [text], scratch=folder)) as task:
            for name, value in task.overview():
                print(f"{name:<10} {value}")
            best = float("inf")
            while task.optimizer.steps < task.steps:
                loss, _ = task.step()
                if task.optimizer.steps % 50 == 0 or task.optimizer.steps == 1:
                    held_out = task.validate()
                    print(f"step {task.optimizer.steps:3d}  loss {loss:.3f}  held out {held_out:.3f} {task.measure}")
                    if held_out < best:
                        best = held_out
                        about = {"kind": "text", "settings": settings.record(), "description": task.description()}
                        nn.save(model, task.model, metadata=about)
        for piece in sample(*load_text_model(model), 200, temperature=0.7, prompt="Nobody "):
            print(piece, end="")
        print()


if __name__ == "__main__":
    main()
