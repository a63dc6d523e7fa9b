"""Small real files of every format that ``retrograd.convert`` reads, and mutations of them."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.convert import Conv, Layers, Linear, Norm, write
from retrograd.nn.checkpoint import read_state, state_content
from support.convert import gru, lstm, normal, rnn

CANARY = b"CANARY!!"  # fills the files that a mutated one may refer to
LARGE = [0, 1, 2, 3, 4, 7, 8, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**62, 2**63, 2**64 - 1]
STRANGE: list[Any] = [None, True, 0, -1, 1.5, 2**63, 10**30, "", "a\x1b[31mb\nc", [], {}, "..", "/etc/hostname"]
KINDS = ("LSTM", "GRU", "RNN", "Gemm", "MatMul", "Conv", "Gather", "Identity")
FORMATS = {
    "safetensors": "a.safetensors",
    "nn": "a.safetensors",
    "npz": "a.npz",
    "torch": "a.pt",
    "torch legacy": "a.pth",
    "h5": "a.weights.h5",
    "keras": "a.keras",
    "onnx": "a.onnx",
    "coreml": "a.mlpackage",
}


def layers(name: str) -> Layers:
    """Layers that a format holds, and that need no --kind."""
    others: Layers = {} if name == "npz" else {"gru": gru(), "simple_rnn": rnn()}  # BNNS has neither
    return {
        "lstm": lstm(),
        "bidirectional": lstm(3, 2, directions=2),
        **others,
        "batch": Norm("batch_norm", normal(3), normal(3, seed=1), normal(3, seed=2), abs(normal(3, seed=3))),
        "linear": Linear(normal(6, 4), normal(6)),
        "conv": Conv(normal(4, 2, 3), normal(4), False, 1),
    }


def mutated_bytes(random: np.random.Generator, content: bytes) -> bytes:
    """Some bytes changed, copied, inserted or removed."""
    data = bytearray(content)
    for _ in range(int(random.choice([1, 1, 1, 2, 3, 8]))):
        size = len(data)
        if not size:
            break
        at, other, count = (int(n) for n in random.integers(0, [size, size, 64]))
        match int(random.integers(8)):
            case 0 | 1:
                data[at] ^= 1 << int(random.integers(8))
            case 2:
                data[at] = int(random.integers(256))
            case 3 | 4:
                width = int(random.choice([1, 2, 4, 8]))
                value = LARGE[int(random.integers(len(LARGE)))] if random.random() < 0.7 else other
                data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            case 5:
                data[at : at + count] = data[other : other + count]
            case 6:
                data[at:at] = data[other : other + count]
            case _:
                del data[at : at + count if random.random() < 0.8 else size]
    return bytes(data)


def mutated_json(random: np.random.Generator, content: bytes) -> bytes:
    """A value replaced, removed, renamed or nested deeply."""
    if random.random() < 0.2:
        return mutated_bytes(random, content)
    value = json.loads(content)
    for _ in range(int(random.choice([1, 1, 2, 4]))):
        places: list[tuple[Any, Any]] = []
        open_ = [value]
        while open_:
            inner = open_.pop()
            keys = list(inner) if isinstance(inner, dict) else range(len(inner)) if isinstance(inner, list) else ()
            places += [(inner, key) for key in keys]
            open_ += [inner[key] for key in keys]
        if not places:
            break
        container, key = places[int(random.integers(len(places)))]
        match int(random.integers(5)):
            case 0:
                container[key] = LARGE[int(random.integers(len(LARGE)))]
            case 1:
                other, its = places[int(random.integers(len(places)))]
                container[key] = json.loads(json.dumps(other[its]))
            case 2 if isinstance(container, dict):
                container[f"{key}\x1b[31m"] = container.pop(key)
            case 3:
                del container[key]
            case _:
                container[key] = STRANGE[int(random.integers(len(STRANGE)))]
    text = json.dumps(value)
    if random.random() < 0.03:
        text = text.replace("{", '{"a":' * 5000 + "{", 1) if random.random() < 0.5 else "[" * 50_000 + text
    return text.encode()


class Folder:
    """Real files, those that others may refer to, and a mutated one for each process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outside = path / "outside"
        self.outside.mkdir(parents=True)
        (self.outside / "canary").write_bytes(CANARY * 512)
        for name, file in FORMATS.items():
            folder = path / "real" / name
            folder.mkdir(parents=True)
            self._write(name, folder / file)
        self._hdf5 = [self.base("h5").read_bytes(), *self._referring()]

    def base(self, name: str) -> Path:
        return self.path / "real" / name / FORMATS[name]

    def _write(self, name: str, path: Path) -> None:
        if name == "keras":
            config = {
                "class_name": "Sequential",
                "config": {
                    "layers": [
                        {"class_name": "LSTM", "config": {"activation": "tanh", "units": 4}},
                        {"class_name": "Bidirectional", "config": {"layer": {"config": {"activation": "tanh"}}}},
                        {"class_name": "GRU", "config": {"reset_after": True, "recurrent_activation": "sigmoid"}},
                        {"class_name": "SimpleRNN", "config": {"activation": "tanh", "go_backwards": False}},
                        {"class_name": "BatchNormalization", "config": {"epsilon": 0.001, "scale": True}},
                        {"class_name": "Dense", "config": {"units": 6}},
                        {"class_name": "Conv1D", "config": {"groups": 1}},
                        {"class_name": "Sequential", "config": {"layers": []}},
                    ]
                },
            }
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("metadata.json", "{}")
                archive.writestr("config.json", json.dumps(config))
                archive.writestr("model.weights.h5", self.base("h5").read_bytes())
        elif name == "torch legacy":
            import torch

            torch.save(torch.load(self.base("torch")), path, _use_new_zipfile_serialization=False)
        else:
            write(path, layers(name), {"safetensors": "torch", "nn": "nn"}.get(name))

    def _referring(self) -> list[bytes]:
        """HDF5 files with external storage, external links, virtual datasets, soft links and a cycle."""
        import h5py

        with h5py.File(self.outside / "canary.h5", "w") as file:
            file["x"] = np.frombuffer(CANARY * 8, np.float32).reshape(4, 4)
        source = str(self.outside / "canary.h5")
        layout = h5py.VirtualLayout((4, 4), np.float32)
        layout[:] = h5py.VirtualSource(source, "x", (4, 4))
        makers: list[Callable[[Any], Any]] = [
            lambda group: group.create_dataset("0", (4, 4), "f4", external=[(str(self.outside / "canary"), 0, 64)]),
            lambda group: group.__setitem__("0", h5py.ExternalLink(source, "/x")),
            lambda group: group.create_virtual_dataset("0", layout),
            lambda group: group.__setitem__("0", h5py.SoftLink("/layers/dense/vars")),
            lambda group: group.parent.__setitem__("loop", group),
            lambda group: group.create_dataset("0", data=normal(4, 4), compression="gzip", chunks=(2, 2), shuffle=True),
        ]
        made = []
        for maker in makers:
            content = io.BytesIO()
            with h5py.File(content, "w") as file:
                group = file.create_group("layers/dense/vars")
                group.attrs["name"] = "dense"
                maker(group)
            made.append(content.getvalue())
        return made

    def mutated(self, name: str, random: np.random.Generator) -> Path:
        folder = self.path / f"mutated-{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path, real = folder / FORMATS[name], self.base(name)
        if name == "coreml":
            self._package(random, path)
            return path
        content = real.read_bytes()
        if name == "nn" and random.random() < 0.6:
            content = self._state(random, real)
        elif name in ("safetensors", "nn") and random.random() < 0.7:
            size = int.from_bytes(content[:8], "little")
            header = mutated_json(random, content[8 : 8 + size])
            content = len(header).to_bytes(8, "little") + header + content[8 + size :]
        elif name in ("npz", "torch", "keras") and random.random() < 0.8:
            content = self._archive(random, content)
        elif name == "h5":
            content = mutated_bytes(random, self._hdf5[int(random.integers(len(self._hdf5)))])
        elif name == "onnx" and random.random() < 0.6:
            content = self._graph(random, content)
        else:
            content = mutated_bytes(random, content)
        path.write_bytes(content)
        return path

    def _state(self, random: np.random.Generator, real: Path) -> bytes:
        """A state with other names, shapes and dtypes; the checksum is right."""
        state = read_state(real)
        for _ in range(int(random.choice([1, 1, 2, 4]))):
            names = list(state)
            a, b = (names[int(k)] for k in random.integers(0, len(names), 2))
            match int(random.integers(5)):
                case 0:
                    state[f"{a}.{b}"] = state.pop(a)
                case 1:
                    state[a], state[b] = state[b], state[a]
                case 2:
                    state[a] = state[a].reshape(-1) if random.random() < 0.5 else state[a][None]
                case 3:
                    state[a] = state[a].astype(["int8", "float16", "float64", "bool"][int(random.integers(4))])
                case _:
                    state[a.replace("0", ["1", "99999999999", "\x1b", ""][int(random.integers(4))])] = state.pop(a)
        return state_content(state)

    def _archive(self, random: np.random.Generator, content: bytes) -> bytes:
        """An archive with one mutated member; the checksums are right."""
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w") as new:
            members = old.namelist()
            # Of PyTorch's members the pickle is the one with a structure.
            pickled = [name for name in members if name.endswith(("data.pkl", ".h5", "config.json"))]
            chosen = members if not pickled or random.random() < 0.2 else pickled
            target = chosen[int(random.integers(len(chosen)))]
            for name in members:
                data = old.read(name)
                if name == target:
                    if name.endswith(".json"):
                        data = mutated_json(random, data)
                    elif name.endswith(".h5"):
                        data = mutated_bytes(random, self._hdf5[int(random.integers(len(self._hdf5)))])
                    else:
                        data = mutated_bytes(random, data)
                    if random.random() < 0.05:
                        name = f"../{name}"
                new.writestr(name, data, zipfile.ZIP_DEFLATED if random.random() < 0.1 else zipfile.ZIP_STORED)
        return made.getvalue()

    def _graph(self, random: np.random.Generator, content: bytes) -> bytes:
        """A model with other connections, shapes, names or places of data."""
        import onnx

        model = onnx.load_model_from_string(content)
        nodes, tensors = model.graph.node, model.graph.initializer
        names = [*(t.name for t in tensors), *(name for node in nodes for name in (*node.input, *node.output)), ""]
        for _ in range(int(random.choice([1, 1, 2, 4]))):
            node, tensor = nodes[int(random.integers(len(nodes)))], tensors[int(random.integers(len(tensors)))]
            a, b = (names[int(k)] for k in random.integers(0, len(names), 2))
            match int(random.integers(9)):
                case 0:
                    nodes.append(onnx.helper.make_node("Identity", [a], [b]))
                case 1:
                    nodes.insert(0, onnx.helper.make_node("Transpose", [a], [b]))
                case 2 if node.input:
                    node.input[int(random.integers(len(node.input)))] = a
                case 3 if node.output:
                    node.output[0] = a
                case 4:
                    tensor.dims[:] = [LARGE[int(k)] % 2**63 for k in random.integers(0, len(LARGE), 2)]
                case 5:
                    tensor.data_type = int(random.integers(0, 30))
                case 6:
                    tensor.data_location = onnx.TensorProto.EXTERNAL
                    place = ["../outside/canary", str(self.outside / "canary"), "a.onnx", "none", ""]
                    tensor.external_data.add(key="location", value=place[int(random.integers(len(place)))])
                    tensor.external_data.add(key="offset", value=str(LARGE[int(random.integers(len(LARGE)))]))
                case 7:
                    node.name = ["\x1b[31m", "a.layer0", "", a][int(random.integers(4))]
                case _:
                    node.op_type = KINDS[int(random.integers(len(KINDS)))]
        changed: bytes = model.SerializeToString()
        return changed if random.random() < 0.7 else mutated_bytes(random, changed)

    def _package(self, random: np.random.Generator, path: Path) -> None:
        shutil.copytree(self.base("coreml"), path)
        inner = path / "Data" / "com.apple.CoreML"
        match int(random.integers(10)):
            case 0:
                manifest = path / "Manifest.json"
                manifest.write_bytes(mutated_json(random, manifest.read_bytes()))
            case 1:
                manifest = path / "Manifest.json"
                places = ["../../../outside", "../../../outside/canary", str(self.outside), "com.apple.CoreML/weights"]
                value = json.loads(manifest.read_text())
                entries = list(value["itemInfoEntries"].values())
                entries[int(random.integers(len(entries)))]["path"] = places[int(random.integers(len(places)))]
                manifest.write_text(json.dumps(value))
            case 2:
                link = [inner / "weights" / "weight.bin", inner / "model.mlmodel"][int(random.integers(2))]
                link.unlink()
                link.symlink_to(self.outside / "canary")
            case 3 | 4:
                file = inner / "weights" / "weight.bin"
                file.write_bytes(mutated_bytes(random, file.read_bytes()))
            case _:
                file = inner / "model.mlmodel"
                file.write_bytes(mutated_bytes(random, file.read_bytes()))
