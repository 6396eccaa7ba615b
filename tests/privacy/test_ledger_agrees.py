"""What is accounted for is the noise in the ledger, in every kind of run: single, tuned, grouped, resumed, adopted.

Epsilon is computed anew from the ledger by formulas of tests/ledger_epsilon.py, which share nothing with the package.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.declarations import reveals
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.engine import Choice
from bespoke.method import Method
from bespoke.methods import METHODS, FedAvg
from bespoke.privacy.settings import PrivacyConfig
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.comparison import Comparison
from ledger_epsilon import Moment, gaussian, lines, multipliers, poisson, statement, without_replacement
from small_worlds import world

LOOP = Choice(False, 1, 0, 1, "autograd", "")
DELTA, BUDGET = 1e-2, 4.0
PLACE = world("linear")
GROUPED = replace(PLACE.population, group=np.array([0, 0, 0, 1, 1, 1, 1]), groups=("three", "four"))


def agrees(folder: Path, rates: dict[str, float], where: str = "sum", budget: float | None = None) -> dict[str, Any]:
    """The invariant. `rates`: how often the most frequent client comes to a round, by method; 1: to every one."""
    said, ledger = statement(folder), multipliers(folder, where)
    names = {line["stage"]: line["method"] for line in lines(folder, "ledger.jsonl") if line["round"]}
    for line in lines(folder, "attempts.jsonl") if (folder / "attempts.jsonl").exists() else ():
        if line["what"] in ("begun", "done"):
            accounted = line["made"]["noise" if where == "sum" else "local_noise"]
            assert accounted == pytest.approx(ledger[line["stage"], line["round"]]), (folder.name, line)
    view, repeated = said["released" if where == "sum" else "messages"], _made(folder, where)
    spent, kind = view["spent"], said["sampling"]
    so_far: Counter[tuple[float, float]] = Counter()
    printed = {(line["stage"], line["round"]): line["privacy"] for line in lines(folder, "rounds.jsonl")}
    for moment, z in ledger.items():
        so_far[rates[names[moment[0]]], z] += repeated.get(moment, 1)
        if kind == "known" and where == "sum" and not repeated:
            # everyone came: round by round the closed form, up to how exactly it is solved
            told = sum(n / z**2 for (_, z), n in so_far.items())
            assert printed[moment]["released"] == pytest.approx(gaussian(told, DELTA), rel=1e-6)
    anew = {"known": _known, "poisson": poisson, "fixed": without_replacement}[kind](so_far, DELTA)
    assert anew <= view["epsilon"] * (1 + 1e-6), folder
    if view["by"] != "RDP":  # which is not tight
        assert view["epsilon"] <= anew * 1.01, folder
    if kind != "known" and not repeated:
        assert _rounded({(rate, z): n for rate, z, n in spent["rounds"]}) == _rounded(so_far)
    if budget is not None:
        assert anew <= budget
    return said


def _known(rounds: Counter[tuple[float, float]], delta: float) -> float:
    return gaussian(sum(n / z**2 for (_, z), n in rounds.items()), delta)


def _rounded(rounds: Any) -> dict[tuple[float, float], int]:
    found: Counter[tuple[float, float]] = Counter()
    for (rate, z), n in rounds.items():
        found[round(rate, 9), round(z, 9)] += n
    return dict(found)


def _made(folder: Path, where: str) -> dict[Moment, int]:
    """Rounds that were made more than once, as the attempts say."""
    if not (folder / "attempts.jsonl").exists():
        return {}
    what = "done" if where == "sum" else "begun"
    counts = Counter((x["stage"], x["round"]) for x in lines(folder, "attempts.jsonl") if x["what"] == what)
    return dict(counts) if any(n > 1 for n in counts.values()) else {}


# -- single runs -------------------------------------------------------------------------------------------------------
def fedavg(**more: Any) -> FedAvg:
    return FedAvg(PLACE.task, lr=0.1, batch_size=4, weighting="uniform", **more)


def experiment(*stages: tuple[Method, int], cohort: int = 7, sampling: str = "uniform", **privacy: Any) -> Experiment:
    terms = {"clip": 0.5, "delta": DELTA, "epsilon": BUDGET, **privacy}
    # what a file would say: it names the stages in the cache
    config = {
        "privacy": terms, "cohort": {"size": cohort, "sampling": sampling},
        "stage": [{"method": method.card.name, "rounds": rounds} for method, rounds in stages],
    }  # fmt: skip
    return Experiment(
        "private", GROUPED, PLACE.split, PLACE.task, tuple(Stage(*stage) for stage in stages), "mse", cohort=cohort,
        sampling={"sampling": sampling}, privacy=PrivacyConfig(**terms), config=config,
    )  # fmt: skip


def run(folder: Path, what: Experiment, **more: Any) -> dict[str, Any]:
    return Run(what, RunFolder.create(folder, ""), how=LOOP, **more).run()["privacy"]


@pytest.mark.parametrize(
    "terms",
    [
        {}, {"noise": 1.3}, {"adaptive": True}, {"clipping": "layer"}, {"reproducible": True}, {"accountant": "rdp"},
        {"clip": {"delta": 0.3, "control": 2.0}},
    ],
    ids=str,
)  # fmt: skip
def test_a_single_run(terms: dict[str, Any], tmp_path: Path) -> None:
    made = METHODS["scaffold"](PLACE.task) if isinstance(terms.get("clip"), dict) else fedavg()
    run(tmp_path / "run", experiment((made, 4), **terms))
    said = statement(tmp_path / "run")
    if "accountant" in terms:  # a looser bound: only that it is one
        assert gaussian(sum(z**-2 for z in multipliers(tmp_path / "run").values()), DELTA) < said["released"]["epsilon"]
    else:
        agrees(tmp_path / "run", {made.card.name: 1.0}, budget=BUDGET)


@pytest.mark.parametrize("sampling", ["poisson", "uniform"])
def test_sampled_cohorts_and_groups(sampling: str, tmp_path: Path) -> None:
    """Two of seven clients; then two of three and two of four."""
    rates = {"fedavg": 2 / 7, "group-fl": 2 / 3}
    stages = (fedavg(), 3), (METHODS["group-fl"](PLACE.task, lr=0.1, weighting="uniform"), 3)
    run(tmp_path / "run", experiment(*stages, cohort=2, sampling=sampling, noise=4.0))
    agrees(tmp_path / "run", rates, budget=BUDGET)


def test_noise_on_clients(tmp_path: Path) -> None:
    run(tmp_path / "run", experiment((fedavg(), 4), local_noise="auto"))
    agrees(tmp_path / "run", {"fedavg": 1.0}, where="client", budget=BUDGET)


@pytest.mark.parametrize(
    "made",
    [
        METHODS["shared"](PLACE.task), METHODS["mixed"](PLACE.task, statistics="moments"),
        METHODS["mixed"](PLACE.task, statistics="sums"), METHODS["hypcluster"](PLACE.task, k=2, weighting="uniform"),
        METHODS["mr-mtl"](PLACE.task), METHODS["self-fl"](PLACE.task),
    ],
    ids=lambda made: f"{made.card.name}-{getattr(made, 'statistics', '')}",
)  # fmt: skip
def test_sums_of_statistics_are_clipped_noised_and_accounted_for(made: Method, tmp_path: Path) -> None:
    """What is sent is no update; the noise is calibrated and accounted for as that of updates."""
    run(tmp_path / "run", experiment((made, 3)))
    said = agrees(tmp_path / "run", {made.card.name: 1.0}, budget=BUDGET)
    rounds = [line for line in lines(tmp_path / "run", "ledger.jsonl") if line["round"]]
    assert said["rounds"] == len(rounds)
    for line in rounds:
        sums = {name for name, reveal in reveals(made.uplink).items() if reveal.name == "SUM"}
        assert set(line["noise"]["sum"]) == sums


# -- runs that share stages --------------------------------------------------------------------------------------------
GROUP = METHODS["group-fl"](PLACE.task, lr=0.1, weighting="uniform")
TUNED = METHODS["finetune"](PLACE.task, epochs=1)


def test_noise_of_another_plan_is_not_adopted_and_that_of_the_same_plan_is(tmp_path: Path) -> None:
    """Three rounds with less noise cannot be the first of six with more; personalization spends nothing: it adopts."""
    alone, tuned = experiment((fedavg(), 3)), experiment((fedavg(), 3), (TUNED, 0))
    both = experiment((fedavg(), 3), (GROUP, 3))
    for name, what in {"alone": alone, "tuned": tuned, "both": both, "again": both}.items():
        run(tmp_path / name, what, cache=tmp_path / "stages")
        agrees(tmp_path / name, {"fedavg": 1.0, "group-fl": 1.0}, budget=BUDGET)
    one, other = multipliers(tmp_path / "alone"), multipliers(tmp_path / "both")
    assert other[0, 1] == pytest.approx(2**0.5 * one[0, 1], rel=2e-3)  # twice the rounds: by hand
    adopted = {
        name: [(x["stage"], x["what"]) for x in lines(tmp_path / name, "attempts.jsonl") if x["what"] == "adopted"]
        for name in ("alone", "tuned", "both", "again")
    }
    assert adopted == {"alone": [], "tuned": [(0, "adopted")], "both": [], "again": [(0, "adopted"), (1, "adopted")]}


def test_a_cache_that_does_not_say_its_noise_is_not_used(tmp_path: Path) -> None:
    """Whatever names a stage in the cache: what counts is the noise that it was made with."""
    run(tmp_path / "a", experiment((fedavg(), 3)), cache=tmp_path / "stages")
    (stage,) = (tmp_path / "stages").iterdir()
    told = json.loads((stage / "privacy.json").read_text())
    terms = told["terms"]
    for number, other in enumerate(({**terms, "noise": terms["noise"] / 2}, {**terms, "sampling": "poisson"}, None)):
        (stage / "privacy.json").write_text("{" if other is None else json.dumps({**told, "terms": other}))
        run(tmp_path / f"b{number}", experiment((fedavg(), 3)), cache=tmp_path / "stages")
        agrees(tmp_path / f"b{number}", {"fedavg": 1.0}, budget=BUDGET)
        assert "adopted" not in (tmp_path / f"b{number}" / "attempts.jsonl").read_text()


def test_an_adopted_stage_costs_what_it_cost_where_it_was_made(tmp_path: Path) -> None:
    """Noise 2, two rounds each, a budget for five: the first run loses a checkpoint, so that it makes round 2 twice.

    Who takes its stage over has two rounds of its own left; one more would be a sixth.
    """
    terms = {"noise": 2.0, "epsilon": gaussian(5.5 / 4, DELTA)}
    first = experiment((fedavg(), 2), (GROUP, 3), **terms)
    stops = iter([False, True])
    with pytest.raises(Interrupted):
        run(tmp_path / "a", first, cache=tmp_path / "stages", stop=lambda: next(stops))
    max((tmp_path / "a" / "checkpoints").glob("*.safetensors")).unlink()
    for name in ("a", "b", "b"):
        (tmp_path / name / "result.json").unlink(missing_ok=True)  # the last time what was adopted is resumed
        said = run(tmp_path / name, first, cache=tmp_path / "stages")
        assert said["rounds"] == 4
        assert said["released"]["spent"]["squared_mu"] == pytest.approx(5 / 4)
        agrees(tmp_path / name, {"fedavg": 1.0, "group-fl": 1.0}, budget=terms["epsilon"])


class Killed(Exception):
    pass


def test_adopting_is_repeated_without_counting_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the attempts of another's stage were noted, before the checkpoint that makes it this run's own."""
    what, save = experiment((fedavg(), 3), (TUNED, 0)), RunFolder.save
    run(tmp_path / "a", what, cache=tmp_path / "stages")

    def dies(self: RunFolder, checkpoint: Any, keep: int = 2) -> None:
        if checkpoint.round > 0:
            raise Killed
        save(self, checkpoint, keep)

    with monkeypatch.context() as context:
        context.setattr(RunFolder, "save", dies)
        with pytest.raises(Killed):
            run(tmp_path / "b", what, cache=tmp_path / "stages")
    run(tmp_path / "b", what, cache=tmp_path / "stages")
    agrees(tmp_path / "b", {"fedavg": 1.0}, budget=BUDGET)
    counted = Counter(line["what"] for line in lines(tmp_path / "b", "attempts.jsonl"))
    assert counted == {"adopted": 1, "begun": 3, "done": 3}


