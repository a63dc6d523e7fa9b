"""Random operations of BNNSGraph's builder, whose operands and options come from its table.

Whatever an operation is given, it raises a TypeError, ValueError or IndexError that names it, or the graph has the
shapes that its tensors say, runs, writes to its outputs alone, has gradients of the operands' shapes, and computes the
same bits after it was saved and read. A failure prints the seed that repeats it:

    python tests/fuzz_bnns_graph.py --count 50000
    python tests/fuzz_bnns_graph.py --seed 1234 --count 1
"""

from __future__ import annotations

import enum
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from retrograd.bnns import BNNSGraph
from support.bnns_inside import graph_operations
from support.fuzz_driver import FLOATS, STRANGE, Broken, Memory, main, timed

Builder = BNNSGraph.Builder
Array = np.ndarray[Any, Any]
OPERATIONS = list(graph_operations.OPERATIONS.values())
REFUSALS = (TypeError, ValueError, IndexError)
TYPES = (np.float32, np.float64, np.int32, np.bool_)
# Shapes of the tensor and of its operands, one letter for each axis; those without a row have the tensor's shape.
# Letters are sizes of 1 to 4, except that q r s are twice, three times and four times h, and C is a multiple of g.
SHAPES = {
    "prelu": "nca alpha=c", "linear": "nai weight=oi bias=o", "matmul": "nab other=bo bias=o",
    "conv": "ncij weight=oc11 bias=o", "convTranspose": "nci weight=co1 bias=o", "pooling": "ncij",
    "batchNorm": "ncij mean=c variance=c weight=c bias=c", "instanceNorm": "ncij weight=c bias=c",
    "channelNorm": "ncij weight=c bias=c", "layerNorm": "nca weight=c bias=c", "rmsNorm": "nca scale=a",
    "trainingBatchNorm": "nci weight=c bias=c",
    "gather": "nca indices=b", "gatherAlongAxis": "nca indices=nca", "gatherND": "nca indices=b1",
    "scatter": "aaa updates=aaa indices=a", "scatterAlongAxis": "nca updates=nca indices=nca",
    "scatterND": "nca updates=bca indices=b1",
    "rnn": "lni initialHiddenStates=nh inputHiddenWeight=hi hiddenHiddenWeight=hh bias=h",
    "lstm": "lni initialHiddenStates=nh initialCellStates=nh inputHiddenWeight=si hiddenHiddenWeight=sh bias=s",
    "bidirectionalLSTM": "lni initialHiddenStates=nq initialCellStates=nq inputHiddenWeight=si hiddenHiddenWeight=sh "
    "bias=s inputHiddenWeightBack=si hiddenHiddenWeightBack=sh biasBack=s",
    "gru": "lni initialHiddenStates=nh inputHiddenWeight=ri hiddenHiddenWeight=rh bias=r inputBias=r",
    "dropout": "nc seed=", "softmaxCrossEntropy": "nc target=n weights=n", "squeeze": "n1",
    **dict.fromkeys(("meanSquaredError", "meanAbsoluteError", "huber", "sigmoidCrossEntropy"), "nc weights=nc"),
}  # fmt: skip
BOOLEAN = ("&", "|", "^", "~", "select")
INDICES = ("indices", "target")  # their type is that of integers, where the operation has them
SEEDS = {"seed": np.int64}


NEVER_REFUSED = {"tensorShape"}


