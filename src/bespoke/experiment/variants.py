"""The entries of a comparison: methods, each possibly in several settings with labels of their own.

    [compare.entries.warm]
    method = "hypcluster"
    before = [{ method = "ensemble", rounds = 100 }]
    rounds = 400
    k = 3

A stage of `before` gets those knobs of the entry that its method has and that it does not set itself: here k, and a
learning rate that is tuned. With `after = LABEL`, the entry starts from another entry's tuned model instead, whose
stages are trained once for both:

    [compare.entries.group-fl]
    method = "group-fl"
    after = "clustered-fl"

An entry without either is prepared as its method declares (`prepared`): HypCluster starts from an ensemble with a third
of the rounds. `before = []` is a cold start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from bespoke.errors import UserError, unknown
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.plain import ByMethod, Knobs, TomlTable

PREPARATION = 1 / 3  # share of the rounds of an entry whose method declares a preparation
UNCOUNTED = 20  # rounds of preparation if the entry has rounds = "auto"
LABEL = re.compile(r"\w[\w .+-]*")  # also the name of a folder


@dataclass(frozen=True)
class Entry:
    """A method in one setting."""

    label: str
    method: type[Method]
    named: str  # the method in experiment files
    before: tuple[TomlTable, ...] | None = None  # earlier stages, instead of the method's own
    follows: str | None = None  # the entry from whose model it starts, instead of the method's own
    knobs: Knobs = field(default_factory=dict)  # fixed; `rounds` may be among them

    @classmethod
    def of(cls, label: str, entries: ByMethod) -> Entry:
        """The entry of this label. A label that is not listed is a method with its defaults."""
        given = dict(entries.get(label, {"method": label}))
        named = METHODS.recorded(given.pop("method"), f"entry {label!r}")
        before, follows = given.pop("before", None), given.pop("after", None)
        method = METHODS.find(named, f"entry {label!r}")
        return cls(label, method, named, None if before is None else tuple(before), follows, given)

    @property
    def title(self) -> str:
        return title(self.method) if self.label == self.method.card.name else self.label

    @property
    def after(self) -> str:
        """The entry from whose model this one starts, unless it lists its own earlier stages."""
        if self.follows is not None:
            return self.follows
        return self.method.card.after if self.before is None else ""

    def tried(self, grid: ByMethod, exact: bool = False) -> Knobs:
        """The values to tune: the grid of the label, of the method, or the method's own, without fixed knobs."""
        own = self.method.card.tunes_exact if exact else self.method.card.tunes
        found: Knobs = grid.get(self.label, grid.get(self.named, own))
        return {knob: values for knob, values in found.items() if knob not in self.knobs}

    def stages(self, knobs: Knobs, rounds: int | str) -> list[TomlTable]:
        """The entry's stages, earlier ones first; `rounds` is the default."""
        own: TomlTable = {
            "method": self.named,
            **({"rounds": rounds} if self.method.trains else {}),
            **knobs,
        }
        before = self.before or ()
        if self.before is None and self.follows is None and hasattr(self.method, "prepared"):
            first, own = self.method.prepared(own)
            total, counted = own["rounds"], type(own["rounds"]) is int
            early = round(total * PREPARATION) if counted else UNCOUNTED
            if early:  # both stages together have the rounds of any other method
                before = ({"method": first, "rounds": early},)
                own = {**own, "rounds": total - early if counted else total}
        stages = []
        for stage in before:
            kind = METHODS[stage["method"]]
            common = {knob: own[knob] for knob in (entry.name for entry in fields(kind)) if knob in own}
            stages.append({**({"rounds": rounds} if kind.trains else {}), **common, **stage})
        return [*stages, own]


def title(method: type[Method]) -> str:
    """The printed name of a method: the title on its card, or the name of its class."""
    return method.card.title or method.__name__


def check_entries(entries: ByMethod, where: str, table: str = "compare.entries") -> None:
    """Labels that can be folders, methods that exist; knobs are checked with the experiment."""
    for label, given in entries.items():
        place = f"{where}: [{table}.{label}]"
        if not LABEL.fullmatch(label):
            raise UserError(f"{place}: a label consists of letters, digits, spaces and any of _ . + -")
        before = given.get("before", [])
        if not isinstance(before, list) or not all(isinstance(stage, dict) for stage in before):
            raise UserError(f"{place}: before = {before!r}: a list of stages, as in [{{ method = ..., rounds = ... }}]")
        for stage in (given, *before):
            if "method" not in stage:
                raise UserError(f"{place} names no method; say method = ... with one of: {', '.join(sorted(METHODS))}")
            if not isinstance(stage["method"], str):
                raise unknown("method", stage["method"], METHODS, place)
            METHODS.find(stage["method"], place)
        if "after" in given:
            _check_after(label, entries, place)
        if label in METHODS and label != given["method"]:
            raise UserError(f"{place}: {label!r} is the name of another method than {given['method']!r}; rename it")


def labelled(table: TomlTable, where: str) -> TomlTable:
    """A [compare] table in which users' own methods are entries, under the names on their cards."""
    listed, entries = table.get("methods"), table.get("entries") or {}
    if not isinstance(listed, list | tuple) or not isinstance(entries, dict):
        return table  # the check reports the mistake
    known = [n for n in listed if isinstance(n, str) and n not in METHODS.built_in and n not in entries]
    others = {name: METHODS.recorded(name, where) for name in known if METHODS.knows(name)}
    labels = {name: METHODS.find(named, where).card.name for name, named in others.items()}
    added: ByMethod = {}
    for name, label in labels.items():
        taken = {**entries, **added}.get(label, {"method": others[name]})
        if not isinstance(taken, dict) or taken.get("method") != others[name]:
            raise UserError(f"{where}: {name} and another method are both called {label!r}; name one as an entry")
        added[label] = {"method": others[name]}
    labels |= {others[name]: label for name, label in labels.items()}
    renamed = {
        key: {labels.get(name, name): entry for name, entry in table[key].items()}
        for key in ("knobs", "grid")
        if isinstance(table.get(key), dict)
    }
    methods = [labels.get(name, name) if isinstance(name, str) else name for name in listed]
    return {**table, **renamed, "methods": methods, "entries": {**added, **entries}}


def _check_after(label: str, entries: ByMethod, place: str) -> None:
    """Checks `after`: it names another entry or method, stands alone, and forms no cycle."""
    after = entries[label]["after"]
    if "before" in entries[label]:
        raise UserError(f"{place}: after = {after!r} and before: give one of them; both define its earlier stages")
    if not isinstance(after, str) or (after and after not in {**METHODS, **entries}):
        raise unknown("entry", after, [*entries, *METHODS], f"{place} after")
    seen, at = [label], after
    while at:
        if at in seen:
            raise UserError(f"{place}: after leads in a circle: {' -> '.join([*seen, at])}")
        seen.append(at)
        given = entries.get(at, {"method": at})
        at = given.get("after", METHODS[given["method"]].card.after if "before" not in given else "")
