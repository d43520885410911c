"""The fewest bytes that any method can send."""

from __future__ import annotations

import math

from sp_bench.plan.caches import CacheBlocks
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.tensors import DKV, DO, DQ, KV, OUT, O, Q, Tensor


def lower_bound_bytes(problem: Problem, phase: str, *, kept: bool = False) -> float:
    """The fewest payload bytes that any method with the same head split can send, mean over GPUs.

    Assumptions: exact attention, one owner per token, equal work on every GPU, and 1/h of the heads on each GPU (h = 1
    unless the method splits heads). A GPU that uses x query chunks and y key chunks computes at most x * y blocks; its
    share is rho * n * h blocks (rho = 1/2 if causal, else 1). It must receive x - 1 query chunks, send x - 1 partial
    outputs and receive y - 1 key chunks. Backward, the same holds for Q, dO and dQ by queries and for KV and dKV by
    keys; of O only a sum per row is needed. Q and KV don't count if the forward `kept` what it received. The bound is
    the minimum over x with y = rho * n * h / x. For full attention, forward, k = kv_heads / heads:
        h = 1   4 N d sqrt(k / n) - (2 + 2 k) N d / n elements; Mesh-Attention reaches it at a = sqrt(k n)
        h = n   4 N d (n - 1) / n^2 elements; DeepSpeed-Ulysses reaches it
    For a pack of documents, and for caches, the bound is for the way they are assigned, whatever the work
    (PackBlocks.least_moved, CacheBlocks.least_moved); what is split by heads inside a chunk is added.
    Of padded heads, the bound is that of the true ones.
    """
    split, problem = problem.layout.head_parallel, problem.in_one_slice

    def payload_bytes(tensor: Tensor) -> float:
        return float(problem.true_share(tensor) * problem.mean_wire_bytes(tensor, statistics=False))

    q, kv = payload_bytes(Q.by_heads) / split, payload_bytes(KV.by_heads) / split
    if phase == "forward":
        per_row = q + min(payload_bytes(O.by_heads), payload_bytes(OUT.by_heads)) / split
        per_column = kv
    else:
        per_row = (0 if kept else q) + (payload_bytes(DO.by_heads) + payload_bytes(DQ.by_heads)) / split
        per_column = payload_bytes(DKV.by_heads) / split + (0 if kept else kv)
    if isinstance(problem.blocks, PackBlocks | CacheBlocks):
        per_row -= q * problem.queries_everywhere
        per_query, per_key = (
            each * problem.n / side.seqlen for each, side in ((per_row, problem.queries), (per_column, problem.keys))
        )
        moved = split * problem.blocks.least_moved(per_query, per_key) / problem.n
        return moved + (split - 1) * (per_row + per_column)
    blocks = problem.n * problem.pairs / (problem.seqlen * problem.keys.seqlen) * split
    least, most = max(blocks / problem.n, 1.0), max(min(blocks, problem.n), 1.0)
    rows = min(max(math.sqrt(blocks * per_column / per_row), least), most)
    columns = max(blocks / rows, 1.0)
    return max(0.0, (rows - 1) * per_row + (columns - 1) * per_column)


def least_bytes(problem: Problem, phase: str) -> float | None:
    """The fewest payload bytes that any method can send, however it splits heads, mean over GPUs; None for a pack,
    and for caches.

    Assumptions: exact attention, one owner per token with all of its heads, equal work on every GPU. A unit is a
    chunk's tokens N/n with one head. A GPU that uses X query units and y key units of the g heads of one key head
    computes at most X y of their blocks. It owns g of X and one of y, so that it sends or receives
        F(w) = min over X y >= w of  per_row (X - g) + per_column (y - 1)
    for w blocks: nothing up to w = g. The GPU's share is rho n heads blocks (rho = 1/2 if causal, else 1). Where
    per_row g >= per_column n, keys are so cheap that F is convex and all key heads take equal parts, with X = g; where
    per_column >= per_row g n, as behind a long history, queries are so cheap, and y = 1. Else F is concave from w = g
    on, and the share costs least where all key heads but one have either their g free blocks or as many as there are,
    rho g n^2. Backward, the forward may have kept what it received, so that only dO, dQ and dKV count. For full
    attention with as many key heads as heads, n or more, it is between n / (n + 1) and 1 of what
    DeepSpeed-Ulysses sends.
    """
    if not problem.mask.sends_unseen or problem.decodes:
        return None
    n, g, whole = problem.n, problem.heads // problem.kv_heads, problem.in_one_slice

    def of_a_head(tensor: Tensor, heads: int) -> float:
        return float(whole.true_share(tensor) * whole.mean_wire_bytes(tensor, statistics=False)) / heads

    if phase == "forward":
        partial = min(of_a_head(O, problem.heads), of_a_head(OUT, problem.heads))
        per_row, per_column = of_a_head(Q, problem.heads) + partial, of_a_head(KV, problem.kv_heads)
    else:
        per_row = of_a_head(DO, problem.heads) + of_a_head(DQ, problem.heads)
        per_column = of_a_head(DKV, problem.kv_heads)

    def cost(blocks: float) -> float:
        columns = math.sqrt(per_row * blocks / per_column)
        columns = min(max(columns, 1.0, blocks / (g * n)), n, max(blocks / g, 1.0))
        return per_row * max(blocks / columns - g, 0.0) + per_column * (columns - 1)

    rho = problem.pairs / (problem.seqlen * problem.keys.seqlen)
    most = g * (rho * n**2 - 1)
    """Most blocks of one key head that need a transfer: a count."""
    beyond = problem.heads * (rho * n - 1)
    if beyond <= 0:
        return 0.0
    if per_row * g >= per_column * n:
        return problem.kv_heads * per_column * (rho * n - 1)
    if per_column >= per_row * g * n:
        return problem.heads * per_row * (rho * n - 1)
    full, rest = divmod(beyond, most)
    return full * cost(g + most) + cost(g + rest)
