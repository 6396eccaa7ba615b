"""One method in several settings within a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bespoke.errors import UserError
from bespoke.experiment.checks import check_compare
from bespoke.experiment.variants import Entry
from bespoke.study.comparison import Comparison

FILE = """
[data]
source = "synthetic"
options = { clients = 6, examples = 20 }

[engine]
workers = 0

[compare]
methods = ["fedavg"]
seeds = 1
rounds = 2

[compare.grid]
fedavg = { lr = [0.1] }
hypcluster = { lr = [0.05, 0.1], k = [2, 3] }

[compare.knobs.hypcluster]
batch_size = 8

[compare.entries.random]
method = "hypcluster"
before = []
upload = "index"
k = 2

[compare.entries."warm start"]
method = "hypcluster"
before = [{ method = "ensemble", rounds = 3 }]
rounds = 1
"""

WARM = {
    "method": "hypcluster",
    "before": [{"method": "ensemble", "rounds": 3, "select": "validation"}],
    "share": "none",
}


def test_a_stage_before_takes_over_common_knobs() -> None:
    """k, the learning rate and the server are the ensemble's too; `share` is not, and what it sets itself stays."""
    entry = Entry.of("warm", {"warm": WARM})
    knobs = {**entry.knobs, "k": 4, "lr": 0.2, "server": {"name": "adam"}, "select": "train"}
    before, own = entry.stages(knobs, rounds=9)
    assert own == {"method": "hypcluster", "rounds": 9, **knobs}
    assert before == {
        "method": "ensemble", "rounds": 3, "k": 4, "lr": 0.2, "server": {"name": "adam"}, "select": "validation",
    }  # fmt: skip
    assert entry.after == ""


def test_clusters_are_prepared_by_an_ensemble_unless_the_entry_says_otherwise() -> None:
    """Nine rounds: three of an ensemble with the same k and learning rate, six of clusters, which may be reseeded."""
    knobs = {"k": 4, "lr": 0.2}
    before, own = Entry.of("hypcluster", {}).stages(knobs, rounds=9)
    assert before == {"method": "ensemble", "rounds": 3, "k": 4, "lr": 0.2}
    assert own == {"method": "hypcluster", "rounds": 6, "k": 4, "lr": 0.2, "reseed": 5}
    labelled = {"three": {"method": "hypcluster", "k": 3, "reseed": 0, "rounds": 60}}
    before, own = Entry.of("three", labelled).stages(labelled["three"], rounds=9)
    assert (before["method"], before["rounds"], before["k"]) == ("ensemble", 20, 3)
    assert (own["rounds"], own["reseed"]) == (40, 0)
    before, own = Entry.of("hypcluster", {}).stages({"share": "body"}, rounds=3)
    assert (before["method"], before["rounds"], own["rounds"]) == ("fedavg", 1, 2)
    assert len(Entry.of("hypcluster", {}).stages(knobs, rounds=1)) == 1  # too few for two stages
    before, own = Entry.of("hypcluster", {}).stages({"rounds": "auto"}, rounds=3)
    assert (before["rounds"], own["rounds"]) == (20, "auto")


@pytest.mark.parametrize("cold", [{"before": []}, {"after": ""}])
def test_an_entry_may_ask_for_a_cold_start(cold: dict[str, object]) -> None:
    """Then nothing is put before it, and its knobs are the method's own."""
    entry = Entry.of("cold", {"cold": {"method": "hypcluster", **cold}})
    assert entry.stages({"k": 2}, rounds=9) == [{"method": "hypcluster", "rounds": 9, "k": 2}]


def test_a_comparison_that_names_hypcluster_is_warm_and_pays_for_it(tmp_path: Path) -> None:
    """Six rounds of four clients: two rounds in which each trains two models, four in which it trains one."""
    data = {"source": "synthetic", "options": {"clients": 4, "examples": 20}}
    base = {"data": data, "engine": {"workers": 0}}
    out = Comparison(base, tmp_path / "out", ("fedavg", "hypcluster"), (0,), 6, tune=False).run()
    assert [line["method"] for line in _rounds(out, "hypcluster")] == ["ensemble"] * 2 + ["hypcluster"] * 4
    plain, clusters = (
        [line["steps"] for line in _lines(out, name, "ledger.jsonl") if line["round"]]
        for name in ("fedavg", "hypcluster")
    )
    assert len(plain) == len(clusters) == 6
    assert clusters == [2 * plain[0]] * 2 + plain[2:]


def _lines(out: Path, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "runs" / f"{name}-seed0" / file).read_text().splitlines()]


def _rounds(out: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in _lines(out, name, "rounds.jsonl") if line["round"]]


def test_what_an_entry_fixes_is_not_tuned() -> None:
    entries = {"three": {"method": "hypcluster", "k": 3}}
    assert set(Entry.of("three", entries).tried({})) == {"lr"}
    assert set(Entry.of("hypcluster", entries).tried({})) == {"lr", "k"}
    grid = {"hypcluster": {"k": [2], "lr": [1.0]}, "other": {"k": [5]}}
    assert Entry.of("three", entries).tried(grid) == {"lr": [1.0]}
    assert Entry.of("three", entries).tried({**grid, "three": {"epochs": [2]}}) == {"epochs": [2]}
    assert Entry.of("finetune", {}).after == "fedavg"


