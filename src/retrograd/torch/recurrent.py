"""The recurrent layers and cells of `torch.nn` on retrograd's engine, with more options."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..ops._errors import ArgumentError, of_function
from ..ops.activation import Activation
from ..ops.recurrent import GruActivations, LstmActivations
from ..ops.recurrent.problem import problem_of
from ._arrays import check_storage, check_tensor
from ._autograd import UseTorch, is_eager, warn_of_torch
from ._choice import step_prefers_torch
from ._compiling import allow
from ._leaf import Leaf, Proxy
from ._packed import check_packed, dropped
from ._recurrent import CELLS, as_activation, dtype_of, encoded, plan_of
from ._recurrent_autograd import is_recorded, new_recurrent, run
from ._step import DirectCell, Refused, step

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]

# h_0 and c_0 of an LSTM, h_0 of the others.
States: TypeAlias = Tensor | tuple[Tensor, Tensor]
# Who draws the masks of dropout between layers.
DropoutMasks: TypeAlias = Literal["retrograd", "torch"]
_FLOATS = (torch.float32, torch.float64)
_HALF = (torch.bfloat16, torch.float16)


class Recurrent(Leaf):
    """What layers and cells share: the options, which are class attributes with their defaults, and a call."""

    clip: float | None = None
    zoneout: float | tuple[float | None, float | None] | None = None
    norm: Literal["haste", "cell"] | None = None
    norm_eps: float = 1e-5
    recompute: bool = False

    input_size: int
    hidden_size: int
    bias: bool
    proj_size: int = 0
    _title: ClassVar[str]  # of CELLS
    _has_cells: ClassVar[bool] = False  # beside the hidden state
    _names: ClassVar[tuple[str, ...]] = ("clip", "zoneout", "norm", "norm_eps", "recompute")  # of the options
    _encoded: str = ""  # the options of the engine
    _more: str = ""  # the names of parameters that PyTorch's layer has not

    def _set_options(self, options: dict[str, Any]) -> None:
        """Set those that differ from the defaults. Check them."""
        for name, value in options.items():
            if value != getattr(type(self), name):
                setattr(self, name, value)
        self._more = "".join(f" {name}" for name in self._more_parameters())
        self.encode_options()
        self._check_options()

    def _more_parameters(self) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters that PyTorch's layer has not."""
        if self.norm is None:
            return {}
        gates = len(CELLS[self._title].gates) * self.hidden_size
        return {"gamma_x": (gates,), "gamma_h": (gates,)}

    def _engine_options(self) -> dict[str, Any]:
        """The options that go to the array functions, by their names."""
        names = (name for name in self._names if name not in ("peephole", "recompute"))
        return {name: getattr(self, name) for name in names if name in self.__dict__}

    def encode_options(self) -> None:
        self._encoded = encoded(self._engine_options())

    def _check_options(self) -> None:
        """Raise where a call would refuse the options, with the message of the array functions."""
        for part in self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,):
            if part is not None and not (isinstance(part, (int, float)) and 0 <= part < 1):
                raise ValueError(f"{self._title}: zoneout is {part!r}, must be at least 0 and below 1")
        if isinstance(self.zoneout, tuple) and (len(self.zoneout) != 2 or not self._has_cells):
            raise ValueError(
                f"{self._title}: zoneout is {self.zoneout!r}, must be a rate, or for an LSTM two, of h and c"
            )
        peephole = {None: 0, "diagonal": 1, "full": 2}[getattr(self, "peephole", None)]
        try:
            problem_of(
                (1, 1, self.input_size),
                dtype_of(torch.float32),
                1,
                True,
                self.hidden_size,
                self.proj_size,
                False,
                False,
                peephole,
                0,
                self.zoneout is not None,
                0.0,
                True,
                plan_of(self._title, self._parameter_names(), self._encoded).cell_options(),
            )
        except ArgumentError as error:
            raise of_function(self._title, error) from None

    def _parameter_names(self) -> str:
        """The names of the parameters of a cell, without the layer, in the order of the operator."""
        biases = " bias_ih bias_hh" if self.bias else ""
        return f"weight_ih weight_hh{biases}{' weight_hr' if self.proj_size else ''}{self._more}"

    def _fill(self, parameters: Mapping[str, Tensor]) -> None:
        """Initial values of parameters that PyTorch's layer has not, by name."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for name, parameter in parameters.items():
            if name.startswith("gamma"):
                torch.nn.init.ones_(parameter)
            elif name.startswith("beta"):
                torch.nn.init.zeros_(parameter)
            else:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def _split(self, hx: Any) -> tuple[Tensor, Tensor | None]:
        """h0 and c0 of the given states."""
        if not self._has_cells:
            if not isinstance(hx, Tensor):
                raise TypeError(f"{self._title}: hx must be a tensor, not {type(hx).__name__}")
            return hx, None
        if isinstance(hx, Tensor) or len(hx) != 2:
            raise TypeError(f"{self._title}: hx must be the 2 tensors (h_0, c_0), not {type(hx).__name__}")
        return hx[0], hx[1]

    def _run(
        self,
        x: Tensor,
        hx: Any,
        names: Sequence[str],
        bidirectional: bool,
        batch_first: bool,
        dropout: float,
        lengths: Any,
        batch_sizes: Tensor | None,
        reset: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """y and the final states."""
        parameters = self._parameters
        # A parametrized weight is an attribute instead.
        weights: list[Any] = [parameters[name] if name in parameters else getattr(self, name) for name in names]
        h0, c0 = (None, None) if hx is None else self._split(hx)
        dtype = weights[0].dtype
        if x.dtype is not dtype and torch.is_autocast_enabled("cpu"):
            self._check_storages(x, h0, c0)
            x = x.to(dtype)
            h0, c0 = (None if state is None else state.to(dtype) for state in (h0, c0))
        self._check(x, h0, c0, batch_first, dtype)
        if mask is not None:
            check_tensor(self._title, "mask", mask)
        if reset is not None:
            check_tensor(self._title, "reset", reset)
        if mask is not None and mask.requires_grad:
            raise ValueError(f"{self._title}: mask requires a gradient, but masks have none; pass mask.detach()")
        return self._compute(x, h0, c0, weights, bidirectional, batch_first, dropout, lengths, batch_sizes, reset, mask)

    def _compute(
        self,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weights: list[Any],
        bidirectional: bool,
        batch_first: bool,
        dropout: float,
        lengths: Any,
        batch_sizes: Tensor | None,
        reset: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """y and the final states, from checked arguments."""
        draws = self.training and (dropout > 0 or self.zoneout is not None)
        y, hn, cn = run(
            new_recurrent(
                (
                    x,
                    h0,
                    c0,
                    weights,
                    None if lengths is None else torch.as_tensor(lengths),
                    batch_sizes,
                    reset,
                    mask,
                    torch.randint(1 << 62, ()) if draws else None,
                    is_recorded(x, h0, c0, *weights),
                    self._title,
                    self._parameter_names(),
                    self._encoded,
                    bidirectional,
                    batch_first,
                    dropout if draws else 0.0,
                    self.recompute,
                )
            )
        )
        return y, (hn, cn) if self._has_cells else hn

    def _lead(self, x: Tensor, batch_first: bool) -> tuple[int, ...]:
        """The first axes of the states."""
        raise NotImplementedError

    def _check(self, x: Tensor, h0: Tensor | None, c0: Tensor | None, batch_first: bool, dtype: torch.dtype) -> None:
        title = self._title
        if x.shape[-1] != self.input_size:
            raise ValueError(f"{title}: input has shape {tuple(x.shape)}, but input_size is {self.input_size}")
        if x.dtype is not dtype or dtype not in _FLOATS:
            if x.dtype is dtype in _HALF:
                raise UseTorch(f"{title}: its weights are {dtype}, and retrograd computes in float32 or float64")
            raise TypeError(
                f"{title}: input has dtype {x.dtype} and the weights have {dtype}; both must be float32, or both "
                "float64"
            )
        if h0 is None and c0 is None:
            return
        lead = self._lead(x, batch_first)
        states = [("hx[0]" if self._has_cells else "hx", h0, self.proj_size or self.hidden_size)]
        if self._has_cells:
            states.append(("hx[1]", c0, self.hidden_size))
        for name, state, size in states:
            expected = (*lead, size)
            if state is None or tuple(state.shape) != expected:
                shape = None if state is None else tuple(state.shape)
                raise ValueError(f"{title}: {name} has shape {shape}, expected {expected}")
            if state.dtype is not dtype:
                raise TypeError(f"{title}: {name} has dtype {state.dtype}, but the weights have {dtype}")

    def _is_torchs(self) -> bool:
        """Whether PyTorch's layer has all options of this one."""
        has_more = any(name in self.__dict__ for name in self._names)
        return not has_more and getattr(self, "nonlinearity", "tanh") in ("tanh", "relu")

    def _step_is_torchs(self, samples: int) -> bool:
        """Whether PyTorch's layer computes a single step, because that takes less time."""
        recorded = torch.is_grad_enabled()
        return step_prefers_torch(self._title, samples, self.hidden_size, recorded) and self._is_torchs()

    def _torch_forward(self, reason: UseTorch | None, input: Any, hx: Any) -> Any:
        """The result of PyTorch's layer, if it has one."""
        if reason is not None:
            if not self._is_torchs():
                raise reason
            warn_of_torch(reason)
        return super().forward(input, hx)  # type: ignore[misc]

    def _check_storages(self, x: Tensor, h0: Tensor | None, c0: Tensor | None) -> None:
        """Raise where PyTorch would read memory that was freed."""
        if is_eager(x):
            first = "hx" if c0 is None else "hx[0]"
            for name, tensor in (("input", x), (first, h0), ("hx[1]", c0)):
                if tensor is not None:
                    check_storage(tensor, self._title, name)

    def extra_repr(self) -> str:
        described: str = super().extra_repr()  # type: ignore[misc]
        for name in self._names:
            if name in self.__dict__:
                described += f", {name}={getattr(self, name)!r}"
        return described


