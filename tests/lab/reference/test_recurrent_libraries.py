"""The oracle of GRU, simple RNN and the LSTM's options against PyTorch, ONNX, onnxruntime and Keras.

Nothing here may import the engine.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd.lab import reference
from retrograd.lab.reference import GruCell, LstmCell, RnnCell
from support import keras_recurrent
from support.onnx_cases import ONNX_INPUTS, ONNX_OUTPUTS, OnnxRecurrent, collect_onnx_recurrent_cases
from support.reference import EPS, assert_close
from support.waiting import PATIENCE

Array = np.ndarray[Any, Any]

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
CELLS: dict[str, Any] = {"LSTM": LstmCell, "GRU": GruCell, "RNN": RnnCell}
FORWARD: dict[str, Any] = {
    "LSTM": reference.lstm_forward, "GRU": reference.gru_forward, "RNN": reference.rnn_forward,
}  # fmt: skip
BACKWARD: dict[str, Any] = {
    "LSTM": reference.lstm_backward, "GRU": reference.gru_backward, "RNN": reference.rnn_backward,
}  # fmt: skip


# --- PyTorch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, [3, 6, 1, 4]], ids=["whole", "packed"])
@pytest.mark.parametrize(("layers", "directions"), [(1, 1), (2, 2)])
@pytest.mark.parametrize(
    ("operator", "extra"),
    [
        ("GRU", {}),
        ("GRU", {"bias": False}),
        ("RNN", {}),
        ("RNN", {"nonlinearity": "relu"}),
        ("LSTM", {"proj_size": 3}),
        ("LSTM", {"proj_size": 1, "bias": False}),
    ],
    ids=str,
)
def test_torch(
    torch: Any, operator: str, extra: dict[str, Any], layers: int, directions: int, lengths: list[int] | None
) -> None:
    rng = np.random.default_rng(43)
    T, N, inputs, H, G = 6, 4, 3, 5, GATES[operator]
    P = extra.get("proj_size", H)
    module = getattr(torch.nn, operator)(
        inputs, H, layers, bidirectional=directions == 2, dtype=torch.float64, **{"bias": True} | extra
    )
    cells, leaves = [], []
    for number in range(layers * directions):
        suffix = f"_l{number // directions}{'_reverse' * (number % directions)}"
        parts = {}
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr"):
            parameter = getattr(module, name + suffix, None)
            if parameter is not None:
                a = rng.normal(0, 0.5, tuple(parameter.shape))
                with torch.no_grad():
                    parameter.copy_(torch.from_numpy(a))
                parts[name] = a if name == "weight_hr" else a.reshape(G, H, *a.shape[1:])
                leaves.append(parameter)
        b, bh = parts.get("bias_ih"), parts.get("bias_hh")
        cell = CELLS[operator](parts["weight_ih"], parts["weight_hh"])
        if operator == "GRU":
            cell = cell._replace(b=b, bh=bh)
        elif b is not None:
            cell = cell._replace(b=b.astype(np.longdouble) + bh)  # one bias is their sum
        if "weight_hr" in parts:
            cell = cell._replace(projection=parts["weight_hr"])
        cells.append(cell)

    count = layers * directions
    widths = (P, H) if operator == "LSTM" else (P,)
    states = [rng.normal(size=(count, N, width)) for width in widths]
    x = rng.normal(size=(T, N, inputs))
    d = [rng.normal(size=(T, N, directions * P)), *(rng.normal(size=s.shape) for s in states)]
    tensors = [torch.tensor(a, requires_grad=True) for a in (x, *states)]
    given = tuple(tensors[1:]) if operator == "LSTM" else tensors[1]
    if lengths is None:
        y, ends = module(tensors[0], given)
    else:
        rnn = torch.nn.utils.rnn
        packed, ends = module(rnn.pack_padded_sequence(tensors[0], lengths, enforce_sorted=False), given)
        y, _ = rnn.pad_packed_sequence(packed, total_length=T)
    outputs = [y, *ends] if operator == "LSTM" else [y, ends]
    theirs = torch.autograd.grad(outputs, [*tensors, *leaves], [torch.tensor(a) for a in d])

    options: dict[str, Any] = {"directions": directions}
    if lengths is not None:
        options["active"] = reference.active_from_lengths(lengths, T)
    if extra.get("nonlinearity") == "relu":
        options["activations"] = [("relu", 0.0, 0.0)]
    out = FORWARD[operator](x, cells, *states, **options)
    back = BACKWARD[operator](*d, x, cells, *states, **options)
    for got, expected in zip(out, outputs, strict=False):
        assert_close(got, expected.detach().numpy(), atol=32 * EPS)
    found = [back.dx, *back[2:]]
    for cell in back.cells:
        b = cell.b
        bh = cell.bh if operator == "GRU" else b
        parts = [cell.wx, cell.wh, b, bh, getattr(cell, "projection", None)]
        found += [a for a in parts if a is not None]
    for got, expected in zip(found, theirs, strict=True):
        # Sums of up to 24 products, through up to 12 cells, whose gradients a relu does not shrink.
        assert_close(got.reshape(expected.shape), expected.numpy(), atol=256 * EPS, rtol=32 * EPS)


@pytest.mark.parametrize("operator", ["GRU", "RNN", "LSTM"])
def test_torch_with_options_inside_the_recurrence(torch: Any, operator: str) -> None:
    """The formulas of layer normalization, masks, zoneout, resets and coupled gates, typed again for autograd."""
    rng = np.random.default_rng(53)
    T, N, inputs, H, G, eps = 5, 4, 3, 6, GATES[operator], 1e-5
    parameters = {
        "wx": rng.normal(0, 0.6, (G, H, inputs)), "wh": rng.normal(0, 0.5, (G, H, H)), "b": rng.normal(0, 0.5, (G, H)),
        "gamma_x": rng.uniform(0.5, 1.5, (G, H)), "gamma_h": rng.uniform(0.5, 1.5, (G, H)),
    }  # fmt: skip
    if operator == "GRU":
        parameters["bh"] = rng.normal(0, 0.5, (G, H))
    if operator == "LSTM":
        parameters |= {"gamma_c": rng.uniform(0.5, 1.5, H), "beta_c": rng.normal(0, 0.5, H)}
    given = {"x": rng.normal(size=(T, N, inputs)), "h0": rng.normal(size=(1, N, H))}
    if operator == "LSTM":
        given["c0"] = rng.normal(size=(1, N, H))
    mask = rng.integers(0, 2, (G, N, H)) * 2.0
    reset = rng.random((T, N)) < 0.3
    keep_h, keep_c = rng.integers(0, 2, (2, T, N, H)).astype(float)
    leaf = {name: torch.tensor(a, requires_grad=True) for name, a in {**parameters, **given}.items()}

    def normalized(a: Any, gamma: Any) -> Any:
        return torch.nn.functional.layer_norm(a.reshape(N, G * H), (G * H,), gamma.reshape(-1), eps=eps).reshape(
            N, G, H
        )

    h = leaf["h0"][0]
    c = leaf["c0"][0] if operator == "LSTM" else h
    ys = []
    for t in range(T):
        alive = torch.tensor(~reset[t, :, None])
        h, c = h * alive, c * alive
        v = normalized(torch.einsum("ghi,ni->ngh", leaf["wx"], leaf["x"][t]), leaf["gamma_x"]) + leaf["b"]
        w = normalized(torch.einsum("ghj,gnj->ngh", leaf["wh"], h * torch.tensor(mask)), leaf["gamma_h"])
        if operator == "GRU":
            w = w + leaf["bh"]
            r, z = torch.sigmoid(v[:, 0] + w[:, 0]), torch.sigmoid(v[:, 1] + w[:, 1])
            new = z * torch.tanh(v[:, 2] + r * w[:, 2]) + (1 - z) * h  # flip
        elif operator == "RNN":
            new = torch.tanh(v + w)[:, 0]
        else:
            a = v + w
            i, g, o = torch.sigmoid(a[:, 0]), torch.tanh(a[:, 2]), torch.sigmoid(a[:, 3])
            raw = (1 - i) * c + i * g
            seen = torch.nn.functional.layer_norm(raw, (H,), leaf["gamma_c"], leaf["beta_c"], eps)
            new = o * torch.tanh(seen)
            c = c + torch.tensor(keep_c[t]) * (raw - c)
        h = h + torch.tensor(keep_h[t]) * (new - h)
        ys.append(h)
    outputs = [torch.stack(ys), h[None]] + ([c[None]] if operator == "LSTM" else [])
    d = [rng.normal(size=tuple(a.shape)) for a in outputs]
    theirs = dict(
        zip(leaf, torch.autograd.grad(outputs, list(leaf.values()), [torch.tensor(a) for a in d]), strict=True)
    )

    options: dict[str, Any] = {"norm": "haste", "mask": mask[:, None], "reset": reset, "zoneout_h": keep_h}
    options |= {"GRU": {"flip": True}, "RNN": {}, "LSTM": {"coupled": True, "zoneout_c": keep_c}}[operator]
    arguments = [given["x"], [CELLS[operator](**parameters)], *(given[n] for n in ("h0", "c0") if n in given)]
    out = FORWARD[operator](*arguments, **options)
    back = BACKWARD[operator](*d, *arguments, **options)
    for got, expected in zip(out, outputs, strict=False):
        assert_close(got, expected.detach().numpy(), atol=64 * EPS)
    found = {"x": back.dx, "h0": back.dh0} | ({"c0": back.dc0} if operator == "LSTM" else {})
    found |= {name: a for name, a in back.cells[0]._asdict().items() if a is not None}
    assert found.keys() == theirs.keys()
    for name, expected in theirs.items():
        assert_close(found[name], expected.numpy(), atol=1024 * EPS, rtol=1024 * EPS)


# --- ONNX -------------------------------------------------------------------------------------------------------------


def of_onnx(operator: str, attributes: Mapping[str, Any], inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a node, computed by the oracle."""
    known = {"hidden_size", "direction", "layout", "clip", "linear_before_reset", "input_forget", "activations"}
    assert attributes.keys() <= known
    direction = attributes.get("direction", b"forward")
    direction = direction if isinstance(direction, str) else direction.decode()
    H, G, batch_first = attributes["hidden_size"], GATES[operator], attributes.get("layout", 0)
    given = dict(inputs)
    if batch_first:
        for name in {"X", "initial_h", "initial_c"} & given.keys():
            given[name] = np.swapaxes(given[name], 0, 1)
    order = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}[operator]  # ONNX: i o f c; z r h
    cells = []
    for n in range(len(given["W"])):
        cell = CELLS[operator](*(given[name][n].reshape(G, H, -1)[order] for name in ("W", "R")))
        if "B" in given:
            b, bh = given["B"][n].reshape(2, G, H)[:, order]
            cell = cell._replace(b=b, bh=bh) if operator == "GRU" else cell._replace(b=b + bh)
        if "P" in given:
            i, o, f = given["P"][n].reshape(3, H)
            cell = cell._replace(peephole=np.stack([i, f, np.zeros_like(i), o]))
        cells.append(cell)
    states = [given.get(name) for name in ("initial_h", "initial_c")[: 2 if operator == "LSTM" else 1]]
    x = given["X"]
    options: dict[str, Any] = {"clip": attributes.get("clip")}
    if "sequence_lens" in given:
        options["active"] = reference.active_from_lengths(given["sequence_lens"], len(x))
    if operator == "GRU":
        options["kind"] = "after" if attributes.get("linear_before_reset", 0) else "before"
    if operator == "LSTM":
        options["coupled"] = bool(attributes.get("input_forget", 0))
    if "activations" in attributes:
        options["activations"] = [(name.lower(), 0.0, 0.0) for name in attributes["activations"][: len(order)]]
    if direction == "reverse":  # direction 1, beside a direction 0 that nobody looks at
        cells = cells * 2
        states = [None if s is None else np.concatenate([s, s]) for s in states]
    out = FORWARD[operator](x, cells, *states, directions=len(cells), **options)
    wanted = slice(1, 2) if direction == "reverse" else slice(None)
    y = out.y.reshape(*x.shape[:2], len(cells), H).transpose(0, 2, 1, 3)
    got = {"Y": y[:, wanted], "Y_h": out.hn[wanted]}
    if operator == "LSTM":
        got["Y_c"] = out.cn[wanted]
    if batch_first:
        got = {name: a.transpose(2, 0, 1, 3) if name == "Y" else np.swapaxes(a, 0, 1) for name, a in got.items()}
    return got


