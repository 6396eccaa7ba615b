"""Writes docs/results.md: published numbers beside ours, from comparison folders on disk.

    bespoke compare benchmarks/motley/school.toml --out runs/motley-school
    python benchmarks/results.py runs/motley-school

Every folder must come from a comparison file with an [expected] table.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from bespoke.errors import UserError
from bespoke.metrics.summary import Summary, summarize

HEADER = """# Results

Published numbers beside ours. Each table is made by a command from run folders; hyper-parameters are chosen on
validation rows of the first seed, results are for query rows. Ours: mean over clients, averaged over seeds, ± spread
over seeds; in brackets the standard deviation across clients (the papers' fairness metric), averaged over seeds.

Made by `python benchmarks/results.py FOLDER ...`.
"""


def section(folder: Path) -> str:
    """One comparison as a table of paper against ours."""
    about = json.loads((folder / "compare.json").read_text())
    expected = about["expected"]
    if not expected:
        raise UserError(f"{folder} has no expected numbers: its comparison file needs an [expected] table")
    summary = summarize([folder])
    lines = [
        f"## {about['title']}",
        "",
        f"Source: {expected['source']}. {summary.clients} clients, {len(summary.seeds)} seeds, {about['metric']}, "
        f"{about['model']['name']} with {about['model']['parameters']} parameters.",
        f"Command: `{about['command']}`",
        "",
        "| method | paper (sd of clients) | ours ± sd of seeds (sd of clients) | hurt: paper | hurt: ours | chosen |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    lines += [row(summary, method, expected.get(method["label"], {})) for method in about["methods"]]
    lines += [f"\n{note}" for note in expected.get("differs", [])]
    return "\n".join(lines)


def row(summary: Summary, method: dict[str, Any], paper: dict[str, Any]) -> str:
    """Published and measured numbers of one method."""
    ours = summary.method(method["label"])
    cells = [
        method["label"],
        f"{paper['mean']:.4f} ({paper['sd_clients']:.4f})" if paper else "",
        f"{ours.mean.value:.5f} ± {ours.mean.spread:.5f} ({ours.deviation.value:.4f})",
        f"{100 * paper['hurt']:.1f} %" if "hurt" in paper else "",
        f"{100 * ours.against.hurt.value:.1f} % ± {100 * ours.against.hurt.spread:.1f} %" if ours.against else "",
        ", ".join(f"{knob} = {value:g}" for knob, value in method["chosen"].items()),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="comparison folders")
    parser.add_argument("--output", type=Path, default=Path("docs/results.md"))
    arguments = parser.parse_args()
    arguments.output.write_text("\n\n".join([HEADER.strip(), *map(section, arguments.folders)]) + "\n")
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
