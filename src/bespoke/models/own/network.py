"""An nn.Module as a pure function of parameters and buffers, by torch.func.functional_call.

Parameters are those that require gradients. Everything else (frozen parameters, constant buffers) is part of the
function and neither travels nor is stored. For buffers that training changes, the model has a rule:

    average    they are leaves beside the parameters (tensors.BUFFERS): assigned in training, averaged, sent
    private    they and the parameters of their modules are `layers`, which stay on each client (FedBN)
    frozen     they are as the factory made them, and their modules are in evaluation mode throughout
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bespoke.errors import UserError
from bespoke.models.networks import Network
from bespoke.models.own.draws import drawn
from bespoke.models.own.model import Model, found_model
from bespoke.models.own.still import StillNorm
from bespoke.task import DRAW
from bespoke.tensors import BUFFERS, Params, is_buffer

# train: as training has it; held: the same with statistics as they are; eval
Forward = Literal["train", "held", "eval"]


@dataclass(frozen=True)
class Facts:
    """Facts found by trying the model on a few rows; see probe.py."""

    moving: tuple[str, ...] = ()  # the buffers that training changes
    looped: str = ""  # why clients are run one by one
    draws: bool = False  # training draws random numbers
    split: str = ""  # why features and head cannot be separated
    whole: bool = False  # its loss is a mean, not a number for each row
    known: bool = True  # its outputs are those of its task: classes or a number
    work: int = 0  # multiply-adds of a row

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Facts:
        """From JSON."""
        return cls(**{**record, "moving": tuple(record["moving"])})


@dataclass(frozen=True)
class Reading:
    """Converts stored rows to inputs."""

    kind: str = "table"
    shape: tuple[int, ...] = ()  # of an image or spectrogram

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "tokens":
            return x.long()
        if x.dtype == torch.uint8:
            x = x.float() / 255.0
        return x.reshape(-1, *self.shape) if self.shape else x


@dataclass(frozen=True, eq=False)
class OwnNetwork(Network):
    """A network of the user's own."""

    model: Model
    options: dict[str, Any] = field(default_factory=dict)  # of its factory
    reading: Reading = Reading()
    facts: Facts = Facts()

    # -- what it is ----------------------------------------------------------------------------------------------------
    @property
    def called(self) -> str:
        return self.model.title

    @property
    def vectorizes(self) -> bool:  # type: ignore[override]
        return not self.facts.looped

    @property
    def last_layer(self) -> tuple[str, ...]:  # type: ignore[override]
        if not self.model.head:
            raise UserError(
                f"the model {self.model.title!r} does not say which its last layer is, which this method needs; "
                "name it: bespoke.model(..., head='fc')"
            )
        return (f"{self.model.head}.",)

    @cached_property
    def module(self) -> nn.Module:
        """The module (of seed 0) whose parameters are replaced in every call."""
        return self.model.made(self.options, 0)

    @cached_property
    def changing(self) -> list[nn.Module]:
        """The modules whose buffers training changes, such as BatchNorm."""
        owners = dict.fromkeys(name.rpartition(".")[0] for name in self.facts.moving)
        return [self.module.get_submodule(owner) for owner in owners]

    @cached_property
    def private(self) -> tuple[str, ...]:
        """Prefixes of the names of layers that stay on each client."""
        if self.model.buffers != "private":
            return ()
        owners = dict.fromkeys(name.rpartition(".")[0] for name in self.facts.moving)
        return tuple(f"{owner}." if owner else "" for owner in owners)

    def known(self, facts: Facts) -> Self:
        found = replace(self, facts=facts)
        found.__dict__["module"] = self.module  # making it again may take long
        return found

    # -- parameters ----------------------------------------------------------------------------------------------------
    def init(self, seed: int) -> Params:
        return {name: p for name, p in self._begun(seed).items() if not self._stays(name)}

    @cached_property
    def layers(self) -> Params:
        """The initial layers that stay on each client."""
        if not self.private:
            return {}
        return {name: p for name, p in self._begun(0).items() if self._stays(name)}

    def _stays(self, name: str) -> bool:
        return bool(self.private) and name.removeprefix(BUFFERS).startswith(self.private)

    def _begun(self, seed: int) -> Params:
        held = seed == 0 and not self.facts.moving  # a pretrained module may take seconds to make again
        module = self.module if held else self.model.made(self.options, seed)
        params = {name: p.detach().cpu().clone() for name, p in module.named_parameters() if p.requires_grad}
        if self.model.buffers != "frozen":  # of whole numbers a mean is none: they are rounded where they are used
            buffers = dict(module.named_buffers())
            params |= {f"{BUFFERS}{name}": buffers[name].detach().float().clone() for name in self.facts.moving}
        return params

    # -- the function --------------------------------------------------------------------------------------------------
    def run(self, params: Params, batch: Params, how: Forward, seeded: bool = True) -> tuple[Tensor, Params]:
        """The outputs for these rows, and the buffers after this pass (empty outside of training)."""
        tensors = self._tensors(params, how)
        self._set(how)
        self._move(batch["x"].device)
        still = self.facts.moving and not seeded and how != "eval"
        with self._random(batch, how, seeded), StillNorm() if still else nullcontext():
            said = self._called(tensors, batch)
        return self.taken(said), self._left(params, tensors) if how == "train" else {}

    def _called(self, tensors: Params, batch: Params) -> Any:
        try:
            return functional_call(self.module, tensors, *self._inputs(batch))
        except Exception as error:
            if "more than 1 value per channel" in str(error):
                raise UserError(
                    f"the model {self.model.title!r}: BatchNorm has no statistics of a batch of one row, and a "
                    "client's last batch has one; use drop_last = true, another batch_size, or buffers='frozen'"
                ) from error
            raise self.failed(batch, error) from error

    def failed(self, batch: Params, error: Exception) -> UserError:
        """The module's own exception, with the rows that it was given."""
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.given(batch).items())
        advice = ""
        if "Long" in str(error) and self.reading(batch["x"]).is_floating_point():
            advice = ". A table's rows are numbers with fractions. Those of a named input stay whole: "
            advice += "bespoke.model(..., inputs=('ids',)), bespoke.population({client: ({'ids': ids}, y), ...})"
        return UserError(
            f"the model {self.model.title!r} fails on rows of the data ({shapes}): {type(error).__name__}: "
            f"{error}{advice}"
        )

    def given(self, batch: Params) -> Params:
        """The arguments of the module by name."""
        positional, named = self._inputs(batch)
        return {**dict(zip(self.model.inputs, positional)), **named}

    def taken(self, said: Any) -> Any:
        """The predictions, out of what the module returned."""
        if self.model.outputs is None:
            return said
        try:
            return self.model.outputs(said)
        except Exception as error:
            holds = f" of {', '.join(map(str, said))}" if isinstance(said, dict) else ""
            raise UserError(
                f"the model {self.model.title!r}: its outputs= fails on what forward returned, a {type(said).__name__}"
                f"{holds}: {type(error).__name__}: {error}"
            ) from error

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        return self.run(params, {"x": x}, "eval")[0]

    def features_of(self, params: Params, batch: Params) -> Tensor:
        """The input of the last layer, in evaluation mode."""
        _ = self.last_layer
        if self.facts.split:
            raise UserError(f"the model {self.model.title!r}: {self.facts.split}")
        return self.seen(params, batch).flatten(1)

    def seen(self, params: Params, batch: Params) -> Tensor:
        """What the module named `head` is given."""
        found: list[Tensor] = []
        hook = self.module.get_submodule(self.model.head).register_forward_pre_hook(
            lambda module, arguments: found.append(arguments[0])
        )
        try:
            self.run(params, batch, "eval")
        finally:
            hook.remove()
        return found[0]

    def head(self, params: Params, features: Tensor) -> Tensor:
        last = self.module.get_submodule(self.model.head)
        prefix, tensors = f"{self.model.head}.", self._tensors(params, "eval")
        own = {name.removeprefix(prefix): p for name, p in tensors.items() if name.startswith(prefix)}
        self._set("eval")
        out: Tensor = functional_call(last, own, (features,))
        return out

    def _inputs(self, batch: Params) -> tuple[tuple[Any, ...], dict[str, Any]]:
        first, *others = self.model.inputs
        x = self.reading(batch["x"])
        if not others and first == "x":
            return (x,), {}
        return (), {first: x, **{name: batch[name] for name in others}}

    def _tensors(self, params: Params, how: Forward) -> Params:
        """Tensors by the module's own names; a pass that changes buffers gets copies of them."""
        tensors = {name: p for name, p in params.items() if not is_buffer(name)}
        if not self.facts.moving or self.model.buffers == "frozen":
            return tensors
        for name in self.facts.moving:
            own = self.module.get_buffer(name)
            value = params.get(f"{BUFFERS}{name}", own)
            if not own.is_floating_point():
                value = value.round().to(own.dtype)
            elif name.endswith("running_var"):  # a mean of changes may end a rounding error below zero
                value = value.clamp(min=0)
            tensors[name] = value.clone() if how == "train" else value
        return tensors

    def _left(self, params: Params, tensors: Params) -> Params:
        names = [f"{BUFFERS}{name}" for name in self.facts.moving]
        return {name: tensors[name.removeprefix(BUFFERS)].detach().float() for name in names if name in params}

    def _set(self, how: Forward) -> None:
        """Sets the module's mode, if it differs; a change visits all of its parts."""
        wanted = (how, self.facts.moving)
        if self.module.__dict__.get("_bespoke_mode") != wanted:
            self.module.train(how != "eval")
            if how == "held" or self.model.buffers == "frozen":
                for part in self.changing:
                    part.eval()
            self.module.__dict__["_bespoke_mode"] = wanted

    def _move(self, device: torch.device) -> None:
        """Moves constant tensors to the device of the rows."""
        if self.module.__dict__.get("_bespoke_device", "cpu") != device.type:
            self.module.to(device)
            self.module.__dict__["_bespoke_device"] = device.type

    def _random(self, batch: Params, how: Forward, seeded: bool) -> AbstractContextManager[Any]:
        if how == "eval" or not self.facts.draws:
            return nullcontext()
        return drawn(batch[DRAW], seeded)

    def settled(self, layers: Params, params: Params, batch: Params) -> Params:
        """Private layers with the statistics of these rows: for a client that never trained."""
        if len(batch["mask"]) < 2:  # BatchNorm has no statistics of one row
            return layers
        before = [getattr(part, "momentum", None) for part in self.changing]
        try:
            for part, momentum in zip(self.changing, before):
                if isinstance(momentum, float):
                    part.momentum = 1.0  # type: ignore[assignment]  # what is seen replaces what was there
            self._set("eval")  # all but these parts: no dropout
            for part in self.changing:
                part.train()
            with torch.no_grad():
                tensors = self._tensors({**params, **layers}, "train")
                functional_call(self.module, tensors, *self._inputs(batch))
        finally:
            for part, momentum in zip(self.changing, before):
                if isinstance(momentum, float):
                    part.momentum = momentum  # type: ignore[assignment]
            self.module.__dict__.pop("_bespoke_mode", None)
        return {**layers, **self._left(layers, tensors)}

    # -- from one process to another -----------------------------------------------------------------------------------
    def __reduce__(self) -> Any:
        if not self.model.portable:
            raise UserError(
                f"the model {self.model.title!r} was given as an object of this program, and worker processes cannot "
                "import it; put it into a module, as net = bespoke.model(...) in mypkg/nets.py, or use no workers "
                "(engine.workers = 0, jobs = 1)"
            )
        return rebuilt, (self.described(),)

    def described(self) -> dict[str, Any]:
        """Everything needed to make it again, as JSON."""
        return {
            "name": "own", "model": self.model.name(), "options": self.options,
            "reading": asdict(self.reading), "facts": asdict(self.facts),
        }  # fmt: skip


