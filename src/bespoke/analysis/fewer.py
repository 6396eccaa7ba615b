"""Repeats personalization with fewer examples per client (Motley, Figure 7(c); FedPC, Tables 1 and 2).

Each client's support rows are cut to fractions or numbers, the smaller ones inside the larger. What was tuned for all
clients together stays as it was; what a client chooses for itself it chooses anew, with the models it then has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from bespoke.analysis.measured import Found, measured
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished
from bespoke.data.samples import Fewer
from bespoke.errors import UserError
from bespoke.experiment.choosing import Chosen, Floats
from bespoke.method import Method
from bespoke.statistics.analyses import Measured
from bespoke.storage import Columns


def parse_fractions(text: str, option: str = "--fewer-examples") -> tuple[float, ...]:
    """'1,0.5,0.25' as numbers, the largest first."""
    try:
        fractions = {float(part) for part in text.split(",")}
    except ValueError:
        fractions = set()
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise UserError(f"{option} {text!r}: fractions above 0 and up to 1 between commas, as in 1,0.5,0.25")
    return tuple(sorted(fractions, reverse=True))


def parse_numbers(text: str) -> tuple[int, ...]:
    """'1,5,15,all' as numbers, the smallest first; all is 0, and last."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part == "all" or (part.isascii() and part.isdigit() and 0 < int(part) < 2**31) for part in parts):
        raise UserError(f"--examples {text!r}: numbers of examples between commas, one or more each, as in 1,5,15,all")
    numbers = sorted({int(part) for part in parts if part != "all"})
    return (*numbers, *([0] if "all" in parts else []))


def check_fewer(run: Finished) -> None:
    by_support = not run.method.trains or run.method.choosing.by == "support"
    newcomers = run.stateful and run.experiment.split.kind == "cross-device"
    if not (by_support or newcomers):
        raise DoesNotApply(
            f"--fewer-examples: the models of {run.path} ({run.method.card.name}) are made in training, not from "
            "examples to adapt on; it applies to methods such as finetune"
        )


def check_examples(run: Finished) -> None:
    if type(run.method).personalize is Method.personalize:
        raise DoesNotApply(
            f"--examples: {run.path} ({run.method.card.name}) gives every client the shared model, whatever its "
            "examples"
        )


def fewer_examples(run: Finished, found: Candidates, fractions: tuple[float, ...]) -> Found:
    """(numbers, table of clients) with each fraction of the examples to adapt on."""
    cuts = {fraction: (fraction, 0, f"{100 * fraction:g} % of the examples") for fraction in fractions}
    return _with_fewer(run, run.shared(found), "fraction", cuts)


def number_of_examples(run: Finished, numbers: tuple[int, ...]) -> Found:
    """(numbers, table of clients) with at most so many examples to adapt on; 0: all."""
    cuts = {most: (1.0, most, f"{most or 'all'} examples") for most in numbers}
    return _with_fewer(run, run.shared(), "most", cuts)


def _with_fewer(
    run: Finished, shared: Floats, name: Literal["fraction", "most"], cuts: Mapping[Any, tuple[float, int, str]]
) -> Found:
    """Scores the personal models for each cut (fraction, maximum, words); `name` is the cut's key in the record."""
    method, experiment = run.method, run.experiment
    metric, lower, support = experiment.metric, experiment.lower_is_better, experiment.split.test.support
    chosen = run.chosen()
    points: list[Measured] = []
    columns = []
    for key, (fraction, most, what) in cuts.items():
        cut = Fewer.sample(support, fraction, experiment.seed, most)
        scored = run.examined(method, cut, what)
        picked = chosen
        if method.choosing.by in ("client", "support"):
            anew = run.choice(scored, method.choosing.by, run.allowed(method))
            picked = run.accepted(Chosen(chosen.default, anew.own), scored, cut)
        values = scored.query.at(picked, metric)
        sizes = cut.sizes(run.clients)
        numbers = measured(values, shared, lower)
        if name == "fraction":
            points.append({"fraction": key, "examples": float(sizes.mean()), **numbers})
        else:
            points.append({"most": key, "examples": float(sizes.mean()), **numbers})
        columns.append((np.full(len(values), key), sizes, values, shared))
    ids = [experiment.population.ids[c] for c in run.clients]
    stacked = [np.concatenate(column) for column in zip(*columns)]
    table: Columns = {"client": ids * len(cuts), **dict(zip((name, "support_examples", "value", "shared"), stacked))}
    return {"points": points}, table
