"""Embeddings against groups: renaming clusters by hand, and a run looked at again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bespoke as library
from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.analysis.embeddings import matched
from bespoke.errors import UserError
from bespoke.report.embeddings import confusion_figure, embedding_parts
from bespoke.statistics.analyses import in_words, read_analyses


def test_clusters_are_renamed_by_hand() -> None:
    """Clusters 0, 1, 2 hold groups (b b a), (a), (c c): b, a, c; the stray a in cluster 0 is guessed b."""
    places, group = np.array([0, 0, 0, 1, 2, 2]), np.array([1, 1, 0, 0, 2, 2])
    assert matched(places, group, 3).tolist() == [1, 1, 1, 0, 2, 2]
    # more clusters than groups: what is left over takes the name of its largest group
    assert matched(np.array([0, 0, 1, 2]), np.array([0, 0, 0, 1]), 2).tolist() == [0, 0, 0, 1]


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """Clients of opposite tastes, whose embeddings have learned them."""
    random = np.random.default_rng(0)
    clients, rows = 20, 30
    x = random.choice([-1.0, 1.0], clients * rows)
    sign = np.repeat([1.0 if i % 2 == 0 else -1.0 for i in range(clients)], rows)
    table = pd.DataFrame({
        "client": np.repeat([f"c{i:02d}" for i in range(clients)], rows), "x": x,
        "y": np.where(sign * x > 0, "yes", "no"), "group": np.where(sign > 0, "even", "odd"),
    })  # fmt: skip
    table.to_csv(tmp_path / "tastes.csv", index=False)
    stage = {
        "method": "fedembed", "assignment": "personal", "rounds": 15, "size": 4, "lr": 0.3, "embedding_lr": 3.0,
        "epochs": 2,
    }  # fmt: skip
    data = {
        "table": str(tmp_path / "tastes.csv"), "client": "client", "target": "y", "group": "group", "features": ["x"],
    }  # fmt: skip
    model = {"name": "mlp", "hidden": [8]}
    quick = {"evaluate_every": 15, "engine": {"kind": "vectorized"}}
    library.run({"data": data, "model": model, "metric": "f1", "stage": [stage], **quick}, tmp_path / "run")
    return tmp_path / "run"


def test_a_run_looked_at_again(finished: Path) -> None:
    (record,) = Analyses.of([finished], Wanted(embeddings=True)).run()
    assert record["groups"] == ["even", "odd"]
    counts = np.array(record["counts"])
    assert counts.sum(1).tolist() == [10, 10]
    assert record["recovered"] == pytest.approx(np.trace(counts) / 20)
    assert record["recovered"] > 0.8
    assert record["by"] == "k-means"
    table = pd.read_parquet(finished / "analysis" / "embeddings.parquet")
    assert list(table.columns) == ["client", "group", "guess", "x", "y"]
    assert len(table) == 20
    assert json.loads((finished / "analysis" / "embeddings.json").read_text())["seed"] == 0
    assert not (finished / "analysis" / "candidates.safetensors").exists()  # no personal model was made
    analyses = read_analyses([finished])
    assert "guessed right" in in_words(analyses[0])[0]
    figures, entries = embedding_parts(analyses, {"fedembed": "FedEmbed"})
    assert [entry["title"] for entry in entries] == ["FedEmbed"]
    assert len(figures["embeddings-0-plane"]["data"]) == 2
    assert confusion_figure(record)["data"][0]["z"][0][0] == pytest.approx(counts[0, 0] / 10)


def test_methods_without_embeddings_are_refused(tmp_path: Path) -> None:
    library.run({"data": {"source": "synthetic"}, "stage": [{"method": "fedavg", "rounds": 1}]}, tmp_path / "run")
    with pytest.raises(UserError, match="no embeddings"):
        Analyses.of([tmp_path / "run"], Wanted(embeddings=True)).run()
