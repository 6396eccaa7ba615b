"""Zeroing and adaptive clipping before the mean, as in TensorFlow Federated's `robust_aggregator` (Motley's FedAvg).

A client's change x is w_k - w, without its weight. Two bounds follow quantiles of the clients' norms by the geometric
update of Andrew et al. (Differentially Private Learning with Adaptive Clipping, NeurIPS 2021), here without noise:
C <- C exp(-rate (b - q)), where b is the part of the cohort whose norm is at most C, and q is the quantile aimed at.

    zeroing   max |x_i|      C starts at 10, q = 0.98, rate = ln 10; x is replaced by zeros if its norm exceeds 2 C + 1
    clipping  |x| (L2 norm)  C starts at 1, q = 0.8, rate = 0.2; x is scaled to the norm C if its norm exceeds C

Zeroing comes before clipping, so the norm of a zeroed change is 0. A round uses the bounds after the round before. A
zeroed change keeps its weight, so it moves the mean towards no change.

The clients do this themselves. Each adds up to three bits to its message: whether its largest entry is above C of
zeroing, whether it zeroed its change, whether it clipped it. The server sees their sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bespoke.declarations import Reveal, changes
from bespoke.errors import UserError
from bespoke.messages.robust.message import along
from bespoke.messages.transform import Outgoing, State, Transform
from bespoke.method import Cohort, Method, knob
from bespoke.tensors import Tree, leaves, tree_map

NAME = "tff-robust"
ABOVE, ZEROED, CLIPPED = "above quantile", "zeroed", "clipped"  # the fields that are added to a message


@dataclass(frozen=True)
class Quantile:
    """An estimate of a quantile that follows the clients' norms from round to round."""

    name: str  # in the server's state
    start: float
    target: float
    rate: float

    def now(self, state: State) -> float:
        return state.get(self.name, self.start)

    def after(self, state: State, below: float) -> float:
        """The next estimate; `part`: the fraction of the cohort with norms of at most the present one."""
        return self.now(state) * math.exp(-self.rate * (below - self.target))


# the values of tff.learning.robust_aggregator
LARGEST = Quantile("zeroing", start=10.0, target=0.98, rate=math.log(10.0))
LENGTH = Quantile("clipping", start=1.0, target=0.8, rate=0.2)
MULTIPLIER, INCREMENT = 2.0, 1.0  # zeroing begins at MULTIPLIER times the estimate plus INCREMENT


@dataclass(frozen=True)
class Aggregator:
    """The key `aggregator` of a stage: how the mean of clients' changes is computed."""

    name: Literal["mean", "tff-robust"] = knob("mean", "mean; tff-robust: zeroing and adaptive clipping, then the mean")
    zeroing: bool = knob(True, "tff-robust: changes with an entry that is far too large are replaced by zeros")
    clipping: bool = knob(True, "tff-robust: changes are scaled to a norm that follows their 0.8 quantile")

    def transform(self, method: Method) -> ZeroAndClip | None:
        """The transform for messages of this method; None for the plain mean."""
        return ZeroAndClip(changes(method.uplink), self.zeroing, self.clipping) if self.name == NAME else None


@dataclass(frozen=True)
class ZeroAndClip(Transform):
    """Zeroing, then clipping, of all fields of `changes` taken together."""

    changes: dict[str, str] = field(default_factory=lambda: {"delta": "weight"})  # see declarations.changes
    zeroing: bool = True
    clipping: bool = True

    title = f"aggregator = {NAME!r}"

    @property
    def reveals(self) -> dict[str, Reveal]:  # type: ignore[override]
        fields = (*((ABOVE, ZEROED) if self.zeroing else ()), *((CLIPPED,) if self.clipping else ()))
        return dict.fromkeys(fields, Reveal.SUM)

    def check(self, method: Method) -> None:
        if not changes(method.uplink):
            raise UserError(
                f"{self.title} bounds each client's change of a shared model, and {method.card.name} sends "
                f"{', '.join(method.uplink) or 'nothing'}: no such change; leave aggregator out of this stage"
            )

    def start(self) -> State:
        used = ((LARGEST, self.zeroing), (LENGTH, self.clipping))
        return {quantile.name: quantile.start for quantile, there in used if there}

    def threshold(self, state: State) -> float:
        """The largest entry above which a change is replaced by zeros."""
        return MULTIPLIER * LARGEST.now(state) + INCREMENT

    def client(self, sent: Outgoing) -> Outgoing:
        factors = torch.ones(len(sent.clients), dtype=torch.float64)
        flags: dict[str, Tensor] = {}
        if self.zeroing:
            largest = self._norms(sent, math.inf)
            # a change that is not finite is not touched: hosts exclude such clients
            zeroed = (largest > self.threshold(sent.state)) & largest.isfinite()
            flags |= {ABOVE: largest > LARGEST.now(sent.state), ZEROED: zeroed}
            factors = torch.where(zeroed, 0.0, factors)
        if self.clipping:
            bound = LENGTH.now(sent.state)
            length = self._norms(sent, 2.0) * factors
            flags[CLIPPED] = length > bound
            factors = torch.where(flags[CLIPPED], bound / length, factors)
        bits = {name: flag.float() for name, flag in flags.items()}
        changed = {name: _scaled(sent.up[name], factors) for name in self.changes} if bool((factors != 1).any()) else {}
        extra = sum(leaf.numel() * leaf.element_size() for leaf in bits.values())
        return replace(sent, up={**sent.up, **changed, **bits}, nbytes=sent.nbytes + extra)

    def _norms(self, sent: Outgoing, order: float) -> Tensor:
        """The norm of each client's change, divided by its weight."""
        parts = [torch.zeros(len(sent.clients), dtype=torch.float64)]
        for name, by in self.changes.items():
            weight = sent.up[by].double() if by else torch.ones_like(parts[0])
            weight = weight.flatten(1).sum(1) if weight.dim() > 1 else weight  # of the client's cluster
            weight = torch.where(weight > 0, weight, torch.ones_like(weight))  # a weight of zero comes with no change
            for leaf in leaves(sent.up[name]):
                flat = leaf.reshape(len(leaf), -1)
                if flat.shape[1]:
                    parts.append(torch.linalg.vector_norm(flat, order, dim=1, dtype=torch.float64) / weight)
        norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), order, dim=0)
        return norms

    def observe(self, cohort: Cohort, state: State) -> dict[str, float]:
        found: dict[str, float] = {}
        if self.zeroing and ZEROED in cohort.sums:
            found |= {"zeroing": self.threshold(state), ZEROED: float(cohort.sums[ZEROED].sum())}
        if self.clipping and CLIPPED in cohort.sums:
            found |= {"clipping": LENGTH.now(state), CLIPPED: float(cohort.sums[CLIPPED].sum())}
        return found

    def server(self, cohort: Cohort, state: State, key: int) -> tuple[Cohort, State]:
        sums, many = dict(cohort.sums), len(cohort.clients)
        counts = {name: float(sums.pop(name).sum()) for name in self.reveals if name in sums}  # of all groups together
        followed = [(LARGEST, ABOVE), (LENGTH, CLIPPED)] if many else []
        state = {**state, **{q.name: q.after(state, 1 - counts[name] / many) for q, name in followed if name in counts}}
        return replace(cohort, sums=sums), state


def _scaled(tree: Tree, factors: Tensor) -> Any:
    return tree_map(lambda leaf: leaf * along(factors, leaf).to(leaf.dtype), tree)
