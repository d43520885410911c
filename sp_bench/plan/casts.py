"""Casts: which rows of a key chunk the queries of another chunk see, and what is computed with them.

A GroupCast moves just these rows. The rows that a rank gets from several others lie behind each other, in the order of
the operation's members. A Gathered block reads them in the order of their positions: there a query sees one run of
neighbouring keys, whoever sent them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from sp_bench.plan.alike import Alike
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.intervals import covered, regions_of_runs
from sp_bench.plan.layout import Shards
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.pack_blocks import runs_of_chunks
from sp_bench.plan.problem import Problem
from sp_bench.plan.region_table import Sizes, by_keys, rows_seen, sizes_of
from sp_bench.plan.regions import Regions
from sp_bench.plan.runs import Runs, first_rows, in_runs, runs_of, whole_numbers


class Segments(NamedTuple):
    """Runs of positions that one chunk owns and that a chunk's queries see all or none of. (segments,) each."""

    start: np.ndarray
    """The first position."""
    tokens: np.ndarray
    owner: np.ndarray
    """The chunk that owns each segment."""
    row: np.ndarray
    """The first position as a row of its chunk."""
    by_owner: np.ndarray
    """The order of the segments by owner and position."""


class Keys(NamedTuple):
    """The key rows of a Gathered block on one rank."""

    order: np.ndarray
    """Their order by position: place in it -> place among the rows as they lie, member by member. (keys,)"""
    counts: tuple[int, ...]
    """How many rows there are of each key chunk."""
    regions: Regions
    """The regions that the rank's queries see, with keys by their place in the order."""


class Gathering(NamedTuple):
    """The query chunk and the key chunks of a Gathered block."""

    queries: int
    members: tuple[int, ...]
    relays: int = 1
    """How many neighbouring chunks of queries get rows by way of each other. A chunk has, of those with its own place
    among other neighbours, the rows that any of these sees."""

    def relays_for(self, member: int) -> int:
        """For how many chunks of queries it has the rows of a member."""
        relayed = member != self.queries and (member - self.queries) % self.relays == 0
        return self.relays if relayed else 1


class Work(NamedTuple):
    """The work of a Gathered block on one rank."""

    sizes: Sizes
    """Sizes of the regions that its kernels take."""
    q_rows: int
    """How many queries see a key."""
    kv_rows: int
    """How many keys a query sees."""


Works = tuple[Work, Work]
"""The work forward, and backward."""


def works_in(regions: Regions) -> Works:
    """The work of regions forward, and backward, where they are cut along keys."""
    rows = rows_seen(regions)
    return Work(sizes_of(regions), *rows), Work(sizes_of(by_keys(regions)), *rows)


