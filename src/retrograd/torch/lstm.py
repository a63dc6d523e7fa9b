"""`torch.nn.LSTM` on retrograd's engine, with more options."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from ..ops.activation import Activation
from ..ops.recurrent import LstmActivations
from ._arrays import check_storage
from ._autograd import is_eager
from ._leaf import Leaf, Proxy
from ._lstm import Lstm, encoded
from ._lstm_autograd import is_recorded, run

__all__ = ["LSTM"]


class LSTM(Leaf, torch.nn.RNNBase):
    """The constructor, attributes and `state_dict` of `torch.nn.LSTM`, and these options:

    - `peephole` adds parameters ``peephole_l0`` and so on: ``[4H]`` if "diagonal", ``[4H, H]`` if "full". With
      ``output_gate_reads="old"`` the output gate's peephole reads the previous cell state.
    - `activations` are the functions of the gates i f g o, and of the cell state.
    - With `recompute` nothing is stored for backward, which runs forward again.

    There is no projection (`proj_size`). This is not a subclass of `torch.nn.LSTM`, which `torch.compile` refuses.
    """

    peephole: Literal["diagonal", "full"] | None = None
    output_gate_reads: Literal["new", "old"] = "new"
    activations: LstmActivations | None = None
    recompute: bool = False
    _encoded_activations: str = ""

    def __init__(
        self,
        *arguments: Any,
        peephole: Literal["diagonal", "full"] | None = None,
        output_gate_reads: Literal["new", "old"] = "new",
        activations: LstmActivations | None = None,
        recompute: bool = False,
        **options: Any,
    ) -> None:
        super().__init__("LSTM", *arguments, **options)
        reason = unsupported(self)
        if reason:
            raise ValueError(f"LSTM: {reason}")
        if peephole not in (None, "diagonal", "full"):
            raise ValueError(f"LSTM: peephole is {peephole!r}, must be 'diagonal', 'full' or None")
        if output_gate_reads not in ("new", "old"):
            raise ValueError(f"LSTM: output_gate_reads is {output_gate_reads!r}, must be 'new' or 'old'")
        if peephole is not None:
            self.peephole = peephole
            self._add_peepholes()
        if output_gate_reads != "new":
            self.output_gate_reads = output_gate_reads
        if activations is not None:
            self._set_activations(activations)
        if recompute:
            self.recompute = True

    def _add_peepholes(self) -> None:
        shape = (4 * self.hidden_size, self.hidden_size)
        like: Any = self.weight_ih_l0
        for names in self._all_weights:  # of one cell
            name = names[0].replace("weight_ih", "peephole")
            parameter = torch.nn.Parameter(like.new_empty(shape if self.peephole == "full" else shape[:1]))
            torch.nn.init.uniform_(parameter, -1.0 / math.sqrt(self.hidden_size), 1.0 / math.sqrt(self.hidden_size))
            setattr(self, name, parameter)
            names.append(name)
        self._flat_weights_names = [name for names in self._all_weights for name in names]
        self._init_flat_weights()

    def _set_activations(self, activations: Sequence[str | Activation]) -> None:
        if len(activations) != 5:
            raise ValueError(f"LSTM: activations has {len(activations)} functions, must have 5, for i, f, g, o and h")
        functions = [Activation(f) if isinstance(f, str) else f for f in activations]
        self.activations = LstmActivations(*functions)
        self._encoded_activations = encoded(functions)

    def forward(
        self,
        input: Tensor | PackedSequence | Proxy,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Any:
        """Returns the outputs and the final states, as `torch.nn.LSTM` does.

        `lengths` (one per sample, in any order) has the effect of a `PackedSequence`: outputs after the end of a
        sample are 0, and the final states are those at its end.
        """
        if isinstance(input, Proxy):
            return self._record(input, hx, lengths=lengths)
        if isinstance(input, PackedSequence):
            return self._forward_packed(input, hx, lengths)
        if input.dim() not in (2, 3):
            raise ValueError(f"LSTM: input has shape {tuple(input.shape)}, needs 3 axes, or 2 without a batch")
        if input.dim() == 3:
            return self._run(input, hx, self.batch_first, lengths)
        if hx is not None:
            hx = hx[0].unsqueeze(1), hx[1].unsqueeze(1)
        y, (hn, cn) = self._run(input.unsqueeze(1), hx, False, lengths)
        return y.squeeze(1), (hn.squeeze(1), cn.squeeze(1))

    def _forward_packed(
        self, packed: PackedSequence, hx: tuple[Tensor, Tensor] | None, lengths: object
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]:
        if lengths is not None:
            raise ValueError("LSTM: lengths is given, but a PackedSequence has its own")
        _check_packed(packed)
        data, batch_sizes, sorted_indices, unsorted_indices = packed
        if hx is not None:
            _check_storages(data, *hx)
        x, ends = pad_packed_sequence(PackedSequence(data, batch_sizes))  # in the order of the lengths
        if hx is not None:
            hx = _permuted(hx, sorted_indices)
        y, states = self._run(x, hx, False, None, batch_sizes)
        outputs = pack_padded_sequence(y, ends).data
        result = PackedSequence(outputs, batch_sizes, sorted_indices, unsorted_indices)
        return result, _permuted(states, unsorted_indices)

    def _run(
        self,
        x: Tensor,
        hx: tuple[Tensor, Tensor] | None,
        batch_first: bool,
        lengths: Tensor | Sequence[int] | None,
        batch_sizes: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        parameters = self._parameters
        # A parametrized weight is an attribute instead.
        weights: list[Any] = [
            parameters[name] if name in parameters else getattr(self, name) for name in self._flat_weights_names
        ]
        h0, c0 = hx if hx is not None else (None, None)
        dtype = weights[0].dtype
        if x.dtype is not dtype and torch.is_autocast_enabled("cpu"):
            _check_storages(x, h0, c0)
            x = x.to(dtype)
            h0, c0 = (None if state is None else state.to(dtype) for state in (h0, c0))
        self._check(x, h0, c0, batch_first, dtype)
        drops = self.training and self.dropout > 0 and self.num_layers > 1
        y, hn, cn = run(
            Lstm(
                x,
                h0,
                c0,
                weights,
                None if lengths is None else torch.as_tensor(lengths),
                batch_sizes,
                torch.randint(1 << 62, ()) if drops else None,
                is_recorded(x, h0, c0, *weights),
                self.bidirectional,
                batch_first,
                self.bias,
                self.peephole is not None,
                self._encoded_activations,
                self.output_gate_reads,
                self.dropout if drops else 0.0,
                self.recompute,
            )
        )
        return y, (hn, cn)

    def _check(self, x: Tensor, h0: Tensor | None, c0: Tensor | None, batch_first: bool, dtype: torch.dtype) -> None:
        if x.shape[2] != self.input_size:
            raise ValueError(f"LSTM: input has shape {tuple(x.shape)}, but input_size is {self.input_size}")
        if x.dtype is not dtype or dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"LSTM: input has dtype {x.dtype} and the weights have {dtype}; both must be float32, or both float64"
            )
        if h0 is None and c0 is None:
            return
        expected = (self.num_layers * (1 + self.bidirectional), x.shape[0 if batch_first else 1], self.hidden_size)
        for name, state in (("hx[0]", h0), ("hx[1]", c0)):
            if state is None or tuple(state.shape) != expected:
                shape = None if state is None else tuple(state.shape)
                raise ValueError(f"LSTM: {name} has shape {shape}, expected {expected}")
            if state.dtype is not dtype:
                raise TypeError(f"LSTM: {name} has dtype {state.dtype}, but the weights have {dtype}")

    def extra_repr(self) -> str:
        described: str = super().extra_repr()
        for name in ("peephole", "output_gate_reads", "activations", "recompute"):
            if name in self.__dict__:
                described += f", {name}={getattr(self, name)!r}"
        return described


def _check_made_by_torch(packed: PackedSequence) -> None:
    """Raise for a PackedSequence that PyTorch did not make: its functions do not check, and end the process."""
    if not (is_eager(packed.data) and is_eager(packed.batch_sizes)):
        return
    for name, tensor in packed._asdict().items():
        if tensor is None:
            continue
        check_storage(tensor, "LSTM", f"input.{name}")
        axes = 2 if name == "data" else 1
        if tensor.dim() != axes:
            raise ValueError(f"LSTM: input.{name} has shape {tuple(tensor.shape)}, expected {axes} axes")
        if name != "data" and tensor.dtype is not torch.int64:
            raise TypeError(f"LSTM: input.{name} has dtype {tensor.dtype}, expected torch.int64")
    sizes = packed.batch_sizes.tolist()
    if not sizes or sizes[-1] < 1 or sizes != sorted(sizes, reverse=True):
        wrong = next((n for n, before in zip(sizes, [math.inf, *sizes], strict=False) if not 0 < n <= before), None)
        found = "is empty" if wrong is None else f"has {wrong} in {_shortened(sizes)}"
        raise ValueError(f"LSTM: input.batch_sizes {found}, expected sizes of at least 1 that do not increase")
    if sum(sizes) != len(packed.data):
        raise ValueError(
            f"LSTM: input.batch_sizes has the sum {sum(sizes)}, expected {len(packed.data)}, the rows of data"
        )
    for name in ("sorted_indices", "unsorted_indices"):
        indices = getattr(packed, name)
        if indices is not None and sorted(indices.tolist()) != list(range(sizes[0])):
            raise ValueError(
                f"LSTM: input.{name} has {_shortened(indices.tolist())}, expected a permutation of {sizes[0]} samples"
            )


# The values are not known to a compiler, which stops at PyTorch's functions for them anyway.
_check_packed: Callable[[PackedSequence], None] = torch.compiler.disable(_check_made_by_torch)


def _shortened(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _check_storages(x: Tensor, h0: Tensor | None, c0: Tensor | None) -> None:
    """Raise where PyTorch would read memory that was freed."""
    if is_eager(x):
        for name, tensor in (("input", x), ("hx[0]", h0), ("hx[1]", c0)):
            if tensor is not None:
                check_storage(tensor, "LSTM", name)


def _permuted(states: tuple[Tensor, Tensor], order: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states of the samples in another order."""
    return states if order is None else (states[0].index_select(1, order), states[1].index_select(1, order))


def unsupported(lstm: torch.nn.RNNBase) -> str:
    """Why retrograd cannot run an LSTM with these settings; empty if it can."""
    if lstm.proj_size:
        return f"proj_size is {lstm.proj_size}, but retrograd has no projection of the hidden state"
    if lstm.dropout == 1:
        return "dropout is 1, must be below 1"
    return ""
