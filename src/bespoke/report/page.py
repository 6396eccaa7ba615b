"""Writes a comparison as one HTML page that opens offline, made only from run folders.

The page carries every client's numbers once (`columns`); a figure is a Plotly specification that refers to them:
{"$": "change finetune"} stands for a column, {"zip": [...]} for a table of columns, {"theme": "m1"} for a colour of
the theme. A string is always text. The script in figures.html.jinja fills references in.
Same folders, same bytes: no dates, no random ids.
"""

from __future__ import annotations

import base64
import errno
import gzip
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from bespoke.errors import UserError
from bespoke.records import TrialOfMethod
from bespoke.report.all_figures import AllFigures
from bespoke.report.change import change_of, signed_change
from bespoke.report.figures import (
    MOST_GROUPS,
    Drawn,
    focus_of,
    forest,
    group_order,
)
from bespoke.report.guarantee import ASIDE, all_together, guarantees
from bespoke.report.language import text_parts
from bespoke.report.report import Report
from bespoke.report.summary import BEFORE, MethodSummary, Summary
from bespoke.statistics.converged import STILL_IMPROVING
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import (
    count,
    metric_name,
    number,
    p_text,
    percent,
    signed,
    size,
    with_interval,
)
from bespoke.statistics.harm import harm
from bespoke.statistics.significance import draws_for
from bespoke.storage import write_text

if TYPE_CHECKING:
    import pandas as pd

LEARNED = {
    "SUM": "only the sum is seen",
    "EACH": "each value is seen",
    "COUNT": "the same for everyone",
    "MASKED": "masked: only the sum is seen",
    "MASKED_ROWS": "masked: only sums by cluster are seen; a cluster with one client shows it",
}  # what the server learns, in the words of a tag


def write_report(paths: Sequence[Path], output: Path, name_clients: bool = False) -> Path:
    """Write the page for a comparison folder, or for any run folders; return where it is.

    Single clients of runs under [privacy] are named only with `name_clients`.
    """
    return write_page(Report.read(paths, name_clients), output)


def write_page(report: Report, output: Path) -> Path:
    """Write the page of a report; return where it is."""
    output = Path(output)
    if output.is_dir():
        output = output / "report.html"
    page = render_report(report.study, report.table, report.summary)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, page)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # no mistake of the user's: exit code 1, and --resume
            raise
        raise UserError(f"cannot write the report to {output} ({error.strerror}); choose another place") from error
    return output


