"""Robust rules against numpy, scipy and brute force; what a bad client does with and without them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm, trim_mean

import bespoke
from bespoke.api import run
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.messages.robust.attack import _z
from bespoke.messages.robust.exchange import Rule, answer, combine
from bespoke.messages.robust.message import Form, Messages
from bespoke.messages.robust.outliers import outliers
from bespoke.messages.robust.rules import allowed, krum, krum_scores, median, trimmed_mean
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.statistics.formatting import number

FORM = Form({"delta": "weight"}, (), ("weight",), ())
MESSAGES = np.random.default_rng(5).standard_normal((11, 4))
MESSAGES[[2, 7]] = 1e6 * np.array([[1.0, -1, 1, 1], [2.0, 1, -1, 1]])


def combined(rule: Rule, changes: np.ndarray[Any, Any], chunks: int = 1, order: Any = None) -> Any:
    """What the server gets of these changes, a client each, held by so many hosts and answered in this order."""
    order = np.arange(len(changes)) if order is None else np.asarray(order)
    held = []
    for part in np.array_split(order, chunks):
        up = {"delta": {"w": torch.tensor(changes[part])}, "weight": torch.ones(len(part))}
        held.append(Messages.of(tuple(part.tolist()), up, FORM, None, 1))
    return combine(
        rule, FORM, lambda what, told: [answer(some, FORM, what, told) for some in held], tuple(order.tolist()), None, 1
    )  # fmt: skip


def mean_of(found: Any) -> np.ndarray[Any, Any]:
    return (found.sums["delta"]["w"] / found.sums["weight"]).numpy()


def test_rules_by_numpy_and_scipy() -> None:
    x = torch.tensor(MESSAGES)
    np.testing.assert_allclose(median(x), np.median(MESSAGES, axis=0))
    np.testing.assert_allclose(median(x[:10]), np.median(MESSAGES[:10], axis=0))
    for trim in (0.0, 0.1, 0.2, 0.45):
        np.testing.assert_allclose(trimmed_mean(x, trim), trim_mean(MESSAGES, trim, axis=0))


@pytest.mark.parametrize("f", [0, 2, 4])
def test_krum_by_brute_force(f: int) -> None:
    """The least sum over every choice of n - f - 2 others is that of the nearest."""
    n = len(MESSAGES)
    squares = ((MESSAGES[:, None] - MESSAGES[None]) ** 2).sum(2)
    scores = [
        min(sum(squares[i, list(some)]) for some in itertools.combinations([j for j in range(n) if j != i], n - f - 2))
        for i in range(n)
    ]
    np.testing.assert_allclose(krum_scores(torch.tensor(MESSAGES), f), scores, rtol=1e-9)
    assert krum(torch.tensor(MESSAGES), f, 1).tolist() == [int(np.argmin(scores))]
    assert krum(torch.tensor(MESSAGES), f, n - f).tolist() == sorted(np.argsort(scores)[: n - f].tolist())


def test_how_many_are_taken_for_bad() -> None:
    """A number, or a part; never so many that Krum's n > 2 f + 2 fails."""
    assert [allowed(2, 20), allowed(0.2, 20), allowed(9, 20), allowed(0, 20), allowed(2, 4)] == [2, 4, 8, 0, 0]


def test_geometric_median_by_scipy() -> None:
    far = np.linalg.norm(MESSAGES, axis=1)  # differences to it: a sum of a million leaves no digits for the rest
    options = {"xatol": 1e-9, "fatol": 1e-9, "maxiter": 10_000, "maxfev": 10_000}
    wanted = minimize(
        lambda v: (np.linalg.norm(MESSAGES - v, axis=1) - far).sum(), np.zeros(4), method="Nelder-Mead", options=options
    ).x
    np.testing.assert_allclose(mean_of(combined(Rule("geometric-median", steps=300), MESSAGES)), wanted, atol=1e-4)
    eight = mean_of(combined(Rule("geometric-median"), MESSAGES))  # the default number of steps is near it already
    assert np.linalg.norm(eight - wanted) < 0.05
    assert np.linalg.norm(MESSAGES.mean(0)) > 1e5


