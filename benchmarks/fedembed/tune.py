"""Hyper-parameters of FedEmbed's experiments, chosen on validation rows.

    python benchmarks/fedembed/tune.py --out runs/fedembed-tuning
    python benchmarks/fedembed/tune.py --experiment voice --out runs/fedembed-tuning-voice
    python benchmarks/fedembed/tune.py --embeddings --out runs/fedembed-embeddings

The program tries [compare.grid] of mnist.toml or voice.toml on 600 users with a separate seed: 16 of a user's 20
training rows train and the other 4 validate; the 10 test rows are not used. It prints the best values of each method,
which are then written into the file.

`--embeddings` chooses embedding_lr for Figures 3 to 5, which ask what embeddings know. F1 alone cannot choose it: with
heads of their own, users do as well if embeddings stay where they began. The rates 1, 10, 100 and 300 are tried, and
the rule is: of the rates whose validation F1 is within 0.02 of the highest, take the one whose embeddings agree best
with what users like (adjusted Rand index; of equal ones the smallest rate). 0.02 is the standard deviation over trials
that the paper prints for FedEmbed-Prototype. What a user likes shows in its training rows. The choice is written to
chosen.json; it belongs into figures.toml. Finished trials are kept, so that the command goes on where it was stopped.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from preferences import WITH_VALIDATION, evaluations

from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.api import tune
from bespoke.cli.exit_codes import program
from bespoke.experiment.variants import Entry
from bespoke.study.comparison import Comparison

HERE = Path(__file__).parent
SEED = 100  # results are reported of others
USERS, ROUNDS, COHORT = 600, 60, 60  # everyone trains six times, as in the experiment
RATES = (1.0, 10.0, 100.0, 300.0)  # of embeddings
ALLOWED = 0.02  # of F1, for embeddings that tell more


@dataclass(frozen=True)
class Tried:
    """One rate of embeddings: what its models score and what its embeddings know."""

    rate: float
    f1: float  # on validation rows
    agreement: float  # adjusted Rand index of clusters of embeddings and what users like
    recovered: float  # part of users whose preference is guessed from the embedding


def chosen(tried: Sequence[Tried], allowed: float = ALLOWED) -> Tried:
    """The rate with the best agreement among those whose F1 is at most `allowed` below the highest."""
    enough = max(one.f1 for one in tried) - allowed
    return max((one for one in tried if one.f1 >= enough), key=lambda one: (round(one.agreement, 2), -one.rate))


def experiment_of(asked: Comparison, label: str, users: int, rounds: int, cohort: int) -> dict[str, Any]:
    """A method of the comparison as one experiment, its training rows parted into 16 to train on and 4 to judge."""
    entry = Entry.of(label, asked.entries)
    data = asked.base["data"]
    return {
        **asked.base,
        "seed": SEED,
        "evaluate_every": evaluations(rounds),
        "data": {**data, "options": {**data["options"], "number": users}},
        "split": WITH_VALIDATION,
        "cohort": {**asked.base["cohort"], "size": cohort},
        "stage": entry.stages(entry.knobs, rounds),
    }


def embedding_rates(asked: Comparison, labels: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every rate of every method, and the one that the rule chooses."""
    found: dict[str, Any] = {}
    for label in labels:
        experiment = experiment_of(asked, label, arguments.users, arguments.rounds, arguments.cohort)
        space = {"fedembed": {"embedding_lr": list(RATES)}}
        folder = arguments.out / label
        trials = tune(experiment, folder, jobs=arguments.jobs, space=space)["trials"]
        tried = []
        for trial in (trial for trial in trials if trial["validation"] is not None):
            run = folder / trial["folders"][0]
            (record,) = Analyses.of([run], Wanted(embeddings=True)).run()
            (rate,) = trial["setting"].values()
            tried.append(Tried(rate, trial["validation"], record["agreement"], record["recovered"]))
        best = chosen(tried)
        found[label] = {"chosen": best.rate, "tried": [asdict(one) for one in tried]}
        print(f"{label}: embedding_lr = {best.rate:g}", flush=True)
        for one in tried:
            told = f"F1 {one.f1:.3f}, adjusted Rand index {one.agreement:.2f}, {100 * one.recovered:.0f} % guessed"
            print(f"    {one.rate:g}: {told}", flush=True)
        about = {"users": arguments.users, "rounds": arguments.rounds, "cohort": arguments.cohort, "seed": SEED}
        (arguments.out / "chosen.json").write_text(json.dumps({**about, "methods": found}, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", choices=("mnist", "voice"), default="mnist")
    parser.add_argument("--out", type=Path, default=Path("runs/fedembed-tuning"))
    parser.add_argument("--methods", nargs="+", help="some of the methods")
    parser.add_argument("--embeddings", action="store_true", help="the rate of embeddings, by F1 and by what they tell")
    parser.add_argument("--users", type=int, default=USERS, help=f"how many (default: {USERS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of training (default: {ROUNDS})")
    parser.add_argument("--cohort", type=int, default=COHORT, help=f"users in a round (default: {COHORT})")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    asked = Comparison.read(HERE / f"{arguments.experiment}.toml", arguments.out)
    if arguments.embeddings:
        embedded = [label for label in asked.methods if asked.entries[label]["method"] == "fedembed"]
        embedding_rates(asked, arguments.methods or embedded, arguments)
        return
    for label in arguments.methods or asked.methods:
        experiment = experiment_of(asked, label, arguments.users, arguments.rounds, arguments.cohort)
        space = {Entry.of(label, asked.entries).method.card.name: asked.grid[label]}
        found = tune(experiment, arguments.out / label, jobs=arguments.jobs, space=space)
        print(label, found["best"])
        for trial in found["trials"]:
            print("   ", trial)


if __name__ == "__main__":
    program(main)
