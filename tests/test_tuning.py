"""Tuning: what is tried and in which order, which is best, resuming, several runs at a time, presets, Optuna."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import bespoke as library
from bespoke.callbacks.callback import EndEvent
from bespoke.data.splits import Query
from bespoke.errors import UserError, WorkerFailed
from bespoke.experiment import presets
from bespoke.experiment.checks import checked
from bespoke.experiment.presets import Preset
from bespoke.experiment.reading import read_config
from bespoke.experiment.search_space import Range, applied, grid, merged, probes, read_space
from bespoke.methods import METHODS
from bespoke.study import comparison, scheduler, tuning
from bespoke.study.comparison import Comparison
from bespoke.study.job import Job
from bespoke.study.run_pool import RunPool
from bespoke.study.tuning import Trial, best, folder_name
from command import bespoke, plain_table, refused, write_csv

EXPERIMENT = """
label = "two stages"
seed = 3
[data]
table = "plain.csv"
client = "client"
target = "y"
[[stage]]
method = "fedavg"
rounds = {rounds}
batch_size = 4
[[stage]]
method = "finetune"
epochs = 2
[tune.space]
fedavg.lr = {lrs}
finetune.part = ["all", "last"]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "plain.csv", plain_table(12, 20))
    write(2)
    return tmp_path


def write(rounds: int, lrs: tuple[float, ...] = (0.001, 0.1)) -> None:
    Path("exp.toml").write_text(EXPERIMENT.format(rounds=rounds, lrs=list(lrs)))


def trial(number: int, *values: float | None) -> Trial:
    job = Job(Path(str(number)), None)  # type: ignore[arg-type]
    return Trial(number, {"n": number}, [job] * len(values), list(values))


# What is tried


def test_a_grid_is_every_combination_the_last_knob_fastest() -> None:
    space = read_space({"fedavg": {"lr": [1, 2], "server": {"lr": [3, 4]}}, "cohort": {"size": [5]}}, "space")
    assert list(space) == ["fedavg.lr", "fedavg.server.lr", "cohort.size"]
    assert [tuple(s.values()) for s in grid(space)] == [(1, 3, 5), (1, 4, 5), (2, 3, 5), (2, 4, 5)]
    assert len(list(probes(space))) == 5
    ranged = read_space({"lr": {"low": 0.1, "high": 1.0, "log": True}, "k": {"low": 1, "high": 4}}, "space")
    assert ranged == {"lr": Range(0.1, 1.0, True), "k": Range(1, 4)}
    assert ranged["k"].whole  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"lr is a range.*--optuna"):
        grid(ranged)


def test_a_setting_becomes_part_of_the_experiment() -> None:
    raw = {"stage": [{"method": "fedavg", "server": "adam"}, {"method": "local"}, {"method": "local"}]}
    made = applied(raw, {"fedavg.server.lr": 0.1, "1.epochs": 3, "cohort.size": 7, "model.name": "mlp"})
    assert made["stage"] == [
        {"method": "fedavg", "server": {"name": "adam", "lr": 0.1}}, {"method": "local", "epochs": 3},
        {"method": "local"},
    ]  # fmt: skip
    assert (made["cohort"], made["model"]) == ({"size": 7}, {"name": "mlp"})
    assert raw["stage"][0]["server"] == "adam"  # the original is as it was
    with pytest.raises(UserError, match=r"several stages.*\(1, 2\)"):
        applied(raw, {"local.epochs": 3})
    with pytest.raises(UserError, match="unknown stage or table 'split'"):
        applied(raw, {"split.adapt": 0.3})
    assert merged({"a": {"b": 1}}, {"a.c": 2}) == {"a": {"b": 1, "c": 2}}


def test_the_best_is_the_mean_over_seeds_ties_keep_the_earlier_divergence_loses() -> None:
    trials = [trial(0, 3.0, 3.0), trial(1, 1.0, 2.0), trial(2, 2.0, 1.0), trial(3, 0.5, None), trial(4, None, None)]
    assert best(trials, True, "x").number == 1
    assert best(trials, False, "x").number == 0
    assert [t.state for t in trials] == ["finished"] * 3 + ["diverged"] * 2
    with pytest.raises(UserError, match="no setting of 1 tried"):
        best(trials[-1:], True, "x")


