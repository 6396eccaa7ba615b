"""The page's section on a mixed model: where the target's variance lies, and which coefficients differ."""

from __future__ import annotations

from typing import Any

from bespoke.report.figures import Figure, axis, escaped, theme
from bespoke.report.summary import Summary
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import jsonable, percent
from bespoke.statistics.mixed import MixedEstimates, read_mixed

MOST_COEFFICIENTS = 30
PARTS = {
    "groups": ("between groups", "m4"),
    "clients": ("between clients", "m2"),
    "within": ("within clients", "m0"),
    "common": ("explained by the common coefficients", "m1"),
}  # of the target's variance: share -> (name, colour)


def mixed_parts(study: RunSet, summary: Summary) -> tuple[dict[str, Figure], list[dict[str, Any]]]:
    """(figures, what mixed.html.jinja tells around them); empty unless a mixed model was fitted."""
    figures, entries = {}, []
    for place, found in enumerate(read_mixed(study)):
        name = f"mixed-{place}"
        figures[f"{name}-shares"] = shares_figure(found)
        figures[f"{name}-coefficients"] = coefficients_figure(found)
        entries.append({"name": name, "title": summary.method(found.label).title, "found": found,
                        "shown": found.coefficients[:MOST_COEFFICIENTS]})  # fmt: skip
    return figures, entries


def shares_figure(found: MixedEstimates) -> Figure:
    """One stacked bar: the shares of the target's variance."""
    traces = [
        {
            "type": "bar", "orientation": "h", "name": f"{name}, {percent(100 * found.shares[part])} %",
            "x": jsonable([100 * found.shares[part]], 4), "y": [0], "marker": {"color": theme(colour)},
            "hovertemplate": "%{x:.3g} %",
        }
        for part, (name, colour) in PARTS.items() if part in found.shares
    ]  # fmt: skip
    return {
        "data": traces, "label": "shares of the variance of the target", "height": 150,
        "layout": {
            "barmode": "stack", "xaxis": axis("share of the target's variance", range=[0, 100], ticksuffix=" %"),
            "yaxis": axis("", showticklabels=False, showgrid=False, fixedrange=True), "hovermode": "closest",
            "legend": {"traceorder": "normal"},
        },
    }  # fmt: skip


def coefficients_figure(found: MixedEstimates) -> Figure:
    """Each coefficient: its mean, two standard errors around it, and one standard deviation between clients."""
    shown = found.coefficients[:MOST_COEFFICIENTS]
    rows = list(range(len(shown)))
    means = jsonable([c.mean for c in shown], 4)
    dot = {"type": "scatter", "mode": "markers", "x": means, "y": rows}
    deviation = {"type": "data", "array": jsonable([c.clients for c in shown], 4), "color": theme("m2", 0.45),
                 "thickness": 9, "width": 0}  # fmt: skip
    error = {"type": "data", "array": jsonable([2 * c.error for c in shown], 4), "color": theme("ink"),
             "thickness": 1.5, "width": 4}  # fmt: skip
    traces = [
        {**dot, "name": "± standard deviation between clients", "error_x": deviation, "hoverinfo": "skip",
         "marker": {"color": theme("m2", 0.45), "size": 9, "symbol": "square"}},
        {**dot, "name": "common mean ± 2 standard errors", "error_x": error,
         "marker": {"color": theme("ink"), "size": 7}, "customdata": jsonable([c.clients for c in shown], 4),
         "text": [escaped(c.name) for c in shown],
         "hovertemplate": "<b>%{text}</b><br>mean %{x:.3g}, between clients %{customdata:.3g}<extra></extra>"},
    ]  # fmt: skip
    ticks = {"tickvals": rows, "ticktext": [escaped(_short(c.name)) for c in shown]}
    return {
        "data": traces, "label": "coefficients and how they differ between clients", "height": 120 + 28 * len(shown),
        "layout": {
            "xaxis": axis("coefficient", zeroline=True),
            "yaxis": {**ticks, "range": [len(shown) - 0.4, -0.6], "automargin": True, "fixedrange": True,
                      "zeroline": False},
            "hovermode": "closest",
        },
    }  # fmt: skip


def _short(name: str) -> str:
    """A name that leaves room for the figure on a phone; the table has all of it."""
    return name if len(name) <= 20 else name[:19] + "…"
