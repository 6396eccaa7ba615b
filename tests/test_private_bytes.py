"""Private state never leaves: search every byte that crossed a pipe or was written outside private/ for it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation import places as places_module
from bespoke.federation.engine import Choice
from bespoke.federation.workers import Worker
from bespoke.messages.compress import Compress
from bespoke.methods import FedEmbed, FedPC, FedPCSplit
from bespoke.methods.parts.assignment import SelfOrganizingMap
from bespoke.privacy.settings import PrivacyConfig
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.storage import open_arrays
from small_language import prefix_world
from small_methods import LeakyDitto, SecretDitto
from small_worlds import World, world

WINDOW = 16  # bytes: four floats in a row do not occur by chance
ROUNDS = 4


class Wire:
    """A pipe that keeps what crosses it, to the byte: what Connection.send and recv do, with a look in between."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe
        self.sent: list[bytes] = []  # to the worker
        self.received: list[bytes] = []  # from the worker

    def send(self, message: Any) -> None:
        payload = bytes(ForkingPickler.dumps(message))
        self.sent.append(payload)
        self.pipe.send_bytes(payload)

    def recv(self) -> Any:
        payload = self.pipe.recv_bytes()
        self.received.append(payload)
        return ForkingPickler.loads(payload)

    def send_bytes(self, array: Any) -> None:
        self.sent.append(bytes(array))
        self.pipe.send_bytes(array)

    def recv_bytes_into(self, array: bytearray) -> None:
        self.pipe.recv_bytes_into(array)
        self.received.append(bytes(array))

    def close(self) -> None:
        self.pipe.close()


def windows(row: bytes) -> set[bytes]:
    """All stretches of four floats; those that repeat a value (zeros, say) may well stand elsewhere."""
    floats = np.frombuffer(row, dtype=np.float32)
    places = range(len(floats) - WINDOW // 4 + 1)
    return {
        floats[i : i + 4].tobytes()
        for i in places
        if len(set(floats[i : i + 4].tolist())) == 4 and floats[i : i + 4].all()
    }


def found_in(haystack: bytes, needles: set[bytes]) -> set[bytes]:
    """Which needles occur at any offset of the haystack."""
    return {needle for needle in needles if needle in haystack}


def run(
    kind: type[SecretDitto],
    folder: Path,
    workers: int,
    monkeypatch: pytest.MonkeyPatch,
    place: World | None = None,
    **more: Any,
) -> tuple[list[Wire], World]:
    """A whole run with its wires tapped; private rows are kept from every checkpoint, one a round."""
    place = place or world("linear")
    wires: list[Wire] = []

    class Tapped(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.pipe: Any = Wire(self.pipe)
            wires.append(self.pipe)

    monkeypatch.setattr(places_module, "Worker", Tapped)
    monkeypatch.setattr(RunFolder, "prune", lambda *_: None)  # segments that later ones took over stay to be looked for
    method = kind(place.task, lr=0.1, batch_size=4)
    metric = "perplexity" if place.name == "prefix" else "mse"
    experiment = Experiment(
        "secret", place.population, place.split, method.task, (Stage(method, ROUNDS),), metric, cohort=5, **more
    )  # fmt: skip
    how = Choice(False, 1, workers, 1, "autograd", "")
    Run(experiment, RunFolder.create(folder, ""), how=how, checkpoint_seconds=0.0).run()
    return wires, place


def private_rows(folder: Path) -> list[bytes]:
    """The rows of every segment: each client's private state after each of its rounds."""
    rows: list[bytes] = []
    for path in sorted((folder / "private").glob("*.safetensors")):
        rows += [row.tobytes() for row in open_arrays(path)[0]["rows"].numpy()]
    return rows


@pytest.fixture(scope="module")
def tapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Wire]]:
    folder = tmp_path_factory.mktemp("secret") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        wires, _ = run(SecretDitto, folder, 2, monkeypatch)
    return folder, wires


