"""The choice of how clients are executed."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bespoke.devices import of_worker
from bespoke.federation.work import Mode
from bespoke.plain import JsonObject
from bespoke.task import Gradient, Precision


@dataclass(frozen=True)
class Choice:
    """How clients are executed. Kept in the run folder, so that a resumed run is executed the same way."""

    vectorized: bool
    chunk: int
    workers: int  # 0: in this process
    threads: int  # torch threads of each host
    gradient: Gradient
    reason: str
    precision: Precision = "float32"
    device: str = "cpu"  # "cuda": all GPUs, which workers share

    def mode(self, device: str = "") -> Mode:
        """How a host executes its clients."""
        return Mode(self.vectorized, self.chunk, self.threads, self.gradient, self.precision, device or self.device)

    def modes(self) -> list[Mode]:
        """The mode of each worker; workers get a device each where there are several."""
        return [self.mode(of_worker(self.device, place)) for place in range(self.workers)]

    def text(self) -> str:
        how = f"vectorized over clients, {self.chunk} at a time" if self.vectorized else "one client at a time"
        how += {"fused": ", compiled descent", "closed-form": ", gradient in closed form"}.get(self.gradient, "")
        how += ", products in bfloat16" if self.precision == "bf16" else ""
        where = (
            f"{self.workers} single-threaded worker processes"
            if self.workers
            else f"in process, {self.threads} threads"
        )
        where += "" if self.device == "cpu" else f", on {self.device}"
        return f"{how}, {where} ({self.reason})"

    def to_json(self) -> JsonObject:
        return asdict(self)
