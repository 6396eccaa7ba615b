"""The formula, its tuning and word error rates, on numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jiwer
import numpy as np
import pytest
from scipy import stats

from bespoke.errors import UserError
from bespoke.rescoring.interpolation import BONUSES, ORACLE, RECOGNISER, UNAIDED, WEIGHTS, Plan, Rescored, System
from bespoke.rescoring.nbest import Hypotheses
from bespoke.rescoring.wer import errors, words_of


def utterance(number: int, split: str, reference: str | None, *hypotheses: tuple[str, float]) -> Hypotheses:
    texts, scores = zip(*hypotheses)
    return Hypotheses(f"u{number}", "me", texts, scores, reference, split)


def by_name(result: Rescored, name: str) -> System:
    return next(system for system in result.systems if system.name == name)


# Of the first the language model knows better, by 2; the second it would shorten, by 3 for the last word.
FIRST = utterance(1, "test", "we sail", ("we sale", -1.0), ("we sail", -1.3))
SECOND = utterance(2, "test", "on cold seas", ("on cold seas", -2.0), ("on cold", -2.1))
LM = [np.array([-9.0, -7.0]), np.array([-12.0, -9.0])]


def test_the_formula_by_hand() -> None:
    """First: -1 - .9 = -1.9 against -1.3 - .7 = -2 at weight .1; -2.8 against -2.7 at .2.

    Second, at .2: -2 - 2.4 = -4.4 against -2.1 - 1.8 = -3.9; with a bonus of .6: -2.6 against -2.7.
    """
    for weight, bonus, wanted in ((0.1, 0.0, [0, 1]), (0.2, 0.0, [1, 1]), (0.2, 0.6, [1, 0]), (0.0, 0.0, [0, 0])):
        result = Plan.of([FIRST, SECOND], weight, bonus).rescored({"lm": LM})
        assert by_name(result, "lm").places.tolist() == wanted, (weight, bonus)
    # five words: one wrong at first; one left out of the second; none
    rates = [Plan.of([FIRST, SECOND], 0.2, bonus).rescored({"lm": LM}) for bonus in (0.0, 0.6)]
    assert [by_name(result, "lm").wer for result in rates] == pytest.approx([1 / 5, 0.0])
    assert by_name(rates[1], RECOGNISER).wer == pytest.approx(1 / 5)
    assert by_name(rates[1], "lm").difference == pytest.approx(-1 / 5)
    assert by_name(rates[0], ORACLE).wer == 0.0


def test_the_recogniser_is_its_first_hypothesis_even_if_another_has_a_higher_score() -> None:
    result = Plan.of([utterance(1, "test", "a b", ("a b", -2.0), ("a", -1.0))], 0.0, 0.0).rescored({})
    assert by_name(result, RECOGNISER).wer == 0.0
    assert by_name(result, UNAIDED).wer == 0.5


def test_word_errors_are_jiwers_and_those_of_a_hand_count() -> None:
    reference = "Well-known: it's 20 ships; OK?"
    assert words_of(reference) == ["well", "known", "it's", "20", "ships", "ok"]
    assert words_of("Don\u2019t \u201cquote\u201d, na\u00efve_one") == ["don't", "quote", "na\u00efve", "one"]
    # nothing; one word left out; "its" for "it's" and "a" added; six left out
    heard = ["well known it's 20 ships ok", "known it's 20 SHIPS ok!", "well known its 20 a ships ok", "..."]
    assert errors(reference, heard).tolist() == [0, 1, 2, 6]
    spoken = [FIRST, SECOND, utterance(3, "test", reference, *((text, 0.0) for text in heard[1:]))]
    result = Plan.of(spoken, 0.1, 0.0).rescored({})
    refs = [" ".join(words_of(each.reference or "")) for each in spoken]
    hyps = [" ".join(words_of(each.texts[0])) for each in spoken]
    assert by_name(result, RECOGNISER).wer == pytest.approx(jiwer.wer(refs, hyps)) == pytest.approx(2 / 11)


def drawn(count: int, seed: int = 0) -> tuple[list[Hypotheses], list[np.ndarray]]:
    """Utterances whose right hypothesis stands second and is told by the language model, mostly."""
    random = np.random.default_rng(seed)
    spoken, language = [], []
    for i in range(count):
        words = [f"w{j}" for j in random.integers(0, 50, random.integers(2, 9))]
        right, wrong, short = " ".join(words), " ".join(["x", *words[1:]]), " ".join(words[:-1])
        scores = -random.random(3)
        split = "validation" if i % 3 == 0 else "test"
        spoken.append(utterance(i, split, right, *zip((wrong, right, short), scores.tolist())))
        language.append(np.array([-5.0, -2.0, 0.0]) - 5.0 * len(words) + np.array([0, 0, 5.0]) + random.normal(0, 2, 3))
    return spoken, language


def test_tuning_looks_at_validation_utterances_alone() -> None:
    """Test references may be anything: weight and bonus stay. Those of validation utterances move them."""
    spoken, language = drawn(90)
    settings = []
    for changed in ("", "test", "validation"):
        told = [replace(u, reference="y") if u.split == changed else u for u in spoken]
        found = by_name(Plan.of(told).rescored({"lm": language}), "lm")
        settings.append((found.weight, found.bonus))
    assert settings[0] == settings[1] != settings[2]
    tuned = by_name(Plan.of(spoken).rescored({"lm": language}), "lm")
    validation = [place for place, u in enumerate(spoken) if u.split == "validation"]
    costs = {}
    for weight in WEIGHTS:  # all of the grid, in plain Python
        for bonus in BONUSES:
            total = 0
            for place in validation:
                one = spoken[place]
                sums = [
                    s + weight * lm + bonus * len(text.split())
                    for text, s, lm in zip(one.texts, one.scores, language[place])
                ]
                total += int(errors(one.reference, [one.texts[sums.index(max(sums))]])[0])
            costs[weight, bonus] = total
    assert costs[tuned.weight, tuned.bonus] == min(costs.values()) < costs[0.0, 0.0]
    assert tuned.validation == pytest.approx(
        min(costs.values()) / sum(len(words_of(spoken[place].reference)) for place in validation)
    )


def test_a_bonus_is_needed() -> None:
    """Every word costs 5 under the language model: at a weight of 1 the shortest hypothesis wins without a bonus."""
    spoken, language = drawn(90)
    without, tuned = (by_name(Plan.of(spoken, 1.0, b).rescored({"lm": language}), "lm") for b in (0.0, None))
    assert tuned.bonus > 0
    assert tuned.wer < without.wer


def test_intervals_are_those_of_another_bootstrap() -> None:
    spoken, language = drawn(120)
    result = Plan.of(spoken, 0.3, 1.0).rescored({"lm": language})
    system, first = by_name(result, "lm"), by_name(result, RECOGNISER)
    test = [place for place, u in enumerate(spoken) if u.split == "test"]
    words = np.array([len(words_of(spoken[place].reference)) for place in test])
    made = [result.plan.lists.made(s.places)[test] for s in (system, first)]

    def other(statistic: object, *columns: np.ndarray) -> Any:
        rng = np.random.default_rng(1)
        return stats.bootstrap(columns, statistic, paired=True, vectorized=False, method="percentile", rng=rng,
                               n_resamples=4000).confidence_interval  # fmt: skip

    wer = other(lambda e, w: e.sum() / w.sum(), made[0], words)
    change = other(lambda e, b, w: (e.sum() - b.sum()) / w.sum(), *made, words)
    assert [system.interval.low, system.interval.high] == pytest.approx([wer.low, wer.high], abs=0.01)
    assert [system.difference_interval.low, system.difference_interval.high] == pytest.approx(
        [change.low, change.high], abs=0.01
    )


def test_without_references_nothing_is_tuned() -> None:
    spoken = [replace(u, reference=None) for u in (FIRST, SECOND)]
    result = Plan.of(spoken).rescored({"lm": LM})
    system = by_name(result, "lm")
    assert (system.weight, system.bonus, system.wer) == (0.1, 0.0, None)
    assert "short hypotheses win" in result.notes[0]
    with pytest.raises(UserError, match="--bonus tune: no validation utterance has a reference"):
        Plan.of(spoken, 0.1, "tune")


def test_utterances_without_a_split_are_divided_by_their_id() -> None:
    spoken = [utterance(i, "", "a", ("a", 0.0)) for i in range(300)]
    plan = Plan.of(spoken)
    assert 70 < plan.splits.count("validation") < 130
    assert Plan.of(spoken[::-1]).splits == plan.splits[::-1]  # whatever stands beside it
    assert set(Plan.of(spoken, 0.1, 0.0).splits) == {"test"}  # nothing to tune, nothing to hold back
