"""Reads finished runs from disk: their records, and one table of all their clients."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from bespoke.digests import check_finished, check_seal
from bespoke.errors import UserError
from bespoke.plain import JsonObject
from bespoke.records import RESULT_FORMAT, CompareRecord, LedgerLine, MethodRecord, RoundLine, RunRecord

if TYPE_CHECKING:
    import pandas as pd

_COUNTS = ("train_examples", "support_examples", "validation_examples", "query_examples")


@dataclass(frozen=True)
class FinishedRun:
    """One finished run folder: one method, one seed."""

    folder: Path
    label: str
    seed: int
    result: RunRecord
    logs: dict[str, list[JsonObject]] = field(default_factory=dict, repr=False, compare=False)  # those read so far

    @overload
    def lines(self, name: Literal["rounds.jsonl"]) -> list[RoundLine]: ...
    @overload
    def lines(self, name: Literal["ledger.jsonl"]) -> list[LedgerLine]: ...
    def lines(self, name: str) -> Any:
        """The records of `rounds.jsonl` or `ledger.jsonl`."""
        if name not in self.logs:
            self.logs[name] = self._lines(name)
        return self.logs[name]

    def _lines(self, name: str) -> list[JsonObject]:
        path = self.folder / name
        records = []
        for number, line in enumerate(_read_text(path).splitlines(), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number}, is not JSON ({error}). {_REPEAT}") from error
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}, is not a JSON object. {_REPEAT}")
            records.append(record)
        return records

    def largest_shares(self) -> dict[int, float]:
        """Round, counted through all stages -> share of its clients in the largest cluster; empty without clusters."""
        observed = ((number, line.get("observed") or {}) for number, line in numbered(self.lines("rounds.jsonl")))
        return {number: float(seen["largest_share"]) for number, seen in observed if "largest_share" in seen}

    def config(self) -> str:
        """The resolved experiment as it was written, or nothing if the folder has none."""
        path = self.folder / "config.toml"
        return _read_text(path) if path.exists() else ""


@dataclass(frozen=True)
class RunSet:
    """The runs to report on, and what `compare.json` says of them (empty for loose run folders)."""

    runs: tuple[FinishedRun, ...]
    compare: CompareRecord
    references: tuple[FinishedRun, ...] = ()  # what methods are held against but not ranked with: a constant, ...

    def entry(self, label: str) -> MethodRecord:
        """What compare.json says of a method; empty for loose run folders."""
        return next((e for e in self.compare.get("methods", []) if e.get("label") == label), MethodRecord())

    @property
    def labels(self) -> list[str]:
        """The methods in the order of compare.json, or as given."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def private(self) -> bool:
        """Whether any of it was run under [privacy]."""
        return bool(self.compare.get("privacy")) or any(run.result.get("privacy") for run in self.runs)


def numbered(lines: Iterable[RoundLine]) -> Iterator[tuple[int, RoundLine]]:
    """The lines of `rounds.jsonl` with their rounds counted through all stages."""
    before = last = 0
    stage: Any = None
    for line in lines:
        if line.get("stage") != stage:
            stage, before = line.get("stage"), last
        last = before + int(line.get("round") or 0)
        yield last, line


_REPEAT = "The folder is damaged: delete it and run the experiment again."


def read_study(paths: Sequence[Path]) -> RunSet:
    """Read one comparison folder, or any run folders; refuse what is unfinished, damaged or does not belong."""
    if not paths:
        raise UserError("no run folder was given; name a comparison folder or one or more run folders")
    folders: list[Path] = []
    beside: list[Path] = []
    compare: CompareRecord = {}
    for path in map(Path, paths):
        if (path / "compare.json").exists():
            compare = cast(CompareRecord, _read_json(path / "compare.json"))
            folders += _compared_folders(path, compare)
            beside += _reference_folders(path, compare)
        else:
            folders.append(path)
    runs, references = [read_run(folder) for folder in folders], [read_run(folder) for folder in beside]
    _check_alike([*runs, *references])
    if len(paths) > 1:
        return RunSet(tuple(runs), {})  # several comparisons have no question and no references in common
    return RunSet(tuple(runs), compare, tuple(references))


