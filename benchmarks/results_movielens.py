"""Users and the genres they like, for docs/results.md: FedEmbed, its baselines and its embeddings on MovieLens."""

import json
from pathlib import Path
from statistics import fmean

import pandas as pd

from bespoke.statistics.analyses import read_analyses
from bespoke.statistics.folders import read_study
from results_converged import HEAD, NOTE, column
from results_fedembed import shown

METRICS = ("query_f1", "query_accuracy")


def section(folder: Path) -> str:
    about = json.loads((folder / "compare.json").read_text())
    runs = sorted(read_study([folder]).runs, key=lambda run: run.seed)
    tables: dict[str, list[pd.DataFrame]] = {}
    for run in runs:
        tables.setdefault(run.label, []).append(pd.read_parquet(run.folder / "clients.parquet"))
    known: dict[str, list[dict[str, float]]] = {}
    for analysis in read_analyses([run.folder for run in runs]):
        if "recovered" in analysis.record:
            known.setdefault(analysis.label, []).append(analysis.record)
    lines = [
        "## MovieLens: which users like which genres",
        "",
        f"{about['data']['clients']} users, {about['data']['examples']:,} ratings. The task is to predict from genres "
        "and year whether a user likes a film (four stars or more). " + about["data"]["notes"][0],
        "The earliest 60 % of a user's ratings are training rows, the next 20 % choose rates, the last 20 % are test "
        f"rows; {about['methods'][0]['stages'][-1]['rounds']} rounds of {about['cohort']} users (Clustered FL takes "
        f"all), {len(about['seeds'])} seeds. F1 is the mean over users of the mean F1 of the two classes, ± its "
        "deviation over seeds. Better off: the fraction of users whose F1 is higher than with Global.",
        "Commands: `bespoke compare benchmarks/fedembed/movielens.toml --out runs/fedembed-movielens`, "
        "`bespoke analyze runs/fedembed-movielens --embeddings`",
        "",
        "| method | F1 | accuracy | better off than with Global | favourite genre guessed | adjusted Rand index "
        f"| {HEAD} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    improving = column(folder)
    base = [table.set_index("client")["query_f1"] for table in tables["Global"]]
    for label, found in tables.items():
        means = [shown([float(table[metric].mean()) for table in found]) for metric in METRICS]
        better = [
            float((table.set_index("client")["query_f1"] > before.reindex(table["client"])).mean())
            for table, before in zip(found, base)
        ]
        said = known.get(label)
        guessed = (
            [f"{100 * fmean(r['recovered'] for r in said):.1f} %", f"{fmean(r['agreement'] for r in said):.3f}"]
            if said
            else ["–", "–"]
        )
        lines.append(
            f"| {label} | {' | '.join(means)} | {'–' if label == 'Global' else f'{100 * fmean(better):.0f} %'} | "
            f"{' | '.join(guessed)} | {improving.get(label, '–')} |"
        )
    f1, accuracy = ({label: fmean(t[m].mean() for t in seeds) for label, seeds in tables.items()} for m in METRICS)
    mine = max((label for label in f1 if label.startswith("FedEmbed")), key=f1.__getitem__)
    best, right = max(f1, key=f1.__getitem__), max(accuracy, key=accuracy.__getitem__)
    groups = tables["Global"][0]["group"].value_counts(normalize=True)
    lines += [
        "",
        f"{best} has the highest F1 ({f1[best]:.3f}), {right} the highest accuracy ({accuracy[right]:.3f}); the best "
        f"of FedEmbed's, {mine}, has {f1[mine]:.3f} and {accuracy[mine]:.3f}. FedEmbed leads where every user likes "
        f"one kind of rows; here, with many tastes, it {'leads' if mine == best else 'does not lead'}.",
        f"There are {len(groups)} favourite genres; always guessing the most frequent would be right for "
        f"{groups.iloc[0]:.1%} of users.",
        NOTE,
    ]
    return "\n".join(lines)
