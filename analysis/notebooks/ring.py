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
# # Ring Attention
#
# Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023, and an explainer of it.
# Every rank keeps its queries while keys and values go round; a transfer is hidden if a block takes as long.

# %%
import os
from pathlib import Path

from sp_bench.analysis.number import of_record
from sp_bench.analysis.runs import Runs
from sp_bench.analysis.studies import ring
from sp_bench.analysis.studies.ring_hidden import onsets
from sp_bench.analysis.studies.ring_model import Setting

runs = Runs(Path(os.environ.get("SP_BENCH_RECORDS", "results/report/records")))

# %% [markdown]
# ## Memory
#
# The paper's claim: what a rank holds depends on its own tokens, so that sequences grow with the number of GPUs.

# %%
ring.memory(runs)

# %% [markdown]
# ## When communication is hidden
#
# The paper's condition: c >= F / B, a device's FLOP/s over the bytes per second that it sends.

# %%
ring.condition(runs)

# %% [markdown]
# ## A fixed sequence on more GPUs

# %%
ring.hidden(runs)

# %% [markdown]
# ## An explainer's example
#
# 1M tokens on 8 GPUs, in a few lines of arithmetic. Each number again.

# %%
ring.explainer(runs)

# %% [markdown]
# ## Try it yourself
#
# Four nodes instead of two: the slowest hop is the same, and so is the least block.

# %%
four = Setting("h200_ndr400", nodes=4)
four.gpus, four.paper_tokens().text(), four.least_tokens().text(), onsets(runs, [four])[0].from_block.text()

# %%
record = runs.one(method="ring", cluster="h100_ndr400", gpus=64, seqlen=2**22, kv_heads=8, mode="simulate")
[of_record(record, field).text() for field in ("step_ms_median", "exposed_comm_ms")]
