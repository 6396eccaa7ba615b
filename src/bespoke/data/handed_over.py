"""Reads rows in the forms that users hand over: data frames, datasets, pairs, rows by name. Checks that they agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.errors import UserError

Targets = Literal["regression", "classification"]
Array = NDArray[Any]
RESERVED = ("x", "y", "mask", "draw", "kind", "context", "time", "unit", "role", "since", "until")  # columns' names
CHANNELS = (1, 3)  # of an image
LARGEST = float(np.finfo(np.float32).max)
UNEQUAL = "all rows need the same shape"


def by_client(data: Any, client: Any, x: Any, y: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each client with its rows, from any supported form of data."""
    frame = _frame(data)
    if frame is not None:
        if not isinstance(client, str) or not isinstance(y, str):
            raise UserError("population(table, client=..., y=...): name the columns of clients and of targets")
        for column in (client, y, *([x] if isinstance(x, str) else x or ())):
            if column not in frame:
                raise UserError(f"population(): there is no column {column!r}; there are {', '.join(map(str, frame))}")
        chosen = [x] if isinstance(x, str) else list(x) if x else [c for c in frame if c not in (client, y)]
        if y in chosen:
            raise UserError(
                f"population(x={x!r}, y={y!r}): the target cannot be predicted from itself; leave it out of x"
            )
        ids = _ids(frame[client], f"column {client!r}")
        for who in np.unique(ids):
            places = np.flatnonzero(ids == who)
            yield who, (_columns(frame, chosen, places), as_targets(frame[y])[places])
    elif isinstance(data, Mapping):
        if client is not None:
            raise UserError(
                f"population(dict, client={client!r}): the keys of a dict are its clients ({next(iter(data), None)!r}, "
                "...); leave client out, or give one of its values, such as a split of a dataset"
            )
        yield from data.items()
    elif client is not None:
        if isinstance(client, str) or len(client) != len(data):
            raise UserError(f"population(dataset, client=...): one client for each of its {len(data)} rows")
        names = _ids(client, "client=")
        for who in np.unique(names):
            yield who, _items(data, np.flatnonzero(names == who), x, y)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        yield from ((f"{place:0{len(str(len(data) - 1))}d}", part) for place, part in enumerate(data))
    else:
        raise UserError(
            f"population({type(data).__name__}): give a dict of client -> (x, y), a table with client= and y=, a "
            "dataset with client=, or a list of parts"
        )


def inputs_and_targets(rows: Any, who: Any, x: Any, y: Any) -> tuple[Any, Array]:
    """The inputs and targets of one client's rows."""
    frame = _frame(rows)
    if frame is not None:
        if not isinstance(y, str) or y not in frame:
            raise UserError(f"population(): the rows of client {str(who)!r} have no column {y!r}; name it as y=")
        chosen = [x] if isinstance(x, str) else list(x) if x else [column for column in frame if column != y]
        return _columns(frame, chosen, None), as_targets(frame[y])
    if isinstance(rows, Mapping):
        names = _names(x, y)
        if missing := set(names) - set(rows):
            raise UserError(f"population(): the rows of client {str(who)!r} have no {sorted(missing)[0]!r}")
        return as_arrays(rows[names[0]]), as_targets(rows[names[1]])
    if isinstance(rows, tuple) and len(rows) == 2:
        return as_arrays(rows[0]), as_targets(rows[1])
    if isinstance(rows, tuple | np.ndarray | torch.Tensor):
        found = f"a tuple of {len(rows)}" if isinstance(rows, tuple) else f"one array of shape {tuple(rows.shape)}"
        raise UserError(f"population(): the rows of client {str(who)!r} are {found}, not (x, y)")
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):
        return _items(rows, np.arange(len(rows)), x, y)
    raise UserError(f"population(): the rows of client {str(who)!r} are a {type(rows).__name__}, not (x, y)")


