"""The commands as functions, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from bespoke.comparison import Comparison
from bespoke.config import check_tune, checked, read_config, read_experiment
from bespoke.errors import UserError
from bespoke.experiments import build, to_toml
from bespoke.metrics.summary import Summary, summarize
from bespoke.reports.html import write_report
from bespoke.rounds import Run
from bespoke.runfolder import RunFolder
from bespoke.tuning import Tuning


def compare(
    table: str | Path | None = None,
    *,
    out: str | Path,
    methods: Iterable[str] | None = None,
    seeds: int = 3,
    rounds: int | Literal["auto"] = "auto",
    tune: bool = True,
    data: str = "chem97",
    settings: dict[str, Any] | None = None,
    jobs: int | None = 1,
    name_clients: bool = False,
    **columns: Any,
) -> Summary:
    """Compare methods on a table (with client=, target=, group=, ...) or on built-in data, into the folder `out`.

    What is not said is settled by the data: methods, model, metric, and as many rounds as it takes (see defaults.py).
    `settings` are further tables of an experiment file, for example {"cohort": {"size": 50}}. `jobs`: runs at a time
    (None: as many as there are cores); a script that asks for several needs `if __name__ == "__main__":`.
    `name_clients`: the report and the summary name single clients, also where the runs are under [privacy].
    """
    described = {"source": data} if table is None else {"table": str(table), **columns}
    folder = Path(out)
    base = {"data": described, **(settings or {})}
    if methods is not None and not (methods := tuple(methods)):
        raise UserError("methods = []: there is nothing to compare; leave it out for the default methods")
    names, numbers = tuple(methods or ()), tuple(range(seeds))
    Comparison(base, folder, names, numbers, rounds, tune, jobs=jobs, automatic=True).run()
    write_report([folder], folder / "report.html", name_clients)
    return summarize([folder], name_clients)


def run(experiment: str | Path | dict[str, Any], out: str | Path) -> dict[str, Any]:
    """Run an experiment (a TOML file, or the same as a dict) into a folder, or go on with it; returns its result."""
    config = checked(experiment, "experiment") if isinstance(experiment, dict) else read_config(Path(experiment))
    folder = RunFolder.create(Path(out), to_toml(config))
    with folder.locked():
        return Run(build(config), folder).run()


def tune(
    experiment: str | Path | dict[str, Any], out: str | Path, *, jobs: int | None = 1, **asked: Any
) -> dict[str, Any]:
    """Choose hyper-parameters of an experiment on validation data; returns what tune.json says, the best among it.

    `asked` are keys of a [tune] table (space, preset, seeds, optuna, trials, pruner) and go before those of the file:
    tune("exp.toml", "runs/tuned", space={"fedavg": {"lr": [0.01, 0.1]}, "cohort": {"size": [10, 50]}}, seeds=3).
    """
    raw = dict(experiment) if isinstance(experiment, dict) else read_experiment(Path(experiment))
    config = check_tune({**raw.get("tune", {}), **asked}, "tune")
    return Tuning.of(raw, config, Path(out), "tune", jobs=jobs).run()
