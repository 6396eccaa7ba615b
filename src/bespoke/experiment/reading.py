"""Reads experiment files, and applies `--set key=value` to them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.experiment.checks import checked
from bespoke.experiment.config import ExperimentConfig
from bespoke.imported import trust_named
from bespoke.plain import TomlTable


def read_config(path: Path, overrides: list[str] | None = None) -> ExperimentConfig:
    """Reads an experiment file and applies `--set key=value` to it."""
    raw = read_experiment(path, overrides)
    raw.pop("tune", None)  # only `bespoke tune` uses it
    return checked(raw, str(path))


def read_experiment(path: Path, overrides: list[str] | None = None) -> TomlTable:
    """Reads an experiment file and applies `--set key=value`, without checks. Code that it names is trusted."""
    raw: TomlTable = trust_named(overridden(read_toml(path), overrides))
    return raw


def read_recorded(folder: Path) -> ExperimentConfig:
    """Reads the experiment of a run folder. The folder may come from others, so code that it names needs permission."""
    path = folder / "config.toml"
    return checked(read_toml(path), str(path))


def overridden(raw: TomlTable, overrides: list[str] | None) -> TomlTable:
    """The same tables with `--set key=value` applied, in place."""
    for override in overrides or []:
        _apply(raw, override)
    return raw


def read_toml(path: Path) -> TomlTable:
    """Reads a TOML file; an error explains why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no experiment file {path}") from None
    except (IsADirectoryError, UnicodeDecodeError, PermissionError) as error:
        raise UserError(f"{path} cannot be read as a TOML file ({error})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is not a TOML error
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _apply(raw: TomlTable, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(
            f"--set takes key=value, got {override!r}; for example --set cohort.size=50 or --set stage.0.lr=0.1"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a word without quotes is a text
    *parents, last = key.strip().split(".")
    node: Any = raw
    for parent in parents:
        if isinstance(node, list):
            try:
                node = node[int(parent)] if parent.isdigit() else next(s for s in node if s.get("method") == parent)
            except (IndexError, StopIteration):
                known = ", ".join(f"{i} ({stage.get('method')})" for i, stage in enumerate(node))
                raise UserError(f"--set {override}: no stage {parent!r}; there are: {known}") from None
        else:
            node = node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise UserError(f"--set {override}: {parent!r} is a value, not a table")
    if isinstance(node, list):
        raise UserError(f"--set {override}: name the stage and the knob, as in stage.0.lr=0.1")
    node[last] = value
