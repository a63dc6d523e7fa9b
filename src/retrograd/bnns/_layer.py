"""What layers share: checks of their descriptors, weights, gradients, and the base class that applies them.

A filter declares its operands and supplies `forward` and `backward` over the array functions; see :class:`Layer`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

import numpy as np

from ..ops._arrays import find_overlap, overlaps, same_elements
from ..ops._buffers import keeps_still
from ..ops._planned import Planned
from ..ops.elementwise import activation_backward
from ..ops.linear import LinearGradients
from . import _constants as c
from . import _filter
from ._activation import IDENTITY, Fused, fused
from ._conversion import PLAIN, Scale, converted, scale_of
from ._failure import Invalid, Unsupported
from ._filter import FLOAT32, BNNSFilter, checked_batch, checked_descriptor, in_shape, source_samples, target_samples
from ._filter import output_geometry as output_geometry
from ._filter import typed_geometry as typed_geometry
from ._memory import Array, Geometry, axes_of_size, check_disjoint, check_writable, contiguous, geometry, size_of
from ._structures import BNNSActivation, BNNSNDArrayDescriptor, Structure, Weighted

_S = TypeVar("_S", bound=Structure)
_CONSTANT_SLOPES: Final = ("linear", "linear_with_bias")
_FLOAT32_ONLY: Final = (c.BNNSDataTypeFloat32,)
_BIASES: Final = (*_filter.FLOATS, c.BNNSDataTypeInt8, c.BNNSDataTypeInt16, c.BNNSDataTypeInt32)
NO_OUTPUT: Final = "out is NULL; a filter with an activation needs it"
EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})


def checked_layer(kind: type[_S], layer: object, name: str = "layer_params") -> _S:
    """The structure that a filter is made from."""
    if not isinstance(layer, kind):
        shown = "NULL" if layer is None else f"of type {type(layer).__name__}"
        raise Invalid(f"{name} is {shown}, must be {kind.__name__}")
    return layer


def logical(array: Array, layout: int, batched: bool = True) -> Array:
    """The array with its axes in the order of the layout's ``size``, after the batch's axis if there is one."""
    return np.transpose(array, _axes(layout, batched))


def stored(array: Array, layout: int, batched: bool = True) -> Array:
    """The opposite of :func:`logical`: the array with its slowest axis first."""
    return np.transpose(array, np.argsort(_axes(layout, batched)))


def _axes(layout: int, batched: bool) -> tuple[int, ...]:
    axes = axes_of_size(layout)
    return (0, *(1 + axis for axis in axes)) if batched else axes


def rows_first(array: Array, layout: int, batched: bool = True) -> Array:
    """As `logical`, but a RowMajorMatrix, whose ``size`` lists columns first, has its rows before its columns."""
    return array if layout == c.BNNSDataLayoutRowMajorMatrix else logical(array, layout, batched)


def stored_rows_first(array: Array, layout: int, batched: bool = True) -> Array:
    """The opposite of `rows_first`."""
    return array if layout == c.BNNSDataLayoutRowMajorMatrix else stored(array, layout, batched)


# ---- parameters -----------------------------------------------------------------------------------------------------


def real_values(array: Array, scale: Scale = PLAIN, dtype: np.dtype[Any] = FLOAT32) -> Array:
    """The values in float32 or another floating-point type, aligned."""
    if array.dtype is dtype and array.flags.aligned:
        return array
    return converted(array, scale, dtype, PLAIN)


class Parameter:
    """Weights or a bias: the client's memory, read at every call, or a copy of its values made with the filter.

    `dtype` is that of the values; `scale` replaces that of the descriptor.
    """

    def __init__(
        self,
        name: str,
        descriptor: BNNSNDArrayDescriptor,
        owner: BNNSFilter,
        types: tuple[int, ...],
        dtype: np.dtype[Any] = FLOAT32,
        scale: Scale | None = None,
    ) -> None:
        self.name, self.shown = name, f"{name}.data"
        self.geometry = typed_geometry(name, descriptor, types)
        self._dtype = dtype
        self._scale = scale_of(name, descriptor) if scale is None else scale
        self.client = descriptor.copy()
        values = _filter.viewed(name, self.client)
        if not owner.uses_client_memory:
            copy = owner.arena.allocate(values.shape, dtype)
            copy[...] = real_values(values, self._scale, dtype)
            values = copy
        self.moves = owner.uses_client_memory and not keeps_still(descriptor.data)  # between calls
        self._still = None if self.moves else values
        plain = values.dtype is dtype and values.flags.c_contiguous and values.flags.aligned
        self._plain = self._still if plain else None

    def memory(self) -> Array:
        """The array that is read: the client's or the copy."""
        return _filter.viewed(self.name, self.client) if self._still is None else self._still

    def values(self) -> Array:
        """The current values."""
        return real_values(self.memory(), self._scale, self._dtype)

    def repeated(self, shape: tuple[int, ...]) -> Array:
        """The current values, contiguous, and broadcast along the leading axes of `shape`."""
        values = self._plain
        if values is not None and values.shape == shape:
            return values
        first = len(shape)
        while math.prod(shape[first:]) != self.geometry.elements:  # which the filter has checked
            first -= 1
        return np.require(np.broadcast_to(self.values().reshape(shape[first:]), shape), self._dtype, ["C", "A"])


