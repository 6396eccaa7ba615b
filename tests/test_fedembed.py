"""FedEmbed on a model small enough to check by hand: one row, one hidden unit, an embedding of one number.

x = 1, e = 1, h = x + e = 2 (the encoder's weights are 1, its bias 0), f = (h, e) = (2, 1). The client's head, with
weights (1, 1), says 3; the global head, (1, 2), says 4. The target is 1 and the loss half the square: slopes 2 and 3.
The kinds' head says (h, 0) = (2, 0); the row's kind is 0, so its slopes are -q and q, where q = 1 / (1 + exp 2).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bespoke.data.population import Population
from bespoke.data.splits import cross_silo, everything
from bespoke.declarations import Reveal, reveals
from bespoke.errors import UserError
from bespoke.experiment.experiment import Experiment, Stage
from bespoke.federation.batches import Orders, SlicedBatches
from bespoke.federation.engine import Choice
from bespoke.method import Batching, Cohort, Setting
from bespoke.methods import FedAvg, FedEmbed
from bespoke.methods.parts.assignment import SelfOrganizingMap, liked_kind, nearest, triplet_step
from bespoke.methods.parts.client_optimizer import ClientOptimizer
from bespoke.methods.parts.server_optimizer import ServerOptimizer
from bespoke.models.conditioned import Conditioned, diagonal_channel
from bespoke.models.language import LanguageModel
from bespoke.models.networks import CNN, LSTM, MLP, Linear
from bespoke.models.task import Classification, Regression
from bespoke.runs.folder import RunFolder
from bespoke.runs.training import Run
from bespoke.study.described import describe
from bespoke.tensors import Params, Tree

TASK = Regression(MLP(1, 1, (1,)), kinds=2)
Q = 1 / (1 + math.exp(2))


def rows(x: list[float], y: list[float], kind: list[int], batching: Batching, key: int = 1) -> SlicedBatches:
    columns: dict[str, Any] = {"x": torch.tensor(x)[:, None], "y": torch.tensor(y), "kind": torch.tensor(kind)}
    population = Population.build(columns, np.repeat(["a"], len(x)))
    return Orders.draw(everything(population), np.array([0]), batching, key).sliced(0)


def one_row(made: FedEmbed, epochs: int = 1) -> SlicedBatches:
    return rows([1.0], [1.0], [0], Batching(made.batch_size, epochs))


def server_of(made: FedEmbed) -> Params:
    """The model of the module's first lines; the other head is (5, 5), the other prototype 7."""
    found = made.init_server(TASK.init(0), Setting(0, 1))["params"]
    given: dict[str, Any] = {
        "features.1.weight": [[1.0, 1.0]], "features.1.bias": [0.0], "heads.weight": [[[1.0, 1.0]], [[5.0, 5.0]]],
        "heads.bias": [[0.0], [0.0]], "global.weight": [[1.0, 2.0]], "global.bias": [0.0],
        "kinds.weight": [[1.0, 0.0], [0.0, 0.0]], "kinds.bias": [0.0, 0.0], "prototypes": [[2.0], [7.0]],
    }  # fmt: skip
    model = {name: torch.tensor(given[name]) for name in found}
    if made.assignment == "none":
        model |= {name: model[name][:1] for name in ("heads.weight", "heads.bias")}
    assert {n: p.shape for n, p in model.items()} == {n: p.shape for n, p in found.items()}
    return model


def known(made: FedEmbed, embedding: float = 1.0) -> Tree:
    """Private state of a client that has taken part already."""
    private = made.init_private(TASK.init(0))
    if "head" in private:
        private["head"] = {"weight": torch.tensor([[1.0, 1.0]]), "bias": torch.zeros(1)}
    return {**private, "embedding": torch.tensor([embedding]), "rounds": torch.ones(())}


def made(assignment: str, **knobs: Any) -> FedEmbed:
    return FedEmbed(TASK, assignment=assignment, size=1, lr=0.1, embedding_lr=0.01, k=2, **knobs)  # type: ignore[arg-type]


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-7)


