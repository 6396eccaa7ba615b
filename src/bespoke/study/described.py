"""Describes an experiment, its data and its methods for compare.json, from what the methods declare."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib.metadata import version

from bespoke.declarations import changes
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.variants import title
from bespoke.messages.robust.aggregator import Aggregator
from bespoke.messages.robust.settings import RobustConfig, shown
from bespoke.method import Method
from bespoke.records import CompareRecord, MethodRecord, SplitRecord
from bespoke.statistics.formatting import listing
from bespoke.tensors import count


def described(experiment: Experiment, asked: SplitRecord) -> CompareRecord:
    """The data, their split, the model and the settings of the run; `asked`: the split as it was asked for."""
    population, split = experiment.population, experiment.split
    about = population.about
    return {
        "title": about.get("title", about["name"]),
        "metric": experiment.metric,
        "lower_is_better": experiment.lower_is_better,
        "data": {
            "name": about["name"],
            "title": about.get("title", ""),
            "clients": len(population),
            "examples": population.rows,
            "groups": len(population.groups),
            "features": about.get("features", []),
            "target": about.get("target", ""),
            "task": about["task"],
            "licence": about.get("licence", ""),
            "notes": about.get("notes", []),
        },
        "split": {
            **asked,
            "train_clients": len(split.train.clients),
            "test_clients": len(split.test.query.clients),
            "train_rows": int(split.train.sizes().sum()),
            "validation_rows": int(split.selection.validation.sizes().sum()),
            "query_rows": int(split.test.query.sizes().sum()),
        },
        "model": {
            "name": experiment.task.network.called,
            "parameters": count(experiment.task.init(0)),
            **({"loss": experiment.task.own_loss.name} if experiment.task.own_loss else {}),
        },
        "cohort": experiment.cohort,
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("bespoke-fl", "torch", "numpy")}},
    }


def stateful(method: type[Method]) -> bool:
    """Whether clients, or the server about single clients, keep state between rounds."""
    return (method.init_private, method.unicast) != (Method.init_private, Method.unicast)


def cautions(planned: Iterable[Experiment]) -> list[str]:
    """Warns when a stateful method runs with clients that rarely or never train; one warning for all methods."""
    found: dict[str, list[str]] = {}
    for experiment in planned:
        method, trained = experiment.stages[-1].method, len(experiment.split.train.clients)
        if not stateful(type(method)):
            continue
        if experiment.split.kind == "cross-device":
            why = f"but cross-device tests clients that never train: {method.card.unseen}"
        elif experiment.cohort < trained:
            why = (
                f"and {experiment.cohort:,} of {trained:,} clients train in a round: what the others keep grows old, "
                f"and {method.card.unseen}"
            )
        else:
            continue
        found.setdefault(why, []).append(experiment.label)
    return [
        f"{listing(labels)} {'keep' if len(labels) > 1 else 'keeps'} something for every client from round to round, "
        f"{why}."
        for why, labels in found.items()
    ]


LAYERS = {"layers": "the parameters and statistics of the model's normalization layers"}  # FedBN's rule


def describe(method: Method, robust: RobustConfig | None = None, aggregator: Aggregator | None = None) -> MethodRecord:
    """What a method does, what travels (under a robust rule) and what stays private, from its declarations."""
    bounded = aggregator.transform(method) if aggregator else None
    uplink = {**shown(method, robust), **(bounded.reveals if bounded else {})}
    return {
        "name": method.card.name,
        "title": title(type(method)),
        "summary": (method.__doc__ or "").strip().partition("\n")[0] or method.card.personal,
        "paper": method.card.paper,
        "down": method.downlink,
        "travels": {name: reveal.value for name, reveal in uplink.items()},
        "reveals": {name: reveal.name for name, reveal in uplink.items()},
        "changes": list(changes(method.uplink)),
        "by_group": type(method).groups is not Method.groups,
        "private": {**method.private, **(LAYERS if method.task is not None and method.task.layers else {})},
        "personal": method.card.personal,
        "unseen": method.card.unseen,
        "stateful": stateful(type(method)),
        "rounds": method.trains,
        "after": method.card.after,
    }
