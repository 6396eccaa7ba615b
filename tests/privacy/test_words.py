"""The vocabulary of texts under privacy: declared, paid for, or named as the reason why nothing can be promised."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.data.texts import vocabulary as texts
from bespoke.errors import UserError
from bespoke.experiment.checks import checked
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import prepare
from bespoke.privacy.release import SPOKEN, Learned, Learner, threshold

CLIENTS = 300


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four posts a client of words that everybody says; one client says zebra in each."""
    path = tmp_path_factory.mktemp("posts") / "posts.jsonl"
    posts = [{"user": f"u{c:03d}", "post": f"the cat sat {'zebra' if c == 7 else 'down'}"} for c in range(CLIENTS)]
    path.write_text("".join(json.dumps(post) + "\n" for post in posts for _ in range(4)))
    return path


def encoded(table: Path, privacy: dict[str, Any] | None, **data: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {"data": {"table": str(table), "client": "user", "text": "post", **data}}
    raw |= {"stage": [{"method": "fedavg", "rounds": 2}]}
    config = checked(raw if privacy is None else {**raw, "privacy": {"clip": 1.0, **privacy}}, "test")
    return prepare(config, load_population(config)).population.about


def test_words_that_many_clients_say_are_released(table: Path) -> None:
    about = encoded(table, {"epsilon": 20.0, "statistics": 0.5})
    assert sorted(about["words"]) == ["cat", "down", "sat", "the"]
    assert "zebra" not in json.dumps(about)
    learned = Learned.of(about, False)
    assert learned.unpaid == ()
    ((noise, delta),) = learned.releases.values()
    assert delta == pytest.approx(0.5 * CLIENTS**-1.1)
    # the four words of a client weigh 1 / 2 each: those of all but one are above the threshold of the account
    assert (CLIENTS - 1) / 2 > threshold(noise, delta, SPOKEN) > 0.5
    assert about["notes"] == ["The vocabulary has 4 entries, released with noise: many clients say each."]


def test_unpaid_public_and_declared(table: Path, tmp_path: Path) -> None:
    unpaid = Learned.of(encoded(table, {"noise": 1.0}), False).unpaid
    assert len(unpaid) == 1
    assert unpaid[0].startswith("which words are known is learned from clients without noise")
    assert "zebra" in encoded(table, None)["words"]  # four times in the training rows
    assert Learned.of(encoded(table, {"noise": 1.0, "public_schema": True}), False).unpaid == ()
    for name, content in (("w.json", '{"words": ["sat", "dog"]}'), ("w.toml", 'words = ["sat", "dog"]')):
        (tmp_path / name).write_text(content)
        about = encoded(table, {"epsilon": 8.0}, schema=str(tmp_path / name))
        assert about["words"] == ["sat", "dog"]
        assert Learned.of(about, False) == Learned()
    bad = {'{"words": []}': "is empty", '{"words": [1]}': "list of texts", '{"word": ["a"]}': "Did you mean 'words'"}
    for content, words in bad.items():
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=words):
            encoded(table, None, schema=str(tmp_path / "bad.json"))


def test_too_few_clients_release_nothing(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"user": u, "post": "a b"}) + "\n" for u in "xyz" for _ in range(4)))
    with pytest.raises(UserError, match="no word is said by enough training clients"):
        encoded(path, {"epsilon": 1.0})


def said(words_of: list[list[str]]) -> Population:
    """A client for each list, with a text of these words."""
    return texts.population(words_of, [f"{i:04d}" for i in range(len(words_of))], about={}, length=1000, vocabulary=9)


def test_no_client_moves_the_sums_by_more_than_one() -> None:
    """With one word, several, and more than count: with the client or not, what is noised differs by norm one."""
    everyone = [["a", "b"], ["a"], [f"w{i}" for i in range(3 * SPOKEN)] + ["a"] * 5]
    raw, seen = said(everyone), list[dict[str, float]]()

    class Spy(Learner):
        def _released(self, pairs: Any, weight: Any, levels: Any, limit: float, purpose: str) -> list[str]:
            who, item = pairs
            sums = np.bincount(item, weight[who], minlength=len(levels))
            seen.append(dict(zip(levels, sums.tolist())))
            return ["a"]

    whole = everything(raw)
    Spy(whole, 1.0, 1e-3, lambda shape, purpose: np.zeros(shape)).words(raw)
    for left in range(3):
        clients = np.delete(whole.clients, left)
        Spy(type(whole)(raw, clients, whole.part), 1.0, 1e-3, lambda shape, purpose: np.zeros(shape)).words(raw)
        moved = sum((seen[0][word] - seen[-1][word]) ** 2 for word in seen[0])
        assert moved == pytest.approx(1.0)
    assert seen[0]["a"] == pytest.approx(1 / math.sqrt(2) + 1 + 1 / math.sqrt(SPOKEN))


def test_rare_words_stay_below_the_threshold() -> None:
    """400 clients say 'common', ten of them 'rare': at noise 5 the first is released, the second is not."""
    raw = said([["common", *(["rare"] if i < 10 else [])] for i in range(400)])
    for seed in range(20):
        draw = np.random.default_rng(seed)
        learner = Learner(everything(raw), 5.0, 1e-6, lambda shape, purpose, d=draw: d.normal(size=shape))
        assert learner.words(raw)[0] == ["common"]
