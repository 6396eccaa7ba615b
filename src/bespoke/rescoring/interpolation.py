"""The second pass: combines recogniser and language model; weight and word bonus are tuned on validation utterances.

The hypothesis chosen is the one with the largest

    score + weight * log P(text) + bonus * words

where `score` is the recogniser's log-probability, P the language model and `words` the number of words. Liu et al.
(ICASSP 2023, Section 5.4) interpolate with a weight of 0.10 and say no more of the formula. Every further word costs
something under a language model; the bonus gives that back, else short hypotheses win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError
from bespoke.plain import JsonObject
from bespoke.rescoring.nbest import Hypotheses
from bespoke.rescoring.wer import errors, words_of
from bespoke.statistics.significance import Interval, bootstrap_means, percentile_interval

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
WEIGHT, BONUS = 0.10, 0.0  # where nothing can be tuned; the weight is the paper's
WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1.0)
BONUSES = (-2.0, -1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
RECOGNISER, UNAIDED, ORACLE = "no LM", "no LM, word bonus", "oracle"
Tunable = float | str | None  # a number; "tune"; or None: tuned where there are validation utterances to do it on


@dataclass(frozen=True)
class Lists:
    """The lists of several utterances as arrays (utterances, hypotheses), padded with scores of minus infinity."""

    utterances: Sequence[Hypotheses]

    @cached_property
    def scores(self) -> Floats:
        return _padded([utterance.scores for utterance in self.utterances], -np.inf)

    @cached_property
    def words(self) -> Floats:
        return _padded([[len(words_of(text)) for text in utterance.texts] for utterance in self.utterances], 0.0)

    @cached_property
    def known(self) -> NDArray[np.bool_]:
        """The utterances that have a reference."""
        return np.array([utterance.reference is not None for utterance in self.utterances], dtype=bool)

    @cached_property
    def said(self) -> Floats:
        """The number of words in each reference."""
        return np.array([len(words_of(utterance.reference or "")) for utterance in self.utterances], dtype=float)

    @cached_property
    def errors(self) -> Floats:
        """Word errors of each hypothesis; zero where there is no reference, infinite where there is no hypothesis."""
        return _padded(
            [np.zeros(len(u.texts)) if u.reference is None else errors(u.reference, u.texts) for u in self.utterances],
            np.inf,
        )

    def chosen(self, language: Floats, weight: float, bonus: float) -> Ints:
        """The place of the hypothesis that wins; the recogniser's order decides among equals."""
        winners: Ints = (self.scores + weight * language + bonus * self.words).argmax(1)
        return winners

    def made(self, places: Ints) -> Floats:
        """The word errors of these hypotheses."""
        return self.errors[np.arange(len(places)), places]


def _padded(rows: Sequence[Sequence[float] | NDArray[Any]], value: float) -> Floats:
    table = np.full((len(rows), max(map(len, rows), default=0)), value)
    for line, row in zip(table, rows):
        line[: len(row)] = row
    return table


@dataclass(frozen=True)
class System:
    """A way to choose hypotheses: its weight and bonus, what it chose, and its word error rate on test utterances."""

    name: str
    places: Ints = field(repr=False)
    weight: float | None = None
    bonus: float | None = None
    validation: float | None = None  # word error rate of the utterances that weight and bonus were tuned on
    wer: float | None = None  # None: no test utterance has a reference
    interval: Interval | None = None
    difference: float | None = None  # of the word error rates: this one minus that of the recogniser
    difference_interval: Interval | None = None

    def to_json(self) -> JsonObject:
        return {name: value for name, value in asdict(self).items() if name != "places"}


