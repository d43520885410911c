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

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, h heads, K = max(kv_heads, u) / h, with c
for the share of a group's keys that the queries of another see, in the mean:
    forward   (2 + 2K) (u - 1) / u for Q, KV and O, and 2K c (n / u - 1) of rows
    backward  (2 + 2K) (u - 1) / u for dO, dQ and dKV, and 4K c (n / u - 1) for rows of KV and dKV
c = 1 of a full mask; of a causal one 1/2 on the contiguous layout, 3/4 on zigzag. Of a history, which is dealt on its
own, all queries see all rows: c nears 1 with its length.

Layouts: balanced (packs), zigzag, contiguous, and all that deal documents. Refuses what USP does, and more stages than
there are other groups, or a `chunk` where no chunks are dealt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from sp_bench.methods.usp import USP
from sp_bench.plan import (
    DEALERS,
    DKV,
    DO,
    DQ,
    KV,
    OPEN_LAYOUTS,
    OUT,
    Attend,
    AttendBackward,
    Chunk,
    Dealt,
    Fold,
    Gathered,
    GroupCast,
    GroupReduce,
    Layout,
    Problem,
    Q,
    RequestError,
    Steps,
    Tensor,
    rows_seen_elsewhere,
)

STAGES = (1, 2, 4)
"""The values that `auto` of the option `stages` stands for."""
IN_CHUNKS = ("balanced", "blocks")
"""The layouts that deal chunks of equal size."""


@dataclass(frozen=True, kw_only=True)
class GroupCastAttention(USP):
    """MagiAttention's group cast of key rows, between groups of ranks that split the heads."""

    name: ClassVar[str] = "group_cast"
    colour: ClassVar[str] = "#1f4e5f"
    marker: ClassVar[str] = "$g$"
    citation: ClassVar[str] = "Tao and Huang 2025"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "zigzag")
    for_packs: ClassVar[str] = "balanced"
    counts_rows: ClassVar[bool] = True
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, u/h))*(u-1)/u + 2*max(k, u/h)*c*(n/u-1)",
        "backward": "(2 + 2*max(k, u/h))*(u-1)/u + 4*max(k, u/h)*c*(n/u-1)",
    }

    stages: Literal["auto"] | int = "auto"
    """In how many stages other ranks' rows come; auto stands for each of STAGES."""
    chunk: Literal["auto"] | int = "auto"
    """Tokens of a chunk that is dealt, at most; auto: the largest chunks that give all ranks even work."""

    @classmethod
    def dealings(cls) -> tuple[str, ...]:
        """Its layouts, and all that deal documents."""
        return (cls.for_packs, *cls.layouts, *(name for name in DEALERS if name != cls.for_packs))

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a `ulysses` that is not possible, more stages than there are other groups, a `chunk`
        where none are dealt.
        """
        super().refuse(problem)
        if self.chunk != "auto" and (problem.mask.sends_unseen or self.layout not in (*IN_CHUNKS, *OPEN_LAYOUTS)):
            rule = f"chunks of a pack are dealt by the layouts {' and '.join(IN_CHUNKS)} alone"
            raise RequestError(f"method.chunk={self.chunk}", rule, "method.chunk=auto would work")
        others = problem.n // (self.ulysses if isinstance(self.ulysses, int) else 1) - 1
        if isinstance(self.stages, int) and self.stages > max(others, 1):
            raise RequestError(
                f"method.stages={self.stages}",
                f"each stage has rows of another group of ranks, and there are {others}",
                f"method.stages={max(others, 1)} or less, or auto, would work",
            )

    def candidates(self, problem: Problem) -> tuple[GroupCastAttention, ...]:
        """One variant for each possible `ulysses` and number of stages, or for those given."""
        return tuple(
            replace(each, stages=stages)
            for each in super().candidates(problem)
            for stages in (STAGES if self.stages == "auto" else (self.stages,))
            if stages == 1 or stages < problem.n // each.size
        )

    def dealt_by(self, layout: Layout, n: int) -> Layout:
        """The layout with this variant's head-parallel degree and chunks."""
        layout = super().dealt_by(layout, n)
        if self.chunk == "auto" or not isinstance(layout, Dealt) or layout.name not in IN_CHUNKS:
            return layout
        return replace(layout, ranges=replace(layout.ranges, block_tokens=self.chunk))

    def variant(self, n: int) -> str:
        """The Ulysses degree, the groups and the stages, in words."""
        u = self.head_parallel(n)
        return f"ulysses {u} x cast {n // u}" + (f" in {self.stages}" if n > u and self.stages != "auto" else "")

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of u and c."""
        groups = problem.n // self.head_parallel(problem.n)
        return {**super().symbols(problem), "c": float(self._cast(problem)) / max(groups - 1, 1)}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas; a chunk of kv_h has max(kv_heads, u) heads."""
        u = self.head_parallel(problem.n)
        dealt, rows = Fraction(u - 1, u), self._cast(problem)
        if phase == "forward":
            return {Q: dealt, KV.by_heads: dealt + rows, OUT: dealt}
        return {DO: dealt, KV.by_heads: rows, DQ: dealt, DKV.by_heads: dealt + rows}

    def _cast(self, problem: Problem) -> Fraction:
        """The rows that a group receives, in chunks, in the mean over groups."""
        return Fraction(rows_seen_elsewhere(self.dealt(problem)), problem.keys.seqlen)

    def _attend(self, problem: Problem, steps: Steps, q_h: Chunk, kv_h: Chunk, o_h: Chunk) -> None:
        cast_rows(steps, q_h, kv_h, o_h, self._stages(kv_h))

    def _attend_backward(
        self, problem: Problem, steps: Steps, odoq_h: Chunk, kv_h: Chunk, dq_h: Chunk, dkv_h: Chunk
    ) -> None:
        cast_rows_backward(steps, odoq_h, kv_h, dq_h, dkv_h, self._stages(kv_h))

    def _stages(self, kv_h: Chunk) -> list[tuple[int, ...]]:
        """The members of each stage: the others in runs of nearly equal length."""
        others = kv_h.home.size - 1
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
