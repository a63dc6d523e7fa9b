"""retrograd.train.text: texts of any kind and size as numbers, training that goes on to the same bits, and writing."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrograd import nn
from retrograd.train import text as module
from retrograd.train.baselines import count_ngrams, ngram_bits
from retrograd.train.report import Prose, Sample, Table
from retrograd.train.settings import InputError
from retrograd.train.text import Alphabet, Columns, Corpus, TextSettings, TextTask, load_text_model, sample

Array = npt.NDArray[Any]
SMALL = TextSettings(hidden=16, embedding=8, batch=4, unroll=16, steps=40, warm_up=5, learning_rate=0.01)


def some_text(length: int, seed: int = 0) -> str:
    """Words of a small language, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefgh"), rng.integers(2, 7))) for _ in range(60)]
    text = ""
    while len(text) < length:
        text += " ".join(rng.choice(words, 12)) + ".\n"
    return text[:length]


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text(some_text(6000))
    return path


@contextmanager
def corpus_of(contents: list[bytes], level: str = "auto", most: int = 65536) -> Iterator[Corpus]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.txt" for number in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        with closing(Corpus(paths, level, most, folder)) as corpus:
            yield corpus


def numbers(corpus: Corpus) -> Array:
    out = np.empty(corpus.length, corpus.dtype)
    corpus.read(0, out)
    return out


def read_back(corpus: Corpus) -> str:
    return "".join(corpus.alphabet.decode(numbers(corpus).tolist()))


@contextmanager
def task_of(path: Path, config: TextSettings = SMALL) -> Iterator[TextTask]:
    with tempfile.TemporaryDirectory() as folder, closing(TextTask(config, [path], scratch=folder)) as task:
        yield task


def state_of(task: TextTask) -> dict[str, Array]:
    everything = {**task.model.state_dict(), **task.optimizer.state_dict(), **task.arrays()}
    return {name: array.copy() for name, array in everything.items()}


