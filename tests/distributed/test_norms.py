"""Synchronised batch norm in the programs of shards: whole batches, the same bits on all ranks, failures inside."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import distributed, graph, nn
from support.mpi import run_on_ranks, two_or_three_ranks

BATCH = 13


class Weighted(nn.Module):
    """The sum of ``y * weights``, so that gradients are known."""

    def forward(self, y: Any, weights: Any) -> Any:
        return graph.sum(y * weights)


def arrays(*shape: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return 3 * rng.standard_normal(shape) + 1, rng.standard_normal(shape)


def summed(parallel: distributed.DataParallel[Any], x: np.ndarray, weights: np.ndarray) -> float:
    return float(sum(parallel.run(lambda shard: shard.step(x[shard.part(BATCH)], weights[shard.part(BATCH)]))))


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "relu"},
        {"activation": "gelu", "eps": 0.1},
        {"affine": False},
        {"running": False},
        {"channel_axis": -1, "update": rg.RunningUpdate.keras(0.7)},
    ],
)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_numbers_of_the_whole_batch(shards: int, options: dict[str, Any]) -> None:
    """Of parameters behind and in front of the norm, which need dx, and of the running statistics."""
    group = distributed.Group(shards)
    states = []
    step: Any
    for norm in (
        nn.BatchNorm(4, dtype=np.float64, **options),
        distributed.SyncBatchNorm(4, group, dtype=np.float64, **options),
    ):
        model = nn.Sequential(nn.Linear(4, 4, bias=False, dtype=np.float64, rng=0), norm)
        optimizer = nn.SGD(model, 0.01)
        if isinstance(norm, distributed.SyncBatchNorm):
            parallel = distributed.DataParallel(model, group, Weighted(), optimizer)
            step = functools.partial(summed, parallel)
        else:
            step = nn.compile(model, Weighted(), optimizer)
        before = model.state_dict()
        losses = [step(*arrays(BATCH, 4, 4, seed=seed)) for seed in range(3)]
        after = model.state_dict()
        assert all(not np.array_equal(after[name], array) for name, array in before.items())
        states.append({"losses": losses, **after, "y": model.predict(arrays(3, 4, 4)[0])})
    for name, expected in states[0].items():
        np.testing.assert_allclose(states[1][name], expected, rtol=1e-11, atol=1e-11, err_msg=name)


def test_running_statistics_have_the_bits_of_the_functions() -> None:
    group, (x, dy) = distributed.Group(3), arrays(BATCH, 5)
    norm = distributed.SyncBatchNorm(5, group, activation="tanh")
    parallel = distributed.DataParallel(norm, group, Weighted(), nn.SGD(norm, 0.5))
    x, dy = x.astype(np.float32), dy.astype(np.float32)
    summed(parallel, x, dy)

    parts = [group.part(BATCH, shard) for shard in range(3)]
    gamma, beta, mean, var = (np.full(5, value, np.float32) for value in (1, 0, 0, 1))
    total = rg.combine_statistics([rg.batch_norm_statistics(x[part]) for part in parts])
    sums = []
    for shard, part in enumerate(parts):
        running: Any = {"running_mean": mean, "running_var": var} if shard == 0 else {}
        _, cache = rg.batch_norm_forward(
            x[part], gamma, beta, mean=total.mean, var=total.var, count=total.count, activation="tanh",
            slope_from="input", **running,
        )  # fmt: skip
        sums.append(rg.batch_norm_gradient_sums(dy[part], cache))
    assert norm.running_mean.value.tobytes() == mean.tobytes()
    assert norm.running_var.value.tobytes() == var.tobytes()
    for parameter, old, field in ((norm.gamma, gamma, "sum_dz_xhat"), (norm.beta, beta, "sum_dz")):
        first, second, third = (getattr(each, field).astype(np.float32) for each in sums)
        gradient = (first + second) + third  # the tree of three shards
        assert parameter.value.tobytes() == (old - np.float32(0.5) * gradient).tobytes()


def test_all_shards_have_the_same_running_statistics() -> None:
    group, (x, dy) = distributed.Group(4), arrays(BATCH, 5)
    norm = distributed.SyncBatchNorm(5, group, dtype=np.float64)
    parallel = distributed.DataParallel(norm, group, Weighted(), nn.SGD(norm, 0.5))

    def work(shard: distributed.Shard[distributed.SyncBatchNorm]) -> bytes:
        shard.step(x[shard.part(BATCH)], dy[shard.part(BATCH)])
        assert shard.model is not norm
        assert shard.model.group is group
        assert shard.model.gamma is norm.gamma
        return shard.model.running_mean.value.tobytes() + shard.model.running_var.value.tobytes()

    for _ in range(3):
        found = parallel.run(work)
        assert found == [norm.running_mean.value.tobytes() + norm.running_var.value.tobytes()] * 4


def test_a_copy_belongs_to_the_group_and_has_statistics_of_its_own() -> None:
    group, (x, dy) = distributed.Group(2), arrays(BATCH, 5)
    norm = distributed.SyncBatchNorm(5, group, dtype=np.float64)
    other = copy.deepcopy(norm)
    assert other.group is group
    parallel = distributed.DataParallel(other, group, Weighted(), nn.SGD(other, 0.5))
    summed(parallel, x, dy)
    np.testing.assert_allclose(other.running_mean.value, 0.1 * x.mean(0), rtol=1e-12)
    assert norm.running_mean.value.tolist() == [0] * 5
    assert norm.gamma.value.tolist() == [1] * 5


def test_synchronize_takes_effect_in_a_model_that_is_trained() -> None:
    """Its programs are compiled again; the optimizer goes on."""
    x, target = arrays(BATCH, 5)

    def model_of() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm(5, dtype=np.float64), nn.Linear(5, 5, dtype=np.float64, rng=0))

    group, model, whole = distributed.Group(3), model_of(), model_of()
    optimizer = nn.SGD(model, 0.1, momentum=0.9)
    parallel = distributed.DataParallel(model, group, nn.MeanSquaredError(), optimizer)
    parallel.step(x, target)
    whole.load_state_dict(model.state_dict())
    plain = nn.SGD(whole, 0.1, momentum=0.9)
    plain.load_state_dict(optimizer.state_dict())
    assert distributed.synchronize(model, group) == 1
    assert distributed.synchronize(model, group) == 0
    step = nn.compile(whole, nn.MeanSquaredError(), plain)
    for _ in range(2):
        assert parallel.step(x, target) == pytest.approx(step(x, target), rel=1e-12)
    for name, array in model.state_arrays().items():
        np.testing.assert_allclose(array, whole.state_arrays()[name], rtol=1e-10, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("failure", ["exchange of statistics", "exchange of sums", "loss", "shape"])
def test_a_failure_inside_the_program_of_one_shard_ends_the_others(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it inside their programs. Nothing is changed, and the next step is what it would have been."""
    group, real = distributed.Group(4), distributed.Group.exchange
    failing = False

    def exchange(self: distributed.Group, value: Any) -> list[Any]:
        kind = "statistics" if isinstance(value, rg.NormStatistics) else "sums"
        if failing and failure == f"exchange of {kind}" and self._current.shard == 2:
            raise KeyError(failure)
        return real(self, value)

    monkeypatch.setattr(distributed.Group, "exchange", exchange)
    models = [
        nn.Sequential(nn.Linear(5, 6, rng=0), distributed.SyncBatchNorm(6, group), nn.Dropout(0.5, rng=0))
        for _ in range(2)
    ]
    parallels = [
        distributed.DataParallel(model, group, nn.SoftmaxCrossEntropy(), nn.Adam(model, 0.1)) for model in models
    ]
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((BATCH, 5)), rng.integers(0, 6, BATCH)
    assert parallels[0].step(x, labels) == parallels[1].step(x, labels)
    before = models[0].state_dict()

    def work(shard: distributed.Shard[nn.Sequential]) -> float:
        part = shard.part(BATCH)
        inputs, classes = x[part], labels[part]
        if shard.index == 2 and failure == "loss":
            classes = classes + 6
        if shard.index == 2 and failure == "shape":
            inputs = inputs[:, :4]
        return float(shard.step(inputs, classes, share=shard.share(BATCH)))

    failing = True
    kinds = {"loss": (IndexError, "must be from 0 to below 6"), "shape": (ValueError, "layer '0', Linear")}
    kind, message = kinds.get(failure, (KeyError, failure))
    with pytest.raises(kind, match=message):
        parallels[0].run(work)
    failing = False
    assert all(array.tobytes() == before[name].tobytes() for name, array in models[0].state_arrays().items())
    assert parallels[0].step(x, labels) == parallels[1].step(x, labels)
    after = models[1].state_arrays()
    assert all(array.tobytes() == after[name].tobytes() for name, array in models[0].state_arrays().items())


