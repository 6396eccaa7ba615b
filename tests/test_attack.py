"""benchmarks/attack: a slice of the campaign, and that it would notice what it looks for."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks is no part of the installed package

from benchmarks.attack import damage, fuzz, kills, page  # noqa: E402
from benchmarks.attack.campaign import Campaign, Verdict  # noqa: E402
from benchmarks.attack.child import Ended, bespoke  # noqa: E402
from benchmarks.attack.worlds import cases, experiment  # noqa: E402


def test_a_slice_of_the_campaign_ends_without_a_failure(tmp_path: Path) -> None:
    counts = {"kills": 3, "damage": 3, "fuzz": 40}
    words = [sys.executable, "-m", "benchmarks.attack", "--count", ",".join(map(str, counts.values())), "--seed", "15"]
    done = subprocess.run([*words, "--folder", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for part, count in counts.items():
        assert f"| {part} | all | {count} |" in done.stdout
        assert len((tmp_path / f"{part}.jsonl").read_text().splitlines()) == count
    assert not (tmp_path / "failures").exists()


CRASHED = 'Traceback (most recent call last):\n  File "/x/src/bespoke/data/files.py", line 7, in f\nKeyError: 1\n'


@pytest.mark.parametrize(
    ("ended", "problem"),
    [
        (Ended(0, "fine", "", 1.0), ""),
        (Ended(2, "", "bespoke: lr = 'a' has to be a number\n", 1.0), ""),
        (Ended(2, "", "no", 1.0), "exit code 2 without a message"),
        (Ended(1, "", "bespoke: not enough memory; use fewer --workers\n", 1.0), ""),
        (Ended(1, "", CRASHED, 1.0), "traceback: KeyError: 1 (data/files.py:7)"),
        (Ended(-11, "", "", 1.0), "exit code -11"),
        (Ended(None, "", "", 60.0), "it took more than 60 s"),
        (Ended(0, "\x1b[31m", "", 1.0), "a terminal escape of the input is in the output"),
        (Ended(0, "", "", 1.0, orphans=2), "2 processes outlived it"),
    ],
)
def test_how_a_command_may_end(ended: Ended, problem: str) -> None:
    assert fuzz.problem(ended) == problem


@pytest.mark.parametrize("way", damage.WAYS)
def test_damage_is_done(tmp_path: Path, way: str) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    before = ['{"round": 1}\n{"round": 2}\n', '{"round": 3}\n']
    for file, text in zip(files, before):
        file.write_text(text)
    done, *damaged = damage.spoil(files[0], way, random.Random(1), files)
    assert done == way
    assert damaged == (files if way == "swapped" else files[:1])
    after = files[0].read_bytes() if files[0].exists() else None
    assert after != before[0].encode()
    expected = {"deleted": None, "emptied": b"", "swapped": before[1].encode()}
    if way in expected:
        assert after == expected[way]
    if way == "lowered":
        assert after in (b'{"round": 0}\n{"round": 2}\n', b'{"round": 1}\n{"round": 1}\n')
    if way == "flipped":
        assert after is not None
        assert sum((a ^ b).bit_count() for a, b in zip(after, before[0].encode(), strict=True)) == 1


def test_other_results_are_noticed_and_other_times_are_not(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "timing.jsonl").write_text(name)
        (tmp_path / name / "checkpoints" / name).write_text(name)
        (tmp_path / name / "result.json").write_text("{}")
    one, two = (kills.results(tmp_path / name) for name in ("one", "two"))
    assert kills.differences(one, two) == ""
    assert kills.differences({**one, "a": b"1"}, {**two, "a": b"2", "b": b""}) == "missing: b; other contents: a"


def test_a_command_that_hangs_is_stopped(tmp_path: Path) -> None:
    hang = bespoke(["methods"], tmp_path, limit=0.3, before=lambda: __import__("time").sleep(60))
    assert hang.code is None
    assert hang.seconds < 30
    assert bespoke(["methods"], tmp_path, kill_after=0.0).code == kills.KILLED


def test_tries_are_repeated_by_their_id_and_failures_are_kept(tmp_path: Path) -> None:
    def attempt(draw: random.Random, number: int, folder: Path, references: Path) -> Verdict:
        drawn = draw.random()
        (folder / "input").write_text(str(drawn))
        return Verdict("odd" if number % 2 else "even", str(drawn), "it is odd" if number % 2 else "")

    campaign = Campaign("fuzz", attempt, tmp_path, seed=4)
    first = [campaign.one(number) for number in range(4)]
    assert [record["story"] for record in first] == [campaign.one(number)["story"] for number in range(4)]
    assert sorted(path.name for path in (tmp_path / "failures").iterdir()) == ["fuzz-4-1", "fuzz-4-3"]
    assert (tmp_path / "failures" / "fuzz-4-1" / "input").read_text() == first[1]["story"]
    campaign.log.write_text("".join(json.dumps(record) + "\n" for record in [*first, {**first[3], "problem": ""}]))
    assert page.failures(tmp_path, ["fuzz"]) == 1  # the last verdict of a try counts
    assert "| fuzz | all | 4 | 0 | 1 |" in page.table(tmp_path, ["fuzz"])
    document = tmp_path / "page.md"
    document.write_text(f"# Page\n{page.BEGIN}\nold\n{page.END}\nrest\n")
    page.write(tmp_path, ["fuzz"], document)
    assert "old" not in document.read_text()
    assert document.read_text().startswith("# Page\n")
    assert document.read_text().endswith(f"{page.END}\nrest\n")
    assert os.listdir(tmp_path / "work") == []


@pytest.mark.parametrize("method", ["mocha", "pfedkm", "self-fl-clustered"])  # the server sends each client its own
@pytest.mark.parametrize("engine", ["looped", "vectorized"])
def test_nobody_to_choose_on(tmp_path: Path, method: str, engine: str) -> None:
    """A cross-device split may hold out no validation client; found by fuzzing."""
    import bespoke as library

    held_out = {"protocol": "cross-device", "held_out": [0.0, 0.4]}
    asked = experiment(method, split=held_out, engine={"workers": 0, "kind": engine})
    (tmp_path / "exp.toml").write_text(tomli_w.dumps(asked))
    result = library.run(tmp_path / "exp.toml", tmp_path / "run")
    assert result["clients"] == 4  # 0.4 of nine


def test_a_comparison_that_goes_on_removes_what_was_half_written(tmp_path: Path) -> None:
    """Killed while the report was written, it left a partial one behind; found by killing."""
    compared = next(case for case in cases() if case.name == "compare")
    compared.write(tmp_path)
    (tmp_path / "out" / "runs").mkdir(parents=True)  # as one that was begun
    half = tmp_path / "out" / ".report.html.123.partial"
    half.write_text("<html>")
    assert bespoke(compared.words(resume=True), tmp_path).code == 0
    assert (tmp_path / "out" / "report.html").exists()
    assert not half.exists()
