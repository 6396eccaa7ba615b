"""`bespoke.model`: describes a user's own network by a name under which other processes can find it.

    net = bespoke.model(lambda: resnet18(num_classes=10), head="fc", buffers="average")

A model in a module is named "package.module:net"; experiment files, worker processes, exports and later commands find
it by this name. A model of a script's main part, a notebook or a function works in its own process only.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from bespoke.errors import UserError
from bespoke.imported import imported, is_outside, trust

Rule = Literal["refuse", "average", "private", "frozen"]
RULES = get_args(Rule)
HERE = "object:"  # prefix of the names of models that only this process knows
_SCRIPTS = ("__main__", "__mp_main__")
_here: dict[str, Model] = {}


@dataclass(frozen=True, eq=False)
class Model:
    """A user's own network: how it is made, trained and read."""

    factory: Callable[..., Any]
    head: str = ""  # the name of its last layer, a submodule
    buffers: Rule = "refuse"
    inputs: tuple[str, ...] = ("x",)
    outputs: Callable[[Any], Any] | None = None
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    metrics: Mapping[str, Callable[[Tensor, Tensor], Any]] = field(default_factory=dict)
    lower_is_better: tuple[str, ...] = ()
    module: str = ""  # where it was described
    named: str = ""  # the name that it was found by

    def made(self, options: Mapping[str, Any], seed: int) -> nn.Module:
        """The module, its initial values drawn from the seed; the caller's generator is left alone."""
        called = f"the model {self.named or _plain(self.factory)!r}"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _called(self.factory, options, called)
        if not isinstance(module, nn.Module):
            raise UserError(f"{called}: its factory made a {type(module).__name__}, no torch.nn.Module")
        unsized = [name for name, p in module.named_parameters() if isinstance(p, nn.UninitializedParameter)]
        if unsized:
            raise UserError(
                f"{called}: the size of {unsized[0]!r} is not known before rows are seen (a lazy module); give it: "
                "nn.Linear(inputs, outputs) in place of nn.LazyLinear(outputs)"
            )
        return module

    @property
    def title(self) -> str:
        """Its name in errors and reports."""
        return self.named or self.name()

    def name(self) -> str:
        """The name by which experiments know it: "module:name", or one that is known in this process only."""
        found = self.named or self._place()
        if not found:
            found = f"{HERE}{_plain(self.factory)}-{self._digest}"
            _here[found] = self
        elif is_outside(found):
            trust(found)
        return found

    @property
    def portable(self) -> bool:
        """Whether other processes find it."""
        return not self.name().startswith(HERE)

    def _place(self) -> str:
        """Its place in the module that describes it; empty if it has none, or if the module cannot be imported."""
        if self.module in _SCRIPTS or self.module not in sys.modules:
            return ""
        names = [name for name, value in vars(sys.modules[self.module]).items() if value is self]
        found = f"{self.module}:{names[0]}" if names else ""
        return found if is_outside(found) else ""

    @cached_property
    def _digest(self) -> str:
        """Distinguishes models without names: another model must not resume this one's results."""
        module = self.made({}, 0)
        said: list[Any] = [repr(module), self.head, self.buffers, self.inputs, self.lower_is_better, [*self.metrics]]
        parameters = dict(module.named_parameters()).items()
        said += [(name, tuple(p.shape), p.requires_grad, float(p.detach().sum())) for name, p in parameters]
        said += [_code(function) for function in (self.factory, self.outputs, self.loss, *self.metrics.values())]
        return hashlib.blake2b(json.dumps(said, default=str).encode(), digest_size=6).hexdigest()


def _plain(factory: Any) -> str:
    name = getattr(factory, "__qualname__", type(factory).__name__).rpartition(".")[2]
    return "lambda" if name == "<lambda>" else name


def _code(function: Any) -> str:
    """The compiled text of a function, without addresses and line numbers."""
    code = getattr(function, "__code__", None)
    return _said(code) if isinstance(code, CodeType) else type(function).__name__ if function is not None else ""


