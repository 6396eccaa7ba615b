"""FedEmbed's tables for docs/results.md: the paper's numbers beside ours, from the folders of benchmarks/fedembed."""

import json
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from bespoke.errors import UserError
from bespoke.methods import FedEmbed
from bespoke.report.guarantee import epsilon_text
from bespoke.statistics.analyses import read_analyses
from bespoke.statistics.converged import in_words
from bespoke.statistics.folders import read_study
from fedembed import claims
from results_converged import HEAD, NOTE, improvements, reason

USERS, COLUMNS = ("balanced", "imbalanced"), ("none", "gaussian", "clients")
ORDER = (
    "FedRep", "PFedMe", "PFedKM", "Global", "Global+", "FedEmbed-Personal", "FedEmbed-SOM", "FedEmbed-Prototype",
    "FedEmbed-Type",
)  # fmt: skip
EMBEDDED = (
    "Global+",
    "FedEmbed-Personal",
    "FedEmbed-SOM",
    "FedEmbed-Prototype",
    "FedEmbed-Type",
)  # of Figures 3 and 5, and Type
KNOWS_NOTHING = (  # the coin's mean over all outcomes of ten rows, five of each class: 0.4865
    "A model that knows nothing of a user has an F1 of 1/3 if it always gives the same answer, and of 0.49 if it "
    "tosses a coin. Differences below 0.49 therefore carry no information. Labels conflict, so the best model for all "
    "users is a constant. The longer Global, Global+ and groups of users with different preferences are trained, the "
    "nearer they come to this constant."
)

MAP = (
    "FedEmbed-SOM's map moves by the sums of all pulls (`som.update = \"sums\"`). With the paper's rule the server "
    "would see the most similar client. The nearest node can depend on the last digit of a sum, so the row of "
    "FedEmbed-SOM is not the same on every machine. The other rows are."
)
PRIVATE_MAP = (
    "Under privacy FedEmbed-SOM sends more than a gradient within the same bound of 0.5: its present and previous "
    "cluster (norm one) and the similarity of the nodes (norm at least one). Clipping therefore leaves at most a third "
    "of its gradient, and noise on the counts decides which head a cluster takes over. A bound for each field is "
    "possible (`clip = { delta = ... }`); here all methods have the same bound."
)
CLIENTS = (
    "In the columns called clients, every client's message has noise too (mnist_gaussian_clients.toml). They are shown "
    "beside the paper's Gaussian columns; the paper does not say where their noise is added."
)


@dataclass(frozen=True)
class Chapter:
    """The texts about one experiment, and its tables and figures in the paper."""

    title: str
    command: str
    overall: int  # table of F1 by method
    by_part: int  # table of F1 by the part of users that like the same
    figures: str
    liked: str
    reduced: str
    apart: str
    rates: str  # the origin of the hyper-parameters
    said: claims.Said
    full: bool = False


MNIST = Chapter(
    "MNIST preferences (FedEmbed)", "mnist", 2, 4, "Figures 3 and 4", "digit",
    "the paper has 900 users for each digit (`--number 9000`) and five trials, and does not state the number of "
    "rounds; its network is printed without activations, here ReLU follows each LayerNorm",
    "No image is a training image of one user and a test image of another",
    "Hyper-parameters were chosen on 4 of the 20 training rows (`python benchmarks/fedembed/tune.py`)",
    claims.MNIST,
)  # fmt: skip
FULL = replace(
    MNIST, title="MNIST preferences at full size (FedEmbed)", full=True, reduced="one seed, five methods and balanced "
    "users; the paper has five trials, and does not state the number of rounds; its network is printed without "
    "activations, here ReLU follows each LayerNorm", rates="Hyper-parameters are those chosen with 600 users",
)  # fmt: skip
FULL_USERS = 9000
VOICE = Chapter(
    "Voice preferences (FedEmbed)", "voice", 3, 5, "Figure 5", "synthetic voice",
    "spectrograms of 100 x 140 instead of 200 x 375; the paper has five trials, and does not state the number of "
    "rounds. Its voices are interpolated between eight human speakers, ours between eight voices of espeak-ng",
    "No sentence is in a training utterance of one user and in a test utterance of another",
    "Hyper-parameters are those chosen for MNIST, except the server's rate, PFedKM's rate and rule for heads, and the "
    "rate of FedEmbed-SOM's embeddings. These two methods diverged in a first run, which its test scores showed too "
    "(F1 0.33 and 0.35, balanced). Only they were then tuned, on 4 of the 20 training rows: nine settings of PFedKM, "
    "six rates of FedEmbed-SOM. Their rows therefore had more tuning than the other rows",
    claims.VOICE,
)  # fmt: skip

