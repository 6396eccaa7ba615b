"""One method, one file. `METHODS` lists them by the names used in experiments."""

from __future__ import annotations

from bespoke.method import Method
from bespoke.methods.ensemble import Ensemble
from bespoke.methods.fedavg import FedAvg
from bespoke.methods.fedprox import FedProx
from bespoke.methods.finetune import FineTune
from bespoke.methods.hypcluster import HypCluster
from bespoke.methods.local import Local

METHODS: dict[str, type[Method]] = {
    method.name: method for method in (FedAvg, FedProx, Local, FineTune, Ensemble, HypCluster)
}

__all__ = ["METHODS", "Ensemble", "FedAvg", "FedProx", "FineTune", "HypCluster", "Local"]
