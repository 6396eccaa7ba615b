"""Under [privacy] nobody is named: not in the terminal, the report, the summary, or in JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from bespoke import summarize, write_report
from command import bespoke, plain_table, write_csv


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A table in which some are hurt, two are the same client twice, and every id is a word of its own."""
    folder = tmp_path_factory.mktemp("named")
    table = plain_table(9, 12)
    table["client"] = "Zo-" + table["client"]
    twin = table[table["client"] == "Zo-c3"].assign(client="Zo-c9")
    write_csv(folder / "t.csv", pd.concat([table, twin]))
    return folder, sorted(set(table["client"]) | {"Zo-c9"})


def compared(folder: Path, out: str, *more: str) -> str:
    """Everything that `bespoke compare` prints."""
    told = bespoke(
        "compare", folder / "t.csv", "--client", "client", "--target", "y", "--methods", "fedavg,local", "--seeds", 1,
        "--rounds", 2, "--no-tune", "--model", "linear", "--jobs", 1, "--out", folder / out, *more,
    )  # fmt: skip
    assert told.code == 0, told.err
    return told.out + told.err


def named(text: str, ids: list[str]) -> list[str]:
    return [name for name in ids if name in text]


def test_nobody_is_named_under_privacy_unless_asked_for(tables: tuple[Path, list[str]]) -> None:
    folder, ids = tables
    said = compared(folder, "private", "--privacy", "noise=0.1,clip=1")
    page, summary = folder / "private/report.html", folder / "private/summary.json"
    assert "have exactly the rows of another" in said
    assert "worse off" in page.read_text()
    assert "--name-clients" in page.read_text()
    assert "clients by id" not in page.read_text()
    for text in (said, page.read_text(), summary.read_text()):
        assert named(text, ids) == []
    as_json = bespoke("report", folder / "private", "--json").out
    assert named(as_json, ids) == []
    assert json.loads(as_json)["names_clients"] is False

    told = bespoke("report", folder / "private", "--name-clients")
    assert {"Zo-c3", "Zo-c9"} <= set(named(told.out, ids))
    assert named(page.read_text(), ids) == ids
    assert "clients by id" in page.read_text()
    assert named(summary.read_text(), ids)

    again = write_report([folder / "private"], folder / "private/report.html").read_text()
    assert named(again, ids) == []
    assert named(str(summarize([folder / "private"])), ids) == []
    assert named(str(summarize([folder / "private"], name_clients=True)), ids)


def test_without_privacy_the_page_says_that_it_shows_ids(tables: tuple[Path, list[str]]) -> None:
    folder, ids = tables
    assert named(compared(folder, "plain"), ids)
    page = (folder / "plain/report.html").read_text()
    assert named(page, ids) == ids
    assert "This page shows clients by id" in page


def test_one_run_names_nobody_either(tables: tuple[Path, list[str]]) -> None:
    folder, ids = tables
    experiment = folder / "exp.toml"
    experiment.write_text(
        f'data = {{table = "{(folder / "t.csv").as_posix()}", client = "client", target = "y"}}\n'
        'stage = [{method = "fedavg", rounds = 2}]\nattack = {kind = "scale", clients = 0.2}\n'
    )
    for place, more in enumerate(((), ("--set", "privacy.noise=0.1", "--set", "privacy.clip=1"))):
        told = bespoke("run", experiment, "--json", "--out", folder / f"run{place}", *more)
        assert told.code == 0, told.err
        attack = json.loads(told.out)["attack"]["clients"]
        assert attack == 2 if more else named(str(attack), ids) == attack
        assert bool(named(told.out + told.err, ids)) is not bool(more)
