"""Casts: which rows of a key chunk the queries of another chunk see, and what is computed with them.

A GroupCast moves just these rows. The rows that a rank gets from several others lie behind each other, in the order of
the operation's members. A Gathered block reads them in the order of their positions: there a query sees one run of
neighbouring keys, whoever sent them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from sp_bench.plan.alike import Alike
from sp_bench.plan.block_classes import block_classes
from sp_bench.plan.documents import Documents, Packed
from sp_bench.plan.groups import Group
from sp_bench.plan.intervals import Runs, Sizes, regions_of_runs, runs_of, sizes_of
from sp_bench.plan.layout import Shards
from sp_bench.plan.mask import CAUSAL
from sp_bench.plan.ops import Block, Chunk, Gathered, GroupCast, GroupReduce, Plan, RowCollective
from sp_bench.plan.pack_blocks import runs_of_chunks
from sp_bench.plan.problem import Problem
from sp_bench.plan.regions import Regions, by_keys, rows_in


class Segments(NamedTuple):
    """Runs of positions that one chunk owns and that a chunk's queries see all or none of. (segments,) each."""

    start: np.ndarray
    """The first position."""
    tokens: np.ndarray
    owner: np.ndarray
    """The chunk that owns each segment."""
    row: np.ndarray
    """The first position as a row of its chunk."""


class Keys(NamedTuple):
    """The key rows of a Gathered block on one rank."""

    order: np.ndarray
    """Their order by position: place in it -> place among the rows as they lie, member by member. (keys,)"""
    counts: tuple[int, ...]
    """How many rows there are of each key chunk."""
    regions: Regions
    """The regions that the rank's queries see, with keys by their place in the order."""