@pytest.mark.parametrize(
    ("operator", "case"),
    [(operator, case) for operator in ("GRU", "RNN") for case in collect_onnx_recurrent_cases(operator)],
    ids=lambda value: getattr(value, "name", value),
)
def test_onnx_node_cases(operator: str, case: OnnxRecurrent) -> None:
    got = of_onnx(operator, case.attributes, case.inputs)
    for name, published in case.outputs.items():
        # The published numbers were computed in float32: a few of its units, 1.2e-7.
        assert_close(got[name], published, atol=5e-7)


class Node:
    """A random problem for an operator of ONNX, and the model that has it as its only node."""

    def __init__(self, onnx: Any, operator: str, dtype: Any, inputs: str = "", **attributes: Any) -> None:
        rng = np.random.default_rng(47)
        T, N, I, H, G = 5, 4, 3, 6, GATES[operator]  # noqa: E741
        D = 2 if attributes.get("direction") == "bidirectional" else 1
        shapes = {
            "X": (T, N, I), "W": (D, G * H, I), "R": (D, G * H, H), "B": (D, 2 * G * H), "sequence_lens": (N,),
            "initial_h": (D, N, H), "initial_c": (D, N, H), "P": (D, 3 * H),
        }  # fmt: skip
        used = {"X", "W", "R", "B", "initial_h", *inputs.split()} | ({"initial_c"} if operator == "LSTM" else set())
        self.operator, self.attributes = operator, {"hidden_size": H, **attributes}
        self.inputs = {name: rng.normal(0, 0.6, shape).astype(dtype) for name, shape in shapes.items() if name in used}
        if "sequence_lens" in used:
            self.inputs["sequence_lens"] = np.array([5, 2, 4, 1], np.int32)
        self.outputs = ONNX_OUTPUTS[: 3 if operator == "LSTM" else 2]
        of = onnx.helper.np_dtype_to_tensor_dtype
        names = [name if name in used else "" for name in ONNX_INPUTS[: 8 if operator == "LSTM" else 6]]
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node(operator, names, self.outputs, **self.attributes)],
            "one",
            [onnx.helper.make_tensor_value_info(name, of(a.dtype), a.shape) for name, a in self.inputs.items()],
            [onnx.helper.make_tensor_value_info(name, of(np.dtype(dtype)), None) for name in self.outputs],
        )
        opset = onnx.helper.make_opsetid("", 21)
        self.model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10)


