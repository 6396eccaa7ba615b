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
    expected, found = (dict(RunFolder.existing(where).result() or {}) for where in (here, there))
    for key in ("query", "validation"):
        assert found[key] == pytest.approx(expected[key], rel=1e-4)
    for key in ("clients", "rounds", "chosen", "parameters", "steps"):
        assert found[key] == expected[key], key


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
