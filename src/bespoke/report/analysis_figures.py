"""Figures of `bespoke analyze` and of clusters, after Motley; figures.py describes their format."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bespoke.randomness import generator
from bespoke.report.figures import MANY_POINTS, Figure, Style, Trace, axis, escaped, example_ticks, theme
from bespoke.statistics.analyses import Analysis, starts_untrained
from bespoke.statistics.clusters import Clusters
from bespoke.statistics.formatting import jsonable, metric_name

Styles = dict[str, Style]

MOST_MARKS = 10  # of a curve: epochs that are marked
MOST_GROUPS = 10  # that have a colour of their own
PALETTE = ("m1", "m2", "m3", "m4", "m5", "m6")
STARS = {"solid": "star", "dash": "star-diamond", "dot": "star-square", "dashdot": "hexagram"}  # colours come again
DASHES = ("solid", "dot", "dash", "dashdot", "longdash")


def ood_figure(analyses: Sequence[Analysis], titles: dict[str, str], styles: Styles, part: str) -> Figure:
    """Own rows across, others' rows up: a curve for each learning rate, from the shared model on (Figure 5)."""
    analyses = [analysis for analysis in analyses if part in analysis.record["shared"]]
    # an untrained start would only stretch the axes
    drawn = [analysis for analysis in analyses if not starts_untrained(analysis.record)]
    points = _ood_points(analyses, drawn, titles, styles, part)
    if not points:
        return {}
    curves = _ood_curves(drawn, titles, styles, part)
    (x_range, far), (y_range, high) = (
        _limits([p[side][0] for p in points], [value for curve in curves for value in curve[side]]) for side in "xy"
    )
    metric = metric_name(analyses[0].metric)
    title = {"others": "other clients' rows", "other groups": "rows of other groups"}[part]
    return {
        "data": [*curves, *points],
        "beyond": max(far, high),
        "label": f"{metric} on own rows against {title}",
        "height": 460,
        "layout": {
            "xaxis": axis(f"mean {metric} on own rows", zeroline=False, range=x_range),
            "yaxis": axis(f"mean {metric} on {title}", zeroline=False, range=y_range),
            "hovermode": "closest",
        },
    }


def _ood_curves(drawn: Sequence[Analysis], titles: dict[str, str], styles: Styles, part: str) -> list[Trace]:
    alone = sum(bool(analysis.record["curves"]) for analysis in drawn) == 1  # then colours tell its curves apart
    traces = []
    for analysis in drawn:
        record, title = analysis.record, titles[analysis.label]
        for place, curve in enumerate(record["curves"]):
            known = [k for k, pair in enumerate(zip(curve["own"], curve[part])) if None not in pair]
            if len(known) < 2:
                continue
            marks = [known[i] for i in _spaced(len(known))]
            name = f"{title}, {curve['name']}" if curve["name"] else f"{title}, {record['axis']}"
            colour = theme(PALETTE[place % len(PALETTE)] if alone else styles[analysis.label].colour)
            traces.append({
                "type": "scatter", "mode": "lines+markers", "name": escaped(name),
                "x": jsonable([curve["own"][k] for k in marks], 5), "y": jsonable([curve[part][k] for k in marks], 5),
                "customdata": [f"{record['axis']} {curve['at'][k]:g}" for k in marks],
                "line": {"color": colour, "width": 2, "dash": "solid" if alone else DASHES[place % len(DASHES)]},
                "marker": {"size": [*([5] * (len(marks) - 1)), 10], "color": colour},
                "hovertemplate": "%{customdata}<br>own %{x:.4g}, others %{y:.4g}",
            })  # fmt: skip
    return traces


def _ood_points(
    analyses: Sequence[Analysis], drawn: Sequence[Analysis], titles: dict[str, str], styles: Styles, part: str
) -> list[Trace]:
    """The shared model, once, and what each method has chosen; few of them have their names beside them."""
    start = sorted(drawn, key=lambda analysis: not analysis.record["curves"])[:1]  # where the curves begin
    beside = len(analyses) <= 4
    kinds = (("shared", start), ("chosen", analyses))
    across = [a.record["shared"]["own"] for a in start] + [a.record["chosen"]["own"] for a in analyses]
    known = [value for value in across if value is not None]
    middle = (min(known) + max(known)) / 2 if known else 0.0
    traces = []
    for kind, which in kinds:
        for analysis in which:
            shared = kind == "shared"
            at = analysis.record["shared"] if shared else analysis.record["chosen"]
            if at["own"] is None or at[part] is None:
                continue
            name = "shared model" if shared else titles[analysis.label]
            traces.append({
                "type": "scatter", "mode": "markers+text" if beside else "markers", "name": escaped(name),
                "x": jsonable([at["own"]], 5), "y": jsonable([at[part]], 5), "showlegend": not beside,
                "text": [escaped(name)],
                "textposition": f"{'bottom' if shared else 'top'} {_inward(at['own'], middle)}",
                "marker": {"symbol": "diamond-open" if shared else STARS[styles[analysis.label].dash], "size": 14,
                           "color": theme("ink") if shared else theme(styles[analysis.label].colour),
                           "line": {"width": 1.5, "color": theme("ink")}},
                "hovertemplate": "own %{x:.4g}, others %{y:.4g}",
            })  # fmt: skip
    return traces


