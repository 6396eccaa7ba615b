"""Sound as spectrograms in decibels, one byte per value: one second at 8 kHz becomes 39 frames of 24 mel bands.

A frame is 256 samples (32 ms) under a periodic Hann window; frames begin 200 samples (25 ms) apart. Power is scaled so
that a sine of amplitude 1 in the middle of a bin of the Fourier transform has power 1 there (0 dB). Bands are triangles
of height 1, equally wide on the mel scale 2595 log10(1 + f / 700), from 60 to 3,800 Hz.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

RATE = 8000
WINDOW, HOP = 256, 200
FRAMES = (RATE - WINDOW) // HOP + 1  # 39
BANDS = 24
LOWEST, HIGHEST = 60.0, 3800.0
FLOOR = -100.0  # dB, what silence is taken for; a byte of 0. Full scale, 0 dB, is a byte of 255
AT_ONCE = 512  # clips transformed together
Floats = NDArray[np.float32]


def mulaw(code: NDArray[np.uint8]) -> Floats:
    """Samples from -1 to 1 of 8-bit mu-law codes, mu = 255: the codes 0, 127.5 and 255 are -1, 0 and 1."""
    return _EXPANDED[code]


def _expand(code: NDArray[np.float64]) -> Floats:
    level = 2 * code / 255 - 1
    samples: Floats = (np.sign(level) * (256 ** np.abs(level) - 1) / 255).astype(np.float32)
    return samples


_EXPANDED = _expand(np.arange(256, dtype=np.float64))


def mel(hertz: float) -> float:
    return float(2595 * np.log10(1 + hertz / 700))


@cache
def filterbank() -> NDArray[np.float64]:
    """The weight of every bin in every band: (BANDS, WINDOW / 2 + 1)."""
    marks = 700 * (10 ** (np.linspace(mel(LOWEST), mel(HIGHEST), BANDS + 2) / 2595) - 1)
    low, middle, high = marks[:-2, None], marks[1:-1, None], marks[2:, None]
    bins = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    return np.maximum(np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)), 0.0)


def log_mel(sound: Floats) -> Floats:
    """Decibels of clips (clips, samples): (clips, frames, BANDS)."""
    some = (sound[begin : begin + AT_ONCE] for begin in range(0, len(sound), AT_ONCE))
    found = [decibels(power(clips, WINDOW, HOP) @ filterbank().T) for clips in some]
    return np.concatenate(found) if found else np.zeros((0, FRAMES, BANDS), np.float32)


def power(sound: Floats, window: int, hop: int) -> NDArray[np.float64]:
    """Power of clips (clips, samples) by frame and bin: (clips, frames, window / 2 + 1)."""
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    frames = np.lib.stride_tricks.sliding_window_view(sound, window, axis=1)[:, ::hop]
    found: NDArray[np.float64] = (np.abs(np.fft.rfft(frames * hann)) * (2 / hann.sum())) ** 2
    return found


def decibels(power: NDArray[np.float64]) -> Floats:
    """Power on the scale of loudness, from FLOOR."""
    return (10 * np.log10(np.maximum(power, 10 ** (FLOOR / 10)))).astype(np.float32)


def as_bytes(decibels: Floats) -> NDArray[np.uint8]:
    """FLOOR to 0 dB in 255 steps of 0.39 dB."""
    codes: NDArray[np.uint8] = np.rint(np.clip(decibels / -FLOOR + 1, 0.0, 1.0) * 255).astype(np.uint8)
    return codes


def mixed(sound: Floats, noise: Floats, decibels: float) -> Floats:
    """Clips with noise added, so many decibels weaker than the clip; silence stays silence."""
    loudness = np.square(sound).mean(1), np.square(noise).mean(1)
    gain = np.sqrt(loudness[0] / np.maximum(loudness[1], 1e-12)) * 10 ** (-decibels / 20)
    noisy: Floats = (sound + gain[:, None] * noise).astype(np.float32)
    return noisy


def halved(sound: Floats) -> Floats:
    """16 kHz to 8 kHz: a windowed sinc of 63 taps takes out what lies above 4 kHz, then every other sample is kept."""
    reach = np.arange(-31, 32)
    taps = 0.5 * np.sinc(reach / 2) * np.hanning(65)[1:-1]
    return np.convolve(sound, taps / taps.sum(), mode="same")[::2].astype(np.float32)
