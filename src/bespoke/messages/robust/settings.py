"""The [robust] and [attack] tables of an experiment, and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from bespoke.declarations import Reveal, changes, reveals
from bespoke.errors import UserError
from bespoke.plain import TomlTable

if TYPE_CHECKING:
    from bespoke.declarations import Reveal
    from bespoke.method import Method

NORMS = "norms"  # the field with the norms of clients' messages
RuleName = Literal["median", "trimmed-mean", "krum", "multi-krum", "norm-bound", "geometric-median"]
AttackKind = Literal["label-flip", "scale", "noise", "sign-flip", "nan", "little-is-enough", "none"]
SEE_EACH = ("median", "trimmed-mean", "krum", "multi-krum")  # rules for which the server sees every message
BY_CLIENT = ("multi-krum", "norm-bound")  # rules that leave out or scale clients


class RobustConfig(BaseModel):
    """Robust aggregation: one change from many clients' changes, some of which may be malicious."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    rule: RuleName = Field(description="how clients' changes become one")
    f: int | float = Field(
        default=0.2, ge=0, description="krum, multi-krum: clients taken for bad, how many or (below 1) which part"
    )
    trim: float = Field(default=0.2, ge=0, lt=0.5, description="trimmed-mean: part left out at each end of every entry")
    bound: float | Literal["auto"] = Field(
        default="auto", description="norm-bound: largest norm of a change; auto: the cohort's median norm"
    )
    steps: int = Field(default=8, ge=1, description="geometric-median: exchanges of sums in a round")


class AttackConfig(BaseModel):
    """Simulated malicious clients, to measure their cost to honest clients."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: Annotated[AttackKind, BeforeValidator(lambda kind: "nan" if kind != kind else kind)] = Field(
        description="what they do; none: nothing, for comparison"
    )  # TOML has a number that is called nan
    clients: float | list[str] = Field(default=0.2, description="part of the training clients that attack, or ids")
    factor: float | None = Field(
        default=None,
        description="scale: 100 times; sign-flip: -1 times; noise: 10 times the change's norm; little-is-enough: the z "
        "of the paper",
    )


KNOBS = {"krum": ("f",), "multi-krum": ("f",), "trimmed-mean": ("trim",), "norm-bound": ("bound",),
         "geometric-median": ("steps",)}  # fmt: skip


def check_robust(robust: RobustConfig, where: str) -> None:
    """Refuses knobs that the rule does not have, and impossible values."""
    for name in sorted(robust.model_fields_set - {"rule", *KNOBS.get(robust.rule, ())}):
        owners = [rule for rule, knobs in KNOBS.items() if name in knobs]
        raise UserError(f"{where}: robust.{name} is a knob of {' and '.join(owners)}, and the rule is {robust.rule!r}")
    if isinstance(robust.bound, float) and robust.bound <= 0:
        raise UserError(f"{where}: robust.bound = {robust.bound:g}: a norm above zero, or 'auto'")
    if robust.f > 1 and robust.f != int(robust.f):
        raise UserError(f"{where}: robust.f = {robust.f:g}: a whole number of clients, or a part of them below 1")


def check_attack(attack: AttackConfig, where: str) -> None:
    """Refuses impossible attacks."""
    if isinstance(attack.clients, float) and not 0 < attack.clients < 1:
        raise UserError(f"{where}: attack.clients = {attack.clients:g}: a part of the clients between 0 and 1, or ids")
    if attack.clients == []:
        raise UserError(f"{where}: attack.clients is empty: name clients, or give a part of them")
    if attack.factor is not None and attack.kind in ("label-flip", "nan", "none"):
        raise UserError(f"{where}: attack.factor does nothing with kind = {attack.kind!r}; leave it out")


def check_methods(robust: RobustConfig, methods: Sequence[Method], cohort: int) -> None:
    """Refuses methods that send no change of a shared model, and rules that do not fit a method's server."""
    for method in methods:
        if not method.trains or not method.uplink:
            continue  # it sends nothing
        if not changes(method.uplink):
            raise UserError(
                f"[robust] makes one change of a shared model out of many, and {method.card.name} sends "
                f"{', '.join(method.uplink)}: no such change; leave one of the two out, or use fedavg"
            )
        each = [name for name in changes(method.uplink) if method.uplink[name].reveal is Reveal.EACH]
        if each and robust.rule not in BY_CLIENT:
            raise UserError(
                f"robust.rule = {robust.rule!r} gives one change, and {method.card.name} looks at every client's "
                f"{', '.join(each)}; use {' or '.join(map(repr, BY_CLIENT))}"
            )
    if robust.rule in ("krum", "multi-krum") and robust.f >= 1 and cohort < 2 * robust.f + 3:
        raise UserError(
            f"robust.f = {robust.f:g} with {cohort} clients a round: {robust.rule} needs at least 2 f + 3 = "
            f"{2 * int(robust.f) + 3}; use a smaller f or a larger cohort"
        )


def equal_weights(stage: TomlTable, kinds: Mapping[str, type[Method]], where: str) -> TomlTable:
    """A stage with the defaults under [robust]: clients weigh alike, because they report their sizes themselves."""
    kind = kinds.get(str(stage.get("method")))
    if kind is None or not kind.trains or "weighting" not in kind.__dataclass_fields__:
        return stage
    if "uniform" not in get_args(get_type_hints(kind)["weighting"]):
        return stage
    if stage.get("weighting", "uniform") == "examples":
        raise UserError(
            f"{where}: {stage['method']}.weighting = 'examples' with [robust]: a client could claim any number, so "
            "all count alike; leave weighting out"
        )
    return {**stage, "weighting": "uniform"}


def shown(method: Method, robust: RobustConfig | None) -> dict[str, Reveal]:
    """The fields that leave a client under a rule, and what the server learns of each."""
    declared, changed = reveals(method.uplink), changes(method.uplink)
    if robust is None or not changed:
        return declared
    if robust.rule in SEE_EACH:
        return {name: kind if kind is Reveal.COUNT else Reveal.EACH for name, kind in declared.items()}
    others = any(kind is not Reveal.COUNT and name not in changed for name, kind in declared.items())
    measured = others or (robust.rule == "norm-bound" and robust.bound == "auto")
    return {**declared, **({NORMS: Reveal.EACH} if measured else {})}
