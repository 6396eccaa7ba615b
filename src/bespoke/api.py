"""The commands as functions, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bespoke.comparison import DEFAULT_METHODS, Comparison
from bespoke.config import checked, read_config
from bespoke.experiments import build, to_toml
from bespoke.metrics.summary import Summary, summarize
from bespoke.reports.html import write_report
from bespoke.rounds import Run
from bespoke.runfolder import RunFolder


def compare(
    table: str | Path | None = None,
    *,
    out: str | Path,
    methods: Iterable[str] = DEFAULT_METHODS,
    seeds: int = 3,
    rounds: int = 60,
    tune: bool = True,
    data: str = "chem97",
    settings: dict[str, Any] | None = None,
    **columns: Any,
) -> Summary:
    """Compare methods on a table (with client=, target=, group=, ...) or on built-in data, into the folder `out`.

    `settings` are further tables of an experiment file, for example {"cohort": {"size": 50}}.
    """
    described = {"source": data} if table is None else {"table": str(table), **columns}
    folder = Path(out)
    Comparison({"data": described, **(settings or {})}, folder, tuple(methods), tuple(range(seeds)), rounds, tune).run()
    write_report([folder], folder / "report.html")
    return summarize([folder])


def run(experiment: str | Path | dict[str, Any], out: str | Path) -> dict[str, Any]:
    """Run an experiment (a TOML file, or the same as a dict) into a folder, or go on with it; returns its result."""
    config = checked(experiment, "experiment") if isinstance(experiment, dict) else read_config(Path(experiment))
    folder = RunFolder.create(Path(out), to_toml(config))
    with folder.locked():
        return Run(build(config), folder).run()
