"""The command line. Heavy imports happen inside the commands, so that --help is instant."""

from __future__ import annotations

import json
import shlex
import sys
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

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Client = Annotated[str, typer.Option("--client", help="The client's id, as in the client column.")]


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _next_folder(stem: str) -> Path:
    """runs/STEM, or with the first free number behind it."""
    for number in range(1, 10_000):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not path.exists():
            return path
    raise RuntimeError("runs/ is full")


def _place(out: Path | None, stem: str, resume: bool) -> Path:
    """Where to write: a fresh folder, or with --resume one that exists."""
    from bespoke.errors import UserError

    if out is None:
        if resume:
            raise UserError("--resume needs --out FOLDER: which run is to go on?")
        return _next_folder(stem)
    if resume and not out.is_dir():
        raise UserError(f"--resume: there is no folder {out}")
    if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists already; add --resume to go on with it, or choose another --out")
    return out


@app.command()
def compare(
    table: Annotated[Path | None, typer.Argument(help="A CSV or Parquet file; leave it out for built-in data.")] = None,
    client: Annotated[str | None, typer.Option(help="Column that names the client (several: a,b).")] = None,
    target: Annotated[str | None, typer.Option(help="Column to predict.")] = None,
    group: Annotated[str | None, typer.Option(help="Column that groups the clients.")] = None,
    features: Annotated[str | None, typer.Option(help="Columns to predict from, a,b,c (default: all others).")] = None,
    time: Annotated[
        str | None, typer.Option(help="Column to order rows by: train on the past, test on the future.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="regression or classification (default: inferred).")] = None,
    data: Annotated[str | None, typer.Option(help="Built-in data instead of a table; see `bespoke data`.")] = None,
    methods: Annotated[
        str, typer.Option(help="Methods to compare, a,b,c; see `bespoke methods`.")
    ] = "fedavg,local,finetune,fedprox",
    metric: Annotated[
        str | None, typer.Option(help="What to compare by (mse, rmse, mae, accuracy, loss, ...).")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions: each has its own split, start and cohorts.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Training rounds.")] = 60,
    cohort: Annotated[
        int | None, typer.Option(min=1, help="Clients per round (default: all up to 200, else 100).")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="cross-silo: known clients, held-out rows. cross-device: held-out clients.")
    ] = "cross-silo",
    model: Annotated[str, typer.Option(help="auto, linear, logistic, svm, mlp, cnn, lstm.")] = "auto",
    tune: Annotated[bool, typer.Option(help="Choose learning rates and the like on validation data.")] = True,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Worker processes (default: chosen by the engine).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write (default: runs/compare-NAME).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted comparison in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Compare methods: does personalization help here, for whom, and at what cost?

    `bespoke compare` alone runs on built-in data: 31,022 exam results in 2,410 schools.

    `bespoke compare TABLE.csv --client school --target score --group lea` runs on your own.
    """
    from bespoke.errors import UserError

    if table is not None and data is not None:
        raise UserError("give a table or --data, not both")
    if table is not None and table.suffix == ".toml":
        _compare_file(table, out, resume, as_json)
        return
    if table is None and (client or target or group or features):
        raise UserError(
            "--client, --target, --group and --features describe a table; which one? bespoke compare TABLE.csv ..."
        )
    if table is not None and not (client and target):
        raise UserError(f"tell what is what in {table}: --client COLUMN (who) and --target COLUMN (what to predict)")
    if table is not None:
        described: dict[str, Any] = {
            "table": str(table),
            "client": client,
            "target": target,
            "group": group,
            "time": time,
            "task": task,
            "features": [name.strip() for name in features.split(",")] if features else None,
        }
        stem = f"compare-{table.name.split('.')[0]}"
    else:
        described = {"source": data or "chem97"}
        stem = f"compare-{described['source']}"
    split = {"protocol": protocol, "order": "time"} if time else {"protocol": protocol}
    base: dict[str, Any] = {
        "data": {k: v for k, v in described.items() if v is not None},
        "split": split,
        "model": {"name": model},
        "cohort": {} if cohort is None else {"size": cohort},
        "engine": {} if workers is None else {"workers": workers},
    }
    if metric:
        base["metric"] = metric
    from bespoke.compare import Comparison
    from bespoke.progress import Bars, stopping

    folder = _place(out, stem, resume)
    names = tuple(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip()))
    # the command that repeats this, without what only says where to put it
    arguments = [a for a in sys.argv[1:] if a != "--resume"]
    command = shlex.join(["bespoke", *arguments])
    with Bars(f"comparing {', '.join(names)}", quiet=as_json) as bars, stopping() as stop:
        Comparison(
            base, folder, names, tuple(range(seeds)), rounds, tune, command=command, progress=bars, stop=stop
        ).run()
    _report([folder], folder / "report.html", as_json)


def _compare_file(path: Path, out: Path | None, resume: bool, as_json: bool) -> None:
    """A comparison described by a TOML file, such as those in benchmarks/motley."""
    from bespoke.compare import Comparison
    from bespoke.progress import Bars, stopping

    folder = _place(out, f"compare-{path.stem}", resume)
    command = shlex.join(["bespoke", "compare", str(path)])
    with Bars(f"comparing as {path} says", quiet=as_json) as bars, stopping() as stop:
        Comparison.read(path, folder, command=command, progress=bars, stop=stop).run()
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
        print(json.dumps({**json.loads(summary.to_json()), "report": str(output), "folder": str(paths[0])}))
        return
    from rich.console import Console

    from bespoke.reports.table import print_summary

    console = Console()
    print_summary(summary, console)
    console.print(f"\nReport: [bold]{output}[/bold]", highlight=False, soft_wrap=True)


@app.command()
def run(
    experiment: Annotated[Path, typer.Argument(help="An experiment file (TOML).")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, e.g. stage.0.lr=0.1")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write (default: runs/NAME of the file).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Run one experiment file: stages of methods, then the personal models, into a run folder.

    Ctrl-C stops after the current round; the same command with `--resume --out FOLDER` goes on, to the same bytes.
    """
    from bespoke.config import read_config
    from bespoke.errors import UserError
    from bespoke.experiments import build, to_toml
    from bespoke.progress import Bars, stopping
    from bespoke.rounds import Run
    from bespoke.runfolder import RunFolder

    if resume and out is None:
        begun = Path("runs") / experiment.stem
        out = begun if begun.is_dir() else out
    config = read_config(experiment, settings)
    folder = _place(out, experiment.stem, resume)
    text = to_toml(config)
    if resume and (folder / "config.toml").exists() and (folder / "config.toml").read_text(encoding="utf-8") != text:
        raise UserError(f"{folder} was begun with another configuration; resume with the same file and --set options")
    built = build(config)
    run_folder = RunFolder.create(folder, text)
    with Bars(built.label, quiet=as_json) as bars, stopping() as stop, run_folder.locked():
        result = Run(built, run_folder, bars, stop=stop).run()
    if as_json:
        print(json.dumps({**result, "folder": str(folder)}))
        return
    better = "lower" if result["lower_is_better"] else "higher"
    print(
        f"{result['label']}: mean {result['metric']} per client {result['query']:.5g} ({better} is better), "
        f"{result['clients']} clients, {result['rounds']} rounds"
    )
    print(f"Run folder: {folder}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="A comparison folder, or run folders of any methods and seeds.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file (default: report.html in the first).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the report of a comparison, or of several runs, from what lies on disk."""
    from bespoke.errors import UserError

    for path in runs:
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
    _report(runs, output or runs[0] / "report.html", as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="Show one method in full.")] = None, as_json: Json = False
) -> None:
    """List the methods, or show one: what it does, what travels, what stays private, its knobs."""
    from bespoke.catalogue import describe_methods, print_method, print_methods

    found = describe_methods(name)
    if as_json:
        print(json.dumps(found if name is None else found[0]))
    elif name is None:
        print_methods(found)
    else:
        print_method(found[0])


@app.command()
def data(
    name: Annotated[str | None, typer.Argument(help="Show one source in full.")] = None, as_json: Json = False
) -> None:
    """List the data sources, or show one: clients, examples, licence, how to obtain it."""
    from bespoke.catalogue import describe_sources, print_source, print_sources

    found = describe_sources(name)
    if as_json:
        print(json.dumps(found if name is None else found[0]))
    elif name is None:
        print_sources(found)
    else:
        print_source(found[0])


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    client: Client,
    out: Annotated[Path | None, typer.Option(help="Folder to write (default: personal/ID in the run folder).")] = None,
    as_json: Json = False,
) -> None:
    """Write a client's personal model: safetensors, and a JSON that says how to load it."""
    from bespoke.deploy.personal import export_personal

    written = export_personal(run, client, out)
    if as_json:
        print(json.dumps(written))
    else:
        made = f"{written['candidate']}, {written['parameters']:,} parameters"
        print(f"Personal model of {client}: {written['folder']} ({made})")
        print(f'Load it: from bespoke import load_personal; load_personal("{written["folder"]}").predict(rows)')


@app.command()
def forget(run: Annotated[Path, typer.Argument(help="A run folder.")], client: Client, as_json: Json = False) -> None:
    """Delete a client's private state and personal model from a run, and prove that they are gone."""
    from bespoke.deploy.forget import forget_client

    receipt = forget_client(run, client)
    if as_json:
        print(json.dumps(receipt))
    else:
        for line in receipt["summary"]:
            print(line)


def main() -> None:
    """Entry point: a user's mistake ends with 2, a failure with 1, Ctrl-C with 130; no tracebacks for the first."""
    import errno

    from bespoke.errors import UserError

    try:
        app(standalone_mode=True)
    except UserError as error:
        _say(f"bespoke: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        _say("bespoke: interrupted; what was finished is kept")
        sys.exit(130)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            where = f" ({error.filename})" if error.filename else ""
            _say(f"bespoke: the disk is full{where}; free some space and go on with --resume, nothing finished is lost")
            sys.exit(1)
        if isinstance(error, PermissionError):
            _say(f"bespoke: no permission for {error.filename}; choose another place with --out")
            sys.exit(2)
        raise
    except Exception as error:
        from_rounds = type(error).__name__ == "Interrupted"
        if not from_rounds:
            raise
        _say(f"bespoke: {error}; go on with the same command and --resume --out FOLDER")
        sys.exit(130)


if __name__ == "__main__":
    main()
