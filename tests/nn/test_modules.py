"""retrograd.nn: modules, their parameters and state, calls and predictions."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from retrograd import graph, nn
from support.nn import Halve, Scale, model, passes, random

# ---- the tree --------------------------------------------------------------------------------------------------------


def test_names_lead_through_children() -> None:
    m = model()
    cells = ["layer0", "layer0_reverse", "layer1", "layer1_reverse"]
    expected = ["embedding.table"]
    expected += [f"lstm.{cell}.{name}" for cell in cells for name in ("wx", "wh", "b")]
    expected += ["norm.gamma", "norm.beta", "head.w", "head.b"]
    assert list(m.parameters()) == expected
    assert list(m.buffers()) == ["lstm.stream"]
    assert list(m.state_dict()) == list(m.state_arrays()) == [*expected, "lstm.stream"]
    assert m.parameters()["head.w"] is m["head"].w
    assert m.num_parameters == sum(p.size for p in m.parameters().values())
    m["head"].freeze()
    assert m.num_parameters == sum(p.size for p in m.parameters().values()) - 35
    assert {p.dtype for p in m.parameters().values()} == {np.dtype(np.float32)}
    assert m.dtype == np.float32


def test_sequential_by_position() -> None:
    m = nn.Sequential(Scale(2), nn.Sequential(Halve(), Scale(2)))
    assert list(m.parameters()) == ["0.w", "1.1.w"]
    assert len(m) == 2
    assert isinstance(m[0], Scale)
    assert isinstance(m[-1], nn.Sequential)
    assert [type(layer) for layer in m] == [Scale, nn.Sequential]
    assert m["1"] is m[1]
    x = random(3, 2)
    y, gradients = passes(m, x, np.ones((3, 2)))
    assert np.array_equal(y, 2 * x)
    assert np.array_equal(gradients["x"], np.full((3, 2), 2.0))
    assert np.array_equal(gradients["0.w"], x.sum(axis=0))
    assert np.array_equal(gradients["1.1.w"], x.sum(axis=0))
    assert np.array_equal(nn.Sequential()(x), x)


def test_sequential_refuses() -> None:
    with pytest.raises(TypeError, match="name all layers or none"):
        nn.Sequential(Halve(), b=Halve())
    with pytest.raises(TypeError, match=r"layer 0 is .*int"):
        nn.Sequential(3)
    with pytest.raises(ValueError, match="'forward' is taken"):
        nn.Sequential(forward=Halve())


def test_an_attribute_is_a_child_until_it_is_replaced() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            self.first, self.second = Scale(2), Scale(3)

    m = Two()
    assert list(m.parameters()) == ["first.w", "second.w"]
    m.second = Halve()
    assert list(m.parameters()) == ["first.w"]
    m.second = None
    assert [name for name, _ in m.modules()] == ["", "first"]
    m.second = m.first  # a module in two places has its first name
    assert [name for name, _ in m.modules()] == ["", "first"]
    assert list(m.parameters()) == ["first.w"]
    del m.first
    assert list(m.parameters()) == ["second.w"]
    del m.second
    assert not m.parameters()
    with pytest.raises(AttributeError, match="'Two' object has no attribute 'first'"):
        _ = m.first


def test_modules_that_would_not_be_found_are_refused() -> None:
    m = nn.Module()
    for hidden in ([Halve()], (Halve(),), {"a": Halve()}, [[1, Halve()]], {"a": (nn.Parameter([1.0]),)}):
        with pytest.raises(TypeError, match=rf"Module.layers: modules and parameters inside a {type(hidden).__name__}"):
            m.layers = hidden
    m.sizes = [1, 2]


def test_variables_of_modules() -> None:
    m = Scale(2)
    m.w[...] = m.w.value + 1
    m.w[0] = 7
    assert np.array_equal(m.w.value, [7.0, 3.0])
    assert np.array_equal(np.asarray(m.w), [7.0, 3.0])
    assert np.array_equal(m([1.0, 2.0]), [7.0, 6.0])
    with pytest.raises(AttributeError, match=r"Scale\.w is a variable; write into it: w\[\.\.\.\] = "):
        m.w = np.zeros(2)
    with pytest.raises(TypeError, match=r"Scale\.v is a Variable; use nn\.Parameter or nn\.Buffer"):
        m.v = graph.Variable(np.zeros(2))
    with pytest.raises(TypeError, match="values has dtype int64, must be float32 or float64"):
        nn.Parameter(np.array([1, 2]))
    assert nn.Parameter([1, 2]).dtype == nn.Parameter(np.ones(2), dtype=np.float32).dtype == np.float32
    assert nn.Parameter(np.ones(2)).dtype == np.float64
    with pytest.raises(ValueError, match="the name 'forward' of a parameter or buffer is taken"):
        m.forward = nn.Parameter([1.0])
    with pytest.raises(ValueError, match="shape"):
        nn.Parameter(np.zeros(3), mask=[True, False])
    with pytest.raises(NotImplementedError, match="Module has no forward"):
        nn.Module()(np.zeros(2))
    m.w = nn.Parameter(np.ones(2))  # another variable may take its place
    assert list(m.parameters()) == ["w"]
    assert np.array_equal(m([1.0, 2.0]), [1.0, 2.0])


def test_buffers_of_unsigned_numbers() -> None:
    given = np.array([2**64 - 1, 5], np.uint64)
    buffer = nn.Buffer(given)
    assert buffer.dtype == np.int64
    assert buffer.saved.dtype == np.uint64
    assert np.array_equal(buffer.saved, given)
    for twin in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
        assert twin.saved.dtype == np.uint64
        assert np.array_equal(twin.saved, given)
        twin[1] = 6
    assert buffer.saved[1] == 5


# ---- state -----------------------------------------------------------------------------------------------------------


def test_state_is_copied_both_ways() -> None:
    m, other = model(), model(seed=1)
    state = m.state_dict()
    assert all(not np.shares_memory(a, state[name]) for name, a in m.state_arrays().items())
    places = {name: a.ctypes.data for name, a in other.state_arrays().items()}
    assert other.load_state_dict(state) == ((), ())
    assert {name: a.ctypes.data for name, a in other.state_arrays().items()} == places
    for name, array in other.state_dict().items():
        assert array.dtype == state[name].dtype
        assert np.array_equal(array, state[name])
    state["head.b"] += 1
    assert not np.array_equal(other["head"].b.value, state["head.b"])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    m = model()
    before = m.state_dict()
    good = model(seed=1).state_dict()
    for change, error, message in (
        ({"head.w": np.zeros((5, 7), np.float32)}, ValueError, r"head.w has shape \(5, 7\), but here .* \(5, 6\)"),
        ({"head.w": np.zeros((5, 6))}, TypeError, "head.w has dtype float64, but here it has dtype float32"),
        ({"tail.w": np.zeros(3)}, ValueError, "the state has unexpected tail.w"),
        ({"head.w": None}, ValueError, "the state does not have head.w"),
    ):
        state = {name: array for name, array in {**good, **change}.items() if array is not None}
        with pytest.raises(error, match="Sequential.load_state_dict: .*" + message):
            m.load_state_dict(state)
        for name, array in m.state_dict().items():
            assert np.array_equal(array, before[name]), name

    part = {"head.w": good["head.w"], "tail.w": np.zeros(3)}
    difference = m.load_state_dict(part, strict=False)
    assert difference.unexpected == ("tail.w",)
    assert set(difference.missing) == set(before) - {"head.w"}
    assert np.array_equal(m.state_dict()["head.w"], good["head.w"])
    assert np.array_equal(m.state_dict()["head.b"], before["head.b"])
    with pytest.raises(ValueError, match="shape"):
        m.load_state_dict({"head.w": np.zeros(2, np.float32)}, strict=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_independent_and_whole(how: str) -> None:
    """Also after it was compiled, with weights in two places, a mask and a frozen part."""
    m = nn.Sequential(model(), nn.Linear(5, 5, rng=0), nn.Linear(5, 5, rng=1), nn.Embedding(3, 2, padding_index=1))
    m[2].w = m[1].w
    m[1].b.trainable = False
    x = np.array([[0, 1], [2, 3]])
    first = nn.Sequential(m[0], m[1], m[2])
    expected = first.predict(x)
    twin = copy.deepcopy(m) if how == "deepcopy" else pickle.loads(pickle.dumps(m))
    assert list(twin.state_dict()) == list(m.state_dict())
    assert twin[2].w is twin[1].w
    assert twin[1].w is not m[1].w
    assert not twin[1].b.trainable
    assert twin[2].b.trainable
    assert np.array_equal(twin[3].table.mask, m[3].table.mask)
    for name, array in m.state_arrays().items():
        assert np.array_equal(array, twin.state_arrays()[name])
        assert not np.shares_memory(array, twin.state_arrays()[name])
        assert twin.state_arrays()[name].ctypes.data % 64 == 0
    second = nn.Sequential(twin[0], twin[1], twin[2])
    assert np.array_equal(second.predict(x), expected)
    before = m.state_dict()
    step = nn.compile(second, nn.SoftmaxCrossEntropy(), nn.SGD(second, 1.0))
    step(x, x)
    assert all(np.array_equal(array, before[name]) for name, array in m.state_arrays().items())
    assert not np.array_equal(twin.state_arrays()["0.lstm.layer0.wx"], before["0.lstm.layer0.wx"])
    assert np.array_equal(first.predict(x), expected)
    assert not np.array_equal(second.predict(x), expected)


def test_repr_shows_the_tree() -> None:
    text = repr(model())
    assert text.startswith("Sequential(\n  embedding: Embedding(7, 4)\n  lstm: LSTM(4, 3, layers=2, bidirectional=True")
    assert "    layer0_reverse: LstmCell(wx: (12, 4), wh: (12, 3), b: (12,))\n" in text
    assert text.endswith("  head: Linear(6, 5)\n)")
    assert repr(nn.GroupNorm(2, 4, activation="relu")) == "GroupNorm(2, 4, eps=1e-05, activation=Activation('relu'))"
    assert repr(nn.Dropout(0.5)) == "Dropout(0.5)"
    assert repr(nn.MultiHeadAttention(4, 2, causal=True)).startswith("MultiHeadAttention(4, 2, causal=True\n  query: ")


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, retrograd.nn; assert not {'safetensors', 'torch', 'jax', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, retrograd; assert 'retrograd.nn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_data_of_other_kinds_are_converted(torch: Any) -> None:
    """Once, at the outermost call: lists, float64 and float16, tensors of PyTorch, other memory."""
    m = nn.Sequential(nn.Linear(3, 4, rng=0), nn.Tanh(), nn.Linear(4, 2, rng=1))
    x = random(5, 3, dtype=np.float32)
    labels = np.array([0, 1, 1, 0, 1])
    y = m(x)
    step = nn.compile(m, nn.SoftmaxCrossEntropy(), nn.SGD(m, 0.0))
    loss = step(x, labels)
    whole = np.zeros((5, 6), np.float32)
    whole[:, ::2] = x
    for given in (x.astype(np.float64), x.tolist(), torch.from_numpy(x), torch.from_numpy(x).double(), whole[:, ::2],
                  np.asfortranarray(x), tuple(map(tuple, x.tolist()))):  # fmt: skip
        for call in (m, m.predict):
            found = call(given)
            assert found.dtype == np.float32
            assert np.array_equal(found, y)
        for target in (labels.tolist(), list(labels), labels.astype(np.int32), labels.astype(np.uint8),
                       torch.from_numpy(labels)):  # fmt: skip
            assert step(given, target) == loss
            assert step.evaluate(given, target) == loss
    half = x.astype(np.float16)
    assert np.array_equal(m(half), m(half.astype(np.float32)))
    double = nn.Linear(3, 2, dtype=np.float64, rng=0)
    assert double(x).dtype == np.float64
    assert np.array_equal(double(x), double(x.astype(np.float64)))


def test_modules_without_parameters_keep_the_dtype() -> None:
    """Float64 would lose digits in silence."""
    y, target = np.array([1.0 + 1e-9]), np.array([1.0])
    assert nn.MeanSquaredError()(y, target) == (y[0] - target[0]) ** 2
    for dtype in (np.float32, np.float64):
        x = random(3, 4, dtype=dtype)
        m = nn.Sequential(nn.ReLU(), nn.Flatten())
        for call in (m, m.predict):
            assert call(x).dtype == dtype
            assert np.array_equal(call(x), np.maximum(x, 0))
    assert nn.ReLU()([1.0, -2.0]).dtype == np.float32


def test_results_without_axes_are_numbers() -> None:
    loss = nn.MeanSquaredError()(np.array([1.0, 3.0]), np.array([0.0, 0.0]))
    assert type(loss) is float
    assert loss == 5.0


def test_nests_of_arguments_and_results() -> None:
    class Nest(nn.Module):
        def __init__(self) -> None:
            self.linear = nn.Linear(3, 2, dtype=np.float64, rng=0)

        def forward(self, data: Any, pair: Any, flag: bool = True, kind: str = "sum") -> Any:
            (a, (b, c)), d = pair, data["inner"]["d"]
            assert (c is None) == (kind == "none")
            total = a + b if c is None else a + b + c
            y = self.linear(data["x"]) if flag else data["x"]
            return {"y": y, "rest": [total * d[0], nn.LstmState(total, d[1])], "nothing": None}

    m, x = Nest(), random(4, 3)
    a, b, c, d = (random(3, seed=s) for s in range(4))
    for call in (m, m.predict):
        found = call({"x": x, "inner": {"d": [a, b]}}, (a, (b, c)))
        assert np.array_equal(found["y"], m.linear(x))
        assert np.array_equal(found["rest"][0], (a + b + c) * a)
        assert isinstance(found["rest"][1], nn.LstmState)
        assert np.array_equal(found["rest"][1].c, b)
        assert found["nothing"] is None
        plain = call({"x": x, "inner": {"d": [d, b]}}, (a, (b, None)), flag=False, kind="none")
        assert np.array_equal(plain["y"], x)
        assert np.array_equal(plain["rest"][0], (a + b) * d)


def test_tuples_of_tuples_are_not_one_array() -> None:
    class States(nn.Module):
        def forward(self, states: Any) -> Any:
            (a, b), (c, d) = states
            assert isinstance(states, tuple)
            return a * b + c, d

    a, b, c, d = random(3), random(3, seed=1), random(2, 3), random(5)
    m = States()
    for call in (m, m.predict):
        first, second = call(((a, b), (c, d)))
        np.testing.assert_allclose(first, a * b + c, rtol=1e-14)
        assert np.array_equal(second, d)
        first, second = call(((a, b), (b, a)))  # of equal shapes, which NumPy would stack
        np.testing.assert_allclose(first, a * b + b, rtol=1e-14)
        assert np.array_equal(second, a)


def test_none_and_an_array_are_not_mixed_up() -> None:
    """None is no array of the run before."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            self.scale = nn.Parameter(np.ones((), np.float64))

        def forward(self, x: Any, shift: Any = None) -> Any:
            y = x * self.scale
            return y if shift is None else y + shift

    m, x = Shifted(), random(3)
    for _ in range(2):
        assert np.array_equal(m.predict(x, np.ones(3)), x + 1)
        assert np.array_equal(m.predict(x, None), x)
        assert np.array_equal(m.predict(x), x)
        assert np.array_equal(m.predict(x, shift=np.ones(3)), x + 1)
        assert np.array_equal(m.predict(x, shift=None), x)


