"""Queries that travel: of which pairs of chunks the queries go to the keys, and which rows of them.

A GroupCast brings a rank the key rows that its queries see. The other way round, rows of queries go to the rank that
has the keys, which computes their blocks, and the outputs come back to be merged by their lse; backward q, do, lse and
the row sums of do * o go, and dq comes back. vLLM's decode context parallelism and MagiAttention's q and o casts are of
that kind. Each pair of chunks takes one of the two ways:

- the one that sends fewer bytes in this phase. Of a key, K and V go, and backward dK and dV come back too; of a query,
  q and o with its lse, backward q, do, lse, delta and dq;
- but what is computed moves with the queries. No rank may then have more than EVEN times the mean of all pairs of a
  query and a key, or than the most that a rank had anyway. Of two greedy choices the one that saves more is taken: to
  take pairs back, from all that save anything, till that is so; or to add those that save most while there is room.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from sp_bench.plan.casts import Casts, Gathering, Keys, Work, casts, whole_numbers
from sp_bench.plan.intervals import Runs, regions_of_runs, rows_that_see, sizes_of
from sp_bench.plan.mask import Blocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import by_keys, rows_in
from sp_bench.plan.tensors import DKV, DOQ, DQ, KV, O, Q, Tensor

EVEN = 1.05
"""The most work that a rank may have over the mean because queries come to it."""
PASSES = 3
"""Pairs that there was no room for are asked again so often, as others have made room."""


@dataclass(frozen=True, eq=False)
class QueryCasts:
    """The rows of query chunks that see keys of other chunks, of pairs whose queries travel.

    It answers what Casts does, with the sides changed: the rows are of queries, and a rank has them for its own keys.
    """

    every: Casts
    """The casts of keys, of all pairs."""
    travels: np.ndarray
    """Whether the queries of a pair travel: (chunks, chunks), by query and key chunk."""
    _blocks: dict[Gathering, Keys] = field(default_factory=dict, init=False, repr=False)
    _works: dict[Gathering, tuple[Work, Work]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each query chunk that see keys of each chunk: (chunks, chunks), by key and query chunk."""
        counts = np.zeros(self.travels.shape, np.int64)
        for (q, kv), rows in self._rows.items():
            counts[kv, q] = rows.size
        return counts

    def counts_for(self, relays: int) -> np.ndarray:
        """`counts`, as none are relayed."""
        assert relays == 1, "rows of queries come straight from their owner"
        return self.counts

    def rows(self, keys: int, queries: int, relays: int = 1) -> np.ndarray:
        """The rows of one query chunk that see keys of a chunk, ascending; none if the keys go to them."""
        return self._rows.get((queries, keys), np.zeros(0, np.int64))

    def keys(self, keys: int, members: tuple[int, ...], relays: int = 1) -> Keys:
        """The rows that a chunk of keys has of several query chunks, with regions whose queries are these in order of
        position, and whose keys are all of the chunk.
        """
        wanted = Gathering(keys, members, relays)
        if wanted not in self._blocks:
            self.find([wanted])
        return self._blocks[wanted]

    def find(self, wanted: Iterable[Gathering]) -> None:
        """Find and keep `keys` of some chunks and members, all at once, as that is faster."""
        seen, blocks = list[Gathering](), list[tuple[Runs, list[Runs]]]()
        for each in dict.fromkeys(wanted):
            if each in self._blocks:
                continue
            parts = [self._positions[q][self.rows(each.queries, q)] for q in each.members]
            positions = np.concatenate(parts)
            order = np.argsort(positions, kind="stable")
            self._blocks[each] = Keys(order, tuple(map(len, parts)), ())
            if order.size:
                seen.append(each)
                blocks.append((_neighbours(positions[order]), [self.every.key_runs[each.queries]]))
        if blocks:
            for each, regions in zip(seen, regions_of_runs(self.every.pack, blocks), strict=True):
                self._blocks[each] = self._blocks[each]._replace(regions=regions)

    def works(
        self, keys: np.ndarray, members: np.ndarray, relays: int = 1, *, forward: bool
    ) -> tuple[list[Work], np.ndarray]:
        """The works of some blocks, and the number of each: `keys` is the key chunk of each, (blocks,), `members` its
        query chunks, (blocks, members).
        """
        pairs = zip(keys.tolist(), map(tuple, members.tolist()), strict=True)
        blocks = [Gathering(*pair, relays) for pair in pairs]
        self.find(blocks)
        return [self._work(each, forward=forward) for each in blocks], np.arange(len(blocks))

    def _work(self, of: Gathering, *, forward: bool) -> Work:
        if of not in self._works:
            regions = self.keys(*of).regions
            rows = rows_in(region.q for region in regions), rows_in(region.kv for region in regions)
            self._works[of] = Work(sizes_of(regions), *rows), Work(sizes_of(by_keys(regions)), *rows)
        return self._works[of][not forward]

    @cached_property
    def _rows(self) -> dict[tuple[int, int], np.ndarray]:
        """By (query chunk, key chunk) of pairs whose queries travel."""
        seeing = _seeing(self.every)
        return {(int(q), int(kv)): seeing.rows(int(q), int(kv)) for q, kv in np.argwhere(self.travels)}

    @cached_property
    def _positions(self) -> list[np.ndarray]:
        """The positions among keys of the rows of every query chunk."""
        return [_positions(runs) for runs in self.every.query_runs]


