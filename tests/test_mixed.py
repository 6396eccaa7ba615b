"""The federated mixed model, held against statsmodels, closed forms and what data were drawn from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import lsq_linear, minimize

import bespoke
from bespoke.data.population import Population
from bespoke.data.splits import Support, everything
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Setting
from bespoke.methods import Mixed
from bespoke.methods.parts.mixed_posterior import scored
from bespoke.models.networks import Linear
from bespoke.models.task import Classification, Regression
from self_fl.bayes import three_levels

ENGINE = Choice(True, 64, 0, 1, "closed-form", "")
TASK = Regression(Linear(2))


def panel(clients: int = 40, seed: int = 1) -> pd.DataFrame:
    """Rows of clients whose intercepts and slopes differ."""
    rng = np.random.default_rng(seed)
    parts = []
    for client in range(clients):
        rows = int(rng.integers(8, 30))
        own = rng.multivariate_normal([0, 0, 0], [[0.5, 0.2, 0], [0.2, 0.4, 0], [0, 0, 0.2]])
        x = rng.normal(size=(rows, 2))
        y = 1 + own[0] + x @ (np.array([2.0, -0.5]) + own[1:]) + rng.normal(size=rows)
        parts.append(pd.DataFrame({"client": f"c{client:03d}", "x": x[:, 0], "z": x[:, 1], "y": y}))
    return pd.concat(parts, ignore_index=True).astype({"x": np.float32, "z": np.float32, "y": np.float32})


def population(table: pd.DataFrame, target: Any = np.float32) -> Population:
    x, y = np.array(table[["x", "z"]], np.float32), np.array(table["y"], target)
    return Population.build({"x": x, "y": y}, table["client"].to_numpy(), about={"name": "panel"})


def fitted(method: Mixed, people: Population, rounds: int = 60, groups: torch.Tensor | None = None) -> dict[str, Any]:
    """The server's state after these rounds."""
    params = method.task.init(0)
    everyone = np.arange(len(people))
    with Engine(people, ENGINE) as engine:
        engine.open(ClientWork(method, everything(people)), params)
        server = method.init_server(params, Setting(0, len(people), len(people), groups))
        for number in range(rounds):
            server = method.server_round(server, engine.round(server, everyone, number).cohort)
    return server


@pytest.mark.parametrize("reml", [True, False])
def test_independent_coefficients_against_statsmodels(reml: bool) -> None:
    smf = pytest.importorskip("statsmodels.formula.api")
    table = panel()
    found = fitted(Mixed(TASK, reml=reml), population(table))
    varying = {"x": "0 + x", "z": "0 + z"}
    oracle = smf.mixedlm("y ~ x + z", table, groups="client", re_formula="1", vc_formula=varying).fit(reml=reml)
    np.testing.assert_allclose(found["beta"], oracle.fe_params, rtol=1e-3)
    variances = [*oracle.cov_re.to_numpy().ravel(), *oracle.vcomp]
    np.testing.assert_allclose(found["spread"].diagonal(), variances, rtol=0.01)
    assert float(found["noise"]) == pytest.approx(oracle.scale, rel=1e-3)
    np.testing.assert_allclose(found["doubt"].diagonal().sqrt(), oracle.bse_fe, rtol=0.02)
    assert bool(found["settled"])


def test_a_full_covariance_against_statsmodels() -> None:
    smf = pytest.importorskip("statsmodels.formula.api")
    table = panel()
    found = fitted(Mixed(TASK, covariance="full"), population(table), rounds=400)
    oracle = smf.mixedlm("y ~ x + z", table, groups="client", re_formula="~ x + z").fit(reml=True)
    np.testing.assert_allclose(found["spread"], oracle.cov_re, atol=0.01)
    np.testing.assert_allclose(found["beta"], oracle.fe_params, rtol=2e-3)
    effects = np.array([oracle.random_effects[name] for name in sorted(oracle.random_effects)])
    mine = _personal(Mixed(TASK, covariance="full"), found, population(table))
    np.testing.assert_allclose(mine, effects + oracle.fe_params.to_numpy(), atol=0.02)


