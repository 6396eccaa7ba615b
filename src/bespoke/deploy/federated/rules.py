"""A site's own rules. They hold whatever the hub asks, and a refusal says which rule it was.

- Named operations, and no others: scores of single clients, personal models and held messages stay here.
- A fixed catalogue of methods, and of models by the name of their code, which is installed here; no other code by name,
  no files of this machine.
- Every sum has at least so many clients. Where sums are masked between clients, the protocol's own least counts.
- A privacy budget of this site: training is refused without noise that this site adds to each message, and once the
  budget is spent. It counts the rounds that were carried out here, over all runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from bespoke.declarations import Reveal, reveals
from bespoke.digests import read_json, sealed
from bespoke.errors import UserError
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.typed import check_numbers, explain
from bespoke.federation.calls import OPERATIONS
from bespoke.federation.work import ClientWork
from bespoke.imported import is_outside
from bespoke.methods import METHODS
from bespoke.privacy.accountant import gaussian_epsilon
from bespoke.privacy.gaussian import Gaussian
from bespoke.storage import write_text

Ints = NDArray[np.int64]
OPERATIONS_OF_SITES = frozenset(OPERATIONS) - {"move", "personal", "examine"}
LEAST = 3  # clients of a sum, where a site says nothing else
OWN_TABLES = ("callbacks", "attack", "tune", "compare")  # of an experiment: not for a site


@dataclass(frozen=True)
class Rules:
    """What a site allows."""

    least: int = LEAST  # clients of every sum that leaves
    epsilon: float | None = None  # the site's own budget, of all runs together; None: it keeps none
    delta: float | None = None
    methods: tuple[str, ...] | None = None  # None: all that are built in
    share_clients: bool = False  # each client's scores may leave, by its name
    evaluate: bool = True  # statistics of scores may leave
    models: tuple[str, ...] = ()  # "package.module:name" of networks that are installed here and may be trained

    def __post_init__(self) -> None:
        if self.least < 1:
            raise UserError(f"least = {self.least}: a sum has one client or more")
        if self.epsilon is not None and (self.epsilon <= 0 or not 0 < (self.delta or 0.0) < 1):
            raise UserError(
                f"epsilon = {self.epsilon:g}, delta = {self.delta}: a budget needs an epsilon above zero and a delta "
                "between 0 and 1, well below one over the number of clients"
            )
        for name in self.methods or ():
            if name not in METHODS.built_in:
                raise UserError(f"methods: {name!r} is not built in; known: {', '.join(sorted(METHODS.built_in))}")
        for name in self.models:
            if not is_outside(name):
                raise UserError(f"models: {name!r} is not of the form 'package.module:name'")

    # -- an experiment, before anything is made of it --------------------------------------------------------------
    def check_config(self, config: dict[str, Any]) -> None:
        """Refuses experiments that name code or files, or methods and models outside the catalogue."""
        for key in OWN_TABLES:
            if config.get(key):
                raise UserError(f"this site carries out no experiment with [{key}]; leave it out")
        rest = {name: value for name, value in config.items() if name not in ("data", "label")}
        model = rest.get("model")
        if isinstance(model, dict) and model.get("name") in self.models:
            rest["model"] = {name: value for name, value in model.items() if name != "name"}
        for text in _texts(rest):
            if is_outside(text) or text.startswith("__main__:"):
                known = f"models = {list(self.models)}" if self.models else "models that it names"
                raise UserError(
                    f"this site runs no code by name but for {known} (site.toml), and the experiment names {text!r}"
                )
            if "/" in text or "\\" in text or text.startswith(("~", ".")):
                raise UserError(f"this site opens no files for the hub, and the experiment names {text!r}")
        stages = config.get("stage")
        allowed = tuple(METHODS.built_in) if self.methods is None else self.methods
        for stage in stages if isinstance(stages, list) else []:
            name = stage.get("method") if isinstance(stage, dict) else None
            if name not in allowed:
                raise UserError(f"this site does not carry out the method {name!r}; it allows {', '.join(allowed)}")
        robust = config.get("robust") or {}
        if self.least > 1 and isinstance(robust, dict) and robust.get("rule", "mean") != "mean":
            raise UserError(
                f"robust.rule = {robust.get('rule')!r} looks at single clients' messages, and this site sends sums of "
                f"{self.least} clients or more"
            )

    # -- a stage -----------------------------------------------------------------------------------------------------
    def check_work(self, work: ClientWork) -> None:
        """Refuses stages whose messages are not sums of enough clients, or lack the noise that the budget needs."""
        if not work.method.trains:
            return
        name, sent = work.method.card.name, reveals(work.method.uplink)
        if work.masks:
            assert work.secure is not None
            if work.secure.least < self.least:
                raise UserError(
                    f"secure.least = {work.secure.least}: this site takes part in sums of {self.least} clients or more"
                )
        elif self.least > 1:
            each = [field for field, reveal in sent.items() if reveal is Reveal.EACH]
            if each:
                raise UserError(
                    f"the method {name!r} sends every client's {', '.join(each)}, and this site sends sums of "
                    f"{self.least} clients or more; a site with least = 1 can take part"
                )
            rows = [field for field, one in work.method.uplink.items() if one.rows]
            if rows:
                raise UserError(
                    f"the method {name!r} sends {', '.join(rows)} with a row for each cluster that clients choose by "
                    f"themselves, of which some may have fewer than {self.least} clients; use [secure] sums = true, "
                    "or a site with least = 1"
                )

    def noise(self, work: ClientWork) -> float:
        """1 / z^2 of a round, of the noise that is added here."""
        ours = next((act for act in work.transforms if isinstance(act, Gaussian)), None)
        if ours is None or not ours.local:
            raise UserError(
                f"this site has a privacy budget of its own (epsilon = {self.epsilon:g}), for which the noise has to "
                "be added here: set privacy.local_noise"
            )
        if ours.reproducible:
            raise UserError("this site has a privacy budget of its own, and privacy.reproducible noise hides nothing")
        named = reveals(work.method.uplink)
        bare = [f for f, reveal in named.items() if f not in ours.hidden and f not in ours.counts]
        if bare:
            raise UserError(
                f"this site has a privacy budget of its own, and {', '.join(bare)} would leave without noise"
            )
        return ours.squared_mu(local=True, central=False)

    # -- a round -----------------------------------------------------------------------------------------------------
    def check_cohort(self, work: ClientWork, clients: Ints, rows: Ints | None) -> None:
        """Refuses a sum, or a group's, of fewer clients than the least."""
        if work.masks or not len(clients) or not work.method.uplink:
            return
        counts = [len(clients)] if rows is None else np.unique(rows, return_counts=True)[1].tolist()
        if min(counts) < self.least:
            what = "a sum" if rows is None else "the sum of a group"
            raise UserError(
                f"{what} of {min(counts)} clients was asked for; this site sends sums of {self.least} or more"
            )

    def check_evaluation(self) -> None:
        if not self.evaluate:
            raise UserError("this site sends no statistics of its clients' scores (evaluate = false)")


