"""Choosing on validation scores, and on nothing else."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.experiment.choosing import (
    Acceptance,
    Chosen,
    QueryScores,
    SupportScores,
    ValidationScores,
    accepted,
    choose,
    choose_by_size,
)

# three clients, three candidates; the metric is a sum divided by the count: means are the sums over 2
SUMS = np.array([[4.0, 2.0, 2.0], [4.0, 6.0, 6.0], [np.nan, np.nan, np.nan]])
COUNT = np.array([[2.0] * 3, [2.0] * 3, [0.0] * 3])
CLIENTS = np.array([10, 20, 30])


def scores(sums: np.ndarray = SUMS, kind: type = ValidationScores) -> ValidationScores:
    return kind(CLIENTS, {"mse": sums, "loss": sums, "count": COUNT})


def test_choosing_on_query_rows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="would leak"):
        choose(scores(kind=QueryScores), "mse", True)


def test_ties_keep_the_earlier() -> None:
    """Over all clients every candidate has mean 2: the first wins. For client 10, candidates 1 and 2 tie: 1 wins."""
    for lower in (True, False):
        assert choose(scores(), "mse", lower).default == 0
    own = choose(scores(), "mse", True, "client")
    assert own == Chosen(0, {10: 1, 20: 0})  # client 30 has no rows: it follows the common choice
    assert own.of(CLIENTS).tolist() == [1, 0, 0]
    assert choose(scores(), "mse", False, "client").own == {10: 0, 20: 1}


def test_the_last_and_the_allowed() -> None:
    assert choose(scores(), "mse", True, "last").default == 2
    assert choose(scores(), "mse", True, "last", allowed=[0, 1]).default == 1
    assert choose(scores(), "mse", True, "client", allowed=[1, 2]) == Chosen(1, {10: 1, 20: 1})


def test_a_candidate_that_diverged_is_never_chosen() -> None:
    """NaN or infinite for one client: worst of all, whichever way is better."""
    for bad in (np.nan, np.inf):
        sums = SUMS.copy()
        sums[0, 0] = bad
        assert choose(scores(sums), "mse", True).default == 1
    sums = SUMS.copy()
    sums[1, 1] = np.nan
    assert choose(scores(sums), "mse", False, "client").own[20] == 2


def test_clients_with_as_many_examples_choose_together() -> None:
    """Clients 0 to 39 have 1 to 40 examples: the ten smallest do best with candidate 0, all others with candidate 1.

    A client of another population takes the choice of the part that its own number of examples falls in.
    """
    clients, sizes = np.arange(40), np.arange(1, 41)
    small = (sizes <= 10)[:, None]
    sums = np.where(small, [[1.0, 2.0, 3.0]], [[2.0, 1.0, 3.0]])
    found = ValidationScores(clients, {"mse": sums, "count": np.ones((40, 3))})
    rule = choose_by_size(found, sizes, "mse", True)
    assert rule.edges.tolist() == [11, 21, 31]
    assert rule.choice((clients, sizes)).of(clients).tolist() == [0] * 10 + [1] * 30
    assert rule.choice((np.array([7, 8, 9]), np.array([10, 11, 500]))).of(np.array([7, 8, 9])).tolist() == [0, 1, 1]
    assert choose_by_size(found, sizes, "mse", False, allowed=[0, 1]).choice((clients, sizes)).own[0] == 1
    few = ValidationScores(clients[:12], {name: each[:12] for name, each in found.sums.items()})
    assert choose_by_size(few, sizes[:12], "mse", True).picks == (0,)  # too few clients for parts
    with pytest.raises(TypeError, match="would leak"):
        choose_by_size(QueryScores(clients, found.sums), sizes, "mse", True)  # type: ignore[arg-type]


def test_nobody_has_validation_rows() -> None:
    nothing = np.full((3, 3), np.nan)
    assert choose(scores(nothing), "mse", True, "client", allowed=[1, 2]) == Chosen(1, {})


def test_clients_count_alike_whatever_their_rows() -> None:
    """Means over clients are unweighted: one client of 1000 rows does not outvote one of 2."""
    sums = np.array([[1000.0, 3000.0], [8.0, 2.0], [0.0, 0.0]])
    counts = np.array([[1000.0] * 2, [2.0] * 2, [0.0] * 2])
    found = ValidationScores(CLIENTS, {"mse": sums, "count": counts})
    assert choose(found, "mse", True).default == 1  # (1 + 4) / 2 against (3 + 1) / 2
    assert found.at(Chosen(1, {20: 0}), "mse")[:2].tolist() == [3.0, 4.0]
    assert np.isnan(found.values("mse")[2]).all()


SNIPPET = """
from bespoke.data.splits import Query, Train, Validation
from bespoke.experiment.choosing import QueryScores, choose

def watch(rows: Validation) -> None: ...

def wrong(query: Query, train: Train, validation: Validation, scores: QueryScores) -> None:
    watch(validation)
    watch(query)
    watch(train)
    choose(scores, "mse", True)
