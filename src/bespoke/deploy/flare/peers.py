"""The other sites that a site knows: by what was agreed on over another channel, and by what it heard from its hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bespoke.deploy.federated.identities import key_fingerprint
from bespoke.deploy.flare.keys import read_key
from bespoke.deploy.flare.project import SiteSettings
from bespoke.digests import read_json

HEARD = "state/secure/sites.json"  # in a site's folder; written by deploy/federated/members.py


@dataclass(frozen=True)
class Peers:
    """Fingerprints of sites' keys, by the sites' names."""

    own: str
    agreed: dict[str, str] | None
    heard: dict[str, str]  # without the site's own

    @property
    def differences(self) -> list[str]:
        """Where the hub has said something else than the sites themselves."""
        agreed = self.agreed or {}
        return [
            f"the hub has said {fingerprint} of {name}"
            for name, fingerprint in sorted(self.heard.items())
            if name in agreed and agreed[name] != fingerprint
        ]


def known_peers(folder: Path, settings: SiteSettings) -> Peers:
    path = folder / HEARD
    heard = read_json(path, "remove it, and compare fingerprints again") if path.exists() else {}
    own = key_fingerprint(read_key(folder / "site.key").public_key())
    others = {str(name): str(found) for name, found in heard.items() if name != settings.name}
    return Peers(own, settings.peers, others)
