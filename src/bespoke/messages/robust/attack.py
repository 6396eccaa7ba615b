"""Simulated attacks, against which robust rules are measured.

- label-flip: the attackers' rows have other targets: class c becomes (classes - 1 - c), a number is mirrored at the
  mean of all training rows. They train honestly on these.
- scale, sign-flip, noise, nan: the change that is sent is multiplied by a factor, by -1 (or -factor), covered by
  Gaussian noise of a norm of about `factor` times its own, or replaced by values that are no numbers.
- little-is-enough: Baruch, Baruch and Goldberg, A Little Is Enough, NeurIPS 2019. The attackers of a round share their
  changes, and all send mean - z deviation of every entry, which is so close that it passes for honest. z is the largest
  value with which the majority supports them: Phi(z) = (n - m - s) / (n - m), with s = n // 2 + 1 - m.

Attackers train, but are neither validated nor tested: results are those of honest clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.periods import Period
from bespoke.data.population import Population
from bespoke.data.splits import Reporting, Rows, Selection, Split
from bespoke.errors import UserError
from bespoke.messages.robust.message import Form, Messages, along, paths, rebuilt
from bespoke.messages.robust.settings import AttackConfig
from bespoke.messages.transform import Outgoing, Transform
from bespoke.randomness import generator, uniform
from bespoke.tensors import Params, Tree

Ints = NDArray[np.int64]
FACTORS = {"scale": 100.0, "sign-flip": 1.0, "noise": 10.0}


def attackers(population: Population, training: Ints, attack: AttackConfig, seed: int) -> Ints:
    """The attacking training clients: the named ones, or a fraction drawn by the seed, at least one and not all."""
    if isinstance(attack.clients, list):
        places = {population.ids[client]: int(client) for client in training}
        missing = [name for name in attack.clients if name not in places]
        if missing:
            raise UserError(f"attack.clients: there is no training client {missing[0]!r}")
        return np.array(sorted({places[name] for name in attack.clients}))
    many = min(max(round(attack.clients * len(training)), 1), len(training) - 1)
    order = np.argsort(uniform("attackers", seed, population.keys[training]), kind="stable")
    return np.sort(training[order[:many]])


def flipped(population: Population, split: Split, bad: Ints) -> Population:
    """The same rows with other targets of these clients."""
    about, y = population.about, population.columns["y"].clone()
    task = about.get("task")
    if task not in ("regression", "classification") or y.dim() > 1:
        raise UserError(f"attack.kind = 'label-flip' needs a class or a number to predict; the task is {task!r}")
    rows = np.concatenate([np.arange(*population.offsets[c : c + 2]) for c in bad])
    if task == "classification":
        y[rows] = int(population.columns["y"].max()) - y[rows]
    else:
        trained, _ = split.train.of(split.train.clients)
        y[rows] = 2 * y[trained].double().mean().to(y.dtype) - y[rows]
    return replace(population, columns={**population.columns, "y": y})


def honest(split: Split, bad: Ints) -> Split:
    """The same split without these clients in validation and test."""

    def without(rows: Any) -> Any:
        assert isinstance(rows, Rows)
        return replace(rows, clients=np.setdiff1d(rows.clients, bad))

    selection = Selection(without(split.selection.support), without(split.selection.validation))
    test = Reporting(without(split.test.support), without(split.test.validation), without(split.test.query))
    return Split(split.train, selection, test, split.kind)


def attacked(period: Period, bad: Ints, kind: str, moved: Callable[[Split, Population], Split]) -> Period:
    """A period's rows and split under attack; `moved` makes the same split for changed columns."""
    population, split = period.population, period.split
    if kind == "label-flip":
        population = flipped(population, split, bad)
        split = moved(split, population)
    return replace(period, population=population, split=honest(split, bad))


@dataclass(frozen=True)
class Attack(Transform):
    """Replaces the change of each attacker by itself."""

    kind: str
    keys: frozenset[int]  # of the attackers
    factor: float | None = None

    def client(self, sent: Outgoing) -> Outgoing:
        bad = torch.tensor([int(key) in self.keys for key in sent.clients])
        if not bool(bad.any()):
            return sent
        fields = {name: value for name, value in sent.up.items() if name in self._fields(sent.up)}
        changed = {path: self._changed(leaf, path, sent, bad) for path, leaf in paths(fields)}
        return replace(sent, up={**sent.up, **rebuilt(fields, changed)})

    def _fields(self, up: Tree) -> Any:
        return ("delta",) if "delta" in up else up

    def _changed(self, leaf: Tensor, path: str, sent: Outgoing, bad: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        factor = self.factor if self.factor is not None else FACTORS.get(self.kind, 0.0)
        if self.kind == "nan":
            new = torch.full_like(leaf, torch.nan)
        elif self.kind == "noise":
            drawn = [generator("attack", sent.key, path, int(key)).standard_normal(leaf.shape[1:])
                     for key in sent.clients]  # fmt: skip
            size = leaf.reshape(len(leaf), -1).norm(dim=1) / max(leaf[0].numel(), 1) ** 0.5
            new = leaf + along(factor * size, leaf) * torch.from_numpy(np.stack(drawn)).to(leaf)
        else:
            new = leaf * (factor if self.kind == "scale" else -factor)
        return torch.where(along(bad, leaf), new, leaf)


# -- together --------------------------------------------------------------------------------------------------------
def colluding(held: Messages, bad: Tensor) -> Tree:
    """Sums of the attackers' changes and of their squares, and the number of attackers, by block and row."""
    found = {}
    for name, block in held.blocks.items():
        squares = {path: leaf * leaf for path, leaf in block.changes.items()}
        found[name] = {
            "sums": block.sums(block.changes, bad.double()), "squares": block.sums(squares, bad.double()),
            "bad": torch.bincount(block.index[bad], minlength=block.many).double(),
            "all": block.clients().double(),
        }  # fmt: skip
    return found


def little(found: Tree, factor: float | None) -> dict[str, Params]:
    """The message of all attackers of a row: mean - z * deviation of their own changes."""
    new: dict[str, Params] = {}
    for name, block in found.items():
        many = block["bad"].clamp(min=1)
        z = torch.tensor([_z(int(n), int(m)) if factor is None else factor for n, m in zip(block["all"], block["bad"])])
        new[name] = {}
        for path, total in block["sums"].items():
            mean = total / along(many, total)
            variance = (block["squares"][path] / along(many, total) - mean**2).clamp(min=0)
            new[name][path] = mean - along(z.double(), total) * variance.sqrt()
    return new


def _z(clients: int, bad: int) -> float:
    """The paper's z: the most deviations at which a majority of clients is still further from the mean."""
    if not 0 < bad < clients:
        return 0.0
    missing = clients // 2 + 1 - bad
    return NormalDist().inv_cdf(min(max((clients - bad - missing) / (clients - bad), 0.5), 0.999))


def replaced(held: Messages, form: Form, bad: Tensor, from_server: Tree) -> Tree:
    """The messages with the attackers' changes as agreed."""
    new = {
        name: {path: from_server[name][path][block.index] for path in block.changes}
        for name, block in held.blocks.items()
    }
    return held.with_changes(form, new, bad)


def message_attack(attack: AttackConfig, keys: frozenset[int]) -> tuple[Transform, ...]:
    """The transform of an attack on single messages, if it is one."""
    if attack.kind in (*FACTORS, "nan"):
        return (Attack(attack.kind, keys, attack.factor),)
    return ()
