"""retrograd.train.text: characters drawn from a trained model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from retrograd import nn
from retrograd.train import text as module
from retrograd.train.settings import InputError
from retrograd.train.text import Alphabet, load_text_model, sample
from support.train_text import SMALL, some_text, task_of

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "text"
    path.write_text(some_text(6000))
    with task_of(path, dataclasses.replace(SMALL, steps=150)) as task:
        for _ in range(task.steps):
            task.step()
        about = {"kind": task.kind, "settings": task.settings.record(), "description": task.description()}
        nn.save(folder / "model.safetensors", task.model, metadata=about)
    return folder


def write(run: Path, length: int = 200, **options: Any) -> str:
    return "".join(sample(*load_text_model(run), length, **options))


def test_a_folder_and_its_file_are_the_same_model(trained: Path) -> None:
    assert write(trained) == write(trained / "model.safetensors")
    assert len(write(trained, 200)) == 200
    assert write(trained, 0) == ""


def test_seeds_and_temperatures(trained: Path) -> None:
    assert write(trained, seed=1) == write(trained, seed=1) != write(trained, seed=2)
    greedy = write(trained, temperature=0)
    assert greedy == write(trained, temperature=0, seed=5) == write(trained, top_k=1, seed=6)
    assert greedy == write(trained, temperature=1e-300)
    assert len(set(write(trained, 2000, temperature=1e9))) > 8  # all are as likely
    assert write(trained, top_k=10**6) == write(trained)


def test_top_k_are_the_likeliest(trained: Path) -> None:
    model, alphabet = load_text_model(trained)
    logits = model.predict(np.array([[alphabet.start]]))[0][0, 0]
    likely = {alphabet.characters[i - 1] for i in np.argsort(-logits[1:])[:3] + 1}
    drawn = {"".join(sample(model, alphabet, 1, top_k=3, temperature=50.0, seed=seed)) for seed in range(60)}
    assert drawn == likely


def test_what_is_drawn_is_as_frequent_as_likely(trained: Path) -> None:
    model, alphabet = load_text_model(trained)
    logits = model.predict(np.array([[alphabet.start]]))[0][0, 0].astype(np.float64)[1:]
    for temperature in (0.7, 1.3):
        chances = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        draws = module._chooser(alphabet, temperature, None, np.random.default_rng(0))
        all_logits = np.concatenate([[100.0], logits])  # however likely the unknown symbol is
        counts = np.bincount([draws(all_logits) for _ in range(20_000)], minlength=len(alphabet))
        assert counts[0] == 0
        deviation = np.sqrt(chances * (1 - chances) / 20_000)
        assert np.all(np.abs(counts[1:] / 20_000 - chances) < 5 * deviation + 1e-9)


def test_the_prompt_is_read(trained: Path) -> None:
    """In pieces, if it is long, and with symbols that the model does not know."""
    model, alphabet = load_text_model(trained)
    prompt = some_text(512, seed=9) + "Ω"
    assert alphabet.encode("Ω").tolist() == [0]
    seen: list[Array] = []
    given = alphabet.encode(prompt)
    assert list(module._indices(model, given, 3, lambda logits: seen.append(logits) or 5)) == [5, 5, 5]
    whole = model.predict(np.concatenate([given, [5, 5]])[:, None])[0][-3:, 0]
    np.testing.assert_allclose(seen, whole, rtol=1e-4, atol=1e-5)
    expected = alphabet.characters[int(whole[0, 1:].argmax())]
    assert "".join(sample(model, alphabet, 1, prompt=prompt, temperature=0)) == expected
    with_prompt = {write(trained, 60, prompt=prompt, temperature=0) for prompt in ("abc", "h. ", "\n")}
    assert len(with_prompt) > 1


def test_text_comes_as_it_is_written(trained: Path) -> None:
    model, alphabet = load_text_model(trained)
    pieces = sample(model, alphabet, 10**12)
    assert [len(next(pieces)) for _ in range(5)] == [1] * 5


def test_bytes_are_decoded_as_they_come() -> None:
    alphabet = Alphabet("byte")
    pieces = list(alphabet.decode("aä€😀".encode() + b"\xff\xe2\x82"))
    assert pieces == ["a", "ä", "€", "😀", "\ufffd", "\ufffd"]
    assert list(alphabet.encode("é")) == [0xC3, 0xA9]
    assert list(alphabet.encode("\udcff")) == [0xFF]  # a byte of the command line that was no UTF-8
    with pytest.raises(InputError, match="which UTF-8 cannot write"):
        alphabet.encode("\ud800")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": -1}, "length is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top-k is 0"),
    ],
)
def test_options_that_cannot_be(trained: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        write(trained, **options)


def test_files_that_are_no_text_model(trained: Path, tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            load_text_model(path)

    refused(tmp_path / "none", "none: there is no such file")
    refused(tmp_path, r"model\.safetensors: there is no such file")
    path = tmp_path / "model.safetensors"
    path.write_text("no model")
    refused(path, "is not a text model: .*not a whole safetensors file")
    model, alphabet = load_text_model(trained)
    about = nn.read_metadata(trained / "model.safetensors")
    for change, message in (
        ({"kind": "series"}, "of the kind 'series', not 'text'"),
        ({"description": {}}, "level"),
        ({"description": {"level": "word", "characters": ""}}, "level 'word'"),
        ({"description": {"level": "byte", "characters": ""}}, "bytes, but its settings describe a model of"),
        ({"description": {"level": "char", "characters": ""}}, "empty"),
        ({"description": {"level": "char", "characters": "\ud800" * (len(alphabet) - 1)}}, "surrogates"),
        ({"settings": {**about["settings"], "hidden": 15}}, "shape"),
        (
            {"settings": {**about["settings"], "hidden": 65536, "layers": 64}},
            r"bytes, but its settings describe a model of 2,",
        ),
        ({"settings": {**about["settings"], "embedding": 65536}}, "bytes, but its settings describe a model of"),
        ({"settings": {**about["settings"], "learning_rate": 10**400}}, "its setting learning_rate is 1000"),
        ({"settings": {**about["settings"], "hidden": -1}}, "its setting hidden is -1"),
        ({"settings": {}}, "no setting"),
        ({"settings": None}, "not a text model"),
    ):
        nn.save(path, model, metadata={**about, **change})
        refused(path, message)
    model.head.w[0, 0] = np.nan
    nn.save(path, model, metadata=about)
    refused(path, r"head\.w has NaN or infinite values")
    assert len(alphabet) == len(Alphabet.from_record(alphabet.record()))
