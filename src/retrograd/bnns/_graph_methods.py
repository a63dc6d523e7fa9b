"""The methods and operators of BNNSGraph's tensors, made from the table. Type checkers read the stub beside this."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable
from typing import Any, Final

from ._declare import written
from ._graph_operations import KINDS, OPERATIONS, OPERATORS, Operation

REFLECTED: Final = ("add", "sub", "mul", "truediv", "and", "or", "xor")  # operators with a number on their left
# What operations with several results return.
RESULTS: Final[dict[tuple[str, ...], Any]] = {
    row.results: namedtuple("Results", row.results) for row in OPERATIONS.values() if row.results
}


class Methods:
    """The base of tensors, which have a method ``_record(operation, arguments in the order of its labels)``."""

    __slots__ = ()


def _method(operation: Operation) -> Callable[..., Any]:
    signature: list[str] = ["self"]
    names: dict[str, Any] = {"_operation": operation}
    types: dict[str, Any] = {}
    for label in operation.labels:
        if not label.positional and "*" not in signature:
            signature.append("*")
        required = label.default is inspect.Parameter.empty
        signature.append(label.name if required else f"{label.name}=default_{label.name}")
        names[f"default_{label.name}"] = label.default
        types[label.name] = KINDS[label.kind].annotation
    passed = "".join(f"{label.name}, " for label in operation.labels)

    def named() -> None: ...

    named.__name__, named.__qualname__, named.__doc__ = operation.name, f"Tensor.{operation.name}", operation.doc
    made: Callable[..., Any] = written(named, signature, f"return self._record(_operation, ({passed}))", names, types)
    return made


def _operator(operation: Operation) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(self: Any, *other: Any) -> Any:
        return self._record(operation, other)

    def backward(self: Any, other: Any) -> Any:
        return self._reflected(operation, other)

    return forward, backward


for _row in OPERATIONS.values():
    if _row.name in OPERATORS:
        _name, (_forward, _backward) = OPERATORS[_row.name], _operator(_row)
        setattr(Methods, f"__{_name}__", _forward)
        if _name in REFLECTED:
            setattr(Methods, f"__r{_name}__", _backward)
    else:
        setattr(Methods, _row.name, _method(_row))
