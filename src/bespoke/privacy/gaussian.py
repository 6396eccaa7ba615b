"""The Gaussian mechanism on messages: clips messages and adds noise to them, to their sum, or to both.

A client's hidden fields are scaled to a bounded norm: all of them together (flat), each leaf to C / sqrt(leaves) (by
layer), or each field to a bound of its own. Then a client moves the sum by at most C, and noise of deviation z C on
every entry has the noise multiplier z. With a bound b_f for each of F fields the noise of a field is z b_f sqrt(F): in
units of the noise a client moves the sum by at most 1/z again.

Adaptive clipping (Andrew et al., Differentially Private Learning with Adaptive Clipping, NeurIPS 2021): every client
also sends whether its norm was within the bound, b - 1/2, and the bound follows a quantile of the norms: C <- C
exp(-rate (b~ - quantile)), where b~ is the noisy mean of b. The sum of bits has noise of deviation s; so the noise
multiplier of the rest grows to (z^-2 - (2 s)^-2)^(-1/2), so that both together cost what z alone would.

The divisor must not reveal participants: a field that is the same for all clients (COUNT) is replaced by a public
number, the expected size of the cohort. A client whose message is not finite sends zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bespoke.messages.clip import clipped, norms
from bespoke.messages.transform import Outgoing, State, Transform
from bespoke.method import Cohort
from bespoke.privacy.noise import with_noise, with_noise_each
from bespoke.tensors import Tree, leaves, tree_map

BIT = "within bound"  # the field with the clipping bit


@dataclass(frozen=True)
class Adaptive:
    """How the clipping bound adapts to the clients' norms."""

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None  # deviation of the noise on the sum of bits; default: see `bit_noise`


def bit_noise(asked: float | None, multiplier: float, expected: float) -> float:
    """Deviation of the noise on the sum of bits: a twentieth of the cohort, as in the paper, but at least z."""
    return max(expected / 20, multiplier) if asked is None else asked


def value_multiplier(multiplier: float, bits: float) -> float:
    """The noise multiplier left for values if bits have this deviation: (z^-2 - (2 s)^-2)^(-1/2)."""
    found: float = (multiplier**-2 - (2 * bits) ** -2) ** -0.5
    return found


