"""`register`: gives short names to your own methods, sources, metrics, losses and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from bespoke.callbacks import CALLBACKS
from bespoke.data.partition import PARTITIONERS
from bespoke.data.sources.registry import SOURCES
from bespoke.errors import UserError, unknown
from bespoke.federation.cohorts import SAMPLERS
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.methods.parts.server_optimizer import OPTIMIZERS
from bespoke.models.own_loss import LOSSES
from bespoke.models.own_metric import METRICS, Metric
from bespoke.registry import Registry

REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (METHODS, SOURCES, METRICS, LOSSES, OPTIMIZERS, PARTITIONERS, SAMPLERS, CALLBACKS)
}
T = TypeVar("T")


def register(thing: T | None = None, *, kind: str = "", name: str = "") -> T | Callable[[T], T]:
    """Gives a short name to a method, or with `kind` to anything else that has a registry; returns the object.

        @bespoke.register                                        # under the name on its card
        class FedPer(Method): ...

        @bespoke.register(kind="source", name="clinics")
        def load(year: int = 2024) -> Population: ...

    The name is known in this process. Files hold "package.module:name" instead.
    """
    if thing is None:
        return lambda given: register(given, kind=kind, name=name)  # type: ignore[return-value]
    if not kind and isinstance(thing, type) and issubclass(thing, Method):
        kind = METHODS.kind
    if not kind and isinstance(thing, Metric):
        kind = METRICS.kind
    if kind not in REGISTRIES:
        if not kind:
            raise UserError(f"register({thing!r}): say what it is: kind = one of {', '.join(sorted(REGISTRIES))}")
        raise unknown("kind", kind, REGISTRIES, "register")
    card = getattr(thing, "card", None)
    REGISTRIES[kind].add(thing, name or getattr(card or thing, "name", "") or getattr(thing, "__name__", ""))
    return thing