def secrets(folder: Path, most: int = 1000) -> set[bytes]:
    """What is searched for: the stretches of every private row, of long rows `most` from all over them."""
    rows = set(private_rows(folder))
    assert len(rows) == 5 * ROUNDS  # everyone of every cohort
    needles: set[bytes] = set()
    for row in rows:
        found = sorted(windows(row))
        needles.update(found[:: -(-len(found) // most)])
    assert len(needles) > 100
    return needles


def test_no_private_bytes_cross_a_pipe(tapped: tuple[Path, list[Wire]]) -> None:
    """In neither direction, in any message: rounds, checkpoints, the making and scoring of personal models."""
    folder, wires = tapped
    needles = secrets(folder)
    assert len(wires) == 2
    messages = [payload for wire in wires for payload in (*wire.received, *wire.sent)]
    assert len(messages) >= 2 * 2 * (ROUNDS + 3)
    assert found_in(b"\0".join(messages), needles) == set()


def test_no_private_bytes_lie_outside_the_private_folder(tapped: tuple[Path, list[Wire]]) -> None:
    """Server state, logs, results: the checkpoint's server file above all."""
    folder, _ = tapped
    needles = secrets(folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "private"]
    assert any(path.parent.name == "checkpoints" for path in files)
    for path in files:
        assert found_in(path.read_bytes(), needles) == set(), path
    # and the search does find them where they belong
    kept = b"".join(path.read_bytes() for path in (folder / "private").iterdir())
    assert found_in(kept, needles) == needles


def test_the_search_finds_what_is_there(tapped: tuple[Path, list[Wire]]) -> None:
    """Positive control: one window of one row, planted at an odd offset of the true traffic."""
    folder, wires = tapped
    needles = secrets(folder)
    planted = sorted(needles)[7]
    traffic = b"".join(wires[0].received)
    assert found_in(traffic[:101] + planted + traffic[101:], needles) == {planted}


def test_a_method_that_sends_its_secret_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: the same method, but for one declared field that carries private numbers."""
    wires, _ = run(LeakyDitto, tmp_path / "run", 1, monkeypatch)
    needles = secrets(tmp_path / "run")
    leaked = found_in(b"".join(wires[0].received), needles)
    # the 8 secret numbers make five windows a row; whatever overlaps the model stays unseen
    assert len(leaked) == 5 * 5 * ROUNDS


def test_in_process_the_server_sees_no_private_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a pipe: what server_round is handed, and all files."""
    seen: list[bytes] = []
    before = SecretDitto.server_round

    def watched(self: SecretDitto, server: Any, cohort: Any) -> Any:
        seen.append(bytes(ForkingPickler.dumps(replace(cohort, sums=_arrays(cohort.sums), each=_arrays(cohort.each)))))
        return before(self, server, cohort)

    monkeypatch.setattr(SecretDitto, "server_round", watched)
    run(SecretDitto, tmp_path / "run", 0, monkeypatch)
    needles = secrets(tmp_path / "run")
    assert len(seen) == ROUNDS
    assert found_in(b"".join(seen), needles) == set()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.parent.name != "private":
            assert found_in(path.read_bytes(), needles) == set(), path


def test_neither_state_nor_memory_leaves_under_privacy_and_compression(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is for what leaves: private state has none, and neither it nor what compression left over is ever seen."""
    privacy = PrivacyConfig(clip=0.5, noise=1.0, adaptive=True)
    squeezed = (Compress(0.3, "stochastic", least=1),)
    wires, _ = run(SecretDitto, tmp_path / "run", 2, monkeypatch, transforms=squeezed, privacy=privacy)
    needles = secrets(tmp_path / "run")
    messages = [payload for wire in wires for payload in (*wire.received, *wire.sent)]
    assert found_in(b"\0".join(messages), needles) == set()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.parent.name != "private":
            assert found_in(path.read_bytes(), needles) == set(), path
    kept = open_arrays(next((tmp_path / "run" / "private").glob("*.safetensors")))[0]["rows"]
    assert kept.shape[1] == 4 * (4 + 8 + 4)  # the model, the secret, and the memory of what was not sent


@pytest.mark.parametrize(
    "knobs", [{"assignment": "personal"}, {"assignment": "som", "som": SelfOrganizingMap(update="sums")}]
)
def test_embeddings_and_heads_of_their_own_do_not_leave(
    knobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedEmbed: the embedding, and with assignment "personal" the head, are in no message and in no file of others."""
    _stays(partial(FedEmbed, embedding_lr=0.05, **knobs), tmp_path, monkeypatch)


def test_a_users_embedding_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedPC: neither psi nor Adam's moments of it are in a message or in a file of others."""
    _stays(partial(FedPC, steps=4), tmp_path, monkeypatch)


def test_a_users_head_does_not_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split-Learning: a user's last layer, 64 words by 16, is in no message and in no file of others."""
    _stays(partial(FedPCSplit, steps=4), tmp_path, monkeypatch, prefix_world())
    kept = open_arrays(next((tmp_path / "run" / "private").glob("*.safetensors")))[0]["rows"]
    assert kept.shape[1] == 4 * 64 * 16


def _stays(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: World | None = None) -> None:
    wires, _ = run(made, tmp_path / "run", 2, monkeypatch, place)
    needles = secrets(tmp_path / "run", most=40)
    messages = [payload for wire in wires for payload in (*wire.received, *wire.sent)]
    assert found_in(b"\0".join(messages), needles) == set()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.parent.name != "private":
            assert found_in(path.read_bytes(), needles) == set(), path


def _arrays(tree: Any) -> Any:
    return {n: _arrays(v) for n, v in tree.items()} if isinstance(tree, dict) else tree.numpy()
