"""Writes texts token by token with personal voices; keys and values of tokens already read are cached.

Lines with equally many tokens are computed together, so that nothing is padded. The draws of a line are keyed by (seed,
prompt, number): they depend neither on what else is written nor on the voice, so that two voices differ by their
embeddings alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from bespoke import pretrained
from bespoke.errors import UserError
from bespoke.generation.voices import Voice, Voices
from bespoke.models.frozen import FrozenLM
from bespoke.randomness import torch_seed

LENGTH, TEMPERATURE = 30, 0.8  # where nobody says


@dataclass(frozen=True)
class Drawing:
    """How the next token is drawn: from softmax(logits / temperature), or the likeliest if temperature is 0.

    top_k: of the k likeliest tokens only; top_p: of the fewest that together have this probability.
    """

    temperature: float = TEMPERATURE
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, fits, wanted in (
            ("temperature", 0 <= self.temperature <= 100, "from 0 (the likeliest token) to 100"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (all tokens)"),
        ):
            if not fits:
                raise UserError(f"{name.replace('_', '-')} = {getattr(self, name)!r}: it has to be {wanted}")

    def draw(self, logits: Tensor, chances: Sequence[torch.Generator]) -> Tensor:
        """A token for each row."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        if self.temperature == 0:
            return logits.argmax(-1)
        steps: list[Any] = [TemperatureLogitsWarper(float(self.temperature))]
        steps += [TopKLogitsWarper(self.top_k)] if self.top_k else []
        steps += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        for step in steps:
            logits = step(None, logits)
        shares = logits.softmax(-1)
        return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in zip(shares, chances)])


@dataclass(frozen=True)
class Line:
    """A text to be written: the `number`th of its voice for this prompt."""

    voice: Voice
    prompt: str
    number: int = 0


@dataclass(frozen=True)
class Piece:
    """Some letters more of a line; `ended`: the model ended it, or it has its full length."""

    line: int
    text: str
    tokens: int
    ended: bool = False


def lines_of(voices: Sequence[Voice], prompts: Sequence[str], number: int) -> list[Line]:
    return [
        Line(voice, prompt, place) for prompt in dict.fromkeys(prompts) for voice in voices for place in range(number)
    ]


def write(voices: Voices, lines: Sequence[Line], how: Drawing, length: int, seed: int) -> Iterator[Piece]:
    """Write all lines side by side; pieces come as soon as they are known."""
    facts, reader = pretrained.facts(voices.pretrained), pretrained.tokenizer(voices.pretrained)
    from tokenizers.decoders import DecodeStream

    read = [voices.tokens(line.prompt) for line in lines]
    together: dict[tuple[int, int], list[int]] = {}
    for place, (line, tokens) in enumerate(zip(lines, read)):
        many = -1 if line.voice.prefix is None else len(line.voice.prefix)
        if max(many, 0) + len(tokens) + length > facts.longest:
            raise UserError(
                f"the prompt {line.prompt[:40]!r} has {len(tokens) - 1} tokens, and {length} more are to be written: "
                f"{voices.pretrained!r} knows {facts.longest} positions; shorten the prompt or the length"
            )
        together.setdefault((many, len(tokens)), []).append(place)
    chances = [torch.Generator().manual_seed(torch_seed("generate", seed, line.prompt, line.number)) for line in lines]
    letters = [DecodeStream(ids=tokens, skip_special_tokens=True) for tokens in read]
    models: list[tuple[list[int], _Reader]] = []
    for (many, _), places in together.items():
        some = [lines[place].voice for place in places]
        models.append((places, _Cached(voices.network, some) if many >= 0 else _Whole(some)))
    ended = [length == 0] * len(lines)
    new = read
    for written in range(1, length + 1):
        for places, model in models:
            if all(ended[place] for place in places):
                continue
            drawn = how.draw(model.read([new[place] for place in places]), [chances[place] for place in places])
            for place, token in zip(places, drawn.tolist()):
                new[place] = [token]
                if ended[place]:  # it is read on with the others, for nobody
                    continue
                over = token in (facts.begin, facts.end)
                text = "" if over else letters[place].step(reader, token) or ""
                ended[place] = over or written == length
                if text or ended[place]:
                    yield Piece(place, text, written - over, ended[place])


class _Reader(Protocol):
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor: ...  # logits after the last of some more tokens


class _Cached:
    """Rows under prefixes of their own, of equally many tokens; keys and values are kept."""

    def __init__(self, network: FrozenLM, voices: Sequence[Voice]) -> None:
        self.network, self.model = network, pretrained.language_model(network.pretrained)
        self.begin: Tensor | None = torch.stack([voice.prefix for voice in voices if voice.prefix is not None])
        self.kept: Any = None

    @torch.no_grad()
    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        inputs = F.embedding(torch.tensor(tokens), self.model.get_input_embeddings().weight)
        if self.begin is not None:
            inputs, self.begin = torch.cat([self.begin, inputs], 1), None
        seen = self.model.base_model(inputs_embeds=inputs, past_key_values=self.kept, use_cache=True)
        self.kept = seen.past_key_values
        return self.network.logits(seen.last_hidden_state[:, -1])


class _Whole:
    """Personal models that are more than a prefix: the method reads each row anew."""

    def __init__(self, voices: Sequence[Voice]) -> None:
        self.voices = voices
        self.seen: list[list[int]] = [[] for _ in voices]

    def read(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        for row, more in zip(self.seen, tokens):
            row.extend(more)
        return torch.stack([voice.logits(row)[-1] for voice, row in zip(self.voices, self.seen)])


class Written(TypedDict):
    """A text, and whose model wrote it."""

    user: str | None  # None: the shared model
    voice: str
    context: str | None
    prompt: str
    number: int  # of the texts from this prompt
    text: str
    tokens: int


def finished(lines: Sequence[Line], pieces: Iterator[Piece]) -> list[Written]:
    """Written lines as records."""
    records: list[Written] = [
        {"user": line.voice.user or None, "voice": line.voice.kind, "context": line.voice.context or None,
         "prompt": line.prompt, "number": line.number, "text": "", "tokens": 0}
        for line in lines
    ]  # fmt: skip
    for piece in pieces:
        record = records[piece.line]
        record["text"] += piece.text
        record["tokens"] = piece.tokens
    return records
