"""How each of Motley's observations is judged on a comparison: what is found, and the verdict.

A verdict is "holds", "does not hold", "cannot be told" (an interval includes zero) or "mixed" (seeds disagree).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bespoke.report.best import best_by
from bespoke.report.summary import COLLAPSED
from bespoke.statistics import clients as over
from bespoke.statistics import significance
from bespoke.statistics.clusters import Clusters
from bespoke.statistics.formatting import number, percent, signed
from bespoke.statistics.significance import Interval
from bespoke.statistics.versus_baseline import ALPHA
from results_motley_found import DRAWS, Found, Untested

HOLDS, FAILS, UNSURE = "holds", "does not hold", "cannot be told"
SIMILAR = 0.02  # of the mean: the paper calls .573 and .564 similar (Landmarks, Table 4)

Judged = tuple[str, str]  # what is found here, and the verdict


# -- verdicts and texts ------------------------------------------------------------------------------------------------
def by_side(interval: Interval, wanted: int = 1) -> str:
    """Of an interval of gains: `wanted` is 1 if the paper sees a gain, -1 if a loss."""
    return UNSURE if interval.side == 0 else HOLDS if interval.side == wanted else FAILS


def by_seeds(flags: Sequence[bool]) -> str:
    if all(flags):
        return HOLDS
    return f"mixed ({sum(flags)} of {len(flags)} seeds)" if any(flags) else FAILS


def _gain(gain: float, interval: Interval) -> str:
    return f"gain {signed(gain)} [{number(interval.low, 3)}, {number(interval.high, 3)}]"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{percent(100 * value)} %"


def _values(numbers: Sequence[float | None]) -> str:
    return ", ".join(number(math.nan if value is None else value) for value in numbers)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


# -- fine-tuning (Section 4.1) -----------------------------------------------------------------------------------------
def improves(found: Found, a: str, b: str) -> Judged:
    gain, interval = found.gain(a, b)
    return f"{found.mean(b)} → {found.mean(a)}, {_gain(gain, interval)}", by_side(interval)


def falls_behind(found: Found, a: str, b: str) -> Judged:
    gain, interval = found.gain(a, b)
    return f"{found.mean(a)} against {found.mean(b)}, {_gain(gain, interval)}", by_side(interval, -1)


def fairer(found: Found, a: str, b: str) -> Judged:
    mine, theirs = (found.summary.method(label).deviation for label in (a, b))
    flags = [x < y for x, y in zip(mine.by_seed, theirs.by_seed)]
    return f"std {number(theirs.value)} → {number(mine.value)}", by_seeds(flags)


def some_hurt(found: Found, label: str) -> Judged:
    hurt, against = found.hurt(label), found.summary.method(label).against
    beyond = against.hurt_beyond if against else math.nan
    here = f"{_share(hurt.value)} hurt"
    if math.isfinite(beyond):
        here += f", {_share(beyond)} beyond the noise of their test rows"
        return here, HOLDS if beyond > 0 else FAILS if hurt.value == 0 else f"{HOLDS}, within noise"
    return here, HOLDS if hurt.value > 0 else FAILS


def small_ones_hurt(found: Found, label: str, base: str) -> Judged:
    """Figure 3(c): share of seeds in which a client is hurt against its number of examples."""
    box = found.cells
    pairs = over.gains(box.of(label), box.of(base), found.lower).pairs
    known = np.isfinite(pairs).any(0)
    share = np.nanmean(np.where(np.isfinite(pairs), pairs < 0, np.nan)[:, known], axis=0)
    sizes = box.examples[known]
    rho, p = significance.spearman(sizes, share)
    small = sizes <= np.median(sizes)
    if not math.isfinite(rho) or small.all():
        raise Untested("all clients have the same number of examples, or are hurt equally often")
    here = (
        f"hurt: {_share(share[small].mean())} of the half with at most {np.median(sizes):,.0f} examples, "
        f"{_share(share[~small].mean())} of the others (Spearman {signed(rho, 2)})"
    )
    return here, UNSURE if p >= ALPHA else HOLDS if rho < 0 else FAILS


def noisier_tests(found: Found, label: str) -> Judged:
    """Figure 3(d): between which values four fifths of the clients' changes lie, on all and on fewer test rows."""
    records = found.records(label, "smaller-tests")
    by_seed = [
        [(p["fraction"], p["change"][-1] - p["change"][0]) for p in record["points"] if p["change"]]
        for record in records
    ]
    fractions = [f for f, _ in by_seed[0]]
    if len(fractions) < 2:
        raise Untested("smaller-tests has one fraction only")
    widths = [_mean([points[i][1] for points in by_seed]) for i in range(len(fractions))]
    flags = [points[-1][1] > points[0][1] for points in by_seed]
    shown = ", ".join(f"{number(w, 3)} on {percent(100 * f)} %" for f, w in zip(fractions, widths))
    return f"four fifths of changes within {shown} of test rows", by_seeds(flags)


