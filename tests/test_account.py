"""account: volumes against the papers' formulas, FLOPs against brute force, memory against what the executor holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from sp_bench import account
from sp_bench.lower import lower
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan import AllToAll, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL, FULL
from sp_bench.plan.method import PHASES
from sp_bench.plan.tensors import DKV, DO, DQ, KV, O, Q
from tests.support.marks import exhaustive
from tests.support.problems import all_methods, mask_of, splittable_problem


def problem(n: int, *, k: int = 1, causal: bool = False, dtype: str = "bfloat16", layout: str = "auto") -> Problem:
    """8 tokens a rank, 4 heads of 16; kv_heads = 4 / k."""
    return Problem(
        n=n,
        seqlen=8 * n,
        heads=4,
        kv_heads=4 // k,
        head_dim=16,
        mask=mask_of(causal),
        dtype=dtype,
        layout=mask_of(causal).layout(layout),
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
@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 16, exhaustive(60), exhaustive(64)])
def test_nothing_sends_less_than_the_lower_bound(n: int, causal: bool) -> None:
    """On zigzag, where a causal mask lets rows stay behind."""
    for kv_heads in (4 * n, n, 1):
        p = replace(splittable_problem(n, "zigzag", causal=causal), heads=4 * n, kv_heads=kv_heads)
        for method in all_methods(p):
            assigned = method.assigned(p)
            for phase in PHASES:
                plan = method.plan(p, phase, COMPUTE_BOUND)
                bound = account.lower_bound_bytes(assigned, phase, kept=bool(plan.kept))
                assert 0 <= bound * (1 - 1e-12) <= account.volume(plan, assigned).payload_bytes, (method, phase)
                least = account.least_bytes(assigned, phase)
                assert least is not None and 0 <= least * (1 - 1e-12) <= bound, (method, phase)


@pytest.mark.parametrize(
    ("causal", "kv_seqlen", "v_head_dim"),
    [(True, 200, 8), (True, 57, 4), (True, 16, 2), (False, 16, 8), (False, 24, 6), (False, 333, 8)],
)
def test_bounds_and_closed_forms_with_other_keys(causal: bool, kv_seqlen: int, v_head_dim: int) -> None:
    """Plans send the closed form, in chunks of queries and of keys, and no less than either bound."""
    for layout, kv_heads in itertools.product(LAYOUTS, (8, 2)):
        shape = {"heads": 16, "kv_heads": kv_heads, "kv_seqlen": kv_seqlen, "v_head_dim": v_head_dim}
        p = replace(splittable_problem(8, layout, causal=causal), **shape)
        for method, phase in itertools.product(all_methods(p), PHASES):
            plan, assigned = method.plan(p, phase, COMPUTE_BOUND), method.assigned(p)
            volume = account.volume(plan, assigned)
            assert volume.total_bytes == pytest.approx(method.bytes_sent(p, phase), rel=1e-12), (method, phase)
            bound = account.lower_bound_bytes(assigned, phase, kept=bool(plan.kept))
            least = account.least_bytes(assigned, phase)
            assert least is not None
            assert 0 <= least * (1 - 1e-12) <= bound <= volume.payload_bytes * (1 + 1e-12), (method, phase)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_the_bound_with_any_split_of_heads_is_all_but_reached_by_ulysses(n: int) -> None:
    """Full attention, as many key heads as heads, n dividing them: from n / (n + 1) of what Ulysses sends."""
    p = replace(splittable_problem(n, "contiguous", causal=False), heads=2 * n, kv_heads=2 * n)
    method = build("ulysses", {})
    for phase in PHASES:
        sent = account.volume(method.plan(p, phase, COMPUTE_BOUND), method.assigned(p)).payload_bytes
        least = account.least_bytes(p, phase)
        assert least is not None and sent * n / (n + 1) * (1 - 1e-12) <= least < sent


def test_the_bound_with_any_split_of_heads_is_the_least_of_all_shares() -> None:
    """By trying every rectangle of each key head: two key heads of two heads each, on three ranks."""
    p = Problem(n=3, seqlen=9, heads=4, kv_heads=2, head_dim=8, mask=FULL, layout=LAYOUTS["contiguous"])
    q, kv, g, n = p.chunk_bytes(Q, wire=True) / 4, p.chunk_bytes(KV, wire=True) / 2, 2, 3
    sides = [(x, y) for x in range(g, g * n + 1) for y in range(1, n + 1)]
    shares = [(x * y, 2 * q * (x - g) + kv * (y - 1)) for x, y in sides]
    whole = min(a + b for (m, a), (o, b) in itertools.product(shares, repeat=2) if m + o >= n * 4)
    least = account.least_bytes(p, "forward")
    assert least is not None and 0.6 * whole <= least <= whole


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("n", [1, 2, 4, 16])
def test_ulysses_reaches_the_lower_bound_exactly(n: int, k: int) -> None:
    """4 N d (n - 1) / n^2 elements at full attention and k = 1. Backward, since it kept Q, KV and O by heads."""
    p = replace(splittable_problem(n, "contiguous", causal=False), heads=16, kv_heads=16 // k)
    method = build("ulysses", {})
    assigned = method.assigned(p)
    for phase in PHASES:
        volume = account.volume(method.plan(p, phase, COMPUTE_BOUND), assigned)
        assert volume.payload_bytes == volume.total_bytes == account.lower_bound_bytes(assigned, phase, kept=True)
        if k == 1:
            assert volume.total_bytes * n**2 == 4 * p.seqlen * 16 * 8 * (n - 1) * 2
    assert account.lower_bound_bytes(assigned, "forward", kept=True) == account.lower_bound_bytes(assigned, "forward")


def unmasked(p: Problem) -> int:
    """(query, key) pairs that the mask lets through, counted from token positions."""
    ids = np.arange(p.seqlen)
    return int((ids[:, None] >= ids[None, :]).sum()) if p.mask == CAUSAL else p.seqlen**2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 2, 6, 8, 9, 16])
def test_pairs_are_those_of_the_mask(n: int, layout: str, causal: bool) -> None:
    """Over all ranks, for every method and variant: every unmasked (query, key) pair of every head."""
    p = splittable_problem(n, layout, causal=causal)
    for method in all_methods(p):
        assigned = method.assigned(p)
        by_rank = account.pairs(method.plan(p, "forward", COMPUTE_BOUND), assigned)
        assert by_rank.sum() == p.heads * unmasked(p), method
        backward = account.pairs(method.plan(p, "backward", COMPUTE_BOUND), assigned)
        if method.name == "burst_attention":  # its forward computes a rank's rows, its backward the columns
            assert backward.sum() == by_rank.sum(), method
        else:
            assert (backward == by_rank).all(), method


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_work_is_balanced_but_for_contiguous_causal(layout: str, causal: bool) -> None:
    """Tiles and rows of the matrix differ by half a row for each block at most; split heads don't differ at all."""
    p = replace(problem(8, causal=causal, layout=layout), heads=16, kv_heads=16)
    for method in all_methods(p):
        assigned = method.assigned(p)
        by_rank = account.pairs(method.plan(p, "forward", COMPUTE_BOUND), assigned)
        spread = by_rank.max() - by_rank.min()
        if assigned.layout.head_parallel == p.n or not causal:
            assert spread == 0
        elif layout != "contiguous":
            assert spread <= p.queries.most * p.n * p.heads, method


