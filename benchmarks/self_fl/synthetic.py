"""Figures 4, 5 and 6: how well methods estimate the parameters of the two-level Gaussian model (Appendix G.1, G.2).

    python benchmarks/self_fl synthetic --out runs/self-fl-synthetic

20 clients, theta_0 = 1.6, rows of variance 0.1, everything from zero, learning rate 1e-4 on the sum of the rows'
losses, 200 rounds of 50 local steps (Self-FL's by Eq. 16), 200 repeats, activity rates 0.1 to 1. Homogeneous: 10 to 20
rows, sigma_0^2 = 0.001; heterogeneous: 10 to 200 rows, sigma_0^2 = 1. Errors are absolute: of the global parameter
against theta_0, of a client's against theta_m, then averaged. Takes about a minute.

Self-FL sums over the other active clients (`others = "active"`, the method's default); rows named "all others" sum over
all clients. "FedAvg, smoothed" is FedAvg with the activity rate as its server's learning rate: Self-FL's smoothing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.randomness import generator
from bespoke.storage import write_text
from self_fl import bayes
from self_fl.gaussian import (
    AugmentedSelfFL,
    Ditto,
    FedAvg,
    Floats,
    Masks,
    PerFedAvg,
    PFedMe,
    Rule,
    SelfFL,
    World,
    play,
)

CLIENTS, CENTRE, WITHIN, LR = 20, 1.6, 0.1, 1e-4
CASES = {"homogeneous": (10, 20, 0.001), "heterogeneous": (10, 200, 1.0)}  # least and most rows, sigma_0^2
ACTIVITY = (0.1, 0.2, 0.5, 0.8, 1.0)
RULES: dict[str, Rule] = {
    "self-fl": SelfFL(),
    "fedavg": FedAvg(),
    "ditto": Ditto(),
    "pfedme": PFedMe(),
    "per-fedavg": PerFedAvg(),
    "fedavg-smoothed": FedAvg(server_lr=None),
    "self-fl-augmented": AugmentedSelfFL(),
    "self-fl-learned": SelfFL(known=False),
    "self-fl-all": SelfFL(others="all"),
    "self-fl-augmented-all": AugmentedSelfFL(others="all"),
    "self-fl-learned-all": SelfFL(known=False, others="all"),
}


def draw(case: str, repeats: int, seed: int) -> tuple[World, Floats]:
    """Populations and their true parameters."""
    least, most, between = CASES[case]
    random = generator("self-fl synthetic", case, seed)
    rows = random.integers(least, most + 1, (repeats, CLIENTS)).astype(float)
    truth = random.normal(CENTRE, between**0.5, (repeats, CLIENTS))
    z = random.normal(truth, np.sqrt(WITHIN / rows))
    return World(z, rows, LR * rows / WITHIN, LR, between, WITHIN), truth


def cohorts(activity: float, rounds: int, repeats: int, seed: int) -> list[Masks]:
    """Who is active: so many of the clients, without replacement, the same for all methods."""
    many = max(int(activity * CLIENTS), 1)
    random = generator("self-fl cohorts", f"{activity}", seed)
    return [random.random((repeats, CLIENTS)).argsort(1) < many for _ in range(rounds)]


def study(repeats: int = 200, rounds: int = 200, seed: int = 0) -> dict[str, Any]:
    """Errors of every method in every case at every activity rate."""
    lines, bounds = [], {}
    for case in CASES:
        world, truth = draw(case, repeats, seed)
        best = np.stack(
            [bayes.posterior(z, v, world.between).mean for z, v in zip(world.z, world.variance)]
        )  # fmt: skip
        bounds[case] = {
            "global": float(np.abs(_optimal(world) - CENTRE).mean()),
            "local alone": float(np.abs(world.z - truth).mean()),
            "local given all": float(np.abs(best - truth).mean()),
        }
        for activity in ACTIVITY:
            drawn = cohorts(activity, rounds, repeats, seed)
            for name, rule in RULES.items():
                shared, personal = play(rule, world, drawn)
                errors = {
                    "global": np.abs(shared[:, 0] - CENTRE), "local": np.abs(personal - truth).mean(1),
                }  # fmt: skip
                lines.append({
                    "case": case, "method": name, "activity": activity,
                    **{part: float(e.mean()) for part, e in errors.items()},
                    **{f"{part}_se": float(e.std(ddof=1) / repeats**0.5) for part, e in errors.items()},
                })  # fmt: skip
    return {"repeats": repeats, "rounds": rounds, "seed": seed, "bounds": bounds, "lines": lines}


def _optimal(world: World) -> Floats:
    """Eq. 2 for every repeat: the best estimate of theta_0."""
    return np.array([bayes.global_optimal(z, v, world.between).mean for z, v in zip(world.z, world.variance)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/self-fl-synthetic"))
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3, help="how many times 200 repeats are drawn")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = [study(arguments.repeats, arguments.rounds, seed) for seed in range(arguments.seeds)]
    write_text(arguments.out / "synthetic.json", json.dumps(found, indent=1))
    print(f"wrote {arguments.out / 'synthetic.json'}")
