"""The command line. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="bespoke",
    help="Models to measure: personalized federated learning, compared honestly.\n\n"
    "Start with `bespoke compare`: on a table of your own (a client column, a target column) it answers whether "
    "personal models beat one shared model, for whom, by how much and at what cost.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.", metavar="")]
Client = Annotated[str, typer.Option("--client", metavar="ID", help="The client's id, as in the client column.")]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Go on with what was interrupted in --out.")]

Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Runs at a time (default: one for each core, where runs are light)."),
]

# What lies in a folder that a command has begun: the only folders that --resume goes on with.
BEGUN = {
    "compare": ("compare.json", "runs", "tuning", "stages"),
    "run": ("config.toml", "checkpoints"),
    "tune": ("search.json",),
}


class Stopped(Exception):
    """Ctrl-C, with what to do next."""


def _say(text: str) -> None:
    """To stderr; what a file or a name brought along cannot move the cursor or change colours."""
    print("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text), file=sys.stderr)


def _print_json(value: Any) -> None:
    """One JSON document; not-a-number and infinity, which JSON does not know, become null."""

    def known(part: Any) -> Any:
        if isinstance(part, dict):
            return {str(name): known(entry) for name, entry in part.items()}
        if isinstance(part, list | tuple):
            return [known(entry) for entry in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    print(json.dumps(known(value), allow_nan=False))


def _listed(text: str) -> list[str]:
    """Names between commas; one that contains a comma stands in double quotes."""
    parts = next(csv.reader([text], skipinitialspace=True), [])
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def _folders(stem: str) -> Iterator[Path]:
    """runs/STEM, runs/STEM-2, runs/STEM-3, ..."""
    yield Path("runs") / stem
    for number in range(2, 10_000):
        yield Path("runs") / f"{stem}-{number}"
    from bespoke.errors import UserError

    raise UserError(f"runs/{stem} to runs/{stem}-9999 exist already; choose a folder with --out")


def _place(out: Path | None, stem: str, resume: bool, kind: str) -> Path:
    """Where to write: a fresh folder, or with --resume one that was begun."""
    from bespoke.errors import UserError

    if out is None and not resume:
        return next(path for path in _folders(stem) if not path.exists())
    if out is None:
        begun = sorted(str(path) for path in Path("runs").glob(f"{stem}*") if _begun(path, kind))
        begun = [path for path in begun if path.removeprefix(f"runs/{stem}").lstrip("-").isdigit() or path[5:] == stem]
        if len(begun) != 1:
            found = f"there are {', '.join(begun)}" if begun else f"there is no runs/{stem}"
            raise UserError(f"--resume: which {kind} is to go on? Say --out FOLDER ({found})")
        return Path(begun[0])
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder, which may be new")
    empty = not out.is_dir() or not any(out.iterdir())
    if resume and not out.is_dir():
        raise UserError(f"--resume: there is no folder {out}; leave --resume out to begin there")
    if resume and not empty and not _begun(out, kind):
        raise UserError(f"--resume: {out} holds nothing that `bespoke {kind}` began; choose another --out")
    if not resume and not empty:
        rest = "add --resume to go on with it, or " if _begun(out, kind) else ""
        raise UserError(f"--out {out} exists already and is not empty; {rest}choose another folder")
    return out


def _begun(folder: Path, kind: str) -> bool:
    return any((folder / name).exists() for name in BEGUN[kind])


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Whatever stops the work inside, the message names the command that goes on with it."""
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    if not any(a == "--out" or a.startswith("--out=") for a in arguments):
        arguments += ["--out", str(folder)]
    again = shlex.join(["bespoke", *arguments, "--resume"])
    try:
        yield
    except KeyboardInterrupt:
        kept = f"what was finished is kept; go on with: {again}" if folder.exists() else "nothing was written"
        raise Stopped(f"interrupted; {kept}") from None
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(folder)  # a write that fails does not know the name of its file
        if folder.exists():
            error.add_note(f"Nothing finished is lost; afterwards go on with: {again}")
        raise
    except Exception as error:  # the two by name: their modules are heavy to import
        if type(error).__name__ == "Interrupted":
            raise Stopped(f"{error}; go on with: {again}") from None
        if type(error).__name__ == "WorkerFailed":
            error.add_note(f"Nothing finished is lost; go on with: {again}")
        raise