# ---- sequences -------------------------------------------------------------------------------------------------------


class Layers(Recurrent, torch.nn.RNNBase):
    """A layer over sequences."""

    num_layers: int
    batch_first: bool
    bidirectional: bool
    dropout: float
    dropout_masks: DropoutMasks = "retrograd"

    def __init__(self, mode: str, *arguments: Any, **options: Any) -> None:
        own = {name: options.pop(name) for name in self._names if name in options}
        masks = check_dropout_masks(self._title, options.pop("dropout_masks", "retrograd"))
        torch.nn.RNNBase.__init__(self, mode, *arguments, **options)  # the next class has other arguments
        reason = unsupported(self)
        if reason:
            raise ValueError(f"{self._title}: {reason}")
        self._set_options(own)
        if masks != "retrograd":
            self.dropout_masks = masks
        if self._more:
            self._add_parameters()

    def _add_parameters(self) -> None:
        like: Any = self.weight_ih_l0
        for names in self._all_weights:  # of one cell
            suffix = names[0].removeprefix("weight_ih")
            added = {kind: torch.nn.Parameter(like.new_empty(shape)) for kind, shape in self._more_parameters().items()}
            self._fill(added)
            for kind, parameter in added.items():
                setattr(self, kind + suffix, parameter)
                names.append(kind + suffix)
        self._flat_weights_names = [name for names in self._all_weights for name in names]
        self._init_flat_weights()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for names in self._all_weights:
            self._fill({name: getattr(self, name) for name in names if name.startswith(("gamma", "beta"))})

    def forward(
        self,
        input: Tensor | PackedSequence | Proxy,
        hx: Any = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
        reset: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Any:
        """Returns the outputs and the final states, as PyTorch's layer does.

        `lengths` (one per sample, in any order) has the effect of a `PackedSequence`: outputs after the end of a
        sample are 0, and the final states are those at its end. `reset`, ``[T, N]`` (``[N, T]`` if `batch_first`, and
        ``[T]`` without a batch), sets the states to 0 before the steps where it is true. `mask` multiplies the hidden
        state in the recurrent products; it broadcasts to ``[cells, gates, T, N, H]`` (``[cells, gates, N, T, H]``).
        Both are in the order of the samples before packing.
        """
        if isinstance(input, Proxy):
            return self._record(input, hx, lengths=lengths, reset=reset, mask=mask)
        if lengths is reset is mask is None and self._is_short(input):
            return self._torch_forward(None, input, hx)
        try:
            return self._forward(input, hx, lengths, reset, mask)
        except UseTorch as error:
            if not (lengths is reset is mask is None):
                raise
            reason = error
        return self._torch_forward(reason, input, hx)

    def _is_short(self, x: Tensor | PackedSequence) -> bool:
        if isinstance(x, PackedSequence) or not is_eager(x) or self._has_cells:
            return False
        axes = x.dim()
        if axes not in (2, 3) or x.shape[1 if axes == 3 and self.batch_first else 0] != 1:
            return False
        return self._step_is_torchs(1 if axes == 2 else x.shape[0 if self.batch_first else 1])

    def _forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any,
        lengths: Tensor | Sequence[int] | None,
        reset: Tensor | None,
        mask: Tensor | None,
    ) -> Any:
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, lengths, reset, mask)
        check_tensor(self._title, "input", input)
        if input.dim() not in (2, 3):
            raise ValueError(f"{self._title}: input has shape {tuple(input.shape)}, needs 3 axes, or 2 without a batch")
        if input.dim() == 3:
            return self._layers(input, hx, self.batch_first, lengths, None, reset, mask)
        if hx is not None:
            hx = _each(hx, lambda state: state.unsqueeze(1))
        if reset is not None:
            reset = reset.unsqueeze(-1)
        if mask is not None and mask.dim():
            mask = mask.unsqueeze(-2)
        y, states = self._layers(input.unsqueeze(1), hx, False, lengths, None, reset, mask)
        return y.squeeze(1), _each(states, lambda state: state.squeeze(1))

    def _forward_packed(
        self, packed: PackedSequence, hx: Any, lengths: object, reset: Tensor | None, mask: Tensor | None
    ) -> tuple[PackedSequence, Any]:
        if lengths is not None:
            raise ValueError(f"{self._title}: lengths is given, but a PackedSequence has its own")
        check_packed(self._title, packed)
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        if hx is not None:
            self._check_storages(data, *self._split(hx))
        x, ends = pad_packed_sequence(PackedSequence(data, batch_sizes))  # in the order of the lengths
        if self.batch_first:  # which is not that of packed data
            reset = None if reset is None else reset.transpose(0, 1)
            mask = mask if mask is None or mask.dim() < 3 else mask.transpose(-3, -2)
        if sorted_indices is not None:
            if hx is not None:
                hx = _each(hx, lambda state: state.index_select(1, sorted_indices))
            reset = None if reset is None else reset.index_select(1, sorted_indices)
            if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
                mask = mask.index_select(-2, sorted_indices)
        y, states = self._layers(x, hx, False, None, batch_sizes, reset, mask)
        outputs = pack_padded_sequence(y, ends).data
        result = PackedSequence(outputs, batch_sizes, sorted_indices, unsorted_indices)
        if unsorted_indices is not None:
            states = _each(states, lambda state: state.index_select(1, unsorted_indices))
        return result, states

    def _layers(self, x: Tensor, hx: Any, batch_first: bool, *rest: Any) -> tuple[Tensor, Any]:
        """y and the final states, of all layers of a batch. `rest` are the last arguments of `_run`."""
        dropout = self.dropout if self.num_layers > 1 else 0.0
        return self._run(x, hx, self._flat_weights_names, self.bidirectional, batch_first, dropout, *rest)

    def _compute(
        self,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        weights: list[Any],
        bidirectional: bool,
        batch_first: bool,
        dropout: float,
        lengths: Any,
        batch_sizes: Tensor | None,
        reset: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Any]:
        if not (dropout > 0 and self.training and check_dropout_masks(self._title, self.dropout_masks) == "torch"):
            return super()._compute(
                x, h0, c0, weights, bidirectional, batch_first, dropout, lengths, batch_sizes, reset, mask
            )
        # Layer by layer. PyTorch's layer draws a mask for [T, N, H], or for the rows of packed data.
        if batch_first:
            x = x.transpose(0, 1)
            reset = None if reset is None else reset.transpose(0, 1)
            mask = mask if mask is None or mask.dim() < 3 else mask.transpose(-3, -2)
        cells = 1 + bidirectional
        count = len(weights) // self.num_layers
        finals: list[Any] = []
        y = x
        for layer in range(self.num_layers):
            if layer:
                y = dropped(y, dropout, batch_sizes)
            own = slice(layer * cells, (layer + 1) * cells)
            y, states = super()._compute(
                y,
                None if h0 is None else h0[own],
                None if c0 is None else c0[own],
                weights[layer * count : (layer + 1) * count],
                bidirectional,
                False,
                0.0,
                lengths,
                batch_sizes,
                reset,
                mask if mask is None or mask.dim() < 5 or len(mask) == 1 else mask[own],
            )
            finals.append(states)
        hn: Any = tuple(map(torch.cat, zip(*finals, strict=True))) if self._has_cells else torch.cat(finals)
        return y.transpose(0, 1) if batch_first else y, hn

    def extra_repr(self) -> str:
        described = super().extra_repr()
        return described if self.dropout_masks == "retrograd" else f"{described}, dropout_masks={self.dropout_masks!r}"

    def _lead(self, x: Tensor, batch_first: bool) -> tuple[int, ...]:
        return self.num_layers * (1 + self.bidirectional), x.shape[0 if batch_first else 1]


