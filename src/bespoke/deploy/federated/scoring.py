"""Learning curves and results where scores stay with their sites: the hub has sums over sites' clients."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from bespoke.data.splits import Split
from bespoke.deploy.federated.engine import SiteEngine
from bespoke.deploy.federated.statistics import answering, total
from bespoke.errors import UserError
from bespoke.experiment.choosing import size_edges
from bespoke.experiment.experiment import Experiment
from bespoke.method import Method
from bespoke.randomness import mix
from bespoke.records import AcceptanceRule, ChosenRecord, PrivacyRecord, RunRecord
from bespoke.runs.evaluation import HALVES, Point, json_number
from bespoke.runs.events import Progress
from bespoke.runs.folder import RunFolder
from bespoke.runs.results import described
from bespoke.storage import write_text
from bespoke.tensors import Params, Tree, count

SITES_FILE = "sites.json"  # what each site said of its clients


@dataclass(frozen=True)
class Choice:
    """The common candidate, and what it was chosen by: sums of each candidate over all sites' clients."""

    rule: dict[str, Any]  # for sites, which make their clients' own choices by it
    costs: dict[str, Any]
    who: dict[str, float] | None = None  # by who chooses: the error on the other half (choosing = "auto")

    @property
    def default(self) -> int:
        return int(self.rule["default"])


@dataclass(frozen=True)
class Final:
    """Sums over the tested clients, by site and in all."""

    choice: Choice
    query: dict[str, Any]
    validation: dict[str, Any] | None
    by_site: dict[str, dict[str, Any]]
    withheld: tuple[str, ...]  # sites with too few clients to say anything
    clients: dict[str, list[Any]] | None  # each client's scores, where all sites share them
    without: dict[str, Any] | None = None  # as `query`, if nobody had looked whether to accept its personal model


