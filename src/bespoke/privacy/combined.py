"""The combined privacy cost of several private runs: seeds, methods and trials train on the same clients."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from bespoke.privacy.accountant import Spent, finite
from bespoke.privacy.attempts import adopted, run_name
from bespoke.records import PrivacyCost, PrivacyRecord, SpentRecord


def together(paths: Sequence[Path]) -> PrivacyCost:
    """The number of runs, their combined epsilon if all of their models are seen (null: infinite), and that of `one`.

    A stage that several runs share was released once, and counts once.
    """
    found = [json.loads((path / "result.json").read_text(encoding="utf-8")).get("privacy") for path in paths]
    statements = [statement for statement in found if statement]
    if len(statements) < len(paths) or not statements:
        return {}
    delta, total = max(statement["delta"] for statement in statements), Spent()
    alone = [math.inf if (e := statement["released"]["epsilon"]) is None else e for statement in statements]
    known: PrivacyCost = {"runs": len(paths), "delta": delta, "one": finite(max(alone))}
    accountants = {statement["accountant"] for statement in statements}
    accountant = accountants.pop() if len(accountants) == 1 else "rdp"
    try:
        for part in _released(paths, statements):
            total = total + Spent.from_json(part)
    except ValueError:  # tuned cohorts: no accountant composes different kinds of neighbours
        return {**known, "epsilon": None, "why": ["runs that sample clients differently"]}
    return {**known, "epsilon": finite(total.epsilon(delta, accountant)), "why": list(total.why)}


def _released(paths: Sequence[Path], statements: list[PrivacyRecord]) -> list[SpentRecord]:
    """The cost of runs, in which a stage that others adopted counts once."""
    here, parts, shared = set(map(run_name, paths)), [], {}
    for path, statement in zip(paths, statements):
        others = adopted(path)
        if not others:
            parts.append(statement["released"]["spent"])
            continue
        for place, spent in enumerate(statement["stages"]):
            key, by = others.get(place, ("", ""))
            if not key:
                parts.append(spent)
            elif by not in here:
                shared[key] = spent
    return [*parts, *shared.values()]


def whole_folder(folder: Path) -> PrivacyCost:
    """The combined cost of all private runs of a comparison, trials included; `without` lists runs without privacy."""
    ended = [path.parent for kind in ("runs", "tuning") for path in sorted((folder / kind).glob("*/result.json"))]
    private = [path for path in ended if (path / "privacy.json").exists()]
    return {**together(private), "without": [path.name for path in ended if path not in private]} if private else {}