def test_folders_are_named_by_the_setting() -> None:
    assert folder_name("fedavg", lr=0.1) == "fedavg-lr0.1"
    odd = [folder_name(lrs=[0.1, 1]), folder_name(lrs="[0.1__1]"), folder_name(text="../" * 90)]
    assert len(set(odd)) == 3
    assert all(re.fullmatch(r"[\w.+= -]{1,100}", name) for name in odd)


# A grid


def test_tune_writes_the_best_experiment(here: Path) -> None:
    told = bespoke("tune", "exp.toml", "--freeze", "mine")
    assert told.code == 0, told.err
    assert "Best: fedavg.lr = 0.1, finetune.part = all" in told.out  # the two parts are equal in a linear model
    assert "bespoke run runs/tune-exp/best.toml" in told.out
    about = json.loads(Path("runs/tune-exp/tune.json").read_text())
    assert [t["setting"]["fedavg.lr"] for t in about["trials"]] == [0.001, 0.001, 0.1, 0.1]
    assert about["best"]["number"] == 2
    table = pd.read_parquet("runs/tune-exp/trials.parquet")
    assert list(table["fedavg.lr"]) == [0.001, 0.001, 0.1, 0.1]
    assert table["validation"].tolist() == [t["validation"] for t in about["trials"]]
    found = read_config(Path("runs/tune-exp/best.toml"))
    assert found.stage[0]["lr"] == 0.1
    assert found.seed == 3
    assert bespoke("run", "runs/tune-exp/best.toml").code == 0
    # the shared stage of two trials was trained once: theirs and that of the other learning rate
    assert len(list(Path("runs/tune-exp/stages").iterdir())) == 2
    assert bespoke("run", "exp.toml", "--set", "stage.0.rounds=1").code == 0  # which does not mind [tune]

    frozen = Preset.read("mine")
    assert frozen.best == {"fedavg": {"lr": 0.1}, "finetune": {"part": "all"}}
    assert frozen.grid == {"fedavg": {"lr": [0.001, 0.1]}, "finetune": {"part": ["all", "last"]}}
    assert frozen.knobs["fedavg"] == {"batch_size": 4}
    data = '[data]\ntable = "plain.csv"\nclient = "client"\ntarget = "y"\n'
    Path("c.toml").write_text(f'{data}[compare]\npreset = "mine"\nmethods = ["finetune"]\ntune = false\nseeds = 1\n')
    assert bespoke("compare", "c.toml", "--json").code == 0
    stages = read_config(Path("runs/compare-c/runs/finetune-seed0/config.toml")).stage
    assert stages[0] == {"method": "fedavg", "rounds": 2, "batch_size": 4, "lr": 0.1}
    assert "mine" in bespoke("tune", "--presets").out
    refused(bespoke("tune", "exp.toml", "--freeze", "mine"), "presets/mine.toml", "exists already")


def test_a_trial_that_diverges_loses(here: Path) -> None:
    # one step a round: the update is finite (else it is excluded), the squared error is not
    wild = {"fedavg": {"lr": [1e22, 0.1], "batch_size": [1000]}, "finetune": {"lrs": [[1e-9]]}}
    about = library.tune("exp.toml", "out", space=wild)
    assert [t["state"] for t in about["trials"]] == ["diverged", "finished"]
    assert about["best"]["setting"]["fedavg.lr"] == 0.1
    with pytest.raises(UserError, match="no setting of 1 tried has a finite score"):
        library.tune("exp.toml", "none", space={**wild, "fedavg": {"lr": [1e22], "batch_size": [1000]}})


def test_several_seeds(here: Path) -> None:
    about = library.tune("exp.toml", "out", space={"fedavg": {"lr": [0.01, 0.1]}}, seeds=[3, 8])
    for entry in about["trials"]:
        assert entry["validation"] == pytest.approx(sum(entry["values"]) / 2)
        assert len(set(entry["values"])) == 2
        assert entry["folders"][1].endswith("-seed8")
    single = library.tune("exp.toml", "one", space={"fedavg": {"lr": [0.01, 0.1]}})
    assert [t["values"][0] for t in single["trials"]] == [t["values"][0] for t in about["trials"]]


