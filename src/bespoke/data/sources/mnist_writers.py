"""MNIST by writer: the label files of QMNIST (Yadav and Bottou 2019) say who wrote each of MNIST's digits.

Row i of a QMNIST label file describes MNIST's image i; its columns are 0 class, 1 HSF series, 2 writer, and five more.
The writers of MNIST's training images (539) and of its test images (297) are different people.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.partition import assign, client_names
from bespoke.data.population import Population
from bespoke.data.sources.formats.roles import TEST, TRAIN
from bespoke.data.sources.registry import damaged, describe, find_file

_DTYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}


def load() -> Population:
    """MNIST's 70,000 digits, a client per writer; the column `role` is 0 for training writers, 2 for test writers."""
    images, labels, writers, series, roles = [], [], [], [], []
    for mnist_name, qmnist_name, part_role in (("train", "train", TRAIN), ("t10k", "test", TEST)):
        pictures, classes = read_mnist(mnist_name, "mnist-writers")
        path = find_file(f"mnist_writers/qmnist-{qmnist_name}-labels-idx2-int.gz", "mnist-writers")
        rows = read_idx(path, ndim=2)
        # QMNIST's test file goes on after MNIST's 10,000 test images.
        if rows.shape[1] != 8 or len(rows) < len(classes):
            raise damaged(path, f"{rows.shape[0]} rows of {rows.shape[1]}", f"{len(classes)} rows or more of 8 columns")
        rows = rows[: len(classes)]
        differ = np.flatnonzero(rows[:, 0] != classes)
        if len(differ):
            found = f"class {rows[differ[0], 0]} at row {differ[0]} ({len(differ)} rows differ)"
            raise damaged(path, found, f"MNIST's label {classes[differ[0]]}")
        images.append(pictures)
        labels.append(classes)
        writers.append(rows[:, 2])
        series.append(rows[:, 1])
        roles.append(np.full(len(classes), part_role, dtype=np.uint8))
    writer, role = np.concatenate(writers).astype(np.int64), np.concatenate(roles)
    counts = {"train": len(np.unique(writer[role == TRAIN])), "test": len(np.unique(writer[role == TEST]))}
    about = _about(
        "mnist-writers",
        roles=counts,
        role="the column 'role' of a client's rows: 0 for a training writer, 2 for a test writer",
        notes=[
            f"{counts['train']} writers of MNIST's training images and {counts['test']} other writers of its test "
            "images; the column 'role' tells them apart."
        ],
    )
    # NIST's special database 3 (hsf_0 to hsf_3) and 7 (hsf_4)
    group = np.where(np.concatenate(series) == 4, "high-school students", "census employees")
    columns: dict[str, NDArray[Any]] = {
        "x": np.concatenate(images),
        "y": np.concatenate(labels).astype(np.int64),
        "role": role,
    }
    return Population.build(columns, np.char.zfill(writer.astype(str), 4), group=group, about=about)


def mnist(
    partition: str = "dirichlet",
    clients: int = 100,
    alpha: float = 0.5,
    per_client: int = 2,
    minimum: int = 1,
    seed: int = 0,
) -> Population:
    """MNIST's 70,000 digits dealt out to clients; see bespoke.data.partition for the options."""
    parts = [read_mnist(part, "mnist") for part in ("train", "t10k")]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts))
    owner = assign(labels, partition, clients, alpha, per_client, minimum, seed)
    used = owner >= 0
    notes = [f"Clients are artificial: rows were dealt out to {clients} clients by the partitioner {partition!r}."]
    if unused := int((~used).sum()):
        notes.append(f"{unused} rows belong to no client and are left out.")
    columns: dict[str, NDArray[Any]] = {"x": images[used], "y": labels[used].astype(np.int64)}
    return Population.build(columns, client_names(owner[used]), about=_about("mnist", notes=notes))


def _about(name: str, /, **rest: Unpack[About]) -> About:
    about: About = {
        "input": "image",
        "side": 28,
        "channels": 1,
        "classes": [str(digit) for digit in range(10)],
        "features": [f"pixel {i}" for i in range(784)],
        "numeric": [False] * 784,
        "target": "digit",
        **rest,
    }
    return describe(name, **about)


def read_mnist(part: str, source: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """MNIST's images [rows, 784] and labels; `part` is 'train' or 't10k'."""
    path = find_file(f"mnist/{part}-images-idx3-ubyte.gz", source)
    labels_path = find_file(f"mnist/{part}-labels-idx1-ubyte.gz", source)
    images, labels = read_idx(path, ndim=3), read_idx(labels_path, ndim=1)
    if images.shape[1:] != (28, 28):
        raise damaged(path, f"images of {images.shape[1]} x {images.shape[2]}", "28 x 28")
    if len(images) != len(labels):
        raise damaged(labels_path, f"{len(labels)} labels", f"{len(images)}, one per image")
    if labels.max(initial=0) > 9:
        raise damaged(labels_path, f"label {labels.max()}", "digits 0 to 9")
    return images.reshape(-1, 784), labels


def read_idx(path: Path, ndim: int) -> NDArray[Any]:
    """An array in LeCun's idx format, gzipped: two zero bytes, type, dimensions, their sizes (big-endian), the data."""
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error, "a whole gzip file") from None
    start = 4 + 4 * ndim
    if len(content) < start or content[:2] != b"\0\0" or content[2] not in _DTYPES or content[3] != ndim:
        raise damaged(path, f"the header {content[:4].hex()}", f"an idx file of {ndim} dimensions")
    dtype = _DTYPES[content[2]]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    if len(content) - start != math.prod(shape) * dtype.itemsize:
        raise damaged(path, f"{len(content) - start} bytes of data", f"{math.prod(shape) * dtype.itemsize} for {shape}")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)
