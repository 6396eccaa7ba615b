"""Builds populations from rows in memory: arrays, tensors, data frames, datasets, or a stream larger than memory.

    population({"anna": (x, y), "bob": (x, y)}, task="classification")
    population(frame, client="user", x=["age", "income"], y="spent")
    population(dataset, client=ids)                       any map-style dataset of (x, y)
    population([partition, partition, ...], y="label")    one client each: datasets, tables, (x, y), or rows by name

    with write_population("big", task="regression") as out:
        for user, x, y in stream:
            out.add(user, x=x, y=y)

Where a model takes several inputs, x is a dict of arrays: {"input_ids": ..., "attention_mask": ...}.

Rows are numbers: (rows, features), or images as (rows, lines, columns) with or without channels. Categories, dates and
missing values are what tables are for (`bespoke compare table.csv`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast, get_args

import numpy as np
import torch

from bespoke.data.about import About
from bespoke.data.handed_over import (
    Array,
    Targets,
    as_arrays,
    as_labels,
    as_numbers,
    as_targets,
    by_client,
    check_alike,
    check_names,
    check_rows,
    class_names,
    feature_names,
    first_row,
    groups_of,
    inferred_task,
    inputs_and_targets,
    one_input,
    several_inputs,
)
from bespoke.data.population import POPULATION_FORMAT, Names, Population
from bespoke.errors import UserError, unknown
from bespoke.randomness import client_keys
from bespoke.storage import write_arrays, write_text

LEARNED = "which classes there are is learned from clients without noise"
MOST_CLASSES = 100_000  # of a stream
MOST_IN_MEMORY = 2**28  # bytes of a population on disk whose rows stay in memory once they were read


def population(
    data: Any,
    *,
    task: Targets | None = None,
    client: str | Sequence[Any] | None = None,
    x: str | Sequence[str] | None = None,
    y: str | None = None,
    group: Mapping[Any, str] | None = None,
    name: str = "own data",
) -> Population:
    """Makes a population of each client's rows, for `compare`, `run` and `tune`.

    data: a dict of client -> (x, y), x an array, or a dict of arrays where the model takes several inputs; a DataFrame,
    Arrow table or Hugging Face dataset whose columns `client`, `x` (one column of arrays or several of numbers;
    default: all others) and `y` name; a map-style dataset of (x, y) with each row's client in `client`; or a list of
    such parts, one client each. task: needed where targets are whole numbers whose classes the data do not name.
    group: each client's group, for methods that make models of groups.
    """
    if task not in (None, *get_args(Targets)):
        raise unknown("task", task, get_args(Targets), "population(task=...)")
    parts = []
    for who, rows in by_client(data, client, x, y):
        inputs, wanted = inputs_and_targets(rows, who, x, y)
        if not wanted.ndim:
            raise UserError(f"client {str(who)!r} has y of shape (); it has to be (rows,)")
        parts.append((str(who), inputs, as_labels(who, wanted)))
    if not parts:
        raise UserError("population(): there is no client in these data")
    check_names([p[0] for p in parts])
    check_alike(parts)
    targets = np.concatenate([p[2] for p in parts])
    names = class_names(data, y)
    kind = task or ("classification" if names else inferred_task(targets))
    owner = np.repeat([p[0] for p in parts], [len(p[2]) for p in parts])
    columns: dict[str, Any] = {}
    if any(isinstance(inputs, dict) for _, inputs, _ in parts):
        columns, about = several_inputs(parts)
    else:
        first = parts[0]
        for who, inputs, wanted in parts:
            check_rows(who, inputs, wanted, first[0], first[1])
        whole = np.concatenate([p[1] for p in parts])
        columns["x"], about = one_input(whole, feature_names(data, x, whole))
    groups = None if group is None else groups_of(group, owner.tolist())
    if kind == "classification":
        classes, columns["y"] = np.unique(targets, return_inverse=True)
        about["classes"] = [names.get(label, str(label)) for label in classes.tolist()]
        about["learned"] = LEARNED
    else:
        columns["y"] = as_numbers(targets, "targets of a regression")
    return Population.build(columns, owner, group=groups, about=_about(name, kind, about))


def open_population(folder: Path) -> Population:
    """Opens a population folder; a small population is kept in memory after it was read."""
    path = folder / "columns.safetensors"
    small = path.exists() and path.stat().st_size <= MOST_IN_MEMORY
    return Population.open(folder, resident=small)


def keep_population(rows: Population, out: Path) -> Path:
    """Writes the population into a folder beside `out` for other processes and later runs. Returns the folder."""
    folder = out.with_name(f"{out.name}.population")
    if not (folder / "population.json").exists():
        rows.save(folder)
        return folder
    there = Population.open(folder, resident=True)
    same = list(there.ids) == list(rows.ids) and np.array_equal(there.offsets, rows.offsets)
    same = same and there.about == json.loads(json.dumps(rows.about)) and there.columns.keys() == rows.columns.keys()
    if not (same and all(torch.equal(column, rows.columns[name]) for name, column in there.columns.items())):
        raise UserError(f"{folder} holds other rows, from an earlier call; choose another `out`, or remove the folder")
    return folder


class write_population:
    """Writes a population of any size to a folder, a client at a time; use it in a `with` statement.

    The folder is there whole after the `with` block, and not at all if that fails. It is read by `compare(folder)`,
    `[data] population = "folder"`, or `Population.open`.
    """

    def __init__(
        self, folder: str | Path, *, task: Targets, features: Sequence[str] | None = None, name: str = "own data"
    ) -> None:
        if task not in ("regression", "classification"):
            raise UserError(f"write_population(task={task!r}): it has to be 'regression' or 'classification'")
        self.folder, self.task, self.name, self.features = Path(folder), task, name, features
        if (self.folder / "population.json").exists():
            raise UserError(f"{self.folder} holds a population already; choose another folder, or remove it")

    def __enter__(self) -> write_population:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.folder.parent))
        self.files: dict[str, BinaryIO] = {}
        self.sizes: dict[str, int] = {}
        self.first: _First | None = None
        self.classes: set[Any] = set()
        return self

    def add(self, client: str, *, x: Any, y: Any) -> None:
        """Appends a client with all of its rows."""
        who = str(client)
        if who in self.sizes:
            raise UserError(f"client {who!r} was added before: a client is added once, with all of its rows")
        inputs, targets = as_arrays(x), as_labels(who, as_targets(y))
        columns, about = self._columns(who, inputs, targets)
        if self.task == "classification":
            labels = np.unique(targets)
            if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0:
                said = labels[:3].tolist()
                raise UserError(f"client {who!r}: classes of a stream are whole numbers from 0, not {said}")
            if labels.max() >= MOST_CLASSES:
                raise UserError(
                    f"client {who!r} has the class {labels.max()}: classes of a stream are whole numbers from 0, "
                    f"{MOST_CLASSES:,} at most; number them anew"
                )
            self.classes |= set(labels.tolist())
            columns["y"] = targets.astype(np.int64)
        else:
            columns["y"] = as_numbers(targets, f"targets of client {who!r}")
        if self.first is None:
            self.first = _First(who, first_row(inputs), about, {name: value[:1] for name, value in columns.items()})
            self.files = {name: open(self.temporary / name, "wb") for name in columns}  # noqa: SIM115
        for name, like in self.first.columns.items():
            if (found := columns[name].dtype) != like.dtype:
                raise UserError(f"client {who!r} has rows of {found}, client {self.first.who!r} of {like.dtype}")
        for name, file in self.files.items():
            columns[name].tofile(file)
        self.sizes[who] = len(targets)

    def _columns(self, who: str, inputs: Any, targets: Array) -> tuple[dict[str, Array], dict[str, Any]]:
        """The columns of this client's inputs, with their description; they have to be as those of the first one."""
        first, like = (self.first.who, self.first.inputs) if self.first else (who, inputs)
        if isinstance(inputs, dict) or isinstance(like, dict):
            columns, about = several_inputs([(first, first_row(like), targets[:1]), (who, inputs, targets)])
            return {name: column[-len(targets) :] for name, column in columns.items()}, about
        check_rows(who, inputs, targets, first, like)
        rows, about = one_input(inputs, self.features)
        return {"x": rows}, about

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self.files.values():
            file.close()
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def _finish(self) -> None:
        if self.first is None:
            raise UserError(f"write_population({str(self.folder)!r}): no client was added")
        count, ids = sum(self.sizes.values()), list(self.sizes)
        about = dict(self.first.about)
        if self.task == "classification":
            about["classes"] = [str(label) for label in range(int(max(self.classes)) + 1)]
            about["learned"] = LEARNED
        self.folder.mkdir(parents=True, exist_ok=True)
        columns = {name: self._whole(name, like, count) for name, like in self.first.columns.items()}
        write_arrays(self.folder / "columns.safetensors", columns)
        names = Names.of(ids)
        clients = {
            "offsets": torch.from_numpy(np.concatenate([[0], np.cumsum(list(self.sizes.values()))]).astype(np.int64)),
            "keys": torch.from_numpy(client_keys(ids).view(np.int64)),
            "id_text": torch.from_numpy(names.text.copy()),
            "id_ends": torch.from_numpy(names.ends),
        }
        write_arrays(self.folder / "clients.safetensors", clients)
        said = {"format": POPULATION_FORMAT, "groups": [], "about": _about(self.name, self.task, about)}
        write_text(self.folder / "population.json", json.dumps(said, indent=1))

    def _whole(self, name: str, like: Array, count: int) -> torch.Tensor:
        """A column of all clients, as it lies on disk."""
        return torch.from_numpy(np.memmap(self.temporary / name, like.dtype, "r+", shape=(count, *like.shape[1:])))


@dataclass(frozen=True)
class _First:
    """The first client's inputs, with which all other clients' inputs must agree."""

    who: str
    inputs: Any  # its first row: an array, or several by name
    about: dict[str, Any]
    columns: dict[str, Array]  # what is written of this row


def _about(name: str, task: Targets, more: dict[str, Any]) -> About:
    table = more["input"] == "table"
    about: About = {
        "name": name,
        "title": name,
        "task": task,
        "target": "y",
        "notes": [],
        "standardize": {"features": "global" if table else "none", "target": table and task == "regression"},
    }
    return cast(About, {**about, **more})
