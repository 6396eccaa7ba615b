# %% [markdown]
# # Your own method
#
# A method defines what is sent, what stays on the client, and what clients and server compute. It does not deal with
# processes, files or privacy, which are the same for all methods. This page writes FedPer (Arivazhagan et al., 2019)
# from scratch: clients share the body of a network, and each client keeps its own last layer.

# %%
import bespoke
from bespoke.declarations import Card
from bespoke.methods import FedAvg
from bespoke.methods.parts.heads import body_and_head

# %% [markdown]
# ## The idea in code
#
# FedAvg already has the shared part: local training, the change that is sent, and the server's step. FedPer changes
# what is shared. On the server, `init_server` makes the first state and `params` returns the model. On the client,
# `init_private` makes the private state, `client_round` returns (private state, message), and `personalize` yields the
# model with which the client is tested.
#
# These are pure functions. A client's functions see one client and never the server's state. `uplink` declares what is
# sent. Here it is inherited from FedAvg: a change and a weight, of which the server learns the sums.


# %%
@bespoke.register
class FedPer(FedAvg):
    """A shared body, and one last layer per client; both are trained together."""

    card = Card("fedper", "Arivazhagan et al., 2019", personal="the shared body with a last layer of its own")
    private = {"head": "the client's own last layer"}

    def init_server(self, params, setting=None):
        body, head = body_and_head(self.task, params)
        return {**super().init_server(body), "head": head}  # the head of clients that have none yet

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


# %% [markdown]
# ## Run it
#
# The data are handwritten digits of twenty clients with few classes each. The method is tuned, trained, chosen and
# reported like the methods of bespoke. Its knobs are the fields of the dataclass, here those of FedAvg.

# %%
result = bespoke.compare(
    data="digits", out="runs/own-method", methods=["fedavg", FedPer, "fedrep"], rounds=20, seeds=1, tune=False,
    settings={
        "model": {"name": "mlp", "hidden": [32]},
        "data": {"options": {"clients": 20, "partition": "dirichlet", "alpha": 0.2}},
    },
)  # fmt: skip
result

# %%
fedper = result.methods[1]
result.figure("change", method=fedper.label)

# %% [markdown]
# ## What the server saw
#
# The traffic is counted from the messages that were sent, not from the method's declaration. FedPer sends less than
# FedAvg, because heads stay on the clients.

# %%
for method in result.methods:
    print(f"{method.title}: {method.cost.bytes:,.0f} bytes of a client; the server learns {method.revealed}")

# %% [markdown]
# ## Beyond this notebook
#
# A class in a notebook works only in this process. Worker processes, `jobs=2`, the command line and later commands must
# import it. Put it into a module, `mypkg/fedper.py`. Then it has a name everywhere:
#
# - in Python `methods=["mypkg.fedper:FedPer"]`, or the class itself;
# - on the command line `bespoke compare --methods fedavg,mypkg.fedper:FedPer`;
# - in a file `[[stage]] method = "mypkg.fedper:FedPer"`;
# - in an installed package as an entry point of the group `bespoke.methods`, under a short name.
#
# In a test of that package, `bespoke.testing.check_method(FedPer)` checks everything that the contract requires: every
# engine, worker processes, clipping and noise, an interruption, and messages that are not finite.
