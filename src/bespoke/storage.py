"""Arrays on disk: safetensors files, written atomically and opened as memory maps."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bespoke.errors import UserError
from bespoke.helper_thread import Helper

Ints = NDArray[np.int64]
Columns = dict[str, Sequence[Any] | NDArray[Any]]  # of a table, by name

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def write_arrays(path: Path, arrays: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """Writes a safetensors file atomically: after a kill at any moment it is complete or absent."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file(apart(arrays), temporary, metadata=about)
        settle(temporary, path)
    except SafetensorError as error:  # only its text has the operating system's error
        number = re.search(r"(?:code:|os error) (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def apart(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays without shared memory, which safetensors refuses; a state may hold one array twice."""
    found: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, array in arrays.items():
        array = array.contiguous()
        place = array.untyped_storage().data_ptr()
        found[name] = array.clone() if place in taken else array
        taken.add(place)
    return found


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        settle(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(temporary: Path, path: Path) -> None:
    """Flushes a finished file to disk and gives it its name, which so never refers to half a file."""
    with open(temporary, "r+b") as file:  # Windows flushes only writable files
        os.fsync(file.fileno())
    os.replace(temporary, path)


class RowReader:
    """Reads ranges of rows of a safetensors file into new memory, without mapping the file.

    The next cohort is often known in advance. `ahead` reads its rows in a thread during the current round, so that rows
    outside of the disk cache cost no time. This needs the compiled loop of the extra `fast`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115  (lives as long as the reader)
        length = int.from_bytes(self.file.read(8), "little")
        header = json.loads(self.file.read(length))
        self.places = {n: 8 + length + entry["data_offsets"][0] for n, entry in header.items() if n != "__metadata__"}
        self.helper: Helper | None = None
        self.pending: tuple[Ints, dict[str, Tensor]] | None = None

    def read(self, columns: dict[str, Tensor], begins: Ints, sizes: Ints) -> dict[str, Tensor]:
        """Rows begin ... begin + size of each pair, concatenated; `columns` have their shapes and types."""
        pending, self.pending = self.pending, None
        if pending is not None:
            assert self.helper is not None
            self._check(self.helper.finish())
            if np.array_equal(pending[0], begins) and pending[1].keys() == columns.keys():
                return pending[1]
        rows, requests = self._requests(columns, begins, sizes)
        self._check(_read_loop()(self.file.fileno(), *requests))
        return rows

    def ahead(self, columns: dict[str, Tensor], begins: Ints, sizes: Ints) -> None:
        """Starts to read the rows of the next `read`."""
        if self.pending is not None or not _compiles():
            return
        self.helper = self.helper or Helper()
        rows, requests = self._requests(columns, begins, sizes)
        self.pending = begins, rows
        self.helper.start(_read_loop(), self.file.fileno(), *requests)

    def _requests(
        self, columns: dict[str, Tensor], begins: Ints, sizes: Ints
    ) -> tuple[dict[str, Tensor], tuple[Ints, Ints, Ints]]:
        """Memory for the rows, and (address, position in the file, bytes) of every range."""
        total, before = int(sizes.sum()), np.cumsum(sizes) - sizes
        rows, requests = {}, []
        for name, column in columns.items():
            width = column[0].numel() * column.element_size()
            rows[name] = torch.empty((total, *column.shape[1:]), dtype=column.dtype)
            requests.append((rows[name].data_ptr() + before * width, self.places[name] + begins * width, sizes * width))
        addresses, places, lengths = (np.concatenate(part) for part in zip(*requests))
        return rows, (addresses, places, lengths)

    def _check(self, failed: int) -> None:
        if failed >= 0:
            raise UserError(f"{self.path} could not be read to its end: it was damaged after it was written")


def _compiles() -> bool:
    return find_spec("numba") is not None and hasattr(os, "pread")


@cache
def _read_loop() -> Callable[..., int]:
    """(file, addresses, positions, lengths) -> the first range that could not be read in full, or -1."""
    if not _compiles():
        return _read_one_by_one
    import numba
    from numba import types

    pread = types.ExternalFunction("pread", types.intp(types.int32, types.uintp, types.uintp, types.int64))

    @numba.njit(nogil=True, cache=True)
    def read(file, addresses, places, lengths):  # type: ignore[no-untyped-def]
        for i in range(len(addresses)):
            done = 0
            while done < lengths[i]:
                count = pread(file, addresses[i] + done, lengths[i] - done, places[i] + done)
                if count <= 0:
                    return i
                done += count
        return -1

    compiled: Callable[..., int] = read
    return compiled


def _read_one_by_one(file: int, addresses: Ints, places: Ints, lengths: Ints) -> int:
    with os.fdopen(file, "rb", buffering=0, closefd=False) as rows:
        for i, (address, place, length) in enumerate(zip(addresses.tolist(), places.tolist(), lengths.tolist())):
            rows.seek(place)
            into = memoryview((ctypes.c_char * length).from_address(address)).cast("B")
            while len(into):
                count = rows.readinto(into)
                if not count:
                    return i
                into = into[count:]
    return -1


def open_arrays(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Maps a safetensors file into memory: (arrays, metadata). It costs nothing until rows are read.

    The map is advised for random access, because reading ahead would also read the neighbours of every client.
    """
    try:
        with open(path, "rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; the folder is incomplete or not one of bespoke's") from None
    except ValueError:
        raise UserError(f"{path} is empty: it was damaged after it was written") from None
    try:
        length = int.from_bytes(buffer[:8], "little")
        header = json.loads(buffer[8 : 8 + length])
        about = header.pop("__metadata__", {})
        arrays = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            shape = entry["shape"]
            if end == begin:
                arrays[name] = torch.empty(shape, dtype=dtype)
                continue
            size = (end - begin) // dtype.itemsize
            arrays[name] = torch.frombuffer(buffer, dtype=dtype, count=size, offset=8 + length + begin).reshape(shape)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error})") from None
    if hasattr(mmap, "MADV_RANDOM"):
        buffer.madvise(mmap.MADV_RANDOM)
    return arrays, about
