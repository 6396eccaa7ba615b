"""FedEmbed's MNIST experiment by one command: Tables 2 and 4, the confusion matrices of Figure 3, t-SNE as in Figure 4.

    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist
    python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist --privacy gaussian.toml

One comparison folder each for balanced and imbalanced users, without privacy and, given a file with a [privacy] table,
with it (`balanced-none`, `imbalanced-gaussian`, ...); every folder has its report.html. What is finished is kept, so
that the command goes on where it was stopped, and adds the columns with privacy to those without.
"""

import argparse
import time
import tomllib
from pathlib import Path
from typing import Any

from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.comparison import Comparison
from bespoke.config import read_toml
from bespoke.reports.html import write_report

HERE = Path(__file__).parent
USERS = ("balanced", "imbalanced")
NO_KINDS = "FedEmbed-Type without kinds"  # Figure 4(a); 4(b) is FedEmbed-Type itself


def comparison(folder: Path, users: str, privacy: dict[str, Any], arguments: argparse.Namespace) -> Comparison:
    found = Comparison.read(HERE / "mnist.toml", folder, command=f"python benchmarks/fedembed/mnist.py --only {users}")
    number = {"number": arguments.number} if arguments.number else {}
    options = {**found.base["data"]["options"], "users": users, **number}
    found.base = {**found.base, **privacy, "data": {**found.base["data"], "options": options}}
    found.jobs = arguments.jobs
    found.rounds = arguments.rounds or found.rounds
    found.seeds = tuple(range(arguments.seeds)) if arguments.seeds else found.seeds
    found.methods = tuple(m for m in found.methods if not arguments.methods or m in arguments.methods)
    paper = tomllib.loads((HERE / "paper.toml").read_text())
    column = "gaussian" if privacy else "none"
    numbers = {m: row[column] for m, row in paper["table2"][users].items()}
    found.expected = {m: {"mean": mean, "sd_seeds": spread} for m, (mean, spread) in numbers.items()}
    found.expected["source"] = paper["source"]
    return found


def finish(folder: Path) -> None:
    """Look at the embeddings, and write the page."""
    Analyses.of([folder], Wanted(embeddings=True)).run()
    print(f"Report: {write_report([folder], folder / 'report.html')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/fedembed-mnist"))
    parser.add_argument("--privacy", type=Path, help="a TOML file with a [privacy] table: the columns with privacy too")
    parser.add_argument("--only", choices=USERS, help="one kind of users")
    parser.add_argument("--methods", nargs="+", help="some of the methods")
    parser.add_argument("--seeds", type=int, help="how many (default: as mnist.toml says)")
    parser.add_argument("--number", type=int, help="of users (default: as mnist.toml says; the paper has 9,000)")
    parser.add_argument("--rounds", type=int, help="of training (default: as mnist.toml says)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    arguments = parser.parse_args()
    columns: dict[str, dict[str, Any]] = {"none": {}}
    if arguments.privacy:
        columns["gaussian"] = read_toml(arguments.privacy)
    for column, privacy in columns.items():
        for users in (arguments.only,) if arguments.only else USERS:
            begun = time.monotonic()
            folder = arguments.out / f"{users}-{column}"
            comparison(folder, users, privacy, arguments).run()
            finish(folder)
            print(f"{folder.name}: {(time.monotonic() - begun) / 60:.0f} minutes")
    if not arguments.methods and arguments.only != "imbalanced":
        plain = comparison(arguments.out / "without-kinds", "balanced", {}, arguments)
        plain.entries = {NO_KINDS: {**plain.entries["FedEmbed-Type"], "kinds": 0.0}}
        plain.methods, plain.seeds, plain.expected = (NO_KINDS,), plain.seeds[:1], {}
        plain.run()
        finish(plain.folder)


if __name__ == "__main__":
    main()
