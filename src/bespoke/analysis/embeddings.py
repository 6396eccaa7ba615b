"""Measures what personal embeddings reveal about the clients' groups (FedEmbed, Figures 3 and 4).

Embeddings stay on their clients; here, where all clients are simulated, they can be looked at together. Each client's
group is guessed from its embedding: by the nearest prototype or node of the map where the server has them, else by
k-means with as many clusters as there are groups. Guesses are numbered so that they agree best with the groups (an
assignment of clusters to groups, one to one). t-SNE draws the embeddings in the plane. Of FedPC's users and contexts a
map is drawn instead (preference_map.py).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.analysis.measured import Found
from bespoke.analysis.preference_map import check_map, maps, preference_map
from bespoke.analysis.reopened import DoesNotApply, Finished
from bespoke.randomness import generator
from bespoke.statistics.analyses import AnalysisNumbers
from bespoke.storage import Columns

DRAWN = 1000  # clients in the plane: t-SNE of all would take long and show no more

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def check_embeddings(run: Finished) -> None:
    if maps(run.method, run.server):
        return check_map(run)
    if "embedding" not in run.method.private:
        raise DoesNotApply(
            f"--embeddings: clients of {run.path} ({run.method.card.name}) have no embeddings; it applies to fedembed "
            "and fedpc"
        )
    if len(set(run.experiment.population.groups)) < 2:
        raise DoesNotApply(f"--embeddings: the clients of {run.path} have no groups to hold embeddings against")


def embeddings(run: Finished) -> Found:
    """(numbers, table of the clients drawn)."""
    if maps(run.method, run.server):
        return preference_map(run)
    from sklearn.metrics import adjusted_rand_score

    clients, kept = run.kept("embedding")
    population = run.experiment.population
    assert population.group is not None
    group, many = population.group[clients].astype(np.int64), len(population.groups)
    points = kept.double().numpy()
    places = _guessed(run, points, many)
    guess = matched(places, group, many)
    counts = np.zeros((many, many), dtype=np.int64)
    np.add.at(counts, (group, guess), 1)
    record: AnalysisNumbers = {
        "groups": list(population.groups),
        "counts": counts.tolist(),  # [group][guess]
        "recovered": float((guess == group).mean()),
        "agreement": float(adjusted_rand_score(group, places)),
        "by": "the nearest point of the server's" if _server_points(run) is not None else "k-means",
    }
    random = generator("drawn embeddings", run.experiment.seed)
    some = np.sort(random.choice(len(clients), min(len(clients), DRAWN), replace=False))
    x, y = _plane(points[some]).T
    table: Columns = {
        "client": [population.ids[c] for c in clients[some]],
        "group": [population.groups[g] for g in group[some]],
        "guess": [population.groups[g] for g in guess[some]],
        "x": x,
        "y": y,
    }
    return record, table


def _server_points(run: Finished) -> Floats | None:
    found = run.server.get("nodes", run.server.get("params", {}).get("prototypes"))
    return None if found is None else found.double().numpy()


def _guessed(run: Finished, points: Floats, many: int) -> Ints:
    """The cluster of every embedding."""
    server = _server_points(run)
    if server is not None:
        places: Ints = ((points[:, None] - server) ** 2).sum(-1).argmin(1)
        return places
    from sklearn.cluster import KMeans

    clusters: Ints = KMeans(many, n_init=5, random_state=0).fit_predict(points).astype(np.int64)
    return clusters


def matched(places: Ints, group: Ints, many: int) -> Ints:
    """Clusters renamed to the groups they agree with best, one to one; extra clusters take their largest group."""
    from scipy.optimize import linear_sum_assignment

    overlap = np.zeros((int(places.max()) + 1, many), dtype=np.int64)
    np.add.at(overlap, (places, group), 1)
    names: Ints = overlap.argmax(1)
    cluster, taken = linear_sum_assignment(-overlap)
    names[cluster] = taken
    return names[places]


def _plane(points: Floats) -> Floats:
    """Two coordinates by t-SNE; of fewer than six points, which have no neighbourhoods, the first two coordinates."""
    if len(points) < 6:
        return np.pad(points, ((0, 0), (0, 2)))[:, :2]
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    reduce = TSNE(perplexity=perplexity, init="pca", random_state=0)
    plane: Floats = reduce.fit_transform(torch.from_numpy(points).numpy())
    return plane
