"""What a site says of its clients' scores, and how a hub puts it together: sums and histograms, never one client's.

    costs    of each candidate: the sum over clients of what a common choice goes by, and the sum of the values; by
             size of clients as well, if each size has enough clients here
    under    of the candidate that each client uses: counts, sums and histograms of every metric
    clients  each client's values by itself, where a site allows it

A site with fewer clients than its least says so and nothing else. Bins of a histogram with fewer clients are joined
with their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.experiment.choosing import (
    Acceptance,
    BySize,
    Chosen,
    QueryScores,
    SupportScores,
    ValidationScores,
    accepted,
    choose,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
AnyScores = ValidationScores | SupportScores | QueryScores
# A client's gain over the shared model, as a part of the shared one's value: worse by more than a tenth, worse, ...
GAINS = (-math.inf, -0.1, -1e-9, 1e-9, 0.1, math.inf)


@dataclass(frozen=True)
class Tables:
    """Scores of a site's clients."""

    clients: Ints
    scores: dict[str, AnyScores]  # by part: validation, query, support
    sizes: dict[str, Ints]  # each client's rows of a part
    support: Ints  # rows on which each client adapted


# -- at a site ---------------------------------------------------------------------------------------------------------
def answer(tables: Tables, request: dict[str, Any], least: int) -> dict[str, Any]:
    what = request.get("what")
    if len(tables.clients) < least and what != "clients":
        return {"withheld": True}
    if what == "costs":
        return costs(tables, request["part"], request["metric"], bool(request["lower"]), least, request.get("edges"))
    if what == "under":
        return under(tables, request, least)
    if what == "clients":
        return by_client(tables, request, least)
    raise UserError(f"statistics of the kind {what!r} are not known; there are costs, under, clients")


def costs(
    tables: Tables, part: str, metric: str, lower: bool, least: int, edges: list[int] | None = None
) -> dict[str, Any]:
    """What `choose` goes by for a common choice, summed over clients; with edges, over those of each size as well."""
    scores = tables.scores.get(part)
    if scores is None or isinstance(scores, QueryScores):
        return {"seen": 0}
    values = [scores.under(candidate, metric) for candidate in range(scores.candidates)]
    seen = ~np.isnan(values).all(0)
    if int(seen.sum()) < least:
        return {"withheld": True}
    cost = np.array([np.where(np.isnan(each), np.inf, each if lower else -each)[seen] for each in values])
    found = {
        "seen": int(seen.sum()), "cost": cost.sum(1).tolist(),
        "sum": [float(np.nansum(each)) for each in values], "known": [int((~np.isnan(each)).sum()) for each in values],
    }  # fmt: skip
    place = None if edges is None else places(tables, edges, least)
    if place is not None:
        counts = np.bincount(place[seen], minlength=len(edges or ()) + 1)
        if not ((counts > 0) & (counts < least)).any():
            by_size = [cost[:, place[seen] == part].sum(1).tolist() for part in range(len(counts))]
            found["sizes"] = {"seen": counts.tolist(), "cost": by_size}
    return found


def places(tables: Tables, edges: list[int], least: int) -> Ints | None:
    """The part by size of each client; None if a part has too few clients here that all sums are of.

    Such a site neither says anything by size nor chooses by it: what all clients sum to under two choices that differ
    in a part would show that part.
    """
    place = np.searchsorted(np.array(edges), tables.support, side="right")
    whole = np.logical_and.reduce([sizes > 0 for sizes in tables.sizes.values()])
    there, counted = (np.bincount(some, minlength=len(edges) + 1) for some in (place, place[whole]))
    return None if ((there > 0) & (counted < least)).any() else place


def chosen(tables: Tables, choice: dict[str, Any], least: int) -> Chosen:
    """Each client's candidate: the common one, that of its size, its own choice, or the shared model where it does not
    accept. `on`: the part of the rows on which clients choose, if not all validation rows."""
    common, own = int(choice["default"]), {}
    validation = tables.scores.get("validation")
    if choice["by"] == "size" and places(tables, choice["edges"], least) is not None:
        by_size = BySize(np.array(choice["edges"]), tuple(choice["picks"]), common)
        own = by_size.choice((tables.clients, tables.support)).own
    if choice["by"] in ("client", "support"):
        scores: Any = tables.scores.get("support" if choice["by"] == "support" else choice.get("on", "validation"))
        if scores is not None:
            lower, metric = (True, "loss") if choice["by"] == "support" else (bool(choice["lower"]), choice["metric"])
            own = choose(scores, metric, lower, choice["by"], choice["allowed"]).own
    picked = Chosen(common, own)
    if choice.get("accept") is not None:
        assert validation is None or isinstance(validation, ValidationScores)
        rule = Acceptance(**choice["accept"])
        picked = accepted(
            picked, rule, validation, tables.support, tables.clients, choice["metric"], bool(choice["lower"])
        )  # fmt: skip
    return picked


