"""Whole runs under privacy: every method, the budget, what is infinite and why, resuming, and what is on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.cohorts import SideBySide
from bespoke.federation.engine import Choice
from bespoke.method import Method
from bespoke.methods import METHODS, FedAvg, HypCluster
from bespoke.methods.parts.shared_model import SharedModel
from bespoke.privacy.accountant import Spent, gaussian_epsilon
from bespoke.privacy.settings import PrivacyConfig
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from small_methods import Median
from small_worlds import world

LOOP = Choice(False, 1, 0, 1, "autograd", "")
DELTA = 1e-2
PLACE = world("linear")
GROUPED = replace(PLACE.population, group=np.array([0, 0, 0, 1, 1, 1, 1]), groups=("three", "four"))


def experiment(method: Method | None = None, rounds: int = 4, cohort: int = 7, **more: Any) -> Experiment:
    made = method or FedAvg(PLACE.task, lr=0.1, batch_size=4, weighting="uniform")
    privacy = PrivacyConfig(**{"clip": 0.5, "delta": DELTA, **more.pop("privacy", {"noise": 1.0})})
    stages = (Stage(made, rounds if made.trains else 0),)
    return Experiment(
        "private", PLACE.population, PLACE.split, PLACE.task, stages, "mse", cohort=cohort, privacy=privacy, **more
    )  # fmt: skip


def run(folder: Path, what: Experiment, **more: Any) -> dict[str, Any]:
    return Run(what, RunFolder.create(folder, ""), how=LOOP, **more).run()


def lines(folder: Path, log: str = "rounds.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / log).read_text().splitlines() if line]


def server(folder: Path) -> dict[str, torch.Tensor]:
    found = RunFolder(folder).latest()
    assert found is not None
    return found.server["params"]


def server_or_none(folder: Path) -> dict[str, torch.Tensor]:
    found = RunFolder(folder).latest()
    assert found is not None
    return found.server.get("params", {})


# -- every method --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", METHODS)
def test_every_method_under_privacy(name: str, tmp_path: Path) -> None:
    """Central noise hides sums, local noise everything; a method that sends nothing spends nothing."""
    kind = METHODS[name]
    knobs = {"weighting": "uniform"} if issubclass(kind, SharedModel) else {}
    knobs |= {"clusters": "uncertainty"} if name == "self-fl-clustered" else {}
    knobs |= {"local_steps": 3} if name == "self-fl-augmented" else {"epochs": 2} if name == "local" else {}
    made = kind(PLACE.task, **knobs)
    central = run(tmp_path / "central", experiment(made, 2))["privacy"]
    local = run(tmp_path / "local", experiment(made, 2, privacy={"local_noise": 2.0}))["privacy"]
    if not made.trains:
        assert (central["released"]["epsilon"], central["messages"]["epsilon"]) == (0.0, 0.0)
        return
    exact = gaussian_epsilon(2.0, DELTA)  # all clients, two rounds, z = 1
    each = [field for field, reveal in reveals(made.uplink).items() if reveal is Reveal.EACH]
    sees_each = bool(each)
    assert central["released"]["epsilon"] == (None if sees_each else pytest.approx(exact))
    assert ("every client's" in " ".join(central["released"]["why"])) == sees_each
    assert all(field in " ".join(central["released"]["why"]) for field in each)
    assert central["messages"]["epsilon"] is None
    assert local["messages"]["epsilon"] == pytest.approx(gaussian_epsilon(2 / 4, DELTA))
    assert local["released"]["epsilon"] == pytest.approx(local["messages"]["epsilon"])
    noise = lines(tmp_path / "central", "ledger.jsonl")[-2]["noise"]
    assert noise["clip"] == 0.5
    assert set(noise["sum"]) == {n for n, r in reveals(made.uplink).items() if r.name != "COUNT"}
    assert set(noise["sum"].values()) == {0.5}
    assert noise["client"] == {}


@pytest.mark.parametrize("more", [{"adaptive": True}, {"clipping": "layer"}], ids=["adaptive", "by layer"])
def test_a_method_that_shares_nothing_has_nothing_to_clip(more: dict[str, Any], tmp_path: Path) -> None:
    """FedRep of a linear model: all of it is the client's head. What is sent is a bit that is the same for everyone."""
    made = METHODS["fedrep"](PLACE.task, weighting="uniform")
    for place, how in enumerate((LOOP, replace(LOOP, vectorized=True, chunk=4, gradient="func"))):
        terms = {"noise": 1.0, "local_noise": 2.0, "reproducible": True, **more}
        what = experiment(made, 3, privacy=terms)
        found = Run(what, RunFolder.create(tmp_path / str(place), ""), how=how).run()
        assert found["privacy"]["messages"]["epsilon"] == pytest.approx(gaussian_epsilon(3 / 4, DELTA))
        assert found["clients"] == len(PLACE.split.test.query.clients)
    assert server_or_none(tmp_path / "0") == {}
    if "adaptive" in more:  # everyone is within any bound: it falls by about exp(-rate / 2) a round, up to the noise
        bounds = [line["privacy"]["bound"] for line in lines(tmp_path / "0")[1:]]
        assert bounds[0] == 0.5
        assert len(set(bounds)) == 3


