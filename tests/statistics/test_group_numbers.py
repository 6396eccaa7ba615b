"""Groups in numbers: tables by group, who gains, what a client pays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.report.group_gain import by_group, client_cost, costs, gain, labelled
from bespoke.report.page import write_report
from bespoke.report.report import read, summarize_study
from bespoke.statistics.clusters import clusters_of

NAMES = {"fedavg": "fedavg", "finetune": "finetune", "group-fl": "group-fl", "both": "group-perfl"}
VALUES = {
    "fedavg": [[4.0, 4.0, 4.0, 8.0, 8.0], [4.0, 4.0, 4.0, 8.0, 8.0]],
    "finetune": [[2.0, 4.0, 4.0, 8.0, 4.0], [2.0, 4.0, 4.0, 8.0, 4.0]],
    "group-fl": [[3.0, 3.0, 3.0, 6.0, 6.0], [5.0, 3.0, 3.0, 6.0, 6.0]],
    "both": [[1.0, 3.0, 5.0, 4.0, 4.0], [1.0, 3.0, 4.4, 6.0, 4.0]],
}
GROUPS = ["a", "a", "a", "<b>", "<b>"]


@pytest.fixture
def folder(tmp_path: Path, write_comparison: Callable[..., Path]) -> Path:
    made = write_comparison(tmp_path / "groups", VALUES, groups=GROUPS, examples=[10, 20, 30, 40, 60])
    about = json.loads((made / "compare.json").read_text())
    for entry in about["methods"]:
        entry["name"] = NAMES[entry["label"]]
    about["split"]["train_clients"] = 10
    (made / "compare.json").write_text(json.dumps(about))
    return made


def test_a_table_by_group(folder: Path) -> None:
    study, table = read([folder])
    first, second, whole = by_group(study, table, summarize_study(study, table))
    assert (first.group, first.clients, first.examples) == ("a", 3, 20.0)
    assert first.values["group-fl"].value == pytest.approx((3 + 11 / 3) / 2)
    assert first.values["group-fl"].by_seed == pytest.approx([3.0, 11 / 3])
    assert second.values["both"].value == pytest.approx((4 + 5) / 2)
    assert (first.best(True), first.best(False)) == ("both", "fedavg")
    assert (whole.group, whole.clients) == ("all clients", 5)
    assert whole.values["fedavg"].value == pytest.approx(5.6)


def test_perplexity_is_of_all_rows_of_a_group(tmp_path: Path, write_comparison: Callable[..., Path]) -> None:
    losses = {"fedavg": [[0.0, 3.0, 1.0, 1.0]], "group-fl": [[1.0, 1.0, 2.0, 2.0]]}
    made = write_comparison(
        tmp_path / "words", losses, metric="loss", groups=["a", "a", "b", "b"], query=[3, 1, 5, 5],
        metrics=["loss", "perplexity"],
    )  # fmt: skip
    for path in (made / "runs").iterdir():
        found = pd.read_parquet(path / "clients.parquet")
        found.assign(query_perplexity=np.exp(found["query_loss"])).to_parquet(path / "clients.parquet")
    study, table = read([made])
    first, second, _ = by_group(study, table, summarize_study(study, table))
    assert first.values["fedavg"].value == pytest.approx(np.exp(3 / 4))  # not the mean of perplexities, nor of clients
    assert second.values["group-fl"].value == pytest.approx(np.exp(2.0))


def test_who_gains_by_its_group(folder: Path) -> None:
    study, table = read([folder])
    found = gain(study, table, summarize_study(study, table))
    assert found is not None
    assert (found.label, found.rival) == ("both", "finetune")
    # seed by seed -50, -25, +25 | +10, -50 | -25, 0
    assert list(found.changes.values()) == pytest.approx([-50, -25, 17.5, -37.5, 0])
    assert found.improved.by_seed == pytest.approx([3 / 5, 3 / 5])
    assert found.improved_in("a") == pytest.approx(2 / 3)
    assert labelled(study, "clustered-fl") == ""


# -- Table 4 -----------------------------------------------------------------------------------------------------------
OWNERS, GENERAL, COHORT, MODEL = 15243, 9178, 100, 4_000_000
WAYS = {"FL": (False, False), "PerFL": (False, True), "GroupFL": (True, False), "GroupPerFL": (True, True)}


def paper_ledger(grouped: bool, personal: bool) -> list[dict[str, Any]]:
    """The ledger of the paper's video setting, for a client of the category `general`.

    20 epochs of global training, 10 of group training, cohorts of 100, one local epoch, 5 of personalization. An epoch
    is round(clients / 100) rounds: 152 of 15,243 owners (the sum of Table 1), 92 of the 9,178 of `general`.
    """
    stages = [(OWNERS, 20), *([(GENERAL, 10)] if grouped else [])]
    lines: list[dict[str, Any]] = [
        {"stage": place, "round": number, "contacted": COHORT, "reported": COHORT, "epochs": 1,
         "bytes_down": COHORT * MODEL, "bytes_up": COHORT * MODEL}
        for place, (owners, epochs) in enumerate(stages)
        for number in range(1, epochs * round(owners / COHORT) + 1)
    ]  # fmt: skip
    return [*lines, {"round": None, "phase": "personalization", "epochs": 5 if personal else 0}]


def test_the_papers_costs() -> None:
    """Table 4, exactly: 3060, 3060, 3990, 3990 models; 20, 25, 30, 35 epochs.

    Algorithms 1 and 2 deliver each round's model to every client: 20 x 152 = 3,040 models, and 10 x 92 = 920 more with
    groups; a client takes part once an epoch and uploads 20 times, and 10 more. 3,040 + 20 = 3,060; + 920 + 10 = 3,990.
    """
    found = {
        way: client_cost(paper_ledger(*stages), MODEL, {0: OWNERS, 1: GENERAL}) for way, stages in WAYS.items()
    }  # fmt: skip
    assert [round(cost.delivered) for cost in found.values()] == [3060, 3060, 3990, 3990]
    assert [round(cost.epochs or 0) for cost in found.values()] == [20, 25, 30, 35]
    # sent only to those who take part, it is two models an epoch
    assert [round(cost.sent) for cost in found.values()] == [40, 40, 60, 60]


def test_costs_of_run_folders(folder: Path) -> None:
    """Five of ten clients take part in each of four rounds: delivered 4 times, uploaded 4 x 5 / 10."""
    study, _ = read([folder])
    found = costs(study)["fedavg"]
    assert (found.delivered, found.sent) == (4 + 2, 2 + 2)
    assert found.epochs is None  # these ledgers do not tell epochs


# -- groups that were found --------------------------------------------------------------------------------------------
def test_found_groups_are_held_against_known_ones() -> None:
    served = {0: ["group 2", "group 2", "group 10", "none"], 1: ["group 2", "group 2", "group 10", "group 10"]}
    rows = [
        {"method": "group-fl", "seed": seed, "client": f"c{i}", "group": group, "candidate": "model", "served": by}
        for seed, each in served.items()
        for i, (group, by) in enumerate(zip("aabb", each))
    ]
    (found,) = clusters_of(pd.DataFrame(rows))
    assert found.agreement is not None
    assert found.agreement.by_seed == pytest.approx([4 / 7, 1.0])
    assert found.names == ["group 2", "group 10", "none"]
    assert found.counts == [[2, 0, 0], [0, 1, 1]]


def test_the_page_shows_groups(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly */")
    text = write_report([folder], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "What groups add" in text
    assert "figure-group-gain" in text
    assert '<td class="id">&lt;b&gt;</td>' in text
    assert "Table 4" in text
