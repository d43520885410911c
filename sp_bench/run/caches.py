"""The call of a decode step's blocks: the results of all of their rows are made together."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch import Tensor

from sp_bench.kernels import BlockKernel
from sp_bench.kernels.contract import PagedKernel, empty_output
from sp_bench.kernels.entries import Entries
from sp_bench.kernels.pieces import calls, on_device
from sp_bench.plan.caches import CacheBlocks, Caches
from sp_bench.plan.ops import Attend, AttendBackward
from sp_bench.plan.problem import Problem
from sp_bench.plan.region_table import table_of
from sp_bench.plan.regions import RegionKind, Regions
from sp_bench.run.execution import FOLDS, KERNELS, REST, WAITS, Execution
from sp_bench.run.fused import end_to_end
from sp_bench.run.partials import Rows, Sums, tokens_of
from sp_bench.run.windows import Window

UNUSED = 1e4
"""The number in places of a pool that hold no key; in the range of fp16."""


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
    ordered = sorted(attends, key=lambda block: int(block.q.owner(rank)))
    regions = problem.blocks.regions_between([int(block.q.owner(rank)) for block in ordered], int(kv.owner(rank)))
    into = [sums.of(block.o) for block in ordered]
    sizes = [total.shapes[0][1] for total in into]
    wide = kernel.pads(problem.head_dim, problem.value_dim)
    sunk = _own_rows(ordered, problem, rank, device)
    if reads_in_place(kernel, problem):
        assert isinstance(kernel, PagedKernel), "it says that it takes pages"
        call: _Reads = _InPages(kernel, regions, problem, int(kv.owner(rank)), device)
    else:
        in_pool = page_rows(problem, int(kv.owner(rank)), device)
        call = _InLine(kernel, regions, sum(sizes), in_pool, problem.head_dim, device)

    def attend(run: Execution) -> None:
        run.lap(WAITS)
        held = run.holdings
        q, (k, v) = end_to_end([held.chunks[block.q][0] for block in ordered]), held.chunks[kv]
        k, v = call.taken(k, v)
        if problem.absorbed:  # a kernel that computes values as wide as keys needs no copy of them
            v = k if wide else k[..., : problem.value_dim]
        run.lap(REST)
        out, lse = call.made(q, k, v)
        if out.shape[3] > problem.value_dim:
            out = out[..., : problem.value_dim].contiguous()
        run.lap(KERNELS)
        run.see(k, v, out, lse)
        for total, of_out, of_lse in zip(into, out.split(sizes, dim=1), _apart(lse, sizes), strict=True):
            held.partials.add_output(total, of_out, of_lse)
        if run.sinks is not None and sunk:
            own, members = sunk
            held.partials.add_sinks(into[own], run.sinks.scores.index_select(1, members))
        run.lap(FOLDS)

    return attend


def _own_rows(
    blocks: Sequence[Attend], problem: Problem, rank: int, device: torch.device
) -> tuple[int, torch.Tensor] | None:
    """The block of a chunk's rows with their own rank's keys, which every row meets once, by its place among `blocks`,
    and for each row the query head of its key head: (rows,). None if it is not among them.
    """
    mask = problem.mask
    assert isinstance(mask, Caches), "of a decode step"
    for place, block in enumerate(blocks):
        owner = int(block.q.owner(rank))
        if owner == int(block.kv.owner(rank)):
            rows = [row for run in problem.queries.positions(owner) for row in run]
            return place, torch.tensor(rows, dtype=torch.int64, device=device) % mask.share
    return None


def reads_in_place(kernel: BlockKernel, problem: Problem) -> bool:
    """Whether the kernel reads a step's pages as they lie, of which otherwise the keys are copied; True also for one
    that has keys in pages alone.
    """
    mask = problem.mask
    assert isinstance(mask, Caches), "of a decode step"
    if kernel.in_pages:
        return True
    padded = kernel.pads(problem.head_dim, problem.value_dim) and not problem.absorbed
    return mask.page is not None and kernel.takes_pages(mask.page) and not padded


class _Reads(Protocol):
    """The kernel calls of blocks with the same keys."""

    def taken(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, (1, keys, heads, D), as `made` has them."""
        ...

    def made(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BSHD, lse_BHS) of all rows."""
        ...


class _InLine:
    """Calls with keys that lie one behind the other, or are copied so from pages."""

    def __init__(
        self,
        kernel: BlockKernel,
        regions: Regions,
        rows: int,
        in_pool: Tensor | None,
        head_dim: int,
        device: torch.device,
    ) -> None:
        """`rows` are all of the blocks', of which the last may see no key here."""
        self._kernel, self._in_pool, self._alike = kernel, in_pool, _alike_in_a_row(regions, rows)
        varlen = kernel.takes_varlen(head_dim)
        self._parts = [Window.of(call) for call in calls(() if self._alike else regions, device, varlen=varlen)]

    def taken(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._in_pool is None:
            return k, v
        return k.index_select(1, self._in_pool), v.index_select(1, self._in_pool)

    def made(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._alike:
            return _as_a_batch(self._kernel, self._alike, q, k, v)
        out, lse = empty_output(q, width=v.shape[3])
        for part in self._parts:
            results = self._kernel.forward(
                tokens_of(q, part.q), tokens_of(k, part.kv), tokens_of(v, part.kv), part.kind
            )
            _put(results, part.q, (out, lse))
        return out, lse


class _InPages:
    """Calls of a kernel that is told in which pages keys lie: one for all sequences with as many rows."""

    def __init__(
        self, kernel: PagedKernel, regions: Regions, problem: Problem, rank: int, device: torch.device
    ) -> None:
        mask = problem.mask
        assert isinstance(mask, Caches), "of a decode step"
        self._kernel, self._page = kernel, mask.page or 1
        cuts = problem.keys.positions(rank)
        places = page_places(problem, rank) if mask.page else range(sum(map(len, cuts)))
        starts = {at: number for number, at in enumerate(_starts(cuts))} if mask.page else None
        self._groups: list[tuple[Rows, Entries]] = []
        for _, alike in groupby(sorted(regions, key=lambda region: len(region.q)), lambda region: len(region.q)):
            of_size = [*alike]
            lengths = tuple(len(region.kv) for region in of_size)
            firsts = [starts[region.kv.start] if starts else region.kv.start for region in of_size]
            of_entries = tuple(
                places[first : first + -(-length // self._page)] for first, length in zip(firsts, lengths, strict=True)
            )
            entries = Entries(lengths, of_entries, self._page, device)
            self._groups.append((on_device(table_of(of_size).query_rows, device), entries))

    def taken(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def made(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pools = [x[0].unflatten(0, (-1, self._page)) for x in (k, v)]
        if len(self._groups) == 1:
            ((rows, entries),) = self._groups
            if isinstance(rows, range) and rows == range(q.shape[1]):
                return self._of(q, pools, entries)
        made = empty_output(q, width=v.shape[3])
        for rows, entries in self._groups:
            _put(self._of(tokens_of(q, rows), pools, entries), rows, made)
        return made

    def _of(self, q: Tensor, pools: Sequence[Tensor], entries: Entries) -> tuple[Tensor, Tensor]:
        """(out_BSHD, lse_BHS) of the rows of some entries, end to end."""
        k, v = pools
        by_entry = q[0].unflatten(0, (len(entries), -1))
        out, lse = self._kernel.forward_pages(by_entry, k, v, entries)
        return out.flatten(0, 1)[None], lse.transpose(0, 1).flatten(1)[None]


def page_places(problem: Problem, rank: int) -> list[int]:
    """The place in a rank's pool of each of its pages, in the order of their keys.

    Pages lie there in any order, as an allocator leaves them: here in one that the rank's number decides.
    """
    pages = len(problem.keys.positions(rank))
    return random.Random(rank).sample(range(pages), pages)


def page_rows(problem: Problem, rank: int, device: torch.device) -> Tensor | None:
    """The row of each of a rank's keys in its pool of pages, (keys,), in the order of the keys; None without pages."""
    mask = problem.mask
    if not isinstance(mask, Caches) or mask.page is None:
        return None
    pages, places = problem.keys.positions(rank), page_places(problem, rank)
    rows = [torch.arange(len(page)) + place * mask.page for place, page in zip(places, pages, strict=True)]
    return torch.cat(rows).to(device)


def in_pages(problem: Problem, rank: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, (B, keys, heads, D), in pools of (B, pages x tokens, heads, D); as they are without pages.

    What is left in the last page of a cache has numbers that would show in every result. They are finite, since kernels
    may multiply a value that is masked by 0.
    """
    rows = page_rows(problem, rank, k.device)
    if rows is None:
        return k, v
    assert isinstance(problem.mask, Caches) and problem.mask.page is not None, "it has rows"
    held = len(problem.keys.positions(rank)) * problem.mask.page

    def pool(x: Tensor) -> Tensor:
        made = x.new_full((x.shape[0], held, *x.shape[2:]), UNUSED)
        made[:, rows] = x
        return made

    return pool(k), pool(v)


def _put(results: tuple[Tensor, Tensor], rows: Rows, into: tuple[Tensor, Tensor]) -> None:
    """Put (out_BSHD, lse_BHS) of some rows into those of all."""
    for whole, x, dim in zip(into, results, (1, 2), strict=True):
        if isinstance(rows, range):
            whole.narrow(dim, rows.start, len(rows)).copy_(x)
        else:
            whole.index_copy_(dim, rows, x)


def _starts(runs: Sequence[range]) -> list[int]:
    """Starts of some runs, if they lie one behind the other."""
    return [0, *accumulate(map(len, runs[:-1]))]


def _alike_in_a_row(regions: Regions, rows: int) -> Regions:
    """The regions, if they are of one size and lie one behind the other, from the first query and key on and up to the
    last of all rows; else none.
    """
    if len({(len(region.q), len(region.kv)) for region in regions}) != 1:
        return ()
    q, kv = table_of(regions).query_rows, table_of(regions).key_rows
    in_a_row = isinstance(q, range) and q == range(rows) and isinstance(kv, range) and not kv.start
    return regions if in_a_row else ()


def _as_a_batch(kernel: BlockKernel, regions: Regions, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out_BSHD, lse_BHS) of regions that are alike (_alike_in_a_row), each an entry of a batch of one kernel call."""
    count, (_, rows, keys) = len(regions), regions[0]

    def entries(x: Tensor, run: range) -> Tensor:
        return x[:, : count * len(run)].reshape(count, len(run), *x.shape[2:])

    out, lse = kernel.forward(entries(q, rows), entries(k, keys), entries(v, keys), RegionKind.FULL)
    return out.reshape(1, -1, *out.shape[2:]), lse.transpose(0, 1).reshape(1, lse.shape[1], -1)


def _apart(lse: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """lse_BHS in parts of so many rows, each contiguous: a copy for each run of parts of one size."""
    parts: list[Tensor] = []
    first = 0
    for size, alike in groupby(sizes):
        count = len([*alike])
        run = lse.narrow(2, first, count * size).unflatten(2, (count, size))
        parts += run.permute(2, 0, 1, 3).contiguous().unbind()
        first += count * size
    return parts
