"""Ditto, MR-MTL and Mocha: numbers that can be checked by hand, and clients that never trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from bespoke import api
from bespoke.declarations import Needs
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.federation.batches import Orders
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Cohort, Method, Setting
from bespoke.methods import APFL, MRMTL, Ditto, FedAvg, Mocha
from bespoke.methods.parts.descend import descend
from bespoke.study.described import cautions
from bespoke.tensors import Tree
from by_hand import TASK, ZERO, batches_of, numbers, rounds
from command import plain_table
from small_worlds import BATCH, SIZES, World, world

CHOICES = {
    "loop": Choice(False, 1, 0, 1, "autograd", ""),
    "func": Choice(True, 3, 0, 1, "func", ""),
    "fused": Choice(True, 64, 0, 1, "fused", ""),
}


# -- Ditto -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["motley", "original"])
def test_ditto_by_hand(order: Any) -> None:
    """x = 1, 2 and y = 2, 2 in one batch: from zero errors are -2, -2 and slopes -3, -2.

    Shared model, lr 0.1: (0.3, 0.2). Private, lr 0.05: (0.15, 0.1); then errors -1.75, -1.6, slopes -2.475, -1.675, and
    the pull to the shared model of the second round's start, (0.15, 0.1) - (0.3, 0.2) = (-0.15, -0.1) times lam 2.
    """
    made = Ditto(TASK, lr=0.1, private_lr=0.05, lam=2.0, order=order)
    batches = {0: batches_of([1.0, 2.0], [2.0, 2.0], made)}
    server, private = rounds(made, batches, 1)
    assert numbers(server["params"]) == pytest.approx((0.3, 0.2))
    assert numbers(private[0]["model"]) == pytest.approx((0.15, 0.1))
    _, private = rounds(made, batches, 2)
    assert numbers(private[0]["model"]) == pytest.approx((0.15 + 0.05 * (2.475 + 0.3), 0.1 + 0.05 * (1.675 + 0.2)))


def test_ditto_in_the_original_order_takes_turns_on_each_batch() -> None:
    """The private step first, then the shared model's, on the same batch, the pull to the round's start."""
    made = Ditto(TASK, lr=0.1, lam=0.7, order="original", batch_size=2, epochs=2, private_epochs=2)
    x, y = [1.0, 2.0, -1.0, 0.5, 3.0], [2.0, 1.0, 0.0, 1.0, 4.0]
    batches = batches_of(x, y, made)
    start = {"weight": torch.tensor([[0.4]]), "bias": torch.tensor([-0.2])}
    own = {"weight": torch.tensor([[-0.3]]), "bias": torch.tensor([0.5])}
    private, up = made.client_round({"params": start}, {"model": own}, batches)
    shared, v = dict(start), dict(own)
    for step in range(6):
        slope = TASK.gradient(v, batches[step])
        v = {n: p - 0.1 * (slope[n] + 0.7 * (p - start[n])) for n, p in v.items()}
        slope = TASK.gradient(shared, batches[step])
        shared = {n: p - 0.1 * slope[n] for n, p in shared.items()}
    assert numbers(private["model"]) == pytest.approx(numbers(v))
    sent = {n: start[n] + d / 5 for n, d in up["delta"].items()}
    assert numbers(sent) == pytest.approx(numbers(shared))
    other = replace(made, order="motley").client_round({"params": start}, {"model": own}, batches)
    assert numbers(other[0]["model"]) != pytest.approx(numbers(v), rel=1e-4)  # epochs of its own: other batches
    assert other[1]["delta"]["weight"] == pytest.approx(up["delta"]["weight"])


def test_ditto_shares_the_model_that_fedavg_trains() -> None:
    """To the bit, whatever the private models do: they are trained beside it, and their steps are counted."""
    place = world("linear")
    knobs: Any = {"lr": 0.1, "epochs": 2, "batch_size": BATCH, "momentum": 0.5}
    found = []
    for made in (FedAvg(place.task, **knobs), Ditto(place.task, **knobs, private_epochs=3)):
        with Engine(place.population, CHOICES["loop"]) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            result = engine.round(made.init_server(place.task.init(5)), np.arange(7), key=1)
            found.append((result.cohort.sums["delta"], result.steps))
    assert torch.equal(found[0][0]["weight"], found[1][0]["weight"])
    assert [steps for _, steps in found] == [2 * 11, 5 * 11]


# -- MR-MTL ------------------------------------------------------------------------------------------------------------
def test_mr_mtl_by_hand() -> None:
    """Two clients of one row each, x = 1: targets 1 and 3. A step at lr 0.1 from zero: v = 0.1 and 0.3 (both numbers).

    Their mean is 0.2. Second step, lam 0.5: errors 0.2 - 1 and 0.6 - 3, pulls -0.05 and 0.05.
    """
    made = MRMTL(TASK, lr=0.1, lam=0.5)
    batches = {0: batches_of([1.0], [1.0], made), 1: batches_of([1.0], [3.0], made)}
    server, private = rounds(made, batches, 1)
    assert numbers(server["params"]) == pytest.approx((0.2, 0.2))
    server, private = rounds(made, batches, 2)
    low, high = 0.1 + 0.1 * (0.8 + 0.05), 0.3 + 0.1 * (2.4 - 0.05)
    assert numbers(private[0]["model"]) == pytest.approx((low, low))
    assert numbers(private[1]["model"]) == pytest.approx((high, high))
    assert numbers(server["params"])[0] == pytest.approx((low + high) / 2)


def test_mr_mtl_weighs_clients_and_is_local_training_without_a_pull() -> None:
    made = MRMTL(TASK, lr=0.1, lam=0.0, batch_size=1)
    batches = {0: batches_of([1.0], [1.0], made), 1: batches_of([1.0, 2.0, 0.0], [3.0, 1.0, 1.0], made)}
    server, private = rounds(made, batches, 3)
    for client, mine in batches.items():
        alone = ZERO
        for _ in range(3):
            alone = descend(TASK, alone, mine, lr=0.1)
        assert numbers(private[client]["model"]) == pytest.approx(numbers(alone))
    weighted = (private[0]["model"]["weight"] + 3 * private[1]["model"]["weight"]) / 4
    assert server["params"]["weight"] == pytest.approx(weighted)


# -- clients that never trained ----------------------------------------------------------------------------------------
def _after_one_round(made: Method, place: World, choice: Choice) -> tuple[Engine, Tree]:
    engine = Engine(place.population, choice)
    params = place.task.init(5)
    engine.open(ClientWork(made, place.split.train), params)
    server = made.init_server(params, Setting(0, len(SIZES)))
    return engine, made.server_round(server, engine.round(server, np.array([1, 3, 6]), key=4).cohort)


@pytest.mark.parametrize("kind", [Ditto, MRMTL])
def test_a_client_that_never_trained_makes_its_model_on_its_own_rows(kind: type[Ditto] | type[MRMTL]) -> None:
    """From the shared model as it is now, pulled to it; one that trained has the model it keeps."""
    place = world("linear")
    made = kind(place.task, lr=0.1, lam=0.6, batch_size=BATCH, adapt_epochs=3)
    engine, server = _after_one_round(made, place, CHOICES["loop"])
    support, shared = place.split.test.support, server["params"]
    orders = Orders.draw(support, np.array([5, 3]), made.support_batching(), key=9)
    expected = descend(place.task, shared, orders.sliced(0), lr=0.1, anchor=shared, pull=0.6)
    found = engine.personal(server, 5, support, 1, key=9)
    assert all(torch.equal(found[name], leaf) for name, leaf in expected.items())
    assert engine.host is not None
    kept = engine.host.private.read([3])["model"]
    found = engine.personal(server, 3, support, 1, key=9)
    assert all(torch.equal(found[name], leaf[0]) for name, leaf in kept.items())


@pytest.mark.parametrize("kind", [Ditto, MRMTL, Mocha, APFL])
def test_engines_agree_on_newcomers_beside_trained_clients(kind: type[Method]) -> None:
    place = world("linear")
    knobs: Any = {"lr": 0.1, "batch_size": BATCH, **({"lam": 0.6} if kind is not APFL else {})}
    made = kind(place.task, **knobs)
    clients, scores = place.split.test.query.clients, {}
    for name, choice in CHOICES.items():
        engine, server = _after_one_round(made, place, choice)
        parts: Any = {"query": place.split.test.query}
        scores[name] = engine.examine(server, clients, place.split.test.support, parts, key=9)["query"]["mse"]
        for place_of, client in enumerate(clients):
            if name == "loop":  # what is scored is what is exported
                model = engine.personal(server, int(client), place.split.test.support, 1, key=9)
                rows = Orders.draw(place.split.test.query, np.array([client]), made.batching(), None).sliced(0).rows()
                said = place.task.score(place.task.predict(model, rows), rows)["mse"]
                assert scores[name][place_of, 1] == pytest.approx(said.item(), rel=1e-5)
    for found in scores.values():
        np.testing.assert_allclose(found, scores["loop"], rtol=1e-4)


# -- Mocha -------------------------------------------------------------------------------------------------------------
def _related(made: Mocha, rows: torch.Tensor) -> Tree:
    """The server after a round in which every client went from zero to its row of `rows` (weight, bias)."""
    server = made.init_server(ZERO, Setting(0, len(rows)))
    each = {"delta": {"weight": rows[:, None, :1], "bias": rows[:, 1:]}}
    return made.server_round(server, Cohort({}, each, tuple(range(len(rows)))))


def test_the_relation_by_hand() -> None:
    """Rows (3, 0) and (0, 1): W W^T = diag(9, 1), roots 3 and 1, Sigma = diag(3/4, 1/4), its inverse diag(4/3, 4)."""
    rows = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    start = Mocha(TASK).init_server(ZERO, Setting(0, 2))
    assert start["relation"].tolist() == pytest.approx(np.eye(2) / 2)
    assert _related(Mocha(TASK), rows)["relation"].numpy() == pytest.approx(np.diag([0.75, 0.25]))
    server = _related(Mocha(TASK, coupling="omega", lam=0.3), rows)
    assert server["relation"].numpy() == pytest.approx(np.diag([4 / 3, 4]))
    assert server["pull"].tolist() == pytest.approx([0.4, 1.2])
    assert numbers(server["params"]) == pytest.approx((1.5, 0.5))  # the mean
    later = Mocha(TASK, relate_every=2)
    assert torch.equal(_related(later, rows)["relation"], torch.eye(2, dtype=torch.float64) / 2)


def test_equal_clients_share_one_direction() -> None:
    """Rows (1, 0) twice: W W^T is all ones, with eigenvalue 2 along (1, 1) and the floor across."""
    found = _related(Mocha(TASK), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))["relation"].numpy()
    roots = np.array([2**0.5, 1e-4])
    expected = (roots[0] * np.ones((2, 2)) + roots[1] * np.array([[1, -1], [-1, 1]])) / 2 / roots.sum()
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("coupling", ["motley", "omega"])
def test_a_step_follows_the_gradient_of_the_whole_objective(coupling: Any) -> None:
    """f_t(w_t) + lam/2 tr(W^T R W), differentiated for w_t: the anchor and the pull say the same."""
    rows = torch.tensor([[1.0, 0.3], [-0.4, 0.8], [0.6, 0.9], [0.1, -0.5]])
    made = Mocha(TASK, lr=0.05, lam=0.2, coupling=coupling)
    server = _related(made, rows)
    relation = server["relation"]
    for client in range(4):
        batches = batches_of([1.0, -2.0, 0.5], [2.0, 1.0, 0.3 * client], made)
        down = {**made.broadcast(server), **made.unicast(server, client)}
        _, up = made.client_round(down, {}, batches)
        moved = torch.cat([up["delta"]["weight"].flatten(), up["delta"]["bias"]]).double()
        live = rows.double().requires_grad_()
        loss = TASK.loss({"weight": live[client, None, :1].float(), "bias": live[client, 1:].float()}, batches[0])
        (loss + 0.1 * torch.trace(live.mT @ relation @ live)).backward()
        assert live.grad is not None
        rate = 0.05 / (1 + 0.05 * 0.2 * relation[client, client])  # the step is a proximal one
        assert (-moved / rate).numpy() == pytest.approx(live.grad[client].numpy(), rel=1e-3, abs=1e-3)


def test_who_never_trained_stands_at_the_mean() -> None:
    made = Mocha(TASK)
    server = made.init_server(ZERO, Setting(0, 4))
    delta = {"weight": torch.tensor([[[1.0]], [[3.0]]]), "bias": torch.tensor([[0.0], [1.0]])}
    server = made.server_round(server, Cohort({}, {"delta": delta}, (2, 0)))
    assert server["trained"].tolist() == [True, False, True, False]
    for client, expected in ((0, (3.0, 1.0)), (1, (2.0, 0.5)), (2, (1.0, 0.0)), (3, (2.0, 0.5))):
        assert numbers(made.unicast(server, client)["weights"]) == pytest.approx(expected)
    assert made.unicast(server, 1)["anchor"]["weight"].abs().item() < 1e-6  # and nobody is related to it


def test_stiff_couplings_do_not_diverge() -> None:
    """Omega of clients with few directions in common is huge: a plain gradient step would overshoot."""
    place = world("linear")
    made = Mocha(place.task, lr=0.1, lam=10.0, coupling="omega", batch_size=BATCH)
    engine, server = _after_one_round(made, place, CHOICES["loop"])
    for key in range(30):
        server = made.server_round(server, engine.round(server, np.arange(7), key=key).cohort)
    assert server["pull"].max() > 100 / made.lr
    assert all(leaf.isfinite().all() and leaf.abs().max() < 10 for leaf in server["weights"].values())


# -- where they fit, and what is said ----------------------------------------------------------------------------------
def _settings(folder: Path, method: str, clients: int = 20, **rest: Any) -> dict[str, Any]:
    plain_table(clients, 20).to_csv(folder / "table.csv", index=False)
    data = {"table": str(folder / "table.csv"), "client": "client", "target": "y"}
    return {"data": data, "stage": [{"method": method, "rounds": 2}], **rest}


def test_mocha_takes_linear_models_of_few_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(checked(_settings(tmp_path, "mocha"), "test"))
    with pytest.raises(UserError, match=r"mocha is for linear models, and the model is 'mlp'"):
        build(checked(_settings(tmp_path, "mocha", model={"name": "mlp"}), "test"))
    monkeypatch.setattr(Mocha, "needs", Needs(linear=True, clients=19))
    with pytest.raises(UserError, match="at most 19 clients; there are 20"):
        build(checked(_settings(tmp_path, "mocha"), "test"))


@pytest.mark.parametrize("method", ["ditto", "mr-mtl", "mocha", "apfl", "scaffold"])
def test_a_word_of_caution_where_clients_seldom_or_never_train(tmp_path: Path, method: str) -> None:
    assert cautions([build(checked(_settings(tmp_path, method), "test"))]) == []
    [sampled] = cautions([build(checked(_settings(tmp_path, method, cohort={"size": 5}), "test"))])
    assert sampled.startswith(f"{method} keeps something for every client")
    assert "5 of 20 clients train in a round" in sampled
    [devices] = cautions([build(checked(_settings(tmp_path, method, split={"protocol": "cross-device"}), "test"))])
    assert "cross-device tests clients that never train" in devices
    assert cautions([build(checked(_settings(tmp_path, "fedavg", cohort={"size": 5}), "test"))]) == []


def test_what_applies_to_several_is_said_once(tmp_path: Path) -> None:
    one = build(checked(_settings(tmp_path, "ditto", cohort={"size": 5}), "test"))
    other = build(checked(_settings(tmp_path, "scaffold", cohort={"size": 5}), "test"))
    both, alone = cautions([replace(one, label="a"), replace(other, label="b"), replace(one, label="c")])
    assert both.startswith("a and c keep something for every client from round to round, and 5 of 20 clients")
    assert alone.startswith("b keeps something")


def test_the_caution_is_in_the_comparison_and_its_report(tmp_path: Path) -> None:
    settings = _settings(tmp_path, "ditto")
    summary = api.compare(
        settings["data"]["table"], client="client", target="y", out=tmp_path / "out",
        methods=["fedavg", "ditto", "mocha"], seeds=1, rounds=2, tune=False, settings={"cohort": {"size": 5}},
    )  # fmt: skip
    notes = json.loads((tmp_path / "out/compare.json").read_text())["notes"]
    assert [note.split()[0] for note in notes] == ["ditto", "mocha"]
    assert notes[0] in summary.notes
    assert "what the others keep grows old" in (tmp_path / "out/report.html").read_text()


# -- published numbers -------------------------------------------------------------------------------------------------
ANCHORS = {  # means over five seeds of an independent re-run; one seed lies within a standard deviation or two
    "ditto": ("ditto", {"lam": 1.0}, 0.01139, 0.0005),
    "mr-mtl": ("mr-mtl", {"lam": 1.0}, 0.01138, 0.0005),
    "mocha": ("mocha", {"lam": 0.001}, 0.01208, 0.0006),
    "mocha, strong": ("mocha", {"lam": 1.0}, 0.01624, 0.0015),
    "mocha, omega": ("mocha", {"lam": 0.0001, "coupling": "omega"}, 0.0121, 0.0006),
}


@pytest.mark.parametrize("name", ANCHORS)
def test_school_as_in_motley(name: str, shared_data: Path, tmp_path: Path) -> None:
    """Half squared error on School: 201 rounds of one epoch, batches of 32, learning rate 0.03."""
    if not (shared_data / "school" / "school.mat").exists():
        pytest.skip("school.mat is not here; see `bespoke data school`")
    method, knobs, expected, tolerance = ANCHORS[name]
    stage = {"method": method, "rounds": 201, "lr": 0.03, "batch_size": 32, "drop_last": True, **knobs}
    settings = {
        "seed": 100, "metric": "half_mse", "evaluate_every": 1000, "data": {"source": "school"}, "stage": [stage],
        "split": {"protocol": "cross-silo", "fractions": [0.7, 0.15, 0.15], "order": "motley"},
    }  # fmt: skip
    result = api.run(settings, tmp_path / "run")
    assert result["query"] == pytest.approx(expected, abs=tolerance)
    if method != "mocha":  # and the shared model beside it is worse, as FedAvg is
        table = pd.read_parquet(tmp_path / "run" / "clients.parquet")
        assert table["baseline_half_mse"].mean() == pytest.approx(0.0130, abs=0.0006)
