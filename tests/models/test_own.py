"""A user's own nn.Module: trained as a hand-written loop of torch would, whatever becomes of its buffers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

import bespoke
import own_models
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment
from bespoke.federation.batches import Layout
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.messages.clip import Clip
from bespoke.method import Method
from bespoke.models.own.draws import drawn
from bespoke.models.own.model import local_name
from bespoke.models.own.network import OwnNetwork
from bespoke.tensors import BUFFERS, Params, is_buffer

LOOP = Choice(False, 1, 0, 1, "autograd", "")
FUNC = Choice(True, 3, 0, 1, "func", "")
KEY = 77


@pytest.fixture(scope="module")
def digits() -> Population:
    """Real images of 8 x 8 by client, 45 each."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = (found.images / 16).astype(np.float32), found.target
    rows = {f"c{i}": (images[45 * i : 45 * i + 45], labels[45 * i : 45 * i + 45]) for i in range(4)}
    return bespoke.population({**rows, "c0": (images[:79], labels[:79])}, task="classification")


@pytest.fixture(scope="module")
def table() -> Population:
    """Small tables of unequal size, which a chunk pads."""
    draw = np.random.default_rng(0)

    def rows(many: int) -> tuple[NDArray[Any], NDArray[Any]]:
        x = draw.standard_normal((many, 6))
        return x, (x[:, 0] + x[:, 1] ** 2 > 0.5).astype(int) + (x[:, 2] > 1)

    return bespoke.population({f"c{i}": rows(30 + 11 * i) for i in range(4)}, task="classification")


def experiment(people: Population, model: Any, *stages: dict[str, Any], **more: Any) -> Experiment:
    described = {"data": {"population": "here"}, "model": {"name": local_name(model, "model")}, "stage": list(stages)}
    return build(checked({**described, **more}, "test"), people)


def fedavg(**knobs: Any) -> dict[str, Any]:
    return {"method": "fedavg", "rounds": 2, "lr": 0.1, "batch_size": 16, **knobs}


def round_of(made: Experiment, clients: list[int], choice: Choice = LOOP, place: int = 0) -> tuple[Any, Any, Engine]:
    """The server before and after one round on these clients."""
    method = made.stages[place].method
    params = made.task.init(3)
    with Engine(made.population, choice) as engine:
        engine.open(ClientWork(method, made.split.train, made.transforms), params)
        before = method.init_server(params, made.setting(0))
        outcome = engine.round(before, np.array(clients), KEY)
        return before, method.server_round(before, outcome.cohort), engine


def by_hand(made: Experiment, method: Method, client: int, **optimizer: Any) -> nn.Module:
    """The module that torch alone would train on the same batches."""
    module: nn.Module = made.task.network.model.made({}, 3)
    module.train()
    stepper = torch.optim.SGD(module.parameters(), **optimizer)
    batches = Layout(made.split.train, np.array([client]), method.batching()).draw(KEY).sliced(0)
    for step in range(len(batches)):
        stepper.zero_grad()
        x = batches[step]["x"]
        F.cross_entropy(module(x.reshape(-1, 1, 8, 8)), batches[step]["y"].long()).backward()
        stepper.step()
    return module


@pytest.mark.parametrize("knobs", [{"epochs": 3}, {"epochs": 2, "momentum": 0.9, "weight_decay": 0.01}])
def test_one_client_is_trained_as_torch_does(digits: Population, knobs: dict[str, Any]) -> None:
    made = experiment(digits, own_models.averaged, fedavg(**knobs))
    _, after, _ = round_of(made, [0])
    told = {name: value for name, value in knobs.items() if name != "epochs"}
    module = by_hand(made, made.stages[0].method, 0, lr=0.1, **told)
    wanted: dict[str, Tensor] = dict(module.named_parameters())
    assert {name for name in after["params"] if not is_buffer(name)} == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(after["params"][name], value.detach(), rtol=1e-4, atol=1e-5)
    buffers = {f"{BUFFERS}{name}": value for name, value in module.named_buffers()}
    assert {name for name in after["params"] if is_buffer(name)} == set(buffers)
    for name, value in buffers.items():
        torch.testing.assert_close(after["params"][name], value.float(), rtol=1e-4, atol=1e-5)
    # evaluation mode uses these statistics
    x = digits.columns["x"][:9]
    module.eval()
    torch.testing.assert_close(
        made.task.predict(after["params"], {"x": x}), module(x.reshape(-1, 1, 8, 8)).detach(), rtol=1e-3, atol=1e-4
    )


