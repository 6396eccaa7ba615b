"""FedJAX: its federated averaging on the jit backend of `for_each_client`."""

from collections.abc import Callable
from importlib import metadata
from typing import Any

import fedjax
import jax
import numpy as np
from fedjax.algorithms import fed_avg
from jax import lax
from jax import numpy as jnp

from peers.protocol import Params
from peers.workloads import Kind, Workload

Batch = dict[str, Any]

# FedJAX 0.0.17 calls an alias that newer JAX dropped. They are otherwise compatible, and newer JAX is faster.
jax.tree_map = jax.tree_util.tree_map


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def logistic(params: Any, batch: Batch, rng: Any) -> jax.Array:
    return cross_entropy(batch["x"] @ params["weight"] + params["bias"], batch["y"])


def linear(params: Any, batch: Batch, rng: Any) -> jax.Array:
    return jnp.square((batch["x"] @ params["weight"] + params["bias"])[:, 0] - batch["y"]) / 2


def convolve(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias


def cnn(params: Any, batch: Batch, rng: Any) -> jax.Array:
    x = jax.nn.relu(convolve(batch["x"], params["conv1.weight"], params["conv1.bias"]))
    x = jax.nn.relu(convolve(x, params["conv2.weight"], params["conv2.bias"]))
    # Much faster than `lax.reduce_window`, whose gradient XLA computes slowly on a CPU.
    x = x.reshape(len(x), 12, 2, 12, 2, 64).max(axis=(2, 4))
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense1.weight"] + params["dense1.bias"])
    return cross_entropy(x @ params["dense2.weight"] + params["dense2.bias"], batch["y"])


def lstm(params: Any, batch: Batch, rng: Any) -> jax.Array:
    hidden_to_gates = params["lstm.weight_hh_l0"]
    embedded = params["embedding.weight"][batch["x"].T]
    gates_of_input = embedded @ params["lstm.weight_ih_l0"] + params["lstm.bias_ih_l0"] + params["lstm.bias_hh_l0"]

    def step(state: tuple[jax.Array, jax.Array], gates_of_word: jax.Array) -> tuple[Any, jax.Array]:
        hidden, cell = state
        entry, forget, candidate, exit_ = jnp.split(gates_of_word + hidden @ hidden_to_gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(entry) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(exit_) * jnp.tanh(cell)
        return (hidden, cell), hidden

    nothing = jnp.zeros((len(batch["x"]), len(hidden_to_gates)))
    _, outputs = lax.scan(step, (nothing, nothing), gates_of_input)
    logits = outputs.swapaxes(0, 1) @ params["output.weight"] + params["output.bias"]
    return cross_entropy(logits, batch["y"]).mean(axis=-1)


LOSSES: dict[Kind, Callable[[Any, Batch, Any], jax.Array]] = {
    "logistic": logistic,
    "linear": linear,
    "cnn": cnn,
    "lstm": lstm,
}


def to_jax(name: str, value: np.ndarray) -> np.ndarray:
    """From PyTorch's layout: channels last, and matrices that are multiplied from the right."""
    if name == "dense1.weight":
        value = value.reshape(-1, 64, 12, 12).transpose(0, 2, 3, 1).reshape(value.shape)
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value.T if value.ndim == 2 and name != "embedding.weight" else value


def to_torch(name: str, value: np.ndarray) -> np.ndarray:
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    value = value.T if value.ndim == 2 and name != "embedding.weight" else value
    if name == "dense1.weight":
        value = value.reshape(-1, 12, 12, 64).transpose(0, 3, 1, 2).reshape(value.shape)
    return value


class Peer:
    version = f"fedjax {metadata.version('fedjax')}, jax {jax.__version__}"

    def load(self, workload: Workload) -> None:
        self.workload = workload
        settings = workload.settings
        if settings.kind not in LOSSES:
            raise NotImplementedError(f"the model {settings.kind!r} is not written in JAX here")
        fedjax.set_for_each_client_backend("jit")
        self.train_clients = fed_avg.create_train_for_each_client(
            fedjax.grad(LOSSES[settings.kind]), fedjax.optimizers.sgd(settings.learning_rate)
        )
        self.server_optimizer = fedjax.optimizers.sgd(1.0)
        self.rng = jax.random.PRNGKey(0)  # Nothing is random, but FedJAX wants a key for each client.
        # A client that is no whole number of batches is padded and masked, which spares compiling for each remainder.
        split = fedjax.ClientDataset.batch
        if np.any(workload.sizes % settings.batch_size):
            split = fedjax.ClientDataset.padded_batch
        datasets = map(self.dataset, range(workload.num_clients))
        self.batches = [split(dataset, batch_size=settings.batch_size) for dataset in datasets]
        self.reset()

    def dataset(self, client: int) -> fedjax.ClientDataset:
        x, y = self.workload.client(client)
        if x.ndim == 4:
            x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
        narrow = [column.astype(np.int32) if column.dtype == np.int64 else column for column in (x, y)]
        return fedjax.ClientDataset(dict(zip("xy", narrow, strict=True)))

    def reset(self) -> None:
        self.server_params = {
            name: jnp.asarray(np.ascontiguousarray(to_jax(name, value))) for name, value in self.workload.params.items()
        }
        self.server_state = self.server_optimizer.init(self.server_params)

    def round(self, clients: list[int]) -> None:
        cohort = [(client, self.batches[client], self.rng) for client in clients]
        deltas = self.train_clients(self.server_params, cohort)
        weights = self.workload.sizes
        mean = fedjax.tree_util.tree_mean((delta, float(weights[client])) for client, delta in deltas)
        self.server_state, self.server_params = self.server_optimizer.apply(mean, self.server_state, self.server_params)
        jax.block_until_ready(self.server_params)

    def params(self) -> Params:
        return {name: to_torch(name, np.asarray(value)) for name, value in self.server_params.items()}

    def close(self) -> None:
        pass
