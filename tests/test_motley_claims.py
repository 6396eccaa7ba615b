"""Motley's observations held against made-up folders, whose verdicts are known by hand; and who has converged."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bespoke.report.report import read, summarize_study

ROOT = Path(__file__).parents[1]
CLIENTS = 30
FLAT = [2.0] * 5 + [1.0] * 16  # a validation curve that ends flat
STEEP = [2.0] * 16 + [1.1, 1.1, 1.1, 1.0, 1.0]  # a tenth of its end gained in the last fifth

PAST = [2.0] * 5 + [0.9] * 11 + [0.9, 1.0, 1.0, 1.0, 1.0]  # a tenth of its end lost in the last fifth


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module("results_motley_claims")
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("self_fl", "fedembed") or name.startswith("results"):
            del sys.modules[name]


@pytest.fixture(scope="module")
def folders() -> Any:
    """The fake run folders of tests/statistics."""
    spec = importlib.util.spec_from_file_location("fake_folders", ROOT / "tests" / "statistics" / "conftest.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entry(label: str, name: str, stages: int = 1, **chosen: Any) -> dict[str, Any]:
    return {"label": label, "name": name, "title": label, "stages": [{"k": 2}] * stages, "chosen": chosen}


ENTRIES = [
    entry("fedavg", "fedavg"), entry("finetune", "finetune", 2, part="all"), entry("local", "local"),
    entry("knn-per", "knn-per", 2), entry("hyp", "hypcluster", 2), entry("hyp-cold", "hypcluster"),
    entry("ensemble", "ensemble"), entry("ditto", "ditto"),
    entry("ft-blend", "finetune", 2) | {"stages": [{}, {"blend": [0.5, 1.0]}]},
    entry("ft-size", "finetune", 2) | {"stages": [{}, {"choose": "size"}]},
]  # fmt: skip


def made(folders: Any, folder: Path, curves: dict[str, list[float]] | None = None, **compare: Any) -> Path:
    """Errors of 30 clients, two seeds. Fine-tuning gains 1 for all but the five with fewest examples, which lose 1."""
    base = np.linspace(4.0, 7.0, CLIENTS)
    few = np.arange(CLIENTS) < 5
    effects = {
        "fedavg": 0.0, "finetune": np.where(few, 1.0, -1.0), "local": 0.5, "knn-per": np.where(few, 2.0, -1.0),
        "hyp": -0.5, "hyp-cold": -0.1, "ensemble": -0.5, "ditto": -0.9,
        "ft-blend": -0.6, "ft-size": np.where(few, 0.5, -1.0),
    }  # fmt: skip
    values = {label: [(base + effect).tolist(), (base + effect).tolist()] for label, effect in effects.items()}  # type: ignore[operator]
    record = {"methods": ENTRIES, "split": {"protocol": "cross-silo"}, "model": {"name": "CNN", "parameters": 9}}
    folders.make_comparison(folder, values, compare=record | compare, rounds=20, curve=FLAT)
    for run in (folder / "runs").iterdir():
        label = run.name.rpartition("-")[0]
        curve = (curves or {}).get(label)
        if curve:
            lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
            lines = [line | {"validation": {"mse": curve[line["round"]]}} for line in lines]
            (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if label.startswith("hyp"):  # all in one cluster without a warm start, half and half with it
            table = pd.read_parquet(run / "clients.parquet")
            halves = [f"cluster {int(label == 'hyp' and i >= CLIENTS / 2)}" for i in range(CLIENTS)]
            table.assign(candidate=halves, group=["a", "b"] * (CLIENTS // 2)).to_parquet(run / "clients.parquet")
    return folder


def analysis(folder: Path, label: str, name: str, **numbers: Any) -> None:
    for seed in (0, 1):
        place = folder / "runs" / f"{label}-seed{seed}" / "analysis"
        place.mkdir(exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps({"seed": seed, **numbers}))


def judged(claims: Any, folder: Path) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """(here, verdict) of what was tested, and why the rest was not, by the observation's text."""
    study, table = read([folder])
    found = claims.Found(study, table, summarize_study(study, table))
    tested, untested = {}, {}
    for observation in claims.OBSERVATIONS:
        try:
            tested[observation.text] = observation.of(found)
        except claims.Untested as why:
            untested[observation.text] = str(why)
    return tested, untested


