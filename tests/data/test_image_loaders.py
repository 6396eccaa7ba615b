"""emnist, femnist, landmarks, adni and vehicle: small files of the published layouts, made here, and other layouts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io

from bespoke.data.sources.registry import load_source
from bespoke.data.splits import cross_silo
from bespoke.errors import UserError
from bespoke.experiment.config import ExperimentConfig
from bespoke.experiment.prepare import make_split
from bespoke.experiment.presets import Preset
from bespoke.models import build_task
from bespoke.models.mobilenet import MobileNetV2
from bespoke.models.networks import FedAvgCNN, Linear

# EMNIST

WRITERS = [f"f{number:04d}_{number}" for number in range(6)]


def write_emnist(folder: Path, change: Any = lambda pixels, labels: {"pixels": pixels, "label": labels}) -> Path:
    h5py = pytest.importorskip("h5py")
    path = folder / "emnist" / "fed_emnist_train.h5"
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        for number, writer in enumerate(WRITERS):
            pixels = np.ones((number + 2, 28, 28), dtype=np.float32)
            pixels[:, 3, 4] = number * 51 / 255
            labels = (np.arange(number + 2, dtype=np.int32) * 11) % 62
            for field, array in change(pixels, labels).items():
                file[f"examples/{writer}/{field}"] = array
    return path


def test_emnist(folder: Path) -> None:
    write_emnist(folder)
    population = load_source("emnist", validation=1, test=2)
    assert list(population.ids) == WRITERS
    assert population.sizes().tolist() == [2, 3, 4, 5, 6, 7]
    last = population.columns["x"][-1]
    assert (int(last[0]), int(last[3 * 28 + 4])) == (255, 255)
    assert population.columns["x"][population.offsets[3], 3 * 28 + 4] == 153
    assert population.columns["y"][:5].tolist() == [0, 11, 0, 11, 22]
    assert [population.about["classes"][i] for i in (0, 11, 37, 61)] == ["0", "B", "b", "z"]
    network = build_task(population.about).network
    assert isinstance(network, FedAvgCNN)
    assert network.outputs == 62


def test_emnist_splits_writers_as_motley_does(folder: Path) -> None:
    write_emnist(folder)
    population = load_source("emnist", validation=1, test=2)
    order = np.random.RandomState(13).permutation(WRITERS).tolist()
    roles = dict(zip(population.ids, population.columns["role"].numpy()[population.offsets[:-1]].tolist()))
    assert [roles[writer] for writer in order] == [1, 2, 2, 0, 0, 0]
    assert population.about["roles"] == {"train": 3, "validation": 1, "test": 2}
    config = ExperimentConfig.model_validate(
        {
            "data": {"source": "emnist"},
            "split": {"protocol": "cross-device"},
            "stage": [{"method": "fedavg", "rounds": 1}],
        }
    )
    split = make_split(population, config)  # nobody else is drawn for validation
    assert [population.ids[c] for c in split.selection.validation.clients] == [order[0]]
    assert sorted(population.ids[c] for c in split.train.clients) == sorted(order[3:])
    with pytest.raises(UserError, match=r"'validation' and 'test' .* are 400 and 500.* some of the 6 clients"):
        load_source("emnist")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, y: {"pixels": p}, "examples/f0000_0 without label, expected examples/<WRITER>/pixels and label"),
        (lambda p, y: {"pixels": p[:, :27], "label": y}, r"pixels of shape \(2, 27, 28\), expected \(images, 28, 28\)"),
        (lambda p, y: {"pixels": p * 255, "label": y}, "pixels that are not from 0 to 1"),
        (lambda p, y: {"pixels": p, "label": y + 60}, "from 60 to 71, expected whole numbers from 0 to 61"),
        (lambda p, y: {"pixels": p, "label": y[:-1]}, "as many rows in each"),
    ],
)
def test_emnist_of_another_layout(folder: Path, change: Any, message: str) -> None:
    write_emnist(folder, change)
    with pytest.raises(UserError, match=message):
        load_source("emnist", validation=1, test=1)


# FEMNIST


def leaf(users: dict[str, list[int]], width: int = 784) -> dict[str, Any]:
    return {
        "users": list(users),
        "num_samples": [len(labels) for labels in users.values()],
        "user_data": {user: {"x": [[1.0] * width] * len(labels), "y": labels} for user, labels in users.items()},
    }


def write_femnist(folder: Path, train: object, test: object) -> Path:
    for part, content in (("train", train), ("test", test)):
        (folder / "femnist" / part).mkdir(parents=True, exist_ok=True)
        (folder / "femnist" / part / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(json.dumps(content))
    return folder / "femnist"


def test_femnist_with_writers_in_both_folders(folder: Path) -> None:
    write_femnist(folder, leaf({"f1": [3, 4], "f0": [61]}), leaf({"f1": [5]}))
    population = load_source("femnist")
    assert list(population.ids) == ["f0", "f1"]
    assert population.columns["y"].tolist() == [61, 3, 4, 5]
    assert "role" not in population.columns
    assert population.columns["x"].unique().tolist() == [255]


def test_femnist_split_by_writer(folder: Path) -> None:
    write_femnist(folder, leaf({"f1": [3, 4]}), leaf({"f0": [5]}))
    population = load_source("femnist")
    assert population.columns["role"].tolist() == [2, 0, 0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"users": []}, r"the keys \['users'\], expected LEAF's users, num_samples and user_data"),
        (leaf({"f0": [1]}, width=783), r"user 'f0' with x of shape \(1, 783\), expected \(1, 784\)"),
        ({**leaf({"f0": [1]}), "num_samples": [2]}, r"x of shape \(1, 784\), expected \(2, 784\), as num_samples"),
        ({**leaf({"f0": [1]}), "user_data": {}}, "user 'f0' without x and y"),
        (leaf({"f0": [62]}), "from 62 to 62, expected whole numbers from 0 to 61"),
        ([1, 2], "the keys list"),
    ],
)
def test_femnist_of_another_layout(folder: Path, content: Any, message: str) -> None:
    write_femnist(folder, leaf({"f1": [3]}), content)
    with pytest.raises(UserError, match=message):
        load_source("femnist")


def test_femnist_without_files(folder: Path) -> None:
    with pytest.raises(UserError, match=r"needs the folder femnist/train.*preprocess.sh"):
        load_source("femnist")
    place = write_femnist(folder, leaf({"f1": [3]}), leaf({"f1": [3]}))
    next((place / "train").iterdir()).write_text('{"users": [')
    with pytest.raises(UserError, match="no readable JSON"):
        load_source("femnist")
    next((place / "train").iterdir()).unlink()
    with pytest.raises(UserError, match="no JSON file among 0"):
        load_source("femnist")


# Landmarks


def write_landmarks(
    folder: Path, rows: list[str], header: str = "user_id,image_id,class", images: Any = ("a", "b", "c", "d")
) -> Path:
    image = pytest.importorskip("PIL.Image")
    place = folder / "landmarks"
    (place / "images").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(images):
        image.new("RGB", (60 + number, 40), (250, 60 * number, 0)).save(place / "images" / f"{name}.jpg", quality=95)
    (place / "federated_train.csv").write_text("\n".join([header, *rows]) + "\n")
    (place / "test.csv").write_text("image_id,class\nd,7\n")
    return place


MAPPING = ["9,a,5", "10,b,2027", "9,c,0"]


def test_landmarks(folder: Path) -> None:
    place = write_landmarks(folder, MAPPING)
    population = load_source("landmarks", side=32, validation_clients=0, test_clients=1)
    assert list(population.ids) == ["10", "9"]
    assert population.columns["y"].tolist() == [2027, 5, 0]
    x = population.columns["x"].reshape(3, 3, 32, 32)
    assert (x[:, 0] > 245).all()  # red everywhere; green tells the images apart
    assert x[:, 1].float().mean((1, 2)).numpy() == pytest.approx([60, 0, 120], abs=3)
    assert sorted(population.columns["role"].tolist()) in ([0, 0, 2], [0, 2, 2])
    network = build_task(population.about).network
    assert isinstance(network, MobileNetV2)
    assert (network.classes, network.side) == (2028, 32)
    kept = list((folder.parent / "home").rglob("landmarks-32-*.npy"))
    assert len(kept) == 1  # decoded once
    written = kept[0].stat().st_mtime_ns
    load_source("landmarks", side=32, validation_clients=0, test_clients=1)
    assert kept[0].stat().st_mtime_ns == written
    write_landmarks(folder, MAPPING, images=("c", "b", "a"))  # other pictures under the same names
    assert load_source("landmarks", side=32, validation_clients=0, test_clients=1).columns["x"][1, 1024] > 100
    assert place.is_dir()


def test_landmarks_with_the_published_test_file(folder: Path) -> None:
    write_landmarks(folder, MAPPING)
    population = load_source("landmarks", side=32, validation_clients=0, test="file")
    assert list(population.ids) == ["10", "9", "test.csv"]
    assert population.columns["role"].tolist() == [0, 0, 0, 2]


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (["a,5"], "image_id,class", r"columns \['image_id', 'class'\], expected user_id, image_id, class"),
        (["9,a,2028"], "user_id,image_id,class", "image 'a' of class '2028' in line 2, expected .* 0 to 2027"),
        (["9,a,x"], "user_id,image_id,class", "class 'x'"),
        (["9,a,1", "8,gone,2"], "user_id,image_id,class", r"no gone.jpg \(1 of 2 images are missing\)"),
        ([], "user_id,image_id,class", "found no rows"),
    ],
)
def test_landmarks_of_another_layout(folder: Path, rows: Any, header: str, message: str) -> None:
    write_landmarks(folder, rows, header)
    with pytest.raises(UserError, match=message):
        load_source("landmarks", side=32, validation_clients=0, test_clients=0)


def test_landmarks_with_a_damaged_image(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write_landmarks(folder, MAPPING)
    (place / "images" / "c.jpg").write_bytes((place / "images" / "c.jpg").read_bytes()[:200])
    with pytest.raises(UserError, match=r"c.jpg is damaged.*expected a whole JPEG or PNG"):
        load_source("landmarks", side=32, validation_clients=0, test_clients=0)
    assert not list((folder.parent / "home").rglob("*.npy*"))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'bespoke-fl\[images\]'"):
        load_source("landmarks", side=32, validation_clients=0, test_clients=0)


# ADNI

SCANS = ["0295,I10,1.25", "0413,I11,0.9"]


def write_adni(folder: Path, names: list[str], labels: Any = SCANS) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(names):
        path = folder / "adni" / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("L", (64, 48), 10 * number).save(path)
    (folder / "adni" / "labels.txt").write_text("\n".join(labels) + "\n")


def test_adni(folder: Path) -> None:
    scans = ("CPS", "0295_s1_I10"), ("CPS", "0413_s1_I11"), ("CPS", "0295_s2_I10"), ("GEMS", "0413_s1_I11")
    names = [f"{vendor}/ADNI_002_S_{scan}.png" for vendor, scan in scans]
    write_adni(folder, [*names, "GEMS/ADNI_002_S_0999_s1_I12.png"])
    population = load_source("adni")
    assert list(population.ids) == ["CPS", "GEMS"]
    assert population.sizes().tolist() == [3, 1]
    # the images of a scan stand together, whatever their names
    assert population.columns["y"][:3].tolist() in ([1.25, 1.25, np.float32(0.9)], [np.float32(0.9), 1.25, 1.25])
    assert population.columns["x"].shape == (4, 1024)
    assert population.columns["x"][3].unique().tolist() == [30]
    assert population.about["notes"][0] == "1 images without a score are left out."
    task = build_task(population.about)
    assert isinstance(task.network, FedAvgCNN)
    assert (task.network.outputs, task.network.side, task.factor) == (1, 32, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", ["random", "stored", "motley"])
def test_no_scan_of_adni_crosses_a_split(folder: Path, order: str) -> None:
    """Ten scans of four images, told apart by their scores: eight are trained on, one is for choices, one for tests."""
    labels = [f"0{number},I{number},{number}" for number in range(10)]
    names = [f"CPS/ADNI_002_S_0{number}_s{image}_I{number}.png" for number in range(10) for image in range(4)]
    write_adni(folder, names, labels)
    split = cross_silo(load_source("adni"), Preset.read("motley-adni").experiment["split"]["fractions"], 3, order)
    parts = [part.of(np.array([0]))[0] for part in (split.train, split.selection.validation, split.test.query)]
    scans = [set(split.train.population.columns["y"].numpy()[rows]) for rows in parts]
    assert [len(found) for found in scans] == [8, 1, 1]
    assert len(set.union(*scans)) == 10


@pytest.mark.parametrize(
    ("names", "labels", "message"),
    [
        (["CPS/scan.png"], SCANS, "an image named scan.png"),
        (["CPS/ADNI_002_S_0295_I99.png"], SCANS, "1 images, none of them scored in labels.txt"),
        (["CPS/ADNI_002_S_0295_I10.png"], ["subject,image,score"], "line 1, expected subject,image,score"),
        (["CPS/ADNI_002_S_0295_I10.png"], ["0295,I10"], "'0295,I10' in line 1"),
        (["CPS/ADNI_002_S_0295_I10.png"], ["0295,I10,nan"], "not finite"),
    ],
)
def test_adni_of_another_layout(folder: Path, names: Any, labels: Any, message: str) -> None:
    write_adni(folder, names, labels)
    with pytest.raises(UserError, match=message):
        load_source("adni")


# Vehicle


def write_vehicle(
    folder: Path, sizes: Any = (*[1900] * 22, 1895), columns: int = 100, labels: Any = (-1, 1), name: str = "Y"
) -> None:
    draw = np.random.default_rng(0)
    xs, ys = np.empty((len(sizes), 1), dtype=object), np.empty((len(sizes), 1), dtype=object)
    for i, n in enumerate(sizes):
        xs[i, 0] = draw.integers(0, 2, (n, columns), dtype=np.uint8)
        ys[i, 0] = draw.choice(np.array(labels, dtype=np.int16), (n, 1))
    ys[0, 0][:2, 0] = labels
    (folder / "vehicle").mkdir()
    scipy.io.savemat(folder / "vehicle" / "vehicle.mat", {"X": xs, name: ys})


def test_vehicle(folder: Path) -> None:
    write_vehicle(folder)
    population = load_source("vehicle")
    assert (len(population), population.rows) == (23, 43695)
    assert population.columns["y"][:2].tolist() == [0, 1]
    assert population.about["standardize"]["features"] == "client"
    task = build_task(population.about)
    assert (task.hinge, task.l2, task.network) == (True, 1e-4, Linear(100, 1))  # type: ignore[attr-defined]
    assert build_task(population.about, l2=0.5).l2 == 0.5  # what is said goes before what the source advises
    assert not build_task(population.about, "logistic").hinge  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (10, 10)}, "found 2 sensors in X and 2 in Y, expected 23"),
        ({"sizes": (100,) * 23}, "found 2300 measurements, expected 43695"),
        ({"columns": 99}, r"sensor 1 with X \(1900, 99\) and 1900 labels, expected X \(labels, 100\)"),
        ({"labels": (0, 1)}, r"labels \[0.0, 1.0\], expected -1 and 1"),
        ({"name": "Z"}, r"the variables \['X', 'Z'\], expected the cells X and Y"),
    ],
)
def test_vehicle_of_another_layout(folder: Path, change: Any, message: str) -> None:
    write_vehicle(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("vehicle")
