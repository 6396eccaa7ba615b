"""Self-FL: each equation by hand, the theory to many digits, what travels, and all ways of executing it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.splits import cross_silo, everything
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.batches import Orders, SlicedBatches, work_of
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.traffic import Ledger
from bespoke.federation.work import ClientWork
from bespoke.method import Batching, Cohort, Setting
from bespoke.methods import AugmentedSelfFL, FedAvg, SelfFL
from bespoke.methods.parts.descend import descend
from bespoke.models.networks import Linear
from bespoke.models.task import Regression
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.tensors import Params, Tree, flatten, nbytes, stack, tree_map
from self_fl import bayes
from small_worlds import BATCH, FRACTIONS, SIZES, World, world

TASK = Regression(Linear(1))
LOOP = Choice(False, 1, 0, 1, "autograd", "")
ENGINES = {
    "func": Choice(True, 3, 0, 1, "func", ""),
    "closed form": Choice(True, 64, 0, 1, "closed-form", ""),
    "fused": Choice(True, 64, 0, 1, "fused", ""),
}


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def at(value: float) -> Params:
    """The model with one parameter: inputs are zero, so that the weight says nothing and never moves."""
    return {"weight": number(0.0).reshape(1, 1), "bias": number(value).reshape(1)}


def looks(z: float, rows: int) -> SlicedBatches:
    """A client of so many rows in one batch, all with target z: the gradient at theta is theta - z, the curvature 1."""
    data = {"x": torch.zeros(1, rows, 1), "y": number(z).expand(1, rows), "mask": torch.ones(1, rows)}
    return SlicedBatches({n: c.double() for n, c in data.items()}, rows, 1, number(float(rows)), 1, most=10_000)


def private_at(made: SelfFL, value: float, **numbers: float) -> Tree:
    found = made.init_private(at(value))
    return {**found, **{name: number(n) for name, n in numbers.items()}}


def down_at(value: float, between: float, total: float, counted: float = 1.0) -> Tree:
    return {"params": at(value), "between": number(between), "total": number(total), "counted": number(counted)}


def play(
    made: SelfFL, clients: list[SlicedBatches], times: int, cohorts: list[list[int]] | None = None
) -> tuple[list[Tree], list[Tree]]:
    """Rounds by hand, from zero: the server's and all clients' states after each."""
    server = made.init_server(at(0.0), Setting(0, len(clients)))
    private = [made.init_private(at(0.0)) for _ in clients]
    servers, privates = [], []
    for turn in range(times):
        sent, cohort = [], cohorts[turn] if cohorts else range(len(clients))
        for c in cohort:
            private[c], up = made.client_round(made.broadcast(server), private[c], clients[c])
            assert set(up) == set(made.uplink)
            sent.append(up)
        sums = tree_map(lambda leaf: leaf.sum(0), stack(sent))
        server = made.server_round(server, Cohort(sums, {}, tuple(cohort)))
        servers.append(server)
        privates.append(stack(private))
    return servers, privates


# -- equations by hand -------------------------------------------------------------------------------------------------
def test_online_variance_is_the_two_pass_one() -> None:
    """Eq. 18 and 19, for vectors the sum of the entries' variances; and nothing grows with the rounds."""
    made = SelfFL(TASK)
    models = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 5
    private = made.init_private({"w": torch.zeros(3, dtype=torch.float64)})
    width = nbytes(private)
    for place, model in enumerate(models, start=1):
        private = {**private, **made.remember(private, {"w": model})}
        assert float(private["variance"]) == pytest.approx(float(models[:place].var(0, correction=0).sum()), abs=1e-12)
        assert private["mean"]["w"].tolist() == pytest.approx(models[:place].mean(0).tolist())
        assert int(private["count"]) == place
    assert nbytes(private) == width


def test_the_server_begins_knowing_nothing_but_how_many_may_come() -> None:
    """Of nine clients six train: four that come are two thirds of them; where nobody is held out, four ninths."""
    made = SelfFL(TASK)
    for setting, clients in ((Setting(0, 9, 6), 6.0), (Setting(0, 9), 9.0)):
        server = made.init_server({"bias": torch.zeros(1)}, setting)
        assert [float(server[name]) for name in ("between", "total", "clients")] == [0.0, 0.0, clients]
        up = {"delta": {"bias": torch.tensor([6.0])}, "weight": torch.tensor(2.0), "spread": torch.tensor(30.0)}
        after = made.server_round(server, Cohort({**up, "count": torch.tensor(4.0)}, {}, ()))
        assert float(after["params"]["bias"]) == pytest.approx(3 * 4 / clients)  # the mean is 3
        assert float(after["between"]) == pytest.approx(30 / 2 - 9)  # the mean square less the squared mean
        assert float(after["total"]) == pytest.approx(2 * clients / 4)


