"""What a federation's run says, in lines: the result, each site's share of it, and what each site sent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from bespoke.deploy.federated.guarded import read_log
from bespoke.deploy.federated.scoring import SITES_FILE
from bespoke.records import RunRecord


def lines(result: RunRecord, folder: Path) -> list[str]:
    """The result of a run and of its sites; `folder` is the run folder."""
    metric, better = result["metric"], "lower" if result["lower_is_better"] else "higher"
    mean = "undefined" if result["query"] is None else f"{result['query']:.5g}"
    found = [
        f"{result['label']}: mean {metric} per client {mean} ({better} is better), {result['clients']} clients, "
        f"{result['rounds']} rounds"
    ]
    said = json.loads((folder / SITES_FILE).read_text(encoding="utf-8"))
    wide = max(map(len, said["sites"]), default=0)
    for name, site in sorted(said["sites"].items()):
        if site.get("withheld"):
            found.append(f"  {name:<{wide}}  too few tested clients to say anything of them")
            continue
        sums = site["metrics"][metric]
        mine, before = _mean(sums), _mean(sums["baseline"])
        found.append(
            f"  {name:<{wide}}  {site['clients']} clients: {metric} {mine}, with the shared model {before}"
            f"{_gains(site)}"
        )
    return [*found, *(f"  {note}" for note in result.get("notes", []))]


def _mean(sums: dict[str, Any]) -> str:
    return f"{sums['sum'] / sums['known']:.5g}" if sums["known"] else "undefined"


def _gains(site: dict[str, Any]) -> str:
    """How many clients gained and lost; bins that had to be joined for being small are not told apart."""
    bins = site.get("gain") or []
    worse = sum(n for low, high, n in bins if high is not None and high <= 0)
    better = sum(n for low, high, n in bins if low is not None and low > 0)
    joined = any((low is None or low < 0) and (high is None or high > 0) and high != 1e-9 for low, high, n in bins)
    if not bins or joined:
        return ""
    return f"; better for {better}, worse for {worse}"


def sent(log: Path) -> list[str]:
    """What a site's log says that it has sent, a line for each kind."""
    found = read_log(log)
    kinds: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    fields: dict[str, set[str]] = {}
    refused = 0
    for line in found:
        refused += bool(line.get("refused"))
        kind = line["operation"] + (f" ({line['what']})" if line.get("what") else "")
        kinds[kind] += 1
        sizes[kind] += line["sent"]
        fields.setdefault(kind, set()).update(line.get("sums", {}), line.get("each", {}), line.get("holds", []))
    made = [
        f"{kind}: {count} times, {sizes[kind]:,} bytes"
        + (f"; {', '.join(sorted(fields[kind]))}" if fields[kind] else "")
        for kind, count in kinds.items()
    ]
    return [*made, *([f"refused: {refused} messages"] if refused else [])]
