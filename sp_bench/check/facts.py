"""The facts that a plan is executed on: whose tokens each chunk holds on each rank, which rows, and which blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sp_bench.plan.groups import Exchange, Grid, Group
from sp_bench.plan.ops import Chunk, Op, Pairs, Pass, PlanError
from sp_bench.plan.pack_blocks import PackBlocks
from sp_bench.plan.problem import Problem
from sp_bench.plan.row_runs import Rows, cuts_rows
from sp_bench.plan.travel import travel

Ranks = np.ndarray


NOTHING = -1


class Where(NamedTuple):
    """An operation of a plan, which errors name in words. A plan has thousands, and few have errors."""

    number: int
    op: Op

    def __str__(self) -> str:
        return f"operation {self.number}, {self.op}"


class Cast(NamedTuple):
    """The way in which rows of a chunk came to a rank."""

    against: Chunk
    """The rank's own chunk that decided which rows."""
    pairs: Pairs

    def agrees(self, against: Chunk, pairs: Pairs) -> bool:
        """Whether rows came of these pairs of chunks, against the chunk of this place."""
        return self.against.place == against.place and self.pairs == pairs


@dataclass
class Facts:
    """The tensors that every rank holds at the current operation."""

    problem: Problem
    ranks: Ranks
    content: dict[Chunk, Ranks] = field(default_factory=dict)
    """The global index of the content of each chunk, by rank, NOTHING where it was not received: (n,)."""
    rows: dict[Chunk, Rows] = field(default_factory=dict)
    """The rows of each chunk that are present on each rank; for a partial, those with a block folded in.

    A chunk that is not a key has all its rows."""
    last: dict[Chunk, Where | str] = field(default_factory=dict)
    """The last operation that added to each partial."""
    kept: tuple[Chunk, ...] = ()
    """Chunks that the forward keeps for the backward."""
    leaves_out: bool = True
    """Whether any transfer leaves out rows that a block may read."""
    of_rows: dict[Chunk, Cast] = field(default_factory=dict)
    """The way in which rows came of a chunk that a GroupCast brought, or of its partial."""
    runs: dict[Chunk, Rows] = field(default_factory=dict)
    """The rows of each operand that are present on each rank, of chunks that came in part (plan.row_runs); of partials
    the rows to which anything was added, of all chunks."""
    cuts_rows: bool = field(init=False)
    """Whether a Pass may carry a run of a chunk's rows."""
    blocks: dict[Chunk, np.ndarray] = field(default_factory=dict)
    """The counterpart chunks folded into a partial on each rank: (n, n / 64), one bit each (times `parts`)."""
    owners: dict[tuple[Group | Grid, int], Ranks] = field(default_factory=dict)
    sources: dict[tuple[Group | Exchange, int], Ranks] = field(default_factory=dict)
    visible: np.ndarray = field(init=False)
    """Whether a block of each class has anything unmasked: (classes,)."""
    sees_all: bool = field(init=False)
    """Whether all of them have."""
    everyone: np.ndarray = field(init=False)
    """True for each rank: (n,)."""

    def __post_init__(self) -> None:
        self.cuts_rows = cuts_rows(self.problem)
        self.visible = np.asarray(self.problem.blocks.pairs) > 0
        self.sees_all, self.everyone = bool(self.visible.all()), np.ones(self.problem.n, bool)

    def owner(self, chunk: Chunk) -> Ranks:
        """The global index that the chunk's place gives it, by rank; the same array each time."""
        place = chunk.home, chunk.index
        if place not in self.owners:
            self.owners[place] = chunk.owner(self.ranks)
        return self.owners[place]

    def source(self, op: Pass) -> Ranks:
        """The rank from which each rank receives; the same array each time."""
        key = op.group, op.shift
        if key not in self.sources:
            self.sources[key] = op.source(self.ranks)
        return self.sources[key]

    def sees(self, q: Ranks, kv: Ranks) -> np.ndarray:
        """Whether each rank's block of these chunks has anything unmasked: (n,)."""
        if self.sees_all:
            return self.everyone
        return self.visible[self.problem.blocks.of(q, kv)]

    def computes(self, q: Ranks, kv: Ranks, pairs: Pairs, *, forward: bool) -> np.ndarray:
        """Ranks on which a block has anything unmasked, of pairs that its operation has to do with: (n,) of bool."""
        if pairs == "all":
            return self.sees(q, kv)
        degree = self.problem.layout.head_parallel
        travels = travel(self.problem, forward=forward).queries.travels[q // degree, kv // degree]
        return self.sees(q, kv) & (travels == (pairs == "queries"))

    @cached_property
    def _rows_seen(self) -> np.ndarray:
        return np.array([(rows.start, rows.stop) for rows in self.problem.blocks.rows_seen]).T

    def rows_seen(self, q: Ranks, kv: Ranks) -> Rows:
        """The queries that a block reads, from the first to the last."""
        return Rows(*self._rows_seen[:, self.problem.blocks.of(q, kv)])

    def run_read(self, q: Ranks, kv: Ranks, *, of_keys: bool) -> Rows:
        """The keys that a block reads, or the queries, from the first to the last."""
        blocks = self.problem.blocks
        assert isinstance(blocks, PackBlocks), "of other masks whole chunks come"
        return Rows(*(blocks.key_rows if of_keys else blocks.query_rows)[:, blocks.of(q, kv)])

    def partial(self, chunk: Chunk) -> np.ndarray:
        """The bit set of blocks in a partial, created empty on first use."""
        if chunk not in self.blocks:
            self.content[chunk] = self.owner(chunk)
            bits = self.problem.n * self.parts(chunk)
            self.blocks[chunk] = np.zeros((self.problem.n, -(-bits // 64)), np.uint64)
        return self.blocks[chunk]

    def rows_of(self, chunk: Chunk) -> Rows:
        """The present rows of a chunk (see `rows`)."""
        return self.rows.get(chunk) or self.all_rows(chunk)

    def all_rows(self, chunk: Chunk) -> Rows:
        """All rows of the layout chunks that hold the tokens of a chunk's content."""
        owner = self.content[chunk]
        tokens = self.problem.shards_of(chunk.tensor).chunk_tokens(owner // self.problem.layout.head_parallel)
        return Rows(np.zeros_like(owner), np.broadcast_to(tokens, owner.shape))

    def take_run(self, partial: Chunk) -> Rows:
        """The rows of a partial, which is sent on or folded, that have anything added to them: all of what a collective
        brought.
        """
        return self.runs.pop(partial, None) or self.whole_run(partial)

    def whole_run(self, chunk: Chunk) -> Rows:
        """All rows of a chunk that a Pass may carry some of."""
        tokens = self.problem.field_tokens(chunk.tensor.fields[0], self.owner(chunk))
        return Rows(np.zeros_like(self.ranks), np.broadcast_to(tokens, self.ranks.shape))

    def add_run(self, partial: Chunk, rows: Rows) -> None:
        """Record that these rows of a partial have something added to them."""
        self.runs[partial] = rows.around(self.runs[partial]) if partial in self.runs else rows

    def parts(self, partial: Chunk) -> int:
        """How many blocks a partial has with one counterpart: a key head's gradients have one for each query slice."""
        return self.problem.query_parts if partial.tensor.of_keys else 1

    def bit(self, counterpart: Ranks, parts: int, part: int) -> tuple[Ranks, np.ndarray]:
        """The word and the bit of a part of the block with each rank's counterpart."""
        degree = self.problem.layout.head_parallel
        place = counterpart if degree == parts == 1 else counterpart // degree * parts + part
        return place >> 6, np.uint64(1) << (place & 63).astype(np.uint64)


def check_slice(facts: Facts, where: Where | str, chunks: Sequence[Chunk]) -> None:
    """Chunks of queries must be of one head slice, and chunks of keys of the slice of key heads that it attends to."""
    problem, queries, keys = facts.problem, set[int](), set[int]()
    if problem.head_slices == 1 and not any(chunk.heads for chunk in chunks):
        return
    for chunk in chunks:
        (keys if chunk.tensor.of_keys else queries).add(chunk.heads)
    wanted = {slice_ // problem.query_parts for slice_ in queries} or keys
    exist = queries <= set(range(problem.head_slices)) and keys <= set(range(problem.key_slices))
    if len(queries) > 1 or len(wanted | keys) > 1 or not exist:
        raise PlanError(f"{where}: mixes slices of heads, or takes one beyond {problem.head_slices}")


def check_place(facts: Facts, chunk: Chunk, where: Where | str, there: np.ndarray | bool = True) -> None:
    """A chunk's content must be what the index map says, on the ranks that are to have it."""
    said, content = facts.owner(chunk), facts.content[chunk]
    if content is said:
        return
    rank = first_rank(there & (said != content))
    if rank is not None and content[rank] == NOTHING:
        raise PlanError(f"{where}: on rank {rank}, {chunk} is needed and was not sent there")
    if rank is not None:
        raise PlanError(f"{where}: on rank {rank}, {chunk} is global chunk {content[rank]} and should be {said[rank]}")
    if there is True:
        facts.content[chunk] = said  # the next look at it takes no time


def check_whole(facts: Facts, chunks: Iterable[Chunk], where: Where | str) -> None:
    """Only a Gathered block, or a GroupReduce, can read chunks of which only some rows are there."""
    if partial := [chunk for chunk in chunks if chunk in facts.of_rows]:
        against = facts.of_rows[partial[0]].against
        raise PlanError(f"{where}: of {partial[0]} only rows are there, cast against {against}")


def check_all_rows(facts: Facts, chunk: Chunk, where: Where | str) -> None:
    """Only a block, row sums and a Pass can read an operand that came as a run of rows."""
    if chunk in facts.runs and not chunk.tensor.is_partial:
        raise PlanError(f"{where}: of {chunk} only a run of rows is there")


def first_rank(wrong: np.ndarray | np.bool) -> int | None:
    """The lowest rank where `wrong` is true; None if there is none."""
    return int(wrong.argmax()) if wrong.any() else None