def test_start_by_hand() -> None:
    """Eq. 10: theta = 2, theta_m = 3, of weight 1/2 among 2: 2 - (1/2) / (3/2) (3 - 2) = 5/3."""
    made = SelfFL(TASK)
    down, private = down_at(2.0, 1.0, 2.0), private_at(made, 3.0, weight=0.5)
    assert float(made.start(down, private)["bias"]) == pytest.approx(5 / 3)
    assert float(replace(made, adjust_start=False).start(down, private)["bias"]) == 2.0
    # who has put nothing into theta has nothing to take out
    assert float(made.start(down, private_at(made, 7.0))["bias"]) == 2.0
    assert float(made.start(down_at(2.0, 0.0, 0.0), private)["bias"]) == 2.0


def test_at_most_nine_tenths_of_the_global_model_are_taken_for_the_client_s_own() -> None:
    """theta = 2, theta_m = 3. A share s moves the start by -s / (1 - s): 0.89 by -8.09, 0.9 and all above by -9."""
    made = SelfFL(TASK)
    for weight, share in ((0.89, 0.89), (0.9, 0.9), (0.99, 0.9), (1.0, 0.9), (7.0, 0.9)):
        start = made.start(down_at(2.0, 1.0, 1.0), private_at(made, 3.0, weight=weight))
        assert float(start["bias"]) == pytest.approx(2 - share / (1 - share)), weight


def test_start_is_the_mean_of_the_others() -> None:
    """What is taken out of the global model is what was put in: for every client, after a round of everyone."""
    made = SelfFL(TASK, between=0.7, within=2.0, curvature=1.0, lr=0.2)
    clients = [looks(z, n) for z, n in ((1.0, 2), (4.0, 5), (-2.0, 1), (0.5, 9))]
    servers, privates = play(made, clients, 3)
    models, weights = privates[-1]["model"]["bias"][:, 0], privates[-1]["weight"]
    for c in range(4):
        start = made.start(made.broadcast(servers[-1]), tree_map(lambda leaf, c=c: leaf[c], privates[-1]))
        rest = torch.arange(4) != c
        others = (weights[rest] * models[rest]).sum() / weights[rest].sum()
        assert float(start["bias"]) == pytest.approx(float(others), rel=1e-12)


def test_number_of_steps_by_hand() -> None:
    """Eq. 8 with sigma_0^2 = sigma_m^2 = 1 and others of precision 1: half of the way is to be left.

    Steps of lr = 1/2 at curvature 1 leave (1/2)^l: one. lr = 1 - 2^(-1/3): three. lr = 0.3: log 2 / -log 0.7 = 1.94,
    two steps, or exactly two of length 1 - 2^(-1/2). Eq. 16, curvature 1 / (N sigma^2), N = 4: lr = 0.8 leaves 0.8 a
    step, 3.1, four. Others of precision 3: 3/4 is left, lr = 0.3 does it in 0.81, one. l_max cuts.
    """
    made = SelfFL(TASK, within=4.0, curvature=1.0, steps=5)
    client, private = looks(0.0, 4), private_at(SelfFL(TASK), 0.0, weight=0.5)

    def steps(total: float = 1.5, **knobs: Any) -> tuple[float, float]:
        found, lr = replace(made, **knobs).pace(down_at(0.0, 1.0, total), private, client)
        return float(found), float(lr)

    assert steps(lr=0.5) == (1.0, 0.5)
    assert steps(lr=1 - 2 ** (-1 / 3))[0] == 3.0
    assert steps(lr=0.3) == (2.0, 0.3)
    assert steps(lr=0.3, exact_steps=True) == pytest.approx((2.0, 1 - 2**-0.5))
    assert steps(lr=0.8, curvature=None)[0] == 4.0
    assert steps(lr=0.3, total=3.5)[0] == 1.0
    assert steps(lr=0.3, total=3.5, exact_steps=True) == pytest.approx((1.0, 0.25))
    assert steps(lr=1e-4) == (40.0, 1e-4)
    assert steps(lr=1e-4, max_steps=7, exact_steps=True) == (7.0, 1e-4)
    assert steps(lr=0.5, adapt_steps=False) == (5.0, 0.5)
    assert steps(lr=0.5, adapt_steps=False, max_steps=3)[0] == 3.0
    assert steps(lr=0.5, total=0.0)[0] == 5.0  # the first round: nobody has said anything
    assert steps(lr=0.5, within=None)[0] == 5.0  # a client that knows nothing of itself
    assert steps(lr=50.0)[0] == 1.0  # a step that overshoots is one step


