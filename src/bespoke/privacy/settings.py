"""The [privacy] table of an experiment, and the combinations that are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.messages.robust.settings import SEE_EACH, RobustConfig
from bespoke.plain import TomlTable

if TYPE_CHECKING:
    from bespoke.method import Method

STATISTICS = 0.1
Multiplier = float | Literal["auto"]


class PrivacyConfig(BaseModel):
    """Clips what leaves clients and hides it by Gaussian noise."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    clip: float | dict[str, float] = Field(
        default=1.0, description="largest norm of what a client sends; a table: of each field by itself"
    )
    clipping: Literal["flat", "layer"] = Field(
        default="flat", description="flat: all entries together; layer: each layer to clip / sqrt(layers)"
    )
    adaptive: bool = Field(default=False, description="the bound follows a quantile of the clients' norms")
    quantile: float = Field(default=0.5, gt=0, lt=1, description="adaptive: the part of clients not clipped")
    rate: float = Field(default=0.2, gt=0, description="adaptive: how fast the bound follows")
    bit_noise: float | None = Field(
        default=None,
        gt=0,
        description="adaptive: noise on how many were clipped; default: cohort / 20, at least `noise`",
    )
    noise: Multiplier | None = Field(
        default=None, description="noise on the sum (central), in units of clip; auto: calibrated to epsilon"
    )
    local_noise: Multiplier | None = Field(
        default=None, description="noise on every client's message (local), in units of clip; auto: as above"
    )
    epsilon: float | None = Field(default=None, gt=0, description="the budget: training stops before it is exceeded")
    delta: float | None = Field(default=None, gt=0, lt=1, description="default: 1 / (training clients)^1.1")
    accountant: Literal["pld", "rdp"] = Field(default="pld", description="which bound on epsilon counts")
    reproducible: bool = Field(
        default=False, description="noise from the seed, the same in every run: for research, not private"
    )
    public_statistics: bool = Field(
        default=False, description="the means and deviations that standardize the data are public knowledge"
    )
    public_schema: bool = Field(
        default=False, description="categories, class names, missing values and first dates are public knowledge"
    )
    statistics: float | None = Field(
        default=None, ge=0, lt=1,
        description="part of epsilon for what the encoding learns from clients; default: 0.1 with a budget",
    )  # fmt: skip

    @property
    def share(self) -> float:
        """The share of the budget for learning statistics of the data, which is spent on noised sums only."""
        if self.epsilon is None or (self.local_noise is not None and self.noise is None):
            return 0.0
        return STATISTICS if self.statistics is None else self.statistics


def calibrated(privacy: TomlTable) -> bool:
    """Whether noise is calibrated to the budget, so that it depends on all planned rounds; `privacy` as in the file."""
    noise = privacy.get("noise"), privacy.get("local_noise")
    return "auto" in noise or noise == (None, None)


