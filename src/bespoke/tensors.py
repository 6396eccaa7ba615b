"""Arithmetic on trees of tensors: a Tensor, or a dict of trees. Parameters are `dict[str, Tensor]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]
Tree = dict[str, Any]  # str -> Tensor or Tree
BUFFERS = "buffers."  # prefix of buffers that travel with parameters; no parameter has it
T = TypeVar("T")  # a Tensor, Params or a Tree: functions return the type that they get


def tree_map(function: Callable[..., Tensor], tree: T, *others: Any) -> T:
    """Applies a function to each leaf, and to the leaves at the same place of the other trees."""
    mapped: T = _mapped(function, tree, others)
    return mapped


def _mapped(function: Callable[..., Tensor], tree: Any, others: tuple[Any, ...]) -> Any:
    if isinstance(tree, dict):
        return {name: _mapped(function, leaf, tuple([other[name] for other in others])) for name, leaf in tree.items()}
    return function(tree, *others)


def named_map(function: Callable[[str, Tensor], Tensor], tree: T) -> T:
    """Applies a function to each leaf and its name as in `flatten`. A tree that is a leaf has an empty name."""
    mapped: T = _named(function, tree, "")
    return mapped


def _named(function: Callable[[str, Tensor], Tensor], tree: Any, prefix: str) -> Any:
    if isinstance(tree, dict):
        return {name: _named(function, value, f"{prefix}/{name}" if prefix else name) for name, value in tree.items()}
    return function(prefix, tree)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of a tree (or of a list of trees), in the order of its keys as inserted."""
    if isinstance(tree, Tensor):
        return [tree]
    found = []
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            found += leaves(value)
    return found


def is_buffer(name: str) -> bool:
    """Whether a leaf of this name is a buffer: set by forward passes in training, not by gradients."""
    return name.rpartition("/")[2].startswith(BUFFERS)


def without_buffers(a: T) -> T:
    """The tree with its parameters only."""
    if not isinstance(a, dict):
        return a
    kept: Any = {name: without_buffers(value) for name, value in a.items() if not is_buffer(name)}
    whole: T = kept
    return whole


def add(a: T, b: T) -> T:
    return tree_map(torch.add, a, b)


def subtract(a: T, b: T) -> T:
    return tree_map(torch.sub, a, b)


def scale(a: T, factor: float | Tensor) -> T:
    """factor * a. A factor with dimensions multiplies along the first ones of each leaf: a number per client."""
    if isinstance(factor, Tensor) and factor.dim():
        return tree_map(lambda leaf: leaf * factor.reshape(factor.shape + (1,) * (leaf.dim() - factor.dim())), a)
    return tree_map(lambda leaf: leaf * factor, a)


def add_scaled(a: T, b: T, factor: float | Tensor) -> T:
    """a + factor * b."""
    return tree_map(lambda x, y: x + factor * y, a, b)


def zeros_like(a: T) -> T:
    return tree_map(torch.zeros_like, a)


def squared_norm(a: Any) -> Tensor:
    """The squared Euclidean norm of the whole tree."""
    return sum(((leaf * leaf).sum() for leaf in leaves(a)), torch.zeros(()))


def norm(a: Any) -> Tensor:
    return squared_norm(a).sqrt()


def stack(trees: list[T]) -> T:
    """Stacks trees: leaves get a new first dimension, the client. A single tree is not copied."""
    if len(trees) == 1:
        return tree_map(lambda leaf: leaf[None], trees[0])
    return tree_map(lambda *parts: torch.stack(parts), trees[0], *trees[1:])


def take(a: T, index: Any) -> T:
    """The tree at an index (or slice) of the first dimension."""
    return tree_map(lambda leaf: leaf[index], a)


def cholesky(matrix: Tensor) -> Tensor:
    """The Cholesky factor; NaN for a matrix that is not definite, so that other clients are not affected."""
    factor, trouble = torch.linalg.cholesky_ex(matrix)
    return torch.where((trouble > 0)[..., None, None], torch.nan, factor)


def finite_rows(a: Any) -> Tensor:
    """Marks the clients (the first dimension of leaves) whose leaves are finite throughout."""
    flags = [leaf.flatten(1).isfinite().all(1) if leaf.dim() > 1 else leaf.isfinite() for leaf in leaves(a)]
    return torch.stack(flags).all(0)


def nbytes(a: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(a))


def count(a: Any) -> int:
    return sum(leaf.numel() for leaf in leaves(a))


def flatten(tree: Any, prefix: str = "") -> Params:
    """Joins nested names with '/': the form of trees on disk. An empty tree's name ends in '/'."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    out: Params = {} if tree or not prefix else {f"{prefix}/": torch.empty(0)}
    for name, value in tree.items():
        if "/" in name:
            raise ValueError(f"a tensor's name may not contain '/': {name!r}")
        out |= flatten(value, f"{prefix}/{name}" if prefix else name)
    return out


def unflatten(flat: Params) -> Tree:
    """The inverse of flatten."""
    tree: Tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if last:
            node[last] = leaf
    return tree
