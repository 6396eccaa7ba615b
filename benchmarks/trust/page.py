"""docs/trust.md, from what lies in runs/trust."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trust.judge import NEAR, Answer, Judgement, Oracle, alarms, judge, read_answer, read_oracle
from benchmarks.trust.oracle import FITS
from benchmarks.trust.tables import RULE, Table, left_out

from bespoke.errors import UserError
from bespoke.statistics.formatting import number, percent

ALLOWED = 5  # false alarms in 100

HEAD = """# Can its answers be trusted?

This page compares the answers of `bespoke compare`, with its defaults, with those of an oracle. A rule chooses the
tables. The oracle shares only the rows with bespoke. It consists of converged pooled, local and shrunken fits
(numpy), mixed models (statsmodels) and boosted trees (scikit-learn). One command, `python -m benchmarks.trust`, makes
this page from the folders that it leaves in `runs/trust`.
"""

QUESTIONS = """- *Sign*: if bespoke says that personalization helps, the whole interval of the oracle's gain is on the
  side of a gain. If bespoke does not say so, this interval contains zero, or the gain is below 1 %.
- *Close*: the error of the method that bespoke recommends is at most 1.1 times that of the oracle's best linear fit
  (the best on test rows).
- *Size*: the oracle's gain lies in bespoke's 95 % interval. Both use the same clients and rows, so the expected count
  is not 95 %. The count says how often the two agree.
- *False alarms*: bespoke says that personalization helps although the client column was shuffled.

The oracle's gain is the gain of its best personalized linear fit over its pooled fit. It has a 95 % bootstrap
interval over clients, which is widened for the choice among the oracle's fits (Bonferroni). bespoke recommends the
best personal method if it says "Personalization helps", and otherwise the shared model. All numbers are means over
clients, then over the seeds (three by default)."""


def write(tables: Sequence[Table], folder: Path, output: Path) -> None:
    """Write the page; tables without an oracle are an error, those that bespoke has not been asked about are said."""
    rows = []
    for table in tables:
        answer = read_answer(folder / "bespoke" / table.slug)
        oracle = read_oracle(table, folder, answer)
        if oracle is None:
            raise UserError(f"{folder} has no oracle of {table.name}; run: python -m benchmarks.trust oracle")
        rows.append((table, oracle, answer, judge(answer, oracle) if answer else None))
    parts = [HEAD, "## The count\n", *_counts(rows, folder), QUESTIONS, "## The rule\n", RULE]
    parts += ["## The tables\n\n" + _tables(rows), "Left out:\n\n" + _left_out()]
    parts += ["## The numbers\n\n" + _numbers(rows), *_earned(rows, folder), *_short(rows, folder), *_failures(rows)]
    output.write_text("\n\n".join(part.strip() for part in parts) + "\n")
    print(f"wrote {output}")


Row = tuple[Table, Oracle, Answer | None, Judgement | None]


def _counts(rows: Sequence[Row], folder: Path) -> list[str]:
    judged = [judgement for *_, judgement in rows if judgement]
    false, shuffles = alarms(folder)
    if not judged:
        return ["bespoke has not been run on these tables yet: `python -m benchmarks.trust run`."]
    lines = ["| question | count |", "|---|---|"]
    kinds = ("sign", "close", "size")
    lines += [f"| {kind} | {sum(getattr(found, kind) for found in judged)} of {len(judged)} |" for kind in kinds]
    lines.append(f"| false alarms | {len(false)} of {shuffles} (promised: at most {ALLOWED} in 100) |")
    missing = len(rows) - len(judged)
    return ["\n".join(lines), *([f"{missing} of {len(rows)} tables have no answer of bespoke."] if missing else [])]


def _tables(rows: Sequence[Row]) -> str:
    lines = ["| table | client | target | task | clients | rows | features | |", "|---|---|---|---|---|---|---|---|"]
    for table, oracle, *_ in rows:
        about = oracle.about
        lines.append(
            f"| {table.name} | {table.client} | {table.target} | {about['task']} | {about['clients']:,} | "
            f"{about['rows']:,} | {about['features']} | {table.why} |"
        )
    return "\n".join(lines)


def _left_out() -> str:
    return "\n".join(f"- {name}: {reason}" for name, reason in left_out().items())


def _numbers(rows: Sequence[Row]) -> str:
    """One row for each table: bespoke, then the oracle's fits and its gain."""
    lines = [
        f"| table | metric | baseline | recommended | sign | close | size | {' | '.join(FITS)} | oracle's gain |",
        "|---" * (8 + len(FITS)) + "|",
    ]
    for table, oracle, answer, judgement in rows:
        ours = ["–"] * 5
        if answer and judgement:
            marks = ["yes" if mark else "**no**" for mark in (judgement.sign, judgement.close, judgement.size)]
            ours = [number(answer.baseline), f"{answer.recommended} {number(answer.value)}", *marks]
        fits = [number(oracle.means[fit]) if fit in oracle.means else "–" for fit in FITS]
        lines.append(f"| {table.name} | {oracle.metric} | {' | '.join([*ours, *fits])} | {_gain(oracle)} |")
    return "\n".join(lines)


