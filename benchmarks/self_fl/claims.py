"""What Self-FL's paper claims of each experiment, held against the folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from self_fl.folders import FIVE, Claim, Compared, highest, of_global, top, weighted, worst

NEGLIGIBLE = 0.01  # the paper's word for a difference of less than one percent
NOISE = 0.001  # of a synthetic error: the paper's bound of its standard errors; what is nearer is no difference


def synthetic(found: list[dict[str, Any]]) -> list[Claim]:
    """Appendix G.1 and G.2; `found` has an entry for each drawing of 200 repeats."""

    def errors(study: dict[str, Any], case: str, part: str, activity: float) -> dict[str, float]:
        return {
            line["method"]: line[part]
            for line in study["lines"]
            if line["case"] == case and line["activity"] == activity
        }

    def lowest(study: dict[str, Any], case: str, part: str, activity: float, names: tuple[str, ...]) -> bool:
        values = errors(study, case, part, activity)
        rest = [values[name] for name in FIVE if name not in names]
        return max(values[name] for name in names) <= min(rest) + NOISE

    def insensitive(study: dict[str, Any], part: str) -> bool:
        """Over all activity rates Self-FL's error changes by less than a tenth of FedAvg's change."""
        change = {
            name: np.ptp([errors(study, "heterogeneous", part, a)[name] for a in (0.1, 0.2, 0.5, 0.8, 1.0)])
            for name in ("self-fl", "fedavg")
        }
        return bool(change["self-fl"] < 0.1 * change["fedavg"])

    def same(study: dict[str, Any], case: str) -> bool:
        return all(
            abs(errors(study, case, part, a)["self-fl"] - errors(study, case, part, a)["self-fl-augmented"]) < 0.01
            for part in ("global", "local")
            for a in (0.1, 0.2, 0.5, 0.8, 1.0)
        )

    both = ("self-fl", "per-fedavg")
    return [
        *(
            Claim(f"homogeneous, all clients active: Self-FL and Per-FedAvg have the lowest {part} error",
                  [lowest(study, "homogeneous", part, 1.0, both) for study in found])
            for part in ("global", "local")
        ),
        *(
            Claim(f"homogeneous, a tenth active: Self-FL has the lowest {part} error",
                  [lowest(study, "homogeneous", part, 0.1, ("self-fl",)) for study in found])
            for part in ("global", "local")
        ),
        *(
            Claim(f"heterogeneous: Self-FL's {part} error hardly depends on the activity rate (less than a tenth of "
                  "FedAvg's change)", [insensitive(study, part) for study in found])
            for part in ("global", "local")
        ),
        *(
            Claim(f"{case}: Algorithms 1 and 2 differ by less than 0.01 at every rate",
                  [same(study, case) for study in found])
            for case in ("homogeneous", "heterogeneous")
        ),
    ]  # fmt: skip


def best(study: Compared, where: str) -> list[Claim]:
    """Figures 1 and 2a: who has the highest accuracy at the end, and whose curve is the steadiest."""
    moves = {label: np.diff(study.curve(label)[1], axis=1) for label in FIVE}
    falls = {label: np.minimum(moved, 0.0).sum(1) for label, moved in moves.items()}  # rising is no unsteadiness
    steady = [all(falls["self-fl"][i] >= falls[label][i] for label in FIVE) for i in range(len(study.seeds))]
    return [
        Claim(f"{where}: Self-FL has the highest weighted accuracy of the five", highest(study, "self-fl", weighted)),
        Claim(f"{where}: Self-FL's curve is the steadiest (falls back least, all falls together)", steady),
    ]


def shifted(study: Compared, where: str) -> list[Claim]:
    """Figure 3: the distribution over users lies to the right of FedAvg's."""
    quantiles = np.linspace(0.05, 0.95, 19)

    def right(seed: int) -> bool:
        mine, theirs = (
            np.quantile(study.clients(name, seed)["query_accuracy"], quantiles) for name in ("self-fl", "fedavg")
        )
        return bool((mine >= theirs).all())

    text = f"{where}: users' accuracies under Self-FL lie to the right of FedAvg's (at every 20-quantile)"
    return [Claim(text, [right(seed) for seed in study.seeds])]


