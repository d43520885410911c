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
# # Mesh-Attention
#
# Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved Data Locality". A GPU
# computes a tile of the assignment matrix, so that Q, KV and O all travel, but little. Every time of ours is simulated,
# on a cluster that was fitted to 30 cells of the paper's table 3 and tested on the other 18
# (docs/results/mesh_paper.md).

# %%
import os
from pathlib import Path

from sp_bench.analysis.mesh_fit import Cell
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import mesh
from sp_bench.analysis.studies.mesh_memory import kept_bytes
from sp_bench.analysis.studies.mesh_volume import WIDE, reduced
from sp_bench.methods.mesh import tiles

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## What the paper states
#
# The abstract: up to 3.4 times Ring's speed on 256 GPUs, and up to 85.4% less communication. All such claims, and ours.

# %%
mesh.claims(runs)

# %% [markdown]
# ## Table 2
#
# Volumes by formula, and counted from the plans.

# %%
mesh.table2()

# %% [markdown]
# ## Table 3
#
# Throughput of Ring and Mesh on 32 to 256 GPUs, and how much faster Mesh is.

# %%
mesh.table3(runs)

# %% [markdown]
# ## Table 4
#
# MFU, which the paper gives without a peak.

# %%
mesh.table4(runs)

# %% [markdown]
# ## Figure 8
#
# Ring scales to 64 GPUs and Mesh to 128, says the paper, and with the sequence Mesh's time grows less.

# %%
mesh.figure8(runs)

# %% [markdown]
# ## Figure 9a
#
# Nearly all of Ring's time is waiting. Mesh waits about three quarters less, says the paper.

# %%
mesh.figure9a(runs)

# %% [markdown]
# ## Table 5
#
# Peak memory, which also hints at the tiles that the authors ran.

# %%
mesh.table5(runs)

# %% [markdown]
# ## Figure 9b
#
# The bytes that each GPU sends, with our tiles and with the tiles nearest to table 5's peaks.

# %%
mesh.figure9b(runs)

# %% [markdown]
# ## Figure 10
#
# With fewer KV heads Ring sends less, so that Mesh has less to gain.

# %%
mesh.figure10(runs)

# %% [markdown]
# ## Other methods
#
# Methods that the paper doesn't time, on the same cluster.

# %%
mesh.others(runs)

# %% [markdown]
# ## Try it yourself
#
# Another cluster, or another problem: any key of `python -m sp_bench` can be given. Then the tiles of any number of
# GPUs: how much less than Ring they send, and the bytes held at the end of the backward pass.

# %%
for cluster in ("mesh_paper", "h100_ndr400"):
    for method in ("ring", "mesh", "usp"):
        record = runs.one(method=method, cluster=cluster, gpus=64, seqlen="512k")
        print(f"{cluster}: {method} {record.variant}, {record.step_ms_median:.0f} ms (simulated)")

# %%
cell = Cell(causal=True, seqlen=2**20, gpus=512, method="mesh")
for tile in tiles(cell.gpus)[1:]:
    both = {"forward": tile, "backward": tile}
    print(tile, reduced(cell, both, WIDE).text(".1f"), "%", kept_bytes(cell.problem, "backward", tile) / 1e9, "GB")
