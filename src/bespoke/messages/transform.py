"""The contract of transforms, which act on messages between client and server: clipping, noise, compression.

A transform has a client half, for messages, and a server half, for sums. Hosts apply the client half to several clients
at a time, stacked along a first dimension, after the method has made their messages. Each client's result depends on
its own message only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bespoke.declarations import Reveal
from bespoke.errors import UserError
from bespoke.method import Cohort, Method
from bespoke.plain import Named
from bespoke.tensors import Tree

State = dict[str, float]  # what a transform keeps on the server from round to round and sends to all clients


@dataclass(frozen=True)
class Outgoing:
    """The messages of some clients before they are sent, stacked: the first dimension of every leaf is the client."""

    up: Tree
    nbytes: int  # on the wire, all of them together
    clients: NDArray[np.uint64]  # their keys
    key: int  # the round's, for keyed draws
    state: State = field(default_factory=dict)
    memory: Tree = field(default_factory=dict)  # stays on each client for its next message; stacked too


class Transform:
    """Default: no-op. Subclasses override the half they need."""

    covers = False  # True: the sums are noisy, even if no client sent anything
    remembers = False  # True: clients keep a memory, as private as the method's own state
    hides = False  # True: messages are noisy, and nothing else may reveal the rows
    needs: tuple[str, ...] = ()  # fields that a method has to send
    reveals: dict[str, Reveal] = {}  # fields that it adds to messages, for the ledger
    title = "this transform"  # its key in an experiment

    def check(self, method: Method) -> None:
        """Refuses a method whose messages this transform cannot act on."""
        missing = [name for name in self.needs if name not in method.uplink]
        if missing:
            raise UserError(
                f"{self.title} acts on what clients send as {missing[0]}, and {method.card.name} sends "
                f"{', '.join(method.uplink)} instead; leave one of the two out"
            )

    def memory(self, up: Tree) -> Tree:
        """A client's memory before its first message; `up` has the message's form."""
        return {}

    def start(self) -> State:
        """The server's state before the first round."""
        return {}

    def client(self, sent: Outgoing) -> Outgoing:
        return sent

    def observe(self, cohort: Cohort, state: State) -> Named:
        """Numbers for the round's log, from the sums before `server` and the state of the round."""
        return {}

    def server(self, cohort: Cohort, state: State, key: int) -> tuple[Cohort, State]:
        """Returns the sums for the method's server, and the state of the next round."""
        return cohort, state