# -- every term of the loss, every place where a gradient stops --------------------------------------------------------
def test_a_round_by_hand() -> None:
    """Encoder: 2 from the client's head and -q from the kinds, nothing from the global head. Embedding: 2 (1 + 1) from
    the head and 3 (1 + 2) from the global head, nothing from the kinds. The other head: zeros."""
    method = made("type", kinds=0.5)
    private, up = method.client_round({"params": server_of(method)}, known(method), one_row(method))
    delta = up["delta"]
    encoder = -0.1 * (2 - 0.5 * Q)
    close(delta["features.1.weight"], [[encoder, encoder]])
    close(delta["features.1.bias"], [encoder])
    close(delta["heads.weight"], [[[-0.4, -0.2]], [[0.0, 0.0]]])
    close(delta["heads.bias"], [[-0.2], [0.0]])
    close(delta["global.weight"], [[-0.6, -0.3]])
    close(delta["global.bias"], [-0.3])
    step = 0.1 * 0.5 * Q
    close(delta["kinds.weight"], [[2 * step, step], [-2 * step, -step]])
    close(delta["kinds.bias"], [step, -step])
    close(private["embedding"], [1 - 0.01 * (4 + 9)])
    assert float(private["rounds"]) == 2
    assert float(up["weight"]) == 1


def test_without_kinds_the_encoder_hears_of_the_head_alone() -> None:
    method = made("type", kinds=0.0)
    _, up = method.client_round({"params": server_of(method)}, known(method), one_row(method))
    assert not any(name.startswith("kinds") for name in up["delta"])
    close(up["delta"]["features.1.weight"], [[-0.2, -0.2]])


def test_a_prototype_moves_as_an_embedding_there_would() -> None:
    """At 2: h = 3, the head says 5 (slope 4), the global head 7 (slope 6): 4 (1 + 1) + 6 (1 + 2) = 26.

    Margin 0 and e nearer to its prototype than to the other: the triplet loss is silent.
    """
    method = made("prototype", margin=0.0)
    private, up = method.client_round({"params": server_of(method)}, known(method), one_row(method))
    close(up["delta"]["prototypes"], [[-0.26], [0.0]])
    close(up["delta"]["heads.bias"], [[-0.2], [0.0]])
    close(private["embedding"], [0.87])


def test_the_triplet_loss_comes_first_and_decides_the_head() -> None:
    """e = 6 is nearer to prototype 7 than to 2. (6 - 2)^2 - (6 - 7)^2 + 1 > 0: a step of 0.4 * 2 (7 - 2) = 4 leads to
    2, where the loss is silent; so the head is the first, with which the client trains. e is 2 - 0.01 * 26."""
    method = made("prototype", triplet_lr=0.4, triplets=3)
    params = server_of(method)
    assert int(method.heads.place({"params": params}, torch.tensor([6.0]), torch.tensor(0))) == 1
    private, up = method.client_round({"params": params}, known(method, 6.0), one_row(method))
    close(private["embedding"], [1.74])
    assert float(up["delta"]["heads.bias"][0]) != 0
    assert float(up["delta"]["heads.bias"][1]) == 0


def test_triplet_step_by_hand() -> None:
    """0 - 1 + 1 = 0 is no loss any more; with a larger margin the step is 2 (negative - positive)."""
    e, positive, negative = torch.zeros(2), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0])
    close(triplet_step(e, positive, negative, 1.0, 0.5), [0.0, 0.0])
    close(triplet_step(e, positive, negative, 1.5, 0.5), [-1.0, 0.0])


def test_negatives_are_all_others_and_never_oneself() -> None:
    task = replace(TASK, kinds=4)
    method = FedEmbed(task, assignment="prototype", size=1, triplets=1, triplet_lr=0.5, margin=100.0)
    params = {"prototypes": torch.tensor([[0.0], [1.0], [3.0], [9.0]])}
    seen = set()
    for key in range(60):
        batches = rows([1.0], [1.0], [1], Batching(), key)
        moved = method.heads.attracted(params, torch.zeros(1), torch.tensor(1), batches)
        seen.add(float(moved))  # -0.5 * 2 (negative - 1)
    assert seen == {1.0, -2.0, -8.0}


def test_a_head_of_its_own_stays_on_the_client() -> None:
    method = made("personal", kinds=0.0)
    private, up = method.client_round({"params": server_of(method)}, known(method), one_row(method))
    assert set(up["delta"]) == {"features.1.weight", "features.1.bias", "global.weight", "global.bias"}
    close(private["head"]["weight"], [[0.6, 0.8]])
    close(private["head"]["bias"], [-0.2])
    new = method.init_private(TASK.init(0))
    first = method.model(server_of(method), new, torch.tensor(0), None, torch.ones(1))
    close(first["head.weight"], [[1.0, 2.0]])  # it begins as the global head


