"""Accumulators of partial results, of which a block's result may have only some rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sp_bench.lower import lower
from sp_bench.methods import build
from sp_bench.plan.costs import COMPUTE_BOUND
from sp_bench.plan.layout import LAYOUTS
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.ops import Attend, AttendBackward
from sp_bench.plan.problem import Problem
from sp_bench.run.partials import Partials, Sums

TOKENS, CPU = 6, torch.device("cpu")
ROWS = [range(TOKENS), range(2), range(1, TOKENS), range(2, 4)]


@pytest.fixture(autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    """Allocated memory that is not written is NaN, not by chance zero."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def problem(dtype: str) -> Problem:
    return Problem(
        n=2, seqlen=2 * TOKENS, batch=2, heads=2, kv_heads=2, head_dim=4, mask=CAUSAL, dtype=dtype,
        layout=LAYOUTS["striped"],
    )  # fmt: skip


def random(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(getattr(torch, dtype))


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_output_is_where_its_rows_are_and_all_else_is_neutral(dtype: str, rows: range) -> None:
    p = problem(dtype)
    op = next(op for op in build("ring", {}).plan(p, "forward", COMPUTE_BOUND).ops if isinstance(op, Attend))
    sums, before, after = Sums(p, 0, CPU), rows.start, TOKENS - rows.stop
    partials = Partials(sums)
    out, lse = random(2, len(rows), 2, 4, dtype=dtype), random(2, len(rows), 2).transpose(1, 2)
    partials.add_output(sums.of(op.o, rows), out, lse)
    held_out, held_lse = partials.get(op.o)
    wanted = torch.nn.functional.pad(out.float(), (0, 0, 0, 0, before, after))
    assert held_out.dtype == torch.float32 and torch.equal(held_out, wanted)
    assert torch.equal(held_lse, torch.nn.functional.pad(lse, (before, after), value=-math.inf))
    partials.add_output(sums.of(op.o), torch.zeros(2, TOKENS, 2, 4), torch.full((2, 2, TOKENS), -math.inf))
    assert torch.equal(partials.get(op.o)[0], wanted), "a part that saw no key changes nothing"


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("alone", [True, False])
def test_the_first_gradients_are_summed_with_zeros_and_are_nobody_elses(dtype: str, rows: range, alone: bool) -> None:
    p = problem(dtype)
    op = next(op for op in build("ring", {}).plan(p, "backward", COMPUTE_BOUND).ops if isinstance(op, AttendBackward))
    sums = Sums(p, 0, CPU)
    partials = Partials(sums)
    whole = random(2, TOKENS + 1, 2, 4, dtype=dtype)
    part = whole[:, : len(rows)] if not alone else whole[:, : len(rows)].clone()
    before = whole.clone()
    partials.add_part(sums.of(op.dkv, rows), (part, 2 * part), alone=alone)
    for held, x in zip(partials.get(op.dkv), (part, 2 * part), strict=True):
        wanted = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, rows.start, TOKENS - rows.stop))
        assert held.dtype == torch.float32 and held.is_contiguous() and torch.equal(held, wanted)
    partials.add_part(sums.of(op.dkv), tuple(torch.ones(2, TOKENS, 2, 4) for _ in range(2)), alone=True)
    assert torch.equal(whole, before), "a larger result is left as it was"


def test_whole_chunks_that_one_reduction_packs_stay_in_the_result() -> None:
    """Without a copy, if they are contiguous there; what has some of a chunk's rows is copied, with zeros."""
    p = replace(problem("bfloat16"), batch=1, n=4, seqlen=4 * TOKENS, layout=LAYOUTS["zigzag"])
    method = build("all_gather", {"fuse": True, "stride": 2, "layout": "zigzag"})
    plan = method.plan(p, "backward", COMPUTE_BOUND)
    low = lower(plan, p)
    chunks = sorted(low.together)
    sums, one, other = Sums(p, 0, CPU, low.unsummed, low.together), *chunks[:2]
    result = random(1, 2 * TOKENS, 2, 4, dtype="bfloat16")
    parts: list[tuple[torch.Tensor, ...]] = [(x, x) for x in (result[:, :TOKENS], result[:, TOKENS:])]
    partials = Partials(sums)
    partials.add_parts([sums.of(one), sums.of(other)], parts)
    for chunk, part in zip((one, other), parts, strict=True):
        assert [x.data_ptr() for x in partials.to_send(chunk)] == [x.data_ptr() for x in part]
    partials, half = Partials(sums), range(TOKENS // 2)
    parts[1] = 2 * (result[:, TOKENS : TOKENS + len(half)],)
    partials.add_parts([sums.of(one), sums.of(other, half)], parts)
    for chunk, part in zip((one, other), parts, strict=True):
        for held, x in zip(partials.to_send(chunk), part, strict=True):
            wanted = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, TOKENS - x.shape[1]))
            assert held.dtype == torch.bfloat16 and torch.equal(held, wanted)
            assert held.untyped_storage().data_ptr() != result.untyped_storage().data_ptr()
