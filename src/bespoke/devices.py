"""Devices on which clients are computed: which ones exist, and how trees move to them and back to the CPU.

A device is named as PyTorch names it: "cpu", "cuda:0", "mps". "cuda" is all of its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from bespoke.errors import UserError
from bespoke.tensors import T, leaves, tree_map

CPU = torch.device("cpu")
_elsewhere: list[str] = []  # devices of a cluster's nodes, while clients are computed there


def available() -> list[str]:
    """The devices of this machine, as they are named in experiments."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found += ["cuda", *(f"cuda:{place}" for place in range(gpus()))]
    return found + ["mps"] * torch.backends.mps.is_available()


@contextmanager
def elsewhere(device: str) -> Iterator[None]:
    """Meanwhile this device may be chosen, too: clients are computed on other machines, which have it."""
    _elsewhere.append(device)
    try:
        yield
    finally:
        _elsewhere.remove(device)


def gpus() -> int:
    return torch.cuda.device_count()


def chosen(name: str, advice: str = "") -> str:
    """The device with this name; "auto" is the first available of cuda, mps and cpu."""
    here = available()
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if device in here)
    if name not in here and name not in _elsewhere:
        raise UserError(
            f"engine.device = {name!r} is not here; this machine has {', '.join(here)}"
            + (advice or ". Name one of them, or 'auto'")
        )
    return name


def of_worker(device: str, place: int) -> str:
    """The device of a worker; several GPUs are distributed over the workers."""
    return f"cuda:{place % max(gpus(), 1)}" if device == "cuda" else device


def has_double(device: torch.device) -> bool:
    """Whether the device computes in float64; Apple's GPUs do not."""
    return device.type != "mps"


def has_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16 products."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False  # not known
    known = torch.cpu.get_capabilities()
    return any(known.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def onto(tree: T, device: torch.device) -> T:
    """The tree on this device; leaves that are already there are not copied."""
    if all(leaf.device == device for leaf in leaves(tree)):  # as in most rounds, which may take no longer than the map
        return tree
    return tree_map(lambda leaf: leaf.to(device), tree)


def home(tree: T) -> T:
    """The tree on the CPU."""
    return onto(tree, CPU)


def working_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which new tensors are created on this device, so that methods need not name it."""
    return nullcontext() if device.type == "cpu" else device
