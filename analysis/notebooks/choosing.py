# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Which method and tile to choose
#
# All methods on the same kernels, networks and masks. Times are simulated; volumes, their bounds and memory are
# computed from the plans.

# %%
import os
from pathlib import Path

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import choosing
from sp_bench.analysis.studies.choosing_grid import METHODS

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## The points
#
# GPUs, seqlen, KV heads and clusters, and the points that can't be served.

# %%
choosing.points(runs)

# %% [markdown]
# ## The fastest method
#
# Among all methods, and then among those that don't split heads: tensor parallelism may have split them already.

# %%
choosing.maps(runs)

# %%
choosing.maps_whole_heads(runs)

# %% [markdown]
# ## The tile
#
# The tile that sends least is known without a simulation. What does it cost to take it?

# %%
choosing.tiles(runs)

# %% [markdown]
# ## Volume, memory and bounds
#
# How far volumes are above their lower bound, how much memory speed takes, and how near steps are to their bounds.

# %%
choosing.volume(runs)

# %%
choosing.memory(runs)

# %%
choosing.orders(runs)

# %%
choosing.bounds(runs)

# %% [markdown]
# ## Where the papers' claims stop
#
# The links, tokens and topologies up to which they hold.

# %%
choosing.limits(runs)

# %% [markdown]
# ## Try it yourself
#
# A point of your own: any keys of `python -m sp_bench`.

# %%
yours = {"gpus": 32, "seqlen": "256k", "cluster": "h200_ndr400", "kv_heads": 4}
for method in METHODS:
    record = runs.one(method=method, **yours)
    print(method, record.variant or "", record.step_ms_median or record.error)

# %%
for candidate in runs.one(method="mesh", **yours).candidates or []:
    print(candidate)
