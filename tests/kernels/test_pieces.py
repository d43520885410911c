"""Several regions in one kernel call, for every kernel that runs on this machine and fakes of the others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sp_bench.kernels.pieces import SMALL, Pieces, calls
from sp_bench.plan.regions import Region, RegionKind
from sp_bench.run.partials import tokens_of
from tests.kernels.cases import Case, cases
from tests.support.dense import HEAD_DIM, LSE_TOLERANCE, TOLERANCE, attention, block_of, relative_error

CPU = torch.device("cpu")


def region(kind: RegionKind, q: int, kv: int, rows: int, columns: int = 0) -> Region:
    return Region(kind, range(q, q + rows), range(kv, kv + (columns or rows)))


ALIKE = (
    [region(RegionKind.CAUSAL, 2, 0, 4), region(RegionKind.CAUSAL, 6, 5, 4), region(RegionKind.CAUSAL, 12, 9, 4)],
    [region(RegionKind.FULL, 0, 7, 3, 5), region(RegionKind.FULL, 4, 0, 3, 5)],
    [region(RegionKind.UPPER, 0, 8, 4), region(RegionKind.UPPER, 5, 2, 4)],
    [region(RegionKind.FULL, 3, 0, 1, 5), region(RegionKind.FULL, 4, 5, 1, 5)],
    [region(RegionKind.CAUSAL, 2, 0, 4), region(RegionKind.CAUSAL, 6, 4, 4)],
)
DIFFERENT = (
    [region(RegionKind.CAUSAL, 2, 0, 4), region(RegionKind.CAUSAL, 6, 5, 1), region(RegionKind.CAUSAL, 9, 6, 7)],
    [region(RegionKind.FULL, 0, 7, 3, 5), region(RegionKind.FULL, 4, 0, 6, 2), region(RegionKind.FULL, 10, 2, 1, 1)],
    [region(RegionKind.UPPER, 0, 8, 4), region(RegionKind.UPPER, 5, 2, 3)],
)


@cases
@pytest.mark.parametrize("head_dim", [HEAD_DIM, 32])
@pytest.mark.parametrize("regions", [*ALIKE, *DIFFERENT], ids=lambda regions: f"{regions[0].kind.value}{len(regions)}")
def test_pieces_are_their_regions(case: Case, regions: list[Region], head_dim: int) -> None:
    whole = block_of(16, 16, 2, case.dtype, device=case.device, head_dim=head_dim)
    with case.kernel() as kernel:
        varlen = kernel.takes_varlen(head_dim)
        found = calls(regions, torch.device(case.device), varlen=varlen)
        if regions in DIFFERENT and not varlen:
            assert all(isinstance(call, Region) for call in found)
            return
        (pieces,) = found
        assert isinstance(pieces, Pieces)
        q, k, v, dout = (
            tokens_of(x, rows)
            for x, rows in zip(whole, (pieces.queries, pieces.keys, pieces.keys, pieces.queries), strict=True)
        )
        out, lse = kernel.forward(q, k, v, pieces)
        gradients = kernel.gradients(dout, q, k, v, out, lse, pieces)
    assert lse.is_contiguous(), "on a GPU a lane sends it as it is"
    scattered = [torch.zeros_like(x) for x in (whole.q, whole.q, whole.k, whole.v)]
    rows = (pieces.queries, pieces.queries, pieces.keys, pieces.keys)
    for into, index, x in zip(scattered, rows, (out, *gradients), strict=True):
        into[:, [*index]] = x
    whole_lse = torch.full((*lse.shape[:2], 16), -torch.inf, dtype=lse.dtype, device=lse.device)
    whole_lse[:, :, [*pieces.queries]] = lse
    for one in regions:
        block = type(whole)(
            *(x[:, r.start : r.stop] for x, r in zip(whole, (one.q, one.kv, one.kv, one.q), strict=True))
        )
        wanted = attention(block, one.kind)
        assert (whole_lse[:, :, one.q.start : one.q.stop] - wanted.lse).abs().max() <= LSE_TOLERANCE[case.dtype]
        answers = (wanted.out, wanted.dq, wanted.dk, wanted.dv)
        for got, run, exact in zip(scattered, (one.q, one.q, one.kv, one.kv), answers, strict=True):
            assert relative_error(got[:, run.start : run.stop], exact) <= TOLERANCE[case.dtype]


@given(
    st.lists(st.builds(region, st.sampled_from([*RegionKind]), *[st.integers(0, 30)] * 2, st.integers(2, 6))),
    st.booleans(),
)
def test_calls_have_every_region_once(regions: list[Region], varlen: bool) -> None:
    found = calls(regions, CPU, varlen=varlen)
    one_by_one = [one for call in found for one in (call.regions if isinstance(call, Pieces) else (call,))]
    assert sorted(one_by_one, key=str) == sorted((one.plain for one in regions), key=str)
    for call in found:
        if isinstance(call, Pieces):
            assert len({*map(int, call.queries)}) == len(call.queries) == sum(call.q_lengths)
            assert len({*map(int, call.keys)}) == len(call.keys) == sum(call.kv_lengths)
            assert len({one.kind for one in call.regions}) == 1
            assert varlen or len({*zip(call.q_lengths, call.kv_lengths, strict=True)}) == 1


def test_large_regions_are_not_copied_where_nothing_is_won() -> None:
    large = [region(RegionKind.CAUSAL, at, at, SMALL + 1) for at in (0, 1000)]
    assert calls(large, CPU, varlen=False) == large
    assert len(calls(large, CPU, varlen=True)) == 1
