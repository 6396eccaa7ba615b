"""The common part of FedEmbed's two experiments: nine methods, balanced and imbalanced users, with and without privacy.

There is one comparison folder for each kind of users, without privacy and with it (`balanced-none`,
`imbalanced-gaussian`, ...). Every folder has its report.html. `--columns clients` adds the columns with noise on the
clients too (`balanced-clients`). `--figures` trains only the methods with embeddings, at the rates of figures.toml
(`figures`). `--curves` makes the same comparisons with one seed and 16 training rows instead of 20, so that the other 4
give a validation curve (`curves-balanced-none`, ...). docs/results.md needs these curves to say which methods still
improved, and judges no claim without them. Finished parts are kept, so a command continues where it was stopped.
"""

import argparse
import json
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bespoke.analysis.analyze import Analyses, Wanted
from bespoke.cli.progress import Bars
from bespoke.errors import UserError
from bespoke.experiment.reading import read_toml
from bespoke.report.page import write_report
from bespoke.study.comparison import Comparison

HERE = Path(__file__).parent
USERS = ("balanced", "imbalanced")
COLUMNS = ("none", "gaussian", "clients")
WITH_VALIDATION = {"order": "stored", "fractions": [16 / 30, 4 / 30, 10 / 30]}  # of a user's 30 rows
NO_KINDS = "FedEmbed-Type without kinds"  # Figure 4(a); 4(b) is FedEmbed-Type itself
FULL_USERS, FULL_ROUNDS = 9000, 900  # of the paper's size: everyone trains six times, 60 in a round
FULL = ("Global", "FedRep", "FedEmbed-Personal", "FedEmbed-Prototype", "FedEmbed-Type")