def test_weights_aggregation_and_spread_by_hand() -> None:
    """sigma_0^2 = 1, sigma_m^2 = 1 and 3: u = 1/2, 1/4. Changes 3 and -3: mean (3/2 - 3/4) / (3/4) = 1.

    Spread: (9/2 + 9/4) / (3/4) - 1 = 8. Two of four clients: half of the mean goes into theta, the total is twice 3/4.
    """
    made = SelfFL(TASK, within=3.0)
    ups = [made.message(at(d), number(u), looks(0.0, n)) for d, u, n in ((3.0, 0.5, 3), (-3.0, 0.25, 1))]
    sums = tree_map(lambda leaf: leaf.sum(0), stack(ups))
    server = {**made.init_server(at(10.0), Setting(0, 4)), "between": number(1.0)}
    found = made.server_round(server, Cohort(sums, {}, (0, 3)))
    assert float(found["params"]["bias"]) == pytest.approx(10.5)
    assert float(found["between"]) == pytest.approx(8.0)
    assert float(found["total"]) == pytest.approx(1.5)
    told = replace(made, activity=1.0, between=2.0).server_round(
        {**server, "between": number(2.0)}, Cohort(sums, {}, (0, 3))
    )
    assert float(told["params"]["bias"]) == pytest.approx(11.0)
    assert float(told["between"]) == 2.0
    counts = {"between": 8.0, "total": 1.5, "counted": 1 / 3}  # of three others one is in a cohort of two
    assert made.observe(found, Cohort(sums, {}, (0, 3))) == pytest.approx(counts)
    # within 3 by 3 rows and by one: the weights above
    for rows, weight in ((3, 0.5), (1, 0.25)):
        new, _ = made.client_round(down_at(0.0, 1.0, 1.0), private_at(made, 0.0), looks(0.0, rows))
        assert float(new["weight"]) == pytest.approx(weight)


def test_variances_as_section_3_2_prints_them_by_hand() -> None:
    """Sums of squares, not means: two clients' spread of 8 is 16; of three rounds, 2, 5 and 8, the variance 6 is 18.

    With sigma_0^2 = 18 and sigma_m^2 = 18 the client weighs a half, as it would with 6 and 6.
    """
    made = SelfFL(TASK, variances="scatter")
    ups = [made.message(at(d), number(u), looks(0.0, n)) for d, u, n in ((3.0, 0.5, 3), (-3.0, 0.25, 1))]
    sums = tree_map(lambda leaf: leaf.sum(0), stack(ups))
    found = made.server_round(made.init_server(at(10.0), Setting(0, 4)), Cohort(sums, {}, (0, 3)))
    assert float(found["between"]) == pytest.approx(16.0)
    assert float(found["total"]) == pytest.approx(1.5)
    private = private_at(made, 8.0)
    for model in (2.0, 5.0, 8.0):
        private = {**private, **made.remember(private, at(model))}
    for reading, variance in (("sample", 6.0), ("scatter", 18.0)):
        found, known = replace(made, variances=reading).uncertainty(private, looks(0.0, 1))  # type: ignore[assignment]
        assert (float(found), bool(known)) == (pytest.approx(variance), True)
    new, _ = made.client_round(down_at(0.0, 18.0, 1.0), private, looks(0.0, 1))
    assert float(new["weight"]) == pytest.approx(0.5)


def test_weighting_by_examples_by_hand() -> None:
    """3 and 1 rows, changes 3 and -3: mean 1.5, spread 9 - 2.25; precisions still travel, for Eq. 8 and 10."""
    made = SelfFL(TASK, weighting="examples")
    ups = [made.message(at(d), number(u), looks(0.0, n)) for d, u, n in ((3.0, 0.5, 3), (-3.0, 0.25, 1))]
    assert set(ups[0]) == set(made.uplink)
    sums = tree_map(lambda leaf: leaf.sum(0), stack(ups))
    found = made.server_round(made.init_server(at(10.0), Setting(0, 2)), Cohort(sums, {}, (0, 1)))
    assert float(found["params"]["bias"]) == pytest.approx(11.5)
    assert float(found["between"]) == pytest.approx(6.75)
    assert float(found["total"]) == pytest.approx(0.75)


