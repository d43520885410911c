"""The bytes that the run path counts, against the closed forms of the papers and against the plans."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest

from sp_bench import account
from sp_bench.methods import build
from sp_bench.methods.mesh import tiles
from sp_bench.plan import Pass, Problem
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.method import PHASES
from tests.run import jobs
from tests.support.attention_cases import BATCH, HEAD_DIM, HEADS, Case, of_each_method
from tests.support.marks import exhaustive, exhaustive_from
from tests.support.problems import all_methods, splittable_problem
from tests.support.ranks import Ranks

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
LSE_BYTES = 4
Volume = Mapping[tuple[str, str, str], int]
"""Bytes by (lane, tensor, field)."""


def closed_form(case: Case) -> tuple[Volume, Volume]:
    """Chunks that each rank sends forward and backward. Mesh-Attention, section 3.8; Ring is its tile 1 x n."""
    a, b = case.tile or (1, case.n)
    rows = BATCH * case.tokens
    compute, wire = ELEMENT_BYTES[case.dtype], ELEMENT_BYTES[case.wire_dtype or case.dtype]
    q, k = rows * HEADS * HEAD_DIM, rows * case.kv_heads * HEAD_DIM
    lse = rows * HEADS * LSE_BYTES
    gathered_kv = {("kv", "k"): (b - 1) * k * compute, ("kv", "v"): (b - 1) * k * compute}
    forward = gathered_kv | {
        ("q", "q"): (a - 1) * q * compute,
        ("o", "out"): (a - 1) * q * wire,
        ("o", "lse"): (a - 1) * lse,
    }
    backward = gathered_kv | {
        **{("odoq", field): (a - 1) * q * compute for field in ("q", "out", "dout")},
        ("odoq", "lse"): (a - 1) * lse,
        ("dq", "dq"): (a - 1) * q * wire,
        ("dkv", "dk"): (b - 1) * k * wire,
        ("dkv", "dv"): (b - 1) * k * wire,
    }

    def on_lanes(volume: dict[tuple[str, str], int]) -> Volume:
        one_lane = case.method == "mesh" and case.lanes != "each"
        return {("rings" if one_lane else t, t, f): count for (t, f), count in volume.items() if count}

    return on_lanes(forward), on_lanes(backward)


def count(ranks: Ranks, cases: Iterable[Case]) -> dict[Case, list[tuple[Volume, Volume]]]:
    """(forward, backward) of each rank of each case."""
    wanted = list(cases)
    answers = ranks.run(jobs.find_sent, wanted)
    return {
        case: [(sent, dict(Counter(total) - Counter(sent))) for sent, total in (a[case] for a in answers[: case.n])]
        for case in wanted
    }


def total_bytes(volume: Volume, *, statistics: bool) -> int:
    """All payload, or all statistics."""
    return sum(n_bytes for (_, _, field), n_bytes in volume.items() if (field == "lse") == statistics)


@pytest.mark.parametrize("n", exhaustive_from(6))
def test_every_lane_tensor_and_field_is_the_closed_form(ranks: Ranks, n: int) -> None:
    shapes = [Case(n=n, method="mesh", tile=tile, tokens=3) for tile in tiles(n)]
    cases = [
        replace(shape, kv_heads=kv_heads, dtype=dtype)
        for shape in (Case(n=n, method="ring", tokens=3), *shapes)
        for kv_heads in (HEADS, 1)
        for dtype in ELEMENT_BYTES
    ]
    cases += [replace(shape, lanes="each", kv_heads=2, dtype="bfloat16", wire_dtype="float32") for shape in shapes]
    wrong = [
        f"{case}, rank {rank}: {phase} {sent} instead of {expected}"
        for case, by_rank in count(ranks, cases).items()
        for rank, both in enumerate(by_rank)
        for phase, sent, expected in zip(PHASES, both, closed_form(case), strict=True)
        if sent != expected
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
def test_masks_and_layouts_do_not_change_the_volume(ranks: Ranks) -> None:
    variants = [Case(n=6, method="mesh", tile=(2, 3), dtype="float32"), Case(n=6, method="ring", dtype="float32")]
    cases = [
        replace(v, layout=layout, causal=causal) for v in variants for layout in LAYOUTS for causal in (True, False)
    ]
    for case, by_rank in count(ranks, cases).items():
        assert by_rank == [closed_form(case)] * case.n, case


def test_nine_ranks_send_72_units_where_ring_sends_144(ranks: Ranks) -> None:
    """Mesh-Attention, sections 1 and 3.2: a unit is one Q chunk, over all ranks, without the lse."""
    mesh = Case(n=9, method="mesh", tile=(3, 3), dtype="bfloat16")
    ring = Case(n=9, method="ring", dtype="bfloat16")
    unit = BATCH * mesh.tokens * HEADS * HEAD_DIM * 2
    volumes = count(ranks, [mesh, ring])
    for case, units in ((mesh, 72), (ring, 144)):
        assert sum(total_bytes(forward, statistics=False) for forward, _ in volumes[case]) == units * unit
    # Two hops of O forward and two of OdOQ backward bring an lse each, a number for each row and head.
    lse = BATCH * mesh.tokens * HEADS * LSE_BYTES
    for forward, backward in volumes[mesh]:
        assert total_bytes(forward, statistics=True) == total_bytes(backward, statistics=True) == 2 * lse
    assert all(total_bytes(volume, statistics=True) == 0 for both in volumes[ring] for volume in both)


def planned_payload(method: str, problem: Problem, phase: str, **options: object) -> int:
    """Bytes that each rank sends by the plan, without statistics."""
    plan = build(method, options).plan(problem, phase, COMPUTE_BOUND)
    sent = [op.send.tensor for op in plan.ops if isinstance(op, Pass)]
    return int(sum(problem.mean_wire_bytes(tensor, statistics=False) for tensor in sent))


def test_256_ranks_send_60_of_510_units() -> None:
    problem = Problem(n=256, seqlen=256 * 8, heads=2, kv_heads=2, head_dim=4, layout=LAYOUTS["striped"])
    unit = 8 * 2 * 4 * 2
    assert planned_payload("mesh", problem, "forward", tile=(16, 16)) == 60 * unit
    assert planned_payload("ring", problem, "forward") == 510 * unit
    assert planned_payload("mesh", problem, "backward", tile=(16, 16)) == (4 * 15 + 4 * 15) * unit
    assert planned_payload("ring", problem, "backward") == 4 * 255 * unit


def cases_of(problem: Problem) -> list[Case]:
    """Every method and variant that can do the problem, on its layout or else on the method's first one."""
    return [
        Case(
            n=problem.n,
            method=method.name,
            options=tuple((name, getattr(method, name)) for name in method.options() if name != "layout"),
            layout=problem.layout.name if problem.layout.name in method.layouts else method.layouts[0],
            causal=problem.mask == CAUSAL,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            dtype=problem.dtype,
            wire_dtype=problem.wire_dtype,
            tokens=2,
            kv_seqlen=problem.kv_seqlen,
            v_head_dim=problem.v_head_dim,
        )
        for method in all_methods(problem)
    ]


