"""Opens a finished run, with its checkpoint, private state and rows, so that personal models can be made again.

Nothing is trained that the run has trained. What is made again are personal models, by the same keys and therefore the
same ones; their scores for every candidate are kept in `analysis/candidates.safetensors`, for a run keeps only those of
the candidates chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import Ints, Support
from bespoke.digests import read_json
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.choosing import (
    Chosen,
    Floats,
    QueryScores,
    SupportScores,
    ValidationScores,
    accepted,
    choose,
    choose_by_size,
)
from bespoke.experiment.experiment import Experiment, restore_empty
from bespoke.federation.engine import Choice as EngineChoice
from bespoke.federation.engine import Engine
from bespoke.federation.examine import Scores
from bespoke.federation.private_state import PrivateTable
from bespoke.federation.work import ClientWork
from bespoke.method import Method, Setting
from bespoke.randomness import mix
from bespoke.runs.evaluation import ONE_BY_ONE, SCORES, Scored, examined
from bespoke.runs.events import Interrupted, Progress, Silent
from bespoke.runs.finished import open_run, read_choices
from bespoke.runs.folder import RunFolder
from bespoke.runs.forgotten import without_forgotten
from bespoke.statistics.analyses import ANALYSIS_FORMAT
from bespoke.storage import open_arrays, write_arrays
from bespoke.tensors import Params, Tree

ROOM = 2**26  # bytes of rows scored at a time, where clients are vectorized
STEP = 512  # clients examined between two looks at Ctrl-C, where they are vectorized
OFF = 0.01  # the mean made anew may differ from the recorded one by this part of it; more is another experiment


class DoesNotApply(UserError):
    """The run lacks something that the analysis needs."""


@dataclass(frozen=True)
class Candidates:
    """The scores of every candidate personal model of the tested clients."""

    names: tuple[str, ...]
    query: QueryScores
    own: ValidationScores | None  # of the same clients: what each chooses on for itself
    held_out: ValidationScores | None  # of the clients on which common choices are made
    support: SupportScores | None = None  # for methods whose clients choose by the rows they adapt on


@dataclass
class Finished:
    """A run whose personal models can be made again; see `reopened`."""

    path: Path
    folder: RunFolder
    experiment: Experiment
    engine: Engine
    server: Tree
    start: Params  # what the last stage began with
    setting: Setting
    clients: Ints  # tested, and not forgotten since
    segments: list[Path]
    others: Ints  # on whom common choices are made, where they are not the tested clients
    progress: Progress = field(default_factory=Silent)
    stop: Callable[[], bool] = lambda: False
    using: Method | None = None

    @property
    def method(self) -> Method:
        return self.experiment.stages[-1].method

    @property
    def name(self) -> str:
        return f"{self.experiment.label}, seed {self.experiment.seed}"

    @property
    def stateful(self) -> bool:
        """Whether private state from training enters the personal models."""
        return bool(self.method.init_private(self.start))

    # -- scores --------------------------------------------------------------------------------------------------------
    def scores(self, method: Method, clients: Ints, support: Support, parts: dict[str, Scored]) -> Scores:
        """Sums of scores of every candidate of this method on these rows."""
        self._open(method)
        step = STEP if self.engine.choice.vectorized else ONE_BY_ONE
        return examined(self.engine, self.server, clients, support, parts, self.experiment.seed, step, self.done)

    def personal(self, client: int) -> tuple[Any, Params, Params]:
        """The shared and the chosen model of a client, made again, with the task whose parameters they are."""
        self._open(self.method)
        support, key = self.experiment.split.test.support, int(mix("personalize", self.experiment.seed))
        picked = int(self.chosen().of(np.array([client]))[0])
        shared, own = (self.engine.personal(self.server, client, support, place, key) for place in (0, picked))
        return self.method.task, shared, own

    def _open(self, method: Method) -> None:
        """Opens a method's work in the engine, if it is not open yet."""
        if self.using == method:
            return
        work = ClientWork(method, self.experiment.split.train, self.experiment.transforms, self.setting)
        self.engine.open(work, self.start)
        if method == self.method:
            self.engine.load_private(self.segments)
        self.using = method

    def done(self, clients: int) -> None:
        """Advances the progress bar by some clients, and stops on Ctrl-C."""
        self.progress.advance(clients)
        if self.stop():
            raise Interrupted(f"stopped while analyzing {self.path}")

    def examined(self, method: Method, support: Support | None = None, what: str = "personal models") -> Candidates:
        """All candidates of a method: tested clients on query, validation and (if they choose on them) support rows.

        With other rows to adapt on, validation rows are scored only where clients choose by them for themselves.
        """
        split = self.experiment.split
        adapted = support or split.test.support
        parts: dict[str, Scored] = {"query": split.test.query}
        if support is None or method.choosing.by == "client" or self.experiment.stages[-1].accept is not None:
            parts["validation"] = split.test.validation
        if method.choosing.by == "support":
            parts["support"] = adapted
        apart = split.kind == "cross-device" and support is None
        others = self.others if apart else np.zeros(0, np.int64)
        self.progress.begin(f"{self.name}: {what}", len(self.clients) + len(others))
        found = self.scores(method, self.clients, adapted, parts)
        if len(others):
            selection = split.selection
            kept = self.scores(method, others, selection.support, {"validation": selection.validation})
            found["held out"] = kept.get("validation", {})
        return _candidates(method, self.clients, others, found)

    def candidates(self) -> Candidates:
        """The run's own candidates, from `analysis/candidates.safetensors` or made again and stored there."""
        path = self.path / "analysis" / "candidates.safetensors"
        others = self.others
        metrics = list(self.experiment.task.metrics)
        kind = {"format": ANALYSIS_FORMAT, "names": list(self.method.candidates()), "metrics": metrics}
        if path.exists():
            flat, metadata = open_arrays(path)
            if json.loads(metadata.get("bespoke", "{}")) == kind:
                kept = flat.pop("clients").numpy()
                if np.array_equal(kept, self.clients):
                    sums: Scores = {}
                    for name, leaf in flat.items():
                        part, metric = name.split(".")
                        sums.setdefault(part, {})[metric] = leaf.numpy()
                    return _candidates(self.method, self.clients, others, sums)
        found = self.examined(self.method)
        self._check(found)
        arrays = {"clients": torch.from_numpy(self.clients)}
        for part, scores in (
            ("query", found.query), ("validation", found.own), ("support", found.support),
            ("held out", found.held_out if len(others) else None),
        ):  # fmt: skip
            for metric, table in (scores.sums if scores else {}).items():
                arrays[f"{part}.{metric}"] = torch.from_numpy(table)
        path.parent.mkdir(exist_ok=True)
        write_arrays(path, arrays, {"bespoke": json.dumps(kind)})
        return found

    def _check(self, found: Candidates) -> None:
        """Checks that repeated results equal the recorded ones; otherwise the data or the code have changed."""
        recorded = float(np.nanmean(self.table()[f"query_{self.experiment.metric}"].to_numpy(float)))
        again = float(np.nanmean(found.query.at(self.chosen(), self.experiment.metric)))
        if abs(again - recorded) > OFF * abs(recorded) + 1e-9 and math.isfinite(recorded):
            raise UserError(
                f"{self.path}: the personal models made again have a mean {self.experiment.metric} of {again:.5g}, the "
                f"run has recorded {recorded:.5g}: the data have changed since, or bespoke has; run it again"
            )

    def table(self) -> Any:
        """clients.parquet, in the order of `clients`."""
        import pandas as pd

        table = pd.read_parquet(self.path / "clients.parquet")
        return table.set_index("client").reindex([self.experiment.population.ids[c] for c in self.clients])

    def kept(self, name: str) -> tuple[Ints, Any]:
        """The clients that have trained, and this part of their private state; only a simulation may read it."""
        table = PrivateTable(self.method.init_private(self.start))
        for path in self.segments:
            table.load(path)
        clients = np.array(sorted(table.slots), dtype=np.int64)
        return clients, table.read(clients)[name]

    # -- choices -------------------------------------------------------------------------------------------------------
    def chosen(self) -> Chosen:
        """The candidates that the run chose."""
        choices, index = read_choices(self.path), {self.experiment.population.ids[c]: int(c) for c in self.clients}
        return Chosen(choices["default"], {index[name]: k for name, k in choices["own"].items() if name in index})

    def allowed(self, method: Method) -> list[int]:
        """The candidates that the method's own rule may choose."""
        return list(range(0 if method.choosing.keep_shared else 1, len(method.candidates())))

    def choice(self, found: Candidates, by: Any, allowed: list[int]) -> Chosen:
        """Chooses among these candidates by the rule `by`, on validation rows or (by loss) on support rows."""
        metric, lower = self.experiment.metric, self.experiment.lower_is_better
        if by == "support":
            assert found.support is not None
            return choose(found.support, "loss", True, by, allowed)
        if found.held_out is None:
            return Chosen(allowed[-1], {})
        if by == "size":
            split = self.experiment.split
            judged = split.selection.support.sizes(found.held_out.clients)
            by_size = choose_by_size(found.held_out, judged, metric, lower, allowed)
            return by_size.choice((self.clients, split.test.support.sizes(self.clients)))
        common = choose(found.held_out, metric, lower, by, allowed)
        own = choose(found.own, metric, lower, by, allowed).own if found.own is not None else {}
        return Chosen(common.default, own)

    def accepted(self, picked: Chosen, found: Candidates, support: Support) -> Chosen:
        """The choice after the run's acceptance rule, if it has one."""
        rule = self.experiment.stages[-1].accept
        if rule is None:
            return picked
        metric, lower = self.experiment.metric, self.experiment.lower_is_better
        return accepted(picked, rule, found.own, support.sizes(self.clients), self.clients, metric, lower)

    def shared(self, found: Candidates | None = None) -> Floats:
        """What the clients would have without personalization: the value that makes "hurt".

        The first candidate, by its scores or, without them, as the run has recorded it; or, where that is nobody's
        model (local training, clusters), the run of fedavg of the same seed in the same comparison.
        """
        metric = self.experiment.metric
        sibling = self.path.parent / f"fedavg-seed{self.experiment.seed}"
        compared = (self.path.parent.parent / "compare.json").exists()
        if not self.method.card.after and compared and sibling != self.path and (sibling / "result.json").exists():
            import pandas as pd

            table = pd.read_parquet(sibling / "clients.parquet").set_index("client")
            if f"query_{metric}" in table:
                ids = [self.experiment.population.ids[c] for c in self.clients]
                values: Floats = table[f"query_{metric}"].reindex(ids).to_numpy(float)
                return values
        if found is None:
            recorded: Floats = self.table()[f"baseline_{metric}"].to_numpy(float)
            return recorded
        return found.query.at(Chosen(0, {}), metric)


