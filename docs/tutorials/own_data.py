# %% [markdown]
# # Your own data
#
# A comparison answers one question: are personal models better for these clients than one shared model? Here the
# clients are your own. You need rows, and the client of each row.

# %%
import numpy as np

import bespoke

draw = np.random.default_rng(0)
common = np.array([1.0, -1.0, 0.5])
rows = {}
for number in range(30):
    own = common + 0.7 * draw.standard_normal(3)  # every client has its own rule, near a common rule
    x = draw.standard_normal((40, 3))
    rows[f"client {number}"] = x, x @ own + 0.3 * draw.standard_normal(40)

# %% [markdown]
# ## From arrays
#
# `bespoke.population` takes a dict of (x, y) by client. Arrays, tensors and lists work. If the targets have fractions,
# the task is regression.

# %%
people = bespoke.population(rows)
print(len(people), "clients,", people.rows, "rows")

# %% [markdown]
# ## From a table
#
# A DataFrame works too. Name its columns: the client, the features and the target. An Arrow table and a Hugging Face
# dataset are used in the same way.

# %%
import pandas as pd

frame = pd.concat([pd.DataFrame(x, columns=["a", "b", "c"]).assign(who=who, y=y) for who, (x, y) in rows.items()])
same = bespoke.population(frame, client="who", x=["a", "b", "c"], y="y")
print(len(same), "clients,", same.rows, "rows")

# %% [markdown]
# ## Compare
#
# `shared` is one model for all clients. `local` trains one model per client. `mixed` also learns how much clients
# differ. Each client's rows are split into training, validation and test rows. `out` is the folder of the comparison.
# If the call is interrupted, the same call continues where it stopped.

# %%
result = bespoke.compare(people, out="runs/own-data", methods=["shared", "local", "mixed"], seeds=2)
result

# %% [markdown]
# `clients` is a table with one row per client, method and seed.

# %%
result.clients.query("method == 'mixed'").sort_values("change").head()

# %% [markdown]
# ## More data than memory
#
# A population can be written one client at a time. Runs then read rows from disk as they need them.

# %%
with bespoke.write_population("big", task="regression") as out:
    for who, (x, y) in rows.items():
        out.add(who, x=x, y=y)

again = bespoke.compare("big", out="runs/big", methods=["shared", "mixed"], seeds=1)
print(again.answer[0])

# %% [markdown]
# In an experiment file, name the folder: `[data] population = "big"`. A CSV file needs no preparation: `bespoke compare
# table.csv --client who --target y`.
