"""Personal models as artefacts: safetensors with what a model consists of, JSON that says how to use it.

Most are the parameters of a network; some hold more (kNN-Per: a memory), so the method that made a model also uses it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from bespoke.config import ExperimentConfig, check_stage, read_config
from bespoke.data import tfidf
from bespoke.data.arrays import open_arrays, write_arrays, write_text
from bespoke.data.population import Population
from bespoke.data.splits import Part, Support, Train
from bespoke.data.standardize import client_scaling
from bespoke.data.words import Vocabulary
from bespoke.engines.host import ClientWork, Host, Mode
from bespoke.errors import UserError, unknown
from bespoke.experiments import build, load_population, prepare
from bespoke.forgotten import is_forgotten
from bespoke.method import Method
from bespoke.methods import METHODS
from bespoke.methods.grouped import stacked
from bespoke.models import NETWORKS
from bespoke.models.frozen import FrozenLM
from bespoke.models.language import LanguageModel
from bespoke.models.lora import AdapterLM, LoraLM
from bespoke.models.prefix import PrefixLM
from bespoke.models.task import BaseTask, Classification, Regression
from bespoke.privacy.release import RELEASE
from bespoke.randomness import mix
from bespoke.runfolder import RunFolder
from bespoke.stages import Experiment
from bespoke.tensors import Params, Tree, count, flatten, take, tree_map, unflatten

FORMAT = 2


def open_run(path: Path) -> tuple[RunFolder, ExperimentConfig]:
    """A finished run, or a clear word on what it is instead."""
    if (path / "compare.json").exists() or (path / "runs").is_dir():
        inside = sorted(p.name for p in (path / "runs").glob("*")) if (path / "runs").is_dir() else []
        named = ", ".join(f"{path}/runs/{name}" for name in inside[:6])
        raise UserError(f"{path} is a comparison; name one of its runs: {named or 'there is none yet'}")
    folder = RunFolder.existing(path)
    if folder.result() is None:
        raise UserError(f"{path} is unfinished; go on with: bespoke run ... --resume --out {path}")
    return folder, read_config(path / "config.toml")


def client_folder(run: Path, client: str) -> Path:
    """Where a client's exported model lies: a name safe for any file system, and different for different ids."""
    from bespoke.randomness import text_key

    plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in client)[:60].strip(".") or "client"
    return run / "personal" / (plain if plain == client else f"{plain}-{text_key(client):016x}")


