"""Reads a user's own pictures by client: a folder of image files, labelled by folders or by a table.

    photos/anna/cat/1.png              client "folder", target "folder": the client's folder, in it one for each class
    photos/anna/1.png, labels.csv      target "kind": a column of the one table in photos/, whose column `file` names
                                       the picture, as in anna/1.png; the client may be a column, too

All pictures become rows of one size. A picture of another size is resized as a whole, by Pillow's bilinear filter: its
proportions change, nothing is cut off. Pictures lie as their camera says (EXIF). They are grey if all files are.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import Population
from bespoke.data.tables.read import read_file
from bespoke.data.tables.table import TableTask, clients_of, drop_unusable, target_of
from bespoke.errors import UserError, needs_extra, unknown

FOLDER = "folder"  # in place of a column's name
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
MOST_SIDE = 128  # of pictures that are taken as they are
GREY = ("1", "L", "LA", "La")  # Pillow's modes


def open_pictures(
    path: str | Path,
    client: str = FOLDER,
    target: str = FOLDER,
    *,
    task: TableTask | None = None,
    size: int | list[int] | None = None,
    colour: bool | None = None,
) -> Population:
    """Pictures as a population. size: (lines, columns), or one number for both; default: as all of them are."""
    path, notes = Path(path), list[str]()
    files = _files(path, notes)
    table, column, what = _labelled(path, files, client, target, notes)
    table = drop_unusable(table, [column], what, path, notes)
    ids, code = clients_of(table, [column], path)
    y, inferred, levels = target_of(table[what], what, task, notes)
    rows, more = _read(path, table["file"].to_pylist(), size, colour, notes)
    about: About = {
        "name": path.resolve().name, "title": f"{path.resolve().name}: {what} of pictures by {column}",
        "task": inferred, "target": what, "licence": "the user's own", "notes": notes,
        "standardize": {"features": "none", "target": inferred == "regression"},
    }  # fmt: skip
    learned = ["the size and colour of pictures"] if size is None or colour is None else []
    if levels is not None:
        about["classes"], learned = levels, ["class names", *learned]
    if learned:
        about["learned"] = f"{' and '.join(learned)} are learned from clients without noise"
    return Population.build({"x": rows, "y": y}, ids[code], about={**about, **more})


def _files(path: Path, notes: list[str]) -> list[str]:
    """The pictures of a folder, by their paths within it."""
    everything = (file for file in path.rglob("*") if file.is_file())
    seen = [file.relative_to(path) for file in everything]
    seen = [file for file in seen if not any(part.startswith(".") for part in file.parts)]
    pictures = sorted(file.as_posix() for file in seen if file.suffix.lower() in SUFFIXES)
    if not pictures:
        raise UserError(
            f"{path} holds no pictures ({', '.join(SUFFIXES)}); expected {path.name}/CLIENT/CLASS/PICTURE.png, or "
            f"{path.name}/CLIENT/PICTURE.png with a table of labels (without a target a folder is one of texts)"
        )
    others = [file for file in seen if file.suffix.lower() not in SUFFIXES and len(file.parts) > 1]
    if others:
        notes.append(f"Left out: {len(others)} files that are no pictures, such as {others[0].as_posix()}.")
    return pictures


def _labelled(path: Path, files: list[str], client: str, target: str, notes: list[str]) -> tuple[pa.Table, str, str]:
    """One row per picture with its file, client and target, and the names of these two columns."""
    parts = [PurePosixPath(file).parts for file in files]
    levels = (client == FOLDER) + (target == FOLDER) + 1
    # the class is the folder that a picture lies in, so that nothing may lie between it and the client's
    strange = [f for f, found in zip(files, parts) if len(found) < levels or (target == FOLDER and len(found) > levels)]
    if strange:
        layout = "/".join(name for name, held in (("CLIENT", client), ("CLASS", target)) if held == FOLDER)
        raise UserError(f"{path / strange[0]} is not where a picture is expected: {path.name}/{layout}/PICTURE")
    found: dict[str, Any] = {"file": files}
    if client == FOLDER:
        found["client"] = [part[0] for part in parts]
    if target == FOLDER:
        found["class"] = [part[-2] for part in parts]
    if client == target == FOLDER:
        return pa.table(found), "client", "class"
    labels = _labels(path)
    for name in ("file", *(name for name in (client, target) if name != FOLDER)):
        if name not in labels.column_names:
            raise unknown("column", name, labels.column_names, where="the table of labels")
    if client == target or "file" in (client, target) or (client, target) in ((FOLDER, "client"), ("class", FOLDER)):
        raise UserError(f"client {client!r}, target {target!r}: they have to be two columns besides file; rename one")
    listed = [str(name).replace("\\", "/").removeprefix("./") for name in labels["file"].to_pylist()]
    if twice := [name for name, times in Counter(listed).items() if times > 1]:
        raise UserError(f"the table of labels names the picture {twice[0]} several times; a picture has one label")
    place = {name: row for row, name in enumerate(listed)}
    if missing := [name for name in listed if name not in set(files)]:
        raise UserError(f"the table of labels names {missing[0]}, but the picture is not in {path}")
    kept = np.array([file in place for file in files])
    if not kept.all():
        notes.append(f"Left out: {int((~kept).sum())} pictures that the table of labels does not name.")
    table = pa.table({name: pa.array(values).filter(pa.array(kept)) for name, values in found.items()})
    rows = labels.take(pa.array([place[file] for file in files if file in place]))
    for name in (client, target):
        if name != FOLDER:
            table = table.append_column(name, rows[name])
    return table, "client" if client == FOLDER else client, "class" if target == FOLDER else target


def _labels(path: Path) -> pa.Table:
    tables = sorted(file for file in path.iterdir() if file.suffix.lower() in TABLES and not file.name.startswith("."))
    if len(tables) != 1:
        listed = ", ".join(file.name for file in tables) or "none"
        raise UserError(
            f"{path} has to hold one table of labels beside the clients' folders, with a column file (CLIENT/PICTURE) "
            f"and the columns that are named; found {listed}"
        )
    return read_file(tables[0], [])


def _read(
    path: Path, files: list[str], size: int | list[int] | None, colour: bool | None, notes: list[str]
) -> tuple[NDArray[np.uint8], About]:
    """The pictures as rows of bytes: channels, then lines, then columns."""
    seen = [_opened(path / file, draft=True)[1:] for file in files]
    shapes = Counter(shape for shape, _ in seen)
    if colour is None:
        colour = not all(mode in GREY for _, mode in seen)
    (lines, columns), _ = shapes.most_common(1)[0]
    if size is not None:
        lines, columns = (size, size) if isinstance(size, int) else (size[0], size[1])
    elif len(shapes) > 1 or max(lines, columns) > MOST_SIDE:
        low, high = min(shapes), max(shapes)
        found = f"from {low[0]} x {low[1]} to {high[0]} x {high[1]}" if len(shapes) > 1 else f"{lines} x {columns}"
        raise UserError(
            f"the pictures of {path} are {found} (lines x columns); say to which size they are to be resized, as in "
            "data.size = 32 or data.size = [24, 32] (on the command line: --set data.size=32)"
        )
    rows = np.empty((len(files), (3 if colour else 1) * lines * columns), np.uint8)
    for row, file in zip(rows, files):
        row[:] = _pixels(path / file, (lines, columns), colour)
    resized = sum(many for shape, many in shapes.items() if shape != (lines, columns))
    if resized:
        notes.append(f"{resized} pictures were resized to {lines} x {columns}, whole: their proportions may change.")
    plane: About = {"side": lines} if lines == columns else {"height": lines, "width": columns}
    width = rows.shape[1]
    return rows, {
        "input": "image", "channels": 3 if colour else 1, "features": [f"pixel {i}" for i in range(width)],
        "numeric": [False] * width, **plane,
    }  # fmt: skip


def _opened(path: Path, draft: bool = False) -> tuple[Any, tuple[int, int], str]:
    """(the picture as it is to be seen, (lines, columns), Pillow's mode); a draft is not decoded."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise needs_extra("Pillow", "images", "a folder of pictures") from None
    try:
        with Image.open(path) as file:
            mode = str(file.mode)
            if mode.startswith(("I", "F")):
                raise UserError(f"{path} has more than 8 bits a channel (mode {mode}); convert it to 8 bits first")
            if mode == "P":  # a palette: grey if all its colours are
                mode = "RGB"
            turned = file.getexif().get(0x0112, 1) >= 5  # lies on its side
            shape = (file.width, file.height) if turned else (file.height, file.width)
            return (None if draft else ImageOps.exif_transpose(file)), shape, mode
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} is not a readable picture ({error}); repair it or take it out of the folder") from None


def _pixels(path: Path, size: tuple[int, int], colour: bool) -> NDArray[np.uint8]:
    from PIL import Image

    image, _, _ = _opened(path)
    image = image.convert("RGB" if colour else "L")
    if (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = np.atleast_3d(np.asarray(image, dtype=np.uint8))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)).reshape(-1)
