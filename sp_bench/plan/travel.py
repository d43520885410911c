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
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from sp_bench.plan.casts import Casts, Gathering, Keys, Works, casts, works_in
from sp_bench.plan.intervals import regions_of_runs
from sp_bench.plan.problem import Problem
from sp_bench.plan.runs import Runs, whole_numbers
from sp_bench.plan.sighted import Sighted, sighted
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
    seeing: Sighted
    """The queries of all pairs that see a key."""
    _blocks: dict[Gathering, Keys] = field(default_factory=dict, init=False, repr=False)
    _works: dict[Gathering, Works] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each query chunk that see keys of each chunk: (chunks, chunks), by key and query chunk."""
        return np.where(self.travels, self.seeing.queries, 0).T

    def counts_for(self, relays: int) -> np.ndarray:
        """`counts`, as none are relayed."""
        assert relays == 1, "rows of queries come straight from their owner"
        return self.counts

    def rows(self, keys: int, queries: int, relays: int = 1) -> np.ndarray:
        """The rows of one query chunk that see keys of a chunk, ascending; none if the keys go to them."""
        return whole_numbers(*self._runs(keys, queries)[1:])

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
            parts = [self._runs(each.queries, q) for q in each.members]
            start, _, tokens = (np.concatenate(part) for part in zip(*parts, strict=True))
            lie, by_position = np.cumsum(tokens) - tokens, np.argsort(start)
            start, tokens, lie = start[by_position], tokens[by_position], lie[by_position]
            counts = self.counts[each.queries, list(each.members)].tolist()
            self._blocks[each] = Keys(whole_numbers(lie, tokens), tuple(counts), ())
            if start.size:
                seen.append(each)
                blocks.append((_joined(start, start + tokens), [self.every.key_runs[each.queries]]))
        if blocks:
            for each, regions in zip(seen, regions_of_runs(self.every.pack, blocks), strict=True):
                self._blocks[each] = self._blocks[each]._replace(regions=regions)

    def works(self, keys: np.ndarray, members: np.ndarray, relays: int = 1) -> tuple[list[Works], np.ndarray]:
        """The works of some blocks, forward and backward, and the number of each: `keys` is the key chunk of each,
        (blocks,), `members` its query chunks, (blocks, members).
        """
        pairs = zip(keys.tolist(), map(tuple, members.tolist()), strict=True)
        blocks = [Gathering(*pair, relays) for pair in pairs]
        self.find(blocks)
        return [self._work(each) for each in blocks], np.arange(len(blocks))

    def _work(self, of: Gathering) -> Works:
        if of not in self._works:
            self._works[of] = works_in(self.keys(*of).regions)
        return self._works[of]

    def _runs(self, keys: int, queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Runs of `rows`: (the position of the first, the first row, how many), (runs,) each."""
        none = np.zeros(0, np.int64)
        return self.seeing.rows(queries, keys) if self.travels[queries, keys] else (none, none, none)


@dataclass(frozen=True, eq=False)
class Travel:
    """The two ways of a phase's rows."""

    keys: Casts
    """Casts of keys, of the pairs whose queries stay."""
    queries: QueryCasts


@lru_cache(maxsize=32)  # each operation asks
def travel(problem: Problem, *, forward: bool) -> Travel:
    """The pairs of chunks that send rows of keys in a phase, and those that send rows of queries."""
    return _travel(casts(problem), problem.mask.held, *row_bytes(problem, forward=forward))


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


@lru_cache(maxsize=16)  # problems that differ in other things have the same
def _travel(every: Casts, held: int, per_key: int, per_query: int) -> Travel:
    seeing, tokens = _seeing(every), every.of_queries.chunk_tokens(np.arange(every.chunks))
    work = seeing.pairs + np.diag(np.broadcast_to(held * tokens, every.chunks))
    chosen = chosen_pairs(every.counts, seeing.queries, work, per_key, per_query)
    return Travel(every.leaving_out(chosen), QueryCasts(every, chosen, seeing))


