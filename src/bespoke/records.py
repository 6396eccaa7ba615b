"""The types of result.json, compare.json, tune.json and the logs. Numbers that are not finite are null there.

Optional keys are absent if they do not apply, or in files of earlier versions.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, Required, TypedDict

from bespoke.plain import ByMethod, JsonObject, Knobs, Named, TomlTable

RESULT_FORMAT = 1  # of result.json, compare.json and tune.json
Number = float | None  # None: not finite


# -- privacy -----------------------------------------------------------------------------------------------------------
class SpentRecord(TypedDict):
    """What rounds and releases revealed, in a form that accountants compose."""

    kind: Literal["poisson", "fixed", "known"]  # how participants are drawn
    rounds: list[list[float]]  # (participation rate, noise multiplier, how many)
    squared_mu: Number
    why: list[str]  # reasons for an infinite epsilon
    releases: NotRequired[dict[str, list[float]]]  # by name: (noise multiplier, delta)


class PrivacyView(TypedDict):
    """What an observer with a certain view learns about one client."""

    epsilon: Number
    by: str  # the accountant of this epsilon
    rdp: Number
    pld: Number
    mu: Number
    mu_exact: bool
    gdp: Number
    why: list[str]  # reasons for an infinite epsilon
    spent: SpentRecord


class PrivacyRecord(TypedDict):
    """A run's guarantee to a client against observers of its models (`released`) or of its messages."""

    secret: bool
    accountant: str
    delta: float
    budget: Number
    stopped: str
    noise: Number
    local_noise: Number
    clip: Any  # a bound, or one for each field
    adaptive: bool
    rounds: int
    planned: int
    cohort: float
    sampling: str
    adjacency: str
    rate: float
    released: PrivacyView
    messages: PrivacyView
    stages: list[SpentRecord]  # what the models of each stage reveal by themselves
    statistics: NotRequired[PrivacyView]  # for statistics of the data before training


class PrivacyCost(TypedDict, total=False):
    """The combined cost of several private runs; empty if one of them is not private."""

    runs: int
    delta: float
    one: Number  # the largest epsilon of one of them
    epsilon: Number
    why: list[str]
    without: list[str]  # runs of the folder that are not private


class SettledNoise(TypedDict):
    """privacy.json: what a run settled once, at its beginning."""

    noise: Any  # the noise multiplier of sums; None without noise there
    local_noise: Any  # that of clients
    delta: float
    cohorts: int | None  # the secret key that cohorts are drawn from


class AttemptLine(TypedDict, total=False):
    """A line of attempts.jsonl: a round that was begun or done, or a stage that was adopted."""

    stage: Required[int]
    what: Required[str]  # begun, done or adopted
    round: int
    made: Named  # the noise and the rate; see privacy/attempts.py
    by: str  # the run whose stage was adopted


# -- result.json -------------------------------------------------------------------------------------------------------
class ChosenRecord(TypedDict, total=False):
    """The choice of a personal model; empty if a method makes one alone."""

    candidate: str  # of the clients without a choice of their own
    by_client: bool  # whether a client has a choice of its own
    who: dict[str, Number]  # numbers on those who chose


class ChoicesRecord(TypedDict):
    """choices.json: the number of the candidate that clients use."""

    default: int
    own: dict[str, int]  # by client with a choice of its own


class AcceptanceRule(TypedDict, total=False):
    """When a client takes its personal model."""

    min_examples: int | None
    margin: float | None


class AcceptedRecord(AcceptanceRule, total=False):
    """A run's acceptance rule, and its effect."""

    accepted: int  # clients who took their personal model
    query_without: Number  # the score if all had


class AttackRecord(TypedDict, total=False):
    """A simulated attack."""

    kind: str
    clients: list[str]


class RuledRecord(TypedDict, total=False):
    """How often a robust rule acted on each client's change."""

    rule: str
    rounds: int
    left_out: dict[str, int]
    cut: dict[str, int]


class StoppedStage(TypedDict):
    """A stage that a callback ended."""

    stage: int
    method: str
    round: int  # the last one
    of: int  # planned rounds
    by: str  # the callback
    why: str


class WrittenRecord(TypedDict, total=False):
    """Digests of the other files of a finished run."""

    run: str  # of config.toml
    files: dict[str, str]
    checkpoint: str  # the name of the last one


class RunRecord(TypedDict, total=False):
    """result.json of a run. A tuning run has only its score on validation rows."""

    label: Required[str]
    seed: Required[int]
    format: int
    validation: Number
    candidate: str  # the choice of a tuning run
    metric: str
    lower_is_better: bool
    metrics: list[str]
    lower: list[str]  # of these metrics, those where lower is better
    protocol: str
    clients: int
    unevaluated: int
    rounds: int
    bytes_down: int
    bytes_up: int
    steps: int
    parameters: int
    excluded: dict[str, int]  # by client: rounds in which its update was not finite
    rows_metric: str
    query: Number
    chosen: ChosenRecord
    candidates: dict[str, Number]  # by candidate: its score on validation rows
    accept: AcceptedRecord
    privacy: PrivacyRecord
    attack: AttackRecord
    robust: RuledRecord
    notes: list[str]
    stopped: list[StoppedStage]
    written: WrittenRecord


# -- logs --------------------------------------------------------------------------------------------------------------
class NoiseLine(TypedDict):
    """A round's noise: the clipping norm, and the noise's standard deviations by field."""

    clip: float | dict[str, float]  # for each field where fields have bounds of their own
    client: dict[str, float]
    sum: dict[str, float]


