"""The studio's server: who may ask, what is answered, and what is kept of people who add themselves."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bespoke as library
from bespoke import pretrained
from bespoke.errors import UserError
from bespoke.generation.voices import Voices
from bespoke.storage import open_arrays
from bespoke.studio import demo
from bespoke.studio.map import user_of
from bespoke.studio.people import People, rows_of
from command import bespoke, refused
from small_language import WIDTH, tiny_model
from test_fedpc import settings

pytest.importorskip("starlette")
pytest.importorskip("transformers")

TOKEN, HOST = "secret-token", "127.0.0.1:8765"
HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Voices:
    folder = tmp_path_factory.mktemp("studio")
    library.run(settings(folder), folder / "run")
    return Voices(folder / "run")


@pytest.fixture
def people(voices: Voices, tmp_path: Path) -> People:
    return People(voices, tmp_path / "people")


@pytest.fixture
def client(people: People) -> Iterator[Any]:
    from starlette.testclient import TestClient

    from bespoke.studio.app import studio_app

    with TestClient(studio_app(people, TOKEN, [HOST]), base_url=f"http://{HOST}") as found:
        found.headers["Authorization"] = f"Bearer {TOKEN}"
        yield found


def events(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Server-sent events, as the standard has them."""
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


# -- who may ask -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer secret-toke", "Bearer secret-token2", "Basic secret-token"])
def test_without_the_token_nothing_is_answered(client: Any, given: str) -> None:
    for method, path in (("GET", "facts"), ("GET", "map"), ("POST", "texts"), ("POST", "people"), ("GET", "nothing")):
        answer = client.request(method, f"/api/{path}", headers={"Authorization": given})
        assert answer.status_code == 401
        assert "anna" not in answer.text
    page = client.get("/", headers={"Authorization": ""})
    assert page.status_code == 200  # it says nothing of anybody
    assert "anna" not in page.text


def test_another_name_for_this_machine_is_refused(client: Any) -> None:
    """A page of evil.example that resolves to 127.0.0.1 sends its own name."""
    for name in ("evil.example:8765", "127.0.0.1", "127.0.0.1:80", "evil.example", ""):
        assert client.get("/api/facts", headers={"Host": name}).status_code == 421
        assert client.get("/", headers={"Host": name}).status_code == 421


def test_a_browser_may_load_nothing_from_elsewhere(client: Any) -> None:
    page = client.get("/")
    rules = dict(rule.strip().split(" ", 1) for rule in page.headers["Content-Security-Policy"].split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    assert "http" not in page.text.replace("http-equiv", "")
    assert client.get("/api/nothing").headers["X-Content-Type-Options"] == "nosniff"
    assert "Plotly" in client.get("/plotly.js").text[:100_000]


def test_floods_are_refused(client: Any) -> None:
    answer = client.post("/api/people", content=b"x" * 70_000)
    assert answer.status_code == 413
    said = (b"x" * 1000 for _ in range(70))  # without saying how long it is
    assert client.post("/api/people", content=said).status_code == 413


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("texts", b"{", "JSON"),
        ("texts", b'{"prompt": "w1", "voices": []}', "voices"),
        ("texts", b'{"prompt": "w1", "voices": [{"kind": "plain"}], "length": 100000}', "length"),
        ("texts", b'{"prompt": "w1", "voices": [{"kind": "plain"}], "temperature": NaN}', "temperature"),
        ("perplexity", b'{"sentence": " ", "voices": [{"kind": "plain"}]}', "no words"),
        ("perplexity", b'{"sentence": "w1", "voices": [{"kind": "user", "id": "nobody"}]}', "unknown user"),
        ("perplexity", b'{"sentence": "w1", "voices": [{"kind": "person", "id": "../../run"}]}', "no person"),
        ("people", b'{"name": " ", "sentences": ["w1"]}', "a name of 1 to 60"),
        ("people", b'{"name": "Eve", "sentences": [], "context": "x"}', "1 to 200 sentences"),
        ("people", b'{"name": "Eve", "sentences": ["w1"], "context": "nowhere"}', "unknown context"),
    ],
)
def test_bad_requests_are_told_in_words(client: Any, path: str, body: bytes, told: str) -> None:
    answer = client.post(f"/api/{path}", content=body)
    assert answer.status_code == 400
    assert told in answer.json()["error"]


