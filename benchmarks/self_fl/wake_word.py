"""Self-FL's wake-word experiments (Section 4.3, Appendices G.2, G.4, G.5) on Speech Commands: Tables 2, 4, 5 and 6.

    python benchmarks/self_fl/wake_word.py --out runs/self-fl-wake-word
    python benchmarks/results.py

Three comparisons (five clients, all in every round; 20 clients at activity rates 0.25 and 0.1), each a folder as
`bespoke compare` writes it, and two files: `false_accepts.parquet`, counts by method, seed, device type and state, and
`wake_word.json`, a record of the settings. An interrupted command continues where it stopped.

Every run starts from a model that FedAvg has trained until it hardly improves: the baseline. Learning rates are chosen
on validation rows, or are the same for all methods as in the paper (labels with `.same`). Comparisons with sampled
clients use the rate chosen with all clients. To compare another setting, add an entry to DEVICES or SAMPLED, and its
row to benchmarks/results_wake_word.py.
"""

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from bespoke.cli.exit_codes import program
from bespoke.cli.progress import Bars
from bespoke.data.population import Population
from bespoke.data.sources.speech.speech_commands import SILENT_ALARM, STATES, Clips, read_clips
from bespoke.experiment.build import Bench
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.loading import load_population
from bespoke.runs.finished import open_run, personal_model
from bespoke.storage import settle, write_text
from bespoke.study.comparison import Comparison
from bespoke.tensors import Params
from self_fl.detection import relative

REJECTS = 0.1  # of the wake words are rejected where models are compared; the paper does not say how many
RATES = [0.01, 0.03, 0.1]  # learning rates tried for every method
SAME = 0.03  # the learning rate of all, where it is not tuned
WARM = {0.1: 30, 0.03: 10}  # learning rate and rounds of the baseline, with all clients in every round
ROUNDS = 10
SAMPLED_ROUNDS = {"quarter": 0.25, "tenth": 0.1}  # activity rates by folder; rounds grow so that rows are used as often

# A local epoch of a device type is 8 to 23 steps. Self-FL takes 15 until it knows better, and at most twice as many.
DEVICES: dict[str, dict[str, Any]] = {
    "self-fl": {"method": "self-fl", "steps": 15, "max_steps": 30},
    "fedavg": {"method": "fedavg", "weighting": "uniform"},
    "fedavg-w": {"method": "fedavg", "weighting": "examples"},
    "ditto": {"method": "ditto", "weighting": "uniform"},  # its shared model is FedAvg's
    "per-fedavg": {"method": "per-fedavg", "weighting": "uniform", "alpha": 0.1},
}
# Algorithm 2, at the common rate only, beside Algorithm 1 at the same
AUGMENTED = {"method": "self-fl-augmented", "steps": 15, "max_steps": 30, "local_steps": 30}
# FedAvg's personal models: the shared one after a local epoch, as a client has it within a round
LOCAL_EPOCH = {"epochs": 1, "keep_shared": False}
# A quarter of a device type's rows: a local epoch is 2 to 6 steps.
SAMPLED: dict[str, dict[str, Any]] = {
    "self-fl": {"method": "self-fl", "steps": 4, "max_steps": 8, "others": "all"},  # as in the published numbers
    "cluster": {"method": "self-fl-clustered", "steps": 4, "max_steps": 8},
}


def comparison(name: str, folder: Path, seeds: int, lr: float, **rest: Any) -> Comparison:
    """One of the three; `lr` is for sampled clients."""
    rate = SAMPLED_ROUNDS.get(name, 1.0)
    rounds = round(ROUNDS / rate)
    warm = [stage(round(many / rate), rate_warm, "examples") for rate_warm, many in WARM.items()]
    listed = DEVICES if name == "devices" else {label: {**entry, "lr": lr} for label, entry in SAMPLED.items()}
    entries = {label: {**entry, "before": warm} for label, entry in listed.items()}
    knobs, methods = {}, list(entries)
    if name == "devices":
        same = {f"{label}.same": {**entry, "lr": SAME} for label, entry in entries.items()}
        same["self-fl-augmented.same"] = {**AUGMENTED, "lr": SAME, "before": warm}
        shared = [*warm, stage(rounds, SAME, "uniform")]
        same["finetune.same"] = {"method": "finetune", **LOCAL_EPOCH, "lrs": [SAME], "before": shared}
        knobs["finetune"] = {**LOCAL_EPOCH, "lrs": RATES}
        methods += [*same, "finetune"]
        entries |= same
    base = {
        "metric": "loss",
        "evaluate_every": rounds,
        "data": {
            "source": "speech-commands",
            "options": {"clients": "devices", "states": True, "per_device": 1 if name == "devices" else 4},
        },
        "split": {"fractions": [0.5, 0.1, 0.4]},
        "cohort": {} if name == "devices" else {"size": round(20 * rate)},
    }
    tried: dict[str, dict[str, list[Any]]] = {label: {} for label in methods}
    if name == "devices":
        tried |= {label: {"lr": RATES} for label in DEVICES} | {"ditto": {"lr": RATES, "lam": [0.1, 1.0]}}
    return Comparison(
        base, folder / name, tuple(methods), tuple(range(seeds)), rounds,
        knobs=knobs, grid=tried, entries=entries, **rest,
    )  # fmt: skip


