"""The answer in words: what a summary's numbers say to somebody who has to decide."""

from __future__ import annotations

import math

from bespoke.metrics import significance
from bespoke.metrics.against import ALPHA, Against, GroupNumbers
from bespoke.metrics.significance import Interval
from bespoke.metrics.summary import BEFORE, COLLAPSED, FEW_CLIENTS, MethodSummary, Summary
from bespoke.metrics.text import (
    FINEST_PERCENT,
    count,
    listing,
    metric_name,
    number,
    p_text,
    percent,
    shorten,
    signed,
    size,
    with_interval,
)


def answer(summary: Summary) -> list[str]:
    """Sentences that answer the question; the first one alone must not mislead."""
    if not math.isfinite(summary.method(summary.best).mean.value):
        return [f"No client has a finite {metric_name(summary.metric)}: there is nothing to say."]
    if not summary.compared:
        return _alone(summary)
    top = winner(summary) or _ranked(summary)[0]
    return [
        _headline(summary, top),
        _evidence(summary, top),
        *_who_is_hurt(summary, top),
        *_if_accepted(summary, top),
        *_by_group(summary, top),
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
    method = summary.methods[0]
    reached, low, high = with_interval(method.mean.value, method.interval)
    bounds = f" (95 % interval {low} to {high})" if math.isfinite(method.interval.low) else ""
    sentence = (
        f"{method.title} reaches a mean {metric_name(summary.metric)} of {reached} per client"
        f"{bounds}; there is no other method to compare it with."
    )
    if len(summary.methods) > 1:
        sentence = "Nothing can be compared: the baseline has no finite result."
    return [sentence, *_price(summary, method), *_cautions(summary)]


def _headline(summary: Summary, top: MethodSummary) -> str:
    against, reference = _versus(top), _reference(summary)
    moves = f"{top.title} {_moves(summary, top)}"
    single = len(summary.compared) == 1
    if against.verdict == "better":
        if not (top.personal and summary.baseline_is_shared):
            return f"{top.title} beats {reference}: it {_moves(summary, top)}."
        but = " on average, but most clients lose" if against.hurt.value > 0.5 else ""
        return f"Personalization helps{but}: {moves} against {reference}."
    if _too_few(summary):
        return f"Too few clients to tell: {moves} against {reference}, among {summary.clients} clients."
    if all(_versus(method).verdict == "worse" for method in summary.compared):
        verdict = "Personalization hurts here" if summary.baseline_is_shared else "The baseline is better"
        if single:
            return f"{verdict}: {moves} against {reference}."
        return f"{verdict}: every method is worse than {reference}; the least bad, {moves}."
    if against.verdict == "mixed":
        if _gain(summary, against.difference) > 0:
            return f"Mixed: {moves} against {reference}, but more clients lose than gain."
        return f"Mixed: more clients gain than lose, but {moves} against {reference}."
    if against.p_holm < ALPHA:
        return f"Not clear: {moves} against {reference}; the test over clients sees a change, the mean does not."
    if against.interval.side:
        return f"Not clear: {moves} against {reference}, but the paired test over clients does not confirm it."
    if single:
        return f"{top.title} does not beat {reference} beyond chance: it {_moves(summary, top)}."
    return f"No method beats {reference} here beyond chance: the best, {moves}."


def _evidence(summary: Summary, top: MethodSummary) -> str:
    against = _versus(top)
    base = top.mean.value - against.difference
    over_what = count(summary.clients, "client")
    seeds = f" and {len(summary.seeds)} seeds" if len(summary.seeds) > 1 else ""
    holm = f", Holm-corrected over {len(summary.compared)} comparisons" if len(summary.compared) > 1 else ""
    return (
        f"Over {over_what}{seeds} the mean goes from {number(base)} to {number(top.mean.value)}; "
        f"paired Wilcoxon test over clients: {p_text(against.p_holm)}{holm}."
    )


def _if_accepted(summary: Summary, top: MethodSummary) -> list[str]:
    """What the first rule of acceptance would do for the method spoken of."""
    rule = next((rule for rule in summary.accepted if rule.label == top.label), None)
    if rule is None or not rule.plain_hurt.value:
        return []
    condition = {
        "wins on own validation rows": "it wins on their own validation rows",
        "has enough examples": f"they have {rule.min_examples or 0:.0f} examples or more",
    }.get(rule.rule, "the acceptance rule allows it")
    before, after = percent(100 * rule.plain_hurt.value), percent(100 * rule.hurt.value)
    cost = "the mean suffers for it" if "lost" in rule.verdict else "the mean stays within its interval"
    return [
        f"If clients took their personal model only where {condition} ({percent(100 * rule.taken.value)} % would), "
        f"{after} % instead of {before} % would be hurt, and {cost} ({number(rule.plain_mean.value)} to "
        f"{number(rule.mean.value)})."
    ]


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
        named = [f"{m.title} ({signed_change(summary, m)})" for m in rest if _versus(m).verdict == verdict]
        if named:
            sentences.append(f"{listing(named)} {'is' if len(named) == 1 else 'are'} {said}.")
    return sentences


def _who_is_hurt(summary: Summary, top: MethodSummary) -> list[str]:
    against = _versus(top)
    base = top.mean.value - against.difference
    sentences = []
    if against.hurt.value == 0:
        sentences.append(f"{top.title} hurts no client.")
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


def _by_group(summary: Summary, top: MethodSummary) -> list[str]:
    groups = [g for g in top.groups if math.isfinite(g.difference)]
    if len(groups) < 2:
        return []
    relative = all(in_percent(summary, g.relative) for g in groups)  # in the order of what is shown
    ordered = sorted(groups, key=lambda g: -_gain(summary, g.relative if relative else g.difference))
    first, last = ordered[0], ordered[-1]

    def change(group: GroupNumbers) -> str:
        return f"{shorten(group.group)} ({_amount(summary, group.difference, group.relative)})"

    losing = sum(_gain(summary, g.difference) < 0 for g in groups)
    if losing == len(groups):
        return [f"All {len(groups)} groups lose: {change(first)} least and {change(last)} most."]
    worse = f"; the mean gets worse in {losing} of {len(groups)} groups" if losing else ""
    return [f"By group, {top.title} does most for {change(first)} and least for {change(last)}{worse}."]


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
    who = f"a client in all {cost.rounds:,.0f} rounds" if cost.rounds else "a client"
    return [f"With {top.title}, {who} moves {traffic} and makes {steps}."]


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
    cautions.extend(_collapsed(summary))
    diverged = [m.title for m in summary.methods if not math.isfinite(m.mean.value)]
    if diverged:
        cautions.append(f"{listing(diverged)} gave no finite {metric_name(summary.metric)} for any client.")
    partly = [m.title for m in summary.methods if m.undefined and m.title not in diverged]
    if partly:
        cautions.append(
            f"Left out for every method: {count(summary.left_out, 'client result')}, as {listing(partly)} gave no "
            f"finite {metric_name(summary.metric)} there, which flatters {'it' if len(partly) == 1 else 'them'}."
        )
    return cautions


def _collapsed(summary: Summary) -> list[str]:
    """Clusters of which one holds nearly all clients are no clusters."""
    sentences = []
    for method in summary.methods:
        ended = method.largest_cluster.by_seed if method.largest_cluster else []
        high = [share for share in ended if share > COLLAPSED]
        if high:
            where = f"in {len(high)} of {len(ended)} seeds" if len(ended) > 1 else "here"
            most = percent(100 * max(high))
            sentences.append(
                f"{method.title} collapsed {where}: in the last round one cluster held up to {most} % of the clients, "
                "so the others are hardly trained; a warm start or fewer clusters may help."
            )
    return sentences


def _too_few(summary: Summary) -> bool:
    return bool(summary.compared) and significance.smallest_p(summary.clients, len(summary.compared)) > ALPHA


def _versus(method: MethodSummary) -> Against:
    assert method.against is not None  # only compared methods come here
    return method.against


def _gain(summary: Summary, difference: float) -> float:
    return -difference if summary.lower_is_better else difference


def _reference(summary: Summary) -> str:
    if summary.baseline == BEFORE:
        return "the same model before personalization"
    title = summary.method(summary.baseline).title
    return f"one shared model ({title})" if summary.baseline_is_shared else title


def in_percent(summary: Summary, relative: float) -> bool:
    """Errors shrink in percent; scores such as accuracy, which may be bounded or near zero, move in their own units."""
    return summary.lower_is_better and math.isfinite(relative)


def _moves(summary: Summary, method: MethodSummary) -> str:
    against = _versus(method)
    what = f"the mean {metric_name(summary.metric)} per client"
    if against.difference == 0:
        return f"leaves {what} as it is"
    verb, sign = ("lowers", -1.0) if against.difference < 0 else ("raises", 1.0)
    relative = in_percent(summary, against.relative)
    value, interval = change_of(summary, against)
    shown, low, high = with_interval(abs(value), interval, sign, FINEST_PERCENT if relative else 9)
    unit = " %" if relative else ""
    bounds = f" (95 % interval {low} to {high}{unit})" if math.isfinite(interval.low) else ""
    return f"{verb} {what} by {shown}{unit}{bounds}"


def _amount(summary: Summary, difference: float, relative: float) -> str:
    if in_percent(summary, relative):
        return f"{'+' if relative > 0 else ''}{percent(relative)} %"
    return signed(difference)


def change_of(summary: Summary, against: Against) -> tuple[float, Interval]:
    """The change and its interval, in percent where that makes sense."""
    if in_percent(summary, against.relative):
        return against.relative, against.relative_interval
    return against.difference, against.interval


def signed_change(summary: Summary, method: MethodSummary) -> str:
    """The change against the baseline with its sign, in percent where that makes sense."""
    value, interval = change_of(summary, _versus(method))
    unit, most = (" %", FINEST_PERCENT) if in_percent(summary, _versus(method).relative) else ("", 9)
    return f"{'+' if value > 0 else ''}{with_interval(value, interval, most=most)[0]}{unit}"
