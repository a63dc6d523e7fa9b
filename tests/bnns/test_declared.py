"""What is made from declarations: functions as if they were written out, the stub, and the table of the docs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrograd import bnns
from retrograd.lab import declared

ROOT = Path(__file__).parents[2]
MADE = [name for name in bnns.__all__ if declared.is_made(getattr(bnns, name))]


@pytest.mark.parametrize(
    "path",
    [*(f"src/retrograd/bnns/{name}.pyi" for name in ("__init__", "_constants", "_graph_methods")), "docs/bnns.md"],
)
def test_files_are_as_the_declarations_say(path: str) -> None:
    assert declared.main(["--check", str(ROOT / path)]) == 0


def test_a_file_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub = tmp_path / "bnns.pyi"
    assert declared.main(["--check", str(stub)]) == 1
    assert str(stub) in capsys.readouterr().out
    assert declared.main([str(stub)]) == 0
    assert declared.main(["--check", str(stub)]) == 0


@pytest.mark.parametrize("name", MADE)
def test_functions_have_names_documentation_and_types(name: str) -> None:
    function = getattr(bnns, name)
    assert function.__name__ == function.__qualname__ == name
    assert function.__doc__
    signature = inspect.signature(function)
    assert all(one.annotation is not one.empty for one in signature.parameters.values())
    assert inspect.get_annotations(function, eval_str=True).keys() == {*signature.parameters, "return"}
    with pytest.raises(TypeError):
        function()


def test_arguments_by_name_and_in_the_wrong_number() -> None:
    x, y = np.array([-1, 2], np.float32), np.zeros(2, np.float32)
    shape = bnns.BNNSNDArrayDescriptor.from_array(x)
    layer = bnns.BNNSLayerParametersActivation(shape, shape, bnns.BNNSActivation(1))
    filter = bnns.BNNSFilterCreateLayerActivation(layer_params=layer)
    named: dict[str, Any] = {"in_": x, "in_stride": 2, "out": y, "out_stride": 2}
    assert bnns.BNNSFilterApplyBatch(filter, batch_size=1, **named) == 0
    assert y.tolist() == [0, 2]
    with pytest.raises(TypeError, match="out_stride"):
        bnns.BNNSFilterApplyBatch(filter, 1, x, 2, y)
    with pytest.raises(TypeError, match="another"):
        bnns.BNNSFilterApplyBatch(filter, batch_size=1, another=3, **named)


def test_labels_of_swift_are_keywords() -> None:
    x = bnns.BNNSNDArrayDescriptor.from_array(np.zeros(2, np.float32))
    with pytest.raises(TypeError, match=r"GramLayer.__init__\(\) missing 1 required keyword-only argument: 'alpha'"):
        bnns.BNNS.GramLayer(input=x, output=x)
    with pytest.raises(TypeError, match="positional"):
        bnns.BNNS.gather(x, x, x, 0)
    with pytest.raises(AttributeError, match="has no attribute 'BNNSNothing'"):
        _ = bnns.BNNSNothing
