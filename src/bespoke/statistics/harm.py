"""The cost of an attack to honest clients, and the clients a robust rule left out, read from run folders.

A comparison under [attack] runs every method a second time without the attack (kind "none": the same clients, who do no
harm), into `unattacked/`. Both are scored on the honest clients alone.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, TypedDict

from bespoke.statistics.formatting import number

if TYPE_CHECKING:
    from bespoke.statistics.folders import FinishedRun, RunSet

UNATTACKED = "unattacked"  # the folder of the runs without the attack, beside `runs`
MOST_NAMED = 10  # clients that are listed


HarmRow = TypedDict("HarmRow", {
    "label": str, "kind": str, "attackers": int, "rule": str,
    "with": float | None, "without": float | None,  # the mean over seeds of the honest clients' score; None: diverged
    "listed": list[tuple[str, int, bool]],  # clients whose changes were left out or cut, how often, and if they attack
    "counted": int, "rounds": int,
})  # fmt: skip


def harm(study: RunSet) -> list[HarmRow]:
    """A row for each method that ran under [attack] or [robust]."""
    found: dict[str, list[FinishedRun]] = {}
    for run in study.runs:
        if "attack" in run.result or "robust" in run.result:
            found.setdefault(run.label, []).append(run)
    return [_row(label, runs) for label, runs in found.items()]


def _row(label: str, runs: list[FinishedRun]) -> HarmRow:
    attack, robust = runs[0].result.get("attack") or {}, runs[0].result.get("robust") or {}
    attackers = {str(client) for run in runs for client in (run.result.get("attack") or {}).get("clients", [])}
    counts: Counter[str] = Counter()
    rounds = 0
    for run in runs:
        ruled = run.result.get("robust") or {}
        counts.update({**ruled.get("left_out", {})})
        counts.update({**ruled.get("cut", {})})
        rounds += int(ruled.get("rounds", 0))
    listed = [(client, times, client in attackers) for client, times in counts.most_common(MOST_NAMED)]
    return {
        "label": label, "kind": attack.get("kind", "none"), "attackers": len(attack.get("clients", [])),
        "rule": robust.get("rule", ""), "with": _mean([run.result.get("query") for run in runs]),
        "without": _mean([_twin(run) for run in runs]) if attack else None,
        "listed": listed, "counted": len(counts), "rounds": rounds,
    }  # fmt: skip


def _twin(run: FinishedRun) -> float | None:
    path = run.folder.parent.parent / UNATTACKED / run.folder.name / "result.json"
    return json.loads(path.read_text(encoding="utf-8")).get("query") if path.exists() else None


def _mean(values: list[float | None]) -> float | None:
    """The mean over seeds; None if one is missing: not run, or diverged."""
    kept = [value for value in values if value is not None]
    return sum(kept) / len(kept) if kept and len(kept) == len(values) else None


def cost_of_attack(study: RunSet, metric: str, titles: dict[str, str]) -> list[str]:
    """A sentence on what the attack cost; nothing without one."""
    rows = [(row, row["without"]) for row in harm(study) if row["kind"] != "none"]
    known = [(row, without) for row, without in rows if without is not None]
    if not known:
        return []
    first, _ = known[0]
    parts = [
        f"{titles.get(row['label'], row['label'])} {number(without)} without it, "
        f"{'diverged' if row['with'] is None else number(row['with'])} with it"
        + (f" ({row['rule']})" if row["rule"] else "")
        for row, without in known
    ]
    return [
        f"Attack ({first['kind']}, {first['attackers']} clients), mean {metric} of honest clients: {'; '.join(parts)}."
    ]
