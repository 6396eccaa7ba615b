"""Bad input: tables, experiment files, options, folders, disks. A clear message, the right exit code, nothing lost."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import bespoke as library
from bespoke import storage as arrays
from bespoke.runs.folder import RunFolder
from command import bespoke, plain_table, refused, write_csv

QUICK = ("--rounds", 1, "--seeds", 1, "--methods", "fedavg,finetune", "--no-tune", "--json")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test in an empty working directory, with one good table in it."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "plain.csv", plain_table())
    return tmp_path


def compare(table: object, *more: object, client: str = "client", target: str = "y"):  # type: ignore[no-untyped-def]
    return bespoke("compare", table, "--client", client, "--target", target, *QUICK, *more)


# Tables


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--client", "clinet"), ("'clinet'", "plain.csv", "Did you mean 'client'", "x1")),
        (("--target", "z"), ("'z'", "plain.csv", "x1, x2, y")),
        (("--group", "lea"), ("'lea'", "plain.csv")),
        (("--features", "x1,x9"), ("'x9'", "plain.csv")),
        (("--features", " , "), ("--features", "names no column")),
        (("--features", "y"), ("'y'", "feature")),
        (("--target", "client"), ("'client'", "plain.csv")),
        (("--group", "y"), ("'y'", "group")),
        (("--group", "x1"), ("'c0'", "groups", "--client GROUP,CLIENT")),
        (("--time", "client"), ("'client'", "neither numbers nor dates", "2024-12-31")),
        (("--client", ""), ("--client COLUMN",)),
        (("--client", "x1"), ("'x1'", "different in each of the 400 rows")),
        (("--client", "client,nope"), ("'nope'",)),
        (("--task", "regresion"), ("'regresion'", "'regression'", "--task")),
        (("--task", "classification"), ("400 different values", "right column")),
        (("--metric", "accuracy"), ("'accuracy'", "mse")),
        (("--protocol", "cross"), ("'cross'", "cross-device, cross-silo")),
        (("--model", "resnet"), ("'resnet'", "linear")),
        (("--model", "svm"), ("'svm'", "regression", "linear, mlp")),
        (("--methods", "FedAvg"), ("'FedAvg'", "'fedavg'")),
        (("--methods", ", ,"), ("--methods", "names no method")),
        (("--data", "exam"), ("plain.csv", "--data exam", "not both")),
        (("--rounds", "0"), ("--rounds 0", "one or more", "auto")),
        (("--rounds=-3",), ("--rounds -3", "one or more", "auto")),
        (("--seeds", "0"), ("--seeds", "'0'")),
        (("--seeds", "two"), ("--seeds", "'two'")),
        (("--cohort", "0"), ("--cohort", "'0'")),
        (("--workers", "-1"), ("--workers", "'-1'")),
        (("--round", "3"), ("--round", "--rounds", "bespoke compare --help")),
        (("another.csv",), ("another.csv", "bespoke compare --help")),
        (("--out", "plain.csv"), ("plain.csv", "is a file")),
        (("--out", "."), ("not empty", "choose another folder")),
        (("--out", "new", "--resume"), ("--resume", "no folder new")),
        (("--resume",), ("--out FOLDER", "runs/compare-plain")),
        (("--out", ".", "--resume"), ("nothing that `bespoke compare` began",)),
        (("--out", "n" * 300), ("File name too long",)),
    ],
)
def test_options(here: Path, options: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(compare("plain.csv", *options), *words)
    assert {path.name for path in here.iterdir()} == {"plain.csv"}  # nothing is left behind


def test_options_without_a_table() -> None:
    refused(bespoke("compare", "--client", "x", "--target", "y"), "--client, --target", "which table")
    refused(bespoke("compare", "--data", "chem"), "'chem'", "'chem97'")
    refused(bespoke("compare", "--data", "exam", "--time", "day"), "'time'")
    refused(bespoke("compare", "--data", "exam", "--time", "time"), "exam has no time column")
    refused(bespoke("compare", "plain.csv"), "plain.csv", "--client COLUMN", "--target COLUMN")
    refused(bespoke("campare"), "campare", "bespoke --help")
    refused(bespoke("export", "--client", "c1"), "RUN", "bespoke export --help")
    assert "Usage" in bespoke().out + bespoke().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.csv", None, ("no file missing.csv",)),
        ("folder", "folder", ("folder holds no pictures", "texts")),
        ("sheet.xlsx", b"PK", ("'.xlsx'", ".csv", ".parquet")),
        ("empty.csv", b"", ("empty.csv", "Empty")),
        ("empty.parquet", b"", ("empty.parquet", "0 bytes")),
        ("header.csv", b"client,x,y\n", ("header.csv", "3 columns and no rows")),
        ("zero.csv", bytes(5000), ("zero.csv", "no text")),
        ("image.parquet", b"\x89PNG\r\n" * 50, ("image.parquet", "not a readable Parquet file")),
        ("ragged.csv", b"client,x,y\na,1,2\na,1\nb,1,2\n", ("ragged.csv", "Row #3", "Expected 3 columns, got 2")),
        ("twice.csv", b"client,x,x,y\na,1,2,3\n", ("twice.csv", "several columns of one name: 'x'")),
        ("other.csv", b"1,2,3\n4,5,6\n", ("other.csv", "1, 2, 3", "has to name the columns")),
        ("comma.csv", b'"a,b",client,y\n1,2,3\n', ("'x'", "'a,b', client, y")),
        ("packed.csv.gz", b"not packed", ("packed.csv.gz", "gzip")),
    ],
)
def test_files_that_are_no_tables(here: Path, name: str, content: bytes | str | None, words: tuple[str, ...]) -> None:
    if isinstance(content, bytes):
        (here / name).write_bytes(content)
    elif content:
        (here / name).mkdir()
    message = refused(compare(name, *(("--features", "x") if name == "comma.csv" else ())), *words)
    assert message.isprintable()


def _with(column: str, values: object) -> pd.DataFrame:
    table = plain_table()
    table[column] = values
    return table


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (_with("y", 1.5), ("'y' is 1.5 in every row",)),
        (_with("y", "yes"), ("'y' is 'yes' in every row",)),
        (_with("y", np.nan), ("no usable row", "400 of 400", "target is missing")),
        (_with("client", None), ("no usable row", "client is missing")),
        (_with("client", "me"), ("one client only", "'me'")),
        (_with("client", range(400)), ("different in each of the 400 rows",)),
        (_with("y", [f"text {i}" for i in range(400)]), ("400 different values in 400 rows", "'text 0'")),
        (_with("y", pd.date_range("2020-01-01", periods=400)), ("'y' holds", "numbers, texts or booleans")),
        (_with("x1", np.nan)[["client", "x1", "y"]], ("no usable feature", "x1")),
        (_with("y", plain_table()["y"] * 1e25), ("finite score", "huge numbers")),
    ],
)
def test_tables_that_cannot_be_learnt_from(table: pd.DataFrame, words: tuple[str, ...]) -> None:
    write_csv(Path("t.csv"), table)
    outcome = bespoke("compare", "t.csv", "--client", "client", "--target", "y", "--methods", "fedavg", *QUICK[:4])
    refused(outcome, *words)


def test_names_that_differ_by_zero_characters_only() -> None:
    table = plain_table(2)
    table["client"] = table["client"].map({"c0": "a", "c1": "a\0"})
    table.to_parquet("t.parquet")
    refused(compare("t.parquet"), r"'a\x00'", "zero character")


def test_parquet_texts_that_are_none() -> None:
    """Bytes that are no UTF-8, as a damaged page holds them; Arrow reads them without a word."""
    table = pa.table({"client": ["a", "b"] * 30, "y": range(60), "word": ["\u00e4pfel"] * 60})
    parquet.write_table(table, "t.parquet", compression="none", use_dictionary=False)
    Path("t.parquet").write_bytes(Path("t.parquet").read_bytes().replace("\u00e4".encode(), b"\xec("))
    refused(compare("t.parquet"), "t.parquet", "not a readable Parquet file", "UTF8")


def _one_example_each(table: pd.DataFrame) -> None:
    table.loc[:19, "client"] = [f"single {i}" for i in range(20)]


def _holes(table: pd.DataFrame) -> None:
    for row, (column, value) in enumerate(
        [("x1", np.nan), ("x2", np.inf), ("y", np.nan), ("y", np.inf), ("y", -np.inf), ("client", None), ("x1", 1e30),
         ("x1", 1e308), ("y", 1e30)]
    ):  # fmt: skip
        table.loc[10 * row : 10 * row + 1, column] = value


def _classes_of_some(table: pd.DataFrame) -> None:
    table["y"] = np.where(table["x1"] > 0, "yes & <i>no</i>", "no")
    table.loc[table["client"] == "c1", "y"] = "only c1 [/] 日本\x1b[31m"


def _one_constant_client(table: pd.DataFrame) -> None:
    table.loc[table["client"] == "c3", "y"] = 1.0


@pytest.mark.parametrize(
    ("change", "notes"),
    [
        (_one_example_each, ["20 of 39 clients have one example"]),
        (_holes, ["the target is infinite", "the client is missing", "infinite values of x2"]),
        (_classes_of_some, ["classification into 3 classes"]),
        (_one_constant_client, ["1 of 20 clients have several examples, all with one and the same target"]),
    ],
)
def test_tables_that_are_odd_but_usable(change: Callable[[pd.DataFrame], None], notes: list[str]) -> None:
    table = plain_table()
    change(table)
    write_csv(Path("t.csv"), table)
    told = compare("t.csv", "--out", "out")
    assert told.code == 0, told.err
    json.loads(told.out)
    said = " ".join(json.loads(Path("out/compare.json").read_text())["data"]["notes"])
    for note in notes:
        assert note in said
    assert "<i>no</i>" not in Path("out/report.html").read_text(encoding="utf-8")


def test_many_rows_and_a_category_in_each() -> None:
    rows = 200_000
    values = np.random.default_rng(0).normal(size=(rows, 2)).astype(np.float32)
    texts = [f"text {i}" for i in range(rows)]
    table = pd.DataFrame({"client": np.arange(rows) // 100, "x": values[:, 0], "y": values[:, 1], "text": texts})
    table.to_parquet("big.parquet")
    refused(compare("big.parquet", target="text"), "200000 different values")
    refused(compare("big.parquet", client="text"), "different in each of the 200000 rows")
    refused(compare("big.parquet", "--features", "text"), "120000 different texts")
    population = library.read_table("big.parquet", "client", "y")
    assert population.about["features"] == ["x"]
    assert any("text has 200000 different texts" in note for note in population.about["notes"])


def test_too_few_clients_to_hold_some_out() -> None:
    write_csv(Path("few.csv"), plain_table(2))
    refused(compare("few.csv", "--protocol", "cross-device"), "of 2 clients", "held_out", "--protocol cross-silo")
    write_csv(Path("pairs.csv"), plain_table(10, 1).assign(client=["a", "a", *"bcdefghi"]))
    assert compare("pairs.csv").code == 0  # one client can train and be tested


# Experiment files

DATA = '[data]\ntable = "plain.csv"\nclient = "client"\ntarget = "y"\n'
STAGE = '[[stage]]\nmethod = "fedavg"\nrounds = 1\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("exp.toml", "no stage", "[[stage]]")),
        ("[data", ("exp.toml", "not valid TOML")),
        ("\xff\xfe", ("exp.toml", "cannot be read")),
        ("sede = 1\n" + DATA + STAGE, ("'sede'", "exp.toml", "'seed'")),
        ("seed = '1'\n" + DATA + STAGE, ("seed = '1'", "valid integer")),
        ("seed = true\n" + DATA + STAGE, ("seed = True", "valid integer")),
        ("metric = 'accuracy'\n" + DATA + STAGE, ("'accuracy'", "mse")),
        ("evaluate_every = -1\n" + DATA + STAGE, ("evaluate_every = -1", "0")),
        (DATA, ("no stage",)),
        (DATA + "[stage]\nmethod = 'fedavg'\n", ("[[stage]]", "double brackets")),
        ("stage = [3]\n" + DATA, ("stage.0 = 3", "table")),
        (DATA + "[[stage]]\nrounds = 1\n", ("stage 0", "no method", "fedavg")),
        (DATA + "[[stage]]\nmethod = ['fedavg']\n", ("stage 0", "fedavg")),
        (DATA + "[[stage]]\nmethod = 'fedavgg'\nrounds = 1\n", ("'fedavgg'", "stage 0", "'fedavg'")),
        (DATA + "[[stage]]\nmethod = 'fedavg'\n", ("fedavg needs rounds", "None")),
        (DATA + "[[stage]]\nmethod = 'fedavg'\nrounds = -1\n", ("fedavg needs rounds", "-1")),
        (DATA + "[[stage]]\nmethod = 'local'\nrounds = 1\n", ("local has no training rounds",)),
        (DATA + STAGE + "lrr = 1\n", ("'lrr'", "stage 0", "'lr'", "server")),
        (DATA + STAGE + "lr = 0\n", ("stage 0: lr = 0", "greater than 0")),
        (DATA + STAGE + "lr = inf\n", ("lr = inf", "finite")),
        (DATA + STAGE + "lr = 'x'\n", ("lr = 'x'", "number")),
        (DATA + STAGE + "epochs = 1.5\n", ("epochs = 1.5", "integer")),
        (DATA + STAGE + "batch_size = true\n", ("batch_size = True", "integer")),
        (DATA + STAGE + "weighting = 'example'\n", ("'example'", "'examples'")),
        (DATA + STAGE + "server = 'adm'\n", ("'adm'", "stage 0: server", "'adam'")),
        (DATA + STAGE + "server = 3\n", ("server = 3", "table")),
        (DATA + STAGE + "server = {name = 'adam', lrr = 1}\n", ("'lrr'", "stage 0: server", "'lr'")),
        (DATA + STAGE + "server = {lr = -1}\n", ("server: lr = -1", "greater than 0")),
        (DATA + STAGE + "[[stage]]\nmethod = 'finetune'\nlrs = [0.1, -1]\n", ("stage 1: lrs.1 = -1", "greater than 0")),
        (DATA + STAGE + "[[stage]]\nmethod = 'finetune'\nlrs = []\n", ("stage 1: lrs = []", "at least 1")),
        (DATA + STAGE + "[split]\nfractions = [0.5, 0.5]\n", ("split.fractions.2", "missing")),
        (DATA + STAGE + "[split]\nfractions = [0.5, 0.5, 0.5]\n", ("split.fractions", "sum to one")),
        (DATA + STAGE + "[split]\nfractions = [nan, 0.5, 0.5]\n", ("split.fractions.0 = nan", "finite")),
        (DATA + STAGE + "[split]\nfractions = [1, 0, 0]\n", ("split.fractions", "to be tested on")),
        (DATA + STAGE + "[split]\nprotocol = 'cross_silo'\n", ("'cross_silo'", "'cross-silo'")),
        (DATA + STAGE + "[split]\nheld_out = [0.5, 0.5]\n", ("split.held_out", "below one")),
        (DATA + STAGE + "[split]\nown_validation = 0.9\n", ("split.own_validation = 0.9", "split.adapt = 0.5")),
        (DATA + STAGE + "[split]\norder = 'time'\n", ("'time'", "plain has no time column")),
        (DATA + STAGE + "[split]\nprotocol = 'cross-device'\norder = 'motley'\n", ("'motley'", "cross-silo")),
        (DATA + STAGE + "[model]\nname = 'mlp'\nhidden = [-3]\n", ("hidden = [-3]", "whole numbers")),
        (DATA + STAGE + "[model]\nname = 'mlp'\nhiden = 3\n", ("'hiden'", "'mlp'", "'hidden'")),
        (DATA + STAGE + "[model]\nl2 = 'x'\n", ("l2 = 'x'", "number")),
        (DATA + STAGE + "[cohort]\nsize = 0\n", ("cohort.size = 0", "1")),
        (DATA + STAGE + "[cohort]\nsampling = 'unifrom'\n", ("'unifrom'", "'uniform'")),
        (DATA + STAGE + "[engine]\nkind = 'fast'\n", ("engine.kind 'fast'", "vectorized")),
        (DATA + STAGE + "[transform]\nclip = inf\n", ("transform.clip = inf", "finite")),
        (DATA + "options = {a = 1}\n" + STAGE, ("data.options", "'a'")),
        (DATA + "features = []\n" + STAGE, ("data.features", "empty")),
        (DATA + "source = 'exam'\n" + STAGE, ("one of source, table and population",)),
        ("[data]\nsource = 'exam'\nclient = 'x'\n" + STAGE, ("client", "'exam' is a source")),
        ("[data]\nsource = 'exams'\n" + STAGE, ("'exams'", "'exam'")),
        ("[data]\nsource = 'synthetic'\noptions = {client = 3}\n" + STAGE, ("'client'", "'synthetic'", "'clients'")),
        ("[data]\ntable = 'plain.csv'\n" + STAGE, ("needs client and target",)),
    ],
)
def test_experiment_files(text: str, words: tuple[str, ...]) -> None:
    Path("exp.toml").write_bytes(text.encode("latin-1"))
    refused(bespoke("run", "exp.toml", "--json"), *words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lr", ("'lr'", "key=value", "stage.0.lr=0.1")),
        ("lr=1", ("'lr'",)),
        ("stage.5.lr=1", ("stage.5.lr=1", "no stage '5'", "0 (fedavg)")),
        ("stage.local.lr=1", ("no stage 'local'", "0 (fedavg)")),
        ("stage.lr=1", ("name the stage and the knob",)),
        ("label.x=1", ("'label' is a value",)),
        ("cohort.size=abc", ("cohort.size = 'abc'", "integer")),
        ("stage.0.steps_per_round=9007199254740992", ("9007199254740992", "1000000")),  # work that never ends
        ("data.table=nope.csv", ("no file nope.csv",)),
    ],
)
def test_settings(setting: str, words: tuple[str, ...]) -> None:
    Path("exp.toml").write_text("label = 'a'\n" + DATA + STAGE)
    refused(bespoke("run", "exp.toml", "--set", setting), *words)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("compare = 3", ("[compare]", "3")),
        ("[compare]\npreset = 'motley-school'\nmethods = 5", ("methods = 5",)),
        ("[compare]\npreset = 'motley-school'\nmethods = ['hypcluster']\nentries = 5", ("entries = 5",)),
        ("[compare]\npreset = 5", ("preset = 5",)),
    ],
)
def test_a_comparison_that_is_no_table(table: str, words: tuple[str, ...]) -> None:
    Path("c.toml").write_text(f"{table}\n{DATA}" if table.startswith("compare") else f"{DATA}{table}\n")
    refused(bespoke("compare", "c.toml"), *words)


def test_experiment_files_that_are_none() -> None:
    refused(bespoke("run", "nope.toml"), "no experiment file nope.toml")
    refused(bespoke("run", "."), "cannot be read")
    refused(bespoke("run", "plain.csv"), "plain.csv", "not valid TOML")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("method = ['fedavg']", ("'method'", "'methods'")),
        ("methods = 'fedavg'", ("methods = 'fedavg'", "list")),
        ("methods = ['fedavgg']", ("'fedavgg'", "'fedavg'")),
        ("seeds = 0", ("seeds = 0", "one or more")),
        ("seeds = ['a']", ("seeds = ['a']",)),
        ("rounds = 0", ("rounds = 0", "one or more", "auto")),
        ("knobs = {fedavgg = {lr = 1}}", ("'fedavgg'", "knobs")),
        ("knobs = {fedavg = {lrr = 1}}", ("'lrr'", "'lr'")),
        ("grid = {fedavg = {lr = 1}}", ("grid.fedavg.lr = 1", "list")),
        ("grid = {fedavg = {lr = []}}", ("grid.fedavg.lr", "empty")),
    ],
)
def test_comparison_files(line: str, words: tuple[str, ...]) -> None:
    Path("c.toml").write_text(f"{DATA}[compare]\n{line}\n")
    refused(bespoke("compare", "c.toml"), *words)
    Path("c.toml").write_text(DATA)
    refused(bespoke("compare", "c.toml"), "c.toml", "[compare]")


# Folders


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table, an experiment file, a finished run and a finished comparison."""
    folder = tmp_path_factory.mktemp("finished")
    table = write_csv(folder / "plain.csv", plain_table())
    data = DATA.replace("plain.csv", str(table))
    (folder / "exp.toml").write_text(data + STAGE.replace("1", "3") + '[[stage]]\nmethod = "finetune"\nepochs = 2\n')
    assert bespoke("run", folder / "exp.toml", "--out", folder / "run").code == 0
    outcome = bespoke("compare", table, "--client", "client", "--target", "y", *QUICK, "--out", folder / "compare")
    assert outcome.code == 0
    return folder


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda content: None, "empty": lambda content: b"", "cut": _half, "garbled": lambda content: b"\xff\0[1",
    "another": lambda content: b"[1]\n",
}  # fmt: skip