def test_one_head_for_all_is_fedavg_with_embeddings() -> None:
    """Global+: the embedding hears of that head alone; a global head besides there is none."""
    method = made("none", kinds=0.0)
    private, up = method.client_round({"params": server_of(method)}, known(method), one_row(method))
    assert set(up["delta"]) == {"features.1.weight", "features.1.bias", "heads.weight", "heads.bias"}
    close(private["embedding"], [0.96])
    close(up["delta"]["heads.weight"], [[[-0.4, -0.2]]])


def test_the_server_averages_heads_over_all_clients() -> None:
    """Section 3.1: zeros of those who do not use a head count, for the server does not know who they are."""
    method = made("type", kinds=0.0)
    params = server_of(method)
    server = {"params": params, "optimizer": {}}
    sums = {"delta": {n: torch.ones_like(p) for n, p in params.items()}, "weight": torch.tensor(4.0)}
    close(method.server_round(server, Cohort(sums, {}, (0, 1, 2, 3)))["params"]["heads.bias"], [[0.25], [0.25]])


# -- embeddings --------------------------------------------------------------------------------------------------------
def test_the_first_embedding_is_drawn_by_the_client() -> None:
    method = FedEmbed(TASK, assignment="type", size=40)
    batches = [rows([1.0], [1.0], [0], method.batching(), key) for key in (1, 1, 2)]
    first, again, other = (method.embedding(method.init_private(TASK.init(0)), b) for b in batches)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0 <= first.min() < 0.2 < 0.8 < first.max() < 1
    kept = {"embedding": torch.full((40,), 9.0), "rounds": torch.ones(())}
    assert torch.equal(method.embedding(kept, batches[0]), kept["embedding"])


def test_a_newcomer_makes_its_embedding_while_the_model_is_held() -> None:
    """Two epochs of the embedding alone, by hand from e = 1: 4 + 9, then at 0.87 slopes of 1.74 and 2.61."""
    method = made("type", kinds=1.0, adapt_epochs=2)
    params = server_of(method)
    start = method.model(params, {}, torch.tensor(0), None, torch.ones(1))
    done, moments = method.train(start, {}, one_row(method, epochs=2), alone=True)
    assert moments == {}  # SGD has none
    assert all(torch.equal(done[name], start[name]) for name in start if name != "embedding")
    close(done["embedding"], [0.87 - 0.01 * (1.74 * 2 + 2.61 * 3)])
    private = method.newcomer({"params": params}, method.init_private(TASK.init(0)), one_row(method, epochs=2))
    assert float(private["rounds"]) == 1
    shared, mine = method.personalize({"params": params}, private, one_row(method))
    assert torch.equal(mine["embedding"], private["embedding"])
    assert torch.equal(mine["head.weight"], params["heads.weight"][0])
    assert torch.equal(shared["head.weight"], params["global.weight"])


# -- Adam on the clients -----------------------------------------------------------------------------------------------
def test_adam_moves_by_its_rate_in_the_first_step_by_hand() -> None:
    """The first step of Adam is the rate times the sign of the slope, whatever its size: 0.1 for what is shared, 0.01
    for the embedding. Zeros for the heads of others stay zeros. First moments of the embedding: 0.1 * 13 = 1.3."""
    method = made("type", kinds=0.0, optimizer=ClientOptimizer("adam"))
    private, up = method.client_round({"params": server_of(method)}, known(method), one_row(method))
    close(up["delta"]["features.1.weight"], [[-0.1, -0.1]])
    close(up["delta"]["heads.weight"], [[[-0.1, -0.1]], [[0.0, 0.0]]])
    close(up["delta"]["global.weight"], [[-0.1, -0.1]])
    close(private["embedding"], [0.99])
    assert set(private["moments"]) == {"embedding"}  # those of what is shared begin anew
    close(private["moments"]["embedding"]["first"], [1.3])
    close(private["moments"]["embedding"]["second"], [0.169])
    assert float(private["moments"]["embedding"]["time"]) == 1


