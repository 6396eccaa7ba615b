"""The chapter "Groups" of docs/results.md: claims of Group Personalized FL beside our results, from run folders."""

import json
import math
import re
from pathlib import Path

import numpy as np

from bespoke.report.group_gain import ALL, Gain, GroupRow, by_group, costs, gain, labelled, shown_metric
from bespoke.report.report import read, summarize_study
from bespoke.report.summary import Summary
from bespoke.statistics.clients import OverSeeds
from bespoke.statistics.clusters import clusters_of
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import count, metric_name, number
from results_claim import Claim, yes_or_no
from results_claim import table as claims_table
from results_converged import HEAD, NOTE, column, unsettled

TITLE = "## Groups: Group Personalized FL"
WAYS = {"fedavg": "FL", "finetune": "PerFL", "group-fl": "GroupFL", "group-perfl": "GroupPerFL"}  # as the paper says
PERSONAL = ("PerFL", "GroupPerFL")
MOST_GROUPS = 10
MOST_GAIN = 0.7  # of clients, "approximately": within two standard deviations over seeds
LEAST = 0.02  # the smallest gain of GroupPerFL over PerFL that the paper calls an improvement, Section 5.5

HEADER = f"""{TITLE}

Liu et al., *Group Personalized Federated Learning*, ICASSP 2023. The paper's video data are not public. Of its second
data set, WikiText-103, only validation and test pages are available here. The numbers therefore cannot be compared,
but the claims can: GroupPerFL is the best of the paper's four methods; group training improves the global model;
about 70 % of clients are better off with GroupPerFL than with PerFL. For every method, all rates are tuned on
validation rows over the same values. FL is `fedavg`, PerFL is `finetune`; Self-FL and Ditto are shown for comparison.
A row is a group (Tables 3 and 6). The best value of a row is bold. ± is the standard deviation over seeds.

The paper's Table 4 is reproduced by calculation (`tests/statistics/test_group_numbers.py`): 3060, 3060, 3990, 3990
models and 20, 25, 30, 35 epochs for FL, PerFL, GroupFL, GroupPerFL. The calculation assumes that the model of every
round is delivered to every client (152 rounds per epoch of 15,243 owners, 92 of 9,178), and that a client uploads
once per epoch.
"""


def groups(folders: list[Path]) -> str:
    """The whole section."""
    return "\n\n".join([HEADER.strip(), *map(section, folders)]) + "\n"


def section(folder: Path) -> str:
    about = json.loads((folder / "compare.json").read_text())
    study, table = read([folder])
    summary = summarize_study(study, table)
    metric, lower = shown_metric(study, summary)
    rows = by_group(study, table, summary)
    titles = {m.label: WAYS.get(m.label, m.title) for m in summary.methods}
    command = re.sub(r" --(out|jobs)[ =]\S+", "", about["command"])
    shown = [*rows[:-1][:MOST_GROUPS], rows[-1]]
    improving, ways = column(folder), {labelled(study, way): name for way, name in WAYS.items()}
    left_out = len(rows) - len(shown)
    pooled = "of all sequences of a group together" if metric == "perplexity" else "the mean over a group's clients"
    lines = [
        f"### {about['title']}",
        "",
        f"{metric_name(metric)}, {pooled}; {summary.clients:,} clients, {count(len(summary.seeds), 'seed')}, "
        f"{about['model']['name']} with {about['model']['parameters']:,} parameters."
        + (f" The {MOST_GROUPS} largest of {len(rows) - 1} groups." if left_out else "")
        + (" The data have no groups: all clients are one row." if len(rows) == 1 else ""),
        f"Command: `{command}`",
        "",
        f"| group | clients | {' | '.join(titles.values())} |",
        f"| --- | ---: |{' ---: |' * len(titles)}",
        *(_row(row, list(titles), lower) for row in shown),
        f"| {HEAD} | | {' | '.join(improving.get(label, '–') for label in titles)} |",
        "",
        NOTE,
        "",
        *_claims(study, table, summary, rows, lower, unsettled(folder, ways)),
        *_found(study, table, titles),
        *_costs(study, titles),
    ]
    return "\n".join(lines)


def _row(row: GroupRow, labels: list[str], lower: bool) -> str:
    best = row.best(lower)
    cells = [_cell(row.values[label], row.group == ALL, label == best) for label in labels]
    return f"| {row.group} | {row.clients:,} | {' | '.join(cells)} |"


def _cell(value: OverSeeds, whole: bool, best: bool) -> str:
    text = number(value.value)
    if whole and math.isfinite(value.spread):
        text += f" ± {number(value.spread, 2)}"
    return f"**{text}**" if best else text


