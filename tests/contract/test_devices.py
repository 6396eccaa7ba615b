"""Every method, transform, rule and model on a device that refuses tensors of the CPU: see far_device.py.

What is checked: training and scoring, one client at a time and vectorized, against the same on the CPU; what leaves the
host lies on the CPU. What is not: worker processes, products in bfloat16, and whatever a real GPU rounds otherwise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from battery import LOOP, Play, assert_close, assert_same, every_method, method_of, play, setting, start
from test_battery import messages, refused
from torch import nn

from bespoke import devices, pretrained
from bespoke.digests import sealed
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation import host
from bespoke.federation.choice import choose, in_double
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.messages.robust.aggregator import ZeroAndClip
from bespoke.messages.robust.attack import Attack
from bespoke.messages.robust.exchange import Rule
from bespoke.messages.transform import Transform
from bespoke.method import Batches, Method
from bespoke.methods import FedAvg, FineTune
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.schedule import Schedule
from bespoke.models.head import HeadLM
from bespoke.models.lora import AdapterLM, LoraLM
from bespoke.models.own.build import own_task
from bespoke.models.own.model import Model
from bespoke.runs.beginning import execution
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import write_text
from bespoke.tensors import Tree, flatten
from command import bespoke
from far_device import NAME, Misplaced, far_device
from small_language import prefix_world
from small_methods import SmallDitto
from small_worlds import World, world

FAR_LOOP = replace(LOOP, device=NAME)
FAR = Choice(True, 2, 0, 1, "func", "", device=NAME)
FAR_CLOSED = replace(FAR, gradient="closed-form")
ROUNDS = ((1, 2), (2,))
NETWORKS = ("fedavg", "local", "knn-per", "per-fedavg", "hypcluster", "fedrep", "fedembed", "fedpc", "self-fl")


def small(name: str) -> World:
    return world(name, (2, 6, 9))


def far(
    place: World, method: Method, choice: Choice, transforms: tuple[Transform, ...] = (), double: bool = True
) -> Play:
    """The method played on the far device. Server functions see what came back: a tensor left there is an error."""
    with far_device(double) as device, Engine(place.population, choice) as engine:
        found = play(engine, place, method, transforms, ROUNDS)
        assert device.operations
    return found


def near(place: World, method: Method, transforms: tuple[Transform, ...] = ()) -> Play:
    with Engine(place.population, LOOP) as engine:
        return play(engine, place, method, transforms, ROUNDS)


@pytest.mark.parametrize("name", [name for name in every_method() if name != "four-types"])
def test_every_method_runs_on_a_device(name: str) -> None:
    """Those that are not known to compute in float64 do without it."""
    place = small("linear")
    method = method_of(every_method()[name], place)
    expected = near(place, method)
    for choice in (FAR_LOOP, FAR, FAR_CLOSED) if name == "fedavg" else (FAR_LOOP, FAR_CLOSED):
        assert_same(far(place, method, choice, double=in_double(method)), expected)


def test_private_state_in_four_types_moves_with_its_chunk() -> None:
    place = small("linear")
    method = method_of(every_method()["four-types"], place)
    assert_same(far(place, method, FAR_CLOSED), near(place, method))
    with pytest.raises(Misplaced, match="float64"):
        far(place, method, FAR_CLOSED, double=False)


@pytest.mark.parametrize("choice", [FAR_LOOP, FAR], ids=["looped", "vectorized"])
def test_client_optimizers_and_schedules_run_on_a_device(choice: Choice) -> None:
    place = small("mlp")
    knobs = {"optimizer": ClientOptimizer("adamw", eps=0.1), "weight_decay": 0.0}
    schedule = Schedule("cosine", warmup=1, rounds=3, by_step=True)
    method = method_of(FedAvg, place, schedule=schedule, **knobs)
    assert_same(far(place, method, choice, double=False), near(place, method))


@pytest.mark.parametrize("method", NETWORKS)
def test_networks_run_on_a_device(method: str) -> None:
    place = small("mlp")
    made = method_of(every_method()[method], place)
    assert_same(far(place, made, FAR, double=False), near(place, made))


@pytest.mark.parametrize(("name", "choice"), [("cnn", FAR), ("lstm", FAR_LOOP), ("hinge", FAR_CLOSED)])
def test_other_models_run_on_a_device(name: str, choice: Choice) -> None:
    """Convolutions, the losses of a large vocabulary, bytes as inputs."""
    place = small(name)
    made = method_of(FineTune, place)
    for method in (method_of(FedAvg, place), replace(made, epochs=1, lrs=(0.1,))):
        assert_same(far(place, method, choice, double=False), near(place, method))


def of_ones_own(place: World, buffers: Any) -> World:
    """The world with a module that has BatchNorm, which goes by this rule, and dropout."""

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))

    rows = {name: column[:6] for name, column in place.population.columns.items()}
    about: Any = {"task": "classification", "classes": ["a", "b", "c"], "input": "table"}
    task = own_task(about, Model(made, head="3", buffers=buffers).name(), False, {}, rows)
    return replace(place, task=task)


@pytest.mark.parametrize(
    ("buffers", "choice"), [("average", FAR_LOOP), ("frozen", FAR_LOOP), ("frozen", FAR), ("private", FAR_LOOP)]
)
def test_a_module_of_ones_own_runs_on_a_device(buffers: str, choice: Choice) -> None:
    """Its buffers travel, stay with their client, or are nobody's; its masks of dropout are the same."""
    place = of_ones_own(small("mlp"), buffers)
    method, test = method_of(FedAvg, place, batch_size=2, drop_last=True), place.split.test
    found = []
    for how in (LOOP, choice):
        with far_device(), Engine(place.population, how) as engine:
            engine.open(ClientWork(method, place.split.train, (), setting(place)), start(place))
            server, clients = method.init_server(start(place), setting(place)), np.array([2])
            for _ in range(2):
                cohort = engine.round(server, clients, key=7).cohort
                server = method.server_round(server, cohort)
            scores = engine.examine(server, test.query.clients, test.support, {"query": test.query}, key=9)
            found.append((flatten(server), scores["query"]["loss"]))
    assert_close(found[1][0], found[0][0], rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-4)


