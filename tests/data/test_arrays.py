"""Rows that a program holds: whatever their form, the same population; and from there through `compare`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch

import bespoke
from bespoke.data.about import plane
from bespoke.data.population import Population
from bespoke.errors import UserError
from command import bespoke as command
from command import refused

X = {"anna": [[1.0, 2.0], [3.0, 4.0]], "bob": [[5.0, 6.0]]}
Y = {"anna": [0.5, 1.5], "bob": [2.5]}
FRAME = pd.DataFrame({"who": ["bob", "anna", "anna"], "a": [5.0, 1, 3], "b": [6.0, 2, 4], "y": [2.5, 0.5, 1.5]})


class Items(torch.utils.data.Dataset[Any]):
    """A map-style dataset with the rows of both, in the order of FRAME."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, row: int) -> tuple[torch.Tensor, float]:
        return torch.tensor([FRAME["a"][row], FRAME["b"][row]]), float(FRAME["y"][row])


class Named(Items):
    """The same with values by name, as many datasets of pictures have them."""

    def __getitem__(self, row: int) -> Any:
        inputs, target = super().__getitem__(row)
        return {"image": inputs, "id": row, "label": target}


class HuggingFace:
    """What is used of a Hugging Face dataset: the names of columns, and a column by its name."""

    def __init__(self) -> None:
        self.column_names = ["who", "x", "y"]
        self.held = {"who": list(FRAME["who"]), "x": FRAME[["a", "b"]].to_numpy().tolist(), "y": list(FRAME["y"])}

    def __getitem__(self, name: str) -> Any:
        return self.held[name]


