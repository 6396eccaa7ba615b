# %% [markdown]
# # Privacy
#
# In federated learning rows stay with their clients, but what clients send still tells something about them. With
# `[privacy]` each client's message is cut to a bounded length, and noise is added to their sum. What this is worth is
# a number, epsilon: the smaller, the less anybody can tell from the model whether a client took part. This page needs
# the extra `privacy`.

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
# The same comparison without privacy, with a budget of epsilon = 8, and with one of epsilon = 1. The noise is
# calibrated to the budget. `public_statistics` says that the means and deviations by which features are standardized
# are public knowledge; else they would have to be paid for, too.

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
# Noise costs accuracy of the shared model. The personal model of a client is fine-tuned on the client itself, from
# the shared model that everybody may see: nothing of it leaves the client, so it costs no more epsilon.

# %%
for name, result in results.items():
    means = {method.title: round(method.mean.value, 4) for method in result.methods}
    print(f"{name:10} mean squared error per client: {means}")

# %% [markdown]
# ## What is promised
#
# The answer states epsilon with its delta. It is computed from the noise that was really added, round by round, and
# not from the plan.

# %%
for sentence in results["epsilon 1"].answer:
    if "epsilon" in sentence:
        print(sentence)

# %% [markdown]
# ## What is not told
#
# Clients of private runs have no names: not in the result, not on the page.

# %%
results["epsilon 1"].clients.head(3)

# %% [markdown]
# - A model is private only if nothing else of the run is made public that was computed from the rows without noise.
#   Validation scores and this table are for you, who hold the data in a simulation.
# - Trying settings costs privacy too. With `tune=True` the account of the folder counts every run.
# - Callbacks that end training early are refused here: how many rounds there are has to be known before the noise is
#   chosen.
#
# All options are in the [guide to privacy](../privacy.md).
