"""Products of arrays over labelled axes: what matrix products, tensor contractions and Gram matrices share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from ..ops.linear import linear_forward
from . import _constants as c
from . import _layer
from ._failure import Invalid, Unsupported, advise_once
from ._filter import FLOAT32, FLOATS, in_shape, output_geometry, typed_geometry
from ._layer import Delta, Gradients, Parameter, parameter_of, rows_first, stored_rows_first
from ._memory import Array, Geometry, as_float
from ._structures import BNNSNDArrayDescriptor

Axes: TypeAlias = tuple[str, ...]  # the label of each axis of an array; "" for an axis of extent 1
BATCH: Final = "batch"  # the label of the batch's axis
# Below this number of multiplications, a call of the engine costs more than its arithmetic.
_FEW: Final = 2048
_MOST_AT_ONCE: Final = 1 << 22  # elements of a temporary array


def shape_rows_first(geometry: Geometry) -> tuple[int, ...]:
    """Extents in the order of `rows_first`."""
    return geometry.shape if geometry.layout == c.BNNSDataLayoutRowMajorMatrix else geometry.size


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def products(a: Array, b: Array, threads: int | None) -> Array:
    """a [..., M, K] times b [..., K, N], broadcast, in float32."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    transposed = np.swapaxes(b, -1, -2)
    if math.prod(b.shape[:-2]) == 1:  # one product for all
        whole = linear_forward(a, transposed.reshape(transposed.shape[-2:]), num_threads=threads)
        return whole.reshape(*lead, *whole.shape[-2:])
    a, transposed = (np.broadcast_to(one, (*lead, *one.shape[-2:])) for one in (a, transposed))
    result = np.empty((*lead, a.shape[-2], transposed.shape[-2]), np.float32)
    for index in np.ndindex(*lead):
        linear_forward(a[index], transposed[index], out=result[index], num_threads=threads)
    return result


