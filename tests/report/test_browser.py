"""The page in a real browser: every mark is drawn, nothing is clipped, at two widths, light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from chromium import Browser, binary
from test_report_motley import analyzed

from bespoke.report import figures
from bespoke.report.page import write_report

pytestmark = pytest.mark.skipif(binary() is None, reason="no Chromium or Chrome on the PATH")

CLIENTS = 60
REACH = 4  # pixels around the place of a mark in which some of its ink must lie
HIDE = "g.trace, g.hm, canvas { visibility: hidden !important }"

# For each figure: the places of its marks in the page, its texts, and where its plot, legend and frame lie.
LOOK = """
(() => [...document.querySelectorAll(".js-plotly-plot")].map((figure) => {
  const layout = figure._fullLayout, x = layout.xaxis, y = layout.yaxis;
  const box = (element) => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return [left + scrollX, top + scrollY, right + scrollX, bottom + scrollY];
  };
  const frame = box(figure);
  const plot = [frame[0] + x._offset, frame[1] + y._offset];
  plot.push(plot[0] + x._length, plot[1] + y._length);
  const marks = figure._fullData.map((trace, place) => {
    const at = [];
    const add = (across, down, to = "d2p") => at.push([plot[0] + x[to](across), plot[1] + y[to](down)]);
    if (trace.visible !== true) return { name: trace.name, type: trace.type, at };
    if (trace.type.startsWith("scatter") && !(trace.mode === "lines" && !trace.line.width))
      trace.x.forEach((across, i) => { if (across !== null && trace.y[i] !== null) add(across, trace.y[i]); });
    if (trace.type === "box")
      trace.median.forEach((m, i) => trace.orientation === "h" ? add(m, trace.y[i]) : add(trace.x[i], m));
    if (trace.type === "heatmap")
      trace.z.forEach((row, i) => row.forEach((z, j) => { if (z > 0.2) add(trace.x[j], trace.y[i]); }));
    if (trace.type === "bar") figure.calcdata[place].forEach((bar) => {
      const along = (bar.p0 + bar.p1) / 2, half = bar.b + bar.s / 2;
      if (bar.s) trace.orientation === "h" ? add(half, along, "c2p") : add(along, half, "c2p");
    });
    return { name: trace.name, type: trace.type, at };
  });
  const shown = (text) => text.textContent.trim() && !text.closest(".hoverlayer, .modebar");
  const texts = [...figure.querySelectorAll("svg text")].filter(shown).map((text) => (
    { text: text.textContent, box: box(text), inside: !!text.closest(".textpoint, .annotation") }
  ));
  const legend = figure.querySelector(".legend");
  return { name: figure.id, frame, plot, marks, texts, legend: legend ? box(legend) : null };
}))()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def folder(make_comparison: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with every kind of figure: groups, analyses, clusters, embeddings and a mixed model."""
    rng = np.random.default_rng(0)
    base = rng.uniform(1, 3, (2, CLIENTS))
    values = {
        "fedavg": base,
        "finetune": base + rng.normal(-0.2, 0.4, base.shape),
        "hypcluster": base + rng.normal(0, 0.2, base.shape),
        "group-perfl": base + rng.normal(-0.1, 0.2, base.shape),
        "mixed": base + rng.normal(-0.3, 0.2, base.shape),
    }
    made = make_comparison(
        tmp_path_factory.mktemp("all"), {label: rows.tolist() for label, rows in values.items()},
        groups=["a group with a long name", "b", "c"] * (CLIENTS // 3), query=[5, 30] * (CLIENTS // 2),
    )  # fmt: skip
    analyzed(made)
    for seed in (0, 1):
        with_clusters(made / f"runs/hypcluster-seed{seed}")
        with_mixed(made / f"runs/mixed-seed{seed}")
        with_embeddings(made / f"runs/group-perfl-seed{seed}", seed)
    about = json.loads((made / "compare.json").read_text())
    for entry in about["methods"]:
        entry["name"] = entry["label"]
    (made / "compare.json").write_text(json.dumps(about))
    return made


def with_clusters(run: Path) -> None:
    table = pd.read_parquet(run / "clients.parquet")
    table.assign(candidate=[f"cluster {i % 2}" for i in range(CLIENTS)]).to_parquet(run / "clients.parquet")
    observe(run, {"clients": [1, 2], "largest_share": 0.6}, every=True)


def with_mixed(run: Path) -> None:
    coefficients = {"mean": [0.1, 0.5], "error": [0.02, 0.03], "clients": [0.4, 0.1], "groups": [0.2, 0.05]}
    shares = {"common": 0.3, "groups": 0.1, "clients": 0.2, "within": 0.4}
    observe(run, {"coefficients": coefficients, "shares": shares})


def observe(run: Path, observed: dict[str, Any], every: bool = False) -> None:
    lines = [json.loads(text) for text in (run / "rounds.jsonl").read_text().splitlines()]
    for line in lines[1:] if every else lines[-1:]:
        line["observed"] = observed
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_embeddings(run: Path, seed: int) -> None:
    (run / "analysis").mkdir()
    record = {
        "format": 1, "label": "group-perfl", "seed": seed, "metric": "mse", "lower_is_better": True, "asked": {},
        "analysis": "embeddings", "groups": ["b", "c"], "counts": [[9, 1], [2, 8]], "clients": 20, "recovered": 0.85,
        "by": "nearest centroids", "agreement": 0.5,
    }  # fmt: skip
    (run / "analysis/embeddings.json").write_text(json.dumps(record))
    place = {"client": ["one", "two"], "group": ["b", "c"], "x": [0.0, 1.0], "y": [1.0, 0.0]}
    pd.DataFrame(place).to_parquet(run / "analysis/embeddings.parquet")


def looked_at(browser: Browser, page: Path, width: int, dark: bool) -> tuple[list[dict[str, Any]], np.ndarray]:
    """(figures as LOOK describes them, pixels that their marks change)."""
    browser.open(page, width, dark)
    names = browser.run("[...document.querySelectorAll('.plot')].map((place) => place.id)")
    for name in names:
        browser.run(f"document.getElementById('{name}').scrollIntoView()")
        browser.wait(f"document.querySelector('#{name} .main-svg')")
    browser.run("scrollTo(0, 0)")
    whole = {"x": 0, "y": 0, "width": width, "height": browser.run("document.documentElement.scrollHeight")}
    seen = browser.run(LOOK)
    with_marks = np.asarray(browser.screenshot(**whole), dtype=int)
    browser.run(
        f"(() => document.head.append(Object.assign(document.createElement('style'), {{textContent: '{HIDE}'}})))()"
    )
    without = np.asarray(browser.screenshot(**whole), dtype=int)
    assert len(seen) == len(names)
    return seen, np.abs(with_marks - without).max(2) > 8


def _near(place: float) -> slice:
    return slice(max(round(place) - REACH, 0), round(place) + REACH + 1)


def missing_marks(figure: dict[str, Any], ink: np.ndarray) -> list[str]:
    """The marks within the axes that have no ink at their place, and traces without any mark."""
    left, top, right, bottom = figure["plot"]
    found = []
    for trace in figure["marks"]:
        inside = [(x, y) for x, y in trace["at"] if left <= x <= right and top <= y <= bottom]
        bare = sum(not ink[_near(y), _near(x)].any() for x, y in inside)
        if bare:
            found.append(f"{figure['name']}: {bare} of {len(inside)} marks of {trace['name']} ({trace['type']})")
    if not any(trace["at"] for trace in figure["marks"]):
        found.append(f"{figure['name']}: no marks at all")
    return found


def clipped(figure: dict[str, Any]) -> list[str]:
    """Texts that leave the figure (names of points: the plot), lie on each other, and legends over the plot."""
    found = []
    for text in figure["texts"]:
        left, top, right, bottom = figure["plot" if text["inside"] else "frame"]
        x0, y0, x1, y1 = text["box"]
        if x0 < left - 2 or y0 < top - 2 or x1 > right + 2 or y1 > bottom + 2:
            found.append(f"{figure['name']}: {text['text']!r} is clipped")
    outer = [text for text in figure["texts"] if not text["inside"]]
    for place, one in enumerate(outer):
        for other in outer[place + 1 :]:
            (a, b, c, d), (e, f, g, h) = one["box"], other["box"]
            if min(c, g) - max(a, e) > 2 and min(d, h) - max(b, f) > 3:
                found.append(f"{figure['name']}: {one['text']!r} lies on {other['text']!r}")
    if figure["legend"] and figure["legend"][3] > figure["plot"][1] + 3:
        found.append(f"{figure['name']}: the legend lies on the plot")
    if figure["plot"][3] - figure["plot"][1] < 40 or figure["plot"][2] - figure["plot"][0] < 120:
        found.append(f"{figure['name']}: the plot is too small")
    return found


EVERY = {
    "clients", "change", "sorted", "groups", "rounds", "traffic", "clusters", "clusters-0", "group-gain", "ood-others",
    "fewer-mean", "fewer-change", "sweep-0-mean", "sweep-0-hurt", "choosers-0", "embeddings-0-counts",
    "embeddings-0-plane", "mixed-0-shares", "mixed-0-coefficients",
}  # fmt: skip


@pytest.fixture(scope="module")
def page(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report with points drawn by WebGL, as for thousands of clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "MANY_POINTS", 10)
        return write_report([folder], tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1280, False)], ids=["400-dark", "1280-light"])
def test_every_figure_is_drawn(page: Path, browser: Browser, width: int, dark: bool) -> None:
    seen, ink = looked_at(browser, page, width, dark)
    assert {figure["name"].removeprefix("figure-") for figure in seen} == EVERY
    assert "scattergl" in {trace["type"] for figure in seen for trace in figure["marks"]}
    assert [text for figure in seen for text in missing_marks(figure, ink)] == []
    assert [text for figure in seen for text in clipped(figure)] == []
    assert browser.run("document.scrollingElement.scrollWidth") <= width
    if width == 1280:
        wide = "[...document.querySelectorAll('.scroll')].filter((part) => part.scrollWidth > part.clientWidth + 1)"
        assert browser.run(f"{wide}.map((part) => part.closest('section').id)") == []


def test_points_without_webgl(folder: Path, browser: Browser, tmp_path: Path) -> None:
    seen, ink = looked_at(browser, write_report([folder], tmp_path / "report.html"), 400, False)
    assert "scattergl" not in {trace["type"] for figure in seen for trace in figure["marks"]}
    assert [text for figure in seen for text in missing_marks(figure, ink)] == []


def test_the_switch_shows_another_method(page: Path, browser: Browser) -> None:
    browser.open(page, 1280)
    browser.run("document.getElementById('figure-change').scrollIntoView()")
    browser.wait("document.querySelector('#figure-change .main-svg')")
    browser.run("document.querySelector('input[value=hypcluster]').click()")
    shown = "document.getElementById('figure-change').data.filter((trace) => trace.visible)"
    browser.wait(f"{shown}.length === 1 && {shown}[0].method === 'hypcluster'")
    parts = "[...document.querySelectorAll('div[data-method]')].filter((part) => !part.hidden)"
    assert browser.run(f"{parts}.map((part) => part.dataset.method)") == ["hypcluster"]


def test_names_that_look_like_references_are_text(
    make_comparison: Callable[..., Path], browser: Browser, tmp_path: Path
) -> None:
    """A name is data: it is shown as it is, even if a figure could mean a colour or a template by it."""
    groups = ["$m1", "$bad/0.5", "%{y}", "$ink"]
    values = np.random.default_rng(0).uniform(1, 3, (2, 1, 8)).tolist()
    titles = ["$m2", "%{x} {theme}"]
    methods = [{"label": label, "title": title} for label, title in zip(("fedavg", "finetune"), titles)]
    made = make_comparison(
        tmp_path / "names", dict(zip(("fedavg", "finetune"), values)), groups=groups * 2, compare={"methods": methods}
    )
    browser.open(write_report([made], tmp_path / "report.html"), 1280)
    texts = "[...document.querySelectorAll('#figure-groups svg text')].map((text) => text.textContent)"
    browser.run("document.getElementById('figure-groups').scrollIntoView()")
    browser.wait("document.querySelector('#figure-groups .main-svg')")
    shown = browser.run(texts)
    for name in (*groups, *titles):
        assert name in shown
    browser.run("document.getElementById('figure-clients').scrollIntoView()")
    browser.wait("document.querySelector('#figure-clients .main-svg')")
    browser.run("Plotly.Fx.hover('figure-clients', [{curveNumber: 2, pointNumber: 0}])")
    hovered = "document.querySelector('#figure-clients .hoverlayer')"
    browser.wait(f"{hovered}.textContent")
    assert titles[1] in browser.run(f"{hovered}.textContent")
