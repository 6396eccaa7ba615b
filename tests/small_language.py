"""A tiny language model with a tokenizer, saved as any other by the library, and a small world of texts for it."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo
from bespoke.models.frozen import FrozenLM
from bespoke.models.prefix import PrefixLM
from small_worlds import FRACTIONS, SIZES, World, owners

VOCABULARY, WIDTH, LENGTH, CONTEXTS = 64, 16, 6, 3
_kept: list[tempfile.TemporaryDirectory[str]] = []  # folders live as long as the tests: workers open them by name


@cache
def tiny_model() -> str:
    """The folder of a Llama of two layers with random weights, whose tokenizer knows w0 to w60."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM

    _kept.append(tempfile.TemporaryDirectory())
    folder = Path(_kept[-1].name)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i + 3 for i in range(VOCABULARY - 3)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
        initializer_range=0.1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@cache
def prefix_world() -> World:
    """Texts of uneven length in three contexts, of which a client has one or more."""
    random, rows = np.random.default_rng(5), sum(SIZES)
    tokens = random.integers(3, VOCABULARY, (rows, LENGTH))
    y = np.where(np.arange(LENGTH) < random.integers(2, LENGTH + 1, rows)[:, None], tokens, -1)
    x = np.concatenate([np.ones((rows, 1), int), np.where(y < 0, 1, y)[:, :-1]], 1)
    client = np.repeat(np.arange(len(SIZES)), SIZES)
    context = np.where(client % 3 == 2, random.integers(0, CONTEXTS, rows), client % 2)
    columns = {"x": x.astype(np.int32), "y": y.astype(np.int32), "context": context}
    population = Population.build(columns, owners(), about={"name": "texts"})
    task = PrefixLM(FrozenLM(tiny_model()), contexts=CONTEXTS, given=1)
    return World("prefix", task, population, cross_silo(population, FRACTIONS, seed=3))