def test_keywords_go_to_the_layers_that_have_them() -> None:
    rng = np.random.default_rng(0)
    lstm = nn.LSTM(3, 3, dtype=np.float64, rng=rng)
    m = nn.Sequential(
        nn.Sequential(nn.Linear(3, 3, dtype=np.float64, rng=rng), nn.ReLU()),
        nn.Residual(nn.Sequential(lstm)),
        nn.LSTM(3, 2, last=True, dtype=np.float64, rng=rng),
    )
    x, lengths = random(5, 2, 3), np.array([5, 2])
    hidden = m[0](x)
    expected = m[2](hidden + lstm(hidden, lengths=lengths), lengths=lengths)
    assert np.array_equal(m(x, lengths=lengths), expected)
    np.testing.assert_array_equal(m.predict(x, lengths=[5, 2]), expected)
    assert not np.array_equal(m(x), expected)
    with pytest.raises(TypeError, match="no layer has an argument 'length'"):
        m(x, length=lengths)


def test_an_error_names_the_layer() -> None:
    m = nn.Sequential(body=nn.Sequential(nn.Linear(3, 4), nn.ReLU()), head=nn.Linear(5, 2))
    message = r"layer 'head', Linear\(5, 2\): linear: .*"
    for call in (m, m.predict):
        with pytest.raises(ValueError, match=message):
            call(np.zeros((2, 3)))
    assert m["body"](np.zeros((2, 3))).shape == (2, 4)  # and the next call works

    class Own(ValueError):
        def __init__(self, first: int, second: int) -> None:
            super().__init__(f"{first} and {second}")

    class Raises(nn.Module):
        def forward(self, x: Any) -> Any:
            raise Own(1, 2)

    with pytest.raises(Own, match="1 and 2"):  # which cannot be made from a text
        nn.Sequential(Raises())(np.zeros(2))


