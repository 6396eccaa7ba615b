"""A hook of MkDocs: tutorials are run as notebooks, and what their cells show is on the site.

A tutorial is a Python file of cells: `# %%` begins code, `# %% [markdown]` text in comments. Notebook editors open such
files as they are, and ruff checks them. Each is run in a kernel and a folder of its own. A cell that fails ends the
build.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from plotly.offline import get_plotlyjs

TUTORIALS = Path(__file__).resolve().parent / "tutorials"
SECONDS = 900  # for one cell, on a busy machine
PLOTLY = "assets/plotly.min.js"  # once for all pages, and not from elsewhere


def on_config(config: Any) -> Any:
    """Fill the section of nav; this hook comes after that of the other pages."""
    pages = [f"tutorials/{path.stem}.md" for path in tutorials()]
    for entry in config.nav:
        if "Tutorials" in entry:
            entry["Tutorials"] = pages
    return config


def on_files(files: Files, config: Any) -> Files:
    """Run the tutorials; a page and a notebook to take away for each."""
    for path in tutorials():
        notebook = cells(path.read_text(encoding="utf-8"))
        plain = nbformat.writes(notebook)
        run(notebook, path.name)
        files.append(File.generated(config, f"tutorials/{path.stem}.ipynb", content=plain))
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=page(notebook, path.stem)))
    files.append(File.generated(config, PLOTLY, content=get_plotlyjs()))
    return files


def tutorials() -> list[Path]:
    """In the order in which they are best read."""
    first = ["own_data", "reading_a_comparison", "own_model", "own_method", "privacy"]
    found = sorted(TUTORIALS.glob("*.py"))
    return sorted(found, key=lambda path: first.index(path.stem) if path.stem in first else len(first))


def cells(text: str) -> Any:
    """A notebook of a file's cells."""
    notebook: Any = nbformat.v4.new_notebook()
    for number, cell in enumerate(text.split("# %%")[1:]):
        head, _, body = cell.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            made = nbformat.v4.new_markdown_cell("\n".join(lines))
        else:
            made = nbformat.v4.new_code_cell(body.strip())
        made["id"] = f"cell-{number}"
        notebook.cells.append(made)
    return notebook


def run(notebook: Any, name: str) -> None:
    """Run its cells in their order, in an empty folder."""
    os.environ.update(PLOTLY_RENDERER="plotly_mimetype", OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder:
        here = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, kernel_name="python3", timeout=SECONDS, resources=here)
        try:
            client.execute()
        except CellExecutionError as error:
            raise PluginError(f"docs/tutorials/{name}: {error}") from error


def page(notebook: Any, stem: str) -> str:
    """The notebook as Markdown, with what its cells showed."""
    parts, figures = [], 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stdout":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
            data = output.get("data", {})
            if "application/vnd.plotly.v1+json" in data:
                script = "" if figures else f'<script src="../{PLOTLY}"></script>\n'
                figures += 1
                parts.append(script + figure(data["application/vnd.plotly.v1+json"], f"figure-{figures}"))
            elif data.get("text/html"):
                parts.append(f"<div>\n{data['text/html'].strip()}\n</div>")
            elif "text/html" not in data and data.get("text/plain"):
                parts.append(f"```text\n{data['text/plain']}\n```")
    parts.append(f"[This page as a notebook]({stem}.ipynb)")
    return "\n\n".join(parts) + "\n"


def figure(drawn: dict[str, Any], name: str) -> str:
    """A figure of Plotly, drawn by the page."""
    given = [json.dumps(drawn[part]).replace("<", "\\u003c") for part in ("data", "layout")]
    options = json.dumps({"responsive": True, "displaylogo": False})
    return f'<div id="{name}"></div>\n<script>Plotly.newPlot("{name}", {", ".join(given)}, {options})</script>'
