"""The analyses on runs small enough to know the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.analysis.choosers import choosers
from bespoke.analysis.measured import measured
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished, reopened
from bespoke.analysis.sweep import parse_sweep, sweep
from bespoke.data.samples import FewerTests
from bespoke.deploy.forget import forget_client
from bespoke.errors import UserError
from bespoke.experiment.choosing import QueryScores, ValidationScores, choose
from bespoke.runs.folder import RunFolder

Make = Callable[..., Path]


def only(path: Path, **wanted: Any) -> dict[str, Any]:
    [record] = Analyses.of([path], Wanted(**wanted)).run()
    return record


# Own rows and others' rows


def test_opposite_clients_forget_each_other(opposite: Make) -> None:
    """y = 2x here, y = -2x there: the shared model predicts about 0, an error of 4 everywhere. A personal model ends
    at 0 on its own rows; on rows of the others it is off by 4, squared 16, of which a third is of the same slope."""
    path = opposite()
    record = only(path, ood=True)
    assert record["axis"] == "epoch"
    assert [curve["name"] for curve in record["curves"]] == ["lr 0.1", "lr 0.2"]
    assert record["shared"]["own"] == pytest.approx(4, abs=0.4)
    for curve in record["curves"]:
        assert curve["at"] == [0, 1, 2, 3, 4]
        assert np.all(np.diff(curve["own"]) < 0)
        assert np.all(np.diff(curve["others"]) > 0)
        assert np.all(np.diff(curve["other groups"]) > 0)
        assert curve["own"][0] == record["shared"]["own"]
    # slope s of a personal model: own error (2 - s)^2, error in the other group (2 + s)^2
    last = record["curves"][1]
    slope = 2 - np.sqrt(last["own"][-1])
    assert last["other groups"][-1] == pytest.approx((2 + slope) ** 2, rel=0.1)
    table = pd.read_parquet(path / "analysis/ood.parquet")
    assert table["client"].tolist() == ["c0", "c1", "c2", "c3"]
    assert table["chosen_others"].mean() == pytest.approx(record["chosen"]["others"])


def test_engines_agree(opposite: Make) -> None:
    path = opposite()
    first = only(path, ood=True, rows=20)
    (path / "analysis/ood.json").unlink()
    engine = json.loads((path / "engine.json").read_text())
    assert engine["vectorized"]
    other = {**engine, "vectorized": False, "gradient": "autograd", "chunk": 1}
    (path / "engine.json").write_text(json.dumps({name: value for name, value in other.items() if name != "seal"}))
    RunFolder(path).reseal()
    second = only(path, ood=True, rows=20)
    for one, other in zip(first["curves"], second["curves"]):
        np.testing.assert_allclose(one["others"], other["others"], rtol=1e-4)


# Fewer examples


def test_all_examples_are_the_run_itself_and_fewer_are_worse(opposite: Make) -> None:
    path = opposite(last={"batch_size": 2, "lrs": [0.05], "epochs": 2})
    record = only(path, fractions=(1.0, 0.5, 0.1))
    run = json.loads((path / "result.json").read_text())
    assert record["points"][0]["mean"] == pytest.approx(run["query"], rel=1e-6)
    assert [point["examples"] for point in record["points"]] == [120, 60, 12]  # of 120 each
    means = [point["mean"] for point in record["points"]]
    assert means[0] < means[1] < means[2] < record["points"][0]["shared"]  # fewer steps towards the own slope
    assert all(point["hurt"] == 0 for point in record["points"])
    table = pd.read_parquet(path / "analysis/fewer-examples.parquet")
    assert table.groupby("fraction")["value"].mean()[0.5] == pytest.approx(means[1])


def test_so_many_examples(opposite: Make) -> None:
    """Twelve examples are the tenth of 120 that the fraction 0.1 leaves; all are the run itself."""
    path = opposite(last={"batch_size": 2, "lrs": [0.05], "epochs": 2})
    tenth = only(path, fractions=(0.1,))["points"][0]
    record = only(path, numbers=(1, 12, 500, 0))
    assert [point["most"] for point in record["points"]] == [1, 12, 500, 0]
    assert [point["examples"] for point in record["points"]] == [1, 12, 120, 120]
    means = [point["mean"] for point in record["points"]]
    assert means[0] > means[1] == tenth["mean"] > means[2] == means[3]
    assert means[3] == pytest.approx(json.loads((path / "result.json").read_text())["query"], rel=1e-6)
    table = pd.read_parquet(path / "analysis/examples.parquet")
    assert table.groupby("most")["value"].mean()[12] == pytest.approx(means[1])
    assert table["support_examples"].tolist() == [1] * 4 + [12] * 4 + [120] * 8
    forget_client(path, "c1")  # which makes the analyses again, without the client
    again = json.loads((path / "analysis/examples.json").read_text())
    assert (again["clients"], again["asked"]) == (3, {"numbers": [1, 12, 500, 0]})


def test_smaller_tests_see_the_same_models_on_fewer_rows(opposite: Make) -> None:
    """All rows are the run itself; on a part of them, the errors of its models by hand. Smaller parts lie in larger."""
    path = opposite(last={"lrs": [0.05], "epochs": 2})
    record = only(path, tests=(1.0, 0.5, 0.1))
    result = json.loads((path / "result.json").read_text())
    assert record["points"][0]["mean"] == pytest.approx(result["query"], rel=1e-6)
    assert [point["examples"] for point in record["points"]] == [40, 20, 4]  # of 40 each
    table = pd.read_parquet(path / "analysis/smaller-tests.parquet").set_index(["fraction", "client"])
    with reopened(path) as run:
        query, seed = run.experiment.split.test.query, run.experiment.seed
        columns = {name: column.numpy() for name, column in query.population.columns.items()}
        within: set[int] = set()
        for fraction in (0.1, 0.5, 1.0):
            rows = FewerTests.sample(query, fraction, seed).of(np.array([1]))[0]
            assert within <= (within := set(rows.tolist()))
            _, shared, own = run.personal(1)
            for model, column in ((own, "value"), (shared, "shared")):
                foretold = columns["x"][rows] @ model["weight"][0].numpy() + model["bias"].item()
                error = ((foretold - columns["y"][rows]) ** 2).mean() * run.method.task.unit**2  # type: ignore[attr-defined]
                assert table.loc[(fraction, "c1"), column] == pytest.approx(error, rel=1e-4)
    with pytest.raises(UserError, match="does not begin with a shared model"):
        only(opposite("plain", last={}), tests=(1.0,))


# Hyper-parameters


@pytest.fixture
def handmade(opposite: Make) -> tuple[Callable[[], Any], Candidates]:
    """A run of two learning rates and one epoch, and scores of its four clients as we like them."""
    path = opposite(last={"epochs": 1})
    query = [[4.0, 3.0, 1.0], [4.0, 3.0, 2.0], [4.0, 3.0, 5.0], [4.0, 4.0, 6.0]]
    validation = [[4.0, 3.0, 2.0], [4.0, 5.0, 2.0], [4.0, 3.0, 2.0], [4.0, 1.0, 3.0]]
    names = ("epoch 0", "lr 0.1, epoch 1", "lr 0.2, epoch 1")
    clients = np.arange(4)

    def sums(values: list[list[float]]) -> dict[str, Any]:
        return {"mse": np.array(values), "loss": np.array(values), "count": np.ones((4, 3))}

    own = ValidationScores(clients, sums(validation))
    return lambda: reopened(path), Candidates(names, QueryScores(clients, sums(query)), own, own)


def test_the_mean_and_the_clients_hurt_by_hand(handmade: tuple[Any, Candidates]) -> None:
    opened, found = handmade
    with opened() as run:
        record, table = sweep(run, found, "finetune.lrs")
    at = {point["value"]: point for point in record["points"]}
    assert (at[0.1]["mean"], at[0.1]["hurt"], at[0.1]["helped"]) == (13 / 4, 0, 3 / 4)
    assert (at[0.2]["mean"], at[0.2]["hurt"], at[0.2]["helped"]) == (14 / 4, 2 / 4, 2 / 4)
    assert at[0.2]["validation"] == 9 / 4
    assert record["axis"] == "lr"
    assert list(table["metric"]) == [3, 3, 3, 4, 1, 2, 5, 6]


def test_choices_are_made_on_validation_rows_alone(handmade: tuple[Any, Candidates]) -> None:
    opened, found = handmade
    with opened() as run:
        record, table = choosers(run, found)
        # all together: validation means 4, 3, 2.25; alone: the last client prefers lr 0.1
        assert record["global"]["candidate"] == "lr 0.2, epoch 1"
        assert table["client_candidate"] == ["lr 0.2, epoch 1"] * 3 + ["lr 0.1, epoch 1"]
        assert record["global"]["mean"] == 14 / 4
        assert record["client"]["mean"] == 12 / 4
        assert record["difference"]["mean"] == -2 / 4
        other = QueryScores(found.query.clients, {**found.query.sums, "mse": -found.query.sums["mse"]})
        _, again = choosers(run, replace(found, query=other))
        assert again["client_candidate"] == table["client_candidate"]
        assert again["global_candidate"] == table["global_candidate"]
    with pytest.raises(TypeError, match="leak"):
        choose(found.query, "mse", True)  # type: ignore[arg-type]


def test_what_is_there_needs_no_new_models(opposite: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = opposite()
    only(path, per_client=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("personal models were made again")

    monkeypatch.setattr(Finished, "scores", refuse)
    lrs = only(path, sweeps=("finetune.lrs=0.1,0.2",))
    assert [point["value"] for point in lrs["points"]] == [0.1, 0.2]
    epochs = only(path, sweeps=("epochs",))
    assert [point["value"] for point in epochs["points"]] == [0, 1, 2, 3, 4]
    assert [curve["name"] for curve in epochs["curves"]] == ["lr 0.1", "lr 0.2"]
    assert epochs["points"][0]["hurt"] == 0
    assert epochs["curves"][0]["points"][0] == epochs["curves"][1]["points"][0]  # both begin at the shared model
    with pytest.raises(AssertionError, match="made again"):
        only(path, sweeps=("lrs=0.1,0.3",))


def test_new_values_are_those_of_a_run_with_them(opposite: Make) -> None:
    path = opposite()
    tried = only(path, sweeps=("finetune.lrs=0.4",))
    other = opposite("other", last={"lrs": [0.4], "keep_shared": False})
    assert tried["points"][0]["mean"] == pytest.approx(json.loads((other / "result.json").read_text())["query"])
    sizes = only(path, sweeps=("batch_size=4,64",))
    assert [point["value"] for point in sizes["points"]] == [4, 64]
    assert sizes["points"][0]["mean"] < sizes["points"][1]["mean"]  # more steps


def test_measured_by_hand() -> None:
    numbers = measured(np.array([1.0, 2.0, 3.0, np.nan]), np.array([2.0, 2.0, 2.0, 2.0]), lower_is_better=True)
    assert (numbers["clients"], numbers["mean"], numbers["shared"]) == (3, 2, 2)
    assert (numbers["hurt"], numbers["helped"]) == (1 / 3, 1 / 3)
    assert numbers["change"][2] == 0
    assert measured(np.array([1.0]), np.array([2.0]), lower_is_better=False)["hurt"] == 1
    assert measured(np.array([np.nan]), np.array([2.0]), True)["mean"] is None


def test_how_a_sweep_is_written() -> None:
    assert parse_sweep("finetune.lrs=0.001, 1e-2") == ("finetune", "lrs", (0.001, 0.01))
    assert parse_sweep("part=all,last") == ("", "part", ("all", "last"))
    assert parse_sweep("epochs") == ("", "epochs", ())
    for text in ("", "lrs=", "finetune."):
        with pytest.raises(UserError, match=r"METHOD\.KNOB"):
            parse_sweep(text)


# What does not apply, what has changed


def test_what_a_run_lacks(opposite: Make) -> None:
    shared = opposite("shared", last={})
    for wanted in ({"ood": True}, {"fractions": (1.0,)}, {"sweeps": ("lr",)}, {"per_client": True}):
        with pytest.raises(DoesNotApply, match="shared"):
            only(shared, **wanted)
    with pytest.raises(UserError):
        only(shared)
    path = opposite()
    with pytest.raises(DoesNotApply, match="finetune, not fedavg"):
        only(path, sweeps=("fedavg.lr=0.1",))
    with pytest.raises(UserError, match=r"unknown knob 'lr'.*Did you mean 'lrs'"):
        only(path, sweeps=("lr=0.1",))
    with pytest.raises(UserError, match="-1"):
        only(path, sweeps=("lrs=-1",))
    with pytest.raises(DoesNotApply, match="which values"):
        only(path, sweeps=("batch_size",))
    device = opposite("device", clients=12, split={"protocol": "cross-device", "held_out": [0.3, 0.4]})
    with pytest.raises(DoesNotApply, match="own_validation"):
        only(device, per_client=True)
    assert {record["analysis"] for record in Analyses.of([device], Wanted()).run()} == {
        "ood", "fewer-examples", "smaller-tests", "sweep-lrs", "sweep-epochs",
    }  # fmt: skip


def test_other_data_are_noticed(opposite: Make, tmp_path: Path) -> None:
    path = opposite()
    table = pd.read_csv(tmp_path / "opposite.csv")
    table.assign(y=table["y"] * (1 + table.index % 3)).to_csv(tmp_path / "opposite.csv", index=False)
    with pytest.raises(UserError, match="have changed"):
        only(path, ood=True)
    assert not (path / "analysis/ood.json").exists()


def test_a_forgotten_client_is_not_examined(opposite: Make) -> None:
    path = opposite()
    forget_client(path, "c1")
    assert only(path, ood=True)["clients"] == 3
    assert "c1" not in pd.read_parquet(path / "analysis/ood.parquet")["client"].tolist()