# ---- single steps ----------------------------------------------------------------------------------------------------


class Step(Recurrent, torch.nn.RNNCellBase):
    """A single step of one cell."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        own = {name: options.pop(name) for name in self._names if name in options}
        for name in options:
            raise TypeError(f"{self._title}: {name} is not an argument")
        gates = len(CELLS[self._title].gates)
        # The next class has other arguments.
        torch.nn.RNNCellBase.__init__(self, input_size, hidden_size, bias, gates, device=device, dtype=dtype)
        self._set_options(own)
        added = {
            kind: torch.nn.Parameter(self.weight_ih.new_empty(shape)) for kind, shape in self._more_parameters().items()
        }
        for kind, parameter in added.items():
            setattr(self, kind, parameter)
        self._fill(added)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._fill({name: getattr(self, name) for name in self._more.split() if name.startswith(("gamma", "beta"))})

    def forward(self, input: Tensor | Proxy, hx: Any = None, *, reset: Tensor | None = None) -> Any:
        """Returns the new states, as PyTorch's cell does. Where `reset` ``[N]`` is true, the old ones count as 0."""
        if isinstance(input, Proxy):
            return self._record(input, hx, reset=reset)
        if reset is None and is_eager(input):
            if (input.dim() == 1 or len(input) == 1) and self._step_is_torchs(1):
                return self._torch_forward(None, input, hx)
            if self._is_direct(input, hx):
                try:
                    return self._step(input, hx)
                except Refused:
                    pass
        try:
            return self._forward(input, hx, reset)
        except UseTorch as error:
            if reset is not None:
                raise
            reason = error
        return self._torch_forward(reason, input, hx)

    def _forward(self, input: Tensor, hx: Any, reset: Tensor | None) -> Any:
        check_tensor(self._title, "input", input)
        if input.dim() not in (1, 2):
            raise ValueError(f"{self._title}: input has shape {tuple(input.shape)}, needs 2 axes, or 1 without a batch")
        batched = input.dim() == 2
        if not batched:
            input = input.unsqueeze(0)
            hx = None if hx is None else _each(hx, lambda state: state.unsqueeze(0))
            reset = None if reset is None else reset.unsqueeze(0)
        names = self._parameter_names()
        _, states = self._run(input, hx, names.split(), False, False, 0.0, None, None, reset, None)
        return states if batched else _each(states, lambda state: state.squeeze(0))

    def _lead(self, x: Tensor, batch_first: bool) -> tuple[int, ...]:
        return (x.shape[0],)

    def _is_direct(self, x: Tensor, hx: Any) -> bool:
        """Whether a step can take the direct road. What it does not take, the usual one checks."""
        shape = x.shape
        if len(shape) != 2 or shape[1] != self.input_size or self.zoneout is not None or self.recompute:
            return False
        cell: DirectCell | None = self.__dict__.get("_direct")
        if cell is None or cell.options is not self._encoded or not cell.holds(self._parameters):
            cell = self.__dict__["_direct"] = self._new_direct()
            if cell is None:
                return False
        if x.dtype is not cell.dtype:
            return False
        if hx is None:
            return True
        samples, states = shape[0], hx if self._has_cells else (hx,)
        if type(states) is not tuple or len(states) != 1 + self._has_cells:
            return False
        for state, size in zip(states, (cell.outputs, cell.units), strict=False):
            if type(state) is not Tensor or state.dtype is not cell.dtype or not state.is_cpu:
                return False
            if state.shape != (samples, size):
                return False
        return True

    def _new_direct(self) -> DirectCell | None:
        names = self._parameter_names()
        parameters: list[Any] = [self._parameters.get(name) for name in names.split()]
        for parameter in parameters:  # a parametrized one is an attribute instead
            if type(parameter) is not torch.nn.Parameter or not parameter.is_cpu or not parameter.is_contiguous():
                return None
            if parameter.dtype is not parameters[0].dtype or parameter.dtype not in _FLOATS:
                return None
        sizes = self.input_size, self.hidden_size, self.proj_size
        return DirectCell(self._title, names, self._encoded, sizes, parameters)

    def _step(self, x: Tensor, hx: Any) -> Any:
        cell = self.__dict__["_direct"]
        h0, c0 = (None, None) if hx is None else hx if self._has_cells else (hx, None)
        return step(cell, x, h0, c0, is_recorded(x, h0, c0, *cell.parameters))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_direct"}


