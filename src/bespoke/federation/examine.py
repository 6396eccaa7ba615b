"""Makes and scores personal models: sums of scores of each candidate on a client's rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.federation.batches import Orders, StackedBatches
from bespoke.method import Method
from bespoke.models.scores import joined
from bespoke.plain import Named
from bespoke.tensors import Params, Tree, stack, take

Ints = NDArray[np.int64]
Scores = dict[str, dict[str, NDArray[np.floating[Any]]]]  # part -> metric sum -> (clients, candidates)
OUTPUTS = "outputs"  # among the sums of stacked clients: the outputs that user-defined metrics will get
HELD = 64  # clients whose outputs are in memory at once for these metrics
ROWS = "rows"  # among the sums of query rows: the value of each row, (rows, candidates), if requested


def candidates(method: Method, down: Tree, private: Tree, support: Any, new: bool) -> Iterator[Any]:
    """A client's candidates. `new`: the client never trained."""
    return method.personalize(down, method.newcomer(down, private, support) if new else private, support)


def scores(
    method: Method, down: Tree, private: Tree, support: Any, parts: dict[str, Params], new: bool, by_row: str = "",
    stacked: bool = False,
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """Scores one client's candidates on the rows of each part.

    `stacked`: the client is one of many in a vmap. User-defined metrics are then computed later, from the outputs.
    """
    task: Any = method.task
    found: dict[str, list[Params]] = {name: [] for name in parts}
    for judged in _judged(method, candidates(method, down, private, support, new), parts):
        for name, rows in parts.items():
            found[name].append(task.score(judged[name], rows))
            if by_row and name == "query":
                found[name][-1][ROWS] = task.row_values(judged[name], rows, by_row)
            if task.own:
                found[name][-1] |= {OUTPUTS: judged[name]} if stacked else task.own_sums(judged[name], rows)
    return {name: stack(values) for name, values in found.items()}


def _judged(method: Method, models: Iterator[Any], parts: dict[str, Params]) -> Iterator[Named]:
    """The values that scores need of each candidate's outputs; large outputs are in memory for some rows at a time."""
    task, kind = method.task, type(method)
    if kind.predict is Method.predict and kind.outputs is Method.outputs:
        for model in models:
            yield {name: task.judged(model, rows) for name, rows in parts.items()}
        return
    blocks = {name: task.blocks(rows) for name, rows in parts.items()}
    if all(len(some) == 1 for some in blocks.values()):
        yield from method.outputs(models, parts)
        return
    held = list(models)  # candidates of a method with its own `outputs` share their large parts
    found: list[dict[str, list[Any]]] = [{name: [] for name in parts} for _ in held]
    for name, some in blocks.items():
        for block in some:
            for judged, outputs in zip(found, method.outputs(iter(held), {name: block})):
                judged[name].append(task.judge(outputs[name], block))
    yield from ({name: joined(pieces) for name, pieces in judged.items()} for judged in found)


def vectorized_scores(
    method: Method, shared: Tree, own: Tree, private: Tree, batches: StackedBatches, scored: dict[str, Orders],
    positions: Ints, new: bool, by_row: str,
) -> dict[str, dict[str, Tensor]]:  # fmt: skip
    """`scores` for many clients, stacked."""
    examined = {name: part.stacked(positions) for name, part in scored.items()}

    def one(own: Tree, private: Tree, mine: Any, theirs: dict[str, Any]) -> Any:
        rows = {name: stacked.of_client(theirs[name]).rows() for name, stacked in examined.items()}
        scored = scores(method, {**shared, **own}, private, batches.of_client(mine), rows, new, by_row, stacked=True)
        return scored, {name: {key: part[key] for key in ("y", "mask")} for name, part in rows.items()}

    others = {name: stacked.mapped() for name, stacked in examined.items()}
    found: dict[str, dict[str, Tensor]]
    found, rows = torch.func.vmap(one)(own, private, batches.mapped(), others)
    for name, sums in found.items():
        if OUTPUTS in sums:  # these metrics may run any Python, so they get one client and one candidate at a time
            outputs = sums.pop(OUTPUTS)
            task: Any = method.task
            sums |= stack([
                stack([task.own_sums(said, take(rows[name], i)) for said in outputs[i]]) for i in range(len(outputs))
            ])  # fmt: skip
    return found


class ScoreTables:
    """The scores of a cohort, filled chunk by chunk in the order of clients. Clients without support rows stay NaN.

    With many candidates these tables are the largest objects in memory. So they have the precision of the scores, a
    chunk's scores are freed once they are copied, and what all candidates share (the row counts) has one column.
    """

    def __init__(self, clients: int, scored: dict[str, Orders]) -> None:
        self.clients, self.scored = clients, scored
        self.tables: Scores = {}

    def put(self, positions: Ints, parts: dict[str, dict[str, Tensor]]) -> None:
        """Stores the scores of a chunk: the clients at these positions."""
        for part, sums in parts.items():
            sizes, begins = self.scored[part].sizes, self.scored[part].layout.begins
            tables = self.tables.setdefault(part, {})
            for metric, values in sums.items():
                found = values.cpu().numpy()
                if metric == ROWS:
                    if metric not in tables:
                        tables[metric] = np.full((int(sizes.sum()), found.shape[1]), np.nan, found.dtype)
                    for place, rows in zip(positions, found):  # (candidates, rows), padded
                        tables[metric][begins[place] : begins[place] + sizes[place]] = rows[:, : sizes[place]].T
                    continue
                if metric.endswith("count") and (found == found[:, :1]).all():
                    found = found[:, :1]
                fill(tables, metric, self.clients, positions, found)


def fill(
    tables: dict[str, NDArray[np.floating[Any]]], metric: str, many: int, places: Ints, values: NDArray[Any]
) -> None:
    """Puts `values` in these places of a table of `many` rows, with one column while all candidates are equal."""
    table = tables.get(metric)
    if table is None:
        table = np.full((many, values.shape[1]), np.nan, values.dtype)
    elif table.shape[1] < values.shape[1]:
        table = np.repeat(table, values.shape[1], axis=1)
    table[places] = values
    tables[metric] = table
