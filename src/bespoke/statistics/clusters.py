"""Compares learned clusters, and groups found for GroupFL, with known groups (Motley, Figure 6(d))."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bespoke.statistics.clients import OverSeeds, over_seeds

if TYPE_CHECKING:
    import pandas as pd

PREFIX = "cluster "  # of the candidates' names of methods that cluster clients


@dataclass(frozen=True)
class Clusters:
    """The clusters of one method: how many clients of each group they hold (first seed), and how well they agree."""

    label: str
    seed: int
    names: list[str]  # clusters, in the order of their numbers
    groups: list[str]  # the largest first; a single "" where there are none
    counts: list[list[int]]  # [group][cluster]
    largest: OverSeeds  # the part of clients in the largest cluster
    used: OverSeeds  # clusters that anybody is in
    agreement: OverSeeds | None  # adjusted Rand index: 1 for the same division, 0 for chance; None without groups


def clusters_of(table: pd.DataFrame) -> list[Clusters]:
    """For each method whose clients ended up in clusters."""
    if "candidate" not in table:
        return []
    found = []
    for label in dict.fromkeys(table["method"]):
        of_method = table[table["method"] == label]
        if "served" in of_method and of_method["served"].notna().any():  # in groups that a server found
            found.append(_clusters(str(label), of_method.assign(candidate=of_method["served"].astype(str))))
            continue
        chosen = of_method["candidate"].astype(str)
        if not chosen.str.startswith(PREFIX).any():
            continue
        of_method = of_method[chosen.str.startswith(PREFIX)]
        found.append(_clusters(str(label), of_method))
    return found


def _clusters(label: str, table: pd.DataFrame) -> Clusters:
    import pandas as pd
    from sklearn.metrics import adjusted_rand_score

    seeds = [rows for _, rows in table.groupby("seed", sort=True)]
    first = seeds[0]
    grouped = first["group"].nunique() > 1
    counts = pd.crosstab(first["group"] if grouped else first["group"].map(lambda _: ""), first["candidate"])
    names = sorted(counts.columns, key=lambda name: (_place(name), name))
    order = counts.sum(axis=1).sort_values(ascending=False, kind="stable").index
    agreement = [float(adjusted_rand_score(rows["group"], rows["candidate"])) for rows in seeds] if grouped else []
    return Clusters(
        label, int(first["seed"].iloc[0]), [str(name) for name in names], [str(group) for group in order],
        counts.loc[order, names].to_numpy(int).tolist(),
        over_seeds(float(rows["candidate"].value_counts(normalize=True).iloc[0]) for rows in seeds),
        over_seeds(float(rows["candidate"].nunique()) for rows in seeds),
        over_seeds(agreement) if agreement else None,
    )  # fmt: skip


def _place(name: str) -> float:
    tail = str(name).removeprefix(PREFIX).removeprefix("group ")
    return float(tail) if tail.isdigit() else math.inf