def test_first_rounds_give_the_unweighted_variance_between_clients() -> None:
    """Eq. 14 while nobody knows its own uncertainty: everyone weighs alike. One step of lr 1/2 goes half way to z."""
    made = SelfFL(TASK, lr=0.5, steps=1)
    clients = [looks(z, 1) for z in (2.0, 4.0, 12.0)]
    servers, privates = play(made, clients, 1)
    assert privates[0]["model"]["bias"].flatten().tolist() == [1.0, 2.0, 6.0]
    assert float(servers[0]["params"]["bias"]) == pytest.approx(3.0)
    assert float(servers[0]["between"]) == pytest.approx(float(np.var([1.0, 2.0, 6.0])))
    assert privates[0]["weight"].tolist() == [0.5] * 3
    assert float(servers[0]["total"]) == pytest.approx(1.5)


def test_a_client_counts_its_own_rounds() -> None:
    """Remark E.1: by the client's own counter, and only when it is active; before, its uncertainty is not known."""
    made = SelfFL(TASK, lr=0.3, steps=2)
    clients = [looks(z, 2) for z in (1.0, 3.0, -2.0)]
    cohorts = [[0, 1], [0, 2], [0, 1], [0, 1]]
    _, privates = play(made, clients, 4, cohorts)
    assert privates[-1]["count"].tolist() == [4.0, 3.0, 1.0]
    for client in range(3):
        rounds = [t for t, cohort in enumerate(cohorts) if client in cohort]
        models = [float(privates[t]["model"]["bias"][client]) for t in rounds]
        assert float(privates[-1]["variance"][client]) == pytest.approx(np.var(models), abs=1e-12)
    # third and fourth round of client 0, fourth of client 1: two models or more were there to compare
    assert [p["weight"][0].item() == 0.5 for p in privates] == [True, True, False, False]
    assert [p["weight"][1].item() == 0.5 for p in privates] == [True, True, True, False]


@pytest.mark.parametrize("off", [{"adjust_start": False}, {"adapt_steps": False}, {"weighting": "examples"}])
def test_each_component_can_be_switched_off_alone(off: dict[str, Any]) -> None:
    """The others go on: the result differs from Self-FL's and from that of a method with all three switched off."""
    knobs: Any = {"between": 0.5, "within": 2.0, "curvature": 1.0, "lr": 0.2, "steps": 2}
    clients = [looks(z, n) for z, n in ((1.0, 2), (4.0, 5), (-2.0, 1))]
    all_off = {"adjust_start": False, "adapt_steps": False, "weighting": "examples"}
    results = []
    for switched in ({}, off, all_off):
        servers, privates = play(SelfFL(TASK, **{**knobs, **switched}), clients, 4)
        results.append([float(servers[-1]["params"]["bias"]), *privates[-1]["model"]["bias"].flatten().tolist()])
    assert np.abs(np.subtract(results[0], results[1])).max() > 1e-3
    assert np.abs(np.subtract(results[1], results[2])).max() > 1e-3


def test_without_its_three_components_it_is_fedavg() -> None:
    place = world("linear")
    own = {"adjust_start": False, "adapt_steps": False, "weighting": "examples", "steps": 1, "activity": 1.0}
    models = []
    for made in (SelfFL(place.task, lr=0.1, batch_size=32, **own), FedAvg(place.task, lr=0.1, batch_size=32)):
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            server = made.init_server(place.task.init(5), Setting(0, 7))
            for key in (1, 2):
                server = made.server_round(server, engine.round(server, np.arange(7), key).cohort)
            models.append(server["params"])
    torch.testing.assert_close(models[0], models[1])


# -- the theory, to many digits ----------------------------------------------------------------------------------------
Z = np.random.default_rng(7).normal(1.6, 1.0, 20)
ROWS = np.random.default_rng(8).integers(1, 12, 20)
KNOWN: Any = {"between": 0.5, "within": 2.0, "curvature": 1.0, "lr": 0.05, "exact_steps": True, "max_steps": 10_000}
VARIANCES = KNOWN["within"] / ROWS


