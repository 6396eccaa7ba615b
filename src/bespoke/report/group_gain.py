"""Numbers by group of clients, in the form of Liu et al., Group Personalized Federated Learning (ICASSP 2023).

Tables 3 and 6 (a row a group, a column a method), Figure 1 (how much each client gains by its group) and Table 4 (what
a client pays: models sent, epochs computed), all from run folders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bespoke.records import LedgerLine
from bespoke.report.summary import Summary
from bespoke.statistics import clients as over
from bespoke.statistics.clients import ALL, Floats, OverSeeds, cells
from bespoke.statistics.folders import RunSet
from bespoke.statistics.language import group_names, pooled_perplexity, tokens_column

if TYPE_CHECKING:
    import pandas as pd

FLOAT = 4  # bytes


@dataclass(frozen=True)
class GroupRow:
    """One group under every method; in the group's own mean, or its perplexity."""

    group: str
    clients: int
    examples: float  # per client, to learn from
    values: dict[str, OverSeeds]  # by label

    def best(self, lower: bool) -> str:
        known = {label: value.value for label, value in self.values.items() if math.isfinite(value.value)}
        return (min if lower else max)(known, key=known.__getitem__) if known else ""


@dataclass(frozen=True)
class Gain:
    """Figure 1: each client's relative change from one method to another, in percent, averaged over its seeds."""

    label: str
    rival: str
    metric: str
    lower: bool
    changes: dict[str, float]  # by client
    groups: dict[str, str]  # each client's group
    improved: OverSeeds  # part of the clients that are better off

    def of(self, group: str | None = None) -> Floats:
        return np.array([v for c, v in self.changes.items() if group is None or self.groups[c] == group])

    def improved_in(self, group: str) -> float:
        """The same in one group, of the clients' means over seeds."""
        changes = self.of(group)
        return float(np.mean(changes < 0 if self.lower else changes > 0)) if len(changes) else math.nan


@dataclass(frozen=True)
class ClientCost:
    """What one client pays in training: models it is delivered and sends, and epochs it computes (Table 4)."""

    delivered: float  # as the paper counts: every client is delivered the model in every round, whoever takes part
    sent: float  # what is really sent: only who takes part is sent the model; and once more in the end
    epochs: float | None  # None where clients count steps, not epochs


def shown_metric(study: RunSet, summary: Summary) -> tuple[str, bool]:
    """What groups are shown in: perplexity for language models, as in the paper; else the comparison's own metric."""
    known = study.runs[0].result.get("metrics") or []
    return ("perplexity", True) if "perplexity" in known else (summary.metric, summary.lower_is_better)


def by_group(study: RunSet, table: pd.DataFrame, summary: Summary) -> list[GroupRow]:
    """Tables 3 and 6: the largest group first, all clients last; empty without groups."""
    metric, lower = shown_metric(study, summary)
    pooled = metric == "perplexity"
    if pooled:
        box = cells(table, "query_loss", weight=tokens_column(table))
    else:
        box = cells(table, f"query_{metric}", lower_is_better=lower)
    names = np.array(box.groups)
    rows = []
    for name in [*group_names(box.groups), ALL]:
        inside = np.ones(len(names), bool) if name == ALL else names == name
        values = {
            label: pooled_perplexity(box.of(label)[:, inside], box.weights[:, inside])
            if pooled
            else over.mean(box.of(label)[:, inside])
            for label in box.methods
        }
        rows.append(GroupRow(name, int(inside.sum()), float(box.examples[inside].mean()), values))
    return rows


def gain(study: RunSet, table: pd.DataFrame, summary: Summary) -> Gain | None:
    """GroupPerFL against PerFL, if both were run."""
    label, rival = labelled(study, "group-perfl"), labelled(study, "finetune")
    if not label or not rival:
        return None
    metric, lower = shown_metric(study, summary)
    box = cells(table, f"query_{metric}", [label, rival], lower)
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = 100.0 * (box.of(label) - box.of(rival)) / np.abs(box.of(rival))
    changes[~np.isfinite(changes)] = np.nan
    better = np.where(np.isnan(changes), np.nan, changes < 0 if lower else changes > 0)
    known = np.flatnonzero(np.isfinite(changes).any(0))
    return Gain(
        label, rival, metric, lower,
        {box.clients[i]: float(np.nanmean(changes[:, i])) for i in known},
        {box.clients[i]: box.groups[i] for i in known},
        over.mean(better),
    )  # fmt: skip


def labelled(study: RunSet, method: str) -> str:
    """The first entry of this method in the comparison; '' if there is none."""
    listed = [str(entry["label"]) for entry in study.compare.get("methods", []) if entry.get("name") == method]
    return next((label for label in listed if label in study.labels), "")


# ------------------------------------------------------------------------------------------------ Table 4


def costs(study: RunSet) -> dict[str, ClientCost]:
    """Table 4 for every method, medians over seeds."""
    model = FLOAT * int((study.compare.get("model") or {}).get("parameters") or 0)
    clients = int((study.compare.get("split") or {}).get("train_clients") or 0)
    if not model or not clients:
        return {}
    found: dict[str, list[ClientCost]] = {}
    for run in study.runs:
        found.setdefault(run.label, []).append(client_cost(run.lines("ledger.jsonl"), model, clients))
    return {label: sorted(each, key=lambda cost: cost.sent)[len(each) // 2] for label, each in found.items()}


def client_cost(lines: Sequence[LedgerLine], model: int, clients: int | Mapping[int, int]) -> ClientCost:
    """From the ledger's lines; `clients`: how many share in the rounds (of each stage, where these differ)."""
    delivered = sent = 0.0
    epochs: float | None = 0.0
    for line in lines:
        passes: float | None
        if line.get("round") is None or line["stage"] is None:
            passes = line.get("epochs", 0)
        elif not line.get("contacted"):
            continue
        else:
            sharing = clients if isinstance(clients, int) else clients[line["stage"]]
            up = line["bytes_up"] / model / sharing
            delivered += line["bytes_down"] / line["contacted"] / model + up
            sent += line["bytes_down"] / model / sharing + up
            each = line.get("epochs")
            passes = None if each is None else each * line["reported"] / sharing
        epochs = None if epochs is None or passes is None else epochs + passes
    return ClientCost(delivered, sent, epochs)
