"""TensorFlow Federated's SQLite files: tf.Example by its bytes, and the same populations as from the HDF5 files."""

from __future__ import annotations

import lzma
import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.data.sources.formats.protobuf import tf_example
from bespoke.data.sources.registry import load_source
from bespoke.errors import UserError

# Written by hand from the wire format: an Example of one feature, "label", a list of the whole number 5.
LABEL = bytes.fromhex("0a10 0a0e 0a05 6c6162656c 1205 1a03 0a01 05".replace(" ", ""))


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def block(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features: Any) -> bytes:
    """As TensorFlow writes it: numbers are packed."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            kind = block(1, block(1, value))
        elif isinstance(value, int):
            kind = block(3, block(1, varint(value)))
        else:
            kind = block(2, block(1, struct.pack(f"<{len(value)}f", *value)))
        entries += block(1, block(1, name.encode()) + block(2, kind))
    return block(1, entries)


def write(path: Path, rows: list[tuple[str, str, bytes]]) -> None:
    """(part, client, example) in the published tables."""
    path.parent.mkdir(parents=True, exist_ok=True)
    base = sqlite3.connect(path)
    with base:
        base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        base.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        counts = {(part, client): 0 for part, client, _ in rows}
        base.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", [(c, p, 1) for p, c in counts])
    base.close()


def test_an_example_by_its_bytes() -> None:
    assert tf_example(LABEL)["label"].tolist() == [5]
    assert example(label=5) == LABEL
    found = tf_example(example(pixels=[0.5, -1.25], text="é".encode(), number=-3, long=b"x" * 300))
    assert found["pixels"].tolist() == [0.5, -1.25]
    assert (found["text"], found["number"].tolist(), found["long"]) == (["é".encode()], [-3], [b"x" * 300])
    unpacked = block(1, block(1, block(1, b"label") + block(2, block(3, b"\x08\x05\x08\x96\x01"))))
    assert tf_example(unpacked)["label"].tolist() == [5, 150]  # values one by one; 150 is 96 01
    for cut in range(1, len(LABEL)):
        with pytest.raises(ValueError, match=r"."):
            tf_example(LABEL[:cut])


@pytest.mark.parametrize("packed", [False, True])
def test_emnist(folder: Path, packed: bool) -> None:
    """Writers of 1 and 2 training images; those of the test part are not used."""
    path = folder / "emnist" / "emnist_all.sqlite"
    image = [1.0] * 783 + [0.2]
    rows = [("train", "f1", example(pixels=image, label=61)), ("train", "f0", example(pixels=image, label=3))]
    write(path, [*rows, ("train", "f0", example(pixels=[0.0] * 784, label=7)), ("test", "f2", rows[0][2])])
    if packed:
        Path(f"{path}.lzma").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    for _ in range(2):  # the second time, what was unpacked is there
        population = load_source("emnist", validation=1, test=0)
        assert list(population.ids) == ["f0", "f1"]
        assert population.columns["y"].tolist() == [3, 7, 61]
        assert population.columns["x"][0, -2:].tolist() == [255, 51]
        assert not population.columns["x"][1].any()


def test_shakespeare(folder: Path) -> None:
    said = [("train", "PLAY_A", b"to be"), ("test", "PLAY_A", b"or not"), ("train", "PLAY_B", b"adieu")]
    write(folder / "shakespeare" / "shakespeare.sqlite", [(p, role, example(snippets=text)) for p, role, text in said])
    population = load_source("shakespeare", tokens="words", length=4)
    assert list(population.ids) == ["PLAY_A", "PLAY_B"]
    assert population.sizes().tolist() == [2, 1]


def test_stackoverflow(folder: Path) -> None:
    said = [("train", "21", b"how to sort"), ("heldout", "7", b"a list"), ("heldout", "8", b"fly"), ("test", "9", b"")]
    date = b"2015-01-02 10:00:00.5 UTC"
    rows = [(part, user, example(tokens=text, creation_date=date)) for part, user, text in said]
    write(folder / "stackoverflow" / "stackoverflow.sqlite", rows)
    population = load_source("stackoverflow", validation_clients=1)
    assert list(population.ids) == ["21", "7", "8"]
    assert sorted(population.about["words"]) == ["how", "sort", "to"]
    assert np.unique(population.columns["time"].numpy()).tolist() == [1420192800.5]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no database at all, but long enough to be one" * 40, "no readable SQLite file"),
        ([("train", "f0", b"\xff\xff")], "no tf.Example"),
        ([("train", "f0", example(label=1))], "without pixels"),
    ],
)
def test_other_files_are_refused(folder: Path, content: Any, words: str) -> None:
    path = folder / "emnist" / "emnist_all.sqlite"
    if isinstance(content, bytes):
        path.parent.mkdir()
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(UserError, match=words):
        load_source("emnist")


def test_a_packed_file_that_is_cut_off(folder: Path) -> None:
    path = folder / "emnist" / "emnist_all.sqlite.lzma"
    path.parent.mkdir()
    path.write_bytes(lzma.compress(b"x" * 10_000)[:-20])
    with pytest.raises(UserError, match="no readable LZMA file"):
        load_source("emnist")
    assert not list((Path.home() / ".cache" / "bespoke" / "decoded").glob("emnist_all*"))
