"""Tensor contractions, written as sums over indices, and Gram matrices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ._direct import check_unrotated
from ._failure import Invalid, Unsupported, status
from ._layer import checked_layer
from ._memory import Geometry, bytes_of, size_of
from ._products import ProductFilter, shape_rows_first
from ._structures import BNNSFilterParameters, BNNSNDArrayDescriptor, Float, Pointer, Structure

_ARROW: Final = "->"
_WEIGHTS: Final = "w"  # the name of an operand that is trained
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_INDICES: Final = re.compile(r"[A-Za-z]*")
_GRAM: Final = "x_*ijf, x_*ijc -> G_*fc"  # what Apple's header says a Gram layer is equivalent to


class BNNSLayerParametersTensorContraction(Structure):
    """``o = beta o + alpha a b``, summed over the indices that are not the output's.

    ``operation`` is a C string, such as ``b"a_ij, b_jk -> o_ik"``. A Python string becomes bytes when it is assigned,
    because a pointer needs memory.
    """

    operation: Pointer
    alpha: Float
    beta: Float
    iA_desc: BNNSNDArrayDescriptor
    iB_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "operation" and isinstance(value, str):
            value = value.encode(errors="backslashreplace")
        super().__setattr__(name, value)


class BNNSLayerParametersGram(Structure):
    """``G[f, c]``: ``alpha`` times the sum over i and j of ``x[i, j, f] x[i, j, c]``."""

    alpha: Float
    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor


# ---- the operation --------------------------------------------------------------------------------------------------


class _Term(NamedTuple):
    """``name_indices``. `before`, `after`: whether a ``*`` is the first or the last index; alone it is both."""

    text: str
    name: str
    letters: str
    before: bool
    after: bool

    @property
    def has_star(self) -> bool:
        return self.before or self.after


class _Operation(NamedTuple):
    inputs: list[_Term]
    output: _Term

    @property
    def weights(self) -> int | None:
        """Which operand is trained."""
        return next((k for k, term in enumerate(self.inputs) if term.name == _WEIGHTS), None)

    @property
    def same(self) -> bool:
        """Whether both operands are one input."""
        return len(self.inputs) == 2 and self.inputs[0].name == self.inputs[1].name


def _text_of(operation: Any) -> str:
    if operation is None:
        raise Invalid("operation is NULL")
    return bytes_of("operation", operation).tobytes().split(b"\0", 1)[0].decode("ascii", "backslashreplace")


def _parsed(text: str) -> _Operation:
    """The operands and the output of an operation. Raise unless it makes sense."""

    def wrong(reason: str) -> Invalid:
        return Invalid(f'operation is "{text}", {reason}')

    sides = text.split(_ARROW)
    if len(sides) != 2:
        raise wrong(f'which has "{_ARROW}" {len(sides) - 1} times, must have it once')
    left, right = ([_term(part.strip(), wrong) for part in side.split(",")] for side in sides)
    if len(left) > 2:
        raise wrong(f"which has {len(left)} operands, may have 2 at most")
    if len(right) != 1:
        raise wrong(f"which has {len(right)} outputs, must have 1")
    operation = _Operation(left, right[0])
    known = "".join(term.letters for term in left)
    unknown = [letter for letter in right[0].letters if letter not in known]
    if unknown:
        raise wrong(f'whose output has the index "{unknown[0]}", which no operand has')
    starred = [term for term in (*left, right[0]) if term.has_star]
    if any(not term.before for term in starred) and any(not term.after for term in starred):
        raise wrong('which has "*" as the first and as the last index, must have it at the same end everywhere')
    if starred and not right[0].has_star:
        raise wrong('whose output has no "*", although an operand has one: these axes are never summed')
    if starred and not any(term.has_star for term in left):
        raise wrong('whose output has a "*", which no operand has')
    names = [term.name for term in left]
    if names.count(_WEIGHTS) == len(names):
        raise wrong(f'which has no input: "{_WEIGHTS}" means weights, and at most one operand may be weights')
    return operation


def _term(text: str, wrong: Callable[[str], Invalid]) -> _Term:
    name, underscore, indices = text.partition("_")
    if not text:
        raise wrong("in which an operand is missing")
    if not underscore:
        raise wrong(f'in which "{text}" has no "_" between its name and its indices')
    if not _NAME.fullmatch(name):
        raise wrong(f'in which "{text}" has the name "{name}", must be letters and digits')
    letters = indices.replace("*", "")
    if indices.count("*") > 1:
        raise wrong(f'in which "{text}" has "*" twice')
    before, after = indices.startswith("*"), indices.endswith("*")
    if "*" in indices and not (before or after):
        raise wrong(f'in which "{text}" has "*" between its indices, must be first or last')
    if not _INDICES.fullmatch(letters):
        raise wrong(f'in which "{text}" has the indices "{indices}", must be letters')
    for letter in letters:
        if letters.count(letter) > 1:
            raise wrong(f'in which "{text}" has the index "{letter}" twice')
    return _Term(text, name, letters, before, after)


def _labels(operation: _Operation, names: Sequence[str], parts: Sequence[Geometry]) -> list[tuple[str, ...]]:
    """The labels of all axes, those of the output last. Raise unless the arrays fit the operation."""
    terms = [*operation.inputs, operation.output]
    counts = []  # of the axes that a "*" stands for
    for name, part in zip(names, parts, strict=True):
        check_unrotated(name, part)
    for name, term, part in zip(names, terms, parts, strict=True):
        rank = len(part.extents)
        if not term.letters and not term.has_star and part.elements == 1:
            rank = 0  # a number, in an array of any layout
        count = rank - len(term.letters)
        if count < 0 or (count > 0 and not term.has_star):
            least = "at least " if term.has_star else ""
            raise Invalid(
                f'{name} has {size_of(part)}, {rank} axes, but "{term.text}" has {least}{len(term.letters)} indices'
            )
        counts.append(count)
    before = all(term.before for term in terms if term.has_star)
    starred = [count for count, term in zip(counts[:-1], terms, strict=False) if term.has_star]
    if not before and len(set(starred)) > 1:
        raise Unsupported(
            f'"*" stands for {starred[0]} axes of {names[0]} and {starred[1]} of {names[1]}; as the last index it must '
            "stand for as many"
        )
    if starred and counts[-1] != max(starred):
        raise Invalid(f'"*" stands for {max(starred)} axes of the operands, but for {counts[-1]} of {names[-1]}')
    labels = []
    for term, part, count in zip(terms, parts, counts, strict=True):
        if not term.letters and not term.has_star:
            labels.append(("",) * len(part.extents))
            continue
        # Before the letters axes are matched from the back, as matrix products match their leading axes.
        star = tuple(f"axis {k} of *" for k in (range(count, 0, -1) if before else range(1, count + 1)))
        labels.append((*star, *term.letters) if before else (*term.letters, *star))
    _check_extents(names, parts, labels)
    return labels


def _check_extents(names: Sequence[str], parts: Sequence[Geometry], labels: list[tuple[str, ...]]) -> None:
    """Raise unless equal labels have equal extents, or 1. That of the output is the largest."""
    found: dict[str, tuple[int, str]] = {}
    for name, part, axes in zip(names, parts, labels, strict=True):
        for label, extent in zip(axes, shape_rows_first(part), strict=True):
            known, where = found.setdefault(label, (extent, name))
            if extent != known and (1 not in (extent, known) or (extent == 1 and name == names[-1])):
                word = f'the index "{label}"' if len(label) == 1 else label
                raise Invalid(f"{word} has the extent {known} in {where} and {extent} in {name}")
            if extent > known:
                found[label] = (extent, name)


# ---- filters --------------------------------------------------------------------------------------------------------


def _contraction(
    operation: _Operation,
    operands: Sequence[tuple[str, BNNSNDArrayDescriptor]],
    output: BNNSNDArrayDescriptor,
    factors: tuple[float, float],
    parameters: object,
) -> ProductFilter:
    weights, labels_of = operation.weights, partial(_labels, operation)
    return ProductFilter(parameters, factors, operands, output, operation.same, weights, labels_of)


@status(None)
def BNNSFilterCreateLayerTensorContraction(
    layer_params: BNNSLayerParametersTensorContraction, filter_params: BNNSFilterParameters | None = None
) -> ProductFilter | None:
    """Create a filter that multiplies arrays and sums over indices, by Einstein's convention. None on failure.

    With two inputs it is applied by the functions for two inputs; if there is one operand, if one is weights, or if
    both are the same input, by those for one.
    """
    layer = checked_layer(BNNSLayerParametersTensorContraction, layer_params)
    operation = _parsed(_text_of(layer.operation))
    first, second = ("iA_desc", layer.iA_desc), ("iB_desc", layer.iB_desc)
    operands = [first, first if operation.same else second][: len(operation.inputs)]
    return _contraction(operation, operands, layer.o_desc, (layer.alpha, layer.beta), filter_params)


@status(None)
def BNNSFilterCreateLayerGram(
    layer_params: BNNSLayerParametersGram, filter_params: BNNSFilterParameters | None = None
) -> ProductFilter | None:
    """Create a filter that computes the scalar products of all pairs of channels. None on failure."""
    layer = checked_layer(BNNSLayerParametersGram, layer_params)
    given = ("i_desc", layer.i_desc)
    return _contraction(_parsed(_GRAM), [given, given], layer.o_desc, (layer.alpha, 0.0), filter_params)
