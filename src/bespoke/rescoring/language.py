"""Log-probabilities of texts under a finished run's language models: the personal, the group's or the global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.sources.formats.words import PAD, Vocabulary
from bespoke.data.texts.tokenizers import plain, tokenizer_of
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.method import Method
from bespoke.models.language import LanguageModel
from bespoke.rescoring.nbest import Hypotheses
from bespoke.rescoring.wer import words_of
from bespoke.runs.events import Progress, Silent
from bespoke.runs.finished import Models, open_run
from bespoke.runs.forgotten import is_forgotten
from bespoke.tensors import Params

Level = Literal["personal", "group", "global"]
LEVELS: tuple[Level, ...] = ("global", "group", "personal")
ROOM = 2**24  # logits computed at a time
SHOWN = 5  # clients named in a note

Floats = NDArray[np.float64]


@dataclass
class RunLanguage:
    """The language models of a run; `notes` says which clients were served by another model than the one asked for."""

    path: Path
    raw: Population | None = None  # the run's data as loaded, if somebody has them already
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder, config = open_run(self.path)
        self.experiment = build(config, self.raw, folder=self.path)
        task, about = self.experiment.task, self.experiment.population.about
        if not isinstance(task, LanguageModel) or not about.get("words"):
            raise UserError(
                f"{self.path} has no language model of words or characters (its task is {about['task']}), so that it "
                "cannot rescore texts; name a run of text, as of bespoke compare POSTS.csv --client ... --text ..."
            )
        self.task, self.words = task, Vocabulary(tuple(about["words"]))
        self.rule = about.get("text", {})  # how a text becomes tokens
        self.tokenizer = tokenizer_of(self.rule["tokenizer"]) if "tokenizer" in self.rule else None
        self.models = Models(folder, self.experiment)

    @property
    def label(self) -> str:
        return self.experiment.label

    def levels(self) -> list[Level]:
        """The models that the run has, each one once: what its method makes of them is the personal one."""
        have: dict[Level, bool] = {
            "global": self.models.shared() is not None,
            "group": self.models.shared() is not None and self.models.groups is not None,
            "personal": type(self.models.method).personalize is not Method.personalize,
        }
        return [level for level in LEVELS if have[level]] or ["personal"]

    # -- texts ---------------------------------------------------------------------------------------------------------
    def tokens(self, text: str) -> list[int]:
        """<bos>, the tokens as the run's data have them, and <eos> where its data count the end of a sentence."""
        known = [self.words.ids.get(piece, self.words.oov) for piece in self._pieces(text)]
        return [self.words.bos, *known, *([self.words.eos] if self.rule.get("end", True) else [])]

    def _pieces(self, text: str) -> list[str]:
        """A text as the run's data are cut; data that do not say how are words in lower case without punctuation."""
        if self.tokenizer is None:
            return words_of(text)
        return [piece for piece, _ in self.tokenizer.pieces(plain(text, self.rule["lower"]))]

    def log_probabilities(self, predict: Any, texts: Sequence[str]) -> Floats:
        """log P of each text: the sum over its tokens. A text is one row, however long."""
        rows = [self.tokens(text) for text in texts]
        found = np.zeros(len(rows))
        order = sorted((place for place, row in enumerate(rows) if len(row) > 1), key=lambda place: len(rows[place]))
        begin = 0
        while begin < len(order):  # texts of about one length at a time, as many as there is room for
            end = begin + 1
            while end < len(order) and (end + 1 - begin) * len(rows[order[end]]) * len(self.words) <= ROOM:
                end += 1
            some = order[begin:end]
            found[some] = -self._losses(predict, [rows[place] for place in some]).double().numpy()
            begin = end
        return found

    def _losses(self, predict: Any, rows: Sequence[list[int]]) -> Tensor:
        """The summed loss of each row of tokens."""
        tokens = torch.full((len(rows), max(map(len, rows))), PAD)
        for line, row in zip(tokens, rows):
            line[: len(row)] = torch.tensor(row)
        batch: Params = {"x": tokens[:, :-1], "y": tokens[:, 1:], "mask": torch.ones(len(rows))}
        with torch.no_grad():
            return self.task.row_values(predict(batch), batch, "loss")

    # -- models --------------------------------------------------------------------------------------------------------
    def spoken(self, level: Level, utterances: Sequence[Hypotheses], progress: Progress | None = None) -> list[Floats]:
        """The log-probability of every hypothesis of every utterance under its client's model of this level."""
        progress, found = progress or Silent(), [np.zeros(0)] * len(utterances)
        owners: dict[tuple[str, str | None], list[int]] = {}
        for place, utterance in enumerate(utterances):
            owners.setdefault((utterance.client, utterance.group), []).append(place)
        instead: dict[Level, list[str]] = {}
        progress.begin(f"{self.label}: {level} models", len(owners))
        for (client, group), places in owners.items():
            used, predict = self._model(level, client, group)
            if used != level:
                instead.setdefault(used, []).append(client)
            texts = list(dict.fromkeys(text for place in places for text in utterances[place].texts))
            said = dict(zip(texts, self.log_probabilities(predict, texts)))
            for place in places:
                found[place] = np.array([said[text] for text in utterances[place].texts])
            progress.advance()
        for other, clients in instead.items():
            names = f" ({', '.join(clients[:SHOWN])}{', ...' if len(clients) > SHOWN else ''})"
            self.notes.append(
                f"{self.label}, {level}: {len(clients)} of {len(owners)} clients have no such model in the run"
                f"{'' if self.experiment.privacy else names}; the {other} model is used"
            )
        return found

    def _model(self, level: Level, client: str, group: str | None) -> tuple[Level, Any]:
        """The model that serves a client, and what it is: a client that the run does not know has no personal one."""
        population, models = self.experiment.population, self.models
        place = self._place(client)
        if level == "personal" and place is not None and models.adapts(place):
            return "personal", partial(models.method.predict, models.personal(place)[0])
        row = 0
        if level != "global" and models.groups is not None:
            row = int(models.groups[place]) if place is not None else self._row(group)
        params = models.shared(row)
        if params is None:
            raise UserError(
                f"{self.path}: {population.about['name']} has no client {client!r} with rows to adapt on, and the run "
                f"({self.label}) has no global model to serve others; use a run of fedavg, finetune or group-fl"
            )
        return ("group" if row else "global"), partial(self.task.predict, params)

    def _place(self, client: str) -> int | None:
        """A client's place in the population; None if the run does not know it, or not any more."""
        if is_forgotten(self.path, client):
            return None
        try:
            return self.experiment.population.index(client)
        except UserError:
            return None

    def _row(self, group: str | None) -> int:
        """The row of a group's model; 0 if the run has no group of this name."""
        population, rows = self.experiment.population, self.models.groups
        numbers = population.group_numbers()
        if numbers is None or rows is None or not np.array_equal(rows.numpy(), numbers):  # found groups have no names
            return 0
        return {population.group_of(client): int(number) for client, number in enumerate(numbers)}.get(group or "", 0)
