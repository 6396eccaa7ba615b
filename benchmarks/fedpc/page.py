"""docs/fedpc.md, from the folders of `python -m benchmarks.fedpc`. A section whose part was not run stays as it is."""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.fedpc.claims import TITLES, beyond, claims
from benchmarks.fedpc.readings import SAMPLES, Table, change, over_seeds, read_crossed, read_table

from bespoke.errors import UserError
from bespoke.statistics.formatting import number, size
from results_claim import table as claims_table
from results_converged import column, sentence, unsettled

PAPER = tomllib.loads((Path(__file__).parent / "paper.toml").read_text())
PAPER_ROUNDS, PAPER_STEPS = 55, 10
HEADER = """# FedPC: Tables 1 to 3

Silva, Tambwekar, Gombolay, *FedPC*, 2022 ([methods/fedpc.md](methods/fedpc.md)). `python -m benchmarks.fedpc` makes
every table from run folders. The model is stories15M, which was trained on children's stories. Its perplexities are
higher than those of the paper's DistilGPT2. Compare which method is better and by what fraction, not the values.
"""
REDUCED = """The experiment was reduced to two hours on two busy cores (the paper's values in brackets): {rounds} rounds
of {steps} local updates (55 of 10), at most {most} utterances per user (3,370), 20 % of them test rows, at most 32
tokens, {seeds} seeds (15). Withheld users adapt on half of their utterances and are tested on the other half.
Perplexity is that of the tokens after the first three, as a mean over users; ± is the standard deviation over seeds.
Intervals are 95 % intervals over users and seeds. FedPC (Frozen) uses the training of FedPC. Rates were tuned
on validation data with {trials} trials per method, each of {few} rounds ({heads} for the two heads) with at most
{lines} utterances per user and a separate seed."""
COLUMNS = {
    "own": "own", "other": "another user's", "stranger": "another user's, no common context",
    "anybody": "anybody's (psi_0)", "wrong": "another of its contexts",
    "foreign": "a context it never has", "none": "no prefix",
}  # fmt: skip
CROSSED = {
    "known": "Contexts are shows. Every user has one, so a user in another context is an untrained product.",
    "seasons": "Contexts are seasons, which users share. Another of its contexts is one in which the user was trained.",
}  # fmt: skip


def write(folder: Path, output: Path) -> None:
    """Write the page."""
    parts = {
        "## What was run": _run(folder), "## Table 1: known users": _table(folder, "known"),
        "## Table 2: withheld users": _table(folder, "withheld"),
        "## Do users and contexts carry anything?": _crossed(folder), "## Table 3 and memory": _costs(folder),
        "## SmolLM2-135M": _smollm2(folder), "## Under privacy": _private(folder),
        "## Generated examples": _examples(folder),
    }  # fmt: skip
    if not any(parts.values()):
        raise UserError(f"{folder} holds no finished part: python -m benchmarks.fedpc --help")
    text = output.read_text() if output.exists() else ""
    old = {part.partition("\n")[0]: part.strip() for part in re.split(r"^(?=## )", text, flags=re.MULTILINE)}
    made = [f"{title}\n\n{body}" if body else old.get(title, "") for title, body in parts.items()]
    rest = [part for title, part in old.items() if title.startswith("## ") and title not in parts]
    output.write_text("\n\n".join(filter(None, [HEADER.strip(), *made, *rest])) + "\n")


def _about(folder: Path, part: str) -> dict[str, Any] | None:
    place = folder / part / "compare.json"
    return json.loads(place.read_text()) if place.exists() else None


def _run(folder: Path) -> str:
    """Sizes, rates, and the cost of the paper's number of rounds."""
    known, rates = _about(folder, "known"), _about(folder, "rates")
    if known is None or rates is None:
        return ""
    stage = known["methods"][0]["stages"][-1]
    most, lines_tried = (_most(folder / part) for part in ("known", "rates"))
    trials = max(len(entry["tuning"]) for entry in rates["methods"])
    lines = [
        REDUCED.format(
            rounds=stage["rounds"], steps=stage["steps"], most=most, seeds=len(known["seeds"]), trials=trials,
            few=rates["methods"][0]["stages"][-1]["rounds"], lines=lines_tried,
            heads=max(entry["stages"][-1]["rounds"] for entry in rates["methods"]),
        ),
        "", "| method | tried | chosen |", "| --- | --- | --- |",
    ]  # fmt: skip
    for entry in rates["methods"]:
        tried = ", ".join(f"{_knobs(trial['knobs'])}: {number(trial['validation'])}" for trial in entry["tuning"])
        lines.append(f"| {TITLES[entry['label']]} | {tried} | {_knobs(entry['chosen'])} |")
    edges = [f"{TITLES[entry['label']]}: {knobs}" for entry in rates["methods"] if (knobs := _knobs(_edges(entry)))]
    if edges:
        lines += ["", f"At the edge of what was tried (a better rate may lie beyond): {'; '.join(edges)}."]
    lines += ["", *_paper_cost(folder / "known", known)]
    return "\n".join(lines)