def assert_same_bits(a: dict[str, Array], b: dict[str, Array]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# ---- the text --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=4), st.integers(1, 7))
def test_unicode_comes_back(texts: list[str], piece: int) -> None:
    """However the files are cut into pieces, also within a character."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        with corpus_of([text.encode() for text in texts]) as corpus:
            assert read_back(corpus) == "".join(texts)
            assert corpus.length == len("".join(texts))
            assert corpus.bytes == len("".join(texts).encode())
            assert corpus.alphabet.level == "char"
            assert corpus.unknown == 0


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.integers(1, 7))
def test_bytes_come_back(content: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        with corpus_of([content], "byte") as corpus:
            assert numbers(corpus).tobytes() == content
            assert read_back(corpus) == content.decode("utf-8", "replace")


def test_a_large_alphabet_needs_two_bytes_a_symbol() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 700))) * 2
    with corpus_of([text.encode()]) as corpus:
        assert corpus.dtype == np.uint16
        assert len(corpus.alphabet) == 701
        assert read_back(corpus) == text


def test_the_alphabet_is_of_the_most_frequent() -> None:
    with corpus_of([b"cccbbaad"], most=4) as corpus:
        assert corpus.alphabet.characters == "cab"  # a before b: as frequent, and a smaller code point
        assert read_back(corpus) == "cccbbaa\N{REPLACEMENT CHARACTER}"
        assert (corpus.unknown, corpus.distinct) == (1, 4)


def test_what_is_rare_among_many_characters_is_unknown() -> None:
    many, rare = "".join(map(chr, range(0x100, 0x100 + 127))), "xyz"
    with corpus_of([(many * 1000 + rare).encode()]) as corpus:
        assert len(corpus.alphabet) == 128
        assert corpus.unknown == 3
    with corpus_of([(many + rare).encode()]) as corpus:  # 3 of 130 is not rare
        assert len(corpus.alphabet) == 131
        assert corpus.unknown == 0


def test_line_ends_and_marks_stay() -> None:
    text = "\ufeffone\r\ntwo\rthree\n\0e\u0301 \N{PILE OF POO}"
    with corpus_of([text.encode()]) as corpus:
        assert read_back(corpus) == text


def test_a_file_that_is_not_utf8_is_read_as_bytes(tmp_path: Path) -> None:
    with corpus_of([b"fine " * 100, "schön".encode("latin-1")]) as corpus:
        assert corpus.alphabet.level == "byte"
        assert corpus.why_bytes.endswith("1.txt is not UTF-8 at byte 3")
    with (
        pytest.raises(InputError, match=r"1\.txt is not UTF-8 at byte 3; --level byte reads any file"),
        corpus_of([b"fine " * 100, "schön".encode("latin-1")], "char"),
    ):
        pass


@pytest.mark.parametrize("piece", [1, 2, 3, 1 << 20])
def test_where_a_file_is_not_utf8(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", piece)
    content = "häß".encode() + b"\xe2\x82"  # the last character is cut off
    with pytest.raises(InputError, match="at byte 5;"), corpus_of([content], "char"):
        pass


def test_each_file_ends_for_itself() -> None:
    """Halves of a character at the end of one file and at the start of the next are no character."""
    with corpus_of([b"a\xc3", b"\xa4b"]) as corpus:
        assert corpus.alphabet.level == "byte"


def test_the_fingerprint_is_of_contents_and_sizes() -> None:
    prints = set()
    for contents in ([b"abcd"], [b"abce"], [b"ab", b"cd"], [b"abc", b"d"]):
        with corpus_of(contents) as corpus, corpus_of(contents) as again:
            assert corpus.crc32 == again.crc32
            prints.add(corpus.crc32)
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("later", "message"), [(b"some other text", "changed while it was read"), (b"some t\xe4xt", "not UTF-8 at byte 6")]
)
def test_a_text_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bytes, message: str
) -> None:
    path = tmp_path / "growing.txt"
    path.write_text("some text")
    choose = Corpus._choose_alphabet

    def and_grow(self: Corpus, files: Any, most: int) -> Alphabet:
        alphabet = choose(self, files, most)
        path.write_bytes(later)
        return alphabet

    monkeypatch.setattr(Corpus, "_choose_alphabet", and_grow)
    with pytest.raises(InputError, match=message):
        Corpus([path], "char", 256, tmp_path)


def test_columns_are_the_text(prose: Path) -> None:
    text = prose.read_text()
    with task_of(prose) as task:
        columns, batch = task._columns, SMALL.batch
        pieces = [[part.copy() for part in columns.piece(index)] for index in range(columns.pieces)]
        assert {len(tokens) for tokens, _ in pieces} <= {SMALL.unroll, SMALL.unroll - 1}
        tokens, labels = (np.concatenate([piece[i] for piece in pieces]) for i in (0, 1))
        length = len(tokens)
        assert length == (task._train_length - 1) // batch
        for column in range(batch):
            start = column * length
            assert "".join(task.alphabet.decode(tokens[:, column])) == text[start : start + length]
            assert "".join(task.alphabet.decode(labels[:, column])) == text[start + 1 : start + length + 1]


def test_columns_in_any_order_and_in_small_blocks(prose: Path) -> None:
    with corpus_of([prose.read_bytes()]) as corpus:
        whole, length = numbers(corpus).astype(np.int64), 700
        columns = Columns(corpus, [0, 13, 5000], length, 32)
        columns._group = 3
        for index in (21, 0, 4, 3, 2, 20):
            first, last = (edge * length // columns.pieces for edge in (index, index + 1))
            tokens, labels = columns.piece(index)
            for column, start in enumerate((0, 13, 5000)):
                np.testing.assert_array_equal(tokens[:, column], whole[start + first : start + last])
                np.testing.assert_array_equal(labels[:, column], whole[start + first + 1 : start + last + 1])


@pytest.mark.parametrize("items", [1, 100, 1000, 10**9])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_what_is_held_out_is_not_learned_from(prose: Path, items: int, share: float, monkeypatch: Any) -> None:
    """The places in the text that are read in an epoch, and those of a validation."""
    with task_of(prose, dataclasses.replace(SMALL, validation=share, validation_items=items)) as task:
        length = task._corpus.length

        def places(start: int, out: Array) -> None:
            out[...] = np.arange(start, start + len(out))
            assert start + len(out) <= length

        monkeypatch.setattr(task._corpus, "dtype", np.dtype(np.uint16))
        monkeypatch.setattr(task._corpus, "read", places)
        seen = []
        for columns in (task._columns, task._validation):
            columns._block = columns._block.astype(np.uint16)
            seen.append(np.concatenate([np.ravel(columns.piece(i)).copy() for i in range(columns.pieces)]))
        assert seen[0].max() < task._train_length <= seen[1].min()
        foreseen = sum(task._validation.piece(i)[1].size for i in range(task._validation.pieces))
        assert 1 <= foreseen <= items
        if items == 10**9:  # all but what the columns do not come out even by
            assert foreseen > (length - task._train_length - 1) - 64


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    script = """
        import resource, sys
        from retrograd.train.text import TextSettings, TextTask
        task = TextTask(TextSettings(hidden=32, batch=8, unroll=32, steps=4), sys.argv[1:2], scratch=sys.argv[2])
        for _ in range(4):
            task.step()
        task.outcome()
        task.close()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    peaks = []
    words = some_text(1 << 20, seed=3).encode()
    for megabytes in (1, 60):
        path = tmp_path / f"{megabytes}.txt"
        with open(path, "wb") as file:
            for _ in range(megabytes):
                file.write(words)
        run = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), str(path), str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        kilobytes = int(run.stdout) / (1024 if sys.platform == "darwin" else 1)
        peaks.append(kilobytes / 1024)
        path.unlink()
    assert abs(peaks[1] - peaks[0]) < 25, peaks


