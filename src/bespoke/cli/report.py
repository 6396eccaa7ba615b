"""The commands `bespoke report` and `bespoke analyze`, which read finished run folders."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bespoke.cli.app import Json, NameClients, app
from bespoke.cli.console import print_json, show_report
from bespoke.cli.output_folder import goes_on
from bespoke.errors import UserError


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
    name_clients: NameClients = False,
    as_json: Json = False,
) -> None:
    """Write the report of a comparison, or of several runs, from their folders.

    `bespoke report runs/compare-pupils` or `bespoke report runs/a runs/b -o both.html`
    """
    for path in runs:
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
    output = output or runs[0]
    show_report(runs, output / "report.html" if output.is_dir() else output, as_json, name_clients)


@app.command()
def analyze(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Finished run folders, or a comparison folder: all of its runs."),
    ],
    ood: Annotated[
        bool,
        typer.Option(
            "--ood", metavar="", help="Score on own rows and on other clients' rows while personalization proceeds."
        ),
    ] = False,
    rows: Annotated[
        int, typer.Option("--ood-rows", min=1, metavar="N", help="Number of other clients' rows for --ood.")
    ] = 500,
    fewer: Annotated[
        str | None,
        typer.Option(
            "--fewer-examples", metavar="FRACTIONS", help="Personalize with fractions of the examples: 1,0.5,0.25."
        ),
    ] = None,
    tests: Annotated[
        str | None,
        typer.Option("--smaller-tests", metavar="FRACTIONS", help="Test on fractions of the examples: 1,0.5,0.25."),
    ] = None,
    examples: Annotated[
        str | None,
        typer.Option("--examples", metavar="NUMBERS", help="Personalize with numbers of examples: 1,5,15,all."),
    ] = None,
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep", metavar="KNOB[=VALUES]", help="Vary one setting: finetune.lrs=0.001,0.01,0.1 (repeatable)."
        ),
    ] = None,
    per_client: Annotated[
        bool,
        typer.Option(
            "--per-client", metavar="", help="Compare settings chosen by each client with one setting for all clients."
        ),
    ] = False,
    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings",
            metavar="",
            help="Show what embeddings reveal about groups, and draw maps of users and contexts.",
        ),
    ] = False,
    crossed: Annotated[
        bool,
        typer.Option(
            "--crossed", metavar="", help="Compare own with other clients' models, and right with wrong contexts."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Analyze finished runs: robustness, fewer examples, hyper-parameters. No federated training is repeated.

    `bespoke analyze runs/compare-pupils` makes every analysis that applies and renews the report with its figures.

    `bespoke analyze runs/exp --sweep finetune.lrs=0.001,0.01,0.1` makes one analysis of one run.

    Results are stored as JSON and Parquet in the folder `analysis` of each run. Existing results are not made again.
    """
    from bespoke.analysis.analyze import Analyses, Wanted
    from bespoke.analysis.fewer import parse_fractions, parse_numbers
    from bespoke.cli.progress import Bars

    for path in runs:
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
    fractions = parse_fractions(fewer) if fewer is not None else ()
    numbers = parse_numbers(examples) if examples is not None else ()
    tested = parse_fractions(tests, "--smaller-tests") if tests is not None else ()
    wanted = Wanted(ood, rows, fractions, tuple(sweeps or ()), per_client, embeddings, numbers, crossed, tested)
    with goes_on(), Bars("analyzing", quiet=as_json) as bars, bars.stopping() as stop:
        records = Analyses.of(runs, wanted, progress=bars, stop=stop).run()
    pages = [path / "report.html" for path in runs if (path / "compare.json").exists()]
    if pages:
        from bespoke.report.page import write_report

        for page in pages:
            write_report([page.parent], page)
    if as_json:
        print_json({"analyses": records, "reports": [str(page) for page in pages]})
        return
    from bespoke.report.terminal import print_analyses

    print_analyses([Path(record["folder"]) for record in records], {record["analysis"] for record in records})
    for page in pages:
        print(f"Report: {page}")
    if not pages:
        print("Figures: bespoke report " + shlex.join(map(str, runs)))
