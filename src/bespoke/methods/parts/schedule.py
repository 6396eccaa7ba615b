"""Learning-rate schedules: a step's rate is lr times a factor that depends only on (round, step).

Rounds are those of the stage; the round's number comes with a client's batches, as a federation tells it with the call.
So nothing has to be remembered, and a resumed run has the same rates. With t rounds behind (t = round - 1), warm-up
multiplies by (t + 1) / (warmup + 1) while t < warmup; then, u = t - warmup and T = rounds - warmup,

    constant        1
    linear          1 - (1 - floor) u / T
    cosine          floor + (1 - floor) (1 + cos(pi u / T)) / 2        Loshchilov and Hutter, ICLR 2017, one cycle
    step            gamma^floor(u / every), not below the floor
    exponential     gamma^(u / every), not below the floor
    inverse-sqrt    (1 + u / every)^(-1/2), not below the floor

and from u = T on linear and cosine stay at their floor. With `by_step` t grows with every local step, by one in a whole
round. Personal models are made at the full rate (round 0), but for a method whose own epochs are what is scheduled:
fine-tuning and local training, of which an epoch counts as a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from bespoke.method import Batches, knob

Name = Literal["constant", "linear", "cosine", "step", "exponential", "inverse-sqrt"]
Rate = float | Tensor | Callable[[int], float | Tensor]  # of all steps, or by step

ENDS = ("linear", "cosine")  # those that are over after some rounds


@dataclass(frozen=True)
class Schedule:
    """How the learning rate changes from round to round, or from step to step."""

    name: Name = knob("constant", "constant, linear, cosine, step, exponential or inverse-sqrt")
    rounds: int | None = knob(
        None, "linear, cosine: rounds until the floor, warm-up included; the stage's rounds if not given", ge=1
    )
    warmup: int = knob(0, "rounds of linear warm-up, before the rest", ge=0)
    floor: float = knob(0.0, "the lowest rate, as a part of lr", ge=0, le=1)
    gamma: float = knob(0.5, "step, exponential: what `every` rounds multiply the rate by", gt=0, le=1)
    every: int = knob(10, "step, exponential: rounds for a factor of gamma; inverse-sqrt: the unit of time", ge=1)
    by_step: bool = knob(False, "the rate changes with every local step; off: from round to round")

    def __post_init__(self) -> None:
        if self.rounds is not None and self.warmup >= self.rounds:
            raise ValueError(f"warmup = {self.warmup} leaves nothing of rounds = {self.rounds}; it has to be below")

    def within(self, rounds: int | None, unit: str = "rounds") -> Schedule:
        """The same for a stage of so many rounds, or of as many as it takes (None)."""
        if self.name not in ENDS:
            return self
        if self.rounds is None and rounds is None:
            raise ValueError(
                f"schedule: name = {self.name!r} needs rounds where the stage has as many as it takes ('auto'): after "
                "how many is the rate to be at its floor?"
            )
        if self.rounds is None:
            if rounds and self.warmup >= rounds:
                raise ValueError(
                    f"schedule: warmup = {self.warmup} leaves nothing of {rounds} {unit}; it has to be below"
                )
            return replace(self, rounds=rounds) if rounds else self
        if rounds is not None and rounds > self.rounds and not self.floor:
            raise ValueError(
                f"schedule: name = {self.name!r}, rounds = {self.rounds}: there are {rounds} {unit}, and those beyond "
                "would train at a rate of zero; leave rounds out to have as many, or give a floor above zero"
            )
        return self

    @property
    def constant(self) -> bool:
        return self.name == "constant" and not self.warmup

    @property
    def steady(self) -> bool:
        """Whether all steps of a round have the same rate."""
        return self.constant or not self.by_step

    def factor(self, round: int, part: float | Tensor = 0.0) -> float | Tensor:
        """What the rate is multiplied by in a round, of which so large a part is over."""
        if not round or self.constant:
            return 1.0
        # the rate of a round is found on the CPU; that of a client's step where the client is, which may lack float64
        time = round - 1 + part
        time = time if isinstance(time, Tensor) else torch.tensor(time, dtype=torch.float64, device="cpu")
        after = self._decay((time - self.warmup).clamp(min=0)).clamp(min=self.floor)
        value = torch.where(time < self.warmup, (time + 1) / (self.warmup + 1), after)
        return value.float() if isinstance(part, Tensor) else float(value)

    def _decay(self, time: Tensor) -> Tensor:
        if self.name in ENDS:
            if self.rounds is None:
                raise ValueError(
                    f"schedule: name = {self.name!r} needs rounds: after how many is it to be at its floor?"
                )
            part = (time / (self.rounds - self.warmup)).clamp(max=1)
            remaining = 1 - part if self.name == "linear" else (1 + torch.cos(math.pi * part)) / 2
            return self.floor + (1 - self.floor) * remaining
        periods = time / self.every
        if self.name == "inverse-sqrt":
            return (1 + periods) ** -0.5
        if self.name == "constant":
            return torch.ones_like(time)
        drops: Tensor = self.gamma ** (periods.floor() if self.name == "step" else periods)
        return drops

    def of(self, lr: float, batches: Batches, round: int | None = None) -> Rate:
        """The rate of the steps over these batches; `round`: in place of the batches' own."""
        if self.constant:
            return lr
        number = batches.round if round is None else round
        if self.steady:
            return lr * self.factor(number)
        behind: list[float | Tensor] = [0.0]  # of the client's own steps: those that only pad take no time
        for step in range(len(batches)):
            behind.append(behind[-1] + batches.live(step))
        many = behind[-1].clamp(min=1) if isinstance(behind[-1], Tensor) else behind[-1]
        return lambda step: lr * self.factor(number, behind[step] / many)


CONSTANT = Schedule()
SCHEDULE = "how lr changes from round to round: name, and what belongs to it"  # the knob's help


def at(rate: Rate, step: int) -> float | Tensor:
    """The rate of a step."""
    return rate(step) if callable(rate) else rate