# -- what is answered --------------------------------------------------------------------------------------------------
def test_texts_stream_as_the_command_writes_them(client: Any, voices: Voices) -> None:
    asked = [{"kind": "user", "id": "anna", "context": "y"}, {"kind": "anybody"}, {"kind": "plain"}]
    answer = client.post("/api/texts", json={"prompt": "w1 w2", "voices": asked, "length": 6, "seed": 3})
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = events(answer.text)
    assert [name for name, _ in found[:3]] == ["making"] * 3
    assert found[-1][0] == "end"
    texts = ["", "", ""]
    for name, data in found:
        if name == "piece":
            texts[data["voice"]] += data["text"]
    common = {"length": 6, "seed": 3}
    records = [
        *library.generate(voices.path, ["w1 w2"], users=["anna"], contexts=["y"], **common),
        *library.generate(voices.path, ["w1 w2"], plain=True, **common),
    ]
    assert texts == [record["text"] for record in records]
    problem = client.post("/api/texts", json={"prompt": "w1 " * 60, "voices": [{"kind": "plain"}]})
    assert events(problem.text)[-1][0] == "problem"


def test_perplexity_is_that_of_transformers(client: Any) -> None:
    body = {"sentence": "w5 w6 w7", "voices": [{"kind": "plain"}, {"kind": "user", "id": "bert"}]}
    found = client.post("/api/perplexity", json=body).json()
    ids = torch.tensor([[1, 8, 9, 10]])
    loss = pretrained.language_model(tiny_model())(input_ids=ids, labels=ids).loss
    assert found["tokens"] == 3
    assert found["voices"][0] == {"label": "no prefix", "perplexity": pytest.approx(math.exp(float(loss)), rel=1e-4)}
    assert found["voices"][1]["label"] == "bert, y"


def test_facts_name_users_unless_the_run_is_private(client: Any, people: People, monkeypatch: Any) -> None:
    facts = client.get("/api/facts").json()
    assert [(user["id"], user["context"]) for user in facts["users"]][:2] == [("anna", "x"), ("bert", "y")]
    assert facts["contexts"] == ["x", "y"]
    monkeypatch.setattr(people.voices, "private", True)
    for path in ("facts", "map"):
        assert not any(name in client.get(f"/api/{path}").text for name in ("anna", "bert", "carl", "dora"))
    body = {"sentence": "w5", "voices": [{"kind": "user", "id": "ann"}]}
    assert "anna" not in client.post("/api/perplexity", json=body).json()["error"]


# -- people ------------------------------------------------------------------------------------------------------------
def test_a_person_is_learned_kept_and_deleted(client: Any, people: People) -> None:
    sentences = [f"w{i} w{i + 1} w7 w8" for i in range(5)]
    made = client.post("/api/people", json={"name": HOSTILE, "sentences": sentences, "context": "y"})
    assert made.status_code == 201, made.text
    person = made.json()
    place = people.folder / person["id"]
    assert sorted(path.name for path in place.iterdir()) == ["voice.json", "voice.safetensors"]
    assert place.stat().st_mode & 0o077 == 0
    table = open_arrays(place / "voice.safetensors")[0]["prefix"].clone()
    assert table.shape == (2, 1, WIDTH)
    assert not any(b"w7 w8" in path.read_bytes() for path in place.iterdir())  # the sentences are not kept
    who = {"kind": "person", "id": person["id"]}
    asked = {"sentence": sentences[0], "voices": [who, {"kind": "anybody", "context": "y"}]}
    assert client.post("/api/perplexity", json=asked).json()["voices"][0]["label"] == f"{HOSTILE}, y"
    tokens = [people.voices.tokens(sentence) for sentence in sentences]
    own, new = people.voice(person["id"]), people.voices.anybody("y")
    assert sum(math.log(own.perplexity(row)) for row in tokens) < sum(math.log(new.perplexity(row)) for row in tokens)
    assert any(row["name"] == HOSTILE for row in client.get("/api/map").json()["rows"])
    again = client.post("/api/people", json={"name": HOSTILE, "sentences": sentences, "context": "y"})
    assert "already" in again.json()["error"]
    assert client.delete(f"/api/people/{person['id']}").status_code == 200
    assert not place.exists()
    assert client.get("/api/facts").json()["people"] == []
    assert client.delete(f"/api/people/{person['id']}").status_code == 400


