"""The application, and the options that several commands share."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(
    name="bespoke",
    help="Personalized federated learning: simulate, compare and deploy.\n\n"
    "Start with `bespoke compare`. Give it a table with a client column and a target column. It answers whether "
    "personal models are better than one shared model, for which clients, by how much and at what cost.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.", metavar="")]
Client = Annotated[str, typer.Option("--client", metavar="ID", help="The client's id, as in the client column.")]
NameClients = Annotated[
    bool, typer.Option("--name-clients", metavar="", help="Show client names even for runs under [privacy].")
]
Resume = Annotated[bool, typer.Option("--resume", metavar="", help="Resume the interrupted work in --out.")]

Jobs = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of runs at the same time (default: one per core if runs are light)."),
]

Backend = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Where the work is done: processes (of this machine) or ray (a cluster; needs bespoke-fl[ray]).",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The Ray cluster: auto for the one of this machine, or its head's host:port (default: Ray starts here).",
    ),
]

Callbacks = Annotated[
    list[str] | None,
    typer.Option(
        "--callback",
        metavar="NAME",
        help="A callback that observes runs or ends their training: early-stop,patience=5, tensorboard,folder=logs, "
        "mlflow, wandb, or package.module:Class (repeatable; see docs/callbacks.md).",
    ),
]


def placed(settings: list[str] | None, engine: str | None, address: str | None) -> list[str]:
    """The settings of --set with --engine and --address, which are keys of [engine]."""
    given = (("backend", engine), ("address", address))
    return [*(settings or []), *(f"engine.{key}={json.dumps(value)}" for key, value in given if value is not None)]


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
            help="Allow a run folder to import this code, which is not part of bespoke (repeatable).",
        ),
    ] = None,
) -> None:
    from bespoke.imported import announce, trust

    announce()
    trust(*(trusted or []))