def _earned(rows: Sequence[Row], folder: Path) -> list[str]:
    """How often each default method has the best mean, is within 1 % of it, and is the only one within 1 %."""
    best, near, alone, seen = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for table, _, answer, _ in rows:
        if answer is None:
            continue
        summary = json.loads((folder / "bespoke" / table.slug / "summary.json").read_text())
        sign = 1 if summary["lower_is_better"] else -1
        values = {m["title"]: m["mean"]["value"] for m in summary["methods"] if m["mean"]["value"] is not None}
        seen.update(list(values))
        top = min(values, key=lambda title: sign * values[title])
        close = [title for title in values if abs(values[title] - values[top]) <= 0.01 * abs(values[top])]
        best[top] += 1
        near.update(close)
        alone.update(close if len(close) == 1 else [])
    if not seen:
        return []
    lines = ["| method | compared | best mean | within 1 % of the best | alone within 1 % |", "|---|---|---|---|---|"]
    lines += [
        f"| {title} | {seen[title]} | {best[title]} | {near[title]} | {alone[title]} |"
        for title in sorted(seen, key=lambda title: -best[title])
    ]
    said = "Shared or FedAvg is the baseline for the other methods; local training is a second baseline."
    return [f"## How often each default method is the best\n\n{said}\n\n" + "\n".join(lines)]


def _gain(oracle: Oracle) -> str:
    if oracle.lower_is_better:
        low, high = (percent(end) for end in oracle.relative_interval)
        return f"{oracle.personal}: {percent(oracle.relative)} % ({low} to {high})"
    low, high = (number(end, 2) for end in oracle.interval)
    return f"{oracle.personal}: {number(oracle.change, 2)} ({low} to {high})"


def _short(rows: Sequence[Row], folder: Path) -> list[str]:
    """What fell short, table by table, in bespoke's own words."""
    lines = []
    for table, oracle, answer, judgement in rows:
        error = folder / "bespoke" / f"{table.slug}.error"
        if error.exists():
            lines.append(f"- {table.name}: {error.read_text().strip()}")
        if answer is None or judgement is None:
            continue
        if not judgement.sign:
            lines.append(f"- {table.name}, sign: bespoke says “{answer.sentence}” The oracle: {_gain(oracle)}.")
        if not judgement.close:
            lines.append(
                f"- {table.name}, close: {answer.recommended} has {number(judgement.ratio)} times the error of the "
                f"best linear fit (allowed: {NEAR})."
            )
        if not judgement.size:
            low, high = (number(end) for end in answer.interval)
            unit = " %" if oracle.lower_is_better else ""
            lines.append(f"- {table.name}, size: {answer.best} {low} to {high}{unit}. The oracle: {_gain(oracle)}.")
    lines += [f"- {name}: a gain was claimed for shuffled clients." for name in alarms(folder)[0]]
    return ["## What fell short\n\n" + "\n".join(lines)] if lines else []


def _failures(rows: Sequence[Row]) -> list[str]:
    """Fits that the oracle does not have, and why."""
    lines = [
        f"- {table.name}, {fit}: {reason}."
        for table, oracle, *_ in rows
        for fit, reason in oracle.about["failed"].items()
        if not reason.startswith("statsmodels has no")
    ]
    note = "statsmodels has no mixed model for more than two classes, and none with random slopes for two classes."
    stopped = {
        f"{table.name} ({choice.rpartition(' ')[0]})": None
        for table, oracle, *_ in rows
        for choice, found in oracle.about["chosen"].items()
        if found.get("converged") is False
    }
    if stopped:
        note += (
            " Some mixed models are used although statsmodels does not report convergence for every seed: "
            f"{', '.join(stopped)}."
        )
    seconds = sum(oracle.about["seconds"] for _, oracle, *_ in rows)
    return [
        "## Where the oracle has no fit\n\n" + "\n".join([note, "", *lines]),
        f"The oracle computed for {seconds:,.0f} s on one core.",
    ]
