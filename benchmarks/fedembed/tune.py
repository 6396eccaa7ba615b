"""Hyper-parameters of FedEmbed's experiments, chosen on validation rows.

    python benchmarks/fedembed/tune.py --out runs/fedembed-tuning
    python benchmarks/fedembed/tune.py --experiment voice --out runs/fedembed-tuning-voice

What is tried is [compare.grid] of mnist.toml or voice.toml, on 600 users and with a seed of their own: 16 of a user's
20 training rows are trained on and the other 4 judge; the 10 test rows are not looked at. Prints the best of each, to
be written into the file.
"""

import argparse
from pathlib import Path

from bespoke.api import tune
from bespoke.cli.endings import program
from bespoke.comparison import Comparison
from bespoke.entries import Entry

HERE = Path(__file__).parent
SEED = 100  # results are reported of others
USERS, ROUNDS = 600, 60  # everyone trains six times, as in the experiment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=("mnist", "voice"), default="mnist")
    parser.add_argument("--out", type=Path, default=Path("runs/fedembed-tuning"))
    parser.add_argument("--methods", nargs="+", help="some of the methods")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    asked = Comparison.read(HERE / f"{arguments.experiment}.toml", arguments.out)
    for label in arguments.methods or asked.methods:
        entry = Entry.of(label, asked.entries)
        experiment = {
            **asked.base,
            "seed": SEED,
            "evaluate_every": ROUNDS,
            "data": {**asked.base["data"], "options": {**asked.base["data"]["options"], "number": USERS}},
            "split": {"order": "stored", "fractions": [16 / 30, 4 / 30, 10 / 30]},
            "stage": entry.stages(entry.knobs, ROUNDS),
        }
        found = tune(
            experiment, arguments.out / label, jobs=arguments.jobs, space={entry.method.name: asked.grid[label]}
        )
        print(label, found["best"])
        for trial in found["trials"]:
            print("   ", trial)


if __name__ == "__main__":
    program(main)
