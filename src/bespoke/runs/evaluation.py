"""Makes and scores personal models: for learning curves during training, and for the results after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from bespoke.data.splits import Half, Query, Split, Support, Validation
from bespoke.errors import UserError
from bespoke.experiment.choosing import (
    Chosen,
    QueryScores,
    SupportScores,
    ValidationScores,
    accepted,
    choose,
    choose_by_size,
)
from bespoke.experiment.experiment import Experiment
from bespoke.federation.engine import Engine
from bespoke.federation.examine import ROWS, Scores
from bespoke.method import Method
from bespoke.randomness import generator, mix
from bespoke.runs.events import Interrupted, Progress
from bespoke.tensors import Tree

Ints = NDArray[np.int64]
AnyScores = ValidationScores | SupportScores | QueryScores
Scored = Support | Validation | Query
ONE_BY_ONE = 16  # clients per call if they are run one by one
SCORES: dict[str, type[AnyScores]] = {"support": SupportScores, "query": QueryScores}  # all others: ValidationScores
HALVES = ("first half", "second half")  # of the validation rows
MOST_VALUES = 2**25  # limit of (query rows x candidates) for keeping values by row


class Point(TypedDict, total=False):
    """A point of the learning curve."""

    validation: dict[str, float | None]  # by metric
    watched: dict[str, float | None]  # by client, where rows change


@dataclass(frozen=True)
class Final:
    """The final scores and choices of the tested clients."""

    query: QueryScores
    own: ValidationScores | None  # of the same clients
    held_out: ValidationScores | None  # shared choices were made on these: of other clients, if some were held out
    plain: Chosen  # the choices before the acceptance rule
    picked: Chosen
    who: dict[str, float] | None = None  # by who chooses: the error on the other half (choosing = "auto")
    rows: Ints | None = None  # the query rows, and below the value of `rows_metric` for each
    values: NDArray[np.float64] | None = None
    rows_metric: str = ""


@dataclass
class Scoring:
    """Scores the personal models of an experiment that is in an engine."""

    experiment: Experiment
    engine: Engine
    progress: Progress
    stop: Callable[[], bool]

    @property
    def method(self) -> Method:
        return self.engine.work.method

    def examine(
        self, split: Split, server: Tree, clients: Ints, parts: dict[str, Scored], tell: bool = False, by_row: str = ""
    ) -> dict[str, AnyScores]:
        """Scores every candidate of these clients; `tell` advances the progress bar.

        by_row: the metric whose value for each query row is kept too.
        """
        support = split.selection.support if "query" not in parts else split.test.support
        if self.method.choosing.by == "support":
            parts = {**parts, "support": support}
        rows = parts.get("validation")
        if self.method.choosing.by == "auto" and isinstance(rows, Validation):
            parts = {**parts, **{name: Half.of_rows(rows, odd) for name, odd in zip(HALVES, (False, True))}}
        step = max(len(clients), 1) if self.engine.choice.vectorized else ONE_BY_ONE
        seed = self.experiment.seed
        raw = examined(self.engine, server, clients, support, parts, seed, step, self._done if tell else None, by_row)
        return {part: SCORES.get(part, ValidationScores)(clients, sums) for part, sums in raw.items()}

    def _done(self, clients: int) -> None:
        self.progress.advance(clients)
        if self.stop():
            raise Interrupted("stopped while making personal models")

    def pick(self, scores: dict[str, AnyScores]) -> Chosen:
        """The candidate that each of these clients uses, by the method's choosing rule."""
        method = self.method
        who: Any = method.choosing.by
        if who == "auto":
            tried = self.who(scores)
            who = "client" if tried and tried["client"] < tried["global"] else "global"
        lower, metric = self.experiment.lower_is_better, self.experiment.metric
        allowed = None if method.choosing.keep_shared else list(range(1, len(method.candidates())))
        found: Any = scores.get("support" if who == "support" else "validation")
        if found is None:  # no rows to choose on: the last candidate, which trained longest
            return Chosen(len(method.candidates()) - 1, {})
        if who == "size":
            judged, tested = (part.support for part in (self.experiment.split.selection, self.experiment.split.test))
            by_size = choose_by_size(found, judged.sizes(found.clients), metric, lower, allowed)
            return by_size.choice(*((rows.clients, rows.sizes()) for rows in (judged, tested)))
        if who == "support":
            lower, metric = True, "loss"
        return choose(found, metric, lower, who, allowed)

    def who(self, scores: dict[str, AnyScores]) -> dict[str, float] | None:
        """The error of one common choice and of each client's own choice, by cross-validation on two halves.

        Choices are made on one half of the validation rows and judged on the other. Lower is better. None if there are
        no two halves.
        """
        halves = [scores.get(name) for name in HALVES]
        lower, metric = self.experiment.lower_is_better, self.experiment.metric
        allowed = None if self.method.choosing.keep_shared else list(range(1, len(self.method.candidates())))
        found: dict[str, list[float]] = {"global": [], "client": []}
        for chosen, judged in (halves, halves[::-1]):
            if not (isinstance(chosen, ValidationScores) and isinstance(judged, ValidationScores)):
                return None
            for who in found:
                choice = choose(chosen, metric, lower, who, allowed)  # type: ignore[arg-type]
                found[who].append(mean_or_diverged(judged, choice, metric))
        return {who: float(np.mean(values)) * (1 if lower else -1) for who, values in found.items()}

    # -- during training -----------------------------------------------------------------------------------------------
    @cached_property
    def watched(self) -> Ints:
        """The clients of the learning curve. They are the same in all periods in which they have rows."""
        there = [period.split.selection.validation.clients for period in self.experiment.periods]
        clients = np.unique(np.concatenate(there))
        if len(clients) <= self.experiment.watched:
            return clients
        random = generator("watched", self.experiment.seed)
        return np.sort(random.choice(clients, self.experiment.watched, replace=False))

    def point(self, split: Split, server: Tree) -> Point:
        """A point of the learning curve: means over some validation clients, and the score weighted by their rows.

        If rows change during the run, the point also has each client's score, to see whom a change affects.
        """
        rows = split.selection.validation
        clients = np.intersect1d(self.watched, rows.clients, assume_unique=True)
        if not len(clients):
            return {}
        scores = self.examine(split, server, clients, {"validation": rows})
        validation, picked = scores["validation"], self.pick(scores)
        assert isinstance(validation, ValidationScores)
        means = {m: mean_or_diverged(validation, picked, m) for m in self.experiment.task.metrics}
        metric, sizes = self.experiment.metric, rows.sizes(clients)
        values = validation.at(picked, metric)
        means[f"weighted_{metric}"] = float(np.nansum(values * sizes) / sizes[~np.isnan(values)].sum())
        point: Point = {"validation": {m: json_number(value) for m, value in means.items()}}
        if self.experiment.earlier:
            ids = self.experiment.population.ids
            point["watched"] = {ids[client]: json_number(value) for client, value in zip(clients, values)}
        return point

    # -- at the end ----------------------------------------------------------------------------------------------------
    def selection(self, server: Tree) -> tuple[float | None, str, Ints, NDArray[np.float64]]:
        """For tuning: the mean over all validation clients, the common choice, the clients and each one's value.

        It never reads query rows.
        """
        split = self.experiment.split
        clients = split.selection.validation.clients
        if not len(clients):
            return None, "", clients, np.zeros(0)
        scores = self.examine(split, server, clients, {"validation": split.selection.validation})
        picked = self.pick(scores)
        metric, validation = self.experiment.metric, scores["validation"]
        value, each = mean_or_diverged(validation, picked, metric), validation.at(picked, metric)
        return json_number(value), self.method.candidates()[picked.default], clients, each

    def final(self, server: Tree, title: str) -> Final:
        """Makes the personal models of all tested clients, chooses among them, and scores the choices."""
        split = self.experiment.split
        clients, others = split.test.query.clients, np.zeros(0, np.int64)
        if not len(clients):
            raise UserError("no client has rows to be tested on: every client has too few examples for this split")
        if split.kind == "cross-device":
            others = split.selection.validation.clients
        self.progress.begin(f"{title}: personal models", len(clients) + len(others))
        parts: dict[str, Scored] = {"validation": split.test.validation, "query": split.test.query}
        by_row = self._row_metric(clients)
        scores = held_out = self.examine(split, server, clients, parts, tell=True, by_row=by_row)
        plain = self.pick(scores)
        if split.kind == "cross-device":  # shared choices are made on the validation clients
            held_out = self.examine(split, server, others, {"validation": split.selection.validation}, tell=True)
            chosen = self.pick(held_out)
            plain = chosen if self.method.choosing.by == "size" else Chosen(chosen.default, plain.own)
        query, own, common = scores["query"], scores.get("validation"), held_out.get("validation")
        assert isinstance(query, QueryScores)
        assert own is None or isinstance(own, ValidationScores)
        assert common is None or isinstance(common, ValidationScores)
        rule, metric, lower = self.experiment.stages[-1].accept, self.experiment.metric, self.experiment.lower_is_better
        picked = plain
        if rule is not None:
            picked = accepted(plain, rule, own, split.test.support.sizes(clients), clients, metric, lower)
        who = self.who(held_out) if self.method.choosing.by == "auto" else None
        rows = split.test.query.of(clients)[0] if by_row else None
        values = self._values(query, picked, clients) if by_row else None
        return Final(query, own, common, plain, picked, who, rows, values, by_row)

    def _row_metric(self, clients: Ints) -> str:
        """The metric whose value is stored for every query row, from which a client's own noise is estimated."""
        task, about = self.experiment.task, self.experiment.population.about
        known = about.get("input", "table") == "table" or about.get("task") == "language"
        many = int(self.experiment.split.test.query.sizes(clients).sum()) * len(self.method.candidates())
        return (task.row_metric(self.experiment.metric) or "") if known and many <= MOST_VALUES else ""

    def _values(self, query: QueryScores, picked: Chosen, clients: Ints) -> NDArray[np.float64]:
        """The metric of each query row under its client's candidate, such that the mean is the client's value."""
        sizes, chosen = self.experiment.split.test.query.sizes(clients), picked.of(clients)
        values = query.sums[ROWS][np.arange(sizes.sum()), np.repeat(chosen, sizes)].astype(np.float64)
        counted = query.sum_at(picked, "count")  # rows, or the tokens of all of them
        weighted: NDArray[np.float64] = values * np.repeat(sizes / counted, sizes)
        return weighted


