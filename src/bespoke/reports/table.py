"""The comparison as a table for the terminal, followed by the answer in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bespoke.metrics.analyses import read_analyses, told
from bespoke.metrics.answer import change_of, in_percent, signed_change
from bespoke.metrics.summary import BEFORE, MethodSummary, Summary
from bespoke.metrics.text import (
    FINEST_PERCENT,
    UNDEFINED,
    count,
    metric_name,
    number,
    p_text,
    size,
    with_interval,
)

_COLOURS = {"better": "green", "worse": "red", "mixed": "yellow", "unclear": ""}


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print the table and the answer."""
    console = console or Console()
    console.print(render(summary, console.width))


def print_analyses(folders: Sequence[Path], names: set[str], console: Console | None = None) -> None:
    """What `bespoke analyze` found, averaged over the seeds of each method."""
    console = console or Console()
    titles = {
        "ood": "own rows and others' rows", "fewer-examples": "fewer examples", "per-client": "who chooses",
        "embeddings": "what embeddings know",
    }  # fmt: skip
    for analysis in read_analyses(list(dict.fromkeys(folders))):
        if analysis.name not in names:
            continue
        title = titles.get(analysis.name, f"{analysis.record.get('axis')} varied")
        console.print(Text.assemble((f"{analysis.label}: {title}", "bold")))
        details = Table.grid(padding=(0, 1))
        for sentence in told(analysis):
            details.add_row("•", Text(sentence))
        console.print(Padding(details, (0, 0, 1, 1), expand=False))


def render(summary: Summary, width: int = 100) -> RenderableType:
    """The table, what its columns mean, and the answer, for a terminal of this width."""
    # From roomy to dense, the first that fits: nothing is cut off that could be put below.
    for airy, beside in ((True, " "), (False, " "), (False, "\n")):
        table = _table(summary, airy, beside)
        if Console(width=1_000).measure(table).maximum <= width:
            break
    first, *rest = summary.answer
    details = Table.grid(padding=(0, 1))
    for sentence in rest:
        details.add_row("•", Text(sentence))
    return Group(table, Padding(Text(first, "bold"), (1, 1)), Padding(details, (0, 1), expand=False))


def _table(summary: Summary, airy: bool, beside: str) -> Table:
    """`beside` joins a number to its spread or interval: a space, or a new line where there is little room."""
    seeds = count(len(summary.seeds), "seed")
    arrow = "lower is better" if summary.lower_is_better else "higher is better"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text.assemble(
            (f" {summary.title}", "bold"), (f"  {count(summary.clients, 'client')}, {seeds}, {arrow}", "dim")
        ),
        title_justify="left",
        caption=Text(_caption(summary), style="dim"),
        caption_justify="left",
        padding=(0, 1) if airy else (0, 1, 0, 0),
        pad_edge=airy,
    )
    table.add_column("method", no_wrap=True)
    table.add_column(f"{metric_name(summary.metric)}{beside}± sd", justify="right", no_wrap=True)
    if summary.compared:
        table.add_column(f"change{beside}95 %", justify="right", no_wrap=True)
        table.add_column("p", justify="right", no_wrap=True)
        table.add_column("hurt", justify="right", no_wrap=True)
    table.add_column("worst\n10 %", justify="right", no_wrap=True)
    table.add_column("traffic\n/client", justify="right", no_wrap=True)
    table.add_column("steps\n/client", justify="right", no_wrap=True)
    for method in summary.methods:
        style = "bold" if method.label == summary.best and len(summary.methods) > 1 else ""
        table.add_row(*_row(summary, method, beside), style=style)
    return table


def _row(summary: Summary, method: MethodSummary, beside: str) -> list[Text]:
    against, cost = method.against, method.cost
    cells = [
        Text(textwrap.fill(method.title, 16 if beside == " " else 10)),
        Text(f"{number(method.mean.value, 3)}{beside}± {number(method.deviation.value, 2)}"),
    ]
    if summary.compared and against is None:
        cells += [Text("baseline" if method.label == summary.baseline else UNDEFINED, "dim"), Text(""), Text("")]
    elif against:
        finest = FINEST_PERCENT if in_percent(summary, against.relative) else 9
        _, low, high = with_interval(*change_of(summary, against), most=finest)
        change = Text.assemble((signed_change(summary, method), _COLOURS[against.verdict]))
        change.append(f"{beside}[{low}, {high}]", "dim")
        cells += [
            change,
            Text(p_text(against.p_holm).removeprefix("p ").removeprefix("= ").replace("< ", "<")),
            Text(f"{100 * against.hurt.value:.0f} %"),
        ]
    cells.append(Text(number(method.worst_tenth.value, 3)))
    cells += [Text(size(cost.bytes)), Text(f"{cost.steps:,.0f}")] if cost else [Text(UNDEFINED)] * 2
    return cells


def _caption(summary: Summary) -> str:
    parts = ["sd: across clients."]
    if summary.compared:
        reference = BEFORE if summary.baseline == BEFORE else summary.method(summary.baseline).title
        holm = ", Holm-corrected" if len(summary.compared) > 1 else ""
        parts.append(
            f"change: of the mean against {reference}, 95 % interval. p: paired Wilcoxon over clients{holm}. "
            "hurt: clients worse off."
        )
    parts.append("worst 10 %: mean of the worst served. traffic, steps: of a client in every round.")
    return " ".join(parts)
