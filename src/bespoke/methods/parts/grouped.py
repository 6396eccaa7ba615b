"""One model per group of clients: shared by the group methods and the methods that find groups.

The server's models lie stacked. Row 0 is nobody's in training: the common model, for clients whose group is not known.
Rows 1, 2, ... are the groups'. A client is sent its group's row alone, and only sums over its group leave it: every
group is a federation of its own, with a server optimizer, a state of it and (in the sampling) a cohort of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bespoke.declarations import Card, Handoff, Needs, Observed, One, PerGroup
from bespoke.method import Cohort, Method
from bespoke.methods.fedavg import FedAvg
from bespoke.task import Task
from bespoke.tensors import Params, Tree, scale, stack, take, tree_map


def stacked(task: Task, params: Params) -> bool:
    """Whether these are several models, a row each."""
    return any(params[name].dim() > leaf.dim() for name, leaf in task.fresh(0).items())


@dataclass(frozen=True)
class ByGroup(Method):
    """Models of groups, stacked. Subclasses say who belongs to which, and whether they are trained."""

    card = Card(personal="the model of the client's group")
    downlink = {"params": "the model of the client's group"}
    handoff = Handoff(PerGroup(), takes=(One(), PerGroup()))

    def models(self, params: Params, groups: int) -> Params:
        """The models that groups start from: those handed in, or the common one for each."""
        return params if stacked(self.task, params) else stack([params] * (groups + 1))

    def groups(self, server: Tree) -> Tensor:
        groups: Tensor = server["groups"]
        return groups

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        here = server["groups"][torch.tensor(cohort.clients)].bincount()[1:]
        here = here[here > 0]  # how few clients stand behind a sum is what it gives away of each
        return {"groups": len(here), "smallest_group": int(here.min()) if len(here) else 0}


@dataclass(frozen=True)
class Grouped(ByGroup, FedAvg):
    """Models of groups, each trained as in FedAvg."""

    card = replace(FedAvg.card, personal=ByGroup.card.personal)

    def begin(self, params: Params, members: Tensor, groups: int) -> Tree:
        models = self.models(params, groups)
        rows = len(next(iter(models.values())))
        states = stack([self.server.init(take(models, row)) for row in range(rows)])
        return {"params": models, "optimizer": states, "groups": members}

    def step(self, server: Tree, delta: Params, weights: Tensor) -> Tree:
        """Each group's model by its own mean change, through its own optimizer; without clients it stays as it is."""
        params, states = server["params"], server["optimizer"]
        moving = (weights > 0) & (torch.arange(len(weights)) > 0)
        steps = states.get("time", torch.zeros(len(weights), dtype=torch.int64))  # a group may have missed rounds
        for done in steps[moving].unique():
            rows = torch.nonzero(moving & (steps == done))[:, 0]  # server steps act on numbers one by one: all at once
            mean = scale(take(delta, rows), 1 / weights[rows])
            state = {**take(states, rows), "time": done} if states else {}
            moved, after = self.server.step(state, take(params, rows), mean)
            params = _replaced(params, rows, moved)
            states = _replaced(states, rows, {**after, "time": after["time"].expand(len(rows))} if after else {})
        return {**server, "params": params, "optimizer": states}


def _replaced(tree: Tree, rows: Tensor, values: Tree) -> Tree:
    """A copy with these rows."""
    return tree_map(lambda leaf, value: leaf.index_copy(0, rows, value), tree, values)


@dataclass(frozen=True)
class FoundGroups(ByGroup):
    """Groups that the server finds in what each client sends it. Subclasses say how."""

    card = replace(
        ByGroup.card, unseen="a client that never trained has no group: it gets the model that all had in common"
    )
    needs = Needs(everyone=True)
    handoff = Handoff(PerGroup())

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        order = torch.tensor(cohort.clients).argsort()  # hosts answer in an order of their own
        return self.regrouped(server, torch.tensor(cohort.clients)[order], take(cohort.each, order))

    def regrouped(self, server: Tree, clients: Tensor, each: Tree) -> Tree:
        """The state after these clients, in ascending order, sent these things."""
        raise NotImplementedError
