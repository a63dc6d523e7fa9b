"""Every operation of MPSGraph and its gradient against PyTorch in float64."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from retrograd.mpsgraph import MPSGraph, _declare  # noqa: E402
from support.mpsgraph import as_list, evaluate, placeholder  # noqa: E402
from support.mpsgraph_cases import CASES, Case  # noqa: E402
from support.mpsgraph_layers import CASES as LAYERS  # noqa: E402

ALL = [*CASES, *LAYERS]


@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize("case", ALL, ids=[f"{i}-{c.name}" for i, c in enumerate(ALL)])
def test_operation_and_gradient(case: Case, unknown: bool) -> None:
    found = evaluate(case.build, case.arrays, case.wrt, unknown)
    tensors = [torch.tensor(a, requires_grad=i in case.wrt) for i, a in enumerate(case.arrays)]
    expected = as_list(case.oracle(*tensors))
    assert len(found.values) == len(expected)
    for value, other in zip(found.values, expected, strict=True):
        reference = other.detach().numpy()
        assert (value.shape, value.dtype) == (reference.shape, reference.dtype)
        np.testing.assert_allclose(value, reference, rtol=1e-12, atol=1e-12)
    if not case.wrt:
        return
    floats = [t for t in expected if t.is_floating_point()]
    loss = sum((t * torch.tensor(s)).sum() for t, s in zip(floats, found.seeds, strict=True))
    wanted = torch.autograd.grad(loss, [tensors[i] for i in case.wrt])
    for gradient, other in zip(found.gradients, wanted, strict=True):
        np.testing.assert_allclose(gradient, other.numpy(), rtol=1e-10, atol=1e-10)


def test_every_row_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()
    original = _declare.call_row

    def noting(graph: object, row: _declare.Row, values: object) -> object:
        called.add(row.selector)
        return original(graph, row, values)  # type: ignore[arg-type]

    monkeypatch.setattr(_declare, "call_row", noting)
    for case in ALL:
        graph = MPSGraph()
        case.build(graph, *(placeholder(graph, a, "") for a in case.arrays))
    elsewhere = {"random numbers", "recurrent layers"}  # in files of their own
    rows = {r.selector for r in _declare.ROWS if r.group not in elsewhere and not r.selector_only}
    assert rows - called == {"dropoutTensor:rate:name:"}
