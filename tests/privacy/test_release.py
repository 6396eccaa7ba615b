"""What the encoding of data learns from clients: paid for, declared or infinite; never from rows that are tested on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from scipy.stats import norm

from bespoke.api import run as run_experiment
from bespoke.data.splits import everything
from bespoke.data.tables.features import LEVELS
from bespoke.data.tables.schema import Schema
from bespoke.data.tables.table import open_table, read_table
from bespoke.deploy.export import export_personal, load_personal
from bespoke.errors import UserError
from bespoke.experiment.build import Bench
from bespoke.experiment.checks import checked
from bespoke.experiment.encoding import SCHEMA
from bespoke.experiment.loading import load_population
from bespoke.experiment.prepare import prepare
from bespoke.privacy.accountant import Spent
from bespoke.privacy.release import EXPONENTS, Learner, threshold
from bespoke.study.comparison import Comparison
from command import bespoke
from ledger_epsilon import gaussian, multipliers, statement

CLIENTS, ROWS, SECRET = 200, 8, "zebra-secret"  # so many that each colour clears the threshold by five deviations
DELTA = 1e-3


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three colours at every client, a number, a date, a gap at most clients; one row of one client has a secret."""
    draw = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("table") / "t.csv"
    lines = ["who,colour,size,day,y"]
    for client in range(CLIENTS):
        for row in range(ROWS):
            colour = SECRET if (client, row) == (7, 3) else ("red", "blue", "green")[row % 3]
            size = "" if row == 5 else f"{1000 + 50 * draw.normal():.3f}"
            lines.append(f"c{client:03d},{colour},{size},2024-0{1 + row % 3}-0{1 + row},{draw.normal() + row % 3:.4f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(table: Path, privacy: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    data = {"table": str(table), "client": "who", "target": "y", **more.pop("data", {})}
    base = {"data": data, "engine": {"workers": 0}, "stage": [{"method": "fedavg", "rounds": 3}], **more}
    return base if privacy is None else {**base, "privacy": {"clip": 0.5, "delta": DELTA, **privacy}}


def features(config: dict[str, Any]) -> list[str]:
    made = checked(config, "test")
    return prepare(made, load_population(made)).population.about["features"]


def everything_written(folder: Path) -> bytes:
    """All bytes of all files that would be shared, Parquet decoded too; private/ excepted."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "private" not in path.relative_to(folder).parts:
            found.append(path.read_bytes())
            if path.suffix == ".parquet":
                found.append(str(pyarrow.parquet.read_table(path).to_pylist()).encode())
    return b"\n".join(found)


# -- the secret of one row ---------------------------------------------------------------------------------------------
def test_one_row_of_one_client_is_in_no_file(table: Path, tmp_path: Path) -> None:
    """A comparison with its report and an exported model; without privacy the secret is there, so the search works."""
    folder = tmp_path / "private"
    base = settings(table, {"epsilon": 8.0})
    del base["stage"]
    Comparison(base, folder, ("fedavg", "local"), (0, 1), 3, tune=False, automatic=True).run()
    from bespoke.report.page import write_report

    write_report([folder], folder / "report.html")
    for run in sorted((folder / "runs").iterdir()):
        export_personal(run, "c007")
    assert SECRET.encode() not in everything_written(folder)
    described = json.loads((folder / "runs" / "fedavg-seed0" / "personal" / "c007" / "model.json").read_text())
    assert {"colour = red", "colour = blue", "colour = green", "colour = (other)"} <= set(described["features"])
    for name in ("fedavg-seed0", "fedavg-seed1", "local-seed0"):
        independent(folder / "runs" / name, 8.0)
    plain = tmp_path / "plain"
    seeds = [seed for seed in range(4) if f"colour = {SECRET}" in features(settings(table, seed=seed))]
    run_experiment(settings(table, seed=seeds[0]), plain)
    export_personal(plain, "c007")
    assert SECRET.encode() in everything_written(plain)


def independent(run: Path, budget: float) -> None:
    """The whole epsilon by a closed form: everyone comes, so mu^2 adds up, and the threshold's delta is set aside."""
    said, kept = statement(run), json.loads((run / "statistics.json").read_text())
    rounds = multipliers(run)
    squared = kept["noise"] ** -2 + sum(z**-2 for z in rounds.values())
    epsilon = gaussian(squared, DELTA - kept["delta"])
    assert epsilon <= budget * (1 + 1e-6)
    assert said["released"]["epsilon"] == pytest.approx(epsilon, rel=1e-4)
    assert gaussian(kept["noise"] ** -2, DELTA - kept["delta"]) <= 0.1 * budget * (1 + 1e-6)  # a tenth, by itself
    assert kept["delta"] == pytest.approx(0.1 * DELTA)
    if rounds:
        assert epsilon > 0.99 * budget


def test_the_embedded_data_run_within_their_budget(tmp_path: Path) -> None:
    """Means and deviations of 65 schools: near those without noise, or left alone."""
    privacy = {"clip": 0.5, "epsilon": 8.0, "delta": DELTA, "statistics": 0.5}
    stages = [{"method": "fedavg", "rounds": 2}]
    run_experiment({"data": {"source": "exam"}, "privacy": privacy, "stage": stages}, tmp_path / "run")
    said, kept = statement(tmp_path / "run"), json.loads((tmp_path / "run" / "statistics.json").read_text())
    assert kept["delta"] == 0  # no open set of categories
    squared = kept["noise"] ** -2 + sum(z**-2 for z in multipliers(tmp_path / "run").values())
    assert said["released"]["epsilon"] == pytest.approx(gaussian(squared, DELTA), rel=1e-4)
    assert said["released"]["epsilon"] <= 8 * (1 + 1e-6)
    mean, deviation = kept["statistics"]["normexam"]  # standardized by its publisher
    assert (mean, deviation) == (0.0, 1.0) or (abs(mean) < 1 and 0.4 < deviation < 2.5)


# -- what is refused, and what is public -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("privacy", "reason"),
    [
        ({"epsilon": 8.0, "statistics": 0.0}, "categories, class names and missing values"),
        ({"epsilon": 8.0, "statistics": 0.0, "public_schema": True}, "sums of the data travel without noise"),
        ({"epsilon": 8.0, "local_noise": "auto"}, "categories, class names and missing values"),
    ],
)
def test_what_is_neither_paid_for_nor_public_is_refused_with_a_budget(
    table: Path, tmp_path: Path, privacy: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        run_experiment(settings(table, privacy), tmp_path / "run")
    with pytest.raises(UserError, match=reason):  # a method that sends nothing more has learned it all the same
        run_experiment(settings(table, privacy, stage=[{"method": "local", "rounds": 0}]), tmp_path / "local")


def test_without_a_budget_it_is_infinite_with_the_reason(table: Path, tmp_path: Path) -> None:
    said = run_experiment(settings(table, {"noise": 1.0}), tmp_path / "run")["privacy"]["released"]
    assert said["epsilon"] is None
    assert said["why"][0] == SCHEMA
    public = {"noise": 1.0, "public_schema": True, "public_statistics": True}
    said = run_experiment(settings(table, public), tmp_path / "public")["privacy"]["released"]
    assert said["epsilon"] == pytest.approx(gaussian(3.0, DELTA), rel=1e-4)


def test_a_schema_declares_what_is_public(table: Path, tmp_path: Path) -> None:
    """Written from a public table, given to a run: nothing is learned, so three rounds cost mu^2 = 3."""
    public, path = tmp_path / "public.csv", tmp_path / "schema.json"
    public.write_text("".join(line + "\n" for line in table.read_text().splitlines() if SECRET not in line))
    assert bespoke("data", public, "--client", "who", "--target", "y", "--write-schema", path).code == 0
    written = json.loads(path.read_text())
    assert sorted(written["columns"]["colour"]["categories"]) == ["blue", "green", "red"]
    assert written["columns"]["size"]["missing"]
    sizes = np.array([float(line.split(",")[2]) for line in public.read_text().splitlines()[1:] if line.split(",")[2]])
    assert written["columns"]["size"]["range"] == [sizes.min(), sizes.max()]
    assert written["statistics"]["size"] == pytest.approx([sizes.mean(), sizes.std()], rel=1e-5)
    config = settings(table, {"noise": 1.0}, data={"schema": str(path)})
    said = run_experiment(config, tmp_path / "run")["privacy"]["released"]
    assert said["epsilon"] == pytest.approx(gaussian(3.0, DELTA), rel=1e-4)
    export_personal(tmp_path / "run", "c007")
    assert SECRET.encode() not in everything_written(tmp_path / "run")
    model = load_personal(tmp_path / "run" / "personal" / "c007")
    assert "colour = (other)" in model.about["features"]
    assert model.mean[model.about["features"].index("size")] == pytest.approx(sizes.mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"columns": {}, "target": {"name": "y"}}', "columns is empty"),
        ('{"columns": {"size": {"kind": "nummer"}}, "target": {"name": "y"}}', "unknown kind 'nummer'.*number"),
        ('{"columns": {"size": {"kind": "number", "range": [3, 1]}}, "target": {"name": "y"}}', "the smaller one"),
        ('{"columns": {"size": {"kind": "category"}}, "target": {"name": "y"}}', "a list of categories"),
        ('{"columns": {"size": {"kind": "number"}}, "target": {"name": "z"}}', "is for the target 'z'"),
        ('{"columns": {"weight": {"kind": "number"}}, "target": {"name": "y"}}', "unknown column 'weight'"),
        ('{"columns": {"size": {"kind": "number"}}, "target": {"name": "y"}, "stats": {}}', "unknown key 'stats'"),
    ],
)
def test_a_schema_that_is_wrong_is_named(table: Path, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schema.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_population(checked(settings(table, data={"schema": str(path)}), "test"))


def test_what_does_not_fit_a_schema_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("who,a,b,y\nu,1,yes,p\nu,oops,no,q\nv,3,?,r\nv,4,yes,p\nv,5,no,q\n")
    schema = Schema.of({"columns": {"a": {"kind": "number", "missing": True}, "b": {"kind": "boolean"}},
                        "target": {"name": "y", "classes": ["q", "p"]}}, "here")  # fmt: skip
    population = read_table(path, "who", "y", schema=schema)
    assert population.about["classes"] == ["q", "p"]
    assert population.columns["y"].tolist() == [1, 0, 1, 0]  # the row of an undeclared class is dropped
    x = np.nan_to_num(population.columns["x"].numpy(), nan=-1)
    assert x.tolist() == [[1, 0, 1], [-1, 1, 0], [4, 0, 1], [5, 0, 0]]


# -- rows that are only tested on --------------------------------------------------------------------------------------
def test_nothing_is_learned_from_rows_that_are_tested_on(tmp_path: Path) -> None:
    """What query rows hold is changed in every way: no feature, class, mean or deviation of training rows changes."""
    lines = [f"c{i % 10},{'ab'[i // 10 % 2]},{i % 7}.5,2024-01-{1 + i % 9:02d},{'pq'[i % 2]}" for i in range(100)]
    head, path = "who,kind,x,day,y", tmp_path / "t.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    config = checked({"data": {"table": str(path), "client": "who", "target": "y"},
                      "stage": [{"method": "fedavg", "rounds": 1}]}, "test")  # fmt: skip
    before = prepare(config, load_population(config))
    query, _ = before.split.test.query.of(before.split.test.query.clients)
    stored = np.argsort([line.split(",")[0] for line in lines], kind="stable")  # rows are kept by client
    for row in stored[query].tolist():
        lines[row] = f"{lines[row].split(',')[0]},strange,1e9,1950-01-01,new class"
    path.write_text("\n".join([head, *lines]) + "\n")
    after = prepare(config, load_population(config))
    assert after.population.about["features"] == before.population.about["features"]
    assert after.population.about["classes"] == ["p", "q", "(other)"]
    train, _ = before.split.train.of(before.split.train.clients)
    assert (after.population.columns["x"][train] == before.population.columns["x"][train]).all()
    assert (after.population.columns["y"][train] == before.population.columns["y"][train]).all()
    kinds = [place for place, name in enumerate(after.population.about["features"]) if name.startswith("kind")]
    assert (after.population.columns["x"][query][:, kinds] == 0).all()