def test_nothing_is_left_behind(prose: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    task = TextTask(SMALL, [prose], scratch=scratch)
    task.step()
    task.close()
    assert list(scratch.iterdir()) == []
    with pytest.raises(InputError):
        TextTask(dataclasses.replace(SMALL, batch=4000), [prose], scratch=scratch)
    assert list(scratch.iterdir()) == []


def test_the_standard_library() -> None:
    names = module.standard_library()
    parts = {part for path in names for part in path.parts}
    assert any(path.name == "typing.py" for path in names)
    assert not {"site-packages", "idle_test", "encodings"} & parts
    assert names == module.standard_library()
    assert names != sorted(names)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refused(files: list[Any], config: TextSettings, message: str, scratch: Path) -> None:
    with pytest.raises(InputError, match=message):
        TextTask(config, files, scratch=scratch)


def test_files_that_cannot_be_read(tmp_path: Path, prose: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused([tmp_path / "none.txt"], SMALL, r"none\.txt: No such file", tmp_path)
    refused([prose, tmp_path], SMALL, "is a folder", tmp_path)
    refused(["a\0b"], SMALL, "null", tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        refused([tmp_path / "pipe"], SMALL, "pipe is a pipe, not a file; save it to a file first", tmp_path)

    def denied(*args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    refused([prose], SMALL, r"prose\.txt: Permission denied", tmp_path)


def test_no_place_for_the_numbers(prose: Path, tmp_path: Path) -> None:
    refused([prose], SMALL, "nowhere: No such file", tmp_path / "nowhere")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has a device that is always full")
def test_a_full_disk(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 (closed by what it stands in for)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: full)
    refused([prose], SMALL, "could not be written there: No space left", tmp_path)
    assert full.closed


def test_a_model_that_is_too_large(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(module, "TextModel", too_large)
    refused([prose], SMALL, "not enough memory for --layers 1 of --hidden 16", tmp_path)


def test_empty_and_short_texts(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("")
    refused([path], SMALL, r"short\.txt is empty", tmp_path)
    refused([path, path], SMALL, "the text is empty", tmp_path)
    path.write_text("a" * 900)
    config = dataclasses.replace(SMALL, batch=32, unroll=64)
    message = r"short\.txt has 900 characters, but --batch 32 and --unroll 64 need at least 2,157, validation included"
    refused([path], config, message, tmp_path)
    refused([path], dataclasses.replace(config, level="byte"), "has 900 bytes", tmp_path)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.floats(1e-6, 0.5))
def test_the_least_length_is_enough(batch: int, unroll: int, share: float) -> None:
    config = dataclasses.replace(SMALL, batch=batch, unroll=unroll, validation=share, steps=1, hidden=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_text("a")
        with pytest.raises(InputError) as refusal:
            TextTask(config, [path], scratch=folder)
        needed = int(str(refusal.value).split("at least ")[1].split(", valid")[0].replace(",", ""))
        path.write_text(("ab" * needed)[: needed - 1])
        with pytest.raises(InputError):
            TextTask(config, [path], scratch=folder)
        path.write_text(("ab" * needed)[:needed])
        with task_of(path, config) as task:
            assert task.step()[1] >= batch * unroll
            assert math.isfinite(task.validate())


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_text_that_repeats_is_learned(tmp_path: Path) -> None:
    """Also that it may be one line, and that it is learned from what was held out."""
    path = tmp_path / "abc.txt"
    path.write_text("abc" * 1000)
    with task_of(path, dataclasses.replace(SMALL, steps=200, learning_rate=0.02)) as task:
        first = task.validate()
        for _ in range(task.steps):
            task.step()
        assert first > 1.5
        assert task.validate() < 0.02
        assert "".join(sample(task.model, task.alphabet, 12, prompt="ab", temperature=0)) == "cabcabcabcab"


def test_the_first_loss_is_that_of_a_guess(prose: Path) -> None:
    """In bits, and of as many symbols as it says."""
    with task_of(prose) as task:
        loss, items = task.step()
        assert items in (SMALL.batch * SMALL.unroll, SMALL.batch * (SMALL.unroll - 1))
        assert abs(loss - math.log2(len(task.alphabet))) < 0.7


def test_validation_is_the_mean_over_the_held_out_text(prose: Path) -> None:
    """By one pass over one column, and a softmax in float64."""
    with task_of(prose, dataclasses.replace(SMALL, validation_items=300)) as task:
        for _ in range(10):
            task.step()
        bits = task.validate()
        held_out = np.empty(task._corpus.length - task._train_length, task._corpus.dtype)
        task._corpus.read(task._train_length, held_out)
        used = min(len(held_out) - 1, 300)
        logits = task.model.predict(held_out[:used, None].astype(np.int64))[0][:, 0].astype(np.float64)
        chosen = logits[np.arange(used), held_out[1 : used + 1]]
        expected = np.mean(np.log(np.exp(logits).sum(-1)) - chosen) / math.log(2)
        assert bits == pytest.approx(expected, rel=1e-5)


def test_states_pass_from_piece_to_piece(prose: Path) -> None:
    with task_of(prose) as task:
        tokens, _ = task._columns.piece(0)
        _, *states = task.model.predict(tokens)  # without dropout, training computes the same
        task.step()
        for array, state in zip(task.arrays().values(), states, strict=True):
            np.testing.assert_array_equal(array, state)
            assert np.abs(array).max() > 0
        # At the end of the columns they begin with 0 again: what is there does not count.
        with task_of(prose) as other:
            for each in (task, other):
                while each.optimizer.steps < each._columns.pieces:
                    each.step()
            for array in other.arrays().values():
                array.fill(7)
            assert task.step() == other.step()
            assert_same_bits(state_of(task), state_of(other))


DEEP = dataclasses.replace(SMALL, layers=2, dropout=0.2)


def test_validation_and_writing_disturb_nothing(prose: Path) -> None:
    with task_of(prose, DEEP) as alone, task_of(prose, DEEP) as watched:
        for step in range(40):
            loss = alone.step()
            if step % 3 == 0:
                assert watched.validate() == watched.validate()
                assert watched.model.training
            if step % 10 == 0:
                watched.outcome()
                watched.model.train()
            assert watched.step() == loss
        assert_same_bits(state_of(alone), state_of(watched))


@pytest.mark.parametrize("stop", [1, 17, 33])
def test_a_run_goes_on_to_the_same_bits(prose: Path, tmp_path: Path, stop: int) -> None:
    with task_of(prose, DEEP) as whole, task_of(prose, DEEP) as first, task_of(prose, DEEP) as second:
        assert whole._columns.pieces < 120  # the end of the columns is among the steps
        expected = [whole.step() for _ in range(120)]
        got = [first.step() for _ in range(stop)]
        path = tmp_path / "checkpoint.safetensors"
        nn.save(path, first.model, first.optimizer, arrays=first.arrays())
        nn.load(path, second.model, second.optimizer, arrays=second.arrays())
        assert second.source() == first.source()
        got += [second.step() for _ in range(120 - stop)]
        assert got == expected
        assert_same_bits(state_of(second), state_of(whole))
        assert second.validate() == whole.validate()


def test_any_number_of_threads_gives_the_same_bits(prose: Path) -> None:
    config = dataclasses.replace(DEEP, hidden=48, batch=8)
    states, bits = [], []
    for threads in (1, 2, 3):
        with task_of(prose, dataclasses.replace(config, threads=threads)) as task:
            for _ in range(12):
                task.step()
            states.append(state_of(task))
            bits.append((task.validate(), "".join(sample(task.model, task.alphabet, 80))))
    assert bits[0] == bits[1] == bits[2]
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[0], states[2])


@pytest.mark.parametrize(("length", "steps"), [(2100, 500), (60_000, 9200)])
def test_steps_follow_from_the_text_if_not_given(tmp_path: Path, length: int, steps: int) -> None:
    path = tmp_path / "text"
    path.write_text(some_text(length))
    with task_of(path, dataclasses.replace(SMALL, steps=None)) as task:
        pieces = -(-((task._train_length - 1) // SMALL.batch) // SMALL.unroll)
        assert task.steps == max(500, 10 * pieces)
        assert abs(task.steps - steps) < 500
    with task_of(path, dataclasses.replace(SMALL, steps=7)) as task:
        assert task.steps == 7


def test_bytes_train_too(tmp_path: Path) -> None:
    path = tmp_path / "numbers.bin"
    path.write_bytes(bytes(range(256)) * 12)
    with task_of(path) as task:
        assert task.measure == "bits per byte"
        assert dict(task.overview())["level"].startswith("bytes, because ")
        first = task.validate()
        for _ in range(40):
            task.step()
        assert task.validate() < first
        assert task.description()["level"] == "byte"
        task.outcome()


def test_overview_and_results(prose: Path) -> None:
    with task_of(prose) as task:
        for _ in range(30):
            task.step()
        overview = dict(task.overview())
        assert "prose.txt: 6,000 characters, 11 distinct, 300 held out" in overview["text"]
        assert f"{task.model.num_parameters:,} parameters" in overview["model"]
        compared, written = task.outcome().sections
        (table,) = (block for block in compared.blocks if isinstance(block, Table))
        bits = [float(row[1]) for row in table.rows]
        assert bits[0] == pytest.approx(math.log2(len(task.alphabet)), abs=1e-3)
        assert bits[0] > bits[1] > bits[2] > bits[3]  # more context foresees more of these words
        assert bits[4] == pytest.approx(task.validate(), abs=1e-3)
        assert any(isinstance(block, Prose) for block in compared.blocks)
        (sampled,) = (block for block in written.blocks if isinstance(block, Sample))
        assert len(sampled.text) == 600
        assert not any(section.in_terminal for section in (compared, written))  # which a short run would not fit


def test_settings_in_force(prose: Path) -> None:
    config = dataclasses.replace(SMALL, steps=40, warm_up=None, validate_every=None, threads=None, shards=None)
    with task_of(prose, config) as task:
        known = task.in_force()
        assert {name: known[name] for name in ("steps", "validate_every", "warm_up", "level", "shards")} == {
            **{"steps": 40, "validate_every": 2, "warm_up": 4},
            **{"level": "char", "shards": 1},
        }
        assert known["threads"] >= 1
        assert "momentum" not in known
        assert ("--time-limit", "90s") in config.named({**known, "time_limit": 90.0})
    with task_of(prose, dataclasses.replace(config, level="byte", optimizer="sgd", threads=2)) as task:
        known = task.in_force()
        assert "alphabet" not in known
        assert (known["level"], known["momentum"], known["threads"]) == ("byte", 0.9, 2)


@pytest.mark.parametrize(("steps", "items"), [(10, 8192), (500, 500 * 2048 * 3 // 140), (20_000, 65536)])
def test_a_short_run_validates_on_less_text(tmp_path: Path, steps: int, items: int) -> None:
    path = tmp_path / "a.txt"
    path.write_text("the cat sees the dog. " * 20_000)
    config = TextSettings(hidden=2, embedding=2, steps=steps, validation=0.3)
    with task_of(path, config) as task:
        assert task.settings.validation_items == pytest.approx(items, abs=1)
        symbols = sum(labels.size for _, labels in map(task._validation.piece, range(task._validation.pieces)))
        assert 0.99 * items < symbols <= items + 1
        task.plan(20_000)
        assert task.settings.validation_items == 65536
    with task_of(path, config) as task:
        task.step()
        task.plan(20_000)  # extended: what was validated before must be comparable
        assert task.settings.validation_items == pytest.approx(items, abs=1)
    with task_of(path, dataclasses.replace(config, validation_items=100)) as task:
        task.plan(20_000)
        assert task.settings.validation_items == 100


def test_a_text_that_is_too_short_says_what_would_do(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab" * 500)
    with pytest.raises(InputError) as refusal:
        TextTask(TextSettings(), [path], scratch=tmp_path)
    assert str(refusal.value) == (
        f"{path} has 1,000 characters, but --batch 32 and --unroll 64 need at least 2,157, validation included; "
        "--batch 16 --unroll 32 would do"
    )
    with task_of(path, TextSettings(batch=16, unroll=32, hidden=2, embedding=2, steps=1)) as task:
        assert math.isfinite(task.step()[0])


@pytest.mark.parametrize("level", ["char", "byte"])
def test_a_text_of_one_symbol_is_refused(tmp_path: Path, level: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 5000)
    with pytest.raises(InputError, match=r"has only one (character|byte), repeated 5,000 times: nothing to predict"):
        TextTask(TextSettings(level=level), [path], scratch=tmp_path)


def test_a_model_that_still_improves_is_not_told_to_get_more_text(prose: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with task_of(prose) as task:
        monkeypatch.setattr(task, "validate", lambda: 3.6)
        monkeypatch.setattr(task, "_counted", [4.0, 3.0, 3.1])
        task.improving = True
        (block,) = task.outcome().headline
        assert isinstance(block, Prose)
        assert block.text.endswith("against 3.000). It was still improving: more --steps may help.")


def test_unknown_characters_of_a_prompt() -> None:
    assert Alphabet("char", "abc ").unknown_in("a ßc漢 ß") == "ß漢"
    assert Alphabet("byte").unknown_in("a ßc漢 ß") == ""


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (3.6, r"The model is WORSE than bigram counts, by 20 % \(3\.600 bits .* more text than 5,700 char"),
        (3.02, r"The model does not beat bigram counts: they hardly differ \(3\.020 "),
        (2.4, r"The model beats bigram counts by 20 % \(2\.400 bits per character against 3\.000\)\.$"),
    ],
)  # fmt: skip
def test_the_headline_tells_whether_counting_does_better(
    prose: Path, monkeypatch: pytest.MonkeyPatch, bits: float, words: str
) -> None:
    with task_of(prose) as task:
        monkeypatch.setattr(task, "validate", lambda: bits)
        monkeypatch.setattr(task, "_counted", [4.0, 3.0, 3.1])
        (block,) = task.outcome().headline
        assert isinstance(block, Prose)
        assert re.match(words, block.text)
        (table,) = (block for block in task.outcome().sections[0].blocks if isinstance(block, Table))
        assert table.highlight == (2 if bits > 3 else 4)  # the best, whoever it is


def test_counting_by_hand(tmp_path: Path) -> None:
    """One symbol, then two, of a text of two symbols and the unknown one, which never occurs."""
    path = tmp_path / "ab.txt"
    text = "ab" * 150 + "b" * 40
    path.write_text(text)
    with task_of(path, dataclasses.replace(SMALL, validation=0.1)) as task:
        train, held_out = text[: task._train_length], text[task._train_length :]
        (one, two, _), single, double = task._counted, 0.0, 0.0
        for before, symbol in itertools.pairwise(held_out):
            p = (train.count(symbol) + 5 / 3) / (len(train) + 5)
            pairs = sum(train[i : i + 2] == before + symbol for i in range(len(train)))
            single -= math.log2(p)
            double -= math.log2((pairs + 5 * p) / (train.count(before) + 5))
        labels = len(held_out) - 1
        assert (one, two) == pytest.approx((single / labels, double / labels))


def test_ngram_baselines_by_plain_loops() -> None:
    rng = np.random.default_rng(0)
    texts, tokens = [rng.integers(0, 3, 50), rng.integers(0, 3, 20)], rng.integers(0, 3, (9, 2))
    seen = [collections.Counter(tuple(text[i : i + n]) for text in texts for i in range(len(text))) for n in (1, 2, 3)]
    expected = np.zeros(3)
    for column in tokens.T.tolist():
        for at in range(8):
            label, context, p = column[at + 1], (column[max(at - 1, 0)], column[at]), 1 / 3
            for n in range(3):
                before = context[2 - n :]
                times = seen[n - 1][before] if n else 70
                p = (seen[n][(*before, label)] + 5 * p) / (times + 5)
                expected[n] -= math.log2(p)
    assert ngram_bits(count_ngrams(3, texts), [(tokens[:-1], tokens[1:])]) == pytest.approx(expected / 16)


def test_ngrams_with_a_large_table_are_left_out() -> None:
    assert [len(table) for table in count_ngrams(4096, [])] == [4096, 4096**2]


# ---- writing ---------------------------------------------------------------------------------------------------------


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
