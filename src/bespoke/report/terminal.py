"""Prints a comparison in the terminal: a table, then the answer in words."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bespoke.report.change import change_of, in_percent, signed_change
from bespoke.report.summary import BEFORE, MethodSummary, Summary
from bespoke.statistics.analyses import in_words, read_analyses
from bespoke.statistics.formatting import (
    FINEST_PERCENT,
    MOST_PERCENT,
    UNDEFINED,
    count,
    metric_name,
    number,
    p_text,
    shorten,
    size,
    with_interval,
)
from bespoke.terminal import Terminal

MOST_GROUPS = 12  # in the terminal
_COLOURS = {"better": "green", "worse": "red", "mixed": "yellow", "unclear": "", "diverged": "red"}


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Print the table and the answer."""
    console = console or Terminal()
    console.print(render(summary, console.width))


def print_analyses(folders: Sequence[Path], names: set[str], console: Console | None = None) -> None:
    """What `bespoke analyze` found, averaged over the seeds of each method."""
    console = console or Terminal()
    titles = {
        "ood": "own rows and others' rows", "fewer-examples": "fewer examples",
        "smaller-tests": "fewer examples to be tested on",
        "examples": "so many examples", "per-client": "who chooses",
        "crossed": "own and others' models", "embeddings": "what embeddings know",
    }  # fmt: skip
    for analysis in read_analyses(list(dict.fromkeys(folders))):
        if analysis.name not in names:
            continue
        title = titles.get(analysis.name, f"{analysis.record.get('axis')} varied")
        console.print(Text.assemble((f"{analysis.label}: {title}", "bold")))
        details = Table.grid(padding=(0, 1))
        for sentence in in_words(analysis):
            details.add_row("•", Text(sentence))
        console.print(Padding(details, (0, 0, 1, 1), expand=False))


def render(summary: Summary, width: int = 100) -> RenderableType:
    """The table, what its columns mean, the answer and the concerns, for a terminal of this width."""
    first, *rest = summary.answer
    parts: list[RenderableType] = [*_fitting(summary, width), *_language(summary)]
    parts.append(Padding(Text(first, "bold"), (1, 1)))
    details = Table.grid(padding=(0, 1))
    for sentence in rest:
        details.add_row("•", Text(sentence))
    parts.append(Padding(details, (0, 1), expand=False))
    if summary.concerns:
        before = Table.grid(padding=(0, 1))
        for concern in summary.concerns:
            serious = concern.severity == "serious"
            before.add_row(Text("!" if serious else "•", "bold red" if serious else "dim"), Text(concern.text))
        parts += [Padding(Text("Before you rely on it", "bold"), (1, 1, 0, 1)), Padding(before, (0, 1), expand=False)]
    return Group(*parts)


