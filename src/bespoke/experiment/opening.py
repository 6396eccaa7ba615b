"""Converts a stage's work to plain values, and back to work where the rows are, by the experiment of that place."""

from __future__ import annotations

from dataclasses import asdict, replace

from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment
from bespoke.federation.opening import Opening
from bespoke.federation.roster import Roster
from bespoke.federation.work import ClientWork
from bespoke.plain import Named
from bespoke.privacy.gaussian import Adaptive, Gaussian
from bespoke.tensors import Params, zeros_like


def opening_of(work: ClientWork, params: Params, roster: Roster) -> Opening:
    """Everything that a place on another machine has to know of a stage."""
    if work.described is None:
        raise UserError("a stage that no experiment's configuration describes cannot be carried out on another machine")
    noise = next((asdict(act) for act in work.transforms if isinstance(act, Gaussian)), None)
    sample = zeros_like(work.first_sent(params, roster, 0))  # client 0's own values stay private
    return Opening(work.described.config, work.described.stage, noise, sample)


def work_of(opening: Opening, experiment: Experiment) -> ClientWork:
    """The stage's work on this place's rows; `experiment` was built from the opening's config and these rows."""
    if not 0 <= opening.stage < len(experiment.stages):
        raise UserError(f"stage {opening.stage} was opened, and the experiment has {len(experiment.stages)} stages")
    method, acting = experiment.stages[opening.stage].method, experiment.acting(opening.stage)
    if opening.noise is not None:
        ours = _gaussian(opening.noise)
        acting = (ours, *acting) if ours.local else (*acting, ours)  # the order of Account.transforms_of
    work = experiment.work(method, experiment.split.train, acting, place=opening.stage)
    return replace(work, sample=opening.sample)


def _gaussian(values: Named) -> Gaussian:
    adaptive = values.get("adaptive")
    try:
        made = {**values, "hidden": tuple(values["hidden"]), "counts": tuple(values["counts"])}
        return Gaussian(**{**made, "adaptive": None if adaptive is None else Adaptive(**adaptive)})
    except (KeyError, TypeError) as error:
        raise UserError(f"the noise of the stage is not described as it has to be ({error!r})") from None