@pytest.mark.parametrize("assignment", ["none", "personal"])
def test_adam_goes_on_with_the_moments_of_what_is_private(assignment: str) -> None:
    """Three rounds against the same server are three steps of torch.optim.Adam for the embedding and a head of one's
    own, while the encoder is where the server has it at the start of each."""
    method = made(assignment, kinds=0.0, optimizer=ClientOptimizer("adam"))
    down, private = {"params": server_of(method)}, known(method)
    own = torch.tensor([1.0], requires_grad=True)
    head = [torch.tensor([[1.0, 1.0]], requires_grad=True), torch.zeros(1, requires_grad=True)]
    adam = torch.optim.Adam([{"params": [own], "lr": 0.01}, {"params": head, "lr": 0.1}])
    for _ in range(3):
        private, _ = method.client_round(down, private, one_row(method))
        if assignment == "none":  # the head is the server's, and so begins every round at (1, 1) and 0
            with torch.no_grad():
                head[0].fill_(1.0), head[1].zero_()
        features = torch.cat([1 + own, own])
        said = 0.5 * (features @ head[0][0] + head[1] - 1) ** 2
        heard = said if assignment == "none" else said + 0.5 * (features @ torch.tensor([1.0, 2.0]) - 1) ** 2
        slope = torch.autograd.grad(heard.sum(), own, retain_graph=True)
        adam.zero_grad()
        said.sum().backward()
        own.grad = slope[0]
        adam.step()
    torch.testing.assert_close(private["embedding"], own.detach())
    if assignment == "personal":
        torch.testing.assert_close(private["head"]["weight"], head[0].detach())
        assert set(private["moments"]) == {"embedding", "head.weight", "head.bias"}


def test_moments_are_private_and_only_adam_has_them() -> None:
    own = made("personal", optimizer=ClientOptimizer("adam"))
    assert describe(own)["private"].keys() == {"embedding", "rounds", "head", "moments"}
    assert "moments" not in made("type").init_private(TASK.init(0))


def test_a_newcomers_own_head_is_made_too() -> None:
    method = made("personal", adapt_epochs=1)
    private = method.newcomer({"params": server_of(method)}, method.init_private(TASK.init(0)), one_row(method))
    assert not torch.equal(private["head"]["weight"], server_of(method)["global.weight"])


def test_the_kind_that_a_client_likes() -> None:
    batch = {"y": torch.tensor([1, 0, 1, 1]), "kind": torch.tensor([2, 0, 1, 2]), "mask": torch.ones(4)}
    assert int(liked_kind(batch, 3)) == 2
    assert int(liked_kind({**batch, "mask": torch.tensor([0.0, 1, 1, 0])}, 3)) == 1


# -- the map -----------------------------------------------------------------------------------------------------------
def down_of(nodes: list[list[float]], coming: list[list[float]], age: float = 0.0) -> Tree:
    return {"nodes": torch.tensor(nodes), "coming": torch.tensor(coming), "age": torch.tensor(age)}


def test_what_a_client_says_of_the_map() -> None:
    """Two nodes, one step apart on the grid: h = exp(-1 / 2) for the neighbour. e = 3 is nearest to node 1 of those in
    use and to node 0 of those to come."""
    som = SelfOrganizingMap(lr=0.5, radius=1.0, halving=10.0)
    up = som.message(down_of([[0.0], [3.0]], [[2.0], [7.0]]), torch.tensor([3.0]))
    h = math.exp(-0.5)
    close(up["pull"], [[0.5 * (3 - 2)], [0.5 * h * (3 - 7)]])
    assert float(up["similarity"]) == -1.0
    assert up["overlap"].tolist() == [[0.0, 1.0], [0.0, 0.0]]  # (new, old)
    late = som.message(down_of([[0.0], [3.0]], [[2.0], [7.0]], 10.0), torch.tensor([3.0]))
    close(late["pull"], [[0.25], [0.25 * math.exp(-2) * -4]])  # rate and radius halved


