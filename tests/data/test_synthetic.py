from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source
from bespoke.data.sources.synthetic import true_weights, write_large
from bespoke.errors import UserError


def test_weights_are_recovered_without_noise() -> None:
    population = load_source("synthetic", clients=3, examples=20, features=4, noise=0.0, seed=5)
    theta = true_weights(clients=3, features=4, seed=5)
    for c in range(3):
        rows = slice(population.offsets[c], population.offsets[c + 1])
        x, y = population.columns["x"][rows].numpy(), population.columns["y"][rows].numpy()
        assert np.linalg.lstsq(x, y, rcond=None)[0] == pytest.approx(theta[c], abs=1e-4)


def test_spread_between_clients_and_groups() -> None:
    theta = true_weights(clients=3000, features=2, between=0.3)
    assert theta.std(0) == pytest.approx([0.3, 0.3], rel=0.05)
    grouped = true_weights(clients=3000, features=2, between=0.1, groups=3, between_groups=2.0)
    assert grouped[0::3].std(0) == pytest.approx([0.1, 0.1], rel=0.1)
    population = load_source("synthetic", clients=6, groups=3)
    assert [population.group_of(c) for c in range(4)] == ["group 0", "group 1", "group 2", "group 0"]


def test_more_clients_and_more_examples_move_nobody() -> None:
    few = load_source("synthetic", clients=5, examples=10, uneven=1.0, seed=2)
    many = load_source("synthetic", clients=500, examples=10, uneven=1.0, seed=2)
    assert (few.keys == many.keys[:5]).all()
    assert (few.columns["x"] == many.columns["x"][: few.rows]).all()
    assert (few.columns["y"] == many.columns["y"][: few.rows]).all()
    longer = load_source("synthetic", clients=1, examples=40)
    assert (longer.columns["y"][:10] == load_source("synthetic", clients=1, examples=10).columns["y"]).all()


def test_uneven_sizes_keep_their_mean() -> None:
    sizes = load_source("synthetic", clients=2000, examples=50, features=1, uneven=0.8).sizes()
    assert sizes.min() >= 3
    assert sizes.mean() == pytest.approx(50, rel=0.1)
    assert sizes.std() > 30


def test_large_population_on_disk(tmp_path: Path) -> None:
    write_large(tmp_path / "large", clients=10_000, rows_per_client=3, features=5, seed=1)
    population = Population.open(tmp_path / "large")
    assert (len(population), population.rows) == (10_000, 30_000)
    assert tuple(population.columns["x"].shape) == (30_000, 5)
    assert population.columns["x"].mean().item() == pytest.approx(0, abs=0.02)
    assert population.columns["x"].std().item() == pytest.approx(1, abs=0.02)
    assert population.index("0009999") == 9999
    write_large(tmp_path / "small", clients=7, rows_per_client=3, features=5, seed=1)
    small = Population.open(tmp_path / "small")
    assert (small.columns["y"] == population.columns["y"][:21]).all()  # more clients move nobody
    assert (small.keys == population.keys[:7]).all()
    assert {file.name for file in (tmp_path / "small").iterdir()} == {
        "columns.safetensors", "clients.safetensors", "population.json",
    }  # fmt: skip


def test_the_large_file_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    write_large(tmp_path, clients=4, rows_per_client=2, features=3)
    arrays = load_file(tmp_path / "columns.safetensors")
    opened = Population.open(tmp_path)
    assert (arrays["x"] == opened.columns["x"].numpy()).all()
    assert (arrays["y"] == opened.columns["y"].numpy()).all()


def test_nothing_of_nothing() -> None:
    with pytest.raises(UserError, match="'clients' of the source 'synthetic' is 0"):
        load_source("synthetic", clients=0)
