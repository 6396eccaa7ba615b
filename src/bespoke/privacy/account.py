"""The privacy account of a run: how much noise is added, what each round has spent, and when training must stop.

Two guarantees, each for one client against all others:

- `released`: against an observer of what leaves the server (its models, round by round), but not of messages or sums.
- `messages`: against an observer of single messages, such as the server itself. Only local noise can give it.

Secret noise must not be drawn twice for one result. A round's result is on disk before anything of it is visible (a
checkpoint, then a line in attempts.jsonl, then the logs), so a resumed run never repeats it. An unfinished round is
repeated with fresh noise. Its messages may have been seen, so `messages` counts it twice.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from bespoke.declarations import Reveal, reveals
from bespoke.digests import read_json, sealed
from bespoke.errors import UserError
from bespoke.federation.cohorts import SAMPLERS, Sampler, SideBySide
from bespoke.messages.compress import Compress
from bespoke.messages.transform import State, Transform
from bespoke.method import Cohort
from bespoke.plain import JsonObject, Named
from bespoke.privacy.accountant import ADJACENCY, Spent, calibrated, finite, gaussian_epsilon, library
from bespoke.privacy.attempts import Attempts, Made, note, run_name
from bespoke.privacy.gaussian import Adaptive, Gaussian
from bespoke.privacy.release import NOTHING, Learned
from bespoke.privacy.settings import PrivacyConfig
from bespoke.privacy.tally import VIEWS, StagePlan, Tally, expected_size, sampling_of
from bespoke.records import NoiseLine, PrivacyRecord, PrivacyView, SettledNoise, SpentLine
from bespoke.storage import write_text
from bespoke.tensors import Tree, leaves

Floats = NDArray[np.float64]


class Account:
    """The account of one run; `folder` holds its files."""

    def __init__(
        self, privacy: PrivacyConfig, base: Sampler, plans: tuple[StagePlan, ...], transforms: tuple[Transform, ...],
        folder: Path, learned: Learned = NOTHING,
    ) -> None:  # fmt: skip
        library()  # refuses the run if dp-accounting is missing
        self.privacy, self.base, self.plans, self.transforms, self.folder = privacy, base, plans, transforms, folder
        self.local = privacy.local_noise is not None
        self.central = privacy.noise is not None or not self.local
        self.kind = sampling_of(base, plans, self.local)
        self.cohorts = {place: plan.cohorts for place, plan in enumerate(plans)}  # as known so far
        self.plain: dict[int, tuple[str, ...]] = {}  # integer fields of a stage, which take no noise
        self.learned, self.general = learned, self._general()
        self.standing: dict[int, float] = {}  # by stage: rounds that an earlier process completed
        self.settled = self._settle()
        self.attempts = Attempts(folder, self._made)
        self.limits: dict[int, int] = {}

    @property
    def secret(self) -> bool:
        """Whether the noise is unpredictable, and therefore cannot be repeated."""
        return not self.privacy.reproducible

    @property
    def cohort_key(self) -> int:
        """A key for drawing cohorts, if the accounting relies on their secrecy; else 0."""
        return int(self.settled["cohorts"] or 0)

    # -- what cannot be accounted for -------------------------------------------------------------------------------
    def _general(self) -> list[str]:
        sampler, why = self.base, []
        if sampler.sampling == "importance":
            why.append("who is sampled depends on how many examples clients have (cohort.sampling = 'importance')")
        if sampler.sampling not in SAMPLERS.built_in:
            why.append(f"what {sampler.sampling} goes by when it samples clients is not known (cohort.sampling)")
        if sampler.over_select > 1 and sampler.straggle:
            why.append("who reports first depends on how many examples clients have (cohort.straggle)")
        return why

    def why(self, place: int, view: str) -> list[str]:
        """Reasons why a stage has no guarantee; empty if it has one."""
        plan = self.plans[place]
        if not plan.method.trains or not plan.rounds:
            return []
        why, name = [], plan.method.card.name
        each = [field for field, reveal in reveals(plan.method.uplink).items() if reveal is Reveal.EACH]
        if each and not self.local and view == "released":
            why.append(
                f"{name} shows the server every client's {', '.join(each)}, which noise on a sum cannot hide "
                "(use privacy.local_noise)"
            )
        if not self.local and view == "messages":
            why.append(
                "clients add no noise to messages, so the server, or secure aggregation, must be trusted with them"
            )
        if self.plain.get(place):
            why.append(f"{name} sends {', '.join(self.plain[place])} as whole numbers, to which no noise is added")
        return why

    def register(self, place: int, template: Tree, cohorts: Sampler | SideBySide) -> None:
        """Registers a stage's message form and sampling; refuses a stage that cannot keep the budget."""
        self.cohorts[place] = cohorts
        sent = reveals(self.plans[place].method.uplink)
        hidden = [name for name, reveal in sent.items() if reveal is not Reveal.COUNT]
        whole = [n for n in hidden if not all(leaf.is_floating_point() for leaf in leaves(template[n]))]
        self.plain[place] = tuple(whole)
        self._affordable_at_all(place)

    def _affordable_at_all(self, place: int) -> None:
        reasons = [*self.general, *self.why(place, self.counted)] if self.plans[place].method.trains else []
        reasons = [*self.learned.why(self.counted), *reasons]
        if self.privacy.epsilon is not None and reasons:
            raise UserError(
                f"privacy.epsilon = {self.privacy.epsilon:g} cannot be kept: epsilon is infinite, for {reasons[0]}; "
                "with privacy.noise instead of epsilon the run goes on and says so"
            )

    # -- how much noise --------------------------------------------------------------------------------------------
    @property
    def counted(self) -> str:
        """The guarantee that the budget applies to."""
        return "released" if self.central else "messages"

    @cached_property
    def delta(self) -> float:
        if self.privacy.delta is not None:
            return self.privacy.delta
        delta: float = max(len(self.base.train.clients), 2) ** -1.1
        return delta

    def _settle(self) -> SettledNoise:
        """Chooses noise multipliers and the cohorts' key, once at the beginning of a run."""
        path = self.folder / "privacy.json"
        if path.exists():
            unknown = "how much noise the run has used is not known: begin it anew"
            found = read_json(path, unknown)
            if missing := [name for name in ("noise", "local_noise", "delta", "cohorts") if name not in found]:
                raise UserError(f"{path} is damaged (it has no {missing[0]!r}); {unknown}")
            return cast(SettledNoise, found)
        for place in range(len(self.plans)):
            self._affordable_at_all(place)
        hidden_cohorts = self.secret and self.kind != "known"
        settled: SettledNoise = {
            "noise": self.privacy.noise, "local_noise": self.privacy.local_noise, "delta": self.delta,
            "cohorts": secrets.randbits(62) if hidden_cohorts else None,
        }  # fmt: skip
        if settled["noise"] is None and not self.local:
            settled["noise"] = "auto"
        if settled["noise"] == "auto":
            settled["noise"] = self._calibrated("noise", settled)
        if settled["local_noise"] == "auto":
            settled["local_noise"] = self._calibrated("local_noise", settled)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(sealed(settled), indent=1))
        return settled

    def _calibrated(self, name: str, settled: SettledNoise) -> float:
        assert self.privacy.epsilon is not None
        if not any(plan.method.trains and plan.rounds for plan in self.plans):
            return 1.0  # clients send nothing
        before = self.learned.spent(self.kind)
        counts = self._counts() if self.kind == "known" else None

        def cost(multiplier: float) -> float:
            if counts is None:
                rounds: Counter[tuple[float, float]] = Counter()
                for plan in self.plans:
                    rounds[plan.rate, multiplier] += plan.rounds if plan.method.trains else 0
                spent = Spent(self.kind, rounds)
            else:
                noise = {"noise": settled["noise"], "local_noise": settled["local_noise"], name: multiplier}
                made = [Made(**noise, rate=plan.rate) for plan in self.plans]
                parts = [self.squared_mu(place, self.counted, how) for place, how in enumerate(made)]
                spent = Spent(squared_mu=float((counts * np.array(parts)[:, None]).sum(0).max()))
            return (before + spent).epsilon(self.delta, self.privacy.accountant)

        return calibrated(cost, self.privacy.epsilon, f"privacy.{name}")

    def _counts(self) -> Floats:
        """The number of rounds each client will take part in, by stage."""
        counts = np.zeros((len(self.plans), len(self.base.train.population)))
        for place, plan in enumerate(self.plans):
            for number in range(1, plan.rounds + 1):
                counts[place, plan.cohorts.draw(number).reported] += 1
        return counts

    # -- what acts on messages -------------------------------------------------------------------------------------
    def gaussian(self, place: int, settled: SettledNoise | Named | None = None) -> Gaussian:
        privacy, noise = self.privacy, settled or self.settled
        uplink = reveals(self.plans[place].method.uplink)
        counts = tuple(name for name, reveal in uplink.items() if reveal is Reveal.COUNT)
        hidden = tuple(name for name in uplink if name not in counts and name not in self.plain.get(place, ()))
        bound = privacy.clip if isinstance(privacy.clip, dict) else float(privacy.clip)
        if isinstance(bound, dict):
            bound = {name: float(bound[name]) for name in hidden}
        adaptive = Adaptive(privacy.quantile, privacy.rate, privacy.bit_noise) if privacy.adaptive else None
        if adaptive and adaptive.noise and isinstance(noise["noise"], float) and 2 * adaptive.noise <= noise["noise"]:
            raise UserError(
                f"privacy.bit_noise = {adaptive.noise:g}: more than half of the noise multiplier {noise['noise']:.4g} "
                "is needed, or nothing is left to hide the rest of the message by"
            )
        cohorts = self.cohorts[place]
        by_group = cohorts.groups.items() if isinstance(cohorts, SideBySide) else ()
        return Gaussian(
            hidden, bound, noise["noise"] or 0.0, noise["local_noise"] or 0.0, privacy.clipping == "layer",
            expected_size(cohorts), counts, adaptive, privacy.reproducible,
            {number: expected_size(sampler) for number, sampler in by_group},
        )  # fmt: skip

    def transforms_of(self, place: int) -> tuple[Transform, ...]:
        """All transforms of a stage's messages, in order.

        Compression comes before clipping, which has to bound what is sent, but after local noise, which it must not
        undo.
        """
        if not self.plans[place].method.trains:
            return self.transforms
        ours = self.gaussian(place)
        return (ours, *self.transforms) if self.local else (*self.transforms, ours)

    # -- what is spent -----------------------------------------------------------------------------------------------
    def squared_mu(self, place: int, view: str, made: Made) -> float:
        """mu^2 of a message for known participants, without the noise of other clients, who might reveal it."""
        if not self.plans[place].method.trains:
            return 0.0
        ours = self.gaussian(place, made._asdict())
        rounded = self.local and any(isinstance(transform, Compress) for transform in self.transforms)
        alone = rounded or self._reveals_each(place)  # more is visible than the noisy sum of noisy messages
        return ours.squared_mu(local=True, central=view == "released" and not alone)

    def _made(self, place: int) -> Made:
        """How this process makes a round of a stage."""
        return Made(self.settled["noise"], self.settled["local_noise"], self.plans[place].rate)

    def attempt(self, place: int, number: int, what: str) -> None:
        """Notes on disk that a round begins (`begun`), or that its result is stored and may be released (`done`)."""
        if self.secret:
            note(self.folder, {"stage": place, "round": number, "what": what, "made": self._made(place)._asdict()})

    def resume(self, place: int, begin: int) -> None:
        """Registers that this many rounds of a stage, and all earlier stages, are complete and not repeated."""
        self.standing = {**dict.fromkeys(range(place), math.inf), **self.standing, place: begin}

    def made(self, place: int, number: int, view: str) -> list[Made]:
        """How a round was made, for each time: by earlier processes, and once more if this process makes it."""
        begun, done = self.attempts.begun(place, number), self.attempts.done(place, number)
        before = done if view == "released" else begun
        if number > self.standing.get(place, 0):
            return [*before, self._made(place)]
        return before or begun[-1:] or [self._made(place)]  # a kill before "done", or noise that is not secret

    def _tally(self) -> Tally:
        known = self.kind == "known"
        return Tally(self, np.zeros((2, len(self.base.train.population))) if known else None)

    @cached_property
    def _so_far(self) -> Tally:
        return self._tally()

    def rounds(self, place: int) -> int:
        """The number of rounds of a stage that the budget allows."""
        for earlier in range(place + 1):
            if earlier not in self.limits:
                ended = self.standing.get(earlier, 0) >= self.plans[earlier].rounds
                made = self.attempts.last(earlier) if ended else 0
                self.limits[earlier] = made or self._afforded(earlier)
        return self.limits[place]

    def _afforded(self, place: int) -> int:
        planned = self.plans[place].rounds
        if self.privacy.epsilon is None or not planned:
            return planned
        within, view = self.privacy.epsilon * (1 + 1e-9), VIEWS.index(self.counted)
        tally = self._tally()
        for earlier in range(place):
            tally.advance(earlier, self.limits[earlier])

        def cost(spent: Spent) -> float:
            return spent.epsilon(self.delta, self.privacy.accountant)

        if self.kind != "known":  # every round costs the same: find the last one within the budget
            low, high = 0, planned
            while low < high:
                middle = (low + high + 1) // 2
                ahead = tally.copy()
                ahead.advance(place, middle)
                low, high = (middle, high) if cost(ahead.spent()[view]) <= within else (low, middle - 1)
            return low
        whole = tally.copy()
        whole.advance(place, planned)
        if cost(whole.spent()[view]) <= within:
            return planned
        for number in range(1, planned + 1):
            tally.advance(place, number)
            if cost(tally.spent()[view]) > within:
                return number - 1
        return planned

    def spent(self, place: int, number: int) -> dict[str, Spent]:
        """Both guarantees after this many rounds of a stage."""
        for earlier in range(place):
            self._so_far.advance(earlier, self.rounds(earlier))
        self._so_far.advance(place, number)
        return dict(zip(VIEWS, self._so_far.spent()))

    # -- stages that several runs share ------------------------------------------------------------------------------
    def _terms(self, place: int) -> Named:
        """Everything besides its cache key that a stage's noise and sampling depend on."""
        return {"sampling": self.kind, **self._made(place)._asdict()}

    def fits(self, stage: Path, place: int) -> bool:
        """Whether a cached stage was made exactly as this run would make it, noise included."""
        try:
            return bool(_shared(stage)["terms"] == self._terms(place))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def adopt(self, stage: Path, place: int) -> None:
        """Counts a stage that another run has trained, with all its attempts, as this run's own."""
        Attempts(self.folder, self._made).adopt(stage, place, str(_shared(stage)["by"]))
        self.attempts = Attempts(self.folder, self._made)
        self.standing = dict.fromkeys(range(place + 1), math.inf)
        self.limits.pop(place, None)  # the number of rounds is that of the adopted stage

    def share(self, stage: Path, place: int) -> None:
        """Stores how a stage was made beside the shared stage."""
        record = {"by": run_name(self.folder), "terms": self._terms(place)}
        write_text(stage / "privacy.json", json.dumps(record, indent=1))
        Attempts(self.folder, self._made).share(stage, place)

    def seen(self, place: int, cohort: Cohort) -> Cohort:
        """The cohort as the server may see it. If only sums are visible, participants and their number are hidden."""
        return cohort if self._reveals_each(place) else replace(cohort, clients=(), excluded=())

    def covers(self, place: int) -> bool:
        """Whether the server continues with an empty cohort, because skipping the round would reveal something."""
        return bool(self.settled["noise"]) and not self._reveals_each(place)

    def _reveals_each(self, place: int) -> bool:
        return Reveal.EACH in reveals(self.plans[place].method.uplink).values()

    # -- in words --------------------------------------------------------------------------------------------------
    def line(self, place: int, number: int, state: State) -> SpentLine:
        """Privacy numbers for a round's log: epsilons so far (null: infinite), and the clipping bound."""
        spent = self.spent(place, number)
        found = {view: finite(s.epsilon(self.delta, self.privacy.accountant)) for view, s in spent.items()}
        line: SpentLine = {"released": found["released"], "messages": found["messages"], "delta": self.delta}
        if "bound" in state:
            line["bound"] = state["bound"]
        return line

    def noise(self, place: int, state: State) -> NoiseLine:
        """Noise numbers for the ledger: the clipping norm, and the deviation of the noise by field."""
        ours = self.gaussian(place)
        bound = ours.bound if isinstance(ours.bound, dict) else ours.limit(state)
        return {"clip": bound, "client": ours.deviations(state, "client"), "sum": ours.deviations(state, "sum")}

    def note(self, line: SpentLine) -> str:
        """The text of the progress bar for a round's line."""
        epsilon = line["released"] if self.counted == "released" else line["messages"]
        return f"epsilon {'infinite' if epsilon is None else f'{epsilon:.3g}'} at delta {self.delta:.2g}"

    def statement(self) -> PrivacyRecord:
        """The full privacy statement after training."""
        last = len(self.plans) - 1
        spent = self.spent(last, self.rounds(last))
        sent = any(plan.method.trains and plan.rounds for plan in self.plans)
        made, planned = sum(self.limits.values()), sum(plan.rounds for plan in self.plans)
        stopped = ""
        if made < planned:
            stopped = f"training stopped after {made} of {planned} rounds: one more would exceed the budget"
        statement: PrivacyRecord = {
            "secret": self.secret, "accountant": self.privacy.accountant, "delta": self.delta,
            "budget": self.privacy.epsilon, "stopped": stopped,
            "noise": self.settled["noise"] if sent else None, "local_noise": self.settled["local_noise"],
            "clip": self.privacy.clip, "adaptive": self.privacy.adaptive, "rounds": made, "planned": planned,
            "cohort": expected_size(self.base), "sampling": self.kind, "adjacency": ADJACENCY[self.kind],
            "rate": max((plan.rate for plan in self.plans if plan.method.trains and plan.rounds), default=1.0),
            "released": self._said(spent["released"]), "messages": self._said(spent["messages"]),
            "stages": [self._released(place).to_json() for place in range(len(self.plans))],
        }  # fmt: skip
        if self.learned.releases:
            statement["statistics"] = self._said(self.learned.spent(self.kind))
        return statement

    def _released(self, place: int) -> Spent:
        """What the models of one stage reveal, without the other stages."""
        tally = self._tally()
        tally.advance(place, self.rounds(place))
        return tally.spent()[VIEWS.index("released")]

    def _said(self, spent: Spent) -> PrivacyView:
        mu, exact = spent.mu()
        return {
            "epsilon": finite(spent.epsilon(self.delta, self.privacy.accountant)),
            "by": spent.by(self.privacy.accountant),
            "rdp": finite(spent.epsilon(self.delta, "rdp")),
            "pld": finite(spent.epsilon(self.delta, "pld")) if spent.kind != "fixed" else None,
            "mu": finite(mu), "mu_exact": exact, "gdp": finite(gaussian_epsilon(mu * mu, self.delta)),
            "why": list(spent.why), "spent": spent.to_json(),
        }  # fmt: skip


def _shared(stage: Path) -> JsonObject:
    """How a cached stage was made, and by which run."""
    return dict(json.loads((stage / "privacy.json").read_text(encoding="utf-8")))