def plain_table(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """The table's headings and rows as text, the references last, for a place that draws it itself."""
    table = _table(summary, True, " ", _FOUND + _PRICE)
    columns = [[str(column.header), *(str(cell) for cell in column.cells)] for column in table.columns]
    heads, *rows = ([text.replace("\n", " ") for text in row] for row in zip(*columns))
    return heads, rows


def _fitting(summary: Summary, width: int) -> list[Table]:
    """The first layout that fits, from roomy to dense, then two tables, because no number may be cut off."""
    for airy, beside in ((True, " "), (False, " "), (False, "\n")):
        table = _table(summary, airy, beside, _FOUND + _PRICE)
        if Terminal(width=1_000).measure(table).maximum <= width:
            return [table]
    for beside in (" ", "\n"):
        table = _table(summary, False, beside, _FOUND)
        if Terminal(width=1_000).measure(table).maximum <= width:
            break
    return [table, _table(summary, False, " ", _PRICE, head=False)]


_FOUND = ("metric", "change", "p", "hurt")
_PRICE = ("worst", "traffic", "steps")


def _table(summary: Summary, airy: bool, beside: str, columns: Sequence[str], head: bool = True) -> Table:
    """`beside` joins a number to its spread or interval: a space, or a new line where there is little room."""
    seeds = count(len(summary.seeds), "seed")
    arrow = "lower is better" if summary.lower_is_better else "higher is better"
    title = Text.assemble(
        (f" {summary.title}", "bold"), (f"  {count(summary.clients, 'client')}, {seeds}, {arrow}", "dim")
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title if head else None,
        title_justify="left",
        caption=Text(_caption(summary, columns), style="dim"),
        caption_justify="left",
        padding=(0, 1) if airy else (0, 1, 0, 0),
        pad_edge=airy,
    )
    headings = {
        "metric": f"{metric_name(summary.metric)}{beside}± sd", "change": f"change{beside}95 %", "p": "p",
        "hurt": f"hurt{beside}(raw)" if _judged(summary) else "hurt", "worst": "worst\n10 %",
        "traffic": "traffic\n/client", "steps": "steps\n/client",
    }  # fmt: skip
    shown = [name for name in columns if summary.compared or name not in ("change", "p", "hurt")]
    table.add_column("method", no_wrap=True)
    for name in shown:
        table.add_column(headings[name], justify="right", no_wrap=True)
    room = 16 if beside == " " else 10
    for method in sorted(summary.methods, key=lambda m: m.diverged):
        style = "bold" if method.label == summary.best and len(summary.methods) > 1 else ""
        cells = _cells(summary, method, beside)
        table.add_row(_title(method.title, room), *(cells[name] for name in shown), style=style)
    for reference in summary.references:
        cells = _cells(summary, reference, beside) | {"p": Text(""), "hurt": Text("")}
        table.add_row(_title(reference.title, room), *(cells[name] for name in shown), style="dim")
    return table


def _language(summary: Summary) -> list[Table]:
    """What language models are compared by besides: a column a method, a row for all sentences and for each group."""
    if not summary.language:
        return []
    caption = "exp(losses / tokens) of all sentences together; in the mean over clients each client counts the same."
    table = Table(
        box=box.SIMPLE_HEAD, title=Text(" perplexity", "bold"), title_justify="left", padding=(0, 1, 0, 0),
        caption=Text(caption, style="dim"), caption_justify="left",
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for method in summary.methods:
        table.add_column(_title(method.title, 12), justify="right")
    every, *groups = summary.language
    rows = {
        "all sentences together": {label: value.perplexity for label, value in every.values.items()},
        "mean over clients": {label: value.mean_perplexity for label, value in every.values.items()},
        "bits per character": {label: value.bits_per_character for label, value in every.values.items()},
        **{f"  {row.group or '(no group)'}": {label: value.perplexity for label, value in row.values.items()}
           for row in groups[:MOST_GROUPS]},
    }  # fmt: skip
    for name, values in rows.items():
        if any(math.isfinite(value.value) for value in values.values()):
            table.add_row(Text(shorten(name)), *(number(values[m.label].value, 4) for m in summary.methods))
    return [table]


def _title(title: str, room: int) -> Text:
    return Text(textwrap.fill(title, room))


def _judged(summary: Summary) -> bool:
    """Whether who is hurt beyond chance is known of any method."""
    return any(math.isfinite(method.against.hurt_beyond) for method in summary.compared if method.against)


def _cells(summary: Summary, method: MethodSummary, beside: str) -> dict[str, Text]:
    against, cost = method.against, method.cost
    cells = {name: Text("") for name in _FOUND + _PRICE}
    cells["metric"] = Text(f"{number(method.mean.value, 3)}{beside}± {number(method.deviation.value, 2)}")
    if method.diverged:
        cells["metric"] = Text("diverged", "red")
    if against is None:
        cells["change"] = Text("baseline" if method.label == summary.baseline else UNDEFINED, "dim")
    else:
        percents = in_percent(summary, against.relative)
        finest, cap = (FINEST_PERCENT, MOST_PERCENT) if percents else (9, math.inf)
        _, low, high = with_interval(*change_of(summary, against), 1.0, finest, cap)
        cells["change"] = Text.assemble((_short(signed_change(summary, method)), _COLOURS[against.verdict]))
        cells["change"].append(f"{beside}[{_short(low)}, {_short(high)}]", "dim")
        cells["p"] = Text(p_text(against.p_holm).removeprefix("p ").removeprefix("= ").replace("< ", "<"))
        raw = f"{100 * against.hurt.value:.0f} %"
        known = math.isfinite(against.hurt_beyond)
        cells["hurt"] = Text(f"{100 * against.hurt_beyond:.0f} %{beside}({raw})" if known else raw)
    cells["worst"] = Text(number(method.worst_tenth.value, 3))
    if cost:
        cells |= {"traffic": Text(size(cost.bytes)), "steps": Text(f"{cost.steps:,.0f}")}
    return cells


def _short(text: str) -> str:
    """A capped number as a cell shows it."""
    return text.replace("over ", ">").replace("below ", "<")


def _caption(summary: Summary, columns: Sequence[str]) -> str:
    parts = []
    if "metric" in columns:
        parts.append("sd: across clients.")
    if summary.compared and "change" in columns:
        reference = BEFORE if summary.baseline == BEFORE else summary.method(summary.baseline).title
        holm = ", Holm-corrected" if len(summary.compared) > 1 else ""
        hurt = "hurt: clients worse off beyond chance (worse off at all)." if _judged(summary) else ""
        parts.append(
            f"change: of the mean against {reference}, 95 % interval. p: paired Wilcoxon over clients{holm}. "
            f"{hurt or 'hurt: clients worse off.'}"
        )
    if summary.references and "metric" in columns:
        parts.append("Dim: for reference, not ranked.")
    if "worst" in columns:
        parts.append("worst 10 %: mean of the worst served. traffic, steps: of a client in every round.")
    return " ".join(parts)