def test_the_most_similar_client_moves_the_map() -> None:
    som = SelfOrganizingMap()
    each = {
        "pull": torch.tensor([[[1.0], [2.0]], [[10.0], [20.0]]]),
        "similarity": torch.tensor([-3.0, -0.5]),
    }
    overlap = torch.tensor([[0.0, 3.0], [0.0, 0.0]])
    server, heirs = som.learn(down_of([[0.0], [0.0]], [[5.0], [6.0]]), Cohort({"overlap": overlap}, each, (0, 1)))
    assert server["nodes"].tolist() == [[5.0], [6.0]]  # what was to come is in use now
    assert server["coming"].tolist() == [[15.0], [26.0]]
    assert heirs.tolist() == [1, 1]  # the first takes over the head of the second; one without clients keeps its own
    assert float(server["age"]) == 1


def test_sums_move_the_map_to_the_mean_of_its_clients() -> None:
    """Clients at 1 and 3, both nearest to node 0 at 0, far from node 1: with rate 1 the node goes to 2."""
    som = SelfOrganizingMap(update="sums", lr=1.0, radius=0.01)
    down = down_of([[0.0], [50.0]], [[0.0], [50.0]])
    said = [som.message(down, torch.tensor([e])) for e in (1.0, 3.0)]
    sums = {name: said[0][name] + said[1][name] for name in said[0]}
    server, heirs = som.learn(down, Cohort(sums, {}, (0, 1)))
    close(server["coming"], [[2.0], [50.0]])
    assert heirs.tolist() == [0, 1]
    # half a client near the first, and by noise less than nobody near the second: no node is thrown out of the map
    noisy = {**sums, "near": torch.tensor([0.5, -0.4]), "pull": torch.tensor([[1.5], [-2.0]])}
    close(som.learn(down, Cohort(noisy, {}, (0, 1)))[0]["coming"], [[1.5], [48.0]])


def test_heads_and_their_moments_go_where_their_clients_went() -> None:
    method = made("som", kinds=0.0, server=ServerOptimizer("adam", lr=0.1))
    server = method.init_server(TASK.init(0), Setting(0, 1))
    server["params"]["heads.bias"] = torch.tensor([[1.0], [2.0]])
    server["optimizer"]["moment"]["heads.bias"] = torch.tensor([[10.0], [20.0]])
    zeros = {name: torch.zeros_like(p) for name, p in server["params"].items()}
    sums = {"delta": zeros, "weight": torch.tensor(1.0), "overlap": torch.tensor([[0.0, 4.0], [5.0, 1.0]])}
    each = {"pull": torch.zeros(1, 2, 1), "similarity": torch.zeros(1)}
    new = method.server_round(server, Cohort(sums, each, (0,)))
    kept = ServerOptimizer("adam", lr=0.1).step(server["optimizer"], server["params"], zeros)
    assert torch.equal(new["params"]["heads.bias"], kept[0]["heads.bias"].flip(0))
    close(new["optimizer"]["moment"]["heads.bias"], [[18.0], [9.0]])
    assert method.observe(new, Cohort(sums, each, (0,))) == {"clients": [4, 6], "largest_share": 0.6}
    noisy = {**sums, "overlap": torch.tensor([[-3.0, 1.0], [5.0, 0.6]])}
    assert method.observe(new, Cohort(noisy, each, (0,))) == {"clients": [0, 6], "largest_share": 1.0}


def test_nearest_takes_the_first_of_equals() -> None:
    assert int(nearest(torch.tensor([1.0]), torch.tensor([[0.0], [2.0]]))) == 0


# -- what the server learns --------------------------------------------------------------------------------------------
def test_what_leaves_is_declared() -> None:
    sums = {"delta": Reveal.SUM, "weight": Reveal.SUM}
    for assignment in ("prototype", "type", "personal", "none"):
        assert reveals(made(assignment).uplink) == sums
    seen = {"pull": Reveal.EACH, "similarity": Reveal.EACH, "overlap": Reveal.SUM}
    assert reveals(made("som").uplink) == {**sums, **seen}
    private = reveals(made("som", som=SelfOrganizingMap(update="sums")).uplink)
    assert set(private.values()) == {Reveal.SUM}
    assert describe(made("personal"))["private"].keys() == {"embedding", "rounds", "head"}


def test_clients_of_two_heads_send_the_same_shapes() -> None:
    """Nothing of what is sent says by its form which head was trained."""
    method = made("type", kinds=1.0)
    sent = []
    for kind in (0, 1):
        batches = rows([1.0], [1.0], [kind], method.batching())
        _, up = method.client_round({"params": server_of(method)}, known(method), batches)
        sent.append({name: leaf.shape for name, leaf in up["delta"].items()})
    assert sent[0] == sent[1]
    assert set(sent[0]) == set(server_of(method))