# ---- gradients ------------------------------------------------------------------------------------------------------


class Result:
    """A gradient that a call produces, in the memory of its descriptor. `key` is the array functions' name for it."""

    def __init__(self, name: str, descriptor: BNNSNDArrayDescriptor, array: Array, key: str = "") -> None:
        self.name, self.array, self.key = name, array, key
        self.accumulates = _filter.accumulates(name, descriptor)

    def rows(self, shape: tuple[int, ...]) -> Array | None:
        """The array in this shape, without a copy, if the engine can write to it."""
        array = self.array
        if array.dtype is not FLOAT32 or not array.flags.aligned or array.size != math.prod(shape):
            return None
        rows = array if array.shape == shape else array.reshape(shape)
        return rows if np.may_share_memory(rows, array) else None  # a copy, if the strides require one

    def put(self, values: Array) -> None:
        with np.errstate(all="ignore"):
            _filter.put(self.array, values.reshape(self.array.shape), self.accumulates)


class Delta(NamedTuple):
    """A gradient among the arguments of a call, and the array of the layer that it belongs to.

    `fits` compares its geometry with the layer's, and returns the one to use. `described` replaces the descriptor by
    one that extents and strides describe.
    """

    name: str
    like: str  # the layer's descriptor, for messages
    layer: Geometry
    shape: tuple[int, ...] | None = None  # that array functions can read or write it in, without the batch
    fits: Callable[[Delta, Geometry], Geometry] = lambda delta, given: delta.as_many(given)
    types: tuple[int, ...] = _FLOAT32_ONLY
    batched: bool = True
    described: Callable[[BNNSNDArrayDescriptor], BNNSNDArrayDescriptor] = lambda descriptor: descriptor

    def view(
        self, descriptor: object, batch: int = 1, stride: object = 0, samples: Callable[..., Array] = target_samples
    ) -> Array:
        """The array; `samples` is `source_samples` for one that is read."""
        checked = self.described(checked_descriptor(self.name, descriptor))
        geometry = self.fits(self, _filter.delta_geometry(self.name, checked, self.types))
        if self.batched:
            # A new view: the client may change the shape of its array while a plan is kept.
            view: Array = samples(self.name, geometry, checked.data, batch, stride, ".data").view()
            return view
        if geometry.may_overlap:
            raise _filter.overlapping(self.name, geometry)
        view = _filter.viewed(self.name, checked)
        check_writable(f"{self.name}.data", view)
        return view

    def result(self, descriptor: object, batch: int = 1, stride: object = 0, key: str = "") -> Result:
        """The same as a gradient to be written; `key` is the array functions' name for it."""
        array = self.view(descriptor, batch, stride)
        return Result(self.name, checked_descriptor(self.name, descriptor), array, key)

    def as_many(self, given: Geometry) -> Geometry:
        """Any shape with as many elements fits."""
        if given.elements != self.layer.elements:
            raise Invalid(
                f"{self.name} has {given.elements} elements, expected {self.layer.elements} as in {self.like} with its "
                f"{size_of(self.layer)}"
            )
        return given

    def alike(self, given: Geometry) -> Geometry:
        """The extents must agree, but for those that are 1."""
        if given.proper_extents != self.layer.proper_extents:
            raise _filter.unlike(self.name, given, self.like, self.layer)
        return given

    def reshaped(self, given: Geometry) -> Geometry:
        """As in Apple's calls, a contiguous gradient may have another shape with as many elements, such as an image for
        a vector. Extents of the same axes in another order are refused: that is a mistake.
        """
        layer = self.layer
        if given.extents == layer.extents:
            return given
        proper, expected = given.proper_extents, layer.proper_extents
        allowed = proper == expected or len(proper) != len(expected)
        if not allowed or given.elements != layer.elements or not given.dense:
            raise _filter.unlike(self.name, given, self.like, layer)
        return contiguous(layer, given.dtype)