CLAIMS = {2: "Claims of Sections 4.2 and 5", 3: "Claims of Sections 4.3 and 5"}  # by the table of F1 by method
TOLD = (
    "The paper's claims are judged on the means of the tables above. A difference within their ± counts too. Claims "
    "about embeddings are below."
)

Found = dict[tuple[str, str], dict[str, list[pd.DataFrame]]]  # (users, privacy) -> method -> a table for each seed


def tables(folder: Path) -> Found:
    """Every client's numbers, by comparison, method and seed."""
    found: Found = {}
    for users in USERS:
        for column in COLUMNS:
            place = folder / f"{users}-{column}"
            if not (place / "compare.json").exists():
                continue
            mine = found[users, column] = {}
            for run in sorted(read_study([place]).runs, key=lambda run: run.seed):
                mine.setdefault(run.label, []).append(pd.read_parquet(run.folder / "clients.parquet"))
    if not found:
        raise UserError(f"{folder} holds no comparison of benchmarks/fedembed")
    return found


def of_paper(column: str) -> str:
    """The paper's column that ours stands beside: it has one with privacy."""
    return "none" if column == "none" else "gaussian"


def shown(values: list[float]) -> str:
    """The mean over seeds, and its spread."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def epsilon(folder: Path, label: str) -> str:
    """Epsilon of a private run alone; an infinite epsilon has no delta."""
    results = [json.loads(path.read_text()) for path in (folder / "runs").glob(f"{label}-seed*/result.json")]
    said = [result["privacy"] for result in results if "privacy" in result]
    spent = {
        epsilon_text(one["released"]["epsilon"])
        + (f" at δ {one['delta']:.2g}" if one["released"]["epsilon"] is not None else "")
        for one in said
    }
    return f" (ε {', '.join(sorted(spent))})" if spent else ""


def overall(folder: Path, found: Found, paper: dict[str, Any]) -> list[str]:
    """Tables 2 and 3: the mean over users, by kind of users and privacy."""
    heads = [f"{users}, {column}" for users, column in found]
    lines = [
        f"| method | {' | '.join(f'{head}: paper | ours' for head in heads)} |",
        f"| --- |{' ---: | ---: |' * len(heads)}",
    ]
    for label in ORDER:
        cells = []
        for (users, column), methods in found.items():
            mean, spread = paper[users][label][of_paper(column)]
            seeds = [float(table["query_f1"].mean()) for table in methods.get(label, [])]
            ours = shown(seeds) + epsilon(folder / f"{users}-{column}", label) if seeds else "–"
            cells.append(f"{mean:.2f} ± {spread:.2f} | {ours}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def converged(folder: Path, found: Found) -> list[str]:
    """The same comparisons: whether a method still improved. One sentence if no run has a validation curve."""
    gains = {key: improvements(with_curves(folder, "{}-{}".format(*key))) for key in found}
    cells = {key: {label: in_words(gain) for label, gain in one.items()} for key, one in gains.items()}
    if not any(text != "–" for one in cells.values() for text in one.values()):
        return ["", "No run has a validation curve, so it is unknown whether a method still improved."]
    return [
        "",
        NOTE,
        "",
        f"| {HEAD} | {' | '.join(f'{users}, {privacy}' for users, privacy in found)} |",
        f"| --- |{' ---: |' * len(found)}",
        *(f"| {label} | {' | '.join(one.get(label, '–') for one in cells.values())} |" for label in ORDER),
    ]


def with_curves(folder: Path, place: str) -> Path:
    """The folder with the validation curves of a comparison. Its runs train on all rows that are not test rows."""
    curves = folder / f"curves-{place}"
    return curves if (curves / "compare.json").exists() else folder / place


def unsettled(folder: Path, trained: dict[str, list[str]]) -> dict[str, str]:
    """Why methods cannot be judged as they were trained for a comparison; `trained` has the labels of its methods."""
    found: dict[str, str] = {}
    for place, labels in trained.items():
        gains = improvements(with_curves(folder, place))
        name = place.replace("-", ", ")
        found |= {claims.training(label, name): reason(gains.get(label, math.nan)) for label in labels}
    return {name: why for name, why in found.items() if why}


def below(found: Found, paper: dict[str, Any]) -> list[str]:
    """The means below the paper's, and whether the difference exceeds the paper's spread."""
    short = []
    for (users, column), methods in found.items():
        for label, seeds in methods.items():
            mean, spread = paper[users][label][of_paper(column)]
            ours = fmean(float(table["query_f1"].mean()) for table in seeds)
            if ours < mean:
                by = "within its spread" if ours >= mean - spread else f"by {mean - ours:.2f}"
                short.append(f"{label} ({users}, {column}; {by})")
    if not short:
        return ["", "No method is below the paper's mean."]
    private = f" {PRIVATE_MAP}" if any("SOM" in text and "gaussian" in text for text in short) else ""
    return [
        "",
        f"Below the paper's mean: {', '.join(short)}. {KNOWS_NOTHING}{private}",
    ]


def by_part(methods: dict[str, list[pd.DataFrame]], column: str, paper: dict[str, Any]) -> list[str]:
    """Tables 4 and 5: the mean over users, by how many users share their preference."""
    parts = paper["parts"]
    lines = [
        f"| method, {column} | {' | '.join(f'{part}: paper | ours' for part in parts)} |",
        f"| --- |{' ---: | ---: |' * len(parts)}",
    ]
    for label in ORDER:
        cells = []
        for place, groups in enumerate(parts.values()):
            seeds = [float(t.loc[t["group"].isin(groups), "query_f1"].mean()) for t in methods.get(label, [])]
            cells.append(f"{paper[of_paper(column)][label][place]:.2f} | {shown(seeds) if seeds else '–'}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


@dataclass(frozen=True)
class Embedded:
    """The information in the embeddings of one method, and their learning rate."""

    rate: float
    f1: list[float]  # of the same models, by seed
    recovered: float
    agreement: float

    def row(self, label: str) -> str:
        told = f"{100 * self.recovered:.1f} % | {self.agreement:.2f}"
        return f"| {label} | {self.rate:g} | {shown(self.f1)} | {told} |"


def embedded(folder: Path) -> dict[str, Embedded]:
    """Figures 3 to 5 in numbers: those of `figures`, if it was run, else of the tables' own models."""
    found: dict[str, Embedded] = {}
    there = (folder / "figures" / "compare.json").exists()
    for place in [folder / "figures"] if there else [folder / "balanced-none", folder / "without-kinds"]:
        if not (place / "compare.json").exists():
            continue
        study = read_study([place])
        about = json.loads((place / "compare.json").read_text())
        usual = FedEmbed.embedding_lr
        rates = {entry["label"]: entry["stages"][-1].get("embedding_lr", usual) for entry in about["methods"]}
        records = {a.label: a.record for a in read_analyses([run.folder for run in study.runs])}
        for label, record in records.items():
            seeds = [pd.read_parquet(run.folder / "clients.parquet") for run in study.runs if run.label == label]
            f1 = [float(table["query_f1"].mean()) for table in seeds]
            found[label] = Embedded(rates[label], f1, record["recovered"], record["agreement"])
    order = (*EMBEDDED, *(label for label in found if label not in EMBEDDED))
    return {label: found[label] for label in order if label in found}


