"""A round under secure sums: hosts' clients and the engine's server exchange the messages of bespoke.messages.secure.

A host holds its clients' messages, as under a robust rule, but sends them masked only. A client that does not answer in
time has sent its keys and shares, and is lost before it sends its numbers. With groups, each group has its own sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.messages.secure.client import Client
from bespoke.messages.secure.keys import KEY_BYTES, Identity
from bespoke.messages.secure.protocol import needed
from bespoke.messages.secure.refused import Overflow, Refused, TooFew
from bespoke.messages.secure.server import Server, terms_for
from bespoke.messages.secure.settings import SecureConfig
from bespoke.tensors import Params, Tree, flatten, take, unflatten

Ints = NDArray[np.int64]
Answers = dict[int, bytes]  # by client
AskClients = Callable[[str, dict[int, Any]], dict[int, Any]]  # (step, message to each client) -> answer of each
HELD = 2**28  # bytes of masked numbers that are requested at a time


class Members:
    """One host's clients as members of secure sums. Their identities last as long as the host."""

    def __init__(self, secure: SecureConfig) -> None:
        self.secure = secure
        self.directory: dict[str, bytes] = {}
        self.clients: dict[int, Client] = {}
        self.messages: dict[int, Params] = {}

    def hold(self, up: Tree, clients: list[int]) -> None:
        """Stores the messages of these clients, which come stacked."""
        self.messages = {client: flatten(take(up, place)) for place, client in enumerate(clients)}

    def answer(self, step: str, messages: dict[int, Any]) -> dict[int, Any]:
        """The clients' answers to a step of the protocol."""
        if step == "enrol":
            return {client: self._member(client, name).identity.public for client, name in messages.items()}
        if step == "directory":
            for name, public in messages[0].items():
                if self.directory.setdefault(name, public) != public:
                    raise Refused(f"client {name!r} has another identity than before")
            return {}
        if step == "form":
            first = next(iter(self.messages.values()), None)
            return {} if first is None else {0: [(path, list(leaf.shape), leaf.dtype) for path, leaf in first.items()]}
        if step == "masked":
            return {client: self._masked(client, message) for client, message in messages.items()}
        return {client: getattr(self.clients[client], step)(message) for client, message in messages.items()}

    def _member(self, client: int, name: str) -> Client:
        if client not in self.clients:
            limits = self.secure.least, self.secure.threshold
            self.clients[client] = Client(name, Identity(), self.directory, *limits)
        return self.clients[client]

    def _masked(self, client: int, message: bytes) -> bytes:
        leaves = self.messages.pop(client)
        values = torch.cat([leaf.double().flatten() for leaf in leaves.values()]).numpy()
        try:
            return self.clients[client].masked(message, values)
        except Overflow as error:
            ends = np.cumsum([leaf.numel() for leaf in leaves.values()])
            path = list(leaves)[int(np.searchsorted(ends, error.place, side="right"))]
            raise Refused(f"secure.sums: in a client's {path!r}, {error}") from None


