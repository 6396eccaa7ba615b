"""Imports point one way, and the first import is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bespoke

PACKAGE = Path(bespoke.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# what may not be imported by whom: method <- methods, engines, privacy <- stages <- scoring <- rounds <- cli
RUNS = ("stages", "scoring", "results", "rounds")
FORBIDDEN = {
    "tensors.py": ("bespoke",),
    "randomness.py": ("bespoke",),
    "errors.py": ("bespoke",),
    "methods": ("engines", *RUNS, "runfolder", "cli", "config", "comparison", "deploy", "reports", "metrics"),
    "models": ("engines", "methods", *RUNS, "runfolder", "cli", "comparison", "deploy", "reports", "metrics"),
    "data": ("engines", "methods", *RUNS, "runfolder", "cli", "comparison", "deploy", "reports", "metrics"),
    "engines": ("methods", *RUNS, "runfolder", "cli", "config", "comparison", "deploy", "reports", "metrics"),
    "privacy": ("methods", *RUNS, "runfolder", "cli", "config", "comparison", "deploy", "reports", "metrics"),
    "sampling.py": ("engines", "methods", *RUNS, "cli"),
    "selection.py": ("engines", "methods", *RUNS, "cli"),
    "runfolder.py": ("engines", "methods", *RUNS, "cli"),
    "watcher.py": ("bespoke",),
    "stages.py": ("methods", "scoring", "results", "rounds", "runfolder", "cli", "config", "jobs", "deploy", "reports"),
    "scoring.py": ("methods", "results", "rounds", "runfolder", "cli", "config", "jobs", "deploy", "reports"),
    "results.py": ("methods", "engines", "rounds", "cli", "config", "jobs", "deploy", "reports"),
    "rounds.py": ("methods", "cli", "config", "jobs", "comparison", "tuning", "deploy", "reports"),
    "jobs.py": ("cli", "comparison", "tuning", "deploy", "reports"),
    "reports": ("engines", "methods", *RUNS, "cli"),  # they read run folders, never memory
    "metrics": ("engines", "methods", *RUNS, "cli", "reports"),
}


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in a file, inside functions too; what only types need does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_point_one_way(place: str) -> None:
    paths = [path for path in MODULES if str(path.relative_to(PACKAGE)).split("/")[0] == place]
    assert paths
    for path in paths:
        for name in imports(path):
            for forbidden in FORBIDDEN[place]:
                target = forbidden if forbidden == "bespoke" else f"bespoke.{forbidden}"
                assert not f"{name}.".startswith(f"{target}."), f"{path} imports {name}"


def test_a_method_is_read_with_the_contract_alone() -> None:
    """method.py needs torch, the standard library and tensors; a method's own file adds the other methods."""
    standard = sys.stdlib_module_names
    for name in imports(PACKAGE / "method.py"):
        top = name.split(".")[0]
        assert top in standard or top == "torch" or name.startswith("bespoke.tensors"), name
    for path in (PACKAGE / "methods").glob("*.py"):
        for name in imports(path):
            if name.startswith("bespoke"):
                assert name.startswith(("bespoke.method", "bespoke.methods", "bespoke.tensors")), f"{path}: {name}"


def test_the_contract_is_short() -> None:
    assert len((PACKAGE / "method.py").read_text(encoding="utf-8").splitlines()) < 150


HEAVY = ("torch", "pandas", "pyarrow", "sklearn", "scipy", "numba", "plotly", "matplotlib")


@pytest.mark.parametrize(
    "code",
    [
        "import bespoke",
        "import bespoke; dir(bespoke); bespoke.__version__",
        "import sys; sys.argv = ['bespoke', '--help']\n"
        "from bespoke.cli import main\n"
        "try: main()\nexcept SystemExit as done: assert not done.code",
        "import bespoke.data.sources as s; s.SOURCES",
    ],
    ids=["import", "names", "help", "sources"],
)
def test_light_imports(code: str) -> None:
    check = f"\nimport sys; heavy = [m for m in {HEAVY!r} if m in sys.modules]; assert not heavy, heavy"
    done = subprocess.run([sys.executable, "-c", code + check], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_public_names_exist() -> None:
    for name in bespoke.__all__:
        assert getattr(bespoke, name) is not None
    with pytest.raises(AttributeError, match="nothing_like_it"):
        bespoke.nothing_like_it  # noqa: B018
