"""Hurt beyond noise: the test of one client against scipy and by hand, its promises by simulation, and its words."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from bespoke.errors import UserError
from bespoke.report.report import summarize
from bespoke.report.summary import Summary
from bespoke.statistics import beyond as module
from bespoke.statistics.beyond import FALSE_DISCOVERIES, discoveries, flipped_shares, moderated, variance_prior
from bespoke.statistics.significance import benjamini_hochberg
from conftest import make_comparison, write_rows  # type: ignore[attr-defined]

Noise = Callable[[np.random.Generator, int], np.ndarray]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_false_discoveries_against_scipy(p_values: list[float]) -> None:
    assert benjamini_hochberg(p_values) == pytest.approx(stats.false_discovery_control(p_values).tolist())


def test_without_anything_to_borrow_it_is_the_t_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prior of no weight leaves the variance of the client itself; flat rows have no tails to be careful of."""
    monkeypatch.setattr(module, "variance_prior", lambda squares, freedom: (0.0, 1.0))
    rows = [np.linspace(-1, 1, 7) + 0.4, np.linspace(-2, 2, 5) - 0.3]
    found = moderated(np.concatenate(rows), np.repeat([0, 1], [7, 5]), 2, least=0.1)
    for place, row in enumerate(rows):
        assert found.p_hurt[place] == pytest.approx(stats.ttest_1samp(row, 0.1, alternative="greater").pvalue)
        assert found.p_helped[place] == pytest.approx(stats.ttest_1samp(row, -0.1, alternative="less").pvalue)
        bounds = stats.ttest_1samp(row, 0.0).confidence_interval(0.95)
        assert (found.low[place], found.high[place]) == (pytest.approx(bounds.low), pytest.approx(bounds.high))


def test_the_prior_is_found_again() -> None:
    """Variances drawn from a scaled inverse chi-squared distribution with 8 degrees of freedom around 2."""
    rng = np.random.default_rng(0)
    freedom = rng.integers(1, 12, 20_000).astype(float)
    variances = 8 * 2.0 / rng.chisquare(8, len(freedom))
    prior, shared = variance_prior(variances * rng.chisquare(freedom), freedom)
    assert prior == pytest.approx(8, rel=0.1)
    assert shared == pytest.approx(2.0, rel=0.03)


def test_equal_variances_are_pooled() -> None:
    """Sums of squares 2, 4 and 6 of two degrees of freedom each differ less than chance makes them: (2 + 4 + 6) / 6."""
    assert variance_prior(np.array([2.0, 4.0, 6.0]), np.array([2.0, 2.0, 2.0])) == (math.inf, 2.0)


def test_one_row_borrows_the_variance_of_the_others() -> None:
    """Everyone's rows are +-1 around the mean, so the variance is 2 (two rows each); the last client has one row."""
    client = np.repeat(np.arange(31), [2] * 30 + [1])
    worse = np.r_[np.tile([-1.0, 1.0], 30), 1.5]
    found = moderated(worse, client, 31, least=0.0)
    # 30 degrees of freedom together, no excess kurtosis: 1.5 / sqrt(2)
    assert found.p_hurt[30] == pytest.approx(stats.t.sf(1.5 / math.sqrt(2), 30))
    assert found.high[30] == pytest.approx(1.5 + stats.t.ppf(0.975, 30) * math.sqrt(2))


def test_rare_large_differences_have_heavy_tails() -> None:
    """Of 100 clients with one row, 96 tie and 4 differ by one: variance 0.04, kurtosis 0.04 / 0.04^2 = 25, so t = 5
    has 4 + 6 / 22 degrees of freedom: no proof, where the normal distribution would see one in a million.
    """
    found = moderated(np.r_[np.zeros(96), 1.0, 1.0, -1.0, -1.0], np.arange(100), 100, least=0.0)
    assert found.p_hurt[96] == pytest.approx(stats.t.sf(5.0, 4 + 6 / 22))
    assert not discoveries(found.p_hurt).any()


def test_clients_without_rows_are_not_known() -> None:
    found = moderated(np.array([1.0, 2.0]), np.array([0, 0]), 2, least=0.0)
    assert math.isnan(found.p_hurt[1])
    assert not discoveries(found.p_hurt)[1]


def test_rows_that_never_differ_need_no_test() -> None:
    found = moderated(np.zeros(4), np.array([0, 0, 1, 1]), 2, least=0.1)
    assert found.p_hurt.tolist() == [1.0, 1.0]
    assert found.p_helped.tolist() == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------ by simulation


