"""Mesh-Attention: a rank computes an a x b tile of the assignment matrix. Q, KV and O all travel, each only a little.

Source: Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved Data Locality".
    tile, Q groups, KV groups          section 3.2: a Q group is a consecutive ranks, a KV group the ranks equal mod a
    local to global chunk indices      table 1: a chunk's home group and index (Chunk). KV goes the other way round the
                                       same ring: KV#u is chunk (i - a*u) mod n here (methods/ring.py)
    Recv Q, Recv KV, Send O            section 3.4: receive_next and reduce_next along the group's ring
    forward schedule                   section 3.5, algorithm 2: forward_schedule
    backward schedule                  section 3.6, algorithm 3: backward_schedule
    causal mask                        section 3.7: the striped layout

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads (section 3.8):
    forward   (a - 1) Q + 2k (b - 1) KV + (a - 1) O; a = 1 is Ring, a = n Pass-Q, a = sqrt(k n) the minimum
    backward  3 (a - 1) OdOQ + 2k (b - 1) KV + (a - 1) dQ + 2k (b - 1) dKV
    the lse travels with each O and each OdOQ and is counted apart

`placement` says which groups are consecutive ranks, which fill a node: with the paper's Q groups, KV crosses nodes;
with KV groups (a Q group is then the ranks equal mod b), Q and O cross nodes. Tile, algorithms and volume are the same.

`schedule=searched` is ours, not the paper's: another order of the same transfers and blocks (mesh_search.py). So is
`slices`: the tile is computed once per slice of the heads, so that the first and last transfers of a slice hide behind
another slice's blocks. The volume is the same.

Layouts: striped (causal), contiguous, zigzag. Masks: full, causal. Refuses tiles with a * b != n, slices that don't
divide kv_heads, and more than one slice with the paper's schedule.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from sp_bench.methods.mesh_search import Block, Hop, Tensors, TileTimes, search, steps_of
from sp_bench.plan import (
    DOWN,
    Attend,
    AttendBackward,
    Chunk,
    CostProfile,
    Fold,
    Group,
    Method,
    Plan,
    Problem,
    RequestError,
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


@dataclass
class Tile:
    """State of one rank's tile: the blocks still to compute, and how many chunks were received."""

    a: int
    b: int
    q_received: int = 0
    kv_received: int = 0
    rows: list[int] = field(init=False)
    """For each row u, a bit set of the columns v whose block is not computed yet."""
    columns: list[int] = field(init=False)
    """For each column v, a bit set of the rows u whose block is not computed yet."""

    def __post_init__(self) -> None:
        self.rows = [(1 << self.b) - 1] * self.a
        self.columns = [(1 << self.a) - 1] * self.b

    @property
    def received_all(self) -> bool:
        return self.q_received == self.a - 1 and self.kv_received == self.b - 1

    def unlocked_by_q(self) -> int:
        """The paper's n_Q: blocks that the next Recv Q makes ready."""
        return self.kv_received + 1 if self.q_received < self.a - 1 else 0

    def unlocked_by_kv(self) -> int:
        """The paper's n_KV: blocks that the next Recv KV makes ready."""
        return self.q_received + 1 if self.kv_received < self.b - 1 else 0

    def next_in_rows(self) -> tuple[int, int] | None:
        """The first ready block in row-first order, (u, v); None if none is ready."""
        ready = (1 << (self.kv_received + 1)) - 1
        for u in _own_last(self.q_received + 1):
            if self.rows[u] & ready:
                return u, _first_bit(self.rows[u] & ready)
        return None

    def next_in_columns(self) -> tuple[int, int] | None:
        """The first ready block in column-first order, (u, v); None if none is ready."""
        ready = (1 << (self.q_received + 1)) - 1
        for v in _own_last(self.kv_received + 1):
            if self.columns[v] & ready:
                return _first_bit(self.columns[v] & ready), v
        return None

    def compute(self, block: tuple[int, int]) -> tuple[int, int]:
        u, v = block
        self.rows[u] &= ~(1 << v)
        self.columns[v] &= ~(1 << u)
        return block


