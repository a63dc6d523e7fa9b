"""Shards of one process: the tree of sums, gradients of a split batch, synchronised batch norm, and failures."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from retrograd import distributed, nn
from retrograd.distributed import overlap
from retrograd.distributed.tree import add_nodes, cover
from support.waiting import PATIENCE

BATCH = 37  # does not divide into equal shards


def model_of(seed: int, dropout: float = 0.0, dtype: type = np.float64) -> nn.Sequential:
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Linear(5, 11, dtype=dtype, rng=rng),
        nn.BatchNorm(11, activation="tanh", dtype=dtype),
        nn.Dropout(dropout, rng=rng),
        nn.Linear(11, 3, dtype=dtype, rng=rng),
    )


def batch_of(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((BATCH, 5)), rng.integers(0, 3, BATCH)


def step(parallel: distributed.DataParallel[nn.Sequential], x: np.ndarray, labels: np.ndarray) -> float:
    def work(shard: distributed.Shard[nn.Sequential]) -> float:
        part, share = shard.part(len(x)), shard.share(len(x))
        loss = shard.loss.forward(shard.model.forward(x[part]), labels[part])
        shard.model.backward(shard.loss.backward(share))
        return share * float(loss)

    return sum(parallel.run(work))


# ---- the tree --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8, 13])
def test_the_sum_does_not_depend_on_who_adds_which_shards(shards: int) -> None:
    rng = np.random.default_rng(shards)
    # Magnitudes far apart: another order of additions gives other bits.
    values = rng.standard_normal((shards, 50)) * 10.0 ** rng.integers(-9, 9, (shards, 1))
    leaves = [((i, i + 1), values[i]) for i in range(shards)]
    whole = add_nodes((0, shards), [(node, value.copy()) for node, value in leaves])
    np.testing.assert_allclose(whole, values.sum(0), rtol=1e-9)
    for ranks in range(1, shards + 1):
        edges = [rank * shards // ranks for rank in range(ranks + 1)]
        known = []
        for first, last in itertools.pairwise(edges):
            nodes = list(cover((0, shards), range(first, last)))
            assert [i for a, b in nodes for i in range(a, b)] == list(range(first, last))
            known += [(node, add_nodes(node, [(n, v.copy()) for n, v in leaves])) for node in nodes]
        assert add_nodes((0, shards), known).tobytes() == whole.tobytes()


def test_parts_cover_a_batch() -> None:
    group = distributed.Group(8)
    parts = [group.part(BATCH, shard) for shard in range(8)]
    assert [i for part in parts for i in range(BATCH)[part]] == list(range(BATCH))
    assert group.rank_part(BATCH) == slice(0, BATCH)
    with pytest.raises(ValueError, match="a batch of 7 cannot be split into 8 shards"):
        group.part(7, 0)
    with pytest.raises(ValueError, match="shards is 0, must be at least 1"):
        distributed.Group(0)


# ---- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_gradients_and_statistics_are_those_of_the_whole_batch(shards: int) -> None:
    x, labels = batch_of(1)
    plain, loss = model_of(0), nn.SoftmaxCrossEntropy()
    expected = loss.forward(plain.forward(x), labels)
    plain.backward(loss.backward())

    group, model = distributed.Group(shards), model_of(0)
    assert distributed.synchronize(model, group) == 1
    parallel = distributed.DataParallel(model, group, nn.SoftmaxCrossEntropy())
    assert step(parallel, x, labels) == pytest.approx(expected, rel=1e-12)
    for name, gradient in model.gradients().items():
        np.testing.assert_allclose(gradient, plain.gradients()[name], rtol=1e-9, atol=1e-13, err_msg=name)
    for name, buffer in model.buffers().items():
        np.testing.assert_allclose(buffer, plain.buffers()[name], rtol=1e-12, err_msg=name)


def test_a_synchronised_norm_in_evaluation_is_a_plain_one() -> None:
    group, model, plain = distributed.Group(4), model_of(0), model_of(0)
    distributed.synchronize(model, group)
    x, _ = batch_of(2)
    assert model.eval().forward(x).tobytes() == plain.eval().forward(x).tobytes()
    dy = np.ones((BATCH, 3))
    assert model.backward(dy).tobytes() == plain.backward(dy).tobytes()


def test_a_synchronised_norm_outside_of_run_is_refused() -> None:
    model = model_of(0)
    distributed.synchronize(model, distributed.Group(2))
    with pytest.raises(RuntimeError, match=r"must be called by the work that Group\.run runs"):
        model.forward(batch_of(0)[0])


def test_shards_have_dropout_masks_of_their_own_and_repeat_after_a_checkpoint() -> None:
    x, labels = batch_of(3)

    def trained(steps: int, state: dict[str, np.ndarray] | None = None) -> nn.Sequential:
        model = model_of(0, dropout=0.5)
        if state is not None:
            model.load_state_dict(state)
        parallel = distributed.DataParallel(model, distributed.Group(4), nn.SoftmaxCrossEntropy())
        optimizer = nn.SGD(model, 0.1)
        for _ in range(steps):
            step(parallel, x, labels)
            optimizer.step()
        return model

    whole, half = trained(6).state_dict(), trained(3).state_dict()
    again = trained(3, half).state_dict()
    assert all(again[name].tobytes() == array.tobytes() for name, array in whole.items())

    model = model_of(0, dropout=0.5)
    masks = distributed.DataParallel(model, distributed.Group(4)).run(
        lambda shard: shard.model["2"].forward(np.ones(64)).tobytes()
    )
    assert len(set(masks)) == 4


def test_float32_and_float64_parameters_in_one_model() -> None:
    rng = np.random.default_rng(0)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            self.wide, self.narrow = nn.Linear(4, 4, dtype=np.float64, rng=rng), nn.Linear(4, 2, rng=rng)

        def forward(self, x: np.ndarray) -> np.ndarray:
            return self.narrow.forward(self.wide.forward(x).astype(np.float32))

        def backward(self, dy: np.ndarray) -> None:
            self.wide.backward(self.narrow.backward(dy).astype(np.float64))

    x, dy = rng.standard_normal((12, 4)), rng.standard_normal((12, 2)).astype(np.float32)
    model = Mixed()
    model.forward(x)
    model.backward(dy)
    expected = {name: gradient.copy() for name, gradient in model.gradients().items()}

    def work(shard: distributed.Shard[Mixed]) -> None:
        part = shard.part(12)
        shard.model.forward(x[part])
        shard.model.backward(dy[part])

    for overlapped in (False, True):
        distributed.DataParallel(model, distributed.Group(3), overlap=overlapped).run(work)
        for name, gradient in model.gradients().items():
            assert gradient.dtype == expected[name].dtype
            np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)
            gradient[...] = np.nan


# ---- overlap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [1, 200, 2**18])
def test_overlapped_sums_have_the_same_bits(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_BUCKET", bucket)
    states = []
    for overlapped in (False, True):
        group, model = distributed.Group(5), model_of(0, dropout=0.25)
        distributed.synchronize(model, group)
        parallel = distributed.DataParallel(model, group, nn.SoftmaxCrossEntropy(), overlap=overlapped)
        optimizer = nn.SGD(model, 0.1)
        for seed in range(3):
            step(parallel, *batch_of(seed))
            optimizer.step()
        states.append(model.state_dict())
    assert all(array.tobytes() == states[1][name].tobytes() for name, array in states[0].items())


def test_last_layers_are_added_before_the_first_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_BUCKET", 1)
    added: list[int] = []
    head_is_added = threading.Event()
    plain_sum = distributed.Group.sum

    def watched_sum(self: distributed.Group, parts: list[np.ndarray], out: np.ndarray) -> None:
        plain_sum(self, parts, out)
        added.append(out.size)
        if sum(added) == 4:  # weights and bias
            head_is_added.set()

    class Late(nn.Linear):
        def backward(self, dy: np.ndarray, *, accumulate: bool = False, need_dx: bool = True) -> np.ndarray | None:
            assert head_is_added.wait(PATIENCE)
            return super().backward(dy, accumulate=accumulate, need_dx=need_dx)

    monkeypatch.setattr(distributed.Group, "sum", watched_sum)
    rng = np.random.default_rng(0)
    model = nn.Sequential(Late(2, 3, rng=rng), nn.Linear(3, 1, rng=rng))
    parallel = distributed.DataParallel(model, distributed.Group(2), overlap=True)
    x = np.ones((4, 2), np.float32)
    parallel.run(lambda shard: shard.model.backward(shard.model.forward(x[shard.part(4)])) is not None)
    assert sorted(added) == [1, 3, 3, 6]


def test_a_second_backward_with_overlap_is_refused() -> None:
    x, labels = batch_of(1)

    def twice(shard: distributed.Shard[nn.Sequential]) -> None:
        for _ in range(2):
            shard.loss.forward(shard.model.forward(x[shard.part(BATCH)]), labels[shard.part(BATCH)])
            shard.model.backward(shard.loss.backward())

    parallel = distributed.DataParallel(model_of(0), distributed.Group(3), nn.SoftmaxCrossEntropy(), overlap=True)
    with pytest.raises(
        RuntimeError, match=r"backward of Sequential ran twice, but with overlap=True its gradients are"
    ):
        parallel.run(twice)


def test_after_a_failure_overlap_works_again() -> None:
    models = [model_of(0) for _ in range(2)]
    plain, parallel = (
        distributed.DataParallel(model, distributed.Group(3), nn.SoftmaxCrossEntropy(), overlap=overlapped)
        for model, overlapped in zip(models, (False, True), strict=True)
    )

    def fail(shard: distributed.Shard[nn.Sequential]) -> None:
        shard.model["3"].backward(shard.model["3"].forward(np.ones((2, 11))))  # only one layer has a backward
        if shard.index == 1:
            raise KeyError("shard 1")

    with pytest.raises(KeyError, match="shard 1"):
        parallel.run(fail)
    for each in (plain, parallel):
        step(each, *batch_of(1))
    expected, got = (model.gradients() for model in models)
    assert all(gradient.tobytes() == expected[name].tobytes() for name, gradient in got.items())


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_failing_shard_ends_the_others_and_the_next_run_works() -> None:
    group = distributed.Group(3)

    def fail(shard: int) -> list[int]:
        if shard == 1:
            raise KeyError("shard 1")
        return group.exchange(shard)

    with pytest.raises(KeyError, match="shard 1"):
        group.run(fail)
    assert group.run(group.exchange) == [[0, 1, 2]] * 3
