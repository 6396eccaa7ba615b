"""Runs the analyses of `bespoke analyze` on finished runs; each writes one file into the run's `analysis/`.

An analysis that is there already is not made again; one that was interrupted has left nothing behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bespoke.analysis.choosers import check_choosers, choosers
from bespoke.analysis.crossed import check_crossed, crossed
from bespoke.analysis.embeddings import check_embeddings, embeddings
from bespoke.analysis.fewer import check_examples, check_fewer, fewer_examples, number_of_examples
from bespoke.analysis.measured import Found
from bespoke.analysis.ood import check_ood, out_of_distribution
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished, reopened
from bespoke.analysis.smaller import check_smaller, smaller_tests
from bespoke.analysis.sweep import check_sweep, parse_sweep, sweep
from bespoke.data.population import Population
from bespoke.errors import UserError
from bespoke.experiment.loading import load_population
from bespoke.plain import JsonObject
from bespoke.runs.events import Progress, Silent
from bespoke.runs.finished import open_run
from bespoke.statistics.analyses import ANALYSIS_FORMAT, AnalysisRecord
from bespoke.statistics.candidates import axes_of, settings_of
from bespoke.statistics.folders import read_study
from bespoke.statistics.formatting import jsonable
from bespoke.storage import Columns, settle, write_text

FRACTIONS = (1.0, 0.5, 0.25)
OTHERS = 500  # rows of other clients


@dataclass(frozen=True)
class Wanted:
    """Which analyses to make. Without any named, all that apply are made."""

    ood: bool = False
    rows: int = OTHERS
    fractions: tuple[float, ...] = ()
    sweeps: tuple[str, ...] = ()
    per_client: bool = False
    embeddings: bool = False
    numbers: tuple[int, ...] = ()  # of examples to personalize with, 0 for all: made only if named
    crossed: bool = False  # made only if named
    tests: tuple[float, ...] = ()  # fractions of the rows to be tested on

    @property
    def everything(self) -> bool:
        return not (
            self.ood or self.fractions or self.sweeps or self.per_client or self.embeddings or self.numbers
            or self.crossed or self.tests
        )  # fmt: skip


def wanted_again(records: Sequence[AnalysisRecord]) -> Wanted:
    """The request that produced these records."""
    asked = {record["analysis"]: record["asked"] for record in records}
    sweeps = [a for name, a in asked.items() if name.startswith("sweep-")]
    return Wanted(
        ood="ood" in asked,
        rows=asked.get("ood", {}).get("rows", OTHERS),
        fractions=tuple(asked.get("fewer-examples", {}).get("fractions", ())),
        sweeps=tuple(f"{a['knob']}={','.join(map(str, a['values']))}".removesuffix("=") for a in sweeps),
        per_client="per-client" in asked,
        embeddings="embeddings" in asked,
        numbers=tuple(asked.get("examples", {}).get("numbers", ())),
        crossed="crossed" in asked,
        tests=tuple(asked.get("smaller-tests", {}).get("fractions", ())),
    )


@dataclass(frozen=True)
class _Job:
    """One analysis of one run."""

    name: str
    asked: JsonObject
    check: Callable[[], None]  # whether it applies, before a single model is made
    make: Callable[[Candidates], Found] | None = None
    without_models: Callable[[], Found] | None = None  # instead of make: what needs no personal models


@dataclass
class Analyses:
    """The requested analyses of some runs."""

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

    def run(self) -> list[AnalysisRecord]:
        """Makes the missing analyses. Returns all records, including those that existed before."""
        for text in self.wanted.sweeps:
            parse_sweep(text)  # what cannot be read is said before anything is loaded
        populations: dict[str, Population] = {}
        records: list[AnalysisRecord] = []
        refused: list[DoesNotApply] = []
        for path in self.runs:
            _, config = open_run(path)
            key = config.data.model_dump_json() + config.model.pretrained  # which reads tokens of its own
            if key not in populations:
                populations = {key: load_population(config)}  # one at a time: runs of a comparison share theirs
            with reopened(path, populations[key], self.progress, self.stop) as opened:
                records += self._of(opened, refused)
        if not records:
            if len(self.runs) == 1:
                raise refused[0]
            raise UserError(f"{refused[-1]}; nor does it apply to another of the {len(self.runs)} runs")
        return records

    def _of(self, run: Finished, refused: list[DoesNotApply]) -> list[AnalysisRecord]:
        records: list[AnalysisRecord] = []
        for job in self._jobs(run):
            record = _kept(run.path, job.name, job.asked)
            if record is None:
                try:
                    job.check()
                    record = _made(run, job)
                except DoesNotApply as reason:
                    refused.append(reason)
                    if not (self.lenient or self.wanted.everything):
                        raise
                    continue
            records.append({**record, "folder": str(run.path)})
        return records

    def _jobs(self, run: Finished) -> list[_Job]:
        wanted, every = self.wanted, self.wanted.everything
        jobs = []
        if wanted.ood or every:
            rows = wanted.rows
            jobs.append(
                _Job("ood", {"rows": rows}, partial(check_ood, run), lambda c: out_of_distribution(run, c, rows))
            )
        if wanted.fractions or every:
            parts = wanted.fractions or FRACTIONS
            asked: JsonObject = {"fractions": list(parts)}
            jobs.append(
                _Job("fewer-examples", asked, partial(check_fewer, run), lambda c: fewer_examples(run, c, parts))
            )
        if wanted.tests or every:
            cut = wanted.tests or FRACTIONS
            asked = {"fractions": list(cut)}
            jobs.append(_Job("smaller-tests", asked, partial(check_smaller, run), lambda c: smaller_tests(run, c, cut)))
        if numbers := wanted.numbers:
            asked = {"numbers": list(numbers)}
            without = partial(number_of_examples, run, numbers)
            jobs.append(_Job("examples", asked, partial(check_examples, run), without_models=without))
        for text in wanted.sweeps or (_own_sweeps(run) if every else ()):
            _, knob, values = parse_sweep(text)
            asked = {"knob": knob, "values": list(values)}
            jobs.append(_Job(f"sweep-{knob}", asked, partial(check_sweep, run, text), partial(sweep, run, text=text)))
        if wanted.per_client or every:
            jobs.append(_Job("per-client", {}, partial(check_choosers, run), partial(choosers, run)))
        if wanted.embeddings or every:
            jobs.append(_Job("embeddings", {}, partial(check_embeddings, run), without_models=partial(embeddings, run)))
        if wanted.crossed:
            jobs.append(_Job("crossed", {}, partial(check_crossed, run), without_models=partial(crossed, run)))
        return jobs


def _made(run: Finished, job: _Job) -> AnalysisRecord:
    """Makes an analysis and writes it to disk."""
    numbers, table = (
        job.make(run.candidates()) if job.make else job.without_models() if job.without_models else ({}, {})
    )
    experiment = run.experiment
    found = {
        "format": ANALYSIS_FORMAT, "analysis": job.name, "asked": job.asked, "label": experiment.label,
        "seed": experiment.seed, "metric": experiment.metric, "lower_is_better": experiment.lower_is_better,
        "clients": len(run.clients), "protocol": experiment.split.kind,
        "trained": any(stage.rounds for stage in experiment.stages), **numbers,
    }  # fmt: skip
    record: AnalysisRecord = jsonable(found, 8)
    place = run.path / "analysis"
    place.mkdir(exist_ok=True)
    _write_table(place / f"{job.name}.parquet", table)
    write_text(place / f"{job.name}.json", json.dumps(record, indent=1, allow_nan=False))  # last: it says that all is
    return record


def _own_sweeps(run: Finished) -> tuple[str, ...]:
    """The knobs along which the run has candidates."""
    method: Any = run.method
    if method.trains:
        return ()
    names = method.candidates()[1:]
    words = [w for w in axes_of(names) if len({settings_of(name).get(w) for name in names}) > 1]
    return tuple(knob for word in words for knob in (word, f"{word}s") if hasattr(method, knob))


def _kept(path: Path, name: str, asked: JsonObject) -> AnalysisRecord | None:
    """The analysis in the folder, if it answers the same request."""
    place = path / "analysis" / f"{name}.json"
    try:
        record = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(record, dict) and record.get("format") == ANALYSIS_FORMAT
    return record if known and record.get("asked") == jsonable(asked, 8) else None


def _write_table(path: Path, columns: Columns) -> None:
    import pyarrow
    from pyarrow import parquet

    temporary = path.with_name(f".{path.name}.partial")
    parquet.write_table(pyarrow.table(columns), temporary)
    settle(temporary, path)
