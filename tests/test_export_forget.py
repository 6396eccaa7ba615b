"""Personal models as artefacts, and forgetting a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bespoke.api import run as run_experiment
from bespoke.data.population import Population
from bespoke.deploy.export import client_folder, export_personal, load_personal
from bespoke.deploy.forget import forget_client
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import prepare
from bespoke.experiment.reading import read_config
from bespoke.methods import METHODS
from bespoke.runs.finished import personal_model
from bespoke.runs.folder import RunFolder, read_checkpoint
from bespoke.runs.forgotten import is_forgotten
from bespoke.storage import open_arrays
from small_methods import SmallDitto

CLIENTS = ("north", "south", "east", "über / 4", "tiny")
ROWS = (20, 14, 9, 12, 1)


@pytest.fixture(autouse=True)
def stateful_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own list of methods has to have one with private state."""
    monkeypatch.setattr(METHODS, "built_in", {**METHODS.built_in, "small-ditto": SmallDitto})


def write_table(path: Path, classes: bool = False) -> None:
    """Two numbers with gaps on very different scales, a category, a target with an offset and a unit."""
    random = np.random.default_rng(8)
    total = sum(ROWS)
    who = np.repeat(CLIENTS, ROWS)
    height, income = random.normal(170, 10, total), random.normal(3e4, 1e4, total)
    own = np.repeat(random.normal(0, 1, len(ROWS)), ROWS)
    target = 500 + 30 * own + 2 * (height - 170) + 1e-3 * income + random.normal(0, 5, total)
    colour = random.choice(["red", "green", "blue"], total)
    height[random.random(total) < 0.15] = np.nan
    table = pd.DataFrame({"who": who, "height": height, "income": income, "colour": colour, "target": target})
    if classes:
        table["target"] = np.where(target > 540, "high", np.where(target > 500, "middle", "low"))
    table.to_csv(path, index=False)


def begin(folder: Path, stages: list[dict[str, Any]], classes: bool = False, **rest: Any) -> Path:
    """Run an experiment on the table; returns the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "table.csv", classes)
    data = {"table": str(folder / "table.csv"), "client": "who", "target": "target", **rest.pop("data", {})}
    settings = {"data": data, "stage": stages, "engine": {"kind": "looped", "workers": 0}, **rest}
    run_experiment(settings, folder / "run")
    return folder / "run"


DITTO = [{"method": "small-ditto", "rounds": 3, "batch_size": 4}]
TUNED = [{"method": "fedavg", "rounds": 3}, {"method": "finetune", "epochs": 4, "lrs": [0.1, 0.01]}]
WARM = [{"method": "ensemble", "rounds": 2}, {"method": "hypcluster", "rounds": 2}]
SHARED = [{"method": "hypcluster", "rounds": 3, "share": "body", "server": "adam"}]
BY_CLIENT = [TUNED[0], {**TUNED[1], "choose": "client"}]
KNN = [TUNED[0], {"method": "knn-per", "k": 3, "weight": "inverse", "mix": [0.3, 0.8]}]


def opened(run: Path) -> tuple[ExperimentConfig, Population, Experiment]:
    config = read_config(run / "config.toml")
    prepared = prepare(config, load_population(config))
    return config, prepared.plain, build(config, prepared=prepared)


def query_rows(run: Path, client: str) -> tuple[np.ndarray, np.ndarray]:
    """The client's query rows as the source gives them: features in the units of the data, gaps and all."""
    _, raw, experiment = opened(run)
    rows, _ = experiment.split.test.query.of(np.array([raw.index(client)]))
    return raw.columns["x"][rows].numpy(), raw.columns["y"][rows].numpy()


def results(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "clients.parquet").set_index("client")


