"""Forgetting a client in a whole comparison: by id and by bytes, after any crash, and for good."""

from __future__ import annotations

import html
import json
import os
import shutil
import signal
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open

from bespoke import forget, tune
from bespoke.api import run as run_experiment
from bespoke.declarations import Card
from bespoke.deploy import scrub
from bespoke.deploy.export import client_folder, export_personal
from bespoke.errors import UserError
from bespoke.methods import METHODS
from bespoke.report.page import write_report
from bespoke.report.report import summarize
from bespoke.study.comparison import Comparison
from bespoke.tensors import tree_map
from command import bespoke, plain_table, write_csv
from small_methods import SmallDitto

WHO = 'Zoë "7" <b>'  # as awkward in JSON and in HTML as an id may be
ENGINE = {"kind": "looped", "workers": 0}
PLAIN = json.dumps(WHO, ensure_ascii=False)[1:-1]
WAYS = (
    WHO, html.escape(WHO), html.escape(WHO, quote=False), PLAIN, PLAIN.replace("<", "\\u003c"), json.dumps(WHO)[1:-1],
    json.dumps(json.dumps(WHO))[3:-3],
)  # fmt: skip
LEFT = ["c0", "c1", "c2", "c4", "c5"]


def table(folder: Path) -> dict[str, Any]:
    rows = plain_table(6, 16)
    rows.loc[rows["client"] == "c3", "client"] = WHO
    return {"table": str(write_csv(folder / "t.csv", rows)), "client": "client", "target": "y"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tuned comparison with private state, shared stages, an analysis, an exported model, a summary and a report."""
    folder = tmp_path_factory.mktemp("compared")
    Comparison(
        {"data": table(folder), "engine": ENGINE, "model": {"name": "linear"}}, folder / "c",
        ("fedavg", "ditto", "finetune"), (0,), 2, grid={"ditto": {"lam": [0.1, 1.0]}, "finetune": {}, "fedavg": {}},
        knobs={"finetune": {"epochs": 2, "lrs": [0.1, 0.01], "choose": "client"}},
    ).run()  # fmt: skip
    from bespoke.analysis.analyze import Analyses, Wanted

    Analyses((folder / "c/runs/finetune-seed0",), Wanted(ood=True, per_client=True, sweeps=("lrs",))).run()
    export_personal(folder / "c/runs/ditto-seed0", WHO)
    write_report([folder / "c"], folder / "c/report.html")
    (folder / "c/summary.json").write_text(summarize([folder / "c"]).to_json())
    return folder / "c"


@pytest.fixture(autouse=True, scope="module")
def _short_plotly() -> Iterator[None]:
    """Megabytes of script say nothing of the client, and take long to pack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
        yield


@pytest.fixture
def copy(compared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compared, tmp_path / "c")


def private_rows(folder: Path) -> list[bytes]:
    """Every row of the client's private state (clients are numbered in the order of their ids)."""
    place = sorted(["c0", "c1", "c2", WHO, "c4", "c5"]).index(WHO)
    found = []
    for path in folder.rglob("private/*.safetensors"):
        with safe_open(path, "np") as arrays:
            clients, rows = arrays.get_tensor("clients"), arrays.get_tensor("rows")
        found += [row.tobytes() for row in rows[clients == place]]
    return found


def named_in(folder: Path) -> list[str]:
    """Files that hold the id, decoded by other libraries than those under test use."""
    found = []
    for path in sorted(folder.rglob("*")):
        text = path.name
        if path.suffix == ".parquet":
            text += pd.read_parquet(path).to_csv(sep="|", quoting=3, escapechar="\\").replace("\\", "")
        elif path.is_file():
            text += path.read_bytes().decode(errors="replace")
        if any(way in text for way in WAYS):
            found.append(str(path.relative_to(folder)))
    return found


def with_bytes(folder: Path, traces: list[bytes]) -> list[str]:
    """Files that hold one of these rows, tables uncompressed."""
    found = []
    for path in (path for path in folder.rglob("*") if path.is_file()):
        parts = [path.read_bytes()]
        if path.suffix == ".parquet":
            parts += [column.to_numpy().tobytes() for _, column in pd.read_parquet(path).items()]
        found += [str(path) for trace in traces if any(trace in part for part in parts)]
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but locks, wall times and receipts."""
    aside = (".lock", "timing.jsonl", "forgotten.json")
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in aside)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def finished(compared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What an uninterrupted forgetting leaves, and its receipt."""
    folder = shutil.copytree(compared, tmp_path_factory.mktemp("finished") / "c")
    return folder, forget(folder, WHO)


def test_a_whole_comparison_forgets(compared: Path, finished: tuple[Path, dict[str, Any]]) -> None:
    rows, before = private_rows(compared), set(named_in(compared))
    assert len(rows) >= 3  # of the run and of the trials
    assert {"report.html", "summary.json", "runs/finetune-seed0/analysis/ood.parquet",
            "runs/ditto-seed0/clients.parquet", "runs/finetune-seed0/choices.json"} <= before  # fmt: skip
    assert any(name.startswith("tuning/") for name in before)
    copy, receipt = finished
    assert named_in(copy) == []
    assert with_bytes(copy, rows) == []
    assert private_rows(copy) == []
    assert receipt["named_in"] == []
    assert receipt["not_made_anew"] == []
    assert receipt["traces_searched"] >= len(set(rows))
    assert client_folder(compared / "runs/ditto-seed0", WHO).is_dir()
    assert not client_folder(copy / "runs/ditto-seed0", WHO).exists()
    assert {name for name in before if "/personal/" not in name} <= set(receipt["deleted"])
    assert any("shared model" in line for line in receipt["remains"])
    assert any("outside of this folder" in line for line in receipt["remains"])
    stored = json.loads((copy / "forgotten.json").read_text())["receipts"]
    assert len(stored[0]["deleted"]) == len(receipt["deleted"])
    assert stored[0]["digest_of_deleted"] == receipt["digest_of_deleted"]
    assert not list(copy.rglob("forgetting.safetensors"))

    for path in (path for path in compared.rglob("*.parquet") if path.parent.name != "analysis"):
        old = pd.read_parquet(path)  # the others' rows are as they were
        new = pd.read_parquet(copy / path.relative_to(compared))
        pd.testing.assert_frame_equal(new, old[old["client"] != WHO].reset_index(drop=True))
    result = json.loads((copy / "runs/ditto-seed0/result.json").read_text())
    left = pd.read_parquet(copy / "runs/ditto-seed0/clients.parquet")
    assert result["clients"] == len(left) == 5
    assert result["query"] == pytest.approx(left["query_mse"].mean())
    summary = json.loads((copy / "summary.json").read_text())
    assert summary["clients"] == 5
    assert "c4" in (copy / "report.html").read_text()
    analysis = pd.read_parquet(copy / "runs/finetune-seed0/analysis/ood.parquet")
    assert sorted(analysis["client"]) == LEFT
    assert sorted(path.name for path in (copy / "runs/finetune-seed0/analysis").glob("*.json")) == [
        "ood.json", "per-client.json", "sweep-lrs.json"]  # fmt: skip


def test_nothing_brings_the_client_back(copy: Path) -> None:
    """Resuming a comparison, with a run lost and one more method, and reporting again."""
    forget(copy, WHO)
    shutil.rmtree(copy / "runs/ditto-seed0")
    data = tomllib.loads((copy / "runs/fedavg-seed0/config.toml").read_text())["data"]
    Comparison(
        {"data": data, "engine": ENGINE, "model": {"name": "linear"}}, copy,
        ("fedavg", "ditto", "finetune", "local"), (0,), 2,
        grid={"ditto": {"lam": [0.1, 1.0]}, "finetune": {}, "fedavg": {}, "local": {}},
        knobs={"finetune": {"epochs": 2, "lrs": [0.1, 0.01], "choose": "client"}},
    ).run()  # fmt: skip
    write_report([copy], copy / "report.html")
    assert sorted(pd.read_parquet(copy / "runs/ditto-seed0/clients.parquet")["client"]) == LEFT
    assert len(pd.read_parquet(copy / "runs/local-seed0/clients.parquet")) == 5
    assert private_rows(copy) == []
    assert named_in(copy) == []
    with pytest.raises(UserError, match="was forgotten"):
        export_personal(copy / "runs/ditto-seed0", WHO)  # a run that was made after the forgetting
    with pytest.raises(UserError, match="already forgotten"):
        forget(copy, WHO)


def test_one_run_says_where_the_client_still_is(copy: Path) -> None:
    receipt = forget(copy / "runs/ditto-seed0", WHO)
    assert any(f"other runs of {copy.resolve()}" in line for line in receipt["remains"])
    assert named_in(copy / "runs/ditto-seed0") == []
    assert named_in(copy)
    forget(copy, WHO)
    assert named_in(copy) == []


@dataclass
class Killer:
    """Ends this process at once at the n-th call of something."""

    count: int

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count -= 1

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            self()
            return function(*arguments, **named)

        return called


def killed(folder: Path, what: str, count: int) -> bool:
    """Forget in a child process that is killed; false if it came to its end before."""
    child = os.fork()
    if child == 0:
        killer = Killer(count)
        if what == "overwrite":
            scrub.overwrite = killer.before(scrub.overwrite)
        else:
            setattr(os, what, killer.before(getattr(os, what)))
        forget(folder, WHO)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("what", "count"),
    [("replace", 1), ("link", 3), ("overwrite", 12), ("replace", 35)],
)
def test_a_killed_forgetting_is_finished_by_the_same_command(
    compared: Path, copy: Path, what: str, count: int, finished: tuple[Path, dict[str, Any]]
) -> None:
    rows = private_rows(compared)
    assert killed(copy, what, count)
    if (copy / "forgetting.safetensors").exists():
        with pytest.raises(UserError, match="was interrupted; finish that first"):
            forget(copy, "c4")
    receipt = forget(copy, WHO)
    assert receipt["named_in"] == []
    assert named_in(copy) == []
    assert with_bytes(copy, rows) == []
    found, whole = contents(copy), contents(finished[0])
    assert sorted(found) == sorted(whole)
    assert [name for name in found if found[name] != whole[name]] == []


