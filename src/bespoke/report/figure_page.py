"""A page of figures and tables in the style of the report, for studies other than one comparison.

Figures are Plotly specifications as in figures.py, complete in themselves: they may name colours of the
theme, and have no columns of clients to refer to. Same input, same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.report.figures import Figure, theme
from bespoke.report.page import environment, packed_plotly, script_json
from bespoke.storage import write_text

Table = list[list[str]]  # the first row is the head


@dataclass(frozen=True)
class Section:
    """What belongs together: figures as (name, specification, caption), tables, remarks, and how to make it again."""

    title: str
    lead: str = ""
    figures: Sequence[tuple[str, Figure, str]] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default_factory=tuple)
    command: str = ""


def line(name: str, x: Sequence[Any], y: Sequence[Any], colour: str, dash: str = "solid", **more: Any) -> Figure:
    """A line with dots at its points."""
    return {
        "type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y),
        "line": {"color": theme(colour), "width": 2.2, "dash": dash}, "marker": {"size": 6}, **more,
    }  # fmt: skip


def plot(traces: Sequence[Figure], x: str, y: str, label: str, height: int = 360, **layout: Any) -> Figure:
    """A specification of these traces; more of `layout` goes into Plotly's, `xaxis` and `yaxis` into its axes."""
    axes = {
        axis: {"title": {"text": text}, "automargin": True, "zeroline": False, **layout.pop(axis, {})}
        for axis, text in (("xaxis", x), ("yaxis", y))
    }
    return {
        "data": list(traces),
        "label": label,
        "height": height,
        "layout": {**axes, "hovermode": "closest", **layout},
    }


def write_study(path: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write the page; returns where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render_study(title, lead, sections))
    return path


def render_study(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The whole page as text."""
    figures = {name: figure for section in sections for name, figure, _ in section.figures}
    payload = {"columns": {"client": []}, "figures": figures, "focus": "", "lookup": []}
    return environment().get_template("study.html.jinja").render(
        title=title, lead=lead, sections=sections, payload=script_json(payload), plotly=packed_plotly()
    )  # fmt: skip
