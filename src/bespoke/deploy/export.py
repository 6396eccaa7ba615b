"""Exports personal models: safetensors with all parts of the model, and JSON with what is needed to use it.

Most models are the parameters of a network. Some hold more (kNN-Per: a memory), so the method that made a model also
computes its outputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bespoke.data.sources.formats.words import Vocabulary
from bespoke.data.standardize import client_scaling
from bespoke.data.texts import tfidf
from bespoke.errors import UserError, unknown
from bespoke.experiment.build import build
from bespoke.experiment.experiment import Experiment
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import prepare
from bespoke.experiment.stage import check_stage
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.models import NETWORKS
from bespoke.models.frozen import FrozenLM
from bespoke.models.language import LanguageModel
from bespoke.models.lora import AdapterLM, LoraLM
from bespoke.models.own.build import exported_task
from bespoke.models.prefix import PrefixLM
from bespoke.models.task import BaseTask, Classification, Regression
from bespoke.privacy.release import RELEASE
from bespoke.runs.finished import open_run, personal_model
from bespoke.runs.forgotten import is_forgotten
from bespoke.storage import open_arrays, write_arrays, write_text
from bespoke.tensors import Tree, count, flatten, unflatten

PERSONAL_FORMAT = 2


def client_folder(run: Path, client: str) -> Path:
    """The folder of a client's exported model. Its name is safe for any file system and unique for each id."""
    from bespoke.randomness import text_key

    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in client)[:60].strip(".") or "client"
    return run / "personal" / (plain if plain == client else f"{plain}-{text_key(client):016x}")


def export_personal(run: Path, client: str, out: Path | None = None) -> dict[str, Any]:
    """Writes the client's personal model; returns what was written."""
    folder, config = open_run(run)
    if is_forgotten(run, client):
        raise UserError(f"client {client!r} was forgotten in {run}: its personal model is gone")
    prepared = prepare(config, load_population(config), run / RELEASE)
    experiment = build(config, prepared=prepared)
    position = experiment.population.index(client)
    model, candidate = personal_model(folder, experiment, position)
    target = out or client_folder(run, client)
    how, given = prepared.scales
    scaling = client_scaling(prepared.plain, experiment.split.train, how, position, given)
    write_personal(target, experiment, config.stage[-1], client, model, candidate, scaling)
    return {"folder": str(target), "client": client, "candidate": candidate, "parameters": count(model)}


