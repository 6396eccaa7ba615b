"""Data of a few made-up clinics: the same question everywhere, and answers that differ by clinic."""

import numpy as np

import bespoke


def load(clinics: int = 6, rows: int = 30, seed: int = 0) -> bespoke.Population:
    """Clinics with an answer of their own to the same question."""
    draw = np.random.default_rng(seed)
    found = {}
    for clinic in range(clinics):
        x = draw.standard_normal((rows, 3))
        found[f"clinic {clinic}"] = x, (x @ draw.standard_normal(3) > 0).astype(int)
    return bespoke.population(found, task="classification", name="clinics")
