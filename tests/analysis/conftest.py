"""A run small enough to check by hand: clients whose targets are +2x or -2x, fine-tuned from one shared model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bespoke as library

ROWS = 200


@pytest.fixture
def opposite(tmp_path: Path) -> Callable[..., Path]:
    """Makes a finished run; `clients` of them, every other one with the opposite slope."""

    def make(name: str = "run", clients: int = 4, last: dict[str, Any] | None = None, **config: Any) -> Path:
        random = np.random.default_rng(0)
        x = random.choice([-1.0, 1.0], clients * ROWS)  # standardized already, and every error is a whole number
        slope = np.repeat([2.0 if i % 2 == 0 else -2.0 for i in range(clients)], ROWS)
        table = pd.DataFrame({
            "client": np.repeat([f"c{i}" for i in range(clients)], ROWS), "x": x, "y": slope * x,
            "group": np.repeat(["even" if i % 2 == 0 else "odd" for i in range(clients)], ROWS),
        })  # fmt: skip
        table.to_csv(tmp_path / "opposite.csv", index=False)
        data = {"table": str(tmp_path / "opposite.csv"), "client": "client", "target": "y", "group": "group"}
        tuned = {"method": "finetune", "lrs": [0.1, 0.2], "epochs": 4, **(last or {})}
        stages = [{"method": "fedavg", "rounds": 3, "lr": 0.1}, *([tuned] if last != {} else [])]
        library.run({"data": {**data, "features": ["x"]}, "stage": stages, **config}, tmp_path / name)
        return tmp_path / name

    return make
