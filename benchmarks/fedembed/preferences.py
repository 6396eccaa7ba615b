"""What FedEmbed's two experiments have in common: nine methods, balanced and imbalanced users, privacy or none.

One comparison folder for each kind of users, without privacy and with it (`balanced-none`, `imbalanced-gaussian`, ...);
every folder has its report.html. What is finished is kept, so that a command goes on where it was stopped.
"""

import argparse
import json
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.comparison import Comparison
from bespoke.config import read_toml
from bespoke.progress import Bars
from bespoke.reports.html import write_report

HERE = Path(__file__).parent
USERS = ("balanced", "imbalanced")
NO_KINDS = "FedEmbed-Type without kinds"  # Figure 4(a); 4(b) is FedEmbed-Type itself


@dataclass(frozen=True)
class Experiment:
    """NAME.toml, and where its numbers stand in the paper."""

    name: str
    table: str  # of paper.toml: F1 by users, method and privacy
    privacy: Path  # a file with a [privacy] table: the columns with privacy
    without_kinds: bool = False  # FedEmbed-Type also without its k-way head, as in Figure 4(a)

    def comparison(self, folder: Path, users: str, privacy: dict[str, Any], asked: argparse.Namespace) -> Comparison:
        command = f"python benchmarks/fedembed/{self.name}.py --only {users}"
        found = Comparison.read(HERE / f"{self.name}.toml", folder, command=command)
        number = {"number": asked.number} if asked.number else {}
        options = {**found.base["data"]["options"], "users": users, **number}
        found.base = {**found.base, **privacy, "data": {**found.base["data"], "options": options}}
        found.jobs = asked.jobs
        found.rounds = asked.rounds or found.rounds
        found.seeds = tuple(range(asked.seeds)) if asked.seeds else found.seeds
        found.methods = tuple(m for m in found.methods if not asked.methods or m in asked.methods)
        paper = tomllib.loads((HERE / "paper.toml").read_text())
        column = "gaussian" if privacy else "none"
        numbers = {method: row[column] for method, row in paper[self.table][users].items()}
        found.expected = {method: {"mean": mean, "sd_seeds": spread} for method, (mean, spread) in numbers.items()}
        found.expected["source"] = paper["source"]
        return found

    def run(self, asked: argparse.Namespace) -> None:
        columns: dict[str, dict[str, Any]] = {"none": {}, "gaussian": read_toml(asked.privacy)}
        for column, privacy in columns.items():
            for users in (asked.only,) if asked.only else USERS:
                begun = time.monotonic()
                folder = asked.out / f"{users}-{column}"
                made(self.comparison(folder, users, privacy, asked), f"{self.name}: {folder.name}")
                print(f"{folder.name}: {(time.monotonic() - begun) / 60:.0f} minutes", flush=True)
        if self.without_kinds and not asked.methods and asked.only != "imbalanced":
            plain = self.comparison(asked.out / "without-kinds", "balanced", {}, asked)
            plain.entries = {NO_KINDS: {**plain.entries["FedEmbed-Type"], "kinds": 0.0}}
            plain.methods, plain.seeds, plain.expected = (NO_KINDS,), plain.seeds[:1], {}
            made(plain, f"{self.name}: {plain.folder.name}")

    def arguments(self, about: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--out", type=Path, default=Path(f"runs/fedembed-{self.name}"))
        with_it = f"a TOML file with a [privacy] table (default: {self.privacy.name})"
        parser.add_argument("--privacy", type=Path, default=self.privacy, help=with_it)
        parser.add_argument("--only", choices=USERS, help="one kind of users")
        parser.add_argument("--methods", nargs="+", help="some of the methods")
        parser.add_argument("--seeds", type=int, help=f"how many (default: as {self.name}.toml says)")
        parser.add_argument("--number", type=int, help=f"of users (default: as {self.name}.toml says)")
        parser.add_argument("--rounds", type=int, help=f"of training (default: as {self.name}.toml says)")
        parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
        return parser.parse_args()


def made(comparison: Comparison, title: str) -> None:
    """Run it; look at the embeddings, where methods have them, and write the page."""
    with Bars(title) as bars, bars.stopping() as stop:
        comparison.progress, comparison.stop = bars, stop
        folder = comparison.run()
    about = json.loads((folder / "compare.json").read_text())
    if any(entry["name"] == "fedembed" for entry in about["methods"]):
        Analyses.of([folder], Wanted(embeddings=True)).run()
    print(f"Report: {write_report([folder], folder / 'report.html')}")
