"""benchmarks/outside_training.py: what seconds count as, on hand-made notes and stacks."""

import importlib.util
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import outside_training
from outside_training import shares, stretches, without


@pytest.fixture(scope="module")
def stopwatch() -> ModuleType:
    path = Path(outside_training.__file__).parent / "stopwatch" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("stopwatch", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stack(*frames: tuple[str, str]) -> FrameType:
    """A frame within these: (file, function), the outermost first."""
    inner: Any = sys._getframe
    for path, name in reversed(frames):
        place: dict[str, Any] = {"inner": inner}
        exec(compile(f"def {name}():\n    return inner()", path, "exec"), place)
        inner = place[name]
    frame: FrameType = inner()
    return frame


COMPARE = ("/x/bespoke/study/comparison.py", "run")
STAGE = ("/x/bespoke/runs/training.py", "_stage")
IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ([COMPARE], "other work"),
        ([COMPARE, ("/x/bespoke/runs/training.py", "run"), STAGE, ("/x/torch/nn.py", "linear")], "training"),
        ([COMPARE, STAGE, IMPORT], "training"),  # what training needs for the first time
        ([COMPARE, ("/x/bespoke/experiment/build.py", "prepared"), IMPORT], "imports"),
        ([COMPARE, ("/x/bespoke/experiment/experiment.py", "engine_choice"), STAGE], "choice of the engine"),
        ([COMPARE, ("/x/bespoke/study/scheduler.py", "_together"), ("/x/selectors.py", "select")], "waiting"),
        ([("/x/bespoke/study/run_process.py", "_serve"), ("/x/multiprocessing/connection.py", "recv")], "waiting"),
        ([("/x/bespoke/study/run_process.py", "_serve"), ("/x/bespoke/runs/evaluation.py", "final")], "scoring"),
        ([("/x/multiprocessing/resource_tracker.py", "main")], "waiting"),
        ([("/x/bespoke/cli/console.py", "show_report")], "report"),
        ([("/x/other/runs/training.py", "_stage")], "start"),  # somebody else's
    ],
)
def test_the_outermost_frame_says_what_is_done(stopwatch: ModuleType, frames: list[Any], what: str) -> None:
    assert stopwatch.doing(stack(*frames)) == what


def test_gaps() -> None:
    assert without([(2.0, 4.0), (3.0, 5.0), (6.0, 9.0)], 1.0, 8.0) == [(1.0, 2.0), (5.0, 6.0)]
    assert without([], 0.0, 2.0) == [(0.0, 2.0)]


def test_a_process_ends_soon_after_its_last_word_or_with_the_command() -> None:
    notes = [(1.0, "training"), (4.0, "report")]  # a busy machine let it wait for three seconds
    assert stretches(notes, 9.0) == [(1.0, 4.0, "training"), (4.0, 4.5, "report")]
    assert stretches(notes, 4.25) == [(1.0, 4.0, "training"), (4.0, 4.25, "report")]


def test_seconds_by_what_was_done() -> None:
    """10 s: Python starts, imports, starts two processes, one trains while the other imports, both end."""
    first = [(1.0, 2.0, "imports"), (2.0, 7.0, "waiting"), (7.0, 9.0, "report")]
    second = [(2.5, 3.0, "imports"), (3.0, 6.0, "training"), (6.0, 7.0, "waiting")]
    third = [(3.0, 5.5, "imports"), (5.5, 6.5, "scoring"), (6.5, 6.75, "results written"), (6.75, 7.0, "waiting")]
    found = shares([second, first, third], 0.0, 10.0)
    assert found == pytest.approx({
        "training and scoring": 3.5,  # from 3 to 6.5
        "imports": 1.0,
        "imports, in processes": 0.5,  # from 2.5 to 3
        "processes started and ended": 0.75,  # from 2 to 2.5, from 6.75 to 7
        "results written, in processes": 0.25,
        "report": 2.0,
        "Python started and ended": 2.0,  # until 1, and from 9
    })  # fmt: skip


def test_two_processes_that_import_at_once_count_once() -> None:
    first = [(0.0, 4.0, "waiting")]
    found = shares([first, [(1.0, 3.0, "imports")], [(2.0, 4.0, "imports")]], 0.0, 4.0)
    assert found == pytest.approx({
        "training and scoring": 0, "imports, in processes": 3, "processes started and ended": 1,
        "Python started and ended": 0,
    })  # fmt: skip
