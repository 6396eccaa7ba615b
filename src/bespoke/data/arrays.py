"""Arrays on disk: safetensors, written atomically, opened as memory maps."""

from __future__ import annotations

import json
import mmap
import os
import re
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bespoke.errors import UserError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def write_arrays(path: Path, arrays: dict[str, Tensor], about: dict[str, str] | None = None) -> None:
    """Write a safetensors file so that it is there whole or not at all, whenever the process is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        save_file({name: array.contiguous() for name, array in arrays.items()}, temporary, metadata=about)
        settle(temporary, path)
    except SafetensorError as error:  # its text alone says what the operating system refused
        number = re.search(r"(?:code:|os error) (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        settle(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def settle(temporary: Path, path: Path) -> None:
    """Give a finished file its name: flushed to disk first, so that the name never stands for half a file."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


class RowReader:
    """Reads stretches of rows of a safetensors file into memory of their own, without mapping the file."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115  (lives as long as the reader)
        length = int.from_bytes(self.file.read(8), "little")
        header = json.loads(self.file.read(length))
        self.places = {n: 8 + length + entry["data_offsets"][0] for n, entry in header.items() if n != "__metadata__"}

    def read(self, name: str, column: Tensor, begins: list[int], sizes: list[int]) -> Tensor:
        """Rows begin ... begin + size of each pair, one after the other; `column` tells their shape and type."""
        width = column[0].numel() * column.element_size()
        rows = torch.empty((sum(sizes), *column.shape[1:]), dtype=column.dtype)
        into = rows.numpy().reshape(-1).view(np.uint8).data
        place = 0
        for begin, size in zip(begins, sizes):
            os.preadv(self.file.fileno(), [into[place : place + size * width]], self.places[name] + begin * width)
            place += size * width
        return rows


def open_arrays(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Map a safetensors file into memory: (arrays, metadata); costs nothing until rows are read.

    The map is advised for random access: reading ahead would charge a cohort of a million clients for its neighbours.
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
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error})") from None
    if hasattr(mmap, "MADV_RANDOM"):
        buffer.madvise(mmap.MADV_RANDOM)
    return arrays, about