def test_both_kinds_of_noise_add_up_where_the_sum_is_seen(tmp_path: Path) -> None:
    found = run(tmp_path / "run", experiment(privacy={"noise": 3.0, "local_noise": 4.0}))["privacy"]
    assert found["released"]["epsilon"] == pytest.approx(gaussian_epsilon(4 / 25, DELTA))
    assert found["messages"]["epsilon"] == pytest.approx(gaussian_epsilon(4 / 16, DELTA))


def test_whole_numbers_cannot_be_hidden(tmp_path: Path) -> None:
    """The index of a cluster: no noise is added to it, which is said, and refused where a budget is to be kept."""
    made = HypCluster(PLACE.task, k=2, upload="index", weighting="uniform")
    found = run(tmp_path / "run", experiment(made, 2, privacy={"local_noise": 2.0}))["privacy"]
    assert found["messages"]["epsilon"] is None
    assert "cluster as whole numbers" in found["messages"]["why"][0]
    with pytest.raises(UserError, match="cluster as whole numbers"):
        run(tmp_path / "other", experiment(made, 2, privacy={"local_noise": "auto", "epsilon": 5.0}))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"sampling": {"sampling": "importance"}, "cohort": 3}, "importance"),
        ({"sampling": {"over_select": 1.5, "straggle": 0.5}, "cohort": 3}, "straggle"),
    ],
)
def test_data_that_decide_who_comes_are_not_hidden(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    found = run(tmp_path / "run", experiment(**more))["privacy"]["released"]
    assert found["epsilon"] is None
    assert reason in found["why"][0]
    with pytest.raises(UserError, match=reason):
        run(tmp_path / "other", experiment(**more, privacy={"epsilon": 5.0}))


def test_statistics_without_noise_are_infinite_unless_public(tmp_path: Path) -> None:
    population = replace(PLACE.population, about={**PLACE.population.about, "statistics_floats": 7})
    assert run(tmp_path / "a", replace(experiment(), population=population))["privacy"]["released"]["epsilon"] is None
    public = experiment(privacy={"noise": 1.0, "public_statistics": True})
    assert run(tmp_path / "b", replace(public, population=population))["privacy"]["released"]["epsilon"] > 0


# -- sampling --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("sampling", "kind"), [("poisson", "poisson"), ("uniform", "fixed"), ("round-robin", "known")])
def test_sampling_is_accounted_for_as_it_is(sampling: str, kind: str, tmp_path: Path) -> None:
    found = run(tmp_path / "run", experiment(cohort=2, rounds=7, sampling={"sampling": sampling}))["privacy"]
    assert found["sampling"] == kind
    if kind == "known":  # two of seven at a time, in seven rounds: two laps, so everyone came twice
        assert found["released"]["epsilon"] == pytest.approx(gaussian_epsilon(2.0, DELTA))
    else:
        assert found["released"]["spent"] == Spent(kind, {(2 / 7, 1.0): 7}).to_json()


def groups(kind: str, local: bool = False, cohort: int = 2, **more: Any) -> Experiment:
    """FedAvg for three rounds, then groups of three and of four clients for four; or the first stage finds them."""
    knobs: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "weighting": "uniform"}
    first = METHODS["feature-groups"](PLACE.task, k=2) if kind == "found" else FedAvg(PLACE.task, **knobs)
    stages = (Stage(first, 1 if kind == "found" else 3), Stage(METHODS["group-fl"](PLACE.task, **knobs), 4))
    sampling = {"sampling": "poisson" if kind == "found" else kind}
    terms = {"local_noise": 2.0} if local else {"noise": 1.0}
    what = experiment(cohort=cohort, sampling=sampling, privacy={**terms, **more})
    return replace(what, stages=stages, population=PLACE.population if kind == "found" else GROUPED)


