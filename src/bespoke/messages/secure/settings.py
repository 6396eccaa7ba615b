"""The [secure] table of an experiment, and the combinations that are refused with secure sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError, needs_extra

if TYPE_CHECKING:
    from bespoke.messages.robust.settings import AttackConfig, RobustConfig
    from bespoke.messages.transform import Transform
    from bespoke.method import Method


MOST_CLIENTS = 500  # in a round: the work grows with the square of this, for shares with the third power


class SecureConfig(BaseModel):
    """Sums of masked numbers, so that the server learns only the sums."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    sums: bool = Field(default=False, description="the server adds up masked messages and learns their sum alone")
    threshold: float = Field(
        default=0.6, gt=0.5, le=1, description="part of a round's clients that have to stay to its end"
    )
    least: int = Field(default=3, ge=3, description="no sum is over fewer clients")
    bits: int = Field(default=32, ge=8, le=52, description="binary digits behind the point of what is sent")


def check_secure(
    secure: SecureConfig, where: str, *, robust: RobustConfig | None, attack: AttackConfig | None,
    compresses: Sequence[str], dropout: float, over_select: float, sampling: str, private: bool,
) -> None:  # fmt: skip
    """Refuses combinations; `compresses` are the keys of [transform] that make messages smaller."""
    if not secure.sums:
        return
    if robust is not None:
        raise UserError(
            f"{where}: robust.rule = {robust.rule!r} asks for more than one sum of plain messages, and secure sums "
            "give the server one sum; leave one of the two out, or bound changes on the clients: [transform] clip"
        )
    if attack is not None and attack.kind == "little-is-enough":
        raise UserError(
            f"{where}: attack.kind = {attack.kind!r} makes messages of other attackers' messages after they were sent, "
            "which secure.sums hides; use another kind, or leave [secure] out"
        )
    if compresses:
        raise UserError(
            f"{where}: transform.{compresses[0]} saves nothing under secure.sums: masked numbers are dense, with eight "
            "bytes each; leave one of the two out"
        )
    stay = (1 - dropout) / over_select
    if stay < secure.threshold:
        causes = {"dropout": dropout > 0, "over_select": over_select > 1}
        named = " and ".join(f"cohort.{name}" for name, given in causes.items() if given)
        raise UserError(
            f"{where}: {named} leave about {stay:.0%} of a round's clients, and secure.threshold = "
            f"{secure.threshold:g} needs {secure.threshold:.0%}: rounds would be refused; change one of them"
        )
    varying = {"dropout": dropout > 0, "over_select": over_select > 1, "sampling = 'poisson'": sampling == "poisson"}
    if private and any(varying.values()):
        # one client more or less can decide whether there is a sum, which changes it by more than one message
        named = ", ".join(f"cohort.{name}" for name, given in varying.items() if given)
        raise UserError(
            f"{where}: {named} with [privacy] and secure.sums: a round of too few clients has no sum, and one client "
            "more or less then decides whether there is one, which the privacy account does not hold; use a cohort of "
            "a fixed size, without dropout, or leave one of the two tables out"
        )
    if find_spec("cryptography") is None:
        raise needs_extra("cryptography", "secure", "secure.sums = true")


def masked(method: Method, sent: Mapping[str, Reveal]) -> dict[str, str]:
    """What the server learns of each field under secure sums: MASKED for its sum; MASKED_ROWS for fields with a row per
    cluster, because a row with one client shows that client's part.
    """
    rows = {name for name, field in method.uplink.items() if field.rows}
    return {name: "MASKED_ROWS" if name in rows else "MASKED" for name in sent}


def check_each(methods: Sequence[Method], transforms: Sequence[Transform]) -> None:
    """Refuses settings that show the server each client's values."""
    for method in methods:
        each = [name for name, kind in reveals(method.uplink).items() if kind is Reveal.EACH]
        if method.trains and each:
            raise UserError(
                f"secure.sums = true, and the server of {method.card.name} has to see every client's "
                f"{', '.join(each)}; leave [secure] out, or use a method that sends sums, such as fedavg"
            )
    for transform in transforms:
        each = [name for name, kind in transform.reveals.items() if kind is Reveal.EACH]
        if each:
            raise UserError(
                f"secure.sums = true, and with {transform.title} the server sees every client's {', '.join(each)}; "
                "leave one of the two out"
            )


def check_cohorts(secure: SecureConfig, cohort: int, contacted: int, groups: Mapping[str, int]) -> None:
    """Refuses rounds with too few clients from the start, or too many to simulate.

    contacted: clients of the largest round; groups: training clients by group, if each group has its own sum.
    """
    if contacted > MOST_CLIENTS:
        raise UserError(
            f"secure.sums with {contacted:,} clients in a round: every two of them agree on a key and share secrets, "
            f"which is simulated for at most {MOST_CLIENTS}; use a smaller cohort (cohort.size), and no method that "
            "needs all clients in every round"
        )
    if cohort < secure.least:
        raise UserError(
            f"{cohort} clients take part in a round, and secure.least = {secure.least}: a sum of fewer says too much "
            "about each; use a larger cohort (cohort.size)"
        )
    small = [f"{name!r} ({many})" for name, many in groups.items() if many < secure.least]
    if small:
        raise UserError(
            f"secure.least = {secure.least}, and groups have fewer training clients, whose sums say too much about "
            f"each: {', '.join(small[:10])}; put small groups together"
        )
