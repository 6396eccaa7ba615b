# %% [markdown]
# # Reading a comparison
#
# A comparison gives an answer in words, numbers by method, numbers by client, and figures. This page shows what to
# look at, and in which order. The clients are made up: twenty have a rule near the common one, ten have one far from
# it and few rows.

# %%
import numpy as np

import bespoke

draw = np.random.default_rng(3)
rows = {}
for number in range(30):
    far = number >= 20
    rule = np.array([1.0, -1.0]) + (2.0 if far else 0.1) * draw.standard_normal(2)
    count = 24 if far else 60
    x = draw.standard_normal((count, 2))
    rows[f"{'far' if far else 'near'} {number}"] = x, x @ rule + draw.standard_normal(count)

groups = {name: name.split()[0] for name in rows}
result = bespoke.compare(
    bespoke.population(rows, group=groups), out="runs/reading", methods=["fedavg", "finetune", "local"], rounds=20,
    seeds=3, tune=False, settings={"model": {"name": "linear"}, "evaluate_every": 1},
    callbacks=[bespoke.EarlyStop(patience=5)],
)  # fmt: skip

# %% [markdown]
# ## The answer
#
# The first sentence says whether personalization helps. It names the best method only if the interval and the test
# over clients agree. The others say how many clients are hurt, what the worst served get, and what it costs.

# %%
for sentence in result.answer:
    print("-", sentence)

# %% [markdown]
# ## The table
#
# In a notebook the result shows itself. `change` is against the baseline, with a 95 % interval over clients. `p` is a
# paired test over clients, corrected for the number of methods. `hurt` counts clients that are worse off by more than
# the noise of their test rows. Constant and pooled are for reference: no model at all, and one model on all rows in
# one place.

# %%
result

# %% [markdown]
# ## What to doubt
#
# Concerns are found in the runs themselves: too few clients, a baseline that had not converged, clients tested on few
# rows.

# %%
for concern in result.concerns:
    print(f"{concern.severity}: {concern.text}")

# %% [markdown]
# ## Who gains, and who loses
#
# A mean hides whom it is made of. Each point is a client; below zero it is served better than by the baseline, for an
# error.

# %%
result.figure("change", method="finetune")

# %% [markdown]
# The same numbers are a table, for questions of your own. Here: is it the clients far from the others that gain?

# %%
changes = result.clients.groupby(["method", "group"])["change"]
changes.agg(["mean", "min", "max"]).round(3)

# %% [markdown]
# ## While it trained
#
# The validation metric by round, the mean over seeds and the range between them. `result.figures` lists all figures;
# `report.html` in the folder has them on one page, and opens without a network.

# %%
print(result.figures)
result.figure("rounds")

# %% [markdown]
# ## By numbers
#
# All that the words are made of is there. A number comes with its spread over seeds.

# %%
for method in result.methods:
    print(f"{method.title:10} {method.mean.value:.3f}, worst tenth {method.worst_tenth.value:.3f}")