class Work(NamedTuple):
    """The work of a Gathered block on one rank."""

    sizes: Sizes
    """Sizes of the regions that its kernels take."""
    q_rows: int
    """How many queries see a key."""
    kv_rows: int
    """How many keys a query sees."""


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
    _keys: dict[tuple[int, tuple[int, ...]], Keys] = field(default_factory=dict, init=False, repr=False)
    _works: dict[tuple[int, tuple[int, ...]], tuple[Work, Work]] = field(default_factory=dict, init=False, repr=False)

    _kinds: dict[bytes, tuple[int, tuple[int, ...]]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def counts(self) -> np.ndarray:
        """Rows of each key chunk that queries of each chunk see: (chunks, chunks), by query and key chunk."""
        if self._alike:
            return self._alike.seen(np.arange(self.chunks)[:, None], np.arange(self.chunks)[None])
        found, there = np.zeros((self.chunks, self.chunks), np.int64), self._segments
        order = np.argsort(there.owner, kind="stable")
        first = np.flatnonzero(np.diff(there.owner[order], prepend=-1))
        seen = self._seen[:, order] * there.tokens[order]
        found[:, there.owner[order][first]] = np.add.reduceat(seen, first, axis=1)
        return found

    def rows(self, queries: int, keys: int) -> np.ndarray:
        """The rows of one key chunk that queries of a chunk see, ascending."""
        if self.whole:
            return np.arange(self.counts[queries, keys])
        here = self._segments_of(queries, keys)
        return _runs(self._segments.row[here], self._segments.tokens[here])

    def keys(self, queries: int, members: tuple[int, ...]) -> Keys:
        """The rows that queries of a chunk see of several key chunks, as they lie behind each other; of their own chunk
        alone, which lies there as it is, all of them.
        """
        wanted = queries, members
        return self._keys[wanted] if wanted in self._keys else self._of([wanted])[wanted]

    def find(self, wanted: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Find and keep `keys` of some queries and members, all at once, as that is faster."""
        self._keys.update(self._of([each for each in dict.fromkeys(wanted) if each not in self._keys]))

    def _of(self, wanted: Iterable[tuple[int, tuple[int, ...]]]) -> dict[tuple[int, tuple[int, ...]], Keys]:
        found = dict[tuple[int, tuple[int, ...]], Keys]()
        seen, blocks = list[tuple[int, tuple[int, ...]]](), list[tuple[Runs, list[Runs]]]()
        for queries, members in wanted:
            if not self.counts[queries, [*members]].any():  # as of most members where documents are short
                found[queries, members] = Keys(np.zeros(0, np.int64), (0,) * len(members), ())
                continue
            own = members == (queries,)
            lying = [self._lying(queries, member, all_of_it=own) for member in members]
            start, tokens = (np.concatenate(each) for each in zip(*lying, strict=True))
            lie = np.cumsum(tokens) - tokens
            by_position = np.argsort(start)
            start, tokens, lie = start[by_position], tokens[by_position], lie[by_position]
            counts = tuple(int(tokens.sum()) for _, tokens in lying)
            found[queries, members] = Keys(_runs(lie, tokens), counts, ())
            seen.append((queries, members))
            blocks.append((self._queries[queries], [Runs(start, start + tokens)]))
        if blocks:
            for each, regions in zip(seen, regions_of_runs(self.pack, blocks), strict=True):
                found[each] = found[each]._replace(regions=regions)
        return found

    def _lying(self, queries: int, keys: int, *, all_of_it: bool) -> tuple[np.ndarray, np.ndarray]:
        """The runs of positions that queries of a chunk see of a key chunk, or all of it: (start, tokens)."""
        if self.whole:
            _, start, stop = _in_runs([self._of_keys[keys]])
            tokens = stop - start
            if not all_of_it:
                tokens = np.clip(self.counts[queries, keys] - np.cumsum(tokens) + tokens, 0, tokens)
            return start[tokens > 0], tokens[tokens > 0]
        there = self._segments
        here = np.flatnonzero(there.owner == queries) if all_of_it else self._segments_of(queries, keys)
        return there.start[here], there.tokens[here]

    def works(self, queries: np.ndarray, members: np.ndarray, *, forward: bool) -> tuple[list[Work], np.ndarray]:
        """The different works of some blocks, and which of them each has.

        `queries` is the query chunk of each block, (blocks,), `members` its key chunks, (blocks, members).
        """
        blocks = [*zip(queries.tolist(), map(tuple, members.tolist()), strict=True)]
        codes = self._alike.codes(queries, members) if self._alike else None
        if codes is not None:
            _, first, of = np.unique(codes, axis=0, return_index=True, return_inverse=True)
            each = [self._kinds.setdefault(codes[i].tobytes(), blocks[i]) for i in first.tolist()]
            return [self.work(*block, forward=forward) for block in each], of.ravel()
        return [self.work(*block, forward=forward) for block in blocks], np.arange(len(blocks))

    def work(self, queries: int, members: tuple[int, ...], *, forward: bool) -> Work:
        """The work of the regions of `keys`, backward of those cut along keys. It is found once."""
        if (queries, members) not in self._works:
            regions = self.keys(queries, members).regions
            rows = rows_in(region.q for region in regions), rows_in(region.kv for region in regions)
            self._works[queries, members] = Work(sizes_of(regions), *rows), Work(sizes_of(by_keys(regions)), *rows)
        return self._works[queries, members][not forward]

    @property
    def chunks(self) -> int:
        """How many chunks of queries there are, and of keys."""
        return self.of_queries.chunks

    @cached_property
    def _alike(self) -> Alike | None:
        return Alike(self._queries, self._of_keys, causal=self.pack.causal) if self.whole else None

    @cached_property
    def _of_keys(self) -> list[Runs]:
        """The positions of every chunk's keys."""
        return runs_of_chunks(self.of_keys)

    @cached_property
    def _queries(self) -> list[Runs]:
        """The positions of every chunk's queries among the keys."""
        each = runs_of_chunks(self.of_queries)
        if self.pack.new:
            each = [runs_of(self.pack.among_keys(self.of_queries.chunk_positions(i))) for i in range(self.chunks)]
        return [Runs(runs.start + self.ahead, runs.stop + self.ahead, runs.step) for runs in each]

    def _segments_of(self, queries: int, keys: int) -> np.ndarray:
        return np.flatnonzero(self._seen[queries] & (self._segments.owner == keys))

    @cached_property
    def _intervals(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The chunk of each run of queries, and the run of keys that they see: (chunk, first, stop)."""
        chunk, start, stop = _in_runs(self._queries)
        return chunk, self.pack.sees(start)[0], self.pack.sees(stop - 1)[1]

    @cached_property
    def _segments(self) -> Segments:
        keys = self.of_keys.seqlen
        chunk, start, _ = _in_runs(self._of_keys)
        _, first, last = self._intervals
        starts = np.unique(np.concatenate([start, first, last]))
        starts = starts[starts < keys]
        tokens = np.diff(np.append(starts, keys))
        by_start = np.argsort(start)
        owner = chunk[by_start][np.searchsorted(start[by_start], starts, side="right") - 1]
        order = np.argsort(owner, kind="stable")
        before = np.cumsum(tokens[order]) - tokens[order]
        row = np.empty_like(before)
        begins = np.flatnonzero(np.diff(owner[order], prepend=-1))
        row[order] = before - np.repeat(before[begins], np.diff(np.append(begins, order.size)))
        return Segments(starts, tokens, owner, row)

    @cached_property
    def _seen(self) -> np.ndarray:
        """Whether a query of each chunk sees a segment: (chunks, segments)."""
        chunk, first, last = self._intervals
        starts = self._segments.start
        change = np.zeros((self.chunks, starts.size + 1), np.int32)
        np.add.at(change, (chunk, np.searchsorted(starts, first)), 1)
        np.add.at(change, (chunk, np.searchsorted(starts, last)), -1)
        return change[:, :-1].cumsum(axis=1) > 0


def _in_runs(chunks: Sequence[Runs]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each run of neighbouring positions of some chunks: (chunk, start, stop), (runs,) each."""
    near = [runs if runs.step == 1 else _each_alone(runs) for runs in chunks]
    chunk = np.repeat(np.arange(len(near)), [runs.start.size for runs in near])
    return chunk, np.concatenate([runs.start for runs in near]), np.concatenate([runs.stop for runs in near])


def _each_alone(runs: Runs) -> Runs:
    ends = zip(runs.start.tolist(), runs.stop.tolist(), strict=True)
    positions = np.concatenate([np.arange(start, stop, runs.step) for start, stop in ends])
    return Runs(positions, positions + 1)


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


def rows_seen_elsewhere(problem: Problem) -> int:
    """Key rows that chunks see in other chunks, all together: what a group cast moves, for each head."""
    counts = casts(problem).counts
    return int(counts.sum() - counts.trace())


def members_seen(problem: Problem, own: Chunk) -> set[int]:
    """The chunks #u, other than its own, of which queries of any rank see rows."""
    ranks, degree, counts = np.arange(problem.n), problem.layout.head_parallel, casts(problem).counts
    others = range(1, own.home.size)
    return {u for u in others if counts[ranks // degree, own.home.member(ranks, u) // degree].any()}


def rows_moved(op: RowCollective, problem: Problem, rank, member: int):
    """How many rows one or an array of ranks sends in the message that has to do with the member #u.

    In a GroupCast that goes to the rank whose #u it is itself, in a GroupReduce to the owner of #u.
    """
    return rows_from(op, problem, rank if isinstance(op, GroupReduce) else op.group.member(rank, -member), member)


def rows_from(op: RowCollective, problem: Problem, rank, member: int):
    """How many rows of the member #u one or an array of ranks has."""
    degree = problem.layout.head_parallel
    return casts(problem).counts[rank // degree, op.group.member(rank, member) // degree]


def rows_to(op: RowCollective, problem: Problem, rank: int, member: int) -> np.ndarray:
    """The rows of its own chunk that the rank whose #u it is has."""
    degree = problem.layout.head_parallel
    return casts(problem).rows(int(op.group.member(rank, -member)) // degree, rank // degree)


def rows_held(op: RowCollective, problem: Problem, rank):
    """How many rows one or an array of ranks has of the chunks of all members."""
    return sum(rows_from(op, problem, rank, u) for u in op.members)


def rows_owned(op: RowCollective, problem: Problem, rank):
    """How many rows of its own chunk the members have of one or an array of ranks, all together."""
    return sum(rows_from(op, problem, op.group.member(rank, -u), u) for u in op.members)


def most_rows(op: RowCollective, problem: Problem, *, sent: bool) -> int:
    """How many rows the rank with most of them sends, or receives."""
    held = sent == isinstance(op, GroupReduce)
    return _most_rows(casts(problem), op.group, op.members, problem.n, problem.layout.head_parallel, held)


@lru_cache(maxsize=1024)  # casts and reductions of both phases have the same
def _most_rows(found: Casts, group: Group, members: tuple[int, ...], n: int, degree: int, held: bool) -> int:
    ranks = np.arange(n)
    # Rows that a rank holds are those of each member; those that it owns, each member's whose #u it is.
    pairs = [(ranks, group.member(ranks, u)) if held else (group.member(ranks, -u), ranks) for u in members]
    rows = (found.counts[queries // degree, keys // degree] for queries, keys in pairs)
    return int(sum(rows, np.zeros(n, int)).max())


def keys_of(op: Gathered, problem: Problem, rank: int) -> Keys:
    """The key rows of a Gathered block on one rank, and its regions as its kernels take them."""
    keys = _keys(casts(problem), *_chunks(op, problem, rank))
    return keys if op.forward else keys._replace(regions=tuple(by_keys(keys.regions)))


@lru_cache(maxsize=64)
def _keys(found: Casts, queries: int, members: tuple[int, ...]) -> Keys:
    return found.keys(queries, members)  # forward and backward have the same


def find_regions(plan: Plan, problem: Problem, rank: int) -> None:
    """Have the regions found of all blocks that a rank computes: at once, as that is faster."""
    if not problem.mask.in_pieces:
        return
    table, alone = block_classes(plan, problem), list[int]()
    gathered = list[Gathered]()
    for index, op in plan:
        if isinstance(op, Gathered):
            gathered.append(op)
        elif isinstance(op, Block):
            alone += range(table.first[index], table.first[index] + len(op.blocks))
    problem.blocks.find(np.unique(table.of[alone, rank]))
    if gathered:
        casts(problem).find(_chunks(op, problem, rank) for op in gathered)


def works_of(op: Gathered, problem: Problem) -> tuple[list[Work], np.ndarray]:
    """The different works of a Gathered block, and which of them each rank has: (ranks,)."""
    degree = problem.layout.head_parallel
    firsts = np.arange(0, problem.n, degree)  # the ranks that split a chunk's heads have the same
    queries = op.queries[0].owner(firsts) // degree
    members = np.stack([chunk.owner(firsts) // degree for chunk in op.keys], axis=1)
    works, of = casts(problem).works(queries, members, forward=op.forward)
    return works, np.repeat(of, degree)


def is_one_call(work: Work) -> bool:
    """Whether one call of a kernel for variable lengths takes all of it, without copies of keys for several pieces."""
    kind, _, kv_tokens, _ = work.sizes
    return np.unique(kind).size < 2 and kv_tokens.sum() == work.kv_rows


def rows_read(op: Gathered, problem: Problem, ranks: np.ndarray) -> np.ndarray:
    """How many key rows a Gathered block reads on each of the ranks: (ranks,)."""
    degree, counts = problem.layout.head_parallel, casts(problem).counts
    queries = op.queries[0].owner(ranks) // degree
    return sum((counts[queries, chunk.owner(ranks) // degree] for chunk in op.keys), np.zeros(ranks.size, np.int64))


def _chunks(op: Gathered, problem: Problem, rank: int) -> tuple[int, tuple[int, ...]]:
    """The query chunk and the key chunks of a Gathered block."""
    degree = problem.layout.head_parallel
    members = tuple(int(chunk.owner(rank)) // degree for chunk in op.keys)
    return int(op.queries[0].owner(rank)) // degree, members


def received(op: RowCollective, problem: Problem, rank):
    """How many rows one or an array of ranks receives in all."""
    return rows_held(op, problem, rank) if isinstance(op, GroupCast) else rows_owned(op, problem, rank)


def sent(op: RowCollective, problem: Problem, rank):
    """How many rows one or an array of ranks sends in all."""
    return rows_owned(op, problem, rank) if isinstance(op, GroupCast) else rows_held(op, problem, rank)


def _runs(start: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The whole numbers of runs, one run behind the other."""
    ends = np.cumsum(tokens)
    return np.repeat(start - (ends - tokens), tokens) + np.arange(int(tokens.sum()))
