"""Files of a run that were damaged: the same results, or refused with the file's name. A slice of `make attack`."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bespoke.errors import UserError
from bespoke.runs.events import Interrupted
from bespoke.runs.folder import CHECKPOINT, RunFolder
from bespoke.runs.training import Run
from bespoke.storage import open_arrays, write_arrays
from command import bespoke, refused
from kills import assert_identical, contents
from resume_driver import choice, experiment

CONFIG = 'label = "damaged"\n'
Damage = Callable[[Path], None]


class Notes:
    """Keeps what a run says of itself."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def begin(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, steps: int = 1, note: str = "") -> None: ...
    def note(self, text: str) -> None:
        self.said.append(text)


def run(path: Path, rounds: int = 99, cache: Path | None = None, plan: str = "ditto") -> list[str]:
    """Run or resume; stop after so many rounds. Returns what was said."""
    folder, notes, asked = RunFolder.create(path, CONFIG), Notes(), iter(range(1, 99))
    with folder.locked():
        Run(
            experiment(plan), folder, notes, cache, how=choice(0), checkpoint_seconds=0,
            stop=lambda: next(asked) == rounds,
        ).run()  # fmt: skip
    return notes.said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped in round 4 of its second stage, and one that was not."""
    made = tmp_path_factory.mktemp("runs")
    run(made / "whole")
    with pytest.raises(Interrupted):
        run(made / "stopped", 8)
    kept = [path.stem for path in sorted((made / "stopped" / "checkpoints").iterdir())]
    assert kept == ["001--000001", "001-0000003", "001-0000004"]
    return made


def flip(path: Path, place: float = 0.97) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(bytes(content))


def short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 4])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def described(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the metadata of a checkpoint, as an editor of safetensors would."""
    arrays, metadata = open_arrays(path)
    about = json.loads(metadata["bespoke"])
    change(about)
    write_arrays(path, {name: leaf.clone() for name, leaf in arrays.items()}, {"bespoke": json.dumps(about)})


def lowered(path: Path) -> None:
    described(path, lambda about: about.update(round=about["round"] - 1))


def without_a_key(path: Path) -> None:
    described(path, lambda about: about.pop("segments"))


def another_line(path: Path) -> None:
    """One number of one line is another: nothing that JSON would notice."""
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = re.sub(r'"stage": 0', '"stage": 9', lines[1])
    path.write_text("".join(lines))


