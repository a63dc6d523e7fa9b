"""Random combinations of cells and options: the engine against the oracle, in float64, at every level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import retrograd as rg
from retrograd.lab import reference as oracle

WEIGHTS = {"lstm": rg.LstmWeights, "gru": rg.GruWeights, "rnn": rg.RnnWeights}
CELLS = {"lstm": oracle.LstmCell, "gru": oracle.GruCell, "rnn": oracle.RnnCell}
GATES = {"lstm": 4, "gru": 3, "rnn": 1}


class Problem:
    """A random problem: the arguments of the function and of the oracle."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.cell = str(rng.choice(["lstm", "gru", "rnn"]))
        gates = GATES[self.cell]
        T, N, inputs = (int(rng.choice([1, 2, 3, 7])) for _ in range(3))
        H = int(rng.choice([1, 2, 5, 15, 16, 17, 33]))
        layers, directions = int(rng.choice([1, 1, 2])), int(rng.choice([1, 1, 2]))
        self.options: dict[str, Any] = {"bidirectional": directions == 2}
        self.of_oracle: dict[str, Any] = {"directions": directions}
        norm = bool(rng.random() < 0.25)
        kind = "after"
        peephole = 0
        P = H
        if self.cell == "gru":
            kind = "before" if rng.random() < 0.5 and not norm else "after"
            self.both(kind=kind, flip=bool(rng.random() < 0.3))
        if self.cell == "lstm":
            self.both(coupled=bool(rng.random() < 0.25))
            if not norm and rng.random() < 0.3:
                P = int(rng.integers(1, H + 1))
            if not norm and rng.random() < 0.3:
                peephole = int(rng.choice([1, 2])) if P == H else 1
                reads = str(rng.choice(["new", "old"]))
                self.options["output_gate_reads"] = self.of_oracle["output_reads"] = reads
            if not norm and peephole < 2 and rng.random() < 0.3:
                self.both(cell_clip=0.3)
        if norm:
            self.both(norm=str(rng.choice(["haste", "cell"])) if self.cell == "lstm" else "haste")
        elif rng.random() < 0.2:
            self.both(clip=0.4)
        cells = layers * directions
        if directions == 1 and rng.random() < 0.4:
            self.both(reset=rng.random((T, N)) < 0.4)
        if rng.random() < 0.4:
            shapes = [(P,), (N, P), (T, N, P), (cells, 1, 1, N, P)]
            if not norm:
                shapes += [(gates, 1, N, P), (cells, gates, T, N, P)]
            self.both(mask=rng.standard_normal(shapes[rng.integers(len(shapes))]))
        self.zoneout(rng, (cells, T, N), P, H, peephole)
        if rng.random() < 0.4:
            lengths = rng.integers(0, T + 1, N)
            self.options["lengths"] = lengths
            self.of_oracle["active"] = oracle.active_from_lengths(lengths, T)
        self.x = rng.standard_normal((T, N, inputs))
        self.h0 = rng.standard_normal((cells, N, P)) if rng.random() < 0.6 else None
        self.c0 = rng.standard_normal((cells, N, H)) if rng.random() < 0.6 and self.cell == "lstm" else None
        self.weights = [
            self.parameters(gates, H, P, inputs if i < directions else directions * P, peephole, norm, P != H)
            for i in range(cells)
        ]
        self.dy = rng.standard_normal((T, N, directions * P))
        self.dhn, self.dcn = rng.standard_normal((cells, N, P)), rng.standard_normal((cells, N, H))

    def both(self, **options: Any) -> None:
        self.options.update(options)
        self.of_oracle.update(options)

    def zoneout(self, rng: np.random.Generator, lead: tuple[int, ...], P: int, H: int, peephole: int) -> None:
        k_h = rng.random((*lead, P)) if rng.random() < 0.3 else None
        k_c = None
        if self.cell == "lstm" and rng.random() < 0.3 and peephole < 2:
            k_c = (rng.random((*lead[1:], H)) < 0.5).astype(float)
        if k_h is not None:
            self.of_oracle["zoneout_h"] = k_h
        if k_c is not None:
            self.of_oracle["zoneout_c"] = k_c
        if k_h is not None or k_c is not None:
            self.options["zoneout"] = (k_h, k_c) if self.cell == "lstm" else k_h

    def parameters(
        self, G: int, H: int, P: int, inputs: int, peephole: int, norm: bool, projects: bool
    ) -> dict[str, Any]:
        draw = self.rng.standard_normal
        found: dict[str, Any] = {"wx": draw((G, H, inputs)), "wh": draw((G, H, P)) / np.sqrt(P)}
        if self.rng.random() < 0.8:
            found["b"] = draw((G, H))
        if self.cell == "gru" and self.rng.random() < 0.8:
            found["bh"] = draw((G, H))
        if peephole:
            found["peephole"] = draw((G, H) if peephole == 1 else (G, H, H)) / H
        if projects:
            found["projection"] = draw((P, H)) / np.sqrt(H)
        if norm:
            found |= {"gamma_x": draw((G, H)), "gamma_h": draw((G, H))}
            if self.cell == "lstm":
                found |= {"gamma_c": draw(H), "beta_c": draw(H)}
        return found

    def expected(self) -> tuple[Any, Any]:
        cells = [CELLS[self.cell](**parameters) for parameters in self.weights]
        states = (self.h0, self.c0) if self.cell == "lstm" else (self.h0,)
        incoming = (self.dhn, self.dcn) if self.cell == "lstm" else (self.dhn,)
        forward = getattr(oracle, f"{self.cell}_forward")(self.x, cells, *states, **self.of_oracle)
        backward = getattr(oracle, f"{self.cell}_backward")
        return forward, backward(self.dy, *incoming, self.x, cells, *states, **self.of_oracle)

    def computed(self, **options: Any) -> tuple[Any, Any]:
        cells = [WEIGHTS[self.cell](**parameters) for parameters in self.weights]
        states = (self.h0, self.c0) if self.cell == "lstm" else (self.h0,)
        forward = getattr(rg, f"{self.cell}_forward")(self.x, cells, *states, **self.options, **options)
        incoming = {"dhn": self.dhn} | ({"dcn": self.dcn} if self.cell == "lstm" else {})
        return forward, getattr(rg, f"{self.cell}_backward")(self.dy, forward.cache, **incoming)


def check(name: str, actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("first", range(0, 300, 25))
def test_random_options_match_the_oracle(first: int) -> None:
    for seed in range(first, first + 25):
        problem = Problem(seed)
        note = f"seed {seed}: {problem.cell} {sorted(problem.options)}"
        forward, backward = problem.expected()
        found, gradients = problem.computed()
        for name in ("y", "hn", "cn") if problem.cell == "lstm" else ("y", "hn"):
            check(f"{note} {name}", getattr(found, name), getattr(forward, name))
        check(f"{note} dx", gradients.dx, backward.dx)
        if problem.h0 is not None:
            check(f"{note} dh0", gradients.dh0, backward.dh0)
        if problem.c0 is not None:
            check(f"{note} dc0", gradients.dc0, backward.dc0)
        for index, (dcell, expected) in enumerate(zip(gradients.dweights, backward.cells, strict=True)):
            for field, value in dcell._asdict().items():
                if value is not None:
                    check(f"{note} d{field} of cell {index}", value, getattr(expected, field))
        gates = found.cache.gates(len(problem.weights) - 1)
        values = np.stack(gates[: GATES[problem.cell]], axis=2)
        check(f"{note} gates", values, forward.gates[-1])
