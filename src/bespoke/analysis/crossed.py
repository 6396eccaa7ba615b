"""Tests whether personal models are personal: each client's query rows under other clients' models and wrong contexts.

If another user's model does as well as the client's own, nothing personal was learned; if a wrong context does as well
as the right one, nothing of contexts. Others are told apart by whether they have a context in common with the client,
wrong contexts by whether the client has them in other rows: where every client has one context, another context means
a combination of user and context that nobody trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bespoke.analysis.measured import Found, mean
from bespoke.analysis.reopened import DoesNotApply, Finished
from bespoke.experiment.choosing import Floats, QueryScores
from bespoke.federation.batches import WHOLE, Orders
from bespoke.method import Method
from bespoke.models.prefix import PrefixLM
from bespoke.statistics.analyses import AnalysisNumbers, CrossedColumn
from bespoke.statistics.significance import bootstrap_means, percentile_interval
from bespoke.tensors import Params

FEW = 3  # other clients, and wrong contexts, of each kind
COLUMNS = ("own", "other", "stranger", "anybody", "wrong", "foreign", "none")


def check_crossed(run: Finished) -> None:
    kind = type(run.method)
    if kind.personalize is Method.personalize:
        raise DoesNotApply(f"--crossed: {run.path} ({run.method.card.name}) gives every client the shared model")
    if kind.predict is not Method.predict or kind.outputs is not Method.outputs:
        raise DoesNotApply(
            f"--crossed: the models of {run.path} ({run.method.card.name}) are no parameters of one network"
        )
    if len(run.clients) < 2:
        raise DoesNotApply(f"--crossed: {run.path} has one tested client: there is no other's model to hold against")


def crossed(run: Finished) -> Found:
    """(numbers, table of clients): the metric of own, others' and the shared model, right and wrong contexts."""
    experiment, clients = run.experiment, [int(client) for client in run.clients]
    orders = Orders.draw(experiment.split.test.query, run.clients, WHOLE, None)
    rows = [orders.sliced(place).rows() for place in range(len(clients))]
    contexts = _contexts(run)
    known = {place: set(contexts[place]) for place in range(len(clients))}
    tests: dict[int, list[tuple[str, int]]] = {place: [] for place in range(len(clients))}  # whose model, whose rows
    for place in tests:
        after = [(place + step) % len(clients) for step in range(1, len(clients))]
        common = [other for other in after if not known[place] or known[place] & known[other]]
        for name, some in (("other", common), ("stranger", [other for other in after if other not in common])):
            for other in spread(some):
                tests[other].append((name, place))
    found: dict[str, list[list[float]]] = {name: [[] for _ in clients] for name in COLUMNS}

    def record_value(name: str, place: int, task: Any, model: Params, batch: Params) -> None:
        found[name][place].append(_value(task, model, batch, experiment.metric))

    task: Any = experiment.task
    many = len(experiment.population.about.get("contexts", ()))
    run.progress.begin(f"{run.name}: models of others", len(clients))
    for place, client in enumerate(clients):
        method_task, shared, own = run.personal(client)
        record_value("own", place, method_task, own, rows[place])
        record_value("anybody", place, method_task, shared, rows[place])
        for name, owner in tests[place]:
            record_value(name, owner, method_task, own, rows[owner])
        if known[place]:
            for name, batch in _wrong(rows[place], sorted(known[place]), many):
                record_value(name, place, method_task, own, batch)
        if isinstance(task, PrefixLM):
            bare = {"prefix": torch.zeros(1, 0, task.network.width)}
            record_value("none", place, task, bare, rows[place])
        run.done(1)
    values = {name: np.array([np.mean(each) if each else np.nan for each in lists]) for name, lists in found.items()}
    values = {name: column for name, column in values.items() if np.isfinite(column).any()}
    record: AnalysisNumbers = {"columns": {name: compared(column, values["own"]) for name, column in values.items()}}
    return record, {"client": [experiment.population.ids[client] for client in clients], **values}


def compared(values: Floats, own: Floats) -> CrossedColumn:
    """The mean over clients, and the mean difference to their own models with its interval over clients."""
    both = np.isfinite(values) & np.isfinite(own)
    differences = (values - own)[both]
    found: CrossedColumn = {"clients": int(both.sum()), "mean": mean(values), "difference": mean(differences)}
    if both.sum() < 2 or not differences.any():
        return found
    between = percentile_interval(bootstrap_means(differences[None, None])[:, 0])
    return {**found, "low": between.low, "high": between.high}


def spread(options: Sequence[int], few: int = FEW) -> list[int]:
    """At most a few of these, evenly spaced."""
    if len(options) <= few:
        return list(options)
    return [options[int(place)] for place in np.linspace(0, len(options) - 1, few).round()]


def _contexts(run: Finished) -> list[list[int]]:
    """The contexts of each tested client's rows; none where the data have no contexts."""
    population = run.experiment.population
    if "contexts" not in population.about:
        return [[] for _ in run.clients]
    column, offsets = population.columns["context"], population.offsets
    return [torch.unique(column[int(offsets[c]) : int(offsets[c + 1])]).tolist() for c in run.clients]


def _wrong(rows: Params, own: list[int], many: int) -> list[tuple[str, Params]]:
    """The same rows with wrong contexts: other contexts of the client, and contexts that it never has."""
    place = torch.searchsorted(torch.tensor(own), rows["context"].long())
    steps = spread(range(1, len(own)))
    found = [("wrong", torch.tensor(own)[(place + step) % len(own)]) for step in steps]
    foreign = [context for context in range(many) if context not in own]
    found += [("foreign", torch.full_like(rows["context"], context)) for context in spread(foreign)]
    return [(name, {**rows, "context": context.to(rows["context"].dtype)}) for name, context in found]


def _value(task: Any, model: Params, rows: Params, metric: str) -> float:
    """The metric of one model on these rows."""
    with torch.no_grad():
        sums = task.score(task.judged(model, rows), rows)
    table = {name: value.double().reshape(1, 1).numpy() for name, value in sums.items()}
    return float(QueryScores(np.zeros(1, np.int64), table).values(metric)[0, 0])
