# %% [markdown]
# # Your own data
#
# A comparison answers one question: do personal models serve these clients better than one shared model? Here the
# clients are your own. You need rows, and who they belong to.

# %%
import numpy as np

import bespoke

draw = np.random.default_rng(0)
common = np.array([1.0, -1.0, 0.5])
rows = {}
for number in range(30):
    own = common + 0.7 * draw.standard_normal(3)  # every client has a rule of its own, near a common one
    x = draw.standard_normal((40, 3))
    rows[f"client {number}"] = x, x @ own + 0.3 * draw.standard_normal(40)

# %% [markdown]
# ## From arrays
#
# `bespoke.population` takes a dict of (x, y) by client. Arrays, tensors and lists will do. Targets with fractions
# make a regression.

# %%
people = bespoke.population(rows)
print(len(people), "clients,", people.rows, "rows")

# %% [markdown]
# ## From a table
#
# A DataFrame is the same thing in another form. Columns are named: who, what to predict from, what to predict. An
# Arrow table and a Hugging Face dataset are given the same way.

# %%
import pandas as pd

frame = pd.concat([pd.DataFrame(x, columns=["a", "b", "c"]).assign(who=who, y=y) for who, (x, y) in rows.items()])
same = bespoke.population(frame, client="who", x=["a", "b", "c"], y="y")
print(len(same), "clients,", same.rows, "rows")

# %% [markdown]
# ## Compare
#
# `shared` is one model for everyone, `local` one for each client by itself, `mixed` a model of how much clients
# differ. Each client's rows are split: some train, some choose, and the rest test. `out` is the folder of the
# comparison. If the call is interrupted, the same call goes on where it stopped.

# %%
result = bespoke.compare(people, out="runs/own-data", methods=["shared", "local", "mixed"], seeds=2)
result

# %% [markdown]
# Every client is a row of a table, for each method and seed.

# %%
result.clients.query("method == 'mixed'").sort_values("change").head()

# %% [markdown]
# ## More than memory holds
#
# A population may be written one client at a time. Runs then read rows from disk as they need them.

# %%
with bespoke.write_population("big", task="regression") as out:
    for who, (x, y) in rows.items():
        out.add(who, x=x, y=y)

again = bespoke.compare("big", out="runs/big", methods=["shared", "mixed"], seeds=1)
print(again.answer[0])

# %% [markdown]
# In a file for the command line, the folder is `[data] population = "big"`. A CSV file needs nothing at all: `bespoke
# compare table.csv --client who --target y`.
