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

With `slices` above 1, heads are exchanged, attended to and returned in so many slices, one after another: the
all-to-alls of one go on while another is computed, as in UPipe (methods/upipe.py). Slices of query heads that have the
same key head take each stage's rows in turn; backward the first slice meets the rank's own keys before any rows, and
the others after all rows, so that neither the first cast nor the last reduction is waited for. It sends as much.

With `qo_comm` (MagiAttention's word) the queries of some pairs of chunks go to the keys instead, where that sends less
and leaves the work even (sp_bench/plan/travel.py), and their outputs come back. With t for the share of a group's
queries that go to another, in the mean, c is that of the other pairs' keys, and both differ by phase (cb, tb backward):
    forward   2 t (n / u - 1) more for rows of Q and O
    backward  3 tb (n / u - 1) more for rows of Q, dO and dQ

Layouts: balanced (packs), zigzag, contiguous, and all that assign documents. Refuses what USP does, and more stages
than there are other groups, a `chunk` where no chunks are assigned, an `inner` that doesn't divide the groups, or
`qo_comm` with an `inner` or with keys that blocks make of latents. `slices` must divide the heads of a rank, and are
for rows that come straight from their owner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import ClassVar, Literal

from sp_bench.methods.cast_steps import (
    cast_rows,
    cast_rows_backward,
    cast_slices,
    cast_slices_backward,
    relay_rows,
    relay_rows_backward,
    trade_rows,
    trade_rows_backward,
)
from sp_bench.methods.ulysses import LANE
from sp_bench.methods.upipe import of_tokens
from sp_bench.methods.usp import USP
from sp_bench.plan import (
    ASSIGNMENTS,
    DKV,
    DO,
    DOQ,
    DOWN,
    DQ,
    KV,
    ODOQ,
    OPEN_LAYOUTS,
    OUT,
    AllToAll,
    AssignedLayout,
    Bundle,
    Chunk,
    CostProfile,
    Grid,
    Group,
    Layout,
    O,
    Op,
    Plan,
    Problem,
    Q,
    RequestError,
    Steps,
    Tensor,
    divisors,
    impossible,
    key_rows_elsewhere,
    queries_are_cheap,
    query_rows_elsewhere,
    rows_seen_elsewhere,
)

PHASES = ("forward", "backward")
STAGES = (1, 2, 4)
"""The values that `auto` of the option `stages` stands for, where all heads are in one slice."""
SLICED_STAGES = (1, 2, 3)
"""The same for several slices: a stage has kernel calls for each of them."""
SLICES = (1, 2)
"""The values that `auto` of the option `slices` stands for."""
KEYS_LANE = f"{LANE} of keys"
"""The lane of keys that all slices have, so that they are packed and unpacked while queries are exchanged, and the
other way round."""
NODE = 8
"""The ranks of a node where the cluster is unknown: most nodes have as many GPUs."""
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
        "forward": "(2 + 2*max(k, u/h))*(u-1)/u + 2*max(k, u/h)*c*(n/u-1) + 2*t*(n/u-1)",
        "backward": "(2 + 2*max(k, u/h))*(u-1)/u + 4*max(k, u/h)*cb*(n/u-1) + 3*tb*(n/u-1)",
    }

    stages: Literal["auto"] | int = "auto"
    """In how many stages other ranks' rows come; auto stands for each of STAGES, or of SLICED_STAGES."""
    inner: Literal["auto"] | int = "auto"
    """How many neighbouring groups get rows once between them and pass them on, as those of a node; 1: each gets its
    own. auto stands for 1 and for the ranks of a node, NODE where the cluster is unknown: the fastest."""
    slices: Literal["auto"] | int = "auto"
    """In how many slices heads are exchanged, attended to and returned, so that all-to-alls of one go on while another
    is computed. auto stands for each of SLICES that divides the heads of a rank, the fastest."""
    qo_comm: Literal["auto"] | bool = "auto"
    """Whether queries travel to the keys where that sends less and leaves the work even. auto stands for both, the
    fastest, on packs where a row of queries takes no more bytes than one of keys; else for false."""
    chunk: Literal["auto"] | int = "auto"
    """Tokens of a chunk that is assigned, at most; auto: the largest chunks that give all ranks even work."""

    @classmethod
    def all_layouts(cls) -> tuple[str, ...]:
        """Its layouts, and all that assign documents."""
        return (cls.for_packs, *cls.layouts, *(name for name in ASSIGNMENTS if name != cls.for_packs))

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError for a `ulysses` that is not possible, more stages than there are other groups, a `chunk`
        where none are assigned, an `inner` that doesn't divide the groups, or `qo_comm` where it isn't possible.
        """
        super().refuse(problem)
        self._refuse_inner(problem)
        self._refuse_slices(problem)
        if self.qo_comm is True and (self._near > 1 or problem.latent_dim):
            rule = "queries and keys come straight from their owner, as they are"
            raise RequestError(
                "method.qo_comm=true",
                f"{rule}, and not by way of neighbours" if self._near > 1 else f"{rule}, and not as latents",
                "method.inner=1 would work" if self._near > 1 else "method.qo_comm=false would work",
            )
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

    def _refuse_slices(self, problem: Problem) -> None:
        if self.head_slices(problem) == 1:
            return
        if self._near > 1 or self._trades:
            rule = "slices of the heads are for rows of keys that come straight from their owner"
            other = "method.inner=1" if self._near > 1 else "method.qo_comm=false"
            raise RequestError(f"method.slices={self.slices}", rule, f"{other} would work")
        sizes = [self.ulysses] if isinstance(self.ulysses, int) else self.sizes(problem)
        degrees = [replace(self, ulysses=size) for size in sizes]
        possible = sorted({s for each in degrees for s in divisors(each._heads_of_a_rank(problem)[0])})
        if self.slices not in possible:
            rule = "must divide the heads of a rank"
            raise impossible(f"method.slices={self.slices}", rule, possible, ", or auto,")

    def _refuse_inner(self, problem: Problem) -> None:
        groups = problem.n // (self.ulysses if isinstance(self.ulysses, int) else 1)
        if isinstance(self.inner, int) and groups % self.inner:
            rule = f"must divide the {groups} groups of ranks with the same heads"
            raise impossible(f"method.inner={self.inner}", rule, divisors(groups), ", or auto,")

    def candidates(self, problem: Problem) -> tuple[GroupCastAttention, ...]:
        """One variant for each possible `ulysses`, `inner` and number of stages, or for those given; simpler ones
        first.
        """
        return self.on_nodes(problem, NODE)

    def on_nodes(self, problem: Problem, gpus_per_node: int) -> tuple[GroupCastAttention, ...]:
        """`candidates`, on nodes of so many GPUs."""
        return tuple(
            replace(each, stages=stages, inner=inner, qo_comm=qo_comm, slices=slices)
            for each in super().candidates(problem)
            for inner in each._inner_sizes(problem.n // each.size, gpus_per_node)
            for qo_comm in each._ways(problem, inner)
            for slices in each._slices(problem, straight=inner == 1 and not qo_comm)
            for stages in each._stage_counts(slices)
            if stages == 1 or stages < problem.n // each.size // inner
        )

    def _slices(self, problem: Problem, *, straight: bool) -> tuple[int, ...]:
        """The values of `slices` that it stands for, with this degree: 1 alone unless rows come `straight`; none where
        the one given is not possible.
        """
        asked = (self.slices,) if isinstance(self.slices, int) else SLICES[: 1 if self.size == 1 else None]
        heads = self._heads_of_a_rank(problem)[0] if straight else 1
        return tuple(slices for slices in asked if heads % slices == 0)

    @property
    def sends_as(self) -> GroupCastAttention:
        """That of one stage: stages only say when rows come."""
        return replace(self, stages=1)

    def _stage_counts(self, slices: int) -> tuple[int, ...]:
        """The values of `stages` that it stands for, with so many slices."""
        if isinstance(self.stages, int):
            return (self.stages,)
        return STAGES if slices == 1 else SLICED_STAGES

    def _heads_of_a_rank(self, problem: Problem) -> tuple[int, int]:
        """Query heads and key heads that a rank has of each chunk, with those of zeros."""
        padded, degree = self.padded(problem), self.head_parallel(problem.n)
        heads, kv_heads = (padded.heads, padded.kv_heads) if padded else (problem.heads, problem.kv_heads)
        return heads // degree, max(kv_heads // degree, 1)

    def head_slices(self, problem: Problem) -> int:
        """The number of slices."""
        return self.slices if isinstance(self.slices, int) else 1

    def query_parts(self, problem: Problem) -> int:
        """How many slices in a row have the same key heads."""
        slices = self.head_slices(problem)
        return slices // math.gcd(slices, self._heads_of_a_rank(problem)[1])

    def _inner_sizes(self, groups: int, gpus_per_node: int) -> list[int]:
        """The values of `inner` that it stands for with this degree; none where the one given is not possible."""
        if isinstance(self.inner, int):
            return [self.inner] if groups % self.inner == 0 else []
        of_node = 1 if gpus_per_node % self.size else gpus_per_node // self.size
        two_levels = of_node > 1 and groups > of_node and groups % of_node == 0 and self.qo_comm is not True
        return [1, of_node] if two_levels else [1]

    def _ways(self, problem: Problem, inner: int) -> tuple[bool, ...]:
        """The values of `qo_comm` that it stands for, with this degree and `inner`."""
        if isinstance(self.qo_comm, bool):
            return (self.qo_comm,)
        alone = inner > 1 or problem.n == self.size or problem.mask.sends_unseen or problem.latent_dim
        return (False,) if alone or not queries_are_cheap(self.assigned(problem)) else (False, True)

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
        stages += f" x {self.slices} slices" if isinstance(self.slices, int) and self.slices > 1 else ""
        more = f" by {self._near}s" if self._near > 1 else " with queries" if self._trades else ""
        return f"ulysses {u} x cast {n // u}{stages}{more}"

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of u, c and t, and of cb and tb."""
        others = max(problem.n // self.head_parallel(problem.n) - 1, 1)
        shares = ((keys / others, queries / others) for keys, queries in map(partial(self._cast, problem), PHASES))
        (c, t), (cb, tb) = (map(float, each) for each in shares)
        return {**super().symbols(problem), "c": c, "t": t, "cb": cb, "tb": tb}

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[Tensor, float | Fraction]:
        """The header's formulas; a chunk of kv_h has max(kv_heads, u) heads."""
        u = self.head_parallel(problem.n)
        exchanged, (rows, queries) = Fraction(u - 1, u), self._cast(problem, phase)
        if phase == "forward":
            traded = {Q.by_heads: queries, O.by_heads: queries}
            sent = {Q: exchanged, KV.by_heads: exchanged + rows, OUT: exchanged, **traded}
        else:
            traded = {DOQ.by_heads: queries, DQ.by_heads: queries}
            sent = {DO: exchanged, KV.by_heads: rows, DQ: exchanged, DKV.by_heads: exchanged + rows, **traded}
        return {tensor: problem.slices_of(tensor) * chunks for tensor, chunks in sent.items()}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """USP's, or one of slices of the heads."""
        if problem.head_slices == 1:
            return super().forward(problem, costs)
        q, kv, out = (of_tokens(problem, tensor) for tensor in (Q, KV, OUT))
        q_h, kv_h, o_h = (self._sliced(problem, tensor) for tensor in (Q.by_heads, KV.by_heads, O.by_heads))

        def bring(i: int) -> list[Op]:
            keys, part = divmod(i, problem.query_parts)
            of_keys = [] if part else [self._exchange(problem, kv[keys], kv_h[keys])]
            return [*of_keys, self._exchange(problem, q[i], q_h[i])]

        steps = Steps()
        cast_slices(
            steps, q_h, kv_h, o_h, self._stages(problem), bring,
            lambda i: [self._exchange(problem, o_h[i], out[i])],
        )  # fmt: skip
        return steps.plan("forward", problem.n, (*q, *kv), tuple(out), kept=(*q_h, *kv_h, *o_h))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """USP's, or one of slices of the heads."""
        if problem.head_slices == 1:
            return super().backward(problem, costs)
        do, dq, dkv = (of_tokens(problem, tensor) for tensor in (DO, DQ, DKV))
        q_h, o_h, do_h, odoq_h = (self._sliced(problem, t.by_heads) for t in (Q, O, DO, ODOQ))
        kv_h, dq_h, dkv_h = (self._sliced(problem, t.by_heads) for t in (KV, DQ, DKV))

        def bring(i: int) -> list[Op]:
            return [self._exchange(problem, do[i], do_h[i]), Bundle((q_h[i], o_h[i], do_h[i]), odoq_h[i])]

        steps = Steps()
        cast_slices_backward(
            steps, odoq_h, kv_h, dq_h, dkv_h, self._stages(problem), bring,
            lambda i: [self._exchange(problem, dq_h[i], dq[i])],
            lambda i: [self._exchange(problem, dkv_h[i], dkv[i])],
        )  # fmt: skip
        return steps.plan("backward", problem.n, tuple(do), (*dq, *dkv), kept=(*q_h, *kv_h, *o_h))

    def _exchange(self, problem: Problem, send: Chunk, recv: Chunk) -> AllToAll:
        lane = KEYS_LANE if send.tensor.of_keys and problem.key_slices == 1 else LANE
        return AllToAll(lane, send, recv, Group(1, problem.layout.head_parallel), self._by_messages)

    def _sliced(self, problem: Problem, tensor: Tensor) -> list[Chunk]:
        """The rank's own chunks by heads, one for each slice."""
        (chunk,) = self._chunks(problem, tensor)
        return chunk.slices(problem.slices_of(tensor))

    def _cast(self, problem: Problem, phase: str) -> tuple[Fraction, Fraction]:
        """The rows of keys, and of queries, that a group receives in a phase, in chunks, in the mean over groups."""
        problem, forward = self.assigned(problem), phase == "forward"
        if not self._trades:
            return Fraction(rows_seen_elsewhere(problem, self._near), problem.keys.seqlen), Fraction(0)
        rows = key_rows_elsewhere(problem, forward=forward), query_rows_elsewhere(problem, forward=forward)
        return Fraction(rows[0], problem.keys.seqlen), Fraction(rows[1], problem.seqlen)

    @property
    def _trades(self) -> bool:
        """Whether queries travel."""
        return self.qo_comm is True

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

    def _attend(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        attend = trade_rows if self._trades else cast_rows if self._near == 1 else relay_rows
        attend(steps, *chunks, stages=self._stages(problem))

    def _attend_backward(self, problem: Problem, steps: Steps, *chunks: Chunk) -> None:
        cast = cast_rows_backward if self._near == 1 else relay_rows_backward
        attend = trade_rows_backward if self._trades else cast
        attend(steps, *chunks, stages=self._stages(problem))

    def _stages(self, problem: Problem) -> list[tuple[int, ...]]:
        """The members of each stage: the others, or the other nodes, in runs of nearly equal length; of slices of heads
        in runs that double.
        """
        others = problem.n // self.head_parallel(problem.n) // self._near - 1
        count = min(self.stages if isinstance(self.stages, int) else 1, others)
        ends = [others * s // count for s in range(count + 1)] if count else []
        return [tuple(range(a + 1, b + 1)) for a, b in zip(ends, ends[1:], strict=False)]
