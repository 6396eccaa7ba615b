"""`bespoke analyze`: the analyses of Motley from finished run folders; each is one file in the run's `analysis/`.

An analysis that is there already is not made again; one that was interrupted has left nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.analysis.choosers import choosers
from bespoke.analysis.fewer import fewer_examples
from bespoke.analysis.finished import FORMAT, Candidates, DoesNotApply, Finished, reopened
from bespoke.analysis.ood import out_of_distribution
from bespoke.analysis.sweep import parse_sweep, sweep
from bespoke.data.arrays import settle, write_text
from bespoke.data.population import Population
from bespoke.deploy.personal import open_run
from bespoke.errors import UserError
from bespoke.experiments import load_population
from bespoke.metrics.candidates import axes_of, settings_of
from bespoke.metrics.clients import read_study
from bespoke.metrics.text import jsonable
from bespoke.rounds import Progress, Silent

FRACTIONS = (1.0, 0.5, 0.25)
OTHERS = 500  # rows of other clients

Made = tuple[dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class Wanted:
    """Which analyses; nothing named means all that apply."""

    ood: bool = False
    rows: int = OTHERS
    fractions: tuple[float, ...] = ()
    sweeps: tuple[str, ...] = ()
    per_client: bool = False

    @property
    def everything(self) -> bool:
        return not (self.ood or self.fractions or self.sweeps or self.per_client)


@dataclass
class Analyses:
    """The analyses asked for, of some runs."""

    runs: tuple[Path, ...]
    wanted: Wanted = Wanted()
    lenient: bool = False  # what does not apply to a run is passed over: it was not named by itself
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False

    @classmethod
    def of(cls, paths: Sequence[Path], wanted: Wanted, **rest: Any) -> Analyses:
        """Of run folders, or of all runs of comparison folders."""
        runs: list[Path] = []
        compared = False
        for path in paths:
            if (path / "compare.json").exists() or (path / "runs").is_dir():
                compared = True
                runs += [run.folder for run in read_study([path]).runs]
            else:
                runs.append(path)
        return cls(tuple(dict.fromkeys(runs)), wanted, compared or len(runs) > 1, **rest)

    def run(self) -> list[dict[str, Any]]:
        """Make what is missing; returns the records, those that were there already included."""
        for text in self.wanted.sweeps:
            parse_sweep(text)  # what cannot be read is said before anything is loaded
        populations: dict[str, Population] = {}
        records: list[dict[str, Any]] = []
        refused: list[DoesNotApply] = []
        for path in self.runs:
            _, config = open_run(path)
            key = config.data.model_dump_json()
            if key not in populations:
                populations = {key: load_population(config)}  # one at a time: runs of a comparison share theirs
            with reopened(path, populations[key], self.progress, self.stop) as opened:
                records += self._of(opened, refused)
        if not records:
            raise (
                refused[0]
                if len(refused) == 1 or not self.lenient
                else UserError(f"{refused[0]}; nor is there any other run here that it applies to")
            )
        return records

    def _of(self, run: Finished, refused: list[DoesNotApply]) -> list[dict[str, Any]]:
        wanted, every = self.wanted, self.wanted.everything
        jobs: list[tuple[str, dict[str, Any], Callable[[Candidates], Made]]] = []
        if wanted.ood or every:
            jobs.append(("ood", {"rows": wanted.rows}, lambda found: out_of_distribution(run, found, wanted.rows)))
        if wanted.fractions or every:
            fractions = wanted.fractions or FRACTIONS
            jobs.append(
                ("fewer-examples", {"fractions": list(fractions)}, lambda found: fewer_examples(run, found, fractions))
            )
        for text in wanted.sweeps or (_own_sweeps(run) if every else ()):
            _, knob, values = parse_sweep(text)
            asked = {"knob": knob, "values": list(values)}
            jobs.append((f"sweep-{knob}", asked, lambda found, text=text: sweep(run, found, text)))  # type: ignore[misc]
        if wanted.per_client or every:
            jobs.append(("per-client", {}, lambda found: choosers(run, found)))
        records = []
        for name, asked, make in jobs:
            record = _kept(run.path, name, asked)
            if record is None:
                try:
                    record = self._make(run, name, asked, make)
                except DoesNotApply as reason:
                    refused.append(reason)
                    if not (self.lenient or every):
                        raise
                    continue
            records.append({**record, "folder": str(run.path)})
        return records

    def _make(
        self, run: Finished, name: str, asked: dict[str, Any], make: Callable[[Candidates], Made]
    ) -> dict[str, Any]:
        if len(run.method.candidates()) < 2 and name == "ood":  # known without making a single model
            found = Candidates(run.method.candidates(), None, None, None)  # type: ignore[arg-type]
        else:
            found = run.candidates()
        numbers, table = make(found)
        experiment = run.experiment
        record = {
            "format": FORMAT, "analysis": name, "asked": asked, "label": experiment.label, "seed": experiment.seed,
            "metric": experiment.metric, "lower_is_better": experiment.lower_is_better, "clients": len(run.clients),
            "protocol": experiment.split.kind, **numbers,
        }  # fmt: skip
        record = jsonable(record, 8)
        place = run.path / "analysis"
        place.mkdir(exist_ok=True)
        _write_table(place / f"{name}.parquet", table)
        write_text(place / f"{name}.json", json.dumps(record, indent=1, allow_nan=False))  # last: it says that all is
        return record


def _own_sweeps(run: Finished) -> tuple[str, ...]:
    """The knobs along which the run has candidates."""
    method: Any = run.method
    if method.trains:
        return ()
    names = method.candidates()[1:]
    words = [w for w in axes_of(names) if len({settings_of(name).get(w) for name in names}) > 1]
    return tuple(knob for word in words for knob in (word, f"{word}s") if hasattr(method, knob))


def _kept(path: Path, name: str, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The analysis as it lies in the folder, if it is the one asked for."""
    place = path / "analysis" / f"{name}.json"
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = isinstance(record, dict) and record.get("format") == FORMAT and record.get("asked") == jsonable(asked, 8)
    return record if same else None


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    import pyarrow
    from pyarrow import parquet

    temporary = path.with_name(f".{path.name}.partial")
    parquet.write_table(pyarrow.table(columns), temporary)
    settle(temporary, path)
