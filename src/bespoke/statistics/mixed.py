"""Reads the estimates of a federated mixed model: common coefficients, and how they vary by group and client.

A run of the method `mixed` writes its estimates into `observed` of the last line of rounds.jsonl. Features and target
are standardized there, so coefficients and their standard deviations can be compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bespoke.errors import UserError
from bespoke.statistics.folders import FinishedRun, RunSet
from bespoke.statistics.formatting import listing, number

INTERCEPT = "intercept"
MOST_NAMED = 3  # coefficients in a sentence
NAMED_FROM = 0.1  # of the largest deviation: smaller ones are not worth a word
NEGLIGIBLE = 1e-3  # standard deviations of the target


@dataclass(frozen=True)
class Coefficient:
    """One coefficient, averaged over seeds."""

    name: str
    mean: float  # common to all clients
    error: float  # standard error of the mean
    clients: float  # standard deviation between clients
    groups: float | None  # standard deviation between groups, where there are groups


@dataclass(frozen=True)
class MixedEstimates:
    """The estimates of one mixed method, averaged over seeds."""

    label: str
    seeds: int
    coefficients: list[Coefficient]  # those that differ most between clients first
    shares: dict[str, float]  # "common", "groups", "clients", "within" -> share of the target's variance

    @property
    def sentence(self) -> str:
        """Which coefficients differ most between clients, and by how much."""
        most = self.coefficients[0]
        if most.clients < NEGLIGIBLE:
            return "No coefficient differs noticeably between clients."
        named = [c for c in self.coefficients[:MOST_NAMED] if c.clients >= NAMED_FROM * most.clients]
        phrases = [
            f"{c.name} (standard deviation {number(c.clients, 2)} around a mean of {number(c.mean, 2)})" for c in named
        ]
        start = "coefficient that differs most" if len(phrases) == 1 else "coefficients that differ most"
        return f"The {start} between clients {'is' if len(phrases) == 1 else 'are'} {listing(phrases)}."


def read_mixed(study: RunSet) -> list[MixedEstimates]:
    """Return the estimates of every mixed method of a study; none if it has no such method."""
    features = [str(name) for name in (study.compare.get("data") or {}).get("features") or []]
    found = []
    for label in study.labels:
        estimates = [seen for run in study.runs if run.label == label and (seen := _estimates(run))]
        if estimates:
            found.append(_averaged(label, estimates, features))
    return found


@dataclass(frozen=True)
class _Estimates:
    run: FinishedRun
    coefficients: dict[str, list[float]]
    shares: dict[str, float]


def _estimates(run: FinishedRun) -> _Estimates | None:
    """The estimates in the last line of the run's log; none if the run has no mixed model, or if it diverged."""
    lines = run.lines("rounds.jsonl")
    observed = (lines[-1].get("observed") or {}) if lines else {}
    if "coefficients" not in observed:
        return None
    grouped = ["groups"] if "groups" in observed["coefficients"] else []
    try:
        coefficients = {
            key: [_number(value) for value in observed["coefficients"][key]]
            for key in ("mean", "error", "clients", *grouped)
        }
        shares = {key: _number(observed["shares"][key]) for key in ("common", *grouped, "clients", "within")}
    except (KeyError, TypeError) as error:
        raise _damaged(run, f"is not complete ({error})") from error
    if len({len(column) for column in coefficients.values()}) > 1 or not coefficients["mean"]:
        raise _damaged(run, "has empty lists, or lists of different lengths")
    numbers = [*shares.values(), *(value for column in coefficients.values() for value in column)]
    return _Estimates(run, coefficients, shares) if all(map(math.isfinite, numbers)) else None


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _averaged(label: str, estimates: Sequence[_Estimates], features: Sequence[str]) -> MixedEstimates:
    first = estimates[0]
    size = len(first.coefficients["mean"])
    for other in estimates:
        if len(other.coefficients["mean"]) != size or set(other.shares) != set(first.shares):
            raise _damaged(other.run, f"has other coefficients or levels than {first.run.folder / 'rounds.jsonl'}")
    columns = {
        key: [fmean(values) for values in zip(*(seen.coefficients[key] for seen in estimates))]
        for key in first.coefficients
    }
    names = [INTERCEPT, *(features if len(features) == size - 1 else [f"learned feature {i}" for i in range(1, size)])]
    groups: Sequence[float | None] = columns.get("groups") or [None] * size
    rows = zip(names, columns["mean"], columns["error"], columns["clients"], groups)
    coefficients = [Coefficient(*row) for row in rows]
    return MixedEstimates(
        label,
        len(estimates),
        sorted(coefficients, key=lambda coefficient: -coefficient.clients),
        {key: fmean(seen.shares[key] for seen in estimates) for key in first.shares},
    )


def _damaged(run: FinishedRun, what: str) -> UserError:
    return UserError(
        f"{run.folder / 'rounds.jsonl'}: `observed` of the last line {what}. "
        "The folder is damaged: delete it and run the experiment again."
    )