# -- the mechanism -----------------------------------------------------------------------------------------------------
def test_the_threshold_by_hand() -> None:
    """One item: 1 + z quantile(1 - delta). Of several, the worst count; all cross with at most delta."""
    assert threshold(2.0, 1e-3, 1) == pytest.approx(1 + 2 * norm.ppf(1 - 1e-3))
    for most in (1, 5, 40):
        limit = threshold(3.0, 1e-4, most)
        for count in range(1, most + 1):
            crossed = 1 - norm.cdf((limit - 1 / math.sqrt(count)) / 3.0) ** count
            assert crossed <= 1e-4 * (1 + 1e-6)


def test_no_client_moves_what_is_noised_by_more_than_one(table: Path) -> None:
    """The sums of a client's own messages or none differ by norm one at most in each round, given the rounds before."""
    raw = open_table(table, "who", "y", task="regression")
    values = np.column_stack([raw.columns["cells"][:, 1].numpy(), raw.columns["y"].numpy().astype(float)])
    values[:ROWS] *= 1e6  # the client that comes and goes is an outlier

    class Spy(Learner):
        """Keeps the sums; what is released does not depend on them."""

        def _added(self, sums: Any, purpose: str) -> Any:
            seen[-1][purpose] = sums
            return {"means": np.array([40.0, 0.1])}.get(purpose, np.full(len(sums), 1e9))

    seen: list[dict[str, Any]] = []
    whole = everything(raw)
    for train in (whole, type(whole)(raw, whole.clients[1:], whole.part)):
        seen.append({})
        rows, _ = train.of(train.clients)
        spy = Spy(train, 1.0, 0.5, lambda shape, purpose: np.zeros(shape))
        spy.clients = CLIENTS  # how many there are is public
        spy.items(raw, values[rows], ["size", "y"])
        spy.scales(values[rows], ["size", "y"], np.array([11, 2]))
    moved = {name: float(((sums - seen[1][name]) ** 2).sum()) for name, sums in seen[0].items()}
    assert set(moved) == {"magnitudes", "missing", "levels 0", "means", "deviations"}
    assert moved["magnitudes"] + moved["missing"] + moved["levels 0"] == pytest.approx(1.0)
    assert 0 < moved["means"] <= 1
    assert moved["deviations"] == pytest.approx(1.0)


