"""ONNX's published node tests for the four norms, convolutions and recurrent layers, as plain arrays."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NORMS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization")


class OnnxCase(NamedTuple):
    """One node and one data set. Attributes the node leaves out have ONNX's default; an omitted input is None."""

    name: str
    op_type: str
    attributes: Mapping[str, Any]
    inputs: tuple[npt.NDArray[Any] | None, ...]
    outputs: tuple[npt.NDArray[Any], ...]


def collect_onnx_cases(files: str = "norm", operators: Sequence[str] = NORMS) -> list[OnnxCase]:
    """All cases of these operators, sorted by name; empty without onnx, an error if onnx has lost one of them.

    `files` is in the names of the modules that have them.
    """
    try:
        import onnx
        from onnx.backend.test.case import node as package
    except ImportError:
        return []

    # A case file registers its cases while it is imported, drawing from NumPy's global generator, which it seeds.
    # onnx's own loader imports all of them, which takes seconds; those of the operators are enough.
    state = np.random.get_state()  # noqa: NPY002
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.iter_modules(package.__path__):
            if files in module.name:
                importlib.import_module(f"{package.__name__}.{module.name}")
    np.random.set_state(state)  # noqa: NPY002

    cases: dict[str, OnnxCase] = {}
    for case in package._NodeTestCases:
        nodes = case.model.graph.node
        # The same data also come as "expanded" graphs of primitive operators: not what is asked for here.
        if len(nodes) != 1 or nodes[0].op_type not in operators:
            continue
        node = nodes[0]
        schema = onnx.defs.get_schema(node.op_type, case.model.opset_import[0].version, "")
        defaults = [a.default_value for a in schema.attributes.values() if not a.required]
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in (*defaults, *node.attribute) if a.name}
        for number, (given, expected) in enumerate(case.data_sets):
            values = iter(given)
            inputs = tuple(np.asarray(next(values)) if name else None for name in node.input)
            outputs = tuple(np.asarray(value) for value in expected)
            name = case.name if len(case.data_sets) == 1 else f"{case.name}_{number}"
            cases[name] = OnnxCase(name, node.op_type, attributes, inputs, outputs)
    missing = set(operators) - {case.op_type for case in cases.values()}
    if missing:
        raise RuntimeError(f"onnx {onnx.__version__} has no node tests for {sorted(missing)}")
    return [cases[name] for name in sorted(cases)]


class OnnxRecurrent(NamedTuple):
    """One node and its data; what the node leaves out is not there."""

    name: str
    attributes: Mapping[str, Any]
    inputs: Mapping[str, npt.NDArray[Any]]
    outputs: Mapping[str, npt.NDArray[Any]]


ONNX_INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
ONNX_OUTPUTS = ("Y", "Y_h", "Y_c")


def collect_onnx_recurrent_cases(operator: str) -> list[OnnxRecurrent]:
    """ONNX's node tests of LSTM, GRU or RNN, sorted by name; empty without onnx, an error if onnx has lost them."""
    try:
        import onnx
        from onnx.backend.test.case import node as package
    except ImportError:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{package.__name__}.{operator.lower()}")  # registers its cases
    found = []
    for case in package._NodeTestCases:
        nodes = case.model.graph.node
        if len(nodes) == 1 and nodes[0].op_type == operator:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in nodes[0].attribute}
            ((given, expected),) = case.data_sets
            used = [name for name, there in zip(ONNX_INPUTS, nodes[0].input, strict=False) if there]
            made = [name for name, there in zip(ONNX_OUTPUTS, nodes[0].output, strict=False) if there]
            inputs = {name: np.asarray(a) for name, a in zip(used, given, strict=True)}
            outputs = {name: np.asarray(a) for name, a in zip(made, expected, strict=True)}
            found.append(OnnxRecurrent(case.name, attributes, inputs, outputs))
    if not found:
        raise RuntimeError(f"onnx {onnx.__version__} has no node tests for {operator}")
    return sorted(found, key=lambda case: case.name)