def test_buffers_are_averaged_and_no_server_optimizer_moves_them(digits: Population) -> None:
    adam = fedavg(epochs=1, server={"name": "adam", "lr": 0.5})
    made = experiment(digits, own_models.averaged, adam, transform={"clip": 1e-3})
    assert isinstance(made.transforms[0], Clip)
    before, after, _ = round_of(made, [0, 2])
    trained = [dict(by_hand(made, made.stages[0].method, client, lr=0.1).named_buffers()) for client in (0, 2)]
    sizes = made.split.train.sizes(np.array([0, 2])).astype(float)
    for name in trained[0]:
        mean = sum(size * own[name].float() for size, own in zip(sizes, trained)) / sizes.sum()
        torch.testing.assert_close(after["params"][f"{BUFFERS}{name}"], mean, rtol=1e-4, atol=1e-5)
    assert not any(is_buffer(name) for name in after["optimizer"]["moment"])
    assert not torch.equal(after["params"]["fc.bias"], before["params"]["fc.bias"])


def test_scaffold_has_no_control_of_buffers(digits: Population) -> None:
    made = experiment(digits, own_models.averaged, {**fedavg(epochs=1), "method": "scaffold"})
    _, after, _ = round_of(made, [0])
    assert all(not after["control"][name].any() for name in after["control"] if is_buffer(name))
    assert after["control"]["fc.weight"].any()
    buffers = dict(by_hand(made, made.stages[0].method, 0, lr=0.1).named_buffers())  # controls begin at zero
    torch.testing.assert_close(after["params"][f"{BUFFERS}bn.running_mean"], buffers["bn.running_mean"])


def test_frozen_buffers_stay_as_they_were_made(digits: Population) -> None:
    made = experiment(digits, own_models.frozen, fedavg(epochs=1))
    _, after, _ = round_of(made, [0])
    assert not any(is_buffer(name) for name in after["params"])
    module = made.task.network.model.made({}, 3).eval()  # BatchNorm in evaluation mode throughout: nothing else differs
    stepper = torch.optim.SGD(module.parameters(), lr=0.1)
    batches = Layout(made.split.train, np.array([0]), made.stages[0].method.batching()).draw(KEY).sliced(0)
    for step in range(len(batches)):
        stepper.zero_grad()
        F.cross_entropy(module(batches[step]["x"].reshape(-1, 1, 8, 8)), batches[step]["y"].long()).backward()
        stepper.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(after["params"][name], value.detach(), rtol=1e-4, atol=1e-5)


# -- layers that stay --------------------------------------------------------------------------------------------------
def test_private_layers_stay_on_each_client(digits: Population) -> None:
    made = experiment(digits, own_models.private, fedavg(epochs=1))
    _, after, engine = round_of(made, [0, 2])
    assert set(after["params"]) == {"stem.weight", "block.conv1.weight", "block.conv2.weight", "fc.weight", "fc.bias"}
    assert engine.host is not None
    assert engine.host.layers is not None
    for client in (0, 2):
        module = by_hand(made, made.stages[0].method, client, lr=0.1)
        own = engine.host.layers.of(client)
        torch.testing.assert_close(own["bn.weight"], module.bn.weight.detach(), rtol=1e-4, atol=1e-5)  # type: ignore
        mean = module.bn.running_mean  # type: ignore[union-attr]
        torch.testing.assert_close(own[f"{BUFFERS}bn.running_mean"], mean, rtol=1e-4, atol=1e-5)
    change = [by_hand(made, made.stages[0].method, client, lr=0.1).fc.weight for client in (0, 2)]  # type: ignore
    sizes = made.split.train.sizes(np.array([0, 2])).astype(float)
    mean = sum(size * weight.detach() for size, weight in zip(sizes, change)) / sizes.sum()  # type: ignore[operator]
    torch.testing.assert_close(after["params"]["fc.weight"], mean.float(), rtol=1e-4, atol=1e-5)


