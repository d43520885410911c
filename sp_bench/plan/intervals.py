"""Regions and pair counts where each query sees one run of neighbouring keys.

All masks here are of that kind: a query at position p sees the keys from first(p) up to stop(p) - 1, and neither falls
as p grows. Documents, sliding windows and chunks are, and so are causal and full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

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


def regions_between(first: np.ndarray, stop: np.ndarray) -> Regions:
    """The regions of a block in which query x sees the keys first[x] <= y < stop[x], as indices in their chunks.

    first, stop: (queries,), neither falls. Queries whose ends both stay, or move on by a key a query, form a strip; a
    strip is a rectangle, a triangle at one of its ends, or a band, which is cut into triangles.
    """
    rows = np.flatnonzero(stop > first)
    if not rows.size:
        return ()
    first, stop = first[rows], stop[rows]
    code = _code(np.diff(rows) == 1, np.diff(first), np.diff(stop))
    ends = np.flatnonzero(np.append(code[1:] != code[:-1], True)) + 1 if code.size else np.zeros(0, int)
    counts = np.diff(ends, prepend=0)
    each, alone = np.zeros(rows.size, int), np.arange(rows.size + 1)
    return _regions(Stretches(rows, first, stop, alone, each, each), code[ends - 1], counts)


class Runs(NamedTuple):
    """Runs of neighbouring positions, ascending: (runs,) each."""

    start: np.ndarray
    stop: np.ndarray

    def below(self, positions: np.ndarray) -> np.ndarray:
        """How many positions of the runs are below each of `positions`."""
        tokens = self.stop - self.start
        run = np.maximum(np.searchsorted(self.start, positions, "right") - 1, 0)
        return (np.cumsum(tokens) - tokens)[run] + np.clip(positions - self.start[run], 0, tokens[run])


def runs_of(positions: Iterable[range]) -> Runs | None:
    """Positions as runs; None where they are no neighbours."""
    found = [(run.start, run.stop, run.step) for run in positions if run]
    start, stop, step = np.array(found, np.int64).reshape(-1, 3).T
    return Runs(start, stop) if (step == 1).all() else None


class Sight(Protocol):
    """The keys that queries see under a mask, as plan.documents.Packed has them."""

    def sees(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first key, the key behind the last) that the query at each position sees."""
        ...

    def turns(self, low: int, high: int, keys: np.ndarray) -> np.ndarray:
        """Positions from low to high at which what a query sees of these keys may change otherwise than by a key."""
        ...


def regions_of_runs(mask: Sight, q: Runs, kv: Runs) -> Regions:
    """The regions of a block of runs of queries and keys, as regions_between finds them.

    Between two turns, what a query sees stays or moves on by a key a query at either end. So that turns are looked at
    in the place of queries.
    """
    if not (q.start.size and kv.start.size):
        return ()
    low, high = q.start[0], q.stop[-1]
    turns = mask.turns(low, high, np.concatenate([kv.start, kv.stop]))
    cuts = np.sort(np.concatenate([q.start, q.stop, turns]).clip(low, high))
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    run = np.searchsorted(q.start, cuts[:-1], "right") - 1
    inside = cuts[:-1] < q.stop[run]
    at, count = cuts[:-1][inside], np.diff(cuts)[inside]
    ends = np.concatenate([at, at + count - 1])
    first, last_first, stop, last_stop = np.split(kv.below(np.concatenate(mask.sees(ends))), 4)
    row = q.below(at)
    # At the end of a stretch that sees more and more, or less and less, a query may see none.
    none, last_none = first >= stop, last_first >= last_stop
    row, stop, count = row + (none & ~last_none), stop + (none & ~last_none), count - (none | last_none)
    last_first = last_first - (last_none & ~none)
    some = (count > 0) & ~(none & last_none)
    if not some.any():
        return ()
    row, first, stop, last_first, last_stop, count = (x[some] for x in (row, first, stop, last_first, last_stop, count))
    falls, rises = last_first > first, last_stop > stop
    inner = 2 * falls + rises
    outer = _moves(row[1:] == (row + count)[:-1], first[1:] - last_first[:-1], stop[1:] - last_stop[:-1])
    code = np.stack([inner, np.append(outer, -1)], axis=1).ravel()
    counts = np.stack([count - 1, np.ones_like(count)], axis=1).ravel()
    code, counts = code[:-1][counts[:-1] > 0], counts[:-1][counts[:-1] > 0]
    begins = np.flatnonzero(np.diff(code, prepend=-2))
    code, counts = code[begins], np.add.reduceat(counts, begins) if counts.size else counts
    code[(code == 3) & (counts == 1)] = -1  # two queries are no band
    return _regions(Stretches(row, first, stop, np.append(0, np.cumsum(count)), 1 * falls, 1 * rises), code, counts)


class Stretches(NamedTuple):
    """Stretches of queries that see a key, along which what they see moves evenly: (stretches,) each."""

    row: np.ndarray
    """The first query."""
    first: np.ndarray
    """The first key that it sees."""
    stop: np.ndarray
    """The key behind the last one."""
    number: np.ndarray
    """The first query among those that see a key, and how many there are: (stretches + 1,)."""
    falls: np.ndarray
    """By how many keys the first one that is seen moves on from query to query."""
    rises: np.ndarray
    """By how many keys the last one does."""


def _code(neighbours: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """_moves from query to query, but that two queries are no band."""
    code = _moves(neighbours, first, stop)
    before, after = np.append(-1, code[:-1]), np.append(code[1:], -1)
    code[(code == 3) & (before != 3) & (after != 3)] = -1
    return code


def _moves(neighbours: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """By how much what is seen moves on between two queries: twice that of the first key and that of the last one.

    -1 where they are no `neighbours`, or it moves by more than a key.
    """
    return np.where(neighbours & (first <= 1) & (stop <= 1), 2 * first + stop, -1)


def _regions(stretches: Stretches, code: np.ndarray, counts: np.ndarray) -> Regions:
    """The regions of queries, from what they see and from runs of equal moves between them: (runs,) each."""
    row, first, stop, number, falls, rises = (x.tolist() for x in stretches)
    codes, ends, queries = code.tolist(), np.cumsum(counts).tolist(), number[-1]
    found: list[Region] = []
    at, run, stretch = 0, 0, 0
    while at < queries:
        while run < len(ends) and ends[run] <= at:
            run += 1
        while number[stretch + 1] <= at:
            stretch += 1
        alone = at == queries - 1 or codes[run] < 0
        last, move = (at, 0) if alone else (ends[run], codes[run])
        into = at - number[stretch]
        here = first[stretch] + into * falls[stretch], stop[stretch] + into * rises[stretch]
        start = row[stretch] + into
        found += _strip(range(start, start + last - at + 1), *here, falls=move >= 2, rises=move % 2 == 1)
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


def pair_counts(
    owner: np.ndarray, key_owner: np.ndarray, chunks: int, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """(query, key) pairs between any two chunks: (chunks, chunks), by query and key chunk.

    `owner` is the chunk of each query, `first` and `stop` what it sees, (queries,) each, `key_owner` the chunk of each
    key, (keys,). Takes time and memory in proportion to the runs of keys of one chunk, times the chunks.
    """
    if chunks > 1 and np.array_equal(key_owner, np.arange(key_owner.size) % chunks):
        return _striped_keys_below(owner, chunks, stop) - _striped_keys_below(owner, chunks, first)
    starts = np.flatnonzero(np.append(True, key_owner[1:] != key_owner[:-1]))
    of, lengths = key_owner[starts], np.diff(np.append(starts, key_owner.size))
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
