"""The HTML page: self-contained, safe, deterministic, complete."""

from __future__ import annotations

import base64
import gzip
import json
import math
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.errors import UserError
from bespoke.report import curves, figures
from bespoke.report.page import render_report, write_report
from bespoke.report.report import read, summarize_study
from bespoke.report.summary import MethodSummary
from bespoke.statistics.mixed import read_mixed

HOSTILE = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", 'quote" onload="x', "& {{ 7*7 }}"]
VOID = {"meta", "link", "br", "img", "input", "hr", "line"}


class Page(HTMLParser):
    """Collects elements and their texts, and checks that they are properly nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def words(self) -> str:
        return " ".join(" ".join(text for tag, text in self.texts if tag not in ("script", "style")).split())

    @property
    def payload(self) -> dict[str, Any]:
        return json.loads(next(text for tag, text in self.texts if tag == "script" and text.startswith("{")))


@pytest.fixture(autouse=True)
def _short_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five megabytes of script say nothing about the page; the one test that wants them takes this back."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")


@pytest.fixture
def hostile(write_comparison: Any, tmp_path: Path) -> Path:
    """Strings that would break a careless page, in every place a user can put one."""
    rng = np.random.default_rng(0)
    base = rng.uniform(1, 2, (2, 12))
    clients = HOSTILE + [f"c{i}" for i in range(8)]
    values = {"fedavg": base.tolist(), "finetune": (base * 1.2).tolist()}
    bad = "<b onclick=x>bad</b>"
    methods = [
        {"label": label, "title": f"{label} {bad}", "summary": bad, "travels": {bad: bad}, "private": {bad: bad},
         "personal": bad, "unseen": bad, "chosen": {}, "tuning": [{"knobs": {bad: bad}, "validation": 1.0}]}
        for label in values
    ]  # fmt: skip
    return write_comparison(
        tmp_path / "hostile", values, clients, groups=["<i>g1</i>", "g2"] * 6, notes=[bad], excluded={bad: 2},
        compare={"title": bad, "question": bad, "methods": methods, "command": bad, "versions": {bad: bad},
                 "data": {"title": bad, "notes": [bad]}, "split": {bad: bad}, "engine": {"text": bad}},
    )  # fmt: skip


def report(paths: list[Path], folder: Path) -> tuple[str, Page]:
    text = write_report(paths, folder / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def test_the_page_says_all_it_should(toy: Path, tmp_path: Path) -> None:
    _, page = report([toy], tmp_path)
    for words in (
        "A toy comparison", "Does it help?", "Too few clients to tell", "1 client hurt by Finetune", "client 03",
        "the change of the model", "only the sum is seen", "the client's rows", "Nothing missing.", "2 settings tried",
        "bespoke compare toy.toml", "vectorized over clients", 'label = "finetune"', "3.60 kB", "by test examples",
    ):  # fmt: skip
        assert words in page.words, words
    assert set(page.payload["figures"]) == {"clients", "change", "sorted", "rounds", "traffic"}
    assert page.payload["columns"]["change finetune"] == [-0.5, -0.75, -0.5, 0.75]


def test_every_figure_has_a_place_and_every_reference_a_column(hostile: Path, tmp_path: Path) -> None:
    _, page = report([hostile], tmp_path)
    ids = {attributes.get("id") for _, attributes in page.elements}
    columns = page.payload["columns"]
    assert {f"figure-{name}" for name in page.payload["figures"]} <= ids
    assert "groups" in page.payload["figures"]
    assert len({len(column) for column in columns.values()}) == 1

    def references(spec: object) -> list[str]:
        if isinstance(spec, list):
            return [name for item in spec for name in references(item)]
        if isinstance(spec, dict):
            own = [spec["$"]] if "$" in spec else list(spec.get("zip", []))
            return own + [name for item in spec.values() for name in references(item)]
        return []

    assert set(references(list(page.payload["figures"].values()))) <= set(columns)


def test_nothing_is_loaded(toy: Path, tmp_path: Path) -> None:
    _, page = report([toy], tmp_path)
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base")
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes), tag
    [policy] = [a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    css = next(text for tag, text in page.texts if tag == "style")
    assert "url(" not in css
    assert "@import" not in css


def test_hostile_strings_stay_text(hostile: Path, tmp_path: Path) -> None:
    text, page = report([hostile], tmp_path)
    assert page.payload["columns"]["client"] == sorted(HOSTILE + [f"c{i}" for i in range(8)])
    assert text.count("<script") == text.count("</script>") == 3
    assert not [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)]
    assert not {"img", "i"} & {tag for tag, _ in page.elements}
    for name in HOSTILE:
        assert name in page.words
    figures = json.dumps(page.payload["figures"])
    assert "<b onclick" not in figures  # Plotly reads HTML in labels
    assert "&lt;b onclick" in figures


def test_the_same_folders_give_the_same_bytes(hostile: Path, tmp_path: Path) -> None:
    first = write_report([hostile], tmp_path / "one.html").read_bytes()
    moved = shutil.copytree(hostile, tmp_path / "elsewhere")
    second = write_report([moved], tmp_path / "two.html").read_bytes()
    assert first == second
    assert str(tmp_path).encode() not in first


def test_plotly_is_in_the_page_once(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text, page = report([toy], tmp_path)
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 3
    [packed] = [text for tag, text in page.texts if tag == "script" and text.startswith("H4sI")]  # gzip, in base64
    assert gzip.decompress(base64.b64decode(packed)).decode().count("* plotly.js v") == 1
    assert len(text) < 2_200_000  # of five megabytes
    assert "showSendToCloud: false" in text  # no button that would send clients' numbers away


@pytest.mark.parametrize("run", ["fedavg-seed0", "finetune-seed1"])
def test_one_run_alone(toy: Path, tmp_path: Path, run: str) -> None:
    _, page = report([toy / "runs" / run], tmp_path)
    assert "clients" in page.payload["figures"]
    assert ("change" in page.payload["figures"]) == run.startswith("finetune")


def test_a_diverged_method_and_one_client(write_comparison: Any, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0] * 8], "local": [[np.nan] * 8], "finetune": [[0.5] * 8]}
    _, page = report([write_comparison(tmp_path / "a", values)], tmp_path)
    assert "Local" in page.words
    assert "diverged" in page.words
    _, page = report([write_comparison(tmp_path / "b", {"fedavg": [[1.0]], "finetune": [[0.5]]})], tmp_path)
    assert "Too few clients" in page.words


def test_a_trial_without_a_score_diverged(write_comparison: Any, tmp_path: Path) -> None:
    trials = [{"knobs": {"rate": 1.0}, "validation": None}, {"knobs": {"rate": 0.1}, "validation": 2.5}]
    trials += [{"knobs": {"rate": 9.0}, "validation": float("inf")},
               {"knobs": {"rate": 0.3}, "validation": None, "state": "pruned"}]  # fmt: skip
    methods = [{"label": "fedavg", "title": "FedAvg", "chosen": {"rate": 0.1}, "tuning": trials}]
    folder = write_comparison(tmp_path / "a", {"fedavg": [[1.0, 2.0]]}, compare={"methods": methods})
    _, page = report([folder], tmp_path)
    assert "1 diverged 0.1 2.500 9 diverged 0.3 pruned" in page.words


def test_many_features_are_counted(write_comparison: Any, tmp_path: Path) -> None:
    data = {"title": "Pictures", "features": [f"pixel {i}" for i in range(64)]}
    folder = write_comparison(tmp_path / "a", {"fedavg": [[1.0, 2.0]]}, compare={"data": data})
    _, page = report([folder], tmp_path)
    assert (
        "64: pixel 0, pixel 1, pixel 2, pixel 3, pixel 4, pixel 5, pixel 6, pixel 7 and 56 more pixel 8" in page.words
    )


def rendered(
    folder: Path, against: dict[str, float], references: tuple[MethodSummary, ...] = (), what: str = ""
) -> Page:
    """The page with these fields in what is said against the baseline, and with these references."""
    study, table = read([folder])
    summary = summarize_study(study, table)
    for method in summary.compared:
        for name, value in against.items():
            object.__setattr__(method.against, name, value)
    object.__setattr__(summary, "references", list(references))
    listed = [{"label": reference.label, "title": reference.title, "what": what} for reference in references]
    return Page(render_report(replace(study, compare={**study.compare, "references": listed}), table, summary))


def test_hurt_beyond_chance_comes_first(toy: Path) -> None:
    page = rendered(toy, {"hurt_beyond": 0.125, "helped_beyond": 0.5})
    assert "12.5 % of clients hurt beyond chance; 25.0 % worse off" in page.words
    assert "12.5 % of clients are hurt by Finetune beyond chance; 1 client is worse off" in page.words
    assert "clients helped beyond chance – 50.0 %" in page.words
    unknown = rendered(toy, {"hurt_beyond": math.nan, "helped_beyond": math.nan})
    assert "25.0 % of clients hurt by it" in unknown.words
    assert "beyond chance" not in unknown.words


def test_references_stand_below_the_methods(write_comparison: Any, toy: Path, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0, 2.0]], "constant": [[5.0, 7.0]]}
    made = summarize_study(*read([write_comparison(tmp_path / "made", values)])).method("constant")
    constant = replace(made, title="Constant <1>", against=None, cost=None)
    page = rendered(toy, {}, (constant,), "the same for everyone")
    assert page.words.index("Finetune 2.250") < page.words.index("for reference")
    assert "Constant <1> the same for everyone 6.000 ± 1.0" in page.words
    assert "for reference" not in rendered(toy, {}).words


def test_a_mixed_model_tells_what_differs(write_comparison: Any, tmp_path: Path) -> None:
    """Two seeds: the means of the coefficients and shares are taken by hand."""
    rows = [[1.0, 2.0]] * 2
    folder = write_comparison(tmp_path / "a", {"fedavg": rows, "mixed": rows}, compare={"data": {"features": ["age"]}})
    for seed, (slope, between) in enumerate([(0.4, 0.1), (0.6, 0.3)]):
        path = folder / f"runs/mixed-seed{seed}/rounds.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        lines[-1]["observed"] = {
            "coefficients": {"mean": [0.0, slope], "error": [0.01, 0.03], "clients": [0.05, between]},
            "shares": {"common": 0.25, "clients": between, "within": 0.75 - between},
        }
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, page = report([folder], tmp_path)
    assert "What differs between clients" in page.words
    age, intercept = "age (standard deviation 0.20 around a mean of 0.50)", "intercept (standard deviation 0.050 around"
    assert f"The coefficients that differ most between clients are {age} and {intercept} a mean of 0)." in page.words
    bars = {trace["name"]: trace["x"] for trace in page.payload["figures"]["mixed-0-shares"]["data"]}
    assert bars == {"between clients, 20.0 %": [20.0], "within clients, 55.0 %": [55.0],
                    "explained by the common coefficients, 25.0 %": [25.0]}  # fmt: skip
    drawn = page.payload["figures"]["mixed-0-coefficients"]
    assert drawn["layout"]["yaxis"]["ticktext"] == ["age", "intercept"]
    assert drawn["data"][0]["error_x"]["array"] == [0.2, 0.05]
    assert drawn["data"][1]["error_x"]["array"] == [0.06, 0.02]
    assert "sd between clients" in page.words
    assert "sd between groups" not in page.words


@pytest.mark.parametrize(
    ("coefficients", "shares", "message"),
    [
        ({"mean": [0.1, 0.2], "error": [0.1], "clients": [0.1]}, {"common": 1, "clients": 0, "within": 0}, "lengths"),
        ({"mean": [0.1], "error": [0.1]}, {"common": 1, "clients": 0, "within": 0}, "'clients'"),
        ({"mean": [0.1], "error": [0.1], "clients": [0.1]}, {"common": 1}, "'clients'"),
    ],
)
def test_damaged_estimates_are_refused(
    toy: Path, coefficients: dict[str, Any], shares: dict[str, Any], message: str
) -> None:
    path = toy / "runs/finetune-seed0/rounds.jsonl"
    line = {"stage": 0, "round": 9, "observed": {"coefficients": coefficients, "shares": shares}}
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=f"rounds.jsonl.*{message}"):
        read_mixed(read([toy])[0])


def test_a_diverged_mixed_model_is_not_shown(toy: Path) -> None:
    path = toy / "runs/finetune-seed0/rounds.jsonl"
    observed = {"coefficients": {"mean": [None], "error": [1.0], "clients": [1.0]},
                "shares": {"common": 1, "clients": 0, "within": 0}}  # fmt: skip
    path.write_text(path.read_text() + json.dumps({"stage": 0, "round": 9, "observed": observed}) + "\n")
    assert read_mixed(read([toy])[0]) == []


def test_many_methods_keep_their_colours(write_comparison: Any, tmp_path: Path) -> None:
    values = {"fedavg": [[1.0, 2.0]], **{f"m{i}": [[1.0 + i, 2.0 + i]] for i in range(9)}}
    _, page = report([write_comparison(tmp_path / "many", values)], tmp_path)
    lines = [(t["line"]["color"]["theme"], t["line"]["dash"]) for t in page.payload["figures"]["sorted"]["data"]]
    assert len(set(lines)) == 9


def test_thousands_of_clients_stay_small(
    write_comparison: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(1, 2, (1, 2_410))
    values = {"fedavg": base.tolist(), **{f"m{i}": (base + rng.normal(0, 0.1, base.shape)).tolist() for i in range(3)}}
    folder = write_comparison(tmp_path / "big", values)
    text, page = report([folder], tmp_path)
    assert len(text) < 360_000
    for trace in page.payload["figures"]["change"]["data"]:
        assert trace["type"] == "scattergl"
        assert trace["marker"]["line"]["width"] > 0  # without it WebGL draws no open circle
    monkeypatch.setattr(figures, "MOST_DRAWN", 100)
    _, page = report([folder], tmp_path)
    assert len(page.payload["columns"]["client"]) == 100
    assert "100 of 2,410 are drawn" in page.words


def test_stages_follow_each_other() -> None:
    lines = [
        {"stage": 0, "round": 1, "clients": 2, "bytes_down": 20, "bytes_up": 20, "validation": {"mse": 4.0}},
        {"stage": 0, "round": 2, "clients": 2, "bytes_down": 20, "bytes_up": 20, "validation": None},
        {"stage": 1, "round": 1, "clients": 1, "bytes_down": 5, "bytes_up": 5, "validation": {"mse": 2.0}},
    ]
    assert curves._curve(lines, "mse") == {1: (20.0, 4.0), 3: (50.0, 2.0)}


def test_where_the_report_goes(toy: Path, tmp_path: Path) -> None:
    assert write_report([toy], toy) == toy / "report.html"
    assert write_report([toy], tmp_path / "new" / "page.html").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write the report"):
        write_report([toy], tmp_path / "file" / "report.html")


def test_an_unfinished_run_is_refused(toy: Path, tmp_path: Path) -> None:
    (toy / "runs" / "fedavg-seed0" / "result.json").unlink()
    with pytest.raises(UserError, match="fedavg-seed0"):
        write_report([toy], tmp_path / "report.html")


def _with_clusters(folder: Path, shares: dict[str, list[float]]) -> None:
    """Write the share of the largest cluster into the logs: one a round, from the first round on."""
    for name, values in shares.items():
        path = folder / "runs" / name / "rounds.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        for line, share in zip(lines[1:], values, strict=True):
            line["observed"] = {"clients": [1, 2], "largest_share": share}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_share_of_the_largest_cluster_is_drawn(toy: Path, tmp_path: Path) -> None:
    _with_clusters(toy, {"finetune-seed0": [0.5, 0.6, 0.7, 0.95], "finetune-seed1": [0.5, 0.5, 0.5, 0.6]})
    _, page = report([toy], tmp_path)
    figure = page.payload["figures"]["clusters"]
    assert [trace["y"] for trace in figure["data"]] == [[50, 60, 70, 95], [50, 50, 50, 60]]
    assert [trace["x"] for trace in figure["data"]] == [[1, 2, 3, 4]] * 2
    assert [trace["showlegend"] for trace in figure["data"]] == [True, False]
    assert "Finetune collapsed in 1 of 2 seeds: in the last round one cluster held up to 95.0 %" in page.words
    assert "clients in the largest cluster, last round" in page.words
    assert "figure-clusters" in {attributes.get("id") for _, attributes in page.elements}


def test_clusters_that_hold_are_no_warning(toy: Path, tmp_path: Path) -> None:
    _with_clusters(toy, {"finetune-seed0": [1.0, 1.0, 0.9, 0.9]})
    _, page = report([toy], tmp_path)
    assert "clusters" in page.payload["figures"]
    assert "collapsed in" not in page.words


def test_long_runs_are_thinned_to_their_last_round(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_ROUNDS", 2)
    _with_clusters(toy, {"finetune-seed0": [0.1, 0.2, 0.3, 0.4]})
    _, page = report([toy], tmp_path)
    assert page.payload["figures"]["clusters"]["data"][0]["x"] == [2, 4]
