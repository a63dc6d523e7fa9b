"""Problems of all recurrent cells: named variants, and one way to call each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd import _core
from retrograd.lab import cases, verify
from retrograd.lab.cases import ACTIVATION_PARAMETERS, GruCase, LstmCase, RecurrentCase, RnnCase
from support.arrays import Array

LEVELS = tuple(_core.isa_levels())
LENGTHS = (6, 2, 0, 5, 6, 1, 4)
BATCH_SIZES = (3, 7, 0, 6, 1, 7)
SIZES = (6, 7, 5, 35)  # just large enough for more than one thread
WEIGHTS: dict[str, Any] = {"lstm": rg.LstmWeights, "gru": rg.GruWeights, "rnn": rg.RnnWeights}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def named(of: type[RecurrentCase], **roles: str) -> Any:
    return tuple(
        (roles[role], *ACTIVATION_PARAMETERS[roles[role]]) if role in roles else usual
        for role, usual in zip(of.roles, of.standard, strict=True)
    )


INSIDE: dict[str, Any] = {"states": True, "reset": True, "zoneout": 0.3, "clip": 0.75}
VARIANTS: dict[str, Any] = {
    "gru": GruCase(*SIZES, states=True),
    "gru_before": GruCase(*SIZES, states=True, kind="before"),
    "gru_stacked": GruCase(*SIZES, 2, 2, states=True, flip=True),
    "gru_before_stacked": GruCase(*SIZES, 2, 2, states=True, kind="before", lengths=LENGTHS),
    "gru_lengths": GruCase(*SIZES, 2, 2, states=True, lengths=LENGTHS),
    "gru_batch_sizes": GruCase(*SIZES, 2, 2, states=True, batch_sizes=BATCH_SIZES),
    "gru_activations": GruCase(*SIZES, states=True, activations=named(GruCase, r="hard_sigmoid", z="elu", n="gelu")),
    "gru_inside": GruCase(*SIZES, mask="full", **INSIDE),
    "gru_before_inside": GruCase(*SIZES, mask="gates", kind="before", lengths=LENGTHS, **INSIDE),
    "gru_norm": GruCase(*SIZES, states=True, norm="haste", reset=True, mask="tied"),
    "rnn": RnnCase(*SIZES, states=True),
    "rnn_stacked": RnnCase(*SIZES, 2, 2, states=True, activations=named(RnnCase, h="relu")),
    "rnn_lengths": RnnCase(*SIZES, 2, 2, states=True, lengths=LENGTHS),
    "rnn_batch_sizes": RnnCase(*SIZES, 2, 2, states=True, batch_sizes=BATCH_SIZES),
    "rnn_inside": RnnCase(*SIZES, mask="steps", **INSIDE),
    "rnn_norm": RnnCase(*SIZES, states=True, norm="haste", zoneout=0.3),
    "lstm_inside": LstmCase(*SIZES, mask="full", zoneout_c=0.2, cell_clip=0.5, coupled=True, **INSIDE),
    "lstm_peephole_inside": LstmCase(*SIZES, 2, mask="tied", peephole="full", lengths=LENGTHS, **INSIDE),
    "lstm_projection": LstmCase(*SIZES, 2, 2, states=True, projection=17, lengths=LENGTHS, mask="gates"),
    "lstm_norm": LstmCase(*SIZES, states=True, norm="haste", reset=True),
    "lstm_norm_cell": LstmCase(*SIZES, states=True, norm="cell", zoneout_c=0.2, mask="steps"),
    "gru_double": GruCase(3, 5, 40, 150, states=True, dtype="float64"),
    "rnn_double": RnnCase(3, 5, 40, 150, states=True, dtype="float64"),
}
variants = pytest.mark.parametrize("name", VARIANTS)


def is_lstm(case: RecurrentCase) -> bool:
    return isinstance(case, LstmCase)


def state_names(case: RecurrentCase) -> tuple[str, ...]:
    return ("h", "c") if is_lstm(case) else ("h",)


def make(case: Any, seed: int = 0) -> Any:
    return cases.make_lstm_data(case, seed) if is_lstm(case) else cases.make_recurrent_data(case, seed)


def function(case: RecurrentCase, which: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(rg, f"{case.kind_name}_{which}")
    return found


def weights(case: RecurrentCase, data: Any) -> list[Any]:
    return [WEIGHTS[case.kind_name](*cell) for cell in data.weights]


def options_of(case: RecurrentCase, data: Any) -> dict[str, Any]:
    return verify.recurrent_options(case) | verify.recurrent_inside(case, data)


def arguments(case: RecurrentCase, data: Any) -> tuple[Any, ...]:
    """x, weights and states."""
    return (data.x, weights(case, data), *(getattr(data, f"{state}0") for state in state_names(case)))


def forward(case: RecurrentCase, data: Any, **options: Any) -> Any:
    return function(case, "forward")(*arguments(case, data), **options_of(case, data) | options)


def backward(case: RecurrentCase, data: Any, cache: Any, **options: Any) -> Any:
    incoming = {f"d{state}n": getattr(data, f"d{state}n") for state in state_names(case)}
    return function(case, "backward")(data.dy, cache, **incoming | options)


def run(case: Any, data: Any, threads: int = 1) -> Any:
    """Outputs and all gradients."""
    return getattr(verify, f"run_{case.kind_name}")(case, data, threads)


def errors(case: Any, data: Any, got: Any) -> dict[str, float]:
    """In tolerances of the oracle."""
    oracle: Any = verify.lstm_oracle(case, data) if is_lstm(case) else verify.recurrent_oracle(case, data)
    return verify.recurrent_errors(got, oracle)


def check(case: Any, levels: Sequence[str] = LEVELS, threads: Sequence[int] = (1, 2, 3, 7)) -> None:
    """Within tolerance at each level, and the same bits at all numbers of threads."""
    rows = getattr(verify, f"verify_{case.kind_name}")([case], levels, threads)
    assert [(row.isa, row.threads, row.same_bits, row.errors) for row in rows if not row.ok] == []


def needs(case: RecurrentCase, data: Any) -> list[str]:
    """The names of all gradients."""
    fields = ["d" + name for name, part in data.weights[0]._asdict().items() if part is not None]
    return ["dx", *fields, *(f"d{state}0" for state in state_names(case))]


def by_sample(case: RecurrentCase) -> tuple[str, ...]:
    """The results that belong to one sample each."""
    return ("y", "dx", *(f"{state}n" for state in state_names(case)), *(f"d{state}0" for state in state_names(case)))


def part_of(case: RecurrentCase, data: Any, samples: Any = slice(None), steps: slice = slice(None)) -> Any:
    """Some samples and steps of the data of a case with time first."""
    changed = {name: getattr(data, name)[steps][:, samples] for name in ("x", "dy")}
    for state in state_names(case):
        for name in (f"{state}0", f"d{state}n"):
            array = getattr(data, name)
            changed[name] = None if array is None else array[:, samples]
    if data.reset is not None:
        changed["reset"] = data.reset[steps][:, samples]
    if data.mask is not None:
        mask = data.mask if data.mask.shape[2] == 1 else data.mask[:, :, steps]
        changed["mask"] = mask[..., samples, :]
    for name in ("zoneout_h", "zoneout_c"):
        array = getattr(data, name, None)
        if array is not None:
            changed[name] = array[:, steps][:, :, samples]
    return data._replace(**changed)


def flat(value: Any) -> list[Array | None]:
    """All arrays of nested results, in order."""
    if value is None or isinstance(value, np.ndarray):
        return [value]
    return [array for part in value for array in flat(part)]


def outputs(result: Any) -> list[Array | None]:
    """Of a forward pass, without the cache."""
    return flat(result[:-1])