def _inward(x: float, middle: float) -> str:
    """Side of a point on which its name stays inside the figure."""
    return "right" if x < middle else "left"


def _limits(points: Sequence[float], curves: Sequence[float]) -> tuple[list[float], int]:
    """A range around these points, as wide again on either side where curves reach there; how many lie beyond it."""
    low, high = min(points), max(points)
    wide = (high - low) or 0.1 * abs(high) or 1.0
    near = [value for value in curves if low - wide <= value <= high + wide]
    low, high = min([low, *near]), max([high, *near])
    margin = 0.1 * ((high - low) or wide)
    return jsonable([low - margin, high + margin], 5), len(curves) - len(near)


def _spaced(points: int) -> list[int]:
    """The first, the last, and between them ever rarer ones: personalization moves fastest at its start."""
    if points <= MOST_MARKS:
        return list(range(points))
    return sorted({0, *np.geomspace(1, points - 1, MOST_MARKS).round().astype(int).tolist()})


def _middle(values: Sequence[float]) -> tuple[list[float], int]:
    """A range with room at its ends that is not ruled by what diverges, and how many values lie beyond it."""
    numbers = np.asarray(values, dtype=float)
    kept = numbers[np.abs(numbers) <= 2 * np.median(np.abs(numbers))]
    low, high = float(kept.min()), float(kept.max())
    margin = 0.08 * ((high - low) or abs(high) or 1.0)
    return jsonable([low - margin, high + margin], 5), len(numbers) - len(kept)


def fewer_figures(
    analyses: Sequence[Analysis], titles: dict[str, str], styles: Styles, across: str = "examples to personalize with"
) -> tuple[Figure, Figure]:
    """The mean against the part of the examples, and boxes of the clients' changes at each part (Figure 7c)."""
    if not analyses:
        return {}, {}
    metric = metric_name(analyses[0].metric)
    lines, boxes = [], []
    fractions = sorted({p["fraction"] for a in analyses for p in a.record["points"]}, reverse=True)
    for row, analysis in enumerate(analyses):
        style, title = styles[analysis.label], escaped(titles[analysis.label])
        points = [p for p in analysis.record["points"] if p["mean"] is not None]
        lines.append({
            "type": "scatter", "mode": "lines+markers", "name": title,
            "x": [100 * p["fraction"] for p in points], "y": jsonable([p["mean"] for p in points], 5),
            "customdata": jsonable([100 * p["hurt"] for p in points], 3),
            "line": {"color": theme(style.colour), "width": 2.2, "dash": style.dash}, "marker": {"size": 8},
            "hovertemplate": "%{y:.4g}, %{customdata:.3g} % hurt",
        })  # fmt: skip
        quantiles = np.array([p["change"] for p in points], dtype=float).T
        width = 0.8 / len(analyses)
        at = [fractions.index(p["fraction"]) + (row - (len(analyses) - 1) / 2) * width for p in points]
        p10, q1, median, q3, p90 = (jsonable(q, 4) for q in quantiles)
        boxes.append({
            "type": "box", "name": title, "x": jsonable(at, 4), "lowerfence": p10, "q1": q1, "median": median,
            "q3": q3, "upperfence": p90, "width": 0.85 * width, "line": {"color": theme(style.colour), "width": 1.8},
            "fillcolor": theme(style.colour, 0.18), "whiskerwidth": 0.5, "hoverinfo": "y+name",
        })  # fmt: skip
    ticks = {"tickvals": list(range(len(fractions))), "ticktext": [f"{100 * f:g} %" for f in fractions]}
    mean: Figure = {
        "data": lines, "label": f"mean {metric} against the part of the examples", "height": 360,
        "layout": {
            "xaxis": axis(across, ticksuffix=" %", autorange="reversed", zeroline=False),
            "yaxis": axis(f"mean {metric}", zeroline=False), "hovermode": "x unified",
        },
    }  # fmt: skip
    change: Figure = {
        "data": boxes, "label": "changes of clients at each part of the examples", "height": 360,
        "layout": {
            "xaxis": axis(across, zeroline=False, showgrid=False, **ticks),
            "yaxis": axis(f"change of {metric}, per client", zeroline=True), "hovermode": "closest",
        },
    }  # fmt: skip
    return mean, change


