"""Draws a map of FedPC's preference embeddings: users (psi) and contexts (phi), each in its own principal plane.

Embeddings of users stay on their clients; here, where all clients are simulated, they can be looked at together. Users
and contexts have planes of their own, since one multiplies the other. Neighbours are the nearest by Euclidean distance
between whole embeddings. If users' embeddings know of contexts, a user's nearest neighbour has the same context more
often than any other user has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.analysis.measured import Found
from bespoke.analysis.reopened import DoesNotApply, Finished
from bespoke.data.population import Population
from bespoke.data.splits import Rows
from bespoke.statistics.analyses import AnalysisNumbers
from bespoke.storage import Columns
from bespoke.tensors import Tree, leaves

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Plane:
    """Two principal axes of some embeddings, and the part of their variance along each."""

    mean: Floats
    axes: Floats  # (2, width)
    shares: tuple[float, float]

    @classmethod
    def of(cls, points: Floats) -> Plane:
        from sklearn.decomposition import PCA

        axes, shares, many = np.zeros((2, points.shape[1])), [0.0, 0.0], min(2, len(points) - 1, points.shape[1])
        if many > 0 and np.ptp(points, axis=0).any():
            found = PCA(many).fit(points)
            axes[:many], shares[:many] = found.components_, found.explained_variance_ratio_.tolist()
        return cls(points.mean(0), axes, (shares[0], shares[1]))

    def place(self, points: Floats) -> Floats:
        """Coordinates (points, 2)."""
        return (points - self.mean) @ self.axes.T


def nearest(points: Floats) -> Ints:
    """Each point's nearest other point; -1 if there is no other."""
    if len(points) < 2:
        return np.full(len(points), -1)
    apart = ((points[:, None] - points) ** 2).sum(-1)
    np.fill_diagonal(apart, np.inf)
    places: Ints = apart.argmin(1)
    return places


def points_of(stacked: Tree) -> Floats:
    """Embeddings as rows of numbers, from a tree whose leaves have one row for each."""
    return torch.cat([leaf.flatten(1) for leaf in leaves(stacked)], 1).double().numpy()


def own_contexts(population: Population, rows: Rows, clients: Ints) -> list[str]:
    """The most frequent context of each client's rows; empty without contexts."""
    names = population.about.get("contexts", [])
    if not names:
        return [""] * len(clients)
    found, sizes = rows.of(clients)
    codes = population.columns["context"][torch.from_numpy(found)].long()
    return [names[int(own.bincount().argmax())] if len(own) else "" for own in codes.split(sizes.tolist())]


@dataclass(frozen=True)
class Preferences:
    """The embeddings of a run of FedPC."""

    clients: Ints
    users: Floats  # psi of these clients
    contexts: Floats  # phi
    names: list[str]  # of the contexts
    own: list[str]  # the context of most of each client's texts

    def table(self, ids: Any) -> Columns:
        """One row per user and context: its coordinates and its nearest neighbour."""
        columns: dict[str, list[Any]] = {name: [] for name in ("kind", "client", "context", "nearest", "x", "y")}
        users = [str(ids[int(client)]) for client in self.clients]
        for kind, points, client, context in (
            ("user", self.users, users, self.own),
            ("context", self.contexts, [""] * len(self.names), self.names),
        ):
            names = users if kind == "user" else self.names
            columns["kind"] += [kind] * len(points)
            columns["client"] += client
            columns["context"] += context
            columns["nearest"] += [names[i] if i >= 0 else "" for i in nearest(points)]
            for axis, values in zip("xy", Plane.of(points).place(points).T):
                columns[axis] += values.tolist()
        return {**columns}

    def together(self) -> tuple[float | None, float | None]:
        """The share of users whose nearest neighbour has the same context, and the share expected of any other user."""
        if len(set(self.own)) < 2:
            return None, None
        own, near = np.array(self.own), nearest(self.users)
        same = own[:, None] == own
        return float((own[near] == own).mean()), float(((same.sum(1) - 1) / (len(own) - 1)).mean())


def maps(method: Any, server: Tree) -> bool:
    """Whether a method has embeddings of users and contexts."""
    params = server.get("params", {})
    return "user" in method.private and isinstance(params, dict) and "contexts" in params


def check_map(run: Finished) -> None:
    if not len(run.kept("user")[0]):
        raise DoesNotApply(f"--embeddings: no client of {run.path} has trained, so no client has an embedding")


def preference_map(run: Finished) -> Found:
    """(numbers, table of users and contexts)."""
    experiment = run.experiment
    clients, kept = run.kept("user")
    contexts = points_of(run.server["params"]["contexts"])
    names = list(experiment.population.about.get("contexts", [])) or ["all texts"]
    own = own_contexts(experiment.population, experiment.split.train, clients)
    found = Preferences(clients, points_of(kept), contexts, names, own)
    same, chance = found.together()
    record: AnalysisNumbers = {
        "map": "users and contexts", "users": len(clients), "contexts": names, "same": same, "chance": chance,
        "shown": {"users": sum(Plane.of(found.users).shares), "contexts": sum(Plane.of(contexts).shares)},
        "nearest_contexts": [names[i] if i >= 0 else "" for i in nearest(contexts)],
    }  # fmt: skip
    return record, found.table(experiment.population.ids)
