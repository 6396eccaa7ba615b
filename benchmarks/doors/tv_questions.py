"""Which lines of a TV series are questions: real texts by client, and a text classifier of transformers.

Named by tv_questions.toml. A client is one of the six main characters of Friends; a row is a line of one sentence and
four to twenty words, in lower case. Punctuation is removed, because it would reveal the answer. The classifier is
stories15M, a small language model of children's stories, with a new last layer (`AutoModelForSequenceClassification`);
its last blocks are trained. Padding comes before the words, because the classifier reads the last token.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

import bespoke
from bespoke.data.sources.registry import find_file
from bespoke.data.sources.tv import MAIN
from bespoke.errors import UserError, needs_extra

PADDING = 2  # the tokenizer's end of a text


def model_folder() -> Path:
    """The folder of stories15M, in Hugging Face's form."""
    folder = Path(os.environ.get("BESPOKE_MODELS", "models")) / "stories15M"
    if not folder.is_dir():
        raise UserError(f"there is no {folder}: set BESPOKE_MODELS to the folder that has stories15M")
    return folder


def lines_of(most: int) -> dict[str, list[tuple[str, bool]]]:
    """The first such lines of each character that end in a period or a question mark: words, and whether they ask."""
    found: dict[str, list[tuple[str, bool]]] = {name: [] for name in MAIN}
    with gzip.open(find_file("tv/friends.csv.gz", "tv"), "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            text, speaker = row["text"].strip(), row["speaker"]
            words = re.sub(r"[^a-z' ]+", " ", text.lower()).split()
            one = text.endswith((".", "?")) and len(re.findall("[.?!]", text)) == 1
            if speaker in found and len(found[speaker]) < most and one and 4 <= len(words) <= 20:
                found[speaker].append((" ".join(words), text.endswith("?")))
    return found


def load(most: int = 400, length: int = 24) -> bespoke.Population:
    """Lines as tokens with an attention mask; `most`: lines of a character, `length`: tokens that are kept of one."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise needs_extra("transformers", "language", "the source 'tv_questions'") from None
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    rows: dict[str, Any] = {}
    for name, lines in lines_of(most).items():
        ids, mask = np.full((len(lines), length), PADDING), np.zeros((len(lines), length), np.int64)
        for place, (text, _) in enumerate(lines):
            tokens = tokenizer(text)["input_ids"][:length]
            ids[place, length - len(tokens) :], mask[place, length - len(tokens) :] = tokens, 1
        rows[name] = {"input_ids": ids, "attention_mask": mask}, np.array([asks for _, asks in lines])
    return bespoke.population(rows, name="tv questions")


def make(blocks: int = 1) -> nn.Module:
    """The classifier, of whose blocks the last ones are trained; all else is frozen and does not travel."""
    from transformers import AutoModelForSequenceClassification

    model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
        model_folder(), num_labels=2, pad_token_id=PADDING, dtype="float32"
    )
    learned = ("score.", "model.norm.", *(f"model.layers.{5 - place}." for place in range(blocks)))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(learned))
    return model


net = bespoke.model(make, head="score", inputs=("input_ids", "attention_mask"), outputs=lambda said: said.logits)