def test_contiguous_causal_ring_is_as_unbalanced_as_the_paper_says() -> None:
    """Rank i has i whole blocks and half of one: Ring's critical rank does n - 1/2 of n blocks."""
    n = 8
    p = problem(n, causal=True, layout="contiguous")
    by_rank = account.pairs(build("ring", {"layout": "contiguous"}).forward(p, COMPUTE_BOUND), p)
    assert by_rank.tolist() == [p.heads * (i * 64 + 36) for i in range(n)]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("n", "team"), [(4, 2), (16, 2), (16, 4), (36, 3)])
def test_ranks_that_keep_their_place_in_startrail_send_less(n: int, team: int, phase: str) -> None:
    """A rank whose digits are equal is its own partner: it is spared the exchange of C chunks, of KV and of dKV."""
    p = problem(n)
    plan = build("startrail", {"team": team}).plan(p, phase, COMPUTE_BOUND)
    volume = account.volume(plan, p)
    sent = np.array([sum(volume.of(rank).values()) for rank in range(n)])
    ranks = np.arange(n)
    equal = ranks % team == ranks // team % team
    assert sent[~equal].min() == sent[~equal].max() == volume.max_bytes
    spared = {"forward": (KV,), "backward": (KV, DKV)}[phase]
    assert (sent[equal] == volume.max_bytes - team * sum(p.chunk_bytes(t, wire=True) for t in spared)).all()
    assert volume.total_bytes == sent.mean()
    assert volume.sent_bytes == {key: by_rank.mean() for key, by_rank in volume.by_rank.items()}


