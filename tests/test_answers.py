"""A comparison's answers on tables nobody prepared: what cannot spoil them, and what they are held against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import Ridge

import bespoke
from bespoke.data.splits import Half
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.experiment.choosing import ValidationScores
from bespoke.experiment.experiment import flat
from bespoke.experiment.search_space import past_the_edge
from bespoke.federation.engine import Choice
from bespoke.methods import FineTune
from bespoke.runs.evaluation import HALVES, Scoring
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.references import constant, pooled

LOOP = Choice(False, 1, 0, 1, "autograd", "")


def panel(clients: int = 12, rows: int = 40, apart: float = 1.0, seed: int = 0) -> pd.DataFrame:
    """Clients whose slopes differ by `apart`."""
    rng = np.random.default_rng(seed)
    parts = []
    for client in range(clients):
        x = rng.normal(size=(rows, 2))
        y = 1 + x @ (np.array([1.0, -1.0]) + apart * rng.normal(size=2)) + 0.3 * rng.normal(size=rows)
        parts.append(pd.DataFrame({"who": f"c{client:02d}", "a": x[:, 0], "b": x[:, 1], "y": y}))
    return pd.concat(parts, ignore_index=True)


def written(table: pd.DataFrame, folder: Path) -> Path:
    path = folder / "table.csv"
    table.to_csv(path, index=False)
    return path


def experiment(path: Path, *stages: dict[str, Any], **more: Any) -> Any:
    data = {"table": str(path), "client": "who", "target": "y"}
    return build(checked({"data": data, "stage": list(stages), **more}, "test"))


def result(path: Path, folder: Path, *stages: dict[str, Any], how: Choice | None = None, **more: Any) -> dict[str, Any]:
    data = {"table": str(path), "client": "who", "target": "y"}
    config = checked({"data": data, "stage": list(stages), **more}, "test")
    return Run(build(config), RunFolder.create(folder, to_toml(config)), how=how).run()


# -- what cannot spoil them --------------------------------------------------------------------------------------------


def test_one_badly_scaled_client_spoils_nobody(tmp_path: Path) -> None:
    """A client with features thirty times as large explodes at a rate that suits the others, unless steps are safe."""
    table = panel(apart=0.0)
    large = table["who"] == "c03"
    noise = table["y"] - (1 + table["a"] - table["b"])
    table.loc[large, ["a", "b"]] *= 30.0
    table["y"] = 1 + table["a"] - table["b"] + noise
    path = written(table, tmp_path)
    stage = {"method": "fedavg", "rounds": 20, "lr": 0.3}
    none = {"data": {"standardize": "none"}}
    spoiled, safe = (
        build(checked({"data": {"table": str(path), "client": "who", "target": "y", **none["data"]}, "stage": [stage],
                       "safe_steps": safe}, "test"))
        for safe in (False, True)
    )  # fmt: skip
    found = {}
    for name, made in (("spoiled", spoiled), ("safe", safe)):
        folder = RunFolder.create(tmp_path / name, json.dumps({}))
        found[name] = Run(made, folder).run()
    assert found["spoiled"]["query"] is None or found["spoiled"]["query"] > 1e3
    assert not found["safe"]["excluded"]
    assert found["safe"]["query"] < 1.0


def test_a_diverged_trial_has_no_score(tmp_path: Path) -> None:
    """One client of twelve that is not finite makes the trial worthless: its mean is not that of the others."""
    table = panel()
    table.loc[table["who"] == "c03", ["a", "b"]] *= 1e4
    path = written(table, tmp_path)
    data = {"table": str(path), "client": "who", "target": "y", "standardize": "none"}
    stage = {"method": "local", "lrs": [0.1], "epochs": 40, "keep_shared": False, "choose": "last"}
    made = build(checked({"data": data, "stage": [stage]}, "test"))
    run = Run(made, RunFolder.create(tmp_path / "run", "{}"), select_only=True).run()
    assert run["validation"] is None


def test_local_models_are_those_of_scikit_learn(tmp_path: Path) -> None:
    """With one penalty for all coefficients of standardized rows, every client's model is its own ridge fit."""
    path = written(panel(), tmp_path)
    stage = {"method": "local", "solver": "exact", "pulls": [2.0], "intercepts": [1e-9], "keep_shared": False}
    result(path, tmp_path / "run", stage)
    made = experiment(path, stage)
    population, split, unit = made.population, made.split, made.population.about["unit"]
    x, y = population.columns["x"].numpy(), population.columns["y"].numpy()
    scores = pd.read_parquet(tmp_path / "run/clients.parquet").set_index("client")["query_mse"]
    for client in range(3):
        train, test = (part.of(np.array([client]))[0] for part in (split.train, split.test.query))
        fit = Ridge(alpha=2.0).fit(x[train], y[train])
        expected = ((fit.predict(x[test]) - y[test]) ** 2).mean() * unit**2
        assert scores[population.ids[client]] == pytest.approx(expected, rel=1e-4)