@dataclass(frozen=True, eq=False)
class Casts:
    """The rows that chunks need of each other, under one mask and layout."""

    pack: Packed
    """The mask by positions of keys."""
    of_queries: Shards
    of_keys: Shards
    ahead: int
    """How many keys are before all queries."""
    whole: bool = False
    """Whether the mask is of a whole sequence, causal or not: one document."""
    without: np.ndarray | None = None
    """Pairs of chunks that are left out (`leaving_out`)."""
    _rows: dict[tuple[int, int, int], np.ndarray] = field(default_factory=dict, init=False, repr=False)
    _keys: dict[Gathering, Keys] = field(default_factory=dict, init=False, repr=False)
    _works: dict[Gathering, Works] = field(default_factory=dict, init=False, repr=False)
    _relayed: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict, init=False, repr=False)
    _kinds: dict[bytes, Gathering] = field(default_factory=dict, init=False, repr=False)

    def leaving_out(self, pairs: np.ndarray) -> Casts:
        """The casts of all other pairs of chunks: (chunks, chunks), by query and key chunk."""
        others = replace(self, whole=False, without=pairs)
        others.__dict__["counts"] = np.where(pairs, 0, self.counts)
        for name in ("key_runs", "query_runs", "_segments", "_of_owner", "_seen"):  # the same of any pairs
            others.__dict__[name] = getattr(self, name)
        return others

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each key chunk that queries of each chunk see: (chunks, chunks), by query and key chunk."""
        if self._alike:
            return self._alike.seen(np.arange(self.chunks)[:, None], np.arange(self.chunks)[None])
        return self._counted(self._seen)

    def counts_for(self, relays: int) -> np.ndarray:
        """Rows of each key chunk that queries of any of `relays` neighbouring chunks see, for each of these: (chunks,
        chunks).
        """
        if relays == 1:
            return self.counts
        if self.whole:  # the first rows of each chunk
            return np.repeat(self.counts.reshape(-1, relays, self.chunks).max(axis=1), relays, axis=0)
        return self._for(relays)[1]

    def _for(self, relays: int) -> tuple[np.ndarray, np.ndarray]:
        """(whether any of so many neighbours sees a segment, (chunks / relays, segments); `counts_for`)."""
        if relays not in self._relayed:
            seen = np.logical_or.reduce(self._seen.reshape(-1, relays, self._segments.start.size), axis=1)
            self._relayed[relays] = seen, np.repeat(self._counted(seen), relays, axis=0)
        return self._relayed[relays]

    def _counted(self, seen: np.ndarray) -> np.ndarray:
        counts, tokens = np.zeros((len(seen), self.chunks), np.int64), self._segments.tokens
        for keys, indices in enumerate(self._of_owner):
            counts[:, keys] = tokens[indices] @ seen.T[indices].astype(float)  # whole numbers take ten times as long
        return counts

    def rows(self, queries: int, keys: int, relays: int = 1) -> np.ndarray:
        """The rows of one key chunk that queries of a chunk, or of any of the neighbours that it relays for, see,
        ascending.
        """
        count = self.counts_for(relays)[queries, keys]
        if self.whole or not count:  # none as of most pairs where documents are short
            return np.arange(count)
        asked = queries, keys, relays
        if asked not in self._rows:  # backward asks for those of forward
            if len(self._rows) > 4 * self.chunks:
                self._rows.clear()
            indices = self._segments_of(queries, keys, relays)
            self._rows[asked] = whole_numbers(self._segments.row[indices], self._segments.tokens[indices])
        return self._rows[asked]

    def keys(self, queries: int, members: tuple[int, ...], relays: int = 1) -> Keys:
        """The rows that queries of a chunk see of several key chunks, as they lie behind each other; of their own chunk
        alone, which lies there as it is, all of them. Where it relays rows of some chunks (Gathering), all that it has.
        """
        wanted = Gathering(queries, members, relays)
        return self._keys[wanted] if wanted in self._keys else self._of([wanted])[wanted]

    def find(self, wanted: Iterable[Gathering]) -> None:
        """Find and keep `keys` of some queries and members, all at once, as that is faster."""
        self._keys.update(self._of([each for each in dict.fromkeys(wanted) if each not in self._keys]))

    def _of(self, wanted: Iterable[Gathering], *, ordered: bool = True) -> dict[Gathering, Keys]:
        """`keys` of each; unless `ordered` without the order of the rows, which takes as long to find as the rest."""
        keys_of = dict[Gathering, Keys]()
        seen, blocks = list[Gathering](), list[tuple[Runs, list[Runs]]]()
        for each in wanted:
            if not self._counts_of(each).any():
                # As of most where documents are short.
                keys_of[each] = Keys(np.zeros(0, np.int64), (0,) * len(each.members), ())
                continue
            start, tokens, counts = self._lying(each)
            lie = np.cumsum(tokens) - tokens
            by_position = np.argsort(start)
            order = whole_numbers(lie[by_position], tokens[by_position]) if ordered else lie[:0]
            keys_of[each] = Keys(order, tuple(counts), ())
            start, tokens = start[by_position], tokens[by_position]
            seen.append(each)
            blocks.append((self.query_runs[each.queries], [Runs(start, start + tokens)]))
        if blocks:
            for each, regions in zip(seen, regions_of_runs(self.pack, blocks), strict=True):
                keys_of[each] = keys_of[each]._replace(regions=regions)
        return keys_of

    def _counts_of(self, of: Gathering) -> np.ndarray:
        """How many rows a block's queries, or the neighbours that it relays for, see of each member: (members,)."""
        members = np.array(of.members)
        counts = self.counts[of.queries, members]
        if of.relays > 1:
            relayed = np.array([of.relays_for(member) > 1 for member in of.members])
            counts = np.where(relayed, self.counts_for(of.relays)[of.queries, members], counts)
        return counts

    def _lying(self, of: Gathering) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The runs of positions that a block has of its key chunks, all of one if it is its own, and how many positions
        of each chunk: (start, tokens, counts).
        """
        all_of_it, relays = of.members == (of.queries,), [of.relays_for(member) for member in of.members]
        if self.whole:
            members = list(of.members)
            start, tokens = self._neighbours[0][members], self._neighbours[1][members]
            if not all_of_it:
                seen = self._counts_of(of)[:, None]
                tokens = np.clip(seen - np.cumsum(tokens, axis=1) + tokens, 0, tokens)
            return start[tokens > 0], tokens[tokens > 0], tokens.sum(axis=1).tolist()
        each = [
            self._of_owner[keys] if all_of_it else self._segments_of(of.queries, keys, relay)
            for keys, relay in zip(of.members, relays, strict=True)
        ]
        indices = np.concatenate(each)
        counts = [int(self._segments.tokens[part].sum()) for part in each]
        return self._segments.start[indices], self._segments.tokens[indices], counts

    @cached_property
    def _neighbours(self) -> tuple[np.ndarray, np.ndarray]:
        """The runs of neighbouring keys of every chunk, filled up with empty ones: (start, tokens), (chunks, runs)."""
        chunk, start, stop = in_runs(self.key_runs)
        counts = np.bincount(chunk, minlength=self.chunks)
        place = chunk, np.arange(chunk.size) - np.repeat(np.cumsum(counts) - counts, counts)
        runs = np.zeros((2, self.chunks, int(counts.max())), np.int64)
        runs[0][place], runs[1][place] = start, stop - start
        return runs[0], runs[1]

    def works(self, queries: np.ndarray, members: np.ndarray, relays: int = 1) -> tuple[list[Works], np.ndarray]:
        """The different works of some blocks, forward and backward, and which of them each has.

        `queries` is the query chunk of each block, (blocks,), `members` its key chunks, (blocks, members).
        """
        pairs = zip(queries.tolist(), map(tuple, members.tolist()), strict=True)
        blocks = [Gathering(*pair, relays) for pair in pairs]
        codes = self._alike.codes(queries, members) if self._alike else None
        if codes is not None:
            _, first, of = np.unique(codes, axis=0, return_index=True, return_inverse=True)
            each = [self._kinds.setdefault(codes[i].tobytes(), blocks[i]) for i in first.tolist()]
            return self._works_of(each), of.ravel()
        return self._works_of(blocks), np.arange(len(blocks))

    def _works_of(self, blocks: Sequence[Gathering]) -> list[Works]:
        """The works of the regions of `keys`, which are found once."""
        unknown = [of for of in dict.fromkeys(blocks) if of not in self._works]
        keys_of = self._of([of for of in unknown if of not in self._keys], ordered=False) | self._keys
        self._works.update({of: works_in(keys_of[of].regions) for of in unknown})
        return [self._works[of] for of in blocks]

    @property
    def chunks(self) -> int:
        """How many chunks of queries there are, and of keys."""
        return self.of_queries.chunks

    @cached_property
    def _alike(self) -> Alike | None:
        return Alike(self.query_runs, self.key_runs, causal=self.pack.causal) if self.whole else None

    @cached_property
    def key_runs(self) -> list[Runs]:
        """The positions of every chunk's keys."""
        return runs_of_chunks(self.of_keys)

    @cached_property
    def query_runs(self) -> list[Runs]:
        """The positions of every chunk's queries among the keys."""
        each = runs_of_chunks(self.of_queries)
        if self.pack.new:
            each = [runs_of(self.pack.among_keys(self.of_queries.chunk_positions(i))) for i in range(self.chunks)]
        return [Runs(runs.start + self.ahead, runs.stop + self.ahead, runs.step) for runs in each]

    def _segments_of(self, queries: int, keys: int, relays: int) -> np.ndarray:
        indices = self._of_owner[keys]
        if self.without is not None and self.without[queries, keys]:
            return indices[:0]
        seen = self._seen[queries] if relays == 1 else self._for(relays)[0][queries // relays]
        return indices[seen[indices]]

    @cached_property
    def _of_owner(self) -> list[np.ndarray]:
        """The segments of each key chunk, ascending."""
        order = self._segments.by_owner
        return np.split(order, np.searchsorted(self._segments.owner[order], np.arange(1, self.chunks)))

    @cached_property
    def _intervals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The chunk of each run of queries, and the run of keys that they see: (chunk, first, stop)."""
        chunk, start, stop = in_runs(self.query_runs)
        return chunk, self.pack.sees(start)[0], self.pack.sees(stop - 1)[1]

    @cached_property
    def _segments(self) -> Segments:
        keys = self.of_keys.seqlen
        chunk, start, _ = in_runs(self.key_runs)
        _, first, last = self._intervals
        starts = np.sort(np.concatenate([start, first, last]), kind="stable")
        starts = starts[(np.diff(starts, prepend=-1) > 0) & (starts < keys)]
        tokens = np.diff(np.append(starts, keys))
        by_start = np.argsort(start, kind="stable")
        owner = chunk[by_start][np.searchsorted(start[by_start], starts, side="right") - 1]
        row, order = first_rows(owner, tokens)
        return Segments(starts, tokens, owner, row, order)

    @cached_property
    def _seen(self) -> np.ndarray:
        """Whether a query of each chunk sees a segment: (chunks, segments)."""
        (chunk, first, last), starts = self._intervals, self._segments.start
        ends = np.searchsorted(starts, first), np.searchsorted(starts, last)
        return covered(chunk, *ends, (self.chunks, starts.size))


@lru_cache(maxsize=32)  # each message of a plan asks
def casts(problem: Problem) -> Casts:
    """The rows that the chunks of a problem need of each other."""
    mask, keys = problem.mask, problem.keys.seqlen
    if not isinstance(mask, Packed):
        # Under a full mask there may be more queries than keys: all of them see these, wherever they are.
        whole = keys if mask == CAUSAL else max(keys, problem.seqlen)
        pack = Documents((whole,), causal=mask == CAUSAL)
        return _casts(pack, problem.queries, problem.keys, problem.history, whole=True)
    return _casts(mask, problem.queries, problem.keys, 0, whole=False)


@lru_cache(maxsize=32)
def _casts(pack: Packed, queries: Shards, keys: Shards, ahead: int, *, whole: bool) -> Casts:
    return Casts(pack, queries, keys, ahead, whole)


def rows_seen_elsewhere(problem: Problem, relays: int = 1) -> int:
    """Key rows that chunks see in other chunks, all together: what a group cast moves, for each head.

    With `relays` above 1, each row goes once to so many neighbours that don't have it, to the one with its place among
    them, which passes it on to those of the others that see it.
    """
    counts, chunks = casts(problem).counts, np.arange(problem.keys.chunks)
    if relays == 1:
        return int(counts.sum() - counts.trace())
    group, place = np.divmod(chunks, relays)
    across = casts(problem).counts_for(relays)[place == 0] * (np.unique(group)[:, None] != group)
    return int(across.sum() + (counts * (place[:, None] != place)).sum())
