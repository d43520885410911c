"""The blocks of packs of documents and windows: which pairs of chunks compute what, counted for all of them at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sp_bench.plan.assignments import AssignedLayout
from sp_bench.plan.blocks import PairBlocks
from sp_bench.plan.cells import cells_of
from sp_bench.plan.intervals import covered, keys_below, regions_of_runs
from sp_bench.plan.layout import Positions, Shards
from sp_bench.plan.pair_counts import pair_counts, pair_counts_of_striped
from sp_bench.plan.regions import Regions
from sp_bench.plan.runs import Runs, by_position, neighbouring, runs_of

if TYPE_CHECKING:
    from sp_bench.plan.documents import Packed


class Shapes(NamedTuple):
    """The mean size of the pieces that a block falls into: queries and keys of the same document. (classes,) each."""

    pieces: np.ndarray
    q_tokens: np.ndarray
    kv_tokens: np.ndarray


class Seen(NamedTuple):
    """The keys of other chunks that the queries of one chunk see, in groups: by document, or by run of a window."""

    keys: np.ndarray
    """How many a query sees, rising in a group: (queries,)."""
    behind: np.ndarray
    """How many more queries its group has behind it: (queries,)."""
    first: np.ndarray
    """The first query of each group: (groups,)."""
    queries: np.ndarray
    """How many each group has: (groups,)."""


@dataclass(frozen=True)
class PackBlocks(PairBlocks):
    """The blocks of a pack. Counts of pairs are an array over all pairs of chunks."""

    mask: Packed  # pyright: ignore[reportIncompatibleVariableOverride]

    narrows = True  # pyright: ignore[reportAssignmentType]
    """Most blocks compute a part of their rows."""

    @property
    def numbering(self) -> Hashable:
        return self.n, self.layout.head_parallel

    def regions_of(self, kind: int) -> Regions:
        if kind not in self.found:
            self.find([kind])
        return self.found[kind]

    def find(self, kinds: Iterable[int]) -> None:
        by_queries: dict[int, list[int]] = {}
        for kind in map(int, kinds):
            q, kv = divmod(kind, self.chunks)
            if kind in self.found or not self.computes[kind]:
                self.found.setdefault(kind, ())
            elif self.mask.in_one(self._runs[q], self._key_runs[kv]):
                self.found[kind] = self.mask.inside.regions(self._assigned[q], self._positions_of_keys[kv])
            else:
                by_queries.setdefault(q, []).append(kv)
        if by_queries:
            blocks = [(self._runs[q], [self._key_runs[kv] for kv in keys]) for q, keys in by_queries.items()]
            pairs = (q * self.chunks + kv for q, keys in by_queries.items() for kv in keys)
            self.found.update(zip(pairs, regions_of_runs(self.mask, blocks), strict=True))

    @cached_property
    def _assigned(self) -> list[Positions]:
        """The positions of every chunk's queries among the keys."""
        return [self._queries(chunk) for chunk in range(self.chunks)]

    @cached_property
    def _positions_of_keys(self) -> list[Positions]:
        """The positions of every chunk's keys."""
        return [self.keys.chunk_positions(chunk) for chunk in range(self.chunks)] if self.mask.new else self._assigned

    @cached_property
    def _runs(self) -> list[Runs]:
        """`_assigned`, as runs."""
        return [runs_of(each) for each in self._assigned] if self.mask.new else runs_of_chunks(self.queries)

    @cached_property
    def _key_runs(self) -> list[Runs]:
        """`_positions_of_keys`, as runs."""
        return runs_of_chunks(self.keys) if self.mask.new else self._runs

    # Of all tokens and for each of a pack's many layouts these two take much memory, and are soon worked out.
    @property
    def owner(self) -> np.ndarray:
        """The chunk of each query: (seqlen,)."""
        return _owner(runs_of_chunks(self.queries), self.seqlen)

    @property
    def key_owner(self) -> np.ndarray:
        """The chunk of each key: (keys,)."""
        return _owner(self._key_runs, self.keys.seqlen) if self.mask.new else self.owner

    @cached_property
    def pairs(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._neighbours is None and self.chunks > 1 and self._keys_are_dealt:
            seen = self.mask.sees(self.mask.query_positions)
            return pair_counts_of_striped(self.owner, self.chunks, *seen).ravel()
        queries = [*map(neighbouring, self._runs)]
        keys = [*map(neighbouring, self._key_runs)] if self.mask.new else queries
        return pair_counts(self.mask, queries, keys).ravel()

    @property
    def _keys_are_dealt(self) -> bool:
        """Whether keys are dealt to chunks one by one."""
        every = range(self.keys.seqlen)
        dealt = (runs_of([every[chunk :: self.chunks]]) for chunk in range(self.chunks))
        return all(
            runs.step == each.step and all(map(np.array_equal, runs[:2], each[:2]))
            for runs, each in zip(self._key_runs, dealt, strict=True)
        )

    @cached_property
    def computes(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether any pair of each class is computed, (classes,): found without counting pairs."""
        if not self.mask.windowed and not self.mask.new and self._all_see_all_in_one():
            return np.ones(self.classes, bool)
        if self._neighbours is None:
            return self.pairs > 0
        (chunk, start, stop), (owner, begin, _) = self._neighbours
        # The queries of a run see neighbouring keys, all together.
        first, behind = self.mask.sees(start)[0], self.mask.sees(stop - 1)[1]
        ends = np.searchsorted(begin, first, "right") - 1, np.searchsorted(begin, behind - 1, "right")
        seen = covered(chunk, *ends, (self.chunks, begin.size))[:, np.argsort(owner, kind="stable")]
        keys, begins = np.unique(np.sort(owner), return_index=True)
        computed = np.zeros((self.chunks, self.chunks), bool)
        computed[:, keys] = np.logical_or.reduceat(seen, begins, axis=1)
        return computed.ravel()

    def _all_see_all_in_one(self) -> bool:
        """Whether queries of each chunk see keys of every chunk in the longest document, which has no window."""
        longest = int(np.argmax(self.mask.lengths))
        low, high = self.mask.edges[longest : longest + 2]
        first, last = [], []
        for start, stop, step in self._runs:
            overlapping = slice(np.searchsorted(stop, low, "right"), np.searchsorted(start, high))
            if overlapping.start >= overlapping.stop:
                return False
            first.append(start[overlapping][0] + max(-((start[overlapping][0] - low) // step), 0) * step)
            last.append(
                start[overlapping][-1] + (min(stop[overlapping][-1], high) - 1 - start[overlapping][-1]) // step * step
            )
        return max(first) <= min(last) if self.mask.causal else bool(np.less_equal(first, last).all())

    @cached_property
    def keys_seen(self) -> np.ndarray:
        """How many keys of each block some query of it sees: (classes,). Of chunks that are no runs of neighbours, all
        that are of the same documents.
        """
        if self._neighbours is None:
            return self.shapes.pieces * self.shapes.kv_tokens
        queries, keys = self._neighbours
        cells, counts = cells_of(keys, queries, *self._keys_met), np.empty((self.chunks, self.chunks))
        for each in range(self.chunks):
            seen = cells.met_by(each)
            counts[each] = np.bincount(cells.owner[seen], cells.tokens[seen], self.chunks)
        return counts.ravel()

    @cached_property
    def key_rows(self) -> np.ndarray:
        """The rows of keys that each block reads, from the first to the last: (first, the one behind the last), of
        chunks that are no runs of neighbours all rows; (0, 0) of a block that reads none. (2, classes).
        """
        if self._neighbours is None:
            return self._all_rows(np.tile(self._tokens(self.keys), self.chunks))
        queries, keys = self._neighbours
        return cells_of(keys, queries, *self._keys_met).rows_met(self.chunks).reshape(2, -1)

    @cached_property
    def query_rows(self) -> np.ndarray:
        """The rows of queries that see a key of each block, as `key_rows` has those of keys: (2, classes)."""
        if self._neighbours is None:
            return self._all_rows(np.repeat(self._tokens(self.queries), self.chunks))
        (chunk, start, stop), keys = self._neighbours
        _, begin, end = keys
        first, behind, tokens = self.mask.seen_by(begin)[0], self.mask.seen_by(end - 1)[1], stop - start
        if self.mask.new:  # numbers of queries in the place of their positions among keys, which have gaps
            start, first, behind = (np.searchsorted(self.mask.query_positions, at) for at in (start, first, behind))
        cells = cells_of(np.stack([chunk, start, start + tokens]), keys, first, behind)
        return cells.rows_met(self.chunks).transpose(0, 2, 1).reshape(2, -1)

    @property
    def _keys_met(self) -> tuple[np.ndarray, np.ndarray]:
        """The first key that the queries of each run see, and the one behind the last: they see neighbours."""
        assert self._neighbours is not None
        _, start, stop = self._neighbours[0]
        return self.mask.sees(start)[0], self.mask.sees(stop - 1)[1]

    def _tokens(self, shards: Shards) -> np.ndarray:
        """How many tokens each chunk has: (chunks,)."""
        return np.broadcast_to(shards.chunk_tokens(np.arange(self.chunks)), self.chunks).astype(np.int32)

    def _all_rows(self, tokens: np.ndarray) -> np.ndarray:
        """All rows of chunks of so many tokens, (classes,), in each block that there is: (2, classes)."""
        return np.stack([np.zeros(self.classes, np.int32), tokens * self.computes])

    @cached_property
    def _neighbours(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The runs of neighbours that queries and keys are assigned as (by_position); None where some are none."""
        if any(runs.step > 1 for runs in (*self._runs, *self._key_runs)):
            return None
        by_queries = by_position(self._runs)
        return by_queries, by_position(self._key_runs) if self.mask.new else by_queries

    @cached_property
    def tokens_of_documents(self) -> np.ndarray:
        """Queries of each document in each chunk: (documents, chunks)."""
        return self._by_document(self._runs)

    @cached_property
    def keys_of_documents(self) -> np.ndarray:
        """Keys of each document in each chunk: (documents, chunks)."""
        return self._by_document(self._key_runs) if self.mask.new else self.tokens_of_documents

    def _by_document(self, runs: Sequence[Runs]) -> np.ndarray:
        """How many of each chunk's positions are of each document."""
        return np.diff(keys_below(runs, self.mask.edges).astype(np.int64), axis=1).T

    @cached_property
    def shapes(self) -> Shapes:
        """The mean pieces of each block. A kernel call takes them together."""
        queries, keys = self.tokens_of_documents.astype(float), self.keys_of_documents.astype(float)
        asking, seen = (queries > 0).astype(float), (keys > 0).astype(float)
        pieces, q_tokens, kv_tokens = asking.T @ seen, queries.T @ seen, asking.T @ keys
        divided = np.maximum(pieces, 1)
        return Shapes(pieces.ravel(), (q_tokens / divided).ravel(), (kv_tokens / divided).ravel())

    @property
    def imbalance(self) -> float:
        """(query, key) pairs of the chunk with most of them over the mean of all."""
        work = self.pairs.reshape(self.chunks, self.chunks).sum(axis=1)
        return float(work.max() / work.mean())

    @property
    def remote_tokens(self) -> int:
        """Keys that chunks see in other chunks, a whole chunk of keys for each pair of chunks that has any."""
        tokens = self.keys.chunk_tokens(np.arange(self.chunks))
        seen = self.pairs.reshape(self.chunks, self.chunks) > 0
        np.fill_diagonal(seen, False)
        return int((seen * tokens).sum())

    def least_moved(self, per_query: float, per_key: float) -> float:
        """The least that any method moves between chunks, of so much for a query and for a key, all chunks together.

        A pair of a query of one chunk and a key of another is computed somewhere. Then the key has come to the query's
        chunk, or the query has left it and its result came back. What it costs at least is a vertex cover of least
        weight of a chunk's queries and the others' keys that they see. In a document later queries see more, so that
        the cover is all keys up to one query and all queries behind it. With a window, only the keys between two runs
        of a chunk are counted, with the queries of the second.
        """
        moved = 0.0
        for seen in self._seen_elsewhere:
            kept = np.minimum.reduceat(per_key * seen.keys + per_query * seen.behind, seen.first)
            moved += float(np.minimum(kept, per_query * seen.queries).sum())
        return moved

    @cached_property
    def _seen_elsewhere(self) -> list[Seen]:
        """The keys of other chunks that the queries of each chunk see, for chunks that have any."""
        positions = self.mask.query_positions
        pairs = zip(_by_chunk(self.owner, self.chunks), _by_chunk(self.key_owner, self.chunks), strict=True)
        return [self._seen_by(positions[queries], own) for queries, own in pairs if queries.size]

    def _seen_by(self, queries: np.ndarray, own: np.ndarray) -> Seen:
        """Those of a chunk's queries and its own keys, both by position among keys."""
        first, stop = self.mask.sees(queries)
        if self.mask.windowed:
            of = np.append(0, np.cumsum(np.diff(queries) > 1))  # the run of each query
            start = queries[np.flatnonzero(np.diff(of, prepend=-1))]
            before = np.append(0, own + 1)[np.searchsorted(own, start)]
            keys = np.maximum(start[of] - np.maximum(first, before[of]), 0)
            order = np.lexsort((keys, of))
            of, keys = of[order], keys[order]
        else:
            of = np.searchsorted(self.mask.edges, queries, side="right") - 1
            keys = (stop - first) - (np.searchsorted(own, stop) - np.searchsorted(own, first))
        groups = np.flatnonzero(np.diff(of, prepend=-1))
        sizes = np.diff(np.append(groups, queries.size))
        behind = np.repeat(groups + sizes, sizes) - np.arange(queries.size) - 1
        return Seen(keys.astype(np.int32), behind.astype(np.int32), groups, sizes)


def runs_of_chunks(shards: Shards) -> list[Runs]:
    """The positions of every chunk, as runs."""
    if isinstance(shards.layout, AssignedLayout) and shards.in_runs:
        return [Runs(start, stop) for start, stop in shards.layout.ranges.runs(shards.chunks)]
    return [runs_of(shards.chunk_positions(chunk)) for chunk in range(shards.chunks)]


def _owner(chunks: Sequence[Runs], tokens: int) -> np.ndarray:
    """The chunk of each token by position: (tokens,)."""
    owner = np.empty(tokens, np.int64)
    for chunk, runs in enumerate(chunks):
        for start, stop in zip(runs.start.tolist(), runs.stop.tolist(), strict=True):
            owner[start : stop : runs.step] = chunk
    return owner


def _by_chunk(owner: np.ndarray, chunks: int) -> list[np.ndarray]:
    """The positions of each chunk, ascending, from the chunk of each position."""
    ends = np.cumsum(np.bincount(owner, minlength=chunks))
    return np.split(np.argsort(owner, kind="stable"), ends[:-1])
