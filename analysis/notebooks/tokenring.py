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
# # TokenRing
#
# Wang et al., "TokenRing: An Efficient Parallelism Framework for Infinite-Context LLMs via Bidirectional
# Communication", 2024. Q goes round the ring while partial outputs go straight home. Every time of ours is simulated.

# %%
import os
from pathlib import Path

from sp_bench.analysis.plans import step_ends_ms
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import tokenring
from sp_bench.analysis.studies.tokenring_figure6 import TESTBED

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## Table 1
#
# The paper compares parallelisms in words. Beside them, what a GPU sends: counted from the plans.

# %%
tokenring.table1(runs)

# %% [markdown]
# ## Figure 6
#
# The only times of the paper: steps of a forward pass on four A10 on PCIe. One of them set our link rate, the others
# are predictions.

# %%
tokenring.figure6(runs)

# %% [markdown]
# ## Both directions of links
#
# The paper's argument: Ring uses one direction of its links, TokenRing both, and the more the more GPUs there are.

# %%
tokenring.directions(runs)

# %% [markdown]
# ## Full mesh and NVSwitch
#
# The paper expects most on boards where any two GPUs are joined by a cable, and had none.

# %%
tokenring.topologies(runs)

# %% [markdown]
# ## A diffusion transformer
#
# The paper's first case study, on four GPUs and without times: DiT-XL, its attention, its forward and a training step.

# %%
tokenring.dit(runs)

# %% [markdown]
# ## Several nodes
#
# The paper proposes a hybrid, TokenRing inside nodes and Ring between them, without times.

# %%
tokenring.nodes(runs)

# %% [markdown]
# ## Try it yourself
#
# The same steps on other links, or with other sizes: any key of `python -m sp_bench` can be given.

# %%
for method in ("ring", "tokenring"):
    record = runs.one(method=method, cluster="ascend_oam", gpus=8, seqlen="32k", phase="forward", layout="zigzag")
    print(method, [round(ms, 2) for ms in step_ends_ms(record)], "ms until each step has ended")

# %%
for uplink in (13e9, 22e9):
    asked = {"cluster__intra__uplink_bytes_per_s": uplink, **TESTBED}
    times = {method: runs.one(method=method, **asked).forward_ms_median for method in ("ring", "tokenring")}
    print(f"uplinks of {uplink / 1e9:g} GB/s:", times)
