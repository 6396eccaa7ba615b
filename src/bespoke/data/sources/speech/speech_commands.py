"""Speech Commands (Warden 2018): spoken words of one second. The task is to detect a wake word.

Read from a table of the test set (`word`, `speaker`, `clip`, `mulaw_8khz`: 8,000 mu-law bytes) or from the published
folders (`clips/<word>/<speaker>_nohash_<n>.wav`, 16 kHz, and `clips/_background_noise_`, cut into seconds); a clip
without a speaker is background noise. See bespoke.data.sources.speech.spectrogram for what becomes of the sound.

Self-FL's wake-word data are Amazon's own: device types A to E, each in the states normal, playback and alarm. What
stands in for them here:

- *Device types* are groups of speakers whose recordings sound alike when nobody speaks. People recorded themselves on
  their own phones and computers, so the quietest tenth of a speaker's frames is what microphone and room add. Speakers
  are ordered by its first principal component and cut into five groups of 30, 25, 20, 15 and 10 % of the clips.
- *States*, with `states`: 60 % of the clips stay as they are (normal), noise is mixed into a quarter 10 dB below the
  word (playback), and into the rest as loud as the word (alarm). Types A and C have no alarm, as in the paper.
"""

from __future__ import annotations

import hashlib
import json
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from bespoke.data.population import Population
from bespoke.data.sources.registry import at_least, damaged, describe, find_file, find_folder, read_columns
from bespoke.data.sources.speech.spectrogram import (
    BANDS,
    FRAMES,
    RATE,
    Floats,
    as_bytes,
    halved,
    log_mel,
    mixed,
    mulaw,
)
from bespoke.errors import UserError, unknown
from bespoke.randomness import client_keys, mix, uniform
from bespoke.storage import open_arrays, write_arrays

SOURCE = "speech-commands"
TABLE = "speech_commands/speech_commands_test.parquet"
FOLDERS = "speech_commands/clips"
NOISE = "_background_noise_"
COLUMNS = ("word", "speaker", "clip", "mulaw_8khz")
STATES = {"normal": np.inf, "playback": 10.0, "alarm": 0.0}  # how many dB the noise lies below the word
USUAL = (0.6, 0.25, 0.15)  # of the clips, in the order of STATES
DEVICES = {"A": 0.30, "B": 0.25, "C": 0.20, "D": 0.15, "E": 0.10}  # of the clips
SILENT_ALARM = ("A", "C")  # types without the state alarm
PICTURES_FORMAT = 1  # of kept pictures: another way to make them gets another number
Layout = Literal["table", "folders"]
ClipsRead = tuple[list[str], list[str], list[str], Floats]  # words, speakers, names and sound of clips


@dataclass(frozen=True)
class Clips:
    """All clips: what was said, by whom ('' is noise), a key of each for draws, and what it sounds like."""

    words: NDArray[np.str_]
    speakers: NDArray[np.str_]
    keys: NDArray[np.uint64]
    pictures: NDArray[np.uint8]  # (state, clip, FRAMES * BANDS)

    def __len__(self) -> int:
        return len(self.words)


def load(
    wake_word: str = "up",
    clients: Literal["speakers", "devices"] = "speakers",
    least: int = 10,
    per_device: int = 1,
    states: bool = False,
    layout: Layout = "table",
) -> Population:
    """Speakers of at least `least` clips, or `per_device` clients of every device type; groups are device types."""
    at_least(SOURCE, 1, least=least, per_device=per_device)
    clips = read_clips(layout)
    spoken = sorted(set(clips.words[clips.speakers != ""]))
    if wake_word not in spoken:
        raise unknown("wake word", wake_word, spoken, f"the clips of the source {SOURCE!r}")
    device = device_types(clips)
    owner, kept = _speakers(clips, least) if clients == "speakers" else _dealt(clips, device, per_device)
    state = usual_state(clips, device) if states else np.zeros(len(clips), np.int64)
    is_wake_word = clips.words == wake_word
    about = describe(
        SOURCE,
        input="spectrogram",
        frames=FRAMES,
        bands=BANDS,
        classes=["another", wake_word],
        features=[f"frame {frame}, band {band}" for frame in range(FRAMES) for band in range(BANDS)],
        numeric=[False] * (FRAMES * BANDS),
        target=f"whether it is {wake_word!r}",
        notes=_notes(clips, kept, is_wake_word, states, clients, least),
    )
    columns: dict[str, NDArray[Any]] = {
        "x": clips.pictures[state[kept], kept],
        "y": is_wake_word[kept].astype(np.int64),
        "clip": kept,  # its place among all clips, to find it in another state
        "state": state[kept].astype(np.uint8),
    }
    group = device[kept]
    if clients == "speakers":  # noise has the type of the speaker it went to
        type_of = dict(zip(clips.speakers, device))
        group = np.array([type_of[speaker] for speaker in owner])
    return Population.build(columns, owner, group=group, about=about)


