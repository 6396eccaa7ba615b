"""The page's figures: Plotly specifications that refer to columns of the clients' numbers (see page.py)."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bespoke.randomness import generator
from bespoke.report.change import change_of
from bespoke.report.checks import SIZEABLE
from bespoke.report.summary import BEFORE, MethodSummary, Summary
from bespoke.statistics.clients import Cells, Floats
from bespoke.statistics.formatting import jsonable, metric_name

Figure = dict[str, Any]  # a specification of Plotly, as JSON
Trace = Figure  # a part of one: a trace, an axis, a layout

MOST_DRAWN = 20_000  # clients in a figure; the numbers are always of all
MOST_GROUPS = 30
MANY_POINTS = 1_500  # from here on points are drawn by WebGL
_COLOURS = 6  # of the theme, besides the baseline's grey
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Style:
    """How a method looks, everywhere on the page."""

    colour: str  # of the theme: m0 is the baseline's grey
    dash: str


@dataclass(frozen=True)
class Drawn:
    """The clients that figures show: averaged over seeds, and as JSON columns."""

    clients: int
    of: int
    values: dict[str, Floats]
    changes: dict[str, Floats]
    columns: dict[str, list[Any]]


def styles_of(summary: Summary) -> dict[str, Style]:
    styles, place = {}, 0
    for method in summary.methods:
        if method.label == summary.baseline:
            styles[method.label] = Style("m0", "solid")
        else:
            styles[method.label] = Style(f"m{1 + place % _COLOURS}", _DASHES[place // _COLOURS % len(_DASHES)])
            place += 1
    return styles


def focus_of(summary: Summary) -> MethodSummary:
    """The method that is shown first: the best of those that are compared."""
    compared = sorted(summary.compared, key=lambda m: m.mean.value, reverse=not summary.lower_is_better)
    return compared[0] if compared else summary.methods[0]


def draw(cells: Cells, summary: Summary) -> Drawn:
    total = len(cells.clients)
    kept = np.arange(total)
    if total > MOST_DRAWN:
        kept = np.sort(generator("drawn clients").permutation(total)[:MOST_DRAWN])
    values = {label: _over_seeds(cells.of(label)[:, kept]) for label in cells.methods}
    with np.errstate(invalid="ignore"):  # both diverged: no change can be told
        changes = {
            method.label: _over_seeds((cells.of(method.label) - cells.of(summary.baseline))[:, kept])
            for method in summary.compared
        }
    columns: dict[str, list[Any]] = {
        "client": [cells.clients[i] if summary.names_clients else "a client" for i in kept],
        "examples": [round(float(cells.examples[i])) for i in kept],
    }
    tested = cells.weights[:, kept].mean(0)
    columns["tested"] = [round(float(size)) for size in tested]
    if any(cells.groups):
        columns["group"] = [cells.groups[i] for i in kept]
    columns |= {f"value {label}": jsonable(column, 5) for label, column in values.items()}
    columns |= {f"change {label}": jsonable(column, 4) for label, column in changes.items()}
    return Drawn(len(kept), total, values, changes, columns)


def _over_seeds(values: Floats) -> Floats:
    """Means over the seeds that tested a client; a client that diverged with one of them has no finite mean."""
    known = ~np.isnan(values)
    seeds = known.sum(0)
    means: Floats = np.where(known, values, 0.0).sum(0) / np.where(seeds > 0, seeds, np.nan)
    return means


def theme(name: str, alpha: float = 1) -> Trace:
    """A colour of the page's theme. It is an object, because a string in a figure may be a user's."""
    return {"theme": name, **({"alpha": alpha} if alpha < 1 else {})}


def axis(title: str, **more: Any) -> Trace:
    return {"title": {"text": title}, "automargin": True, **more}


def escaped(text: str) -> str:
    """Plotly reads a little HTML in texts; a user's string must not be read so."""
    return html.escape(text, quote=False)


