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
from bespoke.metrics.significance import Interval
from bespoke.metrics.summary import BEFORE, Summary, summarize
from bespoke.metrics.text import number, p_text, percent, size, with_interval

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


def test_it_helps(tmp_path: Path, compare) -> None:
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


def test_accuracy_rises_in_its_own_units(tmp_path: Path, compare) -> None:
    summary = compare(tmp_path, {"finetune": 0.1 + 0.01 * np.arange(CLIENTS)}, lower=False)
    assert summary.answer[0].startswith("Personalization helps: Finetune raises the mean accuracy per client by 0.")
    assert "%" not in summary.answer[0].replace("95 %", "")


def test_two_good_methods_that_cannot_be_told_apart(tmp_path: Path, compare) -> None:
    wobble = 0.1 * (-1.0) ** np.arange(CLIENTS)
    summary = compare(tmp_path, {"finetune": -0.3 + wobble, "ditto": -0.301 - wobble})
    assert any(s.startswith("Ditto cannot be told apart from Finetune") for s in summary.answer)
    assert any("Finetune (−" in s and "is also better" in s for s in summary.answer)


def test_no_method_beats_the_baseline(tmp_path: Path, compare) -> None:
    wobble = np.repeat(np.linspace(0.01, 0.2, CLIENTS // 2), 2) * (-1.0) ** np.arange(CLIENTS)
    summary = compare(tmp_path, {"finetune": wobble - 0.001, "ditto": wobble})
    assert summary.answer[0].startswith("No method beats one shared model (Fedavg) here beyond chance: the best, ")
    single = compare(tmp_path / "single", {"finetune": wobble - 0.001})
    assert single.answer[0].startswith("Finetune does not beat one shared model (Fedavg) beyond chance")


def test_every_method_is_worse(tmp_path: Path, compare) -> None:
    effect = 0.2 + 0.01 * np.arange(CLIENTS)
    summary = compare(tmp_path, {"finetune": effect, "local": effect + 1})
    assert summary.answer[0].startswith("Personalization hurts here: every method is worse than one shared model")
    assert "the least bad, Finetune raises" in summary.answer[0]
    assert summary.best == "fedavg"
    single = compare(tmp_path / "single", {"finetune": effect})
    assert single.answer[0].startswith("Personalization hurts here: Finetune raises the mean MSE per client by ")


def test_the_mean_gains_while_most_clients_lose(tmp_path: Path, compare) -> None:
    effect = np.where(np.arange(CLIENTS) < 10, -0.9, 0.02)
    summary = compare(tmp_path, {"finetune": effect})
    assert summary.answer[0].startswith("Mixed: Finetune lowers")
    assert summary.answer[0].endswith("but more clients lose than gain.")


def test_most_clients_gain_while_the_mean_loses(tmp_path: Path, compare) -> None:
    effect = np.where(np.arange(CLIENTS) < 8, 1.5, -0.05)
    summary = compare(tmp_path, {"finetune": effect})
    assert summary.answer[0].startswith("Mixed: more clients gain than lose, but Finetune raises")


def test_nothing_changes_at_all(tmp_path: Path, compare) -> None:
    summary = compare(tmp_path, {"finetune": 0.0})
    against = summary.method("finetune").against
    assert against is not None
    assert (against.p, against.same.value, against.verdict) == (1.0, 1.0, "unclear")
    assert "leaves the mean MSE per client as it is" in summary.answer[0]
    assert "Finetune hurts no client." in summary.answer


def test_one_seed_is_said_to_be_one(tmp_path: Path, compare) -> None:
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


def test_one_client_gets_no_interval(tmp_path: Path, write_comparison) -> None:
    summary = summarize([write_comparison(tmp_path, {"fedavg": [[1.0]], "finetune": [[0.5]]})])
    assert math.isnan(summary.method("finetune").against.interval.low)
    assert summary.answer[0].startswith("Too few clients to tell: Finetune lowers the mean MSE per client by 50.0 %")


def test_a_diverged_method_is_reported(tmp_path: Path, compare) -> None:
    summary = compare(tmp_path, {"finetune": -0.2, "local": np.nan})
    assert summary.method("local").against is None
    assert summary.answer[0].startswith("Personalization helps: Finetune")
    assert "Local gave no finite MSE for any client." in summary.answer


def test_left_out_clients_are_reported(tmp_path: Path, compare) -> None:
    effect = np.where(np.arange(CLIENTS) == 0, np.inf, -0.2)
    summary = compare(tmp_path, {"finetune": effect})
    assert summary.clients == CLIENTS - 1
    assert any("which flatters it" in sentence for sentence in summary.answer)


def test_groups(tmp_path: Path, compare) -> None:
    effect = np.where(np.arange(CLIENTS) % 2 == 0, -0.3, 0.1)
    summary = compare(tmp_path, {"finetune": effect}, groups=["north", "south"] * (CLIENTS // 2))
    north, south = summary.method("finetune").groups
    assert (north.group, north.clients, north.hurt) == ("north", 20, 0.0)
    assert north.difference == pytest.approx(-0.3)
    assert (south.group, south.hurt) == ("south", 1.0)
    assert any("does most for north (−" in s and "least for south (+" in s for s in summary.answer)
    assert summary.method("fedavg").groups[0].mean > north.mean


def test_groups_that_only_repeat_the_ids_are_passed_over(tmp_path: Path, compare) -> None:
    summary = compare(tmp_path, {"finetune": -0.2}, groups=[str(i) for i in range(CLIENTS)])
    assert summary.method("finetune").groups == []


def test_clients_with_fewer_examples_gain_less(tmp_path: Path, compare) -> None:
    summary = compare(tmp_path, {"finetune": -0.01 * np.arange(CLIENTS)}, examples=list(range(10, 10 + CLIENTS)))
    assert summary.method("finetune").against.examples_correlation == pytest.approx(1.0, abs=0.01)
    assert any(s.startswith("Clients with fewer examples gain less (Spearman +1.0") for s in summary.answer)


def test_a_baseline_that_was_not_run(tmp_path: Path, write_comparison) -> None:
    folder = write_comparison(tmp_path, {"fedavg": [[1.0]], "ditto": [[1.0]]}, compare={"baseline": "fedprox"})
    with pytest.raises(UserError, match=r"unknown baseline 'fedprox' in compare\.json"):
        summarize([folder])


def test_seeds_that_not_all_methods_have_are_left_out(tmp_path: Path, write_run) -> None:
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