def _own_last(count: int) -> list[int]:
    """Rows or columns in order of priority. #0, the rank's own chunk, is last, as no transfer waits for it."""
    return [*range(1, count), 0]


def _first_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


@dataclass(frozen=True)
class Step:
    """One step: at most one transfer, and the blocks that overlap it."""

    transfer: str
    """The tensor that moves one hop (q, kv, o, odoq, dq, dkv), or "" for none."""
    blocks: tuple[tuple[int, int], ...]


def forward_schedule(a: int, b: int, c: Mapping[str, int]) -> list[Step]:
    """The steps of algorithm 2. `c` has c_Q, c_KV and c_O, by tensor: how many blocks hide one hop of it."""
    tile, steps, sent_o = Tile(a, b), [], 0

    def compute_blocks(x: int) -> tuple[tuple[int, int], ...]:
        blocks = []
        while len(blocks) < x and (block := tile.next_in_rows()):
            blocks.append(tile.compute(block))
        return tuple(blocks)

    while not tile.received_all:
        blocks = compute_blocks(c[chosen := _receive(tile, "q", c)])
        steps.append(Step(chosen, blocks))
        _received(tile, chosen)
    while sent_o < a - 1:
        while tile.rows[sent_o + 1]:
            steps.append(Step("", compute_blocks(1)))
        steps.append(Step("o", compute_blocks(c["o"])))
        sent_o += 1
    while any(tile.rows):
        steps.append(Step("", compute_blocks(1)))
    return steps


def backward_schedule(a: int, b: int, c: Mapping[str, int]) -> list[Step]:
    """The steps of algorithm 3. `c` has c_OdOQ, c_KV, c_dQ and c_dKV, by tensor: how many blocks hide one hop of it.

    The paper's loop ends with the last send. Block (0, 0), which no send waits for, may be left then: it is added.
    """
    tile, steps, sent = Tile(a, b), [], {"dq": 0, "dkv": 0}

    def choose_next_block() -> tuple[int, int] | None:
        row, column = _first_unfinished(tile.rows), _first_unfinished(tile.columns)
        # c_dQ / n_dQ < c_dKV / n_dKV. Row and column 0 have no profit, as finishing them allows no send.
        dq_profit = c["dq"] * tile.columns[column].bit_count() if row else 0
        dkv_profit = c["dkv"] * tile.rows[row].bit_count() if column else 0
        return tile.next_in_columns() if dq_profit < dkv_profit else tile.next_in_rows()

    def compute_blocks(x: int) -> tuple[tuple[int, int], ...]:
        blocks = []
        while len(blocks) < x and (block := choose_next_block()):
            blocks.append(tile.compute(block))
        return tuple(blocks)

    def valid(tensor: str) -> bool:
        lines = tile.rows if tensor == "dq" else tile.columns
        return sent[tensor] + 1 < len(lines) and not lines[sent[tensor] + 1]

    while not tile.received_all:
        blocks = compute_blocks(c[chosen := _receive(tile, "odoq", c)])
        steps.append(Step(chosen, blocks))
        _received(tile, chosen)
    while sent["dq"] < a - 1 or sent["dkv"] < b - 1:
        while not (valid("dq") or valid("dkv")):
            steps.append(Step("", compute_blocks(1)))
        for tensor in ("dq", "dkv"):
            if valid(tensor):
                steps.append(Step(tensor, compute_blocks(c[tensor])))
                sent[tensor] += 1
    while any(tile.rows):
        steps.append(Step("", compute_blocks(1)))
    return steps


def _receive(tile: Tile, q: str, c: Mapping[str, int]) -> str:
    """The tensor to receive next: `q` if n_Q / c_Q > n_KV / c_KV, else kv."""
    return q if tile.unlocked_by_q() * c["kv"] > tile.unlocked_by_kv() * c[q] else "kv"


def _received(tile: Tile, tensor: str) -> None:
    if tensor == "kv":
        tile.kv_received += 1
    else:
        tile.q_received += 1


def _first_unfinished(lines: Sequence[int]) -> int:
    return next((i for i in _own_last(len(lines)) if lines[i]), 0)


