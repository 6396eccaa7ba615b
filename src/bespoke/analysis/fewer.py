"""What if clients had fewer examples to personalize with? Motley's Figure 7(c).

Each client's support rows are cut to fractions, the smaller ones inside the larger. What was tuned for all clients
together stays as it was; what a client chooses for itself it chooses anew, with the models it then has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bespoke.analysis.finished import Candidates, DoesNotApply, Finished
from bespoke.analysis.measured import measured
from bespoke.data.samples import Fewer
from bespoke.errors import UserError
from bespoke.selection import Choice


def parse_fractions(text: str) -> tuple[float, ...]:
    """'1,0.5,0.25' as numbers, the largest first."""
    try:
        fractions = {float(part) for part in text.split(",")}
    except ValueError:
        fractions = set()
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise UserError(f"--fewer-examples {text!r}: fractions above 0 and up to 1 between commas, as in 1,0.5,0.25")
    return tuple(sorted(fractions, reverse=True))


def check_fewer(run: Finished) -> None:
    by_support = not run.method.trains or run.method.choose == "support"
    newcomers = run.stateful and run.experiment.split.kind == "cross-device"
    if not (by_support or newcomers):
        raise DoesNotApply(
            f"--fewer-examples: the models of {run.path} ({run.method.name}) are made in training, not from examples "
            "to adapt on; it applies to methods such as finetune"
        )


def fewer_examples(
    run: Finished, found: Candidates, fractions: tuple[float, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(numbers, table of clients) with each fraction of the examples to adapt on."""
    method, experiment = run.method, run.experiment
    metric, lower, support = experiment.metric, experiment.lower_is_better, experiment.split.test.support
    shared, chosen = run.shared(found), run.chosen()
    points, columns = [], []
    for fraction in fractions:
        cut = Fewer.sample(support, fraction, experiment.seed)
        scored = run.examined(method, cut, f"{100 * fraction:g} % of the examples")
        picked = chosen
        if method.choose in ("client", "support"):
            anew = run.choice(scored, method.choose, run.allowed(method))
            picked = run.accepted(Choice(chosen.default, anew.own), scored, cut)
        values = scored.query.at(picked, metric)
        sizes = cut.sizes(run.clients)
        points.append({"fraction": fraction, "examples": float(sizes.mean()), **measured(values, shared, lower)})
        columns.append((np.full(len(values), fraction), sizes, values, shared))
    ids = [experiment.population.ids[c] for c in run.clients]
    stacked = [np.concatenate(column) for column in zip(*columns)]
    table = {"client": ids * len(fractions), **dict(zip(("fraction", "support_examples", "value", "shared"), stacked))}
    return {"points": points}, table
