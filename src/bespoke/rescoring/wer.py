"""Word error rates by jiwer. `words_of` splits references and hypotheses in the same way."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bespoke.errors import needs_extra

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def words_of(text: str) -> list[str]:
    """Lower-case words: letters, digits and apostrophes between them; all other characters separate words.

    Numbers are taken as they are written: 20 is not twenty, and 1,000 is two words.
    """
    return _WORD.findall(text.lower().replace("\u2019", "'"))


def errors(reference: str, hypotheses: Sequence[str]) -> NDArray[np.int64]:
    """Substitutions, deletions and insertions of each hypothesis."""
    try:
        import jiwer
    except ImportError:
        raise needs_extra("jiwer", "speech", "the word error rate") from None
    said = " ".join(words_of(reference))
    found = (jiwer.process_words(said, " ".join(words_of(text))) for text in hypotheses)
    return np.array([out.substitutions + out.deletions + out.insertions for out in found], dtype=np.int64)
