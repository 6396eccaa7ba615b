"""ADNI: how much amyloid a PET scan of a brain shows (the SUVR score), a silo per vendor of scanners.

The files are those that Motley's preprocessing leaves: adni/images/<VENDOR>/*.png, whose names carry the subject (the
fourth part between underscores) and the image id (the last), and adni/labels.txt, lines of subject, image id, score.
Images are scaled to 32 x 32. The loss is the plain mean squared error, as in Motley.

A scan gives many images, and its images share a score: scans are the units of which clients' rows are split, as in
Motley, so that nothing is tested on a scan that was trained on.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from bespoke.data.population import Population
from bespoke.data.sources.formats.pictures import read_picture
from bespoke.data.sources.registry import damaged, describe, find_file, find_folder
from bespoke.randomness import text_key

SIDE = 32
NAMES = "<a>_<b>_<c>_<SUBJECT>_..._<IMAGE>.png"


def load() -> Population:
    """A client per vendor with scored images."""
    labels = find_file("adni/labels.txt", "adni")
    folder = find_folder("adni/images", "adni")
    scores = _scores(labels)
    found, unscored = [], 0
    for path in sorted(folder.glob("*/*.png")):
        parts = path.stem.split("_")
        if len(parts) < 5:
            raise damaged(path, f"an image named {path.name}", NAMES)
        scan = parts[3], parts[-1]
        if scan in scores:
            found.append((path.parent.name, text_key("/".join(scan)), path, scores[scan]))
        else:
            unscored += 1
    if not found:
        raise damaged(folder, f"{unscored} images, none of them scored in {labels.name}", f"<VENDOR>/{NAMES}")
    found.sort(key=lambda row: row[:3])
    about = describe(
        "adni",
        input="image",
        side=SIDE,
        channels=1,
        features=[f"pixel {i}" for i in range(SIDE * SIDE)],
        numeric=[False] * (SIDE * SIDE),
        target="SUVR",
        factor=1.0,
        model={"name": "fedavg-cnn"},
        notes=[f"{unscored} images without a score are left out.", "Images of a scan are never split."],
    )
    images = np.stack([read_picture(path, SIDE, "L", "adni") for _, _, path, _ in found])
    target = np.array([score for _, _, _, score in found], dtype=np.float32)
    scans = np.unique([scan for _, scan, _, _ in found], return_inverse=True)[1]
    vendors = [vendor for vendor, _, _, _ in found]
    return Population.build({"x": images, "y": target, "unit": scans}, vendors, about=about)


def _scores(path: Path) -> dict[tuple[str, str], float]:
    """(subject, image id) -> score."""
    scores: dict[tuple[str, str], float] = {}
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if not row:
                continue
            try:
                subject, image, score = row
                scores[subject.strip(), image.strip()] = float(score)
            except ValueError:
                raise damaged(path, f"{','.join(row)!r} in line {number}", "subject,image,score") from None
    if not scores or not np.isfinite(list(scores.values())).all():
        raise damaged(path, f"{len(scores)} scores, or scores that are not finite", "a finite score per line")
    return scores
