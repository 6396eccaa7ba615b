"""Frozen word vectors, stored in ~/.cache/bespoke/vectors in files named by their content.

They are neither parameters, which travel in every round, nor columns, which would hold a word's vector as often as the
word is said: a source keeps them here, and a model maps the file.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.errors import UserError
from bespoke.storage import open_arrays, write_arrays


def _path(name: str) -> Path:
    return Path.home() / ".cache" / "bespoke" / "vectors" / f"{name}.safetensors"


def keep(source: str, vectors: NDArray[np.float32]) -> str:
    """Put vectors (tokens, dimension) where models find them; returns their name, the same for the same numbers."""
    content = hashlib.sha256(repr(vectors.shape).encode() + vectors.tobytes()).hexdigest()
    name = f"{source}-{content[:16]}"
    if not _path(name).exists():
        _path(name).parent.mkdir(parents=True, exist_ok=True)
        write_arrays(_path(name), {"vectors": torch.from_numpy(vectors)})
    return name


def frozen(name: str) -> Tensor:
    """Vectors by name, mapped, so that worker processes share one copy."""
    path = _path(name)
    if not path.exists():
        raise UserError(
            f"the frozen word vectors {name!r} are not in {path.parent}: load the source {name.rpartition('-')[0]!r} "
            "on this machine, which makes them, or copy the file"
        )
    return _mapped(path)


@cache
def _mapped(path: Path) -> Tensor:
    return open_arrays(path)[0]["vectors"]
