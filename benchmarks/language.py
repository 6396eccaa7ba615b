"""Writes docs/language.md: Group Personalized FL's language models, the paper's numbers beside ours, from run folders.

A section without run folders stays as it is, so that one experiment can be run again alone.

bespoke compare benchmarks/groups/ted_rates.toml --out runs/language-ted-rates              rates, for ted.toml
bespoke compare benchmarks/groups/ted.toml --out runs/language-ted                          Table 3's form, on topics
bespoke compare benchmarks/groups/ted_collections.toml --out runs/language-ted-collections  groups without meaning
bespoke compare benchmarks/groups/ted_paper.toml --out runs/language-ted-paper              the paper's model
bespoke compare benchmarks/groups/ted_found.toml --out runs/language-ted-found              found groups and topics
bespoke compare benchmarks/groups/wikitext.toml --out runs/language-wikitext
bespoke compare benchmarks/groups/shakespeare_words.toml --out runs/language-shakespeare
python benchmarks/language.py

Each command continues with --resume where it was stopped. The tables of word frequencies need the TED talks. They are
made once, into runs/language-unigrams.json.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import results
import results_groups
from bespoke.cli.exit_codes import program
from bespoke.data.sources.registry import MissingFile, Statistics
from bespoke.data.sources.ted import divided, gained
from bespoke.errors import UserError
from bespoke.report.group_gain import gain, labelled
from bespoke.report.report import read, summarize_study
from bespoke.statistics.folders import RunSet
from bespoke.statistics.formatting import number

HEADER = """# Language models: Group Personalized FL

Liu et al., *Group Personalized Federated Learning*, ICASSP 2023, train word language models of videos (Table 3, not
public) and of WikiText-103 (Table 6). Here a client is a TED talk, a page of WikiText or a role of Shakespeare. A
group is a topic, found in training text, or a play. A command makes each table from run folders (`python
benchmarks/language.py`).
"""
UNIGRAMS = """## Do the groups differ?

The cheapest language model is a table of word frequencies. A group's own table is shrunk towards the table of all
texts. If it predicts the group's held-out text better than the table of all texts does, then a group's model has
something to learn. Any division gains a little, because a group's table contains the talk's own words. What counts is
the gain beyond that of random groups."""
EXPERIMENTS = """## Tables 3, 4 and 6, Figure 1

The tables show the perplexity of all test segments together; an unknown word counts as one word. FL is `fedavg`,
PerFL is `finetune`. All seeds use one split, because topics depend on it: ± is over seeds, intervals are over
clients.

| experiment | file in benchmarks/groups | time on two cores, calculated |
| --- | --- | ---: |
| rates, chosen on validation rows | ted_rates.toml | 20 minutes |
| TED talks by topic | ted.toml | 80 minutes |
| TED talks by collection (groups without meaning); FL trained as long as GroupFL | ted_collections.toml | 20 minutes |
| the paper's model | ted_paper.toml | 45 minutes |
| groups found by updates, features and loss, compared with topics | ted_found.toml | 15 minutes |
| the available pages of WikiText, topics found | wikitext.toml | 10 minutes |
| all of WikiText-103, as in the paper | wikitext_full.toml | three weeks |
| Shakespeare's roles by play | shakespeare_words.toml | 20 minutes |

GroupFL trains longer than FL, so part of its gain comes from the longer training. "FL longer" trains as long as
GroupFL, without groups. The paper's perplexities are of other texts; only the changes between methods can be
compared. The paper's Table 3 is:

| category | FL | PerFL | GroupFL | GroupPerFL |
| --- | ---: | ---: | ---: | ---: |
| general | 211.2 | 190.1 | 178.3 | **168.1** |
| ads | 169.3 | 124.7 | 158.2 | **117.6** |
| podcast | 162.4 | **110.4** | 140.4 | 110.6 |
| football | 209.5 | 207.5 | 208.2 | **207.2** |
| news | 253.6 | 224.1 | 226.0 | **218.7** |
| gaming | 233.9 | 185.9 | 199.3 | **168.7** |
| basketball | 470.7 | 290.7 | 272.8 | **228.6** |"""
BF16 = "Products in training are computed in bfloat16 (`[engine] precision`); parameters and scores are float32."
FLAT = 0.01  # fraction of the perplexity: training whose last quarter gains less has about converged


def unigrams(cache: Path) -> str:
    """The section on word frequencies, of the talks of the experiments and of all talks."""
    if not cache.exists():
        found = []
        for talks, which in ((600, "600 talks"), (0, "all talks")):
            tables = [asdict(gained(kind, population, split)) for kind, population, split in divided(talks)]
            found.append({"title": f"Word frequencies of {which} of 46 segments", "tables": tables})
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(json.dumps(found, indent=1))
    parts = [UNIGRAMS]
    for part in json.loads(cache.read_text()):
        parts += [f"### {part['title']}", *(_table(Statistics(**table)) for table in part["tables"])]
    return "\n\n".join(parts)


def _table(counted: Statistics) -> str:
    rows = [f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in row)} |" for row in counted.rows]
    head = [f"| {' | '.join(counted.columns)} |", f"| --- |{' ---: |' * (len(counted.columns) - 1)}"]
    return "\n".join([f"{counted.title}:", "", *head, *rows])


def section(folder: Path) -> str:
    """One experiment: the table, the claims, the costs, and whether training had converged."""
    study, table = read([folder])
    lines = [results_groups.section(folder)]
    found = gain(study, table, summarize_study(study, table))
    if found is not None:
        changes = found.of()
        share = float(np.mean(changes < 0))
        half = 1.96 * math.sqrt(share * (1 - share) / len(changes))
        lines.append(
            f"Of {len(changes):,} clients' means over seeds, {100 * share:.1f} % are lower with GroupPerFL than with "
            f"PerFL (95 % interval over clients {100 * (share - half):.1f} to {100 * (share + half):.1f} %)."
        )
    lines += [*_converged(study), *_rates(study), *_personal(study, table)]
    lines += study.compare.get("expected", {}).get("differs", [])
    if json.loads((study.runs[0].folder / "engine.json").read_text()).get("precision") == "bf16":
        lines.append(BF16)
    return "\n\n".join(lines)


def _converged(study: RunSet) -> list[str]:
    """The validation curve of the global model, and whether it was still falling."""
    label = labelled(study, "fedavg")
    run = next((run for run in study.runs if run.label == label), None)
    if run is None:
        return []
    points = {
        line["round"]: line["validation"]["perplexity"]
        for line in run.lines("rounds.jsonl")
        if line["validation"] and line["round"]
    }
    rounds = sorted(points)
    if len(rounds) < 2:
        return []
    before = next(at for at in reversed(rounds) if at <= 0.75 * rounds[-1] or at == rounds[0])
    gained = 1 - points[rounds[-1]] / points[before]
    verdict = "about converged" if gained < FLAT else "not converged"
    best = min(rounds, key=lambda at: points[at])
    if points[rounds[-1]] > (1 + FLAT) * points[best]:
        verdict = (
            f"past its best after round {best}. FL was trained for too long and overfits its training rows. All other "
            "methods start from its last round, so their order holds only for this setting"
        )
    shown = ", ".join(f"{number(points[at])} after {at}" for at in rounds)
    return [
        f"Convergence: the mean validation perplexity of FL's clients (seed {run.seed}) is {shown} rounds. From round "
        f"{before} on it {'fell' if gained >= 0 else 'rose'} by {100 * abs(gained):.1f} %: {verdict}."
    ]


def _rates(study: RunSet) -> list[str]:
    """The values that were tried on validation rows, and the chosen ones."""
    lines = [
        f"- {entry['title']}: "
        + ", ".join(f"{trial['knobs']}: {number(trial['validation'])}" for trial in entry["tuning"])
        + f"; chosen {entry['chosen']}"
        for entry in study.compare["methods"]
        if entry["tuning"]
    ]
    return ["Values tried, with the validation perplexity of each:\n\n" + "\n".join(lines)] if lines else []


def _personal(study: RunSet, table: Any) -> list[str]:
    """Which personal model was chosen on validation rows: a rate and a number of epochs."""
    chosen = []
    for method in ("finetune", "group-perfl"):
        mine = table[table["method"] == labelled(study, method)]
        if len(mine):
            chosen.append(f"{results_groups.WAYS[method]}: {mine['candidate'].mode()[0]}")
    return [f"Personal models chosen on validation rows: {'; '.join(chosen)}."] if chosen else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=Path("runs"), help="the folder of the run folders")
    parser.add_argument("--output", type=Path, default=Path("docs/language.md"))
    arguments = parser.parse_args()
    folders = [path.parent for path in sorted(arguments.runs.glob("language-*/summary.json"))]
    parts = [HEADER]
    try:
        parts.append(unigrams(arguments.runs / "language-unigrams.json"))
    except MissingFile as error:
        print(f"word frequencies stay as they are: {error}")
    if len(parts) == 1 and not folders:
        raise UserError(f"{arguments.runs} holds no finished run of a language model: see --help for what to run")
    parts.append("\n\n".join([EXPERIMENTS, *map(section, folders)]))
    old = arguments.output.read_text() if arguments.output.exists() else ""
    arguments.output.write_text(results.merged(old, "\n\n".join(parts)).lstrip())
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    program(main)