def test_a_comparison_of_one_method_in_two_settings(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(FILE)
    out = Comparison.read(tmp_path / "file.toml", tmp_path / "out").run()
    about = json.loads((out / "compare.json").read_text())
    entries = {entry["label"]: entry for entry in about["methods"]}
    assert list(entries) == ["fedavg", "random", "warm start"]
    assert [entry["title"] for entry in entries.values()] == ["FedAvg", "random", "warm start"]
    assert set(entries["random"]["reveals"].values()) == {"EACH"}
    assert set(entries["warm start"]["reveals"].values()) == {"SUM"}
    assert [len(entry["tuning"]) for entry in entries.values()] == [1, 2, 4]
    ensemble, clusters = entries["warm start"]["stages"]
    assert (ensemble["method"], ensemble["rounds"], clusters["method"], clusters["rounds"]) == (
        "ensemble", 3, "hypcluster", 1,
    )  # fmt: skip
    assert ensemble["batch_size"] == clusters["batch_size"] == 8
    assert (ensemble["k"], ensemble["lr"]) == (clusters["k"], clusters["lr"])
    lines = [json.loads(t) for t in (out / "runs" / "warm start-seed0" / "rounds.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines if line["round"]] == ["ensemble"] * 3 + ["hypcluster"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"a/b": {"method": "fedavg"}}, "a label consists of"),
        ({"..": {"method": "fedavg"}}, "a label consists of"),
        ({"a": {"k": 2}}, "names no method"),
        ({"a": {"method": "hypclust"}}, "Did you mean 'hypcluster'"),
        ({"a": {"method": ["fedavg"]}}, "unknown method"),
        ({"a": {"method": "fedavg", "before": "ensemble"}}, "a list of stages"),
        ({"a": {"method": "fedavg", "before": ["ensemble"]}}, "a list of stages"),
        ({"a": {"method": "fedavg", "before": [{"rounds": 3}]}}, "names no method"),
        ({"local": {"method": "fedavg"}}, "the name of another method"),
        ({"a": {"method": "group-fl", "after": "fedav"}}, "unknown entry 'fedav'.*Did you mean 'fedavg'"),
        ({"a": {"method": "group-fl", "after": 3}}, "unknown entry"),
        ({"a": {"method": "group-fl", "after": "fedavg", "before": []}}, "give one of them"),
        (
            {"a": {"method": "group-fl", "after": "b"}, "b": {"method": "group-fl", "after": "a"}},
            "in a circle: a -> b -> a",
        ),
        ({"a": 3}, "entries.a"),
    ],
)
def test_entries_that_are_refused(entries: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_compare({"entries": entries}, "file.toml")


def test_labels_stand_where_methods_do() -> None:
    entries = {"warm": WARM}
    found = check_compare({"methods": ["warm"], "entries": entries, "grid": {"warm": {"k": [2]}}}, "file.toml")
    assert found.methods == ["warm"]
    with pytest.raises(UserError, match="Did you mean 'warm'"):
        check_compare({"methods": ["warn"], "entries": entries}, "file.toml")


def test_an_entry_after_another_starts_from_it_as_it_is_tuned(tmp_path: Path) -> None:
    """Three deep: each is tuned after the one it starts from, whose chosen learning rate it takes along."""
    entries = {
        "found": {"method": "feature-groups", "rounds": 1},
        "group-fl": {"method": "group-fl", "after": "found", "rounds": 2},
        "alone": {"method": "group-fl", "after": "", "rounds": 1},
    }
    assert [Entry.of(label, entries).after for label in entries] == ["fedavg", "found", ""]
    assert Entry.of("group-perfl", entries).after == "group-fl"
    data = {"source": "synthetic", "options": {"clients": 6, "examples": 20, "groups": 2}}
    grid = {"fedavg": {"lr": [0.05, 0.1]}, "group-fl": {"lr": [0.05, 0.1]}, "feature-groups": {}}
    out = Comparison(
        {"data": data, "engine": {"workers": 0}}, tmp_path / "out", ("group-perfl", "alone"), (0,), 2, grid=grid,
        entries=entries,
    ).run()  # fmt: skip
    about = {entry["label"]: entry for entry in json.loads((out / "compare.json").read_text())["methods"]}
    assert list(about) == ["group-perfl", "alone"]
    first, second, third, last = about["group-perfl"]["stages"]
    assert [s["method"] for s in (first, second, third, last)] == [
        "fedavg", "feature-groups", "group-fl", "group-perfl",
    ]  # fmt: skip
    tried = {path.name for path in (out / "tuning").iterdir()}
    assert {"fedavg-lr0.05", "fedavg-lr0.1", "group-fl-lr0.05", "group-fl-lr0.1", "alone-lr0.1"} <= tried
    config = (out / "tuning" / "group-fl-lr0.1" / "config.toml").read_text()
    assert f"lr = {first['lr']}" in config  # fedavg was settled before groups were tried
    assert [s["method"] for s in about["alone"]["stages"]] == ["group-fl"]
