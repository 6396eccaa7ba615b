"""Prints the trials of a tuning in the terminal: the best first, pruned and failed ones last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bespoke.records import PrivacyCost, TrialRecord, TuneRecord
from bespoke.report.guarantee import ASIDE, epsilon_text
from bespoke.terminal import Terminal

SHOWN = 15  # rows; all of them are in trials.parquet


def print_trials(about: TuneRecord, folder: Path, console: Console | None = None) -> None:
    """What was tried, what was best, and where it lies."""
    console = console or Terminal()
    sign = 1 if about["lower_is_better"] else -1
    unusable = [t for t in about["trials"] if t["validation"] is None]
    usable = (t for t in about["trials"] if t["validation"] is not None)
    ranked = sorted(usable, key=lambda t: sign * (t["validation"] or 0.0))
    better = "lower" if about["lower_is_better"] else "higher"
    table = Table(
        box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left",
        title=f"[bold] {escape(about['title'])}[/bold][dim]  {len(about['trials'])} settings, {better} is better[/dim]",
        caption=_caption(about, ranked, unusable),
    )  # fmt: skip
    knobs = list(about["best"]["setting"])
    for column in ("trial", f"validation {about['metric']}"):
        table.add_column(escape(column), justify="right")
    heads = {knob.partition(".")[0] for knob in knobs}
    for knob in knobs:  # what all have in common is not worth its room
        short = knob.partition(".")[2] if len(heads) == 1 else knob
        table.add_column(escape(short), justify="right", overflow="fold")
    for trial in [*ranked, *unusable][:SHOWN]:
        value = trial["state"] if trial["validation"] is None else f"{trial['validation']:.5g}"
        style = "bold green" if trial["number"] == about["best"]["number"] else ""
        cells = [escape(_plain(trial["setting"][knob])) for knob in knobs]
        table.add_row(str(trial["number"]), value, *cells, style=style)
    console.print(table)
    chosen = ", ".join(f"{knob} = {_plain(value)}" for knob, value in about["best"]["setting"].items())
    value = f"{about['best']['validation']:.5g}"
    for line in (
        f"Best: {chosen} (validation {about['metric']} {value})",
        f"Run it: bespoke run {folder / 'best.toml'}",
        f"All trials: {folder / 'trials.parquet'}",
        *_cost(about.get("privacy")),
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cost(spent: PrivacyCost | None) -> list[str]:
    """Under privacy: what it costs to have looked at the same clients in every trial."""
    if not spent:
        return []
    one, all_trials = epsilon_text(spent["one"]), epsilon_text(spent["epsilon"])
    return [
        f"Privacy: a trial has epsilon {one} at most, all {spent['runs']} trials together {all_trials}, at delta "
        f"{spent['delta']:.2g}. {ASIDE}"
    ]


def _caption(about: TuneRecord, ranked: list[TrialRecord], unusable: list[TrialRecord]) -> str:
    seeds = len(about["seeds"])
    parts = [f"mean over clients{f' and {seeds} seeds' if seeds > 1 else ''}"]
    more = len(ranked) + len(unusable) - SHOWN
    if more > 0:
        parts.append(f"{more} more in trials.parquet")
    for state in ("pruned", "diverged"):
        count = sum(trial["state"] == state for trial in unusable)
        if count:
            parts.append(f"{count} {state}")
    return "; ".join(parts)


def _plain(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