@pytest.mark.parametrize(("sampling", "kind"), [("poisson", "poisson"), ("uniform", "fixed")])
def test_of_groups_the_client_counts_that_comes_most_often(sampling: str, kind: str, tmp_path: Path) -> None:
    """Two of seven, then two of three (and of four): the smaller group's clients spend more."""
    found = run(tmp_path / "run", groups(sampling))["privacy"]
    assert found["sampling"] == kind
    assert found["rate"] == 2 / 3
    assert found["released"]["spent"] == Spent(kind, {(2 / 7, 1.0): 3, (2 / 3, 1.0): 4}).to_json()
    spent = [line["privacy"]["released"] for line in lines(tmp_path / "run") if line["round"]]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(found["released"]["epsilon"])


def test_groups_in_turns_count_for_each_client(tmp_path: Path) -> None:
    """Six places in three rounds of seven clients: once at most. Eight in four rounds of three: three times."""
    found = run(tmp_path / "run", groups("round-robin"))["privacy"]["released"]
    most = found["spent"]["squared_mu"]
    assert most in (3.0, 4.0)  # whether one of the two that came three times also came in the stage before
    assert found["epsilon"] == pytest.approx(gaussian_epsilon(most, DELTA))


def test_a_budget_is_kept_with_groups(tmp_path: Path) -> None:
    made = run(tmp_path / "run", groups("poisson", noise="auto", epsilon=4.0))["privacy"]
    assert 3.9 < made["released"]["epsilon"] <= 4.0
    stopped = run(tmp_path / "short", groups("poisson", noise=1.0, epsilon=4.0))["privacy"]
    assert stopped["rounds"] < 7
    assert stopped["released"]["epsilon"] <= 4.0


def test_groups_that_the_server_finds_need_local_noise(tmp_path: Path) -> None:
    """What clients send to be divided by is seen; of groups not known beforehand everyone may come to every round."""
    assert run(tmp_path / "central", groups("found"))["privacy"]["released"]["epsilon"] is None
    with pytest.raises(UserError, match="every client's features"):
        run(tmp_path / "refused", groups("found", noise="auto", epsilon=8.0))
    local = run(tmp_path / "local", groups("found", local=True))["privacy"]
    assert local["messages"]["epsilon"] == pytest.approx(gaussian_epsilon(5 / 4, DELTA))  # 1 + 4 rounds at z = 2


def test_a_round_of_groups_to_which_nobody_comes_is_noise(tmp_path: Path) -> None:
    """With a twentieth of a client a round most cohorts are empty: every group's model moves all the same."""
    what = replace(groups("poisson", reproducible=True), sampling={"sampling": "poisson", "dropout": 0.999})
    run(tmp_path / "run", what)
    counts = [line["clients"] for line in lines(tmp_path / "run") if line["stage"] == 1 and line["round"]]
    assert 0 in counts
    models = server(tmp_path / "run")["weight"]
    assert len(models) == 3
    assert not torch.equal(models[1], models[2])


def test_cohorts_that_count_as_secret_are_no_function_of_the_seed(tmp_path: Path) -> None:
    def cohorts(name: str, **privacy: Any) -> list[int]:
        what = experiment(
            cohort=3,
            rounds=12,
            sampling={"sampling": "poisson"},
            privacy={"noise": 1.0, "accountant": "rdp", **privacy},
        )
        run(tmp_path / name, what)
        return [line["clients"] for line in lines(tmp_path / name)]

    assert cohorts("a") != cohorts("b")
    assert cohorts("c", reproducible=True) == cohorts("d", reproducible=True)


