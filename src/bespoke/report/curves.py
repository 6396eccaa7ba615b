"""Figures of training: the metric reached by rounds and by bytes, and cluster sizes over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bespoke.records import RoundLine
from bespoke.report.figures import Figure, Style, Trace, axis, escaped, theme
from bespoke.report.summary import COLLAPSED, Summary
from bespoke.statistics.folders import RunSet, numbered
from bespoke.statistics.formatting import jsonable, metric_name

MOST_ROUNDS = 400  # points of a line of rounds


def curve_figure(study: RunSet, summary: Summary, styles: dict[str, Style], against: str) -> Figure:
    """The validation metric during training: the mean over seeds, and between which values the seeds lie."""
    traces: list[Trace] = []
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
            fill = {"fill": "tonexty", "fillcolor": theme(style.colour, 0.15)}
            traces.append({**band, **fill, "y": jsonable(values.max(0), 5)})
        traces.append(
            {
                "type": "scatter", "mode": "lines", "name": escaped(method.title), "legendgroup": method.label,
                "x": jsonable(x, 5), "y": jsonable(values.mean(0), 5), "hovertemplate": "%{y:.4g}",
                "line": {"color": theme(style.colour), "width": 2.2, "dash": style.dash},
            }
        )  # fmt: skip
    if not traces:
        return {}
    title = "round" if against == "round" else f"{unit} moved by a client in every round"
    return {
        "data": traces,
        "label": f"validation {metric_name(summary.metric)} against {title}",
        "height": 340,
        # the papers count parameters; these are numbers of four bytes
        "note": "" if against == "round" else f"1 {unit} is {scale / 4:,.0f} parameters.",
        "layout": {
            "xaxis": axis(title, zeroline=False),
            "yaxis": axis(f"validation {metric_name(summary.metric)}", zeroline=False),
            "hovermode": "x unified",
        },
    }


def _curve(lines: Sequence[RoundLine], metric: str) -> dict[int, tuple[float, float]]:
    """Round, counted through all stages -> (bytes moved by a client so far, validation metric)."""
    curve: dict[int, tuple[float, float]] = {}
    moved = 0.0
    for number, line in numbered(lines):
        if line.get("clients"):
            moved += (line.get("bytes_down", 0) + line.get("bytes_up", 0)) / line["clients"]
        value = (line.get("validation") or {}).get(metric)
        if value is not None and math.isfinite(value):
            curve[number] = (moved, float(value))
    return curve


def clusters_figure(study: RunSet, summary: Summary, styles: dict[str, Style]) -> Figure:
    """The share of the largest cluster in every round, a line for each seed (Motley, Figure 6a)."""
    traces: list[Trace] = []
    for method in summary.methods:
        style = styles[method.label]
        named = False
        for run in study.runs:
            shares = list(run.largest_shares().items()) if run.label == method.label else []
            if not shares:
                continue
            # a few hundred rounds draw the same line as thousands; the last one is always among them
            kept = shares[:: -max(len(shares) // MOST_ROUNDS, 1)][::-1]
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "name": escaped(method.title), "legendgroup": method.label,
                    "showlegend": not named, "x": [number for number, _ in kept],
                    "y": jsonable([100 * share for _, share in kept], 4),
                    "line": {"color": theme(style.colour), "width": 1.6, "dash": style.dash},
                    "hovertemplate": f"%{{y:.3g}} %, seed {run.seed}",
                }
            )  # fmt: skip
            named = True
    if not traces:
        return {}
    bound = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 100 * COLLAPSED, "y1": 100 * COLLAPSED,
             "line": {"color": theme("muted"), "width": 1, "dash": "dot"}}  # fmt: skip
    return {
        "data": traces,
        "label": "share of the clients in the largest cluster against round",
        "height": 340,
        "layout": {
            "xaxis": axis("round", zeroline=False),
            "yaxis": axis("clients in the largest cluster", range=[0, 103], ticksuffix=" %", zeroline=False),
            "hovermode": "x unified",
            "shapes": [bound],
        },
    }


def _mean_traffic(curves: Sequence[dict[int, tuple[float, float]]], rounds: Sequence[int], scale: float) -> list[float]:
    return [sum(curve[r][0] for curve in curves) / len(curves) / scale for r in rounds]