def parameter_of(name: str, like: str, layer: Geometry, shape: tuple[int, ...] | None = None) -> Delta:
    """The gradient of a parameter: it has the parameter's extents, but for those that are 1, and no batch."""
    return Delta(name, like, layer, shape, Delta.alike, batched=False)


def float32_delta(name: str, descriptor: object) -> Geometry:
    """The geometry of a gradient."""
    return _filter.delta_geometry(name, checked_descriptor(name, descriptor), _FLOAT32_ONLY)


def check_apart(results: list[Result]) -> None:
    """Raise if gradients overlap each other."""
    check_disjoint({result.name: result.array for result in results}, {})


def are_one(result: Result, other: Result) -> bool:
    """Whether two gradients are one array, which receives their sum. Raise if they overlap in any other way."""
    if not overlaps(result.array, other.array):
        return False
    if not same_elements(result.array, other.array) or result.accumulates != other.accumulates:
        raise Invalid(f"{result.name} overlaps {other.name} in memory")
    return True


def put_sums(computed: Sequence[tuple[Result, Array]]) -> None:
    """Write gradients; those that are one array receive the sum."""
    written: list[Result] = []
    for k, (result, total) in enumerate(computed):
        if any(same_elements(result.array, other.array) for other in written):
            continue
        for other, values in computed[k + 1 :]:
            if same_elements(result.array, other.array):
                total = total + values
        result.put(total)
        written.append(result)


# ---- activations ----------------------------------------------------------------------------------------------------


def layer_activation(activation: BNNSActivation, output: Geometry) -> Fused:
    """The activation that is fused into a layer with this output."""
    return fused(activation, output.dtype, False, "an activation filter trains it")


def needs_output(activation: Fused) -> bool:
    """Whether backward reads the layer's output: not if the slope of its activation is the same everywhere."""
    return activation.function.name not in ("identity", *_CONSTANT_SLOPES)


def check_trainable(activation: Fused, out: object) -> None:
    """Raise if backward cannot compute the slope of a fused activation."""
    if activation.function.name == "identity":
        return
    if activation.untrainable:
        raise Unsupported(activation.untrainable)
    if out is None and needs_output(activation):
        raise Invalid(NO_OUTPUT)


def before_activation(
    activation: Fused, dy: Array, y: Array | None, recompute: Callable[[], Array], threads: int | None
) -> Array:
    """dz = dy f'(z) in float32. `recompute` computes z, for activations whose output does not determine the slope."""
    function = activation.function
    if function.name == "identity":
        return dy
    if function.name in _CONSTANT_SLOPES:
        return activation_backward(dy, function, x=dy, num_threads=threads)  # any input will do
    if activation.slope_from == "input":
        return activation_backward(dy, function, x=recompute(), num_threads=threads)
    assert y is not None  # check_trainable
    return activation_backward(dy, function, y=in_shape(y, dy.shape), num_threads=threads)


# ---- the base of filters --------------------------------------------------------------------------------------------


