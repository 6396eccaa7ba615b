"""MATLAB files of a task per client: the cell X holds a matrix per client, the cell Y its targets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bespoke.data.sources.registry import damaged


def read_cells(
    path: Path, clients: int, rows: int, columns: int, what: tuple[str, str, str]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """All rows of X, of Y, and how many each client has; `what` names a client, a row and a target in errors."""
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    client, row, target = what
    try:
        content = loadmat(path)
    except (MatReadError, NotImplementedError, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise damaged(path, f"no readable MATLAB file ({error})", "a MATLAB 5 file") from None
    for cell in ("X", "Y"):
        if cell not in content or content[cell].dtype != object:
            raise damaged(path, f"the variables {sorted(k for k in content if k[0] != '_')}", "the cells X and Y")
    xs, ys = list(content["X"].ravel()), [np.asarray(y).reshape(-1) for y in content["Y"].ravel()]
    if len(xs) != clients or len(ys) != clients:
        raise damaged(path, f"{len(xs)} {client}s in X and {len(ys)} in Y", f"{clients} in both")
    for number, (x, y) in enumerate(zip(xs, ys), start=1):
        if x.shape != (len(y), columns):
            raise damaged(
                path, f"{client} {number} with X {x.shape} and {len(y)} {target}s", f"X ({target}s, {columns})"
            )
    sizes = np.array([len(y) for y in ys], dtype=np.int64)
    x, y = np.concatenate(xs).astype(np.float64), np.concatenate(ys).astype(np.float64)
    if len(y) != rows:
        raise damaged(path, f"{len(y)} {row}s", rows)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise damaged(path, "values that are missing or infinite", "finite numbers")
    return x, y, sizes
