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

# A module imports from lower layers and from its own package alone. docs/architecture.md shows the same list.
LAYERS = (
    ("errors", "plain", "randomness", "tensors", "terminal", "helper_thread"),
    ("declarations", "devices", "task", "digests", "records", "storage", "pretrained", "imported"),
    ("method", "registry"),
    ("data", "methods", "callbacks"),
    ("models", "messages", "statistics"),
    ("federation",),
    ("privacy", "report"),
    ("experiment",),
    ("runs",),
    ("study", "analysis", "generation", "rescoring"),
    ("deploy", "testing"),
    ("api", "doors"),
    ("studio",),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


def imports(path: Path) -> set[str]:
    """Every module imported anywhere in a file, inside functions and for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_module_has_a_layer() -> None:
    assert {place(path) for path in MODULES} - {"__init__"} == set(HEIGHT)


@pytest.mark.parametrize("name", sorted(HEIGHT))
def test_imports_point_to_lower_layers(name: str) -> None:
    for path in MODULES:
        if place(path) != name:
            continue
        for imported in imports(path):
            parts = imported.split(".")
            target = parts[1] if parts[0] == "bespoke" and len(parts) > 1 else name
            if target != name and target in HEIGHT:  # else a name of bespoke itself, such as __version__
                assert HEIGHT[target] < HEIGHT[name], f"{path} imports {imported}"


def test_no_engine_names_a_method() -> None:
    for package in ("federation", "messages", "privacy", "data", "models"):
        for path in (PACKAGE / package).rglob("*.py"):
            assert not [name for name in imports(path) if f"{name}.".startswith("bespoke.methods.")], path


def test_the_architecture_page_shows_the_layers() -> None:
    page = (PACKAGE.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    assert "\n".join(" ".join(layer) for layer in reversed(LAYERS[:-1])) in page


def test_a_method_is_read_with_the_contract_alone() -> None:
    """The contract needs torch, the standard library and tensors; a method's own file adds the other methods."""
    standard, contract = sys.stdlib_module_names, ("bespoke.declarations", "bespoke.task", "bespoke.method")
    for page in ("method.py", "declarations.py", "task.py"):
        for name in imports(PACKAGE / page):
            top = name.split(".")[0]
            assert top in standard or top == "torch" or name.startswith(("bespoke.tensors", *contract)), name
    # two lists that others share
    files = {PACKAGE / "methods/__init__.py", PACKAGE / "methods/parts/server_optimizer.py"}
    for path in {*(PACKAGE / "methods").rglob("*.py")} - files:
        for name in imports(path):
            if name.startswith("bespoke"):
                assert name.startswith((*contract, "bespoke.methods", "bespoke.tensors")), f"{path}: {name}"


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
        "import bespoke.data.sources.registry as s; s.SOURCES",
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
