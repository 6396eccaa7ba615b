"""Voice preferences: users who each like one synthetic voice, whatever it says.

Silva et al., FedEmbed, Section 4.3: 900 users prefer one of 20 voices that lie between eight others, so that some are
two mixtures of the same two; each user has 30 utterances, 20 to train on and 10 to be tested on. utterances.py
makes the utterances, formats/preferences.py deals them out. Sentences are divided into those to
train, to choose and to be tested on once for all users and voices: nobody is tested on an utterance that anybody
trained on, nor on its words in another voice.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.formats.preferences import ROWS, deal, liking, parted
from bespoke.data.sources.registry import at_least, describe
from bespoke.data.sources.speech.utterances import SENTENCES, SIZES, VOICES, Size, utterances
from bespoke.errors import UserError
from bespoke.randomness import generator

NAME = "voice-preferences"
MOST, MORE, OTHERS = 20, 8, 4  # percent of imbalanced users that like voice 0, voice 5, each of the others


def load(
    users: Literal["balanced", "imbalanced"] = "balanced",
    number: int = 900,
    size: Size = "paper",
    voices: int = VOICES,
    sentences: int = SENTENCES,
    seed: int = 0,
) -> Population:
    """`number` users, each with 30 utterances; `size` of a spectrogram: 'paper' (200 x 375) or 'small' (100 x 140)."""
    at_least(NAME, 2, voices=voices)
    at_least(NAME, ROWS, sentences=sentences)  # one at least to choose on
    at_least(NAME, voices, number=number)
    if voices > VOICES:
        raise UserError(f"option 'voices' of the source {NAME!r} is {voices}; there are {VOICES}")
    said = utterances(NAME, size, voices, sentences)
    pools = parted(np.arange(sentences), generator("sentences", seed))
    likes = liking(shares(users, voices), number)
    dealt = deal(likes, voices, lambda voice: [voice * sentences + pool for pool in pools], seed)
    kinds = [f"{voice:02d}" for voice in range(voices)]
    frames, bands = SIZES[size]
    columns: dict[str, NDArray[Any]] = {
        "x": said.pictures[dealt.row.flatten()],
        "y": dealt.label.flatten(),
        "kind": dealt.kind.flatten(),
        "utterance": dealt.row.flatten(),
    }
    about = describe(
        NAME, input="spectrogram", frames=frames, bands=bands, classes=["other", "preferred"], kinds=kinds,
        features=[f"frame {frame}, band {band}" for frame in range(frames) for band in range(bands)],
        numeric=[False] * (frames * bands), target="preferred", model={"name": "fedembed-speech"},
        notes=[
            "Users are artificial: each likes one voice, and utterances were dealt out to them.",
            f"Voices are artificial: espeak-ng {said.espeak} said {sentences} sentences of Shakespeare in each.",
        ],
    )  # fmt: skip
    names = np.array([f"{kinds[voice]}-{i:05d}" for i, voice in enumerate(likes)])
    group = np.repeat([kinds[voice] for voice in likes], ROWS)
    return Population.build(columns, np.repeat(names, ROWS), group=group, about=about)


def shares(users: str, voices: int) -> list[int]:
    """How many users like each voice, in proportion."""
    if users == "balanced":
        return [1] * voices
    return [{0: MOST, 5: MORE}.get(voice, OTHERS) for voice in range(voices)]
