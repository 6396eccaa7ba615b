"""The work of a network by hand, and what the engine makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation import choice as choosing
from bespoke.federation.choice import choose
from bespoke.federation.engine import Choice
from bespoke.federation.work import ClientWork
from bespoke.methods import FedAvg
from bespoke.models.char_lstm import CharLSTM
from bespoke.models.language import LanguageModel
from bespoke.models.networks import CNN, LSTM, MLP, Linear, Network
from bespoke.models.sound import SpectrogramCNN
from bespoke.models.task import BaseTask, Classification
from bespoke.models.transformer import Transformer

TOKENS = torch.ones(1, 20, dtype=torch.long)
HIGHWAY = 2 * 525**2 + 525 * 100
ATTENTION = 4 * 512**2 + 2 * 20 * 512  # of a position: four layers, and twice the twenty positions it looks at


@pytest.mark.parametrize(
    ("network", "x", "work"),
    [
        (Linear(784, 10), torch.zeros(1, 784), 7_840),
        (MLP(20, 3, (64,)), torch.zeros(1, 20), 20 * 64 + 64 * 3),
        (CNN(62), torch.zeros(1, 784), 26**2 * 32 * 9 + 24**2 * 64 * 32 * 9 + 9216 * 128 + 128 * 62),
        (LSTM(1000, 96, 256, 2), TOKENS, 20 * (4 * 256 * (96 + 3 * 256) + 256 * 1000)),
        (Transformer(1000), TOKENS, 20 * (2 * 96 * 512 + ATTENTION + 2 * 512 * 2048 + 96 * 1000)),
        # one distinct word, of 6 characters with its ends: 7 - w places for each of the 25 w filters of width w
        (CharLSTM(("word",), layers=1), TOKENS,
         sum((7 - w) * 25 * w * 15 * w for w in range(1, 7)) + HIGHWAY + 20 * (4 * 512 * 612 + 512 * 5)),
    ],
)  # fmt: skip
def test_multiply_adds_by_hand(network: Network, x: torch.Tensor, work: int) -> None:
    assert BaseTask(network).work(x) == work


def chosen(task: BaseTask, x: torch.Tensor, y: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Choice:
    """For eight clients; a trial would say 'vectorized'."""
    monkeypatch.setattr(choosing, "_trial", lambda *_: (True, "a trial"))
    population = Population.build({"x": x, "y": y}, np.repeat(range(8), len(x) // 8))
    return choose(population, ClientWork(FedAvg(task), everything(population)), task.init(0), 8, **how)


def test_the_choice_goes_by_work_not_by_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """15,620 parameters either way, on sounds of a second or of ten: the long ones are worth a loop of their own."""
    labels = torch.zeros(256, dtype=torch.long)
    short, long = (Classification(SpectrogramCNN(12, frames, 40)) for frames in (40, 980))
    tried = chosen(short, torch.zeros(256, 40 * 40), labels, monkeypatch)
    assert (tried.vectorized, tried.reason) == (True, "a trial")
    looped = chosen(long, torch.zeros(256, 980 * 40), labels, monkeypatch)
    assert not looped.vectorized
    assert "s a step" in looped.reason


def test_a_table_of_words_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup costs nothing, the layer above costs: 8 clients of one short sentence need no worker processes."""
    x = torch.ones(8, 2, dtype=torch.long)
    wide = LanguageModel(LSTM(100_000, embedding=32, hidden=1, layers=1))
    assert chosen(wide, x, x, monkeypatch).workers == 0
    assert chosen(wide, x.repeat(64, 20), x.repeat(64, 20), monkeypatch).workers == choosing.cores()
