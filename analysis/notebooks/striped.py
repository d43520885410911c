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
# # Striped Attention
#
# Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023. With a causal mask, Ring
# Attention on contiguous tokens leaves some devices nothing to do while others compute full blocks. Dealing the tokens
# out in stripes gives every device half of every block.

# %%
import os
from pathlib import Path

from sp_bench.analysis.number import of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import striped
from sp_bench.analysis.studies.striped_measured import measured
from sp_bench.analysis.studies.striped_model import (
    attention_limit,
    cells,
    maximum_speedup,
    shared_limit,
    tiles_computed,
)

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## Work of each device in each round
#
# Section 3 and figure 4: Work(i, j). Here it is counted from the plans that are executed and simulated.

# %%
striped.work()

# %% [markdown]
# ## Theoretical maximum speedup
#
# Section 5 computes the most that a model's training can gain; tables 3 to 5 and appendix A print it for 100
# configurations. Here it is computed again, and the assumptions that the paper doesn't state are inferred.

# %%
striped.maximum()

# %% [markdown]
# ## Tiles
#
# The paper ascribes a part of the missing speedup to its tiles. This part can be computed.

# %%
striped.tiles()

# %% [markdown]
# ## Attention alone
#
# The paper gives no time of attention alone. Here it is simulated on 8 A100, against the limit 2 - 1/n.

# %%
striped.attention(runs)

# %% [markdown]
# ## Whole models
#
# The paper's speedups in training beside a layer of ours: attention as simulated, the rest at the peak.

# %%
striped.whole_model(runs)

# %% [markdown]
# ## Training steps
#
# Whole steps of all models and meshes on A100 (tables 2, 3 and 5): forward, backward, loss, update.

# %%
striped.training(runs)

# %% [markdown]
# ## Measured
#
# Real ranks on this machine's cores, which they may share.

# %%
measured(runs)

# %% [markdown]
# ## Try it yourself
#
# Other numbers of devices and of cores, other tiles, and a cell of the paper with another share of masked blocks.

# %%
[(n, attention_limit(n), shared_limit(n, cores=4)) for n in (2, 4, 8, 16)]

# %%
cell = next(cell for cell in cells() if cell.model == "7B" and cell.mesh == "2x4" and cell.seqlen == 2**18)
{tile: maximum_speedup(cell, masked_share=tiles_computed(cell.block, tile, tile)) for tile in (128, 1024, 4096, 16384)}

# %% [markdown]
# And another cluster: `cluster=b200`, say, or more nodes.

# %%
two = [
    of_record(
        runs.one(method=method, layout=layout, cluster="h100_ndr400", gpus=16, seqlen=2**19, mode="simulate"),
        "step_ms_median",
    )
    for method, layout in (("ring", "contiguous"), ("striped", "striped"))
]
two[0].over(two[1]).text(), attention_limit(16)