@pytest.mark.parametrize(
    ("stages", "rest"),
    [
        (TUNED, {}),
        (BY_CLIENT, {}),
        (DITTO, {}),
        (TUNED, {"data": {"standardize": "client"}}),
        (TUNED, {"data": {"standardize": "none", "features": ["colour"]}}),
        (TUNED, {"model": {"name": "mlp", "hidden": [3]}}),
        ([{"method": "local", "epochs": 4, "every": 2, "lrs": [0.1]}], {}),
        (WARM, {}),
        (SHARED, {"model": {"name": "mlp", "hidden": [3]}}),
        ([{"method": "ditto", "rounds": 3}], {}),
        ([{"method": "ditto", "rounds": 1}], {"cohort": {"size": 2}}),
        ([{"method": "mr-mtl", "rounds": 3}], {}),
        ([{"method": "mocha", "rounds": 3}], {}),
        ([{"method": "mocha", "rounds": 1}], {"cohort": {"size": 2}}),
        ([{"method": "pfedme", "rounds": 3, "personal_lr": 0.03}], {}),
        ([{"method": "per-fedavg", "rounds": 3}], {}),
        ([{"method": "apfl", "rounds": 1}], {"cohort": {"size": 2}}),
        ([{"method": "scaffold", "rounds": 3}], {}),
        (KNN, {}),
        ([KNN[0], {**KNN[1], "choose": "client", "capacity": 5}], {"model": {"name": "mlp", "hidden": [3]}}),
    ],
    ids=[
        "finetune",
        "chosen by client",
        "private model",
        "client scaling",
        "unscaled",
        "mlp",
        "local",
        "clusters",
        "weight sharing",
        "ditto",
        "ditto, some never trained",
        "mr-mtl",
        "mocha",
        "mocha, some never trained",
        "pfedme",
        "per-fedavg",
        "apfl, some never trained",
        "scaffold",
        "memory",
        "memory of an mlp",
    ],
)
def test_export_predicts_as_the_run_did(tmp_path: Path, stages: Any, rest: Any) -> None:
    """On raw rows, in the target's own units: the mean squared errors are those of clients.parquet."""
    run = begin(tmp_path, stages, **json.loads(json.dumps(rest)))
    table = results(run)
    assert set(table.index) == set(CLIENTS) - {"tiny"}
    gaps = 0
    for client in table.index:
        written = export_personal(run, client)
        model = load_personal(written["folder"])
        x, y = query_rows(run, client)
        gaps += int(np.isnan(x).sum())
        assert ((model.predict(x) - y) ** 2).mean() == pytest.approx(table.loc[client, "query_mse"], rel=1e-3)
        assert written["candidate"] == table.loc[client, "candidate"]
    assert gaps > 0 or "features" in rest.get("data", {})


@pytest.mark.parametrize(
    ("name", "classes"), [("logistic", ("high", "low", "middle")), ("mlp", ("high", "low", "middle"))]
)
@pytest.mark.parametrize("stages", [TUNED, KNN], ids=["finetune", "memory"])
def test_classes_come_out_by_name(tmp_path: Path, name: str, classes: tuple[str, ...], stages: Any) -> None:
    run = begin(tmp_path, stages, classes=True, model={"name": name})
    table = results(run)
    for client in table.index:
        model = load_personal(export_personal(run, client)["folder"])
        assert tuple(model.about["classes"]) == classes
        x, y = query_rows(run, client)
        said = model.predict(x)
        assert (said == np.asarray(classes)[y]).mean() == pytest.approx(table.loc[client, "query_accuracy"])
        chances = model.probabilities(x)
        assert chances.sum(1) == pytest.approx(np.ones(len(x)), abs=1e-5)
        assert np.asarray(classes)[chances.argmax(1)].tolist() == said.tolist()


def test_a_mixed_model_knows_how_far_it_may_be_off(tmp_path: Path) -> None:
    run = begin(tmp_path, [{"method": "mixed", "rounds": "auto"}])
    model = load_personal(export_personal(run, "north", tmp_path / "model")["folder"])
    rows = np.array([[170.0, 3e4, 1, 0, 0], [200.0, np.nan, 0, 1, 0]])[:, : len(model.about["features"])]
    rows = np.pad(rows, ((0, 0), (0, len(model.about["features"]) - rows.shape[1])))
    (low, high), (lower, higher) = model.interval(rows, 0.5), model.interval(rows, 0.9)
    middle = model.predict(rows)
    np.testing.assert_allclose((low + high) / 2, middle)
    np.testing.assert_allclose((higher - lower) / (high - low), 1.644854 / 0.674490, rtol=1e-4)
    with pytest.raises(UserError, match="level = 2"):
        model.interval(rows, 2)
    other = begin(tmp_path / "other", [{"method": "fedavg", "rounds": 1}])
    plain = load_personal(export_personal(other, "north", tmp_path / "plain")["folder"])
    with pytest.raises(UserError, match="only a mixed model"):
        plain.interval(rows)


def test_export_is_the_runs_own_model_to_the_bit(tmp_path: Path) -> None:
    run = begin(tmp_path, DITTO)
    _, raw, experiment = opened(run)
    params, candidate = personal_model(RunFolder(run), experiment, raw.index("south"))
    written = export_personal(run, "south", tmp_path / "elsewhere")
    assert written == {
        "folder": str(tmp_path / "elsewhere"), "client": "south", "candidate": candidate,
        "parameters": len(raw.about["features"]) + 1,
    }  # fmt: skip
    loaded = load_personal(tmp_path / "elsewhere")
    assert all(torch.equal(loaded.params[name], leaf) for name, leaf in params.items())
    assert not (run / "personal").exists()


