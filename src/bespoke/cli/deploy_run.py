"""The commands `bespoke deploy run | predict | demo`: experiments on a real federation, and what comes of them."""

from __future__ import annotations

import csv
import io
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from bespoke.cli.app import Json
from bespoke.cli.console import print_json
from bespoke.cli.deploy import HubFolder, deploy
from bespoke.errors import UserError


@deploy.command()
def run(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="The experiment file.")],
    hub: HubFolder = Path("hub"),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Overrides a key of the file (repeatable)."),
    ] = None,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="The name of the run (default: the name of the file).")
    ] = "",
    late: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="The longest time that a round waits for a site.")
    ] = 3600.0,
    patience: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="The longest time to wait for the hub, or for enough sites.")
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """At the hub: run an experiment on the connected sites. It uses the sites' rows, whatever [data] names.

    `bespoke deploy run exp.toml`

    If the run is interrupted, or the hub or a site fails, the same command continues it.
    """
    from bespoke.experiment.checks import checked
    from bespoke.experiment.reading import read_experiment

    raw = read_experiment(experiment, settings)
    for table in ("tune", "callbacks"):
        raw.pop(table, None)
    config = checked(raw, str(experiment))
    kit = hub / "kit"
    if not (kit / "startup").is_dir():
        raise UserError(f"{hub} is no hub's folder: it has no kit; make one with: bespoke deploy init hub.toml")
    from bespoke.cli.progress import Bars
    from bespoke.deploy.federated.report import lines
    from bespoke.deploy.flare.job import Federation

    federation = Federation(kit, config, name or experiment.stem, late=late, patience=patience)
    with (
        Bars(f"running {experiment} on {len(federation.expected)} sites", quiet=as_json) as bars,
        bars.stopping() as stop,
    ):
        federation.progress, federation.stop = bars, stop
        result = federation.run()
    if as_json:
        print_json({**result, "folder": str(federation.run_folder)})
        return
    for line in lines(result, federation.run_folder):
        print(line)
    print(f"Run folder: {federation.run_folder}")


@deploy.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder.")],
    rows: Annotated[
        Path, typer.Option(metavar="ROWS", help="A table or a population with new rows of the site's clients.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Where to write (default: standard output).")
    ] = None,
) -> None:
    """At a site: predict new rows with the personal models of its clients, which never leave the site.

    `bespoke deploy predict north --rows new.csv --out predicted.csv`
    """
    from bespoke.deploy.flare.predict import predict as predicted
    from bespoke.storage import write_text

    found = predicted(folder, rows)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["client", f"predicted {found.target}".strip()])
    table.writerows([client, "" if value is None else value] for client, value in zip(found.clients, found.values))
    if out is None:
        print(text.getvalue(), end="")
    else:
        write_text(out, text.getvalue())
    if found.strangers:
        many = len(found.strangers)
        print(
            f"bespoke: no prediction for {many} clients without a personal model: {', '.join(found.strangers[:10])}",
            file=sys.stderr,
        )


@deploy.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder for the hub and the sites (default: a new one).")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of rounds of Ditto; half as many of FedAvg come first.")
    ] = 6,
    as_json: Json = False,
) -> None:
    """On this machine: run Ditto on built-in data with a hub and three sites, and show what each site sent.

    `bespoke deploy demo`
    """
    from bespoke.cli.progress import Bars
    from bespoke.deploy.federated.report import lines
    from bespoke.deploy.flare.demo import SITES
    from bespoke.deploy.flare.demo import demo as shown

    if out is not None and out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; choose a new folder")
    folder = out or Path(tempfile.mkdtemp(prefix="bespoke-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    with Bars("a federation on this machine", quiet=as_json) as bars, bars.stopping() as stop:
        found = shown(folder, rounds, bars, stop)
    if as_json:
        print_json({**found.result, "folder": str(found.run), "sent": {name: found.sent(name) for name in SITES}})
        return
    for line in lines(found.result, found.run):
        print(line)
    for name in SITES:
        print(f"What {name} sent ({found.sites[name] / 'state' / 'sent.jsonl'}):")
        for line in found.sent(name):
            print(f"  {line}")
        print(f"  What stayed: {found.models(name)} personal models; use them with: bespoke deploy predict")
    print(f"Run folder: {found.run}")
