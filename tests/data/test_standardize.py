from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source
from bespoke.data.splits import Part, Train, cross_device, cross_silo, everything
from bespoke.data.standardize import _safe, standardize
from bespoke.errors import UserError

NAN = float("nan")


def population_of(x: Any, y: Any, clients: Any, numeric: Any = None, task: str = "regression") -> Any:
    x = np.array(x, dtype=np.float32)
    about = {"task": task, "features": [str(i) for i in range(x.shape[1])], "numeric": numeric or [True] * x.shape[1]}
    return Population.build({"x": x, "y": np.array(y, dtype=np.float32)}, clients, about=about)


def first_rows(population: Any, fraction: float = 0.5) -> Any:
    """A Train of the first half of each client's rows, in stored order."""
    return Train(population, np.arange(len(population)), Part(0, (fraction, 1 - fraction), "stored"))


def small() -> Any:
    # Clients a and b with four rows each; the first two of each are for training.
    x = [[0, 1], [2, 1], [100, 1], [-100, 7], [4, 1], [6, 1], [0, 0], [0, 0]]
    return population_of(x, [1, 3, 50, 50, 5, 7, -50, -50], list("aaaabbbb"))


def test_global_by_hand() -> None:
    population = small()
    done = standardize(population, first_rows(population), "global", True)
    # Training rows of the first feature: 0, 2, 4, 6; mean 3, variance (9 + 1 + 1 + 9) / 4 = 5.
    assert done.columns["x"][:, 0].numpy() == pytest.approx((np.array([0, 2, 100, -100, 4, 6, 0, 0]) - 3) / 5**0.5)
    # The second is 1 in every training row: centred, divided by 1.
    assert done.columns["x"][:, 1].tolist() == [0, 0, 0, 6, 0, 0, -1, -1]
    # Targets 1, 3, 5, 7: mean 4, variance 5.
    assert (done.about["centre"], done.about["unit"]) == (4.0, pytest.approx(5**0.5))
    assert done.columns["y"][2].item() == pytest.approx(46 / 5**0.5)
    assert done.about["statistics_floats"] == (2 * 2 + 1) + (2 * 1 + 1)


def test_client_by_hand() -> None:
    population = small()
    done = standardize(population, first_rows(population), "client", False)
    # Client a: mean 1, deviation 1; client b: mean 5, deviation 1.
    assert done.columns["x"][:, 0].tolist() == [-1, 1, 99, -101, -1, 1, -5, -5]
    assert (done.columns["y"] == population.columns["y"]).all()
    assert done.about["statistics_floats"] == 0
    assert "unit" not in done.about


def test_none_and_the_given_population_stay_as_they_are() -> None:
    population = small()
    before = {name: column.clone() for name, column in population.columns.items()}
    about = dict(population.about)
    for how in ("global", "client", "none"):
        done = standardize(population, first_rows(population), how, how != "none")
    assert (done.columns["x"] == before["x"]).all()
    assert done.about["statistics_floats"] == 0
    assert all((population.columns[name] == before[name]).all() for name in before)
    assert population.about == about


def test_missing_values_become_the_training_mean() -> None:
    population = population_of([[1, NAN], [3, 0], [NAN, 1], [5, 1]], [0, 1, 2, 3], list("aabb"), [True, False])
    for how in ("global", "client", "none"):
        done = standardize(population, everything(population), how, False)
        assert done.columns["x"].isfinite().all()
        assert done.columns["x"][2, 0] == 0
    done = standardize(population, everything(population), "global", False)
    assert done.columns["x"][:, 0].numpy() == pytest.approx(np.array([-2, 0, 0, 2]) / (8 / 3) ** 0.5)
    assert done.about["statistics_floats"] == 3  # sum, sum of squares, and a count of its own


def test_a_feature_never_present_in_training_becomes_zero() -> None:
    population = population_of([[NAN], [NAN], [NAN], [5]], [0, 1, 2, 3], list("abab"))
    done = standardize(population, first_rows(population), "global", False)
    assert done.columns["x"].isfinite().all()


def test_indicators_are_left_alone() -> None:
    population = population_of([[0, 5], [1, 9]], [0, 1], ["a", "b"], [False, True])
    done = standardize(population, everything(population), "global", False)
    assert done.columns["x"].tolist() == [[0, -1], [1, 1]]


def test_a_large_constant_is_zero_and_not_noise() -> None:
    population = population_of([[16777216.1]] * 7, range(7), list("aaabbbb"))
    for how in ("global", "client"):
        assert (standardize(population, everything(population), how, False).columns["x"] == 0).all()


