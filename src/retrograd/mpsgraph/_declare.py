"""Declarations of MPSGraph's methods: from one row come the Swift method, the PyObjC selector and the documentation.

A row is written as

    row("softMax(with:axis:name:)", "softMaxWithTensor:axis:name:", "tensor axis:axis", graph.softmax)

Swift's labels, the selector's parts and the parameters are in the same order. A parameter is ``name:kind=default``;
without a kind it is a tensor, ``name?`` may be None, and of kind ``axis~`` it is a tensor that has the axis as its
value, which must be a constant or follow from shapes. `name`, the last argument of every operation, is not repeated.
The function gets the tensors by position and the other parameters by name, and is one of retrograd.graph, or of
tensors.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ..graph.recording import UnknownValue
from ..mps._types import as_bool
from . import _types as T

_DESCRIPTORS: Final[dict[str, type[T.Descriptor]]] = {
    "conv": T.MPSGraphConvolution2DOpDescriptor,
    "depthwise": T.MPSGraphDepthwiseConvolution2DOpDescriptor,
    "pool": T.MPSGraphPooling2DOpDescriptor,
    "pool4": T.MPSGraphPooling4DOpDescriptor,
    "rnn": T.MPSGraphSingleGateRNNDescriptor,
    "lstm": T.MPSGraphLSTMDescriptor,
    "gru": T.MPSGraphGRUDescriptor,
    "random": T.MPSGraphRandomOpDescriptor,
}


def _descriptor(kind: type[T.Descriptor]) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be an {kind.__name__}, not {type(value).__name__}")
        return value.copy()  # later changes of the descriptor are not the operation's

    return check


# The kinds of parameters: how they are checked, and their types in the stub.
KINDS: Final[dict[str, tuple[Callable[[str, Any], Any], str]]] = {
    "axis": (T.as_int, "int"),
    "int": (T.as_int, "int"),
    "ints": (T.as_ints, "Sequence[int]"),
    "axes": (T.as_ints, "Sequence[int]"),
    "shape": (T.as_shape, "Sequence[int]"),
    "float": (T.as_number, "float"),
    "rate": (T.as_number, "float | MPSGraphTensor"),
    "bool": (as_bool, "bool"),
    "dtype": (T.as_dtype, "int"),
    "padding": (T.as_enum(T.MPSGraphPaddingMode), "int"),
    "scatter": (T.as_enum(T.MPSGraphScatterMode), "int"),
    "loss": (T.as_enum(T.MPSGraphLossReductionType), "int"),
    **{name: (_descriptor(kind), kind.__name__) for name, kind in _DESCRIPTORS.items()},
}
_TENSORS: Final = {"tensor": "MPSGraphTensor", "tensors": "Sequence[MPSGraphTensor]"}
REQUIRED: Final = inspect.Parameter.empty


class Parameter(NamedTuple):
    """An argument of a method."""

    name: str
    label: str  # Swift's; "_" if it has none
    kind: str
    optional: bool  # may be None
    default: Any  # REQUIRED if it must be given

    @property
    def keyword(self) -> str:
        """The name of the Python argument."""
        return python_name(self.name if self.label == "_" else self.label)

    @property
    def type(self) -> str:
        found = _TENSORS.get("tensor" if self.kind.endswith("~") else self.kind)
        found = found or ("str" if self.kind == "name" else KINDS[self.kind][1])
        return f"{found} | None" if self.optional else found


class Row(NamedTuple):
    """A method of MPSGraph."""

    group: str
    swift: str  # the name
    selector: str
    parameters: tuple[Parameter, ...]
    function: Callable[..., Any]
    results: int | Callable[[dict[str, Any], list[Any]], int] | None  # their number; None: a single tensor, not a list
    selector_only: bool

    @property
    def method(self) -> str:
        return python_name(self.swift)

    @property
    def spelled(self) -> str:
        """Swift's signature."""
        return f"{self.swift}({''.join(p.label + ':' for p in self.parameters)})"

    @property
    def python(self) -> str:
        """The signature in Python."""
        positional = [p.name for p in self.parameters if p.label == "_"]
        rest = [f"{p.keyword}=" for p in self.parameters if p.label != "_"]
        return f"{self.method}({', '.join(positional + rest)})"

    @property
    def selected(self) -> str:
        return self.selector.replace(":", "_")

    @property
    def returns(self) -> str:
        return "MPSGraphTensor" if self.results is None else "list[MPSGraphTensor]"

    @property
    def doc(self) -> str:
        """What the function says of itself."""
        return " ".join((inspect.getdoc(self.function) or "").split("\n\n")[0].split())