def read_run(folder: Path) -> FinishedRun:
    """The run in this folder, if it is finished."""
    folder = Path(folder)
    path = folder / "result.json"
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; name a run folder or a comparison folder")
    if not path.exists():
        if any((folder / name).exists() for name in ("config.toml", "rounds.jsonl", "ledger.jsonl")):
            raise UserError(f"{path} is missing: the run is unfinished. Start it again to resume it, then report.")
        if any((folder / name).is_dir() for name in ("runs", "tuning", "stages")):
            raise UserError(
                f"{folder} is an unfinished comparison (no compare.json). Start it again with --resume; or "
                f"name those of its runs in {folder / 'runs'} that are finished"
            )
        raise UserError(
            f"{folder} is neither a run folder (no result.json) nor a comparison folder (no compare.json); "
            "name the folder that `bespoke run` or `bespoke compare` wrote"
        )
    result = _read_json(path)
    missing = [key for key in ("label", "seed", "metric", "lower_is_better") if key not in result]
    if missing:
        raise UserError(f"{path} has no {', '.join(missing)}. {_REPEAT}")
    check_finished(folder, result)
    return FinishedRun(folder, str(result["label"]), int(result["seed"]), cast(RunRecord, result))


def load_clients(runs: Iterable[FinishedRun]) -> pd.DataFrame:
    """The rows of every run's `clients.parquet` with the columns `method` and `seed`."""
    import pandas as pd

    tables = []
    for run in runs:
        path = run.folder / "clients.parquet"
        if not path.exists():
            raise UserError(f"{path} is missing. {_REPEAT}")
        try:
            table = pd.read_parquet(path)
        except Exception as error:  # pyarrow raises many kinds; to a user they all mean the same
            raise UserError(f"{path} cannot be read as Parquet ({error}). {_REPEAT}") from error
        value = f"query_{run.result['metric']}"
        lacking = [name for name in ("client", value) if name not in table.columns]
        if lacking:
            raise UserError(f"{path} has no column {', '.join(lacking)}; found: {', '.join(table.columns)}. {_REPEAT}")
        table["client"] = table["client"].astype(str)
        twice = table["client"][table["client"].duplicated()]
        if len(twice):
            raise UserError(f"{path} has the client {twice.iloc[0]!r} more than once. {_REPEAT}")
        table["group"] = table["group"].fillna("").astype(str) if "group" in table else ""
        for name in _COUNTS:
            table[name] = table[name].fillna(0).astype("int64") if name in table else 0
        table.insert(0, "method", run.label)
        table.insert(1, "seed", run.seed)
        tables.append(table)
    if not tables:
        raise UserError("no run folder was given, so there is no client to count")
    return pd.concat(tables, ignore_index=True)


def _compared_folders(path: Path, compare: CompareRecord) -> list[Path]:
    try:
        labels, seeds = [str(method["label"]) for method in compare["methods"]], list(compare["seeds"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{path / 'compare.json'} does not list its methods and seeds. {_REPEAT}") from error
    folders = [path / "runs" / f"{label}-seed{seed}" for label in labels for seed in seeds]
    wanted = [*folders, *_reference_folders(path, compare)]
    unfinished = [folder.name for folder in wanted if not (folder / "result.json").exists()]
    if unfinished:
        command = compare.get("command")
        place = "" if " --out" in str(command) else f" --out {path}"
        again = f"finish it with: {command}{place} --resume" if command else "finish it with the command that began it"
        raise UserError(
            f"{path / 'runs'} is unfinished: {len(unfinished)} of {len(wanted)} runs have no result.json "
            f"({', '.join(unfinished[:4])}{', ...' if len(unfinished) > 4 else ''}); {again}, "
            "or report on finished run folders only by naming them"
        )
    return folders


def _reference_folders(path: Path, compare: CompareRecord) -> list[Path]:
    labels = [str(entry["label"]) for entry in compare.get("references") or []]
    return [path / "runs" / f"{label}-seed{seed}" for label in labels for seed in compare.get("seeds") or []]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing. {_REPEAT}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}). {_REPEAT}") from error


def _read_json(path: Path) -> JsonObject:
    try:
        record = json.loads(_read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}). {_REPEAT}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path} is not a JSON object. {_REPEAT}")
    if record.get("format") != RESULT_FORMAT:
        raise UserError(
            f"{path} has format {record.get('format')!r}, this version of bespoke reads format {RESULT_FORMAT}; "
            "report with the version that wrote it, or run the experiment again"
        )
    return check_seal(record, path, _REPEAT)


def _check_alike(runs: Sequence[FinishedRun]) -> None:
    first = runs[0]
    seen: dict[tuple[str, int], FinishedRun] = {}
    keys: tuple[Literal["metric", "lower_is_better"], ...] = ("metric", "lower_is_better")
    for run in runs:
        for key in keys:
            if run.result[key] != first.result[key]:
                raise UserError(
                    f"{run.folder / 'result.json'} has {key} {run.result[key]!r} but {first.folder / 'result.json'} "
                    f"has {first.result[key]!r}; report on runs with the same metric"
                )
        twin = seen.setdefault((run.label, run.seed), run)
        if twin is not run:
            raise UserError(
                f"{run.folder} and {twin.folder} are both {run.label!r} with seed {run.seed}; "
                "name only one of them, or give the runs different labels"
            )