def _claims(
    study: RunSet, table: object, summary: Summary, rows: list[GroupRow], lower: bool, unjudged: dict[str, str]
) -> list[str]:
    """The paper's claims about its four methods, and whether they hold here."""
    known = {way: labelled(study, way) for way in WAYS}
    if not all(known.values()):
        return []
    whole = rows[-1].values
    fl, perfl, group, both = (whole[known[way]] for way in WAYS)
    four = [known[way] for way in WAYS]
    sign = 1 if lower else -1
    first = [row for row in rows[:-1] if min(four, key=lambda k: sign * row.values[k].value) == known["group-perfl"]]
    seeds = len(summary.seeds)

    def wins(mine: OverSeeds, *others: OverSeeds) -> int:
        return sum(
            all(sign * a < sign * b for b in each) for a, *each in zip(mine.by_seed, *(o.by_seed for o in others))
        )

    best, better, further = wins(both, fl, perfl, group), wins(group, fl), wins(both, perfl)
    among = f", {len(first)} of {len(rows) - 1} groups" if len(rows) > 1 else ""
    of = f"of {seeds} seeds"
    claims = [
        Claim(
            "GroupPerFL is the best of the four", tuple(WAYS.values()), "6 of 7 and 5 of 5 groups",
            f"{best} {of}{among}", yes_or_no(best == seeds),
        ),
        Claim(
            "GroupFL improves on FL", ("FL", "GroupFL"), "in all groups", f"{_change(group, fl)}, {better} {of}",
            yes_or_no(better == seeds),
        ),
        Claim(
            "GroupPerFL improves on PerFL", PERSONAL, "mostly by 5 to 20 %; by 2 to 12 %",
            f"{_change(both, perfl)}, {further} {of}",
            yes_or_no(further == seeds, abs(both.value / perfl.value - 1) >= LEAST),
        ),
    ]  # fmt: skip
    found = gain(study, table, summary)  # type: ignore[arg-type]
    if found is not None:
        spread = f" ± {100 * found.improved.spread:.1f}" if math.isfinite(found.improved.spread) else ""
        here = f"{100 * found.improved.value:.1f}{spread} %"
        near = found.improved.value + 2 * np.nan_to_num(found.improved.spread) >= MOST_GAIN
        claims.append(
            Claim("Clients better off with GroupPerFL than with PerFL", PERSONAL, "about 70 %", here, yes_or_no(near))
        )
    return [*claims_table(claims, unjudged), "", *([_histogram(found)] if found is not None else [])]


def _change(value: OverSeeds, base: OverSeeds) -> str:
    return f"{100 * (value.value - base.value) / abs(base.value):+.2f} %".replace("-", "−")


def _histogram(found: Gain) -> str:
    """Figure 1 in words: the distribution of the clients' relative changes."""
    low, q1, middle, q3, high = np.percentile(found.of(), [10, 25, 50, 75, 90])
    return (
        f"Figure 1, relative change of {metric_name(found.metric)} per client, GroupPerFL against PerFL: median "
        f"{middle:+.2f} %, half of the clients between {q1:+.2f} and {q3:+.2f} %, four fifths between {low:+.2f} and "
        f"{high:+.2f} %. The report draws it."
    ).replace("-", "−")


def _found(study: RunSet, table: object, titles: dict[str, str]) -> list[str]:
    """Groups that were found and trained: their number, and their agreement with known groups."""
    trained = [entry["label"] for entry in study.compare["methods"] if entry["name"] in ("group-fl", "hypcluster")]
    lines = []
    for one in clusters_of(table):  # type: ignore[arg-type]
        if one.label not in trained:
            continue
        index = "" if one.agreement is None else f"; adjusted Rand index {number(one.agreement.value, 2)}"
        lines.append(
            f"- {titles[one.label]}: {one.used.value:.3g} groups found, the largest with "
            f"{100 * one.largest.value:.0f} % of the clients{index}."
        )
    return ["", "Groups found:", "", *lines] if lines else []


def _costs(study: RunSet, titles: dict[str, str]) -> list[str]:
    """Table 4 for these runs."""
    found = costs(study)
    if not found:
        return []
    rows = {
        "models, if each is delivered to all clients (as the paper counts)": [
            f"{found[k].delivered:,.0f}" for k in titles
        ],
        "models, if sent to participants only": [f"{found[k].sent:,.0f}" for k in titles],
        "local epochs": [f"{e:,.0f}" if (e := found[k].epochs) is not None else "steps" for k in titles],
    }
    return [
        "",
        "What a client pays in training (Table 4):",
        "",
        f"| | {' | '.join(titles.values())} |",
        f"| --- |{' ---: |' * len(titles)}",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()),
    ]