DIRECTIONS = ("forward", "reverse", "bidirectional")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("GRU", "", {"linear_before_reset": 0}),
        ("GRU", "", {"linear_before_reset": 1}),
        ("RNN", "", {}),
        ("LSTM", "P", {}),
    ],
    ids=str,
)
def test_onnx_reference_evaluator(operator: str, inputs: str, attributes: dict[str, Any], direction: str) -> None:
    """ONNX's evaluator ignores lengths, clip and input_forget, but computes in float64."""
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    node = Node(onnx, operator, np.float64, inputs, direction=direction, **attributes)
    theirs = ReferenceEvaluator(node.model).run(list(node.outputs), node.inputs)
    got = of_onnx(operator, node.attributes, node.inputs)
    for name, expected in zip(node.outputs, theirs, strict=True):
        assert_close(got[name], expected, atol=32 * EPS)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("GRU", "sequence_lens", {"linear_before_reset": 0}),
        ("GRU", "sequence_lens", {"linear_before_reset": 1}),
        ("GRU", "", {"linear_before_reset": 0, "clip": 0.6}),
        ("GRU", "", {"linear_before_reset": 1, "clip": 0.6}),
        ("RNN", "sequence_lens", {}),
        ("RNN", "", {"clip": 0.4}),
        ("RNN", "sequence_lens", {"activations": ["Relu"]}),
        ("LSTM", "sequence_lens P", {}),
        ("LSTM", "P", {"clip": 0.6}),
        ("LSTM", "", {"input_forget": 1}),
        ("LSTM", "sequence_lens P", {"input_forget": 1}),
    ],
    ids=str,
)
def test_onnxruntime(operator: str, inputs: str, attributes: dict[str, Any], direction: str) -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    if "activations" in attributes and direction == "bidirectional":
        attributes = attributes | {"activations": attributes["activations"] * 2}
    node = Node(onnx, operator, np.float32, inputs, direction=direction, **attributes)
    session = onnxruntime.InferenceSession(node.model.SerializeToString(), providers=["CPUExecutionProvider"])
    got = of_onnx(operator, node.attributes, node.inputs)
    for name, expected in zip(node.outputs, session.run(list(node.outputs), node.inputs), strict=True):
        # float32, and functions of its own for sigmoid and tanh.
        assert_close(got[name], expected, atol=2e-6)


