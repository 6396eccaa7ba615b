"""Rules of acceptance on four clients whose numbers can be checked in the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bespoke.report.report import summarize
from bespoke.statistics.acceptance import Accepted
from conftest import make_comparison  # type: ignore[attr-defined]

SHARED, PERSONAL = [4.0, 4.0, 4.0, 4.0], [2.0, 3.0, 5.0, 6.0]  # MSE on query rows: the last two are hurt
EXAMPLES = [10, 20, 30, 40]


def comparison(folder: Path, validation: list[float] | None, personal: list[float] = PERSONAL, **compare: Any) -> Path:
    made = make_comparison(folder, {"fedavg": [SHARED], "finetune": [personal]}, examples=EXAMPLES, compare=compare)
    for label, values in (("fedavg", SHARED), ("finetune", validation)):
        path = made / "runs" / f"{label}-seed0" / "clients.parquet"
        pd.read_parquet(path).assign(validation_mse=values or [float("nan")] * 4).to_parquet(path)
    return made


def rules(folder: Path) -> dict[str, Accepted]:
    return {rule.rule: rule for rule in summarize([folder]).accepted}


def test_a_client_takes_its_model_where_it_wins_on_its_own_rows(tmp_path: Path) -> None:
    """Validation says: 1 and 2 win, 3 wins too (wrongly), 4 loses. So 3 of 4 take it; only client 3 stays hurt."""
    rule = rules(comparison(tmp_path, [2.0, 3.0, 3.5, 7.0]))["wins on own validation rows"]
    assert rule.taken.value == 0.75
    assert (rule.plain_hurt.value, rule.hurt.value) == (0.5, 0.25)
    assert (rule.plain_mean.value, rule.mean.value) == (4.0, (2 + 3 + 5 + 4) / 4)
    assert rule.verdict == "fewer hurt"


def test_where_nobody_was_hurt_the_rule_is_not_praised(tmp_path: Path) -> None:
    rule = rules(comparison(tmp_path, [1.0] * 4, personal=[1.0, 2.0, 3.0, 4.0]))["wins on own validation rows"]
    assert (rule.plain_hurt.value, rule.hurt.value) == (0.0, 0.0)
    assert rule.verdict == "nobody hurt"


def test_equal_is_not_a_win(tmp_path: Path) -> None:
    assert rules(comparison(tmp_path, SHARED))["wins on own validation rows"].taken.value == 0


def test_enough_examples_are_chosen_on_validation_data(tmp_path: Path) -> None:
    """On validation the two small clients lose and the two large ones win: models are taken from 30 examples on."""
    rule = rules(comparison(tmp_path, [9.0, 9.0, 1.0, 1.0]))["has enough examples"]
    assert rule.min_examples == 30
    assert rule.taken.value == 0.5
    assert rule.mean.value == (4 + 4 + 5 + 6) / 4
    assert rule.verdict == "no fewer hurt"  # validation misled it, and the report says so


def test_cross_device_chooses_on_the_validation_clients(tmp_path: Path) -> None:
    """Test clients have no validation rows; two validation clients say that 15 examples are too few and 35 are not."""
    folder = comparison(tmp_path, None)
    for label, values in (("fedavg", [4.0, 4.0]), ("finetune", [9.0, 1.0])):
        table = pd.DataFrame({"client": ["v", "w"], "support_examples": [15, 35], "validation_mse": values})
        table.to_parquet(folder / "runs" / f"{label}-seed0" / "selection.parquet")
    found = rules(folder)
    assert list(found) == ["has enough examples"]
    assert found["has enough examples"].min_examples == 35
    assert found["has enough examples"].taken.value == 0.25


@pytest.mark.parametrize(("margin", "taken"), [(0.0, 0.75), (0.2, 0.5), (0.3, 0.25), (0.5, 0.0)])
def test_the_rule_asked_for(tmp_path: Path, margin: float, taken: float) -> None:
    """Relative gains on validation rows are 50 %, 25 %, 12.5 % and -75 %; a gain equal to the margin is not enough."""
    rule = rules(comparison(tmp_path, [2.0, 3.0, 3.5, 7.0], accept={"margin": margin}))["as asked"]
    assert rule.taken.value == taken
    both = rules(comparison(tmp_path / "b", [2.0, 3.0, 3.5, 7.0], accept={"margin": 0.0, "min_examples": 20}))
    assert both["as asked"].taken.value == 0.5


def test_nothing_to_decide_on(tmp_path: Path) -> None:
    assert rules(comparison(tmp_path, None)) == {}


def test_where_personal_models_lose_everywhere_nobody_takes_one(tmp_path: Path) -> None:
    """On validation every personal model loses, the largest client's too: more examples than anybody has are needed."""
    rule = rules(comparison(tmp_path, [9.0, 9.0, 9.0, 9.0]))["has enough examples"]
    assert rule.min_examples == 41
    assert rule.taken.value == 0.0
    assert rule.mean.value == 4.0
    assert rule.hurt.value == 0.0


def test_a_rule_that_changes_nothing_is_not_said_to_be_instead(tmp_path: Path) -> None:
    """The last two clients win on validation and are hurt on query rows, with the rule as without it."""
    answer = summarize([comparison(tmp_path, [2.0, 3.0, 3.5, 3.5])]).answer
    assert any("as many (50.0 %) would be hurt" in sentence for sentence in answer)
    assert not any("instead of" in sentence for sentence in answer)
