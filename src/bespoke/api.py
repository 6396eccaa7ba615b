"""The commands as Python functions, for notebooks and scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from bespoke.callbacks.callback import Callback
from bespoke.data.arrays import keep_population
from bespoke.data.population import Population
from bespoke.deploy.forget import forget_client
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.callbacks import separated
from bespoke.experiment.calls import checked_call
from bespoke.experiment.checks import check_tune, checked
from bespoke.experiment.config import MOST_SEEDS
from bespoke.experiment.loading import load_population
from bespoke.experiment.reading import read_experiment
from bespoke.generation.generate import LENGTH, TEMPERATURE, Drawing, Written, finished, lines_of, write
from bespoke.generation.voices import Voices, chosen_run
from bespoke.imported import by_name, trust_named
from bespoke.models.own.model import local_name
from bespoke.plain import JsonObject, TomlTable
from bespoke.records import RunRecord, TuneRecord
from bespoke.report.page import write_page
from bespoke.report.report import Report
from bespoke.report.result import Result
from bespoke.runs.folder import RunFolder
from bespoke.runs.forgotten import without_forgotten
from bespoke.runs.notebook import watched
from bespoke.runs.places import at_its_places, check_places
from bespoke.runs.training import Run
from bespoke.study.comparison import Comparison
from bespoke.study.tuning import Tuning

Positive = Annotated[int, Field(ge=1)]


@checked_call
def compare(
    table: str | Path | Population | None = None,
    *,
    out: str | Path,
    methods: Sequence[str | type] | None = None,
    seeds: Annotated[int, Field(ge=1, le=MOST_SEEDS)] = 3,
    rounds: Positive | Literal["auto"] = "auto",
    tune: bool = True,
    data: str | Callable[..., Population] | None = None,
    metric: str | Callable[..., Any] | None = None,
    metrics: Sequence[str | Callable[..., Any]] | None = None,
    client: str | None = None,
    target: str | None = None,
    group: str | None = None,
    time: str | None = None,
    features: list[str] | None = None,
    task: Literal["regression", "classification"] | None = None,
    text: str | None = None,
    context: str | None = None,
    tokenizer: str | None = None,
    model: Any = None,
    loss: str | Callable[..., Any] | None = None,
    settings: TomlTable | None = None,
    jobs: Positive | None = 1,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Compares methods on a table (with client=, target= or text=, group=, ...), a population or built-in data.

    A population is what `bespoke.population` makes of arrays, or its folder. A population in memory is written to the
    folder `out`.population, where worker processes and later calls find it.

    model: the name of one of bespoke's models, a result of `bespoke.model`, a function that makes a torch.nn.Module, or
    "package.module:name" of either; options go into settings={"model": {...}}. loss: a function of (outputs, y) with a
    number for each row, or its name, in place of the task's own.
    The data decide what you leave out: methods, model, metric and rounds (see study/defaults.py). Methods, sources and
    metrics of your own are given as "package.module:name" or as the objects themselves. Choices use `metric`; the
    report also shows `metrics`.
    `settings` are further tables of an experiment file, for example {"cohort": {"size": 50}}. `jobs`: runs at a time
    (None: as many as cores); a script with several needs `if __name__ == "__main__":`. `callbacks` observe every run or
    end its stages early: `bespoke.EarlyStop()`, `bespoke.TensorBoard("logs")`.
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
    described: TomlTable = {"source": by_name(data) or "chem97"}
    if isinstance(table, Population) or (table is not None and (Path(table) / "population.json").exists()):
        if columns:
            raise UserError(f"compare({next(iter(columns))}=...) describes a table, and this is a population")
        described = {"population": str(keep_population(table, Path(out)) if isinstance(table, Population) else table)}
    elif table is not None:
        described = {"table": str(table), **columns}
    settings = by_name(settings)
    about = (settings or {}).get("data", {})
    if not isinstance(about, dict) or set(described) & set(about):
        raise UserError(f"compare(settings={{'data': {about!r}}}): a table of what is not given beside it already")
    scores = {"metric": by_name(metric), "metrics": by_name(metrics)}
    base = {**(settings or {}), **{k: v for k, v in scores.items() if v}, "data": {**about, **described}}
    base = _with_loss(_with_model(base, model), loss)
    folder, names, numbers = Path(out), tuple(by_name(methods or ())), tuple(range(seeds))
    with watched() as progress:
        Comparison(
            base, folder, names, numbers, rounds, tune, jobs=jobs, automatic=True, callbacks=callbacks,
            progress=progress,
        ).run()  # fmt: skip
    report = Report.read([folder])
    write_page(report, folder / "report.html")
    return Result(report)


def _with_model(base: TomlTable, given: Any = None) -> TomlTable:
    """The experiment with its model as a name; `given`, or an object under model.name, is the user's own model."""
    named = base.get("model")
    if given is not None and isinstance(named, dict) and "name" in named:
        raise UserError(f"compare(model=..., settings={{'model': {{'name': {named['name']!r}}}}}): give one of the two")
    if given is None and not isinstance(named, dict):
        return base if named is None else {**base, "model": {"name": local_name(named, "model")}}
    options = dict(named) if isinstance(named, dict) else {}
    if given is None and "name" not in options:
        return base
    return {**base, "model": {**options, "name": local_name(options.get("name") if given is None else given, "model")}}