def test_query_rows_are_never_looked_at(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("query rows were fetched")

    monkeypatch.setattr(Query, "of", forbidden)
    assert library.tune("exp.toml", "out")["best"]["validation"] > 0
    write(2)
    Path("exp.toml").write_text(Path("exp.toml").read_text().replace("seed = 3", 'split.protocol = "cross-device"'))
    assert library.tune("exp.toml", "device")["best"]["validation"] > 0
    assert library.tune("exp.toml", "search", optuna=True, trials=2)["best"]["validation"] > 0
    with pytest.raises(AssertionError, match="query rows"):
        library.run("exp.toml", "run")


# Bad input


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ("fedavg.lrr = [1.0]", ("'lrr'", "'lr'")),
        ("fedavg.lr = [-1.0]", ("lr = -1.0", "greater than 0")),
        ("fedavg.lr = 0.1", ("fedavg.lr = 0.1", "list the values")),
        ("fedavg.lr = []", ("fedavg.lr is empty",)),
        ("fedavg = [1]", ("Name a knob",)),
        ("fedavgg.lr = [1.0]", ("'fedavgg'", "'fedavg'")),
        ("data.source = ['exam']", ("'data'", "cohort, fedavg, finetune, model, privacy, transform")),
        ("fedavg.lr = {low = 0.1, high = 1.0}", ("a range", "--optuna")),
        ("fedavg.lr = {low = 1.0, high = 0.1}", ("low below high",)),
        ("fedavg.lr = {low = 1.0, hihg = 2.0}", ("'hihg'", "'high'")),
        ("fedavg.lr = {low = 0.0, high = 1.0, log = true}", ("above zero",)),
    ],
)
def test_bad_spaces(here: Path, monkeypatch: pytest.MonkeyPatch, space: str, words: tuple[str, ...]) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("the data were loaded first")

    monkeypatch.setattr(tuning, "load_population", forbidden)
    Path("space.toml").write_text(f"[space]\n{space}\n")
    refused(bespoke("tune", "exp.toml", "--space", "space.toml"), *words)
    assert not Path("runs").exists()


def test_bad_tuning(here: Path) -> None:
    refused(bespoke("tune"), "which experiment")
    refused(bespoke("tune", "none.toml"), "none.toml")
    refused(bespoke("tune", "exp.toml", "--preset", "motley-schol"), "'motley-schol'", "'motley-school'")
    refused(bespoke("tune", "exp.toml", "--trials", 3), "--trials 3", "--optuna")
    refused(bespoke("tune", "exp.toml", "--jobs", 0), "--jobs")
    refused(bespoke("tune", "exp.toml", "--freeze", "a b"), "'a b'")
    refused(bespoke("tune", "exp.toml", "--jobs", 2, "--set", "engine.workers=2"), "--jobs", "engine.workers = 2")
    refused(bespoke("tune", "exp.toml", "--set", "tune.seeds=0"), "seeds = 0", "one or more")
    refused(bespoke("tune", "exp.toml", "--set", "tune.pruner=best"), "'best'", "median")
    for wrong in ("[1]", "all"):
        refused(bespoke("tune", "exp.toml", "--set", f"tune={wrong}"), "exp.toml: tune = ", "table")
    shutil.rmtree("runs")
    assert bespoke("tune", "exp.toml").code == 0
    refused(bespoke("tune", "exp.toml", "--out", "runs/tune-exp"), "--resume")
    refused(bespoke("tune", "exp.toml", "--resume", "--set", "stage.0.rounds=3"), "another experiment, space or seeds")
    Path("local.toml").write_text(Path("exp.toml").read_text().split("[[stage]]")[0] + '[[stage]]\nmethod = "local"\n')
    refused(bespoke("tune", "local.toml"), "what is to be tried", "[tune.space.local]")
    Path("bad.toml").write_text('title = "x"\ngridd = {}\n')
    refused(bespoke("tune", "exp.toml", "--preset", "./bad.toml"), "'gridd'", "'grid'")


