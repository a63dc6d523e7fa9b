"""Shards of one process: the tree of sums, gradients of a split batch, synchronised batch norm, and failures."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from retrograd import distributed, graph, nn
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


def parallel_of(
    model: nn.Sequential, shards: int, rate: float = 0.1, **options: Any
) -> distributed.DataParallel[nn.Sequential]:
    group = distributed.Group(shards)
    return distributed.DataParallel(model, group, nn.SoftmaxCrossEntropy(), nn.SGD(model, rate), **options)


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


@pytest.mark.parametrize("norms", [0, 1])
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_a_step_is_that_of_the_whole_batch(shards: int, norms: int) -> None:
    plain, model = (model_of(0) if norms else without_norm() for _ in range(2))
    # A bias before a norm has the gradient 0 but for rounding, which Adam would divide by a small eps.
    optimizers = [nn.Adam(each, 0.01, eps=1e-3, maximum_norm=0.5) for each in (plain, model)]
    metrics = {"accuracy": nn.accuracy}
    step = nn.compile(plain, nn.SoftmaxCrossEntropy(), optimizers[0], metrics=metrics)
    group = distributed.Group(shards)
    assert distributed.synchronize(model, group) == norms
    parallel = distributed.DataParallel(model, group, nn.SoftmaxCrossEntropy(), optimizers[1], metrics=metrics)
    for seed in range(4):
        x, labels = batch_of(seed)
        loss, scores = parallel.step(x, labels)
        wanted, wanted_scores = step(x, labels)
        assert loss == pytest.approx(wanted, rel=1e-12)
        assert scores == {"accuracy": pytest.approx(wanted_scores["accuracy"], rel=1e-12)}
    assert optimizers[1].steps == 4
    for name, array in model.state_arrays().items():
        np.testing.assert_allclose(array, plain.state_arrays()[name], rtol=1e-9, atol=1e-13, err_msg=name)


def test_one_shard_is_a_step_of_nn_bit_for_bit() -> None:
    plain, model = model_of(0, dropout=0.5), model_of(0, dropout=0.5)
    step = nn.compile(plain, nn.SoftmaxCrossEntropy(), nn.SGD(plain, 0.1))
    parallel = parallel_of(model, 1)
    for seed in range(3):
        assert parallel.step(*batch_of(seed)) == step(*batch_of(seed))
    for name, array in model.state_arrays().items():
        assert array.tobytes() == plain.state_arrays()[name].tobytes(), name


def test_run_updates_by_the_sum_of_what_the_shards_compute() -> None:
    """With shares that are not those of the samples, against gradients of nn.Step, added up."""
    model, (x, labels), shares = without_norm(), batch_of(1), (0.5, 2.0, -1.0)
    before = model.state_dict()
    step = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.SGD(model, 0.1))
    parts = [slice(0, 5), slice(5, 30), slice(30, 37)]
    single = [step.gradients(x[part], labels[part]) for part in parts]

    def work(shard: distributed.Shard[nn.Sequential]) -> float:
        part = parts[shard.index]
        return float(shard.step(x[part], labels[part], share=shares[shard.index]))

    assert parallel_of(model, 3).run(work) == pytest.approx([loss for loss, _ in single], rel=1e-12)
    for name, parameter in model.parameters().items():
        total = sum(share * gradients[name] for share, (_, gradients) in zip(shares, single, strict=True))
        np.testing.assert_allclose(parameter.value, before[name] - 0.1 * total, rtol=1e-10, atol=1e-14, err_msg=name)


def without_norm() -> nn.Sequential:
    rng = np.random.default_rng(0)
    layers = nn.Linear(5, 11, dtype=np.float64, rng=rng), nn.Tanh(), nn.Linear(11, 3, dtype=np.float64, rng=rng)
    return nn.Sequential(*layers)


def test_states_are_arguments_and_results() -> None:
    """Without a loss, forward returns it, and what else a shard needs for its next step."""

    class Walk(nn.Module):
        def __init__(self) -> None:
            self.lstm, self.loss = nn.LSTM(2, 3, dtype=np.float64, rng=0), nn.MeanSquaredError()

        def forward(self, x: nn.Tensor, target: nn.Tensor, h: nn.Tensor, c: nn.Tensor) -> Any:
            y, state = self.lstm.run(x, (h, c))
            return self.loss(y, target), state

    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((4, 6, 7, 2)), rng.standard_normal((4, 6, 7, 3))
    found = []
    for shards in (1, 3):
        model, h, c = Walk(), np.zeros((1, 7, 3)), np.zeros((1, 7, 3))
        parallel = distributed.DataParallel(model, distributed.Group(shards), None, nn.SGD(model, 0.1))

        def work(
            shard: distributed.Shard[Walk], x: np.ndarray, target: np.ndarray, h: np.ndarray, c: np.ndarray
        ) -> float:
            part, share = shard.part(7), shard.share(7)
            loss, state = shard.step(x[:, part], target[:, part], h[:, part], c[:, part], share=share)
            h[:, part], c[:, part] = state
            return share * float(loss)

        losses = [sum(parallel.run(functools.partial(work, x=x[i], target=target[i], h=h, c=c))) for i in range(len(x))]
        found.append((losses, h, c, *model.state_arrays().values()))
    for one, three in zip(*found, strict=True):
        np.testing.assert_allclose(one, three, rtol=1e-10, atol=1e-13)
    assert np.abs(found[0][1]).max() > 0.01


def test_batches_are_cut_on_their_axis_and_keywords_too() -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((6, 5, 2)), rng.integers(0, 2, (6, 5))
    lengths, weights = np.array([6, 1, 4, 2, 3]), rng.random((6, 5))
    states = []
    for shards in (1, 4):
        draw = np.random.default_rng(0)
        model = nn.Sequential(nn.LSTM(2, 3, dtype=np.float64, rng=draw), nn.Linear(3, 2, dtype=np.float64, rng=draw))
        parallel = parallel_of(model, shards)
        loss = parallel.step(x, labels, batch_axis=1, lengths=lengths, weights=weights)
        states.append([loss, *model.state_dict().values()])
    for one, four in zip(*states, strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-10)
    with pytest.raises(ValueError, match=r"argument 1 has 4 samples, its shape is \(6, 4\), but argument 0 has 5"):
        parallel.step(x, labels[:, :4], batch_axis=1)
    with pytest.raises(TypeError, match="no argument is an array"):
        parallel.step(None, 3)


def test_frozen_parameters_stay_and_changes_of_layers_take_effect() -> None:
    model, (x, labels) = without_norm(), batch_of(1)
    parallel = parallel_of(model, 3)
    parallel.step(x, labels)
    before = model.state_dict()
    model["0"].freeze()
    parallel.step(x, labels)
    after = model.state_dict()
    assert [name for name in before if not np.array_equal(before[name], after[name])] == ["2.w", "2.b"]
    model.unfreeze()
    parallel.step(x, labels)
    assert not np.array_equal(model.state_dict()["0.w"], after["0.w"])
    # Another activation, in place of the one that the shards have copied.
    model.__setattr__("1", nn.ReLU())
    wanted = nn.compile(model, nn.SoftmaxCrossEntropy(), nn.SGD(model, 0.1)).evaluate(x, labels)
    assert parallel.step(x, labels) == pytest.approx(wanted, rel=1e-12)


def test_a_synchronised_norm_in_evaluation_is_a_plain_one() -> None:
    group, model, plain = distributed.Group(4), model_of(0), model_of(0)
    distributed.synchronize(model, group)
    x, labels = batch_of(2)
    assert model.predict(x).tobytes() == plain.predict(x).tobytes()
    found = []
    for each in (model, plain):
        for _, module in each.modules():
            module.training = not isinstance(module, nn.BatchNorm)
        _, gradients = nn.compile(each, nn.SoftmaxCrossEntropy(), nn.SGD(each, 0.1)).gradients(x, labels)
        found.append({name: gradient.tobytes() for name, gradient in gradients.items()})
    assert found[0] == found[1]


def test_a_synchronised_norm_outside_of_run_is_refused() -> None:
    model = model_of(0)
    distributed.synchronize(model, distributed.Group(2))
    with pytest.raises(RuntimeError, match=r"must be called by the work that Group\.run runs"):
        model(batch_of(0)[0])


def test_shards_have_dropout_masks_of_their_own_and_repeat_after_a_checkpoint() -> None:
    x, labels = batch_of(3)

    def trained(steps: int, state: dict[str, np.ndarray] | None = None) -> nn.Sequential:
        model = model_of(0, dropout=0.5)
        if state is not None:
            model.load_state_dict(state)
        parallel = parallel_of(model, 4)
        for _ in range(steps):
            parallel.step(x, labels)
        return model

    whole, half = trained(6).state_dict(), trained(3).state_dict()
    again = trained(3, half).state_dict()
    assert all(again[name].tobytes() == array.tobytes() for name, array in whole.items())


def test_dropout_masks_of_shards_differ() -> None:
    """The same samples in all shards, which see other parts of them."""
    model = nn.Sequential(nn.Dropout(0.5, rng=0), nn.Linear(64, 1, rng=0))
    group = distributed.Group(4)
    loss = distributed.DataParallel(model, group, lambda y, target: graph.sum(y * target), nn.SGD(model, 0.1))
    one = np.ones((1, 64), np.float32), np.ones((1, 1), np.float32)
    for _ in range(2):
        assert len(set(loss.run(lambda shard: shard.step(*one, share=0.25)))) == 4
    assert model["0"].stream.saved[1] == 2


def test_float32_and_float64_parameters_in_one_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self.wide, self.narrow = nn.Linear(4, 4, dtype=np.float64, rng=rng), nn.Linear(4, 2, rng=rng)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.narrow(graph.cast(self.wide(x), np.float32))

    rng = np.random.default_rng(1)
    x, target = rng.standard_normal((12, 4)), rng.standard_normal((12, 2))
    states = []
    for shards in (1, 3):
        model = Mixed()
        group = distributed.Group(shards)
        parallel = distributed.DataParallel(model, group, nn.MeanSquaredError(), nn.SGD(model, 0.1))
        before = model.state_dict()
        for _ in range(3):
            parallel.step(x, target)
        states.append(model.state_dict())
    for name, array in states[1].items():
        assert array.dtype == before[name].dtype
        assert not np.array_equal(array, before[name]), name
        np.testing.assert_allclose(array, states[0][name], rtol=1e-5, atol=1e-6)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_failed_step_changes_nothing() -> None:
    model, (x, labels) = model_of(0, dropout=0.5), batch_of(1)
    optimizer = nn.Adam(model, 0.1)
    parallel = distributed.DataParallel(model, distributed.Group(3), nn.SoftmaxCrossEntropy(), optimizer)
    parallel.step(x, labels)
    before = {**model.state_dict(), **optimizer.state_dict()}

    def fail(shard: distributed.Shard[nn.Sequential]) -> None:
        shard.step(x[shard.part(BATCH)], labels[shard.part(BATCH)])
        if shard.index == 1:
            raise KeyError("shard 1")

    with pytest.raises(KeyError, match="shard 1"):
        parallel.run(fail)
    with pytest.raises(IndexError, match="an index is 3, must be from 0 to below 3"):
        parallel.step(x, np.where(np.arange(BATCH) == 20, 3, labels))
    for name, array in {**model.state_arrays(), **optimizer.arrays()}.items():
        assert array.tobytes() == before[name].tobytes(), name
    # The next one is what it would have been.
    other = model_of(0, dropout=0.5)
    again = distributed.DataParallel(other, distributed.Group(3), nn.SoftmaxCrossEntropy(), nn.Adam(other, 0.1))
    again.step(x, labels)
    assert parallel.step(x, labels) == again.step(x, labels)
    assert all(a.tobytes() == other.state_arrays()[name].tobytes() for name, a in model.state_arrays().items())


@pytest.mark.parametrize("shards", [1, 3])
def test_work_takes_one_step(shards: int) -> None:
    x, labels = batch_of(1)
    parallel = parallel_of(without_norm(), shards)

    def twice(shard: distributed.Shard[nn.Sequential]) -> None:
        for _ in range(2):
            shard.step(x[shard.part(BATCH)], labels[shard.part(BATCH)])

    with pytest.raises(RuntimeError, match=r"shard \d has taken its step of this run; call run for another"):
        parallel.run(twice)
    with pytest.raises(RuntimeError, match=r"the work of shard \d did not call shard\.step"):
        parallel.run(lambda shard: shard.part(BATCH))
    parallel.model.eval()
    with pytest.raises(RuntimeError, match=r"the model is in evaluation mode; call model\.train\(\) first"):
        parallel.step(x, labels)


def test_a_share_of_the_only_shard_is_refused() -> None:
    x, labels = batch_of(1)
    with pytest.raises(ValueError, match=r"share is 0\.5, but the only shard has the whole batch"):
        parallel_of(without_norm(), 1).run(lambda shard: shard.step(x, labels, share=0.5))


def test_a_failing_shard_ends_the_others_and_the_next_run_works() -> None:
    group = distributed.Group(3)

    def fail(shard: int) -> list[int]:
        if shard == 1:
            raise KeyError("shard 1")
        return group.exchange(shard)

    with pytest.raises(KeyError, match="shard 1"):
        group.run(fail)
    assert group.run(group.exchange) == [[0, 1, 2]] * 3
