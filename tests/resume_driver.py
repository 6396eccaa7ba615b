"""Runs experiments in forked children and kills them: from outside after a while, or from inside at a chosen event.

A process of its own that imports torch once and has no threads, so that it can fork. It reads a job (JSON) a line and
answers with what became of it. Events are what the run does to its folder and messages that leave clients, numbered in
order (or those of a kind); a kill "at" an event comes before it, in the middle of it, or after it.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
from benchmarks.attack.events import Events, watch_messages

from bespoke.callbacks.early_stop import EarlyStop
from bespoke.data.periods import periods
from bespoke.data.sources.registry import load_source
from bespoke.data.splits import cross_silo
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import FedAvg, FineTune
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.privacy.accountant import gaussian_epsilon
from bespoke.privacy.settings import PrivacyConfig
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from small_methods import SmallDitto
from small_worlds import changing

CONFIG = 'label = "killed"\n'
PRIVATE: dict[str, dict[str, Any]] = {
    "secret": {"noise": 1.0, "local_noise": 2.0},
    "budget": {"local_noise": 2.0, "epsilon": gaussian_epsilon(4 / 2.0**2, 1e-2)},  # four messages of each client
    "reproducible": {"noise": 1.0, "local_noise": 2.0, "reproducible": True, "adaptive": True},
}


def experiment(plan: str) -> Experiment:
    if plan == "changes":
        return _changing()
    if plan in PRIVATE:
        return _private(PRIVATE[plan], cohort=12 if plan == "budget" else 4)
    population = load_source("synthetic", clients=12, examples=10, features=3, uneven=0.8, seed=1)
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=1)
    task = Regression(Linear(3))
    early = plan == "early"  # steps too long to go on improving, and a callback that sees it
    first = Stage(FedAvg(task, lr=0.3 if early else 0.05, batch_size=4), 30 if early else 4)
    if plan == "finetune":
        last = Stage(FineTune(task, lrs=(0.1, 0.01), epochs=3, batch_size=4), 0)
    else:  # cohorts of 4 of 12: some clients meet the stateful method early, some late, some never
        last = Stage(SmallDitto(task, lr=0.05, batch_size=4), 5)
    return Experiment(
        plan, population, split, task, (first, last), "mse", seed=3, cohort=4,
        evaluate_every=1 if early else 2, sampling={"dropout": 0.2},
    )  # fmt: skip


def _private(terms: dict[str, Any], cohort: int) -> Experiment:
    """Two stages under noise; so many of twelve clients come to a round, and who is known."""
    population = load_source("synthetic", clients=12, examples=10, features=3, uneven=0.8, seed=1)
    split, task = cross_silo(population, (0.6, 0.2, 0.2), seed=1), Regression(Linear(3))
    stages = tuple(
        Stage(kind(task, lr=0.05, batch_size=4, weighting="uniform"), 3) for kind in (FedAvg, SmallDitto)
    )  # fmt: skip
    return Experiment(
        "private", population, split, task, stages, "mse", seed=3, cohort=cohort, evaluate_every=2,
        privacy=PrivacyConfig(clip=0.5, delta=1e-2, **terms),
    )  # fmt: skip


def _changing() -> Experiment:
    """Rows change after rounds 2 and 5, and clients come that were not there."""
    *earlier, last = periods(changing(), lambda rows: cross_silo(rows, (0.6, 0.2, 0.2), seed=1))
    task = Regression(Linear(2))
    return Experiment(
        "changes", last.population, last.split, task, (Stage(SmallDitto(task, lr=0.05, batch_size=4), 7),), "mse",
        seed=3, cohort=4, evaluate_every=2, earlier=tuple(earlier),
    )  # fmt: skip


def choice(workers: int) -> Choice:
    return Choice(True, 4, workers, 1, "fused", "for the tests")


def run(job: dict[str, Any]) -> None:
    folder = RunFolder.create(pathlib.Path(job["folder"]), CONFIG)
    with folder.locked():
        Run(
            experiment(job["plan"]), folder, how=choice(job["workers"]), checkpoint_seconds=job["seconds"],
            callbacks=[EarlyStop(2)] if job["plan"] == "early" else None,
        ).run()  # fmt: skip


def in_child(job: dict[str, Any]) -> None:
    # a worker process is started from this script's path: fork has not changed that
    if job.get("messages"):
        watch_messages(pathlib.Path(job["messages"]))
    events = Events(job.get("at"), job.get("when", "before"), job.get("kind"))
    events.install()
    run(job)
    if job.get("census"):
        pathlib.Path(job["census"]).write_text(json.dumps(events.seen))


def play(job: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            in_child(job)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    if job.get("delay") is not None:
        time.sleep(job["delay"])
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}


def main() -> None:
    torch.set_num_threads(1)
    # compile the descent here, once for all children
    for plan in ("ditto", "changes"):
        ready = experiment(plan)
        params = ready.task.init(0)
        with Engine(ready.population, choice(0)) as engine:
            for stage in ready.stages:
                engine.open(ClientWork(stage.method, ready.split.train), params)
                engine.round(stage.method.init_server(params), np.arange(4), 0)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
