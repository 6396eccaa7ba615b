"""Motley's tables, concerns and clusters, with numbers that can be checked by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.report.checks import Concern, concerns
from bespoke.report.motley_tables import TableLine, motley_lines
from bespoke.report.report import read, summarize_study
from bespoke.statistics.analyses import Analysis, combined, in_words, read_analyses
from bespoke.statistics.candidates import axes_of, settings_of
from bespoke.statistics.clusters import clusters_of
from results_motley import markdown

Write = Callable[..., Path]


def found_in(folder: Path) -> list[Concern]:
    study, table = read([folder])
    return concerns(study, summarize_study(study, table), table)


def lines_of(folder: Path) -> dict[tuple[str, str], TableLine]:
    study, table = read([folder])
    summary = summarize_study(study, table)
    lines = motley_lines(study, table, summary, concerns(study, summary, table))
    return {(line.label, line.what): line for line in lines}


# The table


def test_the_table_by_hand(write_comparison: Write, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0, 3.0], [2.0, 4.0]], "finetune": [[1.0, 1.0], [3.0, 3.0]]}
    methods = [
        {"label": label, "name": label, "title": label, "chosen": {"lr": 0.1}, "stages": [{"method": label}]}
        for label in values
    ]
    expected = {
        "source": "a paper",
        "fedavg": {"mean": 2.5, "sd_clients": 1.0},
        "finetune": {"mean": 2.0, "sd_seeds": 0.5, "hurt": 0.25, "hurt_seeds": 0.03},
    }
    folder = write_comparison(tmp_path / "c", values, compare={"methods": methods, "expected": expected})
    lines = lines_of(folder)
    before = lines["finetune", "per-client MSE mean before FT"]
    assert before.ours is not None
    assert before.ours.by_seed == [2.0, 3.0]
    assert before.ours.value == 2.5
    assert before.published() == "2.5"  # the shared model's published numbers are those of fedavg
    after = lines["finetune", "per-client MSE mean after FT"]
    assert after.shown() == "2.000 ± 1.4"  # means 1 and 3
    assert after.published() == "2 ± 0.5"
    std = lines["fedavg", "per-client MSE std"]
    assert std.ours is not None
    assert std.ours.by_seed == [1.0, 1.0]
    hurt = lines["finetune", '% clients "hurt" after FT']  # of the same seed: nobody of two, then one of two
    assert hurt.ours is not None
    assert hurt.ours.by_seed == [0.0, 0.5]
    assert hurt.shown() == "25.0 % ± 35.4 %"
    assert hurt.published() == "25 % ± 3 %"
    assert lines["fedavg", "tuned hyper-parameters"].text == "lr = 0.1"
    assert ("fedavg", '% clients "hurt"') not in lines
    assert ("fedavg", "still improving on validation") not in lines  # there is no curve
    text = markdown(list(lines.values()))
    assert "| FedAvg + fine-tuning (FT) | per-client MSE mean before FT | 2.5 | 2.500 ± 0.71 |" in text


def test_what_still_improves_is_said(write_comparison: Write, tmp_path: Path) -> None:
    """16 rounds at 2, then 1.1 and down to 1: of the last value, a tenth was gained in the last fifth of the rounds."""
    curve = [2.0] * 16 + [1.1, 1.1, 1.1, 1.0, 1.0]
    folder = write_comparison(tmp_path / "c", {"fedavg": [[1.0]], "finetune": [[1.0]]}, rounds=20, curve=curve)
    assert lines_of(folder)["fedavg", "still improving on validation"].text == "10.0 %, not converged"


@pytest.mark.parametrize(
    ("chosen", "stage", "said"),
    [
        ({"lr": 0.1}, {}, "not compared (all layers)"),
        ({}, {"part": "last"}, "not compared (last layer)"),
        ({"part": "last"}, {}, "last layer"),
    ],
)
def test_layers_are_compared_only_where_both_were_tried(
    write_comparison: Write, tmp_path: Path, chosen: dict[str, object], stage: dict[str, str], said: str
) -> None:
    entry = {"label": "finetune", "name": "finetune", "title": "finetune", "chosen": chosen, "stages": [stage]}
    folder = write_comparison(tmp_path / "c", {"fedavg": [[1.0]], "finetune": [[1.0]]}, compare={"methods": [entry]})
    assert lines_of(folder)["finetune", "FT all layers vs last layer"].text == said


# Clusters


def clustered(groups: list[str], candidates: list[list[str]]) -> pd.DataFrame:
    tables = [
        pd.DataFrame({"method": "hypcluster", "seed": seed, "client": [f"c{i}" for i in range(len(groups))],
                      "group": groups, "candidate": chosen})
        for seed, chosen in enumerate(candidates)
    ]  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def test_clusters_against_groups() -> None:
    groups = ["en", "en", "en", "es", "es"]
    same = [f"cluster {i}" for i in (1, 1, 1, 0, 0)]
    mixed = [f"cluster {i}" for i in (0, 0, 0, 0, 0)]
    [found] = clusters_of(clustered(groups, [same, mixed]))
    assert found.names == ["cluster 0", "cluster 1"]
    assert found.groups == ["en", "es"]
    assert found.counts == [[0, 3], [2, 0]]
    assert found.agreement is not None
    assert found.agreement.by_seed == [1.0, 0.0]  # the same division under other numbers; one cluster says nothing
    assert found.largest.by_seed == [0.6, 1.0]
    assert found.used.by_seed == [2, 1]
    [plain] = clusters_of(clustered([""] * 5, [same]))
    assert plain.agreement is None
    assert plain.counts == [[2, 3]]
    assert clusters_of(clustered(groups, [["epoch 1"] * 5])) == []
    many = clusters_of(clustered(["g"] * 12, [[f"cluster {i}" for i in range(12)]]))[0]
    assert many.names[-2:] == ["cluster 10", "cluster 11"]  # by number, not by letter


# Concerns


@pytest.mark.parametrize(("tested", "kinds"), [(40, {"hurt"}), (5, {"small test sets", "hurt"})])
def test_many_hurt(write_comparison: Write, tmp_path: Path, tested: int, kinds: set[str]) -> None:
    """Of 30 clients every third is worse off by 0.5, the others gain 0.5."""
    base = np.ones(30)
    moved = base + np.where(np.arange(30) % 3 == 0, 0.5, -0.5)
    folder = write_comparison(
        tmp_path / "c", {"fedavg": [base.tolist()], "finetune": [moved.tolist()]}, query=[tested] * 30,
        compare={"methods": [{"label": label} for label in ("fedavg", "finetune")]},
    )  # fmt: skip
    found = {concern.kind: concern for concern in found_in(folder)}
    assert set(found) == kinds
    assert found["hurt"].label == "finetune"
    assert "33.3 %" in found["hurt"].text
    assert ("too few of them" in found["hurt"].text) == (tested < 20)


def test_few_hurt_is_no_concern(toy: Path) -> None:
    kinds = [concern.kind for concern in found_in(toy)]
    assert "hurt" not in kinds  # one of four is a quarter, not more
    assert "grid" not in kinds  # two values have edges only


@pytest.mark.parametrize(("chosen", "edge"), [(0.1, "smallest"), (0.3, ""), (1.0, "largest")])
def test_the_edge_of_the_grid(write_comparison: Write, tmp_path: Path, chosen: float, edge: str) -> None:
    tuning = [{"knobs": {"lr": lr, "name": "adam"}, "validation": 1.0} for lr in (1.0, 0.1, 0.3)]
    methods = [{"label": "fedavg", "chosen": {"lr": chosen, "name": "adam"}, "tuning": tuning}]
    folder = write_comparison(tmp_path / "c", {"fedavg": [[1.0] * 3]}, query=[40] * 3, compare={"methods": methods})
    found = [concern.text for concern in found_in(folder) if concern.kind == "grid"]
    assert bool(found) == bool(edge)
    assert not edge or f"lr = {chosen:g} ({edge} of 3)" in found[0]


def test_the_edge_of_the_candidates(write_comparison: Write, tmp_path: Path) -> None:
    names = {"epoch 0": 1.0, **{f"lr {lr}, epoch {e}": 1.0 for lr in (0.1, 0.2, 0.3) for e in (1, 2, 3)}}
    values = {"fedavg": [[1.0] * 4], "finetune": [[0.9] * 4]}
    folder = write_comparison(
        tmp_path / "c", values, query=[40] * 4, candidates=names,
        compare={"methods": [{"label": label} for label in values]},
    )  # fmt: skip
    place = folder / "runs/finetune-seed0/clients.parquet"
    table = pd.read_parquet(place)
    table.assign(candidate=["lr 0.2, epoch 3"] * 3 + ["epoch 0"]).to_parquet(place)
    [found] = [concern for concern in found_in(folder) if concern.kind == "grid"]
    assert "epoch 3, the largest of 3, by 75.0 % of clients" in found.text
    assert "lr" not in found.text


def test_notes_of_the_comparison_and_collapse(write_comparison: Write, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0] * 4], "hypcluster": [[0.9] * 4]}
    methods = [{"label": label} for label in values]
    notes = ["ditto keeps something for every client from round to round"]
    folder = write_comparison(tmp_path / "c", values, query=[40] * 4, compare={"methods": methods, "notes": notes})
    place = folder / "runs/hypcluster-seed0/clients.parquet"
    pd.read_parquet(place).assign(candidate="cluster 1").to_parquet(place)
    found = {concern.kind: concern for concern in found_in(folder)}
    assert found["state"].text == notes[0]
    assert "100 % of clients are in one cluster" in found["collapse"].text


# What analyses left behind


def test_names_of_candidates() -> None:
    assert settings_of("lr 0.01, epoch 3") == {"lr": 0.01, "epoch": 3.0}
    assert settings_of("mix 0.5") == {"mix": 0.5}
    for name in ("model", "cluster 1", "model 2", "largest cluster", "global", "personal"):
        assert settings_of(name) == {}
    assert axes_of(("epoch 0", "lr 0.1, epoch 1", "lr 0.2, epoch 1")) == ["lr", "epoch"]


def test_seeds_are_averaged() -> None:
    one: dict[str, Any] = {"a": 1, "text": "x", "list": [1.0, None], "deep": [{"b": 2}]}
    other: dict[str, Any] = {"a": 2, "text": "y", "list": [3.0, 1.0], "deep": [{"b": 2}]}
    assert combined([one, other]) == {"a": 1.5, "text": None, "list": [2.0, None], "deep": [{"b": 2}]}
    assert combined([one]) == one


def test_only_what_was_asked_for_alike_is_averaged(tmp_path: Path) -> None:
    folders = []
    for seed, fraction, mean in ((0, 0.5, 1.0), (1, 0.5, 3.0), (2, 0.25, 100.0)):
        folder = tmp_path / str(seed)
        (folder / "analysis").mkdir(parents=True)
        point = {"fraction": fraction, "examples": 4, "mean": mean, "hurt": 0.5}
        record = {"format": 1, "analysis": "fewer-examples", "asked": {}, "label": "finetune", "seed": seed,
                  "metric": "mse", "lower_is_better": True, "points": [point]}  # fmt: skip
        (folder / "analysis/fewer-examples.json").write_text(json.dumps(record))
        folders.append(folder)
    (tmp_path / "0/analysis/damaged.json").write_text("{")
    [found] = read_analyses(folders)
    assert found.seeds == [0, 1]
    assert in_words(found) == ["With 50.0 % of the examples (4 a client): mean MSE 2.000, 50.0 % of clients hurt."]


def _analysis(name: str, seeds: int = 1, **record: Any) -> Analysis:
    return Analysis("m", name, list(range(seeds)), {"metric": "mse", "lower_is_better": True, **record}, [])


@pytest.mark.parametrize(
    ("p", "seeds", "said"),
    [
        (0.24, 1, "Whether choosing for itself is better or worse cannot be told (+0.200, paired Wilcoxon p = 0.24)."),
        (0.01, 1, "Choosing for itself is worse on average (+0.200, paired Wilcoxon p = 0.010)."),
        (0.01, 2, "Choosing for itself changes the mean by +0.200."),
    ],
)
def test_who_chooses_claims_no_more_than_p_does(p: float, seeds: int, said: str) -> None:
    one = {"mean": 1.0, "hurt": 0.1, "candidate": "epoch 1"}
    analysis = _analysis("per-client", seeds, **{"global": one, "client": one, "difference": {"mean": 0.2, "p": p}})
    assert in_words(analysis)[1] == said


def test_a_sweep_says_what_validation_chooses() -> None:
    points = [{"value": lr, "mean": mean, "hurt": 0.5, "validation": validation}
              for lr, mean, validation in ((0.1, 2.0, 1.0), (1.0, 1.0, 3.0))]  # fmt: skip
    said = in_words(_analysis("sweep-lrs", knob="lrs", axis="lr", points=points))
    assert "the best mean on test rows and hurts fewest clients: lr 1 (" in said[0]
    assert said[1] == "Validation chooses lr 0.1 (mean MSE 2.000, 50.0 % hurt)."
    points[1]["validation"] = 0.5
    same = in_words(_analysis("sweep-lrs", knob="lrs", axis="lr", points=points))
    assert same[1] == "Validation chooses the same as is best."


def test_the_largest_cluster_is_not_called_a_start() -> None:
    """Nobody is served the largest cluster's model before choosing: what is said begins with no "from"."""
    parts = {"shared": {"own": 4.0, "others": 5.0}, "chosen": {"own": 1.0, "others": 6.0}, "curves": [], "axis": None}
    said = in_words(_analysis("ood", start="largest cluster", trained=True, **parts))
    assert said[0] == "As chosen, the mean MSE is 1.000 on the clients' own rows and 6.000 on other clients' rows."
    assert said[1].startswith("Had everyone taken the largest cluster's model, it would be 4.000 on")
    plain = in_words(_analysis("ood", start="epoch 0", trained=True, **parts))
    assert plain[0].startswith("Personalized as chosen, the mean MSE goes from 4.000 to 1.000")