def write_personal(
    target: Path, experiment: Experiment, stage: dict[str, Any], client: str, model: Tree, candidate: str,
    scaling: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Write a client's personal model, with what is needed to use it; `scaling`: by which its features are."""
    about, task = experiment.population.about, experiment.task
    target.mkdir(parents=True, exist_ok=True)
    mean, deviation = scaling
    write_arrays(target / "model.safetensors", {**flatten(model), "input.mean": mean, "input.deviation": deviation})
    description = {
        "format": PERSONAL_FORMAT, "client": client, "method": experiment.label, "candidate": candidate,
        "stage": stage,
        "network": task.network.described(),
        "task": about["task"], "hinge": not task.smooth, "classes": about.get("classes", []),
        "words": about.get("words", []), "text": about.get("text", {}), "tfidf": about.get("tfidf"),
        "contexts": about.get("contexts", []), "inputs": about.get("inputs", []),
        "features": about.get("features", []), "target": about.get("target", ""),
        "target_centre": about.get("centre", 0.0), "target_unit": about.get("unit", 1.0),
        "load": f'from bespoke import load_personal; model = load_personal("{target.name}"); model.predict(rows)',
        "rows": f"a dict with an array for each of {', '.join(about['inputs'])}" if "inputs" in about else
                "a list of texts: the most likely next word after each" if about["task"] == "language" else
                "an array with one column per feature, in this order and in the units of the data; NaN where missing"
                + ("; without those of words if texts are given: predict(rows, texts)" if "tfidf" in about else ""),
    }  # fmt: skip
    write_text(target / "model.json", json.dumps(description, indent=1))


@dataclass(frozen=True)
class PersonalModel:
    """A client's model, ready to predict."""

    params: Tree  # a network's parameters, or more, as the method made them
    method: Method
    mean: Tensor
    deviation: Tensor
    about: dict[str, Any]

    def outputs(
        self, rows: ArrayLike | Mapping[str, ArrayLike] | None, texts: Sequence[str | None] | None = None
    ) -> Tensor:
        """The network's outputs: standardized target, logits or margins.

        With `texts`, one per row, `rows` has all other features, or is None if there are none.
        """
        if isinstance(rows, Mapping):
            return self._of_inputs(rows)
        x = torch.as_tensor(np.asarray(self._with_words(rows, texts)))
        if len(self.mean):
            x = ((x.double() - self.mean) / self.deviation).float().nan_to_num(nan=0.0)
        with torch.no_grad():
            return self.method.predict(self.params, {"x": x})

    def _of_inputs(self, rows: Mapping[str, ArrayLike]) -> Tensor:
        """The outputs for rows of several inputs, by their names."""
        names = self.about.get("inputs", [])
        if set(rows) != set(names):
            raise UserError(f"predict() needs the inputs {', '.join(names) or 'x'}; found {', '.join(rows) or 'none'}")
        first, *others = (torch.as_tensor(np.asarray(rows[name])) for name in names)
        with torch.no_grad():
            return self.method.predict(self.params, {"x": first, **dict(zip(names[1:], others))})

    def _with_words(self, rows: ArrayLike | None, texts: Sequence[str | None] | None) -> ArrayLike:
        """Rows with the features of their texts' words."""
        about = self.about.get("tfidf")
        if texts is None and rows is not None:
            return rows
        if texts is None or not about:
            raise UserError("this model was made without texts: predict(rows)" if not about else "rows or texts?")
        words = tfidf.features_of(texts, about)
        others = np.empty((len(words), 0)) if rows is None else np.asarray(rows, dtype=float)
        wanted = len(self.about["features"]) - words.shape[1]
        if others.shape != (len(words), wanted):
            raise UserError(
                f"{len(words)} texts need rows of shape {(len(words), wanted)}: "
                f"{', '.join(self.about['features'][:wanted]) or 'no other features'}; found {others.shape}"
            )
        return np.column_stack([others, words])

    def predict(self, rows: Any, texts: Sequence[str | None] | None = None) -> NDArray[Any]:
        """Predictions in the target's own units, class names, or the most likely next word after each text."""
        if self.about["task"] == "language" and all(isinstance(row, str) for row in np.asarray(rows).ravel()):
            return np.array([self._next(str(text)) for text in np.asarray(rows).ravel()])
        outputs = self.outputs(rows, texts)
        if self.about["task"] == "regression":
            values: Tensor = outputs[..., 0].double() * self.about["target_unit"] + self.about["target_centre"]
            return values.numpy()
        place = (outputs[..., 0] > 0).long() if self.about["hinge"] else outputs.argmax(-1)
        names = self.about["classes"]
        return np.asarray(names)[place.numpy()] if names else place.numpy()

    def _next(self, text: str) -> str:
        from bespoke import pretrained
        from bespoke.data.texts.tokenizers import pieces_of

        network: Any = getattr(self.method.task, "network", None)
        if isinstance(network, FrozenLM):
            model, reader = pretrained.facts(network.pretrained), pretrained.tokenizer(network.pretrained)
            tokens = [model.begin, *reader.encode(text, add_special_tokens=False).ids]
            word: str = reader.decode([int(self.outputs([tokens])[0, -1].argmax())])
            return word
        known = Vocabulary(tuple(self.about["words"]))
        names = ["<pad>", *known.words, "<unk>", "<bos>", "<eos>"]
        tokens = [known.bos, *(known.ids.get(piece, known.oov) for piece in pieces_of(text, self.about["text"]))]
        return names[int(self.outputs([tokens])[0, -1].argmax())]

    def interval(
        self, rows: ArrayLike | None, level: float = 0.9, texts: Sequence[str | None] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Bounds that contain the target with this probability (regression by a mixed model)."""
        from scipy.stats import norm

        outputs = self.outputs(rows, texts)
        if self.about["task"] != "regression" or outputs.shape[-1] != 2:
            raise UserError("only a mixed model of a regression knows how far its predictions may be off")
        if not 0 < level < 1:
            raise UserError(f"level = {level}: a probability between 0 and 1")
        mean, deviation = (outputs[..., i].double().numpy() * self.about["target_unit"] for i in (0, 1))
        reach = norm.ppf((1 + level) / 2) * deviation
        return mean + self.about["target_centre"] - reach, mean + self.about["target_centre"] + reach

    def probabilities(self, rows: ArrayLike | None, texts: Sequence[str | None] | None = None) -> NDArray[Any]:
        """Class probabilities (classification)."""
        if self.about["task"] == "regression" or self.about["hinge"]:
            raise UserError(f"a {self.about['task']} model of this kind has no probabilities")
        return torch.softmax(self.outputs(rows, texts), -1).numpy()


def load_personal(folder: str | Path) -> PersonalModel:
    """Loads a model that `bespoke export` wrote."""
    path = Path(folder)
    try:
        about = json.loads((path / "model.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} holds no personal model (no model.json)") from None
    except ValueError as error:
        raise UserError(f"{path / 'model.json'} is damaged ({error})") from None
    if about.get("format") != PERSONAL_FORMAT:
        found = about.get("format")
        raise UserError(f"{path} was written by another version (format {found!r}, known: {PERSONAL_FORMAT})")
    stage = check_stage(about["stage"], str(path / "model.json"))
    task = _task(about, str(path / "model.json"))
    flat, _ = open_arrays(path / "model.safetensors")
    mean, deviation = flat.pop("input.mean"), flat.pop("input.deviation")
    method = METHODS.find(stage.method, str(path / "model.json"))(task, **stage.knobs)
    return PersonalModel(unflatten(flat), method, mean, deviation, about)


def _task(about: dict[str, Any], where: str) -> BaseTask:
    """The task of an exported model."""
    described = dict(about["network"])
    if described["name"] == "own":
        return exported_task(described, about, where)
    name = described.pop("name")
    if name not in NETWORKS:
        raise unknown("network", name, NETWORKS, where)
    kind: Any = NETWORKS[name]
    network = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in described.items()})
    if about["task"] == "classification":
        return Classification(network, hinge=about["hinge"])
    if isinstance(network, LoraLM):
        return AdapterLM(network)
    if isinstance(network, FrozenLM):
        return PrefixLM(network, contexts=len(about["contexts"]) or 1)
    return Regression(network) if about["task"] == "regression" else LanguageModel(network)
