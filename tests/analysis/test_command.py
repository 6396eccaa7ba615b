"""`bespoke analyze` as its users meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bespoke.analysis.reopened import Finished
from bespoke.runs.events import Interrupted
from command import bespoke, plain_table, refused, write_csv

Make = Callable[..., Path]


def test_one_analysis_of_one_run(opposite: Make) -> None:
    path = opposite()
    told = bespoke("analyze", path, "--sweep", "finetune.lrs=0.1,0.2")
    assert told.code == 0, told.err
    assert "lr varied" in told.out
    assert f"Figures: bespoke report {path}" in told.out
    assert {entry.name for entry in (path / "analysis").iterdir()} == {
        "candidates.safetensors", "sweep-lrs.json", "sweep-lrs.parquet",
    }  # fmt: skip
    wanted = ("--ood", "--fewer-examples", "1,0.5", "--per-client", "--examples", "all, 1")
    told = bespoke("analyze", path, *wanted, "--json")
    assert told.code == 0, told.err
    assert told.err == ""
    found = json.loads(told.out)
    assert [record["analysis"] for record in found["analyses"]] == ["ood", "fewer-examples", "examples", "per-client"]
    assert [point["most"] for point in found["analyses"][2]["points"]] == [1, 0]
    assert found["reports"] == []
    report = bespoke("report", path)
    assert report.code == 0, report.err
    page = (path / "report.html").read_text(encoding="utf-8")
    for title in ("Fit for oneself", "Fewer examples", "at most 1 example", "want different settings", "Who should"):
        assert title in page


def test_a_whole_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "plain.csv", plain_table(8))
    columns = ("--client", "client", "--target", "y", "--methods", "fedavg,local,finetune", "--no-tune")
    assert bespoke("compare", "plain.csv", *columns, "--rounds", 2, "--seeds", 2, "--out", "c").code == 0
    assert "bespoke analyze FOLDER" in Path("c/report.html").read_text(encoding="utf-8")
    told = bespoke("analyze", "c", "--ood", "--json")
    assert told.code == 0, told.err
    records = json.loads(told.out)["analyses"]
    assert [(r["label"], r["seed"]) for r in records] == [
        (label, seed) for label in ("local", "finetune") for seed in (0, 1)
    ]
    page = Path("c/report.html").read_text(encoding="utf-8")
    assert "figure-ood-others" in page
    assert "bespoke analyze FOLDER" not in page
    refused(bespoke("analyze", "c", "--sweep", "fedprox.mu=1"), "fedprox", "nor does it apply to another of the 6 runs")


def test_mistakes(opposite: Make, tmp_path: Path) -> None:
    shared = opposite("shared", last={})
    refused(bespoke("analyze", shared, "--ood"), "shared", "fedavg", "finetune")
    refused(bespoke("analyze", tmp_path / "none", "--ood"), "none")
    refused(bespoke("analyze", tmp_path, "--ood"), "is not a run folder")
    for text in ("0", "2", "half", "1,,2"):
        refused(bespoke("analyze", shared, "--fewer-examples", text), text, "1,0.5,0.25")
    for text in ("0", "-1", "1.5", "some", "1,,2"):
        refused(bespoke("analyze", shared, "--examples", text), text, "1,5,15,all")
    refused(bespoke("analyze", shared, "--examples", "all"), "fedavg", "gives every client the shared model")
    refused(bespoke("analyze", shared, "--sweep", "=1"), "METHOD.KNOB")
    (shared / "result.json").unlink()
    refused(bespoke("analyze", shared, "--ood"), "unfinished")
    assert "Usage" in bespoke("analyze", "--help").out


def test_an_interrupted_analysis_goes_on(opposite: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = opposite()
    scores, calls = Finished.scores, 0

    def then_stop(self: Finished, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:  # candidates, others' rows, and in the middle of fewer examples
            raise Interrupted("stopped")
        return scores(self, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Finished, "scores", then_stop)
        told = bespoke("analyze", path)
    assert told.code == 130
    assert f"go on with: bespoke analyze {path}" in told.err
    kept = (path / "analysis/ood.json").stat().st_mtime_ns
    assert not (path / "analysis/fewer-examples.json").exists()
    assert bespoke("analyze", path).code == 0
    assert (path / "analysis/ood.json").stat().st_mtime_ns == kept
    assert (path / "analysis/fewer-examples.json").exists()
