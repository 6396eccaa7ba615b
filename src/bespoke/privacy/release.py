"""Statistics of clients' data that the encoding needs, released with noise: categories, means and deviations.

There are three rounds of the Gaussian mechanism. In each, a client sends a vector of norm at most one:

1. Items. A client's items are its categories (at most LEVELS of a column, its own most frequent ones), its classes, the
   columns in which it has missing values, and the magnitude ceil(log2 max|x|) of each number. For texts, the items are
   the client's SPOKEN most frequent words, and this is the only round. With k items, each has the weight 1 / sqrt(k).
   Categories and classes are released if their noisy weight exceeds the threshold

       max over t of  1 / sqrt(t) + z quantile((1 - delta)^(1/t)),   t up to the most items that a client may have,

   which an item of a single client exceeds with probability at most delta (Gopi et al., Differentially Private Set
   Union, ICML 2020). The other items are known without the data and need no such threshold.
2. Means of the values, clipped to the released magnitude.
3. Deviations: the magnitude of each client's root mean square distance to the released mean. This compensates an error
   of the mean: standardized values have about unit size, whatever the noise was.

A client's rows count as their mean, so clients weigh alike. A number without a released magnitude stays unscaled.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import Population
from bespoke.data.splits import Train
from bespoke.data.tables.features import LEVELS
from bespoke.data.tables.schema import Column, Schema, Statistics, Target
from bespoke.digests import sealed
from bespoke.errors import UserError
from bespoke.plain import JsonObject
from bespoke.privacy.accountant import Participation, Spent
from bespoke.storage import write_text

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Draw = Callable[[tuple[int, ...], str], Floats]  # standard normal numbers of a shape, for a purpose

RELEASE = "statistics.json"  # of a run folder
SPOKEN = 200  # number of a client's own most frequent words that count
EXPONENTS = np.arange(-63, 64)  # of distinguished magnitudes; the first includes zero and smaller ones
SURE = 4.0  # in deviations of the noise: the threshold of items that are known without the data


@dataclass(frozen=True)
class Release:
    """Released statistics and their cost: one Gaussian mechanism with this noise, and the threshold's delta."""

    id: str
    noise: float
    delta: float
    statistics: Statistics
    schema: JsonObject | None = None
    notes: list[str] = field(default_factory=list)
    floats: int = 0  # numbers that a client sent, at most

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(self), indent=1))

    def kept(self, path: Path) -> Release:
        """Writes the release to disk before it is used. If another process was faster, its release is used."""
        making = path.with_name(f".{path.name}.{os.getpid()}")
        self.write(making)
        with contextlib.suppress(FileExistsError):
            os.link(making, path)
        making.unlink()
        return Release.read(path)

    @classmethod
    def read(cls, path: Path) -> Release:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found["statistics"] = {name: (float(m), float(d)) for name, (m, d) in found["statistics"].items()}
            return cls(**found)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged ({error!r}): what was released of the data is not known; begin in another folder"
            ) from None


@dataclass(frozen=True)
class Learned:
    """What a run learned from its data before training, for its privacy account."""

    unpaid: tuple[str, ...] = ()  # learned without noise, and not declared public
    releases: dict[str, tuple[float, float]] = field(default_factory=dict)  # by name: noise multiplier, delta

    @classmethod
    def of(cls, about: About, public_statistics: bool) -> Learned:
        """Reads a population's description."""
        unpaid, made = list(about.get("unpaid", ())), about.get("release")
        if about.get("statistics_floats", 0) > (made or {}).get("floats", 0) and not public_statistics:
            unpaid.append(
                "sums of the data travel without noise to standardize them (say data.standardize = 'none' or 'client', "
                "or privacy.public_statistics = true if their means and deviations are public; with a budget on "
                "released models they are paid for: privacy.statistics)"
            )
        return cls(tuple(unpaid), {made["id"]: (made["noise"], made["delta"])} if made else {})

    def why(self, view: str) -> list[str]:
        """Reasons why there is no guarantee; empty if there is one."""
        summed = "what is learned to encode and standardize the data is noised on the sum, not on the client"
        return [*self.unpaid, *([summed] if self.releases and view == "messages" else [])]

    def spent(self, kind: Participation) -> Spent:
        return Spent(kind, releases=self.releases)


NOTHING = Learned()


def words_file(store: Path) -> Path:
    """The file of a folder's vocabulary that was learned without noise, beside the release."""
    return store.with_name("words.json" if store.name == RELEASE else f"{store.stem}-words.json")