def _frame(data: Any) -> dict[str, Any] | None:
    """The columns of a DataFrame, Arrow table or Hugging Face dataset, by name; None for anything else."""
    names = getattr(data, "column_names", None)
    if isinstance(names, list):  # Arrow and Hugging Face
        return {name: data[name].to_numpy() if hasattr(data[name], "to_numpy") else list(data[name]) for name in names}
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        twice = data.columns[data.columns.duplicated()]
        if len(twice):
            raise UserError(f"population(): two columns are called {twice[0]!r}; give each a name of its own")
        return {str(name): data[name].to_numpy() for name in data.columns}
    return None


def _columns(frame: dict[str, Any], chosen: list[str], rows: Array | None) -> Any:
    """Some columns of numbers side by side, one column of arrays, or several columns of arrays by name."""
    picked = [frame[name] if rows is None else [frame[name][row] for row in rows] for name in chosen]
    if len(picked) > 1 and all(len(column) and np.ndim(column[0]) for column in picked):
        return {name: _stacked(column, f"column {name!r}") for name, column in zip(chosen, picked)}
    if len(picked) == 1 and len(picked[0]) and np.ndim(picked[0][0]):
        return _stacked(picked[0], f"column {chosen[0]!r}")
    for name, column in zip(chosen, picked):
        if np.asarray(column).dtype.kind not in "fiub":
            other = next((value for value in column if not isinstance(value, int | float | np.number)), column[0])
            raise UserError(
                f"population(): column {name!r} holds what is no number ({other!r}); name the others with x=, or "
                "compare the table itself, which turns categories and dates into features"
            )
    return np.stack([np.asarray(column) for column in picked], 1)


def _names(x: Any, y: Any) -> tuple[str, str]:
    """The names of inputs and targets in rows with named values."""
    if x is not None and not isinstance(x, str):
        raise UserError(f"population(x={x!r}): rows with named values have one for the inputs; name that")
    return x or "x", y or "y"


def class_names(data: Any, y: Any) -> dict[int, str]:
    """The names of classes that are numbers, where a Hugging Face dataset, or the first of several, knows them."""
    if isinstance(data, Mapping):
        data = next(iter(data.values()))
    elif isinstance(data, list | tuple):
        data = data[0]
    features = getattr(data, "features", None)
    kind = features.get(y) if isinstance(features, Mapping) else None
    return dict(enumerate(getattr(kind, "names", None) or ()))


def _items(data: Any, rows: Array, x: Any, y: Any) -> tuple[Array, Array]:
    """The rows of a map-style dataset: (x, y), or values by name."""
    found = [data[int(row)] for row in rows]
    if found and all(isinstance(item, Mapping) for item in found):
        names = _names(x, y)
        for item in found:
            if missing := set(names) - set(item):
                known = ", ".join(map(str, item))
                raise UserError(f"population(): a row has no {sorted(missing)[0]!r}, but {known}; name them: x=, y=")
        found = [(item[names[0]], item[names[1]]) for item in found]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in found):
        raise UserError(f"population(): a row of the dataset is a {type(found[0]).__name__}, not (x, y)")
    return _stacked([item[0] for item in found], "x"), as_targets([item[1] for item in found])


def _named(inputs: Any) -> list[str]:
    """The names of several inputs; none of one array."""
    return list(inputs) if isinstance(inputs, dict) else []


def first_row(inputs: Any) -> Any:
    """The first row."""
    return {name: value[:1] for name, value in inputs.items()} if isinstance(inputs, dict) else inputs[:1]


def as_arrays(values: Any) -> Any:
    """An array, or several by name."""
    if isinstance(values, Mapping):
        return {str(name): _array(value) for name, value in values.items()}
    return _array(values)