ROWS: Final[list[Row]] = []
_group = ""


def python_name(name: str) -> str:
    return name + "_" if keyword.iskeyword(name) else name


def group(title: str) -> None:
    """The rows that follow belong to this heading of the documentation."""
    global _group
    _group = title


def row(
    swift: str,
    selector: str,
    parameters: str,
    function: Callable[..., Any],
    *,
    count: int | Callable[[dict[str, Any], list[Any]], int] | None = None,
    selector_only: bool = False,
) -> None:
    """Declare a method. `selector_only`: in Swift its labels are those of another row, which takes both types."""
    match = re.fullmatch(r"(\w+)\(([\w:]*)\)", swift)
    assert match is not None, swift
    labels = match[2].split(":")[:-1]
    tokens = [*parameters.split(), "name:name"] if labels[-1:] == ["name"] else parameters.split()
    assert len(labels) == selector.count(":") == len(tokens), (swift, selector, parameters)
    found = tuple(_parameter(token, label) for token, label in zip(tokens, labels, strict=True))
    ROWS.append(Row(_group, match[1], selector, found, function, count, selector_only))


def _parameter(token: str, label: str) -> Parameter:
    head, _, default = token.partition("=")
    name, _, kind = head.partition(":")
    optional = head.endswith("?")
    name, kind = name.rstrip("?"), kind.rstrip("?") or "tensor"
    if kind == "name":
        return Parameter(name, label, kind, True, None)
    value: Any = REQUIRED
    if default:
        value = {"None": None, "True": True, "False": False}.get(default, default)
        value = float(value) if isinstance(value, str) and kind == "float" else value
        value = int(value) if isinstance(value, str) else value
    return Parameter(name, label, kind, optional, value)


# ---- methods ---------------------------------------------------------------------------------------------------------


def call_row(graph: Any, one: Row, values: Sequence[Any]) -> Any:
    """Record the operation of a row."""
    operands: list[Any] = []
    options: dict[str, Any] = {}
    name = None
    function = one.function
    read: list[tuple[str, str]] = []  # options that are the values of tensors, which follow the operands
    values_read: list[Any] = []
    where = f"MPSGraph.{one.method}"
    for parameter, value in zip(one.parameters, values, strict=True):
        kind = parameter.kind
        if kind.endswith("~") or (kind == "rate" and graph._is_tensor(value)):
            values_read.append(graph._symbol(where, parameter.name, value))
            read.append((parameter.name, kind.rstrip("~")))
        elif kind == "tensor":
            if value is None and parameter.optional:
                operands.append(None)
            else:
                operands.append(graph._symbol(where, parameter.name, value))
        elif kind == "name":
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{where}: name must be a str or None, not {type(value).__name__}")
            name = value
        elif kind == "tensors":
            if not isinstance(value, (list, tuple)) or not value:
                raise TypeError(f"{where}: {parameter.name} must be a list of tensors, not {value!r}")
            operands += [graph._symbol(where, f"{parameter.name}[{i}]", v) for i, v in enumerate(value)]
        elif value is None and parameter.optional:
            options[parameter.name] = None
        else:
            options[parameter.name] = KINDS[kind][0](f"{where}: {parameter.name}", value)
    if read:
        function = _reading(function, read)
        operands += values_read
    if getattr(function, "stateful", False):
        options["counter"] = graph._counter()
    count = one.results(options, operands) if callable(one.results) else one.results or 1
    found = graph._call(function, operands, options, one.swift, count, name)
    return found[0] if one.results is None else found