@dataclass(frozen=True)
class Rescored:
    """The result of rescoring."""

    plan: Plan
    systems: list[System]
    notes: list[str]

    def counts(self) -> dict[str, int]:
        """How many utterances there are, and how many of them have a reference."""
        test, known = _are(self.plan.splits, "test"), self.plan.lists.known
        return {
            "validation": int((~test).sum()), "validation_references": int((~test & known).sum()),
            "test": int(test.sum()), "test_references": int((test & known).sum()),
            "test_words": int(self.plan.lists.said[test & known].sum()),
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What is tried on which utterances, decided before any model is evaluated."""

    lists: Lists
    splits: list[str]
    weights: tuple[float, ...]
    bonuses: tuple[float, ...]
    notes: list[str]

    @classmethod
    def of(cls, utterances: Sequence[Hypotheses], weight: Tunable = None, bonus: Tunable = None) -> Plan:
        """Weights and bonuses to try; without a validation utterance that has a reference, the defaults."""
        lists, given, notes = Lists(utterances), {"--weight": weight, "--bonus": bonus}, list[str]()
        tuned = [option for option, value in given.items() if not isinstance(value, float | int)]
        splits = [utterance.split_by_id() if tuned else utterance.split or "test" for utterance in utterances]
        if tuned and not (_are(splits, "validation") & lists.known).any():
            asked = [option for option in tuned if given[option] == "tune"]
            if asked:
                raise UserError(
                    f"{asked[0]} tune: no validation utterance has a reference; give references to lines whose split "
                    "is 'validation' (or to all), or give a number instead of 'tune'"
                )
            defaults = {"--weight": WEIGHT, "--bonus": BONUS}
            given |= {option: defaults[option] for option in tuned}
            notes.append(
                "No validation utterance has a reference, so that nothing is tuned: "
                + " and ".join(f"{option[2:]} {defaults[option]:g}" for option in tuned)
                + (". Without a bonus short hypotheses win." if "--bonus" in tuned else ".")
            )
        tried = [
            (float(value),) if isinstance(value, float | int) else grid
            for value, grid in zip(given.values(), (WEIGHTS, BONUSES))
        ]
        if lists.known.any():
            _ = lists.errors  # now: an extra that is missing is said before models are made
        return cls(lists, splits, tried[0], tried[1], notes)

    def rescored(self, models: Mapping[str, Sequence[Floats]]) -> Rescored:
        """Rescore by the log-probabilities that each model gives the hypotheses of each utterance."""
        lists, notes = self.lists, list(self.notes)
        tuning, tested = (_are(self.splits, split) & lists.known for split in ("validation", "test"))
        systems = [System(RECOGNISER, np.zeros(len(self.splits), dtype=np.int64))]
        padded = {name: _padded(list(values), 0.0) for name, values in models.items()}
        for name, language in {UNAIDED: np.zeros_like(lists.scores), **padded}.items():
            weights = (0.0,) if name == UNAIDED else self.weights
            weight, bonus = _tuned(lists, language, tuning, weights, self.bonuses)
            systems.append(System(name, lists.chosen(language, weight, bonus), weight, bonus))
            if len(self.bonuses) > 1 and bonus in (self.bonuses[0], self.bonuses[-1]):
                notes.append(f"{name}: the bonus {bonus:g} lies at the edge of what is tried; give another by --bonus.")
        systems.append(System(ORACLE, lists.errors.argmin(1)))
        return Rescored(self, _judged(lists, systems, tuning, tested), notes)


def _are(splits: Sequence[str], split: str) -> NDArray[np.bool_]:
    return np.array([found == split for found in splits], dtype=bool)


def _tuned(
    lists: Lists, language: Floats, rows: NDArray[np.bool_], weights: Sequence[float], bonuses: Sequence[float]
) -> tuple[float, float]:
    """Weight and bonus with the fewest errors on these rows; among equals the nearest to the defaults."""
    pairs = [(weight, bonus) for weight in weights for bonus in bonuses]
    if len(pairs) == 1:
        return pairs[0]
    some = lists.errors[rows]
    tables = lists.scores[rows], language[rows], lists.words[rows]

    def cost(pair: tuple[float, float]) -> tuple[float, float, float]:
        places = (tables[0] + pair[0] * tables[1] + pair[1] * tables[2]).argmax(1)
        return float(some[np.arange(len(places)), places].sum()), abs(pair[0] - WEIGHT), abs(pair[1] - BONUS)

    return min(pairs, key=cost)


def _rate(lists: Lists, places: Ints, rows: NDArray[np.bool_]) -> float | None:
    """The word error rate of these utterances together."""
    words = lists.said[rows].sum()
    return float(lists.made(places)[rows].sum() / words) if words else None


def _judged(
    lists: Lists, systems: Sequence[System], tuning: NDArray[np.bool_], tested: NDArray[np.bool_]
) -> list[System]:
    """Word error rates with intervals: utterances are resampled, the same ones for all systems."""
    systems = [replace(system, validation=_rate(lists, system.places, tuning)) for system in systems]
    words = lists.said[tested]
    if not words.sum():
        return systems
    made = [lists.made(system.places)[tested] for system in systems]
    means = bootstrap_means(np.array([*made, words])[:, None, :])
    rates = means[:, :-1] / np.where(means[:, -1:] > 0, means[:, -1:], np.nan)
    found = [float(own.sum() / words.sum()) for own in made]
    return [
        replace(
            system,
            wer=wer,
            interval=percentile_interval(rate),
            difference=wer - found[0],
            difference_interval=percentile_interval(rate - rates[:, 0]),
        )
        for system, wer, rate in zip(systems, found, rates.T)
    ]
