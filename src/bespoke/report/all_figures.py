"""All figures of a report by name, with the text that the page shows around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bespoke.report.analyses import analysis_parts
from bespoke.report.curves import clusters_figure, curve_figure
from bespoke.report.figures import (
    Drawn,
    Figure,
    Style,
    change_figure,
    clients_figure,
    draw,
    groups_figure,
    sorted_figure,
    styles_of,
)
from bespoke.report.groups import group_parts
from bespoke.report.mixed import mixed_parts
from bespoke.report.summary import BEFORE, Summary, with_before
from bespoke.statistics import clients as over
from bespoke.statistics.folders import RunSet

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class AllFigures:
    """The figures that these runs have, and the columns that they refer to."""

    drawn: Drawn
    styles: dict[str, Style]
    figures: dict[str, Figure]
    motley: Any  # what the page tells around those of Motley, of groups, and of coefficients
    grouped: dict[str, Any]
    differing: list[dict[str, Any]]

    @classmethod
    def of(cls, study: RunSet, table: pd.DataFrame, summary: Summary) -> AllFigures:
        styles, metric = styles_of(summary), summary.metric
        tested = with_before(table, metric) if summary.baseline == BEFORE else table
        drawn = draw(over.cells(tested, f"query_{metric}", lower_is_better=summary.lower_is_better), summary)
        figures = {
            "clients": clients_figure(drawn, summary, styles),
            "change": change_figure(drawn, summary, styles),
            "sorted": sorted_figure(drawn, summary, styles),
            "groups": groups_figure(summary, styles),
            "rounds": curve_figure(study, summary, styles, against="round"),
            "traffic": curve_figure(study, summary, styles, against="traffic"),
            "clusters": clusters_figure(study, summary, styles),
        }
        more, motley = analysis_parts(study, table, summary, styles)
        gained, grouped = group_parts(study, table, summary)
        spread, differing = mixed_parts(study, summary)
        found = {name: figure for name, figure in {**figures, **more, **gained, **spread}.items() if figure}
        return cls(drawn, styles, found, motley, grouped, differing)
