"""RNN, LSTM and GRU of MPSGraph, and their gradients: orders of gates, directions, states.

The layers are the functions of retrograd.graph. Their explicit gradients call the function again, which is the same
node of the graph, so the forward pass runs once; `zState` is not read. It is computed only if a program asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from .. import graph as G
from ..ops.activation import Activation
from ..ops.recurrent.types import GruActivations, GruWeights, LstmActivations, LstmWeights, RnnWeights
from ._types import MPSGraphRNNActivation

Tensor = G.Tensor

# Apple's text of the operation says h = z h' + (1 - z) o unless flipZ, the text of the property the opposite.
FLIP_Z_AS_THE_PROPERTY_SAYS = False

_ACTIVATIONS: Final[dict[MPSGraphRNNActivation, str | Activation]] = {
    MPSGraphRNNActivation.none: "identity",
    MPSGraphRNNActivation.relu: "relu",
    MPSGraphRNNActivation.tanh: "tanh",
    MPSGraphRNNActivation.sigmoid: "sigmoid",
    MPSGraphRNNActivation.hardSigmoid: Activation("hard_sigmoid", 0.2, 0.5),
}


class _Cell(NamedTuple):
    """What distinguishes the layers: the place of each of our gates in the caller's order, and the call."""

    gates: tuple[int, ...]
    call: Callable[..., Any]
    weights: Callable[..., Any]
    options: dict[str, Any]
    activations: tuple[str | Activation, ...]  # of the gates, in our order
    has_cell: bool = False


def _cell(descriptor: Any) -> _Cell:
    d = descriptor
    if hasattr(d, "_produceCell"):
        of = [d._inputGateActivation, d._forgetGateActivation, d._cellGateActivation, d._outputGateActivation]
        chosen = [_ACTIVATIONS[a] for a in (*of, d._activation)]
        options: dict[str, Any] = {"activations": LstmActivations(*chosen), "output_gate_reads": "old"}
        order = (0, 2, 1, 3) if d._forgetGateLast else (0, 1, 2, 3)
        return _Cell(order, G.lstm, LstmWeights, options, tuple(chosen[:4]), True)
    if hasattr(d, "_resetAfter"):
        chosen = [_ACTIVATIONS[a] for a in (d._resetGateActivation, d._updateGateActivation, d._outputGateActivation)]
        flip = d._flipZ != FLIP_Z_AS_THE_PROPERTY_SAYS
        options = {
            "activations": GruActivations(*chosen), "kind": "after" if d._resetAfter else "before", "flip": flip
        }  # fmt: skip
        return _Cell((0, 1, 2) if d._resetGateFirst else (1, 0, 2), G.gru, GruWeights, options, tuple(chosen))
    chosen = [_ACTIVATIONS[d._activation]]
    return _Cell((0,), G.rnn, RnnWeights, {"activation": chosen[0]}, tuple(chosen))


class _Inputs(NamedTuple):
    """The tensors of a layer, as they were given."""

    x: Tensor
    recurrent: Tensor
    weight: Tensor | None
    bias: Tensor | None
    h0: Tensor | None
    c0: Tensor | None
    mask: Tensor | None
    peephole: Tensor | None
    second: Tensor | None  # GRU: the bias inside the reset product