def undrawn(folder: Path, found: dict[str, Embedded], apart: bool) -> dict[str, str]:
    """Why models of the figures cannot be judged, by `claims.training`."""
    if apart:
        return unsettled(folder, {claims.FIGURES: list(found)})
    plain = [label for label in found if label != claims.NO_KINDS]
    reasons = unsettled(folder, {"balanced-none": plain, "without-kinds": [claims.NO_KINDS]})
    return {f"{name.rpartition(' (')[0]} ({claims.FIGURES})": why for name, why in reasons.items()}


def figures(found: dict[str, Embedded], this: Chapter, apart: bool, unjudged: dict[str, str]) -> list[str]:
    """A separate section, so that it can be made again alone; `apart`: its models were trained for it."""
    if not found:
        return []
    alone = f"python benchmarks/fedembed/{this.command}.py --figures"
    which = (
        f"Models of `{alone}`"
        if apart
        else f"Models of the tables above, at their rates. For the chosen rates: `{alone}`"
    )
    known = {label: (one.recovered, one.agreement) for label, one in found.items()}
    return [
        "",
        f"### {this.figures}",
        "",
        "A user's preference is guessed from its embedding (drawn in the reports), for balanced users without privacy. "
        "F1 is that of the same models. How far embeddings move depends on their rate. "
        f"benchmarks/fedembed/figures.toml has rates chosen by F1 and by the information in the embeddings. {which}.",
        "",
        "| method | embedding_lr | F1 | guessed right | adjusted Rand index |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(one.row(label) for label, one in found.items()),
        "",
        *claims.table(claims.Numbers({}, known=known), this.said, unjudged),
    ]