def _personal(method: Mixed, server: dict[str, Any], people: Population) -> np.ndarray[Any, Any]:
    """Every client's coefficients, the intercept first."""
    everyone = everything(people)
    with Engine(people, replace(ENGINE, vectorized=False)) as engine:
        engine.open(ClientWork(method, everyone), method.task.init(0))
        support = Support(people, everyone.clients, everyone.part)
        models = [engine.personal(server, int(c), support, 1, 0) for c in everyone.clients]
    return np.array([[*m["bias"].tolist(), *m["weight"].flatten().tolist()] for m in models])


def test_one_round_of_each_clients_statistics_gives_what_rounds_of_sums_give() -> None:
    people = population(panel(12))
    groups = torch.tensor([1, 2, 3] * 4)
    for knobs in ({}, {"groups": groups}):
        sums = fitted(Mixed(TASK), people, rounds=80, **knobs)
        each = fitted(Mixed(TASK, statistics="each"), people, rounds=1, **knobs)
        for name in ("beta", "spread", "noise", "between"):
            torch.testing.assert_close(each[name], sums[name], rtol=2e-2, atol=1e-4)  # it ends when settled


def test_three_levels_by_the_closed_form() -> None:
    """With known variances and intercepts alone, a client's posterior is that of benchmarks/self_fl/bayes.py."""
    rng = np.random.default_rng(0)
    sizes, groups = rng.integers(2, 9, 12), np.repeat([1, 2, 3], 4)
    y = (rng.normal(size=sizes.sum()) + np.repeat(rng.normal(size=12) + groups, sizes)).astype(np.float32)
    owners = np.repeat([f"c{i:02d}" for i in range(12)], sizes)
    people = Population.build({"x": np.zeros((len(y), 1), np.float32), "y": y}, owners, about={"name": "means"})
    method = Mixed(Regression(Linear(1)))
    params = method.task.init(0)
    server = method.init_server(params, Setting(0, 12, 12, torch.from_numpy(groups)))
    known = {
        "spread": torch.diag(torch.tensor([0.7, 1e-9])).double(), "noise": torch.tensor(0.9).double(),
        "between": torch.diag(torch.tensor([1.3, 1e-9])).double(),
    }  # fmt: skip
    server |= known
    with Engine(people, ENGINE) as engine:
        engine.open(ClientWork(method, everything(people)), params)
        for number in range(3):  # the centres settle; the variances are held at what is known
            server = {**method.server_round(server, engine.round(server, np.arange(12), number).cohort), **known}
    means = np.array([y[owners == f"c{i:02d}"].mean() for i in range(12)], dtype=float)
    oracle = three_levels(means, 0.9 / sizes, groups, between_groups=1.3, within_groups=0.7)
    np.testing.assert_allclose(_personal(method, server, people)[:, 0], oracle.all.mean, atol=1e-5)


def test_classes_find_the_variance_they_were_drawn_from() -> None:
    rng = np.random.default_rng(3)
    parts = []
    for client in range(300):
        x = rng.normal(size=(40, 2))
        chance = 1 / (1 + np.exp(-(0.5 + rng.normal() * 1.0 + x @ np.array([1.0 + 0.7 * rng.normal(), -1.0]))))
        y = (rng.random(40) < chance).astype(int)
        parts.append(pd.DataFrame({"client": f"c{client:03d}", "x": x[:, 0], "z": x[:, 1], "y": y}))
    table = pd.concat(parts, ignore_index=True)
    found = fitted(Mixed(Classification(Linear(2, 2))), population(table, np.int64), rounds=25)
    deviations = found["spread"].diagonal().sqrt()
    # Laplace's approximation shrinks variances of binary targets a little
    np.testing.assert_allclose(deviations[:2], [1.0, 0.7], atol=0.15)
    assert float(deviations[2]) < 0.2
    np.testing.assert_allclose(found["beta"], [0.5, 1.0, -1.0], atol=0.15)