@app.command()
def compare(
    table: Annotated[
        Path | None,
        typer.Argument(
            metavar="TABLE",
            help="A CSV or Parquet file (or a TOML file that describes a comparison); leave it out for built-in data.",
        ),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Who: the column that names the client (several: a,b).")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="What to predict.")] = None,
    group: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="What groups the clients; methods that train groups are compared too."),
    ] = None,
    features: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="What to predict from: a,b,c (default: all others).")
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="When: train on the past, test on the future.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help="regression or classification (default: inferred).")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="NAME", help="Built-in data instead of a table; see `bespoke data`.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Methods to compare, see `bespoke methods` (default: fedavg, local, finetune, fedprox; with --group "
            "also group-fl, group-perfl).",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="What to compare by: mse, rmse, mae, accuracy, loss, ... (default: mse or accuracy)."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Repetitions: each has its own split, start and cohorts.")
    ] = 3,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Training rounds.")] = 60,
    cohort: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Clients per round (default: all up to 200, else 100).")
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(metavar="NAME", help="cross-silo: known clients, held-out rows. cross-device: held-out clients."),
    ] = "cross-silo",
    model: Annotated[str, typer.Option(metavar="NAME", help="auto, linear, logistic, svm, mlp, cnn or lstm.")] = "auto",
    tune: Annotated[bool, typer.Option(metavar="", help="Choose learning rates on validation data.")] = True,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="When a client takes its personal model: margin=0.02 (gain on its own validation rows), "
            "min_examples=20, or both with a comma (default: the report tries both).",
        ),
    ] = None,
    privacy: Annotated[
        str | None,
        typer.Option(
            metavar="TERMS",
            help="Differential privacy for every method: epsilon=8,clip=1 (noise is calibrated), noise=1,clip=0.5, "
            "local_noise=2, ...; see docs/privacy.md.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Worker processes (default: chosen by the engine).")
    ] = None,
    jobs: Jobs = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/compare-NAME).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Compare methods: does personalization help here, for whom, and at what cost?

    `bespoke compare` alone runs on built-in data: 31,022 exam results in 2,410 schools.

    `bespoke compare pupils.csv --client school --target score --group region` runs on your own table. Nothing has to
    be prepared: texts, dates and missing values are understood, and what was done with each column is said.

    Ctrl-C stops after the current round; the message names the command that goes on.
    """
    from bespoke.errors import UserError

    if table is not None and data is not None:
        raise UserError(f"give a table ({table}) or --data {data}, not both")
    if table is not None and table.suffix == ".toml":
        _compare_file(table, out, resume, as_json, jobs)
        return
    described = _described(table, data, client, target, group, features, time, task)
    base: dict[str, Any] = {
        "data": described,
        "split": {"protocol": _named("protocol", protocol), **({"order": "time"} if time else {})},
        "model": {"name": model},
        "cohort": {} if cohort is None else {"size": cohort},
        "engine": {} if workers is None else {"workers": workers},
    }
    if metric:
        base["metric"] = metric
    if privacy is not None:
        base["privacy"] = _terms(privacy)
    rule = _rule(accept)
    if methods is not None and not _listed(methods):
        raise UserError(f"--methods {methods!r} names no method; see `bespoke methods`")
    folder = _place(out, f"compare-{table.name.split('.')[0] if table else described['source']}", resume, "compare")
    command = _command()
    with _resumable(folder):
        from bespoke.comparison import Comparison, default_methods
        from bespoke.progress import Bars

        names = tuple(_listed(methods)) if methods is not None else default_methods({"group": group})
        with Bars(f"comparing {', '.join(names)}", quiet=as_json) as bars, bars.stopping() as stop:
            Comparison(
                base, folder, names, tuple(range(seeds)), rounds, tune, command=command, progress=bars, stop=stop,
                jobs=jobs, accept=rule,
            ).run()  # fmt: skip
        _report([folder], folder / "report.html", as_json)


def _rule(text: str | None) -> dict[str, Any]:
    """An acceptance rule as the option gives it: margin=0.02,min_examples=20."""
    from bespoke.config import check_acceptance
    from bespoke.errors import UserError

    if text is None:
        return {}
    rule: dict[str, Any] = {}
    for part in _listed(text):
        name, _, value = part.partition("=")
        try:
            rule[name.strip()] = int(value) if name.strip() == "min_examples" else float(value)
        except ValueError:
            raise UserError(f"--accept {text}: {part!r} is not of the form margin=0.02 or min_examples=20") from None
    check_acceptance(rule, "--accept")
    return rule


def _terms(text: str) -> dict[str, Any]:
    """A [privacy] table as the option gives it: epsilon=8,clip=1,adaptive=true."""
    import tomllib

    from bespoke.errors import UserError

    terms: dict[str, Any] = {}
    for part in _listed(text):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--privacy {text}: {part!r} is not of the form epsilon=8 or noise=1.1")
        try:
            terms[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            terms[name.strip()] = value.strip()  # a bare word
    return terms


def _command() -> str:
    """The command that repeats this, without what only says how it came about."""
    return shlex.join(["bespoke", *(a for a in sys.argv[1:] if a != "--resume")])


def _described(
    table: Path | None, data: str | None, client: str | None, target: str | None, group: str | None,
    features: str | None, time: str | None, task: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The [data] of the options: a table and its columns, or a source."""
    from bespoke.errors import UserError

    columns = {"client": client, "target": target, "group": group, "features": features, "time": time, "task": task}
    given = [f"--{name}" for name, value in columns.items() if value is not None]
    if table is None:
        from bespoke.data.sources import SOURCES

        source = SOURCES.get(data or "chem97")  # one that does not exist is refused where it is loaded
        its_own = {"--time": "time", "--group": source.group_name if source else group}
        others = [option for option in given if columns[option[2:]] != its_own.get(option)]
        if others == ["--group"]:
            what = f"groups its clients by {its_own['--group']}" if its_own["--group"] else "knows no groups of clients"
            raise UserError(f"--group {group}: {data or 'chem97'} {what}")
        if others:
            what = "--time of built-in data is called 'time'" if others == ["--time"] else ""
            raise UserError(what or f"{', '.join(others)}: of which table? bespoke compare TABLE.csv {others[0]} ...")
        return {"source": data or "chem97"}
    if not (client and target):
        raise UserError(f"tell what is what in {table}: --client COLUMN (who) and --target COLUMN (what to predict)")
    named = _listed(features) if features is not None else None
    if named == []:
        raise UserError(f"--features {features!r} names no column; leave it out to use all others")
    if task is not None:
        _named("task", task)
    return {"table": str(table), **{k: v for k, v in {**columns, "features": named}.items() if v is not None}}


