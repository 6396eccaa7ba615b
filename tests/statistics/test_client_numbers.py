"""Numbers over clients, checked by hand, and the run folders they come from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bespoke.errors import UserError
from bespoke.statistics import clients as over
from bespoke.statistics.clients import cells, gains
from bespoke.statistics.folders import load_clients, read_study

values_of_clients = arrays(float, st.tuples(st.integers(1, 4), st.integers(1, 30)), elements=st.floats(-100, 100))


def test_table_has_one_row_per_method_seed_and_client(toy: Path) -> None:
    table = load_clients(read_study([toy]).runs)
    assert len(table) == 2 * 2 * 4
    assert list(table.columns[:2]) == ["method", "seed"]
    assert table.query("method == 'finetune' and seed == 1 and client == 'client 03'")["query_mse"].item() == 4.5


def test_numbers_of_a_tiny_table() -> None:
    values = np.array([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]])
    assert over.mean(values) == over.OverSeeds(3.5, pytest.approx(math.sqrt(2)), [2.5, 4.5])
    # weights 1, 1, 1, 7 of 10: (1 + 2 + 3 + 28) / 10 and (3 + 4 + 5 + 42) / 10
    assert over.weighted_mean(values, np.array([[1.0, 1, 1, 7]] * 2)).by_seed == pytest.approx([3.4, 5.4])
    assert over.deviation(values).value == pytest.approx(math.sqrt(1.25))
    assert over.worst_tenth(values, lower_is_better=True).by_seed == [4.0, 6.0]
    assert over.worst_tenth(values, lower_is_better=False).by_seed == [1.0, 3.0]
    assert over.richest_tenth(values, np.array([5.0, 9.0, 1.0, 2.0])).by_seed == [2.0, 4.0]
    assert [decile.value for decile in over.deciles(np.arange(11.0)[None])] == pytest.approx(list(range(1, 10)))


def test_a_tenth_is_rounded_up() -> None:
    assert over.worst_tenth(np.arange(11.0)[None], lower_is_better=True).value == 9.5  # two of eleven: 10 and 9


def test_absent_clients_do_not_count() -> None:
    values = np.array([[1.0, np.nan], [3.0, 5.0]])
    assert over.mean(values).by_seed == [1.0, 4.0]
    assert over.weighted_mean(values, np.ones((2, 2))).by_seed == [1.0, 4.0]
    assert math.isnan(over.mean(np.full((1, 2), np.nan)).value)


def test_hurt_is_strict_and_paired() -> None:
    baseline = np.array([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]])
    method = np.array([[0.5, 2.0, 3.5, 5.0], [0.5, 2.5, 2.0, 5.0]])
    found = gains(method, baseline, lower_is_better=True)
    assert found.hurt.by_seed == [0.5, 0.5]
    assert found.helped.by_seed == [0.25, 0.5]
    assert found.same.by_seed == [0.25, 0.0]
    # Client 1 is worse once and equal once: not the majority. Client 2 is worse once and better on average.
    assert found.hurt_clients == [3]
    assert found.helped_clients == [0]
    assert found.mean_loss == 1.0
    assert found.mean_gain == 0.5


@given(values_of_clients, st.randoms())
def test_everyone_is_hurt_helped_or_the_same(values: np.ndarray, random: Any) -> None:
    baseline = np.round(values + random.choice([-1, 0, 1]))
    found = gains(values, baseline, lower_is_better=True)
    for parts in zip(found.hurt.by_seed, found.helped.by_seed, found.same.by_seed):
        assert sum(parts) == pytest.approx(1)
    assert not set(found.hurt_clients) & set(found.helped_clients)
    mirrored = gains(-values, -baseline, lower_is_better=False)
    assert mirrored.hurt_clients == found.hurt_clients
    assert mirrored.helped == found.helped


@given(values_of_clients, st.randoms())
def test_the_order_of_clients_changes_nothing(values: np.ndarray, random: Any) -> None:
    order = list(range(values.shape[1]))
    random.shuffle(order)
    moved = values[:, order]
    assert over.mean(moved) == over.mean(values)
    assert over.worst_tenth(moved, True) == over.worst_tenth(values, True)
    assert over.deviation(moved).value == pytest.approx(over.deviation(values).value)
    assert over.deciles(moved) == over.deciles(values)


def test_the_order_of_rows_changes_nothing(toy: Path) -> None:
    table = load_clients(read_study([toy]).runs)
    first = cells(table, "query_mse")
    second = cells(table.sample(frac=1, random_state=3), "query_mse", methods=["fedavg", "finetune"])
    assert first.clients == second.clients
    assert np.array_equal(first.values, second.values)
    assert np.array_equal(first.examples, second.examples)


def _table(**columns: list[Any]) -> pd.DataFrame:
    size = len(columns["client"])
    counts = {f"{name}_examples": [1] * size for name in ("train", "support", "validation", "query")}
    return pd.DataFrame({"group": [""] * size, **counts, **columns})


@pytest.mark.parametrize("broken", [np.inf, np.nan, -np.inf])
@pytest.mark.parametrize("lower", [True, False])
def test_divergence_is_infinite_and_takes_no_client_from_the_others(broken: float, lower: bool) -> None:
    table = _table(
        method=["a", "a", "a", "b", "b", "b"], seed=[0] * 6, client=["x", "y", "z"] * 2,
        query_mse=[1.0, 2.0, np.nan, 3.0, broken, np.nan],
    )  # fmt: skip
    box = cells(table, "query_mse", lower_is_better=lower)
    assert box.clients == ["x", "y"]  # z has no value under any method: it had no query rows
    assert box.undefined == {"a": 0, "b": 1}
    assert box.left_out == 0
    assert over.mean(box.of("a")).value == 1.5
    assert over.mean(box.of("b")).value == (math.inf if lower else -math.inf)
    assert over.worst_tenth(box.of("b"), lower).value == (math.inf if lower else -math.inf)
    assert math.isnan(over.deviation(box.of("b")).value)


def test_a_method_that_diverged_everywhere_does_not_silence_the_others() -> None:
    values = [1.0, 2.0, np.nan, np.nan]
    table = _table(method=["a", "a", "b", "b"], seed=[0] * 4, client=["x", "y"] * 2, query_mse=values)
    box = cells(table, "query_mse")
    assert box.clients == ["x", "y"]
    assert over.mean(box.of("a")).value == 1.5
    assert over.mean(box.of("b")).value == math.inf


def test_a_reference_tells_what_can_be_scored() -> None:
    """No method is finite for y, but a constant is: so both diverged there. Its own client w is not ours."""
    table = _table(method=["a", "a", "b", "b"], seed=[0] * 4, client=["x", "y"] * 2, query_mse=[1.0, np.nan] * 2)
    beside = _table(method=["constant"] * 2, seed=[0] * 2, client=["w", "y"], query_mse=[5.0, 7.0])
    box = cells(table, "query_mse", references=beside)
    assert box.clients == ["x", "y"]
    assert box.undefined == {"a": 1, "b": 1}
    assert box.of("constant").tolist() == [[pytest.approx(math.nan, nan_ok=True), 7.0]]


def test_a_client_that_another_run_does_not_have_is_left_out_for_all() -> None:
    table = _table(method=["a", "a", "b"], seed=[0] * 3, client=["x", "y", "x"], query_mse=[1.0, 2.0, 3.0])
    box = cells(table, "query_mse")
    assert (box.clients, box.left_out, box.undefined) == (["x"], 1, {"a": 0, "b": 0})


def test_helped_needs_a_positive_mean() -> None:
    """Better in two of three seeds by 1, worse in the third by 5: neither helped nor, in the majority, hurt."""
    found = gains(np.array([[1.0], [1.0], [7.0]]), np.array([[2.0], [2.0], [2.0]]), lower_is_better=True)
    assert found.client[0] == pytest.approx(-1.0)
    assert (found.helped_clients, found.hurt_clients) == ([], [])
    mirrored = gains(np.array([[3.0], [3.0], [-3.0]]), np.array([[2.0], [2.0], [2.0]]), lower_is_better=True)
    assert (mirrored.helped_clients, mirrored.hurt_clients) == ([], [])


def test_methods_without_a_common_seed_or_client_cannot_be_paired() -> None:
    with pytest.raises(UserError, match="no seed in common"):
        cells(_table(method=["a", "b"], seed=[0, 1], client=["x", "x"], query_mse=[1.0, 2.0]), "query_mse")
    with pytest.raises(UserError, match="no client in common"):
        cells(_table(method=["a", "b"], seed=[0, 0], client=["x", "y"], query_mse=[1.0, 2.0]), "query_mse")


# ------------------------------------------------------------------------------------------------ folders


def test_the_order_of_methods_is_that_of_the_comparison(toy: Path) -> None:
    assert read_study([toy]).labels == ["fedavg", "finetune"]


def test_run_folders_alone(toy: Path) -> None:
    study = read_study([toy / "runs" / "finetune-seed1", toy / "runs" / "fedavg-seed1"])
    assert study.labels == ["finetune", "fedavg"]
    assert study.compare == {}


def _break(folder: Path, what: str) -> None:
    result = json.loads((folder / "result.json").read_text())
    if what == "unfinished":
        (folder / "result.json").unlink()
    elif what == "other format":
        (folder / "result.json").write_text(json.dumps(result | {"format": 7}))
    elif what == "not JSON":
        (folder / "result.json").write_text('{"format": 1, "lab')
    elif what == "no metric":
        (folder / "result.json").write_text(json.dumps({k: v for k, v in result.items() if k != "metric"}))
    elif what == "no table":
        (folder / "clients.parquet").unlink()
    elif what == "torn table":
        (folder / "clients.parquet").write_bytes(b"PAR1 and then nothing")
    elif what == "no column":
        (folder / "result.json").write_text(json.dumps(result | {"metric": "accuracy"}))
    elif what == "twice":
        table = pd.read_parquet(folder / "clients.parquet")
        pd.concat([table, table]).to_parquet(folder / "clients.parquet")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("unfinished", r"result\.json is missing: the run is unfinished"),
        ("other format", r"result\.json has format 7, .* reads format 1"),
        ("not JSON", r"result\.json is not JSON"),
        ("no metric", r"result\.json has no metric"),
        ("no table", r"clients\.parquet is missing"),
        ("torn table", r"clients\.parquet cannot be read"),
        ("no column", r"clients\.parquet has no column query_accuracy; found: client"),
        ("twice", r"clients\.parquet has the client 'client 00' more than once"),
    ],
)
def test_a_broken_run_folder_is_named(toy: Path, what: str, said: str) -> None:
    folder = toy / "runs" / "fedavg-seed0"
    _break(folder, what)
    with pytest.raises(UserError, match=said):
        load_clients(read_study([folder]).runs)


def test_foreign_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run folder"):
        read_study([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        read_study([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="no run folder was given"):
        read_study([])


def test_an_unfinished_comparison_says_how_to_finish_it(toy: Path) -> None:
    (toy / "runs" / "finetune-seed1" / "result.json").unlink()
    with pytest.raises(UserError, match=r"1 of 4 runs .*finetune-seed1.* finish it with: bespoke compare toy\.toml"):
        read_study([toy])


def test_a_damaged_log_is_named_with_its_line(toy: Path) -> None:
    run = read_study([toy]).runs[0]
    (run.folder / "ledger.jsonl").write_text('{"round": 1}\n{"round": 2')
    with pytest.raises(UserError, match=r"ledger\.jsonl, line 2"):
        run.lines("ledger.jsonl")


def test_runs_that_cannot_be_compared(tmp_path: Path, write_run: Any) -> None:
    one = write_run(tmp_path / "one", "fedavg", 0, [1.0], ["x"])
    with pytest.raises(UserError, match="both 'fedavg' with seed 0"):
        read_study([one, write_run(tmp_path / "two", "fedavg", 0, [1.0], ["x"])])
    with pytest.raises(UserError, match="report on runs with the same metric"):
        read_study([one, write_run(tmp_path / "three", "ditto", 0, [1.0], ["x"], metric="accuracy", lower=False)])


def test_a_comparison_of_another_format(tmp_path: Path, write_comparison: Any) -> None:
    folder = write_comparison(tmp_path / "c", {"fedavg": [[1.0]]}, compare={"format": 2})
    with pytest.raises(UserError, match=r"compare\.json has format 2"):
        read_study([folder])
