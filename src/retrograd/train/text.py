"""A language model of characters or bytes: an LSTM that predicts the next symbol, and generates text."""

from __future__ import annotations

import codecs
import dataclasses
import functools
import itertools
import math
import os
import platform
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .. import nn
from ..distributed import DataParallel, Group, Shard
from ..nn.program import Programs
from .baselines import NGRAMS, count_ngrams, ngram_bits
from .files import check_data, check_room, load_weights, opened_model
from .report import Block, Prose, Sample, Section, Table
from .settings import InputError, Settings, option
from .task import Array, Outcome, Task, check_shards, new_optimizer, steps_between_validations

__all__ = ["Alphabet", "Corpus", "TextModel", "TextSettings", "TextTask", "load_text_model", "sample"]

_PIECE: Final = 1 << 20  # bytes per read of a file
_CODE_POINTS: Final = 0x110000
_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"
_BITS: Final = 1 / math.log(2)  # per nat

# An alphabet can always have this many symbols. It gets more only if the rarer characters, which become the unknown
# symbol, would be more than this share of the text.
_USUAL_ALPHABET: Final = 128
_UNKNOWN_SHARE: Final = 1e-4

_PASSES: Final = 10  # epochs, if the settings have no number of steps
_MOST_STEPS: Final = 20_000
_LEAST_STEPS: Final = 500
# Symbols per validation, if the settings have no number: so many that 20 validations, whose symbols take about a third
# of the time of those that are trained on, take a seventh of the time of the training.
_LEAST_VALIDATED: Final = 8192
_MOST_VALIDATED: Final = 65536
_VALIDATED_SHARE: Final = 3 / 7 / 20
_MOST_COUNTED: Final = 4_000_000  # symbols of training text that the n-gram baselines use

# Directories of the standard library without typical Python code: tests, other packages, tables.
_NOT_LIBRARY: Final = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}


@dataclasses.dataclass(frozen=True)
class TextSettings(Settings):
    """Settings of a text model."""

    level: str = option(
        "auto",
        "symbols are characters or bytes; auto: characters if the text is UTF-8",
        choices=("auto", "char", "byte"),
    )
    alphabet: int = option(
        4096,
        "maximum alphabet size at level char; rarer characters become one unknown symbol",
        minimum=2,
        maximum=65536,
    )
    embedding: int = option(64, "embedding size", minimum=1, maximum=65536)
    hidden: int = option(256, "hidden size of the LSTM", minimum=1, maximum=65536)
    layers: int = option(1, "LSTM layers", minimum=1, maximum=64)
    dropout: float = option(0.0, "dropout rate between layers and before the output", minimum=0, maximum=0.95)
    batch: int = option(32, "batch size: streams of text read in parallel", minimum=1, maximum=65536)
    unroll: int = option(64, "symbols per step: length of truncated backpropagation", minimum=1, maximum=65536)
    steps: int | None = option(
        None,
        f"training steps (default: {_PASSES} epochs, but {_LEAST_STEPS} to {_MOST_STEPS} steps)",
        minimum=1,
        maximum=2**53,
    )
    validation: float = option(0.05, "share of the text, at its end, used for validation", minimum=1e-6, maximum=0.5)
    validation_items: int | None = option(
        None,
        f"maximum symbols per validation (default: {_LEAST_VALIDATED} to {_MOST_VALIDATED}, by the number of steps)",
        minimum=1,
    )

    def least_weights(self) -> int:
        return 4 * self.hidden * (self.embedding + (2 * self.layers - 1) * self.hidden)


# ---- symbols ---------------------------------------------------------------------------------------------------------


