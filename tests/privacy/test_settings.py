"""[privacy] in experiments: what is refused and how, what it does to weights, and how it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bespoke.cli.compare import _terms
from bespoke.cli.descriptions import describe_methods, hidden, learned
from bespoke.errors import UserError
from bespoke.experiment.build import build, to_toml
from bespoke.experiment.checks import checked
from bespoke.report.guarantee import sentences
from bespoke.report.page import write_report
from bespoke.report.report import summarize
from bespoke.report.trials import print_trials
from bespoke.runs.events import Silent
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.comparison import Comparison
from bespoke.study.tuning import Tuning, check_tune
from ledger_epsilon import gaussian

DATA = {"source": "synthetic", "options": {"clients": 12, "examples": 10, "features": 3}, "standardize": "none"}


def config(privacy: dict[str, Any], method: str = "fedavg", **more: Any) -> Any:
    raw = {"data": DATA, "privacy": privacy, "stage": [{"method": method, "rounds": 2}], **more}
    return checked(raw, "exp.toml")


@pytest.mark.parametrize(
    ("privacy", "more", "said"),
    [
        ({}, {}, "without noise hides nothing"),
        ({"nois": 1.0}, {}, "Did you mean 'privacy.noise'|noise"),
        ({"noise": -1.0}, {}, "privacy.noise = -1: above zero"),
        ({"noise": 1.0, "clip": 0.0}, {}, "privacy.clip = 0"),
        ({"noise": 1.0, "clip": {"delta": -2.0}}, {}, "privacy.clip.delta = -2"),
        ({"noise": 1.0, "clip": {}}, {}, "empty table"),
        ({"noise": "auto"}, {}, "privacy.epsilon, which is missing"),
        ({"noise": "auto", "local_noise": "auto", "epsilon": 1.0}, {}, "only one can be calibrated"),
        ({"epsilon": -3.0}, {}, "privacy.epsilon = -3.0"),
        ({"noise": 1.0}, {"transform": {"clip": 2.0}}, "say it once, as privacy.clip"),
        ({"local_noise": 1.0}, {"transform": {"top_k": 0.1}}, "saves nothing beside privacy.local_noise"),
        ({"noise": 1.0, "adaptive": True, "clipping": "layer"}, {}, "one bound for all"),
        ({"noise": 1.0, "clip": {"delta": 1.0}, "clipping": "layer"}, {}, "choose one of the two"),
        ({"noise": 1.0, "accountant": "gdp"}, {}, "pld, rdp"),
    ],
)
def test_what_does_not_go_together_is_refused(privacy: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config(privacy, **more)


def test_bounds_by_field_have_to_fit_the_method() -> None:
    with pytest.raises(UserError, match="has no bound for control"):
        build(config({"noise": 1.0, "clip": {"delta": 1.0}}, "scaffold"))
    with pytest.raises(UserError, match="bounds control"):
        build(config({"noise": 1.0, "clip": {"delta": 1.0, "control": 1.0}}))
    build(config({"noise": 1.0, "clip": {"delta": 1.0, "control": 5.0}}, "scaffold"))


def test_clients_weigh_alike_unless_told_otherwise() -> None:
    """Sizes are data; what was resolved stands in config.toml, and without [privacy] nothing changes."""
    assert 'weighting = "uniform"' in to_toml(config({"noise": 1.0}))
    assert "weighting" not in to_toml(config({"noise": 1.0}, "self-fl"))  # it has weights of its own, which are hidden
    told = checked(
        {
            "data": DATA,
            "privacy": {"noise": 1.0},
            "stage": [{"method": "fedavg", "rounds": 2, "weighting": "examples"}],
        },
        "exp.toml",
    )
    # then it is clipped and noised like the rest
    assert build(told).stages[0].method.uplink["weight"].reveal.name == "SUM"
    plain = checked({"data": DATA, "stage": [{"method": "fedavg", "rounds": 2}]}, "exp.toml")
    assert "weighting" not in to_toml(plain)
    assert "privacy" not in to_toml(plain)


def test_terms_of_the_command_line() -> None:
    assert _terms("privacy", "epsilon=8, clip=0.5, adaptive=true, local_noise=auto") == {
        "epsilon": 8, "clip": 0.5, "adaptive": True, "local_noise": "auto",
    }  # fmt: skip
    with pytest.raises(UserError, match="not of the form"):
        _terms("privacy", "epsilon")


def test_the_catalogue_says_what_the_server_learns() -> None:
    found = {method["name"]: method for method in describe_methods()}
    assert learned(found["mocha"]) == "every client's delta"
    assert learned(found["fedavg"]) == "sums of delta, weight"
    assert learned(found["scaffold"]) == "sums of delta, control; a count of clients by weight"
    assert learned(found["local"]) == "nothing"
    assert learned(found["group-fl"]) == "each group's sums of delta, weight"
    assert learned(found["clustered-fl"]) == "every client's delta, weight"
    assert learned(found["knn-per"]) == "nothing more than of fedavg before it"
    assert "local_noise" in hidden(found["mocha"])
    assert "local_noise" in hidden(found["feature-groups"])
    assert hidden(found["group-fl"]) == "noise on each group's sum, on the client, or both"
    assert hidden(found["local"]) == "nothing to hide: epsilon is 0"
    assert hidden(found["knn-per"]) == "as fedavg before it"


# -- shown -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private") / "comparison"
    base = {"data": DATA, "privacy": {"noise": 1.0, "delta": 0.01, "reproducible": True, "public_statistics": True}}
    grid = {"fedavg": {"lr": [0.05, 0.1]}, "mocha": {"lr": [0.1]}, "local": {}}
    Comparison(base, folder, ("fedavg", "local", "mocha"), (0,), rounds=3, grid=grid).run()
    return folder


def test_the_report_has_epsilon_beside_each_method_and_the_cost_of_tuning(compared: Path) -> None:
    page = write_report([compared], compared).read_text()
    part = page[page.index('id="guarantee"') :]
    part = part[: part.index("</section>")]
    assert "Not private" in part
    assert "Mocha: ε is infinite, for mocha shows the server every client&#39;s delta" in part
    about = {
        entry["label"]: entry["tuning_cost"] for entry in json.loads((compared / "compare.json").read_text())["methods"]
    }
    assert about["fedavg"]["runs"] == 3  # two settings, and the run itself
    alone = json.loads((compared / "runs" / "fedavg-seed0" / "result.json").read_text())["privacy"]["released"]
    assert about["fedavg"]["epsilon"] > alone["epsilon"]
    assert (about["local"]["epsilon"], about["mocha"]["epsilon"]) == (0.0, None)
    sentence = next(text for text in summarize([compared]).answer if "Privacy" in text)
    assert f"FedAvg {alone['epsilon']:.3g}" in sentence
    assert "epsilon at delta 0.01" in sentence
    whole = json.loads((compared / "compare.json").read_text())["spent"]
    assert (whole["runs"], whole["epsilon"], whole["one"]) == (6, None, None)  # three runs, three trials
    for text in (sentence, part):
        assert "all 6 private ones in this folder together have epsilon ∞ at delta 0.01 (infinite, for mocha" in text
        assert "Not counted, because they have no noise: constant-seed0, pooled-seed0." in text
    assert "Local 0" in sentence
    assert "Mocha ∞" in sentence


def test_tuning_says_what_it_cost(tmp_path: Path) -> None:
    raw = {
        "data": DATA, "privacy": {"noise": 2.0, "delta": 0.01, "public_statistics": True},
        "stage": [{"method": "fedavg", "rounds": 2}],
    }  # fmt: skip
    asked = check_tune({"space": {"fedavg": {"lr": [0.05, 0.1, 0.2]}}}, "exp.toml")
    about = Tuning.of(raw, asked, tmp_path / "tune", "exp.toml").run()
    assert about["privacy"]["runs"] == 3
    one = json.loads((tmp_path / "tune" / about["best"]["folders"][0] / "result.json").read_text())["privacy"][
        "released"
    ]
    assert about["privacy"]["epsilon"] > one["epsilon"]
    assert one["spent"]["squared_mu"] == pytest.approx(2 / 4)  # twelve clients, all of them in both rounds
    assert about["privacy"]["epsilon"] == pytest.approx(gaussian(6 / 4, 0.01))
    assert about["privacy"]["one"] == pytest.approx(gaussian(2 / 4, 0.01))
    shown = io.StringIO()
    print_trials(about, tmp_path / "tune", Console(file=shown, width=300))
    one_trial, three = f"{gaussian(2 / 4, 0.01):.3g}", f"{gaussian(6 / 4, 0.01):.3g}"
    said = f"a trial has epsilon {one_trial} at most, all 3 trials together {three}, at delta 0.01."
    assert said in shown.getvalue()


def test_every_epsilon_is_told_with_its_delta(tmp_path: Path) -> None:
    """At the end of a run, and on the way."""
    raw = {
        "data": DATA, "stage": [{"method": "fedavg", "rounds": 5}],
        "privacy": {"noise": 1.0, "epsilon": gaussian(2.5, 0.01), "delta": 0.01, "public_statistics": True},
    }  # fmt: skip
    notes: list[str] = []

    class Told(Silent):
        def advance(self, steps: int = 1, note: str = "") -> None:
            notes.append(note)

    asked = checked(raw, "exp.toml")
    made = Run(build(asked), RunFolder.create(tmp_path / "run", to_toml(asked)), progress=Told()).run()
    said = sentences(made["privacy"])
    expected = [f"epsilon {gaussian(n, 0.01):.3g} at delta 0.01" for n in (1, 2)]
    assert [note.rpartition(" · ")[2] for note in notes if note] == expected
    assert f"after 2 of 5 rounds: one more would exceed the budget of epsilon {gaussian(2.5, 0.01):g}" in said[-1]
    assert len([text for text in said if "psilon" in text]) == 3
    assert all("at delta 0.01" in text for text in said if "psilon" in text)


def test_sentences_say_what_is_not_covered() -> None:
    view = {
        "epsilon": None,
        "by": "RDP",
        "rdp": None,
        "pld": None,
        "mu": None,
        "mu_exact": True,
        "gdp": None,
        "why": ["x"],
    }
    said = sentences({
        "released": view, "messages": view, "delta": 0.1, "secret": False, "adjacency": "a", "stopped": "s",
        "budget": 3.0,
    })  # fmt: skip
    assert "∞" in said[0]
    assert any("NOT private" in sentence for sentence in said)
