"""The answer by client and by group: who gains, who is hurt, and what an acceptance rule would change."""

from __future__ import annotations

import math

from bespoke.report.change import (
    amount,
    gain_of,
    in_percent,
    versus,
)
from bespoke.report.summary import FEW_CLIENTS, MethodSummary, Summary
from bespoke.statistics import significance
from bespoke.statistics.clients import OverSeeds
from bespoke.statistics.formatting import (
    metric_name,
    number,
    p_text,
    percent,
    shorten,
    signed,
)
from bespoke.statistics.versus_baseline import ALPHA, Affected, Against, GroupNumbers


def who_is_hurt(summary: Summary, top: MethodSummary) -> list[str]:
    against = versus(top)
    base = top.mean.value - against.difference
    sentences = []
    if against.hurt.value == 0:
        helps = f", and helps {beyond_chance(against, 'helped')}" if math.isfinite(against.helped_beyond) else ""
        sentences.append(f"{top.title} hurts no client{helps}.")
    elif math.isfinite(against.hurt_beyond):
        names = [f"{shorten(row.client)} ({_with_bounds(row)})" for row in against.most_hurt if row.beyond][:3]
        most = f" Hurt most: {', '.join(names)}." if names else ""
        if not against.hurt_beyond and not against.helped_beyond:
            most = " No single client stands out from chance by its own test rows."
        stand_in = f" (judged by the {metric_name(against.rows_metric)} of their test rows)"
        sentences.append(
            f"{top.title} hurts {beyond_chance(against, 'hurt')}, and helps {beyond_chance(against, 'helped')}"
            f"{stand_in if against.rows_metric else ''}.{most}"
        )
    else:
        # With few clients a percentage hides how few they are.
        of = f" ({against.hurt_clients} of {summary.clients} in most seeds)" if summary.clients < 100 else ""
        loss = ""
        if against.hurt_clients:
            part = abs(significance.relative_change(against.mean_loss, base))
            share = f" ({percent(part)} % of the baseline's mean)" if math.isfinite(part) else ""
            loss = f", by {number(against.mean_loss, 2)} on average{share}"
        names = [f"{shorten(row.client)} ({signed(row.difference)})" for row in against.most_hurt[:3]]
        most = f" Hurt most: {', '.join(names)}." if names else ""
        sentences.append(
            f"{top.title} hurts {percent(100 * against.hurt.value)} % of clients{of}{loss}, "
            f"and helps {percent(100 * against.helped.value)} %.{most}"
        )
    base_worst = next((m.worst_tenth.value for m in summary.methods if m.label == summary.baseline), math.nan)
    if math.isfinite(base_worst):
        sentences.append(
            f"For the worst served 10 % of clients the mean goes from {number(base_worst)} "
            f"to {number(top.worst_tenth.value)}."
        )
    if math.isfinite(against.examples_p) and summary.clients >= FEW_CLIENTS:
        rho = f"Spearman {signed(against.examples_correlation, 2)}, {p_text(against.examples_p)}"
        if against.examples_p >= ALPHA:
            sentences.append(f"Who gains does not depend visibly on how many examples a client has ({rho}).")
        else:
            fewer = "less" if against.examples_correlation > 0 else "more"
            sentences.append(f"Clients with fewer examples gain {fewer} ({rho}).")
    return sentences


def beyond_chance(against: Against, which: str) -> str:
    """The share of clients hurt (helped) beyond chance, with the raw share and what chance alone would give."""
    shares = [getattr(against, f"{which}{of}") for of in ("_beyond", "", "_by_chance")]
    beyond, raw, chance = (100 * (share.value if isinstance(share, OverSeeds) else share) for share in shares)
    alone = f"; {percent(chance)} % would be by chance alone" if math.isfinite(chance) else ""
    return f"{percent(beyond)} % of clients beyond chance ({percent(raw)} % raw{alone})"


def _with_bounds(row: Affected) -> str:
    if not math.isfinite(row.interval.low):
        return signed(row.difference)
    return f"{signed(row.difference)}, 95 % interval {signed(row.interval.low)} to {signed(row.interval.high)}"


def if_accepted(summary: Summary, top: MethodSummary) -> list[str]:
    """What the first acceptance rule would change for the discussed method."""
    rule = next((rule for rule in summary.accepted if rule.label == top.label), None)
    if rule is None or not rule.plain_hurt.value:
        return []
    condition = {
        "wins on own validation rows": "it wins on their own validation rows",
        "has enough examples": f"they have {rule.min_examples or 0:.0f} examples or more",
    }.get(rule.rule, "the acceptance rule allows it")
    before, after = percent(100 * rule.plain_hurt.value), percent(100 * rule.hurt.value)
    cost = "the mean suffers for it" if "lost" in rule.verdict else "the mean stays within its interval"
    hurt = f"{after} % instead of {before} % would be hurt" if after != before else f"as many ({after} %) would be hurt"
    return [
        f"If clients took their personal model only where {condition} ({percent(100 * rule.taken.value)} % would), "
        f"{hurt}, and {cost} ({number(rule.plain_mean.value)} to {number(rule.mean.value)})."
    ]


def by_group(summary: Summary, top: MethodSummary) -> list[str]:
    groups = [g for g in top.groups if math.isfinite(g.difference)]
    if len(groups) < 2:
        return []
    relative = all(in_percent(summary, g.relative) for g in groups)  # in the order of what is shown
    ordered = sorted(groups, key=lambda g: -gain_of(summary, g.relative if relative else g.difference))
    first, last = ordered[0], ordered[-1]

    def change(group: GroupNumbers) -> str:
        return f"{shorten(group.group)} ({amount(summary, group.difference, group.relative)})"

    if len({amount(summary, group.difference, group.relative) for group in groups}) == 1:
        return []  # all groups change alike, as far as is shown
    losing = sum(gain_of(summary, g.difference) < 0 for g in groups)
    if losing == len(groups):
        return [f"All {len(groups)} groups lose: {change(first)} least and {change(last)} most."]
    worse = f"; the mean gets worse in {losing} of {len(groups)} groups" if losing else ""
    return [f"By group, {top.title} does most for {change(first)} and least for {change(last)}{worse}."]