def test_rounds_converge_to_their_limit_at_the_rate_of_proposition_3_1() -> None:
    """On the two-level Gaussian model with known variances a round shrinks the largest error by q at least (Eq. 12).

    A round is theta <- (1 - r) z + r A theta with A theta the mean of the others; A's rows sum to one, so errors shrink
    by max r = q. From the second round on, for in the first nobody knows the sum of the others' precisions.
    """
    servers, privates = play(SelfFL(TASK, **KNOWN), [looks(z, int(n)) for z, n in zip(Z, ROWS)], 250)
    limit, q = bayes.self_fl_limit(Z, VARIANCES, 0.5), bayes.contraction(VARIANCES, 0.5)
    models = np.array([p["model"]["bias"][:, 0].numpy() for p in privates])
    errors = np.abs(models - limit).max(1)
    assert (errors[1:] <= q * errors[:-1] + 1e-12).all()
    assert errors[-1] < 1e-10
    assert 0.9 < q < 1
    w = bayes.weights(VARIANCES, 0.5)
    assert float(servers[-1]["params"]["bias"]) == pytest.approx((w * limit).sum() / w.sum(), abs=1e-10)
    # and what it converges to is near the FL-optimal value: nearer to it than what clients could learn alone
    best = bayes.fl_optimal(Z, VARIANCES, 0.5).mean
    assert np.abs(limit - best).max() < 0.2 * np.abs(Z - best).max()


def test_a_round_from_the_others_local_values_reaches_the_fl_optimal_value() -> None:
    """Eq. 3 by Eq. 7 and 8, to twelve digits: from the mean of the others' z, with the steps and lengths of `pace`."""
    made = SelfFL(TASK, **KNOWN)
    w = 0.5 * bayes.weights(VARIANCES, 0.5)
    best, start = bayes.fl_optimal(Z, VARIANCES, 0.5).mean, bayes.global_optimal(Z, VARIANCES, 0.5).mean
    for z, n, weight, expected in zip(Z, ROWS, w, best):
        private = private_at(made, float(z), weight=float(weight))
        new, _ = made.client_round(down_at(float(start), 0.5, float(w.sum())), private, looks(z, int(n)))
        assert float(new["model"]["bias"]) == pytest.approx(expected, rel=1e-12)


def test_augmented_with_local_models_is_fl_optimal_after_two_rounds() -> None:
    """A global model made of converged ones is Eq. 2, Eq. 10 then is Eq. 9, and Eq. 8 leads to Eq. 3."""
    made = AugmentedSelfFL(TASK, **{**KNOWN, "lr": 0.3}, local_steps=120, shares="local")
    servers, privates = play(made, [looks(z, int(n)) for z, n in zip(Z, ROWS)], 2)
    assert float(servers[0]["params"]["bias"]) == pytest.approx(bayes.global_optimal(Z, VARIANCES, 0.5).mean, rel=1e-12)
    best = bayes.fl_optimal(Z, VARIANCES, 0.5).mean
    assert privates[1]["model"]["bias"][:, 0].numpy() == pytest.approx(best, rel=1e-12)


def test_augmented_by_hand() -> None:
    """z = 2, 6; steps of lr 1/2, one, then 60 to z: theta_m = 1, 3, converged 2, 6, whose variance is 4 (Eq. 22).

    Both weigh alike: theta = 2. Each has met one converged model, so its variance is 0 and its mean that model.
    """
    made = AugmentedSelfFL(TASK, lr=0.5, steps=1, local_steps=60)
    servers, privates = play(made, [looks(2.0, 1), looks(6.0, 1)], 1)
    assert privates[0]["model"]["bias"].flatten().tolist() == [1.0, 3.0]
    assert privates[0]["local"]["bias"].flatten().tolist() == pytest.approx([2.0, 6.0])
    assert privates[0]["mean"]["bias"].flatten().tolist() == pytest.approx([2.0, 6.0])
    assert privates[0]["variance"].tolist() == pytest.approx([0.0, 0.0])
    assert float(servers[0]["params"]["bias"]) == pytest.approx(2.0)
    assert float(servers[0]["between"]) == pytest.approx(4.0)


# -- the others under client sampling ----------------------------------------------------------------------------------
OTHERS: Any = {"between": 1.0, "within": 1.0, "curvature": 1.0, "steps": 1}


def sampled(others: Any, cohort: int, **knobs: Any) -> tuple[SelfFL, Tree]:
    """What is sent after a round in which so many of five clients went from 0 to 2, each with a weight of 1/2."""
    made = SelfFL(TASK, others=others, **{**OTHERS, **knobs})
    ups = [made.message(at(2.0), number(0.5), looks(0.0, 1)) for _ in range(cohort)]
    sums = tree_map(lambda leaf: leaf.sum(0), stack(ups))
    server = made.server_round(made.init_server(at(0.0), Setting(0, 5)), Cohort(sums, {}, tuple(range(cohort))))
    return made, made.broadcast(server)


