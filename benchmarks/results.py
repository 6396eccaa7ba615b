"""Writes docs/results.md: published numbers beside ours, from the run folders in `runs`.

A section without run folders stays as it is, so that one experiment can be run again alone.

bespoke compare benchmarks/motley/school.toml --out runs/motley-school         and so on: runs/motley-NAME
bespoke analyze runs/motley-school                                             for the paper's figures
bespoke compare benchmarks/groups/chem97.toml --out runs/groups-chem97         runs/groups-NAME
python benchmarks/rescoring.py runs/language-ted --out runs/rescoring-ted
python benchmarks/self_fl/wake_word.py --out runs/self-fl-wake-word            see benchmarks/self_fl
python benchmarks/fedembed/mnist.py --out runs/fedembed-mnist                  and voice.py: runs/fedembed-voice
python benchmarks/fedembed/mnist.py --figures                                  likewise --columns clients, --curves
python benchmarks/fedembed/mnist.py --full --out runs/fedembed-mnist-full
python benchmarks/fedembed/changes.py --out runs/fedembed-changes
bespoke compare benchmarks/fedembed/movielens.toml --out runs/fedembed-movielens
bespoke compare benchmarks/doors/tv_questions.toml --out runs/doors-tv-questions     see benchmarks/doors
python benchmarks/results.py
"""

import argparse
import re
from pathlib import Path

import results_changes
import results_doors
import results_fedembed
import results_groups
import results_motley
import results_motley_claims
import results_movielens
import results_rescoring
import results_self_fl
import results_wake_word
from bespoke.cli.exit_codes import program
from bespoke.errors import UserError

HEADER = """# Results

This page shows published numbers beside ours. A command makes each table from run folders (`python
benchmarks/results.py`). Where a paper's claim does not hold here, the page says so and names the differences: data,
size of the model, rounds. "Still improving" describes validation curves: the order of methods means something only
where the curves are flat. A table without this check is older than the check, and so are its verdicts.
"""
SEEDS = r" --set compare\.seeds=\S+?(?=[ `]|$)"


def chapters(runs: Path) -> list[str]:
    """A chapter for each paper of which something was run."""
    found = []
    motley = sorted(runs.glob("motley-*/summary.json"))
    if motley:
        found.append(results_motley.chapter([path.parent for path in motley]))
    groups = sorted(runs.glob("groups-*/summary.json"))
    if groups:
        found.append(results_groups.groups([path.parent for path in groups]))
    if (runs / "rescoring-ted" / "paper" / "rescore.json").exists():
        found.append(results_rescoring.section(runs / "rescoring-ted"))
    if any(runs.glob("self-fl-*")):
        found.append(results_self_fl.section(runs))
    if (runs / "self-fl-wake-word" / "wake_word.json").exists():
        found.append(results_wake_word.section(runs / "self-fl-wake-word"))
    fedembed = [runs / name for name in ("fedembed-mnist", "fedembed-voice", "fedembed-mnist-full")]
    found += [results_fedembed.section(folder) for folder in fedembed if any(folder.glob("*/compare.json"))]
    if (runs / "fedembed-movielens" / "compare.json").exists():
        found.append(results_movielens.section(runs / "fedembed-movielens"))
    if (runs / "fedembed-changes" / "compare.json").exists():
        found.append(results_changes.section(runs / "fedembed-changes"))
    if own := results_doors.chapter(runs):
        found.append(own)
    return found


def merged(old: str, new: str) -> str:
    """`old` with its sections replaced by those of `new`; new sections go to the end of their chapter."""
    kept = [_sections(chapter) for chapter in _chapters(old)]
    for fresh in map(_sections, _chapters(new)):
        name = next(iter(fresh))
        mine = next((chapter for chapter in kept if next(iter(chapter)) == name), None)
        if mine is None:
            kept.append(fresh)
        else:  # a chapter of which only one section was run again has no head
            mine.update({first: text for first, text in fresh.items() if text.strip() != name})
    return "\n\n".join(text.strip() for chapter in kept for text in chapter.values()) + "\n"


def with_overview(page: str) -> str:
    """The page with Motley's observations by dataset, from the tables that its sections have."""
    chapters = []
    for chapter in _chapters(page):
        sections = _sections(chapter)
        head, *rest = sections.values()
        rest = [text for text in rest if not text.startswith(results_motley_claims.OVERVIEW)]
        made = results_motley_claims.overview({results_motley_claims.dataset(text): text for text in rest})
        chapters.append("\n\n".join(text.strip() for text in (head, made, *rest) if text.strip()))
    return "\n\n".join(text for text in chapters if text) + "\n"


def _chapters(text: str) -> list[str]:
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)


def _sections(chapter: str) -> dict[str, str]:
    """The head of a chapter and its sections, by first line; two experiments on the same data by their command.

    A different number of seeds is not a different experiment.
    """
    found = {}
    for text in re.split(r"^(?=### )", chapter, flags=re.MULTILINE):
        command = re.search("^Command:.*", text, flags=re.MULTILINE) if text.startswith("### ") else None
        found[text.partition("\n")[0] + (re.sub(SEEDS, "", command[0]) if command else "")] = text
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"), help="the folder of the run folders")
    parser.add_argument("--output", type=Path, default=Path("docs/results.md"))
    arguments = parser.parse_args()
    found = chapters(arguments.runs)
    if not found:
        raise UserError(f"{arguments.runs} holds no finished run of benchmarks/: see --help for what to run")
    old = arguments.output.read_text() if arguments.output.exists() else ""
    arguments.output.write_text(with_overview(merged(old, "\n\n".join([HEADER, *found]))))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    program(main)