def test_modes() -> None:
    m = nn.Sequential(nn.Linear(20, 20, rng=0), nn.Dropout(0.5, rng=0))
    x = random(4, 20, dtype=np.float32)
    assert m.training
    dense = m.predict(x)
    assert m.training  # a prediction leaves the mode
    assert m[1].stream.saved[1] == 0
    assert (dense != 0).all()
    dropped = m(x)
    assert (dropped == 0).any()
    assert m.eval() is m
    assert not m[1].training
    assert np.array_equal(m(x), dense)
    m[1].train()
    assert (m(x) == 0).any()
    assert np.array_equal(m.predict(x), dense)
    assert m.train().training


def test_predictions_follow_changes() -> None:
    m = nn.Sequential(nn.Linear(3, 3, rng=0), nn.ReLU())
    x = random(4, 3, dtype=np.float32)
    m.predict(x)
    m[0].w[...] = np.eye(3)
    m[0].b[...] = 0
    assert np.array_equal(m.predict(x), np.maximum(x, 0))
    setattr(m, "1", nn.Activation("identity"))
    assert np.array_equal(m.predict(x), x)
    setattr(m, "0", nn.Linear(3, 2, rng=1))
    assert [type(layer) for layer in m] == [nn.Linear, nn.Activation]  # in its place
    assert np.array_equal(m.predict(x), m[0](x))


