"""A campaign: numbered tries in a few processes, their verdicts appended to a log, failures kept."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

from bespoke.cli.console import print_error


@dataclass(frozen=True)
class Verdict:
    """What became of a try: its kind and story, and what was wrong, if anything."""

    kind: str
    story: str
    problem: str = ""
    refused: bool = False  # the input was refused, as bad input should be
    said: str = ""  # what the commands said, kept of failures


Attempt = Callable[[random.Random, int, Path, Path], Verdict]  # (chances, number, its folder, the references' folder)


@dataclass(frozen=True)
class Campaign:
    """The tries of one part, under a folder in which its log and its failures lie."""

    part: str
    attempt: Attempt
    folder: Path
    seed: int = 0

    def name(self, number: int) -> str:
        return f"{self.part}-{self.seed}-{number}"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.part}.jsonl"

    def records(self) -> dict[str, dict[str, object]]:
        """The last verdict of each try, by its id."""
        if not self.log.exists():
            return {}
        lines = (json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines())
        return {line["id"]: line for line in lines}

    def run(self, count: int, lanes: int, minutes: float, again: bool) -> None:
        """Make the tries below `count` that are not done; with `again` those that failed, once more."""
        done = self.records()
        todo = [n for n in range(count) if self.name(n) not in done or (again and done[self.name(n)]["problem"])]
        self.folder.mkdir(parents=True, exist_ok=True)
        began, failed = time.monotonic(), 0
        with open(self.log, "a", encoding="utf-8") as log:
            for place, record in enumerate(self._made(todo, lanes, minutes), 1):
                log.write(json.dumps(record) + "\n")
                log.flush()
                failed += bool(record["problem"])
                if record["problem"]:
                    print_error(f"{record['id']}: {record['kind']}: {record['problem']}")
                if place % 50 == 0 or place == len(todo):
                    print_error(
                        f"{self.part}: {place} of {len(todo)} tries, {failed} failed, {time.monotonic() - began:.0f} s"
                    )

    def _made(self, todo: list[int], lanes: int, minutes: float) -> Iterator[dict[str, object]]:
        """The records of these tries, as they come; none is begun after so many minutes."""
        deadline, waiting = time.monotonic() + 60 * minutes, iter(todo)
        with ProcessPoolExecutor(lanes, multiprocessing.get_context("fork")) as pool:  # before any thread is started
            running: set[Future[dict[str, object]]] = set()
            while True:
                while len(running) < lanes and time.monotonic() < deadline and (n := next(waiting, None)) is not None:
                    running.add(pool.submit(self.one, n))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (each.result() for each in ended)

    def one(self, number: int, keep: bool = False) -> dict[str, object]:
        """Make one try; its folder is kept if it failed, or if that is asked for."""
        name, began, used = self.name(number), time.monotonic(), _used()
        folder = self.folder / "work" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        verdict = self.attempt(random.Random(name), number, folder, self.references)
        if verdict.problem or keep:
            kept = self.folder / "failures" / name
            shutil.rmtree(kept, ignore_errors=True)
            kept.parent.mkdir(exist_ok=True)
            folder.rename(kept)
            (kept / "said.txt").write_text(f"{verdict.story}\n{verdict.problem}\n{verdict.said}", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        record = {name: value for name, value in asdict(verdict).items() if name != "said"}
        return {
            "id": name, **record, "seconds": round(time.monotonic() - began, 3), "core": round(_used() - used, 3),
        }  # fmt: skip

    @property
    def references(self) -> Path:
        """Uninterrupted runs to compare with; made by whoever needs one first, of the code as it is now."""
        return self.folder / "references"


def _used() -> float:
    """Seconds of a core that this process and its children have used."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
