"""Typed experiment files (TOML). Unknown keys are refused, with the nearest known one."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from bespoke.errors import UserError, unknown
from bespoke.privacy.settings import PrivacyConfig, check_privacy, uniform_weights
from bespoke.robust.settings import AttackConfig, RobustConfig, check_attack, check_robust, equal_weights

if TYPE_CHECKING:
    from bespoke.robust.aggregator import Aggregator
    from bespoke.selection import Acceptance


MOST_SEEDS = 1000
SINGLE = 3.4028234e38  # the largest number of single precision
AUTO = "auto"  # rounds: until validation stops improving
TEXT = ("context", "tokenizer", "lower", "length", "vocabulary", "shortest", "end")  # of [data]: how texts are read
FEATURES = ("tokenizer", "lower", "length", "vocabulary")  # of these, what features of a text go by


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataConfig(_Strict):
    source: str | None = Field(default=None, description="a built-in source; see `bespoke data`")
    table: str | None = Field(
        default=None, description="a CSV, JSON Lines or Parquet file of your own, or a folder of texts by client"
    )
    client: str | None = Field(default=None, description="the table's client column (several: joined by commas)")
    target: str | None = Field(default=None, description="the table's target column")
    group: str | None = Field(default=None, description="the table's group column")
    time: str | None = Field(default=None, description="the table's time column, for splits by time")
    text: str | None = Field(
        default=None, description="the table's column of texts: the next word is predicted unless there is a target"
    )
    context: str | None = Field(default=None, description="the table's column of what was around a text")
    tokenizer: str | None = Field(
        default=None, description="words (default), characters, a Hugging Face tokenizer's folder, or model's"
    )
    lower: bool | None = Field(default=None, description="texts are lower-cased; default: words and characters are")
    length: int | None = Field(
        default=None, ge=1, description="tokens beyond which a text is cut into segments; default 32, 128 characters"
    )
    vocabulary: int | None = Field(
        default=None, ge=1, description="most words that are known, by training rows; default 10,000"
    )
    shortest: int | None = Field(default=None, ge=1, description="texts of fewer tokens are left out; default 1")
    end: bool | None = Field(default=None, description="the end of a text is predicted and counted; default true")
    features: list[str] | None = Field(default=None, description="the table's feature columns (default: all others)")
    task: Literal["regression", "classification"] | None = Field(
        default=None, description="default: inferred from the target"
    )
    schema_file: str | None = Field(
        default=None, alias="schema", description="a file that declares the table's columns, classes and ranges public"
    )
    options: dict[str, Any] = Field(default={}, description="options of the source")
    standardize: Literal["global", "client", "none"] | None = Field(
        default=None, description="default: what the source advises"
    )


class SplitConfig(_Strict):
    protocol: Literal["cross-silo", "cross-device"] = "cross-silo"
    fractions: tuple[float, float, float] = Field(
        default=(0.6, 0.2, 0.2), strict=False, description="cross-silo: train, validation, query rows"
    )
    held_out: tuple[float, float] = Field(
        default=(0.15, 0.2), strict=False, description="cross-device: fractions of validation and test clients"
    )
    adapt: float = Field(
        default=0.5, gt=0, lt=1, description="cross-device: fraction of a held-out client's rows it adapts on"
    )
    own_validation: float = Field(
        default=0.0, ge=0, lt=1, description="cross-device: rows a test client chooses on by itself"
    )
    order: Literal["random", "time", "stored", "motley"] = "random"
    seed: int | None = Field(default=None, description="default: the experiment's seed")


class ModelConfig(_Strict):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    name: str = "auto"

    @property
    def pretrained(self) -> str:
        """The pretrained model that stays as it is; empty if the model is trained."""
        named = (self.model_extra or {}).get("pretrained")
        return named if self.name == "frozen" and isinstance(named, str) else ""


class CohortConfig(_Strict):
    size: int | None = Field(default=None, ge=1, description="clients per round; default: all up to 200, else 100")
    sampling: Literal["uniform", "poisson", "round-robin", "importance", "full"] = "uniform"
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability that a contacted client never answers")
    over_select: float = Field(
        default=1.0, ge=1, le=1e6, description="contact this many times as many clients, keep the first to report"
    )
    straggle: float = Field(default=0.0, ge=0, description="spread of the clients' speeds (of the logarithm)")


class EngineConfig(_Strict):
    kind: Literal["auto", "looped", "vectorized"] = "auto"
    chunk: int | None = Field(default=None, ge=1, description="clients vectorized at a time")
    workers: int | None = Field(default=None, ge=0, description="worker processes; 0: in this process")


class TransformConfig(_Strict):
    clip: float | None = Field(default=None, gt=0, description="largest norm of what a client sends as `delta`")
    top_k: float | None = Field(
        default=None, gt=0, le=1, description="part of the entries that travel, the largest; the rest waits its turn"
    )
    quantize: Literal["stochastic", "nearest"] | None = Field(
        default=None, description="entries travel in eight bits, rounded so"
    )


class ExperimentConfig(_Strict):
    label: str = ""
    seed: int = 0
    metric: str | None = Field(default=None, description="default: the task's first")
    evaluate_every: int = Field(
        default=0, ge=0, description="rounds between points of the learning curve; 0: ten in all"
    )
    safe_steps: bool = Field(
        default=False,
        description="no step overshoots: rates are bounded by a client's own curvature (linear), gradients clipped",
    )
    watched: int = Field(default=200, ge=1, description="validation clients scored for the learning curve, at most")
    data: DataConfig = DataConfig(source="chem97")
    split: SplitConfig = SplitConfig()
    model: ModelConfig = ModelConfig()
    cohort: CohortConfig = CohortConfig()
    engine: EngineConfig = EngineConfig()
    transform: TransformConfig = TransformConfig()
    privacy: PrivacyConfig | None = Field(default=None, description="clipping, noise and a budget; none without it")
    robust: RobustConfig | None = Field(default=None, description="how clients' changes become one; default: the mean")
    attack: AttackConfig | None = Field(default=None, description="clients that do harm, as part of the simulation")
    stage: list[dict[str, Any]] = Field(min_length=1, description="[[stage]] method, rounds, and the method's knobs")


class CompareConfig(_Strict):
    """The [compare] table of a file for `bespoke compare`."""

    methods: list[str] | None = Field(default=None, min_length=1)
    seeds: Any = Field(default=3, description="how many, or a list of them")
    rounds: int | Literal["auto"] = Field(
        default=60, description="training rounds; auto: until validation stops improving"
    )
    tune: bool = True
    preset: str | None = Field(default=None, description="where grid, knobs, entries, rounds come from if not given")
    tune_seeds: Any = Field(default=1, description="how many seeds a trial is run with, a list of them, or 'all'")
    knobs: dict[str, dict[str, Any]] = Field(default={}, description="fixed knobs by method")
    grid: dict[str, dict[str, Any]] = Field(default={}, description="knobs to try by method")
    accept: dict[str, Any] = Field(default={}, description="when a client takes its model: min_examples, margin")
    entries: dict[str, dict[str, Any]] = Field(
        default={}, description="methods in one setting each, by label: method, before (stages), rounds, knobs"
    )


class TuneConfig(_Strict):
    """The [tune] table of an experiment file, for `bespoke tune`."""

    space: dict[str, Any] = Field(default={}, description="what to try: lists, or {low, high, log} for Optuna")
    preset: str | None = Field(default=None, description="where the space comes from if none is given")
    seeds: Any = Field(default=1, description="how many seeds a trial is run with, or a list of them; the mean counts")
    optuna: bool = Field(default=False, description="search with Optuna's TPE instead of trying every combination")
    trials: int = Field(default=20, ge=1, description="Optuna: how many settings to try")
    pruner: Literal["median", "hyperband", "none"] = Field(default="median", description="Optuna: when to give up")


def _check_seeds(seeds: Any, where: str) -> None:
    listed = list(range(min(seeds, MOST_SEEDS + 1))) if type(seeds) is int else seeds
    if isinstance(listed, list) and len(listed) > MOST_SEEDS:
        raise UserError(f"{where} seeds = {seeds!r}: at most {MOST_SEEDS:,}")
    if not isinstance(listed, list) or not listed or any(type(seed) is not int for seed in listed):
        raise UserError(f"{where} seeds = {seeds!r}: how many, one or more, or a list of them")


def check_numbers(value: Any, where: str, key: str = "", finite: bool = False) -> None:
    """Refuse numbers that there is no room for: TOML's integers have 64 bits, models compute in single precision.

    `finite` is for values of any type; where a type is declared, it says by itself whether it takes infinity and NaN.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{where}: {key} = {_shortened(value)}: a whole number has to be below 2^63 = {2**63:,}")
    if isinstance(value, float) and (SINGLE < abs(value) < math.inf or (finite and not math.isfinite(value))):
        raise UserError(f"{where}: {key} = {value:g}: has to be a finite number below {SINGLE:.3g} (single precision)")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, entry in entries:
        check_numbers(entry, where, f"{key}.{name}" if key else str(name), finite)


