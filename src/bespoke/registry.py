"""Registries: everything that bespoke knows by name, and three ways to add to it.

A method, data source, metric, ... of your own is named as "package.module:name"; or passed as an object from Python; or
has a short name, by `@bespoke.register` or as an entry point of an installed package. Files always record
"package.module:name", so that worker processes and later commands can import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from bespoke.errors import UserError, unknown
from bespoke.imported import entry_points, handed_over, imported, is_outside

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """The objects of one kind by name. As a mapping it has the built-in ones and the others that were used so far."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, T], check: Callable[[Any, str], T]) -> None:
        """`check`: returns the object found under a name if it is of this kind, or raises an error with the place."""
        self.kind, self.group, self.built_in, self._check = kind, group, built_in, check
        self._others: dict[str, T] = {}  # by "package.module:name"
        self._short: dict[str, str] = {}  # names given by `register`

    def recorded(self, given: Any, where: str) -> str:
        """The name by which every process finds an object, given as itself, by a short name or by that name."""
        if not isinstance(given, str):
            name = handed_over(given)
            self._others[name] = self._check(given, f"{where}: {name}")
            return name
        if given in self.built_in or given in self._others:
            return given
        if given in self._short:
            return self._short[given]
        if is_outside(given) or given.startswith("__main__:") or "<locals>" in given:
            return given
        offered = self.offered()
        if given in offered:
            return offered[given].partition(" ")[0]
        raise unknown(self.kind, given, [*self.built_in, *self._short, *offered], where)

    def find(self, given: Any, where: str) -> T:
        """The object of this name; an error if there is none, or if it is of another kind."""
        name = self.recorded(given, where)
        if name in self.built_in:
            return self.built_in[name]
        if name not in self._others:
            self._others[name] = self._check(imported(name, where), f"{where}: {name}")
        return self._others[name]

    def add(self, thing: Any, name: str) -> None:
        """Gives an object a short name in this process."""
        recorded = self.recorded(thing, "register")
        if name in self.built_in:
            raise UserError(f"register({recorded}): {name!r} is the name of a built-in {self.kind}; give it another")
        if self._short.get(name, recorded) != recorded:
            raise UserError(f"register({recorded}): {self._short[name]} has the name {name!r} already; give it another")
        self._short[name] = recorded

    def offered(self) -> dict[str, str]:
        """Short names that installed packages offer, and "package.module:name (package version)" of each."""
        found = {}
        for point in entry_points().get(self.group, ()):
            owner = f" ({point.dist.name} {point.dist.version})" if point.dist else ""
            found[point.name] = f"{point.value}{owner}"
        return {name: value for name, value in found.items() if name not in self.built_in}

    def origins(self) -> dict[str, str]:
        """Every name that is known without imports, with its origin; "" if it is built in."""
        registered = {name: f"{recorded} (registered)" for name, recorded in self._short.items()}
        return {**dict.fromkeys(self.built_in, ""), **self.offered(), **registered}

    def knows(self, name: str) -> bool:
        """Whether `find` would search for this name; nothing is imported."""
        here = name in self.built_in or name in self._others or name in self._short
        return here or is_outside(name) or name in self.offered()

    def __getitem__(self, name: str) -> T:
        if not self.knows(name):
            raise KeyError(name)
        return self.find(name, self.kind)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.built_in, *self._others])

    def __len__(self) -> int:
        return len(self.built_in) + len(self._others)
