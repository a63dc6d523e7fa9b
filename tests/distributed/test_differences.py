"""Ranks that differ: other models, options, values, shards, batches or optimizers on one rank are refused by all."""

from __future__ import annotations

import operator
import re

import numpy as np
import pytest

from retrograd import distributed, nn
from support.mpi import run_on_ranks

PROGRAM = """
import sys
import numpy as np
from retrograd import distributed, nn

group = distributed.world(4)
odd = group.rank == {odd}

def model_of(width=8, out=2, seed=0, eps=1e-5, bias=True, activation=None):
    rng = np.random.default_rng(seed)
    return nn.Sequential(
        nn.Linear(4, width, rng=rng, bias=bias),
        nn.BatchNorm(width, eps=eps, activation=activation),
        nn.Dropout(0.5, rng=rng),
        nn.Linear(width, out, rng=rng),
    )

def parallel_of(model, group=group, loss=nn.MeanSquaredError(), rate=0.1):
    return distributed.DataParallel(model, group, loss, nn.SGD(model, rate, momentum=0.5))

def work_on(count):
    x, target = np.ones((count, 4), np.float32), np.ones((count, 2), np.float32)
    def work(shard):
        part, share = shard.part(count), shard.share(count)
        return shard.step(x[part], target[part], share=share)
    return work

def refused(call):
    try:
        call()
    except (ValueError, distributed.RankError) as error:
        sys.stdout.write(f"{{group.rank}} {{type(error).__name__}} {{error}}|")
    else:
        sys.stdout.write(f"{{group.rank}} went on|")
    # The ranks still understand each other.
    assert group.broadcast(group.rank) == 0
    assert group.run(lambda shard: shard) == [0, 1, 2, 3]

{body}
"""


def all_refusals(ranks: int, odd: int, *bodies: str) -> list[str]:
    """What all ranks say about each difference: ValueError on the rank that differs, RankError on the others."""
    result = run_on_ranks(ranks, "-c", PROGRAM.format(odd=odd, body="\n".join(bodies)))
    assert result.stderr == ""
    said: dict[int, list[list[str]]] = {rank: [] for rank in range(ranks)}
    for line in result.stdout.strip("|\n").split("|"):
        rank, *answer = line.split(" ", 2)
        said[int(rank)].append(answer)
    messages = []
    for answers in zip(*said.values(), strict=True):
        kinds = [kind for kind, _ in answers]
        assert kinds == ["ValueError" if rank == odd else "RankError" for rank in range(ranks)], answers
        (message,) = {message for _, message in answers}
        messages.append(message)
    assert len(messages) == len(bodies)
    return messages


def refusals(ranks: int, odd: int, body: str) -> str:
    return all_refusals(ranks, odd, body)[0]


MODELS = [
    (
        "refused(lambda: parallel_of(model_of(9 if odd else 8), group))",
        "DataParallel: parameter 0.w is float32 of shape (9, 4) on rank {odd}, "
        "but float32 of shape (8, 4) on rank {usual}",
    ),
    (
        "refused(lambda: parallel_of(model_of(out=3 if odd else 2), group))",
        "DataParallel: parameter 3.w is float32 of shape (3, 8) on rank {odd}, "
        "but float32 of shape (2, 8) on rank {usual}",
    ),
    (
        "refused(lambda: parallel_of(model_of(bias=not odd), group))",
        "DataParallel: parameter 0.b is missing on rank {odd}, but float32 of shape (8,) on rank {usual}",
    ),
    (
        "refused(lambda: parallel_of(model_of(eps=0.1 if odd else 1e-5), group))",
        "DataParallel: eps of layer 1 is 0.1 on rank {odd}, but 1e-05 on rank {usual}",
    ),
    (
        "model = model_of()\nif odd: distributed.synchronize(model, group)\nrefused(lambda: parallel_of(model, group))",
        "DataParallel: layer 1 is SyncBatchNorm on rank {odd}, but BatchNorm on rank {usual}",
    ),
    (
        "loss = nn.MeanSquaredError() if odd else nn.Huber()\nrefused(lambda: parallel_of(model_of(), group, loss))",
        "DataParallel: loss is MeanSquaredError on rank {odd}, but Huber on rank {usual}",
    ),
    (
        "refused(lambda: parallel_of(model_of(), group, nn.Huber(delta=2.0 if odd else 1.0)))",
        "DataParallel: delta of loss is 2.0 on rank {odd}, but 1.0 on rank {usual}",
    ),
    (
        "model = model_of()\nkind = nn.Adam if odd else nn.RMSProp\n"
        "refused(lambda: distributed.DataParallel(model, group, None, kind(model)))",
        "DataParallel: the optimizer is Adam on rank {odd}, but RMSProp on rank {usual}",
    ),
    (
        "refused(lambda: parallel_of(model_of(), group.with_shards(5 if odd else 4)))",
        "DataParallel: the number of shards is 5 on rank {odd}, but 4 on rank {usual}",
    ),
    (
        "refused(lambda: group.with_shards(6 if odd else 4).run(lambda shard: shard))",
        "Group.run: the number of shards is 6 on rank {odd}, but 4 on rank {usual}",
    ),
]


@pytest.mark.parametrize(("ranks", "odd"), [(2, 1), (3, 2), (3, 0)])
def test_another_model_on_one_rank_is_refused_by_all(ranks: int, odd: int) -> None:
    """One model after the other, in the same processes."""
    expected = [message.format(odd=odd, usual=1 if odd == 0 else 0) for _, message in MODELS]
    assert all_refusals(ranks, odd, *(body for body, _ in MODELS)) == expected


