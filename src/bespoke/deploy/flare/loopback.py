"""A whole project on one machine, for tests, demonstrations and first steps: a hub and its sites on loopback."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bespoke.deploy.flare.authority import Authority, approve, request
from bespoke.deploy.flare.kit import settle_site, write_hub, write_site
from bespoke.deploy.flare.project import Hub, SiteSettings, check
from bespoke.deploy.flare.running import Running, start


@dataclass
class Loopback:
    """Kits of a hub and its sites, and what runs of them. As a context it ends all of it."""

    hub: Hub
    kit: Path
    sites: dict[str, Path]  # kits by name
    running: dict[str, Running] = field(default_factory=dict)  # `hub` and sites by name

    def start(self, *names: str, wait: float = 60.0) -> Loopback:
        """Starts the hub and the named sites (default: all), and waits until all are ready."""
        if "hub" not in self.running:
            self.running["hub"] = start(self.kit, wait)
        for name in names or self.sites:
            self.running[name] = start(self.sites[name], None)
        for name in names or self.sites:
            self.running[name].wait(wait)
        return self

    def stop(self, *names: str) -> None:
        """Ends the named (default: all) processes; sites first, so that the hub notices."""
        for name in names or sorted(self.running, key=lambda name: name == "hub"):
            self.running.pop(name).stop()

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def make_loopback(
    folder: Path,
    sites: Sequence[str] = ("north", "south", "west"),
    data: Mapping[str, Path] | None = None,
    settings: Mapping[str, Any] | None = None,
    schema: bytes = b"",
    **hub: Any,
) -> Loopback:
    """Writes all kits in a folder: HUB in folder/hub, the sites in folder/NAME.

    `data`: a site's table or population; `settings`: what all sites' site.toml say besides; `hub`: what hub.toml says.
    """
    told = {"name": "demo", "server": "localhost", "port": free_port(), "sites": list(sites), "org": "hub"}
    made = check({**told, **hub}, Hub, "hub.toml")
    kit = write_hub(made, folder / "hub", schema)
    authority = Authority.load(folder / "hub/authority")
    kits: dict[str, Path] = {}
    for name in made.sites:
        site = check(
            {"name": name, "org": f"org-{name}", "project": made.name, "server": made.server, "port": made.port,
             "fingerprint": authority.fingerprint, **(settings or {})},
            SiteSettings, "site.toml",
        )  # fmt: skip
        asked = request(site, folder / name)
        kits[name] = write_site(site, folder / name, approve(authority, made, asked, schema))
        if data is not None and name in data:
            settle_site(kits[name], site, data=data[name])
    return Loopback(made, kit, kits)
