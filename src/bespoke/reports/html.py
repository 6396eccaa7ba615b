"""The comparison as one HTML page that opens offline, made from run folders and from nothing else.

The page carries every client's numbers once (`columns`); a figure is a Plotly specification that refers to them:
{"$": "change finetune"} stands for a column, {"zip": [...]} for a table of columns, "$m1" for a colour of the theme.
The script at the end of report.html.jinja fills these in. Same folders, same bytes: no dates, no random ids.
"""

from __future__ import annotations

import errno
import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bespoke.data.arrays import write_text
from bespoke.errors import UserError
from bespoke.metrics import clients as over
from bespoke.metrics.clients import Cells, Floats, Study
from bespoke.metrics.significance import draws_for
from bespoke.metrics.summary import (
    BEFORE,
    MethodSummary,
    Summary,
    change_of,
    count,
    jsonable,
    metric_name,
    number,
    p_text,
    percent,
    read,
    signed,
    signed_change,
    size,
    summarize_study,
    with_before,
    with_interval,
)
from bespoke.randomness import generator

if TYPE_CHECKING:
    import pandas as pd

Figure = dict[str, Any]

MOST_DRAWN = 20_000  # clients in a figure; the numbers are always of all
MOST_GROUPS = 30
MANY_POINTS = 1_500  # from here on points are drawn by WebGL
_COLOURS = 6  # of the theme, besides the baseline's grey
_DASHES = ("solid", "dash", "dot", "dashdot")


def write_report(paths: Sequence[Path], output: Path) -> Path:
    """Write the page for a comparison folder, or for any run folders; return where it is."""
    output = Path(output)
    if output.is_dir():
        output = output / "report.html"
    study, table = read(paths)
    page = render_report(study, table, summarize_study(study, table))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, page)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # no mistake of the user's: exit code 1, and --resume
            raise
        raise UserError(f"cannot write the report to {output} ({error.strerror}); choose another place") from error
    return output


