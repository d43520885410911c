"""Mesh-Attention: a rank computes an a x b tile of the assignment matrix, so Q, KV and O all travel, but little.

Source: Chen et al., "Mesh-Attention: A New Communication-Efficient Distributed Attention with Improved Data Locality".
    tile, Q groups, KV groups          section 3.2: a Q group is a consecutive ranks, a KV group the ranks equal mod a
    local to global chunk indices      table 1: a chunk's home group and index (Chunk)
    Recv Q, Recv KV, Send O            section 3.4: receive_next and reduce_next along the group's ring
    forward schedule                   section 3.5, algorithm 2: forward_schedule
    backward schedule                  section 3.6, algorithm 3: backward_schedule
    causal mask                        section 3.7: the striped layout

Volume sent by each GPU, in chunks of N/n tokens x heads * head_dim elements, k = kv_heads / heads (section 3.8):
    forward   (a - 1) Q + 2k (b - 1) KV + (a - 1) O; a = 1 is Ring, a = n column-wise, a = sqrt(k n) the least
    backward  3 (a - 1) OdOQ + 2k (b - 1) KV + (a - 1) dQ + 2k (b - 1) dKV
    the lse travels with each O and each OdOQ and is counted apart

Consecutive ranks fill a node, and bytes cost most at its boundary. `placement` says which groups are consecutive: the
paper's Q groups, so that KV crosses, or the KV groups (Q groups are then the ranks equal mod b), so that Q and O do.
The tile, the algorithms and the volume are the same for both.

`schedule=searched` is ours, not the paper's: another order of the same transfers and blocks (mesh_search.py).

Layouts: striped (causal), contiguous, zigzag. Masks: full, causal. Refuses tiles with a * b != n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from methods.mesh_search import Tensors, TileTimes, search, steps_of
from sp_bench.plan import (
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
    Steps,
    divisors,
    line_of,
    receive_next,
    reduce_next,
)


@dataclass
class Tile:
    """The blocks of one rank's tile: which are computed, and which its received chunks make ready to execute."""

    a: int
    b: int
    q_received: int = 0
    kv_received: int = 0
    rows: list[int] = field(init=False)
    """For each row u, a bit for each block (u, v) that is not computed yet."""
    columns: list[int] = field(init=False)
    """The same by columns: for each v, a bit for each u."""

    def __post_init__(self) -> None:
        self.rows = [(1 << self.b) - 1] * self.a
        self.columns = [(1 << self.a) - 1] * self.b

    @property
    def received_all(self) -> bool:
        return self.q_received == self.a - 1 and self.kv_received == self.b - 1

    def unlocked_by_q(self) -> int:
        """n_Q: blocks that the next Recv Q makes ready."""
        return self.kv_received + 1 if self.q_received < self.a - 1 else 0

    def unlocked_by_kv(self) -> int:
        """n_KV: blocks that the next Recv KV makes ready."""
        return self.q_received + 1 if self.kv_received < self.b - 1 else 0

    def next_in_rows(self) -> tuple[int, int] | None:
        """The first ready block in row-first order."""
        ready = (1 << (self.kv_received + 1)) - 1
        for u in _own_last(self.q_received + 1):
            if self.rows[u] & ready:
                return u, _first_bit(self.rows[u] & ready)
        return None

    def next_in_columns(self) -> tuple[int, int] | None:
        """The first ready block in column-first order."""
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
    """Lines in order of priority: #0 is the rank's own chunk, which nobody waits for, so it comes last."""
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
    """Algorithm 2. `c` holds c_Q, c_KV and c_O: the blocks that hide one hop of q, kv and o."""
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
    """Algorithm 3. `c` holds c_OdOQ, c_KV, c_dQ and c_dKV.

    The paper's loop ends with the last send; the own block (0, 0), which no send waits for, may still be left then.
    """
    tile, steps, sent = Tile(a, b), [], {"dq": 0, "dkv": 0}

    def choose_next_block() -> tuple[int, int] | None:
        row, column = _first_unfinished(tile.rows), _first_unfinished(tile.columns)
        # c_dQ / n_dQ < c_dKV / n_dKV, with a zero profit where finishing the line lets nothing be sent.
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
    """The transfer with the higher profit: n_Q / c_Q > n_KV / c_KV."""
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
    """(a, b): a ranks in a Q group, b in a KV group; auto stands for every factorisation of n."""
    placement: str = "q"
    """The groups of consecutive ranks: q (the paper's) or kv; auto stands for both."""
    lanes: str = "one"
    """one: at most one transfer in flight, as in the paper's steps; each: a lane for each kind of chunk."""
    schedule: str = "paper"
    """paper: algorithms 2 and 3; searched: an order that mesh_search.py finds; auto stands for both."""

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
        if self.lanes not in ("one", "each"):
            raise RequestError(f"method.lanes={self.lanes}", "must be one or each", "method.lanes=one would work")

    def refuse(self, problem: Problem) -> None:
        """A tile must factor n."""
        if not isinstance(self.tile, str) and self.tile[0] * self.tile[1] != problem.n:
            shapes = ", ".join(f"[{a},{b}]" for a, b in tiles(problem.n))
            raise RequestError(
                f"method.tile=[{self.tile[0]},{self.tile[1]}]",
                f"a * b must be gpus={problem.n}",
                f"one of {shapes} would work",
            )

    def candidates(self, problem: Problem) -> tuple[Mesh, ...]:
        """One for each tile of n, each placement of it and each schedule."""
        self.refuse(problem)
        shapes = tiles(problem.n) if isinstance(self.tile, str) else [self.tile]
        schedules = ("paper", "searched") if self.schedule == "auto" else (self.schedule,)
        placed = ((shape, placement) for shape in shapes for placement in self._placements(*shape))
        return tuple(replace(self, tile=t, placement=p, schedule=s) for t, p in placed for s in schedules)

    def _placements(self, a: int, b: int) -> tuple[str, ...]:
        if self.placement != "auto":
            return (self.placement,)
        # With a side of 1, the only ring is all ranks in order, wherever it is placed.
        return ("q", "kv") if a > 1 and b > 1 else ("q",)

    def tile_shape(self, n: int) -> tuple[int, int]:
        """(a, b)."""
        assert not isinstance(self.tile, str), "a caller picks one of the candidates first"
        return self.tile

    def variant(self, n: int) -> str:
        """The tile, and where it is placed or scheduled otherwise than in the paper."""
        other = (" kv inside" if self.placement == "kv" else "") + (" searched" if self.schedule == "searched" else "")
        return super().variant(n) + other

    def symbols(self, problem: Problem) -> Mapping[str, float]:
        """The tile's sides."""
        a, b = self.tile_shape(problem.n)
        return {"a": a, "b": b}

    def forward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Algorithm 2 as a plan."""
        q, kv, o = self._chunks(problem, "q", "kv", "o")
        schedule = forward_schedule(*self.tile_shape(problem.n), _hiding(problem, costs, "forward", q, kv, o))
        schedule = self._searched(schedule, problem, costs, "forward", q, kv, o)
        steps = self._emit(schedule, {"q": q, "kv": kv}, {"o": o}, lambda u, v: Attend(q.at(u), kv.at(v), o.at(u)))
        return steps.plan("forward", problem.n, inputs=(q, kv), outputs=(o,))

    def backward(self, problem: Problem, costs: CostProfile) -> Plan:
        """Algorithm 3 as a plan."""
        odoq, kv, dq, dkv = self._chunks(problem, "odoq", "kv", "dq", "dkv")
        c = _hiding(problem, costs, "backward", odoq, kv, dq, dkv)
        schedule = backward_schedule(*self.tile_shape(problem.n), c)
        schedule = self._searched(schedule, problem, costs, "backward", odoq, kv, dq, dkv)
        steps = self._emit(
            schedule,
            {"odoq": odoq, "kv": kv},
            {"dq": dq, "dkv": dkv},
            lambda u, v: AttendBackward(odoq.at(u), kv.at(v), dq.at(u), dkv.at(v)),
        )
        return steps.plan("backward", problem.n, inputs=(odoq, kv), outputs=(dq, dkv))

    def chunks_sent(self, problem: Problem, phase: str) -> Mapping[str, float]:
        """Section 3.8: a - 1 along the Q group, b - 1 along the KV group."""
        a, b = self.tile_shape(problem.n)
        if phase == "forward":
            return {"q": a - 1, "kv": b - 1, "o": a - 1}
        return {"odoq": a - 1, "kv": b - 1, "dq": a - 1, "dkv": b - 1}

    def _searched(
        self, greedy: list[Step], problem: Problem, costs: CostProfile, phase: str, *chunks: Chunk
    ) -> list[Step]:
        """A better schedule than the greedy one, if it is asked for."""
        if self.schedule == "paper":
            return greedy
        hop_s, block_s = _relative_times(problem, costs, phase, *chunks)
        q, kv, o, *dkv = (chunk.tensor for chunk in chunks)
        tensors = Tensors(q, kv, o, dkv[0] if dkv else None)
        times = TileTimes(*self.tile_shape(problem.n), tensors, block_s, hop_s)
        order, placed = search(times, [step.transfer for step in greedy if step.transfer])
        return [Step(transfer, blocks) for transfer, blocks in steps_of(order, placed)]

    def _chunks(self, problem: Problem, *tensors: str) -> tuple[Chunk, ...]:
        """The rank's own chunks: KV and dKV at home in the KV group, all others in the Q group (table 1)."""
        q_group, kv_group = self._groups(problem.n)
        return tuple(Chunk(t, 0, kv_group if t in ("kv", "dkv") else q_group) for t in tensors)

    def _groups(self, n: int) -> tuple[Group, Group]:
        """The Q group and the KV group."""
        assert self.placement != "auto", "a caller picks one of the candidates first"
        a, b = self.tile_shape(n)
        if self.placement == "q":
            return Group(stride=1, size=a), Group(stride=a, size=b)
        return Group(stride=b, size=a), Group(stride=1, size=b)

    def _emit(self, schedule, gathered: Mapping[str, Chunk], reduced: Mapping[str, Chunk], block) -> Steps:
        """The operations of a schedule: each step's transfer, then the blocks that overlap it.

        What a reduce hop brings is folded as late as its lane allows, just before the next hop sends it on, so that
        blocks scheduled in between don't wait for it.
        """
        steps = Steps()
        hops = dict.fromkeys((*gathered, *reduced), 0)
        unfolded: dict[str, Fold] = {}
        for step in schedule:
            steps.next()
            for op in self._transfer(step.transfer, hops, gathered, reduced, unfolded):
                steps.do(op)
            steps.do(*(block(u, v) for u, v in step.blocks))
        steps.next()
        steps.do(*unfolded.values())
        return steps

    def _transfer(self, tensor: str, hops, gathered, reduced, unfolded: dict[str, Fold]) -> list[Op]:
        """One hop of `tensor`, preceded by the fold of what its last hop brought."""
        if not tensor:
            return []
        lane = "rings" if self.lanes == "one" else tensor
        hops[tensor] += 1
        if tensor in gathered:
            return [receive_next(gathered[tensor], hops[tensor] - 1, lane)]
        before = [unfolded.pop(tensor)] if tensor in unfolded else []
        hop, unfolded[tensor] = reduce_next(reduced[tensor], hops[tensor] - 1, lane)
        return [*before, hop]


def _hiding(problem: Problem, costs: CostProfile, phase: str, *chunks: Chunk) -> dict[str, int]:
    """c_Q, c_KV and the others, by tensor."""
    return {x.tensor: costs.hiding_blocks(problem, x.tensor, line_of(x).group, phase) for x in chunks}


def _relative_times(problem: Problem, costs: CostProfile, phase: str, *chunks: Chunk) -> tuple[dict[str, float], float]:
    """Of a hop of each tensor, and of a block; only their quotients matter."""
    if math.isinf(costs.block_s(phase)):
        return {x.tensor: 0.0 for x in chunks}, 1.0
    hops = {x.tensor: costs.transfer_s(problem.chunk_bytes(x.tensor, wire=True), line_of(x).group) for x in chunks}
    return hops, costs.block_s(phase)


def tiles(n: int) -> list[tuple[int, int]]:
    """Every (a, b) with a * b = n."""
    return [(a, n // a) for a in divisors(n)]
