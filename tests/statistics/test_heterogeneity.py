"""How clients differ: by hand, against scipy, and where they do not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.spatial.distance import jensenshannon

from bespoke.data.population import Population
from bespoke.statistics.heterogeneity import heterogeneity
from command import bespoke, refused, write_csv

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


def population(y: np.ndarray, clients: list[str], task: str) -> Population:
    about = {"name": "t", "task": task, "target": "y"}
    return Population.build({"x": np.zeros((len(y), 1), np.float32), "y": y}, clients, about=about)


def test_two_clients_with_nothing_in_common() -> None:
    """(1, 0) against (1/2, 1/2): H(3/4, 1/4) - (0 + 1) / 2 = 0.3113 bits; scipy's distance is its root."""
    y = np.repeat([0, 1], 40)
    found = heterogeneity(population(y, ["a"] * 40 + ["b"] * 40, "classification"))
    assert found.distance == pytest.approx([0.31128, 0.31128], abs=1e-5)
    assert found.distance[0] == pytest.approx(jensenshannon([1, 0], [0.5, 0.5], base=2) ** 2)
    assert (found.unit, found.beyond_chance, found.sizes.tolist()) == ("bits", 1.0, [40, 40])


def test_padding_of_texts_does_not_count() -> None:
    """Client a says 1 and 2, client b says 1 alone, however much padding follows: (3/4, 1/4) of all."""
    y = np.array([[1, 2, 0, 0], [1, 1, 0, 0]])
    found = heterogeneity(population(y, ["a", "b"], "language"))
    expected = [jensenshannon(mix, [0.75, 0.25], base=2) ** 2 for mix in ([0.5, 0.5], [1, 0])]
    assert found.distance == pytest.approx(expected)


def test_numbers_in_standard_deviations() -> None:
    """Two clients a distance of 6 apart and alike otherwise: each is 3 from the middle in the mean of all moves."""
    random = np.random.default_rng(0)
    noise = random.standard_normal(4000)
    y = np.concatenate([noise[:2000] - 3, noise[2000:] + 3]).astype(np.float32)
    found = heterogeneity(population(y, ["a"] * 2000 + ["b"] * 2000, "regression"))
    assert found.distance == pytest.approx([3 / y.std()] * 2, rel=0.02)
    assert found.beyond_chance == 1.0


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_clients_that_differ_by_chance_alone(task: str) -> None:
    """300 clients of 5 to 40 rows of one distribution: about one of twenty seems to differ."""
    random = np.random.default_rng(1)
    sizes = random.integers(5, 41, 300)
    y = random.integers(0, 4, sizes.sum()) if task == "classification" else random.standard_normal(sizes.sum())
    names = np.repeat([f"c{i:03d}" for i in range(300)], sizes).tolist()
    assert 0.02 < heterogeneity(population(y, names, task)).beyond_chance < 0.09


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"who": f"<b>{i % 4}</b>", "x": 7 * i % 5, "y": i % 4} for i in range(80)]
    write_csv(Path("t.csv"), pd.DataFrame(rows))
    said = bespoke("data", "t.csv", "--client", "who", "--target", "y", "--task", "regression", "--figure", "--json")
    found = json.loads(said.out)
    assert (found["clients"], found["mean"], found["sd"], found["beyond_chance"]) == (4, 20.0, 0.0, 1.0)
    page = Path(found["page"]).read_text(encoding="utf-8")
    assert "20.00 ± 0" in page
    assert "<b>1</b>" not in page  # names are escaped
    refused(bespoke("data", "--figure"), "of which data")
    refused(bespoke("data", "t.csv", "--figure"), "--client")
    refused(bespoke("data", "nope", "--figure"), "nope")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real data is not beside the repo (../shared/data)")
def test_school_as_in_motleys_table_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BESPOKE_DATA", str(REAL))
    found = json.loads(bespoke("data", "school", "--figure", "--json").out)
    assert (found["clients"], round(found["mean"]), round(found["sd"])) == (139, 111, 56)
