"""LSTMs, GRUs and RNNs, compared with PyTorch, JAX and NumPy's matrix product."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

import retrograd

from ..cases import (
    GruCase,
    LstmCase,
    LstmData,
    RecurrentCase,
    RecurrentData,
    RnnCase,
    make_lstm_data,
    make_recurrent_data,
)
from ..verify import VerifyRow, recurrent_inside, recurrent_options, verify_gru, verify_lstm, verify_rnn
from .sgemm import Gemm, Sgemm
from .timing import Contest, Machine, admit, agree, clock, wake_workers

_ORACLE_STEPS: Final = 8
_GEMM: Final = Gemm(1024, 1024, 1024)
_PASSES: Final = ("forward", "backward", "step")
_Data: TypeAlias = LstmData | RecurrentData
_Times: TypeAlias = tuple[float, float, float]


class _Cell(NamedTuple):
    """What distinguishes the cells."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    weights: Callable[..., Any]
    module: str  # of torch.nn


_CELLS: Final[Mapping[str, _Cell]] = {
    "lstm": _Cell(retrograd.lstm_forward, retrograd.lstm_backward, retrograd.LstmWeights, "LSTM"),
    "gru": _Cell(retrograd.gru_forward, retrograd.gru_backward, retrograd.GruWeights, "GRU"),
    "rnn": _Cell(retrograd.rnn_forward, retrograd.rnn_backward, retrograd.RnnWeights, "RNN"),
}


def make_bench_data(case: RecurrentCase) -> _Data:
    if isinstance(case, LstmCase):
        return make_lstm_data(case)
    assert isinstance(case, GruCase | RnnCase)
    return make_recurrent_data(case)


def _flops(case: RecurrentCase) -> _Times:
    """FLOPs of the matrix products of forward, backward (twice as many) and both; only active steps count."""
    rows = case.steps * case.samples if case.active is None else int(case.active.sum())
    products = 0
    for cell in range(case.cells):
        products += case.gates * (case.cell_inputs(cell) + case.outputs)
        if isinstance(case, LstmCase):
            products += 4 * case.units * (case.peephole == "full") + case.projection
    forward = 2.0 * rows * products * case.units
    return forward, 2 * forward, 3 * forward


class OurRecurrent:
    """retrograd as users call it, without buffers."""

    def __init__(self, case: RecurrentCase, data: _Data, threads: int, name: str = "retrograd") -> None:
        self.name = name
        self._threads = threads
        cell = _CELLS[case.kind_name]
        self._forward, self._backward = cell.forward, cell.backward
        self._x, self._dy = data.x, data.dy
        self._states = (data.h0, data.c0) if isinstance(data, LstmData) else (data.h0,)
        self._weights = [cell.weights(*parts) for parts in data.weights]
        self._options = {**recurrent_options(case), **recurrent_inside(case, data), "num_threads": threads}
        for option in ("lengths", "batch_sizes"):
            if self._options[option] is not None:
                self._options[option] = np.array(self._options[option])

    def wake(self) -> None:
        wake_workers(self._threads)

    def _run(self) -> tuple[Any, Any, _Times]:
        start = clock()
        result = self._forward(self._x, self._weights, *self._states, **self._options)
        middle = clock()
        gradients = self._backward(self._dy, result.cache, num_threads=self._threads)
        end = clock()
        return result, gradients, (middle - start, end - middle, end - start)

    def step(self) -> _Times:
        return self._run()[2]

    def results(self) -> list[Any]:
        """Return y, dx, and the gradients of the parameters of every cell."""
        result, gradients, _ = self._run()
        return [result.y, gradients.dx, *(part for cell in gradients.dweights for part in cell if part is not None)]


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

# PyTorch's names of the parameters, in our order. It always has a second bias, which here is zero if ours has none.
_TORCH_NAMES: Final = {"wx": "weight_ih", "wh": "weight_hh", "b": "bias_ih", "bh": "bias_hh", "projection": "weight_hr"}