def test_verdicts_from_the_clients(claims: Any, folders: Any, tmp_path: Path) -> None:
    tested, untested = judged(claims, made(folders, tmp_path / "c"))
    verdicts = {text: verdict for text, (_, verdict) in tested.items()}
    assert verdicts["Fine-tuning improves the mean"] == "holds"  # 25 gain 1, 5 lose 1: two thirds on average
    assert "gain +0.667" in tested["Fine-tuning improves the mean"][0]
    assert verdicts["Fine-tuning makes clients more alike (fairness)"] == "holds"  # those with low errors lose
    assert tested["Fine-tuning hurts some clients"] == ("16.7 % hurt", "holds")
    small = tested["Clients hurt by fine-tuning tend to have few examples"]
    assert small[0].startswith("hurt: 33.3 % of the half with at most 155 examples, 0 % of the others")
    assert small[1] == "holds"
    assert verdicts["Fine-tuning all layers is better than the last one"] == "holds"
    assert verdicts["HypCluster is better than FedAvg"] == "holds"
    assert verdicts["An ensemble of k FedAvg models is about as good as HypCluster"] == "holds"
    assert tested["From random models HypCluster collapses into one cluster"][1] == "holds"
    assert tested["A warm start makes the clusters more even"] == ("largest cluster 100 % cold, 50.0 % warm", "holds")
    assert verdicts["HypCluster sends k times as much as FedAvg"] == "does not hold"  # the fake ones send alike
    assert verdicts["Elsewhere clusters are hard to interpret"] == "holds"  # groups alternate, clusters are halves
    assert tested["kNN-Per hurts more clients than fine-tuning"] == ("16.7 % hurt against 16.7 %", "does not hold")
    assert verdicts["In silos, local training is a strong baseline: better than FedAvg"] == "does not hold"
    assert verdicts["In silos, every personalization method is better than FedAvg"] == "holds"
    assert "left out: Mocha was not run" in tested["In silos, every personalization method is better than FedAvg"][0]
    assert verdicts["In silos, multi-task learning is competitive"] == "holds"
    by_size = "Settings by the number of examples are better than one choice for all"
    assert tested[by_size][0].startswith("4.833 → 4.750, gain +0.08")  # five clients lose 0.5 instead of 1
    assert tested[by_size][1] == "holds"
    assert verdicts["The best method changes with the metric"] == "holds"  # ditto's mean, knn-per's spread
    assert untested["Across devices, local training is far behind FedAvg"] == "the paper says it of cross-device data"
    assert untested["HypCluster finds the two languages"] == "the paper says it of TED's two languages"
    noisier = "On smaller test sets the change by fine-tuning is noisier"
    assert untested[noisier] == "no analysis smaller-tests of finetune"


def test_nothing_is_said_of_what_has_not_converged(claims: Any, folders: Any, tmp_path: Path) -> None:
    tested, untested = judged(claims, made(folders, tmp_path / "c", {"finetune": STEEP}))
    why = "finetune has not converged (10.0 % in the last fifth)"
    assert untested["Fine-tuning improves the mean"] == why
    assert untested["kNN-Per hurts more clients than fine-tuning"] == why
    every = tested["In silos, every personalization method is better than FedAvg"]
    assert "left out: finetune has not converged" in every[0]
    assert tested["HypCluster is better than FedAvg"][1] == "holds"