class Models:
    """The models of a finished run, made anew from its checkpoint, private state and rows."""

    def __init__(self, folder: RunFolder, experiment: Experiment) -> None:
        found = folder.final()
        if found is None:
            raise UserError(f"{folder.path} holds no checkpoint")
        self.experiment, self.method = experiment, experiment.stages[-1].method
        self.choices = read_choices(folder.path)
        self.host = Host(experiment.population, Mode(vectorized=False))
        begun = folder.beginning(found.stage).server  # a client never seen holds what the stage began with
        start, setting = begun["params"], experiment.setting(found.stage, begun)
        self.host.open(ClientWork(self.method, experiment.split.train, experiment.transforms, setting), start)
        self.start, self.setting = start, setting
        for name in found.segments:
            self.host.load_private(folder.path / "private" / name)
        self.server = found.server if found.round >= 0 else self.method.init_server(start, setting)
        self.groups = self.method.groups(self.server)

    def adapts(self, client: int) -> bool:
        """Whether this client has rows to make a personal model on."""
        return bool(self.experiment.split.test.support.sizes(np.array([client]))[0])

    def personal(self, client: int) -> tuple[Tree, str]:
        """The model this client ended up with, and the name of the candidate."""
        name = self.experiment.population.ids[client]
        if not self.adapts(client):
            raise UserError(f"client {name!r} has no rows to adapt on")
        candidate = self.choices["own"].get(name, self.choices["default"])
        own = tree_map(lambda leaf: leaf[None], self.method.unicast(self.server, client)) or None
        rows = None if self.groups is None else self.groups[[client]].numpy()
        key, support = int(mix("personalize", self.experiment.seed)), self.experiment.split.test.support
        model = self.host.personal(
            self.method.broadcast(self.server), own, client, support, candidate, key, rows
        )  # fmt: skip
        return model, self.method.candidates()[candidate]

    def newcomer(self, rows: Population) -> Tree:
        """The personal model of a client that the run does not know, made by the method on rows of its own."""
        if self.method.unicast(self.server, 0):
            raise UserError(f"{self.method.name} sends each client something of its own: new users have none")
        whole, one = Part(0, (1.0,)), np.zeros(1, np.int64)
        host = Host(rows, Mode(vectorized=False))
        host.open(ClientWork(self.method, Train(rows, one, whole), setting=self.setting), self.start)
        key, group = int(mix("newcomer", self.experiment.seed)), None if self.groups is None else one
        support, candidate = Support(rows, one, whole), self.choices["default"]
        return host.personal(self.method.broadcast(self.server), None, 0, support, candidate, key, group)

    def kept(self, name: str) -> tuple[NDArray[np.int64], Tree]:
        """The clients that have trained, and this part of their private state: a simulation may look at it."""
        clients = np.array(sorted(self.host.private.slots), dtype=np.int64)
        held = self.host.private.read(clients)
        return clients, (held["method"] if self.host.work.remembers else held)[name]

    def shared(self, group: int = 0) -> Params | None:
        """The network's parameters that a group of clients has in common; group 0: all clients. None if there are none.

        Where groups have models of their own, the first row is the model that they all began with.
        """
        trained = any(stage.method.trains and stage.rounds for stage in self.experiment.stages)
        if not trained or self.method.hands_on not in (0, 1):
            return None
        params = self.method.params(self.server)
        if self.groups is not None:
            return take(params, group)
        return params if group == 0 and not stacked(self.experiment.task, params) else None


def personal_model(folder: RunFolder, experiment: Experiment, client: int) -> tuple[Tree, str]:
    """The model this client ended up with, and the name of the candidate."""
    return Models(folder, experiment).personal(client)


def read_choices(run: Path) -> dict[str, Any]:
    """Which candidate the clients use: one for all, and those that chose for themselves."""
    path = run / "choices.json"
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(choices["default"], int) and isinstance(choices["own"], dict):
            return choices
        problem: object = "it does not say who uses which model"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = error
    raise UserError(f"{path} is missing or damaged ({problem}); run the experiment again in another folder")


def export_personal(run: Path, client: str, out: Path | None = None) -> dict[str, Any]:
    """Write the client's personal model; returns what was written."""
    folder, config = open_run(run)
    if is_forgotten(run, client):
        raise UserError(f"client {client!r} was forgotten in {run}: its personal model is gone")
    prepared = prepare(config, load_population(config), run / RELEASE)
    experiment = build(config, prepared=prepared)
    position = experiment.population.index(client)
    model, candidate = personal_model(folder, experiment, position)
    about, task = experiment.population.about, experiment.task
    target = out or client_folder(run, client)
    target.mkdir(parents=True, exist_ok=True)
    how, given = prepared.scales
    mean, deviation = client_scaling(prepared.plain, experiment.split.train, how, position, given)
    write_arrays(target / "model.safetensors", {**flatten(model), "input.mean": mean, "input.deviation": deviation})
    description = {
        "format": FORMAT, "client": client, "method": experiment.label, "candidate": candidate,
        "stage": config.stage[-1],
        "network": {"name": type(task.network).__name__, **asdict(task.network)},
        "task": about["task"], "hinge": getattr(task, "hinge", False), "classes": about.get("classes", []),
        "words": about.get("words", []), "text": about.get("text", {}), "tfidf": about.get("tfidf"),
        "contexts": about.get("contexts", []),
        "features": about.get("features", []), "target": about.get("target", ""),
        "target_centre": about.get("centre", 0.0), "target_unit": about.get("unit", 1.0),
        "load": f'from bespoke import load_personal; model = load_personal("{target.name}"); model.predict(rows)',
        "rows": "a list of texts: the most likely next word after each" if about["task"] == "language" else
                "an array with one column per feature, in this order and in the units of the data; NaN where missing"
                + ("; without those of words if texts are given: predict(rows, texts)" if "tfidf" in about else ""),
    }  # fmt: skip
    write_text(target / "model.json", json.dumps(description, indent=1))
    return {"folder": str(target), "client": client, "candidate": candidate, "parameters": count(model)}


