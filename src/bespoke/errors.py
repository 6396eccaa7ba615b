"""Exceptions without a traceback: a user's mistake (exit code 2), a process or a place that is gone (exit code 1)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A user's mistake: what is wrong, the value found, where, and what to do next."""


class WorkerFailed(RuntimeError):
    """A worker process raised or died. The message has its traceback, or how it died."""


class RemoteLost(WorkerFailed):
    """A place where clients live is gone, together with the state that it held."""


def unknown(kind: str, value: object, allowed: Iterable[object], where: str = "") -> UserError:
    """An error for a name that is not in a list, with the nearest name and the whole list."""
    names = sorted(str(name) for name in allowed)
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    place = f" in {where}" if where else ""
    names = [name if name.strip() and "," not in name else repr(name) for name in names]
    shown = ", ".join(names[:40]) + (f", ... ({len(names)} in all)" if len(names) > 40 else "")
    return UserError(f"unknown {kind} {value!r}{place}.{hint} Known: {shown or 'none'}")


def needs_extra(package: str, extra: str, purpose: str) -> UserError:
    """An error for an optional dependency that is not installed."""
    return UserError(f"{purpose} needs the package {package!r}; install it with: pip install 'bespoke-fl[{extra}]'")