def test_nothing_is_said_of_what_is_past_its_best_or_has_no_curve(claims: Any, folders: Any, tmp_path: Path) -> None:
    _, untested = judged(claims, made(folders, tmp_path / "c", {"finetune": PAST}))
    assert untested["Fine-tuning improves the mean"] == "finetune is past its best (−10.0 % in the last fifth)"
    folder = made(folders, tmp_path / "d")
    for path in folder.glob("runs/finetune-*/rounds.jsonl"):
        lines = [json.loads(line) | {"validation": None} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, untested = judged(claims, folder)
    assert untested["Fine-tuning improves the mean"] == "finetune has no validation curve"


def test_verdicts_from_the_analyses(claims: Any, folders: Any, tmp_path: Path) -> None:
    folder = made(folders, tmp_path / "c")
    changes = [{"fraction": f, "change": [-w, 0, 0, 0, w]} for f, w in ((1.0, 1.0), (0.5, 1.5), (0.25, 2.0))]
    analysis(folder, "finetune", "smaller-tests", points=changes)
    rates = [{"value": v, "mean": m, "hurt": h} for v, m, h in ((0.01, 5.2, 0.1), (0.1, 5.0, 0.2))]
    analysis(folder, "finetune", "sweep-lrs", axis="lr", points=rates)
    mixes = [{"value": v, "mean": m, "hurt": h} for v, m, h in ((0.0, 5.5, 0.0), (0.5, 5.0, 0.1), (1.0, 6.0, 0.9))]
    analysis(folder, "knn-per", "sweep-mix", axis="mix", points=mixes)
    neighbours = [{"value": k, "mean": m} for k, m in ((5, 5.0), (20, 5.05))]
    analysis(folder, "knn-per", "sweep-k", axis="k", points=neighbours)
    tuned = {"own": [5.5, 5.2, 5.0], "others": [5.5, 5.8, 6.5], "at": [0.0, 1.0, 5.0], "name": "lr 0.1"}
    ends = {"shared": {"own": 5.5, "others": 5.5}, "chosen": {"own": 5.0, "others": 6.5}}
    analysis(folder, "finetune", "ood", axis="epoch", curves=[tuned], **ends)
    analysis(folder, "hyp", "ood", curves=[], chosen={"own": 5.3, "others": 7.0})  # fine-tuned: 5.2 and 5.8
    analysis(folder, "knn-per", "ood", curves=[], chosen={"own": 5.2, "others": 5.6})
    analysis(folder, "ft-blend", "ood", curves=[], chosen={"own": 5.2, "others": 5.9})
    for label, means in (("finetune", (5.0, 5.4)), ("knn-per", (5.0, 5.3)), ("hyp", (5.0, 5.05))):
        points = [{"fraction": f, "mean": m} for f, m in zip((1.0, 0.25), means)]
        analysis(folder, label, "fewer-examples", points=points)
    one = {"mean": 5.0, "hurt": 0.1}
    analysis(folder, "finetune", "per-client", **{"global": one, "client": {"mean": 4.9, "hurt": 0.2}})
    gains = np.linspace(-1, 1, CLIENTS)  # no difference on average
    for seed in (0, 1):
        table = pd.DataFrame({"client": map(str, range(CLIENTS)), "global_value": 5.0, "client_value": 5.0 + gains})
        table.to_parquet(folder / "runs" / f"finetune-seed{seed}" / "analysis" / "per-client.parquet")
    tested, _ = judged(claims, folder)
    assert tested["On smaller test sets the change by fine-tuning is noisier"] == (
        "four fifths of changes within 2.00 on 100 %, 3.00 on 50.0 %, 4.00 on 25.0 % of test rows", "holds"
    )  # fmt: skip
    lr = tested["The best mean needs a larger rate of fine-tuning than the fewest clients hurt"]
    assert lr[0].startswith("mean best at lr 0.1 (mean 5.000, 20.0 % hurt), fewest hurt at lr 0.01")
    assert lr[1] == "holds"
    mix = tested["kNN-Per: the best mean needs a larger mix than the fewest clients hurt"]
    assert mix[1] == "does not hold"  # 0 is no mixture; of the others 0.5 is best by both
    assert tested["kNN-Per hardly depends on k"] == ("mean by k: 5: 5.000, 20: 5.050", "holds")
    own = tested["Fine-tuning gains on own rows and loses on others' rows"]
    assert own[0] == (
        "own rows 5.500 → 5.000, others' rows 5.500 → 6.500; epoch 1 → 5 (lr 0.1): own 5.200 → 5.000, others' 5.800 "
        "→ 6.500"
    )
    assert own[1] == "holds"
    trade = "trade-off between own and others' rows than fine-tuning"
    assert tested[f"HypCluster has a worse {trade}"][1] == "holds"
    assert tested["kNN-Per has at least as good a trade-off as fine-tuning"][1] == "holds"
    between = "Models between the shared and the tuned one have at least as good a trade-off as fine-tuning"
    assert tested[between][1] == "does not hold"  # a tuned model with the same own rows has 5.8
    assert tested["With fewer examples fine-tuning and kNN-Per get worse"][1] == "holds"
    assert tested["With fewer examples HypCluster loses least"] == (
        "mean worse by 1.0 % (hyp), 8.0 % (finetune), 6.0 % (knn-per)", "holds"
    )  # fmt: skip
    assert tested["Settings chosen by each client are no better than one choice for all"][1] == "holds"


def test_the_table_and_all_datasets_side_by_side(claims: Any, folders: Any, tmp_path: Path) -> None:
    study, table = read([made(folders, tmp_path / "c")])
    lines = claims.claims(claims.Found(study, table, summarize_study(study, table)))
    assert lines[2] == "| observation | paper | here | verdict |"
    assert "| 3. Fine-tuning hurts some clients |" in "\n".join(lines)
    assert lines[-1].startswith("Not tested, by number: ")
    results = importlib.import_module("results")
    one = "### One\n\nCommand: `bespoke compare benchmarks/motley/mnist_writers.toml`\n\n" + "\n".join(lines)
    page = f"# Results\n\nLead.\n\n## Motley\n\nHead.\n\n{one}\n\n## Other\n\n### Two\n\n3\n"
    shown = results.with_overview(page)
    assert "| observation | mnist writers |" in shown
    assert "| 3. Fine-tuning hurts some clients | holds |" in shown
    assert "| 19. HypCluster finds the two languages | not tested |" in shown
    assert shown.index("Head.") < shown.index(claims.OVERVIEW) < shown.index("### One")
    assert results.with_overview(shown) == shown
    kept = (ROOT / "docs" / "results.md").read_text()
    assert results.with_overview(kept) == kept  # its sections have no such table yet


def test_who_has_converged(claims: Any, folders: Any, tmp_path: Path) -> None:
    converged = importlib.import_module("results_converged")
    folder = made(folders, tmp_path / "c", {"fedavg": STEEP})
    cells = converged.column(folder)
    assert cells["fedavg"] == "10.0 %, not converged"
    assert cells["finetune"] == "no"
    assert converged.sentence({"A": "0.2 %", "B": "–"}).endswith("too long. A 0.2 %.")
    assert converged.in_words(-0.05) == "no, past its best by 5.0 %"
    assert converged.in_words(-0.01) == "no"
    assert converged.sentence({"B": "–"}).startswith("No validation curve")
    assert converged.column(tmp_path / "nothing") == {}


def test_why_a_claim_is_not_judged(claims: Any) -> None:
    claim = importlib.import_module("results_claim").Claim
    reason = importlib.import_module("results_converged").reason
    gains = {"A": 0.005, "B": 0.02, "C": -0.03, "D": float("nan"), "E": 0.02}
    unsettled = {name: why for name, gain in gains.items() if (why := reason(gain))}
    assert unsettled == {
        "B": "not converged", "C": "past its best", "D": "no validation curve", "E": "not converged",
    }  # fmt: skip

    def judged(*methods: str) -> str:
        return str(claim("", methods, "", "", "yes").judged(unsettled))

    assert judged() == judged("A") == "yes"
    assert judged("A", "B") == "not judged: B not converged"
    assert judged(*gains) == "not judged: B and E not converged; C past its best; no validation curve of D"
    assert judged("D", "D") == "not judged: no validation curve"
    unsettled |= dict.fromkeys("FGH", "not converged")
    assert judged(*"BEFGH") == "not judged: B, E, F and 2 more not converged"


def test_local_training_is_judged_by_its_epochs(claims: Any, folders: Any, tmp_path: Path) -> None:
    """At the chosen rate 1.1 after 8 epochs, 1.0 after 10: a tenth in the last fifth. The other rate does not count."""
    converged = importlib.import_module("results_converged")
    scores = {"epoch 0": 9.0, "lr 0.1, epoch 5": 2.0, "lr 0.1, epoch 8": 1.1, "lr 0.1, epoch 10": 1.0,
              "lr 1, epoch 5": 5.0, "lr 1, epoch 8": 5.0, "lr 1, epoch 10": 5.0}  # fmt: skip
    chosen = {"candidate": "lr 0.1, epoch 10"}
    folders.make_run(tmp_path / "runs" / "local-seed0", "local", 0, [1.0], ["a"], rounds=0, candidates=scores,
                     chosen=chosen)  # fmt: skip
    assert converged.improvements(tmp_path)["local"] == pytest.approx(0.1)
    two = {name: scores[name] for name in ("epoch 0", "lr 0.1, epoch 10")}
    folders.make_run(tmp_path / "runs" / "local-seed0", "local", 0, [1.0], ["a"], rounds=0, candidates=two,
                     chosen=chosen)  # fmt: skip
    assert converged.column(tmp_path)["local"] == "–"


def test_tables_of_other_papers_say_who_has_converged(claims: Any, folders: Any, tmp_path: Path) -> None:
    """`b` still gains a tenth in the last fifth of its rounds."""

    def folder(name: str, labels: tuple[str, str], **compare: Any) -> Path:
        values = {label: [[0.5, 0.6], [0.4, 0.7]] for label in labels}
        methods = [{"label": label, "name": label, "title": label, "stages": [{"rounds": 20}]} for label in labels]
        made = tmp_path / name
        folders.make_comparison(made, values, baseline=labels[0], rounds=20, curve=FLAT, metric="f1", lower=False,
                                compare={"methods": methods, "cohort": 2, **compare})  # fmt: skip
        for seed in (0, 1):
            path = made / "runs" / f"{labels[1]}-seed{seed}" / "rounds.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            rising = [0.5] * 16 + [0.9, 0.9, 0.9, 1.0, 1.0]
            text = [json.dumps(line | {"validation": {"f1": rising[line["round"]]}}) for line in lines]
            path.write_text("\n".join(text) + "\n")
        return made

    groups = importlib.import_module("results_groups").section(folder("groups", ("fedavg", "b")))
    assert "| still improving | | no | 10.0 %, not converged |" in groups
    assert "Above 1 %, a method has not converged" in groups
    ways = importlib.import_module("results_groups").WAYS
    unsettled = importlib.import_module("results_converged").unsettled(folder("two", ("fedavg", "group-fl")), ways)
    assert unsettled == {"GroupFL": "not converged"}
    claim = importlib.import_module("results_claim").Claim
    row = claim("a", ("FL", "GroupFL"), "b", "c", "yes").row(unsettled)
    assert row == "| a | b | c | not judged: GroupFL not converged |"
    assert claim("a", ("FL", "PerFL"), "b", "c", "yes").row(unsettled) == "| a | b | c | yes |"
    fedembed = importlib.import_module("results_fedembed")
    folder("embedded/balanced-none", ("FedRep", "Global"))
    lines = fedembed.converged(tmp_path / "embedded", {("balanced", "none"): {}})
    assert lines[3] == "| still improving | balanced, none |"
    assert "| FedRep | no |" in lines
    assert "| Global | 10.0 %, not converged |" in lines
    assert "| PFedMe | – |" in lines
    films = folder("films", ("Global", "FedEmbed"))
    for path in films.glob("runs/*/clients.parquet"):
        pd.read_parquet(path).assign(query_accuracy=0.5).to_parquet(path)
    told = importlib.import_module("results_movielens").section(films)
    assert "| – | – | 10.0 %, not converged |" in told


def test_where_the_paper_stops_too_a_claim_is_judged(claims: Any) -> None:
    claim = importlib.import_module("results_claim").Claim("", ("A", "B"), "", "", "mixed (2 of 3)")
    assert claim.judged({"B": "not converged"}, 200) == "mixed (2 of 3), after the paper's 200 rounds; B still improved"
    assert claim.judged({"B": "past its best"}, 200) == "not judged: B past its best"
    assert claim.judged({}, 200) == "mixed (2 of 3)"
