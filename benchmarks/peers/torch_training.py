"""What the peers that train with PyTorch's autograd share: the models, and one local epoch."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from peers.workloads import LETTERS, WORDS, Kind, Workload, words

Batch = tuple[Tensor, Tensor]


class Logistic(nn.Linear):
    def __init__(self) -> None:
        super().__init__(784, 10)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x), y)


class LinearRegression(nn.Linear):
    def __init__(self) -> None:
        super().__init__(100, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self(x).squeeze(-1), y) / 2


class EmnistCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dense1 = nn.Linear(64 * 12 * 12, 128)
        self.dense2 = nn.Linear(128, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = functional.max_pool2d(x, 2).flatten(1)
        return self.dense2(functional.relu(self.dense1(x)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x), y)


class WordLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10_000, 96)
        self.lstm = nn.LSTM(96, 256, batch_first=True)
        self.output = nn.Linear(256, 10_000)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.lstm(self.embedding(x))[0])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())


class CharacterCnn(nn.Module):
    """The small character CNN of Kim et al. (2016), narrowed to 100."""

    def __init__(self) -> None:
        super().__init__()
        spelled = [[ord(letter) - 91 for letter in word] for word in words()]  # 0 to 5 are no letters
        rows = [[1, *row, 2] for row in ([], *spelled, [3], [4], [5])]
        longest = max(map(len, rows))
        table = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        self.register_buffer("spelling", table, persistent=False)
        self.character = nn.Embedding(6 + LETTERS, 15, padding_idx=0)
        self.filters = nn.ModuleList(nn.Conv1d(15, 25 * width, width) for width in range(1, 7))
        self.gate, self.transform, self.narrow = nn.Linear(525, 525), nn.Linear(525, 525), nn.Linear(525, 100)

    def forward(self, tokens: Tensor) -> Tensor:
        letters = self.character(self.spelling[tokens]).transpose(1, 2)
        pooled = torch.cat([layer(letters).amax(-1) for layer in self.filters], 1).tanh()
        gate = torch.sigmoid(self.gate(pooled))
        return self.narrow(gate * functional.relu(self.transform(pooled)) + (1 - gate) * pooled)


class CharLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = CharacterCnn()
        self.lstm = nn.LSTM(100, 512, num_layers=2, batch_first=True)
        self.output = nn.Linear(512, WORDS + 4)

    def forward(self, x: Tensor) -> Tensor:
        distinct, places = torch.unique(x, return_inverse=True)
        return self.output(self.lstm(self.words(distinct)[places])[0])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self(x).flatten(0, 1), y.flatten())


MODELS: dict[Kind, type[nn.Module]] = {
    "logistic": Logistic,
    "cnn": EmnistCnn,
    "linear": LinearRegression,
    "lstm": WordLstm,
    "char-lstm": CharLstm,
}


def build_model(workload: Workload) -> nn.Module:
    """The workload's model with its initial parameters."""
    model = MODELS[workload.settings.kind]()
    load_params(model, workload.params)
    return model


def load_params(model: nn.Module, params: dict[str, np.ndarray]) -> None:
    model.load_state_dict({name: torch.from_numpy(value) for name, value in params.items()})


def read_params(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def client_tensors(workload: Workload, index: int) -> Batch:
    """The client's data, not copied."""
    x, y = workload.client(index)
    return torch.from_numpy(x), torch.from_numpy(y)


def batches(x: Tensor, y: Tensor, size: int) -> Iterator[Batch]:
    return zip(x.split(size), y.split(size), strict=True)


def train(model: nn.Module, data: Batch, batch_size: int, learning_rate: float) -> None:
    """One epoch of plain SGD, in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for x, y in batches(*data, batch_size):
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()
