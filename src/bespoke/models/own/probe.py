"""Tries a user's own model on a few rows before training, and explains in words what fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bespoke.errors import UserError
from bespoke.models.own.draws import drawn
from bespoke.models.own.network import Facts, Forward, OwnNetwork
from bespoke.models.own.task import OwnTask
from bespoke.models.own_loss import check_loss
from bespoke.models.work import multiply_adds
from bespoke.task import DRAW
from bespoke.tensors import Params

_KEY = torch.tensor(1)
_CHOICES = (
    "say what becomes of them: bespoke.model(..., buffers='average') averages them as the parameters are, 'private' "
    "keeps them and BatchNorm's parameters on each client (FedBN), 'frozen' leaves them as the factory made them"
)


def examined(network: OwnNetwork, rows: Params) -> OwnNetwork:
    """The network with its facts; `rows`: a few of the data's, at least two."""
    title, model = f"the model {network.model.title!r}", network.model
    module = network.module
    _check_parameters(network, title)
    if model.head:
        _check_head(module, model.head, title)
    batch = {**rows, "mask": torch.ones(len(rows["y"])), DRAW: _KEY}
    missing = [name for name in model.inputs[1:] if name not in batch]
    if missing:
        raise UserError(f"{title} takes the input {missing[0]!r}, and the rows have none of that name; they have x, y"
                        + "".join(f", {name}" for name in rows if name not in ("x", "y")))  # fmt: skip
    try:
        said, moving, draws = _tried(network, batch)
    except UserError:
        raise
    except Exception as error:
        raise network.failed(batch, error) from error
    if moving and model.buffers == "refuse":
        raise UserError(f"{title} has buffers that training changes: {_listed(moving)}; {_CHOICES}")
    outputs = network.taken(said)
    if not isinstance(outputs, Tensor) or outputs.dim() < 1 or len(outputs) != len(rows["y"]):
        found = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise UserError(
            f"{title} gave {found} for {len(rows['y'])} rows; say what of it are the predictions, a row each: "
            "bespoke.model(..., outputs=lambda o: o.logits)"
        )
    work = multiply_adds(lambda: network.run(dict(network._begun(0)), _first(batch), "eval")) if not moving else 0
    facts = Facts(moving, draws=draws, split=_split(network, batch, outputs) if model.head else "")
    seen = network.known(facts)
    _check_pure(seen, batch, outputs, title)
    work = work or multiply_adds(lambda: seen.run({**seen.init(0), **seen.layers}, _first(batch), "eval"))
    return seen.known(replace(facts, work=work))


def judged(task: OwnTask, rows: Params, classes: int) -> OwnTask:
    """The same task after a trial of its loss and outputs, and of vmap over clients."""
    network = task.network
    model, facts = network.model, network.facts
    batch = {**rows, "mask": torch.ones(len(rows["y"])), DRAW: _KEY}
    params = {**network.init(0), **network.layers}
    outputs = task.predict(params, batch)
    wanted = (len(rows["y"]), classes) if classes else (len(rows["y"]), 1)
    known = tuple(outputs.shape) == wanted
    task = replace(task, network=network.known(replace(facts, known=known)))
    if not known and not (model.loss and model.metrics):
        what = f"{classes} classes need" if classes else "a number for each row needs"
        raise UserError(
            f"the model {model.title!r} gave outputs of shape {tuple(outputs.shape)}; {what} {wanted}. Change the "
            "model, or give outputs=, or a loss= and metrics= that take such outputs"
        )
    losses = task.example_losses(outputs, rows["y"])
    if not losses.isfinite().all():
        raise UserError(
            f"the loss of the model {model.title!r} is {_first_bad(losses)} on rows of the data before anything is "
            "trained; correct the loss, or the values that the model begins with"
        )
    if model.loss is not None:
        check_loss(task.own_losses, f"the loss of the model {model.title!r}", *task.for_own(outputs, rows["y"]))
    whole = model.loss is not None and task.own_losses(*task.for_own(outputs, rows["y"])).dim() == 0
    seen = replace(facts, whole=whole, known=known)
    found = replace(task, network=network.known(seen))
    found.score(outputs, batch)  # the metrics, too
    _check_step(found, params, batch)
    why = _why_looped(found, params, batch)
    return replace(found, network=network.known(replace(seen, looped=why)))


def _check_step(task: OwnTask, params: Params, batch: Params) -> None:
    """Takes a gradient: what runs forward may fail on the way back."""
    try:
        task.stepped(params, batch)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the model {task.network.model.title!r} has no gradient on rows of the data: {type(error).__name__}: "
            f"{error}"
        ) from error


def _why_looped(task: OwnTask, params: Params, batch: Params) -> str:
    """The reason why clients cannot be vectorized; empty if they can."""
    network = task.network
    if network.facts.moving and network.model.buffers != "frozen":
        return "a model whose buffers change in training"
    if network.facts.whole:
        return "a loss that gives a mean over rows, from which padding cannot be left out"
    if network.model.metrics:
        return "metrics of its own, which see one client at a time"
    if _mixes(task, params, batch):
        return "a model in which rows of a batch depend on each other"
    func, alone = task.differentiated("func"), task.stepped(params, batch)[0]
    two = {name: torch.stack([p, p]) for name, p in params.items()}
    batches = {name: torch.stack([column, column]) for name, column in batch.items()}

    def one(params: Params, batch: Params) -> Any:
        return func.gradient(params, batch), func.score(func.predict(params, batch), batch)

    try:
        slopes, _ = torch.func.vmap(one)(two, batches)
    except Exception:  # whatever vmap does not know; it may arrive as a failure of the user's own loss
        return "a model that torch.func.vmap cannot run"
    if all(torch.allclose(slopes[name][0], slope, rtol=1e-3, atol=1e-5) for name, slope in alone.items()):
        return ""
    return "a model that torch.func.vmap computes differently"


