"""Digits: 1,797 handwritten digits of 8 x 8 pixels (Alpaydin and Kaynak, UCI), embedded in scikit-learn."""

from __future__ import annotations

import numpy as np

from bespoke.data.partition import assign, client_names
from bespoke.data.population import Population
from bespoke.data.sources.registry import describe


def load(
    partition: str = "dirichlet",
    clients: int = 50,
    alpha: float = 0.5,
    per_client: int = 2,
    minimum: int = 1,
    seed: int = 0,
) -> Population:
    """Digits dealt out to clients; see bespoke.data.partition for the options."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    # Pixels are 0 to 16; networks take bytes for 0 to 255.
    images = np.round(pixels * (255 / 16)).astype(np.uint8)
    owner = assign(labels, partition, clients, alpha, per_client, minimum, seed)
    used = owner >= 0
    about = describe(
        "digits",
        input="image",
        side=8,
        channels=1,
        classes=[str(digit) for digit in range(10)],
        features=[f"pixel {i}" for i in range(64)],
        numeric=[False] * 64,
        target="digit",
        notes=[f"Clients are artificial: rows were dealt out to {clients} clients by the partitioner {partition!r}."],
    )
    columns = {"x": images[used], "y": labels[used].astype(np.int64)}
    return Population.build(columns, client_names(owner[used]), about=about)