def chosen_alone(found: Found, label: str) -> Judged:
    """Figures 8 and 10: settings chosen by each client against one choice for all; `holds`: no better."""
    records, tables = found.records(label, "per-client"), found.clients_of(label, "per-client")
    sign = -1.0 if found.lower else 1.0
    ids = sorted(set.intersection(*(set(table["client"]) for table in tables)))
    gains = np.array([sign * (t["client_value"] - t["global_value"]).set_axis(t["client"]).loc[ids] for t in tables])
    interval = significance.percentile_interval(significance.bootstrap_means(gains[None], DRAWS)[:, 0])
    together, alone = (_mean([record[who]["mean"] for record in records]) for who in ("global", "client"))
    hurt = [_mean([record[who]["hurt"] for record in records]) for who in ("global", "client")]
    here = (
        f"for all {number(together)} ({_share(hurt[0])} hurt), each for itself {number(alone)} ({_share(hurt[1])} "
        f"hurt), {_gain(over.mean(gains).value, interval)}"
    )
    return here, FAILS if interval.side > 0 else HOLDS


def two_best(name: str) -> Callable[[Found, str], Judged]:
    """Figures 4 and 7(a-b): the value of a knob with the best mean, and the one that hurts fewest clients."""

    def judge(found: Found, label: str) -> Judged:
        records = found.records(label, name)
        values = [point["value"] for point in records[0]["points"]]
        points = [
            (value, _mean([r["points"][i]["mean"] for r in records]), _mean([r["points"][i]["hurt"] for r in records]))
            for i, value in enumerate(values) if isinstance(value, int | float) and value != 0
        ]  # fmt: skip
        points = [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]
        if len(points) < 2:
            raise Untested(f"{name} has one value only")
        sign = 1 if found.lower else -1
        best = min(points, key=lambda p: sign * p[1])
        gentle = min(points, key=lambda p: (p[2], sign * p[1]))

        def of(point: tuple[float, float, float]) -> str:
            return f"{records[0]['axis']} {point[0]:g} (mean {number(point[1])}, {_share(point[2])} hurt)"

        here = f"mean best at {of(best)}, fewest hurt at {of(gentle)}"
        return here, HOLDS if gentle[0] < best[0] else FAILS

    return judge


def trade_off(found: Found, label: str) -> Judged:
    """Figure 5: own rows gain, others' rows lose."""
    records = found.records(label, "ood")
    sign = 1.0 if found.lower else -1.0
    flags, own, others = [], [], []
    for record in records:
        before, after = record["shared"], record["chosen"]
        flags.append(sign * (after["own"] - before["own"]) < 0 < sign * (after["others"] - before["others"]))
        own.append((before["own"], after["own"]))
        others.append((before["others"], after["others"]))
    ends = [number(_mean([pair[i] for pair in pairs])) for pairs in (own, others) for i in (0, 1)]
    here = f"own rows {ends[0]} → {ends[1]}, others' rows {ends[2]} → {ends[3]}"
    return here + _longest(found, records), by_seeds(flags)