def test_the_sum_over_others_by_hand() -> None:
    """Three of five clients, all of weight 1/2 and with sigma_m^2 = sigma_0^2 = 1: theta = (3/5) 2 = 1.2.

    Active: a client has two others, of 1 together, so Eq. 8 leaves 1 / (1 + 1) of the distance, log 2 / -log(1 - lr)
    steps. Eq. 10 with theta_m = 2: 1.2 - (1/2) / 1 (2 - 1.2) = 0.8. All: four others, of 2 together, so 2 / 3 is left,
    and the start is 1.2 - (1/2) / 2 (2 - 1.2) = 1.
    """
    private = private_at(SelfFL(TASK), 2.0, weight=0.5)
    for others, left, start in (("active", 1 / 2, 0.8), ("all", 2 / 3, 1.0)):
        made, down = sampled(others, 3, lr=0.1)
        assert float(down["params"]["bias"]) == pytest.approx(1.2)
        assert float(made.remaining_distance(down, private, looks(0.0, 1))[0]) == pytest.approx(-np.log(left))
        assert float(made.start(down, private)["bias"]) == pytest.approx(start)
        assert float(made.pace(down, private, looks(0.0, 1))[0]) == np.ceil(np.log(left) / np.log(0.9))


def test_a_client_that_weighs_more_than_the_last_cohort_is_not_its_only_member() -> None:
    """Two of five clients, of weights 1/10 each: all five together 1/2. A client of weight 0.4 was not among them.

    All others weigh 0.5 - 0.4 = 0.1, the one other of a cohort 0.1 / 4. Eq. 10 would take out 0.4 / 0.025 = 16 times
    the distance; 0.4 / 0.1 = 4 times takes out what the client put in, and one more is the most that is allowed.
    theta = (2/5) 2 = 0.8, theta_m = 1: the start is 0.8 - 5 (1 - 0.8) = -0.2.
    """
    made = SelfFL(TASK, **OTHERS)
    ups = [made.message(at(2.0), number(0.1), looks(0.0, 1)) for _ in range(2)]
    sums = tree_map(lambda leaf: leaf.sum(0), stack(ups))
    down = made.broadcast(made.server_round(made.init_server(at(0.0), Setting(0, 5)), Cohort(sums, {}, (0, 1))))
    private = private_at(made, 1.0, weight=0.4)
    assert float(made.remaining_distance(down, private, looks(0.0, 1))[0]) == pytest.approx(np.log(1 + 1 / 0.025))
    assert float(made.start(down, private)["bias"]) == pytest.approx(-0.2)


def test_with_a_learned_variance_a_client_takes_out_only_what_it_put_in() -> None:
    """Three of five, of weight 1/2 and model 2, put 3/5 of 2 into theta = 1.2: each 1/5 of the weight, 0.2 (2 - 0).

    What the others put in, were it a mean of its own, is 1.2 - 1/4 (2 - 1.2) = 1: that is where such a client starts.
    With a known variance Eq. 10 asks for twice as much, 0.8, for two of four others are active.
    """
    for known, start in ((1.0, 0.8), (None, 1.0)):
        made, down = sampled("active", 3, within=known)
        share = 0.5 / float(down["total"])
        begun = float(made.start(down, private_at(made, 2.0, weight=0.5))["bias"])
        assert begun == pytest.approx(start)
        if known is None:
            assert share * 2.0 + (1 - share) * begun == pytest.approx(float(down["params"]["bias"]))


@pytest.mark.parametrize("exact", [False, True])
def test_a_cohort_of_one_has_no_others(exact: bool) -> None:
    """Eq. 10 has nobody to start from: theta it is. Eq. 8 keeps nothing of the others: as many steps as are allowed."""
    made, down = sampled("active", 1, lr=0.1, max_steps=7, exact_steps=exact)
    private = private_at(made, 2.0, weight=0.5)
    assert float(made.start(down, private)["bias"]) == pytest.approx(2 / 5)
    steps, lr = made.pace(down, private, looks(0.0, 1))
    assert (float(steps), float(lr)) == pytest.approx((7.0, 0.1))
    new, _ = made.client_round(down, private, looks(1.0, 1))
    assert float(new["model"]["bias"]) == pytest.approx(1 - 0.9**7 * (1 - 2 / 5))  # from 2/5 towards 1
    made, down = sampled("all", 1, lr=0.1)  # four others, of 2: 2/3 is left
    assert float(made.remaining_distance(down, private, looks(0.0, 1))[0]) == pytest.approx(-np.log(2 / 3))


