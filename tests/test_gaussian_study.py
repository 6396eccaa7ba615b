"""The vectorized simulation of Self-FL's synthetic study (benchmarks/self_fl) against the methods themselves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.federation.batches import SlicedBatches
from bespoke.method import Batching, Cohort, Method, Setting
from bespoke.methods import METHODS
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.tensors import stack, tree_map

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from self_fl import gaussian, synthetic

TASK = Regression(Linear(1))  # inputs are zero: the bias is the parameter, the loss's curvature is one
RATE, STEPS, BETWEEN, WITHIN = 0.05, 4, 0.5, 2.0
RANDOM = np.random.default_rng(5)
ROWS = RANDOM.integers(1, 9, 6)
Z = RANDOM.normal(1.6, 1.0, 6)
COHORTS = [[0, 1, 2, 3, 4, 5], [0, 2, 5], [1, 2, 3], [0, 4, 5], [2], [0, 1, 3], [2, 3, 4]]


def at(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(1, 1, dtype=torch.float64), "bias": torch.tensor([value], dtype=torch.float64)}


def looks(z: float, rows: int, batching: Batching) -> SlicedBatches:
    """A client whose rows all lie in one batch, which every step goes over."""
    y = torch.full((1, rows), z, dtype=torch.float64)
    exact = {"x": torch.zeros(1, rows, 1, dtype=torch.float64), "y": y, "mask": torch.ones_like(y)}
    examples = torch.tensor(float(rows), dtype=torch.float64)
    return SlicedBatches(exact, rows, batching.epochs, examples, 1, most=batching.steps or None)


def real(made: Method) -> tuple[float, list[float]]:
    """(global, personal parameters) after the rounds of COHORTS, by the method's own functions."""
    server: Any = made.init_server(at(0.0), Setting(0, 6))
    private = [made.init_private(at(0.0)) for _ in range(6)]
    clients = [looks(z, int(n), made.batching()) for z, n in zip(Z, ROWS)]
    support = [looks(z, int(n), made.support_batching()) for z, n in zip(Z, ROWS)]
    for cohort in COHORTS:
        sent = []
        for c in cohort:
            private[c], up = made.client_round(made.broadcast(server), private[c], clients[c])
            sent.append(up)
        sums = tree_map(lambda leaf: leaf.sum(0), stack(sent))
        server = made.server_round(server, Cohort(sums, {}, tuple(cohort)))
    down = made.broadcast(server)
    personal = [list(made.personalize(down, p, c)) for p, c in zip(private, support)]
    wanted = 1 if len(made.candidates()) > 1 else 0  # the first that is not the global model: one step of Per-FedAvg
    return float(server["params"]["bias"]), [float(models[wanted]["bias"]) for models in personal]


SELF: dict[str, Any] = {"lr": RATE, "steps": STEPS, "max_steps": 10_000, "curvature": 1.0}
KNOWN: dict[str, Any] = {**SELF, "between": BETWEEN, "within": WITHIN}
SHARED: dict[str, Any] = {"lr": RATE, "steps_per_round": STEPS}
PAIRS: dict[str, tuple[gaussian.Rule, str, dict[str, Any]]] = {
    "fedavg": (gaussian.FedAvg(STEPS), "fedavg", SHARED),
    "fedavg smoothed": (
        gaussian.FedAvg(STEPS, server_lr=0.3), "fedavg", {**SHARED, "server": ServerOptimizer(lr=0.3)},
    ),
    "ditto": (gaussian.Ditto(STEPS, lam=0.7), "ditto", {**SHARED, "lam": 0.7}),
    "pfedme": (gaussian.PFedMe(STEPS, lam=3.0), "pfedme", {**SHARED, "personal_lr": RATE, "lam": 3.0}),
    "per-fedavg": (gaussian.PerFedAvg(STEPS), "per-fedavg", {**SHARED, "alpha": RATE}),
    "self-fl": (gaussian.SelfFL(STEPS), "self-fl", KNOWN),
    "all others": (gaussian.SelfFL(STEPS, others="all"), "self-fl", {**KNOWN, "others": "all"}),
    "all others, learned": (
        gaussian.SelfFL(STEPS, known=False, others="all"), "self-fl", {**SELF, "others": "all"},
    ),
    "smoothed": (gaussian.SelfFL(STEPS, activity=0.3), "self-fl", {**KNOWN, "activity": 0.3}),
    "learned": (gaussian.SelfFL(STEPS, known=False), "self-fl", SELF),
    "augmented": (
        gaussian.AugmentedSelfFL(STEPS), "self-fl-augmented", {**KNOWN, "local_steps": 600, "shares": "local"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_the_simulation_is_the_method(name: str) -> None:
    """Six clients that come and go, once one alone; all parameters to nine digits."""
    rule, method, knobs = PAIRS[name]
    world = gaussian.World(Z[None], ROWS[None].astype(float), np.full((1, 6), RATE), RATE, BETWEEN, WITHIN)
    masks = [np.isin(np.arange(6), cohort)[None] for cohort in COHORTS]
    shared, personal = gaussian.play(rule, world, masks)
    expected, own = real(METHODS[method](TASK, **knobs))
    assert float(shared[0, 0]) == pytest.approx(expected, rel=1e-9)
    assert personal[0] == pytest.approx(own, rel=1e-9)


def test_fedavg_smoothed_by_the_activity_rate_by_hand() -> None:
    """From 0, a step goes half way to z = 2, then 6. One of two clients is active: w = 1 / 2, then (0.5 + 3.25) / 2."""
    world = gaussian.World(np.array([[2.0, 6.0]]), np.ones((1, 2)), np.full((1, 2), 0.5), 0.5, 1.0, 1.0)
    masks = [np.array([[True, False]]), np.array([[False, True]])]
    shared, _ = gaussian.play(gaussian.FedAvg(1, server_lr=None), world, masks)
    assert float(shared[0, 0]) == pytest.approx((0.5 + 3.25) / 2)


def test_the_study_is_whole_and_repeatable() -> None:
    found = synthetic.study(repeats=3, rounds=5)
    assert found == synthetic.study(repeats=3, rounds=5)
    assert found != synthetic.study(repeats=3, rounds=5, seed=1)
    names = {(line["case"], line["method"], line["activity"]) for line in found["lines"]}
    assert len(names) == len(found["lines"]) == 2 * len(synthetic.RULES) * len(synthetic.ACTIVITY)


def test_settings_of_the_paper() -> None:
    """G.1: 10 to 20 rows and sigma_0^2 = 0.001, or 10 to 200 and 1; 2, 4, 10, 16 or 20 clients of 20 are active."""
    for case, (least, most, spread) in {"homogeneous": (10, 20, 0.03), "heterogeneous": (10, 200, 1.0)}.items():
        world, truth = synthetic.draw(case, 500, 0)
        assert (world.rows.min(), world.rows.max()) == (least, most)
        assert truth.std() == pytest.approx(spread, rel=0.1)
        assert (world.z - truth).std() == pytest.approx(float(np.sqrt((0.1 / world.rows).mean())), rel=0.1)
        assert world.rate == pytest.approx(1e-3 * world.rows)
    many = [int(synthetic.cohorts(a, 1, 4, 0)[0].sum(1).max()) for a in synthetic.ACTIVITY]
    assert many == [2, 4, 10, 16, 20]
