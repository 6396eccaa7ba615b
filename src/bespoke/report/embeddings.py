"""The page's section on personal embeddings.

It shows guessed groups against known groups and the plane (FedEmbed, Figures 3 and 4), and FedPC's map of users and
contexts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bespoke.plain import JsonObject
from bespoke.report.figures import Figure, axis, escaped, theme
from bespoke.statistics.analyses import Analysis, AnalysisRecord, in_words

MOST_GROUPS = 20  # in a figure
PALETTE = ("m1", "m2", "m3", "m4", "m5", "m6")
SYMBOLS = ("circle", "diamond", "square", "cross")  # colours come again


MOST_NAMES = 60  # written beside their points; more are told when pointed at


def embedding_parts(
    analyses: Sequence[Analysis], titles: dict[str, str], named: bool = True
) -> tuple[dict[str, Figure], list[JsonObject]]:
    """(figures, what embeddings.html.jinja tells around them)."""
    figures: dict[str, Figure] = {}
    entries = []
    for place, analysis in enumerate(a for a in analyses if a.kind == "embeddings"):
        name = f"embeddings-{place}"
        entry = {
            "name": name,
            "title": titles[analysis.label],
            "sentences": in_words(analysis),
            "map": "map" in analysis.record,
        }
        entries.append(entry)
        if entry["map"]:
            figures[f"{name}-users"], figures[f"{name}-contexts"] = _maps(analysis, named)
            continue
        figures[f"{name}-counts"] = confusion_figure(analysis.record)
        figures[f"{name}-plane"] = plane_figure(analysis)
    return figures, entries


def confusion_figure(record: AnalysisRecord) -> Figure:
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


def _maps(analysis: Analysis, named: bool) -> tuple[Figure, Figure]:
    """The map of the first seed."""
    import pandas as pd

    try:
        rows = pd.read_parquet(analysis.tables[0]).to_dict("records")
    except OSError:
        return {}, {}
    return users_figure(rows, analysis.record["contexts"] or [], named), contexts_figure(rows)


def users_figure(rows: Sequence[JsonObject], contexts: Sequence[str], named: bool) -> Figure:
    """Users' embeddings in the plane, a colour for the context of most of their texts; without names if not `named`."""
    found = [row for row in rows if row["kind"] != "context"]
    shown = [name for name in contexts if any(row["context"] == name for row in found)] or [""]
    traces = [
        _points(
            [row for row in found if row["context"] == context], place, context, "client" if named else "",
            len(found) <= MOST_NAMES,
        )
        for place, context in enumerate(shown)
    ]  # fmt: skip
    return _plane(traces, "embeddings of users in the plane of their largest variance", len(shown) > 1)


def contexts_figure(rows: Sequence[JsonObject]) -> Figure:
    """Contexts' embeddings in the plane, in the colours of their users."""
    found = [row for row in rows if row["kind"] == "context"]
    few = len(found) <= MOST_NAMES
    traces = [_points([row], place, row["context"], "context", few) for place, row in enumerate(found)]
    return _plane(traces, "embeddings of contexts in the plane of their largest variance", False)


def _points(rows: Sequence[JsonObject], place: int, context: str, name: str, written: bool) -> Figure:
    """Points of one colour; `name` is the column of what they are called, empty if they are not named."""
    names = [escaped(str(row[name])) if name else "a user" for row in rows]
    near = [f"<br>nearest: {escaped(str(row['nearest']))}" if name and row["nearest"] else "" for row in rows]
    return {
        "type": "scatter", "mode": "markers+text" if written and name else "markers", "text": names if name else [],
        "name": escaped(context), "x": [row["x"] for row in rows], "y": [row["y"] for row in rows],
        "hovertext": [who + rest for who, rest in zip(names, near)], "hoverinfo": "text", "textposition": "top center",
        "cliponaxis": False,
        "marker": {"color": theme(PALETTE[place % len(PALETTE)]), "size": 9,
                   "symbol": [("star" if row["kind"] == "person" else SYMBOLS[place // len(PALETTE) % len(SYMBOLS)])
                              for row in rows]},
    }  # fmt: skip


def _plane(traces: list[Figure], label: str, legend: bool) -> Figure:
    bare = {"showticklabels": False, "zeroline": False}
    return {
        "data": [{**trace, "showlegend": legend} for trace in traces], "label": label, "height": 420,
        "layout": {"xaxis": axis("", **bare), "yaxis": axis("", **bare), "hovermode": "closest"},
    }  # fmt: skip
