"""A site's clients as members of secure sums: their identities, whom they know and what they have answered lie on disk.

So a site that was killed is who it was, and answers no round twice. Identities reach other sites through the hub. Each
site keeps the first that it hears of a client and refuses another later on; docs/federation.md says what that means.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from bespoke.digests import read_json, sealed
from bespoke.federation.masked import Members
from bespoke.messages.secure.client import Client
from bespoke.messages.secure.keys import KEY_BYTES, Identity, derived
from bespoke.messages.secure.protocol import Terms
from bespoke.messages.secure.refused import Refused
from bespoke.messages.secure.settings import SecureConfig
from bespoke.storage import write_text

REMEMBERED = 10_000  # rounds
LOST = "without it this site's clients would answer twice, or as somebody else: put it back"


class SiteMembers(Members):
    """Members whose memory is a folder of the site."""

    def __init__(self, secure: SecureConfig, folder: Path) -> None:
        super().__init__(secure)
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.secret = _secret(folder / "identity.key")
        self.directory = {name: bytes.fromhex(public) for name, public in self._read("directory.json").items()}
        self.spent: dict[str, int] = self._read("spent.json")
        self.cohorts: dict[str, list[list[str]]] = self._read("rounds.json")  # by round's key: who was added up
        self.key = ""

    def begin(self, key: int) -> None:
        """A round begins: its messages are about to be held."""
        self.key = str(key)

    def answer(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        if step == "keys":
            for message in messages.values():
                self._same(sorted(Terms.from_bytes(message).members))
        found = super().answer(step, messages)
        if step == "directory":
            self._write("directory.json", {name: public.hex() for name, public in self.directory.items()})
        if step == "masked":  # on disk before anybody sees the numbers
            self.spent |= {self.clients[client].name: self.clients[client].spent for client in messages}
            self._write("spent.json", self.spent)
        return found

    def _same(self, members: list[str]) -> None:
        """Refuses a round again with a part of its clients: the difference of the two sums would be the others'."""
        before = self.cohorts.get(self.key, [])
        if members in before:
            return
        for cohort in before:
            if set(cohort) & set(members):
                raise Refused(
                    f"this round was added up before with {len(cohort)} clients, and now with {len(members)}, some of "
                    "them the same: the difference of two sums is not given away; wait for the sites that are missing"
                )
        self.cohorts = {**self.cohorts, self.key: [*before, members]}
        self.cohorts = dict(list(self.cohorts.items())[-REMEMBERED:])
        self._write("rounds.json", self.cohorts)

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