class Arguments:
    """The names of a call's arguments, in Apple's order; ``in+`` stands for in and in_stride.

    A name with a "_stride" of its own is a batch of samples. Backward's plan is made from the gradients, their strides
    and the number of samples; other samples differ from call to call.
    """

    def __init__(self, declared: str) -> None:
        names = re.sub(r"(\w+)\+", r"\1 \1_stride", declared).split()
        self.count = len(names)
        at = {name: k for k, name in enumerate(names)}
        strides = {name: at[f"{name}_stride"] for name in names if f"{name}_stride" in at}
        self.samples = {name: (at[name], k) for name, k in strides.items() if not name.endswith("_delta")}
        self.out = self.samples.get("out", (0, 0))
        self.inputs = tuple((name, f"{name}_stride", *place) for name, place in self.samples.items() if name != "out")
        self.planned = tuple(n for n in names if n == "batch_size" or ("_delta" in n and n != "out_delta"))
        self.of_plan: Callable[[tuple[object, ...]], tuple[object, ...]]
        self.of_plan = operator.itemgetter(*(at[name] for name in self.planned))
        self.out_delta = at.get("out_delta", 0)


FORWARD: Final = Arguments("batch_size in+ out+")
BACKWARD: Final = Arguments("batch_size in+ in_delta+ out+ out_delta+ weights_delta bias_delta")
FORWARD_TWO: Final = Arguments("batch_size inA+ inB+ out+")
BACKWARD_TWO: Final = Arguments("batch_size inA+ inA_delta+ inB+ inB_delta+ out+ out_delta+ weights_delta bias_delta")


class Gradients(NamedTuple):
    """What to compute in a backward call."""

    dy: Array  # before the activation; in float32, in the shape that the filter declares
    arrays: Mapping[str, Array | None]  # the samples that backward reads, by Apple's names
    need: tuple[str, ...]  # the keys of the gradients that are wanted
    out: Any  # the memory of those that can be written directly: the filter's `computed`, or None
    accumulate: bool  # add to `out`
    form: Any  # what `form_of` has derived from the results


class _Plan(NamedTuple):
    """What a backward call derives from its descriptors."""

    batch: int
    dy: Array
    shape: tuple[int, ...]  # of dy, for the array functions
    results: Sequence[Result]
    need: tuple[str, ...]
    reads: Mapping[str, str]  # see `Layer.reads`
    form: Any
    direct: Mapping[str, Array]  # results that the array functions can write
    out: Any  # the same as the filter's `computed`
    accumulate: bool
    rest: Sequence[Result]  # results that are written afterwards
    moving: Sequence[Parameter]  # parameters whose memory is found again at every call


class Described(Protocol):
    """The fields of layers with one input."""

    i_desc: BNNSNDArrayDescriptor
    o_desc: BNNSNDArrayDescriptor


