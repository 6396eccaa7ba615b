"""Methods on the two-level Gaussian model, all repeats and clients at once, in the update equations of the library.

Client m observes its parameter theta_m ~ N(theta_0, between) through N_m rows of variance `within`; only their mean z_m
matters. Its loss is quadratic with its minimum at z_m, so l steps of gradient descent have a closed form: theta -> z +
(1 - rate)^l (theta - z), rate = learning rate x curvature. Arrays are (repeats, clients), a global parameter is
(repeats, 1). A test compares every rule with the method of its name on one repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from bespoke.methods.self_fl import MOST, TINY, WHOLE

Floats = NDArray[np.float64]
Masks = NDArray[np.bool_]
State = dict[str, Any]


@dataclass(frozen=True)
class World:
    """Populations, one for each repeat, and how fast descent is on each client."""

    z: Floats
    rows: Floats
    rate: Floats  # learning rate x curvature of a client's loss
    lr: float  # the learning rate alone: pulls are not scaled by the curvature
    between: float
    within: float

    @property
    def variance(self) -> Floats:
        return self.within / self.rows


class Rule(Protocol):
    """A method: its state before the first round, a round of the active clients, and everyone's personal parameter."""

    def start(self, world: World) -> State: ...
    def round(self, world: World, state: State, active: Masks) -> State: ...
    def personal(self, world: World, state: State) -> Floats: ...


def descended(start: Floats, z: Floats, rate: Floats, steps: Floats | int) -> Floats:
    return z + (1 - rate) ** steps * (start - z)


def average(values: Floats, weights: Floats, active: Masks) -> Floats:
    """The mean over active clients, (repeats, 1)."""
    counted = np.where(active, weights, 0.0)
    return (counted * np.where(active, values, 0.0)).sum(1, keepdims=True) / counted.sum(1, keepdims=True)


@dataclass(frozen=True)
class FedAvg:
    steps: int = 50
    server_lr: float | None = 1.0  # None: the activity rate, which is Self-FL's smoothing

    def start(self, world: World) -> State:
        return {"w": np.zeros((len(world.z), 1))}

    def local(self, world: World, w: Floats) -> Floats:
        return descended(w, world.z, world.rate, self.steps)

    def round(self, world: World, state: State, active: Masks) -> State:
        mean = average(self.local(world, state["w"]), world.rows, active)
        return {**state, "w": self.served(state["w"], mean, active)}

    def served(self, w: Floats, mean: Floats, active: Masks) -> Floats:
        """The server's step from w towards the mean of the cohort."""
        return w + (self.server_lr or active.mean(1, keepdims=True)) * (mean - w)

    def personal(self, world: World, state: State) -> Floats:
        return np.broadcast_to(state["w"], world.z.shape)


@dataclass(frozen=True)
class Ditto(FedAvg):
    lam: float = 1.0

    def start(self, world: World) -> State:
        return {**super().start(world), "v": np.zeros_like(world.z)}

    def round(self, world: World, state: State, active: Masks) -> State:
        pull = world.lr * self.lam
        both = world.rate + pull
        goal = (world.rate * world.z + pull * state["w"]) / both  # where the sum of loss and pull is least
        v = descended(state["v"], goal, both, self.steps)
        return {**super().round(world, state, active), "v": np.where(active, v, state["v"])}

    def personal(self, world: World, state: State) -> Floats:
        return state["v"]


@dataclass(frozen=True)
class PFedMe(FedAvg):
    lam: float = 15.0
    inner: int = 5

    def both(self, world: World, w: Floats, z: Floats) -> tuple[Floats, Floats]:
        """(w_k, theta_k) after all batches of a round; each batch holds all rows."""
        pull = world.lr * self.lam
        mine = theta = np.broadcast_to(w, world.z.shape)
        for _ in range(self.steps):
            goal = (world.rate * z + pull * mine) / (world.rate + pull)
            theta = descended(theta, goal, world.rate + pull, self.inner)
            mine = mine - pull * (mine - theta)
        return mine, theta

    def start(self, world: World) -> State:
        # a round is linear in w and z: what it makes of (1, 0) and (0, 1) is all there is to know
        one, zero = np.ones_like(world.z), np.zeros_like(world.z)
        return {**super().start(world), "of w": self.both(world, one, zero), "of z": self.both(world, zero, one)}

    def round(self, world: World, state: State, active: Masks) -> State:
        moved = state["of w"][0] * state["w"] + state["of z"][0] * world.z
        return {**state, "w": self.served(state["w"], average(moved, world.rows, active), active)}

    def personal(self, world: World, state: State) -> Floats:
        return state["of w"][1] * state["w"] + state["of z"][1] * world.z


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    def local(self, world: World, w: Floats) -> Floats:
        # the gradient after a step is (1 - rate) times the gradient
        return descended(w, world.z, world.rate * (1 - world.rate), self.steps)

    def personal(self, world: World, state: State) -> Floats:
        return descended(state["w"], world.z, world.rate, 1)


