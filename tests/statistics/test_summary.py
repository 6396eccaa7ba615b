"""The summary's numbers, and that its words say what the numbers say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.errors import UserError
from bespoke.report.report import summarize
from bespoke.report.summary import BEFORE, Summary
from bespoke.statistics.formatting import number, p_text, percent, signed_percent, size, with_interval
from bespoke.statistics.significance import Interval

CLIENTS = 40


@pytest.fixture
def compare(write_comparison: Callable[..., Path]) -> Callable[..., Summary]:
    """A comparison in which each method's values are the baseline's plus an effect, with a little noise over seeds."""

    def compared(folder: Path, effects: dict[str, Any], seeds: int = 2, lower: bool = True, **options: Any) -> Summary:
        rng = np.random.default_rng(0)
        baseline = rng.uniform(1, 2, CLIENTS)
        noise = [rng.normal(0, 0.01, CLIENTS) for _ in range(seeds)]
        values = {"fedavg": [(baseline + n).tolist() for n in noise]}
        for label, effect in effects.items():
            values[label] = [(baseline + n + effect).tolist() for n in noise]
        if not lower:
            options |= {"metric": "accuracy", "lower": False}
        return summarize([write_comparison(folder, values, **options)])

    return compared


def test_numbers_of_the_toy(toy: Path) -> None:
    summary = summarize([toy])
    shared, tuned = summary.methods
    assert (summary.baseline, summary.best, summary.clients, summary.seeds) == ("fedavg", "finetune", 4, [0, 1])
    assert (shared.mean.value, tuned.mean.value) == (2.5, 2.25)
    assert not shared.personal
    assert tuned.personal
    assert tuned.before.value == 2.5
    assert tuned.against is not None
    assert tuned.against.difference == -0.25
    assert tuned.against.relative == pytest.approx(-10)
    assert (tuned.against.hurt.value, tuned.against.helped.value, tuned.against.same.value) == (0.25, 0.75, 0.0)
    [hurt] = tuned.against.most_hurt
    assert (hurt.client, hurt.baseline, hurt.value, hurt.difference) == ("client 03", 4.0, 4.75, 0.75)
    assert (hurt.seeds_agreeing, hurt.seeds, hurt.examples) == (2, 2, 40)
    assert tuned.worst_tenth.value == 4.75
    assert tuned.chosen == {"rate": 0.1}
    assert tuned.revealed == {"delta": "SUM", "weight": "SUM"}


def test_costs_of_the_toy(toy: Path) -> None:
    cost = summarize([toy]).method("finetune").cost
    assert cost is not None
    # 400 bytes each way in each of 4 rounds, 400 more to personalize; 6 steps a round and 12 to personalize.
    assert (cost.bytes_down, cost.bytes_up, cost.bytes) == (2000, 1600, 3600)
    assert (cost.bytes_down_round, cost.bytes_up_round) == (400, 400)
    assert (cost.steps, cost.personalization_steps, cost.rounds) == (36, 12, 4)


def test_four_clients_are_too_few_to_tell(toy: Path) -> None:
    answer = summarize([toy]).answer
    assert answer[0].startswith("Too few clients to tell: Finetune lowers the mean MSE per client by ")
    assert any("no test can reach p < 0.05" in sentence for sentence in answer)


def test_it_helps(tmp_path: Path, compare: Any) -> None:
    effect = np.where(np.arange(CLIENTS) < 8, 0.05, -0.2)
    summary = compare(tmp_path, {"finetune": effect, "local": 0.5})
    assert summary.answer[0].startswith("Personalization helps: Finetune lowers the mean MSE per client by ")
    assert "against one shared model (Fedavg)" in summary.answer[0]
    assert "p < 0.001, Holm-corrected over 2 comparisons" in summary.answer[1]
    words = " ".join(summary.answer)
    assert "Finetune hurts 20.0 % of clients (8 of 40 in most seeds)" in words
    assert "Local (+" in words
    assert "is worse than the baseline" in words
    assert "moves 3.60 kB (baseline 3.60 kB) and makes 36 local steps (baseline 24), 12 of them to personalize" in words


def test_accuracy_rises_in_its_own_units(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": 0.1 + 0.01 * np.arange(CLIENTS)}, lower=False)
    assert summary.answer[0].startswith("Personalization helps: Finetune raises the mean accuracy per client by 0.")
    assert "%" not in summary.answer[0].replace("95 %", "")


def test_two_good_methods_that_cannot_be_told_apart(tmp_path: Path, compare: Any) -> None:
    wobble = 0.1 * (-1.0) ** np.arange(CLIENTS)
    summary = compare(tmp_path, {"finetune": -0.3 + wobble, "ditto": -0.301 - wobble})
    assert any(s.startswith("Ditto cannot be told apart from Finetune") for s in summary.answer)
    assert any("Finetune (−" in s and "is also better" in s for s in summary.answer)


def test_no_method_beats_the_baseline(tmp_path: Path, compare: Any) -> None:
    wobble = np.repeat(np.linspace(0.01, 0.2, CLIENTS // 2), 2) * (-1.0) ** np.arange(CLIENTS)
    summary = compare(tmp_path, {"finetune": wobble - 0.001, "ditto": wobble})
    assert summary.answer[0].startswith("No method beats one shared model (Fedavg) here beyond chance: the best, ")
    single = compare(tmp_path / "single", {"finetune": wobble - 0.001})
    assert single.answer[0].startswith("Finetune does not beat one shared model (Fedavg) beyond chance")


def test_every_method_is_worse(tmp_path: Path, compare: Any) -> None:
    effect = 0.2 + 0.01 * np.arange(CLIENTS)
    summary = compare(tmp_path, {"finetune": effect, "local": effect + 1})
    assert summary.answer[0].startswith("Personalization hurts here: every method is worse than one shared model")
    assert "the least bad, Finetune raises" in summary.answer[0]
    assert summary.best == "fedavg"
    single = compare(tmp_path / "single", {"finetune": effect})
    assert single.answer[0].startswith("Personalization hurts here: Finetune raises the mean MSE per client by ")


def test_the_mean_gains_while_most_clients_lose(tmp_path: Path, compare: Any) -> None:
    effect = np.where(np.arange(CLIENTS) < 10, -0.9, 0.02)
    summary = compare(tmp_path, {"finetune": effect})
    assert summary.answer[0].startswith("Mixed: Finetune lowers")
    assert summary.answer[0].endswith("but more clients lose than gain.")


def test_most_clients_gain_while_the_mean_loses(tmp_path: Path, compare: Any) -> None:
    effect = np.where(np.arange(CLIENTS) < 8, 1.5, -0.05)
    summary = compare(tmp_path, {"finetune": effect})
    assert summary.answer[0].startswith("Mixed: more clients gain than lose, but Finetune raises")


def test_nothing_changes_at_all(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": 0.0})
    against = summary.method("finetune").against
    assert against is not None
    assert (against.p, against.same.value, against.verdict) == (1.0, 1.0, "unclear")
    assert "leaves the mean MSE per client as it is" in summary.answer[0]
    assert "Finetune hurts no client." in summary.answer


def test_one_seed_is_said_to_be_one(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": -0.2}, seeds=1)
    assert math.isnan(summary.methods[0].mean.spread)
    assert any(sentence.startswith("There is only one seed") for sentence in summary.answer)


def test_one_method_is_compared_with_itself_before_personalization(toy: Path) -> None:
    summary = summarize([toy / "runs" / "finetune-seed0", toy / "runs" / "finetune-seed1"])
    assert summary.baseline == BEFORE
    assert [method.label for method in summary.methods] == ["finetune"]
    assert summary.method("finetune").against.difference == -0.25
    assert "against the same model before personalization" in summary.answer[0]


def test_one_shared_model_has_nothing_to_compare_with(toy: Path) -> None:
    summary = summarize([toy / "runs" / "fedavg-seed0"])
    assert summary.compared == []
    assert "there is no other method to compare it with" in summary.answer[0]


def test_one_client_gets_no_interval(tmp_path: Path, write_comparison: Any) -> None:
    summary = summarize([write_comparison(tmp_path, {"fedavg": [[1.0]], "finetune": [[0.5]]})])
    assert math.isnan(summary.method("finetune").against.interval.low)
    assert summary.answer[0].startswith("Too few clients to tell: Finetune lowers the mean MSE per client by 50.0 %")


def as_json(summary: Summary) -> dict[str, Any]:
    """All numbers as written: there not-a-number equals itself."""
    return json.loads(summary.to_json())


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("clients", [1, CLIENTS])
def test_a_diverged_method_is_named_and_ranked_last(tmp_path: Path, compare: Any, clients: int, lower: bool) -> None:
    gain = -0.2 if lower else 0.2
    broken = np.where(np.arange(CLIENTS) < clients, np.nan, 2 * gain)  # the best of all where it did not diverge
    alone, summary = (
        compare(tmp_path / str(len(effects)), effects, lower=lower)
        for effects in ({"finetune": gain}, {"finetune": gain, "local": broken})
    )
    local = summary.method("local")
    assert (local.verdict, local.against, local.undefined) == ("diverged", None, 2 * clients)
    assert local.mean.value == (math.inf if lower else -math.inf)
    assert summary.best == "finetune"
    assert summary.clients == CLIENTS
    # nobody else's numbers change, Holm's correction included
    assert as_json(summary)["methods"][:2] == as_json(alone)["methods"]
    assert summary.answer[0] == alone.answer[0]
    assert any(s.startswith("Local diverged, so it is ranked last: ") and f" {2 * clients} of 80 " in s
               for s in summary.answer)  # fmt: skip
    assert "Infinity" not in summary.to_json()


def test_a_diverged_baseline_is_said_first(tmp_path: Path, write_comparison: Any) -> None:
    values = {"fedavg": [[1.0, math.inf]], "local": [[2.0, 4.0]], "ditto": [[2.0, 5.0]]}
    summary = summarize([write_comparison(tmp_path, values)])
    assert summary.answer[0].startswith("The baseline, Fedavg, diverged: 1 of 2 client results")
    assert (summary.best, summary.method("fedavg").verdict, summary.compared) == ("local", "diverged", [])
    assert "The best method that did not diverge, Local, has a mean MSE of 3.0 (95 %" in summary.answer[1]


def test_when_all_diverged(tmp_path: Path, write_comparison: Any) -> None:
    summary = summarize([write_comparison(tmp_path, {"fedavg": [[math.inf, 1.0]], "local": [[2.0, math.nan]]})])
    assert summary.answer[0].startswith("The baseline, Fedavg, diverged")
    assert summary.answer[1].startswith("Local diverged")


def test_finite_but_absurd_is_diverged(tmp_path: Path, write_comparison: Any) -> None:
    """The constant has a mean of 2, so a mean above 200 has diverged: 1001 / 5 = 200.2 has, 999 / 5 = 199.8 has not."""
    values = {"fedavg": [[1.0] * 5], "local": [[1.0] * 4 + [997.0]], "ditto": [[1.0] * 4 + [995.0]]}
    constant = {"constant": [[2.0] * 5]}
    summary = summarize([write_comparison(tmp_path, values, references=constant)])
    assert summary.method("local").verdict == "diverged"
    assert summary.method("local").undefined == 1
    assert summary.method("ditto").verdict != "diverged"
    assert summarize([write_comparison(tmp_path / "none", values)]).method("local").verdict != "diverged"


def test_percentages_are_capped(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": 1e6 + 1e5 * np.arange(CLIENTS), "local": 1e36})
    words = " ".join(summary.answer)
    assert "by over 1,000 % (95 % interval over 1,000 to over 1,000 %)" in summary.answer[0]
    assert "Local (over 1,000 %)" in words
    assert "e+" not in words.replace("e+06", "")  # the mean itself may be large, a percentage may not
    assert percent(math.inf) == "over 1,000"
    assert [signed_percent(x) for x in (1000.0, 1000.1, -1001.0, 3.0)] == [
        "+1,000 %", "over 1,000 %", "below −1,000 %", "+3.0 %"
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ references


def test_references_stand_beside_the_methods(tmp_path: Path, compare: Any) -> None:
    effects, beside = {"finetune": -0.2}, {"constant": [[3.0] * CLIENTS] * 2, "pooled": [[1.1] * CLIENTS] * 2}
    alone, summary = compare(tmp_path / "a", effects), compare(tmp_path / "b", effects, references=beside)
    assert [m.label for m in summary.methods] == ["fedavg", "finetune"]
    assert as_json(summary)["methods"] == as_json(alone)["methods"]  # not in Holm's count either
    assert summary.best == "finetune" == alone.best
    constant, pooled = summary.references
    assert (constant.mean.value, pooled.mean.value) == (3.0, pytest.approx(1.1))
    assert (constant.title, constant.what, constant.cost) == ("Constant", "not federated", None)
    shared = summary.method("fedavg").mean.value
    assert constant.against.relative == pytest.approx(100 * (3.0 - shared) / shared)
    assert [r["label"] for r in json.loads(summary.to_json())["references"]] == ["constant", "pooled"]


def test_a_reference_that_has_not_run_is_unfinished(tmp_path: Path, write_comparison: Any) -> None:
    folder = write_comparison(tmp_path, {"fedavg": [[1.0]]}, compare={"references": [{"label": "pooled"}]})
    with pytest.raises(UserError, match=r"1 of 2 runs have no result\.json \(pooled-seed0\)"):
        summarize([folder])


def test_no_method_beats_a_constant(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": 0.1}, references={"constant": [[0.9] * CLIENTS] * 2})
    assert summary.answer[0].startswith("No method beats a constant prediction: the best, Fedavg, has a mean MSE of 1.")
    assert summary.answer[0].endswith("the constant 0.9000.")
    scores = compare(tmp_path / "b", {"finetune": 0.1}, lower=False, references={"constant": [[2.9] * CLIENTS] * 2})
    assert scores.answer[0].startswith("No method beats a constant prediction: the best, Finetune")
    good = compare(tmp_path / "c", {"finetune": 0.1}, references={"constant": [[2.9] * CLIENTS] * 2})
    assert "constant" not in " ".join(good.answer)
    one_client = [[0.9] * (CLIENTS - 1) + [90.0]] * 2  # the constant is worse on average, by one client alone
    chance = compare(tmp_path / "d", {"finetune": 0.1}, references={"constant": one_client})
    assert chance.answer[0].startswith("No method beats a constant prediction beyond chance: the best, Fedavg")


def test_only_the_baseline_is_no_better_than_a_constant(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": -0.9}, references={"constant": [[1.3] * CLIENTS] * 2})
    assert summary.answer[0].startswith("Personalization helps")
    assert summary.answer[1].startswith("Fedavg itself is no better than a constant prediction (mean MSE 1.")


def test_a_baseline_that_has_not_converged(tmp_path: Path, write_comparison: Any) -> None:
    """1.34 against 1.00 is 34 % above. 1.04 is not clearly above."""
    pooled = {"pooled": [[1.0] * 8]}

    def answer(shared: float, personal: float, **more: Any) -> list[str]:
        values = {"fedavg": [[shared] * 8], "finetune": [[personal] * 8]}
        folder = write_comparison(tmp_path / f"{shared}{personal}{more}", values, references=pooled, **more)
        return summarize([folder]).answer

    said = "Fedavg stopped 34.0 % above the same model fitted in one place (1.340 against 1.000): it has not converged"
    assert any(s.startswith(said) for s in answer(1.34, 0.5))
    assert answer(1.34, 0.5)[0].startswith("Personalization helps")
    assert answer(1.34, 1.1)[0].startswith("No gain over a shared model that has converged: Finetune lowers")
    assert answer(1.34, 1.1)[0].endswith("the same model fitted in one place (1.100 against 1.000).")
    assert not any("stopped" in s for s in answer(1.04, 0.5))
    scores = answer(0.97, 1.1, metric="accuracy", lower=False)
    assert any(s.startswith("Fedavg stopped 0.030 below the same model fitted in one place") for s in scores)
    assert not any("stopped" in s for s in answer(0.99, 1.1, metric="accuracy", lower=False))


def test_groups(tmp_path: Path, compare: Any) -> None:
    effect = np.where(np.arange(CLIENTS) % 2 == 0, -0.3, 0.1)
    summary = compare(tmp_path, {"finetune": effect}, groups=["north", "south"] * (CLIENTS // 2))
    north, south = summary.method("finetune").groups
    assert (north.group, north.clients, north.hurt) == ("north", 20, 0.0)
    assert north.difference == pytest.approx(-0.3)
    assert (south.group, south.hurt) == ("south", 1.0)
    assert any("does most for north (−" in s and "least for south (+" in s for s in summary.answer)
    assert summary.method("fedavg").groups[0].mean > north.mean


def test_groups_that_change_alike_are_not_named(tmp_path: Path, write_comparison: Any) -> None:
    values = {"fedavg": [[1.0] * 8], "finetune": [[1.0] * 8]}
    summary = summarize([write_comparison(tmp_path, values, groups=["F", "M"] * 4)])
    assert len(summary.method("finetune").groups) == 2
    assert not any("does most for" in sentence for sentence in summary.answer)


def test_groups_that_only_repeat_the_ids_are_passed_over(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": -0.2}, groups=[str(i) for i in range(CLIENTS)])
    assert summary.method("finetune").groups == []


def test_clients_with_fewer_examples_gain_less(tmp_path: Path, compare: Any) -> None:
    summary = compare(tmp_path, {"finetune": -0.01 * np.arange(CLIENTS)}, examples=list(range(10, 10 + CLIENTS)))
    assert summary.method("finetune").against.examples_correlation == pytest.approx(1.0, abs=0.01)
    assert any(s.startswith("Clients with fewer examples gain less (Spearman +1.0") for s in summary.answer)


def test_a_baseline_that_was_not_run(tmp_path: Path, write_comparison: Any) -> None:
    folder = write_comparison(tmp_path, {"fedavg": [[1.0]], "ditto": [[1.0]]}, compare={"baseline": "fedprox"})
    with pytest.raises(UserError, match=r"unknown baseline 'fedprox' in compare\.json"):
        summarize([folder])


def test_seeds_that_not_all_methods_have_are_left_out(tmp_path: Path, write_run: Any) -> None:
    runs = [
        write_run(tmp_path / f"{label}{seed}", label, seed, [value] * 7, list("abcdefg"))
        for label, seed, value in (("fedavg", 0, 1.0), ("fedavg", 1, 9.0), ("local", 0, 2.0))
    ]
    summary = summarize(runs)
    assert summary.seeds == [0]
    assert summary.method("fedavg").mean.value == 1.0
    assert any("Only seeds 0" in note for note in summary.notes)


def test_the_order_of_run_folders_matters_only_for_the_order_of_methods(toy: Path) -> None:
    runs = sorted((toy / "runs").iterdir())
    forward, backward = summarize(runs), summarize(runs[::-1])
    assert forward.method("finetune") == backward.method("finetune")


def test_json_is_complete_and_deterministic(toy: Path) -> None:
    text = summarize([toy]).to_json()
    assert text == summarize([toy]).to_json()
    record = json.loads(text)
    assert record["methods"][1]["against"]["relative"] == -10.0
    assert record["answer"][0].startswith("Too few")
    assert "NaN" not in text


def test_numbers_as_text() -> None:
    assert [number(x) for x in (0.41234, 12345.6, 0.0, math.nan, -0.5)] == ["0.4123", "12,346", "0", "–", "−0.5000"]
    assert number(1.234e-7, 3) == "1.23e−07"
    assert [percent(x) for x in (4.123, 0.0, 100.0, 0.012, -3.0)] == ["4.1", "0", "100", "0.01", "−3.0"]
    assert [p_text(p) for p in (1e-9, 0.0123, 0.5)] == ["p < 0.001", "p = 0.012", "p = 0.50"]
    assert [size(b) for b in (12, 3600, 2.5e6, 7e9)] == ["12 B", "3.60 kB", "2.50 MB", "7.00 GB"]
    assert with_interval(4.123, Interval(3.04, 5.21)) == ("4.1", "3.0", "5.2")
    assert with_interval(0.0563, Interval(0.0454, 0.067), -1.0) == ("0.056", "−0.067", "−0.045")