def numbers(found: Found, paper: dict[str, Any]) -> claims.Numbers:
    """The means over seeds on which claims are judged; noise on the clients is no column of the paper's."""

    def mean(seeds: list[pd.DataFrame], groups: list[str] | None = None) -> float:
        return fmean(float((t if groups is None else t[t["group"].isin(groups)])["query_f1"].mean()) for t in seeds)

    judged = {place: methods for place, methods in found.items() if place[1] != "clients"}
    return claims.Numbers(
        {place: {label: mean(seeds) for label, seeds in methods.items()} for place, methods in judged.items()},
        {
            column: {
                label: [mean(seeds, groups) for groups in paper["parts"].values()] for label, seeds in methods.items()
            }
            for (users, column), methods in judged.items()
            if users == "imbalanced"
        },
    )


def section(folder: Path) -> str:
    """The tables of an experiment, its claims and its embeddings; of `figures` alone, only the embeddings."""
    paper = tomllib.loads((Path(__file__).parent / "fedembed" / "paper.toml").read_text())
    drawn = (folder / "figures" / "compare.json").exists()
    found = {} if drawn and not any(folder.glob("*balanced-*/compare.json")) else tables(folder)
    first = folder / ("{}-{}".format(*next(iter(found))) if found else "figures")
    about = json.loads((first / "compare.json").read_text())
    this = VOICE if about["data"]["name"] == "voice-preferences" else MNIST
    if this is MNIST and about["data"]["clients"] >= FULL_USERS:
        this = FULL
    known = embedded(folder)
    drawings = figures(known, this, drawn, undrawn(folder, known, drawn))
    if not found:
        return "\n".join([f"## {this.title}", *drawings])
    rounds, seeds = about["methods"][0]["stages"][-1]["rounds"], len(about["seeds"])
    spread = f", ± its standard deviation over {seeds} seeds" if seeds > 1 else ", of one seed"
    lines = [
        f"## {this.title}",
        "",
        f"Source: {paper['source']}. {about['data']['clients']:,} users, each of whom likes one {this.liked}; 20 rows "
        f"for training, 10 for testing. F1 is the mean over users of the mean F1 of the two classes{spread}. "
        f"{rounds} rounds of {about['cohort']} users. Reduced: {this.reduced}. {this.apart}. {this.rates}. "
        f"{MAP}" + (f" {CLIENTS}" if any(column == "clients" for _, column in found) else ""),
        f"Command: `python benchmarks/fedembed/{this.command}.py{' --full' if this.full else ''}`",
        "",
        f"Table {this.overall}:",
        "",
        *overall(folder, found, paper[f"table{this.overall}"]),
        *below(found, paper[f"table{this.overall}"]),
        *converged(folder, found),
    ]
    for (users, column), methods in found.items():
        if users == "imbalanced":
            lines += ["", f"Table {this.by_part}, by the fraction of users that like a {this.liked}:", ""]
            lines += by_part(methods, column, paper[f"table{this.by_part}"])
    trained = {"{}-{}".format(*key): list(methods) for key, methods in found.items()}
    of_means = numbers(found, paper[f"table{this.by_part}"])
    judged = claims.table(of_means, this.said, unsettled(folder, trained))
    lines += ["", f"### {CLAIMS[this.overall]}", "", TOLD, "", *judged] if judged else []
    return "\n".join([*lines, *drawings])