@dataclass
class Summed:
    """The result of secure sums for a cohort, and their cost."""

    sums: Tree = field(default_factory=dict)
    clients: tuple[int, ...] = ()  # whose messages are in the sums
    refused: list[str] = field(default_factory=list)  # why a cohort, or a group's, was not added up
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class SecureSums:
    """The engine's side: it carries messages between hosts and the server of each attempt, and counts their bytes."""

    secure: SecureConfig
    keys: NDArray[np.uint64]  # of all clients; the protocol's names of clients
    directory: dict[str, bytes] = field(default_factory=dict)
    introduced: dict[str, bytes] = field(default_factory=dict)  # what clients were told of each other
    rounds: int = 0  # number of the last attempt; clients answer each number once

    def name(self, client: int) -> str:
        return f"{int(self.keys[client]):016x}"

    def enough(self, contacted: Ints, reported: Ints, rows: Ints | None) -> tuple[Ints, list[str]]:
        """Returns the clients of `reported` whose cohort is large enough for a sum, and why other cohorts are refused.

        rows: the group of each contacted client, where clients come in groups.
        """
        kept, refused = [], []
        for row, members, answering in self._cohorts(contacted, reported, rows):
            wanted = max(needed(self.secure.threshold, len(members)), self.secure.least)
            if len(answering) >= wanted:
                kept.append(answering)
            else:
                label = "" if rows is None else f"group {row}: "
                refused.append(f"{label}{len(answering)} of {len(members)} clients answered, {wanted} are needed")
        return np.sort(np.concatenate([np.zeros(0, np.int64), *kept])), refused

    @staticmethod
    def _cohorts(contacted: Ints, reported: Ints, rows: Ints | None) -> list[tuple[int, Ints, Ints]]:
        """(row of the sums, contacted clients, those of them that answer) of the whole cohort or of each group."""
        if rows is None:
            return [(0, contacted, reported)]
        groups = ((row, contacted[rows == row]) for row in np.unique(rows).tolist())
        return [(row, members, members[np.isin(members, reported)]) for row, members in groups]

    def add_up(self, ask: AskClients, contacted: Ints, ready: Ints, rows: Ints | None, many: int) -> Summed:
        """The sums of the clients that are ready to send, with a row for each of `many` groups if there are groups."""
        self.rounds += 1
        found = Summed()
        if not len(ready):
            return found
        form = ask("form", {})[0]
        table: Params = {}
        for row, members, answering in self._cohorts(contacted, ready, rows):
            if not len(answering):
                continue
            self._enrol(ask, members)
            members = np.array([client for client in members.tolist() if self.name(client) in self.directory], np.int64)
            if len(members) < self.secure.least:  # clients of a place that was late when all were introduced
                found.refused.append(f"{len(members)} clients are known to all, {self.secure.least} are needed")
                continue
            try:
                values, added = self._attempt(ask, members, answering, form, found)
            except TooFew as error:
                found.refused.append(str(error))
                continue
            found.clients += added
            for path, leaf in values.items():
                if rows is None:
                    table[path] = leaf
                else:
                    table.setdefault(path, leaf.new_zeros((many, *leaf.shape)))[row] = leaf
        found.sums = unflatten(table)
        return found

    def _enrol(self, ask: AskClients, clients: Ints) -> None:
        """Introduces clients that take part for the first time. Between machines a site's word follows the key."""
        new = {client: name for client in clients.tolist() if (name := self.name(client)) not in self.directory}
        if new:
            met = {new[client]: public for client, public in ask("enrol", new).items()}
            self.introduced |= met
            self.directory |= {name: said[:KEY_BYTES] for name, said in met.items()}
            ask("directory", {0: met})

    def agreed(self, names: list[str]) -> None:
        """The numbers of these clients have arrived, and their sum is about to be unmasked."""

    def _attempt(
        self, ask: AskClients, members: Ints, answering: Ints, form: list[Any], found: Summed
    ) -> tuple[Params, tuple[int, ...]]:
        """Runs the protocol once; returns the sum, and whose numbers it is of.

        Clients of `members` that are not in `answering` send no numbers. Others may be lost at any step.
        """
        numbers = sum(int(np.prod(shape)) for _, shape, _ in form)
        names = [self.name(client) for client in members.tolist()]
        threshold, least, bits = self.secure.threshold, self.secure.least, self.secure.bits
        terms = terms_for(self.rounds, names, numbers, threshold=threshold, least=least, bits=bits)
        server = Server(terms, self.directory)

        def step(name: str, messages: dict[int, bytes]) -> Answers:
            answers = ask(name, messages)
            found.bytes_down += sum(map(len, messages.values()))
            found.bytes_up += sum(map(len, answers.values()))
            return answers

        everyone = members.tolist()
        keyed = step("keys", dict.fromkeys(everyone, server.terms.to_bytes()))
        shared = step("shares", dict.fromkeys(keyed, server.roster(list(keyed.values()))))
        boxes = server.inboxes(list(shared.values()))
        inboxes = {client: boxes[member] for member, client in enumerate(everyone) if client in shared}
        staying = [client for client in answering.tolist() if client in inboxes]
        found.bytes_down += sum(len(inboxes[client]) for client in set(inboxes) - set(staying))
        at_once = max(HELD // max(8 * numbers, 1), 1)
        added: list[int] = []
        for begin in range(0, len(staying), at_once):
            sent = step("masked", {client: inboxes[client] for client in staying[begin : begin + at_once]})
            for message in sent.values():
                server.add(message)
            added += sent
        survivors = server.survivors()
        self.agreed([self.name(client) for client in added])
        consents = step("consent", dict.fromkeys(added, survivors))
        given = step("reveal", dict.fromkeys(consents, server.consents(list(consents.values()))))
        total = torch.from_numpy(server.total(list(given.values())))
        sizes = [int(np.prod(shape)) for _, shape, _ in form]
        parts = total.split(sizes) if sizes else ()
        return {
            path: part.reshape(shape).to(dtype) if dtype.is_floating_point else part.reshape(shape).round().to(dtype)
            for (path, shape, dtype), part in zip(form, parts)
        }, tuple(sorted(added))
