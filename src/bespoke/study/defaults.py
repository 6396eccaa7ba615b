"""The defaults of a comparison: metric, model, methods and how each is fitted, decided from the data.

Linear models are solved and need no learning rates; the shared one is computed from sums of statistics. Other models
are trained by FedAvg with steps that cannot overshoot; language models in a number of rounds that takes minutes. Under
privacy and robust rules nothing is solved from sums, because clipping and these rules act on updates.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import About
from bespoke.data.population import Population
from bespoke.data.splits import Split
from bespoke.experiment.prepare import few_rows
from bespoke.methods import METHODS, FineTune, Mixed
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.models import build_task
from bespoke.models.metric import default_metric
from bespoke.plain import ByMethod, Knobs, TomlTable
from bespoke.records import SettledRecord
from bespoke.study.tuning import Trial

Floats = NDArray[np.float64]
LINEAR = ("shared", "local", "finetune", "mixed")
NETWORK = ("fedavg", "local", "finetune")
GROUPS = ("group-fl", "group-perfl")
PRIVATE_ROUNDS = 60  # noise is calibrated to a number of rounds
ENOUGH_ROWS = 1_000  # from so many rows, a network is tried beside a linear model
MUCH_BETTER = 0.02  # a network has to be better by this fraction of the linear model's error
BEYOND = 2.5  # and by so many standard errors over clients
CLASSES = {"pulls": [0.01, 0.1, 1.0, 10.0, 100.0, 1e3], "intercepts": [0.1, 1.0, 10.0, 100.0]}  # pulls to try
MANY_FEATURES = 128  # above, fits of classes take long: fewer and smaller pulls, because words are rare
WIDE = {"pulls": [0.001, 0.01, 0.1, 1.0, 10.0, 100.0], "intercepts": [1.0, 100.0]}
HIDDEN = 16  # units of the network: enough for a curve, few enough for a mixed model of the last layer
RATES = (0.03, 0.1, 0.3)  # of the network
WORDS = {"name": "lstm", "embedding": 64, "hidden": 128, "layers": 1}  # small enough for minutes on two cores
WORD_SERVER = {"name": "adam", "lr": 0.01, "beta2": 0.999, "eps": 1e-8}  # plain averages stay behind word frequencies
WORD_RATES = (0.003, 0.01)  # of the server
WORD_ROUNDS = 30  # the report says if a curve has not converged
LOCAL_EPOCHS = 40  # of each client's own network, more if the last is best; they take most of a comparison


@dataclass(frozen=True)
class Rival:
    """A shared model that is tried."""

    base: TomlTable  # its tables of the experiment
    method: str
    tried: tuple[Knobs, ...]  # knobs


@dataclass(frozen=True)
class Settled:
    """The settled defaults, and the reasons."""

    base: TomlTable = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    knobs: ByMethod = field(default_factory=dict)
    grid: ByMethod = field(default_factory=dict)
    follows: dict[str, str] = field(default_factory=dict)  # the method whose model a method starts from
    rivals: dict[str, Rival] = field(default_factory=dict)
    metric_why: str = ""
    model_note: str = ""
    validation: dict[str, float] = field(default_factory=dict)  # of the models that were tried
    switched: bool = False  # another model than the first was chosen
    rounds: int = 0  # 0: stages end by themselves
    widens: bool = True  # methods get more candidates if one at the edge is chosen
    asked: tuple[str, ...] = ()
    about: About = field(default_factory=About)

    def to_json(self) -> SettledRecord:
        return {"metric": self.metric_why, "model": self.model_note, "validation": self.validation}

    def with_model(self, tried: dict[str, Trial], values: dict[str, Floats], lower: bool) -> Settled:
        """The same settings with the best model: the linear one unless the network is clearly better.

        `values`: by validation client. The gain also has to exceed their chance variation.
        """
        found = {name: float(trial.validation) for name, trial in tried.items() if trial.validation is not None}
        if "linear" not in found or "mlp" not in found:
            return replace(self, validation=found)
        linear, network = found["linear"], found["mlp"]
        gain = (linear - network if lower else network - linear) / max(abs(linear), 1e-12)
        apart = (values["linear"] - values["mlp"]) * (1 if lower else -1)
        apart = apart[np.isfinite(apart)]
        error = apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else np.inf
        text = f"linear {linear:.4g}, a small network {network:.4g}, as shared models on validation rows"
        if gain <= MUCH_BETTER or apart.mean() <= BEYOND * error:
            return replace(self, validation=found, model_note=f"The model is linear: {text}.")
        base = {**self.base, **self.rivals["mlp"].base}
        after = _methods(base, self.asked, self.about)
        knobs = {**after.knobs, "fedavg": tried["mlp"].setting}
        grid = {**after.grid, "fedavg": {}}  # its rate is already chosen
        note = f"The model is a small network: {text}."
        why = self.metric_why
        return replace(
            after, knobs=knobs, grid=grid, switched=True, metric_why=why, model_note=note, validation=found
        )  # fmt: skip


def settle(base: TomlTable, methods: tuple[str, ...], population: Population, split: Split) -> Settled:
    """Settles defaults from the user's values (`base`, `methods`, maybe empty) and the first seed's encoded data."""
    about, why = population.about, ""
    language = about["task"] == "language"
    base = {"safe_steps": not language, **base}  # clipping each gradient takes longer, and these rates do not overshoot
    if not base.get("metric") and about["task"] in ("regression", "classification"):
        rows, _ = split.train.of(split.train.clients)
        base["metric"], why = default_metric(about, population.columns["y"].numpy()[rows])
        if base.get("privacy") and about["task"] == "classification":  # class frequencies are data too
            base["metric"], why = "accuracy", "The share of right answers."
    if language:
        base = {"metric": "perplexity", **{name: value for name, value in base.items() if value is not None}}
        if dict(base.get("model") or {"name": "auto"}) == {"name": "auto"} and not about.get("model"):
            base["model"] = WORDS
    rivals: dict[str, Rival] = {}
    named = dict(base.get("model") or {"name": "auto"})
    small = about.get("input", "table") == "table" and not about.get("model") and named == {"name": "auto"}
    if small and about["task"] in ("regression", "classification"):
        linear = {"model": {"name": "linear"}}
        base |= linear
        if population.rows >= ENOUGH_ROWS and not _by_changes(base) and not methods:
            mlp = {"model": {"name": "mlp", "hidden": [HIDDEN]}}
            rates = tuple({"lr": rate} for rate in RATES)
            rivals = {"linear": Rival(linear, "shared", ({},)), "mlp": Rival(mlp, "fedavg", rates)}
    rounds = PRIVATE_ROUNDS if base.get("privacy") else WORD_ROUNDS if language else 0
    settled = _methods(base, methods, about, partial(few_rows, split.train))
    found = replace(
        settled, rivals=rivals, metric_why=why, rounds=rounds, widens=not language
    )  # fmt: skip
    if np.median(population.sizes()) * 0.6 <= len(about.get("features", ())) + 1:
        # a client with no more rows than coefficients fits any data, so its own noise cannot be estimated
        found.grid["mixed"] = {}
    return found


def _by_changes(base: TomlTable) -> bool:
    """Whether models must be trained by changes, because noise and robust rules act on changes."""
    return bool(base.get("privacy") or base.get("robust"))


def _methods(base: TomlTable, asked: tuple[str, ...], about: About, rows: Any = None) -> Settled:
    """The methods, and how each is fitted with this model."""
    options = dict(base.get("model") or {"name": "auto"})
    task = build_task(about, options.pop("name", "auto"), rows=rows, **options)
    head = task.linear()
    solvable = head is not None and about.get("input", "table") == "table"
    linear = solvable and task.network.is_linear
    private = _by_changes(base)
    exact = linear and not private and task.smooth
    methods = asked
    if not methods:
        rows, columns = head.coefficients(task.init(0)).shape if head is not None else (1, 0)
        few = head is not None and max(rows - 1, 1) * columns <= Mixed.needs.coefficients
        methods = tuple(name for name in (LINEAR if exact else NETWORK) if name != "mixed" or few)
        if solvable and not exact and not private and few and task.smooth:
            methods = (*methods, "mixed")
        if (base.get("data") or {}).get("group"):
            methods = (*methods, *GROUPS)
    knobs: ByMethod = {}
    grid: ByMethod = {}
    silos = (base.get("split") or {}).get("protocol", "cross-silo") == "cross-silo"
    for name, kind in METHODS.items():
        has_solver = "solver" in {entry.name for entry in fields(kind)}
        if has_solver and linear:
            knobs[name] = {"solver": "exact"}
        elif has_solver and solvable and issubclass(kind, FineTune) and name != "local":
            grid[name] = {"solver": ["sgd", "exact"]}
        if has_solver and issubclass(kind, FineTune) and solvable and about["task"] == "classification":
            many = len(about.get("features", ())) > MANY_FEATURES
            # Newton's method for each, where squares have a closed form
            knobs.setdefault(name, {}).update(WIDE if many else CLASSES)
        if issubclass(kind, FineTune) and solvable and silos:
            knobs.setdefault(name, {})["choose"] = "auto"
    if solvable and not linear:
        knobs.setdefault("local", {})["epochs"] = LOCAL_EPOCHS
    if about["task"] == "language":
        for name, kind in METHODS.items():
            if issubclass(kind, FineTune):
                local = {"lrs": [1.0], "epochs": 10} if name == "local" else {"lrs": [0.3, 1.0, 3.0], "epochs": 5}
                knobs[name] = {**local, "batch_size": 16}
            elif issubclass(kind, SharedModel):
                knobs[name] = {"batch_size": 16, "lr": 1.0, "server": WORD_SERVER}
        grid |= {"fedavg": {"server.lr": list(WORD_RATES)}, "group-fl": {}}
    if not linear or about["task"] == "classification":
        grid["mixed"] = {}  # heavy tails are tried where a round takes milliseconds
    follows = {}
    if exact and "fedavg" not in methods:
        follows = {name: "shared" for name, kind in METHODS.items() if kind.card.after == "fedavg"}
    if not linear:
        follows["mixed"] = "fedavg"
    return Settled(base, methods, knobs, grid, follows, asked=asked, about=about)