class Layer(BNNSFilter):
    """A filter that declares the operands of its calls, and computes with arrays.

    A subclass sets the attributes below, and supplies `forward` and `backward`. This class makes views of the client's
    memory, checks them, and writes the results: directly if the array functions can, else from a temporary array.
    """

    forward_arguments: Arguments = FORWARD
    backward_arguments: Arguments = BACKWARD
    sources: Mapping[str, Geometry]  # samples that calls read, by Apple's names
    input: Geometry
    output: Geometry
    # The shape in which `forward` can write the output, without the batch; None if it makes an array of its own.
    out_shape: tuple[int, ...] | None = None
    shown: Mapping[str, str] = EMPTY  # what messages about a forward call's samples call them, if not by these names
    adds: bool = False  # to the output, instead of overwriting it
    may_overlap: ClassVar[frozenset[str]] = frozenset()  # what the output may overlap; with others the call fails
    activation: Fused = IDENTITY
    out_delta: Delta
    deltas: dict[str, Delta]  # the gradients that backward computes, by the names of the array functions
    computed: ClassVar[Callable[..., tuple[Array | None, ...]]] = LinearGradients  # what `backward` returns
    in_place: ClassVar[Mapping[str, tuple[str, ...]]] = EMPTY  # what a gradient may overwrite: "dy", or samples
    absent: Mapping[str, str] = EMPTY  # gradients that the layer does not have, and why
    notes: ClassVar[str] = ""  # the function of which gradients of type BFloat16 are an extension

    # ---- what a subclass declares -----------------------------------------------------------------------------------

    def declare(self, input: Geometry, output: Geometry) -> None:
        """Set the geometries of samples, and their gradients: of as many elements, in float32."""
        self.input, self.output = input, output
        self.sources = {"in": input, "out": output}
        self.out_delta = Delta("out_delta", "o_desc", output)
        self.deltas = {"dx": Delta("in_delta", "i_desc", input)}

    def describe(self, layer: Described, inputs: tuple[int, ...], outputs: tuple[int, ...], kind: str = "") -> None:
        """The same from the descriptors of a layer, whose arrays have these types, which messages call `kind`."""
        given = typed_geometry("i_desc", layer.i_desc, inputs, kind)
        self.declare(given, output_geometry("o_desc", layer.o_desc, outputs, kind))

    def parameter(self, name: str, descriptor: BNNSNDArrayDescriptor, types: tuple[int, ...]) -> Parameter | None:
        """A parameter that the layer may do without."""
        return None if descriptor.data is None else Parameter(name, descriptor, self, types)

    # ---- what a subclass supplies -----------------------------------------------------------------------------------

    def forward(self, arrays: Mapping[str, Array], out: Array | None) -> Array:
        """The output of samples: `out`, or another array with as many elements, which may be a view of the input."""
        raise NotImplementedError

    def backward(self, wanted: Gradients) -> object:
        """The gradients that are wanted, as `computed`. Those of ``wanted.out`` are written there."""
        raise NotImplementedError

    def check_backward(self) -> None:
        """Raise if the layer cannot be trained."""
        if self.activation.untrainable:
            raise Unsupported(self.activation.untrainable)

    def check_state(self, batch: int) -> None:
        """Raise if there is no backward pass now."""

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        """The samples that backward reads, each with the error message if it is NULL; "" if it may be."""
        return EMPTY

    def before_activation(self, arrays: Mapping[str, Array | None], batch: int) -> Array:
        """The output before the activation, for one whose output does not determine its slope."""
        raise NotImplementedError

    def activation_gradient(self, dy: Array, arrays: Mapping[str, Array | None]) -> Array:
        """The gradient of the output before the activation."""
        return before_activation(
            self.activation, dy, arrays.get("out"), lambda: self.before_activation(arrays, len(dy)), self.threads
        )

    def parameters(self) -> Sequence[Parameter]:
        """The parameters that calls read."""
        return ()

    def form_of(self, results: Sequence[Result]) -> object:
        """What else backward derives from its results."""
        return None

    def writable(self, result: Result, batch: int, form: Any) -> Array | None:
        """A gradient's memory, as the array functions can write it; None if they cannot."""
        delta = self.deltas[result.key]
        if delta.shape is None:
            return None
        return result.rows((batch, *delta.shape) if delta.batched else delta.shape)

    def dy_shape(self, batch: int, form: Any) -> tuple[int, ...]:
        """The shape in which `backward` takes the gradient of the output."""
        return (batch, *(self.output.shape if self.out_delta.shape is None else self.out_delta.shape))

    def put(self, results: Sequence[Result], gradients: object) -> None:
        """Write gradients from temporary arrays."""
        for result in results:
            result.put(getattr(gradients, result.key))

    # ---- forward ----------------------------------------------------------------------------------------------------

    def apply(self, *arguments: object) -> None:
        """Compute the output of a batch."""
        self.run(arguments)

    def run(
        self,
        arguments: tuple[object, ...],
        read: Mapping[str, Array] | None = None,
        written: Mapping[str, Array] = EMPTY,
        forward: Callable[[Mapping[str, Array], Array | None], Array] | None = None,
    ) -> None:
        """Compute the output, by `forward` if it is not the method of this name.

        `read`, by default the parameters, and `written` are other arrays of the call, which `forward` receives too.
        """
        batch, names = checked_batch(arguments[0]), self.forward_arguments
        shown, (at, stride) = self.shown, names.out
        y = target_samples(
            shown.get("out", "out"), self.output, arguments[at], batch, arguments[stride], "", "out_stride"
        )
        out = self.writable_output(y)
        arrays: dict[str, Array] = {}
        for name, step_name, at, stride in names.inputs:
            array = source_samples(
                shown.get(name, name), self.sources[name], arguments[at], batch, arguments[stride], "", step_name
            )
            arrays[name] = self._apart(name, array, y, out) if np.may_share_memory(y, array) else array
        if read is None:
            for parameter in self.parameters():
                self._apart(parameter.shown, parameter.memory(), y, out)
        else:
            for name, array in read.items():
                arrays[name] = self._apart(name, array, y, out) if np.may_share_memory(y, array) else array
        if written is not EMPTY:
            for name, array in written.items():
                for other, used in (("out", y), *arrays.items()):
                    if overlaps(array, used):
                        raise Invalid(f"{name} overlaps {other} in memory")
            arrays.update(written)
        z = (forward or self.forward)(arrays, out)
        if z is not out:
            _filter.put(y, z if z.shape == y.shape else z.reshape(y.shape), self.adds)

    def _apart(self, name: str, array: Array, y: Array, out: Array | None) -> Array:
        """An array that is read, or a copy if the output is written to its memory in another order."""
        if not overlaps(y, array):
            return array
        if name not in self.may_overlap:
            raise Invalid(f"out overlaps {name} in memory")
        return array if out is None or same_elements(out, array) else array.copy()

    def writable_output(self, y: Array) -> Array | None:
        """The output, as `forward` can write it; None if it cannot."""
        if self.out_shape is None or y.dtype is not FLOAT32 or not y.flags.aligned:
            return None
        shape = (len(y), *self.out_shape)
        if y.shape == shape:
            return y
        return y.reshape(shape) if y.flags.c_contiguous else None

    # ---- backward ---------------------------------------------------------------------------------------------------

    def apply_backward(self, *arguments: object) -> None:
        """Compute the gradients of a batch; what is None is not wanted."""
        self.run_backward(arguments)

    def run_backward(self, arguments: tuple[object, ...], read: Mapping[str, Array] = EMPTY) -> None:
        """Compute the gradients whose descriptors are not None. `read` are other arrays of the call."""
        names = self.backward_arguments
        plan = _backward_plan(arguments[names.out_delta], self, *names.of_plan(arguments))
        self.check_state(plan.batch)
        arrays: dict[str, Array | None] = {} if read is EMPTY else dict(read)
        for name, refusal in plan.reads.items():
            at, stride = names.samples[name]
            arrays[name] = None
            if arguments[at] is not None:
                arrays[name] = source_samples(name, self.sources[name], arguments[at], plan.batch, arguments[stride])
            elif refusal:
                raise Invalid(refusal)
        if not plan.results:
            return
        dy = in_shape(plan.dy, plan.shape)
        if self.activation.function.name != "identity":
            dy = self.activation_gradient(dy, arrays)
        rest, out, accumulate = plan.rest, plan.out, plan.accumulate
        if out is not None and (arrays or plan.moving) and self._clashes(plan, arrays):
            rest, out, accumulate = plan.results, None, False
        gradients = self.backward(Gradients(dy, arrays, plan.need, out, accumulate, plan.form))
        if rest:
            self.put(rest, gradients)

    def _clashes(self, plan: _Plan, arrays: Mapping[str, Array | None]) -> bool:
        """Whether the call reads memory that it would write too early."""
        for key, result in plan.direct.items():
            for name, array in arrays.items():
                if array is None or not np.may_share_memory(result, array) or not overlaps(result, array):
                    continue
                if name not in self.in_place.get(key, ()) or not same_elements(result, array):
                    return True
            if plan.moving and any(overlaps(result, parameter.memory()) for parameter in plan.moving):
                return True
        return False


