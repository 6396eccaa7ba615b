"""Remotes of places on other machines: they turn calls into bytes, and clients' numbers into those of each place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.splits import Train
from bespoke.data.standardize import means, statistics
from bespoke.data.tables.schema import Statistics
from bespoke.errors import UserError
from bespoke.federation.calls import Call, Settle
from bespoke.federation.opening import Opening
from bespoke.federation.partial import Partial
from bespoke.federation.remote import Remote
from bespoke.federation.roster import Roster, joined
from bespoke.federation.wire import LIMIT, decode_answer, encode_call
from bespoke.federation.work import ClientWork
from bespoke.tensors import Params

Ints = NDArray[np.int64]
Describe = Callable[[ClientWork, Params, Roster], Opening]
SERVER_STEPS = ("directory", "form")  # of secure sums: their messages are not by client


class Transport(Protocol):
    """Carries a message to a place, and its answer back. Raises RemoteLost if the place is gone, Late if it is late."""

    def send(self, message: bytes) -> None: ...
    def receive(self) -> bytes: ...  # after it was late: waits again for the same answer
    def ready(self) -> bool: ...  # whether a late answer is there, or will never come
    def alive(self) -> bool: ...
    def close(self) -> None: ...


class Wired:
    """A remote behind a transport of bytes."""

    def __init__(self, transport: Transport, name: str, limit: int = LIMIT) -> None:
        self.transport, self.name, self.limit = transport, name, limit
        self.operation = ""

    def start(self, call: Call) -> None:
        self.operation = call.operation
        self.transport.send(encode_call(call, self.limit))

    def finish(self) -> Any:
        return decode_answer(self.transport.receive(), self.operation, self.limit)

    def ready(self) -> bool:
        return self.transport.ready()

    def alive(self) -> bool:
        return self.transport.alive()

    def close(self) -> None:
        self.transport.close()


class Numbered:
    """A remote whose place has its own numbers of clients. Each call and each answer is translated."""

    def __init__(self, remote: Remote, numbers: Ints, roster: Roster, describe: Describe) -> None:
        """`numbers`: the place's clients as numbers in the roster of all, in the place's own order (from 0)."""
        self.remote, self.numbers, self.roster, self.describe = remote, numbers, roster, describe
        self.name = remote.name
        self.place = np.full(len(roster), -1, np.int64)
        self.place[numbers] = np.arange(len(numbers))
        self.call = Call("settle")

    def _here(self, clients: Ints) -> Ints:
        """The place's own numbers of those of these clients that live there."""
        found = self.place[clients]
        return found[found >= 0]

    def start(self, call: Call) -> None:
        self.call = call
        values, settle = dict(call.values), call.settle
        if call.operation == "move":
            raise UserError(f"{self.name}: rows that come and go (since, until) stay on one machine; leave them out")
        if call.operation == "open":
            values["work"] = self.describe(values["work"], values["params"], self.roster)
        for name in ("clients", "next_clients"):
            if values.get(name) is not None:
                values[name] = self._here(values[name])
        if "client" in values:
            values["client"] = int(self.place[values["client"]])
        if "folder" in values:  # the place chooses its own folder
            values["folder"] = ""
        if call.operation == "secure" and values["step"] not in SERVER_STEPS:
            values["messages"] = {int(self.place[client]): message for client, message in values["messages"].items()}
        if settle is not None and settle.used is not None:
            settle = Settle(settle.key, self._here(settle.used))
        self.remote.start(replace(call, values=values, settle=settle))

    def finish(self) -> Any:
        answer = self.remote.finish()
        if isinstance(answer, Partial):
            for name in ("clients", "excluded"):
                found = np.array(getattr(answer, name), np.int64)
                if len(found) and not 0 <= found.min() <= found.max() < len(self.numbers):
                    raise UserError(f"{self.name} answered for clients that it does not have")
                setattr(answer, name, self.numbers[found].tolist())
        if self.call.operation == "secure" and self.call.values["step"] not in SERVER_STEPS:
            messages, refusal = answer
            return {int(self.numbers[client]): message for client, message in messages.items()}, refusal
        return answer

    def alive(self) -> bool:
        return self.remote.alive()

    def close(self) -> None:
        self.remote.close()


@dataclass(frozen=True)
class Met:
    """The arguments of an engine of places on other machines: Engine(met.roster, choice, met.remotes, met.homes)."""

    roster: Roster
    remotes: list[Remote]
    homes: Ints


def learn(remotes: Sequence[Remote], train: Train) -> tuple[Statistics, int]:
    """Means and deviations over the training rows of all places, and how many numbers each place has sent.

    The statistics go into the schema by which all places encode. The number goes into `asked_floats` of the
    population's description, where the run's ledger and its privacy account read it.
    """
    centres: dict[str, float] = {}
    parts: list[dict[str, Tensor]] = []
    for _ in range(2):  # sums for the means, then squares around the means: squares around zero would lose digits
        for remote in remotes:
            remote.start(Call("moments", {"train": train, "centres": centres}))
        parts = [remote.finish() for remote in remotes]
        centres = centres or means(parts)
    return statistics(parts, centres), 2 * 3 * len(centres)


def meet(remotes: Sequence[Remote], describe: Describe) -> Met:
    """Asks every place for its roster, and numbers all clients in the order of their ids."""
    for remote in remotes:
        remote.start(Call("hello"))
    rosters: list[Roster] = [remote.finish() for remote in remotes]
    found = joined(rosters, [remote.name for remote in remotes])
    numbered: list[Remote] = [
        Numbered(remote, numbers, found.roster, describe) for remote, numbers in zip(remotes, found.numbers)
    ]
    return Met(found.roster, numbered, found.homes)
