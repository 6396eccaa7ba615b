"""One method, one file. `METHODS` lists them by the names used in experiments."""

from __future__ import annotations

from bespoke.method import Method
from bespoke.methods.ditto import Ditto
from bespoke.methods.ensemble import Ensemble
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.fedprox import FedProx
from bespoke.methods.finetune import FineTune
from bespoke.methods.hypcluster import HypCluster
from bespoke.methods.knn_per import KNNPer
from bespoke.methods.local import Local
from bespoke.methods.mocha import Mocha
from bespoke.methods.mr_mtl import MRMTL
from bespoke.methods.self_fl import AugmentedSelfFL, SelfFL

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        FedAvg,
        FedProx,
        Local,
        FineTune,
        KNNPer,
        Ensemble,
        HypCluster,
        Ditto,
        MRMTL,
        Mocha,
        SelfFL,
        AugmentedSelfFL,
    )
}

__all__ = [
    "METHODS",
    "MRMTL",
    "AugmentedSelfFL",
    "Ditto",
    "Ensemble",
    "FedAvg",
    "FedProx",
    "FineTune",
    "HypCluster",
    "KNNPer",
    "Local",
    "Mocha",
    "SelfFL",
]