def _range(
    columns: Sequence[Floats], around_zero: bool = False, beyond: float = 1.0, room: float = 0.04
) -> tuple[list[float], int]:
    """An axis that is not ruled by a few extreme clients, and how many lie beyond it.

    It ends at the extremes, or `beyond` times the width of the middle 98 % further out than these, if that is nearer;
    `room` is the part of its width that stays free at either end.
    """
    numbers = np.concatenate([column[np.isfinite(column)] for column in columns])
    if not len(numbers):
        return [0.0, 1.0], 0
    low, high = float(numbers.min()), float(numbers.max())
    near = np.quantile(numbers, [0.01, 0.99])
    middle = float(near[1] - near[0]) or abs(high) or 1.0
    low, high = max(low, float(near[0]) - beyond * middle), min(high, float(near[1]) + beyond * middle)
    if around_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = room * ((high - low) or 1.0)
    bounds = [low - margin, high + margin]
    return jsonable(bounds, 5), int(((numbers < bounds[0]) | (numbers > bounds[1])).sum())


def _customdata(drawn: Drawn, *more: str) -> Trace:
    return {"zip": ["client", "examples", *(["group"] if "group" in drawn.columns else []), *more]}


def _who(drawn: Drawn) -> str:
    group = "<br>%{customdata[2]}" if "group" in drawn.columns else ""
    return f"<b>%{{customdata[0]}}</b>{group}<br>%{{customdata[1]:,}} examples"


# ------------------------------------------------------------------------------------------------ figures


def clients_figure(drawn: Drawn, summary: Summary, styles: dict[str, Style]) -> Figure:
    """For each method a box (quartiles; whiskers at 10 % and 90 %; a rhombus at the mean) and every client as a dot."""
    methods = [(method.label, method.title) for method in summary.methods]
    if summary.baseline == BEFORE:
        methods.insert(0, (BEFORE, BEFORE))
    methods = [(label, title) for label, title in methods if np.isfinite(drawn.values[label]).any()]
    if not methods:
        return {}
    points = "scattergl" if drawn.clients * len(methods) > MANY_POINTS else "scatter"
    name = metric_name(summary.metric)
    traces: list[Trace] = []
    for row, (label, title) in enumerate(methods):
        colour = styles[label].colour if label in styles else "m0"
        known = drawn.values[label][np.isfinite(drawn.values[label])]
        p10, q1, median, q3, p90 = jsonable(np.quantile(known, [0.1, 0.25, 0.5, 0.75, 0.9]), 5)
        traces += [
            {
                "type": points, "mode": "markers", "x": {"$": f"value {label}"}, "y": {"jitter": row},
                "customdata": _customdata(drawn), "showlegend": False, "name": escaped(title),
                "marker": {"color": theme(colour), "size": 4 if drawn.clients > 500 else 6,
                           "opacity": 0.25 if drawn.clients > 500 else 0.45},
                "hovertemplate": f"{_who(drawn)}<br>{name} %{{x:.4g}}<extra>%{{fullData.name}}</extra>",
            },
            {
                "type": "box", "orientation": "h", "y": [row - 0.24], "q1": [q1], "median": [median], "q3": [q3],
                "lowerfence": [p10], "upperfence": [p90], "mean": jsonable([known.mean()], 5), "boxmean": True,
                "width": 0.26, "showlegend": False, "name": escaped(title), "hoverinfo": "x+name",
                "line": {"color": theme(colour), "width": 1.8}, "fillcolor": theme(colour, 0.18), "whiskerwidth": 0.5,
            },
        ]  # fmt: skip
    bounds, outside = _range([drawn.values[label] for label, _ in methods])
    ticks = {"tickvals": list(range(len(methods))), "ticktext": [escaped(title) for _, title in methods]}
    return {
        "data": traces,
        "beyond": outside,
        "label": f"{name} of every client under each method",
        "height": 90 + 92 * len(methods),
        "layout": {
            "xaxis": axis(f"{name} per client", range=bounds, zeroline=False),
            "yaxis": {**ticks, "range": [len(methods) - 0.5, -0.5], "showgrid": False, "zeroline": False,
                      "automargin": True, "fixedrange": True},
            "hovermode": "closest",
        },
    }  # fmt: skip


