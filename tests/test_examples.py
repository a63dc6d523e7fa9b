"""Every example runs as a user would run it, learns, and reaches what it promises."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.waiting import PATIENCE

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent.parent / "examples").glob("*.py"))}
SPELLINGS = (("bnns_digits", "bnns_digits_c"), ("mpsgraph_digits", "mpsgraph_digits_pyobjc"))  # of one program each
SLOW = ("bnns_handwritten_digits", "bnns_text_classifier", "nn_characters", "nn_ragged_classification")
SCIKIT_LEARN = ("bnns_handwritten_digits", "mpsgraph_digits", "mpsgraph_digits_pyobjc")

# What an example prints about data that it has not been trained on, and the least that it must reach.
CLAIMS = {
    "bnns_attention": (r"([0-9.]+) % of the variance of new values", 85),
    "bnns_digits": (r"(\d+) of 32 new digits are right", 32),
    "bnns_digits_c": (r"(\d+) of 32 new digits are right", 32),
    "bnns_graph_fine_tune": (r"after fine-tuning: ([0-9.]+) % correct", 98),
    "bnns_handwritten_digits": (r"new digits are right: ([0-9.]+) %", 97),
    "bnns_normalization": (r"with moving statistics: (\d+)% correct", 95),
    "bnns_perceptron": (r"([0-9.]+) % of the variance of new values", 98),
    "bnns_text_classifier": (r"new sentences: .* ([0-9.]+) % after", 95),
    "min_gru": (r"500 new sequences: ([0-9.]+)% recalled", 98),
    "min_lstm": (r"200 new sequences: ([0-9.]+)% of", 99),
    "mpsgraph_digits": (r"new digits are right: ([0-9.]+) %", 97),
    "mpsgraph_digits_pyobjc": (r"new digits are right: ([0-9.]+) %", 97),
    "nn_images": (r"200 new images: .* ([0-9.]+)% correct", 95),
    "nn_ragged_classification": (r"longer: ([0-9.]+)% of \d+ correct", 95),
    "nn_tagger": (r"200 new sentences: ([0-9.]+)% of \d+ tags", 98),
    "nn_transformer": (r"200 new sequences: ([0-9.]+)% of", 98),
}


def run(stem: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES[stem]), *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)


def checked(stem: str, *arguments: str | Path) -> str:
    """The output of an example that has learned what it promises."""
    if stem in SCIKIT_LEARN and not arguments and importlib.util.find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    ended = run(stem, *arguments)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # What `fit` says about its epochs goes to stderr.
    losses = [float(number) for number in re.findall(r"loss:? +([0-9.]+)", ended.stderr + ended.stdout)]
    assert len(losses) >= 4, ended.stdout
    assert losses[-1] < 0.5 * losses[0]
    if stem in CLAIMS:
        pattern, least = CLAIMS[stem]
        (reached,) = re.findall(pattern, ended.stdout)
        assert float(reached) >= least
    return ended.stdout


def test_there_is_one_for_each_kernel() -> None:
    assert set(EXAMPLES) >= {*CLAIMS, "bnns_lstm", "bnns_two_layer_regression", "mps_matrix_batch_normalization"}


@pytest.mark.parametrize(
    "stem",
    [
        pytest.param(stem, marks=pytest.mark.long if stem in SLOW else ())
        for stem in EXAMPLES
        if not any(stem in spellings for spellings in SPELLINGS)
    ],
)
def test_the_loss_falls(stem: str) -> None:
    checked(stem)


@pytest.mark.long
@pytest.mark.parametrize("spellings", SPELLINGS, ids=[first for first, _ in SPELLINGS])
def test_both_spellings_of_a_sample_print_the_same_losses(spellings: tuple[str, str]) -> None:
    one, other = (checked(stem) for stem in spellings)
    assert one == other
    if "bnns_digits" in spellings:  # stops where Apple's sample does
        (stopped,) = re.findall(r"loss ([0-9.]+), below 0.125", one)
        assert float(stopped) < 0.125


# ---- files of MNIST --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """The example as a module, for its functions that read files."""
    spec = importlib.util.spec_from_file_location("handwritten_digits", EXAMPLES["bnns_handwritten_digits"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder: Path, *, shuffled: bool = False) -> dict[str, np.ndarray]:
    """Four small files in the forms that MNIST is found in. Each digit is a pattern of 12 x 9 pixels with noise; with
    shuffled labels there is nothing to learn."""
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 200, (10, 12, 9))
    arrays = {}
    for part, count in (("train", 640), ("t10k", 100)):
        labels = rng.integers(0, 10, count)
        images = patterns[labels] + rng.integers(0, 56, (count, 12, 9))
        arrays[f"{part}-images-idx3-ubyte"] = images.astype(np.uint8)
        arrays[f"{part}-labels-idx1-ubyte"] = (rng.permutation(labels) if shuffled else labels).astype(np.uint8)
    names = [
        "train-images-idx3-ubyte.gz",
        "train-labels-idx1-ubyte",
        "t10k-images.idx3-ubyte",
        "t10k-labels.idx1-ubyte.gz",
    ]
    for name, array in zip(names, arrays.values(), strict=True):
        content = idx(array)
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return arrays


def test_files_of_mnist_are_read(digits: ModuleType, tmp_path: Path) -> None:
    arrays = list(write_mnist(tmp_path).values())
    train, held_out = digits.mnist_digits(tmp_path)
    for part, images, labels in ((train, *arrays[:2]), (held_out, *arrays[2:])):
        np.testing.assert_allclose(part.images, images / 255, rtol=1e-6)
        assert part.images.dtype == np.float32
        np.testing.assert_array_equal(part.labels, labels)


def test_files_of_mnist_are_learned(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    checked("bnns_handwritten_digits", tmp_path, "--epochs", "4")


def test_an_example_that_has_not_learned_says_so(tmp_path: Path) -> None:
    write_mnist(tmp_path, shuffled=True)
    ended = run("bnns_handwritten_digits", tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == ""
    assert "of 100 new digits are right" in ended.stdout
    assert " is read as " in ended.stdout


BYTES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with nothing, expected 00 00 08 03: an IDX file of bytes with 3 axes"),
        (b"<html>", "begins with 3c 68 74 6d, expected 00 00 08 03"),
        (idx(BYTES[0]), "begins with 00 00 08 02, expected 00 00 08 03"),
        (b"\0\0\x0d\x03" + idx(BYTES)[4:], "begins with 00 00 0d 03, expected 00 00 08 03"),
        (idx(BYTES)[:11], "has 11 bytes, but its header alone has 16"),
        (idx(BYTES)[:-1], r"has 23 elements, but its header says \(2, 3, 4\)"),
        (idx(BYTES) + b"\0", r"has 25 elements, but its header says \(2, 3, 4\)"),
        (gzip.compress(idx(BYTES))[:-9], "cannot be unpacked: "),
        (gzip.compress(idx(BYTES))[:12] + bytes(30), "cannot be unpacked: "),
    ],
    # Named here, since gzip writes the time into its header.
    ids=["empty", "web page", "two axes", "floats", "header cut", "one less", "one more", "gzip cut", "gzip damaged"],
)
def test_damaged_files_are_refused(digits: ModuleType, tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(idx(BYTES))
    np.testing.assert_array_equal(digits.read_idx(path, 3), BYTES)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"images {message}"):
        digits.read_idx(path, 3)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("t10k-labels.idx1-ubyte.gz", np.zeros(99, np.uint8), "has 100 images, but .*ubyte.gz has 99 labels"),
        ("train-labels-idx1-ubyte", np.full(640, 10, np.uint8), "has the label 10, expected 0 to 9"),
        ("t10k-images.idx3-ubyte", np.zeros((100, 9, 12), np.uint8), r"\(12, 9\) pixels, those held out \(9, 12\)"),
        ("t10k-images.idx3-ubyte", np.zeros((0, 12, 9), np.uint8), "has no images"),
        ("train-images-idx3-ubyte.gz", np.zeros((640, 1, 9), np.uint8), "has images of 1 x 9 pixels: too small"),
    ],
)
def test_files_that_do_not_go_together_are_refused(
    digits: ModuleType, tmp_path: Path, name: str, array: np.ndarray, message: str
) -> None:
    write_mnist(tmp_path)
    (tmp_path / name).write_bytes(idx(array))
    with pytest.raises(ValueError, match=message):
        digits.mnist_digits(tmp_path)


def test_a_missing_file_is_named_without_a_traceback(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "t10k-images.idx3-ubyte").unlink()
    ended = run("bnns_handwritten_digits", tmp_path)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert f"{tmp_path} has no file t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz or " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_scikit_learn_the_example_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('not here')")
    ended = run("bnns_handwritten_digits", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.strip() == (
        "scikit-learn is not installed: run `pip install scikit-learn`, or give a folder with MNIST's files"
    )