def keep_words(path: Path, words: Sequence[str]) -> None:
    """Writes the vocabulary with which the models of a folder start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(sealed({"words": list(words)}), ensure_ascii=False))


def threshold(noise: float, delta: float, most: int) -> float:
    """The noisy weight above which items are released. An item of one client exceeds it with probability delta."""
    from scipy.stats import norm

    counts = np.arange(1, max(most, 1) + 1)
    return float((1 / np.sqrt(counts) + noise * norm.isf(-np.expm1(np.log1p(-delta) / counts))).max())


@dataclass
class Learner:
    """Learns from the training rows of clients, with noise of deviation `noise` in each round."""

    train: Train
    noise: float
    delta: float
    draw: Draw

    def __post_init__(self) -> None:
        self.rows, sizes = self.train.of(self.train.clients)
        self.clients = len(self.train.clients)
        self.owner = np.repeat(np.arange(self.clients), sizes)
        self.floats = 0

    # -- round 1 -------------------------------------------------------------------------------------------------------
    def items(self, raw: Population | None, values: Floats, names: list[str]) -> tuple[Schema | None, Ints, list[str]]:
        """The schema of a table (`raw`), and the magnitude of each column of values (-1 below the first if unknown)."""
        asked = [self._magnitudes(values)]  # (client, item) pairs; items are numbered column by column
        open_items: list[tuple[Ints, Ints]] = []
        entries = raw.about["columns"] if raw is not None else []
        if raw is not None:
            cells = raw.columns["cells"].numpy()[self.rows]
            empty = [np.unique(self.owner[np.isnan(cells[:, place])]) for place in range(len(entries))]
            asked.append(_pairs([(client, np.full(len(client), place)) for place, client in enumerate(empty)]))
            open_items = [
                self._levels(cells[:, place]) if entry["kind"] == "category" else _NONE
                for place, entry in enumerate(entries)
            ]
            y = raw.columns["y"].numpy()[self.rows].astype(np.float64)
            open_items.append(self._levels(y) if raw.about.get("levels") is not None else _NONE)
        counts = np.zeros(self.clients)
        for client, _ in (*asked, *open_items):
            np.add.at(counts, client, 1)
        weight = 1 / np.sqrt(np.maximum(counts, 1))
        self.floats += int(counts.max(initial=0))
        votes = self._noised(asked[0], weight, values.shape[1] * len(EXPONENTS), "magnitudes")
        magnitudes = _largest(votes.reshape(-1, len(EXPONENTS)), SURE * self.noise)
        notes = [
            f"No scale of {name} could be learned within the budget: it is not standardized (declare its range)."
            for name, found in zip(names, magnitudes) if found < EXPONENTS[0]
        ]  # fmt: skip
        if raw is None:
            return None, magnitudes, notes
        missing = self._noised(asked[1], weight, len(entries), "missing") > SURE * self.noise
        most = LEVELS * (sum(entry["kind"] == "category" for entry in entries) + (raw.about.get("levels") is not None))
        limit = threshold(self.noise, self.delta, most) if most else math.inf
        columns = []
        for place, entry in enumerate(entries):
            column = Column(entry["name"], entry["kind"], missing=bool(missing[place]))
            if entry["kind"] == "category":
                found = self._released(open_items[place], weight, entry["levels"], limit, f"levels {place}")
                if not found:
                    notes.append(f"Left out: no value of {entry['name']} is found at enough clients to be released.")
                    continue
                column = Column(column.name, "category", tuple(found[:LEVELS]), True, column.missing)
            columns.append(column)
        target = Target(raw.about["target"])
        if (levels := raw.about.get("levels")) is not None:
            classes = self._released(open_items[-1], weight, levels, limit, "classes")
            if not classes:
                raise UserError(
                    f"no class of {target.name} is found at enough training clients ({self.clients} in all) to be "
                    "released within privacy.statistics; declare the classes (--schema FILE), spend more, or say "
                    "privacy.public_schema = true if they are public"
                )
            target = Target(target.name, tuple(sorted(classes)), other=True)
        return Schema(tuple(columns), target), magnitudes, notes

    def words(self, raw: Population) -> tuple[list[str], list[str]]:
        """The words that enough clients use, by decreasing noisy weight."""
        pieces = raw.columns["pieces"].numpy()[self.rows]
        owner, text = np.repeat(self.owner, pieces.shape[1]), raw.about["text"]
        banned = {0, *(place for place, word in enumerate(raw.about["pieces"], 1) if word in text["unknown"])}
        there = ~np.isin(pieces.ravel(), list(banned))
        pairs = _frequent(owner[there], pieces.ravel()[there].astype(np.int64) - 1, SPOKEN)
        counts = np.bincount(pairs[0], minlength=self.clients)
        self.floats += int(counts.max(initial=0))
        limit = threshold(self.noise, self.delta, SPOKEN)
        weight = 1 / np.sqrt(np.maximum(counts, 1))
        found = self._released(pairs, weight, raw.about["pieces"], limit, "words")[: text["vocabulary"]]
        if not found:
            raise UserError(
                f"no word is said by enough training clients ({self.clients} in all) to be released within "
                "privacy.statistics; declare the words (--schema FILE), spend more, or say privacy.public_schema = "
                "true if they are public"
            )
        return found, [f"The vocabulary has {len(found):,} entries, released with noise: many clients say each."]

    def _levels(self, cells: Floats) -> tuple[Ints, Ints]:
        """Pairs of each client and its most frequent levels, at most LEVELS of them."""
        there = ~np.isnan(cells)
        return _frequent(self.owner[there], cells[there].astype(np.int64), LEVELS)

    def _magnitudes(self, values: Floats) -> tuple[Ints, Ints]:
        """Pairs of each client and the magnitude of its largest value, for each column."""
        largest = np.full((self.clients, values.shape[1]), -1.0)
        present = ~np.isnan(values)
        for place in range(values.shape[1]):
            there = present[:, place]
            np.maximum.at(largest[:, place], self.owner[there], np.abs(values[there, place]))
        return _binned(largest)

    def _noised(self, pairs: tuple[Ints, Ints], weight: Floats, count: int, purpose: str) -> Floats:
        client, item = pairs
        return self._added(np.bincount(item, weight[client], minlength=count).astype(np.float64), purpose)

    def _added(self, sums: Floats, purpose: str) -> Floats:
        """The only place where information about clients is released: adds noise to sums."""
        return sums + self.noise * self.draw(sums.shape, purpose)

    def _released(
        self, pairs: tuple[Ints, Ints], weight: Floats, levels: list[str], limit: float, purpose: str
    ) -> list[str]:
        """The levels above the threshold, by decreasing noisy weight. Levels without clients are never considered."""
        there = np.unique(pairs[1])
        noisy = self._noised((pairs[0], np.searchsorted(there, pairs[1])), weight, len(there), purpose)
        order = np.argsort(-noisy, kind="stable")
        return [levels[there[i]] for i in order.tolist() if noisy[i] > limit]

    # -- rounds 2 and 3 ------------------------------------------------------------------------------------------------
    def scales(self, values: Floats, names: list[str], magnitudes: Ints) -> Statistics:
        """Mean and deviation of each column whose magnitude is known; 0 and 1 for the others."""
        width = values.shape[1]
        found = magnitudes >= EXPONENTS[0]
        bound = np.where(found, np.exp2(magnitudes.astype(np.float64)), 1.0)
        part = math.sqrt(max(width, 1))  # entries are at most one, so the vector divided by this has norm at most one
        means = self._added(self._means(np.clip(values / bound, -1, 1)).sum(0) / part, "means")
        mean = np.clip(means * part / max(self.clients, 1), -1, 1) * bound
        distance = np.sqrt(self._means((values - mean) ** 2, absent=np.nan))
        client, item = _binned(np.nan_to_num(distance, nan=-1.0))
        votes = self._noised((client, item), np.full(self.clients, 1 / part), width * len(EXPONENTS), "deviations")
        self.floats += 2 * width
        votes = np.where(votes > SURE * self.noise, votes, 0.0).reshape(-1, len(EXPONENTS))
        total = votes.sum(1)
        centres = np.exp2(2.0 * EXPONENTS - 1)  # of the squares in a bin: between 4^(e - 1) and 4^e
        deviation = np.sqrt(votes @ centres / np.where(total > 0, total, 1))
        usable = found & (total > 0)
        return {
            name: (float(m), float(d)) if fine else (0.0, 1.0)
            for name, m, d, fine in zip(names, mean, deviation, usable)
        }  # fmt: skip

    def _means(self, values: Floats, absent: float = 0.0) -> Floats:
        """Each client's mean of each column over its present values: (clients, columns); `absent` if it has none."""
        present = ~np.isnan(values)
        sums, counts = (
            np.stack([np.bincount(self.owner, c, minlength=self.clients) for c in part.T.astype(np.float64)], 1)
            for part in (np.where(present, values, 0.0), present)
        )
        return np.where(counts > 0, sums / np.maximum(counts, 1), absent)


