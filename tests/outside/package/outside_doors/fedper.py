"""FedPer: Arivazhagan et al., Federated Learning with Personalization Layers, 2019."""

from bespoke.declarations import Card
from bespoke.method import Setting
from bespoke.methods import FedAvg
from bespoke.methods.parts.heads import body_and_head


class FedPer(FedAvg):
    """A shared body, and a last layer of its own for every client; both are trained together."""

    card = Card("fedper", "Arivazhagan et al., 2019", personal="the shared body with a last layer of its own")
    private = {"head": "the client's own last layer"}

    def init_server(self, params, setting=Setting()):
        body, head = body_and_head(self.task, params)
        return {**super().init_server(body, setting), "head": head}

    def server_round(self, server, cohort):
        return {**super().server_round(server, cohort), "head": server["head"]}

    def params(self, server):
        return {**server["params"], **server["head"]}

    def init_private(self, params):
        return {"head": body_and_head(self.task, params)[1]}

    def client_round(self, down, private, batches):
        trained = self.train({**down["params"], **private["head"]}, batches)
        body, head = body_and_head(self.task, trained)
        return {"head": head}, self.change(body, down["params"], batches)

    def personalize(self, down, private, support):
        yield {**down["params"], **private["head"]}
