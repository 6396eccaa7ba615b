"""Three sites with rules of their own give the results of a simulation, and keep what is their clients'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from bespoke.data.population import Population
from bespoke.federation.segments import read_segment
from bespoke.runs.folder import RunFolder
from bespoke.tensors import flatten
from deploy.sites_here import NAMES, Line, hub, three
from loopback import split_up
from test_protocol import STAGES, asked, people, ran


def config_of(name: str, **more: Any) -> Any:
    return asked(STAGES[name], **more)


def rows_of(name: str) -> Population:
    return people("classification" if name == "mocha" else "regression")


def simulated(name: str, folder: Path, **more: Any) -> dict[str, bytes]:
    from bespoke.experiment.build import build

    return ran(build(config_of(name, **more), rows_of(name)), folder)


def federated(name: str, folder: Path, **more: Any) -> dict[str, Line]:
    lines = three(split_up(rows_of(name), 3), folder)
    hub(config_of(name, **more), folder / "hub").run(lambda: lines)
    return lines


def assert_like(there: Path, here: Path) -> None:
    """The server's state and each client's scores, up to the rounding of sums that come in another order."""
    ended = [RunFolder.existing(where).final() for where in (here, there)]
    mine, theirs = (flatten(found.server) for found in ended if found)
    assert mine.keys() == theirs.keys()
    for path, leaf in mine.items():
        torch.testing.assert_close(theirs[path], leaf, rtol=1e-4, atol=1e-5)
    mine, theirs = (pq.read_table(where / "clients.parquet").to_pydict() for where in (here, there))
    assert mine.keys() == theirs.keys()
    for column in mine:
        if isinstance(mine[column][0], float):
            np.testing.assert_allclose(theirs[column], mine[column], rtol=1e-3, atol=1e-4)
        else:
            assert theirs[column] == mine[column], column
    ended_with: list[Any] = [RunFolder.existing(where).result() for where in (here, there)]
    expected, found = ended_with
    for key in ("query", "validation"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4)
    who = [result["chosen"].pop("who", {}) for result in (expected, found)]
    assert who[1] == pytest.approx(who[0], rel=1e-4)
    for key in ("clients", "rounds", "chosen", "parameters", "steps"):
        assert found[key] == expected[key], key
    if "accept" in expected:
        assert found["accept"]["accepted"] == expected["accept"]["accepted"]
        assert found["accept"]["query_without"] == pytest.approx(expected["accept"]["query_without"], rel=1e-4)


@pytest.mark.parametrize("name", STAGES)
def test_three_sites_give_the_results_of_a_simulation(name: str, tmp_path: Path) -> None:
    files = simulated(name, tmp_path / "here")
    federated(name, tmp_path)
    assert_like(tmp_path / "hub", tmp_path / "here")
    kept = [file for file in files if file.startswith("private/")]
    assert bool(kept) == (name in ("ditto", "fedembed"))
    for file in kept:
        clients, rows = read_segment(tmp_path / "here" / file)
        for place, site in enumerate(NAMES):
            point = Path(file).stem.rpartition("-")[0]
            (mine,) = (tmp_path / site / "runs").glob(f"*/{point}@*.safetensors")
            there, found = read_segment(mine)
            expected = rows[torch.isin(clients, place + 3 * there)]
            assert len(expected) == len(found)
            np.testing.assert_allclose(found.view(torch.float32), expected.view(torch.float32), rtol=1e-4, atol=1e-5)
    assert not list((tmp_path / "hub" / "private").iterdir())


FAST = {"method": "fedavg", "rounds": 2, "lr": 0.1, "batch_size": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "cross-device": {
        "stage": [FAST, {"method": "finetune", "lrs": [0.1], "epochs": 3}],
        "split": {"protocol": "cross-device", "held_out": (0.25, 0.4), "own_validation": 0.2},
    },
    "each client chooses": {
        "stage": [FAST, {"method": "finetune", "lrs": [0.01, 0.3], "epochs": 2, "choose": "client"}],
    },
    "clients accept": {
        "stage": [
            FAST, {"method": "finetune", "lrs": [0.3], "epochs": 2, "accept": {"min_examples": 5, "margin": 0.01}}
        ],
    },
    "noise on the sum": {
        "stage": [FAST],
        "privacy": {"noise": 0.5, "clip": 0.5, "reproducible": True, "public_schema": True, "public_statistics": True,
                    "delta": 1e-3},
    },
    "noise on each message": {
        "stage": [FAST],
        "privacy": {"local_noise": 0.5, "clip": 0.5, "reproducible": True, "public_schema": True,
                    "public_statistics": True, "delta": 1e-3},
    },
    "memory of what was not sent": {"stage": [FAST], "transform": {"top_k": 0.5}},
    "a robust rule": {"stage": [FAST], "robust": {"rule": "median"}},
    "a small network": {"stage": [FAST], "model": {"name": "mlp", "hidden": [8]}},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_experiments_give_the_results_of_a_simulation(name: str, tmp_path: Path) -> None:
    from bespoke.experiment.build import build

    more = dict(SETTINGS[name])
    config = asked(more.pop("stage"), **more)
    ran(build(config, people()), tmp_path / "here")
    lines = three(split_up(people(), 3), tmp_path)
    hub(config, tmp_path / "hub").run(lambda: lines)
    assert_like(tmp_path / "hub", tmp_path / "here")