class _Torch:
    """PyTorch as users call it: eager, autograd; a packed sequence if lengths differ, a loop over steps for `reset`."""

    name = "torch"

    def __init__(self, torch: Any, case: RecurrentCase, data: _Data) -> None:
        module = self._module = getattr(torch.nn, _CELLS[case.kind_name].module)(
            case.inputs,
            case.units,
            case.layers,
            bias=case.bias,
            batch_first=case.batch_first,
            dropout=case.dropout,
            bidirectional=case.directions == 2,
            **({"proj_size": case.projection} if isinstance(case, LstmCase) else {}),
        )
        x, self._dy = torch.from_numpy(data.x).requires_grad_(), torch.from_numpy(data.dy)
        self._leaves, self._compared = [x], [True]
        with torch.no_grad():
            for cell, parts in enumerate(data.weights):
                layer, direction = divmod(cell, case.directions)
                for ours, theirs in _TORCH_NAMES.items():
                    parameter = getattr(module, f"{theirs}_l{layer}" + "_reverse" * direction, None)
                    if parameter is None:
                        continue
                    array = getattr(parts, ours, None)
                    parameter.zero_() if array is None else parameter.copy_(torch.from_numpy(array))
                    self._leaves.append(parameter)
                    self._compared.append(array is not None)
        self._call = self._call_of(torch, case, data, x)
        self._grad = torch.autograd.grad

    def _call_of(self, torch: Any, case: RecurrentCase, data: _Data, x: Any) -> Callable[[], Any]:
        module, rnn = self._module, torch.nn.utils.rnn
        if data.reset is not None:
            keep = torch.from_numpy(1 - data.reset.astype(np.float32))[:, None, :, None]
            width = {"h": case.outputs, "c": case.units}
            zero = [torch.zeros(case.layers, case.samples, width[name]) for name in ("hc" if case.gates == 4 else "h")]

            def loop() -> Any:
                state, outputs = zero, []
                for step in range(case.steps):
                    state = [part * keep[step] for part in state]
                    y, after = module(x[step : step + 1], tuple(state) if len(state) > 1 else state[0])
                    state = after if len(state) > 1 else [after]
                    outputs.append(y)
                return torch.cat(outputs)

            return loop
        if case.lengths is not None:
            lengths = torch.tensor(case.lengths)

            def packed() -> Any:
                sequence = rnn.pack_padded_sequence(x, lengths, case.batch_first, enforce_sorted=False)
                return rnn.pad_packed_sequence(module(sequence)[0], case.batch_first, total_length=case.steps)[0]

            return packed
        return lambda: module(x)[0]

    def wake(self) -> None:
        pass

    def step(self) -> _Times:
        start = clock()
        y = self._call()
        middle = clock()
        gradients = self._grad(y, self._leaves, self._dy)
        end = clock()
        del y, gradients  # freed outside the timed section
        return middle - start, end - middle, end - start

    def results(self) -> list[Any]:
        """Return the same results as `OurRecurrent`, without dropout, whose masks differ."""
        self._module.eval()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
            y = self._call()
        gradients = zip(self._compared, self._grad(y, self._leaves, self._dy), strict=True)
        self._module.train()
        return [y.detach().numpy(), *(gradient.numpy() for compared, gradient in gradients if compared)]


def _torch_has(case: RecurrentCase) -> bool:
    """Whether torch.nn has a module for this case."""
    their = {"dropout": case.dropout}
    if isinstance(case, LstmCase):
        their["projection"] = case.projection
    if case.reset and case.layers == case.directions == 1 and case.lengths is None:
        their["reset"] = True
    return case == dataclasses.replace(plain_case(case), **their) and case.batch_sizes is None


# ---- JAX -------------------------------------------------------------------------------------------------------------


def _jax_gru_step(jax: Any, row: Any, product: Any, h: Any) -> Any:
    jnp = jax.numpy
    (xr, xz, xn), (hr, hz, hn) = jnp.split(row, 3, -1), jnp.split(product, 3, -1)
    z = jax.nn.sigmoid(xz + hz)
    return (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn) + z * h


def _jax_rnn_step(jax: Any, row: Any, product: Any, h: Any) -> Any:
    return jax.numpy.tanh(row + product)


# The new h from the products with x and with h, which have their biases, and the old h.
_JAX_STEPS: Final = {"gru": _jax_gru_step, "rnn": _jax_rnn_step}


class _Jax:
    """JAX under jit, with all threads in every row: lax.scan, the product with x before it; differentiated by vjp.

    Forward and backward are compiled one by one, and a step as a whole. Padding is masked in y.
    """

    name = "jax"

    def __init__(self, case: RecurrentCase, data: _Data) -> None:
        jax = self._jax = importlib.import_module("jax")
        jnp = jax.numpy
        advanced, batch = _JAX_STEPS[case.kind_name], data.x.shape[1]
        active = None if case.active is None else jnp.asarray(case.active[..., None])

        def layer(x: Any, parts: Mapping[str, Any], reverse: bool) -> Any:
            projected = x @ parts["wx"].T + parts["b"]

            def advance(h: Any, row: Any) -> Any:
                h = advanced(jax, row, h @ parts["wh"].T + parts.get("bh", 0), h)
                return h, h

            return jax.lax.scan(advance, jnp.zeros((batch, case.units)), projected, reverse=reverse)[1]

        def function(x: Any, cells: Sequence[Mapping[str, Any]]) -> Any:
            for first in range(0, case.cells, case.directions):
                directions = cells[first : first + case.directions]
                x = jnp.concatenate([layer(x, parts, bool(number)) for number, parts in enumerate(directions)], -1)
            return x if active is None else jnp.where(active, x, 0)

        def whole(x: Any, cells: Any, dy: Any) -> Any:
            y, pull = jax.vjp(function, x, cells)
            return y, pull(dy)

        parts = [{name: part for name, part in cell._asdict().items() if part is not None} for cell in data.weights]
        self._arguments = jnp.asarray(data.x), jax.tree.map(jnp.asarray, parts)
        self._dy, self._names = jnp.asarray(data.dy), [list(cell) for cell in parts]
        self._forward = jax.jit(lambda *given: jax.vjp(function, *given))
        self._backward, self._step = jax.jit(lambda pull, dy: pull(dy)), jax.jit(whole)

    def wake(self) -> None:
        pass

    def step(self) -> _Times:
        wait = self._jax.block_until_ready
        start = clock()
        _, pull = wait(self._forward(*self._arguments))
        middle = clock()
        wait(self._backward(pull, self._dy))
        end = clock()
        wait(self._step(*self._arguments, self._dy))
        return middle - start, end - middle, clock() - end

    def results(self) -> list[Any]:
        """Return the same results as `OurRecurrent`."""
        y, (dx, cells) = self._step(*self._arguments, self._dy)
        pairs = zip(cells, self._names, strict=True)
        return [np.asarray(a) for a in (y, dx, *(cell[name] for cell, names in pairs for name in names))]


