"""Regions and pair counts where each query sees one run of neighbouring keys.

All masks here are of that kind: a query at position p sees the keys from first(p) up to stop(p) - 1, and neither falls
as p grows. Documents, sliding windows and chunks are, and so are causal and full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from sp_bench.plan.regions import Region, RegionKind, Regions

RUNS_AT_ONCE = 1024
"""Few enough that counts by chunk stay in a cache."""


class Sizes(NamedTuple):
    """Regions as what their time depends on: (regions,) each."""

    kind: np.ndarray
    """0 for FULL, 1 for CAUSAL, 2 for UPPER; STRICT ones are CAUSAL (Region.plain)."""
    q_tokens: np.ndarray
    kv_tokens: np.ndarray
    pairs: np.ndarray


def sizes_of(regions: Iterable[Region]) -> Sizes:
    """The sizes of regions, in their order."""
    plain = [region.plain for region in regions]
    found = [(_KINDS[each.kind], len(each.q), len(each.kv), each.pairs) for each in plain]
    kind, q_tokens, kv_tokens, pairs = np.array(found, float).reshape(-1, 4).T
    return Sizes(kind.astype(int), q_tokens, kv_tokens, pairs)


_KINDS = {RegionKind.FULL: 0, RegionKind.CAUSAL: 1, RegionKind.UPPER: 2}


def regions_between(first: np.ndarray, stop: np.ndarray, start: int = 0) -> Regions:
    """The regions of a block in which query start + x sees the keys first[x] <= y < stop[x], by index in their chunks.

    first, stop: (queries,), neither falls. Queries whose ends both stay, or move on by a key a query, form a strip; a
    strip is a rectangle, a triangle at one of its ends, or a band, which is cut into triangles.
    """
    rows = np.flatnonzero(stop > first)
    if not rows.size:
        return ()
    first, stop = first[rows], stop[rows]
    moves = np.stack([np.diff(rows) - 1, np.diff(first), np.diff(stop)])
    code = np.where((moves[0] == 0) & (moves[1:] <= 1).all(axis=0), 2 * moves[1] + moves[2], -1)
    before, after = np.append(-1, code[:-1]), np.append(code[1:], -1)
    code[(code == 3) & (before != 3) & (after != 3)] = -1  # two queries are no band
    ends = np.flatnonzero(np.append(code[1:] != code[:-1], True)) + 1 if code.size else np.zeros(0, int)
    found: list[Region] = []
    at, run = 0, 0
    while at < rows.size:
        while run < ends.size and ends[run] <= at:
            run += 1
        alone = at == rows.size - 1 or code[at] < 0
        last, move = (at, 0) if alone else (int(ends[run]), int(code[at]))
        queries = range(start + int(rows[at]), start + int(rows[last]) + 1)
        found += _strip(queries, int(first[at]), int(stop[at]), falls=move >= 2, rises=move % 2 == 1)
        at = last + 1
    return tuple(_joined(found))


def _strip(queries: range, first: int, stop: int, *, falls: bool, rises: bool) -> Iterator[Region]:
    """The regions of a strip: the first of its queries sees first <= y < stop.

    `rises` says that each further query sees one key more at the end, `falls` that it sees one less at the start.
    """
    size = len(queries)
    if falls and rises:
        for at in range(0, size, stop - first):
            rows = queries[at : at + stop - first]
            lost, kept, won = first + at, first + at + len(rows), stop + at
            yield Region(RegionKind.UPPER, rows, range(lost, kept))
            if kept < won:
                yield Region(RegionKind.FULL, rows, range(kept, won))
            if len(rows) > 1:
                yield Region(RegionKind.CAUSAL, rows[1:], range(won, won + len(rows) - 1))
        return
    if rises:
        yield Region(RegionKind.CAUSAL, queries, range(stop - 1, stop - 1 + size))
        stop -= 1
    elif falls:
        yield Region(RegionKind.UPPER, queries, range(first, first + size))
        first += size
    if first < stop:
        yield Region(RegionKind.FULL, queries, range(first, stop))


def _joined(regions: Sequence[Region]) -> Iterator[Region]:
    """The regions with FULL ones joined that have the same keys and neighbouring queries."""
    open_ones: dict[tuple[int, int], Region] = {}
    for region in regions:
        if region.kind is not RegionKind.FULL:
            yield region
            continue
        keys = (region.kv.start, region.kv.stop)
        before = open_ones.get(keys)
        if before and before.q.stop == region.q.start:
            region = region._replace(q=range(before.q.start, region.q.stop))
        elif before:
            yield before
        open_ones[keys] = region
    yield from open_ones.values()


def pair_counts(owner: np.ndarray, chunks: int, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """(query, key) pairs between any two chunks: (chunks, chunks), by query and key chunk.

    `owner` is the chunk of each position, `first` and `stop` what the query there sees: (seqlen,) each. Takes time and
    memory in proportion to the runs of positions of one chunk, times the chunks.
    """
    if chunks > 1 and np.array_equal(owner, np.arange(owner.size) % chunks):
        return _striped_keys_below(owner, chunks, stop) - _striped_keys_below(owner, chunks, first)
    starts = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    of, lengths = owner[starts], np.diff(np.append(starts, owner.size))
    # What a query sees ends within one run and starts within another, whose keys are counted here.
    partly, changes = np.zeros(chunks**2), []
    for sign, limit in ((1, stop), (-1, first)):
        run = np.searchsorted(starts, limit, side="right") - 1
        partly += sign * np.bincount(owner * chunks + of[run], limit - starts[run], chunks**2)
        changes.append((-sign, *_counted(run * chunks + owner)))
    # How many queries of each chunk see all of a run, since what they see starts before it and ends behind it.
    found, seeing = partly.reshape(chunks, chunks).astype(np.int64), np.zeros(chunks, np.int64)
    for low in range(0, starts.size, RUNS_AT_ONCE):
        high = min(low + RUNS_AT_ONCE, starts.size)
        more = np.zeros((chunks, high - low), np.int64)
        for sign, cells, counts in changes:
            here = slice(*np.searchsorted(cells, (low * chunks, high * chunks)))
            run, chunk = np.divmod(cells[here], chunks)
            more[chunk, run - low] += sign * counts[here]
        more[:, 0] += seeing
        more.cumsum(axis=1, out=more)
        seeing = more[:, -1].copy()
        more *= lengths[low:high]
        # Sums by owner, as differences of running ones: np.add.reduceat takes several times as long.
        by_owner = np.argsort(of[low:high], kind="stable")
        last = np.flatnonzero(np.diff(of[low:high][by_owner], append=-1))
        total = more.take(by_owner, axis=1).cumsum(axis=1)[:, last]
        found[:, of[low:high][by_owner][last]] += np.diff(total, axis=1, prepend=0)
    return found


def _counted(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct cells, ascending, and how often each occurs; fast where neighbours are mostly equal."""
    first = np.flatnonzero(np.append(True, cells[1:] != cells[:-1]))
    different, number = np.unique(cells[first], return_inverse=True)
    return different, np.bincount(number, np.diff(np.append(first, cells.size))).astype(np.int64)


def _striped_keys_below(owner: np.ndarray, chunks: int, limit: np.ndarray) -> np.ndarray:
    """For each query chunk i and key chunk j: the keys of j below limit[p], summed over the positions p of i."""
    rounds, rest = np.divmod(limit, chunks)
    whole = np.bincount(owner, weights=rounds, minlength=chunks)[:, None]
    by_rest = np.bincount(owner * chunks + rest, minlength=chunks**2).reshape(chunks, chunks)
    return (whole + by_rest.sum(axis=1, keepdims=True) - by_rest.cumsum(axis=1)).astype(np.int64)