def _edges(entry: dict[str, Any]) -> dict[str, Any]:
    """The chosen values that are the smallest or the largest of those that were tried."""
    found = {}
    for name, value in entry["chosen"].items():
        tried = {trial["knobs"][name] for trial in entry["tuning"]}
        if len(tried) > 1 and value in (min(tried), max(tried)):
            found[name] = value
    return found


def _settings(folder: Path) -> dict[str, Any]:
    """The experiment of one of a part's runs."""
    return tomllib.loads(next((folder / "runs").glob("*/config.toml")).read_text())


def _most(folder: Path) -> str:
    """The most utterances of a user in a part's runs."""
    return str(_settings(folder)["data"]["options"]["most"] or "all")


def _cohort(folder: Path) -> str:
    """How many users train in a round of a part's runs."""
    size = _settings(folder).get("cohort", {}).get("size")
    return f"{size} users" if size else "all users"


def _knobs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _paper_cost(folder: Path, about: dict[str, Any]) -> list[str]:
    """Seconds of a round as measured, and those of the paper's 55 rounds of 10 updates by calculation."""
    lines = [
        "| method | one round here, s | the paper's 55 rounds of 10 updates, minutes, calculated |",
        "| --- | ---: | ---: |",
    ]
    for entry in about["methods"]:
        seconds = []
        for path in folder.glob(f"runs/{entry['label']}-seed*/timing.jsonl"):
            seconds += [json.loads(line)["seconds"] for line in path.read_text().splitlines() if line.strip()]
        steps = entry["stages"][-1].get("steps", PAPER_STEPS)
        if seconds:
            each = statistics.median(seconds)
            minutes = each * PAPER_ROUNDS * PAPER_STEPS / steps / 60
            lines.append(f"| {TITLES[entry['label']]} | {each:.0f} | {minutes:.0f} |")
    return ["The cost of training (two runs at the same time, one core each), all users in every round:", "", *lines]


def _table(folder: Path, part: str) -> str:
    """Perplexity by samples, ours beside the paper's, and the claims."""
    table = read_table(folder / part)
    if table is None:
        return ""
    methods = [method for method in TITLES if any(table.at(method, samples) is not None for samples in SAMPLES)]
    lines = [f"{len(table.users)} users. Our numbers, with the paper's in brackets:", ""]
    lines += [f"| samples | {' | '.join(TITLES[m] for m in methods)} |", f"| --- |{' ---: |' * len(methods)}"]
    for place, samples in enumerate(SAMPLES):
        cells = [_cell(table, method, samples, PAPER[part].get(method), place) for method in methods]
        lines.append(f"| {samples} | {' | '.join(cells)} |")
    of_entries = unsettled(folder / part)
    judged = claims_table(claims(table, PAPER[part]), {TITLES[m]: why for m, why in of_entries.items()})
    lines += ["", *(line.replace("| here |", "| here: change of the perplexity |") for line in judged)]
    further = beyond(table)
    if further:
        lines += ["", "Questions that the paper does not ask, with all samples:", "", *further]
    converged = {TITLES[label]: cell for label, cell in column(folder / part).items()}
    return "\n".join([*lines, "", sentence(converged)])


def _cell(table: Table, method: str, samples: str, paper: list[list[float]] | None, place: int) -> str:
    values = table.at(method, samples)
    if values is None:
        return ""
    mean, spread = over_seeds(values)
    text = number(mean) + (f" ± {number(spread, 2)}" if math.isfinite(spread) else "")
    return text + (f" ({paper[place][0]:.1f} ± {paper[place][1]:.1f})" if paper else "")


