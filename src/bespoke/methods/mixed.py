"""The federated mixed model: a common linear model, and how each of its coefficients varies between clients.

    theta_k = beta + g_(group of k) + b_k,   b_k ~ N(0, D),   g ~ N(0, D_g),   y = x' theta_k + noise of variance s

(Laird and Ware, 1982; with groups the third level of Group Personalized FL, Section 4). The personal model is the
posterior mean of theta_k: it is pulled to the common one in each coefficient by as much as clients were found to agree
in it. A round asks of each client, at the current beta, D, s, with A = X'X / s and r = X'(y - X beta) / s:

    V = (A + D^-1)^-1,  m = V r      its posterior
    W = A - A V A,  w = r - A m      what it says of beta: X' Sigma^-1 X and X' Sigma^-1 (y - X beta)
    w_j^2 - W_jj + (W C W)_jj        the slope of the likelihood in D_jj; C is the covariance of beta (REML)
    W_jl^2                           its expected curvature; the same for s
    m m' + V + V A C A V             in place of these, where D is full: the second moment of b_k, for EM

Only sums of these leave the clients (of each group, where there are groups). The server solves for beta exactly and
takes a step of Fisher scoring, or of EM, in the variances. Classes go by Laplace's approximation: A is the
Hessian at the client's posterior mode, r what makes that mode V r, and s is one. With `statistics = "each"` every
client sends X'X, X'y, y'y and n once (DLMM: Luo et al., 2022), and the server makes all rounds of it by itself. With
`statistics = "moments"`, the default under [privacy], it sends m, m^2 + diag V and its mean squared residual alone: few
numbers of about one size, which clipping and noise leave of use; the server's step is plain EM around the mean of m.

`robust = true` lets single clients differ by far without making all of them look different: each client has a noise
variance of its own (inverse gamma) and each b_kj a precision weight (Student's t with `freedom` degrees), both found by
a few variational steps on the client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bespoke.declarations import Card, Choosing, Needs, Observed, Reveal, Sent
from bespoke.method import Batches, Batching, Cohort, Method, Setting, knob
from bespoke.methods.parts.mixed_posterior import (
    TINY,
    derivatives,
    inverse,
    log_determinant,
    moments,
    positive,
    posterior_of_classes,
    posterior_of_squares,
    scored,
)
from bespoke.methods.parts.solved import WHOLE
from bespoke.tensors import Params, Tree, take

LEAST = 1e-5  # variance, where noise may have made it negative
ALONE = 500  # rounds that a server makes by itself, at most
CHANGE, ENOUGH = 1e-4, 1e-2  # of the variances in a round, below which the model has settled
NOTHING = 1e-3  # of a log-likelihood: less than data could tell


@dataclass(frozen=True)
class Mixed(Method):
    """A linear mixed model fitted from sums: every client's coefficients vary around common ones."""

    covariance: Literal["diagonal", "full"] = knob("diagonal", "of the coefficients between clients")
    groups_vary: bool = knob(True, "clients' groups, where known, are a level of their own")
    reml: bool = knob(True, "variances by restricted maximum likelihood; off: maximum likelihood")
    robust: bool = knob(False, "heavy tails and a noise variance for each client; diagonal covariance only")
    freedom: float = knob(4.0, "robust: degrees of freedom of the tails", gt=2)
    statistics: Literal["sums", "moments", "each"] = knob(
        "sums",
        "what the server sees: sums round by round, sums of moments alone (for noise), or each client's X'X and X'y, "
        "once (regression only)",
    )

    card = Card(
        "mixed",
        "Laird and Ware, 1982; Luo et al., 2022 (DLMM); Liu et al., ICASSP 2023, Section 4",
        personal="the posterior mean of the client's own coefficients, and its covariance",
        unseen="a client that never trained starts at the common coefficients and moves away as its rows tell",
        tunes={"robust": (False, True)},
    )
    downlink = {
        "params": "the common model, or that of the client's group",
        "centre": "its coefficients in double precision",
        "doubt": "their covariance",
        "spread": "how coefficients vary between clients",
        "between": "how they vary between groups",
        "noise": "the noise variance and, if robust, how it varies between clients",
    }
    needs = Needs(head=True, smooth=True, everyone=True, coefficients=250)
    choosing = Choosing(keep_shared=False)

    @property
    def uplink(self) -> dict[str, Sent]:
        if self.statistics == "each":
            return dict.fromkeys(("gram", "moment", "square", "rows"), Sent(Reveal.EACH))
        if self.statistics == "moments":
            return {**dict.fromkeys(("mean", "square", "noise"), Sent(Reveal.SUM)), "clients": Sent(Reveal.COUNT)}
        robust = ("precision", "log_precision") if self.robust else ()
        varied = ("moment", "residual") if self.covariance == "full" else ("slope", "curve")
        names = ("information", "score", *varied, "loglik", "variances", *robust, "rows", "clients")
        return dict.fromkeys(names, Sent(Reveal.SUM))

    # -- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        head = self.task.linear()
        centre = self._free(head.coefficients(params))
        size = len(centre)
        members = setting.groups if self.groups_vary and self.statistics != "moments" else None
        rows = 1 if members is None else int(members.max()) + 1
        eye = torch.eye(size, dtype=torch.float64)
        scalar = torch.ones((), dtype=torch.float64)
        state: Tree = {
            "params": params, "beta": centre, "doubt": 0 * eye, "spread": 0.1 * eye, "between": 0.1 * eye,
            "noise": scalar if self._classes() else 0.5 * scalar, "shape": 5 * scalar,
            "effects": eye.new_zeros(rows, size), "effect_doubt": eye.new_zeros(rows, size, size),
            "variances": eye.new_zeros(4), "good": eye.new_full((2 * size + 1,), 0.1), "damp": scalar,
            "likelihood": torch.full((), -torch.inf, dtype=torch.float64), "settled": torch.tensor(False),
        }  # fmt: skip
        return state if members is None else {**state, "groups": members}

    def groups(self, server: Tree) -> Tensor | None:
        return server.get("groups")

    def broadcast(self, server: Tree) -> Tree:
        centres = server["beta"] + server["effects"]
        grown = len(centres)
        params = [self._model(server["params"], centre) for centre in centres]
        noise = torch.stack([server["noise"], server["shape"]])
        if "groups" not in server:
            doubt = server["doubt"] if self.reml else 0 * server["doubt"]
            shared = {"params": params[0], "centre": centres[0], "doubt": doubt, "noise": noise}
            return {**shared, "spread": server["spread"], "between": 0 * server["between"]}
        doubts = server["effect_doubt"].clone()
        doubts[0] = server["doubt"] + server["between"]  # of a client whose group is not known
        return {
            "params": {name: torch.stack([p[name] for p in params]) for name in params[0]}, "centre": centres,
            "doubt": doubts if self.reml else 0 * doubts, "spread": server["spread"].expand(grown, -1, -1),
            "between": server["between"].expand(grown, -1, -1), "noise": noise.expand(grown, 2),
        }  # fmt: skip

    def params(self, server: Tree) -> Params:
        return self._model(server["params"], server["beta"])

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        if self.statistics == "sums":
            return self._maximized(server, cohort)
        if self.statistics == "moments":
            return self._moved(server, cohort.sums)
        members = server["groups"][torch.tensor(cohort.clients)] if "groups" in server else None
        for _ in range(ALONE):
            down, each = self.broadcast(server), cohort.each
            mine = down if members is None else take(down, members)
            messages = torch.func.vmap(self._message, in_dims=(0, None if members is None else 0))(each, mine)
            if members is None:
                sums = {name: value.sum(0) for name, value in messages.items()}
            else:
                rows = len(server["effects"])
                sums = {n: v.new_zeros(rows, *v.shape[1:]).index_add(0, members, v) for n, v in messages.items()}
            server = self._maximized(server, replace(cohort, sums=sums))
            if server["settled"]:
                break
        return {**server, "settled": torch.tensor(True)}

    def _moved(self, server: Tree, sums: Tree) -> Tree:
        """A step of EM from means over clients: the centre moves by the mean of m, D is their spread around it."""
        move, square, noise = (sums[name] / sums["clients"] for name in ("mean", "square", "noise"))
        new = {**server, "beta": server["beta"] + move, "spread": torch.diag((square - move**2).clamp(min=LEAST))}
        if not self._classes():
            new["noise"] = noise.clamp(min=LEAST)
        change = ((_variances(new) - _variances(server)).abs() / (_variances(new) + 1e-3 * new["noise"])).max()
        return {**new, "settled": (change < CHANGE) & (move.abs().max() < CHANGE)}

    def _maximized(self, server: Tree, cohort: Cohort) -> Tree:
        """The next beta and variances from the clients' sums."""
        sums = cohort.sums if "groups" in server else {name: value[None] for name, value in cohort.sums.items()}
        total = {name: value.sum(0) for name, value in sums.items()}
        clients = total["clients"].clamp(min=1.0)
        rows = total["rows"].clamp(min=1.0)
        new = {**self._levels(server, sums), "variances": total["variances"] / rows}
        if self.covariance == "full":
            new["spread"] = positive(total["moment"] / clients)
            new["noise"] = server["noise"] if self._classes() else (total["residual"] / rows).clamp(min=TINY)
        else:
            values = torch.cat([server["spread"].diagonal(), server["noise"].reshape(1)])
            after = scored(values, total["slope"], total["curve"])
            new["spread"] = torch.diag(after[:-1])
            new["noise"] = after[-1]
        if self.robust and not self._classes():
            new |= self._noises(total, clients)
        return self._guarded(server, new)

    def _levels(self, server: Tree, sums: Tree) -> Tree:
        """beta, its covariance, and the groups' effects; `sums` have a row for each group, taken at its centre."""
        effects, between = server["effects"], server["between"]
        information = torch.stack([positive(part) for part in sums["information"]])
        score = sums["score"] + torch.einsum("gij,gj->gi", information, effects)  # at beta
        eye = torch.eye(len(between), dtype=torch.float64)
        if "groups" not in server:
            doubt = inverse(information[0])
            move = doubt @ score[0]
            # at the best beta, so that rounds can be compared
            likelihood = sums["loglik"][0] + 0.5 * move @ score[0]
            likelihood = likelihood - 0.5 * self.reml * log_determinant(information[0])
            return {**server, "doubt": doubt, "beta": server["beta"] + move, "likelihood": likelihood}
        inside = torch.linalg.inv(torch.linalg.inv(between + TINY * eye) + information)
        mean = torch.einsum("gij,gj->gi", inside, score)
        # the likelihood with the effects integrated out: at their mode, and by the curvature there
        step = mean - effects
        fitted = sums["loglik"] + (sums["score"] * step).sum(1)
        fitted = fitted - 0.5 * torch.einsum("gi,gij,gj->g", step, information, step)
        precise = torch.linalg.inv(between + TINY * eye)
        fitted = fitted - 0.5 * torch.einsum("gi,ij,gj->g", mean, precise, mean)
        fitted = fitted - 0.5 * torch.logdet(eye + (between + TINY * eye) @ information)
        fitted[0] = sums["loglik"][0]
        precision = information - information @ inside @ information
        pull = score - torch.einsum("gij,gj->gi", information, mean)
        precision[0], pull[0] = information[0], score[0]  # clients without a group inform about beta itself
        doubt = inverse(precision.sum(0))
        move = doubt @ pull.sum(0)
        likelihood = fitted.sum() + 0.5 * move @ pull.sum(0) - 0.5 * self.reml * log_determinant(precision.sum(0))
        kept = eye - inside @ information
        mean = mean - torch.einsum("gij,gj->gi", inside @ information, move.expand_as(mean))
        mean[0] = 0.0
        spare = kept @ doubt @ kept.mT
        there = (sums["clients"] > 0).double()[:, None, None]
        there[0] = 0.0
        if self.covariance == "full":
            # REML: what is not known of beta is not known of the effects either
            apart = inside @ information
            moment = mean[:, :, None] * mean[:, None, :] + inside + apart @ doubt @ apart.mT
            between = positive((moment * there).sum(0) / there.sum().clamp(min=1.0))
        else:
            precision, pull = precision * there, pull * there[:, 0]
            slope = (pull**2 - precision.diagonal(dim1=1, dim2=2)).sum(0)
            slope = slope + (precision @ doubt @ precision).diagonal(dim1=1, dim2=2).sum(0) * self.reml
            between = torch.diag(scored(between.diagonal(), slope, (precision**2).sum(0)))
        return {
            **server, "doubt": doubt, "beta": server["beta"] + move, "between": between, "effects": mean,
            "effect_doubt": inside + spare, "likelihood": likelihood,
        }  # fmt: skip

    def _noises(self, total: Tree, clients: Tensor) -> Tree:
        """The gamma distribution of the clients' precisions: its mean's inverse, and its shape."""
        mean, log_mean = total["precision"] / clients, total["log_precision"] / clients
        apart = (mean.clamp(min=TINY).log() - log_mean).clamp(min=1e-4)
        shape = (3 - apart + ((apart - 3) ** 2 + 24 * apart).sqrt()) / (12 * apart)  # Minka's start, then Newton
        for _ in range(5):
            gap = shape.log() - torch.special.digamma(shape) - apart
            shape = (shape - gap / (1 / shape - torch.special.polygamma(1, shape))).clamp(min=0.5, max=1e4)
        return {"noise": 1 / mean.clamp(min=TINY, max=1 / TINY), "shape": shape}

    def _guarded(self, server: Tree, new: Tree) -> Tree:
        """The new state; if the likelihood fell by the last step, back to before it, for a smaller one. And: settled?

        A round's slopes are taken where beta and the groups' effects are best for the variances of the round before:
        back at these variances they are exact.
        """
        now, after, damp = _variances(server), _variances(new), server["damp"]
        guarded = self.covariance == "diagonal" and not self.robust
        fell = new["likelihood"] < server["likelihood"] - NOTHING - 1e-7 * new["likelihood"].abs()
        stepped = not torch.equal(now, server["good"])
        if fell and guarded and stepped:
            return {**_with_variances(server, server["good"]), "damp": damp / 3}
        if self.covariance == "diagonal":  # the slopes of robust clients are those of a bound: whole steps may swing
            after = now + (0.5 if self.robust else damp) * (after - now)
            new = {**_with_variances(new, after), "damp": (2 * damp).clamp(max=1.0)}
        change = ((after - now).abs() / (after + 1e-3 * new["noise"])).max()
        still = (new["beta"] - server["beta"]).abs().max() < 1e-3
        enough = ENOUGH if self.robust or new["likelihood"] < server["likelihood"] + NOTHING else CHANGE
        level = guarded and stepped and new["likelihood"] < server["likelihood"] + 0.1 * NOTHING * damp
        return {**new, "good": now, "settled": (change < enough) & still | level}

    def observe(self, server: Tree, cohort: Cohort) -> Observed:
        """The coefficients, how they vary, and the shares of the variance: what the report shows."""
        if self._classes() > 2:
            return {"likelihood": float(server["likelihood"])}
        deviations = {"clients": server["spread"].diagonal().sqrt()}
        if "groups" in server:
            deviations["groups"] = server["between"].diagonal().sqrt()
        rows = {"mean": server["beta"], "error": server["doubt"].diagonal().sqrt(), **deviations}
        return {
            "likelihood": float(server["likelihood"]), "shares": self._shares(server),
            "coefficients": {name: [float(f"{x:.6g}") for x in row.tolist()] for name, row in rows.items()},
        }  # fmt: skip

    def _shares(self, server: Tree) -> dict[str, float]:
        """Parts of the target's variance: what the common coefficients explain, groups, clients, and noise."""
        grouped = "groups" in server
        square, mean, clients, groups = server["variances"].tolist()
        # of classes the noise is that of a latent variable with the logistic distribution
        within = math.pi**2 / 3 if self._classes() else float(server["noise"])
        parts = {"common": max(square - mean**2 - groups, 0.0), "clients": clients, "within": within}
        parts |= {"groups": groups} if grouped else {}
        return {name: float(f"{part / sum(parts.values()):.6g}") for name, part in parts.items()}

    # -- the client ----------------------------------------------------------------------------------------------------
    def batching(self) -> Batching:
        return WHOLE

    support_batching = batching

    def client_round(self, down: Tree, private: Tree, batches: Batches) -> tuple[Tree, Tree]:
        problem = self.task.linear().problem(down["params"], batches.rows())
        if self.statistics == "each":
            return private, self._squares(problem)
        return private, self._message(problem if self._classes() else self._squares(problem), down)

    def _squares(self, problem: Any) -> Tree:
        """All that least squares need of a client's rows."""
        square = (problem.y.double() ** 2 * problem.mask).sum()
        return {"gram": problem.gram, "moment": problem.moment[0], "square": square, "rows": problem.rows}

    def _message(self, data: Any, down: Tree) -> Tree:
        """A client's message at the current parameters; `data`: its squares or, of classes, its problem."""
        found = self.posterior(data, down)
        if self.statistics == "moments":
            noise = (found["squares"] + (found["gram"] * found["v"]).sum()) / found["rows"].clamp(min=1.0)
            sent = {"mean": found["m"], "square": found["m"] ** 2 + found["v"].diagonal(), "noise": noise}
            return {**sent, "clients": torch.ones_like(noise)}
        a, v, m, doubt = found["a"], found["v"], found["m"], down["doubt"]
        centre, gram, ones = down["centre"], found["design"], found["design"][0]
        first = centre[: len(gram)]  # of several classes the first two are looked at
        varied = [(gram * d[: len(gram), : len(gram)]).sum() for d in (down["spread"], down["between"])]
        up = {
            "information": a - a @ v @ a, "score": found["r"] - a @ m, "rows": found["rows"], "loglik": found["loglik"],
            "clients": torch.ones_like(found["loglik"]),
            "variances": torch.stack([first @ gram @ first, first @ ones, *varied]),
        }  # fmt: skip
        noise_varies = not (self.robust or self._classes())
        up |= moments(found, doubt) if self.covariance == "full" else derivatives(found, up, doubt, noise_varies)
        if self.robust:
            up |= {"precision": found["precision"], "log_precision": found["log_precision"]}
        return up

    def posterior(self, data: Any, down: Tree) -> Tree:
        """The client's posterior of b, from its squares or, of classes, its problem."""
        freedom = self.freedom if self.robust else None
        return (posterior_of_classes if self._classes() else posterior_of_squares)(data, down, freedom)

    def candidates(self) -> tuple[str, ...]:
        return ("common", "personal")

    def personalize(self, down: Tree, private: Tree, support: Batches) -> Iterator[Any]:
        problem = self.task.linear().problem(down["params"], support.rows())
        found = self.posterior(problem if self._classes() else self._squares(problem), down)
        noise = 1 / found["precision"]
        kept = torch.eye(len(found["m"]), dtype=found["v"].dtype) - found["v"] @ found["a"]
        spread = down["spread"] + down["doubt"]
        yield {**down["params"], "covariance": spread, "noise": noise}
        personal = self._model(down["params"], down["centre"] + found["m"])
        yield {**personal, "covariance": found["v"] + kept @ down["doubt"] @ kept.mT, "noise": noise}

    def predict(self, personal: Any, batch: Params) -> Tensor:
        """The model's outputs; of a regression also the standard deviation of what will be seen, as a second column."""
        outputs = self.task.predict(personal, batch)
        if self._classes():
            return outputs
        inputs = self.task.features(personal, batch).double()
        x = torch.cat([torch.ones_like(inputs[:, :1]), inputs], dim=1)
        variance = (x @ personal["covariance"] * x).sum(-1) + personal["noise"]
        return torch.cat([outputs, variance.clamp(min=0.0).sqrt().to(outputs.dtype)[..., None]], dim=-1)

    # -- coefficients that the data can tell ---------------------------------------------------------------------------
    def _classes(self) -> int:
        """How many classes there are; 0 of a regression."""
        head = self.task.linear()
        return 0 if head.task.kernel_of() == "squares" else head.outputs

    def _free(self, coefficients: Tensor) -> Tensor:
        """The first class's stay zero: only differences between classes are felt."""
        return (coefficients[1:] - coefficients[:1] if self._classes() else coefficients).flatten()

    def _model(self, params: Params, free: Tensor) -> Params:
        head = self.task.linear()
        rows = free.reshape(-1, head.coefficients(params).shape[-1])
        full = torch.cat([torch.zeros_like(rows[:1]), rows]) if self._classes() else rows
        model: Params = head.replaced(params, full)
        return model


def _variances(server: Tree) -> Tensor:
    """All of them, in one row."""
    parts = [server["spread"].diagonal(), server["between"].diagonal(), server["noise"].reshape(1)]
    return torch.cat(parts).clamp(min=TINY)


def _with_variances(server: Tree, values: Tensor) -> Tree:
    size = len(server["beta"])
    spread, between = torch.diag(values[:size]), torch.diag(values[size : 2 * size])
    return {**server, "spread": spread, "between": between, "noise": values[-1].clone()}
