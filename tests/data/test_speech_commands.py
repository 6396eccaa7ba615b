"""Sound to pictures by hand; Speech Commands from a table and from the published folders."""

from __future__ import annotations

import math
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bespoke.data.sources.registry import load_source
from bespoke.data.sources.speech import speech_commands
from bespoke.data.sources.speech.spectrogram import (
    BANDS,
    FLOOR,
    FRAMES,
    HIGHEST,
    LOWEST,
    RATE,
    as_bytes,
    filterbank,
    halved,
    log_mel,
    mel,
    mixed,
    mulaw,
)  # fmt: skip
from bespoke.data.sources.speech.speech_commands import DEVICES, Clips, device_types, usual_state
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.sound import SpectrogramCNN
from bespoke.randomness import client_keys

SECOND = np.arange(RATE) / RATE


def sine(hertz: float, amplitude: float = 1.0, rate: int = RATE, seconds: float = 1.0) -> np.ndarray:
    return (amplitude * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def test_mulaw_by_hand() -> None:
    smallest = (256 ** (1 / 255) - 1) / 255
    found = mulaw(np.array([0, 127, 128, 255], dtype=np.uint8))
    assert found.tolist() == pytest.approx([-1, -smallest, smallest, 1])


def test_bands_are_triangles() -> None:
    """A band rises from the middle of the one before to its own: bins between two middles belong to both, once."""
    bank = filterbank()
    assert bank.shape == (BANDS, 129)
    step = (mel(HIGHEST) - mel(LOWEST)) / (BANDS + 1)
    middles = [700 * (10 ** ((mel(LOWEST) + step * (band + 1)) / 2595) - 1) for band in range(BANDS)]
    bins = np.arange(129) * 31.25
    inside = (bins >= middles[0]) & (bins <= middles[-1])
    np.testing.assert_allclose(bank.sum(0)[inside], 1.0)
    assert (bank.sum(0)[(bins < LOWEST) | (bins > HIGHEST)] == 0).all()
    assert mel(700) == pytest.approx(2595 * math.log10(2))


def test_a_sine_has_the_power_of_its_bin_and_a_quarter_beside_it() -> None:
    """1,000 Hz is the middle of bin 32; a Hann window gives its neighbours half the amplitude, and nothing further."""
    weights = filterbank()[:, 31:34] @ [0.25, 1.0, 0.25]
    expected = 10 * np.log10(np.maximum(weights, 10 ** (FLOOR / 10)))
    found = log_mel(sine(1000)[None])
    assert found.shape == (1, FRAMES, BANDS)
    loud = expected > -60  # beyond, what is left is rounding of 32-bit samples
    assert loud.sum() in (2, 3)
    np.testing.assert_allclose(found[0, 5][loud], expected[loud], atol=1e-3)
    assert (found[0, 5][~loud] < -60).all()
    np.testing.assert_allclose(log_mel(sine(1000, 0.1)[None])[0, 5][loud], expected[loud] - 20, atol=1e-3)


def test_silence_and_bytes() -> None:
    assert (log_mel(np.zeros((2, RATE), np.float32)) == FLOOR).all()
    assert as_bytes(np.array([-120, -100, -60, 0, 3], np.float32)).tolist() == [0, 0, 102, 255, 255]


def test_noise_is_mixed_in_by_decibels() -> None:
    """Powers 1 and 4, 20 dB apart: the noise of amplitude 2 becomes one of 0.1."""
    sound, noise = np.ones((1, 4), np.float32), np.array([[2, -2, 2, -2]], np.float32)
    np.testing.assert_allclose(mixed(sound, noise, 20.0), [[1.1, 0.9, 1.1, 0.9]], rtol=1e-6)
    assert (mixed(0 * sound, noise, 20.0) == 0).all()
    assert np.isfinite(mixed(sound, 0 * noise, 20.0)).all()


def test_half_the_rate() -> None:
    found = halved(sine(1000, rate=2 * RATE))
    assert len(found) == RATE
    np.testing.assert_allclose(found[50:-50], sine(1000)[50:-50], atol=2e-3)
    assert np.abs(halved(sine(6000, rate=2 * RATE))[50:-50]).max() < 5e-3  # else it would be heard at 2,000 Hz


# -- device types and states -------------------------------------------------------------------------------------------
def clips_of(levels: list[float], each: int = 4, noise: int = 3) -> Clips:
    """A speaker for every level: half of each picture is loud, the other at the level of the room."""
    speakers = [f"s{place:02d}" for place in range(len(levels)) for _ in range(each)] + [""] * noise
    pictures = np.full((3, len(speakers), FRAMES, BANDS), 200, np.uint8)
    for place, level in enumerate(levels):
        pictures[:, place * each : (place + 1) * each, FRAMES // 2 :] = level
    words = ["up"] * len(speakers)
    keys = client_keys([f"{place}" for place in range(len(speakers))])
    return Clips(np.array(words), np.array(speakers), keys, pictures.reshape(3, len(speakers), -1))


def test_device_types_go_by_the_room() -> None:
    """Twenty speakers, ever louder rooms: 30, 25, 20, 15 and 10 % of them are 6, 5, 4, 3 and 2; words do not matter."""
    order = np.random.default_rng(0).permutation(20)
    clips = clips_of([10 + 5 * float(place) for place in order])
    found = dict(zip(clips.speakers.tolist(), device_types(clips).tolist()))
    louder = [found[f"s{who:02d}"] for who in np.argsort(order)]
    assert louder == list("AAAAAABBBBBCCCCDDDEE")


def test_states_of_clips() -> None:
    clips = clips_of([10 + 0.1 * place for place in range(100)], each=100)
    device = device_types(clips)
    state = usual_state(clips, device)
    for letter in DEVICES:
        shares = np.bincount(state[device == letter], minlength=3) / (device == letter).sum()
        usual = [0.6, 0.4, 0.0] if letter in "AC" else [0.6, 0.25, 0.15]
        assert shares.tolist() == pytest.approx(usual, abs=0.04)


# -- files -------------------------------------------------------------------------------------------------------------
def write_table(folder: Path, rows: Any = None, columns: Any = speech_commands.COLUMNS) -> Path:
    """Ann says up twice and no once, Bob up and no; two clips of noise."""
    code = np.random.default_rng(1).integers(0, 256, (7, RATE), dtype=np.uint8)
    said = [("up", "ann", "ann_0"), ("up", "ann", "ann_1"), ("no", "ann", "ann_0"), ("up", "bob", "bob_0"),
            ("no", "bob", "bob_0"), ("_silence_", "", "1"), ("_silence_", "", "2")]  # fmt: skip
    rows = rows or [(*row, sound.tobytes()) for row, sound in zip(said, code)]
    (folder / "speech_commands").mkdir(exist_ok=True)
    path = folder / "speech_commands" / "speech_commands_test.parquet"
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(columns, zip(*rows)))), path)
    return path