def _shortened(value: int) -> str:
    return str(value) if abs(value) < 10**40 else f"a number of {value.bit_length():,} bits"


def _given(value: Any) -> Any:
    """The same without None, which stands for what is not given: TOML has no word for it."""
    if isinstance(value, dict):
        return {name: _given(entry) for name, entry in value.items() if entry is not None}
    return [_given(entry) for entry in value] if isinstance(value, list) else value


def check_compare(table: Any, where: str) -> CompareConfig:
    """Validate a [compare] table, or say what is wrong."""
    from bespoke.entries import check_entries
    from bespoke.methods import METHODS

    check_numbers(table, f"{where}: [compare]")
    try:
        found = CompareConfig.model_validate(table)
    except ValidationError as error:
        raise explain(error, CompareConfig, f"{where}: [compare]") from None
    _check_seeds(found.seeds, f"{where}: [compare]")
    if found.rounds != AUTO and int(found.rounds) < 1:
        raise UserError(f"{where}: [compare] rounds = {found.rounds}: it has to be one or more, or {AUTO!r}")
    check_entries(found.entries, where)
    known = {**METHODS, **found.entries}
    for key, names in (("methods", found.methods or []), ("knobs", found.knobs), ("grid", found.grid)):
        for name in names:
            if name not in known:
                raise unknown("method", name, known, f"{where}: [compare] {key}")
    if found.accept:
        check_acceptance(found.accept, f"{where}: [compare] accept")
    given = [found.tune_seeds] if type(found.tune_seeds) is int else found.tune_seeds
    if given != "all" and not (isinstance(given, list) and given and all(type(seed) is int for seed in given)):
        raise UserError(f"{where}: [compare] tune_seeds = {found.tune_seeds!r}: how many, a list of them, or 'all'")
    if type(found.tune_seeds) is int and found.tune_seeds < 1:
        raise UserError(f"{where}: [compare] tune_seeds = {found.tune_seeds}: one or more")
    return found


