"""FedAvg and fine-tuning in about a hundred lines of plain PyTorch, without bespoke: what the library does, to read.

Run it: python examples/fedavg_by_hand.py

Synthetic clients, each with its own true weights around a common mean. One shared model is trained by averaging; then
each client trains it further on its own rows. The epoch is chosen on validation rows, results are for other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLIENTS, ROWS, FEATURES = 50, 40, 5
BETWEEN, NOISE = 0.7, 0.5  # how far clients are from each other; how noisy a row is
ROUNDS, COHORT, BATCH, LR = 60, 10, 8, 0.05
FINE_TUNE_EPOCHS = 10

Client = dict[str, tuple[Tensor, Tensor]]


def make_clients(generator: torch.Generator) -> list[Client]:
    """y = x . theta_m + noise with theta_m ~ N(theta_0, BETWEEN^2), split into train, validation and query rows."""
    common = torch.randn(FEATURES, generator=generator)
    clients = []
    for _ in range(CLIENTS):
        own = common + BETWEEN * torch.randn(FEATURES, generator=generator)
        x = torch.randn(ROWS, FEATURES, generator=generator)
        y = x @ own + NOISE * torch.randn(ROWS, generator=generator)
        clients.append({"train": (x[:20], y[:20]), "validation": (x[20:30], y[20:30]), "query": (x[30:], y[30:])})
    return clients


def one_epoch(weights: Tensor, rows: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
    """Minibatch SGD on half the squared error."""
    x, y = rows
    for batch in torch.randperm(len(y), generator=generator).split(BATCH):
        error = x[batch] @ weights - y[batch]
        weights = weights - LR * x[batch].T @ error / len(batch)
    return weights


def mse(weights: Tensor, rows: tuple[Tensor, Tensor]) -> float:
    x, y = rows
    return float(((x @ weights - y) ** 2).mean())


def train_shared(clients: list[Client], generator: torch.Generator) -> Tensor:
    """FedAvg: each client of the cohort trains the shared model; the server adds the mean change, weighted by rows."""
    shared = torch.zeros(FEATURES)
    for _ in range(ROUNDS):
        cohort = torch.randperm(CLIENTS, generator=generator)[:COHORT].tolist()
        total, rows = torch.zeros(FEATURES), 0
        for client in cohort:
            n = len(clients[client]["train"][1])
            total += n * (one_epoch(shared, clients[client]["train"], generator) - shared)
            rows += n
        shared = shared + total / rows
    return shared


def fine_tune(shared: Tensor, client: Client, generator: torch.Generator) -> list[Tensor]:
    """The models after 0, 1, 2, ... epochs on the client's own rows; epoch 0 is the shared model."""
    models = [shared]
    for _ in range(FINE_TUNE_EPOCHS):
        models.append(one_epoch(models[-1], client["train"], generator))
    return models


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    clients = make_clients(generator)
    shared = train_shared(clients, generator)
    personal = [fine_tune(shared, client, generator) for client in clients]

    # one epoch for all, chosen by the mean over clients of their validation error: never by the query rows
    validation = [
        sum(mse(models[epoch], client["validation"]) for models, client in zip(personal, clients)) / CLIENTS
        for epoch in range(FINE_TUNE_EPOCHS + 1)
    ]
    best = min(range(FINE_TUNE_EPOCHS + 1), key=validation.__getitem__)

    before = [mse(shared, client["query"]) for client in clients]
    after = [mse(models[best], client["query"]) for models, client in zip(personal, clients)]
    hurt = sum(a > b for a, b in zip(after, before))
    print(f"shared model          mean MSE per client {sum(before) / CLIENTS:.3f}")
    print(f"fine-tuned, epoch {best:<3} mean MSE per client {sum(after) / CLIENTS:.3f}")
    print(f"hurt by fine-tuning   {hurt} of {CLIENTS} clients")


if __name__ == "__main__":
    main()