def change_figure(drawn: Drawn, summary: Summary, styles: dict[str, Style]) -> Figure:
    """Each client's change against its number of examples; a switch on the page chooses the method."""
    if not summary.compared:
        return {}
    name = metric_name(summary.metric)
    points = "scattergl" if drawn.clients > MANY_POINTS else "scatter"
    at = 3 if "group" in drawn.columns else 2
    traces = [
        {
            "type": points, "mode": "markers", "method": method.label, "showlegend": False,
            "x": {"$": "examples"}, "y": {"$": f"change {method.label}"},
            "customdata": _customdata(drawn, f"value {summary.baseline}", f"value {method.label}", "tested"),
            "marker": {"size": 5 if drawn.clients > 500 else 8, "opacity": 0.4 if drawn.clients > 500 else 0.7,
                       "color": theme(styles[method.label].colour), "symbol": {"open below": SIZEABLE},
                       # WebGL draws the outline of an open circle only if its width is given
                       "line": {"width": 1, "color": theme(styles[method.label].colour)}},
            "hovertemplate": f"{_who(drawn)}, tested on %{{customdata[{at + 2}]:,}}<br>"
                             f"{name} %{{customdata[{at}]:.4g}} → %{{customdata[{at + 1}]:.4g}}"
                             f"<br>change %{{y:+.4g}}<extra></extra>",
        }
        for method in summary.compared
    ]  # fmt: skip
    # the names of the sides have free rows at both ends
    ranges = {m.label: _range([drawn.changes[m.label]], around_zero=True, room=0.09)[0] for m in summary.compared}
    return {
        "data": traces,
        "ranges": ranges,
        "label": "change of every client against its number of examples",
        "height": 420,
        "layout": {
            "xaxis": axis("examples the client can learn from", zeroline=False,
                           **example_ticks(min(drawn.columns["examples"]), max(drawn.columns["examples"]))),
            "yaxis": axis(f"change of {name}", range=ranges[focus_of(summary).label], zeroline=True),
            "hovermode": "closest",
            **_sides(summary, 100 * max(abs(end) for bounds in ranges.values() for end in bounds)),
        },
    }  # fmt: skip


def example_ticks(low: int, high: int) -> Trace:
    """A logarithmic axis where the clients differ much, with whole numbers on it."""
    if low < 1 or high < 8 * low:
        return {}
    steps = (1, 2, 5) if high < 500 * low else (1,)
    ticks = [step * 10**power for power in range(len(str(high))) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}


def _sides(summary: Summary, far: float) -> Trace:
    """The side of zero where clients are hurt is tinted; both are named, in corners that sorted curves leave free."""
    lower = summary.lower_is_better
    tint = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": far if lower else -far,
            "fillcolor": theme("bad", 0.07), "line": {"width": 0}, "layer": "below"}  # fmt: skip
    names = [
        {"text": text, "xref": "paper", "yref": "paper", "x": x, "y": 1 if top else 0, "xanchor": side,
         "yanchor": "top" if top else "bottom", "showarrow": False, "font": {"color": theme("muted")}}
        for text, x, side, top in (("hurt", 0.995, "right", lower), ("helped", 0.005, "left", not lower))
    ]  # fmt: skip
    return {"shapes": [tint], "annotations": names}


