"""Folding: an activation that the engine computes together with the layer before it, with the same bits.

Only ReLU is folded: its output is above 0 exactly where its input is, so that the backward pass can read the output and
the input need not be kept.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ops.activation import Activation
from .image import CONV
from .layer import NORM, NORM_BACKWARD
from .operation import OPERATIONS, Operation
from .tensor import Node, Tensor

_RELU = Activation("relu")


def folded(nodes: Sequence[Node], kept: set[int]) -> list[Node]:
    """The nodes with ReLUs folded into normalizations and convolutions. `kept`: ids of tensors that others read."""
    uses: dict[int, list[Node]] = {}
    for node in nodes:
        for tensor in node.inputs:
            if tensor is not None:
                uses.setdefault(id(tensor), []).append(node)
    relu, greater = OPERATIONS["relu"], OPERATIONS["greater"]
    instead: dict[int, Node | None] = {}  # by number: what takes a node's place
    for node in nodes:
        if node.operation not in (NORM, CONV) or not _plain(node):
            continue
        z = node.results[0]
        readers = uses.get(id(z), [])
        activations = [n for n in readers if n.operation is relu]
        masks = [n for n in readers if n.operation is greater and n.inputs[0] is z and _is_zero(n.inputs[1])]
        if len(activations) != 1 or len(activations) + len(masks) != len(readers) or id(z) in kept:
            continue
        y = activations[0].results[0]
        instead[activations[0].number] = None
        instead[node.number] = copied_node(
            node, node.inputs, {**node.attributes, "activation": _RELU}, (y, *node.results[1:])
        )
        for mask in masks:
            instead[mask.number] = copied_node(mask, (y, *mask.inputs[1:]), mask.attributes, mask.results)
        if node.operation is NORM:
            _fold_backward(node, y, masks, uses, kept, instead)
    return [n for node in nodes if (n := instead.get(node.number, node)) is not None]


def _fold_backward(
    norm: Node,
    y: Tensor,
    masks: Sequence[Node],
    uses: dict[int, list[Node]],
    kept: set[int],
    instead: dict[int, Node | None],
) -> None:
    """Let the backward pass of a normalization apply the mask of its ReLU itself, if nothing else needs the product."""
    if len(masks) != 1 or len(norm.results) < 2:
        return
    selections = uses.get(id(masks[0].results[0]), [])
    if len(selections) != 1 or id(masks[0].results[0]) in kept:
        return
    (select,) = selections
    dz = select.results[0]
    readers = uses.get(id(dz), [])
    if select.operation.name != "where" or not _is_zero(select.inputs[2]) or id(dz) in kept or len(readers) != 1:
        return
    (backward,) = readers
    if (
        backward.operation is not NORM_BACKWARD
        or backward.inputs[5] is not norm.results[1]
        or backward.inputs[0] is not dz
    ):
        return
    dy = select.inputs[1]
    assert dy is not None
    if dy.shape != dz.shape:
        return
    _, x, _, gamma, beta, statistics = backward.inputs
    inputs = (dy, x, y, gamma, beta, statistics)
    instead[backward.number] = copied_node(
        backward, inputs, {**backward.attributes, "activation": _RELU}, backward.results
    )
    instead[masks[0].number] = instead[select.number] = None


def _plain(node: Node) -> bool:
    activation = node.attributes["activation"]
    return activation is None or activation.name == "identity"


def _is_zero(tensor: Tensor | None) -> bool:
    from .plan import scalar_constant

    return tensor is not None and scalar_constant(tensor) == 0.0


def copied_node(
    node: Node,
    inputs: Sequence[Tensor | None],
    attributes: dict[str, object],
    results: Sequence[Tensor],
    operation: Operation | None = None,
) -> Node:
    """A node like another one, that no graph lists."""
    copy = Node.__new__(Node)
    copy.graph, copy.operation, copy.line = node.graph, operation or node.operation, node.line
    copy.number, copy.region = node.number, node.region
    copy.inputs, copy.attributes, copy.results = tuple(inputs), attributes, tuple(results)
    return copy