def test_a_client_never_seen_holds_what_the_stage_began_with(tmp_path: Path) -> None:
    """In the second stage nobody is drawn but a few: the private model of the others is FedAvg's, not the last one."""
    stages = [{"method": "fedavg", "rounds": 3}, {**DITTO[0], "rounds": 1}]
    run = begin(tmp_path, stages, cohort={"size": 1})
    touched = {c for path in (run / "private").iterdir() for c in open_arrays(path)[0]["clients"].tolist()}
    assert len(touched) == 1
    _, raw, experiment = opened(run)
    folder = RunFolder(run)
    began = folder.beginning(1).server["params"]
    found = folder.latest()
    assert found is not None
    assert not torch.equal(found.server["params"]["weight"], began["weight"])
    (run / "choices.json").write_text(json.dumps({"default": 1, "own": {}}))  # "private"
    for client in set(range(len(raw))) - touched - {raw.index("tiny")}:
        params, _ = personal_model(folder, experiment, client)
        assert torch.equal(params["weight"], began["weight"])
    table = results(run)
    assert (table["candidate"].nunique()) == 1


def test_clients_of_one_row_and_unknown_ones(tmp_path: Path) -> None:
    run = begin(tmp_path, TUNED)
    assert export_personal(run, "tiny")["client"] == "tiny"  # one row: it trains on it, so it can adapt on it
    with pytest.raises(UserError, match="no client 'nobody'"):
        export_personal(run, "nobody")


def test_folders_of_clients_are_safe_and_different(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "../../etc", "..", "", "über / 4", "x" * 300, "x" * 301, "A b", "a b", "a?b", "con\n"]
    folders = {client_folder(tmp_path, name) for name in names}
    assert len(folders) == len(names)
    for folder in folders:
        assert folder.resolve().parent == (tmp_path / "personal").resolve()
        assert len(folder.name) < 100


@pytest.mark.parametrize("damage", ["missing", "json", "format", "arrays"])
def test_damaged_models_are_named(tmp_path: Path, damage: str) -> None:
    run = begin(tmp_path, TUNED)
    folder = Path(export_personal(run, "north")["folder"])
    if damage == "missing":
        (folder / "model.json").unlink()
    elif damage == "json":
        (folder / "model.json").write_text("{")
    elif damage == "format":
        (folder / "model.json").write_text(json.dumps({"format": 9}))
    else:
        (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=str(folder)):
        load_personal(folder)


# -- forgetting --------------------------------------------------------------------------------------------------------
def private_row(run: Path, position: int) -> list[bytes]:
    rows = []
    for path in sorted((run / "private").glob("*.safetensors")):
        arrays, _ = open_arrays(path)
        rows += [row.numpy().tobytes() for c, row in zip(arrays["clients"].tolist(), arrays["rows"]) if c == position]
    return rows


def everywhere(run: Path, needle: bytes) -> list[str]:
    return [str(path) for path in run.rglob("*") if path.is_file() and needle in path.read_bytes()]


def test_forget_removes_private_state_and_model(tmp_path: Path) -> None:
    run = begin(tmp_path, DITTO)
    _, raw, _ = opened(run)
    position = raw.index("north")
    for client in ("north", "south"):
        export_personal(run, client)
    rows, kept = private_row(run, position), private_row(run, raw.index("south"))
    assert rows
    assert kept
    own = open_arrays(client_folder(run, "north") / "model.safetensors")[0]["weight"].numpy().tobytes()
    assert everywhere(run, rows[-1])
    before = (client_folder(run, "south") / "model.safetensors").read_bytes()

    receipt = forget_client(run, "north")
    assert private_row(run, position) == []
    assert private_row(run, raw.index("south")) == kept
    assert not client_folder(run, "north").exists()
    assert (client_folder(run, "south") / "model.safetensors").read_bytes() == before
    for trace in (*rows, own):
        assert everywhere(run, trace) == []
    assert is_forgotten(run, "north")
    assert not is_forgotten(run, "south")

    assert receipt["client"] == "north"
    assert receipt["traces_left"] == 0
    assert receipt["traces_searched"] >= len(rows)
    assert receipt["files_searched"] == len([p for p in run.rglob("*") if p.is_file()])
    assert "personal/north" in receipt["deleted"]
    assert any(name.startswith("private/") for name in receipt["deleted"])
    assert any("shared model" in line for line in receipt["remains"])
    assert any("north" in line for line in receipt["summary"])

    with pytest.raises(UserError, match="already forgotten"):
        forget_client(run, "north")
    with pytest.raises(UserError, match="was forgotten"):
        export_personal(run, "north")
    assert export_personal(run, "south")["client"] == "south"  # the others are as they were
    assert (client_folder(run, "south") / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("stages", "rest"),
    [
        (TUNED, {}),
        (TUNED, {"data": {"standardize": "client"}}),
        (BY_CLIENT, {}),
        ([TUNED[0], {**TUNED[1], "part": "last"}], {"model": {"name": "mlp", "hidden": [2]}}),
        ([TUNED[0]], {}),
        (KNN, {}),
        ([{"method": "ditto", "rounds": 2}], {}),
        ([{"method": "mocha", "rounds": 2}], {}),
    ],
    ids=[
        "finetune",
        "client scaling",
        "chosen by client",
        "frozen layers",
        "nothing personal",
        "memory",
        "ditto",
        "mocha",
    ],
)
def test_forget_after_exporting_everyone(tmp_path: Path, stages: Any, rest: Any) -> None:
    """Arrays that all models share (common means, frozen layers, the shared model itself) are nobody's traces."""
    run = begin(tmp_path, stages, **json.loads(json.dumps(rest)))
    for client in CLIENTS:
        export_personal(run, client)
    receipts = [forget_client(run, client) for client in CLIENTS]
    assert all(receipt["traces_left"] == 0 for receipt in receipts)
    assert not any((run / "personal").iterdir())
    assert json.loads((run / "choices.json").read_text())["own"] == {}
    text = (run / "forgotten.json").read_text()
    assert len(json.loads(text)["keys"]) == len(CLIENTS)
    assert "north" not in text  # the mark is a hash