def test_other_values_on_one_rank_are_refused_not_replaced() -> None:
    body = """
model = model_of(seed=int(odd))
before = model["0"].w.value.copy()
refused(lambda: parallel_of(model, group))
assert np.array_equal(model["0"].w.value, before)
# What the message proposes.
model.load_state_dict(group.broadcast(model.state_dict()))
parallel_of(model, group).run(work_on(8))
"""
    digest = "the digest [0-9a-f]{16}"
    for ranks, odd in ((2, 1), (3, 1)):
        assert re.fullmatch(
            rf"DataParallel: the content of parameter 0.w has {digest} on rank {odd}, but {digest} on rank 0\. "
            r"Build the model from the same seed on every rank, load the same file, or use rank 0's: "
            r"model\.load_state_dict\(group\.broadcast\(model\.state_dict\(\)\)\)",
            refusals(ranks, odd, body),
        )


def test_other_buffers_on_one_rank_are_refused() -> None:
    body = """
model = model_of()
if odd:
    model["1"].running_mean[3] = 0.5
refused(lambda: parallel_of(model, group))
"""
    assert "the content of buffer 1.running_mean has the digest" in refusals(3, 1, body)


def test_another_batch_on_one_rank_is_refused_before_anything_is_written() -> None:
    body = """
model = model_of()
parallel = parallel_of(model, group)
parallel.run(work_on(13))
before = model.state_dict()
refused(lambda: parallel.run(work_on(12 if odd else 13)))
assert all(np.array_equal(array, before[name]) for name, array in model.state_arrays().items())
parallel.run(work_on(6))  # a smaller last batch, on all ranks
"""
    message = "Group.run: the batch has 12 samples for shard {} on rank {}, but 13 for shard {} on rank {}"
    assert refusals(2, 1, body) == message.format(2, 1, 0, 0)
    assert refusals(3, 0, body) == message.format(0, 0, 1, 1)


def test_batches_of_ones_own_are_not_compared() -> None:
    """A rank may split its data itself, and a shard may look at other batches too, as long as one is the same."""
    body = """
parallel = parallel_of(model_of(), group)
x = np.ones((3 + 2 * group.rank, 4), np.float32)

def own(shard):
    shard.step(x, x[:, :2])
    if shard.index == 2:
        return 0
    if shard.index == 1:
        shard.part(100)
    return shard.part(64).start

assert parallel.run(own) == [0, 16, 0, 48]
sys.stdout.write("ok ")
"""
    assert run_on_ranks(2, "-c", PROGRAM.format(odd=1, body=body)).stdout.count("ok") == 2


def test_another_state_of_the_optimizer_on_one_rank_is_refused() -> None:
    body = """
model = model_of()
optimizer = nn.SGD(model, 0.1, momentum=0.5)
if odd:
    optimizer.arrays()["velocities.3.b"][1] = 1
refused(lambda: distributed.DataParallel(model, group, nn.MeanSquaredError(), optimizer))
"""
    assert re.match(
        r"DataParallel: the content of the state of the optimizer, velocities\.3\.b has the digest \S+ on rank 1, but "
        r"the digest \S+ on rank 0\. Load the same file on every rank",
        refusals(3, 1, body),
    )


def test_another_learning_rate_on_one_rank_is_noticed() -> None:
    body = """
parallel = parallel_of(model_of(), rate=0.2 if odd else 0.1)

def train():
    for _ in range(6):
        parallel.run(work_on(8))

refused(train)
"""
    for ranks, odd in ((2, 1), (3, 1)):
        message = refusals(ranks, odd, body)
        assert re.match(
            rf"DataParallel\.run: the content of parameter \S+ has the digest [0-9a-f]{{8}} on rank {odd}, but "
            r"the digest [0-9a-f]{8} on rank 0\. Optimizers need the same settings and state on every rank",
            message,
        )


def test_ranks_in_different_calls_say_so() -> None:
    """A synchronised norm on one rank only, without DataParallel, and calls in another order."""
    body = "refused(lambda: group.run(lambda shard: group.exchange(shard) if odd else shard))"
    assert refusals(3, 1, body) == "Group: the call is Group.exchange on rank 1, but Group.run on rank 0"
    body = "refused(lambda: group.broadcast(1) if odd else group.run(lambda shard: shard))"
    assert refusals(3, 2, body) == "Group: the call is Group.broadcast on rank 2, but Group.run on rank 0"


def test_shards_of_one_process_with_other_batches_are_refused() -> None:
    group = distributed.Group(3)
    with pytest.raises(ValueError, match=r"the batch has 7 samples for shard 1, but 9 for shard 0"):
        group.run(lambda shard: group.part(7 if shard == 1 else 9, shard))
    assert group.run(lambda shard: group.part(9, shard).stop) == [3, 6, 9]


def test_one_process_compares_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2, rng=np.random.default_rng(0)))
    parallel = distributed.DataParallel(model, distributed.Group(2), nn.MeanSquaredError(), nn.SGD(model, 0.0))
    x = np.ones((1, 2), np.float32)
    for added in range(3):
        target = model["0"].predict(x) + 1 + added
        losses = parallel.run(operator.methodcaller("step", x, target))
        assert losses == pytest.approx([(1 + added) ** 2] * 2, rel=1e-5)
        model["0"].w[...] += 1
