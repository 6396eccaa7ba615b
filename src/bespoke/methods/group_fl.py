"""GroupFL: Liu, Hui and Peng, Group Personalized Federated Learning, ICASSP 2023, Algorithm 2 (and 1, as FedAvg).

The global model Theta, trained by FedAvg as the stage before, is fine-tuned by another federation in each group g of
clients, side by side: Theta_g begins as Theta; in round t a cohort I_gt of the group's clients trains it for K epochs
and Theta_g <- server step (mean of their changes), by a server optimizer whose state is the group's own. Fine-tuned
further on each client's own rows (Algorithm 3) it is GroupPerFL: see group_perfl.py.

Groups are given by the data (a column), or found by a stage before: see clustered_fl.py and feature_groups.py.
In the code: eta_l is `lr`, K `epochs`, FedAdam and eta_g `server`, |I_gt| the experiment's cohort size, T_g `rounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bespoke.declarations import Needs
from bespoke.method import Cohort, Setting
from bespoke.methods.parts.grouped import Grouped
from bespoke.tensors import Params, Tree


@dataclass(frozen=True)
class GroupFL(Grouped):
    """The global model, trained further by each group of clients for itself."""

    card = replace(
        Grouped.card,
        name="group-fl",
        title="GroupFL",
        paper="Liu et al., ICASSP 2023, Algorithm 2",
        unseen="a client that never trained gets its group's model; if its group is not known, the global model",
        after="fedavg",
    )
    needs = Needs(groups=True)

    def init_server(self, params: Params, setting: Setting = Setting()) -> Tree:
        members = setting.groups
        if members is None:  # no client's group is known
            members = torch.zeros(setting.clients, dtype=torch.int64)
        return self.begin(params, members, int(members.max()) if len(members) else 0)

    def server_round(self, server: Tree, cohort: Cohort) -> Tree:
        return self.step(server, cohort.sums["delta"], cohort.sums["weight"])
