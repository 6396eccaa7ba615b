"""States which runs a callback ended early, and after which round."""

from __future__ import annotations

from bespoke.statistics.folders import RunSet

MOST_SEEDS = 5  # that are told one by one


def stopped_early(study: RunSet, titles: dict[str, str]) -> list[str]:
    """A sentence for each method with a stage that a callback ended."""
    found: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
    for run in study.runs:
        for stopped in run.result.get("stopped") or []:
            key = run.label, str(stopped["method"]), str(stopped["by"])
            found.setdefault(key, []).append((run.seed, int(stopped["round"]), int(stopped["of"])))
    sentences = []
    for (label, method, by), ends in found.items():
        subject = "training" if method == label else f"its training with {method}"
        each = ", ".join(f"after round {last} of {of} with seed {seed}" for seed, last, of in ends[:MOST_SEEDS])
        if len(ends) > MOST_SEEDS:
            rounds = [last for _, last, _ in ends]
            each = f"after {min(rounds)} to {max(rounds)} of {ends[0][2]} rounds, with {len(ends)} seeds"
        sentences.append(f"{titles.get(label, label)}: {by} ended {subject} early, {each}.")
    return sentences