def _candidates(method: Method, clients: Ints, others: Ints, sums: Scores) -> Candidates:
    def typed(part: str, kind: str, scored: Ints) -> Any:
        return SCORES.get(kind, ValidationScores)(scored, sums[part]) if sums.get(part) else None

    own = typed("validation", "validation", clients)
    held_out = typed("held out", "validation", others) if len(others) else own
    support = typed("support", "support", clients)
    return Candidates(method.candidates(), typed("query", "query", clients), own, held_out, support)


@contextmanager
def reopened(
    path: Path, raw: Population | None = None, progress: Progress | None = None, stop: Callable[[], bool] | None = None
) -> Iterator[Finished]:
    """Opens a finished run; `raw` is its population, if the caller has loaded it already."""
    folder, config = open_run(path)
    experiment = build(config, raw, folder=path)
    found = folder.final()
    if found is None:
        raise UserError(f"{path} holds no checkpoint: its personal models cannot be made again")
    method, begun = experiment.stages[-1].method, folder.beginning(found.stage).server
    start, setting = begun["params"], experiment.setting(found.stage, begun)
    server = method.init_server(start, setting)
    if found.round >= 0:
        server = restore_empty(server, found.server)
    remaining = np.flatnonzero(without_forgotten(experiment.population, path).sizes())
    clients = np.intersect1d(experiment.split.test.query.clients, remaining)
    segments = [path / "private" / name for name in found.segments]
    apart = experiment.split.kind == "cross-device"
    others = np.intersect1d(experiment.split.selection.validation.clients, remaining) if apart else remaining[:0]
    with folder.locked(), Engine(experiment.population, _engine(path, experiment)) as engine:
        opened = Finished(path, folder, experiment, engine, server, start, setting, clients, segments, others)
        opened.progress, opened.stop = progress or opened.progress, stop or opened.stop
        yield opened


def _engine(path: Path, experiment: Experiment, rows: int = 500) -> EngineChoice:
    """The engine of the run, on the CPU, with smaller chunks where many rows per client are scored."""
    try:
        choice = replace(EngineChoice(**read_json(path / "engine.json", "run the experiment again")), device="cpu")
    except (OSError, TypeError) as error:
        raise UserError(f"{path / 'engine.json'} is missing or damaged ({error}); run the experiment again") from None
    width = experiment.population.columns["x"][0].numel() * 4
    return replace(choice, chunk=max(min(choice.chunk, ROOM // (rows * width)), 1)) if choice.vectorized else choice
