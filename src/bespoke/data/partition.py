"""Partitioners: functions that divide the rows of an unpartitioned dataset among clients.

Each takes a label per row and returns a client per row (0 to clients - 1), a pure function of its arguments. One of
somebody else is a function of (labels, clients, seed), and of alpha, per_client, minimum where it names them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bespoke.errors import UserError
from bespoke.randomness import generator
from bespoke.registry import Registry

Ints = NDArray[np.int64]
LEAST = 5  # rows of each class that FedProx gives to every client that holds it


def assign(
    labels: ArrayLike, partition: str, clients: int, alpha: float, per_client: int, minimum: int, seed: int
) -> Ints:
    """The partitioner of this name; `alpha` is for dirichlet, `per_client` for the other two.

    `minimum`: the rows that a client has at least; with power_law, of each of its classes, and no fewer than five.
    """
    if partition == "dirichlet":
        return dirichlet(labels, clients, alpha, seed, minimum)
    if partition == "shards":
        return shards(labels, clients, per_client, seed)
    if partition == "power_law":
        return power_law(labels, clients, per_client, seed, max(minimum, LEAST))
    function = PARTITIONERS.find(partition, "partition")
    given = {"alpha": alpha, "per_client": per_client, "minimum": minimum}
    asked = {name: value for name, value in given.items() if name in inspect.signature(function).parameters}
    owner = np.asarray(function(labels, clients, seed, **asked))
    fits = owner.shape == np.shape(labels)[:1] and owner.dtype.kind == "i"
    if not fits or not ((owner >= -1) & (owner < clients)).all():
        raise UserError(
            f"the partitioner {partition} has to return a client for each of {np.size(labels)} rows, a whole number "
            f"from 0 to {clients - 1}, or -1 for none; it returned {owner.dtype} of shape {owner.shape}"
        )
    return owner.astype(np.int64)


def dirichlet(labels: ArrayLike, clients: int, alpha: float, seed: int, minimum: int = 1) -> Ints:
    """Each class is dealt out in proportions drawn from Dirichlet(alpha, ..., alpha) over the clients.

    Yurochkin et al. 2019 (Bayesian Nonparametric FL). Small alpha: few classes and uneven sizes; large alpha: alike.
    There, all is drawn again until every client has `minimum` rows, which may take for ever; here a client that is
    short takes random rows from the largest one.
    """
    codes, classes = _codes(labels)
    _positive(clients=clients, alpha=alpha)
    if clients * minimum > len(codes):
        raise UserError(f"{clients} clients of at least {minimum} rows need more than the {len(codes)} rows there are")
    owner = np.empty(len(codes), dtype=np.int64)
    for label in range(classes):
        draw = generator("dirichlet", seed, label)
        rows = draw.permutation(np.flatnonzero(codes == label))
        shares = draw.dirichlet(np.full(clients, alpha))
        ends = np.round(np.cumsum(shares) * len(rows)).astype(np.int64)
        ends[-1] = len(rows)
        owner[rows] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
    sizes = np.bincount(owner, minlength=clients)
    draw = generator("dirichlet minimum", seed)
    for short in np.flatnonzero(sizes < minimum):
        while sizes[short] < minimum:
            donor = int(sizes.argmax())
            owner[draw.choice(np.flatnonzero(owner == donor))] = short
            sizes[donor] -= 1
            sizes[short] += 1
    return owner


def shards(labels: ArrayLike, clients: int, shards_per_client: int, seed: int) -> Ints:
    """Rows sorted by label are cut into equal shards; each client gets `shards_per_client` of them at random.

    McMahan et al. 2017 (Communication-Efficient Learning): MNIST, 100 clients, 2 shards of 300 rows each.
    """
    codes, _ = _codes(labels)
    _positive(clients=clients, shards_per_client=shards_per_client)
    pieces = clients * shards_per_client
    if pieces > len(codes):
        raise UserError(f"{pieces} shards need at least as many rows; there are {len(codes)}")
    draw = generator("shards", seed)
    shuffled = draw.permutation(len(codes))  # which rows of a label share a shard is left to chance
    in_order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    shard = np.arange(len(codes)) * pieces // len(codes)
    owner_of_shard = draw.permutation(pieces) // shards_per_client
    owner = np.empty(len(codes), dtype=np.int64)
    owner[in_order] = owner_of_shard[shard]
    return owner


def power_law(
    labels: ArrayLike, clients: int, classes_per_client: int, seed: int, least: int = LEAST, sigma: float = 2.0
) -> Ints:
    """Few classes per client and log-normal sizes: the MNIST of FedProx (1,000 clients of two digits each).

    Li et al. 2020 (Federated Optimization in Heterogeneous Networks) and its public code: client u holds the classes
    (u + j) mod K, j = 0 ... classes_per_client - 1. It gets `least` rows of each, then a share of the class's other
    rows in proportion to a draw from LogNormal(0, sigma), rounded down. The rows lost to rounding stay unused: their
    client is -1. (FedProx also standardizes each pixel over the whole data, test rows included; that is not done here.)
    """
    codes, classes = _codes(labels)
    _positive(clients=clients, classes_per_client=classes_per_client)
    if classes_per_client > classes:
        raise UserError(f"classes_per_client is {classes_per_client}, but there are only {classes} classes")
    places = np.arange(classes_per_client)
    held = (np.arange(clients)[:, None] + places) % classes  # which classes a client holds
    weight = generator("power law", seed).lognormal(0.0, sigma, held.shape)
    owner = np.full(len(codes), -1, dtype=np.int64)
    for label in range(classes):
        rows = generator("power law rows", seed, label).permutation(np.flatnonzero(codes == label))
        holders, place = np.nonzero(held == label)
        if len(holders) == 0:
            continue
        spare = len(rows) - least * len(holders)
        if spare < 0:
            raise UserError(
                f"a class of {len(rows)} rows cannot give {least} rows to each of the {len(holders)} clients that hold "
                f"it; take fewer than {clients} clients, or fewer than {classes_per_client} classes per client"
            )
        share = weight[holders, place]
        counts = least + np.floor(spare * share / share.sum()).astype(np.int64)
        owners = np.repeat(holders, counts)[: len(rows)]
        owner[rows[: len(owners)]] = owners
    return owner


def _checked(found: Any, where: str) -> Callable[..., Ints]:
    if not callable(found) or isinstance(found, type):
        raise UserError(f"{where} is not a partitioner, a function of (labels, clients, seed); it is {found!r}")
    function: Callable[..., Ints] = found
    return function


PARTITIONERS: Registry[Callable[..., Ints]] = Registry(
    "partition", "bespoke.partitioners", {"dirichlet": dirichlet, "shards": shards, "power_law": power_law}, _checked
)


def by_column(values: ArrayLike) -> NDArray[np.str_]:
    """A natural partition: a column names the client."""
    return np.asarray(values).astype(str)


def client_names(owner: Ints) -> NDArray[np.str_]:
    """Client numbers as ids of equal length, so that text order equals numeric order."""
    width = len(str(int(owner.max(initial=0))))
    return np.char.zfill(owner.astype(str), width)


def _codes(labels: ArrayLike) -> tuple[Ints, int]:
    names, codes = np.unique(np.asarray(labels), return_inverse=True)
    if len(names) == 0:
        raise UserError("there are no rows to divide among clients")
    return codes.astype(np.int64), len(names)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name} is {value}; it has to be positive")
