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
# # Which method, honestly
#
# Every time is simulated, with the interval that two of three measurements like it were in or, where there are none,
# one that is assumed. Methods whose intervals overlap that of the fastest are too close to call.

# %%
import os
from pathlib import Path

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import honest

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## Regions

# %%
honest.regions(runs)

# %% [markdown]
# ## The network, and more GPUs

# %%
honest.nics(runs)

# %%
honest.scale(runs)

# %% [markdown]
# ## Heads as an axis, fused blocks, and limits

# %%
honest.heads(runs)

# %%
honest.fusion(runs)

# %%
honest.limits(runs)
