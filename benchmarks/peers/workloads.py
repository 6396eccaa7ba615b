"""The benchmark's workloads: synthetic, seeded, and written once to a file that all peers read. Needs numpy only.

Everything that could make two peers compute different things is fixed here: the data, the initial parameters, and the
order of minibatches, which are consecutive rows of a client's data, the last one maybe smaller. The loss of a minibatch
is the mean over it.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

Kind = Literal["logistic", "cnn", "linear", "lstm", "char-lstm"]


@dataclass(frozen=True)
class Settings:
    title: str
    kind: Kind
    clients_per_round: int
    batch_size: int
    learning_rate: float
    about: str


@dataclass(frozen=True)
class Workload:
    """Client `c` owns the rows `offsets[c]:offsets[c + 1]` of `x` and `y`. Parameters are named as PyTorch does."""

    path: str
    settings: Settings
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    params: dict[str, np.ndarray]

    @property
    def num_clients(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Examples of each client, which are its weight in the aggregate."""
        return np.diff(self.offsets)

    def client(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(self.offsets[index], self.offsets[index + 1])
        return self.x[rows], self.y[rows]

    def cohort(self, number: int) -> list[int]:
        """The clients of round `number`: all of them, or a sample that depends on nothing but the number."""
        everyone = np.arange(self.num_clients)
        if self.settings.clients_per_round < self.num_clients:
            everyone = np.random.default_rng(number).choice(everyone, self.settings.clients_per_round, replace=False)
        return everyone.tolist()


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]
"""x, y, sizes of clients, parameters."""


def _dense(rng: np.random.Generator, prefix: str, *shape: int) -> Iterator[tuple[str, np.ndarray]]:
    """Weight and bias, uniform as PyTorch's default is."""
    bound = 1 / np.sqrt(np.prod(shape[1:]))
    yield f"{prefix}weight", rng.uniform(-bound, bound, shape)
    yield f"{prefix}bias", rng.uniform(-bound, bound, shape[:1])