def test_a_person_is_what_the_run_makes_of_a_withheld_client(voices: Voices) -> None:
    """The method's own way for new users, written out: psi_0, two steps of Adam on psi and phi, on all sentences."""
    sentences = ["w1 w2 w3", "w4 w5 w6 w7"]
    population = rows_of(voices, sentences, "y")
    assert population.columns["y"][:, :5].tolist() == [[4, 5, 6, -1, -1], [7, 8, 9, 10, -1]]
    assert population.columns["x"][:, :5].tolist() == [[1, 4, 5, 6, 1], [1, 7, 8, 9, 10]]
    found = voices.models.newcomer(population)["prefix"]
    held = voices.models.server["params"]
    psi, phi = (held[part]["prefix"].clone().requires_grad_() for part in ("anybody", "contexts"))
    optimizer, start, mu = torch.optim.Adam([psi, phi], lr=0.01), phi.detach().clone(), 1.0
    rows = {name: population.columns[name] for name in ("x", "y", "context")} | {"mask": torch.ones(2)}
    task: Any = voices.experiment.task
    for _ in range(2):
        optimizer.zero_grad()
        slope = task.gradient({"prefix": (psi * phi).detach()}, rows)["prefix"]
        psi.grad = (slope * phi.detach()).sum(0, keepdim=True)
        phi.grad = slope * psi.detach() + mu * (phi.detach() - start)
        optimizer.step()
    torch.testing.assert_close(found, (psi * phi).detach(), rtol=1e-4, atol=1e-6)


def test_a_person_of_another_run_or_a_damaged_one_is_passed_over(people: People) -> None:
    person = people.add("Ada", ["w1 w2 w3"], "x")
    people.voices.models.server["params"]["anybody"]["prefix"] += 1
    try:
        assert People(people.voices, people.folder.parent).all() == []
    finally:
        people.voices.models.server["params"]["anybody"]["prefix"] -= 1
    (people.folder / person.id / "voice.json").write_text("{")
    assert people.all() == []
    with pytest.raises(UserError, match="no person"):
        people.voice(person.id)


def test_a_users_embedding_is_found_in_its_products() -> None:
    random = np.random.default_rng(0)
    psi, phi = random.normal(size=5), random.normal(size=(3, 5))
    np.testing.assert_allclose(user_of(psi * phi, phi), psi)


# -- the command -------------------------------------------------------------------------------------------------------
def test_a_small_run_is_made_on_the_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESPOKE_MODELS", str(tmp_path / "none"))
    refused(bespoke("studio", "--port", 0), "no language model at hand", "--model smollm2", "BESPOKE_MODELS")
    monkeypatch.setenv("BESPOKE_MODELS", str(Path(tiny_model()).parent))
    assert tiny_model() in demo.models_at_hand()
    whole = demo.settings
    few = {"rounds": 1, "steps": 2, "tune_steps": 1}
    monkeypatch.setattr(demo, "settings", lambda *a: {**(s := whole(*a)), "stage": [{**s["stage"][0], **few}]})
    run = demo.small_run(tiny_model(), tmp_path / "demo")
    found = Voices(run)
    assert len(found.users) == 4
    assert found.contexts == ["harbour", "kitchen"]
    written = (run / "result.json").stat().st_mtime_ns
    assert demo.small_run(tiny_model(), tmp_path / "demo") == run
    assert (run / "result.json").stat().st_mtime_ns == written  # made once


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RUN", "--model", "smollm2"], ["leave one of the two out"]),
        (["RUN", "--host", "0.0.0.0"], ["name the one address"]),
        (["RUN", "--host", "evil.example"], ["an address of this machine in numbers"]),
        (["nowhere", "--port", "0"], ["there is no run folder"]),
    ],
)
def test_bad_arguments_are_told_in_words(voices: Voices, arguments: list[str], words: list[str]) -> None:
    refused(bespoke("studio", *[voices.path if word == "RUN" else word for word in arguments]), *words)


def test_a_missing_package_is_named(voices: Voices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refused(bespoke("studio", voices.path), "'uvicorn'", "pip install 'bespoke-fl[studio]'")


def test_only_a_few_wait_for_the_model() -> None:
    """One sits, four wait, the sixth is sent away; then all five have had their turn, one at a time."""
    from bespoke.studio.app import MOST_WAITING, Busy, Desk

    async def day() -> tuple[int, int]:
        desk, served, most, inside = Desk(), 0, 0, 0

        async def guest() -> None:
            nonlocal served, most, inside
            async with desk():
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.01)
                inside -= 1
                served += 1

        guests = [asyncio.create_task(guest()) for _ in range(1 + MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Busy):
            await guest()
        await asyncio.gather(*guests)
        return served, most

    assert asyncio.run(day()) == (5, 1)
