"""account: volumes against the papers' formulas, FLOPs against brute force, memory against what the executor holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from methods import build
from methods.mesh import tiles
from sp_bench import account
from sp_bench.plan import COMPUTE_BOUND, LAYOUTS, PHASES, Problem, layout_named


def problem(n: int, *, k: int = 1, causal: bool = False, dtype: str = "bfloat16", layout: str = "auto") -> Problem:
    """8 tokens a rank, 4 heads of 16; kv_heads = 4 / k."""
    return Problem(
        n=n,
        seqlen=8 * n,
        heads=4,
        kv_heads=4 // k,
        head_dim=16,
        causal=causal,
        dtype=dtype,
        layout=layout_named(layout, causal=causal),
    )


@pytest.mark.parametrize("k", [1, 2, 4])
def test_lower_bound_is_the_formula_and_mesh_reaches_it(k: int) -> None:
    """4 N d sqrt(k/n) - (2 + 2k) N d / n elements, at a = sqrt(k n), here with k = kv_heads / heads."""
    ratio, n = 1 / k, 64
    p = problem(n, k=k)
    chunk = 8 * 4 * 16 * 2
    formula = (4 * n * math.sqrt(ratio / n) - (2 + 2 * ratio)) * chunk
    assert account.lower_bound_bytes(p, "forward") == pytest.approx(formula, rel=1e-12)
    sent = {}
    for tile in tiles(n):
        volume = account.volume(build("mesh", {"tile": tile}).forward(p, COMPUTE_BOUND), p)
        sent[tile] = volume.payload_bytes
    assert min(sent.values()) >= formula * (1 - 1e-12)
    a = round(math.sqrt(ratio * n))
    if a * a == ratio * n:
        assert sent[a, n // a] == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_nothing_sends_less_than_the_lower_bound(phase: str, causal: bool) -> None:
    for n in (1, 2, 3, 4, 6, 16, 60, 64):
        for k in (1, 2, 4):
            p = problem(n, k=k, causal=causal)
            bound = account.lower_bound_bytes(p, phase)
            assert bound >= 0
            for method in (build("ring", {}), *build("mesh", {}).candidates(p)):
                assert account.volume(method.plan(p, phase, COMPUTE_BOUND), p).payload_bytes >= bound * (1 - 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_pairs_are_those_of_the_mask(layout: str, causal: bool) -> None:
    """Over all ranks: every unmasked (query, key) pair, counted from token positions."""
    for n, tile in ((1, (1, 1)), (6, (2, 3)), (6, (6, 1)), (8, (4, 2))):
        p = problem(n, causal=causal, layout=layout)
        method = build("mesh", {"tile": tile, "layout": layout})
        by_rank = account.pairs(method.forward(p, COMPUTE_BOUND), p)
        ids = np.arange(p.seqlen)
        wanted = int((ids[:, None] >= ids[None, :]).sum()) if causal else p.seqlen**2
        assert by_rank.sum() == wanted
        assert (account.pairs(method.backward(p, COMPUTE_BOUND), p) == by_rank).all()
        if layout != "contiguous" or not causal:
            assert by_rank.max() - by_rank.min() <= p.local_seqlen * n, "a balanced layout"


def test_contiguous_causal_ring_is_as_unbalanced_as_the_paper_says() -> None:
    """Rank i has i whole blocks and half of one: Ring's critical rank does n - 1/2 of n blocks."""
    n = 8
    p = problem(n, causal=True, layout="contiguous")
    by_rank = account.pairs(build("ring", {"layout": "contiguous"}).forward(p, COMPUTE_BOUND), p)
    assert by_rank.tolist() == [i * 64 + 36 for i in range(n)]


def test_model_flops() -> None:
    """4 N^2 H D, half if causal, 3.5 times that with the backward."""
    p = problem(4)
    assert account.model_flops(p, "forward") == 4 * 32**2 * 4 * 16
    total = sum(account.model_flops(problem(4, causal=True), phase) for phase in PHASES)
    assert total == 3.5 * 4 * 32**2 * 4 * 16 / 2


def test_across_nodes() -> None:
    """16 ranks in nodes of 4, tile 4x4: Q groups stay inside a node, KV groups cross at every hop."""
    p = problem(16)
    plan = build("mesh", {"tile": (4, 4)}).forward(p, COMPUTE_BOUND)
    across = account.sent_across_nodes(plan, p, lambda rank: rank // 4)
    assert (across == 3 * p.chunk_bytes("kv", wire=True)).all()
    ring = build("ring", {}).forward(p, COMPUTE_BOUND)
    across = account.sent_across_nodes(ring, p, lambda rank: rank // 4)
    leaves = np.array([rank % 4 == 0 for rank in range(16)])  # everything moves one rank back
    assert (across == leaves * 15 * p.chunk_bytes("kv", wire=True)).all()


def test_peak_memory_of_ring() -> None:
    """Forward: q, kv, two KV buffers, the fp32 accumulator with lse, and a block's result in bf16 with lse."""
    p = problem(4)
    tokens = 8 * 4  # of all heads
    q, lse, accumulator = tokens * 16 * 2, tokens * 4, tokens * 16 * 4
    wanted = q + 2 * q + 2 * (2 * q) + (accumulator + lse) + (q + lse)
    assert account.peak_bytes([build("ring", {}).forward(p, COMPUTE_BOUND)], p) == wanted


def test_peak_memory_does_not_grow_with_ring_but_with_the_tile() -> None:
    sizes = [account.peak_bytes([build("ring", {}).forward(problem(n), COMPUTE_BOUND)], problem(n)) for n in (4, 16)]
    assert sizes[0] == sizes[1]
    p = problem(16)
    by_tile = {t: account.peak_bytes([build("mesh", {"tile": t}).forward(p, COMPUTE_BOUND)], p) for t in tiles(16)}
    assert by_tile[4, 4] > by_tile[1, 16] == sizes[1]
