"""What a site refuses, whatever the hub asks; what it sends; and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bespoke.deploy.export import load_personal
from bespoke.deploy.federated.agreement import Agreement
from bespoke.deploy.federated.guarded import read_log
from bespoke.deploy.federated.place import SiteHost
from bespoke.deploy.federated.rules import Rules
from bespoke.deploy.federated.statistics import histogram
from bespoke.errors import UserError
from bespoke.federation.calls import Call
from bespoke.federation.sites import Wired
from bespoke.federation.wire import encode_call
from bespoke.privacy.accountant import gaussian_epsilon
from bespoke.runs.folder import RunFolder
from bespoke.tensors import leaves
from deploy.sites_here import NAMES, hub, site, three
from loopback import split_up
from test_protocol import STAGES, asked, people

FEDAVG = [{"method": "fedavg", "rounds": 2, "lr": 0.1, "batch_size": 4}]


def test_scores_stay_with_their_sites_and_means_come_out(tmp_path: Path) -> None:
    """The hub's result from sums is that of sites which share each client's scores."""
    config = asked(STAGES["ditto"])
    parts = split_up(people(), 3)
    for where, rules in (("shared", Rules(least=1, share_clients=True)), ("kept", Rules(least=4))):
        lines = three(parts, tmp_path / where, rules)
        hub(config.model_copy(update={"cohort": config.cohort.model_copy(update={"size": 12, "dropout": 0.0})}),
            tmp_path / where / "hub").run(lambda lines=lines: lines)  # fmt: skip
    shared, kept = (RunFolder.existing(tmp_path / where / "hub").result() for where in ("shared", "kept"))
    assert shared is not None
    assert kept is not None
    for key in ("query", "validation", "candidates", "chosen", "clients"):
        assert kept[key] == shared[key], key
    assert (tmp_path / "shared" / "hub" / "clients.parquet").exists()
    assert not (tmp_path / "kept" / "hub" / "clients.parquet").exists()
    ids = [f"client {i:02d}" for i in range(12)]
    answered = b"".join(reply for line in lines.values() for reply in line.received)
    operations = [entry["operation"] for name in NAMES for entry in read_log(tmp_path / "kept" / name / "sent.jsonl")]
    assert {"train", "score", "statistics", "keep", "describe"} <= set(operations)
    assert "examine" not in operations
    assert all(answered.count(name.encode()) == 1 for name in ids)  # in the roster, and nowhere else
    said = json.loads((tmp_path / "kept" / "hub" / "sites.json").read_text())
    assert {name: found["clients"] for name, found in said["sites"].items()} == dict.fromkeys(NAMES, 4)


def test_no_private_tensor_is_on_the_wire(tmp_path: Path) -> None:
    """Ditto's private models, as bytes, are in no message, in neither direction."""
    lines = three(split_up(people(), 3), tmp_path)
    hub(asked(STAGES["ditto"]), tmp_path / "hub").run(lambda: lines)
    for line in lines.values():
        held = line.site.host.private
        wires = b"".join([*line.sent, *line.received])
        for client in held.slots:
            for leaf in leaves(held.read([client])):
                assert leaf[0].numpy().tobytes() not in wires
    shared = RunFolder.existing(tmp_path / "hub").final()
    assert shared is not None
    assert any(leaf.numpy().tobytes() in wires for leaf in leaves(shared.server) if leaf.numel() > 1)  # the probe finds


