"""Callbacks: which events they get, and how they end training."""

from __future__ import annotations

import json
import math
import threading
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bespoke
from bespoke.callbacks.callback import CheckpointEvent, Curve, EndEvent, EvaluationEvent, Event, RoundEvent
from bespoke.callbacks.early_stop import EarlyStop
from bespoke.callbacks.tensorboard import TensorBoard
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.callbacks import separated, with_options
from bespoke.experiment.checks import checked
from bespoke.federation.processes import CONTEXT
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.job import Job
from bespoke.study.run_process import ForwardingCallback, RunProcess
from command import bespoke as command
from command import refused
from kills import assert_identical, contents

PATIENCE = 3
EXPERIMENT: dict[str, Any] = {
    "data": {"source": "synthetic", "options": {"clients": 8, "examples": 12, "features": 3, "seed": 1}},
    "model": {"name": "linear"},
    "engine": {"kind": "looped"},
    "evaluate_every": 1,
    "stage": [{"method": "fedavg", "rounds": 20, "lr": 0.3, "batch_size": 4}, {"method": "finetune", "epochs": 1}],
}


@dataclass
class Listener(bespoke.Callback):
    """Keeps the events."""

    events: list[Event] = field(default_factory=list)

    def _record(self, event: Event) -> None:
        self.events.append(event)

    on_round = on_evaluation = on_checkpoint = on_end = _record

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if type(event) is kind]


class Failing(bespoke.Callback):
    """Fails when the third round is done, or when a run ends."""

    def __init__(self, run: str = "") -> None:
        self.run = run

    def on_round(self, event: RoundEvent) -> None:
        if event.round == 3 and not self.run:
            raise ValueError("no more paper")

    def on_end(self, event: EndEvent) -> None:
        if event.run == self.run:
            raise ValueError("no more paper")


class Leaving(bespoke.Callback):
    """Has the run stopped after so many rounds, as Ctrl-C does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_checkpoint(self, event: CheckpointEvent) -> None:
        if event.round == self.after:
            raise Interrupted("enough for today")


@dataclass(frozen=True)
class AtRound(bespoke.Callback):
    """Ends a stage at a round, whatever its curve."""

    last: int = 2

    def ends(self, curve: Curve) -> str:
        return "so it was said" if curve.rounds[-1] >= self.last else ""


@dataclass
class Forgetful(bespoke.Callback):
    """Decides, and could change its mind: not frozen."""

    def ends(self, curve: Curve) -> str:
        return "now"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listener]:
    """The experiment run to its last round, and the events that a callback got."""
    folder, listener = tmp_path_factory.mktemp("whole") / "run", Listener()
    bespoke.run(EXPERIMENT, folder, callbacks=[listener])
    return folder, listener


@pytest.fixture(scope="module")
def early(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early") / "run"
    bespoke.run(EXPERIMENT, folder, callbacks=[EarlyStop(PATIENCE)])
    return folder


# -- who decides -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "lower", "least", "ends"),
    [  # patience 2, a point every five rounds; at which point it ends, by hand
        ([3.0, 2.0, 1.0, 0.5, 0.4], True, 0.0, None),
        ([3.0, 2.0, 2.5, 2.0, 1.0], True, 0.0, 3),  # an equal value is no improvement
        ([3.0, 2.0, 1.9, 1.8, 1.7], True, 0.25, 3),  # 2.0 is better than 3.0 by enough; 1.9 and 1.8 are not than 2.0
        ([3.0, 2.0, 1.9, 1.7, 1.6, 1.5], True, 0.25, 5),  # slowly, and yet: 1.7 is better than 2.0 by 0.3
        ([0.1, 0.5, 0.6, 0.6, 0.55], False, 0.0, 4),
        ([None, 4.0, 3.0, 3.5, None], True, 0.0, 4),  # diverged at first, and again
        ([None, None, None], True, 0.0, 2),
    ],
)
def test_early_stop_by_hand(values: list[float | None], lower: bool, least: float, ends: int | None) -> None:
    stop = EarlyStop(2, least)
    rounds = tuple(5 * place for place in range(len(values)))
    found = [bool(stop.ends(Curve("mse", lower, rounds[:n], tuple(values[:n])))) for n in range(len(values) + 1)]
    assert next((n - 1 for n, ended in enumerate(found) if ended), None) == ends


def test_a_stage_ends_where_its_curve_says(whole: tuple[Path, Listener], early: Path) -> None:
    """The run is the beginning of the one without it, up to the round that the other's curve tells by hand."""
    full, short = lines(whole[0]), lines(early)
    curve = [line["validation"]["mse"] for line in full if line["stage"] == 0]
    last = next(n for n in range(len(curve)) if n - int(np.argmin(curve[: n + 1])) >= PATIENCE)
    assert 5 < last < 20
    assert short == full[: last + 1]
    result = json.loads((early / "result.json").read_text())
    best = int(np.argmin(curve[: last + 1]))
    why = f"validation mse was best after round {best} ({curve[best]:.4g})"
    assert result["stopped"] == [
        {"stage": 0, "method": "fedavg", "round": last, "of": 20, "by": "early-stop", "why": why}
    ]  # fmt: skip
    assert result["rounds"] == last
    assert "stopped" not in json.loads((whole[0] / "result.json").read_text())


