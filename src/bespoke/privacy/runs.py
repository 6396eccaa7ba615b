"""What several private runs cost together: tuning looks at the same clients again and again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bespoke.privacy.accounting import Spent


def together(paths: Sequence[Path]) -> dict[str, Any]:
    """How many runs these are, and their epsilon if all of their models were seen (null: infinite)."""
    found = [json.loads((path / "result.json").read_text(encoding="utf-8")).get("privacy") for path in paths]
    statements = [statement for statement in found if statement]
    if len(statements) < len(paths) or not statements:
        return {}
    delta, total = max(statement["delta"] for statement in statements), Spent()
    accountants = {statement["accountant"] for statement in statements}
    accountant = accountants.pop() if len(accountants) == 1 else "rdp"
    try:
        for statement in statements:
            total = total + Spent.from_json(statement["released"]["spent"])
    except ValueError:  # cohorts were tuned: no accountant composes different kinds of neighbours
        return {"runs": len(paths), "epsilon": None, "delta": delta, "why": ["runs that sample clients differently"]}
    epsilon = total.epsilon(delta, accountant)
    return {
        "runs": len(paths), "epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta,
        "why": list(total.why),
    }  # fmt: skip