def _mixes(task: OwnTask, params: Params, batch: Params) -> bool:
    """Whether a row's output depends on other rows of its batch."""
    alike = {name: column if name == DRAW else column[:1].expand_as(column) for name, column in batch.items()}
    modes: tuple[Forward, ...] = ("train", "eval")
    with torch.no_grad():
        for how in modes:
            one, other = (task.network.run(params, rows, how)[0][0] for rows in (batch, alike))
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
                return True
    return False


def _tried(network: OwnNetwork, batch: Params) -> tuple[Any, tuple[str, ...], bool]:
    """The module's outputs in evaluation mode, the buffers that training changes, and whether it draws."""
    module, inputs = network.module, network._inputs(batch)
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    params = {name: p.detach() for name, p in module.named_parameters()}
    with torch.no_grad():
        module.eval()
        said = functional_call(module, {**params, **_copies(before)}, *inputs)
        module.train()
        after = _copies(before)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            state = torch.get_rng_state()
            with drawn(_KEY, seeded=False) as mode:
                _call(module, params, after, inputs)
            draws = mode.count > 0 or not torch.equal(state, torch.get_rng_state())
        module.eval()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    # a statistic may stay the same by chance, so all buffers of a changed module count
    known = [
        f"{name}.{entry}" if name else entry
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
        for entry, _ in part.named_buffers(recurse=False)
    ]
    order = [name for name in before if name in {*changed, *known}]
    return said, tuple(order), draws


def _call(module: nn.Module, params: Params, after: Params, inputs: Any) -> None:
    """A pass that leaves the changed buffers in `after`."""
    tensors = {**params, **after}
    functional_call(module, tensors, *inputs)
    after.update({name: tensors[name] for name in after})


def _copies(buffers: Params) -> Params:
    return {name: buffer.clone() for name, buffer in buffers.items()}


def _check_parameters(network: OwnNetwork, title: str) -> None:
    """Checks that parameters have single precision and are a function of the seed."""
    trained = {name: p for name, p in network.module.named_parameters() if p.requires_grad}
    if not trained:
        raise UserError(f"{title} has no parameters that require gradients: there is nothing to train")
    for name, p in trained.items():
        if p.dtype != torch.float32:
            raise UserError(f"{title}: its parameter {name!r} is {p.dtype}; trained parameters have to be float32")
        if "/" in name:
            raise UserError(f"{title}: the name of its parameter {name!r} has a '/'; name the submodule otherwise")
    again = dict(network.model.made(network.options, 0).named_parameters())
    for name, p in trained.items():
        if name not in again or not torch.equal(p, again[name]):
            raise UserError(
                f"{title}: its parameter {name!r} begins with other values each time it is made with the same seed; "
                "draw them from torch's generator, as torch.nn does"
            )


def _check_head(module: nn.Module, head: str, title: str) -> None:
    """Checks that the last layer has parameters that are trained, and that are its alone."""
    if head not in dict(module.named_modules()):
        known = ", ".join(name for name, _ in module.named_children())
        raise UserError(f"{title} has no submodule {head!r} to be its head; it has {known}")
    inside = {id(p) for p in module.get_submodule(head).parameters() if p.requires_grad}
    everywhere = module.named_parameters(remove_duplicate=False)
    shared = [name for name, p in everywhere if id(p) in inside and not name.startswith(f"{head}.")]
    if shared:
        raise UserError(
            f"{title}: its head {head!r} shares parameters with {_listed(tuple(shared))}, so neither can be trained "
            "without the other; leave head= out, or untie them"
        )
    if not inside:
        raise UserError(f"{title}: its head {head!r} has no parameters that require gradients; name a layer that has")


def _check_pure(network: OwnNetwork, batch: Params, outputs: Tensor, title: str) -> None:
    """Checks that evaluation depends on parameters, buffers and rows alone."""
    with torch.no_grad():
        again = network.run({**network.init(0), **network.layers}, batch, "eval")[0]
    if not torch.allclose(again, outputs, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise UserError(
            f"{title} gives the same rows other outputs each time, in evaluation mode: keep what changes in parameters "
            "or buffers, not in plain attributes, and draw random numbers in training mode alone"
        )


def _split(network: OwnNetwork, batch: Params, outputs: Tensor) -> str:
    """The reason why the head is not the last operation; empty if it is."""
    head = network.model.head
    params = dict(network._begun(0))
    try:
        with torch.no_grad():
            features = network.seen(params, batch)
            said = network.head(params, features)
    except Exception as error:
        return f"its features cannot be told apart from its head {head!r} ({type(error).__name__}: {error})"
    if features.dim() != 2 or len(features) != len(batch["y"]):
        return f"its head {head!r} is given {tuple(features.shape)}, no row of features for each row of the data"
    if said.numel() == outputs.numel() == len(outputs):  # one number for each row, as a column or not
        said = said.reshape(outputs.shape)
    if said.shape != outputs.shape or not torch.allclose(said, outputs, rtol=1e-4, atol=1e-5):
        return f"its predictions are not what its head {head!r} gives: something comes after it; name the last layer"
    return ""


def _first(batch: Params) -> Params:
    return {name: column if name == DRAW else column[:1] for name, column in batch.items()}


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:4]) + (f", ... ({len(names)} in all)" if len(names) > 4 else "")


def _first_bad(losses: Tensor) -> float:
    return float(losses[~losses.isfinite()][0])
