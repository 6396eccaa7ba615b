"""A site's clients as members of secure sums: their identities, whom they know and what they have answered lie on disk.

So a site that was killed is who it was, and answers no round twice. Identities reach other sites through the hub, each
with its site's word for it (identities.py).
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from bespoke.deploy.federated.identities import Papers, Vouched
from bespoke.digests import read_json, sealed
from bespoke.federation.masked import Members
from bespoke.messages.secure.client import Client
from bespoke.messages.secure.keys import KEY_BYTES, Identity, derived
from bespoke.messages.secure.refused import Refused
from bespoke.messages.secure.settings import SecureConfig
from bespoke.storage import write_text

SITES = "sites.json"
REMEMBERED = 10_000  # rounds
LOST = "without it this site's clients would answer twice, or as somebody else: put it back"


class SiteMembers(Members):
    """Members whose memory is a folder of the site."""

    def __init__(self, secure: SecureConfig, folder: Path, papers: Papers) -> None:
        super().__init__(secure)
        self.folder, self.papers = folder, papers
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.secret = _secret(folder / "identity.key")
        self.sites: dict[str, str] = self._read(SITES)  # the fingerprint of each site's key
        self.vouched = {name: Vouched(bytes.fromhex(public), site, key)
                        for name, (public, site, key) in self._read("directory.json").items()}  # fmt: skip
        # what was heard before sites agreed on their keys does not count where it differs
        self.vouched = {name: found for name, found in self.vouched.items() if self._accepted(found)}
        self.directory = {name: found.public for name, found in self.vouched.items()}
        self.spent: dict[str, int] = self._read("spent.json")
        self.added: dict[str, list[list[str]]] = self._read("added.json")  # by round's key: whose sum was consented to
        self.key = ""

    def begin(self, key: int) -> None:
        """A round begins: its messages are about to be held."""
        self.key = str(key)

    def answer(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        if step == "consent":
            for client, message in messages.items():
                self._same(self.clients[client].told(message))
        if step == "enrol":
            return {client: self._vouched(client, name) for client, name in messages.items()}
        if step == "directory":
            return self._introduced(messages[0])
        found = super().answer(step, messages)
        if step == "masked":  # on disk before anybody sees the numbers
            self.spent |= {self.clients[client].name: self.clients[client].spent for client in messages}
            self._write("spent.json", self.spent)
        return found

    def _vouched(self, client: int, name: str) -> bytes:
        return self.papers.vouch(name, self._member(client, name).identity.public)

    def _introduced(self, met: dict[str, bytes]) -> dict[int, Any]:
        """Takes over other sites' clients, if their sites are those that were agreed on or heard of before."""
        known, sites = dict(self.vouched), dict(self.sites)
        for name, word in met.items():
            found = self.papers.check(name, word)
            self.papers.known(found, sites)
            if known.setdefault(name, found).public != found.public:
                raise Refused(f"client {name!r} has another identity than before")
            sites[found.site] = found.fingerprint
        self.vouched, self.sites = known, sites
        self.directory.update({name: found.public for name, found in known.items()})  # in place: clients look into it
        self._write(SITES, sites)
        said = {name: [found.public.hex(), found.site, found.fingerprint] for name, found in known.items()}
        self._write("directory.json", said)
        return {}

    def _accepted(self, found: Vouched) -> bool:
        try:
            self.papers.known(found, self.sites)
        except Refused:
            return False
        return True

    def _same(self, survivors: list[str]) -> None:
        """Refuses to add up a round again with other clients, some of them the same: the difference of the two sums
        would be the others'. What was masked before anybody consented stays masked, so only consents count."""
        before = self.added.get(self.key, [])
        if survivors in before:
            return
        for others in before:
            if set(others) & set(survivors):
                raise Refused(
                    f"this round was added up before with {len(others)} clients, and now with {len(survivors)}, some "
                    "of them the same: the difference of two sums is not given away; wait for the sites that are "
                    "missing, or, in another run, use another seed"
                )
        self.added = {**self.added, self.key: [*before, survivors]}
        self.added = dict(list(self.added.items())[-REMEMBERED:])
        self._write("added.json", self.added)  # on disk before the consent leaves

    def _member(self, client: int, name: str) -> Client:
        if client not in self.clients:
            identity = Identity(derived(self.secret, b"identity", name.encode()))
            limits = self.secure.least, self.secure.threshold
            self.clients[client] = Client(name, identity, self.directory, *limits, spent=self.spent.get(name, -1))
        return self.clients[client]

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_json(path, LOST) if path.exists() else {}

    def _write(self, name: str, said: dict[str, Any]) -> None:
        write_text(self.folder / name, json.dumps(sealed(said)))


def _secret(path: Path) -> bytes:
    """The secret of which all of this site's identities are made; made once, and for its owner alone."""
    if not path.exists():
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return path.read_bytes()