# ---- ranks -----------------------------------------------------------------------------------------------------------

PROGRAM = """
import hashlib, sys
import numpy as np
import retrograd as rg
from retrograd import distributed, graph, nn

class Sequences(nn.Module):
    '''An LSTM with dropout, norms in front of it and behind it, and one that is used twice.'''

    def __init__(self, group, rng):
        self.body = nn.Sequential(
            nn.BatchNorm(3, channel_axis=2),
            nn.LSTM(3, 6, layers=2, dropout=0.3, bidirectional=True, rng=rng),
        )
        self.head = nn.Sequential(
            nn.BatchNorm(12, activation="gelu"), nn.Dropout(0.4, rng=rng), nn.Linear(12, 12, rng=rng)
        )
        self.twice = nn.BatchNorm(12, update=rg.RunningUpdate.keras(0.8))
        assert distributed.synchronize(self, group) == 3

    def forward(self, x, lengths):
        y = graph.mean(self.body(x, lengths=lengths), axis=0)
        return self.twice(self.head(self.twice(y)))

def trained(group, steps=4):
    rng = np.random.default_rng(0)
    model = Sequences(group, rng)
    optimizer = nn.AdamW(model, 0.01, maximum_norm=0.5)
    parallel = distributed.DataParallel(
        model, group, nn.SoftmaxCrossEntropy(), optimizer, metrics={{"accuracy": nn.accuracy}}
    )
    text = ""
    for step in range(steps):
        count = 13 if step % 2 else 10  # of 8 shards some have one sample, some two
        x, labels = rng.standard_normal((5, count, 3), dtype=np.float32), rng.integers(0, 12, count)
        lengths = rng.integers(1, 6, count)
        text += repr(parallel.step(x, labels, batch_axis=1, lengths=lengths))
    digest = hashlib.sha256(text.encode() + model.predict(x, lengths).tobytes())
    for name, array in {{**model.state_arrays(), **optimizer.arrays()}}.items():
        assert np.isfinite(array).all(), name
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()

{body}
"""


