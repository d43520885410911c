"""Regions where each query sees one run of neighbouring keys.

All masks here are of that kind: a query at position p sees the keys from first(p) up to stop(p) - 1, and neither falls
as p grows. Documents, sliding windows and chunks are, and so are causal and full.

The regions of a block are those of its queries in turn: queries whose ends both stay, or move on by a key a query,
form a strip, which is a rectangle, a triangle at one of its ends, or a band, which is cut into triangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sp_bench.plan.region_table import RegionTable
from sp_bench.plan.regions import Regions
from sp_bench.plan.runs import Runs, by_position, first_rows

MANY = 4
"""Keys of so many chunks are counted together."""
MANY_ROWS, MANY_COLUMNS = 2048, 32
"""From so many on they are added up in slabs."""
_WIDTHS = (np.int16, np.int32, np.int64)
"""Tokens and runs are counted in the narrowest of these."""


class Sight(Protocol):
    """The keys that queries see under a mask, as plan.documents.Packed has them."""

    def sees(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(first key, the key behind the last) that the query at each position sees."""
        ...

    def turns(self, low: int, high: int, keys: np.ndarray) -> np.ndarray:
        """Positions from low to high at which, or before which, what a query sees of these keys may change otherwise
        than by a key a query. Those at which it jumps are among them.
        """
        ...


def regions_of_runs(mask: Sight, blocks: Sequence[tuple[Runs, Sequence[Runs]]]) -> list[Regions]:
    """The regions of blocks: of some runs of queries and each of several runs of keys, one behind the other.

    Between two turns, what a query sees stays or moves on by a key a query at either end. So that turns are looked at
    in the place of queries, for all keys at once: what is even between two turns is so between more of them.
    """
    return _of_stretches(*_all_stretches(mask, blocks), sum(len(keys) for _, keys in blocks))