def test_one_outlying_client_does_not_make_all_look_different() -> None:
    table = panel(40)
    table.loc[table["client"] == "c000", "y"] += 100.0
    plain = fitted(Mixed(TASK), population(table))
    robust = fitted(Mixed(TASK, robust=True), population(table))
    clean = fitted(Mixed(TASK), population(panel(40)))
    assert float(plain["spread"][0, 0]) > 100 * float(clean["spread"][0, 0])
    assert float(robust["spread"][0, 0]) < 3 * float(clean["spread"][0, 0])


def test_intervals_hold_what_they_promise() -> None:
    """Ninety percent of new rows lie within 1.645 standard deviations of what was predicted."""
    table = panel(300, seed=5)
    rng = np.random.default_rng(0)
    kept = rng.random(len(table)) < 0.5
    people, method = population(table[kept]), Mixed(TASK)
    server = fitted(method, people, rounds=30)
    everyone = everything(people)
    inside = []
    with Engine(people, replace(ENGINE, vectorized=False)) as engine:
        engine.open(ClientWork(method, everyone), method.task.init(0))
        for client, name in enumerate(people.ids):
            model = engine.personal(server, client, Support(people, everyone.clients, everyone.part), 1, 0)
            rows = table[~kept & (table["client"] == name)]
            x = torch.from_numpy(rows[["x", "z"]].to_numpy(np.float32))
            mean, deviation = method.predict(model, {"x": x}).T
            inside += ((torch.tensor(rows["y"].to_list()) - mean).abs() < 1.645 * deviation).tolist()
    assert np.mean(inside) == pytest.approx(0.9, abs=0.02)


def test_a_newcomer_starts_at_the_common_coefficients_and_moves_as_rows_arrive() -> None:
    """One row says little, many say nearly all: the pull away from the common intercept grows from 0 to 1."""
    people, method = population(panel(60)), Mixed(TASK)
    server = fitted(method, people)
    down = method.broadcast(server)
    shares = []
    for rows in (1, 10, 1000):
        x = torch.zeros(rows, 2)
        batch = {"x": x, "y": torch.full((rows,), float(server["beta"][0]) + 1.0), "mask": torch.ones(rows)}
        problem = method.task.linear().problem(down["params"], batch)
        shares.append(float(method.posterior(method._squares(problem), down)["m"][0]))
    spread, noise = float(server["spread"][0, 0]), float(server["noise"])
    np.testing.assert_allclose(shares, [spread / (spread + noise / n) for n in (1, 10, 1000)], rtol=1e-6)


def test_moments_alone_end_where_the_likelihood_is_greatest() -> None:
    """With as many rows for everyone, EM from moments and scoring from sums are two ways to one maximum."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(60, 15, 2))
    own = rng.normal(size=(60, 3)) * [0.7, 0.6, 0.5]
    y = 1 + own[:, :1] + np.einsum("krj,kj->kr", x, np.array([2.0, -0.5]) + own[:, 1:]) + rng.normal(size=(60, 15))
    names = np.repeat([f"c{i:02d}" for i in range(60)], 15)
    columns = {"x": x.reshape(-1, 2).astype(np.float32), "y": y.ravel().astype(np.float32)}
    people = Population.build(columns, names, about={"name": "even"})
    moments = fitted(Mixed(TASK, statistics="moments"), people, rounds=300)
    sums = fitted(Mixed(TASK, reml=False), people)
    for name in ("beta", "spread", "noise"):
        torch.testing.assert_close(moments[name], sums[name], rtol=5e-3, atol=1e-4)


def test_under_privacy_moments_are_sent_and_noise_leaves_them_of_use(tmp_path: Path) -> None:
    privacy = {"noise": 1.0, "clip": 1.0, "reproducible": True, "public_statistics": True}
    found = {}
    for name, more in (("plain", {}), ("private", {"privacy": privacy})):
        stage = {"method": "mixed", "rounds": 15, **({} if more else {"statistics": "moments"})}
        found[name] = bespoke.run({"data": {"source": "hsb82"}, "stage": [stage], **more}, tmp_path / name)["query"]
    lines = (tmp_path / "private/ledger.jsonl").read_text().splitlines()
    revealed = next(line["revealed"] for line in map(json.loads, lines) if line.get("round") == 1)
    assert set(revealed) == {"mean", "square", "noise", "clients"}
    assert found["private"] < 1.05 * found["plain"]


def test_a_step_of_scoring_is_the_best_within_its_bounds() -> None:
    """Against scipy's bounded least squares: with C = R'R the model is |Rs - R'^-1 slope|^2 / 2 and a constant."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = 10.0 ** rng.uniform(-4, 0, 12)
        root = rng.normal(size=(14, 12)) @ np.diag(10.0 ** rng.uniform(-1, 1, 12))
        curve, slope = root.T @ root, rng.normal(size=12) * 30
        after = scored(*(torch.from_numpy(part) for part in (values, slope, curve)))
        upper = np.linalg.cholesky(curve).T
        bounds = (-0.9 * values, 9 * values)
        best = lsq_linear(upper, np.linalg.solve(upper.T, slope), bounds, method="bvls", tol=1e-14)
        step = after.numpy() - values
        gain, most = (slope @ s - s @ curve @ s / 2 for s in (step, best.x))
        assert gain >= most - 1e-6 * abs(most)
        assert (step >= bounds[0] - 1e-12).all()
        assert (step <= bounds[1] + 1e-12).all()


