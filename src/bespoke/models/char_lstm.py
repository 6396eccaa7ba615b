"""Word language models that read words by their characters (Liu et al., Group Personalized Federated Learning).

The paper's model is an "LSTM with character embedding [Kim et al., AAAI 2016] of dimension 100, and 2 layers of 512
hidden units" over about 33,000 words. Here a word's vector is Kim et al.'s small character CNN (characters of 15
dimensions, 25 w filters of each width w from 1 to 6, the maximum over the word, one highway layer), narrowed to 100.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bespoke.models.networks import Assembled, ModuleNetwork
from bespoke.tensors import Params

LONGEST = 20  # characters of a word that are read
WIDTHS = range(1, 7)
FILTERS = 25  # of width 1; in proportion for the others
NOTHING, BEGIN, END, UNKNOWN, FIRST, LAST = range(6)  # characters that no word has; the last three are words themselves
CUTOFFS = (2_000, 10_000)  # of the adaptive softmax: where its second and third cluster begin


def spelled(words: tuple[str, ...]) -> tuple[Tensor, int]:
    """The characters of all tokens, one row per token, and the number of different characters."""
    letters = sorted({letter for word in words for letter in word[:LONGEST]})
    place = {letter: number for number, letter in enumerate(letters, start=LAST + 1)}
    rows = [[], *([place[letter] for letter in word[:LONGEST]] for word in words), [UNKNOWN], [FIRST], [LAST]]
    longest = max(max(map(len, rows)) + 2, max(WIDTHS))
    table = [[BEGIN, *row, END, *[NOTHING] * (longest - len(row) - 2)] for row in rows]
    return torch.tensor(table), LAST + 1 + len(letters)


class CharacterCNN(nn.Module):
    """Tokens into vectors, by their characters."""

    def __init__(self, words: tuple[str, ...], character: int, embedding: int) -> None:
        super().__init__()
        spelling, letters = spelled(words)
        self.spelling: Tensor
        self.register_buffer("spelling", spelling, persistent=False)
        width = FILTERS * sum(WIDTHS)
        self.character = nn.Embedding(letters, character, padding_idx=NOTHING)
        self.filters = nn.ModuleList(nn.Conv1d(character, FILTERS * w, w) for w in WIDTHS)
        self.gate, self.transform = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.constant_(self.gate.bias, -2.0)  # at first the highway passes its input on
        self.narrow = nn.Linear(width, embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        letters = self.character(self.spelling[tokens]).mT
        found = torch.cat([part(letters).amax(-1) for part in self.filters], -1).tanh()
        gate = self.gate(found).sigmoid()
        out: Tensor = self.narrow(gate * self.transform(found).relu() + (1 - gate) * found)
        return out


class _Body(nn.Module):
    def __init__(self, words: tuple[str, ...], character: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.words = CharacterCNN(words, character, embedding)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=layers, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        distinct, place = torch.unique(tokens, return_inverse=True)
        states: Tensor = self.lstm(self.words(distinct)[place])[0]
        return states


class _TiedHead(nn.Module):
    def __init__(self, hidden: int, embedding: int, vocabulary: int) -> None:
        super().__init__()
        self.narrow = nn.Linear(hidden, embedding, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary))


class _AdaptiveHead(nn.Module):
    """PyTorch's adaptive softmax (Grave et al. 2017), which needs frequent classes first.

    Tokens are padding, words by frequency, unknown, begin and end. The classes are the last three, then the others.
    """

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        cutoffs = [cutoff for cutoff in CUTOFFS if cutoff < vocabulary] or [vocabulary // 2]
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(hidden, vocabulary, cutoffs)

    def forward(self, features: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logarithms of all tokens' probabilities, or of the targets' alone."""
        if targets is not None:
            logs: Tensor = self.softmax(features, (targets + 3) % self.softmax.n_classes).output
        else:
            logs = self.softmax.log_prob(features.flatten(0, -2)).roll(-3, -1).unflatten(0, features.shape[:-1])
        return logs


@dataclass(frozen=True)
class SpelledLSTM(ModuleNetwork):
    """A character CNN and LSTM layers; subclasses predict the next word."""

    words: tuple[str, ...] = field(repr=False)
    embedding: int = 100
    hidden: int = 512
    layers: int = 2
    character: int = 15

    vectorizes = False  # as LSTM

    @property
    def vocabulary(self) -> int:
        return len(self.words) + 4

    def body(self) -> nn.Module:
        return _Body(self.words, self.character, self.embedding, self.hidden, self.layers)

    def prepare(self, x: Tensor) -> Tensor:
        return x.long()


@dataclass(frozen=True)
class CharLSTM(SpelledLSTM):
    """The full softmax over the vocabulary.

    With `tied`, the words' vectors are the rows of the last layer, above a layer of their width. There is no table of
    words, and every step computes the vectors of all words.
    """

    tied: bool = False

    def build(self) -> nn.Module:
        if self.tied:
            return Assembled(self.body(), _TiedHead(self.hidden, self.embedding, self.vocabulary))
        return Assembled(self.body(), nn.Linear(self.hidden, self.vocabulary))

    def output_layer(self, params: Params) -> tuple[Tensor, Tensor | None] | None:
        if not self.tied:
            return super().output_layer(params)
        return self._part("features.words", params, torch.arange(self.vocabulary)), params["head.bias"]

    def before_output(self, params: Params, features: Tensor) -> Tensor:
        return F.linear(features, params["head.narrow.weight"]) if self.tied else features

    def head(self, params: Params, features: Tensor) -> Tensor:
        weight, bias = self.output_layer(params) or (None, None)
        assert weight is not None
        return F.linear(self.before_output(params, features), weight, bias)


@dataclass(frozen=True)
class AdaptiveCharLSTM(SpelledLSTM):
    """The adaptive softmax: rare words share narrow layers. Another model than the full softmax, with its own name."""

    def build(self) -> nn.Module:
        return Assembled(self.body(), _AdaptiveHead(self.hidden, self.vocabulary))

    def item_losses(self, params: Params, features: Tensor, targets: Tensor) -> Tensor:
        own = {name.removeprefix("head."): p for name, p in params.items() if name.startswith("head.")}
        losses: Tensor = -functional_call(self._module.get_submodule("head"), own, (features, targets))
        return losses
