"""Clients and a server of secure sums that exchange bytes, with a look, or a hand, on every message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bespoke.messages.secure.client import Client
from bespoke.messages.secure.keys import Identity
from bespoke.messages.secure.protocol import Terms
from bespoke.messages.secure.server import Server, terms_for

NUMBERS = 5
Hand = Callable[[str, int, bytes], bytes]  # (step, sender, message) -> what arrives


@dataclass
class Group:
    """Clients that know each other, and what they would send."""

    clients: list[Client]
    directory: dict[str, bytes]
    values: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, many: int, numbers: int = NUMBERS, **limits: Any) -> Group:
        identities = {f"site {i}": Identity() for i in range(many)}
        directory = {name: identity.public for name, identity in identities.items()}
        random = np.random.default_rng(3)
        values = [random.standard_normal(numbers) for _ in range(many)]
        clients = [Client(name, identity, directory, **limits) for name, identity in identities.items()]
        return cls(clients, directory, values)

    def server(self, round: int = 1, members: Sequence[int] | None = None, **limits: Any) -> Server:
        some = range(len(self.clients)) if members is None else members
        names = [self.clients[i].name for i in some]
        knobs = {"threshold": 0.6, "least": 3, "bits": 32, **limits}
        return Server(terms_for(round, names, len(self.values[0]), **knobs), self.directory)

    def sum(
        self, server: Server, *, without_shares: Sequence[int] = (), before_masking: Sequence[int] = (),
        before_consent: Sequence[int] = (), before_revealing: Sequence[int] = (), hand: Hand | None = None,
    ) -> Any:  # fmt: skip
        """A whole run; members (by their number) fall silent before a step. What arrives may be changed by a hand."""

        def say(step: str, member: int, *told: Any) -> bytes:
            message: bytes = getattr(self._member(server.terms, member), step)(*told)
            return hand(step, member, message) if hand else message

        there = list(range(len(server.terms.members)))
        roster = server.roster([say("keys", i, server.terms.to_bytes()) for i in there])
        there = [i for i in there if i not in without_shares]
        boxes = server.inboxes([say("shares", i, roster) for i in there])
        there = [i for i in there if i not in before_masking]
        for i in there:
            server.add(say("masked", i, boxes[i], self._values(server.terms, i)))
        survivors = server.survivors()
        there = [i for i in there if i not in before_consent]
        consents = server.consents([say("consent", i, survivors) for i in there])
        there = [i for i in there if i not in before_revealing]
        return server.total([say("reveal", i, consents) for i in there])

    def _place(self, terms: Terms, member: int) -> int:
        return [client.name for client in self.clients].index(terms.members[member])

    def _member(self, terms: Terms, member: int) -> Client:
        return self.clients[self._place(terms, member)]

    def _values(self, terms: Terms, member: int) -> Any:
        return self.values[self._place(terms, member)]


def changed(message: bytes, place: int = -1) -> bytes:
    """The same message but for one bit."""
    altered = bytearray(message)
    altered[place] ^= 1
    return bytes(altered)