def render_report(study: Study, table: pd.DataFrame, summary: Summary) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    styles = _styles(summary)
    metric = summary.metric
    tested = with_before(table, metric) if summary.baseline == BEFORE else table
    drawn = _draw(over.cells(tested, f"query_{metric}"), summary)
    figures = {
        "clients": _clients_figure(drawn, summary, styles),
        "change": _change_figure(drawn, summary, styles),
        "sorted": _sorted_figure(drawn, summary, styles),
        "groups": _groups_figure(summary, styles),
        "rounds": _curve_figure(study, summary, styles, against="round"),
        "traffic": _curve_figure(study, summary, styles, against="traffic"),
    }
    figures = {name: figure for name, figure in figures.items() if figure}
    listed = {str(entry["label"]): entry for entry in study.compare.get("methods", [])}
    focus = _focus(summary)
    return _environment().get_template("report.html.jinja").render(
        summary=summary,
        styles=styles,
        compare=study.compare,
        listed=listed,
        focus=focus.label,
        drawn=drawn,
        figures=figures,
        forest={method.label: _forest(summary, method) for method in summary.compared},
        group_rows=_group_rows(summary),
        most_groups=MOST_GROUPS,
        tuning=_tuning(study, summary),
        configs=_configs(study),
        excluded={method.title: method.excluded for method in summary.methods if method.excluded},
        dropped=_dropped(study),
        reference="the model before" if summary.baseline == BEFORE else summary.method(summary.baseline).title,
        payload=_script_json({"columns": drawn.columns, "figures": figures, "focus": focus.label,
                              "lookup": _lookup(drawn, summary)}),
        plotly=Markup(get_plotlyjs()),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ what figures share


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


def _styles(summary: Summary) -> dict[str, Style]:
    styles, place = {}, 0
    for method in summary.methods:
        if method.label == summary.baseline:
            styles[method.label] = Style("m0", "solid")
        else:
            styles[method.label] = Style(f"m{1 + place % _COLOURS}", _DASHES[place // _COLOURS % len(_DASHES)])
            place += 1
    return styles


def _focus(summary: Summary) -> MethodSummary:
    """The method that is shown first: the best of those that are compared."""
    compared = sorted(summary.compared, key=lambda m: m.mean.value, reverse=not summary.lower_is_better)
    return compared[0] if compared else summary.methods[0]


def _draw(cells: Cells, summary: Summary) -> Drawn:
    total = len(cells.clients)
    kept = np.arange(total)
    if total > MOST_DRAWN:
        kept = np.sort(generator("drawn clients").permutation(total)[:MOST_DRAWN])
    values = {label: _over_seeds(cells.of(label)[:, kept]) for label in cells.methods}
    changes = {
        method.label: _over_seeds((cells.of(method.label) - cells.of(summary.baseline))[:, kept])
        for method in summary.compared
    }
    columns: dict[str, list[Any]] = {
        "client": [cells.clients[i] for i in kept],
        "examples": [round(float(cells.examples[i])) for i in kept],
    }
    if any(cells.groups):
        columns["group"] = [cells.groups[i] for i in kept]
    columns |= {f"value {label}": jsonable(column, 5) for label, column in values.items()}
    columns |= {f"change {label}": jsonable(column, 4) for label, column in changes.items()}
    return Drawn(len(kept), total, values, changes, columns)


def _over_seeds(values: Floats) -> Floats:
    known = np.isfinite(values)
    seeds = known.sum(0)
    return np.where(known, values, 0.0).sum(0) / np.where(seeds > 0, seeds, np.nan)


def _axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "automargin": True, **more}


def _label(text: str) -> str:
    """Plotly reads a little HTML in texts; a user's string must not be read so."""
    return html.escape(text, quote=False)


def _range(columns: Sequence[Floats], around_zero: bool = False, beyond: float = 1.0) -> tuple[list[float], int]:
    """An axis that is not ruled by a few extreme clients, and how many lie beyond it.

    It ends at the extremes, or `beyond` times the width of the middle 98 % further out than these, if that is nearer.
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
    margin = 0.04 * ((high - low) or 1.0)
    bounds = [low - margin, high + margin]
    return jsonable(bounds, 5), int(((numbers < bounds[0]) | (numbers > bounds[1])).sum())


def _customdata(drawn: Drawn, *more: str) -> dict[str, Any]:
    return {"zip": ["client", "examples", *(["group"] if "group" in drawn.columns else []), *more]}


def _who(drawn: Drawn) -> str:
    group = "<br>%{customdata[2]}" if "group" in drawn.columns else ""
    return f"<b>%{{customdata[0]}}</b>{group}<br>%{{customdata[1]:,}} examples"


# ------------------------------------------------------------------------------------------------ figures


def _clients_figure(drawn: Drawn, summary: Summary, styles: dict[str, Style]) -> Figure:
    """For each method a box (quartiles; whiskers at 10 % and 90 %; a rhombus at the mean) and every client as a dot."""
    methods = [(method.label, method.title) for method in summary.methods]
    if summary.baseline == BEFORE:
        methods.insert(0, (BEFORE, BEFORE))
    methods = [(label, title) for label, title in methods if np.isfinite(drawn.values[label]).any()]
    if not methods:
        return {}
    points = "scattergl" if drawn.clients * len(methods) > MANY_POINTS else "scatter"
    name = metric_name(summary.metric)
    traces: list[dict[str, Any]] = []
    for row, (label, title) in enumerate(methods):
        colour = styles[label].colour if label in styles else "m0"
        known = drawn.values[label][np.isfinite(drawn.values[label])]
        p10, q1, median, q3, p90 = jsonable(np.quantile(known, [0.1, 0.25, 0.5, 0.75, 0.9]), 5)
        traces += [
            {
                "type": points, "mode": "markers", "x": {"$": f"value {label}"}, "y": {"jitter": row},
                "customdata": _customdata(drawn), "showlegend": False,
                "marker": {"color": f"${colour}", "size": 4 if drawn.clients > 500 else 6,
                           "opacity": 0.25 if drawn.clients > 500 else 0.45},
                "hovertemplate": f"{_who(drawn)}<br>{name} %{{x:.4g}}<extra>{_label(title)}</extra>",
            },
            {
                "type": "box", "orientation": "h", "y": [row - 0.24], "q1": [q1], "median": [median], "q3": [q3],
                "lowerfence": [p10], "upperfence": [p90], "mean": jsonable([known.mean()], 5), "boxmean": True,
                "width": 0.26, "showlegend": False, "name": _label(title), "hoverinfo": "x+name",
                "line": {"color": f"${colour}", "width": 1.8}, "fillcolor": f"${colour}/0.18", "whiskerwidth": 0.5,
            },
        ]  # fmt: skip
    bounds, outside = _range([drawn.values[label] for label, _ in methods])
    ticks = {"tickvals": list(range(len(methods))), "ticktext": [_label(title) for _, title in methods]}
    return {
        "data": traces,
        "beyond": outside,
        "label": f"{name} of every client under each method",
        "height": 90 + 92 * len(methods),
        "layout": {
            "xaxis": _axis(f"{name} per client", range=bounds, zeroline=False),
            "yaxis": {**ticks, "range": [len(methods) - 0.5, -0.5], "showgrid": False, "zeroline": False,
                      "automargin": True, "fixedrange": True},
            "hovermode": "closest",
        },
    }  # fmt: skip


def _change_figure(drawn: Drawn, summary: Summary, styles: dict[str, Style]) -> Figure:
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
            "customdata": _customdata(drawn, f"value {summary.baseline}", f"value {method.label}"),
            "marker": {"size": 5 if drawn.clients > 500 else 8, "opacity": 0.4 if drawn.clients > 500 else 0.7,
                       "color": f"${styles[method.label].colour}"},
            "hovertemplate": f"{_who(drawn)}<br>{name} %{{customdata[{at}]:.4g}} → %{{customdata[{at + 1}]:.4g}}"
                             f"<br>change %{{y:+.4g}}<extra></extra>",
        }
        for method in summary.compared
    ]  # fmt: skip
    ranges = {m.label: _range([drawn.changes[m.label]], around_zero=True)[0] for m in summary.compared}
    return {
        "data": traces,
        "ranges": ranges,
        "label": "change of every client against its number of examples",
        "height": 420,
        "layout": {
            "xaxis": _axis("examples the client can learn from", zeroline=False, **_example_ticks(drawn)),
            "yaxis": _axis(f"change of {name}", range=ranges[_focus(summary).label], zeroline=True),
            "hovermode": "closest",
            **_sides(summary, 100 * max(abs(end) for bounds in ranges.values() for end in bounds)),
        },
    }  # fmt: skip


def _example_ticks(drawn: Drawn) -> dict[str, Any]:
    """A logarithmic axis where the clients differ much, with whole numbers on it."""
    low, high = min(drawn.columns["examples"]), max(drawn.columns["examples"])
    if low < 1 or high < 8 * low:
        return {}
    steps = (1, 2, 5) if high < 500 * low else (1,)
    ticks = [step * 10**power for power in range(len(str(high))) for step in steps]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}


def _sides(summary: Summary, far: float) -> dict[str, Any]:
    """The side of zero where clients are hurt is tinted; both are named, in corners that sorted curves leave free."""
    lower = summary.lower_is_better
    tint = {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": far if lower else -far,
            "fillcolor": "$bad/0.07", "line": {"width": 0}, "layer": "below"}  # fmt: skip
    names = [
        {"text": text, "xref": "paper", "yref": "paper", "x": x, "y": 1 if top else 0, "xanchor": side,
         "yanchor": "top" if top else "bottom", "showarrow": False, "font": {"color": "$muted"}}
        for text, x, side, top in (("hurt", 0.995, "right", lower), ("helped", 0.005, "left", not lower))
    ]  # fmt: skip
    return {"shapes": [tint], "annotations": names}


def _sorted_figure(drawn: Drawn, summary: Summary, styles: dict[str, Style]) -> Figure:
    """The changes of all clients in order, from the most hurt to the most helped: the curve crosses zero at `hurt`."""
    traces = []
    for method in summary.compared:
        change = drawn.changes[method.label]
        ordered = np.sort(change[np.isfinite(change)])
        if summary.lower_is_better:
            ordered = ordered[::-1]
        # A few hundred quantiles draw the same curve as thousands of clients.
        at = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), 300)).round().astype(int))
        style = styles[method.label]
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": _label(method.title),
                "x": jsonable([0, *(100 * (at + 0.5) / len(ordered)), 100], 4),
                "y": jsonable([ordered[0], *ordered[at], ordered[-1]], 4),
                "line": {"color": f"${style.colour}", "width": 2.2, "dash": style.dash,
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
            "xaxis": _axis("clients, from the most hurt to the most helped", range=[0, 100], ticksuffix=" %",
                           zeroline=False),
            "yaxis": _axis(f"change of {metric_name(summary.metric)}", range=bounds, zeroline=True),
            "hovermode": "x unified",
            **_sides(summary, 100 * max(map(abs, bounds))),
        },
    }  # fmt: skip


def _groups_figure(summary: Summary, styles: dict[str, Style]) -> Figure:
    """The mean of each group under each method."""
    names = _group_order(summary)
    if not names:
        return {}
    traces = []
    for method in summary.methods:
        of = {group.group: group for group in method.groups}
        style = styles[method.label]
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": _label(method.title),
                "x": jsonable([of[name].mean for name in names], 5), "y": list(range(len(names))),
                "marker": {"color": f"${style.colour}", "size": 11, "opacity": 0.9,
                           "symbol": "line-ns-open" if style.colour == "m0" else "circle",
                           "line": {"width": 2.5 if style.colour == "m0" else 0, "color": f"${style.colour}"}},
                "hovertemplate": "%{x:.4g}",
            }
        )  # fmt: skip
    ticks = {"tickvals": list(range(len(names))), "ticktext": [_label(name or "(no group)") for name in names]}
    return {
        "data": traces,
        "label": "mean of each group under each method",
        "height": 110 + 26 * len(names),
        "layout": {
            "xaxis": _axis(f"mean {metric_name(summary.metric)} per client", zeroline=False),
            "yaxis": {**ticks, "range": [len(names) - 0.4, -0.6], "automargin": True, "fixedrange": True,
                      "zeroline": False},
            "hovermode": "y unified",
        },
    }  # fmt: skip


def _curve_figure(study: Study, summary: Summary, styles: dict[str, Style], against: str) -> Figure:
    """The validation metric during training: the mean over seeds, and between which values the seeds lie."""
    traces: list[dict[str, Any]] = []
    most = max((method.cost.bytes for method in summary.methods if method.cost), default=0.0)
    unit, scale = next(((name, by) for name, by in (("GB", 1e9), ("MB", 1e6)) if most >= by), ("kB", 1e3))
    for method in summary.methods:
        curves = [_curve(run.lines("rounds.jsonl"), summary.metric) for run in study.runs if run.label == method.label]
        rounds = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if len(rounds) < 2:
            continue
        style = styles[method.label]
        values = np.array([[curve[r][1] for r in rounds] for curve in curves])
        x: Sequence[float] = rounds if against == "round" else _mean_traffic(curves, rounds, scale)
        if against != "round" and not any(x):
            continue  # a method that sends nothing has no place on this axis
        if len(curves) > 1:
            band = {"type": "scatter", "mode": "lines", "x": jsonable(x, 5), "line": {"width": 0}, "showlegend": False,
                    "hoverinfo": "skip", "legendgroup": method.label}  # fmt: skip
            traces.append({**band, "y": jsonable(values.min(0), 5)})
            fill = {"fill": "tonexty", "fillcolor": f"${style.colour}/0.15"}
            traces.append({**band, **fill, "y": jsonable(values.max(0), 5)})
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": _label(method.title), "legendgroup": method.label,
                "x": jsonable(x, 5), "y": jsonable(values.mean(0), 5), "hovertemplate": "%{y:.4g}",
                "line": {"color": f"${style.colour}", "width": 2.2, "dash": style.dash},
            }
        )  # fmt: skip
    if not traces:
        return {}
    title = "round" if against == "round" else f"{unit} moved by a client in every round"
    return {
        "data": traces,
        "label": f"validation {metric_name(summary.metric)} against {title}",
        "height": 340,
        "layout": {
            "xaxis": _axis(title, zeroline=False),
            "yaxis": _axis(f"validation {metric_name(summary.metric)}", zeroline=False),
            "hovermode": "x unified",
        },
    }


def _curve(lines: Sequence[dict[str, Any]], metric: str) -> dict[int, tuple[float, float]]:
    """Round, counted through all stages -> (bytes moved by a client so far, validation metric)."""
    curve: dict[int, tuple[float, float]] = {}
    before = last = 0
    stage: Any = None
    moved = 0.0
    for line in lines:
        if line.get("stage") != stage:
            stage, before = line.get("stage"), last
        last = before + int(line.get("round") or 0)
        if line.get("clients"):
            moved += (line.get("bytes_down", 0) + line.get("bytes_up", 0)) / line["clients"]
        value = (line.get("validation") or {}).get(metric)
        if value is not None and math.isfinite(value):
            curve[last] = (moved, float(value))
    return curve


def _mean_traffic(curves: Sequence[dict[int, tuple[float, float]]], rounds: Sequence[int], scale: float) -> list[float]:
    return [sum(curve[r][0] for curve in curves) / len(curves) / scale for r in rounds]


def _forest(summary: Summary, method: MethodSummary) -> dict[str, float] | None:
    """Where a method's change and interval lie on the common scale of the table, in percent of its width."""
    ends = [0.0]
    for other in summary.compared:
        value, interval = change_of(summary, other.against) if other.against else (0.0, None)
        ends += [value, *((interval.low, interval.high) if interval and math.isfinite(interval.low) else ())]
    low, high = min(ends), max(ends)
    if low == high or method.against is None:
        return None
    value, interval = change_of(summary, method.against)

    def at(x: float) -> float:
        return round(4 + 92 * ((x if math.isfinite(x) else value) - low) / (high - low), 2)

    return {"zero": at(0.0), "low": at(interval.low), "value": at(value), "high": at(interval.high)}


# ------------------------------------------------------------------------------------------------ tables


def _group_order(summary: Summary) -> list[str]:
    """The largest groups, the worst served first."""
    groups = summary.methods[0].groups
    largest = sorted(groups, key=lambda group: (-group.clients, group.group))[:MOST_GROUPS]
    sign = -1.0 if summary.lower_is_better else 1.0
    return [g.group for g in sorted(largest, key=lambda g: (sign * g.mean if math.isfinite(g.mean) else 0.0, g.group))]


def _group_rows(summary: Summary) -> dict[str, list[Any]]:
    order = {name: place for place, name in enumerate(_group_order(summary))}
    return {
        method.label: sorted((g for g in method.groups if g.group in order), key=lambda g: order[g.group])
        for method in summary.compared
    }


def _tuning(study: Study, summary: Summary) -> list[dict[str, Any]]:
    """What was tried for each method, the chosen one marked."""
    tables = []
    for entry in study.compare.get("methods", []):
        tried = [trial for trial in entry.get("tuning") or [] if isinstance(trial.get("knobs"), dict)]
        if not tried:
            continue
        knobs = list(dict.fromkeys(name for trial in tried for name in trial["knobs"]))
        chosen = entry.get("chosen") or {}
        rows = [
            {
                "cells": [trial["knobs"].get(name, "") for name in knobs],
                "validation": trial.get("validation"),
                "chosen": all(chosen.get(name) == value for name, value in trial["knobs"].items()),
            }
            for trial in tried
        ]
        tables.append({"title": entry.get("title") or entry["label"], "knobs": knobs, "rows": rows})
    return tables


def _configs(study: Study) -> dict[str, str]:
    """One resolved experiment for each method: the seeds differ in nothing else."""
    configs: dict[str, str] = {}
    for run in study.runs:
        configs.setdefault(run.label, run.config())
    return {label: text for label, text in configs.items() if text}


def _dropped(study: Study) -> int:
    return sum(int(line.get("dropped") or 0) for run in study.runs for line in run.lines("rounds.jsonl"))


def _lookup(drawn: Drawn, summary: Summary) -> list[list[str]]:
    """The columns shown for a client that is looked up, with their headings."""
    shown: list[list[str]] = [[name] * 2 for name in ("client", "group", "examples") if name in drawn.columns]
    if summary.baseline == BEFORE:
        shown.append([BEFORE, f"value {BEFORE}"])
    return shown + [[method.title, f"value {method.label}"] for method in summary.methods]


# ------------------------------------------------------------------------------------------------ text


def _script_json(value: Any) -> Markup:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def _unbroken(text: str) -> Markup:
    """Keep a number and its unit, and a p and its value, on one line."""
    return Markup(re.sub(r"(?<=\d) (?=%|kB|MB|GB)|(?<=\bp) (?=[<=&])|(?<=[<=;]) (?=\d)", "\u00a0", str(escape(text))))


def _plain(value: Any) -> str:
    """A value of a configuration as text."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "percent": percent, "signed": signed, "p": p_text, "size": size, "plain": _plain,
        "unbroken": _unbroken, "metric": metric_name, "finite": math.isfinite,
        "capital": lambda text: text[:1].upper() + text[1:],
    }  # fmt: skip
    environment.globals |= {
        "count": count, "change": signed_change, "change_of": change_of, "with_interval": with_interval,
        "draws_for": draws_for, "BEFORE": BEFORE,
    }  # fmt: skip
    return environment