@pytest.mark.parametrize(("n", "every"), [(4, False), *(exhaustive(n, True) for n in (4, 6, 9))])
def test_every_rank_sends_what_the_plan_says(ranks: Ranks, n: int, every: bool) -> None:
    """By lane, tensor and field; and on average the closed form that the records carry. Of n = 9 what has a side of 3.

    Trimmed rows and key heads that go to several ranks are among it, and wires wider and narrower than the dtype; also
    behind a history that ranks don't share evenly, between two sequences, and with narrow values.
    """
    trimmed = replace(splittable_problem(n, "zigzag"), dtype="bfloat16", wire_dtype="float32")
    replicated = replace(splittable_problem(n, causal=False), kv_heads=1, dtype="float32", wire_dtype="bfloat16")
    behind, crossed = replace(trimmed, kv_seqlen=5 * n + 2), replace(replicated, kv_seqlen=5 * n + 1)
    narrow = replace(trimmed, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM // 4)
    groups = [cases_of(problem) for problem in (trimmed, replicated, behind, crossed, narrow)]
    cases = [case for i, of in enumerate(groups) for case in (of if every else of_each_method(of, turn=i))]
    if n == 9:
        cases = [case for case in cases if {3, (3, 3)} & {*dict(case.options).values()}]
    for case, by_rank in count(ranks, cases).items():
        for phase, sent in zip(PHASES, zip(*by_rank, strict=True), strict=True):
            planned = account.volume(case.built.plan(case.problem, phase, case.costs), case.problem)
            for rank in range(n):
                assert sent[rank] == planned.of(rank), f"{case}, rank {rank}, {phase}"
            total = sum(sum(volume.values()) for volume in sent)
            assert total == n * case.built.bytes_sent(case.problem, phase), f"{case}, {phase}"


@pytest.mark.parametrize("n", [*range(1, 17), 64])
def test_plans_send_what_their_method_says(n: int) -> None:
    problem = replace(splittable_problem(n, "zigzag"), wire_dtype="float32")
    for method, phase in itertools.product(all_methods(problem), PHASES):
        assigned = method.assigned(problem)
        planned = account.volume(method.plan(problem, phase, COMPUTE_BOUND), assigned)
        assert planned.total_bytes == method.bytes_sent(problem, phase), f"{method} {phase}"
