"""Imports code outside of bespoke by its name "package.module:name", if the name is trusted.

An import executes code. So a name is imported only if the user gave it: on the command line, in the experiment file of
the command, or from Python. A name in a run folder or an export may come from another person. It is imported if the
user allows exactly this name (`bespoke --trust NAME`, `bespoke.trust(NAME)`, or the environment variable
BESPOKE_TRUST), or if an installed package offers it as an entry point of bespoke. Allowed names are in the environment,
so worker processes have them too.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from typing import Any

from bespoke.errors import UserError, unknown

TRUST = "BESPOKE_TRUST"
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_SCRIPT = ("__main__", "__mp_main__")
_log = logging.getLogger("bespoke")
_held: dict[str, Any] = {}  # objects that this program passed to bespoke, by their name in their module


def is_outside(name: object) -> bool:
    """Whether this is a name of the form "package.module:name"."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def trust(*names: str) -> None:
    """Allows this process and its children to import these names ("package.module:name")."""
    for name in names:
        if not is_outside(name):
            raise UserError(f"trust: {name!r} is not of the form 'package.module:name'")
    os.environ[TRUST] = ",".join(dict.fromkeys([*_allowed(), *names]))


def trust_named(given: Any) -> Any:
    """Allows every name of this form in a value from the user (a text, or tables and lists of texts); returns it."""
    trust(*filter(is_outside, _texts(given)))
    return given


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.items():
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _allowed() -> list[str]:
    return [name for name in os.environ.get(TRUST, "").split(",") if name]


@cache
def entry_points() -> dict[str, metadata.EntryPoints]:
    """The entry points of installed packages for bespoke, by group. They are read once."""
    found = metadata.entry_points()
    return {group: found.select(group=group) for group in found.groups if group.startswith("bespoke.")}


def imported(named: str, where: str) -> Any:
    """The object of this name. `where`: the file or argument that names it, for errors."""
    if named in _held:
        return _held[named]
    module, _, name = named.partition(":")
    if module in _SCRIPT or "<locals>" in named:
        raise UserError(f"{where}: {only_here(named)}")
    if not is_outside(named):
        raise UserError(f"{where}: {named!r} is not of the form 'package.module:name'")
    offered = {point.value for group in entry_points().values() for point in group}
    if named not in offered and named not in _allowed():
        raise UserError(
            f"{where} names code that is not part of bespoke, {named!r}. To import it is to run it, so it is not "
            f"imported unless you allow it: bespoke --trust {named} COMMAND ..., or {TRUST}={named}, or "
            f"bespoke.trust({named!r}) in Python. Do so if you know this code"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a file there never hides a package
    if module not in sys.modules:
        _log.info("importing %s, named by %s", module, where)
    try:
        home = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # a module that it imports is missing
            raise _failed(named, where, error) from error
        raise UserError(
            f"{where}: {named!r}: there is no module {error.name!r}. Modules are looked for in the current directory "
            f"({os.getcwd()}) and where Python finds packages: install it, or name its folder in PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(named, where, error) from error
    if not hasattr(home, name):
        public = [entry for entry in vars(home) if not entry.startswith("_")]
        raise unknown("name", name, public, f"the module {module!r} ({where})")
    return getattr(home, name)


def only_here(named: str) -> str:
    """Explains why no other process can import this object, and what to do."""
    return (
        f"{named!r} was defined in a script, a notebook or a function, so other processes and later commands cannot "
        f"import it. Put it into a module of its own, mine.py for example, and name it as 'mine:"
        f"{re.split('[:.]', named)[-1]}'"
    )


def announce() -> None:
    """Prints to stderr which modules are imported, and what named them."""
    handler = logging.StreamHandler()  # the current stderr, which is guarded
    handler.setFormatter(logging.Formatter("bespoke: %(message)s"))
    _log.handlers = [handler]
    _log.setLevel(logging.INFO)


def _failed(named: str, where: str, error: BaseException) -> UserError:
    module = named.partition(":")[0]
    *_, last = traceback.extract_tb(error.__traceback__)
    return UserError(
        f"{where}: {named!r}: the module {module!r} fails when it is imported: {type(error).__name__}: {error} "
        f"({last.filename}, line {last.lineno}); correct it"
    )


def handed_over(thing: Any) -> str:
    """Registers a class or function that the program passes to bespoke, and returns its name.

    Other processes and later commands import it by this name, if `importable(name)`.
    """
    name = f"{thing.__module__}:{thing.__qualname__}"
    _held[name] = thing
    if importable(name):
        trust(name)
    return name


def by_name(given: Any) -> Any:
    """The same text, tables and lists with every class and function replaced by its name: see `handed_over`."""
    if isinstance(given, dict):
        return {key: by_name(entry) for key, entry in given.items()}
    if isinstance(given, list | tuple):
        return [by_name(part) for part in given]
    return handed_over(given) if hasattr(given, "__qualname__") and hasattr(given, "__module__") else given


def importable(named: str) -> bool:
    """Whether other processes can import this name. Objects of a script, a notebook or a function cannot be."""
    module, _, name = named.partition(":")
    if not is_outside(named) or module in _SCRIPT:
        return False
    return named not in _held or getattr(sys.modules.get(module), name, None) is _held[named]


def bound_to_this_process(given: Any) -> list[str]:
    """The names of objects that the program passed to bespoke and that no other process can import."""
    return [name for name in _texts(given) if name in _held and not importable(name)]
