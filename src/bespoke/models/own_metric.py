"""A user's own metrics: one number for a client's rows, and which direction is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from bespoke.errors import UserError, unknown
from bespoke.registry import Registry

Better = Literal["higher", "lower"]
Function = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class Metric:
    """A score of a client's rows, by a function of (outputs, y).

    `outputs` has a line for each row (class scores; a regression's prediction, in the target's own units), and `y` the
    targets. NaN means that a client has no such score.
    """

    name: str  # in tables and reports
    function: Function
    better: Better

    def __post_init__(self) -> None:
        for name in ("__module__", "__qualname__", "__name__", "__doc__"):  # it is found where its function is
            object.__setattr__(self, name, getattr(self.function, name, None))

    def __call__(self, outputs: Tensor, y: Tensor) -> float:
        try:
            value = self.function(outputs, y)
        except Exception as error:
            raise UserError(
                f"the metric {self.name} fails on a client's {len(y)} rows: {type(error).__name__}: {error}; where it "
                "is not defined, it has to return NaN"
            ) from error
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"the metric {self.name} has to return a number for a client's rows, and returned {value!r}"
            ) from None

    def __reduce__(self) -> str:
        return str(getattr(self, "__qualname__"))  # noqa: B009  # worker processes import it


def metric(
    function: Function | None = None, *, better: Better, name: str = ""
) -> Metric | Callable[[Function], Metric]:
    """A metric of a function of (outputs, y): `better` says whether "higher" or "lower" values are better.

    @bespoke.metric(better="higher")
    def top2(outputs, y): return (outputs.topk(2).indices == y[:, None]).any(1).float().mean()
    """
    if better not in get_args(Better):
        raise unknown("direction", better, get_args(Better), "metric(better=...)")
    if function is None:
        return lambda given: Metric(name or given.__name__, given, better)
    return Metric(name or function.__name__, function, better)


def _checked(found: Any, where: str) -> Metric:
    if not isinstance(found, Metric):
        raise UserError(
            f"{where} does not say which direction is better: write @bespoke.metric(better='higher') or 'lower' above "
            f"the function; it is {found!r}"
        )
    if not found.name.isidentifier():
        raise UserError(f"{where}: the metric's name {found.name!r} has to be a word of letters, digits and _")
    return found


METRICS: Registry[Metric] = Registry("metric", "bespoke.metrics", {}, _checked)
