"""Reads tf.Example, the record type of TensorFlow's files: a map from names to lists of bytes or numbers.

A message is a sequence of fields, each with a key (number << 3 | type) before it: 0 is a varint, 2 a length and so many
bytes, 5 four bytes. Example { Features 1 { entry 1 { name 1, Feature 2 } } }; a Feature is a list of bytes (1), of
floats (2) or of whole numbers (3), whose values (1) are packed or stand one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

BYTES, FLOATS, WHOLE = 1, 2, 3


def tf_example(data: bytes) -> dict[str, Any]:
    """Lists of bytes, or arrays of float32 or int64, by name; ValueError where the bytes are none."""
    found: dict[str, Any] = {}
    for features in _inside(data, 1):
        for entry in _inside(features, 1):
            [name] = _inside(entry, 1)
            [feature] = _inside(entry, 2)
            found[name.decode()] = _values(feature)
    return found


def _values(feature: bytes) -> Any:
    [(kind, content)] = _fields(feature)
    if not isinstance(content, bytes):
        raise ValueError("a feature that is no list")
    if kind == BYTES:
        return list(_inside(content, 1))
    values = [value for number, value in _fields(content) if number == 1]
    if kind == FLOATS:
        return np.frombuffer(b"".join(value for value in values if isinstance(value, bytes)), dtype="<f4")
    if kind == WHOLE:
        whole = [n for value in values for n in (_varints(value) if isinstance(value, bytes) else [value])]
        return np.array([n - (1 << 64) if n >> 63 else n for n in whole], dtype=np.int64)
    raise ValueError(f"a list of an unknown kind {kind}")


def _inside(data: bytes, wanted: int) -> Iterator[bytes]:
    """The contents of the fields of this number."""
    for number, value in _fields(data):
        if number == wanted:
            if not isinstance(value, bytes):
                raise ValueError(f"field {number} is a number")
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Each field's number with its value: a whole number, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size, at = _varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}.get(key & 7, -1), at)
        if size < 0 or at + size > len(data):
            raise ValueError(f"a field that is cut off at byte {at} of {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A whole number in groups of seven bits, the lowest first, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError(f"a number that is cut off at byte {at}")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"a number of more than ten bytes at byte {at}")
