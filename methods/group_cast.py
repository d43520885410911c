"""Group cast: every rank keeps its Q and receives just the key rows that its queries see.

Source: MagiAttention (Tao and Huang, "MagiAttention: A Distributed Attention Towards Linear Scalability for
Ultra-Long Context, Heterogeneous Mask Training", 2025; github SandAI-org/MagiAttention). The sequence is cut into
chunks of equal size. Every rank gets as many; those with the largest area of the mask first, each goes to the rank with
the least area so far that has room (the layout `balanced`). A rank sends a row of its keys to each rank whose queries
see it, and to no other (group cast). Partial gradients of these rows come back to their owner, which adds them (group
reduce). The other ranks are taken in `stages`: while one stage's rows arrive, the rows of the stage before are computed
with, all of them at once; the first blocks are those of the rank's own keys, which need no transfer.

With `ulysses` above 1, u consecutive ranks split the heads of a chunk that they share, as in USP (methods/usp.py), and
rows are cast among the n / u groups. A row that ranks of a node need then crosses the network once for each head.

With `inner` above 1, that many neighbouring groups, such as those of a node, get a row that any of them needs once: it
goes to the one with the owner's place among its neighbours, which passes it on to the others that need it. Back, the
gradients of a row are added there, and cross once (MagiAttention's hierarchical group collectives).

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, h heads, K = max(kv_heads, u) / h, with c
for the share of a group's keys that are sent to another, in the mean, which are those that its queries see:
    forward   (2 + 2K) (u - 1) / u for Q, KV and O, and 2K c (n / u - 1) of rows
    backward  (2 + 2K) (u - 1) / u for dO, dQ and dKV, and 4K c (n / u - 1) for rows of KV and dKV
c = 1 of a full mask; of a causal one 1/2 on the contiguous layout, 3/4 on zigzag. Of a history, which is assigned on
its own, all queries see all rows: c nears 1 with its length.

With `inner`, those that go on inside are among them, and c is larger; what crosses nodes is less.

Layouts: balanced (packs), zigzag, contiguous, and all that assign documents. Refuses what USP does, and more stages
than there are other groups, a `chunk` where no chunks are assigned, or an `inner` that doesn't divide the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from sp_bench.methods.usp import USP
from sp_bench.plan import (
    ASSIGNMENTS,
    DKV,
    DO,
    DOWN,
    DQ,
    KV,
    OPEN_LAYOUTS,
    OUT,
    AssignedLayout,
    Attend,
    AttendBackward,
    Chunk,
    Fold,
    Gathered,
    Grid,
    Group,
    GroupCast,
    GroupReduce,
    Layout,
    Op,
    Problem,
    Q,
    RequestError,
    Steps,
    Tensor,
    divisors,
    rows_seen_elsewhere,
)

STAGES = (1, 2, 4)
"""The values that `auto` of the option `stages` stands for."""
NODE = 8
"""`auto` of the option `inner` stands for 1, and for the groups of this many ranks: most nodes have as many GPUs."""
IN_CHUNKS = ("balanced", "blocks")
"""The layouts that assign chunks of equal size."""


@dataclass(frozen=True, kw_only=True)
class GroupCastAttention(USP):
    """MagiAttention's group cast of key rows, between groups of ranks that split the heads."""

    name: ClassVar[str] = "group_cast"
    colour: ClassVar[str] = "#1f4e5f"
    marker: ClassVar[str] = "$g$"
    citation: ClassVar[str] = "Tao and Huang 2025"
    by_blocks: ClassVar[bool] = False
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "zigzag")
    for_packs: ClassVar[str] = "balanced"
    counts_rows: ClassVar[bool] = True
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, u/h))*(u-1)/u + 2*max(k, u/h)*c*(n/u-1)",
        "backward": "(2 + 2*max(k, u/h))*(u-1)/u + 4*max(k, u/h)*c*(n/u-1)",
    }

    stages: Literal["auto"] | int = "auto"
    """In how many stages other ranks' rows come; auto stands for each of STAGES."""
    inner: Literal["auto"] | int = "auto"
    """How many neighbouring groups get rows once between them and pass them on, as those of a node; 1: each gets its
    own. auto stands for 1 and for nodes of NODE ranks, the fastest."""
    chunk: Literal["auto"] | int = "auto"
    """Tokens of a chunk that is assigned, at most; auto: the largest chunks that give all ranks even work."""

    @classmethod
    def all_layouts(cls) -> tuple[str, ...]:
        """Its layouts, and all that assign documents."""
        return (cls.for_packs, *cls.layouts, *(name for name in ASSIGNMENTS if name != cls.for_packs))

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a `ulysses` that is not possible, more stages than there are other groups, a `chunk`
        where none are assigned, an `inner` that doesn't divide the groups.
        """
        super().refuse(problem)
        self._refuse_inner(problem)
        if self.chunk != "auto" and (problem.mask.sends_unseen or self.layout not in (*IN_CHUNKS, *OPEN_LAYOUTS)):
            rule = f"chunks of a pack are assigned by the layouts {' and '.join(IN_CHUNKS)} alone"
            raise RequestError(f"method.chunk={self.chunk}", rule, "method.chunk=auto would work")
        others = problem.n // (self.ulysses if isinstance(self.ulysses, int) else 1) // self._near - 1
        if isinstance(self.stages, int) and self.stages > max(others, 1):
            what = "another group of ranks" if self._near == 1 else f"other groups of ranks, {self._near} together"
            raise RequestError(
                f"method.stages={self.stages}",
                f"each stage has rows of {what}, and there are {others}",
                f"method.stages={max(others, 1)} or less, or auto, would work",
            )

    def _refuse_inner(self, problem: Problem) -> None:
        groups = problem.n // (self.ulysses if isinstance(self.ulysses, int) else 1)
        if isinstance(self.inner, int) and groups % self.inner:
            possible = ", ".join(map(str, divisors(groups)))
            rule = f"must divide the {groups} groups of ranks with the same heads"
            raise RequestError(f"method.inner={self.inner}", rule, f"one of {possible}, or auto, would work")

    def candidates(self, problem: Problem) -> tuple[GroupCastAttention, ...]:
        """One variant for each possible `ulysses`, `inner` and number of stages, or for those given; simpler ones
        first.
        """
        return tuple(
            replace(each, stages=stages, inner=inner)
            for each in super().candidates(problem)
            for inner in each._inner_sizes(problem.n // each.size)
            for stages in (STAGES if self.stages == "auto" else (self.stages,))
            if stages == 1 or stages < problem.n // each.size // inner
        )

    def _inner_sizes(self, groups: int) -> list[int]:
        """The values of `inner` that it stands for with this degree; none where the one given is not possible."""
        if isinstance(self.inner, int):
            return [self.inner] if groups % self.inner == 0 else []
        of_node = NODE // self.size
        return [1, of_node] if of_node > 1 and groups > of_node and groups % of_node == 0 else [1]

    def layout_for(self, layout: Layout, n: int) -> Layout:
        """The layout with this variant's head-parallel degree and chunks."""
        layout = super().layout_for(layout, n)
        if self.chunk == "auto" or not isinstance(layout, AssignedLayout) or layout.name not in IN_CHUNKS:
            return layout
        return replace(layout, ranges=replace(layout.ranges, block_tokens=self.chunk))

    def variant(self, n: int) -> str:
        """The Ulysses degree, the groups, the stages and the neighbours that get rows together, in words."""
        u = self.head_parallel(n)
        stages = f" in {self.stages}" if n > u and self.stages != "auto" else ""
        return f"ulysses {u} x cast {n // u}{stages}" + (f" by {self._near}s" if self._near > 1 else "")

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of u and c."""
        groups = problem.n // self.head_parallel(problem.n)
        return {**super().symbols(problem), "c": float(self._cast(problem)) / max(groups - 1, 1)}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas; a chunk of kv_h has max(kv_heads, u) heads."""
        u = self.head_parallel(problem.n)
        exchanged, rows = Fraction(u - 1, u), self._cast(problem)
        if phase == "forward":
            return {Q: exchanged, KV.by_heads: exchanged + rows, OUT: exchanged}
        return {DO: exchanged, KV.by_heads: rows, DQ: exchanged, DKV.by_heads: exchanged + rows}

    def _cast(self, problem: Problem) -> Fraction:
        """The rows that a group receives, in chunks, in the mean over groups."""
        return Fraction(rows_seen_elsewhere(self.assigned(problem), self._near), problem.keys.seqlen)

    @property
    def _near(self) -> int:
        return self.inner if isinstance(self.inner, int) else 1

    def _chunks(self, problem: Problem, *tensors: Tensor) -> tuple[Chunk, ...]:
        """The rank's own chunks. With `inner` their home is a Grid: the neighbours, and the ranks with its place."""
        chunks = super()._chunks(problem, *tensors)
        u, groups = self.head_parallel(problem.n), problem.n // self.head_parallel(problem.n)
        if self._near == 1:
            return chunks
        grid = Grid(Group(u, self._near, DOWN), Group(u * self._near, groups // self._near, DOWN))
        return tuple(chunk._replace(home=grid) for chunk in chunks)

    def _attend(self, problem: Problem, steps: Steps, q_h: Chunk, kv_h: Chunk, o_h: Chunk) -> None:
        attend = cast_rows if self._near == 1 else relay_rows
        attend(steps, q_h, kv_h, o_h, self._stages(problem))

    def _attend_backward(
        self, problem: Problem, steps: Steps, odoq_h: Chunk, kv_h: Chunk, dq_h: Chunk, dkv_h: Chunk
    ) -> None:
        attend = cast_rows_backward if self._near == 1 else relay_rows_backward
        attend(steps, odoq_h, kv_h, dq_h, dkv_h, self._stages(problem))

    def _stages(self, problem: Problem) -> list[tuple[int, ...]]:
        """The members of each stage: the others, or the other nodes, in runs of nearly equal length."""
        others = problem.n // self.head_parallel(problem.n) // self._near - 1
        count = min(self.stages if isinstance(self.stages, int) else 1, others)
        ends = [others * s // count for s in range(count + 1)] if count else []
        return [tuple(range(a + 1, b + 1)) for a, b in zip(ends, ends[1:], strict=False)]


def cast_rows(steps: Steps, q: Chunk, kv: Chunk, o: Chunk, stages: Sequence[tuple[int, ...]]) -> None:
    """Step s computes with the rows of stage s, the rank's own first, while those of stage s + 1 arrive."""
    each = [(0,), *stages]
    for s, members in enumerate(each):
        steps.next()
        if s < len(stages):
            steps.do(GroupCast("kv", kv, each[s + 1], q))
        steps.do(Gathered(tuple(Attend(q, kv.at(u), o) for u in members)))


def cast_rows_backward(
    steps: Steps, odoq: Chunk, kv: Chunk, dq: Chunk, dkv: Chunk, stages: Sequence[tuple[int, ...]]
) -> None:
    """As cast_rows; gradients of stage s go home while stage s + 1 is computed, and are added after it."""
    each, arrived = [(0,), *stages], list[Fold]()
    for s, members in enumerate(each):
        steps.next()
        if s < len(stages):
            steps.do(GroupCast("kv", kv, each[s + 1], odoq))
        steps.do(Gathered(tuple(AttendBackward(odoq, kv.at(u), dq, dkv.at(u)) for u in members)))
        if s:
            steps.do(*arrived[-1:], GroupReduce("dkv", dkv, members, odoq, s))
            arrived.append(Fold(dkv.arriving(s), dkv))
    if arrived:
        steps.next()
        steps.do(arrived[-1])


def relay_rows(steps: Steps, q: Chunk, kv: Chunk, o: Chunk, stages: Sequence[tuple[int, ...]]) -> None:
    """cast_rows in two levels: `stages` has other nodes by their distance, and the rank's own node comes before them.

    While step s computes, rows of step s + 1 are passed on inside the node, and those of step s + 2 cross.
    """
    relayed = _Relayed(kv, stages)
    for s, members in enumerate(relayed.members):
        steps.next()
        steps.do(*relayed.casts(s, kv, q), Gathered(tuple(Attend(q, kv.at(u), o) for u in members)))


def relay_rows_backward(
    steps: Steps, odoq: Chunk, kv: Chunk, dq: Chunk, dkv: Chunk, stages: Sequence[tuple[int, ...]]
) -> None:
    """As relay_rows; gradients are added in the node, a step later cross, and a step later are added to the rank's."""
    relayed, due = _Relayed(kv, stages), dict[int, list[Op]]()
    for s, members in enumerate(relayed.members):
        steps.next()
        blocks = Gathered(tuple(AttendBackward(odoq, kv.at(u), dq, dkv.at(u)) for u in members))
        steps.do(*relayed.casts(s, kv, odoq), blocks, *due.pop(s, ()))
        for own in relayed.owns[s]:
            sums = dkv.at(own)
            steps.do(GroupReduce("dkv", sums, relayed.beside(own), odoq))
            due.setdefault(s + 1, []).append(Fold(sums.arriving(), sums))
        if across := relayed.across[s]:
            due[s + 1].append(GroupReduce("outer dkv", dkv, across, odoq, s))
            due.setdefault(s + 2, []).append(Fold(dkv.arriving(s), dkv))
    for s in sorted(due):
        steps.next()
        steps.do(*due[s])


class _Relayed:
    """The members of each step, the rank's own first and then those of its node, and how their rows come."""

    def __init__(self, kv: Chunk, stages: Sequence[tuple[int, ...]]) -> None:
        assert isinstance(kv.home, Grid)
        self._size = size = kv.home.inner.size
        self.across = [(), (), *(tuple(size * away for away in stage) for stage in stages)]
        """By step, the chunks whose rows cross to this rank."""
        self.owns = [(), (0,), *self.across[2:]]
        """By step, the chunks of which it passes rows on to its neighbours."""
        self.members = [(0,), self.beside(0), *(self._with(across) for across in self.across[2:])]

    def beside(self, own: int) -> tuple[int, ...]:
        """The chunks whose rows come from neighbours, that these have as `own`."""
        return tuple(range(own + 1, own + self._size))

    def casts(self, s: int, kv: Chunk, queries: Chunk) -> list[GroupCast]:
        """The casts that begin with step s."""
        crossing, passed = (each[s + ahead : s + ahead + 1] for each, ahead in ((self.across, 2), (self.owns, 1)))
        crossing_casts = [GroupCast("outer kv", kv, members, queries) for members in crossing]
        return crossing_casts + [
            GroupCast("kv", kv.at(own), self.beside(own), queries) for owns in passed for own in owns
        ]

    def _with(self, across: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(u + place for u in across for place in range(self._size))
