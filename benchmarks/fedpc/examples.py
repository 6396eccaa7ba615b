"""FedPC's Table 4: the same prompts by several users in several contexts, from a run folder to a page.

    python -m benchmarks.fedpc.examples RUN --user chandler --user arya --context friends --context thrones

Without --user and --context: all users of small runs and all contexts. Writes Markdown beside the run's other files
(RUN/examples.md), or where --output says; the same run and settings write the same page.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bespoke.cli.exit_codes import program
from bespoke.errors import UserError
from bespoke.generation.generate import Drawing, finished, lines_of, write
from bespoke.generation.voices import Voices, chosen_run
from bespoke.storage import write_text

PROMPTS = ("We must", "I think")
CHARACTERS = ("Chandler Bing", "Arya Stark")  # of the paper's Table 4
MOST_USERS = 6  # where none is named


def page(voices: Voices, users: list[str], contexts: list[str], asked: argparse.Namespace) -> str:
    """The table, a row for each user, context and text; the frozen model without a prefix comes last."""
    how = Drawing(asked.temperature, top_p=asked.top_p)
    lines = lines_of(voices.chosen(users, contexts, plain=True), asked.prompts, asked.number)
    records = finished(lines, write(voices, lines, how, asked.length, asked.seed))
    rows: dict[tuple[str, int], list[str]] = {}
    for line, record in zip(lines, records):
        rows.setdefault((line.voice.label, line.number), []).append(_cell(record["text"]))
    prompts = " | ".join(f"“{_cell(prompt)}”" for prompt in dict.fromkeys(asked.prompts))
    head = (
        f"Continuations by {_cell(Path(voices.pretrained).name)}: {asked.number} for each prompt, user and context, at "
        f"most {asked.length} tokens, temperature {how.temperature:g}, top-p {how.top_p:g}, seed {asked.seed}. All "
        "first texts have the same draws, as have all second ones: they differ by their embeddings alone. None was "
        "left out."
    )
    told = [f"# Generated examples: {_cell(voices.experiment.label)}", "", head, "", f"| user, context | {prompts} |"]
    told.append("|---" * (len(set(asked.prompts)) + 1) + "|")
    for (label, number), cells in rows.items():
        told.append(f"| {_cell(label) if number == 0 else ''} | {' | '.join(cells)} |")
    return "\n".join([*told, ""])


def _cell(text: str) -> str:
    """A text that cannot end a cell or be read as markup."""
    for sign, instead in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;"), ("*", "&#42;"),
                          ("_", "&#95;"), ("[", "&#91;")):  # fmt: skip
        text = text.replace(sign, instead)
    return " ".join(text.split())


def tables(folder: Path) -> None:
    """The page of the tables' larger model: the paper's two characters, each in both shows."""
    run = folder / "smollm2" / "runs" / "fedpc-seed0"
    if not (run / "result.json").exists():
        raise UserError(f"there is no finished {run}: python -m benchmarks.fedpc smollm2 comes first")
    write_page(arguments_of([str(run), *(word for user in CHARACTERS for word in ("--user", user))]))


def arguments_of(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, or a comparison with --method")
    parser.add_argument("--method")
    parser.add_argument("--user", action="append", default=[], dest="users")
    parser.add_argument("--context", action="append", default=[], dest="contexts")
    parser.add_argument("--prompt", action="append", default=[], dest="prompts")
    parser.add_argument("--number", type=int, default=3)
    parser.add_argument("--length", type=int, default=14)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a Markdown file (default: examples.md in the run folder)")
    return parser.parse_args(words)


def write_page(arguments: argparse.Namespace) -> Path:
    """Write the page; returns where it lies."""
    if arguments.number < 1 or arguments.length < 1:
        raise UserError("--number and --length: 1 or more")
    voices = Voices(chosen_run(arguments.run, arguments.method))
    if voices.private and not arguments.users:
        raise UserError(f"{voices.path} was made under [privacy], where users are not named: name them by --user")
    users, contexts = arguments.users or voices.users[:MOST_USERS], arguments.contexts or voices.contexts
    output: Path = arguments.output or voices.path / "examples.md"
    arguments.prompts = arguments.prompts or list(PROMPTS)
    write_text(output, page(voices, users, contexts, arguments))
    return output


def main() -> None:
    print(write_page(arguments_of()))


if __name__ == "__main__":
    program(main)