class Broken(SmallDitto):
    """The client with thirteen training rows sends nothing finite."""

    card = Card("broken")

    def client_round(self, down: Any, private: Any, batches: Any) -> Any:
        private, sent = super().client_round(down, private, batches)
        broken = torch.where(batches.examples == 13, torch.nan, 0.0)
        return private, {**sent, "delta": tree_map(lambda leaf: leaf + broken, sent["delta"])}


def test_logs_and_checkpoints_name_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished run in whose logs and checkpoints the client is named goes on without it."""
    monkeypatch.setattr(METHODS, "built_in", {**METHODS.built_in, "broken": Broken})
    rows = plain_table(5, 12)
    more = plain_table(1, 26).assign(client=WHO)
    path = write_csv(tmp_path / "t.csv", pd.concat([rows, more]))
    experiment = {
        "data": {"table": str(path), "client": "client", "target": "y"}, "engine": ENGINE,
        "stage": [{"method": "broken", "rounds": 3}], "split": {"fractions": [0.5, 0.25, 0.25]},
    }  # fmt: skip
    run = tmp_path / "run"
    run_experiment(experiment, run)
    whole = (run / "rounds.jsonl").read_bytes()
    named = {"rounds.jsonl", "result.json", "clients.parquet", "checkpoints/000-0000003.safetensors"}
    assert named <= set(named_in(run))
    (run / "result.json").unlink()  # as if it had been killed before its end
    forget(run, WHO)
    assert named_in(run) == []
    assert len((run / "rounds.jsonl").read_bytes()) == len(whole)
    result = run_experiment(experiment, run)
    assert result["excluded"] == {}
    assert result["clients"] == 5
    assert named_in(run) == []


def test_a_tuning_forgets(tmp_path: Path) -> None:
    """Trials keep no choices.json; that is no reason to stop."""
    experiment = {"data": table(tmp_path), "engine": ENGINE, "stage": [{"method": "ditto", "rounds": 2}]}
    tune(experiment, tmp_path / "tuned", space={"ditto": {"lam": [0.1, 1.0]}})
    assert private_rows(tmp_path / "tuned")
    before = json.loads((tmp_path / "tuned/tune.json").read_text())
    told = bespoke("forget", tmp_path / "tuned", "--client", WHO)
    assert told.code == 0, told.err
    assert "What cannot be undone" in told.out
    assert private_rows(tmp_path / "tuned") == []
    assert named_in(tmp_path / "tuned") == []
    assert json.loads((tmp_path / "tuned/tune.json").read_text()) == before
    again = tune(experiment, tmp_path / "tuned", space={"ditto": {"lam": [0.1, 1.0]}})
    assert again["best"] == before["best"]
    assert named_in(tmp_path / "tuned") == []


def test_a_short_id_that_is_also_another_word(tmp_path: Path) -> None:
    """The receipt says where the word is left; numbers that are no clients stay."""
    rows = plain_table(6, 12).assign(client=lambda t: t["client"].str[1:])
    path = write_csv(tmp_path / "t.csv", rows)
    data = {"table": str(path), "client": "client", "target": "y"}
    run_experiment({"data": data, "engine": ENGINE, "stage": [{"method": "fedavg", "rounds": 2}]}, tmp_path / "run")
    before = (tmp_path / "run/rounds.jsonl").read_bytes()
    receipt = forget(tmp_path / "run", "2")
    assert (tmp_path / "run/rounds.jsonl").read_bytes() == before
    assert "rounds.jsonl" in receipt["named_in"]
    assert sorted(pd.read_parquet(tmp_path / "run/clients.parquet")["client"]) == list("01345")
    assert np.isfinite(json.loads((tmp_path / "run/result.json").read_text())["query"])


def test_a_run_that_was_begun_with_a_category_of_the_forgotten_client(tmp_path: Path) -> None:
    """Without the client the encoding is narrower: an unfinished run says so and does not go on."""
    rows = plain_table(6, 12)
    rows["colour"] = np.where(rows["client"] == "c3", "zebra", np.where(rows["x1"] > 0, "red", "blue"))
    data = {"table": str(write_csv(tmp_path / "t.csv", rows)), "client": "client", "target": "y"}
    experiment = {"data": data, "engine": ENGINE, "stage": [{"method": "fedavg", "rounds": 2}]}
    run_experiment(experiment, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    forget(tmp_path / "run", "c3")
    with pytest.raises(UserError, match="only client with a category was forgotten"):
        run_experiment(experiment, tmp_path / "run")
