"""The files a contributor begins with agree with the package and name files that exist."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_of_this_version(project: dict[str, Any]) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])


def test_hooks_call_the_tools_of_the_project() -> None:
    """No hook is fetched from elsewhere: a hook of another version would disagree with `make lint`."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    assert [hook["entry"].split()[0] for hook in repositories[0]["hooks"]] == [
        ".venv/bin/ruff", ".venv/bin/ruff", ".venv/bin/mypy",
    ]  # fmt: skip


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)#]+)", text)
    named = [
        name for name in re.findall(r"`([\w./]+/[\w./]+|[\w-]+\.(?:md|toml|txt|yml))`", text) if "NAME" not in name
    ]
    assert linked
    for name in [*linked, *named]:
        places = (ROOT, ROOT / "src/bespoke", ROOT / "src/bespoke/data")
        assert any((place / name).exists() for place in places), f"{page} names {name}, which is not there"
