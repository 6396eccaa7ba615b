"""What a federation does as a simulation does, though the hub sees no rows: choices by size, by halves, splits by time,
models of one's own; and what sites refuse of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.data.population import Population
from bespoke.deploy.federated.place import SiteHost
from bespoke.deploy.federated.rules import Rules
from bespoke.deploy.federated.statistics import Tables, costs, under
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.choosing import ValidationScores
from bespoke.imported import TRUST
from bespoke.runs.folder import RunFolder
from deploy.sites_here import Line, hub, three
from deploy.test_federation import assert_like
from loopback import split_up
from test_protocol import asked, people, ran

FAST = {"method": "fedavg", "rounds": 2, "lr": 0.1, "batch_size": 4}
TUNED = {"method": "finetune", "lrs": [0.01, 0.1, 0.3], "epochs": 3}
DEVICES = {"protocol": "cross-device", "held_out": (0.4, 0.4), "own_validation": 0.3}


def crowd(task: str = "regression") -> Population:
    """Forty-two clients with 8 to 49 rows; the larger half have lines of their own, the others a common one. The time
    of rows is not their order."""
    random = np.random.default_rng(7)
    who = np.repeat(np.arange(42), 8 + np.arange(42))
    x = random.standard_normal((len(who), 3)).astype(np.float32)
    lines = np.ones((42, 3)) + (np.arange(42) >= 21)[:, None] * 2 * random.standard_normal((42, 3))
    y = (x * lines[who]).sum(1) + 3 * random.standard_normal(len(who))
    target = y.astype(np.float32) if task == "regression" else (y > 0).astype(np.int64)
    about: Any = {"name": "crowd", "task": task, "input": "table", "features": ["a", "b", "c"], "target": "y"}
    columns = {"x": x, "y": target, "time": random.permutation(len(who)).astype(np.int64)}
    return Population.build(columns, np.array([f"client {i:02d}" for i in range(42)])[who], about=about)


def both(config: Any, folder: Path, population: Population, rules: Rules | None = None) -> dict[str, Line]:
    """The same experiment here and on three sites."""
    ran(build(config, population), folder / "here")
    lines = three(split_up(population, 3), folder, *([rules] if rules else []))
    hub(config, folder / "hub").run(lambda: lines)
    assert_like(folder / "hub", folder / "here")
    return lines


def result_of(folder: Path) -> Any:
    return RunFolder.existing(folder / "hub").result()


@pytest.mark.parametrize("split", [{}, DEVICES], ids=["silos", "devices"])
@pytest.mark.parametrize("choose", ["size", "auto"])
def test_choices_by_size_and_by_halves_are_those_of_a_simulation(
    choose: str, split: dict[str, Any], tmp_path: Path
) -> None:
    config = asked([FAST, {**TUNED, "choose": choose}], split=split)
    lines = both(config, tmp_path, crowd())
    if choose == "auto":
        assert set(result_of(tmp_path)["chosen"]["who"]) == {"global", "client"}
        return
    rules = json.loads((tmp_path / "east" / "divisions.json").read_text())
    assert {len(edges) for edges in rules.values() if isinstance(edges, list)} == ({3} if not split else {0})
    assert not any(b"edges" in reply for line in lines.values() for reply in line.received)


def test_choices_by_size_differ_by_size(tmp_path: Path) -> None:
    """Else the test above could pass with one common choice."""
    long = {**FAST, "rounds": 25}
    both(asked([long, {**TUNED, "choose": "size"}], evaluate_every=25), tmp_path, crowd())
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "hub" / "clients.parquet").to_pydict()
    assert len(set(table["candidate"])) > 1


def test_a_split_by_time_is_made_where_the_rows_are(tmp_path: Path) -> None:
    config = asked([FAST, {"method": "ditto", "rounds": 2, "lr": 0.1}], split={"order": "time"})
    both(config, tmp_path, crowd())
    other = result_of(tmp_path)["query"]
    stored = config.model_copy(update={"split": config.split.model_copy(update={"order": "stored"})})
    (tmp_path / "stored").mkdir()
    ran(build(stored, crowd()), tmp_path / "stored" / "hub")
    assert result_of(tmp_path / "stored")["query"] != pytest.approx(other, rel=1e-3)  # the order matters


def test_sites_without_a_time_column_say_so(tmp_path: Path) -> None:
    lines = three(split_up(people(), 3), tmp_path)
    with pytest.raises(UserError, match=r"the rows of this site have no time column; .* in \[columns\] of hub.toml"):
        hub(asked([FAST], split={"order": "time"}), tmp_path / "hub").run(lambda: lines)


# -- what sums by size may show ----------------------------------------------------------------------------------------
def tables(sizes: list[int]) -> Tables:
    """Clients with so many support rows; the loss of client i is i under one candidate, and 10 i under the other."""
    many = len(sizes)
    losses = np.arange(many, dtype=np.float64)[:, None] * np.array([1.0, 10.0])
    scores = ValidationScores(np.arange(many), {"loss": losses, "count": np.ones((many, 1))})
    return Tables(np.arange(many), {"validation": scores}, {"validation": np.ones(many, np.int64)}, np.array(sizes))


def test_sums_by_size_by_hand() -> None:
    found = costs(tables([1, 1, 5, 5, 5, 9]), "validation", "loss", True, 1, [5, 9])
    assert found["cost"] == [15, 150]
    assert found["sizes"] == {"seen": [2, 3, 1], "cost": [[1, 10], [9, 90], [5, 50]]}
    assert costs(tables([1, 1, 1]), "validation", "loss", True, 3, [5])["sizes"]["seen"] == [3, 0]


def test_a_size_of_few_clients_is_in_no_answer() -> None:
    """Neither by itself, nor as the sum of all without the others, nor by choosing for it alone."""
    some = tables([1, 1, 1, 5, 5, 9])
    assert "sizes" not in costs(some, "validation", "loss", True, 2, [5, 9])
    sums = []
    for picks in ([0, 0, 0], [0, 0, 1]):
        rule = {"by": "size", "edges": [5, 9], "picks": picks, "default": 0, "lower": True, "metric": "loss"}
        request = {"part": "validation", "choice": rule, "metric": "loss", "metrics": ["loss"]}
        sums.append(under(some, request, 2)["metrics"]["loss"]["sum"])
    assert sums == [15, 15]  # the last client's 5 or 50 makes no difference


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": [20, 31]}, "were summed by sizes from .* on, and now from .20, 31.; this site sums them by one"),
        ({"accept": {"min_examples": 20, "margin": None}}, "is not that of the experiment, which is None"),
    ],
)
def test_a_hub_that_asks_again_by_another_division_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """Two sums that differ in a client would show that client; also after a restart of the site."""
    config = asked([FAST, {**TUNED, "choose": "size"}])
    lines = both(config, tmp_path, crowd())
    host: SiteHost = lines["east"].site.host
    edges = next(edges for key, edges in json.loads((tmp_path / "east" / "divisions.json").read_text()).items()
                 if key.endswith(" test"))  # fmt: skip
    rule = {"by": "size", "edges": edges, "picks": [1] * (len(edges) + 1), "default": 1, "lower": True,
            "metric": "mse", "accept": None}  # fmt: skip
    request = {"what": "under", "of": "test", "part": "validation", "metric": "mse", "metrics": ["mse"]}
    host.statistics({**request, "choice": rule})
    with pytest.raises(UserError, match=message):
        host.statistics({**request, "choice": {**rule, **change}})
    with pytest.raises(UserError, match=message):
        host.keep({"of": "test", "choice": {**rule, **change}})


# -- models of one's own -----------------------------------------------------------------------------------------------
OWN, ANOTHER = "own_models:Dropped", "own_models:Normed"
MODEL = {"name": OWN, "inputs": 3, "classes": 2}


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `bespoke deploy run` trusts what the experiment of its user names."""
    monkeypatch.setenv(TRUST, OWN)


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_model_of_ones_own_gives_the_results_of_a_simulation(method: str, tmp_path: Path) -> None:
    """A network that every site has installed and allows. Its code does not travel, and the hub tries it on no rows."""
    stage = {"method": method, "rounds": 2, "lr": 0.1, "batch_size": 4}
    config = asked([stage], model=MODEL)
    lines = both(config, tmp_path, people("classification"), Rules(least=1, share_clients=True, models=(OWN,)))
    wires = b"".join(message for line in lines.values() for message in [*line.sent, *line.received])
    assert b"own_models:Dropped" in wires
    assert b"nn.Linear" not in wires