def _said(code: CodeType) -> str:
    constants = [_said(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def model(
    factory: Callable[..., Any],
    *,
    head: str = "",
    buffers: Rule = "refuse",
    inputs: Sequence[str] = ("x",),
    outputs: Callable[[Any], Any] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    metrics: Mapping[str, Callable[[Tensor, Tensor], Any]] | None = None,
    lower_is_better: Sequence[str] = (),
) -> Model:
    """A network of your own, for `compare(..., model=...)`, or by name in `[model] name = "package.module:name"`.

    factory: makes the nn.Module, with initial values from torch's generator, which is seeded before. head: the name of
    the last layer, for FedRep, kNN-Per and tuning of the last layer. buffers: the rule for buffers that training
    changes, such as BatchNorm's: "average" (they travel and are averaged), "private" (FedBN: BatchNorm's parameters and
    statistics stay on each client), "frozen" (BatchNorm in evaluation mode throughout), "refuse". inputs: names of
    forward's arguments, the first of which gets x; ("x",) passes it by position. outputs: extracts the predictions from
    the result of forward. loss(outputs, y): a loss for each row, or their mean. metrics: {name: f(outputs, y) ->
    number}, computed for each client; `lower_is_better` names those that are errors.
    """
    where = "bespoke.model"
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(f"{where}({type(factory).__name__}): give a function that makes the module: lambda: MyNet()")
    if buffers not in RULES:
        raise UserError(f"{where}(buffers={buffers!r}): it has to be one of {', '.join(RULES)}")
    named = tuple(inputs) if not isinstance(inputs, str) else (inputs,)
    if not named or len(set(named)) < len(named) or not all(isinstance(n, str) and n.isidentifier() for n in named):
        raise UserError(f"{where}(inputs={inputs!r}): the names of forward's arguments, each once")
    for what, function in (("outputs", outputs), ("loss", loss), *(metrics or {}).items()):
        if function is not None and not callable(function):
            raise UserError(f"{where}: {what} is a {type(function).__name__}; it has to be a function")
    for name in metrics or {}:
        if not name.isidentifier() or name in ("count", "rows", "loss"):
            raise UserError(f"{where}(metrics={{{name!r}: ...}}): a metric's name is a word, and not 'count' or 'loss'")
    if unknown := [name for name in lower_is_better if name not in (metrics or {})]:
        raise UserError(f"{where}(lower_is_better={list(lower_is_better)}): there is no metric {unknown[0]!r}")
    lower = [name for name, metric in (metrics or {}).items() if getattr(metric, "better", "") == "lower"]
    module = sys._getframe(1).f_globals.get("__name__", "")
    errors = tuple(dict.fromkeys([*lower_is_better, *lower]))
    return Model(factory, head, buffers, named, outputs, loss, dict(metrics or {}), errors, module)


def is_own(name: str) -> bool:
    """Whether a model of this name is the user's own."""
    return name.startswith(HERE) or is_outside(name)


def found_model(name: str, options: Mapping[str, Any], where: str) -> tuple[Model, dict[str, Any]]:
    """The model of this name, and the options for its factory."""
    if name.startswith(HERE):
        if name not in _here:
            raise UserError(
                f"{where}: the model {name!r} was given as an object, which only the program that made it knows; put "
                "it into a module, as net = bespoke.model(...) in mypkg/nets.py, and name it 'mypkg.nets:net'"
            )
        return _here[name], dict(options)
    found = imported(name, where)
    if isinstance(found, type) and issubclass(found, nn.Module):
        return Model(found, named=name), dict(options)
    if callable(found) and not isinstance(found, Model | nn.Module):
        with torch.random.fork_rng(devices=[]):
            made = _called(found, options, f"{where}: {name!r}")
        if isinstance(made, Model):  # a function that describes the model: it has had the options
            plain = made.factory
            return replace(made, named=name, factory=lambda **_: plain()), dict(options)
        return Model(found, named=name), dict(options)
    if not isinstance(found, Model):
        raise UserError(
            f"{where}: {name!r} is a {type(found).__name__}; it has to be what bespoke.model returns, or a function "
            "that makes a torch.nn.Module"
        )
    return replace(found, named=name), dict(options)


def _called(factory: Callable[..., Any], options: Mapping[str, Any], called: str) -> Any:
    try:
        return factory(**options)
    except UserError:
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        given = f" with {dict(options)}" if options else ""
        raise UserError(
            f"{called} cannot be made{given}: {type(error).__name__}: {error} ({last.filename}, line {last.lineno})"
        ) from error


def local_name(given: Any, where: str) -> str:
    """The name of a model that is given to a call: a description, a function that makes a module, or a name."""
    if isinstance(given, str):
        if is_outside(given):
            trust(given)
        return given
    if isinstance(given, Model):
        return given.name()
    if callable(given) and not isinstance(given, nn.Module):
        place = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', '')}"
        home = sys.modules.get(getattr(given, "__module__", ""))
        known = is_outside(place) and place.partition(":")[0] not in _SCRIPTS
        if known and getattr(home, place.partition(":")[2], None) is given:
            trust(place)
            return place
        return Model(given).name()
    found = type(given).__name__
    raise UserError(f"{where}: found {found}; give bespoke.model(...), or a name such as 'mypkg.nets:net'")
