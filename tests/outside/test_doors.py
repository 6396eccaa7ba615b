"""A package that is no part of bespoke, installed from a folder, goes wherever bespoke's own things go."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import bespoke
from bespoke import imported as names
from bespoke.data.sources.registry import load_source
from bespoke.doors import REGISTRIES
from bespoke.errors import UserError
from bespoke.federation.cohorts import Sampler
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import knob
from bespoke.methods import METHODS, FedAvg
from bespoke.methods.parts.heads import body_and_head
from bespoke.models.networks import MLP
from bespoke.models.task import Classification
from bespoke.tensors import Params
from bespoke.testing import check_method
from command import bespoke as command
from command import refused
from small_worlds import world

HERE = Path(__file__).parent
MODEL = {"name": "mlp", "hidden": [8]}
BASE = {"cohort": {"size": 4}, "evaluate_every": 2}
NET = "outside_doors.nets:net"
METHOD = "outside_doors.fedper:FedPer"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where pip installed the package, as in an environment of one's own; this process and its children find it."""
    source, site = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(HERE / "package", source)  # pip builds where the sources are
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(site), str(source)]
    subprocess.run([*pip, *offline], check=True, capture_output=True, timeout=120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(site)])
        patch.setenv(names.TRUST, "")
        patch.setattr(names, "_held", {})
        for registry in REGISTRIES.values():
            patch.setattr(registry, "_others", {})
            patch.setattr(registry, "_short", {})
        names.entry_points.cache_clear()
        yield site
    names.entry_points.cache_clear()
    for module in [name for name in sys.modules if name.startswith("outside_doors")]:
        del sys.modules[module]