def test_a_feature_varies_from_the_seventh_digit_on() -> None:
    """At a mean of 1000 a deviation below 1e-4 is rounding (1e-7 of it), and one of 2e-4 is the feature's own."""
    assert _safe(np.array([0.81e-8, 4e-8]), np.array([1000.0, -1000.0])).tolist() == [1.0, 2e-4]
    assert _safe(np.array([0.0, 1e-30]), np.array([0.0, 0.0])).tolist() == [1.0, 1e-15]  # without a mean, any counts
    # 4000 and the next number that float32 knows, 2.44e-4 above it: half of that deviates, 3e-8 of the mean
    near = np.nextafter(np.float32(4000), np.float32(5000))
    population = population_of([[4000.0], [near], [4000.0], [near]], range(4), list("aabb"))
    done = standardize(population, everything(population), "global", False)
    assert done.columns["x"][:, 0].abs().max() < 1e-3  # centred and left so small, not blown up to -1 and 1
    # hundredths at 4000, two hundred times as far apart, are scaled: deviation 0.025
    population = population_of([[4000.0], [4000.05], [4000.0], [4000.05]], range(4), list("aabb"))
    done = standardize(population, everything(population), "global", False)
    assert done.columns["x"][:, 0].numpy() == pytest.approx([-1, 1, -1, 1], abs=0.01)


def test_clients_without_training_rows_take_the_pooled_statistics() -> None:
    population = load_source("hsb82")
    split = cross_device(population, seed=1)
    done = standardize(population, split.train, "client", False)
    assert done.columns["x"].isfinite().all()
    assert "no training rows" in done.about["notes"][-1]
    held_out = int(split.test.query.clients[0])
    rows = slice(population.offsets[held_out], population.offsets[held_out + 1])
    pooled = standardize(population, split.train, "global", False)
    assert (done.columns["x"][rows] == pooled.columns["x"][rows]).all()


def test_images_and_classes() -> None:
    digits = load_source("digits")
    done = standardize(digits, everything(digits), "none", False)
    assert done.columns["x"] is digits.columns["x"]
    with pytest.raises(UserError, match="only a regression's target"):
        standardize(digits, everything(digits), "none", True)
    with pytest.raises(UserError, match="unknown standardization 'local'"):
        standardize(digits, everything(digits), "local", False)  # type: ignore[arg-type]


def test_school_as_in_motley(real_data: Path) -> None:
    population = load_source("school")
    split = cross_silo(population, order="motley", seed=100)
    done = standardize(population, split.train, "client", False)
    rows, sizes = cross_silo(done, order="motley", seed=100).train.of(np.array([3]))
    mine = done.columns["x"][rows].double()
    assert len(rows) == sizes[0]
    varied = population.columns["x"][rows].std(0) > 0
    assert mine.mean(0).abs().max() < 1e-6
    assert mine.std(0, correction=0)[varied].numpy() == pytest.approx(1)
    assert (done.columns["x"][:, 27] == 0).all()


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=6),
    how=st.sampled_from(["global", "client", "none"]),
    seed=st.integers(0, 1000),
    gaps=st.booleans(),
)
def test_other_rows_never_change_the_training_rows(sizes: Any, how: Any, seed: Any, gaps: Any) -> None:
    draw = np.random.default_rng(seed)
    rows = sum(sizes)
    x = draw.normal(size=(rows, 3)).astype(np.float32)
    if gaps:
        x[draw.random(x.shape) < 0.2] = np.nan
    clients = np.repeat(np.arange(len(sizes)), sizes)
    population = population_of(x, draw.normal(size=rows), clients)
    split = cross_silo(population, seed=seed)
    training, _ = split.train.of(split.train.clients)
    others = np.setdiff1d(np.arange(rows), training)
    columns = {name: column.clone() for name, column in population.columns.items()}
    columns["x"][others] = torch.from_numpy(draw.normal(1000, 500, (len(others), 3)).astype(np.float32))
    columns["y"][others] = 1e6
    changed = replace(population, columns=columns)
    target = how != "none"
    before = standardize(population, split.train, how, target)
    after = standardize(changed, cross_silo(changed, seed=seed).train, how, target)
    assert (before.columns["x"][training] == after.columns["x"][training]).all()
    assert (before.columns["y"][training] == after.columns["y"][training]).all()
    assert before.columns["x"].isfinite().all()
    assert before.about.get("unit") == after.about.get("unit")
