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
# # Published measurements
#
# Others' times of attention on GPUs beside their simulation: errors, the order of methods, what was fitted to which.

# %%
import os
from pathlib import Path

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import published

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## Errors by source

# %%
published.errors(runs)

# %% [markdown]
# ## Which method is faster

# %%
published.order(runs)

# %% [markdown]
# ## What was fitted

# %%
published.fitted(runs)

# %% [markdown]
# ## All points

# %%
published.points(runs)