def _speakers(clips: Clips, least: int) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """The client of every clip kept, and which those are; background noise goes to the speakers at random."""
    names, count = np.unique(clips.speakers[clips.speakers != ""], return_counts=True)
    enough = names[count >= least]
    if not len(enough):
        raise UserError(
            f"option 'least' of the source {SOURCE!r} is {least}; no client has more than {count.max()} clips"
        )
    adopters = enough[(mix("noise to speakers", clips.keys) % np.uint64(len(enough))).astype(np.int64)]
    owner = np.where(clips.speakers == "", adopters, clips.speakers)
    kept = np.flatnonzero(np.isin(owner, enough))
    return owner[kept], kept


def _dealt(clips: Clips, device: NDArray[np.str_], each: int) -> tuple[NDArray[np.str_], NDArray[np.int64]]:
    """Clients A, ..., E, or A1, A2, ...: every type's clips dealt out evenly."""
    owner = device.astype("<U8")
    for letter in DEVICES if each > 1 else ():
        mine = np.flatnonzero(device == letter)
        shuffled = mine[np.argsort(mix("clips to clients", clips.keys[mine]), kind="stable")]
        for hand in range(each):
            owner[shuffled[hand::each]] = f"{letter}{hand + 1}"
    return owner, np.arange(len(clips))