def rebuilt(record: dict[str, Any], where: str = "[model]") -> OwnNetwork:
    """The network from its description."""
    model, options = found_model(record["model"], record["options"], where)
    reading = Reading(record["reading"]["kind"], tuple(record["reading"]["shape"]))
    network = OwnNetwork(model, options, reading, Facts.of(record["facts"]))
    _ = network.module  # made now: it draws random numbers, which vmap does not allow inside it
    return network


@dataclass(frozen=True, eq=False)
class OwnHead(Network):
    """The last layer of such a network alone, whose inputs are features."""

    whole: OwnNetwork

    @property
    def model(self) -> Model:
        return self.whole.model

    @property
    def facts(self) -> Facts:
        return replace(self.whole.facts, moving=(), draws=False)

    @property
    def layers(self) -> Params:
        return {}

    @property
    def vectorizes(self) -> bool:  # type: ignore[override]
        return self.whole.vectorizes

    @property
    def last_layer(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.whole.last_layer

    def init(self, seed: int) -> Params:
        return {name: p for name, p in self.whole.init(seed).items() if name.startswith(self.last_layer)}

    def run(self, params: Params, batch: Params, how: Forward, seeded: bool = True) -> tuple[Tensor, Params]:
        return self.whole.head(params, batch["x"]), {}

    def features_of(self, params: Params, batch: Params) -> Tensor:
        return batch["x"]
