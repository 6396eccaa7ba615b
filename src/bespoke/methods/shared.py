"""One shared linear model, fitted exactly to all clients' training rows from sums of their statistics.

Client k sends the loss, gradient and Hessian of its rows at the model it was sent; the server adds them up and takes
Newton's step on  sum_k f_k(v) + pull / 2 ||v||^2,  of half the length if the last one went uphill. Least squares takes
one round: the Hessian is X'X, whatever the model. Classes take a few rounds. Where they have many coefficients, X'X
bounds the Hessian (Boehning, 1992: 1/2 (I - 11'/C) kron X'X), and there are more steps, accelerated as Nesterov's. The
result is the model that all rows in one place would give, which FedAvg approaches as it converges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bespoke.declarations import Card, Needs, Observed, Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Method, Setting, knob
from bespoke.methods.parts.solved import WHOLE
from bespoke.tensors import Params, Tree

LARGE = 200  # coefficients beyond which the Hessian is bounded instead of sent
TOLERANCE = 1e-10  # of the objective: what a step has to promise
SHORTEST = 2.0**-12


@dataclass(frozen=True)
class Shared(Method):
    """One shared linear model, solved from sums of the clients' statistics."""

    pull: float = knob(1.0, "pull of the coefficients to zero, worth so many rows of all clients together", gt=0)

    card = Card(
        "shared", "least squares and Newton's method from sums", tunes={"pull": (0.01, 1.0, 10.0, 100.0, 1000.0)}
    )
    uplink = {"loss": Sent(Reveal.SUM), "gradient": Sent(Reveal.SUM), "hessian": Sent(Reveal.SUM)}
    needs = Needs(linear=True, head=True, smooth=True, everyone=True)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        v = self.task.linear().coefficients(params)
        return {
            "params": params, "at": v, "from": v.clone(), "last": v.clone(), "step": torch.zeros_like(v),
            "length": torch.ones((), dtype=v.dtype), "objective": torch.full((), torch.inf, dtype=v.dtype),
            "settled": torch.tensor(False),
        }  # fmt: skip

    def batching(self) -> Batching:
        return WHOLE

    def bounded(self, v: Tensor) -> bool:
        """Whether X'X replaces the Hessian: for squares, where it is exact, and for very many coefficients."""
        return len(v) == 1 or v.numel() > LARGE

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        head = self.task.linear()
        problem, v = head.problem(down["params"], batches.rows()), head.coefficients(down["params"])
        hessian = problem.factor * problem.gram if self.bounded(v) else problem.hessian(v)
        return private, {"loss": problem.value(v), "gradient": problem.gradient(v), "hessian": hessian}

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        sums, v = cohort.sums, server["at"]
        pulls = torch.full(v.shape[-1:], self.pull, dtype=v.dtype)
        pulls[0] = min(self.pull, 1e-3)  # the intercept is nearly free
        objective = sums["loss"] + 0.5 * (pulls * v * v).sum()
        if not objective <= server["objective"] and not self.bounded(v):  # uphill: half as far from the last good point
            length = server["length"] / 2
            return self._moved(server, server["from"] - length * server["step"], length, bool(length < SHORTEST))
        slope = sums["gradient"] + pulls * v
        step = self._step(v, sums["hessian"], slope, pulls)
        done = bool((step * slope).sum() < TOLERANCE * (1 + objective.abs()))
        state = {**server, "from": v, "step": step, "objective": objective}
        if self.bounded(v) and len(v) > 1:
            return self._accelerated(state, server, slope, done)
        return self._moved(state, v - step, torch.ones_like(server["length"]), done or len(v) == 1)

    def _step(self, v: Tensor, hessian: Tensor, slope: Tensor, pulls: Tensor) -> Tensor:
        """Newton's step, or that of the bound."""
        if not self.bounded(v):
            return _solved(hessian + torch.diag(pulls.repeat(len(v))), slope.reshape(-1, 1)).reshape(v.shape)
        if len(v) == 1:
            return _solved(hessian + torch.diag(pulls), slope.mT).mT
        common = slope.mean(0)
        return _solved(0.5 * hessian + torch.diag(pulls), (slope - common).mT).mT + common / pulls

    def _accelerated(self, state: Tree, server: Tree, slope: Tensor, done: bool) -> Tree:
        """Nesterov's next point; `length` is its time, which begins again where the momentum goes uphill."""
        new, last = state["from"] - state["step"], server["last"]
        time = torch.ones_like(server["length"]) if bool((slope * (new - last)).sum() > 0) else server["length"]
        later = (1 + (1 + 4 * time * time).sqrt()) / 2
        ahead = new + (time - 1) / later * (new - last)
        return self._moved({**state, "last": new}, ahead, later, done)

    def _moved(self, server: Tree, v: Tensor, length: Tensor, done: bool) -> Tree:
        params = self.task.linear().replaced(server["params"], v)
        return {**server, "params": params, "at": v, "length": length, "settled": torch.tensor(done)}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        return {"objective": float(server["objective"])}


def _solved(matrix: Tensor, right: Tensor) -> Tensor:
    """The solution of a symmetric system; eigenvalues that noise made negative become small and positive."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    floor = values[-1].clamp(min=1e-30) * 1e-13
    solution: Tensor = vectors @ ((vectors.mT @ right) / values.clamp(min=floor)[:, None])
    return solution
