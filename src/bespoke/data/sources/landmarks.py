"""Landmarks by photographer (Hsu et al. 2020, from Google Landmarks v2; Weyand et al. 2020): which landmark is it?

A CSV maps user_id, image_id and class; images/<image_id>.jpg are the pictures. As in Motley they have 128 x 128 pixels
(of the central 87.5 % of each side, the published pipeline's evaluation; its random crops for training are left out),
and 50 photographers validate, 100 are tested. The published test file has no photographers; test = "file" makes it one
client instead of testing photographers. Decoding takes long, so its result is kept in ~/.cache/bespoke/decoded.
"""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.formats.pictures import read_picture
from bespoke.data.sources.formats.roles import TEST, motley_roles, role_facts
from bespoke.data.sources.registry import at_least, damaged, describe, find_file, find_folder
from bespoke.storage import settle

VERSIONS = {  # train file, test file, classes
    "gld160k": ("federated_train.csv", "test.csv", 2028),
    "gld23k": ("mini_gld_train_split.csv", "mini_gld_test.csv", 203),
}
CENTRE = 0.875
Row = tuple[str, str, int]  # user, image, class


def load(
    version: Literal["gld160k", "gld23k"] = "gld160k",
    side: int = 128,
    validation_clients: int = 50,
    test_clients: int = 100,
    test: Literal["photographers", "file"] = "photographers",
) -> Population:
    """1,262 photographers (gld23k: 233); the column `role` says who trains, validates and is tested."""
    at_least("landmarks", 32, side=side)
    train_file, test_file, classes = VERSIONS[version]
    rows = _rows(find_file(f"landmarks/{train_file}", "landmarks"), classes, ("user_id", "image_id", "class"))
    users = sorted({user for user, _, _ in rows})
    drawn = motley_roles(users, validation_clients, 0 if test == "file" else test_clients, "landmarks")
    roles = dict(zip(users, drawn.tolist()))
    if test == "file":
        rows += _rows(find_file(f"landmarks/{test_file}", "landmarks"), classes, ("image_id", "class"))
        roles[test_file] = TEST
    rows = sorted(rows, key=lambda row: row[0])  # a population's order: its images need not be moved again
    folder = find_folder("landmarks/images", "landmarks")
    images = _decoded([folder / f"{image}.jpg" for _, image, _ in rows], side)
    about = describe(
        "landmarks",
        input="image",
        side=side,
        channels=3,
        classes=[str(number) for number in range(classes)],
        features=[f"pixel {i}" for i in range(3 * side * side)],
        numeric=[False] * (3 * side * side),
        target="landmark",
        model={"name": "mobilenet"},
        notes=[f"Pictures are the central {CENTRE:.1%} of each side, scaled to {side} x {side}; none is augmented."],
        **role_facts(np.array(list(roles.values()), dtype=np.uint8)),
    )
    columns: dict[str, NDArray[Any]] = {
        "x": images,
        "y": np.array([label for _, _, label in rows], dtype=np.int64),
        "role": np.array([roles[user] for user, _, _ in rows], dtype=np.uint8),
    }
    return Population.build(columns, [user for user, _, _ in rows], about=about)


def _rows(path: Path, classes: int, columns: tuple[str, ...]) -> list[Row]:
    """The rows of a mapping; without users, all belong to a client named after the file."""
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        if not set(columns) <= set(reader.fieldnames or ()):
            raise damaged(path, f"the columns {reader.fieldnames}", ", ".join(columns))
        rows = []
        for number, row in enumerate(reader, start=2):
            label = row["class"] or ""
            if not label.isdecimal() or int(label) >= classes or not row["image_id"]:
                found = f"image {row['image_id']!r} of class {label!r} in line {number}"
                raise damaged(path, found, f"an image and a class from 0 to {classes - 1}")
            rows.append((row["user_id"] if "user_id" in columns else path.name, row["image_id"], int(label)))
    if not rows:
        raise damaged(path, "no rows", "a row per image")
    return rows


def _decoded(paths: Sequence[Path], side: int) -> NDArray[np.uint8]:
    """All images as a mapped array: those of Landmarks take eight gigabytes."""
    digest = hashlib.sha256()
    missing = []
    for path in paths:
        try:
            status = path.stat()
            digest.update(f"{path}:{status.st_size}:{status.st_mtime_ns}\n".encode())
        except OSError:
            missing.append(path.name)
    if missing:
        found = f"no {missing[0]} ({len(missing)} of {len(paths)} images are missing)"
        raise damaged(paths[0].parent, found, "every image_id of the mapping as a .jpg")
    kept = Path.home() / ".cache" / "bespoke" / "decoded" / f"landmarks-{side}-{digest.hexdigest()[:16]}.npy"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_name(f".{kept.name}.{os.getpid()}.partial")
        try:
            shape = (len(paths), 3 * side * side)
            images = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
            for place, path in enumerate(paths):
                images[place] = read_picture(path, side, "RGB", "landmarks", CENTRE)
            images.flush()
            del images
            settle(temporary, kept)
        finally:
            temporary.unlink(missing_ok=True)
    pixels: NDArray[np.uint8] = np.load(kept, mmap_mode="c")  # copy on write: torch wants memory that can be written to
    return pixels