def plain_config(raw: dict[str, Any], where: str) -> ExperimentConfig:
    """An experiment that arrives resolved, with all defaults written out: typed again, unknown keys refused."""
    check_numbers(raw, where)
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise explain(error, ExperimentConfig, where) from None


class Budget:
    """What this site's messages have told of any one client so far, in a file of the site. It only grows."""

    def __init__(self, path: Path, rules: Rules) -> None:
        self.path, self.rules = path, rules

    @property
    def squared_mu(self) -> float:
        if not self.path.exists():
            return 0.0
        found = read_json(self.path, "without it nobody knows what this site has spent: put it back")
        return float(found["squared_mu"])

    def spend(self, work: ClientWork) -> None:
        """Note a round before its answer exists; refuses the one that would be too much."""
        if self.rules.epsilon is None or not work.method.trains:
            return
        assert self.rules.delta is not None
        after = self.squared_mu + self.rules.noise(work)  # a stage is opened before its noise is known, and only then
        cost = gaussian_epsilon(after, self.rules.delta)
        if cost > self.rules.epsilon:
            spent = gaussian_epsilon(self.squared_mu, self.rules.delta)
            raise UserError(
                f"this site's privacy budget allows no further round: epsilon {spent:.3g} of {self.rules.epsilon:g} is "
                f"spent, and the round would make it {cost:.3g}"
            )
        write_text(self.path, json.dumps(sealed({"squared_mu": after})))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield str(name)
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)