def _damage(path: Path, how: str) -> None:
    content = DAMAGES[how](path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize(
    "name", ["config.toml", "result.json", "clients.parquet", "choices.json", "rounds.jsonl", "ledger.jsonl"]
)
def test_damaged_run_folders(finished: Path, name: str, how: str) -> None:
    shutil.copytree(finished / "run", "run")
    _damage(Path("run", name), how)
    outcomes = [
        bespoke("report", "run", "-o", "report.html"),
        bespoke("export", "run", "--client", "c3"),
        bespoke("forget", "run", "--client", "c3"),
    ]
    refusals = [outcome for outcome in outcomes if outcome.code]
    if how != "empty" or name not in ("rounds.jsonl", "ledger.jsonl"):
        assert refusals
    for outcome in refusals:
        refused(outcome, name if how != "gone" else "unfinished" if name == "result.json" else name, "run")


def test_a_damaged_result_can_be_made_again(finished: Path) -> None:
    shutil.copytree(finished / "run", "run")
    again = ("run", finished / "exp.toml", "--out", "run", "--resume")
    Path("run/result.json").write_text("{")
    refused(bespoke(*again), "run/result.json", "damaged", "remove it and resume")
    Path("run/result.json").unlink()
    Path("run/engine.json").write_text("{")  # the checkpoint holds a copy
    Path("run/clients.parquet").unlink()
    assert bespoke(*again).code == 0
    for name in ("result.json", "clients.parquet", "engine.json"):
        assert Path("run", name).read_bytes() == (finished / "run" / name).read_bytes()


def test_damaged_checkpoints(finished: Path) -> None:
    again = ("run", finished / "exp.toml", "--out", "run", "--resume")
    for how in ("empty", "cut", "garbled", "version", "bits"):
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree(finished / "run", "run")
        Path("run/result.json").unlink()
        checkpoints = sorted(Path("run/checkpoints").iterdir())
        for count, path in enumerate(reversed(checkpoints), start=1):
            content = path.read_bytes()
            if how == "version":
                path.write_bytes(content.replace(b'\\"format\\": 2', b'\\"format\\": 7'))
            elif how == "bits":
                path.write_bytes(content[:-4] + b"bits")
            else:
                _damage(path, how)
            if count == 1 and how != "version":  # the one before serves
                shutil.copytree("run", "spare")
                assert bespoke(*again[:3], "spare", "--resume").code == 0
                assert Path("spare/result.json").read_bytes() == (finished / "run/result.json").read_bytes()
                shutil.rmtree("spare")
        if how == "version":  # not damaged, so not passed over
            refused(bespoke(*again), "another version (format 7, known: 2)")
        else:
            refused(bespoke(*again), "no checkpoint of run can be used", "damaged", "remove the folder")


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_comparisons(finished: Path, how: str) -> None:
    table = finished / "plain.csv"
    again = ("compare", table, "--client", "client", "--target", "y", *QUICK, "--out", "compare", "--resume")
    shutil.copytree(finished / "compare", "compare")
    _damage(Path("compare/compare.json"), how)
    refused(bespoke("report", "compare"), "compare.json" if how != "gone" else "unfinished comparison")
    assert bespoke(*again).code == 0  # it is made anew from the runs
    assert Path("compare/summary.json").read_bytes() == (finished / "compare/summary.json").read_bytes()
    run = Path("compare/runs/finetune-seed0")
    _damage(run / "config.toml", "garbled")
    refused(bespoke(*again), str(run), "a different experiment")
    shutil.rmtree(run)
    refused(bespoke("report", "compare"), "1 of 4 runs", "finetune-seed0", "--out compare --resume")
    assert bespoke(*again).code == 0


def test_folders_of_another_version_or_kind(finished: Path) -> None:
    shutil.copytree(finished / "run", "run")
    path = Path("run/result.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 9'))
    for command in (("report", "run"), ("export", "run", "--client", "c1"), ("forget", "run", "--client", "c1")):
        refused(bespoke(*command), "run/result.json", "format 9", "1")
    refused(bespoke("run", finished / "exp.toml", "--out", "run", "--resume"), "format 9")
    refused(bespoke("export", finished / "compare", "--client", "c1"), "is a comparison", "runs/fedavg-seed0")
    for command in ("export", "forget"):  # type: ignore[assignment]
        refused(bespoke(command, "nowhere", "--client", "c1"), "nowhere", "not a run folder")
        refused(bespoke(command, "plain.csv", "--client", "c1"), "plain.csv", "not a run folder")
        refused(bespoke(command, finished / "run", "--client", "nobody"), "'nobody'", "'c0'")
        refused(bespoke(command, finished / "run", "--client", ""), "no client ''")
    refused(bespoke("report", "nowhere"), "no run folder nowhere")
    refused(bespoke("report", "."), "neither a run folder", "nor a comparison folder")
    refused(bespoke("report", finished / "run", finished / "run"), "both")


def test_resume_with_other_options(finished: Path) -> None:
    table = finished / "plain.csv"
    shutil.copytree(finished / "compare", "compare")
    asked = ("compare", table, "--client", "client", "--target", "y", *QUICK, "--out", "compare", "--resume")
    refused(bespoke(*asked, "--rounds", 2), "compare/runs/fedavg-seed0", "a different experiment", "--out")
    refused(bespoke(*asked, "--metric", "mae"), "a different experiment")
    refused(bespoke("run", finished / "exp.toml", "--out", "compare", "--resume"), "nothing that `bespoke run` began")
    more = bespoke(*asked, "--seeds", 2)  # more of the same is no other experiment
    assert more.code == 0
    assert json.loads(more.out)["seeds"] == [0, 1]


# The operating system


@pytest.mark.parametrize("writes", [0, 1, 2, 5, 8, 11])
def test_a_full_disk_loses_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """After so many writes there is no space left; once there is, the run goes on to the same bytes."""
    settle, append, count = arrays.settle, RunFolder.append, 0

    def full(path: Path | None) -> None:
        nonlocal count
        count += 1
        if count > writes:
            raise OSError(errno.ENOSPC, "No space left on device", path and str(path))

    def full_settle(temporary: Path, path: Path) -> None:
        full(path)
        settle(temporary, path)

    def full_append(self: RunFolder, log: str, entry: dict[str, object]) -> None:
        full(None)
        append(self, log, entry)

    with monkeypatch.context() as patch:
        patch.setattr("bespoke.storage.settle", full_settle)
        patch.setattr("bespoke.runs.folder.settle", full_settle)
        patch.setattr(RunFolder, "append", full_append)
        told = bespoke("run", finished / "exp.toml", "--out", "run", "--json")
    assert told.code == 1
    assert told.out == ""
    assert "bespoke: the disk is full (run" in told.err
    assert f"go on with: bespoke run {finished / 'exp.toml'} --out run --json --resume" in told.err
    assert "Traceback" not in told.err
    assert not list(Path("run").rglob(".*.partial"))
    assert bespoke("run", finished / "exp.toml", "--out", "run", "--resume").code == 0
    for name in ("result.json", "ledger.jsonl", "rounds.jsonl", "clients.parquet"):
        assert Path("run", name).read_bytes() == (finished / "run" / name).read_bytes(), name


def test_safetensors_says_that_the_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(arrays, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        arrays.write_arrays(Path("a.safetensors"), {})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "a.safetensors")


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.EACCES, 2, "choose another"),
        (errno.EROFS, 2, "choose another"),
        (errno.EIO, 1, "Input/output error"),
        (errno.EDQUOT, 1, "the disk is full"),
    ],
)
def test_what_the_operating_system_refuses(
    finished: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, words: str
) -> None:
    mkdir = Path.mkdir

    def refuse(self: Path, *arguments: object, **options: object) -> None:
        if "forbidden" in self.parts:
            raise OSError(number, __import__("os").strerror(number), str(self))
        mkdir(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    told = bespoke("run", finished / "exp.toml", "--out", "forbidden")
    assert told.code == code
    assert "forbidden" in told.err
    assert words in told.err
    assert "Traceback" not in told.err


def test_files_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(arguments[0]))

    Path("exp.toml").write_text(DATA + STAGE)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        refused(bespoke("run", "exp.toml"), "exp.toml", "Permission denied")
    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        outcome = compare("plain.csv")
    refused(outcome, "plain.csv", "Permission denied")


def test_out_of_memory_is_said(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("bespoke.runs.training.Run.run", refuse)
    told = bespoke("run", finished / "exp.toml", "--out", "run")
    assert told.code == 1
    assert "not enough memory" in told.err
    assert "--resume" in told.err
