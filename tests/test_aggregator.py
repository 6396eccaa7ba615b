"""TFF's robust aggregator against its published formulas in numpy; what is refused; runs, resumed and attacked."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.api import run as run_file
from bespoke.errors import UserError
from bespoke.experiment.build import build
from bespoke.experiment.checks import checked
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.experiment.presets import Preset
from bespoke.experiment.stage import check_aggregator
from bespoke.federation.engine import Choice
from bespoke.messages.robust.aggregator import ABOVE, CLIPPED, ZEROED, Aggregator, ZeroAndClip
from bespoke.messages.transform import Outgoing
from bespoke.method import Cohort
from bespoke.methods import METHODS, FedAvg
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.comparison import Comparison
from bespoke.tensors import tree_map
from small_worlds import world

Array = np.ndarray[Any, Any]


class Published:
    """tff.learning.robust_aggregator() as its documentation and constants say it, for changes that are rows."""

    def __init__(self) -> None:
        self.largest, self.length = 10.0, 1.0  # initial estimates of the 0.98 and the 0.8 quantile

    def mean(self, changes: Array, weights: Array) -> tuple[Array, int, int]:
        """(weighted mean, how many were zeroed, how many clipped) of one round; the estimates move afterwards."""
        largest = np.abs(changes).max(1)
        zeroed = largest > 2.0 * self.largest + 1.0
        kept = np.where(zeroed[:, None], 0.0, changes)
        length = np.sqrt((kept**2).sum(1))
        clipped = length > self.length
        kept[clipped] *= (self.length / length[clipped])[:, None]
        mean = (weights[:, None] * kept).sum(0) / weights.sum()
        self.largest *= np.exp(-np.log(10.0) * (np.mean(largest <= self.largest) - 0.98))
        self.length *= np.exp(-0.2 * (np.mean(length <= self.length) - 0.8))
        return mean, int(zeroed.sum()), int(clipped.sum())


def sent(changes: Array, weights: Array, told: dict[str, float]) -> Outgoing:
    """Messages of FedAvg, of a model with two leaves: the change times the weight, and the weight."""
    rows = torch.tensor(changes * weights[:, None], dtype=torch.float32)
    delta = {"w": rows[:, 1:].reshape(len(rows), 1, -1), "b": rows[:, 0]}
    up = {"delta": delta, "weight": torch.tensor(weights).float()}
    return Outgoing(up, 4 * rows.numel() + 4 * len(rows), np.arange(len(rows), dtype=np.uint64), 0, told)


def one_round(ours: ZeroAndClip, message: Outgoing, state: dict[str, float]) -> tuple[Array, dict[str, float], Any]:
    """(the mean, the estimates of the next round, what the log says)."""
    found = ours.client(message)
    many = len(message.clients)
    cohort = Cohort(tree_map(lambda leaf: leaf.sum(0), found.up), {}, tuple(range(many)))
    observed = ours.observe(cohort, state)
    cohort, state = ours.server(cohort, state, 0)
    assert set(cohort.sums) == {"delta", "weight"}
    total = torch.cat([cohort.sums["delta"]["b"].reshape(1), cohort.sums["delta"]["w"].flatten()])
    return (total / cohort.sums["weight"]).numpy(), state, observed


def test_forty_rounds_as_published() -> None:
    """Updates that grow, shrink, and are broken now and then: means, counts and both estimates in every round."""
    random = np.random.default_rng(3)
    theirs, ours = Published(), ZeroAndClip()
    state, zeroed, clipped = ours.start(), 0, 0
    assert state == {"zeroing": 10.0, "clipping": 1.0}
    for number in range(40):
        many = int(random.integers(3, 30))
        changes = random.standard_normal((many, 5)) * np.exp(2 * np.sin(number / 6)) * random.uniform(0.2, 2, (many, 1))
        if number % 3 == 0:
            changes[0, 2] = 10.0 ** random.integers(1, 6)
        weights = random.integers(1, 50, many).astype(float)
        before = {"zeroing": 2 * theirs.largest + 1, "clipping": theirs.length}
        mean, zeros, clips = theirs.mean(changes, weights)
        found, state, observed = one_round(ours, sent(changes, weights, state), state)
        np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)
        assert (observed["zeroed"], observed["clipped"]) == (zeros, clips)
        assert {name: observed[name] for name in before} == pytest.approx(before, rel=1e-9)
        assert state == pytest.approx({"zeroing": theirs.largest, "clipping": theirs.length}, rel=1e-9)
        zeroed, clipped = zeroed + zeros, clipped + clips
    assert zeroed > 5
    assert clipped > 100


def test_one_enormous_update_by_hand() -> None:
    """Three clients of weights 1, 2, 5. The second is zeroed and keeps its weight; the third is scaled to length 1.

    First round: 21 is the largest entry that is not zeroed. The mean is (1 (0.3, 0.4) + 5 (0.6, 0.8)) / 8. Two of
    three entries are at most 10, so the first estimate becomes 10 * 10^(0.98 - 2/3). Lengths are 0.5, 0 and 10: two of
    three are at most 1, so the second becomes exp(0.2 (0.8 - 2/3)).
    """
    ours = ZeroAndClip()
    changes, weights = np.array([[0.3, 0.4], [1e6, 0.0], [6.0, 8.0]]), np.array([1.0, 2.0, 5.0])
    mean, state, observed = one_round(ours, sent(changes, weights, ours.start()), ours.start())
    np.testing.assert_allclose(mean, [(0.3 + 5 * 0.6) / 8, (0.4 + 5 * 0.8) / 8], rtol=1e-6)
    assert observed == {"zeroing": 21.0, "zeroed": 1.0, "clipping": 1.0, "clipped": 1.0}
    assert state["zeroing"] == pytest.approx(10 * 10 ** (0.98 - 2 / 3))
    assert state["clipping"] == pytest.approx(math.exp(0.2 * (0.8 - 2 / 3)))


def test_bounds_are_reached_not_exceeded() -> None:
    """An entry of exactly 21 is not zeroed, a length of exactly 1 is not clipped, and both count as within."""
    at, above = np.array([[0.0, 1.0]]), np.array([[0.0, 1.001]])
    only_clipping, only_zeroing = ZeroAndClip(zeroing=False), ZeroAndClip(clipping=False)
    for changes, clips in ((at, 0.0), (above, 1.0)):
        up = only_clipping.client(sent(changes, np.ones(1), {})).up
        assert (up[CLIPPED].tolist(), ZEROED in up) == ([clips], False)
    for entry, flags in ((10.0, (0.0, 0.0)), (10.5, (1.0, 0.0)), (21.0, (1.0, 0.0)), (-21.5, (1.0, 1.0))):
        up = only_zeroing.client(sent(np.array([[entry, 0.0]]), np.ones(1), {})).up
        assert (up[ABOVE].item(), up[ZEROED].item()) == flags
        assert up["delta"]["b"].item() == (0.0 if flags[1] else entry)
        assert CLIPPED not in up


def test_the_bound_follows_the_quantile() -> None:
    """Lengths spread evenly over (0, 5): after many rounds four of five are below the bound, so it is near 4."""
    ours = ZeroAndClip()
    state = ours.start()
    changes = np.linspace(0.05, 4.95, 50)[:, None] * np.array([[0.6, 0.8]])
    for _ in range(400):
        _, state, observed = one_round(ours, sent(changes, np.ones(50), state), state)
    assert state["clipping"] == pytest.approx(4.0, abs=0.1)
    assert observed["clipped"] == pytest.approx(10, abs=1)


def test_bytes_and_what_is_not_finite() -> None:
    """Three numbers of four bytes more. Infinity and NaN are left for the host, which leaves such clients out."""
    changes = np.array([[0.1, 0.2], [np.inf, 1.0], [np.nan, 1.0]])
    message = sent(changes, np.ones(3), {})
    found = ZeroAndClip().client(message)
    assert found.nbytes == message.nbytes + 3 * 3 * 4
    kept = torch.cat([found.up["delta"]["b"][:, None], found.up["delta"]["w"].flatten(1)], 1)
    assert kept.isfinite().all(1).tolist() == [True, False, False]
    empty = replace(message, up={"delta": {}, "weight": torch.ones(3)})  # a model of which nothing is shared
    assert ZeroAndClip().client(empty).up[CLIPPED].tolist() == [0.0] * 3


# -- runs --------------------------------------------------------------------------------------------------------------
LOOP = Choice(False, 1, 0, 1, "autograd", "")


def small_run(folder: Path, stop_after: int | None = None, how: Choice = LOOP, robust: bool = True) -> dict[str, Any]:
    place = world("linear")
    made = FedAvg(place.task, lr=0.3, batch_size=4)
    bounded = ZeroAndClip() if robust else None
    experiment = Experiment(
        "small", place.population, place.split, place.task, (Stage(made, 6, aggregator=bounded),), "mse", cohort=4,
    )  # fmt: skip
    stops = iter([False] * ((stop_after or 99) - 1) + [True] * 9)
    path = RunFolder.create(folder, "")
    try:
        return Run(experiment, path, how=how, stop=lambda: next(stops, False)).run()
    except Interrupted:
        return small_run(folder, how=how)


def lines(folder: Path, log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / log).read_text().splitlines()]


def test_a_run_goes_on_with_its_bounds(tmp_path: Path) -> None:
    """Stopped after round 3 and resumed: the same bytes. The ledger declares the sums, rounds.jsonl has the bounds."""
    whole, broken = small_run(tmp_path / "whole"), small_run(tmp_path / "broken", stop_after=3)
    assert whole == broken
    for name in ("rounds.jsonl", "ledger.jsonl", "clients.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
    ledger = [line for line in lines(tmp_path / "whole", "ledger.jsonl") if line["round"]]
    assert {name: ledger[-1]["revealed"][name] for name in (ABOVE, ZEROED, CLIPPED)} == dict.fromkeys(
        (ABOVE, ZEROED, CLIPPED), "SUM"
    )
    small_run(tmp_path / "plain", robust=False)
    plain = [line for line in lines(tmp_path / "plain", "ledger.jsonl") if line["round"]]
    assert plain[-1]["revealed"] == {"delta": "SUM", "weight": "SUM"}
    assert [a["bytes_up"] - b["bytes_up"] for a, b in zip(ledger, plain)] == [4 * 3 * 4] * 6
    assert [a["bytes_down"] - b["bytes_down"] for a, b in zip(ledger, plain)] == [4 * 2 * 4] * 6
    logged = [line["aggregator"] for line in lines(tmp_path / "whole", "rounds.jsonl") if line["round"]]
    assert logged[0]["zeroing"] == 21.0
    bounds = [line["clipping"] for line in logged]
    clipped = [line["clipped"] for line in logged]
    follows = [b * math.exp(-0.2 * (1 - c / 4 - 0.8)) for b, c in zip(bounds, clipped)]
    assert bounds == pytest.approx([1.0, *follows[:-1]])


EXAM = {"data": {"source": "exam"}, "engine": {"workers": 0}}


def experiment(stage: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return {**EXAM, "stage": [{"method": "fedavg", "rounds": 2, **stage}], **rest}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (experiment({"aggregator": "tff-robst"}), ("'tff-robst'", "'tff-robust'", "stage 0")),
        (experiment({"aggregator": 3}), ("aggregator = 3", "'mean'", "'tff-robust'")),
        (experiment({"aggregator": {"name": "tff-robust", "zero": True}}), ("'zero'", "zeroing")),
        (experiment({"aggregator": {"name": "mean", "zeroing": True}}), ("zeroing", "name = 'tff-robust'")),
        (experiment({"aggregator": {"name": "tff-robust", "zeroing": False, "clipping": False}}), ("write 'mean'",)),
        (experiment({"aggregator": "tff-robust"}, privacy={"noise": 1.0}), ("[privacy]", "privacy.adaptive", "'mean'")),
        (experiment({"aggregator": "tff-robust"}, robust={"rule": "median"}), ("robust.rule = 'median'", "leave one")),
        (
            {**EXAM, "stage": [{"method": "fedavg", "rounds": 1}, {"method": "finetune", "aggregator": "tff-robust"}]},
            ("stage 1", "finetune has no training rounds", "the stage that trains"),
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(raw: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        checked(raw, "exp.toml")
    for word in ("exp.toml", *words):
        assert word in str(refusal.value)


def test_a_method_that_sends_no_change_is_refused() -> None:
    with pytest.raises(UserError, match=r"tff-robust.* mixed sends .*no such change; leave aggregator out"):
        build(checked({**EXAM, "stage": [{"method": "mixed", "rounds": 1, "aggregator": "tff-robust"}]}, "exp.toml"))


def test_short_and_long_form() -> None:
    assert check_aggregator("mean", "here").transform(FedAvg(world("linear").task)) is None
    short, long = (check_aggregator(v, "here") for v in ("tff-robust", {"name": "tff-robust", "clipping": False}))
    assert (short, long) == (Aggregator("tff-robust"), Aggregator("tff-robust", clipping=False))
    assert list(short.transform(FedAvg(world("linear").task)).reveals) == [ABOVE, ZEROED, CLIPPED]  # type: ignore[union-attr]


def test_only_the_stage_that_names_it(tmp_path: Path) -> None:
    """FedAvg with it, Ditto after it without; attackers come before it, and their changes are zeroed."""
    raw = {
        **EXAM, "attack": {"kind": "scale", "clients": 0.1, "factor": 1e6}, "transform": {"quantize": "nearest"},
        "stage": [
            {"method": "fedavg", "rounds": 2, "aggregator": "tff-robust"}, {"method": "ditto", "rounds": 1},
        ],
    }  # fmt: skip
    made = build(checked(raw, "exp.toml"))
    names = [[type(transform).__name__ for transform in made.acting(place)] for place in (0, 1)]
    assert names == [["Attack", "ZeroAndClip", "Compress"], ["Attack", "Compress"]]
    toml = "\n".join(
        [
            '[data]\nsource = "exam"', "[engine]\nworkers = 0", '[attack]\nkind = "scale"\nfactor = 1e6\nclients = 0.1',
            '[[stage]]\nmethod = "fedavg"\nrounds = 3\naggregator = "tff-robust"', '[[stage]]\nmethod = "finetune"\n',
        ]
    )  # fmt: skip
    (tmp_path / "exp.toml").write_text(toml)
    run_file(tmp_path / "exp.toml", tmp_path / "out")
    logged = [line for line in lines(tmp_path / "out", "rounds.jsonl") if line["round"]]
    assert [line["aggregator"]["zeroed"] for line in logged] == [6.0] * 3  # a tenth of 65 schools
    assert [line["excluded"] for line in logged] == [[]] * 3


def test_motleys_presets_name_it_for_fedavg_alone(tmp_path: Path) -> None:
    for name in ("emnist", "stackoverflow", "landmarks", "ted"):
        preset = Preset.read(f"motley-{name}")
        named = {method for method, knobs in preset.knobs.items() if "aggregator" in knobs}
        assert named == {"fedavg", "ensemble"}
        assert any("robust_aggregator" in note for note in preset.notes)
        (tmp_path / "c.toml").write_text(
            f'[data]\nsource = "exam"\n[compare]\npreset = "motley-{name}"\nmethods = ["finetune", "hypcluster"]\n'
            "tune = false\n"
        )
        made = Comparison.read(tmp_path / "c.toml", tmp_path / "out")
        made.plan.check()
        stages = [*made.plan.stages("finetune", {}), *made.plan.stages("hypcluster", {})]
        assert [(stage["method"], stage.get("aggregator")) for stage in stages] == [
            ("fedavg", "tff-robust"), ("finetune", None), ("ensemble", "tff-robust"), ("hypcluster", None),
        ]  # fmt: skip
    for name in ("school", "vehicle", "adni"):  # the cross-silo code takes plain means
        assert not any("aggregator" in knobs for knobs in Preset.read(f"motley-{name}").knobs.values())


def test_no_method_has_a_knob_of_that_name() -> None:
    assert not [name for name, kind in METHODS.items() if "aggregator" in kind.__dataclass_fields__]
