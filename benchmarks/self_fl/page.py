"""All figures and tables of Self-FL's experiments as one offline page, from the folders of the commands.

    python benchmarks/self_fl page --runs runs --out runs/self-fl.html

An experiment that has not been run is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bespoke.report.figure_page import Section, Table, line, plot, write_study
from bespoke.report.figures import Figure, theme
from results_converged import HEAD, column
from self_fl import claims, uncertainty
from self_fl.folders import (
    FIVE,
    READINGS,
    SUMS,
    TITLES,
    Compared,
    measures_of,
    numbers,
    read_json,
)

COLOURS = {
    "fedavg": "m0", "self-fl": "m1", "ditto": "m2", "pfedme": "m3", "per-fedavg": "m4", "self-fl-scatter": "m5",
    "fedavg-smoothed": "m0",
    "self-fl-augmented": "m1", "self-fl-clustered": "m6", "self-fl-learned": "m6",
    "only start": "m2", "only steps": "m3", "only weights": "m4",
}  # fmt: skip
DASHES = {"self-fl-augmented": "dot", "fedavg-smoothed": "dot"}  # the colours of Algorithm 1 and of FedAvg
LEAD = (
    "The experiments of Chen et al., Self-Aware Personalized Federated Learning (NeurIPS 2022), made again: figures, "
    "numbers, and for each of its claims whether it was reproduced, over three seeds."
)


def name_of(label: str) -> str:
    return TITLES.get(label, label)


def verdicts(found: Sequence[tuple[str, str]]) -> Table:
    return [["the paper's claim", "ours"], *([text, verdict] for text, verdict in found)]


# -- figures -----------------------------------------------------------------------------------------------------------
def errors_figure(found: list[dict[str, Any]], case: str, part: str, methods: Sequence[str]) -> Figure:
    """Figures 4, 5, 6: error against activity rate, the mean over all drawings."""
    table = pd.DataFrame([entry for study in found for entry in study["lines"]])
    table = table[table["case"] == case]
    traces = []
    for label in methods:
        mean = table[table["method"] == label].groupby("activity")[part].mean()
        traces.append(line(name_of(label), mean.index.tolist(), mean.round(5).tolist(), COLOURS[label],
                           DASHES.get(label, "solid"), hovertemplate="%{y:.4f}"))  # fmt: skip
    return plot(traces, "activity rate", f"error of the {part} parameter", f"{part} error, {case} clients", 340,
                yaxis={"rangemode": "tozero"})  # fmt: skip


def curves_figure(study: Compared, labels: Sequence[str]) -> Figure:
    """Figures 1, 2a, 7, 10: weighted accuracy of personal models against rounds, and between which values seeds lie."""
    traces: list[Figure] = []
    seen: list[float] = []  # means after the untrained model, which would hide how methods differ
    for label in labels:
        rounds, values = study.curve(label)
        band = {"type": "scatter", "mode": "lines", "x": rounds, "line": {"width": 0}, "showlegend": False,
                "hoverinfo": "skip", "legendgroup": label}  # fmt: skip
        low, high = (np.round(100 * end, 3).tolist() for end in (values.min(0), values.max(0)))
        traces += [{**band, "y": low}, {**band, "y": high, "fill": "tonexty", "fillcolor": theme(COLOURS[label], 0.15)}]
        mean = np.round(100 * values.mean(0), 3).tolist()
        seen += mean[1:] or mean
        traces.append(line(name_of(label), rounds, mean, COLOURS[label], DASHES.get(label, "solid"), legendgroup=label,
                           mode="lines", hovertemplate="%{y:.2f} %"))  # fmt: skip
    return plot(traces, "round", "weighted accuracy, %", "weighted accuracy against rounds", 400, hovermode="x unified",
                yaxis={"range": [min(seen) - 2, max(seen) + 1]})  # fmt: skip


def histogram_figure(study: Compared, labels: Sequence[str]) -> Figure:
    """Figure 3: how many users have which accuracy, all seeds together."""
    edges = np.linspace(0, 1, 21)
    traces = []
    for label in labels:
        values = np.concatenate([study.clients(label, seed)["query_accuracy"] for seed in study.seeds])
        counts, _ = np.histogram(values, edges)
        traces.append({
            "type": "bar", "name": name_of(label), "x": np.round(100 * (edges[:-1] + edges[1:]) / 2, 1).tolist(),
            "y": (counts / len(study.seeds)).round(2).tolist(), "opacity": 0.75,
            "marker": {"color": theme(COLOURS[label])}, "hovertemplate": "%{y:.1f} users",
        })  # fmt: skip
    return plot(traces, "accuracy of a user, %", "users", "users by their accuracy", 340, barmode="group")


def steps_figures(label: str, table: pd.DataFrame) -> list[tuple[str, Figure, str]]:
    """Figures 11 and 12: steps computed in round 100, and the course of the client that took part most often."""
    rounds = sorted(table["round"].unique())
    here = min(100, rounds[-1]) if 100 not in rounds else 100
    values = table[table["round"] == here]["computed"].to_numpy()
    powers = np.arange(np.floor(np.log2(values.min())), np.ceil(np.log2(values.max())) + 1)
    counts, _ = np.histogram(np.log2(values), np.append(powers - 0.5, powers[-1] + 0.5))
    bars = {"type": "bar", "x": [f"{2.0**p:.4g}" for p in powers], "y": counts.tolist(),
            "marker": {"color": theme(COLOURS[label])}, "hovertemplate": "%{y} clients", "name": "clients"}  # fmt: skip
    most = table["client"].value_counts().index[0]
    own = table[table["client"] == most].sort_values("round")
    # fmt: off
    course = [line("computed", own["round"].tolist(), own["computed"].tolist(), "m1", hovertemplate="%{y:.2g}"),
              line("taken", own["round"].tolist(), own["taken"].tolist(), "m2", "dot", hovertemplate="%{y:.2g}")]
    # fmt: on
    return [
        (
            f"{label}-steps-histogram",
            plot(
                [bars],
                "steps that Eq. 8 asks for (about)",
                "active clients",
                "steps computed",
                340,
                xaxis={"type": "category"},
            ),
            f"{name_of(label)}, round {here}: {len(values)} clients whose uncertainty is known; not yet cut to 40.",
        ),
        (
            f"{label}-steps-course",
            plot(course, "round", "steps", "steps of one client", 340, yaxis={"type": "log"}),
            f"{name_of(label)}: client {most}, which took part most often; {own['examples'].iloc[0]} examples.",
        ),
    ]  # fmt: skip


def final_table(study: Compared, measures: dict[str, Any]) -> Table:
    improving = column(study.folder)
    rows = [
        [name_of(label), *(numbers(study.over_seeds(label, m)) for m in measures.values()), improving.get(label, "–")]
        for label in study.labels
    ]
    return [["method", *(f"{name}, %" for name in measures), f"{HEAD} in the last fifth"], *rows]


# -- sections ----------------------------------------------------------------------------------------------------------
def synthetic_sections(runs: Path) -> list[Section]:
    found = read_json(runs / "self-fl-synthetic" / "synthetic.json")
    if not found:
        return []
    compared, variants = (*FIVE, "fedavg-smoothed"), ("self-fl", "self-fl-augmented", "self-fl-learned")
    sections = []
    for number, case in (("4", "homogeneous"), ("5", "heterogeneous")):
        figures = [
            (f"{case}-{part}", errors_figure(found, case, part, compared), f"{case.capitalize()}, {part} parameter.")
            for part in ("global", "local")
        ]
        sections.append(Section(f"Figure {number}: {case} clients of the Gaussian model", SUMS["active"], figures))
    figures = [
        (f"algorithms-{case}-{part}", errors_figure(found, case, part, variants), f"{case.capitalize()}, {part}.")
        for case in ("homogeneous", "heterogeneous")
        for part in ("global", "local")
    ]
    command = "python benchmarks/self_fl synthetic"
    tables = [verdicts([(claim.text, claim.verdict) for claim in claims.synthetic(found)])]
    return [*sections, Section("Figure 6: Algorithms 1 and 2", "", figures, tables, command=command)]


def comparison_section(runs: Path, entry: claims.Entry) -> list[Section]:
    """Curves, histogram, table and verdicts of one comparison folder."""
    study = Compared.found(runs / f"self-fl-{entry.name}")
    if study is None:
        return []
    drawn = [label for label in entry.drawn if label in study.labels]
    users = histogram_figure(study, ["fedavg", *(label for label in READINGS if label in study.labels)])
    curves = curves_figure(study, drawn)
    figures = [
        (f"{entry.name}-curves", curves, "Weighted accuracy on validation rows; bands are the seeds."),
        (f"{entry.name}-users", users, "Users by accuracy on their test rows; mean over seeds."),
    ]
    tables = [final_table(study, measures_of(entry)), verdicts(entry.judged(study))]
    about = f"{entry.about} {study.others}".strip()
    notes = [claims.DITTO] if entry.five else []
    return [Section(entry.title, about, figures, tables, notes, entry.command)]


def steps_section(runs: Path) -> list[Section]:
    path = runs / "self-fl-mnist-steps" / "steps.parquet"
    if not path.exists():
        return []
    command = "python benchmarks/self_fl steps benchmarks/self_fl/mnist.toml"
    tables = pd.read_parquet(path).groupby("label")
    figures = [figure for label, table in tables for figure in steps_figures(str(label), table)]
    return [Section("Local steps (Figures 11, 12)", "", figures, command=command)]


def sections(runs: Path) -> list[Section]:
    """Everything there is in this folder of runs."""
    made = synthetic_sections(runs)
    for entry in claims.COMPARISONS:
        made += comparison_section(runs, entry)
        if entry.name == "mnist-sparse":
            made += steps_section(runs)
    known = read_json(runs / "self-fl-uncertainty" / "uncertainty.json")
    return [*made, *([uncertainty.section(known)] if known else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder that holds self-fl-...")
    parser.add_argument("--out", type=Path, default=Path("runs/self-fl.html"))
    arguments = parser.parse_args()
    print(f"wrote {write_study(arguments.out, 'Self-FL, experiment by experiment', LEAD, sections(arguments.runs))}")
