"""One worker of `peers/pfl.py`: pfl's FederatedAveraging on its simulated backend, users' data in memory."""

import asyncio
import itertools
import threading
from dataclasses import replace
from typing import Any

import pfl
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from peers import torch_training as training
from peers.protocol import Handover, Params
from peers.workloads import Workload


class FedAvgOfCohort(FederatedAveraging):
    """Federated averaging that waits, before each round, to be told its cohort."""

    def __init__(self, workload: Workload, handover: Handover) -> None:
        super().__init__()
        self.workload = workload
        self.handover = handover
        self.upcoming = iter([])

    def next_user(self) -> int:
        return next(self.upcoming)

    def get_next_central_contexts(
        self, model: Any, iteration: int, algorithm_params: NNAlgorithmParams, *params: Any
    ) -> tuple[Any, Any, Metrics]:
        cohort = self.handover.next_cohort()
        if cohort is None:
            return None, model, Metrics()
        # Workers take turns: neighbours of like size give them like work. pfl draws whole turns, so an odd cohort
        # needs one draw more than it has users.
        cohort = sorted(cohort, key=self.workload.sizes.__getitem__)
        self.upcoming = itertools.cycle(cohort)
        algorithm_params = replace(algorithm_params, train_cohort_size=len(cohort))
        # Iteration 0 would evaluate every user before and after training.
        return super().get_next_central_contexts(model, iteration + 1, algorithm_params, *params)


class Peer:
    version = f"pfl {pfl.__version__}, torch {torch.__version__}"

    def load(self, workload: Workload) -> None:
        torch.set_num_threads(1)
        settings = workload.settings
        self.workload = workload
        self.model = training.build_model(workload)
        self.model.metrics = lambda *batch: {}  # pfl insists on it, but nothing is evaluated here.
        self.handover = Handover()
        algorithm = FedAvgOfCohort(workload, self.handover)
        users = [
            PyTorchTensorDataset(training.client_tensors(workload, client), user_id=str(client))
            for client in range(workload.num_clients)
        ]
        dataset = FederatedDataset(users.__getitem__, algorithm.next_user)

        def train() -> None:
            asyncio.set_event_loop(asyncio.new_event_loop())  # pfl asks for the thread's own
            algorithm.run(
                NNAlgorithmParams(
                    central_num_iterations=10**9,
                    evaluation_frequency=10**9,
                    train_cohort_size=settings.clients_per_round,
                    val_cohort_size=None,
                ),
                SimulatedBackend(training_data=dataset, val_data=dataset, postprocessors=[WeightByDatapoints()]),
                PyTorchModel(self.model, torch.optim.SGD, torch.optim.SGD(self.model.parameters(), lr=1.0)),
                NNTrainHyperParams(
                    local_num_epochs=1,
                    local_learning_rate=settings.learning_rate,
                    local_batch_size=settings.batch_size,
                ),
                send_metrics_to_platform=False,
            )

        self.training = threading.Thread(target=self.handover.guard(train))
        self.training.start()
        self.handover.wait_until_ready()

    def round(self, clients: list[int]) -> None:
        self.handover.run(clients)

    def params(self) -> Params:
        return training.read_params(self.model)

    def reset(self) -> None:
        training.load_params(self.model, self.workload.params)

    def close(self) -> None:
        self.handover.stop()
        self.training.join(timeout=20)