@pytest.mark.parametrize("after", [2, 8])
def test_it_decides_the_same_after_an_interruption(early: Path, tmp_path: Path, after: int) -> None:
    config = checked(separated(EXPERIMENT, [EarlyStop(PATIENCE)])[0], "test")
    for leaving in ([Leaving(after)], [Leaving(after + 1)]):
        folder = RunFolder.create(tmp_path / "run", to_toml(config))
        with pytest.raises(Interrupted):
            Run(build(config), folder, checkpoint_seconds=0, callbacks=leaving).run()
    bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[EarlyStop(PATIENCE)])
    assert_identical(contents(tmp_path / "run"), contents(early), "interrupted")


def test_ways_in(early: Path, tmp_path: Path) -> None:
    """From a file and on the command line it is the same run as from Python, byte for byte."""
    import tomli_w

    plain, named = tmp_path / "plain.toml", tmp_path / "named.toml"
    plain.write_text(tomli_w.dumps(EXPERIMENT))
    named.write_text(tomli_w.dumps({**EXPERIMENT, "callbacks": {"early-stop": {"patience": 9}}}))
    for path, option, value in (
        (plain, "--callback", f"early-stop,patience={PATIENCE}"),
        (named, "--set", f"callbacks.early-stop.patience={PATIENCE}"),
    ):
        outcome = command("run", path, option, value, "--out", tmp_path / path.stem)
        assert outcome.code == 0
        assert "early-stop ended stage 0 (fedavg) after round" in outcome.out
        assert_identical(contents(tmp_path / path.stem), contents(early), value)


def test_one_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in a module beside the experiment file: in the file, and what it decides is kept in config.toml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.setenv("BESPOKE_TRUST", "")
    (tmp_path / "own_hooks.py").write_text(
        "from dataclasses import dataclass\nimport bespoke\n\n@dataclass(frozen=True)\nclass Third(bespoke.Callback):\n"
        "    last: int = 3\n    def ends(self, curve):\n        return 'it is over' * (curve.rounds[-1] >= self.last)\n"
    )
    result = bespoke.run({**EXPERIMENT, "callbacks": {"own_hooks:Third": {"last": 4}}}, "run")
    assert [(s["round"], s["by"], s["why"]) for s in result["stopped"]] == [(4, "own_hooks:Third", "it is over")]
    assert tomllib.loads(Path("run/config.toml").read_text())["callbacks"] == {"own_hooks:Third": {"last": 4}}


def test_every_stage_may_end(tmp_path: Path) -> None:
    two = [{"method": "fedavg", "rounds": 6, "lr": 0.1}, {"method": "ditto", "rounds": 5, "lr": 0.1}]
    listener = Listener()
    result = bespoke.run({**EXPERIMENT, "stage": two}, tmp_path / "run", callbacks=[AtRound(2), listener])
    assert [(s["stage"], s["round"], s["of"]) for s in result["stopped"]] == [(0, 2, 6), (1, 2, 5)]
    assert [event.step for event in listener.of(RoundEvent)] == [1, 2, 3, 4]  # counted through both


