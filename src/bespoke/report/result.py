"""The value that a comparison returns: its answer, every client's numbers, and the report's figures as objects."""

from __future__ import annotations

import shutil
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bespoke.errors import UserError, unknown
from bespoke.report.all_figures import AllFigures
from bespoke.report.figures import focus_of
from bespoke.report.page import environment
from bespoke.report.plotly_figure import plotly_figure
from bespoke.report.report import Report
from bespoke.report.summary import BEFORE, MethodSummary, Summary
from bespoke.report.terminal import plain_table, render
from bespoke.terminal import Terminal

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

SIZES = ("train_examples", "support_examples", "validation_examples", "query_examples")


class Result:
    """A finished comparison. What its `summary` says is here, too: `result.best`, `result.method("finetune")`.

    Where clients are not to be named, as under [privacy], `clients` and figures do not name them.
    """

    def __init__(self, report: Report) -> None:
        self.report = report

    @classmethod
    def read(cls, *folders: str | Path, name_clients: bool = False) -> Result:
        """Of a comparison folder, or of any run folders; `name_clients`: also those of runs under [privacy]."""
        return cls(Report.read([Path(folder) for folder in folders], name_clients))

    @property
    def summary(self) -> Summary:
        return self.report.summary

    @property
    def answer(self) -> list[str]:
        """The answer in words, its first sentence the shortest."""
        return self.summary.answer

    @property
    def methods(self) -> list[MethodSummary]:
        """The numbers of each method."""
        return self.summary.methods

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied or unpickled there is no report yet
            raise AttributeError(name)
        return getattr(self.summary, name)

    @cached_property
    def clients(self) -> pd.DataFrame:
        """A row for each client, method and seed.

        `personal` is the value of the tested model in the metric of the comparison, `baseline` that of the same client
        with the same seed under the baseline, and `change` their difference. Sizes are numbers of rows: `train` to
        train on, `support` to adapt on, `validation` to choose on, `query` to be tested on.
        """
        import pandas as pd

        summary, table = self.summary, self.report.table
        table = table[table["seed"].isin(summary.seeds)].reset_index(drop=True)
        personal = table[f"query_{summary.metric}"].astype(float)
        if summary.baseline == BEFORE:
            baseline = table[f"baseline_{summary.metric}"].astype(float)
        else:
            shared = table["method"] == summary.baseline
            values = personal[shared].set_axis(pd.MultiIndex.from_frame(table.loc[shared, ["client", "seed"]]))
            baseline = values.reindex(pd.MultiIndex.from_frame(table[["client", "seed"]])).reset_index(drop=True)
        found = pd.DataFrame({
            "client": table["client"],
            **({"group": table["group"]} if table["group"].any() else {}),
            "method": table["method"], "seed": table["seed"],
            **{name.removesuffix("_examples"): table[name] for name in SIZES},
            "baseline": baseline, "personal": personal, "change": personal - baseline,
        })  # fmt: skip
        if summary.names_clients:
            return found
        numbers = _numbered(found["client"], personal)
        place = found["method"].map({label: place for place, label in enumerate(self.report.study.labels)})
        order = pd.DataFrame({"method": place, "seed": found["seed"], "client": numbers})
        found["client"] = [f"client {number}" for number in numbers]
        return found.loc[order.sort_values(["method", "seed", "client"]).index].reset_index(drop=True)

    @cached_property
    def _all(self) -> AllFigures:
        return AllFigures.of(self.report.study, self.report.table, self.summary)

    @property
    def figures(self) -> list[str]:
        """The names of the figures that this comparison has."""
        return list(self._all.figures)

    def figure(self, name: str, method: str | None = None) -> go.Figure:
        """A figure of the report. `method`: whose changes are shown in "change"; default: the best method's."""
        if name not in self._all.figures:
            raise unknown("figure", name, self.figures, "result.figure")
        compared = [each.label for each in self.summary.compared]
        if method is not None and method not in compared:
            raise unknown("method", method, compared, f"result.figure({name!r}, method=)")
        if method is not None and name != "change":
            raise UserError(f"result.figure({name!r}, method={method!r}): this figure shows all methods")
        return plotly_figure(self._all.figures[name], self._all.drawn, method or focus_of(self.summary).label)

    def __repr__(self) -> str:
        out = StringIO()
        width = min(shutil.get_terminal_size((100, 24)).columns, 120)
        # text alone, also where Rich would show it by itself (a notebook) or in colours
        plain = Terminal(file=out, width=width, force_jupyter=False, force_terminal=False, color_system=None)
        plain.print(render(self.summary, width))
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def _repr_html_(self) -> str:
        """The answer and the table, as a notebook shows them."""
        heads, rows = plain_table(self.summary)
        return environment().get_template("result.html.jinja").render(
            heads=heads, rows=rows, answer=self.answer,
            concerns=[concern.text for concern in self.summary.concerns],
        )  # fmt: skip


def _numbered(names: pd.Series[Any], values: pd.Series[Any]) -> pd.Series[Any]:
    """Numbers in place of names, by the values: in the order of names they would tell who is who."""
    means = values.groupby(names).mean().sort_values(kind="stable")
    return names.map(dict(zip(means.index, range(1, len(means) + 1))))
