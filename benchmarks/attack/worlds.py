"""Small experiments that train in a fraction of a second, one for every method, and the folders that commands make."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

ROUNDS = 3


def stages(name: str, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """A method's stages, those that it starts from first."""
    from bespoke.experiment.variants import Entry

    entry = Entry.of(name, {})
    return [*(stages(entry.after, rounds) if entry.after else []), *entry.stages({}, rounds)]


def experiment(method: str, **more: Any) -> dict[str, Any]:
    """An experiment file with one method on nine clients in three groups."""
    from bespoke.declarations import Handoff, Nothing
    from bespoke.methods import METHODS

    options = {"clients": 9, "examples": 10, "features": 3, "groups": 3}
    # its model has inputs of its own, which a linear model has no room for
    embeds = METHODS[method].handoff == Handoff(Nothing())
    model = {"name": "mlp", "hidden": [4]} if embeds else {"name": "linear"}
    return {
        "seed": 1, "data": {"source": "synthetic", "options": options}, "cohort": {"size": 5, "dropout": 0.1},
        "model": model, "engine": {"workers": 0, "kind": "vectorized"}, "stage": stages(method), **more,
    }  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command to attack, the file it reads, and what is true of its results."""

    name: str
    command: tuple[str, ...]
    file: dict[str, Any] = field(default_factory=dict)
    secret: bool = False  # secret noise: no two runs are alike

    @property
    def kind(self) -> str:
        """What the table of the campaign calls it: methods are counted together."""
        from bespoke.method import Method
        from bespoke.methods import METHODS

        method = METHODS.get(self.name.removeprefix("run "))
        if method is None:
            return self.name.partition(",")[0]
        return "run, private state" if method.init_private is not Method.init_private else "run, no private state"

    def write(self, folder: Path) -> None:
        """Put its experiment file into the working directory."""
        (folder / "exp.toml").write_text(tomli_w.dumps(self.file), encoding="utf-8")

    def words(self, resume: bool = False) -> list[str]:
        return [*self.command, "--out", "out", *(["--resume"] if resume else [])]


def cases() -> list[Case]:
    """Every method, then what else a run may have: workers, privacy, several runs in a folder."""
    from bespoke.methods import METHODS

    run, loud = ("run", "exp.toml"), {"clip": 0.5, "delta": 0.01}
    found = [Case(f"run {name}", run, experiment(name)) for name in METHODS]
    found += [
        Case("looped", run, experiment("ditto", engine={"workers": 0, "kind": "looped"})),
        Case("error feedback", run, experiment("fedavg", transform={"top_k": 0.5})),
        Case("rounds until settled", run, {**experiment("fedavg"), "stage": stages("fedavg", "auto")}),  # type: ignore[arg-type]
        Case("workers", run, experiment("ditto", engine={"workers": 2, "kind": "vectorized"})),
        Case("privacy, repeatable noise", run, experiment("ditto", privacy={"noise": 1.0, "local_noise": 2.0,
             "adaptive": True, "reproducible": True, **loud})),
        Case("privacy, secret noise", run, experiment("ditto", privacy={"noise": 1.0, "local_noise": 2.0, **loud}),
             secret=True),
        Case("privacy, budget", run, experiment("fedavg", privacy={"epsilon": 8.0, **loud}), secret=True),
    ]  # fmt: skip
    compared = {**experiment("fedavg"), "compare": {"methods": ["fedavg", "finetune", "ditto"], "seeds": 1,
                "rounds": ROUNDS, "tune": False}}  # fmt: skip
    tuned = {**compared, "compare": {**compared["compare"], "methods": ["ditto"], "tune": True,
             "grid": {"ditto": {"lr": [0.05, 0.1]}}}}  # fmt: skip
    for each in (compared, tuned):
        del each["stage"]
    searched = {**experiment("ditto"), "tune": {"space": {"ditto": {"lr": [0.05, 0.1]}}}}
    found += [
        Case("compare", ("compare", "exp.toml"), compared),
        Case("compare, tuned", ("compare", "exp.toml"), tuned),
        Case("tune", ("tune", "exp.toml"), searched),
        Case("tune with Optuna", ("tune", "exp.toml", "--optuna", "--trials", "3"), searched),
    ]
    return found