FORMS: dict[str, Any] = {
    "arrays": lambda: bespoke.population({who: (np.array(X[who]), np.array(Y[who])) for who in X}),
    "tensors": lambda: bespoke.population({who: (torch.tensor(X[who]), torch.tensor(Y[who])) for who in X}),
    "dicts": lambda: bespoke.population({who: {"x": X[who], "y": Y[who]} for who in X}),
    "frame": lambda: bespoke.population(FRAME, client="who", x=["a", "b"], y="y"),
    "frame, other columns": lambda: bespoke.population(FRAME, client="who", y="y"),
    "arrow": lambda: bespoke.population(pyarrow.Table.from_pandas(FRAME), client="who", x=["a", "b"], y="y"),
    "hugging face": lambda: bespoke.population(HuggingFace(), client="who", x="x", y="y"),
    "dataset": lambda: bespoke.population(Items(), client=list(FRAME["who"])),
    "rows by name": lambda: bespoke.population(Named(), client=list(FRAME["who"]), x="image", y="label"),
    "columns by name": lambda: bespoke.population({w: {"a": X[w], "b": Y[w]} for w in X}, x="a", y="b"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_population(form: str) -> None:
    found = FORMS[form]()
    assert list(found.ids) == ["anna", "bob"]
    assert found.offsets.tolist() == [0, 2, 3]
    assert found.columns["x"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert found.columns["y"].tolist() == [0.5, 1.5, 2.5]
    assert (found.columns["x"].dtype, found.about["task"]) == (torch.float32, "regression")


def test_partitions_are_clients() -> None:
    parts = [FRAME[FRAME["who"] == who][["a", "b", "y"]] for who in ("anna", "bob")]
    found = bespoke.population(parts, y="y")
    assert list(found.ids) == ["0", "1"]
    assert found.columns["x"].tolist() == [[1, 2], [3, 4], [5, 6]]


class Partition:
    """A partition of flwr-datasets: a Hugging Face dataset, which knows the names of classes."""

    features: ClassVar[dict[str, Any]] = {"image": None, "label": SimpleNamespace(names=["cat", "dog", "owl"])}

    def __init__(self, labels: list[int]) -> None:
        self.column_names = ["image", "label"]
        self.held = {"image": [np.full((2, 3), label, np.uint8) for label in labels], "label": labels}

    def __getitem__(self, name: str) -> Any:
        return self.held[name]


class Ragged:
    """A data set whose rows are of unequal lengths."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, row: int) -> Any:
        return np.zeros(row + 1), 0.5


ROWS = [{"image": np.full((2, 3), label, np.uint8), "label": label} for label in (2, 0)]


@pytest.mark.parametrize(("rows", "said"), [(Partition([2, 0]), {}), (ROWS, {"task": "classification"})])
def test_partitions_with_named_columns(rows: Any, said: Any) -> None:
    """Data sets of columns, or lists of rows by name; what names its classes is a classification, and calls them so."""
    found = bespoke.population([rows, rows], x="image", y="label", **said)
    assert list(found.ids) == ["0", "1"]
    assert found.columns["x"].tolist() == [[2] * 6, [0] * 6] * 2
    assert found.about["classes"] == (["cat", "owl"] if isinstance(rows, Partition) else ["0", "2"])
    assert (found.about["height"], found.about["width"]) == (2, 3)
    assert "learned from clients" in found.about["learned"]  # a release, under [privacy]


def test_classes_and_groups() -> None:
    rows = {"anna": (X["anna"], ["yes", "no"]), "bob": (X["bob"], ["yes"])}
    found = bespoke.population(rows, group={"anna": "north", "bob": "south"})
    assert found.about["classes"] == ["no", "yes"]
    assert found.columns["y"].tolist() == [1, 0, 1]
    assert [found.group_of(client) for client in (0, 1)] == ["north", "south"]
    numbered = bespoke.population({3: rows["anna"], 4: rows["bob"]}, group={3: "north", 4: "south"})
    assert [numbered.group_of(client) for client in (0, 1)] == ["north", "south"]


def test_targets_that_are_objects() -> None:
    """A column of a data frame that once held something else is of objects, and still of numbers."""
    found = bespoke.population({"a": ([[1.0], [2.0]], np.array([1.5, 2], dtype=object))})
    assert found.about["task"] == "regression"
    assert found.columns["y"].tolist() == [1.5, 2.0]
    tensors = bespoke.population({"a": ([[1.0], [2.0]], [torch.tensor(3), torch.tensor(1)])}, task="classification")
    assert tensors.about["classes"] == ["1", "3"]


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3), (3, 4, 4), (4, 6), (4, 6, 3), (1, 6, 4)])
def test_images_lie_channels_first(shape: tuple[int, ...]) -> None:
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(1, *shape)
    found = bespoke.population({"anna": (pixels, [1])}, task="classification")
    channels = pixels[:, None] if len(shape) == 2 else pixels if shape[0] in (1, 3) else np.moveaxis(pixels, -1, 1)
    assert found.columns["x"].tolist() == channels.reshape(1, -1).tolist()
    assert (found.about["input"], found.about["channels"]) == ("image", channels.shape[1])
    assert plane(found.about) == channels.shape[2:]
    assert ("side" in found.about) == (channels.shape[2] == channels.shape[3])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bespoke.population({"a": ([[1.0], [2.0]], [1.5])}), ("'a'", "(2, 1)", "(1,)")),
        (lambda: bespoke.population({"a": ([[1.0]], [1.5]), "b": ([[1.0, 2]], [1.5])}), ("'b'", "(2,)", "(1,)")),
        (lambda: bespoke.population({"a": ([[float("nan")]], [1.5])}), ("'a'", "row 0", "x")),
        (lambda: bespoke.population({"a": ([[1.0]], [1])}), ("task=",)),
        (lambda: bespoke.population({"a": ([["red"]], [1.5])}), ("'a'", "numbers")),
        (lambda: bespoke.population({}), ("no client",)),
        (lambda: bespoke.population(FRAME, client="whom", y="y"), ("'whom'", "who")),
        (lambda: bespoke.population(FRAME.assign(c="red"), client="who", y="y"), ("'c'", "red")),
        (lambda: bespoke.population(Items(), client=["a"]), ("3",)),
        (lambda: bespoke.population(Named(), client=["a", "a", "b"]), ("no 'x'", "image, id, label", "x=")),
        (lambda: bespoke.population({"train": FRAME}, client="who", y="y"), ("client='who'", "'train'")),
        (lambda: bespoke.population(7), ("int",)),
        (
            lambda: bespoke.population({"a": ([[1.0]], [1.5]), "b": ({"v": [[1.0]]}, [1.5])}),
            ("'b'", "'v'", "one array"),
        ),
        (lambda: bespoke.population({"a": ({"y": [[1.0]]}, [1.5])}), ("['y']", "none of")),
        (lambda: bespoke.population({"a": ([[1.0]], [1.5])}, group={"b": "x"}), ("'a'",)),
        (lambda: bespoke.population({"a": (np.zeros((1, 2, 4, 5)), [1])}, task="classification"), ("(2, 4, 5)",)),
        # what NumPy would make something else of without a word
        (lambda: bespoke.population({"a": ([[1.0], [2.0]], ["yes", float("nan")])}), ("'a'", "row 1", "nan")),
        (lambda: bespoke.population({"a": ([[1.0], [2.0]], ["yes", None])}), ("'a'", "row 1", "None")),
        (lambda: bespoke.population({"a": ([[1.0], [2.0]], ["yes", 1])}), ("'a'", "texts")),
        (lambda: bespoke.population({"a": ([[1.0]], ["yes"]), "b": ([[1.0]], [1])}), ("'b'", "'a'", "texts")),
        (lambda: bespoke.population({1: ([[1.0]], [1.5]), "1": ([[1.0]], [1.5])}), ("'1'", "two clients")),
        (lambda: bespoke.population(FRAME.assign(who=["a", None, "b"]), client="who", y="y"), ("row 1", "'who'")),
        (lambda: bespoke.population(Items(), client=["a", float("nan"), "b"]), ("row 1", "no client")),
        (lambda: bespoke.population({"a": ([[1.0], [2.0, 3.0]], [1.5, 2.5])}), ("same shape", "1 and of 2")),
        (lambda: bespoke.population(Ragged(), client=["a", "a"]), ("same shape", "(1,)", "(2,)", "row 1")),
        (lambda: bespoke.population({"a": ([[1.0]], [1])}, task="clasification"), ("clasification", "Did you mean")),  # type: ignore[arg-type]
        (lambda: bespoke.population(FRAME, client="who", x=["a", "y"], y="y"), ("'y'", "from itself")),
        (lambda: bespoke.population(FRAME.rename(columns={"b": "a"}), client="who", y="y"), ("two columns", "'a'")),
        (lambda: bespoke.population({"a": (3, 4)}), ("'a'", "y of shape ()")),
        (lambda: bespoke.population({"a": ([[1.0]], [1.5], 3)}), ("'a'", "a tuple of 3")),
        (lambda: bespoke.population({"a": np.zeros((3, 2))}), ("'a'", "one array of shape (3, 2)")),
        (lambda: bespoke.population({"a": ([[1e300]], [1.5])}), ("'a'", "3e+38")),
        (lambda: bespoke.population({"a": (np.zeros((0, 1)), np.zeros(0))}, task="regression"), ("'a'", "no rows")),
        (lambda: bespoke.population({"a": (np.zeros((3, 1)), np.zeros(2))}, task="regression"), ("(3, 1)", "(2,)")),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        call()
    for word in words:
        assert word in str(refusal.value)


def drawn(clients: int = 12, rows: int = 30) -> dict[str, tuple[Any, Any]]:
    """Regressions in which each client has a slope of its own: personal models help."""
    draw = np.random.default_rng(0)
    found = {}
    for client in range(clients):
        x = draw.standard_normal((rows, 2))
        found[f"client {client:02d}"] = (x, x @ draw.standard_normal(2) + 0.1 * draw.standard_normal(rows))
    return found


def test_a_stream_is_what_memory_holds(tmp_path: Path) -> None:
    """Written a client at a time, it is the population of all of them at once."""
    rows = drawn(5)
    with bespoke.write_population(tmp_path / "big", task="regression") as out:
        for who, (x, y) in rows.items():
            out.add(who, x=x, y=y)
    there, here = Population.open(tmp_path / "big"), bespoke.population(rows)
    assert list(there.ids) == list(here.ids)
    assert all(torch.equal(there.columns[name], column) for name, column in here.columns.items())
    assert there.about == here.about
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big"]


def test_a_stream_of_several_inputs(tmp_path: Path) -> None:
    """Tokens with their mask, a client at a time: the population of all of them at once, however large it is."""
    draw = np.random.default_rng(0)
    rows = {
        name: ({"input_ids": draw.integers(0, 9, (n, 4)), "attention_mask": draw.random((n, 4))}, np.arange(n) % 2)
        for name, n in (("anna", 3), ("bob", 5))
    }
    with bespoke.write_population(tmp_path / "big", task="classification") as out:
        for name, (x, y) in rows.items():
            out.add(name, x=x, y=y)
        with pytest.raises(UserError, match=r"'carl' has the inputs 'input_ids', client 'anna'"):
            out.add("carl", x={"input_ids": np.ones((1, 4))}, y=[0])
        with pytest.raises(
            UserError, match=r"'dora' has the inputs one array, client 'anna' 'input_ids', 'attention_mask'"
        ):
            out.add("dora", x=np.ones((1, 4)), y=[0])
    there, here = Population.open(tmp_path / "big"), bespoke.population(rows, task="classification")
    assert there.columns.keys() == {"x", "attention_mask", "y"}
    assert all(torch.equal(there.columns[name], column) for name, column in here.columns.items())
    assert there.about == here.about
    assert repr(there) == "Population('own data': classification of 2 classes, 2 clients, 8 rows)"


def test_a_stream_of_images_that_are_not_square(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = {name: (draw.integers(0, 256, (3, 8, 6, 3), np.uint8), np.array([0, 2, 1])) for name in ("anna", "bob")}
    with bespoke.write_population(tmp_path / "big", task="classification") as out:
        for name, (x, y) in rows.items():
            out.add(name, x=x, y=y)
    found = Population.open(tmp_path / "big")
    assert found.about == bespoke.population(rows, task="classification").about
    assert (found.about["height"], found.about["width"], found.about["channels"]) == (8, 6, 3)
    assert found.columns["x"][4].tolist() == np.moveaxis(rows["bob"][0][1], -1, 0).ravel().tolist()


def test_a_class_that_is_a_number_of_something_else(tmp_path: Path) -> None:
    """Classes from 0 to a billion would fill the memory with names."""
    with pytest.raises(UserError, match=r"'a' has the class 1000000000.*number them anew"):  # noqa: SIM117
        with bespoke.write_population(tmp_path / "big", task="classification") as out:
            out.add("a", x=np.zeros((2, 1)), y=np.array([0, 10**9]))


def test_a_stream_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def twice() -> None:
        with bespoke.write_population(tmp_path / "a", task="regression") as out:
            out.add("anna", x=[[1.0]], y=[1.0])
            out.add("anna", x=[[1.0]], y=[1.0])

    with pytest.raises(UserError, match="added before"):
        twice()
    with pytest.raises(UserError, match="no client"), bespoke.write_population(tmp_path / "b", task="regression"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_compare_from_python_file_and_command(tmp_path: Path) -> None:
    """The same numbers whichever way the population comes; a second call with other rows is refused."""
    asked: dict[str, Any] = {"methods": ["shared", "local"], "seeds": 1, "tune": False}
    summary = bespoke.compare(bespoke.population(drawn()), out=tmp_path / "memory", **asked)
    means = {method.label: method.mean.value for method in summary.methods}
    assert means["local"] < 0.2 * means["shared"]
    with bespoke.write_population(tmp_path / "big", task="regression") as out:
        for who, (x, y) in drawn().items():
            out.add(who, x=x, y=y)
    again = bespoke.compare(tmp_path / "big", out=tmp_path / "folder", jobs=2, **asked)
    assert {method.label: method.mean.value for method in again.methods} == means
    file = tmp_path / "compare.toml"
    data = f"[data]\npopulation = {json.dumps(str(tmp_path / 'big'))}\n"
    file.write_text(data + '[compare]\nmethods = ["shared", "local"]\nseeds = 1\ntune = false\n')
    assert command("compare", file, "--out", tmp_path / "file").code == 0
    with pytest.raises(UserError, match="other rows"):
        bespoke.compare(bespoke.population(drawn(11)), out=tmp_path / "memory", **asked)
    with pytest.raises(UserError, match="describes a table"):
        bespoke.compare(bespoke.population(drawn()), client="who", out=tmp_path / "x", **asked)


def test_one_of_source_table_and_population(tmp_path: Path) -> None:
    stage = '[[stage]]\nmethod = "fedavg"\nrounds = 1\n'
    for data, words in (
        ('population = "a"\nsource = "chem97"', ("source", "table", "population")),
        ('population = "a"\nclient = "who"', ("client", "population")),
        ('population = "nowhere"', ("nowhere", "population.json")),
    ):
        (tmp_path / "run.toml").write_text(f"[data]\n{data}\n{stage}")
        refused(command("run", tmp_path / "run.toml", "--out", tmp_path / "out"), *words)


def test_a_target_that_never_changes_is_told(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for kind, y in (("regression", np.full(12, 2.5)), ("classification", np.zeros(12, int))):
        people = bespoke.population({who: (draw.standard_normal((12, 2)), y) for who in "abc"}, task=kind)  # type: ignore[arg-type]
        asked: dict[str, Any] = {"methods": ["fedavg", "finetune"], "seeds": 1, "rounds": 2, "tune": False}
        result = bespoke.compare(people, out=tmp_path / kind, **asked)
        assert any("same target" in concern.text for concern in result.concerns)


def test_the_four_doors_of_the_readme_run(tmp_path: Path) -> None:
    """As they stand there, in fewer rounds, with rows for what a reader has."""
    page = (Path(bespoke.__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (code,) = (part.split("```", 1)[0] for part in page.split("```python\n")[1:] if "class FedPer" in part)
    assert len(code.splitlines()) <= 32
    rows = """
import functools, numpy, bespoke
draw = numpy.random.default_rng(0)
x, x2, y, y2 = (*(draw.standard_normal((30, 3)) for _ in range(2)), *(numpy.arange(30) % 2 for _ in range(2)))
bespoke.compare = functools.partial(bespoke.compare, seeds=1, rounds=2, tune=False)
"""
    done = subprocess.run([sys.executable, "-c", rows + code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(bespoke.Result.read(tmp_path / "runs/mine").clients["method"]) == {"fedavg", "fedper"}


def test_the_page_of_doors_runs(tmp_path: Path) -> None:
    """The Python of docs/doors.md, as it stands there; its method is in a file of its own."""
    page = (Path(bespoke.__file__).parents[2] / "docs" / "doors.md").read_text(encoding="utf-8")
    blocks = [part.split("```", 1)[0] for part in page.split("```python\n")[1:]]
    (method,) = (block for block in blocks if "class FedPer" in block)
    (tmp_path / "fedper.py").write_text(method, encoding="utf-8")
    code = "\n".join(block for block in blocks if block != method)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
