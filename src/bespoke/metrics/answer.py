"""The answer in words: what a summary's numbers say to somebody who has to decide."""

from __future__ import annotations

import math

from bespoke.metrics import significance
from bespoke.metrics.against import ALPHA, Affected, Against, GroupNumbers
from bespoke.metrics.clients import OverSeeds
from bespoke.metrics.significance import Interval
from bespoke.metrics.summary import BEFORE, CONSTANT, FEW_CLIENTS, POOLED, MethodSummary, Summary
from bespoke.metrics.text import (
    FINEST_PERCENT,
    MOST_PERCENT,
    count,
    listing,
    metric_name,
    number,
    p_text,
    percent,
    shorten,
    signed,
    signed_percent,
    size,
    with_interval,
)

ABOVE_POOLED = 5.0  # percent of the pooled fit's error: a shared model further away has not converged
BELOW_POOLED = 0.02  # the same for scores, where higher is better, in their own units


def answer(summary: Summary) -> list[str]:
    """Sentences that answer the question; the first one alone must not mislead."""
    if not math.isfinite(summary.method(summary.best).mean.value):
        nothing = f"No client has a finite {metric_name(summary.metric)}: there is nothing to say."
        return _diverged(summary) or [nothing]
    if not summary.compared:
        return _alone(summary)
    top = winner(summary) or _ranked(summary)[0]
    return [
        *_no_better_than_constant(summary),
        _headline(summary, top),
        *_baseline_no_better_than_constant(summary),
        *_above_pooled(summary),
        *_diverged(summary),
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
    """Nothing is compared: there is one method, or the baseline diverged, or all the others did."""
    method = summary.method(summary.best)
    reached, low, high = with_interval(method.mean.value, method.interval)
    bounds = f" (95 % interval {low} to {high})" if math.isfinite(method.interval.low) else ""
    sentence = (
        f"{method.title} reaches a mean {metric_name(summary.metric)} of {reached} per client"
        f"{bounds}; there is no other method to compare it with."
    )
    if len(summary.methods) > 1:
        what = f"has a mean {metric_name(summary.metric)} of {reached}{bounds}"
        sentence = f"Of what did not diverge the best, {method.title}, {what}."
    constant = _no_better_than_constant(summary)
    return [*_diverged(summary), *constant, sentence, *_price(summary, method), *_cautions(summary)]


def _diverged(summary: Summary) -> list[str]:
    """Who diverged and how far; the baseline first, as nothing can be said against it."""
    results = summary.clients * len(summary.seeds)
    what = f"of {count(results, 'client result')} have no finite {metric_name(summary.metric)}, or an absurd one"
    sentences = []
    for method in sorted(summary.methods, key=lambda m: m.label != summary.baseline):
        if method.diverged and method.label == summary.baseline:
            sentences.append(
                f"The baseline, {method.title}, diverged: {method.undefined:,} {what}; nothing can be compared with it."
            )
        elif method.diverged:
            sentences.append(f"{method.title} diverged, so it is ranked last: {method.undefined:,} {what}.")
    return sentences


def _beats(summary: Summary, method: MethodSummary, reference: MethodSummary, above: dict[str, Interval]) -> bool:
    """Whether the mean is better than the reference's by more than its interval, where there is one."""
    interval = above.get(method.label, Interval(math.nan, math.nan))
    if math.isfinite(interval.low):
        return _gain(summary, interval.side) > 0
    return _gain(summary, method.mean.value - reference.mean.value) > 0


def _no_better_than_constant(summary: Summary) -> list[str]:
    constant, best = summary.reference(CONSTANT), summary.method(summary.best)
    sound = [method for method in summary.methods if math.isfinite(method.mean.value)]
    if constant is None or any(_beats(summary, method, constant, summary.above_constant) for method in sound):
        return []
    beyond = " beyond chance" if _gain(summary, best.mean.value - constant.mean.value) > 0 else ""
    return [
        f"No method beats a constant prediction{beyond}: the best, {best.title}, has a mean "
        f"{metric_name(summary.metric)} of {number(best.mean.value)}, the constant {number(constant.mean.value)}."
    ]


def _baseline_no_better_than_constant(summary: Summary) -> list[str]:
    constant, base = summary.reference(CONSTANT), _base(summary)
    if constant is None or base is None or _no_better_than_constant(summary):
        return []
    if _beats(summary, base, constant, summary.above_constant):
        return []
    return [
        f"{base.title} itself is no better than a constant prediction (mean {metric_name(summary.metric)} "
        f"{number(base.mean.value)} against {number(constant.mean.value)}): a gain against it says little."
    ]


def _above_pooled(summary: Summary) -> list[str]:
    """A shared model that stands clearly behind the same model fitted in one place has not been trained enough."""
    pooled, base = summary.reference(POOLED), _base(summary)
    if pooled is None or base is None or not summary.baseline_is_shared:
        return []
    gap = base.mean.value - pooled.mean.value
    relative = significance.relative_change(gap, pooled.mean.value)
    if summary.lower_is_better and relative > ABOVE_POOLED:
        behind = f"{percent(relative)} % above"
    elif not summary.lower_is_better and -gap > BELOW_POOLED:
        behind = f"{number(-gap, 2)} below"
    else:
        return []
    return [
        f"{base.title} stopped {behind} the same model fitted in one place ({number(base.mean.value)} against "
        f"{number(pooled.mean.value)}): it has not converged, so gains against it are overstated."
    ]


def _base(summary: Summary) -> MethodSummary | None:
    return next((m for m in summary.methods if m.label == summary.baseline and math.isfinite(m.mean.value)), None)


def _headline(summary: Summary, top: MethodSummary) -> str:
    against, reference = _versus(top), _reference(summary)
    moves = f"{top.title} {_moves(summary, top)}"
    single = len(summary.compared) == 1
    if against.verdict == "better":
        pooled = summary.reference(POOLED)
        if pooled and summary.baseline_is_shared and not _beats(summary, top, pooled, summary.above_pooled):
            return (
                f"No gain over a shared model that has converged: {moves} against {reference}, but is not better than "
                f"the same model fitted in one place ({number(top.mean.value)} against {number(pooled.mean.value)})."
            )
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
    hurt = f"{after} % instead of {before} % would be hurt" if after != before else f"as many ({after} %) would be hurt"
    return [
        f"If clients took their personal model only where {condition} ({percent(100 * rule.taken.value)} % would), "
        f"{hurt}, and {cost} ({number(rule.plain_mean.value)} to {number(rule.mean.value)})."
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


def _by_group(summary: Summary, top: MethodSummary) -> list[str]:
    groups = [g for g in top.groups if math.isfinite(g.difference)]
    if len(groups) < 2:
        return []
    relative = all(in_percent(summary, g.relative) for g in groups)  # in the order of what is shown
    ordered = sorted(groups, key=lambda g: -_gain(summary, g.relative if relative else g.difference))
    first, last = ordered[0], ordered[-1]

    def change(group: GroupNumbers) -> str:
        return f"{shorten(group.group)} ({_amount(summary, group.difference, group.relative)})"

    if len({_amount(summary, group.difference, group.relative) for group in groups}) == 1:
        return []  # all groups change alike, as far as is shown
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
    return cautions


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
    finest, cap = (FINEST_PERCENT, MOST_PERCENT) if relative else (9, math.inf)
    shown, low, high = with_interval(abs(value), interval, sign, finest, cap)
    unit = " %" if relative else ""
    bounds = f" (95 % interval {low} to {high}{unit})" if math.isfinite(interval.low) else ""
    return f"{verb} {what} by {shown}{unit}{bounds}"


def _amount(summary: Summary, difference: float, relative: float) -> str:
    if in_percent(summary, relative):
        return signed_percent(relative)
    return signed(difference)


def change_of(summary: Summary, against: Against) -> tuple[float, Interval]:
    """The change and its interval, in percent where that makes sense."""
    if in_percent(summary, against.relative):
        return against.relative, against.relative_interval
    return against.difference, against.interval


def signed_change(summary: Summary, method: MethodSummary) -> str:
    """The change against the baseline with its sign, in percent where that makes sense."""
    value, interval = change_of(summary, _versus(method))
    unit, most, cap = "", 9, math.inf
    if in_percent(summary, _versus(method).relative):
        unit, most, cap = " %", FINEST_PERCENT, MOST_PERCENT
    return f"{'+' if 0 < value <= cap else ''}{with_interval(value, interval, 1.0, most, cap)[0]}{unit}"
