"""Self-FL: Chen et al., Self-Aware Personalized Federated Learning, NeurIPS 2022 (arXiv 2204.08069).

A client's parameters are taken for a draw around common ones, theta_m ~ N(theta_0, sigma_0^2), and what its rows alone
say of them for a noisy look, z_m ~ N(theta_m, sigma_m^2). How far a client should go from the others' models to its own
minimum follows: benchmarks/self_fl/bayes.py has it in closed form. With w_m = 1 / (sigma_0^2 + sigma_m^2), a round of
Algorithm 1 is

    client m:  starts at  theta - w_m / sum_{k != m} w_k (theta_m - theta),  the mean of the others' models        (10)
               takes l steps: (1 - lr h)^l = sum_{k != m} w_k / (sigma_m^-2 + sum_{k != m} w_k),  to theta_m     (8, 16)
    server:    theta <- theta + C sum_m w_m (theta_m - theta) / sum_m w_m,  C the activity rate                     (11)

sigma_m^2 is how theta_m varied over the client's own rounds (13), learned online in the memory of one model (19);
sigma_0^2 is how the models of a cohort vary (14); of vectors it is the sum of the entries' variances, either of which
may be read as a mean of squares (Eq. 18) or as their sum (Section 3.2): `variances`. h is the loss's curvature,
1 / (N_m sigma_m^2) for the mean log-likelihood of N_m rows.

Sums suffice. A client weighs itself by u_m = sigma_0^2 w_m in (0, 1], by the sigma_0^2 it was sent, and sends u_m d_m
(d_m = theta_m - theta), u_m and u_m |d_m|^2. Their sums give (11), and (14) in the weights u_m:
sigma_0^2 = sum u |d|^2 / sum u - |sum u d / sum u|^2. So the server needs to see no client's model, nor its sigma_m^2.

Which others? If only some clients are active in a round, the paper does not say over whom k != m runs in (8) and (10).
The knob `others` decides. `total` is the sum over all M clients, extrapolated from the n clients of the last round:
their sum of weights divided by C. "all" takes total - u_m. A client then gives all M - 1 others a say and takes few
steps, and the global model moves by C times those few steps. "active" follows Eq. 23, whose sums run over the active
clients: it is the sum over the other clients of a cohort. The server does not know it before the round, and client m
need not have been in the last cohort. So the expected sum is used: given that m is active, each other client is active
with probability p = (n - 1) / (M - 1), which gives p (total - u_m). If everyone is active, p = 1 and both readings are
the same. If all clients weigh the same, it is the last cohort's sum without one client.

With "active", Eq. 10 takes more of theta_m out of theta than theta contains, because smoothing puts only the fraction C
of a cohort's mean into theta. The factor a = u_m / (total - u_m) removes what the client put in; Eq. 10 asks for a / p.
The excess returns with the opposite sign in the client's next round. It could grow from round to round if the factor
were above a + 1, so a + 1 is the most that is used. A learned sigma_m^2 is how theta_m varies over the client's rounds,
and the excess makes it vary more. The client would take its own swings for uncertainty, and take too few steps. So with
learned variances the factor is a: a client takes out only what it put in. A cohort of one has no others: (10) is not
defined, and the client starts from theta; (8) leaves nothing of the distance to z_m, and the client takes l_max steps.

In the code: sigma_0^2 is `between`, sigma_m^2 `variance`, sigma_0^2 sum_k w_k `total`, p `counted` (1 with "all"), u_m
`weight`, l_max `max_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs, Observed, Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Method, Setting, knob
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.descend import descend
from bespoke.methods.parts.schedule import SCHEDULE, Schedule
from bespoke.tensors import Params, Tree, add_scaled, scale, squared_norm, subtract, zeros_like

TINY = 1e-12  # the least variance
MOST = 0.9  # the largest share of the global model that Eq. 10 removes; a larger one would amplify the rest
WHOLE = 1e-3  # a fraction of a step below this is rounding


@dataclass(frozen=True)
class SelfFL(Method):
    """Each client goes from the others' models towards its own as far as the uncertainty of both says."""

    lr: float = knob(0.1, "client learning rate", gt=0)
    steps: int = knob(20, "local steps while uncertainties are not known yet, or if steps are not adapted", ge=1)
    max_steps: int = knob(40, "most local steps", ge=1)
    batch_size: int = knob(32, "client batch size", ge=1)
    weight_decay: float = knob(0.0, "client weight decay", ge=0)
    drop_last: bool = knob(False, "leave out the last, partial batch")
    shuffle: bool = knob(True, "draw new batches in every round; off: rows in their stored order")
    adjust_start: bool = knob(True, "start from the others' models (Eq. 10); off: from the global one")
    adapt_steps: bool = knob(True, "as many steps as the uncertainties say (Eq. 8, 16); off: always `steps`")
    weighting: Literal["precision", "examples"] = knob(
        "precision", "weight of a client in the mean: by its precision (Eq. 11), or examples as in FedAvg"
    )
    others: Literal["active", "all"] = knob(
        "active", "other clients that Eq. 8 and 10 sum over: those of a cohort, or all, extrapolated from a cohort"
    )
    between: float | None = knob(None, "variance between clients, if known; else it is learned (Eq. 14)", gt=0)
    within: float | None = knob(
        None, "variance of what one row says, if known: a client's is this by its examples; else learned (Eq. 13)", gt=0
    )
    curvature: float | None = knob(
        None, "curvature of the loss, if known; else 1 / (examples x the client's variance) (Eq. 16)", gt=0
    )
    exact_steps: bool = knob(
        False, "shorten steps so that together they are as many as Eq. 8 says, a fraction included"
    )
    variances: Literal["sample", "scatter"] = knob(
        "sample", "learned variances: the mean square from the mean (Eq. 18), or the sum that Section 3.2 prints"
    )
    activity: float | None = knob(
        None, "weight of a round's mean in the global model (the activity rate); else the cohort's part of all clients",
        gt=0, le=1,
    )  # fmt: skip
    schedule: Schedule = field(default_factory=Schedule, metadata={"doc": SCHEDULE})

    card = Card(
        "self-fl",
        "Chen et al., NeurIPS 2022",
        "Self-FL",
        personal="a model of its own, trained from the others' models as far as its uncertainty says",
        unseen="a client that never trained does what others do in their first round: some steps from the global model",
        tunes={"lr": (0.01, 0.03, 0.1, 0.3), "variances": ("sample", "scatter")},
    )
    downlink = {
        "params": "the global model",
        "between": "the variance between clients",
        "total": "the sum of all clients' precisions, in units of 1 / between",
        "counted": "the fraction of the other clients that Eq. 8 and 10 sum over",
    }
    private = {
        "model": "the client's own model",
        "mean": "the mean of its models over its rounds",
        "variance": "their variance: the client's own uncertainty",
        "count": "rounds it took part in",
        "weight": "what it weighed in the last of them",
        "steps": "how many steps it took in it",
    }
    choosing = Choosing(keep_shared=False)

    @property
    def needs(self) -> Needs:
        return Needs(still=True)

    @property
    def uplink(self) -> dict[str, Sent]:
        summed = Sent(Reveal.SUM)
        examples = {"examples": summed} if self.weighting == "examples" else {}
        delta = Sent(Reveal.SUM, change=self._part)
        return {"delta": delta, "weight": summed, "spread": summed, **examples, "count": Sent(Reveal.COUNT)}

    def __post_init__(self) -> None:
        if not self.schedule.steady:
            raise ValueError(
                "schedule: by_step = true: how many steps a client takes (Eq. 8) goes by one rate for all of a round; "
                "leave it out"
            )

    # -- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        number = next(iter(params.values())).new_tensor
        return {
            "params": params, "between": number(self.between or 0.0), "total": number(0.0), "counted": number(1.0),
            "clients": number(float(setting.training or setting.clients)),  # those that may take part
        }  # fmt: skip

    def broadcast(self, server: Tree) -> Tree:
        return {name: server[name] for name in ("params", "between", "total", "counted")}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        sums, here = cohort.sums, float(cohort.sums["count"])
        rate = self.activity or min(here / max(float(server["clients"]), 1.0), 1.0)
        mean = scale(sums["delta"], 1 / sums[self._part])
        between = server["between"]
        if not self.between:
            between = (self.spread(sums, mean, here) * self.times(here)).clamp(min=TINY)
        params = add_scaled(server["params"], mean, rate)
        # clients that were not active are assumed to weigh as much as those that were
        total, counted = sums["weight"] / rate, torch.full_like(server["counted"], self.counted(here, rate))
        return {**server, "params": params, "between": between, "total": total, "counted": counted}

    def counted(self, active: float, rate: float) -> float:
        """Probability that another client is active beside an active one: (n - 1) / (M - 1), with M = n / rate."""
        if self.others == "all":
            return 1.0
        return rate * (active - 1) / (active - rate) if active > 1 else 0.0

    def spread(self, sums: Tree, mean: Params, clients: float) -> Tensor:
        """Eq. 14, in the weights of the mean."""
        spread: Tensor = sums["spread"] / sums[self._part] - squared_norm(mean)
        return spread

    def times(self, models: float | Tensor) -> float | Tensor:
        """The factor of a sample variance of so many models."""
        return models if self.variances == "scatter" else 1.0

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        return {name: float(server[name]) for name in ("between", "total", "counted")}

    # -- the client ----------------------------------------------------------------------------------------------------
    @property
    def _part(self) -> str:
        return "weight" if self.weighting == "precision" else "examples"

    def batching(self) -> Batching:
        return Batching(self.batch_size, drop_last=self.drop_last, shuffle=self.shuffle, steps=self.max_steps)

    def init_private(self, params: Params) -> Tree:
        nothing = next(iter(params.values())).new_zeros(())
        numbers = dict.fromkeys(("variance", "count", "weight", "steps"), nothing)
        return {"model": params, "mean": zeros_like(params), **numbers}

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        variance, known = self.uncertainty(private, batches)
        # a client that does not know its uncertainty yet assumes that of the differences between clients
        own = torch.where(known & (down["between"] > 0), down["between"] / (down["between"] + variance), 0.5)
        steps, lr = self.pace(down, private, batches)
        model = descend(
            self.task, self.start(down, private), batches.first(steps, self.max_steps), lr=lr,
            optimizer=ClientOptimizer(weight_decay=self.weight_decay),
        )  # fmt: skip
        new = {**self.remember(private, model), "model": model, "weight": own, "steps": steps}
        return new, self.message(subtract(model, down["params"]), own, batches)

    def uncertainty(self, private: Tree, batches: Batches) -> tuple[Tensor, Tensor]:
        """sigma_m^2 of the client's rounds so far, and whether it is known: two rounds are the least."""
        if self.within:
            return self.within / batches.examples, torch.ones_like(private["count"], dtype=torch.bool)
        variance = private["variance"] * self.times(private["count"])
        return variance.clamp(min=TINY), private["count"] > 1

    def start(self, down: Tree, private: Tree) -> Params:
        """Eq. 10, with the weight that went into theta; with a learned variance it takes out only what was put in."""
        if not self.adjust_start:
            params: Params = down["params"]
            return params
        share = (private["weight"] / down["total"].clamp(min=TINY)).clamp(max=MOST) * (down["total"] > 0)
        own = share / (1 - share)
        wanted = torch.minimum(own / down["counted"].clamp(min=TINY), own + 1) if self.within else own
        factor = wanted * (down["counted"] > 0)
        return add_scaled(down["params"], subtract(down["params"], private["model"]), factor)

    def rate(self, batches: Batches) -> float:
        """The learning rate of the round."""
        return self.lr * float(self.schedule.factor(batches.round)) if not self.schedule.constant else self.lr

    def pace(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tensor, float | Tensor]:
        """The number of steps and their learning rate: Eq. 8 (16 for mean losses), solved for l."""
        fixed = torch.full_like(private["count"], float(min(self.steps, self.max_steps)))
        if not self.adapt_steps:
            return fixed, self.rate(batches)
        ready = self.uncertainty(private, batches)[1] & (down["total"] > 0)
        remaining, rate = self.remaining_distance(down, private, batches)
        wanted = remaining / -torch.log1p(-rate)
        steps = torch.where(ready, (wanted - WHOLE).ceil(), fixed).nan_to_num(nan=1.0).clamp(1, self.max_steps)
        if not self.exact_steps:
            return steps, self.rate(batches)
        shorter = -torch.expm1(-remaining / steps) / rate
        return steps, self.rate(batches) * torch.where(ready, shorter.clamp(max=1.0), 1.0)

    def remaining_distance(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tensor, Tensor]:
        """Minus the log of the fraction of the distance to z_m that Eq. 8 leaves, and the fraction one step covers."""
        variance, _ = self.uncertainty(private, batches)
        others = (down["counted"] * (down["total"] - private["weight"])).clamp(min=TINY)
        remaining = torch.log1p(down["between"] / (variance * others))
        remaining = torch.where(down["counted"] > 0, remaining, torch.inf)  # a cohort of one has no others
        flat = batches.examples * variance if self.curvature is None else torch.full_like(variance, 1 / self.curvature)
        return remaining, (self.rate(batches) / flat).clamp(max=0.999)  # no step goes beyond z_m

    def remember(self, private: Tree, model: Params) -> Tree:
        """Eq. 18 online, as Eq. 19: the mean and variance of one more model, by the client's own count."""
        count = private["count"] + 1
        gap = subtract(model, private["mean"])
        variance = (count - 1) / count * (private["variance"] + squared_norm(gap) / count)
        return {"mean": add_scaled(private["mean"], gap, 1 / count), "variance": variance, "count": count}

    def message(self, delta: Params, weight: Tensor, batches: Batches) -> Tree:
        """A client's message: its weighted change, the weight, and the change's weighted square."""
        part = weight if self.weighting == "precision" else batches.examples
        up = {"delta": scale(delta, part), "weight": weight, "spread": part * squared_norm(delta)}
        up["count"] = torch.ones_like(weight)
        return up if self.weighting == "precision" else {**up, "examples": part}

    # -- personal models -----------------------------------------------------------------------------------------------
    def support_batching(self) -> Batching:
        return self.batching()

    def newcomer(self, down: Tree, private: Tree, support: Batches) -> Tree:
        return self.client_round(down, private, support)[0]  # theta has no part of it, so it starts there

    def candidates(self) -> tuple[str, ...]:
        return ("global", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Params]:
        yield down["params"]
        yield private["model"]
