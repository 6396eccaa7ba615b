"""The part of docs/results.md on Self-FL: its figures and tables in numbers, beside those that the paper prints.

`section(runs)` reads the folders runs/self-fl-* (see benchmarks/self_fl) and leaves out experiments that were not run.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from bespoke.statistics.formatting import count
from results_converged import HEAD, NOTE, column
from self_fl import claims, uncertainty
from self_fl.folders import (
    OTHERS,
    SUMS,
    TITLES,
    Compared,
    measures_of,
    numbers,
    read_json,
    top,
    weighted,
    worst,
)
from self_fl.synthetic import ACTIVITY, CASES

# the numbers that the paper prints; its figures have none
TABLE_1 = {
    "fedavg": ("70.48 (0.07)", "0 (0)"), "ditto": ("70.58 (0.14)", "0 (0)"), "pfedme": ("72.76 (0.28)", "17.97 (1.23)"),
    "per-fedavg": ("74.95 (0.56)", "24.51 (1.55)"), "self-fl": ("76.24 (0.07)", "37.01 (1.57)"),
}  # fmt: skip
FORTY = {"ditto 40 steps": "71.33", "pfedme 40 steps": "68.87", "per-fedavg 40 steps": "71.08", "self-fl": "76.93"}
SMOOTHED = ("fedavg", "fedavg-smoothed", "self-fl")
SCORED = '"Best of the five" is against Ditto\'s personal models; the paper seems to score Ditto by its global model.'

HEADER = """## Self-FL

Source: Chen et al., *Self-Aware Personalized Federated Learning* (NeurIPS 2022). Accuracies are in percent and
weighted by the clients' test rows. They are those of personal models unless the text says otherwise. ± is the
standard deviation over seeds. The paper prints no values for its figures, so only the order that it claims is
checked. All figures on one page: `python benchmarks/self_fl page`.

The paper uses the word variance for two quantities. One is a mean of squares (Eq. 18, "Self-FL" below), which its
theory uses. The other is the sum of squares over clients or rounds (Section 3.2, "variances as sums"), with which
clients take more steps. Both are compared with its claims. The wake word, further down, was run only with the first.

The paper does not say over which other clients Eq. 8 and 10 sum if only some are active in a round. The default,
`others = "active"`, sums over the other clients of a cohort; `others = "all"` sums over all clients, extrapolated
from the cohort. Each table below says which value it uses. The synthetic clients were run with both. Tables with
"all" were made when it was the only choice. So were the wake word's Tables 5 and 6 and the Self-FL columns of Group
Personalized FL on Chem97 and Shakespeare. If all clients are active, the two values give the same result.

{ditto}"""


def table(head: list[str], rows: list[list[str]]) -> str:
    rule = "| --- |" + " ---: |" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def verdicts(found: list[tuple[str, str]]) -> str:
    return "\n".join(
        [
            "| the paper's claim | our verdict, with the number of seeds |",
            "| --- | --- |",
            *(f"| {a} | {b} |" for a, b in found),
        ]
    )


def titled(label: str) -> str:
    return TITLES.get(label, label)


def synthetic(runs: Path) -> list[str]:
    found = read_json(runs / "self-fl-synthetic" / "synthetic.json")
    if not found:
        return []
    lines = pd.DataFrame([line for study in found for line in study["lines"]])
    parts = [
        "### Synthetic clients (Figures 4, 5, 6)",
        "Command: `python benchmarks/self_fl synthetic`",
        f"20 clients, {found[0]['repeats']} repeats, drawn {len(found)} times; absolute errors after "
        f"{found[0]['rounds']} rounds of the Gaussian model, learning rate 1e-4 for all methods. Algorithm 2 knows the "
        "variances, and its global parameter is made of the clients' local results. \"Variances learned\" is Algorithm "
        "1 as it is used for networks: clients remove from the global parameter only what they contributed. Self-FL "
        "sums over the other active clients (`others = \"active\"`), or, in the rows \"all others\", over all clients "
        "(`others = \"all\"`). In \"FedAvg, smoothed\" the server takes the same fraction of each cohort's mean as in "
        "Self-FL: the activity rate.",
    ]  # fmt: skip
    for case in CASES:
        bounds = {name: np.mean([study["bounds"][case][name] for study in found]) for name in found[0]["bounds"][case]}
        rows = []
        for label in dict.fromkeys(lines["method"]):
            for part in ("global", "local"):
                mine = lines[(lines["case"] == case) & (lines["method"] == label)].groupby("activity")[part].mean()
                rows.append([titled(label), part, *(f"{mine[a]:.4f}" for a in ACTIVITY)])
        parts.append(
            f"{case.capitalize()}; at best (Eq. 2) {bounds['global']:.4f} global; local "
            f"{bounds['local alone']:.4f} alone, {bounds['local given all']:.4f} given all:"
        )
        parts.append(table(["method", "error", *(f"rate {a:g}" for a in ACTIVITY)], rows))
        parts.append(smoothing(lines[lines["case"] == case]))
    return [*parts, verdicts([(claim.text, claim.verdict) for claim in claims.synthetic(found)])]


def smoothing(lines: pd.DataFrame) -> str:
    """How much of Self-FL's lead over FedAvg comes from smoothing, at the lowest activity rate."""
    mean = lines[lines["activity"] == min(ACTIVITY)].groupby("method")[["global", "local"]].mean()
    errors = {part: [f"{mean[part][name]:.4f}" for name in SMOOTHED] for part in ("global", "local")}
    return f"Smoothing alone, at rate {min(ACTIVITY):g}: " + "; ".join(
        f"the {part} error of FedAvg is {without}, with smoothing {smoothed}, and that of Self-FL {own}"
        for part, (without, smoothed, own) in errors.items()
    ) + "."  # fmt: skip


