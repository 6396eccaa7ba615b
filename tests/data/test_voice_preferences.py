"""voice-preferences: sentences, pictures of sound, who likes what, and which utterances may be heard by whom."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from bespoke.data.population import Population
from bespoke.data.sources.formats.preferences import PARTS
from bespoke.data.sources.registry import load_source
from bespoke.data.sources.speech import utterances as module
from bespoke.data.sources.speech import voice_preferences
from bespoke.data.sources.speech.espeak import RATE
from bespoke.data.sources.speech.utterances import (
    ORIGINALS,
    VOICES,
    Utterances,
    chosen_sentences,
    picture,
    shares,
    whole_sentences,
)
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.sound import FedEmbedSpeech

NAME = "voice-preferences"
WORDS = ["fair", "sweet", "brave", "false", "gentle", "noble", "proud", "merry", "weary", "honest"]


def write_plays(folder: Path, count: int = 40) -> list[str]:
    """Two roles that say `count` sentences between them."""
    said = [
        f"The {WORDS[i % 10]} and {WORDS[i // 10]} lady came at last to see the {WORDS[(i + 3) % 10]} king."
        for i in range(count)
    ]
    (folder / "shakespeare").mkdir(exist_ok=True)
    with h5py.File(folder / "shakespeare" / "shakespeare_train.h5", "w") as file:
        for role, lines in (("ANN", said[::2]), ("BOB", said[1::2])):
            file[f"examples/{role}/snippets"] = np.array([line.encode() for line in lines], dtype=object)
    return said


def test_whole_sentences() -> None:
    snippet = (
        "of the late king. He wonders to what end you have\nassembled such troops here! Nay.\n"
        "Here comes my noble lord of BUCKINGHAM with all his men to see us.\n"
        "     Enter the king and queen with all their noble lords behind.\nIf I could but see his face again before"
    )
    assert list(whole_sentences(snippet)) == ["He wonders to what end you have assembled such troops here!"]


def test_sentences_are_the_same_everywhere(folder: Path) -> None:
    said = write_plays(folder)
    chosen = chosen_sentences(NAME, 30)
    assert len(set(chosen)) == 30
    assert set(chosen) < set(said)
    assert chosen_sentences(NAME, 10) == chosen[:10]
    assert chosen != sorted(chosen)
    with pytest.raises(UserError, match=r"option 'sentences' of the source 'voice-preferences' is 41; .* has 40 whole"):
        chosen_sentences(NAME, 41)


def test_twenty_voices_between_eight() -> None:
    made = [shares(voice) for voice in range(VOICES)]
    assert VOICES == 20
    assert {name for mixture in made for name in mixture} == set(ORIGINALS)
    assert all(sum(mixture.values()) == pytest.approx(1) for mixture in made)
    assert len({tuple(sorted(mixture.items())) for mixture in made}) == VOICES
    assert made[0] == {"Gene": 2 / 3, "f1": 1 / 3}
    assert made[1] == {"Gene": 1 / 3, "f1": 2 / 3}  # two mixtures of the same two


def test_a_tone_is_a_line_and_silence_follows() -> None:
    second = (2**14 * np.sin(2 * np.pi * 1102.5 * np.arange(RATE) / RATE)).astype(np.int16)
    large = picture(second, "paper").reshape(375, 200)
    assert large[50].argmax() == 39  # bands of 27.5625 Hz, of which the first is that of bin 1: 1102.5 is bin 40
    assert large[50].max() == round((1 - 6.02 / 100) * 255)  # half of full scale: -6 dB of 100
    assert (large[112:] == 0).all()  # a second has 11,025 samples, frames begin every 100
    small = picture(second, "small").reshape(140, 100)
    assert small[25].argmax() == 19
    cells = large[:280].reshape(140, 2, 100, 2).astype(float).mean((1, 3))
    assert np.abs(small - cells).max() <= 1  # rounded once, or first
    assert picture(np.tile(second, 6), "paper").shape == (75_000,)  # cut


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Utterances that say their own voice and sentence, in place of pictures."""

    def numbered(source: str, size: str, voices: int, sentences: int) -> Utterances:
        voice, sentence = np.divmod(np.arange(voices * sentences), sentences)
        return Utterances(np.stack([voice, sentence % 256, sentence // 256], 1).astype(np.uint8), "0")

    monkeypatch.setattr(voice_preferences, "utterances", numbered)


def parts(population: Population, column: str) -> Sequence[torch.Tensor]:
    """(users, rows) of each part."""
    return population.columns[column].reshape(-1, sum(PARTS)).split(PARTS, 1)


@pytest.mark.usefixtures("spoken")
def test_everyone_likes_one_voice() -> None:
    population = load_source(NAME)
    assert (len(population), population.rows) == (900, 27_000)
    assert np.bincount(population.group).tolist() == [45] * 20
    kind, y = (population.columns[name].reshape(900, 30) for name in ("kind", "y"))
    assert torch.equal(population.columns["x"][:, 0].long(), population.columns["kind"])
    liked = kind == torch.from_numpy(np.array(population.groups, dtype=int)[population.group])[:, None]
    assert torch.equal(liked, y == 1)
    assert all((part.sum(1) == part.shape[1] // 2).all() for part in parts(population, "y"))
    assert torch.bincount(kind[y == 0], minlength=20).min() > 500  # of 13,500 about 675 each


@pytest.mark.usefixtures("spoken")
def test_nobody_is_tested_on_words_that_anybody_trained_on() -> None:
    for seed in (0, 1):
        population = load_source(NAME, seed=seed)
        sentence = population.columns["x"][:, 1:].long() @ torch.tensor([1, 256])
        said = [set(part.flatten().tolist()) for part in sentence.reshape(-1, sum(PARTS)).split(PARTS, 1)]
        assert [len(sentences) for sentences in said] == [331, 83, 207]  # 621 by 16, 4 and 10 of 30, all used
        assert not said[0] & said[2]
        assert not said[0] & said[1]
        assert not said[1] & said[2]
        heard = [set(part.flatten().tolist()) for part in parts(population, "utterance")]
        assert len(heard[0]) > 0.95 * 331 * 20  # of every sentence in every voice
    assert torch.equal(load_source(NAME, seed=1).columns["utterance"], population.columns["utterance"])
    assert not torch.equal(load_source(NAME).columns["utterance"], population.columns["utterance"])


@pytest.mark.usefixtures("spoken")
def test_imbalanced_users() -> None:
    found = load_source(NAME, users="imbalanced")
    counts = dict(zip(found.groups, np.bincount(found.group).tolist()))
    assert counts == {f"{voice:02d}": {0: 180, 5: 72}.get(voice, 36) for voice in range(20)}  # 20, 8 and 4 %


@pytest.mark.usefixtures("spoken")
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"voices": 21}, "'voices'.*is 21; there are 20"),
        ({"voices": 1}, "'voices'.*is 1; it has to be at least 2"),
        ({"sentences": 29}, "'sentences'.*is 29; it has to be at least 30"),
        ({"number": 19}, "'number'.*is 19; it has to be at least 20"),
        ({"size": "tiny"}, "paper, small"),
        ({"users": "uneven"}, "balanced"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        load_source(NAME, **options)


def test_without_text_it_says_what_to_do(folder: Path) -> None:
    with pytest.raises(UserError, match=r"shakespeare_train.h5.*bespoke-fl\[speech,tff\]"):
        load_source(NAME)


def test_speech_is_made_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("espeakng_loader", reason="speech needs espeak-ng: the extra 'speech'")
    write_plays(folder, 30)
    asked = {"size": "small", "voices": 2, "sentences": 30, "number": 4}
    first = load_source(NAME, **asked)
    assert first.columns["x"].shape == (120, 14_000)
    assert first.columns["x"].dtype == torch.uint8
    by_voice = [first.columns["x"][first.columns["kind"] == voice].float().mean(0) for voice in (0, 1)]
    assert (by_voice[0] - by_voice[1]).abs().mean() > 2  # voices differ
    assert "espeak-ng 1." in first.about["notes"][1]
    monkeypatch.setattr(module, "synthesise", lambda *_: pytest.fail("it was there already"))
    again = load_source(NAME, **asked)
    assert torch.equal(again.columns["x"], first.columns["x"])
    (kept,) = (folder.parent / "home" / ".cache" / "bespoke" / "decoded").iterdir()
    content = bytearray(kept.read_bytes())
    content[-7000] ^= 1
    kept.write_bytes(content)
    with pytest.raises(UserError, match=r"was damaged after it was written; delete it"):
        load_source(NAME, **asked)
    task = build_task(first.about)
    assert task.network == FedEmbedSpeech(2, 140, 100)
    assert task.kinds == 2
    assert "f1" in task.metrics