def _longest(found: Found, records: Sequence[dict[str, Any]]) -> str:
    """The curve with the best end on own rows, from its first point after the shared model to its last."""
    sign = 1 if found.lower else -1
    curves = [c for c in records[0]["curves"] if len(c["own"]) > 2 and c["own"][-1] is not None and c.get("others")]
    if not curves:
        return ""
    curve = min(curves, key=lambda c: sign * c["own"][-1])
    same = [c for record in records for c in record["curves"] if (c["name"], c["at"]) == (curve["name"], curve["at"])]
    own, others = ([_mean([c[part][i] for c in same]) for i in (1, -1)] for part in ("own", "others"))
    where = f" ({curve['name']})" if curve["name"] else ""
    ends = [" → ".join(map(number, part)) for part in (own, others)]
    at = f"{records[0]['axis']} {curve['at'][1]:g} → {curve['at'][-1]:g}"
    return f"; {at}{where}: own {ends[0]}, others' {ends[1]}"


def drops(found: Found, *labels: str) -> Judged:
    """Figure 7(c): with the smallest fraction of the examples the mean is worse than with all, for each method."""
    worse, shown = [], []
    sign = 1.0 if found.lower else -1.0
    for label in labels:
        fractions, means = _fewer(found, label)
        worse.append([bool(sign * (row[-1] - row[0]) > 0) for row in means])
        with_all = ", ".join(f"{percent(100 * f)} %" for f in fractions)
        shown.append(f"{label} {_values(means.mean(0).tolist())} with {with_all}")
    return "; ".join(shown), by_seeds([all(flags) for flags in zip(*worse)])


def _fewer(found: Found, label: str) -> tuple[list[float], Any]:
    records = found.records(label, "fewer-examples")
    fractions = [point["fraction"] for point in records[0]["points"]]
    means = np.array([[point["mean"] for point in record["points"]] for record in records], float)
    if len(fractions) < 2 or not np.isfinite(means).all():
        raise Untested(f"fewer-examples of {label} has one fraction, or a mean that is not finite")
    return fractions, means


def robust(found: Found, steady: str, *others: str) -> Judged:
    """Figure 7(c): HypCluster loses less by fewer examples than fine-tuning and kNN-Per do."""
    sign = 1.0 if found.lower else -1.0
    losses = {}
    for label in (steady, *others):
        _, means = _fewer(found, label)
        losses[label] = sign * (means[:, -1] - means[:, 0]) / np.abs(means[:, 0])
    flags = [bool(mine < min(rest)) for mine, *rest in zip(losses[steady], *(losses[label] for label in others))]
    return "mean worse by " + ", ".join(f"{_share(v.mean())} ({k})" for k, v in losses.items()), by_seeds(flags)


def layers(found: Found, label: str) -> Judged:
    entry = found.entry(label)
    if str((found.study.compare.get("model") or {}).get("name")) == "Linear":
        raise Untested("the model has one layer")
    part = (entry.get("chosen") or {}).get("part")
    if part is None:
        raise Untested("only one of the two was tried")
    return f"validation chooses `{part}`", HOLDS if part == "all" else FAILS


# -- HypCluster (Section 4.2) ------------------------------------------------------------------------------------------
def _clusters(found: Found, label: str) -> Clusters:
    if label not in found.clusters:
        raise Untested(f"{label} has no clusters")
    return found.clusters[label]


def collapses(found: Found, label: str) -> Judged:
    largest = _clusters(found, label).largest
    flags = [share > COLLAPSED for share in largest.by_seed]
    return f"{_share(largest.value)} of clients in the largest cluster", by_seeds(flags)