def test_secret_cohorts_of_groups_are_as_secret_as_their_key() -> None:
    """By chance both of two keys of 64 bits are below 2^32 once in 2^64 times."""
    what, numbers = groups("poisson"), torch.tensor([1, 1, 1, 2, 2, 2, 2])
    secret, public = (what.cohorts(1, numbers, key) for key in (1 << 61, 0))
    assert isinstance(secret, SideBySide)
    assert isinstance(public, SideBySide)
    assert max(sampler.seed for sampler in secret.groups.values()) >= 2**32
    assert all(sampler.seed < 2**31 for sampler in public.groups.values())


def test_an_empty_cohort_is_not_seen(tmp_path: Path) -> None:
    """Poisson sampling may draw nobody: the model moves by noise all the same, and the round counts."""
    what = experiment(
        cohort=1, rounds=8, sampling={"sampling": "poisson"},
        privacy={"noise": 1.0, "accountant": "rdp", "adaptive": True, "reproducible": True},
    )  # fmt: skip
    moved: list[float] = []
    before = FedAvg.server_round

    class Watched(FedAvg):
        def server_round(self, state: Any, cohort: Any) -> Any:
            assert cohort.clients == ()  # who came, and how many, is not the server's to know
            after = before(self, state, cohort)
            moved.append(sum(float((after["params"][n] - p).abs().sum()) for n, p in state["params"].items()))
            return after

    stage = Stage(Watched(PLACE.task, lr=0.1, batch_size=4, weighting="uniform"), 8)
    run(tmp_path / "run", replace(what, stages=(stage,)))
    assert 0 in [line["clients"] for line in lines(tmp_path / "run")[1:]]
    assert len(moved) == 8
    assert min(moved) > 0


def test_with_local_noise_a_round_to_which_nobody_came_changes_nothing(tmp_path: Path) -> None:
    """There is no noise on the sum to hide it by, nor is it said to be hidden: who came is known."""
    what = experiment(cohort=1, rounds=6, sampling={"sampling": "poisson"}, privacy={"local_noise": 1.0})
    found = run(tmp_path / "run", what)
    clients = [line["clients"] for line in lines(tmp_path / "run")[1:]]
    assert 0 in clients
    assert found["privacy"]["messages"]["epsilon"] > 0


# -- the budget ------------------------------------------------------------------------------------------------------
def test_training_stops_at_the_budget_and_says_so(tmp_path: Path) -> None:
    """Everyone comes to every round: epsilon of r rounds is that of mu = sqrt(r) / z."""
    budget = gaussian_epsilon(3.5, DELTA)  # between three rounds and four
    found = run(tmp_path / "run", experiment(rounds=9, privacy={"noise": 1.0, "epsilon": budget}))
    assert found["rounds"] == 3
    assert "3 of 9 rounds" in found["privacy"]["stopped"]
    assert found["privacy"]["released"]["epsilon"] <= budget
    spent = [line["privacy"]["released"] for line in lines(tmp_path / "run")]
    assert spent == pytest.approx([0.0, *(gaussian_epsilon(float(r), DELTA) for r in (1, 2, 3))])


@pytest.mark.parametrize("sampling", ["poisson", "uniform", "full"])
def test_calibrated_noise_is_spent_by_the_last_round(sampling: str, tmp_path: Path) -> None:
    terms = {"epsilon": 6.0, "accountant": "rdp"}
    what = experiment(cohort=3, rounds=6, sampling={"sampling": sampling}, privacy=terms)
    found = run(tmp_path / "run", what)["privacy"]
    assert found["rounds"] == 6
    assert 5.9 < found["released"]["epsilon"] <= 6.0
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["noise"] == found["noise"] > 0


def test_local_noise_is_calibrated_to_messages(tmp_path: Path) -> None:
    what = experiment(cohort=3, rounds=6, privacy={"epsilon": 6.0, "local_noise": "auto"})
    found = run(tmp_path / "run", what)["privacy"]
    assert 5.9 < found["messages"]["epsilon"] <= 6.0
    assert found["noise"] is None


def test_local_noise_hides_each_value_that_the_server_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    before = Median.server_round
    monkeypatch.setattr(Median, "server_round", lambda self, s, c: seen.append(c) or before(self, s, c))
    made = Median(PLACE.task, lr=0.1, batch_size=4)
    run(tmp_path / "run", experiment(made, 1, privacy={"local_noise": 1000.0, "clip": 1e-3, "reproducible": True}))
    drawn = np.concatenate([leaf.numpy().reshape(7, -1) for leaf in seen[0].each["delta"].values()], axis=1)
    assert 0.3 < drawn.std() < 3  # deviation 1; what was clipped to a thousandth is lost in it
    assert len(np.unique(drawn)) == drawn.size


