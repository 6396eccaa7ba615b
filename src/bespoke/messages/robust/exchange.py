"""Robust rules as exchanges between the server and the hosts that hold a cohort's messages.

The server learns only the answers to its questions: `all` are the messages themselves (median, trimmed mean, Krum),
`norms` a few numbers of each client, `sums` and `pull` sums over clients. Norm-bound scales every client's change to
the median norm and adds (Sun et al., Can You Really Backdoor Federated Learning?, 2019). The geometric median is found
by smoothed Weiszfeld steps (Pillutla et al., Robust Aggregation for Federated Learning, IEEE TSP 2022): in each, client
k sends b_k z_k and b_k = 1 / max(nu, |z_k - v|), z_k being its change, and the server moves v to sum b_k z_k / sum b_k.
The first v is zero, where changes of any size pull with the same force.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bespoke.messages.robust.message import COMMON, ROWS, Block, Form, Messages, along, factors, paths, rebuilt
from bespoke.messages.robust.rules import allowed, krum, median, trimmed_mean
from bespoke.messages.robust.settings import BY_CLIENT, SEE_EACH, RobustConfig
from bespoke.tensors import Params, Tree, nbytes, take, tree_map

Ask = Callable[[str, Tree], list[Tree]]  # (question, inputs) -> the answers of all hosts that hold messages
SMOOTHING = 1e-6  # nu: the least distance to the centre that counts
FAR = 2.0  # changes longer than so many bounds are logged as cut


@dataclass(frozen=True)
class Rule:
    """A rule and its knobs: see RobustConfig."""

    name: str
    f: int | float = 0.2
    trim: float = 0.2
    bound: float | None = None  # None: the cohort's median norm
    steps: int = 8

    @classmethod
    def of(cls, config: RobustConfig) -> Rule:
        return cls(config.rule, config.f, config.trim, None if config.bound == "auto" else config.bound, config.steps)

    @property
    def sees_each(self) -> bool:
        """Whether the server has to see every client's message."""
        return self.name in SEE_EACH

    @property
    def by_client(self) -> bool:
        """Whether the rule excludes or scales clients, so that it works for servers that use each client's value."""
        return self.name in BY_CLIENT

    def bounds_changes(self) -> bool:
        return self.name == "norm-bound"


@dataclass(frozen=True)
class Combined:
    """A cohort's result for the method's server, what the rule did, and what it cost."""

    sums: Tree
    each: Tree
    clients: tuple[int, ...]
    left_out: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    bounds: dict[str, float] = field(default_factory=dict)  # of the changes, by block
    bytes_up: int = 0
    bytes_down: int = 0


# -- what a host answers ---------------------------------------------------------------------------------------------
def answer(held: Messages, form: Form, question: str, inputs: Tree) -> Tree:
    """The clients' answer to a question of the server."""
    if question == "all":
        return {"up": held.up}
    if question == "norms":
        return held.norms(bool(inputs["changes"]))
    if question == "plain":
        return _plain(held, form)
    if question == "pull":
        return {name: _pull(block, inputs.get(name)) for name, block in held.blocks.items() if block.changes}
    return _summed(held, form, inputs)


def _plain(held: Messages, form: Form) -> Tree:
    """The sums without a rule, and the values that the server sees of each client."""
    common, sums = held.blocks[COMMON], {name: value for name, value in held.up.items() if name not in form.each}
    leaves = common.sums({path: leaf.double() for path, leaf in paths(sums)})
    kept = rebuilt(sums, {path: leaves[path].to(leaf.dtype) for path, leaf in paths(sums)})
    return {"sums": kept, "each": {name: held.up[name] for name in form.each}}


def _pull(block: Block, centres: Params | None) -> Tree:
    """Sums of the clients' changes, weighted by closeness, and of these weights, for each row."""
    here = {path: leaf.new_zeros((block.many, *leaf.shape[1:])) for path, leaf in block.changes.items()}
    near = 1 / block.distances(here if centres is None else centres).clamp(min=SMOOTHING)
    mass = near.new_zeros(block.many).index_add_(0, block.index, near)
    return {"sums": block.sums(block.changes, near), "mass": mass}