def warm_helps(found: Found, warm: str, cold: str) -> Judged:
    shares = [_clusters(found, label).largest for label in (warm, cold)]
    flags = [a < b for a, b in zip(shares[0].by_seed, shares[1].by_seed)]
    return f"largest cluster {_share(shares[1].value)} cold, {_share(shares[0].value)} warm", by_seeds(flags)


def costs_more(found: Found, label: str, base: str) -> Judged:
    mine, theirs = (found.summary.method(name).cost for name in (label, base))
    if mine is None or theirs is None or not theirs.bytes_down_round:
        raise Untested("traffic is not known")
    entry = found.entry(label)
    k = (entry.get("chosen") or {}).get("k", (entry.get("stages") or [{}])[-1].get("k"))
    if not k:
        raise Untested("the number of clusters is not known")
    times = mine.bytes_down_round / theirs.bytes_down_round
    return f"k = {k}, {times:.2f} times the bytes down in a round", HOLDS if times > 0.95 * k else FAILS


def like_ensemble(found: Found, label: str, ensemble: str) -> Judged:
    gain, interval = found.gain(label, ensemble)
    size = SIMILAR * abs(found.summary.method(ensemble).mean.value)
    here = f"{found.mean(label)} against {found.mean(ensemble)}, {_gain(gain, interval)}"
    if interval.low > size or interval.high < -size:
        return here, FAILS
    return here, HOLDS if abs(gain) <= size else UNSURE


def _agreement(found: Found, label: str) -> over.OverSeeds:
    agreement = _clusters(found, label).agreement
    if agreement is None:
        raise Untested("the data have no groups")
    return agreement


def finds_languages(found: Found, label: str) -> Judged:
    if "ted" not in str((found.study.compare.get("data") or {}).get("name")):
        raise Untested("the paper says it of TED's two languages")
    index = _agreement(found, label)
    return f"adjusted Rand index {number(index.value, 2)}", by_seeds([value > 0.9 for value in index.by_seed])


def hard_to_read(found: Found, label: str) -> Judged:
    if "ted" in str((found.study.compare.get("data") or {}).get("name")):
        raise Untested("the paper says it of data other than TED's two languages")
    index = _agreement(found, label)
    here = f"adjusted Rand index with the known groups {number(index.value, 2)}"
    return here, by_seeds([value < 0.1 for value in index.by_seed])


def _frontier(found: Found, label: str, tuned: str) -> list[tuple[float, float, float | None]]:
    """By seed: own and others' rows of a method, and the best on others' rows of fine-tuned models as good on own."""
    sign, rows = 1.0 if found.lower else -1.0, []
    seeds = {r["seed"]: r for r in found.records(tuned, "ood")}
    for record in found.records(label, "ood"):
        if record["seed"] not in seeds:
            continue
        theirs = seeds[record["seed"]]
        curves = [(c["own"], c["others"]) for c in theirs["curves"] if c.get("others")]
        points = [(theirs[part]["own"], theirs[part]["others"]) for part in ("shared", "chosen")]
        points += [point for curve in curves for point in zip(*curve) if None not in point]
        own, others = record["chosen"]["own"], record["chosen"]["others"]
        if own is None or others is None:
            continue
        as_good = [b for a, b in points if a is not None and b is not None and sign * a <= sign * own]
        rows.append((own, others, min(as_good, key=lambda b: sign * b) if as_good else None))
    if not rows:
        raise Untested(f"no seed has both ood analyses, of {label} and of {tuned}")
    return rows


def worse_trade(wanted: bool) -> Callable[[Found, str, str], Judged]:
    """Figure 5: at the same own rows, whether others' rows are worse than with fine-tuning."""

    def judge(found: Found, label: str, tuned: str) -> Judged:
        sign, rows = 1.0 if found.lower else -1.0, _frontier(found, label, tuned)
        worse = [best is not None and sign * others > sign * best for _, others, best in rows]
        own, others = (_mean([row[i] for row in rows]) for i in (0, 1))
        best = [row[2] for row in rows if row[2] is not None]
        beside = (
            f"fine-tuned models as good on own rows have {number(_mean(best))}"
            if best
            else "no fine-tuned model is as good on own rows"
        )
        here = f"own rows {number(own)}, others' {number(others)}; {beside}"
        return here, by_seeds([flag == wanted for flag in worse])

    return judge


