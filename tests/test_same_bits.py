"""Results have the saved bits at every instruction-set level, whatever the caches are, and so does a trained model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core, cli
from retrograd.lab import bits, reference
from support.waiting import PATIENCE

NO_RESULTS = {
    "get_num_threads",
    "set_num_threads",
    "release_memory",
    "lstm_cache_size",
    "gru_cache_size",
    "rnn_cache_size",
}
KIB = 1024


# Sizes of caches that decide differently about the order of work and the kind of stores; None: the machine's.
CACHES = {
    "machine": None,
    "tiny": (KIB, 4 * KIB, 16 * KIB, 1),
    "huge": (KIB * KIB, 64 * KIB * KIB, 1024 * KIB * KIB, 1),
}


@pytest.fixture
def _own_caches() -> Iterator[None]:
    yield
    _core.restore_caches()


# The scalar level is slow. With the machine's caches `retrograd verify --bits` runs it too. Other caches change the
# drivers' order of work, which is the same at every level: the highest is enough to notice.
@pytest.mark.parametrize(
    ("level", "caches"),
    [
        pytest.param(
            level,
            caches,
            marks=pytest.mark.long
            if level == "scalar" or (level != _core.isa_levels()[-1] and caches != "machine")
            else (),
        )
        for level in _core.isa_levels()
        for caches in CACHES
        if level != "scalar" or caches == "tiny"
    ],
)
@pytest.mark.usefixtures("_own_caches")
def test_bits_are_those_that_were_saved(level: str, caches: str) -> None:
    sizes = CACHES[caches]
    if sizes is not None:
        _core.override_caches(*sizes)
    threads = [3] if level == "scalar" else [1, 3]
    assert [row for row in bits.compare_bits([level], threads) if not row.ok] == []


def rounded(exact: Fraction) -> np.float32:
    """The nearest float32, ties to even; of numbers that float64 holds to more than its 53 bits, too."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.uint32)) & 1))


def test_a_multiply_add_rounds_once(isa: str) -> None:
    """Products of two terms, x0 w0 + x1 w1, where the second is close to a tie, to a cancellation or to underflow."""
    rng = np.random.default_rng(3)
    count = 1000
    x = rng.standard_normal((4, count, 2)).astype(np.float32)
    x *= np.exp2(rng.integers(-40, 40, (4, count, 2))).astype(np.float32)
    w = np.array([1, 1 - 2.0**-15], np.float32)
    x[0, :, 1] = -x[0, :, 0]  # cancels
    x[1] *= np.float32(2.0**-100)  # subnormal
    # A tie of float32 but for 2**-30 of the second term, which rounding to float64 would lose; both signs.
    odd = (1 + 2.0**-22 * rng.integers(0, 2**21, count) + 2.0**-23) * np.exp2(rng.integers(-40, 40, count))
    x[2, :, 0] = odd * rng.choice([-1, 1], count)
    x[2, :, 1] = np.exp2(np.floor(np.log2(odd)) - 24) * (1 + 2.0**-15) * rng.choice([-1, 1], count)
    x = x.reshape(-1, 2)
    got = rg.linear_forward(x, w[None])[:, 0]
    first = [rounded(Fraction(float(a)) * Fraction(float(w[0]))) for a in x[:, 0]]
    exact = [
        Fraction(float(p)) + Fraction(float(b)) * Fraction(float(w[1])) for p, b in zip(first, x[:, 1], strict=True)
    ]
    assert np.array_equal(got, np.array([rounded(e) for e in exact]))


def test_every_function_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            called.add(name)
            return function(*arguments, **options)

        return call

    functions = {name for name in rg.__all__ if name.islower()} - NO_RESULTS
    for name in functions:
        monkeypatch.setattr(rg, name, watched(name, getattr(rg, name)))
    bits.digests()
    assert called == functions


def test_every_operation_of_graphs_takes_part() -> None:
    saved = bits.saved_digests()
    for name in reference.GRAPH:
        assert {f"graph {name} {dtype}" for dtype in ("float32", "float64")} <= saved.keys()


def test_a_difference_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bits, "SAVED", tmp_path / "bits.json")
    found = {"first": "0123456789abcdef", "second": "0123456789abcdef"}
    monkeypatch.setattr(bits, "digests", lambda: dict(found))
    assert cli.main(["verify", "--bits", "--write"]) == 0
    assert bits.saved_digests() == found
    found["second"] = "0"
    assert cli.main(["verify", "--bits", "--isa", "scalar", "--threads", "1"]) == 1
    assert "second: DIFFERENT BITS at scalar with 1 threads" in capsys.readouterr().out
    assert cli.main(["verify", "--bits", "--rows", "first"]) == 0
    del found["first"]
    assert cli.main(["verify", "--bits", "--rows", "first"]) == 1


@pytest.mark.parametrize(
    "options",
    [["--write"], ["--bits", "--all"], ["--bits", "--write", "--rows", "lstm*"], ["--bits", "--rows", "none such"]],
)
def test_options_that_do_not_go_together(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", *options]) == 2
    assert "retrograd: error:" in capsys.readouterr().err


def test_nan_is_one_value_and_zero_has_a_sign() -> None:
    nan = np.array([1, np.nan], np.float32)
    assert bits._digest([nan]) == bits._digest([-nan * np.float32([-1, 1])])
    assert bits._digest([np.array([0.0])]) != bits._digest([np.array([-0.0])])
    assert bits._digest([np.zeros((2, 3))]) != bits._digest([np.zeros((3, 2))])
    assert bits._digest([None]) != bits._digest([])


@pytest.mark.long
def test_a_trained_model_has_the_same_bytes_at_every_level(tmp_path: Path) -> None:
    """The command of `make demo`, with a small model and few steps."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n * n % 97} times {n % 13} is not {n * 31 % 59}.\n" for n in range(400)))
    models = set()
    for level in _core.isa_levels():
        options = ["--learning-rate", "0.005", "--steps", "8", "--validate-every", "4", "--warm-up", "2"]
        size = ["--hidden", "40", "--embedding", "24", "--batch", "8", "--unroll", "16", "--layers", "2"]
        subprocess.run(
            [sys.executable, "-m", "retrograd", "train", "text", text, "--output", tmp_path / level, *options, *size],
            env={**os.environ, "RETROGRAD_ISA": level},
            check=True,
            capture_output=True,
            timeout=PATIENCE,
        )
        models.add((tmp_path / level / "model.safetensors").read_bytes())
    assert len(models) == 1