def compared(runs: Path, entry: claims.Entry) -> list[str]:
    """A comparison: final accuracies, claims, and the chosen values if it was tuned."""
    study = Compared.found(runs / f"self-fl-{entry.name}")
    if study is None:
        return []
    measures, about, improving = measures_of(entry), study.about, column(study.folder)
    rows = [
        [titled(label), *(numbers(study.over_seeds(label, m)) for m in measures.values()), improving.get(label, "–")]
        for label in study.labels
    ]
    chosen = {titled(label): study.chosen(label) for label in study.labels if study.chosen(label)}
    told = "; ".join(f"{name}: {', '.join(f'{k} = {v:g}' for k, v in knobs.items())}" for name, knobs in chosen.items())
    facts = (
        f"{entry.about} {about['data']['clients']} clients, {about['cohort']} a round, {study.rounds} rounds, "
        f"{count(len(study.seeds), 'seed')}, {about['model']['name']} of {about['model']['parameters']:,} parameters."
    ).strip()
    facts = f"{facts} {study.others}".strip()
    return [
        f"### {entry.title}",
        f"Command: `{entry.command}`",
        facts + (f" Chosen on validation rows: {told}." if told else ""),
        table(["method", *measures, HEAD], rows),
        NOTE,
        verdicts(entry.judged(study)),
        *([SCORED] if entry.five else []),
    ]


def table_1(runs: Path) -> list[str]:
    study = Compared.found(runs / "self-fl-five-classes")
    if study is None:
        return []
    mine = [label for label, _ in claims.readings(study)]  # beside the paper's Self-FL
    printed = {label: TABLE_1.get(label, TABLE_1["self-fl"]) for label in (*OTHERS, *mine)}
    rows = [
        [titled(label), most, numbers(study.over_seeds(label, top)), least, numbers(study.over_seeds(label, worst))]
        for label, (most, least) in printed.items()
    ]
    longer = {**FORTY, **dict.fromkeys(mine, FORTY["self-fl"])}
    forty = [[titled(label), value, numbers(study.over_seeds(label, weighted))] for label, value in longer.items()]
    return [
        "Table 1 (the paper's brackets are standard errors; its data are FEMNIST, ours are the stand-in):",
        table(["method", "top 10 % by samples, paper", "ours", "worst 10 %, paper", "ours"], rows),
        "The other methods with 40 local steps:",
        table(["method", "paper", "ours"], forty),
    ]


def steps(runs: Path) -> list[str]:
    path = runs / "self-fl-mnist-steps" / "steps.parquet"
    if not path.exists():
        return []
    found = pd.read_parquet(path)
    rows = []
    for (label, number), here in found[found["round"].isin((50, 100, 150, 200))].groupby(["label", "round"]):
        steps = here["computed"]
        quantiles = steps.quantile([0.1, 0.5, 0.9]).tolist()
        rows.append([
            titled(label), str(number), str(len(steps)), *(f"{q:.3g}" for q in quantiles),
            f"{100 * (steps > 40).mean():.0f} %",
        ])  # fmt: skip
    return [
        "### Local steps that Self-FL computes (Figures 11, 12)",
        "Command: `python benchmarks/self_fl steps benchmarks/self_fl/mnist.toml`",
        "The table shows l of Eq. 8 for the active clients of a round whose uncertainty is known, before l becomes a "
        f"whole number from 1 to 40. {SUMS[found['others'].iloc[0] if 'others' in found else 'all']} Summed over 1,000 "
        "clients and with sample variances, l is less than one step: the other clients outweigh a client's own rows. "
        "The paper says that l may be too large for a client, and shows fewer steps after round 150 (Figure 12).",
        table(["variances", "round", "clients", "a tenth up to", "median", "a tenth from", "above 40"], rows),
    ]


def sharing(runs: Path) -> list[str]:
    found = read_json(runs / "self-fl-uncertainty" / "uncertainty.json")
    if not found:
        return []
    rows = [[name, *(f"{value:.3f}" for value in values)] for name, values in uncertainty.medians(found).items()]
    return [
        "### Uncertainty against the level of sharing",
        "Command: `python benchmarks/self_fl uncertainty`",
        f"{uncertainty.about(found)} The table shows the standard deviation of the median client's estimate of its "
        "parameter. The page of figures draws it for every client against its number of examples.",
        table(["clients", *uncertainty.LEVELS.values()], rows),
    ]


def section(runs: Path) -> str:
    """The whole part, from the existing folders."""
    parts = [HEADER.format(ditto=claims.DITTO), *synthetic(runs)]
    for entry in claims.COMPARISONS:
        parts += compared(runs, entry)
        if entry.name == "mnist-sparse":
            parts += steps(runs)
        if entry.name == "five-classes":
            parts += table_1(runs)
    parts += sharing(runs)
    return "\n\n".join(parts)
