"""Voices of a finished run with a frozen language model: personal models by user and context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke import pretrained
from bespoke.data.texts.tokenizers import plain
from bespoke.declarations import Stacked
from bespoke.errors import UserError, unknown
from bespoke.experiment.build import build
from bespoke.experiment.reading import read_recorded
from bespoke.method import Method
from bespoke.models.frozen import FrozenLM
from bespoke.runs.finished import Models, open_run
from bespoke.runs.forgotten import without_forgotten
from bespoke.statistics.folders import read_study
from bespoke.tensors import Tree, take

VoiceKind = Literal["user", "anybody", "plain", "person"]


@dataclass(frozen=True)
class Voice:
    """A personal model in one context."""

    kind: VoiceKind
    user: str  # empty unless it is a user's or a person's
    context: str  # empty where the run has no contexts
    place: int  # of the context among the run's
    personal: Tree
    method: Method

    @property
    def label(self) -> str:
        speaker = {"anybody": "anybody", "plain": "no prefix"}.get(self.kind, self.user)
        return f"{speaker}, {self.context}" if self.context and self.kind != "plain" else speaker

    @property
    def prefix(self) -> Tensor | None:
        """The embeddings before a text, (tokens, width); None if the model is more than a prefix."""
        table = self.personal.get("prefix") if isinstance(self.personal, dict) and len(self.personal) == 1 else None
        if not isinstance(table, Tensor) or type(self.method).predict is not Method.predict:
            return None
        return table[self.place if len(table) > 1 else 0]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """The scores of the next token at every position, by the method itself: (length, vocabulary)."""
        batch = {"x": torch.tensor([tokens]), "context": torch.tensor([self.place]), "mask": torch.ones(1)}
        with torch.no_grad():
            return self.method.predict(self.personal, batch)[0]

    def perplexity(self, tokens: Sequence[int]) -> float:
        """The perplexity of all tokens after the first, which begins every text."""
        losses = F.cross_entropy(self.logits(tokens[:-1]), torch.tensor(tokens[1:]))
        return float(losses.exp())


class Voices:
    """The voices of a run; personal models are made when they are first asked for."""

    def __init__(self, path: Path, name_clients: bool = False) -> None:
        if not (path / "config.toml").exists():
            open_run(path)  # it says what the folder is instead
        model = read_recorded(path).model
        if not model.pretrained:
            raise UserError(
                f"{path} has no pretrained language model (its [model] is {model.name!r}), so that it cannot write "
                "texts; name a run with [model] name = 'frozen', as those of docs/methods/fedpc.md"
            )
        folder, config = open_run(path)
        self.path, self.pretrained = path, model.pretrained
        self.experiment = build(config, folder=path)
        self.models = Models(folder, self.experiment)
        population = self.experiment.population
        remaining = without_forgotten(population, path).sizes() > 0
        support = self.experiment.split.test.support.sizes(np.arange(len(population))) > 0
        self.users = [population.ids[int(client)] for client in np.flatnonzero(remaining & support)]
        self.contexts: list[str] = list(population.about.get("contexts", []))
        self.private = bool(self.experiment.privacy) and not name_clients  # clients are not to be named
        self._made: dict[str, Tree] = {}

    @property
    def method(self) -> Method:
        return self.models.method

    @property
    def network(self) -> FrozenLM:
        task: Any = self.experiment.task
        network: FrozenLM = task.network
        return network

    def tokens(self, text: str) -> list[int]:
        """The begin token and those of a text, cut as the run's data are."""
        about, reader = self.experiment.population.about, pretrained.tokenizer(self.pretrained)
        coded = reader.encode(plain(text, about["text"]["lower"]), add_special_tokens=False)
        return [pretrained.facts(self.pretrained).begin, *coded.ids]

    # -- names ---------------------------------------------------------------------------------------------------------
    def user(self, asked: str) -> str:
        """The user of this name, or the only one whose name has it as a part."""
        if self.private and asked not in self.users:
            raise UserError(
                f"no user {asked!r} in {self.path}; it was made under [privacy], where users are not named: give the "
                "whole id, or --name-clients"
            )
        return _named("user", asked, self.users, str(self.path))

    def context(self, asked: str) -> str:
        """The context of this name, or the only one whose name has it as a part."""
        if not self.contexts:
            raise UserError(f"context {asked!r}: the data of {self.path} have no contexts; leave it out")
        return _named("context", asked, self.contexts, str(self.path))

    def home(self, user: str) -> str:
        """The context of most of a user's texts; the first one if nothing is known of the user."""
        if not self.contexts or user not in self.users:
            return self.contexts[0] if self.contexts else ""
        client = self.experiment.population.index(user)
        rows, _ = self.experiment.split.test.support.of(np.array([client]))
        seen = self.experiment.population.columns["context"][torch.from_numpy(rows)].long()
        return self.contexts[int(seen.bincount().argmax())]

    # -- models --------------------------------------------------------------------------------------------------------
    def of_user(self, user: str, context: str = "") -> Voice:
        """A client of the run; `context` is that of most of its texts if none is named."""
        if user not in self._made:
            self._made[user] = self.models.personal(self.experiment.population.index(user))[0]
        return self.voice("user", user, context or self.home(user), self._made[user])

    def anybody(self, context: str = "") -> Voice:
        """The shared model, with which a new user starts."""
        params = self.method.params(self.models.server)
        params = params if self.models.groups is None else take(params, 0)
        several = isinstance(self.method.handoff.gives, Stacked)
        if several or not all(isinstance(leaf, Tensor) for leaf in params.values()):
            raise UserError(f"{self.path} ({self.experiment.label}) has no model that all users share; name a user")
        return self.voice("anybody", "", context or self.home(""), params)

    def plain(self) -> Voice:
        """The frozen model itself."""
        return self.voice("plain", "", self.home(""), {"prefix": torch.zeros(1, 0, self.network.width)})

    def voice(self, kind: VoiceKind, user: str, context: str, personal: Tree) -> Voice:
        place = self.contexts.index(context) if context else 0
        method = self.method
        if kind in ("anybody", "plain"):  # a method may see the model by a task of its own
            method = _Shared(method.task if kind == "anybody" else self.experiment.task)
        return Voice(kind, user, context, place, personal, method)

    def chosen(self, users: Sequence[str], contexts: Sequence[str], plain: bool = False) -> list[Voice]:
        """Every user asked for in every context asked for; anybody if no user is, each one's own context if none."""
        named = [self.user(asked) for asked in users]
        places = [self.context(asked) for asked in contexts] or [""]
        found = [self.of_user(user, place) if user else self.anybody(place) for user in named or [""]
                 for place in places]  # fmt: skip
        return [*found, *([self.plain()] if plain else [])]