@dataclass
class SiteScoring:
    """Scores the personal models of an experiment at the sites. As runs.evaluation.Scoring, for a run."""

    experiment: Experiment
    engine: SiteEngine
    progress: Progress
    stop: Callable[[], bool]
    share_clients: bool = False
    silent: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)  # sites that have no part in a choice by size

    @property
    def method(self) -> Method:
        return self.engine.work.method

    def _score(self, server: Tree, clients: Any, name: str) -> None:
        self.engine.score(server, clients, name, int(mix("personalize", self.experiment.seed)))

    def _sums(self, request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """All sites' sums together, and each site's."""
        answers = {self.engine.there[place]: found for place, found in self.engine.statistics(request).items()}
        said = answering(list(answers.values()))
        self.silent |= {name for name, found in answers.items() if found.get("withheld")}
        return (_added(said) if said else {}), answers

    def _choose(self, of: str) -> Choice:
        """The common candidate by all sites' sums; clients' own choices are made where their scores are."""
        method, experiment = self.method, self.experiment
        by, lower, metric = str(method.choosing.by), experiment.lower_is_better, experiment.metric
        if by not in ("global", "client", "support", "last", "auto", "size"):
            raise UserError(
                f"choose = {by!r} of {method.card.name} is not known to federations; use 'global' or 'client'"
            )
        who = self._who(of) if by == "auto" else None
        if by == "auto":
            by = "client" if who and who["client"] < who["global"] else "global"
        part = "support" if by == "support" else "validation"
        if by == "support":
            lower, metric = True, "loss"
        request = {"what": "costs", "of": of, "part": part, "metric": metric, "lower": lower}
        edges = self._edges(of) if by == "size" else None
        costs, answers = self._sums(request if edges is None else {**request, "edges": edges})
        sizes: dict[str, Any] = {}
        if not costs.get("seen"):  # nobody can choose: the last candidate, which was trained longest
            default, by = len(method.candidates()) - 1, "last"
        elif by == "last":
            default = self._allowed[-1]
        else:
            default = self._best(costs)
        if by == "size" and edges is not None:
            sizes = {"edges": edges, "picks": self._by_size(answers, len(edges) + 1, default)}
        rule = experiment.stages[-1].accept
        accept = None if rule is None else asdict(rule)
        return Choice({**self._rule(by, default), **sizes, "accept": accept}, costs, who)

    @property
    def _allowed(self) -> list[int]:
        """The candidates that may be chosen."""
        return list(range(0 if self.method.choosing.keep_shared else 1, len(self.method.candidates())))

    def _rule(self, by: str, default: int) -> dict[str, Any]:
        return {
            "by": by, "default": default, "metric": self.experiment.metric, "lower": self.experiment.lower_is_better,
            "allowed": None if self.method.choosing.keep_shared else self._allowed, "accept": None,
        }  # fmt: skip

    def _best(self, costs: dict[str, Any]) -> int:
        """The candidate of the least mean cost; ties keep the earlier."""
        return self._allowed[int(np.argmin([costs["cost"][candidate] / costs["seen"] for candidate in self._allowed]))]

    def _who(self, of: str) -> dict[str, float] | None:
        """The error of one common choice and of each client's own choice, by cross-validation on two halves of the
        validation rows: as runs.evaluation.Scoring.who, of sums over all clients. None if there are no two halves."""
        lower, metric = self.experiment.lower_is_better, self.experiment.metric
        found: dict[str, list[float]] = {"global": [], "client": []}
        for on, judged in (HALVES, HALVES[::-1]):
            costs, _ = self._sums({"what": "costs", "of": of, "part": on, "metric": metric, "lower": lower})
            if not costs.get("seen"):
                return None
            for by, errors in found.items():
                rule = {**self._rule(by, self._best(costs)), "on": on}
                under, _ = self._under(Choice(rule, costs), of, judged)
                if not under:
                    return None
                errors.append(_mean(under, metric))
        return {by: float(np.mean(errors)) * (1 if lower else -1) for by, errors in found.items()}

    def _edges(self, of: str) -> list[int]:
        """Where the parts by size begin: of all clients, also of sites that are away, so that it does not change."""
        split = self.experiment.split
        clients = split.selection.validation.clients if of == "selection" else split.test.query.clients
        return [int(edge) for edge in size_edges(split.selection.support.sizes(clients))]

    def _by_size(self, answers: dict[str, dict[str, Any]], many: int, common: int) -> list[int]:
        """The best candidate of each part by size, of the sites that have enough clients in each of theirs."""
        said = [found["sizes"] for found in answers.values() if "sizes" in found]
        picks = []
        for part in range(many):
            seen = sum(found["seen"][part] for found in said)
            costs = {"seen": seen, "cost": np.sum([found["cost"][part] for found in said], axis=0)} if seen else {}
            picks.append(self._best(costs) if seen else common)
        for name in sorted(name for name, found in answers.items() if "sizes" not in found and name not in self.told):
            self.told.add(name)
            self.progress.note(f"site {name} has too few clients of some size to choose by size; the others choose")
        return picks

    def _under(self, choice: Choice, of: str, part: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        return self._sums({
            "what": "under", "of": of, "part": part, "choice": choice.rule, "metric": self.experiment.metric,
            "metrics": list(self.experiment.task.metrics),
        })  # fmt: skip

    # -- for a run ---------------------------------------------------------------------------------------------------
    def point(self, split: Split, server: Tree) -> Point:
        """A point of the learning curve: means over all validation clients of the sites that are there, in time."""
        clients = self.engine.present(split.selection.validation.clients)
        if not len(clients):
            return {}
        self._score(server, clients, "selection")
        choice = self._choose("selection")
        request = {**choice.rule, "accept": None}
        found, _ = self._under(Choice(request, choice.costs), "selection", "validation")
        if not found:
            return {}
        values: dict[str, float | None] = {}
        for metric in self.experiment.task.metrics:
            values[metric] = json_number(_mean(found, metric))
        sums = found["metrics"][self.experiment.metric]
        values[f"weighted_{self.experiment.metric}"] = (
            json_number(sums["weighted"] / sums["rows"]) if sums["rows"] else None
        )
        return {"validation": values}

    def selection(self, server: Tree) -> Any:
        raise UserError("tuning reads single clients' scores, which stay with their sites; tune in a simulation")

    def final(self, server: Tree, title: str) -> Final:
        """Sites make the personal models of all tested clients, choose among them, score them, and keep them."""
        split = self.experiment.split
        self.engine.wait_for_all()
        clients = self.engine.present(split.test.query.clients)
        if not len(clients):
            raise UserError("no client of the sites that are there has rows to be tested on")
        self.progress.begin(f"{title}: personal models", 1)
        held_out = "test"
        if split.kind == "cross-device":
            held_out = "selection"
            others = self.engine.present(split.selection.validation.clients)
            choice = None
            if len(others):
                self._score(server, others, "selection")
                choice = self._choose("selection")
                by = "size" if choice.rule["by"] == "size" else "global"  # only tested clients choose for themselves
                shared = replace(choice, rule={**choice.rule, "by": by})
                validation, _ = self._under(shared, "selection", "validation")
            self._score(server, clients, "test")
            if choice is not None and self.method.choosing.by == "auto":  # who chooses: by the tested clients' own rows
                choice = replace(choice, rule={**choice.rule, "by": self._choose("test").rule["by"]})
            choice = choice or self._choose("test")
            if not len(others):
                validation = {}
        else:
            self._score(server, clients, "test")
            choice = self._choose("test")
            validation, _ = self._under(choice, held_out, "validation")
        self.silent.clear()
        query, by_site = self._under(choice, "test", "query")
        if not query:
            raise UserError(
                "no site has enough tested clients to send statistics of them (least, of each site's settings)"
            )
        without = None
        if choice.rule["accept"] is not None:
            without, _ = self._under(Choice({**choice.rule, "accept": None}, choice.costs), "test", "query")
        named = self._clients(choice) if self.share_clients else None
        self.engine.keep({"of": "test", "choice": choice.rule})
        self.progress.advance(1)
        return Final(choice, query, validation or None, by_site, tuple(sorted(self.silent)), named, without)

    def _clients(self, choice: Choice) -> dict[str, list[Any]]:
        request = {
            "what": "clients",
            "of": "test",
            "choice": choice.rule,
            "metrics": list(self.experiment.task.metrics),
        }
        table: dict[str, list[Any]] = {}
        for place, found in self.engine.statistics(request).items():
            numbers = self.engine.numbers(place, found.pop("clients"))
            for name, values in {"clients": numbers.tolist(), **found}.items():
                table.setdefault(name, []).extend(values)
        order = np.argsort(table["clients"], kind="stable")
        return {name: [values[place] for place in order] for name, values in table.items()}


def _added(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of several sites' answers; histograms are put together where all have the same bins."""
    plain = [
        {name: value for name, value in found.items() if name not in ("gain", "sizes")}
        for found in said
        if found.get("seen") != 0
    ]
    if not plain:
        return {"seen": 0}
    found: dict[str, Any] = total(plain)
    return found


def _mean(found: dict[str, Any], metric: str) -> float:
    """The mean over clients; NaN if one that was tested has no finite loss, for then training diverged."""
    sums = found["metrics"][metric]
    if found["diverged"] or sums["infinite"] or not sums["known"]:
        return math.nan
    return float(sums["sum"] / sums["known"])


def plain_mean(found: dict[str, Any], metric: str, of: str = "") -> float:
    """The mean over clients that have a value."""
    sums = found["metrics"][metric][of] if of else found["metrics"][metric]
    return float(sums["sum"] / sums["known"]) if sums["known"] and not sums["infinite"] else math.nan


@dataclass(frozen=True)
class SiteResults:
    """Writes the results of a federation: sites.json, choices.json and, where all sites share them, clients.parquet."""

    experiment: Experiment
    folder: RunFolder
    final: Final

    def means(self) -> dict[str, float | None]:
        return {m: json_number(plain_mean(self.final.query, m)) for m in self.experiment.task.metrics}

    def write(self, server: Tree, params: Params, excluded: Counter[str], privacy: PrivacyRecord | None) -> RunRecord:
        """All of it but result.json; returns what that is to say."""
        experiment, final, folder = self.experiment, self.final, self.folder
        names = experiment.stages[-1].method.candidates()
        write_text(folder.path / SITES_FILE, json.dumps(_numbers({
            "sites": final.by_site, "metric": experiment.metric, "lower_is_better": experiment.lower_is_better,
            "withheld": list(final.withheld),
        }), indent=1))  # fmt: skip
        write_text(folder.path / "choices.json", json.dumps({"default": final.choice.default, "own": {}}))
        if final.clients is not None:
            self._clients(final.clients, names)
        rounds, lines = folder.read_log("rounds.jsonl"), folder.read_log("ledger.jsonl")
        own = final.choice.rule["by"] in ("client", "support", "size") or final.without is not None
        chosen: ChosenRecord = {"candidate": names[final.choice.default], "by_client": own}
        if final.choice.who is not None:
            chosen["who"] = {name: json_number(value) for name, value in final.choice.who.items()}
        costs = final.choice.costs
        seen = [json_number(s / k) if k else None for s, k in zip(costs.get("sum", []), costs.get("known", []))]
        metric, silos = experiment.metric, experiment.split.kind == "cross-silo"
        record: RunRecord = {
            "label": experiment.label, "seed": experiment.seed, "metric": metric,
            "lower_is_better": experiment.lower_is_better, "metrics": list(experiment.task.metrics),
            "lower": [m for m in experiment.task.metrics if m in experiment.task.lower_is_better],
            "protocol": experiment.split.kind, "clients": final.query["clients"],
            "unevaluated": len(experiment.population) - final.query["clients"] if silos else 0,
            "rounds": sum(entry["round"] > 0 for entry in rounds),
            "bytes_down": sum(line["bytes_down"] for line in lines),
            "bytes_up": sum(line["bytes_up"] for line in lines), "steps": sum(line["steps"] for line in lines),
            "parameters": count(params), "excluded": dict(sorted(excluded.items())),
        }  # fmt: skip
        record["validation"] = json_number(plain_mean(final.validation, metric)) if final.validation else None
        record["query"] = json_number(plain_mean(final.query, metric))
        record["chosen"] = chosen if len(names) > 1 else {}
        record["candidates"] = dict(zip(names, seen)) if len(names) > 1 else {}
        if final.without is not None:
            rule: AcceptanceRule = final.choice.rule["accept"]
            mean = json_number(plain_mean(final.without, metric))
            record["accept"] = {**rule, "accepted": final.query["accepted"], "query_without": mean}
        if privacy is not None:
            record["privacy"] = privacy
        record["notes"] = [f"site {name} has too few tested clients to say anything of them" for name in final.withheld]
        return record

    def _clients(self, table: dict[str, list[Any]], names: tuple[str, ...]) -> None:
        clients = np.array(table["clients"], np.int64)
        found: dict[str, Any] = {
            **described(self.experiment, clients),
            "candidate": [names[k] for k in table["candidate"]],
        }
        for metric in self.experiment.task.metrics:
            for what in ("query", "validation", "baseline"):
                found[f"{what}_{metric}"] = np.array(table[f"{what}_{metric}"], np.float64)
        self.folder.write_table("clients.parquet", found)


def _numbers(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {name: _numbers(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
