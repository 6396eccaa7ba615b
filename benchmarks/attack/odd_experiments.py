"""Experiment files: a small valid file with a few odd changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import tomli_w
from benchmarks.attack import odd
from benchmarks.attack.worlds import experiment, stages

TABLE = "client,group,x,z,y\n" + "".join(
    f"c{i % 6},g{i % 2},{(i * 37) % 11 / 7},{'ab'[i * 13 % 3 % 2]},{(i * 29) % 17 / 5}\n" for i in range(60)
)
WILD = 0.35  # of the files are changed in ways that make most of them wrong; the others ask for odd things rightly
COMMANDS = (("run", 6), ("compare", 1), ("tune", 1))


def make(draw: random.Random, folder: Path) -> list[str]:
    """Write exp.toml and return the command that reads it."""
    (folder / "t.csv").write_text(TABLE, encoding="utf-8")
    command = draw.choices([name for name, _ in COMMANDS], [weight for _, weight in COMMANDS])[0]
    wild = draw.random() < WILD
    made = _valid(draw, command, wild)
    for _ in range(draw.choice((1, 1, 2, 3)) if wild else 0):
        _change(draw, made)
    text = tomli_w.dumps(_writable(made)).encode("utf-8", errors="surrogatepass")
    if wild and draw.random() < 0.3:
        text = odd.bytes_of(draw, text)
    (folder / "exp.toml").write_bytes(text)
    words = [command, "exp.toml", *(["--out", "out"] if draw.random() < 0.8 else [])]
    if command != "compare" and wild:
        for _ in range(draw.choice((0, 0, 1))):
            words += ["--set", _setting(draw, made)]
    return words + (["--jobs", "1"] if command != "run" else []) + (["--json"] if draw.random() < 0.2 else [])


def _valid(draw: random.Random, command: str, wild: bool) -> dict[str, Any]:
    """An experiment with parts drawn at random, each of which is allowed by itself."""
    from bespoke.messages.robust.settings import AttackKind, RuleName
    from bespoke.methods import METHODS

    method = draw.choice(list(METHODS))
    made = experiment(method)
    made["engine"] = {"workers": 0, "kind": draw.choice(("vectorized", "looped", "auto"))}
    made["model"] = draw.choice((made["model"], {"name": "linear"}, {"name": "mlp", "hidden": [4]}, {"name": "auto"}))
    made["data"]["options"] = {"clients": draw.choice((2, 6)), "examples": draw.choice((3, 8)), "features": 2,
                               "groups": draw.choice((2, 2, 1))}  # fmt: skip
    if draw.random() < 0.3:
        made["data"] = {"table": "t.csv", "client": "client", "target": "y", "group": "group"}
    made["stage"] = stages(method, draw.choice((0, 1, 2)))
    if draw.random() < 0.1:
        made["stage"] += stages(draw.choice(list(METHODS)), 1)
    for stage in made["stage"]:
        for _ in range(draw.choice((0, 0, 1, 2))):
            _knob(draw, stage, wild)
    tables: dict[str, dict[str, Any]] = {
        "split": {"protocol": draw.choice(("cross-silo", "cross-device")),
                  "order": draw.choice(("random", "random", "stored", "motley")), "own_validation": 0.2,
                  "fractions": draw.choice(([0.6, 0.2, 0.2], [0.5, 0.0, 0.5], [0.98, 0.01, 0.01]))},
        "cohort": {"size": draw.choice((1, 3, 50)), "dropout": draw.choice((0.0, 0.5, 0.99)),
                   "sampling": draw.choice(("uniform", "poisson", "round-robin", "importance", "full")),
                   "over_select": draw.choice((1.0, 2.0)), "straggle": draw.choice((0.0, 2.0))},
        "transform": {"clip": 0.5, "top_k": draw.choice((0.01, 0.5, 1.0)),
                      "quantize": draw.choice(("stochastic", "nearest"))},
        "privacy": {"clip": 0.5, "delta": 0.01, draw.choice(("adaptive", "public_statistics")): True,
                    "reproducible": True},
        "robust": {"f": draw.choice((1, 0.2)), "trim": 0.3, "bound": draw.choice(("auto", 0.5)), "steps": 2},
        "attack": {"clients": draw.choice((0.2, 0.5, 1.0)), "factor": 5.0},
    }  # fmt: skip
    for name, table in tables.items():
        if draw.random() < 0.2:
            made[name] = {key: given for key, given in table.items() if draw.random() < 0.5}
    if "privacy" in made:
        made["privacy"] |= draw.choice(({"noise": 1.0}, {"local_noise": 2.0}, {"epsilon": 8.0}, {"clipping": "layer"}))
    if "robust" in made:
        made["robust"]["rule"] = draw.choice(get_args(RuleName))
    if "attack" in made:
        made["attack"]["kind"] = draw.choice(get_args(AttackKind))
    for key, given in (("metric", draw.choice(("mse", "mae", "rmse", "auc"))), ("safe_steps", True)):
        if draw.random() < 0.1:
            made[key] = given
    if command == "compare":
        del made["stage"]
        methods = [draw.choice(list(METHODS)) for _ in range(draw.choice((1, 2)))]
        made["compare"] = {"methods": methods, "seeds": 1, "rounds": 1, "tune": False}
    if command == "tune":
        name = made["stage"][-1]["method"]
        made["tune"] = {"space": {name: {draw.choice(("lr", "lam", "batch_size")): [0.1, 1]}}, "seeds": 1}
    return made


def _knob(draw: random.Random, stage: dict[str, Any], wild: bool) -> None:
    """Set a knob of the stage's method; in a wild file also one of another, or to anything."""
    from bespoke.methods import METHODS

    kind = METHODS[draw.choice(list(METHODS)) if wild and draw.random() < 0.3 else stage["method"]]
    known = [entry for entry in fields(kind) if entry.name != "task" and entry.default is not MISSING]
    if known:
        entry = draw.choice(known)
        numbers = [bound for bound in entry.metadata.get("bounds", {}).values() if isinstance(bound, int | float)]
        bounds = [bound for bound in numbers if bound <= 1000]  # most steps that are allowed are long work
        others = [odd.value(draw, entry.name)] if wild else []
        stage[entry.name] = draw.choice([odd.like(draw, entry.name, entry.default), *bounds, *others])


