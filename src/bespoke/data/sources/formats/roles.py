"""Clients' roles (training, validation, test) as a source publishes them, stored as a column of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bespoke.data.about import RoleFacts
from bespoke.errors import UserError

TRAIN, VALIDATION, TEST = 0, 1, 2  # as in splits.cross_device's `role`
MOTLEY_SEED = 13


def motley_roles(ids: Sequence[str], validation: int, test: int, source: str) -> NDArray[np.uint8]:
    """Motley's split of clients: of the sorted ids, shuffled with seed 13, the first validate, the next are tested."""
    if min(validation, test) < 0 or validation + test >= len(ids):
        raise UserError(
            f"options 'validation' and 'test' of the source {source!r} are {validation} and {test}; together they have "
            f"to leave some of the {len(ids)} clients to train on"
        )
    names = np.array(ids)
    shuffled = np.random.RandomState(MOTLEY_SEED).permutation(np.sort(names))
    roles = np.full(len(names), TRAIN, dtype=np.uint8)
    roles[np.isin(names, shuffled[:validation])] = VALIDATION
    roles[np.isin(names, shuffled[validation : validation + test])] = TEST
    return roles


def role_facts(roles: NDArray[np.uint8]) -> RoleFacts:
    """What `about` says of the roles: how many clients have which."""
    train, validation, test = (int((roles == role).sum()) for role in (TRAIN, VALIDATION, TEST))
    return {
        "roles": {"train": train, "validation": validation, "test": test},
        "role": "the column 'role' of a client's rows: 0 for training, 1 for validation, 2 for test clients",
    }
