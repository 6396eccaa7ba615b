"""The types of result.json, compare.json and tune.json. Numbers that are not finite are null there.

Optional keys are absent if they do not apply, or in files of earlier versions.
"""

from __future__ import annotations

from typing import Any, NotRequired, Required, TypedDict

RESULT_FORMAT = 1  # of all three
Number = float | None  # None: not finite
Knobs = dict[str, Any]  # of a method, by name: their types are the method's own


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
    spent: dict[str, Any]


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
    stages: list[dict[str, Any]]  # what the models of each stage reveal by themselves
    statistics: NotRequired[PrivacyView]  # for statistics of the data before training


class PrivacyCost(TypedDict, total=False):
    """The combined cost of several private runs; empty if one of them is not private."""

    runs: int
    delta: float
    one: Number  # the largest epsilon of one of them
    epsilon: Number
    why: list[str]
    without: list[str]  # runs of the folder that are not private


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
    chosen: dict[str, Any]  # candidate, by_client, who; empty without a choice
    candidates: dict[str, Number]  # by candidate: its score on validation rows
    accept: dict[str, Any]
    privacy: PrivacyRecord
    attack: dict[str, Any]
    robust: dict[str, Any]
    notes: list[str]
    stopped: list[dict[str, Any]]  # stages that callbacks ended early
    written: dict[str, Any]  # digests of the other files


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
    stages: list[dict[str, Any]]
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
    settled: dict[str, Any]  # decisions that the data made
    methods: list[MethodRecord]
    seeds: list[int]
    tune_seeds: list[int]
    preset: str
    expected: dict[str, Any]  # published numbers by method
    accept: dict[str, Any]
    notes: list[str]
    data: dict[str, Any]
    split: dict[str, Any]
    model: dict[str, Any]
    cohort: int
    versions: dict[str, str]
    engine: dict[str, str]
    privacy: dict[str, Any]
    robust: dict[str, Any]
    attack: dict[str, Any]
    secure: dict[str, Any]
    command: str
    spent: PrivacyCost  # all runs of the folder together


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
    space: dict[str, Any]
    search: str | dict[str, Any]  # "grid", or the settings of Optuna
    trials: list[TrialRecord]
    best: TrialRecord
    experiment: dict[str, Any]
    engine: str
    command: str
    privacy: NotRequired[PrivacyCost]
    versions: NotRequired[dict[str, str]]