class LedgerLine(TypedDict, total=False):
    """A line of ledger.jsonl: what a round, or something before or after all rounds, cost and revealed."""

    stage: Required[int | None]  # None: before or after all rounds
    round: Required[int | None]
    method: Required[str]
    phase: str  # without a round: statistics or personalization
    contacted: int
    reported: int
    bytes_down: Required[int]
    bytes_up: Required[int]
    steps: Required[int]
    epochs: int | None  # None: counted in steps
    revealed: Required[dict[str, str]]
    noise: NoiseLine


class SpentLine(TypedDict, total=False):
    """A round's privacy: epsilons so far (None: infinite), and the clipping bound."""

    released: Number
    messages: Number
    delta: float
    bound: float


class RobustLine(TypedDict):
    """What a robust rule did in a round."""

    left_out: list[str]
    cut: list[str]
    bound: NotRequired[Named]


class SecureLine(TypedDict):
    """Why the secure sums of a round were refused."""

    refused: list[str]


class WatchedLine(TypedDict, total=False):
    """What was seen of a round's messages."""

    robust: RobustLine
    secure: SecureLine
    outliers: list[str]  # clients with a far larger change than others


class RoundLine(WatchedLine, total=False):
    """A line of rounds.jsonl."""

    stage: Required[int]
    method: Required[str]
    round: Required[int]  # 0: before the first
    clients: int
    excluded: list[str]  # clients whose update was not finite
    dropped: int
    bytes_down: int
    bytes_up: int
    steps: int
    examples: int
    validation: dict[str, Number] | None  # the learning curve's point, by metric
    watched: dict[str, Number]  # the same by client, where rows change
    change: object  # scores on new rows, before the round
    observed: Named  # by the method
    aggregator: Named  # by the transforms of messages
    privacy: SpentLine


# -- compare.json ------------------------------------------------------------------------------------------------------
class MethodRecord(TypedDict, total=False):
    """A method of a comparison: its declarations, its trials and its chosen knobs. Empty for separate runs."""

    label: str
    name: str
    title: str
    summary: str
    paper: str
    down: dict[str, str]
    travels: dict[str, str]
    reveals: dict[str, str]
    changes: list[str]
    by_group: bool
    private: dict[str, str]
    personal: str
    unseen: str
    stateful: bool
    rounds: bool
    after: str
    stages: list[TomlTable]
    chosen: Knobs
    tuning: list[TrialOfMethod]
    tuning_cost: PrivacyCost


class TrialOfMethod(TypedDict):
    """A setting of a method that a comparison tried; `values`: by seed, if there were several."""

    knobs: Knobs
    validation: Number
    values: NotRequired[list[Number]]
    state: NotRequired[str]  # why it has no score


class ReferenceRecord(TypedDict):
    """A reference that methods are compared with but not ranked with."""

    label: str
    title: str
    what: str


class SettledRecord(TypedDict, total=False):
    """The decisions that the data made, and why; empty for a comparison that is run as written."""

    metric: str
    model: str
    validation: dict[str, float]  # of the models that were tried


class DataRecord(TypedDict, total=False):
    """The data of a comparison."""

    name: str
    title: str
    clients: int
    examples: int
    groups: int
    features: list[str]
    target: str
    task: str
    licence: str
    notes: list[str]


class SplitRecord(TypedDict, total=False):
    """The split as it was asked for, and its sizes."""

    protocol: str
    fractions: list[float]
    held_out: list[float]
    adapt: float
    own_validation: float
    order: str
    seed: int
    train_clients: int
    test_clients: int
    train_rows: int
    validation_rows: int
    query_rows: int


class ModelRecord(TypedDict, total=False):
    """The model of a comparison."""

    name: str
    parameters: int
    loss: str  # the user's own


class CompareRecord(TypedDict, total=False):
    """compare.json; empty for a report on separate run folders."""

    format: int
    title: str
    question: str
    metric: str
    lower_is_better: bool
    baseline: str
    references: list[ReferenceRecord]
    checks: list[dict[str, str]]
    settled: SettledRecord
    methods: list[MethodRecord]
    seeds: list[int]
    tune_seeds: list[int]
    preset: str
    expected: ByMethod  # published numbers by method
    accept: AcceptanceRule
    notes: list[str]
    data: DataRecord
    split: SplitRecord
    model: ModelRecord
    cohort: int
    versions: dict[str, str]
    engine: dict[str, str]
    privacy: TomlTable
    robust: TomlTable
    attack: TomlTable
    secure: TomlTable
    command: str
    spent: PrivacyCost  # all runs of the folder together


# -- tune.json ---------------------------------------------------------------------------------------------------------
class SearchRecord(TypedDict):
    """The settings of a search with Optuna."""

    optuna: bool
    trials: int
    pruner: str


class TrialRecord(TypedDict):
    """A setting that `bespoke tune` tried."""

    number: int
    setting: Knobs  # knobs with dots: stage.knob
    validation: Number
    values: list[Number]  # by seed
    state: str
    folders: list[str]


class TuneRecord(TypedDict):
    """tune.json: what `bespoke tune` tried, and the best of it."""

    format: int
    title: str
    metric: str
    lower_is_better: bool
    seeds: list[int]
    space: JsonObject
    search: str | SearchRecord  # "grid", or the settings of Optuna
    trials: list[TrialRecord]
    best: TrialRecord
    experiment: TomlTable
    engine: str
    command: str
    privacy: NotRequired[PrivacyCost]
    versions: NotRequired[dict[str, str]]
