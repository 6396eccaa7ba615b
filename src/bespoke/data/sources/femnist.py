"""FEMNIST by writer, from LEAF's JSON files (Caldas et al. 2018): users, num_samples, user_data -> x, y.

The files of train/ come before those of test/. Where LEAF split by user, so that nobody is in both, writers of test/
are test clients; where it split each writer's images, the writers own both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import RoleFacts
from bespoke.data.population import Population
from bespoke.data.sources.emnist import as_bytes, checked_labels, describe_characters
from bespoke.data.sources.formats.roles import TEST, TRAIN, role_facts
from bespoke.data.sources.registry import damaged, find_folder

LAYOUT = "LEAF's users, num_samples and user_data"


def load() -> Population:
    """The writers of femnist/train/*.json and femnist/test/*.json."""
    train = _read(find_folder("femnist/train", "femnist"))
    test = _read(find_folder("femnist/test", "femnist"))
    apart = not {writer for writer, _, _ in train} & {writer for writer, _, _ in test}
    parts = [*train, *test]
    sizes = [len(labels) for _, _, labels in parts]
    columns: dict[str, NDArray[Any]] = {
        "x": np.concatenate([images for _, images, _ in parts]),
        "y": np.concatenate([labels for _, _, labels in parts]),
    }
    facts: RoleFacts = {}
    notes = ["Pixels are 255 where the paper is empty, as published."]
    if apart:
        roles = np.repeat(np.array([TRAIN, TEST], dtype=np.uint8), [len(train), len(test)])
        columns["role"] = np.repeat(roles, sizes)
        facts = role_facts(roles)
        notes.append("Writers of test/ are test clients: no writer is in both folders.")
    else:
        notes.append("A writer's images of train/ stand before those of test/: split.order = 'stored' keeps them so.")
    about = describe_characters("femnist", model={"name": "fedavg-cnn"}, notes=notes, **facts)
    return Population.build(columns, np.repeat([writer for writer, _, _ in parts], sizes), about=about)


def _read(folder: Path) -> list[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Writer, images and labels, of all files of a folder."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise damaged(folder, f"no JSON file among {len(list(folder.iterdir()))}", "LEAF's all_data_*.json")
    found = []
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
        except ValueError as error:
            raise damaged(path, f"no readable JSON ({error})", LAYOUT) from None
        if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
            keys = sorted(content)[:5] if isinstance(content, dict) else type(content).__name__
            raise damaged(path, f"the keys {keys}", LAYOUT)
        if len(content["users"]) != len(content["num_samples"]):
            raise damaged(path, f"{len(content['users'])} users, {len(content['num_samples'])} num_samples", "as many")
        for writer, count in zip(content["users"], content["num_samples"]):
            rows = content["user_data"].get(writer, {})
            if not {"x", "y"} <= rows.keys():
                raise damaged(path, f"user {writer!r} without x and y", "user_data -> x, y")
            where = f"user {writer!r}"
            images, labels = _array(rows["x"]), _array(rows["y"])
            if images.shape != (count, 784):
                raise damaged(path, f"{where} with x of shape {images.shape}", f"({count}, 784), as num_samples says")
            found.append((writer, as_bytes(images, path, where), checked_labels(labels, count, path, where)))
    return found


def _array(rows: Any) -> NDArray[Any]:
    try:
        return np.asarray(rows)
    except ValueError:  # lists of different lengths
        return np.zeros(len(rows))
