"""The paper's claims about its tables, and whether they hold here by the intervals."""

from __future__ import annotations

from typing import Any

from benchmarks.fedpc.readings import Change, Table, change

from results_claim import Claim

OURS = ("fedpc", "fedpc-frozen", "fedpc-generated")
PLAIN = ("fedpc-plain",)  # without Adam on the server
BASELINES = ("fedpc-split", "fedpc-meta")
TITLES = {
    "fedpc": "FedPC", "fedpc-frozen": "FedPC (Frozen)", "fedpc-generated": "FedPC (Generated)",
    "fedpc-split": "Split-Learning", "fedpc-meta": "Meta-Learning", "shared-prefix": "one shared prefix",
    "fedpc-plain": "FedPC, plain averaging", "shared-prefix-plain": "one shared prefix, plain averaging",
    "none": "no prefix",
}  # fmt: skip


def lower(found: Change) -> str:
    """Whether something is lower, by its interval."""
    return {-1: "yes", 0: "cannot be told", 1: "no: the opposite"}[found.side]


def same(found: Change) -> str:
    """Whether something stays the same: its whole interval is within 5 %."""
    if found.alike:
        return "yes"
    return "no: it falls" if found.side < 0 else "no: it rises" if found.side > 0 else "cannot be told"


def claims(table: Table, paper: dict[str, list[list[float]]]) -> list[Claim]:
    """The claims on one table: who is best, and who profits from samples."""
    found = []

    def told(method: str, place: int) -> str:
        return f"{paper[method][place][0]:.1f}"

    def pair(text: str, a: tuple[str, int], b: tuple[str, int], verdict: Any = lower) -> None:
        samples = ("1", "5", "15", "all")
        values = [table.at(method, samples[place]) for method, place in (a, b)]
        if values[0] is None or values[1] is None:
            return
        difference = change(values[0], values[1])
        said = f"{told(*a)} against {told(*b)}"
        methods = TITLES[a[0]], TITLES[b[0]]
        found.append(Claim(text, methods, said, difference.text(), verdict(difference)))

    for baseline in BASELINES:
        pair(f"FedPC is better than {TITLES[baseline]}, all samples", ("fedpc", 3), (baseline, 3))
    for baseline in BASELINES:
        pair(f"FedPC (Generated) is better than {TITLES[baseline]}, one sample", ("fedpc-generated", 0), (baseline, 0))
    pair("With one sample FedPC (Generated) is better than FedPC", ("fedpc-generated", 0), ("fedpc", 0))
    pair("With one sample Meta-Learning is better than Split-Learning", ("fedpc-meta", 0), ("fedpc-split", 0))
    pair("FedPC improves with samples: all against one", ("fedpc", 3), ("fedpc", 0))
    pair("Split-Learning improves with samples: all against one", ("fedpc-split", 3), ("fedpc-split", 0))
    pair("Meta-Learning does not improve with samples", ("fedpc-meta", 3), ("fedpc-meta", 0), same)
    pair("FedPC (Generated) does not improve with samples", ("fedpc-generated", 3), ("fedpc-generated", 0), same)
    found += _size(table, paper)
    return found


def _size(table: Table, paper: dict[str, list[list[float]]]) -> list[Claim]:
    """FedPC is better than the best baseline by about a half."""
    known = {method: table.at(method, "all") for method in ("fedpc", *BASELINES)}
    if any(values is None for values in known.values()):
        return []
    best = min(BASELINES, key=lambda method: float(known[method].mean()))  # type: ignore[union-attr]
    theirs = 1 - paper["fedpc"][3][0] / min(paper[method][3][0] for method in BASELINES)
    found = change(known["fedpc"], known[best])  # type: ignore[arg-type]
    large = "yes" if found.interval.high <= -0.4 else "no" if found.interval.low > -0.4 else "cannot be told"
    text = f"It is better than the best baseline (here {TITLES[best]}) by 45 to 55 %"
    methods = tuple(TITLES[method] for method in known)
    return [Claim(text, methods, f"−{100 * theirs:.0f} %", found.text(), large)]


def beyond(table: Table) -> list[str]:
    """What the paper did not ask: is FedPC better than one prefix for all, and than none?"""
    lines = []
    for method in (*OURS, *PLAIN):
        for other in ("shared-prefix-plain" if method in PLAIN else "shared-prefix", "none"):
            mine, theirs = table.at(method, "all"), table.at(other, "all")
            if mine is not None and theirs is not None:
                found = change(mine, theirs)
                verdict = {-1: "better", 0: "no difference that can be told", 1: "worse"}[found.side]
                lines.append(f"- {TITLES[method]} against {TITLES[other]}: {found.text()}, {verdict}")
    return lines