def chosen_pairs(keys: np.ndarray, queries: np.ndarray, work: np.ndarray, per_key: int, per_query: int) -> np.ndarray:
    """The pairs whose queries travel, by query and key chunk, as all of these: (chunks, chunks).

    `keys` are how many a query of the other chunk sees, `queries` how many see a key, `work` how many pairs of both.
    """
    gain = np.where(queries > 0, np.maximum(per_key * keys - per_query * queries, 0), 0)
    np.fill_diagonal(gain, 0)
    room = max(EVEN * work.sum() / len(work), work.sum(axis=1).max())
    choices = (_added(_evened(gain > 0, gain, work, room), gain, work, room), _added(gain < 0, gain, work, room))
    return max(choices, key=lambda travels: int(gain[travels].sum()))


def _busy(travels: np.ndarray, work: np.ndarray) -> np.ndarray:
    """Pairs of a query and a key that each chunk's rank computes: (chunks,)."""
    return np.where(travels, 0, work).sum(axis=1) + np.where(travels, work, 0).sum(axis=0)


def _evened(travels: np.ndarray, gain: np.ndarray, work: np.ndarray, room: float) -> np.ndarray:
    """Pairs that travel with those taken back, from the busiest rank first, that save least for their work."""
    travels, busy = travels.copy(), _busy(travels, work).tolist()
    least_first = np.argsort(gain / np.maximum(work, 1), axis=0, kind="stable").T
    came: dict[int, list[tuple[int, int]]] = {}
    while busy[kv := busy.index(max(busy))] > room:
        if kv not in came:
            order = least_first[kv][travels[least_first[kv], kv]]
            came[kv] = [*zip(order.tolist(), work[order, kv].tolist(), strict=True)]
        back = next((pair for pair in came[kv] if busy[pair[0]] + pair[1] <= room), came[kv][0])
        came[kv].remove(back)
        q, pairs = back
        busy[q], busy[kv], travels[q, kv] = busy[q] + pairs, busy[kv] - pairs, False
    return travels


def _added(travels: np.ndarray, gain: np.ndarray, work: np.ndarray, room: float) -> np.ndarray:
    """Pairs that travel with others that there is room for, those that save most first."""
    travels, busy = travels.copy(), _busy(travels, work).tolist()
    order = np.argsort(-gain, axis=None, kind="stable")[: int((gain > 0).sum())]
    order = order[~travels.ravel()[order]]
    left = [*zip(*(each.tolist() for each in (*np.divmod(order, len(gain)), work.ravel()[order])), strict=True)]
    taken = list[tuple[int, int]]()
    for _ in range(PASSES):
        full = list[tuple[int, int, int]]()
        for q, kv, pairs in left:
            if busy[kv] + pairs <= room:
                busy[q] -= pairs
                busy[kv] += pairs
                taken.append((q, kv))
            else:
                full.append((q, kv, pairs))
        left = full
    if taken:
        travels[tuple(np.array(taken).T)] = True
    return travels


def query_rows_elsewhere(problem: Problem, *, forward: bool) -> int:
    """Query rows that go to the keys of other chunks in a phase, all together, for each head."""
    return int(travel(problem, forward=forward).queries.counts.sum())


def key_rows_elsewhere(problem: Problem, *, forward: bool) -> int:
    """Key rows that go to the queries of other chunks in a phase, where some queries travel, for each head."""
    counts = travel(problem, forward=forward).keys.counts
    return int(counts.sum() - counts.trace())


@lru_cache(maxsize=16)  # both phases have the same
def _seeing(every: Casts) -> Sighted:
    return sighted(every.pack, every.query_runs, every.key_runs)


def _joined(start: np.ndarray, stop: np.ndarray) -> Runs:
    """Ascending runs of positions, with neighbours as one run."""
    begins = np.flatnonzero(np.append(True, start[1:] != stop[:-1]))
    return Runs(start[begins], stop[np.append(begins[1:], start.size) - 1])