@dataclass(frozen=True)
class Gaussian(Transform):
    """Clips hidden fields and adds noise on the client (`local`) and the sum (`central`), as noise multipliers."""

    hidden: tuple[str, ...]
    bound: float | dict[str, float]
    central: float = 0.0
    local: float = 0.0
    by_layer: bool = False
    expected: float = 1.0  # clients in a cohort: a public number
    counts: tuple[str, ...] = ()  # fields that are one for all clients
    adaptive: Adaptive | None = None
    reproducible: bool = False
    groups: dict[int, float] = field(default_factory=dict)  # with groups: the expected clients of each

    hides = True

    @property
    def covers(self) -> bool:  # type: ignore[override]
        return self.central > 0

    def start(self) -> State:
        return {"bound": self.bound} if self.adaptive and isinstance(self.bound, float) else {}

    def limit(self, state: State) -> float:
        """The norm to which the hidden fields are clipped together in this round, if they share a bound."""
        return state.get("bound", self.bound if isinstance(self.bound, float) else math.nan)

    # -- what the noise is ---------------------------------------------------------------------------------------------
    def _bits(self, multiplier: float, where: str) -> float:
        assert self.adaptive is not None
        if where == "client":  # for a single bit, the same noise multiplier as the rest of the message
            return multiplier
        return bit_noise(self.adaptive.noise, multiplier, self.expected)

    def deviations(self, state: State, where: str) -> dict[str, float]:
        """Deviation of the noise on each field, on the client or on the sum; empty if there is none."""
        multiplier = self.local if where == "client" else self.central
        if not multiplier:
            return {}
        if isinstance(self.bound, dict):
            root = math.sqrt(len(self.hidden))
            return {name: multiplier * self.bound[name] * root for name in self.hidden}
        if self.adaptive is None:
            return dict.fromkeys(self.hidden, multiplier * self.limit(state))
        bits = self._bits(multiplier, where)
        rest = value_multiplier(multiplier, bits)
        return {**dict.fromkeys(self.hidden, rest * self.limit(state)), BIT: bits}

    def squared_mu(self, local: bool, central: bool) -> float:
        """1 / z^2 for the noise of the client's own message and of the sum together: variances add."""
        sides = [("client", self.local if local else 0.0), ("sum", self.central if central else 0.0)]
        sides = [(where, z) for where, z in sides if z]
        if not sides:
            return math.inf
        if self.adaptive is None:
            return 1 / sum(z * z for _, z in sides)
        bits = [self._bits(z, where) for where, z in sides]
        values = sum(value_multiplier(z, s) ** 2 for (_, z), s in zip(sides, bits))
        return 1 / values + 0.25 / sum(s * s for s in bits)

    # -- the client half -----------------------------------------------------------------------------------------------
    def client(self, sent: Outgoing) -> Outgoing:
        hidden, ones = self._finite({name: sent.up[name] for name in self.hidden}), {}
        bound = self.limit(sent.state)
        if self.adaptive is not None:
            within = norms(hidden) <= bound if leaves(hidden) else torch.ones(len(sent.clients))  # no field is shared
            ones[BIT] = within.float() - 0.5
        values = {**self._clipped(hidden, bound), **ones}
        for name, deviation in self.deviations(sent.state, "client").items():
            words = (sent.key, "client", name) if self.reproducible else None
            values[name] = with_noise_each(values[name], deviation, sent.clients, words)
        public = {name: tree_map(torch.ones_like, sent.up[name]) for name in self.counts}
        extra = sum(leaf.numel() * leaf.element_size() for leaf in ones.values())
        return replace(sent, up={**sent.up, **values, **public}, nbytes=sent.nbytes + extra)

    def _finite(self, hidden: Tree) -> Tree:
        """Replaces messages that are not finite by zeros, so that their clients stay hidden."""
        fine = norms(hidden).isfinite() if leaves(hidden) else torch.ones(())
        if bool(fine.all()):
            return hidden
        return tree_map(lambda leaf: torch.where(_along(fine, leaf), leaf, torch.zeros_like(leaf)), hidden)

    def _clipped(self, hidden: Tree, bound: float) -> Tree:
        if isinstance(self.bound, dict):
            return {name: clipped(value, self.bound[name]) for name, value in hidden.items()}
        if not self.by_layer or not leaves(hidden):
            return clipped(hidden, bound)
        part = bound / math.sqrt(len(leaves(hidden)))
        return tree_map(lambda leaf: clipped(leaf, part), hidden)

    # -- the server half -----------------------------------------------------------------------------------------------
    def server(self, cohort: Cohort, state: State, key: int) -> tuple[Cohort, State]:
        sums = dict(cohort.sums)
        if self.adaptive is not None:
            sums[BIT] = sums.get(BIT, torch.zeros(())).sum()  # zero if no client sent one; of all groups together
        for name, deviation in self.deviations(state, "sum").items():
            if name in sums:  # noise on a sum cannot hide what each client reveals by itself
                words = (key, "sum", name) if self.reproducible else None
                sums[name] = with_noise(sums[name], deviation, words)
        for name in [name for name in self.hidden if self.groups and name in sums]:
            # noise alone must not move a model without clients
            sums[name] = tree_map(lambda leaf: leaf * _along(self._rows(leaf) > 0, leaf), sums[name])
        for name in [name for name in self.counts if name in sums]:
            sums[name] = tree_map(self._expected, sums[name])
        if self.adaptive is not None:
            within = float(sums.pop(BIT)) / self.expected + 0.5
            step = self.adaptive.rate * (within - self.adaptive.quantile)
            state = {**state, "bound": self.limit(state) * math.exp(-step)}
        return replace(cohort, sums=sums), state

    def _expected(self, sums: Tensor) -> Tensor:
        """The public cohort size of each row, used instead of the true number."""
        if not self.groups:
            return torch.full_like(sums, self.expected)
        expected: Tensor = _along(self._rows(sums), sums).expand_as(sums).to(sums.dtype)
        return expected

    def _rows(self, sums: Tensor) -> Tensor:
        rows = torch.zeros(len(sums))
        rows[list(self.groups)] = torch.tensor(list(self.groups.values()))
        return rows


def _along(flags: Tensor, leaf: Tensor) -> Any:
    return flags.reshape(-1, *[1] * (leaf.dim() - 1))