def _named(option: str, value: str) -> str:
    """The value of an option that an experiment file restricts to a few words."""
    from typing import get_args

    from bespoke.config import DataConfig, SplitConfig
    from bespoke.errors import unknown

    kind = (SplitConfig if option == "protocol" else DataConfig).model_fields[option].annotation
    words = [word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)]
    if value not in words:
        raise unknown(option, value, dict.fromkeys(words), f"--{option}")
    return value


def _compare_file(path: Path, out: Path | None, resume: bool, as_json: bool, jobs: int | None) -> None:
    """A comparison described by a TOML file, such as those in benchmarks/motley."""
    from bespoke.errors import UserError

    ours = ["compare", str(path), "--resume", "--json"]
    for option, value in (("--out", out), ("--jobs", jobs)):
        ours += [] if value is None else [option, str(value), f"{option}={value}"]
    others = [a for a in sys.argv[1:] if a not in ours]
    if others:
        raise UserError(f"{' '.join(others)}: {path} describes the comparison; say it there (see benchmarks/motley)")
    folder = _place(out, f"compare-{path.stem}", resume, "compare")
    command = shlex.join(["bespoke", "compare", str(path)])
    with _resumable(folder):
        from bespoke.comparison import Comparison
        from bespoke.progress import Bars

        with Bars(f"comparing as {path} says", quiet=as_json) as bars, bars.stopping() as stop:
            Comparison.read(path, folder, command=command, progress=bars, stop=stop, jobs=jobs).run()
        _report([folder], folder / "report.html", as_json)