def _all_stretches(
    mask: Sight, blocks: Sequence[tuple[Runs, Sequence[Runs]]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(the place of the block, the first query, the number of queries, `below`) of the stretches of all blocks."""
    places = np.cumsum([0, *(len(keys) for _, keys in blocks)])
    together: dict[tuple[int, ...], list[int]] = {}
    for number, (q, keys) in enumerate(blocks):
        alone = (number,) if q.step > 1 or any(kv.step > 1 for kv in keys) else ()
        together.setdefault((*map(id, keys), *alone), []).append(number)
    found = list[tuple[np.ndarray, ...]]()
    for numbers in _apart(together.values(), blocks):
        keys = blocks[numbers[0]][1]
        of, row, count, below = _stretches_of(mask, [blocks[number][0] for number in numbers], keys)
        place = places[numbers][of] + np.arange(len(keys))[:, None]
        found.append((place.ravel(), np.tile(row, len(keys)), np.tile(count, len(keys)), *below.reshape(4, -1)))
    place, row, count, *below = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(place.astype(np.min_scalar_type(int(places[-1]))), kind="stable")
    return place[order], row[order], count[order], np.stack(below).take(order, axis=1)


def _apart(groups: Iterable[list[int]], blocks: Sequence[tuple[Runs, Sequence[Runs]]]) -> Iterator[list[int]]:
    """Groups of blocks, without those in which two have a common query, whose blocks come one by one."""
    for numbers in groups:
        _, start, stop = by_position([blocks[number][0] for number in numbers])
        together = len(numbers) == 1 or (start[1:] >= stop[:-1]).all()
        yield from [numbers] if together else ([number] for number in numbers)


def _stretches_of(
    mask: Sight, queries: Sequence[Runs], keys: Sequence[Runs]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(the chunk of queries, the first query in it, the number of queries of each stretch; `below` of these and of each
    chunk of keys: (4, keys, stretches)), by position. The chunks have no common query.
    """
    chunk, row, count, seen = stretches(mask, queries, keys)
    if not chunk.size:
        return chunk, chunk, chunk, np.zeros((4, len(keys), 0), np.int64)
    below = keys_below(keys, seen.ravel()).astype(np.int64).reshape(len(keys), 4, -1).swapaxes(0, 1)
    return chunk, row, count, below


def stretches(
    mask: Sight, queries: Sequence[Runs], keys: Sequence[Runs]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(the chunk of queries, the first query in it, the number of queries of each stretch; the first key that its first
    query sees, that of its last one, and the keys behind the last ones of both: (4, stretches)), by position.

    Along a stretch, what a query sees of each chunk of keys stays or moves on by a key a query at either end. Chunks of
    queries have no query in common.
    """
    chunk, start, stop = by_position(queries)
    if not chunk.size:
        return chunk, chunk, chunk, np.zeros((4, 0), np.int64)
    q = Runs(start, stop, queries[0].step)
    tokens = q.tokens
    first, _ = first_rows(chunk, tokens)
    behind = np.cumsum(tokens)
    turns = mask.turns(q.start[0], q.stop[-1], np.concatenate([ends for kv in keys for ends in (kv.start, kv.stop)]))
    begins = np.zeros(behind[-1] + 1, bool)
    begins[behind - tokens] = begins[q.below(turns)] = True
    row = np.flatnonzero(begins[:-1])
    count = np.diff(row, append=behind[-1])
    run = np.searchsorted(behind, row, "right")
    into = row - (behind - tokens)[run]
    at = q.start[run] + into * q.step
    seen = np.stack(mask.sees(np.concatenate([at, at + (count - 1) * q.step])))
    return chunk[run], first[run] + into, count, seen.reshape(4, -1)


def keys_below(keys: Sequence[Runs], positions: np.ndarray) -> np.ndarray:
    """Runs.below of the runs of several chunks without a common key: (chunks, positions), in the narrowest integers."""
    below, of = distinct_below(keys, positions)
    return below.take(of, axis=0).T


def distinct_below(keys: Sequence[Runs], positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`keys_below` with one row for positions that are the same: (the rows, (rows, chunks); each position's row)."""
    if len(keys) < MANY or any(kv.step > 1 for kv in keys):
        return np.stack([kv.below(positions) for kv in keys], axis=1), np.arange(positions.size)
    owner, start, stop = by_position(keys)
    at, of = _distinct(positions)
    # All runs that begin below a position count in full, but what the last of them has above it.
    most = int(np.bincount(owner, stop - start).max(initial=0))
    below = np.zeros((at.size + 1, len(keys)), _narrowest(most))
    cells = np.searchsorted(at, start, "right") * len(keys) + owner
    np.add.at(below.reshape(-1), cells, (stop - start).astype(below.dtype))  # fast for one index, of one dtype
    add_up(below)
    last = np.searchsorted(start, at, "left") - 1
    after_a_run = np.flatnonzero(last >= 0)
    below[after_a_run, owner[last[after_a_run]]] -= np.maximum(stop[last[after_a_run]] - at[after_a_run], 0)
    return below, of


def _of_stretches(
    block: np.ndarray, row: np.ndarray, count: np.ndarray, below: np.ndarray, blocks: int
) -> list[Regions]:
    """The regions of each block, of stretches of so many queries from a row on, one block behind the other.

    `below` has the first key, and the one behind the last, that the first and last query of each see: (4, stretches).
    """
    first, last_first, stop, last_stop = below
    # At the end of a stretch that sees more and more, or less and less, a query may see none.
    none, last_none = first >= stop, last_first >= last_stop
    more = none & ~last_none
    row, stop, count = row + more, stop + more, count - (none | last_none)
    last_first = last_first - (last_none & ~none)
    some = (count > 0) & ~(none & last_none)
    if not some.any():
        return [()] * blocks
    block, row, first, stop, last_first, last_stop, count = (
        x[some] for x in (block, row, first, stop, last_first, last_stop, count)
    )
    falls, rises = last_first > first, last_stop > stop
    neighbours = (row[1:] == (row + count)[:-1]) & (block[1:] == block[:-1])
    outer = _moves(neighbours, first[1:] - last_first[:-1], stop[1:] - last_stop[:-1])
    # Moves inside each stretch, and on to the next one; a query alone at the end.
    code = np.stack([2 * falls + rises, np.append(outer, -1)], axis=1).ravel()
    counts = np.stack([count - 1, np.ones_like(count)], axis=1).ravel()
    code, counts = code[counts > 0], counts[counts > 0]
    begins = np.flatnonzero(np.diff(code[:-1], prepend=-2))
    total = np.append(0, np.cumsum(counts))
    counts = np.diff(total[np.append(begins, code.size - 1)], append=total[-1])
    code = np.append(code[begins], -1)
    code[(code == 3) & (counts == 1)] = -1  # two queries are no band
    number = np.append(0, np.cumsum(count)[:-1])
    return _regions(_strips(Stretches(block, row, first, stop, number, 1 * falls, 1 * rises), code, counts), blocks)


class Stretches(NamedTuple):
    """Stretches of queries that see a key, along which what they see moves evenly: (stretches,) each."""

    block: np.ndarray
    """The place of their block."""
    row: np.ndarray
    """The first query."""
    first: np.ndarray
    """The first key that it sees."""
    stop: np.ndarray
    """The key behind the last one."""
    number: np.ndarray
    """The first query among those that see a key."""
    falls: np.ndarray
    """By how many keys the first one that is seen moves on from query to query."""
    rises: np.ndarray
    """By how many keys the last one does."""


class Strips(NamedTuple):
    """Strips of queries: (strips,) each."""

    block: np.ndarray
    """The place of their block."""
    row: np.ndarray
    """The first query."""
    size: np.ndarray
    """How many queries there are."""
    first: np.ndarray
    """The first key that the first query sees."""
    stop: np.ndarray
    """The key behind the last one that it sees."""
    move: np.ndarray
    """How the ends move on, as _moves says."""


def _moves(neighbours: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """By how much what is seen moves on between two queries: twice that of the first key and that of the last one.

    -1 where they are no `neighbours`, or it moves by more than a key.
    """
    return np.where(neighbours & (first <= 1) & (stop <= 1), 2 * first + stop, -1)


def _strips(stretches: Stretches, code: np.ndarray, counts: np.ndarray) -> Strips:
    """The strips of queries, by runs of equal moves between them: (runs,) each, the last of one query to nowhere.

    Each query is in one strip: the move from the last query of a strip is none of the next one.
    """
    runs, begins, even = np.arange(code.size), np.cumsum(counts) - counts, code >= 0
    # A run begins with a move that the strip before it ends at. It has then no strip if it is that move alone.
    alone = even & (counts == 1)
    reset = np.maximum.accumulate(np.where(alone, -1, runs))
    after = np.where(reset >= 0, even[reset], False) ^ ((runs - reset) % 2 == 1)
    taken = np.append(False, after[:-1])
    many = np.where(even, 1 * (counts > taken), counts - taken)
    of = np.repeat(runs, many)
    at = (begins + taken)[of] + np.arange(of.size) - np.repeat(np.cumsum(many) - many, many)
    stretch = np.searchsorted(stretches.number, at, "right") - 1
    block, row, first, stop, number, falls, rises = (x[stretch] for x in stretches)
    into = at - number
    size = np.where(even[of], (begins + counts)[of] - at + 1, 1)
    return Strips(block, row + into, size, first + into * falls, stop + into * rises, np.maximum(code[of], 0))


def _regions(strips: Strips, blocks: int) -> list[Regions]:
    """The regions of each block's strips, FULL ones joined that have the same keys and neighbouring queries."""
    block, row, size, first, stop, move = _cut_bands(strips)
    falls, rises = move >= 2, move % 2 == 1
    low, high = first + size * falls, stop - (rises & ~falls)
    # Up to three of each strip: the triangle of its own kind, the rectangle, and the last triangle of a band.
    present = np.flatnonzero(np.stack([falls | rises, low < high, falls & rises & (size > 1)], axis=1).ravel())
    strip, part = np.divmod(present, 3)
    block, row, size, first, stop, low, high, falls = (
        x[strip] for x in (block, row, size, first, stop, low, high, falls)
    )
    kind = np.where(part == 1, 0, np.where(part == 0, 1 + falls, 1))
    q_start, q_stop = row + (part == 2), row + size
    kv_start = np.choose(part, (np.where(falls, first, high), low, stop))
    kv_stop = np.choose(part, (np.where(falls, low, high + size), high, stop + size - 1))
    firsts, lasts, place = _joined(np.stack([block, kind, q_start, q_stop, kv_start, kv_stop]))
    q_stop[firsts] = q_stop[lasts]
    order = np.lexsort((place, block))
    order = order[place[order] >= 0]
    regions = RegionTable(np.stack([kind, q_start, q_stop, kv_start, kv_stop]).take(order, axis=1))
    behind = np.cumsum(np.bincount(block[order], minlength=blocks)).tolist()
    return [regions[start:stop] for start, stop in zip([0, *behind], behind, strict=False)]


def _cut_bands(strips: Strips) -> Strips:
    """The strips with bands cut into runs of as many queries as a query sees keys."""
    band, width = strips.move == 3, strips.stop - strips.first
    if not band.any():
        return strips
    parts = np.where(band, -(-strips.size // width), 1)
    of = np.repeat(np.arange(parts.size), parts)
    at = (np.arange(of.size) - np.repeat(np.cumsum(parts) - parts, parts)) * width[of]
    block, row, size, first, stop, move = (x[of] for x in strips)
    size = np.where(move == 3, np.minimum(size - at, stop - first), size)
    return Strips(block, row + at, size, first + at, stop + at, move)


def _joined(regions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the first of FULL regions that are joined, the last of them, the place of each region in its block, or -1).

    `regions` are (block, kind, first query, the one behind the last, first key, the one behind the last) of each. A
    FULL region comes where the next with its keys begins, or behind all others.
    """
    block, kind, q_start, q_stop, kv_start, kv_stop = regions
    index, place = np.flatnonzero(kind == 0), np.arange(kind.size)
    if not index.size:
        return index, index, place
    by_keys = index[np.lexsort((index, kv_stop[index], kv_start[index], block[index]))]
    same = np.logical_and.reduce([np.diff(x[by_keys]) == 0 for x in (block, kv_start, kv_stop)])
    follows = same & (q_stop[by_keys[:-1]] == q_start[by_keys[1:]])
    begins = np.flatnonzero(np.append(True, ~follows))
    of_keys = by_keys[np.maximum.accumulate(np.where(np.append(True, ~same), np.arange(by_keys.size), 0))]
    firsts, again = by_keys[begins], np.append(same[begins[1:] - 1], False)
    place[index] = -1
    place[firsts] = np.where(again, np.append(firsts[1:], 0), kind.size + of_keys[begins])
    return firsts, by_keys[np.append(begins[1:], by_keys.size) - 1], place


def covered(row: np.ndarray, first: np.ndarray, stop: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Whether intervals of columns, (intervals,) each, cover a cell of a table of this shape: (rows, columns). Cells of
    a column are neighbours in memory.
    """
    rows, columns = shape
    fits = _narrowest(row.size)
    change = np.zeros((columns + 1, rows), fits)  # column by column, as sums along rows take three times as long
    np.add.at(change.reshape(-1), first * rows + row, fits(1))
    np.add.at(change.reshape(-1), stop * rows + row, fits(-1))
    add_up(change)
    return (change[:-1] > 0).T


def _distinct(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(positions without repetition, ascending; the place of each position among them)."""
    low, high = int(positions.min(initial=0)), int(positions.max(initial=0))
    if high - low >= SPARSE * positions.size:
        return np.unique(positions, return_inverse=True)
    marked = np.zeros(high - low + 1, bool)
    marked[positions - low] = True
    distinct = np.flatnonzero(marked)
    place = np.empty(marked.size, np.int32)
    place[distinct] = np.arange(distinct.size)
    return distinct + low, place[positions - low]


SPARSE = 16
"""Positions so far apart, in the mean, are faster sorted than marked."""


def _narrowest(most: int) -> type[np.signedinteger]:
    """The narrowest integers that hold numbers up to `most`."""
    return next(one for one in _WIDTHS if most <= np.iinfo(one).max)


def add_up(rows: np.ndarray) -> None:
    """Add to each row all rows before it, in place: (rows, columns), contiguous. np.cumsum goes down each column, which
    takes four times as long where there are many of both.
    """
    if len(rows) < MANY_ROWS or rows.shape[1] < MANY_COLUMNS:
        rows.cumsum(axis=0, dtype=rows.dtype, out=rows)
        return
    count = math.isqrt(len(rows))
    whole = count * (len(rows) // count)
    slabs = rows[:whole].reshape(-1, count, rows.shape[1])
    for row in range(1, count):
        slabs[:, row] += slabs[:, row - 1]
    for slab in range(1, len(slabs)):
        slabs[slab] += slabs[slab - 1, -1]
    for row in range(whole, len(rows)):
        rows[row] += rows[row - 1]
