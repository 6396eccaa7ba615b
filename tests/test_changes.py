"""Rows that come and go: who is there in which round, and that a run is a function of data and seed all the same."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.periods import FOREVER, periods
from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source
from bespoke.data.splits import cross_device, cross_silo
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Cohort
from bespoke.methods import FedAvg
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.randomness import mix
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from small_methods import SmallDitto
from small_worlds import changing

HALVES = (0.5, 0.25, 0.25)
VECTORIZED = Choice(True, 3, 0, 1, "closed-form", "for the tests")


def test_periods_by_hand() -> None:
    x = np.arange(6, dtype=np.float32)
    since, until = np.array([1, 1, 3, 1, 6, 6]), np.array([FOREVER, 2, FOREVER, FOREVER, FOREVER, FOREVER])
    whole = Population.build({"x": x, "y": x, "since": since, "until": until}, ["a", "b", "b", "c", "d", "d"])
    found = periods(whole, cross_silo)
    assert [period.until for period in found] == [2, 5, FOREVER]
    assert [p.population.columns["x"].tolist() for p in found] == [[0, 1, 3], [0, 2, 3], [0, 2, 3, 4, 5]]
    for period in found:  # everyone has its place, also those who are not there
        assert period.population.ids == ["a", "b", "c", "d"]
        assert np.array_equal(period.population.keys, whole.keys)
    assert found[0].population.sizes().tolist() == [1, 1, 1, 0]
    assert found[0].split.train.clients.tolist() == [0, 1, 2]
    assert found[2].split.train.clients.tolist() == [0, 1, 2, 3]


def test_one_period_where_rows_have_no_rounds() -> None:
    population = load_source("synthetic", clients=5, examples=6)
    (only,) = periods(population, cross_silo)
    assert only.until == FOREVER
    assert only.population is population


def test_who_is_not_there_does_not_train_cross_device() -> None:
    first, *_, last = periods(changing(clients=40), lambda rows: cross_device(rows, (0.0, 0.3), seed=2))
    late = np.flatnonzero(first.population.sizes() == 0)
    assert set(late) & set(last.split.train.clients)
    assert set(late) & set(last.split.test.query.clients)
    assert not set(late) & set(first.split.train.clients)
    assert not set(late) & set(first.split.test.query.clients)


# -- runs --------------------------------------------------------------------------------------------------------------
def experiment(rounds: tuple[int, ...] = (7,), kind: type[FedAvg] = SmallDitto, **more: Any) -> Experiment:
    """Rows change after rounds 2 and 5; client 4 likes the opposite after the first, clients 8 and 9 come last."""
    *earlier, last = periods(changing(), lambda rows: cross_silo(rows, HALVES, seed=1))
    task = Regression(Linear(2))
    stages = tuple(Stage(kind(task, lr=0.05, batch_size=4), number) for number in rounds)
    return Experiment(
        "changes", last.population, last.split, task, stages, "mse", seed=3, cohort=4, evaluate_every=2,
        sampling={"dropout": 0.2}, earlier=tuple(earlier), **more,
    )  # fmt: skip


def run(made: Experiment, path: Path, how: Choice = VECTORIZED, **more: Any) -> dict[str, Any]:
    return Run(made, RunFolder.create(path, ""), how=how, checkpoint_seconds=0, **more).run()


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.rglob("*") if p.is_file() and p.name != "timing.jsonl"}


def lines(path: Path) -> list[dict[str, Any]]:
    return RunFolder(path).read_log("rounds.jsonl")


def test_it_is_training_on_each_periods_rows_with_private_state_kept(tmp_path: Path) -> None:
    """The same rounds made by hand: an engine for each period, private state carried over in files."""
    made = experiment()
    run(made, tmp_path / "run")
    method, params = made.stages[0].method, made.task.init(int(mix("init", 3)) & 0x7FFFFFFF)
    server, segments = method.init_server(params, made.setting(0)), list[Path]()
    number = 0
    for period in made.periods:
        with Engine(period.population, VECTORIZED) as engine:
            engine.open(ClientWork(method, period.split.train), params)
            engine.load_private(segments)
            while number < min(period.until, 7):
                number += 1
                drawn = made.sampler(0, train=period.split.train).draw(number).reported
                assert (period.population.sizes(drawn) > 0).all()
                cohort: Cohort = engine.round(server, drawn, int(mix("round", 3, 0, number))).cohort
                server = method.server_round(server, cohort)
            engine.save_private(tmp_path, str(number), only_dirty=False)
            segments = [tmp_path / f"{number}-0.safetensors"]
    found = RunFolder(tmp_path / "run").latest()
    assert found is not None
    assert torch.equal(found.server["params"]["weight"], server["params"]["weight"])


def test_the_log_says_what_a_change_did_to_whom(tmp_path: Path) -> None:
    run(experiment(kind=FedAvg), tmp_path)
    found = lines(tmp_path)
    assert [line["round"] for line in found if "change" in line] == [3, 6]  # the first round of new rows
    by_round = {line["round"]: line for line in found}
    before, after = by_round[2]["watched"], by_round[3]["change"]["watched"]
    assert set(before) == set(after)  # nobody has joined yet
    moved = [client for client in before if before[client] != after[client]]
    assert moved == ["client 4"]  # the same model: only other rows give other scores
    assert after["client 4"] > before["client 4"]
    joined = set(by_round[6]["change"]["watched"]) - set(by_round[4]["watched"])
    assert joined == {"client 8", "client 9"}
    validation = by_round[3]["change"]["validation"]["mse"]
    assert validation == pytest.approx(np.mean(list(after.values())))
    result = RunFolder(tmp_path).result()
    assert result is not None
    assert (result["clients"], result["rounds"]) == (10, 7)


def test_the_same_clients_are_watched_all_along(tmp_path: Path) -> None:
    run(experiment(watched=5), tmp_path)
    there = [set(line["watched"]) for line in lines(tmp_path) if "watched" in line]
    assert there[0] < there[-1]  # nobody is left out when others come
    assert len(there[-1]) == 5
    assert there[-1] - there[0] <= {"client 8", "client 9"}


def test_without_changes_the_log_is_as_ever(tmp_path: Path) -> None:
    run(_plain(), tmp_path)
    assert not any("watched" in line or "change" in line for line in lines(tmp_path))


def _plain() -> Experiment:
    made = experiment()
    return Experiment(
        "plain", made.population, made.split, made.task, made.stages, "mse", seed=3, cohort=4, evaluate_every=2
    )


@pytest.mark.parametrize("rounds", [(7,), (2, 5), (4, 3), (7, 0)])
def test_interrupted_anywhere_it_goes_on_to_the_same_bytes(tmp_path: Path, rounds: tuple[int, ...]) -> None:
    """Changes may fall within a stage or between two."""
    run(experiment(rounds), tmp_path / "whole")

    class Killed(Exception): ...

    made = 0

    def die(stage: int, number: int) -> None:
        nonlocal made
        made += 1
        if made == 2:  # so that each process leaves one round, and loses another
            raise Killed

    for _ in range(2 * sum(rounds)):
        made = 0
        with suppress(Killed):
            run(experiment(rounds), tmp_path / "parts", after_round=die)
            break
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    assert [name for name in whole if whole[name] != parts[name]] == []


@pytest.mark.parametrize(
    "how",
    [
        Choice(False, 1, 0, 1, "autograd", "looped"),
        Choice(True, 100, 0, 1, "func", "one chunk"),
        Choice(True, 2, 2, 1, "closed-form", "two workers"),
    ],
    ids=lambda how: how.reason,
)
def test_how_clients_are_executed_does_not_matter(tmp_path: Path, how: Choice) -> None:
    run(experiment(), tmp_path / "reference")
    run(experiment(), tmp_path / "other", how)
    for one, other in zip(lines(tmp_path / "reference"), lines(tmp_path / "other"), strict=True):
        assert one["clients"] == other["clients"]
        for point, same in ((one, other), (one.get("change", {}), other.get("change", {}))):
            assert point.get("watched", {}) == pytest.approx(same.get("watched", {}), rel=1e-4)


def test_a_stage_that_others_share_is_taken_over(tmp_path: Path) -> None:
    """The second run trains its last stage alone, and ends with the rows of the last period all the same."""
    config = {"stage": [{"rounds": 4}, {"rounds": 3}]}
    for name in ("first", "second"):
        run(experiment((4, 3), config=config), tmp_path / name, cache=tmp_path / "stages")
    assert contents(tmp_path / "first")["clients.parquet"] == contents(tmp_path / "second")["clients.parquet"]
    trained = [json.loads(line) for line in (tmp_path / "second" / "timing.jsonl").read_text().splitlines()]
    assert {line["stage"] for line in trained} == {1}


# -- experiment files --------------------------------------------------------------------------------------------------
def config(**more: Any) -> Any:
    stage = {"method": "fedavg", "rounds": 7, "lr": 0.05}
    return checked({"data": {"source": "synthetic"}, "stage": [stage], "metric": "mse", **more}, "a test")


def test_an_experiment_is_built_of_its_periods(tmp_path: Path) -> None:
    made = build(config(), changing())
    assert [period.until for period in made.periods] == [2, 5, FOREVER]
    assert len(made.split.train.clients) == 10
    assert len(made.earlier[0].split.train.clients) == 8
    folder = RunFolder.create(tmp_path, to_toml(config()))
    assert Run(made, folder, how=VECTORIZED).run()["clients"] == 10


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"stage": [{"method": "fedavg", "rounds": 5}]}, "change after round 5, and there are 5 rounds in all"),
        ({"privacy": {"clip": 1.0, "noise": 1.0}}, r"\[privacy\] accounts for clients that may come in every round"),
        ({"data": {"source": "synthetic", "standardize": "global"}}, "data.standardize = 'global'.*come and go"),
    ],
)
def test_what_does_not_go_together_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(config(**more), changing())
