"""What the page shows of personal embeddings (FedEmbed's Figures 3 and 4): guesses against groups, and the plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bespoke.metrics.analyses import Analysis, told
from bespoke.reports.figures import Figure, axis, escaped, theme

MOST_GROUPS = 20  # in a figure
PALETTE = ("m1", "m2", "m3", "m4", "m5", "m6")
SYMBOLS = ("circle", "diamond", "square", "cross")  # colours come again


def embedding_parts(
    analyses: Sequence[Analysis], titles: dict[str, str]
) -> tuple[dict[str, Figure], list[dict[str, Any]]]:
    """(figures, what embeddings.html.jinja tells around them)."""
    figures: dict[str, Figure] = {}
    entries = []
    for place, analysis in enumerate(a for a in analyses if a.kind == "embeddings"):
        name = f"embeddings-{place}"
        figures[f"{name}-counts"] = confusion_figure(analysis.record)
        figures[f"{name}-plane"] = plane_figure(analysis)
        entries.append({"name": name, "title": titles[analysis.label], "told": told(analysis)})
    return figures, entries


def confusion_figure(record: dict[str, Any]) -> Figure:
    """Groups down, guesses across: the part of a group's clients in each cell."""
    counts = np.array(record["counts"], dtype=float)[:MOST_GROUPS, :MOST_GROUPS]
    part = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names = [escaped(str(group)) for group in record["groups"][:MOST_GROUPS]]
    return {
        "data": [{
            "type": "heatmap", "z": part.round(4).tolist(), "x": names, "y": names, "zmin": 0, "zmax": 1,
            "colorscale": [[0, theme("m1", 0.04)], [1, theme("m1")]], "xgap": 1, "ygap": 1,
            "hovertemplate": "group %{y}, guessed %{x}: %{z:.1%}<extra></extra>",
        }],
        "label": "the groups of clients, and what their embeddings say", "height": 380,
        "layout": {"xaxis": axis("guessed from the embedding", type="category"),
                   "yaxis": axis("group", type="category", autorange="reversed")},
    }  # fmt: skip


def plane_figure(analysis: Analysis) -> Figure:
    """The embeddings of the first seed in the plane, a colour for each group."""
    import pandas as pd

    try:
        table = pd.read_parquet(analysis.tables[0])
    except OSError:
        return {}
    traces = []
    for place, group in enumerate(analysis.record["groups"][:MOST_GROUPS]):
        rows = table[table["group"] == group]
        traces.append({
            "type": "scatter", "mode": "markers", "name": escaped(str(group)), "x": rows["x"].round(2).tolist(),
            "y": rows["y"].round(2).tolist(), "hoverinfo": "name", "showlegend": True,
            "marker": {"color": theme(PALETTE[place % len(PALETTE)]), "size": 5,
                       "symbol": SYMBOLS[place // len(PALETTE) % len(SYMBOLS)]},
        })  # fmt: skip
    return {
        "data": traces, "label": "personal embeddings in the plane", "height": 380,
        "layout": {"xaxis": axis("", showticklabels=False, zeroline=False),
                   "yaxis": axis("", showticklabels=False, zeroline=False), "hovermode": "closest"},
    }  # fmt: skip
