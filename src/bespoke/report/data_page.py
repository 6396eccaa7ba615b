"""Writes a page about a population: examples per client, targets, and how far clients differ.

Motley's Figures 1 and 9, and the last column of its Table 2.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.population import Population
from bespoke.randomness import generator
from bespoke.report.figure_page import Section, plot, write_study
from bespoke.report.figures import Figure, escaped, theme
from bespoke.statistics.formatting import jsonable, number, percent
from bespoke.statistics.heterogeneity import Heterogeneity, heterogeneity

SHOWN = 24  # clients whose targets are drawn
MOST = 12  # classes that have a colour of their own


def write_data_page(population: Population, path: Path, command: str) -> dict[str, Any]:
    """Write the page; returns its numbers."""
    about, found = population.about, heterogeneity(population)
    sizes = found.sizes
    numbers: dict[str, Any] = {
        "clients": len(sizes), "examples": int(sizes.sum()), "mean": float(sizes.mean()), "sd": float(sizes.std()),
        "least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max()),
        "distance": float(np.median(found.distance)), "by_chance": float(np.median(found.by_chance)),
        "unit": found.unit, "beyond_chance": found.beyond_chance,
    }  # fmt: skip
    lead = (
        f"{numbers['clients']:,} clients, {numbers['examples']:,} examples: {number(numbers['mean'])} ± "
        f"{number(numbers['sd'])} a client (mean and standard deviation), from {numbers['least']:,} to "
        f"{numbers['most']:,}, median {number(numbers['median'])}."
    )
    apart = (
        f"A client's targets are {number(numbers['distance'])} {found.unit} from everyone's (median); by chance alone, "
        f"with rows dealt out anew, {number(numbers['by_chance'])}. {percent(100 * found.beyond_chance)} % of the "
        "clients are further away than chance puts 5 % of them."
    )
    sections = [
        Section("Examples by client", figures=[("sizes", _sizes(sizes), "How many clients have how many examples.")]),
        Section(
            "Targets by client",
            figures=[("targets", _targets(population), f"{about['target']} of {_drawn(population)}.")],
        ),
        Section(
            "How far apart clients are", apart, [("distance", _distances(found), "Each client against all together.")],
            command=command,
        ),
    ]  # fmt: skip
    write_study(path, about.get("title") or about["name"], lead, sections)
    return {**numbers, "page": str(path)}


def _drawn(population: Population) -> str:
    of = int((population.sizes() > 0).sum())
    return f"{SHOWN} of {of:,} clients, drawn at random" if of > SHOWN else f"all {of:,} clients"


def _sizes(sizes: Any) -> Figure:
    low, high = max(int(sizes.min()), 1), int(sizes.max())
    edges = np.unique(np.round(np.geomspace(low, high + 1, 18)).astype(int)) if high > low else np.array([low, low + 1])
    counts, _ = np.histogram(sizes, edges)
    bars: Figure = {
        "type": "bar", "x": [f"{a:,}" if b == a + 1 else f"{a:,}–{b - 1:,}" for a, b in pairwise(edges)],
        "y": counts.tolist(), "marker": {"color": theme("m0")}, "name": "clients",
    }  # fmt: skip
    return plot([bars], "examples", "clients", "clients by their numbers of examples", xaxis={"type": "category"})


def _targets(population: Population) -> Figure:
    """Of numbers a box for each client, of classes their parts; of tokens those of the most frequent ones."""
    there = np.flatnonzero(population.sizes() > 0)
    some = np.sort(generator("drawn clients").permutation(there)[:SHOWN])
    targets, offsets = population.columns["y"].numpy(), population.offsets
    rows = [targets[offsets[c] : offsets[c + 1]].reshape(-1) for c in some]
    names = [escaped(str(population.ids[c])) for c in some]
    if population.about["task"] == "regression":
        quantiles = np.array([np.quantile(part, [0, 0.25, 0.5, 0.75, 1]) for part in rows]).T
        low, q1, median, q3, high = (jsonable(q.tolist(), 5) for q in quantiles)
        box: Figure = {
            "type": "box", "x": names, "lowerfence": low, "q1": q1, "median": median, "q3": q3, "upperfence": high,
            "line": {"color": theme("m0"), "width": 1.8}, "fillcolor": theme("m0", 0.18), "name": "clients",
        }  # fmt: skip
        return plot([box], "client", str(population.about["target"]), "targets of clients", xaxis={"type": "category"})
    language = population.about["task"] == "language"
    counts = np.bincount(targets.reshape(-1))
    if language:
        counts[0] = 0  # padding
    most = np.argsort(-counts, kind="stable")[:MOST]
    most = np.sort(most[counts[most] > 0])
    labels = _labels(population, language)
    bars = [
        {
            "type": "bar", "name": escaped(labels.get(int(k), f"{k}")), "x": names,
            "y": jsonable([100 * float((part == k).sum()) / max(_counted(part, language), 1) for part in rows], 4),
            "marker": {"color": theme(f"m{place % 8}", 1.0 if place < 8 else 0.5)},
        }
        for place, k in enumerate(most)
    ]  # fmt: skip
    what = "% of the tokens" if language else "% of the examples"
    return plot(bars, "client", what, "targets of clients", barmode="stack", xaxis={"type": "category"})


def _counted(part: Any, language: bool) -> int:
    return int((part != 0).sum()) if language else len(part)


def _labels(population: Population, language: bool) -> dict[int, str]:
    """What classes and tokens are called; the first token is padding."""
    about = population.about
    words = about.get("words") or [] if language else about.get("classes") or []
    return {place + language: repr(str(word)) if language else str(word) for place, word in enumerate(words)}


def _distances(found: Heterogeneity) -> Figure:
    top = float(max(found.distance.max(), found.by_chance.max())) or 1.0
    edges = np.linspace(0, top, 41)
    middle = jsonable(((edges[1:] + edges[:-1]) / 2).tolist(), 5)
    traces = [
        {
            "type": "scatter", "mode": "lines", "line": {"shape": "hvh", "color": theme(colour), "width": 2.2},
            "fill": "tozeroy", "fillcolor": theme(colour, 0.15), "name": name, "x": middle,
            "y": jsonable((np.histogram(values, edges)[0] / times).tolist(), 4),
        }
        for name, values, colour, times in (
            ("clients", found.distance, "m0", 1), ("by chance alone", found.by_chance, "m1", len(found.by_chance)),
        )
    ]  # fmt: skip
    return plot(traces, f"distance from all clients' targets, {found.unit}", "clients", "distances of clients")
