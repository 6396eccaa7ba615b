"""What a comparison returns: every client's numbers, figures as objects, and how it looks in a cell or a terminal."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest

import bespoke
from bespoke.errors import UserError
from bespoke.report.result import Result

SHARED = [[4.0, 1.0, 2.5, 3.0], [2.0, 2.0, 1.5, 4.0]]  # seeds x clients
OWN = [[1.0, 1.5, 2.5, 2.0], [1.0, 3.0, 0.5, 1.0]]
NAMES = ["zoe K.", "yan P.", "xia M.", "walt O."]  # not in the order of the table, nor in that of the values


@pytest.fixture
def folder(write_comparison: Callable[..., Path], tmp_path: Path) -> Path:
    values = {"fedavg": SHARED, "finetune": OWN}
    return write_comparison(tmp_path / "out", values, NAMES, groups=["a", "a", "b", "b"], examples=[9, 8, 7, 6])


def test_clients(folder: Path) -> None:
    table = Result.read(folder).clients
    assert list(table.columns) == [
        "client", "group", "method", "seed", "train", "support", "validation", "query",
        "baseline", "personal", "change",
    ]  # fmt: skip
    found = table.set_index(["method", "seed", "client"])
    for seed, name in ((s, n) for s in (0, 1) for n in NAMES):
        place = NAMES.index(name)
        row = found.loc[("finetune", seed, name)]
        assert (row["baseline"], row["personal"]) == (SHARED[seed][place], OWN[seed][place])
        assert row["change"] == OWN[seed][place] - SHARED[seed][place]
        assert (row["train"], row["query"], row["group"]) == (9 - place, 5, "aabb"[place])
        assert found.loc[("fedavg", seed, name)]["change"] == 0
    means = table[table["method"] == "finetune"].groupby("seed")["change"].mean()
    assert means.to_list() == [(7 - 10.5) / 4, (5.5 - 9.5) / 4]


def test_clients_of_a_single_run(folder: Path) -> None:
    """Then the model before personalization stands in for the baseline."""
    table = Result.read(folder / "runs" / "finetune-seed1").clients
    assert table["baseline"].to_list() == SHARED[1]
    assert table["change"].to_list() == [own - shared for own, shared in zip(OWN[1], SHARED[1])]


def test_names_are_withheld_under_privacy(folder: Path) -> None:
    """They are numbers in the order of the clients' means, and the same client is the same number everywhere."""
    path = folder / "compare.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "privacy": {"noise": 1.0}}))
    result = Result.read(folder)
    table = result.clients
    means = (np.mean(SHARED, 0) + np.mean(OWN, 0)) / 2  # 2.0, 1.875, 1.75, 2.5
    number = dict(zip(NAMES, (3, 2, 1, 4)))
    assert [NAMES[place] for place in np.argsort(means)] == sorted(NAMES, key=number.get)  # type: ignore[arg-type]
    for name in NAMES:
        rows = table[table["client"] == f"client {number[name]}"].set_index(["method", "seed"])
        for seed in (0, 1):
            assert rows.loc[("finetune", seed)]["personal"] == OWN[seed][NAMES.index(name)]
    assert table["client"].to_list() == [f"client {n}" for n in (1, 2, 3, 4)] * 4
    shown = [table.to_csv(), repr(result), result._repr_html_(), *(result.figure(n).to_json() for n in result.figures)]
    assert not [name for name in NAMES for text in shown if name in text]
    named = Result.read(folder, name_clients=True)
    assert set(named.clients["client"]) == set(NAMES)


def test_figures_are_objects_with_the_clients_numbers(folder: Path) -> None:
    result = Result.read(folder)
    assert result.figures == ["clients", "change", "sorted", "groups", "rounds", "traffic"]
    figures = {name: result.figure(name) for name in result.figures}
    assert all(type(figure) is go.Figure for figure in figures.values())
    (points,) = figures["change"].data
    changes = dict(zip((row[0] for row in points.customdata), points.y))
    expected = np.mean(OWN, 0) - np.mean(SHARED, 0)
    assert changes == {name: pytest.approx(value) for name, value in zip(NAMES, expected)}
    assert dict(zip((row[0] for row in points.customdata), points.x)) == dict(zip(NAMES, (9, 8, 7, 6)))
    (curve,) = figures["sorted"].data
    assert list(curve.y[1:-1]) == pytest.approx(sorted(expected, reverse=True))
    boxes = [trace for trace in figures["clients"].data if trace.type == "box"]
    assert [box.mean[0] for box in boxes] == pytest.approx([np.mean(SHARED), np.mean(OWN)])
    assert [box.line.color for box in boxes] == ["#6d757d", "#0072b2"]  # the page's colours
    for figure in figures.values():
        assert '"theme"' not in figure.to_json()
        assert '"$"' not in figure.to_json()


def test_what_is_not_there_is_refused(folder: Path) -> None:
    result = Result.read(folder)
    with pytest.raises(UserError, match=r"unknown figure 'chnge'.*Did you mean 'change'"):
        result.figure("chnge")
    with pytest.raises(UserError, match=r"unknown method 'ditto'.*Known: finetune"):
        result.figure("change", method="ditto")
    with pytest.raises(UserError, match="shows all methods"):
        result.figure("sorted", method="finetune")


class Cells(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and data.strip():
            self.rows[-1][-1] += data


def test_in_a_notebook(write_comparison: Callable[..., Path], tmp_path: Path) -> None:
    titles = {"methods": [{"label": label, "title": f"<b>{label}</b>"} for label in ("fedavg", "finetune")]}
    result = Result.read(write_comparison(tmp_path / "out", {"fedavg": SHARED, "finetune": OWN}, NAMES, compare=titles))
    shown = Cells(result._repr_html_())
    assert shown.rows[0][:2] == ["method", "MSE ± sd"]
    assert [row[0] for row in shown.rows[1:]] == ["<b>fedavg</b>", "<b>finetune</b>"]  # text, not markup
    assert shown.rows[1][1].startswith("2.50 ±")
    assert result.answer[0].split(":")[0] in result._repr_html_()
    assert "script" not in shown.tags


def test_in_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = Result.read(folder)
    text = repr(result)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)  # a notebook asks for it beside the HTML
    assert repr(result) == text
    assert result.answer[0][:40] in text
    assert "Finetune" in text
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_all_of_its_summary_is_there(folder: Path) -> None:
    result = Result.read(folder)
    assert result.best == "finetune"
    assert result.method("finetune").mean.value == pytest.approx(np.mean(OWN))
    assert [method.label for method in result.methods] == ["fedavg", "finetune"]
    assert json.loads(result.to_json())["baseline"] == "fedavg"
    assert copy.copy(result).answer == result.answer
    with pytest.raises(AttributeError, match="no attribute 'anwser'"):
        result.anwser  # noqa: B018
    assert isinstance(result.clients, pd.DataFrame)
    assert bespoke.Result is Result