def _places(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key and place in a tree."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield (*above, key)
        yield from _places(node[key], (*above, key))


def _change(draw: random.Random, made: dict[str, Any]) -> None:
    """One change: another value, a key removed, renamed or added, a part repeated elsewhere."""
    places = list(_places(made))
    if not places:
        return
    *above, key = draw.choice(places)
    node: Any = made
    for step in above:
        node = node[step]
    name = next((step for step in reversed([*above, key]) if isinstance(step, str)), "")
    kind = draw.randrange(7)
    if kind <= 2:
        node[key] = odd.value(draw, name)
    elif kind == 3:
        node[key] = odd.like(draw, name, node[key])
    elif kind == 4:
        del node[key]
    elif kind == 5 and isinstance(node, dict):
        node[draw.choice((*odd.NAMES, f"{key}s", str(key)[:-1], str(key).upper()))] = node.pop(key)
    elif isinstance(node, dict):
        node[draw.choice(odd.NAMES)] = copy.deepcopy(made) if draw.random() < 0.1 else odd.value(draw, name)


def _writable(node: Any) -> Any:
    """The tree as TOML can hold it: integers beyond 64 bits are kept, for the parser may accept them."""
    if isinstance(node, dict):
        return {str(key): _writable(entry) for key, entry in node.items()}
    return [_writable(entry) for entry in node] if isinstance(node, list | tuple) else node


def _setting(draw: random.Random, made: dict[str, Any]) -> str:
    """KEY=VALUE for --set, by a path that exists or not."""
    path = draw.choice(list(_places(made)) or [("seed",)])
    name = ".".join(str(step) for step in path)
    last = next((step for step in reversed(path) if isinstance(step, str)), "")
    return draw.choice((f"{name}={odd.value(draw, last)}", f"{draw.choice(odd.NAMES)}={draw.choice(odd.SMALL)}", name,
                        f"{name}.{draw.choice(odd.NAMES)}=1", "="))  # fmt: skip
