"""espeak-ng: what it says is a function of voice and text, and voices between others are between them."""

from __future__ import annotations

import ctypes.util
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bespoke.data.sources.speech.espeak import NEUTRAL, RATE, Espeak, Sound, Voice, as_lines, mixed, parse
from bespoke.errors import UserError

SENTENCE = "Our doubts are traitors, and make us lose the good we might win."


@pytest.fixture
def espeak() -> Iterator[Espeak]:
    try:
        library = Espeak()
    except UserError as error:
        pytest.skip(str(error))
    with library:
        yield library


def pitch(sound: Sound) -> float:
    """Hz of the lag at which the sound is most like itself, in the median of its louder pieces."""
    found = []
    for begin in range(0, len(sound) - 2048, 2048):
        piece = sound[begin : begin + 2048].astype(np.float64)
        if np.abs(piece).mean() > 1000:
            alike = np.fft.irfft(np.abs(np.fft.rfft(piece, 4096)) ** 2)[RATE // 300 : RATE // 60]
            found.append(RATE / (RATE // 300 + int(alike.argmax())))
    return float(np.median(found))


def test_an_utterance_is_a_function_of_voice_and_text(espeak: Espeak) -> None:
    own = {name: espeak.its_voice(name) for name in ("Gene", "f4")}
    voice = mixed(own, {"Gene": 0.5, "f4": 0.5})
    espeak.take(voice)
    first = espeak.speak(SENTENCE)
    assert first.dtype == np.int16
    assert 2 < len(first) / RATE < 6
    espeak.take(own["f4"])
    other = espeak.speak(SENTENCE)
    espeak.speak("And something else, for what was said before to differ.")
    espeak.take(voice)
    assert np.array_equal(espeak.speak(SENTENCE), first)
    assert len(other) != len(first) or not np.array_equal(other, first)
    code = (  # and in another process, in which nothing was said before
        "import hashlib; from bespoke.data.sources.speech.espeak import Espeak, mixed\n"
        "with Espeak() as espeak:\n"
        "    own = {name: espeak.its_voice(name) for name in ('Gene', 'f4')}\n"
        f"    espeak.take(mixed(own, {{'Gene': 0.5, 'f4': 0.5}}))\n"
        f"    print(hashlib.sha256(espeak.speak({SENTENCE!r}).tobytes()).hexdigest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == hashlib.sha256(first.tobytes()).hexdigest()


def test_a_voice_between_two_is_heard_between_them(espeak: Espeak) -> None:
    own = {name: espeak.its_voice(name) for name in ("Gene", "belinda")}
    assert (own["Gene"]["pitch"], own["belinda"]["pitch"]) == ((80, 110), (200, 247))
    heard = []
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        espeak.take(mixed(own, {"Gene": 1 - share, "belinda": share}))
        heard.append(pitch(espeak.speak(SENTENCE)))
    assert heard == sorted(heard)
    assert min(np.diff(heard)) > 15  # Hz; the files say 40 from one to the next


def test_mixing_by_hand() -> None:
    low: Voice = {**NEUTRAL, "pitch": (80, 110), "formant 2": (100, 100, 90, 0)}
    high: Voice = {**NEUTRAL, "pitch": (200, 245), "formant 2": (130, 70, 150, -250)}
    between = mixed({"low": low, "high": high}, {"low": 2 / 3, "high": 1 / 3})
    assert between["pitch"] == pytest.approx((120, 155))
    assert between["formant 2"] == pytest.approx((110, 90, 110, -250 / 3))
    assert between["voicing"] == pytest.approx((100,))
    assert mixed({"low": low, "high": high}, {"low": 1.0, "high": 0.0}) == low
    lines = as_lines(between).splitlines()
    assert {"pitch 120 155", "formant 2 110 90 110 -83", "flutter 0", "roughness 0"} <= set(lines)
    assert parse(as_lines(between), "it")["pitch"] == (120, 155)
    with pytest.raises(ValueError, match="sum to one"):
        mixed({"low": low, "high": high}, {"low": 0.5, "high": 0.6})


def test_voice_files() -> None:
    text = (
        "language variant\nname Some\n\n//breath 1\npitch 90 120 # Hz\nflutter 5\nformant 1 120 80 180\nconsonants 80\n"
    )
    voice = parse(text, "some")
    assert voice == {**NEUTRAL, "pitch": (90, 120), "formant 1": (120, 80, 180, 0), "consonants": (80, 100)}
    with pytest.raises(UserError, match=r"some: 'klatt 6' cannot be interpolated; lines that can: pitch, formant 0"):
        parse("pitch 80 90\nklatt 6", "some")


def test_what_it_lacks_is_named(espeak: Espeak) -> None:
    with pytest.raises(UserError, match=r"has no voice 'nobody'"):
        espeak.its_voice("nobody")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package 'espeakng-loader'.*bespoke-fl\[speech\]"):
        Espeak()


def test_the_systems_library_does_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loader = pytest.importorskip("espeakng_loader", reason="its library stands in for the system's")
    path, data = loader.get_library_path(), loader.get_data_path()
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: path)
    monkeypatch.setenv("ESPEAK_DATA_PATH", data)  # as a system's library knows its folder
    with Espeak() as espeak:
        espeak.take(espeak.its_voice("m2"))
        assert len(espeak.speak(SENTENCE)) > RATE
    monkeypatch.setenv("ESPEAK_DATA_PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"found no lang/gmw/en-US in the folder of its data.*espeak-ng-data"):
        Espeak()
