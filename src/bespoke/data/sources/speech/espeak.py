"""Speech by espeak-ng, with new voices interpolated between its own: a voice is a set of numbers.

The library is the one in the package espeakng-loader (extra `speech`), or the system's (Debian: libespeak-ng1). A voice
file is lines of a name and numbers: pitch and its range in Hz; frequency, height, width (in percent of the language's)
and shift (Hz) of the formants 0 to 8; strength of voicing and of consonants; echo; length and loudness by stress.

`flutter` and `roughness` of a voice are not taken over but set to zero: they vary from one utterance to the next by how
much was said before. Without them an utterance is a function of voice and text.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import UserError, needs_extra

LANGUAGE = "lang/gmw/en-US"  # of its data: the accent that all voices have
RATE = 22050
NEUTRAL: dict[str, tuple[float, ...]] = {  # what a voice has that says nothing else
    "pitch": (82, 118),
    **{f"formant {number}": (100, 100, 100, 0) for number in range(9)},
    "voicing": (100,),
    "consonants": (100, 100),
    "echo": (0, 0),
    "stressAdd": (0,) * 8,
    "stressAmp": (17, 16, 19, 19, 19, 19, 21, 19),  # as LANGUAGE has it
}
NO_NUMBERS = ("language", "name", "gender", "flutter", "roughness")

Voice = dict[str, tuple[float, ...]]  # the numbers of every line of NEUTRAL
Sound = NDArray[np.int16]
_SYNCHRONOUS, _DO_NOT_EXIT, _CHARACTERS, _UTF8 = 2, 0x8000, 1, 1  # of speak_lib.h
_Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


class Espeak:
    """The library, to be used in a `with`: it keeps its state in the process, so that there is one at a time."""

    def __init__(self) -> None:
        self.library, folder = _library()
        self.pieces: list[Sound] = []
        self.callback = _Callback(self._collect)  # the library holds but a pointer: kept as long as it may call
        rate = self.library.espeak_Initialize(_SYNCHRONOUS, 0, folder, _DO_NOT_EXIT)
        self.library.espeak_SetSynthCallback(self.callback)
        self.library.espeak_Info.restype = ctypes.c_char_p
        data = ctypes.c_char_p()
        self.version = self.library.espeak_Info(ctypes.byref(data)).decode().split()[0]
        self.data = Path((data.value or b"").decode())
        if rate != RATE or not (self.data / LANGUAGE).is_file():
            raise UserError(
                f"espeak-ng {self.version} found no {LANGUAGE} in the folder of its data, {self.data}; install "
                "its data (Debian: espeak-ng-data), or pip install 'bespoke-fl[speech]'"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.library.espeak_Terminate()

    def _collect(self, samples: Any, count: int, _events: Any) -> int:
        if samples and count > 0:
            self.pieces.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def its_voice(self, name: str) -> Voice:
        """The numbers of one of its own voices (`voices/!v` of its data)."""
        path = self.data / "voices" / "!v" / name
        if not path.is_file():
            raise UserError(f"espeak-ng {self.version} has no voice {name!r} ({path}); use version 1.51 or newer")
        return parse(path.read_text(encoding="utf-8"), str(path))

    def take(self, voice: Voice) -> None:
        """Speak with this voice from now on."""
        language = (self.data / LANGUAGE).read_text(encoding="utf-8")
        with TemporaryDirectory(prefix="v") as folder:
            path = Path(folder) / "v"
            path.write_bytes(f"{language}\n{as_lines(voice)}".encode())
            with open(path, "rb") as file:  # by its number, where it has one: of a path the library takes 59 characters
                name = f"/dev/fd/{file.fileno()}" if os.path.exists("/dev/fd") else str(path)
                refused = self.library.espeak_SetVoiceByFile(name.encode()) != 0
            if refused:
                raise UserError(f"espeak-ng {self.version} did not take a voice of its own language file and {voice}")

    def speak(self, text: str) -> Sound:
        """What it sounds like, at RATE."""
        self.pieces.clear()
        if hasattr(self.library, "espeak_ng_SetRandSeed"):
            self.library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        content = text.encode()
        done = self.library.espeak_Synth(
            content, ctypes.c_size_t(len(content) + 1), 0, _CHARACTERS, 0, _UTF8, None, None
        )
        if done != 0 or not self.pieces:
            raise UserError(f"espeak-ng {self.version} said nothing (code {done}) when asked to say {text!r}")
        return np.concatenate(self.pieces)


def _library() -> tuple[ctypes.CDLL, bytes | None]:
    """The library, and the folder of its data where it is not the library's own."""
    try:
        import espeakng_loader
    except ImportError:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise needs_extra("espeakng-loader", "speech", "synthetic speech") from None
        return ctypes.CDLL(name), None
    return ctypes.CDLL(espeakng_loader.get_library_path()), espeakng_loader.get_data_path().encode()


def parse(text: str, where: str) -> Voice:
    """A voice file's numbers; a line of which numbers cannot be taken between two voices is refused."""
    voice = dict(NEUTRAL)
    for line in text.splitlines():
        words = line.split("//")[0].split("#")[0].split()
        if not words or words[0] in NO_NUMBERS:
            continue
        name = " ".join(words[:2]) if words[0] == "formant" else words[0]
        if name not in NEUTRAL:
            raise UserError(f"{where}: {line.strip()!r} cannot be interpolated; lines that can: {', '.join(NEUTRAL)}")
        given = tuple(float(word) for word in words[len(name.split()) :])[: len(NEUTRAL[name])]
        voice[name] = given + NEUTRAL[name][len(given) :]
    return voice


def mixed(voices: Mapping[str, Voice], shares: Mapping[str, float]) -> Voice:
    """The voice between others: every number is their mean, weighted by shares that sum to one."""
    if abs(sum(shares.values()) - 1) > 1e-9 or min(shares.values()) < 0:
        raise ValueError(f"shares have to be positive and sum to one: {dict(shares)}")
    return {
        name: tuple(sum(share * voices[voice][name][i] for voice, share in shares.items()) for i in range(len(neutral)))
        for name, neutral in NEUTRAL.items()
    }


def as_lines(voice: Voice) -> str:
    """A voice as espeak-ng reads it: whole numbers, a line for each name."""
    lines = [f"{name} {' '.join(str(round(value)) for value in values)}" for name, values in voice.items()]
    return "\n".join([*lines, "flutter 0", "roughness 0", ""])
