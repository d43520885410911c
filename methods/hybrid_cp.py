"""Hybrid context parallelism: each document of a pack has a sub-group of ranks, as large as its length asks for.

Source: Megatron-LM (github NVIDIA/Megatron-LM, hybrid context parallelism, issues 2054 and 2282, and its schedule of
sub-samples, core/pipeline_parallel/hybrid_cp_schedule.py). A document of l tokens gets the smallest power of two of
ranks with at most `rank_tokens` tokens each. Sub-groups are neighbours, and documents are placed so that work balances
over the pack (the layout `hybrid`). Inside a sub-group it is Ring on zigzag: in step s of a sub-group of g, a rank
computes with the rows of the member s behind it. A rank is in sub-groups of several sizes, and takes their steps
together. Short documents stay on one rank, and send nothing.

Here rows come straight from their owner in each step, where a ring's neighbour would pass them on, and only those that
the receiver's queries see; so do their gradients return. A whole sequence is one document of all ranks.

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads, with c for the share
of a rank's keys that the queries of another see, in the mean:
    forward   2k c (n - 1)
    backward  2k c (n - 1) for KV and as much for dKV
c = 1 of a full mask, 3/4 of a causal one on zigzag. Of a pack c is small: each key goes round its own sub-group.

Layouts: hybrid (packs), zigzag, contiguous. Refuses `rank_tokens` where there are no sub-groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar, Literal

from sp_bench.methods.cast_steps import cast_rows, cast_rows_backward
from sp_bench.plan import (
    DKV,
    DOWN,
    DQ,
    KV,
    ODOQ,
    AssignedLayout,
    Chunk,
    CostProfile,
    Group,
    Layout,
    Method,
    O,
    Plan,
    Problem,
    Q,
    RequestError,
    Steps,
    Tensor,
    members_seen,
    rows_seen_elsewhere,
)


@dataclass(frozen=True, kw_only=True)
class HybridCP(Method):
    """Megatron's hybrid context parallelism."""

    name: ClassVar[str] = "hybrid_cp"
    colour: ClassVar[str] = "#8a9a2b"
    marker: ClassVar[str] = "$h$"
    citation: ClassVar[str] = "Megatron-LM 2025"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "zigzag")
    for_packs: ClassVar[str] = "hybrid"
    counts_rows: ClassVar[bool] = True
    plans_by_rows: ClassVar[bool] = True
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*k*c*(n-1)", "backward": "4*k*c*(n-1)"}

    rank_tokens: Literal["auto"] | int = "auto"
    """At most how many tokens of a document a rank has; auto: as many as leave all ranks even work."""

    @classmethod
    def all_layouts(cls) -> tuple[str, ...]:
        """Its layouts, and that of sub-groups."""
        return (cls.for_packs, *cls.layouts)

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for `rank_tokens` where there are no sub-groups."""
        if self.rank_tokens != "auto" and (problem.mask.sends_unseen or self.layout in self.layouts):
            rule = "is for sub-groups of a pack's documents, on the layout hybrid"
            raise RequestError(f"method.rank_tokens={self.rank_tokens}", rule, "method.rank_tokens=auto would work")

    def layout_for(self, layout: Layout, n: int) -> Layout:
        """The layout with sub-groups for so many tokens of each rank."""
        if self.rank_tokens == "auto" or not isinstance(layout, AssignedLayout):
            return layout
        return replace(layout, ranges=replace(layout.ranges, block_tokens=self.rank_tokens))

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The value of c."""
        return {"c": float(self._cast(problem)) / max(problem.n - 1, 1)}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The steps of all sub-groups together (cast_rows)."""
        q, kv, o = (Chunk(tensor, 0, Group(1, problem.n, DOWN)) for tensor in (Q, KV, O))
        steps = Steps()
        cast_rows(steps, q, kv, o, _rounds(problem, kv))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The same steps (cast_rows_backward)."""
        odoq, kv, dq, dkv = (Chunk(tensor, 0, Group(1, problem.n, DOWN)) for tensor in (ODOQ, KV, DQ, DKV))
        steps = Steps()
        cast_rows_backward(steps, odoq, kv, dq, dkv, _rounds(problem, kv))
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The rows of KV, and backward as many of dKV."""
        rows = self._cast(problem)
        return {KV: rows} if phase == "forward" else {KV: rows, DKV: rows}

    def _cast(self, problem: Problem) -> Fraction:
        """The rows that a rank receives, in chunks, in the mean over ranks."""
        return Fraction(rows_seen_elsewhere(self.assigned(problem)), problem.keys.seqlen)


def _rounds(problem: Problem, kv: Chunk) -> list[tuple[int, ...]]:
    """The members of each step: s behind in a sub-group is s lower, or size - s higher, of those that are seen."""
    n, left = problem.n, members_seen(problem, kv)
    sizes, rounds = [*(1 << power for power in range(1, n.bit_length())), n], list[tuple[int, ...]]()
    for s in range(1, n):
        members = {s, *((s - size) % n for size in sizes if size > s)} & left
        left -= members
        rounds += [tuple(sorted(members))] if members else []
    return rounds
