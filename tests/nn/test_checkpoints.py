"""retrograd.nn: checkpoints: training goes on bit for bit, files are whole, and damaged ones are refused."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import nn
from retrograd._files import write_whole
from support.nn import random
from support.waiting import PATIENCE

DATA = Path(__file__).parents[1] / "data"

# ---- files of earlier code -------------------------------------------------------------------------------------------


class Characters(nn.Module):
    def __init__(self, rng: np.random.Generator) -> None:
        embedding = nn.Embedding(11, 6, padding_index=0, rng=rng)
        self.lstm = nn.LSTM(6, 7, embedding=embedding, layers=2, dropout=0.25, rng=rng)
        self.norm = nn.LayerNorm(7, activation="gelu")
        self.dropout = nn.Dropout(0.2, rng=rng)
        self.head = nn.Linear(7, 11, rng=rng)
        self.loss = nn.SoftmaxCrossEntropy(label_smoothing=0.1)

    def forward(self, x: Any, labels: Any, state: Any) -> Any:
        y, state = self.lstm.run(x, state)
        return self.loss(self.head(self.dropout(self.norm(y))), labels), state


def images(rng: np.random.Generator) -> nn.Sequential:
    return nn.Sequential(
        conv=nn.Conv(1, 5, 3, padding=1, rng=rng),
        norm=nn.BatchNorm(5, activation="relu"),
        pool=nn.MaxPool(2),
        up=nn.ConvTranspose(5, 3, 2, activation="tanh", rng=rng),
        flat=nn.Flatten(),
        drop=nn.Dropout(0.5, rng=rng),
        head=nn.Linear(75, 4, rng=rng),
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("start", [0, 4], ids=["from the start", "resumed"])
@pytest.mark.parametrize("kind", ["characters", "images"])
def test_training_gives_the_bits_of_earlier_files(kind: str, start: int, threads: int) -> None:
    """Files of 4 and of 8 steps, written when each layer still had a backward pass of its own."""
    from safetensors.numpy import load_file

    rng = np.random.default_rng(7)
    model: nn.Module
    optimizer: nn.Optimizer
    if kind == "characters":
        model = Characters(rng)
        optimizer = nn.AdamW(model, nn.Cosine(1e-2, steps=20, warm_up=3, final=1e-3), maximum_norm=0.5)
        step = nn.compile(model, None, optimizer, num_threads=threads)
    else:
        model = images(rng)
        optimizer = nn.SGD(model, nn.Constant(0.05, 2), momentum=0.9, nesterov=True, weight_decay=1e-3)
        step = nn.compile(model, nn.SoftmaxCrossEntropy(label_smoothing=0.1), optimizer, num_threads=threads)
    state = nn.LstmState(*np.zeros((2, 2, 5, 7), np.float32))
    arrays = state._asdict() if kind == "characters" else {}
    if start:
        nn.load(DATA / f"{kind}-4.safetensors", model, optimizer, arrays=arrays)
    losses = []
    for number in range(start, 8):
        draw = np.random.default_rng(number)
        if kind == "characters":
            x = draw.integers(0, 11, (9, 5))
            loss, state = step(x, np.where(x == 3, -100, (x + 1) % 11), state)
            losses.append(loss)
        else:
            x = draw.standard_normal((6, 1, 8, 8), dtype=np.float32)
            losses.append(step(x, draw.integers(0, 4, 6)))
    expected = load_file(DATA / f"{kind}-8.safetensors")
    found = {f"model.{name}": array for name, array in model.state_dict().items()}
    found |= {f"optimizer.{name}": array for name, array in optimizer.state_dict().items()}
    found |= {f"array.{name}": array for name, array in state._asdict().items()} if kind == "characters" else {}
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].tobytes()) == (array.dtype, array.tobytes()), name
    saved = nn.read_metadata(DATA / f"{kind}-8.safetensors")["losses"][start:]
    np.testing.assert_allclose(losses, saved, rtol=1e-6)  # those were float64


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def small(seed: int = 0) -> tuple[nn.Sequential, nn.Optimizer]:
    rng = np.random.default_rng(seed)
    model = nn.Sequential(
        lstm=nn.LSTM(4, 5, layers=2, dropout=0.4, rng=rng),
        drop=nn.Dropout(0.3, rng=rng),
        norm=nn.BatchNorm(5, channel_axis=-1),
        head=nn.Linear(5, 2, rng=rng),
    )
    return model, nn.Adam(model, nn.Cosine(1e-2, 50), amsgrad=True)


def steps_of(model: nn.Module, optimizer: nn.Optimizer, count: int) -> list[float]:
    x, target = random(6, 3, 4, dtype=np.float32), random(6, 3, 2, seed=1, dtype=np.float32)
    step = nn.compile(model, nn.MeanSquaredError(), optimizer)
    return [step(x, target) for _ in range(count)]


def bits(model: nn.Module, optimizer: nn.Optimizer) -> dict[str, bytes]:
    return {name: a.tobytes() for name, a in {**model.state_dict(), **optimizer.state_dict()}.items()}


def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = small()
    steps_of(model, optimizer, 5)
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer, metadata={"epoch": 5, "note": "ünïcode", "nested": [1, {"a": None}]})
    nn.save(tmp_path / "same", model, optimizer, metadata=nn.read_metadata(path))
    assert (tmp_path / "same").read_bytes() == path.read_bytes()
    (tmp_path / "same").unlink()
    losses = steps_of(model, optimizer, 5)
    again, other = small(seed=1)
    assert nn.load(path, again, other) == {"epoch": 5, "note": "ünïcode", "nested": [1, {"a": None}]}
    assert other.steps == 5
    assert steps_of(again, other, 5) == losses
    assert bits(again, other) == bits(model, optimizer)
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(str(path), model)
    again, other = small(seed=1)
    with pytest.raises(ValueError, match="has no optimizer's state, not that of Adam"):
        nn.load(path, again, other)
    assert nn.load(str(path), again) == {}
    assert again.state_dict()["head.w"].tobytes() == model.state_dict()["head.w"].tobytes()
    nn.save(path, model, optimizer)
    assert nn.load(path, again) == {}  # for use, not for more training
    with pytest.raises(ValueError, match="has the state of Adam, not that of SGD"):
        nn.load(path, again, nn.SGD(again, 0.1))


def test_a_checkpoint_with_arrays_of_ones_own(tmp_path: Path) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    h, position = np.arange(12.0, dtype=np.float32).reshape(3, 4).T, np.array(7)
    nn.save(path, model, optimizer, arrays={"h": h, "position": position}, metadata={"hidden": 3})
    assert nn.read_metadata(path) == {"hidden": 3}
    place = {"h": np.zeros((4, 3), np.float32), "position": np.array(0)}
    assert nn.load(path, model, arrays=place) == {"hidden": 3}
    np.testing.assert_array_equal(place["h"], h)
    assert place["position"] == 7
    assert nn.load(path, model, optimizer) == {"hidden": 3}  # the model and the optimizer are enough
    before = bits(*small(seed=1))
    for wrong, message in (
        ({"h": place["h"]}, "arrays: the state has unexpected position"),
        ({**place, "h": np.zeros((4, 4), np.float32)}, r"h has shape \(4, 3\), but here it has shape \(4, 4\)"),
    ):
        other, moments = small(seed=1)
        with pytest.raises(ValueError, match=message):
            nn.load(path, other, moments, arrays=wrong)
        assert bits(other, moments) == before


def test_collected_gradients_are_not_lost_in_silence(tmp_path: Path) -> None:
    model = nn.Linear(4, 2, rng=0)
    optimizer = nn.SGD(model, 0.1)
    step = nn.compile(model, nn.MeanSquaredError(), optimizer, accumulate=2)
    step(random(3, 4), random(3, 2))
    with pytest.raises(ValueError, match=r"gradients of 1 part.* are collected .*not yet applied"):
        nn.save(tmp_path / "a", model, optimizer)
    assert not list(tmp_path.iterdir())
    nn.save(tmp_path / "a", model)
    step(random(3, 4), random(3, 2))
    nn.save(tmp_path / "a", model, optimizer)
    assert nn.load(tmp_path / "a", model, optimizer) == {}


def test_others_can_read_a_checkpoint(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    model, optimizer = small()
    nn.save(tmp_path / "a", model, optimizer)
    arrays = load_file(tmp_path / "a")
    assert {name for name in arrays if name.startswith("model.")} == {f"model.{name}" for name in model.state_dict()}
    assert np.array_equal(arrays["model.lstm.layer0.wx"], model.parameters()["lstm.layer0.wx"].value)
    assert arrays["optimizer.steps"] == 0


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model, optimizer = small()
    nn.save(path, model, optimizer)
    rng = np.random.default_rng(1)
    wider = nn.Sequential(lstm=nn.LSTM(4, 6, rng=rng))
    others = (
        (nn.Sequential(head=nn.Linear(5, 2, rng=rng)), "has unexpected .*lstm.layer0.wx"),
        (wider, "has unexpected "),
    )
    for other, message in others:
        before = other.state_dict()
        with pytest.raises(ValueError, match=message):
            nn.load(path, other)
        assert all(np.array_equal(array, before[name]) for name, array in other.state_dict().items())
    with pytest.raises(ValueError, match=r"lstm.layer0.wx has shape \(20, 4\), but here it has shape \(24, 4\)"):
        nn.load(path, wider, strict=False)
    head = others[0][0]
    nn.load(path, head, strict=False)
    assert np.array_equal(head.state_dict()["head.w"], model.state_dict()["head.w"])

    # The model fits, the optimizer does not: neither changes.
    same, _ = small(seed=1)
    part = nn.Adam(same.head, 1e-2, amsgrad=True)
    before = same.state_dict()
    with pytest.raises(ValueError, match=r"Adam: the state does not have first_moments\.w"):
        nn.load(path, same, part)
    assert all(np.array_equal(array, before[name]) for name, array in same.state_dict().items())


def test_damaged_and_foreign_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.numpy import save_file

    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer)
    content = path.read_bytes()
    before = bits(model, optimizer)
    rng = np.random.default_rng(0)
    header = 8 + int.from_bytes(content[:8], "little")
    damaged = [content[:length] for length in (0, 4, 8, header - 1, header, len(content) - 1)] + [content + b"x"]
    for place in (0, 9, *rng.integers(8, len(content), 60)):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(changed))
    damaged.append(b"PK\x03\x04" + bytes(200))
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"model.safetensors|Sequential|Adam"):
            nn.load(path, model, optimizer)
        assert bits(model, optimizer) == before
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            nn.read_metadata(path)

    arrays = {f"model.{name}": array for name, array in model.state_dict().items()}
    save_file(arrays, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is a safetensors file, but retrograd\.nn\.save did not write it"):
        nn.load(path, model)
    save_file(arrays, path, metadata={"retrograd.nn": "00000000 {}"})
    with pytest.raises(ValueError, match=r"is damaged: its checksum is [0-9a-f]{8}, must be 00000000"):
        nn.load(path, model)
    from retrograd.nn.checkpoint import _checksum

    for text in ("[", "[" * 100_000, "7", "{}", '{"version": 1}', '{"version": 1, "optimizer": null, "metadata": 3}'):
        save_file(arrays, path, metadata={"retrograd.nn": f"{_checksum(text, arrays)} {text}"})
        with pytest.raises(ValueError, match=r"has version None|has a header that"):
            nn.load(path, model)
    with monkeypatch.context() as patch:
        patch.setattr("retrograd.nn.checkpoint._VERSION", 2)
        nn.save(path, model)
    with pytest.raises(ValueError, match="has version 2, this release reads version 1"):
        nn.load(path, model)
    with pytest.raises(FileNotFoundError):
        nn.load(tmp_path / "absent", model)
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for there, what in ((tmp_path, "a folder"), (os.devnull, "a device"), ("pipe", "a pipe"), ("socket", "a socket")):
        for read in (lambda path: nn.load(path, model), nn.read_metadata):
            with pytest.raises(ValueError, match=f"load: .* is {what}, not a file"):
                read(tmp_path / there)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer)
    content = path.read_bytes()
    steps_of(model, optimizer, 1)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def fail(*args: Any) -> None:
                raise OSError("the disk is full")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="the disk is full"):
                nn.save(path, model, optimizer)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(TypeError, match="not JSON serializable"):
        nn.save(path, model, metadata={"x": object()})
    with pytest.raises(ValueError, match="JSON"):
        nn.save(path, model, metadata={"x": float("nan")})
    assert path.read_bytes() == content

    with pytest.raises(OSError, match="it is a device, not a file"):
        nn.save(os.devnull, model)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    link = tmp_path / "latest"
    link.symlink_to(path)
    nn.save(link, model, optimizer)
    assert link.is_symlink()
    assert path.read_bytes() != content
    other = tmp_path / "plain"
    other.write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)  # as the umask says


def test_a_save_that_was_killed_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    model, optimizer = small()
    path = tmp_path / "model.safetensors"
    nn.save(path, model, optimizer)
    content = path.read_bytes()
    process = multiprocessing.get_context("spawn").Process(target=_killed_while_saving, args=(path,))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert path.read_bytes() == content
    assert {file.name for file in tmp_path.iterdir()} == {"model.safetensors", "model.safetensors.retrograd.part"}
    nn.save(path, model, optimizer)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def _killed_while_saving(path: Path) -> None:
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    nn.save(path, nn.Linear(300, 300))


def test_saves_at_once_are_each_whole(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [bytes([i]) * (1 << 20) for i in range(8)]
    threads = [threading.Thread(target=lambda c=c: [write_whole(path, c) for _ in range(5)]) for c in contents]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert path.read_bytes() in contents
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_where_a_save_writes_is_not_followed(tmp_path: Path) -> None:
    path, own = tmp_path / "file", tmp_path / "own"
    own.write_text("mine")
    for make in (lambda part: part.symlink_to(own), os.mkfifo, Path.mkdir):
        part = tmp_path / "file.retrograd.part"
        make(part)
        with pytest.raises(OSError, match=r"file\.retrograd\.part"):
            write_whole(path, b"new")
        assert own.read_text() == "mine"
        assert not path.exists()
        part.rmdir() if part.is_dir() else part.unlink(missing_ok=True)
