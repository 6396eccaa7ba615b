"""The answer in words: states what a summary's numbers mean for somebody who must decide."""

from __future__ import annotations

import math

from bespoke.report.change import (
    baseline_in_words,
    gain_of,
    moved,
    signed_change,
    versus,
)
from bespoke.report.clients import by_group, if_accepted, who_is_hurt
from bespoke.report.references import (
    above_pooled,
    baseline_no_better_than_constant,
    beats,
    diverged,
    no_better_than_constant,
)
from bespoke.report.summary import FEW_CLIENTS, POOLED, MethodSummary, Summary
from bespoke.statistics import significance
from bespoke.statistics.formatting import (
    count,
    listing,
    metric_name,
    number,
    p_text,
    size,
    with_interval,
)
from bespoke.statistics.versus_baseline import ALPHA


def answer(summary: Summary) -> list[str]:
    """Sentences that answer the question; the first one must not mislead if read alone."""
    if not math.isfinite(summary.method(summary.best).mean.value):
        nothing = f"No client has a finite {metric_name(summary.metric)}: there is nothing to say."
        return diverged(summary) or [nothing]
    if not summary.compared:
        return _alone(summary)
    top = winner(summary) or _ranked(summary)[0]
    return [
        *no_better_than_constant(summary),
        _headline(summary, top),
        *baseline_no_better_than_constant(summary),
        *above_pooled(summary),
        *diverged(summary),
        _evidence(summary, top),
        *who_is_hurt(summary, top),
        *if_accepted(summary, top),
        *by_group(summary, top),
        *_price(summary, top),
        *_rivals(summary, top),
        *_others(summary, top),
        *_cautions(summary),
    ]


def _ranked(summary: Summary) -> list[MethodSummary]:
    return sorted(summary.compared, key=lambda m: m.mean.value, reverse=not summary.lower_is_better)


def winner(summary: Summary) -> MethodSummary | None:
    better = [m for m in _ranked(summary) if m.against and m.against.verdict == "better"]
    return better[0] if better else None


def _alone(summary: Summary) -> list[str]:
    """The case without comparison: there is one method, or the baseline diverged, or all other methods did."""
    method = summary.method(summary.best)
    reached, low, high = with_interval(method.mean.value, method.interval)
    bounds = f" (95 % interval {low} to {high})" if math.isfinite(method.interval.low) else ""
    sentence = (
        f"{method.title} reaches a mean {metric_name(summary.metric)} of {reached} per client"
        f"{bounds}; there is no other method to compare it with."
    )
    if len(summary.methods) > 1:
        what = f"has a mean {metric_name(summary.metric)} of {reached}{bounds}"
        sentence = f"The best method that did not diverge, {method.title}, {what}."
    constant = no_better_than_constant(summary)
    return [*diverged(summary), *constant, sentence, *_price(summary, method), *_cautions(summary)]


def _headline(summary: Summary, top: MethodSummary) -> str:
    against, reference = versus(top), baseline_in_words(summary)
    moves = f"{top.title} {moved(summary, top)}"
    single = len(summary.compared) == 1
    if against.verdict == "better":
        pooled = summary.reference(POOLED)
        if pooled and summary.baseline_is_shared and not beats(summary, top, pooled, summary.above_pooled):
            return (
                f"No gain over a shared model that has converged: {moves} against {reference}, but is not better than "
                f"the same model fitted in one place ({number(top.mean.value)} against {number(pooled.mean.value)})."
            )
        if not (top.personal and summary.baseline_is_shared):
            return f"{top.title} beats {reference}: it {moved(summary, top)}."
        but = " on average, but most clients lose" if against.hurt.value > 0.5 else ""
        return f"Personalization helps{but}: {moves} against {reference}."
    if _too_few(summary):
        return f"Too few clients to tell: {moves} against {reference}, among {summary.clients} clients."
    if all(versus(method).verdict == "worse" for method in summary.compared):
        verdict = "Personalization hurts here" if summary.baseline_is_shared else "The baseline is better"
        if single:
            return f"{verdict}: {moves} against {reference}."
        return f"{verdict}: every method is worse than {reference}; the least bad, {moves}."
    if against.verdict == "mixed":
        if gain_of(summary, against.difference) > 0:
            return f"Mixed: {moves} against {reference}, but more clients lose than gain."
        return f"Mixed: more clients gain than lose, but {moves} against {reference}."
    if against.p_holm < ALPHA:
        return f"Not clear: {moves} against {reference}; the test over clients sees a change, the mean does not."
    if against.interval.side:
        return f"Not clear: {moves} against {reference}, but the paired test over clients does not confirm it."
    if single:
        return f"{top.title} does not beat {reference} beyond chance: it {moved(summary, top)}."
    return f"No method beats {reference} here beyond chance: the best, {moves}."