def program(body: str) -> tuple[str, str]:
    return "-c", PROGRAM.format(body=body)


@pytest.fixture(scope="module")
def expected() -> str:
    """The digest of a training run of this process alone."""
    names: dict[str, Any] = {}
    exec(PROGRAM.format(body="found = trained(distributed.Group(8))"), names)
    return str(names["found"])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_any_number_of_ranks_trains_to_the_same_bits(ranks: int, expected: str) -> None:
    result = run_on_ranks(ranks, *program("sys.stdout.write(trained(distributed.world(8)) + ' ')"))
    assert result.stdout.split() == [expected] * ranks
    assert result.stderr == ""


@two_or_three_ranks
def test_programs_exchange_values_of_all_ranks(ranks: int) -> None:
    """Several times in each run, and other values in each."""
    body = """
group = distributed.world(5)

def work(shard):
    def add(values):
        return sum(group.exchange(values * 10.0**shard))

    def others(values):
        parts = group.exchange((shard, values.tolist()))
        assert [index for index, _ in parts] == list(range(5))
        return np.array([values for _, values in parts])

    def function(x):
        total = graph.call(add, graph.spec((2,), np.float64), x)
        return total, graph.call(others, graph.spec((5, 2), np.float64), total + shard)

    program = graph.compile(function, graph.spec((2,), np.float64))
    for step in range(20):
        total, parts = program(np.array([step, 2.0 * step]))
        assert total.tolist() == [11111.0 * step, 22222.0 * step]
        assert parts.tolist() == [[11111.0 * step + i, 22222.0 * step + i] for i in range(5)]
    return shard

assert group.run(work) == [0, 1, 2, 3, 4]
sys.stdout.write("ok ")
"""
    assert run_on_ranks(ranks, *program(body)).stdout.split() == ["ok"] * ranks