_NONE = (np.zeros(0, np.int64), np.zeros(0, np.int64))


def _frequent(owner: Ints, items: Ints, most: int) -> tuple[Ints, Ints]:
    """Pairs of each owner and its most frequent items, at most so many of them."""
    pairs, counts = np.unique(np.stack([owner, items]), axis=1, return_counts=True)
    order = np.lexsort((pairs[1], -counts, pairs[0]))
    client, item = pairs[:, order]
    rank = np.arange(len(client)) - np.searchsorted(client, client)
    return client[rank < most], item[rank < most]


def _pairs(parts: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    client, item = ([part[i] for part in parts] for i in (0, 1))
    return np.concatenate([_NONE[0], *client]), np.concatenate([_NONE[1], *item])


def _binned(sizes: Floats) -> tuple[Ints, Ints]:
    """(client, item) pairs of sizes (clients, columns): item = column x EXPONENTS + place; negative: no item."""
    with np.errstate(divide="ignore"):
        exponent = np.clip(np.ceil(np.log2(np.maximum(sizes, 0.0))), EXPONENTS[0], EXPONENTS[-1])
    client, column = np.nonzero(sizes >= 0)
    place = exponent[client, column].astype(np.int64) - EXPONENTS[0]
    return client, column * len(EXPONENTS) + place


def _largest(votes: Floats, limit: float) -> Ints:
    """The largest magnitude above the limit in each row; one below the first if there is none."""
    above = votes > limit
    last = votes.shape[1] - 1 - above[:, ::-1].argmax(1)
    largest: Ints = np.where(above.any(1), EXPONENTS[0] + last, EXPONENTS[0] - 1)
    return largest