# -- other networks, other data ----------------------------------------------------------------------------------------
def test_images_have_the_embedding_on_the_diagonal_of_a_channel() -> None:
    """And what is computed once for the channel is what the wider network makes of images with it."""
    network = Classification(CNN(2, 8), kinds=3).conditioned(5).network
    assert isinstance(network, Conditioned)
    assert network.width == 128
    embedding = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    channel = diagonal_channel(embedding, (8, 8))
    assert torch.equal(channel.diagonal(), torch.tensor([1.0, 2, 3, 4, 5, 0, 0, 0]))
    assert channel.sum() == 15
    params, images = {**network.init(0), "embedding": embedding}, torch.rand(3, 64)
    found = network.features(params, images)
    joined = torch.cat([images, channel.flatten().expand(3, -1)], 1)
    torch.testing.assert_close(found[:, :128], network.wide.features(params, joined))
    assert torch.equal(found[:, 128:], embedding.expand(3, -1))


def test_it_begins_with_the_model_it_is_given() -> None:
    """A stage before it is not lost: the encoder's weights are taken over, those of the embedding are drawn."""
    plain = TASK.init(4)
    params = made("type").init_server(plain, Setting(9, 1))["params"]
    assert torch.equal(params["features.1.weight"][:, :1], plain["features.1.weight"])
    assert torch.equal(params["features.1.bias"], plain["features.1.bias"])
    assert not torch.equal(params["heads.weight"][0], params["heads.weight"][1])


@pytest.mark.parametrize(
    ("task", "knobs", "said"),
    [
        (Classification(MLP(2, 2, (3,))), {"assignment": "prototype"}, "no column 'kind'"),
        (Classification(CNN(2, 8), kinds=2), {"assignment": "type", "size": 9}, "size = 9"),
        (LanguageModel(LSTM(7, 3, 4, 1)), {}, "LSTM"),
    ],
)
def test_what_does_not_fit_is_refused(task: Any, knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        FedEmbed(task, **knobs).init_private({})


def test_conflicting_labels_are_learned(tmp_path: Path) -> None:
    """Clients who like opposite kinds: no common model can be right, one conditioned on the client can."""
    random = np.random.default_rng(0)
    kind = random.integers(0, 2, 24 * 20)
    owner = np.repeat(np.arange(24), 20)
    x = (random.standard_normal((len(kind), 2)) * 0.3 + np.where(kind[:, None] == 1, 1.0, -1.0)).astype(np.float32)
    columns: dict[str, Any] = {"x": x, "y": (kind == owner % 2).astype(np.int64), "kind": kind}
    population = Population.build(columns, np.char.zfill(owner.astype(str), 2), about={"name": "opposites"})
    task = Classification(MLP(2, 2, (4,)), kinds=2, metrics=("accuracy", "loss", "f1"))
    split = cross_silo(population, (0.6, 0.2, 0.2), seed=0)
    found = {}
    knobs = {"lr": 0.3, "epochs": 2, "batch_size": 12}
    methods = {
        "fedavg": FedAvg(task, **knobs),  # type: ignore[arg-type]
        **{
            name: FedEmbed(task, assignment=name, size=4, **knobs)  # type: ignore[arg-type]
            for name in ("type", "prototype", "personal")
        },
    }
    for name, method in methods.items():
        experiment = Experiment(name, population, split, task, (Stage(method, 12),), "f1", cohort=24)
        choice = Choice(True, 24, 0, 1, "func", "")
        found[name] = Run(experiment, RunFolder.create(tmp_path / name, ""), how=choice).run()["query"]
    assert found["fedavg"] < 0.7
    for name in ("type", "prototype", "personal"):
        assert found[name] > 0.9, found


def test_linear_models_have_no_encoder() -> None:
    task = Regression(Linear(3))
    params = FedEmbed(task, size=2, k=4).init_server(task.init(0), Setting(0, 7))["params"]
    assert set(params) == {"heads.weight", "heads.bias", "global.weight", "global.bias"}
    assert params["heads.weight"].shape == (4, 1, 3 + 2 + 2)