# -- what an event holds -----------------------------------------------------------------------------------------------
def test_events_hold_what_the_log_says(whole: tuple[Path, Listener]) -> None:
    folder, listener = whole
    log = lines(folder)
    rounds = [line for line in log if line["round"]]
    names = ("clients", "dropped", "examples", "steps", "bytes_down", "bytes_up")
    assert [[getattr(event, name) for name in names] for event in listener.of(RoundEvent)] == [
        [line[name] for name in names] for line in rounds
    ]
    evaluations: list[EvaluationEvent] = listener.of(EvaluationEvent)
    assert [event.validation for event in evaluations] == [line["validation"] for line in log]
    assert [event.curve.rounds[-1] for event in evaluations] == [line["round"] for line in log]
    assert evaluations[4].curve.values == tuple(line["validation"]["mse"] for line in log[:5])
    saved = listener.of(CheckpointEvent)[-1]
    assert (saved.round, saved.path.exists()) == (20, True)
    (end,) = listener.of(EndEvent)
    result = json.loads((folder / "result.json").read_text())
    assert end.result["query"] == end.scores["mse"] == result["query"]
    assert end.scores["rmse"] == pytest.approx(_mean(folder, "query_rmse"), rel=1e-6)
    assert listener.events[-1] is end


def _mean(folder: Path, column: str) -> float:
    import pandas as pd

    return float(pd.read_parquet(folder / "clients.parquet")[column].mean())


def test_nothing_of_single_clients_and_no_query_scores_before_the_end(tmp_path: Path) -> None:
    """Under [privacy], with clients who attack and are left out by a rule: their ids are in the logs, not in what is
    reported; and before the end no number of the results is reported either."""
    listener = Listener()
    names = [f"patient-{letter}" for letter in "abcdefgh"]
    draw = np.random.default_rng(0)
    rows = {name: (x := draw.standard_normal((12, 2)), x @ [1.0, -1.0]) for name in names}
    bespoke.population(rows, task="regression").save(tmp_path / "population")
    experiment = {
        **EXPERIMENT, "data": {"population": str(tmp_path / "population")},
        "stage": [{"method": "fedavg", "rounds": 3, "lr": 0.05}],
    }  # fmt: skip
    robust = {"robust": {"rule": "multi-krum", "f": 1}, "attack": {"kind": "scale", "clients": 0.2}}
    bespoke.run({**experiment, **robust}, tmp_path / "robust", callbacks=[listener])
    private = {"privacy": {"noise": 1.0, "clip": 0.5, "delta": 1e-2, "public_statistics": True}}
    bespoke.run({**experiment, **private}, tmp_path / "private", callbacks=[listener])
    assert any(name in (tmp_path / "robust" / "result.json").read_text() for name in names)
    texts = [repr(asdict(each)) for each in listener.events]
    assert not [text for text in texts if any(name in text for name in names)]
    for folder in (tmp_path / "robust", tmp_path / "private"):
        query = json.loads((folder / "result.json").read_text())["query"]
        mine = [each for each in listener.events if each.folder == folder]
        assert [type(each) for each in mine if repr(query) in repr(asdict(each))] == [EndEvent]
    spent = [each.epsilon for each in listener.of(RoundEvent) if each.folder == tmp_path / "private"]
    log = [line["privacy"] for line in lines(tmp_path / "private") if line["round"]]
    assert spent == [{"released": line["released"], "messages": None} for line in log]  # None: infinite
    assert 0 < spent[0]["released"] < spent[1]["released"] < spent[2]["released"]


def test_a_stage_taken_over_is_told_too(tmp_path: Path) -> None:
    """FineTune starts from the model that FedAvg's run has trained: it gets the same curve, and so ends it."""
    listener = Listener()
    settings = {name: EXPERIMENT[name] for name in ("model", "engine", "evaluate_every")}
    settings |= {"data": {"options": EXPERIMENT["data"]["options"]}}
    result = bespoke.compare(
        data="synthetic", out=tmp_path / "out", methods=["fedavg", "finetune"], rounds=20, seeds=1, tune=False,
        settings=settings, callbacks=[listener, AtRound(7)],
    )  # fmt: skip
    curves = {run: [(t.round, t.validation) for t in listener.of(EvaluationEvent) if t.run == f"runs/{run}-seed0"]
              for run in ("fedavg", "finetune")}  # fmt: skip
    assert len(curves["fedavg"]) == 8
    assert curves["finetune"] == curves["fedavg"]
    assert "FedAvg: test_callbacks:AtRound ended training early, after round 7 of 20 with seed 0." in result.answer
    assert any(line.startswith("FineTune: ") and "its training with fedavg early" in line for line in result.answer)


