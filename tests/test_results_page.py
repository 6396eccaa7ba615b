"""benchmarks/results.py: what was run again takes its place in docs/results.md, everything else stays."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OLD = """# Results

Lead.

## A

About A.

### Same data

Command: `small`

1

### Same data

Command: `large`

2

## B

3
"""


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("results")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("self_fl", "fedembed") or name.startswith("results"):
            del sys.modules[name]


def test_only_what_was_run_again_changes(results: Any) -> None:
    new = "# Results\n\nLead.\n\n## A\n\nAbout A.\n\n### Same data\n\nCommand: `large`\n\n20\n\n"
    assert results.merged(OLD, new) == OLD.replace("\n2\n", "\n20\n")


def test_fewer_seeds_are_the_same_experiment(results: Any) -> None:
    command = "Command: `large --set compare.seeds=1`"
    new = f"# Results\n\nLead.\n\n## A\n\nAbout A.\n\n### Same data\n\n{command}\n\n20\n\n"
    assert results.merged(OLD, new) == OLD.replace("Command: `large`\n\n2\n", f"{command}\n\n20\n")
    other = new.replace("compare.seeds=1", "cohort.size=50")
    assert results.merged(OLD, other) == OLD.replace(
        "## B", "### Same data\n\nCommand: `large --set cohort.size=50`\n\n20\n\n## B"
    )


def test_what_is_new_goes_to_the_end_of_its_chapter(results: Any) -> None:
    new = "# Results\n\nLead.\n\n## A\n\nAbout A, again.\n\n### More\n\n4\n\n## C\n\n5"
    found = results.merged(OLD, new)
    assert (
        found
        == OLD.replace("About A.", "About A, again.").replace("\n## B", "\n### More\n\n4\n\n## B") + "\n## C\n\n5\n"
    )


def test_a_section_alone_leaves_the_head_of_its_chapter(results: Any) -> None:
    new = "# Results\n\nLead.\n\n## A\n\n### Same data\n\nCommand: `large`\n\n20\n\n"
    assert results.merged(OLD, new) == OLD.replace("\n2\n", "\n20\n")


def test_the_page_in_docs_keeps_its_sections(results: Any) -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert results.merged(page, results.HEADER) == page


def test_without_runs_it_says_what_to_do(tmp_path: Path) -> None:
    """As every program of benchmarks/: no traceback, exit code 2, and nothing is overwritten."""
    page = tmp_path / "results.md"
    page.write_text(OLD)
    command = [sys.executable, ROOT / "benchmarks" / "results.py", tmp_path, "--output", page]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"bespoke: {tmp_path} holds no finished run of benchmarks/: see --help for what to run\n"
    assert page.read_text() == OLD
