"""mnist-preferences: who likes what, which images may be seen by whom, and rows in their order."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from bespoke.data.periods import periods
from bespoke.data.population import Population
from bespoke.data.sources.formats.preferences import PARTS
from bespoke.data.sources.registry import load_source
from bespoke.data.splits import cross_silo
from bespoke.errors import UserError
from bespoke.models import build_task
from bespoke.models.networks import FedEmbedCNN

IMAGES = 3000


def write_mnist(folder: Path) -> None:
    """Images that say their own number in their first two pixels, and their digit in the third."""
    labels = (np.arange(IMAGES) % 10).astype(np.uint8)
    images = np.zeros((IMAGES, 28, 28), dtype=np.uint8)
    images[:, 0, 0], images[:, 0, 1], images[:, 0, 2] = np.arange(IMAGES) % 256, np.arange(IMAGES) // 256, labels
    (folder / "mnist").mkdir()
    for name, array, kind in (("images-idx3", images, 3), ("labels-idx1", labels, 1)):
        head = bytes([0, 0, 8, kind]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
        with gzip.open(folder / "mnist" / f"train-{name}-ubyte.gz", "wb") as file:
            file.write(head + array.tobytes())


def numbers(population: Population) -> torch.Tensor:
    """(users, rows): which image each row is."""
    x = population.columns["x"].long()
    return (x[:, 0] + 256 * x[:, 1]).reshape(-1, sum(PARTS))


@pytest.fixture
def population(folder: Path) -> Population:
    write_mnist(folder)
    return load_source("mnist-preferences", number=200)


def test_everyone_likes_one_digit(population: Population) -> None:
    assert len(population) == 200
    assert population.sizes().tolist() == [30] * 200
    assert np.bincount(population.group).tolist() == [20] * 10
    kind, y = (population.columns[name].reshape(200, 30) for name in ("kind", "y"))
    assert torch.equal(
        population.columns["x"][:, 2].long(), population.columns["kind"]
    )  # the kind is the image's digit
    liked = kind == torch.from_numpy(np.array(population.groups, dtype=int)[population.group])[:, None]
    assert torch.equal(liked, y == 1)
    for begin, end in ((0, 16), (16, 20), (0, 20), (20, 30)):  # as many of both in every part
        assert (y[:, begin:end].sum(1) == (end - begin) // 2).all()
    disliked = torch.bincount(kind[y == 0], minlength=10)
    assert disliked.min() > 200  # of 3,000 about 300 each


def test_nobody_is_tested_on_what_somebody_trained_on(population: Population) -> None:
    image = numbers(population)
    train, choose, test = (set(part.flatten().tolist()) for part in image.split(PARTS, 1))
    assert not train & test
    assert not train & choose
    assert not choose & test
    assert all(len(set(row)) == 30 for row in image.tolist())  # nor has anybody an image twice
    _, counts = image[:, :16].unique(return_counts=True)
    assert len(train) == IMAGES * 16 // 30  # all images are used before any comes often
    assert counts.max() <= 4


def test_the_papers_split_is_the_stored_order(population: Population) -> None:
    split = cross_silo(population, (20 / 30, 0.0, 10 / 30), seed=5, order="stored")
    first = np.array([7])
    assert (split.train.of(first)[0] - 7 * 30).tolist() == list(range(20))
    assert (split.test.query.of(first)[0] - 7 * 30).tolist() == list(range(20, 30))
    assert not len(split.selection.validation.clients)
    tuned = cross_silo(population, (16 / 30, 4 / 30, 10 / 30), seed=5, order="stored")
    assert (tuned.selection.validation.of(first)[0] - 7 * 30).tolist() == list(range(16, 20))


def test_imbalanced_users(folder: Path) -> None:
    write_mnist(folder)
    found = load_source("mnist-preferences", users="imbalanced", number=9000)
    assert np.bincount(found.group).tolist() == [2250, 1350, 900, 900, 900, 900, 450, 450, 450, 450]


def test_seeds_deal_anew_and_mistakes_are_named(folder: Path) -> None:
    write_mnist(folder)
    one, other = (load_source("mnist-preferences", number=40, seed=seed) for seed in (0, 1))
    assert not torch.equal(numbers(one), numbers(other))
    assert torch.equal(numbers(one), numbers(load_source("mnist-preferences", number=40)))
    with pytest.raises(UserError, match=r"'number'.*is 3"):
        load_source("mnist-preferences", number=3)
    with pytest.raises(UserError, match="balanced"):
        load_source("mnist-preferences", users="uneven")


def test_its_model_is_the_papers(population: Population) -> None:
    task = build_task(population.about)
    assert isinstance(task.network, FedEmbedCNN)
    assert task.kinds == 10
    assert "f1" in task.metrics
    params = task.init(0)
    by_hand = 9 * 16 + 16 + 2 * 16 * 14 * 14 + 9 * 16 * 32 + 32 + 2 * 32 * 7 * 7 + 49 * 32 * 64 + 64 + 2 * 64 + 65 * 2
    assert sum(p.numel() for p in params.values()) == by_hand
    wide = task.conditioned(28).network
    assert wide.init(0)["head.weight"].shape == (2, 92)  # as Appendix B.1 has it
    assert wide.init(0)["features.0.weight"].shape == (16, 2, 3, 3)


def test_the_real_digits(real_data: Path) -> None:
    found = load_source("mnist-preferences", number=100)
    assert found.columns["x"].shape == (3000, 784)
    assert found.columns["kind"].unique().tolist() == list(range(10))


# -- preferences that change, sub-populations that come late -----------------------------------------------------------
def test_some_users_come_to_like_another_digit_and_some_come_late(folder: Path) -> None:
    write_mnist(folder)
    plain = load_source("mnist-preferences", number=200)
    whole = load_source("mnist-preferences", number=200, change=0.25, change_after=5, late=2, late_after=9)
    first, second, third = (period.population for period in periods(whole, cross_silo))
    changed = np.array(["to" in name for name in whole.ids])
    late = np.array([name[0] in "89" for name in whole.ids])
    assert 20 <= changed.sum() <= 60  # a quarter of 160
    assert not (changed & late).any()
    assert first.sizes().tolist() == second.sizes().tolist() == np.where(late, 0, 30).tolist()
    assert third.sizes().tolist() == [30] * 200
    for population, place in ((first, 0), (third, -1)):  # named by what they like first and in the end
        liked = np.repeat([int(name.split("-")[0].split("to")[place]) for name in whole.ids], population.sizes())
        assert torch.equal(torch.from_numpy(liked) == population.columns["kind"], population.columns["y"] == 1)
    assert not any("to8" in name or "to9" in name for name in whole.ids)  # nobody yet likes what late users like
    kept = second.columns["x"][torch.from_numpy(np.repeat(~changed, second.sizes()))]
    before = first.columns["x"][torch.from_numpy(np.repeat(~changed, first.sizes()))]
    assert torch.equal(kept, before)  # who does not change has the same images
    theirs = {name: numbers(plain)[i].tolist() for i, name in enumerate(plain.ids)}
    mine = {name: numbers(third)[i].tolist() for i, name in enumerate(third.ids)}
    assert all(mine[name] == theirs[name] for name in mine if "to" not in name)  # as had nobody changed


def test_nobody_is_ever_tested_on_what_somebody_trains_on(folder: Path) -> None:
    write_mnist(folder)
    whole = load_source("mnist-preferences", number=200, change=0.5, change_after=5)
    image = numbers(whole)  # users with changed preferences have two lines
    train, choose, test = (set(part.flatten().tolist()) for part in image.split(PARTS, 1))
    assert not (train | choose) & test
    assert not train & choose


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"change": 1.5, "change_after": 3}, "change = 1.5 is a share"),
        ({"late": 9, "late_after": 3}, "late = 9 a number of digits, 0 to 8"),
        ({"change": 0.5}, "change = 0.5 needs change_after"),
        ({"late_after": 5}, "late = 0 needs late_after"),
    ],
)
def test_changes_that_cannot_be(options: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_source("mnist-preferences", **options)