def _evidence(summary: Summary, top: MethodSummary) -> str:
    against = versus(top)
    base = top.mean.value - against.difference
    over_what = count(summary.clients, "client")
    seeds = f" and {len(summary.seeds)} seeds" if len(summary.seeds) > 1 else ""
    holm = f", Holm-corrected over {len(summary.compared)} comparisons" if len(summary.compared) > 1 else ""
    return (
        f"Over {over_what}{seeds} the mean goes from {number(base)} to {number(top.mean.value)}; "
        f"paired Wilcoxon test over clients: {p_text(against.p_holm)}{holm}."
    )


def _rivals(summary: Summary, top: MethodSummary) -> list[str]:
    tied = [summary.method(label).title for label, interval in summary.rivals.items() if interval.side == 0]
    if not tied:
        return []
    intervals = "interval of their difference contains" if len(tied) == 1 else "intervals of the differences contain"
    return [f"{top.title} cannot be told apart from {listing(tied)}: the 95 % {intervals} zero."]


def _others(summary: Summary, top: MethodSummary) -> list[str]:
    rest = [m for m in _ranked(summary) if m is not top]
    sentences = []
    words = {
        "better": "also better than the baseline",
        "worse": "worse than the baseline",
        "mixed": "better for most clients or on average, not both",
    }
    for verdict, said in words.items():
        named = [f"{m.title} ({signed_change(summary, m)})" for m in rest if versus(m).verdict == verdict]
        if named:
            sentences.append(f"{listing(named)} {'is' if len(named) == 1 else 'are'} {said}.")
    return sentences


def _price(summary: Summary, top: MethodSummary) -> list[str]:
    cost = top.cost
    if cost is None:
        return []
    base = next((m.cost for m in summary.methods if m.label == summary.baseline and m is not top), None)
    traffic, steps = size(cost.bytes), f"{cost.steps:,.0f} local steps"
    if base:
        traffic += f" (baseline {size(base.bytes)})"
        steps += f" (baseline {base.steps:,.0f})"
    if cost.personalization_steps >= 0.5:
        steps += f", {cost.personalization_steps:,.0f} of them to personalize"
    subject = f"a client in all {cost.rounds:,.0f} rounds" if cost.rounds else "a client"
    return [f"With {top.title}, {subject} moves {traffic} and makes {steps}."]


def _cautions(summary: Summary) -> list[str]:
    cautions = []
    if _too_few(summary):
        cautions.append(
            f"With {count(summary.clients, 'client')} and {count(len(summary.compared), 'comparison')} no test can "
            f"reach p < {ALPHA}, however large the difference: this describes these clients and proves nothing."
        )
    elif summary.clients < FEW_CLIENTS:
        cautions.append(f"There are only {summary.clients} clients: take the intervals as rough.")
    if len(summary.seeds) == 1:
        cautions.append("There is only one seed: how much the training itself varies is not in the intervals.")
    return cautions


def _too_few(summary: Summary) -> bool:
    return bool(summary.compared) and significance.smallest_p(summary.clients, len(summary.compared)) > ALPHA