def test_mr_mtl_and_pfedme_settle_where_their_objectives_say(tmp_path: Path) -> None:
    """The shared model is the mean of the personal ones, v_k = argmin f_k + lam / 2 ||v - w||^2: solved by hand."""
    path = written(panel(6), tmp_path)
    lam = 0.5
    for name in ("mr-mtl", "pfedme"):
        stage = {"method": name, "solver": "exact", "lam": lam, "rounds": 200, "weighting": "uniform"}
        result(path, tmp_path / name, stage)
        made = experiment(path, stage)
        grams, moments = [], []
        for client in range(6):
            rows = made.split.train.of(np.array([client]))[0]
            x = np.column_stack([np.ones(len(rows)), made.population.columns["x"].numpy()[rows]])
            grams.append(x.T @ x / len(rows))
            moments.append(x.T @ made.population.columns["y"].numpy()[rows] / len(rows))
        # w = mean_k (G_k + lam)^-1 (m_k + lam w)
        inverses = [np.linalg.inv(gram + lam * np.eye(3)) for gram in grams]
        left = np.eye(3) - lam * np.mean(inverses, axis=0)
        w = np.linalg.solve(left, np.mean([i @ m for i, m in zip(inverses, moments)], axis=0))
        server = RunFolder(tmp_path / name).latest().server["params"]
        found = [float(server["bias"]), *server["weight"].flatten().tolist()]
        np.testing.assert_allclose(found, w, atol=2e-3)


# -- as many rounds as it takes ----------------------------------------------------------------------------------------


def test_a_flat_curve_by_hand() -> None:
    assert not flat([1.0, 0.5, 0.4, 0.3, 0.2], lower_is_better=True)
    assert flat([1.0, 0.5, 0.4999, 0.5, 0.51, 0.4998], lower_is_better=True)  # four points better by under a thousandth
    assert not flat([1.0, 0.5, 0.4999, 0.5, 0.51], lower_is_better=True)  # the leap is one of the last four
    assert flat([0.1, 0.8, 0.8, 0.8, 0.8, 0.8], lower_is_better=False)
    assert flat([1.0, None], lower_is_better=True)  # it diverged


