"""A plain PyTorch loop over clients, as one would write it for a paper: one model, one thread."""

import torch

from peers import torch_training as training
from peers.protocol import Params
from peers.workloads import Workload


class Peer:
    version = f"torch {torch.__version__}, 1 thread"

    def load(self, workload: Workload) -> None:
        torch.set_num_threads(1)
        self.workload = workload
        self.model = training.build_model(workload)
        self.data = [training.client_tensors(workload, client) for client in range(workload.num_clients)]
        self.reset()

    def reset(self) -> None:
        self.global_params = {name: torch.from_numpy(value.copy()) for name, value in self.workload.params.items()}

    def round(self, clients: list[int]) -> None:
        settings, sizes = self.workload.settings, self.workload.sizes
        total = int(sizes[clients].sum())
        mean = {name: torch.zeros_like(value) for name, value in self.global_params.items()}
        for client in clients:
            self.model.load_state_dict(self.global_params)
            training.train(self.model, self.data[client], settings.batch_size, settings.learning_rate)
            for name, value in self.model.state_dict().items():
                mean[name].add_(value, alpha=sizes[client] / total)
        self.global_params = mean

    def params(self) -> Params:
        return {name: value.numpy() for name, value in self.global_params.items()}

    def close(self) -> None:
        pass