class Alphabet:
    """The symbols of a model and their indices.

    At level "char" index 0 is the unknown symbol, for every character that is not in `characters`; it is never
    generated. At level "byte" the index is the value of the byte.
    """

    def __init__(self, level: str, characters: str = "") -> None:
        self.level, self.characters = level, characters
        self._indices = {character: index for index, character in enumerate(characters, 1)}

    def __len__(self) -> int:
        return 256 if self.level == "byte" else len(self.characters) + 1

    @property
    def unknown(self) -> int | None:
        """The index of the unknown symbol, if there is one."""
        return None if self.level == "byte" else 0

    @property
    def start(self) -> int:
        """The symbol that generation starts from without a prompt: a newline, or else the most frequent symbol."""
        return ord("\n") if self.level == "byte" else self._indices.get("\n", 1)

    def encode(self, text: str) -> Array:
        """Return the indices of a text's symbols."""
        if self.level == "char":
            return np.array([self._indices.get(character, 0) for character in text], np.int64)
        try:
            # Bytes of a command-line argument that are not UTF-8 are surrogates in the text: this restores them.
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int64)
        except UnicodeEncodeError as error:
            raise InputError(f"the text has {text[error.start]!r} at {error.start}, which UTF-8 cannot write") from None

    def unknown_in(self, text: str) -> str:
        """Return the distinct characters of a text that the model does not know, in order."""
        return "" if self.level == "byte" else "".join(dict.fromkeys(c for c in text if c not in self._indices))

    def decode(self, indices: Iterable[int]) -> Iterator[str]:
        """Yield the text of indices, character by character; bytes that are not UTF-8 become U+FFFD."""
        if self.level == "char":
            for index in indices:
                yield self.characters[index - 1] if index else _UNKNOWN
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for index in indices:
            if text := decoder.decode(bytes([index])):
                yield text
        if text := decoder.decode(b"", final=True):
            yield text

    def record(self) -> dict[str, Any]:
        """Return the alphabet as a JSON-serialisable dict."""
        return {"level": self.level, "characters": self.characters}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Alphabet:
        level, characters = record["level"], record["characters"]
        if level not in ("char", "byte") or not isinstance(characters, str):
            raise ValueError(f"its alphabet is of level {level!r}")
        if level == "char" and not characters:
            raise ValueError("its alphabet is empty")
        characters.encode()  # raises a ValueError if a character is a lone surrogate, which cannot be printed
        return cls(level, characters)


# ---- the text --------------------------------------------------------------------------------------------------------


class _NotUtf8(InputError):
    def __init__(self, path: Path, offset: int) -> None:
        super().__init__(f"{path} is not UTF-8 at byte {offset:,}")