def test_a_site_keeps_the_personal_models_of_its_clients(tmp_path: Path) -> None:
    population = people()
    lines = three(split_up(population, 3), tmp_path)
    hub(asked(STAGES["ditto"]), tmp_path / "hub").run(lambda: lines)
    host = lines["north"].site.host
    models = sorted((tmp_path / "north" / "models" / "personal").iterdir())
    assert len(models) == 4
    found = 0
    for folder in models:
        model = load_personal(folder)
        number = list(host.population.ids).index(model.about["client"])
        if not host.private.holds(np.array([number]))[0]:  # it never trained, and made its model at the end
            continue
        rows = population.columns["x"][:5]
        private = host.private.read([number])
        (weight,), (bias,) = ([leaf[0] for leaf in leaves(private) if leaf.dim() == dims] for dims in (3, 2))
        expected = rows @ weight.T + bias
        np.testing.assert_allclose(model.predict(rows.numpy()), expected[:, 0].numpy(), rtol=1e-4, atol=1e-5)
        found += 1
    assert found


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a sum of too few": ({"least": 5}, {}, r"a sum of \d clients was asked for; this site sends sums of 5 or more"),
    "each client's values": (
        {"least": 2}, {"stage": STAGES["mocha"], "rows": "classification"},
        r"'mocha' sends every client's .* least = 1",
    ),
    "a sum of each cluster": (
        {"least": 2}, {"stage": STAGES["hypcluster"]}, "a row for each cluster that clients choose by themselves",
    ),
    "a strange method": ({"methods": ("fedprox",)}, {}, "carry out the method 'fedavg'; it allows fedprox"),
    "a robust rule": ({"least": 2}, {"robust": {"rule": "median"}}, "looks at single clients' messages"),
    "code by name": ({}, {"model": {"name": "small_methods:factory"}}, "runs no code by name"),
    "a file of the site": (
        {}, {"model": {"name": "mlp", "hidden": [4], "pretrained": "/etc/passwd"}}, "opens no files for the hub",
    ),
    "an attack": ({}, {"attack": {"kind": "sign-flip", "clients": 0.2}}, r"no experiment with \[attack\]"),
    "no noise": ({"epsilon": 1.0, "delta": 1e-3}, {}, "noise has to be added here: set privacy.local_noise"),
    "noise elsewhere": (
        {"epsilon": 1.0, "delta": 1e-3}, {"privacy": {"noise": 2.0, "delta": 1e-3}}, "set privacy.local_noise",
    ),
    "no statistics": ({"evaluate": False}, {}, "sends no statistics of its clients' scores"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_site_refuses(name: str, tmp_path: Path) -> None:
    rules, more, message = REFUSED[name]
    more = dict(more)
    stages, rows = more.pop("stage", FEDAVG), more.pop("rows", "regression")
    lines = three(split_up(people(rows), 3), tmp_path, Rules(**{"least": 1, **rules}))
    with pytest.raises(UserError, match=message):
        hub(asked(stages, **more), tmp_path / "hub").run(lambda: lines)
    log = read_log(tmp_path / "east" / "sent.jsonl")
    assert not any("sums" in line for line in log if line["operation"] == "train") or name == "no statistics"


@pytest.mark.parametrize("operation", ["examine", "personal", "move"])
def test_single_scores_and_models_are_no_operation_of_a_site(operation: str, tmp_path: Path) -> None:
    one = site(people(), tmp_path)
    train = asked(FEDAVG)
    rows = SiteHost(people(), tmp_path / "b", Rules(least=1)).make(_plain(train), None).experiment.split.test.support
    values: Any = {
        "examine": {"shared": {}, "own": None, "clients": np.arange(2), "support": rows, "parts": {}, "key": 0,
                    "rows": None, "by_row": ""},
        "personal": {"shared": {}, "own": None, "client": 0, "support": rows, "candidate": 0, "key": 0, "rows": None},
        "move": {"train": rows},
    }[operation]  # fmt: skip
    reply = one.answer(encode_call(Call(operation, values)))
    assert b"does not carry out" in reply


def _plain(config: Any) -> dict[str, Any]:
    from bespoke.deploy.federated.agreement import hub_config
    from bespoke.experiment.build import resolved

    return resolved(hub_config(config))


def test_scores_of_some_clients_are_not_summed(tmp_path: Path) -> None:
    """Two sums that differ in a client would show that client."""
    lines = three(split_up(people(), 3), tmp_path)
    hub(asked(FEDAVG), tmp_path / "hub").run(lambda: lines)
    host = lines["east"].site.host
    asked_before = host.last_scored["test"]
    clients = host.tables["test"].clients
    with pytest.raises(UserError, match="scores are made of all 4 clients of this site, never of some of them"):
        host.score(asked_before["shared"], None, clients[1:], "test", 0)


def test_a_sites_own_budget_ends_training_and_outlives_the_hubs_wishes(tmp_path: Path) -> None:
    """Two rounds fit the budget, by the exact Gaussian mechanism; a third, or another run, does not."""
    noise, delta = 3.0, 1e-3
    affordable = gaussian_epsilon(2 / noise**2, delta)
    rules = Rules(least=1, epsilon=affordable + 1e-6, delta=delta)
    privacy = {"local_noise": noise, "delta": delta, "public_schema": True, "public_statistics": True}
    stages = [{"method": "fedavg", "rounds": 2, "lr": 0.1}]
    lines = three(split_up(people(), 3), tmp_path, rules)
    hub(asked(stages, privacy=privacy), tmp_path / "hub").run(lambda: lines)
    assert lines["east"].site.host.budget.squared_mu == pytest.approx(2 / noise**2)
    again = three(split_up(people(), 3), tmp_path, rules)  # the same sites after a restart
    with pytest.raises(UserError, match=r"this site's privacy budget allows no further round: epsilon .* is spent"):
        hub(asked(stages, privacy=privacy, seed=9), tmp_path / "next").run(lambda: again)


def test_histograms_have_no_bin_of_few_clients() -> None:
    edges = (-np.inf, -1.0, 0.0, 1.0, np.inf)
    values = np.array([-5.0, -0.5, -0.4, 0.5, 0.6, 0.7, 7.0])
    assert histogram(values, edges, 1) == [[-np.inf, -1.0, 1], [-1.0, 0.0, 2], [0.0, 1.0, 3], [1.0, np.inf, 1]]
    assert histogram(values, edges, 3) == [[-np.inf, 0.0, 3], [0.0, np.inf, 4]]
    assert histogram(values[:2], edges, 3) == []
    for least in (1, 2, 3, 4):
        for draw in range(20):
            some = np.random.default_rng(draw).normal(size=12)
            bins = histogram(some, edges, least)
            assert sum(n for *_, n in bins) == 12
            assert all(n == 0 or n >= least for *_, n in bins)


def test_sites_that_differ_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    parts = split_up(people(), 3)
    about: Any = {**parts[1].about, "features": ["a", "b", "d"]}
    from dataclasses import replace

    parts[1] = replace(parts[1], about=about)
    lines = three(parts, tmp_path)
    with pytest.raises(UserError, match=r"site north and site east differ in features: .* give all sites one schema"):
        hub(asked(FEDAVG), tmp_path / "hub").run(lambda: lines)
    assert all(line["operation"] == "describe" for line in read_log(tmp_path / "east" / "sent.jsonl"))


def test_a_site_of_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = three(split_up(people(), 3), tmp_path)
    host = lines["west"].site.host
    plain = host.describe
    monkeypatch.setattr(host, "describe", lambda **values: {**plain(**values), "version": "0.0.1"})
    with pytest.raises(UserError, match=r"site west runs bespoke 0\.0\.1 .* install the same release"):
        hub(asked(FEDAVG), tmp_path / "hub").run(lambda: lines)


def test_means_and_deviations_are_those_of_all_training_rows(tmp_path: Path) -> None:
    """Three sites whose rows lie far apart are standardized alike, and nobody is told where a site's lie."""
    from dataclasses import replace

    from bespoke.data.splits import cross_silo

    population = people()
    x = population.columns["x"].clone() * torch.tensor([3.0, 1.0, 10.0]) + torch.tensor([100.0, 0.0, -7.0])
    about: Any = {**population.about, "numeric": [True] * 3, "standardize": {"features": "global", "target": True}}
    population = replace(population, columns={**population.columns, "x": x}, about=about)
    lines = three(split_up(population, 3), tmp_path)
    config = asked(FEDAVG, data={"population": "people"})
    hub(config, tmp_path / "hub").run(lambda: lines)
    agreed = Agreement.read(tmp_path / "hub")
    assert agreed is not None
    assert agreed.learned is not None
    train = cross_silo(population, config.split.fractions, config.seed).train
    rows, _ = train.of(train.clients)
    for place, name in enumerate("abc"):
        values = x.numpy()[rows, place].astype(np.float64)
        assert agreed.learned[name] == pytest.approx([values.mean(), values.std()], rel=1e-9)
    for line in lines.values():
        there = line.site.host.population.columns["x"].numpy()
        own = x.numpy()[[i for i, c in enumerate(np.repeat(population.ids, population.sizes()))
                         if c in line.site.host.population.ids]]  # fmt: skip
        mean, deviation = (np.array([agreed.learned[name][i] for name in "abc"]) for i in (0, 1))
        np.testing.assert_allclose(there, (own - mean) / deviation, rtol=1e-4, atol=1e-4)
    entry = json.loads((tmp_path / "hub" / "ledger.jsonl").read_text().splitlines()[0])
    assert entry["phase"] == "statistics"
    assert entry["bytes_up"] > 0


def test_answers_come_from_the_wire_alone(tmp_path: Path) -> None:
    """A tampered message is refused by the site, and a tampered answer by the hub."""
    one = site(people(), tmp_path)
    message = bytearray(encode_call(Call("hello")))
    message[-1] ^= 1
    assert b"damaged" in one.answer(bytes(message))
    lines = three(split_up(people(), 3), tmp_path)
    with pytest.raises(UserError, match="the limit of a message is 100"):
        Wired(lines["east"], "site east", limit=100).start(
            Call("describe", {"config": _plain(asked(FEDAVG)), "learned": None})
        )
