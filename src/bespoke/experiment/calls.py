"""Checks the arguments of Python calls like experiment files, with the same error messages."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from bespoke.errors import UserError, unknown
from bespoke.experiment.config import ExperimentConfig

P = ParamSpec("P")
R = TypeVar("R")
_SHORT = reprlib.Repr()  # of what was given: it may be a table of a million rows
_SHORT.maxstring = _SHORT.maxother = 200
STRICT = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def checked_call(function: Callable[P, R]) -> Callable[P, R]:
    """The function with its arguments checked against its signature: their names, and their types."""
    name, signature = function.__name__, inspect.signature(function)
    known = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(known) == len(signature.parameters):
            for given in kwargs.keys() - set(known):
                if "settings" in known and given in ExperimentConfig.model_fields:
                    raise UserError(f"{name}() takes no {given}; give it as settings={{{given!r}: ...}}")
                raise unknown("argument", given, known, f"{name}()")
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise UserError(f"{name}(): {error}; it is called as {name}{signature}") from None
        plain, hints = get_type_hints(function), get_type_hints(function, include_extras=True)
        for given, value in bound.arguments.items():
            if given in known:
                _check(f"{name}({given}=", value, hints[given], plain[given])
        return function(*args, **kwargs)

    return call


def _check(what: str, value: Any, hint: Any, plain: Any) -> None:
    try:
        TypeAdapter(hint, config=STRICT).validate_python(value)
    except ValidationError as error:
        wanted = plain.__name__ if isinstance(plain, type) else re.sub(r"\b(\w+\.)+(?=\w)", "", str(plain))
        problem = error.errors()[0]["msg"].replace("Input should", "it has to")
        found = f"{wanted} is accepted, {type(value).__name__} was found"
        if hasattr(value, "__len__") and "Population" in wanted:
            problem = "bespoke.population(...) makes a population of arrays and data frames"
        raise UserError(f"{what}{_SHORT.repr(value)}): {found} ({problem})".replace("\n", " ")) from None
