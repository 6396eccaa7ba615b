"""Records a user's own code as "package.module:name", so that every process can find it.

An experiment may use short names for a method, source, ..., which this process registered or an installed package
offers. A run folder must not depend on either.
"""

from __future__ import annotations

from typing import Any

from bespoke.data.partition import PARTITIONERS
from bespoke.data.sources.registry import SOURCES
from bespoke.federation.cohorts import SAMPLERS
from bespoke.methods import METHODS
from bespoke.methods.parts.server_optimizer import OPTIMIZERS
from bespoke.models import OFFERED
from bespoke.models.own_loss import LOSSES
from bespoke.models.own_metric import METRICS
from bespoke.plain import TomlTable
from bespoke.registry import Registry

# The places where an experiment names code: paths of keys; "*" is every table of a list.
_PLACES: tuple[tuple[tuple[str, ...], Registry[Any]], ...] = (
    (("stage", "*", "method"), METHODS),
    (("data", "source"), SOURCES),
    (("data", "options", "partition"), PARTITIONERS),
    (("cohort", "sampling"), SAMPLERS),
    (("model", "name"), OFFERED),
    (("model", "loss"), LOSSES),
)
# `partition` may be an option of another meaning in a source that is not ours; a model may be "auto", or an object
_OPEN = (PARTITIONERS, OFFERED)


def recorded(raw: TomlTable, where: str) -> TomlTable:
    """The same experiment with recorded names; an unknown name is refused."""
    for path, registry in _PLACES:
        raw = _with(raw, path, registry, where)
    if isinstance(raw.get("metric"), str):
        raw = {**raw, "metric": _metric(raw["metric"])}
    if isinstance(raw.get("metrics"), list):
        raw = {**raw, "metrics": [_metric(name) for name in raw["metrics"]]}
    stages = raw.get("stage")
    if isinstance(stages, list):
        raw = {**raw, "stage": [_optimizer(stage) for stage in stages]}
    return raw


def _with(node: Any, path: tuple[str, ...], registry: Registry[Any], where: str) -> Any:
    key, *rest = path
    if key == "*" and isinstance(node, list):
        return [_with(one, tuple(rest), registry, f"{where} {place}") for place, one in enumerate(node)]
    if not isinstance(node, dict) or key not in node:
        return node  # of a wrong form, which the checks report
    if rest:
        return {**node, key: _with(node[key], tuple(rest), registry, f"{where}: {key}")}
    named = node[key]
    if not isinstance(named, str) or (any(registry is one for one in _OPEN) and not registry.knows(named)):
        return node  # in a user's own source, the key may mean something else
    return {**node, key: registry.recorded(named, where)}


def _metric(named: Any) -> Any:
    """The recorded name of a metric; a metric of the task keeps its own name."""
    return METRICS.recorded(named, "metric") if isinstance(named, str) and METRICS.knows(named) else named


def _optimizer(stage: Any) -> Any:
    """A stage with the recorded name of its server optimizer, which may be the value itself or in a table."""
    server = stage.get("server") if isinstance(stage, dict) else None
    table = {"name": server} if isinstance(server, str) else server
    named = table.get("name") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(named, str) or not OPTIMIZERS.knows(named):
        return stage
    return {**stage, "server": {**table, "name": OPTIMIZERS.recorded(named, "server")}}