@Planned
def _backward_plan(out_delta: object, filter: Layer, *arguments: object) -> _Plan:
    """Every check that depends only on the descriptors."""
    given = dict(zip(filter.backward_arguments.planned, arguments, strict=True))
    batch = checked_batch(given["batch_size"])
    for name, why in filter.absent.items():
        if given.get(name) is not None:
            raise Unsupported(f"{name} is given, but {why}")
    filter.check_backward()
    if out_delta is None:
        raise Invalid("out_delta is NULL")
    dy = filter.out_delta.view(out_delta, batch, given["out_delta_stride"], source_samples)
    results = [
        delta.result(given[delta.name], batch, given.get(f"{delta.name}_stride"), key)
        for key, delta in filter.deltas.items()
        if given[delta.name] is not None
    ]
    for name, array in (("out_delta", dy), *((result.name, result.array) for result in results)):
        if filter.notes and array.dtype is not FLOAT32:
            filter.note_extension(filter.notes, f"{name}.data_type is BNNSDataTypeBFloat16")
    check_apart(results)
    need = tuple(result.key for result in results)
    reads, form = filter.reads(need), filter.form_of(results)
    parameters = filter.parameters()
    found = {result.key: filter.writable(result, batch, form) for result in results}
    read = {"dy": dy, **{parameter.name: parameter.memory() for parameter in parameters}}
    if find_overlap(found, read, filter.in_place) is not None:  # nothing may be written that is still to be read
        found = dict.fromkeys(found)
    # Gradients without a shape are written afterwards in any case.
    shaped = [result for result in results if filter.deltas[result.key].shape is not None]
    accumulate = bool(shaped) and all(result.accumulates and found[result.key] is not None for result in shaped)
    rest = [result for result in results if found[result.key] is None or result.accumulates is not accumulate]
    direct = {key: array for key, array in found.items() if array is not None and all(key != r.key for r in rest)}
    return _Plan(
        batch,
        dy,
        filter.dy_shape(batch, form),
        results,
        need,
        reads,
        form,
        direct,
        filter.computed(**direct) if direct else None,
        accumulate,
        rest,
        [parameter for parameter in parameters if parameter.moves],
    )


