"""The studio's map: users' and contexts' embeddings, as in `bespoke analyze --embeddings`, with added people."""

from __future__ import annotations

from typing import Any

import numpy as np

from bespoke.analysis.preference_map import Floats, Plane, Preferences, maps, own_contexts, points_of
from bespoke.report.embeddings import contexts_figure, users_figure
from bespoke.studio.people import People


def figures(people: People) -> dict[str, Any]:
    """Plotly specifications, and the same as rows of text; empty where a method has no embedding for each user."""
    voices = people.voices
    experiment, models, server = voices.experiment, voices.models, voices.models.server
    if not maps(models.method, server) or not len(models.host.private.slots):
        return {}
    clients, kept = models.kept("user")
    contexts = points_of(server["params"]["contexts"])
    names = voices.contexts or ["all texts"]
    own = own_contexts(experiment.population, experiment.split.train, clients)
    found = Preferences(clients, points_of(kept), contexts, names, own)
    columns = found.table(experiment.population.ids)
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    if voices.private:
        rows = [{**row, "client": "", "nearest": ""} if row["kind"] == "user" else row for row in rows]
    plane = Plane.of(found.users)
    for person in people.all():
        psi = user_of(points_of(people.model(person.id)), contexts)
        near = int(((found.users - psi) ** 2).sum(-1).argmin())
        x, y = plane.place(psi[None])[0]
        rows.append({
            "kind": "person", "client": person.name, "context": person.context or own[0], "x": float(x), "y": float(y),
            "nearest": "" if voices.private else str(experiment.population.ids[int(clients[near])]),
        })  # fmt: skip
    # of a private run only those who were added here have names
    shown = [row for row in rows if row["kind"] != "user" or not voices.private]
    return {
        "users": users_figure(rows, names, named=True), "contexts": contexts_figure(rows),
        "rows": [{"name": row["client"] or row["context"], "kind": row["kind"], "nearest": row["nearest"]}
                 for row in shown],
    }  # fmt: skip


def user_of(personal: Floats, contexts: Floats) -> Floats:
    """The user's embedding that explains a personal model best: least squares of personal = psi * phi over contexts.

    Exact unless the person's own copies of the contexts were tuned too.
    """
    user: Floats = (personal * contexts).sum(0) / np.maximum((contexts**2).sum(0), 1e-12)
    return user