@dataclass(frozen=True)
class Experiment:
    """NAME.toml, and where its numbers stand in the paper."""

    name: str
    table: str  # of paper.toml: F1 by users, method and privacy
    privacy: Path  # a file with a [privacy] table: the columns with privacy
    clients: Path | None = None  # another, with noise on the clients too
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
        column = "gaussian" if privacy else "none"  # the paper does not say where its noise is
        numbers = {method: row[column] for method, row in paper[self.table][users].items()}
        found.expected = {method: {"mean": mean, "sd_seeds": spread} for method, (mean, spread) in numbers.items()}
        found.expected["source"] = paper["source"]
        return found

    def figures(self, folder: Path, asked: argparse.Namespace) -> Comparison:
        """The methods with embeddings, at the rates chosen by what embeddings tell: balanced users, no privacy."""
        found = self.comparison(folder, "balanced", {}, asked)
        found.command = f"python benchmarks/fedembed/{self.name}.py --figures"
        rates = tomllib.loads((HERE / "figures.toml").read_text())[self.name]
        found.entries = {
            label: {**entry, **({"embedding_lr": rates[label]} if label in rates else {})}
            for label, entry in found.entries.items()
            if entry["method"] == "fedembed"
        }
        if self.without_kinds:
            found.entries[NO_KINDS] = {**found.entries["FedEmbed-Type"], "kinds": 0.0}
        found.methods = tuple(m for m in found.entries if not asked.methods or m in asked.methods)
        found.grid, found.expected = {}, {}
        return found

    def run(self, asked: argparse.Namespace) -> None:
        if asked.figures:
            return self.make(self.figures(asked.out / "figures", asked), asked)
        files = {"none": None, "gaussian": asked.privacy, "clients": self.clients}
        if "clients" in asked.columns and self.clients is None:
            raise UserError(f"--columns clients: {self.name} has no file for noise on the clients")
        for column in asked.columns:
            privacy = read_toml(path) if (path := files[column]) is not None else {}
            for users in (asked.only,) if asked.only else USERS:
                begun = time.monotonic()
                folder = asked.out / f"{users}-{column}"
                self.make(self.comparison(folder, users, privacy, asked), asked)
                print(f"{folder.name}: {(time.monotonic() - begun) / 60:.0f} minutes", flush=True)
        if self.without_kinds and "none" in asked.columns and not asked.methods and asked.only != "imbalanced":
            plain = self.comparison(asked.out / "without-kinds", "balanced", {}, asked)
            plain.entries = {NO_KINDS: {**plain.entries["FedEmbed-Type"], "kinds": 0.0}}
            plain.methods, plain.seeds, plain.expected = (NO_KINDS,), plain.seeds[:1], {}
            self.make(plain, asked)

    def make(self, comparison: Comparison, asked: argparse.Namespace) -> None:
        found = curves(comparison) if asked.curves else comparison
        made(found, f"{self.name}: {found.folder.name}")

    def arguments(self, about: str, arguments: list[str] | None = None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--out", type=Path, default=Path(f"runs/fedembed-{self.name}"))
        with_it = f"a TOML file with a [privacy] table (default: {self.privacy.name})"
        parser.add_argument("--privacy", type=Path, default=self.privacy, help=with_it)
        where = "privacy: none, noise on the sum, noise on the clients too (default: none gaussian)"
        parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS[:2], help=where)
        parser.add_argument("--figures", action="store_true", help="only what embeddings tell, at their chosen rates")
        told = "one seed of each, with rows to validate on: who had stopped improving"
        parser.add_argument("--curves", action="store_true", help=told)
        if self.clients is not None:
            told = (
                f"the paper's size: {FULL_USERS:,} balanced users, {FULL_ROUNDS} rounds, one seed, {len(FULL)} methods"
            )
            parser.add_argument("--full", action="store_true", help=told)
        parser.add_argument("--only", choices=USERS, help="one kind of users")
        parser.add_argument("--methods", nargs="+", help="some of the methods")
        parser.add_argument("--seeds", type=int, help=f"how many (default: as {self.name}.toml says)")
        parser.add_argument("--number", type=int, help=f"of users (default: as {self.name}.toml says)")
        parser.add_argument("--rounds", type=int, help=f"of training (default: as {self.name}.toml says)")
        parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
        asked = parser.parse_args(arguments)
        return self.full(asked) if getattr(asked, "full", False) else asked

    def full(self, asked: argparse.Namespace) -> argparse.Namespace:
        """The same at the paper's size; what was named besides --full stays as named."""
        given = {"number": FULL_USERS, "rounds": FULL_ROUNDS, "seeds": 1, "methods": list(FULL), "only": "balanced"}
        rest = {name: getattr(asked, name) or value for name, value in given.items()}
        small = Path(f"runs/fedembed-{self.name}")
        out = Path(f"{small}-full") if asked.out == small else asked.out
        return argparse.Namespace(**{**vars(asked), **rest, "out": out})


def evaluations(rounds: int) -> int:
    """Rounds between two points of a validation curve of seven points."""
    return max(rounds // 6, 1)


def curves(comparison: Comparison) -> Comparison:
    """The same comparison with one seed and validation rows."""
    comparison.folder = comparison.folder.with_name(f"curves-{comparison.folder.name}")
    comparison.command += " --curves"
    every = evaluations(comparison.rounds)
    comparison.base = {**comparison.base, "split": WITH_VALIDATION, "evaluate_every": every}
    comparison.seeds, comparison.expected = comparison.seeds[:1], {}
    return comparison


def made(comparison: Comparison, title: str) -> None:
    """Run it; look at the embeddings, where methods have them, and write the page."""
    with Bars(title) as bars, bars.stopping() as stop:
        comparison.progress, comparison.stop = bars, stop
        folder = comparison.run()
    about = json.loads((folder / "compare.json").read_text())
    if any(entry["name"] == "fedembed" for entry in about["methods"]):
        Analyses.of([folder], Wanted(embeddings=True)).run()
    print(f"Report: {write_report([folder], folder / 'report.html')}")