class OneInputFilter(Layer):
    """A filter that the functions for one input apply."""


class TwoInputFilter(Layer):
    """A filter that the functions for two inputs apply."""


class WeightedLayer(OneInputFilter):
    """A layer with weights, perhaps a bias, and an activation."""

    weights: Parameter
    bias: Parameter | None
    in_shape: tuple[int, ...]  # of a sample, for the array functions
    out_shape: tuple[int, ...]

    def complete(self, layer: Weighted, expected: str, fits: Callable[[Delta, Geometry], Geometry]) -> None:
        """Set the bias, the activation and the gradients, given the weights and the shapes of samples.

        The bias has an element for each of the output's first axis; `expected` completes the message.
        """
        count, weights = self.out_shape[0], self.weights.geometry
        self.bias = self.parameter("bias", layer.bias, _BIASES)
        bias = geometry(c.BNNSDataLayoutVector, FLOAT32, (count,), ()) if self.bias is None else self.bias.geometry
        if bias.elements != count:
            raise Invalid(f"bias has {bias.elements} elements, expected {count}{expected}")
        self.activation = layer_activation(layer.activation, self.output)
        self.out_delta = Delta("out_delta", "o_desc", self.output, self.out_shape, fits)
        self.deltas = {
            "dx": Delta("in_delta", "i_desc", self.input, self.in_shape, fits),
            "dw": parameter_of("weights_delta", "w_desc", weights, weights.shape),
            "db": parameter_of("bias_delta", "o_desc" if self.bias is None else "bias", bias, (count,)),
        }

    def parameters(self) -> Sequence[Parameter]:
        return (self.weights,) if self.bias is None else (self.weights, self.bias)

    def reads(self, need: tuple[str, ...]) -> Mapping[str, str]:
        from_input = self.activation.slope_from == "input"
        wanted = "the activation's slope" if from_input else "weights_delta"
        needed = f"in is NULL, and {wanted} is computed from it" if from_input or "dw" in need else ""
        return {"out": NO_OUTPUT if needs_output(self.activation) else "", "in": needed}

    def x(self, arrays: Mapping[str, Array | None], batch: int) -> Array:
        """The input in float32. Some gradients do not depend on it, but the engine needs an array of its shape."""
        given, shape = arrays["in"], (batch, *self.in_shape)
        return np.broadcast_to(np.float32(0), shape) if given is None else in_shape(given, shape)