@dataclass(frozen=True)
class PersonalModel:
    """A client's model, ready to predict."""

    params: Tree  # what the method made: a network's parameters, or these and more
    method: Method
    mean: Tensor
    deviation: Tensor
    about: dict[str, Any]

    def outputs(self, rows: ArrayLike | None, texts: Sequence[str | None] | None = None) -> Tensor:
        """What the network says: standardized target, logits or margins.

        With `texts`, one a row, `rows` has all features but those of words, and is None where there are no others.
        """
        x = torch.as_tensor(np.asarray(self._with_words(rows, texts)))
        if len(self.mean):
            x = ((x.double() - self.mean) / self.deviation).float().nan_to_num(nan=0.0)
        with torch.no_grad():
            return self.method.predict(self.params, {"x": x})

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

    def predict(self, rows: ArrayLike | None, texts: Sequence[str | None] | None = None) -> NDArray[Any]:
        """Predictions in the target's own units, class names, or the most likely next word after each text."""
        if self.about["task"] == "language" and all(isinstance(row, str) for row in np.asarray(rows).ravel()):
            return np.array([self._next(str(text)) for text in np.asarray(rows).ravel()])
        outputs = self.outputs(rows, texts)
        if self.about["task"] == "regression":
            return (outputs[..., 0].double() * self.about["target_unit"] + self.about["target_centre"]).numpy()
        place = (outputs[..., 0] > 0).long() if self.about["hinge"] else outputs.argmax(-1)
        names = self.about["classes"]
        return np.asarray(names)[place.numpy()] if names else place.numpy()

    def _next(self, text: str) -> str:
        from bespoke import pretrained
        from bespoke.data.tokenizers import pieces_of

        network: Any = getattr(self.method.task, "network", None)
        if isinstance(network, FrozenLM):
            model, reader = pretrained.facts(network.pretrained), pretrained.tokenizer(network.pretrained)
            tokens = [model.begin, *reader.encode(text, add_special_tokens=False).ids]
            return reader.decode([int(self.outputs([tokens])[0, -1].argmax())])
        known = Vocabulary(tuple(self.about["words"]))
        names = ["<pad>", *known.words, "<unk>", "<bos>", "<eos>"]
        tokens = [known.bos, *(known.ids.get(piece, known.oov) for piece in pieces_of(text, self.about["text"]))]
        return names[int(self.outputs([tokens])[0, -1].argmax())]

    def interval(
        self, rows: ArrayLike | None, level: float = 0.9, texts: Sequence[str | None] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Bounds between which the target lies with this probability (regression by a mixed model)."""
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
    """Load what `bespoke export` wrote."""
    path = Path(folder)
    try:
        about = json.loads((path / "model.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path} holds no personal model (no model.json)") from None
    except ValueError as error:
        raise UserError(f"{path / 'model.json'} is damaged ({error})") from None
    if about.get("format") != FORMAT:
        raise UserError(f"{path} was written by another version (format {about.get('format')!r}, known: {FORMAT})")
    name, *_, knobs = check_stage(about["stage"], str(path / "model.json"))
    task = _task(about, str(path / "model.json"))
    flat, _ = open_arrays(path / "model.safetensors")
    mean, deviation = flat.pop("input.mean"), flat.pop("input.deviation")
    return PersonalModel(unflatten(flat), METHODS[name](task, **knobs), mean, deviation, about)


def _task(about: dict[str, Any], where: str) -> BaseTask:
    """The task of an exported model."""
    described = dict(about["network"])
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