def several_inputs(parts: list[tuple[str, Any, Array]]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Rows with several inputs as columns, the first of them x. Whole numbers stay whole."""
    first, names = parts[0], _named(parts[0][1])
    for who, inputs, targets in parts:
        if (found := _named(inputs)) != names:
            said = [", ".join(map(repr, those)) or "one array" for those in (found, names)]
            raise UserError(
                f"client {who!r} has the inputs {said[0]}, client {first[0]!r} {said[1]}; all need the same"
            )
        for name in names:
            check_rows(who, inputs[name], targets, first[0], first[1][name])
    if not all(name.isidentifier() and name not in RESERVED for name in names):
        raise UserError(f"population(): inputs named {names}: each a word, and none of {', '.join(RESERVED)}")
    whole = {name: np.concatenate([inputs[name] for _, inputs, _ in parts]) for name in names}
    kept = {name: value.astype(np.float32 if value.dtype.kind == "f" else np.int64) for name, value in whole.items()}
    about = {"input": "named", "inputs": names, "features": names, "numeric": [False] * len(names)}
    return {"x": kept.pop(names[0]), **kept}, about


def _array(values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError:  # lists of unequal lengths
        raise UserError(f"population(): {UNEQUAL}, and {_lengths(values)}") from None


def _stacked(rows: Sequence[Any], what: str) -> Array:
    """Rows of the same shape as one array."""
    found = [_array(row) for row in rows]
    for place, row in enumerate(found):
        if row.shape != found[0].shape:
            raise UserError(
                f"population(): {UNEQUAL}, and {what} has the shape {found[0].shape} in a client's row 0 and "
                f"{row.shape} in its row {place}"
            )
    return np.stack(found)


def _lengths(values: Any) -> str:
    lengths = [len(row) if hasattr(row, "__len__") else 1 for row in values]
    return f"here are rows of {min(lengths)} and of {max(lengths)} numbers"


def _ids(given: Any, what: str) -> Array:
    """Each row's client as text."""
    ids = [*given]
    for row, who in enumerate(ids):
        if _missing(who):
            raise UserError(f"population(): row {row} has no client ({what}: {who!r}); leave such rows out")
    return np.asarray([str(who) for who in ids])


def check_names(names: list[str]) -> None:
    """Refuses ids that become one: 1 and "1", or texts that differ in what they end with unseen."""
    kept = [name.rstrip("\0") for name in names]
    if len(set(kept)) < len(kept):
        twice = next(name for name in kept if kept.count(name) > 1)
        raise UserError(f"population(): two clients are called {twice!r} as text; give each a name of its own")


def as_targets(values: Any) -> Array:
    """Targets as they are given: a list of a text and a NaN would be an array of texts otherwise."""
    return np.asarray(values, dtype=object) if isinstance(values, list | tuple) else _array(values)


def as_labels(who: Any, targets: Array) -> Array:
    """Targets that are Python objects as texts or as numbers; an error if any is missing."""
    if targets.dtype.kind != "O":
        return targets
    found = [label.item() if isinstance(label, torch.Tensor | np.ndarray) else label for label in targets.ravel()]
    for row, label in enumerate(found):
        if _missing(label):
            raise UserError(f"client {str(who)!r}, row {row}: y is {label!r}, no target; leave such rows out")
    texts = [isinstance(label, str) for label in found]
    if any(texts) and not all(texts):
        raise UserError(f"client {str(who)!r} has targets that are texts and others that are none; make them alike")
    return np.asarray(found).reshape(targets.shape)


def _missing(value: Any) -> bool:
    return value is None or str(value) in ("<NA>", "NaT") or bool(value != value)


def check_alike(parts: list[tuple[str, Any, Array]]) -> None:
    """Refuses targets that are numbers of one client and texts of another: together they would be texts."""
    first = parts[0]
    for who, _, targets in parts:
        if (targets.dtype.kind in "OUS") != (first[2].dtype.kind in "OUS"):
            raise UserError(
                f"client {who!r} has targets of {targets.dtype}, client {first[0]!r} of {first[2].dtype}; they have to "
                "be texts of all clients, or numbers of all"
            )


def check_rows(who: str, inputs: Array, targets: Array, first: str, like: Array) -> None:
    if inputs.ndim < 2 or targets.ndim != 1 or len(inputs) != len(targets):
        raise UserError(
            f"client {who!r} has x of shape {inputs.shape} and y of shape {targets.shape}; they have to be "
            "(rows, features) and (rows,)"
        )
    if not len(targets):
        raise UserError(f"client {who!r} has no rows; leave it out")
    if inputs.shape[1:] != like.shape[1:]:
        raise UserError(
            f"client {who!r} has rows of shape {inputs.shape[1:]}, client {first!r} of {like.shape[1:]}; all clients "
            "need the same"
        )
    for what, values in (("x", inputs), ("y", targets)):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1))[0])
            raise UserError(f"client {who!r}, row {row}: {what} is not finite; leave such rows out, or fill them in")
        if values.dtype.kind == "f" and max(values.max(), -values.min()) > LARGEST:
            raise UserError(
                f"client {who!r}: {what} has numbers beyond {LARGEST:.1g}, which single precision cannot hold"
            )
    if inputs.dtype.kind not in "fiub":
        raise UserError(f"client {who!r} has x of {inputs.dtype}, which are no numbers")