def test_frequent_categories_are_released_and_rare_ones_are_not(tmp_path: Path) -> None:
    """Of 400 clients all have 'common' and ten have 'rare': at noise 5 the threshold keeps the second."""
    path = tmp_path / "t.csv"
    rows = [f"c{i},{'rare' if i < 10 and j else 'common'},{i + j}.5" for i in range(400) for j in range(2)]
    path.write_text("\n".join(["who,kind,y", *rows]) + "\n")
    raw = open_table(path, "who", "y")
    for seed in range(20):
        draw = np.random.default_rng(seed)
        learner = Learner(everything(raw), 5.0, 1e-6, lambda shape, purpose, d=draw: d.normal(size=shape))
        schema, _, _ = learner.items(raw, np.zeros((raw.rows, 0)), [])
        assert schema is not None
        assert schema.columns[0].categories == ("common",)
        assert schema.columns[0].other


def test_scales_follow_the_data_and_not_an_outlier() -> None:
    """A thousand clients at 2015 +- 5, one at a billion: mean and deviation together give values of unit size."""
    from bespoke.data.population import Population

    draw = np.random.default_rng(1)
    values = np.column_stack([2015 + 5 * draw.normal(size=3000), 1e-6 * draw.normal(size=3000)])
    values[:3] = 1e9
    population = Population.build({"x": values.astype(np.float32)}, np.repeat(np.arange(1000), 3))
    learner = Learner(everything(population), 5.0, 0.0, lambda shape, purpose: draw.normal(size=shape))
    _, magnitudes, notes = learner.items(None, values, ["year", "tiny"])
    assert notes == []
    assert magnitudes.tolist()[0] == 11  # 2048
    found = learner.scales(values, ["year", "tiny"], magnitudes)
    for place, name in enumerate(("year", "tiny")):
        mean, deviation = found[name]
        scaled = (values[3:, place] - mean) / deviation
        assert 0.5 < math.sqrt((scaled**2).mean()) < 1.6, name
    nothing = Learner(everything(population), 500.0, 0.0, lambda shape, purpose: draw.normal(size=shape))
    _, magnitudes, notes = nothing.items(None, values, ["year", "tiny"])
    assert (magnitudes < EXPONENTS[0]).all()
    assert "No scale of year could be learned" in notes[0]
    assert nothing.scales(values, ["year", "tiny"], magnitudes) == {"year": (0.0, 1.0), "tiny": (0.0, 1.0)}