def device_types(clips: Clips) -> NDArray[np.str_]:
    """The type of every clip's speaker, A to E; background noise is dealt out at random."""
    names, speaker = np.unique(clips.speakers, return_inverse=True)
    frames = clips.pictures[0].reshape(len(clips), FRAMES, BANDS)
    quiet = np.zeros((len(names), BANDS))
    for place in range(len(names)):
        mine = frames[speaker == place].reshape(-1, BANDS).astype(np.float64)
        softest = np.argsort(mine.sum(1), kind="stable")[: max(len(mine) // 10, 1)]
        quiet[place] = mine[softest].mean(0)
    centred = quiet - quiet.mean(0)
    axis = np.linalg.eigh(centred.T @ centred)[1][:, -1]
    order = centred @ (axis * np.sign(axis.sum()))  # louder rooms and microphones come last
    ends = np.cumsum(list(DEVICES.values()))
    voiced = np.flatnonzero(names != "")
    ranked = voiced[np.argsort(order[voiced], kind="stable")]
    sizes = np.bincount(speaker, minlength=len(names))[ranked]
    middle = (np.cumsum(sizes) - sizes / 2) / sizes.sum()  # where a speaker's clips lie among all
    letters = np.array(list(DEVICES))
    of_name = np.full(len(names), letters[0])
    of_name[ranked] = letters[np.searchsorted(ends[:-1], middle, side="right")]
    drawn = letters[np.searchsorted(ends[:-1], uniform("noise to devices", clips.keys), side="right")]
    return np.where(clips.speakers == "", drawn, of_name[speaker])


def usual_state(clips: Clips, device: NDArray[np.str_]) -> NDArray[np.int64]:
    """The state in which every clip is heard in training, a place in STATES."""
    drawn = np.searchsorted(np.cumsum(USUAL)[:-1], uniform("state", clips.keys), side="right")
    last = len(STATES) - 1
    return np.where((drawn == last) & np.isin(device, SILENT_ALARM), last - 1, drawn)


def _notes(
    clips: Clips, kept: NDArray[np.int64], is_wake_word: NDArray[np.bool_], states: bool, clients: str, least: int
) -> list[str]:
    notes = [
        f"{int(is_wake_word[kept].sum())} of {len(kept)} clips are the wake word; background noise is among the "
        "others.",
        "Groups stand in for device types: speakers whose recordings sound alike when nobody speaks.",
    ]
    if clients == "speakers":
        notes.append(f"{len(clips) - len(kept)} clips of speakers with fewer than {least} are left out.")
    if states:
        notes.append("Noise was mixed into 40 % of the clips, for the states 'playback' and 'alarm' of a device.")
    return notes


# -- files -------------------------------------------------------------------------------------------------------------
def read_clips(layout: Layout = "table") -> Clips:
    """All clips in every state; made once and kept in ~/.cache/bespoke/decoded."""
    if layout == "table":
        where = find_file(TABLE, SOURCE)
        files = [where]
    else:
        where = find_folder(FOLDERS, SOURCE)
        files = sorted(where.glob("*/*.wav"))
        if not files:
            raise damaged(where, "no */*.wav", "a folder of .wav files for every word, as published")
    digest = hashlib.sha256(f"{PICTURES_FORMAT}:{FRAMES}x{BANDS}:{STATES}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path}:{status.st_size}:{status.st_mtime_ns}\n".encode())
    kept = Path.home() / ".cache" / "bespoke" / "decoded" / f"{SOURCE}-{digest.hexdigest()[:16]}.safetensors"
    if not kept.exists():
        clips_read = _read_table(where) if layout == "table" else _read_folders(files)
        kept.parent.mkdir(parents=True, exist_ok=True)
        texts = {name: json.dumps(values) for name, values in zip(("words", "speakers", "names"), clips_read)}
        write_arrays(kept, {"pictures": torch.from_numpy(_pictures(where, clips_read))}, texts)
    arrays, texts = open_arrays(kept)
    words, speakers, names = (json.loads(texts[name]) for name in ("words", "speakers", "names"))
    return Clips(np.array(words), np.array(speakers), _keys(words, names), arrays["pictures"].numpy())


def _keys(words: list[str], names: list[str]) -> NDArray[np.uint64]:
    """A speaker's clips are counted for every word anew: a clip is told by both."""
    return client_keys([f"{word}/{name}" for word, name in zip(words, names)])


def _pictures(where: Path, clips_read: ClipsRead) -> NDArray[np.uint8]:
    """Every clip in every state; which noise a clip hears is drawn by its key."""
    words, speakers, names, sound = clips_read
    noise = np.flatnonzero(np.array(speakers) == "")
    if not len(noise) or len(noise) == len(words):
        found = "no background noise" if not len(noise) else "background noise alone"
        raise damaged(where, found, f"words, and noise (a clip without a speaker, or a folder {NOISE})")
    keys = _keys(words, names)
    made = np.empty((len(STATES), len(sound), FRAMES * BANDS), np.uint8)
    for place, (state, decibels) in enumerate(STATES.items()):
        now = sound
        if np.isfinite(decibels):
            drawn = noise[(mix(state, keys) % np.uint64(len(noise))).astype(np.int64)]
            now = mixed(sound, sound[drawn], decibels)
        made[place] = as_bytes(log_mel(now)).reshape(len(sound), -1)
    return made


def _read_table(path: Path) -> ClipsRead:
    words, speakers, names, codes = read_columns(path, COLUMNS)
    for name, code in zip(names, codes):
        if not isinstance(code, bytes) or len(code) != RATE:
            found = f"{len(code)} bytes" if isinstance(code, bytes) else repr(code)[:40]
            raise damaged(path, f"clip {name!r} of {found}", f"{RATE} mu-law bytes, one second")
    if not words:
        raise damaged(path, "no clips", "a row per clip")
    return words, speakers, names, mulaw(np.frombuffer(b"".join(codes), dtype=np.uint8).reshape(len(codes), RATE))


def _read_folders(paths: list[Path]) -> ClipsRead:
    words, speakers, names, sounds = [], [], [], []
    for path in paths:
        sound, word = _read_wave(path), path.parent.name
        if word == NOISE:
            pieces = [sound[begin : begin + RATE] for begin in range(0, len(sound) - RATE + 1, RATE)]
        else:
            pieces = [np.pad(sound[:RATE], (0, max(RATE - len(sound), 0)))]
        for number, piece in enumerate(pieces):
            words.append(word)
            speakers.append("" if word == NOISE else path.stem.split("_nohash_")[0])
            names.append(f"{path.stem}_{number}" if word == NOISE else path.stem)
            sounds.append(piece)
    return words, speakers, names, np.stack(sounds)


def _read_wave(path: Path) -> Floats:
    try:
        with wave.open(str(path), "rb") as file:
            kind = (file.getnchannels(), file.getsampwidth(), file.getframerate())
            content = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise damaged(path, f"no readable wave file ({error})", "16-bit sound at 16 kHz") from None
    if kind != (1, 2, 2 * RATE):
        raise damaged(path, f"{kind[0]} channels of {8 * kind[1]} bits at {kind[2]} Hz", "one of 16 bits at 16000 Hz")
    return halved((np.frombuffer(content, dtype="<i2") / 2**15).astype(np.float32))