def inferred_task(targets: Array) -> Targets:
    if targets.dtype.kind in "OUSb":
        return "classification"
    if targets.dtype.kind == "f" and not np.array_equal(targets, np.round(targets)):
        return "regression"
    raise UserError("population(): targets are whole numbers; say task='classification' or task='regression'")


def as_numbers(values: Array, what: str) -> Array:
    try:
        return values.astype(np.float32)
    except (TypeError, ValueError):
        raise UserError(f"the {what} are no numbers ({values.ravel()[0]!r})") from None


def feature_names(data: Any, x: Any, inputs: Array) -> list[str] | None:
    """The names of the features, where the data have them."""
    named = list(x) if x and not isinstance(x, str) else None
    return named if named and inputs.ndim == 2 and len(named) == inputs.shape[1] else None


def one_input(inputs: Array, features: Sequence[str] | None) -> tuple[Array, dict[str, Any]]:
    """Rows in the networks' form, with their description: a table of float32, or images with channels first."""
    if inputs.ndim == 2:
        names = list(features) if features else [f"x{place}" for place in range(inputs.shape[1])]
        if len(names) != inputs.shape[1]:
            raise UserError(f"there are {len(names)} names of features, and rows of {inputs.shape[1]}")
        about = {"input": "table", "features": names, "numeric": [True] * len(names)}
        return np.ascontiguousarray(inputs, dtype=np.float32), about
    shape = inputs.shape[1:]
    if len(shape) == 2:
        inputs, shape = inputs[:, None], (1, *shape)
    elif len(shape) == 3 and shape[0] not in CHANNELS and shape[2] in CHANNELS:
        inputs, shape = inputs.transpose(0, 3, 1, 2), (shape[2], *shape[:2])
    if len(shape) != 3 or shape[0] not in CHANNELS:
        raise UserError(
            f"rows of shape {inputs.shape[1:]} are neither features nor images of {CHANNELS[0]} or {CHANNELS[1]} "
            "channels; flatten them into (rows, features)"
        )
    flat = np.ascontiguousarray(inputs.reshape(len(inputs), -1))
    pixels = flat.shape[1]
    _, height, width = shape
    about = {
        "input": "image", **({"side": height} if height == width else {"height": height, "width": width}),
        "channels": shape[0],
        "features": [f"pixel {i}" for i in range(pixels)], "numeric": [False] * pixels,
    }  # fmt: skip
    return (flat if flat.dtype == np.uint8 else flat.astype(np.float32)), about


def groups_of(group: Mapping[Any, str], owners: list[str]) -> list[str]:
    """Each row's group; clients may be numbers, as in the data."""
    named = {str(who): str(label) for who, label in group.items()}
    for who in dict.fromkeys(owners):
        if who not in named:
            raise UserError(f"population(group=...): client {who!r} has no group")
    return [named[who] for who in owners]
