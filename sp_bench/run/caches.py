"""The call of a decode step's blocks: the results of all of their rows are made together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.contract import empty_output
from sp_bench.kernels.pieces import Pieces, calls
from sp_bench.plan.caches import CacheBlocks, Caches
from sp_bench.plan.ops import Attend, AttendBackward
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Region, RegionKind, Regions
from sp_bench.run.execution import FOLDS, KERNELS, REST, WAITS, Execution
from sp_bench.run.fused import end_to_end
from sp_bench.run.partials import Rows, Sums, tokens_of


def attend_caches(
    blocks: Sequence[Attend | AttendBackward],
    problem: Problem,
    rank: int,
    kernel: BlockKernel,
    sums: Sums,
    device: torch.device,
) -> Callable[[Execution], None]:
    """The call of blocks with the same keys.

    Rows of several chunks lie end to end, in the order of their owners, so that a sequence's keys are read once.
    """
    attends, (kv,) = [block for block in blocks if isinstance(block, Attend)], {block.kv for block in blocks}
    assert len(attends) == len(blocks) and isinstance(problem.blocks, CacheBlocks), "a decode step has no backward"
    in_pool = page_rows(problem, int(kv.owner(rank)), device)
    ordered = sorted(attends, key=lambda block: int(block.q.owner(rank)))
    regions = problem.blocks.regions_between([int(block.q.owner(rank)) for block in ordered], int(kv.owner(rank)))
    into = [sums.of(block.o) for block in ordered]
    sizes = [total.shapes[0][1] for total in into]
    alike = _alike_in_a_row(regions)
    found = calls(() if alike else regions, device, varlen=kernel.takes_varlen(problem.head_dim))
    parts = [_Call.of(call) for call in found]

    def attend(run: Execution) -> None:
        run.lap(WAITS)
        held = run.holdings
        q, (k, v) = end_to_end([held.chunks[block.q][0] for block in ordered]), held.chunks[kv]
        if in_pool is not None:
            k, v = (x.index_select(1, in_pool) for x in (k, v))
        v = k[..., : problem.value_dim] if problem.absorbed else v
        run.lap(REST)
        if alike:
            out, lse = _as_a_batch(kernel, alike, q, k, v)
        else:
            out, lse = empty_output(q[..., : v.shape[3]])
        for part in parts:
            part.perform(kernel, (q, k, v), (out, lse))
        run.lap(KERNELS)
        run.see(k, v, out, lse)
        for total, of_out, of_lse in zip(into, out.split(sizes, dim=1), _apart(lse, sizes), strict=True):
            held.partials.add_output(total, of_out, of_lse)
        run.lap(FOLDS)

    return attend


def page_rows(problem: Problem, rank: int, device: torch.device) -> Tensor | None:
    """The row of each of a rank's keys in its pool of pages, (keys,), in the order of the keys; None without pages.

    Pages lie in a pool in any order, as an allocator leaves them: here in one that the rank's number decides.
    """
    mask = problem.mask
    if not isinstance(mask, Caches) or mask.page is None:
        return None
    pages = problem.keys.positions(rank)
    places = random.Random(rank).sample(range(len(pages)), len(pages))
    rows = [torch.arange(len(page)) + place * mask.page for place, page in zip(places, pages, strict=True)]
    return torch.cat(rows).to(device)


def in_pages(problem: Problem, rank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, (B, keys, heads, D), in pools of (B, pages x tokens, heads, D); as they are without pages.

    What is left in the last page of a cache is NaN, which no result may show.
    """
    rows = page_rows(problem, rank, k.device)
    if rows is None:
        return k, v
    assert isinstance(problem.mask, Caches) and problem.mask.page is not None, "it has rows"
    held = len(problem.keys.positions(rank)) * problem.mask.page

    def pool(x: Tensor) -> Tensor:
        made = x.new_full((x.shape[0], held, *x.shape[2:]), math.nan)
        made[:, rows] = x
        return made

    return pool(k), pool(v)


class _Call(NamedTuple):
    """A kernel call, and the rows that it reads: runs where its pieces lie one behind the other, so that none are
    copied.
    """

    q: Rows
    kv: Rows
    kind: RegionKind | Pieces

    @classmethod
    def of(cls, call: Region | Pieces) -> _Call:
        if isinstance(call, Region):
            return cls(call.q, call.kv, call.kind)
        q, kv = _run([region.q for region in call.regions]), _run([region.kv for region in call.regions])
        return cls(call.queries if q is None else q, call.keys if kv is None else kv, call)

    def perform(
        self, kernel: BlockKernel, operands: tuple[Tensor, Tensor, Tensor], into: tuple[Tensor, Tensor]
    ) -> None:
        """Compute, from (q, k, v) with all rows, and put the rows' (out_BSHD, lse_BHS) into those of all."""
        q, k, v = (tokens_of(x, rows) for x, rows in zip(operands, (self.q, self.kv, self.kv), strict=True))
        if isinstance(self.kind, Pieces):
            results = kernel.forward_pieces(q, k, v, self.kind)
        else:
            results = kernel.forward(q, k, v, self.kind)
        for whole, x, dim in zip(into, results, (1, 2), strict=True):
            if isinstance(self.q, range):
                whole.narrow(dim, self.q.start, len(self.q)).copy_(x)
            else:
                whole.index_copy_(dim, self.q, x)


def _run(runs: Sequence[range]) -> range | None:
    """Runs that lie one behind the other as one; None if they don't."""
    behind = all(one.stop == other.start for one, other in pairwise(runs))
    return range(runs[0].start, runs[-1].stop) if behind else None


def _alike_in_a_row(regions: Regions) -> Regions:
    """The regions, if they are of one size and lie one behind the other, from the first query and key on; else none."""
    if len({(len(region.q), len(region.kv)) for region in regions}) != 1:
        return ()
    runs = [_run([region.q for region in regions]), _run([region.kv for region in regions])]
    return regions if all(run is not None and not run.start for run in runs) else ()


def _as_a_batch(kernel: BlockKernel, regions: Regions, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out_BSHD, lse_BHS) of regions that are alike (_alike_in_a_row), each an entry of a batch of one kernel call."""
    count, (_, rows, keys) = len(regions), regions[0]
    assert count * len(rows) == q.shape[1], "the last row of all sees a key"

    def entries(x: Tensor, run: range) -> Tensor:
        return x[:, : count * len(run)].reshape(count, len(run), *x.shape[2:])

    out, lse = kernel.forward(entries(q, rows), entries(k, keys), entries(v, keys), RegionKind.FULL)
    return out.reshape(1, -1, *out.shape[2:]), lse.transpose(0, 1).reshape(1, lse.shape[1], -1)


def _apart(lse: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """lse_BHS in parts of so many rows, each contiguous: a copy for each run of parts of one size."""
    found: list[Tensor] = []
    first = 0
    for size, alike in groupby(sizes):
        count = len([*alike])
        run = lse.narrow(2, first, count * size).unflatten(2, (count, size))
        found += run.permute(2, 0, 1, 3).contiguous().unbind()
        first += count * size
    return found
