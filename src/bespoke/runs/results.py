"""Writes a finished run's results: clients.parquet, selection.parquet, choices.json and, last, result.json."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.experiment.choosing import Acceptance, Chosen, ValidationScores
from bespoke.experiment.experiment import Experiment
from bespoke.records import AcceptedRecord, ChosenRecord, PrivacyRecord, RoundLine, RuledRecord, RunRecord
from bespoke.runs.evaluation import Final, json_number
from bespoke.runs.excerpts import example_sentences, keeps_texts, typical_words
from bespoke.runs.folder import RunFolder
from bespoke.storage import Columns, write_text
from bespoke.tensors import Params, Tree, count

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Results:
    """Writes the results of an experiment into its folder."""

    experiment: Experiment
    folder: RunFolder
    final: Final

    def write(self, server: Tree, params: Params, excluded: Counter[str], privacy: PrivacyRecord | None) -> RunRecord:
        """Writes all files but result.json, whose content it returns. excluded: numbers of non-finite updates."""
        self._clients(self._served(server))
        self._rows()
        self._texts()
        if self.experiment.split.kind == "cross-device" and self.final.held_out is not None:
            self._selection(self.final.held_out)
        population, picked = self.experiment.population, self.final.picked
        own = {population.ids[client]: candidate for client, candidate in picked.own.items()}
        write_text(self.folder.path / "choices.json", json.dumps({"default": picked.default, "own": own}))
        return self._result(params, excluded, privacy)

    def means(self) -> dict[str, float | None]:
        """The mean over tested clients, by metric."""
        values = {m: self.final.query.at(self.final.picked, m) for m in self.experiment.task.metrics}
        return {m: None if np.isnan(each).all() else json_number(np.nanmean(each)) for m, each in values.items()}

    @property
    def _names(self) -> tuple[str, ...]:
        return self.experiment.stages[-1].method.candidates()

    def _served(self, server: Tree) -> Ints | None:
        """The group whose model each client uses, if the method found the groups."""
        groups, given = self.experiment.stages[-1].method.groups(server), self.experiment.setting(0).groups
        known = groups is None or (given is not None and torch.equal(groups, given))
        return None if known or groups is None else groups.numpy()

    def _clients(self, served: Ints | None) -> None:
        query, own, picked = self.final.query, self.final.own, self.final.picked
        clients, names = query.clients, self._names
        table: Columns = {
            **described(self.experiment, clients),
            "candidate": [names[k] for k in picked.of(clients)],
            **({} if served is None else {"served": [found_group(row) for row in served[clients]]}),
            **self._counted(),
        }
        for metric in self.experiment.task.metrics:
            table[f"query_{metric}"] = query.at(picked, metric)
            missing = np.full(len(clients), np.nan)
            table[f"validation_{metric}"] = own.at(picked, metric) if own is not None else missing
            table[f"baseline_{metric}"] = query.at(Chosen(0, {}), metric)
        self.folder.write_table("clients.parquet", table)

    def _counted(self) -> Columns:
        """Numbers of tokens and characters on which each client's language model was tested, for pooled scores."""
        if self.experiment.population.about.get("task") != "language":
            return {}
        sums = {"query_tokens": "count", "query_characters": "bits_per_character_count"}
        found = self.final.query.sums
        return {name: found[of][:, 0].astype(np.float64) for name, of in sums.items() if of in found}

    def _rows(self) -> None:
        """Writes the metric of every query row. A row has the same number in all runs of these data."""
        final, population = self.final, self.experiment.population
        if final.rows is None or final.values is None:
            return
        sizes = self.experiment.split.test.query.sizes(final.query.clients)
        owner = np.repeat([population.ids[c] for c in final.query.clients], sizes)
        self.folder.write_table("rows.parquet", {"client": owner, "row": final.rows, "value": final.values})

    def _texts(self) -> None:
        """Writes words typical of groups, and a few test sentences, for the report on language models."""
        experiment = self.experiment
        if not keeps_texts(experiment):
            return
        found = {
            "typical.parquet": typical_words(experiment.population, experiment.split.train),
            "examples.parquet": example_sentences(experiment, self.final),
        }
        for name, table in found.items():
            if table["group"]:
                self.folder.write_table(name, table)

    def _selection(self, held_out: ValidationScores) -> None:
        """Writes the validation clients' scores under the choice. Common rules use these, never query rows."""
        selection = self.experiment.split.selection
        table: Columns = {
            "client": [self.experiment.population.ids[c] for c in held_out.clients],
            "support_examples": selection.support.sizes(held_out.clients),
            "validation_examples": selection.validation.sizes(held_out.clients),
        }
        for metric in self.experiment.task.metrics:
            table[f"validation_{metric}"] = held_out.at(self.final.picked, metric)
        self.folder.write_table("selection.parquet", table)

    def _result(self, params: Params, excluded: Counter[str], privacy: PrivacyRecord | None) -> RunRecord:
        experiment, final, names = self.experiment, self.final, self._names
        task, metric, picked = experiment.task, experiment.metric, final.picked
        rounds = self.folder.read_log("rounds.jsonl")
        lines = self.folder.read_log("ledger.jsonl")
        validation, candidates = None, {}
        if final.held_out is not None:
            validation = json_number(np.nanmean(final.held_out.at(picked, metric)))
            candidates = {name: json_number(_mean(final.held_out.under(k, metric))) for k, name in enumerate(names)}
        chosen: ChosenRecord = {"candidate": names[picked.default], "by_client": bool(picked.own)}
        if final.who is not None:
            chosen["who"] = {name: json_number(value) for name, value in final.who.items()}
        silos = experiment.split.kind == "cross-silo"
        record: RunRecord = {
            "label": experiment.label, "seed": experiment.seed, "metric": metric,
            "lower_is_better": experiment.lower_is_better, "metrics": list(task.metrics),
            "lower": [m for m in task.metrics if m in task.lower_is_better], "protocol": experiment.split.kind,
            "clients": len(final.query.clients),
            "unevaluated": len(experiment.population) - len(final.query.clients) if silos else 0,
            "rounds": sum(entry["round"] > 0 for entry in rounds),
            "bytes_down": sum(line["bytes_down"] for line in lines),
            "bytes_up": sum(line["bytes_up"] for line in lines), "steps": sum(line["steps"] for line in lines),
            "parameters": count(params), "excluded": dict(sorted(excluded.items())),
        }  # fmt: skip
        if final.rows_metric:
            record["rows_metric"] = final.rows_metric
        record["validation"] = validation
        record["query"] = json_number(np.nanmean(final.query.at(picked, metric)))
        record["chosen"] = chosen if len(names) > 1 else {}
        record["candidates"] = candidates if len(names) > 1 else {}
        if (rule := experiment.stages[-1].accept) is not None:
            record["accept"] = self._acceptance(rule)
        if privacy is not None:
            record["privacy"] = privacy
        if experiment.attack is not None:
            ids = [experiment.population.ids[client] for client in experiment.attackers]
            record["attack"] = {"kind": experiment.attack.kind, "clients": ids}
        if experiment.robust is not None:
            record["robust"] = _ruled(experiment.robust.rule, rounds)
        record["notes"] = []
        return record

    def _acceptance(self, rule: Acceptance) -> AcceptedRecord:
        """The effect of the acceptance rule: who took the personal model, and the mean if all clients had."""
        query, plain, picked = self.final.query, self.final.plain, self.final.picked
        taken = int((picked.of(query.clients) == plain.of(query.clients)).sum())
        without = json_number(np.nanmean(query.at(plain, self.experiment.metric)))
        return {
            "min_examples": rule.min_examples, "margin": rule.margin, "accepted": taken, "query_without": without,
        }  # fmt: skip


