"""Prepares a run that starts or resumes: released statistics, privacy account, and how it is executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bespoke import devices
from bespoke.data.population import Population
from bespoke.digests import read_json, sealed
from bespoke.errors import UserError
from bespoke.experiment.build import to_toml
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.experiment import Experiment, engine_choice
from bespoke.experiment.reading import read_config
from bespoke.federation.choice import fitting
from bespoke.federation.engine import Choice
from bespoke.privacy.account import Account
from bespoke.privacy.release import RELEASE, Learned, Release, keep_words, words_file
from bespoke.privacy.tally import StagePlan
from bespoke.runs.folder import RunFolder
from bespoke.storage import write_text
from bespoke.tensors import Params, flatten

ELSEWHERE = "; this run was begun on it, and goes on elsewhere with --set engine.device=cpu"


def keep_release(population: Population, folder: Path) -> None:
    """Keeps the noised statistics of the data in the run's own folder, because noise cannot be drawn twice for a run.

    The vocabulary of texts is kept too, because the meaning of the model's tokens depends on it.
    """
    about, path = population.about, folder / RELEASE
    if "text" in about and "words" in about and not words_file(path).exists():
        keep_words(words_file(path), about["words"])
    made = about.get("release")
    if not made:
        return
    if not path.exists():
        Release(**made).write(path)
    elif Release.read(path).id != made["id"]:
        raise UserError(f"{path} is not the file with which this run started; restore it, or start in another folder")


def check_fits(folder: RunFolder, params: Params, stage: int) -> None:
    """Refuses to resume if the data have another width, such as after the only client with a category was forgotten."""
    try:
        begun = flatten(folder.beginning(stage).server["params"])
    except UserError:  # the run went back to a stage whose first checkpoint is gone; nothing else needs it
        return
    for name, leaf in flatten(params).items():
        if leaf.dim() and name in begun and begun[name].shape[-leaf.dim() :] != leaf.shape:
            raise UserError(
                f"{folder.path} was begun with {name} of shape {tuple(begun[name].shape)}, and the data now "
                f"need {tuple(leaf.shape)}: they were changed, or the only client with a category was forgotten; "
                "run the experiment again in another folder"
            )


def same_elsewhere(begun: Path, config: ExperimentConfig) -> str | None:
    """The text of the experiment in `begun`, if `config` differs from it at most in where it is computed; else None."""
    text = begun.read_text(encoding="utf-8")
    try:
        first = read_config(begun)
    except UserError:
        return None
    where = {name: getattr(config.engine, name) for name in ("device", "backend", "address")}
    moved = first.model_copy(update={"engine": first.engine.model_copy(update=where)})
    return text if to_toml(first) == text and to_toml(moved) == to_toml(config) else None


def account_of(experiment: Experiment, folder: Path, note: Callable[[str], None]) -> Account | None:
    """The privacy account of the run, or None without privacy."""
    if experiment.privacy is None:
        return None
    stages = enumerate(experiment.stages)
    plans = tuple(StagePlan(s.method, s.rounds, experiment.foreseen(place)) for place, s in stages)
    learned = Learned.of(experiment.population.about, experiment.privacy.public_statistics)
    account = Account(experiment.privacy, experiment.sampler(0), plans, experiment.transforms, folder, learned)
    if not account.secret:
        note(
            "privacy.reproducible: the noise follows from the seed, so this run is NOT private; epsilon is what a "
            "run with secret noise would spend"
        )
    return account


def execution(
    experiment: Experiment, params: Params, folder: Path, how: Choice | None, note: Callable[[str], None]
) -> Choice:
    """How to execute the run. A resumed run is executed as it began, so that its results have the same bits.

    Only the device may be changed; results are then the same up to rounding.
    """
    path, wanted_device = folder / "engine.json", experiment.engine.get("device", "auto")
    if path.exists():
        try:
            begun = Choice(**read_json(path, "remove it and resume the run"))
        except TypeError as error:
            raise UserError(f"{path} is damaged ({error}); remove it and resume the run") from None
        if wanted_device in ("auto", begun.device):
            devices.chosen(begun.device, ELSEWHERE)
            return begun
        how = engine_choice(experiment, params)
        if how.device == begun.device:  # the requested device cannot run this work
            return begun
        note(f"engine: {how.text()}; this run was begun on {begun.device}")
    elif how is not None:
        how = fitting(how, tuple(stage.method for stage in experiment.stages))
    else:
        how = engine_choice(experiment, params)
        note(f"engine: {how.text()}")
    write_text(path, json.dumps(sealed(how.to_json()), indent=1))
    return how
