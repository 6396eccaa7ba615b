"""Acceptance rules: what would change if clients took a personal model only where the rule allows it (Motley).

Computed from the per-client tables of a comparison; the shared model is the baseline's, of the same seed. There are two
rules: a client takes its model if it wins on the client's own validation rows by a margin, or if the client has enough
examples, where "enough" is chosen on validation data. Query rows only measure the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bespoke.records import AcceptanceRule
from bespoke.statistics import clients as over
from bespoke.statistics import significance
from bespoke.statistics.clients import Floats, OverSeeds
from bespoke.statistics.folders import FinishedRun
from bespoke.statistics.significance import Interval

if TYPE_CHECKING:
    import pandas as pd

THRESHOLDS = 11  # numbers of examples tried: deciles of what clients have


@dataclass(frozen=True)
class Accepted:
    """A method under one acceptance rule, compared with the method without the rule."""

    label: str
    rule: str
    margin: float | None
    min_examples: float | None  # mean over seeds
    taken: OverSeeds  # fraction of clients that take the personal model
    mean: OverSeeds
    plain_mean: OverSeeds
    change: Interval  # of accepted minus plain, in the metric's units
    hurt: OverSeeds
    plain_hurt: OverSeeds
    verdict: str  # "fewer hurt", "no fewer hurt" or "nobody hurt", each perhaps with ", mean lost"


def acceptances(
    runs: Sequence[FinishedRun], table: pd.DataFrame, metric: str, lower: bool, baseline: str, asked: AcceptanceRule
) -> list[Accepted]:
    """Every method but the baseline under the rules that its runs allow (or under the one asked for)."""
    labels = list(dict.fromkeys(table["method"]))
    if baseline not in labels or f"validation_{metric}" not in table:
        return []
    found: list[tuple[str, _Pairs, _Rule]] = []
    for label in labels:
        if label != baseline:
            pairs = _pairs(table, label, baseline, metric)
            found += [(label, pairs, rule) for rule in _rules(runs, pairs, label, baseline, metric, lower, asked)]
    samples: dict[int, Floats] = {}
    for shape in {pairs.personal.shape for _, pairs, _ in found}:  # as a rule one: all methods have the same clients
        alike = [place for place, (_, pairs, _) in enumerate(found) if pairs.personal.shape == shape]
        sets = [np.stack([p.personal, p.under(rule), p.shared]) for _, p, rule in (found[place] for place in alike)]
        samples |= zip(alike, significance.bootstrap_together(sets))
    return [_judge(pairs, label, rule, lower, samples[place]) for place, (label, pairs, rule) in enumerate(found)]


@dataclass(frozen=True)
class _Pairs:
    """A method beside the baseline, (seeds, clients) each; NaN where a client was not tested with a seed."""

    seeds: list[int]
    examples: Floats
    personal: Floats
    shared: Floats
    personal_validation: Floats
    shared_validation: Floats

    def under(self, rule: _Rule) -> Floats:
        """Clients' values under a rule."""
        return np.where(rule.takes, self.personal, self.shared)


@dataclass(frozen=True)
class _Rule:
    name: str
    takes: NDArray[np.bool_]  # (seeds, clients)
    margin: float | None = None
    min_examples: list[float] | None = None  # by seed


def _pairs(table: pd.DataFrame, label: str, baseline: str, metric: str) -> _Pairs:
    wanted = ["support_examples", f"query_{metric}", f"validation_{metric}"]
    both = [
        table[table["method"] == name].pivot(index="seed", columns="client", values=wanted)
        for name in (label, baseline)
    ]
    seeds = both[0].index.intersection(both[1].index)
    clients = both[0]["support_examples"].columns.intersection(both[1]["support_examples"].columns)
    (examples, personal, own), (_, shared, theirs) = (
        [frame[name].loc[seeds, clients].to_numpy(float) for name in wanted] for frame in both
    )
    known = np.isfinite(personal) & np.isfinite(shared)
    hide = np.where(known, 0.0, np.nan)
    return _Pairs([int(s) for s in seeds], examples, personal + hide, shared + hide, own, theirs)


