"""States a run's privacy guarantee (from result.json) in words and numbers, for the terminal and the report."""

from __future__ import annotations

import math

from bespoke.records import PrivacyCost, PrivacyRecord, PrivacyView
from bespoke.statistics.folders import RunSet

ASIDE = (
    "Scores on validation rows, by which settings, epochs and candidates are chosen, are means over clients without "
    "noise: they are outside of this guarantee, and so are the run folders, which hold results by client."
)


class GuaranteeRow(PrivacyRecord):
    """A method's guarantee as the page shows it."""

    label: str
    epsilon: str
    seen: str  # the epsilon of messages
    bounds: str
    why: list[str]
    runs: int
    with_tuning: str


def guarantees(study: RunSet) -> list[GuaranteeRow]:
    """A row for each method that ran under privacy: the weakest of its seeds, and what its tuning adds."""
    found: dict[str, list[PrivacyRecord]] = {}
    for run in study.runs:
        if run.result.get("privacy"):
            found.setdefault(run.label, []).append(run.result["privacy"])
    rows: list[GuaranteeRow] = []
    for label, statements in found.items():
        worst = max(statements, key=_loss)
        cost = study.entry(label).get("tuning_cost") or {}
        rows.append({
            "label": label, **worst, "epsilon": epsilon_text(worst["released"]["epsilon"]),
            "seen": epsilon_text(worst["messages"]["epsilon"]), "bounds": bounds(worst["released"]),
            "why": worst["released"]["why"], "runs": cost.get("runs", 0),
            "with_tuning": epsilon_text(cost["epsilon"]) if cost.get("runs", 0) > 1 else "",
        })  # fmt: skip
    return rows


def epsilon_text(epsilon: float | None) -> str:
    """An epsilon as it lies in JSON, where null is infinite."""
    return "∞" if epsilon is None else "0" if epsilon == 0 else f"{epsilon:.3g}"


def _loss(statement: PrivacyRecord) -> float:
    epsilon = statement["released"]["epsilon"]
    return math.inf if epsilon is None else epsilon


def sentences(statement: PrivacyRecord) -> list[str]:
    """The guarantee to one client, the bound behind it, and its limits."""
    released, messages = statement["released"], statement["messages"]
    if released["epsilon"] == 0:
        return ["Privacy: nothing was sent by any client; epsilon 0 at delta 0."]
    said = [
        f"Privacy: released models epsilon {epsilon_text(released['epsilon'])}, a client's messages by themselves "
        f"epsilon {epsilon_text(messages['epsilon'])}, at delta {statement['delta']:.2g}, for one client: "
        f"{statement['adjacency']}."
    ]
    if released["why"]:
        said += [f"Infinite, for {reason}." for reason in released["why"]]
    else:
        said.append(f"{bounds(released)}, all at delta {statement['delta']:.2g}.")
    if "statistics" in statement:
        said.append(
            f"Of this, epsilon {epsilon_text(statement['statistics']['epsilon'])} is for what was learned of the data "
            "before training (categories, means and deviations)."
        )
    if not statement["secret"]:
        said.append(
            "NOT private: the noise was reproducible (privacy.reproducible). Anyone who knows the seed can compute it."
        )
    if statement["stopped"]:
        budget = f"epsilon {statement['budget']:g} at delta {statement['delta']:.2g}"
        said.append(f"{statement['stopped'][:1].upper()}{statement['stopped'][1:]} of {budget}.")
    return said


def all_together(spent: PrivacyCost) -> str:
    """The combined cost of a comparison's folder: every seed, method and trial trained on the same clients."""
    if not spent.get("runs"):
        return ""
    why = f" (infinite, for {'; '.join(spent['why'])})" if spent["why"] else ""
    beside = f" Not counted, because they have no noise: {', '.join(spent['without'])}." if spent["without"] else ""
    return (
        f"Runs, seeds and trials use the same clients: all {spent['runs']} private ones in this folder together have "
        f"epsilon {epsilon_text(spent['epsilon'])} at delta {spent['delta']:.2g}{why}.{beside}"
    )


def bounds(view: PrivacyView) -> str:
    """The same loss by every accountant that can tell."""
    parts = [f"By {view['by']} {epsilon_text(view['epsilon'])}"]
    if view["rdp"] is not None and view["by"] != "RDP":
        parts.append(f"by RDP {epsilon_text(view['rdp'])}")
    if view["mu"] is not None:
        about = "" if view["mu_exact"] else ", by the central limit theorem: an approximation, no bound"
        parts.append(f"mu-GDP with mu {view['mu']:.3g} (epsilon {epsilon_text(view['gdp'])}{about})")
    return ", ".join(parts)
