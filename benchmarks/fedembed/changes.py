"""Preferences that change and a sub-population that joins late: each method on one page of figures.

    python benchmarks/fedembed/changes.py --out runs/fedembed-changes

Runs changes.toml as a comparison (which continues where it was stopped). Draws, round by round, the accuracy of users
whose preference changed, of users whose preference did not, and of users who joined late: changes.html in the folder.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from bespoke.cli.exit_codes import program
from bespoke.cli.progress import Bars
from bespoke.report.figure_page import Section, Table, line, plot, write_study
from bespoke.report.figures import Figure
from bespoke.report.page import write_report
from bespoke.study.comparison import Comparison

HERE = Path(__file__).parent
COMMAND = "python benchmarks/fedembed/changes.py"
STAYED, CHANGED, LATE = "did not change", "changed", "came late"
THERE = "were there"  # before the late ones: of both other kinds
BACK = 0.03  # accuracy: as close to what it was counts as being back
LOOKS = {
    "Global": ("m0", "solid"), "FedRep": ("m5", "dot"), "PFedMe": ("m4", "dot"), "PFedKM": ("m0", "dot"),
    "FedEmbed-Personal": ("m6", "solid"), "FedEmbed-SOM": ("m3", "solid"), "FedEmbed-Prototype": ("m2", "solid"),
    "FedEmbed-Type": ("m1", "solid"),
}  # fmt: skip
LEAD = (
    "Users of MNIST who each like one digit. After a while some come to like another; later the users of two digits "
    "join whom nobody has seen before. How deep does each method fall, how soon is it back, what do the late ones "
    "reach, and do the others lose by it?"
)

Means = dict[str, float]  # by kind of user
Points = list[tuple[int, bool, Means]]  # (rounds done, whether rows have just changed, means), in order


def kind_of(user: str, late: int) -> str:
    """What becomes of a user, by its name: 3to7-00042 changes, and users of the last digits come late."""
    likes = user.split("-")[0]
    if "to" in likes:
        return CHANGED
    return LATE if int(likes) >= 10 - late else STAYED


@dataclass(frozen=True)
class Changes:
    """A finished folder of this benchmark."""

    folder: Path

    @cached_property
    def about(self) -> dict[str, Any]:
        return json.loads((self.folder / "compare.json").read_text())

    @cached_property
    def options(self) -> dict[str, Any]:
        """Of the source: who changes, who comes late, and when."""
        import tomllib

        run = next(iter(sorted((self.folder / "runs").iterdir())))
        return tomllib.loads((run / "config.toml").read_text())["data"]["options"]

    @property
    def labels(self) -> list[str]:
        return [entry["label"] for entry in self.about["methods"]]

    def points(self, label: str) -> Points:
        """The learning curve, the mean over seeds; at a change twice: on the rows before it, and on those after."""
        found: dict[tuple[int, bool], list[Means]] = defaultdict(list)
        for seed in self.about["seeds"]:
            path = self.folder / "runs" / f"{label}-seed{seed}" / "rounds.jsonl"
            for entry in map(json.loads, path.read_text().splitlines()):
                if "change" in entry:
                    found[entry["round"] - 1, True].append(self._means(entry["change"]["watched"]))
                if "watched" in entry:
                    found[entry["round"], False].append(self._means(entry["watched"]))
        return [(*moment, _mean(seeds)) for moment, seeds in sorted(found.items())]

    def _means(self, watched: dict[str, float]) -> Means:
        by_kind: dict[str, list[float]] = defaultdict(list)
        for user, value in watched.items():
            kind = kind_of(user, self.options["late"])
            for name in (kind,) if kind == LATE else (kind, THERE):
                by_kind[name].append(value)
        return {kind: fmean(values) for kind, values in by_kind.items()}

    # -- what is said of a method ----------------------------------------------------------------------------------
    def at(self, label: str, rounds: int, changed: bool = False) -> Means:
        return next(means for done, new, means in self.points(label) if (done, new) == (rounds, changed))

    def back(self, label: str, kind: str, change: int, end: int) -> int | None:
        """How many rounds after a change its users are where they were before it; None: not until the end."""
        before = self.at(label, change)[kind] - BACK
        later = (done - change for done, new, means in self.points(label)
                 if change <= done <= end and (done > change or new) and means[kind] >= before)  # fmt: skip
        return next(later, None)

    def change_table(self) -> Table:
        """Of the users who changed and of those who did not: before, at once, and when the next thing happens."""
        change, end = self.options["change_after"], self.options["late_after"]
        rows = [
            ["method", "changed: before", "at once", "back after", f"round {end}", "others: before", f"round {end}"]
        ]
        for label in self.labels:
            before, after, later = self.at(label, change), self.at(label, change, True), self.at(label, end)
            rounds = self.back(label, CHANGED, change, end)
            back = "–" if rounds is None else "at once" if not rounds else f"{rounds} rounds"
            rows.append([
                label, f"{before[CHANGED]:.3f}", f"{after[CHANGED]:.3f}", back, f"{later[CHANGED]:.3f}",
                f"{before[STAYED]:.3f}", f"{later[STAYED]:.3f}",
            ])  # fmt: skip
        return rows

    def late_table(self) -> Table:
        """Of the users who joined late and of those who were there."""
        change, every = self.options["late_after"], self.about["methods"][0]["stages"][-1]["rounds"]
        first = next(done for done, _, _ in self.points(self.labels[0]) if done > change)
        rows = [["method", "late: on arrival", f"round {first}", f"round {every}", "others: before", f"round {every}"]]
        for label in self.labels:
            before, arrived = self.at(label, change), self.at(label, change, True)
            soon, end = self.at(label, first), self.at(label, every)
            rows.append([
                label, f"{arrived[LATE]:.3f}", f"{soon[LATE]:.3f}", f"{end[LATE]:.3f}",
                f"{before[THERE]:.3f}", f"{end[THERE]:.3f}",
            ])  # fmt: skip
        return rows

    def figure(self, kind: str) -> Figure:
        traces = []
        for label in self.labels:
            here = [(done, means[kind]) for done, _, means in self.points(label) if kind in means]
            colour, dash = LOOKS.get(label, ("m0", "dash"))
            traces.append(line(label, [x for x, _ in here], [round(y, 4) for _, y in here], colour, dash,
                               hovertemplate="%{y:.3f}"))  # fmt: skip
        rules = [
            {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1}}
            for x in (self.options["change_after"], self.options["late_after"])
        ]
        return plot(traces, "round", "accuracy", f"accuracy of users who {kind}", 400, shapes=rules)

    def sections(self) -> Iterator[Section]:
        change, late = self.options["change_after"], self.options["late_after"]
        yield Section(
            "Preferences change",
            f"After round {change}, {self.options['change']:.0%} of the users who like one of the first "
            f"{10 - self.options['late']} digits like another of these; they have other images from then on.",
            [
                ("changed", self.figure(CHANGED), "Users who changed; at a change the curve drops straight down."),
                ("stayed", self.figure(STAYED), "Users who did not change."),
            ],
            [self.change_table()],
            [f"Back: within {BACK} of what it was before the change. Mean over {len(self.about['seeds'])} seeds."],
        )
        yield Section(
            "A sub-population comes late",
            f"After round {late} the users of {self.options['late']} more digits join.",
            [("late", self.figure(LATE), "Users who came late, from the moment they are there.")],
            [self.late_table()],
            command=COMMAND,
        )


def _mean(seeds: list[Means]) -> Means:
    return {kind: fmean([means[kind] for means in seeds]) for kind in seeds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/fedembed-changes"))
    parser.add_argument("--methods", nargs="+", help="some of the methods")
    parser.add_argument("--seeds", type=int, help="how many (default: as changes.toml says)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    arguments = parser.parse_args()
    found = Comparison.read(HERE / "changes.toml", arguments.out, command=COMMAND)
    found.jobs = arguments.jobs
    found.seeds = tuple(range(arguments.seeds)) if arguments.seeds else found.seeds
    found.methods = tuple(m for m in found.methods if not arguments.methods or m in arguments.methods)
    with Bars("preferences that change") as bars, bars.stopping() as stop:
        found.progress, found.stop = bars, stop
        found.run()
    write_report([found.folder], found.folder / "report.html")
    page = found.folder / "changes.html"
    title = "Preferences that change, users who come late"
    print(f"Page: {write_study(page, title, LEAD, list(Changes(found.folder).sections()))}")


if __name__ == "__main__":
    program(main)
