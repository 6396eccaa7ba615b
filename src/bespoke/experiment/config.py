"""The typed experiment file (TOML): its tables, keys, types and defaults. Unknown keys are refused.

reading.py reads a file, checks.py checks what types cannot express.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from bespoke.messages.robust.settings import AttackConfig, RobustConfig
from bespoke.messages.secure.settings import SecureConfig
from bespoke.plain import ByMethod, Knobs, TomlTable
from bespoke.privacy.settings import PrivacyConfig

MOST_SEEDS = 1000
MOST_PIXELS = 1024  # lines or columns of a picture
AUTO = "auto"  # rounds: until validation stops improving
TEXT = ("context", "tokenizer", "lower", "length", "vocabulary", "shortest", "end")  # of [data]: how texts are read
FEATURES = ("tokenizer", "lower", "length", "vocabulary")  # those of them for features of a text


T = TypeVar("T")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class DataConfig(_Strict):
    source: str | None = Field(default=None, description="a built-in source; see `bespoke data`")
    table: str | None = Field(
        default=None,
        description="a CSV, JSON Lines or Parquet file of your own, or a folder of texts or of pictures by client",
    )
    population: str | None = Field(
        default=None, description="a folder that bespoke.write_population or Population.save has written"
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
    size: int | list[int] | None = Field(
        default=None,
        description="pictures: lines and columns to resize to, or one number for both; default: as they are",
    )
    colour: bool | None = Field(default=None, description="pictures: in colour or grey; default: grey if all files are")
    schema_file: str | None = Field(
        default=None, alias="schema", description="a file that declares the table's columns, classes and ranges public"
    )
    options: Knobs = Field(default={}, description="options of the source")
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
    loss: str | None = Field(default=None, description="a loss of your own; default: that of the task")

    @property
    def pretrained(self) -> str:
        """The pretrained model that stays frozen; empty if the model is trained."""
        named = (self.model_extra or {}).get("pretrained")
        return named if self.name == "frozen" and isinstance(named, str) else ""


class CohortConfig(_Strict):
    size: int | None = Field(default=None, ge=1, description="clients per round; default: all up to 200, else 100")
    sampling: str = Field(
        default="uniform", description="uniform, poisson, round-robin, importance, full, or a sampler of your own"
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="probability that a contacted client never answers")
    over_select: float = Field(
        default=1.0, ge=1, le=1e6, description="contact this many times as many clients, keep the first to report"
    )
    straggle: float = Field(default=0.0, ge=0, description="spread of the clients' speeds (of the logarithm)")


class EngineConfig(_Strict):
    kind: Literal["auto", "looped", "vectorized"] = "auto"
    chunk: int | None = Field(default=None, ge=1, description="clients vectorized at a time")
    workers: int | None = Field(
        default=None, ge=0, description="worker processes, 0: in this process; on Ray: actors, default one a processor"
    )
    backend: Literal["auto", "processes", "ray"] | None = Field(
        default=None,
        description="where clients live: processes (of this machine), ray (actors of a cluster), or auto, the default: "
        "ray if there is an address",
    )
    address: str | None = Field(
        default=None, description="of a Ray cluster: auto, or host:port; without one Ray starts on this machine"
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$",
        description="where clients are computed: cpu, cuda (all GPUs), cuda:1 (one of them), mps (a GPU of Apple), or "
        "auto, the first of cuda, mps and cpu that is there",
    )
    precision: Literal["float32", "bf16"] = Field(
        default="float32",
        description="of the products in a network's training; parameters, sums and scores are float32 either way",
    )

    @property
    def on_ray(self) -> bool:
        """Whether clients live on a Ray cluster."""
        return self.backend == "ray" or (self.backend in (None, "auto") and self.address is not None)


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
    metric: str | None = Field(default=None, description="what choices and reports go by; default: the task's first")
    metrics: list[str] | None = Field(default=None, description="metrics of your own that are reported as well")
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
    callbacks: TomlTable | None = Field(default=None, description="who is told of the run, or ends its stages")
    secure: SecureConfig | None = Field(default=None, description="sums of masked messages; the server sees no others")
    stage: list[TomlTable] = Field(min_length=1, description="[[stage]] method, rounds, and the method's knobs")
    _checked: tuple[Any, tuple[Any, ...]] = PrivateAttr(default=(None, ()))  # the stages, and what they were read as

    def once_by_stage(self, read: Callable[[int, TomlTable], T]) -> tuple[T, ...]:
        """What `read` makes of each stage and its place. It is called once in a process; see stage.py."""
        stages, found = self._checked
        if stages is not self.stage:  # else a copy with other stages
            found = tuple(read(place, stage) for place, stage in enumerate(self.stage))
            self._checked = self.stage, found
        return found

    def __getstate__(self) -> dict[Any, Any]:
        """Without the stages as they were read: knobs may hold objects that belong to this process."""
        return {**super().__getstate__(), "__pydantic_private__": {"_checked": (None, ())}}


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
    knobs: ByMethod = Field(default={}, description="fixed knobs by method")
    grid: ByMethod = Field(default={}, description="knobs to try by method")
    accept: TomlTable = Field(default={}, description="when a client takes its model: min_examples, margin")
    entries: ByMethod = Field(
        default={}, description="methods in one setting each, by label: method, before (stages), rounds, knobs"
    )


class TuneConfig(_Strict):
    """The [tune] table of an experiment file, for `bespoke tune`."""

    space: Knobs = Field(default={}, description="what to try: lists, or {low, high, log} for Optuna")
    preset: str | None = Field(default=None, description="where the space comes from if none is given")
    seeds: Any = Field(default=1, description="how many seeds a trial is run with, or a list of them; the mean counts")
    optuna: bool = Field(default=False, description="search with Optuna's TPE instead of trying every combination")
    trials: int = Field(default=20, ge=1, description="Optuna: how many settings to try")
    pruner: Literal["median", "hyperband", "none"] = Field(default="median", description="Optuna: when to give up")