def check_tune(table: Any, where: str) -> TuneConfig:
    """Validate a [tune] table, or say what is wrong."""
    check_numbers(table, f"{where}: [tune]")
    try:
        found = TuneConfig.model_validate(table)
    except ValidationError as error:
        raise explain(error, TuneConfig, f"{where}: [tune]") from None
    _check_seeds(found.seeds, f"{where}: [tune]")
    return found


def read_config(path: Path, overrides: list[str] | None = None) -> ExperimentConfig:
    """Read an experiment file and apply `--set key=value` to it."""
    raw = read_experiment(path, overrides)
    raw.pop("tune", None)  # what `bespoke tune` is to try: a run has nothing to do with it
    return checked(raw, str(path))


def read_experiment(path: Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """An experiment file as it is, with `--set key=value` applied; not yet checked."""
    return overridden(read_toml(path), overrides)


def overridden(raw: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """The same tables with `--set key=value` applied, in place."""
    for override in overrides or []:
        _apply(raw, override)
    return raw


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file, or say why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"there is no experiment file {path}") from None
    except (IsADirectoryError, UnicodeDecodeError, PermissionError) as error:
        raise UserError(f"{path} cannot be read as a TOML file ({error})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no error of TOML's own
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(
            f"--set takes key=value, got {override!r}; for example --set cohort.size=50 or --set stage.0.lr=0.1"
        )
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    node: Any = raw
    for parent in parents:
        if isinstance(node, list):
            try:
                node = node[int(parent)] if parent.isdigit() else next(s for s in node if s.get("method") == parent)
            except (IndexError, StopIteration):
                known = ", ".join(f"{i} ({stage.get('method')})" for i, stage in enumerate(node))
                raise UserError(f"--set {override}: no stage {parent!r}; there are: {known}") from None
        else:
            node = node.setdefault(parent, {})
        if not isinstance(node, dict | list):
            raise UserError(f"--set {override}: {parent!r} is a value, not a table")
    if isinstance(node, list):
        raise UserError(f"--set {override}: name the stage and the knob, as in stage.0.lr=0.1")
    node[last] = value


def checked(raw: dict[str, Any], where: str) -> ExperimentConfig:
    """Validate an experiment, or say what is wrong, where, and what is allowed."""
    from bespoke.methods import METHODS

    check_numbers(raw, where)
    raw = _given(raw)
    if raw.get("privacy") is not None and isinstance(raw.get("stage"), list):
        stages = [uniform_weights(stage, METHODS) if isinstance(stage, dict) else stage for stage in raw["stage"]]
        raw = {**raw, "stage": stages}
    if raw.get("robust") is not None and isinstance(raw.get("stage"), list):
        stages = [equal_weights(s, METHODS, where) if isinstance(s, dict) else s for s in raw["stage"]]
        raw = {**raw, "stage": stages}
    try:
        config = ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise explain(error, ExperimentConfig, where) from None
    check_numbers(config.data.options, where, "data.options", finite=True)
    check_numbers(config.model.model_dump(), where, "model", finite=True)
    _check_data(config.data, where)
    _check_split(config.split, where)
    if config.privacy is not None:
        check_privacy(config.privacy, where, clip=config.transform.clip, keep=config.transform.top_k)
    if config.robust is not None:
        check_robust(config.robust, config.privacy, where)
    if config.attack is not None:
        check_attack(config.attack, where)
    for place, stage in enumerate(config.stage):
        _, _, _, aggregator, _ = check_stage(stage, f"{where}: stage {place}")
        if aggregator is not None and aggregator.name != "mean":
            _check_alone(config, f"{where}: stage {place}: aggregator = {aggregator.name!r}")
    return config


def _check_alone(config: ExperimentConfig, where: str) -> None:
    """Refuse what an aggregator that bounds changes does not go together with."""
    if config.privacy is not None:
        raise UserError(
            f"{where} beside [privacy]: the server would learn without noise how many clients were zeroed and clipped, "
            "which the privacy account does not hold; leave it out (aggregator = 'mean' where a preset names it) and "
            "use privacy.clip, with privacy.adaptive = true to follow a quantile"
        )
    if config.robust is not None:
        raise UserError(
            f"{where} beside robust.rule = {config.robust.rule!r}: both say how changes become one; leave one of the "
            "two out (aggregator = 'mean' where a preset names it)"
        )


def _check_data(data: DataConfig, where: str) -> None:
    if (data.source is None) == (data.table is None):
        raise UserError(f"{where}: [data] needs either source or table")
    folder = data.table is not None and Path(data.table).is_dir()
    if data.table is not None and not folder and not (data.client and (data.target or data.text)):
        raise UserError(
            f"{where}: [data] with a table needs client and target, the names of two of its columns (or client and "
            "text, to model texts)"
        )
    if data.text is None and not folder and (given := [name for name in TEXT if getattr(data, name) is not None]):
        raise UserError(f"{where}: [data] {', '.join(given)} describe texts; name their column as text")
    if data.target is None and (given := [name for name in ("features", "task") if getattr(data, name)]):
        raise UserError(f"{where}: [data] {', '.join(given)} need a target; without one the next word is predicted")
    asked = [name for name in TEXT if name not in FEATURES and getattr(data, name) is not None]
    if data.target is not None and asked:
        raise UserError(f"{where}: [data] {', '.join(asked)} are for predicting the next word, and there is a target")
    if data.table is not None and data.options:
        raise UserError(f"{where}: data.options are those of a source, and this is a table: {sorted(data.options)}")
    named = {**data.model_dump(), "schema": data.schema_file}
    columns = [n for n in ("client", "target", "group", "time", "text", "features", "task", "schema") if named[n]]
    if data.source is not None and columns:
        raise UserError(f"{where}: [data] {', '.join(columns)} describe a table, and {data.source!r} is a source")
    if data.features is not None and not data.features:
        raise UserError(f"{where}: data.features is empty; leave it out to use all other columns")


def _check_split(split: SplitConfig, where: str) -> None:
    train, _, query = split.fractions
    if abs(sum(split.fractions) - 1) > 1e-6 or min(split.fractions) < 0:
        raise UserError(f"{where}: split.fractions must be three numbers that sum to one, not {split.fractions}")
    if not (train and query):
        raise UserError(
            f"{where}: split.fractions = {split.fractions} leaves no rows to {'be tested' if train else 'train'} on; "
            "only the second, validation, may be zero"
        )
    if min(split.held_out) < 0 or sum(split.held_out) >= 1 or not split.held_out[1]:
        raise UserError(
            f"{where}: split.held_out = {split.held_out}: two fractions, of validation and of test clients; the second "
            "above zero, both together below one, for the rest of the clients train"
        )
    if split.own_validation >= split.adapt:
        raise UserError(
            f"{where}: split.own_validation = {split.own_validation} is taken from the rows a client adapts on: it has "
            f"to be less than split.adapt = {split.adapt}"
        )
    if split.order == "motley" and split.protocol == "cross-device":
        raise UserError(f"{where}: split.order = 'motley' is that of Motley's cross-silo code; use 'random' or 'time'")


def check_stage(
    stage: dict[str, Any], where: str
) -> tuple[str, int | str, Acceptance | None, Aggregator | None, dict[str, Any]]:
    """(method, rounds or "auto", acceptance, aggregator, knobs), validated against the method's own dataclass."""
    from bespoke.methods import METHODS

    knobs = dict(stage)
    name = knobs.pop("method", None)
    if name is None:
        raise UserError(f"{where} names no method; say method = ... with one of: {', '.join(sorted(METHODS))}")
    if not isinstance(name, str) or name not in METHODS:
        raise unknown("method", name, METHODS, where)
    method = METHODS[name]
    rounds = knobs.pop("rounds", 0 if not method.trains else None)
    if rounds != AUTO and (not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0):
        raise UserError(f"{where}: {name} needs rounds, a whole number of zero or more, or {AUTO!r}; found {rounds!r}")
    if rounds and not method.trains:
        raise UserError(f"{where}: {name} has no training rounds, it only makes personal models; leave rounds out")
    accept = knobs.pop("accept", None)
    if accept is not None:
        accept = check_acceptance(accept, f"{where}: accept")
    aggregator = knobs.pop("aggregator", None)
    if aggregator is not None:
        if not method.trains:
            raise UserError(
                f"{where}: aggregator = {aggregator!r}: {name} has no training rounds and sends nothing; give it to "
                "the stage that trains, or leave it out"
            )
        aggregator = check_aggregator(aggregator, f"{where}: aggregator")
    also = ("method", "rounds", "accept", "aggregator")
    return name, rounds, accept, aggregator, check_knobs(method, knobs, where, also)


def check_acceptance(table: Any, where: str) -> Acceptance:
    """When a client takes its personal model: `accept = {min_examples = 20, margin = 0.01}`, one of them or both."""
    from bespoke.selection import Acceptance

    if not isinstance(table, dict) or not table:
        raise UserError(f"{where} = {table!r}: a table of min_examples, margin, or both")
    return Acceptance(**check_knobs(Acceptance, table, where))


def check_aggregator(value: Any, where: str) -> Aggregator:
    """How clients' changes become their mean: "mean", "tff-robust", or a table of name, zeroing and clipping."""
    from bespoke.robust.aggregator import NAME, Aggregator

    if not isinstance(value, str | dict):
        raise UserError(f"{where} = {value!r}: a name, 'mean' or {NAME!r}, or a table of name, zeroing and clipping")
    found = Aggregator(**check_knobs(Aggregator, {"name": value} if isinstance(value, str) else value, where))
    if found.name != NAME and isinstance(value, dict) and set(value) != {"name"}:
        raise UserError(f"{where} = {value!r}: zeroing and clipping belong to name = {NAME!r}; give that name as well")
    if not found.zeroing and not found.clipping:
        raise UserError(f"{where} = {value!r}: without zeroing and clipping it is the plain mean; write 'mean'")
    return found


def check_knobs(kind: type, knobs: dict[str, Any], where: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Knobs of a dataclass as typed values; nested dataclasses become themselves. `also`: further keys."""
    check_numbers(knobs, where)
    hints = get_type_hints(kind, include_extras=True)
    settings: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for entry in fields(kind):
        if entry.name == "task" or not entry.init:
            continue
        if is_dataclass(hints[entry.name]):
            also = (*also, entry.name)
            if entry.name in knobs:
                inner = knobs[entry.name]
                if isinstance(inner, str):
                    inner = {"name": inner}
                if not isinstance(inner, dict):
                    raise UserError(f"{where}: {entry.name} = {inner!r}: it has to be a name or a table of knobs")
                inner_type: Any = hints[entry.name]
                nested[entry.name] = inner_type(**check_knobs(inner_type, inner, f"{where}: {entry.name}"))
            continue
        default = entry.default if entry.default is not MISSING else None
        hint, bounds = hints[entry.name], entry.metadata.get("bounds", {})
        if get_origin(hint) is tuple:  # TOML has lists only; bounds are those of every entry, and there has to be one
            each, *_ = get_args(hint)
            hint = tuple[Annotated[each, Field(**bounds)], ...]  # type: ignore[valid-type]
            bounds = {"strict": False, **({"min_length": 1} if bounds else {})}
        settings[entry.name] = (hint, Field(default=default, **bounds))
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model = create_model(f"{kind.__name__} knobs", __config__=strict, **settings)
    try:
        found = model.model_validate({k: v for k, v in knobs.items() if k not in nested})
    except ValidationError as error:
        raise explain(error, model, where, also) from None
    return {name: getattr(found, name) for name in found.model_fields_set} | nested


def explain(error: ValidationError, model: type[BaseModel], where: str, also: tuple[str, ...] = ()) -> UserError:
    """The first thing wrong, in words: the key, the value found, what is allowed."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key, found, kind = ".".join(path), first["input"], first["type"]
    if kind == "extra_forbidden":
        holder: Any = model
        for part in path[:-1]:
            holder = holder.model_fields[part].annotation
            holder = next((kind for kind in get_args(holder) if kind is not type(None)), holder)  # a table or none
        return unknown("key", key, [*holder.model_fields, *also], where)
    if kind == "literal_error":
        words = re.findall(r"'([^']*)'", first["ctx"]["expected"])
        return unknown(key, found, words, where)
    if kind == "missing":
        if key == "stage":
            return UserError(f"{where} has no stage; add [[stage]] with method = ... and rounds = ...")
        return UserError(f"{where}: {key} is missing; found {found!r}")
    if key == "stage" and kind == "list_type":
        return UserError(f"{where}: stage = {found!r}: write [[stage]] in double brackets, once for every stage")
    said = first["msg"][:1].lower() + first["msg"][1:]
    for theirs, ours in (("input should", "it has to"), ("valid dictionary", "table"), ("valid tuple", "list"),
                         ("valid list", "list"), (" or instance of", "$")):  # fmt: skip
        said = said.replace(theirs, ours)
    return UserError(f"{where}: {key} = {found!r}: {said.split('$')[0]}")
