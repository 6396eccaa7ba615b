"""One method, one file. `METHODS` lists them by the names used in experiments, and finds methods of others."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from bespoke.errors import UserError
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
from bespoke.methods.self_fl import SelfFL
from bespoke.methods.self_fl_augmented import AugmentedSelfFL
from bespoke.methods.self_fl_clustered import ClusteredSelfFL
from bespoke.methods.shared import Shared
from bespoke.methods.shared_prefix import SharedPrefix
from bespoke.registry import Registry

_BUILT_IN: dict[str, type[Method]] = {
    method.card.name: method
    for method in (
        FedAvg, Shared, FedProx, Scaffold, Local, FineTune, Mixed, KNNPer, PerFedAvg, Ensemble, HypCluster, Ditto,
        MRMTL, PFedMe, APFL, Mocha, SelfFL, AugmentedSelfFL, ClusteredSelfFL, GroupFL, GroupPerFL, ClusteredFL,
        FeatureGroups, FedRep, PFedKM, FedEmbed, FedPC, FedPCFrozen, FedPCGenerated, FedPCSplit, FedPCMeta,
        SharedPrefix,
    )
}  # fmt: skip


def _checked(found: Any, where: str) -> type[Method]:
    """Checks a user's own method: a class with a card."""
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise UserError(f"{where} is not a method: it must be a class derived from bespoke.Method; it is {found!r}")
    name = found.card.name
    if not name or name in _BUILT_IN:
        what = f"the name of a built-in method, {name!r}" if name else "none"
        raise UserError(
            f"{where} needs a name of its own, and has {what}: give the class a card, "
            f"card = Card({found.__name__.lower()!r}), or card = replace({found.__mro__[1].__name__}.card, name=...)"
        )
    knobs = [entry for entry, value in vars(found).items() if isinstance(value, Field)]
    if knobs:
        raise UserError(f"{where} has knobs ({', '.join(knobs)}): put @dataclass(frozen=True) above the class")
    return found


METHODS: Registry[type[Method]] = Registry("method", "bespoke.methods", _BUILT_IN, _checked)


def label_of(name: str) -> str:
    """The name of a method in tables and folders, from its card."""
    return METHODS[name].card.name


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
    "label_of",
]
