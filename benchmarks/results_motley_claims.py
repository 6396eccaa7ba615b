"""Compares Motley's observations with a comparison folder: one table for each dataset, and one for all of them.

Every observation is judged on each dataset separately (results_motley_judges.py), or is "not tested", with the reason.
A method that had not converged is never used for a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import results_motley_judges as judges
from bespoke.statistics.formatting import listing
from results_motley_found import Found, Untested
from results_motley_judges import Judged

UNTESTED = "not tested"
TITLE = "The paper's observations"
OVERVIEW = "### What the paper observes, by dataset"


@dataclass(frozen=True)
class Observation:
    """A statement of the paper, its evidence there, and the function that judges it with the labels of some methods."""

    text: str
    paper: str
    needs: tuple[str, ...]
    judge: Callable[..., Judged]
    converged: bool = True  # whether the methods must have converged
    silos: bool | None = None  # the paper says it only of cross-silo (True) or cross-device (False) data

    def of(self, found: Found) -> Judged:
        """(here, verdict); raises Untested."""
        kind = str((found.study.compare.get("split") or {}).get("protocol") or "")
        if self.silos is not None and kind and (kind == "cross-silo") != self.silos:
            raise Untested(f"the paper says it of cross-{'silo' if self.silos else 'device'} data")
        labels = [found.label(kind) for kind in self.needs]
        if self.converged:
            for label in labels:
                found.check(label)
        return self.judge(found, *labels)


OBSERVATIONS = (
    Observation(
        "Fine-tuning improves the mean",
        "EMNIST .844 → .903, StackOverflow .269 → .282, Landmarks .564 → "
        ".773, TED .160 → .162, School .0130 → .0116 (Tables 4, 5)",
        ("finetune", "fedavg"),
        judges.improves,
    ),
    Observation(
        "Fine-tuning makes clients more alike (fairness)",
        "std EMNIST .10 → .06, StackOverflow .03 → .03, School .0068 → .0056",
        ("finetune", "fedavg"),
        judges.fairer,
    ),
    Observation(
        "Fine-tuning hurts some clients",
        "5.2 % EMNIST, 14 % StackOverflow, 40 % TED, 33 % School (Figure 3b)",
        ("finetune",),
        judges.some_hurt,
    ),
    Observation(
        "Clients hurt by fine-tuning tend to have few examples",
        "Figure 3(c)",
        ("finetune", "fedavg"),
        judges.small_ones_hurt,
    ),
    Observation(
        "On smaller test sets the change by fine-tuning is noisier", "Figure 3(d)", ("finetune",), judges.noisier_tests
    ),
    Observation(
        "The best mean needs a larger rate of fine-tuning than the fewest clients hurt",
        "Figure 4(c)",
        ("finetune",),
        judges.two_best("sweep-lrs"),
    ),
    Observation(
        "The best mean needs more epochs of fine-tuning than the fewest clients hurt",
        "Section 4.1, Observation 2",
        ("finetune",),
        judges.two_best("sweep-epochs"),
    ),
    Observation(
        "Settings chosen by each client are no better than one choice for all",
        "worse on StackOverflow, the same on School (Figure 10); better with much data (ADNI, Figure 8)",
        ("finetune",),
        judges.chosen_alone,
    ),
    Observation("Fine-tuning gains on own rows and loses on others' rows", "Figure 5", ("finetune",), judges.trade_off),
    Observation(
        "With fewer examples fine-tuning and kNN-Per get worse", "Figure 7(c)", ("finetune", "knn-per"), judges.drops
    ),
    Observation(
        "With fewer examples HypCluster loses least", "Figure 7(c)", ("warm", "finetune", "knn-per"), judges.robust
    ),
    Observation(
        "Fine-tuning all layers is better than the last one", "on all of Table 4", ("finetune",), judges.layers
    ),
    Observation(
        "HypCluster is better than FedAvg",
        "EMNIST .897, StackOverflow .273, Landmarks .573, TED .163, School .0112",
        ("warm", "fedavg"),
        judges.improves,
    ),
    Observation(
        "HypCluster is worse than fine-tuning",
        "on 3 of 4 cross-device datasets",
        ("warm", "finetune"),
        judges.falls_behind,
        silos=False,
    ),
    Observation("From random models HypCluster collapses into one cluster", "Figure 6(a)", ("cold",), judges.collapses),
    Observation("A warm start makes the clusters more even", "Figure 6(a)", ("warm", "cold"), judges.warm_helps),
    Observation(
        "HypCluster sends k times as much as FedAvg",
        "Section 4.2, Observation 2",
        ("warm", "fedavg"),
        judges.costs_more,
        converged=False,
    ),
    Observation(
        "An ensemble of k FedAvg models is about as good as HypCluster",
        "3 of 4 (Table 4); not on School, .0129 against .0112",
        ("warm", "ensemble"),
        judges.like_ensemble,
    ),
    Observation("HypCluster finds the two languages", "Figure 6(d)", ("warm",), judges.finds_languages),
    Observation(
        "Elsewhere clusters are hard to interpret", "Section 4.2, Observation 3", ("warm",), judges.hard_to_read
    ),
    Observation(
        "HypCluster has a worse trade-off between own and others' rows than fine-tuning",
        "Figure 5",
        ("warm", "finetune"),
        judges.worse_trade(True),
    ),
    Observation(
        "kNN-Per has at least as good a trade-off as fine-tuning",
        "Figure 5",
        ("knn-per", "finetune"),
        judges.worse_trade(False),
    ),
    Observation(
        "kNN-Per has a lower mean than fine-tuning",
        "3 of 4 (Table 4)",
        ("knn-per", "finetune"),
        judges.falls_behind,
        silos=False,
    ),
    Observation(
        "kNN-Per hurts more clients than fine-tuning",
        "19.8, 23.6, 5.6, 34.4 % against 5.2, 14, 5.6, 40 %; School 37.4 against 33 %",
        ("knn-per", "finetune"),
        judges.hurts_more,
    ),
    Observation(
        "kNN-Per: the best mean needs a larger mix than the fewest clients hurt",
        "Figure 7(a-b)",
        ("knn-per",),
        judges.two_best("sweep-mix"),
    ),
    Observation("kNN-Per hardly depends on k", "footnote 20", ("knn-per",), judges.any_k),
    Observation(
        "Across devices, local training is far behind FedAvg",
        "EMNIST .594 against .844",
        ("local", "fedavg"),
        judges.falls_behind,
        silos=False,
    ),
    Observation(
        "In silos, local training is a strong baseline: better than FedAvg",
        "School .0121 against .0130",
        ("local", "fedavg"),
        judges.improves,
        silos=True,
    ),
    Observation(
        "In silos, every personalization method is better than FedAvg",
        "Table 5",
        ("fedavg",),
        judges.all_better,
        silos=True,
    ),
    Observation(
        "In silos, multi-task learning is competitive",
        "School: Ditto .0114, Mocha .0121, fine-tuning .0116",
        ("finetune",),
        judges.competitive,
        silos=True,
    ),
    Observation("The best method changes with the metric", "Section 6", (), judges.no_single_best),
    Observation(
        "Models between the shared and the tuned one have at least as good a trade-off as fine-tuning",
        "asked for in Section 4.1 (Figure 5)",
        ("blend", "finetune"),
        judges.worse_trade(False),
    ),
    Observation(
        "Settings by the number of examples are better than one choice for all",
        "asked for in Section 4.1",
        ("size", "finetune"),
        judges.improves,
    ),
)


# -- tables ------------------------------------------------------------------------------------------------------------
def claims(found: Found) -> list[str]:
    """A table of the observations that could be judged on a dataset, and the reasons why the others could not."""
    rows: list[str] = []
    untested: dict[str, list[int]] = {}
    for place, observation in enumerate(OBSERVATIONS, start=1):
        try:
            here, verdict = observation.of(found)
        except Untested as why:
            untested.setdefault(str(why), []).append(place)
            continue
        rows.append(f"| {place}. {observation.text} | {observation.paper} | {here} | {verdict} |")
    lines = [f"{TITLE} (gain: positive is better; [ ]: paired 95 % interval):", ""]
    if rows:
        lines += ["| observation | paper | here | verdict |", "| --- | --- | --- | --- |", *rows, ""]
    if untested:
        told = "; ".join(f"{listing([str(place) for place in places])}: {why}" for why, places in untested.items())
        lines.append(f"Not tested, by number: {told}.")
    return lines


def overview(sections: Mapping[str, str]) -> str:
    """All datasets side by side, read from the sections of the page: their verdicts by observation."""
    verdicts = {name: _verdicts(text) for name, text in sections.items() if TITLE in text}
    if not verdicts:
        return ""
    lines = [
        OVERVIEW,
        "",
        'This table collects the verdicts of the tables below, which contain the numbers. "Not tested" means: a method '
        "or an analysis is missing, the paper says it of other data, or a method had not converged.",
        "",
        f"| observation | {' | '.join(verdicts)} |",
        f"| --- |{' --- |' * len(verdicts)}",
    ]
    for place, observation in enumerate(OBSERVATIONS, start=1):
        told = " | ".join(found.get(place, UNTESTED) for found in verdicts.values())
        lines.append(f"| {place}. {observation.text} | {told} |")
    return "\n".join(lines)


def _verdicts(text: str) -> dict[int, str]:
    rows = re.findall(r"^\| (\d+)\. .* \| ([^|]+) \|$", text.partition(TITLE)[2], flags=re.MULTILINE)
    return {int(place): verdict for place, verdict in rows}


def dataset(section: str) -> str:
    """A short name for a section: that of the comparison file in its command."""
    command = re.search(r"motley/(\w+)\.toml", section)
    return command[1].replace("_", " ") if command else section.partition("\n")[0].removeprefix("### ")