def test_norm_bound_by_hand() -> None:
    norms = np.linalg.norm(MESSAGES, axis=1)
    bound = np.median(norms)
    wanted = (MESSAGES * np.minimum(1, bound / norms)[:, None]).mean(0)
    found = combined(Rule("norm-bound"), MESSAGES)
    np.testing.assert_allclose(mean_of(found), wanted, rtol=1e-6)
    assert set(found.cut) == {int(c) for c in np.flatnonzero(norms > 2 * bound)} >= {2, 7}
    fixed = (MESSAGES * np.minimum(1, 0.5 / norms)[:, None]).mean(0)
    np.testing.assert_allclose(mean_of(combined(Rule("norm-bound", bound=0.5), MESSAGES)), fixed, rtol=1e-6)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum", "norm-bound", "geometric-median"])
def test_neither_order_nor_hosts_matter(name: str) -> None:
    rule = Rule(name)
    wanted = combined(rule, MESSAGES)
    for chunks, order in ((3, None), (2, np.random.default_rng(1).permutation(11))):
        found = combined(rule, MESSAGES, chunks, order)
        np.testing.assert_allclose(mean_of(found), mean_of(wanted), rtol=1e-6, atol=1e-9)
        assert sorted(found.left_out) == sorted(wanted.left_out)
    if name in ("krum", "multi-krum"):
        assert {2, 7} <= set(wanted.left_out)
    if name != "norm-bound":
        assert np.abs(mean_of(wanted)).max() < 3  # as if the two were not there


def test_a_huge_weight_gains_nothing() -> None:
    """Two clients with the same honest changes, one of which claims to have 10^9 rows: all changes count alike."""
    form = Form({"delta": "weight"}, (), (), ())
    changes = torch.tensor(MESSAGES[[0, 1, 3, 4, 5]])
    results = []
    for claimed in (10.0, 1e9):
        weight = torch.tensor([claimed, 10.0, 12.0, 8.0, 10.0], dtype=torch.float64)
        up = {"delta": {"w": changes * weight[:, None]}, "weight": weight}
        held = Messages.of((0, 1, 2, 3, 4), up, form, None, 1)
        for rule in ("median", "norm-bound", "geometric-median"):
            found = combine(
                Rule(rule), form, lambda what, told, held=held: [answer(held, form, what, told)], held.clients, None, 1
            )
            assert float(found.sums["weight"]) <= 50.0
            results.append(mean_of(found))
    for honest, claimed in zip(results[:3], results[3:]):  # type: ignore[assignment]
        np.testing.assert_allclose(claimed, honest, rtol=1e-6)


def test_little_is_enough_by_its_formula() -> None:
    """The paper's example: of 50 workers 24 corrupt, two supporters are missing, (50 - 24 - 2) / 26 -> z = 1.43."""
    assert _z(50, 24) == pytest.approx(norm.ppf(24 / 26))
    assert _z(20, 4) == pytest.approx(norm.ppf(9 / 16))
    assert _z(20, 0) == 0.0


def test_outliers() -> None:
    assert outliers({0: 1.0, 1: 2.0, 2: 250.0}) == [2]
    assert outliers({0: 1.0, 1: 2.0, 2: 150.0}) == []
    assert outliers({0: 1.0, 1: 1e9}) == []


