"""The commands `bespoke export` and `bespoke forget`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bespoke.cli.app import Client, Json, app
from bespoke.cli.console import print_json


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    client: Client,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where to write (default: personal/ID in the run folder).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a client's personal model: safetensors, and a JSON file that says how to load it.

    `bespoke export runs/compare-pupils/runs/finetune-seed0 --client "school 7"`
    """
    from bespoke.deploy.export import export_personal

    written = export_personal(run, client, out)
    if as_json:
        print_json(written)
    else:
        made = f"{written['candidate']}, {written['parameters']:,} parameters"
        print(f"Personal model of {client}: {written['folder']} ({made})")
        print(f'Load it: from bespoke import load_personal; load_personal("{written["folder"]}").predict(rows)')


@app.command()
def forget(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of a comparison, a run or a tuning.")],
    client: Client,
    as_json: Json = False,
) -> None:
    """Remove a client from all files of a folder, make its report again, and search for remaining traces of the client.

    `bespoke forget runs/compare-pupils --client "school 7"`

    If the command is interrupted, run it again. It lists the effects of the client that it cannot undo.
    """
    from bespoke.deploy.forget import forget_client

    receipt = forget_client(folder, client)
    if as_json:
        print_json(receipt)
    else:
        for line in receipt["summary"]:
            print(line)