DAMAGES: list[tuple[str, Damage, str]] = [
    *((name, how, "same") for name in ("checkpoints/001-0000004.safetensors", "private/001-0000004-0.safetensors")
      for how in (flip, short, empty, Path.unlink)),
    *(("checkpoints/001-0000004.safetensors", how, "same") for how in (lowered, without_a_key)),
    *(("checkpoints/001--000001.safetensors", how, "refused") for how in (flip, Path.unlink)),
    *((name, how, "refused") for name in ("rounds.jsonl", "ledger.jsonl")
      for how in (short, empty, Path.unlink, another_line)),
    *((name, flip, "same") for name in ("rounds.jsonl", "ledger.jsonl")),  # in the last line: from round 3 again
    *(("engine.json", how, "same") for how in (flip, empty, Path.unlink)),
    *(("timing.jsonl", how, "same") for how in (flip, empty, Path.unlink)),
    ("config.toml", Path.unlink, "same"), ("config.toml", empty, "refused"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "how", "end"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_unfinished_runs(runs: Path, tmp_path: Path, name: str, how: Damage, end: str) -> None:
    shutil.copytree(runs / "stopped", tmp_path / "run")
    how(tmp_path / "run" / name)
    if end == "refused":
        with pytest.raises(UserError, match=re.escape(name)) as told:
            run(tmp_path / "run")
        assert not name.endswith("s.jsonl") or re.search(r"line|missing", str(told.value))
        assert b"\0" not in (tmp_path / "run" / "rounds.jsonl").read_bytes()
        return
    said = run(tmp_path / "run")
    assert_identical(contents(tmp_path / "run"), contents(runs / "whole"), f"{name} {how}")
    if name.endswith(".safetensors") and how is not Path.unlink:
        assert any(name in note and "going on from round 3 of stage 2" in note for note in said), said


def test_a_changed_engine_is_seen_before_the_first_checkpoint(runs: Path, tmp_path: Path) -> None:
    """No checkpoint holds a copy of engine.json yet, and another number of clients at a time gives other bits."""
    shutil.copytree(runs / "stopped", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").mkdir()
    path = tmp_path / "run" / "engine.json"
    path.write_text(re.sub(r'"chunk": (\d+)', '"chunk": 1', path.read_text()))
    with pytest.raises(UserError, match=r"engine\.json is damaged.*remove it and resume"):
        run(tmp_path / "run")


def test_files_of_another_place_are_not_taken(runs: Path, tmp_path: Path) -> None:
    """Two checkpoints that were swapped are both whole, and both not what their names say."""
    shutil.copytree(runs / "stopped", tmp_path / "run")
    older, newer = (tmp_path / "run" / "checkpoints" / f"001-000000{i}.safetensors" for i in (3, 4))
    content = older.read_bytes()
    older.write_bytes(newer.read_bytes())
    newer.write_bytes(content)
    found = RunFolder(tmp_path / "run").latest()
    assert found is not None
    assert found.round == -1
    assert all(f"holds the checkpoint 001-000000{i} of this run" in found.passed_over[i - 3] for i in (3, 4))
    run(tmp_path / "run")
    assert_identical(contents(tmp_path / "run"), contents(runs / "whole"), "swapped")
    # the same files in the folder of another experiment
    shutil.copytree(runs / "stopped", tmp_path / "other")
    (tmp_path / "other" / "config.toml").write_text('label = "another"\n')
    with pytest.raises(UserError, match="of another run"):
        RunFolder(tmp_path / "other").latest()


FINISHED = (
    "clients.parquet", "choices.json", "rounds.jsonl", "ledger.jsonl", "engine.json", "result.json",
)  # fmt: skip


@pytest.mark.parametrize("how", [flip, short, empty], ids=lambda how: how.__name__)
def test_finished_runs(runs: Path, tmp_path: Path, how: Damage) -> None:
    """Refused with the name; what the message advises makes the same bytes again."""
    for name in FINISHED:
        shutil.copytree(runs / "whole", tmp_path / name)
        how(tmp_path / name / name)
        with pytest.raises(UserError, match=re.escape(name)):
            run(tmp_path / name)
        if name in ("clients.parquet", "choices.json", "engine.json", "result.json"):
            (tmp_path / name / "result.json").unlink()
            run(tmp_path / name)
            assert_identical(contents(tmp_path / name), contents(runs / "whole"), name)
    shutil.copytree(runs / "whole", tmp_path / "model")
    last = max((tmp_path / "model" / "checkpoints").iterdir())
    how(last)
    with pytest.raises(UserError, match=last.name):  # an earlier checkpoint is not what the run ended with
        RunFolder(tmp_path / "model").final()


def test_shared_stages_are_trained_again(tmp_path: Path) -> None:
    run(tmp_path / "first", cache=tmp_path / "stages")
    whole = contents(tmp_path / "first")
    for name in ("rounds.jsonl", "ledger.jsonl", "checkpoints/000-0000004.safetensors", "whole"):
        stage = next((tmp_path / "stages").iterdir())
        before = contents(stage)
        flip(stage / name, 0.5)
        said = run(tmp_path / f"again {Path(name).name}", cache=tmp_path / "stages")
        assert any(str(stage / name) in note and "trained again" in note for note in said), said
        assert_identical(contents(tmp_path / f"again {Path(name).name}"), whole, name)
        assert_identical(contents(stage), before, f"{name}: put there anew")


def test_runs_of_before_there_were_digests_go_on(runs: Path, tmp_path: Path) -> None:
    """They are resumed, and it is said what is not known of them."""
    shutil.copytree(runs / "stopped", tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():

        def older(about: dict[str, Any]) -> None:
            for key in ("seal", "run", "files"):
                about.pop(key)
            about.update(format=1, logs={log: mark[0] for log, mark in about["logs"].items()})

        assert json.loads(open_arrays(path)[1]["bespoke"])["format"] == CHECKPOINT
        described(path, older)
    for path in (tmp_path / "run" / "private").iterdir():
        arrays, _ = open_arrays(path)
        write_arrays(path, {name: leaf.clone() for name, leaf in arrays.items()})
    said = run(tmp_path / "run")
    assert any("a version without digests" in note for note in said)
    found, whole = contents(tmp_path / "run"), contents(runs / "whole")
    for name in ("rounds.jsonl", "ledger.jsonl", "clients.parquet", "choices.json"):
        assert found[name] == whole[name]


def test_comparisons_and_tunings_name_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to all runs of a folder: how clients are executed, and what is searched."""
    monkeypatch.chdir(tmp_path)
    Path("exp.toml").write_text(
        '[data]\nsource = "synthetic"\noptions = { clients = 6, examples = 12, features = 2 }\n'
        '[[stage]]\nmethod = "fedavg"\nrounds = 1\n[tune.space.fedavg]\nlr = [0.1, 0.2]\n'
    )
    command = ("tune", "exp.toml", "--out", "out", "--jobs", "1")
    assert bespoke(*command).code == 0
    whole = contents(Path("out"))
    assert bespoke(*command, "--resume").code == 0
    assert_identical(contents(Path("out")), whole, "finished, and resumed")
    for name, how in itertools.product(("engine.json", "search.json"), (flip, empty, Path.unlink)):
        kept = Path("out", name).read_bytes()
        how(Path("out", name))  # type: ignore[operator]
        refused(bespoke(*command, "--resume"), name)
        Path("out", name).write_bytes(kept)
    for name in ("tune.json", "trials.parquet", "best.toml"):
        flip(Path("out", name))
    assert bespoke(*command, "--resume").code == 0
    assert_identical(contents(Path("out")), whole, "made again")