def test_trimmed_tokenring_sends_halves_of_what_came_from_below() -> None:
    """Rank r gets Q of r + 1, ..., n - 1, 0, ..., r - 1, and returns the second half of the partials of the last r.

    Of what it sends on, the next rank down needs the whole of r, ..., n - 1, and for rank 0 that is rank n - 1.
    """
    n = 8
    p = problem(n, causal=True, layout="zigzag")
    half = p.chunk_bytes(Q, wire=True) // 2
    sent = account.volume(build("tokenring", {}).plan(p, "forward", COMPUTE_BOUND), p).by_rank
    assert sent["q", "q", "q"].tolist() == [half * (n - 1), *(half * (2 * (n - r) + r - 1) for r in range(1, n))]
    assert sent["o", "o", "out"].tolist() == [half * (2 * (n - 1 - r) + r) for r in range(n)]
    for by_rank in sent.values():
        assert 4 * by_rank.sum() == 3 * n * by_rank.max()


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
    assert (across == 3 * p.chunk_bytes(KV, wire=True)).all()
    ring = build("ring", {}).forward(p, COMPUTE_BOUND)
    across = account.sent_across_nodes(ring, p, lambda rank: rank // 4)
    leaves = np.array([rank % 4 == 3 for rank in range(16)])  # everything moves to the next rank
    assert (across == leaves * 15 * p.chunk_bytes(KV, wire=True)).all()


@pytest.mark.parametrize("phase", PHASES)
def test_across_nodes_is_the_traffic_between_them(phase: str) -> None:
    """Every method and variant, on nodes of 3 and of 1, where everything crosses."""
    n = 9
    base, ranks = splittable_problem(n, "zigzag"), np.arange(n)
    for method in all_methods(base):
        p = method.assigned(base)
        plan, between = method.plan(base, phase, COMPUTE_BOUND), np.zeros((n, n))
        for target, sent in account.traffic(plan, p):
            between[ranks, target] += sent
        assert not between.diagonal().any()
        assert between.max(initial=0) > 0
        for node in (1, 3):
            crossing = between * (ranks[:, None] // node != ranks // node)
            across = account.sent_across_nodes(plan, p, lambda rank, node=node: rank // node)
            np.testing.assert_array_equal(across, crossing.sum(axis=1))
        np.testing.assert_array_equal(between.sum(axis=1), sum(account.volume(plan, p).by_rank.values()))


def test_peak_memory_of_ring() -> None:
    """Forward: q, kv, two KV buffers, the fp32 accumulator with lse, and a block's result in bf16 with lse."""
    p = problem(4)
    tokens = 8 * 4  # of all heads
    q, lse, accumulator = tokens * 16 * 2, tokens * 4, tokens * 16 * 4
    wanted = q + 2 * q + 2 * (2 * q) + (accumulator + lse) + (q + lse)
    assert account.peak_bytes([build("ring", {}).forward(p, COMPUTE_BOUND)], p) == wanted


def test_peak_memory_of_ulysses_counts_what_is_kept() -> None:
    """In units of Q by heads, as bf16: what a rank has, what stands in staging buffers, what is computed."""
    p = build("ulysses", {}).assigned(problem(4))
    unit, lse = p.chunk_bytes(Q.by_heads, wire=True), 8 * 4 * 4
    assert unit == p.chunk_bytes(Q, wire=True)
    forward, backward = (build("ulysses", {}).plan(p, phase, COMPUTE_BOUND) for phase in PHASES)
    staged = 1 + 2 + 1  # to send q and kv, which are received in place; to receive out, which is sent in place
    kept = 1 + 2 + 1  # q_h, kv_h, o_h, with the lse
    # At the end of the forward: q, kv; what is kept, o_h as its one block made it; out.
    moving = 3 + kept + 1
    assert account.peak_bytes([forward], p) == (staged + moving) * unit + lse
    # At the end of the backward: do and what was kept; dq_h and dkv_h, as their one block made them; dq and dkv.
    moving = 1 + kept + 2 * 3
    staged, received = 1 + (1 + 2), 1  # to send do; to receive dq and dkv; do_h
    assert account.peak_bytes([backward], p) == (staged + received + moving) * unit + lse
    assert account.peak_bytes([forward, backward], p) == account.peak_bytes([backward], p)
    lean = replace(forward, kept=())
    assert account.peak_bytes([lean], p) == account.peak_bytes([forward], p), "they were received all the same"


@pytest.mark.parametrize(
    ("batch", "dtype", "wire", "staged"),
    [
        (1, "bfloat16", "bfloat16", 1 + 2 + 1),
        (1, "bfloat16", "float32", 1 + 2 + 1),
        (1, "float32", "bfloat16", 1 + 2 + 1),
        (1, "float32", "float32", 1 + 2 + 1),
        (2, "bfloat16", "bfloat16", 2 * (1 + 2 + 1)),
        (2, "float32", "float32", 2 * (1 + 2 + 1)),
    ],
)
def test_ulysses_stages_only_what_does_not_lie_as_it_travels(batch: int, dtype: str, wire: str, staged: int) -> None:
    """Tokens of one batch entry lie together by heads; o_h is held as the kernel made it, and dq_h as it travels.

    In units of what each weighs on the wire. O travels complete, so that the wire dtype is not for it.
    """
    p = build("ulysses", {}).assigned(replace(problem(4, dtype=dtype), batch=batch, wire_dtype=wire))
    plans = [build("ulysses", {}).plan(p, phase, COMPUTE_BOUND) for phase in PHASES]
    assert account.buffer_bytes(plans[:1], p) == staged * p.chunk_bytes(Q.by_heads, wire=True)
    own, copies = 1 / 4, {}
    for plan in plans:
        for op in plan.ops:
            if isinstance(op, AllToAll):
                packed, unit = lower(plan, p).packed_bytes(op), p.chunk_bytes(op.tensor, wire=True)
                copies[op.send.tensor] = [copied / unit for copied in packed]
    to_heads = {1: [1 - own, own], 2: [1 - own, 1]}[batch]
    assert copies[Q] == copies[KV] == copies[DO] == to_heads
    assert copies[O.by_heads] == [0 if batch == 1 else 1 - own, 1]
    as_held = dtype == wire or wire == "float32"
    assert copies[DQ.by_heads] == copies[DKV.by_heads] == [0 if batch == 1 and as_held else 1 - own, 1]


def test_peak_memory_does_not_grow_with_ring_but_with_the_tile() -> None:
    sizes = [account.peak_bytes([build("ring", {}).forward(problem(n), COMPUTE_BOUND)], problem(n)) for n in (4, 16)]
    assert sizes[0] == sizes[1]
    p = problem(16)
    by_tile = {t: account.peak_bytes([build("mesh", {"tile": t}).forward(p, COMPUTE_BOUND)], p) for t in tiles(16)}
    assert by_tile[4, 4] > by_tile[1, 16] == sizes[1]