@dataclass(frozen=True, kw_only=True)
class Mesh(Method):
    """Mesh-Attention with an a x b tile."""

    name: ClassVar[str] = "mesh"
    citation: ClassVar[str] = "Chen et al. 2025"
    layouts: ClassVar[tuple[str, ...]] = ("contiguous", "striped", "zigzag")
    formula: ClassVar[Mapping[str, str]] = {"forward": "2*(a-1) + 2*k*(b-1)", "backward": "4*(a-1) + 4*k*(b-1)"}

    tile: str | tuple[int, int] = "auto"
    """(a, b): ranks of a Q group and of a KV group; auto stands for every factorisation of n."""
    placement: str = "q"
    """Which groups are consecutive ranks: q (the paper's) or kv; auto stands for both."""
    lanes: str = "one"
    """one: all transfers share a lane, as in the paper's steps; each: a lane per tensor."""
    schedule: str = "paper"
    """paper: algorithms 2 and 3; searched: the order that mesh_search.py finds; auto stands for both."""
    slices: str | int = 1
    """How many equal slices of the heads; the tile is computed once per slice. More than 1 needs a searched schedule.
    auto stands for those of 1, 2, 4 and 8 that divide kv_heads."""

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
        if self.schedule not in ("paper", "searched", "auto"):
            rule = "must be paper, searched or auto"
            raise RequestError(f"method.schedule={self.schedule}", rule, "method.schedule=paper would work")
        if self.slices != "auto" and (type(self.slices) is not int or self.slices < 1):
            raise RequestError(
                f"method.slices={self.slices}", "must be auto or an integer of at least 1", "method.slices=2 would work"
            )
        if self.slices not in (1, "auto") and self.schedule == "paper":
            rule = "the paper's schedules go through the tile once, with all heads"
            raise RequestError(f"method.slices={self.slices}", rule, "with method.schedule=searched it would work")
        if self.lanes not in ("one", "each"):
            raise RequestError(f"method.lanes={self.lanes}", "must be one or each", "method.lanes=one would work")

    def refuse(self, problem: Problem) -> None:
        """Raise RequestError where a * b != n, or `slices` doesn't divide kv_heads."""
        if isinstance(self.slices, int) and problem.kv_heads % self.slices:
            would_work = f"one of {', '.join(map(str, divisors(problem.kv_heads)))} would work"
            raise RequestError(f"method.slices={self.slices}", f"must divide kv_heads={problem.kv_heads}", would_work)
        if not isinstance(self.tile, str) and self.tile[0] * self.tile[1] != problem.n:
            shapes = ", ".join(f"[{a},{b}]" for a, b in tiles(problem.n))
            raise RequestError(
                f"method.tile=[{self.tile[0]},{self.tile[1]}]",
                f"a * b must be gpus={problem.n}",
                f"one of {shapes} would work",
            )

    def candidates(self, problem: Problem) -> tuple[Mesh, ...]:
        """One variant for each tile, placement, schedule and number of slices that the options allow."""
        self.refuse(problem)
        shapes = tiles(problem.n) if isinstance(self.tile, str) else [self.tile]
        placed = ((shape, placement) for shape in shapes for placement in self._placements(*shape))
        scheduled = self._schedules(problem)
        return tuple(
            replace(self, tile=tile, placement=placement, schedule=schedule, slices=slices)
            for tile, placement in placed
            for schedule, slices in scheduled
        )

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

    def variant(self, n: int) -> str:
        """The tile in words, with the placement, schedule and slices that differ from the paper's."""
        other = (" kv inside" if self.placement == "kv" else "") + (" searched" if self.schedule == "searched" else "")
        return super().variant(n) + other + (f" in {self.slices} slices" if self.slices != 1 else "")

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The values of a and b."""
        a, b = self.tile_shape(problem.n)
        return {"a": a, "b": b}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of algorithm 2, or of the searched schedule."""
        q, kv, o = self._chunks(problem, "q", "kv", "o")
        schedule = forward_schedule(*self.tile_shape(problem.n), _hiding(problem, costs, "forward", q, kv, o))
        moves = self._moves(schedule, problem, costs, "forward", q, kv, o)
        steps = self._emit(moves, (q, kv), (o,), lambda i, u, v: Attend(q[i].at(u), kv[i].at(v), o[i].at(u)))
        return steps.plan("forward", problem.n, inputs=(*q, *kv), outputs=tuple(o))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """The plan of algorithm 3, or of the searched schedule."""
        odoq, kv, dq, dkv = self._chunks(problem, "odoq", "kv", "dq", "dkv")
        c = _hiding(problem, costs, "backward", odoq, kv, dq, dkv)
        schedule = backward_schedule(*self.tile_shape(problem.n), c)
        moves = self._moves(schedule, problem, costs, "backward", odoq, kv, dq, dkv)
        steps = self._emit(
            moves,
            (odoq, kv),
            (dq, dkv),
            lambda i, u, v: AttendBackward(odoq[i].at(u), kv[i].at(v), dq[i].at(u), dkv[i].at(v)),
        )
        return steps.plan("backward", problem.n, inputs=(*odoq, *kv), outputs=(*dq, *dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float]:
        """Section 3.8: per slice, a - 1 chunks of each tensor of the Q group and b - 1 of each of the KV group."""
        a, b = self.tile_shape(problem.n)
        q, kv = (a - 1) * problem.head_slices, (b - 1) * problem.head_slices
        if phase == "forward":
            return {"q": q, "kv": kv, "o": q}
        return {"odoq": q, "kv": kv, "dq": q, "dkv": kv}

    def _moves(
        self, greedy: list[Step], problem: Problem, costs: CostProfile, phase: str, *chunks: Slices
    ) -> list[Move]:
        """The steps of the greedy schedule, or of the searched one if the option says so."""
        if self.schedule == "paper":
            return [
                (Hop(0, step.transfer) if step.transfer else None, tuple(Block(0, u, v) for u, v in step.blocks))
                for step in greedy
            ]
        hop_s, block_s = _relative_times(problem, costs, phase, *chunks)
        q, kv, o, *dkv = (slices[0].tensor for slices in chunks)
        tensors = Tensors(q, kv, o, dkv[0] if dkv else None)
        times = TileTimes(*self.tile_shape(problem.n), tensors, block_s, hop_s, problem.head_slices)
        return list(steps_of(*search(times, [step.transfer for step in greedy if step.transfer])))

    def _chunks(self, problem: Problem, *tensors: str) -> tuple[Slices, ...]:
        """The rank's own chunks, by slice. The home of KV and dKV is the KV group, of others the Q group (table 1)."""
        q_group, kv_group = self._groups(problem.n)
        chunks = (Chunk(t, 0, kv_group if t in ("kv", "dkv") else q_group) for t in tensors)
        return tuple(chunk.slices(problem.head_slices) for chunk in chunks)

    def _groups(self, n: int) -> tuple[Group, Group]:
        """(Q group, KV group)."""
        assert self.placement != "auto", "a caller picks one of the candidates first"
        a, b = self.tile_shape(n)
        if self.placement == "q":
            return Group(stride=1, size=a), Group(stride=a, size=b, way=DOWN)
        return Group(stride=b, size=a), Group(stride=1, size=b, way=DOWN)

    def _emit(self, moves: list[Move], gathered: Sequence[Slices], reduced: Sequence[Slices], block) -> Steps:
        """The operations of a schedule: each step's transfer, then the blocks that overlap it.

        The arrival of a reduce hop is folded just before the next hop sends the sum on, so that blocks scheduled in
        between don't wait for it.
        """
        steps, hops = Steps(), Counter[Hop]()
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
            steps.do(*(block(*each) for each in blocks))
        steps.next()
        steps.do(*unfolded.values())
        return steps


def _hiding(problem: Problem, costs: CostProfile, phase: str, *chunks: Slices) -> dict[str, int]:
    """The paper's c_Q, c_KV, ... by tensor (CostProfile.hiding_blocks)."""
    return {x.tensor: costs.hiding_blocks(problem, x.tensor, line_of(x).group, phase) for x, *_ in chunks}


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
