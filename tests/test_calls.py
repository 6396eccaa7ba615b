"""A call from Python that means nothing does not succeed: it says what was meant, perhaps, and what is accepted."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import bespoke
from bespoke import api

STAGE = {"stage": [{"method": "fedavg", "rounds": 1}]}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda out: bespoke.compare(data="digits", roudns=1, out=out), ("'roudns'", "Did you mean 'rounds'?")),
        (lambda out: bespoke.compare(data="digits", learning_rate=9, out=out), ("'learning_rate'", "Known: call")),
        (lambda out: bespoke.compare(data="digits", model=object(), out=out), ("object", "bespoke.model(...)")),
        (lambda out: bespoke.compare(data="digits"), ("missing", "'out'")),
        (lambda out: bespoke.compare(data="digits", seeds="3", out=out), ("seeds='3'", "int", "str was found")),
        (lambda out: bespoke.compare(data="digits", seeds=0, out=out), ("seeds=0", "greater than or equal to 1")),
        (lambda out: bespoke.compare(data="digits", seeds=True, out=out), ("seeds=True", "bool was found")),
        (lambda out: bespoke.compare(data="digits", methods="local", out=out), ("methods='local'", "str was found")),
        (lambda out: bespoke.compare(data="digits", rounds="some", out=out), ("rounds='some'", "auto")),
        (lambda out: bespoke.compare(data="digits", client="a", out=out), ("client=", "describes a table")),
        (lambda out: bespoke.compare("t.csv", data="digits", out=out), ("one of the two",)),
        (lambda out: bespoke.compare(settings={"data": {"source": "digits"}}, out=out), ("beside it",)),
        (lambda out: bespoke.compare(settings={"data": "digits"}, out=out), ("a table",)),
        (lambda out: bespoke.compare(object(), out=out), ("table=<object", "Path", "object was found")),
        (lambda out: bespoke.compare({"a": ([[1.0]], [1.5])}, out=out), ("dict was found", "bespoke.population(...)")),
        (
            lambda out: bespoke.compare(pd.DataFrame({"c": ["a"] * 99}), out=out),
            ("DataFrame", "bespoke.population(...)"),
        ),
        (lambda out: bespoke.run(STAGE, out, rouds=3), ("'rouds'", "run()")),
        (lambda out: bespoke.run(3, out), ("experiment=3", "int was found")),
        (lambda out: bespoke.run(STAGE), ("missing", "'out'")),
        (lambda out: bespoke.tune(STAGE, out, spaec={}), ("spaec", "'space'")),
        (lambda out: bespoke.tune(STAGE, out, jobs=1.5), ("jobs=1.5", "float was found")),
        (lambda out: bespoke.tune(STAGE, out, trials="many"), ("trials", "'many'")),
    ],
)
def test_a_call_that_means_nothing_is_refused(call: Any, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(bespoke.UserError) as refused:
        call(tmp_path / "out")
    for word in words:
        assert word in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_every_function_of_the_library_is_checked() -> None:
    functions = {n: f for n, f in vars(api).items() if inspect.isfunction(f) and f.__module__ == api.__name__}
    found = [function for name, function in functions.items() if not name.startswith("_")]
    assert {"compare", "run", "tune"} <= {f.__name__ for f in found}
    for function in found:
        with pytest.raises(bespoke.UserError):
            function(no_such_argument=1)