def sparse(study: Compared) -> list[Claim]:
    """Figure 10: with an activity rate of 0.02 Self-FL converges more slowly, its global model being kept back."""

    def behind(other: str, measure: Any) -> list[bool]:
        return (study.over_seeds("self-fl", measure) < study.over_seeds(other, measure)).tolist()

    return [
        Claim(f"activity rate 0.02: after the same rounds Self-FL's {what} behind {name}'s", behind(label, measure))
        for label, name in (("fedavg", "FedAvg"), ("ditto", "Ditto"))
        for what, measure in (("global model is", of_global), ("personal models are", weighted))
    ]


def stand_in(study: Compared) -> list[Claim]:
    """Table 1, Figure 2b, and the check with 40 steps."""
    ablation = ("only start", "only steps", "only weights")
    values = {label: study.over_seeds(label, of_global) for label in (*ablation, "self-fl", "fedavg")}
    seeds = range(len(study.seeds))
    forty = ("ditto 40 steps", "pfedme 40 steps", "per-fedavg 40 steps", "self-fl")
    gap = np.abs(study.over_seeds("self-fl", weighted) - study.over_seeds("self-fl-augmented", weighted))
    return [
        Claim("Table 1: Self-FL is best for the tenth with most samples", highest(study, "self-fl", top)),
        Claim("Table 1: Self-FL is best for the tenth served worst", highest(study, "self-fl", worst)),
        Claim("Figure 2b: of the components alone, the initial value helps the global model most",
              [bool(values["only start"][i] >= max(values[label][i] for label in ablation)) for i in seeds]),
        Claim("with 40 local steps for Ditto, pFedMe and Per-FedAvg Self-FL is still best",
              highest(study, "self-fl", weighted, forty)),
        Claim("Figure 7: Algorithms 1 and 2 differ by less than 1 % in accuracy", (gap < NEGLIGIBLE).tolist()),
    ]  # fmt: skip


# -- the comparisons ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """A comparison of the study: benchmarks/self_fl/NAME.toml, whose results lie in runs/self-fl-NAME."""

    name: str
    title: str
    about: str
    claims: Callable[[Compared], list[Claim]]
    drawn: tuple[str, ...] = FIVE  # methods whose curves are shown
    tails: bool = False  # also the tenth with most samples and the tenth served worst

    @property
    def command(self) -> str:
        return f"bespoke compare benchmarks/self_fl/{self.name.replace('-', '_')}.toml --out runs/self-fl-{self.name}"


COMPARISONS = (
    Entry(
        "mnist",
        "MNIST, two digits a client (Figures 1a, 3b)",
        "Learning rate 0.03 for all, the paper's way.",
        lambda study: [*best(study, "MNIST"), *shifted(study, "MNIST")],
    ),
    Entry(
        "mnist-tuned",
        "MNIST, learning rates tuned",
        "Four rates tried for each method.",
        lambda study: best(study, "MNIST, rates tuned"),
    ),
    Entry("mnist-sparse", "MNIST, activity rate 0.02 (Figure 10)", "", sparse, ("fedavg", "ditto", "self-fl")),
    Entry(
        "five-classes",
        "Ten classes, five a client (Figures 1b, 2b, 3a, 7b, Table 1)",
        "A stand-in for FEMNIST, which cannot be had here: MNIST's digits. Learning rate 0.01 for all.",
        lambda study: [*best(study, "stand-in"), *stand_in(study), *shifted(study, "stand-in")],
        (*FIVE, "self-fl-augmented"),
        tails=True,
    ),
    Entry(
        "five-classes-tuned",
        "Ten classes, five a client, learning rates tuned",
        "Four rates tried for each method.",
        lambda study: best(study, "stand-in, rates tuned"),
        tails=True,
    ),
    Entry(
        "writers",
        "MNIST by writer",
        "Not in the paper. Learning rate 0.03 for all; Algorithm 2 and the cluster level of Appendix G.4 besides.",
        lambda study: best(study, "writers"),
        (*FIVE, "self-fl-augmented", "self-fl-clustered"),
        tails=True,
    ),
    Entry(
        "cifar10",
        "CIFAR-10, three classes a client (Figures 2a, 3c)",
        "Learning rate 0.01 for all, 40 local steps; the paper does not say how many rounds.",
        lambda study: [*best(study, "CIFAR-10"), *shifted(study, "CIFAR-10")],
    ),
)