def check_privacy(privacy: PrivacyConfig, where: str, *, clip: float | None, keep: float | None) -> None:
    """Refuses combinations; `clip` and `keep` are those of [transform]."""
    named = {"noise": privacy.noise, "local_noise": privacy.local_noise}
    for name, value in named.items():
        if isinstance(value, float) and value <= 0:
            raise UserError(f"{where}: privacy.{name} = {value:g}: above zero, or leave it out for none")
    bounds = privacy.clip if isinstance(privacy.clip, dict) else {"": privacy.clip}
    for name, bound in bounds.items():
        if bound <= 0:
            raise UserError(f"{where}: privacy.clip{f'.{name}' if name else ''} = {bound:g}: a norm above zero")
    if not bounds:
        raise UserError(f"{where}: privacy.clip is an empty table; give a bound for each field, or one number for all")
    autos = [name for name, value in named.items() if value == "auto"]
    if len(autos) == 2:
        raise UserError(f"{where}: privacy.noise and local_noise are both 'auto': only one can be calibrated")
    if autos and privacy.epsilon is None:
        raise UserError(f"{where}: privacy.{autos[0]} = 'auto' is calibrated to privacy.epsilon, which is missing")
    if privacy.noise is None and privacy.local_noise is None and privacy.epsilon is None:
        raise UserError(
            f"{where}: [privacy] without noise hides nothing; give noise (on the sum), local_noise (on every client), "
            "or epsilon, to which noise is calibrated; only to clip: [transform] clip"
        )
    if privacy.statistics and privacy.epsilon is None:
        raise UserError(f"{where}: privacy.statistics = {privacy.statistics:g} is a part of epsilon, which is missing")
    if clip is not None:
        raise UserError(f"{where}: transform.clip = {clip:g} beside [privacy]: say it once, as privacy.clip")
    if keep is not None and privacy.local_noise is not None:
        raise UserError(
            f"{where}: transform.top_k = {keep:g} saves nothing beside privacy.local_noise, which fills every entry; "
            "leave one of them out"
        )
    if privacy.adaptive and (isinstance(privacy.clip, dict) or privacy.clipping == "layer"):
        raise UserError(f"{where}: privacy.adaptive needs one bound for all: a number as clip, and clipping = 'flat'")
    if isinstance(privacy.clip, dict) and privacy.clipping == "layer":
        raise UserError(f"{where}: privacy.clip by field and clipping = 'layer': choose one of the two")


def check_fields(privacy: PrivacyConfig, methods: Sequence[Method]) -> None:
    """Checks that bounds by field cover every field that leaves clients, in all stages."""
    if not isinstance(privacy.clip, dict):
        return
    sent = {name for method in methods for name, kind in reveals(method.uplink).items() if kind is not Reveal.COUNT}
    for problem, names in (("has no bound for", sent - set(privacy.clip)), ("bounds", set(privacy.clip) - sent)):
        if names:
            raise UserError(
                f"privacy.clip {problem} {', '.join(sorted(names))}; what leaves clients here is: "
                f"{', '.join(sorted(sent)) or 'nothing'}"
            )


def uniform_weights(stage: TomlTable, kinds: Mapping[str, type[Method]]) -> TomlTable:
    """A stage with the defaults of private runs: clients weigh alike, because their sizes are data too.

    A mixed model is estimated from moments, whose size clipping can bound.
    """
    from typing import get_args, get_type_hints

    kind = kinds.get(str(stage.get("method")))
    if kind is not None and "statistics" in kind.__dataclass_fields__ and "statistics" not in stage:
        return {**stage, "statistics": "moments"}
    if kind is None or "weighting" in stage or "weighting" not in kind.__dataclass_fields__:
        return stage
    allowed = get_args(get_type_hints(kind)["weighting"])
    return {**stage, "weighting": "uniform"} if "uniform" in allowed else stage


def check_robust_rule(robust: RobustConfig, privacy: PrivacyConfig, where: str) -> None:
    """Refuses robust rules that show the server more than the privacy account holds."""
    if robust.rule != "norm-bound":
        seen = "every client's message" if robust.rule in SEE_EACH else "several sums a round"
        raise UserError(
            f"{where}: robust.rule = {robust.rule!r} shows the server {seen}, which the privacy account does not hold; "
            "with [privacy] use rule = 'norm-bound', which privacy.clip then does, or leave one of the two out"
        )
    if robust.bound == "auto" and not privacy.adaptive:
        raise UserError(
            f"{where}: robust.bound = 'auto' follows the clients' norms, which [privacy] has to hide; use "
            "privacy.adaptive = true, which follows their median privately, or give robust.bound = privacy.clip"
        )
    if robust.bound != "auto" and robust.bound != privacy.clip:
        raise UserError(
            f"{where}: robust.bound = {robust.bound:g} and privacy.clip = {privacy.clip}: under [privacy] they are the "
            "same bound; give both the same number"
        )