def test_a_client_that_never_trained_has_statistics_of_its_own_rows(digits: Population) -> None:
    made = experiment(digits, own_models.private, fedavg(epochs=1))
    _, after, engine = round_of(made, [0])
    support = made.split.test.support
    model = engine.personal(after, 3, support, 0, 1)
    x = digits.columns["x"][support.of(np.array([3]))[0]].reshape(-1, 1, 8, 8)
    stem = F.conv2d(x, after["params"]["stem.weight"], stride=2, padding=1)
    torch.testing.assert_close(model[f"{BUFFERS}bn.running_mean"], stem.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[f"{BUFFERS}bn.running_var"], stem.var((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert torch.equal(model["bn.weight"], torch.ones(4))
    trained = engine.personal(after, 0, support, 0, 1)
    assert not torch.equal(trained["bn.weight"], torch.ones(4))


# -- dropout -----------------------------------------------------------------------------------------------------------
def test_dropout_is_the_same_looped_and_vectorized(table: Population) -> None:
    made = experiment(table, own_models.dropped, fedavg(epochs=2))
    assert made.task.vectorizes
    assert made.task.draws
    clients = [0, 1, 2, 3]
    looped, vectorized = (round_of(made, clients, choice)[1]["params"] for choice in (LOOP, FUNC))
    again = round_of(made, clients)[1]["params"]
    still = experiment(table, bespoke.model(lambda: own_models.Dropped(), head="fc"), fedavg(epochs=2))
    for name in looped:
        torch.testing.assert_close(looped[name], vectorized[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(looped[name], again[name])
    assert still.task.network.model.name().startswith("object:lambda-")


def test_masks_keep_as_many_as_they_should_and_differ_by_step() -> None:
    x = torch.ones(200, 50)
    drop = nn.Dropout(0.3)

    def masked(key: int) -> Tensor:
        with drawn(torch.tensor(key), seeded=True):
            found: Tensor = drop(x)
        return found

    first = masked(1)
    assert abs(float((first == 0).float().mean()) - 0.3) < 0.02  # four standard errors
    assert float(first.max()) == pytest.approx(1 / 0.7)
    assert not torch.equal(first, masked(2))
    assert torch.equal(first, masked(1))


def test_epochs_draw_other_masks(table: Population) -> None:
    made = experiment(table, own_models.dropped, fedavg(epochs=2))
    method = made.stages[0].method
    batches = replace(Layout(made.split.train, np.array([0, 1]), method.batching()).draw(KEY).sliced(0), draws=True)
    keys = [int(batches[step]["draw"]) for step in range(len(batches))]
    assert len(set(keys)) == len(keys)
    later = batches.part(1, 2)
    assert [int(later[step]["draw"]) for step in range(len(later))] == keys[len(keys) // 2 :]


# -- what cannot be done -----------------------------------------------------------------------------------------------
def wrong(people: Population, model: Any, *stages: dict[str, Any], **more: Any) -> str:
    with pytest.raises(UserError) as error:
        experiment(people, model, *(stages or (fedavg(),)), **more)
    return str(error.value)


def test_what_does_not_fit_is_refused(digits: Population, table: Population) -> None:
    said = wrong(digits, own_models.unsaid)
    assert all(word in said for word in ("bn.running_mean", "'average'", "'private'", "'frozen'"))
    assert "apfl takes steps of its own" in wrong(digits, own_models.averaged, {"method": "apfl", "rounds": 1})
    option = {"method": "scaffold", "rounds": 1, "option": "I"}
    assert "scaffold takes steps of its own" in wrong(digits, own_models.averaged, option)
    assert "ensemble" in wrong(digits, own_models.private, {"method": "ensemble", "rounds": 1})
    privacy = {"clip": 1.0, "noise": 1.0, "delta": 1e-5}
    assert "buffers='average'" in wrong(digits, own_models.averaged, fedavg(), privacy=privacy)
    headless = bespoke.model(own_models.Dropped)
    assert "name it: bespoke.model(..., head='fc')" in wrong(table, headless, {"method": "fedrep", "rounds": 1})
    assert "no submodule 'top'" in wrong(table, bespoke.model(own_models.Dropped, head="top"))
    assert "x (4, 6)" in wrong(table, bespoke.model(lambda: nn.Linear(5, 3)))
    assert "(4, 2)" in wrong(table, bespoke.model(lambda: nn.Linear(6, 2)))
    stuck = bespoke.model(own_models.Dropped, loss=lambda outputs, y: outputs.sum(-1) / 0 * 0)
    assert "is nan" in wrong(table, stuck)
    shaped = bespoke.model(own_models.Dropped, loss=lambda outputs, y: outputs)
    assert "(4,), a loss for each row" in wrong(table, shaped)
    with pytest.raises(UserError, match="it has to be one of"):
        bespoke.model(nn.Identity, buffers="mine")  # type: ignore[arg-type]
    fixed = bespoke.model(lambda: nn.Linear(6, 3).requires_grad_(False))
    assert "nothing to train" in wrong(table, fixed)


class Odd(nn.Module):
    """A network of two layers that can be spoiled in many ways."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.body, self.top = nn.Linear(6, 3), nn.Linear(3, 3)
        if kind == "tied below":
            self.below = nn.Linear(3, 3, bias=False)
            self.top.weight = self.below.weight
        if kind == "frozen":
            self.top.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "large" and len(x) > 5:
            raise ValueError("more than five rows")
        if self.kind == "counts":
            self.calls += 1
            x = x * self.calls
        if self.kind == "draws":
            x = x + torch.randn_like(x)
        out = self.top(self.body(x).tanh())
        if self.kind == "detached":
            return out.detach()
        return {"logits": out} if self.kind == "dict" else out


def fails() -> nn.Module:
    raise RuntimeError("no weights here")


def test_modules_that_cannot_be_used(table: Population) -> None:
    def odd(kind: str, **more: Any) -> str:
        return wrong(table, bespoke.model(lambda: Odd(kind), **more))

    assert "shares parameters with below.weight" in odd("tied below", head="top")
    assert "'top' has no parameters that require gradients" in odd("frozen", head="top")
    assert "other outputs each time" in odd("counts")
    assert "other outputs each time" in odd("draws")
    assert "has no gradient" in odd("detached")
    assert "gave dict for 4 rows" in odd("dict")
    assert "outputs= fails on what forward returned, a dict of logits: KeyError" in odd(
        "dict", outputs=lambda o: o["a"]
    )
    assert "a lazy module" in wrong(table, lambda: nn.LazyLinear(3))
    assert "RuntimeError: no weights here" in wrong(table, bespoke.model(fails))
    assert "made a int" in wrong(table, bespoke.model(lambda: 3))
    late = experiment(table, bespoke.model(lambda: Odd("large")), fedavg())
    with pytest.raises(UserError, match=r"fails on rows of the data \(x \(16, 6\)\): ValueError: more than five rows"):
        round_of(late, [0])


def test_tied_weights_are_one_parameter(table: Population) -> None:
    """Trained as torch alone does, by both of its uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.top = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.top(self.two(self.one(x).tanh()).tanh())
            return out

    made = experiment(table, bespoke.model(Tied), fedavg(batch_size=1000, epochs=1))
    start = made.task.init(3)
    assert "two.weight" not in start
    for choice in (LOOP, FUNC):
        _, after, _ = round_of(made, [1], choice)
        module: nn.Module = made.task.network.model.made({}, 3)
        rows, _ = made.split.train.of(np.array([1]))
        x, y = (made.population.columns[name][rows] for name in ("x", "y"))
        F.cross_entropy(module(x), y.long()).backward()
        for name, p in module.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(after["params"][name], p.detach() - 0.1 * p.grad, rtol=1e-4, atol=1e-5)


def test_a_column_of_numbers_may_lose_its_dimension(table: Population) -> None:
    """A regression's model may give (rows,); its head, which gives (rows, 1), is still the last layer."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.top = nn.Linear(6, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.top(self.body(x).tanh())[:, 0]
            return out

    draw = np.random.default_rng(0)
    people = bespoke.population({"a": (draw.standard_normal((30, 6)), draw.standard_normal(30))})
    made = experiment(people, bespoke.model(Flat, head="top"), {"method": "fedrep", "rounds": 1})
    rows = {name: people.columns[name][:5] for name in ("x", "y")}
    params = made.task.init(0)
    seen = torch.tanh(F.linear(rows["x"], params["body.weight"], params["body.bias"]))
    torch.testing.assert_close(made.task.features(params, rows), seen)


def test_frozen_parameters_neither_travel_nor_move(table: Population) -> None:
    def part() -> nn.Module:
        module = own_models.Dropped()
        module.body.requires_grad_(False)
        return module

    made = experiment(table, bespoke.model(part, head="fc"), fedavg(), {"method": "ditto", "rounds": 1, "lr": 0.1})
    assert set(made.task.init(0)) == {"fc.weight", "fc.bias"}
    assert set(made.stages[1].method.init_private(made.task.init(0))["model"]) == {"fc.weight", "fc.bias"}


# -- features and head -------------------------------------------------------------------------------------------------
def test_features_are_what_the_head_is_given(digits: Population) -> None:
    made = experiment(digits, own_models.averaged, fedavg())
    params, rows = made.task.init(1), {"x": digits.columns["x"][:7]}
    module = made.task.network.model.made({}, 1).eval()
    x = rows["x"].reshape(-1, 1, 8, 8)
    seen = module.block(torch.relu(module.bn(module.stem(x)))).mean((2, 3))
    torch.testing.assert_close(made.task.features(params, rows), seen)
    head = made.task.above_features()
    own = {name: p for name, p in params.items() if name.startswith("fc.")}
    torch.testing.assert_close(head.predict(own, {"x": seen}), module(x))


def test_tuning_the_last_layer_leaves_the_body_and_its_statistics(digits: Population) -> None:
    last = {"method": "finetune", "part": "last", "epochs": 2, "lrs": [0.1]}
    made = experiment(digits, own_models.averaged, fedavg(), last)
    method, params = made.stages[1].method, made.task.init(1)
    with Engine(made.population, LOOP) as engine:
        engine.open(ClientWork(method, made.split.train), params)
        tuned: Params = engine.personal(method.init_server(params), 0, made.split.test.support, 2, 1)
    moved = {name for name in params if not torch.equal(params[name], tuned[name])}
    assert moved == {"fc.weight", "fc.bias"}


# -- its own loss and metrics ------------------------------------------------------------------------------------------
def test_own_loss_and_metrics(table: Population) -> None:
    def squares(outputs: Tensor, y: Tensor) -> Tensor:
        return ((outputs - F.one_hot(y.long(), 3)) ** 2).mean()

    def worst(outputs: Tensor, y: Tensor) -> float:
        return float((outputs - F.one_hot(y.long(), 3)).abs().max())

    made = experiment(
        table,
        bespoke.model(
            own_models.Dropped, loss=squares, metrics={"found": own_models.balanced, "worst": worst},
            lower_is_better=("worst",),
        ),
        fedavg(),
        metric="worst",
    )  # fmt: skip
    assert made.lower_is_better
    assert "mean over rows" in made.task.looped
    params, n = made.task.init(0), 12
    batch = {"x": table.columns["x"][:n], "y": table.columns["y"][:n], "mask": torch.ones(n)}
    outputs = made.task.predict(params, batch)
    sums = made.task.score(outputs, batch)
    assert float(sums["worst"] / sums["worst_count"]) == pytest.approx(worst(outputs, batch["y"]))
    assert float(sums["loss"] / sums["count"]) == pytest.approx(float(squares(outputs, batch["y"])))
    right = (outputs.argmax(-1) == batch["y"]).float().mean()
    assert float(sums["accuracy"] / sums["count"]) == pytest.approx(float(right))


def test_a_batch_of_one_row_has_no_statistics() -> None:
    draw = np.random.default_rng(1)
    people = bespoke.population({"a": (draw.standard_normal((15, 6)), np.arange(15) % 3)}, task="classification")
    made = experiment(people, own_models.normed, fedavg(batch_size=8))
    assert made.split.train.sizes()[0] == 9
    with pytest.raises(UserError, match="drop_last"):
        round_of(made, [0])
    round_of(experiment(people, own_models.normed, fedavg(batch_size=8, drop_last=True)), [0])


@pytest.mark.parametrize("name", ["sized", "ResNet"])
def test_a_worker_makes_the_model_with_its_options(digits: Population, name: str) -> None:
    model = {"name": f"own_models:{name}", "width": 6}
    bespoke.trust(model["name"])
    if name == "ResNet":  # the class itself: nothing says what becomes of its buffers
        with pytest.raises(UserError, match="'average'"):
            build(checked({"data": {"population": "here"}, "model": model, "stage": [fedavg()]}, "test"), digits)
        return
    made = build(checked({"data": {"population": "here"}, "model": model, "stage": [fedavg()]}, "test"), digits)
    again = pickle.loads(pickle.dumps(made.task))  # as it goes to a worker process
    assert made.task.init(5)["fc.weight"].shape == (10, 6)
    for leaf, other in zip(made.task.init(5).values(), again.init(5).values()):
        assert torch.equal(leaf, other)
    rows = {"x": digits.columns["x"][:3]}
    assert torch.equal(made.task.predict(made.task.init(5), rows), again.predict(again.init(5), rows))


def test_a_module_is_not_made_again_for_what_it_holds() -> None:
    """To make a pretrained one takes seconds; what is given out is a copy."""
    made: list[nn.Module] = []

    def factory() -> nn.Module:
        made.append(own_models.Dropped())
        return made[-1]

    network = OwnNetwork(bespoke.model(factory, head="fc"))
    first, again = network.init(0), network.init(0)
    assert len(made) == 1
    torch.manual_seed(0)
    expected = own_models.Dropped().state_dict()
    for name, leaf in first.items():
        leaf += 1
        assert torch.equal(again[name], expected[name])
    assert torch.equal(network.init(0)["fc.bias"], expected["fc.bias"])
    assert not torch.equal(network.init(1)["fc.bias"], expected["fc.bias"])
    assert len(made) == 2


def test_what_a_worker_rebuilds_runs_under_vmap() -> None:
    """A module draws its initial values when it is made, which vmap refuses within it."""
    network = pickle.loads(pickle.dumps(OwnNetwork(replace(own_models.dropped, named="own_models:dropped"))))
    params = [own_models.Dropped().state_dict() for _ in range(2)]
    x = torch.randn(2, 5, 6)
    found = torch.func.vmap(network)({name: torch.stack([p[name] for p in params]) for name in params[0]}, x)
    for one, mine, rows in zip(found, params, x):
        torch.testing.assert_close(
            one, (rows @ mine["body.weight"].T + mine["body.bias"]).tanh() @ mine["fc.weight"].T + mine["fc.bias"]
        )