# -- kNN-Per (Section 4.3) ---------------------------------------------------------------------------------------------
def hurts_more(found: Found, label: str, other: str) -> Judged:
    mine, theirs = found.hurt(label), found.hurt(other)
    flags = [a > b for a, b in zip(mine.by_seed, theirs.by_seed)]
    return f"{_share(mine.value)} hurt against {_share(theirs.value)}", by_seeds(flags)


def any_k(found: Found, label: str) -> Judged:
    records = found.records(label, "sweep-k")
    means = [_mean([r["points"][i]["mean"] for r in records]) for i in range(len(records[0]["points"]))]
    if len(means) < 2 or not np.isfinite(means).all():
        raise Untested("sweep-k has one value only")
    wide = (max(means) - min(means)) / abs(np.mean(means))
    shown = ", ".join(f"{p['value']}: {number(m)}" for p, m in zip(records[0]["points"], means))
    return f"mean by k: {shown}", HOLDS if wide <= SIMILAR else FAILS


# -- silos (Section 5), and all methods --------------------------------------------------------------------------------
def all_better(found: Found, base: str) -> Judged:
    labels, left_out = _sound(found, ("finetune", "warm", "knn-per", "ditto", "mocha"))
    if len(labels) < 2:
        raise Untested("fewer than two personalization methods have converged")
    shown, sides = [], []
    for label in labels:
        gain, interval = found.gain(label, base)
        shown.append(f"{label} {signed(gain)}{'' if interval.side else ' (not beyond chance)'}")
        sides.append(interval.side)
    verdict = HOLDS if min(sides) > 0 else FAILS if min(sides) < 0 else UNSURE
    aside = f"; left out: {'; '.join(left_out)}" if left_out else ""
    return f"gain on {found.mean(base)}: {', '.join(shown)}{aside}", verdict


def competitive(found: Found, tuned: str) -> Judged:
    """The better of Ditto and Mocha is not worse than fine-tuning."""
    labels, left_out = _sound(found, ("ditto", "mocha"))
    if not labels:
        raise Untested("; ".join(left_out))
    gains = {label: found.gain(label, tuned) for label in labels}
    best = max(labels, key=lambda label: gains[label][0])
    shown = ", ".join(f"{label} {found.mean(label)}" for label in labels)
    here = f"{shown} against {found.mean(tuned)}; {best}: {_gain(*gains[best])}"
    return here, FAILS if gains[best][1].side < 0 else HOLDS


def _sound(found: Found, kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """The labels of those methods that have converged, and why the others are left out."""
    labels, left_out = [], []
    for kind in kinds:
        try:
            label = found.label(kind)
            found.check(label)
        except Untested as why:
            left_out.append(str(why))
        else:
            labels.append(label)
    return labels, left_out


def no_single_best(found: Found) -> Judged:
    """Of the methods that have converged: mean, worst tenth, spread and clients hurt need not agree."""
    methods = found.converged()
    lines = best_by(methods, found.summary.metric, found.lower)[:4]
    if len(lines) < 2:
        raise Untested("fewer than two methods have converged")
    kinds = ("mean", "worst tenth", "spread", "clients hurt")
    wins: dict[str, list[str]] = {}
    for line in lines:
        what = next(k for k, word in zip(kinds, ("mean", "worst", "deviation", "hurt")) if word in line.what)
        wins.setdefault(line.label, []).append(what)
    told = "; ".join(f"{label}: {', '.join(what)}" for label, what in wins.items())
    return f"best by {told}", HOLDS if len(wins) > 1 else FAILS
