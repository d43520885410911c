"""Count what a plan sends, computes and holds, without running it.

Bytes are per GPU: by rank, or the mean over ranks. Payload and statistics (the lse) are counted separately, since the
papers count payload only.
"""

from sp_bench.account.bounds import least_bytes, lower_bound_bytes
from sp_bench.account.memory import buffer_bytes, peak_bytes
from sp_bench.account.sent import Traffic, Volume, sent_across_nodes, traffic, volume
from sp_bench.account.work import least_imbalance, model_flops, pairs, work_imbalance

__all__ = [
    "Traffic", "Volume", "buffer_bytes", "least_bytes", "least_imbalance", "lower_bound_bytes", "model_flops", "pairs",
    "peak_bytes", "sent_across_nodes", "traffic", "volume", "work_imbalance",
]  # fmt: skip
