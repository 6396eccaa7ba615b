"""The page's sections after Motley: its tables, practical concerns, clusters, and the results of `bespoke analyze`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bespoke.plain import Named
from bespoke.report.analysis_figures import (
    choosers_figure,
    clusters_figure,
    fewer_figures,
    ood_figure,
    sweep_figures,
)
from bespoke.report.checks import SIZEABLE
from bespoke.report.embeddings import embedding_parts
from bespoke.report.figures import Figure, Style
from bespoke.report.motley_tables import motley_lines
from bespoke.report.summary import Summary
from bespoke.statistics.analyses import CROSSED, Analysis, in_words, read_analyses
from bespoke.statistics.clusters import clusters_of
from bespoke.statistics.folders import RunSet

if TYPE_CHECKING:
    import pandas as pd

MOST_CLIENTS = 50  # that are named in a table


def analysis_parts(
    study: RunSet, table: pd.DataFrame, summary: Summary, styles: dict[str, Style]
) -> tuple[dict[str, Figure], Named]:
    """(figures, what motley.html.jinja tells around them)."""
    titles = {method.label: method.title for method in summary.methods}
    analyses = [a for a in read_analyses([run.folder for run in study.runs]) if a.metric == summary.metric]
    by_kind: dict[str, list[Analysis]] = {}
    for analysis in sorted(analyses, key=lambda a: list(titles).index(a.label)):
        by_kind.setdefault(analysis.kind, []).append(analysis)
    figures, embeddings = embedding_parts(analyses, titles, summary.names_clients)
    for part in ("others", "other groups"):
        figures[f"ood-{part.replace(' ', '-')}"] = ood_figure(by_kind.get("ood", []), titles, styles, part)
    figures["fewer-mean"], figures["fewer-change"] = fewer_figures(by_kind.get("fewer-examples", []), titles, styles)
    _, figures["smaller-change"] = fewer_figures(
        by_kind.get("smaller-tests", []), titles, styles, "examples to be tested on"
    )
    sweeps = []
    for place, analysis in enumerate(by_kind.get("sweep", [])):
        figures[f"sweep-{place}-mean"], figures[f"sweep-{place}-hurt"] = sweep_figures(analysis, styles)
        title = f"{titles[analysis.label]}: {analysis.record['axis']}"
        rest = bool(analysis.record["curves"])
        sweeps.append({"name": f"sweep-{place}", "title": title, "sentences": in_words(analysis), "curves": rest})
    choosers = []
    for place, analysis in enumerate(by_kind.get("per-client", [])):
        figures[f"choosers-{place}"] = choosers_figure(analysis, summary.names_clients)
        entry = {"name": f"choosers-{place}", "title": titles[analysis.label], "sentences": in_words(analysis)}
        choosers.append({**entry, "record": analysis.record})
    clusters = []
    for place, found in enumerate(clusters_of(table)):
        figures[f"clusters-{place}"] = clusters_figure(found)
        clusters.append({"name": f"clusters-{place}", "title": titles[found.label], "clusters": found})
    lines = motley_lines(study, table, summary, summary.concerns)
    about = {
        "lines": lines,
        "published": any(line.published() for line in lines),
        "source": (study.compare.get("expected") or {}).get("source", ""),
        "differs": (study.compare.get("expected") or {}).get("differs", []),
        "concerns": summary.concerns,
        "sizeable": SIZEABLE,
        "clusters": clusters,
        "ood": [
            {"title": titles[a.label], "sentences": in_words(a), "rows": a.record["rows"]}
            for a in by_kind.get("ood", [])
        ],
        "fewer": [
            {"title": titles[a.label], "sentences": in_words(a)}
            for kind in ("fewer-examples", "examples")
            for a in by_kind.get(kind, [])
        ],
        "smaller": [{"title": titles[a.label], "sentences": in_words(a)} for a in by_kind.get("smaller-tests", [])],
        "crossed": [
            {"title": titles[a.label], "record": a.record, "clients": _by_client(a) if summary.names_clients else []}
            for a in by_kind.get("crossed", [])
        ],
        "crossed_names": CROSSED,
        "sweeps": sweeps,
        "choosers": choosers,
        "embeddings": embeddings,
        "analyzed": bool(analyses),
    }
    return figures, about


def _by_client(analysis: Analysis) -> list[Named]:
    """The table of clients averaged over seeds; none where clients are many."""
    import pandas as pd

    found = pd.concat([pd.read_parquet(path) for path in analysis.tables if path.exists()] or [pd.DataFrame()])
    if found.empty or found["client"].nunique() > MOST_CLIENTS:
        return []
    rows: list[Named] = found.groupby("client", as_index=False).mean().to_dict("records")
    return rows