def write_wave(path: Path, sound: np.ndarray, rate: int = 2 * RATE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((sound * 32767).astype("<i2").tobytes())


def test_speakers_of_a_table(folder: Path) -> None:
    write_table(folder)
    population = load_source("speech-commands", least=2)
    assert list(population.ids) == ["ann", "bob"]
    assert population.rows == 7  # noise went to either
    assert population.columns["y"].sum() == 3
    ann = population.columns["clip"][: population.offsets[1]].numpy()
    assert set(ann[:3]) == {0, 1, 2}
    assert population.about["classes"] == ["another", "up"]
    assert build_task(population.about).network == SpectrogramCNN(2, FRAMES, BANDS)
    assert list(load_source("speech-commands", least=3).ids) == ["ann"]
    other = load_source("speech-commands", least=2, wake_word="no")
    assert other.columns["y"].sum() == 2


def test_pictures_are_kept_and_made_again_for_other_files(folder: Path) -> None:
    path = write_table(folder)
    first = load_source("speech-commands", least=2)
    kept = folder.parent / "home" / ".cache" / "bespoke" / "decoded"
    assert len(list(kept.iterdir())) == 1
    again = load_source("speech-commands", least=2)
    assert (again.columns["x"] == first.columns["x"]).all()
    rows = pyarrow.parquet.read_table(path).to_pylist()
    silent = [(row["word"], row["speaker"], row["clip"], b"\x80" * RATE) for row in rows]
    write_table(folder, silent)
    assert (load_source("speech-commands", least=2).columns["x"] < 80).all()
    assert len(list(kept.iterdir())) == 2


def test_devices_share_their_clips_out(real_data: Path) -> None:
    one = load_source("speech-commands", clients="devices")
    four = load_source("speech-commands", clients="devices", per_device=4, states=True)
    assert list(one.ids) == list(one.groups) == list("ABCDE")
    assert one.rows == four.rows == 4890
    assert (one.sizes() / one.rows).tolist() == pytest.approx(list(DEVICES.values()), abs=0.01)
    assert list(four.ids[:5]) == ["A1", "A2", "A3", "A4", "B1"]
    for letter in range(5):
        sizes = four.sizes()[four.group == letter]
        assert sizes.max() - sizes.min() <= 1
        assert sizes.sum() == one.sizes()[letter]
    assert (one.columns["state"] == 0).all()
    normal = four.columns["state"] == 0
    by_clip = {int(clip): row for row, clip in enumerate(one.columns["clip"])}
    for row in normal.nonzero()[:20, 0]:
        assert (four.columns["x"][row] == one.columns["x"][by_clip[int(four.columns["clip"][row])]]).all()


def test_the_published_folders(folder: Path) -> None:
    """A word of half a second is padded, noise is cut into seconds, what is left of it is dropped."""
    clips = folder / "speech_commands" / "clips"
    write_wave(clips / "marvin" / "0a7c2a8d_nohash_0.wav", sine(1000, 0.5, 2 * RATE, 0.5))
    write_wave(clips / "marvin" / "0a7c2a8d_nohash_1.wav", sine(1000, 0.5, 2 * RATE))
    write_wave(clips / "no" / "0b40aa8e_nohash_0.wav", sine(500, 0.5, 2 * RATE))
    write_wave(clips / "_background_noise_" / "hum.wav", sine(125, 0.1, 2 * RATE, 2.5))
    population = load_source("speech-commands", layout="folders", wake_word="marvin", least=1)
    assert list(population.ids) == ["0a7c2a8d", "0b40aa8e"]
    assert population.rows == 5
    x = population.columns["x"][population.columns["clip"].argsort()].reshape(-1, FRAMES, BANDS)
    # sorted by folder: noise, marvin, no
    loudest = x[:, 5].float().argmax(1).tolist()
    assert loudest[0] == loudest[1] == 0
    assert loudest[2] == loudest[3] > loudest[4] > 0
    assert (x[2, 25] == 0).all()
    assert (x[3, 25] > 0).any()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"wake_word": "upp"}, "unknown wake word 'upp' in the clips.*Did you mean 'up'.*no"),
        ({}, {"least": 9}, "'least' .* is 9; no client has more than 3 clips"),
        ({"columns": ("word", "who", "clip", "mulaw_8khz")}, {}, r"the columns .*'who'.*, expected word, speaker"),
        ({"rows": [("up", "a", "a_0", b"\x80" * 7999)]}, {}, "clip 'a_0' of 7999 bytes, expected 8000 mu-law bytes"),
        ({"rows": [("up", "a", "a_0", b"\x80" * RATE)]}, {}, "no background noise, expected words, and noise"),
        ({"rows": [("up", "", "a_0", b"\x80" * RATE)]}, {}, "background noise alone"),
        ({}, {"layout": "folders"}, "needs the folder speech_commands/clips"),
    ],
)
def test_clips_of_another_layout(folder: Path, change: Any, options: Any, message: str) -> None:
    write_table(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("speech-commands", **{"least": 2, **options})


def test_damaged_files(folder: Path) -> None:
    write_table(folder).write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"speech_commands_test.parquet is damaged.*expected a Parquet file"):
        load_source("speech-commands")
    clips = folder / "speech_commands" / "clips"
    clips.mkdir()
    with pytest.raises(UserError, match=r"no \*/\*.wav"):
        load_source("speech-commands", layout="folders")
    write_wave(clips / "up" / "a_nohash_0.wav", sine(500), rate=RATE)
    with pytest.raises(UserError, match="1 channels of 16 bits at 8000 Hz, expected one of 16 bits at 16000 Hz"):
        load_source("speech-commands", layout="folders")
    (clips / "up" / "a_nohash_0.wav").write_bytes(b"RIFF")
    with pytest.raises(UserError, match="no readable wave file"):
        load_source("speech-commands", layout="folders")
