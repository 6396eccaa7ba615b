"""Code by name: found, refused in words, and imported only where the user allowed it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bespoke import imported as names
from bespoke.errors import UserError
from bespoke.imported import handed_over, importable, imported, is_outside, trust, trust_named


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to be in, whose modules leave a mark when they are imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(names, "_held", {})
    monkeypatch.setenv(names.TRUST, "")
    mark = "import pathlib\npathlib.Path('imported').touch()\n"
    (tmp_path / "door_mine.py").write_text(f"{mark}def load(): return 3\n")
    (tmp_path / "door_broken.py").write_text("x = 1\nraise RuntimeError('no luck')\n")
    (tmp_path / "door_needy.py").write_text("import door_not_there\n")
    yield tmp_path
    for name in ("door_mine", "door_broken", "door_needy"):
        sys.modules.pop(name, None)


def test_what_is_a_name() -> None:
    given = ("a:b", "a.b:c", "fedavg", "a:b.c", "a b:c", "C:/x", "a:", ":b", "1a:b")
    assert [name for name in given if is_outside(name)] == ["a:b", "a.b:c"]


def test_nothing_is_imported_that_nobody_allowed(outside: Path) -> None:
    with pytest.raises(UserError, match=r"runs/a/config.toml names code .*--trust door_mine:load"):
        imported("door_mine:load", "runs/a/config.toml")
    assert not (outside / "imported").exists()
    with pytest.raises(UserError, match="--trust"):  # a module that is there already is no exception
        imported("os:system", "runs/a/config.toml")
    trust("door_mine:other")  # one name allows no other
    with pytest.raises(UserError, match="--trust"):
        imported("door_mine:load", "runs/a/config.toml")
    assert not (outside / "imported").exists()
    trust_named({"stage": [{"method": "fedavg"}], "data": {"source": "door_mine:load"}})
    assert imported("door_mine:load", "exp.toml")() == 3
    assert (outside / "imported").exists()
    assert sys.path[-1] == str(outside)  # last: a file in this folder hides no package


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("door_broken:x", r"RuntimeError: no luck \(.*door_broken.py, line 2\)"),
        ("door_needy:x", "ModuleNotFoundError: No module named 'door_not_there'"),
        ("door_nowhere:x", "no module 'door_nowhere'"),
        ("door_mine.part:x", "fails when|no module 'door_mine.part'"),
        ("door_mine:lod", "'lod'.*Did you mean 'load'"),
    ],
)
def test_what_cannot_be_imported_is_said(outside: Path, named: str, said: str) -> None:
    trust(named)
    with pytest.raises(UserError, match=said) as refused:
        imported(named, "exp.toml")
    assert "exp.toml" in str(refused.value)


def test_objects_that_the_program_hands_over(outside: Path) -> None:
    name = handed_over(Path)
    assert imported(name, "here") is Path
    assert importable(name)

    def local() -> None: ...

    name = handed_over(local)
    assert imported(name, "here") is local
    assert not importable(name)
    names._held.clear()  # as in another process
    with pytest.raises(UserError, match=r"script, a notebook or a function.*'mine:local'"):
        imported(name, "here")
    with pytest.raises(UserError, match="script, a notebook"):
        imported("__main__:FedPer", "here")


def test_trust_takes_names_alone() -> None:
    with pytest.raises(UserError, match="'mypkg' is not of the form"):
        trust("mypkg")
