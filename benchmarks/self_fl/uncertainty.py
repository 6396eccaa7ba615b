"""The uncertainty of a client's parameter at each level of sharing: alone, with its group, with all clients.

    python benchmarks/self_fl uncertainty --out runs/self-fl-uncertainty

The three-level posterior of bayes.py on real clients in groups: the mean A-level score of 2,410 schools
in local authorities (Chem97). Variances of pupils, schools and authorities are estimated from the sums of squares.
The remaining uncertainty of a school then depends only on the numbers of pupils.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source
from bespoke.report.figure_page import Section, plot, write_study
from bespoke.report.figures import example_ticks, theme
from bespoke.storage import write_text
from self_fl import bayes

LEVELS = {"local": "alone", "group": "with its group", "all": "with everybody"}
SHOWN = 600  # schools drawn


def components(population: Population) -> dict[str, float]:
    """Variance of a row within its client, of clients within their group, and of groups: by sums of squares."""
    assert population.group is not None
    y = population.columns["y"].double().numpy()
    sizes = population.sizes().astype(float)
    client = np.repeat(np.arange(len(sizes)), population.sizes())
    means = np.bincount(client, y) / sizes
    within = float(((y - means[client]) ** 2).sum() / (len(y) - len(sizes)))
    group = population.group
    counts = np.bincount(group, sizes)
    centre = np.bincount(group, sizes * means) / counts
    groups, clients, rows = len(counts), len(sizes), len(y)
    # expected sums of squares of an unbalanced two-way nested layout, solved from the lowest level up
    squares = np.bincount(group, sizes**2) / counts
    between_clients = float((sizes * (means - centre[group]) ** 2).sum())
    clients_variance = (between_clients - within * (clients - groups)) / (rows - squares.sum())
    overall = float((counts * (centre - y.mean()) ** 2).sum())
    shift = within * (groups - 1) + clients_variance * (squares.sum() - (sizes**2).sum() / rows)
    groups_variance = (overall - shift) / (rows - (counts**2).sum() / rows)
    return {
        "rows": within, "clients": max(clients_variance, 0.0), "groups": max(groups_variance, 1e-9),
    }  # fmt: skip


def posteriors(population: Population, found: dict[str, float]) -> bayes.Groups:
    """What each client knows at each level of sharing."""
    assert population.group is not None
    sizes = population.sizes()
    client = np.repeat(np.arange(len(sizes)), sizes)
    means = np.bincount(client, population.columns["y"].double().numpy()) / sizes
    return bayes.three_levels(means, found["rows"] / sizes, population.group, found["groups"], found["clients"])


def study(population: Population) -> dict[str, Any]:
    """Numbers of the figure: standard deviations by client and level."""
    found = components(population)
    known = posteriors(population, found)
    deviations = {level: np.sqrt(getattr(known, level).variance).tolist() for level in LEVELS}
    return {
        "title": population.about["title"],
        "components": found,
        "examples": population.sizes().tolist(),
        **deviations,
    }


def medians(study: dict[str, Any]) -> dict[str, list[float]]:
    """The client in the middle, of all and of those with fewest examples: its deviation at each level."""
    examples = np.array(study["examples"])
    which = {"all clients": examples > 0, "the smallest quarter": examples <= np.quantile(examples, 0.25)}
    return {
        name: [float(np.median(np.array(study[level])[chosen])) for level in LEVELS] for name, chosen in which.items()
    }


def about(study: dict[str, Any]) -> str:
    parts = study["components"]
    return (
        f"{study['title']}. Variance of rows {parts['rows']:.3g}, of clients in a group {parts['clients']:.3g}, of "
        f"groups {parts['groups']:.3g}: all in closed form (benchmarks/self_fl/bayes.py)."
    )


def section(study: dict[str, Any]) -> Section:
    """The figure: each client's uncertainty against its examples, and what is left of it in the median."""
    examples = np.array(study["examples"])
    shown = np.unique(np.argsort(examples)[np.linspace(0, len(examples) - 1, SHOWN).astype(int)])
    order = shown[np.argsort(examples[shown])]
    colours = {"local": "m0", "group": "m2", "all": "m1"}
    traces = [
        {
            "type": "scatter", "mode": "markers", "name": text, "x": examples[order].tolist(),
            "y": np.round(np.array(study[level])[order], 5).tolist(),
            "marker": {"color": theme(colours[level]), "size": 5, "opacity": 0.6},
            "hovertemplate": "%{x} examples: ± %{y:.3f}",
        }
        for level, text in LEVELS.items()
    ]  # fmt: skip
    ticks = example_ticks(int(examples.min()), int(examples.max()))
    cloud = plot(traces, "examples of the client", "standard deviation of what it knows of its parameter",
                 "uncertainty of every client against its examples, by level of sharing", 420, xaxis=ticks)  # fmt: skip
    bars = [
        {
            "type": "bar", "name": name, "x": list(LEVELS.values()), "marker": {"color": theme(colour)},
            "y": np.round(values, 5).tolist(), "hovertemplate": "± %{y:.3f}",
        }
        for (name, values), colour in zip(medians(study).items(), ("m1", "m5"))
    ]  # fmt: skip
    middle = plot(bars, "sharing", "median standard deviation", "median uncertainty by level of sharing", 420,
                  yaxis={"rangemode": "tozero"}, barmode="group")  # fmt: skip
    return Section(
        "Uncertainty against the level of sharing", about(study),
        [("uncertainty", cloud, "A dot is a client at one level of sharing."),
         ("medians", middle, "What is left for the client in the middle.")],
        command="python benchmarks/self_fl uncertainty",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="chem97", help="a source whose clients have groups, with numbers as target")
    parser.add_argument("--out", type=Path, default=Path("runs/self-fl-uncertainty"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = study(load_source(arguments.data))
    write_text(arguments.out / "uncertainty.json", json.dumps(found))
    page = write_study(arguments.out / "uncertainty.html", "Who gains from sharing, and how far", "", [section(found)])
    print(f"wrote {page}")
