"""Clipping under privacy: no client moves the sum by more than its bound, however it is shaped; bounds that follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bespoke.messages.transform import Outgoing
from bespoke.method import Cohort
from bespoke.privacy.gaussian import BIT, Adaptive, Gaussian, bit_noise, value_multiplier
from bespoke.tensors import flatten

KEYS = np.arange(4, dtype=np.uint64)
SHAPES: dict[str, Any] = {
    "flat": {"bound": 0.7},
    "layer": {"bound": 0.7, "by_layer": True},
    "fields": {"bound": {"delta": 0.7, "control": 3.0}},
    "adaptive": {"bound": 0.7, "adaptive": Adaptive()},
}


def messages(scale: float, seed: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "delta": {
            "w": scale * torch.randn(4, 3, 2, generator=random),
            "b": scale * torch.randn(4, 2, generator=random),
        },
        "control": {"w": 10 * scale * torch.randn(4, 3, 2, generator=random)},
        "weight": torch.full((4,), 17.0),
    }


def made(shape: str, **more: Any) -> Gaussian:
    return Gaussian(hidden=("delta", "control"), counts=("weight",), **{**SHAPES[shape], **more})


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.floats(1e-3, 1e3), st.integers(0, 99), st.floats(0.3, 20))
def test_a_client_moves_the_sum_by_at_most_one_in_units_of_the_noise(
    shape: str, scale: float, seed: int, multiplier: float
) -> None:
    """sum over entries of (entry / deviation of its noise)^2 <= 1 / z^2: what makes z the noise multiplier."""
    ours = made(shape, central=multiplier, expected=4)
    state = ours.start()
    up = ours.client(Outgoing(messages(scale, seed), 0, KEYS, 1, state)).up
    total = torch.zeros(4, dtype=torch.float64)
    for name, deviation in ours.deviations(state, "sum").items():
        for leaf in flatten(up[name]).values():
            total += (leaf.double().reshape(4, -1) / deviation).square().sum(1)
    assert float(total.max()) <= multiplier**-2 * (1 + 1e-5)


def test_flat_clipping_by_hand() -> None:
    """(3, 4) has norm 5: to a bound of 1 it becomes (0.6, 0.8), a short one stays."""
    ours = Gaussian(("delta",), 1.0)
    up = {"delta": {"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}}
    found = ours.client(Outgoing(up, 16, KEYS[:2], 0)).up["delta"]["w"]
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_bounds_by_field_and_by_layer() -> None:
    up = {
        "delta": {"w": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[2.0]])},
        "control": {"w": torch.tensor([[9.0]])},
    }
    by_field = Gaussian(("delta", "control"), {"delta": 1.0, "control": 3.0}).client(Outgoing(up, 0, KEYS[:1], 0)).up
    assert float(by_field["control"]["w"]) == pytest.approx(3.0)
    assert math.hypot(*by_field["delta"]["w"][0].tolist(), float(by_field["delta"]["b"])) == pytest.approx(1.0)
    layers = Gaussian(("delta", "control"), 3.0, by_layer=True).client(Outgoing(up, 0, KEYS[:1], 0)).up
    part = 3 / math.sqrt(3)
    assert math.hypot(*layers["delta"]["w"][0].tolist()) == pytest.approx(part)
    assert float(layers["control"]["w"]) == pytest.approx(part)


def test_what_is_not_finite_is_sent_as_zeros_and_counts_are_public() -> None:
    """Nobody is told who was left out, nor how many came."""
    up = messages(1.0, 0)
    up["delta"]["w"][2, 0, 0] = math.nan
    ours = made("flat", expected=6.5)
    found = ours.client(Outgoing(up, 0, KEYS, 1)).up
    assert all(not leaf[2].any() for leaf in flatten({n: found[n] for n in ours.hidden}).values())
    assert found["delta"]["w"][[0, 1, 3]].abs().sum() > 0
    assert found["weight"].tolist() == [1.0] * 4  # and not 17, which a method might have sent
    cohort = Cohort({"delta": {}, "control": {}, "weight": found["weight"].sum(0)}, {}, (0, 1, 2, 3))
    assert float(ours.server(cohort, {}, 1)[0].sums["weight"]) == 6.5


def test_sums_of_groups_by_hand() -> None:
    """Every group's row is noised, whoever came; in place of counts stand public ones; nobody's rows stay still."""
    ours = Gaussian(("delta",), 0.5, central=4.0, counts=("weight",), expected=5.0, groups={1: 2.0, 3: 3.0},
                    adaptive=Adaptive(noise=100.0))  # fmt: skip
    sums = {"delta": {"w": torch.zeros(4, 50_000)}, "weight": torch.tensor([0.0, 1.0, 0.0, 0.0]), BIT: torch.zeros(4)}
    seen, state = ours.server(Cohort(sums, {}, (), ()), {"bound": 0.5}, 0)
    assert seen.sums["weight"].tolist() == [0.0, 2.0, 0.0, 3.0]
    moved = seen.sums["delta"]["w"]
    assert not moved[[0, 2]].any()
    np.testing.assert_allclose(moved[[1, 3]].std(1), 0.5 * value_multiplier(4.0, 100.0), rtol=0.03)
    assert set(seen.sums) == {"delta", "weight"}
    assert state["bound"] != 0.5  # the bits of all groups together move it, and they are noise


def test_noise_of_both_kinds_adds_up() -> None:
    assert made("flat", central=3.0, local=4.0).squared_mu(local=True, central=True) == pytest.approx(1 / 25)
    assert made("flat", central=3.0, local=4.0).squared_mu(local=True, central=False) == pytest.approx(1 / 16)
    assert made("flat").squared_mu(local=True, central=True) == math.inf
    # adaptive: bits and values together cost what was asked for
    for ours in (made("adaptive", central=3.0), made("adaptive", local=3.0)):
        assert ours.squared_mu(local=True, central=True) == pytest.approx(1 / 9)


def test_adaptive_by_hand() -> None:
    """Andrew et al., Algorithm 1: z_delta = (z^-2 - (2 s)^-2)^(-1/2), C <- C exp(-rate (b - quantile))."""
    assert value_multiplier(1.0, 1.0) == pytest.approx((1 - 0.25) ** -0.5)
    assert bit_noise(None, 1.0, 100.0) == 5.0
    assert bit_noise(None, 1.0, 10.0) == 1.0  # in a small cohort a twentieth would leave nothing
    ours = Gaussian(("delta",), 1.0, expected=4, adaptive=Adaptive(quantile=0.5, rate=0.2))
    up = {"delta": {"w": torch.tensor([[0.5], [0.9], [1.0], [7.0]])}}  # three of four within 1
    seen = ours.client(Outgoing(up, 16, KEYS, 0, ours.start()))
    assert seen.up[BIT].tolist() == [0.5, 0.5, 0.5, -0.5]
    assert seen.nbytes == 16 + 16
    cohort = Cohort({"delta": {}, BIT: seen.up[BIT].sum()}, {}, (0, 1, 2, 3))
    found, state = ours.server(cohort, ours.start(), 0)
    assert BIT not in found.sums
    assert state["bound"] == pytest.approx(math.exp(-0.2 * 0.25))


@pytest.mark.parametrize("quantile", [0.3, 0.8])
def test_an_adaptive_bound_finds_the_quantile(quantile: float) -> None:
    """Norms 0.01 to 1; from 30 the bound comes down to the quantile, noise and all."""
    norms = torch.arange(1, 101) / 100
    keys = np.arange(100, dtype=np.uint64)
    ours = Gaussian(("delta",), 30.0, 1.0, expected=100, adaptive=Adaptive(quantile, 0.2), reproducible=True)
    state, bounds = ours.start(), []
    for round in range(150):
        up = ours.client(Outgoing({"delta": {"w": norms[:, None]}}, 0, keys, round, state)).up
        cohort = Cohort({"delta": {"w": up["delta"]["w"].sum(0)}, BIT: up[BIT].sum()}, {}, tuple(range(100)))
        _, state = ours.server(cohort, state, round)
        bounds.append(state["bound"])
    assert np.mean(bounds[-50:]) == pytest.approx(quantile, abs=0.06)