def _with_loss(base: TomlTable, given: Any) -> TomlTable:
    """The experiment with a loss of the user's own."""
    described = base.get("model", {})
    if given is None or not isinstance(described, dict):
        return base
    if "loss" in described:
        raise UserError(
            f"compare(loss=..., settings={{'model': {{'loss': {described['loss']!r}}}}}): give one of the two"
        )
    named = by_name(given)
    if not isinstance(named, str):
        raise UserError(
            f"compare(loss={given!r}): give a function, def my_loss(outputs, y), or its 'package.module:name'"
        )
    return {**base, "model": {**described, "loss": named}}


def _named(experiment: TomlTable) -> TomlTable:
    """The same tables with names instead of objects. The user's own program gave them, so the names are trusted."""
    found: TomlTable = trust_named(by_name(_with_model(experiment)))
    return found


@checked_call
def run(experiment: str | Path | TomlTable, out: str | Path, *, callbacks: Sequence[Callback] = ()) -> RunRecord:
    """Runs an experiment (a TOML file or the same as a dict) in a folder, or resumes it. Returns its result."""
    raw = _named(experiment) if isinstance(experiment, dict) else read_experiment(Path(experiment))
    raw.pop("tune", None)
    raw, separated_callbacks = separated(raw, callbacks)
    config = checked(raw, "experiment" if isinstance(experiment, dict) else str(experiment))
    check_places(config.engine)
    folder = RunFolder.create(Path(out), to_toml(config))
    with folder.locked(), watched() as progress:
        population = without_forgotten(load_population(config), folder.path)
        asked = Run(build(config, population, folder=folder.path), folder, progress, callbacks=separated_callbacks)
        with at_its_places(asked, config.engine) as placed:
            return placed.run()


@checked_call
def tune(
    experiment: str | Path | TomlTable,
    out: str | Path,
    *,
    jobs: Positive | None = 1,
    callbacks: Sequence[Callback] = (),
    **asked: Any,
) -> TuneRecord:
    """Chooses hyper-parameters of an experiment on validation data; returns the content of tune.json.

    `asked` are keys of a [tune] table (space, preset, seeds, optuna, trials, pruner) and override those of the file:
    tune("exp.toml", "runs/tuned", space={"fedavg": {"lr": [0.01, 0.1]}, "cohort": {"size": [10, 50]}}, seeds=3).
    """
    raw = _named(experiment) if isinstance(experiment, dict) else read_experiment(Path(experiment))
    config = check_tune({**raw.get("tune", {}), **asked}, "tune")
    with watched() as progress:
        return Tuning.of(raw, config, Path(out), "tune", jobs=jobs, callbacks=callbacks, progress=progress).run()


@checked_call
def forget(folder: str | Path, client: str) -> JsonObject:
    """Removes a client from a run, comparison or tuning folder. Returns a receipt of what was changed and searched."""
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
) -> list[Written]:
    """Writes texts with the personal models of a run (or of a method's run in a comparison folder).

    It continues every prompt in every context as every user. Without users it uses the shared model, without contexts
    each user's own. `plain`: the frozen model without a prefix, too. Returns a record for each text.
    """
    how = Drawing(temperature, top_k, top_p)
    voices = Voices(chosen_run(Path(folder), method))
    lines = lines_of(voices.chosen(users, contexts, plain), prompts, number)
    return finished(lines, write(voices, lines, how, length, seed))
