"""Makes the log lines of a round: one for rounds.jsonl and one for ledger.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from bespoke.experiment.experiment import Experiment
from bespoke.federation.cohorts import Draw
from bespoke.federation.engine import RoundResult
from bespoke.federation.traffic import Ledger
from bespoke.messages.robust.outliers import outliers, warning
from bespoke.messages.transform import Transform
from bespoke.records import LedgerLine, NoiseLine, RobustLine, RoundLine, SpentLine, WatchedLine
from bespoke.runs.evaluation import Point
from bespoke.tensors import Tree

Lines = TypedDict("Lines", {"ledger.jsonl": LedgerLine, "rounds.jsonl": RoundLine})  # new lines, by log


@dataclass
class RoundLines:
    """Makes the log lines of an experiment's rounds. It notes once a client with far larger changes than others."""

    experiment: Experiment
    ledger: Ledger
    note: Callable[[str], None]
    warned: set[int] = field(default_factory=set)

    def of(
        self, place: int, number: int, draw: Draw | None, outcome: RoundResult | None, server: Tree,
        transforms: Sequence[Transform], seen: Point, change: Point | None,
        noise: NoiseLine | None, spent: SpentLine | None,
    ) -> Lines:  # fmt: skip
        """seen: the point of the learning curve after the round; change: scores before it on rows that are new in it;
        noise and spent: from the privacy account.
        """
        method, ids = self.experiment.stages[place].method, self.experiment.population.ids
        added = {name: kind for transform in transforms for name, kind in transform.reveals.items()}
        entry = self.ledger.round(place, number, method, draw, outcome, added)
        if noise is not None:
            entry["noise"] = noise
        line: RoundLine = {
            "stage": place, "method": method.card.name, "round": number,
            "clients": len(outcome.cohort.clients) if outcome else 0,
            "excluded": [ids[c] for c in outcome.cohort.excluded] if outcome else [],
            "dropped": len(draw.contacted) - len(draw.reported) if draw else 0,
            "bytes_down": entry["bytes_down"], "bytes_up": entry["bytes_up"], "steps": entry["steps"],
            "examples": outcome.examples if outcome else 0, "validation": seen.get("validation"),
        }  # fmt: skip
        if "watched" in seen:
            line["watched"] = seen["watched"]
        if change:
            line["change"] = change
        if outcome and outcome.cohort.clients:
            line["observed"] = method.observe(server, outcome.cohort)
        if outcome and outcome.observed:
            line["aggregator"] = outcome.observed
        if spent:
            line["privacy"] = spent
        return {"ledger.jsonl": entry, "rounds.jsonl": {**line, **self._watched(outcome)}}

    def _watched(self, outcome: RoundResult | None) -> WatchedLine:
        """Log entries of a round: what a robust rule did, or, without one, clients with unusually large changes."""
        experiment, ids = self.experiment, self.experiment.population.ids
        if outcome is None:
            return {}
        if outcome.secure is not None and (refused := outcome.secure.refused):
            self.note(f"secure sums: a round was not added up, and the model stays as it was: {'; '.join(refused)}")
            return {"secure": {"refused": list(refused)}}
        if outcome.ruled is not None:
            ruled = outcome.ruled
            named: RobustLine = {"left_out": [ids[c] for c in ruled.left_out], "cut": [ids[c] for c in ruled.cut]}
            return {"robust": {**named, "bound": ruled.bounds} if ruled.bounds else named}
        found = outliers(outcome.norms)
        new = [client for client in found if client not in self.warned]
        self.warned.update(new)
        for client in new:
            subject = "a client" if experiment.privacy else f"client {ids[client]!r}"
            self.note(warning(subject, outcome.norms, client))
        return {"outliers": [ids[c] for c in found]} if found and not experiment.privacy else {}