def test_the_last_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrograd.nn import program as programs

    compiled = []
    original = programs.compile_graph
    monkeypatch.setattr(programs, "compile_graph", lambda f, *specs: compiled.append(specs) or original(f, *specs))
    m = nn.Linear(3, 2, rng=0)
    step = nn.compile(m, nn.MeanSquaredError(), nn.SGD(m, 0.0), keep=2)

    def take(rows: int) -> int:
        before = len(compiled)
        step(np.ones((rows, 3)), np.ones((rows, 2)))
        return len(compiled) - before

    assert [take(rows) for rows in (1, 2, 1, 2, 3, 2, 3)] == [1, 1, 0, 0, 1, 0, 0]
    assert take(1) == 1  # the least recently used of three was dropped
    assert [take(rows) for rows in (3, 2)] == [0, 1]
    assert [take(rows) for rows in (3, 1, 3, 2)] == [0, 1, 0, 1]  # not the oldest: 3 was used after 1
    for _ in range(3):
        m.eval()
        m.train()
        assert take(2) == 0  # back in a mode that is known
    with pytest.raises(ValueError, match="keep is 0, must be at least 1"):
        nn.compile(m, nn.MeanSquaredError(), nn.SGD(m, 0.0), keep=0)


@pytest.mark.parametrize("slow", [True, False])
def test_a_warning_if_most_of_the_time_goes_into_programs(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    from retrograd.nn import program as programs

    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr(programs.time, "perf_counter", clock)
    m = nn.Linear(3, 2, rng=0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for rows in range(1, 20):
            m.predict(np.ones((rows, 3)))
            now[0] += 0.0 if slow else 10.0
    assert len(seen) == (1 if slow else 0)
    if slow:
        assert issubclass(seen[0].category, RuntimeWarning)
        assert "16 programs were compiled" in str(seen[0].message)
        assert "Pad batches to one shape" in str(seen[0].message)
