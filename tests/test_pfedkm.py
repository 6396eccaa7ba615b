"""PFedKM: k-means by hand, clusters that are found, what the server sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bespoke.declarations import Reveal, reveals
from bespoke.method import Cohort, Setting
from bespoke.methods import PFedKM
from bespoke.methods.parts.kmeans import kmeans
from bespoke.models.networks import MLP
from bespoke.models.task import Regression
from bespoke.tensors import tree_map

TASK = Regression(MLP(1, 1, (1,)))
START = {
    "features.1.weight": torch.tensor([[1.0]]),
    "features.1.bias": torch.zeros(1),
    "head.weight": torch.tensor([[1.0]]),
    "head.bias": torch.zeros(1),
}


def test_kmeans_by_hand() -> None:
    """From centres 0 and 4: {0, 1} and {5, 9} first, then 0.5 and 7; then 5 is nearer to 7 still."""
    points = torch.tensor([[0.0], [1.0], [5.0], [9.0]])
    places, centres = kmeans(points, torch.tensor([[0.0], [4.0]]), 5, None)
    assert places.tolist() == [0, 0, 1, 1]
    assert centres.tolist() == [[0.5], [7.0]]


def test_a_centre_without_points_stays() -> None:
    places, centres = kmeans(torch.zeros(3, 1), torch.tensor([[0.0], [100.0]]), 3, None)
    assert places.tolist() == [0, 0, 0]
    assert centres.tolist() == [[0.0], [100.0]]


def test_first_centres_are_far_apart() -> None:
    """Three tight heaps: k-means++ begins with one of each, whatever the seed."""
    points = torch.cat(
        [torch.randn(20, 2, generator=torch.Generator().manual_seed(s)) * 0.01 + 10 * s for s in range(3)]
    )
    for seed in range(5):
        places, _ = kmeans(points, torch.zeros(3, 2), 5, seed)
        heaps = [places[i : i + 20].unique() for i in (0, 20, 40)]
        assert all(len(heap) == 1 for heap in heaps)
        assert len({int(heap) for heap in heaps}) == 3


def cohort(biases: list[float], over: str = "model") -> Cohort:
    """Clients of weight 2 who would move the head's bias so far, and the body's bias by one."""
    many = len(biases)
    head = {"head.weight": torch.zeros(many, 1, 1), "head.bias": torch.tensor(biases)[:, None]}
    delta = {"features.1.weight": torch.zeros(many, 1, 1), "features.1.bias": torch.full((many, 1), 2.0)}
    each = {"head": head, "weight": torch.full((many,), 2.0)}
    if over == "model":
        return Cohort({}, {"delta": delta, **each}, tuple(range(many)))
    return Cohort({"delta": {name: leaf.sum(0) for name, leaf in delta.items()}}, each, tuple(range(many)))


@pytest.mark.parametrize("over", ["model", "head"])
def test_heads_are_averaged_by_cluster_and_the_body_by_all(over: Any) -> None:
    method = PFedKM(TASK, k=2, over=over)
    server = method.init_server(START, Setting(1, 5))
    assert int(method.unicast(server, 3)["cluster"]) == -1
    new = method.server_round(server, cohort([2.0, 4.0, -3.0, -5.0], over))
    first, other = int(new["cluster"][0]), int(new["cluster"][2])
    assert new["cluster"].tolist() == [first, first, other, other, -1]
    assert new["params"]["head.bias"][first].item() == 3.0
    assert new["params"]["head.bias"][other].item() == -4.0
    assert new["params"]["features.1.bias"].item() == 1.0
    assert method.observe(new, cohort([0.0])) == {"clients": [2, 2], "largest_share": 0.5}
    # who fits its cluster's head moves no more, and stays where it is
    again = method.server_round(new, cohort([0.0, 0.0, 0.0, 0.0], over))
    assert again["cluster"].tolist() == new["cluster"].tolist()
    assert torch.equal(again["params"]["head.bias"], new["params"]["head.bias"])


def test_the_order_of_answers_does_not_matter() -> None:
    method = PFedKM(TASK, k=2)
    server = method.init_server(START, Setting(1, 4))
    plain = cohort([2.0, 4.0, -3.0, -5.0])
    turned = Cohort({}, tree_map(lambda leaf: leaf.flip(0), plain.each), (3, 2, 1, 0))
    found = [method.server_round(server, c)["cluster"].tolist() for c in (plain, turned)]
    assert found[0] == found[1]


def test_a_client_the_server_does_not_know_takes_the_best_head() -> None:
    """x = 1, y = 3: h = 1, heads that say 1 + 2 and 1 - 4."""
    method = PFedKM(TASK, k=2)
    params = {**START, "head.weight": torch.ones(2, 1, 1), "head.bias": torch.tensor([[-4.0], [2.0]])}

    class One:
        def rows(self) -> Any:
            return {"x": torch.ones(1, 1), "y": torch.tensor([3.0]), "mask": torch.ones(1)}

    assert int(method.pick({"params": params, "cluster": torch.tensor(-1)}, One())) == 1
    assert int(method.pick({"params": params, "cluster": torch.tensor(0)}, One())) == 0


def test_a_client_that_comes_for_the_first_time_begins_with_the_mean_head() -> None:
    method = PFedKM(TASK, k=2)
    params = {**START, "head.weight": torch.ones(2, 1, 1), "head.bias": torch.tensor([[-4.0], [2.0]])}
    assert method.model({"params": params}, torch.tensor(-1))["head.bias"].tolist() == [-1.0]
    assert method.model({"params": params}, torch.tensor(1))["head.bias"].tolist() == [2.0]


def test_what_the_server_sees() -> None:
    assert set(reveals(PFedKM(TASK).uplink).values()) == {Reveal.EACH}
    by_head = reveals(PFedKM(TASK, over="head").uplink)
    assert by_head == {"delta": Reveal.SUM, "head": Reveal.EACH, "weight": Reveal.EACH}


def test_kmeans_is_scikit_learns() -> None:
    """From the same centres, after as many rounds."""
    from sklearn.cluster import KMeans

    points = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    places, centres = kmeans(points, points[:4], 100, None)
    expected = KMeans(4, init=points[:4].numpy(), n_init=1, tol=0.0).fit(points.numpy())
    assert places.tolist() == expected.labels_.tolist()
    torch.testing.assert_close(centres, torch.from_numpy(expected.cluster_centers_).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "moved"), [("models", 4.0), ("updates", 3 + 10 / 3)])
def test_who_changes_its_cluster_brings_its_head_along(heads: Any, moved: float) -> None:
    """Heads 3 and -4. Clients 0 and 1 go on by one; 2 comes over from -4 by 8, to 4; 3 stays where it was.

    The mean of the members' heads is (4 + 4 + 4) / 3 and -4; by updates alone the first head would go on by
    (1 + 1 + 8) / 3, as if client 2 had begun with it, though it is where it wants to be.
    """
    method = PFedKM(TASK, k=2, over="head", heads=heads)
    server = method.init_server(START, Setting(1, 4))
    server = method.server_round(server, cohort([2.0, 4.0, -3.0, -5.0], "head"))
    first, other = int(server["cluster"][0]), int(server["cluster"][2])
    new = method.server_round(server, cohort([1.0, 1.0, 8.0, 0.0], "head"))
    assert new["cluster"].tolist() == [first, first, first, other]
    assert new["params"]["head.bias"][first].item() == pytest.approx(moved)
    assert new["params"]["head.bias"][other].item() == pytest.approx(-4.0)


def test_a_head_without_members_stays() -> None:
    method = PFedKM(TASK, k=2, over="head")
    server = method.init_server(START, Setting(1, 4))
    server = method.server_round(server, cohort([2.0, 4.0, -3.0, -5.0], "head"))
    first, other = int(server["cluster"][0]), int(server["cluster"][2])
    two = cohort([0.5, 0.5], "head")
    new = method.server_round(server, two)
    assert set(new["cluster"][:2].tolist()) <= {first, other}
    empty = other if int(new["count"][first]) else first
    assert torch.equal(new["params"]["head.bias"][empty], server["params"]["head.bias"][empty])