def _report(paths: list[Path], output: Path, as_json: bool) -> None:
    from bespoke.data.arrays import write_text
    from bespoke.metrics.summary import summarize
    from bespoke.reports.html import write_report

    summary = summarize(paths)
    if len(paths) == 1 and paths[0].is_dir():
        write_text(paths[0] / "summary.json", summary.to_json())
    write_report(paths, output)
    if as_json:
        _print_json({**json.loads(summary.to_json()), "report": str(output), "folder": str(paths[0])})
        return
    from rich.console import Console

    from bespoke.reports.table import print_summary

    console = Console()
    print_summary(summary, console)
    console.print(f"\nReport: {output}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. stage.0.lr=0.1 (repeatable)"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/NAME of the file).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Run one experiment file: stages of methods, then the personal models, into a run folder.

    `bespoke run exp.toml --set seed=1 --set stage.fedavg.lr=0.1 --out runs/exp-1` runs it with two keys changed.

    Ctrl-C stops after the current round; the message names the command that goes on, to the same bytes.
    """
    from bespoke.config import read_config
    from bespoke.errors import UserError

    config = read_config(experiment, settings)
    folder = _place(out, experiment.stem, resume, "run")
    with _resumable(folder):
        from bespoke.experiments import build, to_toml
        from bespoke.progress import Bars
        from bespoke.rounds import Run
        from bespoke.runfolder import RunFolder

        text = to_toml(config)
        begun = folder / "config.toml"
        if resume and begun.exists() and begun.read_bytes() != text.encode():
            raise UserError(
                f"{folder} was begun with another configuration than this one, or its config.toml was changed; resume "
                "with the same file and --set options, or leave --resume out and choose another --out"
            )
        built = build(config)
        run_folder = RunFolder.create(folder, text)
        with Bars(f"running {built.label}", quiet=as_json) as bars, bars.stopping() as stop, run_folder.locked():
            for note in built.population.about.get("notes", []):
                bars.note(note)
            result = Run(built, run_folder, bars, stop=stop).run()
    if as_json:
        _print_json({**result, "folder": str(folder)})
        return
    better = "lower" if result["lower_is_better"] else "higher"
    mean = "undefined" if result["query"] is None else f"{result['query']:.5g}"
    print(
        f"{result['label']}: mean {result['metric']} per client {mean} ({better} is better), "
        f"{result['clients']} clients, {result['rounds']} rounds"
    )
    for sentence in _guarantee(result):
        print(sentence)
    print(f"Run folder: {folder}")


def _guarantee(result: dict[str, Any]) -> list[str]:
    """What a private run promises, in a few lines; nothing for others."""
    from bespoke.metrics.guarantee import sentences

    return sentences(result["privacy"]) if "privacy" in result else []


@app.command()
def tune(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file, with or without [tune].")
    ] = None,
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What to try: a TOML file with what a [tune] table holds.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to try and what to hold fixed, as a paper did.")
    ] = None,
    optuna: Annotated[
        bool, typer.Option("--optuna", metavar="", help="Search (TPE, with pruning) instead of trying everything.")
    ] = False,
    trials: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many settings to try with --optuna (default: 20).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file, e.g. stage.0.rounds=20"),
    ] = None,
    jobs: Jobs = None,
    freeze: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Keep the tuned values as a preset: presets/NAME.toml, or a path."),
    ] = None,
    presets: Annotated[bool, typer.Option("--presets", metavar="", help="List the presets and exit.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/tune-NAME).")
    ] = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Choose hyper-parameters on validation data; test rows are never looked at.

    `bespoke tune exp.toml` tries what the file's [tune.space] lists, or else what its methods advise, and writes
    `best.toml`, ready for `bespoke run`. In the file:

    `[tune.space.fedavg]`  `lr = [0.01, 0.1]`  `server.lr = {low = 0.1, high = 10.0, log = true}`

    `bespoke tune exp.toml --preset motley-school` tries the grid of a paper; `bespoke tune --presets` lists them.

    `bespoke tune exp.toml --optuna --trials 50 --freeze mine` searches, and keeps the result as the preset `mine`.

    Ctrl-C stops after the current rounds; nothing finished is repeated by the command that the message names.
    """
    from bespoke.errors import UserError

    if presets:
        from bespoke.catalogue import describe_presets, print_presets

        found = describe_presets()
        _print_json(found) if as_json else print_presets(found)
        return
    if experiment is None:
        raise UserError("which experiment is to be tuned? bespoke tune EXPERIMENT.toml (or --presets)")
    from bespoke.tuning import Tuning, freeze_into, read_tuning

    raw, asked = read_tuning(experiment, settings, space, preset, optuna, trials)
    folder = _place(out, f"tune-{experiment.stem}", resume, "tune")
    tuning = Tuning.of(raw, asked, folder, str(experiment), name=experiment.stem, command=_command(), jobs=jobs)
    target = freeze_into(freeze, raw) if freeze is not None else None
    with _resumable(folder):
        from bespoke.progress import Bars

        with Bars(f"tuning {experiment}", quiet=as_json) as bars, bars.stopping() as stop:
            tuning.progress, tuning.stop = bars, stop
            about = tuning.run()
    if target is not None:
        from bespoke.tuning import frozen

        frozen(about, target.stem).write(target)
    if as_json:
        _print_json({**about, "folder": str(folder), "preset": str(target) if target else None})
        return
    from bespoke.reports.trials import print_trials

    print_trials(about, folder)
    if target is not None:
        print(f"Preset: {target} (bespoke tune --preset {freeze}, or preset = {json.dumps(freeze)} in [compare])")


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="A comparison folder, or run folders of any methods and seeds."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="HTML file (default: report.html in the first folder)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the report of a comparison, or of several runs, from what lies on disk.

    `bespoke report runs/compare-pupils` or `bespoke report runs/a runs/b -o both.html`
    """
    from bespoke.errors import UserError

    for path in runs:
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
    output = output or runs[0]
    _report(runs, output / "report.html" if output.is_dir() else output, as_json)


@app.command()
def analyze(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Finished run folders, or a comparison folder: all of its runs."),
    ],
    ood: Annotated[
        bool, typer.Option("--ood", metavar="", help="Own rows against other clients' rows as personalizing goes on.")
    ] = False,
    rows: Annotated[int, typer.Option("--ood-rows", min=1, metavar="N", help="Rows of other clients for --ood.")] = 500,
    fewer: Annotated[
        str | None,
        typer.Option("--fewer-examples", metavar="FRACTIONS", help="Fewer examples to personalize with: 1,0.5,0.25."),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KNOB[=VALUES]", help="A knob varied: finetune.lrs=0.001,0.01,0.1 (repeatable)"
        ),
    ] = None,
    per_client: Annotated[
        bool, typer.Option("--per-client", metavar="", help="Settings chosen by each client against one for all.")
    ] = False,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", metavar="", help="What personal embeddings know of the clients' groups.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What the averages hide: robustness, fewer examples, hyper-parameters. From run folders; nothing is trained again.

    `bespoke analyze runs/compare-pupils` makes every analysis that applies, and the report again with its figures.

    `bespoke analyze runs/exp --sweep finetune.lrs=0.001,0.01,0.1` makes one analysis of one run.

    The numbers lie in the folder `analysis` of each run, as JSON and Parquet. What is there is not made again.
    """
    from bespoke.analysis.analyze import Analyses, Wanted
    from bespoke.analysis.fewer import parse_fractions
    from bespoke.errors import UserError
    from bespoke.progress import Bars

    for path in runs:
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
    fractions = parse_fractions(fewer) if fewer is not None else ()
    wanted = Wanted(ood, rows, fractions, tuple(sweeps or ()), per_client, embeddings)
    with _goes_on(), Bars("analyzing", quiet=as_json) as bars, bars.stopping() as stop:
        records = Analyses.of(runs, wanted, progress=bars, stop=stop).run()
    pages = [path / "report.html" for path in runs if (path / "compare.json").exists()]
    if pages:
        from bespoke.reports.html import write_report

        for page in pages:
            write_report([page.parent], page)
    if as_json:
        _print_json({"analyses": records, "reports": [str(page) for page in pages]})
        return
    from bespoke.reports.table import print_analyses

    print_analyses([Path(record["folder"]) for record in records], {record["analysis"] for record in records})
    for page in pages:
        print(f"Report: {page}")
    if not pages:
        print("Figures: bespoke report " + shlex.join(map(str, runs)))