def _jax_has(case: RecurrentCase) -> bool:
    """Whether `_Jax` computes this case."""
    ragged = case.lengths is not None and (case.directions > 1 or case.layers > 1)
    simple = case.bias and not (ragged or case.batch_first or case.states) and case.batch_sizes is None
    return simple and case.kind_name in _JAX_STEPS and case == plain_case(case)


# ---- rows ------------------------------------------------------------------------------------------------------------

_INSIDE: Final = ("reset", "mask", "zoneout", "clip", "norm")
_OWN: Final = {
    "lstm": ("peephole", "output_gate_reads", "projection", "zoneout_c", "cell_clip", "coupled"),
    "gru": ("kind", "flip"),
    "rnn": (),
}


def plain_case(case: RecurrentCase) -> Any:
    """Return the same case with default activations, and without dropout and the options of cells."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(case)}
    names = ("dropout", *_INSIDE, *_OWN[case.kind_name])
    return dataclasses.replace(case, activations=case.standard, **{name: defaults[name] for name in names})


def recurrent_failures(case: RecurrentCase, isa: str, threads: Sequence[int]) -> Iterator[str]:
    """Yield messages for wrong results: the first steps against the slow oracle, all against the engine in float64."""
    steps = min(case.steps, _ORACLE_STEPS)
    short = dataclasses.replace(
        case,
        steps=steps,
        lengths=None if case.lengths is None else tuple(min(length, steps) for length in case.lengths),
        batch_sizes=None if case.batch_sizes is None else case.batch_sizes[:steps],
    )
    for row in _verify([short], [isa], threads):
        if not row.ok:
            yield f"{row.what} is off by {row.error:.3g} tolerances, threads {row.threads}"
    data = make_bench_data(case)
    wide = OurRecurrent(case, _in_float64(data), max(threads)).results()
    for number in threads:
        if not agree(OurRecurrent(case, data, number).results(), wide, 1e-4):
            yield f"float32 and float64 differ, threads {number}"


def _verify(problems: Sequence[Any], isa_levels: Sequence[str], threads: Sequence[int]) -> list[VerifyRow]:
    functions: dict[str, Callable[..., list[VerifyRow]]] = {"lstm": verify_lstm, "gru": verify_gru, "rnn": verify_rnn}
    return functions[problems[0].kind_name](problems, isa_levels, threads)


def _in_float64(data: _Data) -> Any:
    def wide(array: Any) -> Any:
        return array.astype(np.float64) if isinstance(array, np.ndarray) and array.dtype == np.float32 else array

    cells = tuple(type(cell)(*map(wide, cell)) for cell in data.weights)
    return type(data)(*map(wide, data))._replace(weights=cells)


def recurrent_contest(
    case: RecurrentCase, data: _Data, threads: int, machine: Machine, stack: contextlib.ExitStack
) -> Contest:
    flops = _flops(case)
    sgemm = Sgemm([_GEMM], flops, threads, stack)
    contest = Contest([[OurRecurrent(case, data, threads)]], "sgemm", [], _PASSES, flops, lambda: sgemm.cpu_seconds)
    plain = plain_case(case)
    if plain != case:
        contest.slots.append([OurRecurrent(plain, make_bench_data(plain), threads, "plain")])
    rivals: list[Any] = []
    if machine.torch is not None and _torch_has(case):
        machine.torch.set_num_threads(threads)
        rivals.append(_Torch(machine.torch, case, data))
    if _jax_has(case) and importlib.util.find_spec("jax") is not None:
        rivals.append(_Jax(case, data))
    if rivals:
        ours = OurRecurrent(dataclasses.replace(case, dropout=0.0), data, threads).results()
        for rival in rivals:
            admit(contest, rival, agree(ours, rival.results()))
    contest.slots.append([sgemm])
    return contest