# One rank's exchange fails, in forward or in backward.
FAILING = """
group = distributed.world(4)
last, real, failing = group.rank == group.size - 1, group.exchange, None

def exchange(value):
    if last and failing == type(value).__name__:
        raise KeyError("no such file")
    return real(value)

group.exchange = exchange
model = nn.Sequential(nn.Linear(3, 4, rng=0), distributed.SyncBatchNorm(4, group), nn.Dropout(0.5, rng=0))
parallel = distributed.DataParallel(model, group, nn.MeanSquaredError(), nn.Adam(model, 0.1))
x, target = np.random.default_rng(0).standard_normal((2, 9, 4), dtype=np.float32)
x = x[:, :3]
"""


@pytest.mark.parametrize("kind", ["NormStatistics", "ndarray"])
@two_or_three_ranks
def test_an_error_inside_a_program_of_one_rank_ends_all(kind: str, ranks: int) -> None:
    body = f"""{FAILING}
parallel.step(x, target)
failing = {kind!r}
parallel.step(x, target)
sys.stdout.write("went on")
"""
    result = run_on_ranks(ranks, *program(body), code=1)
    assert result.stdout == ""
    assert result.stderr.count(f"retrograd: rank {ranks - 1} failed and ends all ranks\n") == 1
    assert result.stderr.count("KeyError: 'no such file'") == 1
    assert result.stderr.count("Traceback") == 1


@two_or_three_ranks
def test_an_error_inside_a_program_that_is_caught_changes_nothing(ranks: int) -> None:
    body = f"""{FAILING}
def bits():
    return b"".join(array.tobytes() for array in model.state_arrays().values())

losses = [parallel.step(x, target)]
for failing in ("NormStatistics", "ndarray"):
    before = bits()
    try:
        parallel.step(x, target)
    except (KeyError, distributed.RankError) as error:
        sys.stdout.write(f"{{type(error).__name__}} {{error}}|")
    assert bits() == before
failing = None
losses.append(parallel.step(x, target))

# As if nothing had happened.
again = nn.Sequential(nn.Linear(3, 4, rng=0), distributed.SyncBatchNorm(4, group), nn.Dropout(0.5, rng=0))
other = distributed.DataParallel(again, group, nn.MeanSquaredError(), nn.Adam(again, 0.1))
assert losses == [other.step(x, target) for _ in range(2)]
assert bits() == b"".join(array.tobytes() for array in again.state_arrays().values())
"""
    said = run_on_ranks(ranks, *program(body)).stdout.strip("|").split("|")
    mine, others = "KeyError 'no such file'", f"RankError rank {ranks - 1} failed: KeyError: 'no such file'"
    assert sorted(said) == [mine] * 2 + [others] * (2 * (ranks - 1))


@two_or_three_ranks
def test_a_norm_that_is_in_evaluation_mode_on_one_rank_is_noticed(ranks: int) -> None:
    """Its programs exchange nothing, while those of the others wait."""
    body = """
group = distributed.world(4)
model = nn.Sequential(nn.Linear(3, 4, rng=0), distributed.SyncBatchNorm(4, group))
parallel = distributed.DataParallel(model, group, nn.MeanSquaredError(), nn.SGD(model, 0.1))
x, target = np.random.default_rng(0).standard_normal((2, 9, 4), dtype=np.float32)
x = x[:, :3]
parallel.step(x, target)
before = model.state_dict()
model["1"].training = group.rank != 1
try:
    parallel.step(x, target)
except (ValueError, distributed.RankError) as error:
    sys.stdout.write(f"{group.rank} {type(error).__name__} {error}|")
assert all(array.tobytes() == before[name].tobytes() for name, array in model.state_arrays().items())
model["1"].training = True
parallel.step(x, target)
"""
    said = run_on_ranks(ranks, *program(body)).stdout.strip("|").split("|")
    message = "Group: the call is Group.run on rank 1, but Group.exchange on rank 0"
    assert sorted(said) == [f"{rank} {'ValueError' if rank == 1 else 'RankError'} {message}" for rank in range(ranks)]


@two_or_three_ranks
def test_a_rank_that_ends_while_programs_wait_for_it_ends_all(ranks: int) -> None:
    body = f"""{FAILING}
parallel.step(x, target)
if last:
    sys.exit(0)
parallel.step(x, target)
"""
    result = run_on_ranks(ranks, *program(body), code=1)
    message = f"RankError: Group.exchange: rank {ranks - 1} has ended, and the others wait for it\n"
    assert result.stderr.count(message) == 1
    assert result.stderr.count("Traceback") == 1
