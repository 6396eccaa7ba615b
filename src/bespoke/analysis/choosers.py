"""Compares candidates chosen by all clients together with candidates chosen by each client (Motley, Figures 8, 10).

The same candidates, chosen in both ways on validation rows and read on query rows. With few validation rows of its own
a client chooses what fits these few. Between the two lie clients with about as many examples, which choose together.
"""

from __future__ import annotations

import numpy as np

from bespoke.analysis.measured import Found, measured
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished
from bespoke.statistics.analyses import AnalysisNumbers, ChoiceDifference, Measured
from bespoke.statistics.candidates import axes_of
from bespoke.statistics.significance import wilcoxon
from bespoke.storage import Columns


def check_choosers(run: Finished) -> None:
    if not axes_of(run.method.candidates()):
        raise DoesNotApply(
            f"--per-client: {run.path} ({run.method.card.name}) has no settings to choose among; it applies to methods "
            "such as finetune"
        )
    if not run.experiment.split.test.validation.sizes(run.clients).any():
        raise DoesNotApply(
            f"--per-client: the tested clients of {run.path} have no validation rows of their own to choose on; set "
            "some aside with own_validation in [split]"
        )


def choosers(run: Finished, found: Candidates) -> Found:
    """(numbers, table of clients) of a common choice and of each client's own."""
    method, experiment = run.method, run.experiment
    metric, lower, allowed = experiment.metric, experiment.lower_is_better, run.allowed(method)
    shared = run.shared(found)
    picked = {by: run.choice(found, by, allowed) for by in ("global", "client", "size")}
    values = {by: found.query.at(choice, metric) for by, choice in picked.items()}
    gain = (values["global"] - values["client"]) * (1 if lower else -1)
    known = gain[np.isfinite(gain)]
    numbers: dict[str, Measured] = {
        by: {
            **measured(values[by], shared, lower),
            "candidate": found.names[choice.default],
            "distinct": len(set(choice.of(run.clients).tolist())),
        }
        for by, choice in picked.items()
    }
    difference: ChoiceDifference = {
        "mean": float((values["client"] - values["global"])[np.isfinite(gain)].mean()) if len(known) else None,
        "better": float((known > 0).mean()) if len(known) else None,
        "worse": float((known < 0).mean()) if len(known) else None,
        "p": wilcoxon(gain),
    }
    record: AnalysisNumbers = {
        "global": numbers["global"], "client": numbers["client"], "size": numbers["size"], "difference": difference,
    }  # fmt: skip
    split = experiment.split.test
    names = np.array(found.names)
    table: Columns = {
        "client": [experiment.population.ids[c] for c in run.clients],
        "support_examples": split.support.sizes(run.clients),
        "validation_examples": split.validation.sizes(run.clients),
        "shared": shared, **{f"{by}_value": value for by, value in values.items()},
        **{f"{by}_candidate": names[choice.of(run.clients)].tolist() for by, choice in picked.items()},
    }  # fmt: skip
    return record, table