@pytest.mark.parametrize("kind", [SelfFL, AugmentedSelfFL])
def test_rounds_of_one_client_stay_finite(kind: type[SelfFL]) -> None:
    """Variances are learned, and one model has none. Targets lie from -2 to 3, and no model goes beyond them."""
    made = kind(TASK, lr=0.3, steps=2, max_steps=5)
    clients = [looks(z, 2) for z in (1.0, 3.0, -2.0)]
    servers, privates = play(made, clients, 60, [[turn % 3] for turn in range(60)])
    for found in (servers[-1]["params"]["bias"], privates[-1]["model"]["bias"]):
        assert ((found >= -2) & (found <= 3)).all()
    assert privates[-1]["steps"].tolist() == [5.0 if kind is SelfFL else 205.0] * 3


def test_with_everyone_active_there_is_one_sum_over_others() -> None:
    """Known and learned variances: `others` changes nothing, to the last bit; with two of four it does."""
    clients = [looks(z, n) for z, n in ((1.0, 2), (4.0, 5), (-2.0, 1), (0.5, 9))]
    for known in ({"between": 0.7, "within": 2.0, "curvature": 1.0}, {"curvature": 1.0}):
        for cohorts, same in ((None, True), ([[0, 1], [2, 3], [1, 2], [0, 3], [0, 2], [1, 3]], False)):
            models = []
            for others in ("active", "all"):
                made = SelfFL(TASK, lr=0.05, steps=3, others=others, **known)
                models.append(play(made, clients, 6, cohorts)[1][-1]["model"]["bias"].flatten().tolist())
            assert (models[0] == models[1]) is same


# -- what travels ------------------------------------------------------------------------------------------------------
def test_traffic_and_what_the_server_learns() -> None:
    """A model of 4 floats: up it and three numbers, down it and three; augmented sends two models. All are sums."""
    place = world("linear")
    for kind, up in ((SelfFL, 4 * 4 + 12), (AugmentedSelfFL, 2 * 4 * 4 + 12)):
        made = kind(place.task, batch_size=BATCH)
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            result = engine.round(made.init_server(place.task.init(5), Setting(0, 7)), np.arange(7), key=1)
        assert (result.bytes_up, result.bytes_down) == (7 * up, 7 * (4 * 4 + 12))
        assert result.cohort.each == {}
        line = Ledger().round(0, 1, made, None, result)
        assert set(line["revealed"].values()) == {"SUM", "COUNT"}
        assert line["bytes_up"] == 7 * up
        assert set(made.broadcast(made.init_server(place.task.init(5)))) == set(made.downlink)
        assert set(made.init_private(place.task.init(5))) == set(made.private)


def test_unseen_clients_take_the_first_rounds_steps_from_the_global_model() -> None:
    """theta = 2, z = 4, two steps of lr 1/2: 3.5. With known variances Eq. 16 says how many: half of the way is one."""
    made = SelfFL(TASK, lr=0.5, steps=2)
    private = made.newcomer(down_at(2.0, 1.0, 1.0), made.init_private(at(-9.0)), looks(4.0, 4))
    assert [float(m["bias"]) for m in made.personalize(down_at(2.0, 1.0, 1.0), private, looks(4.0, 4))] == [2.0, 3.5]
    told = replace(made, within=4.0, curvature=1.0)
    private = told.newcomer(down_at(2.0, 1.0, 1.0), told.init_private(at(-9.0)), looks(4.0, 4))
    assert float(private["model"]["bias"]) == 3.0


def test_warm_start_is_a_stage(tmp_path: Path) -> None:
    """FedAvg's model is where Self-FL begins; everything private begins with the stage. Its rounds say sigma_0^2."""
    place = world("linear")
    made = SelfFL(place.task, lr=0.05, batch_size=BATCH, max_steps=6, steps=3)
    split = cross_silo(place.population, FRACTIONS, seed=3)
    stages = (Stage(FedAvg(place.task, lr=0.1, batch_size=BATCH), 3), Stage(made, 4))
    experiment = Experiment("warm", place.population, split, place.task, stages, "mse", cohort=7)
    result = Run(experiment, RunFolder.create(tmp_path / "run", ""), how=LOOP).run()
    lines = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["fedavg"] * 4 + ["self-fl"] * 5
    assert lines[4]["validation"] is not None
    assert all(line["observed"]["between"] > 0 for line in lines[5:])
    assert result["query"] is not None
    assert result["chosen"]["candidate"] == "personal"


