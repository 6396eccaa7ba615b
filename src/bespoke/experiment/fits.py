"""Checks that methods fit the data, the model and each other, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from bespoke.data.periods import Period
from bespoke.data.population import NO_GROUP, Population
from bespoke.declarations import PerGroup
from bespoke.errors import UserError
from bespoke.experiment.config import AUTO, ExperimentConfig
from bespoke.experiment.experiment import Stage
from bespoke.federation.local_layers import check_layers
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.tensors import count, is_buffer


def check_stages_fit(methods: Sequence[Method]) -> None:
    """Checks that each stage can start from the models that the stage before hands on."""
    for place, (before, after) in enumerate(pairwise(methods), start=1):
        if before.handoff.gives not in after.handoff.takes:
            wanted = " or ".join(map(str, after.handoff.takes))
            raise UserError(
                f"stage {place}: {after.card.name} starts from {wanted}, and {before.card.name} before it hands on "
                f"{before.handoff.gives}; leave one of the two out, or, where k is how many, give both the same k"
            )


def check_buffers(config: ExperimentConfig, task: Any, stages: Sequence[Stage]) -> None:
    """Refuses combinations that do not work with shared buffers or with layers that stay on clients."""
    layers, averaged = bool(task.layers), any(map(is_buffer, task.init(0)))
    for place, stage in enumerate(stages):
        where, name = f"stage {place}", stage.method.card.name
        if layers:
            check_layers(stage.method, where)
        if (averaged or layers) and stage.method.needs.still:
            raise UserError(
                f"{where}: {name} takes steps of its own, in which the model's buffers would stay as they are; use "
                "buffers='frozen', or another method, such as fedavg, ditto or finetune"
            )
        if averaged and not isinstance(getattr(stage.method, "server", ServerOptimizer()), ServerOptimizer):
            raise UserError(
                f"{where}: this server optimizer would move the model's buffers as if they were parameters; use one of "
                "bespoke's own, or buffers='private' or 'frozen'"
            )
        if averaged and stage.aggregator is not None:
            raise UserError(f"{where}: its aggregator {_AVERAGED}")
    acting = {"[privacy]": config.privacy, "[robust]": config.robust, "[attack]": config.attack}
    for what, given in {**acting, "[secure]": config.secure}.items():
        if averaged and given is not None:
            raise UserError(f"{what} {_AVERAGED}")


_AVERAGED = (
    "acts on changes of parameters, and this model's buffers travel beside them (buffers='average'): noise and bounds "
    "made for parameters would ruin them; use buffers='private' or 'frozen'"
)


def check_groups(population: Population, stages: Sequence[Stage]) -> None:
    """Checks that methods that need groups have some: from the data, or found by the stage before."""
    for place, stage in enumerate(stages):
        method, found = stage.method, place > 0 and stages[place - 1].method.handoff.gives == PerGroup()
        if method.needs.groups and population.group is None and not found:
            raise UserError(
                f"stage {place}: {method.card.name} as it is set needs groups of clients, and "
                f"{population.about.get('name', 'this data')} has none; name a table's group column (--group COLUMN, "
                f"or group in [data]), or {_without_groups(method)}"
            )


def group_sizes(population: Population, clients: NDArray[np.int64]) -> dict[str, int]:
    """The number of these clients in each known group; empty without groups."""
    if population.group is None:
        return {}
    counts = np.bincount(population.group[clients], minlength=len(population.groups)).tolist()
    return {name: many for name, many in zip(population.groups, counts) if many and name != NO_GROUP}


def _without_groups(method: Method) -> str:
    """Advice for a method that needs groups: a stage that finds some, or another setting."""
    if PerGroup() in method.handoff.takes:
        made = [kind(method.task) for kind in METHODS.values()]
        finders = [m.card.name for m in made if m.handoff.gives == PerGroup() and not m.needs.groups]
        return f"put a stage before it that finds groups: {', '.join(finders)}"
    other: Any = method
    hints = get_type_hints(type(method))
    words = [(knob.name, word) for knob in fields(method) for word in get_args(hints[knob.name]) if type(word) is str]
    free = [(name, word) for name, word in words if not replace(other, **{name: word}).needs.groups]
    return " or ".join([*(f"set {name} = {word!r}" for name, word in free), "use another method"])


def check_changes(config: ExperimentConfig, earlier: Sequence[Period], rounds: int) -> None:
    """Checks rows that change: the last period must be trained on, and noise cannot be calibrated for it."""
    if earlier and earlier[-1].until >= rounds:
        raise UserError(
            f"the rows of {config.data.source} change after round {earlier[-1].until}, and there are {rounds} rounds "
            "in all; train longer, or change them earlier (data.options)"
        )
    auto = any(stage.get("rounds") == AUTO for stage in config.stage)
    if auto and (earlier or config.privacy is not None):
        why = "rows that come and go" if earlier else "[privacy], which is calibrated to it"
        raise UserError(f"rounds = {AUTO!r} and {why}: how many rounds there are has to be known; give a number")
    if earlier and config.privacy is not None:
        raise UserError(
            f"[privacy] accounts for clients that may come in every round, and those of {config.data.source} come and "
            "go; leave one of the two out"
        )


def check_fit(method: Method, task: Any, population: Population, where: str) -> None:
    """Checks a method's needs: some methods work with some models only, or with few clients."""
    clients, name, needs = len(population), method.card.name, method.needs
    if needs.smooth and not task.smooth:
        raise UserError(
            f"{where}: {name} needs a loss with a second derivative, and that of 'svm' has none; use [model] "
            "name = 'logistic', or another method"
        )
    if needs.last:
        _ = task.last_layer  # an error if a user's model does not declare it
    if needs.linear and not task.network.is_linear:
        found = type(task.network).__name__.lower()
        raise UserError(
            f"{where}: {name} is for linear models, and the model is {found!r}; use [model] name = 'linear', or "
            "a method that takes any model, such as ditto"
        )
    most = needs.coefficients
    head = task.linear() if most or needs.head or hasattr(method, "solver") else None
    if needs.head and head is None:
        raise UserError(
            f"{where}: {name} needs a model with one linear last layer for regression or classes; {_unsolved(task)}"
        )
    if needs.head and not task.network.is_linear and where == "stage 0":
        raise UserError(
            f"{where}: {name} fits the last layer alone, and the layers below are still as they were drawn; put "
            "a stage before it that trains them, such as fedavg"
        )
    if getattr(method, "solver", "sgd") == "exact" and head is None:
        raise UserError(
            f"{where}: {name} with solver = 'exact' needs a model with one linear last layer for regression or "
            f"classes; {_unsolved(task)}; use solver = 'sgd'"
        )
    sizes = head.coefficients(task.init(0)).shape if most and head else (1, 0)
    coefficients = max(sizes[0] - 1, 1) * sizes[1]
    if most and coefficients > most:
        raise UserError(
            f"{where}: {name} estimates how {coefficients:,} coefficients vary, and takes at most {most}; name "
            "fewer features (--features), or use another method, such as finetune"
        )
    if needs.words and not task.word_width:
        raise UserError(
            f"{where}: {name} reads the words of a frozen language model, or the rows of a table; "
            f"{task.network.called} has neither here; use [model] name = 'frozen', or another method, such as "
            "finetune"
        )
    size = count(task.init(0)) if needs.parameters else 0
    if size > needs.parameters:
        raise UserError(
            f"{where}: {name} generates all {size:,} parameters of a model, and takes at most {needs.parameters:,}; "
            "use a smaller model, or another method, such as finetune"
        )
    if needs.clients and clients > needs.clients:
        raise UserError(
            f"{where}: {name} relates every client to every other and takes at most {needs.clients:,} "
            f"clients; there are {clients:,}; use another method, such as ditto"
        )


def _unsolved(task: Any) -> str:
    if task.own_loss is not None:
        return f"it cannot solve the loss {task.own_loss.name}"
    return f"{task.network.called} has none here"
