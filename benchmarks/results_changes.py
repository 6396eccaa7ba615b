"""The effect of changing preferences and late users on each method (benchmarks/fedembed/changes.py)."""

from pathlib import Path

from bespoke.report.figure_page import Table
from fedembed.changes import BACK, COMMAND, Changes
from results_converged import column, sentence


def markdown(table: Table) -> list[str]:
    head, *rows = table
    rule = "| --- |" + " ---: |" * (len(head) - 1)
    return [f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def section(folder: Path) -> str:
    found = Changes(folder)
    options, about = found.options, found.about
    rounds = about["methods"][0]["stages"][-1]["rounds"]
    lines = [
        "## Preferences that change, users who come late (FedEmbed's future work)",
        "",
        f"{options['number']} users of MNIST preferences, {about['cohort']} a round, {rounds} rounds, "
        f"{len(about['seeds'])} seeds. After round {options['change_after']}, {options['change']:.0%} of the users who "
        f"like one of the first {10 - options['late']} digits change to another of them, with other images. After "
        f"round {options['late_after']} the users of the last {options['late']} digits join. The numbers are the mean "
        "accuracy over users on rows that nobody trains on. Rates are those of the MNIST experiment.",
        f"Command: `{COMMAND}` (with its figures: changes.html)",
        "",
        f'When preferences change ("back": accuracy is within {BACK} of its value before the change):',
        "",
        *markdown(found.change_table()),
        "",
        "When users come late:",
        "",
        *markdown(found.late_table()),
        "",
        sentence(column(folder)),
    ]
    return "\n".join(lines)
