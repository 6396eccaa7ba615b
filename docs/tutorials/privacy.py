# %% [markdown]
# # Privacy
#
# In federated learning rows stay with their clients, but messages still reveal something about them. With `[privacy]`
# each client's message is clipped to a bounded norm, and noise is added to the sum. Epsilon measures the protection:
# the smaller epsilon is, the less the model reveals whether a client took part. This page needs the extra `privacy`.

# %%
import numpy as np

import bespoke

draw = np.random.default_rng(1)
rows = {}
for number in range(300):
    rule = np.array([1.0, -1.0]) + 0.3 * draw.standard_normal(2)
    x = draw.standard_normal((20, 2))
    rows[f"patient {number}"] = x, x @ rule + 0.3 * draw.standard_normal(20)

people = bespoke.population(rows)

# %% [markdown]
# ## What is compared
#
# The same comparison runs without privacy, with a budget of epsilon = 8, and with a budget of epsilon = 1. The noise is
# calibrated to the budget. `public_statistics` says that the means and deviations that standardize the features are
# public knowledge. Otherwise they would use a part of the budget.

# %%
asked = {"methods": ["fedavg", "finetune"], "rounds": 30, "seeds": 1, "tune": False}
settings = {"model": {"name": "linear"}}
results = {}
for name, epsilon in {"none": None, "epsilon 8": 8.0, "epsilon 1": 1.0}.items():
    terms = {"epsilon": epsilon, "clip": 0.5, "delta": 1e-3, "public_statistics": True, "public_schema": True}
    privacy = {} if epsilon is None else {"privacy": terms}
    results[name] = bespoke.compare(people, out=f"runs/{name}", settings={**settings, **privacy}, **asked)

# %% [markdown]
# ## What it costs
#
# Noise makes the shared model less accurate. A client's personal model is fine-tuned on the client itself, from the
# shared model that everybody may see. It never leaves the client, so it does not increase epsilon.

# %%
for name, result in results.items():
    means = {method.title: round(method.mean.value, 4) for method in result.methods}
    print(f"{name:10} mean squared error per client: {means}")

# %% [markdown]
# ## What is promised
#
# The answer states epsilon with its delta. Epsilon is computed from the noise that was really added, round by round,
# and not from the plan.

# %%
for sentence in results["epsilon 1"].answer:
    if "epsilon" in sentence:
        print(sentence)

# %% [markdown]
# ## What is not shown
#
# Clients of private runs have no names, neither in the result nor on the page.

# %%
results["epsilon 1"].clients.head(3)

# %% [markdown]
# - A model is private only if you publish nothing else that the run computed from the rows without noise. Validation
#   scores and this table are for you, because you hold the data in a simulation.
# - Trying settings costs privacy too. With `tune=True` the account of the folder counts every run.
# - Callbacks that end training early are refused here, because the number of rounds must be known before the noise is
#   calibrated.
#
# All options are in the [guide to privacy](../privacy.md).