def _summed(held: Messages, form: Form, bounds: Params) -> Tree:
    """Sums of all bounded values, scaled to their bounds, and each client's values of EACH fields."""
    sums: Params = {}
    each: Params = {}
    norms = held.norms(True)
    for name, block in held.blocks.items():
        if name in bounds:
            scales = factors(norms[name], float(bounds[name]))
            sums |= block.sums(block.changes, scales)
            each |= {path: leaf * along(scales, leaf) for path, leaf in block.changes.items()}
        for path, leaf in block.others.items():
            scales = factors(norms[path], float(bounds[path]))
            sums |= block.sums({path: leaf}, scales)
            each[path] = leaf * along(scales, leaf)
    clients = {name: block.clients() for name, block in held.blocks.items()}
    like = tree_map(torch.zeros_like, take(held.up, 0))
    return {"sums": sums, "clients": clients, "like": like, "each": _seen(held, form, each)}


def _seen(held: Messages, form: Form, values: Params) -> Params:
    """The leaves of EACH fields, with these values replaced."""
    found = {}
    for path, leaf in paths({name: held.up[name] for name in form.each}):
        name = path.split("/")[0]
        if path in values:
            weight = held.weights[name] if name in form.changes else torch.ones(len(leaf), dtype=torch.float64)
            found[path] = (values[path] * along(weight, leaf)).to(leaf.dtype)
        else:
            found[path] = leaf
    return found


# -- what the server does --------------------------------------------------------------------------------------------
def combine(
    rule: Rule | None, form: Form, ask: Ask, clients: tuple[int, ...], groups: Tensor | None, many: int
) -> Combined:
    """Aggregates one cohort by a rule; clients: in the order of hosts' answers; groups: each one's row of the sums."""
    if rule is None:
        answers = ask("plain", {})
        sums = _added([found["sums"] for found in answers])
        sums = sums if groups is not None else take(sums, 0)
        return Combined(sums, _joined([found["each"] for found in answers]), clients)
    if rule.sees_each:
        ups = [found["up"] for found in ask("all", {})]
        order = torch.tensor(clients).argsort()  # the order of hosts' answers differs
        up = take(tree_map(lambda *parts: torch.cat(parts), *ups), order)
        sorted_clients = tuple(torch.tensor(clients)[order].tolist())
        return _of_each(
            rule, form, Messages.of(sorted_clients, up, form, None if groups is None else groups[order], many),
            grouped=groups is not None,
        )  # fmt: skip
    return _of_sums(rule, form, ask, clients, groups is not None)


def _of_each(rule: Rule, form: Form, all_: Messages, grouped: bool) -> Combined:
    means: dict[str, Params] = {}
    kept = torch.ones(len(all_.clients), dtype=torch.bool)
    for name, block in all_.blocks.items():
        if not block.changes:
            continue
        vectors = block.vectors()
        found = vectors.new_zeros((block.many, vectors.shape[1]))
        for row in block.index.unique().tolist():
            here = torch.nonzero(block.index == row)[:, 0]
            found[row], chosen = _ruled(rule, vectors[here])
            kept[here] &= chosen
        means[name] = _shaped(found, block)
    sums: Params = {}
    values: Params = {path: leaf for block in all_.blocks.values() for path, leaf in block.changes.items()}
    for block in all_.blocks.values():
        for path, leaf in block.others.items():
            norms = leaf.reshape(len(leaf), -1).norm(dim=1)
            scales = factors(norms, float(median(norms)))
            values[path] = leaf * along(scales, leaf)
            sums |= block.sums({path: leaf}, scales)
    counts = {name: block.clients() for name, block in all_.blocks.items()}
    seen = _seen(all_, form, values)
    if rule.by_client:
        seen = take(seen, kept)
    used = tuple(c for c, k in zip(all_.clients, kept.tolist()) if k)
    left_out = tuple(c for c, k in zip(all_.clients, kept.tolist()) if not k)
    like = take(all_.up, 0)
    restored = _restored(form, like, means, counts, sums, grouped)
    each = rebuilt({name: like[name] for name in form.each}, seen)
    return Combined(restored, each, used if rule.by_client else all_.clients, left_out)


def _ruled(rule: Rule, changes: Tensor) -> tuple[Tensor, Tensor]:
    """The aggregated change of a row's clients, and the clients that it was made of."""
    everyone = torch.ones(len(changes), dtype=torch.bool)
    if rule.name == "median":
        return median(changes), everyone
    if rule.name == "trimmed-mean":
        return trimmed_mean(changes, rule.trim), everyone
    f = allowed(rule.f, len(changes))
    chosen = krum(changes, f, 1 if rule.name == "krum" else len(changes) - f)
    kept = torch.zeros_like(everyone)
    kept[chosen] = True
    return changes[chosen].mean(0), kept


