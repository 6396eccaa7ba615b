"""The map of FedPC's users and contexts: planes and neighbours by hand, and a run's own embeddings on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bespoke as library
from bespoke.analysis.preference_map import Plane, Preferences, nearest
from bespoke.deploy.forget import forget_client
from bespoke.report.embeddings import embedding_parts, users_figure
from bespoke.statistics.analyses import in_words, read_analyses
from bespoke.storage import open_arrays
from command import bespoke
from small_language import WIDTH
from test_fedpc import settings

pytest.importorskip("transformers")


def test_a_plane_and_neighbours_by_hand() -> None:
    """Points along (3, 4, 0) and across it: 10 apart along the first axis, 2 along the second."""
    points = np.array([[0.0, 0, 1], [6, 8, 1], [0, 0, -1], [6, 8, -1]])
    plane = Plane.of(points)
    assert plane.shares == pytest.approx((100 / 104, 4 / 104))
    np.testing.assert_allclose(np.abs(plane.place(points)), [[5, 1]] * 4, atol=1e-9)
    np.testing.assert_allclose(plane.place(points[:1] + points[1:2])[0, 1] ** 2, 4, atol=1e-9)  # not among those placed
    assert nearest(points).tolist() == [2, 3, 0, 1]
    assert nearest(points[:1]).tolist() == [-1]
    assert Plane.of(points[:1]).place(points[:1]).tolist() == [[0, 0]]


def test_neighbours_of_one_context_against_chance() -> None:
    """Two of x lie together, as do two of y; of three others one has the same context."""
    points = np.array([[0.0], [1], [9], [10]])
    found = Preferences(np.arange(4), points, points[:2], ["x", "y"], ["x", "x", "y", "y"])
    assert found.together() == (1.0, pytest.approx(1 / 3))
    table = found.table(["a", "b", "c", "d"])
    assert table["nearest"] == ["b", "a", "d", "c", "y", "x"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("map")
    library.run(settings(folder), folder / "run")
    return folder / "run"


def test_a_run_is_mapped_and_forgets(finished: Path) -> None:
    shown = bespoke("analyze", finished, "--embeddings")
    assert shown.code == 0, shown.err
    assert "Embeddings of 4 users and 2 contexts" in shown.out
    table = pd.read_parquet(finished / "analysis/embeddings.parquet")
    users = table[table["kind"] == "user"]
    assert users["client"].tolist() == ["anna", "bert", "carl", "dora"]
    assert users["context"].tolist()[:2] == ["x", "y"]
    [segment] = (finished / "private").glob("*.safetensors")
    bytes_of_clients = open_arrays(segment)[0]["rows"].numpy()  # Adam's moments and time, then psi
    points = np.ascontiguousarray(bytes_of_clients[:, -4 * WIDTH :]).view(np.float32).astype(float)
    assert np.abs(points - 1).max() < 0.2  # psi begins at one
    apart = np.linalg.norm(points[:, None] - points, axis=-1) + np.diag([np.inf] * 4)
    assert users["nearest"].tolist() == [users["client"].iloc[i] for i in apart.argmin(1)]
    scores = np.linalg.svd(points - points.mean(0), full_matrices=False)
    np.testing.assert_allclose(users["x"].abs(), np.abs(scores[0][:, 0] * scores[1][0]), rtol=1e-6)
    (analysis,) = read_analyses([finished])
    assert not any(client in sentence for sentence in in_words(analysis) for client in users["client"])
    figures, _ = embedding_parts([analysis], {"fedpc": "FedPC"})
    assert "anna" in str(figures["embeddings-0-users"])
    hidden, _ = embedding_parts([analysis], {"fedpc": "FedPC"}, named=False)
    assert not any(client in str(hidden["embeddings-0-users"]) for client in users["client"])
    assert forget_client(finished, "carl")["traces_left"] == 0
    again = pd.read_parquet(finished / "analysis/embeddings.parquet")
    assert "carl" not in {*again["client"], *again["nearest"]}


def test_a_hostile_name_is_text_in_the_figure() -> None:
    row = {"kind": "user", "client": "<b>x</b>", "context": "c", "nearest": "<i>", "x": 0.0, "y": 0.0}
    assert "<b>" not in str(users_figure([row], ["c"], True)["data"][0]["text"])
    assert "<i>" not in str(users_figure([row], ["c"], True)["data"][0]["hovertext"])
