"""Values of calls on their way to another process of this program: tensors as arrays, rows without their population.

An answer travels as a pair: how the call ended, and what it gave or why it failed. What arrives is pickled by this
program alone: pipes to worker processes, and actors of a cluster that is trusted.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.splits import Rows
from bespoke.errors import RemoteLost, UserError, WorkerFailed
from bespoke.federation.partial import Partial
from bespoke.federation.work import ClientWork


class _Leaf(NamedTuple):
    """A tensor on its way: plain bytes, no shared-memory handles to leak."""

    array: NDArray[Any]


def portable(value: Any) -> Any:
    """The value with its tensors as arrays."""
    if isinstance(value, torch.Tensor):
        return _Leaf(value.detach().numpy())
    if isinstance(value, dict):
        return {name: portable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [portable(entry) for entry in value]
    if isinstance(value, Partial):
        value.sums, value.each = portable(value.sums), portable(value.each)
    return value


def restored(value: Any) -> Any:
    """The way back; tensors share the memory of the arrays that arrived."""
    if isinstance(value, _Leaf):
        return torch.as_tensor(value.array)
    if isinstance(value, dict):
        return {name: restored(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [restored(entry) for entry in value]
    if isinstance(value, Partial):
        value.sums, value.each = restored(value.sums), restored(value.each)
    return value


def rebound(value: Any, population: Population | None) -> Any:
    """Rows and work with another population: none on the way to a process, which has its own map of it."""
    if isinstance(value, Rows):
        return replace(value, population=population)  # type: ignore[arg-type]
    if isinstance(value, ClientWork):
        return replace(value, train=rebound(value.train, population))
    if isinstance(value, dict):
        return {name: rebound(entry, population) for name, entry in value.items()}
    return value


def outcome_of(carry_out: Callable[[], Any]) -> tuple[str, Any]:
    """How a call ended, and its answer or the text of its error."""
    try:
        return "fine", portable(carry_out())
    except UserError as error:
        return "refused", str(error)
    except RemoteLost as error:
        return "lost", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def answer_of(outcome: tuple[str, Any], name: str) -> Any:
    """The answer that the place `name` gave; if it was an error there, raises it here."""
    how, answer = outcome
    if how == "refused":
        raise UserError(answer)
    if how == "lost":
        raise RemoteLost(f"{name}: {answer}")
    if how == "failed":
        raise WorkerFailed(f"{name} failed:\n{answer}")
    return restored(answer)