def _rules(
    runs: Sequence[FinishedRun], pairs: _Pairs, label: str, baseline: str, metric: str, lower: bool,
    asked: AcceptanceRule,
) -> list[_Rule]:  # fmt: skip
    if asked:
        takes = pairs.examples >= float(asked.get("min_examples") or 0)
        margin = asked.get("margin")
        if margin is not None:
            takes &= _wins(pairs, float(margin), lower)
        smallest = [float(asked.get("min_examples") or 0)] * len(pairs.seeds)
        return [_Rule("as asked", takes, margin, smallest)]
    rules = []
    if np.isfinite(pairs.personal_validation - pairs.shared_validation).any():
        rules.append(_Rule("wins on own validation rows", _wins(pairs, 0.0, lower), margin=0.0))
    thresholds = []
    for place, seed in enumerate(pairs.seeds):
        data = _selection(runs, label, baseline, seed, metric)
        if data is None:
            data = pairs.examples[place], pairs.personal_validation[place], pairs.shared_validation[place]
        thresholds.append(_enough(*data, lower))
    if all(threshold is not None for threshold in thresholds):
        smallest = [float(threshold or 0) for threshold in thresholds]
        rules.append(_Rule("has enough examples", pairs.examples >= np.array(smallest)[:, None], None, smallest))
    return rules


def _wins(pairs: _Pairs, margin: float, lower: bool) -> NDArray[np.bool_]:
    """As in bespoke.experiment.choosing.accepted: strictly better by this part of the shared model's value."""
    gain = pairs.shared_validation - pairs.personal_validation
    with np.errstate(invalid="ignore"):
        return (gain if lower else -gain) > margin * np.abs(pairs.shared_validation)


def _selection(
    runs: Sequence[FinishedRun], label: str, baseline: str, seed: int, metric: str
) -> tuple[Floats, Floats, Floats] | None:
    """Cross-device: (examples, personal, shared) of the validation clients; None where all clients are test clients."""
    import pandas as pd

    frames = []
    for name in (label, baseline):
        run = next(run for run in runs if run.label == name and run.seed == seed)
        path = run.folder / "selection.parquet"
        if not path.exists():
            return None
        frames.append(pd.read_parquet(path).set_index("client"))
    joined = frames[0].join(frames[1][f"validation_{metric}"].rename("shared"), how="inner")
    columns = ("support_examples", f"validation_{metric}", "shared")
    examples, personal, shared = (joined[name].to_numpy(float) for name in columns)
    return examples, personal, shared


def _enough(examples: Floats, personal: Floats, shared: Floats, lower: bool) -> float | None:
    """The number of examples from which on personal models are taken that does best on validation data."""
    known = np.isfinite(personal) & np.isfinite(shared)
    if not known.any():
        return None
    examples, personal, shared = examples[known], personal[known], shared[known]
    tried = np.unique([0.0, *np.quantile(examples, np.linspace(0, 1, THRESHOLDS), method="higher"), examples.max() + 1])
    means = [float(np.where(examples >= least, personal, shared).mean()) for least in tried]
    best = np.argmin(means) if lower else np.argmax(means)  # ties keep the smaller number
    return float(tried[int(best)])


def _judge(pairs: _Pairs, label: str, rule: _Rule, lower: bool, samples: Floats) -> Accepted:
    """`samples`: bootstrap means of the personal models, of what the rule gives, and of the shared model."""
    known = np.isfinite(pairs.personal)
    accepted = pairs.under(rule)
    plain_hurt = over.gains(pairs.personal, pairs.shared, lower).hurt
    hurt = over.gains(accepted, pairs.shared, lower).hurt
    change = significance.percentile_interval(samples[:, 1] - samples[:, 0])
    # lost: what is left of the change against the baseline lies beyond the interval of that change without a rule
    without = significance.percentile_interval(samples[:, 0] - samples[:, 2])
    with_shared = over.mean(accepted - pairs.shared).value
    lost = with_shared > without.high if lower else with_shared < without.low
    verdict = "fewer hurt" if hurt.value < plain_hurt.value else "no fewer hurt" if hurt.value > 0 else "nobody hurt"
    return Accepted(
        label=label,
        rule=rule.name,
        margin=rule.margin,
        min_examples=float(np.mean(rule.min_examples)) if rule.min_examples else None,
        taken=over.over_seeds(float(row[mask].mean()) for row, mask in zip(rule.takes, known) if mask.any()),
        mean=over.mean(accepted),
        plain_mean=over.mean(pairs.personal),
        change=change,
        hurt=hurt,
        plain_hurt=plain_hurt,
        verdict=f"{verdict}, mean lost" if lost else verdict,
    )