def _of_sums(rule: Rule, form: Form, ask: Ask, clients: tuple[int, ...], grouped: bool) -> Combined:
    centres: dict[str, Params] = {}
    up = down = 0
    for step in range(rule.steps if not rule.bounds_changes() else 0):
        found = _added(ask("pull", centres))
        centres = {
            name: {path: total / along(part["mass"].clamp(min=1e-300), total) for path, total in part["sums"].items()}
            for name, part in found.items()
        }
        up += len(clients) * (4 * len(found) + (_floats(centres) if step else 0))
        down += len(clients) * (_floats(centres) if step else 0)
    measured = rule.bounds_changes() and rule.bound is None
    norms = _joined(ask("norms", {"changes": measured}))
    bounds = {path: float(median(values)) for path, values in norms.items()}
    cut: set[int] = set()
    if rule.bounds_changes():
        if rule.bound is not None:
            bounds |= dict.fromkeys((COMMON, ROWS), rule.bound)
        for name in set(norms) & {COMMON, ROWS}:
            cut |= {c for c, n in zip(clients, norms[name].tolist()) if n > FAR * bounds[name]}
    answers = ask("sums", {path: torch.tensor(value, dtype=torch.float64) for path, value in bounds.items()})
    total = _added([{name: found[name] for name in ("sums", "clients")} for found in answers])
    like, counts = answers[0]["like"], total["clients"]
    if rule.bounds_changes():
        for name, many in counts.items():
            centres[name] = {
                path: leaf / along(many.clamp(min=1).double(), leaf)
                for path, leaf in total["sums"].items()
                if _block(form, path) == name and path.split("/")[0] in form.changes
            }
    restored = _restored(form, like, centres, counts, total["sums"], grouped)
    each = rebuilt({name: like[name] for name in form.each}, _joined([found["each"] for found in answers]))
    sent = len(clients) * 4 * len(norms)
    used_bounds = {name: bounds[name] for name in (COMMON, ROWS) if name in bounds and name in counts}
    return Combined(restored, each, clients, (), tuple(sorted(cut)), used_bounds, up + sent, down + sent)


def _restored(
    form: Form, like: Tree, means: dict[str, Params], clients: dict[str, Tensor], others: Params, grouped: bool
) -> Tree:
    """The sums for the method's server: for changes, the rule's change times the sum of weights."""
    found = {}
    fields = {name: value for name, value in like.items() if name not in form.each}
    for path, leaf in paths(fields):
        name, block = path.split("/")[0], _block(form, path)
        if name in form.counts:
            total = along(clients[block], leaf[None]) * torch.ones_like(leaf)
        elif name in form.changes:
            mean = means[block][path]
            total = mean * along(_weight(form, form.changes[name], block, clients, others), mean)
        else:
            total = others[path]
        found[path] = (total if block == ROWS or grouped else total[0]).to(leaf.dtype)
    return rebuilt(fields, found)


def _weight(form: Form, weight: str, block: str, clients: dict[str, Tensor], others: Params) -> Tensor:
    """The sum of the weights behind a change, for each row of its block."""
    here = clients[block]
    if not weight or weight in form.counts:
        return here.double()
    total = others[weight]
    if _block(form, weight) == block:
        return total
    return total.sum() * here / here.sum().clamp(min=1)  # rows share the common part, or sum to it


def _block(form: Form, path: str) -> str:
    return ROWS if form.has_rows(path) else COMMON


def _shaped(rows: Tensor, block: Block) -> Params:
    """The inverse of `Block.vectors`: the leaves of long vectors, one for each row of a block."""
    parts = rows.split([leaf[0].numel() for leaf in block.changes.values()], dim=1)
    return {p: part.reshape(-1, *leaf.shape[1:]) for (p, leaf), part in zip(block.changes.items(), parts)}


def _added(answers: list[Tree]) -> Any:
    return tree_map(lambda *parts: torch.stack(parts).sum(0), answers[0], *answers[1:])


def _joined(answers: list[Tree]) -> Any:
    return tree_map(lambda *parts: torch.cat(parts), answers[0], *answers[1:])


def _floats(centres: dict[str, Params]) -> int:
    """Bytes of the centres on the wire, four for each number."""
    return nbytes(centres) // 2
