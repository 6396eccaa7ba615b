"""The page's section on groups of clients, after Liu et al. (2023): a table by group, who gains, what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bespoke.report.figures import MOST_GROUPS, Figure, axis, escaped, theme
from bespoke.report.group_gain import Gain, by_group, costs, gain, labelled, shown_metric
from bespoke.report.summary import Summary
from bespoke.statistics.clients import ALL
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import count, jsonable, metric_name

if TYPE_CHECKING:
    import pandas as pd

BINS = 40
OUTER = 1.0  # percent of clients at either end that may lie beyond the axis


def group_parts(study: RunSet, table: pd.DataFrame, summary: Summary) -> tuple[dict[str, Figure], dict[str, Any]]:
    """(figures, what groups.html.jinja tells around them); empty unless groups were trained."""
    if not (labelled(study, "group-fl") or labelled(study, "group-perfl")):
        return {}, {}
    titles = {method.label: method.title for method in summary.methods}
    metric, lower = shown_metric(study, summary)
    rows = by_group(study, table, summary)
    found = gain(study, table, summary)
    about = {
        "metric": metric_name(metric),
        "lower": lower,
        "pooled": metric == "perplexity",
        "titles": titles,
        "rows": [*rows[:-1][:MOST_GROUPS], rows[-1]],
        "groups": len(rows) - 1,
        "gain": found,
        "by_group": [] if found is None else [
            (row.group, row.clients, 100 * found.improved_in(row.group), float(np.median(found.of(row.group))))
            for row in rows[:MOST_GROUPS] if row.group != ALL and len(found.of(row.group))
        ],
        "costs": costs(study),
    }  # fmt: skip
    return {"group-gain": gain_figure(found, titles)} if found else {}, about


def gain_figure(found: Gain, titles: dict[str, str]) -> Figure:
    """Figure 1: how many clients change by how much."""
    changes = found.of()
    if not len(changes):
        return {}
    low, high = np.percentile(changes, [OUTER, 100 - OUTER])
    reach = max(abs(low), abs(high)) or 1.0
    inside = changes[np.abs(changes) <= reach]
    outside = len(changes) - len(inside)
    counts, edges = np.histogram(inside, BINS, (-reach, reach))
    middles = (edges[:-1] + edges[1:]) / 2
    gained = middles < 0 if found.lower else middles > 0
    name = metric_name(found.metric)
    against = f"{name}, {escaped(titles[found.label])} against {escaped(titles[found.rival])}"
    return {
        "data": [{
            "type": "bar", "x": jsonable(middles.tolist(), 5), "y": counts.tolist(), "width": 2 * reach / BINS * 0.94,
            "marker": {"color": [theme("good") if better else theme("bad") for better in gained]}, "showlegend": False,
            "hovertemplate": "%{y} clients change by about %{x:.3g} %<extra></extra>",
        }],
        "note": f"{count(outside, 'extreme value')} beyond the axis {'is' if outside == 1 else 'are'} left out."
        if outside else "",
        "label": f"relative change of {name}, {titles[found.label]} against {titles[found.rival]}",
        "height": 320,
        "layout": {
            "xaxis": axis(f"change of {against}, %"),
            "yaxis": axis("clients"), "bargap": 0,
        },
    }  # fmt: skip
