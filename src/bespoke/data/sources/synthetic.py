"""Synthetic populations: linear regression in which every client's weights are drawn around common weights.

    theta_m ~ N(theta_g, between^2),  theta_g ~ N(theta_0, between_groups^2),  theta_0 ~ N(0, 1)
    x ~ N(0, 1),  y = x . theta_m + noise * N(0, 1)

Without groups theta_g = theta_0: the two-level Gaussian model under which Self-FL is derived. Everything is keyed by
(seed, client): more clients, or more examples, move nobody.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import POPULATION_FORMAT, Names, Population
from bespoke.data.sources.registry import describe
from bespoke.errors import UserError
from bespoke.randomness import client_keys, generator
from bespoke.storage import settle, write_arrays, write_text

Floats = NDArray[np.float64]


def load(
    clients: int = 100,
    examples: int = 50,
    features: int = 10,
    between: float = 0.5,
    noise: float = 0.5,
    uneven: float = 0.0,
    groups: int = 1,
    between_groups: float = 1.0,
    seed: int = 0,
) -> Population:
    """`examples` is the mean per client; `uneven` the sigma of log-normal sizes (0: all alike, never below 3 rows)."""
    _check(clients=clients, examples=examples, features=features, groups=groups)
    theta = true_weights(clients, features, between, groups, between_groups, seed)
    xs, ys = [], []
    for client in range(clients):
        draw = generator("synthetic", seed, client)
        scale = np.exp(uneven * draw.standard_normal() - uneven**2 / 2)  # its mean is one
        rows = max(3, round(examples * scale))
        x = draw.standard_normal((rows, features))
        xs.append(x)
        ys.append(x @ theta[client] + noise * generator("synthetic noise", seed, client).standard_normal(rows))
    sizes = [len(y) for y in ys]
    ids = _ids(clients)
    labels = np.char.add("group ", (np.arange(clients) % groups).astype(str))
    columns: dict[str, NDArray[Any]] = {
        "x": np.concatenate(xs).astype(np.float32),
        "y": np.concatenate(ys).astype(np.float32),
    }
    group = np.repeat(labels, sizes) if groups > 1 else None
    about = _about(features, f"Weights differ between clients by a standard deviation of {between:g}; noise {noise:g}.")
    return Population.build(columns, np.repeat(ids, sizes), group=group, about=about)


def true_weights(
    clients: int = 100,
    features: int = 10,
    between: float = 0.5,
    groups: int = 1,
    between_groups: float = 1.0,
    seed: int = 0,
) -> Floats:
    """Every client's theta_m [clients, features], as `load` with the same options uses them."""
    centre = generator("synthetic centre", seed).standard_normal(features)
    centres = np.stack([centre] * groups)
    if groups > 1:
        centres += between_groups * generator("synthetic groups", seed).standard_normal((groups, features))
    own = np.stack([generator("synthetic weights", seed, c).standard_normal(features) for c in range(clients)])
    return centres[np.arange(clients) % groups] + between * own


def write_large(
    folder: Path,
    clients: int,
    rows_per_client: int = 10,
    features: int = 10,
    seed: int = 0,
    between: float = 0.5,
    noise: float = 0.5,
) -> None:
    """Write a population of equal clients as a folder for Population.open, holding a few thousand clients at a time."""
    _check(clients=clients, rows_per_client=rows_per_client, features=features)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "columns.safetensors"
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    rows, chunk = clients * rows_per_client, 4096
    try:
        x, y = _mapped(temporary, {"x": (rows, features), "y": (rows,)})
        centre = generator("large centre", seed).standard_normal(features, dtype=np.float32)
        for first in range(0, clients, chunk):
            # Whole chunks are drawn and the last one cut, so that more clients move nobody.
            draw = generator("large", seed, first)
            count = min(chunk, clients - first)
            inputs = draw.standard_normal((chunk, rows_per_client, features), dtype=np.float32)[:count]
            theta = centre + np.float32(between) * draw.standard_normal((chunk, features), dtype=np.float32)[:count]
            error = np.float32(noise) * draw.standard_normal((chunk, rows_per_client), dtype=np.float32)[:count]
            begin, end = first * rows_per_client, (first + count) * rows_per_client
            x[begin:end] = inputs.reshape(-1, features)
            y[begin:end] = (np.einsum("crf,cf->cr", inputs, theta) + error).reshape(-1)
        x.flush()
        y.flush()
        del x, y
        settle(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    ids = _ids(clients).tolist()
    names = Names.of(ids)
    write_arrays(
        folder / "clients.safetensors",
        {
            "offsets": torch.arange(clients + 1) * rows_per_client,
            "keys": torch.from_numpy(client_keys(ids).view(np.int64)),
            "id_text": torch.from_numpy(names.text.copy()),
            "id_ends": torch.from_numpy(names.ends),
        },
    )
    about = _about(features, f"{clients} clients of {rows_per_client} rows, written straight to disk.")
    text = json.dumps({"format": POPULATION_FORMAT, "groups": [], "about": about}, indent=1)
    write_text(folder / "population.json", text)  # last: a folder without it is not a population


def _mapped(path: Path, shapes: dict[str, tuple[int, ...]]) -> list[np.memmap[Any, Any]]:
    """A new safetensors file of float32 arrays, mapped for writing: header length, header (JSON), the arrays' bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format wants the arrays aligned
    start = 8 + len(text)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + end)
    offsets = [start + entry["data_offsets"][0] for entry in header.values()]
    return [np.memmap(path, np.float32, "r+", offset, shape) for offset, shape in zip(offsets, shapes.values())]


def _ids(clients: int) -> NDArray[np.str_]:
    """Ids of one length whatever the number of clients: a client's splits and draws follow from its id."""
    return np.char.zfill(np.arange(clients).astype(str), 7)


def _about(features: int, note: str) -> About:
    return describe(
        "synthetic",
        input="table",
        features=[f"x{i}" for i in range(1, features + 1)],
        numeric=[True] * features,
        target="y",
        missing=False,
        # Features are standard normal as drawn, and the true weights stay comparable.
        standardize={"features": "none", "target": False},
        notes=[note],
    )


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"option {name!r} of the source 'synthetic' is {value}; it has to be at least 1")