# -- resumed -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lost", ["kept", "removed", "changed", "put back"])
def test_rounds_count_with_the_noise_they_were_made_with(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of privacy.json between two processes; a checkpoint that holds a copy of it puts it back."""
    if lost == "changed":
        monkeypatch.setattr("bespoke.runs.folder.SETTLED", ())
    what, stops = experiment((fedavg(), 4)), iter([False, True])
    with pytest.raises(Interrupted):
        run(tmp_path / "run", what, stop=lambda: next(stops))
    path = tmp_path / "run" / "privacy.json"
    if lost == "removed":
        path.unlink()
    if lost in ("changed", "put back"):
        settled = json.loads(path.read_text())
        settled.pop("seal")  # as a version without digests wrote it
        path.write_text(json.dumps({**settled, "noise": settled["noise"] / 2}))
    run(tmp_path / "run", what)
    said = agrees(tmp_path / "run", {"fedavg": 1.0}, budget=BUDGET)
    assert said["rounds"] == (2 if lost == "changed" else 4)  # a round with half the noise costs four times as much


# -- whole comparisons -------------------------------------------------------------------------------------------------
CLIENTS = {"north": 6, "south": 9}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random, path = np.random.default_rng(5), tmp_path_factory.mktemp("table") / "t.csv"
    rows = ["who,y,district,a,b"]
    for district, count in CLIENTS.items():
        for client in range(count):
            for a, b in random.normal(size=(12, 2)):
                rows.append(f"{district}{client},{a - 2 * b + random.normal():.3f},{district},{a:.3f},{b:.3f}")
    path.write_text("\n".join(rows))
    return path


def own_rounds(folder: Path, rates: dict[str, float]) -> list[tuple[float, float]]:
    """(rate, multiplier) of the rounds that a run made itself."""
    adopted = {line["stage"] for line in lines(folder, "attempts.jsonl") if line["what"] == "adopted"}
    names = {line["stage"]: line["method"] for line in lines(folder, "ledger.jsonl") if line["round"]}
    return [(rates.get(names[s], 1.0), z) for (s, _), z in multipliers(folder).items() if s not in adopted]


@pytest.mark.parametrize(
    ("sampling", "rates", "more"),
    [
        ("full", {}, ("ditto", "shared", "mixed", "local")),
        ("poisson", {"fedavg": 4 / 15, "group-fl": 4 / 6}, ()),
        ("uniform", {"fedavg": 4 / 15, "group-fl": 4 / 6}, ()),
    ],
    ids=["full", "poisson", "uniform"],
)
def test_a_tuned_comparison(
    sampling: str, rates: dict[str, float], more: tuple[str, ...], table: Path, tmp_path: Path
) -> None:
    """Runs and trials, grouped and not, with stages of their own and adopted ones: none exceeds the budget."""
    base = {
        "data": {"table": str(table), "client": "who", "target": "y", "group": "district", "features": ["a", "b"]},
        "cohort": {"size": 4, "sampling": sampling}, "engine": {"workers": 0},
        "privacy": {"epsilon": BUDGET, "delta": DELTA, "clip": 0.5, "public_statistics": True, "public_schema": True,
                    "accountant": "pld" if sampling == "full" else "rdp"},
    }  # fmt: skip
    grid = {"group-fl": {"lr": [0.05, 0.1]}, "fedavg": {"lr": [0.1]}, "ditto": {}, "finetune": {}, "shared": {}}
    methods = ("fedavg", "finetune", "group-fl", *more)
    Comparison(base, tmp_path / "out", methods, (0,), 2, grid=grid).run()
    found = [path for kind in ("runs", "tuning") for path in (tmp_path / "out" / kind).iterdir()]
    adopted = []
    for path in found:
        said = json.loads((path / "result.json").read_text()).get("privacy")
        if said is None or said["released"]["epsilon"] == 0:
            assert path.name.startswith(("local", "constant", "pooled"))
            continue
        agrees(path, rates or dict.fromkeys(METHODS, 1.0), budget=BUDGET)
        adopted += [path.name] if '"adopted"' in (path / "attempts.jsonl").read_text() else []
    assert "finetune-seed0" in adopted
    assert "group-fl-lr0.1" in adopted  # from the trial before it: both have as much noise
    assert len(found) > len(methods)
    # all of it together: every round of the ledgers once, wherever else it was adopted
    told = json.loads((tmp_path / "out" / "compare.json").read_text())["spent"]
    rounds = Counter(how for path in found if (path / "attempts.jsonl").exists() for how in own_rounds(path, rates))
    anew = {"full": _known, "poisson": poisson, "uniform": without_replacement}[sampling](rounds, DELTA)
    assert anew <= told["epsilon"] * (1 + 1e-6)
    assert told["one"] <= BUDGET < told["epsilon"]
    if sampling == "full":
        assert told["epsilon"] <= anew * 1.01
    assert (told["delta"], sorted(told["without"])) == (DELTA, ["constant-seed0", "pooled-seed0"])
