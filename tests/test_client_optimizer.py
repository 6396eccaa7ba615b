"""Client optimizers against torch.optim on the same batches: one client at a time, and padded under vmap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bespoke.data.splits import everything
from bespoke.errors import UserError
from bespoke.experiment.stage import check_stage
from bespoke.federation.batches import Orders
from bespoke.method import Batching
from bespoke.methods import METHODS, MRMTL, FedAvg, FineTune, Local, PFedMe
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.tensors import Params, take
from small_worlds import SIZES, world

PLACE = world("mlp")
BATCHING = Batching(4, 3)
CLIENTS = np.arange(len(SIZES))
LR = 0.05

THEIRS: dict[str, Any] = {
    "sgd": lambda p, decay: torch.optim.SGD(p, lr=LR, weight_decay=decay),
    "momentum": lambda p, decay: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=decay),
    "nesterov": lambda p, decay: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True, weight_decay=decay),
    "adam": lambda p, decay: torch.optim.Adam(p, lr=LR, weight_decay=decay, eps=1e-3),
    "adamw": lambda p, decay: torch.optim.AdamW(p, lr=LR, weight_decay=decay, eps=1e-3),
}


def ours(name: Any, decay: float = 0.0) -> ClientOptimizer:
    """An epsilon at which steps are not made of rounding: Adam divides by the size of a slope."""
    return ClientOptimizer(name, weight_decay=decay, **({"eps": 1e-3} if name.startswith("adam") else {}))


def orders() -> Orders:
    return Orders.draw(everything(PLACE.population), CLIENTS, BATCHING, key=3)


def trained_by_torch(name: str, decay: float, start: Params, batches: Any) -> Params:
    live = {n: p.clone().requires_grad_() for n, p in start.items()}
    optimizer = THEIRS[name](list(live.values()), decay)
    for step in range(len(batches)):
        optimizer.zero_grad()
        batch = batches[step]
        F.cross_entropy(PLACE.task.predict(live, batch), batch["y"].long()).backward()
        optimizer.step()
    return {n: p.detach() for n, p in live.items()}


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("name", THEIRS)
def test_every_optimizer_is_that_of_torch(name: str, decay: float) -> None:
    """Three epochs of every client; the vectorized ones are padded to the longest, which is several steps longer."""
    start, drawn = PLACE.task.init(1), orders()
    stacked = drawn.stacked(CLIENTS)
    task = PLACE.task.differentiated("func")
    together = torch.func.vmap(
        lambda mine: descend(task, start, stacked.of_client(mine), lr=LR, optimizer=ours(name, decay))
    )(stacked.mapped())
    for client in CLIENTS:
        batches = drawn.sliced(client)
        alone = descend(PLACE.task, start, batches, lr=LR, optimizer=ours(name, decay))
        expected = trained_by_torch(name, decay, start, batches)
        torch.testing.assert_close(alone, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(take(together, int(client)), expected, rtol=1e-4, atol=1e-5)


def test_fine_tuning_carries_its_state_from_epoch_to_epoch() -> None:
    """Its candidates are what torch's optimizer has after each epoch; every learning rate begins anew."""
    made = FineTune(PLACE.task, lrs=(LR, LR), epochs=3, reshuffle=True, optimizer=ours("adamw", 0.1))
    batches, start = orders().sliced(6), PLACE.task.init(1)
    _, *found = made.personalize({"params": start}, {}, batches)
    assert len(found) == 6
    for epoch in range(3):
        expected = trained_by_torch("adamw", 0.1, start, batches.part(0, epoch + 1))
        for model in (found[epoch], found[3 + epoch]):
            torch.testing.assert_close(model, expected, rtol=1e-4, atol=1e-5)


def test_the_short_form_is_the_long_one() -> None:
    """FedAvg's own momentum and weight_decay are those of the optimizer `momentum`."""
    short = FedAvg(PLACE.task, momentum=0.7, weight_decay=0.1)
    long = FedAvg(PLACE.task, optimizer=ClientOptimizer("momentum", momentum=0.7, weight_decay=0.1))
    assert short.stepper == long.stepper
    assert not short.plain
    assert FedAvg(PLACE.task, weight_decay=0.1).plain  # compiled, as before
    assert FedAvg(PLACE.task, optimizer=ClientOptimizer("adamw"), weight_decay=0.1).stepper.weight_decay == 0.1


@pytest.mark.parametrize(
    ("method", "knobs", "said"),
    [
        ("scaffold", {"optimizer": "adam"}, "scaffold has steps of its own.*fedavg"),
        ("self-fl", {"optimizer": "adam"}, "self-fl has steps of its own"),
        ("mocha", {"optimizer": {"name": "momentum"}}, "mocha has steps of its own"),
        ("fedavg", {"optimizer": "adan"}, "unknown name 'adan'.*Did you mean 'adam'"),
        ("fedavg", {"optimizer": "adam", "momentum": 0.9}, "stage 0: momentum = 0.9 beside optimizer = 'adam'"),
        ("fedavg", {"optimizer": {"name": "sgd", "momentum": 0.9}}, "optimizer: momentum = 0.9 without its optimizer"),
        ("fedavg", {"optimizer": {"name": "momentum", "beta2": 0.9}}, "beta2 and eps are knobs of adam"),
        ("fedavg", {"optimizer": {"name": "adamw", "weight_decay": 0.1}, "weight_decay": 0.2}, "give one of them"),
        ("fedavg", {"optimizer": {"name": "adam", "beta2": 1.5}}, "beta2 = 1.5"),
        ("mr-mtl", {"optimizer": "adam", "solver": "exact"}, "optimizer = 'adam' beside solver = 'exact'"),
        ("pfedme", {"schedule": "cosine", "solver": "exact"}, "schedule = 'cosine' beside solver = 'exact'"),
        ("finetune", {"optimizer": "adam", "solver": "exact"}, "say solver = 'sgd'"),
    ],
)
def test_what_does_not_go_together_is_refused(method: str, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_stage({"method": method, **({"rounds": 3} if METHODS[method].trains else {}), **knobs}, "stage 0")


def test_what_goes_together_is_taken() -> None:
    stage = {"method": "ditto", "rounds": 3, "solver": "exact", "optimizer": {"name": "adamw", "weight_decay": 0.01}}
    assert check_stage(stage, "stage 0").knobs["optimizer"] == ClientOptimizer("adamw", weight_decay=0.01)
    for kind in (FedAvg, FineTune, Local, MRMTL, PFedMe):
        kind(PLACE.task, optimizer=ClientOptimizer("nesterov"))