class Corpus:
    """The text of all files as one sequence of symbol indices, in a temporary file, because it may exceed memory."""

    def __init__(self, files: Sequence[Path], level: str, most: int, scratch: str | os.PathLike[str]) -> None:
        """Encode the files into a temporary file in `scratch`, which `close` deletes. `most` limits the alphabet."""
        self.why_bytes = ""
        self.crc32, self.bytes, self.length, self.unknown = 0, 0, 0, 0
        self.files, self.distinct = len(files), 0  # distinct symbols
        for path in files:
            check_data(path)
        alphabet = Alphabet("byte")
        if level != "byte":
            try:
                alphabet = self._choose_alphabet(files, most)
            except _NotUtf8 as error:
                if level == "char":
                    raise InputError(f"{error}; --level byte reads any file") from None
                self.why_bytes = str(error)
        self.alphabet: Final = alphabet
        self.dtype: Final = np.dtype(np.uint8 if len(alphabet) <= 256 else np.uint16)
        try:
            self._file = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InputError(f"{os.fspath(scratch)}: {error.strerror}") from None
        try:
            self._write(files, scratch)
        except BaseException:
            self.close()
            raise

    def _choose_alphabet(self, files: Sequence[Path], most: int) -> Alphabet:
        counts = np.zeros(_CODE_POINTS, np.int64)
        for codes in self._symbols(files, "char"):
            found = np.bincount(codes)
            counts[: len(found)] += found
        present = np.flatnonzero(counts)
        present = present[np.lexsort((present, -counts[present]))]
        covered = np.cumsum(counts[present])
        enough = np.searchsorted(covered, self.length * (1 - _UNKNOWN_SHARE)) + 1
        kept = min(len(present), most - 1, max(int(enough), _USUAL_ALPHABET - 1))
        self.distinct = len(present)
        self.unknown = self.length - int(covered[kept - 1]) if kept else 0
        return Alphabet("char", "".join(map(chr, present[:kept])))

    def _write(self, files: Sequence[Path], scratch: str | os.PathLike[str]) -> None:
        seen = self.crc32 if self.alphabet.level == "char" else None
        indices, seen_bytes = np.arange(256, dtype=self.dtype), np.zeros(256, np.bool_)
        if self.alphabet.level == "char":
            indices = np.zeros(_CODE_POINTS, self.dtype)
            for index, character in enumerate(self.alphabet.characters, 1):
                indices[ord(character)] = index
        for codes in self._symbols(files, self.alphabet.level):
            if seen is None:
                seen_bytes[codes] = True
            rest = indices[codes].view(np.uint8).data
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                raise InputError(
                    f"{os.fspath(scratch)}: the encoded text ({self.length:,} symbols so far) could not be written "
                    f"there: {error.strerror}"
                ) from None
        if seen is None:
            self.distinct = int(seen_bytes.sum())
        if seen not in (None, self.crc32):
            raise InputError("the text changed while it was read")

    def _symbols(self, files: Sequence[Path], level: str) -> Iterator[Array]:
        """Yield the code points or bytes of all files in chunks, and update `crc32`, `bytes` and `length`."""
        self.crc32, self.bytes, self.length = 0, 0, 0
        for path in files:
            decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
            for piece in itertools.chain(_pieces(path), [b""]):
                self.crc32 = zlib.crc32(piece, self.crc32)
                if level == "byte":
                    codes = np.frombuffer(piece, np.uint8)
                else:
                    waiting = len(decoder.getstate()[0])
                    try:
                        text = decoder.decode(piece, final=not piece)
                    except UnicodeDecodeError as error:
                        raise _NotUtf8(path, size - waiting + error.start) from None
                    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
                size += len(piece)
                self.length += len(codes)
                if len(codes):
                    yield codes
            self.bytes += size
            # The same text, split into files differently, gets another checksum.
            self.crc32 = zlib.crc32(size.to_bytes(8, "little"), self.crc32)

    def read(self, start: int, out: Array) -> None:
        """Fill a contiguous array of `dtype` with the symbols starting at `start`."""
        self._file.seek(start * self.dtype.itemsize)
        rest = out.view(np.uint8).data
        while rest:
            got = self._file.readinto(rest)
            if not got:
                raise EOFError(f"the text ends before symbol {start + len(out)}")
            rest = rest[got:]

    def close(self) -> None:
        self._file.close()


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None


