"""The commands `bespoke methods`, `metrics` and `data`, which list what is available."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from bespoke.cli.app import Json, app
from bespoke.cli.console import print_json
from bespoke.errors import UserError
from bespoke.plain import TomlTable


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Describe this method in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or describe one: what it does, what it sends, what stays private, its settings.

    `bespoke methods`, then `bespoke methods finetune`
    """
    from bespoke.cli.descriptions import describe_methods, print_method, print_methods

    found = describe_methods(name)
    if as_json:
        print_json(found if name is None else found[0])
    elif name is None:
        print_methods(found)
    else:
        print_method(found[0])


@app.command()
def metrics(as_json: Json = False) -> None:
    """List the metrics of each task, and those that installed packages offer.

    `bespoke metrics`; a metric of your own is named as "package.module:name", see docs/doors.md.
    """
    from bespoke.cli.descriptions import describe_metrics, print_metrics

    found = describe_metrics()
    if as_json:
        print_json(found)
    else:
        print_metrics(found)


@app.command()
def data(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Describe this source in full. With --write-schema or --figure, a table is allowed."
        ),
    ] = None,
    write_schema: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the schema of a public table into this file (.json or .toml)."),
    ] = None,
    client: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The table's column with the client's id.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="The table's column to predict.")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="The table's column with the client's group.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(metavar="COLUMNS", help="The table's columns to predict from: a,b,c.")
    ] = None,
    time: Annotated[str | None, typer.Option(metavar="COLUMN", help="The table's column with the time.")] = None,
    task: Annotated[str | None, typer.Option(metavar="TASK", help="regression or classification.")] = None,
    text: Annotated[str | None, typer.Option(metavar="COLUMN", help="The table's column with texts.")] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="NAME", help="words, characters, or a folder.")] = None,
    figure: Annotated[
        bool,
        typer.Option(
            "--figure", metavar="", help="Write a page with figures of clients' sizes, targets and differences."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the data sources, or describe one: clients, examples, licence, how to obtain it.

    `bespoke data`, then `bespoke data chem97` and `bespoke compare --data chem97`

    `bespoke data chem97 --figure`, or `bespoke data pupils.csv --client school --target score --figure` writes
    a page. It shows how many examples clients have, their targets, and how much they differ beyond chance.

    `bespoke data public.csv --client school --target score --write-schema schema.json` writes the schema of a
    public table: kinds of columns, categories, ranges. Under privacy, `bespoke compare private.csv --schema
    schema.json` uses it. With --text instead of --target the schema holds the words of the texts.
    """
    columns = {"client": client, "target": target, "text": text, "group": group, "features": features, "time": time,
               "task": task, "tokenizer": tokenizer}  # fmt: skip
    if write_schema is not None:
        from bespoke.cli.compare import described_data

        if name is None:
            raise UserError(f"--write-schema {write_schema}: of which table? bespoke data TABLE.csv --write-schema ...")
        described = described_data(Path(name), None, columns)
        _write_schema(described, write_schema)
        if as_json:
            print_json({"schema": str(write_schema)})
        else:
            print(f"Schema: {write_schema}. It holds what the table says of its columns: read it before it is public.")
        return
    if figure:
        _draw(name, columns, as_json)
        return
    if given := [option for option, value in columns.items() if value is not None]:
        raise UserError(f"--{given[0]} describes a table, for --write-schema FILE or --figure")
    from bespoke.cli.descriptions import describe_sources, print_source, print_sources

    found = describe_sources(name)
    if as_json:
        print_json(found if name is None else found[0])
    elif name is None:
        print_sources(found)
    else:
        print_source(found[0])


def _draw(name: str | None, columns: dict[str, str | None], as_json: bool) -> None:
    """Writes a page about a source or a table into runs/."""
    from bespoke.cli.compare import described_data
    from bespoke.data.sources.registry import SOURCES
    from bespoke.experiment.checks import checked
    from bespoke.experiment.loading import load_population
    from bespoke.experiment.prepare import prepare
    from bespoke.imported import trust_named
    from bespoke.report.data_page import write_data_page

    if name is None:
        raise UserError("--figure: of which data? bespoke data chem97 --figure, or a table with --client and --target")
    trust_named(name)
    table = None if SOURCES.knows(name) else Path(name)
    described = described_data(table, name if table is None else None, columns)
    config = checked({"data": described, "stage": [{"method": "fedavg", "rounds": 1}]}, "data")
    population = prepare(config, load_population(config)).plain
    given = [part for option, value in columns.items() if value is not None for part in (f"--{option}", value)]
    page = Path("runs") / f"data-{Path(name).stem}.html"
    found = write_data_page(population, page, f"bespoke data {shlex.join([name, *given, '--figure'])}")
    if as_json:
        print_json(found)
        return
    print(f"{found['clients']:,} clients with {found['mean']:,.1f} ± {found['sd']:,.1f} examples each.")
    print(f"{100 * found['beyond_chance']:.0f} % of the clients differ from all together by more than chance.")
    print(f"Page: {page}")


def _write_schema(described: TomlTable, path: Path) -> None:
    """Writes the schema of a table that the user declares public, using all of its rows."""
    from bespoke.experiment.checks import checked
    from bespoke.experiment.loading import load_population

    if path.suffix not in (".json", ".toml"):
        raise UserError(f"--write-schema {path}: a file that ends in .json or .toml")
    raw = load_population(checked({"data": described, "stage": [{"method": "fedavg", "rounds": 1}]}, "data"))
    if "pieces" in raw.columns and "cells" not in raw.columns:
        import numpy as np

        from bespoke.data.tables.schema import write_words
        from bespoke.data.texts.vocabulary import learned

        write_words(path, learned(raw, np.arange(raw.rows)))
    elif "cells" not in raw.columns:
        raise UserError(f"--write-schema {path}: a schema says what a table's columns are, and these are pictures")
    else:
        from bespoke.data.tables.features import declare

        declare(raw).write(path)
