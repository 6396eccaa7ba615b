"""Private runs killed by -9 at any event: what is accounted for is never less than what was seen.

What was seen is counted from outside: every message as it leaves a client, and every model that lay in a checkpoint.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bespoke.privacy.accountant import gaussian_epsilon
from bespoke.randomness import mix
from bespoke.runs.folder import RunFolder, read_checkpoint
from bespoke.tensors import flatten
from kills import KILLED, Driver

DELTA = 1e-2
MESSAGE, MODEL = 1 / 4, 1 / 5  # mu^2 of a message with noise 2, and of a model with noise 1 on the sum besides
STAGES, ROUNDS, SEED = 2, 3, 3  # as resume_driver has it
KEYS = {int(mix("round", SEED, s, r)): (s, r) for s in range(STAGES) for r in range(1, ROUNDS + 1)}

Models = dict[tuple[int, int], set[bytes]]


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


class Watched:
    """A run that is killed and resumed, and all that anybody could have seen of it."""

    def __init__(self, driver: Driver, place: Path, plan: str, model: float = MODEL) -> None:
        place.mkdir()
        self.driver, self.plan, self.model = driver, plan, model
        self.folder, self.trace = place / "run", place / "messages.jsonl"
        self.models: Models = defaultdict(set)
        self.kills = 0

    def run(self, **how: Any) -> bool:
        """Whether it came to its end."""
        code = self.driver.run(self.folder, self.plan, messages=str(self.trace), **how)["code"]
        assert code in (0, KILLED)
        self.kills += code == KILLED
        for path in sorted((self.folder / "checkpoints").glob("*.safetensors")):
            found = read_checkpoint(path)
            moment = found.stage, found.round
            if code == 0 and found.stage and found.round < 1:  # it begins with the last model of the stage before
                made = RunFolder(self.folder).read_log("rounds.jsonl")
                moment = found.stage - 1, max(line["round"] for line in made if line["stage"] == found.stage - 1)
            if moment[1] > 0:
                weights = (leaf.numpy().tobytes() for leaf in flatten(found.server["params"]).values())
                self.models[moment].add(b"".join(weights))
        return code == 0

    def seen(self) -> tuple[float, float]:
        """(released, messages): mu^2 of the client of which most was seen."""
        sent: Counter[str] = Counter()
        cohorts: dict[tuple[int, int], set[str]] = defaultdict(set)
        for line in map(json.loads, self.trace.read_text().splitlines()):
            sent.update(line["clients"])
            cohorts[KEYS[line["key"]]].update(line["clients"])
        released: Counter[str] = Counter()
        for moment, models in self.models.items():
            for client in cohorts[moment]:
                released[client] += len(models)
        return self.model * max(released.values()), MESSAGE * max(sent.values())

    def result(self) -> dict[str, Any]:
        found = RunFolder(self.folder).result()
        assert found is not None
        return found["privacy"]


def killed_at(events: list[str], kills: int, seed: int) -> Iterator[tuple[int, str, random.Random]]:
    draw = random.Random(seed)
    for i in range(kills):
        yield int(len(events) * (i + draw.random()) / kills), draw.choice(["before", "amid", "after"]), draw


@pytest.fixture(scope="module")
def events(driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("secret")
    assert driver.run(folder / "run", "secret", census=str(folder / "census.json"))["code"] == 0
    return json.loads((folder / "census.json").read_text())


def test_secret_noise_is_never_charged_too_little(driver: Driver, events: list[str], tmp_path: Path) -> None:
    assert {"attempt", "append", "replace"} <= set(events)
    repeated = 0
    for at, when, draw in killed_at(events, 14, seed=5):
        watched = Watched(driver, tmp_path / f"{at}-{when}", "secret")
        story = f"killed {when} event {at} ({events[at]})"
        assert not watched.run(at=at, when=when), story
        if draw.random() < 0.5:
            watched.run(at=draw.randrange(12), when=draw.choice(["before", "amid", "after"]))
        assert watched.run(), story
        rounds = RunFolder(watched.folder).read_log("rounds.jsonl")
        ledger = RunFolder(watched.folder).read_log("ledger.jsonl")
        planned = [(s, r) for s in range(STAGES) for r in range(ROUNDS + 1)]
        assert [(line["stage"], line["round"]) for line in rounds] == planned, story
        assert [(line["stage"], line["round"]) for line in ledger if "noise" in line] == [m for m in planned if m[1]]
        said, (released, messages) = watched.result(), watched.seen()
        assert said["released"]["epsilon"] >= gaussian_epsilon(released, DELTA) * (1 - 1e-9), story
        assert said["messages"]["epsilon"] >= gaussian_epsilon(messages, DELTA) * (1 - 1e-9), story
        # nor much more: a round that was begun when it was killed is charged although nothing may have been sent
        most = gaussian_epsilon(messages + watched.kills * MESSAGE, DELTA)
        assert said["messages"]["epsilon"] <= most * (1 + 1e-9), story
        assert all(len(models) == 1 for models in watched.models.values()), story  # nothing is released twice
        keys = [json.loads(line)["key"] for line in watched.trace.read_text().splitlines()]
        repeated += len(keys) > len(set(keys))
    assert repeated  # the test saw rounds that were made twice


def test_a_budget_holds_however_often_the_run_is_killed(driver: Driver, tmp_path: Path) -> None:
    """Four messages of each client are allowed: what was sent twice is paid for by a round that is not made."""
    assert driver.run(tmp_path / "whole", "budget")["code"] == 0
    whole = RunFolder(tmp_path / "whole").result()
    assert whole is not None
    assert whole["rounds"] == 4
    for kills in ([5], [2, 2, 2]):  # twelve clients, four at a time: rounds 2 and 1, of which all messages have left
        watched = Watched(driver, tmp_path / str(len(kills)), "budget", model=MESSAGE)
        for at in kills:
            assert not watched.run(at=at, kind="message", when="after")
        assert watched.run()
        said, (released, messages) = watched.result(), watched.seen()
        assert messages <= 4 * MESSAGE
        assert said["messages"]["epsilon"] == pytest.approx(gaussian_epsilon(messages, DELTA))
        assert said["released"]["epsilon"] >= gaussian_epsilon(released, DELTA) * (1 - 1e-9)
        assert said["rounds"] == 4 - len(kills)
        assert said["messages"]["epsilon"] <= said["budget"] * (1 + 1e-9)
