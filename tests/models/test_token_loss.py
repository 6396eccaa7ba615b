"""The loss over a vocabulary in place: the same numbers and the same gradients as by the textbook."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from bespoke.federation.batches import SlicedBatches
from bespoke.methods.parts.descend import descend
from bespoke.models.fast import token_loss
from bespoke.models.language import LanguageModel
from bespoke.models.networks import LSTM, Network
from bespoke.models.transformer import Transformer


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("block", [1, 20, 10_000])
def test_loss_and_gradients_are_cross_entropys(biased: bool, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_loss, "IN_CACHE", block)
    torch.manual_seed(0)
    features, head, bias = torch.randn(9, 4), torch.randn(7, 4), torch.randn(7)
    targets, weights = torch.randint(7, (9,)), torch.tensor([1.0, 0, 2, 1, 0, 1, 0.5, 1, 1])
    leaves = [leaf.requires_grad_() for leaf in ((features, head, bias) if biased else (features, head))]
    own = 3 * token_loss.head_loss(features, head, bias if biased else None, targets, weights)
    each = F.cross_entropy(features @ head.T + (bias if biased else 0), targets, reduction="none")
    textbook = 3 * (each * weights).sum()
    torch.testing.assert_close(own, textbook)
    for found, expected in zip(torch.autograd.grad(own, leaves), torch.autograd.grad(textbook, leaves)):
        torch.testing.assert_close(found, expected)


def test_padding_and_empty_batches() -> None:
    """Two sequences, the second half padded and masked out: looped and functional gradients agree, and are finite."""
    task = LanguageModel(LSTM(11, embedding=3, hidden=5, layers=1), padding=0)
    params = task.init(0)
    x, y = torch.randint(1, 11, (2, 6)), torch.randint(1, 11, (2, 6))
    y[1, 3:] = 0
    for mask in (torch.ones(2), torch.tensor([1.0, 0.0]), torch.zeros(2)):
        batch = {"x": x, "y": y, "mask": mask}
        looped, textbook = task.gradient(params, batch), {}
        plain = task.differentiated("func")
        live = {name: p.clone().requires_grad_() for name, p in params.items()}
        grads = torch.autograd.grad(plain.loss(live, batch), list(live.values()))
        textbook = dict(zip(live, grads))
        for name in params:
            torch.testing.assert_close(looped[name], textbook[name])


@pytest.mark.parametrize(
    "network", [LSTM(11, embedding=3, hidden=5, layers=1), Transformer(11, 6, 8, 10, 2)], ids=["lstm", "transformer"]
)
def test_descent_without_the_heads_gradient_is_plain_sgd(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps, one of them with padding and one of nothing but padding, against p <- p - lr * gradient.

    The Transformer's last layer is its table of words, too, and moves by the sum of both gradients.
    """
    monkeypatch.setattr(token_loss, "IN_CACHE", 30)
    task = LanguageModel(network, padding=0)
    params = task.init(0)
    torch.manual_seed(1)
    x, y = torch.randint(1, 11, (6, 4)), torch.randint(1, 11, (6, 4))
    y[3, 2:], y[4:] = 0, 0
    rows = {"x": x[None], "y": y[None], "mask": torch.ones(1, 6)}
    batches = SlicedBatches(rows, size=2, repeats=1, examples=torch.tensor(6), steps=3)
    before = {name: p.clone() for name, p in params.items()}
    found = descend(task, params, batches, lr=0.5)
    expected = dict(params)
    for step in range(3):
        gradient = task.gradient(expected, batches[step])
        expected = {name: p - 0.5 * gradient[name] for name, p in expected.items()}
    assert list(found) == list(params)
    for name in params:
        torch.testing.assert_close(found[name], expected[name])
        assert torch.equal(params[name], before[name])  # what came from the server is left as it was
