"""Which method is best by which number, with numbers that can be checked by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bespoke.report.best import BestBy
from bespoke.report.page import write_report
from bespoke.report.report import summarize
from bespoke.report.summary import Summary

Write = Callable[..., Path]


def lines_of(summary: Summary) -> dict[str, BestBy]:
    return {line.what: line for line in summary.best_by}


def test_each_number_has_its_own_best(write_comparison: Write, tmp_path: Path) -> None:
    """Ten clients: `rough` has the lowest mean, `even` the best worst client and the least spread."""
    values = {
        "fedavg": [[4.0] * 10] * 2,
        "rough": [[1.0] * 9 + [9.0]] * 2,  # mean 1.8, worst 9, hurts one of ten
        "even": [[2.0] * 9 + [3.0]] * 2,  # mean 2.1, worst 3, hurts nobody
    }
    lines = lines_of(summarize([write_comparison(tmp_path / "c", values)]))
    mean = lines["mean MSE over clients"]
    assert (mean.label, mean.value, mean.tested, mean.seeds) == ("rough", 1.8, True, 2)
    assert mean.tied == ["even"]  # by one client of ten: the interval of the difference includes zero
    worst = lines["MSE of the worst served tenth of clients"]
    assert (worst.label, worst.value, worst.tied, worst.tested) == ("even", 3.0, [], False)
    spread = lines["standard deviation of MSE across clients"]
    assert (spread.label, spread.value) == ("fedavg", 0.0)
    hurt = lines["clients hurt against the baseline"]
    assert (hurt.label, hurt.value, hurt.unit, hurt.seeds) == ("even", 0.0, "share", 2)
    assert lines["mean MAE over clients"].label == "rough"  # (9 + 3) / 10 against (9 x 1.41 + 1.73) / 10
    traffic = lines["traffic per client"]  # all send alike
    assert (traffic.label, traffic.value, traffic.tied, traffic.seeds) == ("fedavg", 3600.0, ["rough", "even"], None)
    assert lines["local steps per client"].label == "fedavg"  # 24 steps; the others have 12 more


def test_weights_and_seeds(write_comparison: Write, tmp_path: Path) -> None:
    """`second` has the better mean in one seed of two, `first` on average and by rows."""
    values = {"first": [[1.0, 3.0], [3.0, 1.0]], "second": [[5.0, 1.0], [1.0, 1.0]]}
    folder = write_comparison(tmp_path / "c", values, baseline="first", query=[9, 1])
    lines = lines_of(summarize([folder]))
    mean = lines["mean MSE over clients"]  # 2 and 2 against 3 and 1: equal on average
    assert (mean.label, mean.value, mean.seeds, mean.tied) == ("first", 2.0, 1, ["second"])
    weighted = lines["mean MSE, clients weighted by their test examples"]  # 1.2, 2.8 against 4.6, 1.0
    assert (weighted.label, weighted.seeds) == ("first", 1)
    assert np.isclose(weighted.value, 2.0)


def test_higher_is_better_and_clear_leads(write_comparison: Write, tmp_path: Path) -> None:
    base = np.linspace(0.5, 0.6, 30)
    values = {label: [(base + gain).tolist()] for label, gain in (("fedavg", 0.0), ("finetune", 0.2), ("ditto", 0.1))}
    folder = write_comparison(tmp_path / "c", values, metric="accuracy", lower=False)
    lines = lines_of(summarize([folder]))
    mean = lines["mean accuracy over clients"]
    assert (mean.label, mean.tied, mean.tested, mean.seeds) == ("finetune", [], True, 1)
    assert lines["accuracy of the worst served tenth of clients"].label == "finetune"


def test_who_diverged_is_best_by_nothing(write_comparison: Write, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0, 2.0]], "finetune": [[0.5, 1.0]], "local": [[float("nan"), 0.1]]}
    summary = summarize([write_comparison(tmp_path / "c", values)])
    assert {line.label for line in summary.best_by} == {"fedavg", "finetune"}
    alone = summarize([write_comparison(tmp_path / "d", {"fedavg": [[1.0]], "local": [[float("nan")]]})])
    assert alone.best_by == []


def test_the_json_and_the_page_show_it(toy: Path, tmp_path: Path) -> None:
    summary = summarize([toy])
    first = json.loads(summary.to_json())["best_by"][0]
    assert (first["what"], first["label"], first["value"]) == ("mean MSE over clients", "finetune", 2.25)
    assert first["tied"] == ["fedavg"]
    page = write_report([toy], tmp_path / "page.html").read_text()
    table = page.partition("Which method is best by which number")[2].partition("</table>")[0]
    assert "mean MSE over clients" in table
    assert "2 of 2" in table
    assert "3.60 kB".replace(" ", "\u00a0") in table
    assert "Not converged" not in page.partition("Which method is best by which number")[2].partition("<details>")[0]


def test_the_page_names_who_has_not_converged(write_comparison: Write, tmp_path: Path) -> None:
    curve = [2.0] * 16 + [1.1, 1.1, 1.1, 1.0, 1.0]
    values = {"fedavg": [[1.0, 2.0]], "finetune": [[1.0, 1.0]]}
    folder = write_comparison(tmp_path / "c", values, rounds=20, curve=curve)
    page = write_report([folder], tmp_path / "page.html").read_text()
    assert "Not converged, so that more rounds may change their place: Fedavg, Finetune." in page
