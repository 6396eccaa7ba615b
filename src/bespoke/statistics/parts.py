"""Small facts about a method that are read from its run folders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bespoke.plain import JsonObject
from bespoke.records import RunRecord
from bespoke.statistics import clients as over
from bespoke.statistics.clients import OverSeeds
from bespoke.statistics.folders import FinishedRun

if TYPE_CHECKING:
    import pandas as pd


def is_personal(table: pd.DataFrame, label: str, metric: str) -> bool:
    """Whether the tested models differ from the model before personalization."""
    if f"baseline_{metric}" not in table:
        return label != "fedavg"
    rows = table[table["method"] == label]
    tested, before = rows[f"query_{metric}"].to_numpy(float), rows[f"baseline_{metric}"].to_numpy(float)
    if not np.isfinite(before).any():
        return label != "fedavg"
    both = np.isfinite(tested) & np.isfinite(before)
    return not np.allclose(tested[both], before[both], rtol=1e-6, atol=0.0)


def mean_of(table: pd.DataFrame, label: str, column: str, seeds: Sequence[int]) -> OverSeeds:
    """The mean over clients of another column of one method; clients without a value (NaN) do not count."""
    if column not in table:
        return over.over_seeds([])
    rows = table[table["method"] == label]
    return over.mean(np.vstack([_padded(rows, column, seed) for seed in seeds]))


def _padded(rows: pd.DataFrame, column: str, seed: int) -> over.Floats:
    values = rows[column][rows["seed"] == seed].to_numpy(float)
    return np.pad(values, (0, len(rows) - len(values)), constant_values=np.nan)


def revealed(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """What leaves a client, and what the server learns of it."""
    fields: dict[str, str] = {}
    for line in runs[0].lines("ledger.jsonl"):
        fields |= line.get("revealed") or {}
    return fields


def largest_cluster(runs: Sequence[FinishedRun]) -> OverSeeds | None:
    """The share of the last round's clients in the largest cluster; None without clusters."""
    shares = [list(run.largest_shares().values()) for run in runs]
    return over.over_seeds(share[-1] for share in shares if share) if any(shares) else None


def excluded(runs: Sequence[FinishedRun]) -> dict[str, int]:
    """In how many rounds each client's update was not finite."""
    counts: dict[str, int] = {}
    for run in runs:
        for client, count in (run.result.get("excluded") or {}).items():
            counts[client] = counts.get(client, 0) + int(count)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def unnamed(counts: dict[str, int]) -> dict[str, int]:
    """The same numbers without client ids."""
    return {f"unnamed {place}": count for place, count in enumerate(counts.values(), start=1)}


def without_names(result: RunRecord) -> JsonObject:
    """A run's record without client ids."""
    plain: JsonObject = {**result, "excluded": unnamed(result["excluded"])}
    if attack := result.get("attack"):
        plain["attack"] = {**attack, "clients": len(attack["clients"])}
    if robust := result.get("robust"):
        plain["robust"] = {**robust, **{what: unnamed(robust[what]) for what in ("left_out", "cut")}}
    return plain
