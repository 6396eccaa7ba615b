"""EMNIST by writer (Cohen et al. 2017; LEAF), from TensorFlow Federated's file: digits and letters, 62 classes.

As in Motley, only the writers' training images are used, the background is 1, and 400 writers validate and 500 are
tested: the ids, sorted and shuffled with seed 13, as its code does it.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import Population
from bespoke.data.sources.formats.roles import motley_roles, role_facts
from bespoke.data.sources.formats.tff import find_part, read_clients
from bespoke.data.sources.registry import damaged, describe

CLASSES = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
LAYOUT = "examples/<WRITER>/pixels and label"


def load(validation: int = 400, test: int = 500) -> Population:
    """3,400 writers; the column `role` says who trains, validates and is tested."""
    part = find_part("emnist", "fed_emnist_train.h5", "emnist_all.sqlite", "train")
    path = part.path
    images, labels, writers = [], [], []
    for writer, arrays in read_clients(part, "emnist", ("pixels", "label"), LAYOUT):
        pixels, label = arrays["pixels"], arrays["label"].reshape(-1)
        if pixels.shape[1:] == (784,):  # as a tf.Example has them
            pixels = pixels.reshape(-1, 28, 28)
        where = f"examples/{writer}"
        if pixels.shape[1:] != (28, 28) or not len(pixels):
            raise damaged(path, f"{where}/pixels of shape {pixels.shape}", "(images, 28, 28)")
        images.append(as_bytes(pixels.reshape(-1, 784), path, where))
        labels.append(checked_labels(label, len(images[-1]), path, where))
        writers.append(writer)
    if not writers:
        raise damaged(path, "no writers", LAYOUT)
    sizes = [len(label) for label in labels]
    roles = motley_roles(writers, validation, test, "emnist")
    about = describe_characters(
        "emnist",
        model={"name": "fedavg-cnn"},
        notes=[
            "Pixels are 255 where the paper is empty, as published.",
            "Only the published training images are used.",
        ],
        **role_facts(roles),
    )
    columns: dict[str, NDArray[Any]] = {
        "x": np.concatenate(images), "y": np.concatenate(labels), "role": np.repeat(roles, sizes)
    }  # fmt: skip
    return Population.build(columns, np.repeat(writers, sizes), about=about)


def as_bytes(pixels: NDArray[Any], path: Path, where: str) -> NDArray[np.uint8]:
    """Pixels 0 ... 1, which were bytes before they were published as floats, as bytes again."""
    if pixels.dtype.kind not in "fiu" or not len(pixels) or not ((pixels >= 0) & (pixels <= 1)).all():
        raise damaged(path, f"{where}: pixels that are not from 0 to 1", "numbers from 0 to 1, with 1 the background")
    return np.round(pixels * 255.0).astype(np.uint8)


def checked_labels(labels: NDArray[Any], rows: int, path: Path, where: str) -> NDArray[np.int64]:
    """A class 0 ... 61 for each row."""
    if len(labels) != rows:
        raise damaged(path, f"{where}: {len(labels)} labels for {rows} images", "one per image")
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0 or labels.max(initial=0) >= len(CLASSES):
        found = f"{where}: labels of type {labels.dtype} from {labels.min()} to {labels.max()}"
        raise damaged(path, found, f"whole numbers from 0 to {len(CLASSES) - 1}")
    return labels.astype(np.int64)


def describe_characters(source: str, /, **rest: Unpack[About]) -> About:
    """What emnist and femnist say of themselves."""
    about: About = {
        "input": "image",
        "side": 28,
        "channels": 1,
        "classes": CLASSES,
        "features": [f"pixel {i}" for i in range(784)],
        "numeric": [False] * 784,
        "target": "character",
        **rest,
    }
    return describe(source, **about)