def test_a_model_that_a_site_does_not_name_is_refused(tmp_path: Path) -> None:
    config = asked([FAST], model=MODEL)
    lines = three(split_up(people("classification"), 3), tmp_path, Rules(least=1, models=(ANOTHER,)))
    with pytest.raises(
        UserError, match=r"no code by name but for models = .'own_models:Normed'. .*names 'own_models:D"
    ):
        hub(config, tmp_path / "hub").run(lambda: lines)
    with pytest.raises(UserError, match="models: 'resnet' is not of the form"):
        Rules(models=("resnet",))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("east", "north", "west"), "'own_models:Dropped' at site east is another than at this hub: install the same"),
        (("north",), "site north and site east differ in code"),
    ],
)
def test_other_code_under_the_same_name_is_refused(
    changed: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = three(split_up(people("classification"), 3), tmp_path, Rules(least=1, models=(OWN,)))
    for name in changed:
        host = lines[name].site.host

        def other(config: Any, learned: Any, of: Any = host.describe) -> dict[str, Any]:
            said: dict[str, Any] = of(config, learned)
            return {**said, "about": {**said["about"], "code": "another"}}

        monkeypatch.setattr(host, "describe", other)
    with pytest.raises(UserError, match=message):
        hub(asked([FAST], model=MODEL), tmp_path / "hub").run(lambda: lines)
