# %% [markdown]
# # Your own model
#
# The methods of bespoke can train any `torch.nn.Module`. This page uses a small convolutional network with BatchNorm
# and dropout, and handwritten digits. Every other client writes them in white on black.

# %%
import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import bespoke

digits = load_digits()
draw = np.random.default_rng(0)
order = draw.permutation(len(digits.target))
rows = {}
for number, mine in enumerate(np.array_split(order, 12)):
    pictures = (digits.images[mine] * 15).astype(np.uint8)
    rows[f"writer {number}"] = 255 - pictures if number % 2 else pictures, digits.target[mine]

people = bespoke.population(rows, task="classification")

# %% [markdown]
# ## The network
#
# The network is an ordinary module. `bespoke.model` adds what a federation needs to know. `head` is the name of the
# last layer, for methods that treat it separately. `buffers` says what happens to BatchNorm's running statistics: with
# `"average"` they are sent with the parameters; with `"private"` BatchNorm stays on each client, as in FedBN.
# `bespoke.model` takes a function that makes the module, so that every run starts from the weights of its own seed.


# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1)
        )
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x):
        return self.head(self.body(x))


averaged = bespoke.model(Net, head="head", buffers="average")
private = bespoke.model(Net, head="head", buffers="private")

# %% [markdown]
# ## Compare
#
# bespoke sets training mode and evaluation mode. Dropout is drawn from the seed, the round and the client, so an
# interrupted run continues to the same bytes.

# %%
asked = {"methods": ["fedavg", "finetune"], "rounds": 8, "seeds": 1, "tune": False}
results = {}
for name, net in {"averaged": averaged, "private": private}.items():
    results[name] = bespoke.compare(people, model=net, out=f"runs/{name}", **asked)
results["averaged"]

# %% [markdown]
# ## Private BatchNorm
#
# White and black paper shift the input of the first layer. Does it help if every client has its own BatchNorm? One seed
# and twelve clients are too few for an answer; they show where to look.

# %%
for name, result in results.items():
    print(f"{name:9}", {method.title: round(method.mean.value, 3) for method in result.methods})

# %% [markdown]
# ## Loss and metrics
#
# A loss takes outputs and targets of rows and returns a number for each row, or their mean. A metric returns a number
# for one client. `outputs` extracts the predictions from the result of `forward`, and `inputs` names its arguments. For
# a model of Hugging Face: `inputs=("input_ids", "attention_mask"), outputs=lambda o: o.logits`.


# %%
def smoothed(outputs, y):
    return nn.functional.cross_entropy(outputs, y, reduction="none", label_smoothing=0.1)


def third(outputs, y):
    """How often the right digit is among the three likeliest."""
    return float((outputs.topk(3).indices == y[:, None]).any(1).float().mean())


own = bespoke.model(Net, head="head", buffers="average", loss=smoothed, metrics={"third": third})
result = bespoke.compare(people, model=own, out="runs/loss", settings={"metric": "third"}, **asked)
print(result.answer[0])

# %% [markdown]
# ## Beyond this notebook
#
# A network in a notebook works only in this process. For worker processes, the command line and exports, put it into a
# module: `net = bespoke.model(...)` in `mypkg/nets.py`. Its name is then `model="mypkg.nets:net"` in Python and
# `[model] name = "mypkg.nets:net"` in a file.