@dataclass(frozen=True, eq=False)
class Travel:
    """The two ways of a phase's rows."""

    keys: Casts
    """Casts of keys, of the pairs whose queries stay."""
    queries: QueryCasts


def travel(problem: Problem, *, forward: bool) -> Travel:
    """The pairs of chunks that send rows of keys in a phase, and those that send rows of queries; cached."""
    per_row = row_bytes(problem, forward=forward)
    return _travel(casts(problem), problem.blocks, problem.layout.head_parallel, *per_row)


def row_bytes(problem: Problem, *, forward: bool) -> tuple[int, int]:
    """Bytes that a row of keys, and one of queries, takes to other chunks and back in a phase."""

    def total(*tensors: Tensor) -> int:
        fields = (each for tensor in tensors for each in tensor.by_heads.fields)
        return sum(problem.token_bytes(each, wire=True) for each in fields)

    return (total(KV), total(Q, O)) if forward else (total(KV, DKV), total(DOQ, DQ))


def queries_are_cheap(problem: Problem) -> bool:
    """Whether a row of queries takes no more bytes than one of keys, both phases together."""
    keys, queries = (sum(each) for each in zip(*(row_bytes(problem, forward=f) for f in (True, False)), strict=True))
    return queries <= keys


@lru_cache(maxsize=16)
def _travel(every: Casts, blocks: Blocks, degree: int, per_key: int, per_query: int) -> Travel:
    first = degree * np.arange(every.chunks)
    work = np.asarray(blocks.pairs)[blocks.of(first[:, None], first)]
    chosen = chosen_pairs(every, work, per_key, per_query)
    return Travel(replace(every, whole=False, without=chosen), QueryCasts(every, chosen))


def chosen_pairs(every: Casts, work: np.ndarray, per_key: int, per_query: int) -> np.ndarray:
    """The pairs whose queries travel: (chunks, chunks), by query and key chunk.

    `work` has how many queries and keys of each meet, (chunks, chunks).
    """
    queries = _seeing(every).counts
    gain = np.where(queries > 0, np.maximum(per_key * every.counts - per_query * queries, 0), 0)
    room = max(EVEN * work.sum() / every.chunks, work.sum(axis=1).max())
    choices = (_added(_evened(gain > 0, gain, work, room), gain, work, room), _added(gain < 0, gain, work, room))
    return max(choices, key=lambda travels: int(gain[travels].sum()))


