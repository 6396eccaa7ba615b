"""Flower's simulation: Ray, one client actor a core, each with one thread. The server's loop is Flower's FedAvg."""

import os
import threading
import time
from collections.abc import Iterable

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import flwr
import ray
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peers import torch_training as training
from peers import workloads
from peers.protocol import CORES, Handover, Params

client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    config = message.content["config"]
    workload = workloads.load(config["workload"])  # An actor reads the file once.
    model = training.MODELS[workload.settings.kind]()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = training.client_tensors(workload, config["client"])
    training.train(model, data, workload.settings.batch_size, workload.settings.learning_rate)
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(data[0])}),
    }
    return Message(content=RecordDict(content), reply_to=message)


class FedAvgOfCohort(FedAvg):
    """FedAvg whose clients are those that the benchmark asks for."""

    def __init__(self, workload_path: str) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.workload_path = workload_path
        self.cohort: list[int] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        # Any nodes will do: the message says whose data to train on.
        nodes = list(grid.get_node_ids())[: len(self.cohort)]
        for client, node in zip(self.cohort, nodes, strict=True):
            config = ConfigRecord({"client": client, "workload": self.workload_path})
            content = RecordDict({"arrays": arrays, "config": config})
            yield Message(content=content, message_type=MessageType.TRAIN, dst_node_id=node)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        # Flower would go on without the clients that failed, which would look fast.
        replies = list(replies)
        failures = [reply.error.reason for reply in replies if reply.has_error()]
        if failures or len(replies) != len(self.cohort):
            raise RuntimeError(f"{len(replies)} of {len(self.cohort)} clients answered, failures: {failures[:1]}")
        return super().aggregate_train(server_round, replies)


class Peer:
    version = f"flwr {flwr.__version__}, ray {ray.__version__}, {CORES} actors"

    def load(self, workload: workloads.Workload) -> None:
        self.workload = workload
        self.reset()
        self.handover = Handover()
        server_app = ServerApp()
        server_app.main()(self.serve_rounds)
        self.simulation = threading.Thread(
            target=self.handover.guard(
                lambda: run_simulation(
                    server_app,
                    client_app,
                    num_supernodes=workload.num_clients,
                    backend_config={
                        "init_args": {"num_cpus": CORES},
                        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                    },
                )
            )
        )
        self.simulation.start()
        self.handover.wait_until_ready()
        # Flower starts its actors behind our back: a first round shows that they are there.
        self.handover.run(workload.cohort(0)[: 2 * CORES])
        self.reset()

    def serve_rounds(self, grid: Grid, context: Context) -> None:
        strategy = FedAvgOfCohort(self.workload.path)
        while len(list(grid.get_node_ids())) < self.workload.num_clients:
            time.sleep(0.05)  # Flower registers its nodes meanwhile.
        while (cohort := self.handover.next_cohort()) is not None:
            strategy.cohort = cohort
            result = strategy.start(grid=grid, initial_arrays=self.arrays, num_rounds=1)
            self.arrays = result.arrays

    def round(self, clients: list[int]) -> None:
        self.handover.run(clients)

    def params(self) -> Params:
        return {name: value.numpy() for name, value in self.arrays.to_torch_state_dict().items()}

    def reset(self) -> None:
        self.arrays = ArrayRecord({name: torch.from_numpy(value) for name, value in self.workload.params.items()})

    def close(self) -> None:
        self.handover.stop()
        self.simulation.join(timeout=20)
