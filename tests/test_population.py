"""Populations in memory and on disk."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bespoke import storage as arrays
from bespoke.data.population import Names, Population
from bespoke.data.sources.synthetic import write_large
from bespoke.data.splits import everything
from bespoke.errors import UserError
from bespoke.federation.cohorts import Sampler
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import FedAvg
from bespoke.models.networks import Linear
from bespoke.models.task import Regression


def small() -> Population:
    """Rows of three clients in any order; the order of a client's rows is kept."""
    return Population.build(
        {"x": torch.arange(12.0).reshape(6, 2), "y": np.arange(6)},
        ["b", "a", "b", "ünï", "a", "b"],
        group=["G1", "G2", "G1", "G1", "G2", "G1"],
        about={"task": "regression"},
    )


def test_rows_are_sorted_by_client_and_keep_their_order() -> None:
    found = small()
    assert list(found.ids) == ["a", "b", "ünï"]
    assert found.offsets.tolist() == [0, 2, 5, 6]
    assert found.columns["y"].tolist() == [1, 4, 0, 2, 5, 3]
    assert found.columns["x"][2].tolist() == [0.0, 1.0]
    assert [found.group_of(c) for c in range(3)] == ["G2", "G1", "G1"]
    assert found.sizes(np.array([2, 0])).tolist() == [1, 2]
    assert (len(found), found.rows) == (3, 6)


def test_round_trip_through_disk(tmp_path: Path) -> None:
    found = small()
    found.save(tmp_path)
    again = Population.open(tmp_path)
    assert list(again.ids) == list(found.ids)
    assert again.ids[-1] == "ünï"
    assert again.ids[0:2] == ["a", "b"]
    assert (again.keys == found.keys).all()
    assert (again.offsets == found.offsets).all()
    assert [again.group_of(c) for c in range(3)] == [found.group_of(c) for c in range(3)]
    assert again.about == found.about
    for name, column in found.columns.items():
        assert again.columns[name].dtype == column.dtype
        assert torch.equal(again.columns[name], column)
    again.save(tmp_path / "second")  # what was opened can be saved: workers get it so
    assert (tmp_path / "second" / "columns.safetensors").read_bytes() == (tmp_path / "columns.safetensors").read_bytes()
    assert (tmp_path / "second" / "clients.safetensors").read_bytes() == (tmp_path / "clients.safetensors").read_bytes()


def test_what_is_opened_is_not_written_back(tmp_path: Path) -> None:
    """Maps are copy on write: a careless caller does not change the data on disk."""
    small().save(tmp_path)
    before = (tmp_path / "columns.safetensors").read_bytes()
    Population.open(tmp_path).columns["x"][0] = 99.0
    assert (tmp_path / "columns.safetensors").read_bytes() == before


def test_conflicting_groups_are_refused() -> None:
    with pytest.raises(UserError, match=r"client 'a' appears in 2 groups \(G1, G2\)") as error:
        Population.build({"x": np.zeros(3)}, ["a", "b", "a"], group=["G1", "G1", "G2"])
    assert "--client GROUP,CLIENT" in str(error.value)


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="column 'y' has 2 rows"):
        Population.build({"x": np.zeros(3), "y": np.zeros(2)}, ["a", "b", "a"])


def test_index_by_id() -> None:
    found = small()
    assert [found.index(i) for i in found.ids] == [0, 1, 2]
    with pytest.raises(UserError, match="no client 'c'"):
        found.index("c")


def test_only_keeps_keys() -> None:
    found = small()
    part = found.only(np.array([2, 0]))
    assert list(part.ids) == ["ünï", "a"]
    assert part.columns["y"].tolist() == [3, 1, 4]
    assert part.offsets.tolist() == [0, 1, 3]
    assert (part.keys == found.keys[[2, 0]]).all()
    assert [part.group_of(c) for c in range(2)] == ["G1", "G2"]


