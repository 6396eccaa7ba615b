# %% [markdown]
# # Reading a comparison
#
# A comparison gives an answer in words, numbers by method, numbers by client, and figures. This page shows what to
# read, and in which order. The clients are synthetic: twenty have a rule near the common rule; ten have a rule far from
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
# over clients agree. The other sentences say how many clients are hurt, how the worst clients are served, and what it
# costs.

# %%
for sentence in result.answer:
    print("-", sentence)

# %% [markdown]
# ## The table
#
# In a notebook the result displays itself as a table. `change` is the difference from the baseline, with a 95 %
# interval over clients. `p` is a paired test over clients, corrected for the number of methods. `hurt` counts clients
# that are worse off by more than the noise of their test rows. Constant and pooled are references: a constant
# prediction, and one model trained on all rows in one place.

# %%
result

# %% [markdown]
# ## What to doubt
#
# Concerns are problems found in the runs: too few clients, a baseline that had not converged, clients tested on few
# rows.

# %%
for concern in result.concerns:
    print(f"{concern.severity}: {concern.text}")

# %% [markdown]
# ## Who gains, and who loses
#
# A mean hides single clients. Each point is a client. For an error, a point below zero is a client for which the method
# is better than the baseline.

# %%
result.figure("change", method="finetune")

# %% [markdown]
# The same numbers are in a table, for your own questions. For example: do the clients far from the others gain?

# %%
changes = result.clients.groupby(["method", "group"])["change"]
changes.agg(["mean", "min", "max"]).round(3)

# %% [markdown]
# ## While it trained
#
# The figure shows the validation metric by round: the mean over seeds and the range of the seeds. `result.figures`
# lists all figures. `report.html` in the folder has them on one page, which opens without a network.

# %%
print(result.figures)
result.figure("rounds")

# %% [markdown]
# ## By numbers
#
# All numbers behind the words are available. Each number has its spread over seeds.

# %%
for method in result.methods:
    print(f"{method.title:10} {method.mean.value:.3f}, worst tenth {method.worst_tenth.value:.3f}")
