"""Hooks of MkDocs: pages in docs/methods and an API reference made from docstrings join the navigation.

The reference has a page of the public names and a page for each package, written from the source tree, so that a new
module or method is on the site without anybody listing it. Nothing is imported: mkdocstrings reads the source.
"""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "src" / "bespoke"


def on_config(config: Any) -> Any:
    """Fill the two empty sections of nav."""
    methods = [f"methods/{page.name}" for page in sorted((DOCS / "methods").glob("*.md"))]
    reference = [{"Public names": "api/index.md"}, *({name: f"api/{name}.md"} for name in _packages())]
    filled = {"Methods": methods, "API reference": reference}
    config.nav = [{title: filled.get(title, pages) for title, pages in entry.items()} for entry in config.nav]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Write the pages of the reference."""
    pages = {"index": _public_page()} | {name: _package_page(name, modules) for name, modules in _packages().items()}
    for name, text in pages.items():
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name files outside of docs/ instead of linking to them: the link is right in the repository, not on the site."""
    folder = (DOCS / page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():
            return link[0]  # MkDocs checks it
        return f"`{target.relative_to(DOCS.parent)}`"

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#\s]+)\)", named, markdown)


def _packages() -> dict[str, list[str]]:
    """Packages, and modules beside them, with the modules of each that have a docstring."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts and not any(part.startswith("_") for part in parts) and ast.get_docstring(_tree(path)):
            found.setdefault(parts[0], []).append(".".join(("bespoke", *parts)))
    return found


def _public_page() -> str:
    """The names of `import bespoke`, from the table that its __init__.py imports them by."""
    for node in _tree(PACKAGE / "__init__.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "_PUBLIC":
            names = ast.literal_eval(node.value)
    head = "# Public names\n\nWhat `import bespoke` gives, and where each name is defined.\n"
    # the page of its package is where a name is linked to; two places would be a warning
    entry = "::: {}.{}\n    options:\n      skip_local_inventory: true\n"
    return "\n".join([head, *(entry.format(names[name], name) for name in sorted(names, key=str.lower))])


def _package_page(name: str, modules: list[str]) -> str:
    page = "\n".join([f"# bespoke.{name}\n", *(f"::: {module}\n" for module in modules)])
    if name == "method":  # the contract is short and is read as it is
        page += f"\n```python\n{(PACKAGE / 'method.py').read_text(encoding='utf-8')}```\n"
    return page


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