def test_variances_of_two_levels_end_where_the_likelihood_is_greatest() -> None:
    """Against the dense restricted likelihood, maximised by scipy; most of the variances are zero at the maximum."""
    rng = np.random.default_rng(3)
    groups, clients, rows = 8, 5, 8
    member = np.repeat(np.arange(groups), clients)
    x = rng.normal(size=(groups * clients, rows, 2)).astype(np.float32)
    x[..., 1] = 0.9 * x[..., 0] + 0.3 * x[..., 1]  # nearly the same: their variances compete
    slopes = 1 + 0.6 * rng.normal(size=groups)[member] + 0.3 * rng.normal(size=len(member))
    y = (slopes[:, None] * x[..., 0] + 0.5 * rng.normal(size=x.shape[:2])).astype(np.float32)
    names = np.repeat([f"c{n:02d}" for n in range(len(member))], rows)
    people = Population.build({"x": x.reshape(-1, 2), "y": y.reshape(-1)}, names, about={"name": "levels"})
    server = fitted(Mixed(TASK), people, 40, torch.from_numpy(member + 1))

    design = np.concatenate([np.ones((x.shape[0] * rows, 1)), x.reshape(-1, 2)], axis=1).astype(np.float64)
    client, group = np.repeat(np.arange(len(member)), rows), np.repeat(member, rows)

    def lost(logs: np.ndarray) -> float:
        variances = np.exp(logs)
        inside = (client[:, None] == client) * ((design * variances[:3]) @ design.T)
        whole = (
            inside
            + (group[:, None] == group) * ((design * variances[3:6]) @ design.T)
            + np.eye(len(y.flat)) * variances[6]
        )
        solved = np.linalg.solve(whole, np.column_stack([design, y.reshape(-1)]))
        told = design.T @ solved
        left = y.reshape(-1) @ solved[:, -1] - told[:, -1] @ np.linalg.solve(told[:, :-1], told[:, -1])
        return float(np.linalg.slogdet(whole)[1] + np.linalg.slogdet(told[:, :-1])[1] + left) / 2

    mine = np.concatenate(
        [server[part].diagonal().numpy() for part in ("spread", "between")] + [server["noise"].reshape(1)]
    )
    best = min(
        minimize(lost, np.log(start), method="L-BFGS-B", bounds=[(-18, 2)] * 7).fun for start in (mine, np.full(7, 0.1))
    )
    assert float(server["likelihood"]) == pytest.approx(-lost(np.log(mine)), abs=0.01)
    assert lost(np.log(mine)) <= best + 0.01
