"""Fused blocks on real ranks: exact, and in the memory that the plans say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sp_bench import account
from sp_bench.lower import GLOO
from sp_bench.methods import REGISTRY
from sp_bench.plan.costs import CostProfile
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Fused
from tests.run import jobs
from tests.run.matrix import DTYPES, assert_exact, everything
from tests.support.attention_cases import Case
from tests.support.marks import exhaustive
from tests.support.ranks import SIZES, Ranks

FUSED = (("fuse", True),)
SLOW = CostProfile(forward_block_s=1.0, backward_block_s=1.0, intra_latency_s=3.5, inter_latency_s=3.5)
"""Costs at which four blocks hide a hop."""
SETTINGS = (("zigzag", True), ("contiguous", False), ("contiguous", True), ("zigzag", False))


def fused(case: Case) -> Case:
    return replace(case, batch=1, options=(*case.options, *FUSED), costs=SLOW)


def has_fused(case: Case) -> bool:
    plans = [case.built.plan(case.problem, phase, case.costs) for phase in PHASES]
    return any(isinstance(op, Fused) for plan in plans for op in plan.ops)


def some() -> list[Case]:
    """Cases with something to fuse; from one to the next another layout, mask, dtype and number of key heads."""
    n = 8
    cases = [Case(n=n, method="mesh", tile=(2, 4), options=(("schedule", "rows"),)) for _ in range(2)]
    cases += [Case(n=n, method="mesh", tile=(4, 2), options=(("schedule", "columns"),))]
    cases += [Case(n=9, method="mesh", tile=(3, 3)) for _ in range(2)]
    cases += [
        Case(n=n, method="all_gather", options=(("stride", 2), ("collectives", c))) for c in ("library", "messages")
    ]
    cases += [Case(n=n, method="ulysses_all_gather", options=(("ulysses", 2),))]
    found = []
    for i, case in enumerate(cases):
        layout, causal = SETTINGS[i % 4]
        dtype, kv_heads = DTYPES[i % 3], (4, 2)[i // 2 % 2]
        found.append(fused(replace(case, layout=layout, causal=causal, dtype=dtype, kv_heads=kv_heads)))
    return found


def test_fused_blocks_are_exact(ranks: Ranks) -> None:
    cases = some()
    assert {case.method for case in cases if has_fused(case)} == {"mesh", "all_gather", "ulysses_all_gather"}
    assert_exact(ranks, cases)


def test_what_is_not_fused_is_exact(ranks: Ranks) -> None:
    """Chunks that differ in size, and several batch entries."""
    mesh = Case(n=8, method="mesh", tile=(4, 2), layout="zigzag", options=FUSED)
    assert_exact(ranks, [replace(mesh, batch=1, more=3), mesh])


@pytest.mark.parametrize("n", [exhaustive(n) for n in SIZES if n > 2])
def test_every_variant_is_exact(ranks: Ranks, n: int) -> None:
    """Each that has something to fuse, on every layout; masks and dtypes take turns."""
    cases = []
    for i, case in enumerate(everything(n)):
        for layout, causal in (SETTINGS[i % 2], SETTINGS[2 + i % 2]):
            if layout in REGISTRY[case.method].layouts:
                dtype = DTYPES[(i + n) % 3]
                cases.append(fused(replace(case, layout=layout, causal=causal, dtype=dtype)))
    wanted = [case for case in cases if has_fused(case)]
    assert wanted
    assert n < 6 or "mesh" in {case.method for case in wanted}
    assert_exact(ranks, wanted)


@pytest.mark.long
def test_buffers_and_memory_are_as_accounted(ranks: Ranks) -> None:
    cases = [case for case in some() if case.dtype != "float64" and has_fused(case)]
    answers = ranks.run(jobs.run_parts, cases)
    shares = []
    for case in cases:
        plans = [case.built.plan(case.problem, phase, case.costs) for phase in PHASES]
        expected = account.peak_bytes(plans, case.problem, GLOO)
        for parts in (answer[case] for answer in answers[: case.n]):
            assert parts.buffer_bytes == account.buffer_bytes(plans, case.problem, GLOO), case
            assert parts.live_bytes <= expected, case
            assert parts.differ_after == [], case
            shares.append(parts.live_bytes / expected)
    assert max(shares) > 0.8