class _Shared(Method):
    """No personal models: parameters are used as they are."""


def chosen_run(path: Path, method: str | None = None) -> Path:
    """A run folder: the one named, or in a comparison folder the first run of a method."""
    if not ((path / "compare.json").exists() or (path / "runs").is_dir()):
        if method is not None:
            raise UserError(f"--method {method}: {path} is a run folder, not a comparison; leave --method out")
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}")
        return path
    study = read_study([path])
    if method is None and len(study.labels) > 1:
        raise UserError(f"{path} is a comparison; choose with --method: {', '.join(study.labels)}")
    found = [run for run in study.runs if method in (None, run.label)]
    if not found:
        raise unknown("method", method, study.labels, str(path))
    return min(found, key=lambda run: run.seed).folder


def _named(kind: str, asked: str, names: Sequence[str], where: str) -> str:
    """The name asked for; capitals do not matter, and a part is enough where only one name has it."""
    if asked in names:
        return asked
    wanted = asked.casefold().strip()
    same = [name for name in names if name.casefold() == wanted]
    found = same or [name for name in names if wanted and wanted in name.casefold()]
    if len(found) > 1:
        shown = ", ".join(map(repr, found[:10])) + (", ..." if len(found) > 10 else "")
        raise UserError(f"{kind} {asked!r} in {where} could be {shown}; write more of the name")
    if not found:
        raise unknown(kind, asked, names, where)
    return found[0]