class Drawn:
    """The arguments of one call."""

    def __init__(self, random: np.random.Generator, memory: Memory) -> None:
        self.random, self.memory = random, memory
        self.operation = OPERATIONS[random.integers(len(OPERATIONS))]
        self.sizes = {letter: int(random.integers(1, 5)) for letter in "nclabijoh"} | {"1": 1}
        for multiple, letter in enumerate("qrs", 2):
            self.sizes[letter] = multiple * self.sizes["h"]
        self.float = np.dtype(np.float32 if random.random() < 0.7 else np.float64)
        first, *others = SHAPES.get(self.operation.name, "nca").split()
        self.letters = dict(one.split("=") for one in others)
        self.shape = self.shape_of(first)
        self.x = self.array("", np.bool_ if self.operation.name in BOOLEAN else self.float, self.shape)
        self.labels = self.operation.labels
        self.given = {label.name: self.argument(label) for label in self.labels}
        self.mutate()

    def shape_of(self, letters: str) -> tuple[int, ...]:
        return tuple(self.sizes[letter] for letter in letters)

    def array(self, label: str, dtype: Any, shape: tuple[int, ...]) -> Array:
        made = self.memory.take(shape, dtype)
        if label in INDICES and np.dtype(dtype).kind == "i":
            made[...] = 0
        return made

    def argument(self, label: Any) -> Any:
        if label.optional and self.random.random() < 0.3:
            return None
        if label.kind == "tensor":
            return self.operand(label.name)
        return self.option(label.name, label.kind)

    def operand(self, label: str) -> Array:
        shape = self.shape_of(self.letters[label]) if label in self.letters else self.shape
        whole = label == "indices" or (label == "target" and self.operation.name == "softmaxCrossEntropy")
        dtype = SEEDS.get(label, np.int32 if whole else self.float)
        if self.operation.name in BOOLEAN and self.operation.name != "select":
            dtype = np.bool_
        return self.array(label, dtype, shape)

    def option(self, label: str, kind: str) -> Any:
        random, rank = self.random, len(self.shape)
        spatial = max(rank - 2, 0)
        if kind == "int":
            if label == "axis":
                return int(random.integers(-rank, rank)) if self.operation.name != "squeeze" else 1
            return {"k": 1, "groupCount": 1, "batchDimensionCount": 0}[label]
        if kind == "float":
            return float(random.choice([0.0, 0.25, 0.5, 0.9]))
        if kind == "bool":
            return bool(random.random() < 0.5) and label not in ("transpose", "transposeOther", "resetsState")
        if kind in ("ints", "sizes"):
            return self.integers(label, rank, spatial)
        if kind == "widths":
            return [1, 0] * rank
        if kind == "bounds":
            return (-0.5, 0.5)
        if kind == "dtype":
            return TYPES[random.integers(len(TYPES))]
        return self.case(kind, spatial)

    def integers(self, label: str, rank: int, spatial: int) -> list[int]:
        if label == "axes" and self.operation.name == "transpose":
            return [int(axis) for axis in self.random.permutation(rank)]
        if label == "axes":
            axes = self.random.permutation(rank)[: self.random.integers(1, rank + 1)]
            return [int(axis) for axis in axes]
        if label == "to":
            return [-1, self.shape[-1]]
        return [0 if label == "outputPaddingValues" else 1] * spatial

    def case(self, kind: str, spatial: int) -> Any:
        found: Any = getattr(Builder, kind)
        if issubclass(found, enum.Enum):
            cases = list(found)
        elif found is Builder.PoolingFunction:
            cases = [found.max, found.l2Norm, found.average(True), found.average(False)]
        elif found is Builder.Padding:
            cases = [found.replication, found.constant(0.5), found.reflection]
        else:
            cases = [found.valid, found.same, found.lower, found.custom([0] * 2 * spatial)]
        return cases[self.random.integers(len(cases))]

    def mutate(self) -> None:
        """Change some of the arguments."""
        random = self.random
        for _ in range(int(random.choice([0, 0, 0, 1, 1, 2]))):
            place = int(random.integers(-1, len(self.labels)))
            if place < 0:
                self.x = self.changed(self.x)
                continue
            label = self.labels[place]
            old = self.given[label.name]
            self.given[label.name] = self.changed(old) if is_operand(old) else self.strange(old)

    def changed(self, array: Array) -> Array:
        shape = list(array.shape)
        kind = self.random.random()
        dtype = TYPES[self.random.integers(len(TYPES))] if kind < 0.3 else array.dtype
        if kind >= 0.3 and shape:
            shape[self.random.integers(len(shape))] = int(self.random.integers(0, 6))
        if kind > 0.8:
            shape = shape[1:] if kind > 0.9 else [2, *shape]
        made = self.memory.take(tuple(shape), dtype)
        if self.random.random() < 0.2:
            made[...] = FLOATS[self.random.integers(len(FLOATS))] if made.dtype.kind == "f" else -1
        return made

    def strange(self, old: Any) -> Any:
        kind = self.random.random()
        if kind < 0.3:
            return STRANGE[self.random.integers(len(STRANGE))]
        if isinstance(old, list):
            return [*old[1:], int(self.random.integers(-3, 9))] if kind < 0.7 else old[1:]
        if isinstance(old, float):
            return FLOATS[self.random.integers(len(FLOATS))]
        return int(self.random.integers(-5, 9))