def render_report(study: RunSet, table: pd.DataFrame, summary: Summary) -> str:
    """The whole page as text."""
    parts = AllFigures.of(study, table, summary)
    listed = {str(entry["label"]): entry for entry in study.compare.get("methods", [])}
    focus = focus_of(summary)
    return environment().get_template("report.html.jinja").render(
        summary=summary,
        styles=parts.styles,
        compare=study.compare,
        listed=listed,
        focus=focus.label,
        drawn=parts.drawn,
        figures=parts.figures,
        motley=parts.motley,
        grouped=parts.grouped,
        texts=text_parts(study),
        differing=parts.differing,
        references=_references(study, summary),
        best_by=_best_by(summary),
        unconverged=[method.title for method in summary.methods if method.last_improvement > STILL_IMPROVING],
        judged=any(_beyond(method.against, "hurt") is not None for method in summary.methods),
        forest={method.label: forest(summary, method) for method in summary.compared},
        group_rows=_group_rows(summary),
        most_groups=MOST_GROUPS,
        tuning=_tuning(study, summary),
        configs=_configs(study),
        excluded={method.title: method.excluded for method in summary.methods if method.excluded},
        dropped=_dropped(study),
        guarantees=guarantees(study),
        harm=harm(study),
        folder_cost=all_together(study.compare.get("spent") or {}),
        reference="the model before" if summary.baseline == BEFORE else summary.method(summary.baseline).title,
        payload=script_json({"columns": parts.drawn.columns, "figures": parts.figures, "focus": focus.label,
                              "lookup": _lookup(parts.drawn, summary)}),
        plotly=packed_plotly(),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ tables


def _group_rows(summary: Summary) -> dict[str, list[Any]]:
    order = {name: place for place, name in enumerate(group_order(summary))}
    return {
        method.label: sorted((g for g in method.groups if g.group in order), key=lambda g: order[g.group])
        for method in summary.compared
    }


def _best_by(summary: Summary) -> list[dict[str, str]]:
    """Which method is best by which number, as text."""
    titles = {method.label: method.title for method in summary.methods}
    seeds = len(summary.seeds)
    shown: dict[str, Callable[[float], str]] = {
        "metric": number, "share": lambda value: f"{percent(100 * value)} %", "bytes": size,
        "steps": lambda value: f"{value:,.0f}",
    }  # fmt: skip
    return [
        {
            "what": line.what, "best": titles[line.label], "label": line.label, "value": shown[line.unit](line.value),
            "tied": ", ".join(titles[label] for label in line.tied),
            "seeds": "" if line.seeds is None or seeds < 2 else f"{line.seeds} of {seeds}",
        }
        for line in summary.best_by
    ]  # fmt: skip


def _references(study: RunSet, summary: Summary) -> list[tuple[MethodSummary, str]]:
    """References, such as a constant prediction, each with what it is."""
    what = {str(entry["label"]): str(entry.get("what") or "") for entry in study.compare.get("references") or []}
    return [(reference, what.get(reference.label, "")) for reference in getattr(summary, "references", [])]


def _tuning(study: RunSet, summary: Summary) -> list[dict[str, Any]]:
    """What was tried for each method, the chosen one marked."""
    tables = []
    for entry in study.compare.get("methods", []):
        tried = [trial for trial in entry.get("tuning") or [] if isinstance(trial.get("knobs"), dict)]
        if not tried:
            continue
        knobs = list(dict.fromkeys(name for trial in tried for name in trial["knobs"]))
        chosen = entry.get("chosen") or {}
        rows = [
            {
                "cells": [trial["knobs"].get(name, "") for name in knobs],
                "validation": _score(trial),
                "chosen": all(chosen.get(name) == value for name, value in trial["knobs"].items()),
            }
            for trial in tried
        ]
        tables.append({"title": entry.get("title") or entry["label"], "knobs": knobs, "rows": rows})
    return tables


def _score(trial: TrialOfMethod) -> str:
    """A trial's score, or why it has none: its state if that is recorded, else it has diverged."""
    value = trial.get("validation")
    return number(value) if value is not None and math.isfinite(value) else str(trial.get("state") or "diverged")


def _configs(study: RunSet) -> dict[str, str]:
    """One resolved experiment for each method: the seeds differ in nothing else."""
    configs: dict[str, str] = {}
    for run in study.runs:
        configs.setdefault(run.label, run.config())
    return {label: text for label, text in configs.items() if text}


def _dropped(study: RunSet) -> int:
    return sum(int(line.get("dropped") or 0) for run in study.runs for line in run.lines("rounds.jsonl"))


def _lookup(drawn: Drawn, summary: Summary) -> list[list[str]]:
    """The columns shown for a client that a reader looks up, with headings. Empty where clients have no names."""
    if not summary.names_clients:
        return []
    shown: list[list[str]] = [[name] * 2 for name in ("client", "group", "examples") if name in drawn.columns]
    if summary.baseline == BEFORE:
        shown.append([BEFORE, f"value {BEFORE}"])
    return shown + [[method.title, f"value {method.label}"] for method in summary.methods]


# ------------------------------------------------------------------------------------------------ text


def script_json(value: Any) -> Markup:
    """JSON that cannot close the script element it stands in."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def packed_plotly() -> Markup:
    """Return Plotly's script compressed, as text: the installed package has only the bundle of all its traces."""
    from plotly.offline import get_plotlyjs

    return Markup(base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode())


def _unbroken(text: str) -> Markup:
    """Keep a number and its unit, and a p and its value, on one line."""
    return Markup(re.sub(r"(?<=\d) (?=%|kB|MB|GB)|(?<=\bp) (?=[<=&])|(?<=[<=;]) (?=\d)", "\u00a0", str(escape(text))))


def _beyond(against: Any, key: str) -> float | None:
    """Share of clients hurt (helped) beyond chance, None where it is not known."""
    share = getattr(against, f"{key}_beyond", None)
    return share if share is not None and math.isfinite(share) else None


def _plain(value: Any) -> str:
    """A value of a configuration as text."""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int) and abs(value) >= 10_000:
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain(item) for item in value)
    return str(value)


def environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number, "percent": percent, "signed": signed, "p": p_text, "size": size, "plain": _plain,
        "unbroken": _unbroken, "metric": metric_name, "finite": math.isfinite,
        "plain_number": lambda value: "–" if value is None else f"{value:.3g}", "beyond": _beyond,
        "capital": lambda text: text[:1].upper() + text[1:],
    }  # fmt: skip
    environment.globals |= {
        "count": count, "change": signed_change, "change_of": change_of, "with_interval": with_interval,
        "draws_for": draws_for, "BEFORE": BEFORE, "ASIDE": ASIDE, "LEARNED": LEARNED,
    }  # fmt: skip
    return environment
