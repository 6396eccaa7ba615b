"""Parses the names of candidates: 'lr 0.01, epoch 3' means a learning rate and an epoch."""

from __future__ import annotations

from collections.abc import Sequence

NOMINAL = ("cluster", "model")  # numbers that are names: nothing lies between cluster 1 and cluster 2


def settings_of(name: str) -> dict[str, float]:
    """'lr 0.01, epoch 3' -> {'lr': 0.01, 'epoch': 3.0}; nothing where a candidate's name is not of this form."""
    found: dict[str, float] = {}
    for part in name.split(", "):
        word, _, value = part.rpartition(" ")
        try:
            found[word] = float(value)
        except ValueError:
            return {}
        if not word or word in NOMINAL:
            return {}
    return found


def axes_of(names: Sequence[str]) -> list[str]:
    """What the candidates differ in, as in ['lr', 'epoch']; the last one changes fastest."""
    return list(dict.fromkeys(word for name in names[1:] for word in settings_of(name)))


def named(settings: dict[str, float]) -> str:
    return ", ".join(f"{word} {value:g}" for word, value in settings.items())
