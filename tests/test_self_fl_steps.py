"""The study of Self-FL's computed steps: what it notes is what clients then take."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.runs.folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from self_fl.steps import watch


def test_noted_steps_are_those_taken(tmp_path: Path) -> None:
    """Eight of twelve clients a round. The last round's steps lie in the clients' private state at the end."""
    stage = {"method": "self-fl", "rounds": 6, "lr": 0.02, "batch_size": 4, "curvature": 1.0}
    options = {"clients": 12, "examples": 20, "features": 3}
    experiment = build(checked({
        "data": {"source": "synthetic", "options": options}, "cohort": {"size": 8}, "stage": [stage],
    }, "test"))  # fmt: skip
    folder = RunFolder.create(tmp_path / "run", "")
    found = watch(experiment, folder)
    assert set(found["round"]) <= set(range(3, 7))  # two rounds are the least to know one's uncertainty
    last = found[found["round"] == 6]
    assert len(last) > 2
    assert (found["computed"] > 0).all()
    from bespoke.federation.private_state import PrivateTable

    table = PrivateTable(experiment.stages[0].method.init_private(experiment.task.init(0)))
    for path in sorted((tmp_path / "run" / "private").glob("*.safetensors")):
        table.load(path)
    clients = [experiment.population.index(client) for client in last["client"]]
    assert np.array_equal(table.read(clients)["steps"].numpy(), last["taken"].to_numpy())
    assert len(set(found["taken"])) > 1