def stage(rounds: int, lr: float, weighting: str) -> dict[str, Any]:
    """FedAvg, with every knob that it could take over from the entry it stands before: so all share what it trains."""
    return {"method": "fedavg", "rounds": rounds, "lr": lr, "epochs": 1, "weighting": weighting}


# -- false accepts -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Heard:
    """Query clips of every device type, in every state it knows."""

    pictures: dict[tuple[str, str], torch.Tensor]
    wanted: dict[str, NDArray[np.bool_]]

    @classmethod
    def of(cls, experiment: Experiment, clips: Clips) -> "Heard":
        population, query = experiment.population, experiment.split.test.query
        pictures, wanted = {}, {}
        for place, device in enumerate(population.groups):
            members = query.clients[population.group[query.clients] == place]
            rows = torch.from_numpy(query.of(members)[0])
            places = population.columns["clip"][rows].numpy()
            wanted[device] = population.columns["y"][rows].numpy() == 1
            for number, state in enumerate(STATES):
                if state != "alarm" or device not in SILENT_ALARM:
                    pictures[device, state] = torch.from_numpy(clips.pictures[number][places])
        return cls(pictures, wanted)

    def scores(self, experiment: Experiment, params: Params, device: str, state: str) -> NDArray[np.float64]:
        """How much likelier the wake word is than another, as a logarithm."""
        with torch.no_grad():
            outputs = experiment.task.predict(params, {"x": self.pictures[device, state]})
        return (outputs[:, 1] - outputs[:, 0]).double().numpy()


def measure(folder: Path, population: Population, clips: Clips, states: tuple[str, ...]) -> list[dict[str, Any]]:
    """Counts of every run: the global model's, and (with a client per device type) the personal ones'."""
    found, bench = [], Bench(population)
    for path in sorted((folder / "runs").iterdir()):
        opened, config = open_run(path)
        experiment = bench.build(config)
        heard = Heard.of(experiment, clips)
        last = experiment.stages[-1].method
        checkpoint = opened.latest()
        assert checkpoint is not None
        shared = checkpoint.server["params"] if checkpoint.round < 0 else last.params(checkpoint.server)
        # what the first stage after the warm start began with; fine-tuning is a stage later, so another run is asked
        origin = open_run(path.with_name(f"self-fl-seed{experiment.seed}"))[0]
        baseline = origin.beginning(len(WARM)).server["params"]
        models: dict[tuple[str, str], Params] = {}
        for place, device in enumerate(population.groups):
            models["global", device] = shared
            if len(population) == len(population.groups):
                models["personal", device] = personal_model(opened, experiment, place)[0]
        for (kind, device), params in models.items():
            for state in states:
                if (device, state) not in heard.pictures:
                    continue
                theirs = heard.scores(experiment, baseline, device, state)
                mine = heard.scores(experiment, params, device, state)
                both = relative(mine, theirs, heard.wanted[device], REJECTS)
                found.append({
                    "comparison": folder.name, "label": experiment.label, "seed": experiment.seed, "model": kind,
                    "device": device, "state": state, "accepts": both.model.accepts, "rejects": both.model.rejects,
                    "baseline_accepts": both.baseline.accepts, "baseline_rejects": both.baseline.rejects,
                    "wanted": both.model.wanted, "others": both.model.others,
                })  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/self-fl-wake-word"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time (default: one for each core)")
    arguments = parser.parse_args()
    began = time.monotonic()
    clips, counts, about, lr = read_clips(), [], {}, SAME
    for name in ("devices", *SAMPLED_ROUNDS):
        with Bars(f"wake word: {name}") as bars, bars.stopping() as stop:
            asked = comparison(name, arguments.out, arguments.seeds, lr, jobs=arguments.jobs, progress=bars, stop=stop)
            folder = asked.run()
        compared = json.loads((folder / "compare.json").read_text())
        about[name] = {
            "clients": compared["data"]["clients"],
            "rounds": asked.rounds,
            "model": compared["model"],
            "query_rows": compared["split"]["query_rows"],
            "chosen": {method["label"]: method["chosen"] for method in compared["methods"] if method["chosen"]},
        }
        lr = about["devices"]["chosen"]["self-fl"]["lr"]
        population = load_population(asked.plan.config(asked.methods[0], 0, {}))
        counts += measure(folder, population, clips, tuple(STATES))
    partial = arguments.out / ".false_accepts.parquet.partial"
    pd.DataFrame(counts).to_parquet(partial, index=False)
    settle(partial, arguments.out / "false_accepts.parquet")
    settings = {"rejects": REJECTS, "rates": RATES, "same": SAME, "warm": {str(lr): n for lr, n in WARM.items()}}
    seconds = round(time.monotonic() - began)
    write_text(
        arguments.out / "wake_word.json",
        json.dumps(
            {"settings": settings, "seeds": arguments.seeds, "comparisons": about, "seconds": seconds}, indent=1
        ),
    )
    print(f"wrote {arguments.out / 'false_accepts.parquet'} after {seconds} s")


if __name__ == "__main__":
    program(main)