"""
# torch and numpy are left out: they take half a minute to analyse, and the types in question are bespoke's own
CONFIG = """
[mypy]
[mypy-torch.*,numpy.*]
follow_imports = skip
ignore_missing_imports = True
"""


def test_mypy_rejects_query_rows_where_validation_rows_are_needed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "wrong.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "wrong.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    errors = [line for line in done.stdout.splitlines() if line.startswith("wrong.py") and "error" in line]
    assert [line.split(":")[1] for line in errors] == ["9", "10", "11"], done.stdout
    assert 'has incompatible type "Query"; expected "Validation"' in errors[0]
    assert 'has incompatible type "Train"; expected "Validation"' in errors[1]
    assert 'has incompatible type "QueryScores"; expected "ValidationScores | SupportScores"' in errors[2]


def test_acceptance_by_margin_and_by_examples() -> None:
    """Client 10 gains half of the shared model's 2, client 20 loses, client 30 cannot show anything."""
    picked = Chosen(1, {})

    def taken(rule: Acceptance, examples: tuple[int, ...] = (5, 50, 500)) -> list[int]:
        return accepted(picked, rule, scores(), np.array(examples), CLIENTS, "mse", True).of(CLIENTS).tolist()

    assert taken(Acceptance(margin=0.0)) == [1, 0, 0]
    assert taken(Acceptance(margin=0.5)) == [0, 0, 0]  # strictly more than the margin
    assert taken(Acceptance(margin=0.49)) == [1, 0, 0]
    assert taken(Acceptance(min_examples=50)) == [0, 1, 1]
    assert taken(Acceptance(min_examples=50, margin=0.0)) == [0, 0, 0]
    assert taken(Acceptance(min_examples=5, margin=0.0)) == [1, 0, 0]
    assert taken(Acceptance()) == [1, 1, 1]
    nobody = accepted(picked, Acceptance(margin=0.0), None, np.array([5] * 3), CLIENTS, "mse", True)
    assert nobody.of(CLIENTS).tolist() == [0, 0, 0]


def test_accepting_on_query_rows_is_a_type_error() -> None:
    leak: Any = scores(kind=QueryScores)
    with pytest.raises(TypeError, match="would leak"):
        accepted(Chosen(1, {}), Acceptance(margin=0.0), leak, np.array([5] * 3), CLIENTS, "mse", True)
    with pytest.raises(TypeError, match="would leak"):
        choose(leak, "loss", True, "support")


def test_support_rows_serve_only_who_chooses_on_them() -> None:
    support = scores(kind=SupportScores)
    assert choose(support, "loss", True, "support").own == {10: 1, 20: 0}
    with pytest.raises(TypeError, match="would leak"):
        choose(support, "loss", True, "client")


# Many clients


def test_a_sum_that_all_candidates_share_has_one_column() -> None:
    wide, narrow = (ValidationScores(CLIENTS, {"mse": SUMS, "count": count}) for count in (COUNT, COUNT[:, :1]))
    np.testing.assert_array_equal(narrow.values("mse"), [[2, 1, 1], [2, 3, 3], [np.nan] * 3])
    np.testing.assert_array_equal(narrow.values("mse"), wide.values("mse"))
    picked = Chosen(1, {20: 0})
    assert narrow.at(picked, "mse").tolist()[:2] == wide.at(picked, "mse").tolist()[:2] == [1.0, 2.0]
    assert narrow.sum_at(picked, "count").tolist() == [2.0, 2.0, 0.0]
    assert narrow.under(2, "mse").tolist()[:2] == [1.0, 3.0]
    assert choose(narrow, "mse", True, "client") == choose(wide, "mse", True, "client") == Chosen(0, {10: 1, 20: 0})


def test_half_the_squared_error_follows_from_the_squared_error() -> None:
    assert scores().values("half_mse")[:2].tolist() == [[1.0, 0.5, 0.5], [1.0, 1.5, 1.5]]


@pytest.mark.parametrize(("lower", "who"), [(True, "global"), (True, "client"), (False, "client")])
def test_choices_agree_with_a_table_of_all_values(lower: bool, who: Any) -> None:
    random = np.random.default_rng(2)
    sums, count = random.integers(0, 9, (60, 7)).astype(np.float32), random.integers(0, 3, (60, 1)).astype(np.float32)
    sums = np.where(random.random(sums.shape) < 0.1, np.nan, sums * count).astype(np.float32)
    found = choose(ValidationScores(np.arange(60), {"mse": sums, "count": count}), "mse", lower, who)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.where(count > 0, sums / count, np.nan).astype(np.float64)
    cost = np.nan_to_num(values if lower else -values, nan=np.inf)
    seen = np.flatnonzero(np.isfinite(values).any(1))
    assert found.default == cost[seen].mean(0).argmin()
    assert found.own == ({int(c): int(cost[c].argmin()) for c in seen} if who == "client" else {})


def test_choosing_never_holds_a_table_in_double_precision() -> None:
    clients, candidates = 20_000, 50
    sums = np.ones((clients, candidates), np.float32)
    held = ValidationScores(np.arange(clients), {"mse": sums, "count": np.ones((clients, 1), np.float32)})
    tracemalloc.start()
    choose(held, "mse", True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < clients * candidates * 8 / 4  # a quarter of such a table
