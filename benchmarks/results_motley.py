"""The part of docs/results.md in the form of Motley's Tables 4 to 7: from comparison folders on disk.

Every folder must come from a comparison file with an [expected] table.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.report.checks import concerns
from bespoke.report.motley_tables import TableLine, motley_lines
from bespoke.report.report import read, summarize_study
from bespoke.report.summary import Summary
from bespoke.statistics.clusters import Clusters, clusters_of
from bespoke.statistics.formatting import count
from results_curves import curves
from results_motley_claims import Found, claims

HEADER = """## Motley

The tables have the form of the paper's Tables 4 to 7. Hyper-parameters are chosen on validation rows of the first
seed; results are computed on query rows. Every number is the mean over seeds, ± its standard deviation over seeds.
std is the standard deviation across clients (the paper's fairness metric). A client is hurt if it is worse off than
with the fedavg run of the same seed.
"""


def chapter(folders: list[Path]) -> str:
    return "\n\n".join([HEADER.strip(), *map(section, folders)])


def section(folder: Path) -> str:
    """One comparison as a table of paper against ours."""
    about = json.loads((folder / "compare.json").read_text())
    expected = about["expected"]
    if not expected:
        raise UserError(f"{folder} has no expected numbers: its comparison file needs an [expected] table")
    study, table = read([folder])
    summary = summarize_study(study, table)
    found = concerns(study, summary, table)
    command = re.sub(r" --(out|jobs)[ =]\S+", "", about["command"])  # the output folder is not part of the experiment
    command = re.sub(r"\S*/(?=benchmarks/)", "", command)
    lines = [
        f"### {about['title']}",
        "",
        f"Source: {expected['source']}. {summary.clients} clients, {count(len(summary.seeds), 'seed')}, "
        f"{about['metric']}, {about['model']['name']} with {about['model']['parameters']:,} parameters{cohort(about)}.",
        f"Command: `{command}`",
        "",
        markdown(motley_lines(study, table, summary, found)),
    ]
    lines += [f"\n{note}" for note in expected.get("differs", [])]
    lines += curves(study, summary)
    lines += ["", *claims(Found(study, table, summary))]
    lines += acceptance(summary)
    lines += clusters(clusters_of(table))
    if found:
        lines += ["", "Practical concerns that the report found:", "", *(f"- {concern.text}" for concern in found)]
    return "\n".join(lines)


def cohort(about: dict[str, Any]) -> str:
    """The number of clients per round, and the number of rounds."""
    rounds = {sum(stage.get("rounds") or 0 for stage in method["stages"]) for method in about["methods"]}
    return f"; {about['cohort']:,} clients in each of up to {max(rounds):,} rounds" if about.get("cohort") else ""


def acceptance(summary: Summary) -> list[str]:
    """The effect of acceptance rules for personal models, for every method."""
    if not summary.accepted:
        return []
    rows = [
        f"| {summary.method(rule.label).title} | {rule.rule}"
        f"{f' (≥ {rule.min_examples:.0f})' if rule.min_examples is not None else ''} | {100 * rule.taken.value:.1f} % "
        f"| {100 * rule.plain_hurt.value:.1f} % | {100 * rule.hurt.value:.1f} % "
        f"| {rule.plain_mean.value:.5f} | {rule.mean.value:.5f} | {rule.verdict} |"
        for rule in summary.accepted
    ]
    return [
        "",
        "Acceptance: a client keeps the baseline's model unless a rule from validation data allows its own model.",
        "",
        "| method | a client takes its model if it | clients that do | hurt without | hurt with "
        "| mean without | mean with | verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
        *rows,
    ]


def clusters(found: list[Clusters]) -> list[str]:
    """How clusters match known groups (Figure 6d), if there are any."""
    lines = []
    for one in found:
        if one.agreement is None:
            continue
        index = ", ".join(f"{value:.2f}" for value in one.agreement.by_seed)
        lines += [
            "",
            f"{one.label}: clusters against known groups, adjusted Rand index by seed: {index}. Seed {one.seed}:",
            "",
            f"| group | {' | '.join(one.names)} |",
            f"| --- |{' ---: |' * len(one.names)}",
            *(f"| {group} | {' | '.join(map(str, row))} |" for group, row in zip(one.groups, one.counts)),
        ]
    return lines


def markdown(lines: Sequence[TableLine]) -> str:
    """The table for a page of documentation."""
    rows = ["| algorithm | metric | paper | ours |", "| --- | --- | ---: | ---: |"]
    before = ""
    for line in lines:
        algorithm, before = ("" if line.algorithm == before else line.algorithm), line.algorithm
        cells = [algorithm, line.what, line.published(), line.shown()]
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows)
