"""Scores each candidate on the client's own rows and on other clients' rows (Motley, Figure 5).

Every candidate is scored on the client's own query rows and on a fixed sample of the query rows of other clients (and,
where there are groups, of other groups). A model that fits its client ever better usually fits the others ever worse.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bespoke.analysis.measured import Found, mean
from bespoke.analysis.reopened import Candidates, DoesNotApply, Finished
from bespoke.data.samples import Others
from bespoke.experiment.choosing import Chosen, Floats, QueryScores
from bespoke.plain import JsonObject
from bespoke.statistics.analyses import AnalysisNumbers
from bespoke.statistics.candidates import axes_of, named, settings_of
from bespoke.storage import Columns


def check_ood(run: Finished) -> None:
    if len(run.method.candidates()) < 2:
        raise DoesNotApply(
            f"--ood: {run.path} has one model for everyone ({run.method.card.name}); it needs a method that makes "
            "personal models, such as finetune"
        )


def out_of_distribution(run: Finished, found: Candidates, rows: int) -> Found:
    """(numbers, table of clients) of own rows against others' rows."""
    names = found.names
    query, population, seed = run.experiment.split.test.query, run.experiment.population, run.experiment.seed
    query = replace(query, clients=run.clients)
    parts = {"others": Others.sample(query, rows, seed)}
    groups = len(population.groups)
    if 1 < groups < len(population):
        parts["other groups"] = Others.sample(query, rows, seed, by_group=True)
    parts = {name: part for name, part in parts.items() if part.sizes(run.clients).any()}
    if not parts:
        raise DoesNotApply(f"--ood: {run.path} has no other client's query rows to be tested on")
    run.progress.begin(f"{run.name}: others' rows", len(run.clients))
    sums = run.scores(run.method, run.clients, run.experiment.split.test.support, dict(parts))
    metric = run.experiment.metric
    scores = {"own": found.query, **{name: QueryScores(run.clients, sums[name]) for name in parts}}
    values = {name: score.values(metric) for name, score in scores.items()}
    places = {"shared": Chosen(0, {}), "chosen": run.chosen()}
    record: AnalysisNumbers = {
        "rows": len(parts["others"].rows) if "others" in parts else rows,
        "start": names[0],  # what "shared" is of: the model before personalization, or the largest cluster's
        "shared": {part: mean(score.at(places["shared"], metric)) for part, score in scores.items()},
        "chosen": {part: mean(score.at(places["chosen"], metric)) for part, score in scores.items()},
        "axis": axes_of(names)[-1] if axes_of(names) else None,
        "curves": _curves(names, values),
    }  # fmt: skip
    table: Columns = {"client": [population.ids[c] for c in run.clients]}
    for part, score in scores.items():
        table |= {f"{name}_{part}": score.at(choice, metric) for name, choice in places.items()}
    return record, table


def _curves(names: tuple[str, ...], values: dict[str, Floats]) -> list[JsonObject]:
    """A curve along the setting that changes fastest, for each combination of the others; the shared model is first."""
    axes = axes_of(names)
    if not axes:
        return []
    lines: dict[str, list[int]] = {}
    for place, name in enumerate(names[1:], start=1):
        settings = settings_of(name)
        settings.pop(axes[-1], None)
        lines.setdefault(named(settings), []).append(place)
    means = {part: [mean(column) for column in np.transpose(table)] for part, table in values.items()}
    return [
        {
            "name": name,
            "at": [settings_of(names[place]).get(axes[-1], 0.0) for place in (0, *places)],
            **{part: [column[place] for place in (0, *places)] for part, column in means.items()},
        }
        for name, places in lines.items()
    ]
