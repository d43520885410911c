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
# # Published training steps
#
# Others' training throughput with sequence parallelism beside simulated steps. Nothing is fitted to any of it.

# %%
import os
from pathlib import Path

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import training_tables

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## maxtext on TPU v5p

# %%
training_tables.maxtext(runs)

# %% [markdown]
# ## prime-rl on 8 H200

# %%
training_tables.prime_rl(runs)

# %% [markdown]
# ## UPipe on 8 H100

# %%
training_tables.upipe(runs)
