"""Writes docs/results.md: published numbers beside ours, from comparison folders on disk.

    bespoke compare benchmarks/motley/school.toml --out runs/motley-school
    python benchmarks/results.py runs/motley-school

Every folder must come from a comparison file with an [expected] table.
"""

import argparse
import json
from pathlib import Path

from bespoke.errors import UserError
from bespoke.metrics.concerns import concerns
from bespoke.metrics.motley import markdown, motley_lines
from bespoke.metrics.summary import read, summarize_study

HEADER = """# Results

Published numbers beside ours, in the form of Motley's Tables 4 to 7. Each table is made by a command from run folders;
hyper-parameters are chosen on validation rows of the first seed, results are for query rows. Every number is averaged
over seeds, ± its standard deviation over seeds; std is the standard deviation across clients (the paper's fairness
metric); a client is hurt if it is worse off than with the fedavg run of the same seed.

Made by `python benchmarks/results.py FOLDER ...`.
"""


def section(folder: Path) -> str:
    """One comparison as a table of paper against ours."""
    about = json.loads((folder / "compare.json").read_text())
    expected = about["expected"]
    if not expected:
        raise UserError(f"{folder} has no expected numbers: its comparison file needs an [expected] table")
    study, table = read([folder])
    summary = summarize_study(study, table)
    found = concerns(study, summary, table)
    lines = [
        f"## {about['title']}",
        "",
        f"Source: {expected['source']}. {summary.clients} clients, {len(summary.seeds)} seeds, {about['metric']}, "
        f"{about['model']['name']} with {about['model']['parameters']} parameters.",
        f"Command: `{about['command']}`",
        "",
        markdown(motley_lines(study, table, summary, found)),
    ]
    lines += [f"\n{note}" for note in expected.get("differs", [])]
    if found:
        lines += ["", "Practical concerns, as the report finds them:", "", *(f"- {concern.text}" for concern in found)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="comparison folders")
    parser.add_argument("--output", type=Path, default=Path("docs/results.md"))
    arguments = parser.parse_args()
    arguments.output.write_text("\n\n".join([HEADER.strip(), *map(section, arguments.folders)]) + "\n")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