def is_operand(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype != object


@np.errstate(all="ignore")
def run(seed: int, tally: Counter[str]) -> None:
    random = np.random.default_rng(seed)
    memory = Memory(random)
    drawn = Drawn(random, memory)
    name = drawn.operation.name
    kinds = {label.name: label.kind for label in drawn.labels}
    fed = {label for label, one in drawn.given.items() if kinds[label] == "tensor" and is_operand(one)}
    inputs = [drawn.x, *(drawn.given[label] for label in drawn.given if label in fed)]
    flexible, differentiated = random.random() < 0.3, random.random() < 0.5
    wanted: list[Any] = []

    def build(builder: Any) -> list[Any]:
        tensors = [
            builder.argument(
                name=f"x{i}",
                dataType=one.dtype,
                shape=[-1, *one.shape[1:]] if flexible and one is drawn.x and one.size and one.ndim else one.shape,
            )
            for i, one in enumerate(inputs)
        ]
        waiting = iter(tensors)
        x = next(waiting)
        given = [next(waiting) if label in fed else one for label, one in drawn.given.items()]
        found = x._record(drawn.operation, given)
        outputs = list(found) if isinstance(found, tuple) else [found]
        if differentiated and outputs[0].dataType is not None and outputs[0].dataType.kind == "f":
            outputs += builder.gradient(of=outputs[0], withRespectTo=[x])
        wanted.extend((one.shape, one.dataType, one._symbol.shape is None) for one in outputs)
        return outputs

    try:
        with timed(name):
            context = BNNSGraph.makeContext(build)
            specs = context.entry(None).plan([one.shape for one in inputs]).outputs
    except REFUSALS as error:
        if not str(error).startswith((name, "gradient")):
            raise Broken(f"{name} was refused, and says: {error}") from error
        tally[f"{name} refused"] += 1
        return
    for (shape, dtype, unknown), spec in zip(wanted, specs, strict=True):
        known = unknown or (
            len(shape) == len(spec.shape) and all(n in (-1, m) for n, m in zip(shape, spec.shape, strict=True))
        )
        if not known or dtype not in (None, spec.dtype):
            raise Broken(f"{name} says {dtype} {shape}, but is {spec!r}")
    outputs = [memory.take(spec.shape, spec.dtype) for spec in specs]
    if not executed(name, context, memory, outputs, inputs, tally):
        return
    if random.random() < 0.2:
        check_saved(context, outputs, inputs)


def executed(
    name: str, context: Any, memory: Memory, outputs: list[Array], inputs: list[Array], tally: Counter[str]
) -> bool:
    """Whether a graph ran. One that is refused has written nothing."""
    before, given = memory.state(), [one.tobytes() for one in inputs]
    try:
        with timed(name):
            context.executeFunction(arguments=[*outputs, *inputs])
    except BNNSGraph.Error as error:
        memory.check_guards()
        if error.case != "unableToExecute" or memory.state() != before:
            raise Broken(f"{name} failed and has changed a buffer: {error}") from error
        tally[f"{name} refused"] += 1
        return False
    memory.check_guards()
    if [one.tobytes() for one in inputs] != given:
        raise Broken(f"{name} has changed an input")
    tally[f"{name} done"] += 1
    return True


def check_saved(context: Any, outputs: list[Array], inputs: list[Array]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph"
        context.write(to=path)
        again = BNNSGraph.Context(compileFromPath=path)
    results = [np.zeros(one.shape, one.dtype) for one in outputs]
    again.executeFunction(arguments=[*results, *inputs])
    for one, other in zip(outputs, results, strict=True):
        if one.tobytes() != other.tobytes():
            raise Broken("the graph computes something else after it was saved and read")


if __name__ == "__main__":
    sys.exit(main("BNNSGraph's builder", run))