def sweep_figures(analysis: Analysis, styles: Styles) -> tuple[Figure, Figure]:
    """The mean and the clients hurt over the values of a knob (Figures 4 and 7a-b)."""
    record, style = analysis.record, styles[analysis.label]
    metric, varied = metric_name(analysis.metric), str(record["axis"])
    values = [point["value"] for point in record["points"]]
    numeric = all(isinstance(value, int | float) for value in values)
    logarithmic = numeric and min(values) > 0 and max(values) >= 8 * min(values) and len(values) <= 12
    x_axis = {"zeroline": False, **({"type": "log"} if logarithmic else {} if numeric else {"type": "category"})}
    if logarithmic:
        x_axis |= {"tickvals": values, "ticktext": [f"{value:g}" for value in values]}
    drawn = record["curves"] or [{"name": "the rest chosen on validation rows", "points": record["points"]}]
    found = []
    for key, title, factor in (("mean", f"mean {metric}", 1.0), ("hurt", "clients hurt", 100.0)):
        traces: list[Trace] = []
        for place, line in enumerate(drawn):
            points = [p for p in line["points"] if p[key] is not None]
            colour = style.colour if not record["curves"] else PALETTE[place % len(PALETTE)]
            traces.append({
                "type": "scatter", "mode": "lines+markers" if len(points) < 30 else "lines", "name": line["name"],
                "x": [p["value"] for p in points], "y": jsonable([factor * p[key] for p in points], 5),
                "line": {"color": theme(colour), "width": 2.2, "dash": DASHES[place // len(PALETTE) % len(DASHES)]},
                "marker": {"size": 8}, "showlegend": bool(record["curves"]),
                "hovertemplate": "%{y:.4g}" + (" %" if key == "hurt" else ""),
            })  # fmt: skip
        y_axis: Trace = {"zeroline": False}
        beyond = 0
        means = [p["mean"] for line in drawn for p in line["points"] if p["mean"] is not None]
        if key == "mean" and means:
            y_axis["range"], beyond = _middle(means)
        else:
            y_axis |= {"ticksuffix": " %", "rangemode": "tozero"}
        found.append({
            "data": traces, "label": f"{title} over {varied}", "height": 340, "beyond": beyond,
            "layout": {"xaxis": axis(varied, **x_axis), "yaxis": axis(title, **y_axis), "hovermode": "x unified"},
        })  # fmt: skip
    return found[0], found[1]


def choosers_figure(analysis: Analysis, named: bool = True) -> Figure:
    """Each client's change, with settings chosen for all and by itself, against its examples (Figures 8 and 10)."""
    import pandas as pd

    tables = [pd.read_parquet(path) for path in analysis.tables if path.exists()]
    if not tables:
        return {}
    table = pd.concat(tables).groupby("client", sort=True).mean(numeric_only=True)
    # Few enough for SVG: a browser has a small number of WebGL contexts, and every method has such a figure.
    of = len(table)
    table = table.iloc[np.sort(generator("drawn clients").permutation(of)[:MANY_POINTS])]
    metric = metric_name(analysis.metric)
    traces = []
    for who, name, colour, symbol in (
        ("global", "one choice for all", "m0", "circle"), ("client", "each client's own choice", "m1", "diamond"),
    ):  # fmt: skip
        change = table[f"{who}_value"] - table["shared"]
        traces.append({
            "type": "scatter", "mode": "markers", "name": name,
            "x": jsonable(table["support_examples"].tolist(), 5), "y": jsonable(change.tolist(), 4),
            "text": [escaped(str(client)) if named else "a client" for client in table.index],
            "marker": {"color": theme(colour), "size": 7, "opacity": 0.65, "symbol": symbol},
            "hovertemplate": "<b>%{text}</b><br>%{x:,.0f} examples<br>change %{y:+.4g}",
        })  # fmt: skip
    sizes = table["support_examples"]
    scale = example_ticks(int(sizes.min()), int(sizes.max()))
    return {
        "data": traces, "label": "changes of clients by who chooses the settings", "height": 380,
        "note": f"{len(table):,} of {of:,} clients are drawn." if len(table) < of else "",
        "layout": {
            "xaxis": axis("examples to personalize with", zeroline=False, **scale),
            "yaxis": axis(f"change of {metric}", zeroline=True), "hovermode": "closest",
        },
    }  # fmt: skip


def clusters_figure(clusters: Clusters) -> Figure:
    """Bars: how many clients of each group every cluster holds (Figure 6d)."""
    shown = clusters.groups[:MOST_GROUPS]
    counts = np.array(clusters.counts)
    traces = [
        {
            "type": "bar", "name": escaped(group or "clients"), "x": clusters.names, "y": counts[place].tolist(),
            "marker": {"color": theme(PALETTE[place % len(PALETTE)], 0.55 if place >= len(PALETTE) else 1)},
            "showlegend": len(clusters.groups) > 1, "hovertemplate": "%{y}",
        }
        for place, group in enumerate(shown)
    ]  # fmt: skip
    if len(clusters.groups) > MOST_GROUPS:
        rest = counts[MOST_GROUPS:].sum(0).tolist()
        name = f"{len(clusters.groups) - MOST_GROUPS} other groups"
        traces.append({"type": "bar", "name": name, "x": clusters.names, "y": rest,
                       "marker": {"color": theme("m0")}, "showlegend": True, "hovertemplate": "%{y}"})  # fmt: skip
    return {
        "data": traces, "label": "clients of each group in each cluster", "height": 340,
        "layout": {"barmode": "stack", "xaxis": axis("", showgrid=False), "yaxis": axis("clients", zeroline=False),
                   "hovermode": "x unified"},
    }  # fmt: skip
