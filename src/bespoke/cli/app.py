"""The application, and the options that several commands share."""

from __future__ import annotations

from typing import Annotated

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
NameClients = Annotated[
    bool, typer.Option("--name-clients", metavar="", help="Name single clients, also of runs under [privacy].")
]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Go on with what was interrupted in --out.")]

Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Runs at a time (default: one for each core, where runs are light)."),
]

Callbacks = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="NAME",
        help="Who is told of the runs, or ends their training: early-stop,patience=5, tensorboard,folder=logs, mlflow, "
        "wandb, or package.module:Class (repeatable; see docs/callbacks.md).",
    ),
]


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
    trusted: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            metavar="MODULE:NAME",
            help="Allow code that is not part of bespoke to be imported where a run folder names it (repeatable).",
        ),
    ] = None,
) -> None:
    from bespoke.imported import announce, trust

    announce()
    trust(*(trusted or []))
