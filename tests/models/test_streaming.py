"""Scoring block by block: the same scores, and memory that does not grow with a client's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.federation.chunks import Chunks
from bespoke.federation.host import Host
from bespoke.federation.work import ClientWork, Mode
from bespoke.method import Method, Setting
from bespoke.methods import FedAvg, FineTune, HypCluster, KNNPer
from bespoke.models import language, task
from bespoke.models.fast import token_loss
from bespoke.models.language import LanguageModel
from bespoke.models.networks import LSTM, Linear
from bespoke.models.task import Classification
from bespoke.models.transformer import Transformer
from bespoke.tensors import Params

WORDS, LENGTH = 500, 6


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else [out]
        self.size = max([self.size, *(part.numel() for part in made if isinstance(part, torch.Tensor))])
        return out


def sentences(rows: int) -> Params:
    tokens = torch.randint(1, WORDS, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(rows))
    tokens[::3, 4:] = 0
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous(), "mask": torch.ones(rows)}


def model(**options: int) -> LanguageModel:
    return LanguageModel(LSTM(WORDS, embedding=3, hidden=4, layers=1, **options), unscored=(7,))


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "ROOM", 4 * LENGTH * WORDS)  # four rows' outputs
    monkeypatch.setattr(language, "ITEMS", 5 * LENGTH)
    monkeypatch.setattr(token_loss, "HELD", 7 * WORDS)


@pytest.mark.parametrize("options", [{}, {"projection": 3}])
@pytest.mark.parametrize("how", ["autograd", "func"])
def test_scores_of_blocks_are_cross_entropys(options: Any, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    made, rows = model(**options).differentiated(how), sentences(33)
    params = made.init(0)
    logits, y = made.predict(params, rows), rows["y"]
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").reshape(y.shape)
    counted = y != 0
    scored = counted & (y != 7)
    sums = made.scored(params, rows)
    torch.testing.assert_close(sums["loss"], each[counted].sum())
    assert sums["count"] == counted.sum()
    assert sums["accuracy_count"] == scored.sum()
    assert sums["accuracy"] == (logits.argmax(-1) == y)[scored].sum()


def scores(kind: type[Method], rows: int, **knobs: Any) -> tuple[Any, int]:
    """A client's scores on a half of its rows, and the size of the largest tensor on the way to them."""
    columns = {name: column for name, column in sentences(rows).items() if name != "mask"}
    population = Population.build(columns, np.repeat(["a"], rows))
    split = cross_silo(population, (0.01, 0.0, 0.99), seed=3)
    made: Any = kind(model(), **knobs)
    host = Host(population, Mode(False))
    start = made.task.init(0)
    host.open(ClientWork(made, split.train), start)
    server = made.init_server(start, Setting(1, 1, 1))
    with Largest() as seen:  # type: ignore[no-untyped-call]
        found = host.examine(
            made.broadcast(server), None, np.array([0]), split.test.support, {"query": split.test.query}, 5
        )
    return found["query"], seen.size


METHODS: list[tuple[type[Method], dict[str, Any]]] = [
    (FineTune, {"lrs": (0.5,), "epochs": 2, "batch_size": 2}),
    (KNNPer, {"k": 2, "mix": (0.0, 0.5, 1.0)}),
    (HypCluster, {"k": 2}),
]


@pytest.mark.parametrize(("kind", "knobs"), METHODS)
def test_memory_is_flat_in_rows_and_scores_stay(kind: Any, knobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = scores(kind, 400, **knobs)
    small_blocks(monkeypatch)
    (_, few), (found, many) = scores(kind, 100, **knobs), scores(kind, 400, **knobs)
    assert few == many < 99 * LENGTH * WORDS  # less than the outputs of the few
    for name, values in whole.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5)


def test_a_vectorized_chunk_holds_the_outputs_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten clients of 8 rows with 30 numbers of output a row, and room for 480: two clients at a time."""
    population = Population.build({"x": torch.ones(80, 3), "y": torch.zeros(80, 3).long()}, np.repeat(range(10), 8))
    made = FedAvg(LanguageModel(Transformer(10, 4, 4, 4, 2)))
    chunks = Chunks(Mode(True, 32, gradient="func"), made.task, population.columns["x"])
    monkeypatch.setattr("bespoke.federation.chunks.ROOM", 480)
    assert [len(some) for some in chunks.alike(np.arange(10), np.full(10, 8))] == [2] * 5


def test_an_auc_is_of_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows in the order 1, 0 | 1, 0 of their margins: halves would say 1 and 1, the whole says 3 of 4 pairs."""
    monkeypatch.setattr(task, "ROOM", 2)
    made = Classification(Linear(1, 2))
    params = {"weight": torch.tensor([[0.0], [1.0]]), "bias": torch.zeros(2)}
    rows = {"x": torch.tensor([[4.0], [3.0], [2.0], [1.0]]), "y": torch.tensor([1, 0, 1, 0]), "mask": torch.ones(4)}
    sums = made.scored(params, rows)
    assert float(sums["auc"] / sums["auc_count"]) == 0.75