# ---- the cells -------------------------------------------------------------------------------------------------------


class _Lstm(Recurrent):
    """The options of an LSTM."""

    peephole: Literal["diagonal", "full"] | None = None
    output_gate_reads: Literal["new", "old"] = "new"
    activations: LstmActivations | None = None
    coupled: bool = False
    cell_clip: float | None = None
    _has_cells = True
    _peephole_name: ClassVar[str] = "peephole"  # of the parameter
    _names = ("peephole", "output_gate_reads", "activations", "coupled", "cell_clip", *Recurrent._names)

    def _set_options(self, options: dict[str, Any]) -> None:
        if options.get("peephole") not in (None, "diagonal", "full"):
            raise ValueError(f"{self._title}: peephole is {options['peephole']!r}, must be 'diagonal', 'full' or None")
        if options.get("activations") is not None:
            options["activations"] = _functions(self._title, LstmActivations, options["activations"])
        super()._set_options(options)

    def _more_parameters(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        units = self.hidden_size
        if self.peephole is not None:
            found[self._peephole_name] = (4 * units, units) if self.peephole == "full" else (4 * units,)
        found.update(super()._more_parameters())
        if self.norm is not None:
            found |= {"gamma_c": (units,), "beta_c": (units,)}
        return found


class _Gru(Recurrent):
    """The options of a GRU."""

    kind: Literal["after", "before"] = "after"
    flip: bool = False
    activations: GruActivations | None = None
    _names = ("kind", "flip", "activations", *Recurrent._names)

    def _set_options(self, options: dict[str, Any]) -> None:
        if options.get("activations") is not None:
            options["activations"] = _functions(self._title, GruActivations, options["activations"])
        super()._set_options(options)


class _Rnn(Recurrent):
    """The options of an RNN."""

    nonlinearity: str | Activation

    def _engine_options(self) -> dict[str, Any]:
        options = super()._engine_options()
        if self.nonlinearity != "tanh":
            options["activation"] = as_activation(self.nonlinearity)
        return options


class LSTM(_Lstm, Layers, torch.nn.LSTM):
    """The constructor, attributes and `state_dict` of `torch.nn.LSTM`, and these options:

    - `peephole` adds parameters ``peephole_l0`` and so on: ``[4H]`` if "diagonal", ``[4H, H]`` if "full". With
      ``output_gate_reads="old"`` the output gate's peephole reads the previous cell state.
    - `activations` are the functions of the gates i f g o, and of the cell state. With `coupled`, ``f = 1 - i``.
    - `clip` bounds the inputs of the gates' activations, `cell_clip` the cell state.
    - `zoneout` is the rate of units of the hidden state that keep their old value in training, or a pair of rates, of
      the hidden and the cell state. In evaluation, states are averages with these rates.
    - `norm` is layer normalization: of the gates, and of the cell state where the output reads it ("haste") or of the
      cell state itself ("cell"), with `norm_eps`. It adds parameters ``gamma_x_l0``, ``gamma_h_l0``, ``gamma_c_l0`` and
      ``beta_c_l0`` and so on.
    - With `recompute` nothing is stored for backward, which runs forward again.
    - With ``dropout_masks="torch"`` the masks of `dropout` are those that PyTorch's layer would draw.

    The two biases are added.
    """

    _title = "LSTM"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__("LSTM", *arguments, **options)


class GRU(_Gru, Layers, torch.nn.GRU):
    """The constructor, attributes and `state_dict` of `torch.nn.GRU`, and these options:

    - `kind` says where the reset gate acts: "after" the product with the state, as in PyTorch, or "before" it. With
      `flip` the gate z weighs the new state.
    - `activations` are the functions of the gates r z n.
    - `clip`, `zoneout` (a rate), `norm` ("haste"), `norm_eps`, `recompute` and `dropout_masks` are those of
      :class:`LSTM`.

    The two biases are different parameters: ``bias_ih`` is added to the product with the input, ``bias_hh`` to that
    with the state.
    """

    _title = "GRU"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__("GRU", *arguments, **options)


class RNN(_Rnn, Layers, torch.nn.RNN):
    """The constructor, attributes and `state_dict` of `torch.nn.RNN`, and these options:

    - `nonlinearity` may be any activation, by name or with parameters.
    - `clip`, `zoneout` (a rate), `norm` ("haste"), `norm_eps`, `recompute` and `dropout_masks` are those of
      :class:`LSTM`.

    The two biases are added.
    """

    _title = "RNN"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        nonlinearity = options.pop("nonlinearity", "tanh")
        if len(arguments) > 3:  # PyTorch's order
            nonlinearity, arguments = arguments[3], arguments[:3] + arguments[4:]
        self.nonlinearity = nonlinearity
        super().__init__("RNN_TANH", *arguments, **options)
        self.mode = f"RNN_{as_activation(nonlinearity).name.upper()}"

    def extra_repr(self) -> str:
        described = super().extra_repr()
        # PyTorch's repr has none.
        return (
            described if self.nonlinearity in ("tanh", "relu") else f"{described}, nonlinearity={self.nonlinearity!r}"
        )


class LSTMCell(_Lstm, Step, torch.nn.LSTMCell):
    """The constructor, attributes and `state_dict` of `torch.nn.LSTMCell`, and the options of :class:`LSTM`.

    The parameter that `peephole` adds is ``weight_peephole``.
    """

    _title = "LSTMCell"
    _peephole_name = "weight_peephole"  # the option has the attribute `peephole`


class GRUCell(_Gru, Step, torch.nn.GRUCell):
    """The constructor, attributes and `state_dict` of `torch.nn.GRUCell`, and the options of :class:`GRU`."""

    _title = "GRUCell"


class RNNCell(_Rnn, Step, torch.nn.RNNCell):  # type: ignore[misc]  # nonlinearity may be an Activation
    """The constructor, attributes and `state_dict` of `torch.nn.RNNCell`, and the options of :class:`RNN`."""

    _title = "RNNCell"

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str | Activation = "tanh",
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, bias, device, dtype, **options)


