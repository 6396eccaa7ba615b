"""Local training: every client trains alone and nothing is shared (Motley's first baseline).

Each client trains the initial model on its own rows. Learning rate and epoch are chosen on validation data as in
fine-tuning; indeed it is fine-tuning of a model that nobody has trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bespoke.declarations import Card, Handoff
from bespoke.method import knob
from bespoke.methods.finetune import FineTune


@dataclass(frozen=True)
class Local(FineTune):
    """Every client trains a model of its own from scratch; nothing travels."""

    epochs: int = knob(50, "most epochs; the best is chosen on validation data", ge=1)
    reshuffle: bool = knob(True, "draw the batches anew for every epoch")
    blend: tuple[float, ...] = field(default=(1.0,), init=False)  # no knob: there is no shared model
    every: int = knob(2, "epochs between two candidates", ge=1)

    card = Card(
        "local",
        "the baseline without federation",
        personal="a model trained on the client's own rows alone",
        unseen="a client that never trained trains its own model just like the others",
    )
    downlink = {}
    handoff = Handoff()
