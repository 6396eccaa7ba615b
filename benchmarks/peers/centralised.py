"""No federation at all: one model sees every minibatch of the cohort in turn, with all cores. The floor."""

import torch

from peers import torch_training as training
from peers.protocol import CORES, Params
from peers.workloads import Workload


class Peer:
    version = f"torch {torch.__version__}, {CORES} threads"

    def load(self, workload: Workload) -> None:
        torch.set_num_threads(CORES)
        self.workload = workload
        self.model = training.build_model(workload)
        self.data = [training.client_tensors(workload, client) for client in range(workload.num_clients)]

    def reset(self) -> None:
        training.load_params(self.model, self.workload.params)

    def round(self, clients: list[int]) -> None:
        settings = self.workload.settings
        for client in clients:
            training.train(self.model, self.data[client], settings.batch_size, settings.learning_rate)

    def params(self) -> Params:
        return training.read_params(self.model)

    def close(self) -> None:
        pass