def examined(
    engine: Engine, server: Tree, clients: Ints, support: Support, parts: dict[str, Scored], seed: int, step: int,
    done: Callable[[int], None] | None = None, by_row: str = "",
) -> Scores:  # fmt: skip
    """Scores every candidate of these clients, `step` clients at a time; `done` is called after each step.

    The steps let the progress bar move and Ctrl-C take effect with heavy models.
    """
    key = int(mix("personalize", seed))
    pieces = []
    for begin in range(0, max(len(clients), 1), step):
        some = clients[begin : begin + step]
        pieces.append((len(some), engine.examine(server, some, support, parts, key, by_row)))
        if done is not None:
            done(len(some))
    return pieces[0][1] if len(pieces) == 1 else _joined(pieces)


def _joined(pieces: list[tuple[int, Scores]]) -> Scores:
    """Scores of consecutive clients as one table; NaN where a piece has no rows in a part."""
    joined: Scores = {}
    for part in dict.fromkeys(name for _, scores in pieces for name in scores):
        example = next(scores[part] for _, scores in pieces if part in scores)
        for metric, table in example.items():
            width = max(scores[part][metric].shape[1] for _, scores in pieces if part in scores)
            blocks = [
                np.broadcast_to(found := scores[part][metric], (len(found), width))
                if part in scores
                else np.full((0 if metric == ROWS else clients, width), np.nan, table.dtype)
                for clients, scores in pieces
            ]
            joined.setdefault(part, {})[metric] = np.concatenate(blocks)
    return joined


def mean_or_diverged(scores: AnyScores, choice: Chosen, metric: str) -> float:
    """The mean over clients; NaN if a tested client has no finite loss, because training diverged then.

    A client's metric may be undefined (an AUC of one class), but its loss is always defined.
    """
    tested = scores.at(choice, "count") > 0
    values, losses = scores.at(choice, metric)[tested], scores.at(choice, "loss")[tested]
    if not np.isfinite(losses).all() or np.isinf(values).any() or not np.isfinite(values).any():
        return float("nan")
    return float(np.nanmean(values))


def json_number(value: Any) -> float | None:
    """The number, or None for NaN and infinity, which JSON does not have."""
    return float(value) if np.isfinite(value) else None