def test_a_wrong_knob_of_a_comparison_is_told_before_the_data_are_loaded(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("the data were loaded first")

    monkeypatch.setattr(comparison, "load_population", forbidden)
    data = '[data]\ntable = "plain.csv"\nclient = "client"\ntarget = "y"\n[compare]\nmethods = ["finetune"]\n'
    for line, words in (
        ("knobs = {fedavg = {lrr = 1.0}}", ("'lrr'", "'lr'")),
        ("grid = {finetune = {epochs = [1, 0]}}", ("epochs = 0", "greater than or equal to 1")),
        ("grid = {fedavg = {server.name = ['sgd', 'adm']}}", ("'adm'", "'adam'")),
        ("preset = 'none'", ("'none'", "motley-school")),
        ("tune_seeds = 'some'", ("tune_seeds = 'some'",)),
    ):
        Path("c.toml").write_text(f"{data}{line}\n")
        refused(bespoke("compare", "c.toml"), *words)


# Presets


@pytest.mark.parametrize("name", sorted(path.stem for path in presets.HERE.glob("*.toml")))
def test_presets_name_real_knobs(name: str) -> None:
    preset = Preset.read(name)
    paper, methods = ("Motley", {"fedavg", "finetune", "local", "ensemble", "hypcluster", "knn-per"})
    if not name.startswith("motley"):
        paper, methods = ("Group Personalized", {"fedavg", "finetune", "group-fl", "group-perfl"})
    assert paper in preset.source
    assert methods <= set(preset.methods())
    rounds = preset.rounds or 1
    for method in preset.methods():
        if method not in METHODS:
            continue
        stage = {"method": method, **({"rounds": rounds} if METHODS[method].trains else {})}
        base = {"data": {"source": "exam"}, **preset.experiment}
        fixed = presets.joined(stage, preset.knobs.get(method, {}))
        for values in [{}, *probes(read_space(preset.grid.get(method, {}), name))]:
            checked({**base, "stage": [merged(fixed, values)]}, f"{name}: {method}")
        checked({**base, "stage": [presets.joined(fixed, preset.best.get(method, {}))]}, f"{name}: {method}, best")
        # what was found best is among what was tried
        tried = read_space(preset.grid.get(method, {}), name)
        for knob, value in preset.best.get(method, {}).items():
            if knob in tried:
                assert value in tried[knob], f"{name}: {method}.{knob}"  # type: ignore[operator]
            elif knob in ("lrs", "mix"):
                assert set(value) <= set(preset.knobs[method][knob])


def test_the_preset_of_group_personalized_fl_is_section_5_2() -> None:
    """Batch 8, one local epoch at rate 1, FedAdam at 0.001, five epochs of personalization at 0.001 to 1."""
    preset = Preset.read("group-personalized-fl")
    for method in ("fedavg", "group-fl"):
        knobs = preset.knobs[method]
        assert (knobs["batch_size"], knobs["epochs"], knobs["lr"], knobs["server"]["lr"]) == (8, 1, 1.0, 0.001)
        assert (knobs["server"]["name"], knobs["server"]["convention"]) == ("adam", "torch")
    for method in ("finetune", "group-perfl"):
        assert preset.knobs[method] == {"batch_size": 8, "epochs": 5, "lrs": [0.001, 0.01, 0.1, 1.0]}
    assert preset.experiment == {"cohort": {"size": 100}, "model": {"name": "char-lstm"}}


@pytest.mark.parametrize(
    ("name", "warm", "rounds"),
    [
        ("emnist", 100, 1500), ("stackoverflow", 100, 1500), ("landmarks", 8000, 30000), ("ted", 100, 1500),
        ("school", 100, 401), ("vehicle", 100, 401), ("adni", 20, 50),
    ],
)  # fmt: skip
def test_presets_say_the_papers_warm_start(here: Path, name: str, warm: int, rounds: int) -> None:
    """Appendix C: num_warmstart_fedavg_rounds of devices, a fifth of the rounds of silos, 20 of 70 of ADNI."""
    methods = '["hypcluster"]' if name == "adni" else '["hypcluster", "hypcluster-cold"]'
    table = f'[compare]\npreset = "motley-{name}"\nmethods = {methods}\ntune = false\n'
    Path("c.toml").write_text(f'[data]\nsource = "exam"\n{table}')
    made = Comparison.read(Path("c.toml"), Path("out"))
    made.plan.check()
    first, then = made.plan.stages("hypcluster", {})
    assert (first["method"], first["rounds"], then["rounds"]) == ("ensemble", warm, rounds)
    assert first["k"] == then["k"]
    if name != "adni":
        assert [stage["method"] for stage in made.plan.stages("hypcluster-cold", {})] == ["hypcluster"]


def test_a_preset_gives_what_the_file_does_not(here: Path) -> None:
    compare = '[compare]\npreset = "motley-school"\nmethods = ["finetune"]\nrounds = 3\n[compare.knobs.fedavg]\n'
    Path("c.toml").write_text(f'[data]\nsource = "school"\n[cohort]\nsize = 5\n{compare}batch_size = 8\n')
    made = Comparison.read(Path("c.toml"), Path("out"))
    assert made.rounds == 3
    assert made.base["cohort"] == {"size": 5}
    assert made.base["metric"] == "half_mse"
    assert made.knobs["fedavg"]["batch_size"] == 8
    assert made.knobs["fedavg"]["drop_last"]
    assert len(grid(made.plan.space("fedavg"))) == 25
    Path("c.toml").write_text(Path("c.toml").read_text().replace("rounds = 3", "tune = false"))
    fixed = Comparison.read(Path("c.toml"), Path("out"))
    assert fixed.rounds == 501
    assert fixed.knobs["local"]["lrs"] == [0.01]
    assert fixed.plan.space("fedavg") == {}


# Several at a time


def results(folder: Path) -> dict[str, float]:
    return {p.parent.name: json.loads(p.read_text())["validation"] for p in folder.glob("tuning/*/result.json")}


def test_side_by_side_as_one_after_the_other(here: Path) -> None:
    write(30, (0.001, 0.01, 0.1))
    told = [bespoke("tune", "exp.toml", "--jobs", jobs, "--out", f"jobs{jobs}", "--json") for jobs in (1, 2)]
    assert [t.code for t in told] == [0, 0], told[1].err
    assert told[1].err == ""
    alone, beside = results(Path("jobs1")), results(Path("jobs2"))
    assert alone == pytest.approx(beside, rel=1e-6)
    assert len(alone) == 6
    assert len(list(Path("jobs2/stages").iterdir())) == 3  # two runs that start from the same stage: trained once
    assert json.loads(told[0].out)["best"] == json.loads(told[1].out)["best"] | {
        "validation": pytest.approx(alone[Path(json.loads(told[0].out)["best"]["folders"][0]).name], rel=1e-6),
        "values": [pytest.approx(v, rel=1e-6) for v in json.loads(told[0].out)["best"]["values"]],
    }
    assert "2 runs at a time" in json.loads(told[1].out)["engine"]


def test_what_goes_wrong_in_a_process_is_told_here(here: Path) -> None:
    Path("out/tuning").mkdir(parents=True)
    for lr in (0.001, 0.1):
        Path(f"out/tuning/{folder_name(**{'fedavg.lr': lr, 'finetune.part': 'last'})}").write_text("in the way")
    with pytest.raises(UserError, match=r"partlast: .* a file of that name is in the way"):
        library.tune("exp.toml", "out", jobs=2)
    assert results(Path("out")).keys() <= {
        folder_name(**{"fedavg.lr": v, "finetune.part": "all"}) for v in (0.001, 0.1)
    }


def test_a_process_that_dies(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bespoke.study import run_process

    start = run_process.RunProcess.start

    def then_kill(self: Any, *arguments: Any) -> None:
        start(self, *arguments)
        self.child.process.kill()

    monkeypatch.setattr(run_process.RunProcess, "start", then_kill)
    with pytest.raises(WorkerFailed, match=r"was killed \(signal 9, SIGKILL\), as .* runs out; try fewer --jobs"):
        library.tune("exp.toml", "out", jobs=2)


def test_a_run_waits_for_the_stage_it_starts_from(tmp_path: Path) -> None:
    base = {"data": {"source": "exam"}}

    def job(name: str, *stages: dict[str, Any]) -> Job:
        return Job(tmp_path / name, checked({**base, "label": name, "stage": list(stages)}, name))

    first, tuned = {"method": "fedavg", "rounds": 2}, {"method": "finetune"}
    fedavg, finetune, other = job("a", first), job("b", first, tuned), job("c", {**first, "lr": 0.5}, tuned)
    assert finetune.waits_for(fedavg, tmp_path)
    assert finetune.waits_for(finetune, tmp_path)
    assert not fedavg.waits_for(finetune, tmp_path)  # a last stage is never taken from elsewhere
    assert not other.waits_for(fedavg, tmp_path)
    (tmp_path / fedavg.stages[0]).mkdir()
    (tmp_path / fedavg.stages[0] / "whole").touch()
    assert not finetune.waits_for(fedavg, tmp_path)


def test_short_work_is_done_before_processes_would_be_up(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RunPool] = []
    monkeypatch.setattr(scheduler, "START_SECONDS", 600.0)
    monkeypatch.setattr(RunPool, "_start", started.append)
    assert library.tune("exp.toml", "out", jobs=None)["best"]["validation"] > 0
    assert not started


def test_a_pool_starts_in_the_background_and_ends_its_processes(tmp_path: Path) -> None:
    rows = {name: (np.zeros((4, 2)), np.zeros(4)) for name in ("a", "b")}
    pool = RunPool(library.population(rows, task="regression"), tmp_path / "stages", 2, ())
    try:
        pool.start(after=600)
        pool.postpone()  # the work was short
        assert not pool.processes
        assert not pool.ready
        pool.start()
        deadline = time.monotonic() + 300
        while not pool.ready:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        before = list(pool.processes)
        assert pool.started() == before  # no further ones
        assert len(before) == 2
        pool.postpone()  # too late: nothing happens
        assert pool.ready
    finally:
        pool.close()
    assert not any(process.child.process.is_alive() for process in before)
    assert not pool.processes


# Interrupted


def process(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bespoke", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(Path(library.__file__).parents[1])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finished(folder: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(folder).glob("tuning/*/result.json")}


def until_some_are_finished(running: subprocess.Popen[str], folder: str) -> None:
    deadline = time.monotonic() + 120
    while len(finished(folder)) < 2:
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize(("jobs", "number"), [(2, signal.SIGKILL), (2, signal.SIGINT)])
def test_interrupted_tuning_repeats_nothing(here: Path, jobs: int, number: int) -> None:
    write(600, (0.001, 0.01, 0.1))
    running = process("tune", "exp.toml", "--jobs", jobs, "--out", "out")
    until_some_are_finished(running, "out")
    running.send_signal(number)
    _, said = running.communicate(timeout=60)
    before = finished("out")
    assert 2 <= len(before) < 6
    if number == signal.SIGINT:
        assert running.returncode == 130
        assert "Traceback" not in said
        again = re.search(r"go on with: bespoke (.*)", said)
        assert again
        told = bespoke(*shlex.split(again[1]))
    else:
        time.sleep(0.5)  # its processes see that it is gone
        told = bespoke("tune", "exp.toml", "--out", "out", "--resume")
    assert told.code == 0, told.err
    after = finished("out")
    assert len(after) == 6
    assert {path: after[path] for path in before} == before
    assert bespoke("tune", "exp.toml", "--jobs", 1, "--out", "whole").code == 0
    assert results(Path("out")) == pytest.approx(results(Path("whole")), rel=1e-6)


# Optuna

SPACE = {"fedavg": {"lr": {"low": 0.0001, "high": 0.3, "log": True}, "batch_size": {"low": 2, "high": 16}}}


def settings_of(about: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry["setting"] for entry in about["trials"]]


def test_optuna_searches_prunes_and_resumes(here: Path) -> None:
    write(40)
    asked: dict[str, Any] = {"space": SPACE, "optuna": True}
    whole = library.tune("exp.toml", "whole", trials=14, **asked)
    states = [entry["state"] for entry in whole["trials"]]
    assert len(states) == 14
    assert "pruned" in states[5:]
    assert states[:5] == ["finished"] * 5
    pruned = whole["trials"][states.index("pruned")]
    log = (Path("whole") / pruned["folders"][0] / "rounds.jsonl").read_text().splitlines()
    assert len(log) < 41  # it was given up on the way
    assert all(
        2 <= s["fedavg.batch_size"] <= 16 and isinstance(s["fedavg.batch_size"], int) for s in settings_of(whole)
    )
    assert whole["best"]["validation"] == min(t["validation"] for t in whole["trials"] if t["validation"] is not None)

    part = library.tune("exp.toml", "part", trials=6, **asked)
    assert settings_of(part) == settings_of(whole)[:6]
    kept = finished("part")
    rest = library.tune("exp.toml", "part", trials=14, **asked)
    assert rest["trials"] == whole["trials"]  # the same settings, as if it had not been interrupted
    assert {path: finished("part")[path] for path in kept} == kept


def test_an_interrupted_trial_of_a_study_goes_on(here: Path) -> None:
    write(600)
    Path("space.toml").write_text("optuna = true\npruner = 'none'\ntrials = 5\n[space]\nfedavg.lr = [0.01, 0.1]\n")
    running = process("tune", "exp.toml", "--space", "space.toml", "--out", "out", "--jobs", 1)
    until_some_are_finished(running, "out")
    running.kill()
    running.communicate()
    before = finished("out")
    told = bespoke("tune", "exp.toml", "--space", "space.toml", "--out", "out", "--resume", "--json")
    assert told.code == 0, told.err
    about = json.loads(told.out)
    assert [t["number"] for t in about["trials"]] == list(range(5))
    assert {path: finished("out")[path] for path in before} == before
    assert len(list(Path("out/tuning").iterdir())) == 5
    straight = library.tune(
        "exp.toml", "whole", space={"fedavg": {"lr": [0.01, 0.1]}}, optuna=True, trials=5, pruner="none"
    )
    assert straight["trials"] == about["trials"]


def test_optuna_side_by_side_with_seeds_and_hyperband(here: Path) -> None:
    class Ends(library.Callback):
        """Gets the ends of runs in other processes."""

        def __init__(self) -> None:
            self.ends: dict[str, EndEvent] = {}

        def on_end(self, event: EndEvent) -> None:
            self.ends[event.run] = event

    write(20)
    ends = Ends()
    about = library.tune(
        "exp.toml", "out", space=SPACE, optuna=True, trials=8, seeds=2, pruner="hyperband", jobs=2, callbacks=[ends]
    )  # fmt: skip
    assert len(about["trials"]) == 8
    for entry in about["trials"]:
        assert len(entry["values"]) == 2 or entry["state"] == "pruned"
        seen = [ends.ends[folder] for folder in entry["folders"] if folder in ends.ends]
        assert [end.result["validation"] for end in seen] == entry["values"] or entry["state"] == "pruned"
        assert all(end.scores == {} for end in seen)  # a tuning run tests nobody
    assert ends.ends.keys() == {f"tuning/{name}" for name in results(Path("out"))}
    assert Path("out/study.db").exists()


def test_without_optuna_the_extra_is_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    refused(bespoke("tune", "exp.toml", "--optuna"), "'optuna'", "bespoke-fl[tune]")


def test_a_damaged_study(here: Path) -> None:
    asked = ("tune", "exp.toml", "--optuna", "--trials", 2)
    assert bespoke(*asked).code == 0
    Path("runs/tune-exp/study.db").write_text("rubbish " * 1000)
    refused(bespoke(*asked, "--resume"), "study.db", "damaged")


# Comparisons


def test_a_comparison_side_by_side_and_tuned_over_seeds(here: Path) -> None:
    columns = {"client": "client", "target": "y"}
    base = {"data": {"table": "plain.csv", **columns}}

    def made(folder: str, jobs: int, **more: Any) -> dict[str, Any]:
        grids = {"fedavg": {"lr": [0.01, 0.1]}}
        Comparison(base, Path(folder), ("fedavg", "finetune"), (4, 5), 20, grid=grids, jobs=jobs, **more).run()
        return json.loads(Path(folder, "compare.json").read_text())

    alone, beside = made("alone", 1), made("beside", 2)
    names = sorted(path.name for path in Path("alone/tuning").iterdir())
    assert names == ["fedavg-lr0.01", "fedavg-lr0.1"]
    for name, seed in itertools.product(("fedavg", "finetune"), (4, 5)):
        ours, theirs = (library.RunFolder(Path(f, "runs", f"{name}-seed{seed}")).result() for f in ("alone", "beside"))
        assert ours
        assert theirs
        assert ours["query"] == pytest.approx(theirs["query"], rel=1e-6)
    tried, again = alone["methods"][0]["tuning"], beside["methods"][0]["tuning"]
    assert [t["validation"] for t in tried] == pytest.approx([t["validation"] for t in again], rel=1e-6)
    both = made("both", 1, tune_seeds=(4, 5))["methods"][0]["tuning"]
    assert [t["values"][0] for t in both] == [t["validation"] for t in tried]
    assert both[0]["validation"] == pytest.approx(sum(both[0]["values"]) / 2)
    assert os.path.isdir("both/tuning/fedavg-lr0.1-seed5")
