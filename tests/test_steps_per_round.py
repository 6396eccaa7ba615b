"""Rounds in steps instead of epochs, and one batch several times: by hand, and against epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.splits import everything
from bespoke.federation.batches import Orders, work_of
from bespoke.federation.engine import Choice, Engine
from bespoke.federation.work import ClientWork
from bespoke.method import Batching, Setting
from bespoke.methods import METHODS, FedAvg
from bespoke.tensors import flatten
from by_hand import TASK, batches_of, numbers, rounds
from small_worlds import BATCH, world

LOOP = Choice(False, 1, 0, 1, "autograd", "")


def test_steps_by_hand() -> None:
    """One row x = 1, y = 1: a step of lr 1/4 leads u to u - (2 u - 1) / 4: 1/4, 3/8, 7/16."""
    for steps, expected in ((1, 0.25), (2, 0.375), (3, 0.4375)):
        made = FedAvg(TASK, lr=0.25, steps_per_round=steps)
        server, _ = rounds(made, {0: batches_of([1.0], [1.0], made)}, 1)
        assert numbers(server["params"]) == pytest.approx((expected, expected))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "pfedme", "apfl", "scaffold"])
def test_as_many_steps_as_batches_are_an_epoch(method: str) -> None:
    """Batches that hold all rows: three steps are three epochs."""
    place = world("linear")
    results = []
    for knobs in ({"steps_per_round": 3}, {"epochs": 3, **({"private_epochs": 3} if method == "ditto" else {})}):
        made: Any = METHODS[method](place.task, batch_size=32, shuffle=False, **knobs)  # type: ignore[arg-type]
        with Engine(place.population, LOOP) as engine:
            engine.open(ClientWork(made, place.split.train), place.task.init(5))
            server = made.init_server(place.task.init(5), Setting(0, 7))
            for key in range(2):
                server = made.server_round(server, engine.round(server, np.arange(7), key).cohort)
        results.append(flatten(server))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-7)


def test_work_counts_all_descents() -> None:
    assert work_of(np.array([22, 2, 0]), Batching(BATCH, steps=9, uses=2)) == (2 * 18, 2 * (22 + 12 + 18))


@pytest.mark.parametrize("batching", [Batching(BATCH, 2), Batching(BATCH, steps=7), Batching(BATCH, 2, drop_last=True)])
def test_one_batch_again(batching: Batching) -> None:
    """`again` is that step's batch alone, so many times, in both forms; nothing for a step that only pads."""
    place = world("linear")
    clients = np.arange(7)
    orders = Orders.draw(everything(place.population), clients, batching, key=1)
    stacked = orders.stacked(clients)
    for c in range(7):
        sliced, mine = orders.sliced(c), stacked.of_client(tuple(part[c] for part in stacked.mapped()))
        many = sliced.steps  # of an epoch of this client; the stack pads each epoch to the longest
        for step in range(len(mine)):
            epoch, within = divmod(step, stacked.steps)
            own = step if batching.steps else epoch * many + within if within < many else None
            padded = mine.again(step, 3)
            assert len(padded) == 3
            live = [float(padded.live(s)) for s in range(3)]
            assert live == [0.0 if own is None else 1.0] * 3
            if own is None:
                continue
            once = sliced.again(own, 3)
            for repeat in range(3):
                batch = padded[repeat]
                assert torch.equal(batch["y"][batch["mask"] > 0], sliced[own]["y"])
                assert torch.equal(once[repeat]["y"], sliced[own]["y"])