def _mean(values: NDArray[np.float64]) -> float:
    """The mean of the known values, added up in the order of the clients."""
    known = values[~np.isnan(values)]
    return float(known.cumsum()[-1] / len(known)) if len(known) else float("nan")


def _ruled(rule: str, rounds: list[RoundLine]) -> RuledRecord:
    """How often a robust rule left out or clipped each client's change."""
    ruled = [line["robust"] for line in rounds if "robust" in line]
    left_out = Counter(name for line in ruled for name in line["left_out"])
    cut = Counter(name for line in ruled for name in line["cut"])
    counts = {"left_out": dict(sorted(left_out.items())), "cut": dict(sorted(cut.items()))}
    return {"rule": rule, "rounds": len(ruled), "left_out": counts["left_out"], "cut": counts["cut"]}


def read_selection(path: Path) -> NDArray[np.float64]:
    """Each validation client's value in a tuning run."""
    import pyarrow.parquet

    values: NDArray[np.float64] = pyarrow.parquet.read_table(path / "selection.parquet")["value"].to_numpy()
    return values


def described(experiment: Experiment, clients: Ints) -> Columns:
    """Columns of clients.parquet that say who the clients are, and how many rows each has in the parts of the split."""
    split, population = experiment.split, experiment.population
    return {
        "client": [population.ids[c] for c in clients],
        "group": [population.group_of(c) for c in clients],
        "train_examples": split.train.sizes(clients) if split.kind == "cross-silo" else np.zeros_like(clients),
        "support_examples": split.test.support.sizes(clients),
        "validation_examples": split.test.validation.sizes(clients),
        "query_examples": split.test.query.sizes(clients),
    }


def found_group(row: int) -> str:
    """The name of a group that a method found; row 0 is for clients of unknown group."""
    return f"group {row}" if row else "none"