# -- resuming --------------------------------------------------------------------------------------------------------
class Killed(Exception):
    pass


def test_reproducible_noise_resumes_to_the_same_bytes_and_warns(tmp_path: Path) -> None:
    what = experiment(rounds=5, privacy={"noise": 1.0, "local_noise": 1.0, "adaptive": True, "reproducible": True})
    whole = run(tmp_path / "whole", what)
    stops = iter([False, True])
    notes: list[str] = []

    class Told:
        def begin(self, what: str, total: int, done: int = 0) -> None: ...
        def advance(self, steps: int = 1, note: str = "") -> None: ...
        def note(self, text: str) -> None:
            notes.append(text)

    with pytest.raises(Interrupted):
        run(tmp_path / "broken", what, stop=lambda: next(stops), progress=Told())
    assert any("NOT private" in note for note in notes)
    assert run(tmp_path / "broken", what) == whole
    assert not whole["privacy"]["secret"]
    for name in ("rounds.jsonl", "ledger.jsonl", "privacy.json", "clients.parquet"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes()
    assert all(torch.equal(leaf, server(tmp_path / "broken")[n]) for n, leaf in server(tmp_path / "whole").items())
    bounds = [line["privacy"]["bound"] for line in lines(tmp_path / "whole")[1:]]
    assert len(set(bounds)) == 5  # it followed the norms


def test_two_secret_runs_of_one_seed_differ(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name, experiment())
    for name, leaf in server(tmp_path / "a").items():
        assert not torch.isclose(leaf, server(tmp_path / "b")[name]).all()


def test_a_finished_round_is_never_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the checkpoint and the log of round 2: the line appears, once, and the model is the same."""
    what, append = experiment(), RunFolder.append

    def dies(self: RunFolder, log: str, entry: dict[str, Any]) -> None:
        if entry.get("round") == 2:
            raise Killed
        append(self, log, entry)

    with monkeypatch.context() as context:
        context.setattr(RunFolder, "append", dies)
        with pytest.raises(Killed):
            run(tmp_path / "run", what)
    assert [line["round"] for line in lines(tmp_path / "run")] == [0, 1]
    made = RunFolder(tmp_path / "run").latest()
    assert made is not None
    assert made.round == 2
    models: list[Any] = []
    before = FedAvg.server_round
    monkeypatch.setattr(FedAvg, "server_round", lambda self, s, c: models.append(s["params"]) or before(self, s, c))
    found = run(tmp_path / "run", what)
    assert all(torch.equal(leaf, models[0][name]) for name, leaf in made.server["params"].items())
    assert [line["round"] for line in lines(tmp_path / "run")] == [0, 1, 2, 3, 4]
    assert lines(tmp_path / "run")[2] == made.about["lines"]["rounds.jsonl"]
    assert found["privacy"]["released"]["epsilon"] == pytest.approx(gaussian_epsilon(4.0, DELTA))


def test_a_round_cut_short_is_charged_where_it_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages had left: five for four. No model of it had: four of them."""
    what, before = experiment(privacy={"noise": 1.0, "local_noise": 2.0}), FedAvg.server_round
    calls = iter(range(9))

    def dies(self: FedAvg, state: Any, cohort: Any) -> Any:
        if next(calls) == 2:
            raise Killed
        return before(self, state, cohort)

    monkeypatch.setattr(FedAvg, "server_round", dies)
    with pytest.raises(Killed):
        run(tmp_path / "run", what)
    found = run(tmp_path / "run", what)["privacy"]
    assert found["messages"]["epsilon"] == pytest.approx(gaussian_epsilon(5 / 4, DELTA))
    assert found["released"]["epsilon"] == pytest.approx(gaussian_epsilon(4 / 5, DELTA))


def test_a_round_whose_checkpoint_was_lost_is_charged_again(tmp_path: Path) -> None:
    """Its model had been seen. The two draws share a cohort, so they count as one of z / sqrt(2)."""
    what = experiment(cohort=3, rounds=4, sampling={"sampling": "poisson"}, privacy={"noise": 1.0, "accountant": "rdp"})
    stops = iter([False, False, True])
    with pytest.raises(Interrupted):
        run(tmp_path / "run", what, stop=lambda: next(stops))
    last = max((tmp_path / "run" / "checkpoints").glob("*.safetensors"))
    assert last.name == "000-0000003.safetensors"
    last.unlink()
    found = run(tmp_path / "run", what)["privacy"]["released"]["spent"]
    assert {z: n for _, z, n in found["rounds"]} == pytest.approx({1.0: 3, 1 / math.sqrt(2): 1})


def test_noise_that_was_settled_stays_although_the_library_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, stops = experiment(privacy={"epsilon": 5.0}), iter([True])
    with pytest.raises(Interrupted):
        run(tmp_path / "run", what, stop=lambda: next(stops))
    path = tmp_path / "run" / "privacy.json"
    settled = json.loads(path.read_text())
    path.write_text(json.dumps({**settled, "noise": settled["noise"] / 2}))  # the checkpoint knows better
    monkeypatch.setattr("bespoke.privacy.account.calibrated", lambda *_: 2 * settled["noise"])
    assert run(tmp_path / "run", what)["privacy"]["noise"] == settled["noise"]
    assert json.loads(path.read_text()) == settled
    for lost in (tmp_path / "run" / "result.json", *(tmp_path / "run" / "checkpoints").iterdir()):
        lost.unlink()
    for damage in ("{", json.dumps({**settled, "noise": settled["noise"] / 2})):
        path.write_text(damage)
        with pytest.raises(UserError, match=r"privacy\.json is damaged"):
            run(tmp_path / "run", what)


def test_stages_add_up_and_a_later_stage_counts_none_twice(tmp_path: Path) -> None:
    """Two rounds of one method, two of another; resumed in personalization, and taken over from the cache."""
    one = FedAvg(PLACE.task, lr=0.1, batch_size=4, weighting="uniform")
    ditto, tuned = METHODS["ditto"](PLACE.task, weighting="uniform"), METHODS["finetune"](PLACE.task, epochs=1)
    what = replace(experiment(), stages=(Stage(one, 2), Stage(ditto, 2), Stage(tuned, 0)))
    expected = pytest.approx(gaussian_epsilon(4.0, DELTA))
    first = run(tmp_path / "a", what, cache=tmp_path / "stages")
    assert first["privacy"]["released"]["epsilon"] == expected
    (tmp_path / "a" / "result.json").unlink()
    assert run(tmp_path / "a", what)["privacy"] == first["privacy"]
    other = run(tmp_path / "b", what, cache=tmp_path / "stages")  # its first two stages are those of the other
    assert other["privacy"]["released"]["epsilon"] == expected
    assert all(torch.equal(leaf, server(tmp_path / "b")[n]) for n, leaf in server(tmp_path / "a").items())


def test_a_budget_shared_by_stages_ends_in_the_second(tmp_path: Path) -> None:
    one = FedAvg(PLACE.task, lr=0.1, batch_size=4, weighting="uniform")
    what = experiment(privacy={"noise": 1.0, "epsilon": gaussian_epsilon(3.5, DELTA)})
    found = run(tmp_path / "run", replace(what, stages=(Stage(one, 2), Stage(one, 2), Stage(one, 2))))
    assert [(line["stage"], line["round"]) for line in lines(tmp_path / "run")] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0),
    ]  # fmt: skip
    assert "3 of 6 rounds" in found["privacy"]["stopped"]


def test_workers_draw_local_noise_and_the_server_central_noise(tmp_path: Path) -> None:
    """Reproducible noise is the same wherever clients are executed."""
    what = experiment(privacy={"noise": 1.0, "local_noise": 1.0, "adaptive": True, "reproducible": True}, rounds=2)
    run(tmp_path / "alone", what)
    Run(what, RunFolder.create(tmp_path / "two", ""), how=replace(LOOP, workers=2)).run()
    for name, leaf in server(tmp_path / "alone").items():
        torch.testing.assert_close(leaf, server(tmp_path / "two")[name], rtol=1e-5, atol=1e-6)