# -- in other processes (their events: test_tuning.py) ----------------------------------------------------------------
def test_an_error_here_ends_the_run_there(whole: tuple[Path, Listener]) -> None:
    event = whole[1].of(RoundEvent)[2]
    ours, theirs = CONTEXT.Pipe()
    lane = object.__new__(RunProcess)  # as it is while its process makes a run; the process is this one's thread
    lane.pipe, lane.callbacks, lane.job = ours, [Listener(), Failing()], Job(event.folder, checked(EXPERIMENT, "test"))
    ended: list[str] = []

    def far() -> None:
        try:
            ForwardingCallback(theirs).on_evaluation(whole[1].of(EvaluationEvent)[0])
            ForwardingCallback(theirs).on_round(event)
        except UserError as error:
            ended.append(str(error))

    thread = threading.Thread(target=far)
    thread.start()
    assert lane.receive(lambda job, rounds, value: True) is None
    with pytest.raises(UserError, match="Failing failed in on_round") as error:
        lane.receive(lambda job, rounds, value: True)
    thread.join()
    assert ended == [str(error.value)]
    assert [type(each) for each in lane.callbacks[0].events] == [EvaluationEvent, RoundEvent]  # type: ignore[attr-defined]


# -- errors ------------------------------------------------------------------------------------------------------------
def test_an_exception_ends_the_run_and_leaves_it_resumable(whole: tuple[Path, Listener], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Failing failed in on_round .*round 3 .*no more paper .*test_callbacks.py"):
        bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[Failing()])
    assert not (tmp_path / "run" / "result.json").exists()
    bespoke.run(EXPERIMENT, tmp_path / "run")  # observers are no part of the experiment
    assert_identical(contents(tmp_path / "run"), contents(whole[0]), "failed, then resumed")


def test_a_callback_that_fails_at_the_end_is_told_of_it_again(tmp_path: Path) -> None:
    class Once(Listener):
        def on_end(self, event: EndEvent) -> None:  # type: ignore[override]
            self.events.append(event)
            if len(self.events) == 1:
                raise OSError("disk full")

    once = Once()
    once.on_round = once.on_evaluation = once.on_checkpoint = lambda event: None  # type: ignore[method-assign]
    for _ in range(3):
        try:
            bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[once])
        except UserError as error:
            assert "OSError: disk full" in str(error)  # noqa: PT017
    assert len(once.events) == 2  # a finished run reports no events


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"early-stopp": {}}, ("'early-stopp'", "Did you mean 'early-stop'?")),
        ({"early-stop": {"patience": 0}}, ("early-stop: patience = 0", "greater than or equal to 1")),
        ({"early-stop": {"patince": 3}}, ("'patince'", "Did you mean 'patience'?")),
        ({"early-stop": 5}, ("early-stop = 5", "a table of its settings")),
        ({"os:getcwd": {}}, ("os:getcwd is not a callback", "inherits bespoke.Callback")),
        (["early-stop"], ("callbacks = ['early-stop']",)),
    ],
)
def test_bad_tables(tables: Any, said: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESPOKE_TRUST", "")
    with pytest.raises(UserError) as error:
        bespoke.run({**EXPERIMENT, "callbacks": tables}, tmp_path / "run")
    assert all(part in str(error.value) for part in said), error.value
    assert not (tmp_path / "run").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="early-stop is given twice"):
        separated({"callbacks": {"early-stop": {}}}, [EarlyStop(3)])
    with pytest.raises(UserError, match="make Forgetful a frozen dataclass"):
        separated({}, [Forgetful()])
    with pytest.raises(UserError, match=r"callbacks early-stop and \[privacy\].*has to be known"):
        bespoke.run({**EXPERIMENT, "privacy": {"noise": 1.0, "clip": 0.5}}, tmp_path / "run", callbacks=[EarlyStop()])
    with pytest.raises(UserError, match=r"run\(callbacks="):
        bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[print])  # type: ignore[list-item]
    with pytest.raises(UserError, match="early-stop,patience=5"):
        with_options({}, ["early-stop,5"])
    refused(command("compare", "digits", "--callback", "early-stop,patience=x"), "patience = 'x'")