def _busy(travels: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Pairs of a query and a key that each chunk's rank computes: (chunks,)."""
    return np.where(travels, 0, work).sum(axis=1) + np.where(travels, work, 0).sum(axis=0)


def _evened(travels: np.ndarray, gain: np.ndarray, work: np.ndarray, room: float) -> np.ndarray:
    """Pairs that travel with those taken back, from the busiest rank first, that save least for their work."""
    travels, busy = travels.copy(), _busy(travels, work)
    lost = gain / np.maximum(work, 1)
    while busy[kv := int(busy.argmax())] > room:
        came = np.flatnonzero(travels[:, kv])
        fit = came[busy[came] + work[came, kv] <= room]
        back = fit if fit.size else came
        q = int(back[lost[back, kv].argmin()])
        busy[q], busy[kv], travels[q, kv] = busy[q] + work[q, kv], busy[kv] - work[q, kv], False
    return travels


def _added(travels: np.ndarray, gain: np.ndarray, work: np.ndarray, room: float) -> np.ndarray:
    """Pairs that travel with others that there is room for, those that save most first."""
    travels, busy = travels.copy(), _busy(travels, work)
    order = np.argsort(-gain, axis=None, kind="stable")[: int((gain > 0).sum())].tolist()
    left = [(q, kv) for q, kv in (divmod(pair, len(gain)) for pair in order) if not travels[q, kv]]
    for _ in range(PASSES):
        full = list[tuple[int, int]]()
        for q, kv in left:
            if busy[kv] + work[q, kv] <= room:
                busy[q], busy[kv], travels[q, kv] = busy[q] - work[q, kv], busy[kv] + work[q, kv], True
            else:
                full.append((q, kv))
        left = full
    return travels


def query_rows_elsewhere(problem: Problem, *, forward: bool) -> int:
    """Query rows that go to the keys of other chunks in a phase, all together, for each head."""
    return int(travel(problem, forward=forward).queries.counts.sum())


def key_rows_elsewhere(problem: Problem, *, forward: bool) -> int:
    """Key rows that go to the queries of other chunks in a phase, where some queries travel, for each head."""
    counts = travel(problem, forward=forward).keys.counts
    return int(counts.sum() - counts.trace())


class _Seeing(NamedTuple):
    """The queries of each pair of other chunks that see a key, as runs in the order of the pairs."""

    counts: np.ndarray
    """How many they are: (chunks, chunks), by query and key chunk."""
    first: np.ndarray
    """The first run of each pair, and how many runs there are: (chunks * chunks + 1,)."""
    row: np.ndarray
    tokens: np.ndarray

    def rows(self, queries: int, keys: int) -> np.ndarray:
        """Those of one pair, ascending."""
        place = queries * len(self.counts) + keys
        runs = slice(*self.first[place : place + 2])
        return whole_numbers(self.row[runs], self.tokens[runs])


@lru_cache(maxsize=16)  # both phases have the same
def _seeing(every: Casts) -> _Seeing:
    chunks, keys = every.chunks, every.counts.copy()
    np.fill_diagonal(keys, 0)
    pairs, seen_by = np.flatnonzero(keys), [np.flatnonzero(row).tolist() for row in keys]
    blocks = [(every.query_runs[q], [every.key_runs[kv] for kv in seen]) for q, seen in enumerate(seen_by) if seen]
    none = np.zeros(0, np.int64)
    block, row, tokens = rows_that_see(every.pack, blocks) if blocks else (none, none, none)
    order = np.argsort(block, kind="stable")
    place, row, tokens = pairs[block[order]], row[order], tokens[order]
    counts = np.bincount(place, tokens, chunks**2).astype(np.int64).reshape(chunks, chunks)
    return _Seeing(counts, np.searchsorted(place, np.arange(chunks**2 + 1)), row, tokens)


def _positions(runs: Runs) -> np.ndarray:
    tokens = runs.tokens
    return np.repeat(runs.start, tokens) + runs.step * whole_numbers(np.zeros_like(tokens), tokens)


def _neighbours(positions: np.ndarray) -> Runs:
    """Ascending positions as runs of neighbours."""
    begins = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
    ends = np.append(begins[1:], positions.size) - 1
    return Runs(positions[begins], positions[ends] + 1)
