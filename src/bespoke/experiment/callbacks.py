"""Callbacks of an experiment: named in [callbacks] of a file, or given as objects from Python.

    [callbacks]
    early-stop = {patience = 5}
    tensorboard = {folder = "logs"}
    "mypkg.hooks:Tell" = {}

Callbacks that decide how long a stage trains are part of the experiment, like its methods. Observers are not: the
result is the same without them, so a run may be resumed with other ones.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from bespoke.callbacks import CALLBACKS
from bespoke.callbacks.callback import Callback, decides
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.typed import check_knobs
from bespoke.imported import trust_named
from bespoke.plain import Knobs, TomlTable

Tables = dict[str, Knobs]


def made(tables: Any, where: str) -> list[Callback]:
    """The callbacks of a [callbacks] table."""
    if not isinstance(tables, dict):
        raise UserError(f"{where} = {tables!r}: a table of callbacks by name, as in early-stop = {{patience = 5}}")
    return [_made(name, knobs, f"{where}: {name}") for name, knobs in tables.items()]


def check_callbacks(tables: TomlTable, where: str) -> None:
    """Refuses wrong settings of bespoke's callbacks. Those of others are checked when they are made."""
    for name in tables:
        CALLBACKS.recorded(name, f"{where}: callbacks")  # or unknown
    for name, knobs in tables.items():
        if name in CALLBACKS.built_in:
            _checked(CALLBACKS.built_in[name], knobs, f"{where}: callbacks: {name}")


def _made(name: str, knobs: Any, where: str) -> Callback:
    kind = CALLBACKS.find(name, where)
    try:
        return kind(**_checked(kind, knobs, where))
    except TypeError as error:
        raise UserError(f"{where}: {error}") from None


def _checked(kind: type[Callback], knobs: Any, where: str) -> Knobs:
    """The settings of a callback of this kind."""
    if not isinstance(knobs, dict):
        raise UserError(f"{where} = {knobs!r}: a table of its settings, as in {{patience = 5}}; {{}} for none")
    if is_dataclass(kind):
        return check_knobs(kind, knobs, where)
    if decides(kind):
        raise _undescribed(kind, where)
    return knobs


def name_of(callback: Callback) -> str:
    """The name under which experiments find callbacks of this class."""
    kind = type(callback)
    built_in_names = {built_in: name for name, built_in in CALLBACKS.built_in.items()}
    return built_in_names.get(kind) or CALLBACKS.recorded(kind, "callbacks")


def _settings(callback: Callback) -> Knobs:
    """The settings of a deciding callback, in TOML's types."""
    kind: Any = type(callback)
    made_by = kind.__dict__.get("__dataclass_params__")  # its own, because inherited ones miss new fields
    if made_by is None or not made_by.frozen:
        raise _undescribed(kind, f"callbacks: {kind.__name__}")
    found = {entry.name: getattr(callback, entry.name) for entry in fields(kind) if entry.init}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _undescribed(kind: type, where: str) -> UserError:
    return UserError(
        f"{where} decides how long a stage trains, so its settings are a part of the experiment: make {kind.__name__} "
        "a frozen dataclass, @dataclass(frozen=True)"
    )


def check_foreseen(experiment: Experiment, names: Iterable[str]) -> None:
    """Refuses stages that a callback may end, if the number of rounds must be known in advance."""
    why = "rows that come and go" if experiment.earlier else "[privacy], which is calibrated to it"
    if experiment.earlier or experiment.privacy is not None:
        raise UserError(
            f"callbacks {', '.join(names)} and {why}: how many rounds there are has to be known; leave one of the two "
            "out"
        )


def separated(raw: TomlTable, given: Iterable[Callback] = (), where: str = "callbacks") -> tuple[
    Knobs, list[Callback]
]:  # fmt: skip
    """Returns the experiment with only its deciding callbacks, and the list of all callbacks, `given` included."""
    callbacks = [*made(trust_named(raw.get("callbacks", {})), where), *given]
    deciding: Tables = {}
    for callback in callbacks:
        if decides(type(callback)):
            name = name_of(callback)
            if name in deciding:
                raise UserError(f"{where}: {name} is given twice; which of the two is to decide? Leave one out")
            deciding[name] = _settings(callback)
    rest = {key: value for key, value in raw.items() if key != "callbacks"}
    return {**rest, **({"callbacks": deciding} if deciding else {})}, callbacks


def with_options(raw: TomlTable, options: Iterable[str]) -> TomlTable:
    """The experiment with the callbacks of the command line: "early-stop,patience=5"."""
    found: Tables = {}
    for option in options:
        name, *settings = (part.strip() for part in option.split(","))
        found[name] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not (name and key and equals):
                raise UserError(f"--callback {option}: {setting!r} is not of the form early-stop,patience=5")
            try:
                found[name][key] = tomllib.loads(f"value = {text}")["value"]
            except (ValueError, RecursionError):
                found[name][key] = text  # a bare word
    named = raw.get("callbacks", {})
    if not found or not isinstance(named, dict):  # other values are refused later
        return raw
    return {**raw, "callbacks": {**named, **found}}
