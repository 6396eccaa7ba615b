"""A site's own half of a federation: a host of its rows that keeps private state, scores and personal models here.

What a hub may ask is in rules.py. Experiments arrive as plain values and are built on this site's rows; where its files
lie, nobody else knows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke import __version__
from bespoke.data.population import Population
from bespoke.data.splits import Half, Split, Support, Train, Validation
from bespoke.data.standardize import moments
from bespoke.deploy.federated import statistics
from bespoke.deploy.federated.kept import Points, keep_models
from bespoke.deploy.federated.rules import Budget, Rules, plain_config
from bespoke.deploy.federated.statistics import Tables
from bespoke.digests import digest, file_digest, read_json, sealed
from bespoke.errors import RemoteLost, UserError
from bespoke.experiment.build import build
from bespoke.experiment.choosing import QueryScores, SupportScores, ValidationScores
from bespoke.experiment.experiment import Experiment, engine_choice
from bespoke.experiment.opening import work_of
from bespoke.experiment.prepare import Prepared, prepare
from bespoke.federation.batches import columns_of
from bespoke.federation.execution import Choice
from bespoke.federation.host import Host
from bespoke.federation.opening import Opening
from bespoke.federation.partial import Partial
from bespoke.federation.wire import VERSION
from bespoke.federation.work import ClientWork, Mode
from bespoke.imported import imported, is_outside, trust
from bespoke.messages.transform import State
from bespoke.runs.evaluation import HALVES
from bespoke.storage import write_text
from bespoke.tensors import Params, Tree

Ints = NDArray[np.int64]
HERE = "rows of this site"  # what stands in the place of a path
# What a server has to know of encoded rows to make the model; these are to be the same at all sites.
ALIKE = (
    "task", "input", "features", "numeric", "classes", "target", "standardize", "model", "metric", "inputs", "factor",
    "side", "height", "width", "channels", "frames", "bands", "vocabulary", "words", "unscored", "characters",
    "contexts", "context", "dimension", "unit", "centre", "shapes", "code",
)  # fmt: skip


def shapes(population: Population) -> dict[str, Any]:
    """The form of a row: of each column its type and its shape, for a hub on which a model of one's own is tried."""
    columns = {name: population.columns[name] for name in columns_of(population)}
    return {name: [str(rows.dtype).removeprefix("torch."), list(rows.shape[1:])] for name, rows in columns.items()}


def source_of(model: str) -> str:
    """A digest of the file that a model is described in: sites and hub have to have the same."""
    imported(model, "[model]")
    return file_digest(Path(str(sys.modules[model.partition(":")[0]].__file__)))


@dataclass(frozen=True)
class Built:
    """An experiment on this site's rows."""

    experiment: Experiment
    prepared: Prepared
    name: str  # a digest of its settings


