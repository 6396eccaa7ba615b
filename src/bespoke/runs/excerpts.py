"""Excerpts of the texts that a language-model run keeps: words typical of each group, and a few test sentences.

Both are clients' words. A run with [privacy] keeps none, and `bespoke forget` removes those of a client.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import Population
from bespoke.data.sources.formats.words import Vocabulary
from bespoke.data.splits import Rows
from bespoke.experiment.experiment import Experiment
from bespoke.randomness import generator
from bespoke.runs.evaluation import Final

Ints = NDArray[np.int64]
TYPICAL = 12  # words of a group
MOST_GROUPS = 40
PRIOR = 1000.0  # weight of the prior, in words
SENTENCES = 3  # of a group
SHORTEST = 4  # tokens of a sentence that is shown


def keeps_texts(experiment: Experiment) -> bool:
    """Whether the run keeps texts: it trains a language model without [privacy]."""
    about = experiment.population.about
    return about.get("task") == "language" and bool(about.get("words")) and experiment.privacy is None


def typical_words(population: Population, train: Rows) -> dict[str, list[Any]]:
    """The words that are most typical of each group's training rows: log-odds with a prior, in standard deviations.

    Monroe, Colaresi and Quinn, Fightin' Words, 2008: with counts y of n words in the group, y' of n' in the others, and
    a prior of PRIOR words spread as all are (a of this one), delta = ln((y + a) / (n + PRIOR - y - a)) - ln((y' + a) /
    (n' + PRIOR - y' - a)), divided by sqrt(1 / (y + a) + 1 / (y' + a)).
    """
    found: dict[str, list[Any]] = {"group": [], "word": [], "score": [], "count": []}
    if population.group is None or len(population.groups) < 2:
        return found
    words = population.about["words"]
    rows, sizes = train.of(train.clients)
    owner = np.repeat(population.group[train.clients], sizes)
    tokens = population.columns["y"].numpy()[rows]
    counts = np.zeros((len(population.groups), len(words) + 1))
    for group in range(len(population.groups)):
        said = tokens[owner == group].ravel()
        counts[group] = np.bincount(said[(said > 0) & (said <= len(words))], minlength=len(words) + 1)
    total = counts.sum(0)
    prior = PRIOR * total / max(total.sum(), 1)
    for group in np.argsort(-counts.sum(1), kind="stable")[:MOST_GROUPS]:
        inside, others = counts[group] + prior, total - counts[group] + prior
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = np.log(inside / (inside.sum() - inside)) - np.log(others / (others.sum() - others))
            score = np.nan_to_num(odds / np.sqrt(1 / inside + 1 / others), nan=0.0, posinf=0.0, neginf=0.0)
        for place in np.argsort(-score, kind="stable")[:TYPICAL]:
            if score[place] > 0:
                found["group"].append(population.groups[group])
                found["word"].append(words[place - 1])
                found["score"].append(float(score[place]))
                found["count"].append(int(counts[group, place]))
    return found


def example_sentences(experiment: Experiment, final: Final) -> dict[str, list[Any]]:
    """A few query rows of each group, the same for every method, with the loss of their clients' final models."""
    population, clients = experiment.population, final.query.clients
    found: dict[str, list[Any]] = {name: [] for name in ("client", "group", "row", "text", "tokens", "loss")}
    if final.rows is None or final.values is None:
        return found
    sizes = experiment.split.test.query.sizes(clients)
    owner = np.repeat(np.arange(len(clients)), sizes)
    losses = final.values * (final.query.sums["count"][:, 0] / np.maximum(sizes, 1))[owner]  # of whole sentences
    y = population.columns["y"].numpy()
    tokens = (y[final.rows] != 0).sum(1)
    groups = np.array([population.group_of(int(client)) for client in clients], dtype=object)[owner]
    for group in list(dict.fromkeys(groups.tolist()))[:MOST_GROUPS]:
        long = np.flatnonzero((groups == group) & (tokens >= SHORTEST))
        seen: set[int] = set()
        for place in generator("example sentences", str(group)).permutation(long).tolist():
            if owner[place] in seen:
                continue
            seen.add(owner[place])
            found["client"].append(population.ids[int(clients[owner[place]])])
            found["group"].append(group)
            found["row"].append(int(final.rows[place]))
            found["text"].append(written(y[final.rows[place]], population.about))
            found["tokens"].append(int(tokens[place]))
            found["loss"].append(float(losses[place]))
            if len(seen) == SENTENCES:
                break
    return found


def written(tokens: NDArray[Any], about: About) -> str:
    """A row of targets as a text."""
    known = Vocabulary(tuple(about["words"]))
    names = ["", *known.words, "<unk>", "", ""]
    apart = "" if about.get("text", {}).get("tokenizer") == "characters" else " "
    return apart.join(names[token] for token in tokens.tolist() if names[token])
