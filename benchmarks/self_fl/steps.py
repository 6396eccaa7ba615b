"""Figures 11 and 12: how many local steps Self-FL computes for its clients, by round.

    python benchmarks/self_fl steps benchmarks/self_fl/mnist.toml --out runs/self-fl-mnist-steps

Runs the file's Self-FL with its first seed, with both definitions of its variances, in this process. A client's number
of steps is private. This program reads the private state of each round's clients before the round and solves Eq. 8 for
l again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from bespoke.experiment.build import build, to_toml
from bespoke.experiment.experiment import Experiment, engine_choice
from bespoke.federation.cohorts import Sampler
from bespoke.methods.self_fl import WHOLE, SelfFL
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.comparison import Comparison
from self_fl.folders import READINGS


@dataclass(frozen=True)
class Examples:
    """All that Self-FL asks of batches when it computes steps."""

    examples: torch.Tensor


def computed(method: SelfFL, observed: dict[str, float], private: Any, examples: torch.Tensor) -> np.ndarray[Any, Any]:
    """Eq. 8 for some clients: l as it is, neither whole nor bounded."""
    down = {name: torch.tensor(observed[name]) for name in ("between", "total", "counted")}
    batches: Any = Examples(examples)
    left, rate = method.remaining_distance(down, private, batches)
    return (left / -torch.log1p(-rate)).numpy()


def watch(experiment: Experiment, folder: RunFolder) -> pd.DataFrame:
    """Run it, and note the steps of every active client whose uncertainty is known, in every round."""
    method, train = experiment.stages[-1].method, experiment.split.train
    assert isinstance(method, SelfFL)
    sampler = Sampler(train, experiment.seed, experiment.cohort, **experiment.sampling)
    noted: list[pd.DataFrame] = []

    def look(_: int, number: int) -> None:
        """What the clients of the next round will compute."""
        clients = sampler.draw(number + 1).reported
        assert run.engine.host
        private = run.engine.host.private.read(clients)
        examples = torch.from_numpy(train.sizes(clients)).float()
        observed = json.loads((folder.path / "rounds.jsonl").read_text().splitlines()[-1])["observed"]
        steps = computed(method, observed, private, examples)
        known = (private["count"] > 1).numpy()
        noted.append(pd.DataFrame({
            "round": number + 1, "client": [experiment.population.ids[c] for c in clients[known]],
            "examples": examples.numpy()[known].astype(int), "computed": steps[known],
            "taken": np.ceil(steps[known] - WHOLE).clip(1, method.max_steps),
            "variance": private["variance"].numpy()[known], "others": method.others,
        }))  # fmt: skip

    how = replace(engine_choice(experiment), workers=0)
    run = Run(experiment, folder, how=how, after_round=look)
    run.run()
    return pd.concat(noted[:-1], ignore_index=True)  # after the last round nobody computes any more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a comparison with Self-FL among its methods")
    parser.add_argument("--out", type=Path, default=Path("runs/self-fl-mnist-steps"))
    arguments = parser.parse_args()
    comparison = Comparison.read(arguments.file, arguments.out)
    parts = []
    for label in READINGS:
        if label in comparison.methods:
            config = comparison.plan.config(label, comparison.seeds[0], {})
            folder = RunFolder.create(arguments.out / label, to_toml(config))
            parts.append(watch(build(config), folder).assign(label=label))
    found = pd.concat(parts, ignore_index=True)
    found.to_parquet(arguments.out / "steps.parquet")
    print(f"wrote {arguments.out / 'steps.parquet'}: {len(found)} times a client computed its steps")