def _small_products(a: Array, b: Array) -> Array:
    """a [L, M, K] times b [L, K, N], for matrices that are too small to call the engine for each."""
    transposed = np.swapaxes(b, -1, -2)
    step = max(1, _MOST_AT_ONCE // (a[0].size * transposed.shape[1]))
    parts = (slice(start, start + step) for start in range(0, len(a), step))
    with np.errstate(all="ignore"):
        found = [(a[part, :, None, :] * transposed[part, None, :, :]).sum(axis=-1) for part in parts]
    return np.concatenate(found) if len(found) > 1 else np.asarray(found[0])


class _Operand:
    """How an operand becomes matrices: axes of extent 1 are dropped, some are summed, the others joined in groups."""

    def __init__(self, axes: Axes, lead: Sequence[str], rows: Sequence[str], columns: Sequence[str]) -> None:
        groups = (*lead, *rows, *columns)
        named = [label for label in axes if label]
        kept = [label for label in named if label in groups]
        self._ones = tuple(k for k, label in enumerate(axes) if not label)
        self._summed = tuple(k for k, label in enumerate(named) if label not in groups)
        self._order = tuple(kept.index(label) for label in groups)
        self._cuts = len(lead), len(lead) + len(rows)

    def matrices(self, array: Array) -> tuple[Array, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Matrices in float32, [L, M, N], or [M, N] without leading axes; and the extents that each axis joins."""
        if self._ones:
            array = np.squeeze(array, self._ones)
        if self._summed:
            with np.errstate(all="ignore"):
                array = np.asarray(array.sum(axis=self._summed, dtype=np.float64)).astype(np.float32)
        array = array.transpose(self._order)
        first, second = self._cuts
        groups = array.shape[:first], array.shape[first:second], array.shape[second:]
        return (array.reshape([math.prod(group) for group in (groups if first else groups[1:])]), *groups)


class Contraction:
    """The product of two arrays, summed over all axes but `wanted`, which are those of the result.

    Axes that neither array has get extent 1. `extents` are those of all labels but the batch's. The kind of computation
    does not depend on the batch, so a sample's bits do not depend on the batch that it is in.
    """

    def __init__(self, a_axes: Axes, b_axes: Axes, wanted: Axes, extents: Mapping[str, int]) -> None:
        a, b = ({label for label in axes if label} for axes in (a_axes, b_axes))
        lead = [label for label in wanted if label in a and label in b]
        rows = [label for label in wanted if label in a - b]
        columns = [label for label in wanted if label in b - a]
        inner = [label for label in a_axes if label in b and label not in wanted]
        self._left, self._right = _Operand(a_axes, lead, rows, inner), _Operand(b_axes, lead, inner, columns)
        m, n, k = (math.prod(extents[one] for one in labels if one != BATCH) for labels in (rows, columns, inner))
        self._few = bool(lead) and (m * n == 1 or m * n * k <= _FEW)
        self._ordered = _Ordered((*lead, *rows, *columns), wanted)

    def __call__(self, a: Array, b: Array, threads: int | None) -> Array:
        left, lead, rows, _ = self._left.matrices(a)
        right, _, _, columns = self._right.matrices(b)
        values = _small_products(left, right) if self._few else products(left, right, threads)
        return self._ordered(values.reshape((*lead, *rows, *columns)))


class _Ordered:
    """Puts axes into the wanted order; those that the array does not have get extent 1."""

    def __init__(self, axes: Axes, wanted: Axes) -> None:
        self._order = tuple(axes.index(label) for label in wanted if label in axes)
        self._new = tuple(k for k, label in enumerate(wanted) if label not in axes)

    def __call__(self, array: Array) -> Array:
        array = array.transpose(self._order)
        return np.expand_dims(array, self._new) if self._new else array


def sum_over(array: Array, axes: Axes, wanted: Axes) -> Array:
    """The array summed over all axes but `wanted`, which are those of the result; in float64 if there is a sum."""
    array = np.squeeze(array, tuple(k for k, label in enumerate(axes) if not label))
    named = [label for label in axes if label]
    others = tuple(k for k, label in enumerate(named) if label not in wanted)
    if others:
        with np.errstate(all="ignore"):
            array = np.asarray(array.sum(axis=others, dtype=np.float64))
    return _Ordered(tuple(label for label in named if label in wanted), wanted)(array)


# ---- filters --------------------------------------------------------------------------------------------------------


def labelled(shape: tuple[int, ...], labels: Sequence[str]) -> Axes:
    """The labels, but for axes of extent 1, which are broadcast."""
    return tuple(label if extent > 1 else "" for label, extent in zip(labels, shape, strict=True))


def extents_of(shapes: Sequence[tuple[int, ...]], labels: Sequence[Sequence[str]]) -> dict[str, int]:
    """The extent of each label after broadcasting."""
    extents: dict[str, int] = {}
    for shape, axes in zip(shapes, labels, strict=True):
        for label, extent in zip(axes, shape, strict=True):
            extents[label] = max(extent, extents.get(label, 1))
    return extents


def _repeated(values: Array, shape: tuple[int, ...]) -> Array:
    return values if values.shape == shape else np.broadcast_to(values, shape)


_KEYS: Final = ("a", "b")


class _OperandGradients(NamedTuple):
    """The gradients of both operands."""

    a: Array | None = None
    b: Array | None = None


class ProductFilter(_layer.OneInputFilter, _layer.TwoInputFilter):
    """A filter whose output is linear in each of its operands: one or two inputs, one of which may be weights.

    Both operands may also be the same input.
    """

    computed = _OperandGradients
    may_overlap = frozenset({"in", "inA", "inB", "iA_desc.data", "iB_desc.data"})

    def __init__(
        self,
        parameters: object,
        factors: tuple[float, float],
        operands: Sequence[tuple[str, BNNSNDArrayDescriptor]],
        output: BNNSNDArrayDescriptor,
        same: bool,
        weights: int | None,
        labels_of: Callable[[Sequence[str], Sequence[Geometry]], Sequence[Axes]],
    ) -> None:
        """`factors` are alpha and beta. `same`: both operands are one input. `weights`: the operand that is trained.

        `labels_of` labels the axes of the operands and of the output, given their names and geometries.
        """
        super().__init__(parameters)
        self.alpha, kept = as_float("alpha", factors[0]), as_float("beta", factors[1])
        if kept not in (0, 1):
            raise Invalid(f"beta is {kept:g}, must be 0 or 1")
        self.adds = kept == 1
        if self.alpha == 0:
            advise_once("alpha is 0: the product and all gradients are 0")
        self.names = (*(name for name, _ in operands), "o_desc")
        self.operands = [typed_geometry(name, descriptor, FLOATS) for name, descriptor in operands]
        self.output = output_geometry("o_desc", output, FLOATS)
        self.same, self.weights = same, weights
        geometries = (*self.operands, self.output)
        labels, shapes = labels_of(self.names, geometries), [shape_rows_first(one) for one in geometries]
        *sample, out = [labelled(shape, one) for shape, one in zip(shapes, labels, strict=True)]
        self.axes, self.out_axes = (
            [one if k == weights else (BATCH, *one) for k, one in enumerate(sample)],
            (BATCH, *out),
        )
        self.extents = extents_of(shapes, labels)
        self._contractions: dict[int | None, Contraction] = {}
        self.trained = None if weights is None else Parameter(*operands[weights], self, FLOATS)
        self.inputs = [k for k in range(1 if same else len(operands)) if k != weights]
        self.input = self.operands[self.inputs[0]]  # of a filter that has one
        two = len(self.inputs) == 2
        self.forward_arguments = _layer.FORWARD_TWO if two else _layer.FORWARD
        self.backward_arguments = _layer.BACKWARD_TWO if two else _layer.BACKWARD
        self.labels = ("inA", "inB") if two else ("in",)
        self.sources = {name: self.operands[k] for name, k in zip(self.labels, self.inputs, strict=True)}
        self.out_delta = Delta("out_delta", "o_desc", self.output)
        self.absent = {"bias_delta": "a product has no bias"}
        self.deltas = {
            _KEYS[k]: Delta(f"{name}_delta", self.names[k], self.operands[k])
            for name, k in zip(self.labels, self.inputs, strict=True)
        }
        if weights is None:
            self.absent["weights_delta"] = "neither operand is weights"
        else:
            self.deltas[_KEYS[weights]] = parameter_of("weights_delta", self.names[weights], self.operands[weights])

    def _check_inputs(self, arguments: Sequence[object], declared: _layer.Arguments) -> None:
        """Raise if the function that is called is for another number of inputs."""
        if len(arguments) != declared.count:
            has_two = "one input: use the functions for two inputs"
            has_one = "two inputs: use BNNSFilterApplyBatch"
            raise Invalid(f"the filter does not have {has_one if len(self.inputs) == 1 else has_two}")

    def apply(self, *arguments: object) -> None:
        self._check_inputs(arguments, self.forward_arguments)
        self.run(arguments)

    def apply_backward(self, *arguments: object) -> None:
        self._check_inputs(arguments, self.backward_arguments)
        self.run_backward(arguments)

    def parameters(self) -> Sequence[Parameter]:
        return () if self.trained is None else (self.trained,)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        operands = [self._operand(k, arrays) for k in range(len(self.operands))]
        if len(operands) == 1:
            values = sum_over(operands[0], self.axes[0], self.out_axes)
        else:
            values = self._contraction(None)(operands[0], operands[1], self.threads)
        return self._laid_out(self._scaled(values), self.output, len(arrays[self.labels[0]]))

    def _contraction(self, k: int | None) -> Contraction:
        """What computes the output (None), or the gradient of an operand."""
        if k not in self._contractions:
            a, b = self.axes if k is None else (self.out_axes, self.axes[1 - k])
            self._contractions[k] = Contraction(a, b, self.out_axes if k is None else self.axes[k], self.extents)
        return self._contractions[k]

    def _operand(self, k: int, arrays: Mapping[str, Array | None]) -> Array:
        """An operand in float32, with its axes in the order of their labels."""
        if k == self.weights:
            assert self.trained is not None
            return rows_first(self.trained.values(), self.operands[k].layout, batched=False)
        array = arrays[self._name_of(k)]
        assert array is not None  # reads
        return rows_first(in_shape(array, array.shape), self.operands[k].layout)

    def _name_of(self, k: int) -> str:
        """Apple's name of an operand that is an input."""
        return self.labels[0 if self.same else self.inputs.index(k)]

    def _scaled(self, values: Array) -> Array:
        if self.alpha == 1:
            return values
        with np.errstate(all="ignore"):
            return np.asarray(values * values.dtype.type(self.alpha))

    def _laid_out(self, values: Array, geometry: Geometry, batch: int | None) -> Array:
        """Values with labelled axes as an array of this geometry; extents of 1 are repeated. None: without a batch."""
        shape = shape_rows_first(geometry)
        whole = _repeated(values, shape if batch is None else (batch, *shape))
        return stored_rows_first(whole, geometry.layout, batched=batch is not None)

    # ---- backward ---------------------------------------------------------------------------------------------------

    def check_backward(self) -> None:
        for name, geometry in zip(self.names, (*self.operands, self.output), strict=True):
            if geometry.dtype != FLOAT32:
                raise Unsupported(f"{name} of this filter has type {geometry.dtype}; backward needs Float32")

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        """The gradient of an operand is computed from the other one."""
        if len(self.operands) == 1 or not need:
            return _layer.EMPTY
        others = [0] if self.same else [k for k in self.inputs if _KEYS[1 - k] in need]
        return {self._name_of(k): f"{self._name_of(k)} is NULL" for k in others}

    def backward(self, wanted: Gradients) -> _OperandGradients:
        g = rows_first(wanted.dy, self.output.layout)
        return _OperandGradients(**{key: self._gradient(_KEYS.index(key), g, wanted.arrays) for key in wanted.need})

    def _gradient(self, k: int, g: Array, arrays: Mapping[str, Array | None]) -> Array:
        if len(self.operands) == 1:
            total = sum_over(g, self.out_axes, self.axes[0])
        else:
            total = self._term(k, g, arrays)
            if self.same:
                with np.errstate(all="ignore"):
                    total = total.astype(np.float64) + self._term(1, g, arrays)
        return self._laid_out(self._scaled(total), self.operands[k], None if k == self.weights else len(g))

    def _term(self, k: int, g: Array, arrays: Mapping[str, Array | None]) -> Array:
        """What an operand receives as the k-th one."""
        term = self._contraction(k)(g, self._operand(1 - k, arrays), self.threads)
        shape = shape_rows_first(self.operands[k])
        return _repeated(term, shape if k == self.weights else (len(g), *shape))