def test_a_client_has_a_bounded_number_of_categories(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = [f"a,k{i},{i}.5" for i in range(50)] + [f"b,k{i % 2},{i}.5" for i in range(10)]
    path.write_text("\n".join(["who,kind,y", *rows]) + "\n")
    raw = open_table(path, "who", "y")
    learner = Learner(everything(raw), 1.0, 1e-3, lambda shape, purpose: np.zeros(shape))
    who, _ = learner._levels(raw.columns["cells"][:, 0].numpy())
    assert np.bincount(who).tolist() == [LEVELS, 2]


# -- the account -------------------------------------------------------------------------------------------------------
def test_a_release_that_several_runs_share_counts_once() -> None:
    one = Spent(squared_mu=0.5, releases={"a": (2.0, 1e-4)})
    assert (one + one).epsilon(1e-3) == pytest.approx(gaussian(1.0 + 0.25, 9e-4), rel=1e-4)
    other = Spent(squared_mu=0.5, releases={"b": (2.0, 1e-4)})
    assert (one + other).epsilon(1e-3) == pytest.approx(gaussian(1.5, 8e-4), rel=1e-4)
    assert Spent.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert Spent(releases={"a": (2.0, 1e-3)}).epsilon(1e-3) == math.inf


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_release_beside_sampled_rounds(kind: Any) -> None:
    """Everyone takes part in it: under Poisson sampling mu is 1 / z, and where a client is replaced 2 / z."""
    alone = Spent(kind, releases={"a": (4.0, 0.0)}).epsilon(1e-3, "rdp" if kind == "fixed" else "pld")
    exact = gaussian((2 / 4.0) ** 2 if kind == "fixed" else 4.0**-2, 1e-3)
    assert exact * 0.999 <= alone <= exact * (1.5 if kind == "fixed" else 1.01)
    both = Spent(kind, {(0.1, 1.0): 10}, releases={"a": (4.0, 0.0)})
    assert both.epsilon(1e-3) > max(alone, Spent(kind, {(0.1, 1.0): 10}).epsilon(1e-3))


def test_a_release_is_drawn_once_and_kept(table: Path, tmp_path: Path) -> None:
    """Runs of one comparison, and a run that is opened again, see the same; another folder sees other noise."""
    config = checked(settings(table, {"epsilon": 8.0}), "test")
    raw = load_population(config)
    first, again, other = (Bench(raw, tmp_path / name).prepared(config) for name in ("a", "a", "b"))
    assert first.population.about["release"] == again.population.about["release"]
    assert first.population.about["release"]["id"] != other.population.about["release"]["id"]
    repeated = checked(settings(table, {"epsilon": 8.0, "reproducible": True}), "test")
    assert prepare(repeated, raw).population.about["release"] == prepare(repeated, raw).population.about["release"]
