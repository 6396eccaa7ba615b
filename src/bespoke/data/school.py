"""School: exam scores of 15,362 students in 139 schools of the Inner London Education Authority, 1985-87.

`school.mat` of MALSAR holds the cells X (a matrix of 28 columns per school) and Y (its scores, 1 to 70). As in Motley,
the target is (y - min) / (max - min) = (y - 1) / 69 and features are standardized by each school on its training rows;
the last column is constant and so becomes zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources import damaged, describe, find_file

SCHOOLS, ROWS, COLUMNS, LOWEST, HIGHEST = 139, 15362, 28, 1, 70
# The order of the ILEA codebook; that the indicators of each attribute sum to one confirms it.
FEATURES = [
    *(f"year {i}" for i in (1, 2, 3)),
    "free school meals %",
    "verbal reasoning band 1 %",
    *(f"gender {i}" for i in (1, 2)),
    *(f"verbal reasoning band {i}" for i in (1, 2, 3)),
    *(f"ethnic group {i}" for i in range(1, 12)),
    *(f"school gender {i}" for i in (1, 2, 3)),
    *(f"school denomination {i}" for i in (1, 2, 3)),
    "constant",
]


def load() -> Population:
    """139 schools, all 28 columns in stored order, scores scaled to 0 ... 1."""
    x, y, sizes = _read()
    clients = np.repeat([f"{number:03d}" for number in range(1, len(sizes) + 1)], sizes)
    about = describe(
        "school",
        input="table",
        features=FEATURES,
        numeric=[True] * COLUMNS,
        target="score",
        missing=False,
        standardize={"features": "client", "target": False},
        notes=[f"The score is scaled as (score - {LOWEST}) / {HIGHEST - LOWEST}."],
    )
    target = ((y - LOWEST) / (HIGHEST - LOWEST)).astype(np.float32)
    return Population.build({"x": x.astype(np.float32), "y": target}, clients, about=about)


def _read() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    from scipy.io import loadmat
    from scipy.io.matlab import MatReadError

    path = find_file("school/school.mat", "school")
    try:
        content = loadmat(path)
    except (MatReadError, NotImplementedError, OSError, ValueError, TypeError, KeyError, IndexError) as error:
        raise damaged(path, f"no readable MATLAB file ({error})", "a MATLAB 5 file") from None
    for cell in ("X", "Y"):
        if cell not in content or content[cell].dtype != object:
            raise damaged(path, f"the variables {sorted(k for k in content if k[0] != '_')}", "the cells X and Y")
    xs, ys = list(content["X"].ravel()), [np.asarray(y).reshape(-1) for y in content["Y"].ravel()]
    if len(xs) != SCHOOLS or len(ys) != SCHOOLS:
        raise damaged(path, f"{len(xs)} schools in X and {len(ys)} in Y", f"{SCHOOLS} in both")
    for number, (x, y) in enumerate(zip(xs, ys), start=1):
        if x.shape != (len(y), COLUMNS):
            raise damaged(path, f"school {number} with X {x.shape} and {len(y)} scores", f"X (scores, {COLUMNS})")
    sizes = np.array([len(y) for y in ys], dtype=np.int64)
    x, y = np.concatenate(xs).astype(np.float64), np.concatenate(ys).astype(np.float64)
    if len(y) != ROWS:
        raise damaged(path, f"{len(y)} students", ROWS)
    if (y.min(), y.max()) != (LOWEST, HIGHEST) or not np.isfinite(x).all():
        raise damaged(path, f"scores from {y.min():g} to {y.max():g}", f"{LOWEST} to {HIGHEST}, features finite")
    return x, y, sizes
