"""School: exam scores of 15,362 students in 139 schools of the Inner London Education Authority, 1985-87.

`school.mat` of MALSAR holds the cells X (a matrix of 28 columns per school) and Y (its scores, 1 to 70). As in Motley,
the target is (y - min) / (max - min) = (y - 1) / 69 and features are standardized by each school on its training rows;
the last column is constant and so becomes zero.
"""

from __future__ import annotations

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.formats.matlab import read_cells
from bespoke.data.sources.registry import damaged, describe, find_file

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
    path = find_file("school/school.mat", "school")
    x, y, sizes = read_cells(path, SCHOOLS, ROWS, COLUMNS, ("school", "student", "score"))
    if (y.min(), y.max()) != (LOWEST, HIGHEST):
        raise damaged(path, f"scores from {y.min():g} to {y.max():g}", f"{LOWEST} to {HIGHEST}")
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
