"""Tables of three sites under one schema: encoded alike, standardized by all rows together, and used to predict."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.data.tables.schema import Schema
from bespoke.deploy.export import export_personal, load_personal
from bespoke.deploy.federated.guarded import GuardedSite
from bespoke.deploy.federated.place import SiteHost
from bespoke.deploy.flare.executor import rules_of
from bespoke.deploy.flare.predict import predict
from bespoke.deploy.flare.rows import load_rows
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from command import bespoke
from deploy.sites_here import NAMES, Line, hub
from deploy.test_federation import assert_like
from test_protocol import LOOPED

COLUMNS = ["ward", "age", "sex", "ill", "stay"]
SCHEMA = {
    "columns": {
        "age": {"kind": "number"}, "sex": {"kind": "category", "categories": ["f", "m"], "other": False},
        "ill": {"kind": "boolean"},
    },
    "target": {"name": "stay"},
}  # fmt: skip
STAGES = [
    {"method": "fedavg", "rounds": 2, "lr": 0.1, "batch_size": 8},
    {"method": "ditto", "rounds": 3, "lr": 0.1, "batch_size": 8},
]


def rows() -> list[list[Any]]:
    random = np.random.default_rng(8)
    found: list[list[Any]] = []
    for ward in range(9):
        for _ in range(14 + ward):
            age, sex, ill = random.integers(20, 90), random.choice(["f", "m"]), bool(random.integers(2))
            stay = 3 + 0.1 * (1 + ward / 4) * age + (2 if sex == "m" else 0) + ward * ill + random.normal()
            found.append([f"ward {ward}", int(age) if random.random() > 0.05 else "", sex, ill, round(float(stay), 3)])
    return found


def write(path: Path, table: list[list[Any]], columns: list[str] = COLUMNS) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([columns, *table])
    return path


def kit(folder: Path, table: Path | None, schema: Path) -> dict[str, Any]:
    """What a site's kit says of its rows, as `bespoke deploy site` writes it."""
    said = {
        "data": str(table), "schema": str(schema), "columns": {"client": "ward"}, "state": str(folder / "state"),
        "least": 1, "epsilon": None, "delta": None, "methods": None, "share_clients": True,
    }  # fmt: skip
    (folder / "kit" / "local").mkdir(parents=True)
    (folder / "kit" / "local" / "bespoke.json").write_text(json.dumps(said))
    return said


def federated(folder: Path) -> None:
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    lines = {}
    for place, name in enumerate(NAMES):
        mine = [row for row in rows() if int(row[0][-1]) % 3 == place]
        table = write(folder / f"{name}.csv", mine)
        said = kit(folder / name, table, folder / "schema.json")
        host = SiteHost(load_rows(said), Path(said["state"]), rules_of(said), LOOPED.mode())
        lines[name] = Line(GuardedSite(host, folder / name / "state" / "sent.jsonl"))
    hub(checked({"stage": STAGES, "cohort": {"size": 6}}, "test"), folder / "hub").run(lambda: lines)


def simulated(folder: Path) -> None:
    Schema.of(SCHEMA, "test").write(folder / "all.json")
    data = {"table": str(write(folder / "all.csv", rows())), "client": "ward", "target": "stay",
            "schema": str(folder / "all.json")}  # fmt: skip
    config = checked({"data": data, "stage": STAGES, "cohort": {"size": 6}}, "test")
    Run(build(config), RunFolder.create(folder / "here", to_toml(config)), how=LOOPED, checkpoint_seconds=0.0).run()


def test_tables_of_three_sites_give_the_results_and_the_predictions_of_one(tmp_path: Path) -> None:
    federated(tmp_path)
    simulated(tmp_path)
    assert_like(tmp_path / "hub", tmp_path / "here")
    new = [["ward 4", 50, "m", True], ["ward 1", 33, "f", False], ["ward 4", "", "f", True], ["ward 0", 20, "m", True]]
    found = predict(tmp_path / "north", write(tmp_path / "new.csv", new, COLUMNS[:4]))
    assert found.clients == ["ward 4", "ward 1", "ward 4", "ward 0"]
    assert found.strangers == ["ward 0"]  # it lives at another site
    for (ward, age, sex, ill), value in zip(new[:3], found.values):
        model = load_personal(Path(export_personal(tmp_path / "here", str(ward))["folder"]))
        x = [[np.nan if age == "" else age, sex == "f", sex == "m", ill]]
        assert model.about["features"] == ["age", "sex = f", "sex = m", "ill"]
        assert value == pytest.approx(float(model.predict(np.array(x, dtype=np.float32))[0]), rel=1e-3)


def test_predictions_from_the_command_line(tmp_path: Path) -> None:
    federated(tmp_path)
    new = write(tmp_path / "new.csv", [["ward 4", 50, "m", True], ["ward 9", 33, "f", False]], COLUMNS[:4])
    done = bespoke("deploy", "predict", str(tmp_path / "north"), "--rows", str(new))
    assert done.code == 0
    head, first, second = done.out.splitlines()
    assert head == "client,predicted stay"
    assert float(first.removeprefix("ward 4,")) == pytest.approx(predict(tmp_path / "north", new).values[0])
    assert second == "ward 9,"
    assert "no prediction for 1 clients without a personal model: ward 9" in done.err


def test_a_site_without_models_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no site's folder"):
        predict(tmp_path, tmp_path / "new.csv")
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    kit(tmp_path / "north", None, tmp_path / "schema.json")
    with pytest.raises(UserError, match="has no personal models yet"):
        predict(tmp_path / "north", tmp_path / "new.csv")
