"""Training steps: a model, a loss and optimizers, compiled to one program for each shape of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import graph
from ..graph.tensor import Tensor
from ..ops._types import Array
from . import hints
from .losses import Loss
from .module import Module, Parameter, takes
from .optim import Optimizer
from .program import TRACING, Programs, forget_assignments
from .sizes import size

__all__ = ["Step", "compile"]


class Step:
    """``step(*inputs, target)`` trains a model: forward, loss, gradients and update in one call of the engine.

    It returns the loss, or with `metrics`, functions of the result and the target by name, ``(loss, {name: value})``. A
    keyword goes to the model's ``forward`` or to the loss, whichever has an argument of that name: ``lengths=`` or
    ``weights=``. Without a loss, the model's ``forward`` gets all arguments and returns the loss, or a tuple that
    starts with it, which the step returns: ``loss, state = step(tokens, labels, state)``.

    It is compiled at the first call with arguments of a shape, and the last `keep` programs are kept. `optimizer` may
    be several, for different parts of the model. With ``accumulate=n`` parameters are updated after every n calls, by
    the mean of their gradients.
    """

    def __init__(
        self,
        model: Module,
        loss: Callable[..., Any] | None,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        accumulate: int = 1,
        keep: int = 8,
        num_threads: int | None = None,
    ) -> None:
        self.optimizers = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
        _check(model, loss, self.optimizers, metrics, accumulate)
        self.model, self.loss, self.metrics = model, loss, dict(metrics or {})
        self.accumulate = accumulate
        roots = [model, *([loss] if isinstance(loss, Module) else [])]
        options: dict[str, Any] = {"keep": keep, "num_threads": num_threads}
        self._train = Programs(self._trained, roots, **options)
        self._evaluate = Programs(self._evaluated, roots, training=False, **options)
        self._gradients = Programs(self._differentiated, roots, **options)
        self._apply = Programs(self._applied, roots, **options)

    def __setattr__(self, name: str, value: object) -> None:
        if "_apply" in self.__dict__:  # the programs would not notice
            raise AttributeError(f"step.{name} is fixed; call nn.compile for another step")
        super().__setattr__(name, value)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Take a step, and return the loss before it."""
        if not self.model.training:
            with TRACING:  # of another thread, which may be what switched the mode
                if not self.model.training:
                    raise RuntimeError("step: the model is in evaluation mode; call model.train() first")
        for optimizer in self.optimizers:
            optimizer.set_rates()
        found = self._train(*arguments, **keywords)
        if self.accumulate > 1 and max(o.collected for o in self.optimizers) >= self.accumulate:
            self._apply()
        return found

    def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
        """Return what a step returns, in evaluation mode. Nothing is changed."""
        return self._evaluate(*arguments, **keywords)

    def gradients(self, *arguments: Any, **keywords: Any) -> tuple[Any, dict[str, Array]]:
        """Return what a step returns, and the gradients by the names of their parameters. Nothing is changed."""
        answer, found = self._gradients(*arguments, **keywords)
        return answer, found

    def program(self, *arguments: Any, **keywords: Any) -> graph.Program:
        """Return the program for these arguments: ``print`` shows its records, ``profile`` what each takes."""
        return self._train.program_for(arguments, keywords)[0]

    def evaluation(self, *arguments: Any, **keywords: Any) -> graph.Program:
        """Return the program of :meth:`evaluate` for these arguments."""
        return self._evaluate.program_for(arguments, keywords)[0]

    # ---- what is traced ----------------------------------------------------------------------------------------------

    def answer(self, *arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        """The loss as a tensor, and what the step returns."""
        if self.loss is None:
            answer = _returned(self.model, self.model(*arguments, **keywords))
            return _scalar(answer[0] if isinstance(answer, tuple) else answer), answer
        if not arguments:
            raise TypeError("step: there is no target; call step(x, target)")
        own, others = self._distributed(keywords)
        *inputs, target = arguments
        try:
            inspect.signature(self.model.forward).bind(*inputs, **own)
        except TypeError as error:
            raise TypeError(
                f"step: {error}, of the model's forward; the last argument of a step is the target: step(x, target)"
            ) from None
        y = _returned(self.model, self.model(*inputs, **own))
        if isinstance(self.loss, Loss) and isinstance(y, (tuple, list)):
            raise TypeError(
                f"step: the forward of {type(self.model).__name__} returned a {type(y).__name__} of {len(y)}, but "
                f"{type(self.loss).__name__} takes one tensor"
            )
        loss = _scalar(self.loss(y, target, **others))
        scores = {name: metric(y, target) for name, metric in self.metrics.items()}
        return loss, (loss, scores) if scores else loss

    def _distributed(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keywords for the model, and for the loss."""
        assert self.loss is not None
        loss = self.loss.forward if isinstance(self.loss, Module) else self.loss
        others = {name: value for name, value in keywords.items() if takes(loss, name)}
        own = {name: value for name, value in keywords.items() if takes(self.model, name) and name not in others}
        for name in keywords:
            if name not in own and name not in others:
                raise TypeError(f"step: neither the model's forward nor the loss has an argument {name!r}")
        return own, others

    def found_gradients(self, loss: Tensor) -> dict[Parameter, Tensor]:
        """The gradients of a loss for all parameters that are trained."""
        names = {p: name for o in self.optimizers for name, p in o.parameters.items() if p.trainable}
        if not names:
            raise ValueError("step: all parameters of the optimizer are frozen")
        used = _reached(loss)
        if unused := [name for p, name in names.items() if p not in used]:
            some = ", ".join(unused[:5]) + (" and others" if len(unused) > 5 else "")
            raise ValueError(
                f"step: the loss does not depend on {some}. Freeze what is not used, model.freeze() or "
                "parameter.trainable = False, or give the optimizer only what is"
            )
        roots = [self.model, *([self.loss] if isinstance(self.loss, Module) else [])]
        known = {*names, *(p for root in roots for p in root.parameters().values())}
        for hidden in used - known:
            if isinstance(hidden, Parameter) and hidden.trainable:  # of a layer that was appended to a list
                raise ValueError(
                    f"step: the loss depends on a parameter {hidden.name!r} of shape {hidden.shape} that the model "
                    "does not have, so it would not be trained; assign its layer to an attribute, use Sequential, or "
                    "freeze it"
                )
        found = dict(zip(names, graph.gradients(loss, list(names)), strict=True))
        for parameter in found:
            if parameter.mask is not None:
                found[parameter] = graph.where(parameter.mask, found[parameter], 0.0)
        return found

    def _trained(self, *arguments: Any, **keywords: Any) -> Any:
        loss, answer = self.answer(*arguments, **keywords)
        found = self.found_gradients(loss)
        for optimizer in self.optimizers:
            optimizer.update(found) if self.accumulate == 1 else optimizer.collect(found)
        return answer

    def _applied(self) -> None:
        for optimizer in self.optimizers:
            optimizer.apply()

    def _evaluated(self, *arguments: Any, **keywords: Any) -> Any:
        return self.answer(*arguments, **keywords)[1]

    def _differentiated(self, *arguments: Any, **keywords: Any) -> Any:
        loss, answer = self.answer(*arguments, **keywords)
        found = self.found_gradients(loss)
        names = {p: name for name, p in self.model.parameters().items()}
        forget_assignments()
        return answer, {names.get(p, p.name): g for p, g in found.items()}


def _reached(loss: Tensor) -> set[Any]:
    """The variables that a loss depends on."""
    seen: set[int] = set()
    found: set[Any] = set()
    left = [loss.node]
    while left:
        node = left.pop()
        if node.number in seen:
            continue
        seen.add(node.number)
        if "variable" in node.attributes:
            found.add(node.attributes["variable"])
        left.extend(t.node for t in node.inputs if t is not None)
    return found


def _returned(model: Module, answer: Any) -> Any:
    if answer is None:
        raise TypeError(f"step: the forward of {type(model).__name__} returned None; end it with a return")
    return answer


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        found = "None; end it with a return" if loss is None else f"a {type(loss).__name__}, must be a tensor"
        raise TypeError(f"step: the loss is {found}")
    if loss.shape:
        raise ValueError(f"step: the loss has shape {loss.shape}, must be a single number; take its mean, or its sum")
    return loss


def _check(model: object, loss: object, optimizers: Sequence[Any], metrics: object, accumulate: int) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"compile: model is {hints.instead_of_model(model)}")
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise TypeError(f"compile: loss is {hints.instead_of('loss', loss)}")
    if not optimizers:
        raise TypeError("compile: optimizer is empty, must be an optimizer such as nn.Adam(model, 1e-3)")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"compile: optimizer is {hints.instead_of('optimizer', optimizer)}")
    if metrics is not None and not (isinstance(metrics, Mapping) and all(map(callable, metrics.values()))):
        raise TypeError('compile: metrics must be functions by name, such as {"accuracy": nn.accuracy}')
    if metrics and loss is None:
        raise TypeError("compile: metrics need a loss; without one, forward returns them: (loss, metric)")
    size("compile", "accumulate", accumulate, 1)
    seen: set[int] = set()
    for parameter in (p for o in optimizers for p in o.parameters.values()):
        if id(parameter) in seen:
            raise ValueError(f"compile: parameter {parameter.name!r} belongs to two optimizers")
        seen.add(id(parameter))


compile = Step  # nn.compile(model, loss, optimizer)
