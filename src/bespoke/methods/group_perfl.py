"""GroupPerFL: Liu, Hui and Peng, Group Personalized Federated Learning, ICASSP 2023: Algorithms 1, 2 and 3.

Fine-tuning on the client's own rows, from its group's model instead of the global one (K_l is `epochs`, eta_il one of
`lrs`). FL, PerFL, GroupFL and GroupPerFL are four ways through the same stages: fedavg; fedavg, finetune; fedavg,
group-fl; fedavg, group-fl, finetune.
"""

from __future__ import annotations

from dataclasses import dataclass

from bespoke.declarations import Card
from bespoke.methods.finetune import FineTune


@dataclass(frozen=True)
class GroupPerFL(FineTune):
    """The model of the client's group, trained further on the client's own data."""

    card = Card(
        "group-perfl",
        "Liu et al., ICASSP 2023, Algorithm 3",
        "GroupPerFL",
        personal="its group's model after some epochs on the client's own rows",
        unseen="a client that never trained fine-tunes its group's model, or the global one if its group is not known",
        after="group-fl",
    )
