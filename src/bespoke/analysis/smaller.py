"""Repeats the test with fewer query rows per client: the same models, measured with more noise (Motley, Figure 3(d)).

The personal models are those of the run. Each client's query rows are cut to fractions, the smaller ones inside the
larger, and a client's change is that between its own and the shared model on the same rows.
"""

from __future__ import annotations

import numpy as np

from bespoke.analysis.measured import Found, measured
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished
from bespoke.data.samples import FewerTests
from bespoke.experiment.choosing import Chosen, QueryScores
from bespoke.statistics.analyses import Measured


def check_smaller(run: Finished) -> None:
    if not run.method.card.after or len(run.method.candidates()) < 2:
        raise DoesNotApply(
            f"--smaller-tests: {run.path} ({run.method.card.name}) does not begin with a shared model whose change "
            "could be seen; it applies to methods such as finetune"
        )


def smaller_tests(run: Finished, found: Candidates, fractions: tuple[float, ...]) -> Found:
    """(numbers, table of clients) with each fraction of the rows to be tested on."""
    experiment, clients = run.experiment, run.clients
    metric, lower, query = experiment.metric, experiment.lower_is_better, experiment.split.test.query
    cuts = {fraction: FewerTests.sample(query, fraction, experiment.seed) for fraction in fractions}
    run.progress.begin(f"{run.name}: smaller tests", len(clients))
    parts = {f"{fraction:g}": cut for fraction, cut in cuts.items()}
    sums = run.scores(run.method, clients, experiment.split.test.support, dict(parts))
    chosen, columns = run.chosen(), []
    points: list[Measured] = []
    for fraction, cut in cuts.items():
        scores = QueryScores(clients, sums[f"{fraction:g}"])
        values, shared = (scores.at(choice, metric) for choice in (chosen, Chosen(0, {})))
        sizes = cut.sizes(clients)
        points.append({"fraction": fraction, "examples": float(sizes.mean()), **measured(values, shared, lower)})
        columns.append((np.full(len(values), fraction), sizes, values, shared))
    stacked = [np.concatenate(column) for column in zip(*columns)]
    ids = [experiment.population.ids[c] for c in clients]
    names = ("fraction", "query_examples", "value", "shared")
    return {"points": points}, {"client": ids * len(cuts), **dict(zip(names, stacked))}