def test_auto_rounds_end_when_validation_is_flat_and_resume_to_the_same_bytes(tmp_path: Path) -> None:
    path = written(panel(apart=0.0), tmp_path)
    stage = {"method": "fedavg", "rounds": "auto", "lr": 0.3}
    whole = result(path, tmp_path / "whole", stage, how=LOOP)
    assert 20 <= whole["rounds"] < 300
    made, folder = experiment(path, stage), None
    config = checked({"data": {"table": str(path), "client": "who", "target": "y"}, "stage": [stage]}, "test")
    for _ in range(200):
        folder = RunFolder.create(tmp_path / "cut", to_toml(config))
        left = iter(range(7))
        try:
            Run(made, folder, how=LOOP, stop=lambda left=left: next(left, None) is None).run()
            break
        except Interrupted:
            continue
    for name in ("rounds.jsonl", "clients.parquet", "result.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


# -- what they are held against ----------------------------------------------------------------------------------------


def test_references_by_hand(tmp_path: Path) -> None:
    made = experiment(written(panel(), tmp_path), {"method": "fedavg", "rounds": 1})
    rows, _ = made.split.train.of(made.split.train.clients)
    x, y = made.population.columns["x"].numpy()[rows], made.population.columns["y"].numpy()[rows]
    plain = constant(made)
    assert float(plain["bias"]) == pytest.approx(y.mean(), abs=1e-6)
    assert not plain["weight"].any()
    fitted = pooled(made)
    fits = [Ridge(alpha=alpha).fit(x, y).coef_ for alpha in (1e-3, 0.1, 1.0, 10.0, 100.0, 1e3)]
    assert min(np.abs(fitted["weight"].numpy()[0] - fit).max() for fit in fits) < 1e-4


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rows_part_adds_up_to_its_clients_metric(tmp_path: Path, workers: int) -> None:
    path = written(panel(), tmp_path)
    local = {"method": "local", "choose": "client"}
    for stage in (local,) if workers else ({"method": "fedavg", "rounds": 3}, local, {"method": "mixed", "rounds": 3}):
        folder = tmp_path / f"{stage['method']}-{workers}"
        found = result(path, folder, stage, engine={"workers": workers})
        assert found["rows_metric"] == "mse"
        rows, clients = pd.read_parquet(folder / "rows.parquet"), pd.read_parquet(folder / "clients.parquet")
        means = rows.groupby("client")["value"].mean()
        np.testing.assert_allclose(means[clients["client"]], clients["query_mse"], rtol=1e-4)
        assert (rows.groupby("client").size()[clients["client"]].to_numpy() == clients["query_examples"]).all()


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_beyond_the_edge_by_hand() -> None:
    tried = [{"lr": lr, "k": k} for lr in (0.01, 0.1, 1.0) for k in (2, 3)]
    assert past_the_edge({"lr": 0.1, "k": 2}, tried) == []
    assert past_the_edge({"lr": 1.0, "k": 3}, tried) == [{"lr": 10.0, "k": 3}]
    assert past_the_edge({"lr": 0.01, "k": 3}, tried) == [{"lr": 0.001, "k": 3}]


def test_candidates_are_widened_by_hand() -> None:
    task: Any = None
    sgd = FineTune(task, lrs=(0.01, 0.1), epochs=10)
    assert sgd.widened("lr 0.1, epoch 5") == {"lrs": (0.01, 0.1, pytest.approx(1.0))}
    assert sgd.widened("lr 0.01, epoch 10") == {"lrs": (pytest.approx(0.001), 0.01, 0.1), "epochs": 20, "every": 2}
    assert sgd.widened("epoch 0") == {}
    exact = FineTune(task, solver="exact", pulls=(1.0, 10.0, 100.0), intercepts=(1e-6, 1.0))
    assert exact.widened("pull 100, intercept 1e-06") == {"pulls": (1.0, 10.0, 100.0, 1000.0)}
    assert exact.widened("pull 10, intercept 1e-06") == {}


def test_halves_of_the_validation_rows(tmp_path: Path) -> None:
    rows = experiment(written(panel(), tmp_path), {"method": "fedavg", "rounds": 1}).split.selection.validation
    halves = [Half.of_rows(rows, odd) for odd in (False, True)]
    clients = rows.clients[[2, 5]]
    whole, sizes = rows.of(clients)
    parts = [half.of(clients) for half in halves]
    assert sorted(np.concatenate([part for part, _ in parts])) == sorted(whole)
    assert (sum(found for _, found in parts) == sizes).all()
    assert all((half.sizes(clients) == part).all() for half, (_, part) in zip(halves, parts))


@pytest.mark.parametrize("differ", [True, False])
def test_who_chooses_is_what_does_better_on_the_other_half(tmp_path: Path, differ: bool) -> None:
    """Where clients do best with different candidates each chooses for itself; where they differ by chance, all do."""
    made = experiment(written(panel(), tmp_path), {"method": "finetune", "lrs": [0.1], "epochs": 1, "choose": "auto"})
    many = 400
    clients = np.arange(many)
    best = clients % 2 if differ else np.ones(many, int)
    noise = 0.0 if differ else 1.0
    rng = np.random.default_rng(0)
    scores: dict[str, Any] = {}
    for name in ("validation", *HALVES):
        values = 1.0 + (np.arange(2)[None] != best[:, None]) + noise * rng.normal(size=(many, 2))
        scores[name] = ValidationScores(clients, {"mse": values, "loss": values, "count": np.ones((many, 2))})
    scoring = Scoring.__new__(Scoring)
    scoring.experiment = made
    scoring.engine = type("Engine", (), {"work": type("Work", (), {"method": made.stages[-1].method})})()
    found = scoring.pick(scores)
    assert bool(found.own) is differ
    if differ:
        assert [found.own[client] for client in clients] == best.tolist()  # type: ignore[index]


@pytest.mark.parametrize("bent", [False, True])
def test_the_model_is_the_better_of_linear_and_a_small_network(
    tmp_path: Path, bent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bespoke.study.comparison.EXTENSIONS", 0)  # how long networks should train is not asked
    monkeypatch.setattr("bespoke.experiment.build.MOST_ROUNDS", 40)
    monkeypatch.setattr("bespoke.study.defaults.RATES", (0.1, 0.3))
    table = panel(clients=26, rows=40, apart=0.0)
    if bent:
        table["y"] = table["a"] ** 2 + table["b"].abs() + 0.1 * np.random.default_rng(1).normal(size=len(table))
    summary = bespoke.compare(written(table, tmp_path), client="who", target="y", seeds=1, out=tmp_path / "out")
    about = json.loads((tmp_path / "out/compare.json").read_text())
    assert about["model"]["name"] == ("MLP" if bent else "Linear")
    assert set(about["settled"]["validation"]) == {"linear", "mlp"}
    assert summary.methods[0].label == ("fedavg" if bent else "shared")
    # a network of one's own has to be trained: its last layer alone, on layers as they were drawn, is no local model
    local = next(entry for entry in about["methods"] if entry["label"] == "local")
    assert local["stages"][-1].get("solver", "sgd") == ("sgd" if bent else "exact")
    assert [reference.label for reference in summary.references] == ["constant", "pooled"]


def test_clients_that_differ_are_told_apart_and_those_that_do_not_are_not(tmp_path: Path) -> None:
    for apart, helps in ((1.0, True), (0.0, False)):
        folder = tmp_path / f"apart{apart}"
        folder.mkdir()
        summary = bespoke.compare(
            written(panel(25, 24, apart), folder), client="who", target="y", seeds=2, out=folder / "out",
            settings={"model": {"name": "linear"}},
        )  # fmt: skip
        assert summary.answer[0].startswith("Personalization helps") is helps, summary.answer[0]
