"""A figure of the report as a Plotly object, for notebooks. figures.html.jinja does the same in the page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from bespoke.report.figures import Drawn, Figure, escaped

GOLDEN = 0.6180339887  # spreads points in a row, as the page does


def plotly_figure(figure: Figure, drawn: Drawn, chosen: str) -> go.Figure:
    """The figure with its references filled in. `chosen`: whose points are shown where a method is to be chosen."""
    traces = [
        {name: value for name, value in trace.items() if name != "method"}
        for trace in _filled(figure["data"], drawn)
        if trace.get("method", chosen) == chosen
    ]
    layout = _filled(figure["layout"], drawn)
    if "ranges" in figure:
        layout["yaxis"]["range"] = list(figure["ranges"][chosen])
    line, strong, muted = (theme_colours()[name] for name in ("line", "strong", "muted"))
    for axis in ("xaxis", "yaxis"):
        title = layout[axis].get("title", {})
        layout[axis] = {
            "gridcolor": line, "zerolinecolor": strong, "linecolor": strong, **layout[axis],
            "title": {**title, "font": {"size": 13, "color": muted}},
        }  # fmt: skip
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", **layout.get("legend", {})}
    style = {
        "template": "none", "height": figure["height"] + 60, "margin": {"l": 60, "r": 30, "t": 40, "b": 50},
        "font": {"color": theme_colours()["ink"], "size": 13}, "legend": legend,
    }  # fmt: skip
    return go.Figure({"data": traces, "layout": {**layout, **style}})


def _filled(spec: Any, drawn: Drawn) -> Any:
    """What a specification refers to, in its place: columns, rows of columns, scattered heights, colours."""
    columns = drawn.columns
    if isinstance(spec, list):
        return [_filled(entry, drawn) for entry in spec]
    if not isinstance(spec, dict):
        return spec
    if "$" in spec:
        return columns[spec["$"]]
    if "theme" in spec:
        return _colour(spec["theme"], spec.get("alpha"))
    if "zip" in spec:
        return [list(row) for row in zip(*([_safe(value) for value in columns[name]] for name in spec["zip"]))]
    if "open below" in spec:
        return ["circle-open" if rows < spec["open below"] else "circle" for rows in columns["tested"]]
    if "jitter" in spec:
        return [spec["jitter"] + 0.02 + 0.36 * (place * GOLDEN % 1) for place in range(drawn.clients)]
    return {name: _filled(value, drawn) for name, value in spec.items()}


def _safe(value: Any) -> Any:
    return escaped(value) if isinstance(value, str) else value


def _colour(name: str, alpha: float | None) -> str:
    found = theme_colours()[name]
    if alpha is None:
        return found
    red, green, blue = (int(found[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


@cache
def theme_colours() -> dict[str, str]:
    """The colours of the page's light theme."""
    style = (Path(__file__).parent / "templates" / "style.html.jinja").read_text(encoding="utf-8")
    light = style[style.index(":root {") :].split("}", 1)[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