def _reading(function: Callable[..., Any], options: Sequence[tuple[str, str]]) -> Callable[..., Any]:
    """`function` with options that are read from the last operands."""

    def reads(*operands: Any, **others: Any) -> Any:
        tensors, values = operands[: -len(options)], operands[-len(options) :]
        for (name, kind), tensor in zip(options, values, strict=True):
            if tensor.node.operation.name != "constant":
                raise UnknownValue(f"{name} is not a constant, and does not follow from constants and shapes")
            array = tensor.node.attributes["value"]
            several = kind in ("ints", "axes", "shape")
            if not several and array.size != 1:
                raise ValueError(f"{name} has shape {list(array.shape)}, must have one element")
            others[name] = KINDS[kind][0](name, array.reshape(-1).tolist() if several else array.reshape(()).item())
        return function(*tensors, **others)

    reads.stateful = getattr(function, "stateful", False)  # type: ignore[attr-defined]
    return reads


def swift_methods() -> dict[str, Callable[..., Any]]:
    """The methods in Swift's spelling, by name: rows of one name are overloads that differ by labels."""
    named: dict[str, list[Row]] = {}
    for one in ROWS:
        if not one.selector_only:
            named.setdefault(one.method, []).append(one)
    return {name: _method(name, rows) for name, rows in named.items()}


def _method(name: str, rows: Sequence[Row]) -> Callable[..., Any]:
    forms: dict[tuple[int, frozenset[str]], Row] = {}
    for one in rows:
        positional = [p for p in one.parameters if p.label == "_"]
        labelled = [p for p in one.parameters if p.label != "_"]
        must = [p for p in labelled if p.default is REQUIRED]
        may = [p for p in labelled if p.default is not REQUIRED]
        for chosen in range(1 << len(may)):
            given = must + [p for i, p in enumerate(may) if chosen >> i & 1]
            key = len(positional), frozenset(p.keyword for p in given)
            assert key not in forms, (name, key)
            forms[key] = one

    def method(self: Any, /, *arguments: Any, **labels: Any) -> Any:
        one = forms.get((len(arguments), frozenset(labels)))
        if one is None:
            raise TypeError(f"MPSGraph.{name}: called with {_given(arguments, labels)}; its forms are {_forms(rows)}")
        given = iter(arguments)
        values = [next(given) if p.label == "_" else labels.get(p.keyword, p.default) for p in one.parameters]
        return call_row(self, one, values)

    method.__name__ = name
    method.__qualname__ = f"MPSGraph.{name}"
    method.__doc__ = "\n\n".join(dict.fromkeys(f"``{r.python}``: {r.doc}" for r in rows))
    if len(rows) == 1:
        method.__signature__ = signature(rows[0])  # type: ignore[attr-defined]
    return method


def signature(one: Row) -> inspect.Signature:
    """The Python signature of a row's method."""
    P = inspect.Parameter
    positional = [P(p.name, P.POSITIONAL_ONLY) for p in one.parameters if p.label == "_"]
    rest = [P(p.keyword, P.KEYWORD_ONLY, default=p.default) for p in one.parameters if p.label != "_"]
    return inspect.Signature([P("self", P.POSITIONAL_ONLY), *positional, *rest])


def _given(arguments: Sequence[Any], labels: dict[str, Any]) -> str:
    parts = [*(["1 argument without a label"] if len(arguments) == 1 else [])]
    if len(arguments) > 1:
        parts.append(f"{len(arguments)} arguments without labels")
    if labels:
        parts.append("the labels " + ", ".join(labels))
    return " and ".join(parts) or "no arguments"


def _forms(rows: Sequence[Row]) -> str:
    return "; ".join(r.python for r in rows)


def selectors() -> dict[str, Callable[..., Any]]:
    """The methods in PyObjC's spelling."""
    found = {}
    for one in ROWS:
        assert one.selected not in found, one.selected
        found[one.selected] = _selector(one)
    return found


def _selector(one: Row) -> Callable[..., Any]:
    count = len(one.parameters)

    def send(self: Any, /, *arguments: Any) -> Any:
        if len(arguments) != count:
            raise TypeError(f"MPSGraph.{one.selected}: needs {count} arguments, got {len(arguments)}")
        return call_row(self, one, arguments)

    send.__name__ = send.__qualname__ = one.selected
    send.__doc__ = one.doc
    return send