def standard_library() -> list[Path]:
    """Return the source files of Python's standard library, in a fixed, mixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(folder) for path in folder.rglob("*.py")]
    names = [name for name in names if not _NOT_LIBRARY & set(name.parts[:-1]) and (folder / name).is_file()]
    if not names:
        raise InputError(f"{folder} has no source files of Python's standard library; give text files instead")
    return [folder / name for name in sorted(names, key=lambda name: (zlib.crc32(name.as_posix().encode()), name))]


class Columns:
    """Streams of text read in parallel, one per sample of a batch, a chunk at a time."""

    def __init__(self, corpus: Corpus, starts: Sequence[int], length: int, unroll: int) -> None:
        """Each column has `length` symbols from its start, and their labels, in chunks of at most `unroll` symbols."""
        self._corpus, self._starts, self._length = corpus, starts, length
        self.columns: Final = len(starts)
        self.pieces: Final = -(-length // unroll)
        # The file is read in groups of chunks, a few megabytes for all columns together.
        self._group = max(1, min(self.pieces, (1 << 22) // (len(starts) * unroll * corpus.dtype.itemsize)))
        self._loaded = -1
        self._block = np.empty((len(starts), self._group * unroll + 1), corpus.dtype)
        self._tokens = np.empty((unroll + 1, len(starts)), np.int64)

    def _edge(self, piece: int) -> int:
        return piece * self._length // self.pieces

    def piece(self, index: int) -> tuple[Array, Array]:
        """Return symbols ``[T, columns]`` and the symbols after each, in buffers that the next call overwrites."""
        group = index // self._group
        begin = self._edge(group * self._group)
        if group != self._loaded:
            self._loaded = -1
            width = self._edge(min((group + 1) * self._group, self.pieces)) - begin + 1
            for row, start in zip(self._block, self._starts, strict=True):
                self._corpus.read(start + begin, row[:width])
            self._loaded = group
        first, last = self._edge(index) - begin, self._edge(index + 1) - begin
        tokens = self._tokens[: last - first + 1]
        tokens[...] = self._block[:, first : last + 1].T
        return tokens[:-1], tokens[1:]


# ---- the model -------------------------------------------------------------------------------------------------------


class TextModel(nn.Module):
    """From ``tokens [T, N]`` to logits ``[T, N, V]`` of the next symbols."""

    def __init__(self, symbols: int, settings: TextSettings, rng: np.random.Generator) -> None:
        hidden, between = settings.hidden, settings.dropout if settings.layers > 1 else 0.0
        embedding = nn.Embedding(symbols, settings.embedding, rng=rng)
        self.lstm = nn.LSTM(
            settings.embedding, hidden, embedding=embedding, layers=settings.layers, dropout=between, rng=rng
        )
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(settings.dropout, rng=rng)
        self.head = nn.Linear(hidden, symbols, rng=rng)

    def zero_states(self, columns: int) -> tuple[Array, Array]:
        """Return the states that sequences start from."""
        shape = (self.lstm.layers, columns, self.lstm.hidden)
        return np.zeros(shape, self.dtype), np.zeros(shape, self.dtype)

    def forward(self, tokens: Any, h: Any = None, c: Any = None) -> tuple[Any, Any, Any]:
        """Return the logits and the final states of the LSTM. `h` and `c` are its initial states, zeros if None."""
        y, state = self.lstm.run(tokens, None if h is None else (h, c))
        return self.head(self.dropout(self.norm(y))), state.h, state.c


class _Predicting(nn.Module):
    """A text model with its loss: from tokens, the symbols that follow them, and states to the loss and new states."""

    def __init__(self, model: TextModel, loss: nn.Loss) -> None:
        self.model, self.loss = model, loss

    def forward(self, tokens: Any, labels: Any, h: Any, c: Any) -> tuple[Any, Any, Any]:
        logits, h, c = self.model(tokens, h, c)
        return self.loss(logits, labels), h, c


class TextTask(Task):
    """Train on text files, or on the source of Python's standard library if there are none.

    The training text is split into `batch` columns that are read in parallel, `unroll` symbols at a time. Each chunk
    starts from the final states of the previous one; a new epoch starts from zero states.
    """

    kind = "text"
    use = "retrograd sample"
    settings: TextSettings
    model: TextModel

    def __init__(
        self,
        settings: TextSettings,
        files: Sequence[str | os.PathLike[str]],
        *,
        scratch: str | os.PathLike[str],
        group: Group | None = None,
    ) -> None:
        """`scratch` is a directory for the encoded text, which `close` deletes."""
        self.settings, self.group = settings, group or self.group
        self._files = [Path(name) for name in files]
        self._corpus = Corpus(self._files or standard_library(), settings.level, settings.alphabet, scratch)
        try:
            self._prepare()
        except MemoryError:
            self.close()
            raise InputError(
                f"not enough memory for --layers {settings.layers} of --hidden {settings.hidden}, "
                f"--embedding {settings.embedding} and --batch {settings.batch}; reduce them"
            ) from None
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        settings, corpus = self.settings, self._corpus
        self.alphabet = corpus.alphabet
        self._unit = "byte" if self.alphabet.level == "byte" else "character"
        self.measure, self.items = f"bits per {self._unit}", f"{self._unit}s"
        self._check_length()
        self._train_length = corpus.length - _held_out(corpus.length, settings.validation)

        length = (self._train_length - 1) // settings.batch
        starts = [column * length for column in range(settings.batch)]
        # A rank reads the columns of its own shards.
        group = self.group
        check_shards(group, settings.batch, "--batch")
        self._columns = Columns(corpus, starts[group.rank_part(settings.batch)], length, settings.unroll)
        self.steps = settings.steps or min(self.longest(), _MOST_STEPS)
        self._sizes_validation = settings.validation_items is None
        self._validation = self._validation_columns()

        self.model = TextModel(len(self.alphabet), settings, np.random.default_rng(settings.seed))
        self.validate_every = steps_between_validations(settings, self.steps)
        self.optimizer = new_optimizer(self.model, settings, self.steps)
        total = _Predicting(self.model, nn.SoftmaxCrossEntropy(reduction="sum"))
        self._total = Programs(total, [total], training=False, num_threads=settings.threads)
        self._h, self._c = self.model.zero_states(settings.batch)

    def plan(self, steps: int, validate_every: int | None = None) -> None:
        super().plan(steps, validate_every)
        if self._sizes_validation and not self.optimizer.steps:  # later validations must be comparable
            self._validation = self._validation_columns()

    def longest(self) -> int:
        return max(_PASSES * self._columns.pieces, _LEAST_STEPS)

    def _check_length(self) -> None:
        settings, corpus = self.settings, self._corpus
        what = str(self._files[0]) if len(self._files) == 1 else "the text"
        if not corpus.length:
            raise InputError(f"{what} is empty")
        if corpus.length < (needed := _needed(settings, settings.batch, settings.unroll)):
            fitting = next(
                (
                    f"; --batch {batch} --unroll {unroll} would do"
                    for batch, unroll in ((16, 64), (16, 32), (8, 32), (8, 16), (4, 16), (4, 8), (2, 4), (1, 1))
                    if _needed(settings, batch, unroll) <= corpus.length
                ),
                "",
            )
            raise InputError(
                f"{what} has {corpus.length:,} {self._unit}s, but --batch {settings.batch} and --unroll "
                f"{settings.unroll} need at least {needed:,}, validation included{fitting}"
            )
        if corpus.distinct == 1:
            raise InputError(f"{what} has only one {self._unit}, repeated {corpus.length:,} times: nothing to predict")

    def _validation_columns(self) -> Columns:
        """Return columns spread over the held-out text. They are few, so that few symbols have little context."""
        settings, labels = self.settings, self._corpus.length - self._train_length - 1
        items = settings.validation_items
        if items is None or self._sizes_validation:
            trained = self.steps * settings.batch * settings.unroll
            items = max(_LEAST_VALIDATED, min(_MOST_VALIDATED, round(_VALIDATED_SHARE * trained)))
            self.settings = dataclasses.replace(settings, validation_items=items)  # a run that is extended keeps it
        used = min(labels, items)
        columns = max(1, min(64, used // 256))
        starts = [self._train_length + column * (labels // columns) for column in range(columns)]
        unroll = max(1, min(64, (1 << 22) // (columns * len(self.alphabet))))  # logits are allocated for each piece
        return Columns(self._corpus, starts, used // columns, unroll)

    def step(self) -> tuple[float, int]:
        index = self.optimizer.steps % self._columns.pieces
        if index == 0:
            self._h.fill(0)
            self._c.fill(0)
        tokens, labels = self._columns.piece(index)
        batch = self.settings.batch

        def work(shard: Shard[_Predicting]) -> float:
            part, here, share = shard.part(batch), shard.part_of_rank(batch), shard.share(batch)
            given = (tokens[:, here], labels[:, here], self._h[:, part], self._c[:, part])
            loss, h, c = shard.step(*map(np.ascontiguousarray, given), share=share)
            self._h[:, part], self._c[:, part] = h, c
            return share * float(loss)

        return sum(self.parallel.run(work)) * _BITS, len(labels) * batch

    def _new_parallel(self) -> DataParallel[_Predicting]:
        model = _Predicting(self.model, nn.SoftmaxCrossEntropy())
        return DataParallel(model, self.group, None, self.optimizer, num_threads=self.settings.threads)

    def validate(self) -> float:
        total, symbols = 0.0, 0
        h, c = self.model.zero_states(self._validation.columns)
        for index in range(self._validation.pieces):
            tokens, labels = self._validation.piece(index)
            loss, h, c = self._total(tokens, labels, h, c)
            total, symbols = total + loss, symbols + labels.size
        return total / symbols * _BITS

    def arrays(self) -> dict[str, Array]:
        return {"h": self._h, "c": self._c}

    def gather(self) -> None:
        batch, group = self.settings.batch, self.group
        states = group.run(lambda shard: [state[:, group.part(batch, shard)] for state in (self._h, self._c)])
        for shard, (h, c) in enumerate(states):
            part = group.part(batch, shard)
            self._h[:, part], self._c[:, part] = h, c

    def source(self) -> dict[str, Any]:
        # Identified by content, not by path: files may move before a run is resumed.
        corpus = self._corpus
        return {"files": corpus.files, "bytes": corpus.bytes, "crc32": f"{corpus.crc32:08x}"}

    def _where(self) -> str:
        if not self._files:
            return f"the standard library of Python {platform.python_version()}"
        return str(self._files[0]) if len(self._files) == 1 else f"{len(self._files)} files"

    def description(self) -> dict[str, Any]:
        return self.alphabet.record()

    def overview(self) -> list[tuple[str, str]]:
        settings, corpus = self.settings, self._corpus
        held_out = corpus.length - self._train_length
        layers = "1 LSTM layer" if settings.layers == 1 else f"{settings.layers} LSTM layers"
        passes = self.steps / self._columns.pieces
        epochs = f"{passes:.2g}" if passes < 10 else f"{passes:,.0f}"
        rows = [
            (
                "text",
                f"{self._where()}: {corpus.length:,} {self._unit}s, {corpus.distinct:,} distinct, "
                f"{held_out:,} held out",
            ),
            ("model", f"{layers} of {settings.hidden} units, {self.model.num_parameters:,} parameters"),
            (
                "training",
                f"{self.steps:,} steps of {settings.batch} x {settings.unroll} {self._unit}s, {epochs} epochs",
            ),
        ]
        kept = len(self.alphabet.characters)
        if corpus.why_bytes:
            rows.insert(1, ("level", f"bytes, because {corpus.why_bytes}"))
        elif self.alphabet.level == "char" and kept < corpus.distinct:
            share = 100 * corpus.unknown / corpus.length
            others = f"the others, {share:.2g} % of the text, become one unknown symbol"
            rows.insert(1, ("alphabet", f"{kept} of {corpus.distinct:,} characters; {others}"))
        return rows

    def in_force(self) -> dict[str, Any]:
        settings = {**super().in_force(), "level": self.alphabet.level}
        if self.alphabet.level == "byte":
            del settings["alphabet"]
        return settings

    def close(self) -> None:
        self._corpus.close()

    # ---- results -----------------------------------------------------------------------------------------------------

    def outcome(self) -> Outcome:
        bits = self.validate()
        return Outcome(self._headline(bits), self._sections(bits))

    def _headline(self, bits: float) -> list[Block]:
        """Return whether the model, of so many bits per symbol, beats n-gram counts, and by how much."""
        counted = self._counted
        least = min(counted)
        by = NGRAMS[counted.index(least)].counted
        numbers = f"{bits:.3f} {self.measure} against {least:.3f}"
        if abs(bits - least) <= max(0.01 * least, 0.005):
            return [Prose(f"The model does not beat {by}: they hardly differ ({numbers}).")]
        if bits > least:
            worse = f", by {100 * (bits / least - 1):.0f} %" if least > 0.01 else ""
            advice = (
                "It was still improving: more --steps may help."
                if self.improving
                else f"It needs more text than {self._train_length:,} {self._unit}s; a smaller --hidden or some "
                "--dropout may help."
            )
            return [Prose(f"The model is WORSE than {by}{worse} ({numbers}). {advice}")]
        return [Prose(f"The model beats {by} by {100 * (1 - bits / least):.0f} % ({numbers}).")]

    def _sections(self, bits: float) -> list[Section]:
        counted = self._counted
        rows = [[f"all {len(self.alphabet)} symbols equally likely", f"{math.log2(len(self.alphabet)):.3f}"]]
        rows += [[ngram.predictor, f"{value:.3f}"] for ngram, value in zip(NGRAMS, counted, strict=False)]
        rows.append(["this model", f"{bits:.3f}"])
        values = [float(row[1]) for row in rows]
        compared: list[Block] = [
            Prose(
                f"Bits per {self._unit} of the validation text: lower is better. The baselines are n-gram counts of "
                "the training text."
            ),
            Table(["predictor", self.measure], rows, highlight=values.index(min(values))),
        ]
        written = "".join(sample(self.model, self.alphabet, 600, temperature=0.7, seed=0))
        return [
            Section("Comparison with n-gram baselines", compared, in_terminal=False),
            Section(
                "Sample",
                [Prose("Generated by the model, temperature 0.7, without a prompt."), Sample(written)],
                in_terminal=False,
            ),
        ]

    @functools.cached_property
    def _counted(self) -> list[float]:
        """Bits per symbol of the validation text, predicted from n-gram counts of the training text."""
        counts = count_ngrams(len(self.alphabet), self._training_text(_MOST_COUNTED))
        return ngram_bits(counts, map(self._validation.piece, range(self._validation.pieces)))

    def _training_text(self, most: int) -> Iterator[Array]:
        length = min(self._train_length, most)
        for start in range(0, length, _PIECE):
            text = np.empty(min(_PIECE, length - start), self._corpus.dtype)
            self._corpus.read(start, text)
            yield text


def _needed(settings: TextSettings, batch: int, unroll: int) -> int:
    """Return the length of the shortest text that a batch of this size can be trained on, validation included."""
    train = batch * unroll + 1
    needed = max(train + 2, math.floor(train / (1 - settings.validation)))
    while needed - _held_out(needed, settings.validation) < train:
        needed += 1
    return needed


def _held_out(length: int, share: float) -> int:
    """Return the number of symbols held out at the end of a text: one to start from, and at least one to predict."""
    return max(2, round(length * share))


# ---- the trained model -----------------------------------------------------------------------------------------------


def load_text_model(path: str | os.PathLike[str]) -> tuple[TextModel, Alphabet]:
    """Load a model from a run directory or a model file, in evaluation mode, and its alphabet."""
    with opened_model(path, TextTask.kind) as (file, metadata):
        alphabet = Alphabet.from_record(metadata["description"])
        settings = TextSettings.from_record(metadata["settings"])
        ends = len(alphabet) * (settings.embedding + settings.hidden)
        check_room(file, settings.least_weights() + ends)
        model = TextModel(len(alphabet), settings, np.random.default_rng(0))
        load_weights(file, model)
    return model.eval(), alphabet


def sample(
    model: TextModel,
    alphabet: Alphabet,
    length: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    prompt: str = "",
    seed: int = 0,
) -> Iterator[str]:
    """Generate `length` symbols after the prompt, and yield the text piece by piece.

    Logits are divided by `temperature`: below 1 likely symbols become likelier, and 0 always takes the most likely one.
    With `top_k` only the `top_k` most likely symbols are sampled. The same seed gives the same text.
    """
    if length < 0:
        raise InputError(f"the length is {length}, must be at least 0")
    if not (0 <= temperature < math.inf):
        raise InputError(f"the temperature is {temperature}, must be a number and at least 0")
    if top_k is not None and top_k < 1:
        raise InputError(f"top-k is {top_k}, must be at least 1")
    given = alphabet.encode(prompt)
    if not len(given):
        given = np.array([alphabet.start])
    draw = _chooser(alphabet, temperature, top_k, np.random.default_rng(seed))
    return alphabet.decode(_indices(model, given, length, draw))


def _indices(model: TextModel, given: Array, length: int, draw: Callable[[Array], int]) -> Iterator[int]:
    logits, (h, c) = np.empty(0), model.zero_states(1)
    for start in range(0, len(given), 256):
        found, h, c = model.predict(given[start : start + 256, None], h, c)
        logits = found[-1, 0]
    token = np.empty((1, 1), np.int64)
    for left in range(length, 0, -1):
        index = draw(logits)
        yield index
        if left > 1:
            token[0, 0] = index
            found, h, c = model.predict(token, h, c)
            logits = found[0, 0]


def _chooser(
    alphabet: Alphabet, temperature: float, top_k: int | None, rng: np.random.Generator
) -> Callable[[Array], int]:
    """Return a function that samples a symbol from logits."""

    def choose(logits: Array) -> int:
        logits = logits.astype(np.float64)
        if alphabet.unknown is not None:
            logits[alphabet.unknown] = -math.inf
        best = logits.max()
        if temperature == 0:
            return int(logits.argmax())
        if top_k is not None and top_k < len(logits):
            logits[np.argsort(-logits, kind="stable")[top_k:]] = -math.inf
        with np.errstate(over="ignore", divide="ignore"):  # with a tiny temperature all but the best underflow
            weights = np.exp((logits - best) / temperature)
        reached = np.cumsum(weights)
        return int(np.searchsorted(reached, rng.random() * reached[-1], side="right"))

    return choose