def test_a_server_which_knows_its_clients_forgets_too(tmp_path: Path) -> None:
    """Mocha's server holds every client's weights, and how clients are related: the row is as of one never seen."""
    run = begin(tmp_path, [{"method": "mocha", "rounds": 2}])
    [last] = sorted((run / "checkpoints").glob("*-0000002.safetensors"))
    before, place = read_checkpoint(last).server, opened(run)[1].index("north")
    row = before["weights"]["weight"][place].numpy().tobytes()
    assert everywhere(run, row)
    receipt = forget_client(run, "north")
    assert everywhere(run, row) == []
    assert f"checkpoints/{last.name}" in receipt["deleted"]
    after = read_checkpoint(last).server
    others = [i for i in range(len(CLIENTS)) if i != place]
    assert torch.equal(after["weights"]["weight"][others], before["weights"]["weight"][others])
    assert not after["trained"][place]
    assert not after["relation"][place, others].any()
    assert export_personal(run, "south")["client"] == "south"


def test_forget_removes_a_memory(tmp_path: Path) -> None:
    """The features that lie in an exported model are rows of the client: not a byte of them may be left."""
    run = begin(tmp_path, KNN)
    model = load_personal(export_personal(run, "north")["folder"])
    memory = model.params["memory"]["features"].numpy().tobytes()
    assert everywhere(run, memory)
    receipt = forget_client(run, "north")
    assert everywhere(run, memory) == []
    assert "personal/north" in receipt["deleted"]


def test_forget_a_client_without_private_state(tmp_path: Path) -> None:
    run = begin(tmp_path, TUNED)
    receipt = forget_client(run, "east")
    assert set(receipt["deleted"]) == {"clients.parquet", "rows.parquet", "result.json"}
    assert receipt["digest_of_deleted"] is None
    with pytest.raises(UserError, match="no client 'west'"):
        forget_client(run, "west")


@pytest.mark.parametrize("name", [".{}.4242.partial", ".tmpOvudSM"])
def test_half_written_private_state_is_swept_before_forgetting(tmp_path: Path, name: str) -> None:
    """A run killed while writing a segment leaves a file beside it, which holds rows too."""
    run = begin(tmp_path, DITTO)
    _, raw, _ = opened(run)
    segment = next((run / "private").glob("*.safetensors"))
    row = private_row(run, raw.index("north"))[0]
    (run / "private" / name.format(segment.name)).write_bytes(segment.read_bytes())
    forget_client(run, "north")
    assert everywhere(run, row) == []


def test_what_is_not_a_finished_run_is_said_so(tmp_path: Path) -> None:
    act = export_personal
    for refuses in (export_personal, forget_client):
        with pytest.raises(UserError, match="not a run folder"):
            refuses(tmp_path, "north")
    run = begin(tmp_path, TUNED)
    (tmp_path / "comparison" / "runs").mkdir(parents=True)
    run.rename(tmp_path / "comparison" / "runs" / "finetune-seed0")
    with pytest.raises(UserError, match=r"is a comparison; name one of its runs: .*finetune-seed0"):
        act(tmp_path / "comparison", "north")
    inside = tmp_path / "comparison" / "runs" / "finetune-seed0"
    (inside / "result.json").unlink()
    with pytest.raises(UserError, match="unfinished"):
        act(inside, "north")