class SiteHost(Host):
    """A host that keeps what is its clients' own: files of private state, scores, personal models."""

    def __init__(
        self, rows: Population, state: Path, rules: Rules, mode: Mode | None = None, papers: Any = None
    ) -> None:
        """`papers`: with which this site vouches for its clients under secure sums (identities.py)."""
        super().__init__(rows, mode or Mode(vectorized=False))
        self.rows, self.state, self.rules, self.papers = rows, state, rules, papers
        self.chosen_mode = mode is not None
        state.mkdir(parents=True, exist_ok=True)
        self.budget = Budget(state / "budget.json", rules)
        self.built: dict[str, Built] = {}
        self.now: Built | None = None  # of the last experiment that was described or opened
        self.points: Points | None = None
        self.tables: dict[str, Tables] = {}
        self.last_scored: dict[str, dict[str, Any]] = {}

    # -- experiments -------------------------------------------------------------------------------------------------
    def make(self, config: dict[str, Any], learned: dict[str, Any] | None) -> Built:
        """The experiment that a hub describes, on the rows of this site."""
        self.rules.check_config(config)
        split = config.get("split") or {}
        if split.get("order") == "time" and "time" not in self.rows.columns:
            raise UserError(
                "split.order = 'time': the rows of this site have no time column; for tables the hub names it in "
                "[columns] of hub.toml: time = ..."
            )
        key = json.dumps([config, learned], sort_keys=True)
        if key not in self.built:
            trust(*self.rules.models)
            data = config.get("data") or {}
            how = data.get("standardize") if isinstance(data, dict) else None
            mine = {name: value for name, value in config.items() if name not in ("data", "engine", "secure")}
            mine["data"] = {"population": HERE, **({"standardize": how} if how else {})}
            made = plain_config(mine, "the hub's experiment")
            prepared = prepare(made, self._informed(learned))
            secure = config.get("secure")
            whole = plain_config({**mine, "secure": secure}, "the hub's experiment") if secure else made
            experiment = replace(build(made, prepared=prepared), secure=whole.secure)
            name = digest(key.encode())
            self.built = {key: Built(experiment, prepared, name)}  # the last one alone: rows may be many
        self.now = self.built[key]
        return self.now

    def _informed(self, learned: dict[str, Any] | None) -> Population:
        """The rows with the means and deviations that all sites have in common."""
        if not learned:
            return self.rows
        about = self.rows.about
        columns = {name: {"kind": "number"} for name in about.get("features", [])}
        schema = about.get("schema") or {"columns": columns, "target": {"name": about.get("target", "y")}}
        schema = {**schema, "statistics": {**schema.get("statistics", {}), **learned}}
        return replace(self.rows, about={**about, "schema": schema})

    def describe(self, config: dict[str, Any], learned: dict[str, Any] | None) -> dict[str, Any]:
        """What this site brings to an experiment: nothing of it is made of single rows."""
        built = self.make(config, learned)
        about: Any = built.experiment.population.about
        if learned is None:  # encoded as all sites encode; means and deviations are yet to be agreed on
            about = {name: value for name, value in about.items() if name not in ("unit", "centre")}
        model = built.experiment.config["model"]["name"]
        if is_outside(model):
            about = {**about, "shapes": shapes(built.experiment.population), "code": source_of(model)}
        alike = {name: about[name] for name in ALIKE if name in about}
        schema: Any = self.rows.about.get("schema") or {}
        known = {name: list(pair) for name, pair in schema.get("statistics", {}).items()}
        plain = {name: value for name, value in schema.items() if name != "statistics"}
        return {
            "version": __version__, "wire": VERSION, "about": alike, "statistics": known,
            "schema": digest(json.dumps(plain, sort_keys=True).encode()), "columns": sorted(plain.get("columns", {})),
            "least": self.rules.least, "share_clients": self.rules.share_clients, "clients": len(self.rows),
        }  # fmt: skip

    def moments(self, train: Train, centres: dict[str, float]) -> Tree:
        """Sums of the training rows by this site's own split: held-out clients have no part in them."""
        if self.now is None:
            raise RemoteLost("no experiment is known here any more")
        rows = replace(self.now.experiment.split.train, population=self.now.prepared.plain)
        if len(rows.clients) < self.rules.least:
            raise UserError(
                f"{len(rows.clients)} clients train here; this site sends sums of {self.rules.least} or more"
            )
        if self.rules.epsilon is not None:
            raise UserError(
                "this site has a privacy budget of its own and sends no sums of its rows without noise: declare means "
                "and deviations (statistics of the schema), or set data.standardize = 'none'"
            )
        return moments(self.now.prepared.plain, rows, centres)

    def work_of(self, opening: Opening) -> ClientWork:
        """A stage's work on these rows, if the rules allow it."""
        built = self.make(opening.config, opening.learned)
        work = work_of(opening, built.experiment)
        self.rules.check_work(work)
        if not self.chosen_mode:
            self.mode = self._choice(opening.config, built.experiment).mode()
        return work

    def _choice(self, config: dict[str, Any], experiment: Experiment) -> Choice:
        """How clients are executed here. Kept: after a restart a run is executed as it began, or bits would differ."""
        path, key = self.state / "engine.json", digest(json.dumps(config, sort_keys=True).encode())
        known = read_json(path, "remove it") if path.exists() else {}
        if key not in known:
            known[key] = engine_choice(replace(experiment, engine={"workers": 0})).to_json()
            write_text(path, json.dumps(sealed(known)))
        return Choice(**known[key])

    def open(self, work: ClientWork, params: Params) -> None:
        self.population = work.train.population  # encoded and standardized for this experiment
        self.tables, self.last_scored, self.members = {}, {}, None
        super().open(work, params)

    def _members(self) -> Any:
        from bespoke.deploy.federated.members import SiteMembers  # needs cryptography, an extra

        if self.members is None and self.work.secure is not None:
            if self.papers is None:
                raise UserError("secure sums need the certificate of this site, and it was started without one")
            self.members = SiteMembers(self.work.secure, self.state / "secure", self.papers)
        return self.members

    # -- rounds ------------------------------------------------------------------------------------------------------
    def train(
        self, shared: Tree, own: Tree | None, clients: Ints, key: int, next_clients: Ints | None = None,
        rows: Ints | None = None, number: int = 0, transform_state: State | None = None,
    ) -> Partial:  # fmt: skip
        self.rules.check_cohort(self.work, clients, rows)
        if len(clients):
            self.budget.spend(self.work)
        if self.work.masks:
            self._members().begin(key)
        return super().train(shared, own, clients, key, None, rows, number, transform_state)

    # -- scores, which stay ------------------------------------------------------------------------------------------
    def score(
        self, shared: Tree, own: Tree | None, clients: Ints, name: str, key: int, rows: Ints | None = None
    ) -> None:
        """Make and score the personal models of all clients of a part of the split; the scores stay here."""
        self.rules.check_evaluation()
        split = self._split
        parts, support, wanted = self._parts(split, name)
        if not np.array_equal(np.sort(clients), wanted):
            raise UserError(f"{name}: scores are made of all {len(wanted)} clients of this site, never of some of them")
        found = self.examine(shared, own, wanted, support, parts, key, rows)
        kinds: dict[str, Any] = {"support": SupportScores, "query": QueryScores}
        scores = {part: kinds.get(part, ValidationScores)(wanted, sums) for part, sums in found.items()}
        self.tables[name] = Tables(
            wanted, scores, {part: rows.sizes(wanted) for part, rows in parts.items()}, support.sizes(wanted)
        )
        self.last_scored[name] = {"shared": shared, "own": own, "key": key, "rows": rows, "support": support}

    @property
    def _split(self) -> Split:
        if self.now is None:
            raise RemoteLost("no experiment is open here any more")
        return self.now.experiment.split

    def _parts(self, split: Split, name: str) -> tuple[dict[str, Any], Support, Ints]:
        """(rows to score, rows to adapt on, whose) of "selection" or "test"."""
        if name == "selection":
            rows: dict[str, Any] = {"validation": split.selection.validation}
            support, clients = split.selection.support, split.selection.validation.clients
        elif name == "test":
            rows = {"validation": split.test.validation, "query": split.test.query}
            support, clients = split.test.support, split.test.query.clients
        else:
            raise UserError(f"scores of {name!r} are not known; there are 'selection' and 'test'")
        if self.work.method.choosing.by == "support":
            rows["support"] = support
        validation = rows["validation"]
        assert isinstance(validation, Validation)
        if self.work.method.choosing.by == "auto":
            rows |= {half: Half.of_rows(validation, odd) for half, odd in zip(HALVES, (False, True))}
        return {part: some for part, some in rows.items() if some.sizes(clients).sum()}, support, np.sort(clients)

    def statistics(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sums over this site's clients of scores that were made before."""
        self.rules.check_evaluation()
        tables = self._tables_of(request)
        if request.get("what") == "clients" and not self.rules.share_clients:
            raise UserError("scores of single clients do not leave this site (share_clients = false)")
        self._check_choice(request)
        return statistics.answer(tables, request, self.rules.least)

    def _check_choice(self, request: dict[str, Any]) -> None:
        """Refuses what would tell single clients apart, by the difference of two answers: another rule of acceptance
        than the experiment's, and a second division of the same clients by size."""
        assert self.now is not None
        choice, rule = request.get("choice") or {}, self.now.experiment.stages[-1].accept
        if choice.get("accept") not in (None, rule and asdict(rule)):
            raise UserError(f"accept = {choice['accept']} is not that of the experiment, which is {rule}")
        edges = request.get("edges", choice.get("edges"))
        if edges is None:
            return
        path, key = self.state / "divisions.json", f"{self.now.name} {request.get('of')}"
        known = read_json(path, "put it back: scores are summed by one division alone") if path.exists() else {}
        if known.get(key, edges) != edges:
            raise UserError(
                f"scores of {request.get('of')!r} were summed by sizes from {known[key]} on, and now from {edges}; "
                "this site sums them by one division alone: two sums that differ in a client would show that client"
            )
        if key not in known:
            write_text(path, json.dumps(sealed({**known, key: edges})))

    def _tables_of(self, request: dict[str, Any]) -> Tables:
        name = request.get("of")
        if name not in self.tables:
            raise RemoteLost(f"no scores of {name!r} are here any more")
        return self.tables[name]

    def keep(self, request: dict[str, Any]) -> dict[str, Any]:
        """Make the personal models that were chosen, and keep them here for `bespoke deploy predict`."""
        tables, asked = self._tables_of(request), self.last_scored[request["of"]]
        assert self.now is not None
        self._check_choice(request)
        picked = statistics.chosen(tables, request["choice"], self.rules.least)
        folder = self.state / "models"
        made = keep_models(self, self.now.experiment, self.now.prepared, asked, tables.clients, picked, folder)
        return {"models": made}

    # -- private state on disk ---------------------------------------------------------------------------------------
    def _points(self, run: str = "") -> Points:
        if self.points is None or (run and self.points.run != run):
            if not re.fullmatch(r"[0-9a-zA-Z_-]{1,80}", run):
                raise RemoteLost("which run private state belongs to is not known here any more")
            self.points = Points(self.state / "runs" / run, run)
        return self.points

    def save_private(self, folder: Any, name: str, only_dirty: bool = True, run: str = "") -> list[str]:
        points, point = self._points(run), _point(name)
        names = super().save_private(points.folder, point, only_dirty, run)
        points.add(point, names)
        return []

    def kept_layers(self, point: str = "") -> list[str]:
        names = super().kept_layers()
        if names and self.points is not None:
            self.points.add(_point(f"{point}-0"), names)
        return []

    def load_private(self, folder: Any, names: Sequence[str], share: Any = None, point: str = "") -> None:
        """Take back the newest state among `names`, the hub's points from first to last; `point` is the run's name."""
        points = self._points(point)
        files = points.back_to(names)
        super().load_private(points.folder, files)


def _point(name: str) -> str:
    """A point's name, of "stage-round@leg-place"; it becomes a file's."""
    point = name.rpartition("-")[0]
    if not re.fullmatch(r"\d{3}-(\d{7}|begin)@[0-9a-f]{8,32}", point):
        raise UserError(f"{point!r} is no name of a checkpoint")
    return point
