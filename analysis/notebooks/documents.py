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
# # Packed documents
#
# Documents of different lengths in one sequence: how to deal them to GPUs, with which method. Times are simulated;
# work, volumes and bounds on them are computed from the plans.

# %%
import os
from pathlib import Path

from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import documents
from sp_bench.analysis.studies.documents_grid import DEALINGS, asked

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## The packs
#
# Four distributions of lengths, on three numbers of GPUs.

# %%
documents.points(runs)

# %% [markdown]
# ## Methods and dealings
#
# Every method on every dealing that it supports.

# %%
documents.maps(runs)

# %% [markdown]
# ## Work and volume
#
# A dealing that is more even cuts more documents, and so needs more to be sent. How much of each, and how little it
# could be.

# %%
documents.bounds(runs)

# %% [markdown]
# ## The winners
#
# The fastest method and dealing, and those too close to call.

# %%
documents.winners(runs)

# %% [markdown]
# ## What nobody needs is not sent
#
# Plans are made for full attention; on a pack many of their blocks are empty.

# %%
documents.shares(runs)

# %% [markdown]
# ## Try it yourself
#
# Documents of your own: any keys of `python -m sp_bench`.

# %%
yours = {"data__median": "2k", "data__sigma": 0.5}
for dealing in DEALINGS:
    (record,) = runs.ask([asked("short", 8, "ring", layout=dealing, **yours)])
    print(dealing, record.step_ms_median, record.work_imbalance, record.comm_bytes_per_gpu)
