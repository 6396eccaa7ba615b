"""Removes a client from every file of a run, a comparison or a tuning, and proves that it is gone.

The order of steps allows to repeat the command after a crash at any moment:

1. It writes a plan (`forgetting.safetensors`): the client, the bytes to search for, the analyses and pages to remake.
2. It marks the client as forgotten, so that no later command brings it back.
3. It changes the files one by one, each atomically, and makes analyses, summary and report again.
4. It searches everything, writes the receipt, and removes the plan.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow import ArrowException

from bespoke.data.population import Population
from bespoke.deploy import scrub
from bespoke.deploy.export import client_folder
from bespoke.deploy.proof import Found, search, telling
from bespoke.errors import UserError
from bespoke.experiment.build import Bench
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.loading import load_population
from bespoke.experiment.reading import read_recorded
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.runs.folder import RunFolder, read_checkpoint
from bespoke.runs.forgotten import is_forgotten, mark, marked
from bespoke.runs.shared_stages import reseal
from bespoke.storage import open_arrays, write_arrays
from bespoke.study.job import Job
from bespoke.tensors import flatten

INTENTION = "forgetting.safetensors"
REMAINS = (
    "the shared model, which may have learned from this client, and what the server computed with it",
    "means over all clients that were taken while it was one of them: learning curves, scores of trials and candidates",
    "copies, exports and reports outside of this folder, and the data themselves",
)


def forget_client(folder: Path, client: str) -> dict[str, Any]:
    """Removes a client from a run, comparison or tuning folder and proves it. Returns a receipt."""
    runs = sorted(path.parent for path in folder.rglob("config.toml"))
    if not runs:
        raise UserError(f"{folder} is not a run folder, a comparison or a tuning: there is no config.toml in it")
    return Forgetting(folder, {run: read_recorded(run) for run in runs}, client).run()


@dataclass
class Forgetting:
    """Forgets one client in one folder."""

    folder: Path
    configs: dict[Path, ExperimentConfig]  # by run folder
    name: str

    def run(self) -> dict[str, Any]:
        intention = self.folder / INTENTION
        with ExitStack() as locks:
            for path in dict.fromkeys([self.folder, *self.configs]):
                locks.enter_context(RunFolder(path).locked())
            about, traces = self._intended()
            for path in (self.folder, *self.configs):
                mark(path, self.name)
            changed = [str(path.relative_to(self.folder)) for path in self._scrubbed()]
            for run in self.configs:
                RunFolder(run).reseal()
            for stage in sorted(self.folder.rglob("stages/*/whole")):
                reseal(stage.parent, stage.parent.name)
            about["changed"] = list(dict.fromkeys([*about["changed"], *changed]))
            self._write_intention(about, traces)
        not_made = self._made_anew(about)
        found = search(self.folder, self.name, traces, {intention})
        if found.bytes:
            raise RuntimeError(f"bytes of {self.name!r} remain in {', '.join(found.bytes)}")
        receipt = self._receipt(about, traces, found, not_made)
        kept = {name: value for name, value in receipt.items() if name not in ("client", "summary")}
        kept["deleted"] = [re.sub(r"(^|/)personal/.*", r"\1personal", path) for path in receipt["deleted"]]  # no id
        mark(self.folder, self.name, kept)
        scrub.overwrite(intention)
        return receipt

    @cached_property
    def population(self) -> Population:
        return load_population(next(iter(self.configs.values())))

    @cached_property
    def bench(self) -> Bench:
        return Bench(self.population)

    # -- before --------------------------------------------------------------------------------------------------------
    def _intended(self) -> tuple[dict[str, Any], list[bytes]]:
        """The planned changes, written to disk before the first one. After an interruption, the plan from disk."""
        begun = _read_intention(self.folder / INTENTION)
        if begun and begun[0]["client"] != self.name:
            other = begun[0]["client"]
            raise UserError(
                f"forgetting {other!r} in {self.folder} was interrupted; finish that first: bespoke forget "
                f"{self.folder} --client {other!r}"
            )
        if not begun and marked(self.folder, self.name):
            raise UserError(f"client {self.name!r} is already forgotten in {self.folder}")
        if not begun:
            for run in self.configs:
                RunFolder(run).result()  # refuses damaged runs, and those of another version
        self.client = scrub.ForgottenClient(self.name, self.population.index(self.name))
        about, before = begun or ({"client": self.name, "changed": [], **self._derived()}, [])
        traces = list(dict.fromkeys([*before, *self._traces()]))
        self._write_intention(about, traces)
        return about, traces

    def _traces(self) -> list[bytes]:
        """The client's own bytes: private state, the server's values for it, its exported models.

        Bytes that other clients have too (an initial state, a frozen layer, the shared model) are not traces.
        """
        own, others = [], []
        for path in self._segments():
            own_rows, rest = scrub.segment_rows(path, self.client.place)
            own.append(own_rows)
            others.append(rest)
        for _, path, method in self._checkpoints():
            found = read_checkpoint(path)
            flat = flatten(found.server)
            kept = scrub.server_rows(method if found.round >= 0 else None, found.server)
            own += [flat[name][self.client.place].contiguous().numpy().tobytes() for name in kept]
            without = scrub.never_seen(flat, kept, self.client.place)
            others += [leaf.contiguous().numpy().tobytes() for leaf in without.values()]
        for run in self.configs:
            mine_at = client_folder(run, self.name)
            for path in (run / "personal").glob("*/model.safetensors"):
                arrays, _ = open_arrays(path)
                leaves = [leaf.contiguous().numpy().tobytes() for leaf in arrays.values()]
                (own if path.parent == mine_at else others).extend(leaves)
        own = [trace for trace in dict.fromkeys(own) if telling(trace)]
        return [trace for trace in own if not any(trace in other for other in others)]

    def _derived(self) -> dict[str, Any]:
        """Files derived from results, which are made again: analyses by run, and folders with pages."""
        analyses: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(self.folder.rglob("analysis/*.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                asked = {name: record[name] for name in ("analysis", "asked")}
            except (ValueError, KeyError, TypeError):  # it cannot be made again
                continue
            analyses.setdefault(str(path.parent.parent.relative_to(self.folder)), []).append(asked)
        pages = [path.parent.relative_to(self.folder) for path in sorted(self.folder.rglob("report.html"))]
        numbers = [path.parent.relative_to(self.folder) for path in sorted(self.folder.rglob("summary.json"))]
        return {"analyses": analyses, "reports": [*map(str, pages)], "summaries": [*map(str, numbers)]}

    def _write_intention(self, about: dict[str, Any], traces: list[bytes]) -> None:
        arrays = {f"{n:06d}": torch.from_numpy(np.frombuffer(t, np.uint8).copy()) for n, t in enumerate(traces)}
        write_arrays(self.folder / INTENTION, arrays, {"bespoke": json.dumps(about)})

    # -- the files -----------------------------------------------------------------------------------------------------
    def _scrubbed(self) -> Iterator[Path]:
        """Removes the client from every file; yields the changed files."""
        for path, change in self._files():
            try:
                changed = change()
            except (ValueError, KeyError, TypeError, ArrowException) as error:
                raise UserError(
                    f"{path} is damaged ({error!r}): the client cannot be taken out of it. Put it back or remove it, "
                    "then give the same command again"
                ) from None
            if changed:
                yield path

    def _files(self) -> Iterator[tuple[Path, Callable[[], bool]]]:
        """Every file that may mention the client, and the function that removes the client from it."""
        name, folder = self.name, self.folder
        for path in self._segments():
            yield path, partial(scrub.scrub_segment, path, self.client.place)
        for run in self.configs:
            yield client_folder(run, name), partial(scrub.scrub_exported, run, name)
        for log in scrub.LOGS:
            for path in sorted(folder.rglob(log)):
                yield path, partial(scrub.scrub_log, path, name)
        for owner, path, method in self._checkpoints():
            yield path, partial(scrub.scrub_checkpoint, owner, path, self.client, method)
        for path in scrub.tables(folder):
            yield path, partial(scrub.scrub_table, path, name)
        for path in sorted(folder.rglob("choices.json")):
            yield path, partial(scrub.scrub_json, path, name)
        for path in sorted(folder.rglob("compare.json")):
            yield path, partial(scrub.scrub_json, path, name, partial(_without_examples, client=name))
        for run in self.configs:
            yield run / "result.json", partial(scrub.scrub_json, run / "result.json", name, partial(_recounted, run))
        for pattern in ("analysis/*", "report.html", "summary.json", "typical.parquet"):
            for path in sorted(folder.rglob(pattern)):
                yield path, partial(scrub.overwrite, path)

    def _segments(self) -> list[Path]:
        return sorted(self.folder.rglob("private/*.safetensors"))

    def _checkpoints(self) -> Iterator[tuple[RunFolder, Path, Method | None]]:
        """Every checkpoint, of runs and of shared stages, with the method whose state it holds."""
        stages: dict[str, Method] = {}
        for run, config in self.configs.items():
            known = any(METHODS[stage["method"]].unicast is not Method.unicast for stage in config.stage)
            methods = [stage.method for stage in self.bench.build(config).stages] if known else []
            stages |= dict(zip(Job(run, config).stages, methods))
            for path in sorted((run / "checkpoints").glob("*.safetensors")):
                yield RunFolder(run), path, methods[int(path.name[:3])] if methods else None
        for path in sorted(self.folder.rglob("stages/*/checkpoints/*.safetensors")):
            shared = path.parent.parent
            yield RunFolder(shared, shared.name), path, stages.get(shared.name)

    # -- after ---------------------------------------------------------------------------------------------------------
    def _made_anew(self, about: dict[str, Any]) -> list[str]:
        """Makes analyses, summaries and reports again, without the client; returns what could not be made, and why."""
        from bespoke.analysis.analyze import Analyses, wanted_again
        from bespoke.report.page import write_report
        from bespoke.report.report import summarize
        from bespoke.storage import write_text

        def numbers(path: Path) -> None:
            write_text(path / "summary.json", summarize([path]).to_json())

        work: list[tuple[str, Callable[[], object]]] = []
        for run, records in about["analyses"].items():
            again = Analyses((self.folder / run,), wanted_again(records), lenient=True)
            work.append((f"{run}/analysis", again.run))
        work += [(f"{place}/summary.json", partial(numbers, self.folder / place)) for place in about["summaries"]]
        for place in about["reports"]:
            page = self.folder / place / "report.html"
            work.append((f"{place}/report.html", partial(write_report, [page.parent], page)))
        not_made = []
        for what, make in work:
            try:
                make()
            except (UserError, ValueError) as error:  # no client remains, or the data are gone
                not_made.append(f"{what.removeprefix('./')}: {error}")
        return not_made

    def _receipt(self, about: dict[str, Any], traces: list[bytes], found: Found, not_made: list[str]) -> dict[str, Any]:
        changed, remains = about["changed"], list(REMAINS)
        comparison = self.folder.resolve().parent.parent
        if self.folder.resolve().parent.name in ("runs", "tuning") and not is_forgotten(comparison, self.name):
            remains.append(f"other runs of {comparison}: forget the client there")
        if any(self.folder.rglob("*words.json")):
            remains.append("the vocabulary of the models, which may have words that only this client said")
        made = [*about["analyses"], *about["summaries"], *about["reports"]]
        where = ", ".join(found.named)
        summary = [
            f"Forgot client {self.name}: changed or deleted {', '.join(changed) or 'nothing, there was none of it'}.",
            *(["Made anew without it: analyses, summary, report."] if made else []),
            *(f"Not made anew, only deleted: {problem}." for problem in not_made),
            f"Searched {found.files} files for {len(traces)} arrays of its bytes: none is left.",
            f"The word {self.name} still stands in {where}: look whether it means the client."
            if where else "Its id is in none of them.",
            "What cannot be undone: " + "; ".join(remains) + ".",
        ]  # fmt: skip
        return {
            "client": self.name, "deleted": changed, "files_searched": found.files, "traces_searched": len(traces),
            "traces_left": 0, "named_in": found.named, "not_made_anew": not_made,
            "digest_of_deleted": hashlib.blake2b(b"".join(traces), digest_size=16).hexdigest() if traces else None,
            "remains": remains, "summary": summary,
        }  # fmt: skip


def _read_intention(path: Path) -> tuple[dict[str, Any], list[bytes]] | None:
    if not path.exists():
        return None
    arrays, about = open_arrays(path)
    return json.loads(about["bespoke"]), [arrays[name].numpy().tobytes() for name in sorted(arrays)]


def _without_examples(about: dict[str, Any], client: str) -> None:
    """Removes the example from checks of the data, which names two clients, if this client is one of them."""
    for found in about.get("checks") or []:
        if client in found.get("example", "").split(" and "):
            found.pop("example")


def _recounted(run: Path, result: dict[str, Any]) -> None:
    """Computes the number of clients and their mean again, from clients.parquet."""
    path = run / "clients.parquet"
    if path.exists() and result.get("query") is not None:
        from pyarrow import parquet

        values = parquet.read_table(path)[f"query_{result['metric']}"].to_numpy()
        if len(values) != result["clients"]:
            result["clients"], result["query"] = len(values), float(np.nanmean(values)) if len(values) else None
