"""Image files as rows of bytes: channels, then lines, then columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bespoke.data.sources.registry import damaged
from bespoke.errors import needs_extra


def read_picture(path: Path, side: int, mode: str, source: str, kept: float = 1.0) -> NDArray[np.uint8]:
    """An image of `mode` ('L' grey, 'RGB'), its central part `kept` of each side, resized to side x side."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise needs_extra("Pillow", "images", f"the source {source!r}") from None
    try:
        with Image.open(path) as opened:
            image = opened.convert(mode)
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise damaged(path, f"no readable image ({error})", "a whole JPEG or PNG file") from None
    width, height = image.size
    edge, top = width * (1 - kept) / 2, height * (1 - kept) / 2
    resized = image.resize((side, side), Image.Resampling.BILINEAR, (edge, top, width - edge, height - top))
    pixels = np.asarray(resized, dtype=np.uint8)
    return np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1)).reshape(-1)
