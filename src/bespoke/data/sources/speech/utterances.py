"""Spectrograms of synthetic voices: sentences of Shakespeare, spoken by mixtures of eight voices of espeak-ng.

Silva et al. have 12,420 utterances of 20 voices, made by interpolating the parameters of eight (621 sentences each),
as spectrograms cut or padded to 200 x 375. Here the eight stand in a ring of four lower and four higher voices; two
neighbours, or two of two pairs across, make two voices, which lie a third and two thirds of the way between them.

Sound is taken to 11,025 Hz. A frame is 400 samples (36 ms) under a Hann window, frames begin 100 samples (9 ms) apart;
the bins above the constant one are 200 bands of 27.6 Hz. In decibels, a byte each, frames first: 75,000 bytes. The
small size has the mean of every 2 x 2 cells of the first 280 frames: 100 bands, 140 frames, 2.5 seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.sources.formats.tff import FilePart, read_clients, texts
from bespoke.data.sources.registry import find_file
from bespoke.data.sources.speech.espeak import Espeak, Sound, mixed
from bespoke.data.sources.speech.spectrogram import as_bytes, decibels, halved, power
from bespoke.errors import UserError
from bespoke.randomness import client_keys, mix
from bespoke.storage import open_arrays, write_arrays

ORIGINALS = (
    "Gene",
    "f1",
    "Denis",
    "f4",
    "Mario",
    "belinda",
    "m2",
    "grandma",
)  # espeak-ng's names; low and high in turn
PAIRS = (*((i, (i + 1) % 8) for i in range(8)), (0, 4), (1, 5))  # of ORIGINALS
VOICES = 2 * len(PAIRS)
SENTENCES = 621
TEXT = "shakespeare/shakespeare_train.h5"
SHORTEST, LONGEST = 50, 75  # characters of a sentence: about 3 to 4 seconds
WINDOW, HOP, FRAMES = 400, 100, 375
UTTERANCES_FORMAT = 1  # of kept utterances: another way to make them gets another number

Size = Literal["paper", "small"]
SIZES: dict[str, tuple[int, int]] = {"paper": (FRAMES, WINDOW // 2), "small": (140, 100)}  # frames and bands
Pictures = NDArray[np.uint8]


@dataclass(frozen=True)
class Utterances:
    """All voices' sentences: pictures[voice * number of sentences + sentence]."""

    pictures: Pictures
    espeak: str  # the version that spoke


def shares(voice: int) -> dict[str, float]:
    """Of which of espeak-ng's voices one of ours is made, and by how much."""
    one, other = (ORIGINALS[place] for place in PAIRS[voice // 2])
    near, far = (2 / 3, 1 / 3) if voice % 2 == 0 else (1 / 3, 2 / 3)
    return {one: near, other: far}


def utterances(source: str, size: Size, voices: int, sentences: int) -> Utterances:
    """Synthesised once and kept in ~/.cache/bespoke/decoded, from where it is mapped; what was damaged is refused."""
    said = chosen_sentences(source, sentences)
    asked = [UTTERANCES_FORMAT, size, SIZES[size], [shares(voice) for voice in range(voices)], said]
    name = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    kept = Path.home() / ".cache" / "bespoke" / "decoded" / f"{source}-{name}.safetensors"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made = synthesise(size, voices, said)
        about = {"espeak": made.espeak, "sha256": _digest(made.pictures), "sentences": json.dumps(said)}
        write_arrays(kept, {"pictures": torch.from_numpy(made.pictures)}, about)
    arrays, about = open_arrays(kept)
    pictures = arrays["pictures"].numpy() if "pictures" in arrays else np.zeros(0, np.uint8)
    if _digest(pictures) != about.get("sha256"):
        raise UserError(f"{kept} was damaged after it was written; delete it: it will be made again")
    return Utterances(pictures, about["espeak"])


def _digest(pictures: Pictures) -> str:
    return hashlib.sha256(np.ascontiguousarray(pictures).data).hexdigest()


def synthesise(size: Size, voices: int, sentences: list[str]) -> Utterances:
    """Every sentence in every voice."""
    frames, bands = SIZES[size]
    made = np.empty((voices * len(sentences), frames * bands), np.uint8)
    with Espeak() as espeak:
        own = {name: espeak.its_voice(name) for name in ORIGINALS}
        for place in _shown(range(len(made)), f"synthesising {voices} voices"):
            voice, sentence = divmod(place, len(sentences))
            if sentence == 0:
                espeak.take(mixed(own, shares(voice)))
            made[place] = picture(espeak.speak(sentences[sentence]), size)
        return Utterances(made, espeak.version)


def _shown(steps: range, what: str) -> Iterable[int]:
    """Steps with a bar where there is a terminal."""
    from rich.progress import track

    from bespoke.terminal import Terminal

    console = Terminal(stderr=True)
    return track(steps, what, console=console, transient=True, disable=not console.is_terminal)


def picture(sound: Sound, size: Size) -> Pictures:
    """The sound's bytes, frames first; silence follows what is too short."""
    samples = halved((sound / 2**15).astype(np.float32))
    length = (FRAMES - 1) * HOP + WINDOW
    padded = np.pad(samples[:length], (0, max(length - len(samples), 0)))
    loud = decibels(power(padded[None], WINDOW, HOP))[0, :, 1:]  # without the constant
    if size == "small":
        frames, bands = SIZES[size]
        loud = loud[: 2 * frames].reshape(frames, 2, bands, 2).mean((1, 3))
    return as_bytes(loud).reshape(-1)


def chosen_sentences(source: str, number: int) -> list[str]:
    """So many sentences of Shakespeare's roles, the same on every machine; the first of more."""
    path = find_file(TEXT, source)
    found = set()
    for role, arrays in read_clients(FilePart(path), source, ("snippets",), "examples/<ROLE>/snippets"):
        for snippet in texts(path, role, "snippets", arrays["snippets"]):
            found |= set(whole_sentences(snippet.decode(errors="ignore")))
    if len(found) < number:
        raise UserError(
            f"option 'sentences' of the source {source!r} is {number}; {path} has {len(found)} whole sentences of "
            f"{SHORTEST} to {LONGEST} characters"
        )
    ordered = sorted(found)
    keys = mix("sentences", client_keys(ordered))
    return [ordered[place] for place in np.argsort(keys, kind="stable")[:number]]


def whole_sentences(snippet: str) -> Iterator[str]:
    """Sentences of fitting length; not stage directions, which are indented, bracketed or have names in capitals."""
    text = snippet.replace("\n", " ")
    for sentence in re.findall(r"(?:^|(?<=[.?!] ))[A-Z][^.?!]*[.?!](?= |$)", text):
        if SHORTEST <= len(sentence) <= LONGEST and not re.search(r"  |[A-Z]{2}|[\[\]_\"]", sentence):
            yield sentence