# -- all ways of executing it ------------------------------------------------------------------------------------------
VARIANTS: dict[str, tuple[type[SelfFL], dict[str, Any]]] = {
    "learned": (SelfFL, {}),
    "known": (SelfFL, {"between": 0.3, "within": 1.0, "exact_steps": True}),
    "no start": (SelfFL, {"adjust_start": False}),
    "fixed steps": (SelfFL, {"adapt_steps": False}),
    "examples": (SelfFL, {"weighting": "examples", "curvature": 0.5}),
    "all others": (SelfFL, {"others": "all"}),
    "augmented": (AugmentedSelfFL, {"local_steps": 9}),
    "local": (AugmentedSelfFL, {"local_steps": 9, "shares": "local"}),
}


def trained(place: World, made: SelfFL, choice: Choice) -> tuple[Params, Params]:
    cohorts = [range(7), (1, 3, 5, 6), (0, 2, 3, 5, 6), range(7), (2, 4, 5)]
    with Engine(place.population, choice) as engine:
        engine.open(ClientWork(made, place.split.train), place.task.init(5))
        server = made.init_server(place.task.init(5), Setting(0, 7))
        for key, cohort in enumerate(cohorts):
            server = made.server_round(server, engine.round(server, np.array(cohort), key).cohort)
        return flatten(server), flatten(engine.host.private.read(range(7))) if engine.host else {}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_all_engines_take_the_same_steps(name: str, variant: str) -> None:
    """Five rounds with clients that come and go, so that most know their uncertainty; their steps are equal."""
    place = world(name)
    kind, knobs = VARIANTS[variant]
    made = kind(place.task, lr=0.05, batch_size=BATCH, steps=4, max_steps=11, weight_decay=0.01, **knobs)
    server, private = trained(place, made, LOOP)
    if name == "linear" and variant != "fixed steps":
        assert len(set(private["steps"].tolist())) > 1
    for engine, choice in ENGINES.items():
        if name == "mlp" and engine != "func":
            continue
        found, own = trained(place, made, choice)
        assert own["steps"].tolist() == private["steps"].tolist()
        torch.testing.assert_close(found, server, rtol=2e-4, atol=1e-5)
        torch.testing.assert_close(own, private, rtol=2e-4, atol=1e-5)


def test_steps_go_over_a_clients_own_batches_again_and_again() -> None:
    """In both forms of batches the same rows at the same step, whoever else is in the chunk; compiled, one model."""
    place = world("linear")
    clients = np.arange(7)
    orders = Orders.draw(everything(place.population), clients, Batching(BATCH, steps=9), key=1)
    own = torch.tensor([9.0, 1.0, 4.0, 7.0, 3.0, 9.0, 5.0])
    stacked = orders.stacked(clients)
    for c in range(7):
        sliced = orders.sliced(c)
        mine = stacked.of_client(tuple(part[c] for part in stacked.mapped()))
        assert len(sliced) == len(mine) == 9
        for step in range(9):
            batch = mine[step]
            assert torch.equal(batch["y"][batch["mask"] > 0], sliced[step]["y"])
        few, padded = sliced.first(own[c], 6), mine.first(own[c], 6)
        assert len(few) == min(int(own[c]), 6)
        assert [float(padded.live(s)) for s in range(len(padded))] == [float(s < own[c]) for s in range(6)]
        fused = descend(place.task.differentiated("fused"), place.task.init(1), padded, lr=0.1)
        torch.testing.assert_close(fused, descend(place.task, place.task.init(1), few, lr=0.1), rtol=1e-4, atol=1e-6)
    with pytest.raises(TypeError, match="steps"):
        Orders.draw(everything(place.population), clients, Batching(BATCH), key=1).sliced(0).first(own[0], 3)


def test_work_in_steps_by_hand() -> None:
    """9 steps of batches of 4. 22 rows are 6 batches: once round and 3 more, 22 + 12 rows; 2 rows: 9 times."""
    assert work_of(np.array([22, 2, 0]), Batching(BATCH, steps=9)) == (18, 22 + 12 + 18)
    assert work_of(np.array(SIZES), Batching(BATCH, 3, uses=2)) == (6 * 19, 6 * sum(SIZES))