@dataclass(frozen=True)
class SelfFL:
    """Algorithm 1; with variances that are known, or learned as for networks."""

    steps: int = 50  # while nobody knows anything
    most: int = 10_000
    known: bool = True
    activity: float | None = None
    others: Literal["active", "all"] = "active"

    def start(self, world: World) -> State:
        number = np.zeros((len(world.z), 1))
        none = np.zeros_like(world.z)
        between = number + (world.between if self.known else 0.0)
        private = dict.fromkeys(("model", "mean", "variance", "count", "weight", "steps"), none)
        return {"theta": number, "between": between, "total": number, "counted": number + 1.0, **private}

    def uncertainty(self, world: World, state: State) -> tuple[Floats, Masks]:
        if self.known:
            return world.variance, np.ones(world.z.shape, dtype=bool)
        return np.maximum(state["variance"], TINY), state["count"] > 1

    def begin(self, state: State, model: Floats) -> Floats:
        """Eq. 10."""
        theta, total = state["theta"], state["total"]
        share = np.minimum(state["weight"] / np.maximum(total, TINY), MOST) * (total > 0)
        own, counted = share / (1 - share), state["counted"]
        wanted = np.minimum(own / np.maximum(counted, TINY), own + 1) if self.known else own
        factor = wanted * (counted > 0)
        return theta + factor * (theta - model)

    def pace(self, world: World, state: State) -> Floats:
        """Eq. 8: how many steps."""
        variance, known = self.uncertainty(world, state)
        others = np.maximum(state["counted"] * (state["total"] - state["weight"]), TINY)
        left = np.where(state["counted"] > 0, np.log1p(state["between"] / (variance * others)), np.inf)
        wanted = np.ceil(left / -np.log1p(-np.minimum(world.rate, 0.999)) - WHOLE)
        return np.where(known & (state["total"] > 0), wanted, self.steps).clip(1, self.most)

    def round(self, world: World, state: State, active: Masks) -> State:
        variance, known = self.uncertainty(world, state)
        between = state["between"]
        own = np.where(known & (between > 0), between / (between + variance), 0.5)
        steps = self.pace(world, state)
        model = descended(self.begin(state, state["model"]), world.z, world.rate, steps)
        count = state["count"] + 1
        gap = model - state["mean"]
        new = {
            "model": model, "weight": own, "steps": steps, "count": count, "mean": state["mean"] + gap / count,
            "variance": (count - 1) / count * (state["variance"] + gap**2 / count),
        }  # fmt: skip
        kept = {name: np.where(active, value, state[name]) for name, value in new.items()}
        return {**kept, **self.server(state, model, own, active)}

    def server(self, state: State, model: Floats, own: Floats, active: Masks) -> State:
        """Eq. 11 with the activity rate, and Eq. 14."""
        rate = self.activity or active.mean(1, keepdims=True)
        delta = model - state["theta"]
        mean = average(delta, own, active)
        between = state["between"]
        if not self.known:
            between = np.maximum(average(delta**2, own, active) - mean**2, TINY)
        total = np.where(active, own, 0.0).sum(1, keepdims=True) / rate
        return {
            "theta": state["theta"] + rate * mean, "between": between, "total": total,
            "counted": self.counted(active.sum(1, keepdims=True), rate),
        }  # fmt: skip

    def counted(self, many: Floats, rate: float | Floats) -> Floats:
        """The fraction of the other clients that Eq. 8 and 10 sum over; none in a cohort of one."""
        if self.others == "all":
            return np.ones(many.shape)
        return np.where(many > 1, rate * (many - 1) / np.maximum(many - rate, TINY), 0.0)

    def personal(self, world: World, state: State) -> Floats:
        return state["model"]


@dataclass(frozen=True)
class AugmentedSelfFL(SelfFL):
    """Algorithm 2 with known variances: models after local convergence, here exactly z, go into the global one."""

    def begin(self, state: State, model: Floats) -> Floats:
        return super().begin(state, state["local"])

    def round(self, world: World, state: State, active: Masks) -> State:
        new = super().round(world, {**state, "local": state.get("local", np.zeros_like(world.z))}, active)
        new |= self.server(state, world.z, np.where(active, new["weight"], 0.0), active)
        return {**new, "local": np.where(active, world.z, state.get("local", np.zeros_like(world.z)))}


def play(rule: Rule, world: World, cohorts: Sequence[Masks]) -> tuple[Floats, Floats]:
    """(global, personal) parameters after these rounds, a mask of active clients each."""
    state = rule.start(world)
    for active in cohorts:
        state = rule.round(world, state, active)
    shared = state["theta"] if "theta" in state else state["w"]
    return shared, rule.personal(world, state)