@pytest.fixture(scope="module")
def compared(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """From Python: the class and the model themselves, source and metric by their entry points; two runs at a time."""
    from outside_doors.fedper import FedPer  # type: ignore[import-not-found]
    from outside_doors.nets import net  # type: ignore[import-not-found]

    out = tmp_path_factory.mktemp("python") / "out"
    bespoke.compare(
        data="clinics", model=net, methods=["fedavg", FedPer], metric="wrong", seeds=1, rounds=4, tune=False, out=out,
        settings=BASE, jobs=2,
    )  # fmt: skip
    return out


def clients(folder: Path, label: str = "fedper") -> pd.DataFrame:
    return pd.read_parquet(folder / "runs" / f"{label}-seed0" / "clients.parquet")


def killed(words: list[str], site: Path, folder: Path) -> None:
    """Runs a command that a callback of the package kills on the way."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    died = subprocess.run(
        [sys.executable, "-m", "bespoke", *words], cwd=folder, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr


def test_from_python_with_two_runs_at_a_time(compared: Path) -> None:
    recorded = (compared / "runs/fedper-seed0/config.toml").read_text()
    for named in (METHOD, NET, "outside_doors.clinics:load", "outside_doors.scores:wrong"):
        assert f'"{named}"' in recorded  # under names that every process finds
    for label in ("fedper", "fedavg"):  # the metric is one that bespoke has as well, under another name
        table = clients(compared, label)
        assert table["query_wrong"].notna().all()
        np.testing.assert_allclose(table["query_wrong"], table["query_error"], atol=1e-6)
    assert not clients(compared).equals(clients(compared, "fedavg"))


def test_a_killed_comparison_with_two_workers_goes_on(compared: Path, site: Path, tmp_path: Path) -> None:
    """On the command line, by "module:name" or an entry point; killed in a round, resumed: the numbers from Python."""
    words = [
        "compare", "--data", "clinics", "--methods", METHOD, "--metric", "outside_doors.scores:wrong",
        "--seeds", "1", "--rounds", "4", "--no-tune", "--model", "clinic-net", "--cohort", "4",
        "--set", "evaluate_every=2", "--jobs", "1", "--workers", "2", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    hook = "outside_doors.rounds:DieOnce"
    dying = ["--callback", f"{hook},mark={tmp_path / 'mark'}"]
    killed([*words, *dying], site, tmp_path)
    assert not (tmp_path / "out/runs/fedper-seed0/result.json").exists()
    resumed = command(*words, "--resume")
    assert resumed.code == 0, resumed.err
    found, expected = clients(tmp_path / "out"), clients(compared)
    assert list(found["client"]) == list(expected["client"])
    np.testing.assert_allclose(found["query_loss"], expected["query_loss"], rtol=1e-4)
    np.testing.assert_array_equal(found["query_wrong"], expected["query_wrong"])


def test_export_and_report(compared: Path, tmp_path: Path) -> None:
    """The package is installed, so what it offers may be imported where a folder names it."""
    run = compared / "runs/fedper-seed0"
    exported = command("export", run, "--client", "clinic 2", "--out", tmp_path / "model")
    assert exported.code == 0, exported.err
    model = bespoke.load_personal(tmp_path / "model")
    rows = load_source("clinics")
    at = rows.index("clinic 2")
    own = slice(int(rows.offsets[at]), int(rows.offsets[at + 1]))
    x = rows.columns["x"][own].numpy()
    seen = (torch.from_numpy(x).double() - model.mean) / model.deviation if len(model.mean) else torch.from_numpy(x)
    layer = {name: leaf.double() for name, leaf in model.params.items() if torch.is_tensor(leaf)}
    inner = (seen.double() @ layer["body.weight"].T + layer["body.bias"]).relu()
    outer = inner @ layer["out.weight"].T + layer["out.bias"]
    assert model.predict(x).astype(str).tolist() == [("0", "1")[at] for at in outer.argmax(1)]
    assert command("report", compared, "--output", tmp_path / "page.html").code == 0
    assert "FedPer" in (tmp_path / "page.html").read_text()


def test_a_file_under_privacy_and_under_a_robust_rule(site: Path, tmp_path: Path) -> None:
    """TOML: every door at once, and what acts on messages."""
    (tmp_path / "exp.toml").write_text("""
metric = "wrong"
[data]
source = "digits"
options = { clients = 5, partition = "in-turn" }
[model]
name = "outside_doors.nets:digits"
[engine]
kind = "looped"
[cohort]
size = 3
sampling = "smallest"
[[stage]]
method = "fedper"
rounds = 2
server = { name = "half-way", part = 0.25 }
""")
    plain = command("run", tmp_path / "exp.toml", "--out", tmp_path / "plain", "--json")
    assert plain.code == 0, plain.err
    sizes = pd.read_parquet(tmp_path / "plain/clients.parquet")["query_examples"]
    assert sizes.max() - sizes.min() <= 1  # rows were dealt out in turn
    private = command(
        "run", tmp_path / "exp.toml", "--out", tmp_path / "private", "--json", "--set", "privacy.noise=1.0",
        "--set", "privacy.clip=0.5",
    )  # fmt: skip
    assert private.code == 0, private.err
    spent = json.loads((tmp_path / "private/result.json").read_text())["privacy"]
    assert "what outside_doors.rounds:smallest goes by" in json.dumps(spent)  # so nothing is promised
    rule = ("--set", "robust.rule=median")
    robust = command("run", tmp_path / "exp.toml", "--out", tmp_path / "robust", "--json", *rule)
    assert robust.code == 0, robust.err


def test_fedper_is_what_its_clients_train_alone(site: Path) -> None:
    """Oracle: from one start every client trains alone, by FedAvg; bodies are averaged by examples, heads are kept."""
    kind: Any = METHODS.find("fedper", "test")
    place = world("mlp")
    task = Classification(MLP(3, 3, (4,)))
    start, knobs = task.init(5), {"lr": 0.1, "epochs": 2, "batch_size": 4}

    def after_a_round(method: Any, cohort: list[int]) -> tuple[Params, Any, Engine]:
        engine = Engine(place.population, Choice(False, 1, 0, 1, "autograd", ""))
        engine.open(ClientWork(method, place.split.train, ()), start)
        server = method.init_server(start)
        done = engine.round(server, np.array(cohort), key=7)
        return method.params(method.server_round(server, done.cohort)), done, engine

    alone = {client: after_a_round(FedAvg(task, **knobs), [client])[0] for client in (3, 5)}
    sizes = dict(zip((3, 5), place.split.train.sizes(np.array([3, 5])).tolist()))
    together, _, engine = after_a_round(kind(task, **knobs), [3, 5])
    body, head = body_and_head(task, together)
    for name, leaf in body.items():
        mean = sum(sizes[c] * alone[c][name] for c in alone) / sum(sizes.values())
        torch.testing.assert_close(leaf, mean, rtol=1e-5, atol=1e-6)
    for name, leaf in head.items():
        assert leaf.equal(start[name])  # nobody's head is sent
    test = place.split.test
    some = np.array([3, 5])
    scores = engine.examine({"params": body, "head": head}, some, test.support, {"query": test.query}, key=9)
    for at, client in enumerate((3, 5)):
        rows, _ = test.query.of(some[at : at + 1])
        batch = {name: column[rows] for name, column in place.population.columns.items()}
        own = {**body, **body_and_head(task, alone[client])[1]}
        loss = torch.nn.functional.cross_entropy(task.predict(own, batch), batch["y"].long(), reduction="sum")
        assert scores["query"]["loss"][at, 0] == pytest.approx(float(loss), rel=1e-4)


def test_a_server_optimizer_a_partitioner_and_a_sampler(site: Path) -> None:
    from outside_doors.rounds import HalfWay, in_turn, smallest

    params, update = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([4.0, -8.0])}
    assert HalfWay(0.5).step({}, params, update)[0]["w"].tolist() == [3.0, -2.0]
    names.trust("outside_doors.rounds:in_turn", "outside_doors.rounds:smallest")
    dealt = load_source("digits", clients=7, partition="outside_doors.rounds:in_turn")
    assert set(dealt.sizes().tolist()) == {1797 // 7, 1797 // 7 + 1}
    assert in_turn(range(5), 2, 0).tolist() == [0, 1, 0, 1, 0]
    place = world("linear")
    sampler = Sampler(place.split.train, seed=0, size=3, sampling="outside_doors.rounds:smallest")
    sizes = place.split.train.sizes()
    wanted = place.split.train.clients[smallest(None, 1, 3, sizes)]
    assert sampler.draw(1).contacted.tolist() == sorted(wanted.tolist())
    with pytest.raises(UserError, match="different whole numbers from 0 to"):
        replace(sampler, sampling=names.handed_over(lambda random, round, wanted, sizes: [0, 0])).draw(1)


def test_a_loss(site: Path, tmp_path: Path) -> None:
    """By three ways, with two runs at a time, two workers, kill -9 and resume, analysis, export and report."""
    from outside_doors.losses import focal  # type: ignore[import-not-found]

    common: dict[str, Any] = {
        "data": "clinics", "methods": ["fedavg", METHOD], "seeds": 1, "rounds": 4, "tune": False, "settings": BASE,
    }  # fmt: skip
    bespoke.compare(**common, model=NET, loss=focal, out=tmp_path / "python", jobs=2)
    run = tmp_path / "python/runs/fedper-seed0"
    assert 'loss = "outside_doors.losses:focal"' in (run / "config.toml").read_text()
    bespoke.compare(**common, model=NET, out=tmp_path / "plain")
    assert not np.allclose(clients(tmp_path / "plain")["query_loss"], clients(tmp_path / "python")["query_loss"])

    words = [
        "compare", "--data", "clinics", "--methods", f"fedavg,{METHOD}", "--seeds", "1", "--rounds", "4", "--no-tune",
        "--model", NET, "--loss", "focal", "--cohort", "4", "--set", "evaluate_every=2", "--jobs", "1",
        "--workers", "2", "--out", str(tmp_path / "words"),
    ]  # fmt: skip
    dying = ["--callback", f"outside_doors.rounds:DieOnce,mark={tmp_path / 'mark'}"]
    killed([*words, *dying], site, tmp_path)
    resumed = command(*words, "--resume")
    assert resumed.code == 0, resumed.err
    expected = clients(tmp_path / "python")
    np.testing.assert_allclose(clients(tmp_path / "words")["query_loss"], expected["query_loss"], rtol=1e-4)

    (tmp_path / "exp.toml").write_text(f"""
evaluate_every = 2
safe_steps = true
[data]
source = "clinics"
[model]
name = "{NET}"
loss = "outside_doors.losses:focal"
[cohort]
size = 4
[[stage]]
method = "fedper"
rounds = 4
""")
    told = command("run", tmp_path / "exp.toml", "--out", tmp_path / "toml", "--json")
    assert told.code == 0, told.err
    found = pd.read_parquet(tmp_path / "toml/clients.parquet")
    np.testing.assert_allclose(found["query_loss"], expected["query_loss"], rtol=1e-4)

    exported = command("export", run, "--client", "clinic 2", "--out", tmp_path / "model")
    assert exported.code == 0, exported.err
    own = load_source("clinics")
    x = own.columns["x"][: own.sizes()[0]].numpy()
    assert set(bespoke.load_personal(tmp_path / "model").predict(x).astype(str)) <= {"0", "1"}
    assert command("report", tmp_path / "python", "--output", tmp_path / "page.html").code == 0
    assert "outside_doors.losses:focal" in (tmp_path / "page.html").read_text()


def test_the_battery(site: Path) -> None:
    check_method(METHODS["fedper"], worlds=("mlp",))


def test_listed_with_where_they_come_from(site: Path) -> None:
    for what, name in (("methods", "fedper"), ("data", "clinics"), ("metrics", "wrong")):
        told = command(what).out
        assert f"{name}  from outside_doors." in told, what
        assert "outside-doors 1.2" in told
    for what, line in (
        ("methods", "optimizer half-way  from outside_doors.rounds:HalfWay"),
        ("methods", "sampling smallest  from outside_doors.rounds:smallest"),
        ("methods", "callback die-once  from outside_doors.rounds:DieOnce"),
        ("data", "partition in-turn  from outside_doors.rounds:in_turn"),
    ):
        assert line in command(what).out, line
    told = command("models").out
    assert "focal: from outside_doors.losses:focal (outside-doors 1.2)" in told
    assert "mlp: fully connected network" in told
    assert f"clinic-net: from {NET} (outside-doors 1.2)" in told
    assert METHOD in command("methods", "fedper").out


def test_somebody_elses_folder(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report imports nothing that a folder names; what needs the code refuses, until exactly this name is allowed."""
    run, named, mark = tmp_path / "run", "foreign_code:Theirs", tmp_path / "was_imported"
    (tmp_path / "foreign_code.py").write_text(
        "import pathlib\npathlib.Path('was_imported').touch()\nfrom outside_doors.fedper import FedPer as Theirs\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    bespoke.run({"data": {"source": "clinics"}, "model": MODEL, "stage": [{"method": named, "rounds": 1}]}, run)
    assert mark.exists()
    for known in (sys.modules, METHODS._others):  # on another machine, nothing of it is known
        known.pop("foreign_code", None)
        known.pop(named, None)
    monkeypatch.setenv(names.TRUST, "")
    mark.unlink()
    assert command("report", run).code == 0
    export = ("export", run, "--client", "clinic 2")
    for words in (export, ("analyze", run, "--fewer-examples", "1,0.5"), ("forget", run, "--client", "x")):
        refused(command(*words), named, "--trust")
    assert not mark.exists()
    allowed = command("--trust", named, *export)
    assert allowed.code == 0, allowed.err
    assert "importing foreign_code" in allowed.err
    assert mark.exists()


def test_what_is_defined_here_stays_here(site: Path, tmp_path: Path) -> None:
    """A class of a function or a notebook works in one process, and is refused where another would need it."""

    @bespoke.register
    class Mine(FedAvg):
        """FedAvg under another name."""

        card = replace(FedAvg.card, name="mine")

    common: dict[str, Any] = {"data": {"source": "clinics"}, "model": MODEL}
    done = bespoke.run({**common, "stage": [{"method": Mine, "rounds": 1}]}, tmp_path / "mine")
    plain = bespoke.run({**common, "stage": [{"method": "fedavg", "rounds": 1}]}, tmp_path / "plain")
    assert done["query"] == plain["query"]
    with pytest.raises(UserError, match=r"runs at a time.*module of its own"):
        bespoke.compare(data="clinics", methods=["mine"], seeds=2, rounds=1, jobs=2, out=tmp_path / "two")
    with pytest.raises(UserError, match=r"engine.workers = 2.*module of its own"):
        bespoke.run({**common, "engine": {"workers": 2}, "stage": [{"method": Mine, "rounds": 1}]}, tmp_path / "w")
    with pytest.raises(UserError, match="needs a name of its own"):
        bespoke.register(type("FedAvg2", (FedAvg,), {}))


def test_what_is_of_another_kind_is_refused(site: Path) -> None:
    names.trust("outside_doors.clinics:load", "outside_doors.rounds:in_turn", "outside_doors.fedper:FedPer")
    with pytest.raises(UserError, match=r"exp.toml: outside_doors.clinics:load is not a method: it must be a class"):
        METHODS.find("outside_doors.clinics:load", "exp.toml")
    with pytest.raises(UserError, match="is not a source: it must be a function"):
        load_source("outside_doors.fedper:FedPer")
    with pytest.raises(UserError, match="has to return a population"):
        load_source(names.handed_over(lambda: 3))
    with pytest.raises(UserError, match=r"has to return a client for each of 1797 rows.*of shape \(3,\)"):
        load_source("digits", partition=names.handed_over(lambda labels, clients, seed: [0, 1, 2]))
    for registry, kind in (("metric", "does not say which direction"), ("optimizer", "is not a server optimizer")):
        with pytest.raises(UserError, match=kind):
            REGISTRIES[registry].find("outside_doors.rounds:in_turn", "exp.toml")
    with pytest.raises(UserError, match="say what it is: kind = one of"):
        bespoke.register(test_the_battery)
    with pytest.raises(UserError, match="'uniform' is the name of a built-in sampling"):
        bespoke.register(kind="sampling", name="uniform")(lambda random, round, wanted, sizes: [0])
    with pytest.raises(UserError, match=r"has knobs \(pull\): put @dataclass"):
        bespoke.register(type("Pulled", (FedAvg,), {"card": replace(FedAvg.card, name="p"), "pull": knob(1.0, "")}))
