"""Mesh by rows and by columns: the same work and volume, and the memory that the header says."""

from __future__ import annotations

import itertools

import pytest

from sp_bench import account
from sp_bench.check import check_all
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan import Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.method import PHASES
from sp_bench.plan.ops import Attend, AttendBackward
from sp_bench.plan.tensors import Q


def problem(n: int, kv_heads: int = 8) -> Problem:
    """With rows so long that statistics are below 0.001 of a chunk each."""
    return Problem(n=n, seqlen=2 * n, heads=8, kv_heads=kv_heads, head_dim=4096, layout=LAYOUTS["striped"])


@pytest.mark.parametrize("n", [1, 2, 6, 12, 16])
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_every_tile_is_proven_and_sends_what_its_formula_says(n: int, order: str) -> None:
    for tile, placement in itertools.product(tiles(n), ("q", "kv")):
        method, asked = build("mesh", {"tile": tile, "schedule": order, "placement": placement}), problem(n)
        plans = {phase: method.plan(asked, phase, COMPUTE_BOUND) for phase in PHASES}
        check_all(plans, method.assigned(asked))
        for phase, plan in plans.items():
            assert account.volume(plan, asked).total_bytes == method.bytes_sent(asked, phase)


@pytest.mark.parametrize("u", [2, 4])
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_it_is_proven_with_heads_and_row_sums_too(order: str, u: int) -> None:
    asked = problem(16)
    for tile, row_sums in itertools.product(tiles(16 // u), (False, True)):
        method = build("mesh", {"tile": tile, "schedule": order, "ulysses": u, "row_sums": row_sums})
        check_all({phase: method.plan(asked, phase, COMPUTE_BOUND) for phase in PHASES}, method.assigned(asked))


def peaks(a: int, b: int, kv_heads: int, order: str) -> list[float]:
    """Peak memory forward and backward, in chunks of Q."""
    asked = problem(a * b, kv_heads)
    method, unit = build("mesh", {"tile": (a, b), "schedule": order}), asked.chunk_bytes(Q, wire=True)
    return [account.peak_bytes([method.plan(asked, phase, COMPUTE_BOUND)], asked) / unit for phase in PHASES]


@pytest.mark.parametrize(("a", "b"), [(4, 4), (4, 8), (8, 4), (8, 8)])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_peak_memory_is_the_formula(a: int, b: int, kv_heads: int) -> None:
    k = kv_heads / 8
    assert peaks(a, b, kv_heads, "rows") == pytest.approx([2 * k * b + 12, 6 * k * b + 6 * k + 18], abs=0.05)
    assert peaks(a, b, kv_heads, "columns") == pytest.approx([3 * a + 6 * k + 3, 5 * a + 24 * k + 3], abs=0.05)


def test_one_of_them_needs_less_than_the_papers_order_backward() -> None:
    """16 x 16: 107 and 120 chunks where the paper's algorithm 3 needs 176 at least, all that it has received."""
    paper, rows, columns = (peaks(16, 16, 8, order)[1] for order in ("paper", "rows", "columns"))
    assert paper > 5 * 16 + 6 * 16
    assert columns == pytest.approx(107, abs=0.1) and rows == pytest.approx(120, abs=0.1)


@pytest.mark.parametrize("phase", PHASES)
def test_blocks_go_line_by_line(phase: str) -> None:
    for order, axis in (("rows", "q"), ("columns", "kv")):
        plan = build("mesh", {"tile": (4, 4), "schedule": order}).plan(problem(16), phase, COMPUTE_BOUND)
        lines = [getattr(op, axis).index for op in plan.ops if isinstance(op, Attend | AttendBackward)]
        assert lines == sorted(lines) and len(set(lines)) == 4