def test_options_of_the_command_line() -> None:
    found = with_options(
        {"callbacks": {"mlflow": {}}}, ["early-stop, patience=7 ,least=0.1", "tensorboard,folder=my/logs", "a.b:C"]
    )
    assert found["callbacks"] == {
        "mlflow": {}, "early-stop": {"patience": 7, "least": 0.1}, "tensorboard": {"folder": "my/logs"}, "a.b:C": {},
    }  # fmt: skip


# -- trackers of experiments -------------------------------------------------------------------------------------------
def test_tensorboard_reads_back_what_the_log_says(whole: tuple[Path, Listener], tmp_path: Path) -> None:
    """Also of a run that was interrupted after its checkpoint: what is reported twice is read once."""
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed (extra tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = checked(EXPERIMENT, "test")
    folder = RunFolder.create(tmp_path / "run", to_toml(config))
    with pytest.raises(UserError):
        Run(build(config), folder, callbacks=[TensorBoard(tmp_path / "logs"), Failing()]).run()
    bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[TensorBoard(str(tmp_path / "logs"))])
    read = EventAccumulator(str(tmp_path / "logs" / "run"))
    read.Reload()
    log = lines(whole[0])
    for tag, values in {
        "validation/mse": {line["round"]: line["validation"]["mse"] for line in log},
        "traffic/bytes_up": {line["round"]: line["bytes_up"] for line in log if line["round"]},
    }.items():
        found = [(event.step, event.value) for event in read.Scalars(tag)]
        assert [step for step, _ in found] == list(values), tag
        assert [value for _, value in found] == pytest.approx(list(values.values()), rel=1e-6)
    query = json.loads((whole[0] / "result.json").read_text())["query"]
    assert math.isclose(read.Scalars("final/mse")[-1].value, query, rel_tol=1e-6)
    assert "_hparams_/session_start_info" in read.summary_metadata


def test_mlflow_reads_back_what_the_log_says(whole: tuple[Path, Listener], tmp_path: Path) -> None:
    """A run that was interrupted goes on in the same run of MLflow."""
    tracking = pytest.importorskip("mlflow.tracking", reason="the package mlflow is not installed (extra mlflow)")
    uri, config = f"sqlite:///{tmp_path}/mlflow.db", checked(EXPERIMENT, "test")
    folder = RunFolder.create(tmp_path / "run", to_toml(config))
    with pytest.raises(UserError, match="no more paper"):
        Run(build(config), folder, callbacks=[bespoke.MLflow(uri), Failing()]).run()
    bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[bespoke.MLflow(uri)])
    client = tracking.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("bespoke").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["stage.0.lr"] == "0.3"
    logged = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "validation/mse")}
    assert logged == {line["round"]: line["validation"]["mse"] for line in lines(whole[0])}
    assert run.data.metrics["final/mse"] == json.loads((whole[0] / "result.json").read_text())["query"]


def test_wandb_offline_writes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed (extra wandb)")
    logged: list[dict[str, Any]] = []
    log = wandb.Run.log
    monkeypatch.setattr(wandb.Run, "log", lambda run, data, **more: logged.append(data) or log(run, data, **more))
    bespoke.run(EXPERIMENT, tmp_path / "run", callbacks=[bespoke.WandB(folder=str(tmp_path))])
    written = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(written) == 1
    points = {data["step"]: data["validation/mse"] for data in logged if "validation/mse" in data}
    assert points == {line["round"]: line["validation"]["mse"] for line in lines(tmp_path / "run")}
    assert b"validation/mse" in written[0].read_bytes()


def test_trackers_that_are_missing_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.utils.tensorboard", "mlflow", "mlflow.tracking", "wandb"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    for kind, extra in ((bespoke.TensorBoard, "tensorboard"), (bespoke.MLflow, "mlflow"), (bespoke.WandB, "wandb")):
        with pytest.raises(UserError, match=rf"bespoke-fl\[{extra}\]"):
            kind()
