"""The commands as functions, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from bespoke.calls import checked_call
from bespoke.comparison import Comparison
from bespoke.config import MOST_SEEDS, check_tune, checked, read_config, read_experiment
from bespoke.deploy.forget import forget_client
from bespoke.errors import UserError
from bespoke.experiments import build, load_population, to_toml
from bespoke.forgotten import without_forgotten
from bespoke.generation.generate import LENGTH, TEMPERATURE, Drawing, finished, lines_of, write
from bespoke.generation.voices import Voices, chosen_run
from bespoke.metrics.summary import Summary, summarize
from bespoke.reports.html import write_report
from bespoke.rounds import Run
from bespoke.runfolder import RunFolder
from bespoke.tuning import Tuning

Positive = Annotated[int, Field(ge=1)]


@checked_call
def compare(
    table: str | Path | None = None,
    *,
    out: str | Path,
    methods: Sequence[str] | None = None,
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] = 3,
    rounds: Positive | Literal["auto"] = "auto",
    tune: bool = True,
    data: str | None = None,
    client: str | None = None,
    target: str | None = None,
    group: str | None = None,
    time: str | None = None,
    features: list[str] | None = None,
    task: Literal["regression", "classification"] | None = None,
    text: str | None = None,
    context: str | None = None,
    tokenizer: str | None = None,
    settings: dict[str, Any] | None = None,
    jobs: Positive | None = 1,
) -> Summary:
    """Compare methods on a table (with client=, target= or text=, group=, ...) or on built-in data, into `out`.

    What is not said is settled by the data: methods, model, metric, and as many rounds as it takes (see defaults.py).
    `settings` are further tables of an experiment file, for example {"cohort": {"size": 50}}. `jobs`: runs at a time
    (None: as many as there are cores); a script that asks for several needs `if __name__ == "__main__":`.
    """
    given = {"client": client, "target": target, "group": group, "time": time, "features": features, "task": task,
             "text": text, "context": context, "tokenizer": tokenizer}  # fmt: skip
    columns = {name: value for name, value in given.items() if value is not None}
    if table is not None and data is not None:
        raise UserError(f"compare(table={str(table)!r}, data={data!r}): one of the two, a table or built-in data")
    if table is None and columns:
        raise UserError(f"compare({next(iter(columns))}=...) describes a table, and none is given; name it first")
    if methods is not None and not methods:
        raise UserError("methods = []: there is nothing to compare; leave it out for the default methods")
    described: dict[str, Any] = {"source": data or "chem97"} if table is None else {"table": str(table), **columns}
    about = (settings or {}).get("data", {})
    if not isinstance(about, dict) or set(described) & set(about):
        raise UserError(f"compare(settings={{'data': {about!r}}}): a table of what is not given beside it already")
    base = {**(settings or {}), "data": {**about, **described}}
    folder, names, numbers = Path(out), tuple(methods or ()), tuple(range(seeds))
    Comparison(base, folder, names, numbers, rounds, tune, jobs=jobs, automatic=True).run()
    write_report([folder], folder / "report.html")
    return summarize([folder])


@checked_call
def run(experiment: str | Path | dict[str, Any], out: str | Path) -> dict[str, Any]:
    """Run an experiment (a TOML file, or the same as a dict) into a folder, or go on with it; returns its result."""
    config = checked(experiment, "experiment") if isinstance(experiment, dict) else read_config(Path(experiment))
    folder = RunFolder.create(Path(out), to_toml(config))
    with folder.locked():
        population = without_forgotten(load_population(config), folder.path)
        return Run(build(config, population, folder=folder.path), folder).run()


@checked_call
def tune(
    experiment: str | Path | dict[str, Any], out: str | Path, *, jobs: Positive | None = 1, **asked: Any
) -> dict[str, Any]:
    """Choose hyper-parameters of an experiment on validation data; returns what tune.json says, the best among it.

    `asked` are keys of a [tune] table (space, preset, seeds, optuna, trials, pruner) and go before those of the file:
    tune("exp.toml", "runs/tuned", space={"fedavg": {"lr": [0.01, 0.1]}, "cohort": {"size": [10, 50]}}, seeds=3).
    """
    raw = dict(experiment) if isinstance(experiment, dict) else read_experiment(Path(experiment))
    config = check_tune({**raw.get("tune", {}), **asked}, "tune")
    return Tuning.of(raw, config, Path(out), "tune", jobs=jobs).run()


@checked_call
def forget(folder: str | Path, client: str) -> dict[str, Any]:
    """Take a client out of a run, comparison or tuning folder; returns a receipt of what was changed and searched."""
    return forget_client(Path(folder), client)


@checked_call
def generate(
    folder: str | Path,
    prompts: Sequence[str] = ("",),
    *,
    users: Sequence[str] = (),
    contexts: Sequence[str] = (),
    plain: bool = False,
    method: str | None = None,
    number: Positive = 1,
    length: Positive = LENGTH,
    temperature: float = TEMPERATURE,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Write texts with the personal models of a run (or of a method's run in a comparison folder).

    Every prompt in every context by every user; anybody's model if no user is named, each one's own context if none
    is; `plain`: also by the frozen model without a prefix. Returns a record for each text.
    """
    how = Drawing(temperature, top_k, top_p)
    voices = Voices(chosen_run(Path(folder), method))
    lines = lines_of(voices.chosen(users, contexts, plain), prompts, number)
    return finished(lines, write(voices, lines, how, length, seed))