# --- Keras ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keras_results(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("keras") is None:  # only imported in another process
        pytest.skip("keras is not installed")
    folder = tmp_path_factory.mktemp("keras")
    command = [sys.executable, keras_recurrent.__file__, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert run.returncode == 0, run.stderr
    return folder


@pytest.mark.parametrize("name", keras_recurrent.LAYERS)
def test_keras(keras_results: Path, name: str) -> None:
    """Outputs and gradients, with masks of recurrent dropout per gate.

    Keras rounds the products to float32, unless it computes with TensorFlow.
    """
    near = {"atol": 5e-6, "rtol": 5e-6}
    text, G, _ = keras_recurrent.LAYERS[name]
    operator = {4: "LSTM", 3: "GRU", 1: "RNN"}[G]
    with np.load(keras_results / f"{name}.npz") as file:
        saved = dict(file)
    T, H = keras_recurrent.STEPS, keras_recurrent.UNITS
    order = [1, 0, 2] if operator == "GRU" else list(range(G))  # Keras: z r h

    def stacked(kernel: Array) -> Array:
        """[in, G*H] or [..., G*H] to [G, H, in] or [..., G, H]."""
        split = kernel.reshape(*kernel.shape[:-1], G, H)[..., order, :]
        return np.moveaxis(split, 0, 2)

    def unstacked(a: Array, like: Array) -> Array:
        inverse = np.argsort(order)
        return (a[inverse] if a.ndim == 2 else np.moveaxis(a[inverse], 2, 0)).reshape(like.shape)

    wx, wh = stacked(saved["weight0"]), stacked(saved["weight1"])
    bias = saved.get("weight2")
    cell = CELLS[operator](wx, wh)
    after = "reset_after=False" not in text
    if bias is not None:
        rows = bias.reshape(-1, G, H)[:, order]
        cell = cell._replace(b=rows[0], bh=rows[1]) if operator == "GRU" and after else cell._replace(b=rows[0])
    options: dict[str, Any] = {"mask": saved["mask"][order][None, :, None]}
    if operator == "GRU":
        options["kind"] = "after" if after else "before"
    if name == "gru_hard":
        options["activations"] = [("hard_sigmoid", 1 / 6, 0.5)] * 2 + [("softsign", 0.0, 0.0)]
    if name == "rnn_relu_mask":
        options["activations"] = [("relu", 0.0, 0.0)]
    x = np.swapaxes(saved["x0"], 0, 1)
    count = 2 if operator == "LSTM" else 1
    states = [saved[f"state{n}"][None] for n in range(count)]
    d = [np.swapaxes(saved["d0"], 0, 1), *(saved[f"d{n + 1}"][None] for n in range(count))]
    out = FORWARD[operator](x, [cell], *states, **options)
    back = BACKWARD[operator](*d, x, [cell], *states, **options)
    assert out.y.shape[0] == T
    assert_close(np.swapaxes(out.y, 0, 1), saved["y0"], **near)
    for n, end in enumerate(out[1 : 1 + count]):
        assert_close(end[0], saved[f"end{n}"], **near)
    (dcell,) = back.cells
    found = [np.swapaxes(back.dx, 0, 1), *(a[0] for a in back[2:])]
    found += [unstacked(a, saved[f"weight{n}"]) for n, a in enumerate((dcell.wx, dcell.wh))]
    if bias is not None:
        both = [dcell.b, dcell.bh] if operator == "GRU" and after else [dcell.b]
        found.append(np.stack([a[np.argsort(order)] for a in both]).reshape(bias.shape))
    for n, got in enumerate(found):
        assert_close(got, saved[f"gradient{n}"], **near)
    assert f"gradient{len(found)}" not in saved