def _sparse_images(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Like scanned letters: four pixels of five are blank."""
    return rng.random(shape, dtype=np.float32) * (rng.random(shape, dtype=np.float32) < 0.2)


def _logistic(rng: np.random.Generator) -> Columns:
    clients, examples, features, classes = 1000, 60, 784, 10
    x = _sparse_images(rng, clients * examples, features)
    y = np.argmax(x @ rng.normal(size=(features, classes)).astype(np.float32), axis=1)
    return x, y, np.full(clients, examples), dict(_dense(rng, "", classes, features))


def _cnn(rng: np.random.Generator) -> Columns:
    clients, examples, classes = 10, 200, 62
    y = rng.integers(classes, size=clients * examples)
    # Each class has its look: gradients of pure noise cancel out, and would leave updates that are mostly rounding.
    x = (_sparse_images(rng, classes, 1, 28, 28)[y] + _sparse_images(rng, len(y), 1, 28, 28)) / 2
    params = {
        **dict(_dense(rng, "conv1.", 32, 1, 3, 3)),
        **dict(_dense(rng, "conv2.", 64, 32, 3, 3)),
        **dict(_dense(rng, "dense1.", 128, 64 * 12 * 12)),
        **dict(_dense(rng, "dense2.", classes, 128)),
    }
    return x, y, np.full(clients, examples), params


def _linear(clients: int, rng: np.random.Generator) -> Columns:
    smallest, largest, features = 110, 1900, 100
    sizes = np.exp(rng.uniform(np.log(smallest), np.log(largest), clients)).round().astype(int)
    sizes[:2] = smallest, largest
    rng.shuffle(sizes)
    x = rng.normal(size=(sizes.sum(), features)).astype(np.float32)
    y = x @ rng.normal(size=features) + rng.normal(size=len(x))
    return x, y.astype(np.float32), sizes, dict(_dense(rng, "", 1, features))


def _lstm(rng: np.random.Generator) -> Columns:
    clients, sentences, words, vocabulary, embedding, hidden = 20, 64, 20, 10_000, 96, 256
    frequency = 1 / np.arange(1, vocabulary + 1)  # Zipf's law
    tokens = rng.choice(vocabulary, size=(clients * sentences, words + 1), p=frequency / frequency.sum())
    bound = 1 / np.sqrt(hidden)
    params = {
        "embedding.weight": rng.normal(scale=0.1, size=(vocabulary, embedding)),
        "lstm.weight_ih_l0": rng.uniform(-bound, bound, (4 * hidden, embedding)),
        "lstm.weight_hh_l0": rng.uniform(-bound, bound, (4 * hidden, hidden)),
        "lstm.bias_ih_l0": rng.uniform(-bound, bound, 4 * hidden),
        "lstm.bias_hh_l0": rng.uniform(-bound, bound, 4 * hidden),
        **dict(_dense(rng, "output.", vocabulary, hidden)),
    }
    return tokens[:, :-1], tokens[:, 1:], np.full(clients, sentences), params


WORDS, LETTERS = 33_000, 26


@lru_cache(maxsize=1)
def words() -> tuple[str, ...]:
    """Different words of 2 to 12 letters."""
    rng = np.random.default_rng(33)
    found: dict[str, None] = {}
    while len(found) < WORDS:
        found["".join(chr(97 + letter) for letter in rng.integers(LETTERS, size=rng.integers(2, 13)))] = None
    return tuple(found)


def _char_lstm(rng: np.random.Generator) -> Columns:
    clients, sentences, length, embedding, hidden, character, filters = 10, 32, 20, 100, 512, 15, 25
    vocabulary = WORDS + 4  # padding before the words; unknown, begin and end after them
    frequency = 1 / np.arange(1, WORDS + 1)
    tokens = 1 + rng.choice(WORDS, size=(clients * sentences, length + 1), p=frequency / frequency.sum())
    bound, pooled = 1 / np.sqrt(hidden), filters * 21
    params = {"words.character.weight": rng.normal(scale=0.5, size=(6 + LETTERS, character))}
    for place in range(6):
        params |= dict(_dense(rng, f"words.filters.{place}.", filters * (place + 1), character, place + 1))
    for layer, width in (("gate", pooled), ("transform", pooled), ("narrow", embedding)):
        params |= dict(_dense(rng, f"words.{layer}.", width, pooled))
    for layer, inputs in enumerate((embedding, hidden)):
        shapes = {"weight_ih": (4 * hidden, inputs), "weight_hh": (4 * hidden, hidden), "bias_ih": 4 * hidden}
        for name, shape in {**shapes, "bias_hh": 4 * hidden}.items():
            params[f"lstm.{name}_l{layer}"] = rng.uniform(-bound, bound, shape)
    params |= dict(_dense(rng, "output.", vocabulary, hidden))
    return tokens[:, :-1], tokens[:, 1:], np.full(clients, sentences), params


CATALOGUE: dict[str, tuple[Settings, Callable[[np.random.Generator], Columns]]] = {
    "w1": (
        Settings(
            title="W1: softmax regression, many small clients",
            kind="logistic",
            clients_per_round=100,
            batch_size=10,
            learning_rate=0.1,
            about="784 features, 10 classes; 100 of 1,000 clients in a round, 60 examples each, batches of 10.",
        ),
        _logistic,
    ),
    "w2": (
        Settings(
            title="W2: the EMNIST CNN",
            kind="cnn",
            clients_per_round=10,
            batch_size=20,
            learning_rate=0.05,
            about="The CNN of Reddi et al. (2021), 1.2 million parameters, no dropout; 10 clients of 200 images, "
            "batches of 20.",
        ),
        _cnn,
    ),
    "w3": (
        Settings(
            title="W3: linear regression, 23 uneven clients",
            kind="linear",
            clients_per_round=23,
            batch_size=64,
            learning_rate=0.01,
            about="100 features; all 23 clients in every round, 110 to 1,900 rows each, batches of 64.",
        ),
        lambda rng: _linear(23, rng),
    ),
    "w3b": (
        Settings(
            title="W3b: linear regression, 139 uneven clients",
            kind="linear",
            clients_per_round=139,
            batch_size=64,
            learning_rate=0.01,
            about="100 features; all 139 clients in every round, 110 to 1,900 rows each, batches of 64.",
        ),
        lambda rng: _linear(139, rng),
    ),
    "w4": (
        Settings(
            title="W4: word LSTM",
            kind="lstm",
            clients_per_round=20,
            batch_size=16,
            learning_rate=0.5,
            about="Vocabulary 10,000, embedding 96, hidden 256; 20 clients of 64 sentences of 20 words, batches of 16.",
        ),
        _lstm,
    ),
    "w5": (
        Settings(
            title="W5: the language model of Group Personalized FL",
            kind="char-lstm",
            clients_per_round=10,
            batch_size=8,
            learning_rate=0.5,
            about="33,000 words, read by a character CNN (vectors of 100), two LSTM layers of 512, full softmax: 20.9 "
            "million parameters; 10 clients of 32 sentences of 20 words, batches of 8.",
        ),
        _char_lstm,
    ),
}


def make(name: str, folder: Path) -> Path:
    """Writes the workload to the folder, once, and returns the file's path."""
    path = folder / f"{name}.npz"
    if path.exists():
        return path
    settings, columns = CATALOGUE[name]
    x, y, sizes, params = columns(np.random.default_rng(2021))
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{name}.unfinished.npz"
    np.savez(
        unfinished,
        settings=np.array(json.dumps(asdict(settings))),
        x=x,
        y=y,
        offsets=np.concatenate([[0], np.cumsum(sizes)]),
        **{f"params/{key}": value.astype(np.float32) for key, value in params.items()},
    )
    return unfinished.rename(path)


def reordered(path: Path) -> Path:
    """The same workload with each client's rows in another order, as another seed would draw them."""
    other = path.with_name(f"{path.stem}.reordered.npz")
    if not other.exists():
        rng = np.random.default_rng(2022)
        with np.load(path) as stored:
            columns = {key: stored[key] for key in stored.files}
        ends = columns["offsets"]
        order = np.concatenate([low + rng.permutation(high - low) for low, high in pairwise(ends)])
        columns |= {key: columns[key][order] for key in ("x", "y")}
        unfinished = path.with_name(f"{path.stem}.unfinished.npz")
        np.savez(unfinished, **columns)
        unfinished.rename(other)
    return other


@lru_cache(maxsize=1)
def load(path: str) -> Workload:
    with np.load(path) as stored:
        return Workload(
            path=path,
            settings=Settings(**json.loads(str(stored["settings"]))),
            x=stored["x"],
            y=stored["y"],
            offsets=stored["offsets"],
            params={key.removeprefix("params/"): stored[key] for key in stored.files if key.startswith("params/")},
        )
