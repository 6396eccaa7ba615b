"""Finds topics of clients by k-means of their training text's TF-IDF vectors, and names them by typical words.

Vectors are projected to a few directions first (latent semantic analysis): a client has few words, and two clients of
one topic may have few of them in common. Without it the groups found tell less of held-out text.

`about["topics"] = {"clusters": k, "seed": s}` asks for them. Like the vocabulary they are learned after the split, from
the training rows of training clients alone. A client that does not train gets the topic whose centre is nearest to the
rows it adapts on. Validation and query rows are never looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import without
from bespoke.data.population import NO_GROUP, Population
from bespoke.data.splits import Rows, Split
from bespoke.errors import UserError

LEAST = 3  # training clients that use a word
MOST = 0.25  # of the training clients: a word that more of them use says little of a topic
NAMED = 3  # words in a topic's name
DIRECTIONS = 20  # of latent semantic analysis
STARTS = 10  # of k-means
LEARNED = "which topics there are, and which client has which, is learned from clients' texts without noise"


def grouped(raw: Population, split: Split) -> Population:
    """The population with a topic as each client's group, if it asks for topics."""
    wanted = raw.about.get("topics")
    if wanted is None:
        return raw
    from sklearn.cluster import KMeans
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer
    from threadpoolctl import threadpool_limits

    trained = split.train.clients
    counts = _counts(raw, split.train, trained)
    if len(trained) < wanted["clusters"]:
        raise UserError(
            f"{raw.about['name']}: {wanted['clusters']} topics of {len(trained)} training clients; ask for fewer "
            "topics (data.options.clusters), or for more clients"
        )
    users = np.asarray((counts > 0).sum(0)).ravel()
    kept = np.flatnonzero((users >= LEAST) & (users <= MOST * len(trained)))
    if not len(kept):
        raise UserError(
            f"{raw.about['name']}: no word is used by at least {LEAST} and at most a quarter of the {len(trained)} "
            "training clients, so that nothing tells their topics; name groups, or ask for more clients"
        )
    tfidf = TfidfTransformer(sublinear_tf=True)
    weights = tfidf.fit_transform(counts[:, kept])
    directions = TruncatedSVD(min(DIRECTIONS, *weights.shape), random_state=wanted["seed"])
    means = KMeans(wanted["clusters"], n_init=STARTS, random_state=wanted["seed"])
    with threadpool_limits(1):  # sums of several threads are added in any order: a resumed run might round otherwise
        found = make_pipeline(directions, Normalizer(), means).fit(weights)
    typical = np.array([_mean(weights[means.labels_ == k]) for k in range(wanted["clusters"])]) - _mean(weights)
    names = _names(typical, [raw.about["pieces"][place] for place in kept])
    topic = np.full(len(raw), len(names))  # not known
    topic[trained] = means.labels_
    for support in (split.selection.support, split.test.support):
        others = np.setdiff1d(support.clients, trained)
        if len(others):
            topic[others] = found.predict(tfidf.transform(_counts(raw, support, others)[:, kept]))
    used, group = np.unique(np.array([*names, NO_GROUP])[topic], return_inverse=True)
    note = (
        f"{len(names)} topics by TF-IDF and k-means of the text of {len(trained):,} training clients. They follow the "
        "split: with split.seed fixed, all seeds have the same."
    )
    about = without(raw.about, ("topics",))
    about |= {"notes": [*about["notes"], note], "learned": LEARNED}
    return replace(raw, group=group, groups=used.tolist(), about=about)


def _counts(raw: Population, rows: Rows, clients: NDArray[np.int64]) -> Any:
    """How often each client says each surface word in these rows: a sparse matrix."""
    from scipy.sparse import csr_matrix

    places, sizes = rows.of(clients)
    said = raw.columns["pieces"].numpy()[places]
    client = np.repeat(np.arange(len(clients)), sizes)[:, None] * np.ones(said.shape[1], dtype=np.int64)
    there = said > 0
    shape = (len(clients), len(raw.about["pieces"]))
    return csr_matrix((np.ones(there.sum()), (client[there], said[there] - 1)), shape=shape)


def _mean(weights: Any) -> NDArray[np.float64]:
    """The mean of the rows of a sparse matrix; zeros if there are none."""
    mean: NDArray[np.float64] = np.asarray(weights.sum(0)).ravel() / max(weights.shape[0], 1)
    return mean


def _names(typical: NDArray[np.float64], words: Sequence[str]) -> list[str]:
    """A name for each topic: the words whose weight is furthest above the mean over all clients."""
    names: list[str] = []
    for weights in typical:
        best = sorted(range(len(words)), key=lambda place: (-weights[place], words[place]))[:NAMED]
        name = " ".join(words[place] for place in best)
        names.append(name if name not in names else f"{name} ({len(names) + 1})")
    return names
