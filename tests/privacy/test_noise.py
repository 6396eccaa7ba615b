"""Noise: its distribution and scale, independent across entries, clients and rounds, and not to be told from a seed."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from bespoke.messages.transform import Outgoing
from bespoke.method import Cohort
from bespoke.privacy.gaussian import Gaussian
from bespoke.privacy.noise import keyed_normal, secret_normal, with_noise

MANY = 40_000
RARE = 1e-7  # a test of true randomness fails by chance this often


def gaussian(**knobs: object) -> Gaussian:
    return Gaussian(**{"hidden": ("delta",), "bound": 2.0, "central": 0.0, "local": 0.0, **knobs})  # type: ignore[arg-type]


def sent(clients: int = 3, width: int = MANY, key: int = 5) -> Outgoing:
    up = {"delta": {"w": torch.zeros(clients, width)}}
    return Outgoing(up, 4 * clients * width, np.arange(clients, dtype=np.uint64), key)


@pytest.mark.parametrize("draw", [secret_normal, lambda shape: keyed_normal(shape, 7, "sum")], ids=["secret", "keyed"])
def test_noise_is_standard_normal(draw: Any) -> None:
    drawn = draw((MANY,))
    assert stats.kstest(drawn, "norm").pvalue > RARE
    assert abs(drawn.mean()) < 5.5 / MANY**0.5
    assert abs(drawn.std() - 1) < 5.5 / (2 * MANY) ** 0.5
    assert draw((3,)).shape == (3,)  # an odd number, of pairs
    assert draw((2, 0)).size == 0


def test_scale_on_the_sum_and_on_the_client() -> None:
    """Deviation: multiplier x bound, once on the sum, and on each client's message."""
    quiet = Cohort({"delta": {"w": torch.zeros(MANY)}}, {}, (0, 1, 2))
    summed = gaussian(central=1.5).server(quiet, {}, key=1)[0].sums["delta"]["w"]
    assert float(summed.std()) == pytest.approx(3.0, rel=0.03)
    assert summed.dtype == torch.float32
    local = gaussian(local=0.7).client(sent()).up["delta"]["w"]
    for row in local:
        assert float(row.std()) == pytest.approx(1.4, rel=0.03)
        assert stats.kstest(row.numpy() / 1.4, "norm").pvalue > RARE


@pytest.mark.parametrize("reproducible", [False, True])
def test_clients_rounds_and_fields_draw_independently(reproducible: bool) -> None:
    made = Gaussian(("delta", "control"), 2.0, 1.0, 1.0, reproducible=reproducible)
    both = {name: {"w": torch.zeros(2, MANY)} for name in ("delta", "control")}
    keys = np.array([11, 12], dtype=np.uint64)
    rows = [
        row.numpy()
        for key in (1, 2)
        for field in made.client(Outgoing(both, 0, keys, key)).up.values()
        for row in field["w"]
    ]
    cohort = Cohort({name: {"w": torch.zeros(MANY)} for name in both}, {}, (0, 1))
    rows += [leaf["w"].numpy() for key in (1, 2) for leaf in made.server(cohort, {}, key)[0].sums.values()]
    correlations = np.corrcoef(np.stack(rows))[np.triu_indices(len(rows), 1)]
    assert len(rows) == 12
    assert np.abs(correlations).max() < 6 / MANY**0.5


def test_secret_noise_cannot_be_told_from_the_seed() -> None:
    """The same run twice draws other noise, whatever the state of every seedable generator."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        drawn.append(gaussian(local=1.0).client(sent(1, 100)).up["delta"]["w"])
        drawn.append(gaussian(central=1.0).server(Cohort({"delta": {"w": torch.zeros(1, 100)}}, {}, ()), {}, 5)[0])
    # one of a hundred may come near another by chance; noise that follows from a seed is the same in all
    assert torch.isclose(drawn[0], drawn[2], atol=1e-3).sum() < 10
    assert torch.isclose(drawn[1].sums["delta"]["w"], drawn[3].sums["delta"]["w"], atol=1e-3).sum() < 10


def test_secret_noise_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: with a known os.urandom in its place it is known, so it has no other source."""
    monkeypatch.setattr(os, "urandom", lambda count: np.arange(count, dtype=np.uint8).tobytes())
    first = secret_normal((10,))
    np.testing.assert_array_equal(first, secret_normal((10,)))


def test_reproducible_noise_does_not_depend_on_who_is_stacked_together() -> None:
    made = gaussian(local=1.0, reproducible=True)
    together = made.client(sent(3, 50)).up["delta"]["w"]
    for client in range(3):
        alone = Outgoing({"delta": {"w": torch.zeros(1, 50)}}, 0, np.array([client], dtype=np.uint64), 5)
        assert torch.equal(made.client(alone).up["delta"]["w"][0], together[client])


def test_noise_is_added_in_double_precision() -> None:
    """Rounded once, at the end: not noise rounded to float32 and then added."""
    tree = {"w": torch.full((1000,), 3.0)}
    found = with_noise(tree, 1e-3, (1, 2))["w"]
    exact = 3.0 + 1e-3 * keyed_normal((1000,), 1, 2, "w")
    np.testing.assert_array_equal(found.numpy(), exact.astype(np.float32))
