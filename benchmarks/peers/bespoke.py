"""bespoke itself: its engine, as it chooses by itself, with everything a round has (checks, byte counts, ledger)."""

import importlib.metadata

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import everything
from bespoke.federation.choice import choose
from bespoke.federation.engine import Engine
from bespoke.federation.work import ClientWork
from bespoke.methods import FedAvg
from bespoke.models.char_lstm import CharLSTM
from bespoke.models.language import LanguageModel
from bespoke.models.networks import CNN, LSTM, Linear
from bespoke.models.task import Classification, Regression
from bespoke.task import Precision
from peers.protocol import Params
from peers.workloads import Workload, words

# the benchmark's names of the parameters -> bespoke's
NAMES = {
    "cnn": {"conv1": "features.0", "conv2": "features.2", "dense1": "features.6", "dense2": "head"},
    "lstm": {"embedding": "features.embedding", "lstm": "features.lstm", "output": "head"},
    "char-lstm": {"words": "features.words", "lstm": "features.lstm", "output": "head"},
}
TASKS = {
    "logistic": lambda: Classification(Linear(784, 10)),
    "cnn": lambda: Classification(CNN(62)),
    "linear": lambda: Regression(Linear(100, 1)),
    "lstm": lambda: LanguageModel(LSTM(10_000, embedding=96, hidden=256, layers=1), padding=-1),
    "char-lstm": lambda: LanguageModel(CharLSTM(words()), padding=-1),
}


class Peer:
    precision: Precision = "float32"
    version = f"bespoke-fl {importlib.metadata.version('bespoke-fl')}"

    def load(self, workload: Workload) -> None:
        kind, settings = workload.settings.kind, workload.settings
        self.names = NAMES.get(kind, {})
        self.initial = {self._inside(name): torch.from_numpy(value.copy()) for name, value in workload.params.items()}
        owner = np.repeat([f"{client:06d}" for client in range(workload.num_clients)], workload.sizes)
        population = Population.build({"x": workload.x, "y": workload.y}, owner)
        self.method = FedAvg(TASKS[kind](), lr=settings.learning_rate, batch_size=settings.batch_size, shuffle=False)
        work = ClientWork(self.method, everything(population))
        choice = choose(population, work, self.initial, settings.clients_per_round, precision=self.precision)
        self.version += f": {choice.text()}"
        self.engine = Engine(population, choice)
        self.engine.open(work, self.initial)
        self.rounds = 0
        self.reset()

    def _inside(self, name: str) -> str:
        layer, dot, rest = name.partition(".")
        return f"{self.names.get(layer, layer)}{dot}{rest}"

    def reset(self) -> None:
        self.server = self.method.init_server(self.initial)

    def round(self, clients: list[int]) -> None:
        outcome = self.engine.round(self.server, np.array(clients), self.rounds)
        self.server = self.method.server_round(self.server, outcome.cohort)
        self.rounds += 1

    def params(self) -> Params:
        return {self._outside(name): value.numpy() for name, value in self.server["params"].items()}

    def _outside(self, name: str) -> str:
        found = (f"{outside}{name.removeprefix(inside)}" for outside, inside in self.names.items()
                 if name.startswith(f"{inside}."))  # fmt: skip
        return next(found, name)

    def close(self) -> None:
        self.engine.close()