def test_names_like_a_list() -> None:
    texts = ["", "é", "long name", ""]
    names = Names.of(texts)
    assert list(names) == texts
    assert names[-2] == "long name"
    assert names[1:3] == texts[1:3]
    with pytest.raises(IndexError):
        names[4]


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no population"):
        Population.open(tmp_path)
    small().save(tmp_path)
    for damage, message in [("{", "damaged"), (json.dumps({"format": 99}), "format 99")]:
        (tmp_path / "population.json").write_text(damage)
        with pytest.raises(UserError, match=message):
            Population.open(tmp_path)
    small().save(tmp_path)
    whole = (tmp_path / "columns.safetensors").read_bytes()
    for content in (b"", b"not safetensors at all", whole[:-5], whole[: len(whole) // 2]):
        (tmp_path / "columns.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=r"columns\.safetensors"):
            Population.open(tmp_path)
    (tmp_path / "columns.safetensors").unlink()
    with pytest.raises(UserError, match="missing"):
        Population.open(tmp_path)


def _held() -> int:
    """Bytes of memory that are this process's own; pages of mapped files are the system's, which maps some around."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def _one_round(found: Population, size: int) -> int:
    train = everything(found)
    method = FedAvg(Regression(Linear(10)), batch_size=2)
    params = method.task.init(0)
    with Engine(found, Choice(True, 32, 0, 1, "closed-form", "")) as engine:
        engine.open(ClientWork(method, train), params)
        cohort = Sampler(train, 0, size).draw(1).reported
        return len(engine.round(method.init_server(params), cohort, key=1).cohort.clients)


def test_a_million_clients_open_at_once(tmp_path: Path) -> None:
    """Opening reads a header; drawing and training a cohort reads its rows, not the 100 MB of everyone."""
    write_large(tmp_path / "small", 200, rows_per_client=2, features=10)
    assert _one_round(Population.open(tmp_path / "small"), 100) == 100  # so that torch has loaded what it needs
    write_large(tmp_path / "large", 1_000_000, rows_per_client=2, features=10)
    assert sum(path.stat().st_size for path in (tmp_path / "large").iterdir()) > 100e6
    before = _held()
    began = time.perf_counter()
    found = Population.open(tmp_path / "large")
    assert time.perf_counter() - began < 1.0  # milliseconds; a second allows for a busy machine
    assert len(found) == 1_000_000
    assert found.ids[999_999] == "0999999"
    assert _held() - before < 2e6
    assert _one_round(found, 100) == 100
    assert _held() - before < 16e6  # the positions of the clients are 8 MB


def test_rows_read_ahead_are_the_rows(tmp_path: Path) -> None:
    sizes = [3, 1, 4, 2]
    rows = np.arange(sum(sizes))
    owner = np.repeat([f"c{i}" for i in range(len(sizes))], sizes)
    Population.build({"x": (rows * 1.5).astype(np.float32)[:, None], "y": rows}, owner).save(tmp_path)
    population = Population.open(tmp_path)
    for expected, asked in [((2, 0), (2, 0)), ((1,), (3, 1)), (None, (0,))]:  # as announced, otherwise, and not at all
        if expected:
            population.expect(np.array(expected), ("x", "y"))
        columns, shift = population.fetch(np.array(asked), ("x", "y"))
        own = np.concatenate([rows[population.offsets[c] : population.offsets[c + 1]] for c in asked])
        assert columns["y"].tolist() == own.tolist()
        assert columns["x"][:, 0].tolist() == (own * 1.5).tolist()
        assert (population.offsets[list(asked)] + shift).tolist() == [0, *np.cumsum([sizes[c] for c in asked])[:-1]]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_population_cut_short_is_refused(tmp_path: Path, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:  # as without the extra `fast`
        monkeypatch.setattr(arrays, "_read_loop", lambda: arrays._read_one_by_one)
    Population.build({"x": np.zeros((8, 5), np.float32), "y": np.arange(8)}, np.repeat(["a", "b"], 4)).save(tmp_path)
    population = Population.open(tmp_path)
    assert population.fetch(np.array([1]), ("y",))[0]["y"].tolist() == [4, 5, 6, 7]
    whole = (tmp_path / "columns.safetensors").stat().st_size
    os.truncate(tmp_path / "columns.safetensors", whole - 9)
    with pytest.raises(UserError, match="could not be read to its end"):
        population.fetch(np.array([1]), ("x", "y"))
