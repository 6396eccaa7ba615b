"""Vehicle (Duarte and Hu 2004): 23 roadside sensors tell two kinds of vehicles apart by sound and vibration.

`vehicle.mat`, as Smith et al. 2017 and Motley use it, holds the cells X (a matrix of 50 acoustic and 50 seismic
features per sensor) and Y (labels -1 and 1). As in Motley, sensors standardize by their own training rows, and the
model is a linear SVM: the hinge, and half of 1e-4 times the squared norm of weights and bias.
"""

from __future__ import annotations

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.formats.matlab import read_cells
from bespoke.data.sources.registry import damaged, describe, find_file

SENSORS, ROWS = 23, 43_695
FEATURES = [*(f"acoustic {i}" for i in range(1, 51)), *(f"seismic {i}" for i in range(1, 51))]


def load() -> Population:
    """23 sensors, all 100 columns in stored order; the classes are -1 and 1."""
    path = find_file("vehicle/vehicle.mat", "vehicle")
    x, y, sizes = read_cells(path, SENSORS, ROWS, len(FEATURES), ("sensor", "measurement", "label"))
    if not set(np.unique(y)) <= {-1.0, 1.0}:
        raise damaged(path, f"labels {np.unique(y)[:5].tolist()}", "-1 and 1")
    about = describe(
        "vehicle",
        input="table",
        features=FEATURES,
        numeric=[True] * len(FEATURES),
        classes=["-1", "1"],
        target="vehicle",
        missing=False,
        model={"name": "svm", "l2": 1e-4},
        standardize={"features": "client", "target": False},
        notes=["Motley splits each sensor's rows 70 / 15 / 15 (split.order = 'motley')."],
    )
    clients = np.repeat([f"{number:02d}" for number in range(1, SENSORS + 1)], sizes)
    return Population.build({"x": x.astype(np.float32), "y": (y > 0).astype(np.int64)}, clients, about=about)
