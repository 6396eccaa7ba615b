"""The commands `bespoke deploy init | join | approve | site | peers | hub | harden`: a real federation."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bespoke.cli.app import Json, app
from bespoke.cli.console import print_json
from bespoke.errors import UserError

deploy = typer.Typer(
    name="deploy",
    help="Run a federation on several machines, with NVIDIA FLARE. Start with `bespoke deploy init hub.toml`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.add_typer(deploy)

UNSAID = 30.0  # seconds after which a hub or a site that is not ready says what it is waiting for

Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where to write.")]
HubFolder = Annotated[Path, typer.Option("--hub", metavar="FOLDER", help="The hub's folder, made by `init`.")]


@deploy.command()
def init(
    settings: Annotated[
        Path, typer.Argument(metavar="HUB.TOML", help="The settings of the project: server name, sites, schema.")
    ],
    out: Out = None,
    as_json: Json = False,
) -> None:
    """At the hub: create the certificate authority, the hub's kit, and the file that the sites fill in.

    `bespoke deploy init hub.toml`
    """
    from bespoke.deploy.flare.project import read_hub

    hub = read_hub(settings)
    from bespoke.deploy.flare.authority import Authority
    from bespoke.deploy.flare.kit import write_hub

    folder = out or settings.parent / "hub"
    write_hub(hub, folder, _schema(hub.schema_file, settings.parent))
    (folder / "hub.toml").write_bytes(settings.read_bytes())
    fingerprint = Authority.load(folder / "authority").fingerprint
    if as_json:
        print_json({"folder": str(folder), "invitation": str(folder / "site.toml"), "fingerprint": fingerprint})
        return
    print(f"The hub of {hub.name} is in {folder}. The fingerprint of its certificate authority:")
    print(f"  {fingerprint}")
    print(f"Send {folder / 'site.toml'} to the sites ({', '.join(hub.sites)}).")
    print("Tell them the fingerprint by telephone.")
    print(f"{folder / 'authority'} signs certificates. Keep it secret; a machine without a network will do.")
    print("Start the hub: bespoke deploy hub" + ("" if out is None else f" {folder}"))


@deploy.command()
def join(
    settings: Annotated[
        Path, typer.Argument(metavar="SITE.TOML", help="The file from the hub, with name and org filled in.")
    ],
    out: Out = None,
    as_json: Json = False,
) -> None:
    """At a site: create the site's key, which never leaves the site, and a certificate request for the hub.

    `bespoke deploy join site.toml`
    """
    from bespoke.deploy.flare.project import read_site

    site = read_site(settings)
    from bespoke.deploy.flare.authority import request, request_fingerprint

    folder = out or settings.parent / site.name
    path = request(site, folder)
    if settings.resolve() != (folder / "site.toml").resolve():
        (folder / "site.toml").write_bytes(settings.read_bytes())
    key = request_fingerprint(path)
    if as_json:
        print_json({"folder": str(folder), "request": str(path), "key": key})
        return
    print(f"Send {path} to the hub, and tell the hub the fingerprint of your key by telephone:")
    print(f"  {key}")
    print(f"The hub sends {site.name}.approved.zip back. Put it into {folder}, then start:")
    print(f"  bespoke deploy site {folder} --data rows.csv")


@deploy.command()
def approve(
    request: Annotated[Path, typer.Argument(metavar="REQUEST.ZIP", help="The request that a site has sent.")],
    hub: HubFolder = Path("hub"),
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the file for the site (default: NAME.approved.zip)."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", metavar="", help="Approve a site again, because it has a new key.")
    ] = False,
    as_json: Json = False,
) -> None:
    """At the hub: sign a site's certificate. Compare the fingerprint with the one from the site before you send it.

    `bespoke deploy approve north.request.zip`
    """
    from bespoke.deploy.flare.project import read_hub

    said = read_hub(hub / "hub.toml")
    from bespoke.deploy.flare.authority import Authority, request_fingerprint
    from bespoke.deploy.flare.authority import approve as sign

    schema = hub / "schema.json"
    written = sign(
        Authority.load(hub / "authority"), said, request, schema.read_bytes() if schema.exists() else b"", out, again
    )
    key = request_fingerprint(request)
    if as_json:
        print_json({"approved": str(written), "key": key})
        return
    print(f"Send {written} to the site only if the site has told you this fingerprint by telephone:")
    print(f"  {key}")


@deploy.command()
def site(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The site's folder, made by `join`.")],
    data: Annotated[
        Path | None, typer.Option(metavar="ROWS", help="The site's table, or the folder of its population.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", metavar="", help="Check the kit and the rows without starting.")
    ] = False,
) -> None:
    """At a site: check the rows against the agreed schema, then start and run until Ctrl-C.

    `bespoke deploy site north --data rows.csv`
    """
    from bespoke.deploy.flare.project import read_site

    settings = read_site(folder / "site.toml")
    from bespoke.deploy.flare.hardened import check_kit
    from bespoke.deploy.flare.kit import settle_site, write_site
    from bespoke.deploy.flare.rows import check_rows

    kit, approved = folder / "kit", folder / f"{settings.name}.approved.zip"
    certificate = kit / "startup/client.crt"
    if not certificate.exists() and not approved.exists():
        raise UserError(f"{approved} is missing: it comes from the hub, in answer to {settings.name}.request.zip")
    if not certificate.exists() or (approved.exists() and approved.stat().st_mtime > certificate.stat().st_mtime):
        write_site(settings, folder, approved)
    check_kit(kit)
    for line in check_rows(kit, data, settings.least):
        print(line)
    settle_site(kit, settings, data=data)
    if not check:
        _stay(kit)


@deploy.command()
def peers(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that `join` has made.")],
    as_json: Json = False,
) -> None:
    """At a site: the fingerprints of this site's key and of those that it takes secure sums with, to compare.

    `bespoke deploy peers north`
    """
    from bespoke.deploy.flare.peers import known_peers
    from bespoke.deploy.flare.project import read_site

    settings = read_site(folder / "site.toml")
    found = known_peers(folder, settings)
    if as_json:
        print_json({"name": settings.name, "key": found.own, "agreed": found.agreed, "heard": found.heard})
        return
    print(f"This site's key, to tell to the other sites by telephone:\n  {settings.name}: {found.own}")
    if found.agreed is not None:
        print("Agreed on, in [peers] of site.toml; no other site is added up with:")
    elif found.heard:
        print("Heard through the hub, and not agreed on. Compare by telephone, and put them into site.toml:\n[peers]")
    else:
        print("No other site is known yet. Ask them by telephone, and put what they say into [peers] of site.toml.")
    for name, fingerprint in sorted((found.heard if found.agreed is None else found.agreed).items()):
        print(f'{name} = "{fingerprint}"')
    for line in found.differences:
        print(f"Attention: {line}")


@deploy.command()
def hub(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The hub's folder, made by `init`.")] = Path("hub"),
) -> None:
    """At the hub: start and run until Ctrl-C. The command reports which sites connect and what needs attention.

    `bespoke deploy hub`
    """
    from bespoke.deploy.flare.kit import follow_list
    from bespoke.deploy.flare.project import read_hub

    follow_list(folder / "kit", read_hub(folder / "hub.toml"))
    _stay(folder / "kit")


@deploy.command()
def harden(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of a hub or a site.")],
) -> None:
    """Write the security settings of a kit again, after its folder was moved or changed.

    `bespoke deploy harden north`
    """
    from bespoke.deploy.flare.kit import harden as write

    print(f"{folder / 'kit'}: the {write(folder / 'kit')}'s kit is hardened")


def _schema(named: str | None, beside: Path) -> bytes:
    """The agreed schema as a file, checked."""
    if named is None:
        return b""
    import json

    from bespoke.data.tables.schema import Schema

    return json.dumps(Schema.read(beside / named).to_json(), indent=1, ensure_ascii=False).encode()


def _stay(kit: Path) -> None:
    """Starts a kit, says what happens, and ends it with this program."""
    from bespoke.deploy.flare.roster import notices
    from bespoke.deploy.flare.running import start

    running = start(kit, wait=None)
    print(f"{running.name} starts; its log is {kit / 'log.txt'}. Ctrl-C ends it.", flush=True)
    since, patience = time.time(), time.monotonic() + UNSAID
    try:
        while running.alive():
            for news in running.news():
                print(news, flush=True)
                patience = float("inf")
            for line in notices(kit, since) if running.role == "hub" else []:
                since = line["time"] + 1e-3
                print(f"Attention: the site {line['site']!r} {line['what']}: {line['more']}", flush=True)
            if time.monotonic() > patience:
                patience = time.monotonic() + UNSAID
                print(f"Not ready yet. The last line of {running.name}:\n  {running.last_lines(1)}", flush=True)
            time.sleep(0.5)
    except KeyboardInterrupt:
        print(f"{running.name} has stopped.")
        return
    finally:
        running.stop()
    raise UserError(f"{running.name} has ended by itself; the end of {kit / 'log.txt'}:\n{running.last_lines(4)}")