def _heterogeneous(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.normal(size=size) * np.exp(rng.normal(0, 0.5, size))


NOISES: dict[str, Noise] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "heavy tails": lambda rng, size: rng.standard_t(3, size),
    "products": lambda rng, size: rng.normal(size=size) * rng.normal(size=size),
    "mixed scales": _heterogeneous,
    "right or wrong": lambda rng, size: rng.choice([-1.0, 0.0, 1.0], size, p=[0.05, 0.9, 0.05]),
    "hardly ever wrong": lambda rng, size: rng.choice([-1.0, 0.0, 1.0], size, p=[0.01, 0.98, 0.01]),
}


def _found(noise: Noise, seed: int, hurt: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """(found, truth) for 300 clients of 2 to 20 rows, of which a fifth is hurt by so much."""
    rng = np.random.default_rng(seed)
    client = np.repeat(np.arange(300), rng.integers(2, 21, 300))
    truth = np.arange(300) < 60 * (hurt > 0)
    worse = noise(rng, len(client)) + hurt * truth[client]
    return discoveries(moderated(worse, client, 300, 0.0).p_hurt), truth


@pytest.mark.parametrize("name", NOISES)
def test_pure_noise_is_seldom_called_hurt(name: str) -> None:
    """Any discovery is false here, so the promise is: in 5 % of comparisons at most. 12 of 100 is 3 sd above it."""
    found = [_found(NOISES[name], seed)[0] for seed in range(100)]
    assert sum(each.any() for each in found) <= 12
    assert np.mean(found) < 0.002


@pytest.mark.parametrize("name", ["normal", "heavy tails", "products", "mixed scales"])
def test_most_of_those_truly_hurt_are_found(name: str) -> None:
    found = [_found(NOISES[name], seed, hurt=4.0) for seed in range(10)]
    assert np.mean([each[truth].mean() for each, truth in found]) > 0.8
    assert np.mean([each[~truth].sum() / max(each.sum(), 1) for each, truth in found]) < FALSE_DISCOVERIES + 0.02


# ------------------------------------------------------------------------------------------------ chance


def test_what_chance_alone_gives() -> None:
    """A row alone is worse half of the time; of two equal ones both are in a quarter; a tie never is."""
    clients = 4_000
    one = flipped_shares(np.ones(clients), np.arange(clients), np.zeros(clients, int))
    assert one == (pytest.approx(0.5, abs=0.01), pytest.approx(0.5, abs=0.01))
    two = flipped_shares(np.ones(2 * clients), np.repeat(np.arange(clients), 2), np.zeros(2 * clients, int))
    assert two == (pytest.approx(0.25, abs=0.01), pytest.approx(0.25, abs=0.01))
    assert flipped_shares(np.zeros(3), np.arange(3), np.zeros(3, int)) == (0.0, 0.0)
    assert one == flipped_shares(np.ones(clients), np.arange(clients), np.zeros(clients, int))


# ------------------------------------------------------------------------------------------------ from run folders

CLIENTS, ROWS = 50, 8
Rows = dict[str, list[float]]


def compared(folder: Path, baseline: list[np.ndarray], method: list[np.ndarray], **options: Any) -> Path:
    """A comparison of (clients, rows) values by seed, whose clients' metrics are the means of their rows."""
    values = {"fedavg": baseline, "finetune": method}
    means = {label: [seed.mean(1).tolist() for seed in by_seed] for label, by_seed in values.items()}
    options.setdefault("rows_metric", options.get("metric", "mse"))
    made = make_comparison(folder, means, **options)
    for label, by_seed in values.items():
        for seed, rows in enumerate(by_seed):
            write_rows(made / "runs" / f"{label}-seed{seed}",
                       {f"client {i:02d}": row.tolist() for i, row in enumerate(rows)})  # fmt: skip
    return made


@pytest.fixture
def errors() -> np.ndarray:
    return np.random.default_rng(0).chisquare(3, (CLIENTS, ROWS))


def _against(summary: Summary) -> Any:
    return summary.method("finetune").against


def test_a_hundredth_of_a_percent_hurts_nobody(tmp_path: Path, errors: np.ndarray) -> None:
    """Worse by 0.01 % on every row of 73 % of the clients: certain, and of no matter."""
    worse = (np.arange(CLIENTS) < 37)[:, None]
    summary = summarize([compared(tmp_path, [errors], [errors * np.where(worse, 1.0001, 0.9999)])])
    against = _against(summary)
    assert against.hurt.value == pytest.approx(0.74)
    assert (against.hurt_beyond, against.helped_beyond) == (0.0, 0.0)
    said = [s for s in summary.answer if s.startswith("Finetune hurts 0 % of clients beyond chance (74.0 % raw; ")]
    assert len(said) == 1
    assert "Hurt most" not in said[0]
    assert said[0].endswith("No single client stands out from chance by its own test rows.")


def test_who_is_hurt_is_found_and_named(tmp_path: Path, errors: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    change = rng.normal(0, 0.3, (CLIENTS, ROWS)) + np.where(np.arange(CLIENTS) < 10, 3.0, -1.5)[:, None]
    summary = summarize([compared(tmp_path, [errors], [errors + change])])
    against = _against(summary)
    assert (against.hurt_beyond, against.helped_beyond) == (0.2, 0.8)
    assert against.hurt_by_chance == pytest.approx(0.5, abs=0.02)
    worst = against.most_hurt[0]
    assert worst.beyond
    assert worst.interval.low < worst.difference < worst.interval.high
    assert worst.difference == pytest.approx(change[int(worst.client[-2:])].mean())
    assert any("hurts 20.0 % of clients beyond chance (20.0 % raw; " in s for s in summary.answer)
    assert any(f"Hurt most: {worst.client} (+" in s and "95 % interval +" in s for s in summary.answer)
    record = json.loads(summary.to_json())["methods"][1]["against"]
    assert record["hurt_beyond"] == 0.2
    assert record["most_hurt"][0]["interval"]["low"] == pytest.approx(worst.interval.low, rel=1e-5)


def test_higher_is_better_turns_it_around(tmp_path: Path) -> None:
    """Right answers on 20 rows: the first five clients lose all of them, nobody else changes."""
    right = np.ones((CLIENTS, 20))
    right[:, ::4] = 0.0
    lost = np.where((np.arange(CLIENTS) < 5)[:, None], 0.0, right)
    summary = summarize([compared(tmp_path, [right], [lost], metric="accuracy", lower=False)])
    assert _against(summary).hurt_beyond == 0.1
    assert _against(summary).helped_beyond == 0.0
    interval = _against(summary).most_hurt[0].interval
    assert interval.low < -0.75 < interval.high < 0
    mirrored = summarize([compared(tmp_path / "m", [lost], [right], metric="accuracy", lower=False)])
    assert (_against(mirrored).hurt_beyond, _against(mirrored).helped_beyond) == (0.0, 0.1)


def test_what_matters_is_measured_by_the_error_of_an_accuracy(tmp_path: Path) -> None:
    """99 % are right: 1 % of the error is 0.0001, so a client that loses one answer in two hundred is hurt.

    Measured by the accuracy itself 0.0099 would have to be lost.
    """
    scores = np.full((CLIENTS, 200), 0.99)
    lost = scores - 0.005 * (np.arange(CLIENTS) < 5)[:, None] * np.linspace(0.9, 1.1, 200)
    summary = summarize([compared(tmp_path, [scores], [lost], metric="accuracy", lower=False)])
    assert _against(summary).hurt_beyond == 0.1


def test_a_row_is_averaged_over_its_seeds_first(tmp_path: Path, errors: np.ndarray) -> None:
    """Three worse in one seed, three better in the other: on average nothing, however many rows say so."""
    folder = compared(tmp_path, [errors, errors], [errors + 3.0, errors - 3.0])
    assert _against(summarize([folder])).hurt_beyond == 0.0
    folder = compared(tmp_path / "both", [errors, errors], [errors + 3.0, errors + 3.0])
    assert _against(summarize([folder])).hurt_beyond == 1.0


def test_rows_of_the_loss_stand_in_for_what_is_no_mean(tmp_path: Path, errors: np.ndarray) -> None:
    lost = errors + np.where(np.arange(CLIENTS) < 10, 3.0, -1.5)[:, None]
    folder = compared(tmp_path, [errors], [lost], metric="auc", lower=False, rows_metric="loss")
    against = _against(summarize([folder]))
    assert against.hurt_beyond == 0.2  # a higher loss hurts, though a higher AUC does not
    assert math.isnan(against.hurt_by_chance)
    assert against.rows_metric == "loss"
    assert math.isnan(against.most_hurt[0].interval.low)
    assert any("judged by the loss of their test rows" in s for s in summarize([folder]).answer)


@pytest.mark.parametrize("lacking", ["file", "name", "other metric"])
def test_without_rows_it_is_not_known(tmp_path: Path, errors: np.ndarray, lacking: str) -> None:
    named = {"file": "mse", "name": None, "other metric": "accuracy"}[lacking]
    folder = compared(tmp_path, [errors], [errors + 3.0], rows_metric=named)
    if lacking == "file":
        (folder / "runs" / "fedavg-seed0" / "rows.parquet").unlink()
    summary = summarize([folder])
    assert math.isnan(_against(summary).hurt_beyond)
    assert any(s.startswith("Finetune hurts 100 % of clients (50 of 50") for s in summary.answer)
    assert json.loads(summary.to_json())["methods"][1]["against"]["hurt_beyond"] is None


def test_a_torn_file_of_rows_is_named(tmp_path: Path, errors: np.ndarray) -> None:
    folder = compared(tmp_path, [errors], [errors])
    (folder / "runs" / "fedavg-seed0" / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"fedavg-seed0.rows\.parquet cannot be read as a table of client, row and val"):
        summarize([folder])
