"""One method, one file. `METHODS` lists them by the names used in experiments."""

from __future__ import annotations

from bespoke.method import Method
from bespoke.methods.apfl import APFL
from bespoke.methods.clustered_fl import ClusteredFL
from bespoke.methods.ditto import Ditto
from bespoke.methods.ensemble import Ensemble
from bespoke.methods.feature_groups import FeatureGroups
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.fedembed import FedEmbed
from bespoke.methods.fedpc import FedPC
from bespoke.methods.fedpc_frozen import FedPCFrozen
from bespoke.methods.fedpc_generated import FedPCGenerated
from bespoke.methods.fedpc_meta import FedPCMeta
from bespoke.methods.fedpc_split import FedPCSplit
from bespoke.methods.fedprox import FedProx
from bespoke.methods.fedrep import FedRep
from bespoke.methods.finetune import FineTune
from bespoke.methods.group_fl import GroupFL
from bespoke.methods.group_perfl import GroupPerFL
from bespoke.methods.hypcluster import HypCluster
from bespoke.methods.knn_per import KNNPer
from bespoke.methods.local import Local
from bespoke.methods.mixed import Mixed
from bespoke.methods.mocha import Mocha
from bespoke.methods.mr_mtl import MRMTL
from bespoke.methods.per_fedavg import PerFedAvg
from bespoke.methods.pfedkm import PFedKM
from bespoke.methods.pfedme import PFedMe
from bespoke.methods.scaffold import Scaffold
from bespoke.methods.self_fl import AugmentedSelfFL, SelfFL
from bespoke.methods.self_fl_clustered import ClusteredSelfFL
from bespoke.methods.shared import Shared
from bespoke.methods.shared_prefix import SharedPrefix

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        FedAvg, Shared, FedProx, Scaffold, Local, FineTune, Mixed, KNNPer, PerFedAvg, Ensemble, HypCluster, Ditto,
        MRMTL, PFedMe, APFL, Mocha, SelfFL, AugmentedSelfFL, ClusteredSelfFL, GroupFL, GroupPerFL, ClusteredFL,
        FeatureGroups, FedRep, PFedKM, FedEmbed, FedPC, FedPCFrozen, FedPCGenerated, FedPCSplit, FedPCMeta,
        SharedPrefix,
    )
}  # fmt: skip

__all__ = [
    "APFL",
    "METHODS",
    "MRMTL",
    "AugmentedSelfFL",
    "ClusteredFL",
    "ClusteredSelfFL",
    "Ditto",
    "Ensemble",
    "FeatureGroups",
    "FedAvg",
    "FedEmbed",
    "FedPC",
    "FedPCFrozen",
    "FedPCMeta",
    "FedPCSplit",
    "FedProx",
    "FedRep",
    "FineTune",
    "GroupFL",
    "GroupPerFL",
    "HypCluster",
    "KNNPer",
    "Local",
    "Mixed",
    "Mocha",
    "PFedKM",
    "PFedMe",
    "PerFedAvg",
    "Scaffold",
    "SelfFL",
    "Shared",
    "SharedPrefix",
]