@contextmanager
def _goes_on() -> Iterator[None]:
    """Ctrl-C in work that goes on by being asked for again."""
    try:
        yield
    except BaseException as error:  # by name: its module is heavy to import
        if not isinstance(error, KeyboardInterrupt) and type(error).__name__ != "Interrupted":
            raise
        again = shlex.join(["bespoke", *sys.argv[1:]])
        raise Stopped(f"interrupted; what was finished is kept; go on with: {again}") from None


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show one method in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or show one: what it does, what travels, what stays private, its knobs.

    `bespoke methods`, then `bespoke methods finetune`
    """
    from bespoke.catalogue import describe_methods, print_method, print_methods

    found = describe_methods(name)
    if as_json:
        _print_json(found if name is None else found[0])
    elif name is None:
        print_methods(found)
    else:
        print_method(found[0])


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Show one source in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the data sources, or show one: clients, examples, licence, how to obtain it.

    `bespoke data`, then `bespoke data chem97` and `bespoke compare --data chem97`
    """
    from bespoke.catalogue import describe_sources, print_source, print_sources

    found = describe_sources(name)
    if as_json:
        _print_json(found if name is None else found[0])
    elif name is None:
        print_sources(found)
    else:
        print_source(found[0])


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    client: Client,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: personal/ID in the run folder).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a client's personal model: safetensors, and a JSON that says how to load it.

    `bespoke export runs/compare-pupils/runs/finetune-seed0 --client "school 7"`
    """
    from bespoke.deploy.personal import export_personal

    written = export_personal(run, client, out)
    if as_json:
        _print_json(written)
    else:
        made = f"{written['candidate']}, {written['parameters']:,} parameters"
        print(f"Personal model of {client}: {written['folder']} ({made})")
        print(f'Load it: from bespoke import load_personal; load_personal("{written["folder"]}").predict(rows)')


@app.command()
def forget(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")], client: Client, as_json: Json = False
) -> None:
    """Delete a client's private state and personal model from a run, and prove that they are gone.

    `bespoke forget runs/compare-pupils/runs/finetune-seed0 --client "school 7"`
    """
    from bespoke.deploy.forget import forget_client

    receipt = forget_client(run, client)
    if as_json:
        _print_json(receipt)
    else:
        for line in receipt["summary"]:
            print(line)


def _show_version(asked: bool) -> None:
    if asked:
        from bespoke import __version__

        print(f"bespoke {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", metavar="", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: 0 fine, 1 failed, 2 the user's mistake (no traceback), 130 stopped by Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal does not know is no reason to fail
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's on empty means: the results say so themselves
    sys.exit(_outcome())


def _outcome() -> int:
    """Run the command; its exit code."""
    from bespoke.errors import UserError

    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # `bespoke methods | head -1`: whoever read has seen enough
        _drop_output()
        return 1
    except UserError as error:
        _say(f"bespoke: {error}")
        return 2
    except Stopped as error:
        _say(f"bespoke: {error}")
        return 130
    except OSError as error:
        return _failed(error)
    except MemoryError as error:
        _say(_with_notes("bespoke: not enough memory; use fewer --workers or a smaller --cohort", error))
        return 1
    except Exception as error:
        if type(error).__name__ == "WorkerFailed":
            _say(_with_notes(f"bespoke: {error}", error))
            return 1
        if not hasattr(error, "format_message"):
            raise
        return _misused(error)
    if code == 130:
        _say("bespoke: interrupted")
    return code if isinstance(code, int) else 0


def _failed(error: OSError) -> int:
    """What the operating system refused: the place, the reason, what to do."""
    place = str(error.filename or "the output")
    place = place if len(place) <= 300 else f"{place[:300]}..."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        _say(_with_notes(f"bespoke: the disk is full ({place}); free some space", error))
        return 1
    reason = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        _say(_with_notes(f"bespoke: no permission for {place} ({reason}); choose another place with --out", error))
        return 2
    if error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
        _say(f"bespoke: {place} cannot be used: {reason}; choose another name")
        return 2
    _say(_with_notes(f"bespoke: {place}: {reason}", error))
    return 1


def _with_notes(text: str, error: BaseException) -> str:
    return "\n".join([text, *getattr(error, "__notes__", [])])


def _drop_output() -> None:
    """Nobody reads any more: the interpreter's last flush must not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _misused(error: Any) -> int:
    """A word that the command does not know, or a value that an option does not take."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return 2
    text = error.format_message().rstrip(".")
    options = getattr(getattr(error, "param", None), "opts", [])
    found = ""
    for option, value in zip(sys.argv, [*sys.argv[1:], ""]):
        name, _, behind = option.partition("=")
        if name in options and type(error).__name__ == "BadParameter":
            found = f"; found {(behind or value)!r}"  # the last one counts
    context = getattr(error, "ctx", None)
    _say(f"bespoke: {text}{found}. Try: {context.command_path if context else 'bespoke'} --help")
    return 2


if __name__ == "__main__":
    main()
