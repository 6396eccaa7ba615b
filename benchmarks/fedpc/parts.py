"""The comparisons of FedPC's tables, and the analyses of their runs."""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.analysis.reopened import reopened
from bespoke.cli.console import print_error
from bespoke.cli.progress import Bars
from bespoke.errors import UserError
from bespoke.experiment.choosing import QueryScores
from bespoke.experiment.search_space import merged
from bespoke.federation.work import ClientWork
from bespoke.methods import METHODS, FedPC, FedPCFrozen
from bespoke.report.page import write_report
from bespoke.runs.evaluation import ONE_BY_ONE, examined
from bespoke.storage import write_text
from bespoke.study.comparison import Comparison

HERE = Path(__file__).parent
NUMBERS = (1, 5, 15)  # samples; all of them are the run itself
PARTS = ("rates", "known", "withheld", "seasons", "smollm2", "private")
HEADS = ("fedpc-split", "fedpc-meta")
PRIVATE = {"cohort": {"sampling": "full"}, "privacy": {"clip": 0.5, "epsilon": 8.0}}
FEWER = {"fedpc": {"tune_steps": 5}}  # of the 15 updates at the end, where the model is large


def comparison(part: str, asked: argparse.Namespace) -> Comparison:
    """A part as a comparison; all parts but the rates take the rates that were chosen."""
    command = f"python -m benchmarks.fedpc {part}"
    found = Comparison.read(HERE / "tables.toml", asked.folder / part, command=command)
    options, base = dict(found.base["data"]["options"]), found.base
    if part not in ("rates", "known"):
        found.methods, found.entries = tuple(name for name in found.methods if name in METHODS), {}
    if part == "rates":
        for name in HEADS:  # they come to fit the training texts too well, but later
            found.knobs[name] = {**found.knobs[name], "rounds": found.rounds}
        found.tune, found.seeds, found.rounds = True, (100,), 4
        options["most"], base = 150, {**base, "cohort": {"size": 10}}
    elif part == "withheld":
        base = {**base, "split": {"protocol": "cross-device"}}
    elif part == "seasons":
        found.methods, options["contexts"] = ("fedpc", "shared-prefix"), "season"
    elif part == "smollm2":
        found.methods, found.seeds, found.rounds = ("fedpc", "shared-prefix"), (0,), 4
        options["most"] = 60
        base = {**base, "cohort": {"size": 10}, "model": {**base["model"], "pretrained": "smollm2"}}
    elif part == "private":
        found.methods, found.seeds, base = ("fedpc", "shared-prefix"), (0,), {**base, **PRIVATE}
    options["most"] = asked.most or options["most"]
    if asked.pretrained:
        base = {**base, "model": {**base["model"], "pretrained": asked.pretrained}}
    found.base = {**base, "data": {**base["data"], "options": options}}
    found.seeds = found.seeds[: asked.seeds] if asked.seeds else found.seeds
    found.rounds, found.jobs = asked.rounds or found.rounds, asked.jobs
    found.grid = {name: grid for name, grid in found.grid.items() if name in found.methods}
    if part != "rates":
        for name, chosen in rates(asked.folder, found.methods).items():
            found.knobs[name] = merged(found.knobs.get(name, {}), chosen)
    if part == "smollm2":
        for name, knobs in FEWER.items():
            found.knobs[name] = merged(found.knobs.get(name, {}), knobs)
    return found


def rates(folder: Path, methods: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """The rates that the part `rates` has chosen."""
    place = folder / "rates" / "compare.json"
    if not place.exists():
        raise UserError(f"there is no {place}: learning rates come first: python -m benchmarks.fedpc rates")
    known = {entry["label"]: entry["chosen"] for entry in json.loads(place.read_text())["methods"]}
    if absent := [name for name in methods if name not in known]:
        raise UserError(f"{place} has no rates of {absent[0]}: remove its folder, and python -m benchmarks.fedpc rates")
    return {name: known[name] for name in methods}


def run(part: str, asked: argparse.Namespace) -> None:
    """Run a part and analyze it; what is finished is kept."""
    made = comparison(part, asked)
    with Bars(f"FedPC: {part}") as bars, bars.stopping() as stop:
        made.progress, made.stop = bars, stop
        folder = made.run()
    tasks = analyses(part, made)
    with ProcessPoolExecutor(max(min(asked.jobs, len(tasks)), 1), get_context("spawn")) as pool:
        for task, done in {task: pool.submit(analyzed, *task) for task in tasks}.items():
            done.result()
            print_error(f"{part}: {task[0].name} analyzed")
    write_report([folder], folder / "report.html")


def analyses(part: str, made: Comparison) -> list[tuple[Path, Wanted, bool]]:
    """For each run what is asked of it, and whether FedPC (Frozen) is to be made of it."""
    if part in ("rates", "private"):
        return []
    found = []
    tables = part in ("known", "withheld")
    for seed, name in itertools.product(made.seeds, made.methods):
        of_paper = name in METHODS and name != "shared-prefix"
        numbers = NUMBERS if tables and of_paper else ()
        # of other methods one seed: what is asked of users and contexts is asked of FedPC
        crossed = name == "fedpc" or (part == "known" and of_paper and seed == made.seeds[0])
        if numbers or crossed:
            path = made.folder / "runs" / f"{name}-seed{seed}"
            found.append((path, Wanted(numbers=numbers, crossed=crossed), tables and name == "fedpc"))
    return found


def analyzed(path: Path, wanted: Wanted, frozen: bool) -> None:
    """Analyze a run, in a process of its own and with one thread, as it was trained."""
    torch.set_num_threads(1)
    Analyses((path,), wanted, lenient=True).run()
    if frozen:
        untuned(path)


def untuned(path: Path) -> None:
    """FedPC (Frozen) from a run of FedPC, whose training is the same: its embeddings as training left them."""
    place = path / "untuned.json"
    if place.exists():
        return
    with reopened(path) as run:
        method = run.method
        assert isinstance(method, FedPC)
        frozen = FedPCFrozen(**{f.name: getattr(method, f.name) for f in fields(FedPCFrozen) if f.init})
        run.engine.open(ClientWork(frozen, run.experiment.split.train, (), run.setting), run.start)
        run.engine.load_private(run.segments)
        split, seed = run.experiment.split.test, run.experiment.seed
        sums = examined(run.engine, run.server, run.clients, split.support, {"query": split.query}, seed, ONE_BY_ONE)
        values = QueryScores(run.clients, sums["query"]).values(run.experiment.metric)[:, 1]
        ids = [run.experiment.population.ids[client] for client in run.clients]
    write_text(place, json.dumps(dict(zip(ids, np.round(values, 6).tolist())), indent=1))
