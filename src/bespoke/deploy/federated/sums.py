"""The hub's side of secure sums between sites: a round that is repeated is added up with the clients it had before.

Sites consent to one sum of a round and to no other with some of the same clients (members.py). The hub therefore notes
whose numbers it is about to add up (repeated.py), and keeps to it when the round is repeated after a loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.deploy.federated.repeated import about_to_be_added, note_added
from bespoke.errors import RemoteLost
from bespoke.federation.masked import AskClients, SecureSums, Summed
from bespoke.tensors import Params

Ints = NDArray[np.int64]


@dataclass
class SiteSums(SecureSums):
    """Secure sums of a run in this folder."""

    run: Path = Path()
    key: str = ""  # of the round

    def begin(self, key: int) -> None:
        self.key = str(key)

    @property
    def _added(self) -> list[list[str]]:
        return about_to_be_added(self.run, self.key)

    def _attempt(
        self, ask: AskClients, members: Ints, answering: Ints, form: list[Any], found: Summed
    ) -> tuple[Params, tuple[int, ...]]:
        names = {self.name(client) for client in members.tolist()}
        for before in self._added:
            if names.intersection(before):
                answering = np.array([client for client in answering.tolist() if self.name(client) in before], np.int64)
                self._as_before(before, [self.name(client) for client in answering.tolist()])
        return super()._attempt(ask, members, answering, form, found)

    def agreed(self, names: list[str]) -> None:
        added = self._added
        for before in added:
            if set(before).intersection(names):
                self._as_before(before, names)
                return
        note_added(self.run, self.key, [*added, sorted(names)])

    def _as_before(self, before: list[str], names: list[str]) -> None:
        if set(before) != set(names):
            away = len(set(before) - set(names))
            raise RemoteLost(
                f"a round whose sum may be known is repeated with the same clients; {away} of {len(before)} are away"
            )
