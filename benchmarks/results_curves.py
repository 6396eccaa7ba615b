"""The validation curves of a comparison as a table for docs/results.md: their values after each fifth."""

from bespoke.report.summary import Summary
from bespoke.statistics.clients import over_seeds
from bespoke.statistics.converged import epoch_curve, round_curve
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import metric_name, number

FIFTHS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
LEAST = 3  # points of a curve that says something

Curve = dict[float, float]


def curves(study: RunSet, summary: Summary) -> list[str]:
    """A line for each method by rounds, and one by epochs if it tries several; the mean over seeds."""
    lines: list[str] = []
    drawn: list[list[Curve]] = []
    for method in summary.methods:
        runs = [run for run in study.runs if run.label == method.label]
        by_round, by_epoch = [round_curve(run, summary.metric) for run in runs], [epoch_curve(run) for run in runs]
        for unit, found in (("rounds", by_round), ("epochs", by_epoch)):
            if min(map(len, found)) < LEAST or found in drawn:  # tuned models have the shared model's curve by rounds
                continue
            drawn.append(found)
            cells = [number(over_seeds(_until(curve, part) for curve in found).value) for part in FIFTHS]
            lines.append(f"| {method.title} | {max(found[0]):g} {unit} | {' | '.join(cells)} |")
    if not lines:
        return []
    name = metric_name(summary.metric)
    return [
        "",
        f"Validation curves: the mean {name} per client on validation rows, after these fractions of the last stage's "
        "training; the mean over seeds. Epochs are those at the chosen rate.",
        "",
        f"| method | trained for | {' | '.join(f'{100 * part:.0f} %' for part in FIFTHS)} |",
        f"| --- | ---: |{' ---: |' * len(FIFTHS)}",
        *lines,
    ]


def _until(curve: Curve, part: float) -> float:
    """The last value up to this fraction of the curve."""
    first, last = min(curve), max(curve)
    return curve[max(at for at in curve if at <= first + part * (last - first) + 1e-9)]