class _Layer:
    """A call of a layer: its tensors in our order, and its results."""

    def __init__(self, inputs: _Inputs, descriptor: Any) -> None:
        self.inputs, self.cell = inputs, _cell(descriptor)
        self.both = bool(descriptor._bidirectional)
        self.reversed = bool(descriptor._reverse) and not self.both
        self.directions = 2 if self.both else 1
        gates = len(self.cell.gates)
        shape = inputs.recurrent.shape
        self.units = shape[-1] if shape else 0
        expected = (2,) * self.both + (gates * self.units, self.units)
        if shape != expected:
            raise ValueError(f"recurrentWeight has shape {shape}, expected {expected}: {gates} gates")
        if inputs.x.ndim != 3:
            raise ValueError(f"the source has shape {inputs.x.shape}, must be [T, N, I]")
        rows = self.directions * gates * self.units
        columns = rows if inputs.weight is None else inputs.x.shape[2]
        if inputs.x.shape[2] != columns:
            raise ValueError(f"without inputWeight the source needs {columns} columns, but has shape {inputs.x.shape}")
        for name, tensor, wanted in (
            ("inputWeight", inputs.weight, (rows, columns)), ("bias", inputs.bias, (rows,)),
            ("initState", inputs.h0, (inputs.x.shape[1], self.directions * self.units)),
            ("initCell", inputs.c0, (inputs.x.shape[1], self.directions * self.units)),
            ("peephole", inputs.peephole, (2,) * self.both + (gates * self.units,)),
            ("secondaryBias", inputs.second, (self.directions * self.units,)),
        ):  # fmt: skip
            if tensor is not None and tensor.shape != wanted:
                raise ValueError(f"{name} has shape {tensor.shape}, expected {wanted}")
        if inputs.second is not None and self.cell.options.get("kind") != "after":
            raise ValueError("secondaryBias is given, but the descriptor has resetAfter = False")
        self.x = G.flip(inputs.x, 0) if self.reversed else inputs.x

    # ---- order of gates ----

    def ordered(self, tensor: Tensor) -> Tensor:
        """Rows of gates, in our order."""
        return self._blocks(tensor, self.cell.gates)

    def returned(self, tensor: Tensor) -> Tensor:
        """Rows of gates, in the caller's order."""
        return self._blocks(tensor, tuple(self.cell.gates.index(i) for i in range(len(self.cell.gates))))

    def _blocks(self, tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        if order == tuple(range(len(order))):
            return tensor
        blocks = G.split(tensor, len(order), 0)
        return G.concatenate([blocks[i] for i in order], 0)

    def half(self, tensor: Tensor, direction: int, axis: int = 0) -> Tensor:
        """The part of a direction."""
        return G.split(tensor, 2, axis)[direction] if self.both else tensor

    # ---- the call ----

    def part(self, tensor: Tensor | None, direction: int, squeeze: bool = False) -> Tensor | None:
        """The parameter of a direction, in our order of gates; of [2, ...] where `squeeze`."""
        if tensor is None:
            return None
        one = self.half(tensor, direction)
        return self.ordered(G.squeeze(one, 0) if squeeze and self.both else one)

    def parameters(self, direction: int) -> Any:
        given = self.inputs
        rows = len(self.cell.gates) * self.units
        wx = self.part(given.weight, direction)
        if wx is None:  # a unit matrix picks the columns of this direction
            wide = G.one_hot(G.coordinates((rows,), 0), rows, self.x.dtype)
            zeros = G.zeros((rows, rows), self.x.dtype)
            if self.both:
                wide = G.concatenate([wide, zeros] if direction == 0 else [zeros, wide], 1)
            wx = self.ordered(wide)
        wh, b = self.part(given.recurrent, direction, True), self.part(given.bias, direction)
        if self.cell.weights is LstmWeights:
            return LstmWeights(wx, wh, b, self.part(given.peephole, direction, True))
        if self.cell.weights is RnnWeights:
            return RnnWeights(wx, wh, b)
        bh = None
        if given.second is not None:
            bh = G.concatenate([G.zeros((2 * self.units,), self.x.dtype), self.half(given.second, direction)], 0)
        return GruWeights(wx, wh, b, bh)

    def states(self, tensor: Tensor | None) -> Tensor | None:
        """[N, DH] as the engine takes it: [D, N, H], or [N, H] of a single direction."""
        if tensor is None or not self.both:
            return tensor
        return G.stack(G.split(tensor, 2, 1), 0)

    def joined(self, tensor: Tensor) -> Tensor:
        """The engine's states as [N, DH]."""
        return G.concatenate([tensor[0], tensor[1]], 1) if self.both else tensor

    def _given_mask(self) -> Tensor | None:
        """The mask in the order in which the layer takes the steps."""
        given = self.inputs.mask
        return G.flip(given, 0) if given is not None and self.reversed and given.ndim == 3 else given

    def _wide(self, mask: Tensor) -> bool:
        """Whether a mask has columns for each direction."""
        return self.both and mask.shape[-1:] == (2 * self.units,)

    def mask(self) -> Tensor | None:
        """The engine's mask: [H], [N, H] or [T, N, H]; in front of that an axis of directions."""
        given = self._given_mask()
        if given is None or not self._wide(given):
            return given
        parts = [
            G.expand_dims(p, tuple(range(4 - p.ndim))) if p.ndim < 4 else p for p in G.split(given, 2, given.ndim - 1)
        ]
        return G.stack(parts, 0)

    def run(self) -> Any:
        """The results of the engine's layer."""
        weights = [self.parameters(d) for d in range(self.directions)]
        states = [self.states(self.inputs.h0)]
        if self.cell.has_cell:
            states.append(self.states(self.inputs.c0))
        return self.cell.call(
            self.x, weights if self.both else weights[0], *states, bidirectional=self.both, mask=self.mask(),
            **self.cell.options,
        )  # fmt: skip

    def aligned(self, y: Tensor) -> Tensor:
        return G.flip(y, 0) if self.reversed else y

    # ---- what is only computed if it is asked for ----

    def cells(self) -> Tensor:
        """The cell states of all steps, one call of the engine for each."""
        return self.aligned(G.concatenate([self._cells_of(d) for d in range(self.directions)], 2))

    def _cells_of(self, direction: int) -> Tensor:
        weights = self.parameters(direction)
        h, c = (self._half_state(t, direction) for t in (self.inputs.h0, self.inputs.c0))
        steps = range(self.x.shape[0])[:: -1 if direction else 1]
        found: dict[int, Tensor] = {}
        mask = self._mask_of(direction)
        for t in steps:
            now = mask[t : t + 1] if mask is not None and mask.ndim == 3 else mask
            _, h, c = G.lstm(self.x[t : t + 1], weights, h, c, mask=now, **self.cell.options)
            found[t] = c
        return G.stack([found[t] for t in range(self.x.shape[0])], 0)

    def _half_state(self, tensor: Tensor | None, direction: int) -> Tensor | None:
        return None if tensor is None else self.half(tensor, direction, 1)

    def _mask_of(self, direction: int) -> Tensor | None:
        given = self._given_mask()
        return given if given is None or not self._wide(given) else self.half(given, direction, given.ndim - 1)

    def z(self, y: Tensor) -> Tensor:
        """The state of training, [T, N, D * gates * H]: gates after their activations, of an RNN before."""
        parts = [self._z_of(self.half(self.aligned(y), d, 2), d) for d in range(self.directions)]
        return self.aligned(G.concatenate(parts, 2))

    def _before(self, sequence: Tensor, first: Tensor | None, direction: int) -> Tensor:
        """The state before each step."""
        start = G.zeros(sequence.shape[1:], sequence.dtype) if first is None else first
        start = G.expand_dims(start, 0)
        if direction:
            return G.concatenate([sequence[1:], start], 0)
        return G.concatenate([start, sequence[:-1]], 0)

    def _z_of(self, y: Tensor, direction: int) -> Tensor:
        weights = self.parameters(direction)
        before = self._before(y, self._half_state(self.inputs.h0, direction), direction)
        mask = self._mask_of(direction)
        masked = before if mask is None else G.multiply(before, mask)
        inner = G.matmul(self.x, G.transpose(weights.wx))
        if weights.b is not None:
            inner = G.add(inner, weights.b)
        outer = G.matmul(masked, G.transpose(weights.wh))
        if not self.cell.has_cell and len(self.cell.gates) == 1:
            return G.add(inner, outer)
        if self.cell.has_cell:
            gates = G.add(inner, outer)
            if weights.peephole is not None:
                cells = self._cells_of(direction)
                old = self._before(cells, self._half_state(self.inputs.c0, direction), direction)
                gates = G.add(gates, G.multiply(G.concatenate([old] * 4, 2), weights.peephole))
            values = [G.activation(g, a) for g, a in zip(G.split(gates, 4, 2), self.cell.activations, strict=True)]
        else:
            values = self._gru_gates(weights, inner, outer, masked)
        order = tuple(self.cell.gates.index(i) for i in range(len(values)))
        return G.concatenate([values[i] for i in order], 2)

    def _gru_gates(self, weights: Any, inner: Tensor, outer: Tensor, masked: Tensor) -> list[Tensor]:
        of_x, of_h = G.split(inner, 3, 2), G.split(outer, 3, 2)
        r, z = (G.activation(G.add(of_x[i], of_h[i]), self.cell.activations[i]) for i in (0, 1))
        if self.cell.options["kind"] == "after":
            product = of_h[2] if weights.bh is None else G.add(of_h[2], G.split(weights.bh, 3, 0)[2])
            candidate = G.add(of_x[2], G.multiply(r, product))
        else:
            rows = G.split(weights.wh, 3, 0)[2]
            candidate = G.add(of_x[2], G.matmul(G.multiply(r, masked), G.transpose(rows)))
        return [r, z, G.activation(candidate, self.cell.activations[2])]

    # ---- gradients ----

    def gradients(self, dy: Tensor, dh: Tensor | None, dc: Tensor | None) -> list[Tensor]:
        """dx, dR, dW, db, dpeephole, dh0, dc0, dsecond of the tensors that are given."""
        given = self.inputs
        node = self.run().y.node
        if dy.shape != node.results[0].shape:
            raise ValueError(f"sourceGradient has shape {dy.shape}, expected {node.results[0].shape}")
        last = [
            None if t is None else self.states(self._last(n, t))
            for n, t in (("stateGradient", dh), ("cellGradient", dc))
        ]
        count = len(self.cell.weights._fields)  # type: ignore[attr-defined]
        first = len(node.inputs) - count * self.directions
        needed = [t is not None for t in node.inputs]
        needed[8:first] = [False] * (first - 8)  # masks have no gradient
        rule = node.operation.gradient
        assert rule is not None
        found = rule(node, [self.aligned(dy), *last, None], needed)
        cells = [found[first + count * d : first + count * (d + 1)] for d in range(self.directions)]

        def rows(field: int, stacked: bool) -> Tensor:
            parts = [self.returned(cell[field]) for cell in cells]
            return parts[0] if not self.both else G.stack(parts, 0) if stacked else G.concatenate(parts, 0)

        results: list[Tensor] = [self.aligned(found[0]), rows(1, True)]
        if given.weight is not None:
            results.append(rows(0, False))
        if given.bias is not None:
            results.append(rows(2, False))
        if given.peephole is not None:
            results.append(rows(3, True))
        for tensor, gradient in ((given.h0, found[2]), (given.c0, found[3])):
            if tensor is not None:
                results.append(self.joined(gradient))
        if given.second is not None:
            results.append(G.concatenate([G.split(cell[3], 3, 0)[2] for cell in cells], 0))
        return results

    def _last(self, name: str, tensor: Tensor) -> Tensor:
        wanted = (self.x.shape[1], self.directions * self.units)
        if tensor.shape not in (wanted, (1, *wanted)):
            raise ValueError(f"{name} has shape {tensor.shape}, expected {wanted}")
        return G.reshape(tensor, wanted)


# ---- functions of the table ------------------------------------------------------------------------------------------


def single_gate_rnn(
    x: Tensor,
    recurrent: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    descriptor: Any,
) -> list[Tensor]:
    """The states h of an RNN, [T, N, DH]; in training also z, the values before the activation."""
    layer = _Layer(_Inputs(x, recurrent, weight, bias, h0, None, mask, None, None), descriptor)
    y = layer.aligned(layer.run().y)
    return [y, layer.z(y)] if descriptor._training else [y]


def lstm(
    x: Tensor,
    recurrent: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    mask: Tensor | None = None,
    peephole: Tensor | None = None,
    *,
    descriptor: Any,
) -> list[Tensor]:
    """The states h of an LSTM, [T, N, DH]; with produceCell the cells c, in training c and the gates z."""
    layer = _Layer(_Inputs(x, recurrent, weight, bias, h0, c0, mask, peephole, None), descriptor)
    y = layer.aligned(layer.run().y)
    found = [y]
    if descriptor._produceCell or descriptor._training:
        found.append(layer.cells())
    return [*found, layer.z(y)] if descriptor._training else found


def gru(
    x: Tensor,
    recurrent: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    h0: Tensor | None = None,
    mask: Tensor | None = None,
    second: Tensor | None = None,
    *,
    descriptor: Any,
) -> list[Tensor]:
    """The states h of a GRU, [T, N, DH]; in training also the gates z."""
    layer = _Layer(_Inputs(x, recurrent, weight, bias, h0, None, mask, None, second), descriptor)
    y = layer.aligned(layer.run().y)
    return [y, layer.z(y)] if descriptor._training else [y]


def single_gate_rnn_gradients(
    x: Tensor,
    recurrent: Tensor,
    dy: Tensor,
    z: Tensor,
    dh: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    h0: Tensor | None,
    mask: Tensor | None,
    *,
    descriptor: Any,
) -> list[Tensor]:
    """The gradients of source, recurrentWeight, inputWeight, bias and initState, of those that are given."""
    return _Layer(_Inputs(x, recurrent, weight, bias, h0, None, mask, None, None), descriptor).gradients(dy, dh, None)


def lstm_gradients(
    x: Tensor,
    recurrent: Tensor,
    dy: Tensor,
    z: Tensor,
    cells: Tensor,
    dh: Tensor | None,
    dc: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    h0: Tensor | None,
    c0: Tensor | None,
    mask: Tensor | None,
    peephole: Tensor | None,
    *,
    descriptor: Any,
) -> list[Tensor]:
    """The gradients of source, recurrentWeight, inputWeight, bias, peephole, initState and initCell, if given."""
    inputs = _Inputs(x, recurrent, weight, bias, h0, c0, mask, peephole, None)
    return _Layer(inputs, descriptor).gradients(dy, dh, dc)


def gru_gradients(
    x: Tensor,
    recurrent: Tensor,
    dy: Tensor,
    z: Tensor,
    y: Tensor,
    dh: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    h0: Tensor | None,
    mask: Tensor | None,
    second: Tensor | None,
    *,
    descriptor: Any,
) -> list[Tensor]:
    """The gradients of source, recurrentWeight, inputWeight, bias, initState and secondaryBias, if given."""
    inputs = _Inputs(x, recurrent, weight, bias, h0, None, mask, None, second)
    return _Layer(inputs, descriptor).gradients(dy, dh, None)


def _placed(function: Callable[..., Any], places: Sequence[int], total: int) -> Callable[..., Any]:
    """`function` for fewer operands, which have these places among its own."""

    def call(*operands: Tensor | None, **options: Any) -> Any:
        full: list[Tensor | None] = [None] * total
        for place, operand in zip(places, operands, strict=True):
            full[place] = operand
        return function(*full, **options)

    call.__doc__ = function.__doc__
    return call


def placed(function: Callable[..., Any], names: str, all_names: str) -> Callable[..., Any]:
    """`function` for the operands of these names, of all that it has; the others are absent."""
    whole = all_names.split()
    return _placed(function, [whole.index(name) for name in names.split()], len(whole))


def layer_count(options: dict[str, Any], operands: Sequence[Any]) -> int:
    """The number of results of a layer."""
    d = options["descriptor"]
    cell = hasattr(d, "_produceCell") and (d._produceCell or d._training)
    return 1 + bool(cell) + bool(d._training)


def gradient_count(names: str) -> Callable[[dict[str, Any], Sequence[Any]], int]:
    """The number of gradients for operands of these names: of the source, the weights and the states that are given."""
    kept = [i for i, name in enumerate(names.split()) if name not in ("dy", "z", "c", "y", "dh", "dc", "mask")]

    def count(options: dict[str, Any], operands: Sequence[Any]) -> int:
        return sum(operands[i] is not None for i in kept)

    return count