# -- whole runs ------------------------------------------------------------------------------------------------------
def twenty(bad: int = 0, features: float = 1.0, targets: float = 1.0) -> Population:
    """Twenty clients of one linear law; the first `bad` have features or targets times a number."""
    random = np.random.default_rng(3)
    x = random.standard_normal((800, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.3 * random.standard_normal(800)
    owner = np.repeat(np.arange(20), 40)
    x[owner < bad] *= features
    y[owner < bad] *= targets
    about = {"name": "twenty", "task": "regression", "input": "table", "features": ["a", "b", "c"]}
    names = np.array([f"client {n:02d}" for n in range(20)])[owner]
    return Population.build({"x": x.astype(np.float32), "y": y.astype(np.float32)}, names, about=about)


def honest_mse(
    folder: Path, population: Population, rule: str | None, attack: dict[str, Any] | None = None, **more: Any
) -> float:
    """The mean MSE of clients 04 to 19, which are honest in all of these; infinite if it diverged."""
    config = checked({
        "seed": 1, "data": {"source": "exam"}, "model": {"name": "linear"}, **more,
        **({"robust": {"rule": rule}} if rule else {}), **({"attack": attack} if attack else {}),
        "stage": [{"method": "fedavg", "rounds": 30, "lr": 0.3}],
    }, "test")  # fmt: skip
    notes: list[str] = []

    class Heard:
        def begin(self, what: str, total: int, done: int = 0) -> None: ...
        def advance(self, steps: int = 1, note: str = "") -> None: ...
        def note(self, text: str) -> None:
            notes.append(text)

    Run(build(config, population), RunFolder.create(folder, ""), Heard()).run()
    (folder / "notes.json").write_text(json.dumps(notes))
    table = pq.read_table(folder / "clients.parquet").to_pandas()
    values = table.set_index("client")["query_mse"].loc["client 04":]
    return float(values.mean()) if np.isfinite(values).all() else float("inf")


FLIPPERS = {"kind": "label-flip", "clients": [f"client {n:02d}" for n in range(4)]}


def pooled_with_flips() -> float:
    """By numpy: one fit to all training rows, the first four clients' targets turned around, on honest query rows."""
    x, y = (twenty().columns[name].double().numpy() for name in ("x", "y"))
    raw = {"seed": 1, "data": {"source": "exam"}, "stage": [{"method": "fedavg", "rounds": 1}]}
    split = build(checked(raw, "test"), twenty()).split
    rows, _ = split.train.of(split.train.clients)
    design = np.c_[x, np.ones(800)]
    targets = np.where(rows < 160, 2 * y[rows].mean() - y[rows], y[rows])
    fit = np.linalg.lstsq(design[rows], targets, rcond=None)[0]
    tested, _ = split.test.query.of(np.arange(4, 20))
    return float(((design @ fit - y)[tested] ** 2).mean())


def test_four_label_flippers_of_twenty(tmp_path: Path) -> None:
    """The noise is 0.09. With a step a round the mean model is the least-squares fit of all rows, flipped ones too."""
    clean = honest_mse(tmp_path / "clean", twenty(), None, {**FLIPPERS, "kind": "none"})
    spoiled = honest_mse(tmp_path / "mean", twenty(), None, FLIPPERS)
    assert clean == pytest.approx(0.09, abs=0.03)
    assert spoiled == pytest.approx(pooled_with_flips(), rel=0.01)
    assert spoiled > 8 * clean
    for rule in ("median", "trimmed-mean", "krum", "multi-krum", "geometric-median"):
        assert honest_mse(tmp_path / rule, twenty(), rule, FLIPPERS) < clean + 0.1, rule
    assert honest_mse(tmp_path / "bound", twenty(), "norm-bound", FLIPPERS) < spoiled
    result = json.loads((tmp_path / "multi-krum" / "result.json").read_text())
    assert result["clients"] == 16  # attackers are not tested
    assert result["attack"]["clients"] == FLIPPERS["clients"]
    assert set(FLIPPERS["clients"]) <= set(result["robust"]["left_out"])
    assert "client 00" not in pq.read_table(tmp_path / "mean" / "clients.parquet")["client"].to_pylist()
    ledger = [json.loads(line) for line in (tmp_path / "krum" / "ledger.jsonl").read_text().splitlines()]
    assert ledger[2]["revealed"] == {"delta": "EACH", "weight": "COUNT"}


@pytest.mark.parametrize("spoilt", [{"features": 1e6}, {"targets": 1e3}])
def test_one_client_in_other_units(tmp_path: Path, spoilt: dict[str, float]) -> None:
    """Features times a million make the mean model infinite, targets times a thousand wrong; a rule does not follow."""
    population = twenty(1, **spoilt)
    assert honest_mse(tmp_path / "mean", population, None) > 100
    for rule in ("median", "multi-krum", "geometric-median"):
        assert honest_mse(tmp_path / rule, population, rule) < 0.15, rule
    notes = json.loads((tmp_path / "mean" / "notes.json").read_text())
    named = [note for note in notes if "client 00" in note]
    assert len(named) == 1
    assert not [n for n in json.loads((tmp_path / "median" / "notes.json").read_text()) if "client 00" in n]


@pytest.mark.parametrize("kind", ["scale", "noise", "sign-flip", "nan", "little-is-enough"])
def test_attacks_on_messages(tmp_path: Path, kind: str) -> None:
    attack = {**FLIPPERS, "kind": kind, **({"factor": 4.0} if kind == "sign-flip" else {})}  # 16 - 4 * 4: no step
    plain = honest_mse(tmp_path / "mean", twenty(), None, attack)
    robust = honest_mse(tmp_path / "robust", twenty(), "geometric-median", attack)
    assert robust < 0.15
    assert plain > robust if kind not in ("nan", "little-is-enough") else plain < 0.2
    lines = (tmp_path / "robust" / "rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["excluded"] == (FLIPPERS["clients"] if kind == "nan" else [])


def test_a_drawn_attack_is_a_function_of_the_seed() -> None:
    base = {"data": {"source": "exam"}, "attack": {"kind": "scale", "clients": 0.25}, "stage": [
        {"method": "fedavg", "rounds": 1}]}  # fmt: skip
    drawn = [build(checked({**base, "seed": seed}, "test"), twenty()).attackers for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 5


@pytest.mark.parametrize(
    ("tables", "stage", "message"),
    [
        ({"robust": {"rule": "median"}}, {"method": "shared", "rounds": 1}, "no such change"),
        ({"robust": {"rule": "median"}}, {"method": "clustered-fl", "rounds": 1}, "multi-krum"),
        ({"robust": {"rule": "krum", "trim": 0.1}}, {}, "knob of trimmed-mean"),
        ({"robust": {"rule": "krum", "f": 40}}, {}, "2 f \\+ 3"),
        ({"robust": {"rule": "norm-bound", "bound": -1.0}}, {}, "above zero"),
        ({"robust": {"rule": "krum"}}, {"method": "fedavg", "rounds": 1, "weighting": "examples"}, "count alike"),
        ({"robust": {"rule": "krum"}, "privacy": {"noise": 1.0}}, {}, "account"),
        ({"robust": {"rule": "norm-bound"}, "privacy": {"noise": 1.0}}, {}, "adaptive"),
        ({"robust": {"rule": "norm-bound", "bound": 2.0}, "privacy": {"noise": 1.0}}, {}, "same number"),
        ({"attack": {"kind": "scale", "clients": 1.5}}, {}, "between 0 and 1"),
        ({"attack": {"kind": "scale", "clients": ["nobody"]}}, {}, "nobody"),
        ({"attack": {"kind": "nan", "factor": 2.0}}, {}, "does nothing"),
    ],
)
def test_what_does_not_go_together(tables: dict[str, Any], stage: dict[str, Any], message: str) -> None:
    raw = {"data": {"source": "exam"}, **tables, "stage": [stage or {"method": "fedavg", "rounds": 1}]}
    with pytest.raises(UserError, match=message):
        build(checked(raw, "test"), twenty())


def test_privacy_does_norm_bounding_itself(tmp_path: Path) -> None:
    """With the same bound nothing is added: the run is the one without [robust]."""
    raw = {
        "data": {"source": "exam", "standardize": "none"}, "privacy": {"noise": 1.0, "clip": 0.5, "reproducible": True},
        "stage": [{"method": "fedavg", "rounds": 2}],
    }  # fmt: skip
    alone = run(raw, tmp_path / "alone")
    both = run({**raw, "robust": {"rule": "norm-bound", "bound": 0.5}}, tmp_path / "both")
    assert both["query"] == alone["query"]
    assert both["privacy"]["released"]["epsilon"] == alone["privacy"]["released"]["epsilon"]


def test_a_comparison_says_what_the_attack_cost(tmp_path: Path) -> None:
    """Runs without the attack lie beside the others; the page has the difference and who was left out."""
    settings = {"robust": {"rule": "multi-krum"}, "attack": {"kind": "scale", "clients": 0.1}}
    summary = bespoke.compare(
        data="exam", methods=["fedavg"], seeds=1, rounds=3, tune=False, settings=settings, out=tmp_path / "found"
    )
    runs = [json.loads((tmp_path / "found" / kind / "fedavg-seed0" / "result.json").read_text())
            for kind in ("runs", "unattacked")]  # fmt: skip
    assert [r["attack"]["clients"] for r in runs] == [runs[0]["attack"]["clients"]] * 2
    assert [r["attack"]["kind"] for r in runs] == ["scale", "none"]
    sentence = next(text for text in summary.answer if text.startswith("Attack"))
    assert f"{number(runs[1]['query'])} without it, {number(runs[0]['query'])} with it" in sentence
    page = (tmp_path / "found" / "report.html").read_text()
    assert "Bad clients" in page
    assert f"{runs[0]['attack']['clients'][0]} (3 times, an attacker)" in page
    compare = json.loads((tmp_path / "found" / "compare.json").read_text())
    assert compare["methods"][0]["reveals"]["delta"] == "EACH"


def test_the_benchmark_makes_its_table_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are those of result.json; what is infinite is said to have diverged."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import robust as benchmark

    for kind, rule, seed in itertools.product(benchmark.ATTACKS, benchmark.RULES, benchmark.SEEDS):
        folder = tmp_path / f"{kind}-{rule}-seed{seed}"
        folder.mkdir()
        value = None if (kind, rule, seed) == ("scale", "mean", 2) else 0.5 + seed / 10
        (folder / "result.json").write_text(json.dumps({"query": value}))
        checked(benchmark.experiment(rule, kind, seed), "benchmark")
    lines = benchmark.table(tmp_path).splitlines()
    assert lines[2] == "| none | " + " | ".join(["0.600"] * 7) + " |"
    assert next(line for line in lines if line.startswith("| scale")).split(" | ")[1:3] == ["diverged", "0.600"]


def test_a_stopped_run_ends_at_the_same_bytes(tmp_path: Path) -> None:
    """Nothing of a rule or an attack is remembered but what checkpoints and logs hold."""
    raw = {
        "data": {"source": "exam"}, "robust": {"rule": "multi-krum"}, "attack": {"kind": "noise"},
        "cohort": {"size": 20}, "stage": [{"method": "scaffold", "rounds": 5}],
    }  # fmt: skip
    whole = run(raw, tmp_path / "whole")
    experiment, folder = build(checked(raw, "test")), RunFolder.create(tmp_path / "parts", "")
    rounds: list[int] = []
    with pytest.raises(Interrupted):
        Run(experiment, folder, after_round=lambda _, n: rounds.append(n), stop=lambda: 3 in rounds).run()
    assert Run(experiment, folder).run() == whole
    assert rounds == [1, 2, 3]
    same = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("whole", "parts")]
    assert same[0] == same[1]
