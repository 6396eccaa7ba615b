"""Checks a table before training: leaks, id columns, duplicate rows, clients that are copies, few rows.

The checks read a limited number of rows of evenly chosen clients, so they take a fraction of a second. They report
findings and change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import NO_GROUP, Population
from bespoke.data.splits import Rows, Split
from bespoke.data.tables.leaks import Floats, Ints, by_column, leaks_of, spread

Hashes = NDArray[np.uint64]

ROWS = 100_000  # looked at for duplicates and ids
AGREEING = 0.75  # of those with equal features, beyond chance, have to agree in the target to be called duplicates
_NAMED = re.compile(r"(?i:(^|[^a-z])(id|code|zip|zipcode|postcode|fips|sic)($|[^a-z]))|[a-z]I[Dd]$")


@dataclass(frozen=True)
class Check:
    """A finding in the data; `kind` is leak, id, codes, duplicates, same clients, few rows or context."""

    kind: str
    severity: Literal["serious", "note"]
    text: str
    example: str = ""  # clients of whom it is true, by id

    def to_json(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


def check(population: Population, split: Split) -> list[Check]:
    """Returns the findings in a table, the most serious first. In rows of other kinds, only contexts are checked.

    The population is as it was loaded, not standardized; `split` is a split of it.
    """
    x = population.columns["x"]
    if population.about.get("input", "table") != "table" or x.dtype != torch.float32 or x.dim() != 2:
        return [*_contexts(population)]
    names = list(population.about.get("features", map(str, range(x.shape[1]))))
    columns = by_column(names)
    leaks = leaks_of(population, split, columns)
    # leaks are left out: rows with an equal leak have equal targets anyway, whether or not they are duplicates
    looked = Looked.at(population, [place for column in columns.keys() - leaks for place in columns[column]])
    found = [*_said(leaks, population), *looked.duplicates(split), *looked.same_clients(), *looked.ids(), *_few(split)]
    return sorted(found, key=lambda one: one.severity != "serious")


# Clients and contexts


def _contexts(population: Population) -> Iterator[Check]:
    """Finds clients and contexts that coincide, so that their effects cannot be separated."""
    if "context" not in population.columns:
        return
    owner = np.repeat(np.arange(len(population)), population.sizes())
    code, names = population.columns["context"].numpy(), population.about["contexts"]
    known = np.array([name != NO_GROUP for name in names])[code]
    pairs = np.unique(np.stack([owner[known], code[known]]), axis=1)
    if not pairs.size:
        return
    by_client, by_context = (np.bincount(one)[np.unique(one)].max() == 1 for one in pairs)
    name, apart = population.about.get("context", "context"), "their effects cannot be separated"
    if by_client and by_context:
        yield Check("context", "serious", f"Client and {name} coincide, one {name} for each client: {apart}.")
    elif by_client:
        yield Check("context", "note", f"Every client has one {name}: {apart} within a client.")
    elif by_context:
        yield Check("context", "note", f"Every {name} belongs to one client: {apart} within a {name}.")


# Columns that are nearly the target


def _said(leaks: dict[str, float], population: Population) -> Iterator[Check]:
    target = str(population.about.get("target", "the target"))
    for column, explained in leaks.items():
        what = f"explains {_percent(explained)} % of the variance of {target}"
        if population.about.get("task") != "regression":
            what = f"tells the class of {_percent(explained)} % of the rows"
        yield Check(
            "leak", "serious",
            f"The column {column} alone {what}, at clients it was not fitted to. If it is not known before {target} "
            "is known, leave it out (--features).",
        )  # fmt: skip


# Columns that are ids or codes, rows and clients that occur twice


@dataclass(frozen=True)
class Looked:
    """The rows of evenly chosen clients, and numbers that equal rows share."""

    population: Population
    clients: Ints
    owner: Ints  # of each row, a place in `clients`
    rows: Ints  # ascending
    x: Hashes
    y: Hashes

    @classmethod
    def at(cls, population: Population, features: list[int]) -> Looked:
        """The findings in these features."""
        clients = spread(np.arange(len(population)), population.sizes(), ROWS)
        sizes = population.sizes(clients)
        rows = np.repeat(population.offsets[clients] - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
        chosen = torch.from_numpy(rows)
        x, y = population.columns["x"][chosen][:, sorted(features)], population.columns["y"][chosen][:, None]
        owner = np.repeat(np.arange(len(clients)), sizes)
        return cls(population, clients, owner, rows, _hashes(x.numpy()), _hashes(y.numpy()))

    def ids(self) -> Iterator[Check]:
        """Whole numbers that may be identifiers instead of quantities: row numbers, client numbers, codes, years."""
        about, clients, codes = self.population.about, len(self.clients), []
        for place in np.flatnonzero(about.get("numeric", [])).tolist():
            name = about["features"][place]
            values = self.population.columns["x"][:, place][torch.from_numpy(self.rows)].numpy().astype(np.float64)
            there = ~np.isnan(values)
            values, owner = values[there], self.owner[there]
            if not len(values) or (values != np.round(values)).any():
                continue
            different, code = np.unique(values, return_inverse=True)
            count, width = len(different), different[-1] - different[0] + 1
            named = bool(_NAMED.search(name))
            advice = "and is taken as a number; if it is an id, leave it out (--features)."
            if len(values) >= 50 and count >= 0.9 * len(values) and (named or width <= 2 * len(values)):
                yield Check(
                    "id", "note",
                    f"The column {name} has a different whole number in nearly every row ({count:,} different numbers "
                    f"in {len(values):,} rows) {advice}",
                )  # fmt: skip
            elif count == clients >= 5 and (named or width <= 2 * clients) and _one_each(owner, code, clients):
                yield Check("id", "note", f"The column {name} numbers the clients, one whole number for each, {advice}")
            elif count >= 3 and len(values) >= 5 * count and (named or _gaps(different) or _years(different)):
                codes.append(f"{name} ({different[0]:.0f} to {different[-1]:.0f}, {count} different)")
        if codes:
            yield Check(
                "codes", "note",
                f"These columns look like codes or years, and are taken as numbers: {', '.join(codes)}. If the "
                "difference between two values means nothing, store the values as texts. Each then gets an indicator.",
            )  # fmt: skip

    def duplicates(self, split: Split) -> Iterator[Check]:
        """Finds query rows that equal a training row in every value, more often than by chance."""
        query = self._places([split.test.query])
        known = self._places([split.train, split.test.support])
        if not len(query) or not len(known):
            return
        both = self.x * np.uint64(3) + self.y
        alike = _counts(self.x[known], self.x[query])  # training rows of the same features
        agreeing = _counts(both[known], both[query])
        usual = _counts(self.y[known], self.y[query]) / len(known)  # how frequent the row's target is
        if not _are_copies(alike, agreeing, usual, max(5, 0.01 * len(query))):
            return
        share = float((agreeing > 0).mean())
        yield Check(
            "duplicates", "serious" if share >= 0.05 else "note",
            f"{_percent(share)} % of the test rows are training rows as well, with the same features and target. A "
            "model that remembers training rows has too good a result. Remove rows that occur twice from the table.",
        )  # fmt: skip

    def same_clients(self) -> Iterator[Check]:
        """Finds clients with the same rows in any order (at least three different ones), more often than by chance."""
        both = _mixed(self.x * np.uint64(3) + self.y)
        _, row = np.unique(both, return_inverse=True)
        pairs = np.unique(self.owner * len(row) + row) // len(row)
        varied = np.bincount(pairs, minlength=len(self.clients)) >= 3
        if not varied.any():
            return
        frequency = _counts(self.y, self.y) / len(self.y)
        x, whole = np.zeros((2, len(self.clients)), np.uint64)
        np.add.at(x, self.owner, self.x)
        np.add.at(whole, self.owner, both)
        usual = np.exp(np.bincount(self.owner, np.log(frequency), minlength=len(self.clients)))
        x, whole, usual = x[varied], whole[varied], usual[varied]
        twins = _counts(whole, whole) - 1
        if not _are_copies(_counts(x, x) - 1, twins, usual, 1):
            return
        same = twins > 0
        first = np.flatnonzero(whole == whole[same][0])[:2]
        shown = " and ".join(str(self.population.ids[int(place)]) for place in self.clients[varied][first])
        yield Check(
            "same clients", "serious",
            f"{int(same.sum()):,} clients have exactly the rows of another client, so one is tested on rows that "
            "another was trained on. Check that the client column is the right one.",
            shown,
        )  # fmt: skip

    def _places(self, parts: list[Rows]) -> Ints:
        """Where the rows of these parts lie among those looked at."""
        rows = [part.of(np.intersect1d(part.clients, self.clients))[0] for part in parts]
        return np.searchsorted(self.rows, np.unique(np.concatenate(rows)))


def _are_copies(alike: Ints, agreeing: Ints, usual: Floats, least: float) -> bool:
    """Whether equal features come with equal targets as often as only copies do.

    alike: how many others have the same features; agreeing: how many of them the same target, too; usual: how frequent
    a thing's target is, which is the share of the others that would agree by chance.
    """
    equal = alike > 0
    chance = float(usual[equal].sum())
    surplus = float((agreeing[equal] / alike[equal]).sum()) - chance
    return surplus > least and surplus >= AGREEING * (int(equal.sum()) - chance)


def _one_each(owner: Ints, code: Ints, clients: int) -> bool:
    """Whether every client has exactly one code."""
    return len(np.unique(owner * clients + code)) == clients


def _gaps(different: Floats) -> bool:
    """Whether these are few numbers with several digits and large gaps, none round: 1101, 1102, 2301."""
    few = len(different) <= 200 and different[0] >= 1000 and different[-1] < 1e6
    sparse = different[-1] - different[0] + 1 > 2 * len(different)
    return bool(few and sparse and (different % 10 == 0).mean() < 0.5)


def _years(different: Floats) -> bool:
    return bool(different[0] >= 1800 and different[-1] <= 2100)


def _hashes(values: NDArray[Any]) -> Hashes:
    """A number for each row that equal rows share."""
    if values.dtype.kind == "f":  # of the two zeros of floats one is taken, and one NaN
        values = np.where(np.isnan(values), np.nan, values + 0.0).astype(np.float64).view(np.uint64)
    total = np.zeros(len(values), np.uint64)
    for part in values.T:
        total = _mixed(total * np.uint64(0x9E3779B97F4A7C15) + part.astype(np.uint64))
    return total


def _mixed(values: Hashes) -> Hashes:
    """The finalizer of SplitMix64 (Steele et al. 2014): sums of such numbers tell sets apart."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _counts(among: Hashes, of: Hashes) -> Ints:
    """The frequency of each of these values among the others."""
    known, times = np.unique(among, return_counts=True)
    place = np.minimum(np.searchsorted(known, of), len(known) - 1)
    return np.where(known[place] == of, times[place], 0)


# Few rows


def _few(split: Split) -> Iterator[Check]:
    """Warns about too few rows or clients for a reliable answer."""
    trained, tested = split.test.support.sizes(), split.test.query.sizes()
    if len(tested) < 6:
        yield Check(
            "few rows", "serious",
            f"{len(tested)} clients are tested. With fewer than six clients, no test can tell a difference from chance "
            "(at 5 %).",
        )  # fmt: skip
    scarce = (trained < 3) | (tested < 2)
    if len(tested) and scarce.mean() > 0.5:
        yield Check(
            "few rows", "serious" if tested.sum() < 100 else "note",
            f"{_percent(float(scarce.mean()))} % of the clients have fewer than three rows to learn from or fewer than "
            f"two to be tested on ({int(tested.sum()):,} test rows in all): too few to judge single clients.",
        )  # fmt: skip


def _percent(share: float) -> str:
    """A percentage to a tenth, and never 100 if it is less."""
    return "100" if share == 1 else f"{min(100 * share, 99.9):.1f}".removesuffix(".0")
