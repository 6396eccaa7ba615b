"""Checks values against declared types and explains the first mismatch in words."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields, is_dataclass
from dataclasses import Field as KnobField
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from bespoke.errors import UserError, unknown
from bespoke.plain import Knobs

SINGLE = 3.4028234e38  # the largest number of single precision


def check_numbers(value: Any, where: str, key: str = "", finite: bool = False) -> None:
    """Refuses numbers that are too large: TOML's integers have 64 bits, models compute in single precision.

    `finite` is for values without a declared type; a declared type decides about infinity and NaN by itself.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{where}: {key} = {_shortened(value)}: a whole number has to be below 2^63 = {2**63:,}")
    if isinstance(value, float) and (SINGLE < abs(value) < math.inf or (finite and not math.isfinite(value))):
        raise UserError(f"{where}: {key} = {value:g}: has to be a finite number below {SINGLE:.3g} (single precision)")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, entry in entries:
        check_numbers(entry, where, f"{key}.{name}" if key else str(name), finite)


def _shortened(value: int) -> str:
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length():,} bits"


def check_knobs(kind: type, knobs: Knobs, where: str, also: tuple[str, ...] = ()) -> Knobs:
    """Knobs of a dataclass as typed values; tables become nested dataclasses. `also`: further keys."""
    check_numbers(knobs, where)
    hints = get_type_hints(kind, include_extras=True)
    settings: Knobs = {}
    nested: Knobs = {}
    for entry in fields(kind):
        if entry.name == "task" or not entry.init:
            continue
        if is_dataclass(hints[entry.name]):
            also = (*also, entry.name)
            if entry.name in knobs:
                inner = knobs[entry.name]
                if isinstance(inner, str):
                    inner = {"name": inner}
                if not isinstance(inner, dict):
                    raise UserError(f"{where}: {entry.name} = {inner!r}: it has to be a name or a table of knobs")
                inner_type: Any = hints[entry.name]
                others, named = getattr(inner_type, "others", None), inner.get("name")
                if others is not None and isinstance(named, str) and others.knows(named):
                    inner_type = others.find(named, f"{where}: {entry.name}")
                    inner = {key: value for key, value in inner.items() if key != "name"}
                typed = check_knobs(inner_type, inner, f"{where}: {entry.name}")
                try:
                    nested[entry.name] = inner_type(**_completed(entry, inner_type, typed))
                except ValueError as error:  # knobs that cannot be combined
                    raise UserError(f"{where}: {entry.name}: {error}") from None
            continue
        default = entry.default if entry.default is not MISSING else None
        hint, bounds = hints[entry.name], entry.metadata.get("bounds", {})
        if get_origin(hint) is tuple:  # TOML has lists only; bounds apply to every entry, and a list needs one
            each, *_ = get_args(hint)
            hint = tuple[Annotated[each, Field(**bounds)], ...]  # type: ignore[valid-type]
            bounds = {"strict": False, **({"min_length": 1} if bounds else {})}
        settings[entry.name] = (hint, Field(default=default, **bounds))
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model = create_model(f"{kind.__name__} knobs", __config__=strict, **settings)
    try:
        found = model.model_validate({k: v for k, v in knobs.items() if k not in nested})
    except ValidationError as error:
        raise explain(error, model, where, also) from None
    return {name: getattr(found, name) for name in found.model_fields_set} | nested


def _completed(entry: KnobField[Any], kind: Any, typed: dict[str, Any]) -> dict[str, Any]:
    """A table with what the method sets there by default: `server = {lr = 0.1}` keeps the method's own optimizer.

    A table that names something else than the default has nothing of it.
    """
    default: Any = None if entry.default_factory is MISSING else entry.default_factory()
    named = getattr(default, "name", None)
    if type(default) is not kind or typed.get("name", named) != named:
        return typed
    return {known.name: getattr(default, known.name) for known in fields(kind) if known.init} | typed


def explain(error: ValidationError, model: type[BaseModel], where: str, also: tuple[str, ...] = ()) -> UserError:
    """The first error in words: the key, the value found, what is allowed."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key, found, kind = ".".join(path), first["input"], first["type"]
    if kind == "extra_forbidden":
        holder: Any = model
        for part in path[:-1]:
            holder = holder.model_fields[part].annotation
            holder = next((kind for kind in get_args(holder) if kind is not type(None)), holder)  # a table or none
        return unknown("key", key, [*holder.model_fields, *also], where)
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return unknown(key, found, words, where)
    if kind == "missing":
        if key == "stage":
            return UserError(f"{where} has no stage; add [[stage]] with method = ... and rounds = ...")
        return UserError(f"{where}: {key} is missing; found {found!r}")
    if key == "stage" and kind == "list_type":
        return UserError(f"{where}: stage = {found!r}: write [[stage]] in double brackets, once for every stage")
    said = first["msg"][:1].lower() + first["msg"][1:]
    for theirs, ours in (("input should", "it has to"), ("valid dictionary", "table"), ("valid tuple", "list"),
                         ("valid list", "list"), (" or instance of", "$")):  # fmt: skip
        said = said.replace(theirs, ours)
    return UserError(f"{where}: {key} = {found!r}: {said.split('$')[0]}")