def sorted_figure(drawn: Drawn, summary: Summary, styles: dict[str, Style]) -> Figure:
    """The changes of all clients in order, from the most hurt to the most helped: the curve crosses zero at `hurt`."""
    traces = []
    for method in summary.compared:
        change = drawn.changes[method.label]
        ordered = np.sort(change[~np.isnan(change)])
        if not len(ordered):
            continue
        if summary.lower_is_better:
            ordered = ordered[::-1]
        # A few hundred quantiles draw the same curve as thousands of clients.
        at = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), 300)).round().astype(int))
        style = styles[method.label]
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": escaped(method.title),
                "x": jsonable([0, *(100 * (at + 0.5) / len(ordered)), 100], 4),
                "y": jsonable([ordered[0], *ordered[at], ordered[-1]], 4),
                "line": {"color": theme(style.colour), "width": 2.2, "dash": style.dash,
                         "shape": "hvh" if len(ordered) <= 60 else "linear"},
                "hovertemplate": "%{y:+.4g} at %{x:.0f} % of clients",
            }
        )  # fmt: skip
    if not traces:
        return {}
    bounds, _ = _range(list(drawn.changes.values()), around_zero=True, beyond=0.1)
    return {
        "data": traces,
        "label": "changes of all clients in order",
        "height": 380,
        "layout": {
            "xaxis": axis("clients, from the most hurt to the most helped", range=[0, 100], ticksuffix=" %",
                           zeroline=False),
            "yaxis": axis(f"change of {metric_name(summary.metric)}", range=bounds, zeroline=True),
            "hovermode": "x unified",
            **_sides(summary, 100 * max(map(abs, bounds))),
        },
    }  # fmt: skip


def group_order(summary: Summary) -> list[str]:
    """The largest groups, the worst served first."""
    groups = summary.methods[0].groups
    largest = sorted(groups, key=lambda group: (-group.clients, group.group))[:MOST_GROUPS]
    sign = -1.0 if summary.lower_is_better else 1.0
    return [g.group for g in sorted(largest, key=lambda g: (sign * g.mean if math.isfinite(g.mean) else 0.0, g.group))]


def groups_figure(summary: Summary, styles: dict[str, Style]) -> Figure:
    """The mean of each group under each method."""
    names = group_order(summary)
    if not names:
        return {}
    traces = []
    for method in summary.methods:
        of = {group.group: group for group in method.groups}
        style = styles[method.label]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": escaped(method.title),
                "x": jsonable([of[name].mean for name in names], 5), "y": list(range(len(names))),
                "marker": {"color": theme(style.colour), "size": 11, "opacity": 0.9,
                           "symbol": "line-ns-open" if style.colour == "m0" else "circle",
                           "line": {"width": 2.5 if style.colour == "m0" else 0, "color": theme(style.colour)}},
                "hovertemplate": "%{x:.4g}",
            }
        )  # fmt: skip
    ticks = {"tickvals": list(range(len(names))), "ticktext": [escaped(name or "(no group)") for name in names]}
    return {
        "data": traces,
        "label": "mean of each group under each method",
        "height": 110 + 26 * len(names),
        "layout": {
            "xaxis": axis(f"mean {metric_name(summary.metric)} per client", zeroline=False),
            "yaxis": {**ticks, "range": [len(names) - 0.4, -0.6], "automargin": True, "fixedrange": True,
                      "zeroline": False},
            "hovermode": "y unified",
        },
    }  # fmt: skip


def forest(summary: Summary, method: MethodSummary) -> dict[str, float] | None:
    """Where a method's change and interval lie on the common scale of the table, in percent of its width."""
    ends = [0.0]
    for other in summary.compared:
        value, interval = change_of(summary, other.against) if other.against else (0.0, None)
        ends += [value, *((interval.low, interval.high) if interval else ())]
    finite = [end for end in ends if math.isfinite(end)]
    low, high = min(finite), max(finite)
    value, interval = change_of(summary, method.against) if method.against else (math.nan, None)
    if low == high or interval is None or not math.isfinite(value):
        return None

    def at(x: float) -> float:
        return round(4 + 92 * ((x if math.isfinite(x) else value) - low) / (high - low), 2)

    return {"zero": at(0.0), "low": at(interval.low), "value": at(value), "high": at(interval.high)}
