"""What the page shows after Motley."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.report.page import write_report

BAD = "<b onclick=x>bad</b>"


@pytest.fixture(autouse=True)
def _short_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


def page_of(folder: Path, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    text = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    begin = text.index('id="payload">') + len('id="payload">')
    return text, json.loads(text[begin : text.index("</script>", begin)])


def analyzed(folder: Path) -> None:
    """Analyses of the toy's fine-tuning, as `bespoke analyze` writes them."""
    point = {"clients": 4, "sd": 1.0, "shared": 2.5, "helped": 0.75, "change": [-2, -1, 0, 1, 2], "validation": 1.0}
    for seed in (0, 1):
        place = folder / "runs" / f"finetune-seed{seed}" / "analysis"
        place.mkdir()
        common = {"format": 1, "label": "finetune", "seed": seed, "metric": "mse", "lower_is_better": True, "asked": {}}
        curve = {"name": "lr 0.1", "at": [0, 1, 2], "own": [2.5, 2.0, 1.5 + seed], "others": [2.5, 3.0, None]}
        records = {
            "ood": {"rows": 10, "axis": "epoch", "curves": [curve], "shared": {"own": 2.5, "others": 2.5},
                    "chosen": {"own": 2.0, "others": 3.0}},
            "fewer-examples": {"points": [{**point, "fraction": f, "examples": 8, "mean": 2.0 / f, "hurt": 0.25}
                                          for f in (1.0, 0.5)]},
            "sweep-lrs": {"knob": "lrs", "axis": "lr", "method": "finetune", "curves": [],
                          "points": [{**point, "value": lr, "mean": 2.0 - lr, "hurt": lr, "chosen": "x"}
                                     for lr in (0.01, 0.1, 1.0)]},
            "per-client": {"global": {**point, "mean": 2.0, "hurt": 0.25, "candidate": "lr 0.1", "distinct": 1},
                           "client": {**point, "mean": 1.9, "hurt": 0.5, "candidate": "lr 0.1", "distinct": 3},
                           "difference": {"mean": -0.1, "better": 0.5, "worse": 0.25, "p": 0.5}},
        }  # fmt: skip
        for name, record in records.items():
            (place / f"{name}.json").write_text(json.dumps({**common, "analysis": name, **record}))
        pd.DataFrame({
            "client": [f"client {i}" for i in range(3)] + [BAD], "support_examples": [10, 20, 30, 40], "shared": 2.5,
            "global_value": [2.0, 2.0, 2.0, 3.0], "client_value": [1.0, 2.0, 2.0, 3.0],
        }).to_parquet(place / "per-client.parquet")  # fmt: skip


def test_the_sections_that_are_always_there(toy: Path, tmp_path: Path) -> None:
    text, payload = page_of(toy, tmp_path)
    for words in (
        'id="motley"',
        'id="concerns"',
        "Before you rely on it",
        "FedAvg + fine-tuning (FT)",
        "std before FT",
    ):
        assert words in text, words
    assert "bespoke analyze FOLDER" in text
    assert 'id="analyses"' not in text
    assert payload["columns"]["tested"] == [5] * 4
    assert payload["figures"]["change"]["data"][0]["marker"]["symbol"] == {"open below": 20}
    assert payload["figures"]["traffic"]["note"] == "1 kB is 250 parameters."
    assert "1 kB is 250 parameters." in text


def test_own_and_others_models_are_a_table(toy: Path, tmp_path: Path) -> None:
    for seed in (0, 1):
        place = toy / "runs" / f"finetune-seed{seed}" / "analysis"
        place.mkdir()
        columns = {"own": {"clients": 2, "mean": 2.0 + seed, "difference": 0.0},
                   "other": {"clients": 2, "mean": 3.0 + seed, "difference": 1.0, "low": 0.5, "high": 1.5}}  # fmt: skip
        record = {"format": 1, "label": "finetune", "seed": seed, "metric": "mse", "lower_is_better": True,
                  "asked": {}, "analysis": "crossed", "columns": columns}  # fmt: skip
        (place / "crossed.json").write_text(json.dumps(record))
        table = pd.DataFrame({"client": ["a", BAD], "own": [1.0 + seed, 3.0 + seed], "other": [2.0, 4.5]})
        table.to_parquet(place / "crossed.parquet")
    text, _ = page_of(toy, tmp_path)
    assert "<td>2.500</td><td></td><td></td>" in text  # own, the mean over seeds
    assert "<td>3.500</td><td>1.000</td><td>0.5000 to 1.500</td>" in text
    assert '<th scope="row">a</th><td>1.500</td><td>2.000</td>' in text
    assert BAD not in text


def test_every_analysis_has_its_figure(toy: Path, tmp_path: Path) -> None:
    analyzed(toy)
    text, payload = page_of(toy, tmp_path)
    figures = payload["figures"]
    for name in ("ood-others", "fewer-mean", "fewer-change", "sweep-0-mean", "sweep-0-hurt", "choosers-0"):
        assert name in figures, name
        assert f'id="figure-{name}"' in text
    assert "ood-other-groups" not in figures
    curve = figures["ood-others"]["data"][0]
    assert curve["x"] == [2.5, 2.0]  # others' rows of the last epoch are not known
    assert curve["customdata"] == ["epoch 0", "epoch 1"]
    hurt = figures["sweep-0-hurt"]
    assert hurt["data"][0]["y"] == [1.0, 10.0, 100.0]
    assert hurt["layout"]["xaxis"]["type"] == "log"
    assert figures["fewer-mean"]["data"][0]["y"] == [2.0, 4.0]
    assert "fewest clients are hurt at lr 0.01" in text
    assert "<b onclick" not in text
    assert "bespoke analyze FOLDER" not in text


def test_clusters_on_the_page(write_comparison: Any, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0] * 4], "hypcluster": [[0.9] * 4]}
    folder = write_comparison(tmp_path / "c", values, groups=["en", "en", "<i>es</i>", "<i>es</i>"])
    place = folder / "runs/hypcluster-seed0/clients.parquet"
    chosen = [f"cluster {i}" for i in (0, 0, 1, 1)]
    pd.read_parquet(place).assign(candidate=chosen).to_parquet(place)
    text, payload = page_of(folder, tmp_path)
    figure = payload["figures"]["clusters-0"]
    bars = {trace["name"]: trace["y"] for trace in figure["data"]}
    assert bars == {"&lt;i&gt;es&lt;/i&gt;": [0, 2], "en": [2, 0]}
    assert "adjusted Rand index: 1.00" in text
    assert "largest cluster" in text


def test_many_epochs_are_thinned_and_divergence_does_not_rule() -> None:
    from bespoke.report.analysis_figures import _middle, _spaced

    kept = _spaced(101)
    assert kept[0] == 0
    assert kept[-1] == 100
    assert len(kept) <= 11
    assert np.all(np.diff(np.diff(kept)) >= -1)  # ever rarer
    (low, high), beyond = _middle([1.0, 1.1, 1.2, 1e9])
    assert low < 1
    assert 1.2 < high < 2
    assert beyond == 1