def _crossed(folder: Path) -> str:
    """Own, another's and anybody's embedding, right and wrong contexts: by user, with intervals over users."""
    parts = []
    for part, about in CROSSED.items():
        for method in ("fedpc", "fedpc-generated", "fedpc-split", "fedpc-meta"):
            found = read_crossed(folder / part, method)
            if found is None:
                continue
            users, values = found
            title = f"### {'Shows' if part == 'known' else 'Seasons'}: {TITLES[method]}"
            seeds = len(values["own"])
            lines = [title, "", about, f"Mean perplexity of {len(users)} users, {seeds} seed{'s'[: seeds > 1]}."]
            lines += ["", "| model | perplexity | change against own |", "| --- | ---: | ---: |"]
            lines += [
                f"| {COLUMNS[name]} | {number(over_seeds(column)[0])} | "
                f"{'' if name == 'own' else change(column, values['own']).text()} |"
                for name, column in values.items()
            ]
            if method == "fedpc":
                lines += ["", f"| user | {' | '.join(COLUMNS[name] for name in values)} |"]
                lines += [f"| --- |{' ---: |' * len(values)}"]
                for place, user in enumerate(users):
                    cells = (number(float(column[:, place].mean())) for column in values.values())
                    lines.append(f"| {user} | {' | '.join(cells)} |")
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _costs(folder: Path) -> str:
    """Table 3 as ratios to FedPC, and the bytes of a client."""
    place = folder / "costs.json"
    if not place.exists():
        return ""
    costs = json.loads(place.read_text())
    base, paper = costs["methods"]["fedpc"], PAPER["milliseconds"]
    lines = [
        f"One process and one thread, float32, {costs['pretrained']}, 15 texts of random words per batch, as long as "
        "TV lines. Hidden states below a head are not cached. "
        "The table shows ratios to FedPC, with the paper's in brackets. The processor time of a text is "
        f"{1000 * base['training']:.1f} ms in training and {1000 * base['testing']:.1f} ms in testing with FedPC.",
        "",
        "| method | training | testing | private state | Adam's moments of it | sent to a client | sent by it |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for label, found in costs["methods"].items():
        times = []
        for at, what in enumerate(("training", "testing")):
            theirs = f" ({paper[label][at] / paper['fedpc'][at]:.2f})" if label in paper else ""
            times.append(f"{found[what] / base[what]:.2f}{theirs}")
        bytes_of = (size(found[name]) if found[name] else "0" for name in ("private", "moments", "down", "up"))
        lines.append(f"| {TITLES[label]} | {' | '.join(times)} | {' | '.join(bytes_of)} |")
    lines += ["", f"The frozen model takes {size(costs['model'])}, once per device, for every method."]
    if "fedpc-split" in costs["methods"]:
        split = costs["methods"]["fedpc-split"]
        share = (base["private"] + base["down"]) / (split["private"] + split["down"])
        with_moments = (base["private"] + base["moments"] + base["down"]) / (split["private"] + split["down"])
        lines += [
            "",
            "The paper says that FedPC needs 0.001 % of the memory of a head for each user and context. An embedding "
            f"is one row of a head: 1 of {costs['vocabulary']:,} here, {100 / costs['vocabulary']:.4f} % (1 of 50,257 "
            f"there, 0.0020 %). With {costs['contexts']} contexts, the data that a client holds and receives are "
            f"{100 * share:.4f} % of Split-Learning's, or {100 * with_moments:.4f} % with Adam's moments of the user's "
            "embedding.",
        ]
    return "\n".join(lines)


def _smollm2(folder: Path) -> str:
    """A shorter run with a larger model."""
    table, about = read_table(folder / "smollm2"), _about(folder, "smollm2")
    if table is None or about is None:
        return ""
    stage = about["methods"][0]["stages"][-1]
    values = {method: table.at(method, "all") for method in ("fedpc", "shared-prefix", "none")}
    lines = [
        f"SmolLM2-135M-Instruct in four bits, unpacked: {len(table.users)} known users with at most "
        f"{_most(folder / 'smollm2')} utterances, {stage['rounds']} rounds of {_cohort(folder / 'smollm2')} and "
        f"{stage['steps']} updates, one seed, rates as tuned with stories15M; not converged.",
        "", "| | perplexity |", "| --- | ---: |",
        *(f"| {TITLES[m]} | {number(over_seeds(v)[0])} |" for m, v in values.items() if v is not None),
        "", *beyond(table),
    ]  # fmt: skip
    crossed = read_crossed(folder / "smollm2", "fedpc")
    if crossed is not None:
        own = crossed[1]["own"]
        lines += ["", "Own embedding against:", ""]
        lines += [f"- {COLUMNS[n]}: {change(c, own).text()}" for n, c in crossed[1].items() if n != "own"]
    return "\n".join(lines)


def _examples(folder: Path) -> str:
    """The paper's Table 4, from the page that lies in the run's folder."""
    place = folder / "smollm2/runs/fedpc-seed0/examples.md"
    if not place.exists():
        return ""
    told = (
        "The paper's Table 4: its two characters, each in its own show and in the other show, from the run above.\n\n"
    )
    return told + place.read_text().partition("\n")[2].strip()


def _private(folder: Path) -> str:
    """The effect of noise on FedPC with so few users."""
    table, about = read_table(folder / "private"), _about(folder, "private")
    if table is None or about is None:
        return ""
    run = folder / "private/runs/fedpc-seed0"
    spent = json.loads((run / "result.json").read_text())["privacy"]["released"]["epsilon"]
    noise = next(filter(None, (json.loads(line).get("noise") for line in (run / "ledger.jsonl").open())))
    known = read_table(folder / "known")
    cells = []
    for method in ("fedpc", "shared-prefix"):
        mine = table.at(method, "all")
        without = known.at(method, "all") if known else None
        if mine is not None:
            more = f" ({number(over_seeds(without)[0])} without noise)" if without is not None else ""
            cells.append(f"{TITLES[method]} has a perplexity of {number(over_seeds(mine)[0])}{more}")
    return (
        f"With {len(table.users)} users, epsilon {about['privacy']['epsilon']:g} and all users in every round, "
        f"{' and '.join(cells)}. Noise of {noise['sum']['delta'] / noise['clip']:.3g} times the clipping bound is "
        f"added to every entry of a sum of {len(table.users)} messages. The spent epsilon is {spent:.3g}. psi stays "
        "private."
    )
