"""A round whose messages stay on their hosts until the server asks for them.

Robust rules need this, and simulated attackers that collude. In other rounds a host adds up as it goes and holds one
chunk's messages at a time. Here it holds its whole share of the cohort.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.messages.robust.attack import colluding, little, replaced
from bespoke.messages.robust.exchange import Ask, Combined, Rule, answer, combine
from bespoke.messages.robust.message import Form, Messages
from bespoke.method import Method
from bespoke.tensors import Tree, tree_map


@dataclass(frozen=True)
class Collusion:
    """Attackers that agree on what to send: see bespoke.messages.robust.attack."""

    keys: frozenset[int]
    factor: float | None = None


@dataclass
class Held:
    """One host's share of a cohort: the messages that its clients are about to send."""

    messages: Messages
    form: Form
    bad: Tensor  # which of them collude

    @classmethod
    def of(
        cls, method: Method, up: Tree, clients: list[int], rows: NDArray[np.int64] | None, many: int, bad: list[bool]
    ) -> Held:
        """rows: each client's row of the sums (of `many`), where clients come in groups."""
        form = Form.of(method)
        groups = None if rows is None else torch.from_numpy(rows)
        return cls(Messages.of(tuple(clients), up, form, groups, many), form, torch.tensor(bad, dtype=torch.bool))

    def answer(self, question: str, inputs: Tree) -> Tree:
        """These clients' answer to the server, or to the leader of an attack."""
        if question == "collude":
            return colluding(self.messages, self.bad)
        if question == "agree":
            held = self.messages
            up = replaced(held, self.form, self.bad, inputs)
            groups, many = held.blocks["common"].index, held.blocks["common"].many
            self.messages = Messages.of(held.clients, up, self.form, groups, many)
            return {}
        return answer(self.messages, self.form, question, inputs)


def aggregate(
    method: Method, rule: Rule | None, collusion: Collusion | None, ask: Ask, clients: tuple[int, ...],
    rows: NDArray[np.int64] | None, many: int,
) -> Combined:  # fmt: skip
    """Aggregates a cohort whose messages are held: a collusion first, then the rule. `clients` in order of answers."""
    form = Form.of(method)
    if collusion is not None:
        ask("agree", little(_added(ask("collude", {})), collusion.factor))
    groups = None if rows is None else torch.from_numpy(rows)
    return combine(rule, form, ask, clients, groups, many)


def _added(answers: list[Tree]) -> Tree:
    return tree_map(lambda *parts: torch.stack(parts).sum(0), answers[0], *answers[1:])