allow((LSTM, GRU, RNN))


# ---- helpers ---------------------------------------------------------------------------------------------------------


def check_dropout_masks(function: str, masks: Any) -> DropoutMasks:
    if masks not in ("retrograd", "torch"):
        raise ValueError(f"{function}: dropout_masks is {masks!r}, must be 'retrograd' or 'torch'")
    return masks  # type: ignore[no-any-return]


def _functions(title: str, kind: Any, given: Sequence[str | Activation]) -> Any:
    fields = kind._fields
    if len(given) != len(fields):
        listed = f"{', '.join(fields[:-1])} and {fields[-1]}"
        raise ValueError(f"{title}: activations has {len(given)} functions, must have {len(fields)}, for {listed}")
    return kind(*map(as_activation, given))


def _each(states: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The states, changed: the pair of an LSTM or the only one."""
    return change(states) if isinstance(states, Tensor) else tuple(map(change, states))


def unsupported(layer: torch.nn.Module) -> str:
    """Why retrograd cannot run a recurrent layer with these settings; empty if it can."""
    if getattr(layer, "dropout", 0) == 1:
        return "dropout is 1, must be below 1"
    if getattr(layer, "proj_size", 0) and getattr(layer, "mode", "") != "LSTM":
        return f"proj_size is {layer.proj_size}, but only an LSTM has a projection"
    if isinstance(layer, torch.nn.RNNCell) and layer.nonlinearity not in ("tanh", "relu"):
        return f"nonlinearity is {layer.nonlinearity!r}, must be 'tanh' or 'relu'"
    return ""