def under(tables: Tables, request: dict[str, Any], least: int) -> dict[str, Any]:
    """Sums of each metric under the clients' choices, and of the shared model beside it."""
    scores, picked = tables.scores.get(request["part"]), chosen(tables, request["choice"], least)
    if scores is None:
        return {"withheld": True}
    count = scores.at(picked, "count")
    tested = count > 0
    if int(tested.sum()) < least:
        return {"withheld": True}
    losses = scores.at(picked, "loss")[tested]
    sizes = tables.sizes[request["part"]]
    found: dict[str, Any] = {
        "clients": int(tested.sum()), "diverged": int((~np.isfinite(losses)).sum()), "metrics": {},
        "personal": int((picked.of(scores.clients) != 0)[tested].sum()),
    }  # fmt: skip
    if request["choice"].get("accept") is not None:
        plain = chosen(tables, {**request["choice"], "accept": None}, least)
        found["accepted"] = int((picked.of(scores.clients) == plain.of(scores.clients)).sum())
    for metric in request["metrics"]:
        values, before = scores.at(picked, metric), scores.at(Chosen(0, {}), metric)
        found["metrics"][metric] = {**_sums(values, sizes), "baseline": _sums(before, sizes)}
    metric = request["metric"]
    gain = _gain(scores.at(picked, metric), scores.at(Chosen(0, {}), metric), bool(request["choice"]["lower"]))
    found["gain"] = histogram(gain, GAINS, least)
    return found


def _sums(values: Floats, sizes: Ints) -> dict[str, Any]:
    known = np.isfinite(values)
    some = values[known]
    return {
        "known": int(known.sum()), "infinite": int(np.isinf(values).sum()), "sum": float(some.sum()),
        "squares": float((some**2).sum()), "weighted": float((some * sizes[known]).sum()),
        "rows": int(sizes[known].sum()),
    }  # fmt: skip


def _gain(values: Floats, before: Floats, lower: bool) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        gain: Floats = ((before - values) if lower else (values - before)) / np.abs(before)
    return np.where(values == before, 0.0, gain)


def histogram(values: Floats, edges: Sequence[float], least: int) -> list[list[float]]:
    """[from, to, clients] of consecutive bins, none of which has fewer clients than the least but an empty one."""
    known = values[~np.isnan(values)]
    bins: list[list[float]] = []
    for low, high in pairwise(edges):
        inside = int(((known >= low) & (known < high)).sum()) + int((known == high).sum() if high == math.inf else 0)
        if bins and 0 < bins[-1][2] < least:
            bins[-1][1:] = [high, bins[-1][2] + inside]
        else:
            bins.append([low, high, inside])
    while len(bins) > 1 and 0 < bins[-1][2] < least:  # what is left over at the end
        last = bins.pop()
        bins[-1][1:] = [last[1], bins[-1][2] + last[2]]
    return [] if len(known) < least else bins


def by_client(tables: Tables, request: dict[str, Any], least: int) -> dict[str, Any]:
    """Each client's scores, for a site that shares them."""
    picked, query = chosen(tables, request["choice"], least), tables.scores["query"]
    validation = tables.scores.get("validation")
    found: dict[str, Any] = {"clients": tables.clients.tolist(), "candidate": picked.of(tables.clients).tolist()}
    for metric in request["metrics"]:
        found[f"query_{metric}"] = query.at(picked, metric).tolist()
        missing = [math.nan] * len(tables.clients)
        found[f"validation_{metric}"] = missing if validation is None else validation.at(picked, metric).tolist()
        found[f"baseline_{metric}"] = query.at(Chosen(0, {}), metric).tolist()
    return found


# -- at the hub --------------------------------------------------------------------------------------------------------
def answering(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers that say something."""
    return [found for found in answers if not found.get("withheld")]


def total(parts: Sequence[Any]) -> Any:
    """Sums of what several sites say: numbers, lists of numbers and tables of these."""
    first = parts[0]
    if isinstance(first, dict):
        return {name: total([part[name] for part in parts]) for name in first}
    if isinstance(first, list):
        return [total(entries) for entries in zip(*parts, strict=True)]
    return sum(parts)
