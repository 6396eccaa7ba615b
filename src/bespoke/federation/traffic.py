"""The ledger: the cost of a run and what the server learned, one line per round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bespoke.declarations import Reveal
from bespoke.federation.batches import steps_of
from bespoke.federation.cohorts import Draw
from bespoke.federation.engine import Choice, RoundResult
from bespoke.messages.robust.settings import RobustConfig, shown
from bespoke.messages.secure.settings import SecureConfig, masked
from bespoke.method import Batching, Method
from bespoke.records import LedgerLine


@dataclass(frozen=True)
class Ledger:
    """Turns rounds into lines of ledger.jsonl. It has no state, so resuming needs nothing from it."""

    robust: RobustConfig | None = None  # decides what the server has to see
    secure: SecureConfig | None = None  # decides what the server cannot see

    def round(
        self, stage: int, number: int, method: Method, draw: Draw | None, outcome: RoundResult | None,
        added: dict[str, Reveal] | None = None,
    ) -> LedgerLine:  # fmt: skip
        """A line of the ledger; added: fields of transforms that leave clients besides the method's own."""
        contacted = len(draw.contacted) if draw else 0
        reported = len(draw.reported) if draw else 0
        down = 0
        if outcome and reported:
            # every contacted client receives the model, whether or not it answers in time
            down = outcome.bytes_down * contacted // reported
        sent = {**shown(method, self.robust), **(added or {})}
        seen = {name: kind.name for name, kind in sent.items()} if self.secure is None else masked(method, sent)
        if outcome and outcome.secure:  # every contacted client takes part in the protocol
            down += outcome.secure.bytes_down
        return {
            "stage": stage,
            "round": number,
            "method": method.card.name,
            "contacted": contacted,
            "reported": reported,
            "bytes_down": down,
            "bytes_up": (outcome.bytes_up + (outcome.secure.bytes_up if outcome.secure else 0)) if outcome else 0,
            "steps": outcome.steps if outcome else 0,
            "epochs": _epochs(method.batching()) if outcome else 0,
            "revealed": seen if outcome else {},
        }

    def statistics(self, floats: int, clients: int) -> LedgerLine:
        """Common means and deviations of the features: every client sends sums and gets the result back."""
        return {
            "stage": None,
            "round": None,
            "phase": "statistics",
            "method": "standardize",
            "bytes_down": 4 * floats * clients,
            "bytes_up": 4 * floats * clients,
            "steps": 0,
            "revealed": {"feature sums": "SUM"} if floats else {},
        }

    def personalization(self, method: Method, choice: Choice, sent: int, support: NDArray[np.int64]) -> LedgerLine:
        """Making the personal models: each client fetches the `sent` bytes of the broadcast (if any) and adapts it."""
        batching = method.support_batching()
        passes = batching.epochs * batching.uses if not method.trains else 0
        down = sent * len(support) if method.downlink else 0
        return {
            "stage": None,
            "round": None,
            "phase": "personalization",
            "method": method.card.name,
            "bytes_down": down,
            "bytes_up": 0,
            "steps": int(steps_of(support, batching).sum()) * passes,
            "epochs": 0 if method.trains else _epochs(batching),
            "revealed": {},
        }


def _epochs(batching: Batching) -> int | None:
    """Passes over a client's rows in one descent; None if a round is counted in steps."""
    return None if batching.steps else batching.epochs