FROZEN = {"prefix": ("fedpc", FAR), "head": ("fedavg", FAR_LOOP), "lora": ("fedavg", FAR_LOOP)}


@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_language_model_is_where_clients_are_computed(kind: str) -> None:
    """Its weights do not travel: the process has a copy of them there, and one on the CPU."""
    if kind == "lora":
        pytest.importorskip("peft")
    place = prefix_world()
    network, settings = place.task.network, {"contexts": place.task.contexts, "given": 1}
    task: Any = {  # type: ignore[no-untyped-call]
        "prefix": lambda: place.task,
        "head": lambda: HeadLM(network, **settings),
        "lora": lambda: AdapterLM(LoraLM(network.pretrained, rank=2), given=1),  # type: ignore[attr-defined]
    }[kind]()
    place = replace(place, task=task)
    name, choice = FROZEN[kind]
    method = method_of(every_method()[name], place, lr=0.005)
    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, method, rounds=ROUNDS)
    with far_device(double=False), Engine(place.population, choice) as engine:
        assert_same(play(engine, place, method, rounds=ROUNDS), expected, atol=1e-5)
    assert pretrained.language_model(network.pretrained).lm_head.weight.device.type == "cpu"  # type: ignore[attr-defined]


@pytest.mark.parametrize("double", [True, False], ids=["double", "no double"])
@pytest.mark.parametrize("kind", ["top_k", "quantize", "compressed", "noisy", "attacked"])
def test_transforms_act_on_a_device(kind: str, double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has no float64 they act on the CPU."""
    monkeypatch.setattr(host, "has_double", lambda device: double)
    place = small("linear")
    bad = frozenset([int(place.population.keys[2])])
    for name in ("fedavg", "group-fl") if double else ("fedavg",):
        method = method_of(every_method()[name], place)
        transforms = (Attack("noise", bad), ZeroAndClip()) if kind == "attacked" else messages(method, kind)
        assert not refused(method, transforms)
        assert_same(far(place, method, FAR_CLOSED, transforms, double), near(place, method, transforms))


def test_robust_rules_see_messages_on_the_cpu() -> None:
    place = small("linear")
    method = method_of(every_method()["group-fl"], place)

    def ruled(work: ClientWork) -> ClientWork:
        return replace(work, robust=Rule("median"))

    with Engine(place.population, LOOP) as engine:
        expected = play(engine, place, method, (), ROUNDS, work=ruled)
    with far_device(), Engine(place.population, FAR_CLOSED) as engine:
        assert_same(play(engine, place, method, (), ROUNDS, work=ruled), expected)


def test_a_personal_model_comes_home() -> None:
    place = small("linear")
    method = method_of(SmallDitto, place)
    server, models = method.init_server(start(place)), []
    for choice in (LOOP, FAR_LOOP):
        with far_device(), Engine(place.population, choice) as engine:
            play(engine, place, method, (), ROUNDS)
            models.append(engine.personal(server, 2, place.split.test.support, 2, key=9))
    assert all(leaf.device.type == "cpu" for leaf in models[1].values())
    assert_close(models[1], models[0], rtol=1e-5, atol=1e-6)


def test_rows_of_a_cohort_that_comes_again_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    place, moved = small("linear"), []
    method = method_of(FedAvg, place)
    fetch = type(place.population).fetch
    monkeypatch.setattr(type(place.population), "fetch", lambda *a: moved.append(a[1].tolist()) or fetch(*a))
    with far_device(), Engine(place.population, FAR_CLOSED) as engine:
        engine.open(ClientWork(method, place.split.train, (), setting(place)), start(place))
        for cohort in ((1, 2), (1, 2), (2,)):
            engine.round(method.init_server(start(place)), np.array(cohort), key=1)
    assert moved == [[1, 2], [2]]


def test_a_run_on_a_device_is_stopped_and_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With private state; its choice is recorded, and followed when nobody tells it anything else."""
    place = small("linear")
    stages = (Stage(method_of(SmallDitto, place), 3),)
    experiment = Experiment("far", place.population, place.split, place.task, stages, "mse", cohort=2)

    def run(name: str, how: Choice | None, stop_after: int = 9, told: str = "auto") -> RunFolder:
        folder = RunFolder.create(tmp_path / name, "")
        rounds: list[int] = []
        Run(replace(experiment, engine={"device": told}), folder, how=how, stop=lambda: len(rounds) >= stop_after,
            after_round=lambda _, number: rounds.append(number)).run()  # fmt: skip
        return folder

    monkeypatch.setattr(devices, "available", lambda: ["cpu", NAME])
    near_by = run("near", LOOP).result()
    with far_device():
        whole = run("whole", FAR_CLOSED)
        with pytest.raises(Interrupted):
            run("resumed", FAR_CLOSED, stop_after=2)
        with pytest.raises(Interrupted):
            run("moved", FAR_CLOSED, stop_after=2)
        resumed = run("resumed", None)
    moved = run("moved", None, told="cpu")
    assert json.loads((moved.path / "engine.json").read_text())["device"] == "cpu"
    for name in ("rounds.jsonl", "clients.parquet", "result.json"):
        assert (resumed.path / name).read_bytes() == (whole.path / name).read_bytes(), name
    assert json.loads((resumed.path / "engine.json").read_text())["device"] == NAME
    for folder in (whole, moved):
        np.testing.assert_allclose(folder.result()["query"], near_by["query"], rtol=1e-4)


def test_a_run_whose_device_is_gone_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = small("linear")
    stages = (Stage(method_of(FedAvg, place), 1),)
    experiment = Experiment("gone", place.population, place.split, place.task, stages, "mse", cohort=2)
    write_text(tmp_path / "engine.json", json.dumps(sealed(replace(LOOP, device="cuda").to_json())))
    with pytest.raises(UserError, match="'cuda' is not here; this machine has cpu; this run was begun on it, and goes"):
        execution(experiment, start(place), tmp_path, None, print)


# -- what it finds -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Careless(FedAvg):
    """Makes a tensor of an array, which lies on the CPU wherever clients are computed."""

    how: str = "array"

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        new, up = super().client_round(down, private, batches)
        weight: Any = up["weight"]
        if self.how == "array":
            up["weight"] = weight * torch.from_numpy(np.ones(1, np.float32))[0]
        elif self.how == "numpy":
            weight.detach().numpy()
        elif self.how == "generator":
            up["weight"] = weight + 0 * torch.rand((), generator=torch.Generator().manual_seed(1))
        else:
            up["weight"] = weight[torch.from_numpy(np.zeros(1, np.int64))].sum() if weight.dim() else weight
            up["delta"] = {n: p.index_select(0, torch.from_numpy(np.arange(len(p)))) for n, p in up["delta"].items()}
        return new, up


@pytest.mark.parametrize("how", ["array", "numpy", "generator", "index"])
def test_the_far_device_finds_what_lies_elsewhere(how: str) -> None:
    place = small("linear")
    method = method_of(Careless, place, how=how)
    near(place, method)
    with pytest.raises(Misplaced):
        far(place, method, FAR_LOOP)


def test_without_a_place_for_new_tensors_most_methods_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """That methods need not name a device is the doing of hosts."""
    monkeypatch.setattr(host, "working_on", lambda device: devices.working_on(devices.CPU))
    place, failed = small("linear"), 0
    names = ("apfl", "hypcluster", "knn-per", "mixed", "self-fl")
    for name in names:
        try:
            far(place, method_of(every_method()[name], place), FAR_LOOP)
        except Misplaced:
            failed += 1
    assert failed >= 3


# -- which device ------------------------------------------------------------------------------------------------------
def chosen(monkeypatch: pytest.MonkeyPatch, here: list[str], name: str, method: str = "fedavg", **told: Any) -> Choice:
    monkeypatch.setattr(devices, "available", lambda: here)
    monkeypatch.setattr(devices, "gpus", lambda: sum(device.startswith("cuda:") for device in here))
    monkeypatch.setattr(devices, "has_bf16", lambda device: True)
    place = small("mlp" if method == "fedavg" else "linear")
    made = method_of(every_method()[method], place)
    work = ClientWork(made, place.split.train)
    return choose(place.population, work, start(place), 2, device=name, **told)


def test_auto_takes_cuda_then_mps_then_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for here in (["cpu", "cuda", "cuda:0"], ["cpu", "mps"], ["cpu"]):
        assert chosen(monkeypatch, here, "auto").device == here[1 if len(here) > 1 else 0]


def test_on_a_device_clients_are_vectorized_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = ["cpu", "cuda", "cuda:0"], ["cpu", "cuda", "cuda:0", "cuda:1"]
    found = chosen(monkeypatch, one, "cuda")
    assert (found.vectorized, found.gradient, found.workers, found.device) == (True, "func", 0, "cuda")
    assert chosen(monkeypatch, one, "cuda", "ditto").gradient == "closed-form"  # a linear model, with numba at hand
    assert chosen(monkeypatch, two, "cuda").workers == 2  # a worker for each GPU
    assert [devices.of_worker("cuda", place) for place in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert chosen(monkeypatch, two, "cuda:1").workers == 0
    assert devices.of_worker("cuda:1", 0) == "cuda:1"
    assert chosen(monkeypatch, one, "cuda", precision="bf16").precision == "bf16"


def test_float64_stays_on_the_cpu_where_a_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for method, device in (("ditto", "mps"), ("mixed", "cpu"), ("solved-ditto", "cpu"), ("four-types", "cpu")):
        assert chosen(monkeypatch, ["cpu", "mps"], "mps", method).device == device
    assert "float64" in chosen(monkeypatch, ["cpu", "mps"], "mps", "mixed").reason


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"engine.device = 'cuda:3' is not here; this machine has cpu, cuda, cuda:0\."):
        chosen(monkeypatch, ["cpu", "cuda", "cuda:0"], "cuda:3")


EXPERIMENT = """
metric = "mse"
[data]
source = "exam"
[[stage]]
method = "fedavg"
rounds = 1
"""


def test_the_command_line_refuses_and_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2 in words; a run goes on with another device and no other change."""
    (tmp_path / "one.toml").write_text(EXPERIMENT)
    command = ["run", tmp_path / "one.toml", "--out", tmp_path / "out"]
    for name, said in (("cuda:7", "this machine has cpu"), ("tpu", "engine.device")):
        found = bespoke(*command, "--set", f"engine.device={name}")
        assert found.code == 2
        assert said in found.err
        assert name in found.err
    assert bespoke(*command, "--set", "engine.device=auto").code == 0
    assert json.loads((tmp_path / "out/engine.json").read_text())["device"] == "cpu"
    assert bespoke(*command, "--resume", "--set", "engine.device=cpu").code == 0
    found = bespoke(*command, "--resume", "--set", "engine.device=cpu", "--set", "seed=1")
    assert found.code == 2
    assert "another configuration" in found.err
