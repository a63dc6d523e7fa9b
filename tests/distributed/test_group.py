"""Shards of one process: the tree of sums, gradients of a split batch, synchronised batch norm, and failures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from retrograd import distributed, nn
from retrograd.distributed.tree import add_nodes, cover

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

    distributed.DataParallel(model, distributed.Group(3)).run(work)
    for name, gradient in model.gradients().items():
        assert gradient.dtype == expected[name].dtype
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)


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
