"""Mesh-Attention: a rank computes an a x b tile of the assignment matrix. Q, KV and O all travel, each only a little.

Source: Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved Data Locality".
    tile, Q groups, KV groups          section 3.2: a Q group is a consecutive ranks, a KV group the ranks equal mod a
    local to global chunk indices      table 1: a chunk's home group and index (Chunk). KV goes the other way round the
                                       same ring: KV#u is chunk (i - a*u) mod n here (methods/ring.py)
    Recv Q, Recv KV, Send O            section 3.4: receive_next and reduce_next along the group's ring
    forward schedule                   section 3.5, algorithm 2: mesh_schedule.forward_schedule
    backward schedule                  section 3.6, algorithm 3: mesh_schedule.backward_schedule
    causal mask                        section 3.7: the striped layout

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads (section 3.8):
    forward   (a - 1) Q + 2k (b - 1) KV + (a - 1) O; a = 1 is Ring, a = n Pass-Q, a = sqrt(k n) the minimum
    backward  3 (a - 1) OdOQ + 2k (b - 1) KV + (a - 1) dQ + 2k (b - 1) dKV
    the lse travels with each O and each OdOQ and is counted apart

`row_sums` sends rowsum(dO * O) with Q, dO and the lse, in place of O, as the backward needs no more of it (RowSums):
2 (a - 1) for 3 (a - 1), and one number a row more.

`placement` says which groups are consecutive ranks, which fill a node: with the paper's Q groups, KV crosses nodes;
with KV groups (a Q group is then the ranks equal mod b), Q and O cross nodes. Tile, algorithms and volume are the same.

`schedule=searched` is ours, not the paper's: another order of the same transfers and blocks (mesh_search.py). So is
`slices`: the tile is computed once per slice of the heads, so that the first and last transfers of a slice hide behind
another slice's blocks. The volume is the same.

`schedule=rows` or `columns` is ours as well: the tile is computed row by row, or column by column, with one side held
and the other streaming by (mesh_lean.py). It needs less memory and hides less.

`ulysses` = u is ours too: heads are a third axis. All-to-alls give each of u consecutive ranks its heads of the tokens
of all of them (methods/ulysses.py), and the tile, now a * b = n / u, is computed with these. Groups of the tile are
then of stride u. u = 1 is Mesh-Attention; a = 1 sends what USP sends, and u = n what DeepSpeed-Ulysses does. With
K = max(kv_heads, u) / heads, as a rank needs at least one key head, each GPU sends
    forward   (2 + 2K) (u - 1) / u + 2 (a - 1) + 2K (b - 1)
    backward  (2 + 2K) (u - 1) / u for dO, dQ and dKV, and 4 (a - 1) + 4K (b - 1) in the tile
With K = 1 and a = b the forward is 4 sqrt(n / u) - 4 + 4 (u - 1) / u chunks: below Mesh by sqrt(u) where n is large,
below USP by sqrt(n / u) / 2.

Layouts: striped (causal), contiguous, zigzag. Masks: full, causal. Refuses tiles with a * b * u != n, a u that doesn't
divide heads or neither divides kv_heads nor is a multiple of it, slices that don't divide kv_heads, and more than one
slice with the paper's schedule or with u > 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from sp_bench.methods.mesh_bounds import least_s, time_of
from sp_bench.methods.mesh_lean import ORDERS, lean_order
from sp_bench.methods.mesh_schedule import backward_schedule, forward_schedule
from sp_bench.methods.mesh_search import Block, Hop, Tensors, TileTimes, search, steps_of
from sp_bench.methods.ulysses import by_heads, by_heads_backward, degrees, settled_degree
from sp_bench.plan import (
    DOWN,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Fold,
    Group,
    Method,
    Op,
    Plan,
    Problem,
    RequestError,
    RowSums,
    ScheduleTime,
    Steps,
    divisors,
    line_of,
    receive_next,
    reduce_next,
)

SLICES = (1, 2, 4, 8)
"""The numbers of head slices that auto stands for."""

Slices = list[Chunk]
"""All head slices of one chunk."""

Move = tuple[Hop | None, tuple[Block, ...]]
"""One step: at most one transfer, and the blocks that overlap it."""


@dataclass(frozen=True, kw_only=True)
class Mesh(Method):
    """Mesh-Attention with an a x b tile."""

    name: ClassVar[str] = "mesh"
    colour: ClassVar[str] = "#1a1a1a"
    marker: ClassVar[str] = "h"
    citation: ClassVar[str] = "Chen et al. 2025"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {
        "forward": "(2 + 2*max(k, u/h))*(u-1)/u + 2*(a-1) + 2*max(k, u/h)*(b-1)",
        "backward": "(2 + 2*max(k, u/h))*(u-1)/u + (3 + o)*(a-1) + 4*max(k, u/h)*(b-1)",
    }

    tile: str | tuple[int, int] = "auto"
    """(a, b): ranks of a Q group and of a KV group; auto stands for every factorisation of n / u."""
    ulysses: str | int = 1
    """u, how many consecutive ranks split the heads; auto stands for every possible degree."""
    placement: str = "q"
    """Which groups are consecutive ranks: q (the paper's) or kv; auto stands for both."""
    lanes: str = "one"
    """one: all transfers share a lane, as in the paper's steps; each: a lane per tensor."""
    schedule: str = "paper"
    """paper: algorithms 2 and 3; searched: the order that mesh_search.py finds; auto stands for both. rows, columns:
    the orders of mesh_lean.py."""
    slices: str | int = 1
    """How many equal slices of the heads; the tile is computed once per slice. More than 1 needs a searched schedule.
    auto stands for those of 1, 2, 4 and 8 that divide kv_heads."""

    row_sums: bool = False
    """Whether the backward sends rowsum(dO * O) in place of O."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = f"method.tile={self.tile}".replace(" ", "")
        rule, would_work = "must be auto or two integers [a,b] of at least 1", "method.tile=[2,2] would work on 4 ranks"
        if self.tile != "auto":
            sides = self.tile if isinstance(self.tile, list | tuple) else ()
            if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
                raise RequestError(shape, rule, would_work)
            object.__setattr__(self, "tile", tuple(self.tile))
        if self.placement not in ("q", "kv", "auto"):
            placement = f"method.placement={self.placement}"
            raise RequestError(placement, "must be q, kv or auto", "method.placement=q would work")
        if self.schedule not in ("paper", "searched", "auto", *ORDERS):
            rule = "must be paper, searched, rows, columns or auto"
            raise RequestError(f"method.schedule={self.schedule}", rule, "method.schedule=paper would work")
        if self.slices != "auto" and (type(self.slices) is not int or self.slices < 1):
            raise RequestError(
                f"method.slices={self.slices}", "must be auto or an integer of at least 1", "method.slices=2 would work"
            )
        if self.slices not in (1, "auto") and self.schedule in ("paper", *ORDERS):
            rule = f"schedule={self.schedule} goes through the tile once, with all heads"
            raise RequestError(f"method.slices={self.slices}", rule, "with method.schedule=searched it would work")
        if self.ulysses != "auto" and (type(self.ulysses) is not int or self.ulysses < 1):
            raise RequestError(
                f"method.ulysses={self.ulysses}",
                "must be auto or an integer of at least 1",
                "method.ulysses=2 would work on 4 ranks",
            )
        if 1 not in (self.ulysses, self.slices) and "auto" not in (self.ulysses, self.slices):
            raise RequestError(
                f"method.slices={self.slices}",
                f"heads are split among ranks already, by method.ulysses={self.ulysses}",
                "method.slices=1, or method.ulysses=1, would work",
            )
        if type(self.row_sums) is not bool:
            raise RequestError(
                f"method.row_sums={self.row_sums}", "must be true or false", "method.row_sums=true would work"
            )
        if self.lanes not in ("one", "each"):
            raise RequestError(f"method.lanes={self.lanes}", "must be one or each", "method.lanes=one would work")

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where a * b * u != n, u ranks can't split the heads, or `slices` doesn't fit."""
        if isinstance(self.slices, int) and problem.kv_heads % self.slices:
            would_work = f"one of {', '.join(map(str, divisors(problem.kv_heads)))} would work"
            raise RequestError(f"method.slices={self.slices}", f"must divide kv_heads={problem.kv_heads}", would_work)
        possible = _degrees(problem)
        if self.ulysses != "auto" and self.ulysses not in possible:
            raise RequestError(
                f"method.ulysses={self.ulysses}",
                f"must divide gpus={problem.n} and heads={problem.heads}, and divide kv_heads={problem.kv_heads} or be "
                "a multiple of them",
                f"one of {', '.join(map(str, possible))} would work",
            )
        if isinstance(self.tile, str) or self._degrees(problem):
            return
        degrees = possible if self.ulysses == "auto" else [int(self.ulysses)]
        shapes = ", ".join(f"[{a},{b}]" for u in degrees for a, b in tiles(problem.n // u))
        rule = "a * b must be gpus" if self.ulysses == 1 else f"a * b times ulysses={self.ulysses} must be gpus"
        raise RequestError(
            f"method.tile=[{self.tile[0]},{self.tile[1]}]", f"{rule}={problem.n}", f"one of {shapes} would work"
        )

    def candidates(self, problem: Problem) -> tuple[Mesh, ...]:
        """One variant for each degree, tile, placement, schedule and number of slices that the options allow."""
        self.refuse(problem)
        return tuple(
            replace(self, ulysses=u, tile=tile, placement=placement, schedule=schedule, slices=slices)
            for u in self._degrees(problem)
            for tile in (tiles(problem.n // u) if isinstance(self.tile, str) else [self.tile])
            for placement in self._placements(*tile)
            for schedule, slices in self._schedules(problem)
            if 1 in (u, slices)
        )

    def _degrees(self, problem: Problem) -> list[int]:
        """The degrees u that the options stand for."""
        found = _degrees(problem) if self.ulysses == "auto" else [int(self.ulysses)]
        if isinstance(self.tile, str):
            return found
        return [u for u in found if self.tile[0] * self.tile[1] * u == problem.n]

    def head_parallel(self, n: int) -> int:
        """The degree u. Raises RequestError where it doesn't divide n, or while it is auto and matters."""
        return settled_degree(self.ulysses, n)

    def _schedules(self, problem: Problem) -> list[tuple[str, int]]:
        """The (schedule, slices) pairs that the options stand for."""
        schedules = ("paper", "searched") if self.schedule == "auto" else (self.schedule,)
        possible = [s for s in SLICES if problem.kv_heads % s == 0] if self.slices == "auto" else [int(self.slices)]
        return [(schedule, s) for schedule in schedules for s in possible if s == 1 or schedule == "searched"]

    def head_slices(self, problem: Problem) -> int:
        """The number of head slices: the option `slices`."""
        assert not isinstance(self.slices, str), "a caller picks one of the candidates first"
        return self.slices

    def _placements(self, a: int, b: int) -> tuple[str, ...]:
        if self.placement != "auto":
            return (self.placement,)
        # With a side of 1 there is one ring, of all ranks in order: both placements are the same.
        return ("q", "kv") if a > 1 and b > 1 else ("q",)

    def tile_shape(self, n: int) -> tuple[int, int]:
        """The tile's sides (a, b)."""
        assert not isinstance(self.tile, str), "a caller picks one of the candidates first"
        return self.tile

    def leaner(self) -> tuple[Mesh, ...]:
        """The orders of mesh_lean.py, which take all heads at once."""
        return tuple(replace(self, schedule=order, slices=1) for order in ORDERS)

    def variant(self, n: int) -> str:
        """The tile in words, with the options that differ from the paper's."""
        order = {"searched": " searched", "rows": " by rows", "columns": " by columns"}.get(self.schedule, "")
        other = (" kv inside" if self.placement == "kv" else "") + order
        heads = f"ulysses {self.ulysses} x " if self.ulysses != 1 else ""
        other += f" in {self.slices} slices" if self.slices != 1 else ""
        return heads + super().variant(n) + other + (" row sums" if self.row_sums else "")

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of a, b and u; o is 1 if O travels in the backward, else 0."""
        a, b = self.tile_shape(problem.n)
        return {"a": a, "b": b, "u": self.head_parallel(problem.n), "o": 1 - self.row_sums}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of algorithm 2, or of the searched schedule; between all-to-alls where heads are split."""
        if problem.layout.head_parallel > 1:
            q, kv, o = self._chunks(problem, "q_h", "kv_h", "o_h")
            return by_heads(problem, q[0], kv[0], o[0], lambda steps: self._attend(steps, problem, costs, q, kv, o))
        q, kv, o = self._chunks(problem, "q", "kv", "o")
        steps = Steps()
        self._attend(steps, problem, costs, q, kv, o)
        return steps.plan("forward", problem.n, inputs=(*q, *kv), outputs=tuple(o))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of algorithm 3, or of the searched schedule; between all-to-alls where heads are split."""
        if problem.layout.head_parallel > 1:
            q, o = self._chunks(problem, "q_h", "o_h")
            odoq, kv, dq, dkv = chunks = self._chunks(problem, "odoq_h", "kv_h", "dq_h", "dkv_h")
            gathered, reduced = (odoq[0], kv[0]), (dq[0], dkv[0])
            return by_heads_backward(
                problem, q[0], o[0], *gathered, *reduced, lambda s: self._attend_backward(s, problem, costs, *chunks)
            )
        odoq, kv, dq, dkv = self._chunks(problem, "odoq", "kv", "dq", "dkv")
        steps = Steps()
        self._attend_backward(steps, problem, costs, odoq, kv, dq, dkv)
        return steps.plan("backward", problem.n, inputs=(*odoq, *kv), outputs=(*dq, *dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float | Fraction]:
        """Section 3.8: per slice, a - 1 chunks of each tensor of the Q group and b - 1 of each of the KV group.

        All-to-alls send (u - 1) / u chunks of each tensor; a chunk of kv_h has max(kv_heads, u) heads.
        """
        a, b = self.tile_shape(problem.n)
        q, kv = (a - 1) * problem.head_slices, (b - 1) * problem.head_slices
        u = problem.layout.head_parallel
        if u > 1:
            dealt = Fraction(u - 1, u)
            if phase == "forward":
                return {"q": dealt, "q_h": q, "kv_h": dealt + kv, "o_h": q, "out": dealt}
            return {"do": dealt, f"{self._sent}_h": q, "kv_h": kv, "dq_h": q, "dq": dealt, "dkv_h": kv + dealt}
        if phase == "forward":
            return {"q": q, "kv": kv, "o": q}
        return {self._sent: q, "kv": kv, "dq": q, "dkv": kv}

    @property
    def _sent(self) -> str:
        """The tensor that the backward sends along Q groups."""
        return "doq" if self.row_sums else "odoq"

    def schedule_time(self, problem: Problem, phase: str, costs: CostProfile) -> ScheduleTime | None:
        """The time of the tile's steps, and the least time of any order of them (mesh_bounds.py).

        None with unknown costs, and with a lane for each tensor.
        """
        if self.lanes != "one" or math.isinf(costs.block_s(phase)):
            return None
        problem = self.dealt(problem)
        suffix = "_h" if problem.layout.head_parallel > 1 else ""
        names: tuple[str, ...] = ("q", "kv", "o") if phase == "forward" else ("odoq", "kv", "dq", "dkv")
        sent = [self._sent if name == "odoq" else name for name in names]
        moving: dict[str, Slices] = dict(
            zip(names, self._chunks(problem, *(name + suffix for name in sent)), strict=True)
        )
        times, moves = self._moves(problem, costs.of_a_slice(problem), phase, moving)
        return ScheduleTime(time_of(times, moves), least_s(times))

    def _attend(self, steps: Steps, problem: Problem, costs: CostProfile, q: Slices, kv: Slices, o: Slices) -> None:
        """Add the tile's forward."""
        moving = {"q": q, "kv": kv, "o": o}
        _, moves = self._moves(problem, costs, "forward", moving)
        self._emit(steps, moves, (q, kv), (o,), lambda i, u, v: [Attend(q[i].at(u), kv[i].at(v), o[i].at(u))])

    def _attend_backward(self, steps: Steps, problem: Problem, costs: CostProfile, *chunks: Slices) -> None:
        """Add the tile's backward."""
        odoq, kv, dq, dkv = chunks
        sent = [x._replace(tensor=x.tensor.replace("odoq", self._sent)) for x in odoq]
        moving = {"odoq": sent, "kv": kv, "dq": dq, "dkv": dkv}
        _, moves = self._moves(problem, costs, "backward", moving)
        summed = self.row_sums and self.tile_shape(problem.n)[0] > 1
        whole = {(i, 0) for i in range(len(odoq))}
        """The (slice, row) of every odoq that is there."""

        def block(i: int, u: int, v: int) -> list[Op]:
            first = summed and (i, u) not in whole
            whole.add((i, u))
            put_back = [RowSums((sent[i].at(u),), odoq[i].at(u))] if first else []
            return [*put_back, AttendBackward(odoq[i].at(u), kv[i].at(v), dq[i].at(u), dkv[i].at(v))]

        if summed:
            steps.next()
            steps.do(*(RowSums((mine,), less) for mine, less in zip(odoq, sent, strict=True)))
        self._emit(steps, moves, (sent, kv), (dq, dkv), block)

    def _moves(
        self, problem: Problem, costs: CostProfile, phase: str, moving: Mapping[str, Slices]
    ) -> tuple[TileTimes, list[Move]]:
        """The tile's costs, and the steps of the schedule that the option names."""
        names = {name: slices[0].tensor for name, slices in moving.items()}
        hop_s, block_s = _relative_times(problem, costs, phase, *moving.values())
        q, kv, o, *dkv = names.values()
        tensors = Tensors(q, kv, o, dkv[0] if dkv else None)
        times = TileTimes(*self.tile_shape(problem.n), tensors, block_s, hop_s, problem.head_slices)
        if self.schedule in ORDERS:
            return times, list(lean_order(self.schedule, times.a, times.b, tensors))
        schedule = forward_schedule if phase == "forward" else backward_schedule
        greedy = schedule(times.a, times.b, _hiding(problem, costs, phase, moving), runs=self.fuse)
        if self.schedule == "searched":
            return times, list(steps_of(*search(times, [names[step.transfer] for step in greedy if step.transfer])))
        return times, [
            (
                Hop(0, names[step.transfer]) if step.transfer else None,
                tuple(Block(0, u, v) for u, v in step.blocks),
            )
            for step in greedy
        ]

    def _chunks(self, problem: Problem, *tensors: str) -> tuple[Slices, ...]:
        """The rank's own chunks, by slice. The home of KV and dKV is the KV group, of others the Q group (table 1)."""
        q_group, kv_group = self._groups(problem)
        chunks = (Chunk(t, 0, kv_group if t.removesuffix("_h") in ("kv", "dkv") else q_group) for t in tensors)
        return tuple(chunk.slices(problem.head_slices) for chunk in chunks)

    def _groups(self, problem: Problem) -> tuple[Group, Group]:
        """(Q group, KV group); their ranks have the same heads."""
        assert self.placement != "auto", "a caller picks one of the candidates first"
        (a, b), u = self.tile_shape(problem.n), problem.layout.head_parallel
        if self.placement == "q":
            return Group(stride=u, size=a), Group(stride=u * a, size=b, way=DOWN)
        return Group(stride=u * b, size=a), Group(stride=u, size=b, way=DOWN)

    def _emit(
        self, steps: Steps, moves: list[Move], gathered: Sequence[Slices], reduced: Sequence[Slices], block
    ) -> None:
        """Add the operations of a schedule: each step's transfer, then the blocks that overlap it.

        The arrival of a reduce hop is folded just before the next hop sends the sum on, so that blocks scheduled in
        between don't wait for it.
        """
        hops = Counter[Hop]()
        unfolded: dict[Hop, Fold] = {}
        received = {slices[0].tensor: slices for slices in gathered}
        sent = {slices[0].tensor: slices for slices in reduced}
        for hop, blocks in moves:
            steps.next()
            if hop:
                lane = "rings" if self.lanes == "one" else hop.tensor
                if hop.tensor in received:
                    steps.do(receive_next(received[hop.tensor][hop.slice], hops[hop], lane))
                else:
                    steps.do(*([unfolded.pop(hop)] if hop in unfolded else []))
                    passed, unfolded[hop] = reduce_next(sent[hop.tensor][hop.slice], hops[hop], lane)
                    steps.do(passed)
                hops[hop] += 1
            for each in blocks:
                steps.do(*block(*each))
        steps.next()
        steps.do(*unfolded.values())


def _hiding(problem: Problem, costs: CostProfile, phase: str, moving: Mapping[str, Slices]) -> dict[str, int]:
    """The paper's c_Q, c_KV, ... by its name of the tensor (CostProfile.hiding_blocks)."""
    return {name: costs.hiding_blocks(problem, x.tensor, line_of(x).group, phase) for name, (x, *_) in moving.items()}


def _relative_times(
    problem: Problem, costs: CostProfile, phase: str, *chunks: Slices
) -> tuple[dict[str, float], float]:
    """(time of a hop by tensor, time of a block); only their ratios matter."""
    if math.isinf(costs.block_s(phase)):
        return {x.tensor: 0.0 for x, *_ in chunks}, 1.0
    hops = {x.tensor: costs.transfer_s(problem.chunk_bytes(x.tensor, wire=True), line_of(x).group) for x, *_ in chunks}
    return hops, costs.block_s(phase)


def tiles(n: int) -> list[tuple[int, int]]:
    """Every tile (a, b) with a * b = n."""
    return [(a, n // a) for a in divisors(n)]


def _degrees(problem: Problem) -> list[int]:
    """Every u that divides n and splits heads and key heads evenly."""
    return [u for u in degrees(problem) if problem.n % u == 0]
